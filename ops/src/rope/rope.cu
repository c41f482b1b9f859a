// Rotary position embedding: x[T,H,D] -> y[T,H,D]: rope.rs. Cosines and sines come from the host, [T,D/2] each,
// correctly rounded. y1 = fma(x1, c, -(x2*s)), y2 = fma(x2, c, x1*s), last rounding.
#include "rotate.cuh"

// blockIdx.x is a token. Eight pairs a thread; pairs (i, i + D/2), or (2i, 2i + 1) where `interleaved`.
KERNEL(128, 8) rope(GLOBAL(const In) x, GLOBAL(const float) cosines, GLOBAL(const float) sines, GLOBAL(Out) y, int heads,
                    int dim, int interleaved) {
    int half = dim / 2, groups = (half + 7) / 8;
    long long token = blockIdx.x;
    GLOBAL(const float) c = cosines + token * half;
    GLOBAL(const float) s = sines + token * half;
    for (int task = threadIdx.x; task < heads * groups; task += blockDim.x) {
        int at = task % groups * 8, count = half - at;
        long long head = (token * heads + task / groups) * dim;
        Eight cosine = load_up_to8<fp32>(c + at, count, aligned16(c + at), 0.0f);
        Eight sine = load_up_to8<fp32>(s + at, count, aligned16(s + at), 0.0f);
        long long first = head + (interleaved ? 2 * at : at), second = interleaved ? first + 8 : first + half;
        int first_count = interleaved ? min(2 * count, 8) : count, second_count = interleaved ? 2 * count - 8 : count;
        Eight a = load_up_to8<In>(x + first, first_count, aligned16(x + first), 0.0f);
        Eight b = no_lanes();
        if (second_count > 0) b = load_up_to8<In>(x + second, second_count, aligned16(x + second), 0.0f);
        rotate_pairs(a, b, cosine, sine, interleaved);
        store_up_to8<Out>(y + first, first_count, aligned16(y + first), a);
        if (second_count > 0) store_up_to8<Out>(y + second, second_count, aligned16(y + second), b);
    }
}
