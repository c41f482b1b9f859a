//! `nll`: the inputs of its cases and its oracle; and what all losses of tokens have in common.
use super::inexact::Inexact;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::nll::OP,
    class: Class::Reduction,
    fills: PLAIN,
    table: include_str!("../../ops/nll.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (b, t) = (maker.dim("B"), maker.dim("T"));
    let logprob = match maker.fill {
        Fill::Normal => maker.values("logprob", Fill::Normal, b * t, t).into_iter().map(|v| -v.abs()).collect(),
        // A sequence has one token that counts.
        Fill::Classes => (0..b * t).map(|i| -maker.borders()[i / t % maker.borders().len()]).collect(),
        // Some hundred of them can be added.
        Fill::NearOverflow => {
            let values = maker.values("logprob", Fill::NearOverflow, b * t, t);
            values.into_iter().map(|v| v * round::pow2(-9)).collect()
        }
        fill => maker.values("logprob", fill, b * t, t),
    };
    with_count(maker, [("logprob", logprob)])
}

/// Tensors `[B,T]` and their count: a third of all tokens does not count, and no token of the last sequence where there are
/// several, or, in classes, all but one of each sequence. What does not count is NaN.
pub(super) fn with_count<const N: usize>(maker: &Maker, tensors: [(&str, Vec<f64>); N]) -> BTreeMap<String, Tensor> {
    let (b, t) = (maker.dim("B"), maker.dim("T"));
    let drawn = match maker.fill {
        Fill::Classes => (0..b * t).map(|i| i32::from(i % t == i / t % t)).collect(),
        Fill::Sharp => vec![1; b * t],
        _ => maker
            .below("count", b * t, 3)
            .into_iter()
            .enumerate()
            .map(|(i, c)| if b > 1 && i / t + 1 == b { 0 } else { c })
            .collect(),
    };
    let count = maker.ints("count", drawn);
    let of = |values: Vec<f64>| {
        values.iter().zip(&count).map(|(v, count)| if *count == 0 { f64::NAN } else { *v }).collect()
    };
    let mut inputs = maker.floats(tensors.map(|(name, values)| (name, vec![b, t], of(values))));
    inputs.insert("count".into(), Tensor::i32(&[b, t], count));
    inputs
}

fn compute(c: &Checked) -> References {
    let logprob = c.floats("logprob");
    losses(c, |i| [Inexact::exact(-logprob[i]), Inexact::exact(-1.0)])
}

/// Sums by sequence of the values, and gradients of the slopes, that `token` gives for tokens that count.
pub(super) fn losses(c: &Checked, token: impl Fn(usize) -> [Inexact; 2]) -> References {
    let (b, t) = (c.dim("B"), c.dim("T"));
    let (count, mean, denominator) = (c.ints("count"), c.word("reduction") == "mean", f32_of(c.float("denominator")));
    let (mut sums, mut slopes) = (Vec::new(), vec![(0.0, 0.0); b * t]);
    for sequence in 0..b {
        let counted: Vec<usize> = (sequence * t..(sequence + 1) * t).filter(|&i| count[i] != 0).collect();
        let tokens: Vec<[Inexact; 2]> = counted.iter().map(|&i| token(i)).collect();
        let share =
            |x: Inexact| if mean && !counted.is_empty() { x.over(Inexact::exact(counted.len() as f64)) } else { x };
        sums.push(share(Inexact::sum(&tokens.iter().map(|[value, _]| *value).collect::<Vec<_>>())).element());
        for (&i, [_, slope]) in counted.iter().zip(&tokens) {
            slopes[i] = share(*slope).over(Inexact::exact(denominator)).element();
        }
    }
    BTreeMap::from([
        ("per_sequence".to_string(), Reference::new(vec![b], sums)),
        ("dlogprob".to_string(), Reference::new(vec![b, t], slopes)),
    ])
}
