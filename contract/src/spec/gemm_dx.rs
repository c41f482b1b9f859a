//! `gemm_dx`: the inputs of its cases and its oracle, which are those of `gemm` with w transposed.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::gemm_dx::OP,
    class: Class::Reduction,
    fills: gemm::SPEC.fills,
    table: include_str!("../../ops/gemm_dx.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (m, n, k) = (maker.dim("M"), maker.dim("N"), maker.dim("K"));
    let (dy, w) = gemm::operands(maker, "dy", [m, k, n]);
    maker.floats([("dy", vec![m, n], dy), ("w", vec![n, k], transposed(&w, n))])
}

fn compute(c: &Checked) -> References {
    let (m, n, k) = (c.dim("M"), c.dim("N"), c.dim("K"));
    one("dx", gemm::product([m, k, n], &c.operands("dy"), &transposed(&c.operands("w"), k), None))
}

/// The transpose of rows of `columns` elements.
pub(super) fn transposed(rows: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|column| rows.iter().skip(column).step_by(columns).copied()).collect()
}
