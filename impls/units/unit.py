"""One step of a matrix unit in Python's integers: d = c + sum of a[i] * b[i], by the rule of docs/NUMERICS.md, "sm90".

Written from the rule alone; the crate `units` is the other writing of it, and `vectors.txt` of its tests comes from here:

    python3 impls/units/unit.py > units/tests/vectors.txt
"""

import random
import struct

# Profile -> products in a group by format, bits kept below the largest exponent.
UNITS = {
    "sm70": ({"fp16": 4}, 23),
    "sm75": ({"fp16": 8}, 24),
    "sm80": ({"bf16": 8, "fp16": 8, "tf32": 4}, 24),
    "sm89": ({"bf16": 8, "fp16": 8, "tf32": 4}, 24),
    "sm90": ({"bf16": 16, "fp16": 16, "tf32": 8}, 25),
    "sm100": ({"bf16": 16, "fp16": 16, "tf32": 8}, 25),
}
# Format -> bits of the word, of the exponent, of the fraction. The 13 low bits of a tf32 are not read.
FORMATS = {"bf16": (16, 8, 7), "fp16": (16, 5, 10), "tf32": (32, 8, 23), "fp32": (32, 8, 23)}
NAN = 0x7FFFFFFF
INFINITY = 0x7F800000


def parts(word, kind):
    """`(class, sign, exponent, mantissa)`: the number is mantissa * 2^(exponent - fraction); a subnormal has the smallest
    normal's exponent."""
    size, exponent_bits, fraction = FORMATS[kind]
    sign = -1 if word >> (size - 1) else 1
    exponent = word >> fraction & (1 << exponent_bits) - 1
    mantissa = word & (1 << fraction) - 1
    if kind == "tf32":
        mantissa = mantissa >> 13 << 13
    bias = (1 << exponent_bits - 1) - 1
    if exponent == (1 << exponent_bits) - 1:
        return ("nan" if mantissa else "inf"), sign, 0, 0
    if exponent == 0:
        return ("finite" if mantissa else "zero"), sign, 1 - bias, mantissa
    return "finite", sign, exponent - bias, mantissa | 1 << fraction


def cut(number, scale):
    """f32 of number * 2^scale, cut off toward zero."""
    sign, number = (1 << 31 if number < 0 else 0), abs(number)
    if number == 0:
        return 0
    exponent = number.bit_length() - 1 + scale
    unit = max(exponent, -126) - 23
    shift = scale - unit
    mantissa = number << shift if shift >= 0 else number >> -shift
    if exponent > 127:
        return sign | INFINITY
    if mantissa == 0:
        return 0
    return sign | (mantissa if mantissa < 1 << 23 else (unit + 150) << 23 | mantissa & (1 << 23) - 1)


def group(bits, kind, c, a, b):
    """One group of products on top of c."""
    nan, infinities, terms = False, set(), []
    fraction = FORMATS[kind][2]
    for x, y in zip(a, b):
        (kx, sx, ex, mx), (ky, sy, ey, my) = parts(x, kind), parts(y, kind)
        kinds = {kx, ky}
        if "nan" in kinds or kinds == {"inf", "zero"}:
            nan = True
        elif "inf" in kinds:
            infinities.add(sx * sy)
        elif "zero" not in kinds:
            terms.append((sx * sy, ex + ey, mx * my, 2 * fraction))
    kc, sc, ec, mc = parts(c, "fp32")
    if kc == "nan":
        nan = True
    elif kc == "inf":
        infinities.add(sc)
    elif kc == "finite":
        terms.append((sc, ec, mc, 23))
    if nan or len(infinities) == 2:
        return NAN
    if infinities:
        return INFINITY | (1 << 31 if -1 in infinities else 0)
    if not terms:
        return 0
    top = max(exponent for _, exponent, _, _ in terms)
    total = 0
    for sign, exponent, mantissa, below in terms:
        shift = exponent - below - (top - bits)
        total += sign * (mantissa << shift if shift >= 0 else mantissa >> -shift)
    return cut(total, top - bits)


def step(profile, kind, c, a, b):
    """Group after group, ascending; what is missing in the last one is zeros."""
    groups, bits = UNITS[profile]
    for first in range(0, len(a), groups[kind]):
        last = first + groups[kind]
        c = group(bits, kind, c, a[first:last], b[first:last])
    return c


def drawn(random, kind, how):
    """A word of a format."""
    size, exponent_bits, fraction = FORMATS[kind]
    sign, mantissa = random.getrandbits(1) << size - 1, random.getrandbits(fraction)
    if kind == "tf32":
        mantissa = mantissa >> 13 << 13
    bias = (1 << exponent_bits - 1) - 1
    exponent = {
        "normal": lambda: bias + random.randint(-3, 1),
        "spread": lambda: bias + random.randint(-9, 1),
        "wide": lambda: bias + random.randint(-14, 14),
        "subnormal": lambda: random.choice([0, 0, 1, 2, bias, random.randint(0, bias)]),
        "large": lambda: 2 * bias - random.randint(0, 3) if random.random() < 0.5 else bias + random.randint(-2, 2),
        "sparse": lambda: bias + random.randint(-12, 12),
        "special": lambda: random.choice([bias, bias, bias, bias, bias, bias, 0, 2 * bias + 1]),
        "tiny": lambda: max(1, bias // 2 - random.randint(0, 12)) if size == 32 or exponent_bits == 8 else random.randint(0, 3),
        "bits": lambda: bias + random.choice([-13, -12, -11, -6, -5, 0, 0, 12, 13]),
    }[how]()
    if how == "sparse" and random.random() < 0.7 or how == "special" and random.random() < 0.5:
        mantissa = 0
        if how == "sparse" and random.random() < 0.7:
            exponent = 0
    if how == "bits":
        mantissa &= 1 << fraction - 1 | 1 << (13 if kind == "tf32" else 0)
    return sign | exponent << fraction | mantissa


def example(random, kind, k, how):
    """`(c, a, b)`, where every second one cancels in part."""
    a = [drawn(random, kind, how) for _ in range(k)]
    b = [drawn(random, kind, how) for _ in range(k)]
    if random.random() < 0.3:
        size = FORMATS[kind][0]
        for i in range(0, k - 1, 2):
            a[i + 1], b[i + 1] = a[i] ^ 1 << size - 1, b[i]
    c = {
        "subnormal": lambda: random.choice([0, random.getrandbits(23), random.getrandbits(31), 1 << 31]),
        "large": lambda: random.randint(0x7E000000, 0x7F7FFFFF) | random.getrandbits(1) << 31,
        "tiny": lambda: random.choice([0, 0, random.getrandbits(random.randint(1, 23))]) | random.getrandbits(1) << 31,
        "special": lambda: random.choice([0, 1 << 31, INFINITY, INFINITY | 1 << 31, 0x7FC00000, 0x3F800000]),
    }.get(how, lambda: 0 if random.random() < 0.2 else random.randint(100, 150) << 23 | random.getrandbits(23) | random.getrandbits(1) << 31)()
    return c, a, b


def main():
    drawing = random.Random(1)
    print("# profile, format, c, a, b, d: words in hexadecimal; made by impls/units/unit.py")
    for profile, (groups, _) in UNITS.items():
        for kind in groups:
            if profile in ("sm89", "sm100", "sm75"):
                continue  # the arithmetic of sm80, sm90, sm80
            for how in ["normal", "wide", "subnormal", "large", "sparse", "special", "bits", "tiny"]:
                for number in range(9):
                    k = 8 if kind == "tf32" else 16
                    c, a, b = example(drawing, kind, drawing.choice([k, k, k, 2 * k, k - 3]), how)
                    digits = 4 if FORMATS[kind][0] == 16 else 8
                    words = lambda list: " ".join(f"{word:0{digits}x}" for word in list)
                    print(f"{profile} {kind} {c:08x} | {words(a)} | {words(b)} | {step(profile, kind, c, a, b):08x}")


if __name__ == "__main__":
    main()
