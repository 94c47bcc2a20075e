"""How a run of the lab names its model: always a string, so that it travels to other processes and environments.

A hub name, a local folder, `demo`, or a built-in shape with random weights (`shape:tiny`), which needs no download and
runs as fast as the real model of that shape. Shapes have no EOS, so that lengths are fixed.

Nothing here needs more than torch and Transformers: worker processes in other environments import it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flatbed.errors import ConfigError, ModelLoadError
from flatbed.models import DEMO, install_demo, load_model, resolve_device, resolve_dtype

SHAPE_PREFIX = "shape:"

_ROPE = {"rope_theta": 1e6, "rope_type": "default"}
_NO_SPECIAL: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


# Each shape: the name of its config's class in Transformers, and that config's arguments.
_Shape = tuple[str, dict[str, Any]]

SHAPES: dict[str, _Shape] = {
    "qwen2.5-0.5b": (
        "Qwen2Config",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-8b": (
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
    "tiny": (
        "Qwen2Config",
        {
            "vocab_size": 509,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
    ),
}


def import_packages() -> None:
    """Imports what loading a model needs, without loading one: seconds, most of them torch's and Transformers'."""
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401


def is_shape(name: str) -> bool:
    """Whether it names a built-in shape with random weights."""
    return name.startswith(SHAPE_PREFIX)


def load_config(name: str) -> Any:
    """The Transformers config of a model, without its weights.

    Raises ConfigError for an unknown shape, ModelLoadError (a ConfigError) when there is no such model.
    """
    if is_shape(name):
        return _shape_config(name)
    from transformers import AutoConfig

    source, gguf = _source(name)
    try:
        return AutoConfig.from_pretrained(source, **gguf)
    except (OSError, ValueError, KeyError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        known = ", ".join(SHAPE_PREFIX + shape for shape in SHAPES)
        raise ModelLoadError(
            f"cannot read the config of model {name!r} (a hub name, a local folder, a .gguf file, {DEMO!r}, {known}): "
            f"{reason}"
        ) from error


def load_tokenizer(name: str) -> Any | None:
    """The tokenizer alone; None where the model has none."""
    if is_shape(name):
        return None
    from transformers import AutoTokenizer

    source, gguf = _source(name)
    try:
        return AutoTokenizer.from_pretrained(source, **gguf)
    except (OSError, ValueError, KeyError):
        return None


def load(name: str, device: Any, dtype: Any, attn_implementation: str | None = None) -> tuple[Any, Any | None]:
    """The model in eval mode, and its tokenizer (None where it has none).

    Args:
        device: a torch device or its name; `auto` is CUDA where there is one.
        dtype: a torch dtype or its name; `auto` is float32 on the CPU and bfloat16 elsewhere.
        attn_implementation: as in Transformers' `from_pretrained`; None leaves the choice to Transformers.

    Raises ConfigError (ModelLoadError) as `load_config` does, and for an attention that cannot be had here.
    """
    target = resolve_device(device)
    chosen = resolve_dtype(dtype, target)
    if is_shape(name):
        model, tokenizer = _random(_shape_config(name), target, chosen), None
    else:
        model, tokenizer = load_model(name, device=target, dtype=chosen)
    if attn_implementation is not None:
        try:
            model.set_attn_implementation(attn_implementation)
        except (ValueError, ImportError, OSError) as error:
            raise ConfigError(f"attention {attn_implementation!r} cannot be used here: {error}") from error
    return model.eval(), tokenizer


def save(name: str, folder: str | Path) -> Path:
    """Writes the model to `folder` for engines that read a checkpoint, once: a folder that has one is left as it is.

    Weights are bfloat16, on whatever device is there. A model that is a folder already is not copied: its own folder
    is the answer. The folder appears whole or not at all.
    """
    if name == DEMO:
        return install_demo()
    if not is_shape(name):
        return Path(name).expanduser()
    folder = Path(folder)
    if (folder / "config.json").is_file():
        return folder
    model, _ = load(name, "auto", "bfloat16")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        model.save_pretrained(scratch)
        if folder.is_dir():  # empty, or it would have been taken above
            folder.rmdir()
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def save_config(name: str, folder: str | Path) -> Path:
    """Writes the config of a built-in shape alone, for engines that make up weights by themselves. Answers `folder`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = _shape_config(name)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "bfloat16"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    return folder


def limits(name: str) -> tuple[int | None, int]:
    """`longest_of` and `vocabulary_of` a model; of a built-in shape without importing anything.

    Raises as `load_config` does.
    """
    if is_shape(name):
        arguments = _shape(name)[1]
        return arguments["max_position_embeddings"], arguments["vocab_size"]
    config = load_config(name)
    return longest_of(config), vocabulary_of(config)


def longest_of(config: Any) -> int | None:
    """The most positions of the model, prompt and completion together; None where the config sets no limit."""
    text = config.get_text_config()
    return getattr(text, "max_position_embeddings", None)


def vocabulary_of(config: Any) -> int:
    """Entries of the vocabulary."""
    return int(config.get_text_config().vocab_size)


def kv_token_bytes(config: Any, itemsize: int) -> int:
    """Bytes of one token's K/V over all layers of a model with ordinary (multi-head or grouped) attention."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_dim * itemsize


def _source(name: str) -> tuple[str, dict[str, Any]]:
    """What Transformers' `from_pretrained` gets for a model that is no shape."""
    path = install_demo() if name == DEMO else Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    return str(path), {}


def _shape(name: str) -> _Shape:
    shape = name.removeprefix(SHAPE_PREFIX)
    if shape not in SHAPES:
        raise ConfigError.unknown("shape", shape, SHAPES)
    return SHAPES[shape]


def _shape_config(name: str) -> Any:
    import transformers

    kind, arguments = _shape(name)
    rope = dict(_ROPE)  # a config may write into it
    return getattr(transformers, kind)(**arguments, rope_parameters=rope, **_NO_SPECIAL)


def _random(config: Any, device: Any, dtype: Any) -> Any:
    """A model of this config with the same random weights in every process on the same kind of device.

    Made on the device, in its dtype, each weight drawn once.
    """
    import torch
    from transformers import AutoModelForCausalLM

    before = torch.get_default_dtype()
    draws = _last_draws()
    try:
        torch.set_default_dtype(dtype)
        torch.manual_seed(0)
        with torch.device(device), draws:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    draws.draw(model)
    for holder in (model.generation_config, model.config):
        holder.eos_token_id = None
    return model


# Numbers that are really drawn of a weight on the CPU; the rest repeats them. A prime, so that no rows are alike.
_BLOCK = 4_194_301


def _last_draws() -> Any:
    """A context in which random initialisations are put off; its `draw(model)` does the last one of each weight.

    Weights are drawn twice when a model is built, by torch's layers and by Transformers (and a tied head a third time,
    only to be dropped): of 0.5 billion weights that takes longer than all else.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    # By name, for Transformers puts functions of its own in the place of `torch.nn.init`'s while it builds a model.
    elementwise = {"normal_", "uniform_"}
    put_off = {*elementwise, "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_"}

    class LastDraws(TorchFunctionMode):  # here, because importing this module must not import torch
        def __init__(self) -> None:
            super().__init__()
            # By id of the weight, which is kept, so that its id stays its own.
            self._draws: dict[int, tuple[Any, Any, Callable[[Any], Any]]] = {}

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            more = dict(kwargs or {})
            if getattr(func, "__name__", "") in put_off:
                weight, *rest = args if args else (more.pop("tensor"),)
                if isinstance(weight, torch.nn.Parameter):
                    self._draws[id(weight)] = (weight, func, lambda into: func(into, *rest, **more))
                    return weight
            return func(*args, **(kwargs or {}))

        def draw(self, model: Any) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    if id(parameter) in self._draws:
                        _, func, drawing = self._draws[id(parameter)]
                        _drawn(parameter.data, drawing, func.__name__ in elementwise)
            self._draws.clear()

    return LastDraws()


def _drawn(weight: Any, draw: Callable[[Any], Any], elementwise: bool) -> None:
    """Fills a weight by `draw`; on the CPU, where a number takes 10 ns, only a block, which is then repeated."""
    if not elementwise or weight.device.type != "cpu" or weight.numel() <= _BLOCK:
        draw(weight)
        return
    flat = weight.view(-1)
    block = flat[:_BLOCK]
    draw(block)
    for part in flat[_BLOCK:].split(_BLOCK):
        part.copy_(block[: len(part)])
