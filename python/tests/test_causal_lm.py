"""`samebits.torch.CausalLM`, its losses and its AdamW: the log-probabilities of the engine, the steps of `samebits train`."""

import importlib.util
import json
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import samebits
import samebits.torch
import torch
from conftest import bits, same

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = ROOT / "tests/checkpoints"
ADDER = CHECKPOINTS / "qwen3-adder"
# Dense and sparse, tied and not, with biases, soft caps, windows, latent attention.
FAMILIES = ["qwen3-adder", "qwen2", "gemma2", "phi3", "mixtral", "deepseek-v3"]
DTYPES = {"F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16}


def load(path):
    """The tensors of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            tensor = torch.frombuffer(bytearray(data[start:end]), dtype=DTYPES[entry["dtype"]])
            tensors[name] = tensor.reshape(entry["shape"])
    return tensors


def command(*arguments):
    done = subprocess.run([sys.executable, "-m", "samebits", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sequences(vocabulary, lengths=(9, 1, 14, 5, 8, 11)):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def padded(all_sequences, left):
    longest = max(map(len, all_sequences)) + 2
    tokens = torch.full((len(all_sequences), longest), -7)
    mask = torch.zeros_like(tokens)
    for b, tokens_of in enumerate(all_sequences):
        there = slice(longest - len(tokens_of), None) if left else slice(0, len(tokens_of))
        tokens[b, there], mask[b, there] = torch.tensor(tokens_of), 1
    return tokens, mask


def counted(all_sequences):
    """The first token of a sequence does not count, nor does every third."""
    longest = max(map(len, all_sequences))
    return torch.tensor([[int(t < len(s) and t % 3 > 0) for t in range(longest)] for s in all_sequences], dtype=torch.int32)


def gradients(model, given, groups=1, size=None, block=None):
    """`.grad` of every parameter after the loss of some sequences in parts of `size`."""
    count = counted(given)
    size = size or len(given)
    with block or model.accumulate(groups, len(given)):
        for first in range(0, len(given), size):
            logprob = model.logprob(given[first : first + size])
            part = count[first : first + size, : logprob.shape[1]]
            samebits.torch.nll(logprob, part, denominator=count.sum().item())[0].backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def all_same(a, b):
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_log_probabilities_are_those_of_the_engine(family, dtype):
    model = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / family, dtype=dtype)
    # Weights that no bf16 holds.
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            parameter *= 1 + 1e-3 * (at % 7)
    engine = samebits.Engine(model, CHECKPOINTS / family, dtype=dtype)
    prompts = sequences(model.config["vocab_size"])
    samples = engine.generate(prompts, 2, max_tokens=7, seed=4, ignore_eos=True)
    whole = [s.prompt_tokens + s.tokens.tolist() for s in samples]
    found = model.logprob(whole)
    assert found.requires_grad and found.dtype == torch.float32
    logits = model(whole).detach()
    for b, (sample, scores) in enumerate(zip(samples, engine.score(samples))):
        there = slice(len(sample.prompt_tokens), len(whole[b]))
        assert same(found[b, there].detach(), torch.from_numpy(sample.logprobs))
        assert same(torch.from_numpy(scores), torch.from_numpy(sample.logprobs))
        by_logits, _ = samebits.ops.logprob(logits[b, there.start - 1 : there.stop - 1], torch.from_numpy(sample.tokens))
        assert same(by_logits, torch.from_numpy(sample.logprobs))
        assert found[b, 0] == 0 and (found[b, there.stop :] == 0).all()
    # What reads f32 in a forward, too, is rounded: the folder of the rounded weights is this model.
    if dtype == "bf16":
        rounded = {name: tensor.bfloat16() for name, tensor in model.named_parameters()} | dict(model.named_buffers())
        again = samebits.Engine(rounded, CHECKPOINTS / family)
        assert all(same(torch.from_numpy(a), torch.from_numpy(s.logprobs)) for a, s in zip(again.score(samples), samples))


@pytest.mark.parametrize("family", ["qwen3-adder", "gemma2", "deepseek-v3"])
def test_no_way_to_run_a_batch_moves_a_bit(family):
    model = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / family)
    given = sequences(model.config["vocab_size"])
    expected = model.logprob(given).detach()
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))

    def gradient(tokens, mask=None, weight=weight):
        logprob = model.logprob(tokens, mask)
        logprob.backward(weight)
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        return logprob.detach(), found

    _, of_all = gradient(given)
    assert of_all["model.norm.weight"].abs().max() > 0
    for micro_batch, recompute, threads in [(1, False, 1), (4, True, 2), (None, True, 1), (3, False, 2)]:
        model.micro_batch, model.recompute = micro_batch, recompute
        with samebits.Cpu(threads=threads):
            logprob, found = gradient(given)
            with torch.no_grad():
                assert same(model.logprob(given), expected)
        assert same(logprob, expected) and all_same(found, of_all)
    for left in (True, False):
        tokens, mask = padded(given, left)
        spread = torch.randn(tokens.shape)
        for b, (row, here) in enumerate(zip(weight, mask)):
            spread[b, here == 1] = row[: len(given[b])]
        logprob, found = gradient(tokens, mask, spread)
        assert all(same(row[here == 1], e[: len(s)]) for row, here, e, s in zip(logprob, mask, expected, given))
        assert (logprob[mask == 0] == 0).all() and all_same(found, of_all)


@pytest.mark.parametrize("groups", [1, 4])
def test_gradients_are_those_of_the_command(tmp_path, groups):
    data, out = ROOT / "tests/gradients/qwen3-adder.safetensors", tmp_path / "out.safetensors"
    command("grad", "--model", ADDER, "--tokens", data, "--out", out, "--groups", groups, "--micro-batch", 16)
    given, expected = load(data), load(out)
    model = samebits.torch.CausalLM.from_pretrained(ADDER)
    mask = given.get("attention_mask", torch.ones_like(given["tokens"]))
    with model.accumulate(groups, len(mask)):
        for part in range(0, len(mask), 32):
            rows = slice(part, part + 32)
            logprob = model.logprob(given["tokens"][rows], mask[rows])
            count = given["mask"][rows]
            samebits.torch.nll(logprob, count, denominator=given["mask"].sum().item())[0].backward()
    for name, parameter in model.named_parameters():
        assert same(parameter.grad, expected[name]), name


@pytest.mark.parametrize("family", ["qwen3-adder", "mixtral"])
@pytest.mark.parametrize("groups", [1, 4])
def test_parts_have_the_bits_of_one_batch(family, groups):
    model = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / family)
    given = sequences(model.config["vocab_size"])
    expected = gradients(model, given, groups)
    for size in (1, 4):
        assert all_same(gradients(model, given, groups, size), expected)
    if groups == 1:
        assert all_same(gradients(model, given, size=2, block=samebits.torch.accumulate(model)), expected)
        # Outside of a block: one call is one batch, and torch's sum of several is another one.
        count = counted(given)
        samebits.torch.nll(model.logprob(given), count, denominator=count.sum().item())[0].backward()
        assert all_same({name: p.grad for name, p in model.named_parameters()}, expected)
        model.zero_grad()
        for one, row in zip(given, count):
            samebits.torch.nll(model.logprob([one]), row[None, : len(one)], denominator=count.sum().item())[0].backward()
        assert not all_same({name: p.grad for name, p in model.named_parameters()}, expected)
    else:
        assert not all_same(gradients(model, given, 1), expected)


def test_what_cannot_be_summed_is_refused_by_name():
    model = samebits.torch.CausalLM.from_pretrained(ADDER)
    given = sequences(32)
    with pytest.raises(RuntimeError, match="number 3 is gone back through, where number 0 is the next"):
        with model.accumulate():
            model.logprob(given[:3])
            model.logprob(given[3:]).sum().backward()
    with pytest.raises(RuntimeError, match="3 of 6 have come; give all of them"):
        with model.accumulate(2, 6):
            model.logprob(given[:3]).sum().backward()
    with pytest.raises(RuntimeError, match="0 of 3 have been gone back through"):
        with model.accumulate():
            model.logprob(given[:3])
    with pytest.raises(RuntimeError, match="there are 6 after number 0; 4 were to come"):
        with model.accumulate(2, 4):
            model.logprob(given)
    with pytest.raises(ValueError, match="groups: there are 3; give a power of two"):
        model.accumulate(3, 6)
    with pytest.raises(ValueError, match="groups: there are 2; say how many sequences"):
        model.accumulate(2)
    with pytest.raises(RuntimeError, match="a block is open already"):
        with model.accumulate(), model.accumulate():
            pass
    with model.accumulate():
        kept = model.logprob(given)
        kept.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="gone back through once"):
            kept.sum().backward()
    assert model._sums is None
    with pytest.raises(RuntimeError, match="has a gradient already"):
        with model.accumulate():
            pass
    model.zero_grad()
    with pytest.raises(KeyError):
        with model.accumulate():
            kept = model.logprob(given)
            raise KeyError
    with pytest.raises(RuntimeError, match="gone back through outside of it"):
        kept.sum().backward()


def test_what_does_not_fit_is_refused():
    model = samebits.torch.CausalLM.from_pretrained(ADDER)
    tokens, mask = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 0, 1, 1]])
    cases = [
        (lambda: model.logprob(tokens, mask), ValueError, "mask: the tokens of sequence 0 do not stand one behind"),
        (lambda: model.logprob(tokens, mask[:, :2]), ValueError, r"mask: shape \[1, 2\] must be \[1, 4\]"),
        (lambda: model.logprob(tokens.float()), ValueError, r"tokens: torch.float32 \[1, 4\]; give whole numbers"),
        (lambda: model.logprob([[1, 99]]), ValueError, "tokens: sequence 0: element 1 is 99; the vocabulary is 0 to 31"),
        (lambda: model.logprob([[1], []]), ValueError, "tokens: a sequence has none"),
        (lambda: model.logprob([]), ValueError, "tokens: a sequence has none, or there is no sequence"),
        (lambda: model([[1, 2]]).sum().backward(), NotImplementedError, "logits have no gradient; use logprob"),
        (lambda: samebits.torch.AdamW(model.parameters()), TypeError, "AdamW: give a module or named parameters"),
        (lambda: samebits.torch.CausalLM.from_pretrained(ROOT), ValueError, "has neither model.safetensors nor"),
    ]
    for call, kind, line in cases:
        with pytest.raises(kind, match=line) as error:
            call()
        assert "\n" not in str(error.value)
    model.model.norm.weight.requires_grad_(False)
    with pytest.raises(NotImplementedError, match="`model.norm.weight` requires no gradient; all parameters do, or none"):
        model.logprob([[1, 2]])
    model.half()
    with pytest.raises(NotImplementedError, match="its parameters are f32 on the processor"):
        model.logprob([[1, 2]])


def test_no_change_of_a_weight_passes_by():
    model = samebits.torch.CausalLM.from_pretrained(ADDER)
    given = sequences(32)
    with torch.no_grad():
        before = model.logprob(given)
        # As some libraries write: torch counts no change.
        model.get_parameter("model.layers.2.mlp.up_proj.weight").data[700, 200] *= -40
        after = model.logprob(given)
        assert not same(before, after)
        fresh = samebits.torch.CausalLM(model.state_dict(), ADDER)
        assert same(after, fresh.logprob(given))


def test_a_state_goes_in_and_out(tmp_path):
    model = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / "deepseek-v3")
    state = model.state_dict()
    names = load(CHECKPOINTS / "deepseek-v3/model.safetensors").keys()
    # A layer behind the last one is no part of the model.
    assert state.keys() == {name for name in names if name in state} and "model.layers.1.mlp.gate.e_score_correction_bias" in dict(
        model.named_buffers()
    )
    other = samebits.torch.CausalLM({name: tensor * 0.5 for name, tensor in state.items()}, CHECKPOINTS / "deepseek-v3")
    given = sequences(40)
    assert not same(other.logprob(given).detach(), model.logprob(given).detach())
    other.load_state_dict(state)
    assert same(other.logprob(given).detach(), model.logprob(given).detach())
    other.save_pretrained(tmp_path / "saved")
    saved = samebits.torch.CausalLM.from_pretrained(tmp_path / "saved")
    assert same(saved.logprob(given).detach(), model.logprob(given).detach())
    tied = samebits.torch.CausalLM.from_pretrained(ADDER)
    twice = tied.state_dict() | {"lm_head.weight": tied.get_parameter("model.embed_tokens.weight").detach().clone()}
    tied.load_state_dict(twice)
    twice["lm_head.weight"][0] += 1
    with pytest.raises(RuntimeError, match="lm_head.weight"):
        tied.load_state_dict(twice)


def test_blocks_that_share_their_weights(tmp_path):
    """The state of a module has them under every layer that uses them: a model has them once, and its optimiser steps them once."""
    transformers = pytest.importorskip("transformers")
    folder, first, later = CHECKPOINTS / "zamba2", "model.layers.0.shared_transformer.", "model.layers.3.shared_transformer."
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state, given = module.state_dict(), sequences(40)
    assert any(name.startswith(later) for name in state)
    module.save_pretrained(tmp_path)
    folders = [samebits.torch.CausalLM.from_pretrained(one, dtype="fp32") for one in (folder, tmp_path)]
    model = samebits.torch.CausalLM(module, dtype="fp32")
    assert len({samebits.torch.sha256(one) for one in (model, *folders)}) == 1
    assert not any(name.startswith(later) for name in model.state_dict())
    told = [samebits.Engine(one, dtype="fp32").generate([3, 1, 4], max_tokens=4, seed=1)[0].logprobs.tobytes() for one in (folder, module, model)]
    assert len(set(told)) == 1
    for one in (model, folders[0]):
        optimizer = samebits.torch.AdamW(one, lr=0.01)
        one.logprob(given).sum().backward()
        optimizer.step()
    assert samebits.torch.sha256(model) == samebits.torch.sha256(folders[0]) != samebits.torch.sha256(folders[1])
    model.load_state_dict(state)
    assert samebits.torch.sha256(model) == samebits.torch.sha256(folders[1])
    name = "pre_ff_layernorm.weight"
    other = {**state, later + name: state[first + name] + 1}
    with pytest.raises(RuntimeError, match=later + name):
        model.load_state_dict(other)
    with pytest.raises(ValueError, match=f"{later + name}. differs from {first + name}, which is the same weight"):
        samebits.torch.CausalLM(other, module.config)


def test_a_folder_without_a_config_is_loaded_and_saved(tmp_path):
    model = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / "rwkv7")
    given = sequences(160)
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["hidden_size"] == 48
    saved = samebits.torch.CausalLM.from_pretrained(tmp_path / "saved")
    assert same(saved.logprob(given).detach(), model.logprob(given).detach())


@pytest.mark.parametrize("name", sorted(path.name for path in CHECKPOINTS.iterdir()))
def test_every_family_has_gradients(name):
    model = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / name)
    model.logprob(torch.tensor([[5, 6, 7, 8, 9, 10]])).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_saved_folders_do_not_say_that_they_are_packed(tmp_path):
    shutil.copytree(CHECKPOINTS / "gpt-oss", tmp_path / "packed")
    config = json.loads((tmp_path / "packed/config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    samebits.torch.CausalLM.from_pretrained(tmp_path / "packed").save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/config.json").read_text())
    assert "quantization_config" not in saved and saved["model_type"] == "gpt_oss"


@pytest.mark.parametrize("loss", ["nll", "policy"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_steps_are_those_of_the_command(tmp_path, loss, dtype):
    data, out = ROOT / "tests/gradients/qwen3-adder.safetensors", tmp_path / "run"
    how = ["--loss", loss, "--lr", "0.01", "--weight-decay", "0.1", "--beta1", "0.8", "--beta2", "0.9", "--eps", "1e-6"]
    how += ["--max-norm", "0.5", "--steps", "3", "--batch", "24", "--groups", "2", "--dtype", dtype, "--micro-batch", "8"]
    command("train", "--model", ADDER, "--data", data, "--out", out, *how)
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    given = load(data)
    mask = given.get("attention_mask", torch.ones_like(given["tokens"]))
    model = samebits.torch.CausalLM.from_pretrained(ADDER, dtype=dtype)
    optimizer = samebits.torch.AdamW(model, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, max_norm=0.5)
    for step, line in enumerate(steps):
        rows = [(24 * step + i) % len(mask) for i in range(24)]
        count, per_sequence = given["mask"][rows], []
        with model.accumulate(2, 24):
            for first in range(0, 24, 5):
                part = rows[first : first + 5]
                logprob = model.logprob(given["tokens"][part], mask[part])
                how = {"denominator": count.sum().item()}
                if loss == "nll":
                    value, each = samebits.torch.nll(logprob, given["mask"][part], **how)
                else:
                    old, advantage = given["old_logprob"][part], given["advantages"][part]
                    value, each = samebits.torch.policy_loss(logprob, old, advantage, given["mask"][part], **how, temperature=1.0)
                value.backward()
                per_sequence.append(each)
        optimizer.step()
        optimizer.zero_grad()
        total = samebits.ops.batch_loss(torch.cat(per_sequence), groups=2, denominator=count.sum().item())
        assert same(total, torch.tensor([line["loss"]])) and optimizer.norm == line["norm"]
        assert samebits.torch.sha256(model) == line["sha256"]
    assert len({line["sha256"] for line in steps}) == 3
    model.save_pretrained(tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert files == {path.name for path in out.iterdir()} - {"steps.jsonl", "state.safetensors"}
    for name in files:
        saved, trained = (tmp_path / "saved" / name).read_bytes(), (out / name).read_bytes()
        if name == "config.json":
            # The same fields in one order; how a number is written (1e-6, 1e-06) is each language's own.
            saved, trained = (list(json.loads(text).items()) for text in (saved, trained))
        assert saved == trained, name


class Small(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        draw = lambda *shape: torch.randn(shape, generator=generator).bfloat16().to(dtype)
        # Not in the order of their names; one is longer than a block of the norm, and not a number of blocks.
        self.b, self.a = torch.nn.Parameter(draw(70_001)), torch.nn.Parameter(draw(3, 5))
        self.unused = torch.nn.Parameter(draw(4))

    def step(self, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in (self.a, self.b):
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().to(parameter.dtype)
        optimizer.step()


def test_weights_of_the_optimizer_are_f32_whatever_the_module_holds():
    halves, whole = Small(torch.bfloat16), Small(torch.float32)
    optimizers = [samebits.torch.AdamW(module, lr=1e-4) for module in (halves, whole)]
    other, unmoved = Small(torch.bfloat16), []
    for seed in range(6):
        for module, optimizer in zip((halves, whole), optimizers):
            module.step(optimizer, seed)
        for parameter, reference in zip(halves.parameters(), whole.parameters()):
            assert same(parameter.detach(), reference.detach().bfloat16())
        assert optimizers[0].norm == optimizers[1].norm > 100
        unmoved.append((halves.b == Small(torch.bfloat16).b).float().mean().item())
        if seed == 2:
            # What went on from a saved state is what never stopped.
            other.load_state_dict(halves.state_dict())
            resumed = samebits.torch.AdamW(other, lr=1e-4)
            resumed.load_state_dict(optimizers[0].state_dict())
        elif seed > 2:
            other.step(resumed, seed)
            assert all(same(a.detach(), b.detach()) for a, b in zip(other.parameters(), halves.parameters()))
    # Steps that a bf16 weight would have lost add up.
    assert unmoved[0] > unmoved[-1] and same(halves.unused, Small(torch.bfloat16).unused)


def test_a_gradient_that_is_not_finite_is_refused_and_nothing_changes():
    module = Small(torch.float32)
    optimizer = samebits.torch.AdamW(module)
    module.step(optimizer, 0)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    moments = optimizer.state[module.a]["m"].clone()
    module.a.grad[1, 2] = float("nan")
    with pytest.raises(ValueError, match="the gradient is not finite .that of `a`.; nothing was changed"):
        optimizer.step()
    assert all_same(module.state_dict(), before) and same(optimizer.state[module.a]["m"], moments)
    assert optimizer.state[module.a]["step"] == 1


# --- ranks, and the example


def example(*arguments, ranks=None):
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    run = [sys.executable, *several, str(ROOT / "examples/grpo.py"), *map(str, arguments)]
    return subprocess.run(run, capture_output=True, text=True)


SHORT = ["--steps", 2, "--prompts", 6, "--samples", 4, "--tests", 20, "--goal", 0, "--noise", 1.5]


def test_the_example_ends_with_the_same_bits():
    ends = []
    for ranks, how in [
        (None, ["--micro-batch", 1, "--threads", 1]),
        (None, ["--micro-batch", 16, "--threads", 2]),
        (2, ["--micro-batch", 4, "--ranks"]),
    ]:
        done = example(*SHORT, *how, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        steps = [line for line in done.stdout.splitlines() if line.startswith("step")]
        assert len(steps) == 2 and all(" mismatch 0 kl 0 " in line for line in steps)
        # There was something to learn.
        assert not any(" norm 0.000 " in line for line in steps)
        ends.append(done.stdout.splitlines()[-1])
    assert ends[0].startswith("sha256 ") and len(set(ends)) == 1


@pytest.mark.parametrize("how", [["--temperature", 0.7, "--top-p", 0.9], ["--lora", 4, "--temperature", 0.7, "--top-p", 0.9]])
def test_the_example_samples_of_a_part_and_trains_an_adapter(how):
    ends = []
    for micro_batch in (5, 16):
        done = example(*SHORT, "--noise", 3, *how, "--micro-batch", micro_batch)
        assert done.returncode == 0, done.stdout + done.stderr
        steps = [line for line in done.stdout.splitlines() if line.startswith("step")]
        assert len(steps) == 2 and all(" mismatch 0 kl 0 " in line for line in steps)
        # Where all answers to a question are right there is nothing to learn.
        assert not all(" norm 0.000 " in line for line in steps)
        ends.append(done.stdout.splitlines()[-1])
    assert ends[0].startswith("sha256 ") and len(set(ends)) == 1


@pytest.mark.parametrize("fault", ["score", "train"])
def test_the_example_sees_a_bit_that_differs(fault, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "examples/grpo.py")
    grpo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grpo)
    monkeypatch.setattr(sys, "argv", ["grpo.py", *map(str, SHORT)])
    if fault == "score":
        right = samebits.Engine.score

        def off(self, samples):
            scores = right(self, samples)
            scores[3].view("int32")[0] ^= 1
            return scores

        monkeypatch.setattr(samebits.Engine, "score", off)
    else:
        right = samebits.Engine.update
        # Weights of the step before.
        monkeypatch.setattr(samebits.Engine, "update", lambda self, model: None)
    assert grpo.main() == 1
    said = capsys.readouterr().out
    assert "rollout, recomputation and training differ" in said
    assert (" mismatch 1 kl 0 " in said) == (fault == "score")


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3"])
def test_frequencies_belong_to_a_declared_length(family, tmp_path):
    """Log-probabilities of an engine and of training are the same bits at one length, and no two lengths meet."""
    folder, trained = CHECKPOINTS / family, {"llama-dynamic": 16, "phi3": 32}[family]
    engine = samebits.Engine(folder, rope_length=40)
    samples = engine.generate([[5, 6, 7], [9, 10]], 2, max_tokens=8, seed=3, ignore_eos=True)
    assert {sample.rope_length for sample in samples} == {40}
    texts = [sample.prompt_tokens + sample.tokens.tolist() for sample in samples]

    def logprobs(model):
        found = model.logprob(texts)
        return [row[len(s.prompt_tokens) : len(text)].tolist() for row, s, text in zip(found, samples, texts)]

    made = [sample.logprobs.tolist() for sample in samples]
    model = samebits.torch.CausalLM.from_pretrained(folder, rope_length=40)
    assert (model.rope_length, logprobs(model)) == (40, made)
    assert [row.tolist() for row in engine.score(samples)] == made
    plain, short = samebits.Engine(folder), samebits.torch.CausalLM.from_pretrained(folder)
    assert (plain.rope_length, short.rope_length) == (trained, trained)
    assert logprobs(short) != made
    with pytest.raises(ValueError, match=f"rope_length: sample 0 was made with 40, the engine has {trained}"):
        plain.score(samples)
    with pytest.raises(ValueError, match=f"rope length of the run is {trained}"):
        plain.generate([[5] * 10], max_tokens=trained)
    with pytest.raises(ValueError, match=f"rope length of the run is {trained}"):
        short.logprob([[5] * (trained + 1)])
    for wrong in (0, 10**6):
        with pytest.raises(ValueError, match=f"rope length: is {wrong}"):
            samebits.Engine(folder, rope_length=wrong)
    model.save_pretrained(tmp_path / "saved")
    again = samebits.torch.CausalLM.from_pretrained(tmp_path / "saved")
    assert (again.rope_length, logprobs(again)) == (40, made)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "olmoe", "deepseek-v2", "deepseek-v3", "nemotron-3-latent", "kimi-linear", "olmo-hybrid"])
def test_what_a_module_holds_in_one(family, tmp_path):
    """Modules of transformers 5 have all experts and all convolutions of a layer in one tensor, folders each by itself: the same model."""
    transformers = pytest.importorskip("transformers")
    folder = CHECKPOINTS / family
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = ("experts.gate_up_proj", "experts.up_proj", "attn.conv1d.weight")
    assert any(name.endswith(ends) for name in module.state_dict())
    separate, model = samebits.torch.CausalLM.from_pretrained(folder, dtype="fp32"), samebits.torch.CausalLM(module, dtype="fp32")
    assert model.state_dict().keys() == module.state_dict().keys() != separate.state_dict().keys()
    assert samebits.torch.sha256(model) == samebits.torch.sha256(separate)
    # As transformers saves it, which cuts and names some of them otherwise than it found them.
    module.save_pretrained(tmp_path / "saved")
    saved = samebits.torch.CausalLM.from_pretrained(tmp_path / "saved", dtype="fp32")
    assert samebits.torch.sha256(saved) == samebits.torch.sha256(separate)
    given, engines = sequences(40), [samebits.Engine(one, dtype="fp32") for one in (folder, module, model)]
    told = lambda engine: [(s.tokens.tolist(), s.logprobs.tobytes()) for s in engine.generate(given, max_tokens=5, seed=3)]
    before = told(engines[0])
    assert all(told(engine) == before for engine in engines)

    # A step under either naming.
    steps = []
    for one in (separate, model):
        optimizer = samebits.torch.AdamW(one, lr=0.01, max_norm=0.5)
        found = gradients(one, given, size=2)
        for name, parameter in one.named_parameters():
            parameter.grad = found[name]
        optimizer.step()
        one.zero_grad()
        count = counted(given)
        samebits.torch.nll(one.logprob(given), count, denominator=count.sum().item())[0].backward()
        steps.append((found, {name: p.grad for name, p in one.named_parameters()}, optimizer.norm))
    assert steps[0][2] == steps[1][2] and samebits.torch.sha256(model) == samebits.torch.sha256(separate)

    # By transformers: what it makes of the folder of one is the state of the other.
    separate.save_pretrained(tmp_path / "separate")
    model.save_pretrained(tmp_path / "model")
    assert all(same(a, b) for a, b in zip(*(load(tmp_path / name / "model.safetensors").values() for name in ("separate", "model"))))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "separate", dtype=torch.float32)
    assert all_same(model.state_dict(), again.state_dict())
    for at in (0, 1):
        # Gradients too, as if they were weights.
        with torch.no_grad():
            for name, parameter in separate.named_parameters():
                parameter.copy_(steps[0][at][name])
        separate.save_pretrained(tmp_path / "gradients")
        of = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gradients", dtype=torch.float32).state_dict()
        assert all(same(steps[1][at][name], of[name]) for name in dict(model.named_parameters()))

    # And back: into the module, into a model and an engine of the other naming.
    module.load_state_dict(model.state_dict())
    other = samebits.torch.CausalLM.from_pretrained(folder, dtype="fp32")
    other.load_state_dict(module.state_dict())
    back = samebits.torch.CausalLM(again, dtype="fp32")
    back.load_state_dict(other.state_dict())
    for one in (other, back):
        assert samebits.torch.sha256(one) == samebits.torch.sha256(model)
    for engine, state in zip(engines, (module, other.state_dict(), model)):
        engine.update(state)
    after = told(engines[0])
    assert before != after and all(told(engine) == after for engine in engines)


def test_a_text_model_beside_one_of_images(tmp_path):
    """A module and the folder that it saves have the same parameters, under names of their own; tensors of images are passed by."""
    transformers = pytest.importorskip("transformers")
    config = json.loads((CHECKPOINTS / "qwen3-5/config.json").read_text()) | {"tie_word_embeddings": False}
    text = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    images = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
    both = transformers.Qwen3_5Config(text_config=text, vision_config=images)
    torch.manual_seed(0)
    module = transformers.Qwen3_5ForConditionalGeneration(both).to(torch.bfloat16)
    module.save_pretrained(tmp_path)
    model, saved = samebits.torch.CausalLM(module), samebits.torch.CausalLM.from_pretrained(tmp_path)
    assert samebits.torch.sha256(model) == samebits.torch.sha256(saved)
    names = dict(model.named_parameters())
    assert names.keys() < dict(module.named_parameters()).keys() and any("language_model" in name for name in names)
    told = [samebits.Engine(one).generate([3, 1, 4], max_tokens=4, seed=1)[0].logprobs.tobytes() for one in (module, tmp_path, model)]
    assert len(set(told)) == 1


def test_experts_that_do_not_fit_are_refused_by_name():
    transformers = pytest.importorskip("transformers")
    module = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "mixtral", dtype=torch.float32)
    state, name = module.state_dict(), "model.layers.1.mlp.experts.gate_up_proj"
    engine = samebits.Engine(module)
    one = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    cases = [
        ({**state, name: state[name][0]}, "`model.layers.1.mlp.experts.gate_up_proj`: has shape .*; experts of a layer together are .E,2F,H."),
        ({**state, name: state[name][:-1]}, "tensor `model.layers.1.block_sparse_moe.experts.5.w1.weight` is missing"),
        ({**state, one: state[name][0]}, f"tensor `{one}`: stands there twice"),
    ]
    refused(engine, module.config, cases)


def test_convolutions_that_do_not_fit_are_refused_by_name():
    transformers = pytest.importorskip("transformers")
    module = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "olmo-hybrid", dtype=torch.float32)
    state, block = module.state_dict(), "model.layers.0.linear_attn"
    name = f"{block}.conv1d.weight"
    without = {key: tensor for key, tensor in state.items() if key != f"{block}.k_proj.weight"}
    cases = [
        ({**state, name: state[name][:-1]}, f"`{name}`: has shape .143, 1, 4.; its projections have 144 rows together"),
        (without, f"`{name}`: is cut by the rows of `{block}.k_proj.weight`, which is missing"),
    ]
    refused(samebits.Engine(module), module.config, cases)


def refused(engine, config, cases):
    """Each state is refused with its line, as another one for the engine and for a new model."""
    for given, line in cases:
        for call in (lambda: engine.update(given), lambda: samebits.torch.CausalLM(given, config)):
            with pytest.raises(ValueError, match=line) as error:
                call()
            assert "\n" not in str(error.value)
    assert engine.version == 0
def test_what_is_not_finite_is_an_error_that_says_where(tmp_path):
    """In fp16 the gated activation of layer 0 is beyond 65504."""
    model = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / "qwen3-adder")
    state = dict(model.state_dict())
    for name, factor in [("gate_proj", 300.0), ("up_proj", 3000.0)]:
        state[f"model.layers.0.mlp.{name}.weight"] = state[f"model.layers.0.mlp.{name}.weight"] * factor
    text, began = [[3, 9, 4]], r"not finite: layer 0, op silu_mul in fp16 .site layers.0.mlp. of sequence 0, token 0: .* run it in bf16"
    assert torch.isfinite(samebits.torch.CausalLM(state, CHECKPOINTS / "qwen3-adder").logprob(text)).all()
    half = samebits.torch.CausalLM(state, CHECKPOINTS / "qwen3-adder", dtype="fp16")
    for asked in (lambda: half.logprob(text), lambda: half(text), lambda: torch.no_grad()(half.logprob)(text)):
        with pytest.raises(ValueError, match=began):
            asked()
    engine = samebits.Engine(half, CHECKPOINTS / "qwen3-adder", dtype="fp16")
    with pytest.raises(ValueError, match=began):
        engine.generate(text, max_tokens=2)
    half = samebits.torch.CausalLM(state, CHECKPOINTS / "qwen3-adder", dtype="fp16", allow_nonfinite=True)
    logprob = half.logprob(text)
    assert not torch.isfinite(logprob).all() and not torch.isfinite(half(text)).all()
    logprob.sum().backward()
    # A gradient that is finite where it is given, and not where it comes out.
    with pytest.raises(ValueError, match="gradient: of `.*` is not finite"):
        model.logprob(text).sum().mul(3e38).backward()


@pytest.mark.parametrize("family", ["qwen3-adder", "gemma2"])
def test_one_temperature_from_sampling_to_training(family):
    """On policy at its own temperature alone; two in a ratio are refused, and what nobody said is said."""
    model = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / family)
    engine = samebits.Engine(model, CHECKPOINTS / family)
    for temperature in (0.7, 1.0, 0.0):
        samples = engine.generate([[5, 6, 7], [9, 10]], 2, max_tokens=5, temperature=temperature, seed=3, ignore_eos=True)
        texts = [s.prompt_tokens + s.tokens.tolist() for s in samples]
        logprob, plain = model.logprob(samples), model.logprob(texts, temperature=temperature)
        old, count = torch.zeros(logprob.shape), torch.zeros(logprob.shape, dtype=torch.int32)
        for b, sample in enumerate(samples):
            there = slice(len(sample.prompt_tokens), len(texts[b]))
            old[b, there], count[b, there] = torch.from_numpy(sample.logprobs), 1
        at_own = same(model.logprob(texts).detach(), logprob.detach())
        assert same(logprob.detach(), plain.detach()) and at_own == (temperature != 0.7)
        with torch.no_grad():
            assert same(model.logprob(samples), logprob.detach())
        assert same(torch.where(count == 1, logprob.detach(), 0.0), old)
        loss = lambda made, **how: samebits.torch.policy_loss(
            made, old, torch.ones(4), count, denominator=count.sum().item(), **how
        )[0]  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Through what a loss is made of, too.
            assert loss(logprob) == loss(plain, temperature=temperature) == loss((plain + 0)[:, :], temperature=temperature) == -1
        with pytest.warns(UserWarning, match="policy_loss: at what temperature old_logprob was sampled is not said; that of logprob"):
            loss(plain)
        with pytest.raises(ValueError, match="policy_loss: temperature: old_logprob is of 0.9, logprob of "):
            loss(plain * 1, temperature=0.9)
        with pytest.raises(ValueError, match="temperature: sample 0 was made with .*, the model has 0.9"):
            model.logprob(samples, temperature=0.9)
    with pytest.raises(ValueError, match="dtype: sample 0 was made with bf16, the model has fp32"):
        samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / family, dtype="fp32").logprob(samples)
    with pytest.raises(ValueError, match="samples and other sequences are mixed"):
        model.logprob([*samples, [1, 2]])
    with pytest.raises(ValueError, match="temperature: is -1"):
        model.logprob([[1, 2]], temperature=-1)


def test_gradients_at_a_temperature_are_those_of_a_smaller_head():
    """Exactly, where the temperature is a power of two."""
    state = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / "llama").state_dict()
    smaller = state | {"lm_head.weight": state["lm_head.weight"] / 2}
    made = []
    for tensors, temperature in [(state, 2.0), (smaller, 1.0)]:
        model = samebits.torch.CausalLM(tensors, CHECKPOINTS / "llama")
        logprob = model.logprob([[3, 1, 4, 1, 5], [9, 2, 6]], temperature=temperature)
        logprob.sum().backward()
        made.append((logprob.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    (a, of_a), (b, of_b) = made
    of_a["lm_head.weight"] *= 2
    assert same(a, b) and all_same(of_a, of_b)


def test_masks_and_losses_say_what_they_do_not_mean():
    model = samebits.torch.CausalLM.from_pretrained(ADDER)
    tokens = torch.tensor([[3, 9, 4, 7], [0, 0, 8, 3]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    expected = model.logprob(tokens, mask).detach()
    for fine in (mask.bool(), mask.float(), mask.to(torch.uint8)):
        assert same(model.logprob(tokens, fine).detach(), expected)
    # As attention adds it to scores: the contrary.
    for wrong in (torch.where(mask == 1, 0.0, -torch.inf), mask * 2, mask * 0.5):
        with pytest.raises(ValueError, match="mask: holds more than 0 and 1"):
            model.logprob(tokens, wrong)
    with pytest.raises(ValueError, match="a sequence has none"):
        model.logprob(tokens, mask * torch.tensor([[1], [0]]))
    logprob, count = model.logprob(tokens, mask), torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]])
    policy = lambda old, **how: samebits.torch.policy_loss(
        logprob, old, torch.tensor([1.0, -1.0]), how.get("count", count), denominator=4, temperature=1.0
    )  # fmt: skip
    old = logprob.detach().clone()
    assert policy(old)[0] == policy(old, count=count.bool())[0] == policy(old, count=count.float())[0]
    for wrong in (count * 0.5, count * 2):
        with pytest.raises(ValueError, match="policy_loss: count holds more than 0 and 1"):
            policy(old, count=wrong)
        with pytest.raises(ValueError, match="nll: count holds more than 0 and 1"):
            samebits.torch.nll(logprob, wrong, denominator=4)
    with pytest.warns(UserWarning, match="policy_loss: old_logprob is above 0 where a token counts; are these probabilities"):
        policy(old.exp())
    old[1, 0] = torch.nan
    assert torch.isfinite(policy(old)[0])
    old[1, 3] = torch.nan
    with pytest.raises(ValueError, match=r"policy_loss: old_logprob: element \[1, 3\] is nan; where a token counts"):
        policy(old)
    old[1, 3] = -1e4
    with pytest.raises(ValueError, match="policy_loss: not finite: sequence 1 is beyond f32"):
        policy(old)
