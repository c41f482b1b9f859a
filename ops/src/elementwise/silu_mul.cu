// Gated activation: gate, up -> y, n elements: silu_mul.rs. (g * sigmoid(g)) * u, last rounding.
#include "elementwise.cuh"

struct SiluMul {
    DEVICE float operator()(float gate, float up) const {
        return __fmul_rn(__fmul_rn(gate, sigmoid_of_number(gate)), up);
    }
};

KERNEL(256, 4) silu_mul(GLOBAL(const In) gate, GLOBAL(const In) up, GLOBAL(Out) y, long long n) {
    elementwise(SiluMul(), gate, up, y, n);
}
