// Gradient of a table: dy[T,D], tokens[T], mask[T]?, carry[V,D] -> dw[V,D]: embedding_dw.rs. A warp takes a row of the table,
// and of each token that names it, in their order, adds the row of dy.
#include "reduce.cuh"

KERNEL(128, 8)
embedding_dw(GLOBAL(const In) dy, GLOBAL(const int) tokens, GLOBAL(const int) mask, int has_mask,
             GLOBAL(const float) carry, REREAD(float) dw, long long count, long long vocab, long long dim) {
    long long first = threadIdx.x % 32 * 8;
    long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= vocab) return;
    GLOBAL(const float) before = carry + row * dim;
    REREAD(float) sums = dw + row * dim;
    bool aligned = aligned16(before) && aligned16(sums);
    for (long long at = first; at < dim; at += 256) {
        store_up_to8<float>(sums + at, dim - at, aligned, load_up_to8<float>(before + at, dim - at, aligned, 0.0f));
    }
    for (long long from = 0; from < count; from += 32) {
        long long t = from + threadIdx.x % 32;
        bool named = false;
        if (t < count) {
            int token = tokens[t];
            named = token == row;
            if (has_mask) named = named && mask[t] != 0;
        }
        // Elements that a thread wrote it reads itself.
        for (unsigned left = __ballot_sync(WHOLE_WARP, named); left != 0; left &= left - 1) {
            GLOBAL(const In) gradient = dy + (from + __ffs(left) - 1) * dim;
            bool both = aligned && aligned16(gradient);
            for (long long at = first; at < dim; at += 256) {
                Eight sum = load_up_to8<float>(sums + at, dim - at, both, 0.0f);
                Eight v = load_up_to8<In>(gradient + at, dim - at, both, 0.0f);
#pragma unroll
                for (int j = 0; j < 8; j++) sum.v[j] = __fadd_rn(sum.v[j], v.v[j]);
                store_up_to8<float>(sums + at, dim - at, both, sum);
            }
        }
    }
}
