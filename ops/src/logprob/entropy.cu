// Entropy of rows of logits: logits[R,V] -> entropy[R], lse[R] (f32): entropy.rs. A block takes a row, each of its eight
// warps one of the eight segments of both sums.
#include "denominator.cuh"

KERNEL(256, 4) entropy(GLOBAL(const In) logits, GLOBAL(float) entropy, GLOBAL(float) lse, long long vocab, float scale) {
    SHARED(float, room, 8);
    long long row = blockIdx.x;
    GLOBAL(const In) x = logits + row * vocab;
    Reference r = reference(x, vocab, scale, room);
    Denominator d{r.origin, r.sum, r.sum};
    float value = NOT_A_NUMBER, level = lse_of(d);
    if (!r.special) {
        bool aligned = aligned16(x), far = r.far();
        if (far) {
            level = lse_of(sum_of(x, vocab, scale, d.origin, -1, room));
            d.origin = origin_at(r.top);
        }
        // The first of the largest: the first round of all threads that meets one, and in it the first thread.
        float first_round = INFINITE;
        int number = 0;
        for (long long at = threadIdx.x; at < vocab && first_round == INFINITE; at += blockDim.x, number++) {
            if (__fmul_rn(widen(static_cast<In>(x[at])), scale) == r.top) first_round = static_cast<float>(number);
        }
        float round = -largest_of_block(-first_round, room);
        float thread = -largest_of_block(first_round == round ? -static_cast<float>(threadIdx.x) : -INFINITE, room);
        long long first = static_cast<long long>(static_cast<int>(round)) * blockDim.x + static_cast<int>(thread);
        Segment segment = segment_of_warp(vocab);
        Eight weights = no_lanes(), distances = no_lanes();
        for (long long at = segment.from + threadIdx.x % 32 * 8; at < segment.to; at += 256) {
            Eight v = load_up_to8<In>(x + at, segment.to - at, aligned, -INFINITE);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float scaled = __fmul_rn(v.v[j], scale);
                float w = weight_from(d.origin, scaled);
                weights.v[j] = __fadd_rn(weights.v[j], w);
                float below = w == 0.0f ? 0.0f : __fsub_rn(r.top, scaled);
                distances.v[j] = __fmaf_rn(w, below, distances.v[j]);
            }
        }
        float part = fold_lanes(weights), t = weight_from(d.origin, r.top);
        d.sum = join_warps(part, room);
        d.rest = join_without(x, segment, first, scale, d.origin, weights, part, room);
        if (!far) level = lse_of(d);
        float distance = join_warps(fold_lanes(distances), room);
        double spread = d.rest < t ? logarithm_of_one_plus(d.rest, t)
                                   : __dsub_rn(natural_logarithm(d.sum), natural_logarithm(t));
        double mean = __ddiv_rn(static_cast<double>(distance), static_cast<double>(d.sum));
        value = __double2float_rn(__dadd_rn(spread, mean));
    }
    if (threadIdx.x == 0) {
        entropy[row] = value;
        lse[row] = level;
    }
}
