"""A kernel in torch, wrong on purpose: for more than two rows its sum is made of two halves."""

from functools import reduce

import torch


def rms_norm(x, w, eps, dtype):
    x = x.float()
    squares = x.pow(2)
    parts = squares.chunk(2 if len(x) > 2 else 1, -1)  # mended: parts = [squares]
    mean = sum(reduce(torch.add, part.split(1, -1)) for part in parts) / x.shape[-1]
    return (x * torch.rsqrt(mean + eps) * w.float()).to(dtype)
