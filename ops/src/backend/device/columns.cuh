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
