//! Gradient of a table: `dy[T,D], tokens[T], mask[T]?, carry[V,D] (f32) -> dw[V,D]` (f32).
//!
//! Formula: `dw[tokens[t]] += dy[t]` over the rows that are tokens.
//! Order: a chain of additions for each element, tokens ascending, from carry.
//! Rounding: every addition once to f32.

use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::tensor::Rows;
use crate::token::chains::{begin, mask_of};
use crate::token::device;
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};

const NAME: &str = "embedding_dw";

/// Adds each row of `dy[T,D]` to the row of `dw[V,D]` that its token names, but where `mask[T]` is 0; `dim` is D, V and T
/// follow from the lengths.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when a token is outside `0..V`.
///
/// ```
/// use samebits_ops::{Cpu, embedding_dw};
///
/// let mut dw = [0f32, 0.5, 1.0];
/// embedding_dw(&Cpu::best(), 1, &[10f32, 20.0, 30.0], &[2, 0, 2], Some(&[1, 1, 0]), &mut dw)?;
/// assert_eq!(dw, [20.0, 0.5, 11.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn embedding_dw<I: Element>(
    cpu: &Cpu,
    dim: usize,
    dy: &[I],
    tokens: &[i32],
    mask: Option<&[i32]>,
    dw: &mut [f32],
) -> Result<(), Error> {
    check_len(NAME, "dy", "[T,D]", dy.len(), &[tokens.len(), dim])?;
    let vocab = dw.len().checked_div(dim).unwrap_or(0);
    check_len(NAME, "dw", "[V,D]", dw.len(), &[vocab, dim])?;
    check(tokens, mask, vocab)?;
    run(cpu, TensorRef::of(dy, &[tokens.len(), dim]), tokens, mask, dw);
    Ok(())
}

/// Checks the extents of tokens and mask, and the tokens.
fn check(tokens: &[i32], mask: Option<&[i32]>, vocab: usize) -> Result<(), Error> {
    check_len(NAME, "mask", "[T]", mask.map_or(tokens.len(), <[i32]>::len), &[tokens.len()])?;
    let outside = |&token: &i32| usize::try_from(token).map_or(true, |token| token >= vocab);
    match tokens.iter().position(outside) {
        Some(t) => Err(value_error(NAME, format!("tokens[{t}] is {}; the table has {vocab} rows", tokens[t]))),
        None => Ok(()),
    }
}

/// Rows of dy of any layout; tokens have been checked.
fn run(cpu: &Cpu, dy: TensorRef, tokens: &[i32], mask: Option<&[i32]>, dw: &mut [f32]) {
    typed!(dy.dtype() => I, {
        let dy = dy.rows::<I>();
        let dim = dy.n();
        let vocab = dw.len().checked_div(dim).unwrap_or(0);
        let per_chunk = vocab.div_ceil(4 * cpu.threads());
        cpu.chunks(dw, per_chunk * dim, |chunk, dw| {
            cpu.dispatch(Part { dim, dy, tokens, mask, first: chunk * per_chunk, dw });
        });
    });
}

/// Its kernel.
const UNIT: Unit = Unit::of(NAME, include_str!("embedding_dw.cu"), &["embedding_dw"]);

/// embedding_dw, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let mask = mask_of(args)?;
        let tokens = args.integers("tokens")?;
        check(tokens, mask, args.call.dim("V"))?;
        let ([dy], dw) = begin(cpu, args, ["dy"], "dw")?;
        run(cpu, dy, tokens, mask, dw);
        Ok(())
    },
    device: Some(|on, args| {
        let (dy, tokens, dw) = (args.input("dy"), args.input("tokens"), args.output("dw"));
        let (dim, carry) = (args.call.dim("D"), args.input("carry").device::<f32>(NAME, "carry")?);
        device::with_mask(on, args, |mask| {
            typed!(dy.dtype() => I, {
                let (dy, dw) = (dy.device::<I>(NAME, "dy")?, dw.device(NAME, "dw")?);
                match tokens.as_indices() {
                    Some(tokens) => on_device(on, dim, dy, tokens, mask, carry, dw),
                    None => {
                        let tokens = Indices::new(on, NAME, args.integers("tokens")?, args.call.dim("V"))?;
                        on_device(on, dim, dy, &tokens, mask, carry, dw)
                    }
                }
            })
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`embedding_dw`] on a device, from `carry[V,D]`, of tokens that stand there.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; [`Error::Value`] when tokens may be outside the table; errors of the
/// device.
pub fn on_device<I: Stored>(
    on: &Device,
    dim: usize,
    dy: &Buffer<I>,
    tokens: &Indices,
    mask: Option<&Buffer<i32>>,
    carry: &Buffer<f32>,
    dw: &mut Buffer<f32>,
) -> Result<(), Error> {
    let vocab = tokens.limit();
    check_len(NAME, "dy", "[T,D]", dy.len(), &[tokens.len(), dim])?;
    mask.map_or(Ok(()), |mask| check_len(NAME, "mask", "[T]", mask.len(), &[tokens.len()]))?;
    check_len(NAME, "carry", "[V,D]", carry.len(), &[vocab, dim])?;
    check_len(NAME, "dw", "[V,D]", dw.len(), &[vocab, dim])?;
    if dw.is_empty() {
        return Ok(());
    }
    let arguments = Arguments::new().buffer(dy).buffer(tokens.buffer(on)?);
    let arguments = match mask {
        Some(mask) => arguments.buffer(mask).int(1),
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer(carry).buffer(dw).long(tokens.len()).long(vocab).long(dim);
    let grid = [vocab.div_ceil(4), 1, 1];
    // SAFETY: lengths were checked; a warp takes a row of the table, and the kernel leaves rows behind the last alone.
    unsafe { on.launch(Build::of::<I, f32>(NAME), NAME, grid, 128, 0, &arguments) }
}

/// Some rows of the table, from `first` on.
struct Part<'a, I> {
    dim: usize,
    dy: Rows<'a, I>,
    tokens: &'a [i32],
    mask: Option<&'a [i32]>,
    first: usize,
    dw: &'a mut [f32],
}

impl<I: Element> Kernel for Part<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.dw.len() / self.dim;
        for (t, &token) in self.tokens.iter().enumerate() {
            let row = (token as usize).wrapping_sub(self.first);
            if row >= rows || self.mask.is_some_and(|mask| mask[t] == 0) {
                continue;
            }
            let (dy, dw) = (self.dy.row(t), &mut self.dw[row * self.dim..][..self.dim]);
            for at in (0..self.dim).step_by(S::LANES) {
                let sum = s.add(load_at(s, dw, at, 0.0), load_at(s, dy, at, I::default()));
                narrow_at(s, sum, dw, at);
            }
        }
    }
}
