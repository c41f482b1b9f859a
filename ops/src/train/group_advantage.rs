//! Advantages of the samples of a prompt: `reward[P,S] (f32) -> advantage[P,S]` (f32).
//!
//! Formula: `advantage = (reward - mean) / (deviation + eps)`, or `reward - mean`.
//! Order: `mean` is a chain of additions over S, the variance a chain of `fma(d, d, sum)` of `d = reward - mean`.
//! Rounding: every step once to f32.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::{self, Entry};
use crate::simd::{Kernel, Simd};
use crate::tensor::Rows;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};

const NAME: &str = "group_advantage";

/// What the difference of a reward from the mean is divided by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Divide {
    /// The deviation plus this, which is finite and not negative.
    Deviation(f64),
    /// Nothing.
    One,
}

/// `advantage[P,S]` of `samples` samples of each prompt from their rewards `reward[P,S]`.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] for what is added to the deviation.
///
/// ```
/// use samebits_ops::{Cpu, Divide, group_advantage};
///
/// let mut advantage = [9f32; 4];
/// group_advantage(&Cpu::best(), 4, Divide::Deviation(0.0), &[1.0, 0.0, 0.0, 1.0], &mut advantage)?;
/// assert_eq!(advantage, [1.0, -1.0, -1.0, 1.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn group_advantage(
    cpu: &Cpu,
    samples: usize,
    divide: Divide,
    reward: &[f32],
    advantage: &mut [f32],
) -> Result<(), Error> {
    let prompts = reward.len().checked_div(samples).unwrap_or(0);
    check_len(NAME, "reward", "[P,S]", reward.len(), &[prompts, samples])?;
    check_len(NAME, "advantage", "[P,S]", advantage.len(), &[prompts, samples])?;
    let shape = [prompts, samples];
    run(cpu, divide, TensorRef::of(reward, &shape), TensorMut::of(advantage, &shape))
}

impl Divide {
    fn of(args: &call::Arguments) -> Divide {
        match args.call.word("divide_by") {
            "one" => Divide::One,
            _ => Divide::Deviation(args.call.float("eps")),
        }
    }

    /// `f32(eps)`, checked; `None` for one.
    fn eps(self) -> Result<Option<f32>, Error> {
        match self {
            Divide::One => Ok(None),
            Divide::Deviation(eps) if eps >= 0.0 && (eps as f32).is_finite() => Ok(Some(eps as f32)),
            Divide::Deviation(eps) => {
                Err(value_error(NAME, format!("eps is {eps}; it must be finite and not negative")))
            }
        }
    }
}

/// Rewards of any layout.
fn run(cpu: &Cpu, divide: Divide, reward: TensorRef, advantage: TensorMut) -> Result<(), Error> {
    reward.on_host(NAME, "reward")?;
    let eps = divide.eps()?;
    let (reward, advantage) = (reward.rows::<f32>(), advantage.host::<f32>(NAME, "advantage")?);
    let (samples, per_chunk) = (reward.n(), cpu.rows_per_chunk(reward.count(), reward.n()));
    cpu.chunks(advantage, per_chunk * samples, |chunk, advantage| {
        cpu.dispatch(Part { first: chunk * per_chunk, reward, eps, advantage });
    });
    Ok(())
}

/// Its kernels.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("group_advantage.cu"), &[NAME]) };

/// group_advantage, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| run(cpu, Divide::of(args), args.input("reward"), args.output("advantage")),
    device: Some(|on, args| {
        let (reward, advantage) = (args.input("reward"), args.output("advantage"));
        let (reward, advantage) = (reward.device(NAME, "reward")?, advantage.device(NAME, "advantage")?);
        on_device(on, args.call.dim("S"), Divide::of(args), reward, advantage)
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`group_advantage`] on a device.
///
/// # Errors
/// As [`group_advantage`]; errors of the device.
pub fn on_device(
    device: &Device,
    samples: usize,
    divide: Divide,
    reward: &Buffer<f32>,
    advantage: &mut Buffer<f32>,
) -> Result<(), Error> {
    let prompts = reward.len().checked_div(samples).unwrap_or(0);
    check_len(NAME, "reward", "[P,S]", reward.len(), &[prompts, samples])?;
    check_len(NAME, "advantage", "[P,S]", advantage.len(), &[prompts, samples])?;
    let eps = divide.eps()?;
    let arguments = Arguments::new().buffer(reward).buffer(advantage).long(prompts).long(samples);
    let arguments = arguments.int(i32::from(eps.is_some())).float(eps.unwrap_or(0.0));
    // SAFETY: lengths were checked; a thread takes a prompt, and the kernel leaves those behind the last alone.
    unsafe { device.launch(Build::of::<f32, f32>(NAME), NAME, [prompts.div_ceil(128), 1, 1], 128, 0, &arguments) }
}

/// Some prompts, from `first` on.
struct Part<'a> {
    first: usize,
    reward: Rows<'a, f32>,
    eps: Option<f32>,
    advantage: &'a mut [f32],
}

impl Kernel for Part<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let samples = self.reward.n();
        for (prompt, advantage) in (self.first..).zip(self.advantage.chunks_exact_mut(samples)) {
            let reward = self.reward.row(prompt);
            let mean = reward.iter().fold(0f32, |sum, r| sum + r) / samples as f32;
            let squares = reward.iter().fold(0f32, |sum, r| (r - mean).mul_add(r - mean, sum));
            let deviation = (squares / samples as f32).sqrt();
            for (advantage, r) in advantage.iter_mut().zip(reward) {
                let d = r - mean;
                *advantage = f32::narrow(self.eps.map_or(d, |eps| d / (deviation + eps)));
            }
        }
    }
}
