"""Times samebits beside torch on the CPU, in interleaved pairs, and prints ratios.

    pip install torch==2.15.0
    cargo build --release
    python3 impls/torch/pairs.py --threads 1 --pairs 5

Every pair times torch in this warm process and then `samebits measure` in a fresh one, each as the median of some runs
after a warm-up. Weights stand in each library's preferred form before the clock starts: packed for samebits, a plain
[N, K] tensor through `torch.nn.functional.linear` for torch (which packs inside on every call). The ratio is torch's
seconds over samebits': above 1 samebits is faster. A row shows the medians over the pairs and the ratio's range.
"""

import argparse
import json
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F


def seconds(run, repeat):
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def draw(dtype, *shape):
    return torch.randn(*shape).to(dtype)


def gemm(dtype, M, N, K):
    x, w = draw(dtype, M, K), draw(dtype, N, K)
    return lambda: F.linear(x, w)


def attention(dtype, B, T, S, Hq, Hkv, D):
    q, k, v = draw(dtype, B, Hq, T, D), draw(dtype, B, Hkv, S, D), draw(dtype, B, Hkv, S, D)
    grouped = Hq != Hkv
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, enable_gqa=grouped)


def rms_norm(dtype, R, N):
    x, w = draw(dtype, R, N), draw(dtype, N)
    return lambda: F.rms_norm(x, (N,), w, 1e-6)


def silu_mul(dtype, R, N):
    gate, up = draw(dtype, R, N), draw(dtype, R, N)
    return lambda: F.silu(gate) * up


def logprob(dtype, R, V):
    logits, target = draw(dtype, R, V), torch.randint(0, V, (R, 1))
    return lambda: torch.log_softmax(logits.float(), -1).gather(1, target)


def softmax(dtype, R, N):
    x = draw(dtype, R, N)
    return lambda: torch.softmax(x, -1)


OPS = {f.__name__: f for f in (gemm, attention, rms_norm, silu_mul, logprob, softmax)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WORK = [
    ("gemm", "bf16", dict(M=2048, N=2048, K=2048)),
    ("gemm", "bf16", dict(M=1024, N=1024, K=1024)),
    ("gemm", "bf16", dict(M=128, N=2048, K=8192)),
    *[("gemm", "bf16", dict(M=m, N=4096, K=4096)) for m in (1, 4, 16)],
    *[("gemm", "bf16", dict(M=m, N=4864, K=896)) for m in (1, 4, 16)],
    ("gemm", "fp32", dict(M=2048, N=2048, K=2048)),
    *[("gemm", "fp32", dict(M=m, N=4096, K=4096)) for m in (1, 16)],
    ("attention", "bf16", dict(B=4, T=1024, S=1024, Hq=8, Hkv=8, D=64)),
    ("attention", "bf16", dict(B=1, T=4096, S=4096, Hq=14, Hkv=2, D=64)),
    ("attention", "bf16", dict(B=1, T=2048, S=2048, Hq=8, Hkv=8, D=128)),
    ("attention", "bf16", dict(B=1, T=1, S=4096, Hq=32, Hkv=8, D=128)),
    ("attention", "bf16", dict(B=16, T=1, S=1024, Hq=32, Hkv=8, D=128)),
    ("rms_norm", "bf16", dict(R=4096, N=4096)),
    ("silu_mul", "bf16", dict(R=4096, N=4864)),
    ("softmax", "bf16", dict(R=1024, N=4096)),
    ("logprob", "bf16", dict(R=256, V=151936)),
]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samebits", default="target/release/samebits", help="the program")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--repeat", type=int, default=7, help="timed runs of each side of a pair")
    options = options.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.pairs} pairs")
    print("| work | dtype | samebits | torch | ratio (range) |\n|---|---|---|---|---|")
    for op, dtype, params in WORK:
        command = [options.samebits, "measure", "--json", "--op", op, "--dtype", dtype]
        command += ["--threads", str(options.threads), "--repeat", str(options.repeat)]
        for name, value in params.items():
            command += ["--param", f"{name}={value}"]
        with torch.inference_mode():
            run = OPS[op](DTYPES[dtype], **params)
            pairs = []
            for _ in range(options.pairs):
                theirs = seconds(run, options.repeat)
                line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                pairs.append((json.loads(line)["seconds"]["median"], theirs))
        ours, theirs = (statistics.median(side) for side in zip(*pairs))
        ratios = sorted(b / a for a, b in pairs)
        words = " ".join(f"{name}={value}" for name, value in params.items())
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {op} {words} | {dtype} | {ours * 1e3:.3f} ms | {theirs * 1e3:.3f} ms | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
