// Gradient of the soft limit: x, dy -> dx, n elements: softcap_backward.rs. dy * fma(-t, t, 1), last rounding.
#include "elementwise.cuh"

struct SoftcapBackward {
    float inverse;
    DEVICE float operator()(float x, float dy) const {
        float t = hyperbolic_tangent(__fmul_rn(x, inverse));
        return __fmul_rn(dy, __fmaf_rn(-t, t, 1.0f));
    }
};

KERNEL(256, 4) softcap_backward(GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(Out) dx, long long n, float inverse) {
    elementwise(SoftcapBackward{inverse}, x, dy, dx, n);
}
