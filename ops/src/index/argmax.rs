//! Index of the largest element: `x[R,N] -> index[R]`.
//!
//! Order: the lowest index among equals; -0 equals +0. A NaN counts as larger than every number, so the first NaN wins.

use crate::{Cpu, Element, Error, check_len, value_error};

/// `x[R,N] -> index[R]`; `rows` is R, N is at least 1.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when N is 0 and R is not, or exceeds i32.
pub fn argmax<I: Element>(cpu: &Cpu, rows: usize, n: usize, x: &[I], index: &mut [i32]) -> Result<(), Error> {
    check_len("argmax", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("argmax", "index", "[R]", index.len(), &[rows])?;
    if rows > 0 && (n == 0 || i32::try_from(n).is_err()) {
        return Err(value_error("argmax", format!("rows have {n} elements; 1 to {} have a largest one", i32::MAX)));
    }
    cpu.chunks(index, 1, |row, index| {
        let mut best = 0;
        let mut largest = f32::NEG_INFINITY;
        for (i, v) in x[row * n..][..n].iter().enumerate() {
            let v = v.widen();
            if v.is_nan() {
                best = i;
                break;
            }
            if v > largest {
                (best, largest) = (i, v);
            }
        }
        index[0] = best as i32;
    });
    Ok(())
}
