// Log-probability from tiles of logits: linear_logprob.rs. The product of some rows with some columns of the vocabulary
// stands in the workspace; a block takes a row of it, each of its eight warps what lies in one of the eight segments,
// and adds the weights to the 256 lanes of that row and segment.
//
// One pass: a segment's reference point n is the largest exponent met so far, and its lanes are multiplied by a power of
// two when it moves. That is exact, except where a weight that was added would be cut under the final n: such rows are
// `lost`, and the host has them summed again with n known.
#include "denominator.cuh"

// What is kept of a row's segment beside its lanes: n, the least exponent that was added, 1 where a logit is NaN or +inf.
#define FACTS 3

KERNEL(256, 4) linear_logprob_add(GLOBAL(const float) logits, GLOBAL(const int) target, REREAD(float) lanes,
                                  REREAD(float) facts, GLOBAL(float) picked, GLOBAL(const float) known, long long vocab,
                                  long long from, long long width, float scale, int begins, int again) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    long long row = blockIdx.x;
    logits = logits + row * width;
    if (threadIdx.x == 0) {
        long long place = target[row] - from;
        if (place >= 0 && place < width) picked[row] = __fmul_rn(logits[place], scale);
    }
    Segment segment = segment_of_warp(vocab);
    long long begin = max(from, segment.from), end = min(from + width, segment.to);
    if (!begins && begin >= end) return;
    lanes = lanes + (row * 8 + warp) * 256 + lane * 8;
    facts = facts + (row * 8 + warp) * FACTS;
    Eight sums = no_lanes();
    float n = again ? known[row] : -INFINITE, least = again ? n : INFINITE;
    bool bad = false;
    if (!begins) {
        sums = load8<float>(lanes);
        n = facts[0];
        least = facts[1];
        bad = facts[2] != 0.0f;
    }
    // Tiles and segments begin at multiples of 16, so eight neighbours are on one side of either.
    long long at = segment.from + (begin - segment.from) / 256 * 256 + lane * 8;
    for (long long base = at - lane * 8; base < end; base += 256, at += 256) {
        bool mine = begin <= at && at < end;
        Eight v;
#pragma unroll
        for (int j = 0; j < 8; j++) v.v[j] = -INFINITE;
        if (mine) v = load_up_to8<float>(logits + (at - from), end - at, aligned16(logits + (at - from)), -INFINITE);
        Split split[8];
        float top = -INFINITE;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float x = __fmul_rn(v.v[j], scale);
            bad |= !(x < INFINITE);
            split[j] = exp_split(x, LOG2E_HI, LOG2E_LO);
            top = fmaxf(top, split[j].i);
        }
        top = largest_of_warp(top);
        if (!again && top > n) {
            float shift = __fsub_rn(n, top);
            // Weights that all fall below the cut become +0; else the lanes keep every bit.
            bool kept = shift >= NEGLIGIBLE;
            float factor = kept ? pow2(static_cast<int>(shift)) : 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) sums.v[j] = kept ? __fmul_rn(sums.v[j], factor) : 0.0f;
            if (!kept) least = INFINITE;
            n = top;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (__fsub_rn(split[j].i, n) >= NEGLIGIBLE) least = fminf(least, split[j].i);
            sums.v[j] = __fadd_rn(sums.v[j], weight(split[j].m, split[j].i, n));
        }
    }
    least = -largest_of_warp(-least);
    bad = __any_sync(WHOLE_WARP, bad);
    store_eight<float>(lanes, sums);
    // All lanes have read the facts of the tile before: votes and shuffles order no memory.
    __syncwarp();
    if (lane == 0) {
        facts[0] = n;
        facts[1] = least;
        facts[2] = bad ? 1.0f : 0.0f;
    }
}

// The segments of each row together.
KERNEL(256, 8) linear_logprob_end(GLOBAL(const float) lanes, GLOBAL(const float) facts, GLOBAL(const float) picked,
                                  GLOBAL(const int) target, GLOBAL(float) known, GLOBAL(int) lost, GLOBAL(float) logprob,
                                  GLOBAL(float) lse) {
    SHARED(float, sums, 8);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    long long row = blockIdx.x;
    float sum = fold_lanes(load8<float>(lanes + (row * 8 + warp) * 256 + lane * 8));
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    facts = facts + row * 8 * FACTS;
    float n = -INFINITE;
    for (int s = 0; s < 8; s++) n = fmaxf(n, facts[s * FACTS]);
    bool again = false, bad = n == INFINITE;
    float parts[8];
#pragma unroll
    for (int s = 0; s < 8; s++) {
        float shift = __fsub_rn(facts[s * FACTS], n);
        // A weight that was added and is cut under the final n.
        again |= shift >= NEGLIGIBLE && __fsub_rn(facts[s * FACTS + 1], n) < NEGLIGIBLE;
        bad |= facts[s * FACTS + 2] != 0.0f;
        // Exact: what is left is at least 2^-101. A segment that is far below has no weight at all.
        float part = 0.0f;
        if (shift >= NEGLIGIBLE) part = __fmul_rn(sums[s], pow2(static_cast<int>(shift)));
        parts[s] = part;
    }
    float value = bad ? NOT_A_NUMBER : n == -INFINITE ? -INFINITE : log_sum(n, join_segments(parts));
    float answer = 0.0f;
    if (target[row] >= 0) answer = narrow<fp32>(__fsub_rn(picked[row], value));
    lse[row] = value;
    logprob[row] = answer;
    known[row] = n;
    lost[row] = again && !bad;
}
