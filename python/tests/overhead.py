"""What a call through Python costs: rms_norm on [1,64] in bf16, in microseconds, the least of some rounds. For an idle machine."""

import time

import samebits
import samebits.torch
import torch

ROUNDS, CALLS = 7, 20_000


def microseconds(call):
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - start) / CALLS)
    return best * 1e6


x, w = torch.randn(1, 64).bfloat16(), torch.randn(64).bfloat16()
y, leaf = torch.empty_like(x), x.clone().requires_grad_()
nx, nw = x.float().numpy(), w.float().numpy()
operator, overload = torch.ops.samebits.rms_norm, torch.ops.samebits.rms_norm.default
for name, call in {
    "samebits.ops, torch tensors": lambda: samebits.ops.rms_norm(x, w),
    "samebits.ops, into=": lambda: samebits.ops.rms_norm(x, w, into=y),
    "samebits.ops, numpy arrays (fp32)": lambda: samebits.ops.rms_norm(nx, nw),
    "torch.ops.samebits.rms_norm": lambda: operator(x, w),
    "torch.ops.samebits.rms_norm.default": lambda: overload(x, w),
    "the same, recorded for a gradient": lambda: overload(leaf, w),
    "torch.nn.functional.rms_norm": lambda: torch.nn.functional.rms_norm(x, (64,), w),
}.items():
    print(f"{name:40} {microseconds(call):6.1f}")
