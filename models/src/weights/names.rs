//! Folders whose tensors have other names than those of the model, or other cuts.

use super::{Form, Stored, Weights};
use crate::mxfp4;
use safetensors::Dtype;
use std::ops::Range;

impl<'a> Weights<'a> {
    /// The tensors of a folder as models have them.
    pub(super) fn of_models(self) -> Weights<'a> {
        self.renamed().with_convolutions().with_experts().with_blocks()
    }

    /// The names of the model, where a folder has others ([`RENAMED`]).
    fn renamed(mut self) -> Weights<'a> {
        for (known_by, old, new) in RENAMED {
            if self.contains(known_by) {
                let tensors = std::mem::take(&mut self.tensors);
                let rename = |name: String| name.strip_prefix(old).map_or(name.clone(), |rest| format!("{new}{rest}"));
                self.tensors = tensors.into_iter().map(|(name, stored)| (rename(name), stored)).collect();
            }
        }
        if ["blocks.0.att.r_k", "model.layers.0.attn.r_k"].into_iter().any(|name| self.contains(name)) {
            let tensors = std::mem::take(&mut self.tensors);
            self.tensors = tensors.into_iter().filter_map(|(name, stored)| of_rwkv(name, stored)).collect();
        }
        for (saved, own, beside) in SAVED {
            let layers = self.tensors.keys().filter_map(|name| name.strip_suffix(saved));
            let is_saved = |at: &&str| self.contains(&format!("{at}{beside}")) && !self.contains(&format!("{at}{own}"));
            let layers: Vec<String> = layers.filter(is_saved).map(String::from).collect();
            for layer in layers {
                let stored = self.tensors.remove(&format!("{layer}{saved}")).expect("it is listed");
                self.tensors.insert(format!("{layer}{own}"), stored);
            }
        }
        self
    }

    /// The convolutions of queries, keys and values of an OLMo Hybrid, each with the rows of its projection: transformers 5 joins the
    /// three, and where it saves them cuts what it joined in thirds.
    fn with_convolutions(mut self) -> Weights<'a> {
        let layers = self.tensors.keys().filter_map(|name| name.strip_suffix(".linear_attn.q_conv1d.weight"));
        let layers: Vec<String> = layers.map(String::from).collect();
        for layer in layers {
            let named = |end: &str| ["q", "k", "v"].map(|which| format!("{layer}.linear_attn.{which}_{end}.weight"));
            let (names, projections) = (named("conv1d"), named("proj"));
            let [Some(q), Some(k), Some(v)] = names.each_ref().map(|name| self.tensors.get(name)) else { continue };
            let wanted =
                projections.each_ref().map(|name| self.tensors.get(name).and_then(|it| it.shape.first().copied()));
            let [Some(of_q), Some(of_k), Some(of_v)] = wanted else { continue };
            let (thirds, wanted) = ([q, k, v], [of_q, of_k, of_v]);
            let rows = q.shape.first().copied().unwrap_or(0);
            let joined = wanted.iter().try_fold(0usize, |sum, rows| sum.checked_add(*rows));
            let alike = thirds.iter().all(|it| it.shape == q.shape && it.dtype == q.dtype);
            if !alike || rows == 0 || joined != rows.checked_mul(3) || wanted.iter().all(|it| *it == rows) {
                continue;
            }
            let row = (q.bytes.end - q.bytes.start) / rows as u64;
            let (dtype, shape) = (q.dtype, q.shape.clone());
            let mut left: Vec<(usize, Range<u64>)> =
                thirds.iter().rev().map(|it| (it.shard, it.bytes.clone())).collect();
            for (name, rows) in names.iter().zip(wanted) {
                let (mut length, mut parts) = (row * rows as u64, Vec::new());
                while length > 0 {
                    let (shard, bytes) = left.pop().expect("together they have the rows");
                    let end = bytes.end.min(bytes.start + length);
                    length -= end - bytes.start;
                    if end < bytes.end {
                        left.push((shard, end..bytes.end));
                    }
                    parts.push((shard, bytes.start..end));
                }
                let mut parts = parts.into_iter();
                let (shard, bytes) = parts.next().unwrap_or((0, 0..0));
                let shape = [&[rows], &shape[1..]].concat();
                let own = Stored { shard, dtype, shape, bytes, more: parts.collect(), form: Form::Plain };
                self.tensors.insert(name.clone(), own);
            }
        }
        self
    }

    /// The matrices of each expert, where a folder with gated delta rules has those of a layer in two tensors: `[E,2F,hidden]`, gate and
    /// up one behind the other, and `[E,hidden,F]`.
    fn with_experts(mut self) -> Weights<'a> {
        let is_stacked = |name: &str| name.starts_with("model.") && (name.ends_with(GATE_UP) || name.ends_with(DOWN));
        let names: Vec<String> = match self.tensors.keys().any(|name| name.contains(".linear_attn.")) {
            true => self.tensors.keys().filter(|name| is_stacked(name)).cloned().collect(),
            false => Vec::new(),
        };
        for name in names {
            let stored = self.tensors.remove(&name).expect("it is listed");
            let parts: &[&str] = if name.ends_with(DOWN) { &["down_proj"] } else { &["gate_proj", "up_proj"] };
            let rows = |rows: usize| rows.checked_div(parts.len()).filter(|_| rows.is_multiple_of(parts.len()));
            let (Some(rows), &[experts, _, k]) = (stored.shape.get(1).and_then(|n| rows(*n)), &stored.shape[..]) else {
                self.tensors.insert(name, stored);
                continue;
            };
            let block = name.rsplit_once('.').map_or("", |(block, _)| block);
            let bytes = (stored.bytes.end - stored.bytes.start) / ((experts * parts.len()) as u64).max(1);
            let mut first = stored.bytes.start;
            for (expert, part) in (0..experts).flat_map(|expert| parts.iter().map(move |part| (expert, part))) {
                let own = Stored {
                    shape: vec![rows, k],
                    bytes: first..first + bytes,
                    more: Vec::new(),
                    form: Form::Plain,
                    ..stored
                };
                self.tensors.insert(format!("{block}.{expert}.{part}.weight"), own);
                first += bytes;
            }
        }
        self
    }

    /// One tensor for each pair of blocks and scales of MXFP4.
    fn with_blocks(mut self) -> Weights<'a> {
        let names: Vec<String> =
            self.tensors.keys().filter_map(|name| Some(name.strip_suffix(BLOCKS)?.to_string())).collect();
        for name in names {
            let [blocks, scales] = [BLOCKS, SCALES].map(|end| format!("{name}{end}"));
            let (Some(of_blocks), Some(of_scales)) = (self.tensors.get(&blocks), self.tensors.get(&scales)) else {
                continue;
            };
            let bytes = of_blocks.dtype == Dtype::U8 && of_scales.dtype == Dtype::U8;
            let Some(shape) = mxfp4::shape(&of_blocks.shape, &of_scales.shape).filter(|_| bytes) else { continue };
            let scales = self.tensors.remove(&scales).expect("it is there");
            let blocks = self.tensors.remove(&blocks).expect("it is there");
            let form = Form::Scaled(scales.shard, scales.bytes);
            self.tensors.insert(name, Stored { shape, form, ..blocks });
        }
        self
    }
}

/// The ends of the names of two tensors of all experts.
const GATE_UP: &str = ".mlp.experts.gate_up_proj";
const DOWN: &str = ".mlp.experts.down_proj";

/// Other names of folders: the tensor by which they are known, and what stands at the beginning of names there and in the model.
/// GPT-2 was published as the base of a model; the head of a GPT-NeoX has another name in modules than in folders, and so has all but
/// the head of a Nemotron-H; beside a model of images a text model has one more part before its names.
const RENAMED: [(&str, &str, &str); 5] = [
    ("wte.weight", "", "transformer."),
    ("gpt_neox.embed_in.weight", "lm_head.", "embed_out."),
    ("model.norm_f.weight", "model.", "backbone."),
    ("model.language_model.norm.weight", "model.language_model.", "model."),
    ("language_model.model.norm.weight", "language_model.", ""),
];

/// What transformers 5 calls otherwise when it saves, as its ways back rename more than those in: the end it writes, that of the
/// model, and a neighbour that only such layers have. The dense layers of a Kimi Linear, and the norms of a full attention of OLMo
/// Hybrid.
const SAVED: [(&str, &str, &str); 4] = [
    (".block_sparse_moe.gate_proj.weight", ".mlp.gate_proj.weight", ".input_layernorm.weight"),
    (".block_sparse_moe.up_proj.weight", ".mlp.up_proj.weight", ".input_layernorm.weight"),
    (".block_sparse_moe.down_proj.weight", ".mlp.down_proj.weight", ".input_layernorm.weight"),
    (".feedforward_layer_norm.weight", ".post_attention_layernorm.weight", ".post_feedforward_layernorm.weight"),
];

/// The ends of the names of a tensor that is stored as MXFP4.
const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";

/// A tensor of RWKV-7 as models have it: vectors are stored with two axes of one before them. In the package the first block has
/// a way back to its own v as well, which nothing reads, and of two narrow matrices and what is added to their product `w1`,
/// `w2` and `w0` are here `w1.weight`, `w2.weight` and `w2.bias`.
fn of_rwkv(name: String, mut stored: Stored) -> Option<(String, Stored)> {
    if let [1, 1, _] = stored.shape[..] {
        stored.shape.drain(..2);
    }
    let Some((block, last)) = name.split_once(".att.") else { return Some((name, stored)) };
    let narrow = last.strip_prefix(['w', 'a', 'v', 'g']).filter(|_| last.len() == 2);
    let last = match narrow {
        Some("0") => format!("{}2.bias", &last[..1]),
        Some("1" | "2") => format!("{last}.weight"),
        _ => last.to_string(),
    };
    let is_read = block != "blocks.0" || !["v2.bias", "v1.weight", "v2.weight"].contains(&&*last);
    is_read.then(|| (format!("{block}.att.{last}"), stored))
}
