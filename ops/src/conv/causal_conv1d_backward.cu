// Gradient of a causal convolution: dy[B,T,C], w[C,K], dnext[B,J,C]?, len[B]? -> dx[B,T,C], dstate[B,J,C]:
// causal_conv1d_backward.rs. A block row is a row of dx or, behind those of its sequence, of dstate; a thread takes a channel.
#include "element.cuh"

KERNEL(256, 4)
causal_conv1d_backward(GLOBAL(const In) dy, GLOBAL(const In) w, GLOBAL(const float) dnext, int has_dnext,
                       GLOBAL(const int) len, int has_len, GLOBAL(Out) dx, GLOBAL(float) dstate, long long length,
                       int channels, int taps) {
    int channel = blockIdx.y * blockDim.x + threadIdx.x, before = taps - 1;
    if (channel >= channels) return;
    long long b = blockIdx.x / (length + before), at = blockIdx.x % (length + before), end = length;
    if (has_len) end = len[b];
    // Rows count from the first of the state on.
    long long row = at < length ? before + at : at - length;
    if (row >= before + end) {
        dx[(b * length + at) * channels + channel] = narrow<Out>(0.0f);
        return;
    }
    float sum = 0.0f;
    for (int i = 0; i < taps; i++) {
        long long from = row - before + i;
        float gradient = 0.0f;
        if (from >= 0 && from < end) gradient = widen(static_cast<In>(dy[(b * length + from) * channels + channel]));
        float tap = widen(static_cast<In>(w[static_cast<long long>(channel) * taps + taps - 1 - i]));
        sum = __fmaf_rn(tap, gradient, sum);
    }
    // The rows that next has copied.
    if (has_dnext && row >= end) sum = __fadd_rn(sum, dnext[(b * before + row - end) * channels + channel]);
    if (at < length) {
        dx[(b * length + at) * channels + channel] = narrow<Out>(sum);
    } else {
        dstate[(b * before + at - length) * channels + channel] = narrow<fp32>(sum);
    }
}
