// The softmax denominator of one row: logprob.rs. A block of 256 threads takes a row, each of its eight warps one of
// the eight segments; all threads return the result.
#pragma once
#include "reduce.cuh"

// What the weights of a row are measured by: the largest exponent, and what is taken from every element first, which is
// the largest one of a row that is far from zero.
struct Origin {
    float n, top;
    bool from_top;
};

DEVICE Origin origin_of(float n) { return Origin{n, 0.0f, false}; }
DEVICE Origin origin_at(float top) { return Origin{0.0f, top, true}; }

DEVICE float weight_from(const Origin &o, float x) {
    Split s = exp_split(o.from_top ? __fsub_rn(x, o.top) : x, LOG2E_HI, LOG2E_LO);
    return weight(s.m, s.i, o.n);
}

// The sum is +0 for a row without a finite element and NaN for a row with a NaN or +inf; `rest` is without one of them.
struct Denominator {
    Origin origin;
    float sum, rest;
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

// What is known of a row before its weights: its largest element and what they are measured by; `sum` is the one of a row
// without weights, which is `special`.
struct Reference {
    float top;
    Origin origin;
    float sum;
    bool special;

    // Whether the row is far from zero and not measured from its top.
    DEVICE bool far() const { return !special && fabsf(origin.n) >= FAR; }
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
    // A finite element beyond 2^127.5 overflows x * log2(e).
    Origin origin = fabsf(n) < INFINITE ? origin_of(n) : origin_at(top);
    if (invalid || top == INFINITE) return Reference{top, origin, NOT_A_NUMBER, true};
    return Reference{top, origin, 0.0f, top == -INFINITE};
}

// The lane of element `at` of a segment without that element; for all threads of the warp.
DEVICE float lane_without(GLOBAL(const In) x, const Segment &segment, long long at, float scale, const Origin &origin) {
    float sum = 0.0f;
    for (long long from = segment.from + (at - segment.from) % LANES; from < segment.to; from += 32 * LANES) {
        long long mine = from + threadIdx.x % 32 * LANES;
        float w = 0.0f;
        if (mine < segment.to && mine != at) w = weight_from(origin, __fmul_rn(widen(static_cast<In>(x[mine])), scale));
        // What is left out, and what stands behind the end, adds +0.
        for (int i = 0; i < 32; i++) sum = __fadd_rn(sum, __shfl_sync(WHOLE_WARP, w, i));
    }
    return sum;
}

// The sum of all segments but for element `without`, of whose weights each warp has `lanes` and `part`. Where there is no such
// element, that of all.
DEVICE float join_without(GLOBAL(const In) x, Segment segment, long long without, float scale, const Origin &origin, Eight lanes,
                          float part, SHARED_POINTER(float) room) {
    if (segment.from <= without && without < segment.to) {
        float others = lane_without(x, segment, without, scale, origin);
        int lane = static_cast<int>((without - segment.from) % LANES);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (static_cast<int>(threadIdx.x % 32) * 8 + j == lane) lanes.v[j] = others;
        }
        part = fold_lanes(lanes);
    }
    return join_warps(part, room);
}

// The sums of weights measured by `origin`.
DEVICE Denominator sum_of(GLOBAL(const In) x, long long count, float scale, const Origin &origin, long long without,
                          SHARED_POINTER(float) room) {
    bool aligned = aligned16(x);
    Segment segment = segment_of_warp(count);
    Eight lanes = no_lanes();
    for (long long at = segment.from + threadIdx.x % 32 * 8; at < segment.to; at += 256) {
        Eight v = load_up_to8<In>(x + at, segment.to - at, aligned, -INFINITE);
#pragma unroll
        for (int j = 0; j < 8; j++) lanes.v[j] = __fadd_rn(lanes.v[j], weight_from(origin, __fmul_rn(v.v[j], scale)));
    }
    float part = fold_lanes(lanes), sum = join_warps(part, room);
    if (without < 0) return Denominator{origin, sum, sum};
    return Denominator{origin, sum, join_without(x, segment, without, scale, origin, lanes, part, room)};
}

// Two passes: the largest exponent, then the weights below it. For every row there is.
DEVICE Denominator denominator(GLOBAL(const In) x, long long count, float scale, SHARED_POINTER(float) room) {
    Reference r = reference(x, count, scale, room);
    if (r.special) return Denominator{r.origin, r.sum, r.sum};
    return sum_of(x, count, scale, r.origin, -1, room);
}

// The share of an element of the row, NaN where there is none.
DEVICE float share(float x, const Denominator &d) {
    if (d.sum != d.sum || d.sum == 0.0f) return NOT_A_NUMBER;
    return __fdiv_rn(weight_from(d.origin, x), d.sum);
}

DEVICE double logarithm_from(const Origin &o, float l) {
    if (o.from_top) return __dadd_rn(static_cast<double>(o.top), natural_logarithm(l));
    return logarithm_of_sum(o.n, l);
}

DEVICE float lse_of(const Denominator &d) {
    if (d.sum == 0.0f) return -INFINITE;
    if (d.sum != d.sum) return NOT_A_NUMBER;
    return __double2float_rn(logarithm_from(d.origin, d.sum));
}

// The log-probability of the element x that `rest` is without.
DEVICE float logprob_of(float x, const Denominator &d) {
    if (!(d.sum > 0.0f)) return NOT_A_NUMBER;
    float t = weight_from(d.origin, x);
    double logprob;
    if (d.rest < t) {
        logprob = __dsub_rn(0.0, logarithm_of_one_plus(d.rest, t));
    } else if (d.origin.from_top) {
        double below = __dsub_rn(static_cast<double>(x), static_cast<double>(d.origin.top));
        logprob = __dsub_rn(below, natural_logarithm(d.sum));
    } else {
        logprob = __dsub_rn(static_cast<double>(x), logarithm_of_sum(d.origin.n, d.sum));
    }
    return __double2float_rn(logprob);
}
