// Gradient of the weight of a causal convolution: x[B,T,C], dy[B,T,C], state[B,J,C]?, mask[B,T]?, carry[64,C,K] -> dw[64,C,K]:
// causal_conv1d_dw.rs. A block takes a chain and up to 2048 taps of all channels, a thread eight of them.
#include "taps.cuh"
#include "tokens.cuh"

KERNEL(256, 4)
causal_conv1d_dw(GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(const float) state, int has_state,
                 GLOBAL(const int) mask, int has_mask, GLOBAL(const float) carry, int has_carry, GLOBAL(float) dw,
                 long long tokens, long long length, int channels, int taps, int start) {
    int chain = blockIdx.x;
    long long n = static_cast<long long>(channels) * taps;
    long long at = (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x) * 8, count = n - at;
    Eight sums = carried(carry, has_carry, chain * n + at, count);
    Behind rows{state, has_state, x, taps - 1, length, channels};
    each_row(Tokens{mask, has_mask, tokens, 1, start}, chain, [&](long long token) {
        long long b = token / length, t = token % length;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i >= count) continue;
            int channel = static_cast<int>((at + i) / taps), j = static_cast<int>((at + i) % taps);
            float gradient = widen(static_cast<In>(dy[token * channels + channel]));
            sums.v[i] = __fmaf_rn(gradient, rows.at(b, t + j, channel), sums.v[i]);
        }
    });
    GLOBAL(float) to = dw + chain * n + at;
    if (count > 0) store_up_to8<float>(to, count, aligned16(to), sums);
}
