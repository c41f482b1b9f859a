// Gradient of entropies: logits[R,V], entropy[R], lse[R], dentropy[R], dlse[R]? -> dlogits[R,V]: entropy_backward.rs. A
// row is `parts` blocks, a thread takes eight elements.
#include "math.cuh"

KERNEL(256, 4) entropy_backward(
    GLOBAL(const In) logits, GLOBAL(const float) entropy, GLOBAL(const float) lse, GLOBAL(const float) dentropy,
    GLOBAL(const float) dlse, int has_dlse, GLOBAL(Out) dlogits, long long vocab, long long parts, float scale
) {
    long long row = blockIdx.x / parts, at = (blockIdx.x % parts * blockDim.x + threadIdx.x) * 8;
    if (at >= vocab) return;
    logits = logits + row * vocab;
    dlogits = dlogits + row * vocab;
    float level = lse[row], own = entropy[row], slope = -dentropy[row], of_level = has_dlse ? dlse[row] : 0.0f;
    Eight v = load_up_to8<In>(logits + at, vocab - at, aligned16(logits), 0.0f);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float d = __fsub_rn(__fmul_rn(v.v[j], scale), level);
        float p = exponential_or_nothing(d);
        float t = p == 0.0f ? 0.0f : __fadd_rn(d, own);
        v.v[j] = __fmul_rn(__fmul_rn(p, __fmaf_rn(slope, t, of_level)), scale);
    }
    store_up_to8<Out>(dlogits + at, vocab - at, aligned16(dlogits), v);
}
