// Mean and scale of a row, in layer_norm and its gradient: layer_norm.rs.
#pragma once
#include "reduce.cuh"

// The next eight elements of a lane sum, the first `count` of which there are: lane + x, and lane + (x - mean)^2, fused.
DEVICE void add_elements(Eight &lanes, const Eight &x, long long count) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (j < count) lanes.v[j] = __fadd_rn(lanes.v[j], x.v[j]);
    }
}
DEVICE void add_deviations(Eight &lanes, const Eight &x, float mean, long long count) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float d = __fsub_rn(x.v[j], mean);
        if (j < count) lanes.v[j] = __fmaf_rn(d, d, lanes.v[j]);
    }
}

DEVICE float mean_of(const Eight &lanes, long long n) { return __fdiv_rn(fold_lanes(lanes), static_cast<float>(n)); }
DEVICE float root_of(const Eight &lanes, long long n, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean_of(lanes, n), eps)));
}
