// Gradients of heads, turned back: rope_backward.rs.
#pragma once
#include "rotate.cuh"

// A head's dy and its angles, whose sines have the other sign.
struct Turned {
    GLOBAL(const In) dy;
    GLOBAL(const float) cosines;
    GLOBAL(const float) sines;
    int half;
    int interleaved;

    // Element i, as one of its pair.
    DEVICE float of(int i) const {
        int pair = interleaved ? i / 2 : i % half;
        int first = interleaved ? 2 * pair : pair, second = interleaved ? first + 1 : pair + half;
        float x1 = widen(static_cast<In>(dy[first])), x2 = widen(static_cast<In>(dy[second]));
        rotate(x1, x2, cosines[pair], sines[pair]);
        return narrow<fp32>(i == first ? x1 : x2);
    }
};
