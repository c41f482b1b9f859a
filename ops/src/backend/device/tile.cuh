// Tiles of a matrix product for many rows: gemm.rs and, where the factors of an output are one of the COLUMNS of w,
// gemm_dx.rs. A thread holds a square of sums and goes through the segments one by one.
#pragma once
#include "element.cuh"

#define STEP 16

// One of BM * BN sums for each thread's TM * TN squares; 256 threads as 16 x 16.
template <int BM, int BN, int TM, int TN> struct Tile {
    static const int SIDE = TM * TN;
    // A row of a tile in shared memory, padded so that transposed stores meet fewer banks twice.
    static const int X_ROW = BM + 4, W_ROW = BN + 4;
    // Groups of eight elements that each thread brings in for one step.
    static const int LOADS = (BM + BN) * (STEP / 8) / 256;
};

template <int BM, int BN, int TM, int TN, bool COLUMNS>
DEVICE void gemm_tile(GLOBAL(const In) x, GLOBAL(const In) w, GLOBAL(const In) bias, int has_bias, GLOBAL(Out) y, long long m,
                      long long n, long long k, long long length, int segments) {
    typedef Tile<BM, BN, TM, TN> Shape;
    SHARED(float, xs, 2 * STEP * Shape::X_ROW);
    SHARED(float, ws, 2 * STEP * Shape::W_ROW);
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    long long m0 = static_cast<long long>(blockIdx.y) * BM, n0 = static_cast<long long>(blockIdx.x) * BN;
    bool aligned = aligned16(x) && aligned16(w) && k % Pack<In>::COUNT == 0;
    if (COLUMNS) aligned = aligned && n % Pack<In>::COUNT == 0;

    float sums[Shape::SIDE];
    // Sums of finished subtrees of one, two and four segments. They are needed eight times in all, so they lie in local
    // memory.
    float held[3 * Shape::SIDE];
#pragma unroll
    for (int i = 0; i < Shape::SIDE; i++) sums[i] = 0.0f;

    // Behind the end of k, products are -0, which changes no sum: -0 of x times +0 of w.
    Eight next[Shape::LOADS];
    auto bring = [&](long long at) {
#pragma unroll
        for (int l = 0; l < Shape::LOADS; l++) {
            int task = threadIdx.x + 256 * l;
            bool left = task < BM * 2;
            if (COLUMNS && !left) {
                // Eight outputs of one step.
                int step = (task - BM * 2) / (BN / 8), output = (task - BM * 2) % (BN / 8) * 8;
                long long count = at + step < k ? n - n0 - output : 0;
                next[l] = load_up_to8<In>(w + (at + step) * n + n0 + output, count, aligned, 0.0f);
                continue;
            }
            int row = left ? task / 2 : task / 2 - BM;
            long long column = at + task % 2 * 8, rows = left ? m - m0 : n - n0;
            long long count = row < rows ? k - column : 0;
            float pad = left ? -0.0f : 0.0f;
            if (aligned && count >= 8) {
                if (left) {
                    next[l] = load8<In>(x + (m0 + row) * k + column);
                } else {
                    next[l] = load8<In>(w + (n0 + row) * k + column);
                }
            } else if (left) {
                next[l] = load_some<In>(x + (m0 + row) * k + column, count, pad);
            } else {
                next[l] = load_some<In>(w + (n0 + row) * k + column, count, pad);
            }
        }
    };
    auto put = [&](int buffer) {
#pragma unroll
        for (int l = 0; l < Shape::LOADS; l++) {
            int task = threadIdx.x + 256 * l;
            bool left = task < BM * 2;
            if (COLUMNS && !left) {
                int step = (task - BM * 2) / (BN / 8), output = (task - BM * 2) % (BN / 8) * 8;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float v[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) v[j] = sizeof(In) == 4 ? operand(next[l].v[4 * i + j]) : next[l].v[4 * i + j];
                    store16(ws + (buffer * STEP + step) * Shape::W_ROW + output + 4 * i,
                            make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                                       __float_as_uint(v[3])));
                }
                continue;
            }
            int row = left ? task / 2 : task / 2 - BM, column = task % 2 * 8;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float v = sizeof(In) == 4 ? operand(next[l].v[i]) : next[l].v[i];
                if (left) {
                    xs[(buffer * STEP + column + i) * Shape::X_ROW + row] = v;
                } else {
                    ws[(buffer * STEP + column + i) * Shape::W_ROW + row] = v;
                }
            }
        }
    };

    long long steps = (k + STEP - 1) / STEP, steps_of_segment = length / STEP;
    int segment = 0;
    // Joins the sums of a finished segment with those before it, as far as they are whole subtrees.
    auto finish = [&]() {
        int level = 0;
#pragma unroll 1
        for (; segment >> level & 1; level++) {
#pragma unroll
            for (int i = 0; i < Shape::SIDE; i++) sums[i] = __fadd_rn(held[level * Shape::SIDE + i], sums[i]);
        }
        segment++;
        if (segment < segments) {
#pragma unroll
            for (int i = 0; i < Shape::SIDE; i++) {
                held[level * Shape::SIDE + i] = sums[i];
                sums[i] = 0.0f;
            }
        }
    };

    if (steps > 0) {
        bring(0);
        put(0);
    }
    __syncthreads();
    long long left_of_segment = steps_of_segment;
    for (long long step = 0; step < steps; step++) {
        int buffer = static_cast<int>(step & 1);
        if (step + 1 < steps) bring((step + 1) * STEP);
#pragma unroll
        for (int kk = 0; kk < STEP; kk++) {
            float a[TM], b[TN];
#pragma unroll
            for (int g = 0; g < TM / 4; g++) {
                unpack(load16(xs + (buffer * STEP + kk) * Shape::X_ROW + g * 64 + ty * 4), fp32(), a + 4 * g);
            }
#pragma unroll
            for (int g = 0; g < TN / 4; g++) {
                unpack(load16(ws + (buffer * STEP + kk) * Shape::W_ROW + g * 64 + tx * 4), fp32(), b + 4 * g);
            }
#pragma unroll
            for (int i = 0; i < TM; i++) {
#pragma unroll
                for (int j = 0; j < TN; j++) sums[i * TN + j] = __fmaf_rn(a[i], b[j], sums[i * TN + j]);
            }
        }
        if (step + 1 < steps) put(buffer ^ 1);
        left_of_segment--;
        if (left_of_segment == 0 || step + 1 == steps) {
            finish();
            left_of_segment = steps_of_segment;
        }
        __syncthreads();
    }
    while (segment < segments) finish();

#pragma unroll
    for (int i = 0; i < TM; i++) {
        long long row = m0 + i / 4 * 64 + ty * 4 + i % 4;
        if (row >= m) continue;
#pragma unroll
        for (int j = 0; j < TN; j++) {
            long long column = n0 + j / 4 * 64 + tx * 4 + j % 4;
            if (column >= n) continue;
            float sum = sums[i * TN + j];
            if (has_bias) sum = __fadd_rn(sum, widen(static_cast<In>(bias[column])));
            y[row * n + column] = narrow<Out>(sum);
        }
    }
}

#define TILES(name, bm, bn, tm, tn, resident, columns)                                                                 \
    KERNEL(256, resident)                                                                                              \
    name(GLOBAL(const In) x, GLOBAL(const In) w, GLOBAL(const In) bias, int has_bias, GLOBAL(Out) y, long long m,      \
         long long n, long long k, long long length, int segments) {                                                   \
        gemm_tile<bm, bn, tm, tn, columns>(x, w, bias, has_bias, y, m, n, k, length, segments);                        \
    }
