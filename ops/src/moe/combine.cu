// Weighted sum of expert outputs: x[R,N], row[T,K], weight[T,K], shared[T,N]? -> y[T,N]: combine.rs. A block row is a
// token; eight elements a thread, each a chain of fma over the rank, then + shared, last rounding.
#include "element.cuh"

KERNEL(128, 8) combine(GLOBAL(const In) x, GLOBAL(const int) row, GLOBAL(const float) weight, GLOBAL(const In) shared,
                       int has_shared, GLOBAL(Out) y, int chosen, long long n) {
    long long at = (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x) * 8, token = blockIdx.x;
    if (at >= n) return;
    Eight acc;
#pragma unroll
    for (int i = 0; i < 8; i++) acc.v[i] = 0.0f;
    for (int rank = 0; rank < chosen; rank++) {
        long long from = static_cast<long long>(row[token * chosen + rank]) * n + at;
        float w = weight[token * chosen + rank];
        Eight v = load_up_to8<In>(x + from, n - at, aligned16(x + from), 0.0f);
#pragma unroll
        for (int i = 0; i < 8; i++) acc.v[i] = __fmaf_rn(w, v.v[i], acc.v[i]);
    }
    long long to = token * n + at;
    if (has_shared) {
        Eight v = load_up_to8<In>(shared + to, n - at, aligned16(shared + to), 0.0f);
#pragma unroll
        for (int i = 0; i < 8; i++) acc.v[i] = __fadd_rn(acc.v[i], v.v[i]);
    }
    store_up_to8<Out>(y + to, n - at, aligned16(y + to), acc);
}
