"""Layers over ranks: the bits of one process, whatever the ranks; and what ranks cannot have is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import samebits.torch
import torch
from conftest import floats, same
from samebits.torch import parallel

ops = samebits.torch.ops

WORLDS = (1, 2, 4, 8) if os.environ.get("SAMEBITS_NIGHTLY") else (4,)


def torchrun(world):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--standalone"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(Path(__file__).with_name("ranks.py"))], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def alone():
    """What one process makes, without torch.distributed."""
    return ranks.train()


def test_the_steps_change_the_model_and_are_finite(alone):
    before = dict(ranks.Model().named_parameters())
    assert all(tensor.float().isfinite().all() for tensor in alone.values())
    assert [name for name, p in before.items() if same(alone[name], p.detach())] == []


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_have_the_bits_of_one(alone, world):
    found = torchrun(world)
    assert list(found) == [f"{tensor}x{data}" for tensor, data in ranks.combinations(world)]
    expected = ranks.sha256(alone)
    assert {name: digests for name, digests in found.items() if digests != [expected]} == {}


@pytest.mark.skipif(8 in WORLDS, reason="they were run")
def test_worlds_of_one_two_and_eight():
    pytest.skip("1, 2 and 8 processes take a minute: with SAMEBITS_NIGHTLY=1")


def test_groups_are_seen_and_micro_batches_are_not(alone, monkeypatch):
    assert ranks.sha256(ranks.train(micro_batch=1)) == ranks.sha256(alone)
    monkeypatch.setattr(ranks, "GROUPS", 2)
    other = ranks.train()
    assert same(other["logprob"], alone["logprob"])
    assert not same(other["head.weight.master"], alone["head.weight.master"])


def test_partial_sums_join_as_the_whole_and_no_other_order_does():
    x, w = floats((5, 1024), "bfloat16", 1), floats((7, 1024), "bfloat16", 2)
    whole = ops.gemm(x, w, dtype=torch.float32)
    for count in (2, 4, 8):
        size = 1024 // count
        cut = lambda t, i: t[:, i * size : (i + 1) * size]
        parts = [ops.gemm(cut(x, i), cut(w, i), k_offset=i * size, k_total=1024) for i in range(count)]
        assert same(parallel._tree(parts), whole)
        if count > 2:
            in_turn = parts[0]
            for part in parts[1:]:
                in_turn = in_turn + part
            assert not same(in_turn, whole)


def groups_of_four(work, groups=4):
    """The gradient of a product whose tokens are dealt to groups, 3 to each but the last."""
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(floats((8, 16), "float32", 1))})
    with samebits.torch.accumulate(model, groups=groups) as block:
        work(model["w"], block)
    return model["w"].grad


def test_groups_are_joined_as_a_tree():
    x, dy = floats((11, 16), "float32", 2), floats((11, 8), "float32", 3)

    def work(w, block):
        for group in block:
            rows = block.sequences(group, 11)
            for t in rows:
                ops.gemm(x[t : t + 1], w).backward(dy[t : t + 1])

    sums = [ops.gemm_dw(x[part], dy[part]) for part in (slice(0, 2), slice(2, 5), slice(5, 8), slice(8, 11))]
    found = groups_of_four(work)
    assert same(found, (sums[0] + sums[1]) + (sums[2] + sums[3]))
    assert not same(found, sums[0] + sums[1] + sums[2] + sums[3])
    # One that no token reached is +0.
    some = groups_of_four(lambda w, block: [ops.gemm(x[:2], w).backward(dy[:2]) for group in block if group == 2])
    assert same(some, sums[0])


def test_what_groups_cannot_be_is_refused():
    x = floats((3, 16), "float32", 2)
    with pytest.raises(ValueError, match="3 groups; use a power of two"):
        groups_of_four(None, 3)
    with pytest.raises(RuntimeError, match=r"the groups \[2, 3\] were not gone through"):
        groups_of_four(lambda w, block: [group for group, _ in zip(iter(block), range(2))])

    def late(w, block):
        kept = [ops.gemm(x, w).sum() for group in block if group == 0]
        kept[0].backward()

    with pytest.raises(RuntimeError, match="gone back through outside of its block, or twice"):
        groups_of_four(late)


def test_what_ranks_cannot_have_is_refused(monkeypatch):
    weight = torch.zeros(192, 320)
    monkeypatch.setattr(parallel, "ranks_of", lambda group: 2)
    monkeypatch.setattr(parallel.dist, "get_rank", lambda group: 1)
    for words, call in (
        ("ColumnParallelLinear: the outputs N: 192 over 2 ranks; it must be a multiple of 128 as 128 or 256, or the ranks 1",
         lambda: parallel.ColumnParallelLinear(weight)),
        ("RowParallelLinear: the inputs K: 320 over 2 ranks; it must be a multiple of 128 as 256 or 384",
         lambda: parallel.RowParallelLinear(weight)),
        ("VocabParallelEmbedding: the vocabulary V: 100 over 2 ranks; it must be a multiple of 128 as 128",
         lambda: parallel.VocabParallelEmbedding(torch.zeros(100, 8))),
        ("SelfAttention: 192 = 3 query heads of 64 over 2 ranks; use 1 ranks",
         lambda: parallel.SelfAttention(weight, weight, weight, weight, dim=64)),
        ("tokens must be 0 to 127",
         lambda: parallel.VocabParallelEmbedding(torch.zeros(128, 8))(torch.tensor([128]))),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert words in str(caught.value)
    assert parallel.ColumnParallelLinear(torch.arange(256.0)[:, None]).weight[0] == 128
    monkeypatch.setattr(parallel, "ranks_of", lambda group: 3)
    with pytest.raises(ValueError, match="3 ranks; eight segments are dealt to 1, 2, 4 or 8"):
        parallel.RowParallelLinear(torch.zeros(8, 384))
    with pytest.raises(TypeError, match="ranks exchange f32"):
        parallel.join(torch.zeros(1, dtype=torch.bfloat16))
