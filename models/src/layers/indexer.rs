//! The lightning indexer of DeepSeek's sparse attention: which keys a query sees, those of the largest
//! `chain_h(w[h] * max(q[h] . k * D^-1/2, 0))`. Its keys stand in the pages beside those of the attention; no gradient goes through the
//! choice.

use super::heads::{Rope, Rotation};
use super::linear::Linear;
use super::loader::Loader;
use super::norm::{self, Norm};
use super::{SIZES, is_size};
use crate::ModelError;
use crate::machine::{AttentionMetadata, IndexOf};
use crate::pass::Pass;
use crate::rotary::Rotary;
use samebits_ops::device::{Device, Part};
use samebits_ops::{Attributes, Cpu, DType, Tensor};

/// What an indexer is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Its heads.
    pub heads: usize,
    /// Elements of each, and of the key that all have in common.
    pub dim: usize,
    /// Keys that a query sees at most.
    pub chosen: usize,
    /// How their first elements are rotated.
    pub rope: Rope,
}

impl Plan {
    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, tables: &[Rotary]) -> Result<(), &'static str> {
        let &Plan { heads, dim, chosen, rope } = self;
        match [heads, dim, chosen].into_iter().all(is_size) && heads.checked_mul(dim).is_some_and(is_size) {
            true => rope.check(dim, tables),
            false => Err(SIZES),
        }
    }
}

/// The norm of keys.
const NORM: norm::Plan = norm::Plan { eps: 1e-6, offset: false, kind: norm::Kind::Layer { bias: true } };

pub(crate) struct Indexer {
    plan: Plan,
    q: Linear,
    k: Linear,
    norm: Norm,
    /// Kept in f32, as folders say.
    weights: Linear,
    rotation: Rotation,
}

/// The positions that each row of a step sees, ascending.
pub(crate) struct Chosen(pub Vec<Vec<i32>>);

impl Indexer {
    /// That of an attention whose queries are made from a vector of `rank` elements.
    pub fn load(loader: &mut Loader, plan: &Plan, [hidden, rank]: [usize; 2]) -> Result<Indexer, ModelError> {
        let &Plan { heads, dim, rope, .. } = plan;
        // Nothing goes back through what they choose.
        loader.weights.adapts = false;
        let q = loader.linear("self_attn.indexer.wq_b", heads * dim, rank, false)?;
        let k = loader.linear("self_attn.indexer.wk", dim, hidden, false)?;
        let norm = Norm::load(loader, "self_attn.indexer.k_norm", dim, &NORM)?;
        let dtype = std::mem::replace(&mut loader.dtype, DType::Fp32);
        let weights = loader.linear("self_attn.indexer.weights_proj", heads, hidden, false);
        loader.dtype = dtype;
        Ok(Indexer { plan: *plan, q, k, norm, weights: weights?, rotation: Rotation::new(&rope) })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.norm.move_to(device)?;
        [&mut self.q, &mut self.k, &mut self.weights].into_iter().try_for_each(|part| part.move_to(cpu, device))
    }

    /// Elements of a key.
    pub fn width(&self) -> usize {
        self.plan.dim
    }

    /// Puts the keys of a step's tokens to those before, and says which of them each row sees; `None` where all see all. `a[n,hidden]`
    /// and `short[n,rank]` are what its products read.
    pub fn forward(
        &self,
        pass: &mut Pass,
        keys: &mut Tensor,
        [a, short]: [&Tensor; 2],
    ) -> Result<Option<Chosen>, ModelError> {
        let &Plan { heads, dim, chosen, rope } = &self.plan;
        let (n, f32) = (a.shape()[0], DType::Fp32);
        let raw = self.k.apply(pass, a.view(), f32)?;
        let mut normed = pass.empty(f32, raw.shape())?;
        self.norm.forward(pass, &raw, &mut normed)?;
        let (mut k, _) = self.rotation.forward(pass, normed, [n, 1, dim], dim - rope.dim)?;
        pass.see("index_k", &mut k)?;
        let (whole, inputs) = (Part::whole(dim), pass.inputs);
        let place = Part { rows: Some(&inputs.rows), ..Part::whole(dim) };
        pass.machine.copy_rows([n, dim], (&k, whole), (keys, place))?;
        let attention = &inputs.attention;
        // A gradient is made by row, whatever else is in the step; and who looks sees the same of every step.
        let all_seen = attention.kv_len.iter().all(|&len| len as usize <= chosen);
        if all_seen && !pass.keeps && pass.hook.probe.is_none() {
            return Ok(None);
        }
        let raw = self.q.apply(pass, short.view(), f32)?;
        let (mut q, _) = self.rotation.forward(pass, raw, [n, heads, dim], dim - rope.dim)?;
        pass.see("index_q", &mut q)?;
        q.reshape(&[n, heads, dim]);
        let mut wide = pass.empty(f32, a.shape())?;
        pass.round(a, &mut wide)?;
        let weights = self.weights.apply(pass, wide.view(), f32)?;
        let mut weights = pass.scaled(&Attributes::new().with("factor", 1.0 / (heads as f64).sqrt()), &weights)?;
        pass.see("index_weights", &mut weights)?;
        let mut found = Vec::with_capacity(n);
        for sequence in 0..pass.step.sequences() {
            let (rows, len) = (pass.step.rows_of(sequence), attention.kv_len[sequence] as usize);
            let of_rows = &attention.q_pos[rows.clone()];
            if len <= chosen {
                found.extend(of_rows.iter().map(|&pos| (0..=pos).collect()));
                continue;
            }
            let what = IndexOf { op: "indexer", limit: keys.shape()[0], distinct: false };
            let places = (0..len).map(|at| row_of(attention, sequence, at as i32)).collect();
            let places = pass.machine.index(what, places, None)?;
            let mut all = pass.empty(pass.dtype, &[len, dim])?;
            let from = Part { rows: Some(&places), ..Part::whole(dim) };
            pass.machine.copy_rows([len, dim], (keys, from), (&mut all, Part::whole(dim)))?;
            let (mut scores, count) = (pass.empty(f32, &[rows.len(), len])?, rows.len());
            let inputs = [("q", q.rows(rows.clone())), ("k", all.view()), ("weight", weights.rows(rows.clone()))];
            let scale = Attributes::new().with("scale", 1.0 / (dim as f64).sqrt());
            pass.op("index_score", &scale, &inputs, [("score", scores.view_mut())])?;
            found.extend(self.largest(pass, &scores, of_rows, count)?);
        }
        Ok(Some(Chosen(found)))
    }

    /// The positions of the largest scores of each row, among those up to its own.
    fn largest(
        &self,
        pass: &mut Pass,
        scores: &Tensor,
        positions: &[i32],
        rows: usize,
    ) -> Result<Vec<Vec<i32>>, ModelError> {
        let what = IndexOf { op: "indexer", limit: scores.shape()[1] + 1, distinct: false };
        let counts = pass.machine.index(what, positions.iter().map(|pos| pos + 1).collect(), None)?;
        let mut index = pass.empty(DType::I32, &[rows, self.plan.chosen])?;
        let inputs = [("x", scores.view()), ("count", counts.view(&[rows])?)];
        let k = Attributes::new().with("k", self.plan.chosen);
        pass.op("topk", &k, &inputs, [("index", index.view_mut())])?;
        let index = if index.is_on_host() { index } else { pass.machine.download(index.view())? };
        let index = index.as_slice::<i32>().expect("they are i32, and on the host");
        let of_row = |row: &[i32]| row.iter().copied().filter(|&at| at >= 0).collect();
        Ok(index.chunks_exact(self.plan.chosen).map(of_row).collect())
    }
}

/// The row of the pages where a position of a sequence stands.
fn row_of(attention: &AttentionMetadata, sequence: usize, at: i32) -> i32 {
    let AttentionMetadata { kv_len, block_table, page_size, .. } = attention;
    let (columns, page_size) = (block_table.len() / kv_len.len(), *page_size as i32);
    block_table[sequence * columns + (at / page_size) as usize] * page_size + at % page_size
}

impl Chosen {
    /// Where attention finds the keys of each row, as if each were a sequence of its own in pages of one position.
    pub fn metadata(&self, pass: &Pass, most: usize) -> AttentionMetadata {
        let (of_step, n) = (&pass.inputs.attention, self.0.len() as i32);
        let mut block_table = Vec::with_capacity(self.0.len() * most);
        for sequence in 0..pass.step.sequences() {
            for chosen in &self.0[pass.step.rows_of(sequence)] {
                let places = chosen.iter().map(|&at| row_of(of_step, sequence, at));
                block_table.extend(places.chain(std::iter::repeat_n(-1, most - chosen.len())));
            }
        }
        let kv_len: Vec<i32> = self.0.iter().map(|chosen| chosen.len() as i32).collect();
        let q_pos = kv_len.iter().map(|len| len - 1).collect();
        AttentionMetadata { q_start: (0..=n).collect(), q_pos, kv_len, block_table, page_size: 1, on_device: None }
    }

    /// The most keys of a row.
    pub fn most(&self) -> usize {
        self.0.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// The rows of a step, whose sequences begin in it, that each row sees.
    pub fn rows(&self, pass: &Pass) -> Vec<Vec<i32>> {
        let of_sequence = |sequence| {
            let rows = pass.step.rows_of(sequence);
            let first = rows.start as i32;
            self.0[rows].iter().map(move |chosen| chosen.iter().map(|at| first + at).collect())
        };
        (0..pass.step.sequences()).flat_map(of_sequence).collect()
    }
}
