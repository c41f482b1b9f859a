//! The end of a sum over tokens: `x[C,N] -> y[N]`, C a power of two.
//!
//! Formula: `y = sum of x[c]`.
//! Order: for h in C/2, C/4, .., 1: `x[c] = x[c] + x[c + h]` for every c < h.
//! Rounding: every addition once to f32; last rounding.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::through_f32::{convert, widen};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};

const NAME: &str = "fold";

/// Columns that are folded together.
const TILE: usize = 64;

/// Partial sums that wait at the same time: one for each bit of a number of rows.
const LEVELS: usize = usize::BITS as usize;

/// The sum `y[N]` of the rows of `x[C,N]`: the upper half is added to the lower until one row is left.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] where C is no power of two.
///
/// ```
/// use samebits_ops::{Cpu, fold};
///
/// let mut y = [0f32; 2];
/// fold(&Cpu::best(), &[1f32, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0], &mut y)?;
/// assert_eq!(y, [10.0, 100.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn fold<I: Element, O: Element>(cpu: &Cpu, x: &[I], y: &mut [O]) -> Result<(), Error> {
    let (n, rows) = (y.len(), x.len().checked_div(y.len()).unwrap_or(1));
    check_len(NAME, "x", "[C,N]", x.len(), &[rows, n])?;
    run(cpu, TensorRef::of(x, &[rows, n]), TensorMut::of(y, &[n]))
}

fn check_rows(rows: usize) -> Result<(), Error> {
    match rows.is_power_of_two() {
        true => Ok(()),
        false => Err(value_error(NAME, format!("C = {rows} must be a power of two"))),
    }
}

/// Rows of any layout.
fn run(cpu: &Cpu, x: TensorRef, y: TensorMut) -> Result<(), Error> {
    x.on_host(NAME, "x")?;
    let rows = x.shape()[0];
    check_rows(rows)?;
    let shift = usize::BITS - rows.trailing_zeros();
    typed!(y.dtype() => O, {
        cpu.chunks(y.host::<O>(NAME, "y")?, TILE, |tile, y| {
            let mut waiting = [[0f32; TILE]; LEVELS];
            let mut sum = [0f32; TILE];
            for number in 0..rows {
                // Halves come side by side where the bits of a row's number are read from the other end.
                let row = if rows == 1 { 0 } else { number.reverse_bits() >> shift };
                widen(cpu, &x, row, tile * TILE, &mut sum[..y.len()]);
                let level = number.trailing_ones() as usize;
                cpu.dispatch(Add { waiting: &waiting[..level], sum: &mut sum });
                waiting[level] = sum;
            }
            convert(cpu, &sum[..y.len()], y);
        });
        Ok(())
    })
}

/// Its kernel.
const UNIT: Unit = Unit::of(NAME, include_str!("fold.cu"), &["fold"]);

/// fold, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| run(cpu, args.input("x"), args.output("y")),
    device: Some(|on, args| {
        let (x, y) = (args.input("x"), args.output("y"));
        typed!(x.dtype() => I, typed!(y.dtype() => O, {
            on_device::<I, O>(on, x.device(NAME, "x")?, y.device(NAME, "y")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`fold`] on a device.
///
/// # Errors
/// As [`fold`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(device: &Device, x: &Buffer<I>, y: &mut Buffer<O>) -> Result<(), Error> {
    let (n, rows) = (y.len(), x.len().checked_div(y.len()).unwrap_or(1));
    check_len(NAME, "x", "[C,N]", x.len(), &[rows, n])?;
    check_rows(int(NAME, "C", rows)? as usize)?;
    if n == 0 {
        return Ok(());
    }
    let arguments = Arguments::new().buffer(x).buffer(y).long(n).int(rows.trailing_zeros() as i32);
    // SAFETY: lengths were checked; a thread takes a column, and the kernel leaves columns behind the last alone.
    unsafe { device.launch(Build::of::<I, O>(NAME), NAME, [n.div_ceil(128), 1, 1], 128, 0, &arguments) }
}

/// Each of the sums that wait, the lowest level first, plus `sum`, which becomes theirs.
struct Add<'a> {
    waiting: &'a [[f32; TILE]],
    sum: &'a mut [f32; TILE],
}

impl Kernel for Add<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..TILE).step_by(S::LANES) {
            let mut sum = load_at(s, self.sum, at, 0.0);
            for before in self.waiting {
                sum = s.add(load_at(s, before, at, 0.0), sum);
            }
            narrow_at(s, sum, self.sum, at);
        }
    }
}
