//! A step: the next tokens of some sequences, one behind the other, and what kernels are told of them.

use crate::ModelError;
use crate::decoder::Runner;
use crate::machine::{AttentionMetadata, Index, IndexOf, Machine};
use crate::rotary::{RopeLength, Rotary};
use crate::state::States;
use samebits_ops::device::Graph;
use samebits_ops::{Calls, Cpu, Prepared, RopeTable, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Which tokens of a step get logits. A row's bits do not depend on the others.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Rows {
    /// Every token.
    All,
    /// Each sequence's last one.
    Last,
}

/// The next tokens of one sequence.
#[derive(Clone, Copy)]
pub(crate) struct SequenceInput<'a> {
    /// Its number in the states.
    pub sequence: usize,
    /// What the caller calls it.
    pub label: usize,
    /// At least one token.
    pub tokens: &'a [i32],
    /// The number of its adapter, where it has one.
    pub adapter: Option<usize>,
}

/// The rows of a step.
pub(crate) struct Step {
    /// The first row of each sequence, and the end.
    starts: Vec<usize>,
    /// Label and position of each row.
    pub tokens: Vec<(usize, usize)>,
    /// The adapters of rows one behind the other; nothing where none has one.
    pub adapters: Vec<(Range<usize>, Option<usize>)>,
}

impl Step {
    /// The step of some sequences; every position gets a place in the states.
    pub fn of(machine: &dyn Machine, inputs: &[SequenceInput], states: &mut States) -> Result<Step, ModelError> {
        let mut step = Step { starts: vec![0], tokens: Vec::new(), adapters: Vec::new() };
        for input in inputs {
            states.reserve(machine, input.sequence, input.tokens.len())?;
            let start = states.len(input.sequence);
            step.tokens.extend((start..start + input.tokens.len()).map(|pos| (input.label, pos)));
            let rows = step.starts[step.starts.len() - 1]..step.tokens.len();
            step.starts.push(step.tokens.len());
            match step.adapters.last_mut() {
                Some((before, adapter)) if *adapter == input.adapter => before.end = rows.end,
                _ => step.adapters.push((rows, input.adapter)),
            }
        }
        step.adapters.retain(|_| inputs.iter().any(|input| input.adapter.is_some()));
        Ok(step)
    }

    /// The positions of its tokens.
    pub fn positions(&self) -> Vec<i32> {
        self.tokens.iter().map(|&(_, pos)| pos as i32).collect()
    }

    /// The last row of each sequence, and the step that is left of them.
    fn last(&self) -> (Vec<i32>, Step) {
        let last: Vec<usize> = self.starts[1..].iter().map(|end| end - 1).collect();
        let tokens = last.iter().map(|&row| self.tokens[row]).collect();
        let starts = (0..=last.len()).collect();
        (last.into_iter().map(|row| row as i32).collect(), Step { starts, tokens, adapters: Vec::new() })
    }

    /// How many sequences have tokens in it.
    pub fn sequences(&self) -> usize {
        self.starts.len() - 1
    }

    /// Tokens in the step.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Whether every sequence has one token.
    pub fn is_single(&self) -> bool {
        self.rows() == self.sequences()
    }

    /// The rows of a sequence.
    pub fn rows_of(&self, input: usize) -> Range<usize> {
        self.starts[input]..self.starts[input + 1]
    }
}

/// What the kernels of a step are told.
pub(crate) struct StepInputs {
    pub tokens: Index,
    /// The positions of tokens, where a table of them is looked up.
    pub positions: Option<Index>,
    /// Rows of the pages that its keys and values go to.
    pub rows: Index,
    /// Rows that layers which recur read and write, by sequence; `None` where none does.
    pub state_rows: Option<[Index; 2]>,
    pub attention: AttentionMetadata,
    /// Cosines and sines of each of the config's rotations.
    pub angles: Vec<Prepared>,
    /// The rows that get logits, and the step that is left of them, where not all do.
    pub last: Option<(Index, Step)>,
    /// The choices of experts one after the other, where each takes a product of its own.
    pub choices: Option<Index>,
}

impl StepInputs {
    /// Those of a step, over those of an earlier one of the same form. `angle_pos` are the positions that queries and
    /// keys are rotated by.
    pub fn new(
        on: &Runner,
        step: &Step,
        sequences: &[SequenceInput],
        states: &States,
        angle_pos: &[i32],
        rows: Rows,
        earlier: Option<StepInputs>,
    ) -> Result<StepInputs, ModelError> {
        let (machine, config, n) = (on.machine, on.config(), step.rows());
        let numbers = sequences.iter().map(|input| input.sequence);
        let tokens: Vec<i32> = sequences.iter().flat_map(|input| input.tokens).copied().collect();
        let mut at = Vec::with_capacity(n);
        for (i, input) in sequences.iter().enumerate() {
            let start = states.len(input.sequence);
            let positions = (start..).take(step.rows_of(i).len());
            at.extend(positions.filter_map(|pos| states.row(input.sequence, pos)).map(|row| row as i32));
        }
        let (tokens_before, positions_before, rows_before, angles_before, on_device, choices, states_before) =
            match earlier {
                Some(StepInputs { tokens, positions, rows, angles, attention, choices, state_rows, .. }) => {
                    (Some(tokens), positions, Some(rows), angles, attention.on_device, Some(choices), state_rows)
                }
                None => (None, None, None, Vec::new(), None, None, None),
            };
        let of_tokens = IndexOf { op: "embedding", limit: config.vocab, distinct: false };
        let of_rows = IndexOf { op: "kv cache", limit: states.positions(), distinct: true };
        let of_last = IndexOf { op: "model", limit: n, distinct: false };
        let tokens = machine.index(of_tokens, tokens, tokens_before)?;
        let of_positions = IndexOf { limit: config.max_positions, ..of_tokens };
        let positions = config.positions.map(|_| machine.index(of_positions, angle_pos.to_vec(), positions_before));
        let positions = positions.transpose()?;
        let rows_of_cache = machine.index(of_rows, at, rows_before)?;
        let mut angles_before = angles_before.into_iter();
        let tables = config.rotary.iter().map(|rotary| {
            let table = angles(rotary, config.rope_length, on.cpu, step, sequences, states, angle_pos);
            machine.angles(table, angles_before.next())
        });
        let angles = tables.collect::<Result<_, _>>()?;
        let state_rows = match states.rows_of_step(numbers.clone()) {
            None => None,
            Some(([read, written], limit)) => {
                let (read_before, written_before) = states_before.map(<(Index, Index)>::from).unzip();
                let of_states = IndexOf { op: "state", limit, distinct: false };
                let read = machine.index(of_states, read, read_before)?;
                Some([read, machine.index(IndexOf { distinct: true, ..of_states }, written, written_before)?])
            }
        };
        let choices = match choices {
            Some(choices) => choices,
            None if step.is_single() => machine.choices(config, on.decoder.dtype, n)?,
            None => None,
        };
        let kv_len = sequences.iter().map(|input| (states.len(input.sequence) + input.tokens.len()) as i32).collect();
        let mut attention = AttentionMetadata {
            q_start: step.starts.iter().map(|&start| start as i32).collect(),
            q_pos: step.positions(),
            kv_len,
            block_table: states.table(numbers),
            page_size: states.page_size(),
            on_device,
        };
        let columns = attention.block_table.len() / sequences.len();
        let columns = if step.is_single() { columns.next_power_of_two() } else { columns };
        if let Some(heads) = config.heads().next() {
            let shape = heads.shape(step.sequences(), n, states.positions());
            machine.place(&mut attention, &shape, columns)?;
        }
        let last = match rows {
            Rows::Last if !step.is_single() => {
                let (last, left) = step.last();
                Some((machine.index(of_last, last, None)?, left))
            }
            _ => None,
        };
        Ok(StepInputs { tokens, positions, rows: rows_of_cache, state_rows, attention, angles, last, choices })
    }
}

/// Cosines and sines of a step, by the length that their frequencies belong to.
fn angles(
    rotary: &Rotary,
    length: RopeLength,
    cpu: &Cpu,
    step: &Step,
    sequences: &[SequenceInput],
    states: &States,
    pos: &[i32],
) -> RopeTable {
    let mut by_limit: BTreeMap<usize, Vec<f32>> = BTreeMap::new();
    let mut limits = Vec::with_capacity(pos.len());
    for (i, input) in sequences.iter().enumerate() {
        let limit = rotary.class_of(match length {
            RopeLength::Declared(length) => length,
            RopeLength::OfText => states.limit(input.sequence),
        });
        by_limit.entry(limit).or_insert_with(|| rotary.inv_freq(limit));
        limits.extend(step.rows_of(i).map(|_| limit));
    }
    RopeTable::each(cpu, rotary.dim / 2, |t| &by_limit[&limits[t]], pos, |t| rotary.factor_at(limits[t], pos[t]))
}

/// A form of steps with one token to each sequence. They come again and again: the second of a form is recorded, and
/// the later ones are replayed, where a machine does that.
pub(crate) struct Form {
    pub inputs: StepInputs,
    /// Its kernels, and the logits they write; none before its second step.
    pub recorded: Option<(Graph, Tensor)>,
}

/// What forms are told apart by.
pub(crate) type FormKey = ([usize; 2], Vec<(Range<usize>, Option<usize>)>);

/// What is kept of steps over a states.
#[derive(Default)]
pub(crate) struct Forms {
    /// By sequences, and the columns of the block table rounded up to a power of two: with the columns goes how far
    /// attention is planned, so no length within them needs another plan. And by the adapters of the rows.
    pub recorded: HashMap<FormKey, Form>,
    /// Calls of ops that were checked.
    pub calls: Calls,
}

/// More forms than this are forgotten together: each holds what its kernels use.
const MOST_FORMS: usize = 16;

impl Forms {
    /// Keeps a form for its next step.
    pub fn keep(&mut self, key: FormKey, form: Form) {
        if self.recorded.len() >= MOST_FORMS {
            self.recorded.clear();
        }
        self.recorded.insert(key, form);
    }
}
