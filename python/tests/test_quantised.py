"""Folders with quantised weights, packed here as the formats' own tools pack: the same bits as the folder of the f32 numbers."""

import json
import shutil

import numpy as np
import pytest
import samebits
import samebits.torch
import torch
from conftest import same
from safetensors.torch import load_file, save_file
from test_causal_lm import command
from test_engine import CHECKPOINTS, told

HOW = {"max_tokens": 8, "temperature": 1.0, "seed": 5, "ignore_eos": True}
PROMPTS = [[3, 14, 15, 9, 2, 6], [5, 35]]
# Which of eight columns stands in which four bits of a word of AWQ, the lowest first.
AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def words(x, bits, order=None):
    """Numbers below 2^bits along the last axis, side by side in words, the first in the lowest bits."""
    each = 32 // bits
    x = np.pad(x.astype(np.uint64), [(0, 0), (0, -x.shape[1] % each)]).reshape(x.shape[0], -1, each)
    x = x[..., order] if order else x
    return torch.from_numpy((x << (np.arange(each, dtype=np.uint64) * bits)).sum(-1).astype(np.uint32).view(np.int32))


def parts(x, scheme, draw):
    """What a folder stores of a matrix, by the ends of names, and the numbers that these are."""
    rows, columns = x.shape
    method, bits, size = scheme["method"], scheme.get("bits", 4), scheme["group"]
    size = columns if size == -1 else size
    groups = -(-columns // size)
    of_column = np.arange(columns) // size
    if scheme.get("sorted"):
        of_column = draw.permutation(of_column)
    top = 1 << bits
    q = draw.integers(0, top, (rows, columns))
    # Stored as one less they are 1 to 16.
    less = int(method == "gptq" and not scheme.get("v2"))
    # Differences of 0, and scales below 0, have zeros with a sign.
    z = draw.integers(less, top + less, (rows, groups)) if scheme.get("zeros", True) else np.full((rows, groups), top // 2)
    dtype = scheme.get("dtype", torch.float16)
    scales = torch.from_numpy(draw.normal(0, 0.1 / top, (rows, groups)).astype(np.float32)).to(dtype)
    numbers = torch.from_numpy((q - z[:, of_column]).astype(np.float32)) * scales.float()[:, of_column]
    if method == "awq":
        stored = {"qweight": words(q.T, 4, AWQ), "qzeros": words(z.T, 4, AWQ), "scales": scales.T}
    elif method == "gptq":
        stored = {"qweight": words(q, bits).T, "qzeros": words(z.T - less, bits), "scales": scales.T}
        if scheme.get("listed", True):
            stored["g_idx"] = torch.from_numpy(of_column.astype(np.int32))
    elif method == "packed":
        stored = {"weight_packed": words(q, bits), "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
        if scheme.get("zeros", True):
            stored["weight_zero_point"] = words(z.T, bits).T
        if scheme.get("sorted"):
            stored["weight_g_idx"] = torch.from_numpy(of_column.astype(np.int32))
    else:
        stored = {"weight": torch.from_numpy((q - top // 2).astype(np.int8)), "weight_scale": scales}
        if scheme.get("zeros", True):
            stored["weight_zero_point"] = torch.from_numpy((z - top // 2).astype(np.int8))
    return {end: part.contiguous() for end, part in stored.items()}, numbers


def config_of(scheme):
    bits, group = scheme.get("bits", 4), scheme["group"]
    if scheme["method"] == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    if scheme["method"] == "gptq":
        how = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": scheme.get("sorted", False), "sym": False}
        return how | ({"checkpoint_format": "gptq_v2"} if scheme.get("v2") else {})
    weights = {"num_bits": bits, "type": "int", "symmetric": not scheme.get("zeros", True), "dynamic": False}
    weights |= {"strategy": "channel", "group_size": None} if group == -1 else {"strategy": "group", "group_size": group}
    if scheme.get("sorted"):
        weights["actorder"] = "group"
    form = "pack-quantized" if scheme["method"] == "packed" else "int-quantized"
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"], "kv_cache_scheme": None}


def write(name, scheme, folder, plain=None):
    """The checkpoint `name` with its projections as `scheme` stores them, and as the numbers that they are."""
    tensors, wide = {}, {}
    draw = np.random.default_rng(7)
    for tensor, x in load_file(CHECKPOINTS / name / "model.safetensors").items():
        wide[tensor] = x.float()
        if not tensor.endswith("_proj.weight"):
            tensors[tensor] = x
            continue
        stored, wide[tensor] = parts(x, scheme, draw)
        tensors |= {f"{tensor.removesuffix('weight')}{end}": part for end, part in stored.items()}
    config = json.loads((CHECKPOINTS / name / "config.json").read_text())
    for where, what, more in [(folder, tensors, {"quantization_config": config_of(scheme)}), (plain, wide, {})]:
        if where is not None:
            where.mkdir()
            save_file(what, where / "model.safetensors")
            (where / "config.json").write_text(json.dumps(config | more))


SCHEMES = {
    "awq": ("llama", {"method": "awq", "group": 32}),
    "awq of rows": ("qwen3", {"method": "awq", "group": -1}),
    "awq in f32": ("phi3", {"method": "awq", "group": 16, "dtype": torch.float32}),
    "gptq": ("llama", {"method": "gptq", "group": 32}),
    "gptq with a last group": ("qwen3", {"method": "gptq", "group": 32}),
    "gptq of rows": ("qwen3", {"method": "gptq", "group": -1, "listed": False}),
    "gptq sorted": ("qwen3", {"method": "gptq", "group": 16, "sorted": True}),
    "gptq symmetric": ("qwen3-moe", {"method": "gptq", "group": 8, "zeros": False}),
    "gptq of 8 bits": ("llama", {"method": "gptq", "group": 32, "bits": 8}),
    "gptq of 2 bits": ("llama", {"method": "gptq", "group": 32, "bits": 2}),
    "gptq v2": ("qwen3", {"method": "gptq", "group": 16, "v2": True, "dtype": torch.bfloat16}),
    "packed": ("llama", {"method": "packed", "group": 32, "zeros": False, "dtype": torch.bfloat16}),
    "packed with zeros": ("qwen3", {"method": "packed", "group": 16}),
    "packed of rows": ("qwen3", {"method": "packed", "group": -1, "bits": 8, "dtype": torch.float32}),
    "packed sorted": ("qwen3", {"method": "packed", "group": 16, "zeros": False, "sorted": True}),
    "bytes": ("llama", {"method": "bytes", "group": -1, "bits": 8, "zeros": False, "dtype": torch.bfloat16}),
    "bytes with zeros": ("qwen3", {"method": "bytes", "group": 16, "bits": 8, "dtype": torch.float32}),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_folder_is_that_of_its_numbers(tmp_path, scheme):
    name, scheme = SCHEMES[scheme]
    folder, plain = tmp_path / "quantised", tmp_path / "plain"
    write(name, scheme, folder, plain)
    wanted = load_file(plain / "model.safetensors")
    found = samebits.torch.CausalLM.from_pretrained(folder, dtype="fp32").state_dict()
    assert found.keys() == wanted.keys()
    for tensor, numbers in wanted.items():
        # Zeros have their signs.
        assert same(found[tensor], numbers), tensor
    signs = [torch.signbit(numbers[numbers == 0]).any() for tensor, numbers in wanted.items() if tensor.endswith("_proj.weight")]
    assert any(signs)
    tokens = [torch.tensor([prompt]) for prompt in PROMPTS]
    for dtype in ["fp32", "bf16"]:
        one, other = (samebits.torch.CausalLM.from_pretrained(model, dtype=dtype) for model in (folder, plain))
        for given in tokens:
            assert same(one.logprob(given).detach(), other.logprob(given).detach())
        one, other = (told(samebits.Engine(model, dtype=dtype).generate(PROMPTS, 2, **HOW)) for model in (folder, plain))
        assert one == other and len(one) == 4


@pytest.mark.parametrize("scheme", [name for name, (_, scheme) in SCHEMES.items() if scheme["method"] in ("packed", "bytes")])
def test_compressed_tensors_has_the_same_numbers(scheme):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    _, scheme = SCHEMES[scheme]
    if scheme.get("sorted"):
        pytest.skip("its last version knows no sorted columns")
    # In f32, so that nothing is rounded on its side that is not on ours.
    stored, numbers = parts(torch.zeros(48, 96), scheme | {"dtype": torch.float32}, np.random.default_rng(3))
    (group,) = config_of(scheme)["config_groups"].values()
    args = quantization.QuantizationArgs(**group["weights"])
    packed = compressors.BaseCompressor.get_value_from_registry(config_of(scheme)["format"])
    its = packed.decompress(stored, quantization.QuantizationScheme(targets=["Linear"], weights=args))["weight"]
    assert its.dtype == torch.float32 and torch.equal(its, numbers)


def refused(tmp_path, scheme, tensors=lambda tensors: None, config=lambda config: None):
    """What is said of a folder with something changed."""
    folder = tmp_path / "quantised"
    shutil.rmtree(folder, ignore_errors=True)
    write("qwen3", scheme, folder)
    stored = load_file(folder / "model.safetensors")
    tensors(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text())
    config(whole["quantization_config"])
    (folder / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError) as error:
        samebits.Engine(folder, dtype="bf16")
    assert str(folder) in str(error.value)
    return str(error.value)


GPTQ = {"method": "gptq", "group": 16}
PACKED = {"method": "packed", "group": 16}
AT = "model.layers.1.mlp.up_proj."


def put(name, value):
    def change(tensors):
        tensors[AT + name].view(-1)[3] = value

    return change


def cut(name):
    def change(tensors):
        tensors[AT + name] = tensors[AT + name][:-1]

    return change


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path):
    cases = [
        (GPTQ, cut("qweight"), ["g_idx` has shape [48]", "asks for [40]"]),
        (GPTQ, cut("scales"), ["scales` has shape [2, 80]", "(bits 4, group_size 16) asks for [3, 80]"]),
        (GPTQ, lambda tensors: tensors.pop(AT + "qzeros"), ["qzeros` is missing"]),
        (GPTQ | {"sorted": True}, lambda tensors: tensors.pop(AT + "g_idx"), ["g_idx` is missing"]),
        (GPTQ, put("scales", torch.nan), ["up_proj.scales`", "NaN"]),
        (GPTQ, put("scales", torch.inf), ["up_proj.scales`", "inf"]),
        (GPTQ, put("g_idx", 3), ["up_proj.g_idx` element [3] is 3; there are 3 groups"]),
        (GPTQ, put("g_idx", -1), ["up_proj.g_idx` element [3] is -1"]),
        (GPTQ, lambda tensors: tensors.update({AT + "weight": torch.zeros(80, 48)}), ["up_proj.weight` stands beside"]),
        (GPTQ, lambda tensors: tensors.update({AT + "bias": torch.ones(80)}), ["up_proj.bias` is not part of the model"]),
        (GPTQ, lambda tensors: tensors.update({AT + "qweight": tensors[AT + "qweight"].to(torch.int64)}), ["qweight` is I64"]),
        (PACKED, lambda tensors: tensors.pop(AT + "weight_zero_point"), ["weight_zero_point` is missing"]),
        (PACKED, lambda tensors: tensors.pop(AT + "weight_shape"), ["weight_shape` is missing"]),
        (PACKED, put("weight_scale", torch.nan), ["weight_scale`", "NaN"]),
    ]
    for scheme, change, wanted in cases:
        said = refused(tmp_path, scheme, change)
        assert all(text in said for text in [AT, *wanted]), said


def test_configs_that_do_not_fit_are_refused_by_field(tmp_path):
    def activations(config):
        config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}

    cases = [
        (PACKED, activations, "quantization_config.config_groups.group_0.input_activations` is set, which is another model"),
        (PACKED, lambda config: config.update(kv_cache_scheme={"num_bits": 8}), "quantization_config.kv_cache_scheme"),
        (GPTQ, lambda config: config.update(quant_method="bitsandbytes"), '`quantization_config.quant_method` is "bitsandbytes"'),
        (GPTQ, lambda config: config.update(bits=3), "`quantization_config.bits` is 3; supported is 2 or 4 or 8"),
        (GPTQ, lambda config: config.update(group_size=32), "(bits 4, group_size 32) asks for [2, 80]"),
        (GPTQ, lambda config: config.update(bits=8), "(bits 8, group_size 16) asks for"),
        (PACKED, lambda config: config["config_groups"]["group_0"]["weights"].update(group_size=24), "group_size 24) asks for [80, 2]"),
    ]
    for scheme, change, wanted in cases:
        said = refused(tmp_path, scheme, config=change)
        assert wanted in said, said
    # All of it at once.
    said = refused(tmp_path, GPTQ, config=lambda config: config.update(bits=3, group_size=0, dynamic={"a": {}}))
    assert all(f"`quantization_config.{field}`" in said for field in ["bits", "group_size", "dynamic"]), said


def test_a_bias_of_zeros_that_no_model_has_is_passed_by(tmp_path):
    write("qwen3", GPTQ, tmp_path / "quantised")
    samples = told(samebits.Engine(tmp_path / "quantised", dtype="bf16").generate(PROMPTS, 1, **HOW))
    stored = load_file(tmp_path / "quantised/model.safetensors")
    save_file(stored | {AT + "bias": torch.zeros(80)}, tmp_path / "quantised/model.safetensors")
    assert told(samebits.Engine(tmp_path / "quantised", dtype="bf16").generate(PROMPTS, 1, **HOW)) == samples
    assert AT + "bias" not in samebits.torch.CausalLM.from_pretrained(tmp_path / "quantised").state_dict()


def test_saved_folders_are_plain(tmp_path):
    write("qwen3", GPTQ, tmp_path / "quantised")
    model = samebits.torch.CausalLM.from_pretrained(tmp_path / "quantised", dtype="fp32")
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    again = samebits.torch.CausalLM.from_pretrained(tmp_path / "saved", dtype="fp32")
    assert all(same(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_every_verb_takes_it(tmp_path):
    write("qwen3", GPTQ, tmp_path / "quantised", tmp_path / "plain")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"tokens": prompt}) + "\n" for prompt in PROMPTS))
    data = CHECKPOINTS.parent / "gradients/qwen3.safetensors"
    said = []
    for which in ("quantised", "plain"):
        model, out = tmp_path / which, tmp_path / f"{which}.jsonl"
        how = ["--samples", "2", "--max-tokens", "6", "--temperature", "1.0", "--seed", "3", "--dtype", "bf16"]
        command("rollout", "--model", model, "--prompts", tmp_path / "prompts.jsonl", "--out", out, *how)
        command("score", "--model", model, "--rollout", out)
        command("audit", model)
        trained = tmp_path / f"{which} trained"
        command("train", "--model", model, "--data", data, "--out", trained, "--steps", "1", "--batch", "2", "--lr", "0.01", "--dtype", "fp32")
        _, *lines = map(json.loads, out.read_text().splitlines())
        said.append(([(line["tokens"], line["logprobs"]) for line in lines], load_file(next(trained.rglob("model.safetensors")))))
        assert "quantization_config" not in json.loads(next(trained.rglob("config.json")).read_text())
    (samples, weights), (wanted, plain) = said
    assert samples == wanted and weights.keys() == plain.keys()
    assert all(same(weights[name], plain[name]) for name in plain)


def of_float8(folder, plain, change=lambda tensors: None):
    """The checkpoint qwen3 with projections of e4m3 in blocks of 32 rows and 48 columns, and as the numbers that they are."""
    tensors, wide = {}, {}
    torch.manual_seed(2)
    for name, x in load_file(CHECKPOINTS / "qwen3" / "model.safetensors").items():
        wide[name] = x.float()
        if not name.endswith("_proj.weight"):
            tensors[name] = x
            continue
        rows, columns = x.shape
        scales = torch.rand(-(-rows // 32), -(-columns // 48)) / 100
        spread = scales.repeat_interleave(32, 0)[:rows].repeat_interleave(48, 1)[:, :columns]
        tensors[name], tensors[f"{name}_scale_inv"] = (x.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn), scales
        wide[name] = tensors[name].float() * spread
    change(tensors)
    config = json.loads((CHECKPOINTS / "qwen3" / "config.json").read_text())
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 48]}
    for where, what, more in [(folder, tensors, {"quantization_config": said}), (plain, wide, {})]:
        where.mkdir()
        save_file(what, where / "model.safetensors")
        (where / "config.json").write_text(json.dumps(config | more))


def test_floats_of_8_bits_are_storage_under_the_second_contract(tmp_path):
    folder, plain = tmp_path / "folder", tmp_path / "plain"
    of_float8(folder, plain)
    for dtype in ["fp32", "bf16"]:
        found = told(samebits.Engine(folder, dtype=dtype, storage="ws2").generate(PROMPTS, 2, **HOW))
        assert found == told(samebits.Engine(plain, dtype=dtype).generate(PROMPTS, 2, **HOW)) and len(found) == 4
    with pytest.raises(ValueError, match="contract ws1 refuses; ws2 admits"):
        samebits.Engine(folder, dtype="bf16")
    with pytest.raises(ValueError, match="there are ws1 and ws2"):
        samebits.Engine(folder, dtype="bf16", storage="ws3")
    for i, (change, why) in enumerate([
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale_inv"), "up_proj.weight_scale_inv beside it"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}), "ask for"),
        (lambda t: t["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[0].fill_(0x7F), "NaN"),
    ]):  # fmt: skip
        of_float8(tmp_path / f"bad{i}", tmp_path / f"plain{i}", change)
        with pytest.raises(ValueError, match="up_proj") as said:
            samebits.Engine(tmp_path / f"bad{i}", dtype="bf16", storage="ws2")
        assert why in str(said.value)
