// What group_norm and its gradient share: group.rs. A block takes a group, thread t lane t of its sums.
#pragma once
#include "block.cuh"

struct Moments {
    float mean, r;
};

// Of the n elements at x.
DEVICE Moments moments(GLOBAL(const In) x, long long n, float eps, SHARED_POINTER(float) room) {
    float lane = 0.0f, count = static_cast<float>(n);
    for (long long i = threadIdx.x; i < n; i += LANES) lane = __fadd_rn(lane, widen(static_cast<In>(x[i])));
    float mean = __fdiv_rn(fold_block(lane, room), count);
    lane = 0.0f;
    for (long long i = threadIdx.x; i < n; i += LANES) {
        float d = __fsub_rn(widen(static_cast<In>(x[i])), mean);
        lane = __fmaf_rn(d, d, lane);
    }
    float variance = __fdiv_rn(fold_block(lane, room), count);
    return Moments{mean, __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, eps)))};
}

// A number for each channel of an image, or for none.
struct PerChannel {
    GLOBAL(const In) values;
    int given;
    float otherwise;

    DEVICE float of(long long channel) const { return given ? widen(static_cast<In>(values[channel])) : otherwise; }
};
