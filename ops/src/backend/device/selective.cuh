// What the scan of Mamba and its gradient share: scan/selective.rs.
#pragma once
#include "element.cuh"
#include "math.cuh"

// What a scan reads.
struct Selective {
    GLOBAL(const In) x;
    GLOBAL(const In) dt;
    GLOBAL(const In) a_log;
    GLOBAL(const In) b;
    GLOBAL(const In) c;
    GLOBAL(const In) d;
    int has_d;
    GLOBAL(const In) dt_bias;
    int has_bias;
    GLOBAL(const float) state;
    int has_state;
    GLOBAL(const int) len;
    int has_len;
    long long length;
    int channels, state_dim;

    // How many positions a sequence has.
    DEVICE long long end(long long batch) const {
        long long end = length;
        if (has_len) end = len[batch];
        return end;
    }
    DEVICE long long place(long long batch, long long t, int channel) const {
        return (batch * length + t) * channels + channel;
    }
    DEVICE long long shared(long long batch, long long t) const { return (batch * length + t) * state_dim; }
    DEVICE long long of_state(long long batch, int channel) const { return (batch * channels + channel) * state_dim; }
    // The rate by which element n of the state of a channel decays.
    DEVICE float rate(int channel, int n) const {
        return -exponential(widen(static_cast<In>(a_log[static_cast<long long>(channel) * state_dim + n])));
    }
    // An element of the state before the first position.
    DEVICE float begun(long long at) const {
        float s = 0.0f;
        if (has_state) s = state[at];
        return s;
    }
    // What the step of a channel comes of.
    DEVICE float before_softplus(long long place, int channel) const {
        float v = widen(static_cast<In>(dt[place]));
        if (has_bias) v = __fadd_rn(v, widen(static_cast<In>(dt_bias[channel])));
        return v;
    }
};
