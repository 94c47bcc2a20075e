"""Jobs, one after another, in a process of their own, each within a time limit::

      this process       job ──▶         ◀── told ... ◀── result          job ──▶          (limit) kill ─▶ a failure
      worker             prepare, ready      run(job, tell)                   run(job, tell) ...

A job that raises, dies or takes too long gives a failure, and ends its worker: the next job gets a new one, whose CUDA
context nobody has harmed. This process imports neither torch nor anything of the GPU.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

# Imports and the CUDA context, from a disk that has not been read yet.
STARTUP_S = 180.0
# For a worker to end by itself.
GOODBYE_S = 20.0

Tell = Callable[[Any], None]
Run = Callable[[Any, Tell], Any]


@dataclass
class Outcome:
    """What became of a job.

    Attributes:
        result: what it returned; None when it failed.
        failed: why it failed, in one line; None when it did not.
        told: what it told on its way.
        fresh: it was the first job of its process.
    """

    result: Any = None
    failed: str | None = None
    told: list[Any] = field(default_factory=list)
    fresh: bool = False


class Supervised:
    """Calls `run(job, tell)` in another process.

    Args:
        prepare: called there first, outside of any limit but `STARTUP_S`; what it returns is `prepared`.
        run: jobs and results are pickled, and so are both functions: by name.
        limit_s: of each job.
    """

    def __init__(self, prepare: Callable[[], Any], run: Run, limit_s: float) -> None:
        self._prepare, self._run, self._limit_s = prepare, run, limit_s
        self._context = multiprocessing.get_context("spawn")
        self.prepared: Any = None
        self._process: Any = None
        self._connection: Any = None

    def __call__(self, job: Any) -> Outcome:
        outcome = Outcome(fresh=self._process is None)
        if self._process is None:
            self._connection, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_work, args=(theirs, self._prepare, self._run), daemon=True)
            self._process.start()
            theirs.close()
            outcome.failed = self._wait(outcome, "ready", STARTUP_S)
            self.prepared, outcome.result = outcome.result or self.prepared, None
        if outcome.failed is None:
            self._connection.send(job)
            outcome.failed = self._wait(outcome, "result", self._limit_s)
        if outcome.failed is not None:
            self._process.kill()
            self.close()
        return outcome

    def _wait(self, outcome: Outcome, awaited: str, limit_s: float) -> str | None:
        """Takes messages until the one that is waited for, which goes into `outcome`; returns what went wrong."""
        end = time.monotonic() + limit_s
        while self._connection.poll(max(0.0, end - time.monotonic())):
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                self._process.join()
                return f"its process ended with status {self._process.exitcode}"
            if kind == "failed":
                return str(value)
            if kind == "told":
                outcome.told.append(value)
            if kind == awaited:
                outcome.result = value
                return None
        return f"not done within {limit_s:.0f} s"

    def close(self) -> None:
        """Ends the worker, which must have nothing to do; the next job gets another."""
        if self._process is None:
            return
        self._connection.close()
        self._process.join(GOODBYE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process = self._connection = None


def _work(connection: Connection, prepare: Callable[[], Any], run: Run) -> None:
    try:
        connection.send(("ready", prepare()))
        while True:
            connection.send(("result", run(connection.recv(), lambda told: connection.send(("told", told)))))
    except EOFError:  # nobody asks any more
        return
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        connection.send(("failed", f"{type(error).__name__}: {error}".splitlines()[0][:500]))
