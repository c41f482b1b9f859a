"""GRPO with one arithmetic: a damaged adder learns to add again, and every step shows that rollout, recomputation and
training have the same bits.

    python examples/grpo.py                           # about a minute on two cores
    python examples/grpo.py --micro-batch 4 --threads 1
    torchrun --nproc-per-node 2 examples/grpo.py --ranks
    python examples/grpo.py --temperature 0.7 --top-p 0.9
    python examples/grpo.py --lora 8                  # a low-rank adapter is trained, and the model stays

The model of tests/checkpoints/qwen3-adder gets so much noise on the weights of its last layer that less than half of its
answers are right. Then each step samples answers with `samebits.Engine`, computes their log-probabilities again with the
same engine, and trains `samebits.torch.CausalLM` with the clipped policy gradient and AdamW. Before the first update on a
batch the three log-probabilities of a token are one number: the ratio is 1, the KL divergence 0, and nothing has to be
corrected: answers may be sampled from a part of the distribution, which is found again from equal logits. The last line
has the SHA-256 of the parameters, which depends neither on --micro-batch, nor on --threads, nor
on --ranks.

Exit code 1 where a bit differs, or the adder does not add again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import samebits
import samebits.torch
import torch

FOLDER = Path(__file__).resolve().parent.parent / "tests/checkpoints/qwen3-adder"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=26, help="steps of training")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--micro-batch", type=int, default=16, help="answers that share a forward")
    parser.add_argument("--threads", type=int, default=None, help="all cores without it, with --ranks a share of them")
    parser.add_argument("--groups", type=int, default=4, help="groups that a batch is dealt to; it changes the bits")
    parser.add_argument("--ranks", action="store_true", help="as a process of torchrun, each with groups of its own")
    parser.add_argument("--noise", type=float, default=3.7, help="what is added to weights, in units of their deviation")
    parser.add_argument("--lr", type=float, default=None, help="1e-4 without it, of an adapter 3e-3")
    parser.add_argument("--temperature", type=float, default=1.0, help="what answers are sampled at")
    parser.add_argument("--top-p", type=float, default=1.0, help="the share of the probability that they are sampled of")
    parser.add_argument("--lora", type=int, default=0, help="the rank of an adapter that is trained in the model's place")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--tests", type=int, default=400, help="questions that it is judged by, before and after")
    parser.add_argument("--goal", type=float, default=0.9, help="the share of right answers at the end; 0: any")
    return parser.parse_args()


def question(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randrange(100), draw.randrange(100)
    return (f"{a}+{b}=", str(a + b)) if draw.random() < 0.5 else (f"{a}-{b}=", str(a - b))


def damage(model: samebits.torch.CausalLM, noise: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        last = f"model.layers.{model.config['num_hidden_layers'] - 1}."
        for name, parameter in model.named_parameters():
            if name.startswith(last) and parameter.dim() == 2:
                parameter += torch.randn(parameter.shape, generator=generator) * parameter.std() * noise


def adapter(model: samebits.torch.CausalLM, rank: int, seed: int, folder: str) -> str:
    """A folder of PEFT with a new adapter, which changes nothing yet, of all matrices of the blocks."""
    import safetensors.torch

    generator = torch.Generator().manual_seed(seed)
    tensors, targets = {}, set()
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if ".layers." in name and parameter.dim() == 2:
            n, k = parameter.shape
            a = (torch.rand(rank, k, generator=generator) * 2 - 1) / k**0.5
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(n, rank)
            targets.add(module.rpartition(".")[2])
    how = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(targets)}
    (Path(folder) / "adapter_config.json").write_text(json.dumps(how))
    safetensors.torch.save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
    return folder


def right(engine: samebits.Engine, questions: list[tuple[str, str]]) -> float:
    """The share of questions that the likeliest answer is right for."""
    found = engine.generate([q for q, _ in questions], max_tokens=6, temperature=0.0)
    return sum(engine.text(s.tokens) == a for s, (_, a) in zip(found, questions)) / len(questions)


def words(rows: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    return rows[active].contiguous().view(torch.int32)


def main() -> int:
    args = arguments()
    started = time.perf_counter()
    rank = 0
    if args.ranks:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    # Ranks that all wait on all cores hold each other up.
    if args.ranks and args.threads is None:
        args.threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if args.threads:
        samebits.set_cpu(samebits.Cpu(threads=args.threads))
        torch.set_num_threads(args.threads)

    def say(*line: str) -> None:
        if rank == 0:
            print(*line, flush=True)

    model = samebits.torch.CausalLM.from_pretrained(args.folder)
    damage(model, args.noise, args.seed)
    beside = {}
    if args.lora:
        folder = tempfile.TemporaryDirectory()
        beside["policy"] = adapter(model, args.lora, args.seed, folder.name)
    engine = samebits.Engine(model, args.folder, batch=64, adapters=beside)
    if args.lora:
        model = samebits.torch.CausalLM(model, args.folder, adapter=beside["policy"])
    lr = args.lr or (3e-3 if args.lora else 1e-4)
    optimizer = samebits.torch.AdamW(model, lr=lr, weight_decay=0.0, max_norm=1.0)
    sampling = {"temperature": args.temperature, "top_p": args.top_p}
    draw = random.Random(args.seed)
    tests = [question(draw) for _ in range(args.tests)]
    before = right(engine, tests)
    say(f"damaged: {before:.1%} of {len(tests)} answers are right")

    for step in range(1, args.steps + 1):
        questions = [question(draw) for _ in range(args.prompts)]
        samples = engine.generate([q for q, _ in questions], args.samples, max_tokens=6, seed=step, **sampling)
        again = engine.score(samples)

        reward = torch.tensor([float(engine.text(s.tokens) == questions[s.prompt][1]) for s in samples])
        advantage = samebits.ops.group_advantage(reward.reshape(args.prompts, args.samples)).reshape(-1)
        sequences = [s.prompt_tokens + s.tokens.tolist() for s in samples]
        longest = max(map(len, sequences))
        count = torch.zeros(len(samples), longest, dtype=torch.int32)
        rollout, recomputed = torch.zeros(2, len(samples), longest)
        for row, (sample, scores) in enumerate(zip(samples, again)):
            there = slice(len(sample.prompt_tokens), len(sequences[row]))
            count[row, there] = 1
            rollout[row, there] = torch.from_numpy(sample.logprobs)
            recomputed[row, there] = torch.from_numpy(scores)
        denominator = int(count.sum())

        ranks = True if args.ranks else None
        trained = torch.zeros(len(samples), longest)
        per_sequence = torch.zeros(len(samples))
        with model.accumulate(args.groups, len(samples), ranks) as block:
            for first in range(block.mine.start, block.mine.stop, args.micro_batch):
                part = slice(first, min(first + args.micro_batch, block.mine.stop))
                # Each sample says how it was sampled.
                logprob = model.logprob(samples[part])
                width = logprob.shape[1]
                loss, per_sequence[part] = samebits.torch.policy_loss(
                    logprob, rollout[part, :width], advantage[part], count[part, :width], denominator=denominator
                )
                loss.backward()
                trained[part, :width] = logprob.detach()
        mine = torch.zeros_like(count, dtype=torch.bool)
        mine[block.mine.start : block.mine.stop] = True
        active = (count == 1) & mine
        here = words(rollout, active)
        differ = (here != words(recomputed, active)) | (here != words(trained, active))
        log_ratio = (trained - rollout)[active].double()
        totals = torch.tensor([differ.sum(), active.sum(), (log_ratio.exp() - 1 - log_ratio).sum()], dtype=torch.float64)
        if args.ranks:
            torch.distributed.all_reduce(totals)
            torch.distributed.all_reduce(per_sequence)  # every rank has +0 for the others'
        mismatch, tokens, kl = totals.tolist()
        optimizer.step()
        optimizer.zero_grad()
        engine.update(model, **({"adapter": "policy"} if args.lora else {}))
        loss = samebits.ops.batch_loss(per_sequence, groups=args.groups, denominator=denominator).item()
        say(
            f"step {step:3} reward {reward.mean():.3f} loss {loss:+.6f} norm {optimizer.norm:.3f} tokens {tokens:.0f}"
            f" mismatch {mismatch:.0f} kl {kl / tokens:g} max |log ratio| {log_ratio.abs().max():g}"
        )
        if mismatch or kl:
            say("rollout, recomputation and training differ")
            return 1
        if not 0 < tokens == denominator:
            say("tokens were left out of the comparison")
            return 1

    after = right(engine, tests)
    say(f"trained: {after:.1%} of {len(tests)} answers are right; {time.perf_counter() - started:.1f} s")
    say(f"sha256 {samebits.torch.sha256(model)}")
    if args.ranks:
        torch.distributed.destroy_process_group()
    return int(args.goal > 0 and not before < 0.5 < args.goal <= after)


if __name__ == "__main__":
    sys.exit(main())
