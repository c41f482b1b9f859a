//! How layers that recur call their ops: over `[B,T,..]`, the state of each sequence in and out.
//!
//! The sequences of a step stand one behind the other. Those that follow each other with equally many tokens are one call,
//! without a copy where they are the whole step: a prefill of one, and a decode of any number.

use crate::ModelError;
use crate::backward::{Backward, Block};
use crate::layers::attend::rows_of;
use crate::pass::Pass;
use crate::state::LayerState;
use crate::step::Step;
use crate::sums::zeros;
use samebits_ops::device::Part;
use samebits_ops::{Attributes, DType, Tensor, TensorRef};
use std::ops::Range;

/// Rows of tokens `[n,width]`, by the name of the op's input or output, and its axes behind B and T.
pub(crate) type Rows<'a, T> = (&'a str, T, &'a [usize]);

/// A part of the state: the names of the op's input and output, and its axes behind B.
pub(crate) type Kept<'a> = ([&'a str; 2], &'a [usize]);

/// Sequences of a step that follow each other with equally many tokens, and their rows.
struct Run {
    sequences: Range<usize>,
    rows: Range<usize>,
    /// Of each sequence.
    tokens: usize,
}

fn runs(step: &Step) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for sequence in 0..step.sequences() {
        let rows = step.rows_of(sequence);
        match runs.last_mut() {
            Some(run) if run.tokens == rows.len() => {
                (run.sequences.end, run.rows.end) = (sequence + 1, rows.end);
            }
            _ => runs.push(Run { sequences: sequence..sequence + 1, tokens: rows.len(), rows }),
        }
    }
    runs
}

/// `op` over the tokens of a step, from the states that their sequences have, to those that they have behind it.
pub(crate) fn forward(
    pass: &mut Pass,
    state: &mut LayerState,
    (op, attributes): (&str, &Attributes),
    tokens: &[Rows<&Tensor>],
    weights: &[(&str, TensorRef)],
    kept: &[Kept],
    (output, y, axes): Rows<&mut Tensor>,
) -> Result<(), ModelError> {
    let (machine, inputs, sequences) = (pass.machine, pass.inputs, pass.step.sequences());
    let [read, written] = inputs.state_rows.as_ref().expect("a layer that recurs has rows");
    let state = state.rows();
    let mut parts = Vec::new();
    for number in 0..kept.len() {
        let before = state.read(machine, number, read, sequences)?;
        let next = pass.empty(DType::Fp32, before.shape())?;
        parts.push((before, next));
    }
    for run in runs(pass.step) {
        let here = tokens.iter().map(|(_, x, _)| cut(pass, x, &run.rows)).collect::<Result<Vec<_>, _>>()?;
        let before =
            parts.iter().map(|(before, _)| cut(pass, before, &run.sequences)).collect::<Result<Vec<_>, _>>()?;
        let mut next =
            before.iter().map(|x| pass.empty(DType::Fp32, x.get().shape())).collect::<Result<Vec<_>, _>>()?;
        let mut made = pass.empty(y.dtype(), &[run.rows.len(), y.shape()[1]])?;
        let shape = |axes: &[usize]| [&[run.sequences.len(), run.tokens], axes].concat();
        let of_state = |axes: &[usize]| [&[run.sequences.len()], axes].concat();
        let mut inputs = Vec::new();
        for ((name, _, axes), x) in tokens.iter().zip(&here) {
            inputs.push((*name, x.get().view_as(&shape(axes))?));
        }
        for (([name, _], axes), x) in kept.iter().zip(&before) {
            inputs.push((*name, x.get().view_as(&of_state(axes))?));
        }
        inputs.extend_from_slice(weights);
        let mut outputs = vec![(output, made.view_mut_as(&shape(axes))?)];
        for (([_, name], axes), x) in kept.iter().zip(&mut next) {
            outputs.push((*name, x.view_mut_as(&of_state(axes))?));
        }
        pass.calls.run(machine, op, attributes, &inputs, outputs)?;
        if run.rows.len() == y.shape()[0] {
            *y = made;
            next.into_iter().zip(&mut parts).for_each(|(next, (_, place))| *place = next);
            break;
        }
        join(pass, &made, y, run.rows.start)?;
        for (next, (_, place)) in next.iter().zip(&mut parts) {
            join(pass, next, place, run.sequences.start)?;
        }
    }
    for (number, (_, next)) in parts.iter().enumerate() {
        state.write(machine, number, written, next)?;
    }
    Ok(())
}

/// The gradient of an op that recurs: `call` runs it for the sequences of a block, its inputs laid over `tokens`, and gives
/// what is made of each `[sequences * rows,width]`. Together they are `[n,width]`; rows of no sequence are +0.
pub(crate) fn backward(
    back: &mut Backward,
    tokens: &[Rows<&Tensor>],
    widths: &[usize],
    mut call: impl FnMut(&mut Backward, &Block, Vec<(&str, TensorRef)>) -> Result<Vec<Tensor>, ModelError>,
) -> Result<Vec<Tensor>, ModelError> {
    let n = tokens[0].1.shape()[0];
    let mut all = widths.iter().map(|width| zeros(back.cpu, &[n, *width])).collect::<Result<Vec<_>, _>>()?;
    for block in back.blocks {
        let inputs = tokens.iter().map(|(name, x, axes)| Ok((*name, rows_of(block, x, axes)?)));
        let inputs = inputs.collect::<Result<Vec<_>, ModelError>>()?;
        for (made, to) in call(back, block, inputs)?.iter().zip(&mut all) {
            let width = to.shape()[1];
            for number in 0..block.lengths.len() {
                let from = Part { offset: number * block.rows * width, ..Part::whole(width) };
                let at = Part { offset: (block.first + number * block.stride) * width, ..Part::whole(width) };
                back.pass.machine.copy_rows([block.rows, width], (made, from), (to, at))?;
            }
        }
    }
    Ok(all)
}

/// Some rows of a tensor: itself where they are all.
enum Cut<'a> {
    Whole(&'a Tensor),
    Part(Tensor),
}

impl Cut<'_> {
    fn get(&self) -> &Tensor {
        match self {
            Cut::Whole(tensor) => tensor,
            Cut::Part(tensor) => tensor,
        }
    }
}

fn cut<'a>(pass: &Pass, x: &'a Tensor, rows: &Range<usize>) -> Result<Cut<'a>, ModelError> {
    let &[n, width] = x.shape() else { unreachable!("it has rows") };
    if *rows == (0..n) {
        return Ok(Cut::Whole(x));
    }
    let mut part = pass.empty(x.dtype(), &[rows.len(), width])?;
    let from = Part { offset: rows.start * width, ..Part::whole(width) };
    pass.machine.copy_rows([rows.len(), width], (x, from), (&mut part, Part::whole(width)))?;
    Ok(Cut::Part(part))
}

/// Puts `part` into the rows of `whole` from row `first` on.
fn join(pass: &Pass, part: &Tensor, whole: &mut Tensor, first: usize) -> Result<(), ModelError> {
    let &[rows, width] = part.shape() else { unreachable!("it has rows") };
    let to = Part { offset: first * width, ..Part::whole(width) };
    Ok(pass.machine.copy_rows([rows, width], (part, Part::whole(width)), (whole, to))?)
}
