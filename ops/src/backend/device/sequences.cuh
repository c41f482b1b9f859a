// Losses that have a value for each token: train/sequences.rs. A block of 256 threads takes a sequence, 256 tokens at a time;
// a thread is a lane of the sum.
#pragma once
#include "reduce.cuh"

// Value and slope of a token.
struct TokenLoss {
    float value, slope;
};

// The sum over 256 threads of ones, for all of them; `before` gets that of the threads before this one. `counts` holds eight.
DEVICE int count_of_block(bool one, SHARED_POINTER(int) counts, int &before) {
    unsigned ones = __ballot_sync(WHOLE_WARP, one);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = 0;
    if (lane == 0) counts[warp] = __popc(ones);
    __syncthreads();
    before = __popc(ones & ((1u << lane) - 1));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int of_warp = counts[i];
        if (i < warp) before += of_warp;
        all += of_warp;
    }
    return all;
}

// `loss(token)` is asked for tokens that count alone.
template <class Loss>
DEVICE void sequence_loss(const Loss &loss, GLOBAL(const int) count, GLOBAL(float) per_sequence, GLOBAL(float) dlogprob,
                          long long length, int mean, float denominator) {
    SHARED(float, values, 256);
    SHARED(int, counts, 8);
    int before;
    // Dividing by 1 changes nothing.
    float share = 1.0f;
    if (mean) {
        long long counted = 0;
        for (long long from = 0; from < length; from += 256) {
            long long token = from + threadIdx.x;
            bool counts_here = false;
            if (token < length) counts_here = count[token] != 0;
            counted += count_of_block(counts_here, counts, before);
            __syncthreads();
        }
        if (counted > 0) share = static_cast<float>(counted);
    }
    float lane = 0.0f;
    // The number of the first token of these that counts, modulo 256.
    int first = 0;
    for (long long from = 0; from < length; from += 256) {
        long long token = from + threadIdx.x;
        bool counts_here = false;
        if (token < length) counts_here = count[token] != 0;
        int all = count_of_block(counts_here, counts, before);
        if (counts_here) {
            TokenLoss made = loss(token);
            values[(first + before) % 256] = made.value;
            dlogprob[token] = narrow<fp32>(__fdiv_rn(__fdiv_rn(made.slope, share), denominator));
        } else if (token < length) {
            dlogprob[token] = 0.0f;
        }
        __syncthreads();
        if ((threadIdx.x + 256 - first) % 256 < all) lane = __fadd_rn(lane, values[threadIdx.x]);
        __syncthreads();
        first = (first + all) % 256;
    }
    values[threadIdx.x] = lane;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    Eight lanes;
#pragma unroll
    for (int j = 0; j < 8; j++) lanes.v[j] = values[8 * threadIdx.x + j];
    float sum = fold_lanes(lanes);
    if (threadIdx.x == 0) per_sequence[blockIdx.x] = narrow<fp32>(__fdiv_rn(sum, share));
}
