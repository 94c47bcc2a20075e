"""Every exception and warning that Flatbed raises, as one tree.

::

    FlatbedError                      the root: `except flatbed.errors.FlatbedError` catches all of them
    ├── ConfigError                   a setting of the engine is unknown or makes no sense   (also a ValueError)
    │   ├── BackendUnavailableError   an attention backend that was asked for by name cannot run here
    │   └── ModelLoadError            a model cannot be found or read
    ├── UnsupportedModelError         the model cannot be run, said when the engine is built
    ├── EngineClosedError             the engine was used after close()
    ├── RequestError                  one request is refused or ended; its neighbours go on  (also a ValueError)
    │   ├── InvalidRequestError       a field of the request is out of range
    │   ├── CapacityError             the request can never fit
    │   └── NonFiniteLogitsError      the model gave NaN or infinite logits for this request
    ├── ModelForwardError             the model's own code raised; carries the request ids of the batch
    └── PromptFileError               a line of a prompt file cannot be read; carries the line number

A `RequestError` is normally not raised: it is the `error` of that request's `Output`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class FlatbedError(Exception):
    """Root of all exceptions that Flatbed raises."""


class FlatbedWarning(UserWarning):
    """Something has no effect or was refused, and the run goes on."""


class ConfigError(FlatbedError, ValueError):
    """A setting of the engine is unknown or makes no sense. The message lists what is known."""

    @classmethod
    def unknown(cls, what: str, got: object, known: Iterable[object]) -> ConfigError:
        return cls(f"unknown {what} {got!r}; known: {', '.join(str(name) for name in known)}")


class BackendUnavailableError(ConfigError):
    """An attention backend that was asked for by name cannot run here. Only `auto` falls back."""


class ModelLoadError(ConfigError):
    """A model cannot be found or loaded. The message says what is missing, and the command that brings it."""


class UnsupportedModelError(FlatbedError):
    """The model cannot be run by Flatbed. The message names the model class and the reason."""


class EngineClosedError(FlatbedError):
    """The engine was used after `close()`."""


class RequestError(FlatbedError, ValueError):
    """One request is refused or ended early; the requests beside it are not affected.

    Attributes:
        request_id: the request this is about.
    """

    def __init__(self, message: str, *, request_id: str) -> None:
        super().__init__(f"request {request_id!r}: {message}")
        self.request_id = request_id


class InvalidRequestError(RequestError):
    """A field of the request is out of range.

    Attributes:
        field: the name of that field (`prompt`, or a field of `SamplingParams`).
    """

    def __init__(self, message: str, *, request_id: str, field: str) -> None:
        super().__init__(f"{field}: {message}", request_id=request_id)
        self.field = field


class CapacityError(RequestError):
    """The request can never fit, whatever else is running.

    Attributes:
        needed: what it needs at its longest (blocks, or tokens when the model's positions are the limit).
        available: how many of those there are.
    """

    def __init__(self, message: str, *, request_id: str, needed: int, available: int) -> None:
        super().__init__(message, request_id=request_id)
        self.needed = needed
        self.available = available


class NonFiniteLogitsError(RequestError):
    """The model gave NaN or infinite logits for this request, or its logits processors left no token."""


class ModelForwardError(FlatbedError, RuntimeError):
    """The model's forward raised. The original exception is `__cause__`.

    Every request that was running or waiting has been ended and all blocks are free; the engine can be used again.

    Attributes:
        request_ids: the requests in the failed batch.
    """

    def __init__(self, message: str, *, request_ids: Sequence[str]) -> None:
        super().__init__(message)
        self.request_ids = tuple(request_ids)


class PromptFileError(FlatbedError):
    """A line of a prompt file cannot be read.

    Attributes:
        line: its number, counted from 1.
    """

    def __init__(self, message: str, *, line: int) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
