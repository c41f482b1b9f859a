// Heads of the recurrence of RWKV-7 and of its gradient, and pieces of their sums: wkv/heads.rs.
#pragma once
#include "element.cuh"
#include "math.cuh"
#include "reduce.cuh"

// What a recurrence of RWKV-7 reads.
struct Wkv {
    GLOBAL(const In) r;
    GLOBAL(const In) w;
    GLOBAL(const In) k;
    GLOBAL(const In) v;
    GLOBAL(const In) a;
    GLOBAL(const In) b;
    long long length;
    int heads, d;

    // Where a head of a token begins.
    DEVICE long long of_head(long long batch, long long t, int h) const { return ((batch * length + t) * heads + h) * d; }
    // What is left of a row of the state.
    DEVICE float left(long long at) const { return exponential(widen(static_cast<In>(w[at]))); }
};

DEVICE float wide(GLOBAL(const In) x, long long at) { return widen(static_cast<In>(x[at])); }

// `S = k * v + (b * sa + S * e^w)`
DEVICE float moved(float s, float left, float b, float sa, float k, float v) {
    return __fmaf_rn(k, v, __fmaf_rn(b, sa, __fmul_rn(s, left)));
}

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
    int segment, e, h, first, count;
    long long batch, from;
    bool lives;

    // Threads without a column go along, because the others meet them.
    DEVICE explicit Column(const Wkv &wkv) {
        segment = threadIdx.x % SEGMENTS;
        e = blockIdx.y * (blockDim.x / SEGMENTS) + threadIdx.x / SEGMENTS;
        batch = blockIdx.x / wkv.heads;
        h = blockIdx.x % wkv.heads;
        int length = static_cast<int>(segment_length(wkv.d));
        first = segment * length;
        lives = e < wkv.d;
        count = lives ? min(max(wkv.d - first, 0), length) : 0;
        from = (static_cast<long long>(blockIdx.x) * wkv.d + first) * wkv.d + e;
    }

    // Its piece of a state, +0 where there is none.
    template <class Piece> DEVICE void begin(Piece &S, GLOBAL(const float) state, int is_there, int d) const {
        each_of(S, count, [&](int i) {
            float begun = 0.0f;
            if (is_there) begun = state[from + static_cast<long long>(i) * d];
            S.set(i, begun);
        });
    }

    template <class Piece> DEVICE void end(const Piece &S, REREAD(float) to, int d) const {
        each_of(S, count, [&](int i) { to[from + static_cast<long long>(i) * d] = narrow<fp32>(S.get(i)); });
    }
};
