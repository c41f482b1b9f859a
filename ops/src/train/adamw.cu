// A step of AdamW: w, m, v, g, factor[1]? -> new_w, new_m, new_v, rounded, n elements: adamw.rs. New ones may stand where
// the old ones did. Eight elements a thread.
#include "element.cuh"

KERNEL(256, 4)
adamw(REREAD(const float) w, REREAD(const float) m, REREAD(const float) v, GLOBAL(const float) g,
      GLOBAL(const float) factor, int has_factor, REREAD(float) new_w, REREAD(float) new_m, REREAD(float) new_v,
      GLOBAL(Out) rounded, long long n, float b1, float rest1, float b2, float rest2, float eps, float rate, float unbias,
      float keep) {
    long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * 8, count = n - at;
    if (count <= 0) return;
    bool aligned = aligned16(w) && aligned16(m) && aligned16(v) && aligned16(g);
    bool aligned_new = aligned16(new_w) && aligned16(new_m) && aligned16(new_v);
    Eight ws = load_up_to8<float>(w + at, count, aligned, 0.0f), ms = load_up_to8<float>(m + at, count, aligned, 0.0f);
    Eight vs = load_up_to8<float>(v + at, count, aligned, 0.0f), gs = load_up_to8<float>(g + at, count, aligned, 0.0f);
    float by = has_factor ? static_cast<float>(factor[0]) : 1.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        // A product by 1 changes nothing.
        float gradient = __fmul_rn(gs.v[j], by);
        ms.v[j] = __fmaf_rn(b1, ms.v[j], __fmul_rn(rest1, gradient));
        vs.v[j] = __fmaf_rn(b2, vs.v[j], __fmul_rn(__fmul_rn(rest2, gradient), gradient));
        float u = __fdiv_rn(ms.v[j], __fmaf_rn(__fsqrt_rn(vs.v[j]), unbias, eps));
        ws.v[j] = __fmaf_rn(-rate, u, __fmul_rn(ws.v[j], keep));
    }
    store_up_to8<float>(new_w + at, count, aligned_new, ws);
    store_up_to8<float>(new_m + at, count, aligned_new, ms);
    store_up_to8<float>(new_v + at, count, aligned_new, vs);
    store_up_to8<Out>(rounded + at, count, aligned16(rounded), ws);
}
