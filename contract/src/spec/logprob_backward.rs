//! `logprob_backward`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::logprob_backward::OP,
    class: Class::Logprob,
    fills: logprob::SPEC.fills,
    table: include_str!("../../ops/logprob_backward.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, v) = (maker.dim("R"), maker.dim("V"));
    // What has a number for each row is f32.
    let wide = Maker { dtype: DType::Fp32, ..*maker };
    if maker.fill == Fill::Classes {
        return classes(maker, &wide, r, v);
    }
    let mut inputs = logprob::make(maker);
    let turns = softmax_backward::in_turns(maker.fill);
    if turns {
        let logits = softmax_backward::turned(maker, "logits", [maker.fill, Fill::Normal], r, v);
        inputs.extend(maker.floats([("logits", vec![r, v], logits)]));
    }
    let sharp = maker.fill == Fill::Sharp;
    // A sharp row shows the exponential of each logit but that of the target, the first.
    let small = |row: &[f64]| row.iter().all(|z| *z < 64.0);
    let lse = |row: &[f64]| if sharp && small(row) { 0.0 } else { level(row) };
    let lse: Vec<f64> = inputs["logits"].to_f64().chunks(v).map(lse).collect();
    let gradient = |name: &str| match maker.fill {
        Fill::Sharp => vec![-1.0; r],
        Fill::Peaky => maker.values(name, Fill::Normal, r, 1),
        fill if turns => softmax_backward::turned(&wide, name, [Fill::Normal, fill], r, 1),
        fill => wide.values(name, fill, r, 1),
    };
    inputs.extend(wide.floats([("lse", vec![r], lse), ("dlogprob", vec![r], gradient("dlogprob"))]));
    if maker.has("dlse") {
        inputs.extend(wide.floats([("dlse", vec![r], gradient("dlse"))]));
    }
    inputs
}

/// What logprob returns at temperature 1, as a multiple of 2^-16, which no two mathematics libraries tell apart.
pub(super) fn level(row: &[f64]) -> f64 {
    (logprob::log_sum(row).0 * round::pow2(16)).round_ties_even() * round::pow2(-16)
}

/// Rows whose first element has a probability of 1 and hands on any number, whose second is the target, and whose third has
/// no probability; a row of nothing.
fn classes(maker: &Maker, wide: &Maker, r: usize, v: usize) -> BTreeMap<String, Tensor> {
    let none = f64::NEG_INFINITY;
    let mut logits: Vec<f64> =
        [0.0, 0.0].into_iter().chain(std::iter::repeat(none)).take(v).collect::<Vec<_>>().repeat(r);
    logits[(r - 1) * v..].fill(none);
    let mut lse = vec![0.0; r];
    lse[r - 1] = none;
    let dlogprob = wide.borders_from(0, r);
    let mut inputs = maker.floats([("logits", vec![r, v], logits)]);
    inputs.extend(wide.floats([("lse", vec![r], lse), ("dlogprob", vec![r], dlogprob)]));
    inputs.insert("target".into(), Tensor::i32(&[r], maker.ints("target", vec![1; r])));
    inputs
}

fn compute(c: &Checked) -> References {
    let (r, v) = (c.dim("R"), c.dim("V"));
    let inverse = f32_of(1.0 / c.float("temperature"));
    let (logits, lse, dlogprob) = (c.floats("logits"), c.floats("lse"), c.floats("dlogprob"));
    let dlse = if c.call.has("dlse") { c.floats("dlse") } else { vec![0.0; r] };
    let mut elements = Vec::with_capacity(r * v);
    for (i, (row, &target)) in logits.chunks(v).zip(c.ints("target")).enumerate() {
        let target = usize::try_from(target).ok();
        let of_target = if target.is_some() { dlogprob[i] } else { 0.0 };
        let c = dlse[i] - of_target;
        elements.extend(row.iter().enumerate().map(|(j, &z)| {
            // -0 changes no sum.
            let own = if target == Some(j) { of_target } else { -0.0 };
            element(logprob::scaled(z * inverse), lse[i], c, own, inverse)
        }));
    }
    one("dlogits", Reference::new(vec![r, v], elements))
}

/// Value and condition of `(e^(x - level) * c + own) * inverse`.
pub(super) fn element(x: f64, level: f64, c: f64, own: f64, inverse: f64) -> (f64, f64) {
    let d = x - level;
    // The exponent, at -100 of which a probability is cut off.
    let exponent = d * std::f64::consts::LOG2_E;
    let p = if exponent < -103.0 { 0.0 } else { d.exp() };
    let perhaps = (-103.0..-98.0).contains(&exponent);
    let g = p * c + own;
    let value = g * inverse;
    let held = |v: f64| f32_of(v) == v;
    let known = exponent < -103.0 || d == f64::INFINITY || d == 0.0 && held(x) || c == 0.0;
    let condition = match () {
        // f32 may make infinity of it.
        _ if d.is_finite() && d > 88.0 => f64::INFINITY,
        // Infinity times what may be 0.
        _ if perhaps && c.is_infinite() => f64::INFINITY,
        _ if value.is_nan() => 0.0,
        _ if c.is_infinite() || d == f64::INFINITY => 0.0,
        _ if known && held(c) && held(p * c) && held(g) && held(value) => 0.0,
        _ if [c, p * c, g, value].iter().any(|v| v.abs() > HUGE) => f64::INFINITY,
        _ => {
            // x and d are rounded, which an exponential turns into a factor.
            let inexact = if d == 0.0 && held(x) { 0.0 } else { x.abs() + d.abs() };
            let factor = softmax::exponent_error(d) + inexact + 1.0;
            let cut = if exponent < -98.0 { round::pow2(-76) } else { 0.0 };
            let size = (p * factor + cut) * c.abs() + g.abs() + FLOOR;
            size * inverse + value.abs() + FLOOR
        }
    };
    (value, condition)
}
