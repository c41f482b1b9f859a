//! `logprob`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::logprob::OP,
    class: Class::Logprob,
    fills: WEIGHTS,
    table: include_str!("../../ops/logprob.toml"),
    make,
    compute,
};

/// Without explicit `target` every fifth target is ignored (-1, -100 in turn).
pub(super) fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, v) = (maker.dim("R"), maker.dim("V"));
    let mut logits = maker.values("logits", maker.fill, r * v, v);
    if maker.fill == Fill::Peaky {
        logits.iter_mut().for_each(|x| *x *= 16.0);
    }
    if maker.fill == Fill::Classes {
        return classes(maker, r, v);
    }
    let ignored = |i: usize| if i % 10 == 4 { -1 } else { -100 };
    let drawn = maker.below("target", r, v);
    let mut target: Vec<i32> =
        drawn.into_iter().enumerate().map(|(i, t)| if i % 5 == 4 { ignored(i) } else { t }).collect();
    if maker.fill == Fill::Power {
        logits = power::logits_below_zero(maker, "logits", r, v);
    }
    if maker.fill == Fill::Sharp {
        logits = match v > sharp::LONG {
            true => sharp::near_one(maker.values("logits", Fill::Normal, r * v, v), v),
            false => sharp::logits(r, v),
        };
        target = vec![0; r];
    }
    let mut inputs = maker.floats([("logits", vec![r, v], logits)]);
    inputs.insert("target".into(), Tensor::i32(&[r], maker.ints("target", target)));
    inputs
}

/// Rows of one element 0, with its own and with another target; of nothing; with NaN; with a difference beyond f32;
/// with an ignored target.
fn classes(maker: &Maker, r: usize, v: usize) -> BTreeMap<String, Tensor> {
    let none = f64::NEG_INFINITY;
    let far = if maker.dtype == DType::Fp16 { 1.0 } else { round::pow2(127) };
    let kinds: [(&[f64], i32); 6] =
        [(&[0.0], 0), (&[0.0], 1), (&[none], 0), (&[f64::NAN], 0), (&[far, -1.5 * far], 1), (&[1.0, 2.0], -1)];
    let rows = || kinds.iter().cycle().take(r);
    let logits = rows().flat_map(|(kind, _)| kind.iter().copied().chain(std::iter::repeat(none)).take(v)).collect();
    let mut inputs = maker.floats([("logits", vec![r, v], logits)]);
    let target = rows().map(|(_, target)| *target).collect();
    inputs.insert("target".into(), Tensor::i32(&[r], maker.ints("target", target)));
    inputs
}

fn compute(c: &Checked) -> References {
    let (r, v) = (c.dim("R"), c.dim("V"));
    let inverse = f32_of(1.0 / c.float("temperature"));
    let logits = c.floats("logits");
    let (mut logprob, mut lse) = (Vec::with_capacity(r), Vec::with_capacity(r));
    for (row, &target) in logits.chunks(v).zip(c.ints("target")) {
        let x: Vec<f64> = row.iter().map(|z| scaled(z * inverse)).collect();
        let level = log_sum(&x);
        lse.push(level);
        logprob.push(match usize::try_from(target) {
            Err(_) => (0.0, 0.0),
            Ok(_) if level.0.is_nan() || level.0.is_infinite() => (f64::NAN, 0.0),
            Ok(target) if x[target] == f64::NEG_INFINITY => (f64::NEG_INFINITY, 0.0),
            Ok(target) => {
                let (below, condition) = below_level(&x, target);
                // Elements that were divided by a temperature have been rounded, every one to a share of itself.
                let shares = || x.iter().map(|v| (v - level.0).exp() * v.abs()).filter(|moved| !moved.is_nan());
                let rounded = if inverse == 1.0 { 0.0 } else { x[target].abs() + shares().sum::<f64>() };
                (below, condition + rounded)
            }
        });
    }
    BTreeMap::from([
        ("logprob".to_string(), Reference::new(vec![r], logprob)),
        ("lse".to_string(), Reference::new(vec![r], lse)),
    ])
}

/// A scaled logit; one that f32 cannot hold is infinite.
pub(super) fn scaled(x: f64) -> f64 {
    if f32_of(x).is_infinite() { f32_of(x) } else { x }
}

/// `ln(sum exp(x))` and what its error is proportional to.
pub(super) fn log_sum(x: &[f64]) -> (f64, f64) {
    if x.iter().any(|v| v.is_nan() || *v == f64::INFINITY) {
        return (f64::NAN, 0.0);
    }
    let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if top == f64::NEG_INFINITY {
        return (top, 0.0);
    }
    let (mut total, mut size) = (0.0, 0.0);
    for &v in x.iter().filter(|v| **v != f64::NEG_INFINITY) {
        let weight = (v - top).exp();
        total += weight;
        size += weight * v.abs();
    }
    // One element alone, and that is 0: nothing rounds.
    if top == 0.0 && size == 0.0 && total == 1.0 {
        return (0.0, 0.0);
    }
    let level = top + total.ln();
    let weights = x.iter().map(|v| (v - top).exp());
    (level, 1.0 + absorbed(weights, total) + level.abs() + size / total)
}

/// `x[target]` below `ln(sum exp(x))`, and what its error is proportional to: how far elements lie from the largest, and not
/// where that one lies.
pub(super) fn below_level(x: &[f64], target: usize) -> (f64, f64) {
    let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = x.iter().map(|v| (v - top).exp()).collect();
    let (mut total, mut rest, mut moved) = (0.0, 0.0, 0.0);
    for (i, (weight, v)) in weights.iter().zip(x).enumerate().filter(|(_, (_, v))| **v != f64::NEG_INFINITY) {
        total += weight;
        rest += if i == target { 0.0 } else { *weight };
        moved += weight * (v - top).abs();
    }
    let own = x[target] - top;
    // Of one that is nearly certain, the distance from ln(1) is lost where it is taken as a difference.
    let value = if rest < weights[target] { 0.0 - (rest / weights[target]).ln_1p() } else { own - total.ln() };
    let exact = rest == 0.0;
    let lost = absorbed(weights.into_iter(), total);
    (value, if exact { 0.0 } else { 1.0 + lost + value.abs() + own.abs() + moved / total })
}

/// Whether the exponent `x * log2(e)` of `e^x` is beyond f32.
pub(super) fn exponent_overflows(x: f64) -> bool {
    x.abs() * std::f64::consts::LOG2_E >= HUGE
}
