// Gradient of the weight of normalised and rotated heads: x[T,H,D], dy[T,H,D], mask[T]?, carry[64,D]? -> dw[64,D]:
// norm_rope_dw.rs. A block takes a chain and up to 2048 columns, a thread eight of them; each warp makes r of a head.
#include "scale.cuh"
#include "tokens.cuh"
#include "turned.cuh"

KERNEL(256, 4)
norm_rope_dw(GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(const float) cosines, GLOBAL(const float) sines,
             GLOBAL(const int) mask, int has_mask, GLOBAL(const float) carry, int has_carry, GLOBAL(float) dw,
             long long all_heads, int heads, int dim, int start, float eps, int hf, int interleaved) {
    int chain = blockIdx.x, first = threadIdx.x % 32 * 8, half = dim / 2;
    int at = (blockIdx.y * blockDim.x + threadIdx.x) * 8, count = dim - at;
    Eight sums = carried(carry, has_carry, static_cast<long long>(chain) * dim + at, count);
    each_row(Tokens{mask, has_mask, all_heads, heads, start}, chain, [&](long long head) {
        GLOBAL(const In) own = x + head * dim;
        long long angles = head / heads * half;
        Turned turned{dy + head * dim, cosines + angles, sines + angles, half, interleaved};
        bool aligned = aligned16(own);
        Eight lanes = no_lanes();
        for (int i = first; i < dim; i += 256) add_squares(lanes, load_up_to8<In>(own + i, dim - i, aligned, 0.0f));
        Scale scale = scale_of(fold_lanes(lanes), dim, eps, hf, 0);
        if (count <= 0) return;
        Eight v = load_up_to8<In>(own + at, count, aligned, 0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j < count) sums.v[j] = __fmaf_rn(turned.of(at + j), scale.normed(v.v[j]), sums.v[j]);
        }
    });
    GLOBAL(float) to = dw + static_cast<long long>(chain) * dim + at;
    if (count > 0) store_up_to8<float>(to, count, aligned16(to), sums);
}
