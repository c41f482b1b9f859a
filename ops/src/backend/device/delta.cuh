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
    // Leaves of a piece of a column what a token does, and gives the sum of that times its key.
    template <class Piece> DEVICE float decayed(Piece &S, const Column &column, long long key, long long head) const {
        float sum = 0.0f, of_head = 0.0f;
        if (decays == 1) of_head = decay(head, column.h, 0);
        each_of(S, column.count, [&](int i) {
            float left = of_head;
            if (decays != 1) left = decay(head, column.h, column.first + i);
            float decayed = __fmul_rn(S.get(i), left);
            S.set(i, decayed);
            sum = __fmaf_rn(element(key, i), decayed, sum);
        });
        return joined(sum);
    }
};

// It, of the parameters of a kernel.
#define DELTA                                                                                                          \
    Delta delta{q,           k,      v,     g,     beta, a_log, has_a_log, dt_bias,                                    \
                has_dt_bias, length, heads, group, d,    e,     decays,    scale}
