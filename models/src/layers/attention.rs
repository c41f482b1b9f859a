//! Attention whose queries, keys and values have projections of their own.
//!
//! Matrices are cut by rows when they are loaded, so that the rotary part of a head comes out in f32 and is rounded after
//! its rotation, and everything else is rounded once by its product; joining the parts of a head only copies.
//!
//! The keys and values of a block may be those of an earlier one: the gradients of all that read them are added from the last block to
//! the first.

use super::WIDTH;
use super::arithmetic::{self, gated_backward};
use super::attend::{self, Attended, Qkv};
use super::heads::{Heads, QkNorm, Rope, Rotation};
use super::linear::Linear;
use super::loader::Loader;
use super::norm::{self, Vector};
use super::values::{self, Gradient, Values};
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use samebits_ops::device::Device;
use samebits_ops::{Cpu, DType, Tensor};

/// What an attention is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Its heads.
    pub heads: attend::Heads,
    /// How queries and keys are rotated.
    pub rope: Rope,
    /// The number of the table that queries are rotated by, where it is not that of keys.
    pub q_table: Option<usize>,
    /// The norms of queries and keys.
    pub norm: Option<QkNorm>,
    /// Biases on the query, key and value projections.
    pub bias: bool,
    /// A bias on the output projection.
    pub o_bias: bool,
    /// The name of the logits, one for each query head, that join the softmax and have no value, where there are any.
    pub sinks: Option<&'static str>,
    /// Whether heads are multiplied with the sigmoids of gates, whose projection stands behind that of each query.
    pub gate: bool,
    /// What values are made of.
    pub values: values::Plan,
    /// The number of the block whose keys and values it reads; `None` for those of its own.
    pub lender: Option<usize>,
    /// The names of its tensors.
    pub names: Names,
}

/// Names of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// The projections.
    pub qkv: QkvNames,
    /// The output projection.
    pub o: &'static str,
    /// The norms of queries and keys.
    pub norms: [&'static str; 2],
}

/// Names of the query, key and value projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkvNames {
    /// A matrix each.
    Each([&'static str; 3]),
    /// One matrix.
    Fused(&'static str),
    /// One matrix, in which a head has its query, its key and its value one behind the other.
    ByHead(&'static str),
}

impl Names {
    /// What most families call them.
    pub const PLAIN: Names = Names {
        qkv: QkvNames::Each(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        o: "self_attn.o_proj",
        norms: ["self_attn.q_norm", "self_attn.k_norm"],
    };
}

impl Plan {
    /// How queries are rotated.
    fn q_rope(&self) -> Rope {
        Rope { table: self.q_table.unwrap_or(self.rope.table), ..self.rope }
    }

    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, tables: &[Rotary]) -> Result<(), &'static str> {
        if self.hidden != hidden {
            return Err(WIDTH);
        }
        let is_partial = self.rope.dim != self.heads.key_dim;
        if self.norm.is_some() && is_partial && !matches!(self.names.qkv, QkvNames::Each(_)) {
            return Err("heads with a norm that are rotated in part have projections of their own");
        }
        if self.norm.is_some_and(|qk| qk.norm.kind != norm::Kind::Rms) {
            return Err("norms of queries and keys are RMS norms");
        }
        if self.gate && (!matches!(self.names.qkv, QkvNames::Each(_)) || self.heads.value_dim != self.heads.key_dim) {
            return Err("heads behind gates have projections of their own, and values as wide as queries");
        }
        if matches!(self.names.qkv, QkvNames::ByHead(_)) && self.heads.queries != self.heads.keys {
            return Err("heads of one matrix have a query, a key and a value each");
        }
        if self.q_table.is_some() && is_partial {
            return Err("queries with a table of their own are rotated as a whole");
        }
        let values::Plan { of_keys, norm } = self.values;
        let special = of_keys || norm.is_some() || self.lender.is_some();
        if special && (!matches!(self.names.qkv, QkvNames::Each(_)) || is_partial || self.gate) {
            return Err(
                "values with a norm or of another projection are those of plain projections, rotated as a whole",
            );
        }
        let raw_keys = self.norm.is_some_and(|qk| !qk.behind) && norm.is_some_and(|norm| norm.kind == norm::Kind::Rms);
        if of_keys && (self.heads.value_dim != self.heads.key_dim || !raw_keys) {
            return Err("values of the projection of the keys are as wide, and both have norms before all else");
        }
        self.heads.check()?;
        self.q_rope().check(self.heads.key_dim, tables)?;
        self.rope.check(self.heads.key_dim, tables)
    }
}

pub(crate) struct Attention {
    heads: attend::Heads,
    q: Heads,
    kv: KeysValues,
    o: Linear,
    sinks: Option<Vector>,
    gate: Option<Linear>,
}

/// Where its keys and values come from.
enum KeysValues {
    Own(Box<(Heads, Values)>),
    Of(usize),
}

/// What a reverse pass reads, beside a.
pub(crate) struct Saved {
    /// Heads before their norm.
    q_raw: Option<Tensor>,
    k_raw: Option<Tensor>,
    /// Values before theirs.
    v_raw: Option<Tensor>,
    attended: Attended,
    gated: Option<Gated>,
}

/// What the reverse pass of gates reads: their logits, heads in f32, and the product, as the last projection reads it.
struct Gated {
    logits: Tensor,
    heads: Tensor,
    product: Tensor,
}

impl Attention {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<Attention, ModelError> {
        let &Plan { hidden, rope, bias, names, .. } = plan;
        let heads = plan.heads.clone();
        let (d, [q_width, k_width, v_width, o_width]) = (heads.key_dim, heads.widths());
        let (rotary, nope) = (rope.dim, d - rope.dim);
        let [q_rope, k_rope] = [plan.q_rope(), rope];
        let whole = |rope, count, projection| Heads::new(count, rotary, projection, Rotation::new(&rope));
        let all = |rope, count, projection| Heads::new(count, d, projection, Rotation::new(&rope)).passing(nope);
        if let (Some(lender), QkvNames::Each([q, ..])) = (plan.lender, names.qkv) {
            let mut q = whole(q_rope, heads.queries, loader.linear(q, q_width, hidden, bias)?);
            if let Some(norm) = &plan.norm {
                q = q.with_norm(loader, names.norms[0], norm)?;
            }
            let o = loader.linear(names.o, hidden, o_width, plan.o_bias)?;
            let sinks = plan.sinks.map(|name| loader.vector(name, heads.queries)).transpose()?;
            return Ok(Attention { heads, q, kv: KeysValues::Of(lender), o, sinks, gate: None });
        }
        let mut gate = None;
        let (mut q, mut k, v) = match names.qkv {
            QkvNames::Each([q_name, k_name, v_name]) if plan.gate => {
                let [q, of_gates] = loader.parts(q_name, heads.queries, [d, d], hidden, bias)?;
                let [k, v] = [(k_name, k_width), (v_name, v_width)]
                    .map(|(name, width)| loader.linear(name, width, hidden, bias));
                gate = Some(of_gates);
                (all(q_rope, heads.queries, q), all(k_rope, heads.keys, k?), Some(v?))
            }
            // A norm sees all elements of a head, so they come of one projection.
            QkvNames::Each([q, k, v]) if nope == 0 || plan.norm.is_some() => {
                let mut linear = |name, width| loader.linear(name, width, hidden, bias);
                let (q, k) = (linear(q, q_width)?, linear(k, k_width)?);
                let v = if plan.values.of_keys { None } else { Some(linear(v, v_width)?) };
                (all(q_rope, heads.queries, q), all(k_rope, heads.keys, k), v)
            }
            QkvNames::Each([q, k, v]) => {
                let mut cut = |rope, name, count| -> Result<Heads, ModelError> {
                    let [rotated, passed] = loader.parts(name, count, [rotary, nope], hidden, bias)?;
                    Ok(whole(rope, count, rotated).with_nope(passed, nope))
                };
                let (q, k) = (cut(q_rope, q, heads.queries)?, cut(k_rope, k, heads.keys)?);
                (q, k, Some(loader.linear(v, v_width, hidden, bias)?))
            }
            QkvNames::ByHead(name) if nope == 0 => {
                let [q, k, v] = loader.parts(name, heads.keys, [d, d, heads.value_dim], hidden, bias)?;
                (whole(q_rope, heads.queries, q), whole(k_rope, heads.keys, k), Some(v))
            }
            QkvNames::ByHead(name) => {
                let widths = [rotary, nope, rotary, nope, heads.value_dim];
                let [q, q_nope, k, k_nope, v] = loader.parts(name, heads.keys, widths, hidden, bias)?;
                let (q, k) = (whole(q_rope, heads.queries, q), whole(k_rope, heads.keys, k));
                (q.with_nope(q_nope, nope), k.with_nope(k_nope, nope), Some(v))
            }
            QkvNames::Fused(name) if nope == 0 => {
                let [q, k, v] = loader.parts(name, 1, [q_width, k_width, v_width], hidden, bias)?;
                (whole(q_rope, heads.queries, q), whole(k_rope, heads.keys, k), Some(v))
            }
            QkvNames::Fused(name) => {
                // Query, key and value heads one behind the other, as if they were heads of one matrix.
                let all = loader.stored(name, q_width + k_width + v_width, hidden)?;
                let mut cut = |rope, first, count| -> Result<Heads, ModelError> {
                    let [rotated, passed] = loader.cut(name, &all, None, first, count, [rotary, nope])?;
                    Ok(whole(rope, count, rotated).with_nope(passed, nope))
                };
                let (q, k) = (cut(q_rope, 0, heads.queries)?, cut(k_rope, q_width, heads.keys)?);
                let [v] = loader.cut(name, &all, None, q_width + k_width, heads.keys, [heads.value_dim])?;
                (q, k, Some(v))
            }
        };
        if let Some(norm) = &plan.norm {
            q = q.with_norm(loader, names.norms[0], norm)?;
            k = k.with_norm(loader, names.norms[1], norm)?;
        }
        let o = loader.linear(names.o, hidden, o_width, plan.o_bias)?;
        let sinks = plan.sinks.map(|name| loader.vector(name, heads.queries)).transpose()?;
        let v = Values::new(v, &plan.values, &heads)?;
        Ok(Attention { heads, q, kv: KeysValues::Own(Box::new((k, v))), o, sinks, gate })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.q.move_to(cpu, device)?;
        if let KeysValues::Own(own) = &mut self.kv {
            own.0.move_to(cpu, device)?;
            own.1.move_to(cpu, device)?;
        }
        self.sinks.as_mut().map_or(Ok(()), |sinks| sinks.move_to(device))?;
        self.gate.as_mut().map_or(Ok(()), |gate| gate.move_to(cpu, device))?;
        self.o.move_to(cpu, device)
    }

    pub fn state(&self) -> Kind {
        match self.kv {
            KeysValues::Own(_) => self.heads.state(),
            KeysValues::Of(_) => Kind::None,
        }
    }

    /// The block whose keys and values it reads, where these are not its own: the state of that is its state.
    pub fn lender(&self) -> Option<usize> {
        match self.kv {
            KeysValues::Own(_) => None,
            KeysValues::Of(lender) => Some(lender),
        }
    }

    /// `a[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        a: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let (q, q_raw) = self.q.forward(pass, a)?;
        let (mut kv, mut k_raw, mut v_raw) = (None, None, None);
        if let KeysValues::Own(own) = &self.kv {
            let (keys, values) = &**own;
            let raw = keys.project(pass, a)?;
            let (v, of_norm) = values.forward(pass, a, &raw)?;
            let (k, of_keys) = keys.forward_of(pass, a, raw)?;
            (kv, k_raw, v_raw) = (Some([k, v]), of_keys, of_norm);
        }
        let attended = self.heads.forward(pass, state, (q, kv), self.sinks.as_ref(), None)?;
        let gated = match &self.gate {
            None => None,
            Some(gate) => Some(Gated::forward(pass, gate, a, &attended.heads)?),
        };
        let heads = gated.as_ref().map_or(&attended.heads, |gated| &gated.product);
        self.o.apply_to(pass, 0, heads.view(), y.view_mut())?;
        Ok(attended.keep(pass).map(|attended| Saved { q_raw, k_raw, v_raw, attended, gated }))
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (Saved { q_raw, k_raw, v_raw, attended, gated }, mask, dtype) = (saved, back.mask, back.pass.dtype);
        let (mut dheads, from_gate) = match (&self.gate, gated) {
            (Some(gate), Some(gated)) => {
                let dproduct = self.o.backward(back, 0, gated.product.view(), dy.view(), mask, DType::Fp32)?;
                let (dheads, from_gate) = gated.backward(back, gate, a, &dproduct)?;
                (dheads, Some(from_gate))
            }
            _ => (self.o.backward(back, 0, attended.heads.view(), dy.view(), mask, dtype)?, None),
        };
        back.see("dattention", &mut dheads)?;
        let Qkv { q: dq, k: dk, v: dv } = self.heads.backward(back, attended, self.sinks.as_ref(), &dheads)?;
        let from_q = self.q.backward(back, a, (q_raw, None), dq)?;
        let sum = match &self.kv {
            KeysValues::Of(lender) => {
                back.add_lent(*lender, [dk, dv])?;
                from_q
            }
            KeysValues::Own(own) => {
                let (keys, values) = &**own;
                let [dk, dv] = back.with_lent([dk, dv])?;
                match values.backward(back, a, v_raw.as_ref().or(k_raw.as_ref()), dv)? {
                    Gradient::Keys(more) => {
                        let from_k = keys.backward(back, a, (k_raw, Some(more)), dk)?;
                        back.sum(from_q, from_k)?
                    }
                    Gradient::Input(from_v) => {
                        let from_k = keys.backward(back, a, (k_raw, None), dk)?;
                        let sum = back.sum(from_q, from_k)?;
                        back.sum(sum, from_v)?
                    }
                }
            }
        };
        match from_gate {
            Some(from_gate) => back.sum(sum, from_gate),
            None => Ok(sum),
        }
    }
}

impl Gated {
    /// From `a[n,hidden]` and `heads[n,Hq * E]`, as products read them.
    fn forward(pass: &mut Pass, gate: &Linear, a: &Tensor, heads: &Tensor) -> Result<Gated, ModelError> {
        let mut logits = gate.apply(pass, a.view(), DType::Fp32)?;
        pass.see("attention_gate", &mut logits)?;
        let mut wide = pass.empty(DType::Fp32, heads.shape())?;
        // All that products read are numbers of f32.
        pass.round(heads, &mut wide)?;
        let product = arithmetic::gated(pass, &logits, &wide, pass.dtype)?;
        Ok(Gated { logits, heads: wide, product })
    }

    /// From `dy` of the product in f32: that of heads, as attention reads it, and that of a, in f32.
    fn backward(
        self,
        back: &mut Backward,
        gate: &Linear,
        a: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, Tensor), ModelError> {
        let [mut dgate, dwide] = gated_backward(&mut back.pass, &self.logits, &self.heads, dy)?;
        back.see("dattention_gate", &mut dgate)?;
        let mut dheads = back.pass.empty(back.pass.dtype, dwide.shape())?;
        back.pass.round(&dwide, &mut dheads)?;
        let from_gate = gate.backward(back, 0, a.view(), dgate.view(), back.mask, DType::Fp32)?;
        Ok((dheads, from_gate))
    }
}
