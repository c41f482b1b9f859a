//! `clip_factor`: the inputs of its cases and its oracle.
use super::inexact::Inexact;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::clip_factor::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Classes],
    table: include_str!("../../ops/clip_factor.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let p = maker.dim("P");
    let sum = match maker.fill {
        Fill::Classes => {
            let mut sum = vec![0.0; p];
            sum[p - 1] = [0.0, f64::NAN, f64::INFINITY][p % 3];
            sum
        }
        fill => maker.values("sum", fill, p, p).into_iter().map(f64::abs).collect(),
    };
    maker.floats([("sum", vec![p], sum)])
}

fn compute(c: &Checked) -> References {
    let total: f64 = c.floats("sum").iter().sum();
    let norm = Inexact::rounded(total.sqrt(), 0.0);
    let one_and = norm.plus(Inexact::exact(f32_of(1e-6)));
    let quotient = Inexact::exact(f32_of(c.float("max_norm"))).over(one_and);
    let factor = match quotient.value > 1.0 {
        true if quotient.is_off(Inexact::exact(1.0)) => Inexact::exact(1.0),
        true => Inexact { value: 1.0, ..quotient },
        false => quotient,
    };
    BTreeMap::from([
        ("norm".to_string(), Reference::new(vec![1], [norm.element()])),
        ("factor".to_string(), Reference::new(vec![1], [factor.element()])),
    ])
}
