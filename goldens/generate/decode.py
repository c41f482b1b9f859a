#!/usr/bin/env python3
"""How far the decode of transformers is from its own prefill, and that of samebits, on the checkpoints of `tests/checkpoints`.

    python goldens/generate/decode.py --samebits PROGRAM [--checkpoints tests/checkpoints] [NAME ...]

For each checkpoint the tokens of its reference go through the bf16 model of transformers in one forward, and one at a time over
its cache; of the bf16 logits a row of a Markdown table has the share that differs and the largest difference as a share of
the largest logit. Of samebits, the f32 logits of its bf16 run that differ between `--schedule prefill` and `--schedule decode`.
Needs torch and transformers; no network.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rwkv7


def theirs(folder, tokens):
    """Prefill and decode by transformers, of rwkv7 by its package, each [B, T, V]."""
    if rwkv7.is_one(folder):
        return rwkv7.Reference(folder, torch.bfloat16).both(tokens)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        prefill = model(tokens).logits
        cache, rows = {}, []
        for at in range(tokens.shape[1]):
            out = model(tokens[:, at:at + 1], use_cache=True, **cache)
            # Models of scans alone call it otherwise.
            cache = {name: out[name] for name in ["past_key_values", "cache_params"] if name in out}
            rows.append(out.logits)
    return prefill, torch.cat(rows, dim=1)


def ours(program, folder, length):
    """How many logits of texts of this length differ, and how many there are."""
    with tempfile.TemporaryDirectory() as work:
        runs = []
        for schedule in ["prefill", "decode"]:
            out = Path(work) / f"{schedule}.safetensors"
            command = [program, "forward", "--model", folder, "--tokens", folder / "reference.safetensors", "--out", out,
                       "--schedule", schedule, "--dtype", "bf16", "--rope-length", length]
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
            (logits,) = [tensor for name, tensor in load_file(out).items() if name.startswith("logits")]
            runs.append(logits.view(torch.int32))
    return (runs[0] != runs[1]).sum().item(), runs[0].numel()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samebits", required=True, metavar="PROGRAM")
    parser.add_argument("--checkpoints", type=Path, default=Path("tests/checkpoints"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| `model_type` | checkpoint | transformers: logits that differ | by at most | samebits: logits that differ |")
    print("| --- | --- | --- | --- | --- |")
    for name in args.names or sorted(folder.name for folder in args.checkpoints.iterdir()):
        folder = args.checkpoints / name
        kind = "rwkv7" if rwkv7.is_one(folder) else json.loads((folder / "config.json").read_text())["model_type"]
        tokens = load_file(folder / "reference.safetensors")["tokens"].long()
        prefill, decode = theirs(folder, tokens)
        share = (prefill != decode).float().mean().item()
        most = (prefill.float() - decode.float()).abs().max().item() / prefill.float().abs().max().item()
        differ, count = ours(args.samebits, folder, tokens.shape[1])
        print(f"| {kind} | {name} | {share:.1%} | {most:.3f} of the largest | {differ} of {count} |", flush=True)


if __name__ == "__main__":
    main()
