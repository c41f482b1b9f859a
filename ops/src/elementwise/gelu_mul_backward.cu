// Gradient of the gated activation: gate, up, dy -> dgate, dup, n elements: gelu_mul_backward.rs.
#include "gelu.cuh"

KERNEL(256, 4) gelu_mul_backward(
    GLOBAL(const In) gate, GLOBAL(const In) up, GLOBAL(const In) dy, GLOBAL(Out) dgate, GLOBAL(Out) dup, long long n
) {
    gated_backward(GeluSlope(), gate, up, dy, dgate, dup, n);
}
