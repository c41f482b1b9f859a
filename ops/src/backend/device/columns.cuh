// States of heads by columns, and pieces of their sums: columns.rs.
#pragma once
#include "element.cuh"
#include "reduce.cuh"

// The sum of the segments of eight neighbouring threads, for each of them.
DEVICE float joined(float sum) {
#pragma unroll
    for (int h = 1; h < SEGMENTS; h *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(WHOLE_WARP, sum, h));
    return sum;
}

// A piece of a column that stays with its thread.
template <int MOST> struct Held {
    float values[MOST];
    DEVICE Held() {
#pragma unroll
        for (int i = 0; i < MOST; i++) values[i] = 0.0f;
    }
    DEVICE float get(int i) const { return values[i]; }
    DEVICE void set(int i, float value) { values[i] = value; }
    static const int COUNT = MOST;
};

// One in memory, an element every `stride`.
struct Stands {
    REREAD(float) values;
    long long stride;
    DEVICE float get(int i) const { return values[i * stride]; }
    DEVICE void set(int i, float value) { values[i * stride] = value; }
    static const int COUNT = 0;
};

// Runs `work(i)` for the elements of a piece: unrolled where they stay with the thread.
template <class Piece, class Work> DEVICE void each_of(const Piece &, int count, const Work &work) {
    if constexpr (Piece::COUNT > 0) {
#pragma unroll
        for (int i = 0; i < Piece::COUNT; i++) {
            if (i < count) work(i);
        }
    } else {
        for (int i = 0; i < count; i++) work(i);
    }
}

// Tokens behind which a gradient keeps a state: columns.rs.
#define KEPT 32

// A column of a head, of which eight threads have a segment of rows each.
struct Column {
    int segment, e, h, first, count, columns;
    long long batch, from;
    bool lives;

    // Threads without a column go along, because the others meet them.
    DEVICE Column(int heads, int rows, int columns) : columns(columns) {
        segment = threadIdx.x % SEGMENTS;
        e = blockIdx.y * (blockDim.x / SEGMENTS) + threadIdx.x / SEGMENTS;
        batch = blockIdx.x / heads;
        h = blockIdx.x % heads;
        int length = static_cast<int>(segment_length(rows));
        first = segment * length;
        lives = e < columns;
        count = lives ? min(max(rows - first, 0), length) : 0;
        from = (static_cast<long long>(blockIdx.x) * rows + first) * columns + e;
    }

    // Whether it writes what all threads of the column have.
    DEVICE bool writes() const { return lives && segment == 0; }

    // Its piece of a state, +0 where there is none.
    template <class Piece> DEVICE void begin(Piece &S, GLOBAL(const float) state, int is_there) const {
        each_of(S, count, [&](int i) {
            float begun = 0.0f;
            if (is_there) begun = state[from + static_cast<long long>(i) * columns];
            S.set(i, begun);
        });
    }

    template <class Piece> DEVICE void end(const Piece &S, REREAD(float) to) const {
        each_of(S, count, [&](int i) { to[from + static_cast<long long>(i) * columns] = narrow<fp32>(S.get(i)); });
    }
};

// A row of a head, of which eight threads have a segment of columns each.
struct Row {
    int segment, i, h, first, count;
    long long batch, all, from;
    bool lives;

    // Threads without a row go along, because the others meet them.
    DEVICE Row(int heads, int rows, int columns) {
        segment = threadIdx.x % SEGMENTS;
        i = blockIdx.y * (blockDim.x / SEGMENTS) + threadIdx.x / SEGMENTS;
        batch = blockIdx.x / heads;
        h = blockIdx.x % heads;
        int length = static_cast<int>(segment_length(columns));
        long long size = static_cast<long long>(rows) * columns;
        first = segment * length;
        lives = i < rows;
        count = lives ? min(max(columns - first, 0), length) : 0;
        // The states of all heads, and where its piece of one begins.
        all = gridDim.x * size;
        from = blockIdx.x * size + static_cast<long long>(i) * columns + first;
    }

    // Whether it writes what all threads of the row have.
    DEVICE bool writes() const { return lives && segment == 0; }

    // Its piece of a state or of the gradient of one, +0 where there is none.
    DEVICE void begin(REREAD(float) own, GLOBAL(const float) state, int is_there) const {
        for (int c = 0; c < count; c++) {
            float begun = 0.0f;
            if (is_there) begun = state[from + c];
            own[from + c] = begun;
        }
    }

    // Goes over all tokens by `step(t, -1)`, and back by `back(t, again)`, before which `step(t, again)` has made the state of
    // the token again: number `again` of those behind a state that was kept.
    template <class Step, class Back>
    DEVICE void there_and_back(long long end, REREAD(float) own, REREAD(float) kept, const Step &step, const Back &back) const {
        for (long long t = 0; t < end; t++) {
            if (t % KEPT == 0) {
                for (int c = 0; c < count; c++) kept[t / KEPT * all + from + c] = static_cast<float>(own[from + c]);
            }
            step(t, -1);
        }
        for (long long begin = (end - 1) / KEPT * KEPT; end > 0 && begin >= 0; begin -= KEPT) {
            long long stop = min(begin + KEPT, end);
            for (int c = 0; c < count; c++) own[from + c] = static_cast<float>(kept[begin / KEPT * all + from + c]);
            for (long long t = begin; t < stop; t++) step(t, t - begin);
            for (long long t = stop - 1; t >= begin; t--) back(t, t - begin);
        }
    }
};
