#!/usr/bin/env python3
"""Loss curves of training by torch: AdamW in fp32, and its own mixed precision.

    python goldens/generate/training.py [--checkpoints tests/checkpoints] [--gradients tests/gradients] [--out tests/training.json]
    python goldens/generate/training.py --samebits PROGRAM      # how far its curves are from those that are recorded

The model has the config of `qwen3-adder` and fresh weights, which follow from integers (`fresh`), so that whoever holds
`samebits train` to the curves draws them again. A step is 8 sequences of gradients/qwen3-adder.safetensors in their order,
from the first again behind the last; loss, clipping and AdamW are those that `samebits train` names, by torch's own
`clip_grad_norm_` and `AdamW`. Kept are, for every seed, the losses before each of 20 steps: `fp32`, all in fp32, and
`mixed`: weights and moments in fp32; forward and backward read the weights rounded once to bf16, all of them, under
`torch.autocast` to bf16. What it reads is the bf16 model that is served in the end, as `samebits train` has it, with
the best that torch makes of it. `autocast` is kept as well: autocast alone, what users call mixed precision. It reads norms and
table in fp32, so what it trains is not what a folder in bf16 holds (a norm's weight near 1 moves by 2^-8 or not at all there). The
distance from fp32 is printed for one more way: `copy`, gradients of a model that is bf16 throughout.

Needs torch and transformers (the recorded file: torch 2.15.0, transformers 5.23.0); no network.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

SEEDS, STEPS, BATCH = 8, 20, 8
OPTIMIZER = dict(lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
MAX_NORM = 1.0


def fresh(model, seed):
    """Weights in [-1/32, 1/32) from splitmix64 of seed, number of the tensor in the order of names, and index; norms of 1."""
    with torch.no_grad():
        for number, (name, tensor) in enumerate(sorted(model.named_parameters())):
            if "norm" in name:
                tensor.fill_(1.0)
                continue
            with numpy.errstate(over="ignore"):
                z = numpy.arange(tensor.numel(), dtype=numpy.uint64) + numpy.uint64((seed << 48) + (number << 32))
                z = z + numpy.uint64(0x9E3779B97F4A7C15)
                z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
                z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
                z = z ^ (z >> numpy.uint64(31))
            values = ((z >> numpy.uint64(40)).astype(numpy.float32) - 2.0**23) / 2.0**28
            tensor.copy_(torch.from_numpy(values).view(tensor.shape))


def curve(folder, data, seed, way):
    """The losses of a run: `fp32`, `mixed`, `autocast` or `copy`."""
    config = AutoConfig.from_pretrained(folder)
    load = lambda dtype: AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model = load(torch.float32)
    fresh(model, seed)
    reader = load(torch.bfloat16 if way == "copy" else torch.float32)
    # Frequencies of rotations are no weights, and are not rounded.
    reader.model.rotary_emb = model.model.rotary_emb
    pairs = list(zip(reader.parameters(), model.parameters(), strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    losses = []
    for step in range(STEPS):
        rows = [(step * BATCH + i) % len(data["tokens"]) for i in range(BATCH)]
        tokens, mask = data["tokens"][rows].long(), data["mask"][rows].bool()
        with torch.no_grad():
            for read, weights in pairs:
                read.copy_(weights.bfloat16() if way == "mixed" else weights)
        with torch.autocast("cpu", torch.bfloat16, enabled=way in ["mixed", "autocast"]):
            logits = reader(tokens).logits
        found = logits.float().log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        loss = -(found * mask[:, 1:]).sum() / mask.sum()
        reader.zero_grad()
        loss.backward()
        for read, weights in pairs:
            weights.grad = read.grad.float()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


def of_samebits(program, folder, gradients, seed, dtype):
    """The losses of `samebits train` from the same weights."""
    with tempfile.TemporaryDirectory() as work:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        fresh(model, seed)
        model.save_pretrained(f"{work}/model")
        command = [program, "train", "--model", f"{work}/model", "--data", gradients, "--out", f"{work}/out", "--steps", STEPS,
                   "--batch", BATCH, "--save-every", STEPS, "--lr", OPTIMIZER["lr"], "--weight-decay",
                   OPTIMIZER["weight_decay"], "--micro-batch", BATCH, "--dtype", dtype]
        printed = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
    return [float(line.split()[3]) for line in printed.splitlines()]


def compare(program, folder, gradients, recorded):
    """Prints distances from torch's fp32 over all seeds: root mean squares, and the largest."""
    apart = {}
    for run in json.loads(recorded.read_text())["runs"]:
        curves = {way: run[way] for way in ["mixed", "autocast"]}
        curves |= {f"samebits {d}": of_samebits(program, folder, gradients, run["seed"], d) for d in ["bf16", "fp32"]}
        for way, curve in curves.items():
            apart.setdefault(way, []).extend(a - b for a, b in zip(curve, run["fp32"], strict=True))
    for way, all in apart.items():
        print(f"{way}: {(sum(x * x for x in all) / len(all)) ** 0.5:.2e} from fp32, at most {max(map(abs, all)):.2e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("tests/checkpoints"))
    parser.add_argument("--gradients", type=Path, default=Path("tests/gradients"))
    parser.add_argument("--out", type=Path, default=Path("tests/training.json"))
    parser.add_argument("--samebits", metavar="PROGRAM")
    args = parser.parse_args()
    torch.set_num_threads(1)
    name = "qwen3-adder"
    if args.samebits:
        return compare(args.samebits, args.checkpoints / name, args.gradients / f"{name}.safetensors", args.out)
    data = load_file(args.gradients / f"{name}.safetensors")
    runs = []
    for seed in range(SEEDS):
        found = {way: curve(args.checkpoints / name, data, seed, way) for way in ["fp32", "mixed", "autocast", "copy"]}
        for way in ["mixed", "autocast", "copy"]:
            apart = [a - b for a, b in zip(found[way], found["fp32"])]
            rms = (sum(x * x for x in apart) / STEPS) ** 0.5
            print(f"seed {seed} {way}: {rms:.2e} from fp32, at most {max(map(abs, apart)):.2e}; "
                  f"loss {found['fp32'][0]:.4f} to {found['fp32'][-1]:.4f}", flush=True)
        runs.append({"seed": seed, **{way: found[way] for way in ["fp32", "mixed", "autocast"]}})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    lines = ",\n".join(json.dumps(run) for run in runs)
    args.out.write_text(f'{{"versions": {json.dumps(versions)}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
