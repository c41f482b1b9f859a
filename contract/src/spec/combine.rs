//! `combine`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::combine::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::Edges],
    table: include_str!("../../ops/combine.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n, t, k) = (maker.dim("R"), maker.dim("N"), maker.dim("T"), maker.dim("K"));
    let mut inputs = maker.floats([
        ("x", vec![r, n], maker.values("x", maker.fill, r * n, n)),
        ("weight", vec![t, k], maker.values("weight", Fill::Normal, t * k, k)),
    ]);
    if maker.shape.contains_key("shared") {
        inputs.extend(maker.floats([("shared", vec![t, n], maker.values("shared", maker.fill, t * n, n))]));
    }
    inputs.insert("row".into(), Tensor::i32(&[t, k], maker.ints("row", maker.below("row", t * k, r))));
    inputs
}

fn compute(c: &Checked) -> References {
    let (n, t, k) = (c.dim("N"), c.dim("T"), c.dim("K"));
    let (x, weight, row) = (c.floats("x"), c.floats("weight"), c.ints("row"));
    let shared = c.case.inputs.get("shared").map(Tensor::to_f64);
    let mut elements = Vec::with_capacity(t * n);
    for token in 0..t {
        for i in 0..n {
            let terms = (token * k..(token + 1) * k).map(|r| weight[r] * x[row[r] as usize * n + i]);
            let last = shared.as_ref().map(|shared| shared[token * n + i]);
            let terms: Vec<f64> = terms.chain(last).collect();
            let value: f64 = terms.iter().sum();
            let size: f64 = terms.iter().map(|term| term.abs()).sum();
            let condition = match () {
                () if !value.is_finite() => 0.0,
                () if size == 0.0 => 0.0,
                () if size > HUGE => f64::INFINITY,
                () => size + FLOOR * terms.len() as f64,
            };
            elements.push((if size == 0.0 { 0.0 } else { value }, condition));
        }
    }
    one("y", Reference::new(vec![t, n], elements))
}
