// Soft limit: x -> y, n elements: softcap.rs. cap * tanh(x * f32(1/cap)), last rounding.
#include "elementwise.cuh"

struct Softcap {
    float cap, inverse;
    DEVICE float operator()(float x) const { return __fmul_rn(cap, hyperbolic_tangent(__fmul_rn(x, inverse))); }
};

KERNEL(256, 4) softcap(GLOBAL(const In) x, GLOBAL(Out) y, long long n, float cap, float inverse) {
    elementwise(Softcap{cap, inverse}, x, y, n);
}
