// Normalised and rotated heads: x[T,H,D], w[D] -> y[T,H,D]: norm_rope.rs. A warp takes a head: the norm of rms_norm in
// f32, then the rotation of rope, one last rounding.
#include "rotate.cuh"
#include "scale.cuh"

KERNEL(128, 8) norm_rope(GLOBAL(const In) x, GLOBAL(const In) w, GLOBAL(const float) cosines, GLOBAL(const float) sines,
                         GLOBAL(Out) y, long long all_heads, int heads, int dim, float eps, int hf, int weight_offset,
                         int interleaved) {
    int lane = threadIdx.x % 32;
    long long head = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= all_heads) return;
    x = x + head * dim;
    y = y + head * dim;
    bool aligned = aligned16(x);
    Eight lanes = no_lanes();
    for (int at = lane * 8; at < dim; at += 256) add_squares(lanes, load_up_to8<In>(x + at, dim - at, aligned, 0.0f));
    Scale scale = scale_of(fold_lanes(lanes), dim, eps, hf, weight_offset);
    int half = dim / 2;
    long long token = head / heads;
    for (int i = lane; i < half; i += 32) {
        int first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
        float x1 = narrow<fp32>(scale.of(widen(static_cast<In>(x[first])), widen(static_cast<In>(w[first]))));
        float x2 = narrow<fp32>(scale.of(widen(static_cast<In>(x[second])), widen(static_cast<In>(w[second]))));
        rotate(x1, x2, cosines[token * half + i], sines[token * half + i]);
        y[first] = narrow<Out>(x1);
        y[second] = narrow<Out>(x2);
    }
}
