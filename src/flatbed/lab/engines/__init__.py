"""Engines that the lab can measure: Flatbed and its peers, each behind `base.Adapter`."""

from flatbed.lab.engines.base import ENGINES, Adapter, EngineSpec, MemoryResult, RunResult, Settings, Setup

__all__ = ["ENGINES", "Adapter", "EngineSpec", "MemoryResult", "RunResult", "Settings", "Setup"]
