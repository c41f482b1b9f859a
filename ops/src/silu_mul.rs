//! Gated activation: `gate, up -> y`, any shape.
//!
//! Formula: `y = gate * sigmoid(gate) * up`, `sigmoid(x) = 1 / (1 + e^-x)`.
//! Order: `(g * sigmoid(g)) * u`.
//! Rounding: every step once to f32; last rounding.

use crate::lanes::{Kernel, Simd, load_at, narrow_at};
use crate::math::sigmoid;
use crate::{Cpu, Element, Error, check_len};

/// `y[i] = (gate[i] * sigmoid(gate[i])) * up[i]`; all slices have the same length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ.
pub fn silu_mul<I: Element, O: Element>(cpu: &Cpu, gate: &[I], up: &[I], y: &mut [O]) -> Result<(), Error> {
    check_len("silu_mul", "up", "of gate", up.len(), &[gate.len()])?;
    check_len("silu_mul", "y", "of gate", y.len(), &[gate.len()])?;
    let size = cpu.elements_per_chunk(y.len());
    cpu.chunks(y, size, |chunk, y| {
        let range = chunk * size..chunk * size + y.len();
        cpu.dispatch(Part { gate: &gate[range.clone()], up: &up[range], y });
    });
    Ok(())
}

struct Part<'a, I, O> {
    gate: &'a [I],
    up: &'a [I],
    y: &'a mut [O],
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.y.len()).step_by(S::LANES) {
            let gate = load_at(s, self.gate, at, I::default());
            let up = load_at(s, self.up, at, I::default());
            narrow_at(s, s.mul(s.mul(gate, sigmoid(s, gate)), up), self.y, at);
        }
    }
}
