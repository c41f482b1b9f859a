"""Assertions about bits, for tests.

    samebits.testing.assert_same_bits(a, b)
    samebits.testing.assert_on_policy(rollout_logprobs, recomputed, first_train_forward, mask)

Tensors are those of torch, of numpy, or of any library that `numpy.asarray` reads. Equal means the same bits: -0 is not
+0, and a NaN equals a NaN of the same payload alone.
"""

from __future__ import annotations

from typing import Any

import numpy

__all__ = ["assert_on_policy", "assert_same_bits"]

_BITS = {1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32, 8: numpy.uint64}


def _is_torch(tensor: Any) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torch" or hasattr(tensor, "untyped_storage")


def _as_integers(tensor: Any) -> Any:
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _bits(what: str, tensor: Any) -> tuple[numpy.ndarray, str, Any]:
    """The bits of a tensor, its dtype, and what tells the value of an element."""
    if _is_torch(tensor):
        held = tensor.detach().cpu().contiguous()
        if not held.dtype.is_complex and held.element_size() in _BITS:
            bits = _as_integers(held).numpy().view(_BITS[held.element_size()])
            return bits, str(held.dtype).removeprefix("torch."), lambda i: held[i].item()
        raise TypeError(f"{what}: elements of {held.dtype} are not compared; give real ones of 1, 2, 4 or 8 bytes")
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
        raise TypeError(f"{what}: it is a {type(tensor).__name__}; give a tensor of torch or numpy")
    held = numpy.asarray(tensor)
    if held.dtype.kind in "cOSUMm" or held.dtype.itemsize not in _BITS:
        raise TypeError(f"{what}: elements of {held.dtype} are not compared; give real ones of 1, 2, 4 or 8 bytes")
    # `ascontiguousarray` makes an axis where there is none.
    bits = numpy.ascontiguousarray(held).view(_BITS[held.dtype.itemsize]).reshape(held.shape)
    return bits, str(held.dtype), lambda i: held[i].item()


def _differences(a: Any, b: Any, names: tuple[str, str], active: numpy.ndarray | None = None) -> str | None:
    """In one line how two tensors differ in their bits where they are active; None where they do not."""
    (ours, dtype, value), (theirs, other, of_theirs) = _bits(names[0], a), _bits(names[1], b)
    if dtype != other:
        return f"{names[0]} is {dtype}, {names[1]} is {other}"
    if ours.shape != theirs.shape:
        return f"{names[0]} has shape {list(ours.shape)}, {names[1]} has {list(theirs.shape)}"
    if ours.size == 0:
        return f"{names[0]} and {names[1]} have no elements; nothing would be compared"
    apart = ours != theirs
    total = apart.size
    if active is not None:
        apart, total = apart & active, int(active.sum())
    count = int(apart.sum())
    if count == 0:
        return None
    index = tuple(int(i) for i in numpy.argwhere(apart)[0])
    digits = 2 * ours.dtype.itemsize
    one, two = (f"0x{int(bits[index]):0{digits}x} ({of(index)})" for bits, of in ((ours, value), (theirs, of_theirs)))
    return (
        f"{count} of {total} elements differ in {dtype}, first at {list(index)}: "
        f"{one} in {names[0]}, {two} in {names[1]}"
    )


def assert_same_bits(a: Any, b: Any, what: str = "") -> None:
    """Asserts that two tensors have the same dtype, shape and bits, and elements at all.

    The message names how many elements differ, the index of the first, and both bit patterns. `what` stands before it.
    Raises TypeError for what is no tensor of real elements.
    """
    found = _differences(a, b, ("the first", "the second"))
    if found is not None:
        raise AssertionError(f"{what}: {found}" if what else found)


def _memory(tensor: Any) -> numpy.ndarray | None:
    """Where the elements of a tensor lie; None where that is not the memory of the host."""
    if not _is_torch(tensor):
        return numpy.asarray(tensor)
    return _as_integers(tensor.detach()).numpy() if tensor.device.type == "cpu" else None


def _overlap(a: Any, b: Any) -> bool:
    """Whether two tensors share memory."""
    places = _memory(a), _memory(b)
    if all(place is not None for place in places):
        return a is b or numpy.shares_memory(*places)
    if any(place is not None for place in places) or a.device != b.device:
        return False
    # Of a device: from the first to the last element.
    last = lambda t: t.data_ptr() + t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())))
    return a is b or (a.data_ptr() < last(b) and b.data_ptr() < last(a))


def _made_from(tensor: Any, source: Any) -> bool:
    """Whether the autograd graph of `tensor` goes through what `source` came from."""
    wanted, start = getattr(source, "grad_fn", None), getattr(tensor, "grad_fn", None)
    seen, left = set(), [start] if wanted is not None and start is not None else []
    while left:
        node = left.pop()
        if node is wanted:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            left.extend(following for following, _ in node.next_functions)
    return False


def assert_on_policy(rollout_logprobs: Any, recomputed: Any, first_train_forward: Any, mask: Any = None) -> int:
    """Asserts that a step is on policy to the bit; how many tokens were compared.

    `rollout_logprobs` are those that the engine recorded when it sampled, `recomputed` those that the trainer made of the
    same tokens before the step, `first_train_forward` those of its first forward with gradients: three tensors of one
    float dtype and shape. Tokens count where `mask`, of the same shape, is not 0; all without it. At least one must count,
    all that count must be finite, and their bits equal in all three.

    Raises ValueError where equality would show nothing: one tensor or its memory is given twice, one is made from another
    in autograd, all values are 0 (a placeholder), or one is greater than 0 (a ratio, or none of a probability). A copy that
    was made before is not seen: give what the three forwards returned.
    """
    named = {
        "rollout_logprobs": rollout_logprobs,
        "recomputed": recomputed,
        "first_train_forward": first_train_forward,
    }
    held = {name: _bits(name, tensor) for name, tensor in named.items()}
    pairs = [("rollout_logprobs", "recomputed"), ("rollout_logprobs", "first_train_forward"), ("recomputed", "first_train_forward")]
    for a, b in pairs:
        if _overlap(named[a], named[b]):
            raise ValueError(f"{a} and {b} are one tensor; their ratio is 1 whatever the forwards did")
        if _made_from(named[a], named[b]) or _made_from(named[b], named[a]):
            raise ValueError(f"{a} and {b} come from one forward; their ratio is 1 whatever the other did")
    for name, (_, dtype, _) in held.items():
        if "float" not in dtype:
            raise TypeError(f"{name}: its dtype is {dtype}; log-probabilities are floats")
    shape = held["rollout_logprobs"][0].shape
    active = numpy.ones(shape, bool)
    if mask is not None:
        active = _bits("mask", mask)[0] != 0
        if active.shape != shape:
            raise ValueError(f"mask has shape {list(active.shape)}, rollout_logprobs has {list(shape)}")
    if not active.any():
        raise AssertionError("no token is active; nothing would be compared")
    problems = [found for a, b in pairs if (found := _differences(named[a], named[b], (a, b), active))]
    if problems:
        raise AssertionError("; ".join(problems))
    # Their bits are equal: what holds of one holds of all.
    values = _values(recomputed)[active]
    if not numpy.isfinite(values).all():
        index = [int(i) for i in numpy.argwhere(active)[numpy.flatnonzero(~numpy.isfinite(values))[0]]]
        raise AssertionError(f"{int((~numpy.isfinite(values)).sum())} of {values.size} active log-probabilities are not finite, first at {index}")
    if (values > 0).any():
        raise ValueError(f"{float(values.max())} is no log-probability; ratios are not asked for")
    if not values.any():
        raise ValueError("all active log-probabilities are 0; they were not recorded")
    return int(active.sum())


def _values(tensor: Any) -> numpy.ndarray:
    return tensor.detach().cpu().double().numpy() if _is_torch(tensor) else numpy.asarray(tensor).astype(numpy.float64)
