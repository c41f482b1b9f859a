//! The time mix of RWKV-7: `out((norm(wkv(r, w, k, v, -kk, kk * i)) + bonus) * g)`. r, w, k, v, i and g are projections of tokens
//! mixed with the ones before them, those of w, i, g and of v's way back to the first layer by two narrow matrices; kk is k of
//! length 1 in each head ([`keys`]), and the bonus is what a token reads of itself ([`readout`]). What it keeps of a sequence is
//! its last token, and the state of the recurrence.
//!
//! All between the first projections and the last is f32, and rounded once where a product reads it.

mod keys;
mod readout;
mod values;

use super::arithmetic::{gated, gated_backward, mul, rows};
use super::linear::Linear;
use super::loader::Loader;
use super::narrow::{self, Between, Narrow};
use super::recur::{self, Kept};
use super::token_mix::{Mixed, TokenMix};
use super::{SIZES, WIDTH, is_size};
use crate::ModelError;
use crate::backward::{Backward, Block};
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use keys::Keys;
use readout::Readout;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, Cpu, DType, Tensor, TensorRef};
use values::Values;

/// What a time mix is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Width of the residual stream, and of all heads together.
    pub hidden: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Widths between the matrices of w, of i, of v's way back, and of g.
    pub ranks: [usize; 4],
    /// Whether it is the first, whose v the others read.
    pub first: bool,
    /// Added under the root of the norm of heads.
    pub eps: f32,
    /// Added to the sum of squares by whose root a direction has length 1.
    pub direction_eps: f64,
    /// The names of its tensors.
    pub names: Names,
}

/// The names of the tensors of a time mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// Those of the `rwkv` package, whose narrow matrices are stored transposed.
    Published,
    /// Those of flash-linear-attention.
    Fla,
}

impl Names {
    /// The name of what is called `part` in the package.
    fn of(self, part: &str) -> String {
        if self == Names::Published {
            return format!("att.{part}");
        }
        let narrow = |kind: &str, place| format!("{kind}_lora.lora.{place}");
        let part = match (part, part.as_bytes()) {
            ("receptance", _) => "r_proj".into(),
            ("key", _) => "k_proj".into(),
            ("value", _) => "v_proj".into(),
            ("output", _) => "o_proj".into(),
            ("ln_x", _) => "g_norm".into(),
            (_, [_, b'1']) => narrow(&part[..1], 0),
            (_, [_, b'2']) => narrow(&part[..1], 2),
            _ => part.to_string(),
        };
        format!("attn.{part}")
    }
}

impl Plan {
    fn heads(&self) -> usize {
        self.hidden / self.head_dim
    }

    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, _: &[Rotary]) -> Result<(), &'static str> {
        let state = self.hidden.checked_mul(self.head_dim);
        match () {
            _ if self.hidden != hidden => Err(WIDTH),
            _ if !self.ranks.iter().copied().all(is_size) || !state.is_some_and(is_size) => Err(SIZES),
            _ if !self.ranks.iter().all(|rank| rank.checked_mul(hidden).is_some_and(is_size)) => Err(SIZES),
            _ if !self.hidden.is_multiple_of(self.head_dim) => Err("heads divide the width"),
            _ => Ok(()),
        }
    }

    /// The two matrices of `kind`, with a bias or without.
    fn narrow(
        &self,
        loader: &mut Loader,
        kind: &str,
        rank: usize,
        between: Between,
        bias: bool,
    ) -> Result<Narrow, ModelError> {
        let names = [1, 2].map(|number| self.names.of(&format!("{kind}{number}")));
        Narrow::load(loader, names, [self.hidden, rank, self.hidden], between, (bias, self.names == Names::Published))
    }
}

/// What mixes a token with the one before it, in this order.
const MIXED: [&str; 6] = ["x_r", "x_w", "x_k", "x_v", "x_a", "x_g"];

pub(crate) struct TimeMix {
    plan: Plan,
    /// For [`MIXED`].
    mix: TokenMix<6>,
    r: Linear,
    k: Linear,
    v: Linear,
    w: Narrow,
    i: Narrow,
    g: Narrow,
    /// A row of `-e^-0.5`, by which a product with a gate is the logarithm of a decay.
    rates: Tensor,
    keys: Keys,
    values: Values,
    readout: Readout,
    out: Linear,
}

/// What a reverse pass reads.
pub(crate) struct Saved {
    mixed: Mixed<6>,
    /// Of w, i and g.
    narrow: [narrow::Saved; 3],
    /// What the sigmoids of w and i read.
    of_w: Tensor,
    of_i: Tensor,
    r: Tensor,
    w: Tensor,
    k: Tensor,
    keys: keys::Made,
    v: Tensor,
    values: Option<values::Saved>,
    readout: readout::Saved,
    g: Tensor,
    /// Behind the readout: before the product with g, and that.
    read: Tensor,
    product: Tensor,
}

impl TimeMix {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<TimeMix, ModelError> {
        let &Plan { hidden, ranks: [of_w, of_i, _, of_g], names, .. } = plan;
        let mut linear = |name| loader.linear(&names.of(name), hidden, hidden, false);
        let (r, k, v, out) = (linear("receptance")?, linear("key")?, linear("value")?, linear("output")?);
        Ok(TimeMix {
            mix: TokenMix::load(loader, hidden, MIXED.map(|name| names.of(name)))?,
            w: plan.narrow(loader, "w", of_w, Between::Tanh, true)?,
            i: plan.narrow(loader, "a", of_i, Between::Nothing, true)?,
            g: plan.narrow(loader, "g", of_g, Between::Sigmoid, false)?,
            rates: Tensor::new(vec![(-(-0.5f64).exp()) as f32; hidden], &[1, hidden])?,
            keys: Keys::load(loader, plan)?,
            values: Values::load(loader, plan)?,
            readout: Readout::load(loader, plan)?,
            plan: plan.clone(),
            r,
            k,
            v,
            out,
        })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        let TimeMix { plan: _, mix, r, k, v, w, i, g, rates, keys, values, readout, out } = self;
        mix.move_to(device)?;
        [r, k, v, out].into_iter().try_for_each(|linear| linear.move_to(cpu, device))?;
        [w, i, g].into_iter().try_for_each(|narrow| narrow.move_to(cpu, device))?;
        *rates = Backend::upload(device, rates.view())?;
        keys.move_to(device)?;
        values.move_to(cpu, device)?;
        readout.move_to(device)
    }

    pub fn state(&self) -> Kind {
        Kind::Recurrent(vec![self.mix.width(), self.plan.hidden * self.plan.head_dim])
    }

    /// `a[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        a: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let f32 = DType::Fp32;
        let mixed = self.mix.forward(pass, state, a)?;
        let [to_r, to_w, to_k, to_v, to_i, to_g] = &mixed.mixed;
        let r = self.r.apply(pass, to_r.view(), f32)?;
        let k = self.k.apply(pass, to_k.view(), f32)?;
        let v = self.v.apply(pass, to_v.view(), f32)?;
        let (of_w, narrow_w) = self.w.forward(pass, to_w)?;
        let rates = rows(pass, &self.rates, &of_w)?;
        let mut w = gated(pass, &of_w, &rates, f32)?;
        pass.see("decay", &mut w)?;
        let (of_i, narrow_i) = self.i.forward(pass, to_i)?;
        let (g, narrow_g) = self.g.forward(pass, to_g)?;
        let keys = self.keys.forward(pass, &k, &of_i)?;
        let (v, values) = self.values.forward(pass, v, to_v)?;

        let (heads, head_dim) = (self.plan.heads(), self.plan.head_dim);
        let (mut wkv, axes) = (pass.empty(f32, v.shape())?, [heads, head_dim]);
        let tokens = [("r", &r), ("w", &w), ("k", &keys.scaled), ("v", &v), ("a", &keys.minus), ("b", &keys.part)];
        let tokens = tokens.map(|(name, x)| (name, x, &axes[..]));
        let kept = [Kept { part: 1, names: ["state", "next"], axes: &[heads, head_dim, head_dim] }];
        recur::forward(pass, state, ("wkv7", &Attributes::new()), &tokens, &[], &kept, ("y", &mut wkv, &axes))?;
        pass.see("wkv", &mut wkv)?;

        let (read, readout) = self.readout.forward(pass, wkv, [&r, &keys.scaled, &v])?;
        let product = mul(pass, &read, &g, pass.dtype)?;
        self.out.apply_to(pass, 0, product.view(), y.view_mut())?;
        let narrow = [narrow_w, narrow_i, narrow_g];
        let saved = Saved { mixed, narrow, of_w, of_i, r, w, k, keys, v, values, readout, g, read, product };
        Ok(pass.keeps.then_some(saved))
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, _: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (s, mask, f32) = (&saved, back.mask, DType::Fp32);
        let ([to_r, to_w, to_k, to_v, to_i, to_g], [narrow_w, narrow_i, narrow_g]) = (&s.mixed.mixed, &s.narrow);
        let dproduct = self.out.backward(back, 0, s.product.view(), dy.view(), mask, f32)?;
        let dread = mul(&mut back.pass, &dproduct, &s.g, f32)?;
        let dg = mul(&mut back.pass, &dproduct, &s.read, f32)?;
        let (mut dwkv, of_bonus) = self.readout.backward(back, (&s.readout, [&s.r, &s.keys.scaled, &s.v]), &dread)?;
        back.see("dwkv", &mut dwkv)?;
        let [dr, dw, dk, dv, dminus, dpart] = self.recurrence_backward(back, s, &dwkv)?;
        let [bonus_r, bonus_k, bonus_v] = of_bonus;
        let (dr, dscaled, dv) = (back.sum(dr, bonus_r)?, back.sum(dk, bonus_k)?, back.sum(dv, bonus_v)?);
        let [dk, dof_i] = self.keys.backward(back, (&s.k, &s.of_i, &s.keys), [&dscaled, &dminus, &dpart])?;
        let (dv, back_of_v) = self.values.backward(back, (to_v, s.values.as_ref()), dv)?;
        let rates = rows(&back.pass, &self.rates, &s.of_w)?;
        let [dof_w, _] = gated_backward(&mut back.pass, &s.of_w, &rates, &dw)?;

        let of_w = self.w.backward(back, to_w, narrow_w, &dof_w)?;
        let of_i = self.i.backward(back, to_i, narrow_i, &dof_i)?;
        let of_g = self.g.backward(back, to_g, narrow_g, &dg)?;
        let of_r = self.r.backward(back, 0, to_r.view(), dr.view(), mask, f32)?;
        let of_k = self.k.backward(back, 0, to_k.view(), dk.view(), mask, f32)?;
        let mut of_v = self.v.backward(back, 0, to_v.view(), dv.view(), mask, f32)?;
        if let Some(back_of_v) = back_of_v {
            of_v = back.sum(of_v, back_of_v)?;
        }
        self.mix.backward(back, &s.mixed, [of_r, of_w, of_k, of_v, of_i, of_g])
    }

    /// From that of what the recurrence reads: those of r, w, k, v, a and b.
    fn recurrence_backward(&self, back: &mut Backward, s: &Saved, dwkv: &Tensor) -> Result<[Tensor; 6], ModelError> {
        let axes = [self.plan.heads(), self.plan.head_dim];
        let keys = &s.keys;
        let tokens =
            [("r", &s.r), ("w", &s.w), ("k", &keys.scaled), ("v", &s.v), ("a", &keys.minus), ("b", &keys.part)];
        let tokens: Vec<_> = tokens.into_iter().chain([("dy", dwkv)]).map(|(name, x)| (name, x, &axes[..])).collect();
        let widths = [self.plan.hidden; 6];
        let made = recur::backward(back, &tokens, &widths, |back, block, given| self.of_block(back, block, given))?;
        Ok(made.try_into().ok().expect("six were asked for"))
    }

    /// Of the sequences of a block: the gradients of r, w, k, v, a and b.
    fn of_block(
        &self,
        back: &mut Backward,
        block: &Block,
        inputs: Vec<(&str, TensorRef)>,
    ) -> Result<Vec<Tensor>, ModelError> {
        let (heads, head_dim) = (self.plan.heads(), self.plan.head_dim);
        let (batch, lengths) = (block.lengths.len(), block.lengths_i32());
        let of_tokens = [batch, block.rows, heads, head_dim];
        let made = [(); 6].map(|()| back.pass.empty(DType::Fp32, &of_tokens));
        let mut made = made.into_iter().collect::<Result<Vec<_>, _>>()?;
        let mut dstate = back.pass.empty(DType::Fp32, &[batch, heads, head_dim, head_dim])?;
        let names = ["dr", "dw", "dk", "dv", "da", "db"];
        let mut outputs: Vec<_> = names.into_iter().zip(made.iter_mut().map(Tensor::view_mut)).collect();
        outputs.push(("dstate", dstate.view_mut()));
        let given = [&inputs[..], &[("len", TensorRef::new(&lengths, &[batch])?)]].concat();
        back.pass.run("wkv7_backward", &Attributes::new(), &given, outputs)?;
        Ok(made)
    }
}
