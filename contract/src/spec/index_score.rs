//! `index_score`: the inputs of its cases and its oracle.
use super::inexact::Inexact;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::index_score::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Cancel, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::Classes],
    table: include_str!("../../ops/index_score.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let [t, h, d, s] = ["T", "H", "D", "S"].map(|axis| maker.dim(axis));
    let wide = Maker { dtype: DType::Fp32, ..*maker };
    let (q, k, weight) = match maker.fill {
        Fill::Classes => classes(&wide, [t, h, d, s]),
        fill => {
            let (q, k) = gemm::operands(maker, "q", [t * h, s, d]);
            let of_weight = if fill == Fill::Edges { fill } else { Fill::Normal };
            (q, k, wide.values("weight", of_weight, t * h, h))
        }
    };
    let mut inputs = maker.floats([("q", vec![t, h, d], q), ("k", vec![s, d], k)]);
    inputs.extend(wide.floats([("weight", vec![t, h], weight)]));
    inputs
}

/// One head of each token has a weight other than 0, a border; all scores are 1, or below 0.
fn classes(wide: &Maker, [t, h, d, s]: [usize; 4]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let q = (0..t * h * d).map(|i| if i % d == 0 { 1.0 } else { 0.0 }).collect();
    let k = (0..s * d).map(|i| if i / d % 2 == 0 { 1.0 } else { -1.0 }).collect();
    let borders = wide.borders_from(0, t);
    (q, k, (0..t * h).map(|i| if i % h == i / h % h { borders[i / h] } else { 0.0 }).collect())
}

fn compute(c: &Checked) -> References {
    let [t, h, d, s] = ["T", "H", "D", "S"].map(|axis| c.dim(axis));
    let (q, k, weight) = (c.floats("q"), c.floats("k"), c.floats("weight"));
    let scale = Inexact::exact(f32_of(c.float("scale")));
    let element = |i: usize| {
        let (token, k) = (i / s, &k[i % s * d..][..d]);
        let terms = (token * h..(token + 1) * h).map(|head| {
            let (value, error) = gemm::sum_of(q[head * d..][..d].iter().zip(k).map(|(q, k)| q * k));
            let r = not_below_zero(Inexact { value, error }.times(scale));
            Inexact::exact(weight[head]).product(r)
        });
        Inexact::sum(&terms.collect::<Vec<_>>()).element()
    };
    one("score", Reference::new(vec![t, s], (0..t * s).map(element)))
}

/// 0 in the place of what is not above it.
fn not_below_zero(x: Inexact) -> Inexact {
    match x.value {
        v if v.is_nan() => x,
        v if v <= 0.0 && x.is_off(Inexact::exact(0.0)) => Inexact::exact(0.0),
        v => Inexact { value: v.max(0.0), ..x },
    }
}
