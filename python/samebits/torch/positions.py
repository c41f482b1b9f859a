"""Rotary positions whose frequencies depend on a length: longrope, dynamic NTK and their like.

Modules of transformers take the longest position of the whole batch for it, so that a sequence would rotate otherwise beside a longer one,
and in a decode otherwise than in its prefill. In a block of `batch_invariant` they are told a declared length, the same in every call.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

__all__ = ["asked_by", "counted_from_the_end", "declared", "owner"]

# Functions of transformers that count positions from the end of the longest text, by module and name: what is said of them. Scores differ
# by what softmax takes off again, but not their roundings.
_FROM_THE_END = {("transformers.models.mpt.modeling_mpt", "build_mpt_alibi_tensor"): "MptModel(alibi)"}


def counted_from_the_end(caller: FrameType) -> str | None:
    """What is not covered of the function of this frame, which asks for a range of positions."""
    return _FROM_THE_END.get((caller.f_globals.get("__name__", ""), caller.f_code.co_name))


def owner(frame: FrameType) -> torch.nn.Module | None:
    """The module whose method runs in a frame."""
    module = frame.f_locals.get("self")
    return module if isinstance(module, torch.nn.Module) else None


def asked_by(caller: FrameType) -> torch.nn.Module | None:
    """The module with rotary frequencies that asks, in this frame, for a number of its whole input."""
    module = owner(caller)
    if module is None:
        return None
    has = any(name.endswith("inv_freq") for name in (*module._buffers, *vars(module)))
    return module if has or hasattr(module, "rope_type") else None


class Lengths:
    """What a module says of its positions."""

    def __init__(self, module: torch.nn.Module, caller: FrameType) -> None:
        self.module, self.layer = module, caller.f_locals.get("layer_type")
        self.prefix = "" if self.layer is None else f"{self.layer}_"
        config = getattr(module, "config", None)
        parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        parameters = parameters.get(self.layer, {}) if self.layer is not None else parameters
        kind = getattr(module, "rope_type", None)
        self.kind = kind.get(self.layer) if isinstance(kind, dict) else kind
        original = parameters.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if "dynamic" in (self.kind or "") or original is None:
            # Dynamic frequencies change beyond the length that the module was made for.
            original = getattr(module, "original_max_seq_len", original)
        self.original: int | None = original

    def name(self) -> str:
        return f"{type(self.module).__name__}({self.kind or 'rope'})"


def declared(module: torch.nn.Module, caller: FrameType, positions: torch.Tensor, length: int | None) -> tuple[torch.Tensor | None, str]:
    """The longest position that a module is told in place of that of its `positions`, and the module's name; None where there is none
    to be told, since no length was declared and these are beyond the original one.

    Raises ValueError for positions beyond what was declared.
    """
    of = Lengths(module, caller)
    longest = int(positions.max()) + 1
    if length is not None and longest > length:
        raise ValueError(f"batch_invariant: {of.name()} is given {longest} positions; rope_length is {length}: declare the longest")
    told = of.original if length is None else length
    if told is None or longest > told:
        return None, of.name()
    # What was computed in other calls, perhaps outside of the block, is computed again.
    if hasattr(module, f"{of.prefix}long_inv_freq"):
        delattr(module, f"{of.prefix}long_inv_freq")
    if "dynamic" in (of.kind or ""):
        long = of.original is not None and told > of.original
        setattr(module, f"{of.prefix}max_seq_len_cached", 0 if long else sys.maxsize)
        told = told if long else min(told, 1)
    return positions.new_tensor(told - 1), of.name()
