// Gradient of the weights of chosen experts: logits[T,E], index[T,K], dweight[T,K] -> dlogits[T,E]: route_backward.rs. A warp
// takes a token; where scores are the softmax, they stand in dlogits.
#include "math.cuh"

KERNEL(128, 8)
route_backward(GLOBAL(const In) logits, GLOBAL(const int) index, GLOBAL(const float) dweight, GLOBAL(float) dlogits,
               long long tokens, int experts, int chosen, int sigmoids, int normalise, float scale) {
    long long token = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    logits = logits + token * experts;
    index = index + token * chosen;
    dweight = dweight + token * chosen;
    dlogits = dlogits + token * experts;
    auto score = [&](int expert) {
        if (!sigmoids) return static_cast<float>(dlogits[expert]);
        return sigmoid(widen(static_cast<In>(logits[expert])));
    };
    // Every thread sums by itself: few are chosen.
    float sum = 0.0f, common = 0.0f, whole = 0.0f;
    if (normalise) {
        for (int rank = 0; rank < chosen; rank++) sum = __fadd_rn(sum, score(index[rank]));
        if (sigmoids) sum = __fadd_rn(sum, ROUTE_SUM);
        for (int rank = 0; rank < chosen; rank++) {
            float share = __fdiv_rn(score(index[rank]), sum);
            common = __fmaf_rn(__fmul_rn(dweight[rank], scale), share, common);
        }
    }
    auto of_score = [&](int rank) {
        float a = __fmul_rn(dweight[rank], scale);
        return normalise ? __fdiv_rn(__fsub_rn(a, common), sum) : a;
    };
    if (!sigmoids) {
        for (int rank = 0; rank < chosen; rank++) whole = __fmaf_rn(of_score(rank), score(index[rank]), whole);
    }
    // What is written now has been read by all.
    __syncwarp();
    for (int expert = threadIdx.x % 32; expert < experts; expert += 32) {
        float a = 0.0f, s = score(expert), slope = 0.0f;
        for (int rank = 0; rank < chosen; rank++) {
            if (index[rank] != expert) continue;
            a = of_score(rank);
            slope = __fmul_rn(s, __fsub_rn(1.0f, s));
        }
        dlogits[expert] = narrow<fp32>(sigmoids ? __fmul_rn(a, slope) : __fmul_rn(s, __fsub_rn(a, whole)));
    }
}
