"""Tensors of a mixture of experts by the names of Hugging Face folders, where each expert has its own, and by those of the modules of
transformers 5, which hold all experts of a layer in one: `experts.gate_up_proj[E,2F,H]` and `experts.down_proj[E,H,F]`.
"""

from __future__ import annotations

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
}
# Those whose folders hold all experts of a layer in one, as modules do.
_TOGETHER = ("gpt_oss", "llama4_text")
# Tensors whose module has another path than folders.
_GRANITE = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}
_RENAMED = {
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "phimoe": {"mlp.router.weight": "block_sparse_moe.gate.weight"},
    "ernie4_5_moe": {"mlp.gate.moe_statics.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"},
}


def places(name: str, tensor: Any, family: str) -> list[Place]:
    """The tensors of a folder that the tensor `name` holds; itself, where a folder has it as it is."""
    for end, of in _RENAMED.get(family, {}).items():
        if name.endswith("." + end):
            return [(name.removesuffix(end) + of, ())]
    block, (gate, up, down) = _FAMILIES.get(family, ("mlp", _SEPARATE))
    *path, last = name.split(".")
    if family not in _TOGETHER and path[:-1] and path[-1] == "experts" and last in ("gate_up_proj", "down_proj"):
        shape = tuple(tensor.shape)
        if len(shape) != 3 or (last == "gate_up_proj" and shape[1] % 2):
            form = "[E,2F,H]" if last == "gate_up_proj" else "[E,H,F]"
            raise ValueError(f"tensor `{name}`: has shape {list(shape)}; experts of a layer together are {form}")
        path = ".".join([*_in_folder(path[:-1], block), "experts"])
        if last == "down_proj":
            return [(f"{path}.{e}.{down}.weight", (e,)) for e in range(shape[0])]
        width = shape[1] // 2
        halves = ((gate, slice(0, width)), (up, slice(width, None)))
        return [(f"{path}.{e}.{which}.weight", (e, half)) for e in range(shape[0]) for which, half in halves]
    if family == "nemotron_h" and name.startswith("model."):
        return [("backbone." + name.removeprefix("model."), ())]
    if family == "gpt_neox" and name == "lm_head.weight":
        return [("embed_out.weight", ())]
    return [(".".join([*_in_folder(path, block), last]), ())]


def _in_folder(path: list[str], block: str) -> list[str]:
    """The path of a module as folders have it: `model.layers.0.mlp.gate` is that of a router."""
    return [block if part == "mlp" else part for part in path]


def by_folder(tensors: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Tensors by the names of folders, views where several stand in one."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        for of, at in places(name, tensor, family):
            if of in found:
                raise ValueError(f"tensor `{of}`: stands there twice, the second time in `{name}`; leave one out")
            found[of] = tensor[at] if at else tensor
    return found
