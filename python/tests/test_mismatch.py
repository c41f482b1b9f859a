"""Recorded log-probabilities held to gates: by a function, a fixture of pytest and a callback of TRL."""

import math
import os
import subprocess
import sys
import types

import pytest
import samebits
import torch

OLD = [[-0.5, -1.0, -2.0, -0.25], [-3.0, -0.125]]


def moved(by):
    return [[value + by * (t >= 2) for t, value in enumerate(row)] for row in OLD]


def test_equal_bits_hold_everywhere():
    found = samebits.mismatch(OLD, OLD, gate=["bitwise", "nemo-rl", "ws1"])
    assert found.ok and found.metrics["differ"] == 0 and "exactly zero" in str(found)


def test_a_difference_is_told_and_judged():
    found = samebits.mismatch(OLD, moved(0.125), gate=["bitwise", "ws1"])
    assert not found.ok and found.metrics["differ"] == 2 and found.metrics["max_dlogp"] == 0.125
    held = {(gate["gate"], gate["metric"]): gate["holds"] for gate in found.metrics["gates"]}
    assert held == {("bitwise", "differ"): False, ("ws1", "max_dlogp"): False, ("ws1", "k3"): True, ("ws1", "clip_fraction"): True}
    assert found.metrics["begins"] == [{"from": 2, "to": 3, "texts": 1}]
    assert "first: sequence 0, position 2: -2 in the rollout, -1.875 now" in str(found)
    # What is masked is not compared; what has no probability is infinitely far.
    assert samebits.mismatch(OLD, moved(0.125), [[1, 1, 0, 0], [1, 1]]).ok
    found = samebits.mismatch(torch.tensor(OLD[:1]), torch.tensor([[-0.5, -math.inf, -2.0, -0.25]]), gate="nemo-rl")
    assert not found.ok and found.metrics["impossible"] == 1 and found.metrics["k3"] is None


@pytest.mark.parametrize(
    "given, says",
    [
        (dict(recomputed=OLD[:1]), "recomputed: its sequences have the lengths .4., those recorded .4, 2."),
        (dict(mask=[[1, 1, 1, 2], [1, 1]]), "mask: holds more than 0 and 1"),
        (dict(mask=[[0] * 4, [0] * 2]), "recorded: there is no token"),
        (dict(gate="none"), "gate none: has no threshold for models in bf16; there are bitwise, nemo-rl, slime, ws1"),
        (dict(thresholds="[[threshold]]"), "(?s)thresholds: .*missing field `gate`"),
    ],
)
def test_what_cannot_be_judged_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        samebits.mismatch(OLD, **{"recomputed": OLD, **given})


def test_the_fixture_fails_the_test(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "def test_right(samebits_mismatch):\n    assert samebits_mismatch([[-1.0]], [[-1.0]]).ok\n\n"
        "def test_wrong(samebits_mismatch):\n    samebits_mismatch([[-1.0]], [[-1.5]], gate='nemo-rl')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--color=no", "."]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "COLUMNS": "1000"}, capture_output=True, text=True)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout
    assert "gate nemo-rl: probability_error 1.648721 <= 1.05: DOES NOT HOLD" in done.stdout, done.stdout


def test_the_callback_stops_a_run():
    pytest.importorskip("transformers")
    from samebits.trl import Mismatched, StopOnMismatch

    state, largest = types.SimpleNamespace(global_step=3), "sampling/sampling_logp_difference/max"
    StopOnMismatch().on_log(None, state, None, {"loss": 0.1, largest: 0.0})
    StopOnMismatch().on_log(None, state, None, {"train_runtime": 1.0})
    StopOnMismatch("ws1").on_log(None, state, None, {"loss": 0.1, largest: 0.03})
    with pytest.raises(Mismatched, match=f"step 3: {largest} is 1e-06; gate bitwise lets it be 0 at most"):
        StopOnMismatch().on_log(None, state, None, {"loss": 0.1, largest: 1e-6})
    with pytest.raises(Mismatched, match="is nan"):
        StopOnMismatch("ws1", "fp32").on_log(None, state, None, {"loss": 0.1, largest: math.nan})
    with pytest.raises(ValueError, match="step 3 logs no `sampling/"):
        StopOnMismatch().on_log(None, state, None, {"loss": 0.1})
    with pytest.raises(ValueError, match="gate nemo-rl: has no threshold for what TRL logs"):
        StopOnMismatch("nemo-rl")
