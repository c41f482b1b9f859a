"""Attention under masks as torch and transformers give them.

The keys of a query count from the first one that its mask lets it see, so that neither padding, nor what stands before in
a cache, nor the length of the others moves a bit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _native
from . import ops

_kernels = _native.kernels()
# Up to so many keys stand in one block of attention, where a window takes no part in the order of a sum.
_BLOCK = 256


class _Group(NamedTuple):
    """Queries of some sequences of a batch whose keys count from the same one."""

    sequences: slice
    rows: slice
    start: int
    q_pos: torch.Tensor
    kv_len: torch.Tensor
    window: int


class Plan(NamedTuple):
    """How a mask is met: calls of attention, and the rows that see no key (or None)."""

    groups: list[_Group]
    blind: torch.Tensor | None


class _Known(NamedTuple):
    """A plan, and what it was made of."""

    rows: tuple[int, int]
    inference: bool
    mask: torch.Tensor
    plan: Plan | None


# By mask, which every layer of a model shares. A mask may be written in many ways that leave no trace (`.data`, numpy, another
# process), so a plan holds as long as the mask has the elements that it was made of.
_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _planned(mask: torch.Tensor, batch: int, rows: int) -> Plan | None:
    """The plan of `mask[B or 1,H or 1,T or 1,S]`, or None where it is not one for all heads, adds other numbers than 0 and
    minus infinity (or the lowest number in its place), or lets a row see keys with a gap between them.
    """
    if mask.shape[1] != 1 and mask.stride(1) != 0:
        return None
    # What belongs to torch.inference_mode is of no use to other calls.
    inference, known = torch.is_inference_mode_enabled(), _plans.get(mask)
    one = mask[:, 0]
    for axis in (0, 1):
        # Of what is expanded, once.
        one = one.narrow(axis, 0, 1) if one.stride(axis) == 0 else one
    if known is not None and (known.rows, known.inference, known.mask.dtype) == ((batch, rows), inference, one.dtype):
        if torch.equal(known.mask, one):
            return known.plan
    visible: torch.Tensor | None = one
    if one.dtype != torch.bool:
        visible = one == 0
        visible = visible if bool((visible | (one <= torch.finfo(one.dtype).min)).all()) else None
    plan = None if visible is None else _plan(visible.expand(batch, rows, -1))
    _plans[mask] = _Known((batch, rows), inference, one.clone(), plan)
    return plan


def _plan(mask: torch.Tensor) -> Plan | None:
    rows, keys = mask.shape[1:]
    place = torch.arange(keys)
    first = torch.where(mask, place, keys).amin(-1)
    last = torch.where(mask, place, -1).amax(-1)
    blind = last < 0
    if not bool(((last - first + 1 == mask.sum(-1)) | blind).all()):
        return None
    start = first.amin(-1)
    starts = start.tolist()
    p, f = (last - start[:, None]).masked_fill(blind, 0), (first - start[:, None]).masked_fill(blind, 0)
    lengths = torch.minimum(p.amax(-1) + 1, keys - start).clamp(min=0)
    windows = torch.where(f > 0, p - f + 1, 0)
    window = int(windows.amax())
    inside = torch.where(f > 0, windows == window, p < window)
    p, lengths = p.int(), lengths.int()
    groups: list[_Group] = []
    if window == 0 or bool(inside.all() & (p.amax() < _BLOCK)):
        one = 0
        for b in range(1, len(starts) + 1):
            if b == len(starts) or starts[b] != starts[one]:
                here = slice(one, b)
                groups.append(_Group(here, slice(0, rows), min(starts[one], keys - 1), p[here], lengths[here], window))
                one = b
    else:
        for b, firsts in enumerate(first.masked_fill(blind, keys - 1).tolist()):
            one = 0
            for t in range(1, rows + 1):
                if t == rows or firsts[t] != firsts[one]:
                    here = slice(one, t)
                    q_pos = (last[b : b + 1, here] - firsts[one]).clamp(min=0).int()
                    kv_len = q_pos.amax(-1) + 1
                    groups.append(_Group(slice(b, b + 1), here, firsts[one], q_pos, kv_len, 0))
                    one = t
    return Plan(groups, blind if bool(blind.any()) else None)


# The layers of a model ask one after the other for the same.
@functools.lru_cache(maxsize=4)
def _without_mask(batch: int, rows: int, keys: int, causal: bool) -> Plan:
    q_pos = torch.arange(rows, dtype=torch.int32) if causal else torch.full((rows,), keys - 1, dtype=torch.int32)
    kv_len = torch.full((batch,), keys, dtype=torch.int32)
    return Plan([_Group(slice(0, batch), slice(0, rows), 0, q_pos.expand(batch, rows).contiguous(), kv_len, 0)], None)


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `q[B,H,T,D]` over `k[B,G,S,D]` and `v[B,G,S,E]`, with a gradient: `[B,H,T,E]`, which lies as `[B,T,H,E]`.
    `mask[B or 1,H or 1,T or 1,S]` is boolean (True: visible), or of floats that are added to the scores. Row t of a causal call
    without a mask sees keys 0 to t, as in torch. A row that sees nothing is 0.
    `sinks[H]` are logits that join the softmax and have no value.
    """
    batch, _, rows, _ = q.shape
    keys = k.shape[2]
    traced = type(q) is not torch.Tensor or torch.compiler.is_compiling()
    if mask is not None:
        plan = None if causal or mask.dim() != 4 or mask.requires_grad else _planned(mask, batch, rows)
        if plan is None and sinks is not None:
            raise NotImplementedError("samebits attention: sinks beside a mask that is neither causal nor a window; leave it out")
        if plan is None:
            return _anyhow(q, k, v, mask, causal, scale, softcap)
        groups, blind = plan
    else:
        # What belongs to torch.inference_mode is of no use to other calls.
        plan = _without_mask.__wrapped__ if traced or torch.is_inference_mode_enabled() else _without_mask
        groups, blind = plan(batch, rows, keys, causal)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    recorded = traced or (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *([] if sinks is None else [sinks]))))
    parts: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    for group in groups:
        here, keys_here = group.sequences, slice(group.start, None)
        alone = here == slice(0, batch) and group.start == 0
        q_here = q if here == slice(0, batch) else q[here]
        q_here = q_here if group.rows == slice(0, rows) else q_here[:, group.rows]
        k_here, v_here = (k, v) if alone else (k[here, keys_here], v[here, keys_here])
        attributes = {"scale": scale, "causal": True, "window": group.window, "softcap": softcap}
        if sinks is not None:
            attributes["sinks"] = sinks.float()
        attention = ops.attention if recorded else _kernels["attention"]
        out, _ = attention(q_here, k_here, v_here, group.q_pos, group.kv_len, **attributes)
        parts.append(out)
        if group.rows.stop == rows:
            whole.append(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
            parts = []
    out = whole[0] if len(whole) == 1 else torch.cat(whole)
    if blind is not None:
        out = out.masked_fill(blind.expand(batch, rows)[:, :, None, None], 0)
    return out.transpose(1, 2)


def _anyhow(q, k, v, mask, causal, scale, softcap):
    """Any mask: products and the softmax one after the other, in f32, as batch_invariant has them."""
    from .invariant import batch_invariant

    dtype = q.dtype
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    with batch_invariant():
        scores = (q.float() @ k.float().transpose(2, 3)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights = torch.softmax(scores, -1)
        weights = weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
        return (weights @ v.float()).to(dtype)
