"""A kernel in Triton, judged on a GPU: `python3 triton_kernel.py`."""

import samebits
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, w, y, n, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, at < n, 0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(v * v, 0) / n + eps)
    tl.store(y + row * n + at, v * scale * tl.load(w + at, at < n, 0).to(tl.float32), at < n)


def rms_norm(x, w, eps, dtype):
    x, w = x.contiguous(), w.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    kernel[(x.shape[0],)](x, w, y, x.shape[1], eps, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


if __name__ == "__main__":
    report = samebits.judge(rms_norm, op="rms_norm", dtypes=["bf16"], device="cuda", out="report")
    print(report)
    raise SystemExit(not report.ok)
