// Entropy of rows of logits: logits[R,V] -> entropy[R], lse[R] (f32): entropy.rs. A block takes a row, each of its eight
// warps one of the eight segments of both sums.
#include "denominator.cuh"

KERNEL(256, 4) entropy(GLOBAL(const In) logits, GLOBAL(float) entropy, GLOBAL(float) lse, long long vocab, float scale) {
    SHARED(float, room, 8);
    long long row = blockIdx.x;
    GLOBAL(const In) x = logits + row * vocab;
    Reference r = reference(x, vocab, scale, room);
    Denominator d{r.n, r.sum};
    float value = NOT_A_NUMBER;
    if (!r.special) {
        bool aligned = aligned16(x);
        Segment segment = segment_of_warp(vocab);
        Eight weights = no_lanes(), distances = no_lanes();
        for (long long at = segment.from + threadIdx.x % 32 * 8; at < segment.to; at += 256) {
            Eight v = load_up_to8<In>(x + at, segment.to - at, aligned, -INFINITE);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float scaled = __fmul_rn(v.v[j], scale);
                Split s = exp_split(scaled, LOG2E_HI, LOG2E_LO);
                float w = weight(s.m, s.i, r.n);
                weights.v[j] = __fadd_rn(weights.v[j], w);
                float below = w == 0.0f ? 0.0f : __fsub_rn(r.top, scaled);
                distances.v[j] = __fmaf_rn(w, below, distances.v[j]);
            }
        }
        d.sum = join_warps(fold_lanes(weights), room);
        float distance = join_warps(fold_lanes(distances), room);
        // The weight of the top, which has the exponent n.
        float t = exp_split(r.top, LOG2E_HI, LOG2E_LO).m;
        double spread = __dsub_rn(natural_logarithm(d.sum), natural_logarithm(t));
        double mean = __ddiv_rn(static_cast<double>(distance), static_cast<double>(d.sum));
        value = __double2float_rn(__dadd_rn(spread, mean));
    }
    if (threadIdx.x == 0) {
        entropy[row] = value;
        lse[row] = lse_of(d);
    }
}
