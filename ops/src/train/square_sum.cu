// Sums of squares of rows: x[R,N] -> sum[R]: square_sum.rs. A warp takes a row: lanes(x*x), each lane a chain of fma.
#include "reduce.cuh"

KERNEL(128, 8) square_sum(GLOBAL(const float) x, GLOBAL(float) sum, long long rows, long long n) {
    long long first = threadIdx.x % 32 * 8;
    long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    x = x + row * n;
    bool aligned = aligned16(x);
    Eight lanes = no_lanes();
#pragma unroll 4
    for (long long at = first; at < n; at += 256) add_squares(lanes, load_up_to8<float>(x + at, n - at, aligned, 0.0f));
    float total = fold_lanes(lanes);
    if (threadIdx.x % 32 == 0) sum[row] = narrow<fp32>(total);
}
