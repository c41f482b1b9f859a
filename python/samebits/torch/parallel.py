"""Ranks of torch.distributed with the bits of one machine: layers over 1, 2, 4 or 8 of them.

    from samebits.torch import parallel
    up = parallel.ColumnParallelLinear(w, group=tensor_parallel)      # w and bias are whole; a rank keeps its part
    down = parallel.RowParallelLinear(w2, group=tensor_parallel)
    y = down(ops.silu_mul(up(x), up2(x)))

Sums over what ranks share are eight segments (docs/NUMERICS.md, 2), of which a rank has 8, 4, 2 or 1: their f32 partial sums
are gathered and added in the tree of the eight, never by the sum of the library. So what is split must be a multiple of 128,
and what ranks cannot have is refused. A group is a process group; None is the default one, or one rank where there is none.
Gradients work inside `samebits.torch.accumulate`, whose `groups` and `ranks` are for data parallelism.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import samebits.torch as core

from . import _SCHEMA, _Call, ops

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "SelfAttention",
    "VocabParallelEmbedding",
    "gather",
    "join",
    "linear_logprob",
    "whole_state",
]


def ranks_of(group: Any) -> int:
    """How many ranks a group has."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


class _Split(NamedTuple):
    """A rank's part of an axis."""

    group: Any
    ranks: int
    rank: int
    offset: int
    size: int
    total: int


def _split(what: str, total: int, group: Any) -> _Split:
    """The part of an axis that this rank has: whole segments of the eight."""
    ranks = ranks_of(group)
    rank = dist.get_rank(group) if ranks > 1 else 0
    if ranks not in (1, 2, 4, 8):
        raise ValueError(f"{what}: {ranks} ranks; eight segments are dealt to 1, 2, 4 or 8")
    if ranks > 1 and (total % 128 or not total):
        below, above = total // 128 * 128, -(-total // 128) * 128 or 128
        right = f"{below} or {above}" if below else f"{above}"
        raise ValueError(f"{what}: {total} over {ranks} ranks; it must be a multiple of 128 as {right}, or the ranks 1")
    size = total // ranks
    return _Split(group, ranks, rank, rank * size, size, total)


# --- what ranks exchange


def _gathered(part: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """The tensors of all ranks, of one shape and dtype, in the order of ranks."""
    part = part.contiguous()
    # As bytes: not every backend knows every dtype.
    parts = [torch.empty_like(part) for _ in range(ranks_of(group))]
    flat = lambda tensor: tensor.reshape(-1).view(torch.uint8)
    if part.numel():
        dist.all_gather([flat(other) for other in parts], flat(part), group=group)
    return parts


def _tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """Their sum in f32: neighbours, then pairs of neighbours, to the one that is left."""
    while len(parts) > 1:
        parts = [ops.add(a, b) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


def join(part: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The sum of the ranks' f32 partial sums, in the tree of the contract; every rank has it. No gradient is recorded."""
    if part.dtype != torch.float32:
        raise TypeError(f"join: the partial sum is {part.dtype}; ranks exchange f32")
    with torch.no_grad():
        return part if ranks_of(group) == 1 else _tree(_gathered(part, group))


def gather(part: torch.Tensor, axis: int = -1, group: Any = None) -> torch.Tensor:
    """The ranks' parts one behind the other along an axis; every rank has it. No gradient is recorded."""
    with torch.no_grad():
        return part if ranks_of(group) == 1 else torch.cat(_gathered(part, group), axis)


# --- products


def _begin(name: str, **given: torch.Tensor | None) -> dict[str, Any]:
    return core._active.begin(name, given) if core._active and torch.is_grad_enabled() else {}


def _call(name: str, carried: dict[str, Any], **given: torch.Tensor | None) -> _Call:
    """A call whose sums over tokens are made here."""
    inputs = {i: (tensor.shape, tensor.dtype, 0) for i, tensor in given.items() if tensor is not None}
    return _Call(_SCHEMA[name], {}, inputs, {}, {}, carried)


def _given(name: str, **given: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The inputs of an op in its order."""
    return [given.get(i["name"]) for i in _SCHEMA[name]["inputs"]]


def _as(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if gradient is None else gradient.to(like.dtype).reshape(like.shape)


class _Product(torch.autograd.Function):
    """gemm of x and this rank's rows (`columns` of the output) or columns of w."""

    @staticmethod
    def forward(ctx, x, w, bias, columns, split, carried):
        ctx.save_for_backward(x, w, bias)
        ctx.columns, ctx.split, ctx.carried = columns, split, carried
        if columns:
            return ops.gemm(x, w, bias)
        y = join(ops.gemm(x, w, k_offset=split.offset, k_total=split.total), split.group)
        if bias is None:
            return y.to(x.dtype)
        return ops.add(y, bias.float().expand_as(y).contiguous(), dtype=x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, w, bias = ctx.saved_tensors
        split, call = ctx.split, _call("gemm", ctx.carried, x=x, w=w, bias=bias)
        dx = dw = dbias = None
        if ctx.needs_input_grad[0]:
            if ctx.columns:
                dx = join(ops.gemm_dx(dy, w, n_offset=split.offset, n_total=split.total), split.group).to(x.dtype)
            else:
                dx = ops.gemm_dx(dy, w, dtype=x.dtype)
        if ctx.needs_input_grad[1]:
            dw = _as(call.sum("w", "gemm_dw", *_given("gemm_dw", x=x, dy=dy)).get("w"), w)
        if ctx.needs_input_grad[2]:
            dbias = _as(call.sum("bias", "token_sum", *_given("token_sum", x=dy)).get("bias"), bias)
        return dx, dw, dbias, None, None, None


def _product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, columns: bool, split: _Split) -> torch.Tensor:
    if split.ranks == 1:
        return ops.gemm(x, w, bias)
    return _Product.apply(x, w, bias, columns, split, _begin("gemm", x=x, w=w, bias=bias))


class _Layer(torch.nn.Module):
    """What has parts of whole parameters, by the axis that is split."""

    def keep(self, name: str, tensor: torch.Tensor | None, axis: int | None, split: _Split) -> None:
        """Registers this rank's part of a parameter."""
        if tensor is None:
            self.register_parameter(name, None)
            return
        if axis is not None:
            tensor = tensor.narrow(axis, split.offset, split.size)
        parameter = torch.nn.Parameter(tensor.detach().clone())
        if axis is not None and split.ranks > 1:
            parameter.split_axis, parameter.split_group = axis, split.group
        self.register_parameter(name, parameter)


class ColumnParallelLinear(_Layer):
    """`gemm` whose outputs are split: x is whole on every rank, y is the rank's part of the last axis.

    `weight[N,K]` and `bias[N]` are whole; N is a multiple of 128 where there are several ranks, because the gradient of x is a
    sum over it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, group: Any = None) -> None:
        super().__init__()
        self.split = _split("ColumnParallelLinear: the outputs N", weight.shape[0], group)
        self.keep("weight", weight, 0, self.split)
        self.keep("bias", bias, 0, self.split)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _product(x, self.weight, self.bias, True, self.split)


class RowParallelLinear(_Layer):
    """`gemm` whose inputs are split: x is the rank's part of the last axis, y is whole on every rank.

    `weight[N,K]` and `bias[N]` are whole; K is a multiple of 128 where there are several ranks. The bias is added to the sum.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, group: Any = None) -> None:
        super().__init__()
        self.split = _split("RowParallelLinear: the inputs K", weight.shape[1], group)
        self.keep("weight", weight, 1, self.split)
        self.keep("bias", bias, None, self.split)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _product(x, self.weight, self.bias, False, self.split)


# --- the vocabulary


class _Lookup(torch.autograd.Function):
    """embedding of tokens of which this rank has some."""

    @staticmethod
    def forward(ctx, w, tokens, split, carried):
        inside = (tokens >= split.offset) & (tokens < split.offset + split.size)
        local = torch.where(inside, tokens - split.offset, 0).to(torch.int32)
        ctx.save_for_backward(w, local, inside.to(torch.int32))
        ctx.carried = carried
        rows = torch.stack(_gathered(ops.embedding(w, local), split.group))
        owner = (tokens.long() // split.size).unsqueeze(0).unsqueeze(-1)
        return rows.gather(0, owner.expand(1, *rows.shape[1:])).squeeze(0)

    @staticmethod
    def backward(ctx, dy):
        w, local, inside = ctx.saved_tensors
        call = _call("embedding", ctx.carried, w=w)
        given = _given("embedding_dw", dy=dy, tokens=local, mask=inside)
        return _as(call.sum("w", "embedding_dw", *given).get("w"), w), None, None, None


class VocabParallelEmbedding(_Layer):
    """`embedding` whose table is split by tokens; `weight[V,D]` is whole, V a multiple of 128 where there are several ranks."""

    def __init__(self, weight: torch.Tensor, group: Any = None) -> None:
        super().__init__()
        self.split = _split("VocabParallelEmbedding: the vocabulary V", weight.shape[0], group)
        self.keep("weight", weight, 0, self.split)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(torch.int32)
        if self.split.ranks == 1:
            return ops.embedding(self.weight, tokens)
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.split.total:
            raise ValueError(f"VocabParallelEmbedding: tokens must be 0 to {self.split.total - 1}")
        return _Lookup.apply(self.weight, tokens, self.split, _begin("embedding", w=self.weight))


# Rows of logits that stand at a time, times the vocabulary of a rank.
_LOGITS = 1 << 24


class _LinearLogprob(torch.autograd.Function):
    """linear_logprob over this rank's part of the vocabulary."""

    @staticmethod
    def forward(ctx, x, w, target, temperature, split, carried):
        rows = max(1, _LOGITS // split.size // split.ranks) * split.ranks
        made = [_rows_logprob(*part, w, temperature, split) for part in zip(x.split(rows), target.split(rows))]
        logprob, lse = (torch.cat(parts) for parts in zip(*made))
        ctx.save_for_backward(x, w, target, lse)
        ctx.temperature, ctx.split, ctx.carried, ctx.rows = temperature, split, carried, rows
        return logprob, lse.clone()

    @staticmethod
    def backward(ctx, dlogprob, dlse):
        x, w, target, lse = ctx.saved_tensors
        split = ctx.split
        inside = (target >= split.offset) & (target < split.offset + split.size)
        local = torch.where(inside, target - split.offset, -1).to(torch.int32)
        # A row whose target another rank has takes its part of the gradient by that of lse: the factor is the same.
        of_lse = torch.where(inside | (target < 0), dlse, dlse - dlogprob)
        parts = zip(*(tensor.split(ctx.rows) for tensor in (x, local, lse, dlogprob, of_lse)))
        dz = [
            ops.logprob_backward(
                ops.gemm(rows, w, dtype=torch.float32), at, sums, slope, more, temperature=ctx.temperature, dtype=x.dtype
            )
            for rows, at, sums, slope, more in parts
        ]
        dz = torch.cat(dz)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = join(ops.gemm_dx(dz, w, n_offset=split.offset, n_total=split.total), split.group).to(x.dtype)
        if ctx.needs_input_grad[1]:
            call = _call("linear_logprob", ctx.carried, x=x, w=w)
            dw = _as(call.sum("w", "gemm_dw", *_given("gemm_dw", x=x, dy=dz)).get("w"), w)
        return dx, dw, None, None, None, None


def _rows_logprob(
    x: torch.Tensor, target: torch.Tensor, w: torch.Tensor, temperature: float, split: _Split
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank gets whole rows of the logits, a share of the rows, and tells the others what came of them."""
    logits = ops.gemm(x, w, dtype=torch.float32)
    if not len(x):
        return logits.new_empty(0), logits.new_empty(0)
    share = -(-len(x) // split.ranks)
    logits = torch.nn.functional.pad(logits, (0, 0, 0, share * split.ranks - len(x)))
    target = torch.nn.functional.pad(target, (0, share * split.ranks - len(target)), value=-1)
    mine = torch.empty_like(logits)
    dist.all_to_all_single(mine, logits, group=split.group)
    rows = mine.view(split.ranks, share, split.size).transpose(0, 1).reshape(share, split.total)
    at = target[split.rank * share : (split.rank + 1) * share]
    both = torch.stack(ops.logprob(rows, at, temperature=temperature), -1)
    both = torch.cat(_gathered(both, split.group))[: len(x)]
    return both[:, 0], both[:, 1]


def linear_logprob(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, group: Any = None, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_logprob` over a split vocabulary: x[..,K] and target[..] are whole, `weight[V/R,K]` is the rank's part, as a
    ColumnParallelLinear or a VocabParallelEmbedding holds it. logprob[..] and lse[..], in f32, are whole on every rank.

    Memory is that of the logits of a part of the rows; the gradient keeps those of the rank's part of the vocabulary, in the
    dtype of x.
    """
    split = _split("linear_logprob: the vocabulary V", weight.shape[0] * ranks_of(group), group)
    target = target.to(torch.int32)
    if split.ranks == 1:
        return ops.linear_logprob(x, weight, target, temperature=temperature)
    if x.dim() < 1 or x.shape[:-1] != target.shape or x.shape[-1] != weight.shape[1]:
        shapes = f"x {list(x.shape)}, weight {list(weight.shape)}, target {list(target.shape)}"
        raise ValueError(f"linear_logprob: {shapes} must have the forms [..,K], [V,K] and [..]")
    if target.numel() and int(target.max()) >= split.total:
        raise ValueError(f"linear_logprob: `target`: every token must be less than {split.total}")
    carried = _begin("linear_logprob", x=x, w=weight, target=target)
    flat = x.reshape(-1, x.shape[-1])
    logprob, lse = _LinearLogprob.apply(flat, weight, target.reshape(-1), temperature, split, carried)
    return logprob.reshape(target.shape), lse.reshape(target.shape)


# --- attention


class SelfAttention(torch.nn.Module):
    """Causal self-attention by heads: each rank has some, and their output is a RowParallelLinear.

    `wq[Hq*D,N]`, `wk[Hkv*D,N]`, `wv[Hkv*D,N]`, `wo[N,Hq*D]` are whole. x[B,T,N] is whole on every rank, and so is the
    output. Hq and Hkv are multiples of the ranks, and Hq*D and Hkv*D of 128 where there are several. `theta` is the base of
    RoPE, None for none. `length[B]` tells how many of a row's tokens there are; the rest, behind them, is padding.
    """

    def __init__(
        self, wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, wo: torch.Tensor, *, dim: int, theta: float | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.theta, ranks = dim, theta, ranks_of(group)
        for name, tensor in (("query", wq), ("key", wk)):
            heads = tensor.shape[0] // dim
            if tensor.shape[0] % dim or heads % ranks:
                fit = [n for n in (1, 2, 4, 8) if heads % n == 0 and tensor.shape[0] % dim == 0]
                right = f"{' or '.join(map(str, fit))} ranks" if fit else f"a multiple of {dim}"
                raise ValueError(f"SelfAttention: {tensor.shape[0]} = {heads} {name} heads of {dim} over {ranks} ranks; use {right}")
        self.q, self.k, self.v = (ColumnParallelLinear(w, group=group) for w in (wq, wk, wv))
        self.o = RowParallelLinear(wo, group=group)

    def forward(self, x: torch.Tensor, length: torch.Tensor | None = None) -> torch.Tensor:
        batch, tokens = x.shape[:2]
        pos = torch.arange(tokens, dtype=torch.int32, device=x.device).repeat(batch)
        q, k, v = (layer(x).reshape(batch * tokens, -1, self.dim) for layer in (self.q, self.k, self.v))
        if self.theta is not None:
            q, k = (ops.rope(heads, pos, theta=self.theta) for heads in (q, k))
        q, k, v = (heads.reshape(batch, tokens, -1, self.dim) for heads in (q, k, v))
        if length is None:
            length = torch.full((batch,), tokens, dtype=torch.int32, device=x.device)
        out, _ = ops.attention(q, k, v, pos.reshape(batch, tokens), length.to(torch.int32), causal=True)
        return self.o(out.reshape(batch, tokens, -1))


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a model, whole, by name; every rank calls it and has them all."""
    found = {}
    for name, parameter in model.named_parameters():
        axis = getattr(parameter, "split_axis", None)
        found[name] = parameter.detach() if axis is None else gather(parameter.detach(), axis, parameter.split_group)
    return found
