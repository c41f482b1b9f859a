"""Log-probabilities as verl, TRL and slime record them, computed again by `samebits score`."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
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
    (folder / "prompts").write_text("\n".join(map(json.dumps, PROMPTS)))
    more = ["--samples", 2, "--max-tokens", 5, "--out", folder / "rollout.jsonl"]
    code, said = command("samebits", "rollout", "--model", MODEL, "--prompts", folder / "prompts", *more)
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
    samples = [
        {
            "index": i, "tokens": p + t, "response_length": len(t), "rollout_log_probs": l, "loss_mask": None,
            "status": "completed", "reward": 1.0,
        }
        for i, (p, t, l) in enumerate(texts)
    ]
    return {"rollout_id": 3, "samples": samples}


def score(rollout):
    return command("samebits", "score", "--model", MODEL, "--rollout", rollout)


@pytest.mark.parametrize("project", ["verl", "trl", "slime"])
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
    code, said = score(tmp_path / "rollout.jsonl")
    assert code == 1 and "1 of " in said, said


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
        ("slime: sample 0: response_length is 2; rollout_log_probs has 1",
         lambda: adapters.slime(recorded("slime", [([1], [2, 3], [-0.5])]))),
        ("the prompt is empty", lambda: adapters.slime(recorded("slime", [([], [2], [-0.5])]))),
        ("there is no sampled token", lambda: adapters.write([], tmp_path / "x")),
        ("dtype fp8: use", lambda: adapters.write([text], tmp_path / "x", dtype="fp8")),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    torch.save({"of": Path("x")}, tmp_path / "more.pt")
    code, said = command("samebits.adapters", "verl", tmp_path / "more.pt", "--out", tmp_path / "x")
    assert code == 2 and "load it where verl is installed" in said
    assert not (tmp_path / "x").exists()
