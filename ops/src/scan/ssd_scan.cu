// The scan of Mamba-2: ssd_scan.rs. A block takes a head of a sequence and eight rows of its state, a warp a row: thread t has
// the elements of the lanes 8t to 8t + 7, the first 256 of them in registers and others in `next`. Of every 32 positions each
// thread makes one step in time for all of them.
#include "ssd.cuh"

KERNEL(256, 3)
ssd_scan(GLOBAL(const In) x, GLOBAL(const In) dt, GLOBAL(const In) a_log, GLOBAL(const In) b, GLOBAL(const In) c,
         GLOBAL(const In) d, int has_d, GLOBAL(const In) dt_bias, int has_bias, GLOBAL(const float) state, int has_state,
         GLOBAL(const int) len, int has_len, long long length, int heads, int head_dim, int groups, int state_dim,
         float dt_min, float dt_max, GLOBAL(Out) y, REREAD(float) next) {
    long long unit = blockIdx.x, batch = unit / heads;
    int head = static_cast<int>(unit % heads), group = head / (heads / groups), lane = threadIdx.x % 32;
    int p = static_cast<int>(blockIdx.y) * 8 + static_cast<int>(threadIdx.x / 32);
    if (p >= head_dim) return;
    long long end = length;
    if (has_len) end = len[batch];
    float a = decay_rate(widen(static_cast<In>(a_log[head])));
    float through = 0.0f, bias = 0.0f;
    if (has_d) through = widen(static_cast<In>(d[head]));
    if (has_bias) bias = widen(static_cast<In>(dt_bias[head]));
    long long row = (unit * head_dim + p) * state_dim;
    Eight own = no_lanes();
    for (int at = lane * 8; at < state_dim; at += 256) {
        for (int j = 0; j < 8 && at + j < state_dim; j++) {
            float s = 0.0f;
            if (has_state) s = state[row + at + j];
            next[row + at + j] = narrow<fp32>(s);
            if (at < 256) own.v[j] = s;
        }
    }
    Step mine{0.0f, 0.0f, 0.0f, false};
    for (long long t = 0; t < length; t++) {
        long long place = (batch * length + t) * heads + head;
        if (t >= end) {
            if (lane == 0) y[place * head_dim + p] = narrow<Out>(0.0f);
            continue;
        }
        if (t % 32 == 0 && t + lane < end) {
            float v = widen(static_cast<In>(dt[place + static_cast<long long>(lane) * heads]));
            if (has_bias) v = __fadd_rn(v, bias);
            mine = step_of(v, a, dt_min, dt_max);
        }
        float e = __shfl_sync(WHOLE_WARP, mine.e, static_cast<int>(t % 32));
        float k = __shfl_sync(WHOLE_WARP, mine.k, static_cast<int>(t % 32));
        float value = widen(static_cast<In>(x[place * head_dim + p])), u = __fmul_rn(e, value);
        long long from = ((batch * length + t) * groups + group) * state_dim;
        Eight lanes = no_lanes();
        for (int at = lane * 8; at < state_dim; at += 256) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (at + j >= state_dim) continue;
                float s = own.v[j];
                if (at >= 256) s = next[row + at + j];
                s = __fmaf_rn(k, s, __fmul_rn(u, widen(static_cast<In>(b[from + at + j]))));
                if (at >= 256) {
                    next[row + at + j] = narrow<fp32>(s);
                } else {
                    own.v[j] = s;
                }
                lanes.v[j] = __fmaf_rn(s, widen(static_cast<In>(c[from + at + j])), lanes.v[j]);
            }
        }
        float sum = fold_lanes(lanes);
        if (has_d) sum = __fmaf_rn(through, value, sum);
        if (lane == 0) y[place * head_dim + p] = narrow<Out>(sum);
    }
    for (int j = 0; j < 8 && lane * 8 + j < state_dim; j++) next[row + lane * 8 + j] = narrow<fp32>(own.v[j]);
}
