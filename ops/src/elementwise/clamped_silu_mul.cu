// Gated activation within limits: gate, up -> y, n elements: clamped_silu_mul.rs. Last rounding.
#include "clamped.cuh"

struct ClampedSiluMul {
    Clamp clamp;
    DEVICE float operator()(float gate, float up) const {
        float g = clamp.gate(gate);
        float activated = __fmul_rn(g, sigmoid_of_number(__fmul_rn(clamp.alpha, g)));
        return __fmul_rn(activated, __fadd_rn(clamp.up(up), 1.0f));
    }
};

KERNEL(256, 4) clamped_silu_mul(GLOBAL(const In) gate, GLOBAL(const In) up, GLOBAL(Out) y, long long n, float alpha, float limit) {
    elementwise(ClampedSiluMul{Clamp{alpha, limit}}, gate, up, y, n);
}
