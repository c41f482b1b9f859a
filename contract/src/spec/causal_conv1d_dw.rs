//! `causal_conv1d_dw`: the inputs of its cases and its oracle.
use super::causal_conv1d::{behind, rows, state};
use super::rms_norm_backward::{exact, gradients};
use super::token_sum::{carry, sums};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::causal_conv1d_dw::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::Classes, Fill::Power],
    table: include_str!("../../ops/causal_conv1d_dw.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (b, t, c, k) = (maker.dim("B"), maker.dim("T"), maker.dim("C"), maker.dim("K"));
    let len = b * t * c;
    let (x, dy) = match maker.fill {
        // Rows of 1 beside borders, so that a token without a neighbour hands them on.
        Fill::Classes => (vec![1.0; len], maker.borders_from(0, len)),
        // A sign for each channel, which all taps meet: masses cancel in the chains of each.
        Fill::Power => {
            let draw = maker.draw("x");
            let signs = (0..len).map(|i| if draw.below(i % c, 2) == 0 { 1.0 } else { -1.0 });
            (signs.collect(), super::token_sum::masks_of_tokens(maker, "dy", b * t, c))
        }
        _ => (rows(maker, "x"), gradients(maker, "dy", len, c)),
    };
    let mut inputs = maker.floats([("x", vec![b, t, c], x.clone()), ("dy", vec![b, t, c], dy)]);
    if maker.has("state") {
        let of_state = |i: usize| if maker.fill == Fill::Power { x[i % c] } else { 1.0 };
        let made = match maker.fill {
            Fill::Classes | Fill::Power => {
                let values: Vec<f64> = (0..b * (k - 1) * c).map(of_state).collect();
                round::tensor(DType::Fp32, &[b, k - 1, c], &values)
            }
            _ => state(maker, "state"),
        };
        inputs.insert("state".into(), made);
    }
    if maker.has("mask") {
        inputs.insert("mask".into(), Tensor::i32(&[b, t], maker.ints("mask", maker.below("mask", b * t, 3))));
    }
    // Nothing stands before masses that cancel.
    let sums = match maker.fill {
        Fill::Power => vec![0.0; 64 * c * k],
        _ => carry(maker, [64, c * k])["carry"].to_f64(),
    };
    inputs.insert("carry".into(), round::tensor(DType::Fp32, &[64, c, k], &sums));
    inputs
}

fn compute(c: &Checked) -> References {
    let (b, t, all, k) = (c.dim("B"), c.dim("T"), c.dim("C"), c.dim("K"));
    let (dy, row) = (c.floats("dy"), behind(c));
    // The product of two f32 is exact in f64.
    let term = |i: usize| {
        let (token, channel, j) = (i / k / all, i / k % all, i % k);
        dy[token * all + channel] * row(token / t, token % t + j, channel)
    };
    let terms = exact((0..b * t * all * k).map(term).collect());
    one("dw", Reference { shape: vec![64, all, k], ..sums(c, all * k, &terms) })
}
