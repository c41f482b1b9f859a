#!/usr/bin/env python3
"""Times a whole training step (forward, backward, clip, AdamW) of `samebits train` beside transformers.

    python impls/torch/training.py --samebits target/release/samebits [--dir FOLDER] [--rounds 2] [--steps 4] [--threads 2]
                                   [--ways bf16,fp32,autocast] [--isa avx512bf16]

Makes a folder of the shape of Qwen2.5-0.5B with random weights and a file of 16 sequences of 256 tokens where FOLDER lacks
them, then runs every program in turn, each in a process of its own: `samebits train` and torch's AdamW on transformers'
model, 4 sequences a step. Prints seconds of each step but the first, which warms up, and the largest resident memory of the
process (ru_maxrss, loading included). Ways of torch: `bf16`, weights, gradients and moments in bf16; `fp32`, all in fp32;
`autocast`, fp32 with products in bf16. Only the last two keep what `samebits train` keeps: weights and moments in fp32.
--isa holds torch's products to an instruction set by ONEDNN_MAX_CPU_ISA, as harness/workloads.toml does; without it they
may use AMX. Needs torch, transformers and safetensors (tried with torch 2.15.0, transformers 5.23.0).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPE = dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
             num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-6, tie_word_embeddings=True)
BATCH, LENGTH, SEQUENCES = 4, 256, 16
ISAS = {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512bf16": "AVX512_CORE_BF16"}


def make(folder):
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.safetensors").exists():
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    tokens = torch.randint(0, SHAPE["vocab_size"], (SEQUENCES, LENGTH), dtype=torch.int32)
    save_file({"tokens": tokens}, folder / "data.safetensors")


def train(folder, way, steps, threads):
    """The peer: seconds of each step, one a line."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if way == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    data = load_file(folder / "data.safetensors")["tokens"].long()
    for step in range(steps):
        tokens = data[[(step * BATCH + i) % SEQUENCES for i in range(BATCH)]]
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f} in {time.perf_counter() - start:.3f} s", flush=True)


def timed(name, command, environment):
    """Runs a program that prints `.. in SECONDS s ..` for each step."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env=os.environ | environment)
    lines = process.stdout.read().splitlines()
    _, status, used = os.wait4(process.pid, 0)
    seconds = [float(line.split(" in ")[1].split()[0]) for line in lines if line.startswith("step ") and " in " in line]
    if status or len(seconds) < 2:
        sys.exit("\n".join(lines) + f"\n{name}: ended with status {status}")
    kept = sorted(seconds[1:])
    print(f"{name}: median {kept[len(kept) // 2]:.2f} s ({kept[0]:.2f} to {kept[-1]:.2f}) of {len(kept)} steps, "
          f"{used.ru_maxrss / 1e6:.2f} GB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samebits", type=Path)
    parser.add_argument("--dir", type=Path, default=Path("target/training"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", default="bf16,fp32,autocast")
    parser.add_argument("--isa", choices=ISAS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return train(args.dir, args.peer, args.steps, args.threads)
    if not (args.dir / "data.safetensors").exists():
        make(args.dir)
    words = ["--dir", args.dir, "--steps", str(args.steps), "--threads", str(args.threads)]
    held = {"ONEDNN_MAX_CPU_ISA": ISAS[args.isa]} if args.isa else {}
    for _ in range(args.rounds):
        if args.samebits:
            with tempfile.TemporaryDirectory(dir=args.dir) as out:
                command = [args.samebits, "train", "--model", args.dir, "--data", args.dir / "data.safetensors",
                           "--batch", str(BATCH), "--micro-batch", str(BATCH), "--steps", str(args.steps), "--threads",
                           str(args.threads), "--save-every", str(args.steps), "--times", "--out", f"{out}/run"]
                timed("samebits", command, {})
        for way in filter(None, args.ways.split(",")):
            timed(f"torch {way}", [sys.executable, __file__, "--peer", way, *words], held)


if __name__ == "__main__":
    main()
