//! `x[R,N], residual[R,N], w[N] -> sum[R,N], y[R,N]`
use super::*;

pub(super) const SPEC: Spec = Spec {
    name: "add_rms_norm",
    class: Class::Reduction,
    inputs: &[
        InputSpec { name: "x", axes: &["R", "N"], rows: 1, ..FLOAT },
        InputSpec { name: "residual", axes: &["R", "N"], rows: 1, ..FLOAT },
        InputSpec { name: "w", axes: &["N"], ..FLOAT },
    ],
    params: &rms_norm::PARAMS,
    outputs: &[
        OutputSpec { name: "sum", axes: &["R", "N"], kind: OutputKind::Out },
        OutputSpec { name: "y", axes: &["R", "N"], kind: OutputKind::Out },
    ],
    row_axes: 1,
    fills: &[Fill::Normal, Fill::Wide, Fill::Cancel, Fill::Tiny, Fill::NearOverflow, Fill::Edges],
    outs: &DType::FLOATS,
    shape: &["R", "N"],
    make,
    check: |c| c.require("eps", 1e-6, |v| v >= 0.0, "0 or more"),
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let (mut x, mut residual) =
        (maker.values("x", maker.fill, r * n, n), maker.values("residual", maker.fill, r * n, n));
    if maker.fill == Fill::Cancel {
        residual = x.iter().zip(&residual).map(|(x, v)| -x * (1.0 + v / 256.0)).collect();
    }
    rms_norm::near_root(maker, &mut x);
    rms_norm::near_root(maker, &mut residual);
    let w = maker.values("w", Fill::Normal, n, n);
    maker.floats([("x", vec![r, n], x), ("residual", vec![r, n], residual), ("w", vec![n], w)])
}

/// The sum is exact, as in `add`; the norm is that of the sum as `out` keeps it.
fn compute(c: &Checked) -> References {
    let shape = vec![c.dim("R"), c.dim("N")];
    let sums: Vec<f64> = c.floats("x").iter().zip(c.floats("residual")).map(|(a, b)| f32_of(a + b)).collect();
    let stored: Vec<f64> = sums.iter().map(|&v| round::round(v, c.case.out)).collect();
    let normed = rms_norm::elements(c, &stored, &c.floats("w"));
    BTreeMap::from([
        ("sum".to_string(), Reference::exact(shape.clone(), sums)),
        ("y".to_string(), Reference::new(shape, normed)),
    ])
}
