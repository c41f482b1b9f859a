//! `fold`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::fold::OP,
    class: Class::Reduction,
    fills: SIGNED_SUMS,
    table: include_str!("../../ops/fold.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (c, n) = (maker.dim("C"), maker.dim("N"));
    let x = match maker.fill {
        // The first fold nearly takes everything away.
        Fill::Cancel => {
            let x = maker.values("x", Fill::Normal, c * n, n);
            let half = c / 2 * n;
            (0..c * n).map(|i| if i < half { x[i] } else { -x[i - half] * (1.0 + x[i] / 256.0) }).collect()
        }
        // A border and zeros; last, the largest fp16 and f32 numbers as sums of what bf16 has.
        Fill::Classes => {
            let pow = round::pow2;
            let mut x = vec![-0.0; c * n];
            x[..n].copy_from_slice(&maker.borders_from(0, n));
            for (row, part) in [65280.0, 224.0].into_iter().enumerate() {
                x[(row + 1) * n - 1] = part;
            }
            if maker.dtype != DType::Fp16 {
                for row in 0..3 {
                    x[(row + 1) * n - 2] = pow(128 - 8 * row as i32) - pow(120 - 8 * row as i32);
                }
            }
            x
        }
        // Sums come near the largest f32; those of fp16 only overflow in the last rounding.
        Fill::NearOverflow if maker.dtype != DType::Fp16 => near_overflow(maker, c * n),
        Fill::Power => gemm_dx::transposed(&power::masks(&maker.draw("x"), n, c), c),
        fill => maker.values("x", fill, c * n, n),
    };
    maker.floats([("x", vec![c, n], x)])
}

/// Numbers of which some hundred can be added.
pub(super) fn near_overflow(maker: &Maker, len: usize) -> Vec<f64> {
    maker.values("x", Fill::NearOverflow, len, len).into_iter().map(|v| v * round::pow2(-8)).collect()
}

fn compute(c: &Checked) -> References {
    let n = c.dim("N");
    let x = c.floats("x");
    let column = |column: usize| {
        let terms = || x.iter().skip(column).step_by(n).copied();
        match sum_of(terms()) {
            // A sum of zeros is -0 only where every one is.
            (0.0, 0.0) => (terms().fold(-0.0, |sum, term| sum + term), 0.0),
            sum => sum,
        }
    };
    one("y", Reference::new(vec![n], (0..n).map(column)))
}
