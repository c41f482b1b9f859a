// Residual sum and its normalisation: x[R,N], residual[R,N], w[N] -> sum[R,N], y[R,N]: add_rms_norm.rs. A warp takes a
// row. The norm reads the sum as it is stored, in a type of its own: each thread reads again what it wrote.
#include "scale.cuh"

template <class Sum>
DEVICE void add_rms_norm(GLOBAL(const In) x, GLOBAL(const In) residual, GLOBAL(const In) w, REREAD(Sum) sum,
                         GLOBAL(Out) y, long long rows, long long n, float eps, int hf, int weight_offset) {
    int lane = threadIdx.x % 32;
    long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    x = x + row * n;
    residual = residual + row * n;
    sum = sum + row * n;
    y = y + row * n;
    bool aligned = aligned16(x) && aligned16(residual) && aligned16(w);
    bool aligned_out = aligned16(y), aligned_sum = aligned16(sum);
    Eight lanes = no_lanes();
#pragma unroll 4
    for (long long at = lane * 8; at < n; at += 256) {
        Eight a = load_up_to8<In>(x + at, n - at, aligned, 0.0f);
        Eight b = load_up_to8<In>(residual + at, n - at, aligned, 0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) a.v[j] = widen(narrow<Sum>(__fadd_rn(a.v[j], b.v[j])));
        store_up_to8<Sum>(sum + at, n - at, aligned_sum, a);
        add_squares(lanes, a);
    }
    Scale scale = scale_of(fold_lanes(lanes), n, eps, hf, weight_offset);
#pragma unroll 4
    for (long long at = lane * 8; at < n; at += 256) {
        Eight v = load_up_to8<Sum>(sum + at, n - at, aligned_sum, 0.0f);
        Eight weights = load_up_to8<In>(w + at, n - at, aligned, 0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) v.v[j] = scale.of(v.v[j], weights.v[j]);
        store_up_to8<Out>(y + at, n - at, aligned_out, v);
    }
}

#define SUMS(type)                                                                                                     \
    KERNEL(128, 8)                                                                                                     \
    add_rms_norm_##type(GLOBAL(const In) x, GLOBAL(const In) residual, GLOBAL(const In) w, REREAD(type) sum,           \
                        GLOBAL(Out) y, long long rows, long long n, float eps, int hf, int weight_offset) {            \
        add_rms_norm<type>(x, residual, w, sum, y, rows, n, eps, hf, weight_offset);                                   \
    }

SUMS(bf16)
SUMS(fp16)
SUMS(fp32)
