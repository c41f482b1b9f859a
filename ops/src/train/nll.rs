//! The negative log-likelihood: `logprob[B,T], count[B,T] -> per_sequence[B], dlogprob[B,T]`, all floats f32.
//!
//! Formula: `value = -logprob`, `slope = -1`; sums and gradients as in `sequences.rs`.
//! Order: that of `sequences.rs`.
//! Rounding: that of `sequences.rs`.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::simd::Simd;
use crate::train::sequences::{self, LossShape, TokenLoss};
use crate::{Cpu, Error, TensorMut, TensorRef};

const NAME: &str = "nll";

/// Sums `per_sequence[B]` of `-logprob[B,T]` over the tokens whose `count[B,T]` is not 0, and the gradient `dlogprob[B,T]` of
/// the loss that [`batch_loss`](crate::batch_loss) makes of such sums. Of other tokens nothing is read; their gradient is +0.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when the denominator is not a positive finite f32.
///
/// ```
/// use samebits_ops::{Cpu, LossShape, nll};
///
/// // A sequence of three tokens, the last of which is padding, in a batch of 4 tokens.
/// let shape = LossShape { denominator: 4.0, ..LossShape::new(1, 3) };
/// let (mut sum, mut dlogprob) = ([9f32], [9f32; 3]);
/// nll(&Cpu::best(), &shape, &[-1.0, -2.0, f32::NAN], &[1, 1, 0], &mut sum, &mut dlogprob)?;
/// assert_eq!((sum, dlogprob), ([3.0], [-0.25, -0.25, 0.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn nll(
    cpu: &Cpu,
    shape: &LossShape,
    logprob: &[f32],
    count: &[i32],
    per_sequence: &mut [f32],
    dlogprob: &mut [f32],
) -> Result<(), Error> {
    let tokens = [("logprob", logprob.len()), ("count", count.len()), ("dlogprob", dlogprob.len())];
    shape.check(NAME, &tokens, per_sequence.len())?;
    let extents = [shape.sequences, shape.length];
    let outputs = [TensorMut::of(per_sequence, &extents[..1]), TensorMut::of(dlogprob, &extents)];
    sequences::run(cpu, NAME, shape, Nll, [TensorRef::of(logprob, &extents); 3], count, outputs)
}

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("nll.cu"), &[NAME]) };

/// nll, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, logprob, count) = (LossShape::of(args), args.input("logprob"), args.integers("count")?);
        let outputs = ["per_sequence", "dlogprob"].map(|name| args.output(name));
        sequences::run(cpu, NAME, &shape, Nll, [logprob; 3], count, outputs)
    },
    device: Some(|on, args| {
        let (shape, count) = (LossShape::of(args), args.integers("count")?);
        let [sum, dlogprob] = ["per_sequence", "dlogprob"].map(|name| args.output(name));
        let (sum, dlogprob) = (sum.device(NAME, "per_sequence")?, dlogprob.device(NAME, "dlogprob")?);
        on_device(on, &shape, args.input("logprob").device(NAME, "logprob")?, count, sum, dlogprob)
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`nll`] on a device; which tokens count comes from the host.
///
/// # Errors
/// As [`nll`]; errors of the device.
pub fn on_device(
    device: &Device,
    shape: &LossShape,
    logprob: &Buffer<f32>,
    count: &[i32],
    per_sequence: &mut Buffer<f32>,
    dlogprob: &mut Buffer<f32>,
) -> Result<(), Error> {
    let tokens = [("logprob", logprob.len()), ("count", count.len()), ("dlogprob", dlogprob.len())];
    let denominator = shape.check(NAME, &tokens, per_sequence.len())?;
    let count = device.upload(NAME, count)?;
    let arguments = Arguments::new().buffer(logprob).buffer(&count).buffer(per_sequence).buffer(dlogprob);
    let arguments = shape.arguments(arguments, denominator);
    // SAFETY: lengths were checked, and a block takes a sequence.
    unsafe { device.launch(Build::of::<f32, f32>(NAME), NAME, [shape.sequences, 1, 1], 256, 0, &arguments) }
}

#[derive(Clone, Copy)]
struct Nll;

impl TokenLoss for Nll {
    const INPUTS: usize = 1;
    #[inline(always)]
    fn of<S: Simd>(self, s: S, _: usize, [logprob, ..]: [S::F; 3]) -> (S::F, S::F) {
        (s.neg(logprob), s.splat(-1.0))
    }
}
