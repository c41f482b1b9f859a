import functools
import math
import sys
import zlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from samebits import _native

sys.path.insert(0, str(Path(__file__).parent))

SCHEMA = {op["name"]: op for op in _native.schema()}


def bits(tensor):
    """The raw bits, so that NaNs are equal and zeros of two signs are not."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def floats(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(getattr(torch, dtype))


def sampled(name, seed):
    """A random call of an op: tensors by name, attributes, and the dtype of outputs."""
    # Other calls for every op.
    inputs, attributes, dtype = _native.sample(name, zlib.crc32(name.encode()) + seed)
    tensors = {}
    for at, (tensor, kind, shape, integers) in enumerate(inputs):
        if integers is None:
            tensors[tensor] = floats(shape, kind, 1000 * seed + at)
        else:
            tensors[tensor] = torch.tensor(integers, dtype=torch.int32).reshape(shape)
    return tensors, attributes, getattr(torch, dtype)


def tupled(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


# --- tolerances, which live in contract/

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@functools.cache
def thresholds(file):
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    return tomllib.loads((Path(__file__).parents[2] / "contract" / file).read_text(encoding="utf-8"))["threshold"]


def published(dtype, kind, direction="forward"):
    """The published bound of a class of ops."""
    (row,) = [
        row
        for row in thresholds("ws1.toml")
        if row["rows"] == "published" and kind in row["classes"] and NAMES[dtype] in row["dtypes"] and "accuracy" in row["judgments"]
        and direction in row.get("directions", ["forward", "gradient"])
    ]  # fmt: skip
    return row


def assert_accurate(found, truth, kind, direction="forward"):
    """That `found` lies within the published bound of a class of ops around `truth`, in f64."""
    row = published(found.dtype, kind, direction)
    error, bound = (found.double() - truth.double()).abs(), row["atol"] + row["rtol"] * truth.double().abs()
    assert found.shape == truth.shape and bool((error <= bound).all()), f"{error.max()} is too far, of {truth.abs().max()}"


def by_size(gradients, truth):
    """Gradients by name as one vector, each parameter's by its size: a wrong one is off by that."""
    return torch.cat([(gradients[name].double() / truth[name].norm()).flatten() for name in truth])


def assert_beside_torch(cases, of, dtype):
    """That the error of ours is no larger than torch's, over `cases` of (ours, torch's, truth): as root mean squares, by as much as
    the contract says; where it leaves something to chance, by so many standard errors of what the cases show.
    """
    (row,) = [row for row in thresholds("beside_torch.toml") if row["of"] == of and row["dtype"] == NAMES[dtype]]
    error = lambda made, truth: (made.double() - truth).square().mean().log() / 2
    worse = torch.stack([error(ours, truth) - error(theirs, truth) for ours, theirs, truth in cases])
    assert len(worse) >= row.get("cases", 1), f"{len(worse)} cases; the contract asks for {row['cases']}"
    chance = row["standard_errors"] * worse.std() / len(worse) ** 0.5 if "standard_errors" in row else 0.0
    found = f"{of}: {worse.exp().tolist()} of torch's error, {worse.mean().exp():.4f} in the mean"
    assert worse.mean() <= math.log(row["error_of_torch"]) + chance, found
