// What the elements of one row are multiplied with, in rms_norm and the ops that hold one: rms_norm.rs.
#pragma once
#include "reduce.cuh"

struct Scale {
    float r;
    // 1 or -0, which changes no weight.
    float offset;
    bool hf;

    // x * r, for hf rounded to bf16.
    DEVICE float normed(float x) const {
        float scaled = __fmul_rn(x, r);
        return hf ? widen(narrow<bf16>(scaled)) : scaled;
    }

    // x * r * w, before the last rounding.
    DEVICE float of(float x, float w) const { return __fmul_rn(normed(x), __fadd_rn(w, offset)); }
};

// r = 1 / sqrt(squares / n + eps)
DEVICE Scale scale_of(float squares, long long n, float eps, int hf, int weight_offset) {
    float mean = __fdiv_rn(squares, static_cast<float>(n));
    float r = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
    return Scale{r, weight_offset ? 1.0f : -0.0f, hf != 0};
}
