// Gradient of root mean square normalisation: x[R,N], w[N], dy[R,N], dsum[R,N]? -> dx[R,N]: rms_norm_backward.rs. A warp
// takes a row: lanes(x*x), then lanes(g*x) of g = dy*w', each lane a chain of fma; then every element by itself.
#include "scale.cuh"

KERNEL(128, 8)
rms_norm_backward(GLOBAL(const In) x, GLOBAL(const In) w, GLOBAL(const In) dy, GLOBAL(const In) dsum, int has_dsum,
                  GLOBAL(Out) dx, long long rows, long long n, float eps, int weight_offset) {
    long long first = threadIdx.x % 32 * 8;
    long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    x = x + row * n;
    dy = dy + row * n;
    if (has_dsum) dsum = dsum + row * n;
    dx = dx + row * n;
    bool aligned = aligned16(x) && aligned16(w) && aligned16(dy) && (!has_dsum || aligned16(dsum));
    bool aligned_out = aligned16(dx);
    Eight lanes = no_lanes();
#pragma unroll 4
    for (long long at = first; at < n; at += 256) add_squares(lanes, load_up_to8<In>(x + at, n - at, aligned, 0.0f));
    Scale scale = scale_of(fold_lanes(lanes), n, eps, 0, weight_offset);
    lanes = no_lanes();
#pragma unroll 2
    for (long long at = first; at < n; at += 256) {
        // The pad's product -0 leaves every lane as it is, one that is -0 too.
        Eight v = load_up_to8<In>(x + at, n - at, aligned, 0.0f);
        Eight weights = load_up_to8<In>(w + at, n - at, aligned, 0.0f);
        Eight g = load_up_to8<In>(dy + at, n - at, aligned, -0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float weighed = __fmul_rn(g.v[j], __fadd_rn(weights.v[j], scale.offset));
            lanes.v[j] = __fmaf_rn(weighed, v.v[j], lanes.v[j]);
        }
    }
    float r = scale.r;
    float c = __fdiv_rn(fold_lanes(lanes), static_cast<float>(n));
    float factor = -__fmul_rn(__fmul_rn(c, r), r);
#pragma unroll 2
    for (long long at = first; at < n; at += 256) {
        Eight v = load_up_to8<In>(x + at, n - at, aligned, 0.0f);
        Eight weights = load_up_to8<In>(w + at, n - at, aligned, 0.0f);
        Eight g = load_up_to8<In>(dy + at, n - at, aligned, 0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float weighed = __fmul_rn(g.v[j], __fadd_rn(weights.v[j], scale.offset));
            v.v[j] = __fmul_rn(r, __fmaf_rn(factor, v.v[j], weighed));
        }
        if (has_dsum) {
            Eight more = load_up_to8<In>(dsum + at, n - at, aligned, 0.0f);
#pragma unroll
            for (int j = 0; j < 8; j++) v.v[j] = __fadd_rn(v.v[j], more.v[j]);
        }
        store_up_to8<Out>(dx + at, n - at, aligned_out, v);
    }
}
