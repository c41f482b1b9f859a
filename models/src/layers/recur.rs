//! How layers that recur call their ops: over `[B,T,..]`, the state of each sequence in and out.
//!
//! The sequences of a step stand one behind the other. Those that follow each other with equally many tokens are one call,
//! without a copy where they are the whole step: a prefill of one, and a decode of any number.

use crate::ModelError;
use crate::backward::{Backward, Block};
use crate::pass::Pass;
use crate::state::LayerState;
use crate::step::Step;
use crate::sums::zeros;
use samebits_ops::device::Part;
use samebits_ops::{Attributes, DType, Tensor, TensorRef};
use std::ops::Range;

/// Rows of tokens `[n,width]`, by the name of the op's input or output, and its axes behind B and T.
pub(crate) type Rows<'a, T> = (&'a str, T, &'a [usize]);

/// A part of the layer's state.
pub(crate) struct Kept<'a> {
    /// Its number.
    pub part: usize,
    /// The names of the op's input and output.
    pub names: [&'a str; 2],
    /// Its axes behind B.
    pub axes: &'a [usize],
}

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
    let (mut before, mut next) = (Vec::new(), Vec::new());
    for kept in kept {
        let size = [sequences, state.width(kept.part)];
        // Rows one behind the other are read where they stand.
        before.push(match state.first_of(read, sequences) {
            Some(first) => Before { rows: None, first },
            None => {
                let mut rows = pass.room(BEFORE[kept.part], DType::Fp32, &size)?;
                state.read(machine, kept.part, read, &mut rows)?;
                Before { rows: Some(rows), first: 0 }
            }
        });
        next.push(pass.room(NEXT[kept.part], DType::Fp32, &size)?);
    }
    for run in runs(pass.step) {
        let (rows, of) = (&run.rows, &run.sequences);
        let of_tokens = |axes: &[usize]| [&[of.len(), run.tokens], axes].concat();
        let of_state = |axes: &[usize]| [&[of.len()], axes].concat();
        // Where the run is not all of the step, what it reads and makes are tensors of their own.
        let some = tokens.iter().map(|(_, x, _)| cut(pass, x, rows)).collect::<Result<Vec<_>, _>>()?;
        let copied = before.iter().map(|before| before.rows.as_ref().map(|x| cut(pass, x, of)).transpose());
        let begun = copied.collect::<Result<Vec<_>, _>>()?;
        let mut made = room(pass, y, rows)?;
        let mut ended = next.iter().map(|x| room(pass, x, of)).collect::<Result<Vec<_>, _>>()?;
        let mut inputs = Vec::new();
        for ((name, x, axes), some) in tokens.iter().zip(&some) {
            inputs.push((*name, some.as_ref().unwrap_or(x).view_as(&of_tokens(axes))?));
        }
        for (Kept { part, names: [name, _], axes }, (before, some)) in kept.iter().zip(before.iter().zip(&begun)) {
            let shape = of_state(axes);
            let rows = match &before.rows {
                Some(x) => some.as_ref().and_then(Option::as_ref).unwrap_or(x).view_as(&shape)?,
                None => {
                    let there = state.rows_of(*part, before.first + of.start..before.first + of.end);
                    TensorRef::new(there, &shape)?
                }
            };
            inputs.push((*name, rows));
        }
        inputs.extend_from_slice(weights);
        let mut outputs = vec![(output, made.as_mut().unwrap_or(y).view_mut_as(&of_tokens(axes))?)];
        for (Kept { names: [_, name], axes, .. }, (x, some)) in kept.iter().zip(next.iter_mut().zip(&mut ended)) {
            outputs.push((*name, some.as_mut().unwrap_or(x).view_mut_as(&of_state(axes))?));
        }
        pass.run(op, attributes, &inputs, outputs)?;
        made.map_or(Ok(()), |made| join(pass, &made, y, rows.start))?;
        for (ended, next) in ended.into_iter().zip(&mut next) {
            ended.map_or(Ok(()), |ended| join(pass, &ended, next, of.start))?;
        }
    }
    for (kept, next) in kept.iter().zip(&mut next) {
        pass.see_state(op, next)?;
        state.write(machine, kept.part, written, next)?;
    }
    for (kept, (before, next)) in kept.iter().zip(before.into_iter().zip(next)) {
        pass.leave([(NEXT[kept.part], next)]);
        before.rows.into_iter().for_each(|rows| pass.leave([(BEFORE[kept.part], rows)]));
    }
    Ok(())
}

/// The states that the sequences of a step have before it: copied rows, or those of the pool from the first on.
struct Before {
    rows: Option<Tensor>,
    first: usize,
}

/// The names of rooms, by part.
const BEFORE: [&str; 4] = ["state_before.0", "state_before.1", "state_before.2", "state_before.3"];
const NEXT: [&str; 4] = ["state_next.0", "state_next.1", "state_next.2", "state_next.3"];

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
        let inputs = tokens.iter().map(|(name, x, axes)| Ok((*name, block.view(x, axes)?)));
        let inputs = inputs.collect::<Result<Vec<_>, ModelError>>()?;
        for (made, to) in call(back, block, inputs)?.iter().zip(&mut all) {
            block.put(back.pass.machine, made, to)?;
        }
    }
    Ok(all)
}

/// Some rows of a tensor; `None` where they are all.
fn cut(pass: &Pass, x: &Tensor, rows: &Range<usize>) -> Result<Option<Tensor>, ModelError> {
    let Some(mut part) = room(pass, x, rows)? else { return Ok(None) };
    let width = x.shape()[1];
    let from = Part { offset: rows.start * width, ..Part::whole(width) };
    pass.machine.copy_rows([rows.len(), width], (x, from), (&mut part, Part::whole(width)))?;
    Ok(Some(part))
}

/// Room for some rows of a tensor, of any elements; `None` where they are all.
fn room(pass: &Pass, x: &Tensor, rows: &Range<usize>) -> Result<Option<Tensor>, ModelError> {
    let &[n, width] = x.shape() else { unreachable!("it has rows") };
    (*rows != (0..n)).then(|| pass.empty(x.dtype(), &[rows.len(), width])).transpose()
}

/// Puts `part` into the rows of `whole` from row `first` on.
fn join(pass: &Pass, part: &Tensor, whole: &mut Tensor, first: usize) -> Result<(), ModelError> {
    let &[rows, width] = part.shape() else { unreachable!("it has rows") };
    let to = Part { offset: first * width, ..Part::whole(width) };
    Ok(pass.machine.copy_rows([rows, width], (part, Part::whole(width)), (whole, to))?)
}
