//! `mul`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::mul::OP,
    class: Class::Elementwise,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::AllBf16, Fill::Classes],
    table: include_str!("../../ops/mul.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let (a, b) = match maker.fill {
        // 1 keeps every pattern, -1 turns its sign.
        Fill::AllBf16 => {
            let ones = (0..r * n).map(|i| if i / n % 2 == 0 { 1.0 } else { -1.0 }).collect();
            (maker.values("a", Fill::AllBf16, r * n, n), ones)
        }
        Fill::Classes => pairs(maker).into_iter().cycle().take(r * n).map(|[a, b]| (a, b)).unzip(),
        // Beside ordinary numbers, so that products are as extreme as their first factor.
        fill @ (Fill::Tiny | Fill::NearOverflow) => {
            (maker.values("a", fill, r * n, n), maker.values("b", Fill::Normal, r * n, n))
        }
        fill => (maker.values("a", fill, r * n, n), maker.values("b", fill, r * n, n)),
    };
    maker.floats([("a", vec![r, n], a), ("b", vec![r, n], b)])
}

/// Every border times 1 and -1; products that are borders or beyond though no factor is one, and those that are no number.
fn pairs(maker: &Maker) -> Vec<[f64; 2]> {
    let borders = maker.borders();
    let largest = round::from_bits(round::to_bits(f64::INFINITY, maker.dtype) - 1, maker.dtype);
    let pow = round::pow2;
    let products = [
        // The largest fp16 number; ties of fp16 and of bf16 subnormals.
        [89.0, 736.0],
        [-89.0, 736.0],
        [3.0 * pow(-12), pow(-13)],
        [3.0 * pow(-70), pow(-64)],
        [pow(-75), -pow(-75)],
        [0.0, f64::INFINITY],
        [-0.0, 0.0],
        [-0.0, -1.0],
    ];
    let mut pairs: Vec<[f64; 2]> = borders.iter().flat_map(|&border| [[border, 1.0], [border, -1.0]]).collect();
    pairs.extend([[largest, largest], [-largest, largest]]);
    pairs.extend(maker.held(&products, |pair| pair));
    pairs
}

/// One f32 rounding and the last one, both part of the definition. The product of two f32 is exact in f64.
fn compute(c: &Checked) -> References {
    let (a, b) = (c.floats("a"), c.floats("b"));
    let products = a.iter().zip(&b).map(|(a, b)| f32_of(a * b)).collect();
    one("y", Reference::exact(c.case.inputs["a"].shape().to_vec(), products))
}
