"""Every op as an operator of torch, `torch.ops.samebits.NAME`, with shapes for tracing and with gradients.

    import samebits.torch
    y = samebits.torch.ops.rms_norm(x, w, eps=1e-5)

Parameters are those of `samebits.ops`, but for `into`. A tensor that lies in a way that the op does not take is copied.
A gradient is what the gradient ops of the schema make of it, each a sum over the tokens of the call: one backward call is
one whole logical batch. Gradients come in and go out in the dtype of the tensor that they are the gradient of, rounded
once. An operator without a gradient op, and a gradient of a gradient, raise NotImplementedError in the backward call.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator

import torch

from .. import _native

__all__ = [
    "AdamW", "CausalLM", "accumulate", "batch_invariant", "differentiable", "disable", "enable", "nll", "ops", "policy_loss",
    "sha256", "uncovered",
]

# Threads of torch wait by spinning, on cores that others would need.
_native.share_threads()

_library = torch.library.Library("samebits", "DEF")
ops = torch.ops.samebits

_SCHEMA: dict[str, dict[str, Any]] = {op["name"]: op for op in _native.schema()}
_KINDS = {"count": "SymInt", "float": "float", "flag": "bool", "choice": "str", "text": "str"}


def _signature(op: dict[str, Any]) -> str:
    """The operator's schema as torch reads it."""
    parts = [f"Tensor? {i['name']}=None" if i["optional"] else f"Tensor {i['name']}" for i in op["inputs"]]
    parts.append("*")
    for attribute in op["attributes"]:
        kind, default = _KINDS[attribute["kind"]], attribute["default"]
        mark = "?" if default is None else ""
        text = f'"{default}"' if isinstance(default, str) else repr(default)
        parts.append(f"{kind}{mark} {attribute['name']}={text}")
    parts.append("ScalarType? dtype=None")
    outputs = ", ".join("Tensor" for _ in op["outputs"])
    return f"{op['name']}({', '.join(parts)}) -> {outputs if len(op['outputs']) == 1 else f'({outputs})'}"


# --- shapes


def _forms(op: dict[str, Any], given: list[tuple[dict[str, Any], torch.Tensor]], attributes: dict[str, Any], dtype: Any):
    """Shape and dtype of the outputs. With extents that are numbers the call is checked as the op does it."""
    sizes = [size for _, tensor in given for size in tensor.shape]
    sizes += [value for value in attributes.values() if isinstance(value, torch.SymInt)]
    # Whether a product is a part of one, only numbers tell.
    part = any(o["partial"] for o in op["outputs"]) and any(
        a["kind"] == "count" and a["default"] is None and attributes.get(a["name"]) is not None for a in op["attributes"]
    )
    if part or not any(isinstance(size, torch.SymInt) for size in sizes):
        inputs = [(i["name"], _name(tensor.dtype), [int(size) for size in tensor.shape]) for i, tensor in given]
        numbers = {k: int(v) if isinstance(v, torch.SymInt) else v for k, v in attributes.items()}
        return _native.forms(op["name"], inputs, numbers, dtype)
    extents: dict[str, Any] = {}
    leading: dict[str, list[Any]] = {}
    rest: list[Any] = []
    for i, tensor in given:
        axes, shape = list(i["axes"]), list(tensor.shape)
        if axes and axes[-1] == "..":
            axes.pop()
            rest, shape = shape[len(axes) :], shape[: len(axes)]
        elif axes and len(shape) > len(axes):
            several = shape[: len(shape) - len(axes) + 1]
            leading.setdefault(axes[0], several)
            shape = [math.prod(several), *shape[len(several) :]]
        if len(shape) != len(axes):
            raise ValueError(f"{op['name']}: input `{i['name']}` must have the form [{','.join(i['axes'])}]")
        for axis, extent in zip(axes, shape):
            if axis.endswith("+1"):
                axis, extent = axis[:-2], extent - 1
            if axis.isdigit():
                torch._check(extent == int(axis))
            elif axis in extents:
                torch._check(extents[axis] == extent)
            else:
                extents[axis] = extent
    # Extents that follow from others and from attributes are written as Python has them.
    known = {a["name"]: attributes.get(a["name"], a["default"]) for a in op["attributes"]}
    for axis, formula in op["extents"]:
        extents.setdefault(axis, eval(formula, {"__builtins__": {}}, known | extents))
    floats = [tensor.dtype for _, tensor in given if tensor.dtype.is_floating_point]
    out = dtype or (floats[0] if floats else torch.float32)
    forms = []
    for output in op["outputs"]:
        shape = []
        for axis in output["axes"]:
            if axis == "..":
                shape += rest
            else:
                shape.append(int(axis) if axis.isdigit() else extents[axis])
        first = output["axes"][0] if output["axes"] else None
        if first in leading:
            shape[:1] = leading[first]
        forms.append((shape, output["dtype"] or _name(out)))
    return forms


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fake(op: dict[str, Any]) -> Callable[..., Any]:
    def fake(*args, dtype=None, **attributes):
        given = [(i, tensor) for i, tensor in zip(op["inputs"], args) if tensor is not None]
        forms = _forms(op, given, attributes, dtype)
        # Integers may stay on the host.
        beside = next((tensor for _, tensor in given if tensor.device.type != "cpu"), given[0][1])
        made = tuple(beside.new_empty(shape, dtype=getattr(torch, name)) for shape, name in forms)
        return made[0] if len(made) == 1 else made

    return fake


# --- gradients


class _Call:
    """A call that is gone back through: what it took and gave, and the gradients of what it gave."""

    def __init__(self, op, tensors, inputs, gradients, attributes, carried):
        self.op, self.tensors, self.inputs, self.gradients, self.attributes = op, tensors, inputs, gradients, attributes
        self.carried = carried

    @property
    def dtype(self) -> torch.dtype:
        """That of the float inputs."""
        return next(dtype for _, dtype in self.inputs.values() if dtype.is_floating_point)

    def own(self, name: str) -> dict[str, Any]:
        """The attributes that the op `name` has as well."""
        known = {attribute["name"] for attribute in _SCHEMA[name]["attributes"]}
        own = {key: value for key, value in self.attributes.items() if key in known}
        if name == "conv_dx":
            # Places of x behind those that the last window reaches, which a stride leaves open.
            x, w, y = self.inputs["x"][0], self.inputs["w"][0], self.gradients["y"].shape
            for at, (axis, before, behind) in enumerate(_AXES, start=-3):
                reached = (y[at] - 1) * own[f"stride_{axis}"] + own[f"dilation_{axis}"] * (w[at] - 1) + 1
                own[f"extra_{axis}"] = x[at] + own[before] + own[behind] - reached
        return own

    def mask(self) -> torch.Tensor | None:
        """Which rows are tokens, where the call has lengths of its sequences."""
        lengths = self.tensors.get("len")
        if lengths is None:
            return None
        name, axes = next((i["name"], i["axes"]) for i in self.op["inputs"] if i["axes"][1:2] == ["T"])
        rows = torch.arange(self.inputs[name][0][1 - len(axes)], device=lengths.device)
        return (rows < lengths.reshape(-1, 1)).to(torch.int32)

    def apply(self, name: str) -> dict[str, torch.Tensor]:
        """What the gradient op `name` makes, by the inputs that it is the gradient of."""
        args = []
        for i in _SCHEMA[name]["inputs"]:
            stem = i["name"]
            if stem in self.tensors:
                args.append(self.tensors[stem])
            elif stem == "mask":
                args.append(self.mask())
            elif stem[:1] == "d" and stem[1:] in self.gradients:
                dtype = torch.float32 if i["group"] is None else self.dtype
                args.append(self.gradients[stem[1:]].to(dtype))
            else:
                args.append(None)
        outputs = [o["name"] for o in _SCHEMA[name]["outputs"]]
        if any(i["name"] == "carry" for i in _SCHEMA[name]["inputs"]) and "dw" in outputs:
            found = self.sum("w", name, *args)
        else:
            made = getattr(ops, name)(*args, **self.own(name), dtype=self.dtype)
            made = made if isinstance(made, (tuple, list)) else (made,)
            found = {o[1:]: tensor for o, tensor in zip(outputs, made)}
        mask = self.mask()
        for of, rows in _BY_POSITION.get(name, {}).items():
            if of in self.inputs:
                shape = self.inputs[of][0]
                counted = found[rows].shape[: found[rows].dim() - len(shape)]
                # What an op has summed over the positions of a sequence has a row for each sequence, none of which is padding.
                flat = mask.flatten() if mask is not None and len(counted) == 2 else None
                sums = self.sum(of, "token_sum", found[rows].reshape(math.prod(counted), math.prod(shape)), flat)
                found |= {one: tensor.reshape(self.inputs[one][0]) for one, tensor in sums.items()}
        return {of: tensor for of, tensor in found.items() if of in self.inputs}

    def sum(self, of: str, name: str, *args: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """What op `name` makes: the gradient of input `of`, a sum over tokens, unless `accumulate` goes on with it; and those
        that it makes beside it."""
        attributes = self.own(name)
        if len(_SCHEMA[name]["outputs"]) > 1:
            attributes["dtype"] = self.dtype
        carry = next(i for i in _SCHEMA[name]["inputs"] if i["name"] == "carry")
        if not carry["optional"]:
            chains = [64] if carry["axes"][0] == "64" else []
            attributes["carry"] = args[0].new_zeros([*chains, *self.inputs[of][0]], dtype=torch.float32)
        begun = self.carried.get(of)
        if begun is not None:
            return begun.go_on(name, args, attributes)
        sums, others = _sum(name, args, attributes)
        return {of: _joined(name, sums), **others}


def _sum(
    name: str, args: tuple[torch.Tensor | None, ...], attributes: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum over tokens that op `name` makes, and what it makes beside it, by the inputs that it is the gradient of."""
    inputs, outputs = ([one["name"] for one in _SCHEMA[name][side]] for side in ("inputs", "outputs"))
    given = {i: tensor for i, tensor in zip(inputs, args) if tensor is not None}
    made = getattr(ops, name)(**given, **attributes)
    if len(outputs) == 1:
        return made, {}
    others = {o[1:]: tensor for o, tensor in zip(outputs, made)}
    return others.pop("w"), others


def _joined(name: str, sums: torch.Tensor) -> torch.Tensor:
    """The sum that the 64 chains of a vector make; that of a matrix is one already."""
    return ops.fold(sums.flatten(1)) if _SCHEMA[name]["outputs"][0]["axes"][0] == "64" else sums


def _bias(call: _Call) -> dict[str, torch.Tensor]:
    if "bias" not in call.inputs:
        return {}
    mask = call.mask()
    return call.sum("bias", "token_sum", call.gradients["y"], None if mask is None else mask.flatten())


def _norm_of_sum(call: _Call) -> dict[str, torch.Tensor]:
    return call.sum("w", "rms_norm_dw", call.tensors["sum"], call.gradients["y"].to(call.dtype))


def _sinks(call: _Call) -> dict[str, torch.Tensor]:
    """Of a sink, of a token: less its share of the softmax times what the output and its gradient have in common."""
    if "sinks" not in call.inputs:
        return {}
    out, sinks, lse = (call.tensors[name] for name in ("out", "sinks", "lse"))
    tokens, rows, width = math.prod(lse.shape[:-1]), lse.numel(), out.shape[-1]
    number = torch.arange(rows, dtype=torch.int32, device=out.device).reshape(rows, 1)
    dout = call.gradients["out"].to(out.dtype).reshape(rows, width)
    _, common = ops.combine_backward(out.reshape(rows, width), number, torch.ones_like(number, dtype=out.dtype), dout)
    logits, target = sinks.repeat(tokens).reshape(rows, 1), torch.full_like(number, -1).flatten()
    less, none = ops.scale(common, factor=-1.0).flatten(), torch.zeros_like(lse).flatten()
    dlogits = ops.logprob_backward(logits, target, lse.flatten(), none, less)
    return call.sum("sinks", "token_sum", dlogits.reshape(tokens, sinks.numel()))


def _factors(call: _Call) -> dict[str, torch.Tensor]:
    dy = call.gradients["y"]
    others = {"a": call.tensors["b"], "b": call.tensors["a"]}
    return {name: ops.mul(dy.to(other.dtype), other, dtype=dy.dtype) for name, other in others.items()}


# Beside what the schema's gradient ops give: the gradients of inputs, as functions of a call, and what they read.
_FURTHER: dict[str, tuple[tuple[str, ...], Callable[[_Call], dict[str, torch.Tensor]]]] = {
    "gemm": ((), _bias),
    "attention": (("out", "sinks", "lse"), _sinks),
    "causal_conv1d": ((), _bias),
    "layer_norm": ((), _bias),
    "add_rms_norm": (("sum",), _norm_of_sum),
    "add": ((), lambda call: {"a": call.gradients["y"], "b": call.gradients["y"]}),
    "mul": (("a", "b"), _factors),
    "scale": ((), lambda call: {"x": ops.scale(call.gradients["y"], **call.attributes)}),
    "combine": ((), lambda call: {"shared": call.gradients["y"]}),
}
# The axes of an image, and the zeros on both sides of each.
_AXES = (("d", "pad_front", "pad_back"), ("h", "pad_top", "pad_bottom"), ("w", "pad_left", "pad_right"))
# By gradient op: the inputs whose gradient is a sum over positions, sequences or images, and of which one that is.
_BY_POSITION = {
    "group_norm_backward": {"w": "w", "bias": "bias"},
    "conv_dw": {"bias": "bias"},
    "ssd_scan_backward": {"a_log": "a_log", "d": "d", "dt_bias": "dt"},
    "selective_scan_backward": {"a_log": "a_log", "d": "d", "dt_bias": "dt"},
    "gated_delta_rule_backward": {"a_log": "a_log", "dt_bias": "g"},
}
# What one output of a gradient op is the gradient of, where the names do not say it.
_ALSO = {("add_rms_norm", "x"): ("residual",)}

_GRADIENT_OPS: dict[str, list[str]] = {name: [] for name in _SCHEMA}
for _op in _SCHEMA.values():
    if _op["gradient_of"]:
        _GRADIENT_OPS[_op["gradient_of"]].append(_op["name"])


def differentiable() -> list[str]:
    """The operators that have gradients."""
    return [name for name in _SCHEMA if _GRADIENT_OPS[name] or name in _FURTHER]


# --- sums over the tokens of several backward calls


class _Sum:
    """The sum over tokens for a parameter, from one backward call to the next."""

    def __init__(self, parameter: str) -> None:
        self.parameter = parameter
        self.name, self.sums, self.tokens, self.open = "", None, 0, 0

    def follow(self) -> None:
        """A call is gone back through."""
        if _active is None or not self.open:
            raise RuntimeError(f"accumulate: `{self.parameter}` is gone back through outside of its block, or twice")
        self.open -= 1

    def go_on(
        self, name: str, args: tuple[torch.Tensor | None, ...], attributes: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Goes on with the tokens of a call; what the op makes beside the sum."""
        self.follow()
        axes = _SCHEMA[name]["inputs"][0]["axes"]
        if any(attribute["name"] == "token_offset" for attribute in _SCHEMA[name]["attributes"]):
            attributes["token_offset"] = self.tokens
        if self.sums is not None:
            attributes["carry"] = self.sums
        self.name, (self.sums, others) = name, _sum(name, args, attributes)
        inputs = [i["name"] for i in _SCHEMA[name]["inputs"]]
        at = inputs.index("mask")
        if at < len(args) and args[at] is not None:
            self.tokens += int((args[at] != 0).sum())
        else:
            token = len(axes) - len(_SCHEMA[name]["inputs"][at]["axes"])
            self.tokens += math.prod(args[0].shape[: args[0].dim() - token])
        return others

    def stack(self, shape: torch.Size) -> torch.Tensor:
        """The sums of gemm_dw for a stack of matrices `[E,K,N]`, to go on with in place."""
        self.follow()
        if self.sums is None:
            self.name, self.sums = "gemm_dw", torch.zeros(shape[0], shape[2], shape[1], dtype=torch.float32).transpose(1, 2)
        return self.sums


class accumulate:
    """Around all micro-batches of a step, forwards and backwards: `.grad` of every parameter of `model` has, when the block
    ends, the bits that one batch of all of them has within such a block.

        with samebits.torch.accumulate(model):
            for part in parts:
                loss(model(part)).backward()
        optimizer.step()

    Parts are in the order of the batch, each whole sequences. The sums over tokens are carried in f32 from one backward call
    to the next and rounded to the dtype of the parameter once, at the end. What cannot be carried is refused by name, in
    the backward call: a parameter that reaches another operator than those of samebits, or through one (a cast, a
    transpose), outside of `batch_invariant`; one that an operator reads twice before it is gone back through; one that has a
    gradient already.

    With `groups`, a power of two, the sequences of the step are dealt to that many, each with sums of its own, which are
    joined as a tree at the end: the block gives this rank's groups, one after the other.

        with samebits.torch.accumulate(model, groups=8, ranks=data_parallel) as step:
            for group in step:
                for part in parts_of(step.sequences(group, count)):
                    loss(model(part)).backward()

    `ranks` is the process group of data parallelism, whose size divides `groups`: a rank has as many groups as the others,
    and f32 sums are exchanged. Only `groups` is seen in the bits, never who has which.
    """

    def __init__(self, model: torch.nn.Module, groups: int = 1, ranks: Any = None) -> None:
        self._ranks, count, rank = ranks, 1, 0
        if ranks is not None:
            count, rank = torch.distributed.get_world_size(ranks), torch.distributed.get_rank(ranks)
        if groups < 1 or groups & (groups - 1) or groups > 65536:
            raise ValueError(f"accumulate: {groups} groups; use a power of two up to 65536")
        if groups % count:
            raise ValueError(f"accumulate: {groups} groups over {count} ranks; use a power of two that {count} divides")
        share = groups // count
        self._groups, self._left = groups, list(range(rank * share, (rank + 1) * share))
        # Sums of groups that are over, each of twice as many groups as the next.
        self._over: list[tuple[int, _Totals]] = []
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in self._named.items()}
        # What is made of parameters alone, by how: as it was made, the leaf that stands for it, and what it was made of.
        self._derived: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = {}
        self._sums: dict[tuple[str, str], _Sum] = {}
        self._hooks: list[Any] = []
        # Sequences of the micro-batch, as far as look-ups, products, norms and attention tell.
        self.seen = 1
        # They sum themselves.
        if groups > 1 and any(isinstance(module, CausalLM) for module in model.modules()):
            raise ValueError(f"accumulate: a CausalLM in {groups} groups; use its own accumulate")
        self._models = [module.accumulate() for module in model.modules() if isinstance(module, CausalLM)]

    def knows(self, tensor: Any) -> bool:
        """Whether it is a parameter, or made of parameters alone."""
        return id(tensor) in self._names

    def derive(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls a function of torch. Where parameters are all that it takes, what it gives is followed: its sums are carried, and
        go back through the function once, when the block ends.
        """
        values = [*args, *kwargs.values()]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        made = func(*args, **kwargs)
        if not tensors or not isinstance(made, torch.Tensor) or not made.requires_grad or not torch.is_grad_enabled():
            return made
        if not all(map(self.knows, tensors)) or any(made is tensor for tensor in tensors):
            return made
        words = [self._names[id(value)] if isinstance(value, torch.Tensor) else repr(value) for value in values]
        name = f"{', '.join(words)} through {func!r}"
        if name in self._derived:
            self._names.pop(id(self._derived[name][1]), None)
        leaf = made.detach().requires_grad_()
        self._hooks.append(leaf.register_hook(_refusal(self._names[id(tensors[0])].split(" through ")[0])))
        self._derived[name] = made, leaf, {self._names[id(tensor)]: tensor for tensor in tensors}
        self._names[id(leaf)] = name
        return leaf

    def begin(self, name: str, given: dict[str, Any]) -> dict[str, _Sum]:
        """The sums that this call of operator `name` goes on with, by its inputs."""
        carried: dict[str, _Sum] = {}
        for i, tensor in given.items():
            parameter = self._names.get(id(tensor))
            if parameter is None:
                continue
            one = self._sums.setdefault((parameter, name), _Sum(parameter))
            if name == "embedding" and one.sums is None:
                one.sums = tensor.new_zeros(tensor.shape, dtype=torch.float32)
            if torch._C._current_graph_task_id() != -1:
                # A forward that is run again inside a backward call: the first one is counted.
                if one.open == 0:
                    raise RuntimeError(f"accumulate: `{parameter}` is recomputed in a way that cannot be followed; use_reentrant=False")
            else:
                one.open += 1
                if one.open > 1:
                    raise RuntimeError(
                        f"accumulate: `{parameter}` is read by {name} twice before a backward call; its sum cannot be carried"
                    )
            carried[i] = one
        return carried

    def look_up(self, tokens: torch.Tensor) -> None:
        """Tokens of a parameter are looked up, before the operator does it."""
        if not any(one.open for one in self._sums.values()):
            self.seen = 1
        self.saw(tokens.shape[0] if tokens.dim() > 1 else 1)

    def saw(self, sequences: int) -> None:
        """An operator has read so many sequences of the micro-batch."""
        self.seen = max(self.seen, sequences)

    def share(self, table: torch.Tensor, looked: torch.Tensor) -> None:
        """Refuses the gradient of what was looked up for one sequence where there are several."""
        name = self._names[id(table)]

        def refuse(gradient: Any) -> None:
            if self.seen > 1:
                raise RuntimeError(
                    f"accumulate: `{name}` is looked up once for several sequences; its sum cannot be carried; look up the positions of each"
                )

        looked.register_hook(refuse)

    def sum_of(self, parameter: torch.Tensor, name: str) -> _Sum:
        """The sum for what operator `name` has just read."""
        return self._sums[self._names[id(parameter)], name]

    def __enter__(self) -> accumulate:
        global _active
        if _active is not None:
            raise RuntimeError("accumulate: a block is open already")
        for name, parameter in self._named.items():
            if parameter.grad is not None:
                raise RuntimeError(f"accumulate: `{name}` has a gradient already; clear it first")
        for name, parameter in self._named.items():
            self._hooks.append(parameter.register_hook(_refusal(name)))
        for model in self._models:
            model.__enter__()
        _active = self
        return self

    def __iter__(self) -> Iterator[int]:
        """This rank's groups, ascending: what is gone back through until the next one belongs to it."""
        while self._left:
            yield self._left[0]
            self._end_group()

    def sequences(self, group: int, count: int) -> range:
        """Which of the step's `count` sequences belong to a group."""
        return range(*_native.sequences_of_group(count, self._groups, group))

    def _end_group(self) -> None:
        del self._left[0]
        sums, self._sums = self._sums, {}
        for one in sums.values():
            # What is gone back through from now on is in no group.
            one.open = 0
        size, totals = 1, {key: _joined(one.name, one.sums) for key, one in sums.items() if one.name}
        while self._over and self._over[-1][0] == size:
            totals, size = _together(self._over.pop()[1], totals), 2 * size
        self._over.append((size, totals))

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        global _active
        _active = None
        for model in self._models:
            model.__exit__(kind, value, trace)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if kind is not None:
            self._sums = {}
            return
        if len(self._left) > 1 or self._left and self._groups > 1:
            raise RuntimeError(f"accumulate: the groups {self._left} were not gone through; iterate over the block")
        if self._left:
            self._end_group()
        totals = self._over.pop()[1]
        if self._ranks is not None:
            totals = _over_ranks(totals, self._ranks)
        # Of a table that is a matrix as well: the product's sum, then that of its look-ups.
        order = sorted(totals, key=lambda key: (key[1] == "embedding", list(_SCHEMA).index(key[1])))
        whole: dict[str, torch.Tensor] = {}
        for key in order:
            whole[key[0]] = whole[key[0]] + totals[key] if key[0] in whole else totals[key]
        for name, (made, _, sources) in reversed(self._derived.items()):
            if name in whole:
                gradient = whole.pop(name).to(made.dtype).reshape(made.shape)
                for of, part in zip(sources, torch.autograd.grad(made, list(sources.values()), gradient)):
                    whole[of] = whole[of] + part.float() if of in whole else part.float()
        for name, gradient in whole.items():
            parameter = self._named[name]
            parameter.grad = gradient.to(parameter.dtype).reshape(parameter.shape)


# Of a parameter and the operator that reads it: the f32 sum.
_Totals = dict[tuple[str, str], torch.Tensor]


def _together(a: _Totals, b: _Totals) -> _Totals:
    """The sums of two neighbours in the tree; what one of them did not reach is +0 there."""
    zero = lambda key: torch.zeros_like(a[key] if key in a else b[key])
    pair = lambda key: (a[key] if key in a else zero(key), b[key] if key in b else zero(key))
    return {key: ops.add(*pair(key)) for key in {**a, **b}}


def _over_ranks(totals: _Totals, ranks: Any) -> _Totals:
    """The sums of all ranks: each is reached by some."""
    from .parallel import join

    reached: list[Any] = [None] * torch.distributed.get_world_size(ranks)
    mine = {key: (tuple(sums.shape), str(sums.device.type)) for key, sums in totals.items()}
    torch.distributed.all_gather_object(reached, mine, group=ranks)
    everywhere = {key: form for of in reached for key, form in of.items()}
    part = lambda key: totals[key] if key in totals else torch.zeros(everywhere[key][0], device=everywhere[key][1])
    return {key: join(part(key), ranks) for key in sorted(everywhere)}


_active: accumulate | None = None


def _refusal(name: str) -> Callable[[Any], None]:
    def refuse(gradient: Any) -> None:
        if gradient is not None:
            raise RuntimeError(f"accumulate: `{name}` is read by another operator, or through one; its sum cannot be carried")

    return refuse


def _record(op: dict[str, Any], setup: Callable[..., None], back: Callable[..., tuple]) -> None:
    """Gives an operator its gradient: as torch.library.register_autograd does, in a third of its time. `setup(ctx, inputs, attributes,
    outputs)` has all inputs of the schema in its order, and the attributes that were given; `back(ctx, *gradients)` gives the
    gradient of each input.
    """
    overload, count, kernel = getattr(ops, op["name"]).default, len(op["inputs"]), _kernels[op["name"]]
    below, after = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset

    def run(keyset, inputs, attributes):
        rest = keyset & after
        # Where nothing else wants to see the call.
        if rest == _plain:
            return kernel(*inputs, **attributes)
        with below():
            return overload.redispatch(rest, *inputs, **attributes)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keyset, attributes, *inputs):
            made = run(keyset, inputs, attributes)
            # What is left out at the end has its default.
            setup(ctx, inputs + (None,) * (count - len(inputs)), attributes, made)
            return made

        @staticmethod
        def backward(ctx, *gradients):
            return None, None, *back(ctx, *gradients)[: len(ctx.needs_input_grad) - 2]

    # Without what functions of functions (torch.func) need.
    apply = super(torch.autograd.Function, Recorded).apply

    def impl(keyset, *inputs, **attributes):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            record = Recorded.apply if torch._C._are_functorch_transforms_active() else apply
            return record(keyset, attributes, *inputs)
        return run(keyset, inputs, attributes)

    _library.impl(op["name"], impl, "Autograd", with_keyset=True)


def _register_gradients(op: dict[str, Any]) -> None:
    name = op["name"]
    inputs, outputs = [i["name"] for i in op["inputs"]], [o["name"] for o in op["outputs"]]
    # What gradient ops read of the call, and which gradients they take.
    saved = {i["name"] for g in _GRADIENT_OPS[name] for i in _SCHEMA[g]["inputs"]}
    saved |= set(_FURTHER[name][0]) if name in _FURTHER else set()
    taken = {o for o in outputs if f"d{o}" in saved} if _GRADIENT_OPS[name] else set(outputs)
    keep = [*(i for i in inputs if i in saved), *(o for o in outputs if o in saved)]
    kept_inputs = [at for at, i in enumerate(inputs) if i in saved]
    kept_outputs = [at for at, o in enumerate(outputs) if o in saved]
    others = [at for at, i in enumerate(inputs) if i not in saved]
    defaults = {attribute["name"]: attribute["default"] for attribute in op["attributes"]}
    constant = [at for at, o in enumerate(outputs) if o not in taken]

    def setup(ctx, given: tuple, attributes: dict[str, Any], output: Any) -> None:
        made = output if isinstance(output, (tuple, list)) else (output,)
        ctx.save_for_backward(*[given[at] for at in kept_inputs], *[made[at] for at in kept_outputs])
        ctx.forms = [(given[at].shape, given[at].dtype) if given[at] is not None else None for at in others]
        ctx.attributes = attributes
        ctx.carried = _active.begin(name, dict(zip(inputs, given))) if _active else {}
        if constant:
            ctx.mark_non_differentiable(*[made[at] for at in constant])

    def back(ctx, *gradients):
        tensors = dict(zip(keep, ctx.saved_tensors))
        forms = {i: (tensor.shape, tensor.dtype) for i, tensor in tensors.items() if i in inputs and tensor is not None}
        forms |= {inputs[at]: form for at, form in zip(others, ctx.forms) if form is not None}
        forms = {i: forms[i] for i in inputs if i in forms}
        gradients = {o: gradient for o, gradient in zip(outputs, gradients) if o in taken}
        attributes = {key: value for key, value in {**defaults, **ctx.attributes}.items() if key != "dtype"}
        call = _Call(op, tensors, forms, gradients, attributes, ctx.carried)
        wanted = dict(zip(inputs, ctx.needs_input_grad[2:]))
        needed = {i for i, (_, dtype) in forms.items() if wanted[i] and dtype.is_floating_point}
        found: dict[str, torch.Tensor] = {}
        for g in _GRADIENT_OPS[name]:
            of = {i for o in _SCHEMA[g]["outputs"] if (i := o["name"][1:]) in inputs}
            of |= {also for i in of for also in _ALSO.get((name, i), ())}
            if of & needed:
                for i, gradient in call.apply(g).items():
                    for also in (i, *_ALSO.get((name, i), ())):
                        found[also] = gradient
        if name in _FURTHER and needed - found.keys():
            found |= {i: gradient for i, gradient in _FURTHER[name][1](call).items() if i not in found and i in needed}
        results = []
        for i in inputs:
            if i not in needed or i not in found:
                results.append(None)
                continue
            shape, dtype = forms[i]
            results.append(found[i].to(dtype).reshape(shape))
        return tuple(results)

    _record(op, setup, back)


def _refuse_gradients(op: dict[str, Any]) -> None:
    name = op["name"]

    def back(ctx, *gradients):
        raise NotImplementedError(f"{name}: it has no gradient op; detach its inputs, or use its outputs without gradients")

    _record(op, lambda ctx, inputs, attributes, outputs: None, back)


_kernels = _native.kernels()
# What is left below autograd of the keys of tensors in the memory of the host, and of nobody's class or mode.
_plain = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
for _op in _SCHEMA.values():
    _library.define(_signature(_op), tags=(torch.Tag.pt2_compliant_tag,))
    for _device in ("CPU", "CUDA"):
        _library.impl(_op["name"], _kernels[_op["name"]], _device)
    torch.library.register_fake(f"samebits::{_op['name']}", _fake(_op), lib=_library)
for _op in _SCHEMA.values():
    (_register_gradients if _op["name"] in differentiable() else _refuse_gradients)(_op)

from .causal_lm import AdamW, CausalLM, nll, policy_loss, sha256  # noqa: E402
from .invariant import batch_invariant, disable, enable, uncovered  # noqa: E402
