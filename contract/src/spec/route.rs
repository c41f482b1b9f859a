//! `route`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::route::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::Edges, Fill::Classes, Fill::Sharp],
    table: include_str!("../../ops/route.toml"),
    make,
    compute,
};

/// In every other row two logits are equal, so that the lowest index among equals is asked for.
pub(super) fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (t, e) = (maker.dim("T"), maker.dim("E"));
    let mut logits = maker.values("logits", maker.fill, t * e, e);
    if maker.fill == Fill::Sharp {
        // Rows for either scoring take turns.
        let (softmax, sigmoid) = (sharp::logits(t, e), sharp::sigmoid(t * e));
        let row = |i: usize| if i.is_multiple_of(2) { &softmax[i / 2 * e..][..e] } else { &sigmoid[i / 2 * e..][..e] };
        logits = (0..t).flat_map(row).copied().collect();
        return maker.floats([("logits", vec![t, e], logits)]);
    }
    if maker.fill == Fill::Tiny {
        // Sigmoids of about 1e-20: what is added to their sum before it divides them is felt.
        logits = maker.values("logits", Fill::Normal, t * e, e).into_iter().map(|v| v - 46.0).collect();
    }
    for row in logits.chunks_mut(e).step_by(2) {
        let at = (0..e).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("rows are not empty");
        row[e - 1 - at] = row[at];
    }
    if maker.fill == Fill::Classes {
        // One score of 1 beside zeros, equal scores, NaN.
        let rows: [&[f64]; 3] = [&[0.0, f64::NEG_INFINITY], &[0.0, 0.0], &[f64::NAN, 0.0]];
        for (values, kind) in logits.chunks_mut(e).zip(rows.iter().cycle()) {
            values.fill(kind[1]);
            values[0] = kind[0];
        }
    }
    let named = maker.has("experts").then(|| named(&logits, e, maker.count("chosen", 1)));
    let mut inputs = maker.floats([("logits", vec![t, e], logits)]);
    inputs.extend(named.map(|named| ("experts".into(), Tensor::i32(&[t, named.len() / t], named))));
    if maker.shape.contains_key("bias") {
        inputs.extend(maker.floats([("bias", vec![e], maker.values("bias", Fill::Normal, e, e))]));
    }
    inputs
}

/// Experts that rows name, by turns: the largest but the first, from the smallest on; none; and the smallest, the last first.
fn named(logits: &[f64], e: usize, chosen: usize) -> Vec<i32> {
    let of_row = |(row, logits): (usize, &[f64])| {
        let mut order = order(logits, &mut false, e);
        order.reverse();
        let first = match row % 3 {
            0 => e.saturating_sub(chosen + 1),
            1 => return vec![-1; chosen],
            _ => {
                order[..chosen].reverse();
                0
            }
        };
        order[first..][..chosen].iter().map(|&expert| expert as i32).collect()
    };
    logits.chunks(e).enumerate().flat_map(of_row).collect()
}

/// Choices closer than this may change places by rounding.
const CLOSE: f64 = 1e-5;

/// Choices smaller than this may become equal by rounding.
const TINY: f64 = 1e-28;

fn compute(c: &Checked) -> References {
    let (e, chosen) = (c.dim("E"), c.count("chosen"));
    let (groups, top) = (c.count("groups"), c.count("top_groups"));
    let bias = c.case.inputs.get("bias").map(Tensor::to_f64);
    let scale = f32_of(c.float("scale"));
    let sigmoid = c.word("scoring") == "sigmoid";
    let limit = limit(c);
    let by_logits = limit.is_some() || c.word("chosen_by") == "logits";
    let (mut ranks, mut weights) = (Vec::new(), Vec::new());
    let named = c.case.inputs.get("experts").map(|_| c.ints("experts"));
    for (token, row) in c.floats("logits").chunks(e).enumerate() {
        let scores = if limit.is_some() { row.to_vec() } else { scores(row, sigmoid) };
        let decides = if by_logits { row } else { &scores[..] };
        let choice: Vec<f64> = match &bias {
            None => decides.to_vec(),
            Some(bias) => decides.iter().zip(bias).map(|(value, bias)| value + bias).collect(),
        };
        let mut doubtful = false;
        let mut open = vec![true; e];
        let named = named.map(|named| &named[token * chosen..][..chosen]).filter(|named| named[0] >= 0);
        if let Some(named) = named {
            open = (0..e as i32).map(|expert| named.contains(&expert)).collect();
        } else if top < groups {
            let worth: Vec<f64> = choice
                .chunks(e / groups)
                .map(|group| {
                    let order = order(group, &mut false, group.len());
                    let second = if c.word("group_worth") == "top_two" { group[order[1]] } else { 0.0 };
                    group[order[0]] + second
                })
                .collect();
            let kept = order(&worth, &mut doubtful, top);
            for (i, open) in open.iter_mut().enumerate() {
                *open = kept.contains(&(i / (e / groups)));
            }
        }
        let left: Vec<usize> = (0..e).filter(|&i| open[i]).collect();
        let values: Vec<f64> = left.iter().map(|&i| choice[i]).collect();
        let taken: Vec<usize> = order(&values, &mut doubtful, chosen).into_iter().map(|i| left[i]).collect();
        // Nothing of a logit is rounded.
        doubtful &= !by_logits || bias.is_some() || c.word("group_worth") == "top_two";
        if let Some(limit) = limit {
            let known = |(value, condition): (f64, f64)| (value, if doubtful { f64::INFINITY } else { condition });
            let of_row = sparse(row, &taken, limit, c.flag("normalise"), scale);
            ranks.extend(of_row.iter().map(|element| known((element.0, 0.0))));
            weights.extend(of_row.iter().map(|element| known(element.1)));
            continue;
        }
        let total: f64 = taken.iter().map(|&i| scores[i]).sum::<f64>() + if sigmoid { 1e-20 } else { 0.0 };
        for i in 0..e {
            let Some(rank) = taken.iter().position(|&t| t == i) else {
                ranks.push((-1.0, if doubtful { f64::INFINITY } else { 0.0 }));
                weights.push((0.0, if doubtful { f64::INFINITY } else { 0.0 }));
                continue;
            };
            let score = if c.flag("normalise") { scores[i] / total } else { scores[i] };
            let value = score * scale;
            // The exponents' errors count as in softmax: by the size of the logits.
            let size = row.iter().filter(|v| v.is_finite()).fold(1f64, |m, v| m.max(v.abs()));
            let condition = match () {
                () if doubtful => f64::INFINITY,
                () if value.is_nan() || value == 0.0 && score == 0.0 && row[i] == f64::NEG_INFINITY => 0.0,
                () if super::logprob::exponent_overflows(size) => f64::INFINITY,
                () => value.abs() * 4.0 * super::softmax::exponent_error(size) + scale.abs() * round::pow2(-76),
            };
            ranks.push((rank as f64, if doubtful { f64::INFINITY } else { 0.0 }));
            weights.push((value, condition));
        }
    }
    let shape = vec![c.dim("T"), e];
    BTreeMap::from([
        ("rank".to_string(), Reference::new(shape.clone(), ranks)),
        ("weight".to_string(), Reference::new(shape, weights)),
    ])
}

/// Rank and weight of each expert of a row by sparsemixer.
fn sparse(row: &[f64], taken: &[usize], limit: f64, normalise: bool, scale: f64) -> Vec<(f64, (f64, f64))> {
    let shares = taken.iter().enumerate().map(|(rank, &i)| share(row, &taken[..rank], i, limit)[i]);
    let shares: Vec<(f64, f64)> = shares.collect();
    let all = route_backward::known_sum(&shares);
    let element = |i: usize| {
        let Some(rank) = taken.iter().position(|&t| t == i) else { return (-1.0, (0.0, 0.0)) };
        let (w, error) = if normalise { route_backward::quotient(shares[rank], all) } else { shares[rank] };
        (rank as f64, (w * scale, error * scale.abs() + (w * scale).abs() + FLOOR))
    };
    (0..row.len()).map(element).collect()
}

/// Twice the jitter of sparsemixer, in f32; `None` for another scoring.
pub(super) fn limit(c: &Checked) -> Option<f64> {
    (c.word("scoring") == "sparsemixer").then(|| f32_of(2.0 * c.float("jitter")))
}

/// The softmax of what counts for the weight of an expert that sparsemixer has chosen behind others; nothing is known of it where
/// rounding decides what counts.
pub(super) fn share(row: &[f64], before: &[usize], chosen: usize, limit: f64) -> Vec<(f64, f64)> {
    let (top, mut doubtful) = (row[chosen], false);
    let near = row.iter().enumerate().map(|(i, &x)| {
        let far = (top - x) / if x.abs() < top { top } else { x.abs() };
        doubtful |= !before.contains(&i) && (far - limit).abs() < 1e-6 * limit.max(1e-6);
        if far > limit || before.contains(&i) { f64::NEG_INFINITY } else { x }
    });
    let near: Vec<f64> = near.collect();
    let shares = softmax::shares(&near).into_iter();
    shares.map(|(value, condition)| (value, if doubtful { f64::INFINITY } else { condition })).collect()
}

/// Softmax or sigmoid of a row.
fn scores(row: &[f64], sigmoid: bool) -> Vec<f64> {
    if sigmoid {
        return row.iter().map(|v| 1.0 / (1.0 + (-v).exp())).collect();
    }
    // NaN, an infinity and nothing but -inf make the total NaN, and all scores with it.
    let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = row.iter().map(|v| (v - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

/// The first `count` places by value, larger first, a NaN before every number, the lowest place among equals; `doubtful`
/// where two neighbours in that order are close but not equal.
pub(super) fn order(values: &[f64], doubtful: &mut bool, count: usize) -> Vec<usize> {
    let key = |i: usize| if values[i].is_nan() { f64::INFINITY } else { values[i] };
    let mut places: Vec<usize> = (0..values.len()).collect();
    let is_nan = |i: usize| values[i].is_nan();
    let larger = |a: usize, b: usize| is_nan(b).cmp(&is_nan(a)).then(key(b).total_cmp(&key(a)));
    places.sort_by(|&a, &b| larger(a, b).then(a.cmp(&b)));
    // Rounding may make equal what is not: where both are tiny, nothing is told.
    let close = |a: f64, b: f64| {
        let size = a.abs().max(b.abs());
        a != b && (size < TINY || (a - b).abs() < CLOSE * size)
    };
    *doubtful |= places.windows(2).take(count).any(|two| close(key(two[0]), key(two[1])));
    places.truncate(count);
    places
}
