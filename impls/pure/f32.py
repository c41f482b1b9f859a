"""IEEE binary32 arithmetic on Python floats, exact to the last bit.

A value is a Python float (binary64) that happens to be a binary32 number. Sums, products, quotients and roots of
binary32 numbers may be computed in binary64 and then rounded to binary32: binary64 has more than twice the digits, so
rounding twice gives what rounding once would. That is not true of fma, which is done here in whole numbers.
"""

import math
import struct

NAN = math.nan
INF = math.inf


def f32(value):
    """The binary32 number nearest to a binary64 number, ties to even."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(INF, value)


def from_bits(bits):
    """The binary32 number with these bits."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def add(a, b):
    return f32(a + b)


def mul(a, b):
    return f32(a * b)


def div(a, b):
    if b == 0.0:
        if a == 0.0 or math.isnan(a):
            return NAN
        return math.copysign(INF, a) * math.copysign(1.0, b)
    return f32(a / b)


def sqrt(a):
    return f32(math.sqrt(a)) if a >= 0.0 else NAN


def fma(a, b, c):
    """a * b + c with one rounding."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c  # NaN or an infinity: there is nothing to round
    # Every binary32 number is a whole multiple of 2^-149, so this sum is a whole multiple of 2^-298.
    exact = units(a) * units(b) + (units(c) << 149)
    if exact == 0:
        return a * b + c  # exact in binary64 as well, which also gives the zero its sign
    size = abs(exact)
    # 24 bits stay, or fewer where the last one would lie below 2^-149.
    drop = max(size.bit_length() - 24, 149)
    kept, rest = size >> drop, size & ((1 << drop) - 1)
    half = 1 << (drop - 1)
    if rest > half or (rest == half and kept & 1):
        kept += 1
    # kept * 2^(drop - 298) has at most 24 bits; f32 only turns what is too large into infinity.
    return math.copysign(f32(math.ldexp(kept, drop - 298)), exact)


def units(value):
    """The whole number n with value = n * 2^-149."""
    return int(math.ldexp(value, 149))


def exp2(n):
    """2^n as a binary32 number, for whole n in -149..=127."""
    return math.ldexp(1.0, n)
