"""What the commands share: exit statuses, and how an error of the user's making is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from flatbed.errors import ConfigError, FlatbedError, UnsupportedModelError

EXIT_INCOMPLETE = 1
EXIT_SETTINGS = 2
EXIT_INTERRUPTED = 130


@contextmanager
def errors_told() -> Iterator[None]:
    """Says errors of the user's making in one line, and leaves with the exit status that is theirs."""
    try:
        yield
    except (ConfigError, UnsupportedModelError) as error:
        say(str(error))
        raise typer.Exit(EXIT_SETTINGS) from error
    except (FlatbedError, OSError) as error:
        say(str(error))
        raise typer.Exit(EXIT_INCOMPLETE) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error


def say(message: str) -> None:
    """One line on standard error, under the program's name."""
    typer.echo(f"flatbed: {message}", err=True)
