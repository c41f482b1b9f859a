// The gelu of the hyperbolic tangent and its derivative: gelu_mul_backward.rs.
#pragma once
#include "elementwise.cuh"

struct GeluSlope {
    DEVICE Activation operator()(float gate) const {
        float c = GELU_SCALE;
        float square = __fmul_rn(gate, gate);
        float a = __fmul_rn(c, __fmaf_rn(GELU_CUBE, __fmul_rn(square, gate), gate));
        // A NaN would be lost where the sigmoid of a number is 0 or 1.
        float s = gate == gate ? sigmoid_of_number(a) : gate;
        float v = __fmul_rn(s, __fsub_rn(1.0f, s));
        float inner = __fmul_rn(c, __fmaf_rn(__uint_as_float(0x3E095D4Fu), square, 1.0f));
        // Where the sigmoid is 0 or 1, the inner derivative may be infinite.
        float t = v > 0.0f ? __fmul_rn(v, __fmul_rn(gate, inner)) : 0.0f;
        return Activation{s, __fadd_rn(s, t)};
    }
};
