// Index of the largest element: x[R,N] -> index[R]: argmax.rs. A block takes a row. The lowest index among equals wins,
// and a NaN is larger than every number, so the order in which threads meet cannot be seen.
#include "lane_sum.cuh"

// Values in their order as unsigned integers: -0 and +0 are one, a NaN is above all.
DEVICE unsigned rank_of(float v) {
    if (v != v) return 0xFFFFFFFFu;
    unsigned bits = __float_as_uint(__fadd_rn(v, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The better of two candidates: the larger rank, then the lower index.
DEVICE void take_better(unsigned &rank, unsigned &index, unsigned other_rank, unsigned other_index) {
    if (other_rank > rank || (other_rank == rank && other_index < index)) {
        rank = other_rank;
        index = other_index;
    }
}

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
#pragma unroll
    for (int h = 16; h >= 1; h /= 2) {
        unsigned rank = __shfl_xor_sync(WHOLE_WARP, best, h);
        unsigned other = __shfl_xor_sync(WHOLE_WARP, best_index, h);
        take_better(best, best_index, rank, other);
    }
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
