"""Between text and tokens: encoding prompts, decoding as tokens come, finding stop strings."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from flatbed.errors import ConfigError, InvalidRequestError

_INCOMPLETE = "\ufffd"


def encode(prompt: Any, tokenizer: Any | None, request_id: str) -> list[int]:
    """Token ids of a string, a chat, or token ids (which are checked to be whole numbers).

    Raises InvalidRequestError for an empty prompt, and for text without a tokenizer.
    """

    def refuse(message: str) -> InvalidRequestError:
        return InvalidRequestError(message, request_id=request_id, field="prompt")

    if hasattr(prompt, "tolist"):  # a tensor or an array
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):  # bytes are no token ids
        hint = "; a chat is a list of messages" if isinstance(prompt, Mapping) and "role" in prompt else ""
        raise refuse(f"must be a string, a list of messages or a list of token ids, got {type(prompt).__name__}{hint}")
    if len(prompt) == 0:
        raise refuse("is empty")
    first = prompt[0]
    if isinstance(prompt, str) or isinstance(first, Mapping):
        if tokenizer is None:
            raise refuse("text needs a tokenizer: pass one to the engine, or pass token ids")
        if not isinstance(prompt, str) and getattr(tokenizer, "chat_template", None) is None:
            raise refuse("chat messages need a tokenizer with a chat template")
        try:
            ids = _encode_text(prompt, tokenizer)
        except Exception as error:  # a chat template is a program of its own, and raises what it likes
            raise refuse(f"the tokenizer raised {type(error).__name__}: {error}") from error
        if not ids:
            raise refuse("is empty: the tokenizer made no tokens of it")
        return list(ids)
    if set(map(type, prompt)) == {int}:  # the usual case, at once
        return list(prompt)
    ids = []
    for at, token in enumerate(prompt):
        try:
            if isinstance(token, bool):
                raise TypeError
            ids.append(operator.index(token))  # of NumPy's and torch's whole numbers, too
        except TypeError:
            hint = "; a prompt is one list of ids, not a batch of them" if hasattr(token, "__len__") else ""
            raise refuse(f"token ids must be whole numbers, got {token!r} at position {at}{hint}") from None
    return ids


def _encode_text(prompt: str | Sequence[Any], tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def check_tokenizer(tokenizer: Any | None) -> None:
    """Raises ConfigError for what can be no tokenizer of Transformers: a name, a processor."""
    if tokenizer is None:
        return
    if hasattr(tokenizer, "tokenizer"):
        raise ConfigError(f"{type(tokenizer).__name__} is not a tokenizer; pass its .tokenizer")
    if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        raise ConfigError(
            f"tokenizer must be a tokenizer of Transformers (AutoTokenizer.from_pretrained(...)), got "
            f"{type(tokenizer).__name__}"
        )


def check_stop_strings(stop: Sequence[str], tokenizer: Any | None, request_id: str) -> None:
    """Raises InvalidRequestError when there are stop strings but no tokenizer to find them with."""
    if stop and tokenizer is None:
        raise InvalidRequestError("stop strings need a tokenizer", request_id=request_id, field="stop")


class TextStream:
    """The text of one completion as it grows.

    Decoding token by token would break characters that span tokens, and lose the space that a tokenizer strips at the
    beginning, so a short window is decoded with and without the new tokens and the difference is the new text. Text
    that may be the beginning of a stop string is held back until it is certain.

    Attributes:
        text: what is certain; cut before a stop string.
        stopped: a stop string was found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max((len(s) for s in self._stop), default=0)
        self._from = 0  # the window's first token
        self._until = 0  # tokens before this are in `_decoded`
        self._decoded = ""
        self._settled = 0  # of `_decoded`, what the tokens before `_until` make
        self.text = ""
        self.stopped = False

    def feed(self, token_ids: list[int]) -> str:
        """Takes the completion with its new tokens; returns the text that became certain."""
        self._decode(token_ids, final=False)
        return self._advance(final=False)

    def close(self, token_ids: list[int]) -> str:
        """The rest of the text, once the completion has ended."""
        self._decode(token_ids, final=True)
        return self._advance(final=True)

    def _decode(self, token_ids: list[int], *, final: bool) -> None:
        if self._until == len(token_ids):
            return
        before = self._text_of(token_ids[self._from : self._until])
        after = self._text_of(token_ids[self._from :])
        new = after[len(before) :]
        if new.endswith(_INCOMPLETE) and not final:  # the letters before a broken character are certain, it is not
            self._decoded = self._decoded[: self._settled] + new.rstrip(_INCOMPLETE)
            return
        self._decoded = self._decoded[: self._settled] + new
        self._settled = len(self._decoded)
        self._from, self._until = self._until, len(token_ids)

    def _text_of(self, token_ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=True)
        except Exception:  # some tokenizers raise on ids that a model's padded vocabulary has and theirs has not
            known = [token for token in token_ids if self._has_text(token)]
            return self._tokenizer.decode(known, skip_special_tokens=True)

    def _has_text(self, token: int) -> bool:
        try:
            self._tokenizer.decode([token])
        except Exception:
            return False
        return True

    def _advance(self, *, final: bool) -> str:
        if self.stopped:
            return ""
        have = len(self.text)
        end = len(self._decoded)
        if self._stop:
            start = max(0, have - self._longest)
            found = [at for s in self._stop if (at := self._decoded.find(s, start)) >= 0]
            if found:
                self.stopped, end = True, min(found)
            elif not final:
                end = max(have, end - _held_back(self._decoded, self._stop))
        new = self._decoded[have:end]
        self.text += new
        return new


def _held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    return max(
        (n for s in stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])),
        default=0,
    )
