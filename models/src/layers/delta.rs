//! Linear attention by the gated delta rule: `out(norm(rule(q, k, v)) * f(z))`, f silu or a sigmoid. q, k and v are projections of what enters that
//! have gone through causal convolutions and a silu ([`stream`]), q and k of length 1 in each head; z, decays and betas are
//! projections too. What it keeps of a sequence is the last rows that each convolution reads, and the state of the rule.
//!
//! All between the first projections and the last is f32, and rounded once where the last reads it.

mod projection;
mod readout;
mod stream;

use super::arithmetic::{gated, gated_backward, rows};
use super::causal_conv::CausalConv;
use super::linear::Linear;
use super::loader::Loader;
use super::narrow::{Between, Narrow};
use super::norm::{self, Vector};
use super::recur::{self, Kept};
use super::unit::Unit;
use super::{SIZES, WIDTH, is_size};
use crate::ModelError;
use crate::backward::{Backward, Block};
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use crate::sums::Of;
use projection::Projection;
use readout::Readout;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, Cpu, DType, Tensor, TensorRef};
use stream::Stream;

/// What is added to the square of a head's length.
const EPS: f64 = 1e-6;

/// What a gated delta rule is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of those.
    pub value_heads: usize,
    /// Elements of a query and of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Positions that an output of a convolution sees: its own and those before.
    pub taps: usize,
    /// The largest beta: 1, or 2 where a state may be turned around.
    pub largest_beta: f64,
    /// Whether each element of a key has a decay of its own, and not all of a head one.
    pub by_channel: bool,
    /// The norm of each head before the gate.
    pub norm: norm::Plan,
    /// What the gate is of z.
    pub gate: Gate,
    /// The names of its tensors.
    pub names: Names,
}

/// What the gate of heads is of its projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `silu(z)`
    Silu,
    /// `sigmoid(z)`
    Sigmoid,
}

/// Names of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// One projection of q, k, v and z, and one of betas and decays, in both of which a key head and its value heads stand
    /// together; one convolution. Qwen3-Next has them.
    ByKeyHead,
    /// One projection of q, k and v, one behind the other, and those of z, betas and decays; one convolution. Qwen3.5 has them.
    Streams,
    /// Projections and convolutions of their own. OLMo Hybrid has them.
    Each,
    /// The same, but for decays and gates, which have two narrow matrices each. Kimi Linear has them.
    Narrow,
}

impl Plan {
    /// Elements of all heads of q, of k and of v.
    fn widths(&self) -> [usize; 3] {
        let keys = self.key_heads * self.key_dim;
        [keys, keys, self.value_heads * self.value_dim]
    }

    /// Decays of a head.
    fn decays(&self) -> usize {
        if self.by_channel { self.key_dim } else { 1 }
    }

    /// The name of a tensor.
    fn name(&self, part: &str) -> String {
        let block = if self.names == Names::Narrow { "self_attn" } else { "linear_attn" };
        format!("{block}.{part}")
    }

    /// The axes of q and k, of v, of what decays come of, and of betas, behind the tokens.
    fn axes(&self) -> ([usize; 2], [usize; 2], [usize; 2], [usize; 1]) {
        let &Plan { key_heads, value_heads, key_dim, value_dim, .. } = self;
        ([key_heads, key_dim], [value_heads, value_dim], [value_heads, self.decays()], [value_heads])
    }

    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, _: &[Rotary]) -> Result<(), &'static str> {
        let &Plan { key_heads, value_heads, key_dim, value_dim, taps, .. } = self;
        let product =
            |sizes: &[usize]| sizes.iter().try_fold(1usize, |all, n| all.checked_mul(*n)).is_some_and(is_size);
        // One convolution may take all of them.
        let keys = key_heads.saturating_mul(key_dim).saturating_mul(2);
        let channels = keys.saturating_add(value_heads.saturating_mul(value_dim));
        match () {
            _ if self.hidden != hidden => Err(WIDTH),
            _ if !product(&[value_heads, key_dim, value_dim]) || !product(&[channels, taps]) => Err(SIZES),
            _ if !is_size(key_heads) || !value_heads.is_multiple_of(key_heads) => {
                Err("value heads are a multiple of key heads")
            }
            _ if self.norm.kind != norm::Kind::Rms => Err("the norm of heads is an RMS norm"),
            _ if !(self.largest_beta > 0.0 && self.largest_beta <= 2.0) => Err("betas are at most 2"),
            _ => Ok(()),
        }
    }

    /// The projections of q, k and v, and those of z, b and a.
    fn projections(&self, loader: &mut Loader) -> Result<Projections, ModelError> {
        let &Plan { hidden, key_heads, value_heads, key_dim, value_dim, names, .. } = self;
        let [q, k, v] = self.widths();
        match names {
            Names::ByKeyHead => {
                let shared = value_heads / key_heads;
                let widths = [key_dim, key_dim, shared * value_dim, shared * value_dim];
                let [q, k, v, z] = loader.parts("linear_attn.in_proj_qkvz", key_heads, widths, hidden, false)?;
                let [b, a] = loader.parts("linear_attn.in_proj_ba", key_heads, [shared; 2], hidden, false)?;
                Ok(([q, k, v], (Projection::One(z), b, Projection::One(a))))
            }
            Names::Streams => {
                let streams = loader.parts("linear_attn.in_proj_qkv", 1, [q, k, v], hidden, false)?;
                let mut one = |part: &str, n| loader.linear(&format!("linear_attn.in_proj_{part}"), n, hidden, false);
                let [z, b, a] = [one("z", v)?, one("b", value_heads)?, one("a", value_heads)?];
                Ok((streams, (Projection::One(z), b, Projection::One(a))))
            }
            Names::Each => {
                let mut one = |part: &str, n| loader.linear(&format!("linear_attn.{part}_proj"), n, hidden, false);
                let streams = [one("q", q)?, one("k", k)?, one("v", v)?];
                let [z, b, a] = [one("g", v)?, one("b", value_heads)?, one("a", value_heads)?];
                Ok((streams, (Projection::One(z), b, Projection::One(a))))
            }
            Names::Narrow => {
                let mut one = |part: &str, n| loader.linear(&format!("self_attn.{part}_proj"), n, hidden, false);
                let (streams, b) = ([one("q", q)?, one("k", k)?, one("v", v)?], one("b", value_heads)?);
                let mut two = |part: &str, rank, width| {
                    let names = ["a", "b"].map(|place| format!("self_attn.{part}_{place}_proj"));
                    let narrow = Narrow::load(loader, names, [hidden, rank, width], Between::Nothing, (false, false))?;
                    Ok::<_, ModelError>(Projection::Two(Box::new(narrow)))
                };
                let decays = two("f", key_dim, value_heads * self.decays())?;
                Ok((streams, (two("g", value_dim, v)?, b, decays)))
            }
        }
    }
}

pub(crate) struct DeltaRule {
    plan: Plan,
    /// Of q, of k and of v.
    streams: [Stream; 3],
    length_one: Unit,
    /// The projection to what decays come of.
    a: Projection,
    a_log: Vector,
    dt_bias: Vector,
    /// The projection to what betas come of, and a row of the largest beta.
    b: Linear,
    largest: Tensor,
    readout: Readout,
    out: Linear,
}

/// What a reverse pass reads, beside what entered.
pub(crate) struct Saved {
    streams: [stream::Made; 3],
    q: Tensor,
    k: Tensor,
    a: Tensor,
    of_a: projection::Saved,
    b: Tensor,
    beta: Tensor,
    readout: readout::Made,
}

/// The projections of q, k and v, and those of z, b and a.
type Projections = ([Linear; 3], (Projection, Linear, Projection));

impl DeltaRule {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<DeltaRule, ModelError> {
        let &Plan { hidden, value_heads, key_dim, value_dim, taps, names, .. } = plan;
        let widths @ [_, _, values] = plan.widths();
        let name = |part: &str| plan.name(part);
        let ([q, k, v], (z, b, a)) = plan.projections(loader)?;
        let [of_q, of_k, of_v] = match names {
            Names::ByKeyHead | Names::Streams => CausalConv::parts(loader, &name("conv1d"), widths, taps)?,
            Names::Each | Names::Narrow => {
                let mut one = |part, width| CausalConv::load(loader, &name(part), [width, taps], false);
                [one("q_conv1d", widths[0])?, one("k_conv1d", widths[1])?, one("v_conv1d", widths[2])?]
            }
        };
        let streams = [
            Stream::new(0, widths[0], q, of_q)?,
            Stream::new(1, widths[1], k, of_k)?,
            Stream::new(2, widths[2], v, of_v)?,
        ];
        let own = matches!(names, Names::Each | Names::Narrow);
        let [norm, out] = if own { ["o_norm", "o_proj"] } else { ["norm", "out_proj"] };
        let rates: &[usize] = if names == Names::Narrow { &[1, 1, value_heads, 1] } else { &[value_heads] };
        let largest = vec![plan.largest_beta as f32; value_heads];
        Ok(DeltaRule {
            streams,
            length_one: Unit::new(key_dim, EPS)?,
            a,
            a_log: loader.tensor(&name("A_log"), rates)?,
            dt_bias: loader.vector(&name("dt_bias"), value_heads * plan.decays())?,
            b,
            largest: Tensor::new(largest, &[1, value_heads])?,
            readout: Readout {
                z,
                norm: loader.vector(&name(&format!("{norm}.weight")), value_dim)?,
                plan: plan.norm,
                gate: plan.gate,
            },
            out: loader.linear(&name(out), hidden, values, false)?,
            plan: plan.clone(),
        })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        let DeltaRule { plan: _, streams, length_one, a, a_log, dt_bias, b, largest, readout, out } = self;
        streams.iter_mut().try_for_each(|stream| stream.move_to(cpu, device))?;
        [b, out].into_iter().try_for_each(|linear| linear.move_to(cpu, device))?;
        a.move_to(cpu, device)?;
        [a_log, dt_bias].into_iter().try_for_each(|vector| vector.move_to(device))?;
        length_one.move_to(device)?;
        *largest = Backend::upload(device, largest.view())?;
        readout.move_to(cpu, device)
    }

    pub fn state(&self) -> Kind {
        let Plan { value_heads, key_dim, value_dim, .. } = self.plan;
        let convs = self.streams.iter().map(Stream::state_width);
        Kind::Recurrent(convs.chain([value_heads * key_dim * value_dim]).collect())
    }

    /// The parameters of the rule.
    fn parameters(&self) -> Result<[(&'static str, TensorRef<'_>); 2], ModelError> {
        let heads = self.plan.value_heads;
        let bias = self.dt_bias.w.view_as(&[heads, self.plan.decays()])?;
        Ok([("a_log", self.a_log.w.view_as(&[heads])?), ("dt_bias", bias)])
    }

    /// `a[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        entered: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let (f32, [of_q, of_k, of_v]) = (DType::Fp32, &self.streams);
        let streams = [
            of_q.forward(pass, state, entered)?,
            of_k.forward(pass, state, entered)?,
            of_v.forward(pass, state, entered)?,
        ];
        let q = self.length_one.forward(pass, &streams[0].active)?;
        let k = self.length_one.forward(pass, &streams[1].active)?;
        let (a, of_a) = self.a.forward(pass, entered)?;
        let b = self.b.apply(pass, entered.view(), f32)?;
        let largest = rows(pass, &self.largest, &b)?;
        let mut beta = gated(pass, &b, &largest, f32)?;
        pass.see("beta", &mut beta)?;

        let (v, mut rule) = (&streams[2].active, pass.empty(f32, streams[2].active.shape())?);
        let (of_k, of_v, of_g, of_beta) = self.plan.axes();
        let tokens =
            [("q", &q, &of_k[..]), ("k", &k, &of_k), ("v", v, &of_v), ("g", &a, &of_g), ("beta", &beta, &of_beta)];
        let of_state = [self.plan.value_heads, self.plan.key_dim, self.plan.value_dim];
        let kept = [Kept { part: self.streams.len(), names: ["state", "next"], axes: &of_state }];
        let op = ("gated_delta_rule", &Attributes::new());
        recur::forward(pass, state, op, &tokens, &self.parameters()?, &kept, ("y", &mut rule, &of_v))?;
        pass.see("rule", &mut rule)?;
        let readout = self.readout.forward(pass, entered, rule)?;
        self.out.apply_to(pass, 0, readout.gated.view(), y.view_mut())?;
        Ok(pass.keeps.then_some(Saved { streams, q, k, a, of_a, b, beta, readout }))
    }

    /// From `dy[n,hidden]` in f32: that of what entered, in f32.
    pub fn backward(
        &self,
        back: &mut Backward,
        entered: &Tensor,
        saved: Saved,
        dy: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let (mask, f32, s) = (back.mask, DType::Fp32, &saved);
        let dgated = self.out.backward(back, 0, s.readout.gated.view(), dy.view(), mask, f32)?;
        let [from_z, drule] = self.readout.backward(back, entered, &s.readout, &dgated)?;
        let [dq, dk, dv, da, dbeta] = self.rule_backward(back, s, &drule)?;
        let largest = rows(&back.pass, &self.largest, &s.b)?;
        let [db, _] = gated_backward(&mut back.pass, &s.b, &largest, &dbeta)?;
        let dq = self.length_one.backward(&mut back.pass, &s.streams[0].active, &dq)?;
        let dk = self.length_one.backward(&mut back.pass, &s.streams[1].active, &dk)?;

        let from_a = self.a.backward(back, entered, &s.of_a, &da)?;
        let from_b = self.b.backward(back, 0, entered.view(), db.view(), mask, f32)?;
        let mut sum = back.sum(from_a, from_b)?;
        sum = back.sum(sum, from_z)?;
        for ((stream, made), dactive) in self.streams.iter().zip(&s.streams).zip([dq, dk, dv]) {
            let from_stream = stream.backward(back, entered, made, &dactive)?;
            sum = back.sum(sum, from_stream)?;
        }
        Ok(sum)
    }

    /// From that of what the rule has read: those of q, k, v, a and beta; those of its parameters are added up.
    fn rule_backward(&self, back: &mut Backward, s: &Saved, drule: &Tensor) -> Result<[Tensor; 5], ModelError> {
        let (of_k, of_v, of_g, of_beta) = self.plan.axes();
        let tokens = [
            ("q", &s.q, &of_k[..]),
            ("k", &s.k, &of_k),
            ("v", &s.streams[2].active, &of_v),
            ("g", &s.a, &of_g),
            ("beta", &s.beta, &of_beta),
            ("dy", drule, &of_v),
        ];
        let ([q, k, v], heads) = (self.plan.widths(), self.plan.value_heads);
        let decays = heads * self.plan.decays();
        let widths = [q, k, v, decays, heads, heads];
        let made = recur::backward(back, &tokens, &widths, |back, block, given| self.of_block(back, block, given))?;
        let Ok([dq, dk, dv, da, dbeta, da_log]) = <[Tensor; 6]>::try_from(made) else {
            unreachable!("six were asked for")
        };
        for (vector, by_position) in [(&self.a_log, &da_log), (&self.dt_bias, &da)] {
            let of = (Of::whole(&vector.name), None, by_position.shape()[1]);
            back.add_vector(["token_sum", "sum"], &Attributes::new(), of, &[("x", by_position.view())], back.mask)?;
        }
        Ok([dq, dk, dv, da, dbeta])
    }

    /// Of the sequences of a block: the gradients of q, k, v, a and beta, and that of a_log by position.
    fn of_block(
        &self,
        back: &mut Backward,
        block: &Block,
        inputs: Vec<(&str, TensorRef)>,
    ) -> Result<Vec<Tensor>, ModelError> {
        let Plan { value_heads, key_dim, value_dim, .. } = self.plan;
        let (batch, lengths) = (block.lengths.len(), block.lengths_i32());
        let (of_k, of_v, of_g, of_beta) = self.plan.axes();
        let shapes: [&[usize]; 6] = [&of_k, &of_k, &of_v, &of_g, &of_beta, &of_beta];
        let made = shapes.map(|axes| back.pass.empty(DType::Fp32, &[&[batch, block.rows], axes].concat()));
        let mut made = made.into_iter().collect::<Result<Vec<_>, _>>()?;
        let mut dstate = back.pass.empty(DType::Fp32, &[batch, value_heads, key_dim, value_dim])?;
        let names = ["dq", "dk", "dv", "dg", "dbeta", "da_log"];
        let mut outputs: Vec<_> = names.into_iter().zip(made.iter_mut().map(Tensor::view_mut)).collect();
        outputs.push(("dstate", dstate.view_mut()));
        let given = [&inputs[..], &self.parameters()?, &[("len", TensorRef::new(&lengths, &[batch])?)]].concat();
        back.pass.run("gated_delta_rule_backward", &Attributes::new(), &given, outputs)?;
        Ok(made)
    }
}
