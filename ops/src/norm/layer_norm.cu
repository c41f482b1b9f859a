// Layer normalisation: x[R,N], w[N]?, bias[N]? -> y[R,N]: layer_norm.rs. A warp takes a row: lanes(x), then lanes(d*d) of
// d = x - mean, each lane a chain of fma; then every element by itself. A row of up to 256 * BLOCKS elements stays in
// registers between the three.
#include "moments.cuh"

struct Row {
    float mean, r;
    GLOBAL(const In) w;
    int has_w;
    GLOBAL(const In) bias;
    int has_bias;

    // The elements v from `at` on, before the last rounding; behind the first `count` of them there are none.
    DEVICE void finish(Eight &v, long long at, long long count, bool aligned) const {
#pragma unroll
        for (int j = 0; j < 8; j++) v.v[j] = __fmul_rn(__fsub_rn(v.v[j], mean), r);
        if (has_w) {
            Eight weights = load_up_to8<In>(w + at, count, aligned, 0.0f);
#pragma unroll
            for (int j = 0; j < 8; j++) v.v[j] = __fmul_rn(v.v[j], weights.v[j]);
        }
        if (has_bias) {
            Eight offsets = load_up_to8<In>(bias + at, count, aligned, 0.0f);
#pragma unroll
            for (int j = 0; j < 8; j++) v.v[j] = __fadd_rn(v.v[j], offsets.v[j]);
        }
    }

    DEVICE bool aligned() const { return (!has_w || aligned16(w)) && (!has_bias || aligned16(bias)); }
};

// A row of any length, read three times.
DEVICE void read_row(GLOBAL(const In) x, Row row, GLOBAL(Out) y, long long n, float eps) {
    long long first = threadIdx.x % 32 * 8;
    bool aligned = aligned16(x), aligned_row = row.aligned(), aligned_out = aligned16(y);
    Eight lanes = no_lanes();
#pragma unroll 4
    for (long long at = first; at < n; at += 256) add_elements(lanes, load_up_to8<In>(x + at, n - at, aligned, 0.0f), n - at);
    row.mean = mean_of(lanes, n);
    lanes = no_lanes();
#pragma unroll 4
    for (long long at = first; at < n; at += 256) {
        add_deviations(lanes, load_up_to8<In>(x + at, n - at, aligned, 0.0f), row.mean, n - at);
    }
    row.r = root_of(lanes, n, eps);
    for (long long at = first; at < n; at += 256) {
        Eight v = load_up_to8<In>(x + at, n - at, aligned, 0.0f);
        row.finish(v, at, n - at, aligned_row);
        store_up_to8<Out>(y + at, n - at, aligned_out, v);
    }
}

// A row of whole vectors that a warp keeps.
template <int BLOCKS> DEVICE void keep_row(GLOBAL(const In) x, Row row, GLOBAL(Out) y, long long n, float eps) {
    int first = threadIdx.x % 32 * 8;
    Stored8<In> kept[BLOCKS];
    Eight lanes = no_lanes();
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        if (b * 256 + first < n) kept[b] = load_stored_once<In>(x + (b * 256 + first));
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        if (b * 256 + first < n) add_elements(lanes, widen_stored<In>(kept[b]), 8);
    }
    row.mean = mean_of(lanes, n);
    lanes = no_lanes();
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        if (b * 256 + first < n) add_deviations(lanes, widen_stored<In>(kept[b]), row.mean, 8);
    }
    row.r = root_of(lanes, n, eps);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        int at = b * 256 + first;
        if (at < n) {
            Eight v = widen_stored<In>(kept[b]);
            row.finish(v, at, 8, true);
            store_eight<Out>(y + at, v);
        }
    }
}

#define ROWS(name, blocks, resident)                                                                                   \
    KERNEL(128, resident)                                                                                              \
    name(GLOBAL(const In) x, GLOBAL(const In) w, int has_w, GLOBAL(const In) bias, int has_bias, GLOBAL(Out) y,        \
         long long rows, long long n, float eps) {                                                                     \
        long long number = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;                  \
        if (number >= rows) return;                                                                                    \
        Row row = {0.0f, 0.0f, w, has_w, bias, has_bias};                                                              \
        x = x + number * n;                                                                                            \
        y = y + number * n;                                                                                            \
        if (blocks > 0 && n % 8 == 0 && aligned16(x) && row.aligned() && aligned16(y)) {                               \
            keep_row<(blocks > 0 ? blocks : 1)>(x, row, y, n, eps);                                                    \
        } else {                                                                                                       \
            read_row(x, row, y, n, eps);                                                                               \
        }                                                                                                              \
    }

// Rows of up to 1024, 4096 and 8192 elements; f32, which takes twice the registers, half of that.
ROWS(layer_norm_short, 8 / sizeof(In), 8)
ROWS(layer_norm_middle, 32 / sizeof(In), 4)
ROWS(layer_norm_wide, 64 / sizeof(In), 3)
// Longer ones.
ROWS(layer_norm_long, 0, 8)
