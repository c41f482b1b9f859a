// Gradient of normalised and rotated heads: x[T,H,D], w[D], dy[T,H,D] -> dx[T,H,D]: norm_rope_backward.rs. A warp takes a
// head: dy turned back in f32 is the gradient of rms_norm_backward, one last rounding.
#include "scale.cuh"
#include "turned.cuh"

// Gradients times weights of eight elements from `at`; -0 behind the head's end.
DEVICE Eight weigh(const Turned &turned, const Eight &weights, int at, int dim, float offset) {
    Eight g;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float dy = at + j < dim ? turned.of(at + j) : -0.0f;
        g.v[j] = __fmul_rn(dy, __fadd_rn(weights.v[j], offset));
    }
    return g;
}

KERNEL(128, 8)
norm_rope_backward(GLOBAL(const In) x, GLOBAL(const In) w, GLOBAL(const In) dy, GLOBAL(const float) cosines,
                   GLOBAL(const float) sines, GLOBAL(Out) dx, long long all_heads, int heads, int dim, float eps,
                   int weight_offset, int interleaved) {
    int first = threadIdx.x % 32 * 8;
    long long head = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= all_heads) return;
    x = x + head * dim;
    dx = dx + head * dim;
    int half = dim / 2;
    long long angles = head / heads * half;
    Turned turned{dy + head * dim, cosines + angles, sines + angles, half, interleaved};
    bool aligned = aligned16(x) && aligned16(w), aligned_out = aligned16(dx);
    Eight lanes = no_lanes();
    for (int at = first; at < dim; at += 256) add_squares(lanes, load_up_to8<In>(x + at, dim - at, aligned, 0.0f));
    Scale scale = scale_of(fold_lanes(lanes), dim, eps, 0, weight_offset);
    lanes = no_lanes();
    for (int at = first; at < dim; at += 256) {
        // The pad's product -0 leaves every lane as it is, one that is -0 too.
        Eight v = load_up_to8<In>(x + at, dim - at, aligned, 0.0f);
        Eight g = weigh(turned, load_up_to8<In>(w + at, dim - at, aligned, 0.0f), at, dim, scale.offset);
#pragma unroll
        for (int j = 0; j < 8; j++) lanes.v[j] = __fmaf_rn(g.v[j], v.v[j], lanes.v[j]);
    }
    float r = scale.r;
    float c = __fdiv_rn(fold_lanes(lanes), static_cast<float>(dim));
    float factor = -__fmul_rn(__fmul_rn(c, r), r);
    for (int at = first; at < dim; at += 256) {
        Eight v = load_up_to8<In>(x + at, dim - at, aligned, 0.0f);
        Eight g = weigh(turned, load_up_to8<In>(w + at, dim - at, aligned, 0.0f), at, dim, scale.offset);
#pragma unroll
        for (int j = 0; j < 8; j++) v.v[j] = __fmul_rn(r, __fmaf_rn(factor, v.v[j], g.v[j]));
        store_up_to8<Out>(dx + at, dim - at, aligned_out, v);
    }
}
