//! `x[T,H,D], pos[T] -> y[T,H,D]`
use super::*;

pub(super) const SPEC: Spec = Spec {
    name: "rope",
    class: Class::Elementwise,
    inputs: &[
        InputSpec { name: "x", axes: &["T", "H", "D"], rows: 1, ..FLOAT },
        InputSpec { name: "pos", axes: &["T"], rows: 1, ..INT },
    ],
    params: &[
        ParamSpec { name: "theta", kind: ParamKind::Float, default: "10000" },
        ParamSpec { name: "pairing", kind: ParamKind::Choice(&["half", "interleaved"]), default: "half" },
    ],
    outputs: &[OutputSpec { name: "y", axes: &["T", "H", "D"], kind: OutputKind::Out }],
    row_axes: 1,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges],
    outs: &DType::FLOATS,
    shape: &["T", "H", "D"],
    make,
    check,
    compute,
};

/// Without explicit `pos`: 0, 1, 2, .., with every fourth one far out.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (t, h, d) = (maker.dim("T"), maker.dim("H"), maker.dim("D"));
    let far = maker.below("pos", t, 200_000);
    let pos = (0..t).map(|i| if i % 4 == 3 { far[i] } else { i as i32 }).collect();
    let mut inputs = maker.floats([("x", vec![t, h, d], maker.values("x", maker.fill, t * h * d, h * d))]);
    inputs.insert("pos".into(), Tensor::i32(&[t], maker.ints("pos", pos)));
    inputs
}

fn check(c: &Checked) -> Result<(), Refusal> {
    if !c.dim("D").is_multiple_of(2) {
        return Err(Refusal::Invalid(format!("rope: D is {}; it must be even", c.dim("D"))));
    }
    c.require("theta", 10000.0, |v| v > 0.0, "positive")?;
    c.indexes("pos", 0..1 << 31)
}

fn compute(c: &Checked) -> References {
    let (t, h, d) = (c.dim("T"), c.dim("H"), c.dim("D"));
    let (x, pos) = (c.floats("x"), c.ints("pos"));
    let theta = c.float("theta", 10000.0);
    let interleaved = c.text("pairing") == Some("interleaved");
    let inverse: Vec<f64> = (0..d / 2).map(|i| f32_of(theta.powf(-2.0 * i as f64 / d as f64))).collect();
    let mut elements = vec![(0.0, 0.0); t * h * d];
    for (head, values) in x.chunks(d).enumerate() {
        let position = f32_of(f64::from(pos[head / h]));
        for (i, &inverse) in inverse.iter().enumerate() {
            let (first, second) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + d / 2) };
            let (sin, cos) = f32_of(position * inverse).sin_cos();
            let (x1, x2) = (values[first], values[second]);
            elements[head * d + first] = sum(x1 * cos, -(x2 * sin));
            elements[head * d + second] = sum(x2 * cos, x1 * sin);
        }
    }
    one("y", Reference::new(vec![t, h, d], elements))
}

fn sum(a: f64, b: f64) -> (f64, f64) {
    let size = a.abs() + b.abs();
    let exact = size == 0.0 || !size.is_finite();
    (a + b, if exact { 0.0 } else { size + FLOOR })
}
