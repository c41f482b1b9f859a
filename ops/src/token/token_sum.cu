// A sum over tokens: x[R,N], mask[R]?, carry[64,N]? -> sum[64,N]: token_sum.rs. A block takes a chain and up to 2048 columns,
// a thread eight of them.
#include "tokens.cuh"

KERNEL(256, 4)
token_sum(GLOBAL(const In) x, GLOBAL(const int) mask, int has_mask, GLOBAL(const float) carry, int has_carry,
          GLOBAL(float) sum, long long rows, long long n, int start) {
    int chain = blockIdx.x;
    long long at = (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x) * 8, count = n - at;
    Eight sums = carried(carry, has_carry, chain * n + at, count);
    each_row(Tokens{mask, has_mask, rows, 1, start}, chain, [&](long long row) {
        GLOBAL(const In) from = x + row * n + at;
        if (count <= 0) return;
        Eight v = load_up_to8<In>(from, count, aligned16(from), 0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) sums.v[j] = __fadd_rn(sums.v[j], v.v[j]);
    });
    GLOBAL(float) to = sum + chain * n + at;
    if (count > 0) store_up_to8<float>(to, count, aligned16(to), sums);
}
