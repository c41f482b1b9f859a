#!/usr/bin/env python3
"""Adapters of the tiny checkpoints as PEFT saves them, with PEFT's logits and gradients beside them.

    python goldens/generate/adapters.py [--checkpoints tests/checkpoints] [--out tests/adapters] [NAME ...]

For every name a PEFT folder, and in it reference.safetensors: `tokens` I32 [B, T]; `logits.fp32` of the model in fp32, and
`logits.bf16`, F32 of the model in bf16 with the adapter in fp32, as PEFT has it; `loss`, minus the mean log-probability of all
tokens but first ones, and its gradients by the names of the adapter's tensors, in fp32. Needs torch, transformers and peft (the
recorded files: torch 2.15.0, transformers 5.23.0, peft 0.21.2); no network.
"""

import argparse
import json
import shutil
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from peft.utils import transformers_weight_conversion
from transformers import AutoModelForCausalLM

# The model, and what its adapter is made with: ranks and factors of single modules, names, patterns, blocks, all that is linear.
ADAPTERS = {
    "qwen3": ("qwen3", dict(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
                            rank_pattern={"q_proj": 6, "layers.1.mlp.down_proj": 2}, alpha_pattern={"k_proj": 2.5})),
    "qwen3-other": ("qwen3", dict(r=2, lora_alpha=5, target_modules="all-linear", exclude_modules=["o_proj"])),
    "phi3-partial": ("phi3-partial", dict(r=3, lora_alpha=4, target_modules=r"model\.layers\.(?!1\.).*\.(qkv_proj|gate_up_proj|down_proj)")),
    "gpt2": ("gpt2", dict(r=3, lora_alpha=4, target_modules=["c_attn", "c_fc", "c_proj"], layers_to_transform=[0, 1], layers_pattern="h", fan_in_fan_out=True)),
    "deepseek-v3": ("deepseek-v3", dict(r=3, lora_alpha=4, target_modules=r".*\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|shared_experts\.(gate|up|down)_proj)")),
}


# Where a model has routed experts PEFT takes theirs for the matrices of any MLP that is named; folders of earlier versions have
# shared experts alone.
transformers_weight_conversion._convert_peft_config_moe = lambda config, model: None


def random(model, seed):
    """Gives every matrix of the adapter elements of its own: B begins with zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.named_parameters()):
        if "lora_" in name:
            tensor.data = torch.randn(tensor.shape, generator=generator) * (0.2 if "lora_A" in name else 0.1)


def make(checkpoint, how, folder, seed):
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    vocab, layers = base.config.vocab_size, base.config.num_hidden_layers
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **how)).eval()
    random(model, seed)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = checkpoint.name
    # Sets have no order.
    for name in ("target_modules", "exclude_modules"):
        if isinstance(config.get(name), list):
            config[name].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

    tokens = torch.randint(3, vocab, (4, 11), generator=torch.Generator().manual_seed(seed + 1))
    loaded = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").eval()
        loaded[name] = peft.PeftModel.from_pretrained(base, folder, is_trainable=name == "fp32").eval()
        assert all(tensor.dtype == torch.float32 for part, tensor in loaded[name].named_parameters() if "lora_" in part)
    logits = loaded["fp32"](tokens).logits
    logprob = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, tokens[:, 1:, None])
    loss = -logprob.mean()
    loss.backward()
    with torch.no_grad():
        recorded = {"tokens": tokens.int(), "logits.fp32": logits.detach(), "logits.bf16": loaded["bf16"](tokens).logits.float(), "loss": loss.detach().reshape(1)}
    for name, tensor in loaded["fp32"].named_parameters():
        if "lora_" in name:
            recorded[name.replace(".default.", ".")] = tensor.grad
    missing = set(load_file(folder / "adapter_model.safetensors")) - set(recorded)
    assert not missing, missing
    versions = {module.__name__: module.__version__ for module in (peft, torch, transformers)}
    save_file({name: tensor.contiguous() for name, tensor in recorded.items()}, folder / "reference.safetensors", versions)
    print(folder.name, layers, "layers,", len(recorded) - 4, "matrices, loss", float(loss))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("tests/checkpoints"))
    parser.add_argument("--out", type=Path, default=Path("tests/adapters"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    for seed, (name, (checkpoint, how)) in enumerate(ADAPTERS.items()):
        if not given.names or name in given.names:
            make(given.checkpoints / checkpoint, how, given.out / name, 10 * seed)


if __name__ == "__main__":
    main()
