// The softmax denominator of one row: logprob.rs. A block of 256 threads takes a row, each of its eight warps one of
// the eight segments; all threads return the result.
#pragma once
#include "reduce.cuh"

// sum * 2^n; the sum is +0 for a row without a finite element and NaN for a row with a NaN or +inf.
struct Denominator {
    float n, sum;
};

DEVICE float largest_of_warp(float v) {
#pragma unroll
    for (int h = 16; h >= 1; h /= 2) v = fmaxf(v, __shfl_xor_sync(WHOLE_WARP, v, h));
    return v;
}

// The largest of all threads' values; `room` holds 8 and is free when this returns.
DEVICE float largest_of_block(float v, SHARED_POINTER(float) room) {
    v = largest_of_warp(v);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
    __syncthreads();
    v = room[0];
#pragma unroll
    for (int warp = 1; warp < 8; warp++) v = fmaxf(v, room[warp]);
    __syncthreads();
    return v;
}

// The sum of eight segments, one from each warp.
DEVICE float join_warps(float segment, SHARED_POINTER(float) room) {
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = segment;
    __syncthreads();
    float parts[8];
#pragma unroll
    for (int warp = 0; warp < 8; warp++) parts[warp] = room[warp];
    __syncthreads();
    return join_segments(parts);
}

// Elements from..to of a row, the segment of this warp.
struct Segment {
    long long from, to;
};

DEVICE Segment segment_of_warp(long long count) {
    long long length = segment_length(count);
    long long from = min(count, (threadIdx.x / 32) * length);
    return Segment{from, min(count, from + length)};
}

// What weights of a row are measured by: its largest element and the exponent of that; `sum` is the one of a row without
// weights, which is `special`.
struct Reference {
    float top, n, sum;
    bool special;
};

DEVICE Reference reference(GLOBAL(const In) x, long long count, float scale, SHARED_POINTER(float) room) {
    bool aligned = aligned16(x);
    float largest = -INFINITE;
    bool invalid = false;
#pragma unroll 2
    for (long long at = threadIdx.x * 8; at < count; at += 8 * blockDim.x) {
        Eight v = load_up_to8<In>(x + at, count - at, aligned, -INFINITE);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            invalid |= !(v.v[j] < INFINITE);
            largest = fmaxf(largest, v.v[j]);
        }
    }
    invalid = __syncthreads_or(invalid);
    // Rounding a product by a positive scale grows with x, and so does the exponent of the product.
    float top = __fmul_rn(largest_of_block(largest, room), scale);
    float n = rintf(__fmul_rn(top, LOG2E_HI));
    if (invalid || top == INFINITE) return Reference{top, n, NOT_A_NUMBER, true};
    if (top == -INFINITE) return Reference{top, n, 0.0f, true};
    // A finite element beyond 2^127.5 overflows x * log2(e): inf - inf.
    return Reference{top, n, NOT_A_NUMBER, fabsf(n) == INFINITE};
}

// Two passes: the largest exponent, then the weights below it. For every row there is.
DEVICE Denominator denominator(GLOBAL(const In) x, long long count, float scale, SHARED_POINTER(float) room) {
    Reference r = reference(x, count, scale, room);
    if (r.special) return Denominator{r.n, r.sum};
    bool aligned = aligned16(x);
    Segment segment = segment_of_warp(count);
    Eight lanes = no_lanes();
    for (long long at = segment.from + threadIdx.x % 32 * 8; at < segment.to; at += 256) {
        Eight v = load_up_to8<In>(x + at, segment.to - at, aligned, -INFINITE);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            Split s = exp_split(__fmul_rn(v.v[j], scale), LOG2E_HI, LOG2E_LO);
            lanes.v[j] = __fadd_rn(lanes.v[j], weight(s.m, s.i, r.n));
        }
    }
    return Denominator{r.n, join_warps(fold_lanes(lanes), room)};
}

// The share of an element of the row, NaN where there is none.
DEVICE float share(float x, const Denominator &d) {
    if (d.sum != d.sum || d.sum == 0.0f) return NOT_A_NUMBER;
    Split s = exp_split(x, LOG2E_HI, LOG2E_LO);
    return __fdiv_rn(weight(s.m, s.i, d.n), d.sum);
}

DEVICE float lse_of(const Denominator &d) {
    if (d.sum == 0.0f) return -INFINITE;
    if (d.sum != d.sum) return NOT_A_NUMBER;
    return log_sum(d.n, d.sum);
}
