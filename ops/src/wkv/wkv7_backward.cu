// Gradient of the recurrence of RWKV-7: r, w, k, v, a, b, state?, len?, dy[B,T,H,D], dnext[B,H,D,D]? -> dr, dw, dk, dv, da, db,
// dstate: wkv7_backward.rs. First columns e of each head, where sums over rows are made, then its rows d, where sums over columns
// are.
#include "wkv.cuh"

#define PARAMETERS                                                                                                     \
    GLOBAL(const In) r, GLOBAL(const In) w, GLOBAL(const In) k, GLOBAL(const In) v, GLOBAL(const In) a,                \
        GLOBAL(const In) b, GLOBAL(const float) state, int has_state, GLOBAL(const int) len, int has_len,              \
        long long length, int heads, int d, GLOBAL(const In) dy, GLOBAL(const float) dnext, int has_dnext,             \
        GLOBAL(Out) dr, GLOBAL(Out) dw, GLOBAL(Out) dk, GLOBAL(Out) dv, GLOBAL(Out) da, GLOBAL(Out) db,                \
        REREAD(float) dstate, REREAD(float) sa, REREAD(float) dsa, REREAD(float) own, REREAD(float) gradient,          \
        REREAD(float) kept, REREAD(float) before

// A column of a head, forward for sa and back for dsa, dv and dstate.
template <class Piece>
DEVICE void column(Piece &S, const Wkv &wkv, GLOBAL(const float) state, int has_state, long long end,
                   GLOBAL(const In) dy, GLOBAL(const float) dnext, int has_dnext, GLOBAL(Out) dv, REREAD(float) dstate,
                   REREAD(float) sa, REREAD(float) dsa) {
    Column column = wkv.column();
    column.begin(S, state, has_state);
    for (long long t = 0; t < end; t++) {
        long long head = wkv.of_head(column.batch, t, column.h), rows = head + column.first;
        float sum = 0.0f, v = 0.0f;
        each_of(S, column.count, [&](int i) { sum = __fmaf_rn(wide(wkv.a, rows + i), S.get(i), sum); });
        sum = joined(sum);
        if (column.lives) v = wide(wkv.v, head + column.e);
        if (column.writes()) sa[head + column.e] = sum;
        each_of(S, column.count, [&](int i) {
            S.set(i, moved(S.get(i), wkv.left(rows + i), wide(wkv.b, rows + i), sum, wide(wkv.k, rows + i), v));
        });
    }
    column.begin(S, dnext, has_dnext);
    for (long long t = end - 1; t >= 0; t--) {
        long long head = wkv.of_head(column.batch, t, column.h), rows = head + column.first;
        float of_b = 0.0f, of_v = 0.0f, of_y = 0.0f;
        if (column.lives) of_y = wide(dy, head + column.e);
        each_of(S, column.count, [&](int i) {
            float m = __fmaf_rn(wide(wkv.r, rows + i), of_y, S.get(i));
            S.set(i, m);
            of_b = __fmaf_rn(wide(wkv.b, rows + i), m, of_b);
            of_v = __fmaf_rn(wide(wkv.k, rows + i), m, of_v);
        });
        of_b = joined(of_b);
        of_v = joined(of_v);
        if (column.writes()) {
            dsa[head + column.e] = of_b;
            dv[head + column.e] = narrow<Out>(of_v);
        }
        each_of(S, column.count, [&](int i) {
            S.set(i, __fmaf_rn(wide(wkv.a, rows + i), of_b, __fmul_rn(S.get(i), wkv.left(rows + i))));
        });
    }
    for (long long t = end; t < wkv.length; t++) {
        if (column.writes()) dv[wkv.of_head(column.batch, t, column.h) + column.e] = narrow<Out>(0.0f);
    }
    column.end(S, dstate);
}

// Heads of up to 128 elements and of up to 256, whose states stay in registers.
#define COLUMNS(name, most, resident)                                                                                  \
    KERNEL(256, resident) name(PARAMETERS) {                                                                           \
        Wkv wkv{r, w, k, v, a, b, length, heads, d};                                                                   \
        long long end = length;                                                                                        \
        if (has_len) end = len[blockIdx.x / heads];                                                                    \
        Held<most> S;                                                                                                  \
        column(S, wkv, state, has_state, end, dy, dnext, has_dnext, dv, dstate, sa, dsa);                              \
    }

COLUMNS(wkv7_backward_16, 16, 4)
COLUMNS(wkv7_backward_32, 32, 3)

// Heads of any number of elements, whose states are where their gradient ends.
KERNEL(256, 4) wkv7_backward_any(PARAMETERS) {
    Wkv wkv{r, w, k, v, a, b, length, heads, d};
    long long end = length;
    if (has_len) end = len[blockIdx.x / heads];
    Stands S{dstate + wkv.column().from, d};
    column(S, wkv, state, has_state, end, dy, dnext, has_dnext, dv, dstate, sa, dsa);
}

// A row of a head, of which eight threads have a segment of columns each: forward for its states and back for the sums over them.
KERNEL(256, 4) wkv7_backward_rows(PARAMETERS) {
    Wkv wkv{r, w, k, v, a, b, length, heads, d};
    Row row(heads, d, d);
    int i = row.i, h = row.h, first = row.first;
    long long end = length, all = row.all, from = row.from;
    if (has_len) end = len[row.batch];
    row.begin(own, state, has_state);
    row.begin(gradient, dnext, has_dnext);
    // Takes the row over a token; what it was before that stays where `again` says.
    auto step = [&](long long t, long long again) {
        if (!row.lives) return;
        long long head = wkv.of_head(row.batch, t, h);
        float left = wkv.left(head + i), of_b = wide(b, head + i), of_k = wide(k, head + i);
        for (int c = 0; c < row.count; c++) {
            long long at = head + first + c;
            if (again >= 0) before[again * all + from + c] = static_cast<float>(own[from + c]);
            own[from + c] = moved(own[from + c], left, of_b, sa[at], of_k, wide(v, at));
        }
    };
    auto back = [&](long long t, long long again) {
        long long head = wkv.of_head(row.batch, t, h);
        float left = 0.0f, of_a = 0.0f, of_b = 0.0f, of_k = 0.0f, of_r = 0.0f;
        if (row.lives) {
            left = wkv.left(head + i);
            of_a = wide(a, head + i);
            of_b = wide(b, head + i);
            of_k = wide(k, head + i);
            of_r = wide(r, head + i);
        }
        float sum_r = 0.0f, sum_w = 0.0f, sum_k = 0.0f, sum_a = 0.0f, sum_b = 0.0f;
        for (int c = 0; c < row.count; c++) {
            long long at = head + first + c;
            float of_y = wide(dy, at), of_v = wide(v, at), read = sa[at], of_read = dsa[at];
            float s = before[again * all + from + c];
            float m = __fmaf_rn(of_r, of_y, gradient[from + c]);
            sum_r = __fmaf_rn(moved(s, left, of_b, read, of_k, of_v), of_y, sum_r);
            sum_w = __fmaf_rn(m, s, sum_w);
            sum_k = __fmaf_rn(m, of_v, sum_k);
            sum_a = __fmaf_rn(s, of_read, sum_a);
            sum_b = __fmaf_rn(m, read, sum_b);
            gradient[from + c] = __fmaf_rn(of_a, of_read, __fmul_rn(m, left));
        }
        sum_r = joined(sum_r);
        sum_w = joined(sum_w);
        sum_k = joined(sum_k);
        sum_a = joined(sum_a);
        sum_b = joined(sum_b);
        if (row.writes()) {
            dr[head + i] = narrow<Out>(sum_r);
            dw[head + i] = narrow<Out>(__fmul_rn(sum_w, left));
            dk[head + i] = narrow<Out>(sum_k);
            da[head + i] = narrow<Out>(sum_a);
            db[head + i] = narrow<Out>(sum_b);
        }
    };
    row.there_and_back(end, own, kept, step, back);
    for (long long t = end; t < length; t++) {
        if (!row.writes()) continue;
        long long at = wkv.of_head(row.batch, t, h) + i;
        dr[at] = narrow<Out>(0.0f);
        dw[at] = narrow<Out>(0.0f);
        dk[at] = narrow<Out>(0.0f);
        da[at] = narrow<Out>(0.0f);
        db[at] = narrow<Out>(0.0f);
    }
}
