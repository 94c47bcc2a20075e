"""A plan on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatbed.lab.plan import EnginePlan, Plan
from flatbed.lab.plan_verify import Verdict, conclusions
from flatbed.lab.tables import table
from flatbed.lab.units import told_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def render(plan: Plan, console: Console) -> None:
    """Prints a plan: the memory, the workload, then each engine with its settings."""
    console.print(_memory(plan))
    console.print()
    console.print(_demand(plan), soft_wrap=True)
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print()
    console.print(_bytes_table(plan))
    for engine in plan.engines:
        console.print()
        _engine(engine, plan, console)


def _memory(plan: Plan) -> Table:
    rows = table(("memory", "left"), ("", "right"), ("", "left"))
    rows.add_row(plan.device.name, told_bytes(plan.device.memory), "")
    training = plan.training
    dtype = plan.dtype if training is None else training.dtype
    rows.add_row(plan.model, f"- {told_bytes(plan.weights)}", f"{plan.parameters:,} parameters in {dtype}")
    if training is not None:
        rows.add_row("gradients", f"- {told_bytes(training.gradients)}", f"{training.trained:,} trained")
        rows.add_row(f"states of {training.optimizer}", f"- {told_bytes(training.states)}", "")
    what = "for the cache" if training is None else "for the cache, or for a training step's activations"
    rows.add_row("left", told_bytes(plan.free), what)
    return rows


def _demand(plan: Plan) -> str:
    facts, live = plan.workload, plan.live
    samples = f"{facts['requests']:,} requests" + ("" if facts["n"] == 1 else f" x {facts['n']} samples")
    return (
        f"workload {facts['name']}: {samples}, {facts['prompt_tokens']:,} prompt tokens, {facts['new_tokens']:,} new, "
        f"the longest {facts['longest']:,} in all. With room for everything, {live.running:,} run at once and "
        f"{live.live_blocks:,} blocks of {plan.live_block_tokens} tokens are live at the peak "
        f"({told_bytes(plan.live_bytes)}); {live.steps:,} forward passes of at most {plan.token_budget:,} tokens."
    )


def _bytes_table(plan: Plan) -> Table:
    rows = table(
        ("engine", "left"),
        ("attention", "left"),
        ("layers", "right"),
        ("bytes a token", "right"),
        ("tokens a block", "right"),
        ("bytes a block", "right"),
        ("kept of a request", "left"),
    )
    for engine in plan.engines:
        for number, row in enumerate(engine.types):
            kept = "all tokens" if row.most_tokens is None else f"{row.most_tokens:,} tokens at the most"
            if engine.refusal is not None:
                kept = "cannot run this model"
            rows.add_row(
                engine.engine if number == 0 else "",
                row.kind,
                str(row.layers),
                f"{row.token_bytes:,}",
                str(row.block_tokens),
                f"{row.block_bytes:,}",
                kept,
            )
    return rows


def _engine(engine: EnginePlan, plan: Plan, console: Console) -> None:
    console.print(f"[bold]{engine.engine}[/bold]")
    if engine.refusal is not None:
        console.print(f"  cannot run this model: {engine.refusal}", soft_wrap=True)
        return
    for said in engine.says:
        console.print(f"  - {said}", soft_wrap=True)
    buffers = f" and buffers of {told_bytes(engine.buffers)}" if engine.buffers else ""
    end = "" if plan.training is None else " for activations while it generates"
    console.print(
        f"  - a pool of {told_bytes(engine.pool)}{buffers} leaves {told_bytes(engine.left)}{end}",
        soft_wrap=True,
        highlight=False,
    )
    for snippet in engine.snippets:
        console.print()
        console.print(f"  # {snippet.title}", style="dim")
        for line in snippet.text.splitlines():
            console.print(f"  {line}", soft_wrap=True, markup=False)


def render_verdicts(verdicts: Sequence[Verdict], console: Console) -> None:
    """Prints what each setting did, and whether the planned ones held."""
    rows = table(
        ("engine", "left"),
        ("workload", "left"),
        ("setting", "left"),
        ("tokens", "right"),
        ("calls", "right"),
        ("seconds", "right"),
        ("times fastest", "right"),
        ("preempted", "right"),
        ("held", "left"),
    )
    for one in verdicts:
        rows.add_row(
            one.engine,
            one.workload,
            one.setting,
            f"{one.tokens:,}",
            f"{one.calls}",
            "" if one.seconds is None else f"{one.seconds:,.3f}",
            "" if one.times is None else f"{one.times:.2f}",
            "" if one.preempted is None else f"{one.preempted:,}",
            "no" if not one.held else "cannot tell" if one.noise else "yes",
        )
    console.print()
    console.print(rows)
    for said in conclusions(verdicts):
        console.print(said, soft_wrap=True)
