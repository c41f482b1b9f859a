"""The gate for callables, and its pytest plugin: what is right passes, and each fault turns the judgment red that is for it."""

import os
import subprocess
import sys

import numpy
import pytest
import samebits
import torch
from samebits.judging import judgment_of, reason_of


def rms_norm(x, w, eps):
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * w.float()).to(x.dtype)


def of_the_batch(x, w, eps):
    """Whose sum is split by how many rows there are."""
    halves = x.float().pow(2).chunk(2 if len(x) > 2 else 1, -1)
    total = sum(half.sum(-1, keepdim=True) for half in halves)
    return (x.float() * torch.rsqrt(total / x.shape[-1] + eps) * w.float()).to(x.dtype)


def of_the_process(x, w, eps):
    y = rms_norm(x, w, eps)
    return torch.nextafter(y, torch.full_like(y, 2.0)) if "SAMEBITS_JUDGED" in os.environ else y


def gemm(x, w):
    return (x.float() @ w.float().T).to(x.dtype)


def inaccurate(x, w, eps):
    return rms_norm(x, w, eps + 0.1)


def contiguous_only(x, w, eps):
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape)
    return rms_norm(flat, w, eps)


class Stateful:
    __name__ = "stateful"

    def __init__(self):
        self.calls = 0

    def __call__(self, x, w, eps):
        self.calls += 1
        return rms_norm(x, w, eps) + (self.calls > 1) * 0.5


def refuses(x, w, eps):
    raise NotImplementedError("on Tuesdays")


def raises(x, w, eps):
    raise ZeroDivisionError("of the callable")


def add(a, b):
    """By place and by name; it talks, which must not reach the wire."""
    print("adding")
    return (a.astype(numpy.float32) + b.astype(numpy.float32)).astype(a.dtype)


SMALL = {"cases": ["rms_norm/bf16/small-normal-bf16"]}
SMALL_FP32 = {"cases": ["rms_norm/fp32/small-normal-fp32"], "dtypes": ["fp32"]}


def judge(fn, op="rms_norm", **more):
    return samebits.judge(fn, op, **{**SMALL, **more})


def test_what_is_right_passes():
    report = judge(rms_norm, cases=["rms_norm/bf16/small-*"])
    assert report.ok and report.red == [] and report.skipped == {}
    assert report.verdicts["accuracy"]["pass"] == 2
    asked = {name for name, counts in report.verdicts.items() if counts.get("pass")}
    axes = ("batch", "position", "neighbours", "padding", "layout", "threads", "repeat", "order", "restart")
    assert {"accuracy", *(f"invariance/{axis}" for axis in axes)} <= asked
    # Not claimed, so not asked.
    assert "golden" not in report.verdicts
    assert "GREEN" in str(report) and "rms_norm" in report.html() and report.html().startswith("<!")


def test_goldens_are_asked_of_who_claims_them():
    ours = lambda x, w, eps, dtype: samebits.ops.rms_norm(x.contiguous(), w, eps=eps, dtype=dtype)
    report = judge(ours, canonical=True, cases=["rms_norm/bf16/small-*"], judgments=["golden", "accuracy"])
    assert report.ok and report.verdicts["golden"]["pass"] == 6
    # The order of torch's sums is another; who does not claim ours is not asked for it.
    asked = {"cases": ["gemm/bf16/range-*"], "judgments": ["arithmetic"]}
    assert judge(gemm, "gemm", **asked).ok
    report = judge(gemm, "gemm", canonical=True, **asked)
    assert not report.ok and "order" in reason_of(report.red[0])


def test_arrays_of_numpy_and_what_is_not_offered():
    report = samebits.judge(add, "add", ["fp32", "bf16"], library="numpy", cases=["add/fp32/small-normal-fp32", "add/bf16/small-normal-*"], axes=["batch", "restart", "layout"])
    assert report.ok
    assert report.verdicts["invariance/restart"]["pass"] == 2
    assert "out fp16: add does not take a dtype" in str(report)


@pytest.mark.parametrize(
    "fn, judgment, words, more",
    [
        (of_the_batch, "invariance/batch", "batch = ", {"axes": ["batch", "repeat"], **SMALL_FP32}),
        (of_the_process, "invariance/restart", "restart = ", {"axes": ["restart", "repeat"]}),
        (inaccurate, "accuracy", "", {"axes": ["repeat"]}),
        (contiguous_only, "invariance/layout", "layout = ", {"axes": ["layout", "repeat"]}),
        (Stateful(), "invariance/repeat", "repeat = ", {"judgments": ["invariance"], "axes": ["repeat"]}),
        (refuses, "accuracy", "required (bf16 is mandatory) and not offered: on Tuesdays", {"judgments": ["accuracy"]}),
        (raises, "accuracy", "ZeroDivisionError: of the callable", {"judgments": ["accuracy"]}),
    ],
)
def test_a_fault_is_red_where_it_belongs(fn, judgment, words, more):
    report = judge(fn, **more)
    assert not report.ok
    assert {judgment_of(record) for record in report.red} == {judgment}
    assert words in reason_of(report.red[0])
    assert "RED" in str(report)


def test_what_another_process_cannot_import_is_said():
    report = judge(lambda x, w, eps: rms_norm(x, w, eps), axes=["repeat", "restart"])
    assert report.ok and "invariance/restart" not in report.verdicts
    assert "not asked: invariance/restart: another process cannot import" in str(report)
    with pytest.raises(ValueError, match="nothing is left to ask"):
        judge(lambda x, w, eps: rms_norm(x, w, eps), axes=["restart"])


def test_a_callable_that_hangs_is_an_error_and_the_run_goes_on():
    import time

    def slow(x, w, eps):
        time.sleep(1.5 * (len(x) == 5))
        return rms_norm(x, w, eps)

    report = judge(slow, timeout=0.5, axes=["repeat"], judgments=["accuracy"])
    assert not report.ok and "no answer within 0.5 s" in reason_of(report.red[0])


def test_what_does_not_fit_is_refused():
    for words, error, call in (
        ("op rms: use one of", ValueError, lambda: judge(rms_norm, "rms")),
        ("takes 1 tensors; rms_norm has the inputs x, w", TypeError, lambda: judge(lambda x, /: x)),
        ("`other` has no default and is no input", TypeError, lambda: judge(lambda x, w, *, other: x)),
        ("axis tile: rms_norm has batch", ValueError, lambda: judge(rms_norm, axes=["tile"])),
        ("--dtype", ValueError, lambda: judge(rms_norm, dtypes=["fp8"])),
        ("--case rms_norm/none", ValueError, lambda: judge(rms_norm, cases=["rms_norm/none"])),
        ("library jax: use one of torch, numpy", ValueError, lambda: judge(rms_norm, library="jax")),
        ("no case of the selection can be asked: param `rounding`", ValueError,
         lambda: judge(rms_norm, cases=["rms_norm/bf16/hf-normal-bf16"])),
        ("layouts", RuntimeError, lambda: judge(rms_norm, layouts=["sideways"])),
    ):
        with pytest.raises(error, match=words.replace("`", ".")):
            call()


TESTS = """
import pytest
from test_judge import SMALL_FP32, of_the_batch, rms_norm

@pytest.mark.samebits(rms_norm, op="rms_norm", axes=["batch", "repeat"], **SMALL_FP32)
def test_right():
    pass

@pytest.mark.samebits(of_the_batch, op="rms_norm", axes=["batch", "repeat"], **SMALL_FP32)
def test_wrong(samebits_judgment):
    assert samebits_judgment.report.records and samebits_judgment.name

@pytest.mark.samebits(of_the_batch, op="rms_norm", axes=["batch", "repeat"], waivers="waivers.toml", **SMALL_FP32)
def test_waived():
    pass

@pytest.mark.samebits(rms_norm, op="rms_norm", axes=["batch", "repeat"], name="of_the_batch", waivers="waivers.toml", **SMALL_FP32)
def test_stale():
    pass
"""
WAIVERS = """
[[waiver]]
impls = ["of_the_batch"]
cases = ["rms_norm/fp32/small*"]
judgment = "invariance"
axis = "batch"
reason = "known"
owner = "somebody@example.org"
expires = "2999-01-01"
"""


def test_the_plugin(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "waivers.toml").write_text(WAIVERS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--strict-markers", "--color=no", "."]
    env = {**os.environ, "PYTHONPATH": os.path.dirname(__file__), "COLUMNS": "1000"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    ended = {}
    for line in done.stdout.splitlines():
        verdict, _, rest = line.partition(" ")
        if verdict in ("PASSED", "FAILED", "XFAIL", "ERROR") and "::" in rest:
            name, _, why = rest.partition("::")[2].partition(" - ")
            ended[name] = (verdict, why)
    assert done.returncode == 1, done.stdout
    assert {name: verdict for name, (verdict, _) in ended.items() if verdict != "PASSED"} == {
        "test_wrong[invariance/batch]": "FAILED",
        "test_waived[invariance/batch]": "XFAIL",
        "test_stale[invariance/batch]": "FAILED",
    }, done.stdout
    assert ended["test_right[accuracy]"][0] == ended["test_waived[accuracy]"][0] == "PASSED"
    assert "fail: rms_norm/fp32/small-normal-fp32 invariance/batch: batch = " in ended["test_wrong[invariance/batch]"][1]
    assert "nothing needs the waiver" in ended["test_stale[invariance/batch]"][1]
    assert "known" in ended["test_waived[invariance/batch]"][1]


EXAMPLE = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "judge_triton_style.py")


@pytest.mark.parametrize("which, code", [("right", 0), ("wrong", 1)])
def test_the_example(which, code):
    axes = [] if os.environ.get("SAMEBITS_NIGHTLY") else ["batch"]
    done = subprocess.run([sys.executable, EXAMPLE, which, *axes], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("  fail: ")]
    assert bool(failed) == (which == "wrong")
    assert all("invariance batch=" in line for line in failed), done.stdout
