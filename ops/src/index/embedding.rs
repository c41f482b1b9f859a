//! Row gather: `w[V,D], tokens[T] -> y[T,D]`.
//!
//! Formula: `y[t] = w[tokens[t]]`.
//! Rounding: none when the types agree (a NaN becomes the canonical one); else the last rounding.

use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, PackedWeight, TensorMut, TensorRef, check_len, value_error};

/// `w[V,D], tokens[T] -> y[T,D]`, row-major; `dim` is D, V and T follow from the lengths.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when a token is outside `0..V`.
///
/// ```
/// use samebits_ops::{Cpu, embedding};
///
/// let mut y = [0f32; 4];
/// embedding(&Cpu::best(), 2, &[1f32, 2.0, 3.0, 4.0], &[1, 0], &mut y)?;
/// assert_eq!(y, [3.0, 4.0, 1.0, 2.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
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
    run(cpu, TensorRef::of(w, &[vocab, dim]), tokens, TensorMut::of(y, &[tokens.len(), dim]))
}

/// A table of any layout, or packed.
fn run(cpu: &Cpu, w: TensorRef, tokens: &[i32], y: TensorMut) -> Result<(), Error> {
    let [vocab, dim] = *w.shape() else {
        return Err(value_error("embedding", format!("w is {:?}; it must be [V, D]", w.shape())));
    };
    if dim == 0 {
        return Ok(());
    }
    if let Some(t) = tokens.iter().position(|&token| usize::try_from(token).map_or(true, |token| token >= vocab)) {
        return Err(value_error("embedding", format!("tokens[{t}] is {}; the table has {vocab} rows", tokens[t])));
    }
    typed!(y.dtype() => O, {
        let y = y.host::<O>("embedding", "y")?;
        if let Some(w) = w.as_prepared::<PackedWeight>() {
            cpu.chunks(y, dim, |t, y| w.unpack_row(tokens[t] as usize, |k, value| y[k] = O::narrow(value)));
            return Ok(());
        }
        w.on_host("embedding", "w")?;
        typed!(w.dtype() => I, {
            let w = w.rows::<I>();
            cpu.chunks(y, dim, |t, y| convert(cpu, w.row(tokens[t] as usize), y));
        });
    });
    Ok(())
}

/// Its kernels.
const UNIT: Unit = Unit::of("embedding", include_str!("embedding.cu"), &["embedding"]);

/// embedding, by name.
pub(crate) const OP: Entry = Entry {
    name: "embedding",
    cpu: |cpu, args| run(cpu, args.input("w"), args.integers("tokens")?, args.output("y")),
    device: Some(|on, args| {
        let (w, tokens, y) = (args.input("w"), args.input("tokens"), args.output("y"));
        let dim = args.call.dim("D");
        typed!(w.dtype() => I, typed!(y.dtype() => O, {
            let (w, y) = (w.device::<I>("embedding", "w")?, y.device::<O>("embedding", "y")?);
            match tokens.as_indices() {
                Some(tokens) => embedding_at(on, dim, w, tokens, y),
                None => on_device(on, dim, w, args.integers("tokens")?, y),
            }
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`embedding`] on a device; tokens come from the host, which checks them.
///
/// # Errors
/// As [`embedding`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    dim: usize,
    w: &Buffer<I>,
    tokens: &[i32],
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let vocab = w.len().checked_div(dim).unwrap_or(0);
    check_len("embedding", "w", "[V,D]", w.len(), &[vocab, dim])?;
    check_len("embedding", "y", "[T,D]", y.len(), &[tokens.len(), dim])?;
    if dim == 0 {
        return Ok(());
    }
    embedding_at(device, dim, w, &Indices::new(device, "embedding", tokens, vocab)?, y)
}

/// [`embedding`] of tokens that stand on the device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; [`Error::Value`] when tokens may be outside the table; errors of the
/// device.
pub fn embedding_at<I: Stored, O: Stored>(
    device: &Device,
    dim: usize,
    w: &Buffer<I>,
    tokens: &Indices,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    check_len("embedding", "y", "[T,D]", y.len(), &[tokens.len(), dim])?;
    check_len("embedding", "w", "[V,D]", w.len(), &[tokens.limit(), dim])?;
    let grid = [tokens.len(), dim.div_ceil(128 * 8), 1];
    let arguments = Arguments::new().buffer(w).buffer(tokens.buffer(device)?).buffer(y).long(dim);
    // SAFETY: lengths were checked, and every token is below the limit.
    unsafe { device.launch(Build::of::<I, O>("embedding"), "embedding", grid, 128, 0, &arguments) }
}

/// [`embedding`] with the table packed: the same bits. A table that is the weight of a product as well is held once.
///
/// # Errors
/// As [`embedding`].
///
/// ```
/// use samebits_ops::{Cpu, PackedWeight, embedding_packed};
///
/// let cpu = Cpu::best();
/// let w = PackedWeight::pack(&cpu, 2, 2, &[1f32, 2.0, 3.0, 4.0])?;
/// let mut y = [0f32; 2];
/// embedding_packed(&cpu, &w, &[1], &mut y)?;
/// assert_eq!(y, [3.0, 4.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn embedding_packed<O: Element>(cpu: &Cpu, w: &PackedWeight, tokens: &[i32], y: &mut [O]) -> Result<(), Error> {
    check_len("embedding", "y", "[T,D]", y.len(), &[tokens.len(), w.k()])?;
    run(cpu, TensorRef::packed(w), tokens, TensorMut::of(y, &[tokens.len(), w.k()]))
}
