"""Low-rank adapters of PEFT folders: beside PEFT, in `Engine` and in `CausalLM`."""

import json
import shutil
import warnings

import pytest
import samebits
import samebits.torch
import torch
from conftest import same, thresholds
from test_causal_lm import CHECKPOINTS, ROOT, command, counted, load, sequences

ADAPTERS = ROOT / "tests/adapters"
PLACES = {"deepseek-v3": "deepseek-v3", "gpt2": "gpt2", "phi3-partial": "phi3-partial", "qwen3": "qwen3", "qwen3-other": "qwen3"}


def bound():
    (row,) = [row for row in thresholds("beside_torch.toml") if row["of"] == "adapters"]
    return row["relative"]


def apart(ours, theirs):
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()).item()


def model(name, **how):
    return samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / PLACES[name], adapter=ADAPTERS / name, **how)


def nll(logprob, count):
    return samebits.torch.nll(logprob, count, denominator=count.sum().item())[0]


@pytest.mark.parametrize("name", PLACES)
def test_recorded(name):
    """Logits, loss and gradients are those that PEFT recorded, and the matrices of the adapter alone have gradients."""
    recorded = load(ADAPTERS / name / "reference.safetensors")
    ours, tokens = model(name, dtype="fp32"), recorded["tokens"].long()
    with torch.no_grad():
        assert apart(ours(tokens), recorded["logits.fp32"]) < bound()
    count = torch.ones_like(recorded["tokens"])
    count[:, 0] = 0
    loss = nll(ours.logprob(tokens), count)
    loss.backward()
    assert apart(loss.detach(), recorded["loss"]) < bound()
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert set(found) == {name for name in recorded if ".lora_" in name}
    for name, gradient in found.items():
        assert apart(gradient, recorded[name]) < bound(), name


def test_peft_goes_on(tmp_path):
    """A folder that was trained here is one of PEFT's: loaded there, logits and gradients are those of here."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    place, data = CHECKPOINTS / "qwen3", ROOT / "tests/gradients/qwen3.safetensors"
    out = ["--out", tmp_path / "run", "--steps", 2, "--batch", 6, "--lr", 0.01, "--dtype", "fp32"]
    command("train", "--model", place, "--adapter", ADAPTERS / "qwen3", "--data", data, *out)
    base = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "run", is_trainable=True).eval()
    ours = samebits.torch.CausalLM.from_pretrained(place, adapter=tmp_path / "run", dtype="fp32")
    tokens = load(data)["tokens"][:6].long()
    logits = theirs(tokens).logits
    with torch.no_grad():
        assert apart(ours(tokens), logits) < bound()
    torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None]).mean().neg().backward()
    count = torch.ones_like(tokens, dtype=torch.int32)
    count[:, 0] = 0
    nll(ours.logprob(tokens), count).backward()
    found = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            name = name.replace(".default.", ".")
            assert apart(found.pop(name).grad, parameter.grad) < bound(), name
    assert not found


def test_engine_and_model(tmp_path):
    """What an engine samples with two adapters and none in one batch is what `CausalLM` finds, and the engine itself."""
    adapters = {"a": ADAPTERS / "qwen3", "b": ADAPTERS / "qwen3-other"}
    engine = samebits.Engine(CHECKPOINTS / "qwen3", adapters=adapters)
    assert engine.adapters.keys() == {"a", "b"} and all(len(sha256) == 64 for sha256 in engine.adapters.values())
    prompts, how = sequences(150, (4, 4, 4)), {"max_tokens": 6, "ignore_eos": True, "seed": 3}
    samples = engine.generate(prompts, 2, adapter=["a", None, "b"], **how)
    assert [sample.adapter for sample in samples] == ["a", "a", None, None, "b", "b"]
    assert [sample.adapter_sha256 for sample in samples[:3]] == [engine.adapters["a"]] * 2 + [None]
    assert all((row == sample.logprobs).all() for row, sample in zip(engine.score(samples), samples))
    # Alone, in the same place.
    for at, adapter in enumerate(["a", None, "b"]):
        alone = engine.generate(prompts[at], 2, adapter=adapter, first=2 * at, **how)
        assert [(one.tokens == two.tokens).all() for one, two in zip(alone, samples[2 * at :])] == [True, True]
        assert [(one.logprobs == two.logprobs).all() for one, two in zip(alone, samples[2 * at :])] == [True, True]
    with pytest.raises(ValueError, match="the model has `a`, `b`; say which"):
        engine.generate(prompts, **how)
    with pytest.raises(ValueError, match="`c` is none of the model"):
        engine.generate(prompts, adapter="c", **how)
    other = samebits.Engine(CHECKPOINTS / "qwen3", adapters={"a": ADAPTERS / "qwen3-other"})
    with pytest.raises(ValueError, match="adapter: sample 0 was made with `a` of SHA-256"):
        other.score(samples[:1])
    # In training.
    ours = model("qwen3")
    logprob = ours.logprob(samples[:2])
    start = len(samples[0].prompt_tokens)
    assert all(same(row[start : start + 6].detach(), torch.tensor(sample.logprobs)) for row, sample in zip(logprob, samples))
    with pytest.raises(ValueError, match="adapter: sample 2 was made without an adapter, the model has one"):
        ours.logprob(samples[2:3])
    with pytest.raises(ValueError, match="adapter: sample 0 was made with an adapter, the model has none"):
        samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / "qwen3").logprob(samples[:1])
    # What was trained is served next.
    nll(logprob, counted([[0] * row.shape[0] for row in logprob])).backward()
    samebits.torch.AdamW(ours, lr=0.1).step()
    before = engine.adapters["a"]
    assert engine.update(ours, adapter="a") == 1 and engine.adapters["a"] != before
    fresh = engine.generate(prompts[:1], 2, adapter="a", **how)
    logprob = ours.logprob(fresh)
    assert all(same(row[start : start + 6].detach(), torch.tensor(sample.logprobs)) for row, sample in zip(logprob, fresh))
    ours.save_pretrained(tmp_path)
    again = samebits.Engine(CHECKPOINTS / "qwen3", adapters={"a": tmp_path})
    assert again.adapters["a"] == engine.adapters["a"]


def test_several_in_one_batch(tmp_path):
    """Samples of two adapters and of none in one batch: each has its log-probabilities, and each adapter the gradient of its own alone."""
    adapters = {"a": ADAPTERS / "qwen3", "b": ADAPTERS / "qwen3-other"}
    engine = samebits.Engine(CHECKPOINTS / "qwen3", adapters=adapters)
    prompts, how = sequences(150, (4, 3, 5)), {"max_tokens": 6, "ignore_eos": True, "seed": 3, "temperature": 0.7, "top_k": 9}
    samples = engine.generate(prompts, 2, adapter=["a", None, "b"], **how)
    both = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / "qwen3", adapter=adapters)
    logprob = both.logprob(samples)
    for row, sample in zip(logprob, samples):
        start = len(sample.prompt_tokens)
        assert same(row[start : start + 6].detach(), torch.tensor(sample.logprobs))
    weights = torch.tensor([0.5, -1.0, 2.0, 0.25, -0.75, 1.5])
    (logprob.sum(1) * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in both.named_parameters()}
    for name, rows in {"a": [0, 1], "b": [4, 5]}.items():
        alone = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / "qwen3", adapter=adapters[name])
        (alone.logprob([samples[row] for row in rows]).sum(1) * weights[rows]).sum().backward()
        for parameter, tensor in alone.named_parameters():
            assert same(gradients.pop(f"{name}/{parameter}"), tensor.grad), parameter
    assert not gradients
    # Of lists of tokens the call says it.
    texts = [sample.prompt_tokens + sample.tokens.tolist() for sample in samples]
    prompt, sampling = [len(sample.prompt_tokens) for sample in samples], {"temperature": 0.7, "top_k": 9}
    said = both.logprob(texts, sampling=sampling, prompt=prompt, adapter=[sample.adapter for sample in samples])
    for row, sample in zip(said, samples):
        start = len(sample.prompt_tokens)
        assert same(row[start : start + 6].detach(), torch.tensor(sample.logprobs))
    for given, line in [({}, "the model has `a`, `b`; say which"), ({"adapter": "c"}, "`c` is none of the model"), ({"adapter": ["a"]}, "adapter: there are 1 for 6")]:
        with pytest.raises(ValueError, match=line):
            both.logprob(texts, **given)
    stranger = samebits.Engine(CHECKPOINTS / "qwen3", adapters={"c": ADAPTERS / "qwen3"}).generate(prompts[:1], **how)
    with pytest.raises(ValueError, match="adapter: sample 0 was made with `c`, the model has `a`, `b`; two are not compared"):
        both.logprob(stranger)
    # What was trained is served, and saved as PEFT saves adapters that have names.
    samebits.torch.AdamW(both, lr=0.1).step()
    before = dict(engine.adapters)
    assert engine.update(both, adapter="b") == 1 and engine.adapters["b"] != before["b"] and engine.adapters["a"] == before["a"]
    both.save_pretrained(tmp_path)
    again = samebits.Engine(CHECKPOINTS / "qwen3", adapters={"b": tmp_path / "b"})
    assert again.adapters["b"] == engine.adapters["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_steps_are_those_of_train(tmp_path):
    """A step is one of `samebits train --adapter`, in parts and without."""
    place, data = CHECKPOINTS / "phi3-partial", ROOT / "tests/gradients/phi3-partial.safetensors"
    out = ["--out", tmp_path / "run", "--steps", 3, "--batch", 6, "--lr", 0.01]
    lines = command("train", "--model", place, "--adapter", ADAPTERS / "phi3-partial", "--data", data, *out).splitlines()
    given = load(data)
    for size in (6, 4):
        ours = model("phi3-partial")
        optimizer = samebits.torch.AdamW(ours, lr=0.01, weight_decay=0.0)
        for step, line in enumerate(lines):
            rows = slice(6 * step, 6 * step + 6)
            tokens, count = given["tokens"][rows].long(), given["mask"][rows]
            with ours.accumulate():
                for first in range(0, 6, size):
                    part = slice(first, first + size)
                    samebits.torch.nll(ours.logprob(tokens[part]), count[part], denominator=count.sum().item())[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            assert line.split()[-1] == samebits.torch.sha256(ours), (size, line)
    ours.save_pretrained(tmp_path / "saved")
    trained, saved = (load(tmp_path / run / "adapter_model.safetensors") for run in ("run", "saved"))
    assert trained.keys() == saved.keys() and all(same(trained[name], saved[name]) for name in trained)
    assert json.loads((tmp_path / "saved/adapter_config.json").read_text()) == json.loads((tmp_path / "run/adapter_config.json").read_text())


def test_refused(tmp_path):
    """What does not fit is a ValueError in one line; a state dictionary is taken back."""
    with pytest.raises(ValueError, match="the adapter is for another model"):
        samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / "gpt2", adapter=ADAPTERS / "qwen3")
    with pytest.raises(ValueError, match="ask for \\[6, 128\\]"):
        samebits.Engine(CHECKPOINTS / "llama", adapters={"a": ADAPTERS / "qwen3"})
    ours, other = model("qwen3"), model("qwen3")
    for parameter in ours.parameters():
        parameter.data += 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(ours.state_dict())
    assert same(ours.logprob([[3, 4, 5]]).detach(), other.logprob([[3, 4, 5]]).detach())
    shutil.copytree(ADAPTERS / "qwen3", tmp_path / "a")
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(config | {"lora_dropout": 0.1}))
    drops = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / "qwen3", adapter=tmp_path / "a")
    with torch.no_grad():
        drops.logprob([[3, 4, 5]])
    with pytest.raises(ValueError, match="`lora_dropout` is 0.1; gradients are made without a dropout"):
        drops.logprob([[3, 4, 5]])
