"""`samebits.Engine`: the samples of `samebits rollout`, whoever shares their steps; and weights that change."""

import json
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import samebits
import samebits.torch
import torch
from conftest import same
from test_process import in_child

CHECKPOINTS = Path(__file__).resolve().parents[2] / "tests/checkpoints"
ADDER = CHECKPOINTS / "qwen3-adder"
PROMPTS = ["12+34=", "7-42=", "99+99=", "0+0=", "30+47="]
HOW = {"max_tokens": 9, "temperature": 1.25, "seed": 5, "ignore_eos": True}


def told(samples):
    """What samples say, log-probabilities by their bits."""
    return [(s.sequence, s.prompt, s.tokens.tolist(), s.logprobs.tobytes(), s.stop) for s in samples]


def engine(**how):
    return samebits.Engine(ADDER, **how)


@pytest.fixture(scope="module")
def expected():
    return told(engine().generate(PROMPTS, 4, **HOW))


def test_samples_are_those_of_the_command(tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt" if isinstance(prompt, str) else "tokens": prompt}) + "\n" for prompt in PROMPTS))
    more = ["--samples", "4", "--max-tokens", "3", "--temperature", "1.25", "--seed", "5", "--dtype", "bf16"]
    command = [sys.executable, "-m", "samebits", "rollout", "--model", ADDER, "--prompts", prompts, "--out", out, *more]
    subprocess.run(command, check=True)
    _, *lines = map(json.loads, out.read_text().splitlines())
    how = HOW | {"ignore_eos": False, "max_tokens": 3}
    samples = engine(batch=3).generate(PROMPTS, 4, **how)
    assert len(samples) == len(lines) == 20
    for sample, line in zip(samples, lines):
        named = ("sequence", "prompt", "limit", "prompt_tokens", "stop")
        assert {name: getattr(sample, name) for name in named} == {name: line[name] for name in named}
        assert sample.tokens.tolist() == line["tokens"]
        assert same(torch.from_numpy(sample.logprobs), torch.tensor(line["logprobs"], dtype=torch.float32))
    assert {sample.stop for sample in samples} == {"eos", "max_tokens"}


@pytest.mark.parametrize(
    "how",
    [
        {"batch": 1},
        {"batch": 33, "chunk": 2, "page_size": 1},
        {"batch": 3, "page_size": 7, "page_order": "scattered"},
        {"share_prompts": False, "chunk": 3, "page_order": "descending"},
    ],
)
@pytest.mark.parametrize("cpu", [{"threads": 1}, {"threads": 2, "budget": 1 << 20}, {"isa": "scalar"}])
def test_how_texts_are_run_moves_no_bit(how, cpu, expected):
    with samebits.Cpu(**cpu):
        assert told(engine(**how).generate(PROMPTS, 4, **HOW)) == expected


def test_random_numbers_differ_by_seed_and_number(expected):
    one = engine()
    assert told(one.generate(PROMPTS, 4, **HOW | {"seed": 6})) != expected
    # The texts of a prompt differ, and the same text has another number.
    assert len({(prompt, *tokens) for _, prompt, tokens, *_ in expected}) > 15
    assert told(one.generate(PROMPTS[:1], 4, first=4, **HOW))[0][2] != expected[0][2]


def test_the_order_of_arrival_moves_no_bit(expected):
    one = engine(batch=3, page_size=4)
    # Requests one by one, the last prompt first; their tokens are read by turns.
    streams = [one.stream(PROMPTS[i], 4, first=4 * i, **HOW) for i in reversed(range(len(PROMPTS)))]
    found, open_streams = [], list(streams)
    while open_streams:
        for stream in list(open_streams):
            token = next(stream, None)
            if token is None:
                open_streams.remove(stream)
            elif token.sample:
                found.append(token.sample)
    found.sort(key=lambda sample: sample.sequence)
    assert [t[0:1] + t[2:] for t in told(found)] == [t[0:1] + t[2:] for t in expected]


def test_threads_share_an_engine(expected):
    one, found, errors = engine(batch=2), {}, []

    def ask(i):
        try:
            time.sleep(0.01 * i)
            found[i] = one.generate(PROMPTS[i], 4, first=4 * i, **HOW)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors
    together = told(sample for i in range(len(PROMPTS)) for sample in found[i])
    assert [t[0:1] + t[2:] for t in together] == [t[0:1] + t[2:] for t in expected]


def test_a_stream_tells_each_token_as_it_is_made(expected):
    one = engine()
    stream = one.stream(PROMPTS, 4, **HOW)
    tokens, logprobs, ends, seen = {}, {}, {}, []
    for token in stream:
        seen.append((token.sequence, one.times["sampled_tokens"]))
        tokens.setdefault(token.sequence, []).append(token.token)
        logprobs.setdefault(token.sequence, []).append(token.logprob)
        if token.sample:
            ends[token.sequence] = token.sample
            assert token.sample.tokens.tolist() == tokens[token.sequence]
            assert token.sample.logprobs.tolist() == logprobs[token.sequence]
    assert told(ends[i] for i in range(20)) == expected
    # The first tokens were there before the last ones were made.
    assert seen[0][1] == 0 and seen[-1][1] > 100
    assert next(stream, None) is None


def test_the_interpreter_goes_on_while_steps_run():
    one = engine(chunk=4096)
    prompt = [1] + [4, 5, 13] * 1300
    counted, done = 0, threading.Event()

    def ask():
        one.generate([prompt], max_tokens=1)
        done.set()

    threading.Thread(target=ask).start()
    start = time.monotonic()
    while not done.is_set():
        time.sleep(0.001)
        counted += 1
    # One step holds the whole prompt.
    assert time.monotonic() - start > 0.05 and counted > 20, (time.monotonic() - start, counted)


def test_scores_are_the_log_probabilities_of_sampling():
    one = engine()
    for temperature in (1.0, 0.7):
        samples = one.generate(PROMPTS, 3, max_tokens=9, temperature=temperature, seed=2)
        for scores in (one.score(samples), one.score(samples, temperature)):
            assert all(same(torch.from_numpy(s.logprobs), torch.from_numpy(found)) for s, found in zip(samples, scores))
        assert {(s.temperature, s.dtype) for s in samples} == {(temperature, "bf16")}
    # At another temperature they would be others, and so in another dtype.
    with pytest.raises(ValueError, match="temperature: sample 0 was made with 0.7, the engine has 1.0; two are not compared"):
        one.score(samples, 1.0)
    with pytest.raises(ValueError, match="dtype: sample 0 was made with bf16, the engine has fp32"):
        engine(dtype="fp32").score(samples)
    # Samples of several temperatures are scored each at its own; those of the likeliest tokens at 1.
    mixed = samples[:2] + one.generate(PROMPTS[:1], max_tokens=4, temperature=0) + samples[2:3]
    for sample, found in zip(mixed, one.score(mixed)):
        assert same(torch.from_numpy(sample.logprobs), torch.from_numpy(found))
    assert len(one.score(mixed[2:3], 1.0)) == 1


def weights(scale=1.0):
    model = samebits.torch.CausalLM.from_pretrained(ADDER)
    return {name: tensor * scale for name, tensor in model.state_dict().items()}


def test_weights_come_from_memory_too(expected):
    state = weights()
    config = json.loads((ADDER / "config.json").read_text())
    by_tokens = [engine().tokens(prompt)[0] for prompt in PROMPTS]
    assert told(samebits.Engine(state, config).generate(by_tokens, 4, **HOW)) == expected
    assert told(samebits.Engine(state, ADDER).generate(PROMPTS, 4, **HOW)) == expected
    halves = {name: tensor.bfloat16() for name, tensor in state.items()}
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    for given in (halves, arrays, samebits.torch.CausalLM(state, ADDER)):
        assert told(samebits.Engine(given, config).generate(by_tokens, 4, **HOW)) == expected
    with pytest.raises(ValueError, match="tokenizer: the model came without a folder"):
        samebits.Engine(state, config).generate("1+1=")


def test_an_update_is_seen_and_nothing_is_left_of_the_old_weights(expected):
    one = engine()
    other = weights(0.9)
    assert told(one.generate(PROMPTS, 4, **HOW)) == expected
    assert one.update(other) == 1 == one.version
    fresh = samebits.Engine(other, ADDER)
    samples = one.generate(PROMPTS, 4, **HOW)
    assert told(samples) == told(fresh.generate(PROMPTS, 4, **HOW)) != expected
    assert {sample.version for sample in samples} == {1}
    assert one.update(weights()) == 2 and told(one.generate(PROMPTS, 4, **HOW)) == expected


def test_no_text_is_made_by_two_versions(expected):
    one, other = engine(batch=2), weights(0.9)
    stream = one.stream(PROMPTS, 4, **HOW)
    first = next(stream)
    with pytest.raises(RuntimeError, match="update: version 0 of the weights is in use by request 0"):
        one.update(other)
    # Nothing was changed.
    assert one.version == 0
    rest = [token.sample for token in stream if token.sample]
    assert first.sample is None and told(sorted(rest, key=lambda s: s.sequence)) == expected
    stream = one.stream(PROMPTS, 4, **HOW)
    begun = [next(stream) for _ in range(3)]
    assert one.update(other, end=True) == 1
    ended = [token.sample for token in stream if token.sample]
    assert ended and {sample.stop for sample in ended} == {"ended"} and {sample.version for sample in ended} == {0}
    assert {token.sequence for token in begun} >= {sample.sequence for sample in ended}
    for sample in ended:
        # What they had is the beginning of what they would have become.
        whole = expected[sample.sequence][2]
        assert 0 < len(sample.tokens) < len(whole) and sample.tokens.tolist() == whole[: len(sample.tokens)]
    assert told(one.generate(PROMPTS, 4, **HOW)) == told(samebits.Engine(other, ADDER).generate(PROMPTS, 4, **HOW))


def test_a_stream_that_is_closed_or_forgotten_ends_its_texts(expected):
    one = engine(batch=2)
    stream = one.stream(PROMPTS, 4, **HOW)
    next(stream)
    ended = stream.close()
    assert [sample.stop for sample in ended] == ["ended"] * 2 and next(stream, None) is None and stream.close() == []
    stream = one.stream(PROMPTS, 4, **HOW)
    del stream
    assert one.update(weights()) == 1 and told(one.generate(PROMPTS, 4, **HOW)) == expected


def test_weights_that_are_refused_leave_the_old_ones(expected):
    one = engine()
    name = "model.layers.1.mlp.up_proj.weight"

    def changed(change):
        state = weights()
        change(state)
        return state

    def spoil(state):
        state[name][3, 4] = float("nan")

    cases = [
        (lambda state: state.pop(name), "tensor `model.layers.1.mlp.up_proj.weight` is missing"),
        (lambda state: state.update(other=torch.zeros(1)), "tensor `other` is not part of the model"),
        (lambda state: state.update({name: torch.zeros(3, 4)}), r"has shape \[3, 4\]; config.json asks for \[768, 256\]"),
        (spoil, r"element \[3, 4\] is NaN"),
        (lambda state: state.update({name: state[name].double()}), "dtype is .*64; it must be bf16, fp16 or fp32"),
    ]
    for change, line in cases:
        with pytest.raises(ValueError, match=line) as error:
            one.update(changed(change))
        assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="state: is a int"):
        one.update(3)
    assert one.version == 0 and told(one.generate(PROMPTS, 4, **HOW)) == expected


PEAK = """
import pathlib, sys
import samebits, torch

hidden, layers = 512, 12
config = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": 2048, "num_hidden_layers": layers,
          "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 64, "rms_norm_eps": 1e-6,
          "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": True, "rope_theta": 1e4}
state = {"model.embed_tokens.weight": torch.ones(64, hidden), "model.norm.weight": torch.ones(hidden)}
for layer in range(layers):
    at = f"model.layers.{layer}."
    state |= {at + f"self_attn.{name}_proj.weight": torch.ones(hidden, hidden) for name in "qkvo"}
    state |= {at + f"mlp.{name}_proj.weight": torch.ones(2048, hidden) for name in ("gate", "up")}
    state |= {at + "mlp.down_proj.weight": torch.ones(hidden, 2048)}
    state |= {at + f"{name}_layernorm.weight": torch.ones(hidden) for name in ("input", "post_attention")}
state = {name: tensor.bfloat16() for name, tensor in state.items()}
size = sum(tensor.numel() * 2 for tensor in state.values())
engine = samebits.Engine(state, config)

def held(name):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(name)]
    return int(line.split()[1]) << 10

pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
before = held("VmRSS:")
for _ in range(4):
    engine.update(state)
print(size, held("VmHWM:") - before)
"""


def test_an_update_is_made_in_place():
    size, peak = map(int, subprocess.check_output([sys.executable, "-c", PEAK], text=True).split())
    # A layer is a twelfth of it, and the allocator keeps some; whole weights beside the old ones take more than a half.
    assert size > 90 << 20 and peak < size / 4, (size, peak)


def test_what_does_not_fit_is_refused():
    one = engine()
    cases = [
        (lambda: one.generate([[]]), ValueError, "prompt: number 0 has 0 tokens"),
        (lambda: one.generate([[1, 32]]), ValueError, "prompt: element 1 is 32; the vocabulary is 0 to 31"),
        (lambda: one.generate("1+1=", temperature=-1), ValueError, "temperature: is -1; it must be 0 or a number above 0"),
        (lambda: one.generate([[1] * 4096]), ValueError, "prompt: number 0 has 4096 tokens; the model takes 1 to 4095"),
        (lambda: one.generate("1+1=", n=2, first=2**64 - 1), ValueError, "samples: there are more texts"),
        (lambda: engine(batch=0), ValueError, "must be at least 1"),
        (lambda: engine(page_order="random"), ValueError, "page order: `random` is not ascending"),
        (lambda: engine(dtype="int8"), ValueError, "precision: `int8` is not bf16, fp16 or fp32"),
        (lambda: samebits.Engine(CHECKPOINTS / "none"), ValueError, "config.json: cannot be read"),
        (lambda: samebits.Engine({}), ValueError, "config: is missing"),
        (lambda: samebits.Engine({}, {"model_type": "bert"}), ValueError, 'config: `model_type` is "bert"'),
        (lambda: samebits.Engine(ADDER, ADDER), ValueError, "config: the folder has its own"),
    ]
    for call, kind, line in cases:
        with pytest.raises(kind, match=line) as error:
            call()
        assert "\n" not in str(error.value)
    # No text is no request, and it leaves none.
    assert one.generate([]) == [] == one.generate("1+1=", n=0)
    (empty,) = one.generate("1+1=", max_tokens=0)
    assert empty.stop == "max_tokens" and len(empty.tokens) == 0
    assert one.update(weights()) == 1


def test_weights_that_overflow_end_all_requests_by_name():
    state = weights()
    for part in ("gate", "up"):
        state[f"model.layers.3.mlp.{part}_proj.weight"] *= 1e25
    one = samebits.Engine(state, ADDER, dtype="fp32")
    other = one.stream("2+2=", max_tokens=3)
    began = "not finite: layer 3, op silu_mul in fp32 .site layers.3.mlp. of sequence 0, token 0: "
    with pytest.raises(ValueError, match=began):
        one.generate("1+1=", max_tokens=3)
    with pytest.raises(RuntimeError, match=began):
        next(other)
    assert one.update(weights()) == 1 and len(one.generate("1+1=", temperature=0.0, max_tokens=3)) == 1


def test_a_fork_has_no_engine_of_its_parent(expected):
    one = engine()
    one.generate(PROMPTS, 1, **HOW)

    def work():
        try:
            one.generate("1+1=")
        except RuntimeError as error:
            return "it belongs to process" in str(error) and told(engine().generate(PROMPTS, 4, **HOW)) == expected

    assert in_child(work) == 0
    assert told(one.generate(PROMPTS, 4, **HOW)) == expected


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_modules_of_transformers_are_taken_as_they_are(family):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, family)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = kind.config_class(**sizes, num_key_value_heads=2, vocab_size=50, eos_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    model = kind(config).to(torch.bfloat16).eval()
    one = samebits.Engine(model)
    (sample,) = one.generate([3, 1, 4, 1, 5], max_tokens=6, temperature=0.0)
    with torch.no_grad():
        logits = model(torch.tensor([[3, 1, 4, 1, 5, *sample.tokens.tolist()]])).logits[0, 4:-1].float()
    there = logits.log_softmax(-1).gather(-1, torch.from_numpy(sample.tokens).long()[:, None])[:, 0]
    assert (there - torch.from_numpy(sample.logprobs)).abs().max() < 0.05


def test_fields_that_are_passed_by_are_named_once_a_folder(tmp_path):
    """As the command does on stderr; a strict one refuses them."""
    folder = tmp_path / "odd"
    shutil.copytree(ADDER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"unsloth_version": "2026.1", "attn_logit_softcapping": None}))
    line = "config.json: `unsloth_version` is .2026.1., which no model's code reads; it is passed by"
    for make in (samebits.Engine, samebits.torch.CausalLM.from_pretrained):
        with pytest.raises(ValueError, match="strict: .*" + line):
            make(folder, strict=True)
        assert make(ADDER, strict=True)
    with pytest.warns(UserWarning, match=line) as told:
        samebits.Engine(folder)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samebits.Engine(folder)
        samebits.torch.CausalLM.from_pretrained(tmp_path / "odd/../odd")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    with pytest.warns(UserWarning, match=line):
        samebits.torch.CausalLM.from_pretrained(other)
