// Gradient of the gated activation: gate, up, dy -> dgate, dup, n elements: silu_mul_backward.rs.
#include "elementwise.cuh"

struct SiluMulBackward {
    DEVICE Activation operator()(float gate) const {
        float s = sigmoid_of_number(gate);
        return Activation{s, __fmul_rn(s, __fmaf_rn(gate, __fsub_rn(1.0f, s), 1.0f))};
    }
};

KERNEL(256, 4) silu_mul_backward(
    GLOBAL(const In) gate, GLOBAL(const In) up, GLOBAL(const In) dy, GLOBAL(Out) dgate, GLOBAL(Out) dup, long long n
) {
    gated_backward(SiluMulBackward(), gate, up, dy, dgate, dup, n);
}
