"""Arrays of JAX by DLPack, both ways."""

import os

import numpy as np
import pytest
import samebits
import torch
from conftest import SCHEMA, same, sampled, tupled
from samebits import ops

if os.environ.get("SAMEBITS_NIGHTLY") != "1":
    pytest.skip("takes long: SAMEBITS_NIGHTLY=1 runs it", allow_module_level=True)
jax = pytest.importorskip("jax")
jnp = jax.numpy


def array(tensor):
    return jnp.from_dlpack(tensor.contiguous())


@pytest.mark.parametrize("name", SCHEMA)
def test_jax_has_the_bits_of_torch(name):
    compared = 0
    for seed in range(6):
        tensors, attributes, dtype = sampled(name, seed)
        # jax takes no tensor without elements from elsewhere.
        if any(tensor.numel() == 0 for tensor in tensors.values()):
            continue
        try:
            expected = tupled(getattr(ops, name)(**tensors, **attributes, dtype=dtype))
        except (ValueError, NotImplementedError):
            continue
        found = tupled(getattr(ops, name)(**{k: array(t) for k, t in tensors.items()}, **attributes, dtype=dtype))
        for a, b in zip(found, expected, strict=True):
            assert isinstance(a, jax.Array) and a.dtype.name == str(b.dtype).removeprefix("torch.")
            assert same(torch.from_dlpack(a), b)
            compared += b.numel()
    assert compared > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_there_and_back(dtype):
    x = jnp.arange(12, dtype=dtype).reshape(3, 4)
    twice = ops.scale(x, factor=2.0)
    assert isinstance(twice, jax.Array) and twice.dtype == x.dtype and bool((twice == x + x).all())
    own = samebits.Tensor((3, 4), dtype)
    ops.scale(x, factor=3.0, into=own)
    assert bool((jnp.from_dlpack(own) == 3 * x).all())
    assert same(own.torch(), torch.from_dlpack(jnp.asarray(3 * x)))
    assert np.asarray(twice).tobytes() == (own.torch() / 3 * 2).view(torch.uint8).numpy().tobytes()
