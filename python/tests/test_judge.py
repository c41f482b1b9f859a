"""The gate for callables, and its pytest plugin: what is right passes, and each fault turns the judgment red that is for it."""

import os
import re
import shutil
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


class Module(torch.nn.Module):
    def forward(self, x, w, eps):
        return rms_norm(x, w, eps)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        return rms_norm(x, w, eps)


@torch.library.custom_op("test_judge::rms_norm", mutates_args=())
def operator(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x, w, eps)


def in_place(x, w, eps):
    """Which leaves the same bits."""
    return rms_norm(x.mul_(1.0), w, eps)


def over_its_input(x, w, eps):
    y = rms_norm(x, w, eps)
    x.zero_()
    return y


def behind_its_back(x, w, eps):
    """As a kernel of another language writes, of which torch sees nothing."""
    y = rms_norm(x, w, eps)
    w.data[-1] = 0
    return y


def beside_its_input(x, w, eps):
    """Where rows lie apart, into the gaps."""
    y = rms_norm(x, w, eps)
    if x.stride(0) > x.shape[1]:
        torch.as_strided(x.data, (1,), (1,), x.shape[1]).zero_()
    return y


def add_into(a, b):
    a += b
    return a


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


def leaves(x, w, eps):
    sys.exit(3)


def add(a, b):
    """By place and by name; it talks, which must not reach the wire."""
    print("adding")
    return (a.astype(numpy.float32) + b.astype(numpy.float32)).astype(a.dtype)


def cut_product(x, w, parts):
    """K in so many parts, in bf16 alone, whose 8 bits hide a change of one ulp of f32."""
    products = ((x[:, None] * w).sum(-1) for x, w in zip(x.float().chunk(parts, 1), w.float().chunk(parts, 1)))
    return sum(products).bfloat16()


def cut_by_rows(x, w):
    return cut_product(x, w, 3 if len(x) <= 4 else 1)


def cut_in_three(x, w):
    return cut_product(x, w, 3)


SMALL = {"cases": ["rms_norm/bf16/small-normal-bf16"]}
SMALL_FP32 = {"cases": ["rms_norm/fp32/small-normal-fp32"], "dtypes": ["fp32"]}


def judge(fn, op="rms_norm", **more):
    return samebits.judge(fn, op, **{**SMALL, **more})


def test_what_is_right_passes():
    report = judge(rms_norm, cases=["rms_norm/bf16/small-*"])
    assert report.ok and report.red == []
    assert report.verdicts["accuracy"]["pass"] == 2
    # Of a signature without `dtype` the other outputs are not asked, which the report says, and how much was asked.
    others = {f"rms_norm/bf16/small-{fill}-{out}" for fill in ("normal", "edges") for out in ("fp16", "fp32")}
    assert set(report.skipped) == others and "unsupported" not in report.verdicts["accuracy"]
    assert "and 1 more: out fp32: rms_norm does not take a dtype, and the inputs are bf16" in str(report)
    assert "asked: the slice quick; " in str(report)
    asked = {name for name, counts in report.verdicts.items() if counts.get("pass")}
    axes = ("batch", "position", "neighbours", "padding", "layout", "threads", "repeat", "order", "restart")
    assert {"accuracy", *(f"invariance/{axis}" for axis in axes)} <= asked
    # A limit of the workspace means nothing to it.
    assert report.verdicts["invariance/budget"] == {"unsupported": 2}
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
        (leaves, "accuracy", "SystemExit: 3", {"judgments": ["accuracy"]}),
    ],
)
def test_a_fault_is_red_where_it_belongs(fn, judgment, words, more):
    report = judge(fn, **more)
    assert not report.ok
    assert {judgment_of(record) for record in report.red} == {judgment}
    assert words in reason_of(report.red[0])
    assert "RED" in str(report)


@pytest.mark.parametrize(
    "fn, name",
    [
        (Module(), "Module"),
        (torch.compile(Module(), backend="eager"), "OptimizedModule"),
        (Function.apply, "Function.apply"),
        (lambda *inputs, **others: rms_norm(*inputs, others.get("eps", 1e-6)), "<lambda>"),
        (operator, "operator"),
        (torch.ops.test_judge.rms_norm, "test_judge.rms_norm"),
        (torch.ops.test_judge.rms_norm.default, "test_judge.rms_norm.default"),
    ],
    ids=["module", "compiled", "autograd", "lambda", "custom_op", "operator", "overload"],
)
def test_what_torch_calls_by_args_is_taken_by_its_own_parameters(fn, name):
    report = judge(fn, axes=["batch", "layout", "repeat"])
    assert report.ok and report.verdicts["invariance/batch"]["pass"] == 1
    assert report.records[0]["kernel"] == name


def test_a_callable_without_parameters_that_python_can_tell_is_refused():
    with pytest.raises(TypeError, match="rms_norm: Python cannot tell its parameters; judge a function that calls it"):
        judge(torch.rms_norm)


@pytest.mark.parametrize("fn, name", [(in_place, "x"), (over_its_input, "x"), (behind_its_back, "w"), (beside_its_input, "x")])
def test_what_writes_to_its_inputs_is_red(fn, name):
    layouts = {"judgments": ["invariance"], "axes": ["layout"]} if fn is beside_its_input else {"judgments": ["accuracy"]}
    report = judge(fn, **layouts)
    assert not report.ok and {f"it wrote to its input `{name}`" in reason_of(record) for record in report.red} == {True}
    report = samebits.judge(add_into, "add", ["fp32"], library="numpy", cases=["add/fp32/small-normal-fp32"], judgments=["accuracy"])
    assert not report.ok and "it wrote to its input `a`" in reason_of(report.red[0])


SCRIPT = """
import samebits
from test_judge import SMALL, rms_norm

def mine(x, w, eps):
    return rms_norm(x, w, eps)

def main():
    {call}

{after}
"""
CALL = 'print("ended", samebits.judge({fn}, op="rms_norm", axes={axes}, **SMALL).ok)'


@pytest.mark.parametrize(
    "fn, after, axes, refused",
    [
        ("mine", "main()", [], True),
        ("rms_norm", "assert (\n    main() is None\n)", ["restart"], True),
        ("mine", 'if __name__ == "__main__":\n    main()', ["restart"], False),
        ("rms_norm", 'main() if __name__ == "__main__" else None', ["restart"], False),
        ("mine", "main()", ["repeat"], False),
    ],
)
def test_a_script_without_the_guard_is_refused_before_anything_runs(fn, after, axes, refused, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(call=CALL.format(fn=fn, axes=axes), after=after))
    env = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    if not refused:
        assert done.stdout == "ended True\n" and done.returncode == 0, done.stdout + done.stderr
        return
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and done.stdout == ""
    assert last.startswith(f"RuntimeError: judge: {script}:") and 'put the call behind `if __name__ == "__main__":`' in last


def test_a_module_that_judges_while_it_is_imported_is_refused(tmp_path):
    (tmp_path / "kernels.py").write_text(SCRIPT.format(call=CALL.format(fn="mine", axes=[]), after="main()"))
    env = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run([sys.executable, "-c", "import kernels"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "kernels.py" in done.stderr.splitlines()[-1] and "calls it while the module is imported" in done.stderr.splitlines()[-1]


def test_cases_of_attributes_that_the_signature_lacks_are_not_asked():
    """Vectors too, whose attributes stand in their files."""
    cases = ["rms_norm/bf16/small-normal-bf16", "rms_norm/bf16/vector_*", "rms_norm/bf16/hf-*"]
    report = judge(rms_norm, cases=cases, slice="exhaustive", judgments=["accuracy"])
    asked = {record["case"] for record in report.records}
    assert any("vector_once" in case for case in asked) and not any("hf" in case for case in asked)
    assert "unsupported" not in report.verdicts["accuracy"]
    left_out = {case: why for case, why in report.skipped.items() if case.endswith("-bf16")}
    assert any("vector_hf" in case for case in left_out) and "rms_norm/bf16/hf-normal-bf16" in left_out
    assert set(left_out.values()) == {"param `rounding`: rms_norm does not take it"}


def test_an_op_whose_outputs_are_f32_needs_no_dtype():
    def logprob(logits, target):
        x = logits.astype(numpy.float64)
        lse = numpy.logaddexp.reduce(x, axis=-1)
        found = numpy.take_along_axis(x, target.clip(0)[:, None], -1)[:, 0] - lse
        return numpy.where(target < 0, 0, found).astype(numpy.float32), lse.astype(numpy.float32)

    report = samebits.judge(logprob, "logprob", library="numpy", cases=["logprob/bf16/small-normal-fp32"], judgments=["accuracy"])
    assert report.ok and report.verdicts["accuracy"]["pass"] == 1, str(report)


def test_a_red_record_says_how_to_ask_it_again():
    report = judge(of_the_batch, **SMALL_FP32)
    record = next(record for record in report.red if record["axis"] == "batch")
    assert f'axes=["batch={record["setting"]}"]' in record["again"] and f"again: {record['again']}" in str(report)
    again = eval(record["again"], {"samebits": samebits, "of_the_batch": of_the_batch})
    (found,) = again.records
    assert (found["verdict"], found["setting"], found["evidence"]["found_bits"]) == (
        "fail", record["setting"], record["evidence"]["found_bits"])
    with pytest.raises(RuntimeError, match="no such setting here; the first case has .*alone:0"):
        judge(of_the_batch, axes=["batch=agin:3"], **SMALL_FP32)


def test_a_device_that_is_not_there_is_refused():
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device cuda: this torch finds no CUDA device"):
            judge(rms_norm, device="cuda")


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

@pytest.mark.samebits(rms_norm, op="rms_norm", axes=["batch", "repeat"], name="of_the_batch", waivers="wide.toml", **SMALL_FP32)
def test_covers_more():
    pass
"""
WAIVERS = """
[[waiver]]
impls = ["of_the_batch"]
cases = ["rms_norm/fp32/small-normal-fp32"]
judgment = "invariance"
axis = "batch"
reason = "known"
owner = "somebody@example.org"
expires = "2999-01-01"
"""


def test_the_plugin(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "waivers.toml").write_text(WAIVERS)
    (tmp_path / "wide.toml").write_text(WAIVERS.replace("small-normal-fp32", "small*"))
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


EXAMPLES = os.path.join(os.path.dirname(__file__), "..", "..", "examples")
EXAMPLE = os.path.join(EXAMPLES, "judge_triton_style.py")


def test_the_page_on_the_gate(tmp_path):
    """As docs/GATE.md has it: red, asked again, mended, green; and the tests of pytest."""
    gate = os.path.join(EXAMPLES, "gate")
    for name in ("kernels.py", "test_kernels.py"):
        shutil.copy(os.path.join(gate, name), tmp_path)
    page = open(os.path.join(EXAMPLES, "..", "docs", "GATE.md"), encoding="utf-8").read()
    kernels = open(os.path.join(gate, "kernels.py"), encoding="utf-8").read()
    assert kernels.partition("def ")[2] in page
    (line,) = (line.strip() for line in page.splitlines() if line.startswith("    python3 -c 'import samebits, kernels; "))
    run = lambda line: subprocess.run(["bash", "-c", line.replace("python3", sys.executable, 1)], cwd=tmp_path, capture_output=True, text=True)
    red = run(line)
    assert "RED: " in red.stdout and "not asked: " in red.stdout, red.stdout + red.stderr
    again = next(line.partition("again: ")[2] for line in red.stdout.splitlines() if "again: " in line and "batch=" in line)
    # Which case is the first depends on the machine.
    form = re.compile(r"samebits\.judge\(rms_norm, op=\"rms_norm\", dtypes=\[\"bf16\"\], cases=\[\"rms_norm/bf16/[a-z0-9_-]+\"\], "
                      r"judgments=\[\"invariance\"\], axes=\[\"batch=[a-z0-9:]+\"\]\)")
    assert form.fullmatch(again) and form.search(page), again
    one = run(f"python3 -c 'import samebits; from kernels import rms_norm; print({again})'")
    assert "RED: 1 of 1 record is red" in one.stdout, one.stdout + one.stderr
    before, _, after = kernels.partition("  # mended: parts = [squares]")
    (tmp_path / "kernels.py").write_text(before.rpartition("parts = ")[0] + "parts = [squares]" + after)
    assert "GREEN: " in run(line).stdout
    done = run("python3 -m pytest -q -p no:cacheprovider test_kernels.py")
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout


@pytest.mark.parametrize("which, code", [("right", 0), ("wrong", 1)])
def test_the_example(which, code):
    axes = [] if os.environ.get("SAMEBITS_NIGHTLY") else ["batch"]
    done = subprocess.run([sys.executable, EXAMPLE, which, *axes], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("  fail: ")]
    assert bool(failed) == (which == "wrong")
    assert all("invariance batch=" in line or ", order" in line for line in failed), done.stdout


def test_an_order_that_follows_the_batch_is_seen_through_bf16():
    """By default: the quick slice, with no dtype but that of x."""
    asked = {"op": "gemm", "dtypes": ["bf16"], "judgments": ["invariance"], "axes": ["batch", "position"]}
    red = [judgment_of(record) for record in samebits.judge(cut_by_rows, **asked).red]
    assert red.count("invariance/batch") >= 3, red
    fixed = samebits.judge(cut_in_three, **asked)
    assert fixed.ok
    hidden = "narrow outputs alone of gemm (bf16): "
    assert f"note: cut_in_three: {hidden}" in str(fixed) and "it leaves none unseen" in str(fixed)
    assert f"Note: cut_in_three: {hidden}" in fixed.html()
