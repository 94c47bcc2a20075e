"""What tests of the engine share: small models, a tokenizer of bytes, snapshots of a model, and books that balance."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import torch
from families import build, reference
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import flatbed

POSITIONS = 512


@functools.cache
def shared(family: str, seed: int = 0) -> nn.Module:
    """One model of that family for all tests of a process that only read it."""
    return build(family, seed)


@functools.cache
def _expected(family: str, seed: int, prompt: tuple[int, ...], new_tokens: int) -> tuple[int, ...]:
    return tuple(reference(shared(family, seed), list(prompt), new_tokens))


def expected(family: str, prompts: list[list[int]], new_tokens: int, seed: int = 0) -> list[list[int]]:
    """What `generate` makes of each prompt alone, greedily; computed once per process."""
    return [list(_expected(family, seed, tuple(prompt), new_tokens)) for prompt in prompts]


def draw_prompts(lengths: tuple[int, ...] | list[int], seed: int = 0, vocabulary: int = 211) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(n)] for n in lengths]


def tokens_of(outputs: list[flatbed.Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def samples_of(outputs: list[flatbed.Output]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.samples] for output in outputs]


def assert_idle(engine: flatbed.Engine) -> None:
    """Nothing is under way, every block is free, and the books balance."""
    stats, memory = engine.stats(), engine.memory()
    assert (stats.running, stats.waiting, memory.live) == (0, 0, 0)
    assert not engine.has_work
    engine._scheduler.check()


def logits_after(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    """float32 [positions, vocabulary]: what the user's own model says after each token, in eval mode."""
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float()
    model.train(training)
    return logits


# ---- text ------------------------------------------------------------------------------------------------------------

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
# Pieces of more than one byte: whole words, one that crosses the letters of a stop string, and one that ends in the
# middle of a character, as the vocabularies of real models have them.
PIECES = ("he", "ll", "hell", "st", "op", " w", "or", "ld", "b\u00e2", "\u00c3\u00bc")


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: token 0 is <eos>, then all bytes, then a few longer pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{letter: number for number, letter in enumerate(alphabet, start=1)}}
    merges = []
    for piece in PIECES:
        letters = piece.replace(" ", "\u0120")
        if letters not in vocabulary:
            vocabulary[letters] = len(vocabulary)
        half = 2 if len(letters) == 4 else 1
        merges.append((letters[:half], letters[half:]))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def byte_ids(text: str) -> list[int]:
    """A token for each byte, so that characters and stop strings span tokens."""
    tokenizer = byte_tokenizer()
    letters = dict(zip(range(256), pre_tokenizer_letters(), strict=True))
    return [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in text.encode()]


def pre_tokenizer_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary, in the order of the bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]


def scripted(script: list[int], vocabulary: int, prompt_length: int = 1) -> nn.Module:
    """A model that says `script` after any prompt of that length: its logits depend on the position alone.

    A GPT-2 whose blocks add nothing and whose position embeddings are unit vectors; the head maps each to its token.
    """
    width = len(script) + prompt_length + 1
    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=width,
        n_layer=1,
        n_head=1,
        n_positions=width,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    for holder in (model.generation_config, model.config):
        holder.eos_token_id = holder.pad_token_id = holder.bos_token_id = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_f.weight" not in name:
                parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(width))
        for at, token in enumerate(script):
            model.lm_head.weight[token, prompt_length - 1 + at] = 1.0
    return model


# ---- the user's model ------------------------------------------------------------------------------------------------

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that an engine could have touched: compare two of them with ==."""
    found: dict[str, Any] = {
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": model.config._attn_implementation,
        "generation config": copy.deepcopy(model.generation_config.to_dict()),
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "generate": (type(model).generate, "generate_batch" in vars(model), model.forward.__func__),
    }
    for name, module in model.named_modules():
        found[f"module {name}"] = (
            type(module),
            module.training,
            tuple(sorted(vars(module))),
            tuple(id(child) for child in module._modules.values()),
            tuple((hooks, tuple(map(id, getattr(module, hooks).values()))) for hooks in _HOOKS),
            getattr(getattr(module, "config", None), "_attn_implementation", None),
            id(getattr(module, "config", None)),
        )
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        found[f"tensor {name}"] = (
            id(tensor),
            tensor.data_ptr(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tensor._version,
            tensor.grad is None,
            tensor.detach().clone().view(-1).view(torch.uint8).numpy().tobytes(),
        )
    return found


def changes(before: dict[str, Any], model: nn.Module) -> list[str]:
    """The names of what is no longer as it was."""
    after = snapshot(model)
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
