//! `rms_norm_dw`: the inputs of its cases and its oracle.
use super::rms_norm_backward::Product;
use super::token_sum::{mask_and_carry, sums, term};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::rms_norm_dw::OP,
    class: Class::Reduction,
    fills: rms_norm::SPEC.fills,
    table: include_str!("../../ops/rms_norm_dw.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let [x, dy] = rows(maker, r, n);
    let mut inputs = maker.floats([("x", vec![r, n], x), ("dy", vec![r, n], dy)]);
    inputs.extend(mask_and_carry(maker, r, [64, n]));
    inputs
}

/// x and dy; for [`Fill::Classes`] rows of 1 and -1, whose r is 1 without eps, so that dw is dy or less, and borders.
pub(super) fn rows(maker: &Maker, r: usize, n: usize) -> [Vec<f64>; 2] {
    if maker.fill == Fill::Classes {
        let x = (0..r * n).map(|i| if (i / n + i % n).is_multiple_of(3) { -1.0 } else { 1.0 });
        return [x.collect(), maker.borders_from(0, r * n)];
    }
    if maker.fill == Fill::Power {
        let x = power::factors(&maker.draw("x"), r * n).into_iter().map(f64::signum);
        return [x.collect(), super::token_sum::masks_of_tokens(maker, "dy", r, n)];
    }
    let [x, _, dy] = rms_norm_backward::rows(maker, r, n);
    [x, dy]
}

fn compute(c: &Checked) -> References {
    let n = c.dim("N");
    let dy: Vec<Product> = rms_norm_backward::exact(c.floats("dy"));
    one("dw", sums(c, n, &terms(c, n, &dy)))
}

/// What every element of x, in rows of `n`, adds to the sums beside these gradients.
pub(super) fn terms(c: &Checked, n: usize, dy: &[Product]) -> Vec<Product> {
    let (eps, hf) = (f32_of(c.float("eps")), c.word("rounding") == "hf");
    let x = c.floats("x");
    let h = x.chunks(n).flat_map(|row| normed(row, eps, hf));
    let of = |(h, dy): (Product, &Product)| {
        let Product { value, error } = term(dy.value, h);
        let of_dy = if dy.error == 0.0 || h.value == 0.0 { 0.0 } else { dy.error * h.value.abs() };
        Product { value, error: error + of_dy }
    };
    h.zip(dy).map(of).collect()
}

/// A row times its r, with errors in units of 2^-24; infinite where nothing is claimed.
fn normed(row: &[f64], eps: f64, hf: bool) -> Vec<Product> {
    let n = row.len();
    let squares: f64 = row.iter().map(|v| v * v).sum();
    let mean = squares / n as f64 + eps;
    let r = 1.0 / mean.sqrt();
    let overflows = squares > HUGE && row.iter().all(|v| v.is_finite());
    // Squares below the smallest normal number lose bits; without eps that is felt. Squares of one magnitude that is a
    // power of two are exact, and so is r.
    let exact = f32_of(r) == r && f32_of(mean) == mean && row.iter().all(|v| v.abs() == row[0].abs());
    let r_error = if exact { 0.0 } else { 1.0 + FLOOR / mean };
    let element = |&v: &f64| {
        let value = v * r;
        let (kept, step) = if hf { rms_norm::to_hf(value, r_error, n) } else { (value, 0.0) };
        let error = match () {
            _ if v == 0.0 || value.is_nan() => 0.0,
            _ if overflows => f64::INFINITY,
            _ if exact && f32_of(value) == value => 0.0,
            _ => value.abs() * (r_error + 1.0) + FLOOR + step,
        };
        Product { value: kept, error }
    };
    row.iter().map(element).collect()
}
