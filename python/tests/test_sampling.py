"""Penalties, truncation and the draw: held to the logits processors of transformers, and by the engine from sampling to scores."""

import math
from pathlib import Path

import pytest
import samebits
import samebits.torch
import torch
from samebits import ops

ADDER = Path(__file__).resolve().parents[2] / "tests/checkpoints/qwen3-adder"

SETTINGS = [
    {"temperature": 0.7},
    {"top_k": 40},
    {"top_p": 0.9, "temperature": 1.3},
    {"min_p": 0.02},
    {"repetition_penalty": 1.3, "top_k": 100, "top_p": 0.8, "temperature": 0.6},
    {"repetition_penalty": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "temperature": 1.1},
]


def processed(logits, tokens, how):
    """What transformers makes of rows of logits behind a text."""
    from transformers import generation

    asked = [
        ("repetition_penalty", generation.RepetitionPenaltyLogitsProcessor),
        ("temperature", generation.TemperatureLogitsWarper),
        ("top_k", generation.TopKLogitsWarper),
        ("top_p", generation.TopPLogitsWarper),
        ("min_p", generation.MinPLogitsWarper),
    ]
    processors = generation.LogitsProcessorList([made(how[name]) for name, made in asked if name in how])
    return processors(tokens.long().expand(len(logits), -1), logits.clone())


def truncated(logits, tokens, how):
    rows = len(logits)

    def each(name, plain, dtype=torch.float32):
        return torch.full((rows,), how.get(name, plain), dtype=dtype)

    places = [torch.full((rows,), at, dtype=torch.int32) for at in (0, 10, tokens.numel())]
    penalties = each("repetition_penalty", 1.0), each("frequency_penalty", 0.0), each("presence_penalty", 0.0)
    z = ops.penalize(logits, tokens, *places, *penalties)
    scale = torch.full((rows,), 1.0 / how.get("temperature", 1.0), dtype=torch.float64).float()
    return ops.truncate(z, scale, each("top_k", 0, torch.int32), each("top_p", 1.0), each("min_p", 0.0))


@pytest.mark.parametrize("how", SETTINGS, ids=lambda how: "-".join(how))
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_the_support_is_that_of_transformers(how, spread):
    torch.manual_seed(3)
    logits = torch.randn(32, 5000) * spread
    tokens = torch.randint(5000, (200,), dtype=torch.int32)
    y, kept = truncated(logits, tokens, how)
    theirs = processed(logits, tokens, how)
    assert torch.equal(torch.isfinite(y), torch.isfinite(theirs))
    assert torch.equal(kept.long(), torch.isfinite(theirs).sum(-1))
    target = y.argmax(-1).int()
    found, _ = ops.logprob(y, target)
    support = torch.isfinite(theirs)
    exact = torch.log_softmax(torch.where(support, y.double(), -math.inf), -1).gather(1, target.long()[:, None])[:, 0]
    assert ((found - exact).abs() / y[support].abs().max()).max() < 4e-7


def test_penalties_count_the_output_alone():
    logits = torch.tensor([[-1.0, 8.0, 3.0, 2.0]])
    row = lambda value: torch.tensor([value])
    place = lambda value: torch.tensor([value], dtype=torch.int32)
    tokens = torch.tensor([2, 0, 1, 1], dtype=torch.int32)
    bias = torch.tensor([[0.0, 0.0, 0.0, -math.inf]])
    y = ops.penalize(logits, tokens, place(1), place(2), place(4), row(2.0), row(0.25), row(1.0), bias)
    assert y.tolist() == [[-2.0, 2.5, 3.0, -math.inf]]


def test_draws_are_those_of_the_page():
    x = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(4, -1).contiguous()
    shares = torch.tensor([0.05, 0.45, 0.6, 0.9], dtype=torch.float64)
    # The bits of a little-endian word are its halves, the low one first.
    words = [int(share * 2**64) for share in shares.tolist()]
    bits = torch.tensor([word - 2**64 if word >= 2**63 else word for word in words]).view(torch.int32).view(4, 2)
    assert ops.draw(x, bits).tolist() == [0, 1, 2, 3]


HOW = [
    {"top_k": 3, "temperature": 0.8},
    {"top_p": 0.7, "repetition_penalty": 1.2},
    {"min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"logit_bias": {5: 2.0}, "banned_tokens": [4], "temperature": 1.5},
    {"allowed_tokens": [3, 5, 6, 7]},
    {"temperature": 0.0, "presence_penalty": 1.0},
]


def test_what_is_sampled_is_scored_the_same_whoever_was_beside_it():
    one, other = samebits.Engine(ADDER), samebits.Engine(ADDER, batch=3, chunk=2)
    samples = [sample for how in HOW for sample in one.generate(["1+2=", [3, 4]], 2, max_tokens=7, seed=3, ignore_eos=True, **how)]
    streams = [other.stream(["1+2=", [3, 4]], 2, max_tokens=7, seed=3, ignore_eos=True, **how) for how in HOW]
    beside = [token.sample for stream in streams for token in stream if token.sample]
    key = lambda sample: (str(sample.sampling), sample.temperature, sample.sequence)
    for sample, twin in zip(sorted(samples, key=key), sorted(beside, key=key)):
        assert sample.tokens.tolist() == twin.tokens.tolist()
        assert sample.logprobs.tobytes() == twin.logprobs.tobytes()
    for sample, row in zip(samples, one.score(samples)):
        assert row.tobytes() == sample.logprobs.tobytes()
    assert samples[0].sampling == {"top_k": 3} and samples[-1].sampling == {"presence_penalty": 1.0}
    # And trained with: in one batch, each in its own distribution.
    model = samebits.torch.CausalLM.from_pretrained(ADDER)
    logprob = model.logprob(samples)
    again = model.logprob(
        [sample.prompt_tokens + sample.tokens.tolist() for sample in samples],
        sampling=[{**sample.sampling, "temperature": sample.temperature} for sample in samples],
        prompt=[len(sample.prompt_tokens) for sample in samples],
    )
    assert logprob.requires_grad and torch.equal(logprob, again)
    for sample, row in zip(samples, logprob.detach()):
        first = len(sample.prompt_tokens)
        assert row[first : first + len(sample.tokens)].numpy().tobytes() == sample.logprobs.tobytes()
    for batch in (samples, samples[::-1]):
        model.micro_batch = 5
        model.logprob(batch).sum().backward()
    old = torch.zeros(logprob.shape)
    with pytest.raises(ValueError, match="policy_loss: temperature: old_logprob is of 0.8, logprob of 0.8 and 1 and 1.5; ratios of two"):
        samebits.torch.policy_loss(logprob, old, torch.ones(len(samples)), old.int(), denominator=1, temperature=0.8)


# A text that has tokens twice, at every kind of setting; logits are far enough apart that f32 sums leave the same tokens.
TRAINED = [
    *HOW[:-1],
    {"top_k": 6, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 0.7, "presence_penalty": 0.3, "temperature": 1.2},
    # Tokens of the text whose logits have another sign with their biases.
    {"logit_bias": {token: (-8.0, 8.0)[token % 2] for token in range(3, 13)}, "repetition_penalty": 1.4, "temperature": 2.0},
]


def left(logits, before, prompt, how):
    """What the page makes of the logits behind some tokens, with a gradient."""
    count = torch.bincount(torch.tensor(before[prompt:], dtype=torch.long), minlength=len(logits)).float()
    there = torch.bincount(torch.tensor(before), minlength=len(logits)) > 0
    bias = torch.zeros(len(logits))
    if "allowed_tokens" in how:
        bias += -math.inf
        bias[how["allowed_tokens"]] = 0.0
    for token, value in how.get("logit_bias", {}).items():
        bias[token] += value
    bias[how.get("banned_tokens", [])] = -math.inf
    z, r = logits + bias, how.get("repetition_penalty", 1.0)
    z = torch.where(there, torch.where(z < 0, z * r, z / r), z)
    z = z - how.get("frequency_penalty", 0.0) * count - how.get("presence_penalty", 0.0) * (count > 0)
    z = z / how.get("temperature", 1.0)
    choosing = {name: how[name] for name in ("top_k", "top_p", "min_p") if name in how}
    kept = processed(z.detach()[None], torch.tensor(before), choosing)[0] > -math.inf
    return torch.where(kept, z, -math.inf)


def test_gradients_under_a_rule_are_those_of_torch():
    transformers = pytest.importorskip("transformers")
    module = transformers.AutoModelForCausalLM.from_pretrained(ADDER, dtype=torch.float32)
    with torch.no_grad():
        # Of a model that is sure of nothing.
        for parameter in module.parameters():
            parameter *= 0.8
    model = samebits.torch.CausalLM(module, ADDER, dtype="fp32")
    samples = []
    for number, how in enumerate(TRAINED):
        samples += samebits.Engine(model, ADDER, dtype="fp32").generate([[3, 4, 5]], 2, max_tokens=9, seed=number, ignore_eos=True, **how)
    how_of = [how for how in TRAINED for _ in range(2)]
    weights = [torch.linspace(-1, 2, len(sample.tokens)) for sample in samples]
    found = model.logprob(samples)
    sum((w * row[3 : 3 + len(w)]).sum() for w, row in zip(weights, found)).backward()
    # By sums in f64 of the same weights.
    module.double()
    total, largest = 0.0, 0.0
    for sample, how, weight in zip(samples, how_of, weights):
        text = sample.prompt_tokens + sample.tokens.tolist()
        logits = module(torch.tensor([text])).logits[0]
        assert logits.dtype == torch.float64
        for t, (token, w) in enumerate(zip(sample.tokens.tolist(), weight), start=3):
            logp = torch.log_softmax(left(logits[t - 1], text[:t], 3, how), -1)[token]
            largest = max(largest, abs(logp.item() - sample.logprobs[t - 3]))
            total = total + w * logp
    total.backward()
    assert largest < 2e-5
    theirs = dict(module.named_parameters())
    for name, parameter in model.named_parameters():
        error = (parameter.grad - theirs[name].grad).abs().max() / theirs[name].grad.abs().max()
        assert error < 1e-4, (name, error)


def test_a_token_that_its_settings_leave_out_is_named():
    model = samebits.torch.CausalLM.from_pretrained(ADDER)
    given = dict(sampling={"allowed_tokens": [5, 6]}, prompt=[1, 1])
    with pytest.raises(ValueError, match='sampling: .*"allowed_tokens":\\[5,6\\].* leave out token 2 of sequence 1'):
        model.logprob([[3, 5], [3, 5, 7]], **given)
    with torch.no_grad():
        assert model.logprob([[3, 5], [3, 5, 7]], **given)[1, 2] == -math.inf
    for given, says in [
        ({"sampling": {"typical_p": 0.5}, "prompt": [1]}, "sampling: `typical_p` is no setting"),
        ({"sampling": {"top_k": 3}}, "sampling: give `prompt`"),
        ({"prompt": [1]}, "prompt: says where settings begin"),
        ({"sampling": [{}, {}], "prompt": [1]}, "sampling: there are 2 for 1 sequences"),
        ({"sampling": {"top_k": 3}, "prompt": [0]}, "prompt: that of sequence 0 has 0 of its 2 tokens"),
        ({"sampling": {"top_p": 3}, "prompt": [1]}, "top_p: is 3"),
    ]:
        with pytest.raises(ValueError, match=says):
            model.logprob([[3, 4]], **given)


def test_texts_end_where_they_are_told():
    one = samebits.Engine(ADDER)
    (sample,) = one.generate("12+34=", temperature=0.0, stop="4")
    assert (one.text(sample.tokens), sample.stop) == ("4", "stop_text")
    (sample,) = one.generate("12+34=", temperature=0.0, stop_token_ids=[int(sample.tokens[0])])
    assert sample.stop == "stop_token" and len(sample.tokens) == 1


@pytest.mark.parametrize(
    "how, says",
    [
        ({"top_p": 2.0, "min_p": -1.0}, "top_p: is 2.*min_p: is -1"),
        ({"frequency_penalty": math.nan}, "frequency_penalty: is nan"),
        ({"banned_tokens": [-1]}, "banned_tokens: "),
        ({"allowed_tokens": []}, "allowed_tokens: leave no token"),
        ({"stop": ""}, "stop: holds a text without characters"),
    ],
)
def test_settings_out_of_their_range_are_refused_by_name(how, says):
    with pytest.raises(ValueError, match=says):
        samebits.Engine(ADDER).generate("1+1=", **how)
