//! Penalties of tokens that a text has: `logits[R,V], tokens[S], begin[R], prompt_end[R], end[R], repetition[R], frequency[R],
//! presence[R], bias[R,V]? -> y[R,V]`.
//!
//! Formula: plus the bias; a token of the text over `repetition` where it is not below 0, else times it; a token of the output
//! less `frequency` times how often it is there, and less `presence`.
//! Rounding: every step once to f32.
//! Special: what no step is for keeps its bits; a NaN is the canonical one.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::{Arguments as CallArguments, Entry};
use crate::element::{Stored, typed};
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::{Cpu, Element, Error, TensorRef, check_len, value_error};

const NAME: &str = "penalize";

/// Texts, and what [`penalize`] makes of their tokens: of everything but `tokens` one number for each row.
#[derive(Clone, Copy, Debug)]
pub struct Penalties<'a, F = &'a [f32]> {
    /// Tokens of all texts; rows that are prefixes of one another share them.
    pub tokens: &'a [i32],
    /// Where the text of a row begins in `tokens`.
    pub begin: &'a [i32],
    /// Where its prompt ends, and its output begins.
    pub prompt_end: &'a [i32],
    /// Where it ends.
    pub end: &'a [i32],
    /// By how much what the text has is less likely; 1 for no penalty.
    pub repetition: F,
    /// What is taken off for each time that the output has a token.
    pub frequency: F,
    /// What is taken off where the output has a token.
    pub presence: F,
}

/// [`Penalties`] of `logits[R,V]`, and `bias[R,V]` where there is one, to `y[R,V]`, row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when a token is not below V, or a text not within the tokens.
///
/// ```
/// use samebits_ops::{Cpu, Penalties, penalize};
///
/// // The prompt is 0; the output is 1 1.
/// let by = Penalties {
///     tokens: &[0, 1, 1],
///     begin: &[0],
///     prompt_end: &[1],
///     end: &[3],
///     repetition: &[2.0f32][..],
///     frequency: &[0.25],
///     presence: &[1.0],
/// };
/// let mut y = [0f32; 3];
/// penalize(&Cpu::best(), 3, &[-1f32, 8.0, 3.0], by, None, &mut y)?;
/// assert_eq!(y, [-2.0, 2.5, 3.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn penalize<I: Element>(
    cpu: &Cpu,
    vocab: usize,
    logits: &[I],
    by: Penalties,
    bias: Option<&[f32]>,
    y: &mut [f32],
) -> Result<(), Error> {
    let rows = by.begin.len();
    let [repetition, frequency, presence] = [by.repetition, by.frequency, by.presence].map(<[f32]>::len);
    let elements = [logits.len(), bias.map_or(y.len(), <[f32]>::len), y.len()];
    check(elements, [by.prompt_end.len(), by.end.len(), repetition, frequency, presence], rows, vocab)?;
    by.check_text(vocab)?;
    let extents = [rows, vocab];
    run(cpu, TensorRef::of(logits, &extents), by, bias.map(|bias| TensorRef::of(bias, &extents)), y);
    Ok(())
}

/// Lengths of logits, bias and y, and of what has one number for each row.
fn check(elements: [usize; 3], counts: [usize; 5], rows: usize, vocab: usize) -> Result<(), Error> {
    for (name, found) in ["logits", "bias", "y"].into_iter().zip(elements) {
        check_len(NAME, name, "[R,V]", found, &[rows, vocab])?;
    }
    for (name, found) in ["prompt_end", "end", "repetition", "frequency", "presence"].into_iter().zip(counts) {
        check_len(NAME, name, "[R]", found, &[rows])?;
    }
    Ok(())
}

impl<F> Penalties<'_, F> {
    /// Checks tokens, and where texts are among them.
    fn check_text(&self, vocab: usize) -> Result<(), Error> {
        let beyond =
            |values: &[i32], most: usize| values.iter().position(|v| usize::try_from(*v).map_or(true, |v| v > most));
        if let Some(i) = self.tokens.iter().position(|t| usize::try_from(*t).map_or(true, |t| t >= vocab)) {
            return Err(value_error(NAME, format!("tokens[{i}] is {}; the vocabulary has {vocab}", self.tokens[i])));
        }
        let most = self.tokens.len();
        for (name, places) in [("begin", self.begin), ("prompt_end", self.prompt_end), ("end", self.end)] {
            if let Some(i) = beyond(places, most) {
                return Err(value_error(NAME, format!("{name}[{i}] is {}; use 0 to {most}", places[i])));
            }
        }
        Ok(())
    }
}

/// Rows of logits and bias of any layout; lengths and integers have been checked.
fn run(cpu: &Cpu, logits: TensorRef, by: Penalties, bias: Option<TensorRef>, y: &mut [f32]) {
    let vocab = *logits.shape().last().expect("[R,V]");
    let bias = bias.map(|bias| bias.rows::<f32>());
    typed!(logits.dtype() => I, {
        let logits = logits.rows::<I>();
        cpu.chunks(y, vocab, |row, y| {
            cpu.dispatch(Biased { logits: logits.row(row), bias: bias.as_ref().map(|bias| bias.row(row)), y });
            by.of_text(row, y);
        });
    });
}

/// What a text has of a token of its prompt alone; of others, how often the output has it, and this.
const THERE: u32 = 1 << 31;

impl Penalties<'_> {
    /// The steps that are for tokens of a row's text.
    fn of_text(&self, row: usize, z: &mut [f32]) {
        let [begin, prompt_end, end] = [self.begin, self.prompt_end, self.end].map(|places| places[row] as usize);
        let [repetition, frequency, presence] = [self.repetition, self.frequency, self.presence].map(|by| by[row]);
        if begin >= end {
            return;
        }
        let mut counts = vec![0u32; z.len()];
        for at in begin..end {
            let count = &mut counts[self.tokens[at] as usize];
            *count = (*count | THERE) + u32::from(at >= prompt_end);
        }
        for token in &self.tokens[begin..end] {
            // Each once.
            let (count, z) = (std::mem::take(&mut counts[*token as usize]), &mut z[*token as usize]);
            if count == 0 {
                continue;
            }
            *z = if *z < 0.0 { *z * repetition } else { *z / repetition };
            let count = count & !THERE;
            if count > 0 {
                *z -= frequency * count as f32;
                *z -= presence;
            }
            *z = f32::narrow(*z);
        }
    }
}

/// A row plus its bias.
struct Biased<'a, I> {
    logits: &'a [I],
    bias: Option<&'a [f32]>,
    y: &'a mut [f32],
}

impl<I: Element> Kernel for Biased<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.logits.len()).step_by(S::LANES) {
            let z = load_at(s, self.logits, at, I::default());
            let z = match self.bias {
                Some(bias) => s.add(z, load_at(s, bias, at, 0.0)),
                None => z,
            };
            narrow_at(s, z, self.y, at);
        }
    }
}

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("penalize.cu"), &[NAME]) };

impl<'a, F> Penalties<'a, F> {
    /// Those of a call by name, of whose floats `per_row` gives each.
    fn of(args: &CallArguments<'_, 'a>, per_row: impl Fn(&'static str) -> Result<F, Error>) -> Result<Self, Error> {
        Ok(Penalties {
            tokens: args.integers("tokens")?,
            begin: args.integers("begin")?,
            prompt_end: args.integers("prompt_end")?,
            end: args.integers("end")?,
            repetition: per_row("repetition")?,
            frequency: per_row("frequency")?,
            presence: per_row("presence")?,
        })
    }
}

/// penalize, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let by = Penalties::of(args, |name| args.input(name).dense::<f32>(NAME, name))?;
        by.check_text(args.call.dim("V"))?;
        let (logits, bias) = (args.input("logits"), args.optional("bias"));
        logits.on_host(NAME, "logits")?;
        bias.map_or(Ok(()), |bias| bias.on_host(NAME, "bias"))?;
        run(cpu, logits, by, bias, args.output("y").host(NAME, "y")?);
        Ok(())
    },
    device: Some(|on, args| {
        let by = Penalties::of(args, |name| args.input(name).device::<f32>(NAME, name))?;
        let (logits, vocab) = (args.input("logits"), args.call.dim("V"));
        let bias = args.optional("bias").map(|bias| bias.device::<f32>(NAME, "bias")).transpose()?;
        let y = args.output("y").device(NAME, "y")?;
        typed!(logits.dtype() => I, on_device::<I>(on, vocab, logits.device(NAME, "logits")?, by, bias, y))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// Tokens of the vocabulary that a block of the kernel takes.
const TOKENS_PER_BLOCK: usize = 4096;

/// [`penalize`] on a device; tokens and where texts are among them come from the host.
///
/// # Errors
/// As [`penalize`]; errors of the device.
pub fn on_device<I: Stored>(
    device: &Device,
    vocab: usize,
    logits: &Buffer<I>,
    by: Penalties<&Buffer<f32>>,
    bias: Option<&Buffer<f32>>,
    y: &mut Buffer<f32>,
) -> Result<(), Error> {
    let rows = by.begin.len();
    let [repetition, frequency, presence] = [by.repetition, by.frequency, by.presence].map(Buffer::len);
    let elements = [logits.len(), bias.map_or(y.len(), Buffer::len), y.len()];
    check(elements, [by.prompt_end.len(), by.end.len(), repetition, frequency, presence], rows, vocab)?;
    by.check_text(vocab)?;
    if y.is_empty() {
        return Ok(());
    }
    let tokens = device.upload(NAME, by.tokens)?;
    let places = device.upload(NAME, &[by.begin, by.prompt_end, by.end].concat())?;
    let parts = vocab.div_ceil(TOKENS_PER_BLOCK);
    let arguments = Arguments::new().buffer(logits).buffer(&tokens).buffer(&places).long(rows);
    let arguments = arguments.buffer(by.repetition).buffer(by.frequency).buffer(by.presence);
    let arguments = match bias {
        Some(bias) => arguments.buffer(bias).int(1),
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer(y).long(vocab).long(parts);
    // SAFETY: lengths were checked, and so were tokens and places; `parts` blocks take a row.
    unsafe { device.launch(Build::of::<I, f32>(NAME), NAME, [rows * parts, 1, 1], 256, 0, &arguments) }
}
