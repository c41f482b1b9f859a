// Which of some values is the largest: argmax.rs and route.rs. The lowest index among equals wins, and a NaN is larger
// than every number, so the order in which threads meet cannot be seen.
#pragma once
#include "reduce.cuh"

// Values in their order as unsigned integers above 0: -0 and +0 are one, a NaN is above all.
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

// The best candidate of a warp, for all its threads.
DEVICE void best_of_warp(unsigned &rank, unsigned &index) {
#pragma unroll
    for (int h = 16; h >= 1; h /= 2) {
        unsigned other_rank = __shfl_xor_sync(WHOLE_WARP, rank, h);
        unsigned other_index = __shfl_xor_sync(WHOLE_WARP, index, h);
        take_better(rank, index, other_rank, other_index);
    }
}
