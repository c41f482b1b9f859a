//! Latent attention: keys and values of all heads are made from one short vector per token.
//!
//! A head has a nope part, which carries no position, and a rotary part; that of the keys is one for all heads. Matrices
//! are cut by rows as those of attention are.

use super::attend::{self, Attended};
use super::heads::{Rope, Rotation};
use super::indexer::{self, Indexer};
use super::linear::Linear;
use super::loader::Loader;
use super::norm::{self, Norm};
use super::{SIZES, WIDTH, is_size};
use crate::ModelError;
use crate::backward::Backward;
use crate::machine::{concat, split};
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use samebits_ops::device::Device;
use samebits_ops::{Cpu, DType, Tensor};

/// What a latent attention is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Its heads, whose keys have a nope part and a rotary part.
    pub heads: attend::Heads,
    /// How a rotary part is rotated, the same for all heads of a key.
    pub rope: Rope,
    /// Elements of the vector that queries are made from; `None` when they are made from the residual stream.
    pub q_rank: Option<usize>,
    /// Elements of the vector that keys and values are made from.
    pub kv_rank: usize,
    /// Elements of a key that carry no position.
    pub nope: usize,
    /// Biases on the projections down to the short vectors and on the output projection.
    pub bias: bool,
    /// What chooses the keys that a query sees; `None` where it sees all.
    pub indexer: Option<indexer::Plan>,
}

impl Plan {
    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, tables: &[Rotary]) -> Result<(), &'static str> {
        let &Plan { nope, rope, q_rank, kv_rank, .. } = self;
        self.heads.check()?;
        rope.check(self.heads.key_dim, tables)?;
        self.indexer.map_or(Ok(()), |indexer| indexer.check(tables))?;
        if self.hidden != hidden {
            Err(WIDTH)
        } else if !(q_rank.is_none_or(is_size) && is_size(kv_rank) && is_size(nope) && is_size(rope.dim)) {
            Err(SIZES)
        } else if nope + rope.dim != self.heads.key_dim || self.heads.keys != self.heads.queries {
            Err("heads are as wide as the parts of latent attention")
        } else if self.indexer.is_some() && (q_rank.is_none() || self.heads.window.or(self.heads.chunk).is_some()) {
            Err("an indexer reads the vector that queries are made from, and chooses among all keys")
        } else {
            Ok(())
        }
    }
}

/// The norms of the short vectors have an epsilon of their own.
const NORM: norm::Plan = norm::Plan::rms(1e-6);

pub(crate) struct LatentAttention {
    heads: attend::Heads,
    nope: usize,
    rotary: usize,
    /// Down to the short vector of the queries, and its norm.
    q_down: Option<(Linear, Norm)>,
    q_nope: Linear,
    q_rotary: Linear,
    kv_down: Linear,
    kv_norm: Norm,
    /// One for all heads.
    k_rotary: Linear,
    k_nope: Linear,
    v: Linear,
    o: Linear,
    rotation: Rotation,
    indexer: Option<Indexer>,
}

/// What a reverse pass reads, beside a.
pub(crate) struct Saved {
    /// The short vector of the queries before its norm, and behind it.
    q: Option<[Tensor; 2]>,
    /// That of keys and values.
    kv: [Tensor; 2],
    attended: Attended,
}

impl LatentAttention {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<LatentAttention, ModelError> {
        let &Plan { hidden, rope, q_rank, kv_rank, nope, bias, .. } = plan;
        let (heads, rotation, rotary) = (plan.heads.clone(), Rotation::new(&rope), rope.dim);
        let (count, value_dim) = (heads.queries, heads.value_dim);
        let q_down = match q_rank {
            None => None,
            Some(rank) => {
                let down = loader.linear("self_attn.q_a_proj", rank, hidden, bias)?;
                Some((down, Norm::load(loader, "self_attn.q_a_layernorm", rank, &NORM)?))
            }
        };
        let up = if q_down.is_some() { "self_attn.q_b_proj" } else { "self_attn.q_proj" };
        let [q_nope, q_rotary] = loader.parts(up, count, [nope, rotary], q_rank.unwrap_or(hidden), false)?;
        let [kv_down, k_rotary] = loader.parts("self_attn.kv_a_proj_with_mqa", 1, [kv_rank, rotary], hidden, bias)?;
        let kv_norm = Norm::load(loader, "self_attn.kv_a_layernorm", kv_rank, &NORM)?;
        let [k_nope, v] = loader.parts("self_attn.kv_b_proj", count, [nope, value_dim], kv_rank, false)?;
        let o = loader.linear("self_attn.o_proj", hidden, count * value_dim, bias)?;
        let of_indexer = |plan| Indexer::load(loader, plan, [hidden, q_rank.unwrap_or(hidden)]);
        let indexer = plan.indexer.as_ref().map(of_indexer).transpose()?;
        Ok(LatentAttention {
            heads,
            nope,
            rotary,
            q_down,
            q_nope,
            q_rotary,
            kv_down,
            kv_norm,
            k_rotary,
            k_nope,
            v,
            o,
            rotation,
            indexer,
        })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        if let Some((down, norm)) = &mut self.q_down {
            down.move_to(cpu, device)?;
            norm.move_to(device)?;
        }
        self.kv_norm.move_to(device)?;
        self.indexer.as_mut().map_or(Ok(()), |indexer| indexer.move_to(cpu, device))?;
        let LatentAttention { q_nope, q_rotary, kv_down, k_rotary, k_nope, v, o, .. } = self;
        [q_nope, q_rotary, kv_down, k_rotary, k_nope, v, o].into_iter().try_for_each(|part| part.move_to(cpu, device))
    }

    pub fn state(&self) -> Kind {
        let Kind::Paged(mut widths) = self.heads.state() else { unreachable!("heads have pages") };
        widths.extend(self.indexer.as_ref().map(Indexer::width));
        Kind::Paged(widths)
    }

    /// `a[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        a: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let (n, heads, dtype, nope, rotary) = (a.shape()[0], self.heads.queries, pass.dtype, self.nope, self.rotary);
        let q_short = match &self.q_down {
            None => None,
            Some((down, norm)) => Some(short(pass, down, norm, a)?),
        };
        let from = q_short.as_ref().map_or(a, |[_, short]| short);
        let q_nope = self.q_nope.apply(pass, from.view(), dtype)?;
        let q_raw = self.q_rotary.apply(pass, from.view(), DType::Fp32)?;
        let (q_rotary, _) = self.rotation.forward(pass, q_raw, [n, heads, rotary], 0)?;
        let kv = short(pass, &self.kv_down, &self.kv_norm, a)?;
        let k_raw = self.k_rotary.apply(pass, a.view(), DType::Fp32)?;
        let (k_rotary, _) = self.rotation.forward(pass, k_raw, [n, 1, rotary], 0)?;
        let k_nope = self.k_nope.apply(pass, kv[1].view(), dtype)?;
        let q = concat(pass.machine, n * heads, (&q_nope, nope, 1), (&q_rotary, rotary, 1))?;
        let k = concat(pass.machine, n * heads, (&k_nope, nope, 1), (&k_rotary, rotary, heads))?;
        let v = self.v.apply(pass, kv[1].view(), dtype)?;
        let chosen = match (&self.indexer, state.pages()) {
            (Some(indexer), [_, _, keys]) => indexer.forward(pass, keys, [a, from])?,
            _ => None,
        };
        let attended = self.heads.forward(pass, state, (q, Some([k, v])), None, chosen.as_ref())?;
        self.o.apply_to(pass, 0, attended.heads.view(), y.view_mut())?;
        Ok(attended.keep(pass).map(|attended| Saved { q: q_short, kv, attended }))
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (Saved { q: q_short, kv: [kv_raw, kv], attended }, mask, f32) = (saved, back.mask, DType::Fp32);
        let (n, heads, nope, rotary) = (a.shape()[0], self.heads.queries, self.nope, self.rotary);
        let mut dheads = self.o.backward(back, 0, attended.heads.view(), dy.view(), mask, back.pass.dtype)?;
        back.see("dattention", &mut dheads)?;
        let dqkv = self.heads.backward(back, attended, None, &dheads)?;
        let [dq_nope, dq_rotary] = split(back.pass.machine, [n, heads], &dqkv.q, [nope, rotary])?;
        let [dk_nope, dk_rotary] = split(back.pass.machine, [n, heads], &dqkv.k, [nope, rotary])?;

        let from = q_short.as_ref().map_or(a, |[_, short]| short);
        let dq_raw = self.rotation.backward(back, None, &dq_rotary, [n, heads, rotary], 0)?;
        let from_nope = self.q_nope.backward(back, 0, from.view(), dq_nope.view(), mask, f32)?;
        let from_rotary = self.q_rotary.backward(back, 0, from.view(), dq_raw.view(), mask, f32)?;
        let mut from_q = back.sum(from_nope, from_rotary)?;
        if let (Some((down, norm)), Some([raw, _])) = (&self.q_down, &q_short) {
            let draw = norm.backward(back, raw, &from_q)?;
            from_q = down.backward(back, 0, a.view(), draw.view(), mask, f32)?;
        }

        let from_k_nope = self.k_nope.backward(back, 0, kv.view(), dk_nope.view(), mask, f32)?;
        let from_v = self.v.backward(back, 0, kv.view(), dqkv.v.view(), mask, f32)?;
        let dkv = back.sum(from_k_nope, from_v)?;
        let dkv_raw = self.kv_norm.backward(back, &kv_raw, &dkv)?;
        let from_kv = self.kv_down.backward(back, 0, a.view(), dkv_raw.view(), mask, f32)?;

        let dk_rotary = back.sum_of_heads(&dk_rotary, [n, heads, rotary])?;
        let dk_raw = self.rotation.backward(back, None, &dk_rotary, [n, 1, rotary], 0)?;
        let from_k_rotary = self.k_rotary.backward(back, 0, a.view(), dk_raw.view(), mask, f32)?;
        let sum = back.sum(from_q, from_kv)?;
        back.sum(sum, from_k_rotary)
    }
}

/// A short vector before its norm, and behind it.
fn short(pass: &mut Pass, down: &Linear, norm: &Norm, a: &Tensor) -> Result<[Tensor; 2], ModelError> {
    let raw = down.apply(pass, a.view(), DType::Fp32)?;
    let mut y = pass.empty(pass.dtype, raw.shape())?;
    norm.forward(pass, &raw, &mut y)?;
    Ok([raw, y])
}
