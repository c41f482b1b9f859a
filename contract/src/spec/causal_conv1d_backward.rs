//! `causal_conv1d_backward`: the inputs of its cases and its oracle.
use super::causal_conv1d::{TAPS, lengths, rows, rows_of, state, taps};
use super::gemm::sum_of;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::causal_conv1d_backward::OP,
    class: Class::Reduction,
    fills: TAPS,
    table: include_str!("../../ops/causal_conv1d_backward.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (b, t, c, k) = (maker.dim("B"), maker.dim("T"), maker.dim("C"), maker.dim("K"));
    let mut inputs = maker.floats([("dy", vec![b, t, c], rows(maker, "dy")), ("w", vec![c, k], taps(maker))]);
    if maker.has("dnext") {
        inputs.insert("dnext".into(), state(maker, "dnext"));
    }
    if maker.has("len") {
        inputs.insert("len".into(), lengths(maker));
    }
    inputs
}

/// A row of state and x meets the tap j of the output j rows before it, as far as that is there. Outputs that are not there are
/// terms of 0, which an infinite tap makes NaN.
fn compute(c: &Checked) -> References {
    let (b, t, all, k, before) = (c.dim("B"), c.dim("T"), c.dim("C"), c.dim("K"), c.dim("J"));
    let (dy, w, lengths) = (c.floats("dy"), c.floats("w"), rows_of(c));
    let dnext = c.case.inputs.get("dnext").map(Tensor::to_f64);
    let element = |entry: usize, row: usize, channel: usize| {
        let end = lengths[entry];
        if row >= before + end {
            return (0.0, 0.0);
        }
        let gradient = |j: usize| match row.checked_sub(j).filter(|&output| output < end) {
            Some(output) => dy[(entry * t + output) * all + channel],
            None => 0.0,
        };
        let terms = (0..k).map(|j| w[channel * k + j] * gradient(j));
        let of_next = row.checked_sub(end).map(|i| (entry * before + i) * all + channel);
        sum_of(terms.chain(dnext.as_ref().zip(of_next).map(|(dnext, i)| dnext[i])))
    };
    let of = |rows: usize, from: usize| {
        let element = |i: usize| element(i / all / rows, from + i / all % rows, i % all);
        Reference::new(vec![b, rows, all], (0..b * rows * all).map(element).collect::<Vec<_>>())
    };
    BTreeMap::from([("dx".to_string(), of(t, before)), ("dstate".to_string(), of(before, 0))])
}
