// Elementary functions: math.rs and docs/NUMERICS.md, section 3. Every operation names its rounding, so that no
// compiler may contract two of them.
#pragma once
#include "element.cuh"
#include "profile.cuh"

#define INFINITE __uint_as_float(0x7F800000u)
#define NOT_A_NUMBER __uint_as_float(0x7FC00000u)
// Adding this rounds a number below 2^22 to an integer, ties to even, and leaves that integer in the low bits.
#define ROUNDING 12582912.0f

// 2^i for an integer i in [-126, 127].
DEVICE float pow2(int i) { return __uint_as_float(static_cast<unsigned>(i + 127) << 23); }

// The polynomial of 2^f before its last step.
DEVICE float exp2_rest(float f) {
    float m = EXP2_6;
    m = __fmaf_rn(m, f, EXP2_5);
    m = __fmaf_rn(m, f, EXP2_4);
    m = __fmaf_rn(m, f, EXP2_3);
    m = __fmaf_rn(m, f, EXP2_2);
    return __fmaf_rn(m, f, EXP2_1);
}

// The polynomial of 2^f.
DEVICE float exp2_fraction(float f) { return __fmaf_rn(exp2_rest(f), f, 1.0f); }

struct Split {
    float m, i;
};

// (m, i) with m * 2^i close to 2^(x * (c_hi + c_lo)).
DEVICE Split exp_split(float x, float c_hi, float c_lo) {
    float t = __fmul_rn(x, c_hi);
    float i = rintf(t);
    float f = __fmaf_rn(x, c_hi, -i);
    f = __fmaf_rn(x, c_lo, f);
    if (fabsf(t) >= NO_FRACTION) f = 0.0f;
    return Split{exp2_fraction(f), i};
}

// m * 2^(i - n), exactly, or +0 when it is negligible. n is at least i; m is normal, so the exponent stays one.
DEVICE float weight(float m, float i, float n) {
    float d = __fsub_rn(i, n);
    if (!(d >= NEGLIGIBLE)) return 0.0f;
    return __fmul_rn(m, pow2(static_cast<int>(d)));
}

// (m * 2^h) * 2^(i-h) with i clamped to MOST_SCALED on both sides and h = floor(i / 2).
DEVICE float scaled(float m, float i) {
    int whole = static_cast<int>(fminf(fmaxf(i, -MOST_SCALED), MOST_SCALED));
    int half = whole >> 1;
    return __fmul_rn(__fmul_rn(m, pow2(half)), pow2(whole - half));
}

DEVICE float exponential(float x) {
    Split s = exp_split(x, LOG2E_HI, LOG2E_LO);
    return scaled(s.m, s.i);
}

// e^x - 1 of x that is not above 0.
DEVICE float exponential_less_one(float x) {
    float t = __fmul_rn(x, LOG2E_HI), i = rintf(t);
    float f = __fmaf_rn(x, LOG2E_LO, __fmaf_rn(x, LOG2E_HI, -i));
    if (fabsf(t) >= NO_FRACTION) f = 0.0f;
    float rest = exp2_rest(f);
    return i == 0.0f ? __fmul_rn(rest, f) : __fsub_rn(scaled(__fmaf_rn(rest, f, 1.0f), i), 1.0f);
}

// e^d, or +0 where its exponent is below -100. That of a NaN is NaN.
DEVICE float exponential_or_nothing(float d) {
    Split s = exp_split(d, LOG2E_HI, LOG2E_LO);
    return s.i < NEGLIGIBLE ? 0.0f : scaled(s.m, s.i);
}

// 1 / (1 + e^-x). Beyond |x| = 176 the exponential is +0 or infinite already, so x may be clamped there; that keeps the
// rounding to an integer within the reach of one addition. A NaN becomes a number here: whoever multiplies by x as
// well, as silu_mul does, has it back.
DEVICE float sigmoid_of_number(float x) {
    float y = fminf(fmaxf(-x, -176.0f), 176.0f);
    float shifted = __fadd_rn(__fmul_rn(y, LOG2E_HI), ROUNDING);
    float i = __fsub_rn(shifted, ROUNDING);
    float f = __fmaf_rn(y, LOG2E_LO, __fmaf_rn(y, LOG2E_HI, -i));
    int whole = max(static_cast<int>(-MOST_SCALED), min(static_cast<int>(MOST_SCALED), static_cast<int>(__float_as_uint(shifted) - __float_as_uint(ROUNDING))));
    int half = whole >> 1;
    float e = __fmul_rn(__fmul_rn(exp2_fraction(f), pow2(half)), pow2(whole - half));
    return __frcp_rn(__fadd_rn(1.0f, e));
}

// 1 / (1 + e^-x). That of a NaN is NaN.
DEVICE float sigmoid(float x) { return x != x ? NOT_A_NUMBER : sigmoid_of_number(x); }

DEVICE float hyperbolic_tangent(float x) {
    float e = exponential(__fmul_rn(-2.0f, fabsf(x)));
    float t = __fdiv_rn(__fsub_rn(1.0f, e), __fadd_rn(1.0f, e));
    return copysignf(t, x);
}

struct Normal {
    float share, e;
};

// The share of a normal distribution below x, and e^(-x^2/2).
DEVICE Normal normal(float x) {
    float t = __frcp_rn(__fmaf_rn(NORMAL_STEP, fabsf(x), 1.0f));
    float m = NORMAL_TAIL_9;
    m = __fmaf_rn(m, t, NORMAL_TAIL_8);
    m = __fmaf_rn(m, t, NORMAL_TAIL_7);
    m = __fmaf_rn(m, t, NORMAL_TAIL_6);
    m = __fmaf_rn(m, t, NORMAL_TAIL_5);
    m = __fmaf_rn(m, t, NORMAL_TAIL_4);
    m = __fmaf_rn(m, t, NORMAL_TAIL_3);
    m = __fmaf_rn(m, t, NORMAL_TAIL_2);
    m = __fmaf_rn(m, t, NORMAL_TAIL_1);
    float e = exponential(__fmul_rn(__fmul_rn(x, x), -0.5f));
    float beyond = __fmul_rn(e, __fmul_rn(m, t));
    return Normal{x >= 0.0f ? __fsub_rn(1.0f, beyond) : beyond, e};
}

// The logarithm of (1 + s) / (1 - s), of |s| up to 1/3.
DEVICE double logarithm_of_quotient(double s) {
    double q = __dmul_rn(s, s);
    double r = __ddiv_rn(1.0, static_cast<double>(LN_TERMS));
    for (int d = LN_TERMS - 2; d >= 1; d -= 2) r = __fma_rn(r, q, __ddiv_rn(1.0, static_cast<double>(d)));
    return __dmul_rn(__dmul_rn(2.0, s), r);
}

// The natural logarithm of a positive normal f32, in f64.
DEVICE double natural_logarithm(float l) {
    long long bits = __double_as_longlong(static_cast<double>(l));
    double e = static_cast<double>(static_cast<int>(bits >> 52) - 1023);
    double z = __longlong_as_double((bits & 0x000FFFFFFFFFFFFFll) | 0x3FF0000000000000ll);
    if (z >= LN_HALF) {
        z = __dmul_rn(z, 0.5);
        e = __dadd_rn(e, 1.0);
    }
    return __fma_rn(e, LN_2, logarithm_of_quotient(__ddiv_rn(__dsub_rn(z, 1.0), __dadd_rn(z, 1.0))));
}

// The logarithm of 1 + a / b, of 0 <= a < b, in f64.
DEVICE double logarithm_of_one_plus(float a, float b) {
    double over = static_cast<double>(a), under = static_cast<double>(b);
    return logarithm_of_quotient(__ddiv_rn(over, __dadd_rn(__dmul_rn(2.0, under), over)));
}

// ln(1 + e^x), rounded to f32 once.
DEVICE float softplus(float x) {
    double l = logarithm_of_one_plus(exponential(-fabsf(x)), 1.0f);
    return __double2float_rn(x > 0.0f ? __dadd_rn(static_cast<double>(x), l) : l);
}

// The logarithm of l * 2^n, in f64, and rounded to f32 once.
DEVICE double logarithm_of_sum(float n, float l) { return __fma_rn(static_cast<double>(n), LN_2, natural_logarithm(l)); }
DEVICE float log_sum(float n, float l) { return __double2float_rn(logarithm_of_sum(n, l)); }
