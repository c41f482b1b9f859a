"""What torchrun starts for test_parallel.py: a small model over every TP x DP that fits the processes; rank 0 prints the
SHA-256 of its logits, log-probabilities and parameters after five steps, by combination, as JSON.
"""

import hashlib
import json

import samebits.torch
import torch
import torch.distributed as dist
from samebits.torch import parallel

ops = samebits.torch.ops

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM, INNER, LAYERS = 256, 48, 16, 8, 16, 256, 2
SEQUENCES, TOKENS, GROUPS, STEPS = 20, 9, 8, 5


def weight(*shape, seed, scale=0.2):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


class Block(torch.nn.Module):
    def __init__(self, seed, group):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(1 + weight(WIDTH, seed=seed + i)) for i in (0, 1))
        wq = weight(HEADS * DIM, WIDTH, seed=seed + 2)
        wk, wv = (weight(KV_HEADS * DIM, WIDTH, seed=seed + i) for i in (3, 4))
        wo = weight(WIDTH, HEADS * DIM, seed=seed + 5, scale=0.05)
        self.attention = parallel.SelfAttention(wq, wk, wv, wo, dim=DIM, theta=1e4, group=group)
        up, gate = (weight(INNER, WIDTH, seed=seed + i) for i in (6, 7))
        self.gate = parallel.ColumnParallelLinear(gate, weight(INNER, seed=seed + 8), group)
        self.up = parallel.ColumnParallelLinear(up, weight(INNER, seed=seed + 9), group)
        down, bias = weight(WIDTH, INNER, seed=seed + 10, scale=0.05), weight(WIDTH, seed=seed + 11)
        self.down = parallel.RowParallelLinear(down, bias, group)

    def forward(self, x, length):
        x = ops.add(x, self.attention(ops.rms_norm(x, self.first), length))
        h = ops.rms_norm(x, self.second)
        return ops.add(x, self.down(ops.silu_mul(self.gate(h), self.up(h))))


class Model(torch.nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.table = parallel.VocabParallelEmbedding(weight(VOCABULARY, WIDTH, seed=1), group)
        self.blocks = torch.nn.ModuleList(Block(100 * (i + 1), group) for i in range(LAYERS))
        self.norm = torch.nn.Parameter(1 + weight(WIDTH, seed=2))
        self.head = parallel.ColumnParallelLinear(weight(VOCABULARY, WIDTH, seed=3), group=group)

    def hidden(self, tokens, length):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, length)
        return ops.rms_norm(x, self.norm)

    def logprob(self, tokens, target, length):
        return parallel.linear_logprob(self.hidden(tokens, length), self.head.weight, target, group=self.group)[0]


def data():
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS + 1), generator=generator, dtype=torch.int32)
    length = torch.randint(3, TOKENS + 1, (SEQUENCES,), generator=generator, dtype=torch.int32)
    target = tokens[:, 1:].where(torch.arange(TOKENS) < length[:, None] - 1, -1)
    return tokens[:, :-1].contiguous(), target.contiguous(), length


def train(tensor_parallel=None, data_parallel=None, micro_batch=2):
    """The tensors whose bits must be the same."""
    model, (tokens, target, length) = Model(tensor_parallel), data()
    found = {}
    with torch.no_grad():
        logits = model.head(model.hidden(tokens, length))
        found["logits"] = parallel.gather(logits, -1, tensor_parallel)
        found["logprob"] = model.logprob(tokens, target, length)
    masters = {name: (p.detach().float(), *torch.zeros(2, *p.shape)) for name, p in model.named_parameters()}
    for step in range(1, STEPS + 1):
        with samebits.torch.accumulate(model, groups=GROUPS, ranks=data_parallel) as block:
            for group in block:
                mine = block.sequences(group, SEQUENCES)
                for begin in range(mine.start, mine.stop, micro_batch):
                    part = slice(begin, min(begin + micro_batch, mine.stop))
                    logprob = model.logprob(tokens[part], target[part], length[part])
                    logprob.backward(torch.full_like(logprob, -1 / SEQUENCES))
        for name, parameter in model.named_parameters():
            w, m, v = masters[name]
            gradient = parameter.grad.float()
            w, m, v, rounded = ops.adamw(w, m, v, gradient, lr=1e-2, step=step, dtype=torch.bfloat16)
            masters[name] = (w, m, v)
            parameter.data.copy_(rounded)
            parameter.grad = None
    found |= parallel.whole_state(model)
    axes = {name: (getattr(p, "split_axis", None), getattr(p, "split_group", None)) for name, p in model.named_parameters()}
    for name, (w, _, _) in masters.items():
        axis, group = axes[name]
        found[f"{name}.master"] = w if axis is None else parallel.gather(w, axis, group)
    return found


def sha256(found):
    digest = hashlib.sha256()
    for name in sorted(found):
        tensor = found[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def combinations(world):
    """(tensor-parallel, data-parallel) sizes that fill the processes."""
    return [(size, world // size) for size in (1, 2, 4, 8) if world % size == 0 and world // size <= GROUPS]


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    samebits.set_cpu(samebits.Cpu(threads=1))
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for tensor, replicas in combinations(world):
        # Every rank makes every group.
        tensors = [dist.new_group(range(i * tensor, (i + 1) * tensor)) for i in range(replicas)]
        datas = [dist.new_group(range(i, world, tensor)) for i in range(tensor)]
        digest = sha256(train(tensors[rank // tensor], datas[rank % tensor]))
        everywhere = [None] * world
        dist.all_gather_object(everywhere, digest)
        found[f"{tensor}x{replicas}"] = sorted(set(everywhere))
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
