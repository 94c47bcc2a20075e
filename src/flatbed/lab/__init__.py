"""The capacity lab: measure, explain, plan and gate what K/V-cache capacity costs, on Flatbed and on its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatbed.lab.gate import assert_flat

__all__ = ["assert_flat"]


def __getattr__(name: str) -> Any:
    if name == "assert_flat":  # imported when used: processes of other engines import this package too
        from flatbed.lab.gate import assert_flat

        return assert_flat
    raise AttributeError(f"module 'flatbed.lab' has no attribute {name!r}")
