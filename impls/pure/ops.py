"""The ops, written from the canonical arithmetic (docs/NUMERICS.md) for reading, not for speed.

Matrices are lists of rows. Every op returns f32 values; the last rounding happens when the answer is written.
"""

import math

from f32 import INF, NAN, add, div, exp2, f32, fma, from_bits, mul, sqrt

LOG2E_HI = float.fromhex("0x1.715476p+0")
LOG2E_LO = float.fromhex("0x1.4ae0cp-26")
EXP = [from_bits(b) for b in (0x3920B5B7, 0x3AAF841A, 0x3C1D96F0, 0x3D6357BE, 0x3E75FDEE, 0x3F317218)] + [1.0]


# Three sums.

def chain(a, b):
    acc = 0.0
    for x, y in zip(a, b):
        acc = fma(x, y, acc)
    return acc


def tree(values):
    """Halves are added until one value is left; the count is a power of two."""
    while len(values) > 1:
        half = len(values) // 2
        values = [add(values[i], values[i + half]) for i in range(half)]
    return values[0]


def lanes(values, step):
    """256 lanes; element i goes to lane i mod 256 through step(lane, element)."""
    lane = [0.0] * 256
    for i, value in enumerate(values):
        lane[i % 256] = step(lane[i % 256], value)
    return tree(lane)


def segment_length(n):
    return 16 * -(-n // 128)


def neighbours(sums):
    """Neighbours are added until one value is left: ((s0+s1)+(s2+s3))+((s4+s5)+(s6+s7)) for eight."""
    while len(sums) > 1:
        sums = [add(sums[i], sums[i + 1]) for i in range(0, len(sums), 2)]
    return sums[0]


def segments(values, reduce):
    size = segment_length(len(values))
    return neighbours([reduce(values[size * j : size * (j + 1)]) for j in range(8)])


# Elementary functions.

def exp_split(x, c_hi, c_lo):
    """(m, i) with exp(x) = m * 2^i where c_hi + c_lo = log2(e); i is a whole number kept as a float."""
    t = mul(x, c_hi)
    i = float(round(t)) if math.isfinite(t) else t
    f = 0.0
    if abs(t) < 2.0**22:
        f = fma(x, c_lo, fma(x, c_hi, -i))
    elif math.isnan(t):
        f = NAN
    m = 0.0
    for coefficient in EXP:
        m = fma(m, f, coefficient)
    return m, i


def exp(x):
    m, i = exp_split(x, LOG2E_HI, LOG2E_LO)
    if math.isnan(i):
        return NAN
    i = int(max(-252.0, min(252.0, i)))
    h = i // 2
    return mul(mul(m, exp2(h)), exp2(i - h))


def sigmoid(x):
    return div(1.0, add(1.0, exp(-x)))


def weight(m, i, n):
    return mul(m, exp2(int(i - n))) if i - n >= -100.0 else 0.0


# Ops.

def add_op(a, b):
    return [add(x, y) for x, y in zip(a, b)]


def silu_mul(gate, up):
    return [mul(mul(g, sigmoid(g)), u) for g, u in zip(gate, up)]


def subtree(k, k_offset, k_total):
    """The neighbouring segments (first, count) that are exactly these columns of the whole, or None."""
    size = segment_length(k_total)
    for count in (8, 4, 2, 1):
        for first in range(0, 8, count):
            if k_offset == size * first and k_offset + k == min(size * (first + count), k_total):
                return first, count
    return None


def gemm(x, w, bias, k_offset, k_total, first, count):
    """x[M][K], w[N][K], bias[N] or None; the columns are `count` segments from `first` on."""
    size = segment_length(k_total)

    def dot(row, column):
        cuts = [(max(size * j - k_offset, 0), max(size * (j + 1) - k_offset, 0)) for j in range(first, first + count)]
        return neighbours([chain(row[a:b], column[a:b]) for a, b in cuts])

    y = [[dot(row, column) for column in w] for row in x]
    if bias is not None:
        y = [[add(value, b) for value, b in zip(row, bias)] for row in y]
    return y


def rms_norm(x, w, eps, rounding, weight_offset, round_bf16):
    if weight_offset:
        w = [add(v, 1.0) for v in w]
    y = []
    for row in x:
        mean = div(lanes(row, lambda acc, v: fma(v, v, acc)), f32(float(len(row))))
        r = div(1.0, sqrt(add(mean, eps)))
        if rounding == "hf":
            y.append([mul(g, round_bf16(mul(v, r))) for v, g in zip(row, w)])
        else:
            y.append([mul(mul(v, r), g) for v, g in zip(row, w)])
    return y


def softmax(x):
    y = []
    for row in x:
        if any(math.isnan(v) or v == INF for v in row):
            y.append([NAN] * len(row))
            continue
        pairs = [exp_split(v, LOG2E_HI, LOG2E_LO) for v in row if v != -INF]
        n = max((i for _, i in pairs), default=0.0)
        if abs(n) == INF:
            # Finite numbers so far from zero are measured from the largest.
            top = max(row)
            row, n = [v if v == -INF else add(v, -top) for v in row], 0.0
        # -inf has weight 0 and takes part in no sum, but it keeps its place among the lanes.
        weights = [0.0 if v == -INF else weight(*exp_split(v, LOG2E_HI, LOG2E_LO), n) for v in row]
        total = segments(weights, lambda part: lanes(part, add))
        y.append([div(v, total) for v in weights])
    return y
