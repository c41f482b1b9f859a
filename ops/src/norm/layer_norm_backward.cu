// Gradient of layer normalisation: x[R,N], w[N]?, dy[R,N] -> dx[R,N]: layer_norm_backward.rs. A warp takes a row: mean and
// scale as in layer_norm; then lanes(g) and lanes(g*h) of g = dy*w and h = (x - mean)*r; then every element by itself.
#include "moments.cuh"

struct Row {
    float mean, r;
    GLOBAL(const In) x;
    GLOBAL(const In) w;
    int has_w;
    GLOBAL(const In) dy;
    bool aligned;

    // The elements of h from `at` on, the first `count` of which there are.
    DEVICE Eight normed(long long at, long long count) const {
        Eight h = load_up_to8<In>(x + at, count, aligned, 0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) h.v[j] = __fmul_rn(__fsub_rn(h.v[j], mean), r);
        return h;
    }

    // Those of g.
    DEVICE Eight weighed(long long at, long long count) const {
        Eight g = load_up_to8<In>(dy + at, count, aligned, 0.0f);
        if (has_w) {
            Eight weights = load_up_to8<In>(w + at, count, aligned, 0.0f);
#pragma unroll
            for (int j = 0; j < 8; j++) g.v[j] = __fmul_rn(g.v[j], weights.v[j]);
        }
        return g;
    }
};

KERNEL(128, 8)
layer_norm_backward(GLOBAL(const In) x, GLOBAL(const In) w, int has_w, GLOBAL(const In) dy, GLOBAL(Out) dx,
                    long long rows, long long n, float eps) {
    long long first = threadIdx.x % 32 * 8;
    long long number = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (number >= rows) return;
    x = x + number * n;
    dy = dy + number * n;
    dx = dx + number * n;
    bool aligned = aligned16(x) && (!has_w || aligned16(w)) && aligned16(dy), aligned_out = aligned16(dx);
    Row row = {0.0f, 0.0f, x, w, has_w, dy, aligned};
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
    lanes = no_lanes();
    Eight products = no_lanes();
    for (long long at = first; at < n; at += 256) {
        Eight h = row.normed(at, n - at), g = row.weighed(at, n - at);
        add_elements(lanes, g, n - at);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j < n - at) products.v[j] = __fmaf_rn(g.v[j], h.v[j], products.v[j]);
        }
    }
    float a = mean_of(lanes, n), b = mean_of(products, n);
    for (long long at = first; at < n; at += 256) {
        Eight h = row.normed(at, n - at), g = row.weighed(at, n - at);
#pragma unroll
        for (int j = 0; j < 8; j++) h.v[j] = __fmul_rn(row.r, __fmaf_rn(-b, h.v[j], __fsub_rn(g.v[j], a)));
        store_up_to8<Out>(dx + at, n - at, aligned_out, h);
    }
}
