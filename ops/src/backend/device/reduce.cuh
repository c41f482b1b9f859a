// The `lanes` sum: lane_sum.rs. A warp holds the 256 lanes, thread t those from 8t to 8t + 7, so that eight elements
// that stand side by side go to one thread.
#pragma once
#include "math.cuh"

#define WHOLE_WARP 0xFFFFFFFFu

// What the kernels count on: eight lanes to a thread of a warp, and a segment to each of eight warps.
static_assert(LANES == 8 * 32 && SEGMENTS == 8, "the kernels are written for another profile");

// for h in 128, 64, .., 1: lane[l] = lane[l] + lane[l + h]. The sum is that of thread 0; all threads return it.
DEVICE float fold_lanes(Eight lanes) {
#pragma unroll
    for (int h = 16; h >= 1; h /= 2) {
#pragma unroll
        for (int j = 0; j < 8; j++) lanes.v[j] = __fadd_rn(lanes.v[j], __shfl_down_sync(WHOLE_WARP, lanes.v[j], h));
    }
#pragma unroll
    for (int h = 4; h >= 1; h /= 2) {
#pragma unroll
        for (int j = 0; j < h; j++) lanes.v[j] = __fadd_rn(lanes.v[j], lanes.v[j + h]);
    }
    return __shfl_sync(WHOLE_WARP, lanes.v[0], 0);
}

DEVICE Eight no_lanes() {
    Eight lanes;
#pragma unroll
    for (int j = 0; j < 8; j++) lanes.v[j] = 0.0f;
    return lanes;
}

DEVICE void add_squares(Eight &lanes, const Eight &x) {
#pragma unroll
    for (int j = 0; j < 8; j++) lanes.v[j] = __fmaf_rn(x.v[j], x.v[j], lanes.v[j]);
}

// The sum of the eight segments of a row.
DEVICE float join_segments(const float *s) {
    return __fadd_rn(__fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3])),
                     __fadd_rn(__fadd_rn(s[4], s[5]), __fadd_rn(s[6], s[7])));
}

// Elements per segment of a sum of n.
DEVICE long long segment_length(long long n) {
    return SEGMENT_STEP * ((n + (SEGMENT_STEP * SEGMENTS - 1)) / (SEGMENT_STEP * SEGMENTS));
}
