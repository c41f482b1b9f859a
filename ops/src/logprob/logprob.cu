// Log-probability of one token per row: logits[R,V], target[R] -> logprob[R], lse[R] (f32): logprob.rs. A block takes a
// row, each of its eight warps one of the eight segments.
//
// One pass where it can be: every thread weighs its elements against a reference point of its own, an even integer r
// near the largest exponent it has met, and multiplies its lanes by a power of two when r moves or when, at the end,
// the row's reference point n is known. All that is exact as long as no weight falls below the cut at 2^-100 of the
// largest; a row where one does, or that holds an infinity or a NaN, is done again in two passes (denominator.cuh).
#include "denominator.cuh"

// An element enters only where its exponent lies in r - LOWEST .. r + HIGHEST.
#define HIGHEST 24.0f
#define LOWEST 110.0f
// Vectors that are in hand at a time.
#define AHEAD 4

// The largest and the smallest of some elements. A NaN makes both NaN, or `bad`.
struct Extremes {
    float high, low;
    bool bad;
};

template <class T> DEVICE Extremes extremes(const Stored8<T> *stored, T) {
    Extremes e{-INFINITE, INFINITE, false};
#pragma unroll
    for (int b = 0; b < AHEAD; b++) {
        Eight v = widen_stored<T>(stored[b]);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            e.bad |= !(v.v[j] < INFINITE);
            e.high = fmaxf(e.high, v.v[j]);
            e.low = fminf(e.low, v.v[j]);
        }
    }
    return e;
}
DEVICE Extremes extremes(const Stored8<bf16> *stored, bf16) {
    unsigned high = stored[0].raw[0].x, low = high;
#pragma unroll
    for (int b = 0; b < AHEAD; b++) {
        uint4 raw = stored[b].raw[0];
        high = max_pair(max_pair(high, raw.x), max_pair(raw.y, max_pair(raw.z, raw.w)));
        low = min_pair(min_pair(low, raw.x), min_pair(raw.y, min_pair(raw.z, raw.w)));
    }
    float h0 = low_half(high), h1 = high_half(high);
    bool bad = !(h0 < INFINITE && h1 < INFINITE);
    return Extremes{fmaxf(h0, h1), fminf(low_half(low), high_half(low)), bad};
}

// The sum of one thread.
template <bool SCALED> struct Running {
    Eight lanes;
    float scale;
    // The largest and the smallest element so far.
    float high, low;
    // ROUNDING - r, and whether there is an r.
    float base;
    bool begun;
    // This row needs two passes.
    bool again;

    DEVICE float exponent(float x) const { return __fmul_rn(SCALED ? __fmul_rn(x, scale) : x, LOG2E_HI); }

    // Takes note of elements that are about to be added.
    DEVICE void meet(const Extremes &e) {
        high = fmaxf(high, e.high);
        low = fminf(low, e.low);
        float above = __fadd_rn(exponent(high), base), below = __fadd_rn(exponent(low), base);
        if (begun && above <= ROUNDING + HIGHEST && below >= ROUNDING - LOWEST && !e.bad) return;
        float t = exponent(high);
        again |= e.bad || !(fabsf(t) < 2097152.0f);
        if (again) return;
        int r = static_cast<int>(rintf(t));
        r += r & 1;
        float moved = __fsub_rn(ROUNDING, static_cast<float>(r));
        if (begun) {
            // Exact: both are integers. Beyond the reach of pow2 every weight so far is below the cut.
            float shift = __fsub_rn(moved, base);
            if (shift < -100.0f) {
                again = true;
                return;
            }
            float factor = pow2(static_cast<int>(shift));
#pragma unroll
            for (int j = 0; j < 8; j++) lanes.v[j] = __fmul_rn(lanes.v[j], factor);
        }
        base = moved;
        begun = true;
        again |= !(__fadd_rn(exponent(low), base) >= ROUNDING - LOWEST);
    }

    // The weight of an element, as 2^-r of it.
    DEVICE float weigh(float z) const {
        float shifted;
        float x = z;
        if (!SCALED && sizeof(In) == 2) {
            // Where x has at most 11 bits, rounding x * LOG2E_HI to f32 before it is rounded to an integer changes
            // nothing (tests/cuda.rs tries them all).
            shifted = __fmaf_rn(x, LOG2E_HI, base);
        } else {
            if (SCALED) x = __fmul_rn(x, scale);
            shifted = __fadd_rn(__fmul_rn(x, LOG2E_HI), base);
        }
        float i = __fsub_rn(shifted, base);
        float f = __fmaf_rn(x, LOG2E_LO, __fmaf_rn(x, LOG2E_HI, -i));
        // The low bits of `shifted` are i - r; they go to the exponent of m.
        return __uint_as_float(__float_as_uint(exp2_fraction(f)) + (__float_as_uint(shifted) << 23));
    }
};

template <bool SCALED>
DEVICE Denominator one_pass(GLOBAL(const In) x, long long count, float scale, long long without, SHARED_POINTER(float) room,
                            bool &again) {
    Segment segment = segment_of_warp(count);
    Running<SCALED> run{no_lanes(), scale, -INFINITE, INFINITE, 0.0f, false, false};
    long long at = segment.from + threadIdx.x % 32 * 8;
    if (aligned16(x)) {
        for (; at + (AHEAD - 1) * 256 + 8 <= segment.to && !run.again; at += AHEAD * 256) {
            Stored8<In> stored[AHEAD];
#pragma unroll
            for (int b = 0; b < AHEAD; b++) stored[b] = load_stored_once<In>(x + at + b * 256);
            run.meet(extremes(stored, In()));
#pragma unroll
            for (int b = 0; b < AHEAD; b++) {
                Eight v = widen_stored<In>(stored[b]);
#pragma unroll
                for (int j = 0; j < 8; j++) run.lanes.v[j] = __fadd_rn(run.lanes.v[j], run.weigh(v.v[j]));
            }
        }
    }
    for (; at < segment.to && !run.again; at += 256) {
        Eight v = load_some<In>(x + at, segment.to - at, 0.0f);
        Extremes e{-INFINITE, INFINITE, false};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (at + j < segment.to) {
                e.bad |= !(v.v[j] < INFINITE);
                e.high = fmaxf(e.high, v.v[j]);
                e.low = fminf(e.low, v.v[j]);
            }
        }
        run.meet(e);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (at + j < segment.to) run.lanes.v[j] = __fadd_rn(run.lanes.v[j], run.weigh(v.v[j]));
        }
    }
    again = __syncthreads_or(run.again);
    if (again) return Denominator{origin_of(0.0f), 0.0f, 0.0f};
    float n = rintf(run.exponent(largest_of_block(run.high, room)));
    float low = rintf(run.exponent(-largest_of_block(-run.low, room)));
    // A row of nothing has no exponents either.
    again = !(__fsub_rn(low, n) >= NEGLIGIBLE) || !(fabsf(n) < FAR);
    if (again) return Denominator{origin_of(0.0f), 0.0f, 0.0f};
    if (run.begun) {
        float factor = pow2(static_cast<int>(__fsub_rn(__fsub_rn(ROUNDING, run.base), n)));
#pragma unroll
        for (int j = 0; j < 8; j++) run.lanes.v[j] = __fmul_rn(run.lanes.v[j], factor);
    }
    Origin origin = origin_of(n);
    float part = fold_lanes(run.lanes), sum = join_warps(part, room);
    if (without < 0) return Denominator{origin, sum, sum};
    return Denominator{origin, sum, join_without(x, segment, without, scale, origin, run.lanes, part, room)};
}

template <bool SCALED> DEVICE void logprob_row(GLOBAL(const In) logits, GLOBAL(const int) target, GLOBAL(float) logprob, GLOBAL(float) lse,
                        long long vocab, float scale) {
    SHARED(float, room, 8);
    long long row = blockIdx.x;
    GLOBAL(const In) x = logits + row * vocab;
    bool again = false;
    int index = target[row];
    Denominator d = one_pass<SCALED>(x, vocab, scale, index, room, again);
    float level = lse_of(d);
    if (again) {
        Reference r = reference(x, vocab, scale, room);
        d = Denominator{r.origin, r.sum, r.sum};
        if (!r.special) d = sum_of(x, vocab, scale, r.origin, index, room);
        level = lse_of(d);
        if (r.far()) d = sum_of(x, vocab, scale, origin_at(r.top), index, room);
    }
    if (threadIdx.x == 0) {
        lse[row] = level;
        logprob[row] = index < 0 ? 0.0f : logprob_of(__fmul_rn(widen(static_cast<In>(x[index])), scale), d);
    }
}

KERNEL(256, 4) logprob(GLOBAL(const In) logits, GLOBAL(const int) target, GLOBAL(float) logprob, GLOBAL(float) lse,
                       long long vocab, float scale) {
    logprob_row<true>(logits, target, logprob, lse, vocab, scale);
}

// A scale of 1 changes no element.
KERNEL(256, 4) logprob_unscaled(GLOBAL(const In) logits, GLOBAL(const int) target, GLOBAL(float) logprob,
                                GLOBAL(float) lse, long long vocab, float scale) {
    logprob_row<false>(logits, target, logprob, lse, vocab, scale);
}
