"""Files of the command line: prompts that come in, results that go out. No torch.

Prompts come as JSON Lines or as plain text, a prompt a line (`read_prompts`). Results leave as JSON Lines, one whole
line the moment a request ends (`ResultFile`), so that a run that was interrupted can be taken up again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flatbed.errors import ConfigError, PromptFileError
from flatbed.request import Completion, Output, SamplingParams

Prompt = str | list[dict[str, Any]] | list[int]

STDIN = "-"

_JSON_SUFFIXES = (".jsonl", ".json")
_SOURCES = ("prompt", "messages", "token_ids")
_RECORD_START = b'{"id": "'
_ENDED: Collection[str | None] = ("eos", "length", "stop", "error")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One request as a prompt file asks for it.

    Attributes:
        line: the line's number, from 1.
        request_id: the line's `id`, or the line's number as a string.
        prompt: a string, a list of chat messages, or a list of token ids.
        sampling: the command line's settings with the line's own fields in their place. Values are checked by the
            engine, which refuses that request alone.
    """

    line: int
    request_id: str
    prompt: Prompt
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class PromptFile:
    """What a prompt file holds: the lines that could be read, and an error for each one that could not."""

    lines: list[PromptLine]
    errors: list[PromptFileError]


def read_prompts(path: str | os.PathLike[str], base: SamplingParams, *, chat: bool = False) -> PromptFile:
    """Reads a prompt file, or standard input for `-`.

    A file named `.jsonl` or `.json` is JSON Lines; anything else is if its first line that is not blank is a JSON
    object, and plain text otherwise. See `parse_prompts` for what a line may hold.

    Raises ConfigError when the file cannot be read.
    """
    name = os.fspath(path)
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the prompts: {error}") from error
    as_json = None if name == STDIN or not name.lower().endswith(_JSON_SUFFIXES) else True
    return parse_prompts(data, base, chat=chat, as_json=as_json)


def parse_prompts(data: bytes, base: SamplingParams, *, chat: bool = False, as_json: bool | None = None) -> PromptFile:
    """The requests in the bytes of a prompt file (UTF-8). Blank lines count, and are skipped.

    A JSON line is an object with exactly one of `prompt` (a string), `messages` (chat messages) and `token_ids`,
    optionally an `id` (a string or a whole number), and any field of SamplingParams. A line that is anything else, or
    repeats the id of an earlier one, becomes an error and does not stop the others.

    Args:
        base: settings for whatever a line does not set itself.
        chat: make a chat of each plain prompt, with the prompt as the user's message.
        as_json: whether the lines are JSON; None looks at the first one that is not blank.
    """
    # Not str.splitlines(): a line ends at a newline only, and U+2028 may stand inside of a JSON string.
    numbered = [
        (number, line.removesuffix(b"\r"))
        for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
        if line.strip()
    ]
    if as_json is None:
        as_json = bool(numbered) and _is_json_object(numbered[0][1])
    file = PromptFile([], [])
    line_of: dict[str, int] = {}
    for number, line in numbered:
        try:
            request = _read_line(line, number, base, chat, as_json)
            first = line_of.setdefault(request.request_id, number)
            if first != number:
                raise PromptFileError(f"the id {request.request_id!r} is that of line {first} already", line=number)
        except PromptFileError as error:
            file.errors.append(error)
        else:
            file.lines.append(request)
    return file


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _read_line(line: bytes, number: int, base: SamplingParams, chat: bool, as_json: bool) -> PromptLine:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise PromptFileError(f"not UTF-8: {error}", line=number) from error
    fields = _json_fields(text, number) if as_json else {"prompt": text}
    prompt = _prompt_of(fields, number)
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    request_id = fields.get("id", number)
    if not isinstance(request_id, (str, int)) or isinstance(request_id, bool):
        raise PromptFileError(f"`id` must be a string or a whole number, got {request_id!r}", line=number)
    own = {name: value for name, value in fields.items() if name != "id" and name not in _SOURCES}
    return PromptLine(number, str(request_id), prompt, SamplingParams.from_mapping(own, base))


def _json_fields(text: str, number: int) -> dict[str, Any]:
    try:
        fields = json.loads(text)
        # Only an escape can bring an unpaired surrogate, which is no character and which tokenizers raise on.
        if "\\ud" in text.lower():
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise PromptFileError("holds half a surrogate pair, which is no character", line=number) from error
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"not JSON: {error}", line=number) from error
    if not isinstance(fields, dict):
        raise PromptFileError(f"must be a JSON object, got {_kind(fields)}", line=number)
    known = (*_SOURCES, "id", *SamplingParams.names())
    for name in fields:
        if name not in known:
            raise PromptFileError(f"unknown field {name!r}; known: {', '.join(known)}", line=number)
    return fields


def _prompt_of(fields: Mapping[str, Any], number: int) -> Prompt:
    given = [name for name in _SOURCES if name in fields]
    if len(given) != 1:
        raise PromptFileError(
            f"needs exactly one of {', '.join(_SOURCES)}; it has {' and '.join(given) or 'none'}", line=number
        )
    value = fields[given[0]]
    fine, wanted = {
        "prompt": (isinstance(value, str), "a string"),
        "messages": (_is_chat(value), "a list of objects, each with a string `role` and a `content`"),
        "token_ids": (_is_token_ids(value), "a list of whole numbers"),
    }[given[0]]
    if not fine:
        raise PromptFileError(f"`{given[0]}` must be {wanted}, got {_kind(value)}", line=number)
    return cast("Prompt", value)


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and value != []
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in value)


def _kind(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def seed_of(seed: int, request_id: str) -> int:
    """A seed for one request out of the run's seed and the request's id, the same in every run.

    The engine would number the requests instead; then a run that does only what is missing would draw other samples
    than the run that was interrupted.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest(), "little")


# ---------------------------------------------------------------------------------------------------------- results


def record_of(output: Output) -> dict[str, Any]:
    """The JSON object that is written for one finished or refused request.

    `text`, `token_ids`, `finish_reason` and the log-probabilities are those of the first sample; with several
    samples, `samples` has them all. `error` is a message or null. Times are in seconds since submission, null where
    the request never got there. Log-probabilities are there only if they were asked for.
    """
    timings = output.timings
    record: dict[str, Any] = {
        "id": output.request_id,
        **_sample_record(output.samples[0]),
        "error": None if output.error is None else str(output.error),
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.cached_tokens,
        "timings": {
            "queued_s": timings.queued_s,
            "time_to_first_token_s": timings.time_to_first_token_s,
            "total_s": timings.total_s,
        },
    }
    if len(output.samples) > 1:
        record["samples"] = [_sample_record(sample) for sample in output.samples]
    return record


def _sample_record(sample: Completion) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
    }
    if sample.logprobs is not None:
        record["logprobs"] = sample.logprobs
    if sample.raw_logprobs is not None:
        record["raw_logprobs"] = sample.raw_logprobs
    return record


class ResultFile:
    """A file of results that grows by whole lines, one record (`record_of`) for each request that ended.

    A line goes to the system in one write at the end of the file, so that nothing of it waits in this process. A
    process that is killed leaves the records of all requests that had ended; should the system have been stopped in
    the middle of a line, `resume` repairs that.

    With `resume`, `done` has the ids that need no more work: those with a record without an error. Records with an
    error are taken out of the file, so that those requests run again and every id keeps one record.

    Attributes:
        done: ids with a record in the file: from earlier runs, and of this one.

    Raises:
        ConfigError: when opened, if the file cannot be written, or has content without `resume`, or, with `resume`,
            has lines that are no results.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.path = Path(path)
        self.done: set[str] = set()
        try:
            if _has_content(self.path):
                if not resume:
                    raise ConfigError(
                        f"{path} has results already: run again with --resume to do only what is missing, "
                        "or give another file"
                    )
                self.done = _repair(self.path)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot write results: {error}") from error

    def write(self, output: Output) -> bool:
        """Appends the record of a request that ended, and says whether it did.

        One that is in the file already is not written twice. An output that did not come to its end (cancelled, say)
        is left out: it is missing, so `resume` runs it.
        """
        if output.request_id in self.done or not all(s.finish_reason in _ENDED for s in output.samples):
            return False
        # A lone surrogate comes out as \udXXX, which is how JSON writes it.
        line = json.dumps(record_of(output), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]
        self.done.add(output.request_id)
        return True

    def close(self) -> None:
        """Ends the use of the file. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _has_content(path: Path) -> bool:
    """Whether it is a file with content; devices and pipes (`/dev/stdout`) have none to lose."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _repair(path: Path) -> set[str]:
    """Takes half a last line and records with an error out of the file. Gives the ids of the records that stay."""
    data = path.read_bytes()
    *lines, rest = data.split(b"\n")
    done: set[str] = set()
    kept: list[bytes] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            request_id, error = str(record["id"]), record["error"]
        except (ValueError, RecursionError, TypeError, KeyError) as problem:
            raise _not_results(path, number) from problem
        if error is None:
            done.add(request_id)
            kept.append(line + b"\n")
    if rest[: len(_RECORD_START)] != _RECORD_START[: len(rest)]:
        raise _not_results(path, len(lines) + 1)  # not half a record, so not to be cut off
    if len(kept) < len(lines):
        _replace(path, b"".join(kept))
    elif rest:
        os.truncate(path, len(data) - len(rest))
    return done


def _not_results(path: Path, number: int) -> ConfigError:
    return ConfigError(f"cannot resume: line {number} of {path} is not a result of flatbed generate")


def _replace(path: Path, data: bytes) -> None:
    """Puts a file with these bytes in the place of `path`, wholly or not at all. A symbolic link stays one."""
    path = Path(os.path.realpath(path))
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, stat.S_IMODE(path.stat().st_mode))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
