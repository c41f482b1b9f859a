//! `gate, up -> y`, all of one shape
use super::*;

pub(super) const SPEC: Spec = Spec {
    name: "silu_mul",
    class: Class::Elementwise,
    inputs: &[
        InputSpec { name: "gate", axes: &["R", REST], rows: 1, ..FLOAT },
        InputSpec { name: "up", axes: &["R", REST], rows: 1, ..FLOAT },
    ],
    params: &[],
    outputs: &[OutputSpec { name: "y", axes: &["R", REST], kind: OutputKind::Out }],
    row_axes: 1,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::AllBf16],
    outs: &DType::FLOATS,
    shape: &["R", "N"],
    make,
    check: |_| Ok(()),
    compute,
};

pub(super) fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let gate = maker.values("gate", maker.fill, r * n, n);
    let up = match maker.fill {
        Fill::AllBf16 => vec![1.0; r * n],
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
