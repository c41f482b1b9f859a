//! `group_advantage`: the inputs of its cases and its oracle.
use super::inexact::Inexact;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::group_advantage::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::Peaky, Fill::Edges, Fill::Classes],
    table: include_str!("../../ops/group_advantage.toml"),
    make,
    compute,
};

/// For `peaky`, rewards of 0 and 1, and a prompt whose samples all have 1.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (p, s) = (maker.dim("P"), maker.dim("S"));
    let reward = match maker.fill {
        Fill::Peaky => {
            let drawn = maker.below("reward", p * s, 2);
            (0..p * s).map(|i| if i < s { 1.0 } else { f64::from(drawn[i]) }).collect()
        }
        // A number and its opposite have a mean of 0; other pairs have infinite ones, or none.
        Fill::Classes => {
            let borders = maker.borders();
            let pair = |i: usize| match i % (borders.len() + 3) {
                0 => [f64::INFINITY, 0.0],
                1 => [f64::NEG_INFINITY, 0.0],
                2 => [-0.0, -0.0],
                i => [borders[i - 3], -borders[i - 3]],
            };
            (0..p * s).map(|i| pair(i / s)[i % s % 2]).collect()
        }
        fill => maker.values("reward", fill, p * s, s),
    };
    maker.floats([("reward", vec![p, s], reward)])
}

fn compute(c: &Checked) -> References {
    let (p, s) = (c.dim("P"), c.dim("S"));
    let (eps, one_only) = (Inexact::exact(f32_of(c.float("eps"))), c.word("divide_by") == "one");
    let count = Inexact::exact(s as f64);
    let reward = c.floats("reward");
    let of_prompt = |reward: &[f64]| {
        let reward: Vec<Inexact> = reward.iter().copied().map(Inexact::exact).collect();
        let mean = Inexact::sum(&reward).over(count);
        let d: Vec<Inexact> = reward.iter().map(|r| r.minus(mean)).collect();
        let squares: Vec<Inexact> = d.iter().map(|d| d.times(*d)).collect();
        let deviation = Inexact::sum(&squares).over(count).root().plus(eps);
        d.iter().map(|d| if one_only { d.element() } else { d.over(deviation).element() }).collect::<Vec<_>>()
    };
    one("advantage", Reference::new(vec![p, s], reward.chunks(s).flat_map(of_prompt).collect::<Vec<_>>()))
}
