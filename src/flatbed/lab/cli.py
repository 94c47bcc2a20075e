"""The commands of the lab: `flatbed bench`, `report`, `plan` and `trace`. Thin: all work is elsewhere.

Exit status of a bench: 0 when all was measured; 1 when something was not (a crash, a time limit, no time left: all
else is in the results); 2 for what cannot be understood; 3 when an engine does not pass `--gate`; 130 after Ctrl-C,
with what was measured until then in the results. Of a plan: 1 when `--verify` finds that a planned setting did not
hold. Of a trace: 1 when the engine could not be run.
"""

from __future__ import annotations

import enum
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatbed.config import DEFAULT_TOKEN_BUDGET
from flatbed.console import EXIT_INCOMPLETE, errors_told
from flatbed.errors import ConfigError

if TYPE_CHECKING:
    from flatbed.lab.engines.base import Settings, Setup
    from flatbed.lab.plan import Plan
    from flatbed.lab.plan_verify import Verdict
    from flatbed.lab.report import Report
    from flatbed.lab.workloads import Workload

EXIT_GATE = 3

DEFAULT_REPEATS = 5
DEFAULT_TIME_LIMIT = 600.0


class Sweep(str, enum.Enum):
    """What `flatbed bench` varies."""

    capacity = "capacity"
    budget = "budget"
    schedule = "schedule"


class Order(str, enum.Enum):
    """Which processes are alive together; see `flatbed.lab.measure`."""

    auto = "auto"
    turns = "turns"
    sequence = "sequence"


# What is varied when nothing is said.
_DEFAULT_VALUES = {
    Sweep.capacity: "64 blocks,10%,50%,90%",
    Sweep.budget: "256,1024,8192",
    Sweep.schedule: "fifo,prefill_first",
}
_CONTROL = {Sweep.capacity: "capacity", Sweep.budget: "token_budget", Sweep.schedule: "schedule"}


def bench(
    sweep: Annotated[Sweep, typer.Argument(help="What to vary.", metavar="capacity|budget|schedule")],
    model: Annotated[
        str,
        typer.Option(help="A hub name, a local folder, demo, or random weights of a shape: shape:qwen2.5-0.5b, ..."),
    ],
    engine: Annotated[
        list[str],
        typer.Option(
            help="flatbed, transformers, generate, vllm or the dotted path of an Adapter class; @VERSION and "
            ":OPTION,OPTION=VALUE may follow. May be repeated."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for raw records and report; one that has results is left alone.")],
    workload: Annotated[
        list[str],
        typer.Option(
            help="article, mixed, rollout, one, concurrent, long, or a .jsonl file; with commas, or repeated."
        ),
    ] = ["article"],  # noqa: B006 - typer reads it and changes nothing
    capacity: Annotated[
        str | None,
        typer.Option(
            help='"64 blocks" (of 256 tokens, on every engine), "20000 tokens", "8 GiB" or "50%"; with commas where it '
            "is varied."
        ),
    ] = None,
    token_budget: Annotated[str | None, typer.Option(help="Most tokens in a forward pass; likewise.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Which requests go next; likewise.")] = None,
    repeats: Annotated[int, typer.Option(help="Steady calls of each setting.")] = DEFAULT_REPEATS,
    enough: Annotated[
        float | None,
        typer.Option(help="Seconds of steady calls after which a setting makes no more (two are the least)."),
    ] = None,
    warm: Annotated[int, typer.Option(help="Calls after the first that do not count yet.")] = 0,
    cold_repeats: Annotated[int, typer.Option(help="Starts of each setting, each in a fresh process.")] = 1,
    time_limit: Annotated[
        float, typer.Option(help="Seconds that loading, construction or a call may take.")
    ] = DEFAULT_TIME_LIMIT,
    max_seconds: Annotated[
        float | None, typer.Option(help="Seconds after which nothing more is begun; what is left out is named.")
    ] = None,
    gate: Annotated[
        float | None, typer.Option(help="Exit with status 3 when an engine grows by more than this factor.")
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH or NAME@VERSION=PATH: that engine's interpreter. May be repeated."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="NAME:KEY=VALUE or NAME@VERSION:KEY=VALUE: a variable of its environment. May be repeated."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or any device of torch.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    scale: Annotated[float, typer.Option(help="Shrinks a workload's requests and lengths to this share.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the workload's draw.", show_default="the published one")] = None,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let completions end at EOS; otherwise lengths are fixed.")
    ] = False,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="One process and one load for all settings of an engine; only its very first call is a cold start.",
        ),
    ] = False,
    order: Annotated[Order, typer.Option(help="Whether an engine's settings are measured in turns.")] = Order.auto,
    no_latency: Annotated[
        bool, typer.Option("--no-latency", help="Leave out the call that records the times of tokens.")
    ] = False,
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Write raw records alone; `flatbed report DIR` makes the report.")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder with the weights, for vLLM.", show_default="written to the user's cache"),
    ] = None,
) -> None:
    """Measure what capacity, token budget or schedule cost, on Flatbed and on its peers, and say so in words.

    Each engine and setting (with --shared, each engine) runs in a process of its own; one that crashes, hangs or runs
    out of memory is a result.
    The folder gets runs.jsonl (a line a call, the moment it is made), report.md, report.html, plots and logs.
    """
    with errors_told():
        from flatbed.lab.engines.base import EngineSpec
        from flatbed.lab.gate import check_limit
        from flatbed.lab.measure import Experiment, measure
        from flatbed.lab.report import RunFile

        if gate is not None:
            check_limit(gate)
        control = _CONTROL[sweep]
        settings = _settings(sweep, {"capacity": capacity, "token_budget": token_budget, "schedule": schedule})
        setup, workloads = _prepared(model, device, dtype, _listed(workload), seed, scale, stop_at_eos, checkpoint)
        experiment = Experiment(
            control,
            setup,
            [EngineSpec.parse(text) for text in engine],
            settings,
            workloads,
            warm=warm,
            repeats=repeats,
            cold_repeats=cold_repeats,
            time_limit=time_limit,
            max_seconds=max_seconds,
            order=order.value,
            latency=not no_latency,
            enough=enough,
            shared=shared,
            pythons=dict(_assigned(text, "--python NAME=PATH") for text in python or ()),
            environments=_environments(env or ()),
            command=_command(),
        )
        with RunFile(out) as runs:
            logs = out / "logs"
            logs.mkdir()
            try:
                measure(experiment, on_record=runs.write, say=_tell, logs=logs)
            finally:
                composed = _reported([out], out, gate, written=not no_report)
        _leave(composed, gate)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of flatbed bench.", metavar="DIR...")],
    out: Annotated[
        Path | None, typer.Option(help="Where the report goes; needed for several folders.", show_default="DIR")
    ] = None,
    gate: Annotated[
        float | None, typer.Option(help="Exit with status 3 when an engine grows by more than this factor.")
    ] = None,
) -> None:
    """Make a report again out of raw records; of several folders, side by side."""
    with errors_told():
        from flatbed.lab.gate import check_limit

        if gate is not None:
            check_limit(gate)
        if out is None and len(folders) > 1:
            raise ConfigError("several folders make one report: give a folder for it with --out")
        composed = _reported(folders, out or folders[0], gate)
        if composed is None:
            raise ConfigError(f"{folders[0]} has no records")
        _leave(composed, gate)


def plan(
    model: Annotated[str, typer.Option(help="A hub name, a local folder, demo, or a shape: shape:qwen2.5-0.5b, ...")],
    workload: Annotated[
        str | None, typer.Option(help="article, mixed, rollout, one, concurrent, long, or a .jsonl file.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="The longest prompt, instead of a workload.", show_default="--workload is used")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="New tokens of each, with --prompt-tokens.")] = 128,
    concurrency: Annotated[int, typer.Option(help="Requests at once, with --prompt-tokens.")] = 64,
    samples: Annotated[int, typer.Option(help="Samples of each prompt, with --prompt-tokens.")] = 1,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="flatbed, transformers[:sdpa,page_size=128], vllm[:block_size=32]; may be repeated.",
            show_default="all three",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda:0, cpu, or a known card: h200, a100-40gb, ...", show_default="what is here")
    ] = None,
    memory: Annotated[str | None, typer.Option(help='Memory of the device instead: "80GiB".')] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: bfloat16, float16 or float32.")] = "bfloat16",
    capacity: Annotated[
        str | None,
        typer.Option(
            help='A capacity to judge instead of choosing one: "64 blocks" (of 256 tokens each), "20000 tokens", '
            '"8 GiB" or "50%".'
        ),
    ] = None,
    token_budget: Annotated[int, typer.Option(help="Most tokens in a forward pass.")] = DEFAULT_TOKEN_BUDGET,
    training: Annotated[
        str | None, typer.Option(help="Leave room for training in this dtype.", show_default="no training")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="With --training: adamw, adamw-8bit or sgd.")] = "adamw",
    trained: Annotated[
        float, typer.Option(help="With --training: the share of the parameters that is trained (LoRA: 0.01).")
    ] = 1.0,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Run the planned setting, half and double of it, and say whether it held."),
    ] = False,
    repeats: Annotated[int, typer.Option(help="With --verify: steady calls of each setting.")] = 3,
    most_repeats: Annotated[
        int, typer.Option(help="With --verify: up to how many, until a difference is told from noise.")
    ] = 15,
    time_limit: Annotated[
        float, typer.Option(help="With --verify: seconds that loading, construction or a call may take.")
    ] = DEFAULT_TIME_LIMIT,
    python: Annotated[
        list[str] | None, typer.Option(help="With --verify: NAME=PATH, that engine's interpreter. May be repeated.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="With --verify: NAME:KEY=VALUE, of its environment. May be repeated.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Shrinks a workload's requests and lengths to this share.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the workload's draw.", show_default="the published one")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say what to set, from a model's config alone: bytes, blocks, and settings to paste for each engine.

    No weights are loaded and nothing is measured, unless with --verify.
    """
    with errors_told():
        from flatbed.lab import models
        from flatbed.lab.plan import ENGINES, given_workload, make_plan
        from flatbed.lab.plan_device import find_device

        found = find_device(device, memory)
        if (workload is None) == (prompt_tokens is None):
            raise ConfigError("say what is to be run: --workload NAME, or --prompt-tokens N (one of the two)")
        config = models.load_config(model)
        here = device if device is not None and device.startswith(("cpu", "cuda")) else "auto"
        if workload is not None:
            setup, (wanted,) = _prepared(model, here, dtype, [workload], seed, scale, False, None)
        else:
            assert prompt_tokens is not None, "one of the two was given"
            vocabulary = models.vocabulary_of(config)
            wanted = given_workload(prompt_tokens, new_tokens, concurrency, samples, vocab_size=vocabulary)
            setup = _setup(model, here, dtype)
        made = make_plan(
            model,
            config,
            wanted,
            found,
            dtype=dtype,
            engines=engine or ENGINES,
            capacity=capacity,
            token_budget=token_budget,
            training=training,
            optimizer=optimizer,
            trained=trained,
        )
        if not verify:
            _show_plan(made, as_json)
            return
        from flatbed.lab.plan_verify import held
        from flatbed.lab.plan_verify import verify as verify_plan

        if not as_json:
            _show_plan(made, False)
        verdicts = verify_plan(
            made,
            setup,
            wanted,
            models.longest_of(config),
            repeats=repeats,
            most_repeats=most_repeats,
            time_limit=time_limit,
            pythons=dict(_assigned(text, "--python NAME=PATH") for text in python or ()),
            environments=_environments(env or ()),
            say=_tell,
        )
        _show_verdicts(made, verdicts, as_json)
        if not held(verdicts):
            raise typer.Exit(EXIT_INCOMPLETE)


def trace(
    model: Annotated[str, typer.Option(help="A hub name, a local folder, demo, or a shape: shape:qwen2.5-0.5b, ...")],
    engine: Annotated[str, typer.Option(help="flatbed or transformers; @VERSION and :OPTION,OPTION=VALUE may follow.")],
    workload: Annotated[
        str, typer.Option(help="article, mixed, rollout, one, concurrent, long, or a .jsonl file.")
    ] = "article",
    capacity: Annotated[
        str | None, typer.Option(help='"64 blocks" (of 256 tokens, on every engine), "20000 tokens", "8 GiB" or "50%".')
    ] = None,
    token_budget: Annotated[int | None, typer.Option(help="Most tokens in a forward pass.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Which requests go next.")] = None,
    warm: Annotated[bool, typer.Option("--warm", help="Make one call before, and trace the second.")] = False,
    gpu_only: Annotated[
        bool, typer.Option("--gpu-only", help="Record the GPU alone: the CPU is not slowed down, and idle is true.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the profiler's trace (Chrome format).", show_default="trace-ENGINE.json"),
    ] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter of the engine.", show_default="this one")] = None,
    env: Annotated[list[str] | None, typer.Option(help="KEY=VALUE: a variable of its environment; repeatable.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or any device of torch.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    scale: Annotated[float, typer.Option(help="Shrinks the workload's requests and lengths to this share.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the workload's draw.", show_default="the published one")] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds that loading, or the run, may take.")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Run one workload under the profiler and say where the time goes, and what K/V lengths attention was given."""
    with errors_told():
        import functools
        import json

        from flatbed.lab.engines.base import EngineSpec, Settings
        from flatbed.lab.measure import Process
        from flatbed.lab.tables import console
        from flatbed.lab.trace import free_path, run_trace
        from flatbed.lab.trace_render import render

        spec = EngineSpec.parse(engine)
        path = free_path(out, spec)
        setup, (wanted,) = _prepared(model, device, dtype, [workload], seed, scale, False, None)
        environment = dict(_assigned(text, "--env KEY=VALUE") for text in env or ())
        traced = run_trace(
            spec,
            Settings(capacity, token_budget, schedule),
            setup,
            wanted,
            out=path,
            gpu_only=gpu_only,
            warm=warm,
            time_limit=time_limit,
            start=functools.partial(Process, python=python, environment=environment),
        )
        if as_json:
            typer.echo(json.dumps(traced.to_json()))
        else:
            render(traced, console())


COMMANDS = (bench, report, plan, trace)


# ------------------------------------------------------------------------------------------------------- from options


def _settings(sweep: Sweep, given: Mapping[str, str | None]) -> list[Settings]:
    """One for each value of what is varied, the other controls being the same in all."""
    from flatbed.lab.engines.base import Settings

    control = _CONTROL[sweep]
    fixed: dict[str, str] = {}
    for name, text in given.items():
        if name != control and text is not None:
            if len(_listed([text])) != 1:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} takes one value here: flatbed bench {sweep.value} varies {sweep.value}")
            fixed[name] = text
    values = _listed([given[control] or _DEFAULT_VALUES[sweep]])
    return [Settings(**_typed({**fixed, control: value})) for value in values]


def _typed(values: Mapping[str, str]) -> dict[str, Any]:
    """The same, with a token budget as the number that it is."""
    found: dict[str, Any] = dict(values)
    if "token_budget" in values:
        try:
            found["token_budget"] = int(values["token_budget"])
        except ValueError as error:
            raise ConfigError(f"a token budget is a whole number, got {values['token_budget']!r}") from error
    return found


def _prepared(
    model: str,
    device: str,
    dtype: str,
    names: Sequence[str],
    seed: int | None,
    scale: float,
    stop_at_eos: bool,
    checkpoint: Path | None,
) -> tuple[Setup, list[Workload]]:
    """The workloads for this model, and what is the same in all runs."""
    import dataclasses

    from flatbed.lab import models, workloads
    from flatbed.lab.engines.base import Setup

    workloads.check_names(names)  # before a tokenizer is looked for
    longest, vocabulary = models.limits(model)
    tokenizer = models.load_tokenizer(model) if any(workloads.needs_tokenizer(name) for name in names) else None
    made = [
        dataclasses.replace(
            workloads.make(name, vocabulary, longest, seed, scale, tokenizer), fixed_lengths=not stop_at_eos
        )
        for name in names
    ]
    most = max(workload.longest for workload in made)
    return Setup(model, device, dtype, most, None if checkpoint is None else str(checkpoint)), made


def _setup(model: str, device: str, dtype: str) -> Setup:
    from flatbed.lab.engines.base import Setup

    return Setup(model, device, dtype)


def _listed(texts: Sequence[str]) -> list[str]:
    """Values with commas between them, or several options."""
    found = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not found:
        raise ConfigError("an option that takes values with commas between them has none")
    return found


def _assigned(text: str, written: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ConfigError(f"cannot read {text!r}; it is written {written}")
    return name, value


def _environments(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        name, value = _assigned(text, "--env NAME:KEY=VALUE")
        engine, colon, key = name.rpartition(":")
        if not (colon and engine and key):
            raise ConfigError(f"cannot read {text!r}; it is written --env NAME:KEY=VALUE")
        found.setdefault(engine, {})[key] = value
    return found


def _command() -> str:
    """The command as it was given, folders of this machine left out: it goes into published results."""
    words = [re.sub(r"(?<![\w.])(?:~|\.{1,2})?/[^\s=:,]*/", "", word) for word in sys.argv[1:]]
    return shlex.join(["flatbed", *words])


# ------------------------------------------------------------------------------------------------------------- saying


def _reported(folders: Sequence[Path], out: Path, gate: float | None, *, written: bool = True) -> Report | None:
    """Says the verdicts, writes the report and says where it is.

    None when a bench was ended before it measured anything.
    """
    from flatbed.lab.report import FLAT, PAGE, REPORT, compose, read_all, write

    if not any((folder / "runs.jsonl").stat().st_size for folder in folders if (folder / "runs.jsonl").is_file()):
        return None
    records, limit = read_all(folders), gate or FLAT
    composed = write(records, out, limit) if written else compose(records, limit, plots=False)
    for section in composed.sections:
        for verdict in section.verdicts:
            typer.echo(f"{section.name}  {verdict.engine}: {verdict.text}")
    typer.echo(f"report: {out / REPORT}, {out / PAGE}" if written else f"raw records: {out}")
    return composed


def _leave(composed: Report | None, gate: float | None) -> None:
    """Leaves with the status that the results deserve."""
    from flatbed.lab.gate import judge
    from flatbed.lab.worker import MISSING

    if composed is None:
        raise typer.Exit(EXIT_INCOMPLETE)
    if gate is not None:
        result = judge(composed.summaries, gate)
        for sentence in (*result.failed, *result.unjudged):
            _tell(f"gate: {sentence}")
        if result.failed:
            raise typer.Exit(EXIT_GATE)
        if result.unjudged:
            raise typer.Exit(EXIT_INCOMPLETE)
    outcomes = set().union(*(summary.outcomes for summary in composed.summaries))
    nothing = not any(summary.measured for summary in composed.summaries)
    if outcomes - {MISSING} or nothing:
        raise typer.Exit(EXIT_INCOMPLETE)


def _show_plan(made: Plan, as_json: bool) -> None:
    import json

    from flatbed.lab.plan_render import render
    from flatbed.lab.tables import console

    if as_json:
        typer.echo(json.dumps(made.to_json()))
    else:
        render(made, console())


def _show_verdicts(made: Plan, verdicts: Sequence[Verdict], as_json: bool) -> None:
    import dataclasses
    import json

    from flatbed.lab.plan_render import render_verdicts
    from flatbed.lab.tables import console

    if as_json:
        typer.echo(json.dumps({**made.to_json(), "verified": [dataclasses.asdict(one) for one in verdicts]}))
    else:
        render_verdicts(verdicts, console())


def _tell(line: str) -> None:
    typer.echo(line, err=True)
