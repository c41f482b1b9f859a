#!/usr/bin/env python3
"""Gradients of the tiny checkpoints by torch's autograd in fp32, and how far its bf16 is from them.

    python goldens/generate/gradients.py [--checkpoints tests/checkpoints] [--out tests/gradients] [NAME ...]

For every checkpoint a file NAME.safetensors, an input of `samebits grad`: `tokens` and `mask` I32 [64, T], `advantages` F32 [64]
and `old_logprob` F32 [64, T], 8 batches of 8 sequences each; and for each loss what is expected of every batch. Whole
gradients would be larger than the models, so one of more than 160 elements is kept as a sketch: 16 inner products with
vectors of +1 and -1 that follow from the index of an element and the number of the vector (`signs`). A sketch is linear,
and the mean of its squares estimates the squared length of what was sketched: the sketch of an error is the error's.
Kept are, under LOSS.PARAMETER, [8, n + 2]: of each batch the fp32 gradient or its sketch, its length, and the length of
the error of the bf16 gradient, both exact. LOSS.loss [8], LOSS.per_sequence [64] and LOSS.logprob [64, T] are those of fp32.

One error of one vector is a single draw, which may be long or short by chance; hence several batches. The losses are
computed from the log-softmax of f32 logits in both runs. In mixtures, sequences are drawn until both runs choose the same
experts, and fp32 runs with noise do: then an error is one of rounding, not of another choice. Needs torch and
transformers (the recorded files: torch 2.15.0, transformers 5.23.0); no network.
"""

import argparse
from pathlib import Path

import numpy
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import checkpoints
import rwkv7

SKETCH, WHOLE, BATCHES, SEQUENCES = 16, 160, 8, 64
# The coefficient of the loss `policy_entropy`, which is recorded of these.
ENTROPY, WITH_ENTROPY = 0.02, ("gemma2", "qwen3", "qwen3-moe")
# The one of phi3 is beyond its original positions.
LENGTHS = {"phi3": 36, "mixtral": 12, "olmoe": 12, "qwen3-moe": 12, "qwen2-moe": 11, "granite-moe": 12, "granite-4-moe": 10, "nemotron-3": 16, "nemotron-3-latent": 10, "hunyuan-moe": 12, "glm4-moe": 12,
           "minimax-m2": 12, "gpt-oss": 12, "ernie4-5-moe": 12, "llama4": 12, "gemma4-moe": 12, "phimoe": 8, "dots1": 12, "lfm2-moe": 10, "jamba": 10, "qwen3-next": 12, "qwen3-5-moe": 12, "kimi-linear": 12, "deepseek-v2": 12, "deepseek-v3": 12, "deepseek-v3-2": 10}
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}


def signs(count):
    """[SKETCH, count] of +1 and -1: of bit number row of splitmix64(index)."""
    with numpy.errstate(over="ignore"):
        z = numpy.arange(count, dtype=numpy.uint64) + numpy.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        z = z ^ (z >> numpy.uint64(31))
    rows = numpy.arange(SKETCH, dtype=numpy.uint64)[:, None]
    return torch.from_numpy(numpy.where((z[None, :] >> rows) & numpy.uint64(1), -1.0, 1.0))


def load(folder, dtype):
    if rwkv7.is_one(folder):
        return rwkv7.Model(folder, dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def run(model, data, loss):
    """Loss, its sum by sequence, log-probabilities and gradients by name."""
    tokens, mask = data["tokens"].long(), data["mask"].bool()
    model.zero_grad()
    logprob, entropy = logprobs(model, tokens)
    if loss == "nll":
        value = -logprob
    else:
        ratio = (logprob - data["old_logprob"]).exp()
        advantages = data["advantages"][:, None]
        value = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if loss == "policy_entropy":
        value = value - ENTROPY * entropy
    value = torch.where(mask, value, torch.zeros(()))
    total = value.sum() / mask.sum()
    total.backward()
    gradients = {name: (torch.zeros(p.shape) if p.grad is None else p.grad.float()).double()
                 for name, p in model.named_parameters()}
    return total.detach()[None], value.sum(1).detach(), logprob.detach(), gradients


def split(model, folder, gradients):
    """Gradients of fused experts as those of the tensors in the folder."""
    stored = load_file(folder / "model.safetensors")
    if rwkv7.is_one(folder):
        return gradients
    family = model.config.model_type
    # Mixtral's names, and those of what is like it.
    mixtral = family in ("mixtral", "minimax_m2", "phimoe")
    gate, up, down = ("w1", "w3", "w2") if mixtral or family in ("lfm2_moe", "kimi_linear") else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, gradient in gradients.items():
        if name.endswith("e_score_correction_bias"):
            continue
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.").replace(".router.", ".gate.")
        base = name.rsplit(".", 1)[0]
        if family == "olmo_hybrid" and name.split(".")[1] == "layers":
            recurs = model.config.layer_types[int(name.split(".")[2])] == "linear_attention"
            for module, stem in [("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm")]:
                name = name.replace(module, stem) if recurs else name
        if family == "kimi_linear":
            name = name.replace("forget_gate.", "")
            if name.split(".")[1] == "layers" and model.config.mlp_layer_types[int(name.split(".")[2])] == "sparse":
                name = name.replace(".mlp.", ".block_sparse_moe.")
            base = name.rsplit(".", 1)[0]
        if family in ("olmo_hybrid", "kimi_linear"):
            if name.endswith("attn.conv1d.weight"):
                parts = [name.replace("conv1d", f"{of}_conv1d") for of in "qkv"]
                found |= dict(zip(parts, gradient.split([len(stored[part]) for part in parts])))
                continue
        if family in ("granitemoe", "granitemoehybrid"):
            for module, stem in [("experts.gate_up_proj", "input_linear.weight"), ("experts.down_proj", "output_linear.weight"),
                                 ("router.weight", "router.layer.weight")]:
                name = name.replace(f"block_sparse_moe.{module}", f"block_sparse_moe.{stem}")
            found[name] = gradient
        elif family in ("gpt_oss", "llama4_text", "gemma4_text"):
            found[name] = gradient
        elif family == "nemotron_h" and ".experts." in name:
            base, matrix = base.replace("model.", "backbone.", 1), name.rsplit(".", 1)[1]
            found |= {f"{base}.{expert}.{matrix}.weight": of_one for expert, of_one in enumerate(gradient)}
        elif ".experts.gate_up_proj" in name:
            for expert in range(gradient.shape[0]):
                found[f"{base}.{expert}.{gate}.weight"], found[f"{base}.{expert}.{up}.weight"] = gradient[expert].chunk(2)
        elif ".experts.down_proj" in name:
            for expert in range(gradient.shape[0]):
                found[f"{base}.{expert}.{down}.weight"] = gradient[expert]
        else:
            if family == "nemotron_h":
                name = name.replace("model.", "backbone.", 1)
            if family == "gpt_neox":
                name = name.replace("lm_head.", "embed_out.")
            found[name] = gradient
    for name, gradient in found.items():
        assert name in stored and stored[name].shape == gradient.shape, name
    missing = set(stored) - set(found)
    assert all(name.endswith(("e_score_correction_bias", "expert_bias", "act_fn.beta", "act_fn.eps", "layer_scalar")) for name in missing), missing
    return found


def inputs(name, folder):
    """Sequences whose experts, in mixtures, are the same in bf16 and under noise of the size of its rounding."""
    model, low = load(folder, torch.float32), load(folder, torch.bfloat16)
    generator = torch.Generator().manual_seed(7)
    length, vocab = LENGTHS.get(name, 20), model.config.vocab_size
    kept = []
    while len(kept) < SEQUENCES:
        tokens = torch.randint(3, vocab, (1, length), generator=generator)
        if name == "qwen3-adder":
            tokens = addition(generator)
        expected = routing(model, tokens)
        if expected is None or torch.equal(expected, routing(low, tokens)) and all(
                torch.equal(expected, routing(model, tokens, generator)) for _ in range(6)):
            kept.append(tokens)
    return with_loss(model, torch.cat(kept), generator)


def with_loss(model, tokens, generator):
    """Sequences with a mask, advantages, and log-probabilities when they were sampled."""
    count, length = tokens.shape
    mask = (torch.rand(tokens.shape, generator=generator) < 0.7).int()
    mask[:, 0] = 0
    # The prompt of the second and the end of the third do not count.
    mask[1, : length // 2] = 0
    mask[2, -length // 3:] = 0
    data = {"tokens": tokens.int(), "mask": mask, "advantages": torch.randn(count, generator=generator)}
    with torch.no_grad():
        logprob, _ = logprobs(model, tokens)
    noise = torch.randn(tokens.shape, generator=generator) * 0.3
    # Far from where ratios are clipped: there a rounding would decide which tokens have a gradient.
    near = ((noise + numpy.log(1.2)).abs() < 0.12) | ((noise + numpy.log(0.8)).abs() < 0.12)
    noise = torch.where(near, torch.zeros(()), noise)
    data["old_logprob"] = (logprob + noise) * mask
    return data


def addition(generator):
    """A text that the one trained checkpoint knows: at others its log-probabilities are far too low to have an accuracy."""
    a, b = torch.randint(50, 100, (2,), generator=generator).tolist()
    return torch.tensor([[1] + [3 + "0123456789+-=".index(letter) for letter in f"{a}+{b}={a + b}"]])


def logprobs(model, tokens):
    """[B, T] each: of each token given those before it, and the entropy of what it was drawn from."""
    found, entropy = torch.zeros(tokens.shape), torch.zeros(tokens.shape)
    logp = model(tokens, use_cache=False).logits.float().log_softmax(-1)[:, :-1]
    found[:, 1:] = logp.gather(-1, tokens[:, 1:, None])[..., 0]
    entropy[:, 1:] = -(logp.exp() * logp).sum(-1)
    return found, entropy


def routing(model, tokens, noise=None):
    """The experts that every router chose, in ascending order; with `noise`, of a run with noise in every layer."""
    chosen, hooks = checkpoints.Choices(), []
    indexes = model.config.model_type == "deepseek_v32"
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith(checkpoints.ROUTERS):
            hooks.append(module.register_forward_hook(chosen.note))
        elif noise and (kind.endswith("DecoderLayer") or indexes and kind == "Embedding"):
            disturb = lambda module, args, out: out * (1 + torch.randn(out.shape, generator=noise) / 64)
            hooks.append(module.register_forward_hook(disturb))
        # Sigmoid scores lie close to one another, logits to what sparsemixer leaves out, and the first router stands before the first layer's end.
        elif noise and kind in ("MiniMaxM2Attention", "PhimoeAttention", "Gemma4TextAttention"):
            disturb = lambda module, args, out: (out[0] * (1 + torch.randn(out[0].shape, generator=noise) / 64), *out[1:])
            hooks.append(module.register_forward_hook(disturb))
    with torch.no_grad():
        model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return chosen.all(tokens.shape[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("tests/checkpoints"))
    parser.add_argument("--out", type=Path, default=Path("tests/gradients"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(exist_ok=True)
    for name in args.names or sorted(folder.name for folder in args.checkpoints.iterdir()):
        folder = args.checkpoints / name
        data = inputs(name, folder)
        kept = {}
        models = {dtype: load(folder, dtype) for dtype in [torch.float32, torch.bfloat16]}
        for loss in ["nll", "policy"] + ["policy_entropy"] * (name in WITH_ENTROPY):
            for first in range(0, SEQUENCES, SEQUENCES // BATCHES):
                batch = {key: value[first:first + SEQUENCES // BATCHES] for key, value in data.items()}
                *values, exact = run(models[torch.float32], batch, loss)
                exact = split(models[torch.float32], folder, exact)
                low = split(models[torch.bfloat16], folder, run(models[torch.bfloat16], batch, loss)[3])
                for key, value in zip(["loss", "per_sequence", "logprob"], values):
                    kept.setdefault(f"{loss}.{key}", []).append(value)
                for parameter, gradient in exact.items():
                    error = (low[parameter] - gradient).norm()
                    flat = gradient.flatten()
                    flat = flat if len(flat) <= WHOLE else signs(len(flat)) @ flat
                    row = torch.cat([flat, torch.stack([gradient.norm(), error])]).float()[None]
                    kept.setdefault(f"{loss}.{parameter}", []).append(row)
        kept = data | {key: torch.cat(values).contiguous() for key, values in kept.items()}
        path = args.out / f"{name}.safetensors"
        save_file({key: value.contiguous() for key, value in kept.items()}, path, metadata=VERSIONS)
        print(f"{name}: {len(kept)} tensors, {path.stat().st_size // 1024} KiB", flush=True)


if __name__ == "__main__":
    main()
