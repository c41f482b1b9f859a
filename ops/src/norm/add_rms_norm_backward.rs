//! Gradient of residual sum and its normalisation: `sum[R,N], w[N], dy[R,N], dsum[R,N]? -> dx[R,N]`.
//!
//! Formula: `rms_norm_backward` of sum, plus dsum: the gradient of x and of residual alike.
//! Order and rounding: as `rms_norm_backward`, `+ dsum` in f32 before the last rounding where it is given.

use crate::backend::device::{Buffer, Device};
use crate::call::Entry;
use crate::element::Stored;
use crate::norm::rms_norm_backward::{Names, UNIT, call, call_on_device, on_buffers, on_slices};
use crate::{Cpu, Element, Error, RmsNorm};

const NAMES: Names = ["add_rms_norm_backward", "sum"];

/// The gradient `dx[R,N]` of [`add_rms_norm`](crate::add_rms_norm)'s x, and of its residual, from its sum as it was stored,
/// w, and the gradients `dy[R,N]` and `dsum[R,N]` of its outputs.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
///
/// ```
/// use samebits_ops::{Cpu, RmsNorm, Rounding, add_rms_norm_backward};
///
/// let shape = RmsNorm { rows: 1, n: 2, eps: 0.0, rounding: Rounding::Once, weight_offset: false };
/// let mut dx = [9f32; 2];
/// let (sum, w, dy, dsum) = ([2f32, -2.0], [1.0, 3.0], [1.0, 1.0], [0.5, -4.0]);
/// add_rms_norm_backward(&Cpu::best(), &shape, &sum, &w, &dy, Some(&dsum), &mut dx)?;
/// assert_eq!(dx, [1.5, -3.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn add_rms_norm_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &RmsNorm,
    sum: &[I],
    w: &[I],
    dy: &[I],
    dsum: Option<&[I]>,
    dx: &mut [O],
) -> Result<(), Error> {
    on_slices(cpu, NAMES, shape, [sum, w, dy], dsum, dx)
}

/// add_rms_norm_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: "add_rms_norm_backward",
    cpu: |cpu, args| call(cpu, NAMES, args),
    device: Some(|on, args| call_on_device(on, NAMES, args)),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`add_rms_norm_backward`] on a device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &RmsNorm,
    sum: &Buffer<I>,
    w: &Buffer<I>,
    dy: &Buffer<I>,
    dsum: Option<&Buffer<I>>,
    dx: &mut Buffer<O>,
) -> Result<(), Error> {
    on_buffers(device, NAMES, shape, [sum, w, dy], dsum, dx)
}
