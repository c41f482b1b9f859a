//! `attention_backward`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::rms_norm_backward::Product;
use super::token_sum::{chain, term};
use super::*;
use crate::fill::Draw;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::attention_backward::OP,
    class: Class::Attention,
    fills: attention::SPEC.fills,
    table: include_str!("../../ops/attention_backward.toml"),
    make,
    compute,
};

/// What a call says beside its tensors.
struct Parameters {
    scale: f64,
    cap: f64,
    sees: attention::Sees,
}

impl Parameters {
    fn sees(&self, j: usize, position: i32, kv_len: i32) -> bool {
        let j = j as i64;
        j < i64::from(kv_len) && self.sees.key(j, i64::from(position))
    }
}

/// q, k, v, positions and lengths are those of attention; tiny, wide and huge numbers are in dout.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let dim = |axis: &str| maker.dim(axis);
    let (b, t, s, hq, hkv, d, e) = (dim("B"), dim("T"), dim("S"), dim("Hq"), dim("Hkv"), dim("D"), dim("E"));
    let of_dout = matches!(maker.fill, Fill::Wide | Fill::Tiny | Fill::NearOverflow);
    let mut inputs = attention::make(&Maker { fill: if of_dout { Fill::Normal } else { maker.fill }, ..*maker });
    let out = maker.values("out", Fill::Normal, b * t * hq * e, e);
    let mut dout = maker.values("dout", if of_dout { maker.fill } else { Fill::Normal }, b * t * hq * e, e);
    match maker.fill {
        // Sums over keys and queries stay below the largest f32.
        Fill::NearOverflow => {
            let room = if maker.dtype == DType::Fp16 { 1.0 } else { round::pow2(-16) };
            dout.iter_mut().for_each(|x| *x *= room);
        }
        Fill::Edges => dout = maker.sparse_edges("dout", dout.len(), 40 * e),
        // Queries take turns, so that each shows its p of every key in dv.
        Fill::Sharp => {
            let at = |i: usize| (i / e / hq % e, i % e);
            dout = (0..dout.len()).map(at).map(|(row, x)| f64::from(u8::from(row == x))).collect();
        }
        _ => {}
    }
    if maker.has("mask") {
        inputs.insert("mask".into(), Tensor::i32(&[b, t], maker.ints("mask", maker.below("mask", b * t, 3))));
    }
    let rows = vec![b, t, hq, e];
    inputs.extend(maker.floats([("out", rows.clone(), out), ("dout", rows, dout)]));
    match maker.fill {
        Fill::Power if d.min(e) >= WIDE => power_of_heads(maker, [b, t, s, hq, hkv, d, e], &mut inputs),
        Fill::Power => power(maker, [b, t, s, hq, hkv, d, e], &mut inputs),
        _ => {}
    }
    let lse = if maker.fill == Fill::Power {
        vec![0.0; b * t * hq]
    } else if maker.fill == Fill::Classes {
        classes(maker, [b, t, s, hq, hkv, d, e], &mut inputs);
        vec![0.0; b * t * hq]
    } else {
        levels(maker, &inputs, [b, t, s, hq, hkv, d])
    };
    inputs.extend(Maker { dtype: DType::Fp32, ..*maker }.floats([("lse", vec![b, t, hq], lse)]));
    inputs
}

/// Scores of 0 and an lse of 0, so that every p is 1. Entries take turns: dq is a sum of masks over keys; dk is one over queries;
/// dv is.
fn power(maker: &Maker, [b, t, s, hq, hkv, d, e]: [usize; 7], inputs: &mut BTreeMap<String, Tensor>) {
    let [mut q, mut k] = [b * t * hq * d, b * s * hkv * d].map(|len| vec![0.0; len]);
    let (mut v, mut dout) = (vec![0.0; b * s * hkv * e], vec![0.0; b * t * hq * e]);
    let draw = maker.draw("power");
    for (entry, head) in (0..b).flat_map(|entry| (0..hkv).map(move |head| (entry, head))) {
        let (draw, shared) = (draw.of(entry * hkv + head), hq / hkv);
        let keys: Vec<usize> = (0..s).map(|j| (entry * s + j) * hkv + head).collect();
        let rows = (0..t * shared).map(|i| (entry * t + i / shared) * hq + head * shared + i % shared);
        let rows: Vec<usize> = rows.collect();
        let first = |values: &mut [f64], places: &[usize]| places.iter().for_each(|place| values[place * e] = 1.0);
        let masks = |values: &mut [f64], places: &[usize], dim: usize, columns: std::ops::Range<usize>| {
            for column in columns {
                let terms = power::mask(&draw, column, &vec![0; places.len()]);
                places.iter().zip(terms).for_each(|(place, term)| values[place * dim + column] = term);
            }
        };
        if entry % 3 < 2 {
            // g is the product of the first elements.
            first(&mut v, &keys);
            first(&mut dout, &rows);
        }
        match entry % 3 {
            0 => masks(&mut k, &keys, d, 0..d),
            1 => masks(&mut q, &rows, d, 0..d),
            _ => masks(&mut dout, &rows, e, 0..e),
        }
    }
    put(maker, [b, t, s, hq, hkv, d, e], inputs, [q, k, v, vec![0.0; b * t * hq * e], dout]);
}

/// Puts q, k, v, out and dout in the place of others.
fn put(
    maker: &Maker,
    [b, t, s, hq, hkv, d, e]: [usize; 7],
    inputs: &mut BTreeMap<String, Tensor>,
    [q, k, v, out, dout]: [Vec<f64>; 5],
) {
    let (of_rows, of_keys) = (|dim| vec![b, t, hq, dim], |dim| vec![b, s, hkv, dim]);
    inputs.extend(maker.floats([("q", of_rows(d), q), ("k", of_keys(d), k), ("v", of_keys(e), v)]));
    inputs.extend(maker.floats([("out", of_rows(e), out), ("dout", of_rows(e), dout)]));
}

/// Heads of as many elements show the order of sums over these, others that of sums over keys and queries.
const WIDE: usize = 64;

/// Sums over the elements of a head. Every p is 1 where q is 0, and each key is 1 in a column of its own, so dq shows g of each:
/// the output with its gradient in one entry, the gradient with values in the next. In every third the scores are what survives of
/// masks, in steps of 1/128, and dv shows p, of the first query alone.
fn power_of_heads(maker: &Maker, [b, t, s, hq, hkv, d, e]: [usize; 7], inputs: &mut BTreeMap<String, Tensor>) {
    let [mut q, mut k] = [b * t * hq * d, b * s * hkv * d].map(|len| vec![0.0; len]);
    let [mut v, mut out, mut dout] = [b * s * hkv * e, b * t * hq * e, b * t * hq * e].map(|len| vec![0.0; len]);
    let draw = maker.draw("power");
    let masks = |draw: Draw, values: &mut [f64], dim: usize| {
        values.copy_from_slice(&power::masks(&draw, values.len() / dim, dim));
    };
    for entry in 0..b {
        let draw = draw.of(entry);
        let (rows, keys) = (entry * t * hq..(entry + 1) * t * hq, entry * s * hkv..(entry + 1) * s * hkv);
        let of = |places: &std::ops::Range<usize>, dim: usize| places.start * dim..places.end * dim;
        dout[of(&rows, e)].fill(1.0);
        let columns = |k: &mut [f64]| k.chunks_mut(d).enumerate().for_each(|(key, to)| to[key / hkv % d] = 1.0);
        match entry % 3 {
            0 => {
                masks(draw, &mut out[of(&rows, e)], e);
                columns(&mut k[of(&keys, d)]);
            }
            1 => {
                masks(draw, &mut v[of(&keys, e)], e);
                columns(&mut k[of(&keys, d)]);
            }
            _ => {
                masks(draw, &mut q[of(&rows, d)], d);
                let unit = (d as f64).sqrt() / (128.0 * power::UNIT);
                k[of(&keys, d)].fill(unit);
                dout[of(&rows, e)][hq * e..].fill(0.0);
            }
        }
    }
    put(maker, [b, t, s, hq, hkv, d, e], inputs, [q, k, v, out, dout]);
}

/// What attention returns as lse, as a multiple of 2^-16, which no two mathematics libraries tell apart. That of sharp
/// scores is 0: every p is the exponential of its score.
fn levels(maker: &Maker, inputs: &BTreeMap<String, Tensor>, [b, t, s, hq, hkv, d]: [usize; 6]) -> Vec<f64> {
    let number = |name: &str| maker.params.get(name).map(|text| text.parse::<f64>().expect("the loader checks"));
    let parameters = Parameters {
        scale: number("scale").unwrap_or(1.0 / (d as f64).sqrt()),
        cap: number("softcap").unwrap_or(0.0),
        sees: attention::Sees::of(|name| maker.count(name, 0), maker.count("causal", 0) == 1),
    };
    let (q, k) = (inputs["q"].to_f64(), inputs["k"].to_f64());
    let ints = |name: &str| inputs[name].as_i32().expect("integers");
    let (q_pos, kv_len) = (ints("q_pos"), ints("kv_len"));
    let level = |row: usize| {
        let (token, batch) = (row / hq, row / hq / t);
        let keys = (0..s).filter(|&j| parameters.sees(j, q_pos[token], kv_len[batch]));
        let scores = keys.map(|j| {
            let at = ((batch * s + j) * hkv + row % hq / (hq / hkv)) * d;
            attention::score(&q[row * d..][..d], &k[at..][..d], parameters.scale, parameters.cap).0
        });
        let scores: Vec<f64> = scores.filter(|score| *score != f64::NEG_INFINITY).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if scores.iter().any(|score| score.is_nan()) || logprob::exponent_overflows(top) && !scores.is_empty() {
            return f64::NAN;
        }
        if scores.is_empty() || maker.fill == Fill::Sharp && top < 64.0 {
            return if scores.is_empty() { f64::NEG_INFINITY } else { 0.0 };
        }
        let level = top + scores.iter().map(|score| (score - top).exp()).sum::<f64>().ln();
        (level * round::pow2(16)).round_ties_even() * round::pow2(-16)
    };
    (0..b * t * hq).map(level).collect()
}

/// Scores of 0 and an lse of 0, so that every p is 1. Entries take turns: dv is borders; dk is; dq is; dk and dq are
/// infinite. The last column of borders adds up over rows or keys to the largest number of another dtype.
fn classes(maker: &Maker, [b, t, s, hq, hkv, d, e]: [usize; 7], inputs: &mut BTreeMap<String, Tensor>) {
    let pow = round::pow2;
    let [mut q, mut k] = [(b * t * hq, d), (b * s * hkv, d)].map(|(rows, dim)| vec![0.0; rows * dim]);
    let mut v = vec![0.0; b * s * hkv * e];
    let [mut out, mut dout] = [(); 2].map(|()| vec![0.0; b * t * hq * e]);
    let finite: Vec<f64> = maker.borders().into_iter().filter(|border| border.is_finite()).collect();
    let largest: &[f64] = match maker.dtype {
        DType::Fp16 => &[0.0],
        _ => &[pow(128) - pow(120), pow(120) - pow(112), pow(112) - pow(104)],
    };
    let largest_fp16 = [65280.0, 224.0];
    // Rows of one head of an entry, the first of which holds borders; the last two columns are sums over rows.
    let borders = |values: &mut [f64], rows: usize, heads: usize, dim: usize, borders: &[f64]| {
        for row in 0..rows {
            let row_of = &mut values[row * heads * dim..][..dim];
            if row == 0 {
                row_of.iter_mut().zip(borders.iter().cycle()).for_each(|(value, border)| *value = *border);
            }
            row_of[dim - 1] = largest.get(row).copied().unwrap_or(0.0);
            row_of[dim - 2] = largest_fp16.get(row).copied().unwrap_or(0.0);
        }
    };
    for entry in 0..b {
        let (rows, keys) = (entry * t * hq, entry * s * hkv);
        let (q, k) = (&mut q[rows * d..][..t * hq * d], &mut k[keys * d..][..s * hkv * d]);
        let (v, dout) = (&mut v[keys * e..][..s * hkv * e], &mut dout[rows * e..][..t * hq * e]);
        let first = |values: &mut [f64], value: f64| values.iter_mut().step_by(e).for_each(|v| *v = value);
        if entry % 5 > 0 {
            // g is the product of the first elements.
            first(v, 1.0);
            first(dout, 1.0);
        }
        match entry % 5 {
            0 => borders(dout, t, hq, e, &maker.borders()),
            1 => borders(q, t, hq, d, &finite),
            2 => borders(k, s, hkv, d, &finite),
            side => {
                first(dout, f64::INFINITY);
                first(&mut out[rows * e..][..t * hq * e], -1.0);
                let signs = if side == 3 { q } else { k };
                signs.iter_mut().enumerate().for_each(|(i, v)| *v = if i % 2 == 0 { 1.0 } else { -1.0 });
            }
        }
    }
    put(maker, [b, t, s, hq, hkv, d, e], inputs, [q, k, v, out, dout]);
}

fn compute(c: &Checked) -> References {
    let (b, t, s) = (c.dim("B"), c.dim("T"), c.dim("S"));
    let (hq, hkv, d, e) = (c.dim("Hq"), c.dim("Hkv"), c.dim("D"), c.dim("E"));
    let [q, k, v, dout] = ["q", "k", "v", "dout"].map(|name| c.operands(name));
    let (out, lse) = (c.floats("out"), c.floats("lse"));
    let (q_pos, kv_len) = (c.ints("q_pos"), c.ints("kv_len"));
    let mask = c.case.inputs.get("mask").and_then(Tensor::as_i32);
    let sees = attention::Sees::of(|name| c.count(name), c.flag("causal"));
    let parameters = Parameters { scale: c.float("scale"), cap: c.float("softcap"), sees };
    let mut dq = vec![Vec::new(); b * t * hq * d];
    let (mut dk, mut dv) = (vec![Vec::new(); b * s * hkv * d], vec![Vec::new(); b * s * hkv * e]);
    for row in 0..b * t * hq {
        let (token, batch, head) = (row / hq, row / hq / t, row % hq);
        let (query, gradient) = (&q[row * d..][..d], &dout[row * e..][..e]);
        let products = |a: &[f64], b: &[f64]| sum_of(a.iter().zip(b).map(|(a, b)| a * b));
        let delta = products(gradient, &out[row * e..][..e]);
        for j in (0..s).filter(|&j| parameters.sees(j, q_pos[token], kv_len[batch])) {
            let at = (batch * s + j) * hkv + head / (hq / hkv);
            let (key, value) = (&k[at * d..][..d], &v[at * e..][..e]);
            let Some(Pair { p, g }) = pair(query, key, lse[row], products(gradient, value), delta, &parameters) else {
                continue;
            };
            (0..d).for_each(|i| dq[row * d + i].push(term(key[i], g)));
            if mask.is_none_or(|mask| mask[token] != 0) {
                (0..d).for_each(|i| dk[at * d + i].push(term(query[i], g)));
                (0..e).for_each(|i| dv[at * e + i].push(term(gradient[i], p)));
            }
        }
    }
    let factor = f32_of(parameters.scale);
    let sums = |shape: [usize; 4], terms: Vec<Vec<Product>>, factor: Option<f64>| {
        let element = |terms: &Vec<Product>| {
            let sum = chain(0.0, terms);
            factor.map_or(sum, |factor| times(sum, factor))
        };
        Reference::new(shape.to_vec(), terms.iter().map(element).collect::<Vec<_>>())
    };
    BTreeMap::from([
        ("dq".to_string(), sums([b, t, hq, d], dq, Some(factor))),
        ("dk".to_string(), sums([b, s, hkv, d], dk, Some(factor))),
        ("dv".to_string(), sums([b, s, hkv, e], dv, None)),
    ])
}

/// A product with an exact factor that is rounded to f32.
fn times((sum, condition): (f64, f64), factor: f64) -> (f64, f64) {
    let value = sum * factor;
    match () {
        _ if condition.is_infinite() || value.is_nan() => (value, condition),
        _ if condition == 0.0 && (value.is_infinite() || f32_of(value) == value) => (value, 0.0),
        _ => (value, condition * factor + value.abs() + FLOOR),
    }
}

/// What a query makes of a key that it sees.
struct Pair {
    p: Product,
    g: Product,
}

/// Nothing is claimed of it.
const DOUBTFUL: Product = Product { value: 0.0, error: f64::INFINITY };

/// p and g with errors in units of 2^-24; `None` where the score is -inf.
fn pair(query: &[f64], key: &[f64], lse: f64, dp: (f64, f64), delta: (f64, f64), of: &Parameters) -> Option<Pair> {
    let (mut dot, mut size) = (0.0, 0.0);
    for (a, b) in query.iter().zip(key) {
        dot += a * b;
        size += (a * b).abs();
    }
    // A sum that may overflow on the way, or not.
    if dot.is_finite() && size > HUGE {
        return Some(Pair { p: DOUBTFUL, g: DOUBTFUL });
    }
    let size = if dot.is_finite() { size * of.scale } else { 0.0 };
    // The score, what its error is proportional to, and how much of a change in it tanh lets through.
    let (score, size, slope) = if of.cap > 0.0 {
        let t = (dot * f32_of(of.scale / of.cap)).tanh();
        let slope = 1.0 - t * t;
        let exact = t == 0.0 && size == 0.0;
        let of_t = if exact { 0.0 } else { 2.0 + slope * size / of.cap };
        let slope = Product { value: slope, error: 2.0 * t.abs() * of_t + if exact { 0.0 } else { slope } };
        (of.cap * t, if exact { 0.0 } else { slope.value * size + (of.cap * t).abs() + of.cap }, Some(slope))
    } else {
        if dot == f64::NEG_INFINITY {
            return None;
        }
        (dot * of.scale, size, None)
    };
    let p = weight(score, size, lse);
    let difference = {
        let value = dp.0 - delta.0;
        let exact = value.is_nan() || value.is_infinite() || f32_of(value) == value;
        Product { value, error: dp.1 + delta.1 + if exact { 0.0 } else { value.abs() } }
    };
    let g = times_both(p, difference);
    Some(Pair { p, g: slope.map_or(g, |slope| times_both(g, slope)) })
}

/// `e^(score - lse)`, or +0 where its exponent is below -100.
fn weight(score: f64, size: f64, lse: f64) -> Product {
    let d = score - lse;
    let exponent = d * std::f64::consts::LOG2_E;
    match () {
        _ if d.is_nan() || d == f64::INFINITY => Product { value: d, error: 0.0 },
        // What f32 may make of the score is far from that of f64.
        _ if size.is_infinite() || size * round::pow2(-20) > 1.0 => DOUBTFUL,
        _ if exponent < -103.0 => Product { value: 0.0, error: 0.0 },
        // f32 may make infinity of it.
        _ if d > 88.0 => DOUBTFUL,
        _ if d == 0.0 && size == 0.0 => Product { value: 1.0, error: 0.0 },
        _ => {
            let p = d.exp();
            let cut = if exponent < -98.0 { round::pow2(-74) } else { 0.0 };
            let factor = softmax::exponent_error(d) + size + 2.0 * d.abs() + 1.0;
            Product { value: p, error: p * factor + cut }
        }
    }
}

/// The product of two numbers with errors, rounded to f32.
fn times_both(a: Product, b: Product) -> Product {
    let value = a.value * b.value;
    // Whether it may be 0, or of the other sign.
    let uncertain = |x: Product| x.error > 0.0 && x.value.abs() <= x.error * round::pow2(-14);
    match () {
        _ if a.error.is_infinite() || b.error.is_infinite() => {
            if a.value.is_nan() || b.value.is_nan() {
                Product { value: f64::NAN, error: 0.0 }
            } else {
                DOUBTFUL
            }
        }
        _ if a.value.is_infinite() && uncertain(b) || b.value.is_infinite() && uncertain(a) => DOUBTFUL,
        _ if !value.is_finite() => Product { value, error: 0.0 },
        _ if value.abs() > HUGE => DOUBTFUL,
        _ => {
            let exact = a.error == 0.0 && b.error == 0.0 && f32_of(value) == value;
            let error = a.error * b.value.abs() + b.error * a.value.abs();
            Product { value, error: error + if exact { 0.0 } else { value.abs() + FLOOR } }
        }
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::spec::softmax::exponent_error;

    fn parts(x: Product) -> (f64, f64) {
        (x.value, x.error)
    }

    fn near((value, error): (f64, f64), expected: [f64; 2]) -> bool {
        (value - expected[0]).abs() <= 1e-12 * expected[0].abs() && (error - expected[1]).abs() <= 1e-12 * expected[1]
    }

    /// With softcap: what is left of an error of the score behind tanh, and what the exponential makes of it.
    pub(crate) fn errors_of_capped_pairs_by_hand() {
        let of = Parameters { scale: 0.5, cap: 2.0, sees: attention::Sees::of(|_| 0, false) };
        let pair = |query: &[f64], key: &[f64]| {
            let Pair { p, g } = pair(query, key, 0.0, (3.0, 0.0), (1.0, 0.0), &of).unwrap();
            [parts(p), parts(g)]
        };
        // Nothing was rounded.
        assert_eq!(pair(&[0.0], &[1.0]), [(1.0, 0.0), (2.0, 0.0)]);
        // A score of 0 that is made of terms: an error of half of their size, 2, twice, and that of `cap * t`.
        let of_p = exponent_error(0.0) + (1.0 * 2.0 + 0.0 + 2.0) + 0.0 + 1.0;
        let found = pair(&[2.0, -2.0], &[1.0, 1.0]);
        assert!(near(found[0], [1.0, of_p]), "{found:?}");
        // The slope is 1 with an error of 1.
        assert!(near(found[1], [2.0, (2.0 * of_p + 2.0 + FLOOR) + 2.0 + 2.0 + FLOOR]), "{found:?}");
        // 3 times 1/4 is what tanh is given; its error is 1.5 times 1/2 of the slope, and 2.
        let (t, slope) = (0.75f64.tanh(), 1.0 - 0.75f64.tanh().powi(2));
        let (d, p) = (2.0 * t, (2.0 * t).exp());
        let of_p = p * (exponent_error(d) + (slope * 1.5 + d + 2.0) + 2.0 * d + 1.0);
        let of_slope = 2.0 * t * (2.0 + slope * 1.5 / 2.0) + slope;
        let of_g = 2.0 * of_p + 2.0 * p + FLOOR;
        let found = pair(&[3.0], &[1.0]);
        assert!(near(found[0], [p, of_p]), "{found:?}");
        let g = 2.0 * p * slope;
        assert!(near(found[1], [g, of_g * slope + of_slope * 2.0 * p + g + FLOOR]), "{found:?}");
    }

    /// Beside an infinity a number counts with its sign; where it may be 0 nothing is claimed.
    pub(crate) fn products_of_inexact_numbers_by_hand() {
        let both = |[a, of_a]: [f64; 2], [b, of_b]: [f64; 2]| {
            let of = |value, error| Product { value, error };
            let [found, other] =
                [times_both(of(a, of_a), of(b, of_b)), times_both(of(b, of_b), of(a, of_a))].map(parts);
            assert_eq!((found.0.to_bits(), found.1), (other.0.to_bits(), other.1));
            found
        };
        let (infinite, most) = ([f64::INFINITY, 0.0], round::pow2(14));
        assert_eq!(both(infinite, [1.0, most]), (0.0, f64::INFINITY));
        for (b, error) in [(1.0, most - 1.0), (1.0, 2.0), (-1.0, 0.0)] {
            assert_eq!(both(infinite, [b, error]), (b * f64::INFINITY, 0.0));
        }
        assert_eq!(both(infinite, [0.0, 0.5]), (0.0, f64::INFINITY));
        let (value, error) = both(infinite, [0.0, 0.0]);
        assert!(value.is_nan() && error == 0.0);
        let (value, error) = both([0.0, f64::INFINITY], [f64::NAN, 0.0]);
        assert!(value.is_nan() && error == 0.0);
        // Exact where both are and f32 holds the product.
        assert_eq!(both([2.0, 0.0], [3.0, 0.0]), (6.0, 0.0));
        assert_eq!(both([2.0, 0.0], [3.0, 1.0]), (6.0, 2.0 + 6.0 + FLOOR));
        assert_eq!(both([0.0, 1.0], [0.0, 1.0]), (0.0, FLOOR));
    }
}
