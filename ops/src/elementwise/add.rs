//! Elementwise sum: `a, b -> y`, any shape.
//!
//! Formula: `y = a + b`.
//! Rounding: the sum once to f32; last rounding.

use crate::element::compile_here;
use crate::elementwise::frame::{Pointwise, elementwise};
use crate::simd::Simd;
use crate::{Cpu, Element, Error, check_len};

/// `y[i] = a[i] + b[i]`; all slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ.
pub fn add<I: Element, O: Element>(cpu: &Cpu, a: &[I], b: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("add", "b", "of a", b.len(), &[a.len()])?;
    check_len("add", "y", "of a", y.len(), &[a.len()])?;
    compile_here!((cpu: &Cpu) I(a, b) O(y) -> () => elementwise(cpu, Add, a, b, y));
    Ok(())
}

/// `a + b`.
#[derive(Clone, Copy)]
pub(crate) struct Add;

impl Pointwise for Add {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F, _: S::F, b: S::F) -> S::F {
        s.add(a, b)
    }
}
