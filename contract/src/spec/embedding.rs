//! `embedding`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::embedding::OP,
    class: Class::Elementwise,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::AllBf16, Fill::Classes],
    table: include_str!("../../ops/embedding.toml"),
    make,
    compute,
};

/// For all bf16 patterns and all classes every row of the table is read once; otherwise tokens are drawn.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (v, d, t) = (maker.dim("V"), maker.dim("D"), maker.dim("T"));
    let drawn = match maker.fill {
        Fill::AllBf16 | Fill::Classes => (0..t).map(|i| (v - 1 - i % v) as i32).collect(),
        _ => maker.below("tokens", t, v),
    };
    let w = match maker.fill {
        Fill::Classes => maker.borders_from(0, v * d),
        fill => maker.values("w", fill, v * d, d),
    };
    let mut inputs = maker.floats([("w", vec![v, d], w)]);
    inputs.insert("tokens".into(), Tensor::i32(&[t], maker.ints("tokens", drawn)));
    inputs
}

fn compute(c: &Checked) -> References {
    let (t, d) = (c.dim("T"), c.dim("D"));
    let w = c.floats("w");
    let rows = c.ints("tokens").iter().flat_map(|&token| w[token as usize * d..][..d].to_vec()).collect();
    one("y", Reference::exact(vec![t, d], rows))
}
