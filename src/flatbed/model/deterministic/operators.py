"""PyTorch's operators while a deterministic shadow runs: replaced, let pass, or refused by name.

::

      the model's code ─▶ aten operator ─▶ BatchInvariant ─┬─ a rule of its own    products, sums, softmax, ...
                                                          ├─ made of others        each of those comes here again
                                                          ├─ number by number      CPU: padded, unless it rounds once
                                                          ├─ row by row as it is   views, indexing, sorting, layer norm
                                                          └─ none of these         UnsupportedModelError

A product is one of rows of tokens with weights: with a tensor that lies in a parameter or buffer of the model, or is a
copy of one (in another dtype, say). A product of two results of the forward pass is refused, unless each of its numbers
is a single multiplication: which of its rows are tokens cannot be known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from flatbed.errors import UnsupportedModelError
from flatbed.model.deterministic.elementwise import tail_free
from flatbed.model.deterministic.products import Products

_Operator = torch._ops.OpOverload
_Rule = Callable[..., Any]

# Views and copies, rows put elsewhere, comparisons, and what computes each row (or number) by itself on every device.
_AS_IT_IS = frozenset(
    """
    _fused_rms_norm _local_scalar_dense _reshape_copy _unique2 _unsafe_view all amax amin any arange argmax argmin
    argsort broadcast_tensors bucketize cat chunk constant_pad_nd copy_ embedding empty empty_like empty_strided equal
    fill_ flatten flip floor_divide full full_like gather histc index index_copy index_copy_ index_fill index_fill_
    index_put index_put_ index_select isin item lift_fresh masked_scatter max min native_layer_norm new_empty
    new_empty_strided new_full new_ones new_zeros nonzero ones ones_like pad repeat repeat_interleave roll scalar_tensor
    scatter scatter_ searchsorted sort split_with_sizes stack tile topk tril triu unflatten unsafe_split zero_ zeros
    zeros_like
    """.split()  # noqa: SIM905  (as a list it would fill a page)
)
# What may copy a weight, or give it back as it is.
_COPIES = frozenset({"_to_copy", "clone", "contiguous", "float", "reshape", "to", "type_as"})
# Functions of single numbers that round once or not at all: the same whichever code computes them.
_EXACT = frozenset(
    """
    abs bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min copysign div eq fill floor fmod ge
    gt hardtanh isfinite isinf isnan isneginf isposinf le logical_and logical_not logical_or logical_xor lt masked_fill
    maximum minimum mul nan_to_num ne neg reciprocal relu remainder round sgn sign sqrt threshold trunc where
    """.split()  # noqa: SIM905
)
# Exact for whole numbers, in any order; where not, refused.
_FOR_WHOLE_NUMBERS = frozenset({"bincount", "cumsum", "prod", "scatter_add", "scatter_add_"})
# Up to so many numbers in a row torch's softmax on CUDA lets one warp compute it, the same way for every row.
_LONGEST_SOFTMAX = 1024
# From so many numbers on torch may divide the sum of a single row among threads.
_DIVIDED_SUM = 32768


class BatchInvariant(TorchDispatchMode):
    """While it is entered, every row of every result depends on that row alone (see the package).

    `follow` says what the weights are. Raises UnsupportedModelError, naming it, for an operator that is not known to
    treat rows so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = Products()
        self.on_cpu = True
        self._weights: set[int] = set()
        # Copies of weights made in this forward pass. A weak reference keeps an address from being used again.
        self._copies: dict[int, StorageWeakRef] = {}
        self._rules: dict[_Operator, _Rule] = {}
        self._depth = 0

    def __enter__(self) -> BatchInvariant:
        if not self._depth:
            self._copies = {}
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._depth -= 1
        super().__exit__(*exc)

    def __torch_dispatch__(
        self, operator: _Operator, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = self._rules.get(operator)
        if rule is None:
            rule = self._rules[operator] = self._rule_of(operator)
        return rule(*args, **(kwargs or {}))

    def follow(self, model: nn.Module) -> None:
        """Takes this model's parameters and buffers for the weights.

        Raises UnsupportedModelError for float64 on CUDA, where there is no product of it.
        """
        weights = [*model.parameters(), *model.buffers()]
        self.on_cpu = weights[0].device.type == "cpu"
        if not self.on_cpu and any(weight.dtype == torch.float64 for weight in weights):
            raise UnsupportedModelError("deterministic=True multiplies no float64 on CUDA; convert it to float32")
        self._weights = {_memory(weight) for weight in weights}

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight, a part of one, or a copy."""
        memory = _memory(tensor)
        return memory in self._weights or memory in self._copies

    def _rule_of(self, operator: _Operator) -> _Rule:
        """What is called in an operator's place."""
        name = _name(operator)
        if torch.Tag.out in operator.tags:
            raise refusal(operator, "writes to a tensor that it is given")
        if "reduce" in operator._overloadname:
            raise refusal(operator, "adds up in an order that is not known")
        if name in _RULES:
            return functools.partial(_RULES[name], self, operator)
        if name in _COPIES:
            return functools.partial(self._copied, operator)
        if operator.is_view or name in _AS_IT_IS:
            return operator
        if operator._can_decompose():
            return functools.partial(self._taken_apart, operator)
        if torch.Tag.pointwise in operator.tags:
            return (
                operator if name.removesuffix("_") in _EXACT else functools.partial(_number_by_number, self, operator)
            )
        raise refusal(operator)

    def _copied(self, operator: _Operator, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = operator(*args, **kwargs)
        if self.is_weight(args[0]):
            self._copies[_memory(result)] = StorageWeakRef(result.untyped_storage())
        return result

    def _taken_apart(self, operator: _Operator, *args: Any, **kwargs: Any) -> Any:
        with self:
            result = operator.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise refusal(operator)
        return result


def refusal(operator: _Operator, why: str = "is not known to treat each row by itself") -> UnsupportedModelError:
    """The error for an operator that cannot be had."""
    return UnsupportedModelError(f"with deterministic=True, its operator {operator.name()} {why}")


def _name(operator: _Operator) -> str:
    return operator._schema.name.removeprefix("aten::")


def _memory(tensor: torch.Tensor) -> int:
    """What stands for a tensor's memory: the same for all views of it, another for every other that is alive."""
    return tensor.untyped_storage()._cdata


# ---- rules of single operators: (mode, operator, *what the operator takes) ------------------------------------------

_RULES: dict[str, _Rule] = {}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def register(function: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _number_by_number(mode: BatchInvariant, operator: _Operator, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A function of single numbers; on the CPU by the same code for all of them."""
    at = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.dim()]
    if not mode.on_cpu or not at:
        return operator(*args, **kwargs)
    if operator._schema.is_mutable:
        packet = getattr(torch.ops.aten, _name(operator).removesuffix("_"))
        result = _number_by_number(mode, getattr(packet, operator._overloadname), *args, **kwargs)
        return args[0].copy_(result)

    def function(*numbers: torch.Tensor) -> torch.Tensor:
        given = dict(zip(at, numbers, strict=True))
        return operator(*(given.get(i, arg) for i, arg in enumerate(args)), **kwargs)

    return tail_free(function, *torch.broadcast_tensors(*(args[i] for i in at)))


@_rule("add", "add_", "sub", "sub_")
def _sum_of_two(mode: BatchInvariant, operator: _Operator, *args: Any, alpha: float = 1) -> torch.Tensor:
    if alpha in (1, -1):
        return operator(*args, alpha=alpha)
    return _number_by_number(mode, operator, *args, alpha=alpha)  # rounds twice, or once


@_rule("pow")
def _power(mode: BatchInvariant, operator: _Operator, base: Any, exponent: Any) -> torch.Tensor:
    square = not isinstance(exponent, torch.Tensor) and exponent == 2
    return operator(base, exponent) if square else _number_by_number(mode, operator, base, exponent)


@_rule("rsqrt", "square")
def _two_exact_steps(mode: BatchInvariant, operator: _Operator, x: torch.Tensor) -> torch.Tensor:
    return operator(x) if x.dtype == torch.float32 else _number_by_number(mode, operator, x)


@_rule("mm")
def _mm(mode: BatchInvariant, operator: _Operator, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[1] == 1:  # one multiplication each
        return a * b
    if mode.is_weight(b):
        return mode.products.rows(a, b)
    if mode.is_weight(a):
        return mode.products.rows(b.t(), a.t()).t()
    raise refusal(
        operator,
        "multiplies two results of the forward pass with each other (or with weights that were made in another one, "
        "which autocast keeps)",
    )


@_rule("addmm")
def _addmm(
    mode: BatchInvariant, operator: _Operator, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    *, beta: float = 1, alpha: float = 1,
) -> torch.Tensor:  # fmt: skip
    if (beta, alpha) != (1, 1) or bias.dim() != 1 or not mode.is_weight(b):
        return _mm(mode, operator, a, b) * alpha + bias * beta
    return mode.products.rows(a, b, bias)


@_rule("linear")
def _linear(
    mode: BatchInvariant, operator: _Operator, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if mode.is_weight(weight) and weight.dim() == 2:
        return mode.products.rows(rows, weight.t(), bias).view(*x.shape[:-1], len(weight))
    done = _mm(mode, operator, rows, weight.t()).reshape(*x.shape[:-1], len(weight))
    return done if bias is None else done + bias


@_rule("bmm")
def _bmm(mode: BatchInvariant, operator: _Operator, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[2] == 1:
        return a * b
    return torch.stack([_mm(mode, operator, one, other) for one, other in zip(a, b, strict=True)])


@_rule("_grouped_mm")
def _grouped_mm(
    mode: BatchInvariant, operator: _Operator, x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rows of x [T, K], sorted by group, times the weights [groups, K, N] of their group, which ends at offs[group]."""
    if x.dim() != 2 or weights.dim() != 3 or offs is None or bias is not None:
        raise refusal(operator, "is called in a way that Flatbed does not know")
    ends = offs.tolist()
    out = x.new_zeros(len(x), weights.shape[2])
    for weight, start, end in zip(weights, [0, *ends], ends, strict=False):
        if end > start:
            out[start:end] = _mm(mode, operator, x[start:end], weight)
    return out if out_dtype is None else out.to(out_dtype)


@_rule("mean", "sum")
def _reduced(
    mode: BatchInvariant, operator: _Operator, x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False,
    *, dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    if not x.is_floating_point():
        return operator(x, dtype=dtype) if dim is None else operator(x, dim, keepdim, dtype=dtype)
    if not dim:
        raise refusal(operator, "adds up numbers of all rows")
    dims = sorted(d % x.dim() for d in dim)
    kept = [d for d in range(x.dim()) if d not in dims]
    shape = [x.shape[d] for d in kept]
    rows = x.permute(*kept, *dims).reshape(math.prod(shape), math.prod(x.shape[d] for d in dims))
    if not mode.on_cpu:
        done = _device_sum(rows, rows.shape[1] if _name(operator) == "mean" else 1, dtype or x.dtype)
    elif len(rows) == 1 and rows.shape[1] >= _DIVIDED_SUM:
        done = operator(rows.repeat(2, 1), [1], dtype=dtype)[:1]
    else:
        done = operator(rows.contiguous(), [1], dtype=dtype)
    return done.view([1 if d in dims else x.shape[d] for d in range(x.dim())] if keepdim else shape)


def _device_sum(rows: torch.Tensor, divisor: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum of each row [rows, n], over a divisor."""
    from flatbed.kernels.deterministic import row_sum_kernel
    from flatbed.memory.capacity import power_of_two

    rows = rows.contiguous()
    out = torch.empty(len(rows), dtype=dtype, device=rows.device)
    if len(rows):
        block = min(1024, power_of_two(rows.shape[1]))
        row_sum_kernel[(len(rows),)](rows, out, rows.shape[1], divisor, BLOCK=block, num_warps=4)
    return out


@_rule("_softmax", "_log_softmax")
def _softmax(mode: BatchInvariant, operator: _Operator, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    last = x.movedim(dim, -1).contiguous()
    if not mode.on_cpu and last.shape[-1] > _LONGEST_SOFTMAX:
        raise refusal(operator, f"is over {last.shape[-1]} numbers, and fixed on CUDA up to {_LONGEST_SOFTMAX}")
    return operator(last, last.dim() - 1, half_to_float).movedim(-1, dim)


@_rule("index_add", "index_add_")
def _index_add(
    mode: BatchInvariant, operator: _Operator, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor,
    *, alpha: float = 1,
) -> torch.Tensor:  # fmt: skip
    if mode.on_cpu:  # one after the other
        return operator(x, dim, index, source, alpha=alpha)
    if dim % x.dim() or alpha != 1:
        raise refusal(operator, "is called in a way that Flatbed does not know")
    target = x if operator._schema.is_mutable else x.clone()
    return target.index_put_((index,), source, accumulate=True)  # sorted by index first, unlike index_add on CUDA


@_rule(*_FOR_WHOLE_NUMBERS)
def _whole_numbers(mode: BatchInvariant, operator: _Operator, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype") or x.dtype
    if dtype.is_floating_point or dtype.is_complex:
        raise refusal(operator, "adds up in an order that is not known")
    return operator(x, *args, **kwargs)
