"""For models of transformers: `attn_implementation="samebits"`, and layers in the manner of `kernels`.

    import samebits.torch.transformers
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="samebits")
    samebits.torch.transformers.kernelize(model)

Importing this module registers the attention; `samebits.torch` itself asks for no transformers.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from . import ops
from .attention import masked_attention

__all__ = ["RMSNorm", "SwiGLU", "attention_forward", "kernelize"]

# What would change the weights and is not taken.
_REFUSED = ("position_bias", "head_mask", "cache")


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: `query[B,H,T,D]`, `key[B,G,S,D]`, `value[B,G,S,E]` -> `[B,T,H,E]`. Windows are in the mask.
    `s_aux[H]` are attention sinks.

    Raises NotImplementedError for dropout, biases of positions and paged caches.
    """
    given = [name for name in _REFUSED if others.get(name) is not None]
    if dropout or given:
        raise NotImplementedError(f"samebits attention: `{(given or ['dropout'])[0]}` is not supported; leave it out")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    out = masked_attention(query, key, value, attention_mask, causal, scaling, softcap or 0.0, s_aux)
    return out.transpose(1, 2), None


AttentionInterface.register("samebits", attention_forward)
AttentionMaskInterface.register("samebits", sdpa_mask)


class RMSNorm(torch.nn.Module):
    """The forward of `weight * normalised(x).to(x.dtype)`, in place of a norm with `weight` and `variance_epsilon`."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rounding = "hf" if hidden_states.dtype == torch.bfloat16 else "once"
        return ops.rms_norm(hidden_states, self.weight, eps=self.variance_epsilon, rounding=rounding)


class SwiGLU(torch.nn.Module):
    """The forward of `down_proj(silu(gate_proj(x)) * up_proj(x))`, rounded once between the products."""

    has_backward = True
    can_torch_compile = True
    gate_proj: torch.nn.Linear
    up_proj: torch.nn.Linear
    down_proj: torch.nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        h = ops.silu_mul(ops.gemm(x, gate.weight, gate.bias), ops.gemm(x, up.weight, up.bias))
        return ops.gemm(h, down.weight, down.bias)


def _layer(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """The layer that computes what a module of transformers does."""
    name = type(module).__name__
    if name.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and getattr(module, "weight", None) is not None:
        # Whatever else has these two names, its forward says what it is: norms with an offset or a gate compute another thing.
        return RMSNorm if type(module).forward.__code__.co_argcount == 2 else None
    linears = [getattr(module, one, None) for one in ("gate_proj", "up_proj", "down_proj")]
    if name.endswith("MLP") and all(type(one) is torch.nn.Linear for one in linears):
        acts = getattr(module, "act_fn", None)
        return SwiGLU if type(acts).__name__ in ("SiLU", "SiLUActivation") else None
    return None


def kernelize(model: torch.nn.Module) -> list[str]:
    """Gives the norms and the gated perceptrons of a model our forwards, as `kernels.kernelize` does; the names of those that got
    one. A perceptron then rounds once where it rounded twice.
    """
    found = []
    for name, module in model.named_modules():
        layer = _layer(module)
        if layer is not None:
            module.forward = types.MethodType(layer.forward, module)
            found.append(name)
    return found
