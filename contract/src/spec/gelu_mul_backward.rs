//! `gelu_mul_backward`: the inputs of its cases and its oracle.
use super::silu_mul_backward::{Slope, compute, make, rest};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::gelu_mul_backward::OP,
    class: Class::Elementwise,
    fills: gelu_mul::SPEC.fills,
    table: include_str!("../../ops/gelu_mul_backward.toml"),
    make: |maker| make(maker, sharp::gelu),
    compute: |c| compute(c, slope, gelu_mul::element),
};

/// That of `g * sigmoid(a)`: `s + s (1 - s) g a'`.
pub(super) fn slope(g: f64) -> Slope {
    let a = gelu_mul::exponent(g);
    let (s, rest_of_s) = (1.0 / (1.0 + (-a).exp()), 1.0 / (1.0 + a.exp()));
    let v = s * rest_of_s;
    // Where the sigmoid is 0 or 1 the rest is too.
    if v == 0.0 {
        return Slope { value: s, size: s, lost: a < -87.0 };
    }
    let inner = g * gelu_mul::factor() * (1.0 + 3.0 * gelu_mul::CUBE * g * g);
    // Errors of the exponent count where the sigmoid is not flat.
    let bent = v * a.abs();
    let size = s + bent + inner.abs() * (v + bent + rest(s, rest_of_s));
    Slope { value: s + v * inner, size, lost: a < -87.0 }
}
