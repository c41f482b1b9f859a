// Log-probability from tiles of logits: linear_logprob.rs. The product of some rows with some columns of the vocabulary
// stands in the workspace; a block takes a row of it, each of its eight warps what lies in one of the eight segments,
// and adds the weights to the 256 lanes of that row and segment.
//
// One pass: a segment's reference point n is the largest exponent met so far, and its lanes are multiplied by a power of
// two when it moves. That is exact, except where a weight that was added would be cut under the final n: such rows are
// LOST, and the host has them summed again with n known. Rows that are far from zero are then summed from their top.
#include "denominator.cuh"

// What is kept of a row's segment beside its lanes: n, the least exponent that was added, 1 where a logit is NaN or +inf,
// the lane of the target without the target, and the largest logit.
#define FACTS 5
// What a pass over the tiles does: the sums while n moves, those under an n that is known, and those from the top.
#define FIRST 0
#define KNOWN 1
#define FROM_TOP 2
// What is left to do of a row.
#define DONE 0
#define LOST 1
#define IS_FAR 2

// The lane of the target in the segment, or -1.
DEVICE int lane_of_target(const Segment &segment, long long target) {
    return segment.from <= target && target < segment.to ? static_cast<int>((target - segment.from) % 256) : -1;
}

KERNEL(256, 4) linear_logprob_add(GLOBAL(const float) logits, GLOBAL(const int) target, REREAD(float) lanes,
                                  REREAD(float) facts, GLOBAL(float) picked, GLOBAL(const float) known, long long vocab,
                                  long long from, long long width, float scale, int begins, int pass) {
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
    Origin origin = pass == FROM_TOP ? origin_at(known[row]) : origin_of(pass == KNOWN ? known[row] : -INFINITE);
    float n = origin.n, least = pass == FIRST ? INFINITE : n, others = 0.0f, highest = -INFINITE;
    bool bad = false;
    int place = lane_of_target(segment, target[row]);
    bool owner = place >= 0 && place / 8 == lane;
    if (!begins) {
        sums = load8<float>(lanes);
        n = facts[0];
        least = facts[1];
        bad = facts[2] != 0.0f;
        if (owner) others = facts[3];
        highest = facts[4];
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
            highest = fmaxf(highest, x);
            split[j] = exp_split(origin.from_top ? __fsub_rn(x, origin.top) : x, LOG2E_HI, LOG2E_LO);
            top = fmaxf(top, split[j].i);
        }
        top = largest_of_warp(top);
        if (pass == FIRST && top > n) {
            float shift = __fsub_rn(n, top);
            // Weights that all fall below the cut become +0; else the lanes keep every bit.
            bool kept = shift >= NEGLIGIBLE;
            float factor = kept ? pow2(static_cast<int>(shift)) : 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) sums.v[j] = kept ? __fmul_rn(sums.v[j], factor) : 0.0f;
            others = kept ? __fmul_rn(others, factor) : 0.0f;
            if (!kept) least = INFINITE;
            n = top;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (__fsub_rn(split[j].i, n) >= NEGLIGIBLE) least = fminf(least, split[j].i);
            float w = weight(split[j].m, split[j].i, n);
            sums.v[j] = __fadd_rn(sums.v[j], w);
            // What is not of this tile has weight +0.
            if (owner && j == place % 8 && at + j != target[row]) others = __fadd_rn(others, w);
        }
    }
    least = -largest_of_warp(-least);
    highest = largest_of_warp(highest);
    bad = __any_sync(WHOLE_WARP, bad);
    store_eight<float>(lanes, sums);
    // All lanes have read the facts of the tile before: votes and shuffles order no memory.
    __syncwarp();
    if (lane == 0) {
        facts[0] = n;
        facts[1] = least;
        facts[2] = bad ? 1.0f : 0.0f;
        if (place < 0) facts[3] = 0.0f;
        facts[4] = highest;
    }
    if (owner) facts[3] = others;
}

// The segments of each row together. What stands in `lost` tells which rows a pass from the top is for.
KERNEL(256, 8) linear_logprob_end(GLOBAL(const float) lanes, GLOBAL(const float) facts, GLOBAL(const float) picked,
                                  GLOBAL(const int) target, GLOBAL(float) known, GLOBAL(int) lost, GLOBAL(float) logprob,
                                  GLOBAL(float) lse, long long vocab, int pass) {
    SHARED(float, sums, 8);
    SHARED(float, rests, 8);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    long long row = blockIdx.x;
    if (pass == FROM_TOP && lost[row] != IS_FAR) return;
    facts = facts + row * 8 * FACTS;
    Eight all = load8<float>(lanes + (row * 8 + warp) * 256 + lane * 8);
    float sum = fold_lanes(all), rest = sum;
    int place = lane_of_target(segment_of_warp(vocab), target[row]);
    if (place >= 0) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (lane * 8 + j == place) all.v[j] = facts[warp * FACTS + 3];
        }
        rest = fold_lanes(all);
    }
    if (lane == 0) {
        sums[warp] = sum;
        rests[warp] = rest;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    float n = -INFINITE, top = -INFINITE;
    for (int s = 0; s < 8; s++) {
        n = fmaxf(n, facts[s * FACTS]);
        top = fmaxf(top, facts[s * FACTS + 4]);
    }
    bool again = false, bad = false;
    float parts[8], others[8];
#pragma unroll
    for (int s = 0; s < 8; s++) {
        float shift = __fsub_rn(facts[s * FACTS], n);
        // A weight that was added and is cut under the final n.
        again |= shift >= NEGLIGIBLE && __fsub_rn(facts[s * FACTS + 1], n) < NEGLIGIBLE;
        bad |= facts[s * FACTS + 2] != 0.0f;
        // Exact: what is left is at least 2^-101. A segment that is far below has no weight at all.
        float factor = shift >= NEGLIGIBLE ? pow2(static_cast<int>(shift)) : 0.0f;
        parts[s] = shift >= NEGLIGIBLE ? __fmul_rn(sums[s], factor) : 0.0f;
        others[s] = shift >= NEGLIGIBLE ? __fmul_rn(rests[s], factor) : 0.0f;
    }
    Denominator d{pass == FROM_TOP ? origin_at(known[row]) : origin_of(n), join_segments(parts), join_segments(others)};
    if (bad || top == -INFINITE) d.sum = bad ? NOT_A_NUMBER : 0.0f;
    int left = DONE;
    if (!bad && top > -INFINITE && pass != FROM_TOP) left = again ? LOST : fabsf(n) >= FAR ? IS_FAR : DONE;
    // The logarithm of the row as it stands, where its n is finite.
    if (pass != FROM_TOP) lse[row] = left != DONE && !(fabsf(n) < INFINITE) ? NOT_A_NUMBER : lse_of(d);
    else if (lse[row] != lse[row]) lse[row] = lse_of(d);
    logprob[row] = target[row] < 0 ? 0.0f : logprob_of(picked[row], d);
    known[row] = left == IS_FAR ? top : n;
    lost[row] = left;
}
