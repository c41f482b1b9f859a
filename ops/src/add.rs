//! Elementwise sum: `a, b -> y`, any shape.
//!
//! Formula: `y = a + b`.
//! Rounding: the sum once to f32; last rounding.

use crate::lanes::{Kernel, Simd, load_at, narrow_at};
use crate::{Cpu, Element, Error, check_len};

/// `y[i] = a[i] + b[i]`; all slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ.
pub fn add<I: Element, O: Element>(cpu: &Cpu, a: &[I], b: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("add", "b", "of a", b.len(), &[a.len()])?;
    check_len("add", "y", "of a", y.len(), &[a.len()])?;
    let size = cpu.elements_per_chunk(y.len());
    cpu.chunks(y, size, |chunk, y| {
        let range = chunk * size..chunk * size + y.len();
        cpu.dispatch(Part { a: &a[range.clone()], b: &b[range], y });
    });
    Ok(())
}

struct Part<'a, I, O> {
    a: &'a [I],
    b: &'a [I],
    y: &'a mut [O],
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.y.len()).step_by(S::LANES) {
            let sum = s.add(load_at(s, self.a, at, I::default()), load_at(s, self.b, at, I::default()));
            narrow_at(s, sum, self.y, at);
        }
    }
}
