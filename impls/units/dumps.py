"""Dumps of products in a given order, by the second program, for tests and by hand:

    python3 impls/units/dumps.py OUT.safetensors PROFILE FORMAT MxNxK CUT JOIN [raw|own] [y|y_fp32|both] [SEED]

or a set of them, each named `PROFILE FORMAT MxNxK CUT JOIN`:

    python3 impls/units/dumps.py --set OUT.safetensors

CUT is `1` (one chain), `S@U` (S parts in units of U, of one length), `S~U` (whole units of U shared, the first parts larger).
JOIN is ascending, descending, or tree (neighbours).
"""

import json
import random
import struct
import sys

import unit


def f32(word):
    return struct.unpack("<f", struct.pack("<I", word))[0]


def add(one, two):
    """f32 addition of two words: exact in f64, where 24 + 24 bits and one rounding are innocuous, then rounded."""
    total = f32(one) + f32(two)
    if total != total:
        return unit.NAN
    try:
        return struct.unpack("<I", struct.pack("<f", total))[0]
    except OverflowError:
        return unit.INFINITY | (1 << 31 if total < 0 else 0)


def rounded(word, kind):
    """f32 to bf16 or fp16, to nearest, ties to even, by the integers of the number."""
    size, exponent_bits, fraction = unit.FORMATS[kind]
    sign = word >> 31 << size - 1
    what, _, exponent, mantissa = unit.parts(word, "fp32")
    full = (1 << exponent_bits) - 1 << fraction
    if what == "nan":
        return sign | full | 1 << fraction - 1
    if what == "inf":
        return sign | full
    if mantissa == 0:
        return sign
    bias = (1 << exponent_bits - 1) - 1
    scale = exponent - 23
    top = mantissa.bit_length() - 1 + scale
    last = max(top, 1 - bias) - fraction
    shift = last - scale
    if shift <= 0:
        kept = mantissa << -shift
    else:
        kept, rest, half = mantissa >> shift, mantissa & (1 << shift) - 1, 1 << shift - 1
        kept += rest > half or rest == half and kept & 1
    if kept >= 1 << fraction + 1:
        kept, last = kept >> 1, last + 1
    word = kept if kept < 1 << fraction else (last + fraction + bias << fraction) | kept & (1 << fraction) - 1
    return sign | min(word, full)


def cuts(text, k):
    if text == "1":
        return [(0, k)]
    if "@" in text:
        parts, each = map(int, text.split("@"))
        length = each * -(-k // (each * parts))
        return [(first, min(first + length, k)) for first in range(0, k, length)]
    parts, each = map(int, text.split("~"))
    units = -(-k // each)
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + units // parts + (part < units % parts))
    return [(min(a * each, k), min(b * each, k)) for a, b in zip(ends, ends[1:])]


def joined(words, how):
    if how == "descending":
        words = words[::-1]
    if how == "tree":
        while len(words) > 1:
            pairs = [add(*words[i : i + 2]) for i in range(0, len(words) - 1, 2)]
            words = pairs + (words[-1:] if len(words) % 2 else [])
        return words[0]
    total = words[0]
    for word in words[1:]:
        total = add(total, word)
    return total


def product(profile, kind, x, w, cut, join):
    """`y[M][N]` in f32."""
    parts = cuts(cut, len(x[0]))
    one = lambda a, b: joined([unit.step(profile, kind, 0, a[i:j], b[i:j]) for i, j in parts], join)
    return [[one(a, b) for b in w] for a in x]


def save(path, metadata, tensors):
    """`tensors`: name -> (dtype, shape, words)."""
    header, body = {"__metadata__": metadata}, b""
    for name, (dtype, shape, words) in tensors.items():
        data = struct.pack(f"<{len(words)}{'I' if dtype in ('F32', 'U32') else 'H'}", *words)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + body)


def tensors(name, profile, kind, shape, cut, join, own, which, seed, how="spread"):
    drawing = random.Random(seed)
    m, n, k = shape
    x = [[unit.drawn(drawing, kind, how) for _ in range(k)] for _ in range(m)]
    w = [[unit.drawn(drawing, kind, how) for _ in range(k)] for _ in range(n)]
    y = product(profile, kind, x, w, cut, join)
    flat = lambda rows: [word for row in rows for word in row]
    dtype = {"bf16": "BF16", "fp16": "F16", "tf32": "F32"}[kind] if own else "U32" if kind == "tf32" else "U16"
    made = {f"{name}.x": (dtype, [m, k], flat(x)), f"{name}.w": (dtype, [n, k], flat(w))}
    if which != "y":
        made[f"{name}.y_fp32"] = ("F32", [m, n], flat(y))
    if which != "y_fp32" and kind != "tf32":
        made[f"{name}.y"] = (dtype, [m, n], [rounded(word, kind) for word in flat(y)])
    return made


SET = [
    *(f"{profile} {kind} 6x20x200 1 -" for profile, (groups, _) in unit.UNITS.items() for kind in groups),
    *(f"sm90 bf16 4x24x500 {parts}@16 {join}" for parts in (2, 3, 4, 7, 8) for join in ("ascending", "descending", "tree")),
    *(f"{profile} fp16 4x24x500 3@32 ascending" for profile in ("sm70", "sm75", "sm80", "sm90")),
    *(f"sm90 fp16 24x4x1000 {parts}~32 ascending" for parts in (3, 5, 7)),
    "sm90 bf16 1x40x333 3@64 ascending",
    "sm80 bf16 12x15x77 2@16 descending",
    "sm90 tf32 4x9x130 3@16 tree",
]


def write_set(out):
    made = {}
    for number, name in enumerate(SET):
        profile, kind, shape, cut, join = name.split()
        made |= tensors(name, profile, kind, list(map(int, shape.split("x"))), cut, join, True, "both", number)
    for how in ("special", "large", "subnormal", "sparse"):
        made |= tensors(f"sm90 bf16 6x20x64 2@16 ascending {how}", "sm90", "bf16", [6, 20, 64], "2@16", "ascending", True, "both", 5, how)
    save(out, {}, made)


def main():
    if sys.argv[1] == "--set":
        return write_set(sys.argv[2])
    out, profile, kind, shape, cut, join, *rest = sys.argv[1:]
    own, which, seed = rest[:1] == ["own"], (rest[1:2] or ["both"])[0], int((rest[2:3] or ["1"])[0])
    made = tensors(shape, profile, kind, list(map(int, shape.split("x"))), cut, join, own, which, seed)
    save(out, {} if own else {"dtype": kind}, made)


if __name__ == "__main__":
    main()
