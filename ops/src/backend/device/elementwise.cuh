// The frames of ops that take each element by itself: elementwise.rs.
#pragma once
#include "math.cuh"

// y[i] = op(a[i], b[i]), last rounding, for i < n; eight elements a thread.
template <class Op> DEVICE void elementwise(Op op, GLOBAL(const In) a, GLOBAL(const In) b, GLOBAL(Out) y, long long n) {
    long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (at >= n) return;
    bool aligned = aligned16(a) && aligned16(b);
    Eight left = load_up_to8<In>(a + at, n - at, aligned, 0.0f);
    Eight right = load_up_to8<In>(b + at, n - at, aligned, 0.0f);
#pragma unroll
    for (int i = 0; i < 8; i++) left.v[i] = op(left.v[i], right.v[i]);
    store_up_to8<Out>(y + at, n - at, aligned16(y), left);
}

// The same with one input.
template <class Op> DEVICE void elementwise(Op op, GLOBAL(const In) x, GLOBAL(Out) y, long long n) {
    long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (at >= n) return;
    Eight v = load_up_to8<In>(x + at, n - at, aligned16(x), 0.0f);
#pragma unroll
    for (int i = 0; i < 8; i++) v.v[i] = op(v.v[i]);
    store_up_to8<Out>(y + at, n - at, aligned16(y), v);
}

// An activation of a gate: its sigmoid, and its derivative.
struct Activation {
    float sigmoid, slope;
};

// The gradients of gate and up: op(gate, up, dy, dgate, dup) makes both of an element.
template <class Op>
DEVICE void gradients_of_both(
    Op op, GLOBAL(const In) gate, GLOBAL(const In) up, GLOBAL(const In) dy, GLOBAL(Out) dgate, GLOBAL(Out) dup, long long n
) {
    long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (at >= n) return;
    bool aligned = aligned16(gate) && aligned16(up) && aligned16(dy);
    Eight gates = load_up_to8<In>(gate + at, n - at, aligned, 0.0f);
    Eight ups = load_up_to8<In>(up + at, n - at, aligned, 0.0f);
    Eight dys = load_up_to8<In>(dy + at, n - at, aligned, 0.0f);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float of_gate, of_up;
        op(gates.v[i], ups.v[i], dys.v[i], of_gate, of_up);
        gates.v[i] = of_gate;
        ups.v[i] = of_up;
    }
    store_up_to8<Out>(dgate + at, n - at, aligned16(dgate), gates);
    store_up_to8<Out>(dup + at, n - at, aligned16(dup), ups);
}

// The same where y = act(gate) * up: (dy * up) * slope and dy * (gate * sigmoid).
template <class Op>
DEVICE void gated_backward(
    Op act, GLOBAL(const In) gate, GLOBAL(const In) up, GLOBAL(const In) dy, GLOBAL(Out) dgate, GLOBAL(Out) dup, long long n
) {
    auto op = [act](float gate, float up, float dy, float &dgate, float &dup) {
        Activation made = act(gate);
        dgate = __fmul_rn(__fmul_rn(dy, up), made.slope);
        dup = __fmul_rn(dy, __fmul_rn(gate, made.sigmoid));
    };
    gradients_of_both(op, gate, up, dy, dgate, dup, n);
}
