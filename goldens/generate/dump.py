#!/usr/bin/env python3
"""Dumps what a model in transformers computes on the way, for `samebits trace`.

    python goldens/generate/dump.py MODEL TOKENS OUT [--dtype bf16] [--cap BYTES]
    samebits forward --model MODEL --tokens TOKENS --out logits.safetensors --dump ours.dump
    samebits trace ours.dump OUT --tolerance 0.05

TOKENS is a safetensors file with `tokens` [B, T]. The sites are those of `samebits forward --dump` that modules of
transformers have: embed, and of each layer input_norm, attention (what o_proj reads), o, mlp_norm, router, mlp and sum;
final_norm and logits. OUT appears when it is whole.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Dump:
    def __init__(self, path, cap):
        self.path, self.cap, self.written = path, cap, 0
        self.part = path.with_name(f".{path.name}.tmp")
        self.file = open(self.part, "wb")
        self.put(b'{"samebits": "dump"}\n')

    def put(self, data):
        self.written += len(data)
        if self.written > self.cap:
            raise SystemExit(f"{self.path}: would exceed {self.cap} bytes; raise --cap or pass fewer tokens")
        self.file.write(data)

    def see(self, site, values, batch):
        values = values.detach().float().reshape(batch, -1, values.shape[-1])
        tokens = [[b, t] for b in range(batch) for t in range(values.shape[1])]
        self.put((json.dumps({"site": site, "tokens": tokens, "width": values.shape[-1]}) + "\n").encode())
        self.put(values.contiguous().numpy().astype("<f4").tobytes())

    def finish(self):
        self.file.close()
        os.replace(self.part, self.path)


def hooks(model, dump, batch):
    """Shows every module's output, or input, to the dump."""

    def output(module, site):
        def see(_, __, out):
            dump.see(site, out[0] if isinstance(out, tuple) else out, batch)

        module.register_forward_hook(see)

    def read(module, site):
        module.register_forward_pre_hook(lambda _, args: dump.see(site, args[0], batch))

    output(model.model.embed_tokens, "embed")
    for i, layer in enumerate(model.model.layers):
        site = f"layers.{i}."
        output(layer.input_layernorm, site + "input_norm")
        read(layer.self_attn.o_proj, site + "attention")
        output(layer.self_attn.o_proj, site + "o")
        if hasattr(layer, "pre_feedforward_layernorm"):
            output(layer.post_attention_layernorm, site + "post_attention_norm")
            output(layer.pre_feedforward_layernorm, site + "mlp_norm")
            output(layer.mlp, site + "mlp")
            output(layer.post_feedforward_layernorm, site + "post_mlp_norm")
        else:
            output(layer.post_attention_layernorm, site + "mlp_norm")
            if hasattr(layer.mlp, "gate"):
                output(layer.mlp.gate, site + "router")
            output(layer.mlp, site + "mlp")
        output(layer, site + "sum")
    output(model.model.norm, "final_norm")
    output(model.lm_head, "logits" if not getattr(model.config, "final_logit_softcapping", None) else "uncapped")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--cap", type=int, default=8 << 30)
    args = parser.parse_args()
    tokens = load_file(args.tokens)["tokens"].long()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.dtype], attn_implementation="eager")
    dump = Dump(args.out, args.cap)
    try:
        hooks(model.eval(), dump, tokens.shape[0])
        with torch.no_grad():
            model(tokens)
        dump.finish()
    except BaseException:
        dump.file.close()
        dump.part.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
