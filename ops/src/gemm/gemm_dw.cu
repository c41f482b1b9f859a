// The gradient of the weight of a matrix product: x[T,K], dy[T,N], mask[T]?, carry[N,K]? -> dw[N,K]: gemm_dw.rs. A block
// takes a square of dw, a thread a square of sums, which are chains of fma over the tokens from carry or +0; last rounding.
// Rows that are no tokens are not read: their products are -0, which changes no sum. carry and dw may be one.
#include "element.cuh"

#define STEP 16

template <int SIDE, int T>
DEVICE void gemm_dw_tile(GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(const int) mask, int has_mask,
                         REREAD(const float) carry, int has_carry, REREAD(float) dw, long long tokens, long long n,
                         long long k) {
    // Rows of a tile in shared memory; groups of eight elements that each thread brings in for one step.
    const int ROW = SIDE + 4, GROUPS = SIDE / 8, LOADS = 2 * STEP * GROUPS / 256;
    SHARED(float, dys, 2 * STEP * ROW);
    SHARED(float, xs, 2 * STEP * ROW);
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    long long n0 = static_cast<long long>(blockIdx.y) * SIDE, k0 = static_cast<long long>(blockIdx.x) * SIDE;
    bool dy_aligned = aligned16(dy) && n % Pack<In>::COUNT == 0, x_aligned = aligned16(x) && k % Pack<In>::COUNT == 0;
    GLOBAL(const In) dy_square = dy + n0;
    GLOBAL(const In) x_square = x + k0;
    int rows = static_cast<int>(min(n - n0, static_cast<long long>(SIDE)));
    int columns = static_cast<int>(min(k - k0, static_cast<long long>(SIDE)));

    float sums[T * T];
#pragma unroll
    for (int i = 0; i < T; i++) {
        long long row = n0 + i / 4 * 64 + ty * 4 + i % 4;
#pragma unroll
        for (int j = 0; j < T; j++) {
            long long column = k0 + j / 4 * 64 + tx * 4 + j % 4;
            sums[i * T + j] = 0.0f;
            if (has_carry && row < n && column < k) sums[i * T + j] = carry[row * k + column];
        }
    }

    // -0 of dy times +0 of x.
    Eight next[LOADS];
    auto bring = [&](long long at) {
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            int task = threadIdx.x + 256 * l, group = task % GROUPS;
            long long t = at + task / GROUPS % STEP;
            bool of_dy = task < STEP * GROUPS, token = t < tokens;
            if (token && has_mask) token = mask[t] != 0;
            int count = token ? (of_dy ? rows : columns) - group * 8 : 0;
            if (of_dy) {
                next[l] = load_up_to8<In>(dy_square + t * n + group * 8, count, dy_aligned, -0.0f);
            } else {
                next[l] = load_up_to8<In>(x_square + t * k + group * 8, count, x_aligned, 0.0f);
            }
        }
    };
    auto put = [&](int buffer) {
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            int task = threadIdx.x + 256 * l, group = task % GROUPS, step = task / GROUPS % STEP;
            SHARED_POINTER(float) to = task < STEP * GROUPS ? dys : xs;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float v[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    v[j] = next[l].v[4 * i + j];
                    if (sizeof(In) == 4) v[j] = operand(v[j]);
                }
                store16(to + (buffer * STEP + step) * ROW + group * 8 + 4 * i,
                        make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                                   __float_as_uint(v[3])));
            }
        }
    };

    long long steps = (tokens + STEP - 1) / STEP;
    if (steps > 0) {
        bring(0);
        put(0);
    }
    __syncthreads();
    for (long long step = 0; step < steps; step++) {
        int buffer = static_cast<int>(step & 1);
        if (step + 1 < steps) bring((step + 1) * STEP);
#pragma unroll
        for (int t = 0; t < STEP; t++) {
            float a[T], b[T];
#pragma unroll
            for (int g = 0; g < T / 4; g++) {
                unpack(load16(dys + (buffer * STEP + t) * ROW + g * 64 + ty * 4), fp32(), a + 4 * g);
                unpack(load16(xs + (buffer * STEP + t) * ROW + g * 64 + tx * 4), fp32(), b + 4 * g);
            }
#pragma unroll
            for (int i = 0; i < T; i++) {
#pragma unroll
                for (int j = 0; j < T; j++) sums[i * T + j] = __fmaf_rn(a[i], b[j], sums[i * T + j]);
            }
        }
        if (step + 1 < steps) put(buffer ^ 1);
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < T; i++) {
        long long row = n0 + i / 4 * 64 + ty * 4 + i % 4;
        if (row >= n) continue;
#pragma unroll
        for (int j = 0; j < T; j++) {
            long long column = k0 + j / 4 * 64 + tx * 4 + j % 4;
            if (column < k) dw[row * k + column] = narrow<float>(sums[i * T + j]);
        }
    }
}

#define TILES(name, side, t, resident)                                                                                 \
    KERNEL(256, resident)                                                                                              \
    name(GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(const int) mask, int has_mask, REREAD(const float) carry,     \
         int has_carry, REREAD(float) dw, long long tokens, long long n, long long k) {                                \
        gemm_dw_tile<side, t>(x, dy, mask, has_mask, carry, has_carry, dw, tokens, n, k);                              \
    }

TILES(gemm_dw_tile128, 128, 8, 2)
TILES(gemm_dw_tile64, 64, 4, 4)
