//! `gemm`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::gemm::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Cancel, Fill::Tiny, Fill::NearOverflow, Fill::Edges],
    table: include_str!("../../ops/gemm.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (m, n, k) = (maker.dim("M"), maker.dim("N"), maker.dim("K"));
    let (x, w) = match maker.fill {
        // Neighbours along k are equal in x and nearly opposite in w, so the sum is far below its terms.
        Fill::Cancel => {
            let (mut x, mut w) = (maker.values("x", Fill::Normal, m * k, k), maker.values("w", Fill::Normal, n * k, k));
            x.chunks_mut(k).for_each(|row| row.chunks_exact_mut(2).for_each(|p| p[1] = p[0]));
            w.chunks_mut(k).for_each(|row| row.chunks_exact_mut(2).for_each(|p| p[1] = -p[0] * (1.0 + p[1] / 256.0)));
            (x, w)
        }
        // Sums among the subnormals: one operand is tiny, the other ordinary.
        Fill::Tiny => (maker.values("x", Fill::Tiny, m * k, k), maker.values("w", Fill::Normal, n * k, k)),
        // Sums of up to some hundred terms come near the largest f32; fp16 only overflows in the last rounding.
        Fill::NearOverflow => {
            let mut x = maker.values("x", Fill::NearOverflow, m * k, k);
            if maker.dtype != DType::Fp16 {
                x.iter_mut().for_each(|v| *v *= round::pow2(-8));
            }
            (x, maker.values("w", Fill::Normal, n * k, k))
        }
        fill => (maker.values("x", fill, m * k, k), maker.values("w", fill, n * k, k)),
    };
    let mut inputs = maker.floats([("x", vec![m, k], x), ("w", vec![n, k], w)]);
    if maker.has("bias") {
        inputs.extend(maker.floats([("bias", vec![n], maker.values("bias", Fill::Normal, n, n))]));
    }
    inputs
}

fn compute(c: &Checked) -> References {
    let (m, n, k) = (c.dim("M"), c.dim("N"), c.dim("K"));
    let (x, w) = (c.operands("x"), c.operands("w"));
    let partial = c.count("k_total") != k;
    let bias = c.case.inputs.get("bias").filter(|_| !partial).map(Tensor::to_f64);
    let element = |i: usize, j: usize| {
        let terms = x[i * k..][..k].iter().zip(&w[j * k..][..k]).map(|(a, b)| a * b);
        sum_of(terms.chain(bias.as_ref().map(|bias| bias[j])))
    };
    one("y", Reference::new(vec![m, n], (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| element(i, j))))
}

/// Nothing rounds in a sum of zeros. Otherwise each product may also lose half of the smallest subnormal. Finite terms
/// that may overflow on the way decide nothing, unless the sum is NaN already.
pub(super) fn sum_of(terms: impl Iterator<Item = f64>) -> (f64, f64) {
    let (mut sum, mut size, mut count) = (0.0, 0.0, 0.0);
    for term in terms {
        sum += term;
        if term.is_finite() {
            size += term.abs();
            count += 1.0;
        }
    }
    let condition = match () {
        _ if size == 0.0 || sum.is_nan() => 0.0,
        _ if size > HUGE => f64::INFINITY,
        _ if sum.is_infinite() => 0.0,
        _ => size + FLOOR * count,
    };
    (sum, condition)
}
