// Gradient of the weighted sum of expert outputs: x[R,N], row[T,K], weight[T,K], dy[T,N] -> dx[R,N], dweight[T,K]:
// combine_backward.rs. A warp takes a choice of a token: weight*dy, and lanes(dy*x) of chains of fma, in one go.
#include "reduce.cuh"

// +0 in rows that are not named, before the others are written: eight elements a thread.
KERNEL(128, 8) combine_backward_clear(GLOBAL(Out) dx, long long len) {
    long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (at < len) store_up_to8<Out>(dx + at, len - at, aligned16(dx), no_lanes());
}

KERNEL(128, 8)
combine_backward(GLOBAL(const In) x, GLOBAL(const int) row, GLOBAL(const float) weight, GLOBAL(const In) dy,
                 GLOBAL(Out) dx, GLOBAL(float) dweight, long long count, int chosen, long long n) {
    long long first = threadIdx.x % 32 * 8;
    long long choice = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (choice >= count) return;
    long long from = static_cast<long long>(row[choice]) * n;
    float w = weight[choice];
    x = x + from;
    dx = dx + from;
    dy = dy + choice / chosen * n;
    bool aligned = aligned16(x) && aligned16(dy), aligned_out = aligned16(dx);
    Eight lanes = no_lanes();
#pragma unroll 4
    for (long long at = first; at < n; at += 256) {
        // The pad's product -0 leaves every lane as it is, one that is -0 too.
        Eight v = load_up_to8<In>(x + at, n - at, aligned, 0.0f);
        Eight g = load_up_to8<In>(dy + at, n - at, aligned, -0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            lanes.v[j] = __fmaf_rn(g.v[j], v.v[j], lanes.v[j]);
            g.v[j] = __fmul_rn(w, g.v[j]);
        }
        store_up_to8<Out>(dx + at, n - at, aligned_out, g);
    }
    float sum = fold_lanes(lanes);
    if (threadIdx.x % 32 == 0) dweight[choice] = narrow<fp32>(sum);
}
