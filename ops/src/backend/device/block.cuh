// The `lanes` sum of a block, thread t of which has lane t: reduce.rs.
#pragma once
#include "reduce.cuh"

// for h in 128, 64, .., 1: lane[l] = lane[l] + lane[l + h]. All threads return the sum of lane 0.
DEVICE float fold_block(float lane, SHARED_POINTER(float) room) {
    room[threadIdx.x] = lane;
    __syncthreads();
    for (int h = LANES / 2; h >= 1; h /= 2) {
        if (threadIdx.x < h) room[threadIdx.x] = __fadd_rn(room[threadIdx.x], room[threadIdx.x + h]);
        __syncthreads();
    }
    float sum = room[0];
    __syncthreads();
    return sum;
}
