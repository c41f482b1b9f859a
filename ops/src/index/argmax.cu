// Index of the largest element: x[R,N] -> index[R]: argmax.rs. A block takes a row.
#include "rank.cuh"

KERNEL(256, 4) argmax(GLOBAL(const In) x, GLOBAL(int) index, long long n) {
    SHARED(unsigned, ranks, 8);
    SHARED(unsigned, indices, 8);
    GLOBAL(const In) row = x + static_cast<long long>(blockIdx.x) * n;
    bool aligned = aligned16(row);
    unsigned best = 0, best_index = 0xFFFFFFFFu;
    for (long long at = threadIdx.x * 8; at < n; at += 8 * blockDim.x) {
        Eight eight = load_up_to8<In>(row + at, n - at, aligned, 0.0f);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (at + i < n) take_better(best, best_index, rank_of(eight.v[i]), static_cast<unsigned>(at + i));
        }
    }
    best_of_warp(best, best_index);
    if (threadIdx.x % 32 == 0) {
        ranks[threadIdx.x / 32] = best;
        indices[threadIdx.x / 32] = best_index;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < 8; warp++) take_better(best, best_index, ranks[warp], indices[warp]);
        index[blockIdx.x] = static_cast<int>(best_index);
    }
}
