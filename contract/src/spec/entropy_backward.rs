//! `entropy_backward`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::entropy_backward::OP,
    class: Class::Logprob,
    fills: logprob::SPEC.fills,
    table: include_str!("../../ops/entropy_backward.toml"),
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
    inputs.remove("target");
    let turns = softmax_backward::in_turns(maker.fill);
    if turns {
        let logits = softmax_backward::turned(maker, "logits", [maker.fill, Fill::Normal], r, v);
        inputs.extend(maker.floats([("logits", vec![r, v], logits)]));
    }
    let logits = inputs["logits"].to_f64();
    // A sharp row shows the exponential of each logit.
    let sharp = maker.fill == Fill::Sharp;
    let level = |row: &[f64]| if sharp { 0.0 } else { logprob_backward::level(row) };
    let of_rows = |of: fn(&[f64]) -> f64| logits.chunks(v).map(of).collect::<Vec<f64>>();
    let entropy = if sharp { vec![0.0; r] } else { of_rows(entropy_of) };
    let lse = logits.chunks(v).map(level).collect();
    let gradient = |name: &str| match maker.fill {
        Fill::Sharp => vec![if name == "dlse" { 1.0 } else { 0.0 }; r],
        Fill::Peaky => maker.values(name, Fill::Normal, r, 1),
        fill if turns => softmax_backward::turned(&wide, name, [Fill::Normal, fill], r, 1),
        fill => wide.values(name, fill, r, 1),
    };
    let per_row = [("entropy", entropy), ("lse", lse), ("dentropy", gradient("dentropy"))];
    inputs.extend(wide.floats(per_row.map(|(name, values)| (name, vec![r], values))));
    if maker.has("dlse") {
        inputs.extend(wide.floats([("dlse", vec![r], gradient("dlse"))]));
    }
    inputs
}

/// What entropy returns at temperature 1, as a multiple of 2^-16, which no two mathematics libraries tell apart.
fn entropy_of(row: &[f64]) -> f64 {
    (entropy::of_row(row, false).0 * round::pow2(16)).round_ties_even() * round::pow2(-16)
}

/// Rows whose first element has a probability of 1 and hands on any number, and whose other ones have none; a row of
/// nothing.
fn classes(maker: &Maker, wide: &Maker, r: usize, v: usize) -> BTreeMap<String, Tensor> {
    let none = f64::NEG_INFINITY;
    let mut logits: Vec<f64> = (0..r * v).map(|i| if i % v == 0 { 0.0 } else { none }).collect();
    logits[(r - 1) * v..].fill(none);
    let mut lse = vec![0.0; r];
    lse[r - 1] = none;
    let mut inputs = maker.floats([("logits", vec![r, v], logits)]);
    let per_row =
        [("entropy", vec![0.0; r]), ("lse", lse), ("dentropy", vec![1.0; r]), ("dlse", wide.borders_from(0, r))];
    inputs.extend(wide.floats(per_row.map(|(name, values)| (name, vec![r], values))));
    inputs
}

fn compute(c: &Checked) -> References {
    let (r, v) = (c.dim("R"), c.dim("V"));
    let inverse = f32_of(1.0 / c.float("temperature"));
    let [entropy, lse, dentropy] = ["entropy", "lse", "dentropy"].map(|name| c.floats(name));
    let dlse = if c.call.has("dlse") { c.floats("dlse") } else { vec![0.0; r] };
    let mut elements = Vec::with_capacity(r * v);
    for (i, row) in c.floats("logits").chunks(v).enumerate() {
        let given = [entropy[i], lse[i], dentropy[i], dlse[i]];
        elements.extend(row.iter().map(|&z| element(logprob::scaled(z * inverse), given, inverse)));
    }
    one("dlogits", Reference::new(vec![r, v], elements))
}

/// Value and condition of `e^(x - level) * (dlse - dentropy * (x - level + entropy)) * inverse`.
fn element(x: f64, [entropy, level, dentropy, dlse]: [f64; 4], inverse: f64) -> (f64, f64) {
    let d = x - level;
    // The exponent, at -100 of which a probability is cut off.
    let exponent = d * std::f64::consts::LOG2_E;
    let p = if exponent < -103.0 { 0.0 } else { d.exp() };
    let t = if p == 0.0 { 0.0 } else { d + entropy };
    let c = dlse - dentropy * t;
    let value = p * c * inverse;
    let held = |v: f64| f32_of(v) == v;
    let known = exponent < -103.0 || d == 0.0 && held(x) && held(t);
    let condition = match () {
        // f32 may make infinity of it.
        _ if d.is_finite() && d > 88.0 => f64::INFINITY,
        // Infinity times what may be 0, or of either sign.
        _ if (-103.0..-98.0).contains(&exponent) && !(dlse.is_finite() && dentropy.is_finite()) => f64::INFINITY,
        _ if value.is_nan() => 0.0,
        _ if dentropy.is_infinite() => f64::INFINITY,
        _ if c.is_infinite() => 0.0,
        _ if known && held(c) && held(p * c) && held(value) => 0.0,
        _ if [dentropy * t, c, p * c, value].iter().any(|v| v.abs() > HUGE) => f64::INFINITY,
        _ => {
            // x and d are rounded, which an exponential turns into a factor.
            let inexact = if d == 0.0 && held(x) { 0.0 } else { x.abs() + d.abs() };
            let factor = softmax::exponent_error(d) + inexact + 1.0;
            let cut = if exponent < -98.0 { round::pow2(-76) } else { 0.0 };
            let error_of_c = dentropy.abs() * (inexact + t.abs()) + c.abs();
            let size = p * (factor * c.abs() + error_of_c) + cut * (c.abs() + error_of_c) + FLOOR;
            size * inverse + value.abs() + FLOOR
        }
    };
    (value, condition)
}
