// The scan of Mamba: selective_scan.rs. A block takes 128 channels of a sequence, a thread one: the first 16 elements of its state
// and their rates in registers, others in `next`.
#include "selective.cuh"

#define HELD 16

KERNEL(128, 4)
selective_scan(GLOBAL(const In) x, GLOBAL(const In) dt, GLOBAL(const In) a_log, GLOBAL(const In) b, GLOBAL(const In) c,
               GLOBAL(const In) d, int has_d, GLOBAL(const In) dt_bias, int has_bias, GLOBAL(const float) state,
               int has_state, GLOBAL(const int) len, int has_len, long long length, int channels, int state_dim,
               GLOBAL(Out) y, REREAD(float) next) {
    Selective scan{x, dt, a_log, b, c, d, has_d, dt_bias, has_bias, state, has_state, len, has_len, length, channels, state_dim};
    long long batch = blockIdx.x;
    int channel = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
    if (channel >= channels) return;
    long long row = scan.of_state(batch, channel), end = scan.end(batch);
    float through = 0.0f, own[HELD], rates[HELD];
    if (has_d) through = widen(static_cast<In>(d[channel]));
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        own[n] = n < state_dim ? scan.begun(row + n) : 0.0f;
        rates[n] = n < state_dim ? scan.rate(channel, n) : 0.0f;
    }
    for (int n = HELD; n < state_dim; n++) next[row + n] = narrow<fp32>(scan.begun(row + n));
    for (long long t = 0; t < length; t++) {
        long long place = scan.place(batch, t, channel), from = scan.shared(batch, t);
        if (t >= end) {
            y[place] = narrow<Out>(0.0f);
            continue;
        }
        float e = softplus(scan.before_softplus(place, channel)), value = widen(static_cast<In>(x[place]));
        float u = __fmul_rn(e, value), sum = 0.0f;
        auto step = [&](int n, float rate, float s) {
            float entered = __fmul_rn(u, widen(static_cast<In>(b[from + n])));
            s = __fmaf_rn(exponential(__fmul_rn(e, rate)), s, entered);
            sum = __fmaf_rn(s, widen(static_cast<In>(c[from + n])), sum);
            return s;
        };
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            if (n < state_dim) own[n] = step(n, rates[n], own[n]);
        }
        for (int n = HELD; n < state_dim; n++) next[row + n] = narrow<fp32>(step(n, scan.rate(channel, n), next[row + n]));
        if (has_d) sum = __fmaf_rn(through, value, sum);
        y[place] = narrow<Out>(sum);
    }
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        if (n < state_dim) next[row + n] = narrow<fp32>(own[n]);
    }
}
