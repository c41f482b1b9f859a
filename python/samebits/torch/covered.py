"""The operators of torch, each by what it takes to have the same bits wherever an element or a row stands."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch

from .. import _native

__all__ = ["COVERED", "FUNCTIONS", "PASSES", "ROUNDED_ONCE", "any_complex", "any_floats", "laid_out", "plain", "product"]

kernels = _native.kernels()
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

# --- what needs no change

# Views, copies, comparisons, choices, whole numbers: no float is rounded but to another dtype.
_MOVES = """
_assert_async _assert_scalar _assert_tensor_metadata _conj _copy_from _local_scalar_dense
_pin_memory _reshape_alias _to_copy _unsafe_view alias all allclose amax amin aminmax any arange argmax argmin argsort as_strided
as_strided_scatter atleast_1d bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
broadcast_tensors broadcast_to bucketize cat chunk clamp clamp_max clamp_min clone complex concat constant_pad_nd contiguous copy
count_nonzero cummax cummin detach diag_embed diagonal diagonal_backward diagonal_scatter dsplit embedding empty empty_like
empty_permuted empty_strided eq equal expand expand_as expand_copy eye fill flatten flip fmax fmin full full_like gather ge gt
heaviside histc hsplit im2col index index_copy index_fill index_select is_nonzero is_same_size isclose isfinite isin isinf isnan
isneginf isposinf isreal item kthvalue le lift lift_fresh lift_fresh_copy linspace logical_and logical_not logical_or logical_xor lt
masked_fill masked_scatter masked_select max maximum min minimum mode movedim msort mT nan_to_num narrow narrow_copy ne new_empty
new_empty_strided new_full new_ones new_zeros nll_loss2d_backward nll_loss_backward nonzero nonzero_static one_hot ones ones_like
permute permute_copy pixel_shuffle pixel_unshuffle ravel real reflection_pad1d reflection_pad2d relu repeat repeat_interleave
replication_pad1d replication_pad2d reshape resize resize_as resolve_conj resolve_neg result_type roll rot90 round scalar_tensor
scatter searchsorted select select_backward select_copy select_scatter set sign signbit slice slice_backward slice_copy
slice_scatter sort split split_copy split_with_sizes squeeze squeeze_copy stack swapaxes sym_numel sym_size sym_storage_offset
sym_stride t t_copy take threshold threshold_backward to transpose transpose_copy tril tril_indices triu triu_indices trunc
unbind unbind_copy unfold unfold_copy unique_consecutive _unique2 unique_dim unsafe_chunk unsafe_split unsafe_split_with_sizes
unsqueeze unsqueeze_copy value_selecting_reduction_backward view view_as view_as_complex view_as_real view_copy where zero zeros
zeros_like
"""

# Element by element, in operations that are rounded once and so cannot be computed in two ways.
_ROUNDED_ONCE = """
abs add ceil copysign div floor floor_divide fmod frac hardtanh hardtanh_backward leaky_relu leaky_relu_backward mul neg
negative reciprocal remainder rsub sgn sqrt square sub true_divide
"""

# Torch adds up one element after the other, in each row by itself.
_IN_ORDER = "cumsum"

# Element by element, by functions: in whole vectors and in what is left over torch computes them differently.
_FUNCTIONS = """
acos acosh addcdiv addcmul asin asinh atan atan2 atanh celu cos cosh deg2rad digamma elu elu_backward erf erfc erfinv exp exp2
expm1 gelu gelu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hypot lerp lgamma log log10 log1p log2
log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 logit logit_backward mish mish_backward polar pow rad2deg rsqrt sigmoid
sigmoid_backward silu silu_backward sin sinc sinh softplus softplus_backward tan tanh tanh_backward xlogy
"""


# What runs as it is, and what runs where no element is at the end of a vector.
ROUNDED_ONCE = set(_ROUNDED_ONCE.split())
PASSES = {*_MOVES.split(), *ROUNDED_ONCE, _IN_ORDER}
FUNCTIONS = set(_FUNCTIONS.split())


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def any_floats(args: Any) -> bool:
    return any(any_floats(a) if isinstance(a, (tuple, list)) else _floating(a) for a in args)


def any_complex(args: Any) -> bool:
    return any(isinstance(a, torch.Tensor) and a.is_complex() for a in args)


def plain(*tensors: torch.Tensor) -> bool:
    """Whether ours takes them: on the processor, of one float dtype, with strides."""
    return all(t.device.type == "cpu" and t.dtype == tensors[0].dtype and t.layout == torch.strided for t in tensors) and tensors[0].dtype in _FLOATS


# --- functions of elements


def _vectors(elements: int) -> int:
    """How many elements to compute so that no thread is left with a piece of a vector."""
    width, grain, threads = 64, 32768, torch.get_num_threads()
    while True:
        used = max(1, min(threads, -(-elements // grain)))
        whole = -(-elements // (width * used)) * width * used
        if whole == elements:
            return whole
        elements = whole


def laid_out(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A function of elements, each of them in the middle of a vector."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.dim() > 0]
    if not tensors:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    elements = math.prod(shape)
    whole = _vectors(elements)
    if elements == 0 or (whole == elements and all(t.shape == shape and t.is_contiguous() for t in tensors)):
        return func(*args, **kwargs)

    def lay(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and len(shape) > 0):
            return value
        row = value.expand(shape).reshape(-1)
        return row.contiguous() if whole == elements else torch.cat([row, row.new_ones(whole - elements)])

    made = func(*map(lay, args), **{k: lay(v) for k, v in kwargs.items()})
    back = lambda t: t[:elements].reshape(shape)
    # log_sigmoid_forward has a buffer beside its output.
    return tuple(back(t) if t.numel() == whole else t for t in made) if isinstance(made, tuple) else back(made)


# --- sums


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    """The sum of each row of `x[R,N]`, `[R]`: one element after the other, in f64, rounded once to f32. Zeros before, between and
    behind change nothing, as they stand where attention sees no key.
    """
    return torch.cumsum(x if x.dtype == torch.float64 else x.float(), -1)[:, -1]


def _dims(x: torch.Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (tuple, list)) and not dim) or x.dim() == 0:
        return list(range(x.dim()))
    return sorted({d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)})


# Up to so many terms are added one after the other, each with all its neighbours.
_FEW = 8


def _sums(x: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    """Sums over axes, in f32."""
    dims = _dims(x, dim)
    kept = [d for d in range(x.dim()) if d not in dims]
    shape = [x.shape[d] for d in kept]
    terms = math.prod(x.shape[d] for d in dims)
    if terms == 0 or math.prod(shape) == 0:
        made = x.new_zeros(shape, dtype=torch.float32)
    elif terms <= _FEW:
        rows = x.permute([*dims, *kept]).reshape(terms, *shape)
        made = rows[0].double()
        for row in rows[1:]:
            made = made + row.double()
        made = made.float()
    elif kept and dims == list(range(len(dims))):
        made = kernels["fold"](kernels["token_sum"](x.reshape(terms, -1))).reshape(shape)
    else:
        made = _row_sums(x.permute([*kept, *dims]).reshape(-1, terms)).reshape(shape)
    if keepdim:
        made = made.reshape([1 if d in dims else extent for d, extent in enumerate(x.shape)])
    return made


def _sum(x, dim=None, keepdim=False, *, dtype=None):
    out = dtype or (x.dtype if _floating(x) else torch.int64)
    if not out.is_floating_point and not out.is_complex:
        return NotImplemented if _floating(x) else Ellipsis
    x = x if _floating(x) else x.to(out)
    return _sums(x, dim, keepdim).to(out) if plain(x) else NotImplemented


def _mean(x, dim=None, keepdim=False, *, dtype=None):
    if not plain(x):
        return NotImplemented
    terms = math.prod(x.shape[d] for d in _dims(x, dim))
    return (_sums(x, dim, keepdim) / terms).to(dtype or x.dtype)


def _var64(x, dim, correction, keepdim):
    """In f64, `[..]` without the axes of `dim`; `...` where there is nothing to sum."""
    if x.numel() == 0:
        return ...
    kept = [d for d in range(x.dim()) if d not in _dims(x, dim)]
    rows = x.double().permute([*kept, *_dims(x, dim)]).reshape(math.prod(x.shape[d] for d in kept), -1)
    terms = rows.shape[1]
    away = rows - (_row_sums(rows) / terms)[:, None]
    var = _row_sums(away * away) / max(terms - (1 if correction is None else correction), 0)
    return var.reshape([extent if d in kept else 1 for d, extent in enumerate(x.shape) if keepdim or d in kept])


def _var(x, dim=None, *, correction=1, keepdim=False):
    var = _var64(x, dim, correction, keepdim) if plain(x) else NotImplemented
    return var.to(x.dtype) if isinstance(var, torch.Tensor) else var


def _var_mean(x, dim=None, *, correction=1, keepdim=False):
    var = _var(x, dim, correction=correction, keepdim=keepdim)
    if not isinstance(var, torch.Tensor):
        return var
    mean = _mean(x, dim, keepdim)
    if not bool(mean.isfinite().all()):
        # The sum is beyond f32, or the row is not finite: then torch has no mean of it, here, where it goes by differences.
        kept = [d for d in range(x.dim()) if d not in _dims(x, dim)]
        rows = x.double().permute([*kept, *_dims(x, dim)]).reshape(mean.numel(), -1)
        wide = (_row_sums(rows) / rows.shape[1]).reshape(mean.shape)
        mean = torch.where(mean.isfinite(), mean, torch.where(wide.isfinite(), wide, torch.nan).to(mean.dtype))
    return var, mean


def _std(x, dim=None, *, correction=1, keepdim=False):
    var = _var64(x, dim, correction, keepdim) if plain(x) else NotImplemented
    return var.sqrt().to(x.dtype) if isinstance(var, torch.Tensor) else var


def _vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    if not plain(x) or ord not in (1, 2):
        return NotImplemented
    x32 = x.float()
    sums = _sums(x32.abs() if ord == 1 else x32 * x32, dim, keepdim)
    return (sums if ord == 1 else sums.sqrt()).to(dtype or x.dtype)


# --- products


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`a[M,K] b[K,N]` as gemm has it, whichever way b lies."""
    if b.stride(0) == 1 and b.stride(1) >= b.shape[0]:
        return kernels["gemm"](a, b.t(), dtype=dtype or a.dtype)
    return kernels["gemm_dx"](a, b, dtype=dtype or a.dtype)


def _mm(a, b):
    if not plain(a, b):
        return NotImplemented
    if 0 in (*a.shape, *b.shape):
        return Ellipsis
    return product(a, b)


def _addmm(bias, a, b, *, beta=1, alpha=1):
    if not plain(a, b, bias) or 0 in (*a.shape, *b.shape):
        return NotImplemented
    if beta == 1 and alpha == 1 and bias.shape == b.shape[1:] and b.stride(0) == 1 and b.stride(1) >= b.shape[0]:
        return kernels["gemm"](a, b.t(), bias)
    made = product(a, b, torch.float32)
    made = made if alpha == 1 else made * alpha
    return (made if beta == 0 else made + (bias.float() if beta == 1 else bias.float() * beta)).to(a.dtype)


def _chains(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a[B,M,K] b[B,K,N]` in f32, each element one chain: zeros in a before, between and behind change nothing, as they stand
    where attention sees no key.
    """
    if a.shape[2] == 1:
        return a.float() * b.float()
    a, b = a.transpose(1, 2).contiguous(), b.contiguous()
    made = torch.empty(a.shape[0], a.shape[2], b.shape[2], dtype=torch.float32)
    product = _native.ops()["gemm_dw"]
    for x, dy, y in zip(b.detach().unbind(), a.detach().unbind(), made.unbind()):
        product(x, dy, into=y)
    return made


def _bmm(a, b):
    if not plain(a, b):
        return NotImplemented
    if 0 in (*a.shape, *b.shape):
        return Ellipsis
    return _chains(a, b).to(a.dtype)


def _baddbmm(c, a, b, *, beta=1, alpha=1):
    if not plain(a, b, c) or 0 in (*a.shape, *b.shape):
        return NotImplemented
    made = _chains(a, b)
    made = made if alpha == 1 else made * alpha
    return (made if beta == 0 else made + (c.float() if beta == 1 else c.float() * beta)).to(a.dtype)


def _mv(a, b):
    return NotImplemented if not plain(a, b) else ... if a.numel() == 0 else product(a, b[:, None])[:, 0]


def _dot(a, b):
    return NotImplemented if not plain(a, b) else ... if a.numel() == 0 else product(a[None], b[:, None])[0, 0]


# --- softmax and losses


def _last(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x as rows along `dim`."""
    return (x if x.dim() == 0 else x.movedim(dim, -1)).reshape(-1, x.shape[dim] if x.dim() else 1)


def _along(rows: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Of rows made by `_last`, or one number of each, the tensor that they are of."""
    if x.dim() == 0:
        return rows.reshape(())
    if rows.dim() == 1:
        return rows.reshape(x.movedim(dim, -1).shape[:-1]).unsqueeze(dim)
    return rows.reshape(x.movedim(dim, -1).shape).movedim(-1, dim).contiguous()


def _exp(x: torch.Tensor) -> torch.Tensor:
    return laid_out(torch.ops.aten.exp.default, (x,), {})


def _softmax(x, dim, half_to_float=False):
    if not plain(x):
        return NotImplemented
    if x.numel() == 0:
        return ...
    rows = _last(x, dim).float()
    weights = _exp(rows - rows.amax(-1, keepdim=True))
    return _along(weights / _row_sums(weights)[:, None], x, dim).to(x.dtype)


def _softmax_backward(dy, y, dim, input_dtype):
    if not (plain(dy) and plain(y)):
        return NotImplemented
    if y.numel() == 0:
        return ...
    p, g = _last(y, dim).float(), _last(dy, dim).float()
    return _along(p * (g - _row_sums(p * g)[:, None]), y, dim).to(input_dtype)


def _lse(rows: torch.Tensor) -> torch.Tensor:
    return kernels["logprob"](rows, torch.full((rows.shape[0],), -1, dtype=torch.int32))[1]


# From here on a logarithm of sums is the largest element, with whatever is beside it: half an ulp is more than any count of terms adds.
_HUGE = 1e38


def _log_softmax(x, dim, half_to_float=False):
    if not plain(x):
        return NotImplemented
    if x.numel() == 0:
        return ...
    rows = _last(x, dim).float()
    # Small numbers have small roundings.
    rows = rows - rows.amax(-1, keepdim=True)
    return _along(rows - _lse(rows)[:, None], x, dim).to(x.dtype)


def _log_softmax_backward(dy, y, dim, input_dtype):
    if not (plain(dy) and plain(y)):
        return NotImplemented
    if y.numel() == 0:
        return ...
    g, p = _last(dy, dim), _exp(_last(y, dim).float())
    return _along(g.float() - p * _row_sums(g)[:, None], y, dim).to(input_dtype)


def _logsumexp(x, dim, keepdim=False):
    dims = _dims(x, dim)
    if not plain(x) or len(dims) != 1 or x.dim() == 0:
        return NotImplemented
    if x.numel() == 0:
        return ...
    rows = _last(x, dims[0])
    top = rows.amax(-1).float()
    made = _along(torch.where(top.abs() > _HUGE, top, _lse(rows)), x, dims[0]).to(x.dtype)
    return made if keepdim else made.squeeze(dims[0])


def _nll_loss(x, target, weight, reduction, ignore_index):
    if not plain(x):
        return NotImplemented
    if 0 in (x.numel(), target.numel()):
        return ...
    rows, at = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    counts = at != ignore_index
    index = torch.where(counts, at, 0)
    picked = rows.gather(1, index[:, None])[:, 0].float()
    worth = counts.float() if weight is None else weight[index].float() * counts
    values = torch.where(counts, -picked * worth, 0)
    if reduction == 0:
        return values.to(x.dtype).reshape(target.shape), x.new_zeros(())
    total = _row_sums(worth[None])[0]
    loss = _row_sums(values[None])[0]
    return (loss / total if reduction == 1 else loss).to(x.dtype), total.to(x.dtype)


def _safe_softmax(x, dim, dtype=None):
    y = _softmax(x if dtype is None else x.to(dtype), dim)
    return y if y is NotImplemented or y is ... else y.masked_fill((x == -torch.inf).all(dim, keepdim=True), 0)


def _nll_loss2d(x, target, weight, reduction, ignore_index):
    return _nll_loss(x.movedim(1, -1), target, weight, reduction, ignore_index)


# --- sums at indices, in the order of the indices


def _add_rows(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[R,N] and on top of its rows `index[T]` those of `rows[T,N]`, each row of x one chain in f32."""
    index = torch.where(index < 0, index + x.shape[0], index).int()
    return kernels["embedding_dw"](rows, index, x.float()).to(x.dtype)


def _index_add(x, dim, index, source, *, alpha=1):
    if not plain(x, source) or x.dim() == 0 or index.numel() == 0:
        return NotImplemented if index.numel() else ...
    first = x.movedim(dim, 0)
    rows = source.movedim(dim, 0).reshape(index.numel(), -1)
    rows = rows if alpha == 1 else rows.float() * alpha
    made = _add_rows(first.reshape(first.shape[0], -1), index.reshape(-1), rows)
    return made.reshape(first.shape).movedim(0, dim)


def _index_put(x, indices, values, accumulate=False, unsafe=False):
    if not accumulate or not _floating(x):
        return ...
    given = [d for d, i in enumerate(indices) if i is not None]
    if not plain(x, values) or given != list(range(given[0], given[-1] + 1)):
        return NotImplemented
    first, places = given[0], []
    for d in given:
        i = indices[d]
        places += list(i.nonzero().unbind(1)) if i.dtype in (torch.bool, torch.uint8) else [i]
    places = torch.broadcast_tensors(*places)
    shape = x.shape[first : first + len(places)]
    flat = torch.zeros_like(places[0])
    for i, extent in zip(places, shape):
        flat = flat * extent + torch.where(i < 0, i + extent, i)
    values = values.expand(*x.shape[:first], *flat.shape, *x.shape[first + len(places) :])
    # The axes before go behind.
    before, behind = list(range(first)), range(first + len(places), x.dim())
    order = [*range(first, first + len(places)), *before, *behind]
    turned = x.permute(order)
    rows = values.permute([*range(first, first + flat.dim()), *before, *range(first + flat.dim(), values.dim())])
    if flat.numel() == 0 or x.numel() == 0:
        return x.clone()
    made = _add_rows(turned.reshape(math.prod(shape), -1), flat.reshape(-1), rows.reshape(flat.numel(), -1))
    return made.reshape(turned.shape).permute([order.index(d) for d in range(x.dim())])


def _index_put_in_place(x, indices, values, accumulate=False, unsafe=False):
    return _index_put(x, indices, values, accumulate)


def _scatter_add(x, dim, index, source):
    if not plain(x, source) or x.dim() == 0 or index.numel() == 0:
        return NotImplemented if index.numel() else ...
    dim %= x.dim()
    source = source[tuple(slice(0, extent) for extent in index.shape)]
    if dim == 0 and all(stride == 0 for stride in index.stride()[1:]) and index.shape[1:] == x.shape[1:]:
        return _index_add(x, 0, index[(slice(None), *[0] * (x.dim() - 1))], source)
    flat = torch.zeros_like(index)
    for d, extent in enumerate(x.shape):
        place = torch.arange(index.shape[d]).reshape([-1 if a == d else 1 for a in range(x.dim())])
        flat = flat * extent + (index if d == dim else place)
    return _add_rows(x.reshape(-1, 1), flat.reshape(-1), source.reshape(-1, 1)).reshape(x.shape)


def _embedding_backward(dy, tokens, rows, padding_idx, scale_by_frequency):
    if not plain(dy) or scale_by_frequency:
        return NotImplemented
    if tokens.numel() == 0:
        return ...
    tokens = tokens.reshape(-1).int()
    mask = (tokens != padding_idx).int()
    width = dy.shape[-1]
    zero = torch.zeros(rows, width, dtype=torch.float32)
    return kernels["embedding_dw"](dy.reshape(-1, width), tokens, zero, mask=mask).to(dy.dtype)


def _stable_sort(x, dim=-1, descending=False, *, stable=True):
    # Equal ones in their order: by it experts have their tokens.
    return torch.ops.aten.sort.stable(x, stable=True, dim=dim, descending=descending)


def _topk(x, k, dim=-1, largest=True, sorted=True, *, values=None, indices=None):
    if values is not None:
        return ...
    made = torch.ops.aten.topk.default(x, k, dim, largest, sorted)
    if x.dim() > 0 and 0 < k < x.shape[dim]:
        last = made[0].amin(dim, keepdim=True) if largest else made[0].amax(dim, keepdim=True)
        tied = (x >= last if largest else x <= last).sum(dim, keepdim=True) > k
        if bool(tied.any()):
            # Of equal ones the first: which torch chooses depends on how many there are, as keys of a longer text.
            firsts = torch.ops.aten.sort.stable(x, stable=True, dim=dim, descending=largest)
            return tuple(torch.where(tied, first.narrow(dim, 0, k), one) for first, one in zip(firsts, made))
    return made


def _add(x, y, *, alpha=1):
    if alpha == 1 or not isinstance(y, torch.Tensor):
        return ...
    return laid_out(torch.ops.aten.add.Tensor, (x, y), {"alpha": alpha})


def _sub(x, y, *, alpha=1):
    return ... if alpha == 1 or not isinstance(y, torch.Tensor) else _add(x, y, alpha=-alpha)


# --- triangular systems


def _solve_triangular(a, b, *, upper, left=True, unitriangular=False):
    """Row after row, in f64: each that is found is taken off those that follow, and rounded once at the end."""
    if not plain(a, b) or 0 in (*a.shape, *b.shape):
        return NotImplemented
    if not left:
        made = _solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular)
        return made.mT
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    turned = (lambda t, *dims: t.flip(dims)) if upper else lambda t, *dims: t
    a = turned(a.expand(*shape, *a.shape[-2:]).double(), -1, -2)
    x = turned(b.expand(*shape, *b.shape[-2:]), -2).to(torch.float64, copy=True)
    for i in range(a.shape[-1]):
        if not unitriangular:
            x[..., i, :] /= a[..., i, i, None]
        x[..., i + 1 :, :] -= a[..., i + 1 :, i, None] * x[..., i, None, :]
    return turned(x, -2).to(b.dtype)


# --- convolutions: products of unfolded images


def _unfolded(x, w, stride, padding, dilation, groups):
    """What an output reads, `[B,G,L,K]` by groups, and how wide and high the outputs are."""
    size = w.shape[2:]
    extents = zip(x.shape[2:], size, stride, padding, dilation)
    out = [(extent + 2 * p - d * (k - 1) - 1) // s + 1 for extent, k, s, p, d in extents]
    columns = torch.ops.aten.im2col(x.float(), size, dilation, padding, stride).to(x.dtype)
    return columns.reshape(x.shape[0], groups, -1, columns.shape[-1]).transpose(2, 3), out


def _square(x, w, stride, padding, dilation):
    """A convolution of one axis as one of two; one number is for all axes."""
    stride, padding, dilation = ([*one] * (x.dim() - 2) if len(one) == 1 else one for one in (stride, padding, dilation))
    if x.dim() == 3:
        return x[:, :, None], w[:, :, None], [1, *stride], [0, *padding], [1, *dilation]
    return x, w, list(stride), list(padding), list(dilation)


def _convolution(x, w, bias, stride, padding, dilation, transposed, output_padding, groups):
    if transposed or not plain(x, w, *([] if bias is None else [bias])) or x.dim() not in (3, 4) or 0 in (*x.shape, *w.shape):
        return NotImplemented
    line = x.dim() == 3
    x, w, stride, padding, dilation = _square(x, w, stride, padding, dilation)
    rows, out = _unfolded(x, w, stride, padding, dilation, groups)
    batch, _, places, terms = rows.shape
    if w.shape[0] == w.shape[1] * groups == groups and terms <= _TAPS:
        # Each channel by itself: one tap after the other, in f64.
        taps = w.reshape(groups, terms).double()
        made = torch.zeros(batch, groups, places, dtype=torch.float64)
        for k in range(terms):
            made = made + rows[..., k].double() * taps[:, k, None]
        made = (made if bias is None else made + bias.double()[:, None]).to(x.dtype)
    else:
        parts = []
        for g, (matrix, shift) in enumerate(_groups(w, bias, groups)):
            parts.append(kernels["gemm"](rows[:, g].reshape(-1, terms), matrix, shift).reshape(batch, places, -1))
        made = torch.cat(parts, -1).transpose(1, 2)
    made = made.reshape(batch, w.shape[0], *out).contiguous()
    return made[:, :, 0] if line else made


# Up to so many taps a channel that is convolved by itself.
_TAPS = 32


def _groups(w, bias, groups):
    matrices = w.reshape(groups, w.shape[0] // groups, -1)
    return zip(matrices, [None] * groups if bias is None else bias.reshape(groups, -1))


def _convolution_backward(dy, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask):
    if transposed or not plain(dy, x, w) or x.dim() not in (3, 4) or 0 in (*x.shape, *w.shape):
        return NotImplemented
    line = x.dim() == 3
    x2, w2, stride, padding, dilation = _square(x, w, stride, padding, dilation)
    rows, _ = _unfolded(x2, w2, stride, padding, dilation, groups)
    batch, _, places, terms = rows.shape
    by_place = dy.reshape(batch, groups, -1, places).transpose(2, 3)
    dx, dw = [], []
    for g, (matrix, _) in enumerate(_groups(w2, None, groups)):
        dy_rows = by_place[:, g].reshape(batch * places, -1)
        if output_mask[0]:
            dx.append(kernels["gemm_dx"](dy_rows, matrix, dtype=torch.float32).reshape(batch, places, terms))
        if output_mask[1]:
            dw.append(kernels["gemm_dw"](rows[:, g].reshape(-1, terms), dy_rows))
    made: list[Any] = [None, None, None]
    if output_mask[0]:
        columns = torch.stack(dx, 1).transpose(2, 3).reshape(batch, -1, places)
        size = list(w2.shape[2:])
        folded = torch.ops.aten.col2im(columns, list(x2.shape[2:]), size, dilation, padding, stride).to(x.dtype)
        made[0] = folded[:, :, 0] if line else folded
    if output_mask[1]:
        made[1] = torch.cat(dw).reshape(w.shape).to(w.dtype)
    if output_mask[2]:
        made[2] = _sums(dy.transpose(0, 1).reshape(dy.shape[1], -1), -1, False).to(w.dtype)
    return tuple(made)


# By name: what computes an operator; it gives NotImplemented for what it does not take, `...` where nothing is summed.
COVERED: dict[str, Callable[..., Any]] = {
    "_index_put_impl": _index_put_in_place,
    "_log_softmax": _log_softmax,
    "_log_softmax_backward_data": _log_softmax_backward,
    "_safe_softmax": _safe_softmax,
    "_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "add": _add,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "bmm": _bmm,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "dot": _dot,
    "embedding_dense_backward": _embedding_backward,
    "index_add": _index_add,
    "index_put": _index_put,
    "linalg_solve_triangular": _solve_triangular,
    "linalg_vector_norm": _vector_norm,
    "logsumexp": _logsumexp,
    "mean": _mean,
    "mm": _mm,
    "mv": _mv,
    "nll_loss2d_forward": _nll_loss2d,
    "nll_loss_forward": _nll_loss,
    "scatter_add": _scatter_add,
    "sort": _stable_sort,
    "std": _std,
    "sub": _sub,
    "sum": _sum,
    "topk": _topk,
    "var": _var,
    "var_mean": _var_mean,
    "vdot": _dot,
}
