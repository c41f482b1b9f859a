#!/usr/bin/env python3
"""Judges a product that is written block by block, as one would write it in Triton.

    judge_triton_style.py right          # exit code 0: the contract holds
    judge_triton_style.py wrong          # exit code 1: it splits K by the size of the batch, and the axis that sees it is named
    judge_triton_style.py wrong batch    # these axes of invariance alone

A program of the grid makes one tile of y. It loads blocks with masks, multiplies them, and adds up in f32. Where there are
few tiles, several programs share the sum over K. If their number depends on the rows of the batch, so do the bits of each
row: that is what `wrong` does, and what many a library does.
"""

import sys

import samebits
import torch

BLOCK_M, BLOCK_N, BLOCK_K = 16, 16, 8


def load(tensor, rows, columns):
    """The block at (rows, columns) in f32, +0 beyond the edges: tl.load with a mask."""
    block = torch.zeros(rows[1], columns[1], device=tensor.device)
    inside = tensor[rows[0] : rows[0] + rows[1], columns[0] : columns[0] + columns[1]]
    block[: inside.shape[0], : inside.shape[1]] = inside.float()
    return block


def dot(a, b):
    """Products of rows, summed the same way for every element of the tile, whatever its neighbours."""
    return (a[:, None, :] * b[None, :, :]).sum(-1)


def kernel(x, w, pid_m, pid_n, pid_k, split_k):
    """A tile of the sum over every split_k-th block of K."""
    acc = torch.zeros(BLOCK_M, BLOCK_N, device=x.device)
    for k in range(pid_k * BLOCK_K, x.shape[1], split_k * BLOCK_K):
        acc += dot(load(x, (pid_m, BLOCK_M), (k, BLOCK_K)), load(w, (pid_n, BLOCK_N), (k, BLOCK_K)))
    return acc


def launch(x, w, dtype, split_k):
    m, n = x.shape[0], w.shape[0]
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    for pid_m in range(0, m, BLOCK_M):
        for pid_n in range(0, n, BLOCK_N):
            tile = sum(kernel(x, w, pid_m, pid_n, pid_k, split_k) for pid_k in range(split_k))
            inside = y[pid_m : pid_m + BLOCK_M, pid_n : pid_n + BLOCK_N]
            inside.copy_(tile[: inside.shape[0], : inside.shape[1]])
    return y


def right(x, w, dtype):
    """The sum over K is cut by K alone."""
    return launch(x, w, dtype, split_k=2)


def wrong(x, w, dtype):
    """Few rows, more programs for each sum."""
    return launch(x, w, dtype, split_k=1 if x.shape[0] > 4 else 3)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fn = {"right": right, "wrong": wrong}[sys.argv[1] if len(sys.argv) > 1 else "right"]
    cases = ["gemm/bf16/small-normal-*", "gemm/bf16/range-classes-bf16"]
    report = samebits.judge(fn, op="gemm", dtypes=["bf16"], cases=cases, axes=sys.argv[2:], device=device)
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
