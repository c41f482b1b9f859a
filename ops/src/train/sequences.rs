//! The frame of losses that have a value for each token: their sums by sequence, and the gradient of the batch's loss.
//!
//! Formula: `per_sequence = sum of value`, `dlogprob = slope / denominator`; for the mean both over the number of tokens
//! that count.
//! Order: `lanes` of additions, tokens that count numbered from 0 in their sequence.
//! Rounding: every addition and division once to f32.
//! Special: of a token that does not count nothing is read, its gradient is +0; a sequence without one that counts is +0.

use crate::backend::device::Arguments;
use crate::call;
use crate::reduce::{Add, LANES, Lanes};
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};

/// What a sequence is worth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The sum of its values.
    #[default]
    Sum,
    /// Their mean.
    Mean,
}

/// What is done with the values of the tokens of `sequences` sequences, padded to `length` tokens.
#[derive(Clone, Copy, Debug)]
pub struct LossShape {
    /// B: sequences of this call.
    pub sequences: usize,
    /// T: tokens of each, padding included.
    pub length: usize,
    /// What a sequence is worth.
    pub reduction: Reduction,
    /// What [`batch_loss`](crate::batch_loss) divides by: a number of the logical batch, not of this call.
    pub denominator: f64,
}

impl LossShape {
    /// Sequences that are worth the sum of their values, over 1.
    pub fn new(sequences: usize, length: usize) -> LossShape {
        LossShape { sequences, length, reduction: Reduction::Sum, denominator: 1.0 }
    }

    /// That of a call by name.
    pub(super) fn of(args: &call::Arguments) -> LossShape {
        let [sequences, length] = ["B", "T"].map(|axis| args.call.dim(axis));
        let reduction = if args.call.word("reduction") == "mean" { Reduction::Mean } else { Reduction::Sum };
        LossShape { sequences, length, reduction, denominator: args.call.float("denominator") }
    }

    /// Checks the lengths of tensors that have a number for each token, and the denominator: `f32(denominator)`.
    pub(super) fn check(&self, op: &'static str, tokens: &[(&'static str, usize)], sums: usize) -> Result<f32, Error> {
        for &(name, found) in tokens {
            check_len(op, name, "[B,T]", found, &[self.sequences, self.length])?;
        }
        check_len(op, "per_sequence", "[B]", sums, &[self.sequences])?;
        check_denominator(op, self.denominator)
    }

    /// `arguments` with those that all such kernels have.
    pub(super) fn arguments(&self, arguments: Arguments, denominator: f32) -> Arguments {
        arguments.long(self.length).int(i32::from(self.reduction == Reduction::Mean)).float(denominator)
    }
}

/// `f32(denominator)`, which is positive and finite.
pub(super) fn check_denominator(op: &'static str, denominator: f64) -> Result<f32, Error> {
    let rounded = denominator as f32;
    if !(rounded > 0.0 && rounded.is_finite()) {
        return Err(value_error(op, format!("denominator is {denominator}; it must be positive and finite")));
    }
    Ok(rounded)
}

/// A loss of tokens.
pub(super) trait TokenLoss: Copy + Send + Sync {
    /// Tensors that it reads at each token.
    const INPUTS: usize;
    /// Value and slope of tokens of sequence `sequence`, of what the tensors hold there.
    fn of<S: Simd>(self, s: S, sequence: usize, x: [S::F; 3]) -> (S::F, S::F);
}

/// Sums and gradients of `loss` over `inputs`, each `[B,T]` of any layout, of which `L::INPUTS` are read.
pub(super) fn run(
    cpu: &Cpu,
    op: &'static str,
    shape: &LossShape,
    loss: impl TokenLoss,
    inputs: [TensorRef; 3],
    count: &[i32],
    [per_sequence, dlogprob]: [TensorMut; 2],
) -> Result<(), Error> {
    let denominator = check_denominator(op, shape.denominator)?;
    for input in inputs {
        input.on_host(op, "an input")?;
    }
    let per_sequence = per_sequence.host::<f32>(op, "per_sequence")?;
    let dlogprob = dlogprob.host::<f32>(op, "dlogprob")?;
    if shape.length == 0 {
        per_sequence.fill(0.0);
        return Ok(());
    }
    let inputs = inputs.map(|x| x.rows::<f32>());
    let mut sequences: Vec<_> = per_sequence.iter_mut().zip(dlogprob.chunks_mut(shape.length)).collect();
    let per_chunk = cpu.rows_per_chunk(shape.sequences, shape.length);
    cpu.chunks(&mut sequences, per_chunk, |chunk, sequences| {
        for (number, (sum, dlogprob)) in (chunk * per_chunk..).zip(sequences) {
            let inputs = inputs.map(|rows| rows.row(number));
            let count = &count[number * shape.length..][..shape.length];
            let reduction = shape.reduction;
            **sum = cpu.dispatch(Sequence { loss, number, inputs, count, reduction, denominator, dlogprob });
        }
    });
    Ok(())
}

/// Tokens whose values are made before they are added.
const BLOCK: usize = 512;

/// One sequence; its output is `per_sequence`.
struct Sequence<'a, L> {
    loss: L,
    number: usize,
    inputs: [&'a [f32]; 3],
    count: &'a [i32],
    reduction: Reduction,
    denominator: f32,
    dlogprob: &'a mut [f32],
}

impl<L: TokenLoss> Kernel for Sequence<'_, L> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let Sequence { loss, number, inputs, count, reduction, denominator, dlogprob } = self;
        let counted = count.iter().filter(|&&count| count != 0).count();
        // Dividing by 1 changes nothing.
        let share = if reduction == Reduction::Mean && counted > 0 { counted as f32 } else { 1.0 };
        let mut lanes = Lanes::new();
        // Values of tokens that count and are not added yet.
        let (mut values, mut waiting) = ([0f32; BLOCK + LANES], 0);
        let mut made = [0f32; BLOCK];
        for from in (0..count.len()).step_by(BLOCK) {
            let len = BLOCK.min(count.len() - from);
            let (count, dlogprob) = (&count[from..][..len], &mut dlogprob[from..][..len]);
            for at in (0..len).step_by(S::LANES) {
                let mut x = [s.splat(0.0); 3];
                for (x, input) in x.iter_mut().zip(&inputs[..L::INPUTS]) {
                    *x = load_at(s, &input[from..][..len], at, 0.0);
                }
                let (value, slope) = loss.of(s, number, x);
                narrow_at(s, value, &mut made[..len], at);
                narrow_at(s, s.div(s.div(slope, s.splat(share)), s.splat(denominator)), dlogprob, at);
            }
            for ((&count, &value), dlogprob) in count.iter().zip(&made).zip(dlogprob) {
                values[waiting] = value;
                waiting += usize::from(count != 0);
                if count == 0 {
                    *dlogprob = 0.0;
                }
            }
            let whole = waiting - waiting % LANES;
            lanes.add(s, &values[..whole], Add);
            values.copy_within(whole..waiting, 0);
            waiting -= whole;
        }
        lanes.add(s, &values[..waiting], Add);
        f32::narrow(lanes.fold(s, counted) / share)
    }
}
