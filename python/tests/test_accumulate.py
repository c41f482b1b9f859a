"""Gradients of weights over several backward calls: the bits of one."""

import pytest
import samebits.torch
import torch
from conftest import assert_accurate, floats, same
from torch.utils.checkpoint import checkpoint

ops = samebits.torch.ops

VOCABULARY, WIDTH, HEADS, HEAD = 23, 64, 4, 16


class Model(torch.nn.Module):
    """Every operator whose weight has a sum over tokens; the table is read twice, by two operators."""

    def __init__(self, dtype):
        super().__init__()
        shapes = {
            "table": (VOCABULARY, WIDTH),
            "first": (WIDTH,),
            "wq": (WIDTH, WIDTH),
            "bq": (WIDTH,),
            "of_heads": (HEAD,),
            "second": (WIDTH,),
            "scale": (WIDTH,),
            "shift": (WIDTH,),
            "head": (VOCABULARY, WIDTH),
        }
        for at, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, torch.nn.Parameter(floats(shape, dtype, at + 1) * (0.2 if len(shape) == 2 else 1)))

    def layer(self, x, pos):
        h = ops.rms_norm(x, self.first)
        q = ops.gemm(h, self.wq, self.bq).reshape(-1, HEADS, HEAD)
        q = ops.norm_rope(q, self.of_heads, pos).reshape(x.shape)
        total, h = ops.add_rms_norm(x, q, self.second)
        return ops.add(total, ops.layer_norm(h, self.scale, self.shift))

    def forward(self, tokens, target, again=None):
        pos = torch.arange(tokens.shape[1], dtype=torch.int32).repeat(len(tokens))
        x = ops.embedding(self.table, tokens.reshape(-1))
        x = checkpoint(self.layer, x, pos, use_reentrant=again == "reentrant") if again else self.layer(x, pos)
        ours, _ = ops.linear_logprob(x, self.head, target.reshape(-1))
        tied, _ = ops.logprob(ops.gemm(x, self.table), target.reshape(-1))
        return -(ours.sum() + tied.sum())


def data(sequences=6, tokens=37):
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randint(0, VOCABULARY, (sequences, tokens), generator=generator, dtype=torch.int32)
    return draw(), draw()


def gradients(dtype, size, block=samebits.torch.accumulate, again=None):
    model, (tokens, target) = Model(dtype), data()
    parts = zip(tokens.split(size), target.split(size))
    if block is None:
        for part in parts:
            model(*part, again).backward()
    else:
        with block(model):
            for part in parts:
                model(*part, again).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_micro_batches_have_the_bits_of_one_batch(dtype):
    whole = gradients(dtype, 6)
    assert all(g is not None and g.isfinite().all() and g.abs().sum() > 0 for g in whole.values())
    for size in (1, 2, 4):
        parts = gradients(dtype, size)
        assert [name for name in whole if not same(whole[name], parts[name])] == []
    # Without it they differ, or this shows nothing.
    plain = gradients(dtype, 2, block=None)
    assert len([name for name in whole if not same(whole[name], plain[name])]) > 5
    # And they are the same sums, rounded elsewhere.
    for name in whole:
        assert_accurate(plain[name], whole[name], "reduction", "gradient")


def test_recomputation_moves_no_bit():
    whole = gradients("bfloat16", 6)
    parts = gradients("bfloat16", 2, again="yes")
    assert all(same(whole[name], parts[name]) for name in whole)
    with pytest.raises(RuntimeError, match="accumulate: `.*` is recomputed in a way that cannot be followed"):
        gradients("bfloat16", 2, again="reentrant")


def test_the_block_of_one_call_has_the_gradients_of_the_call():
    one, plain = gradients("float32", 6), gradients("float32", 6, block=None)
    assert all(same(one[name], plain[name]) for name in one if name != "table")


def refused(work, words):
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(floats((8, 16), "float32", 1))})
    x = floats((3, 16), "float32", 2)
    with pytest.raises(RuntimeError, match=words), samebits.torch.accumulate(model):
        work(model["w"], x)
    assert samebits.torch._active is None
    assert model["w"].grad is None


def test_what_cannot_be_carried_is_refused_by_name():
    other = "accumulate: `w` is read by another operator, or through one"
    refused(lambda w, x: (x @ w.T).sum().backward(), other)
    refused(lambda w, x: ops.gemm(x.bfloat16(), w.bfloat16()).sum().backward(), other)
    refused(lambda w, x: (ops.gemm(x, w).sum() + w.sum()).backward(), other)
    refused(lambda w, x: (ops.gemm(x, w) + ops.gemm(x, w)).sum().backward(), "accumulate: `w` is read by gemm twice")
    model = torch.nn.Linear(16, 8)
    model.weight.grad = torch.zeros(8, 16)
    with pytest.raises(RuntimeError, match="accumulate: `weight` has a gradient already"):
        samebits.torch.accumulate(model).__enter__()


def test_twice_back_is_refused():
    def twice(w, x):
        y = ops.gemm(x, w).sum()
        y.backward(retain_graph=True)
        y.backward()

    refused(twice, "outside of its block, or twice")


def test_blocks_do_not_nest():
    model = torch.nn.Linear(16, 8)
    with samebits.torch.accumulate(model), pytest.raises(RuntimeError, match="a block is open already"):
        samebits.torch.accumulate(model).__enter__()


def test_compiled_code_is_refused():
    torch._dynamo.reset()
    compiled = torch.compile(lambda w, x: ops.gemm(x, w).sum(), backend="aot_eager")
    refused(lambda w, x: compiled(w, x).backward(), "accumulate: `w` is read by another operator, or through one")


def test_several_leading_axes_are_the_tokens_of_one():
    table, w, bias = floats((VOCABULARY, WIDTH), "float32", 1), floats((8, WIDTH), "float32", 2), floats((8,), "float32", 3)
    dy = floats((6, 37, 8), "float32", 4)
    found = []
    for shape in ((6, 37), (6 * 37,)):
        leaves = [tensor.clone().requires_grad_() for tensor in (table, w, bias)]
        y = ops.gemm(ops.embedding(leaves[0], data()[0].reshape(shape)), *leaves[1:])
        y.backward(dy.reshape(*shape, 8))
        found.append([leaf.grad for leaf in leaves])
    assert all(map(same, *found))
