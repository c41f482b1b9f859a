//! The clipped policy gradient loss:
//! `logprob[B,T], old_logprob[B,T], advantage[B], reference[B,T]?, count[B,T] -> per_sequence[B], dlogprob[B,T]`, all
//! floats f32.
//!
//! Formula: `ratio = e^(logprob - old_logprob)`, `u = ratio * advantage`, `v = clamp(ratio, 1 - low, 1 + high) * advantage`;
//! `value = -min(u, v)`, `slope = -u` where that is u, else 0; k1 adds `beta * (logprob - reference)`, k3
//! `beta * (e^d - d - 1)`, `d = reference - logprob`. Sums and gradients as in `sequences.rs`.
//! Order: that of `sequences.rs`.
//! Rounding: every step once to f32; `fma(beta, a - r, value)`, `fma(beta, (e - d) - 1, value)`, `fma(beta, 1 - e, slope)`.
//! Special: comparisons with NaN are false, so that a NaN stays one.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::{self, Entry};
use crate::math::exp;
use crate::simd::Simd;
use crate::train::sequences::{self, LossShape, TokenLoss};
use crate::{Cpu, Error, TensorMut, TensorRef, check_len, value_error};

const NAME: &str = "policy_loss";

/// How the distance from a reference model is estimated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kl {
    /// There is none.
    #[default]
    None,
    /// `logprob - reference`.
    K1,
    /// `e^d - d - 1`, `d = reference - logprob`.
    K3,
}

/// Parameters of [`policy_loss`].
#[derive(Clone, Copy, Debug)]
pub struct PolicyLoss {
    /// Ratios count as at least `1 - low`; 0 to 1.
    pub low: f64,
    /// Ratios count as at most `1 + high`; 0 to 1e30.
    pub high: f64,
    /// How the distance from the reference is estimated.
    pub kl: Kl,
    /// The weight of that; 0 to 1e30.
    pub beta: f64,
}

impl Default for PolicyLoss {
    /// Ratios from 0.8 to 1.2, and no reference.
    fn default() -> PolicyLoss {
        PolicyLoss { low: 0.2, high: 0.2, kl: Kl::None, beta: 0.0 }
    }
}

/// What [`policy_loss`] reads, row-major.
#[derive(Clone, Copy, Debug)]
pub struct PolicyTokens<'a> {
    /// `[B,T]`: the log-probability of each token.
    pub logprob: &'a [f32],
    /// `[B,T]`: what it was when the token was sampled.
    pub old_logprob: &'a [f32],
    /// `[B]`: the advantage of each sequence.
    pub advantage: &'a [f32],
    /// `[B,T]`: what it is in the reference model; for [`Kl::None`] there is none.
    pub reference: Option<&'a [f32]>,
    /// `[B,T]`: 0 for tokens that do not count, of which nothing is read.
    pub count: &'a [i32],
}

/// Sums `per_sequence[B]` of the clipped policy gradient loss over the tokens that count, and the gradient `dlogprob[B,T]` of
/// the loss that [`batch_loss`](crate::batch_loss) makes of such sums; +0 for other tokens.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when a parameter is outside its range, and for a reference
/// that is missing or that nobody reads.
///
/// ```
/// use samebits_ops::{Cpu, LossShape, PolicyLoss, PolicyTokens, policy_loss};
///
/// // The second token has become so much likelier that its gradient is cut off.
/// let tokens = PolicyTokens {
///     logprob: &[-1.0, -1.0],
///     old_logprob: &[-1.0, -2.0],
///     advantage: &[1.0],
///     reference: None,
///     count: &[1, 1],
/// };
/// let (mut sum, mut dlogprob) = ([9f32], [9f32; 2]);
/// policy_loss(&Cpu::best(), &LossShape::new(1, 2), &PolicyLoss::default(), tokens, &mut sum, &mut dlogprob)?;
/// assert_eq!((sum, dlogprob), ([-2.2], [-1.0, 0.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn policy_loss(
    cpu: &Cpu,
    shape: &LossShape,
    loss: &PolicyLoss,
    tokens: PolicyTokens,
    per_sequence: &mut [f32],
    dlogprob: &mut [f32],
) -> Result<(), Error> {
    let PolicyTokens { logprob, old_logprob, advantage, reference, count } = tokens;
    let lens = [
        ("logprob", logprob.len()),
        ("old_logprob", old_logprob.len()),
        ("reference", reference.unwrap_or(logprob).len()),
        ("count", count.len()),
        ("dlogprob", dlogprob.len()),
    ];
    shape.check(NAME, &lens, per_sequence.len())?;
    check_len(NAME, "advantage", "[B]", advantage.len(), &[shape.sequences])?;
    let extents = [shape.sequences, shape.length];
    let numbers = loss.numbers(reference.is_some())?;
    let inputs = [logprob, old_logprob, reference.unwrap_or(logprob)].map(|x| TensorRef::of(x, &extents));
    let outputs = [TensorMut::of(per_sequence, &extents[..1]), TensorMut::of(dlogprob, &extents)];
    run(cpu, shape, loss.kl, numbers, advantage, inputs, count, outputs)
}

impl PolicyLoss {
    /// Checks the parameters: `f32(1 - low)`, `f32(1 + high)` and `f32(beta)`.
    fn numbers(&self, has_reference: bool) -> Result<[f32; 3], Error> {
        let PolicyLoss { low, high, kl, beta } = *self;
        for (name, value, most) in [("low", low, 1.0), ("high", high, 1e30), ("beta", beta, 1e30)] {
            if !(0.0..=most).contains(&value) {
                return Err(value_error(NAME, format!("{name} is {value}; it must be from 0 to {most:e}")));
            }
        }
        match (kl, has_reference) {
            (Kl::None, true) => Err(value_error(NAME, "nothing reads the reference; leave it out or use k1 or k3")),
            (Kl::K1 | Kl::K3, false) => Err(value_error(NAME, "k1 and k3 are distances from a reference; give it")),
            _ => Ok([(1.0 - low) as f32, (1.0 + high) as f32, beta as f32]),
        }
    }
}

/// Tensors of any layout, whose lengths have been checked.
#[allow(clippy::too_many_arguments)]
fn run(
    cpu: &Cpu,
    shape: &LossShape,
    kl: Kl,
    [least, most, beta]: [f32; 3],
    advantage: &[f32],
    inputs: [TensorRef; 3],
    count: &[i32],
    outputs: [TensorMut; 2],
) -> Result<(), Error> {
    let numbers = Numbers { least, most, beta, advantage };
    match kl {
        Kl::None => sequences::run(cpu, NAME, shape, Policy::<0>(numbers), inputs, count, outputs),
        Kl::K1 => sequences::run(cpu, NAME, shape, Policy::<1>(numbers), inputs, count, outputs),
        Kl::K3 => sequences::run(cpu, NAME, shape, Policy::<3>(numbers), inputs, count, outputs),
    }
}

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("policy_loss.cu"), &[NAME]) };

/// policy_loss, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, loss) = (LossShape::of(args), loss_of(args));
        let numbers = loss.numbers(args.optional("reference").is_some())?;
        let [logprob, old_logprob] = ["logprob", "old_logprob"].map(|name| args.input(name));
        let inputs = [logprob, old_logprob, args.optional("reference").unwrap_or(logprob)];
        let (advantage, count) = (args.input("advantage").dense::<f32>(NAME, "advantage")?, args.integers("count")?);
        let outputs = ["per_sequence", "dlogprob"].map(|name| args.output(name));
        run(cpu, &shape, loss.kl, numbers, advantage, inputs, count, outputs)
    },
    device: Some(|on, args| {
        let (shape, loss, count) = (LossShape::of(args), loss_of(args), args.integers("count")?);
        let tensor = |name: &'static str| args.input(name).device::<f32>(NAME, name);
        let tokens = DeviceTokens {
            logprob: tensor("logprob")?,
            old_logprob: tensor("old_logprob")?,
            advantage: tensor("advantage")?,
            reference: args.optional("reference").map(|_| tensor("reference")).transpose()?,
            count,
        };
        let [sum, dlogprob] = ["per_sequence", "dlogprob"].map(|name| args.output(name));
        let (sum, dlogprob) = (sum.device(NAME, "per_sequence")?, dlogprob.device(NAME, "dlogprob")?);
        on_device(on, &shape, &loss, tokens, sum, dlogprob)
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`PolicyTokens`] on a device; which tokens count comes from the host.
#[derive(Clone, Copy)]
pub struct DeviceTokens<'a> {
    /// `[B,T]`: the log-probability of each token.
    pub logprob: &'a Buffer<f32>,
    /// `[B,T]`: what it was when the token was sampled.
    pub old_logprob: &'a Buffer<f32>,
    /// `[B]`: the advantage of each sequence.
    pub advantage: &'a Buffer<f32>,
    /// `[B,T]`: what it is in the reference model; for [`Kl::None`] there is none.
    pub reference: Option<&'a Buffer<f32>>,
    /// `[B,T]`: 0 for tokens that do not count, of which nothing is read.
    pub count: &'a [i32],
}

/// [`policy_loss`] on a device.
///
/// # Errors
/// As [`policy_loss`]; errors of the device.
pub fn on_device(
    device: &Device,
    shape: &LossShape,
    loss: &PolicyLoss,
    tokens: DeviceTokens,
    per_sequence: &mut Buffer<f32>,
    dlogprob: &mut Buffer<f32>,
) -> Result<(), Error> {
    let DeviceTokens { logprob, old_logprob, advantage, reference, count } = tokens;
    let lens = [
        ("logprob", logprob.len()),
        ("old_logprob", old_logprob.len()),
        ("reference", reference.unwrap_or(logprob).len()),
        ("count", count.len()),
        ("dlogprob", dlogprob.len()),
    ];
    let denominator = shape.check(NAME, &lens, per_sequence.len())?;
    check_len(NAME, "advantage", "[B]", advantage.len(), &[shape.sequences])?;
    let [least, most, beta] = loss.numbers(reference.is_some())?;
    let count = device.upload(NAME, count)?;
    let arguments = Arguments::new().buffer(logprob).buffer(old_logprob).buffer(advantage);
    let arguments = match reference {
        Some(reference) => arguments.buffer(reference),
        None => arguments.null(),
    };
    let arguments = shape.arguments(arguments.buffer(&count).buffer(per_sequence).buffer(dlogprob), denominator);
    let kl = [Kl::None, Kl::K1, Kl::K3].iter().zip([0, 1, 3]).find(|(kl, _)| **kl == loss.kl).map_or(0, |(_, kl)| kl);
    let arguments = arguments.float(least).float(most).int(kl).float(beta);
    // SAFETY: lengths were checked, the kernel reads a reference only where there is one, and a block takes a sequence.
    unsafe { device.launch(Build::of::<f32, f32>(NAME), NAME, [shape.sequences, 1, 1], 256, 0, &arguments) }
}

fn loss_of(args: &call::Arguments) -> PolicyLoss {
    let kl = match args.call.word("kl") {
        "k1" => Kl::K1,
        "k3" => Kl::K3,
        _ => Kl::None,
    };
    let [low, high, beta] = ["low", "high", "beta"].map(|name| args.call.float(name));
    PolicyLoss { low, high, kl, beta }
}

#[derive(Clone, Copy)]
struct Numbers<'a> {
    least: f32,
    most: f32,
    beta: f32,
    /// Of each sequence.
    advantage: &'a [f32],
}

/// The loss with k1, k3 or, for 0, no distance from a reference.
#[derive(Clone, Copy)]
struct Policy<'a, const KL: u8>(Numbers<'a>);

impl<const KL: u8> TokenLoss for Policy<'_, KL> {
    const INPUTS: usize = if KL == 0 { 2 } else { 3 };
    #[inline(always)]
    fn of<S: Simd>(self, s: S, sequence: usize, [a, o, r]: [S::F; 3]) -> (S::F, S::F) {
        let Numbers { least, most, beta, advantage } = self.0;
        let (advantage, beta, one) = (s.splat(advantage[sequence]), s.splat(beta), s.splat(1.0));
        let ratio = exp(s, s.sub(a, o));
        // A NaN in the second operand stays.
        let clamped = s.min(s.splat(most), s.max(s.splat(least), ratio));
        let (u, v) = (s.mul(ratio, advantage), s.mul(clamped, advantage));
        // u - v is above 0 exactly where v < u: a difference never rounds to 0.
        let cut = s.select_ge(s.sub(u, v), s.splat(f32::from_bits(1)), s.splat(0.0), s.neg(u));
        let (value, slope) = (s.neg(s.min(v, u)), cut);
        match KL {
            1 => (s.fma(beta, s.sub(a, r), value), s.add(slope, beta)),
            3 => {
                let d = s.sub(r, a);
                let e = exp(s, d);
                let far = s.sub(s.sub(e, d), one);
                (s.fma(beta, far, value), s.fma(beta, s.sub(one, e), slope))
            }
            _ => (value, slope),
        }
    }
}
