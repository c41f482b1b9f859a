"""Lifetimes: who holds what, and that it is given back."""

import ctypes
import gc
import pathlib
import weakref

import numpy as np
import pytest
import samebits
import samebits.torch
import torch
from conftest import floats, same
from samebits import ops


ADDER = pathlib.Path(__file__).resolve().parents[2] / "tests/checkpoints/qwen3-adder"


def resident():
    """Bytes of memory that this process holds."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


def name_of(capsule):
    get = ctypes.pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return get(capsule)


@pytest.mark.parametrize(
    "what",
    ["torch", "numpy", "into", "foreign", "refused", "kernel", "gradient", "exported", "dropped capsule", "engine"],
)
def test_ten_thousand_calls_hold_memory(what):
    # 32 KiB a tensor: ten thousand that stay would be 320 MB.
    x, w = torch.ones(128, 64), torch.ones(64)
    nx, nw, y = x.numpy(), w.numpy(), torch.empty(128, 64)
    mine = samebits.Tensor((128, 64))
    leaf = x.clone().requires_grad_()

    def gradient():
        samebits.torch.ops.rms_norm(leaf, w).sum().backward()
        leaf.grad = None

    def refused():
        with pytest.raises(ValueError):
            ops.rms_norm(x, w, into=x)

    engine, prompt = samebits.Engine(ADDER), [[1] + [4] * 2000]

    call = {
        "torch": lambda: ops.rms_norm(x, w),
        "numpy": lambda: ops.rms_norm(nx, nw),
        "into": lambda: ops.rms_norm(x, w, into=y),
        "foreign": lambda: ops.add(mine, mine),
        "refused": refused,
        "kernel": lambda: samebits.torch.ops.rms_norm(x, w),
        "gradient": gradient,
        "engine": lambda: engine.generate(prompt, max_tokens=0),
        "exported": lambda: (torch.from_dlpack(samebits.Tensor((128, 64))), samebits.Tensor((128, 64)).numpy()),
        "dropped capsule": lambda: (samebits.Tensor((128, 64)).__dlpack__(), mine.__dlpack__(max_version=(1, 0), copy=True)),
    }[what]
    for _ in range(300):
        call()
    gc.collect()
    before = resident()
    for _ in range(10_000):
        call()
    gc.collect()
    assert resident() - before < 8 << 20


def test_references_are_given_back():
    class Array(np.ndarray):
        pass

    x = np.ones((2, 8), np.float32).view(Array)
    gone = weakref.ref(x)
    ops.add(x, x)
    del x
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("versioned", [True, False])
def test_capsules(versioned):
    tensor = samebits.Tensor((2, 3), "fp16")
    options = {"max_version": (1, 0)} if versioned else {}
    fresh, used = (b"dltensor_versioned", b"used_dltensor_versioned") if versioned else (b"dltensor", b"used_dltensor")
    capsule = tensor.__dlpack__(**options)
    assert name_of(capsule) == fresh

    class Lender:
        def __dlpack__(self, **_):
            return capsule

    ops.add(Lender(), tensor)
    assert name_of(capsule) == used
    # Once used it is nobody's.
    with pytest.raises(BufferError, match="no DLPack capsule"):
        ops.add(Lender(), tensor)


def test_elements_outlive_their_tensor():
    tensor = samebits.Tensor((1000,), "fp32")
    array, lent = tensor.numpy(), tensor.torch()
    lent[:] = 3
    del tensor
    gc.collect()
    assert (array == 3).all() and array.flags.writeable
    del lent
    gc.collect()
    assert array.sum() == 3000


def test_copies_and_devices():
    tensor = samebits.Tensor((4,))
    copy = torch.from_dlpack(tensor).clone()
    assert tensor.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError):
        tensor.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError):
        tensor.__dlpack__(stream=1)
    tensor.torch()[:] = 1
    assert copy.sum() == 0 and tensor.numpy().sum() == 4


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "i32"])
def test_both_ways(dtype):
    tensor = samebits.Tensor((3, 4), dtype)
    assert repr(tensor) == f"samebits.Tensor(shape=[3, 4], dtype={dtype})"
    if dtype == "i32":
        assert tensor.torch().dtype == torch.int32 and tensor.numpy().dtype == np.int32
        return
    x = floats((3, 4), "float32", 1).to(tensor.torch().dtype)
    ops.scale(x, factor=1.0, into=tensor)
    assert same(tensor.torch(), x)
    pytest.importorskip("ml_dtypes")
    assert (tensor.numpy().astype(np.float32) == x.float().numpy()).all()


def test_no_such_shape():
    with pytest.raises(MemoryError):
        samebits.Tensor((1 << 40, 1 << 20))
    with pytest.raises(ValueError):
        samebits.Tensor((1,) * 9)
    with pytest.raises(ValueError, match="fp8"):
        samebits.Tensor((1,), "fp8")
