//! Index of the largest element: `x[R,N] -> index[R]`.
//!
//! Order: the lowest index among equals; -0 equals +0. A NaN counts as larger than every number, so the first NaN wins.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};

/// `x[R,N] -> index[R]`, row-major, counted from 0; `rows` is R, `n` is N, at least 1.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when N is 0 and R is not, or exceeds i32.
///
/// ```
/// use samebits_ops::{Cpu, argmax};
///
/// let mut index = [0; 2];
/// argmax(&Cpu::best(), 2, 3, &[1f32, 5.0, 2.0, 7.0, 7.0, 0.0], &mut index)?;
/// assert_eq!(index, [1, 0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn argmax<I: Element>(cpu: &Cpu, rows: usize, n: usize, x: &[I], index: &mut [i32]) -> Result<(), Error> {
    check_len("argmax", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("argmax", "index", "[R]", index.len(), &[rows])?;
    check(rows, n)?;
    run(cpu, TensorRef::of(x, &[rows, n]), index)
}

/// Rows of x of any layout; they are not empty.
fn run(cpu: &Cpu, x: TensorRef, index: &mut [i32]) -> Result<(), Error> {
    x.on_host("argmax", "x")?;
    typed!(x.dtype() => I, {
        let x = x.rows::<I>();
        cpu.chunks(index, 1, |row, index| index[0] = largest(x.row(row)) as i32);
    });
    Ok(())
}

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of("argmax", include_str!("argmax.cu"), &["argmax"]) };

/// argmax, by name.
pub(crate) const OP: Entry = Entry {
    name: "argmax",
    cpu: |cpu, args| {
        check(args.call.dim("R"), args.call.dim("N"))?;
        run(cpu, args.input("x"), args.output("index").host("argmax", "index")?)
    },
    device: Some(|on, args| {
        let ([r, n], x) = (["R", "N"].map(|axis| args.call.dim(axis)), args.input("x"));
        let index = args.output("index").device("argmax", "index")?;
        typed!(x.dtype() => I, on_device::<I>(on, r, n, x.device("argmax", "x")?, index))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`argmax`] on a device.
///
/// # Errors
/// As [`argmax`]; errors of the device.
pub fn on_device<I: Stored>(
    device: &Device,
    rows: usize,
    n: usize,
    x: &Buffer<I>,
    index: &mut Buffer<i32>,
) -> Result<(), Error> {
    check_len("argmax", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("argmax", "index", "[R]", index.len(), &[rows])?;
    check(rows, n)?;
    let arguments = Arguments::new().buffer(x).buffer(index).long(n);
    // SAFETY: lengths were checked; a block takes a row.
    unsafe { device.launch(Build::of::<I, f32>("argmax"), "argmax", [rows, 1, 1], 256, 0, &arguments) }
}

/// Checks that `rows` rows of `n` have a largest element.
fn check(rows: usize, n: usize) -> Result<(), Error> {
    if rows > 0 && (n == 0 || i32::try_from(n).is_err()) {
        return Err(value_error("argmax", format!("rows have {n} elements; 1 to {} have a largest one", i32::MAX)));
    }
    Ok(())
}

fn largest<I: Element>(x: &[I]) -> usize {
    let mut best = 0;
    let mut largest = f32::NEG_INFINITY;
    for (i, v) in x.iter().enumerate() {
        let v = v.widen();
        if v.is_nan() {
            return i;
        }
        if v > largest {
            (best, largest) = (i, v);
        }
    }
    best
}
