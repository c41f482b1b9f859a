"""Experts that a rollout records: counted, replayed with the gradient of torch, and read of other projects' records."""

import base64
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import samebits
import samebits.testing
import samebits.torch
import torch
from samebits import adapters
from samebits.experts import by_folder as by_names

CHECKPOINTS = Path(__file__).parents[2] / "tests" / "checkpoints"
MODEL = CHECKPOINTS / "qwen3-moe"
PROMPTS = [[3, 11, 5, 12], [7, 11, 9, 4, 12], [1, 1]]


@pytest.fixture(scope="module")
def samples():
    return samebits.Engine(MODEL).generate(PROMPTS, 2, max_tokens=6, seed=4, ignore_eos=True, experts=True)


def others(samples):
    """Experts of the same form: those of every second token are the next ones round the circle, the last first."""
    found = []
    for sample in samples:
        experts = sample.experts.copy()
        experts[1::2] = (experts[1::2, :, ::-1] + 1) % 8
        found.append(experts)
    return found


def score(path, *more, model=MODEL):
    done = subprocess.run([sys.executable, "-m", "samebits", "score", "--model", str(model), "--rollout", str(path), "--json", *more], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_what_the_engine_chose_is_chosen_again(samples):
    # The first of three blocks has no experts.
    assert all(sample.experts.shape == (len(sample.prompt_tokens) + len(sample.tokens) - 1, 2, 3) for sample in samples)
    assert all(sample.experts.dtype == numpy.int8 for sample in samples)
    model = samebits.torch.CausalLM.from_pretrained(MODEL)
    choices = sum(sample.experts.shape[0] * 2 for sample in samples)
    gradients = []
    for replay in (False, True):
        model.zero_grad()
        found = model.logprob(samples, replay_experts=replay)
        assert model.flips == (0, choices)
        found.sum().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        for sample, row in zip(samples, found):
            prompt = len(sample.prompt_tokens)
            samebits.testing.assert_same_bits(row.detach()[prompt : prompt + len(sample.tokens)], torch.tensor(sample.logprobs))
    for name, gradient in gradients[0].items():
        samebits.testing.assert_same_bits(gradient, gradients[1][name])
    model.logprob([sample.prompt_tokens for sample in samples])
    assert model.flips is None
    assert samebits.Engine(MODEL).generate(PROMPTS[:1], max_tokens=2)[0].experts is None


def test_flips_are_counted_and_judged(samples):
    """`Engine.score` counts them as `CausalLM` does, and `samebits.mismatch` judges them."""
    engine = samebits.Engine(MODEL)
    assert engine.flips is None
    engine.score(samples)
    choices = sum(sample.experts.shape[0] * 2 for sample in samples)
    assert engine.flips == (0, choices)
    wrong = [dataclasses.replace(sample, experts=experts) for sample, experts in zip(samples, others(samples))]
    rows = engine.score(wrong)
    model = samebits.torch.CausalLM.from_pretrained(MODEL)
    with torch.no_grad():
        model.logprob(wrong)
    assert engine.flips == model.flips and 0 < engine.flips[0] < choices
    recorded = [sample.logprobs for sample in samples]
    assert samebits.mismatch(recorded, rows, flips=(0, choices)).ok
    found = samebits.mismatch(recorded, rows, flips=engine.flips)
    assert not found.ok and found.metrics["flips"] == engine.flips[0] and f"{engine.flips[0]} of {choices} choices" in str(found)
    engine.score(engine.generate(PROMPTS[:1], max_tokens=2))
    assert engine.flips is None


def replayed(router, experts, of):
    """The forward of a router of transformers with given experts: their scores among themselves."""

    def forward(hidden):
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = hidden @ router.weight.T
        scores = logits.sigmoid() if of == "deepseek-v3" else logits.softmax(-1)
        weights = scores.gather(1, experts)
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if of == "deepseek-v3" else 0.0))
        return logits, weights * getattr(router, "routed_scaling_factor", 1.0), experts

    return forward


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_replayed_experts_have_the_gradient_of_torch(name):
    transformers = pytest.importorskip("transformers")
    module = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, dtype=torch.float64, experts_implementation="eager")
    model = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / name, dtype="fp32")
    routers = [(i, layer.mlp.gate) for i, layer in enumerate(module.model.layers) if hasattr(layer.mlp, "gate")]
    tokens = [[3, 11, 5, 12, 9, 40, 2], [7, 8, 9, 4]]
    generator = torch.Generator().manual_seed(3)
    count, chosen = routers[0][1].num_experts, routers[0][1].top_k
    experts = [torch.stack([torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in routers]) for _ in text]) for text in tokens]
    # Without the last token, and with those of all blocks: both are read.
    whole = [torch.zeros(len(text), len(module.model.layers), chosen, dtype=torch.int64) for text in tokens]
    for of, to in zip(experts, whole):
        for number, (i, _) in enumerate(routers):
            to[:, i] = of[:, number]
    found = model.logprob(tokens, experts=[of[:-1].numpy() for of in experts], replay_experts=True)
    flips, choices = model.flips
    assert flips > choices / 2 and choices == sum(len(text) - 1 for text in tokens) * len(routers)
    again = model.logprob(tokens, experts=whole, replay_experts=True)
    samebits.testing.assert_same_bits(found.detach(), again.detach())
    weights = torch.linspace(-1, 2, found.numel()).reshape(found.shape)
    (weights * found).sum().backward()
    total, largest = 0.0, 0.0
    for row, text in enumerate(tokens):
        for number, (_, router) in enumerate(routers):
            router.forward = replayed(router, experts[row][:, number], name)
        logits = module(torch.tensor([text])).logits[0].log_softmax(-1)
        for t in range(1, len(text)):
            logp = logits[t - 1, text[t]]
            largest = max(largest, abs(logp.item() - found[row, t].item()))
            total = total + weights[row, t] * logp
    total.backward()
    assert largest < 2e-5
    by_folder = by_names({n: p.grad for n, p in module.named_parameters() if p.grad is not None}, model._family)
    compared = 0
    for parameter, own in model.named_parameters():
        theirs = by_folder[parameter]
        error = (own.grad - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)
        assert error < 1e-4 or theirs.abs().max() < 1e-9, (parameter, error)
        compared += parameter.endswith("gate.weight")
    assert compared == len(routers)


def as_records(project, samples, experts):
    """Records as the projects hold them: of all blocks where they do, nothing of a last token."""
    rows = [sample.prompt_tokens + sample.tokens.tolist() for sample in samples]
    blocks = [numpy.zeros((len(of), 3, 3), "int32") for of in experts]
    for of, to in zip(experts, blocks):
        to[:, 1:] = of
    if project == "verl":
        width = [max(len(s.prompt_tokens) for s in samples), max(len(s.tokens) for s in samples)]
        batch = {name: torch.zeros(len(rows), width[at], dtype=dtype) for name, at, dtype in
                 [("prompts", 0, torch.int64), ("responses", 1, torch.int64), ("rollout_log_probs", 1, torch.float32)]}
        batch["attention_mask"] = torch.zeros(len(rows), sum(width), dtype=torch.int64)
        batch["routed_experts"] = torch.zeros(len(rows), sum(width), 3, 3, dtype=torch.uint8)
        for b, (sample, of) in enumerate(zip(samples, blocks)):
            p, r = len(sample.prompt_tokens), len(sample.tokens)
            batch["prompts"][b, width[0] - p :] = torch.tensor(sample.prompt_tokens)
            batch["responses"][b, :r] = torch.tensor(sample.tokens)
            batch["rollout_log_probs"][b, :r] = torch.tensor(sample.logprobs)
            batch["attention_mask"][b, width[0] - p : width[0] + r] = 1
            batch["routed_experts"][b, width[0] - p : width[0] + r - 1] = torch.tensor(of)
        return batch
    if project in ("slime", "sglang"):
        found = []
        for sample, row, of in zip(samples, rows, blocks):
            one = {"tokens": row, "response_length": len(sample.tokens), "rollout_log_probs": sample.logprobs.tolist()}
            if project == "slime":
                one["rollout_routed_experts"] = of
            else:
                one |= {"meta_info": {"routed_experts": base64.b64encode(of.tobytes()).decode()}, "num_layers": 3, "moe_router_topk": 3}
            found.append(one)
        return {"samples": found}
    found = []
    for sample, of in zip(samples, experts):
        p = len(sample.prompt_tokens)
        output = {"token_ids": sample.tokens.tolist(), "logprobs": sample.logprobs.tolist(), "routed_experts": of[p:].astype("int16")}
        found.append({"prompt_token_ids": sample.prompt_tokens, "prompt_routed_experts": of[:p].astype("int16"), "outputs": [output]})
    return found


@pytest.mark.parametrize("project", ["verl", "slime", "sglang", "vllm"])
def test_records_of_others_are_counted_and_replayed(samples, project, tmp_path):
    read = adapters.slime if project == "sglang" else getattr(adapters, project)
    own = read(as_records(project, samples, [sample.experts for sample in samples]))
    adapters.write(own, tmp_path / "own.jsonl")
    code, found, said = score(tmp_path / "own.jsonl", "--gate", "bitwise", "--replay-experts")
    choices = sum(2 * len(sample.experts) for sample in samples)
    assert code == 0 and (found["flips"], found["choices"], found["differ"]) == (0, choices, 0), said
    adapters.write(read(as_records(project, samples, others(samples))), tmp_path / "others.jsonl")
    code, counted, said = score(tmp_path / "others.jsonl")
    assert code == 0 and counted["differ"] == 0 and counted["flips"] > 10, (said, counted)
    code, found, said = score(tmp_path / "others.jsonl", "--replay-experts", "--gate", "bitwise")
    assert code == 1 and found["differ"] > 10 and [block["block"] for block in found["by_block"]] == [1, 2], said
    # What the command replays is what training replays.
    model = samebits.torch.CausalLM.from_pretrained(MODEL)
    rows = model.logprob(samples, experts=others(samples), replay_experts=True).detach()
    assert model.flips == (found["flips"], found["choices"])
    largest = max(
        (row[len(s.prompt_tokens) :][: len(s.tokens)].double() - torch.tensor(s.logprobs).double()).abs().max().item() for s, row in zip(samples, rows)
    )
    assert largest == found["max_dlogp"]


def test_tokens_of_tools_have_the_experts_before_them(samples):
    sample = samples[2]
    row, tokens = sample.prompt_tokens + sample.tokens.tolist(), len(sample.tokens)
    one = {"tokens": row, "response_length": tokens, "rollout_log_probs": sample.logprobs.tolist(), "loss_mask": [1, 0] + [1] * (tokens - 2)}
    found = adapters.slime({"samples": [{**one, "rollout_routed_experts": sample.experts}]})
    assert [len(text[3]) for text in found] == [len(sample.prompt_tokens), len(row) - 1]
    assert found[1][3] == sample.experts.tolist()


def test_experts_that_do_not_fit_are_refused_by_name(samples, tmp_path):
    model = samebits.torch.CausalLM.from_pretrained(MODEL)
    wrong = samples[0].experts.copy()
    wrong[0, 0], wrong[2, 1] = [1, 9, 2], [4, 4, 1]
    given = dict(replay_experts=True, experts=[wrong, samples[1].experts[:, :1, :2]])
    with pytest.raises(ValueError, match="(?s)sequence 0: token 0, block 1: 9 is no expert.*token 2, block 2: 4 stands twice.*sequence 1: has 1 layers.*has 2 for each"):
        model.logprob(samples[:2], **given)
    with pytest.raises(ValueError, match="sequence 0: has 3 tokens of"):
        model.logprob(samples[:1], experts=[wrong[:3]])
    with pytest.raises(ValueError, match="replay_experts: there are no `experts`"):
        model.logprob([[1, 2]], replay_experts=True)
    with pytest.raises(ValueError, match="experts: there are 1 for 2 sequences"):
        model.logprob([[1, 2], [3]], experts=[wrong])
    dense = samebits.torch.CausalLM.from_pretrained(CHECKPOINTS / "qwen3-adder")
    with pytest.raises(ValueError, match="routed_experts: the model has no mixture of experts"):
        dense.logprob([[1, 2]], experts=[numpy.zeros((1, 2, 3), "int8")])
    with pytest.raises(ValueError, match="experts: the model has no mixture of experts"):
        samebits.Engine(CHECKPOINTS / "qwen3-adder").generate([[1, 2]], experts=True)
    row = samples[0].prompt_tokens + samples[0].tokens.tolist()
    one = {"tokens": row, "response_length": 6, "rollout_log_probs": [-1.0] * 6}
    with pytest.raises(ValueError, match="slime: sample 0: experts of 3 tokens"):
        adapters.slime({"samples": [{**one, "rollout_routed_experts": wrong[:3]}]})
    with pytest.raises(ValueError, match="say `num_layers` and `moe_router_topk`"):
        adapters.slime({"samples": [{**one, "meta_info": {"routed_experts": "AAAA"}}]})
    with pytest.raises(ValueError, match="`routed_experts` has 4 bytes"):
        adapters.slime({"num_layers": 3, "moe_router_topk": 3, "samples": [{**one, "meta_info": {"routed_experts": "AAAAAA=="}}]})
    adapters.write([(row[:4], row[4:], [-1.0] * 6, wrong.tolist())], tmp_path / "rollout.jsonl")
    code, _, said = score(tmp_path / "rollout.jsonl")
    assert code == 2 and "token 0, block 1: 9 is no expert" in said and "4 stands twice" in said, said
