//! Mutants of whole models: a probe that changes what the forward goes on with.

use samebits_contract::round;
use samebits_contract::tensor::DType;
use samebits_models::plan::{Branch, Layer, Mamba2, ScanGate};
use samebits_models::{Config, ModelError, Probe, Seen};
use std::collections::BTreeMap;
use std::ops::Range;

/// What is wrong with a forward, or with a run of gradients. A chunk is what one step takes of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelMutation {
    /// In layer 1, key and value of the first token of every chunk but the first are zeros: what a page holds that nobody
    /// wrote.
    UnwrittenKey,
    /// The key by which an indexer knows the first token of every chunk but the first is zeros.
    UnwrittenIndexKey,
    /// Behind the first chunk, the positions that rotate queries and keys are one too high.
    PositionAfterChunk,
    /// Equal router scores go to the highest expert where a step has several tokens.
    RouterTieByBatch,
    /// Experts are summed in the order of their numbers where a step has several tokens.
    ExpertsByArrival,
    /// Sequences of one step share the first entry of the cache, which the first one fills.
    SharedCacheEntry,
    /// In layers with a window, that of the first token of every chunk but the first stands one position too early.
    WindowAtChunkBorder,
    /// What a layer that recurs keeps between two steps is rounded to bf16.
    NarrowState,
    /// In a scan of Mamba-2 whose norm stands behind the gate, it stands before.
    GateBehindNorm,
    /// In a scan of Mamba whose steps have a norm, they have none.
    StepsUnnormed,
    /// Uses of a shared block add what the adapters of its first use have made.
    FirstAdapter,
    /// Of a chunk, what mixes tokens with those before them keeps the token before its last.
    ShiftAfterChunk,
    /// The logarithm of a decay is taken for that of its logarithm: `exp(-exp(w))` for `exp(w)`.
    DecayTwice,
    /// What a gated delta rule has read is not gated.
    RuleUngated,
    /// A beta of the gated delta rule is what its sigmoid should have read.
    BetaAsProjected,
    /// Behind a chunk, a gated delta rule begins with no state.
    RuleForgets,
    /// Heads of attention behind gates have the gate of the next one.
    GateOfNextHead,
    /// Blocks with inputs of their own have those of the next one.
    InputOfNextBlock,
    /// Keys and values of a block have no gradient of the later blocks that read them.
    LentUntrained,
    /// What attention makes is a little larger in a layer that is run again for its reverse.
    RecomputedAttention,
}

/// A probe that shows every site to another one, and makes it wrong for what the forward goes on with.
pub struct ModelMutant<P> {
    mutation: ModelMutation,
    /// Which layers have a window.
    windowed: Vec<bool>,
    /// The router's scores, or by token the order of the ranks: what a site leaves for the next.
    scores: Vec<f32>,
    order: Vec<Vec<usize>>,
    /// Of each layer its scan, if it has one, and the gate and the scan that it has just made.
    scans: Vec<Option<Mamba2>>,
    scanned: [Vec<f32>; 2],
    /// What a gated delta rule has read behind its norm.
    normed: Vec<f32>,
    /// What steps of a scan of Mamba are projected from, before its norm.
    projected: Vec<f32>,
    /// Of each layer how many gates its attention has, 0 for none.
    gates: Vec<usize>,
    /// Elements of the inputs that blocks have of their own.
    input: Option<usize>,
    /// Which layers read keys and values of another.
    borrows: Vec<bool>,
    /// Of each layer that uses a shared block the first one that does, and what the adapters of that have just made, by site.
    firsts: Vec<Option<usize>>,
    adapted: BTreeMap<(usize, String), Vec<f32>>,
    /// The layers that a micro-batch has been through.
    attended: Vec<usize>,
    /// What entered the layer that runs, by sequence and position.
    entered: BTreeMap<(usize, usize), Vec<f32>>,
    /// The other one. It sees what was made right although it will be read wrong; a wrong choice of experts, which is made
    /// wrong, it sees as it is.
    pub beside: P,
}

impl<P: Probe> ModelMutant<P> {
    /// For models of `config`.
    pub fn new(mutation: ModelMutation, config: &Config, beside: P) -> ModelMutant<P> {
        let windowed = config.windows().iter().map(Option::is_some).collect();
        let scan = |block: &Vec<_>| block.iter().find_map(scan_of);
        let first = |block: &Vec<Branch>| Some(config.shared[block.iter().find_map(|b| b.ahead.as_ref())?.of].first);
        ModelMutant {
            mutation,
            windowed,
            scores: Vec::new(),
            order: Vec::new(),
            scans: config.blocks.iter().map(scan).collect(),
            scanned: Default::default(),
            normed: Vec::new(),
            projected: Vec::new(),
            gates: config.blocks.iter().map(|block| block.iter().map(gates_of).max().unwrap_or(0)).collect(),
            input: config.inputs.as_ref().map(|inputs| inputs.width),
            borrows: config.blocks.iter().map(|block| block.iter().any(borrows)).collect(),
            firsts: config.blocks.iter().map(first).collect(),
            adapted: BTreeMap::new(),
            attended: Vec::new(),
            entered: BTreeMap::new(),
            beside,
        }
    }
}

/// The rows of the chunks that are not the first of their sequence.
fn later_chunks(tokens: &[(usize, usize)]) -> Vec<Range<usize>> {
    let mut chunks = Vec::new();
    let mut start = 0;
    for chunk in tokens.chunk_by(|a, b| a.0 == b.0) {
        if chunk[0].1 > 0 {
            chunks.push(start..start + chunk.len());
        }
        start += chunk.len();
    }
    chunks
}

impl<P: Probe> Probe for ModelMutant<P> {
    fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
        if self.mutation == ModelMutation::RouterTieByBatch {
            self.change(seen);
            return self.beside.see(seen);
        }
        self.beside.see(seen)?;
        self.change(seen);
        Ok(())
    }

    fn see_state(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
        self.beside.see_state(seen)?;
        if self.mutation == ModelMutation::NarrowState {
            seen.values.iter_mut().for_each(|value| *value = round::round(f64::from(*value), DType::Bf16) as f32);
        }
        if self.mutation == ModelMutation::RuleForgets && seen.site == "gated_delta_rule" {
            seen.values.fill(0.0);
        }
        let width = seen.values.len() / seen.tokens.len();
        if self.mutation == ModelMutation::ShiftAfterChunk && seen.site == "causal_conv1d" {
            for (&(sequence, last), kept) in seen.tokens.iter().zip(seen.values.chunks_exact_mut(width)) {
                let before = last.checked_sub(1).and_then(|before| self.entered.get(&(sequence, before)));
                // Other convolutions keep several rows, of something else.
                if let Some(before) = before.filter(|before| before.len() == width) {
                    kept.copy_from_slice(before);
                }
            }
        }
        Ok(())
    }
}

impl<P> ModelMutant<P> {
    fn change(&mut self, seen: &mut Seen) {
        let rows = seen.tokens.len();
        let width = seen.values.len() / rows;
        let later = later_chunks(seen.tokens);
        match (self.mutation, seen.site, seen.layer) {
            (ModelMutation::UnwrittenKey, "k" | "v", Some(1)) => {
                later.iter().for_each(|chunk| seen.values[chunk.start * width..][..width].fill(0.0));
            }
            (ModelMutation::UnwrittenIndexKey, "index_k", _) => {
                later.iter().for_each(|chunk| seen.values[chunk.start * width..][..width].fill(0.0));
            }
            (ModelMutation::PositionAfterChunk, "positions", None) => {
                later.into_iter().flatten().for_each(|row| seen.values[row] += 1.0);
            }
            (ModelMutation::WindowAtChunkBorder, "positions", Some(layer)) if self.windowed[layer] => {
                later.iter().for_each(|chunk| seen.values[chunk.start] -= 1.0);
            }
            (ModelMutation::SharedCacheEntry, "k" | "v", _) => {
                let firsts = |row: &usize| seen.tokens[*row].1 == 0;
                let mut firsts = (0..rows).filter(firsts);
                if let Some(filled) = firsts.next() {
                    firsts.for_each(|row| seen.values.copy_within(filled * width..(filled + 1) * width, row * width));
                }
            }
            (ModelMutation::RouterTieByBatch, "router", _) if rows > 1 => self.scores = seen.values.to_vec(),
            (ModelMutation::RouterTieByBatch, "experts", _) if rows > 1 => {
                for (chosen, scores) in
                    seen.values.chunks_exact_mut(width).zip(self.scores.chunks_exact(self.scores.len() / rows))
                {
                    for rank in 0..width {
                        let tied =
                            |&e: &usize| scores[e] == scores[chosen[rank] as usize] && !chosen.contains(&(e as f32));
                        if let Some(last) = (0..scores.len()).rev().find(tied) {
                            chosen[rank] = last as f32;
                        }
                    }
                }
            }
            (ModelMutation::ExpertsByArrival, "experts", _) if rows > 1 => {
                self.order = seen
                    .values
                    .chunks_exact(width)
                    .map(|chosen| {
                        let mut order: Vec<usize> = (0..width).collect();
                        order.sort_by_key(|&rank| chosen[rank] as usize);
                        order
                    })
                    .collect();
                reorder(seen.values, &self.order);
            }
            (ModelMutation::GateBehindNorm, "z", _) => self.scanned[0] = seen.values.to_vec(),
            (ModelMutation::GateBehindNorm, "scan", _) => self.scanned[1] = seen.values.to_vec(),
            (ModelMutation::GateBehindNorm, "gated", Some(layer)) => {
                if let Some(scan) = self.scans[layer].as_ref().filter(|scan| scan.gate == ScanGate::ThenNorm) {
                    let [z, made] = &self.scanned;
                    let part = width / scan.norm_groups;
                    for (i, read) in seen.values.chunks_exact_mut(part).enumerate() {
                        let own = i * part..(i + 1) * part;
                        let gate = |(z, made): (&f32, &f32)| made * z / (1.0 + (-z).exp());
                        let gated: Vec<f32> = z[own.clone()].iter().zip(&made[own.clone()]).map(gate).collect();
                        let factor = size(&gated, scan.norm.eps) / size(&made[own], scan.norm.eps);
                        read.iter_mut().for_each(|value| *value *= factor);
                    }
                }
            }
            (ModelMutation::StepsUnnormed, "projected", _) => self.projected = seen.values.to_vec(),
            (ModelMutation::StepsUnnormed, "steps", _) if !self.projected.is_empty() => {
                seen.values.copy_from_slice(&self.projected);
            }
            (ModelMutation::RuleUngated, "normed", _) => self.normed = seen.values.to_vec(),
            // Scans have a site of this name too.
            (ModelMutation::RuleUngated, "gated", _) if !self.normed.is_empty() => {
                seen.values.copy_from_slice(&self.normed);
            }
            (ModelMutation::BetaAsProjected, "beta", _) => {
                seen.values.iter_mut().for_each(|beta| *beta = (*beta / (1.0 - *beta)).ln());
            }
            (ModelMutation::GateOfNextHead, "attention_gate", Some(layer)) => {
                let head = width / self.gates[layer];
                seen.values.chunks_exact_mut(width).for_each(|row| row.rotate_left(head));
            }
            (ModelMutation::InputOfNextBlock, "per_layer_inputs", _) => {
                let input = self.input.expect("there are such inputs");
                seen.values.chunks_exact_mut(width).for_each(|row| row.rotate_left(input));
            }
            (ModelMutation::LentUntrained, "dk" | "dv", Some(layer)) if self.borrows[layer] => seen.values.fill(0.0),
            (ModelMutation::FirstAdapter, site, Some(layer)) if site.ends_with("_adapter") => {
                let first = self.firsts[layer].expect("it uses a shared block");
                match self.adapted.get(&(first, site.to_string())) {
                    Some(made) if layer != first => seen.values.copy_from_slice(made),
                    _ => drop(self.adapted.insert((layer, site.to_string()), seen.values.to_vec())),
                }
            }
            (ModelMutation::ShiftAfterChunk, "input_norm" | "mlp_norm", _) => {
                let rows = seen.values.chunks_exact(width).map(<[f32]>::to_vec);
                self.entered = seen.tokens.iter().copied().zip(rows).collect();
            }
            (ModelMutation::DecayTwice, "decay", _) => seen.values.iter_mut().for_each(|w| *w = -w.exp()),
            (ModelMutation::RecomputedAttention, "embed", _) => self.attended.clear(),
            (ModelMutation::RecomputedAttention, "attention", Some(layer)) => {
                if self.attended.contains(&layer) {
                    seen.values.iter_mut().for_each(|value| *value += *value / 128.0);
                }
                self.attended.push(layer);
            }
            (ModelMutation::ExpertsByArrival, "expert_weights", _) if rows > 1 => reorder(seen.values, &self.order),
            _ => {}
        }
    }
}

/// The scan of a branch, if it has one.
fn scan_of(branch: &Branch) -> Option<Mamba2> {
    match &branch.layer {
        Layer::Mamba2(scan) => Some(scan.clone()),
        _ => None,
    }
}

/// The gates of a branch's attention, one for each head; 0 where it has none.
fn gates_of(branch: &Branch) -> usize {
    match &branch.layer {
        Layer::Attention(attention) if attention.gate => attention.heads.queries,
        _ => 0,
    }
}

/// Whether the attention of a branch reads keys and values of another block.
fn borrows(branch: &Branch) -> bool {
    matches!(&branch.layer, Layer::Attention(attention) if attention.lender.is_some())
}

/// The root that a norm divides by.
fn size(values: &[f32], eps: f32) -> f32 {
    (values.iter().map(|value| value * value).sum::<f32>() / values.len() as f32 + eps).sqrt()
}

/// Brings the values of each row into its order.
fn reorder(values: &mut [f32], orders: &[Vec<usize>]) {
    for (row, order) in values.chunks_exact_mut(values.len() / orders.len()).zip(orders) {
        let before = row.to_vec();
        row.iter_mut().zip(order).for_each(|(value, &from)| *value = before[from]);
    }
}
