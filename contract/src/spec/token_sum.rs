//! `token_sum`: the inputs of its cases and its oracle; and what all sums over tokens have in common.
use super::gemm::sum_of;
use super::rms_norm_backward::{Product, exact, gradients};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::token_sum::OP,
    class: Class::Reduction,
    fills: SIGNED_SUMS,
    table: include_str!("../../ops/token_sum.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let x = match maker.fill {
        // Every second token of a chain nearly takes away what the one before it brought.
        Fill::Cancel => {
            let x = maker.values("x", Fill::Normal, r * n, n);
            let later = |i: usize| -x[i - 64 * n] * (1.0 + x[i] / 256.0);
            (0..r * n).map(|i| if i / n % 128 < 64 { x[i] } else { later(i) }).collect()
        }
        Fill::Classes => maker.borders_from(0, r * n),
        Fill::NearOverflow if maker.dtype != DType::Fp16 => fold::near_overflow(maker, r * n),
        Fill::Power => masks_of_tokens(maker, "x", r, n),
        fill => maker.values("x", fill, r * n, n),
    };
    let mut inputs = maker.floats([("x", vec![r, n], x)]);
    inputs.extend(mask_and_carry(maker, r, [64, n]));
    inputs
}

/// Columns of masks, in each of the 64 chains of which masses cancel.
pub(super) fn masks_of_tokens(maker: &Maker, name: &str, tokens: usize, n: usize) -> Vec<f64> {
    let (draw, chains) = (maker.draw(name), (0..tokens).map(|token| token % 64).collect::<Vec<_>>());
    let columns: Vec<f64> = (0..n).flat_map(|column| power::mask(&draw, column, &chains)).collect();
    gemm_dx::transposed(&columns, tokens)
}

/// The mask of `tokens`, of which a third are padding, and a carry of this shape, where the case asks for them.
pub(super) fn mask_and_carry(maker: &Maker, tokens: usize, shape: [usize; 2]) -> BTreeMap<String, Tensor> {
    let mut inputs = BTreeMap::new();
    if maker.has("mask") {
        inputs.insert("mask".into(), mask(maker, tokens));
    }
    if maker.has("carry") {
        inputs.extend(carry(maker, shape));
    }
    inputs
}

fn mask(maker: &Maker, tokens: usize) -> Tensor {
    Tensor::i32(&[tokens], maker.ints("mask", maker.below("mask", tokens, 3)))
}

/// What earlier calls have summed: in classes, every border of f32.
pub(super) fn carry(maker: &Maker, shape: [usize; 2]) -> BTreeMap<String, Tensor> {
    let (len, wide) = (shape[0] * shape[1], Maker { dtype: DType::Fp32, ..*maker });
    let carry = match maker.fill {
        Fill::Classes => wide.borders_from(0, len),
        _ => gradients(&wide, "carry", len, shape[1]),
    };
    wide.floats([("carry", shape.to_vec(), carry)])
}

fn compute(c: &Checked) -> References {
    one("sum", sums(c, c.dim("N"), &exact(c.floats("x"))))
}

/// 64 chains over rows of `n` terms, the same number of rows for each token.
pub(super) fn sums(c: &Checked, n: usize, terms: &[Product]) -> Reference {
    let rows: Vec<&[Product]> = terms.chunks(n).collect();
    let counted = tokens(c, rows.len());
    let heads = c.call.dims.get("H").unwrap_or(1);
    let first = c.count("token_offset").wrapping_mul(heads);
    let rows_of = |chain: usize| {
        let place = |(i, row): (usize, &usize)| (first.wrapping_add(i) % 64 == chain).then_some(rows[*row]);
        counted.iter().enumerate().filter_map(place).collect::<Vec<_>>()
    };
    chains(c, vec![64, n], rows_of)
}

/// Which rows are those of tokens, ascending.
pub(super) fn tokens(c: &Checked, rows: usize) -> Vec<usize> {
    let Some(mask) = c.case.inputs.get("mask").and_then(Tensor::as_i32) else { return (0..rows).collect() };
    (0..rows).filter(|row| mask[row * mask.len() / rows] != 0).collect()
}

/// A chain for each element of an output of this shape, whose first axis has the terms that `rows_of` gives, from `carry` on.
pub(super) fn chains<'a>(c: &Checked, shape: Vec<usize>, rows_of: impl Fn(usize) -> Vec<&'a [Product]>) -> Reference {
    let carry = c.case.inputs.get("carry").map(Tensor::to_f64);
    let n = shape[1];
    let elements = (0..shape[0]).flat_map(|row| {
        let rows = rows_of(row);
        let start = |column: usize| carry.as_ref().map_or(0.0, |carry| carry[row * n + column]);
        let elements = (0..n).map(|column| {
            let terms: Vec<Product> = rows.iter().map(|row| row[column]).collect();
            match chain(start(column), &terms) {
                (sum, condition) if condition > 0.0 => (sum, condition.max(of_steps(start(column), &terms))),
                exact => exact,
            }
        });
        elements.collect::<Vec<_>>()
    });
    Reference::new(shape.clone(), elements.collect::<Vec<_>>())
}

/// What the roundings of a long chain come to: each step may be wrong by 2^-24 of the sum so far, independently of the
/// others, so their squares add up. Beyond the condition of the sum only where that stays large for many steps, beside a large
/// carry or among terms of one sign. With a factor of L it is exceeded with a probability below 2 exp(-L^2/2) (Hoeffding).
fn of_steps(start: f64, terms: &[Product]) -> f64 {
    let mut sum = start;
    let squares = terms.iter().map(|term| {
        sum += term.value;
        sum * sum
    });
    let root = squares.sum::<f64>().sqrt();
    // Sums that are not finite have been judged.
    if root.is_finite() { root } else { 0.0 }
}

/// Value and condition of a chain from `start`.
pub(super) fn chain(start: f64, terms: &[Product]) -> (f64, f64) {
    let values = || [start].into_iter().chain(terms.iter().map(|term| term.value));
    let (sum, size) = sum_of(values());
    let of_terms: f64 = terms.iter().map(|term| term.error).sum();
    match () {
        // A sum of zeros is -0 only where every one is.
        _ if sum == 0.0 && size == 0.0 && of_terms == 0.0 => (values().fold(-0.0, |sum, value| sum + value), 0.0),
        _ if values().any(f64::is_nan) => (f64::NAN, 0.0),
        _ if of_terms.is_infinite() => (sum, f64::INFINITY),
        _ if !sum.is_finite() => (sum, size),
        _ => (sum, size + of_terms),
    }
}

/// What `dy` times an h with this error, in units of 2^-24, adds to a chain of fma.
pub(super) fn term(dy: f64, h: Product) -> Product {
    let error = match () {
        _ if h.error.is_infinite() => f64::INFINITY,
        _ if h.error == 0.0 || dy == 0.0 || dy.is_nan() => 0.0,
        // Its sign decides.
        _ if dy.is_infinite() && h.value.abs() <= h.error * round::pow2(-14) => f64::INFINITY,
        _ if dy.is_infinite() => 0.0,
        _ => dy.abs() * h.error,
    };
    Product { value: dy * h.value, error }
}
