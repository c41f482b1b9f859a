//! `add`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::add::OP,
    class: Class::Elementwise,
    fills: &[
        Fill::Normal,
        Fill::Wide,
        Fill::Cancel,
        Fill::Tiny,
        Fill::NearOverflow,
        Fill::Edges,
        Fill::AllBf16,
        Fill::Classes,
    ],
    table: include_str!("../../ops/add.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let other = |fill: Fill| maker.values("b", fill, r * n, n);
    let (a, b) = match maker.fill {
        Fill::Cancel => {
            let a = maker.values("a", Fill::Normal, r * n, n);
            let b = a.iter().zip(other(Fill::Normal)).map(|(a, b)| -a * (1.0 + b / 256.0)).collect();
            (a, b)
        }
        // -0 keeps every pattern; +0 turns -0 into +0.
        Fill::AllBf16 => {
            let zeros = (0..r * n).map(|i| if i / n % 2 == 0 { -0.0 } else { 0.0 }).collect();
            (maker.values("a", Fill::AllBf16, r * n, n), zeros)
        }
        Fill::Classes => pairs(maker).into_iter().cycle().take(r * n).map(|[a, b]| (a, b)).unzip(),
        fill => (maker.values("a", fill, r * n, n), other(fill)),
    };
    maker.floats([("a", vec![r, n], a), ("b", vec![r, n], b)])
}

/// Every border with -0, which keeps it, and with +0; and sums that are borders though no term is one.
pub(super) fn pairs(maker: &Maker) -> Vec<[f64; 2]> {
    let borders = maker.borders();
    let largest = round::from_bits(round::to_bits(f64::INFINITY, maker.dtype) - 1, maker.dtype);
    let sums = [[65280.0, 224.0], [-65280.0, -224.0], [1.0, -1.0], [f64::INFINITY, f64::NEG_INFINITY]];
    let mut pairs: Vec<[f64; 2]> = borders.iter().flat_map(|&border| [[border, -0.0], [border, 0.0]]).collect();
    pairs.extend([[largest, largest], [-largest, -largest]]);
    pairs.extend(maker.held(&sums, |pair| pair));
    pairs
}

/// One f32 rounding and the last one, both part of the definition. Two roundings of an f32 sum (f64 first) are one,
/// because f64 has more than twice as many bits.
fn compute(c: &Checked) -> References {
    let (a, b) = (c.floats("a"), c.floats("b"));
    let sums = a.iter().zip(&b).map(|(a, b)| f32_of(a + b)).collect();
    one("y", Reference::exact(c.case.inputs["a"].shape().to_vec(), sums))
}
