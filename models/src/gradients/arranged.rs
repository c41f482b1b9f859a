//! How the rows of a micro-batch stand: its sequences, padding between them, and experts that were recorded of them.

use super::{GradientRun, Padding};
use crate::backward::Block;
use crate::experts::StepExperts;
use crate::sampling::Sampled;
use crate::{Config, Flips};
use samebits_ops::Tensor;

/// What padding is called.
pub const PADDING: usize = usize::MAX;

/// The rows of a micro-batch: its sequences, and padding as sequences of its own.
pub struct Arranged {
    /// Label and tokens, in the order of their rows.
    pub pieces: Vec<(usize, usize)>,
    pub blocks: Vec<Block>,
}

impl Arranged {
    /// Sequences of these lengths.
    pub fn new(lengths: &[usize], run: &GradientRun) -> Arranged {
        let (left, right) = match run.padding {
            Padding::None => (0, 0),
            Padding::Left(n) => (n, 0),
            Padding::Right(n) => (0, n),
        };
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let (mut pieces, mut blocks) = (Vec::new(), Vec::new());
        if run.pack {
            let mut first = left;
            pieces.push((PADDING, left));
            for (label, &length) in lengths.iter().enumerate() {
                pieces.push((label, length));
                blocks.push(Block { first, stride: length, rows: length, lengths: vec![length] });
                first += length;
            }
            pieces.push((PADDING, right));
        } else {
            for (label, &length) in lengths.iter().enumerate() {
                pieces.extend([(PADDING, left), (label, length), (PADDING, longest - length + right)]);
            }
            let (stride, rows) = (left + longest + right, longest + right);
            blocks.push(Block { first: left, stride, rows, lengths: lengths.to_vec() });
        }
        pieces.retain(|&(_, length)| length > 0);
        Arranged { pieces, blocks }
    }

    /// Of each row 0 for padding, and the token that follows, -1 for none; and the first row of each sequence.
    pub fn rows(&self, sequences: &[Vec<i32>]) -> (Vec<i32>, Vec<i32>, Vec<usize>) {
        let (mut mask, mut targets): (Vec<i32>, Vec<i32>) = (Vec::new(), Vec::new());
        let mut starts = vec![0; sequences.len()];
        for &(label, length) in &self.pieces {
            if label == PADDING {
                targets.resize(targets.len() + length, -1);
            } else {
                starts[label] = mask.len();
                targets.extend(&sequences[label][1..]);
                targets.push(-1);
            }
            mask.resize(mask.len() + length, i32::from(label != PADDING));
        }
        (mask, targets, starts)
    }

    /// Room for the experts of all rows, where any were recorded; padding is no sequence, and of a last token nothing was.
    pub fn experts(&self, c: &Config, sampled: Sampled) -> Option<StepExperts> {
        let of_pieces = self
            .pieces
            .iter()
            .flat_map(|&(label, length)| [(0..length - 1, sampled.experts(label)), (length - 1..length, None)]);
        of_pieces.clone().any(|(_, recorded)| recorded.is_some()).then(|| StepExperts::new(c, of_pieces))
    }
}

/// Of sequences by their first rows and lengths, what each token has of rows, which know of the token behind them; a first one 0.
pub fn by_token(rows: &Tensor, (starts, lengths): (&[usize], &[usize])) -> Vec<Vec<f32>> {
    let rows = rows.as_slice::<f32>().expect("they are f32, and on the host");
    let sequences = starts.iter().zip(lengths);
    sequences.map(|(&start, &length)| [&[0.0], &rows[start..start + length - 1]].concat()).collect()
}

/// Of sequences by their first rows and lengths: where routers choose others than the experts that were recorded of them.
pub fn flips(
    c: &Config,
    sampled: Sampled,
    experts: &StepExperts,
    (starts, lengths): (&[usize], &[usize]),
) -> Vec<Option<Flips>> {
    let of = |(b, (&start, &length)): (usize, (&usize, &usize))| {
        let recorded = sampled.experts(b)?;
        Some(recorded.experts.flips(c, &experts.own(start..start + length - 1)))
    };
    starts.iter().zip(lengths).enumerate().map(of).collect()
}
