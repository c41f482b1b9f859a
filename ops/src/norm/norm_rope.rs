//! Normalised and rotated heads in one: `x[T,H,D], w[D], pos[T] -> y[T,H,D]`.
//!
//! Formula: `y = rope(rms_norm(x, w))`, the norm over each head.
//! Order and rounding: bit for bit `rms_norm` of `[T*H, D]` with an f32 output, then `rope` of that; one last rounding.

use crate::element::compile_here;
use crate::norm::rms_norm::Scale;
use crate::rope::rope::rotate_head;
use crate::simd::stream::{BLOCK, Sink, is_large};
use crate::simd::{Kernel, Simd};
use crate::{Cpu, Element, Error, Pairing, RmsNorm, Rope, RopeTable, Rounding, check_len, value_error};

/// Dimensions and parameters of `norm_rope`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormRope {
    /// Tokens T.
    pub tokens: usize,
    /// Heads H.
    pub heads: usize,
    /// Head dimension D, even.
    pub dim: usize,
    /// As in [`RmsNorm`].
    pub eps: f32,
    /// As in [`RmsNorm`].
    pub rounding: Rounding,
    /// As in [`RmsNorm`].
    pub weight_offset: bool,
    /// Which elements rotate together.
    pub pairing: Pairing,
}

/// `x[T,H,D], w[D] -> y[T,H,D]`; row t of the table belongs to token t.
///
/// # Errors
/// [`Error::Length`] when a slice or the table does not match; [`Error::Value`] when D is odd.
pub fn norm_rope<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &NormRope,
    table: &RopeTable,
    x: &[I],
    w: &[I],
    y: &mut [O],
) -> Result<(), Error> {
    let NormRope { tokens, heads, dim, pairing, .. } = *shape;
    if dim % 2 != 0 {
        return Err(value_error("norm_rope", format!("the head dimension is {dim}; it must be even")));
    }
    check_len("norm_rope", "x", "[T,H,D]", x.len(), &[tokens, heads, dim])?;
    check_len("norm_rope", "w", "[D]", w.len(), &[dim])?;
    check_len("norm_rope", "y", "[T,H,D]", y.len(), &[tokens, heads, dim])?;
    table.check("norm_rope", &Rope { tokens, heads, dim, pairing })?;
    if y.is_empty() {
        return Ok(());
    }
    compile_here!((cpu: &Cpu, shape: &NormRope, table: &RopeTable) I(x, w) O(y) -> () => {
        Tokens::chunks(cpu, shape, table, x, w, y)
    });
    Ok(())
}

struct Tokens<'a, I, O> {
    shape: &'a NormRope,
    table: &'a RopeTable,
    /// The token that x and y begin with.
    first: usize,
    x: &'a [I],
    w: &'a [I],
    y: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Tokens<'_, I, O> {
    fn chunks(cpu: &Cpu, shape: &NormRope, table: &RopeTable, x: &[I], w: &[I], y: &mut [O]) {
        let size = shape.heads * shape.dim;
        let per_chunk = cpu.rows_per_chunk(shape.tokens, size);
        let large = shape.dim <= BLOCK && is_large(cpu, y);
        cpu.chunks(y, per_chunk * size, |chunk, y| {
            let x = &x[chunk * per_chunk * size..][..y.len()];
            cpu.dispatch(Tokens { shape, table, first: chunk * per_chunk, x, w, y, large });
        });
    }
}

impl<I: Element, O: Element> Kernel for Tokens<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.shape.rounding {
            Rounding::Once => self.tokens::<S, false>(s),
            Rounding::Hf => self.tokens::<S, true>(s),
        }
    }
}

impl<I: Element, O: Element> Tokens<'_, I, O> {
    #[inline(always)]
    fn tokens<S: Simd, const HF: bool>(self, s: S) {
        let NormRope { heads, dim, eps, rounding, weight_offset, pairing, .. } = *self.shape;
        let norm = RmsNorm { rows: 1, n: dim, eps, rounding, weight_offset };
        const NO_ROW: [*const f32; 0] = [];
        let mut normed = vec![0f32; dim];
        let mut sink = Sink::<O>::new(self.y, self.large);
        for (t, x) in self.x.chunks_exact(heads * dim).enumerate() {
            let angles = self.table.row(self.first + t);
            // A large output is made of whole heads at a time.
            for x in x.chunks(dim * (BLOCK / dim).max(1)) {
                let y = sink.room(x.len());
                for (x, y) in x.chunks_exact(dim).zip(y.chunks_exact_mut(dim)) {
                    let scale = Scale::<S, HF>::of_row(s, &norm, x);
                    scale.row(s, x, self.w, &mut Sink::<f32>::new(&mut normed, false), NO_ROW);
                    rotate_head(s, pairing, angles, &normed, y);
                }
                sink.put(s, x.len());
            }
        }
        sink.end(s);
    }
}
