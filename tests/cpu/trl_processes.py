"""Two processes on the CPU, over gloo: run by `torchrun` (see test_trl_processes.py), prints a line for what it saw.

First data-parallel training through TRL, with padded `generate` and with Flatbed. Then rollouts of models whose weights
lie in pieces on the two processes: accelerate shards nothing on a CPU, so `Rollouts` are given what they use of a
trainer.
"""

from __future__ import annotations

import tempfile
import types
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from families import build, reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import GenerationConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from trl.distributed import DistributedBackend
from trl_training import GREEDY, PROMPTS, logged, make_trainer, tiny_model

import flatbed
from flatbed.errors import UnsupportedModelError
from flatbed.integrations.trl import Rollouts

PROMPT_IDS = [[5, 6, 7, 9, 12, 44], [9, 8, 3], list(range(40))]


def say(what: str, seen: object) -> None:
    """A line of its own, whatever the other process writes at the same time."""
    print(f"\n{dist.get_rank()}: {what}: {seen}\n", end="", flush=True)


def data_parallel(folder: Path) -> None:
    rows = [{"prompt": f"{prompt} {at}"} for at in range(2) for prompt in PROMPTS]
    options: dict[str, Any] = {"generation_kwargs": GREEDY, "rows": rows, "max_steps": 3, "ddp_backend": "gloo"}
    uncorrected = {"vllm_importance_sampling_correction": False}
    trainers = []
    for on_flatbed in (False, True):
        trainers.append(make_trainer("grpo", folder, on_flatbed=on_flatbed, **options, **uncorrected))
        trainers[-1].train()
    theirs, ours = (trainer.reward_funcs[0] for trainer in trainers)
    say("processes", trainers[1].accelerator.num_processes)
    say("same prompts", ours.prompts == theirs.prompts)
    say("same completions", ours.completions == theirs.completions)
    say("completions change", ours.completions[0] != ours.completions[1])
    say("first prompt", ours.prompts[0][0])
    pairs = zip(*(trainer.model.parameters() for trainer in trainers), strict=True)
    say("same weights", all(torch.equal(a, b) for a, b in pairs))

    options |= {"generation_kwargs": {}, "more": {"flatbed": {"seed": 3}}}
    sampled = make_trainer("grpo", folder, on_flatbed=True, model=tiny_model(initializer_range=0.1), **options)
    sampled.train()
    say("log-probabilities agree", max(logged(sampled, "sampling/sampling_logp_difference/max") or [0]) < 1e-5)
    say("samples of one prompt", sampled.flatbed.generate([[5, 6, 7, 8]], None, 1)[1])


def sharded(version: int) -> None:
    """The two processes generate different numbers of tokens: a forward that still gathered anything would hang."""
    model, rank = build("llama"), dist.get_rank()
    if version == 1:
        wrapped: nn.Module = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=torch.device("cpu")
        )
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        try:
            flatbed.Engine(wrapped)
        except UnsupportedModelError as error:
            say("not gathered", "in pieces on several processes" in str(error))
    plugin = types.SimpleNamespace(fsdp_version=version)
    accelerator = types.SimpleNamespace(
        state=types.SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=plugin),
        unwrap_model=lambda module: module.module if version == 1 else module,
        autocast=nullcontext,
    )
    new = 5 + 7 * rank
    trainer = types.SimpleNamespace(
        accelerator=accelerator,
        _dist=DistributedBackend(accelerator),
        model_wrapped=wrapped,
        generation_config=GenerationConfig(max_new_tokens=new, **GREEDY),
    )
    rollouts = Rollouts(trainer, "processed", None, {}, 0)
    prompts = PROMPT_IDS[: 1 + rank]
    seen = []
    for _ in range(3):
        tokens = rollouts.generate(prompts, None, 1)[1]
        assert rollouts.engine is not None
        whole = build("llama")
        whole.load_state_dict(whole_weights(wrapped, version))
        expected = [reference(whole, prompt, new) for prompt in prompts]
        seen.append((tokens == expected, rollouts.engine.memory().committed, tokens[0][:4]))
        ids = torch.tensor([[1, 2, 3, 4]])
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
        wrapped(ids, labels=ids).loss.backward()
        optimizer.step()
    say(f"FSDP {version}, as generate", [same for same, *_ in seen])
    say(f"FSDP {version}, committed", [committed for _, committed, _ in seen])
    say(f"FSDP {version}, completions change", seen[0][2] != seen[1][2] != seen[2][2])


def whole_weights(wrapped: nn.Module, version: int) -> dict[str, torch.Tensor]:
    if version == 2:
        return {name: parameter.full_tensor().detach() for name, parameter in wrapped.named_parameters()}
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in wrapped.named_parameters()
        }


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        data_parallel(Path(folder))
    for version in (1, 2):
        sharded(version)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
