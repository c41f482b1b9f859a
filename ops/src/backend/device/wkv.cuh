// Heads of the recurrence of RWKV-7 and of its gradient: wkv/heads.rs.
#pragma once
#include "columns.cuh"
#include "math.cuh"

// What a recurrence of RWKV-7 reads.
struct Wkv {
    GLOBAL(const In) r;
    GLOBAL(const In) w;
    GLOBAL(const In) k;
    GLOBAL(const In) v;
    GLOBAL(const In) a;
    GLOBAL(const In) b;
    long long length;
    int heads, d;

    // Where a head of a token begins.
    DEVICE long long of_head(long long batch, long long t, int h) const { return ((batch * length + t) * heads + h) * d; }
    DEVICE Column column() const { return Column(heads, d, d); }
    // What is left of a row of the state.
    DEVICE float left(long long at) const { return exponential(widen(static_cast<In>(w[at]))); }
};

DEVICE float wide(GLOBAL(const In) x, long long at) { return widen(static_cast<In>(x[at])); }

// `S = k * v + (b * sa + S * e^w)`
DEVICE float moved(float s, float left, float b, float sa, float k, float v) {
    return __fmaf_rn(k, v, __fmaf_rn(b, sa, __fmul_rn(s, left)));
}
