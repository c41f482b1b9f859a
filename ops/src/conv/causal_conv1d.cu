// Causal convolution of each channel by itself: x[B,T,C], w[C,K], bias[C]?, state[B,J,C]?, len[B]? -> y[B,T,C], next[B,J,C]:
// causal_conv1d.rs. A block row is a row of y or, behind those of its sequence, of next; a thread takes a channel.
#include "taps.cuh"

KERNEL(256, 4)
causal_conv1d(GLOBAL(const In) x, GLOBAL(const In) w, GLOBAL(const In) bias, int has_bias, GLOBAL(const float) state,
              int has_state, GLOBAL(const int) len, int has_len, GLOBAL(Out) y, GLOBAL(float) next, long long length,
              int channels, int taps) {
    int channel = blockIdx.y * blockDim.x + threadIdx.x, before = taps - 1;
    if (channel >= channels) return;
    long long b = blockIdx.x / (length + before), row = blockIdx.x % (length + before), end = length;
    if (has_len) end = len[b];
    Behind rows{state, has_state, x, before, length, channels};
    if (row >= length) {
        long long i = row - length;
        next[(b * before + i) * channels + channel] = narrow<fp32>(rows.at(b, end + i, channel));
        return;
    }
    GLOBAL(Out) to = y + (b * length + row) * channels + channel;
    if (row >= end) {
        to[0] = narrow<Out>(0.0f);
        return;
    }
    float sum = 0.0f;
    for (int j = 0; j < taps; j++) {
        float tap = widen(static_cast<In>(w[static_cast<long long>(channel) * taps + j]));
        sum = __fmaf_rn(tap, rows.at(b, row + j, channel), sum);
    }
    if (has_bias) sum = __fadd_rn(sum, widen(static_cast<In>(bias[channel])));
    to[0] = narrow<Out>(sum);
}
