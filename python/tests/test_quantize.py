"""`samebits quantize`: blocks as the package gguf makes them, folders that transformers loads, and the same model behind --model."""

import json
import shutil

import gguf
import numpy as np
import pytest
import samebits
import torch
from safetensors.torch import load_file, save_file
from test_causal_lm import command
from test_engine import CHECKPOINTS, told
from transformers import AutoConfig, AutoModelForCausalLM

HOW = {"max_tokens": 8, "temperature": 1.0, "seed": 5, "ignore_eos": True}
PROMPTS = [[3, 14, 15, 9, 2, 6], [5, 35]]


def wide(name, folder):
    """A checkpoint's family with rows of 256, which all blocks fill, with random weights."""
    config = AutoConfig.from_pretrained(CHECKPOINTS / name)
    config.hidden_size, config.intermediate_size, config.dtype = 256, 512, torch.bfloat16
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 2, 32
    for of_experts in ["moe_intermediate_size", "shared_expert_intermediate_size"]:
        if hasattr(config, of_experts):
            setattr(config, of_experts, 64)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def of_file(file):
    """Tensors of a GGUF file: their kinds, and their numbers."""
    return {t.name: (t.tensor_type.name, gguf.quants.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(file).tensors}


def named(name):
    """What a file calls a tensor of a folder of Qwen 3."""
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inside = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    stem = name.removesuffix(".weight")
    if stem in outside:
        return f"{outside[stem]}.weight"
    _, _, block, part = stem.split(".", 3)
    return f"blk.{block}.{inside[part]}.weight"


def fails(*arguments):
    """What the command says of what it refuses."""
    with pytest.raises(Exception) as told:
        command(*arguments)
    return str(getattr(told.value, "stderr", "") or told.value)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_a_file_has_the_blocks_of_the_package(tmp_path, kind):
    folder, file = wide("qwen3", tmp_path / "wide"), tmp_path / "model.gguf"
    command("quantize", "--model", folder, "--to", kind, "--out", file)
    found, weights = of_file(file), load_file(folder / "model.safetensors")
    assert set(found) == {named(name) for name in weights}
    for name, x in weights.items():
        stored, numbers = found[named(name)]
        x = x.float().numpy()
        if x.ndim == 1:
            assert stored == "F32" and np.array_equal(numbers, x)
        elif kind == "q8_0":
            of_package = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
            wanted = gguf.quants.dequantize(of_package, gguf.GGMLQuantizationType.Q8_0)
            assert stored == "Q8_0" and np.array_equal(numbers.view(np.int32), wanted.view(np.int32)), name
        else:
            # The package makes none of these. Sixteen steps over each 32 numbers, plainly, are off by more.
            assert stored == "Q4_K"
            groups = x.reshape(-1, 32)
            low, high = np.minimum(groups.min(1, keepdims=True), 0), groups.max(1, keepdims=True)
            steps = np.maximum(high - low, 1e-30) / 15
            plain = np.round((groups - low) / steps) * steps + low
            off, plainly = (np.sqrt(np.mean((y.reshape(x.shape) - x) ** 2)) for y in (numbers, plain))
            assert off < 0.97 * plainly, (name, off, plainly)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3-moe", "mixtral", "qwen2-moe"])
def test_a_file_is_the_folder_that_it_is_of(tmp_path, name):
    """Of numbers that are those of blocks already, so that nothing is lost."""
    folder, file, again = tmp_path / "folder", tmp_path / "model.gguf", tmp_path / "again.gguf"
    wide(name, folder)
    numbers = {}
    for tensor, x in load_file(folder / "model.safetensors").items():
        numbers[tensor] = x.float()
        if x.ndim == 2 and x.shape[1] % 32 == 0:
            blocks = gguf.quants.quantize(x.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
            numbers[tensor] = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    save_file(numbers, folder / "model.safetensors")
    command("quantize", "--model", folder, "--to", "q8_0", "--out", file)
    if name == "llama":
        command("quantize", "--model", folder, "--to", "q8_0", "--out", again)
        assert file.read_bytes() == again.read_bytes()
    assert {kind for kind, _ in of_file(file).values()} >= {"Q8_0", "F32"}
    for dtype in ["fp32", "bf16"]:
        found, wanted = (told(samebits.Engine(model, dtype=dtype).generate(PROMPTS, 2, **HOW)) for model in (file, folder))
        assert found == wanted and len(found) == 4


def test_transformers_loads_an_int8_folder(tmp_path):
    pytest.importorskip("compressed_tensors")
    source, folder, plain = wide("qwen3", tmp_path / "wide"), tmp_path / "int8", tmp_path / "plain"
    command("quantize", "--model", source, "--to", "int8", "--out", folder)
    stored, numbers = load_file(folder / "model.safetensors"), {}
    for name, x in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(stored[name], x)
            numbers[name] = x.float()
            continue
        scale = stored[f"{name}_scale"].float()
        assert torch.equal(scale, (x.float().abs().amax(1, keepdim=True) / 127).bfloat16().float())
        numbers[name] = stored[name].float() * scale
        assert stored[name].dtype == torch.int8 and ((numbers[name] - x.float()).abs() <= 0.51 * scale + 0.01 * x.float().abs()).all()
    shutil.copytree(source, plain)
    save_file(numbers, plain / "model.safetensors")
    for dtype in ["fp32", "bf16"]:
        found, wanted = (told(samebits.Engine(model, dtype=dtype).generate(PROMPTS, 2, **HOW)) for model in (folder, plain))
        assert found == wanted
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        ours = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(tokens).logits
    assert (theirs - ours).abs().max() <= 1e-4 * ours.abs().max()


def test_what_cannot_be_quantised_is_refused_by_name(tmp_path):
    out = tmp_path / "model.gguf"
    told = fails("quantize", "--model", CHECKPOINTS / "gemma2", "--to", "q8_0", "--out", out)
    assert "`model_type`" in told and "`gemma2`" in told
    assert "must end in .gguf" in fails("quantize", "--model", CHECKPOINTS / "llama", "--to", "q8_0", "--out", tmp_path / "model")
    told = fails("quantize", "--model", CHECKPOINTS / "gpt2", "--to", "int8", "--out", tmp_path / "gpt2")
    assert "no matrix that is stored by its rows" in told
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert "new or empty" in fails("quantize", "--model", CHECKPOINTS / "llama", "--to", "int8", "--out", tmp_path / "full")
    command("quantize", "--model", CHECKPOINTS / "llama", "--to", "int8", "--out", tmp_path / "int8")
    told = fails("quantize", "--model", tmp_path / "int8", "--to", "int8", "--out", tmp_path / "twice")
    assert "quantised already" in told
    # A sliding window is none of this architecture's metadata.
    windowed = tmp_path / "windowed"
    shutil.copytree(CHECKPOINTS / "qwen2", windowed)
    config = json.loads((windowed / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None}
    (windowed / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    told = fails("quantize", "--model", windowed, "--to", "q8_0", "--out", out)
    assert "does not say" in told and not out.exists()


def test_numbers_that_no_scale_holds_are_refused_by_tensor(tmp_path):
    shutil.copytree(CHECKPOINTS / "llama", tmp_path / "large")
    tensors = load_file(tmp_path / "large/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 9e6
    save_file(tensors, tmp_path / "large/model.safetensors", {"format": "pt"})
    line = fails("quantize", "--model", tmp_path / "large", "--to", "q8_0", "--out", tmp_path / "large.gguf")
    assert "`model.layers.1.mlp.up_proj.weight` holds 8.978432e6" in line and "use int8" in line and not (tmp_path / "large.gguf").exists()
    command("quantize", "--model", tmp_path / "large", "--to", "int8", "--out", tmp_path / "int8")
