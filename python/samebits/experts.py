"""Tensors by the names of Hugging Face folders, where each expert and each convolution of a linear attention has its own, and by
those of the modules of transformers 5, which hold those of a layer in one: `experts.gate_up_proj[E,2F,H]` (`experts.up_proj[E,F,H]`
without gates), `experts.down_proj[E,H,F]`, and `conv1d.weight`, whose rows are those of queries, of keys and of values.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Mapping

__all__ = ["Place", "by_folder", "places"]

# A tensor of a folder: its name, and where it stands in the tensor of a module; () for all of it.
Place = tuple[str, tuple[Any, ...]]

_SEPARATE = ("gate_proj", "up_proj", "down_proj")
# By family: the block that has the experts in folders, and what gate, up and down are called there, where that is not what
# modules and most folders say.
_FAMILIES: dict[str, tuple[str, tuple[str, str, str]]] = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "minimax_m2": ("block_sparse_moe", ("w1", "w3", "w2")),
    "phimoe": ("block_sparse_moe", ("w1", "w3", "w2")),
    "lfm2_moe": ("feed_forward", ("w1", "w3", "w2")),
    "kimi_linear": ("block_sparse_moe", ("w1", "w3", "w2")),
}
_FORMS = {"gate_up_proj": "[E,2F,H]", "up_proj": "[E,F,H]", "down_proj": "[E,H,F]"}
# Those whose folders hold all experts of a layer in one, as modules do.
_TOGETHER = ("gpt_oss", "llama4_text", "gemma4_text")
# Those whose folders have three convolutions where modules have one.
_CUT = ("kimi_linear", "olmo_hybrid")
# Of layers that are linear attentions; the others have a `post_attention_layernorm` in folders as well.
_NORMS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
# Tensors whose module has another path than folders.
_KIMI = ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")
_DENSE = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
_GRANITE = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}
_RENAMED = {
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "kimi_linear": {f"self_attn.forget_gate.{name}": f"self_attn.{name}" for name in _KIMI} | {name: name for name in _DENSE},
    "phimoe": {"mlp.router.weight": "block_sparse_moe.gate.weight"},
    "ernie4_5_moe": {"mlp.gate.moe_statics.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"},
}


def places(name: str, tensors: Mapping[str, Any], family: str) -> list[Place]:
    """The tensors of a folder that the one called `name` holds; itself, where a folder has it as it is."""
    shape = tuple(tensors[name].shape)
    # Beside a model of images.
    for beginning, of in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(beginning):
            name = of + name.removeprefix(beginning)
    if family == "nemotron_h" and name.startswith("model."):
        name = "backbone." + name.removeprefix("model.")
    for end, of in _RENAMED.get(family, {}).items():
        if name.endswith("." + end):
            return [(name.removesuffix(end) + of, ())]
    block, (gate, up, down) = _FAMILIES.get(family, ("mlp", _SEPARATE))
    *path, last = name.split(".")
    if family not in _TOGETHER and path[:-1] and path[-1] == "experts" and last in _FORMS:
        if len(shape) != 3 or (last == "gate_up_proj" and shape[1] % 2):
            raise ValueError(f"tensor `{name}`: has shape {list(shape)}; experts of a layer together are {_FORMS[last]}")
        path = ".".join([*_in_folder(path[:-1], block), "experts"])
        if last != "gate_up_proj":
            return [(f"{path}.{e}.{down if last == 'down_proj' else up}.weight", (e,)) for e in range(shape[0])]
        width = shape[1] // 2
        halves = ((gate, slice(0, width)), (up, slice(width, None)))
        return [(f"{path}.{e}.{which}.weight", (e, half)) for e in range(shape[0]) for which, half in halves]
    if family in _CUT and name.endswith(".conv1d.weight"):
        return _cut(name.removesuffix("conv1d.weight"), tensors, shape)
    if family == "olmo_hybrid" and path[-1] in _NORMS and ".".join([*path[:-1], "input_layernorm.weight"]) in tensors:
        return [(".".join([*path[:-1], _NORMS[path[-1]], last]), ())]
    if family == "gpt_neox" and name == "lm_head.weight":
        return [("embed_out.weight", ())]
    return [(".".join([*_in_folder(path, block), last]), ())]


def _cut(block: str, tensors: Mapping[str, Any], shape: tuple[int, ...]) -> list[Place]:
    """The convolutions of queries, keys and values: each has as many rows as its projection, which stands beside it."""
    parts = [f"{block}{which}_proj.weight" for which in "qkv"]
    missing = [part for part in parts if part not in tensors]
    if missing:
        raise ValueError(f"tensor `{block}conv1d.weight`: is cut by the rows of `{missing[0]}`, which is missing")
    ends = list(accumulate(tensors[part].shape[0] for part in parts))
    if ends[-1] != shape[0]:
        raise ValueError(f"tensor `{block}conv1d.weight`: has shape {list(shape)}; its projections have {ends[-1]} rows together")
    return [(f"{block}{which}_conv1d.weight", (slice(first, end),)) for which, first, end in zip("qkv", [0, *ends], ends)]


def _in_folder(path: list[str], block: str) -> list[str]:
    """The path of a module as folders have it: `model.layers.0.mlp.gate` is that of a router."""
    return [block if part == "mlp" else part for part in path]


def by_folder(tensors: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Tensors by the names of folders, views where several stand in one."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        for of, at in places(name, tensors, family):
            if of in found:
                raise ValueError(f"tensor `{of}`: stands there twice, the second time in `{name}`; leave one out")
            found[of] = tensor[at] if at else tensor
    return found
