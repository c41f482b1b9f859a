//! `gemm`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::gemm::OP,
    class: Class::Reduction,
    fills: SIGNED_SUMS,
    table: include_str!("../../ops/gemm.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (m, n, k) = (maker.dim("M"), maker.dim("N"), maker.dim("K"));
    let (mut x, w) = operands(maker, "x", [m, n, k]);
    let bias = maker.has("bias").then(|| match maker.fill {
        Fill::Power => power::bias(maker, &mut x, &w, [n, k]),
        _ => maker.values("bias", Fill::Normal, n, n),
    });
    let mut inputs = maker.floats([("x", vec![m, k], x), ("w", vec![n, k], w)]);
    inputs.extend(bias.map(|bias| maker.floats([("bias", vec![n], bias)])).unwrap_or_default());
    inputs
}

/// `x[m,k]`, which goes by `name`, and `w[n,k]`.
pub(super) fn operands(maker: &Maker, name: &str, [m, n, k]: [usize; 3]) -> (Vec<f64>, Vec<f64>) {
    match maker.fill {
        // Neighbours along k are equal in x and nearly opposite in w, so the sum is far below its terms.
        Fill::Cancel => {
            let (mut x, mut w) =
                (maker.values(name, Fill::Normal, m * k, k), maker.values("w", Fill::Normal, n * k, k));
            x.chunks_mut(k).for_each(|row| row.chunks_exact_mut(2).for_each(|p| p[1] = p[0]));
            w.chunks_mut(k).for_each(|row| row.chunks_exact_mut(2).for_each(|p| p[1] = -p[0] * (1.0 + p[1] / 256.0)));
            (x, w)
        }
        // Sums among the subnormals: one operand is tiny, the other ordinary.
        Fill::Tiny => (maker.values(name, Fill::Tiny, m * k, k), maker.values("w", Fill::Normal, n * k, k)),
        // Sums of up to some hundred terms come near the largest f32; fp16 only overflows in the last rounding.
        Fill::NearOverflow => {
            let mut x = maker.values(name, Fill::NearOverflow, m * k, k);
            if maker.dtype != DType::Fp16 {
                x.iter_mut().for_each(|v| *v *= round::pow2(-8));
            }
            (x, maker.values("w", Fill::Normal, n * k, k))
        }
        Fill::Classes => classes(maker, m, n, k),
        Fill::Power => power::product(maker, name, [m, n, k]),
        fill => (maker.values(name, fill, m * k, k), maker.values("w", fill, n * k, k)),
    }
}

/// Sums that are exact in every order: rows of one border or of a few terms at scattered columns, zeros elsewhere,
/// against columns that hold one factor all over. The last two rows have no zero: all terms are -0, or all underflow.
fn classes(maker: &Maker, m: usize, n: usize, k: usize) -> (Vec<f64>, Vec<f64>) {
    let pow = round::pow2;
    // The product of the two is zero in narrow dtypes and not in f32.
    let (small, tiny) = if maker.dtype == DType::Fp16 { (pow(-14), pow(-20)) } else { (pow(-40), pow(-100)) };
    let factors = [1.0, -1.0, 89.0, tiny, -tiny, 1.0 / tiny.max(pow(-15)), -0.0];
    let top = round::overflow(maker.dtype);
    let largest = round::from_bits(round::to_bits(top, maker.dtype) - 1, maker.dtype);
    // The largest f32 out of three bf16 numbers; a product of two makes the largest fp16.
    let largest_f32 = [pow(128) - pow(120), pow(120) - pow(112), pow(112) - pow(104)];
    let mut terms: Vec<Vec<f64>> = maker.borders().into_iter().map(|border| vec![border]).collect();
    terms.extend([vec![736.0], vec![small], vec![1.0, -1.0], vec![largest, largest], vec![-largest, -largest]]);
    terms.extend([vec![f64::INFINITY, f64::NEG_INFINITY], vec![f64::NEG_INFINITY, 1.0]]);
    if maker.dtype != DType::Fp16 {
        terms.extend([largest_f32.to_vec(), largest_f32.map(|v| -v).to_vec()]);
    }
    let mut x = vec![0.0; m * k];
    for (row, values) in x.chunks_mut(k).enumerate() {
        match m - row {
            1 => row_of(values, -0.0),
            2 => row_of(values, -tiny),
            _ => {
                let terms = &terms[row % terms.len()];
                terms.iter().enumerate().for_each(|(i, &term)| values[(7 * row + 37 * i) % k] = term);
            }
        }
    }
    (x, (0..n * k).map(|i| factors[i / k % factors.len()]).collect())
}

fn row_of(values: &mut [f64], value: f64) {
    values.iter_mut().for_each(|v| *v = value);
}

fn compute(c: &Checked) -> References {
    let (m, n, k) = (c.dim("M"), c.dim("N"), c.dim("K"));
    let partial = c.count("k_total") != k;
    let bias = c.case.inputs.get("bias").filter(|_| !partial).map(Tensor::to_f64);
    one("y", product([m, n, k], &c.operands("x"), &c.operands("w"), bias.as_deref()))
}

/// `x[m,k] * w[n,k]^T + bias[n]`.
pub(super) fn product([m, n, k]: [usize; 3], x: &[f64], w: &[f64], bias: Option<&[f64]>) -> Reference {
    let element = |i: usize, j: usize| {
        let terms = x[i * k..][..k].iter().zip(&w[j * k..][..k]).map(|(a, b)| a * b);
        sum_of(terms.chain(bias.map(|bias| bias[j])))
    };
    Reference::new(vec![m, n], (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| element(i, j)))
}

/// The sum of products and what its error is proportional to. Nothing rounds, in whatever order, where every sum of
/// some of the terms is an f32 (so in a sum of zeros, which is +0), and where terms of one sign are beyond f32
/// together. Otherwise each product may also lose half of the smallest subnormal. Finite terms that may overflow on the
/// way decide nothing, unless the sum is NaN already.
pub(super) fn sum_of(terms: impl Iterator<Item = f64>) -> (f64, f64) {
    let (mut sum, mut size, mut count, mut unit) = (0.0, 0.0, 0.0, f64::INFINITY);
    let (mut above, mut below) = (false, false);
    for term in terms {
        sum += term;
        (above, below) = (above || term > 0.0, below || term < 0.0);
        if term.is_finite() {
            size += term.abs();
            count += 1.0;
            unit = unit.min(last_place(term));
        }
    }
    let exact = unit >= round::pow2(-149) && size <= unit * round::pow2(24) && size <= f64::from(f32::MAX);
    let condition = match () {
        _ if size == 0.0 || sum.is_nan() => 0.0,
        _ if above != below && size >= 1.5 * round::pow2(128) => return (sum.signum() * f64::INFINITY, 0.0),
        _ if exact => 0.0,
        _ if size > HUGE => f64::INFINITY,
        _ if sum.is_infinite() => 0.0,
        _ => size + FLOOR * count,
    };
    (sum, condition)
}

/// The largest power of two of which `value` is a multiple; infinite for 0.
fn last_place(value: f64) -> f64 {
    if value == 0.0 {
        return f64::INFINITY;
    }
    // Products of two f32 are normal in f64, and so is their last place.
    let bits = value.to_bits();
    let (exponent, mantissa) = ((bits >> 52 & 0x7ff) as i32 - 1023, bits & ((1 << 52) - 1) | 1 << 52);
    round::pow2(exponent - 52 + mantissa.trailing_zeros() as i32)
}
