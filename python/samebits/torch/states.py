"""Layers of transformers that carry a state from one call to the next: Mamba's scans and the delta rules.

Their prefill adds in chunks that are counted from the first token of a call, padded or not, and their decode by another formula. Every
operator of both is covered, so what is seen is the layer: it takes the exponential of its `A_log` in each call.
"""

from __future__ import annotations

from types import FrameType

import torch

from .positions import owner

__all__ = ["EXPONENTIALS", "moved_by"]

EXPONENTIALS = {torch.exp, torch.Tensor.exp}
# Calls between the layer and what has its `A_log`: a gate of Kimi's is a module of its own.
_FAR = 8


def _of_layer(frame: FrameType | None) -> FrameType | None:
    """The frame of the layer's call: this one, or one around it."""
    for _ in range(_FAR):
        if frame is None or {"recurrent_state", "attention_mask"} <= frame.f_locals.keys():
            return frame
        frame = frame.f_back
    return None


def moved_by(caller: FrameType) -> str | None:
    """What moves the bits of the layer that takes an exponential in this frame: the layer's name, and a state that it goes on from or
    tokens that are padded left. None for other modules, and where neither is there.
    """
    module = owner(caller)
    if module is None or "A_log" not in module._parameters:
        return None
    frame = _of_layer(caller)
    if frame is None or (layer := owner(frame)) is None:
        return None
    # Mamba's scan goes token after token in both, and in f32 with the same bits.
    if hasattr(layer, "x_proj") and layer.x_proj.weight.dtype == torch.float32:
        return None
    name, mask = type(layer).__name__, frame.f_locals["attention_mask"]
    if frame.f_locals["recurrent_state"] is not None:
        return f"{name}(state)"
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask[:, 0].all()):
        return f"{name}(padded left)"
    return None
