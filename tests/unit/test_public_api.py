"""The public surface: frozen names, an import that costs nothing, errors in one tree."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import time

import pytest

import flatbed
from flatbed import errors


def test_the_public_names_are_frozen() -> None:
    assert flatbed.__all__ == [
        "Completion",
        "Engine",
        "EngineConfig",
        "EngineStats",
        "FlatbedError",
        "FlatbedWarning",
        "MemoryReport",
        "Output",
        "SamplingParams",
        "StreamEvent",
        "Timings",
        "__version__",
        "errors",
        "install",
        "uninstall",
    ]
    assert dir(flatbed) == sorted(flatbed.__all__)
    for name in flatbed.__all__:
        assert getattr(flatbed, name) is not None
    with pytest.raises(AttributeError, match="'flatbed' has no attribute 'engine_config'"):
        _ = flatbed.engine_config


def test_the_parameters_of_the_engine_are_frozen() -> None:
    def names(function: object) -> list[str]:
        return list(inspect.signature(function).parameters)  # type: ignore[arg-type]

    settings = [
        "capacity",
        "token_budget",
        "schedule",
        "attention",
        "block_size",
        "max_requests",
        "prefix_cache",
        "seed",
        "deterministic",
    ]
    assert names(flatbed.Engine) == ["model", "tokenizer", *settings, "unknown"]
    assert list(flatbed.EngineConfig.__dataclass_fields__) == settings
    assert names(flatbed.Engine.generate)[1:] == [
        "prompts",
        "sampling",
        "request_ids",
        "on_output",
        "on_step",
        "record_token_times",
    ]
    assert names(flatbed.Engine.stream)[1:] == ["prompts", "sampling", "request_ids"]
    assert flatbed.SamplingParams.names() == (
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "n",
        "eos_token_ids",
        "ignore_eos",
        "stop",
        "seed",
        "logprobs",
    )
    public = [name for name in vars(flatbed.Engine) if not name.startswith("_")]
    assert set(public) >= {"generate", "stream", "submit", "step", "cancel", "stats", "memory", "release", "close"}


def test_the_engine_takes_its_defaults_from_the_config() -> None:
    parameters = inspect.signature(flatbed.Engine).parameters
    for name, field in flatbed.EngineConfig.__dataclass_fields__.items():
        assert parameters[name].default == field.default, name


def python(script: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTEST"))}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_importing_flatbed_imports_neither_torch_nor_anything_heavy() -> None:
    heavy = "torch", "transformers", "numpy", "typer", "rich", "triton"
    assert python(f"import sys, flatbed; print(sorted(set({heavy}) & set(sys.modules)))") == "[]"
    assert python("import sys, flatbed.errors, flatbed; flatbed.__version__; print('torch' in sys.modules)") == "False"
    assert python("import sys, flatbed; flatbed.SamplingParams; print('torch' in sys.modules)") == "False"


@pytest.mark.timing
def test_importing_flatbed_takes_at_most_a_fifth_of_a_second() -> None:
    """The time of the statement, and of the whole command beyond that of an empty one; the best of a few, because a
    busy machine can only add to it."""
    script = "import time; start = time.perf_counter(); import flatbed; print(time.perf_counter() - start)"
    python(script)
    assert min(float(python(script)) for _ in range(5)) < 0.2

    def seconds(script: str) -> float:
        start = time.perf_counter()
        python(script)
        return time.perf_counter() - start

    assert min(seconds("import flatbed") for _ in range(5)) - min(seconds("pass") for _ in range(5)) < 0.2


# ---- errors ----------------------------------------------------------------------------------------------------------


def defined() -> dict[str, type[Exception]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }


def drawn() -> dict[str, str | None]:
    """The tree in the docstring: each error and the one it hangs from."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([ │├└─]+)([A-Z]\w+Error)\b", line)
        if match is None:
            continue
        depth, name = len(match[1]), match[2]
        while above and above[-1][0] >= depth:
            above.pop()
        parents[name] = above[-1][1] if above else None
        above.append((depth, name))
    return parents


def test_every_error_is_in_the_drawn_tree_where_it_belongs() -> None:
    tree = drawn()
    assert tree["FlatbedError"] is None
    assert set(tree) == {name for name, kind in defined().items() if not issubclass(kind, Warning)}
    for name, parent in tree.items():
        if parent is not None:
            assert defined()[name].__bases__[0] is defined()[parent], f"{name} is drawn below {parent}"


def test_every_error_is_a_flatbed_error_and_says_what_it_is() -> None:
    assert len(defined()) > 10
    for name, kind in defined().items():
        assert issubclass(kind, errors.FlatbedWarning if issubclass(kind, Warning) else errors.FlatbedError), name
        assert inspect.getdoc(kind), name
    assert flatbed.FlatbedError is errors.FlatbedError


def test_where_the_tree_says_value_error_it_is_one() -> None:
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^[ │├└─]+([A-Z]\w+Error)\b.*also a ValueError", line)
        if match is not None:
            assert issubclass(defined()[match[1]], ValueError)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.RequestError, ValueError)
    assert not issubclass(errors.ModelForwardError, ValueError)


def test_errors_carry_what_they_are_about() -> None:
    error = errors.CapacityError("too long", request_id="r7", needed=9, available=4)
    assert (error.request_id, error.needed, error.available, str(error)) == ("r7", 9, 4, "request 'r7': too long")
    field = errors.InvalidRequestError("must be 1", request_id="r7", field="n")
    assert (field.field, str(field)) == ("n", "request 'r7': n: must be 1")
    assert errors.ModelForwardError("x", request_ids=["a", "b"]).request_ids == ("a", "b")
    assert errors.PromptFileError("x", line=3).line == 3
    assert str(errors.ConfigError.unknown("schedule", "lifo", ["fifo"])) == "unknown schedule 'lifo'; known: fifo"
