//! Linear attention by the gated delta rule: `out(norm(rule(q, k, v)) * silu(z))`, where q, k and v are projections of what
//! enters that have gone through causal convolutions and a silu, heads of q and k of length 1, and z, decays and betas further
//! projections. What it keeps of a sequence is the last rows that each convolution reads, and the state of the rule.
//!
//! All between the first projections and the last is f32, and rounded once where the last reads it.

use super::causal_conv::CausalConv;
use super::linear::Linear;
use super::loader::Loader;
use super::norm::{self, Vector};
use super::recur::{self, Kept, repeated};
use super::{SIZES, WIDTH, is_size};
use crate::ModelError;
use crate::backward::{Backward, Block};
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, Cpu, DType, Tensor, TensorRef};

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
    /// The norm of each head before the gate.
    pub norm: norm::Plan,
    /// The names of its tensors.
    pub names: Names,
}

/// Names of the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// Projections and convolutions of their own, as OLMo Hybrid has them.
    Each,
    /// One projection of q, k, v and z, and one of betas and decays, in both of which a key head and its value heads stand
    /// together; one convolution. Qwen3-Next has them.
    ByKeyHead,
    /// One projection of q, k and v, one behind the other, and those of z, betas and decays; one convolution. Qwen3.5 has them.
    Streams,
}

impl Plan {
    /// Elements of all heads of q, of k and of v.
    fn widths(&self) -> [usize; 3] {
        let keys = self.key_heads * self.key_dim;
        [keys, keys, self.value_heads * self.value_dim]
    }

    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, _: &[Rotary]) -> Result<(), &'static str> {
        let &Plan { key_heads, value_heads, key_dim, value_dim, taps, .. } = self;
        let product =
            |sizes: &[usize]| sizes.iter().try_fold(1usize, |all, n| all.checked_mul(*n)).is_some_and(is_size);
        // One convolution takes all of them.
        let channels = [key_heads.saturating_mul(key_dim).saturating_mul(2), value_heads.saturating_mul(value_dim)];
        let channels = channels[0].saturating_add(channels[1]);
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
}

pub(crate) struct DeltaRule {
    plan: Plan,
    /// Of q, of k and of v.
    streams: [(Linear, CausalConv); 3],
    /// The projection to decays.
    a: Linear,
    /// The projection to betas.
    b: Linear,
    /// The projection to gates.
    z: Linear,
    a_log: Vector,
    dt_bias: Vector,
    norm: Vector,
    out: Linear,
    /// A row of ones, by which a product with a gate is the gate's silu; one of the largest beta; and the weights of a norm that
    /// makes heads of length 1.
    ones: Tensor,
    betas: Tensor,
    length_one: Tensor,
}

/// A stream on its way to the rule.
struct Stream {
    /// What the convolution read.
    raw: Tensor,
    /// What it made.
    conv: Tensor,
    /// The silu of that.
    active: Tensor,
}

/// What a reverse pass reads, beside a.
pub(crate) struct Saved {
    streams: Vec<Stream>,
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    beta: Tensor,
    z: Tensor,
    rule: Tensor,
    normed: Tensor,
    gated: Tensor,
}

impl DeltaRule {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<DeltaRule, ModelError> {
        let &Plan { hidden, key_heads, value_heads: heads, key_dim, value_dim, taps, names, .. } = plan;
        let widths = plan.widths();
        let name = |part: &str| format!("linear_attn.{part}");
        let mut one = |part, width| loader.linear(&name(part), width, hidden, false);
        let (linears, [z, b, a]) = match names {
            Names::Each => {
                let [q, k, v] = widths;
                let linears = [one("q_proj", q)?, one("k_proj", k)?, one("v_proj", v)?];
                (linears, [one("g_proj", v)?, one("b_proj", heads)?, one("a_proj", heads)?])
            }
            Names::ByKeyHead => {
                let (shared, values) = (heads / key_heads, heads / key_heads * value_dim);
                let of_keys = [key_dim, key_dim, values, values];
                let [q, k, v, z] = loader.parts(&name("in_proj_qkvz"), key_heads, of_keys, hidden, false)?;
                let [b, a] = loader.parts(&name("in_proj_ba"), key_heads, [shared, shared], hidden, false)?;
                ([q, k, v], [z, b, a])
            }
            Names::Streams => {
                let of = [one("in_proj_z", widths[2])?, one("in_proj_b", heads)?, one("in_proj_a", heads)?];
                (loader.parts(&name("in_proj_qkv"), 1, widths, hidden, false)?, of)
            }
        };
        let convs = match names {
            Names::Each => {
                let mut one = |part, width| CausalConv::load(loader, &name(part), [width, taps], false);
                [one("q_conv1d", widths[0])?, one("k_conv1d", widths[1])?, one("v_conv1d", widths[2])?]
            }
            Names::ByKeyHead | Names::Streams => CausalConv::parts(loader, &name("conv1d"), widths, taps)?,
        };
        let ([q, k, v], [of_q, of_k, of_v]) = (linears, convs);
        let [norm, out] = if names == Names::Each { ["o_norm", "o_proj"] } else { ["norm", "out_proj"] };
        let (a_log, dt_bias) = (loader.vector(&name("A_log"), heads)?, loader.vector(&name("dt_bias"), heads)?);
        let norm = loader.vector(&name(&format!("{norm}.weight")), value_dim)?;
        let out = loader.linear(&name(out), hidden, widths[2], false)?;
        let row = |n: usize, value: f32| Tensor::new(vec![value; n], &[1, n]);
        let (ones, betas) = (row(widths[0].max(widths[2]), 1.0)?, row(heads, plan.largest_beta as f32)?);
        let one = (1.0 / (key_dim as f64).sqrt()) as f32;
        let length_one = Tensor::new(vec![one; key_dim], &[key_dim])?;
        let streams = [(q, of_q), (k, of_k), (v, of_v)];
        Ok(DeltaRule { plan: plan.clone(), streams, a, b, z, a_log, dt_bias, norm, out, ones, betas, length_one })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        let DeltaRule { streams, a, b, z, a_log, dt_bias, norm, out, ones, betas, length_one, .. } = self;
        for (linear, conv) in streams {
            linear.move_to(cpu, device)?;
            conv.move_to(device)?;
        }
        [a, b, z, out].into_iter().try_for_each(|linear| linear.move_to(cpu, device))?;
        [a_log, dt_bias, norm].into_iter().try_for_each(|vector| vector.move_to(device))?;
        for constant in [ones, betas, length_one] {
            *constant = Backend::upload(device, constant.view())?;
        }
        Ok(())
    }

    pub fn state(&self) -> Kind {
        let Plan { value_heads, key_dim, value_dim, .. } = self.plan;
        let convs = self.streams.iter().map(|(_, conv)| conv.width());
        Kind::Recurrent(convs.chain([value_heads * key_dim * value_dim]).collect())
    }

    /// The attributes of the norm that makes heads of length 1: `x / sqrt(x x + EPS)`.
    fn to_length_one(&self) -> Attributes {
        Attributes::new().with("eps", EPS / self.plan.key_dim as f64)
    }

    /// The parameters of the rule.
    fn parameters(&self) -> Result<[(&'static str, TensorRef<'_>); 2], ModelError> {
        let bias = self.dt_bias.w.view_as(&[self.plan.value_heads, 1])?;
        Ok([("a_log", self.a_log.w.view()), ("dt_bias", bias)])
    }

    /// `a[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        a: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let (entered, n, f32, none) = (a, a.shape()[0], DType::Fp32, Attributes::new());
        let Plan { key_heads, value_heads, key_dim, value_dim, .. } = self.plan;
        let mut streams = Vec::new();
        for (part, (linear, conv)) in self.streams.iter().enumerate() {
            let raw = linear.apply(pass, entered.view(), f32)?;
            let mut conv = conv.forward(pass, state, part, &raw)?;
            pass.see(["q_conv", "k_conv", "v_conv"][part], &mut conv)?;
            let mut active = pass.empty(f32, conv.shape())?;
            let ones = repeated(pass, &self.ones, conv.shape())?;
            let inputs = [("gate", conv.view()), ("up", ones.view())];
            pass.op("silu_mul", &none, &inputs, [("y", active.view_mut())])?;
            streams.push(Stream { raw, conv, active });
        }
        let [q, k] = [0, 1].map(|part| self.of_length_one(pass, &streams[part].active));
        let (q, k) = (q?, k?);
        let a = self.a.apply(pass, entered.view(), f32)?;
        let b = self.b.apply(pass, entered.view(), f32)?;
        let mut beta = pass.empty(f32, b.shape())?;
        let largest = repeated(pass, &self.betas, b.shape())?;
        pass.op("sigmoid_mul", &none, &[("gate", b.view()), ("x", largest.view())], [("y", beta.view_mut())])?;
        let v = &streams[2].active;
        let mut rule = pass.empty(f32, v.shape())?;
        let (of_k, of_v) = ([key_heads, key_dim], [value_heads, value_dim]);
        let (of_a, of_beta) = ([value_heads, 1], [value_heads]);
        let tokens =
            [("q", &q, &of_k[..]), ("k", &k, &of_k), ("v", v, &of_v), ("g", &a, &of_a), ("beta", &beta, &of_beta)];
        let kept = [Kept { part: 3, names: ["state", "next"], axes: &[value_heads, key_dim, value_dim] }];
        let op = ("gated_delta_rule", &none);
        recur::forward(pass, state, op, &tokens, &self.parameters()?, &kept, ("y", &mut rule, &of_v))?;
        pass.see("rule", &mut rule)?;
        let z = self.z.apply(pass, entered.view(), f32)?;
        let (mut normed, shape) = (pass.empty(f32, rule.shape())?, [n * value_heads, value_dim]);
        let inputs = [("x", rule.view_as(&shape)?), ("w", self.norm.w.view())];
        pass.op("rms_norm", &self.plan.norm.attributes(), &inputs, [("y", normed.view_mut_as(&shape)?)])?;
        let mut gated = pass.empty(pass.dtype, rule.shape())?;
        let inputs = [("gate", z.view()), ("up", normed.view())];
        pass.op("silu_mul", &none, &inputs, [("y", gated.view_mut())])?;
        self.out.apply_to(pass, 0, gated.view(), y.view_mut())?;
        Ok(pass.keeps.then_some(Saved { streams, q, k, a, b, beta, z, rule, normed, gated }))
    }

    /// Heads of queries or keys, of length 1.
    fn of_length_one(&self, pass: &mut Pass, x: &Tensor) -> Result<Tensor, ModelError> {
        let Plan { key_heads, key_dim, .. } = self.plan;
        let (shape, mut y) = ([x.shape()[0] * key_heads, key_dim], pass.empty(DType::Fp32, x.shape())?);
        let inputs = [("x", x.view_as(&shape)?), ("w", self.length_one.view())];
        pass.op("rms_norm", &self.to_length_one(), &inputs, [("y", y.view_mut_as(&shape)?)])?;
        Ok(y)
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (entered, mask, f32, none) = (a, back.mask, DType::Fp32, Attributes::new());
        let Plan { key_heads, value_heads, key_dim, value_dim, .. } = self.plan;
        let Saved { streams, q, k, a, b, beta, z, rule, normed, gated } = saved;
        let dgated = self.out.backward(back, 0, gated.view(), dy.view(), mask, f32)?;
        let (mut dz, mut dnormed) = (back.pass.empty(f32, z.shape())?, back.pass.empty(f32, z.shape())?);
        let inputs = [("gate", z.view()), ("up", normed.view()), ("dy", dgated.view())];
        let outputs = [("dgate", dz.view_mut()), ("dup", dnormed.view_mut())];
        back.pass.op("silu_mul_backward", &none, &inputs, outputs)?;
        let mut drule = self.norm_backward(back, &rule, &dnormed)?;
        back.see("drule", &mut drule)?;

        let (of_k, of_v) = ([key_heads, key_dim], [value_heads, value_dim]);
        let (of_a, of_beta) = ([value_heads, 1], [value_heads]);
        let tokens = [
            ("q", &q, &of_k[..]),
            ("k", &k, &of_k),
            ("v", &streams[2].active, &of_v),
            ("g", &a, &of_a),
            ("beta", &beta, &of_beta),
            ("dy", &drule, &of_v),
        ];
        let [of_q, _, values] = self.plan.widths();
        let widths = [of_q, of_q, values, value_heads, value_heads, value_heads];
        let made = recur::backward(back, &tokens, &widths, |back, block, given| self.of_block(back, block, given))?;
        let [dq, dk, dv, da, dbeta, da_log] = &made[..] else { unreachable!("six were asked for") };
        for (vector, by_position) in [(&self.a_log, da_log), (&self.dt_bias, da)] {
            let of = (Of::whole(&vector.name), None, value_heads);
            back.add_vector(["token_sum", "sum"], &none, of, &[("x", by_position.view())], mask)?;
        }
        let largest = repeated(&back.pass, &self.betas, b.shape())?;
        let (mut db, mut dlargest) = (back.pass.empty(f32, b.shape())?, back.pass.empty(f32, b.shape())?);
        let inputs = [("gate", b.view()), ("x", largest.view()), ("dy", dbeta.view())];
        let outputs = [("dgate", db.view_mut()), ("dx", dlargest.view_mut())];
        back.pass.op("sigmoid_mul_backward", &none, &inputs, outputs)?;

        let from_z = self.z.backward(back, 0, entered.view(), dz.view(), mask, f32)?;
        let from_a = self.a.backward(back, 0, entered.view(), da.view(), mask, f32)?;
        let from_b = self.b.backward(back, 0, entered.view(), db.view(), mask, f32)?;
        let mut sum = back.sum(from_a, from_b)?;
        sum = back.sum(sum, from_z)?;
        let dactive = [
            self.length_one_backward(back, &streams[0].active, dq)?,
            self.length_one_backward(back, &streams[1].active, dk)?,
        ];
        for (part, (stream, dactive)) in streams.iter().zip([&dactive[0], &dactive[1], dv]).enumerate() {
            let Stream { raw, conv, .. } = stream;
            let ones = repeated(&back.pass, &self.ones, conv.shape())?;
            let (mut dconv, mut dones) = (back.pass.empty(f32, conv.shape())?, back.pass.empty(f32, conv.shape())?);
            let inputs = [("gate", conv.view()), ("up", ones.view()), ("dy", dactive.view())];
            let outputs = [("dgate", dconv.view_mut()), ("dup", dones.view_mut())];
            back.pass.op("silu_mul_backward", &none, &inputs, outputs)?;
            back.see(["dq_conv", "dk_conv", "dv_conv"][part], &mut dconv)?;
            let (linear, of) = &self.streams[part];
            let draw = of.backward(back, raw, &dconv)?;
            let from = linear.backward(back, 0, entered.view(), draw.view(), mask, f32)?;
            sum = back.sum(sum, from)?;
        }
        Ok(sum)
    }

    /// From `dy` of the norm of heads x before the gate: that of x; that of its weights is added up.
    fn norm_backward(&self, back: &mut Backward, x: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        let Plan { value_heads, value_dim, norm, .. } = &self.plan;
        let (n, mut dx) = (x.shape()[0], back.pass.empty(DType::Fp32, x.shape())?);
        let shape = [n * value_heads, *value_dim];
        let (x, dy) = (("x", x.view_as(&shape)?), ("dy", dy.view_as(&shape)?));
        // Each head of a token counts.
        let mask: Vec<i32> = back.mask.iter().flat_map(|&mask| vec![mask; *value_heads]).collect();
        let of = (Of::whole(&self.norm.name), None, *value_dim);
        back.add_vector(["rms_norm_dw", "dw"], &norm.of_gradient(), of, &[x, dy], &mask)?;
        let inputs = [x, ("w", self.norm.w.view()), dy];
        back.pass.op("rms_norm_backward", &norm.attributes(), &inputs, [("dx", dx.view_mut_as(&shape)?)])?;
        Ok(dx)
    }

    /// From `dy` of heads of length 1: that of the heads before.
    fn length_one_backward(&self, back: &mut Backward, x: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        let Plan { key_heads, key_dim, .. } = self.plan;
        let (shape, mut dx) = ([x.shape()[0] * key_heads, key_dim], back.pass.empty(DType::Fp32, x.shape())?);
        let inputs = [("x", x.view_as(&shape)?), ("w", self.length_one.view()), ("dy", dy.view_as(&shape)?)];
        back.pass.op("rms_norm_backward", &self.to_length_one(), &inputs, [("dx", dx.view_mut_as(&shape)?)])?;
        Ok(dx)
    }

    /// Of the sequences of a block: the gradients of q, k, v, a and beta, and that of a_log by position.
    fn of_block(
        &self,
        back: &mut Backward,
        block: &Block,
        inputs: Vec<(&str, TensorRef)>,
    ) -> Result<Vec<Tensor>, ModelError> {
        let Plan { key_heads, value_heads, key_dim, value_dim, .. } = self.plan;
        let (batch, rows, lengths) = (block.lengths.len(), block.rows, block.lengths_i32());
        let (of_k, of_v) = ([batch, rows, key_heads, key_dim], [batch, rows, value_heads, value_dim]);
        let (of_a, of_beta) = ([batch, rows, value_heads, 1], [batch, rows, value_heads]);
        let shapes: [&[usize]; 6] = [&of_k, &of_k, &of_v, &of_a, &of_beta, &of_beta];
        let made = shapes.map(|shape| back.pass.empty(DType::Fp32, shape));
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
