//! Row gather: `w[V,D], tokens[T] -> y[T,D]`.
//!
//! Formula: `y[t] = w[tokens[t]]`.
//! Rounding: none when the types agree (a NaN becomes the canonical one); else the last rounding.

use crate::element::compile_here;
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::{Cpu, Element, Error, PackedWeight, check_len, value_error};

/// `w[V,D], tokens[T] -> y[T,D]`; `dim` is D, V and T follow from the lengths.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when a token is outside `0..V`.
pub fn embedding<I: Element, O: Element>(
    cpu: &Cpu,
    dim: usize,
    w: &[I],
    tokens: &[i32],
    y: &mut [O],
) -> Result<(), Error> {
    let vocab = w.len().checked_div(dim).unwrap_or(0);
    check_len("embedding", "w", "[V,D]", w.len(), &[vocab, dim])?;
    check_len("embedding", "y", "[T,D]", y.len(), &[tokens.len(), dim])?;
    if dim == 0 {
        return Ok(());
    }
    if let Some(t) = tokens.iter().position(|&token| usize::try_from(token).map_or(true, |token| token >= vocab)) {
        return Err(value_error("embedding", format!("tokens[{t}] is {}; the table has {vocab} rows", tokens[t])));
    }
    compile_here!((cpu: &Cpu, dim: usize, tokens: &[i32]) I(w) O(y) -> () => {
        cpu.chunks(y, dim, |t, y| cpu.dispatch(Copy { row: &w[tokens[t] as usize * dim..][..dim], y }))
    });
    Ok(())
}

/// [`embedding`] with the table packed: the same bits. A table that is the weight of a product as well is held once.
///
/// # Errors
/// As [`embedding`].
pub fn embedding_packed<O: Element>(cpu: &Cpu, w: &PackedWeight, tokens: &[i32], y: &mut [O]) -> Result<(), Error> {
    let (vocab, dim) = (w.n(), w.k());
    check_len("embedding", "y", "[T,D]", y.len(), &[tokens.len(), dim])?;
    if let Some(t) = tokens.iter().position(|&token| usize::try_from(token).map_or(true, |token| token >= vocab)) {
        return Err(value_error("embedding", format!("tokens[{t}] is {}; the table has {vocab} rows", tokens[t])));
    }
    if dim > 0 {
        cpu.chunks(y, dim, |t, y| w.unpack_row(tokens[t] as usize, |k, value| y[k] = O::narrow(value)));
    }
    Ok(())
}

struct Copy<'a, I, O> {
    row: &'a [I],
    y: &'a mut [O],
}

impl<I: Element, O: Element> Kernel for Copy<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.y.len()).step_by(S::LANES) {
            narrow_at(s, load_at(s, self.row, at, I::default()), self.y, at);
        }
    }
}
