"""`with batch_invariant():` gives any model the arithmetic of samebits: what torch sums within is summed by ops here.

Two modes of torch do it, in the thread that enters the block. The upper one sees functions as Python calls them, whole and
with their parameters: linear, attention, norms, look-ups. The lower one sees every operator that torch comes to, forward
and backward. There each is one of four kinds: it is computed by ours; it moves, compares or computes element by element in
operations that IEEE rounds; it computes an element with a function whose last bit torch lets depend on where the element
stands, and is laid out so that it does not; or it is none of these, is counted, and refused if `strict`.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any, Callable

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

import samebits.torch as _ours

from . import positions, states
from .attention import masked_attention
from .covered import COVERED, FUNCTIONS, PASSES, ROUNDED_ONCE, any_complex, any_floats, kernels, laid_out, plain, product

__all__ = ["batch_invariant", "disable", "enable", "uncovered"]

F = torch.nn.functional

# --- the lower mode


class _State:
    """Of a block: whether it is open, what it refuses, and the length that rotary frequencies belong to."""

    def __init__(self, strict: bool, rope_length: int | None) -> None:
        self.open, self.strict, self.rope_length = True, strict, rope_length


_counts: Counter[str] = Counter()


def uncovered() -> dict[str, int]:
    """The operators that may sum and are not covered, modules whose frequencies followed the longest text, and how often they ran
    since the outermost block began: this block, or the last one.
    """
    return dict(_counts)


def _note(mode: _Below, func: Any) -> None:
    _counts[str(func)] += 1


def _count(mode: _Below, func: Any) -> None:
    if mode.state.strict:
        raise RuntimeError(
            f"batch_invariant: {func} is not covered here: its sums, or what it draws, may depend on the batch; leave strict out to count it"
        )
    _note(mode, func)


def _report(mode: _Below, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    if tensors and all(t.device.type == "meta" for t in tensors):
        return func(*args, **kwargs)
    if any(t.numel() == 0 for t in tensors):
        # Of nothing, or for nothing, nothing is summed.
        made = func(*args, **kwargs)
        outputs = made if isinstance(made, (tuple, list)) else (made,)
        if all(t.numel() == 0 for t in tensors) or all(isinstance(t, torch.Tensor) and t.numel() == 0 for t in outputs):
            return made
        _count(mode, func)
        return made
    _count(mode, func)
    return func(*args, **kwargs)


def _moves(mode, func, args, kwargs):
    return func(*args, **kwargs)


def _rounded_once(mode, func, args, kwargs):
    # A complex product is a sum of two, which torch fuses here and there.
    return (_function if any_complex(args) else _moves)(mode, func, args, kwargs)


def _in_place(name: str, made: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
    """What was made, where the caller wants it."""
    if out is not None:
        return out.resize_(made.shape).copy_(made)
    return args[0].copy_(made) if name.endswith("_") else made


def _function(mode, func, args, kwargs):
    if not any_floats((*args, *kwargs.values())):
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    out = kwargs.pop("out", None)
    if name.endswith("_") or out is not None:
        return _in_place(name, laid_out(getattr(torch.ops.aten, name.rstrip("_")), args, kwargs), args, kwargs, out)
    if "grad_input" in kwargs:
        return _report(mode, func, args, kwargs)
    return laid_out(func, args, kwargs)


def _covered(mode, func, args, kwargs):
    name = func.overloadpacket.__name__
    handler = COVERED[name.rstrip("_")]
    out = kwargs.get("out")
    rest = kwargs if out is None else {k: v for k, v in kwargs.items() if k != "out"}
    floats = any_floats((*args, *rest.values()))
    made = handler(*args, **rest) if floats or name == "sum" or name == "sort" else ...
    if made is ...:
        return func(*args, **kwargs)
    if made is NotImplemented:
        return _report(mode, func, args, kwargs)
    return _in_place(name, made, args, kwargs, out)


def _composed(mode, func, args, kwargs):
    """What torch takes apart later, or did not because no gradient can be asked for (torch.inference_mode)."""
    with mode:
        return func.decompose(*args, **kwargs)


def _unknown(mode, func, args, kwargs):
    if any_floats((*args, *kwargs.values())):
        return _report(mode, func, args, kwargs)
    made = func(*args, **kwargs)
    if any_floats(made if isinstance(made, (tuple, list)) else (made,)):
        # What is drawn from nothing is the caller's.
        given = any(isinstance(a, torch.Tensor) for a in (*args, *kwargs.values()))
        (_count if given else _note)(mode, func)
    return made


_kinds: dict[Any, Callable[..., Any]] = {}


def _kind(func: Any) -> Callable[..., Any]:
    """How to treat an operator."""
    if not isinstance(func, torch._ops.OpOverload):
        return _unknown
    if func.namespace in ("samebits", "prim", "profiler"):
        return _moves
    name = func.overloadpacket.__name__.rstrip("_")
    if func.namespace != "aten":
        name = ""
    if name in COVERED:
        return _covered
    if name in FUNCTIONS:
        return _function
    if "reduce" in func._overloadname:
        # A scatter that adds is an overload of the one that moves.
        return _unknown
    if name in ROUNDED_ONCE:
        return _rounded_once
    if name in PASSES or func.is_view:
        return _moves
    whole = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return _composed if whole else _unknown


class _Below(TorchDispatchMode):
    def __init__(self, state: _State) -> None:
        super().__init__()
        self.state = state

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = _kind(func)
        if not self.state.open or (types and any(issubclass(t, torch._subclasses.FakeTensor) for t in types)):
            kind = _moves
        # What is called from here is no function of the caller's.
        with torch._C.DisableTorchFunction():
            return kind(self, func, args, kwargs)


# --- the upper mode


def _known(tensor: Any) -> bool:
    return _ours._active is not None and _ours._active.knows(tensor)


def _op(name: str, *args: torch.Tensor | None, **attributes: Any) -> Any:
    """An op of ours, recorded where a gradient is wanted."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in args):
        if _ours._active is not None and args[0].dim() > 2:
            _ours._active.saw(args[0].shape[0])
        return getattr(_ours.ops, name)(*args, **attributes)
    return kernels[name](*args, **attributes)


def _linear(x, weight, bias=None):
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, weight, bias = (t if t is None else t.to(dtype) for t in (x, weight, bias))
    given = [t for t in (x, weight, bias) if t is not None]
    if not plain(*given) or weight.dim() != 2 or x.dim() == 0 or 0 in (*x.shape, *weight.shape):
        return NotImplemented
    return _op("gemm", x, weight, bias) if x.dim() > 1 else _op("gemm", x[None], weight, bias)[0]


def _matmul(a, b):
    if torch.is_autocast_enabled("cpu") or not plain(a, b) or 0 in (a.dim(), b.dim(), *a.shape, *b.shape):
        return NotImplemented
    # What is folded into one product, and what not, torch decides by how operands lie.
    if b.dim() == 1:
        return _matmul(a, b[:, None])[..., 0]
    if a.dim() == 1:
        return _matmul(a[None], b)[..., 0, :]
    if b.dim() == 2:
        if _known(b):
            return _linear(a, _ours._active.derive(torch.t, (b,), {}))
        return torch.mm(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[1])
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    one = a.expand(*shape, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    other = b.expand(*shape, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    return torch.bmm(one, other).reshape(*shape, a.shape[-2], b.shape[-1])


def _addmm_of_parameter(bias, a, b, *, beta=1, alpha=1):
    if not _known(b) or beta != 1 or alpha != 1:
        return NotImplemented
    return _linear(a, _ours._active.derive(torch.t, (b,), {}), bias)


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    several = query.dim() == 4 and query.shape[1] != key.shape[1]
    fits = query.dim() == key.dim() == value.dim() and query.dim() in (3, 4) and query.shape[0] == key.shape[0]
    if not fits or not plain(query, key, value) or dropout_p or (several and not enable_gqa) or 0 in (*query.shape, *key.shape):
        return NotImplemented
    if query.dim() == 3:
        query, key, value = query[:, None], key[:, None], value[:, None]
        attn_mask = attn_mask[:, None] if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        return _attention(query, key, value, attn_mask, 0.0, is_causal, scale)[:, 0]
    while attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask[None]
    if _ours._active is not None:
        _ours._active.saw(query.shape[0])
    return masked_attention(query, key, value, attn_mask, is_causal, scale)


def _embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    wanted = torch.is_grad_enabled() and weight.requires_grad and input.numel() > 0 and input.dim() > 0
    if not wanted or max_norm is not None or scale_grad_by_freq or sparse or not plain(weight):
        return NotImplemented
    carries = _known(weight)
    if carries:
        _ours._active.look_up(input)
    y = _ours.ops.embedding(weight, input.int())
    if carries and (input.dim() == 1 or input.shape[0] == 1):
        # Positions, once for all sequences, whose gradient would be summed before its tokens are known.
        _ours._active.share(weight, y)
        if padding_idx is None:
            _looked[y] = weight, input.int(), y._version
    if padding_idx is not None:
        y = torch.where((input == padding_idx % weight.shape[0])[..., None], y.detach(), y)
    return y


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    given = [t for t in (input, weight, bias) if t is not None]
    if len(normalized_shape) != 1 or not plain(*given) or input.numel() == 0:
        return NotImplemented
    if input.dim() == 1:
        return _layer_norm(input[None], normalized_shape, weight, bias, eps)[0]
    return _op("layer_norm", input, weight, bias, eps=eps)


def _rms_norm(input, normalized_shape, weight=None, eps=None):
    given = [t for t in (input, weight) if t is not None]
    if len(normalized_shape) != 1 or not plain(*given) or input.numel() == 0:
        return NotImplemented
    weight = torch.ones(normalized_shape[0], dtype=input.dtype) if weight is None else weight
    if input.dim() == 1:
        return _rms_norm(input[None], normalized_shape, weight, eps)[0]
    return _op("rms_norm", input, weight, eps=torch.finfo(input.dtype).eps if eps is None else eps)


class _Grouped(torch.autograd.Function):
    """Products of groups of rows, each with a matrix of its own: `x[S,K]`, `w[E,K,N]`, and where each group ends."""

    @staticmethod
    def forward(ctx, x, w, ends, carried):
        ctx.save_for_backward(x, w)
        ctx.ends, ctx.carried = ends, carried
        made = torch.zeros(x.shape[0], w.shape[2], dtype=x.dtype)
        for e, (start, end) in enumerate(zip([0, *ends], ends)):
            if end > start:
                made[start:end] = product(x[start:end], w[e])
        return made

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = torch.zeros_like(x)
        one = ctx.carried
        sums = torch.zeros(w.transpose(1, 2).shape, dtype=torch.float32).transpose(1, 2) if one is None else one.stack(w.shape)
        for e, (start, end) in enumerate(zip([0, *ctx.ends], ctx.ends)):
            if end > start:
                dx[start:end] = product(dy[start:end], w[e].t())
                sums[e] = kernels["gemm_dw"](x[start:end], dy[start:end], carry=sums[e].t()).t()
        return dx, sums.to(w.dtype) if one is None else None, None, None


def _grouped_mm(mat_a, mat_b, *, offs=None, bias=None, out_dtype=None):
    if not plain(mat_a, mat_b) or mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or bias is not None:
        return NotImplemented
    if out_dtype not in (None, mat_a.dtype) or 0 in (*mat_a.shape, *mat_b.shape):
        return NotImplemented
    carried = _ours._active.begin("gemm", {"w": mat_b}).get("w") if _ours._active else None
    return _Grouped.apply(mat_a, mat_b, offs.tolist(), carried)


class _Shared(torch.autograd.Function):
    """x times or plus a parameter that all tokens share, whose gradient goes on from one backward call to the next."""

    @staticmethod
    def forward(ctx, x, parameter, times, carried):
        ctx.save_for_backward(x, parameter)
        ctx.times, ctx.carried = times, carried
        return x * parameter if times else x + parameter

    @staticmethod
    def backward(ctx, dy):
        x, parameter = ctx.saved_tensors
        rows = dy.float() * x.float() if ctx.times else dy
        ctx.carried.go_on("token_sum", (rows.reshape(-1, parameter.numel()),), {})
        return (dy * parameter if ctx.times else dy).to(x.dtype), None, None, None


def _shared(times: bool) -> Callable[..., Any]:
    def handler(a, b, **other):
        x, parameter = (a, b) if _known(b) else (b, a)
        if not _known(parameter) or other or not isinstance(x, torch.Tensor) or _known(x):
            return NotImplemented
        shape = list(parameter.shape)
        while shape and shape[0] == 1:
            shape.pop(0)
        tail = list(x.shape[x.dim() - len(shape) :]) if len(shape) <= x.dim() else None
        if tail != shape or parameter.dim() > x.dim() or not x.is_floating_point() or not torch.is_grad_enabled():
            return NotImplemented
        return _Shared.apply(x, parameter, times, _ours._active.begin("token_sum", {"x": parameter})["x"])

    return handler


class _Spread(torch.autograd.Function):
    """x plus what was looked up once for many of its tokens: each of them adds to the gradient of the table."""

    @staticmethod
    def forward(ctx, x, y, table, tokens, carried):
        ctx.tokens, ctx.carried = tokens.expand(x.shape[:-1]), carried
        return x + y

    @staticmethod
    def backward(ctx, dy):
        ctx.carried.go_on("embedding_dw", (dy.reshape(-1, dy.shape[-1]), ctx.tokens.reshape(-1)), {})
        return dy, None, None, None, None


class _Rows(torch.autograd.Function):
    """Rows of a parameter, each for one token."""

    @staticmethod
    def forward(ctx, table, tokens, carried):
        ctx.tokens, ctx.carried = tokens, carried
        return table[tokens]

    @staticmethod
    def backward(ctx, dy):
        ctx.carried.go_on("embedding_dw", (dy, ctx.tokens), {})
        return None, None, None


class _Expanded(torch.autograd.Function):
    """A parameter repeated for every token: axes of one element are those of tokens."""

    @staticmethod
    def forward(ctx, parameter, shape, carried):
        ctx.carried, padded = carried, [1] * (len(shape) - parameter.dim()) + list(parameter.shape)
        ctx.order = sorted(range(len(shape)), key=lambda d: padded[d] > 1)
        ctx.elements, ctx.sequences = parameter.numel(), shape[0]
        return parameter.expand(shape).clone()

    @staticmethod
    def backward(ctx, dy):
        if _ours._active is not None and ctx.sequences != _ours._active.seen:
            # Several had the one there is, and their sum is made already.
            raise RuntimeError(f"accumulate: `{ctx.carried.parameter}` is expanded once for several sequences; its sum cannot be carried")
        ctx.carried.go_on("token_sum", (dy.permute(ctx.order).reshape(-1, ctx.elements),), {})
        return None, None, None


def _expand(x, *shape):
    if not _known(x) or not torch.is_grad_enabled() or not plain(x):
        return NotImplemented
    made = x.expand(*shape)
    # What has no axis of the sequences is read once for all of them, no one knows how.
    if made.dim() == 0 or made.shape[0] != _ours._active.seen or (made.dim() == x.dim() and x.shape[0] > 1):
        return NotImplemented
    return _Expanded.apply(x, made.shape, _ours._active.begin("token_sum", {"x": x})["x"])


# What was looked up once for all sequences of a micro-batch, and rows that were chosen by a tensor, while `accumulate` carries
# sums: the table, the tokens, and how often torch had written them.
_looked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_chosen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_times, _plus_parameter = _shared(True), _shared(False)


def _item(x, index):
    if not _known(x) or not torch.is_grad_enabled() or x.dim() != 2 or not plain(x):
        return NotImplemented
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.int64, torch.int32) or index.dim() != 1:
        return NotImplemented
    made = x[index]
    _chosen[made] = x, index.int(), made._version
    return made


def _as_looked_up(kept: WeakTensorKeyDictionary, y: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Table and tokens of what was looked up, and has not been written since."""
    found = kept.get(y) if isinstance(y, torch.Tensor) else None
    return None if found is None or found[2] != y._version else found[:2]


def _rows(x: Any, y: Any) -> Any:
    """y to be added to x: where it is rows of a parameter, one for each of x, they are carried."""
    found = _as_looked_up(_chosen, y)
    if found is None or not isinstance(x, torch.Tensor) or x.shape != y.shape or bool((found[1] < 0).any()):
        return y
    # Written in a way that leaves no trace, they are no rows of it any more.
    if not torch.equal(y, found[0][found[1]]):
        return y
    return _Rows.apply(*found, _ours._active.begin("embedding", {"w": found[0]})["w"])


def _spreads(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether rows of y are added to several of x."""
    fits = zip(reversed(x.shape), reversed(y.shape))
    return y.dim() <= x.dim() and x.shape != y.shape and x.shape[-1] == y.shape[-1] and all(b in (1, a) for a, b in fits)


def _plus(a, b, **other):
    for x, y in ((a, b), (b, a)):
        found = _as_looked_up(_looked, y)
        if found is None or other or not isinstance(x, torch.Tensor) or x.dtype != y.dtype or not torch.is_grad_enabled():
            continue
        if _spreads(x, y):
            return _Spread.apply(x, y.detach(), *found, _ours._active.sum_of(found[0], "embedding"))
    rows_a, rows_b = _rows(b, a), _rows(a, b)
    return _plus_parameter(a, b, **other) if rows_a is a and rows_b is b else torch.add(rows_a, rows_b, **other)


def _plus_in_place(a, b, **other):
    return a.add_(_rows(a, b), **other)


def _longest(state: _State, caller: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The largest of all elements; where a module asks for it whose rotary frequencies depend on a length, what was declared."""
    if args or kwargs or not isinstance(x, torch.Tensor) or x.is_floating_point() or x.device.type == "meta" or not x.numel():
        return NotImplemented
    module = positions.asked_by(caller)
    if module is None:
        return NotImplemented
    told, name = positions.declared(module, caller, x, state.rope_length)
    if told is not None:
        return told
    _named(state, f"{name} takes its frequencies from the longest text of the batch; declare a length, rope_length=N, that no text is longer than", name)
    return NotImplemented


def _named(state: _State, line: str, name: str) -> None:
    """Counts what a module does, or refuses it."""
    if state.strict:
        raise RuntimeError(f"batch_invariant: {line}")
    _counts[name] += 1


_T = torch.Tensor
# What one number of all elements may be asked by.
_WHOLE = {torch.max, torch.amax, _T.max, _T.amax}
# By function of torch as Python calls it.
_ABOVE: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    F.embedding: _embedding,
    torch.embedding: lambda weight, input, padding_idx=-1, *rest: NotImplemented,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    torch.matmul: _matmul,
    _T.matmul: _matmul,
    _T.__matmul__: _matmul,
    _T.__rmatmul__: lambda a, b: _matmul(b, a),
}
for _name in ("grouped_mm", "_grouped_mm"):
    for _home in (F, torch):
        if hasattr(_home, _name):
            _ABOVE[getattr(_home, _name)] = _grouped_mm
# While `accumulate` carries sums.
_CARRIED: dict[Any, Callable[..., Any]] = {
    torch.addmm: _addmm_of_parameter,
    torch.mm: lambda a, b: _matmul(a, b) if _known(b) else NotImplemented,
    **{f: _times for f in (torch.mul, torch.multiply, _T.mul, _T.multiply, _T.__mul__, _T.__rmul__)},
    **{f: _plus for f in (torch.add, _T.add, _T.__add__, _T.__radd__)},
    **{f: _plus_in_place for f in (_T.add_, _T.__iadd__)},
    _T.__getitem__: _item,
    _T.expand: _expand,
}


class _Above(TorchFunctionMode):
    def __init__(self, state: _State) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.state.open:
            return func(*args, **kwargs)
        if func in (_T.backward, torch.autograd.backward):
            return self.back(*args, **kwargs)
        if func in _WHOLE:
            made = _longest(self.state, sys._getframe(1), *args, **kwargs)
            if made is not NotImplemented:
                return made
        elif func is torch.arange and (name := positions.counted_from_the_end(sys._getframe(1))) is not None:
            _named(self.state, f"{name} counts positions from the end of the longest text; leave strict out to count it", name)
        elif func in states.EXPONENTIALS and (name := states.moved_by(sys._getframe(1))) is not None:
            line = f"{name} has other bits than one call for the whole text, padded right; take samebits.Engine, or leave strict out to count it"
            _named(self.state, line, name)
        carries = _ours._active is not None
        handler = _ABOVE.get(func) or (_CARRIED.get(func) if carries else None)
        if handler is not None:
            made = handler(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return _ours._active.derive(func, args, kwargs) if carries else func(*args, **kwargs)

    def back(self, tensors, gradients=None, retain_graph=None, create_graph=False, grad_variables=None, inputs=None, **other):
        """torch.autograd.backward. What is computed again on the way is seen as it was the first time: the engine keeps the modes
        that it is called under.
        """
        tupled = lambda one: (one,) if isinstance(one, torch.Tensor) else tuple(one)
        tensors, gradients = tupled(tensors), other.get("gradient", other.get("grad_tensors", gradients))
        gradients = (None,) * len(tensors) if gradients is None else tupled(gradients)
        gradients = torch.autograd._make_grads(tensors, gradients, is_grads_batched=False)
        keep = create_graph if retain_graph is None else retain_graph
        inputs = () if inputs is None else tupled(inputs)
        with self:
            torch.autograd.graph._engine_run_backward(
                tensors, gradients, keep, create_graph, inputs, allow_unreachable=True, accumulate_grad=True
            )


# --- blocks

_open = 0


class batch_invariant:
    """Within the block every model has the same bits for any batch, padding, number of threads, prefill or decode, as far as it
    computes them by the same formulas. Layers with a state that do not are named by `uncovered` (docs/PYTHON.md).

        with samebits.torch.batch_invariant():
            logits = model(tokens).logits

    Backward calls belong into the block as well. It holds for the thread that enters it. An operator that is not covered runs
    as it is and is counted (`uncovered`); with `strict` it raises RuntimeError.

    `rope_length` is the longest text, of all calls, as `samebits.Engine` has it. Where the scaling of rotary positions depends on a length
    (longrope, dynamic) their frequencies belong to it, and without it to the length that the model was trained on; positions beyond
    it are refused by ValueError, and where none was declared as an operator is that is not covered.
    """

    def __init__(self, strict: bool = False, rope_length: int | None = None) -> None:
        if rope_length is not None and rope_length < 1:
            raise ValueError(f"rope_length: is {rope_length}; it must be at least 1")
        self._strict, self._rope_length = strict, rope_length
        self._before: list[tuple[bool, int | None] | None] = []

    def __enter__(self) -> batch_invariant:
        global _open
        if _open == 0:
            _counts.clear()
        _open += 1
        # The inner one of two blocks says what is refused, and the length where it has one.
        modes = getattr(_here, "modes", None)
        if modes:
            state = modes[0].state
            self._before.append((state.strict, state.rope_length))
            state.strict = self._strict
            state.rope_length = state.rope_length if self._rope_length is None else self._rope_length
        else:
            self._before.append(None)
            _enter(_State(self._strict, self._rope_length))
        return self

    def __exit__(self, *error: Any) -> None:
        global _open
        before = self._before.pop()
        if before is None:
            for mode in reversed(_here.modes):
                mode.__exit__(*error)
            _here.modes[0].state.open = False
            _here.modes = None
        else:
            state = _here.modes[0].state
            state.strict, state.rope_length = before
        _open -= 1


# The modes of this thread.
_here = threading.local()


def _enter(state: _State) -> None:
    _here.modes = (_Below(state), _Above(state))
    for mode in _here.modes:
        mode.__enter__()


_enabled: list[batch_invariant] = []
_profile: Any = None
_state: _State | None = None


def _in_thread(frame: Any, event: str, arg: Any) -> None:
    """In a thread that begins, before anything else runs there."""
    sys.setprofile(_profile)
    if _state is not None:
        _enter(_state)


def enable(strict: bool = False, rope_length: int | None = None) -> None:
    """`batch_invariant` from now on, until `disable`: for this thread, and those that `threading` starts meanwhile."""
    global _profile, _state
    _enabled.append(batch_invariant(strict, rope_length).__enter__())
    if _state is None:
        _state, _profile = _here.modes[0].state, threading.getprofile()
        threading.setprofile(_in_thread)


def disable() -> None:
    """The end of the last `enable`, in the thread that called it."""
    global _state
    if not _enabled:
        raise RuntimeError("disable: there was no enable")
    _enabled.pop().__exit__(None, None, None)
    if not _enabled:
        _state = None
        threading.setprofile(_profile)
