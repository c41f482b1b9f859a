//! `gelu_mul`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::gelu_mul::OP,
    class: Class::Elementwise,
    fills: GATES,
    table: include_str!("../../ops/gelu_mul.toml"),
    make: |maker| silu_mul::make(maker, sharp::gelu),
    compute,
};

fn compute(c: &Checked) -> References {
    let (gate, up) = (c.floats("gate"), c.floats("up"));
    let elements = gate.iter().zip(&up).map(|(&g, &u)| element(g, u));
    one("y", Reference::new(c.case.inputs["gate"].shape().to_vec(), elements))
}

/// The share of the cube in the exponent.
pub(super) const CUBE: f64 = 0.044715;

/// What the exponent is multiplied with.
pub(super) fn factor() -> f64 {
    2.0 * (2.0 / std::f64::consts::PI).sqrt()
}

/// The exponent `2 sqrt(2/pi) (g + 0.044715 g^3)` of the sigmoid that makes the gelu of the hyperbolic tangent. Beyond the range of f32 it
/// is an infinity, whose sigmoid is 0 or 1.
pub(super) fn exponent(g: f64) -> f64 {
    let a = factor() * (g + CUBE * g * g * g);
    if a.abs() > HUGE { a.signum() * f64::INFINITY } else { a }
}

/// Value and condition of `g * sigmoid(a) * u`.
pub(super) fn element(g: f64, u: f64) -> (f64, f64) {
    let a = exponent(g);
    let value = g * (1.0 / (1.0 + (-a).exp())) * u;
    if g == 0.0 || u == 0.0 || !g.is_finite() || !u.is_finite() {
        return (value, 0.0);
    }
    if let Some(exact) = silu_mul::saturated(g, [g, u]) {
        return exact;
    }
    // Errors of the exponent count where the sigmoid is not flat; below -87 it may be lost whole.
    let bent = if a > 0.0 { a * (-a).exp() } else { a.abs() };
    let bent = if bent.is_finite() { value.abs() * bent } else { 0.0 };
    let lost = if a < -87.0 { value.abs() * round::pow2(24) } else { 0.0 };
    (value, value.abs() + 2.0 * bent + lost + FLOOR * (1.0 + u.abs()) * (1.0 + g.abs()))
}
