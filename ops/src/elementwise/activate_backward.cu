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

struct XieluBackward {
    float p, n, b;
    DEVICE float operator()(float x, float dy) const {
        float slope = x <= 0.0f ? __fmaf_rn(n, exponential_less_one(x), b) : __fmaf_rn(p, __fadd_rn(x, x), b);
        return __fmul_rn(dy, slope);
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

KERNEL(256, 4) activate_backward_xielu(GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(Out) dx, long long n, float alpha_p,
                                       float alpha_n, float beta) {
    elementwise(XieluBackward{alpha_p, alpha_n, beta}, x, dy, dx, n);
}
