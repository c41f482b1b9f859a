// Gradient of rows times sigmoids of gates: gate, x, dy -> dgate, dx: sigmoid_mul_backward.rs. Of each gate
// lanes(dy * x) * (s * (1 - s)), of each of its elements s * dy, last rounding.
#include "elementwise.cuh"
#include "reduce.cuh"

DEVICE float gradient_of_gate(float sum, float s) { return __fmul_rn(sum, __fmul_rn(s, __fsub_rn(1.0f, s))); }

// Gates of one element each, count of them: eight to a thread. The other lanes of a sum, which are +0, are added to its term.
KERNEL(256, 4) sigmoid_mul_backward(
    GLOBAL(const In) gate, GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(Out) dgate, GLOBAL(Out) dx, long long count
) {
    long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (at >= count) return;
    bool aligned = aligned16(gate) && aligned16(x) && aligned16(dy);
    Eight gates = load_up_to8<In>(gate + at, count - at, aligned, 0.0f);
    Eight v = load_up_to8<In>(x + at, count - at, aligned, 0.0f);
    Eight g = load_up_to8<In>(dy + at, count - at, aligned, 0.0f);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float s = sigmoid(gates.v[i]);
        gates.v[i] = gradient_of_gate(__fadd_rn(__fmaf_rn(g.v[i], v.v[i], 0.0f), 0.0f), s);
        g.v[i] = __fmul_rn(s, g.v[i]);
    }
    store_up_to8<Out>(dgate + at, count - at, aligned16(dgate), gates);
    store_up_to8<Out>(dx + at, count - at, aligned16(dx), g);
}

// A warp takes a gate, which is for `each` elements.
KERNEL(128, 8) sigmoid_mul_backward_sums(
    GLOBAL(const In) gate, GLOBAL(const In) x, GLOBAL(const In) dy, GLOBAL(Out) dgate, GLOBAL(Out) dx, long long count,
    long long each
) {
    long long first = threadIdx.x % 32 * 8;
    long long number = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (number >= count) return;
    float s = sigmoid(widen(static_cast<In>(gate[number])));
    x = x + number * each;
    dy = dy + number * each;
    dx = dx + number * each;
    bool aligned = aligned16(x) && aligned16(dy), aligned_out = aligned16(dx);
    Eight lanes = no_lanes();
#pragma unroll 4
    for (long long at = first; at < each; at += 256) {
        // The pad's product -0 leaves every lane as it is, one that is -0 too.
        Eight v = load_up_to8<In>(x + at, each - at, aligned, 0.0f);
        Eight g = load_up_to8<In>(dy + at, each - at, aligned, -0.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            lanes.v[j] = __fmaf_rn(g.v[j], v.v[j], lanes.v[j]);
            g.v[j] = __fmul_rn(s, g.v[j]);
        }
        store_up_to8<Out>(dx + at, each - at, aligned_out, g);
    }
    float sum = fold_lanes(lanes);
    if (threadIdx.x % 32 == 0) dgate[number] = narrow<Out>(gradient_of_gate(sum, s));
}
