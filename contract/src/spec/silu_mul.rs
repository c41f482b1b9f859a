//! `silu_mul`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::silu_mul::OP,
    class: Class::Elementwise,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::AllBf16, Fill::Sharp],
    table: include_str!("../../ops/silu_mul.toml"),
    make: |maker| make(maker, sharp::silu),
    compute,
};

/// `sharp` makes the gates of that fill.
pub(super) fn make(maker: &Maker, sharp: fn(usize) -> Vec<f64>) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let gate = match maker.fill {
        Fill::Sharp => sharp(r * n),
        fill => maker.values("gate", fill, r * n, n),
    };
    let up = match maker.fill {
        Fill::AllBf16 | Fill::Sharp => vec![1.0; r * n],
        Fill::Tiny | Fill::NearOverflow => maker.values("up", Fill::Normal, r * n, n),
        fill => maker.values("up", fill, r * n, n),
    };
    maker.floats([("gate", vec![r, n], gate), ("up", vec![r, n], up)])
}

fn compute(c: &Checked) -> References {
    let (gate, up) = (c.floats("gate"), c.floats("up"));
    let elements = gate.iter().zip(&up).map(|(&g, &u)| {
        let value = g * (1.0 / (1.0 + (-g).exp())) * u;
        if g == 0.0 || u == 0.0 || !g.is_finite() || !u.is_finite() {
            return (value, 0.0);
        }
        // Below -87 the sigmoid nears the end of the f32 range and may be lost whole.
        let lost = if g < -87.0 { value.abs() * round::pow2(24) } else { 0.0 };
        (value, value.abs() + lost + FLOOR * (1.0 + u.abs()))
    });
    one("y", Reference::new(c.case.inputs["gate"].shape().to_vec(), elements))
}
