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
    model = samebits.torch.CausalLM.from_pretrained(ADDER)
    with pytest.raises(ValueError, match="top_k: sample 0 was sampled so"):
        model.logprob(samples[:1])


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
