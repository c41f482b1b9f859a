//! The reverse pass: from the gradient of the log-probabilities to those of the parameters.
//!
//! It goes through the forward of `decoder.rs` from its end to its beginning; every part has its `backward` beside its
//! forward. What a part computed is not computed again here: while a forward runs for a reverse pass it keeps copies
//! ([`Pass::keep`]), and the reverse pass takes them from the end ([`Backward::take`]). With recomputation only what
//! enters each layer is kept, and a layer is run a second time, with copies, right before its reverse: the same
//! forward, so the same bits.
//!
//! # Rounding points
//!
//! Those of the forward: a gradient is rounded to bf16 where a product or attention reads it and nowhere else. Where
//! several parts read a value, their gradients are added in f32, in the order that `docs/NUMERICS.md` gives. Gradients
//! of parameters are f32 ([`Sums`]).
//!
//! # Tokens
//!
//! Every sum over tokens is given the mask of the rows, so rows that are padding leave nothing, whatever they hold.
//! Rows do not see each other anywhere else but in attention, which is called for the rows of sequences alone.

use crate::ModelError;
use crate::decoder::{Decoder, LayerMlp, TABLE};
use crate::linear::{Source, Vector};
use crate::machine::typed;
use crate::pass::Pass;
use crate::qkv::Qkv;
use crate::step::Step;
use crate::sums::{Of, Sums, zeros};
use samebits_ops::device::Part;
use samebits_ops::{Attributes, Cpu, DType, GemmDw, LinearLogprob, LogprobGradients, LogprobRows, RopeTable, Tensor};
use samebits_ops::{TensorRef, embedding_dw, gemm_dw, linear_logprob_backward, linear_logprob_backward_packed};
use std::ops::Range;

/// A reverse pass over the rows of a micro-batch.
pub(crate) struct Backward<'a, 'p> {
    /// The pass of the forward, with what it kept.
    pub pass: Pass<'a, 'p>,
    /// Its rows.
    pub step: &'a Step,
    pub cpu: &'a Cpu,
    /// The rotations back.
    pub angles: &'a RopeTable,
    /// 0 for each row that is padding.
    pub mask: &'a [i32],
    /// Where sequences stand in the rows.
    pub blocks: &'a [Block],
    pub sums: &'a mut Sums,
}

/// Sequences that stand in equal distances: a call of attention's gradient.
pub(crate) struct Block {
    /// The row of the first token of the first.
    pub first: usize,
    /// From a sequence to the next.
    pub stride: usize,
    /// Rows of a sequence that attention's gradient is given: its tokens, and padding behind them.
    pub rows: usize,
    /// Tokens of each sequence.
    pub lengths: Vec<usize>,
}

impl Block {
    /// The position of every row; any for padding.
    fn positions(&self) -> Vec<i32> {
        self.lengths.iter().flat_map(|_| 0..self.rows as i32).collect()
    }

    /// 0 for padding.
    fn mask(&self) -> Vec<i32> {
        let of = |&length: &usize| (0..self.rows).map(move |row| i32::from(row < length));
        self.lengths.iter().flat_map(of).collect()
    }
}

impl Backward<'_, '_> {
    /// The last of what the forward kept.
    pub fn take(&mut self, name: &str) -> Tensor {
        let kept = self.pass.kept.as_mut().and_then(Vec::pop);
        let (found, values) = kept.expect("the forward kept what its reverse takes");
        assert_eq!(found, name, "the reverse pass takes in the other order what the forward kept");
        values
    }

    /// Shows the gradient of a site, as [`Pass::see`].
    pub fn see(&mut self, layer: Option<usize>, site: &'static str, values: &mut Tensor) -> Result<(), ModelError> {
        self.pass.see(layer, site, self.step, values)
    }

    /// A gradient as products read it.
    pub fn rounded(&mut self, dy: TensorRef) -> Result<Tensor, ModelError> {
        let mut y = self.pass.empty(self.pass.dtype, dy.shape())?;
        self.pass.op("scale", &self.pass.attributes.none, &[("x", dy)], [("y", y.view_mut())])?;
        Ok(y)
    }

    /// `a + b` of f32.
    pub fn sum(&mut self, a: Tensor, b: Tensor) -> Result<Tensor, ModelError> {
        let mut y = self.pass.empty(DType::Fp32, a.shape())?;
        self.pass.op("add", &self.pass.attributes.none, &[("a", a.view()), ("b", b.view())], [("y", y.view_mut())])?;
        Ok(y)
    }

    /// The heads of `x[n,H,D]` added, ascending: `[n,D]`.
    pub fn sum_of_heads(&mut self, x: &Tensor, [n, heads, dim]: [usize; 3]) -> Result<Tensor, ModelError> {
        let mut sum = self.pass.empty(DType::Fp32, &[n, dim])?;
        let from = Part { stride: heads * dim, ..Part::whole(dim) };
        self.pass.machine.copy_rows([n, dim], (x, from), (&mut sum, Part::whole(dim)))?;
        let x = x.as_slice::<f32>().expect("it is f32, and on the host");
        for head in 1..heads {
            let next = TensorRef::strided(x.get(head * dim..).unwrap_or_default(), &[n, dim], &[heads * dim, 1])?;
            let mut y = self.pass.empty(DType::Fp32, &[n, dim])?;
            let inputs = [("a", sum.view()), ("b", next)];
            self.pass.op("add", &self.pass.attributes.none, &inputs, [("y", y.view_mut())])?;
            sum = y;
        }
        Ok(sum)
    }

    /// Puts the rows of `from` into `to`, from row `first` on.
    pub fn write_rows(&mut self, from: &Tensor, to: &mut Tensor, first: usize) -> Result<(), ModelError> {
        let (count, width) = (from.shape()[0], from.shape()[1]);
        let part = Part { offset: first * width, ..Part::whole(width) };
        Ok(self.pass.machine.copy_rows([count, width], (from, Part::whole(width)), (to, part))?)
    }

    /// Adds the tokens of `x[M,K]` and `dy[M,N]`, as products read them, to the gradient of a matrix.
    pub fn add_matrix(&mut self, source: &Source, x: TensorRef, dy: TensorRef, mask: &[i32]) -> Result<(), ModelError> {
        let [n, k] = [dy, x].map(|rows| rows.shape()[1]);
        let dw = self.sums.matrix(self.cpu, Of::source(source, "weight"), Some(source), [n, k])?;
        typed!(x.dtype() => A, {
            let [x, dy] = [x, dy].map(|rows| rows.contiguous::<A>().expect("rows stand one behind the other"));
            Ok(gemm_dw(self.cpu, &GemmDw::new(mask.len(), n, k), Some(mask), x, dy, dw)?)
        })
    }

    /// Adds the tokens of `dy[M,N]` to the gradient of a bias.
    pub fn add_bias(&mut self, source: &Source, dy: TensorRef, mask: &[i32]) -> Result<(), ModelError> {
        let (of, none) = (Of::source(source, "bias"), &self.pass.attributes.none);
        self.add_vector(["token_sum", "sum"], none, (of, Some(source), dy.shape()[1]), &[("x", dy)], mask)
    }

    /// Adds tokens to the gradient of a vector of n elements by an op with this output.
    fn add_vector(
        &mut self,
        [op, output]: [&str; 2],
        attributes: &Attributes,
        (of, rows, n): (Of, Option<&Source>, usize),
        inputs: &[(&str, TensorRef)],
        mask: &[i32],
    ) -> Result<(), ModelError> {
        let Backward { pass, sums, cpu, .. } = self;
        sums.vector(cpu, of, rows, n, mask, |carry, before, next| {
            let attributes = attributes.clone().with("token_offset", before);
            let tokens = [("mask", TensorRef::new(mask, &[mask.len()])?), ("carry", carry)];
            pass.op(op, &attributes, &[inputs, &tokens].concat(), [(output, next.view_mut())])
        })
    }

    /// From `dy` of a norm of x, and `dsum` of x itself, which is a sum: that of what was added.
    fn stream_sum(&mut self, norm: &Vector, x: &Tensor, dy: &Tensor, dsum: &Tensor) -> Result<Tensor, ModelError> {
        let at = self.pass.attributes;
        self.add_norm(norm, &at.norm_dw, x, dy)?;
        let mut dx = self.pass.empty(DType::Fp32, x.shape())?;
        let inputs = [("sum", x.view()), ("w", norm.w.view()), ("dy", dy.view()), ("dsum", dsum.view())];
        self.pass.op("add_rms_norm_backward", &at.norm, &inputs, [("dx", dx.view_mut())])?;
        Ok(dx)
    }

    /// From `dy` of a norm of what a block adds, or of the last one: that of x.
    fn stream_norm(&mut self, norm: &Vector, x: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        let at = self.pass.attributes;
        self.norm(norm, [&at.norm, &at.norm_dw], x, dy)
    }

    /// From `dy` of a norm of short vectors: that of x.
    pub fn latent_norm(&mut self, norm: &Vector, x: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        let at = &self.pass.attributes.latent_norm;
        self.norm(norm, [at, at], x, dy)
    }

    fn norm(
        &mut self,
        norm: &Vector,
        [at, at_dw]: [&Attributes; 2],
        x: &Tensor,
        dy: &Tensor,
    ) -> Result<Tensor, ModelError> {
        self.add_norm(norm, at_dw, x, dy)?;
        let mut dx = self.pass.empty(DType::Fp32, x.shape())?;
        let inputs = [("x", x.view()), ("w", norm.w.view()), ("dy", dy.view())];
        self.pass.op("rms_norm_backward", at, &inputs, [("dx", dx.view_mut())])?;
        Ok(dx)
    }

    fn add_norm(&mut self, norm: &Vector, at: &Attributes, x: &Tensor, dy: &Tensor) -> Result<(), ModelError> {
        let inputs = [("x", x.view()), ("dy", dy.view())];
        self.add_vector(["rms_norm_dw", "dw"], at, (Of::whole(&norm.name), None, x.shape()[1]), &inputs, self.mask)
    }

    /// From `dy[n,H,D]` of normed and rotated heads: that of the heads.
    pub fn head_norm(&mut self, norm: &Vector, x: TensorRef, dy: TensorRef) -> Result<Tensor, ModelError> {
        let (at, angles) = (self.pass.attributes, TensorRef::angles(self.angles));
        let inputs = [("x", x), ("dy", dy), ("pos", angles)];
        let (of, dim) = (Of::whole(&norm.name), norm.w.shape()[0]);
        self.add_vector(["norm_rope_dw", "dw"], &at.norm_rope_dw, (of, None, dim), &inputs, self.mask)?;
        let (shape, width) = (x.shape(), x.shape()[1] * dim);
        let mut dx = self.pass.empty(DType::Fp32, &[shape[0], width])?;
        let inputs = [("x", x), ("w", norm.w.view()), ("dy", dy), ("pos", angles)];
        self.pass.op("norm_rope_backward", &at.norm_rope, &inputs, [("dx", dx.view_mut_as(shape)?)])?;
        Ok(dx)
    }

    /// From `dout`, as attention reads it: those of queries, keys and values, in f32. Those of rows of no sequence are
    /// +0.
    fn attention(&mut self, layer: usize, qkv: &Qkv, [out, lse, dout]: [&Tensor; 3]) -> Result<Qkv, ModelError> {
        let (c, n, f32) = (self.pass.config, dout.shape()[0], DType::Fp32);
        let (q, k) = ([c.q_heads, c.key_dim], [c.kv_heads, c.key_dim]);
        let (v, o) = ([c.kv_heads, c.value_dim], [c.q_heads, c.value_dim]);
        let shape = c.attention(1, n, n, layer);
        let attributes = Attributes::new()
            .with("scale", shape.scale)
            .with("causal", shape.causal)
            .with("window", shape.window.unwrap_or(0))
            .with("softcap", shape.softcap.unwrap_or(0.0));
        let gradient = |[heads, dim]: [usize; 2]| zeros(self.cpu, &[n, heads * dim]);
        let mut all = Qkv { q: gradient(q)?, k: gradient(k)?, v: gradient(v)? };
        for block in self.blocks {
            let (batch, rows) = (block.lengths.len(), block.rows);
            let lengths: Vec<i32> = block.lengths.iter().map(|&length| length as i32).collect();
            let (positions, mask) = (block.positions(), block.mask());
            let inputs = [
                ("q", block.view(&qkv.q, &q)?),
                ("k", block.view(&qkv.k, &k)?),
                ("v", block.view(&qkv.v, &v)?),
                ("out", block.view(out, &o)?),
                ("lse", block.view(lse, &[c.q_heads])?),
                ("dout", block.view(dout, &o)?),
                ("q_pos", TensorRef::new(&positions, &[batch, rows])?),
                ("kv_len", TensorRef::new(&lengths, &[batch])?),
                ("mask", TensorRef::new(&mask, &[batch, rows])?),
            ];
            let of_block = |[heads, dim]: [usize; 2]| self.pass.empty(f32, &[batch, rows, heads, dim]);
            let (mut dq, mut dk, mut dv) = (of_block(q)?, of_block(k)?, of_block(v)?);
            let outputs = [("dq", dq.view_mut()), ("dk", dk.view_mut()), ("dv", dv.view_mut())];
            self.pass.op("attention_backward", &attributes, &inputs, outputs)?;
            for (from, to) in [(&dq, &mut all.q), (&dk, &mut all.k), (&dv, &mut all.v)] {
                let width = to.shape()[1];
                for number in 0..batch {
                    let from_part = Part { offset: number * rows * width, ..Part::whole(width) };
                    let to_part = Part { offset: (block.first + number * block.stride) * width, ..Part::whole(width) };
                    self.pass.machine.copy_rows([rows, width], (from, from_part), (to, to_part))?;
                }
            }
        }
        Ok(all)
    }
}

impl Block {
    /// The rows of its sequences: `values[n,..]` as `[sequences,rows,..]`, `..` being `axes`.
    fn view<'t>(&self, values: &'t Tensor, axes: &[usize]) -> Result<TensorRef<'t>, ModelError> {
        let width: usize = axes.iter().product();
        let mut shape = vec![self.lengths.len(), self.rows];
        let mut strides = vec![self.stride * width, width];
        let mut inner = width;
        for &axis in axes {
            inner /= axis;
            shape.push(axis);
            strides.push(inner);
        }
        typed!(values.dtype() => A, {
            let data = values.as_slice::<A>().expect("it is on the host, and of this dtype");
            Ok(TensorRef::strided(&data[self.first * width..], &shape, &strides)?)
        })
    }
}

/// Log-probabilities of rows' targets, and what their gradient needs: each `[n]`, in f32.
pub(crate) struct Logprobs {
    pub logprob: Tensor,
    pub lse: Tensor,
    /// Of the distributions that rows have.
    pub entropy: Option<Tensor>,
    /// What logits were divided by.
    pub temperature: f64,
}

impl Decoder {
    /// `a[n,hidden]` to the log-probabilities of `targets`, +0 for a target that is negative, and what their gradient needs;
    /// with entropies on demand.
    pub fn logprob(
        &self,
        pass: &mut Pass,
        a: &Tensor,
        targets: &[i32],
        temperature: f64,
        with_entropy: bool,
    ) -> Result<Logprobs, ModelError> {
        let (n, at) = (targets.len(), Attributes::new().with("temperature", temperature));
        let (mut logprob, mut lse) = (pass.empty(DType::Fp32, &[n])?, pass.empty(DType::Fp32, &[n])?);
        if self.attributes.softcap.is_none() && !with_entropy {
            let inputs = [("x", a.view()), ("w", self.lm_head.matrix(0)), ("target", TensorRef::new(targets, &[n])?)];
            let outputs = [("logprob", logprob.view_mut()), ("lse", lse.view_mut())];
            pass.op("linear_logprob", &at, &inputs, outputs)?;
            return Ok(Logprobs { logprob, lse, entropy: None, temperature });
        }
        let mut entropy = if with_entropy { Some(pass.empty(DType::Fp32, &[n])?) } else { None };
        for rows in tiles(n) {
            let logits = self.logits(pass, a.rows(rows.clone()))?;
            let target = TensorRef::new(&targets[rows.clone()], &[rows.len()])?;
            let outputs = [("logprob", logprob.rows_mut(rows.clone())), ("lse", lse.rows_mut(rows.clone()))];
            pass.op("logprob", &at, &[("logits", logits.view()), ("target", target)], outputs)?;
            if let Some(entropy) = &mut entropy {
                // It makes the same lse.
                let outputs = [("entropy", entropy.rows_mut(rows.clone())), ("lse", lse.rows_mut(rows))];
                pass.op("entropy", &at, &[("logits", logits.view())], outputs)?;
            }
        }
        Ok(Logprobs { logprob, lse, entropy, temperature })
    }

    /// From `dlogprob[n]` and, where there are entropies, theirs: that of a, in f32.
    pub fn logprob_backward(
        &self,
        back: &mut Backward,
        a: &Tensor,
        targets: &[i32],
        of_rows: &Logprobs,
        (dlogprob, dentropy): (&Tensor, Option<&Tensor>),
    ) -> Result<Tensor, ModelError> {
        let (lse, temperature) = (&of_rows.lse, of_rows.temperature);
        let of_logits = Attributes::new().with("temperature", temperature);
        let (n, head, at) = (targets.len(), &self.lm_head, &self.attributes);
        let mut da = back.pass.empty(DType::Fp32, a.shape())?;
        if at.softcap.is_some() || dentropy.is_some() {
            for rows in tiles(n) {
                // The logits of a few rows at a time: a chain over tokens goes on from tile to tile.
                let few = rows.len();
                let logits = head.apply(&mut back.pass, a.rows(rows.clone()), DType::Fp32)?;
                let softcapped = match &at.softcap {
                    None => None,
                    Some(cap) => {
                        let mut capped = back.pass.empty(DType::Fp32, logits.shape())?;
                        back.pass.op("softcap", cap, &[("x", logits.view())], [("y", capped.view_mut())])?;
                        Some((cap, capped))
                    }
                };
                let capped = softcapped.as_ref().map_or(&logits, |(_, capped)| capped);
                let mut dcapped = back.pass.empty(DType::Fp32, logits.shape())?;
                let inputs = [
                    ("logits", capped.view()),
                    ("target", TensorRef::new(&targets[rows.clone()], &[few])?),
                    ("lse", lse.rows(rows.clone())),
                    ("dlogprob", dlogprob.rows(rows.clone())),
                ];
                back.pass.op("logprob_backward", &of_logits, &inputs, [("dlogits", dcapped.view_mut())])?;
                if let (Some(entropy), Some(dentropy)) = (&of_rows.entropy, dentropy) {
                    let mut more = back.pass.empty(DType::Fp32, logits.shape())?;
                    let inputs = [
                        ("logits", capped.view()),
                        ("entropy", entropy.rows(rows.clone())),
                        ("lse", lse.rows(rows.clone())),
                        ("dentropy", dentropy.rows(rows.clone())),
                    ];
                    back.pass.op("entropy_backward", &of_logits, &inputs, [("dlogits", more.view_mut())])?;
                    dcapped = back.sum(dcapped, more)?;
                }
                let dlogits = match &softcapped {
                    None => back.rounded(dcapped.view())?,
                    Some((cap, _)) => {
                        let mut dlogits = back.pass.empty(self.dtype, logits.shape())?;
                        let inputs = [("x", logits.view()), ("dy", dcapped.view())];
                        back.pass.op("softcap_backward", cap, &inputs, [("dx", dlogits.view_mut())])?;
                        dlogits
                    }
                };
                let (x, mask) = (a.rows(rows.clone()), &back.mask[rows.clone()]);
                back.add_matrix(head.source(0), x, dlogits.view(), mask)?;
                let dx = head.input_gradient(back, 0, dlogits.view(), DType::Fp32)?;
                back.write_rows(&dx, &mut da, rows.start)?;
            }
        } else {
            let (source, rows) = (head.source(0), n);
            let shape = LinearLogprob { rows, vocab: self.config.vocab, k: self.config.hidden, temperature };
            let dw = back.sums.matrix(back.cpu, Of::source(source, "weight"), Some(source), [shape.vocab, shape.k])?;
            let [lse, dlogprob] = [lse, dlogprob].map(|rows| rows.as_slice::<f32>().expect("f32, and on the host"));
            let gradients = LogprobGradients { dlogprob, dlse: None };
            let rows = LogprobRows { target: targets, lse, gradients, mask: Some(back.mask) };
            let dx = da.as_slice_mut::<f32>().expect("f32, and on the host");
            typed!(a.dtype() => A, {
                let x = a.as_slice::<A>().expect("of this dtype, and on the host");
                match head.packed(0) {
                    Some(w) => linear_logprob_backward_packed(back.cpu, &shape, x, w, &rows, dx, dw)?,
                    None => {
                        let w = head.matrix(0).contiguous::<A>().expect("gradients are made on the processor");
                        linear_logprob_backward(back.cpu, &shape, x, w, &rows, dx, dw)?;
                    }
                }
            });
        }
        back.see(None, "dfinal_norm", &mut da)?;
        Ok(da)
    }

    /// From that of a behind the last norm: that of the residual stream x before it.
    pub fn last_norm_backward(&self, back: &mut Backward, x: &Tensor, da: &Tensor) -> Result<Tensor, ModelError> {
        let mut dx = back.stream_norm(&self.final_norm, x, da)?;
        back.see(Some(self.config.layers - 1), "dsum", &mut dx)?;
        Ok(dx)
    }

    /// From that of the sum of the residual stream and what layer i adds to it last: that of the stream that enters the
    /// layer, and of what the layer before it adds last.
    pub fn layer_backward(&self, i: usize, back: &mut Backward, dsum: Tensor) -> Result<Tensor, ModelError> {
        let (layer, mask) = (&self.layers[i], back.mask);
        // MLP block.
        let dy = match &layer.post_mlp_norm {
            None => None,
            Some(norm) => {
                let y = back.take("mlp");
                let mut dy = back.stream_norm(norm, &y, &dsum)?;
                back.see(Some(i), "dmlp", &mut dy)?;
                Some(dy)
            }
        };
        let dy = dy.as_ref().unwrap_or(&dsum);
        let (a, x) = (back.take("mlp_norm"), back.take("attention_sum"));
        let mut da = match &layer.mlp {
            LayerMlp::Dense(mlp) => mlp.backward(back, 0, a.view(), dy.view(), mask)?,
            LayerMlp::Sparse(mixture) => mixture.backward(back, i, &a, dy)?,
        };
        back.see(Some(i), "dmlp_norm", &mut da)?;
        let mut dx = back.stream_sum(&layer.mlp_norm, &x, &da, &dsum)?;
        back.see(Some(i), "dattention_sum", &mut dx)?;

        // Attention block.
        let dy = match &layer.post_attention_norm {
            None => None,
            Some(norm) => {
                let y = back.take("o");
                let mut dy = back.stream_norm(norm, &y, &dx)?;
                back.see(Some(i), "do", &mut dy)?;
                Some(dy)
            }
        };
        let dy = dy.as_ref().unwrap_or(&dx);
        let (lse, heads) = (back.take("lse"), back.take("attention"));
        let (v, k, q) = (back.take("v"), back.take("k"), back.take("q"));
        let (a, x) = (back.take("input_norm"), back.take("sum"));
        let mut dheads = layer.o.backward(back, 0, heads.view(), dy.view(), mask, self.dtype)?;
        back.see(Some(i), "dattention", &mut dheads)?;
        let mut dqkv = back.attention(i, &Qkv { q, k, v }, [&heads, &lse, &dheads])?;
        for (site, values) in [("dq", &mut dqkv.q), ("dk", &mut dqkv.k), ("dv", &mut dqkv.v)] {
            back.see(Some(i), site, values)?;
        }
        let mut da = layer.projections.backward(back, dqkv, &a)?;
        back.see(Some(i), "dinput_norm", &mut da)?;
        let mut dx = back.stream_sum(&layer.input_norm, &x, &da, &dx)?;
        match i.checked_sub(1) {
            Some(before) => back.see(Some(before), "dsum", &mut dx)?,
            None => back.see(None, "dembed", &mut dx)?,
        }
        Ok(dx)
    }

    /// From that of the residual stream before the first layer.
    pub fn embed_backward(&self, back: &mut Backward, tokens: &[i32], mut dx: Tensor) -> Result<(), ModelError> {
        if let Some(factor) = &self.attributes.embed_scale {
            let mut scaled = back.pass.empty(DType::Fp32, dx.shape())?;
            back.pass.op("scale", factor, &[("x", dx.view())], [("y", scaled.view_mut())])?;
            dx = scaled;
        }
        let hidden = self.config.hidden;
        let (dw, rows) = back.sums.table(Of::table(&format!("{TABLE}.weight")), hidden, tokens)?;
        let dx = dx.as_slice::<f32>().expect("it is f32, and on the host");
        Ok(embedding_dw(back.cpu, hidden, dx, &rows, Some(back.mask), dw)?)
    }
}

/// Rows of logits that are there at a time.
const TILE: usize = 256;

/// n rows, a tile at a time.
fn tiles(n: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(TILE).map(move |first| first..n.min(first + TILE))
}
