//! Linear attention by the gated delta rule: `out(norm(rule(q, k, v)) * silu(z))`, where q, k and v are projections of what
//! enters that have gone through causal convolutions and a silu, heads of q and k of length 1, and z, decays and betas further
//! projections. What it keeps of a sequence is the last rows that each convolution reads, and the state of the rule.
//!
//! All between the first projections and the last is f32, and rounded once where the last reads it.

use super::causal_conv::CausalConv;
use super::linear::Linear;
use super::loader::Loader;
use super::norm::{self, Vector};
use super::recur::{self, Kept};
use super::{SIZES, WIDTH, is_size};
use crate::ModelError;
use crate::backward::{Backward, Block};
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use crate::sums::Of;
use samebits_ops::device::{Device, Part};
use samebits_ops::{Attributes, Backend, Cpu, DType, Tensor, TensorRef};

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
    /// Added to the square of a head's length.
    pub l2_eps: f64,
    /// The norm of each head before the gate.
    pub norm: norm::Plan,
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
        match () {
            _ if self.hidden != hidden => Err(WIDTH),
            _ if !product(&[value_heads, key_dim, value_dim]) || !product(&[key_heads, key_dim, taps]) => Err(SIZES),
            _ if !product(&[value_heads, value_dim, taps]) => Err(SIZES),
            _ if !value_heads.is_multiple_of(key_heads) => Err("value heads are a multiple of key heads"),
            _ if !(self.largest_beta.is_finite() && self.l2_eps.is_finite()) => Err("factors are finite"),
            _ => Ok(()),
        }
    }
}

pub(crate) struct DeltaRule {
    plan: Plan,
    qkv: [Linear; 3],
    convs: [CausalConv; 3],
    a: Linear,
    b: Linear,
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
    raw: Tensor,
    conv: Tensor,
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
        let (hidden, heads, widths) = (plan.hidden, plan.value_heads, plan.widths());
        let mut qkv = Vec::new();
        let mut convs = Vec::new();
        for (name, width) in ["q", "k", "v"].into_iter().zip(widths) {
            qkv.push(loader.linear(&format!("linear_attn.{name}_proj"), width, hidden, false)?);
            convs.push(CausalConv::load(loader, &format!("linear_attn.{name}_conv1d"), [width, plan.taps], false)?);
        }
        let a = loader.linear("linear_attn.a_proj", heads, hidden, false)?;
        let b = loader.linear("linear_attn.b_proj", heads, hidden, false)?;
        let z = loader.linear("linear_attn.g_proj", widths[2], hidden, false)?;
        let a_log = loader.vector("linear_attn.A_log", heads)?;
        let dt_bias = loader.vector("linear_attn.dt_bias", heads)?;
        let norm = loader.vector("linear_attn.o_norm.weight", plan.value_dim)?;
        let out = loader.linear("linear_attn.o_proj", hidden, widths[2], false)?;
        let row = |n: usize, value: f32| Tensor::new(vec![value; n], &[1, n]);
        let widest = widths[0].max(widths[2]);
        let (ones, betas) = (row(widest, 1.0)?, row(heads, plan.largest_beta as f32)?);
        let one = (1.0 / (plan.key_dim as f64).sqrt()) as f32;
        let length_one = Tensor::new(vec![one; plan.key_dim], &[plan.key_dim])?;
        let [qkv, convs] = (qkv.try_into().ok().zip(convs.try_into().ok())).map(|(a, b)| (a, b)).expect("three");
        Ok(DeltaRule { plan: plan.clone(), qkv, convs, a, b, z, a_log, dt_bias, norm, out, ones, betas, length_one })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        let DeltaRule { qkv, convs, a, b, z, a_log, dt_bias, norm, out, ones, betas, length_one, .. } = self;
        qkv.iter_mut().chain([a, b, z, out]).try_for_each(|linear| linear.move_to(cpu, device))?;
        convs.iter_mut().try_for_each(|conv| conv.move_to(device))?;
        [a_log, dt_bias, norm].into_iter().try_for_each(|vector| vector.move_to(device))?;
        for constant in [ones, betas, length_one] {
            *constant = Backend::upload(device, constant.view())?;
        }
        Ok(())
    }

    pub fn state(&self) -> Kind {
        let Plan { value_heads, key_dim, value_dim, .. } = self.plan;
        let convs = self.convs.iter().map(CausalConv::width);
        Kind::Recurrent(convs.chain([value_heads * key_dim * value_dim]).collect())
    }

    /// The attributes of the norm that makes heads of length 1: `x / sqrt(x x + eps)`.
    fn to_length_one(&self) -> Attributes {
        Attributes::new().with("eps", self.plan.l2_eps / self.plan.key_dim as f64)
    }

    /// The weights of the rule.
    fn parameters(&self) -> Result<[(&'static str, TensorRef<'_>); 2], ModelError> {
        Ok([("a_log", self.a_log.w.view()), ("dt_bias", self.dt_bias.w.view_as(&[self.plan.value_heads, 1])?)])
    }

    /// `a[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        a: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let (n, f32, none) = (a.shape()[0], DType::Fp32, Attributes::new());
        let Plan { key_heads, value_heads, key_dim, value_dim, .. } = self.plan;
        let entered = a;
        let mut streams = Vec::new();
        for (part, (linear, conv)) in self.qkv.iter().zip(&self.convs).enumerate() {
            let raw = linear.apply(pass, entered.view(), f32)?;
            let mut conv = conv.forward(pass, state, part, &raw)?;
            pass.see(["q_conv", "k_conv", "v_conv"][part], &mut conv)?;
            let mut active = pass.empty(f32, conv.shape())?;
            let ones = rows_of(pass, &self.ones, conv.shape())?;
            let inputs = [("gate", conv.view()), ("up", ones.view())];
            pass.op("silu_mul", &none, &inputs, [("y", active.view_mut())])?;
            streams.push(Stream { raw, conv, active });
        }
        let mut to_length = |x: &Tensor| -> Result<Tensor, ModelError> {
            let (shape, mut y) = ([n * key_heads, key_dim], pass.empty(f32, x.shape())?);
            let inputs = [("x", x.view_as(&shape)?), ("w", self.length_one.view())];
            pass.op("rms_norm", &self.to_length_one(), &inputs, [("y", y.view_mut_as(&shape)?)])?;
            Ok(y)
        };
        let (q, k) = (to_length(&streams[0].active)?, to_length(&streams[1].active)?);
        let a = self.a.apply(pass, entered.view(), f32)?;
        let b = self.b.apply(pass, entered.view(), f32)?;
        let mut beta = pass.empty(f32, b.shape())?;
        let largest = rows_of(pass, &self.betas, b.shape())?;
        pass.op("sigmoid_mul", &none, &[("gate", b.view()), ("x", largest.view())], [("y", beta.view_mut())])?;
        let v = &streams[2].active;
        let mut rule = pass.empty(f32, v.shape())?;
        let (of_k, of_v) = ([key_heads, key_dim], [value_heads, value_dim]);
        let tokens =
            [("q", &q, &of_k[..]), ("k", &k, &of_k), ("v", v, &of_v), ("g", &a, &[value_heads, 1]), ("beta", &beta, &[value_heads])];
        let kept = [Kept { part: 3, names: ["state", "next"], axes: &[value_heads, key_dim, value_dim] }];
        recur::forward(pass, state, ("gated_delta_rule", &none), &tokens, &self.parameters()?, &kept, ("y", &mut rule, &of_v))?;
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

    /// From `dy[n,hidden]` in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (entered, n, mask, f32, none) = (a, a.shape()[0], back.mask, DType::Fp32, Attributes::new());
        let Plan { key_heads, value_heads, key_dim, value_dim, .. } = self.plan;
        let Saved { streams, q, k, a, b, beta, z, rule, normed, gated } = saved;
        let dgated = self.out.backward(back, 0, gated.view(), dy.view(), mask, f32)?;
        let (mut dz, mut dnormed) = (back.pass.empty(f32, z.shape())?, back.pass.empty(f32, z.shape())?);
        let inputs = [("gate", z.view()), ("up", normed.view()), ("dy", dgated.view())];
        let outputs = [("dgate", dz.view_mut()), ("dup", dnormed.view_mut())];
        back.pass.op("silu_mul_backward", &none, &inputs, outputs)?;

        let shape = [n * value_heads, value_dim];
        let (x, of_y) = (("x", rule.view_as(&shape)?), ("dy", dnormed.view_as(&shape)?));
        let mask_of_heads: Vec<i32> = mask.iter().flat_map(|&m| vec![m; value_heads]).collect();
        let of = (Of::whole(&self.norm.name), None, value_dim);
        back.add_vector(["rms_norm_dw", "dw"], &self.plan.norm.of_gradient(), of, &[x, of_y], &mask_of_heads)?;
        let mut drule = back.pass.empty(f32, rule.shape())?;
        let outputs = [("dx", drule.view_mut_as(&shape)?)];
        back.pass.op("rms_norm_backward", &self.plan.norm.attributes(), &[x, ("w", self.norm.w.view()), of_y], outputs)?;
        back.see("drule", &mut drule)?;

        let (of_k, of_v) = ([key_heads, key_dim], [value_heads, value_dim]);
        let v = &streams[2].active;
        let tokens = [
            ("q", &q, &of_k[..]), ("k", &k, &of_k), ("v", v, &of_v), ("g", &a, &[value_heads, 1]),
            ("beta", &beta, &[value_heads]), ("dy", &drule, &of_v),
        ];
        let keys = key_heads * key_dim;
        let widths = [keys, keys, value_heads * value_dim, value_heads, value_heads, value_heads];
        let made = recur::backward(back, &tokens, &widths, |back, block, given| self.of_block(back, block, given))?;
        let [dq, dk, dv, da, dbeta, da_log] = &made[..] else { unreachable!("six were asked for") };
        for (vector, by_position) in [(&self.a_log, da_log), (&self.dt_bias, da)] {
            let of = (Of::whole(&vector.name), None, value_heads);
            back.add_vector(["token_sum", "sum"], &none, of, &[("x", by_position.view())], mask)?;
        }
        let largest = rows_of(&back.pass, &self.betas, b.shape())?;
        let (mut db, mut dlargest) = (back.pass.empty(f32, b.shape())?, back.pass.empty(f32, b.shape())?);
        let inputs = [("gate", b.view()), ("x", largest.view()), ("dy", dbeta.view())];
        back.pass.op("sigmoid_mul_backward", &none, &inputs, [("dgate", db.view_mut()), ("dx", dlargest.view_mut())])?;

        let mut sum: Option<Tensor> = None;
        for (part, (stream, gradient)) in streams.iter().zip([dq, dk, dv]).enumerate() {
            let Stream { raw, conv, active } = stream;
            let mut dactive = None;
            if part < 2 {
                let shape = [n * key_heads, key_dim];
                let mut dx = back.pass.empty(f32, active.shape())?;
                let inputs = [("x", active.view_as(&shape)?), ("w", self.length_one.view()), ("dy", gradient.view_as(&shape)?)];
                back.pass.op("rms_norm_backward", &self.to_length_one(), &inputs, [("dx", dx.view_mut_as(&shape)?)])?;
                dactive = Some(dx);
            }
            let dactive = dactive.as_ref().unwrap_or(gradient);
            let ones = rows_of(&back.pass, &self.ones, conv.shape())?;
            let (mut dconv, mut dones) = (back.pass.empty(f32, conv.shape())?, back.pass.empty(f32, conv.shape())?);
            let inputs = [("gate", conv.view()), ("up", ones.view()), ("dy", dactive.view())];
            let outputs = [("dgate", dconv.view_mut()), ("dup", dones.view_mut())];
            back.pass.op("silu_mul_backward", &none, &inputs, outputs)?;
            back.see(["dq_conv", "dk_conv", "dv_conv"][part], &mut dconv)?;
            let draw = self.convs[part].backward(back, raw, &dconv)?;
            let from = self.qkv[part].backward(back, 0, entered.view(), draw.view(), mask, f32)?;
            sum = Some(match sum {
                Some(sum) => back.sum(sum, from)?,
                None => from,
            });
        }
        let mut sum = sum.expect("there are three");
        for (linear, gradient) in [(&self.a, da), (&self.b, &db), (&self.z, &dz)] {
            let from = linear.backward(back, 0, entered.view(), gradient.view(), mask, f32)?;
            sum = back.sum(sum, from)?;
        }
        Ok(sum)
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
        let mut outputs: Vec<_> =
            ["dq", "dk", "dv", "dg", "dbeta", "da_log"].into_iter().zip(made.iter_mut().map(Tensor::view_mut)).collect();
        outputs.push(("dstate", dstate.view_mut()));
        let given = [&inputs[..], &self.parameters()?, &[("len", TensorRef::new(&lengths, &[batch])?)]].concat();
        back.pass.run("gated_delta_rule_backward", &Attributes::new(), &given, outputs)?;
        Ok(made)
    }
}

/// A row over and over, of this shape.
fn rows_of(pass: &Pass, row: &Tensor, shape: &[usize]) -> Result<Tensor, ModelError> {
    let &[n, width] = shape else { unreachable!("it has rows") };
    let mut rows = pass.empty(DType::Fp32, shape)?;
    let from = Part { every: n.max(1), stride: row.shape()[1], ..Part::whole(width) };
    pass.machine.copy_rows([n, width], (row, from), (&mut rows, Part::whole(width)))?;
    Ok(rows)
}
