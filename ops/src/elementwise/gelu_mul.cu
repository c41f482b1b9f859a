// Gated activation: gate, up -> y, n elements: gelu_mul.rs. a = C * fma(K, (g*g)*g, g), (g * sigmoid(a)) * u, last
// rounding.
#include "elementwise.cuh"

struct GeluMul {
    DEVICE float operator()(float gate, float up) const {
        float cube = __fmul_rn(__fmul_rn(gate, gate), gate);
        float a = __fmul_rn(GELU_SCALE, __fmaf_rn(GELU_CUBE, cube, gate));
        return __fmul_rn(__fmul_rn(gate, sigmoid_of_number(a)), up);
    }
};

KERNEL(256, 4) gelu_mul(GLOBAL(const In) gate, GLOBAL(const In) up, GLOBAL(Out) y, long long n) {
    elementwise(GeluMul(), gate, up, y, n);
}
