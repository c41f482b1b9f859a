// Root mean square normalisation: x[R,N], w[N] -> y[R,N]: rms_norm.rs. A warp takes a row: lanes(x*x), each lane a
// chain of fma; then every element by itself. A row of up to 256 * BLOCKS elements stays in registers between the two.
#include "scale.cuh"

template <int BLOCKS>
DEVICE void kept_rows(GLOBAL(const In) x, GLOBAL(const In) w, GLOBAL(Out) y, long long rows, long long n, float eps, int hf,
                      int weight_offset) {
    int lane = threadIdx.x % 32;
    long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    x = x + row * n;
    y = y + row * n;
    bool whole = n % 8 == 0 && aligned16(x) && aligned16(w) && aligned16(y);
    Eight lanes = no_lanes();
    if (whole) {
        Stored8<In> kept[BLOCKS];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            int at = b * 256 + lane * 8;
            if (at < n) kept[b] = load_stored_once<In>(x + at);
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if (b * 256 + lane * 8 < n) add_squares(lanes, widen_stored<In>(kept[b]));
        }
        Scale scale = scale_of(fold_lanes(lanes), n, eps, hf, weight_offset);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            int at = b * 256 + lane * 8;
            if (at < n) {
                Eight v = widen_stored<In>(kept[b]), weights = load8<In>(w + at);
#pragma unroll
                for (int j = 0; j < 8; j++) v.v[j] = scale.of(v.v[j], weights.v[j]);
                store_eight<Out>(y + at, v);
            }
        }
        return;
    }
    for (long long at = lane * 8; at < n; at += 256) {
        // The pad +0 adds +0 to a lane that is never -0.
        add_squares(lanes, load_some<In>(x + at, n - at, 0.0f));
    }
    Scale scale = scale_of(fold_lanes(lanes), n, eps, hf, weight_offset);
    for (long long at = lane; at < n; at += 32) {
        y[at] = narrow<Out>(scale.of(widen(static_cast<In>(x[at])), widen(static_cast<In>(w[at]))));
    }
}

#define ROWS(name, blocks, resident)                                                                                   \
    KERNEL(128, resident)                                                                                              \
    name(GLOBAL(const In) x, GLOBAL(const In) w, GLOBAL(Out) y, long long rows, long long n, float eps, int hf,        \
         int weight_offset) {                                                                                          \
        kept_rows<blocks>(x, w, y, rows, n, eps, hf, weight_offset);                                                   \
    }

// Rows of up to 1024, 4096 and 8192 elements; f32, which takes twice the registers, half of that.
ROWS(rms_norm_short, 8 / sizeof(In), 8)
ROWS(rms_norm_middle, 32 / sizeof(In), 4)
ROWS(rms_norm_wide, 64 / sizeof(In), 3)

// Rows of any length, read twice.
KERNEL(128, 8) rms_norm_long(GLOBAL(const In) x, GLOBAL(const In) w, GLOBAL(Out) y, long long rows, long long n, float eps,
                             int hf, int weight_offset) {
    int lane = threadIdx.x % 32;
    long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    x = x + row * n;
    y = y + row * n;
    bool aligned = aligned16(x) && aligned16(w);
    bool aligned_out = aligned16(y);
    Eight lanes = no_lanes();
#pragma unroll 4
    for (long long at = lane * 8; at < n; at += 256) add_squares(lanes, load_up_to8<In>(x + at, n - at, aligned, 0.0f));
    Scale scale = scale_of(fold_lanes(lanes), n, eps, hf, weight_offset);
#pragma unroll 4
    for (long long at = lane * 8; at < n; at += 256) {
        Eight v = load_up_to8<In>(x + at, n - at, aligned, 0.0f);
        Eight weights = load_up_to8<In>(w + at, n - at, aligned, 0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) v.v[j] = scale.of(v.v[j], weights.v[j]);
        store_up_to8<Out>(y + at, n - at, aligned_out, v);
    }
}
