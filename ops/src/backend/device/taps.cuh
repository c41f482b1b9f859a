// Rows that a causal convolution reads: conv/taps.rs.
#pragma once
#include "element.cuh"

// The rows of a sequence behind the J of its state; +0 where there is none.
struct Behind {
    GLOBAL(const float) state;
    int has_state;
    GLOBAL(const In) x;
    long long before, length;
    int channels;

    // An element of row `row` of sequence `b`, counted from the first of the state on.
    DEVICE float at(long long b, long long row, int channel) const {
        if (row >= before) return widen(static_cast<In>(x[(b * length + row - before) * channels + channel]));
        if (!has_state) return 0.0f;
        return state[(b * before + row) * channels + channel];
    }
};
