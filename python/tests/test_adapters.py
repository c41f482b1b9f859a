"""Log-probabilities as verl, TRL, slime and vLLM record them, computed again by `samebits score`."""

import contextlib
import io
import json
import math
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
import samebits
import samebits.torch
import torch
from samebits import adapters

MODEL = Path(__file__).parents[2] / "tests" / "checkpoints" / "qwen3-adder"
PROMPTS = [[3, 11, 5, 12], [7, 11, 9, 4, 12], [1, 1]]


def command(*words):
    done = subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """What the model sampled, of several lengths."""
    folder = tmp_path_factory.mktemp("rollout")
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"tokens": prompt}) for prompt in PROMPTS))
    more = ["--samples", 2, "--max-tokens", 5, "--out", folder / "rollout.jsonl"]
    code, said = command("samebits", "rollout", "--model", MODEL, "--prompts", folder / "prompts.jsonl", *more)
    assert code == 0, said
    lines = [json.loads(line) for line in (folder / "rollout.jsonl").read_text().splitlines()[1:]]
    return [(line["prompt_tokens"], line["tokens"], line["logprobs"]) for line in lines if line["tokens"]]


def padded(rows, left, dtype=torch.int64, fill=0):
    """Rows as a tensor, and which of it is no padding."""
    width = max(map(len, rows))
    pad = lambda row, value: [value] * (width - len(row)) + row if left else row + [value] * (width - len(row))
    return torch.tensor([pad(row, fill) for row in rows], dtype=dtype), torch.tensor([pad([1] * len(row), 0) for row in rows])


def recorded(project, texts):
    """A file's content, of the shape that the project writes."""
    prompts, tokens, logprobs = (list(column) for column in zip(*texts))
    (prompt, prompt_mask), (response, mask) = padded(prompts, left=True), padded(tokens, left=False)
    values, _ = padded(logprobs, left=False, dtype=torch.float32)
    if project == "verl":
        attention = torch.cat((prompt_mask, mask), 1)
        return {
            "prompts": prompt, "responses": response, "response_mask": mask, "attention_mask": attention,
            "input_ids": torch.cat((prompt, response), 1), "rollout_log_probs": values,
        }
    if project == "trl":
        return {
            "prompt_ids": prompt, "prompt_mask": prompt_mask, "completion_ids": response, "completion_mask": mask,
            "sampling_per_token_logps": values, "advantages": torch.zeros(len(texts)), "num_items_in_batch": mask.sum(),
        }
    if project == "vllm":
        return [
            {"prompt_token_ids": p, "outputs": [{"token_ids": tuple(t), "logprobs": l, "finish_reason": "stop"}]} for p, t, l in texts
        ]
    samples = [
        {
            "index": i, "tokens": p + t, "response_length": len(t), "rollout_log_probs": l, "loss_mask": None,
            "status": "completed", "reward": 1.0,
        }
        for i, (p, t, l) in enumerate(texts)
    ]
    return {"rollout_id": 3, "samples": samples}


def score(rollout, *more):
    return command("samebits", "score", "--model", MODEL, "--rollout", rollout, *more)


@pytest.mark.parametrize("project", ["verl", "trl", "slime", "vllm"])
def test_a_recorded_file_is_scored(project, texts, tmp_path):
    torch.save(recorded(project, texts), tmp_path / "recorded.pt")
    more = ["--out", tmp_path / "rollout.jsonl", "--dtype", "bf16"]
    code, said = command("samebits.adapters", project, tmp_path / "recorded.pt", *more)
    count = sum(len(tokens) for _, tokens, _ in texts)
    assert code == 0 and said.startswith(f"{count} log-probabilities of {len(texts)} texts"), said
    code, said = score(tmp_path / "rollout.jsonl")
    assert code == 0 and said.startswith(f"0 of {count} log-probabilities"), said


def test_one_bit_is_seen(texts, tmp_path):
    batch = recorded("verl", texts)
    values = batch["rollout_log_probs"]
    values[1, 0] = torch.nextafter(values[1, 0], torch.tensor(-9.0))
    adapters.write(adapters.verl(batch), tmp_path / "rollout.jsonl")
    # Beside thresholds of other projects it is nothing; asked for the bits it is red.
    code, said = score(tmp_path / "rollout.jsonl")
    assert code == 0 and "1 of " in said and "gate nemo-rl: probability_error 1" in said, said
    page = tmp_path / "page.html"
    code, said = score(tmp_path / "rollout.jsonl", "--gate", "bitwise", "--gate", "ws1", "--json", "--report", page)
    found = json.loads(said)
    red = [(gate["gate"], gate["metric"]) for gate in found["gates"] if not gate["holds"]]
    assert code == 1 and red == [("bitwise", "differ")] and len(found["gates"]) == 4, said
    assert found["begins"] == [{"from": 0, "to": 0, "texts": 1}] and found["differ"] == 1
    assert '<h1 class="red">' in page.read_text()
    # The same metrics as by other means.
    old = torch.cat([torch.tensor(logprobs) for _, _, logprobs in adapters.verl(batch)]).double()
    new = torch.cat([torch.tensor(logprobs) for _, _, logprobs in texts]).double()
    d = new - old
    for name, expected in {
        "max_dlogp": d.abs().max(), "mean_dlogp": d.abs().mean(), "k1": -d.mean(), "k3": (d.expm1() - d).mean(),
        "probability_error": d.abs().exp().mean(), "pearson": torch.corrcoef(torch.stack((old, new)).exp())[0, 1],
    }.items():
        assert found[name] == pytest.approx(expected.item(), rel=1e-9, abs=1e-12), name
    code, said = score(tmp_path / "rollout.jsonl", "--gate", "none")
    assert code == 2 and "--gate none: has no threshold for models in bf16; there are bitwise, nemo-rl, slime, ws1" in said


def test_metrics_are_those_of_other_means(texts, tmp_path):
    """Of a record that is far off, by formulas of verl, NeMo-RL and TRL in torch."""
    noise = torch.Generator().manual_seed(2)
    off = [(p, t, [v - abs(torch.randn((), generator=noise).item()) / 3 for v in l]) for p, t, l in texts]
    adapters.write(off, tmp_path / "rollout.jsonl", recorded_by="nobody")
    code, said = score(tmp_path / "rollout.jsonl", "--json")
    found = json.loads(said)
    old, new = (torch.cat([torch.tensor(l) for _, _, l in rows]).double() for rows in (off, texts))
    d = new - old
    assert code == 1 and found["differ"] == len(d)
    assert found["probability_error"] == pytest.approx(d.abs().exp().mean().item(), rel=1e-6)
    assert found["mean_dlogp"] == pytest.approx(d.abs().mean().item(), rel=1e-6)
    assert found["k3"] == pytest.approx((d.exp() - 1 - d).mean().item(), rel=1e-5)
    assert found["pearson"] == pytest.approx(torch.corrcoef(torch.stack((old, new)).exp())[0, 1].item(), rel=1e-6)
    diff = (old.exp() - new.exp()).abs()
    for name, expected in {"max_dprob": diff.max(), "mean_dprob": diff.mean(), "std_dprob": diff.std()}.items():
        assert found[name] == pytest.approx(expected.item(), rel=1e-6), name
    assert found["clip_fraction"] == ((d.exp() < 0.8) | (d.exp() > 1.2)).double().mean()
    assert sum(group["tokens"] for group in found["by_place"]) == found["tokens"] == sum(g["tokens"] for g in found["by_length"])
    # By thresholds of one's own.
    (tmp_path / "mine.toml").write_text('[[threshold]]\ngate = "mine"\nmetric = "pearson"\nleast = -1.0\nsource = "a test"\n')
    code, said = score(tmp_path / "rollout.jsonl", "--gate", "mine", "--thresholds", tmp_path / "mine.toml")
    assert code == 0 and "gate mine: pearson" in said, said


def test_settings_of_the_record_are_those_of_the_score(tmp_path):
    engine = samebits.Engine(MODEL)
    how = {"top_p": 0.7, "repetition_penalty": 1.2}
    samples = engine.generate(PROMPTS, 2, max_tokens=6, temperature=1.5, seed=1, **how)
    texts = [(s.prompt_tokens, s.tokens.tolist(), s.logprobs.tolist()) for s in samples]
    adapters.write(texts, tmp_path / "rollout.jsonl", temperature=1.5, sampling=how)
    code, said = score(tmp_path / "rollout.jsonl", "--gate", "bitwise")
    assert code == 0 and said.startswith("0 of "), said
    with pytest.raises(ValueError, match="sampling: `typical_p` is no setting"):
        adapters.write(texts, tmp_path / "rollout.jsonl", sampling={"typical_p": 0.4})


def left(texts, top_k):
    """The tokens that top-k left for each token of each text, by the model's logits."""
    model = samebits.torch.CausalLM.from_pretrained(MODEL)
    with torch.no_grad():
        rows = [model([prompt + tokens])[0][len(prompt) - 1 : -1] for prompt, tokens, _ in texts]
    return [row.topk(top_k).indices.tolist() for row in rows]


@pytest.mark.parametrize("form", ["vllm", "vllm flat", "slime", "sglang"])
def test_what_tokens_were_drawn_from(form, tmp_path):
    """Records that say which tokens were left are compared among those, whatever settings left them; by `CausalLM` too."""
    samples = samebits.Engine(MODEL).generate(PROMPTS, 2, max_tokens=5, seed=8, top_k=3, temperature=0.8, ignore_eos=True)
    texts = [(sample.prompt_tokens, sample.tokens.tolist(), sample.logprobs.tolist()) for sample in samples]
    lists = left(texts, 3)
    batch = recorded(form.split()[0] if form.startswith("vllm") else "slime", texts)
    for number, kept in enumerate(lists):
        ids, offsets = [token for tokens in kept for token in tokens], [3 * place for place in range(len(kept) + 1)]
        if form == "slime":
            batch["samples"][number] |= {"rollout_top_p_token_ids": torch.tensor(ids), "rollout_top_p_token_offsets": torch.tensor(offsets)}
        elif form == "sglang":
            batch["samples"][number]["meta_info"] = {"output_token_sampling_mask": kept}
        else:
            batch[number]["outputs"][0]["sampling_mask"] = {"token_ids": ids, "offsets": offsets} if "flat" in form else kept
    torch.save(batch, tmp_path / "recorded.pt")
    project = form.split()[0].replace("sglang", "slime")
    more = ["--out", tmp_path / "rollout.jsonl", "--temperature", 0.8]
    code, said = command("samebits.adapters", project, tmp_path / "recorded.pt", *more)
    assert code == 0, said
    code, said = score(tmp_path / "rollout.jsonl", "--gate", "bitwise")
    assert code == 0 and said.startswith("0 of 30 "), said
    without = [text[:3] for text in getattr(adapters, project)(batch)]
    adapters.write(without, tmp_path / "rollout.jsonl", temperature=0.8)
    assert score(tmp_path / "rollout.jsonl", "--gate", "bitwise")[0] == 1
    model = samebits.torch.CausalLM.from_pretrained(MODEL)
    sequences, prompt = [prompt + tokens for prompt, tokens, _ in texts], [len(prompt) for prompt, _, _ in texts]
    found = model.logprob(sequences, temperature=0.8, prompt=prompt, sampling_mask=lists)
    for row, start, (_, tokens, logprobs) in zip(found, prompt, texts):
        assert torch.equal(row[start : start + len(tokens)].detach(), torch.tensor(logprobs))
    found.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.logprob(samples).sum().backward()
    assert all(torch.equal(gradients[name], parameter.grad) for name, parameter in model.named_parameters())


def test_masks_that_do_not_fit_are_refused(texts):
    prompt, tokens, logprobs = texts[0]
    one = recorded("vllm", texts[:1])
    one[0]["outputs"][0]["sampling_mask"] = {"token_ids": [1, 2], "offsets": [0, 3]}
    with pytest.raises(ValueError, match="vllm: request 0, output 0: offsets of a sampling mask must go from 0 up to its 2 tokens"):
        adapters.vllm(one)
    one[0]["outputs"][0]["sampling_mask"] = [[tokens[0]]] * (len(tokens) + 1)
    with pytest.raises(ValueError, match=f"{len(tokens)} tokens of response, a sampling mask of {len(tokens) + 1}"):
        adapters.vllm(one)
    model = samebits.torch.CausalLM.from_pretrained(MODEL)
    for mask, line in [([[]] * len(tokens), "has an empty list 0"), ([[tokens[0]]] * (len(tokens) + 1), f"has {len(tokens) + 1} lists of tokens for {len(tokens)}")]:
        with pytest.raises(ValueError, match=f"sampling_mask: sequence 0 {line}"):
            model.logprob([prompt + tokens], prompt=[len(prompt)], sampling_mask=[mask])
    with pytest.raises(ValueError, match="sampling_mask: give `prompt`"):
        model.logprob([prompt + tokens], sampling_mask=[[[1]]])


def test_outputs_of_vllm_in_memory():
    """As its classes have them: of each place several tokens, the sampled one among them."""
    one = lambda **fields: types.SimpleNamespace(**fields)
    places = [{7: one(logprob=-0.5, rank=1), 9: one(logprob=-1.5, rank=2)}, {3: one(logprob=-0.25, rank=1)}]
    request = one(prompt_token_ids=[1, 2], outputs=[one(token_ids=[9, 3], logprobs=places), one(token_ids=[], logprobs=[])])
    assert adapters.vllm([request]) == [([1, 2], [9, 3], [-1.5, -0.25])]
    with pytest.raises(ValueError, match="vllm: request 0, output 0: `logprobs` is missing"):
        adapters.vllm([one(prompt_token_ids=[1], outputs=[one(token_ids=[9], logprobs=None)])])


def test_tokens_of_tools_are_not_compared(texts, tmp_path):
    prompt, tokens, logprobs = next(text for text in texts if len(text[1]) > 3)
    sample = {
        "tokens": prompt + tokens, "response_length": len(tokens),
        "rollout_log_probs": [*logprobs[:1], 0.0, *logprobs[2:]], "loss_mask": [1, 0] + [1] * (len(tokens) - 2),
    }
    found = adapters.slime({"samples": [sample]})
    assert found == [(prompt, tokens[:1], logprobs[:1]), (prompt + tokens[:2], tokens[2:], logprobs[2:])]
    adapters.write(found, tmp_path / "rollout.jsonl")
    code, said = score(tmp_path / "rollout.jsonl")
    assert code == 0 and f"0 of {len(tokens) - 1} " in said, said
    generation = recorded("trl", [(prompt, tokens, sample["rollout_log_probs"])])
    generation["tool_mask"] = torch.tensor([sample["loss_mask"]])
    assert [len(t) for _, t, _ in adapters.trl(generation)] == [1, len(tokens) - 2]


def test_what_was_not_recorded_is_refused(texts, tmp_path):
    text = ([1], [2, 3], [-0.5, math.nan])
    for words, call in (
        ("verl: `rollout_log_probs` is missing", lambda: adapters.verl({"prompts": torch.zeros(1, 1), "responses": torch.zeros(1, 1)})),
        ("trl: row 0: token 1 of the response has the log-probability nan", lambda: adapters.trl(recorded("trl", [text]))),
        ("slime: sample 0: 2 tokens of response, 1 log-probabilities, a mask of 2",
         lambda: adapters.slime(recorded("slime", [([1], [2, 3], [-0.5])]))),
        ("slime: sample 0: response_length is 4; there are 3 tokens",
         lambda: adapters.slime({"samples": [{"tokens": [1, 2, 3], "response_length": 4, "rollout_log_probs": [-1.0] * 4}]})),
        ("trl: is a list; it must hold `prompt_ids` by name", lambda: adapters.trl([1])),
        ("slime: sample 0: is a list", lambda: adapters.slime({"samples": [[1]]})),
        (r"trl: `completion_mask` is \[2\]; it must be a tensor of two axes",
         lambda: adapters.trl(recorded("trl", texts) | {"completion_mask": torch.ones(2)})),
        ("verl: `responses` is a list; it must be a tensor", lambda: adapters.verl(recorded("verl", texts) | {"responses": [[1]]})),
        ("trl: prompts, their mask and log-probabilities have the shapes .* they must have the same rows",
         lambda: adapters.trl(recorded("trl", texts) | {"prompt_ids": torch.ones(1, 1), "prompt_mask": torch.ones(1, 1)})),
        ("trl: responses, their masks and log-probabilities have the shapes",
         lambda: adapters.trl(recorded("trl", texts) | {"completion_mask": torch.ones(len(texts), 1, dtype=torch.int64)})),
        ("temperature nan: use", lambda: adapters.write([text], tmp_path / "x", temperature=math.nan)),
        ("the prompt is empty", lambda: adapters.slime(recorded("slime", [([], [2], [-0.5])]))),
        ("there is no sampled token", lambda: adapters.write([], tmp_path / "x")),
        ("dtype fp8: use", lambda: adapters.write([text], tmp_path / "x", dtype="fp8")),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_files_that_are_none_of_torch_save_are_refused(tmp_path):
    torch.save({"of": Path("x")}, tmp_path / "more.pt")
    torch.save({"prompts": torch.zeros(100)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[:-40])
    (tmp_path / "other.pt").write_bytes(whole.replace(b"data.pkl", b"data.pkx"))
    (tmp_path / "empty.pt").touch()
    # As DataProto.save_to_disk writes it.
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Path("x")))
    for name, words in (
        ("more.pt", "it holds more than tensors, numbers and texts; load it where verl is installed"),
        ("cut.pt", "is no whole file of torch.save"),
        ("other.pt", "is no whole file of torch.save"),
        ("empty.pt", "is no whole file of torch.save"),
        ("pickle.pt", "is no whole file of torch.save; if verl can read it, load it where verl is installed"),
        ("none.pt", "No such file"),
    ):
        code, said = in_process("verl", tmp_path / name, "--out", tmp_path / "x")
        assert code == 2 and words in said and said.count("\n") == 1, said
    assert not (tmp_path / "x").exists()


def in_process(*words):
    """What `python -m samebits.adapters` says to stderr."""
    said, found = io.StringIO(), sys.argv
    sys.argv = ["samebits.adapters", *map(str, words)]
    try:
        with contextlib.redirect_stderr(said):
            return adapters.main(), said.getvalue()
    finally:
        sys.argv = found


def test_texts_that_are_not_padded(texts):
    """What verl keeps of each text alone, and samples of slime that never had a token."""
    nested = lambda column, dtype: torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in column], layout=torch.jagged)
    prompts, tokens, logprobs = zip(*texts)
    batch = {"prompts": nested(prompts, torch.int64), "responses": nested(tokens, torch.int64),
             "rollout_log_probs": nested(logprobs, torch.float32)}
    expected = adapters.verl(recorded("verl", texts))
    assert adapters.verl(batch) == expected
    batch["response_mask"] = nested([[0] + [1] * (len(row) - 1) for row in tokens], torch.int64)
    assert [text[1] for text in adapters.verl(batch)] == [row[1:] for row in tokens if len(row) > 1]
    batch["response_mask"] = nested([[1]] * len(tokens), torch.int64)
    with pytest.raises(ValueError, match=r"verl: row [0-9]+: [0-9]+ tokens of response, [0-9]+ log-probabilities, a mask of 1"):
        adapters.verl(batch)
    aborted = {"tokens": [1, 2], "response_length": 0, "rollout_log_probs": None, "loss_mask": None, "status": "aborted"}
    assert adapters.slime({"samples": [aborted, *recorded("slime", texts)["samples"]]}) == texts
