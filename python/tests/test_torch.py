"""The operators of torch: what torch asks of one, gradients, tracing and compiling."""

import shutil

import pytest
import samebits
import samebits.torch
import torch
from conftest import SCHEMA, assert_accurate, floats, same, sampled, tupled
from samebits import ops as plain

ops = samebits.torch.ops
WITH = samebits.torch.differentiable()


def call(name, seed, gradients=False):
    tensors, attributes, dtype = sampled(name, seed)
    inputs = [tensors.get(i["name"]) for i in SCHEMA[name]["inputs"]]
    if gradients:
        inputs = [t.requires_grad_() if t is not None and t.is_floating_point() else t for t in inputs]
    while inputs and inputs[-1] is None:
        inputs.pop()
    return getattr(ops, name).default, tuple(inputs), {**attributes, "dtype": dtype}


@pytest.mark.parametrize("name", SCHEMA)
def test_bits_are_those_of_the_function(name):
    for seed in range(4):
        op, inputs, attributes = call(name, seed)
        for a, b in zip(tupled(op(*inputs, **attributes)), tupled(getattr(plain, name)(*inputs, **attributes)), strict=True):
            assert same(a, b)


def runs(op, inputs, attributes, gradients):
    """Whether a call gives numbers: what is refused, or NaN, torch cannot compare."""
    try:
        outputs = [t for t in tupled(op(*inputs, **attributes)) if t.is_floating_point()]
        if gradients:
            leaves = [t for t in inputs if t is not None and t.requires_grad]
            outputs += torch.autograd.grad([t.sum() for t in outputs if t.requires_grad], leaves, allow_unused=True)
    except (ValueError, NotImplementedError):
        return False
    return all(t.numel() > 0 and t.isfinite().all() for t in outputs if t is not None)


def opcheck(name, gradients):
    checked = 0
    for seed in range(60):
        op, inputs, attributes = call(name, seed, gradients)
        if not runs(op, inputs, attributes, gradients):
            continue
        tests = list(torch.library.opcheck.__kwdefaults__["test_utils"])
        # It adds up all outputs, integers among them.
        if name == "route" and gradients:
            tests.remove("test_aot_dispatch_dynamic")
        torch.library.opcheck(op, inputs, attributes, test_utils=tests)
        checked += 1
        if checked == 2:
            return
    assert checked == 2


@pytest.mark.parametrize("name", SCHEMA)
def test_opcheck(name):
    opcheck(name, gradients=False)


@pytest.mark.parametrize("name", WITH)
def test_opcheck_with_gradients(name):
    opcheck(name, gradients=True)


@pytest.mark.parametrize("name", sorted(set(SCHEMA) - set(WITH)))
def test_no_gradient_is_refused_by_name(name):
    op, inputs, attributes = call(name, 1, gradients=True)
    outputs = [t for t in tupled(op(*inputs, **attributes)) if t.requires_grad]
    if outputs:
        with pytest.raises(NotImplementedError, match=f"{name}: it has no gradient op"):
            sum(t.sum() for t in outputs).backward()


# --- gradients against torch's own, of the same function in f64


def leaf(*shape, seed, scale=1.0):
    return (scale * floats(shape, "float32", seed)).requires_grad_()


def norm(x, w, eps=1e-6):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w


def turned(x, pos, theta=10000.0):
    half = x.shape[-1] // 2
    angle = pos[:, None].double() * theta ** (-torch.arange(half).double() / half)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def attended(q, k, v, pos, length, sinks=None):
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    keys = torch.arange(k.shape[1])
    seen = (keys[None, None] <= pos[:, :, None]) & (keys[None, None] < length[:, None, None])
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhts,bshe->bthe", scores.softmax(-1)[..., : keys.numel()], v)


def clamped(g, u, alpha, limit):
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + 1)


POS = torch.arange(5, dtype=torch.int32)
TOKENS = torch.tensor([3, 0, 3, 6, 1], dtype=torch.int32)
ROW = torch.tensor([[4, 0], [2, 5], [1, 3]], dtype=torch.int32)
LENGTH = torch.tensor([5, 3], dtype=torch.int32)
BATCH_POS = torch.stack([POS, torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)])


def logprobs(z, target):
    chosen = z.log_softmax(-1).gather(-1, target.clamp(min=0).long()[:, None])[:, 0]
    return torch.where(target < 0, torch.zeros_like(chosen), chosen), z.logsumexp(-1)


def routed(z, k=2):
    s = z.softmax(-1)
    chosen = torch.zeros_like(s).scatter(-1, s.topk(k, -1).indices, 1.0)
    return s * chosen


def convolved(x, w, bias, state):
    rows = torch.cat([state, x], 1)
    taps = [w[:, j] * rows[:, j : j + x.shape[1]] for j in range(w.shape[1])]
    return sum(taps) + bias, rows[:, x.shape[1] :]


def scanned(x, dt, a_log, b, c, d, bias, state):
    e = torch.nn.functional.softplus(dt + bias)
    b, c = (part.repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (b, c))
    rows = []
    for t in range(x.shape[1]):
        kept = torch.exp(-torch.exp(a_log) * e[:, t])[..., None, None] * state
        state = kept + (e[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        rows.append((state * c[:, t, :, None]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(rows, 1), state


def selected(x, dt, a_log, b, c, d, bias, state):
    e, rows = torch.nn.functional.softplus(dt + bias), []
    for t in range(x.shape[1]):
        kept = torch.exp(-torch.exp(a_log) * e[:, t, :, None]) * state
        state = kept + (e[:, t] * x[:, t])[..., None] * b[:, t, None]
        rows.append((state * c[:, t, None]).sum(-1) + d * x[:, t])
    return torch.stack(rows, 1), state


def rwkv(r, w, k, v, a, b, state):
    rows = []
    for t in range(r.shape[1]):
        read = (state * a[:, t, ..., None]).sum(-2)[..., None, :]
        state = torch.exp(w[:, t])[..., None] * state + b[:, t, ..., None] * read
        state = state + k[:, t, ..., None] * v[:, t, ..., None, :]
        rows.append((state * r[:, t, ..., None]).sum(-2))
    return torch.stack(rows, 1), state


def corrected(q, k, v, g, beta, a_log, bias, state):
    q, k = (part.repeat_interleave(v.shape[2] // part.shape[2], 2) for part in (q, k))
    rows, left = [], torch.exp(-torch.exp(a_log)[:, None] * torch.nn.functional.softplus(g + bias))
    for t in range(v.shape[1]):
        state = left[:, t, ..., None] * state
        read = (state * k[:, t, ..., None]).sum(-2)
        state = state + k[:, t, ..., None] * (beta[:, t, :, None] * (v[:, t] - read))[..., None, :]
        rows.append((state * q[:, t, ..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(rows, 1), state


# By op: leaves, its call, and the same in torch.
CASES = {
    "gemm": ([(5, 32), (7, 32), (7,)], lambda x, w, b: ops.gemm(x, w, b), lambda x, w, b: x @ w.T + b),
    "rms_norm": ([(5, 64), (64,)], lambda x, w: ops.rms_norm(x, w), norm),
    "add_rms_norm": (
        [(5, 64), (5, 64), (64,)],
        lambda x, r, w: ops.add_rms_norm(x, r, w),
        lambda x, r, w: (x + r, norm(x + r, w)),
    ),
    "layer_norm": (
        [(5, 64), (64,), (64,)],
        lambda x, w, b: ops.layer_norm(x, w, b),
        lambda x, w, b: torch.nn.functional.layer_norm(x, (64,), w, b, 1e-5),
    ),
    "group_norm": (
        [(3, 6, 11), (6,), (6,)],
        lambda x, w, b: ops.group_norm(x, w, b, groups=2, silu=True),
        lambda x, w, b: torch.nn.functional.silu(torch.nn.functional.group_norm(x, 2, w, b, 1e-5)),
    ),
    # Strides that leave places open, padding on one side, taps apart, groups.
    "conv": (
        [(2, 4, 3, 8, 9), (6, 2, 2, 3, 3), (6,)],
        lambda x, w, b: ops.conv(
            x, w, b, groups=2, stride_h=2, stride_w=3, dilation_d=2, pad_front=1, pad_bottom=1, pad_left=1
        ),
        lambda x, w, b: torch.nn.functional.conv3d(
            torch.nn.functional.pad(x, (1, 0, 0, 1, 1, 0)), w, b, stride=(1, 2, 3), dilation=(2, 1, 1), groups=2
        ),
    ),
    "attention": (
        [(2, 5, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16)],
        lambda q, k, v: ops.attention(q, k, v, BATCH_POS, LENGTH, causal=True)[0],
        lambda q, k, v: attended(q, k, v, BATCH_POS, LENGTH),
    ),
    "clamped_silu_mul": (
        [(5, 9)] * 2,
        lambda g, u: ops.clamped_silu_mul(g, u, limit=0.75),
        lambda g, u: clamped(g, u, 1.702, 0.75),
    ),
    "logprob": ([(5, 9)], lambda z: ops.logprob(z, TOKENS), lambda z: logprobs(z, TOKENS)),
    "entropy": (
        [(5, 9)],
        lambda z: ops.entropy(z),
        lambda z: (torch.distributions.Categorical(logits=z).entropy(), z.logsumexp(-1)),
    ),
    "linear_logprob": (
        [(5, 16), (9, 16)],
        lambda x, w: ops.linear_logprob(x, w, TOKENS),
        lambda x, w: logprobs(x @ w.T, TOKENS),
    ),
    "softmax": ([(5, 9)], lambda x: ops.softmax(x), lambda x: x.softmax(-1)),
    "sigmoid_mul": (
        [(5, 3), (5, 9)],
        lambda g, x: ops.sigmoid_mul(g, x),
        lambda g, x: torch.sigmoid(g).repeat_interleave(3, -1) * x,
    ),
    "silu_mul": ([(5, 9)] * 2, lambda g, u: ops.silu_mul(g, u), lambda g, u: torch.nn.functional.silu(g) * u),
    "gelu_mul": (
        [(5, 9)] * 2,
        lambda g, u: ops.gelu_mul(g, u),
        lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u,
    ),
    "activate": ([(5, 9)], ops.activate, torch.nn.functional.gelu),
    "softcap": ([(5, 9)], lambda x: ops.softcap(x, cap=2.0), lambda x: 2 * torch.tanh(x / 2)),
    "scale": ([(5, 9)], lambda x: ops.scale(x, factor=-3.0), lambda x: -3 * x),
    "rope": ([(5, 3, 16)], lambda x: ops.rope(x, POS), lambda x: turned(x, POS)),
    "norm_rope": (
        [(5, 3, 16), (16,)],
        lambda x, w: ops.norm_rope(x, w, POS),
        lambda x, w: turned(norm(x, w), POS),
    ),
    "add": ([(5, 9)] * 2, lambda a, b: ops.add(a, b), lambda a, b: a + b),
    "mul": ([(5, 9)] * 2, lambda a, b: ops.mul(a, b), lambda a, b: a * b),
    "embedding": ([(9, 16)], lambda w: ops.embedding(w, TOKENS), lambda w: w[TOKENS.long()]),
    "causal_conv1d": (
        [(2, 9, 16), (16, 4), (16,), (2, 3, 16)],
        lambda x, w, b, s: ops.causal_conv1d(x, w, b, s),
        convolved,
    ),
    "ssd_scan": (
        [(2, 5, 4, 3), (2, 5, 4), (4,), (2, 5, 2, 8), (2, 5, 2, 8), (4,), (4,), (2, 4, 3, 8)],
        lambda *given: ops.ssd_scan(*given),
        scanned,
    ),
    "selective_scan": (
        [(2, 5, 6), (2, 5, 6), (6, 4), (2, 5, 4), (2, 5, 4), (6,), (6,), (2, 6, 4)],
        lambda *given: ops.selective_scan(*given),
        selected,
    ),
    "wkv7": ([(2, 5, 3, 8)] * 6 + [(2, 3, 8, 8)], lambda *given: ops.wkv7(*given), rwkv),
    "gated_delta_rule": (
        [(2, 5, 2, 8), (2, 5, 2, 8), (2, 5, 4, 6), (2, 5, 4, 1), (2, 5, 4), (4,), (4, 1), (2, 4, 8, 6)],
        lambda *given: ops.gated_delta_rule(*given),
        corrected,
    ),
    "route": ([(5, 8)], lambda z: ops.route(z, chosen=2)[1], routed),
    "combine": (
        [(6, 16), (3, 2), (3, 16)],
        lambda x, p, s: ops.combine(x, ROW, p, s),
        lambda x, p, s: (x[ROW.long()] * p[..., None]).sum(1) + s,
    ),
}


# Other forms of an op.
FORMS = {
    "attention_with_sinks": (
        [(2, 5, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16), (4,)],
        lambda q, k, v, s: ops.attention(q, k, v, BATCH_POS, LENGTH, s, causal=True)[0],
        lambda q, k, v, s: attended(q, k, v, BATCH_POS, LENGTH, s),
    ),
}

# By op, where it is no reduction: the class of contract/src/spec/OP.rs.
KINDS = {
    **dict.fromkeys(["activate", "add", "clamped_silu_mul", "embedding", "gelu_mul", "mul", "rope", "scale", "sigmoid_mul", "silu_mul", "softcap"], "elementwise"),
    **dict.fromkeys(["entropy", "logprob", "linear_logprob"], "logprob"),
    "attention": "attention",
    "attention_with_sinks": "attention",
}
# Of gradient ops of another class.
KINDS_BACK = {**KINDS, "embedding": "reduction", "linear_logprob": "reduction"}


def test_every_differentiable_op_is_held_to_torch():
    assert sorted(CASES) == sorted(WITH)


@pytest.mark.parametrize("name", [*CASES, *FORMS])
@pytest.mark.parametrize("leading", [False, True])
def test_gradients(name, leading):
    """What torch's autograd gives for the same function in f64."""
    shapes, ours, theirs = {**CASES, **FORMS}[name]
    leaves = [leaf(*shape, seed=at + 1) for at, shape in enumerate(shapes)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    found, expected = tupled(ours(*leaves)), tupled(theirs(*wide))
    assert len(found) == len(expected)
    seeds = [floats(t.shape, "float32", 50 + at) for at, t in enumerate(found)]
    if leading:
        # A gradient that is no memory of its own.
        seeds = [torch.ones(1).expand(t.shape) for t in found]
    torch.autograd.backward(found, seeds)
    torch.autograd.backward(expected, [s.double() for s in seeds])
    for a, b in zip(found, expected):
        assert_accurate(a.detach(), b.detach(), KINDS.get(name, "reduction"))
    for a, b in zip(leaves, wide):
        assert a.grad is not None and a.grad.shape == a.shape and a.grad.abs().sum() > 0
        assert_accurate(a.grad, b.grad, KINDS_BACK.get(name, "reduction"), "gradient")


def test_gradients_of_leading_axes():
    x, w = leaf(2, 3, 32, seed=1), leaf(7, 32, seed=2)
    y = ops.gemm(x, w)
    assert y.shape == (2, 3, 7)
    y.backward(torch.ones_like(y))
    assert_accurate(x.grad, torch.ones(2, 3, 7).double() @ w.detach().double(), "reduction", "gradient")
    assert w.grad.shape == (7, 32)


def test_gradients_of_bf16():
    x = floats((6, 64), "bfloat16", 1).requires_grad_()
    w = floats((16, 64), "bfloat16", 2).requires_grad_()
    y = ops.gemm(x, w, dtype=torch.float32)
    dy = floats((6, 16), "float32", 3)
    y.backward(dy)
    rounded = dy.bfloat16()
    assert same(x.grad, plain.gemm_dx(rounded, w.detach()))
    assert same(w.grad, plain.gemm_dw(x.detach(), rounded).bfloat16())


def test_the_rows_of_a_batch_have_the_gradients_that_they_have_alone():
    x, w = floats((9, 64), "bfloat16", 1), floats((64,), "bfloat16", 2)
    dy = floats((9, 64), "bfloat16", 3)

    def gradient(rows):
        part = x[rows].clone().requires_grad_()
        ops.rms_norm(part, w).backward(dy[rows])
        return part.grad

    whole = gradient(slice(0, 9))
    assert all(same(gradient(slice(row, row + 1)), whole[row : row + 1]) for row in range(9))


def test_only_what_is_asked_for():
    x, w = floats((5, 64), "float32", 1), leaf(64, seed=2)
    ops.rms_norm(x, w).sum().backward()
    assert w.grad is not None and x.grad is None
    q = leaf(1, 5, 2, 16, seed=3)
    out, lse = ops.attention(q, q, q, POS[None], torch.tensor([5], dtype=torch.int32))
    assert out.requires_grad and not lse.requires_grad
    with torch.no_grad():
        assert not ops.rms_norm(x, w).requires_grad


def test_no_gradient_of_a_gradient():
    x, w = leaf(5, 64, seed=1), leaf(64, seed=2)
    (dx,) = torch.autograd.grad(ops.rms_norm(x, w).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rms_norm_backward: it has no gradient op"):
        dx.sum().backward()


# --- layouts, shapes, devices


def test_what_an_op_does_not_take_is_copied():
    x, w = floats((64, 5), "float32", 1).T, floats((64,), "float32", 2)
    assert x.stride(-1) != 1
    assert same(ops.rms_norm(x, w), plain.rms_norm(x.contiguous(), w))
    pos = torch.arange(10, dtype=torch.int32)[::2]
    heads = floats((5, 3, 16), "float32", 3)
    assert same(ops.rope(heads, pos), plain.rope(heads, pos.contiguous()))
    with pytest.raises(ValueError, match="N is 5"):
        ops.rms_norm(x.T, w)


def test_shapes_without_elements():
    x, w = torch.empty(4, 6, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, dtype=torch.bfloat16, device="meta")
    y = ops.rms_norm(x, w, dtype=torch.float32)
    assert y.shape == (4, 6, 64) and y.dtype == torch.float32 and y.device.type == "meta"
    with pytest.raises(ValueError, match="has N = 32, but N is 64"):
        ops.rms_norm(x, w[:32])
    with pytest.raises(ValueError, match="param `eps`"):
        ops.rms_norm(x, w, eps=-1.0)


def test_errors_of_an_operator():
    with pytest.raises(ValueError, match="target"):
        ops.logprob(torch.ones(2, 4), torch.full((2,), 4, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="mixed dtypes"):
        ops.rms_norm(torch.ones(2, 64), torch.ones(64).half())


def test_every_operator_has_a_kernel_for_both_places():
    for name in SCHEMA:
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"samebits::{name}", key)


def block(x, w1, w2, target):
    h = ops.rms_norm(x, w1)
    y = ops.gemm(h, w2)
    g = ops.silu_mul(y, y)
    logprob, _ = ops.logprob(g, target)
    return logprob.sum()


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, dynamic=dynamic, fullgraph=True)
    for rows in (3, 5):
        leaves = [leaf(rows, 64, seed=rows), leaf(64, seed=2), leaf(16, 64, seed=3)]
        again = [t.detach().clone().requires_grad_() for t in leaves]
        target = torch.zeros(rows, dtype=torch.int32)
        a, b = block(*leaves, target), compiled(*again, target)
        a.backward()
        b.backward()
        assert same(a.detach(), b.detach()) or backend == "inductor"
        torch.testing.assert_close(a, b)
        for one, other in zip(leaves, again):
            assert same(one.grad, other.grad)


def test_export():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(64))

        def forward(self, x):
            return ops.rms_norm(x, self.w)

    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(Block(), (torch.ones(4, 3, 64),), dynamic_shapes={"x": {0: rows}})
    x = floats((7, 3, 64), "float32", 1)
    assert same(program.module()(x), Block()(x))
    (node,) = [node for node in program.graph.nodes if node.target is ops.rms_norm.default]
    assert node.meta["val"].dim() == 3 and node.meta["val"].shape[1:] == (3, 64)
