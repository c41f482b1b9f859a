//! `embedding_dw`: the inputs of its cases and its oracle.
use super::rms_norm_backward::{Product, exact};
use super::token_sum::{carry, chains, mask_and_carry, tokens};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::embedding_dw::OP,
    class: Class::Reduction,
    fills: SUMS,
    table: include_str!("../../ops/embedding_dw.toml"),
    make,
    compute,
};

/// The last row of the table belongs to no token.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (v, d, t) = (maker.dim("V"), maker.dim("D"), maker.dim("T"));
    let dy = match maker.fill {
        Fill::Classes => maker.borders_from(0, t * d),
        fill => maker.values("dy", fill, t * d, d),
    };
    let drawn = maker.below("tokens", t, (v - 1).max(1));
    let dy = match maker.fill {
        // Masses cancel in the sum of each token.
        Fill::Power => {
            let (draw, tokens) = (maker.draw("dy"), drawn.iter().map(|&token| token as usize).collect::<Vec<_>>());
            let columns: Vec<f64> = (0..d).flat_map(|column| power::mask(&draw, column, &tokens)).collect();
            gemm_dx::transposed(&columns, t)
        }
        _ => dy,
    };
    let mut inputs = maker.floats([("dy", vec![t, d], dy)]);
    inputs.insert("tokens".into(), Tensor::i32(&[t], maker.ints("tokens", drawn)));
    inputs.extend(mask_and_carry(maker, t, [v, d]));
    inputs.extend(carry(maker, [v, d]));
    inputs
}

fn compute(c: &Checked) -> References {
    let (v, d, t) = (c.dim("V"), c.dim("D"), c.dim("T"));
    let (dy, named, counted) = (exact(c.floats("dy")), c.ints("tokens"), tokens(c, t));
    let rows_of = |row: usize| -> Vec<&[Product]> {
        let of_row = counted.iter().filter(|&&t| named[t] as usize == row);
        of_row.map(|&t| &dy[t * d..][..d]).collect()
    };
    one("dw", chains(c, vec![v, d], rows_of))
}
