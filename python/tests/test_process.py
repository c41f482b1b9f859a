"""Threads, forks, the interpreter's lock, and the command."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import samebits
import torch
from conftest import floats, same
from samebits import _native, ops
from torch.utils.data import DataLoader, Dataset

X, W = floats((128, 512), "bfloat16", 1), floats((256, 512), "bfloat16", 2)


def in_child(work, seconds=60):
    """What `work` returns in the child of a fork of this process; fails where it hangs."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 3
        finally:
            os._exit(code)
    os.close(write)
    os.close(read)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_fork(threads):
    with samebits.Cpu(threads=threads) as cpu:
        expected = ops.gemm(X, W)

        def work():
            again = same(ops.gemm(X, W), expected)
            # And in the child of the child.
            further = in_child(lambda: same(ops.gemm(X, W), expected), 20) == 0
            with cpu:
                held = same(ops.gemm(X, W), expected)
            return again and further and held and samebits.get_cpu().threads == threads

        assert in_child(work) == 0
        assert same(ops.gemm(X, W), expected)


def test_ops_work_on_the_threads_of_torch():
    code = """
import os, samebits, torch
alone = samebits.Cpu(threads=1)
x, w = torch.randn(512, 1024), torch.randn(2048, 1024)
with alone:
    expected = samebits.ops.gemm(x, w)
def ours():
    "Ticks of the processor that workers of samebits took."
    names = {task: open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")}
    workers = [task for task, name in names.items() if name.startswith("samebits-")]
    assert workers
    return sum(int(n) for task in workers for n in open(f"/proc/self/task/{task}/stat").read().split(")")[1].split()[11:13])
with samebits.Cpu(threads=2):
    for _ in range(30):
        assert torch.equal(samebits.ops.gemm(x, w), expected)
    assert ours() > 0, "before samebits.torch is there"
    import samebits.torch
    before = ours()
    for _ in range(60):
        assert torch.equal(samebits.ops.gemm(x, w), expected)
    # A worker may have been waiting for work when the threads of torch came.
    assert ours() - before <= 1, ours() - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fork_while_other_threads_compute():
    expected = ops.gemm(X, W)
    stop = threading.Event()

    def compute():
        while not stop.is_set():
            ops.gemm(X, W)

    with samebits.Cpu(threads=2):
        others = [threading.Thread(target=compute) for _ in range(3)]
        for other in others:
            other.start()
        try:
            for _ in range(300 if "SAMEBITS_NIGHTLY" in os.environ else 60):
                assert in_child(lambda: same(ops.gemm(X, W), expected), 30) == 0
        finally:
            stop.set()
            for other in others:
                other.join()


def _of_rank(rank):
    return ops.gemm(X, W).sum(dtype=torch.float64).item() + 0 * rank


def test_multiprocessing_fork():
    with samebits.Cpu(threads=2):
        expected = _of_rank(0)
        with multiprocessing.get_context("fork").Pool(3) as pool:
            assert pool.map_async(_of_rank, range(12)).get(timeout=60) == [expected] * 12


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        return ops.gemm(X[row : row + 1], W)[0]


def test_workers_of_a_data_loader():
    with samebits.Cpu(threads=2):
        expected = ops.gemm(X[:8], W)
        loader = DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60)
        assert same(torch.cat(list(loader)), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_several_threads_of_python(threads):
    with samebits.Cpu(threads=threads):
        expected = ops.gemm(X, W)
        wrong = []

        def compute():
            for _ in range(40):
                if not same(ops.gemm(X, W), expected):
                    wrong.append(1)

        all_threads = [threading.Thread(target=compute) for _ in range(6)]
        for thread in all_threads:
            thread.start()
        for thread in all_threads:
            thread.join()
        assert not wrong


def test_the_lock_of_the_interpreter_is_released():
    x, w = floats((128, 2048), "float32", 1), floats((2048, 2048), "float32", 2)
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0.0005)

    other = threading.Thread(target=count)
    with samebits.Cpu(isa="scalar", threads=1):
        other.start()
        try:
            before = counted[0]
            ops.gemm(x, w)
            during = counted[0] - before
        finally:
            stop.set()
            other.join()
    # One that waits for the lock is let in once, at the end.
    assert during > 5


# --- the module and the command


def test_stubs_are_current():
    assert subprocess.call([sys.executable, "-m", "samebits.stubs", "--check"]) == 0


def test_signatures():
    import inspect

    signature = inspect.signature(ops.rms_norm)
    assert list(signature.parameters)[:3] == ["x", "w", "eps"]
    assert signature.parameters["eps"].default == 1e-6
    assert signature.parameters["eps"].kind is inspect.Parameter.KEYWORD_ONLY
    for name in ops.__all__:
        inspect.signature(getattr(ops, name))


def test_numpy_and_torch_are_not_needed():
    code = "import sys, samebits; assert not {'torch', 'numpy'} & set(sys.modules); print(samebits.get_cpu().threads)"
    assert int(subprocess.check_output([sys.executable, "-c", code])) >= 1


def test_threads_are_no_more_than_openmp_is_told():
    def threads(told):
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | told
        code = "import samebits; print(samebits.get_cpu().threads, samebits.Cpu().threads, samebits.Cpu(threads=3).threads)"
        return [int(n) for n in subprocess.check_output([sys.executable, "-c", code], env=env).split()]

    cores = threads({})
    assert cores[0] == cores[1] >= 1 and cores[2] == 3
    for told, wanted in {"1": 1, "1,4": 1, "0": 1, "1000000": cores[0], "many": cores[0], "": cores[0]}.items():
        assert threads({"OMP_NUM_THREADS": told}) == [wanted, wanted, 3], told


def run(*arguments, folder):
    command = [sys.executable, "-m", "samebits", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_command(tmp_path):
    assert run("--version", folder=tmp_path).stdout == f"samebits {samebits.__version__}\n"
    broken = run("check", "--op", "nothing", folder=tmp_path)
    assert broken.returncode == 2 and broken.stderr.startswith("samebits: --op nothing")
    assert "rms_norm" in run("schema", folder=tmp_path).stdout


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "samebits").exists(), reason="not installed: no program starts the command again"
)
def test_check_outside_of_the_repository(tmp_path):
    done = run("check", "--slice", "quick", "--op", "rms_norm", "--op", "chain", folder=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "samebits-report" / "report.html").is_file()
    assert "untested" not in done.stdout


def test_check_is_a_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert samebits.check("--op", "nothing") == 2


def test_the_command_runs_once_in_a_process():
    code = (
        "from samebits import _native; a = _native.command('x', ['--version'], None); assert a == 0\n"
        "try: _native.command('x', ['--version'], None)\n"
        "except NotImplementedError: print('refused')"
    )
    assert "refused" in subprocess.check_output([sys.executable, "-c", code], text=True)
