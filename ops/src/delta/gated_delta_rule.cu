// The gated delta rule: q[B,T,Hk,D], k[B,T,Hk,D], v[B,T,Hv,E], g[B,T,Hv,G], beta[B,T,Hv], a_log[Hv]?, dt_bias[Hv,G]?,
// state[B,Hv,D,E]?, len[B]? -> y[B,T,Hv,E], next[B,Hv,D,E]: gated_delta_rule.rs. Eight threads take a column of a head, each
// a segment of D, and join their sums; all tokens of it one after the other.
#include "delta.cuh"

template <class Piece>
DEVICE void column(Piece &S, const Delta &delta, GLOBAL(const float) state, int has_state, long long end, GLOBAL(Out) y,
                   REREAD(float) next) {
    Column column = delta.column();
    column.begin(S, state, has_state);
    for (long long t = 0; t < end; t++) {
        long long key = delta.of_key(column.batch, t, column.h) + column.first;
        long long head = delta.of_head(column.batch, t, column.h);
        float sum = delta.decayed(S, column, key, head), u = 0.0f;
        if (column.lives) u = __fmul_rn(__fsub_rn(delta.value(head, column.e), sum), delta.beta[head]);
        sum = 0.0f;
        each_of(S, column.count, [&](int i) {
            float moved = __fmaf_rn(delta.element(key, i), u, S.get(i));
            S.set(i, moved);
            sum = __fmaf_rn(delta.query(key, i), moved, sum);
        });
        sum = joined(sum);
        if (column.writes()) y[head * delta.e + column.e] = narrow<Out>(sum);
    }
    for (long long t = end; t < delta.length; t++) {
        if (!column.writes()) continue;
        y[delta.of_head(column.batch, t, column.h) * delta.e + column.e] = narrow<Out>(0.0f);
    }
    column.end(S, next);
}

#define PARAMETERS                                                                                                     \
    GLOBAL(const In) q, GLOBAL(const In) k, GLOBAL(const In) v, GLOBAL(const float) g, GLOBAL(const float) beta,       \
        GLOBAL(const float) a_log, int has_a_log, GLOBAL(const float) dt_bias, int has_dt_bias,                        \
        GLOBAL(const float) state, int has_state, GLOBAL(const int) len, int has_len, GLOBAL(Out) y,                   \
        REREAD(float) next, long long length, int heads, int group, int d, int e, int decays, float scale

// Keys of up to 128 elements and of up to 256, whose states stay in registers.
#define COLUMNS(name, most, resident)                                                                                  \
    KERNEL(256, resident) name(PARAMETERS) {                                                                           \
        DELTA;                                                                                                         \
        long long end = length;                                                                                        \
        if (has_len) end = len[blockIdx.x / heads];                                                                    \
        Held<most> S;                                                                                                  \
        column(S, delta, state, has_state, end, y, next);                                                              \
    }

COLUMNS(gated_delta_rule_16, 16, 4)
COLUMNS(gated_delta_rule_32, 32, 3)

// Keys of any number of elements, whose states are where they end.
KERNEL(256, 4) gated_delta_rule_any(PARAMETERS) {
    DELTA;
    long long end = length;
    if (has_len) end = len[blockIdx.x / heads];
    Stands S{next + delta.column().from, e};
    column(S, delta, state, has_state, end, y, next);
}
