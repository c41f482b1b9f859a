"""The lists of batch_invariant are held by every operator that torch has samples for: what comes to the block is covered,
counted, or shows here that it rounds nothing that an order could be seen in.
"""

import collections
import itertools
import os
import sys
import types
import unittest
import warnings

import pytest
import samebits.torch
import torch
from samebits.torch import covered, invariant
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

# Torch's samples import it and ask for nothing but this.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
op_db = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db

# By one process: what they look at takes half a minute to gather.
pytestmark = pytest.mark.xdist_group("operators")

NIGHTLY = "SAMEBITS_NIGHTLY" in os.environ
# Samples of an entry of torch's table, and calls of an operator that are looked at.
SAMPLES, CALLS = (1000, 64) if NIGHTLY else (3, 4)
# What is in new memory is nobody's.
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize", "resize_as"}

# Elements of a place alone, computed from numbers that all share, in more than one step: no sum, and nothing to lay out.
OF_NUMBERS = {"linspace", "nll_loss_backward", "nll_loss2d_backward"}

Call = collections.namedtuple("Call", "func args kwargs size")


def floats_of(tree):
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor) and t.is_floating_point()]


def copied(tree):
    return tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, tree)


class Seen:
    """What came to the lower mode: calls that it left to torch, and the kinds of all."""

    def __init__(self):
        self.calls, self.kinds = collections.defaultdict(list), {}

    def watch(self, monkeypatch):
        for name in ("_moves", "_function", "_covered"):
            monkeypatch.setattr(invariant, name, self.watched(name, getattr(invariant, name)))
        monkeypatch.setattr(invariant, "_kinds", {})
        return self

    def watched(self, name, kind):
        def call(mode, func, args, kwargs):
            told = isinstance(func, torch._ops.OpOverload) and not func.is_view and func.namespace == "aten"
            if told and floats_of((args, kwargs)):
                # The largest ones: a sum of two shows no order.
                size = sum(t.numel() for t in floats_of((args, kwargs)) if t.dtype == torch.float32)
                calls = self.calls[func]
                if calls and size == 0:
                    return kind(mode, func, args, kwargs)
                least = min(range(len(calls)), key=lambda at: calls[at].size) if len(calls) == CALLS else None
                if least is None or calls[least].size < size:
                    calls[least or 0 : 0 if least is None else least + 1] = [Call(func, copied(args), copied(kwargs), size)]
                self.kinds.setdefault(func, name)
            return kind(mode, func, args, kwargs)

        return call


# --- evidence


def wide(tree):
    def widen(value):
        if isinstance(value, torch.Tensor):
            return value.double() if value.dtype == torch.float32 else value.clone()
        return torch.float64 if value is torch.float32 else value

    return tree_map(widen, tree)


def rounded(call):
    """Whether each output is the rounded result of the definition: there is one such result, whatever the order."""
    found, truth = call.func(*copied(call.args), **copied(call.kwargs)), call.func(*wide(call.args), **wide(call.kwargs))
    pairs = list(zip(tree_flatten(found)[0], tree_flatten(truth)[0]))
    return all(
        torch.equal(a.nan_to_num(), b.to(a.dtype).nan_to_num()) and torch.equal(a.isnan(), b.isnan()) if isinstance(a, torch.Tensor) else a == b
        for a, b in pairs
    )


def by_itself(call):
    """Whether each element is made of those in its place alone, and with the same bits in any other place."""
    leaves, form = tree_flatten((call.args, dict(call.kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    tensors = tensors or [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    except RuntimeError:
        return False
    count = shape.numel()
    if count == 0:
        return False
    # Numbers beside a tensor stay what they are.
    least = min(t.dim() for t in tensors)
    # So long that there is every place of a vector, for two threads.
    times = -(-70001 // count)
    place = torch.arange(count).repeat(times)[:70001]
    turned = place.roll(7)

    def laid(order):
        lay = lambda t: t.expand(shape).reshape(-1)[order] if isinstance(t, torch.Tensor) and t.dim() >= least else t
        args, kwargs = tree_unflatten([lay(leaf) for leaf in leaves], form)
        with samebits.torch.batch_invariant(strict=True):
            return tree_flatten(call.func(*args, **kwargs))[0]

    try:
        one, other = laid(place), laid(turned)
    except (RuntimeError, IndexError, ValueError):
        return False
    raw = lambda t: t.contiguous().view(torch.int32) if t.is_floating_point() or t.is_complex() else t
    # log_sigmoid_forward has a buffer beside its output.
    pairs = [(a, b) for a, b in zip(one, other) if a.numel() > 0]
    return bool(pairs) and all(a.shape == place.shape and torch.equal(raw(a.roll(7)), raw(b)) for a, b in pairs)


def order_is_seen(calls):
    """None where the calls of an operator show that no order can be seen in them; else why not."""
    name = calls[0].func.overloadpacket.__name__.rstrip("_")
    if name in UNWRITTEN | OF_NUMBERS:
        return None
    judged = [call for call in calls if all(t.dtype in (torch.float32, torch.float64) for t in floats_of((call.args, call.kwargs)))]
    judged = [call for call in judged if any(t.dtype == torch.float32 for t in floats_of((call.args, call.kwargs)))]
    if not judged:
        return "no call with float32"
    for call in judged:
        if not rounded(call) and not by_itself(call):
            return f"neither rounded once nor element by element: {[tuple(t.shape) if isinstance(t, torch.Tensor) else t for t in tree_flatten((call.args, call.kwargs))[0]]}"
    return None


# --- samples


def entries():
    for entry in op_db:
        for dtype in (torch.float32, torch.bfloat16) if NIGHTLY else (torch.float32,):
            if dtype in entry.supported_dtypes("cpu") and not entry.name.startswith("jiterator"):
                yield entry, dtype


def run(entry, sample):
    y = entry(sample.input, *sample.args, **sample.kwargs)
    made = [t for t in tree_flatten(y)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    if made:
        torch.autograd.backward(made, [torch.ones_like(t) for t in made])


def gone_through():
    """Runs samples of all entries, forward and backward, in the block; what went wrong there alone."""
    wrong = []
    for entry, dtype in entries():
        gradients = entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")
        torch.manual_seed(1)
        samples = list(itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=gradients), SAMPLES))
        for sample in samples:
            try:
                with samebits.torch.batch_invariant():
                    run(entry, sample)
            except Exception as error:
                try:
                    run(entry, sample)
                except Exception:
                    continue
                wrong.append(f"{entry.name} in {dtype}: {error}")
    return wrong


@pytest.fixture(scope="module")
def seen():
    seen = Seen()
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen.watch(patch)
        torch.set_num_threads(1)
        seen.wrong = gone_through()
        torch.set_num_threads(before)
    return seen


def test_what_torch_computes_the_block_computes(seen):
    assert len(list(entries())) > 550 and seen.wrong == []


def by_name(seen, kinds):
    """Calls by the operator's name, that in place among the others."""
    calls = collections.defaultdict(list)
    for func, some in seen.calls.items():
        if some and seen.kinds[func] in kinds:
            calls[f"{func.overloadpacket.__name__.rstrip('_')}.{func._overloadname}"] += some
    return calls


def test_what_is_left_to_torch_shows_no_order(seen):
    left = by_name(seen, ("_moves", "_function"))
    assert len(left) > 200
    assert {name: why for name, calls in left.items() if (why := order_is_seen(calls))} == {}


# What is covered and shows its sums in samples as small as these; others add one or two terms, or in fp64.
SHOWN = """
_log_softmax _log_softmax_backward_data _safe_softmax _softmax _softmax_backward_data addmm baddbmm bmm convolution
convolution_backward dot linalg_vector_norm mean mm mv vdot
"""


def test_sums_show_their_order(seen):
    """The evidence is none if it takes a sum for something else."""
    shown = {name.split(".")[0] for name, calls in by_name(seen, ("_covered",)).items() if order_is_seen(calls)}
    assert set(SHOWN.split()) - shown == set()
