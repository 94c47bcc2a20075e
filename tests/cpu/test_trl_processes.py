"""Rollouts in several processes: data-parallel training, and weights that lie in pieces (FSDP 1 and 2)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("trl_processes.py")


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What the two processes saw, by name: [of process 0, of process 1]."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    path = os.pathsep.join(filter(None, (str(SCRIPT.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, list[str]] = {}
    for process in "01":
        for line in run.stdout.splitlines():
            if line.startswith(f"{process}: "):
                _, what, seen = line.split(": ", 2)
                found.setdefault(what, []).append(seen)
    return found


def test_data_parallel_training_is_that_with_padded_generate(said: dict[str, list[str]]) -> None:
    assert said["processes"] == ["2", "2"]
    for what in ("same prompts", "same completions", "completions change", "same weights"):
        assert said[what] == ["True", "True"], what
    assert said["first prompt"][0] != said["first prompt"][1], "each process has prompts of its own"


def test_data_parallel_log_probabilities_and_samples(said: dict[str, list[str]]) -> None:
    assert said["log-probabilities agree"] == ["True", "True"]
    assert said["samples of one prompt"][0] != said["samples of one prompt"][1], "in spite of one seed"


@pytest.mark.parametrize("version", [1, 2])
def test_sharded_weights_are_gathered_for_a_generation(version: int, said: dict[str, list[str]]) -> None:
    assert said[f"FSDP {version}, as generate"] == ["[True, True, True]"] * 2
    assert said[f"FSDP {version}, committed"] == ["[0, 0, 0]"] * 2
    assert said[f"FSDP {version}, completions change"] == ["True"] * 2


def test_weights_in_pieces_are_refused_by_an_engine_of_ones_own(said: dict[str, list[str]]) -> None:
    assert said["not gathered"] == ["True"] * 2
