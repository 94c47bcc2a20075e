"""The command line: `flatbed generate`, `flatbed models demo`, `flatbed info`, and the commands of the lab.

Exit status: 0 when everything is done; 1 when a line could not be read or a request was refused (all others are
done); 2 for a setting, a file or a model that cannot be used; 130 after Ctrl-C or SIGTERM.

torch and Transformers are imported inside of the commands, so that `flatbed --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatbed.config import DEFAULT_TOKEN_BUDGET, SCHEDULES, EngineConfig
from flatbed.console import EXIT_INCOMPLETE, errors_told, say
from flatbed.errors import ConfigError, FlatbedWarning
from flatbed.lab import cli as lab
from flatbed.lab.units import told_bytes
from flatbed.models import (
    AUTO,
    DEMO,
    DEMO_PACKAGE,
    DEMO_TITLE,
    DEMO_VERSION,
    DEVICES,
    DTYPES,
    demo_status,
    install_demo,
    load_model,
    resolve_device,
)
from flatbed.prompts import PromptLine, ResultFile, read_prompts, seed_of
from flatbed.request import Output, SamplingParams

if TYPE_CHECKING:
    from flatbed.engine import Engine

app = typer.Typer(
    name="flatbed",
    help="Continuous-batching generation for Hugging Face Transformers models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Models that can be put in place.", no_args_is_help=True)
app.add_typer(models_app, name="models")
for command in lab.COMMANDS:
    app.command()(command)

# Defaults are read from where they belong, and stand nowhere else.
_ENGINE = EngineConfig()
_SAMPLING = SamplingParams()

_OPTION_OF = {"n": "samples"}  # fields of SamplingParams whose option has another name


def main() -> None:
    """Entry point of the `flatbed` command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("flatbed"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompts: Annotated[
        str, typer.Argument(help="JSON Lines or plain text, a prompt a line; - is standard input.", metavar="PROMPTS")
    ],
    model: Annotated[str, typer.Option(help=f"A hub name, a local folder, a .gguf file, or {DEMO}.")],
    out: Annotated[Path, typer.Option(help="File of results (JSON Lines); each request is added as it finishes.")],
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = _SAMPLING.max_new_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = _SAMPLING.temperature,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = _SAMPLING.top_k,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens up to this sum.")] = _SAMPLING.top_p,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less probable than this share of the best one.")
    ] = _SAMPLING.min_p,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = _SAMPLING.repetition_penalty,
    samples: Annotated[int, typer.Option(help="Completions of each prompt.")] = _SAMPLING.n,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a completion; may be repeated.")] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Add the log-probability of each token.")
    ] = _SAMPLING.logprobs,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate exactly --max-new-tokens.")
    ] = _SAMPLING.ignore_eos,
    capacity: Annotated[
        str, typer.Option(help='The most K/V cache: "64 blocks", "20000 tokens", "8 GiB", "50%" or "auto".')
    ] = _ENGINE.capacity,
    token_budget: Annotated[
        int | None,
        typer.Option(help="The most tokens in one forward pass.", show_default=str(DEFAULT_TOKEN_BUDGET)),
    ] = _ENGINE.token_budget,
    schedule: Annotated[str, typer.Option(help=f"Which requests go next: {', '.join(SCHEDULES)}.")] = _ENGINE.schedule,
    attention: Annotated[str, typer.Option(help="A backend (flatbed info lists them), or auto.")] = _ENGINE.attention,
    block_size: Annotated[int, typer.Option(help="Tokens in a block of the cache.")] = _ENGINE.block_size,
    max_requests: Annotated[int, typer.Option(help="The most samples that run at once.")] = _ENGINE.max_requests,
    device: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}, or any device of torch.")] = AUTO,
    dtype: Annotated[
        str, typer.Option(help=f"{', '.join(DTYPES)}; auto is float32 on the CPU and bfloat16 elsewhere.")
    ] = AUTO,
    seed: Annotated[
        int, typer.Option(help="With the same seed, a request gets the same samples in every run.")
    ] = _ENGINE.seed,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits for a request whatever runs beside it; slower.")
    ] = _ENGINE.deterministic,
    chat: Annotated[bool, typer.Option("--chat", help="Take each plain prompt as a user's chat message.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Do only what --out does not have yet.")] = False,
) -> None:
    """Complete every prompt of a file.

    A line of a JSON Lines file is an object with one of prompt, messages and token_ids, and optionally an id and any
    sampling field (max_new_tokens, temperature, ...), which then counts for that line alone.
    """
    with errors_told(), _Interrupts() as interrupts:
        config = EngineConfig(
            capacity=capacity,
            token_budget=token_budget,
            schedule=schedule,
            attention=attention,
            block_size=block_size,
            max_requests=max_requests,
            seed=seed,
            deterministic=deterministic,
        )
        base = _checked(
            SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                n=samples,
                ignore_eos=ignore_eos,
                stop=tuple(stop or ()),
                logprobs=logprobs,
            )
        )
        file = read_prompts(prompts, base, chat=chat)
        with ResultFile(out, resume=resume) as results:
            run = _Run([line for line in file.lines if line.request_id not in results.done], results, interrupts)
            run.problems += [str(error) for error in file.errors]
            try:
                if run.todo:
                    run.generate(model, config, device, dtype)
            finally:
                run.tell_problems()
        if run.problems:
            raise typer.Exit(EXIT_INCOMPLETE)


@models_app.command()
def demo() -> None:
    """Say what the built-in demonstration model is, and put it in place."""
    with errors_told():
        status = demo_status()
        typer.echo(f"{DEMO}: {DEMO_TITLE}, from the package {DEMO_PACKAGE}=={DEMO_VERSION}")
        if status.ready:
            typer.echo(f"in place: {status.folder}")
            return
        if not status.missing:
            typer.echo("converting (some 20 s, once) ...")
            _quiet_transformers()
        typer.echo(f"in place: {install_demo()}")


@app.command()
def info() -> None:
    """Show versions, devices, and attention backends with why each is or is not available."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from flatbed.attention import BACKENDS, automatic

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    for title, rows in (
        ("versions", _version_rows()),
        ("devices", _device_rows()),
        ("demo model", [_demo_row()]),
    ):
        for number, row in enumerate(rows):
            table.add_row(title if number == 0 else "", *row)
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    for number, (name, backend) in enumerate(BACKENDS.items()):
        for at, device in enumerate(devices):
            found = backend.availability(device)
            said = f"{'available' if found.ok else 'not available'}{f': {found.reason}' if found.reason else ''}"
            table.add_row("attention" if number == at == 0 else "", name if at == 0 else "", f"on {device}: {said}")
    for at, device in enumerate(devices):
        kind, why = automatic(device)
        table.add_row("", "auto" if at == 0 else "", f"on {device}: {kind.name}: {why}")
    Console().print(table)


# ------------------------------------------------------------------------------------------------- one run of generate


class _Run:
    """The requests of one call of `flatbed generate`, on their way into the file of results.

    Attributes:
        problems: what went wrong with lines and requests, one sentence each.
    """

    def __init__(self, todo: list[PromptLine], results: ResultFile, interrupts: _Interrupts) -> None:
        self.todo = todo
        self.problems: list[str] = []
        self._results = results
        self._interrupts = interrupts
        self._line_of = {line.request_id: line.line for line in todo}

    def generate(self, model_name: str, config: EngineConfig, device: str, dtype: str) -> None:
        """Loads the model and runs everything. Raises KeyboardInterrupt with all that finished in the file."""
        _quiet_transformers()
        from flatbed.attention import choose
        from flatbed.engine import Engine

        choose(config.attention, resolve_device(device))  # a wrong name is told before minutes of loading
        model, tokenizer = load_model(model_name, device=device, dtype=dtype)
        with (
            Engine(model, tokenizer, **dataclasses.asdict(config)) as engine,
            _Progress(engine, len(self.todo)) as progress,
        ):

            def on_output(output: Output) -> None:
                self._land(output)
                progress.finished += 1

            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FlatbedWarning)  # of refused requests: `tell_problems` names each
                    engine.generate(
                        [line.prompt for line in self.todo],
                        [_with_seed(line, config.seed) for line in self.todo],
                        request_ids=[line.request_id for line in self.todo],
                        on_output=on_output,
                        on_step=progress.update,
                    )
            except KeyboardInterrupt:
                # It may have come between the end of a request and its callback.
                for output in engine.partial_outputs:
                    self._land(output)
                say(f"interrupted; {self._results.path} has what finished, and --resume does the rest")
                raise

    def _land(self, output: Output) -> None:
        """Writes the output of a request, once; one that was cut short is left to `--resume`."""
        with self._interrupts.held():
            if self._results.write(output) and output.error is not None:
                self.problems.append(f"line {self._line_of[output.request_id]}: {output.error}")

    def tell_problems(self) -> None:
        for problem in self.problems:
            say(problem)


def _with_seed(line: PromptLine, seed: int) -> SamplingParams:
    if line.sampling.seed is not None:
        return line.sampling
    return dataclasses.replace(line.sampling, seed=seed_of(seed, line.request_id))


def _checked(sampling: SamplingParams) -> SamplingParams:
    """The same, unless a value is out of range: that is a wrong option, told before anything is loaded."""
    problem = sampling.problem()
    if problem is not None:
        field, why = problem
        raise ConfigError(f"--{_OPTION_OF.get(field, field).replace('_', '-')} {why}")
    return sampling


class _Interrupts:
    """Turns Ctrl-C and SIGTERM into KeyboardInterrupt, but not in a `held` block: then at the end of it.

    So a line of results is written as a whole and once, whenever the signal comes.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._held = False
        self._came = False

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():  # only there can Python handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job stays one
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if not self._held:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        self._came = False
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._came:
            raise KeyboardInterrupt


class _Progress:
    """A line on standard error while requests run; nothing when that is not a terminal.

    Attributes:
        finished: requests that ended; counted by the caller.
    """

    INTERVAL = 0.1  # seconds between two paintings

    def __init__(self, engine: Engine, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.finished = 0
        self._engine = engine
        self._start = self._painted = time.perf_counter()
        console = Console(stderr=True)
        self._shown = console.is_terminal
        self._bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,  # painted after steps, so that no other thread takes time from them
            disable=not self._shown,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            self._paint()
        self._bar.stop()

    def update(self) -> None:
        """Called after every step; paints now and then."""
        if self._shown and time.perf_counter() - self._painted >= self.INTERVAL:
            self._paint()

    def _paint(self) -> None:
        self._painted = time.perf_counter()
        stats, memory = self._engine.stats(), self._engine.memory()
        rate = stats.generated_tokens / max(self._painted - self._start, 1e-9)
        self._bar.update(
            self._task,
            completed=self.finished,
            description=f"{rate:,.1f} tokens/s, {stats.running} running, {stats.waiting} waiting, cache "
            f"{told_bytes(memory.live)} live of {told_bytes(memory.committed)} committed",
            refresh=True,
        )


# ------------------------------------------------------------------------------------------------------ small helpers


def _quiet_transformers() -> None:
    """Without a terminal nobody looks at Transformers' progress bars and advice."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()


def _version_rows() -> Iterable[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in ("flatbed", "torch", "transformers", "triton", "trl", "vllm"):
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def _device_rows() -> Iterable[tuple[str, str]]:
    import torch

    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (page * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    yield "cpu", f"{torch.get_num_threads()} threads, {told_bytes(total)} of memory, {told_bytes(free)} free"
    for index in range(torch.cuda.device_count()):
        name, memory = torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index)
        yield f"cuda:{index}", f"{name}, {told_bytes(memory[1])} of memory, {told_bytes(memory[0])} free"
    if not torch.cuda.device_count():
        yield "cuda", "none that torch can use"


def _demo_row() -> tuple[str, str]:
    status = demo_status()
    return DEMO, f"{DEMO_TITLE}, " + (f"in {status.folder}" if status.ready else "not in place: flatbed models demo")
