//! `combine`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::combine::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::Edges, Fill::Classes, Fill::Power],
    table: include_str!("../../ops/combine.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n, t, k) = (maker.dim("R"), maker.dim("N"), maker.dim("T"), maker.dim("K"));
    if maker.fill == Fill::Classes {
        return classes(maker, [r, n, t, k]);
    }
    if maker.fill == Fill::Power {
        // Each token has rows of its own.
        let draw = maker.draw("x");
        let tokens = (0..t).flat_map(|token| gemm_dx::transposed(&power::masks(&draw.of(token), n, k), k));
        let x = tokens.chain(vec![0.0; r.saturating_sub(t * k) * n]).take(r * n).collect();
        let mut inputs = maker.floats([("x", vec![r, n], x), ("weight", vec![t, k], vec![1.0; t * k])]);
        inputs.insert("row".into(), Tensor::i32(&[t, k], (0..(t * k) as i32).collect()));
        return inputs;
    }
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

/// Borders in the first row of x, zeros and what adds up to the largest f32 in the others; every token has them all,
/// with one weight.
fn classes(maker: &Maker, [r, n, t, k]: [usize; 4]) -> BTreeMap<String, Tensor> {
    let pow = round::pow2;
    let (small, tiny) = if maker.dtype == DType::Fp16 { (pow(-14), pow(-20)) } else { (pow(-40), pow(-100)) };
    let weights = [1.0, -1.0, 89.0, tiny, -tiny, 1.0 / tiny.max(pow(-15)), -0.0];
    let parts = [pow(128) - pow(120), pow(120) - pow(112), pow(112) - pow(104)];
    let mut x = vec![0.0; r * n];
    x[..n].copy_from_slice(&maker.borders_from(0, n));
    (x[n - 1], x[n - 4]) = (736.0, small);
    for (row, part) in parts.iter().enumerate().take(if maker.dtype == DType::Fp16 { 0 } else { r }) {
        (x[row * n + n - 2], x[row * n + n - 3]) = (*part, -part);
    }
    let weight = (0..t * k).map(|i| weights[i / k % weights.len()]).collect();
    let mut inputs = maker.floats([("x", vec![r, n], x), ("weight", vec![t, k], weight)]);
    if maker.shape.contains_key("shared") {
        inputs.extend(maker.floats([("shared", vec![t, n], vec![-0.0; t * n])]));
    }
    inputs.insert("row".into(), Tensor::i32(&[t, k], (0..t * k).map(|i| (i % k % r) as i32).collect()));
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
            elements.push(sum_of(terms.chain(last)));
        }
    }
    one("y", Reference::new(vec![t, n], elements))
}
