//! The norm of a gradient and the factor that clips it: `sum[P] (f32) -> norm[1], factor[1]` (both f32).
//!
//! Formula: `norm = sqrt(sum of sum)`, `factor = min(1, max_norm / (norm + 1e-6))`.
//! Order: sums are added in f64, ascending from 0.
//! Rounding: additions and the root to f64, norm to f32; `norm + f32(1e-6)` and the division to f32.
//! Special: a factor of NaN stays one.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::{Cpu, Element, Error, check_len, value_error};

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

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("clip_factor.cu"), &[NAME]) };

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
    device: Some(|on, args| {
        let [norm, factor] = ["norm", "factor"].map(|name| args.output(name));
        let (norm, factor) = (norm.device(NAME, "norm")?, factor.device(NAME, "factor")?);
        on_device(on, args.call.float("max_norm"), args.input("sum").device(NAME, "sum")?, norm, factor)
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`clip_factor`] on a device, into `norm[1]` and `factor[1]`.
///
/// # Errors
/// As [`clip_factor`]; [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device(
    device: &Device,
    max_norm: f64,
    sum: &Buffer<f32>,
    norm: &mut Buffer<f32>,
    factor: &mut Buffer<f32>,
) -> Result<(), Error> {
    let max_norm = check(max_norm)?;
    check_len(NAME, "norm", "[1]", norm.len(), &[1])?;
    check_len(NAME, "factor", "[1]", factor.len(), &[1])?;
    let arguments = Arguments::new().buffer(sum).buffer(norm).buffer(factor).long(sum.len()).float(max_norm);
    // SAFETY: lengths were checked.
    unsafe { device.launch(Build::of::<f32, f32>(NAME), NAME, [1, 1, 1], 256, 0, &arguments) }
}
