"""One training run of TRL's, with a stopwatch around its generations: what trl_steps.py has run in another process.

What is in use of the device's memory while a step is trained, and where it is told::

      max_memory_allocated      tensors, of torch's own allocator          training_bytes, at its peak
      memory_reserved           beyond: torch's cache, there for training  (nothing is held)
      graph pools               beyond their tensors: graphs' alone        graph_bytes
      mem_get_info              beyond memory_reserved: the context,       outside_bytes
                                code of kernels, graphs, chunks of K/V

Their sum is what training takes at its peak. Code of kernels stays with the process: runs are comparable to the byte
where each had a process of its own.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import trl
from datasets import Dataset
from jobs import Training
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flatbed.integrations import trl as ours
from flatbed.lab.models import load

WORDS = 250


@dataclass
class Phases:
    """Times and memory of one training run, taken around each generation.

    Attributes:
        each_generation_s, each_release_s, each_training_s: seconds of each step: in generations, in what surrounds
            them, and from there to the next.
        generation_bytes, training_bytes: the most that torch had allocated in any generation, and outside of them.
        pool_bytes: the most that Flatbed's pool and graphs had beside that, in a generation.
        graph_bytes, outside_bytes: the most that is held beside `training_bytes` while a step is trained.
    """

    each_generation_s: list[float] = field(default_factory=list)
    each_release_s: list[float] = field(default_factory=list)
    each_training_s: list[float] = field(default_factory=list)
    generation_bytes: int = 0
    training_bytes: int = 0
    pool_bytes: int = 0
    graph_bytes: int = 0
    outside_bytes: int = 0


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak() -> int:
    """The most that torch had allocated since this was last asked."""
    if not torch.cuda.is_available():
        return 0
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def outside() -> int:
    """Bytes of the device in use, but not by torch's allocator."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def unused_in_graph_pools() -> int:
    """Bytes that torch's allocator keeps for the graphs of whoever captured any, beyond the tensors in them."""
    if not torch.cuda.is_available():
        return 0
    segments = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0)]
    return sum(one["total_size"] - one["allocated_size"] for one in segments)


class Compilations:
    """Triton kernels that were compiled, or loaded from its cache on the disk, since this was made."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.loaded, self.seconds = 0, 0.0
        try:
            from triton import knobs
        except ImportError:  # no Triton, or one that does not tell
            return
        knobs.compilation.listener = self._listen

    def _listen(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        self.seconds += times.total / 1e6
        if cache_hit:
            self.loaded += 1
        else:
            self.compiled.append(src.name)

    def report(self) -> dict[str, Any]:
        by_name = {name: self.compiled.count(name) for name in sorted(set(self.compiled))}
        counts = {"compiled": len(self.compiled), "loaded": self.loaded, "seconds": round(self.seconds, 2)}
        return {**counts, "by_name": by_name}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of a few words; other ids of the model's vocabulary decode to nothing."""
    vocabulary = {"<eos>": 0, "<pad>": 1, **{f"w{at}": at + 2 for at in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def make_prompts(count: int) -> Dataset:
    """Prompts of 16 to 64 tokens."""
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randrange(16, 65))) for _ in range(count)]
    return Dataset.from_list([{"prompt": text} for text in texts])


def make_trainer(job: Training, folder: str) -> Any:
    on_flatbed = job.rollouts.startswith("flatbed")
    algorithm = job.algorithm.upper()
    trainer_class = getattr(ours if on_flatbed else trl, f"{algorithm}Trainer")
    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": job.steps,
        "per_device_train_batch_size": job.rows,
        "num_generations": job.generations,
        "max_completion_length": job.new_tokens,
        "learning_rate": 1e-6,
        "beta": 0.0,  # RLOO's default needs a reference model, which TRL loads by a name that random weights lack
        "bf16": not job.tiny,
        "use_cpu": job.tiny,
        "gradient_checkpointing": job.checkpointing,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    if job.rollouts.startswith("continuous"):
        cache = {"num_blocks": 64} if job.rollouts == "continuous-64" else {}
        if job.tiny:  # half of a machine's memory takes a CPU minutes a step
            cache = {"max_batch_tokens": 64, "num_blocks": 8 if cache else 16}
        settings["use_transformers_continuous_batching"] = True
        settings["transformers_continuous_batching_config"] = cache
    if job.rollouts == "flatbed-plain" and job.algorithm == "grpo":
        settings["vllm_importance_sampling_correction"] = False
    more = {"flatbed": {"held": "32 GiB"}} if job.rollouts == "flatbed-held" else {}
    device = "cpu" if job.tiny else "cuda"
    model, _ = load("shape:tiny" if job.tiny else "shape:qwen2.5-0.5b", device, job.dtype, job.attention)
    return trainer_class(
        model=model.train(),
        args=getattr(trl, f"{algorithm}Config")(**settings),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        train_dataset=make_prompts(max(2, job.steps * job.rows // job.generations)),
        processing_class=make_tokenizer(),
        **more,
    )


def watch(trainer: Any, job: Training, tell: Any) -> Phases:
    """Puts a stopwatch around the trainer's generation, which is told of each; without `rollouts`, random completions
    take its place."""
    phases = Phases()
    turn, generate = trainer._generate_single_turn, trainer._generate
    draw = random.Random(1)
    last = [now()]

    def make_up(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        completions = [[draw.randrange(2, WORDS) for _ in range(job.new_tokens)] for _ in prompt_ids]
        return (completions, None) if job.algorithm == "grpo" else completions

    def engine_bytes() -> int:
        if not hasattr(trainer, "flatbed") or trainer.flatbed.engine is None:
            return 0
        memory = trainer.flatbed.engine.memory()
        return memory.committed + memory.graphs

    def timed_turn(*given: Any, **named: Any) -> Any:
        start = now()
        result = (make_up if job.rollouts == "none" else turn)(*given, **named)
        phases.each_generation_s.append(now() - start)
        phases.pool_bytes = max(phases.pool_bytes, engine_bytes())
        return result

    def timed_generate(*given: Any, **named: Any) -> Any:
        training_ends(phases)
        start, before = now(), sum(phases.each_generation_s)
        if phases.each_generation_s:
            phases.each_training_s.append(start - last[0])
        result = generate(*given, **named)
        ended = last[0] = now()
        phases.each_release_s.append(ended - start - (sum(phases.each_generation_s) - before))
        phases.generation_bytes = max(phases.generation_bytes, peak())
        if engine_bytes() > phases.graph_bytes:  # asked for rarely, because the answer takes long
            # Pools of graphs that are gone lie in torch's cache: what is held is no more than the engine's.
            phases.graph_bytes = max(phases.graph_bytes, min(engine_bytes(), unused_in_graph_pools()))
        tell(round(ended - start, 3))
        return result

    trainer._generate_single_turn, trainer._generate = timed_turn, timed_generate
    return phases


def training_ends(phases: Phases) -> None:
    phases.training_bytes = max(phases.training_bytes, peak())
    phases.outside_bytes = max(phases.outside_bytes, outside())


def run(job: Training, tell: Any) -> dict[str, Any]:
    """Trains; `tell` is given the seconds of each generation. Returns what was measured."""
    warnings.filterwarnings("ignore")
    compilations = Compilations()
    with tempfile.TemporaryDirectory() as folder:
        start = now()
        trainer = make_trainer(job, folder)
        setup = now() - start
        phases = watch(trainer, job, tell)
        peak()
        start = now()
        trainer.train()
        seconds = now() - start
        training_ends(phases)
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    watched = ("sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean")
    if hasattr(trainer, "flatbed"):
        trainer.flatbed.close()
    del trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {
        "setup_s": round(setup, 3),
        "seconds": round(seconds, 3),
        "generation_s": round(sum(phases.each_generation_s), 3),
        "first_generation_s": round(phases.each_generation_s[0], 3),
        "release_s": round(sum(phases.each_release_s), 3),
        "mean_completion": sum(entry["completions/mean_length"] for entry in log) / len(log),
        **{name: [entry[name] for entry in log] for name in watched if name in log[0]},
        "kernels": compilations.report(),
        **asdict(phases),
    }


def prepare() -> str:
    """Makes the CUDA context, which is nobody's start-up. Returns the name of the machine."""
    if not torch.cuda.is_available():
        return "CPU"
    torch.ones(1, device="cuda").sum().item()
    return torch.cuda.get_device_name()
