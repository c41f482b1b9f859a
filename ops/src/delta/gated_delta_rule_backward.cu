// Gradient of the gated delta rule: q, k, v, g, beta, a_log?, dt_bias?, state?, len?, dy[B,T,Hv,E], dnext[B,Hv,D,E]? ->
// dq, dk, dv, dg, dbeta, da_log, dstate: gated_delta_rule_backward.rs. First columns e of each head, where sums over D are made,
// then its rows d, where sums over E are, then what heads of a group and elements of a head add up to.
#include "delta.cuh"

#define PARAMETERS                                                                                                     \
    GLOBAL(const In) q, GLOBAL(const In) k, GLOBAL(const In) v, GLOBAL(const float) g, GLOBAL(const float) beta,       \
        GLOBAL(const float) a_log, int has_a_log, GLOBAL(const float) dt_bias, int has_dt_bias,                        \
        GLOBAL(const float) state, int has_state, GLOBAL(const int) len, int has_len, GLOBAL(const In) dy,             \
        GLOBAL(const float) dnext, int has_dnext, GLOBAL(Out) dq, GLOBAL(Out) dk, GLOBAL(Out) dv, GLOBAL(float) dg,    \
        GLOBAL(float) dbeta, GLOBAL(float) da_log, REREAD(float) dstate, REREAD(float) r, REREAD(float) du,            \
        REREAD(float) tq, REREAD(float) tk, REREAD(float) tg, REREAD(float) own, REREAD(float) gradient,               \
        REREAD(float) kept, REREAD(float) made_again, long long rows, long long length, int heads, int group, int d,   \
        int e, int decays, float scale

// A column of a head, forward for r and back for du and dstate.
template <class Piece>
DEVICE void column(Piece &S, const Delta &delta, GLOBAL(const float) state, int has_state, long long end,
                   GLOBAL(const In) dy, GLOBAL(const float) dnext, int has_dnext, GLOBAL(Out) dv, REREAD(float) dstate,
                   REREAD(float) r, REREAD(float) du) {
    Column column = delta.column();
    column.begin(S, state, has_state);
    for (long long t = 0; t < end; t++) {
        long long key = delta.of_key(column.batch, t, column.h) + column.first;
        long long head = delta.of_head(column.batch, t, column.h);
        float sum = delta.decayed(S, column, key, head), of_r = 0.0f, u = 0.0f;
        if (column.lives) {
            of_r = __fsub_rn(delta.value(head, column.e), sum);
            u = __fmul_rn(of_r, delta.beta[head]);
        }
        if (column.writes()) r[head * delta.e + column.e] = of_r;
        each_of(S, column.count, [&](int i) { S.set(i, __fmaf_rn(delta.element(key, i), u, S.get(i))); });
    }
    column.begin(S, dnext, has_dnext);
    for (long long t = end - 1; t >= 0; t--) {
        long long key = delta.of_key(column.batch, t, column.h) + column.first;
        long long head = delta.of_head(column.batch, t, column.h);
        float sum = 0.0f, of_head = 0.0f, of_y = 0.0f;
        if (column.lives) of_y = widen(static_cast<In>(dy[head * delta.e + column.e]));
        if (delta.decays == 1) of_head = delta.decay(head, column.h, 0);
        each_of(S, column.count, [&](int i) {
            float m = __fmaf_rn(delta.query(key, i), of_y, S.get(i));
            S.set(i, m);
            sum = __fmaf_rn(delta.element(key, i), m, sum);
        });
        sum = joined(sum);
        float dr = __fmul_rn(sum, delta.beta[head]);
        if (column.writes()) {
            du[head * delta.e + column.e] = sum;
            dv[head * delta.e + column.e] = narrow<Out>(dr);
        }
        each_of(S, column.count, [&](int i) {
            float left = of_head;
            if (delta.decays != 1) left = delta.decay(head, column.h, column.first + i);
            S.set(i, __fmul_rn(__fmaf_rn(-delta.element(key, i), dr, S.get(i)), left));
        });
    }
    for (long long t = end; t < delta.length; t++) {
        if (!column.writes()) continue;
        dv[delta.of_head(column.batch, t, column.h) * delta.e + column.e] = narrow<Out>(0.0f);
    }
    column.end(S, dstate);
}

// Keys of up to 128 elements and of up to 256, whose states stay in registers.
#define COLUMNS(name, most, resident)                                                                                  \
    KERNEL(256, resident) name(PARAMETERS) {                                                                           \
        DELTA;                                                                                                         \
        long long end = length;                                                                                        \
        if (has_len) end = len[blockIdx.x / heads];                                                                    \
        Held<most> S;                                                                                                  \
        column(S, delta, state, has_state, end, dy, dnext, has_dnext, dv, dstate, r, du);                              \
    }

COLUMNS(gated_delta_rule_backward_16, 16, 4)
COLUMNS(gated_delta_rule_backward_32, 32, 3)

// Keys of any number of elements, whose states are where their gradient ends.
KERNEL(256, 4) gated_delta_rule_backward_any(PARAMETERS) {
    DELTA;
    long long end = length;
    if (has_len) end = len[blockIdx.x / heads];
    Stands S{dstate + delta.column().from, e};
    column(S, delta, state, has_state, end, dy, dnext, has_dnext, dv, dstate, r, du);
}

// A row of a head, of which eight threads have a segment of E each: forward for its states and back for the sums over E.
KERNEL(256, 4) gated_delta_rule_backward_rows(PARAMETERS) {
    DELTA;
    Row row(heads, d, e);
    int i = row.i, h = row.h, first = row.first;
    long long b = row.batch, end = length, all = row.all, from = row.from;
    bool lives = row.lives;
    if (has_len) end = len[b];
    row.begin(own, state, has_state);
    row.begin(gradient, dnext, has_dnext);
    auto step = [&](long long t, long long again) {
        long long key = delta.of_key(b, t, h), head = delta.of_head(b, t, h);
        float left = 0.0f, at_key = 0.0f, of_beta = beta[head];
        if (lives) left = delta.decay(head, h, i);
        if (lives) at_key = delta.element(key, i);
        for (int c = 0; c < row.count; c++) {
            float decayed = __fmul_rn(own[from + c], left);
            if (again >= 0) made_again[again * all + from + c] = decayed;
            own[from + c] = __fmaf_rn(at_key, __fmul_rn(r[head * e + first + c], of_beta), decayed);
        }
    };
    auto back = [&](long long t, long long again) {
        long long key = delta.of_key(b, t, h), head = delta.of_head(b, t, h);
        float left = 0.0f, at_key = 0.0f, at_query = 0.0f, of_beta = beta[head];
        if (lives) left = delta.decay(head, h, i);
        if (lives) at_key = delta.element(key, i);
        if (lives) at_query = delta.query(key, i);
        float of_q = 0.0f, of_u = 0.0f, of_r = 0.0f, of_g = 0.0f;
        for (int c = 0; c < row.count; c++) {
            long long value = head * e + first + c;
            float of_y = widen(static_cast<In>(dy[value])), u = __fmul_rn(r[value], of_beta);
            float dr = __fmul_rn(du[value], of_beta), p = made_again[again * all + from + c];
            float m = __fmaf_rn(at_query, of_y, gradient[from + c]);
            float n = __fmaf_rn(-at_key, dr, m);
            of_q = __fmaf_rn(__fmaf_rn(at_key, u, p), of_y, of_q);
            of_u = __fmaf_rn(m, u, of_u);
            of_r = __fmaf_rn(p, dr, of_r);
            of_g = __fmaf_rn(n, p, of_g);
            gradient[from + c] = __fmul_rn(n, left);
        }
        of_q = joined(of_q);
        of_u = joined(of_u);
        of_r = joined(of_r);
        of_g = joined(of_g);
        if (row.writes()) {
            tq[head * d + i] = of_q;
            tk[head * d + i] = __fsub_rn(of_u, of_r);
            tg[head * d + i] = of_g;
        }
    };
    row.there_and_back(end, own, kept, step, back);
}

// An element of a key head: the totals of its value heads.
KERNEL(256, 4) gated_delta_rule_backward_keys(PARAMETERS) {
    int key_heads = heads / group;
    long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, row = at / d / key_heads, end = length;
    if (row >= rows) return;
    int i = at % d, h = at / d % key_heads;
    if (has_len) end = len[row / length];
    float of_q = 0.0f, of_k = 0.0f;
    if (row % length < end) {
        for (int one = h * group; one < (h + 1) * group; one++) {
            of_q = __fadd_rn(of_q, tq[(row * heads + one) * d + i]);
            of_k = __fadd_rn(of_k, tk[(row * heads + one) * d + i]);
        }
        of_q = __fmul_rn(of_q, scale);
    }
    dq[at] = narrow<Out>(of_q);
    dk[at] = narrow<Out>(of_k);
}

// A value head of a token: what its beta, its decays and its a_log get.
KERNEL(256, 4) gated_delta_rule_backward_heads(PARAMETERS) {
    DELTA;
    long long head = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, row = head / heads, end = length;
    if (row >= rows) return;
    int h = head % heads;
    if (has_len) end = len[row / length];
    if (row % length >= end) {
        dbeta[head] = 0.0f;
        da_log[head] = 0.0f;
        for (int i = 0; i < decays; i++) dg[head * decays + i] = 0.0f;
        return;
    }
    float of_beta[SEGMENTS], of_decay[SEGMENTS], of_rate[SEGMENTS];
    for (int segment = 0; segment < SEGMENTS; segment++) {
        int piece = static_cast<int>(segment_length(e));
        of_beta[segment] = 0.0f;
        for (int c = segment * piece; c < min((segment + 1) * piece, e); c++) {
            of_beta[segment] = __fmaf_rn(du[head * e + c], r[head * e + c], of_beta[segment]);
        }
        piece = static_cast<int>(segment_length(d));
        of_decay[segment] = 0.0f;
        for (int i = segment * piece; i < min((segment + 1) * piece, d); i++) {
            of_decay[segment] = __fadd_rn(of_decay[segment], tg[head * d + i]);
        }
    }
    dbeta[head] = narrow<fp32>(join_segments(of_beta));
    float of_head = join_segments(of_decay), rate = 0.0f;
    if (has_a_log) rate = -exponential(a_log[h]);
    int piece = static_cast<int>(segment_length(decays));
    for (int segment = 0; segment < SEGMENTS; segment++) {
        of_rate[segment] = 0.0f;
        for (int i = segment * piece; i < min((segment + 1) * piece, decays); i++) {
            float dl = of_head;
            if (decays == d) dl = tg[head * d + i];
            if (has_a_log) {
                float x = delta.x(head, h, i);
                of_rate[segment] = __fmaf_rn(dl, __fmul_rn(rate, softplus(x)), of_rate[segment]);
                dl = __fmul_rn(__fmul_rn(dl, rate), __fdiv_rn(1.0f, __fadd_rn(1.0f, exponential(-x))));
            }
            dg[head * decays + i] = narrow<fp32>(dl);
        }
    }
    da_log[head] = narrow<fp32>(join_segments(of_rate));
}
