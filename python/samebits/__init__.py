"""Neural network ops with the same bits for any batch, chunk, thread count and instruction set.

`samebits.ops` has every op as a function over tensors of torch, numpy or any library with DLPack; `samebits.torch` has
them as operators of torch with gradients; `samebits.Engine` samples from whole models, which
`samebits.torch.CausalLM` trains with the same bits. `samebits.check()` is the command `samebits check`; `samebits.judge(fn, op)`
holds a callable to it, `samebits.testing` has assertions about bits.
"""

import os

from . import ops
from ._native import Cpu, Tensor, __version__, after_fork, get_cpu, set_cpu
from .engine import Engine, Sample, Stream, Token

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .judging import Report, judge
    from .records import mismatch

__all__ = [
    "Cpu",
    "Engine",
    "Report",
    "Sample",
    "Stream",
    "Tensor",
    "Token",
    "__version__",
    "check",
    "get_cpu",
    "judge",
    "mismatch",
    "ops",
    "set_cpu",
]

# The child of a fork has no threads but its own.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=after_fork)


def check(*arguments: str) -> int:
    """Runs `samebits check` with these arguments, in a process of its own, and returns its exit code: 0 if the contract
    holds, 1 if it does not, 2 if the run itself is broken.
    """
    import subprocess
    import sys

    return subprocess.call([sys.executable, "-m", "samebits", "check", *arguments])


def __getattr__(name: str) -> object:
    # What the command does not need costs it nothing.
    if name in ("Report", "judge"):
        from . import judging

        return getattr(judging, name)
    if name == "mismatch":
        from .records import mismatch

        return mismatch
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
