// The recurrence of RWKV-7: r, w, k, v, a, b[B,T,H,D], state[B,H,D,D]?, len[B]? -> y[B,T,H,D], next[B,H,D,D]: wkv7.rs. Eight
// threads take a column of a head, each a segment of its rows, and join their sums; all tokens of it one after the other.
#include "wkv.cuh"

template <class Piece>
DEVICE void column(Piece &S, const Wkv &wkv, GLOBAL(const float) state, int has_state, long long end, GLOBAL(Out) y,
                   REREAD(float) next) {
    Column column = wkv.column();
    column.begin(S, state, has_state);
    for (long long t = 0; t < end; t++) {
        long long head = wkv.of_head(column.batch, t, column.h), rows = head + column.first;
        float sa = 0.0f, sum = 0.0f, v = 0.0f;
        each_of(S, column.count, [&](int i) { sa = __fmaf_rn(wide(wkv.a, rows + i), S.get(i), sa); });
        sa = joined(sa);
        if (column.lives) v = wide(wkv.v, head + column.e);
        each_of(S, column.count, [&](int i) {
            float s = moved(S.get(i), wkv.left(rows + i), wide(wkv.b, rows + i), sa, wide(wkv.k, rows + i), v);
            S.set(i, s);
            sum = __fmaf_rn(wide(wkv.r, rows + i), s, sum);
        });
        sum = joined(sum);
        if (column.writes()) y[head + column.e] = narrow<Out>(sum);
    }
    for (long long t = end; t < wkv.length; t++) {
        if (!column.writes()) continue;
        y[wkv.of_head(column.batch, t, column.h) + column.e] = narrow<Out>(0.0f);
    }
    column.end(S, next);
}

#define PARAMETERS                                                                                                     \
    GLOBAL(const In) r, GLOBAL(const In) w, GLOBAL(const In) k, GLOBAL(const In) v, GLOBAL(const In) a,                \
        GLOBAL(const In) b, GLOBAL(const float) state, int has_state, GLOBAL(const int) len, int has_len,              \
        long long length, int heads, int d, GLOBAL(Out) y, REREAD(float) next

// Heads of up to 128 elements and of up to 256, whose states stay in registers.
#define COLUMNS(name, most, resident)                                                                                  \
    KERNEL(256, resident) name(PARAMETERS) {                                                                           \
        Wkv wkv{r, w, k, v, a, b, length, heads, d};                                                                   \
        long long end = length;                                                                                        \
        if (has_len) end = len[blockIdx.x / heads];                                                                    \
        Held<most> S;                                                                                                  \
        column(S, wkv, state, has_state, end, y, next);                                                                \
    }

COLUMNS(wkv7_16, 16, 4)
COLUMNS(wkv7_32, 32, 3)

// Heads of any number of elements, whose states are where they end.
KERNEL(256, 4) wkv7_any(PARAMETERS) {
    Wkv wkv{r, w, k, v, a, b, length, heads, d};
    long long end = length;
    if (has_len) end = len[blockIdx.x / heads];
    Stands S{next + wkv.column().from, d};
    column(S, wkv, state, has_state, end, y, next);
}
