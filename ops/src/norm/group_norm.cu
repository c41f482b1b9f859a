// Group normalisation: x[B,C,P], w[C]?, bias[C]? -> y[B,C,P]: group_norm.rs. A block takes a group of an image: lanes(x), then
// lanes(d*d) of d = x - mean, each lane a chain of fma; then every element by itself.
#include "group.cuh"

KERNEL(256, 4)
group_norm(GLOBAL(const In) x, GLOBAL(const In) w, int has_w, GLOBAL(const In) bias, int has_bias, GLOBAL(Out) y,
           long long places, int channels, int groups, float eps, int silu) {
    SHARED(float, room, LANES);
    long long n = places * channels, first = static_cast<long long>(blockIdx.x % groups) * channels;
    x = x + blockIdx.x * n;
    y = y + blockIdx.x * n;
    Moments group = moments(x, n, eps, room);
    // What is left out changes nothing.
    PerChannel weights{w, has_w, 1.0f}, offsets{bias, has_bias, -0.0f};
    for (long long i = threadIdx.x; i < n; i += LANES) {
        long long channel = first + i / places;
        float h = __fmul_rn(__fsub_rn(widen(static_cast<In>(x[i])), group.mean), group.r);
        float z = __fadd_rn(__fmul_rn(h, weights.of(channel)), offsets.of(channel));
        y[i] = narrow<Out>(silu ? __fmul_rn(z, sigmoid(z)) : z);
    }
}
