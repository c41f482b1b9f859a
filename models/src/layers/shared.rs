//! A transformer block whose weights several blocks of a model share. What enters a use of it is the residual stream and, behind it,
//! the embedded token as one row: `last(mlp(norm(attention(norm([x, embedded])))))`, which is added to the stream for the norm of the
//! using block alone. The products of queries, keys and values may have adapters, that of gate and up has one, and each use has
//! adapters and a last matrix of its own.
//!
//! All between two products is f32, and rounded once where the next reads it.

use super::arithmetic::{add, mul};
use super::attend::{self, Attended, Qkv};
use super::heads::{Rope, Rotation};
use super::linear::Linear;
use super::loader::Loader;
use super::narrow::{self, Between, Narrow};
use super::norm::{self, Norm};
use super::{SIZES, WIDTH, is_size};
use crate::ModelError;
use crate::backward::Backward;
use crate::machine::{concat, split};
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use samebits_ops::device::Device;
use samebits_ops::{Activation, Attributes, Cpu, DType, Tensor};

/// What a shared block is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The number of the first block that uses it: its tensors stand there, and the adapters of all uses with them.
    pub first: usize,
    /// What stands before their names in a block.
    pub name: &'static str,
    /// Width of the residual stream: half of what enters.
    pub hidden: usize,
    /// Its heads.
    pub heads: attend::Heads,
    /// How queries and keys are rotated.
    pub rope: Rope,
    /// Whether the products of queries, keys and values have adapters.
    pub adapts_heads: bool,
    /// Elements between the two matrices of an adapter.
    pub rank: usize,
    /// Width of gate and up.
    pub width: usize,
    /// What the gate goes through.
    pub activation: Activation,
    /// Whether the matrices of the MLP have biases.
    pub bias: bool,
}

/// A use of a shared block.
#[derive(Clone, Debug, PartialEq)]
pub struct Use {
    /// The number of the shared block in the config.
    pub of: usize,
    /// The number of the use, counted over all shared blocks; its adapters are called by it.
    pub number: usize,
    /// The name of its last matrix.
    pub last: &'static str,
}

impl Plan {
    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, tables: &[Rotary]) -> Result<(), &'static str> {
        let Plan { heads, rank, width, .. } = self;
        let twice = |n: usize| n.checked_mul(2).is_some_and(is_size);
        let is_plain = |activation| matches!(activation, Activation::Gelu | Activation::GeluTanh | Activation::Relu2);
        heads.check()?;
        match () {
            _ if self.hidden != hidden => Err(WIDTH),
            _ if !twice(hidden) || !twice(*width) || !is_size(*rank) => Err(SIZES),
            _ if self.rope.dim != heads.key_dim => Err("heads of a shared block are rotated as a whole"),
            _ if !is_plain(self.activation) => Err("the gate of a shared block has an activation without parameters"),
            _ => self.rope.check(heads.key_dim, tables),
        }
    }

    /// The attributes of the activation.
    fn activation(&self) -> Attributes {
        let kind = match self.activation {
            Activation::GeluTanh => "gelu_tanh",
            Activation::Relu2 => "relu2",
            _ => "gelu",
        };
        Attributes::new().with("kind", kind)
    }
}

/// The weights of a shared block.
pub(crate) struct Shared {
    heads: attend::Heads,
    norm: Norm,
    /// Of queries, keys and values.
    projections: [Linear; 3],
    rotation: Rotation,
    o: Linear,
    mlp_norm: Norm,
    gate_up: Linear,
    activation: Attributes,
    down: Linear,
}

/// The weights of a use.
pub(crate) struct Ahead {
    of: usize,
    number: usize,
    state: Kind,
    /// Of queries, keys and values.
    adapters: [Option<Narrow>; 3],
    gate_up: Option<Narrow>,
    last: Linear,
}

/// What a reverse pass reads.
pub(crate) struct Saved {
    /// The stream and the embedded tokens, and what the products read of them.
    both: Tensor,
    a: Tensor,
    /// Of the adapters of queries, keys and values.
    adapters: [Option<narrow::Saved>; 3],
    attended: Attended,
    /// What the product of heads made, and what the MLP read of it.
    made: Tensor,
    b: Tensor,
    of_gate_up: Option<narrow::Saved>,
    gate: Tensor,
    active: Tensor,
    up: Tensor,
    product: Tensor,
    /// What the last product read.
    read: Tensor,
}

impl Shared {
    /// `loader` stands at the block's own names.
    pub fn load(loader: &mut Loader, plan: &Plan, norms: &norm::Plan) -> Result<Shared, ModelError> {
        let Plan { hidden, heads, rope, width, bias, .. } = plan;
        let (enters, [q, k, v, o]) = (2 * hidden, heads.widths());
        let norm = Norm::load(loader, "input_layernorm", enters, norms)?;
        let mut projection = |which, n| loader.linear(&format!("self_attn.{which}_proj"), n, enters, false);
        let projections = [projection("q", q)?, projection("k", k)?, projection("v", v)?];
        let o = loader.linear("self_attn.o_proj", *hidden, o, false)?;
        let mlp_norm = Norm::load(loader, "pre_ff_layernorm", *hidden, norms)?;
        let gate_up = loader.linear("feed_forward.gate_up_proj", 2 * width, *hidden, *bias)?;
        let down = loader.linear("feed_forward.down_proj", *hidden, *width, *bias)?;
        let (heads, rotation, activation) = (heads.clone(), Rotation::new(rope), plan.activation());
        Ok(Shared { heads, norm, projections, rotation, o, mlp_norm, gate_up, activation, down })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        let Shared { norm, projections, rotation, o, mlp_norm, gate_up, down, .. } = self;
        let products = projections.iter_mut().chain([o, gate_up, down]);
        products.into_iter().try_for_each(|linear| linear.move_to(cpu, device))?;
        norm.move_to(device)?;
        mlp_norm.move_to(device)?;
        rotation.move_to(device)
    }
}

impl Ahead {
    /// `prefix` stands before the names of the shared block, `loader` at those of the block that uses it.
    pub fn load(loader: &mut Loader, plan: &Use, shared: &Plan, prefix: String) -> Result<Ahead, ModelError> {
        let (Plan { hidden, heads, rank, width, .. }, number) = (shared, plan.number);
        let last = loader.linear(plan.last, *hidden, *hidden, false)?;
        let own = std::mem::replace(&mut loader.prefix, prefix);
        let mut adapter = |name: &str, enters: usize, width: usize| {
            let names = ["0", "1"].map(|which| format!("{name}_adapter_list.{number}.{which}"));
            Narrow::load(loader, names, [enters, *rank, width], Between::Nothing, (false, false))
        };
        let [q, k, v, _] = heads.widths();
        let mut adapters = [None, None, None];
        if shared.adapts_heads {
            for (place, (which, width)) in adapters.iter_mut().zip([("q", q), ("k", k), ("v", v)]) {
                *place = Some(adapter(&format!("self_attn.linear_{which}"), 2 * hidden, width)?);
            }
        }
        let gate_up = Some(adapter("feed_forward.gate_up_proj", *hidden, 2 * width)?);
        loader.prefix = own;
        Ok(Ahead { of: plan.of, number, state: heads.state(), adapters, gate_up, last })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        let adapters = self.adapters.iter_mut().chain([&mut self.gate_up]).flatten();
        adapters.into_iter().try_for_each(|adapter| adapter.move_to(cpu, device))?;
        self.last.move_to(cpu, device)
    }

    /// What it keeps of a sequence from step to step.
    pub fn state(&self) -> Kind {
        self.state.clone()
    }

    /// `x[n,hidden] -> y[n,hidden]`, both f32.
    pub fn forward(
        &self,
        pass: &mut Pass,
        all: &[Shared],
        state: &mut LayerState,
        x: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let (shared, dtype, f32) = (&all[self.of], pass.dtype, DType::Fp32);
        let &[n, hidden] = x.shape() else { unreachable!("it has rows") };
        let embedded = pass.carried.take().expect("the embedding is carried where a block reads it");
        let both = concat(pass.machine, n, (x, hidden, 1), (&embedded, hidden, 1))?;
        pass.carried = Some(embedded);
        let mut a = pass.empty(dtype, both.shape())?;
        shared.norm.forward(pass, &both, &mut a)?;
        pass.see("shared_norm", &mut a)?;

        let [of_q, of_k, of_v] = &self.adapters;
        let [q, k, v] = &shared.projections;
        let (q, q_saved) = product(pass, (q, of_q.as_ref()), &a, ("q_adapter", f32))?;
        let (k, k_saved) = product(pass, (k, of_k.as_ref()), &a, ("k_adapter", f32))?;
        let (v, v_saved) = product(pass, (v, of_v.as_ref()), &a, ("v_adapter", dtype))?;
        let attend::Heads { queries, keys, key_dim, .. } = shared.heads;
        let (q, _) = shared.rotation.forward(pass, q, [n, queries, key_dim], 0)?;
        let (k, _) = shared.rotation.forward(pass, k, [n, keys, key_dim], 0)?;
        let attended = shared.heads.forward(pass, state, (q, Some([k, v])), None, None)?;
        let mut made = shared.o.apply(pass, attended.heads.view(), f32)?;
        pass.see("shared_o", &mut made)?;

        let mut b = pass.empty(dtype, made.shape())?;
        shared.mlp_norm.forward(pass, &made, &mut b)?;
        pass.see("shared_mlp_norm", &mut b)?;
        let of_wide = (&shared.gate_up, self.gate_up.as_ref());
        let (wide, of_gate_up) = product(pass, of_wide, &b, ("gate_up_adapter", f32))?;
        let width = wide.shape()[1] / 2;
        let [gate, up] = split(pass.machine, [n, 1], &wide, [width; 2])?;
        let mut active = pass.empty(f32, gate.shape())?;
        pass.op("activate", &shared.activation, &[("x", gate.view())], [("y", active.view_mut())])?;
        let product = mul(pass, &active, &up, dtype)?;
        let mut read = shared.down.apply(pass, product.view(), dtype)?;
        pass.see("shared_mlp", &mut read)?;
        self.last.apply_to(pass, 0, read.view(), y.view_mut())?;
        pass.see("shared", y)?;
        let adapters = [q_saved, k_saved, v_saved];
        let kept = attended.keep(pass);
        Ok(kept.map(|attended| Saved {
            both,
            a,
            adapters,
            attended,
            made,
            b,
            of_gate_up,
            gate,
            active,
            up,
            product,
            read,
        }))
    }

    /// From `dy[n,hidden]` in f32: that of x, in f32. That of the embedded tokens is added to those of the uses behind.
    pub fn backward(
        &self,
        back: &mut Backward,
        all: &[Shared],
        saved: Saved,
        dy: &Tensor,
    ) -> Result<Tensor, ModelError> {
        back.nth_use = self.number;
        let dboth = self.backward_to_both(back, &all[self.of], saved, dy)?;
        back.nth_use = 0;
        let &[n, both] = dboth.shape() else { unreachable!("it has rows") };
        let [dx, own] = split(back.pass.machine, [n, 1], &dboth, [both / 2; 2])?;
        back.carried = Some(match back.carried.take() {
            Some(behind) => back.sum(behind, own)?,
            None => own,
        });
        Ok(dx)
    }

    /// That of the stream and the embedded tokens.
    fn backward_to_both(
        &self,
        back: &mut Backward,
        shared: &Shared,
        saved: Saved,
        dy: &Tensor,
    ) -> Result<Tensor, ModelError> {
        let Saved { both, a, adapters, attended, made, b, of_gate_up, gate, active, up, product, read } = saved;
        let (mask, f32, dtype, n) = (back.mask, DType::Fp32, back.pass.dtype, both.shape()[0]);
        let dread = self.last.backward(back, 0, read.view(), dy.view(), mask, f32)?;
        let dproduct = shared.down.backward(back, 0, product.view(), dread.view(), mask, f32)?;
        let dactive = mul(&mut back.pass, &dproduct, &up, f32)?;
        let dup = mul(&mut back.pass, &dproduct, &active, f32)?;
        let mut dgate = back.pass.empty(f32, gate.shape())?;
        let inputs = [("x", gate.view()), ("dy", dactive.view())];
        back.pass.op("activate_backward", &shared.activation, &inputs, [("dx", dgate.view_mut())])?;
        let width = gate.shape()[1];
        let dwide = concat(back.pass.machine, n, (&dgate, width, 1), (&dup, width, 1))?;
        let of_wide = (&shared.gate_up, self.gate_up.as_ref());
        let mut db = product_backward(back, of_wide, &b, of_gate_up.as_ref(), &dwide)?;
        back.see("dshared_mlp_norm", &mut db)?;
        let mut dmade = shared.mlp_norm.backward(back, &made, &db)?;
        back.see("dshared_o", &mut dmade)?;

        let mut dheads = shared.o.backward(back, 0, attended.heads.view(), dmade.view(), mask, dtype)?;
        back.see("dattention", &mut dheads)?;
        let Qkv { q: dq, k: dk, v: dv } = shared.heads.backward(back, attended, None, &dheads)?;
        let attend::Heads { queries, keys, key_dim, .. } = shared.heads;
        let dq = shared.rotation.backward(back, None, &dq, [n, queries, key_dim], 0)?;
        let dk = shared.rotation.backward(back, None, &dk, [n, keys, key_dim], 0)?;
        let mut da: Option<Tensor> = None;
        for (i, dy) in [dq, dk, dv].into_iter().enumerate() {
            let of = (&shared.projections[i], self.adapters[i].as_ref());
            let from = product_backward(back, of, &a, adapters[i].as_ref(), &dy)?;
            da = Some(match da {
                Some(sum) => back.sum(sum, from)?,
                None => from,
            });
        }
        let mut da = da.expect("there are three");
        back.see("dshared_norm", &mut da)?;
        shared.norm.backward(back, &both, &da)
    }
}

/// A product of `a[n,..]` and, where there is an adapter, what that makes, added in f32, of `dtype`; and what its reverse reads.
fn product(
    pass: &mut Pass,
    (linear, adapter): (&Linear, Option<&Narrow>),
    a: &Tensor,
    (site, dtype): (&'static str, DType),
) -> Result<(Tensor, Option<narrow::Saved>), ModelError> {
    let Some(adapter) = adapter else { return Ok((linear.apply(pass, a.view(), dtype)?, None)) };
    let plain = linear.apply(pass, a.view(), DType::Fp32)?;
    let (mut own, saved) = adapter.forward(pass, a)?;
    pass.see(site, &mut own)?;
    Ok((add(pass, &plain, &own, dtype)?, Some(saved)))
}

/// From `dy` in f32 of a [`product`]: that of a, in f32.
fn product_backward(
    back: &mut Backward,
    (linear, adapter): (&Linear, Option<&Narrow>),
    a: &Tensor,
    saved: Option<&narrow::Saved>,
    dy: &Tensor,
) -> Result<Tensor, ModelError> {
    let from = linear.backward(back, 0, a.view(), dy.view(), back.mask, DType::Fp32)?;
    let (Some(adapter), Some(saved)) = (adapter, saved) else { return Ok(from) };
    let own = adapter.backward(back, a, saved, dy)?;
    back.sum(from, own)
}
