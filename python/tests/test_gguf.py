"""GGUF files, written by llama.cpp's own package: the samples of a folder with the numbers that the package makes of them."""

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import samebits
import torch
from safetensors.torch import load_file, save_file
from test_engine import CHECKPOINTS, told
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2-moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3moe",
}
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"]
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def pairs(x, heads):
    """Rows of q and k as llama.cpp has them for architecture llama."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def unpaired(x, heads):
    """The rows again as a folder has them."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def write(name, kind, file, folder, skip=(), more=lambda writer: None):
    """The checkpoint `name` with rows in blocks of `kind` where they fill some, as a file, and as a folder with what that makes."""
    source = CHECKPOINTS / name
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(file, ARCHITECTURES[name])
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_eos_token_id(config["eos_token_id"])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    more(writer)
    tensors, stacked = {}, {}

    def put(place, x, names, turned=None):
        if place in skip:
            return
        stored = pairs(x, turned) if turned else x
        wanted = getattr(gguf.GGMLQuantizationType, kind)
        fills = x.ndim > 1 and x.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
        wanted = wanted if fills else gguf.GGMLQuantizationType.F32
        blocks = gguf.quants.quantize(stored, wanted)
        writer.add_tensor(place, blocks, raw_dtype=wanted)
        numbers = gguf.quants.dequantize(blocks, wanted).reshape(x.shape).astype(np.float32)
        numbers = unpaired(numbers, turned) if turned else numbers
        for name, part in zip(names, numbers if len(names) > 1 else [numbers]):
            tensors[name] = torch.from_numpy(part.copy())

    for name, tensor in load_file(source / "model.safetensors").items():
        x = tensor.float().numpy()
        if name in OUTSIDE:
            put(OUTSIDE[name], x, [name])
            continue
        block, part, end = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name).groups()
        if of_expert := re.fullmatch(r"\w+\.experts\.(\d+)\.(\w+)", part):
            number, which = of_expert.groups()
            which = {"w1": "gate", "w3": "up", "w2": "down"}.get(which, which.removesuffix("_proj"))
            stacked.setdefault(f"blk.{block}.ffn_{which}_exps.weight", {})[int(number)] = (name, x)
            continue
        turned = {"attn_q": heads, "attn_k": groups}.get(PARTS[part]) if ARCHITECTURES[source.name] == "llama" else None
        # A gate of one row is a vector there.
        put(f"blk.{block}.{PARTS[part]}.{end}", x.reshape(-1) if PARTS[part].endswith("inp_shexp") else x, [name], turned)
        if PARTS[part].endswith("inp_shexp"):
            tensors[name] = tensors[name].reshape(1, -1)
    for place, parts in stacked.items():
        put(place, np.stack([parts[i][1] for i in range(len(parts))]), [parts[i][0] for i in range(len(parts))])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    shutil.copy(source / "config.json", folder)


HOW = {"max_tokens": 8, "temperature": 1.0, "seed": 5, "ignore_eos": True}
PROMPTS = [[3, 14, 15, 9, 2, 6], [5, 35]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_is_the_folder_with_its_numbers(tmp_path, name, kind):
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    write(name, kind, file, folder)
    for dtype in ["fp32", "bf16"]:
        found, wanted = (told(samebits.Engine(model, dtype=dtype).generate(PROMPTS, 2, **HOW)) for model in (file, folder))
        assert found == wanted and len(found) == 4


def test_a_factor_without_a_type_is_a_linear_one(tmp_path):
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    write("qwen3", "F32", file, folder, more=lambda writer: writer.add_float32("qwen3.rope.scaling.factor", 2.0))
    plain = told(samebits.Engine(folder, dtype="fp32").generate(PROMPTS, 2, **HOW))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    found, wanted = (told(samebits.Engine(model, dtype="fp32").generate(PROMPTS, 2, **HOW)) for model in (file, folder))
    assert found == wanted != plain


def refused(tmp_path, change=None, name="qwen3", **how):
    """What is said of a file, whose bytes `change` changes."""
    file = tmp_path / "model.gguf"
    write(name, "Q8_0", file, tmp_path / "folder", **how)
    if change:
        file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError) as told:
        samebits.Engine(file, dtype="bf16")
    assert "\n" not in str(told.value).strip() and str(file) in str(told.value)
    return str(told.value)


def test_damaged_files_are_refused_by_name(tmp_path):
    cases = {
        "does not begin with GGUF": lambda data: b"NONE" + data[4:],
        "has version 1 of GGUF": lambda data: data[:4] + (1).to_bytes(4, "little") + data[8:],
        "is not a whole GGUF file": lambda data: data[:100],
        "goes beyond the file": lambda data: data[:-64],
        "bytes are said to follow": lambda data: data[:24] + (1 << 60).to_bytes(8, "little") + data[32:],
    }
    for i, (why, change) in enumerate(cases.items()):
        (tmp_path / str(i)).mkdir()
        assert why in refused(tmp_path / str(i), change)


def test_a_type_that_is_not_known_is_refused_by_tensor(tmp_path):
    name = b"blk.0.attn_output.weight"

    def change(data):
        # Behind the name: the number of dimensions, two of them, and the type.
        at = data.index(name) + len(name) + 4 + 16
        return data[:at] + (19).to_bytes(4, "little") + data[at + 4 :]

    told = refused(tmp_path, change)
    assert "blk.0.attn_output.weight" in told and "type 19 of ggml; supported are F32, F16" in told


def test_a_scale_that_is_no_number_is_refused_by_tensor(tmp_path):
    def change(data):
        reader = gguf.GGUFReader(tmp_path / "model.gguf")
        tensor = next(t for t in reader.tensors if t.name == "blk.1.attn_output.weight")
        at = int(tensor.data_offset)
        return data[:at] + np.float16(np.nan).tobytes() + data[at + 2 :]

    told = refused(tmp_path, change)
    assert "model.layers.1.self_attn.o_proj.weight" in told and "NaN" in told


def test_what_is_not_read_is_refused_by_field(tmp_path):
    told = refused(tmp_path, skip=["blk.1.ffn_up.weight"])
    assert "model.layers.1.mlp.up_proj.weight" in told and "is missing" in told
    (tmp_path / "more").mkdir()
    told = refused(tmp_path / "more", more=lambda writer: writer.add_float32("qwen3.attn_logit_softcapping", 30.0))
    assert "qwen3.attn_logit_softcapping" in told
    (tmp_path / "blocks").mkdir()
    told = refused(tmp_path / "blocks", more=lambda writer: writer.add_uint32("qwen3.interleave_moe_layer_step", 2))
    assert "qwen3.interleave_moe_layer_step" in told
    (tmp_path / "scaling").mkdir()
    told = refused(tmp_path / "scaling", more=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE))
    assert "qwen3.rope.scaling.type" in told and "`longrope`" in told


TEXTS = ["Hello world, 12345 times!", "  spaces\n\n and\ttabs  ", "naïve café e\u0301 — 漢字 🦀", "it's<|end|>done"]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_tokens_are_those_of_the_tokenizer(tmp_path, pre):
    digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}.get(pre)
    cut = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + str(digits)
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if digits:
        split = pre_tokenizers.Split(Regex(cut), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|begin|>", "<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    if pre == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)

    def more(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if i < 2 else 1 for i in range(len(tokens))])
        writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
        writer.add_bos_token_id(0)

    # Its table has more rows than there are tokens, as tables of models have.
    file = tmp_path / "model.gguf"
    write("llama", "F32", file, tmp_path / "folder", more=more)
    engine = samebits.Engine(file, dtype="bf16")
    for text in TEXTS:
        wanted = tokenizer.encode(text).ids
        assert wanted
        (sample,) = engine.generate([text], 1, max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        assert list(sample.prompt_tokens) == wanted, text


def test_tokens_are_those_of_sentencepiece(tmp_path):
    """Byte pairs over characters, trained here, whose merges a file tells by scores."""
    space, special = "\u2581", ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    numbers = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special + numbers, initial_alphabet=[])
    tokenizer.train_from_iterator([text for text in TEXTS[:3] for _ in range(4)] + ["hello world and tabs"] * 9, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    vocab = sorted(trained["vocab"], key=trained["vocab"].get)
    scores = dict.fromkeys(vocab, -1e4)
    for rank, merge in enumerate(trained["merges"]):
        scores["".join(merge if isinstance(merge, list) else merge.split(" "))] = -float(rank)
    kinds = [2 if t == "<unk>" else 3 if t in special else 6 if t in numbers else 1 for t in vocab]

    def encoded(text):
        """As SentencePiece does: the two neighbours whose union has the best score become one, the first of equals."""
        pieces = list(space + text.replace(" ", space))
        while True:
            unions = [scores.get(a + b, -np.inf) if a + b not in numbers else -np.inf for a, b in zip(pieces, pieces[1:])]
            if not unions or max(unions) == -np.inf:
                break
            at = int(np.argmax(unions))
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        of_bytes = [[piece] if piece in scores else [f"<0x{b:02X}>" for b in piece.encode()] for piece in pieces]
        return [1] + [trained["vocab"][piece] for piece in sum(of_bytes, [])]

    def more(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(vocab)
        writer.add_token_scores([scores[token] for token in vocab])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_unk_token_id(0)

    file = tmp_path / "model.gguf"
    write("llama", "F32", file, tmp_path / "folder", more=more)
    engine = samebits.Engine(file, dtype="bf16")
    assert len(trained["merges"]) > 50
    for text in TEXTS:
        (sample,) = engine.generate([text], 1, max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        assert list(sample.prompt_tokens) == encoded(text), text
