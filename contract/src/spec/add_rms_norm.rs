//! `add_rms_norm`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::add_rms_norm::OP,
    class: Class::Reduction,
    fills: SIGNED_SUMS,
    table: include_str!("../../ops/add_rms_norm.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let (mut x, mut residual) =
        (maker.values("x", maker.fill, r * n, n), maker.values("residual", maker.fill, r * n, n));
    if maker.fill == Fill::Cancel {
        residual = x.iter().zip(&residual).map(|(x, v)| -x * (1.0 + v / 256.0)).collect();
    }
    if maker.fill == Fill::Power {
        // Halves, whose sum is exact.
        let [x, w] = power::norm_rows(maker, "x", r, n);
        let x: Vec<f64> = x.into_iter().map(|x| x / 2.0).collect();
        let shape = vec![r, n];
        return maker.floats([("x", shape.clone(), x.clone()), ("residual", shape, x), ("w", vec![n], w)]);
    }
    rms_norm::near_root(maker, &mut x);
    rms_norm::near_root(maker, &mut residual);
    if maker.fill == Fill::Classes {
        // Rows whose norm is known, added to nothing; then sums of every class.
        let known = rms_norm::UNIT_ROWS.len().min(r) * n;
        x = rms_norm::unit_rows(r, n);
        residual = vec![0.0; r * n];
        let sums = add::pairs(maker).into_iter().cycle();
        for (i, [a, b]) in (known..r * n).zip(sums) {
            (x[i], residual[i]) = (a, b);
        }
        let w = rms_norm::weights(maker, n);
        return maker.floats([("x", vec![r, n], x), ("residual", vec![r, n], residual), ("w", vec![n], w)]);
    }
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
