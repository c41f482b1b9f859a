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
