// Gradient of the gated activation within limits: gate, up, dy -> dgate, dup, n elements: clamped_silu_mul_backward.rs.
#include "clamped.cuh"

KERNEL(256, 4) clamped_silu_mul_backward(
    GLOBAL(const In) gate, GLOBAL(const In) up, GLOBAL(const In) dy, GLOBAL(Out) dgate, GLOBAL(Out) dup, long long n, float alpha,
    float limit
) {
    Clamp clamp{alpha, limit};
    auto gradients = [clamp](float gate, float up, float dy, float &dgate, float &dup) {
        float g = clamp.gate(gate), u = clamp.up(up), a = __fmul_rn(clamp.alpha, g);
        // A NaN would be lost where the sigmoid of a number is 0 or 1.
        float s = a == a ? sigmoid_of_number(a) : a;
        float v = __fmul_rn(s, __fsub_rn(1.0f, s));
        // The gate may be infinite where v is 0.
        float t = v == 0.0f ? 0.0f : __fmul_rn(v, a);
        dgate = gate > clamp.limit ? 0.0f : __fmul_rn(__fmul_rn(dy, __fadd_rn(u, 1.0f)), __fadd_rn(s, t));
        dup = up > clamp.limit || up < -clamp.limit ? 0.0f : __fmul_rn(dy, __fmul_rn(g, s));
    };
    gradients_of_both(gradients, gate, up, dy, dgate, dup, n);
}
