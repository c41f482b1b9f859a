"""Tensors on a GPU where there is none: the tests of `cuda/tensors.py`, beside libraries that stand for libcuda and libnvrtc
(`cuda/driver.cpp`), which run the kernels' text in the emulator of `tests/cuda`. The extension is the one that is installed."""

import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MACHINE = HERE.parents[1] / "tests" / "cuda"
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-gnu-unique", "-fvisibility=hidden", "-fPIC"]
SIZES = """
#include "machine.cuh"
// How many bytes each argument of a kernel has.
template <class T> struct Size { static const int value = sizeof(T); };
template <class T> struct Size<emulator::Pointer<T>> { static const int value = 8; };
template <class... A> int sizes_of(void (*)(A...), const int **sizes) {
    static const int all[] = {Size<A>::value...};
    return *sizes = all, sizeof...(A);
}
#define SIZES(name) VISIBLE int sizes_##name(const int **sizes) { return sizes_of(&name, sizes); }
"""


def build(folder):
    """The two libraries, and what the second one compiles kernels with."""
    with open("/proc/cpuinfo", encoding="ascii") as about:
        flags = FLAGS + (["-mfma"] if " fma " in about.read() else [])
    (folder / "names").mkdir()
    (folder / "names" / "machine.cuh").write_text("#define KERNEL(threads, blocks) SAMEBITS_KERNEL\n")
    (folder / "options").write_text(" ".join(flags))
    (folder / "machine.hpp").write_text(SIZES)
    for name in ("machine.cuh", "machine.cpp"):
        shutil.copy(MACHINE / name, folder)
    compiles = [
        ["-O2", "-c", "machine.cpp", "-o", "machine.o"],
        ["-x", "c++-header", "machine.hpp", "-o", "machine.hpp.gch"],
        ["-I", ".", "-shared", str(HERE / "cuda" / "driver.cpp"), "machine.o", "-o", "libcuda.so"],
    ]
    for arguments in compiles:
        subprocess.run(["c++", *flags, *arguments], cwd=folder, check=True)
    (folder / "libnvrtc.so").symlink_to("libcuda.so")


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler at hand")
def test_beside_libraries_that_stand_for_the_driver(tmp_path):
    # The library must be found when a process starts.
    build(tmp_path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "SAMEBITS_TEST_CUDA": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "cuda" / "tensors.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


@pytest.mark.skipif(bool(ctypes.util.find_library("cuda")), reason="a driver is at hand")
def test_without_a_driver_the_call_says_so():
    text = """
import sys; sys.path.insert(0, sys.argv[1])
import samebits, torch
from lent import Capsule
try:
    samebits.ops.scale(Capsule(4096, (2, 64)), into=Capsule(8192, (2, 64)))
except NotImplementedError as e:
    print(e)
"""
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    command = [sys.executable, "-c", text, str(HERE / "cuda")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "scale: cannot run on cuda:0: no CUDA device: no driver library found (libcuda)\n", done
