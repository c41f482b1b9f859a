//! Launches of the ops that go row by row or element by element.

use super::{Arguments, Buffer, Build, Device, Indices, Stored};
use crate::logprob::logprob::{check_targets, inverse};
use crate::{Error, NormRope, Pairing, RmsNorm, Rope, RopeTable, Rounding, check_len, value_error};

/// A build of a unit for inputs I and outputs O.
pub(super) fn build<I: Stored, O: Stored>(unit: &'static str) -> Build {
    Build { unit, input: I::NAME, output: O::NAME, tf32: false }
}

/// An int argument from a dimension.
pub(super) fn int(op: &'static str, name: &str, value: usize) -> Result<i32, Error> {
    i32::try_from(value).map_err(|_| value_error(op, format!("{name} is {value}; a device takes up to {}", i32::MAX)))
}

fn rounding(rounding: Rounding) -> i32 {
    i32::from(rounding == Rounding::Hf)
}

/// Threads and elements per thread of the elementwise ops.
const ELEMENTS_PER_BLOCK: usize = 256 * 8;

fn elementwise<I: Stored, O: Stored>(
    device: &Device,
    op: &'static str,
    a: &Buffer<I>,
    b: (&'static str, &Buffer<I>),
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    check_len(op, b.0, "of the first input", b.1.len(), &[a.len()])?;
    check_len(op, "y", "of the first input", y.len(), &[a.len()])?;
    let arguments = Arguments::new().buffer(a).buffer(b.1).buffer(y).long(a.len());
    let grid = [a.len().div_ceil(ELEMENTS_PER_BLOCK), 1, 1];
    // SAFETY: all three have as many elements as the kernel is told.
    unsafe { device.launch(build::<I, O>(op), op, grid, 256, 0, &arguments) }
}

/// [`add`](crate::add()) on a device.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn add<I: Stored, O: Stored>(
    device: &Device,
    a: &Buffer<I>,
    b: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    elementwise(device, "add", a, ("b", b), y)
}

/// [`silu_mul`](crate::silu_mul()) on a device.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn silu_mul<I: Stored, O: Stored>(
    device: &Device,
    gate: &Buffer<I>,
    up: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    elementwise(device, "silu_mul", gate, ("up", up), y)
}

/// [`gelu_mul`](crate::gelu_mul()) on a device.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn gelu_mul<I: Stored, O: Stored>(
    device: &Device,
    gate: &Buffer<I>,
    up: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    elementwise(device, "gelu_mul", gate, ("up", up), y)
}

/// An elementwise op of one input and some numbers.
fn pointwise<I: Stored, O: Stored>(
    device: &Device,
    op: &'static str,
    x: &Buffer<I>,
    numbers: &[f32],
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    check_len(op, "y", "of x", y.len(), &[x.len()])?;
    let arguments = Arguments::new().buffer(x).buffer(y).long(x.len());
    let arguments = numbers.iter().fold(arguments, |arguments, &number| arguments.float(number));
    let grid = [x.len().div_ceil(ELEMENTS_PER_BLOCK), 1, 1];
    // SAFETY: both have as many elements as the kernel is told.
    unsafe { device.launch(build::<I, O>(op), op, grid, 256, 0, &arguments) }
}

/// [`softcap`](crate::softcap()) on a device.
///
/// # Errors
/// As [`softcap`](crate::softcap()); errors of the device.
pub fn softcap<I: Stored, O: Stored>(device: &Device, cap: f64, x: &Buffer<I>, y: &mut Buffer<O>) -> Result<(), Error> {
    let (cap, inverse) = crate::elementwise::softcap::factors(cap)?;
    pointwise(device, "softcap", x, &[cap, inverse], y)
}

/// [`scale`](crate::scale()) on a device.
///
/// # Errors
/// As [`scale`](crate::scale()); errors of the device.
pub fn scale<I: Stored, O: Stored>(
    device: &Device,
    factor: f64,
    x: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    pointwise(device, "scale", x, &[crate::elementwise::scale::narrowed(factor)?], y)
}

/// Rows to a block of 128 threads.
const ROWS: usize = 4;

/// [`rms_norm`](crate::rms_norm()) on a device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn rms_norm<I: Stored, O: Stored>(
    device: &Device,
    shape: &RmsNorm,
    x: &Buffer<I>,
    w: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let RmsNorm { rows, n, .. } = *shape;
    check_len("rms_norm", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("rms_norm", "w", "[N]", w.len(), &[n])?;
    check_len("rms_norm", "y", "[R,N]", y.len(), &[rows, n])?;
    if y.is_empty() {
        return Ok(());
    }
    // What a warp keeps in registers.
    let kernel = match n * size_of::<I>() {
        0..=2048 => "rms_norm_short",
        2049..=8192 => "rms_norm_middle",
        8193..=16384 => "rms_norm_wide",
        _ => "rms_norm_long",
    };
    let arguments = Arguments::new()
        .buffer(x)
        .buffer(w)
        .buffer(y)
        .long(rows)
        .long(n)
        .float(shape.eps)
        .int(rounding(shape.rounding))
        .int(i32::from(shape.weight_offset));
    // SAFETY: lengths were checked; the kernel leaves rows behind the last alone.
    unsafe { device.launch(build::<I, O>("rms_norm"), kernel, [rows.div_ceil(ROWS), 1, 1], 128, 0, &arguments) }
}

/// [`add_rms_norm`](crate::add_rms_norm()) on a device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn add_rms_norm<I: Stored, M: Stored, O: Stored>(
    device: &Device,
    shape: &RmsNorm,
    x: &Buffer<I>,
    residual: &Buffer<I>,
    w: &Buffer<I>,
    sum: &mut Buffer<M>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let RmsNorm { rows, n, .. } = *shape;
    check_len("add_rms_norm", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("add_rms_norm", "residual", "[R,N]", residual.len(), &[rows, n])?;
    check_len("add_rms_norm", "w", "[N]", w.len(), &[n])?;
    check_len("add_rms_norm", "sum", "[R,N]", sum.len(), &[rows, n])?;
    check_len("add_rms_norm", "y", "[R,N]", y.len(), &[rows, n])?;
    if y.is_empty() {
        return Ok(());
    }
    let arguments = Arguments::new()
        .buffer(x)
        .buffer(residual)
        .buffer(w)
        .buffer(sum)
        .buffer(y)
        .long(rows)
        .long(n)
        .float(shape.eps)
        .int(rounding(shape.rounding))
        .int(i32::from(shape.weight_offset));
    let kernel = match M::NAME {
        "bf16" => "add_rms_norm_bf16",
        "fp16" => "add_rms_norm_fp16",
        _ => "add_rms_norm_fp32",
    };
    let grid = [rows.div_ceil(ROWS), 1, 1];
    // SAFETY: as for rms_norm.
    unsafe { device.launch(build::<I, O>("add_rms_norm"), kernel, grid, 128, 0, &arguments) }
}

/// A [`RopeTable`] on a device.
pub struct Rotations {
    tokens: usize,
    half: usize,
    cos: Buffer<f32>,
    sin: Buffer<f32>,
}

impl Rotations {
    /// Copies `table`, which the host has made, correctly rounded.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(device: &Device, table: &RopeTable) -> Result<Rotations, Error> {
        let (half, cos, sin) = table.parts();
        Ok(Rotations {
            tokens: cos.len().checked_div(half).unwrap_or(0),
            half,
            cos: device.upload("rope", cos)?,
            sin: device.upload("rope", sin)?,
        })
    }

    /// How many tokens it has rows for.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Copies another table of the same size over it.
    ///
    /// # Errors
    /// [`Error::Length`] when the sizes differ; those of the device.
    pub fn fill(&mut self, device: &Device, table: &RopeTable) -> Result<(), Error> {
        let (half, cos, sin) = table.parts();
        check_len("rope", "table row", "[D/2]", half, &[self.half])?;
        self.cos.fill(device, cos)?;
        self.sin.fill(device, sin)
    }

    fn check(&self, op: &'static str, tokens: usize, dim: usize) -> Result<(), Error> {
        if !dim.is_multiple_of(2) {
            return Err(value_error(op, format!("the head dimension is {dim}; it must be even")));
        }
        check_len(op, "table", "[T,D/2]", self.tokens * self.half, &[tokens, dim / 2])?;
        check_len(op, "table row", "[D/2]", self.half, &[dim / 2])
    }
}

fn interleaved(pairing: Pairing) -> i32 {
    i32::from(pairing == Pairing::Interleaved)
}

/// [`rope`](crate::rope()) on a device.
///
/// # Errors
/// As [`rope`](crate::rope()); errors of the device.
pub fn rope<I: Stored, O: Stored>(
    device: &Device,
    shape: &Rope,
    table: &Rotations,
    x: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let Rope { tokens, heads, dim, pairing } = *shape;
    table.check("rope", tokens, dim)?;
    check_len("rope", "x", "[T,H,D]", x.len(), &[tokens, heads, dim])?;
    check_len("rope", "y", "[T,H,D]", y.len(), &[tokens, heads, dim])?;
    if y.is_empty() {
        return Ok(());
    }
    int("rope", "H * D", heads * dim)?;
    let arguments = Arguments::new()
        .buffer(x)
        .buffer(&table.cos)
        .buffer(&table.sin)
        .buffer(y)
        .int(heads as i32)
        .int(dim as i32)
        .int(interleaved(pairing));
    // SAFETY: lengths were checked, those of the table too.
    unsafe { device.launch(build::<I, O>("rope"), "rope", [tokens, 1, 1], 128, 0, &arguments) }
}

/// [`norm_rope`](crate::norm_rope()) on a device.
///
/// # Errors
/// As [`norm_rope`](crate::norm_rope()); errors of the device.
pub fn norm_rope<I: Stored, O: Stored>(
    device: &Device,
    shape: &NormRope,
    table: &Rotations,
    x: &Buffer<I>,
    w: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let NormRope { tokens, heads, dim, eps, weight_offset, pairing, .. } = *shape;
    table.check("norm_rope", tokens, dim)?;
    check_len("norm_rope", "x", "[T,H,D]", x.len(), &[tokens, heads, dim])?;
    check_len("norm_rope", "w", "[D]", w.len(), &[dim])?;
    check_len("norm_rope", "y", "[T,H,D]", y.len(), &[tokens, heads, dim])?;
    if y.is_empty() {
        return Ok(());
    }
    int("norm_rope", "H * D", heads * dim)?;
    let arguments = Arguments::new()
        .buffer(x)
        .buffer(w)
        .buffer(&table.cos)
        .buffer(&table.sin)
        .buffer(y)
        .long(tokens * heads)
        .int(heads as i32)
        .int(dim as i32)
        .float(eps)
        .int(rounding(shape.rounding))
        .int(i32::from(weight_offset))
        .int(interleaved(pairing));
    let grid = [(tokens * heads).div_ceil(ROWS), 1, 1];
    // SAFETY: lengths were checked, those of the table too.
    unsafe { device.launch(build::<I, O>("norm_rope"), "norm_rope", grid, 128, 0, &arguments) }
}

/// [`softmax`](crate::softmax()) on a device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn softmax<I: Stored, O: Stored>(
    device: &Device,
    rows: usize,
    n: usize,
    x: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    check_len("softmax", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("softmax", "y", "[R,N]", y.len(), &[rows, n])?;
    if y.is_empty() {
        return Ok(());
    }
    let arguments = Arguments::new().buffer(x).buffer(y).long(n);
    // SAFETY: lengths were checked; a block takes a row.
    unsafe { device.launch(build::<I, O>("softmax"), "softmax", [rows, 1, 1], 256, 0, &arguments) }
}

/// `f32(1 / temperature)`, checked, and targets checked against the vocabulary.
pub(super) fn check_logprob(op: &'static str, vocab: usize, temperature: f64, target: &[i32]) -> Result<f32, Error> {
    let scale = inverse(op, temperature)?;
    check_targets(op, target, vocab)?;
    Ok(scale)
}

/// [`logprob`](crate::logprob()) on a device; targets come from the host, which checks them.
///
/// # Errors
/// As [`logprob`](crate::logprob()); errors of the device.
#[allow(clippy::too_many_arguments)]
pub fn logprob<I: Stored>(
    device: &Device,
    rows: usize,
    vocab: usize,
    temperature: f64,
    logits: &Buffer<I>,
    target: &[i32],
    logprob: &mut Buffer<f32>,
    lse: &mut Buffer<f32>,
) -> Result<(), Error> {
    check_len("logprob", "logits", "[R,V]", logits.len(), &[rows, vocab])?;
    check_len("logprob", "target", "[R]", target.len(), &[rows])?;
    check_len("logprob", "logprob", "[R]", logprob.len(), &[rows])?;
    check_len("logprob", "lse", "[R]", lse.len(), &[rows])?;
    let scale = check_logprob("logprob", vocab, temperature, target)?;
    let target = device.upload("logprob", target)?;
    let kernel = if scale == 1.0 { "logprob_unscaled" } else { "logprob" };
    let arguments =
        Arguments::new().buffer(logits).buffer(&target).buffer(logprob).buffer(lse).long(vocab).float(scale);
    // SAFETY: lengths were checked, and so was every target.
    unsafe { device.launch(build::<I, f32>("logprob"), kernel, [rows, 1, 1], 256, 0, &arguments) }
}

/// [`embedding`](crate::embedding()) on a device; tokens come from the host, which checks them.
///
/// # Errors
/// As [`embedding`](crate::embedding()); errors of the device.
pub fn embedding<I: Stored, O: Stored>(
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
    unsafe { device.launch(build::<I, O>("embedding"), "embedding", grid, 128, 0, &arguments) }
}

/// [`argmax`](crate::argmax()) on a device.
///
/// # Errors
/// As [`argmax`](crate::argmax()); errors of the device.
pub fn argmax<I: Stored>(
    device: &Device,
    rows: usize,
    n: usize,
    x: &Buffer<I>,
    index: &mut Buffer<i32>,
) -> Result<(), Error> {
    check_len("argmax", "x", "[R,N]", x.len(), &[rows, n])?;
    check_len("argmax", "index", "[R]", index.len(), &[rows])?;
    if rows > 0 && (n == 0 || i32::try_from(n).is_err()) {
        return Err(value_error("argmax", format!("rows have {n} elements; 1 to {} have a largest one", i32::MAX)));
    }
    let arguments = Arguments::new().buffer(x).buffer(index).long(n);
    // SAFETY: lengths were checked; a block takes a row.
    unsafe { device.launch(build::<I, f32>("argmax"), "argmax", [rows, 1, 1], 256, 0, &arguments) }
}
