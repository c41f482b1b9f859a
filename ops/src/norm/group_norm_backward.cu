// Gradients of group normalisation: x[B,C,P], w[C]?, bias[C]?, dy[B,C,P] -> dx[B,C,P], dw[B,C], dbias[B,C]:
// group_norm_backward.rs. A block takes a group: mean and scale as in group_norm; then of each channel lanes(dz) and
// lanes(dz*h), and of these times w the two chains of the group; then every element by itself.
#include "group.cuh"

struct Element {
    float h, dz;
};

struct Reader {
    GLOBAL(const In) x;
    GLOBAL(const In) dy;
    Moments group;
    int silu;

    DEVICE Element at(long long i, float w, float bias) const {
        float h = __fmul_rn(__fsub_rn(widen(static_cast<In>(x[i])), group.mean), group.r);
        float dz = widen(static_cast<In>(dy[i]));
        if (silu) {
            float z = __fadd_rn(__fmul_rn(h, w), bias), share = sigmoid(z);
            dz = __fmul_rn(dz, __fmul_rn(share, __fmaf_rn(z, __fsub_rn(1.0f, share), 1.0f)));
        }
        return Element{h, dz};
    }
};

KERNEL(256, 4)
group_norm_backward(GLOBAL(const In) x, GLOBAL(const In) w, int has_w, GLOBAL(const In) bias, int has_bias,
                    GLOBAL(const In) dy, GLOBAL(Out) dx, GLOBAL(float) dw, GLOBAL(float) dbias, long long places,
                    int channels, int groups, float eps, int silu) {
    SHARED(float, room, LANES);
    long long n = places * channels, first = static_cast<long long>(blockIdx.x % groups) * channels;
    long long of_image = static_cast<long long>(blockIdx.x) * channels;
    x = x + blockIdx.x * n;
    dy = dy + blockIdx.x * n;
    dx = dx + blockIdx.x * n;
    PerChannel weights{w, has_w, 1.0f}, offsets{bias, has_bias, -0.0f};
    Reader read{x, dy, moments(x, n, eps, room), silu};
    float a = 0.0f, b = 0.0f;
    for (int channel = 0; channel < channels; channel++) {
        float weight = weights.of(first + channel), offset = offsets.of(first + channel);
        float products = 0.0f, sums = 0.0f;
        for (long long i = threadIdx.x; i < places; i += LANES) {
            Element e = read.at(channel * places + i, weight, offset);
            products = __fmaf_rn(e.dz, e.h, products);
            sums = __fadd_rn(sums, e.dz);
        }
        float of_w = fold_block(products, room), of_bias = fold_block(sums, room);
        b = __fmaf_rn(weight, of_w, b);
        a = __fmaf_rn(weight, of_bias, a);
        if (threadIdx.x == 0) {
            dw[of_image + channel] = narrow<fp32>(of_w);
            dbias[of_image + channel] = narrow<fp32>(of_bias);
        }
    }
    a = __fdiv_rn(a, static_cast<float>(n));
    b = __fdiv_rn(b, static_cast<float>(n));
    for (long long i = threadIdx.x; i < n; i += LANES) {
        long long channel = first + i / places;
        float weight = weights.of(channel);
        Element e = read.at(i, weight, offsets.of(channel));
        dx[i] = narrow<Out>(__fmul_rn(read.group.r, __fmaf_rn(-b, e.h, __fsub_rn(__fmul_rn(e.dz, weight), a))));
    }
}
