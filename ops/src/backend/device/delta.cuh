// Heads of the gated delta rule and of its gradient, and pieces of their sums: delta/heads.rs.
#pragma once
#include "element.cuh"
#include "math.cuh"
#include "reduce.cuh"

// What a gated delta rule reads.
struct Delta {
    GLOBAL(const In) q;
    GLOBAL(const In) k;
    GLOBAL(const In) v;
    GLOBAL(const float) g;
    GLOBAL(const float) beta;
    GLOBAL(const float) a_log;
    int has_a_log;
    GLOBAL(const float) dt_bias;
    int has_dt_bias;
    long long length;
    // Value heads, those of a key head; elements of a key and of a value; decays of a head.
    int heads, group, d, e, decays;
    float scale;

    DEVICE long long of_key(long long b, long long t, int h) const {
        return ((b * length + t) * (heads / group) + h / group) * d;
    }
    DEVICE long long of_head(long long b, long long t, int h) const { return (b * length + t) * heads + h; }
    DEVICE float query(long long key, int i) const { return __fmul_rn(widen(static_cast<In>(q[key + i])), scale); }
    DEVICE float element(long long key, int i) const { return widen(static_cast<In>(k[key + i])); }
    DEVICE float value(long long head, int i) const { return widen(static_cast<In>(v[head * e + i])); }
    // What the decay of element i of a state comes of.
    DEVICE float x(long long head, int h, int i) const {
        int own = decays == 1 ? 0 : i;
        float x = g[head * decays + own];
        if (has_dt_bias) x = __fadd_rn(x, dt_bias[h * decays + own]);
        return x;
    }
    // What is left of it.
    DEVICE float decay(long long head, int h, int i) const {
        float l = x(head, h, i);
        if (has_a_log) l = __fmul_rn(-exponential(a_log[h]), softplus(l));
        return exponential(l);
    }
};

DEVICE int segment_length(int n) { return (n + SEGMENTS * SEGMENT_STEP - 1) / (SEGMENTS * SEGMENT_STEP) * SEGMENT_STEP; }

// The sum of the segments of eight neighbouring threads, for each of them.
DEVICE float joined(float sum) {
#pragma unroll
    for (int h = 1; h < SEGMENTS; h *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(WHOLE_WARP, sum, h));
    return sum;
}

// A piece of a column that stays with its thread.
template <int MOST> struct Held {
    float values[MOST];
    DEVICE Held() {
#pragma unroll
        for (int i = 0; i < MOST; i++) values[i] = 0.0f;
    }
    DEVICE float get(int i) const { return values[i]; }
    DEVICE void set(int i, float value) { values[i] = value; }
    static const int COUNT = MOST;
};

// One in memory, an element every `stride`.
struct Stands {
    REREAD(float) values;
    long long stride;
    DEVICE float get(int i) const { return values[i * stride]; }
    DEVICE void set(int i, float value) { values[i * stride] = value; }
    static const int COUNT = 0;
};

// Runs `work(i)` for the elements of a piece: unrolled where they stay with the thread.
template <class Piece, class Work> DEVICE void each_of(const Piece &, int count, const Work &work) {
    if constexpr (Piece::COUNT > 0) {
#pragma unroll
        for (int i = 0; i < Piece::COUNT; i++) {
            if (i < count) work(i);
        }
    } else {
        for (int i = 0; i < count; i++) work(i);
    }
}
