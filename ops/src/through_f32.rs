//! Pairs of types that no kernel is compiled for, by way of f32: rows are widened, which is exact, the kernel of f32 makes
//! the row of the output, and that is rounded once more. The last rounding of every op is that of an f32, so the bits are
//! those of a kernel for the pair; such kernels were half of this crate's code.

use crate::element::typed;
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::{Cpu, Element, Error, TensorMut, TensorRef};

/// Makes every row of y, `n` elements each: `work(row, y)` writes it in f32, with what it asks for of its own.
///
/// # Errors
/// [`Error::Value`] when y is not on the host.
pub fn rows(
    cpu: &Cpu,
    op: &'static str,
    y: TensorMut,
    n: usize,
    work: &(dyn Fn(usize, &mut [f32]) + Sync),
) -> Result<(), Error> {
    typed!(y.dtype() => O, {
        let y = y.host::<O>(op, "y")?;
        let rows = y.len().checked_div(n).unwrap_or(0);
        let per_chunk = cpu.rows_per_chunk(rows, n);
        cpu.chunks(y, per_chunk * n, |chunk, y| {
            let mut made = vec![0f32; n];
            for (row, y) in (chunk * per_chunk..).zip(y.chunks_mut(n)) {
                work(row, &mut made);
                convert(cpu, &made, y);
            }
        });
    });
    Ok(())
}

/// The elements of row `row` of x from `from` on, as many as `y` takes.
pub fn widen(cpu: &Cpu, x: &TensorRef, row: usize, from: usize, y: &mut [f32]) {
    typed!(x.dtype() => I, convert(cpu, &x.rows::<I>().row(row)[from..][..y.len()], y));
}

/// Row `row` of x.
pub fn f32_row(cpu: &Cpu, x: &TensorRef, row: usize) -> Vec<f32> {
    let mut wide = vec![0f32; x.shape().last().copied().unwrap_or(1)];
    widen(cpu, x, row, 0, &mut wide);
    wide
}

/// `y[i] = x[i]`, last rounding; x and y have one length.
pub fn convert<I: Element, O: Element>(cpu: &Cpu, x: &[I], y: &mut [O]) {
    cpu.dispatch(Convert { x, y });
}

struct Convert<'a, I, O> {
    x: &'a [I],
    y: &'a mut [O],
}

impl<I: Element, O: Element> Kernel for Convert<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.x.len()).step_by(S::LANES) {
            narrow_at(s, load_at(s, self.x, at, I::default()), self.y, at);
        }
    }
}
