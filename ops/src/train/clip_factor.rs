//! The norm of a gradient and the factor that clips it: `sum[P] (f32) -> norm[1], factor[1]` (both f32).
//!
//! Formula: `norm = sqrt(sum of sum)`, `factor = min(1, max_norm / (norm + 1e-6))`.
//! Order: sums are added in f64, ascending from 0.
//! Rounding: additions and the root to f64, norm to f32; `norm + f32(1e-6)` and the division to f32.
//! Special: a factor of NaN stays one.

use crate::call::Entry;
use crate::{Cpu, Element, Error, value_error};

const NAME: &str = "clip_factor";

/// The norm of a gradient from what [`square_sum`](crate::square_sum) gives for all its blocks, tensors in the order of their
/// names, and the factor that makes it no longer than `max_norm`.
///
/// # Errors
/// [`Error::Value`] when `max_norm` is not a positive finite f32.
///
/// ```
/// use samebits_ops::{Cpu, clip_factor};
///
/// let (norm, factor) = clip_factor(&Cpu::best(), 1.0, &[9.0, 7.0])?;
/// assert!(norm == 4.0 && (factor - 0.25).abs() < 1e-6);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn clip_factor(_: &Cpu, max_norm: f64, sum: &[f32]) -> Result<(f32, f32), Error> {
    let max_norm = check(max_norm)?;
    let norm = sum.iter().fold(0f64, |total, &sum| total + f64::from(sum)).sqrt() as f32;
    let quotient = max_norm / (norm + 1e-6);
    Ok((f32::narrow(norm), f32::narrow(if quotient > 1.0 { 1.0 } else { quotient })))
}

/// `f32(max_norm)`, checked.
fn check(max_norm: f64) -> Result<f32, Error> {
    let rounded = max_norm as f32;
    if !(rounded > 0.0 && rounded.is_finite()) {
        return Err(value_error(NAME, format!("max_norm is {max_norm}; it must be positive and finite")));
    }
    Ok(rounded)
}

/// clip_factor, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let sum = args.input("sum").dense::<f32>(NAME, "sum")?;
        let [norm, factor] = ["norm", "factor"].map(|name| args.output(name));
        let (norm, factor) = (norm.host::<f32>(NAME, "norm")?, factor.host::<f32>(NAME, "factor")?);
        (norm[0], factor[0]) = clip_factor(cpu, args.call.float("max_norm"), sum)?;
        Ok(())
    },
    device: None,
    unit: None,
    prepare: None,
};
