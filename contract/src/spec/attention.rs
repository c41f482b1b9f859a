//! `attention`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::attention::OP,
    class: Class::Attention,
    fills: WEIGHTS,
    table: include_str!("../../ops/attention.toml"),
    make,
    compute,
};

/// Without explicit `kv_len` the keys are ragged: entry b has S - 3b of them (at least one). Without explicit `q_pos`
/// the queries are the last T positions of the keys, as in a prefill or a decode step.
pub(super) fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let dim = |axis: &str| maker.dim(axis);
    let (b, t, s, hq, hkv, d, e) = (dim("B"), dim("T"), dim("S"), dim("Hq"), dim("Hkv"), dim("D"), dim("E"));
    let mut q = maker.values("q", Fill::Normal, b * t * hq * d, d);
    let mut k = maker.values("k", Fill::Normal, b * s * hkv * d, d);
    let mut v = maker.values("v", Fill::Normal, b * s * hkv * e, e);
    match maker.fill {
        Fill::Peaky => q.iter_mut().for_each(|x| *x *= 8.0),
        Fill::Wide | Fill::Tiny => v = maker.values("v", maker.fill, b * s * hkv * e, e),
        // Sums of up to S weighted values stay below the largest f32.
        Fill::NearOverflow => {
            let room = if maker.dtype == DType::Fp16 { 1.0 } else { round::pow2(-12) };
            v = maker.values("v", Fill::NearOverflow, v.len(), e).into_iter().map(|x| x * room).collect();
        }
        // One special element per head of a few queries and keys, so that most rows stay finite.
        Fill::Edges => {
            q = maker.values("q", Fill::Edges, q.len(), hq * d);
            k = maker.sparse_edges("k", k.len(), 40 * d);
            v = maker.sparse_edges("v", v.len(), 40 * e);
        }
        // Queries take turns between the first two elements of the keys, and every value is a unit vector.
        Fill::Sharp => {
            let at = |len: usize, i: usize| (i / len, i % len);
            let scores = sharp::scores(s);
            q = (0..q.len()).map(|i| at(d, i)).map(|(row, x)| f64::from(u8::from(x == row / hq % 2))).collect();
            let key = |(row, x): (usize, usize)| scores.get(x).map_or(0.0, |scores| scores[row / hkv % s]);
            k = (0..k.len()).map(|i| key(at(d, i))).collect();
            v = (0..v.len()).map(|i| at(e, i)).map(|(row, x)| f64::from(u8::from(x == row / hkv % s % e))).collect();
        }
        // Scores of 0, so that weights are equal: one key with every border, four keys whose mean is a border, NaN, no
        // keys.
        Fill::Classes => {
            q.fill(0.0);
            v.chunks_mut(e).for_each(|values| values.copy_from_slice(&maker.borders_from(0, e)));
            for entry in (1..b).step_by(2) {
                let values = &mut v[entry * s * hkv * e..][..s * hkv * e];
                values[hkv * e..].fill(0.0);
                // 65504 out of four bf16 numbers.
                if maker.dtype != DType::Fp16 {
                    [131_072.0, 65536.0, 65024.0, 384.0].iter().enumerate().take(s).for_each(|(j, part)| {
                        values[(j * hkv + 1) * e - 1] = *part;
                    });
                }
            }
            q[(b - 1) * t * hq * d..].fill(f64::NAN);
        }
        _ => {}
    }
    if maker.fill == Fill::Power {
        [q, k, v] = power(maker, [b, t, s, hq, hkv, d, e]);
    }
    let ragged: Vec<i32> = (0..b)
        .map(|i| if maker.fill == Fill::Power { 0 } else { i })
        .map(|i| s.saturating_sub(3 * i).max(1) as i32)
        .collect();
    let kv_len = maker.ints("kv_len", ragged);
    let last = |i: usize| (0..t).map(move |j| (i as i64 - t as i64 + j as i64).max(0) as i32);
    let positions = kv_len.iter().flat_map(|&len| last(len.max(0) as usize)).collect();
    let q_pos = maker.ints("q_pos", positions);
    let mut inputs =
        maker.floats([("q", vec![b, t, hq, d], q), ("k", vec![b, s, hkv, d], k), ("v", vec![b, s, hkv, e], v)]);
    inputs.insert("q_pos".into(), Tensor::i32(&[b, t], q_pos));
    inputs.insert("kv_len".into(), Tensor::i32(&[b], kv_len));
    if maker.has("sinks") {
        inputs.extend(Maker { dtype: DType::Fp32, ..*maker }.floats([("sinks", vec![hq], sinks(maker, hq))]));
    }
    inputs
}

/// Sinks about as large as scores, below and above; of edges also those that are no term, and none that is a number.
fn sinks(maker: &Maker, heads: usize) -> Vec<f64> {
    match maker.fill {
        Fill::Edges => [2.0, f64::NEG_INFINITY, 90.0, f64::NAN].into_iter().cycle().take(heads).collect(),
        _ => maker.values("sinks", Fill::Normal, heads, heads).into_iter().map(|sink| 3.0 * sink).collect(),
    }
}

/// Key heads take turns by what they show. The sum of the values: scores of 0, and columns of values that are masks. The sum of
/// the weights: the logits of [`power::logits`], the largest of which have values of 0, and columns beside ties. The sums of the
/// scores: queries that are masks. The last T keys, of which a query may not see all, hold nothing that must cancel.
fn power(maker: &Maker, [b, t, s, hq, hkv, d, e]: [usize; 7]) -> [Vec<f64>; 3] {
    let (mut q, mut k, mut v) = (vec![0.0; b * t * hq * d], vec![0.0; b * s * hkv * d], vec![0.0; b * s * hkv * e]);
    let (of_q, of_k, of_v) = (maker.draw("q"), maker.draw("k"), maker.draw("v"));
    let scale = maker.params.get("scale").map_or(1.0 / (d as f64).sqrt(), |scale| scale.parse().expect("checked"));
    let common = s.saturating_sub(t).max(1);
    for (entry, head) in (0..b).flat_map(|entry| (0..hkv).map(move |head| (entry, head))) {
        let number = entry * hkv + head;
        let (of_q, of_k, of_v) = (of_q.of(number), of_k.of(number), of_v.of(number));
        let key = |j: usize| (entry * s + j) * hkv + head;
        let queries: Vec<usize> =
            (0..t * hq).filter(|i| i % hq / (hq / hkv) == head).map(|i| entry * t * hq + i).collect();
        match (entry + head) % 3 {
            0 => {
                for column in 0..e {
                    let mut terms = power::mask(&of_v, column, &vec![0; common]);
                    terms.resize(s, power::UNIT);
                    (0..s).for_each(|j| v[key(j) * e + column] = terms[j]);
                }
            }
            1 => {
                let logits = power::many_seen(maker, &of_k, 2 * number, common);
                let weight = |logit: f64| power::exp(logit - power::TOP);
                let top = |j: usize| logits.get(j) == Some(&power::TOP);
                let lost: f64 = logits.iter().filter(|logit| **logit != power::TOP).map(|logit| weight(*logit)).sum();
                let large = (0..common).filter(|&j| top(j)).count() as f64;
                for j in 0..s {
                    k[key(j) * d] = logits.get(j).copied().unwrap_or(-power::TOP);
                    // Another element takes the top to 0, so that lse shows all of what is lost beside it.
                    k[key(j) * d + d - 1] -= power::TOP;
                }
                for &row in &queries {
                    (q[row * d], q[row * d + d - 1]) = (1.0 / scale, 1.0 / scale);
                }
                for column in 0..e {
                    let sum = large + lost * of_v.below(column, 1 << 20) as f64 * round::pow2(-20);
                    let candidates = power::significands(maker, &of_v, e + column);
                    let factor = power::beside_tie(column, candidates, |m| m * lost / sum) * round::pow2(12);
                    (0..s).filter(|&j| !top(j)).for_each(|j| v[key(j) * e + column] = factor);
                }
            }
            _ => {
                let colours: Vec<usize> = (0..d).map(|i| of_q.below(i, 2)).collect();
                let sign = |j: usize, colour: usize| if of_k.below(2 * j + colour, 2) == 0 { 1024.0 } else { -1024.0 };
                for (number, &row) in queries.iter().enumerate() {
                    q[row * d..][..d].copy_from_slice(&power::mask(&of_q, number, &colours));
                }
                for j in 0..s {
                    (0..d).for_each(|i| k[key(j) * d + i] = sign(j, colours[i]));
                    (0..e).for_each(|i| v[key(j) * e + i] = of_v.below(j * e + i, 256) as f64 / 128.0 - 1.0);
                }
            }
        }
    }
    [q, k, v]
}

/// Which keys a query sees, of those that hold data.
pub(crate) struct Sees {
    causal: bool,
    window: i64,
    chunk: i64,
}

impl Sees {
    /// By what a call says, `count` of an attribute.
    pub(crate) fn of(count: impl Fn(&str) -> usize, causal: bool) -> Sees {
        let [window, chunk] = ["window", "chunk"].map(|name| i64::try_from(count(name)).unwrap_or(i64::MAX));
        Sees { causal, window, chunk }
    }

    pub(crate) fn key(&self, j: i64, position: i64) -> bool {
        let &Sees { causal, window, chunk } = self;
        (!causal || j <= position)
            && (window == 0 || j > position.saturating_sub(window))
            && (chunk == 0 || j.div_euclid(chunk) >= position.div_euclid(chunk))
    }
}

/// One key as a query sees it.
struct Seen<'a> {
    score: f64,
    /// What f32 errors of the score are proportional to.
    size: f64,
    v: &'a [f64],
}

fn compute(c: &Checked) -> References {
    let (b, t, s) = (c.dim("B"), c.dim("T"), c.dim("S"));
    let (hq, hkv, d, e) = (c.dim("Hq"), c.dim("Hkv"), c.dim("D"), c.dim("E"));
    let (q, k, v) = (c.operands("q"), c.operands("k"), c.operands("v"));
    let (q_pos, kv_len) = (c.ints("q_pos"), c.ints("kv_len"));
    let sinks = c.case.inputs.get("sinks").map(Tensor::to_f64);
    let scale = c.float("scale");
    let cap = c.float("softcap");
    let sees = Sees::of(|name| c.count(name), c.flag("causal"));
    let mut out = Vec::with_capacity(b * t * hq * e);
    let mut lse = Vec::with_capacity(b * t * hq);
    for row in 0..b * t * hq {
        let (batch, token, head) = (row / hq / t, row / hq, row % hq);
        let position = i64::from(q_pos[token]);
        let query = &q[row * d..][..d];
        let mut seen = Vec::new();
        for j in 0..kv_len[batch] as usize {
            if !sees.key(j as i64, position) {
                continue;
            }
            let at = (batch * s + j) * hkv + head / (hq / hkv);
            let (score, size) = score(query, &k[at * d..][..d], scale, cap);
            if score != f64::NEG_INFINITY {
                seen.push(Seen { score, size, v: &v[at * e..][..e] });
            }
        }
        // One of -inf is no term.
        let sink = sinks.as_ref().map(|sinks| sinks[head]).filter(|sink| *sink != f64::NEG_INFINITY);
        mix(&seen, sink, e, &mut out, &mut lse);
    }
    BTreeMap::from([
        ("out".to_string(), Reference::new(vec![b, t, hq, e], out)),
        ("lse".to_string(), Reference::new(vec![b, t, hq], lse)),
    ])
}

/// The scaled score (NaN for +inf too) and what its error is proportional to.
pub(super) fn score(query: &[f64], key: &[f64], scale: f64, cap: f64) -> (f64, f64) {
    let (mut dot, mut size) = (0.0, 0.0);
    for (a, b) in query.iter().zip(key) {
        dot += a * b;
        size += (a * b).abs();
    }
    let may_overflow = dot.is_finite() && size > HUGE;
    let (score, size) = if cap > 0.0 {
        let inner = dot * f32_of(scale / cap);
        let score = cap * inner.tanh();
        // The slope of tanh passes the error of the dot product on; tanh and the products add their own.
        let slope = 1.0 - inner.tanh() * inner.tanh();
        (score, slope * (size * scale).abs() + score.abs() + cap)
    } else {
        (dot * scale, (size * scale).abs())
    };
    match () {
        _ if may_overflow => (score, f64::INFINITY),
        _ if score.is_nan() || score == f64::INFINITY => (f64::NAN, 0.0),
        _ => (score, size),
    }
}

/// Softmax over the seen keys and the sink, and the weighted sum of the values.
fn mix(seen: &[Seen], sink: Option<f64>, e: usize, out: &mut Vec<(f64, f64)>, lse: &mut Vec<(f64, f64)>) {
    let not_a_number = sink.is_some_and(|sink| sink.is_nan() || sink == f64::INFINITY);
    if seen.is_empty() && !not_a_number {
        out.extend((0..e).map(|_| (0.0, 0.0)));
        lse.push(sink.map_or((f64::NEG_INFINITY, 0.0), |sink| (sink, 1.0 + sink.abs())));
        return;
    }
    if not_a_number || seen.iter().any(|key| key.score.is_nan()) {
        out.extend((0..e).map(|_| (f64::NAN, 0.0)));
        lse.push((f64::NAN, 0.0));
        return;
    }
    let top = seen.iter().map(|key| key.score).chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = seen.iter().map(|key| (key.score - top).exp()).collect();
    let of_sink = sink.map_or(0.0, |sink| (sink - top).exp());
    let total = weights.iter().sum::<f64>() + of_sink;
    let mean_size = weights.iter().zip(seen).map(|(w, key)| w * key.size).sum::<f64>() / total;
    let mean_size = if mean_size.is_nan() { f64::INFINITY } else { mean_size };
    let level = top + total.ln();
    let equal = sink.is_none() && seen.iter().all(|key| key.score == 0.0 && key.size == 0.0);
    lse.push(if equal && seen.len() == 1 {
        (0.0, 0.0)
    } else {
        (level, 1.0 + absorbed(weights.iter().copied(), total) + level.abs() + mean_size)
    });
    for column in 0..e {
        if let Some(mean) = exact_mean(seen, column).filter(|_| equal) {
            out.push((mean, 0.0));
            continue;
        }
        let (mut sum, mut size) = (0.0, 0.0);
        let (mut special, mut doubtful) = (None, false);
        for (weight, key) in weights.iter().zip(seen) {
            let v = key.v[column];
            if v.is_finite() {
                sum += weight * v;
                size += (weight * v).abs();
                continue;
            }
            // A weight below 2^-100 of the largest is +0, and 0 * inf is NaN.
            let kept = (key.score - top) / std::f64::consts::LN_2;
            doubtful |= v.is_infinite() && (-103.0..-97.0).contains(&kept);
            let term = if kept < -100.0 { f64::NAN } else { v };
            special = Some(special.unwrap_or(0.0) + term);
        }
        if let Some(special) = special {
            out.push((special, if doubtful { f64::INFINITY } else { 0.0 }));
            continue;
        }
        let mean = sum / total;
        if size > HUGE / 2.0 {
            out.push((mean, f64::INFINITY));
            continue;
        }
        // An error in a score moves weight between its value and the mean.
        let (mut moved, mut largest) = (0.0, 0.0f64);
        for (weight, key) in weights.iter().zip(seen) {
            let v = key.v[column];
            moved += weight / total * (v - mean).abs() * key.size;
            largest = largest.max(v.abs());
        }
        if moved.is_nan() {
            moved = f64::INFINITY;
        }
        let absorbed = mean.abs() * absorbed(weights.iter().copied(), total);
        // Dropped weights are below 2^-100 each.
        let dropped = largest * round::pow2(-76) * seen.len() as f64;
        // What a sink's exponential is off by moves all shares alike.
        let of_sink = of_sink / total * mean.abs();
        let condition = if largest == 0.0 { 0.0 } else { size / total + moved + dropped + absorbed + of_sink + FLOOR };
        out.push((mean, condition));
    }
}

/// The mean of a column of values of one weight, where neither the sum nor a share of it rounds, in whatever order.
fn exact_mean(seen: &[Seen], column: usize) -> Option<f64> {
    let count = seen.len() as f64;
    let values = || seen.iter().map(|key| key.v[column]);
    let (sum, condition) = gemm::sum_of(values());
    let held = seen.len().is_power_of_two() && values().all(|v| f32_of(v / count) == v / count);
    (held && condition == 0.0 && sum.is_finite()).then_some(sum / count)
}
