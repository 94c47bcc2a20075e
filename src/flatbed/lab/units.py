"""Quantities for people."""

from __future__ import annotations


def told_bytes(count: float) -> str:
    """Bytes with a unit that suits them: `1.5 GiB`."""
    sign, size = ("-", -count) if count < 0 else ("", count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:,.1f} {unit}"
        size /= 1024
    return f"{sign}{size:,.1f} TiB"
