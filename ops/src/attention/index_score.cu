// What keys are worth to tokens: q[T,H,D], k[S,D], weight[T,H] -> score[T,S]: index_score.rs. A block takes 128 keys of a token, a
// thread one: a chain over the elements of each head, and a chain over the heads.
#include "element.cuh"

KERNEL(128, 8) index_score(GLOBAL(const In) q, GLOBAL(const In) k, GLOBAL(const float) weight, GLOBAL(float) score, int heads,
                           int dim, long long keys, float scale) {
    long long token = blockIdx.x, key = static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x;
    if (key >= keys) return;
    float sum = 0.0f;
    for (int head = 0; head < heads; head++) {
        long long row = token * heads + head;
        float x = 0.0f;
        for (int d = 0; d < dim; d++) {
            x = __fmaf_rn(widen(static_cast<In>(q[row * dim + d])), widen(static_cast<In>(k[key * dim + d])), x);
        }
        x = __fmul_rn(x, scale);
        sum = __fmaf_rn(weight[row], x <= 0.0f ? 0.0f : x, sum);
    }
    score[token * keys + key] = narrow<fp32>(sum);
}
