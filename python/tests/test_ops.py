"""Every op through Python: the bits of the program, whatever the library and the layout; and what is refused."""

import sys

import numpy as np
import pytest
import samebits
import torch
from conftest import SCHEMA, bits, floats, same, sampled, tupled
from samebits import ops
from wire import SHORT, answers, decode, vectors

SEEDS = range(6)


def test_every_op_of_the_schema_is_a_function():
    assert set(ops.__all__) == set(SCHEMA)
    assert len(SCHEMA) >= 49
    for name, op in SCHEMA.items():
        function = getattr(ops, name)
        names = [i["name"] for i in op["inputs"]] + [a["name"] for a in op["attributes"]] + ["dtype", "into"]
        assert len(set(names)) == len(names) and all(n.isidentifier() for n in names)
        for word in names:
            assert word in function.__doc__
        for output in op["outputs"]:
            assert output["name"] in function.__doc__


@pytest.fixture(scope="module")
def answered():
    """Calls of all ops, and what the program answers."""
    calls = [(name, seed, *sampled(name, seed)) for name in SCHEMA for seed in SEEDS]
    requests = []
    for name, _, tensors, attributes, dtype in calls:
        text = {k: str(int(v)) if isinstance(v, bool) else str(v) for k, v in attributes.items()}
        requests.append(({"op": name, "out": SHORT[str(dtype).removeprefix("torch.")], **text}, tensors))
    found = {}
    for call, answer in zip(calls, answers(requests)):
        found.setdefault(call[0], []).append((call[2:], answer))
    return found


@pytest.mark.parametrize("name", SCHEMA)
def test_bits_are_those_of_the_program(name, answered):
    compared = 0
    for (tensors, attributes, dtype), (metadata, expected) in answered[name]:
        function = getattr(ops, name)
        if metadata["status"] != "ok":
            with pytest.raises((ValueError, NotImplementedError)):
                function(**tensors, **attributes, dtype=dtype)
            continue
        outputs = tupled(function(**tensors, **attributes, dtype=dtype))
        for output, tensor in zip(SCHEMA[name]["outputs"], outputs, strict=True):
            assert same(tensor, expected[output["name"]]), (name, output["name"], attributes)
            compared += tensor.numel()
        # The same into tensors of the caller.
        given = tuple(torch.full_like(tensor, 7) for tensor in outputs)
        returned = tupled(function(**tensors, **attributes, into=given if len(given) > 1 else given[0]))
        for mine, theirs, tensor in zip(given, returned, outputs, strict=True):
            assert mine is theirs and same(mine, tensor)
    assert compared > 0


@pytest.mark.skipif(not vectors(), reason="no repository at hand")
def test_vectors_of_an_independent_program():
    compared = 0
    for path in vectors():
        metadata, tensors = decode(path.read_bytes())
        name = metadata.pop("op")
        inputs = {i["name"]: tensors[i["name"]] for i in SCHEMA[name]["inputs"] if i["name"] in tensors}
        kinds = {a["name"]: a["kind"] for a in SCHEMA[name]["attributes"]}
        parse = {"count": int, "float": float, "flag": lambda text: text in ("1", "true"), "choice": str}
        attributes = {k: parse[kinds[k]](v) for k, v in metadata.items() if k in kinds}
        outputs = tupled(getattr(ops, name)(**inputs, **attributes, dtype="fp32"))
        for output, tensor in zip(SCHEMA[name]["outputs"], outputs, strict=True):
            expected = tensors.get(f"expect.{output['name']}")
            if expected is not None:
                assert same(tensor, expected.reshape(tensor.shape)), (path.name, output["name"])
                compared += tensor.numel()
    assert compared > 10_000


@pytest.mark.parametrize("name", SCHEMA)
def test_numpy_has_the_bits_of_torch(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def array(tensor):
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    tensors, attributes, dtype = sampled(name, 3)
    expected = tupled(getattr(ops, name)(**tensors, **attributes, dtype=dtype))
    found = tupled(getattr(ops, name)(**{k: array(v) for k, v in tensors.items()}, **attributes, dtype=dtype))
    for a, b in zip(found, expected, strict=True):
        assert isinstance(a, np.ndarray) and a.shape == tuple(b.shape)
        assert a.tobytes() == bits(b).numpy().tobytes()
        assert a.dtype == array(b).dtype


class Foreign:
    """A tensor of a library that nobody knows."""

    def __init__(self, tensor, versioned=True):
        self.tensor, self.versioned = tensor, versioned

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.versioned:
            if options:
                raise TypeError("no options")
            return self.tensor.__dlpack__()
        return self.tensor.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_library_with_dlpack(versioned, dtype):
    x, w = floats((5, 64), "float32", 1).to(dtype), floats((64,), "float32", 2).to(dtype)
    y = ops.rms_norm(Foreign(x, versioned), Foreign(w, versioned))
    assert isinstance(y, samebits.Tensor) and y.shape == (5, 64)
    assert same(y.torch(), ops.rms_norm(x, w))
    # And such a tensor goes in.
    assert same(ops.add(y, y).torch(), ops.add(y.torch(), y.torch()))


def test_classes_made_from_torch_tensors():
    class Own(torch.Tensor):
        pass

    x, w = floats((5, 64), "bfloat16", 1), floats((64,), "bfloat16", 2)
    y = ops.rms_norm(x.as_subclass(Own), torch.nn.Parameter(w, requires_grad=False))
    assert type(y) is torch.Tensor and same(y, ops.rms_norm(x, w))
    leaf = x.clone().requires_grad_().as_subclass(Own)
    with pytest.raises(ValueError, match="requires a gradient"):
        ops.rms_norm(leaf, w)
    with torch.no_grad():
        assert same(ops.rms_norm(leaf.detach(), w), y)


def test_array_libraries_get_their_own():
    class Array(Foreign):
        def __array_namespace__(self):
            return np

    x = np.ones((3, 4), dtype=np.float32)
    assert isinstance(ops.add(Array(x), Array(x)), np.ndarray)


# --- layouts


def test_views_go_in_as_they_lie():
    fused = floats((4, 6, 3 * 64), "bfloat16", 1)
    head, w = fused[..., 64:128], floats((64,), "bfloat16", 2)
    assert not head.is_contiguous()
    y = ops.rms_norm(head, w)
    assert y.shape == (4, 6, 64) and y.is_contiguous()
    assert same(y, ops.rms_norm(head.contiguous(), w))
    assert same(ops.rms_norm(head.transpose(0, 1), w), ops.rms_norm(head.transpose(0, 1).contiguous(), w))
    # A row that stands for many, and one that begins in the middle.
    row = floats((1, 64), "bfloat16", 3).expand(5, 64)
    assert same(ops.rms_norm(row, w), ops.rms_norm(row.contiguous(), w))
    assert same(ops.rms_norm(fused[1:, :, :64], w), ops.rms_norm(fused[1:, :, :64].contiguous(), w))


def test_heads_of_attention_as_they_lie():
    qkv = floats((2, 5, 3, 4, 32), "bfloat16", 1)
    q, k, v = qkv.unbind(2)
    pos = torch.arange(5, dtype=torch.int32).expand(2, 5).contiguous()
    length = torch.full((2,), 5, dtype=torch.int32)
    found = ops.attention(q, k, v, pos, length, causal=True)
    expected = ops.attention(q.contiguous(), k.contiguous(), v.contiguous(), pos, length, causal=True)
    assert all(same(a, b) for a, b in zip(found, expected))


def test_no_copy_of_inputs_and_outputs():
    x, w = np.ones((2, 8), dtype=np.float32), np.ones(8, dtype=np.float32)
    big = np.zeros((4, 8), dtype=np.float32)
    y = big[1:3]
    assert ops.rms_norm(x, w, into=y) is y
    assert big[1:3].all() and not big[0].any() and not big[3].any()


def test_leading_axes():
    x, w = floats((2, 3, 5, 16), "float32", 1), floats((7, 16), "float32", 2)
    y = ops.gemm(x, w)
    assert y.shape == (2, 3, 5, 7) and same(y.reshape(30, 7), ops.gemm(x.reshape(30, 16), w))
    dw = ops.gemm_dw(x, y)
    assert dw.shape == (7, 16)
    target = torch.zeros((2, 3, 5), dtype=torch.int32)
    logprob, lse = ops.logprob(y, target)
    assert logprob.shape == lse.shape == (2, 3, 5)
    tokens, carry = torch.arange(30, dtype=torch.int32).reshape(2, 3, 5) % 9, torch.zeros(9, 16)
    assert same(ops.embedding_dw(x, tokens, carry), ops.embedding_dw(x.reshape(30, 16), tokens.flatten(), carry))
    assert same(ops.token_sum(x), ops.token_sum(x.reshape(30, 16)))
    for name in ("rms_norm_dw", "layer_norm_dw"):
        assert same(getattr(ops, name)(x, x), getattr(ops, name)(x.reshape(30, 16), x.reshape(30, 16)))
    assert ops.rms_norm(torch.zeros(0, 16), torch.ones(16)).shape == (0, 16)
    assert ops.rms_norm(torch.zeros(3, 0, 16), torch.ones(16)).shape == (3, 0, 16)


def test_dtype_of_outputs():
    x, w = floats((4, 64), "bfloat16", 1), floats((64,), "bfloat16", 2)
    for given in ("fp32", "float32", torch.float32, np.float32, np.dtype("float32")):
        y = ops.rms_norm(x, w, dtype=given)
        assert y.dtype == torch.float32
        assert same(y.to(torch.bfloat16), ops.rms_norm(x, w))
    assert ops.gemm(x, x, k_offset=0, k_total=128).dtype == torch.float32
    y = torch.empty((4, 64), dtype=torch.float16)
    assert ops.rms_norm(x, w, into=y) is y


# --- what is refused


X, W = torch.ones(2, 64), torch.ones(64)


@pytest.mark.parametrize(
    "error, words, call",
    [
        (TypeError, "input `w`: missing", lambda: ops.rms_norm(X)),
        (TypeError, "no parameter `epz`", lambda: ops.rms_norm(X, W, epz=1)),
        (TypeError, "no parameter `epz`", lambda: ops.rms_norm(X, W, epz=None)),
        (TypeError, "`x` twice", lambda: ops.rms_norm(X, W, x=X)),
        (TypeError, "takes 2 tensors by place", lambda: ops.rms_norm(X, W, X)),
        (TypeError, "`w` is a list", lambda: ops.rms_norm(X, [1.0] * 64)),
        (ValueError, "param `eps`: `-1` is not a finite number", lambda: ops.rms_norm(X, W, eps=-1)),
        (ValueError, "param `eps`: `NaN` is not", lambda: ops.rms_norm(X, W, eps=float("nan"))),
        (ValueError, "param `eps`: `small` is not", lambda: ops.rms_norm(X, W, eps="small")),
        (ValueError, "param `rounding`: `twice` is not once or hf", lambda: ops.rms_norm(X, W, rounding="twice")),
        (ValueError, "param `weight_offset`: `2` is not", lambda: ops.rms_norm(X, W, weight_offset=2)),
        (ValueError, "param `k_total`: `-5` is not", lambda: ops.gemm(X, X, k_total=-5)),
        (NotImplementedError, "param `profile`: `fast`", lambda: ops.rms_norm(X, W, profile="fast")),
        (ValueError, "has N = 32, but N is 64", lambda: ops.rms_norm(X, torch.ones(32))),
        (ValueError, "dtype is float64; it must be bf16, fp16 or fp32", lambda: ops.rms_norm(X.double(), W)),
        (ValueError, "`target`: dtype is int64; it must be i32", lambda: ops.logprob(X, torch.zeros(2, dtype=torch.int64))),
        (ValueError, "dtype is i32; it must be bf16", lambda: ops.rms_norm(X.int(), W)),
        (ValueError, "dtype is bool", lambda: ops.rms_norm(X.bool(), W)),
        (NotImplementedError, "mixed dtypes are not offered", lambda: ops.rms_norm(X, W.half())),
        (ValueError, "`x` has stride 2 on its last axis", lambda: ops.rms_norm(torch.ones(64, 2).T, W)),
        (ValueError, "`x` has stride -1 on axis 1", lambda: ops.rms_norm(np.ones((2, 64), np.float32)[:, ::-1], np.ones(64, np.float32))),
        (ValueError, "`target`: axis 0 of shape [2, 1] has stride 2", lambda: ops.logprob(X[:, None], torch.zeros(2, 2, dtype=torch.int32)[:, :1])),
        (ValueError, "requires a gradient", lambda: ops.rms_norm(X, W.clone().requires_grad_())),
        (ValueError, "target", lambda: ops.logprob(X, torch.full((2,), 64, dtype=torch.int32))),
        (ValueError, "fp8 is out of scope", lambda: ops.rms_norm(X, W, dtype="fp8")),
        (ValueError, "out", lambda: ops.rms_norm(X, W, dtype=torch.int32)),
        (ValueError, "output `y` overlaps `x`", lambda: ops.rms_norm(X, W, into=X)),
        (ValueError, "output `y` overlaps `w`", lambda: ops.rms_norm(X[:1], W, into=W.reshape(1, 64))),
        (ValueError, "has gaps", lambda: ops.rms_norm(X, W, into=torch.ones(2, 128)[:, :64])),
        (ValueError, "`y` has shape [2, 32]", lambda: ops.rms_norm(X, W, into=torch.ones(2, 32))),
        (ValueError, "`into` has 1 tensors; give logprob, lse", lambda: ops.logprob(X, torch.zeros(2, dtype=torch.int32), into=(W,))),
        (ValueError, "`lse` is bf16; it must be fp32", lambda: ops.logprob(X, torch.zeros(2, dtype=torch.int32), into=(torch.ones(2), torch.ones(2).bfloat16()))),
    ],
)
def test_refusals(error, words, call):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_outputs_that_overlap_one_another():
    both = torch.ones(3)
    with pytest.raises(ValueError, match="output `lse` overlaps `logprob`"):
        ops.logprob(X, torch.zeros(2, dtype=torch.int32), into=(both[:2], both[1:]))


def test_read_only_outputs_and_inputs():
    x, w, y = np.ones((2, 64), np.float32), np.ones(64, np.float32), np.zeros((2, 64), np.float32)
    x.flags.writeable = False
    assert ops.rms_norm(x, w).any()
    y.flags.writeable = False
    with pytest.raises(ValueError, match="`y` is read-only"):
        ops.rms_norm(x, w, into=y)
    assert not y.any()


def test_misaligned_elements():
    raw = np.zeros(4 * 8 + 1, dtype=np.uint8)[1:].view(np.float32)
    with pytest.raises(ValueError, match="does not begin at a multiple of 4 bytes"):
        ops.add(raw, np.zeros(8, np.float32))


def test_too_many_axes():
    with pytest.raises(ValueError, match="has 8 axes; at most 6"):
        ops.add(torch.ones([1] * 8), torch.ones([1] * 8))


def test_tensors_without_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    for tensor in (X.to("meta"), fake, X.to_sparse(), X.to_mkldnn()):
        with pytest.raises(NotImplementedError, match="rms_norm: `x` (cannot be lent|is a FakeTensor)") as caught:
            ops.rms_norm(tensor, W)
        assert "\n" not in str(caught.value)
    with pytest.raises(NotImplementedError, match="cannot be lent"):
        torch.vmap(lambda x: ops.rms_norm(x, W))(torch.ones(3, 2, 64))


def test_numbers_behind_a_sign():
    """What torch negates when it is read stands in memory with the other sign."""
    x = torch._neg_view(torch.ones(2, 64))
    with pytest.raises(ValueError, match="resolve_neg"):
        ops.scale(x)
    assert same(ops.scale(x.resolve_neg()), -torch.ones(2, 64))


def test_budget_and_isa():
    x = floats((64, 256), "bfloat16", 1)
    expected = ops.gemm(x, x)
    with samebits.Cpu(budget=0), pytest.raises(MemoryError, match="a budget of 0 bytes"):
        ops.gemm(x, x)
    for isa in ("scalar", "avx2", "avx512"):
        try:
            cpu = samebits.Cpu(isa=isa, threads=1)
        except NotImplementedError:
            continue
        with cpu:
            assert samebits.get_cpu().isa == isa
            assert same(ops.gemm(x, x), expected)
    assert samebits.get_cpu().budget is None
    with pytest.raises((ValueError, NotImplementedError), match="unknown isa"):
        samebits.Cpu(isa="mmx")
    with pytest.raises(ValueError, match="threads is 0"):
        samebits.Cpu(threads=0)


def test_other_devices_are_refused_by_name():
    class Elsewhere:
        def __dlpack__(self, **options):
            raise AssertionError

    import ctypes

    # A capsule that says it is on a GPU that is not CUDA's.
    x = samebits.Tensor((2, 64))
    capsule = x.__dlpack__(max_version=(1, 0))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor_versioned")
    # version, context, deleter, flags, data, device type
    ctypes.c_int32.from_address(address + 8 + 8 + 8 + 8 + 8).value = 8
    Elsewhere.__dlpack__ = lambda self, **options: capsule
    with pytest.raises(NotImplementedError, match="`x` is on a device of DLPack type 8; give a tensor of the host or of CUDA"):
        ops.rms_norm(Elsewhere(), W)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
