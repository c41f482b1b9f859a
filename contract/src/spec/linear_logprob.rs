//! `linear_logprob`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::logprob::{below_level, log_sum};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::linear_logprob::OP,
    class: Class::Logprob,
    fills: &[Fill::Normal, Fill::Tiny, Fill::Peaky, Fill::Edges, Fill::Classes, Fill::Sharp, Fill::Power],
    table: include_str!("../../ops/linear_logprob.toml"),
    make,
    compute,
};

/// Without explicit `target` every fifth target is ignored. Peaky: logits so far apart that weights are cut.
pub(super) fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (m, v, k) = (maker.dim("M"), maker.dim("V"), maker.dim("K"));
    let fill = |tensor: &str, fill: Fill, len: usize| maker.values(tensor, fill, len, k);
    let (mut x, mut w) = match maker.fill {
        Fill::Tiny => (fill("x", Fill::Tiny, m * k), fill("w", Fill::Normal, v * k)),
        Fill::Edges => (fill("x", Fill::Edges, m * k), fill("w", Fill::Normal, v * k)),
        _ => (fill("x", Fill::Normal, m * k), fill("w", Fill::Normal, v * k)),
    };
    if maker.fill == Fill::Peaky {
        x.iter_mut().for_each(|x| *x *= 32.0 / (k as f64).sqrt());
    }
    if maker.fill == Fill::Classes {
        return classes(maker, [m, v, k]);
    }
    let drawn = maker.below("target", m, v);
    let mut target: Vec<i32> = drawn.into_iter().enumerate().map(|(i, t)| if i % 5 == 4 { -1 } else { t }).collect();
    if maker.fill == Fill::Sharp {
        // Row i of x takes column i of w as its logits.
        x = (0..m * k).map(|at| f64::from(u8::from(at / k == at % k))).collect();
        let logits = match v > sharp::LONG {
            true => sharp::near_one(maker.values("logits", Fill::Normal, k * v, v), v),
            false => sharp::logits(k, v),
        };
        w = (0..v * k).map(|at| logits[at % k * v + at / k]).collect();
        target = vec![0; m];
    }
    if maker.fill == Fill::Power {
        (x, w) = power(maker, [m, v, k]);
    }
    let mut inputs = maker.floats([("x", vec![m, k], x), ("w", vec![v, k], w)]);
    inputs.insert("target".into(), Tensor::i32(&[m], maker.ints("target", target)));
    inputs
}

/// Logits of even rows are what survives of masks; odd rows take the first two columns of w as logits whose weights are lost beside
/// the largest.
fn power(maker: &Maker, [m, v, k]: [usize; 3]) -> (Vec<f64>, Vec<f64>) {
    let (masks, signs) = power::product(maker, "x", [m, v, k - 2]);
    let logits = power::logits_below_zero(maker, "w", 2, v);
    let (mut x, mut w) = (Vec::with_capacity(m * k), Vec::with_capacity(v * k));
    for (row, mask) in masks.chunks(k - 2).enumerate() {
        let of = |number: usize| f64::from(u8::from(row % 4 == number));
        x.extend([of(1), of(3)]);
        x.extend(mask.iter().map(|term| if row % 2 == 0 { *term } else { 0.0 }));
    }
    for (row, signs) in signs.chunks(k - 2).enumerate() {
        w.extend([logits[row], logits[v + row]]);
        // A unit of the logits is a sixteenth.
        w.extend(signs.iter().map(|sign| sign * 1024.0));
    }
    (x, w)
}

/// All logits but the first are -inf. The first is 0, with its own and with another target; -inf; NaN; 1 with an
/// ignored target.
fn classes(maker: &Maker, [m, v, k]: [usize; 3]) -> BTreeMap<String, Tensor> {
    let kinds = [(0.0, 0), (0.0, 1), (f64::NEG_INFINITY, 0), (f64::NAN, 0), (1.0, -1)];
    let kind = |row: usize| kinds[row % kinds.len()];
    let x = (0..m * k).map(|i| match i % k {
        0 => 1.0,
        1 => kind(i / k).0,
        _ => 0.0,
    });
    let w = (0..v * k).map(|i| match (i / k, i % k) {
        (1.., 0) => f64::NEG_INFINITY,
        (_, 1) => 1.0,
        _ => 0.0,
    });
    let mut inputs = maker.floats([("x", vec![m, k], x.collect()), ("w", vec![v, k], w.collect())]);
    let target = (0..m).map(|row| kind(row).1).collect();
    inputs.insert("target".into(), Tensor::i32(&[m], maker.ints("target", target)));
    inputs
}

fn compute(c: &Checked) -> References {
    let (m, v, k) = (c.dim("M"), c.dim("V"), c.dim("K"));
    let inverse = f32_of(1.0 / c.float("temperature"));
    let (x, w) = (c.floats("x"), c.floats("w"));
    let (mut logprob, mut lse) = (Vec::with_capacity(m), Vec::with_capacity(m));
    for (row, &target) in x.chunks(k).zip(c.ints("target")) {
        let logit = |j: usize| sum_of(row.iter().zip(&w[j * k..][..k]).map(|(a, b)| a * b));
        let logits: Vec<(f64, f64)> =
            (0..v).map(logit).map(|(value, size)| (value * inverse, size * inverse)).collect();
        let values: Vec<f64> = logits.iter().map(|(value, _)| *value).collect();
        let (level, size) = log_sum(&values);
        // An error in a logit moves lse by its share of the sum; 0 * inf is NaN, and moves nothing.
        let moved: f64 = if level.is_finite() {
            logits.iter().map(|(value, size)| (value - level).exp() * size).filter(|moved| !moved.is_nan()).sum()
        } else if logits.iter().any(|(_, size)| size.is_infinite()) {
            f64::INFINITY
        } else {
            0.0
        };
        // A logit about the end of f32 may be infinite in some order of its sum.
        let ends = values.iter().any(|value| value.is_finite() && value.abs() >= HUGE);
        let size = if ends { f64::INFINITY } else { size + moved };
        lse.push((level, size));
        logprob.push(match usize::try_from(target) {
            Err(_) => (0.0, 0.0),
            Ok(_) if size.is_infinite() => (0.0, f64::INFINITY),
            Ok(_) if level.is_nan() || level.is_infinite() => (f64::NAN, 0.0),
            Ok(target) if values[target] == f64::NEG_INFINITY => (f64::NEG_INFINITY, 0.0),
            Ok(target) => {
                let (below, condition) = below_level(&values, target);
                (below, condition + logits[target].1 + moved)
            }
        });
    }
    BTreeMap::from([
        ("logprob".to_string(), Reference::new(vec![m], logprob)),
        ("lse".to_string(), Reference::new(vec![m], lse)),
    ])
}
