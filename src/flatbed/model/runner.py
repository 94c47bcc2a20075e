"""The model runner: one forward pass of the shadow per plan.

What is fixed when it is made: the shadow, and the shape of every attention layer, seen by running one token through it
(so nothing about a model's config has to be known here). What changes: the pool it is bound to, and the plans.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from flatbed.attention.base import AttentionBackend
from flatbed.errors import UnsupportedModelError
from flatbed.memory.capacity import LayerShape
from flatbed.memory.pool import LayerCache, Pool
from flatbed.memory.select import make_backing
from flatbed.memory.transfer import upload
from flatbed.model import cpu_ops
from flatbed.model.buffers import step_inputs
from flatbed.model.casts import Casts, watching
from flatbed.model.deterministic.attention import choose_invariant
from flatbed.model.deterministic.check import check_rows
from flatbed.model.deterministic.operators import BatchInvariant
from flatbed.model.fused_decoder import fuse_decoder
from flatbed.model.fusions import fuse, onednn_works
from flatbed.model.interface import NAME, probe, without_attention
from flatbed.model.shadow import make_shadow, unwrap, without_hooks
from flatbed.model.weights import Identity
from flatbed.scheduling.plan import BatchPlan, Ints

# Layer kinds of `config.layer_types` whose state is K/V alone, and those that keep a recurrent state.
_KV_LAYERS = {"full_attention", "sliding_attention"}
_RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid"}
# Layers of torch.ao.quantization.quantize_dynamic, which quantise activations per tensor.
_SCALED_TOGETHER = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic")


class ModelRunner:
    """Runs a user's model through a shadow.

    Attributes:
        layers: K/V shape of each attention layer, in order.
        kv_dtype: dtype of keys and values.
        fusions: how many modules each fusion replaced.
        device: of the model's parameters.
        vocab_size: token ids are below this.
        max_positions: the most tokens a sequence may have, or None where the model sets no limit.
    """

    def __init__(self, model: nn.Module, max_rows: int, *, deterministic: bool = False) -> None:
        check_module(model)
        self.model: Any = unwrap(model)
        check_architecture(self.model)
        _check_weights(self.model)
        self.device = next(self.model.parameters()).device
        self._precision = _autocast(self.device.type)
        self.identity = Identity(self.model)
        self.shadow: nn.Module
        self.layers: tuple[LayerShape, ...] = ()
        self._casts: Casts | None = None
        self._pool: Pool | None = None
        self._backend: AttentionBackend | None = None
        if deterministic:
            choose_invariant("auto", self.device)  # told before the model is run on a device that cannot
        self._invariant = BatchInvariant() if deterministic else None
        self._checked: set[tuple[torch.device, torch.dtype]] = set()
        self.make_shadow()
        # The token each row computes next; written by the sampler of one step, read by the next step. The last one
        # belongs to no sequence: rows of a graph that have nothing to do use it.
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)

    def make_shadow(self) -> None:
        """A new shadow, after the user's model was moved, converted or had modules replaced."""
        self.device = next(self.model.parameters()).device
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._close_casts()
        try:
            self.shadow = make_shadow(self.model, NAME)
            self.fusions = {} if self._invariant is not None else fuse(self.shadow)
            parameters = inspect.signature(_inside_peft(self.shadow).forward).parameters
            self._selects_logits = "logits_to_keep" in parameters
            products: dict[nn.Linear, torch.dtype] = {}
            with torch.inference_mode(), without_hooks(self.shadow):
                if self._invariant is not None:  # it follows the weights themselves
                    self._check_rows(self._invariant)
                    self._session, calls = probe(self.shadow, lambda: self._call(one, one, one[0]))
                else:
                    with watching(self.shadow) as products:
                        self._session, calls = probe(self.shadow, lambda: self._call(one, one, one[0]))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{type(self.model).__name__} cannot be run by Flatbed: {error}") from error
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot be run by Flatbed: its forward raised {type(error).__name__} "
                f"for a single token: {error}"
            ) from error
        layers = tuple(call.shape for call in calls)
        if self.layers and layers != self.layers:
            raise UnsupportedModelError("the model's attention layers changed; build a new engine")
        self.layers = layers
        self.vocab_size = self.model.get_input_embeddings().weight.shape[0]
        self._calls = calls
        self.max_positions = _max_positions(_text_config(self.model), self.windows)
        self.kv_dtype = calls[0].dtype
        if any(call.dtype != self.kv_dtype for call in calls):
            raise UnsupportedModelError(f"{type(self.model).__name__} has keys of several dtypes")
        self._products = products
        self._casts = Casts(products, self.device, make_backing) if products else None
        if self._pool is not None and self._backend is not None:
            self.bind(self._pool, self._backend)

    def _check_rows(self, invariant: BatchInvariant) -> None:
        """Looks, once for each kind of weights, whether this model's rows depend on each other."""
        invariant.follow(self.shadow)
        kind = (self.device, next(self.model.parameters()).dtype)
        if kind not in self._checked:
            with without_attention():
                check_rows(self._call, self.model.get_input_embeddings().weight.shape[0], self.device)
            self._checked.add(kind)

    def bind(self, pool: Pool, backend: AttentionBackend) -> None:
        """Attends over this pool from now on."""
        self._pool, self._backend = pool, backend
        if "decoder-layer" in self.fusions:  # the pool is another, over the same shadow
            return
        mixed = next(self.model.parameters()).dtype != self.kv_dtype
        ops = _operations(backend, self.device, self.kv_dtype, mixed=mixed, deterministic=self._invariant is not None)
        if ops is not None:
            casts = self._products if mixed else None
            self.fusions["decoder-layer"] = fuse_decoder(self.shadow, self._session, self._calls, ops, casts)
            if not self.fusions["decoder-layer"] and backend.reads_pool and self._invariant is None:
                from flatbed.model.fused_modules import fuse_modules

                self.fusions |= fuse_modules(self.shadow)

    def refresh_casts(self) -> bool:
        """In mixed precision: casts the weights as they are now. True when steps read other addresses than before."""
        return self._casts is not None and self._casts.refresh()

    def release_casts(self) -> None:
        """Gives the memory of the casts back; `refresh_casts` comes before the next step."""
        if self._casts is not None:
            self._casts.release()

    @property
    def cast_bytes(self) -> int:
        """Memory that casts of weights take now."""
        return 0 if self._casts is None else self._casts.committed

    def _close_casts(self) -> None:
        if self._casts is not None:
            self._casts.close()
            self._casts = None

    def let_go(self) -> None:
        """Lets go of the pool, of the memory of its own and of the user's model. It can run nothing afterwards."""
        self._close_casts()
        self._pool = self._backend = self._session.backend = None
        self._session.layers = ()
        self.model = self.shadow = self.identity = None  # type: ignore[assignment]
        self._calls = []

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each attention layer, in order; None where a layer sees all."""
        return tuple(call.spec.window for call in self._calls)

    @property
    def block_size(self) -> int:
        """Tokens in a block of the pool."""
        assert self._pool is not None, "bind() comes first"
        return self._pool.layout.block_size

    @property
    def pool_layers(self) -> tuple[LayerCache, ...]:
        """The pool as each layer sees it; the same object for as long as addresses stay."""
        assert self._pool is not None, "bind() comes first"
        return self._pool.layers

    def decode_graphs(self) -> Any:
        """Decode graphs of this shadow over the pool; none is captured yet."""
        from flatbed.model.graphs import DecodeGraphs

        graphs = DecodeGraphs(self._call, self._session, self.last_tokens, self.block_size)
        if self._invariant is not None:
            from flatbed.model.deterministic.graphs import InvariantStaticDecode

            graphs.make_backend = InvariantStaticDecode
        return graphs

    def upload(self, values: np.ndarray) -> torch.Tensor:
        """A copy of `values` on the device that the CPU does not wait for."""
        return upload(values, self.device)

    def forward(self, plan: BatchPlan) -> torch.Tensor:
        """Runs a plan; K/V of its tokens are in the pool afterwards. Returns logits [samples, vocabulary]."""
        assert self._pool is not None, "bind() comes first"
        assert self._backend is not None, "bind() comes first"
        with torch.inference_mode():
            if self._backend.needs_clean_blocks:
                self._pool.clear(plan.reused)
            self._pool.copy(plan.copies)
            inputs = step_inputs(plan, self.last_tokens, self._pool.layout.block_size, self.device)
            self._session.begin(self._backend, self._pool.layers, inputs.batch.slot_blocks, inputs.batch.slot_offsets)
            self._backend.begin(inputs.batch, self._pool.layout.block_size)
            return self._call(inputs.input_ids, inputs.position_ids, inputs.logits_at)

    def feed(self, rows: Ints, tokens: torch.Tensor) -> None:
        """Gives sampled tokens int64 [n] to the rows they were sampled for."""
        self.last_tokens[self.upload(rows.astype(np.int64))] = tokens

    def _call(self, ids: torch.Tensor, positions: torch.Tensor, logits_at: torch.Tensor) -> torch.Tensor:
        kwargs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        with self._precision(), self._invariant or contextlib.nullcontext():
            if self._selects_logits:
                if len(logits_at) == 0:  # the middle of prompts: no logits are needed, but the model makes some
                    return self.shadow(**kwargs, logits_to_keep=1).logits[0, :0]
                return self.shadow(**kwargs, logits_to_keep=logits_at).logits[0]
            return self.shadow(**kwargs).logits[0, logits_at]


def _autocast(kind: str) -> Callable[[], torch.autocast]:
    """Makes contexts with the mixed precision that is on now, or off: a model runs as it does where its engine is made.

    Without autocast's cache of cast weights: in the replay of a CUDA graph they would be those of its capture.
    """
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


def _operations(
    backend: AttentionBackend, device: torch.device, kv_dtype: torch.dtype, *, mixed: bool, deterministic: bool
) -> ModuleType | None:
    """The fused operations for a model with such keys, or None where there are none.

    `mixed`: its weights are of another dtype than its keys.
    """
    if deterministic:
        if mixed or not backend.reads_pool:
            return None
        from flatbed.model.deterministic import decoder_ops

        return decoder_ops
    if backend.reads_pool:
        from flatbed.model import cuda_ops

        return cuda_ops
    if device.type == "cpu" and not mixed and kv_dtype == torch.float32 and onednn_works():
        return cpu_ops
    return None


def check_module(model: object) -> None:
    """Raises UnsupportedModelError for what is no module at all: a name, a pipeline."""
    if not isinstance(model, nn.Module):
        wraps = isinstance(getattr(model, "model", None), nn.Module)
        wanted = "its .model" if wraps else "one that is loaded: AutoModelForCausalLM.from_pretrained(...)"
        raise UnsupportedModelError(f"{type(model).__name__} is not a model; pass {wanted}")


def check_architecture(model: Any) -> None:
    """Raises UnsupportedModelError when no model of this class and config can be run; looks at no weights."""
    config = getattr(model, "config", None)

    def refuse(reason: str) -> None:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be run by Flatbed: {reason}")

    if config is None or not hasattr(model, "get_input_embeddings") or not hasattr(model, "generate"):
        refuse("it is not a Transformers model that can generate")
    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder; Flatbed runs decoders")
    text = _text_config(model)  # which some encoder-decoders (Musicgen) have several of
    inner = _inside_peft(model)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        refuse("its PEFT adapter puts virtual tokens before the prompt; Flatbed runs adapters inside of layers (LoRA)")
    kinds = set(getattr(text, "layer_types", None) or ()) - _KV_LAYERS
    # `_is_stateful` said so up to Transformers 5.24.
    if getattr(inner, "_is_stateful", False) or kinds & _RECURRENT_LAYERS:
        told = f" (layers of kind {', '.join(sorted(kinds))})" if kinds else ""
        refuse(f"it keeps a recurrent state{told}; Flatbed keeps K/V")
    if not getattr(inner, "_supports_attention_backend", False):
        refuse("its attention does not go through Transformers' attention interface")
    if kinds:
        refuse(f"it has layers of kind {', '.join(sorted(kinds))}; Flatbed has {', '.join(sorted(_KV_LAYERS))}")
    if getattr(text, "num_kv_shared_layers", 0):
        refuse("its layers share K/V with each other")
    # "vision" is between the tokens of an image, which no prompt has here.
    if getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision"):
        refuse("it attends in both directions")


def _check_weights(model: nn.Module) -> None:
    """Raises UnsupportedModelError when the weights are not where they can be run."""
    name, devices = type(model).__name__, {p.device for p in model.parameters()}
    if len(devices) != 1:
        told = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(f"{name} cannot be run by Flatbed: its parameters are on several devices ({told})")
    if any(type(module).__module__.startswith(_SCALED_TOGETHER) for module in model.modules()):
        raise UnsupportedModelError(
            f"{name} cannot be run by Flatbed: its dynamically quantised layers scale the activations of all tokens of "
            "a step together, so that requests would change each other's results; quantise weights only, or by rows"
        )
    if any(hasattr(p, "device_mesh") for p in model.parameters()):  # a DTensor
        raise UnsupportedModelError(
            f"{name} cannot be run by Flatbed: its weights lie in pieces on several processes; gather them first "
            "(FSDP: unshard), tensor parallelism cannot be"
        )
    if next(iter(devices)).type == "meta":
        raise UnsupportedModelError(
            f"{name} cannot be run by Flatbed: its weights are not loaded (they are on the meta device)"
        )


def _inside_peft(model: Any) -> Any:
    """The Transformers model in a PEFT model, which hands keywords through to it; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _max_positions(config: Any, windows: Sequence[int | None]) -> int | None:
    """The most tokens of one sequence of a model whose attention layers are given these `windows`.

    Where a sliding window is only in the mask that the model makes (PhiMoE, Moshi), attention cannot know of it: up to
    the window's length there is nothing to mask, and so that is the limit.

    Rotary embeddings that change with the length of what is being run (dynamic, longrope) would give a request other
    results beside a long neighbour than alone, so they are kept to the length up to which they do not change.
    """
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [v for v in rope.values() if isinstance(v, dict)] or [rope]
    for parameters in nested:
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            limit = parameters.get("original_max_position_embeddings") or limit
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
    if window and "sliding_attention" in kinds and set(windows) == {None}:
        limit = window if limit is None else min(limit, window)
    return limit
