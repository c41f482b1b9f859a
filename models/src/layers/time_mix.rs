//! The time mix of RWKV-7: `out(norm(wkv(r, w, k, v, -kk, kk * i)) + bonus) * g)`. r, w, k, v, i and g are projections of tokens
//! mixed with the ones before them, those of w, i, g and of v's way back to the first layer by two narrow matrices; kk is k of
//! length 1 in each head. What it keeps of a sequence is its last token, and the state of the recurrence.
//!
//! All between the first projections and the last is f32, and rounded once where a product reads it.

use super::linear::Linear;
use super::loader::Loader;
use super::recur::{self, Kept};
use super::token_shift::{PerChannel, TokenShift, add, mul, scaled, sub};
use super::{SIZES, WIDTH, is_size};
use crate::ModelError;
use crate::backward::{Backward, Block};
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use samebits_ops::device::{Device, Part};
use samebits_ops::{Attributes, Backend, Cpu, DType, Tensor, TensorRef};

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
    /// The names of its tensors.
    pub names: Names,
}

/// The names of the tensors of a time mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// Those of the `rwkv` package.
    Published,
    /// Those of flash-linear-attention.
    Fla,
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
}

/// Two matrices with few rows between them.
struct Narrow {
    down: Linear,
    up: Linear,
}

impl Narrow {
    fn load(loader: &mut Loader, plan: &Plan, of: usize, bias: bool) -> Result<Narrow, ModelError> {
        let (name, rank) = (["w", "a", "v", "g"][of], plan.ranks[of]);
        let names = match plan.names {
            Names::Published => [format!("att.{name}1"), format!("att.{name}2")],
            Names::Fla => [format!("attn.{name}_lora.lora.0"), format!("attn.{name}_lora.lora.2")],
        };
        let before = std::mem::replace(&mut loader.transposed, plan.names == Names::Published);
        let down = loader.linear(&names[0], rank, plan.hidden, false);
        let up = loader.linear(&names[1], plan.hidden, rank, bias);
        loader.transposed = before;
        Ok(Narrow { down: down?, up: up? })
    }

    fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.down.move_to(cpu, device)?;
        self.up.move_to(cpu, device)
    }
}

/// What mixes a token with the one before it, in this order.
const MIXED: [&str; 6] = ["x_r", "x_w", "x_k", "x_v", "x_a", "x_g"];

pub(crate) struct TimeMix {
    plan: Plan,
    shift: TokenShift,
    /// As [`MIXED`].
    mu: [PerChannel; 6],
    r: Linear,
    k: Linear,
    v: Linear,
    w: Narrow,
    i: Narrow,
    /// None in the first layer.
    back: Option<Narrow>,
    g: Narrow,
    k_k: PerChannel,
    k_a: PerChannel,
    r_k: PerChannel,
    norm: PerChannel,
    out: Linear,
    /// A row of ones and one of `-e^-0.5`, by which products with gates are sigmoids and logarithms of decays; weights by which an
    /// RMS norm has length 1, and a matrix of ones, by which a product is the sum of a head in each of its elements.
    ones: Tensor,
    rates: Tensor,
    length: Tensor,
    sum: Tensor,
}

/// What a reverse pass reads.
pub(crate) struct Saved {
    difference: Tensor,
    /// As [`MIXED`], as products read them.
    mixed: [Tensor; 6],
    r: Tensor,
    /// Before it was scaled by i, and behind.
    k: Tensor,
    scaled_k: Tensor,
    /// What the way back to the first layer's v takes a part of.
    away: Option<Tensor>,
    v: Tensor,
    /// Inside of narrow matrices: as the second reads it, and what the sigmoid of g reads.
    inner: [Tensor; 3],
    inner_v: Option<Tensor>,
    of_g: Tensor,
    /// What sigmoids read.
    of_w: Tensor,
    of_i: Tensor,
    of_v: Option<Tensor>,
    g: Tensor,
    /// The difference that `k_a` takes a part of; k of other lengths, and of length 1; that with the other sign, and its part.
    of_k_a: Tensor,
    long: Tensor,
    unit: Tensor,
    minus: Tensor,
    part: Tensor,
    w: Tensor,
    wkv: Tensor,
    normed: Tensor,
    /// `r * k`, and the sum of it by heads.
    product: Tensor,
    sums: Tensor,
    summed: Tensor,
    gated: Tensor,
}

impl TimeMix {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<TimeMix, ModelError> {
        let &Plan { hidden, head_dim, first, names, .. } = plan;
        let is_fla = names == Names::Fla;
        let of = |part: &str| format!("{}.{part}", if is_fla { "attn" } else { "att" });
        let matrix = |short: &str, long: &str| of(&if is_fla { format!("{short}_proj") } else { long.into() });
        let mut mu = Vec::new();
        for name in MIXED {
            mu.push(PerChannel::load(loader, &of(name), &[hidden], None)?);
        }
        let mu = mu.try_into().ok().expect("one for each");
        let mut linear = |name: String| loader.linear(&name, hidden, hidden, false);
        let (r, k, v) =
            (linear(matrix("r", "receptance"))?, linear(matrix("k", "key"))?, linear(matrix("v", "value"))?);
        let out = linear(matrix("o", "output"))?;
        let w = Narrow::load(loader, plan, 0, true)?;
        let i = Narrow::load(loader, plan, 1, true)?;
        let back = (!first).then(|| Narrow::load(loader, plan, 2, true)).transpose()?;
        let g = Narrow::load(loader, plan, 3, false)?;
        let k_k = PerChannel::load(loader, &of("k_k"), &[hidden], None)?;
        let k_a = PerChannel::load(loader, &of("k_a"), &[hidden], None)?;
        let r_k = PerChannel::load(loader, &of("r_k"), &[plan.heads(), head_dim], None)?;
        let norm = of(if is_fla { "g_norm" } else { "ln_x" });
        let bias = format!("{norm}.bias");
        let norm = PerChannel::load(loader, &format!("{norm}.weight"), &[hidden], Some(&bias))?;
        let widest = hidden.max(plan.ranks[3]);
        Ok(TimeMix {
            shift: TokenShift::new(hidden)?,
            ones: Tensor::new(vec![1f32; widest], &[1, widest])?,
            rates: Tensor::new(vec![(-(-0.5f64).exp()) as f32; hidden], &[1, hidden])?,
            length: Tensor::new(vec![(1.0 / (head_dim as f64).sqrt()) as f32; head_dim], &[head_dim])?,
            sum: Tensor::new(vec![1f32; head_dim * head_dim], &[head_dim, head_dim])?,
            plan: plan.clone(),
            mu,
            r,
            k,
            v,
            w,
            i,
            back,
            g,
            k_k,
            k_a,
            r_k,
            norm,
            out,
        })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        let TimeMix { shift, mu, r, k, v, w, i, back, g, k_k, k_a, r_k, norm, out, ones, rates, length, sum, .. } =
            self;
        shift.move_to(device)?;
        mu.iter_mut().chain([k_k, k_a, r_k, norm]).try_for_each(|numbers| numbers.move_to(device))?;
        [r, k, v, out].into_iter().try_for_each(|linear| linear.move_to(cpu, device))?;
        [Some(w), Some(i), back.as_mut(), Some(g)].into_iter().flatten().try_for_each(|n| n.move_to(cpu, device))?;
        for constant in [ones, rates, length, sum] {
            *constant = Backend::upload(device, constant.view())?;
        }
        Ok(())
    }

    pub fn state(&self) -> Kind {
        Kind::Recurrent(vec![self.plan.hidden, self.plan.hidden * self.plan.head_dim])
    }

    /// As many rows of a constant as `like` has.
    fn rows(pass: &Pass, row: &Tensor, like: &Tensor) -> Result<Tensor, ModelError> {
        let &[n, width] = like.shape() else { unreachable!("it has rows") };
        let mut rows = pass.empty(DType::Fp32, &[n, width])?;
        let from = Part { every: n.max(1), ..Part::whole(row.shape()[1]) };
        pass.machine.copy_rows([n, width], (row, from), (&mut rows, Part::whole(width)))?;
        Ok(rows)
    }

    /// `x * sigmoid(gate)`, of `dtype`.
    fn gated(pass: &mut Pass, gate: &Tensor, x: &Tensor, dtype: DType) -> Result<Tensor, ModelError> {
        let mut y = pass.empty(dtype, x.shape())?;
        let inputs = [("gate", gate.view()), ("x", x.view())];
        pass.op("sigmoid_mul", &Attributes::new(), &inputs, [("y", y.view_mut())])?;
        Ok(y)
    }

    /// From that of `x * sigmoid(gate)`: those of gate and x.
    fn gated_backward(pass: &mut Pass, gate: &Tensor, x: &Tensor, dy: &Tensor) -> Result<[Tensor; 2], ModelError> {
        let (mut dgate, mut dx) = (pass.empty(DType::Fp32, gate.shape())?, pass.empty(DType::Fp32, x.shape())?);
        let inputs = [("gate", gate.view()), ("x", x.view()), ("dy", dy.view())];
        let outputs = [("dgate", dgate.view_mut()), ("dx", dx.view_mut())];
        pass.op("sigmoid_mul_backward", &Attributes::new(), &inputs, outputs)?;
        Ok([dgate, dx])
    }

    /// What the norm that makes heads of length 1 adds under the root: what `normalize` of torch divides by at least is 1e-12.
    fn of_length(&self) -> Attributes {
        Attributes::new().with("eps", 1e-24 / self.plan.head_dim as f64)
    }

    fn of_norm(&self) -> Attributes {
        Attributes::new().with("eps", f64::from(self.plan.eps))
    }

    /// `a[n,hidden] -> y[n,hidden]`
    pub fn forward(
        &self,
        pass: &mut Pass,
        state: &mut LayerState,
        a: &Tensor,
        y: &mut Tensor,
    ) -> Result<Option<Saved>, ModelError> {
        let (f32, none, n) = (DType::Fp32, Attributes::new(), a.shape()[0]);
        let (heads, head_dim) = (self.plan.heads(), self.plan.head_dim);
        let by_heads = [n * heads, head_dim];
        let wide = scaled(pass, a, 1.0)?;
        let difference = self.shift.forward(pass, state, &wide)?;
        let mut mixed = Vec::new();
        for mu in &self.mu {
            let part = mu.forward(pass, &difference)?;
            mixed.push(add(pass, &wide, &part, pass.dtype)?);
        }
        let mixed: [Tensor; 6] = mixed.try_into().ok().expect("one for each");
        let [of_r, of_w, of_k, to_v, of_a, of_g] = mixed.each_ref().map(Tensor::view);
        let r = self.r.apply(pass, of_r, f32)?;
        let k = self.k.apply(pass, of_k, f32)?;
        let own = self.v.apply(pass, to_v, f32)?;

        let down = self.w.down.apply(pass, of_w, f32)?;
        let mut inner_w = pass.empty(pass.dtype, down.shape())?;
        pass.op("softcap", &none.clone().with("cap", 1.0), &[("x", down.view())], [("y", inner_w.view_mut())])?;
        let of_w = self.w.up.apply(pass, inner_w.view(), f32)?;
        let rates = TimeMix::rows(pass, &self.rates, &of_w)?;
        let mut w = TimeMix::gated(pass, &of_w, &rates, f32)?;
        pass.see("decay", &mut w)?;
        let inner_i = self.i.down.apply(pass, of_a, pass.dtype)?;
        let of_i = self.i.up.apply(pass, inner_i.view(), f32)?;
        let of_sigmoid = self.g.down.apply(pass, of_g, f32)?;
        let ones = TimeMix::rows(pass, &self.ones, &of_sigmoid)?;
        let inner_g = TimeMix::gated(pass, &of_sigmoid, &ones, pass.dtype)?;
        let g = self.g.up.apply(pass, inner_g.view(), f32)?;

        let long = self.k_k.forward(pass, &k)?;
        let mut unit = pass.empty(f32, long.shape())?;
        let inputs = [("x", long.view_as(&by_heads)?), ("w", self.length.view())];
        pass.op("rms_norm", &self.of_length(), &inputs, [("y", unit.view_mut_as(&by_heads)?)])?;
        let minus = scaled(pass, &unit, -1.0)?;
        let part = TimeMix::gated(pass, &of_i, &unit, f32)?;
        let taken = TimeMix::gated(pass, &of_i, &k, f32)?;
        let of_k_a = sub(pass, &taken, &k)?;
        let change = self.k_a.forward(pass, &of_k_a)?;
        let scaled_k = add(pass, &k, &change, f32)?;

        let (mut v, mut way_back) = (own, [None, None, None]);
        match &self.back {
            None => {
                let (mut carried, width) = (pass.empty(f32, v.shape())?, self.plan.hidden);
                let from = (&v, Part::whole(width));
                pass.machine.copy_rows([n, width], from, (&mut carried, Part::whole(width)))?;
                pass.carried = Some(carried);
            }
            Some(back) => {
                let inner = back.down.apply(pass, mixed[3].view(), pass.dtype)?;
                let gate = back.up.apply(pass, inner.view(), f32)?;
                let carried = pass.carried.take().expect("the first layer has left its v");
                let away = sub(pass, &carried, &v)?;
                pass.carried = Some(carried);
                let way = TimeMix::gated(pass, &gate, &away, f32)?;
                v = add(pass, &v, &way, f32)?;
                way_back = [Some(away), Some(inner), Some(gate)];
            }
        }

        let mut wkv = pass.empty(f32, v.shape())?;
        let axes = [heads, head_dim];
        let tokens = [("r", &r), ("w", &w), ("k", &scaled_k), ("v", &v), ("a", &minus), ("b", &part)];
        let tokens = tokens.map(|(name, x)| (name, x, &axes[..]));
        let kept = [Kept { part: 1, names: ["state", "next"], axes: &[heads, head_dim, head_dim] }];
        recur::forward(pass, state, ("wkv7", &none), &tokens, &[], &kept, ("y", &mut wkv, &axes))?;
        pass.see("wkv", &mut wkv)?;
        let mut normed = pass.empty(f32, wkv.shape())?;
        let of_wkv = [("x", wkv.view_as(&by_heads)?)];
        pass.op("layer_norm", &self.of_norm(), &of_wkv, [("y", normed.view_mut_as(&by_heads)?)])?;
        let weighted = self.norm.forward(pass, &normed)?;

        let product = mul(pass, &r, &scaled_k)?;
        let weighed = self.r_k.forward(pass, &product)?;
        let mut sums = pass.empty(f32, weighed.shape())?;
        let inputs = [("x", weighed.view_as(&by_heads)?), ("w", self.sum.view())];
        pass.op("gemm", &none, &inputs, [("y", sums.view_mut_as(&by_heads)?)])?;
        let bonus = mul(pass, &sums, &v)?;
        let summed = add(pass, &weighted, &bonus, f32)?;
        let mut gated = pass.empty(pass.dtype, summed.shape())?;
        let inputs = [("a", summed.view()), ("b", g.view())];
        pass.op("mul", &none, &inputs, [("y", gated.view_mut())])?;
        self.out.apply_to(pass, 0, gated.view(), y.view_mut())?;
        let [away, inner_v, of_v] = way_back;
        let saved = || Saved {
            difference,
            mixed,
            r,
            k,
            scaled_k,
            away,
            v,
            inner: [inner_w, inner_i, inner_g],
            inner_v,
            of_g: of_sigmoid,
            of_w,
            of_i,
            of_v,
            g,
            of_k_a,
            long,
            unit,
            minus,
            part,
            w,
            wkv,
            normed,
            product,
            sums,
            summed,
            gated,
        };
        Ok(pass.keeps.then(saved))
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (mask, f32, none, n) = (back.mask, DType::Fp32, Attributes::new(), a.shape()[0]);
        let (heads, head_dim, hidden) = (self.plan.heads(), self.plan.head_dim, self.plan.hidden);
        let by_heads = [n * heads, head_dim];
        let s = saved;
        let [inner_w, inner_i, inner_g] = &s.inner;
        let dgated = self.out.backward(back, 0, s.gated.view(), dy.view(), mask, f32)?;
        let dsummed = mul(&mut back.pass, &dgated, &s.g)?;
        let dg = mul(&mut back.pass, &dgated, &s.summed)?;

        // The bonus: sums of heads, by a matrix of ones.
        let dsums = mul(&mut back.pass, &dsummed, &s.v)?;
        let mut dv = mul(&mut back.pass, &dsummed, &s.sums)?;
        let mut dweighed = back.pass.empty(f32, dsums.shape())?;
        let inputs = [("dy", dsums.view_as(&by_heads)?), ("w", self.sum.view())];
        back.pass.op("gemm_dx", &none, &inputs, [("dx", dweighed.view_mut_as(&by_heads)?)])?;
        let dproduct = self.r_k.backward(back, &s.product, &dweighed)?;
        let bonus_r = mul(&mut back.pass, &dproduct, &s.scaled_k)?;
        let bonus_k = mul(&mut back.pass, &dproduct, &s.r)?;

        let dnormed = self.norm.backward(back, &s.normed, &dsummed)?;
        let mut dwkv = back.pass.empty(f32, dnormed.shape())?;
        let inputs = [("x", s.wkv.view_as(&by_heads)?), ("dy", dnormed.view_as(&by_heads)?)];
        back.pass.op("layer_norm_backward", &self.of_norm(), &inputs, [("dx", dwkv.view_mut_as(&by_heads)?)])?;
        back.see("dwkv", &mut dwkv)?;
        let axes = [heads, head_dim];
        let tokens = [("r", &s.r), ("w", &s.w), ("k", &s.scaled_k), ("v", &s.v), ("a", &s.minus), ("b", &s.part)];
        let tokens: Vec<_> = tokens.into_iter().chain([("dy", &dwkv)]).map(|(name, x)| (name, x, &axes[..])).collect();
        let made =
            recur::backward(back, &tokens, &[hidden; 6], |back, block, given| self.of_block(back, block, given))?;
        let [dr, dw, dk, wkv_v, dminus, dpart] = &made[..] else { unreachable!("six were asked for") };
        let dr = back.sum(dr, bonus_r)?;
        let dscaled_k = back.sum(dk, bonus_k)?;
        dv = back.sum(wkv_v, dv)?;

        // k: of what i takes of it, and of its direction.
        let dof_k_a = self.k_a.backward(back, &s.of_k_a, &dscaled_k)?;
        let [mut dof_i, taken] = TimeMix::gated_backward(&mut back.pass, &s.of_i, &s.k, &dof_k_a)?;
        let mut dk = sub(&mut back.pass, &dscaled_k, &dof_k_a)?;
        dk = back.sum(dk, taken)?;
        let [of_part, dunit] = TimeMix::gated_backward(&mut back.pass, &s.of_i, &s.unit, dpart)?;
        dof_i = back.sum(dof_i, of_part)?;
        let dunit = sub(&mut back.pass, &dunit, dminus)?;
        let mut dlong = back.pass.empty(f32, dunit.shape())?;
        let inputs = [("x", s.long.view_as(&by_heads)?), ("w", self.length.view()), ("dy", dunit.view_as(&by_heads)?)];
        back.pass.op("rms_norm_backward", &self.of_length(), &inputs, [("dx", dlong.view_mut_as(&by_heads)?)])?;
        let of_long = self.k_k.backward(back, &s.k, &dlong)?;
        dk = back.sum(dk, of_long)?;

        // v: of this layer and of the first.
        let mut from_back = None;
        if let (Some(narrow), Some(away), Some(inner), Some(gate)) = (&self.back, &s.away, &s.inner_v, &s.of_v) {
            let [dgate, daway] = TimeMix::gated_backward(&mut back.pass, gate, away, &dv)?;
            dv = sub(&mut back.pass, &dv, &daway)?;
            back.carried = Some(match back.carried.take() {
                Some(carried) => back.sum(carried, daway)?,
                None => daway,
            });
            let dinner = narrow.up.backward(back, 0, inner.view(), dgate.view(), mask, f32)?;
            from_back = Some(narrow.down.backward(back, 0, s.mixed[3].view(), dinner.view(), mask, f32)?);
        } else if let Some(carried) = back.carried.take() {
            dv = back.sum(dv, carried)?;
        }

        // The narrow matrices.
        let rates = TimeMix::rows(&back.pass, &self.rates, &s.of_w)?;
        let [dof_w, _] = TimeMix::gated_backward(&mut back.pass, &s.of_w, &rates, dw)?;
        let dinner = self.w.up.backward(back, 0, inner_w.view(), dof_w.view(), mask, f32)?;
        let down = self.w.down.apply(&mut back.pass, s.mixed[1].view(), f32)?;
        let mut ddown = back.pass.empty(f32, down.shape())?;
        let inputs = [("x", down.view()), ("dy", dinner.view())];
        let tanh = none.clone().with("cap", 1.0);
        back.pass.op("softcap_backward", &tanh, &inputs, [("dx", ddown.view_mut())])?;
        let of_w = self.w.down.backward(back, 0, s.mixed[1].view(), ddown.view(), mask, f32)?;
        let dinner = self.i.up.backward(back, 0, inner_i.view(), dof_i.view(), mask, f32)?;
        let of_a = self.i.down.backward(back, 0, s.mixed[4].view(), dinner.view(), mask, f32)?;
        let dinner = self.g.up.backward(back, 0, inner_g.view(), dg.view(), mask, f32)?;
        let ones = TimeMix::rows(&back.pass, &self.ones, &s.of_g)?;
        let [dof_g, _] = TimeMix::gated_backward(&mut back.pass, &s.of_g, &ones, &dinner)?;
        let of_g = self.g.down.backward(back, 0, s.mixed[5].view(), dof_g.view(), mask, f32)?;

        let of_r = self.r.backward(back, 0, s.mixed[0].view(), dr.view(), mask, f32)?;
        let of_k = self.k.backward(back, 0, s.mixed[2].view(), dk.view(), mask, f32)?;
        let mut of_v = self.v.backward(back, 0, s.mixed[3].view(), dv.view(), mask, f32)?;
        if let Some(from_back) = from_back {
            of_v = back.sum(of_v, from_back)?;
        }
        // What mixes read: the token, and its difference from the one before.
        let (mut da, mut ddifference): (Option<Tensor>, Option<Tensor>) = (None, None);
        for (mu, dmixed) in self.mu.iter().zip([of_r, of_w, of_k, of_v, of_a, of_g]) {
            let part = mu.backward(back, &s.difference, &dmixed)?;
            ddifference = Some(match ddifference {
                None => part,
                Some(sum) => back.sum(&sum, part)?,
            });
            da = Some(match da {
                None => dmixed,
                Some(sum) => back.sum(&sum, dmixed)?,
            });
        }
        let (da, ddifference) = da.zip(ddifference).expect("there are six");
        let shifted = self.shift.backward(back, &ddifference)?;
        back.sum(da, shifted)
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
