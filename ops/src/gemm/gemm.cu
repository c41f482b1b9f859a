// Matrix product with a transposed weight: x[M,K], w[N,K], bias[N]? -> y[M,N]: gemm.rs. k is cut in `segments` (8, or
// the subtree of one tensor-parallel rank) of `length` elements, a multiple of 16; each is a chain of fma from +0; the
// sums are joined as ((s0+s1)+(s2+s3)) + ((s4+s5)+(s6+s7)), bias is added in f32, last rounding.
//
// Two kernels: tiles for many rows, those of tile.cuh; and one for up to 16 rows, where the eight warps of a block take one
// segment each and w is read once, at the speed of memory.
#include "tile.cuh"

TILES(gemm_tile128, 128, 128, 8, 8, 2, false)
TILES(gemm_tile64, 64, 64, 4, 4, 4, false)

// Up to `rows` rows of x, 32 * PER rows of w a block. A warp copies `bytes` of its segment of every row of w at a time,
// while `stages - 1` copies before are under way; a lane then goes along its own rows of w, and x is read by all lanes
// at once. Rows start at multiples of 16 bytes.
template <int ROWS, int PER, int BYTES, int STAGES>
DEVICE void gemm_skinny(SHARED_POINTER(uint4) room, SHARED_POINTER(float) wide, GLOBAL(const In) x, GLOBAL(const In) w,
                        GLOBAL(const In) bias, int has_bias, GLOBAL(Out) y, int m, long long n, long long k,
                        long long length, int segments) {
    const int PACK = Pack<In>::COUNT, CHUNK = BYTES / sizeof(In), PIECES = BYTES / 16;
    // 16 bytes more, so that eight lanes that read 16 bytes each meet no bank twice.
    const int W_ROW = CHUNK + PACK, W_STAGE = 32 * PER * W_ROW, X_STAGE = ROWS * CHUNK;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    long long n0 = static_cast<long long>(blockIdx.x) * (32 * PER);
    SHARED_POINTER(In) w_stages = as_elements<In>(room) + warp * STAGES * (W_STAGE + X_STAGE);
    SHARED_POINTER(In) x_stages = w_stages + STAGES * W_STAGE;
    SHARED_POINTER(float) x_wide = wide + warp * ROWS * CHUNK;
    long long from = min(k, warp * length), to = warp < segments ? min(k, from + length) : from;
    int chunks = static_cast<int>((to - from + CHUNK - 1) / CHUNK);

    float sums[ROWS * PER];
#pragma unroll
    for (int i = 0; i < ROWS * PER; i++) sums[i] = 0.0f;

    auto bring = [&](int chunk) {
        if (chunk < chunks) {
            int stage = chunk % STAGES;
            long long at = from + static_cast<long long>(chunk) * CHUNK;
#pragma unroll
            for (int i = 0; i < PER * PIECES; i++) {
                int row = (lane + 32 * i) / PIECES, column = (lane + 32 * i) % PIECES * PACK;
                if (n0 + row < n && at + column < to) {
                    async_copy16(w_stages + stage * W_STAGE + row * W_ROW + column, w + (n0 + row) * k + at + column);
                }
            }
#pragma unroll
            for (int i = 0; i < (ROWS * PIECES + 31) / 32; i++) {
                int row = (lane + 32 * i) / PIECES, column = (lane + 32 * i) % PIECES * PACK;
                if (row < m && row < ROWS && at + column < to) {
                    async_copy16(x_stages + stage * X_STAGE + row * CHUNK + column, x + row * k + at + column);
                }
            }
        }
        // An empty group counts as well.
        async_commit();
    };

    for (int chunk = 0; chunk < STAGES - 1; chunk++) bring(chunk);
    for (int chunk = 0; chunk < chunks; chunk++) {
        int stage = chunk % STAGES;
        int count = static_cast<int>(min(static_cast<long long>(CHUNK), to - from - static_cast<long long>(chunk) * CHUNK));
        async_wait<STAGES - 2>();
        // Every lane's copies have arrived, and every lane is done with the stage and the x_wide of the chunk before.
        __syncwarp();
        bring(chunk + STAGES - 1);
#pragma unroll
        for (int i = 0; i < (ROWS * PIECES + 31) / 32; i++) {
            int row = (lane + 32 * i) / PIECES, column = (lane + 32 * i) % PIECES * PACK;
            if (row < ROWS && column < count) {
                float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
                if (row < m) unpack(load16(x_stages + stage * X_STAGE + row * CHUNK + column), In(), v);
#pragma unroll
                for (int j = 0; j < PACK; j += 4) {
                    if (sizeof(In) == 4) {
                        for (int q = 0; q < 4; q++) v[j + q] = operand(v[j + q]);
                    }
                    store16(x_wide + row * CHUNK + column + j,
                            make_uint4(__float_as_uint(v[j]), __float_as_uint(v[j + 1]), __float_as_uint(v[j + 2]),
                                       __float_as_uint(v[j + 3])));
                }
            }
        }
        __syncwarp();
        for (int at = 0; at < count; at += PACK) {
            float own[PER][8];
#pragma unroll
            for (int p = 0; p < PER; p++) {
                if (n0 + p * 32 + lane < n) {
                    unpack(load16(w_stages + stage * W_STAGE + (p * 32 + lane) * W_ROW + at), In(), own[p]);
                }
#pragma unroll
                for (int j = 0; j < PACK; j++) {
                    if (sizeof(In) == 4) own[p][j] = operand(own[p][j]);
                }
            }
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                float all[8];
#pragma unroll
                for (int j = 0; j < PACK; j += 4) unpack(load16(x_wide + row * CHUNK + at + j), fp32(), all + j);
#pragma unroll
                for (int j = 0; j < PACK; j++) {
#pragma unroll
                    for (int p = 0; p < PER; p++) {
                        sums[row * PER + p] = __fmaf_rn(all[j], own[p][j], sums[row * PER + p]);
                    }
                }
            }
        }
    }

    // The copies are over; their room holds the sums of all segments now.
    SHARED_POINTER(float) segment_sums = as_elements<float>(room);
    __syncthreads();
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
#pragma unroll
        for (int p = 0; p < PER; p++) segment_sums[(warp * ROWS + row) * (32 * PER) + p * 32 + lane] = sums[row * PER + p];
    }
    __syncthreads();
    for (int task = threadIdx.x; task < ROWS * 32 * PER; task += blockDim.x) {
        int row = task / (32 * PER);
        long long column = n0 + task % (32 * PER);
        if (row >= m || column >= n) continue;
        float parts[8];
#pragma unroll
        for (int s = 0; s < 8; s++) parts[s] = segment_sums[s * ROWS * 32 * PER + task];
#pragma unroll
        for (int width = 1; width < 8; width *= 2) {
#pragma unroll
            for (int s = 0; s < 8; s += 2 * width) {
                if (width < segments) parts[s] = __fadd_rn(parts[s], parts[s + width]);
            }
        }
        float sum = parts[0];
        if (has_bias) sum = __fadd_rn(sum, widen(static_cast<In>(bias[column])));
        y[static_cast<long long>(row) * n + column] = narrow<Out>(sum);
    }
}

#define SKINNY(name, rows, per, bytes, stages)                                                                         \
    KERNEL(256, 1)                                                                                                     \
    name(GLOBAL(const In) x, GLOBAL(const In) w, GLOBAL(const In) bias, int has_bias, GLOBAL(Out) y, long long m,      \
         long long n, long long k, long long length, int segments) {                                                   \
        SHARED(float, wide, 8 * rows * bytes / sizeof(In));                                                            \
        SHARED_REST(uint4, room);                                                                                      \
        gemm_skinny<rows, per, bytes, stages>(room, wide, x, w, bias, has_bias, y, static_cast<int>(m), n, k, length,  \
                                              segments);                                                               \
    }

// The host knows these numbers too: device/gemm.rs. Each stays below the 163 KiB that a block may have on sm_80.
SKINNY(gemm_skinny1, 1, 1, 128, 4)
SKINNY(gemm_skinny4, 4, 1, 128, 3)
SKINNY(gemm_skinny8, 8, 1, 128, 3)
SKINNY(gemm_skinny16, 16, 2, 64, 3)

// One row of x for each of some choices of experts, whose weights stand one behind the other: y[P,N] = x[P / every,K] *
// w[expert[P],N,K]. A block row is a choice.
KERNEL(256, 1)
gemm_experts(GLOBAL(const In) x, GLOBAL(const int) expert, long long every, GLOBAL(const In) w, GLOBAL(const In) bias,
             int has_bias, GLOBAL(Out) y, long long n, long long k, long long length, int segments) {
    SHARED(float, wide, 8 * 128 / sizeof(In));
    SHARED_REST(uint4, room);
    long long choice = blockIdx.y, number = expert[choice];
    if (has_bias) bias = bias + number * n;
    gemm_skinny<1, 1, 128, 4>(room, wide, x + choice / every * k, w + number * n * k, bias, has_bias, y + choice * n, 1, n, k,
                              length, segments);
}
