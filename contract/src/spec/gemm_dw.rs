//! `gemm_dw`: the inputs of its cases and its oracle.
use super::rms_norm_backward::{Product, exact};
use super::token_sum::{chains, mask_and_carry, tokens};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::gemm_dw::OP,
    class: Class::Reduction,
    fills: gemm::SPEC.fills,
    table: include_str!("../../ops/gemm_dw.toml"),
    make,
    compute,
};

/// The operands of a product whose sums are over tokens.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (t, n, k) = (maker.dim("T"), maker.dim("N"), maker.dim("K"));
    let (dy, x) = gemm::operands(maker, "dy", [n, k, t]);
    let mut inputs =
        maker.floats([("x", vec![t, k], gemm_dx::transposed(&x, t)), ("dy", vec![t, n], gemm_dx::transposed(&dy, t))]);
    inputs.extend(mask_and_carry(maker, t, [n, k]));
    if let Some(carry) = inputs.get_mut("carry").filter(|_| maker.fill == Fill::Classes) {
        // The row whose products are -0 all.
        let mut values = carry.to_f64();
        values[(n - 1) * k..].fill(-0.0);
        *carry = round::tensor(DType::Fp32, &[n, k], &values);
    }
    inputs
}

fn compute(c: &Checked) -> References {
    let (t, n, k) = (c.dim("T"), c.dim("N"), c.dim("K"));
    let (x, dy, counted) = (c.operands("x"), c.operands("dy"), tokens(c, t));
    // The product of two f32 is exact in f64.
    let products = |row: usize| -> Vec<f64> {
        counted
            .iter()
            .flat_map(|&t| x[t * k..][..k].iter().map(move |x| (t, x)))
            .map(|(t, x)| dy[t * n + row] * x)
            .collect()
    };
    let terms: Vec<Vec<Product>> = (0..n).map(|row| exact(products(row))).collect();
    one("dw", chains(c, vec![n, k], |row| terms[row].chunks(k.max(1)).collect()))
}
