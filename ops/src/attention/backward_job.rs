//! What a call of the gradient of attention is made of, and what every task reads.

use super::job::{Attention, Range};
use crate::parallel::SharedOut;
use crate::tensor::{Heads, Rows};
use crate::{Cpu, Element, Tf32};

/// Where the queries of each sequence stand and which of them are tokens.
#[derive(Clone, Copy, Debug)]
pub struct QueryRows<'a> {
    /// Position of each query in its sequence, `[B,T]`.
    pub q_pos: &'a [i32],
    /// Keys of each sequence that hold data: `[B]`, each in `0..=S`, at most 2^24.
    pub kv_len: &'a [i32],
    /// `[B,T]`, 0 for padding, which dk and dv do not read; `None` where all rows are tokens.
    pub mask: Option<&'a [i32]>,
}

/// What scores are multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct Parameters {
    /// `(cap, f32(scale / cap))`.
    pub cap: Option<(f32, f32)>,
    /// `hi` and `lo`; hi is `f32(scale)`.
    pub scale: (f32, f32),
}

/// The order in which rows of a sequence are gone through: tokens, ascending, and then the others.
pub(super) struct Order {
    /// Rows of each sequence, `[B,T]`; none where all are tokens.
    rows: Option<Vec<u32>>,
    /// Tokens of each sequence where not all are.
    tokens: Vec<usize>,
    queries: usize,
}

impl Order {
    pub(super) fn of(shape: &Attention, rows: &QueryRows) -> Order {
        let queries = shape.queries;
        let Some(mask) = rows.mask.filter(|mask| mask.contains(&0)) else {
            return Order { rows: None, tokens: Vec::new(), queries };
        };
        let (mut order, mut tokens) = (Vec::with_capacity(mask.len()), Vec::with_capacity(shape.batch));
        for mask in mask.chunks(queries) {
            let before = order.len();
            order.extend((0..queries as u32).filter(|&t| mask[t as usize] != 0));
            tokens.push(order.len() - before);
            order.extend((0..queries as u32).filter(|&t| mask[t as usize] == 0));
        }
        Order { rows: Some(order), tokens, queries }
    }

    /// How many rows of sequence b are tokens.
    pub(super) fn tokens(&self, b: usize) -> usize {
        self.tokens.get(b).copied().unwrap_or(self.queries)
    }

    /// The i-th row of sequence b.
    pub(super) fn row(&self, b: usize, i: usize) -> usize {
        self.rows.as_ref().map_or(i, |rows| rows[b * self.queries + i] as usize)
    }
}

/// One call: what every task reads.
pub(super) struct Job<'a, I> {
    pub(super) cpu: &'a Cpu,
    pub(super) shape: &'a Attention,
    pub(super) rows: &'a QueryRows<'a>,
    pub(super) parameters: Parameters,
    pub(super) q: Heads<'a, I>,
    pub(super) k: Heads<'a, I>,
    pub(super) v: Heads<'a, I>,
    pub(super) out: Heads<'a, I>,
    pub(super) dout: Heads<'a, I>,
    pub(super) lse: Rows<'a, f32>,
    pub(super) order: Order,
}

/// The outputs.
pub(super) struct Gradients<'a, O> {
    pub(super) dq: SharedOut<'a, O>,
    pub(super) dk: SharedOut<'a, O>,
    pub(super) dv: SharedOut<'a, O>,
}

impl<I: Element> Job<'_, I> {
    /// The keys that row t of sequence b sees.
    pub(super) fn range(&self, b: usize, t: usize) -> Range {
        self.shape.seen_from(self.rows.q_pos[b * self.shape.queries + t], self.rows.kv_len[b])
    }

    /// Keys of sequence b that hold data.
    pub(super) fn keys(&self, b: usize) -> usize {
        self.rows.kv_len[b] as usize
    }

    /// How q, k, v and dout are read.
    pub(super) fn tf32(&self) -> Tf32 {
        self.shape.tf32
    }
}
