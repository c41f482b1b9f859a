// Weights of tokens as integers: sampling/weights.rs. Their sums have no order that could be seen.
#pragma once
#include "denominator.cuh"
#include "rank.cuh"

typedef unsigned long long Weight;

// The weight of a token whose scaled logit is z; `one` is that of the likeliest.
DEVICE Weight weight_of(float z, float top, float one) {
    return static_cast<Weight>(__fmul_rn(exponential(__fsub_rn(z, top)), one));
}

// The part of `total` that 53 bits of a number below 1 stand for.
DEVICE Weight share_of(Weight bits, Weight total) { return __umul64hi(bits, total) << 11 | bits * total >> 53; }

// The sum of all threads' numbers; `room` holds 16 and is free when this returns.
DEVICE Weight sum_of_block(Weight v, SHARED_POINTER(unsigned) room) {
#pragma unroll
    for (int h = 16; h >= 1; h /= 2) {
        unsigned low = __shfl_xor_sync(WHOLE_WARP, static_cast<unsigned>(v), h);
        unsigned high = __shfl_xor_sync(WHOLE_WARP, static_cast<unsigned>(v >> 32), h);
        v += static_cast<Weight>(high) << 32 | low;
    }
    if (threadIdx.x % 32 == 0) {
        room[threadIdx.x / 32] = static_cast<unsigned>(v);
        room[8 + threadIdx.x / 32] = static_cast<unsigned>(v >> 32);
    }
    __syncthreads();
    v = 0;
#pragma unroll
    for (int warp = 0; warp < 8; warp++) {
        unsigned low = room[warp], high = room[8 + warp];
        v += static_cast<Weight>(high) << 32 | low;
    }
    __syncthreads();
    return v;
}

// The largest of a row; NaN where it holds a NaN or +inf, -inf where it holds nothing else. For all threads of the block.
template <class Z> DEVICE float largest_of_row(const Z &z_at, int n, SHARED_POINTER(float) room) {
    float largest = -INFINITE;
    bool invalid = false;
    for (int i = threadIdx.x; i < n; i += 256) {
        float z = z_at(i);
        invalid |= !(z < INFINITE);
        largest = fmaxf(largest, z);
    }
    invalid = __syncthreads_or(invalid) != 0;
    largest = largest_of_block(largest, room);
    return invalid ? NOT_A_NUMBER : largest;
}
