// Rows times sigmoids of gates: gate, x -> y, n elements, of which `each` have a gate together: sigmoid_mul.rs.
// sigmoid(gate) * x, last rounding.
#include "elementwise.cuh"

KERNEL(256, 4)
sigmoid_mul(GLOBAL(const In) gate, GLOBAL(const In) x, GLOBAL(Out) y, long long n, long long each) {
    long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (at >= n) return;
    Eight v = load_up_to8<In>(x + at, n - at, aligned16(x), 0.0f);
    if (each == 1) {
        Eight gates = load_up_to8<In>(gate + at, n - at, aligned16(gate), 0.0f);
#pragma unroll
        for (int i = 0; i < 8; i++) v.v[i] = __fmul_rn(sigmoid(gates.v[i]), v.v[i]);
    } else {
        long long number = at / each, left = each - at % each;
        float factor = sigmoid(widen(static_cast<In>(gate[number])));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (left == 0 && at + i < n) {
                factor = sigmoid(widen(static_cast<In>(gate[++number])));
                left = each;
            }
            v.v[i] = __fmul_rn(factor, v.v[i]);
            left--;
        }
    }
    store_up_to8<Out>(y + at, n - at, aligned16(y), v);
}
