"""The parts of a sitting: what each measures, by which command, and how long that is expected to take (see sitting.py).

Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SMALL, LARGE = "0.5B", "8B"
ALL = "article,mixed,rollout,one,concurrent,long"

# Name → script, below this repository, and what it writes by its `--out`.
SCRIPTS = {
    "engine": ("benchmarks/engine.py", "engine.json"),
    "attention": ("benchmarks/attention.py", "attention.json"),
    "deterministic": ("benchmarks/deterministic.py", "deterministic.json"),
    "trl-steps": ("benchmarks/trl_steps.py", "trl-steps.json"),
    "fidelity": ("benchmarks/fidelity.py", "fidelity.json"),
    "arithmetic": ("examples/grpo_arithmetic.py", "runs"),
}
TESTS = "tests"

# What a sitting is divided into, each to fit into ten minutes.
CALLS = {
    0: "the tests on a GPU, kernels by themselves",
    1: "the 0.5B model, and what is measured of Flatbed alone",
    2: "the report on capacity",
    3: "the 8B model, SDPA",
    4: "training with TRL",
    5: "fidelity, and a training run that learns something",
}


@dataclass(frozen=True)
class Part:
    """One command of a sitting.

    Attributes:
        call: which of CALLS it belongs to; None is an extra, which runs only when it is named.
        seconds: expected on one H200 with 16 cores.
        what: what it shows.
        command: its words, with {names} of `values`; the first is `bench`, `trace` or `plan` (of `flatbed`), one of
            SCRIPTS, or TESTS.
        model: SMALL or LARGE.
        table: its medians belong into the table of workloads.
        report: its calls of `article` belong into the report on capacity.
        gpu: it makes no sense on a CPU.
    """

    name: str
    call: int | None
    seconds: float
    what: str
    command: str
    model: str = SMALL
    table: bool = False
    report: bool = False
    gpu: bool = False


_BENCH = "bench capacity --device {device} --no-report --time-limit 240"
_SMALL, _LARGE = f"{_BENCH} --model {{small}}", f"{_BENCH} --model {{large}}"
_FEW = "--repeats 5 --enough 2 --no-latency"  # for what takes seconds a call: two calls at the least
_REPORT = f"{_SMALL} --workload article --shared"
_VLLM = "--engine {vllm}:FLASH_ATTN,enable_prefix_caching=false,load_format=dummy"
_TRACE = "trace --model {small} --device {device} --workload article --json"
_TRL = "trl-steps --limit 150"
_FIDELITY = "--engines flatbed,deterministic,transformers --limit 60"
_WITHOUT_MIXED = "article,rollout,one,concurrent,long"

# Expected seconds: about 14 for the first process (imports 9, CUDA and weights 4), 4 for each further one; then calls
# as they were measured in earlier sittings (a call of 5.20.2 takes 20 s at 50 % and 32 s at 90 %, of SDPA 9 s, of the
# 0.5B model by Flatbed 0.1-2 s; vLLM starts in 50-75 s). What is not known yet is guessed high.
PARTS: tuple[Part, ...] = (
    # ---- call 0
    Part("tests", 0, 200, "the tests that need a GPU, but those of memory",
         f"{TESTS} -n {{workers}} --dist load --ignore=tests/gpu/test_elastic_gpu.py tests/gpu", gpu=True),
    Part("tests-memory", 0, 40, "those of memory, one after another", f"{TESTS} tests/gpu/test_elastic_gpu.py",
         gpu=True),
    Part("attention", 0, 60, "attention by itself, beside other kernels", "attention", gpu=True),
    Part("deterministic", 0, 60, "what deterministic=True costs", "deterministic --device cuda --profile", gpu=True),
    # ---- call 1: the table of the 0.5B model, and what is measured of Flatbed alone
    Part("flatbed-small", 1, 70, "Flatbed, every workload",
         f"{_SMALL} --workload {ALL} --capacity {{most}} --engine flatbed --repeats 9 --warm 1 --enough 6", table=True),
    Part("vllm-small", 1, 100, "vLLM, every workload; its 90 % in the report on capacity",
         f"{_SMALL} --workload {ALL} --capacity 90% {_VLLM} {_FEW}", table=True, report=True),
    Part("transformers-small", 1, 160, "Transformers with a persistent manager (its best setting), every workload",
         f"{_SMALL} --workload {ALL} --capacity {{pool}} --engine {{old}}:{{flash}},persistent "
         f"--engine {{new}}:{{flash}},persistent {_FEW}", table=True),
    Part("cold", 1, 55, "Flatbed: first call of a process, smallest capacity and 90 %",
         f"{_SMALL} --workload article --capacity {{least}},{{most}} --engine flatbed --repeats 1 --no-latency "
         "--cold-repeats {colds}"),
    Part("flatness", 1, 35, "Flatbed: smallest capacity to 90 %, cold and warm; memory; the machine's ceilings",
         "engine --shape {small} --device {device} --workload article --flatness --repeats 5"),
    Part("profile", 1, 65, "Flatbed: how long the GPU idles",
         "engine --shape {small} --device {device} --workload article,mixed --profile", gpu=True),
    Part("verify", 1, 30, "flatbed plan --verify",
         "plan --model {small} --device {here} --workload article --engine flatbed --capacity {least} "
         "--verify --most-repeats 8 --json"),
    # ---- call 2: the report on capacity
    Part("report-flatbed", 2, 50, "Flatbed at four capacities, padded generate beside it",
         f"{_REPORT} --capacity {{capacities}} --engine flatbed --engine generate:sdpa --repeats 9 --warm 1 --enough 8",
         report=True),
    Part("report-new", 2, 95, "the newest Transformers with and without warm-up, the older one without",
         f"{_REPORT} --capacity {{capacities}} --engine {{new}}:{{flash}} --engine {{new}}:{{flash}},warmup=false "
         f"--engine {{old}}:{{flash}},warmup=false {_FEW}", report=True),
    Part("report-old", 2, 190, "the Transformers of the published report",
         f"{_REPORT} --capacity {{capacities}} --engine {{old}}:{{flash}} {_FEW}", report=True),
    Part("vllm-report", 2, 110, "vLLM at 30 % and 50 %",
         f"{_SMALL} --workload article --capacity 30%,50% {_VLLM} {_FEW}", report=True),
    Part("persistent", 2, 25, "the newest Transformers with a persistent manager at 90 %",
         f"{_REPORT} --capacity {{most}} --engine {{new}}:{{flash}},persistent {_FEW}", report=True),
    Part("trace-flatbed", 2, 20, "where Flatbed's time goes", f"{_TRACE} --warm --engine flatbed --capacity {{half}}"),
    Part("trace-old", 2, 40, "where the time of the older Transformers goes (10 %: at 90 % it is all warm-up)",
         f"{_TRACE} --engine {{old}}:{{flash}} --capacity {{tenth}}"),
    # ---- call 3: the 8B model, SDPA
    Part("flatbed-large", 3, 110, "Flatbed, 8B",
         f"{_LARGE} --workload {_WITHOUT_MIXED} --capacity {{most}} --engine flatbed "
         "--repeats 7 --enough 4 --no-latency", LARGE, table=True),
    Part("vllm-large", 3, 165, "vLLM, 8B",
         f"{_LARGE} --workload {_WITHOUT_MIXED} --capacity 90% {_VLLM} {_FEW}", LARGE, table=True),
    Part("transformers-large", 3, 80, "the newest Transformers with a persistent manager, 8B",
         f"{_LARGE} --workload article,rollout,one,concurrent --capacity {{pool}} "
         f"--engine {{new}}:{{flash}},persistent {_FEW}", LARGE, table=True),
    Part("report-sdpa", 3, 75, "Transformers with SDPA, at both ends",
         f"{_REPORT} --capacity {{least}},{{most}} --engine {{old}}:sdpa {_FEW}", report=True),
    Part("trace-new", 3, 35, "where the time of the newest Transformers goes",
         f"{_TRACE} --warm --engine {{new}}:{{flash}} --capacity {{half}}"),
    Part("trace-sdpa", 3, 45, "where the time goes with SDPA",
         f"{_TRACE} --engine {{new}}:sdpa --capacity {{tenth}}"),
    # ---- call 4: a run of five steps takes 2-3 s, or 23 with TRL's own generate; a process 14 to start, the first
    # compiles kernels
    Part("trl-grpo", 4, 115, "five GRPO steps, each way of generating in a process of its own",
         f"{_TRL} --fresh --cases grpo:128:8 --rollouts none,flatbed,flatbed-plain,generate"),
    Part("trl-rloo", 4, 80, "the same of RLOO", f"{_TRL} --fresh --cases rloo:128:8 --rollouts none,flatbed,generate"),
    Part("trl-more", 4, 70, "512 new tokens; 32 completions of a prompt",
         f"{_TRL} --cases grpo:512:8,grpo:128:32 --rollouts none,flatbed"),
    Part("trl-continuous", 4, 60, "TRL with Transformers' continuous batching: 64 blocks, and its default",
         f"{_TRL} --cases grpo:128:8 --rollouts continuous-64,continuous"),
    Part("trl-masters", 4, 75, "float32 weights under bfloat16 autocast",
         f"{_TRL} --fresh --cases grpo:128:8 --rollouts none,flatbed,flatbed-held --dtype {{masters}}"),
    # ---- call 5
    Part("fidelity-small", 5, 90, "log-probabilities of rollouts against the trainer's, random weights",
         f"fidelity --model {{small}} --device {{device}} {_FIDELITY}"),
    Part("fidelity-demo", 5, 80, "the same of SmolLM2-135M",
         f"fidelity --model {{demo}} --device {{device}} {_FIDELITY}"),
    Part("arithmetic", 5, 200, "GRPO on sums, with Flatbed and with TRL's own generate",
         "arithmetic --model {demo} --rollouts flatbed,generate --seeds 0"),
    # ---- extras
    Part("arithmetic-again", None, 200, "GRPO on sums, from another seed",
         "arithmetic --model {demo} --rollouts flatbed,generate --seeds 1"),
    Part("mixed-large", None, 130, "the workload mixed, 8B: Flatbed and vLLM",
         f"{_LARGE} --workload mixed --capacity 90% --engine flatbed {_VLLM} {_FEW}", LARGE, table=True),
    Part("long-large", None, 60, "the workload long, 8B: Transformers",
         f"{_LARGE} --workload long --capacity {{pool}} --engine {{new}}:{{flash}},persistent {_FEW}", LARGE,
         table=True),
    Part("persistent-old", None, 60, "the older Transformers with a persistent manager at 90 %",
         f"{_REPORT} --capacity {{most}} --engine {{old}}:{{flash}},persistent {_FEW}", report=True),
    Part("sdpa-between", None, 130, "SDPA at 10 % and 50 %, both versions",
         f"{_REPORT} --capacity {{tenth}},{{half}} --engine {{old}}:sdpa --engine {{new}}:sdpa {_FEW}", report=True),
    Part("verify-new", None, 110, "flatbed plan --verify of the newest Transformers",
         "plan --model {small} --device {here} --workload article --engine {new}:{flash} --verify --most-repeats 6 "
         "--json"),
)  # fmt: skip

DONE = "part.json"  # in the folder of a part that ended by itself
SAID = "said.txt"  # what its command printed
PARTIAL = ".partial"  # behind the name of a folder while its part runs
SETUP_S = 60  # of a call, for a machine to start and environments to be unpacked; not a part


def values(options: argparse.Namespace) -> dict[str, str]:
    """What the {names} in commands stand for."""
    if not options.tiny:
        return {
            "small": "shape:qwen2.5-0.5b", "large": "shape:qwen3-8b", "device": "cuda", "here": "cuda:0",
            "old": f"transformers@{options.old}", "new": f"transformers@{options.new}",
            "vllm": f"vllm@{options.vllm}", "flash": options.attention,
            "capacities": "64 blocks,10%,50%,90%", "least": "64 blocks", "tenth": "10%", "half": "50%", "most": "90%",
            "pool": "1800 blocks",  # holds every workload at once
            "colds": "3", "workers": "12", "demo": options.demo, "masters": "float32",
        }  # fmt: skip
    from importlib.metadata import version

    return {
        "small": "shape:tiny", "large": "shape:tiny", "device": "cpu", "here": "cpu",
        # One installation stands for both versions, under two names.
        "old": f"transformers@{version('transformers')}", "new": "transformers",
        "vllm": "vllm@0.24.0", "flash": "sdpa",
        # A percentage is one of all the machine's memory, and Transformers takes it.
        "capacities": "2 blocks,4 blocks,8 blocks,16 blocks", "least": "2 blocks", "tenth": "4 blocks",
        "half": "8 blocks", "most": "16 blocks", "pool": "32 blocks",
        "colds": "2", "workers": "2", "demo": "shape:tiny", "masters": "float32",
    }  # fmt: skip


# Added to commands of a tiny sitting; of options that are given twice the last one counts.
TINY = {
    "bench": "--scale 0.05 --token-budget 256 --repeats 3 --warm 0 --enough 0.5",
    "trace": "--scale 0.05 --token-budget 256",
    "plan": "--scale 0.05 --dtype float32 --token-budget 256",
    "engine": "--scale 0.05 --repeats 2",
    "trl-steps": "--tiny --steps 2",
    "fidelity": "--engines flatbed,deterministic --prompts 2 --samples 2 --new-tokens 8",
    "arithmetic": "--tiny --steps 3",
}
TINY_SCALE = 0.05


def words(part: Part, given: Mapping[str, str], tiny: bool) -> list[str]:
    """The command of a part, to be completed by where its results go."""
    found = [word.format_map(given) for word in part.command.split()]
    if tiny:
        found += shlex.split(TINY.get(found[0], ""))
    if found[0] == "engine":
        at = found.index("--shape") + 1
        found[at] = found[at].removeprefix("shape:")
    return found


def chosen(options: argparse.Namespace) -> list[Part]:
    """The parts that are asked for, in order: by name, of a call, or all but the extras."""
    by_name = {part.name: part for part in PARTS}
    for name in options.parts:
        if name not in by_name:
            raise SystemExit(f"unknown part {name!r}; known: {', '.join(by_name)}")
    if options.parts:
        return [by_name[name] for name in options.parts]
    return [part for part in PARTS if part.call is not None and options.call in (None, part.call)]


def told(command: Sequence[str]) -> str:
    """A command as it is published: folders of this machine left out."""
    short = [re.sub(r"(?<![\w.])(?:~|\.{1,2})?/[^\s=:,]*/", "", word).removesuffix(PARTIAL) for word in command]
    if short[0] == TESTS:
        return shlex.join(["python", "-m", "pytest", *short[1:]])
    if short[0] in SCRIPTS:
        return shlex.join(["python", SCRIPTS[short[0]][0], *short[1:]])
    return shlex.join(["flatbed", *short])
