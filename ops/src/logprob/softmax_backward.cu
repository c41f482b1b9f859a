// Gradient of softmax: x[R,N], dy[R,N] -> dx[R,N]: softmax_backward.rs. A block takes a row, each of its eight warps one of
// the eight segments of both sums.
#include "denominator.cuh"

KERNEL(256, 4) softmax_backward(GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(Out) dx, long long n) {
    SHARED(float, room, 8);
    x = x + static_cast<long long>(blockIdx.x) * n;
    dy = dy + static_cast<long long>(blockIdx.x) * n;
    dx = dx + static_cast<long long>(blockIdx.x) * n;
    Denominator d = denominator(x, n, 1.0f, room);
    bool aligned = aligned16(x) && aligned16(dy), aligned_out = aligned16(dx);

    Segment segment = segment_of_warp(n);
    Eight lanes = no_lanes();
    for (long long at = segment.from + threadIdx.x % 32 * 8; at < segment.to; at += 256) {
        // What stands behind the end has no weight, and its product is -0: a lane stays as it is.
        Eight v = load_up_to8<In>(x + at, segment.to - at, aligned, -INFINITE);
        Eight g = load_up_to8<In>(dy + at, segment.to - at, aligned, -0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) lanes.v[j] = __fmaf_rn(share(v.v[j], d), g.v[j], lanes.v[j]);
    }
    float sum = join_warps(fold_lanes(lanes), room);

    for (long long at = threadIdx.x * 8; at < n; at += 8 * blockDim.x) {
        Eight v = load_up_to8<In>(x + at, n - at, aligned, -INFINITE);
        Eight g = load_up_to8<In>(dy + at, n - at, aligned, 0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) v.v[j] = __fmul_rn(share(v.v[j], d), __fsub_rn(g.v[j], sum));
        store_up_to8<Out>(dx + at, n - at, aligned_out, v);
    }
}
