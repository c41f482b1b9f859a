// Gradient of the weights of chosen experts: logits[T,E], index[T,K], dweight[T,K] -> dlogits[T,E]: route_backward.rs. A warp
// takes a token; where scores are the softmax, they stand in dlogits.
#include "math.cuh"

// What the gradients of the weights of a token become by their sum, where they are divided by it.
struct Normalised {
    float sum, common;
    int normalise;
    DEVICE float of(float a) const { return normalise ? __fdiv_rn(__fsub_rn(a, common), sum) : a; }
};

template <class Score>
DEVICE Normalised normalised(Score score, GLOBAL(const float) dweight, int chosen, int normalise, float more, float scale) {
    Normalised n;
    n.sum = n.common = 0.0f;
    n.normalise = normalise;
    if (!normalise) return n;
    // Every thread sums by itself: few are chosen.
    for (int rank = 0; rank < chosen; rank++) n.sum = __fadd_rn(n.sum, score(rank));
    if (more > 0.0f) n.sum = __fadd_rn(n.sum, more);
    for (int rank = 0; rank < chosen; rank++) {
        float share = __fdiv_rn(score(rank), n.sum);
        n.common = __fmaf_rn(__fmul_rn(dweight[rank], scale), share, n.common);
    }
    return n;
}

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
    auto of_rank = [&](int rank) { return score(index[rank]); };
    Normalised n = normalised(of_rank, dweight, chosen, normalise, sigmoids ? ROUTE_SUM : 0.0f, scale);
    auto of_score = [&](int rank) { return n.of(__fmul_rn(dweight[rank], scale)); };
    float whole = 0.0f;
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

// The same by sparsemixer, from the share of every expert for each rank: shares[T * K,E].
KERNEL(128, 8)
route_backward_shares(GLOBAL(const float) shares, GLOBAL(const int) index, GLOBAL(const float) dweight,
                      GLOBAL(float) dlogits, long long tokens, int experts, int chosen, int normalise, float scale) {
    long long token = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    shares = shares + token * chosen * experts;
    index = index + token * chosen;
    dweight = dweight + token * chosen;
    dlogits = dlogits + token * experts;
    auto score = [&](int rank) { return static_cast<float>(shares[static_cast<long long>(rank) * experts + index[rank]]); };
    Normalised n = normalised(score, dweight, chosen, normalise, 0.0f, scale);
    for (int expert = threadIdx.x % 32; expert < experts; expert += 32) {
        float sum = 0.0f;
        for (int rank = 0; rank < chosen; rank++) {
            float a = n.of(__fmul_rn(dweight[rank], scale)), whole = __fmaf_rn(a, score(rank), 0.0f);
            float own = index[rank] == expert ? a : 0.0f;
            float d = __fmul_rn(shares[static_cast<long long>(rank) * experts + expert], __fsub_rn(own, whole));
            sum = rank == 0 ? d : __fadd_rn(sum, d);
        }
        dlogits[expert] = narrow<fp32>(sum);
    }
}
