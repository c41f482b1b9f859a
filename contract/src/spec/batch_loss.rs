//! `batch_loss`: the inputs of its cases and its oracle.
use super::inexact::Inexact;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::batch_loss::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Cancel, Fill::Tiny, Fill::NearOverflow, Fill::Classes],
    table: include_str!("../../ops/batch_loss.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let b = maker.dim("B");
    let per_sequence = match maker.fill {
        // Every second one nearly takes away what the one before it brought.
        Fill::Cancel => {
            let x = maker.values("per_sequence", Fill::Normal, b, b);
            (0..b).map(|i| if i % 2 == 0 { x[i] } else { -x[i - 1] * (1.0 + x[i] / 256.0) }).collect()
        }
        // A call has one number: a border beside zeros.
        Fill::Classes => {
            let largest = f64::from(f32::MAX);
            let (subnormal, normal) = (f64::from(f32::MIN_POSITIVE) / 2.0, f64::from(f32::MIN_POSITIVE));
            let borders = [0.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, largest, subnormal, normal];
            let mut all = vec![-0.0; b];
            all[b - 1] = borders[b % borders.len()];
            all
        }
        Fill::NearOverflow => fold::near_overflow(maker, b),
        fill => maker.values("per_sequence", fill, b, b),
    };
    maker.floats([("per_sequence", vec![b], per_sequence)])
}

fn compute(c: &Checked) -> References {
    let terms: Vec<Inexact> = c.floats("per_sequence").into_iter().map(Inexact::exact).collect();
    let loss = Inexact::sum(&terms).over(Inexact::exact(f32_of(c.float("denominator"))));
    one("loss", Reference::new(vec![1], [loss.element()]))
}
