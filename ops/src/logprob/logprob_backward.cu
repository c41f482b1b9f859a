// Gradient of log-probabilities: logits[R,V], target[R], lse[R], dlogprob[R], dlse[R]? -> dlogits[R,V]: logprob_backward.rs.
// A row is `parts` blocks, a thread takes eight elements.
#include "math.cuh"

KERNEL(256, 4) logprob_backward(
    GLOBAL(const In) logits, GLOBAL(const int) target, GLOBAL(const float) lse, GLOBAL(const float) dlogprob,
    GLOBAL(const float) dlse, int has_dlse, GLOBAL(Out) dlogits, long long vocab, long long parts, float scale
) {
    long long row = blockIdx.x / parts, at = (blockIdx.x % parts * blockDim.x + threadIdx.x) * 8;
    if (at >= vocab) return;
    logits = logits + row * vocab;
    dlogits = dlogits + row * vocab;
    int index = target[row];
    float level = lse[row], own = index < 0 ? 0.0f : dlogprob[row];
    float c = __fsub_rn(has_dlse ? dlse[row] : 0.0f, own);
    Eight v = load_up_to8<In>(logits + at, vocab - at, aligned16(logits), 0.0f);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float p = exponential_or_nothing(__fsub_rn(__fmul_rn(v.v[j], scale), level));
        float g = at + j == index ? __fmaf_rn(p, c, own) : __fmul_rn(p, c);
        v.v[j] = __fmul_rn(g, scale);
    }
    store_up_to8<Out>(dlogits + at, vocab - at, aligned16(dlogits), v);
}
