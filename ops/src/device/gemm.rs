//! Launches of matrix products.

use super::rows::{build, int};
use super::{Arguments, Buffer, Build, Device, Stored};
use crate::gemm::segment_length;
use crate::{Error, Gemm, Tf32, check_len};

/// A kernel for few rows of x: as in gemm.cu.
struct Skinny {
    name: &'static str,
    rows: usize,
    /// Rows of w to a lane.
    per: usize,
    /// Bytes of a row that are copied at a time, and how many copies there is room for.
    bytes: usize,
    stages: usize,
}

const SKINNY: [Skinny; 4] = [
    Skinny { name: "gemm_skinny1", rows: 1, per: 1, bytes: 128, stages: 4 },
    Skinny { name: "gemm_skinny4", rows: 4, per: 1, bytes: 128, stages: 3 },
    Skinny { name: "gemm_skinny8", rows: 8, per: 1, bytes: 128, stages: 3 },
    Skinny { name: "gemm_skinny16", rows: 16, per: 2, bytes: 64, stages: 3 },
];

impl Skinny {
    fn shared(&self) -> usize {
        8 * self.stages * (32 * self.per * (self.bytes + 16) + self.rows * self.bytes)
    }
}

/// [`gemm`](crate::gemm()) on a device.
///
/// # Errors
/// As [`gemm`](crate::gemm()); errors of the device.
pub fn gemm<I: Stored, O: Stored>(
    device: &Device,
    shape: &Gemm,
    x: &Buffer<I>,
    w: &Buffer<I>,
    bias: Option<&Buffer<I>>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let Gemm { m, n, k, .. } = *shape;
    check_len("gemm", "x", "[M,K]", x.len(), &[m, k])?;
    check_len("gemm", "w", "[N,K]", w.len(), &[n, k])?;
    check_len("gemm", "y", "[M,N]", y.len(), &[m, n])?;
    let bias = bias.filter(|_| !shape.is_partial());
    if let Some(bias) = bias {
        check_len("gemm", "bias", "[N]", bias.len(), &[n])?;
    }
    // SAFETY: lengths were checked.
    unsafe { launch_gemm(device, shape, (x, 0), (w, 0), bias, (y, 0)) }
}

/// The product of some rows of x, from row `x_row` on, to as many rows of y, from row `y_row` on; the buffers may be longer.
///
/// # Errors
/// [`Error::Value`](crate::Error::Value) when the rows are not there; as [`gemm`].
pub fn gemm_rows<I: Stored, O: Stored>(
    device: &Device,
    shape: &Gemm,
    (x, x_row): (&Buffer<I>, usize),
    w: &Buffer<I>,
    bias: Option<&Buffer<I>>,
    (y, y_row): (&mut Buffer<O>, usize),
) -> Result<(), Error> {
    let Gemm { m, n, k, .. } = *shape;
    let inside = |row: usize, width: usize, len: usize| {
        row.checked_add(m).and_then(|rows| rows.checked_mul(width)).is_some_and(|end| end <= len)
    };
    if !inside(x_row, k, x.len()) || !inside(y_row, n, y.len()) {
        let why = format!("{m} rows from {x_row} of x or from {y_row} of y are not there");
        return Err(crate::value_error("gemm", why));
    }
    check_len("gemm", "w", "[N,K]", w.len(), &[n, k])?;
    if let Some(bias) = bias {
        check_len("gemm", "bias", "[N]", bias.len(), &[n])?;
    }
    // SAFETY: lengths were checked.
    unsafe { launch_gemm(device, shape, (x, x_row), (w, 0), bias, (y, y_row * n)) }
}

/// Starts the product of `shape.m` rows of x with `shape.n` rows of w, each from a row on; y from an element on.
///
/// # Safety
/// The buffers are at least as long as the shape says.
pub(super) unsafe fn launch_gemm<I: Stored, O: Stored>(
    device: &Device,
    shape: &Gemm,
    (x, x_row): (&Buffer<I>, usize),
    (w, w_row): (&Buffer<I>, usize),
    bias: Option<&Buffer<I>>,
    (y, y_at): (&Buffer<O>, usize),
) -> Result<(), Error> {
    let Gemm { m, n, k, k_total, tf32, .. } = *shape;
    let segments = int("gemm", "segments", shape.bounds()?.len() - 1)?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    let arguments = Arguments::new().buffer_from(x, x_row * k).buffer_from(w, w_row * k);
    let arguments = match bias {
        Some(bias) => arguments.buffer(bias).int(1),
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer_from(y, y_at).long(m).long(n).long(k).long(segment_length(k_total)).int(segments);
    let build = Build { tf32: tf32 == Tf32::Enabled && I::NAME == "fp32", ..build::<I, O>("gemm") };
    // The copies of the kernels for few rows are 16 bytes each.
    let skinny = SKINNY.iter().find(|skinny| m <= skinny.rows && k > 0 && (k * size_of::<I>()).is_multiple_of(16));
    if let Some(skinny) = skinny {
        let grid = [n.div_ceil(32 * skinny.per), 1, 1];
        // SAFETY: the caller's promise.
        return unsafe { device.launch(build, skinny.name, grid, 256, skinny.shared(), &arguments) };
    }
    // Large tiles where there are enough of them to go round.
    let tiles = m.div_ceil(128) * n.div_ceil(128);
    let (kernel, side) = if m > 64 && tiles >= 128 { ("gemm_tile128", 128) } else { ("gemm_tile64", 64) };
    // SAFETY: the caller's promise.
    unsafe { device.launch(build, kernel, [n.div_ceil(side), m.div_ceil(side), 1], 256, 0, &arguments) }
}
