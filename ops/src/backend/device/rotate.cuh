// The rotation of rope and norm_rope.
#pragma once
#include "reduce.cuh"

DEVICE void rotate(float &x1, float &x2, float c, float s) {
    float y1 = __fmaf_rn(x1, c, -__fmul_rn(x2, s));
    x2 = __fmaf_rn(x2, c, __fmul_rn(x1, s));
    x1 = y1;
}

// Eight pairs: (a[i], b[i]), or neighbours within a and then within b where `interleaved`.
DEVICE void rotate_pairs(Eight &a, Eight &b, const Eight &c, const Eight &s, int interleaved) {
    if (interleaved) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            rotate(a.v[2 * i], a.v[2 * i + 1], c.v[i], s.v[i]);
            rotate(b.v[2 * i], b.v[2 * i + 1], c.v[i + 4], s.v[i + 4]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) rotate(a.v[i], b.v[i], c.v[i], s.v[i]);
    }
}
