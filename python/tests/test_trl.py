"""examples/trl_grpo.py: TRL's own metrics say that rollout and training are one distribution, and without us they do not."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if not os.environ.get("SAMEBITS_NIGHTLY"):
    pytest.skip("what TRL needs is 300 MB: with SAMEBITS_NIGHTLY=1 and trl installed", allow_module_level=True)
trl = pytest.importorskip("trl")

import samebits
import torch
from samebits import adapters

ROOT = Path(__file__).resolve().parents[2]
SHORT = "--steps 2 --prompts 6 --samples 4 --tests 20 --goal 0 --noise 3".split()


@pytest.fixture
def example(monkeypatch):
    """The example as a module, and what runs it with arguments."""
    spec = importlib.util.spec_from_file_location("trl_grpo", ROOT / "examples/trl_grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["trl_grpo.py", *map(str, arguments)])
        return module.main()

    return module, run


def steps(said):
    return [line for line in said.splitlines() if line.startswith("step ")]


def test_the_difference_is_nothing(example, capsys):
    _, run = example
    assert run(*SHORT) == 0
    found = steps(capsys.readouterr().out)
    assert len(found) == 2 and all("sampling_logp_difference/mean 0 max 0 ratio 1 to 1" in line for line in found)
    # There was something to learn.
    assert not any("loss +0.000000" == line for line in found)


def test_a_part_of_the_distribution_and_an_adapter(example, capsys):
    _, run = example
    assert run(*SHORT, "--temperature", 0.7, "--top-p", 0.9, "--lora", 4) == 0
    found = steps(capsys.readouterr().out)
    assert len(found) == 2 and all("sampling_logp_difference/mean 0 max 0 ratio 1 to 1" in line for line in found)


def test_without_us_it_is_not(example, capsys):
    _, run = example
    assert run("--plain", *SHORT) == 1
    said = capsys.readouterr().out
    assert "rollout and training differ" in said
    assert not any("mean 0 max 0 " in line for line in steps(said))


def test_old_weights_are_seen(example, monkeypatch):
    _, run = example
    monkeypatch.setattr(samebits.Engine, "update", lambda self, model: None)
    with pytest.raises(AssertionError, match="in rollout_logprobs, .* in recomputed"):
        run(*SHORT)


def test_what_trl_records_is_scored(example, monkeypatch, tmp_path):
    """A generation as TRL makes it, through the adapter, by the folder that sampled it."""
    module, run = example
    kept = []

    def recording(self, inputs, make=module.Trainer._generate_and_score_completions):
        kept.append(make(self, inputs))
        return kept[-1]

    monkeypatch.setattr(module.Trainer, "_generate_and_score_completions", recording)
    assert run("--steps", 1, *SHORT[2:-1], 0) == 0
    torch.save(dict(kept[0]), tmp_path / "generation.pt")
    out = tmp_path / "rollout.jsonl"
    for command in (
        ["samebits.adapters", "trl", tmp_path / "generation.pt", "--out", out],
        ["samebits", "score", "--model", module.grpo.FOLDER, "--rollout", out],
    ):
        done = subprocess.run([sys.executable, "-m", *map(str, command)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    tokens = int(kept[0]["completion_mask"].sum())
    assert tokens > 24 and done.stdout.startswith(f"0 of {tokens} log-probabilities"), done.stdout
    assert len(adapters.trl(kept[0])) == 24
