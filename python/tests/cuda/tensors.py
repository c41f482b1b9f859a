"""Tensors on a GPU: the bits of the processor, on the caller's stream, without a wait. With a GPU, torch's own tensors;
else those of `lent.py` beside the library of `driver.cpp`, which sees what a GPU would pass over in silence."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import SCHEMA, floats, same, sampled, tupled

import samebits
import samebits.torch
from samebits import ops

sys.path.insert(0, str(Path(__file__).parent))
from lent import Capsule, Lent, held  # noqa: E402

REAL = torch.cuda.is_available()
# A kernel takes the emulator's compiler a second or two.
# These look at what a kernel has made before they start the next one.
READING = ["linear_logprob", "route", "route_backward"]
FEW = ["rms_norm", "gemm", "logprob", "embedding", "token_sum", "argmax"]
OPS = list(SCHEMA) if REAL or os.environ.get("SAMEBITS_NIGHTLY") == "1" else FEW
pretended = pytest.mark.skipif(REAL, reason="a GPU is at hand: the library that tells is not")


class Real:
    """A machine with a GPU."""

    put = staticmethod(lambda tensor, device=0: tensor.to(f"cuda:{device}"))
    get = staticmethod(lambda tensor: tensor.cpu())
    waits = staticmethod(lambda: 0)


class Memory:
    """What is given back in the order of the stream on which it was made, as torch's allocator does."""

    def __init__(self, machine, bytes, device):
        self.machine, self.device, self.stream, self.lent = machine, device, machine.streams[device], []
        address = ctypes.c_uint64()
        with machine.on(device):
            machine.ask("cuMemAlloc_v2", ctypes.byref(address), max(bytes, 1))
        self.address = address.value

    def lent_on(self, stream):
        self.lent.append(stream)
        self.machine.lent.append((self.device, stream))

    def __del__(self):
        with self.machine.on(self.device):
            self.machine.ask("cuMemFreeAsync", self.address, self.stream)


class Pretended:
    """Two GPUs that are emulated, through the library's own driver API."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so")
        self.library.cuda_said.restype = ctypes.c_char_p
        self.contexts, self.streams, self.sources, self.lent = [], [], [], []
        for device in range(2):
            context, stream = ctypes.c_void_p(), ctypes.c_void_p()
            self.ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self.contexts.append(context)
            with self.on(device):
                self.ask("cuStreamCreate", ctypes.byref(stream), 1)
            self.streams.append(stream)
        torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=self.streams[device].value or 0)
        self.ask("cuCtxSetCurrent", self.contexts[0])

    def ask(self, name, *arguments):
        code = getattr(self.library, name)(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments))
        assert code == 0, f"{name}: {code}: {self.library.cuda_said().decode()}"

    def context(self):
        context = ctypes.c_void_p()
        self.ask("cuCtxGetCurrent", ctypes.byref(context))
        return context.value

    @contextlib.contextmanager
    def on(self, device):
        before = self.context()
        self.ask("cuCtxSetCurrent", self.contexts[device])
        yield
        self.ask("cuCtxSetCurrent", ctypes.c_void_p(before))

    @contextlib.contextmanager
    def stream(self, device, stream):
        before, self.streams[device] = self.streams[device], stream
        yield
        self.streams[device] = before

    def another_stream(self, device):
        stream = ctypes.c_void_p()
        with self.on(device):
            self.ask("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def empty(self, shape, dtype, device):
        bytes = torch.Size(shape).numel() * dtype.itemsize
        return Lent.of(Memory(self, bytes, device), dtype, shape)

    def put(self, tensor, device=0):
        """A copy of a tensor that is there when the stream comes to it."""
        tensor = tensor.detach().contiguous()
        made = self.empty(tuple(tensor.shape), tensor.dtype, device)
        self.sources.append(tensor)
        with self.on(device):
            self.ask("cuMemcpyHtoDAsync_v2", made.data_ptr(), ctypes.c_void_p(tensor.data_ptr()), tensor.nbytes, self.streams[device])
        return made

    def copy_rows(self, given, made):
        width = given.shape[-1] * given.itemsize
        starts = [given.data_ptr()]
        for extent, stride in zip(given.shape[:-1], given.stride()[:-1]):
            starts = [at + i * stride * given.itemsize for at in starts for i in range(extent)]
        with self.on(given.memory.device):
            for row, start in enumerate(starts):
                self.ask("cuMemcpyDtoDAsync_v2", made.data_ptr() + row * width, start, width, self.streams[given.memory.device])

    def finish(self, device, stream=None):
        with self.on(device):
            self.ask("cuStreamSynchronize", stream or self.streams[device])
        assert not self.library.cuda_said()

    def get(self, tensor):
        assert tensor.is_contiguous()
        made, device = torch.empty(tensor.shape, dtype=tensor.dtype), tensor.memory.device
        with self.on(device):
            self.ask("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(made.data_ptr()), tensor.data_ptr(), made.nbytes, self.streams[device])
        self.finish(device)
        return made

    def waits(self):
        return self.library.cuda_waited()

    def live(self, device=0):
        self.finish(device)
        return self.library.cuda_live(device)


@pytest.fixture(scope="module")
def gpu():
    return Real() if REAL else Pretended()


def agree(found, expected, gpu):
    for a, b in zip(tupled(found), tupled(expected), strict=True):
        assert a.device.type == "cuda" and same(gpu.get(a), b)


@pytest.mark.parametrize("function", ["functions", "operators"])
@pytest.mark.parametrize("name", OPS)
def test_bits_are_those_of_the_processor(name, function, gpu):
    call = getattr(ops if function == "functions" else samebits.torch.ops, name)
    compared = 0
    for seed in range(4):
        tensors, attributes, dtype = sampled(name, seed)
        # Integers that are there are read, which waits; all others are not.
        there = seed % 2 == 1 or not any(t.dtype.is_floating_point for t in tensors.values())
        given = {k: gpu.put(t) if t.dtype.is_floating_point or there else t for k, t in tensors.items()}
        try:
            expected = call(**tensors, **attributes, dtype=dtype)
        except (ValueError, NotImplementedError) as e:
            with pytest.raises(type(e)):
                call(**given, **attributes, dtype=dtype)
            continue
        before = gpu.waits()
        found = call(**given, **attributes, dtype=dtype)
        assert there or name in READING or gpu.waits() == before
        agree(found, expected, gpu)
        compared += sum(t.numel() for t in tupled(expected))
        if function == "functions":
            into = tuple(gpu.put(torch.full_like(t, 7)) for t in tupled(expected))
            assert tupled(call(**given, **attributes, into=into if len(into) > 1 else into[0]))[0] is into[0]
            agree(into, expected, gpu)
    assert compared > 0


X, W = floats((5, 64), "bfloat16", 1), floats((64,), "bfloat16", 2)


def test_gradients(gpu):
    x, w = X.float(), W.float()
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    expected = torch.autograd.grad(samebits.torch.ops.rms_norm(*leaves), leaves, x)
    theirs = [gpu.put(t).requires_grad_() for t in (x, w)]
    found = torch.autograd.grad(samebits.torch.ops.rms_norm(*theirs), theirs, gpu.put(x))
    agree(tuple(found), tuple(expected), gpu)


def test_views(gpu):
    """The functions refuse what a kernel does not read, the operators copy it."""
    wide = gpu.put(floats((5, 200), "bfloat16", 3))
    x, row = (wide[:, :64], wide[2, 1:65]) if REAL else (wide.view_at((5, 64), (200, 1), 0), wide.view_at((64,), (1,), 401))
    w, plain = gpu.put(W), floats((5, 200), "bfloat16", 3)
    with pytest.raises(ValueError, match="rms_norm: `x` has gaps .* give x.contiguous()"):
        ops.rms_norm(x, w)
    with pytest.raises(ValueError, match="rms_norm: `w` does not begin at a multiple of 16 bytes; give a copy"):
        ops.rms_norm(gpu.put(X), row)
    agree(samebits.torch.ops.rms_norm(x, row), ops.rms_norm(plain[:, :64], plain[2, 1:65].clone()), gpu)
    second = wide[1:2] if REAL else wide.view_at((1, 200), (200, 1), 200)
    agree(ops.scale(second, factor=2.0), ops.scale(plain[1:2], factor=2.0), gpu)
    assert tuple(ops.rms_norm(gpu.put(X[:0]), w).shape) == (0, 64)


def test_what_is_in_two_places(gpu):
    x, w = gpu.put(X), gpu.put(W)
    for call in (ops.rms_norm, samebits.torch.ops.rms_norm):
        with pytest.raises(ValueError, match="rms_norm: `w` is on the host, other tensors on cuda:0; give all of them in one place"):
            call(x, W)
    with pytest.raises(ValueError, match="rms_norm: `y` is on the host"):
        ops.rms_norm(x, w, into=torch.empty_like(X))
    with pytest.raises(ValueError, match="rms_norm: `y` is on cuda:0, other tensors on the host"):
        ops.rms_norm(X, W, into=x)
    with pytest.raises(ValueError, match="rms_norm: output `y` overlaps `x`"):
        ops.rms_norm(x, w, into=x)
    if not REAL:
        with pytest.raises(ValueError, match="rms_norm: `w` is on cuda:1, other tensors on cuda:0"):
            ops.rms_norm(x, gpu.put(W, 1))
    with pytest.raises((ValueError, TypeError)):
        ops.rms_norm(x, w, eps=-1)
    with pytest.raises(ValueError, match="tokens"):
        ops.embedding(x, torch.tensor([0, 5], dtype=torch.int32))


@pretended
def test_the_stream_is_the_callers(gpu):
    other = gpu.another_stream(0)
    expected = ops.rms_norm(X, W)
    with gpu.stream(0, other):
        x, w = gpu.put(X), gpu.put(W)
        gpu.lent.clear()
        launched, waits = gpu.library.cuda_launched(), gpu.waits()
        y = ops.rms_norm(x, w)
        # Nothing has run, and nothing is elsewhere: neither on the stream of before nor on the default one.
        assert gpu.library.cuda_launched() == launched and gpu.waits() == waits
        assert gpu.lent == [(0, other.value)] * 3
        assert gpu.library.cuda_queued(gpu.streams[0]) == 3
    with gpu.on(0):
        assert gpu.library.cuda_queued(ctypes.c_void_p(1)) == 0
    gpu.finish(0, other)
    assert gpu.library.cuda_launched() == launched + 1
    with gpu.stream(0, other):
        agree(y, expected, gpu)
    # torch's default stream is 0, which DLPack calls 1.
    with gpu.stream(0, ctypes.c_void_p(0)):
        x, w = gpu.put(X), gpu.put(W)
        gpu.lent.clear()
        agree(ops.rms_norm(x, w), expected, gpu)
        assert gpu.lent == [(0, 1)] * 3
        del x, w


@pretended
def test_another_gpu_and_the_context_of_before(gpu):
    before = gpu.context()
    assert before == gpu.contexts[0].value
    agree(ops.rms_norm(gpu.put(X, 1), gpu.put(W, 1)), ops.rms_norm(X, W), gpu)
    assert gpu.context() == before
    gpu.ask("cuCtxSetCurrent", ctypes.c_void_p(0))
    agree(ops.rms_norm(gpu.put(X), gpu.put(W)), ops.rms_norm(X, W), gpu)
    assert not gpu.context()
    gpu.ask("cuCtxSetCurrent", ctypes.c_void_p(before))
    with pytest.raises(NotImplementedError, match="scale: cannot run on cuda:2: no CUDA device 2; the driver lists 2"):
        ops.scale(Capsule(4096, (2, 64), device=2), into=Capsule(8192, (2, 64), device=2))


@pretended
def test_memory_lives_as_long_as_it_is_used_and_no_longer(gpu):
    logits, target = floats((6, 300), "float32", 4), torch.arange(6, dtype=torch.int32)
    weight = floats((300, 300), "float32", 5)
    expected = ops.linear_logprob(logits, weight, target)
    live = gpu.live()
    for _ in range(3):
        # Workspace, numbers of the host, and inputs that go before anything has run.
        found = ops.linear_logprob(gpu.put(logits), gpu.put(weight), target.clone())
        found = ops.scale(found[0], factor=1.0), found[1]
        agree(found, expected, gpu)
        del found
        assert gpu.live() == live and not held


@pretended
def test_captured_work(gpu):
    x, w = gpu.put(X), gpu.put(W)
    y = ops.rms_norm(x, w)
    stream = gpu.streams[0]
    with gpu.on(0):
        gpu.ask("cuStreamBeginCapture_v2", stream, 0)
    try:
        ops.rms_norm(x, w, into=y)
        with pytest.raises(RuntimeError, match="embedding: cuda:0: the stream is being captured, and a graph cannot keep numbers"):
            ops.embedding(x, torch.tensor([0, 4], dtype=torch.int32))
    finally:
        with gpu.on(0):
            gpu.ask("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p()))
    agree(y, ops.rms_norm(X, W), gpu)


@pretended
def test_other_libraries(gpu):
    """They give `into`, and are waited for."""
    with gpu.stream(0, ctypes.c_void_p(0)):
        x, y = gpu.put(X.float()), gpu.put(torch.zeros(5, 64))
        given, into = (Capsule(t.data_ptr(), (5, 64), owner=t.memory) for t in (x, y))
        waits = gpu.waits()
        assert ops.scale(given, factor=3.0, into=into) is into
        assert gpu.waits() == waits + 1 and given.streams == into.streams == [1]
        agree(y, ops.scale(X.float(), factor=3.0), gpu)
    with pytest.raises(NotImplementedError, match="as `into`"):
        ops.scale(given)
    with pytest.raises(ValueError, match="scale: `y` is of another library"):
        ops.scale(given, into=y)


@pretended
def test_judge(gpu, monkeypatch):
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, of: gpu.put(self) if of == torch.device("cuda") else to(self, of))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.finish(0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an emulator")
    # torch has no memory on this device: whether inputs are written is held by the tests of the processor.
    monkeypatch.setattr(samebits.wire.Torch, "seen", lambda self, tensor: None)
    monkeypatch.setattr(samebits.wire.Torch, "same", lambda self, tensor, seen: True)
    launched = gpu.library.cuda_launched()
    judged = dict(op="add", cases=["add/bf16/small-normal-bf16"], device="cuda", layouts=[], axes=["batch", "repeat"])
    report = samebits.judge(lambda a, b: ops.add(a, b), **judged)
    assert report.ok, report
    assert gpu.library.cuda_launched() > launched + 2
    seen = []
    report = samebits.judge(lambda a, b: ops.add(a, b if seen.append(a) or len(seen) % 2 else a), **judged)
    assert not report.ok
