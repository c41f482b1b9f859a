//! `rms_norm`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::rms_norm::OP,
    class: Class::Reduction,
    fills: SUMS,
    table: include_str!("../../ops/rms_norm.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    if maker.fill == Fill::Power {
        let [x, w] = power::norm_rows(maker, "x", r, n);
        return maker.floats([("x", vec![r, n], x), ("w", vec![n], w)]);
    }
    let mut x = maker.values("x", maker.fill, r * n, n);
    near_root(maker, &mut x);
    if maker.fill == Fill::Classes {
        let w = weights(maker, n);
        return maker.floats([("x", vec![r, n], unit_rows(r, n)), ("w", vec![n], w)]);
    }
    maker.floats([("x", vec![r, n], x), ("w", vec![n], maker.values("w", Fill::Normal, n, n))])
}

/// The elements of each of [`unit_rows`], over and over.
pub(super) const UNIT_ROWS: [&[f64]; 6] =
    [&[1.0], &[-1.0], &[2.0, -2.0], &[1.0, -0.0, 0.0, 0.0], &[3.0, 5.0], &[f64::NAN]];

/// Borders, and last what the row of 3 and 5 makes the largest fp16 number of.
pub(super) fn weights(maker: &Maker, n: usize) -> Vec<f64> {
    let mut w = maker.borders_from(0, n);
    w[n - 1] = 54016.0;
    w
}

/// Rows whose norm without eps is a power of two in every element that is not 0, so that the outputs are the weights
/// times that; also one that is not, and NaN.
pub(super) fn unit_rows(r: usize, n: usize) -> Vec<f64> {
    (0..r).flat_map(|row| UNIT_ROWS[row % UNIT_ROWS.len()].iter().copied().cycle().take(n)).collect()
}

/// With [`Fill::NearOverflow`], the sum of squares is what comes near the largest f32; fp16 cannot reach it and stays at
/// its own maximum.
pub(super) fn near_root(maker: &Maker, x: &mut [f64]) {
    if maker.fill == Fill::NearOverflow && maker.dtype != DType::Fp16 {
        x.iter_mut().for_each(|v| *v *= round::pow2(58 - 127));
    }
}

fn compute(c: &Checked) -> References {
    let (r, n) = (c.dim("R"), c.dim("N"));
    one("y", Reference::new(vec![r, n], elements(c, &c.floats("x"), &c.floats("w"))))
}

/// Value and condition of every element of the rows `x`, as long as `w`, under the parameters of `c`.
pub(super) fn elements(c: &Checked, x: &[f64], w: &[f64]) -> Vec<(f64, f64)> {
    let n = w.len();
    let eps = f32_of(c.float("eps"));
    let hf = c.word("rounding") == "hf";
    // Nothing is added without an offset, not even the +0 that would turn a weight of -0.
    let offset = c.flag("weight_offset");
    let mut elements = Vec::with_capacity(x.len());
    for row in x.chunks(n) {
        let squares: f64 = row.iter().map(|v| v * v).sum();
        let mean = squares / n as f64 + eps;
        let scale = 1.0 / mean.sqrt();
        // Squares of finite numbers that overflow f32 turn the row into zeros and NaN: nothing is claimed.
        let overflows = squares > HUGE && row.iter().all(|v| v.is_finite());
        // Squares below the smallest normal number lose bits; without eps that is felt.
        let lost = 1.0 + FLOOR / mean + absorbed(row.iter().map(|v| v * v), squares);
        for (&v, &weight) in row.iter().zip(w) {
            let weight = if offset { weight + 1.0 } else { weight };
            let normed = v * scale;
            let mut size = (normed * weight).abs() * lost;
            let value = if hf {
                let (kept, step) = to_hf(normed, lost, n);
                size += step * weight.abs();
                kept * weight
            } else {
                normed * weight
            };
            let condition = match () {
                _ if value == 0.0 && (v == 0.0 || weight == 0.0) || value.is_nan() => 0.0,
                // Also where the weight is infinite: 0 * inf is NaN.
                _ if overflows => f64::INFINITY,
                _ if value.is_infinite() => 0.0,
                _ => size + FLOOR * (1.0 + weight.abs()),
            };
            elements.push((value, condition));
        }
    }
    elements
}

/// x * r, of which r has this relative error, as `hf` rounds it. An f32 error can carry it over a tie of this rounding, and
/// then a whole bf16 ulp appears, here in units of 2^-24: the second number, 0 where that is out of question.
pub(super) fn to_hf(normed: f64, r_error: f64, n: usize) -> (f64, f64) {
    let kept = round::round(normed, DType::Bf16);
    let step = round::ulp(normed, DType::Bf16);
    let to_tie = step / 2.0 - (kept - normed).abs();
    let near = to_tie <= roundings(n) * round::pow2(-24) * (normed.abs() * r_error + FLOOR);
    (kept, if near { step * round::pow2(24) } else { 0.0 })
}

/// How often a sum of `n` elements rounds at most: for each element of a lane, for each fold, and some.
pub(super) fn roundings(n: usize) -> f64 {
    n as f64 / 256.0 + 16.0
}
