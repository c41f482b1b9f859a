// Penalties of tokens that a text has: logits[R,V], tokens[S], begin[R], prompt_end[R], end[R], repetition[R], frequency[R],
// presence[R], bias[R,V]? -> y[R,V]: penalize.rs. A row is `parts` blocks of 4096 tokens of the vocabulary; every thread reads
// the whole text, and counts the tokens that are its own.
#include "math.cuh"

#define PART 4096
// What a token has that the text has; below this bit is how often the output has it.
#define THERE 0x80000000u

KERNEL(256, 4) penalize(
    GLOBAL(const In) logits, GLOBAL(const int) tokens, GLOBAL(const int) places, long long rows,
    GLOBAL(const float) repetitions, GLOBAL(const float) frequencies, GLOBAL(const float) presences, GLOBAL(const float) bias,
    int has_bias, GLOBAL(float) y, long long vocab, long long parts
) {
    SHARED(unsigned, counts, PART);
    SHARED(int, text, 256);
    int thread = threadIdx.x;
    long long row = blockIdx.x / parts, from = blockIdx.x % parts * PART;
    int begin = places[row], prompt_end = places[rows + row], end = places[2 * rows + row];
    for (int j = thread; j < PART; j += 256) counts[j] = 0;
    for (int at = begin; at < end; at += 256) {
        int count = min(256, end - at);
        if (thread < count) text[thread] = tokens[at + thread];
        __syncthreads();
        for (int i = 0; i < count; i++) {
            long long j = static_cast<int>(text[i]) - from;
            if (j < 0 || j >= PART || j % 256 != thread) continue;
            counts[j] = (counts[j] | THERE) + (at + i >= prompt_end ? 1u : 0u);
        }
        __syncthreads();
    }
    float repetition = repetitions[row], frequency = frequencies[row], presence = presences[row];
    for (int j = thread; j < PART && from + j < vocab; j += 256) {
        long long at = row * vocab + from + j;
        float z = widen(static_cast<In>(logits[at]));
        if (has_bias) z = __fadd_rn(z, bias[at]);
        unsigned count = counts[j];
        if (count) z = z < 0.0f ? __fmul_rn(z, repetition) : __fdiv_rn(z, repetition);
        count &= ~THERE;
        if (count) {
            z = __fsub_rn(z, __fmul_rn(frequency, static_cast<float>(count)));
            z = __fsub_rn(z, presence);
        }
        y[at] = narrow<float>(z);
    }
}
