//! `policy_loss`: the inputs of its cases and its oracle.
use super::inexact::Inexact;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::policy_loss::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::Peaky, Fill::Edges, Fill::Classes, Fill::Sharp],
    table: include_str!("../../ops/policy_loss.toml"),
    make,
    compute,
};

/// Log-probabilities that have moved by a tenth since they were sampled, for `peaky` by a few.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (b, t) = (maker.dim("B"), maker.dim("T"));
    let values = |name: &str, fill| maker.values(name, fill, b * t, t);
    let moved = |from: &[f64], name: &str, by: f64| -> Vec<f64> {
        from.iter().zip(values(name, Fill::Normal)).map(|(from, step)| f32_of(from + by * step)).collect()
    };
    let old: Vec<f64> = values("old_logprob", Fill::Normal).iter().map(|v| -v.abs()).collect();
    let [logprob, old, reference] = match maker.fill {
        Fill::Normal | Fill::Peaky => {
            let by = if maker.fill == Fill::Peaky { 3.0 } else { 0.125 };
            [moved(&old, "logprob", by), old.clone(), moved(&old, "reference", by)]
        }
        // Ratios are 1; of the exponential of each argument.
        Fill::Classes => [old.clone(), old.clone(), old],
        Fill::Sharp => {
            let sharp: Vec<f64> = sharp::exponents(b * t);
            [sharp.clone(), vec![0.0; b * t], vec![0.0; b * t]]
        }
        fill => ["logprob", "old_logprob", "reference"].map(|name| values(name, fill)),
    };
    let advantage = match maker.fill {
        Fill::Classes => maker.borders_from(0, b),
        Fill::Sharp => vec![1.0; b],
        Fill::Edges => maker.sparse_edges("advantage", b, 2),
        fill => maker.values("advantage", fill, b, b),
    };
    let mut inputs = nll::with_count(maker, [("logprob", logprob), ("old_logprob", old), ("reference", reference)]);
    if !maker.has("reference") {
        inputs.remove("reference");
    }
    inputs.extend(maker.floats([("advantage", vec![b], advantage)]));
    inputs
}

fn compute(c: &Checked) -> References {
    let t = c.dim("T");
    let [logprob, old, advantage] = ["logprob", "old_logprob", "advantage"].map(|name| c.floats(name));
    let reference = if c.call.has("reference") { c.floats("reference") } else { Vec::new() };
    let range = [1.0 - c.float("low"), 1.0 + c.float("high")].map(|border| Inexact::exact(f32_of(border)));
    let (kl, beta) = (c.word("kl"), Inexact::exact(f32_of(c.float("beta"))));
    nll::losses(c, |i| {
        let (a, one) = (Inexact::exact(logprob[i]), Inexact::exact(1.0));
        let [value, slope] = clipped(a.minus(Inexact::exact(old[i])), Inexact::exact(advantage[i / t]), range);
        match kl {
            "k1" => [beta.times_plus(a.minus(Inexact::exact(reference[i])), value), slope.plus(beta)],
            "k3" => {
                let d = Inexact::exact(reference[i]).minus(a);
                let e = d.exponential();
                [beta.times_plus(e.minus(d).minus(one), value), beta.times_plus(one.minus(e), slope)]
            }
            _ => [value, slope],
        }
    })
}

/// Value and slope of `-min(e^x A, clamp(e^x) A)` for an x.
fn clipped(x: Inexact, advantage: Inexact, [least, most]: [Inexact; 2]) -> [Inexact; 2] {
    let ratio = x.exponential();
    let u = ratio.times(advantage);
    let inside = (least.value..=most.value).contains(&ratio.value) || ratio.value.is_nan();
    let border = if ratio.value < least.value { least } else { most };
    let sure = ratio.error.is_finite() && ratio.is_off(least) && ratio.is_off(most);
    if inside && (sure || ratio.value.is_nan()) {
        return [u.negative(); 2];
    }
    let clamped = match (inside, sure) {
        (false, true) => border,
        (false, false) => Inexact { value: border.value, ..ratio },
        (true, _) => ratio,
    };
    let v = clamped.times(advantage);
    let (cut, known) = (v.value < u.value, sure && (u.is_off(v) && u.error.is_finite() || u.value.is_nan()));
    let taken = if cut { v } else { u };
    match (known, cut) {
        (true, true) => [v.negative(), Inexact::exact(0.0)],
        (true, false) => [u.negative(); 2],
        // Which of the two is less decides the slope, and little of the value.
        (false, _) => {
            let value = Inexact { value: -taken.value, error: u.error.max(v.error) };
            [value, Inexact { value: if cut { 0.0 } else { -u.value }, error: f64::INFINITY }]
        }
    }
}
