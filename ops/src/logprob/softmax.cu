// Softmax: x[R,N] -> y[R,N]: softmax.rs. A block takes a row: its denominator, then weight / sum, last rounding.
#include "denominator.cuh"

KERNEL(256, 4) softmax(GLOBAL(const In) x, GLOBAL(Out) y, long long n) {
    SHARED(float, room, 8);
    x = x + static_cast<long long>(blockIdx.x) * n;
    y = y + static_cast<long long>(blockIdx.x) * n;
    Denominator d = denominator(x, n, 1.0f, room);
    bool aligned = aligned16(x), aligned_out = aligned16(y);
    for (long long at = threadIdx.x * 8; at < n; at += 8 * blockDim.x) {
        Eight v = load_up_to8<In>(x + at, n - at, aligned, -INFINITE);
#pragma unroll
        for (int j = 0; j < 8; j++) v.v[j] = share(v.v[j], d);
        store_up_to8<Out>(y + at, n - at, aligned_out, v);
    }
}
