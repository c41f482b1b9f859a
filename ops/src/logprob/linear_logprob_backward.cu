// Gradients of log-probabilities from tiles of logits: linear_logprob_backward.rs. The product of some rows with some
// columns of the vocabulary stands in the workspace; here it becomes its gradient, as logprob_backward.cu has it, of the
// type of x, and beside it the transpose, so that gemm_dw can sum over either. The rest is sums of dx by segment.
#include "math.cuh"

#define SIDE 32

KERNEL(256, 4) linear_logprob_backward_gradients(GLOBAL(const float) logits, GLOBAL(const int) target,
                                                 GLOBAL(const float) lse, GLOBAL(const float) dlogprob,
                                                 GLOBAL(const float) dlse, int has_dlse, GLOBAL(In) gradients,
                                                 GLOBAL(In) turned, long long rows, long long width, long long from,
                                                 float scale) {
    // A column beside the square, so that neither its rows nor its columns meet in a bank.
    SHARED(float, square, SIDE * (SIDE + 1));
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    long long first_column = static_cast<long long>(blockIdx.x) * SIDE;
    long long first_row = static_cast<long long>(blockIdx.y) * SIDE;
    long long column = first_column + x;
#pragma unroll
    for (int i = 0; i < SIDE; i += 8) {
        long long row = first_row + y + i;
        if (row < rows && column < width) {
            int index = target[row];
            float own = index < 0 ? 0.0f : dlogprob[row];
            float c = __fsub_rn(has_dlse ? dlse[row] : 0.0f, own);
            float p = exponential_or_nothing(__fsub_rn(__fmul_rn(logits[row * width + column], scale), lse[row]));
            float g = from + column == index ? __fmaf_rn(p, c, own) : __fmul_rn(p, c);
            In value = narrow<In>(__fmul_rn(g, scale));
            gradients[row * width + column] = value;
            square[(y + i) * (SIDE + 1) + x] = widen(value);
        }
    }
    __syncthreads();
    long long row = first_row + x;
#pragma unroll
    for (int i = 0; i < SIDE; i += 8) {
        column = first_column + y + i;
        // It was widened from what it becomes.
        if (row < rows && column < width) turned[column * rows + row] = narrow<In>(square[x * (SIDE + 1) + y + i]);
    }
}

// Two neighbours of the tree of segments.
KERNEL(256, 8) linear_logprob_backward_join(GLOBAL(const float) earlier, GLOBAL(float) sums, long long count) {
    long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (at < count) sums[at] = __fadd_rn(earlier[at], sums[at]);
}

KERNEL(256, 8) linear_logprob_backward_end(GLOBAL(const float) sums, GLOBAL(Out) dx, long long count) {
    long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (at < count) dx[at] = narrow<Out>(sums[at]);
}
