// Heads of the gated delta rule and of its gradient: delta/heads.rs.
#pragma once
#include "columns.cuh"
#include "math.cuh"

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

    DEVICE Column column() const { return Column(heads, d, e); }
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
