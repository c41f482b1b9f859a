//! `draw`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::draw::OP,
    class: Class::Elementwise,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges],
    table: include_str!("../../ops/draw.toml"),
    make,
    compute,
};

/// Any random bits, none and all of them. Rows take turns: numbers as they come, a few among nothing, and equal ones.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, v) = (maker.dim("R"), maker.dim("V"));
    let mut x = maker.values("x", maker.fill, r * v, v);
    for (row, x) in x.chunks_mut(v).enumerate() {
        let first = x[0];
        for (i, z) in x.iter_mut().enumerate() {
            *z = match row % 4 {
                1 if i % 3 != 1 => f64::NEG_INFINITY,
                2 => first,
                _ => *z,
            };
        }
    }
    let mut bits = maker.below("bits", 2 * r, 1 << 32);
    for (row, bits) in bits.chunks_mut(2).enumerate() {
        match row % 7 {
            3 => bits.fill(0),
            6 => bits.fill(-1),
            _ => {}
        }
    }
    let mut inputs = maker.floats([("x", vec![r, v], x)]);
    inputs.insert("bits".into(), Tensor::i32(&[r, 2], bits));
    inputs
}

/// By adding up. Nothing is claimed of a row whose random number is at a border that a rounding of weights could move.
fn compute(c: &Checked) -> References {
    let (r, v) = (c.dim("R"), c.dim("V"));
    let token = |(row, x): (usize, &[f64])| {
        let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if x.iter().any(|z| z.is_nan()) || top.is_infinite() {
            return (-1.0, 0.0);
        }
        let exact: Vec<f64> = x.iter().map(|z| (z - top).exp() * round::pow2(40)).collect();
        let total: f64 = exact.iter().map(|w| w.floor()).sum();
        let [low, high] = [0, 1].map(|half| u64::from(c.ints("bits")[2 * row + half] as u32));
        let bound = total * ((high << 32 | low) >> 11) as f64 * round::pow2(-53);
        let (mut sum, mut taken) = (0.0, None);
        for (i, w) in exact.iter().enumerate() {
            sum += w.floor();
            if taken.is_none() && sum > bound.floor() {
                taken = Some((i, sum - w.floor(), sum));
            }
        }
        let (i, before, behind) = taken.expect("the bound is below the total");
        // Where nothing that counts is on the other side of a border, there is none.
        let counts = |w: &[f64]| w.iter().any(|w| *w > 0.5);
        let room = total * 2e-6 + v as f64;
        let close = counts(&exact[..i]) && (bound - before).abs() < room
            || counts(&exact[i + 1..]) && (behind - bound).abs() < room;
        (i as f64, if close { f64::INFINITY } else { 0.0 })
    };
    one("token", Reference::new(vec![r], c.floats("x").chunks(v).enumerate().map(token)))
}
