// Gradient of the weight of root mean square normalisation: x[R,N], dy[R,N], mask[R]?, carry[64,N]? -> dw[64,N]:
// rms_norm_dw.rs. A block takes a chain and up to 2048 columns, a thread eight of them; each warp makes r of a row.
#include "scale.cuh"
#include "tokens.cuh"

KERNEL(256, 4)
rms_norm_dw(GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(const int) mask, int has_mask, GLOBAL(const float) carry,
            int has_carry, GLOBAL(float) dw, long long rows, long long n, int start, float eps, int hf) {
    int chain = blockIdx.x;
    long long first = threadIdx.x % 32 * 8;
    long long at = (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x) * 8, count = n - at;
    Eight sums = carried(carry, has_carry, chain * n + at, count);
    each_row(Tokens{mask, has_mask, rows, 1, start}, chain, [&](long long row) {
        GLOBAL(const In) own = x + row * n;
        GLOBAL(const In) gradient = dy + row * n;
        bool aligned = aligned16(own) && aligned16(gradient);
        Eight lanes = no_lanes();
        for (long long i = first; i < n; i += 256) add_squares(lanes, load_up_to8<In>(own + i, n - i, aligned, 0.0f));
        Scale scale = scale_of(fold_lanes(lanes), n, eps, hf, 0);
        if (count <= 0) return;
        Eight v = load_up_to8<In>(own + at, count, aligned, 0.0f);
        Eight g = load_up_to8<In>(gradient + at, count, aligned, 0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) sums.v[j] = __fmaf_rn(g.v[j], scale.normed(v.v[j]), sums.v[j]);
    });
    GLOBAL(float) to = dw + chain * n + at;
    if (count > 0) store_up_to8<float>(to, count, aligned16(to), sums);
}
