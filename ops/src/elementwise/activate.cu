// Activation: x -> y, n elements: activate.rs. A kernel for each kind; last rounding.
#include "elementwise.cuh"

struct Gelu {
    DEVICE float operator()(float x) const { return __fmul_rn(x, normal(x).share); }
};

struct GeluTanh {
    DEVICE float operator()(float x) const {
        float cube = __fmul_rn(__fmul_rn(x, x), x);
        return __fmul_rn(x, sigmoid_of_number(__fmul_rn(GELU_SCALE, __fmaf_rn(GELU_CUBE, cube, x))));
    }
};

struct Relu2 {
    DEVICE float operator()(float x) const {
        float m = x <= 0.0f ? 0.0f : x;
        return __fmul_rn(m, m);
    }
};

struct Xielu {
    float p, n, b;
    DEVICE float operator()(float x) const {
        float t = __fmul_rn(b, x);
        return x <= 0.0f ? __fmaf_rn(n, __fsub_rn(exponential_less_one(x), x), t) : __fmaf_rn(__fmul_rn(p, x), x, t);
    }
};

KERNEL(256, 4) activate_gelu(GLOBAL(const In) x, GLOBAL(Out) y, long long n) { elementwise(Gelu(), x, y, n); }

KERNEL(256, 4) activate_gelu_tanh(GLOBAL(const In) x, GLOBAL(Out) y, long long n) { elementwise(GeluTanh(), x, y, n); }

KERNEL(256, 4) activate_relu2(GLOBAL(const In) x, GLOBAL(Out) y, long long n) { elementwise(Relu2(), x, y, n); }

KERNEL(256, 4) activate_xielu(GLOBAL(const In) x, GLOBAL(Out) y, long long n, float alpha_p, float alpha_n, float beta) {
    elementwise(Xielu{alpha_p, alpha_n, beta}, x, y, n);
}
