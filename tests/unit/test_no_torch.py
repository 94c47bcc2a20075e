"""What must not import torch, and which package may import which.

`cli, lab, integrations -> engine -> model, sampling, attention, memory -> scheduling`: dependencies point one way.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "flatbed"
SCHEDULING = [f"flatbed.scheduling.{path.stem}" for path in sorted((SOURCE / "scheduling").glob("[!_]*.py"))]

# A package on the left imports nothing of flatbed whose name begins with one on the right.
UPPER = ("engine", "service", "cli", "integrations", "lab")
FORBIDDEN = {
    "memory": UPPER,
    "attention": UPPER,
    "sampling": UPPER,
    "model": UPPER,
    "kernels": UPPER,
    "engine": ("service", "cli", "integrations", "lab"),
    "integrations": ("cli",),
    "lab": ("cli",),
}


@pytest.mark.parametrize("module", ["flatbed.scheduling", *SCHEDULING, "flatbed.config", "flatbed.memory.capacity"])
def test_imports_neither_torch_nor_transformers(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]", f"importing {module} imports {run.stdout.strip()}"


def test_scheduling_is_where_this_test_looks_for_it() -> None:
    assert {"flatbed.scheduling.blocks", "flatbed.scheduling.scheduler"} <= set(SCHEDULING)


def imported(path: Path) -> Iterator[str]:
    """Dotted names of flatbed's own modules that a file imports, wherever in the file, type checking included."""
    package = ("flatbed", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "flatbed")


def owner(path: Path) -> str:
    """The package, or the module at the top, that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_dependencies_point_one_way(path: Path) -> None:
    names = list(imported(path))
    if owner(path) == "scheduling":
        beyond = [name for name in names if not name.startswith("flatbed.scheduling")]
        assert not beyond, f"scheduling stands alone, but imports {beyond}"
    upward = [name for name in names if name.split(".")[1] in FORBIDDEN.get(owner(path), ())]
    assert not upward, f"{owner(path)} imports {upward}, which stands above it"


def test_the_scan_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    file = tmp_path / "memory" / "pool.py"
    file.parent.mkdir()
    file.write_text(
        "import os, flatbed.engine\n"
        "from flatbed import lab\n"
        "from flatbed.cli import main\n"
        "from . import host\n"
        "from ..engine import Engine\n"
        "def later():\n    from flatbed.integrations.trl import patch\n"
    )
    assert list(imported(file)) == [
        "flatbed.engine",
        "flatbed.lab",
        "flatbed.cli.main",
        "flatbed.memory.host",
        "flatbed.engine.Engine",
        "flatbed.integrations.trl.patch",
    ]
    assert owner(file) == "memory"
