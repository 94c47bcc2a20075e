"""Tables and the console they are printed on: wide enough for whole rows, wherever they go."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH = 160  # where there is no terminal, or a narrow one, which then breaks lines itself


def console() -> Console:
    """Standard output."""
    from rich.console import Console

    return Console(width=max(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns), highlight=False)


def table(*columns: tuple[str, Literal["left", "right"]]) -> Table:
    """A table without lines. `columns`: title and side of each."""
    from rich.table import Table

    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title, side in columns:
        made.add_column(title, justify=side, no_wrap=True)
    return made
