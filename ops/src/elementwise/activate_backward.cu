// Gradient of an activation: x, dy -> dx, n elements: activate_backward.rs. A kernel for each kind; last rounding.
#include "gelu.cuh"

struct GeluBackward {
    DEVICE float operator()(float x, float dy) const {
        Normal made = normal(x);
        // x may be infinite where e is 0.
        float d = made.e > 0.0f ? __fmul_rn(x, __fmul_rn(made.e, NORMAL_DENSITY)) : 0.0f;
        return __fmul_rn(dy, __fadd_rn(made.share, d));
    }
};

struct GeluTanhBackward {
    DEVICE float operator()(float x, float dy) const { return __fmul_rn(dy, GeluSlope()(x).slope); }
};

struct Relu2Backward {
    DEVICE float operator()(float x, float dy) const {
        float m = x <= 0.0f ? 0.0f : x;
        return __fmul_rn(dy, __fadd_rn(m, m));
    }
};

KERNEL(256, 4) activate_backward_gelu(GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(Out) dx, long long n) {
    elementwise(GeluBackward(), x, dy, dx, n);
}

KERNEL(256, 4) activate_backward_gelu_tanh(GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(Out) dx, long long n) {
    elementwise(GeluTanhBackward(), x, dy, dx, n);
}

KERNEL(256, 4) activate_backward_relu2(GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(Out) dx, long long n) {
    elementwise(Relu2Backward(), x, dy, dx, n);
}
