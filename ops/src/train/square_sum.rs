//! Sums of squares of the blocks of a gradient: `x[R,N] (f32) -> sum[R]` (f32).
//!
//! Formula: `sum = sum of x * x`.
//! Order: `lanes`, each a chain.
//! Rounding: every step once to f32.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::profile::IEEE;
use crate::reduce::{Square, lane_sum};
use crate::simd::{Kernel, Simd};
use crate::tensor::Rows;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

const NAME: &str = "square_sum";

/// Elements of a block of a gradient: `square_sum` of such rows, and of what is left behind the last whole one, is what
/// [`clip_factor`](crate::clip_factor) takes.
pub const NORM_BLOCK: usize = IEEE.norm_block;

/// The sums `sum[R]` of the squares of rows `x[R,N]`.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
///
/// ```
/// use samebits_ops::{Cpu, square_sum};
///
/// let mut sum = [9f32; 2];
/// square_sum(&Cpu::best(), &[1.0, 2.0, 3.0, 4.0], &mut sum)?;
/// assert_eq!(sum, [5.0, 25.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn square_sum(cpu: &Cpu, x: &[f32], sum: &mut [f32]) -> Result<(), Error> {
    let (rows, n) = (sum.len(), x.len().checked_div(sum.len()).unwrap_or(0));
    check_len(NAME, "x", "[R,N]", x.len(), &[rows, n])?;
    run(cpu, TensorRef::of(x, &[rows, n]), TensorMut::of(sum, &[rows]))
}

/// Rows of any layout.
fn run(cpu: &Cpu, x: TensorRef, sum: TensorMut) -> Result<(), Error> {
    x.on_host(NAME, "x")?;
    let (x, sum) = (x.rows::<f32>(), sum.host::<f32>(NAME, "sum")?);
    let per_chunk = cpu.rows_per_chunk(sum.len(), x.n());
    cpu.chunks(sum, per_chunk, |chunk, sum| cpu.dispatch(Part { first: chunk * per_chunk, x, sum }));
    Ok(())
}

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("square_sum.cu"), &[NAME]) };

/// square_sum, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| run(cpu, args.input("x"), args.output("sum")),
    device: Some(|on, args| on_device(on, args.input("x").device(NAME, "x")?, args.output("sum").device(NAME, "sum")?)),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`square_sum`] on a device.
///
/// # Errors
/// As [`square_sum`]; errors of the device.
pub fn on_device(device: &Device, x: &Buffer<f32>, sum: &mut Buffer<f32>) -> Result<(), Error> {
    let (rows, n) = (sum.len(), x.len().checked_div(sum.len()).unwrap_or(0));
    check_len(NAME, "x", "[R,N]", x.len(), &[rows, n])?;
    let arguments = Arguments::new().buffer(x).buffer(sum).long(rows).long(n);
    // SAFETY: lengths were checked; a warp takes a row, and the kernel leaves those behind the last alone.
    unsafe { device.launch(Build::of::<f32, f32>(NAME), NAME, [rows.div_ceil(4), 1, 1], 128, 0, &arguments) }
}

/// Some rows, from `first` on.
struct Part<'a> {
    first: usize,
    x: Rows<'a, f32>,
    sum: &'a mut [f32],
}

impl Kernel for Part<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (row, sum) in (self.first..).zip(self.sum) {
            *sum = f32::narrow(lane_sum(s, self.x.row(row), 0.0, Square));
        }
    }
}
