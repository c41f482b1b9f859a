//! A scan of Mamba-2: `out(norm(scan(x, dt, b, c) * silu(z)))`, where z, one stream of x, b and c, and dt are projections of what
//! enters, which may have a factor each, and x, b and c have gone through a causal convolution and a silu. The norm may also stand
//! before the gate, or be missing. What it keeps of a sequence is the last rows that the convolution reads, and the state of the
//! scan.
//!
//! All between the first projections and the last is f32, and rounded once where the last reads it.

use super::arithmetic::{mul, rows, silu, silu_backward, silu_gated, silu_gated_backward};
use super::causal_conv::CausalConv;
use super::linear::{Linear, Source};
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

/// What a scan is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What stands before the names of its tensors.
    pub name: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads, and elements of each.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Groups of heads that share b and c.
    pub groups: usize,
    /// Elements of a state for each element of a head.
    pub state_dim: usize,
    /// Positions that an output of the convolution sees: its own and those before.
    pub taps: usize,
    /// Whether the projections have biases, and whether the convolution has one.
    pub bias: [bool; 2],
    /// Steps in time are no shorter and no longer; the second is 0 for no limit.
    pub limits: [f64; 2],
    /// Factors of z, x, b, c and dt, where there are any.
    pub factors: Option<[f64; 5]>,
    /// How the scan is gated.
    pub gate: Gate,
    /// The norm of the scan, where the gate has one.
    pub norm: norm::Plan,
    /// Parts of a row that have norms of their own.
    pub norm_groups: usize,
}

/// Where the norm of a scan stands that silu(z) gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// Behind the gate.
    ThenNorm,
    /// Before the gate.
    AfterNorm,
    /// Nowhere.
    Alone,
}

impl Plan {
    /// Elements of all heads.
    fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of b, or of c.
    fn shared(&self) -> usize {
        self.groups * self.state_dim
    }

    /// Channels of the convolution.
    fn channels(&self) -> usize {
        self.inner() + 2 * self.shared()
    }

    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, _: &[Rotary]) -> Result<(), &'static str> {
        let Plan { heads, head_dim, groups, state_dim, taps, limits: [min, max], norm_groups, .. } = *self;
        let product =
            |sizes: &[usize]| sizes.iter().try_fold(1usize, |all, n| all.checked_mul(*n)).is_some_and(is_size);
        let shared = groups.saturating_mul(state_dim).saturating_mul(2);
        let channels = heads.saturating_mul(head_dim).saturating_add(shared);
        let divides = |n: usize, all: usize| n > 0 && all.is_multiple_of(n);
        match () {
            _ if self.hidden != hidden => Err(WIDTH),
            _ if !self.factors.iter().flatten().all(|factor| (*factor as f32).is_finite()) => {
                Err("factors are numbers within f32")
            }
            _ if !product(&[heads, head_dim, state_dim]) || !product(&[channels, taps]) => Err(SIZES),
            _ if !divides(groups, heads) || !divides(norm_groups, heads * head_dim) => {
                Err("groups divide what they share")
            }
            _ if !(0.0..=1e38).contains(&min) || !(0.0..=1e38).contains(&max) || max != 0.0 && max < min => {
                Err("limits of steps ascend")
            }
            _ => Ok(()),
        }
    }
}

pub(crate) struct Mamba2 {
    plan: Plan,
    z: Linear,
    /// x, b and c.
    stream: Linear,
    dt: Linear,
    conv: CausalConv,
    dt_bias: Vector,
    a_log: Vector,
    d: Vector,
    norm: Option<ScanNorm>,
    out: Linear,
    /// A row of ones, by which a product with a gate is the gate's silu.
    ones: Tensor,
    factors: Option<Factors>,
}

/// Factors of what the first projections make.
struct Factors {
    z: Attributes,
    /// A row of those of x, b and c.
    stream: Tensor,
    dt: Attributes,
}

/// What a reverse pass reads, beside a.
pub(crate) struct Saved {
    z: Tensor,
    /// x, b and c before the convolution and behind it.
    stream: Tensor,
    conv: Tensor,
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    scan: Tensor,
    /// What stands between the gate and the norm, where there is one.
    between: Option<Tensor>,
    /// What the last projection reads.
    read: Tensor,
}

impl Mamba2 {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<Mamba2, ModelError> {
        let (hidden, inner, channels, [bias, conv_bias]) = (plan.hidden, plan.inner(), plan.channels(), plan.bias);
        let widths = [inner, channels, plan.heads];
        let name = |part: &str| format!("{}.{part}", plan.name);
        let [z, stream, dt] = loader.parts(&name("in_proj"), 1, widths, hidden, bias)?;
        let conv = CausalConv::load(loader, &name("conv1d"), [channels, plan.taps], conv_bias)?;
        let mut vector = |part| loader.vector(&name(part), plan.heads);
        let (dt_bias, a_log, d) = (vector("dt_bias")?, vector("A_log")?, vector("D")?);
        let norm =
            (plan.gate != Gate::Alone).then(|| ScanNorm::load(loader, &name("norm"), inner, plan)).transpose()?;
        let out = loader.linear(&name("out_proj"), hidden, inner, bias)?;
        let ones = Tensor::new(vec![1f32; channels], &[1, channels])?;
        let factors = plan.factors.map(|[z, x, b, c, dt]| {
            let of = |factor: f64| Attributes::new().with("factor", factor);
            let shared = plan.shared();
            let row = [(x, inner), (b, shared), (c, shared)].into_iter().flat_map(|(factor, n)| vec![factor as f32; n]);
            Ok::<_, ModelError>(Factors { z: of(z), stream: Tensor::new(row.collect(), &[1, channels])?, dt: of(dt) })
        });
        let factors = factors.transpose()?;
        Ok(Mamba2 { plan: plan.clone(), z, stream, dt, conv, dt_bias, a_log, d, norm, out, ones, factors })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        let Mamba2 { z, stream, dt, conv, dt_bias, a_log, d, norm, out, ones, factors, .. } = self;
        [z, stream, dt, out].into_iter().try_for_each(|linear| linear.move_to(cpu, device))?;
        [dt_bias, a_log, d].into_iter().try_for_each(|vector| vector.move_to(device))?;
        *ones = Backend::upload(device, ones.view())?;
        if let Some(Factors { stream, .. }) = factors {
            *stream = Backend::upload(device, stream.view())?;
        }
        conv.move_to(device)?;
        norm.as_mut().map_or(Ok(()), |norm| norm.move_to(device))
    }

    pub fn state(&self) -> Kind {
        Kind::Recurrent(vec![self.conv.width(), self.plan.inner() * self.plan.state_dim])
    }

    /// The attributes of the scan.
    fn attributes(&self) -> Attributes {
        let [min, max] = self.plan.limits;
        Attributes::new().with("dt_min", min).with("dt_max", max)
    }

    /// The parameters of the scan.
    fn parameters(&self) -> [(&'static str, TensorRef<'_>); 3] {
        [("a_log", self.a_log.w.view()), ("d", self.d.w.view()), ("dt_bias", self.dt_bias.w.view())]
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
        let Plan { heads, head_dim, groups, state_dim, .. } = self.plan;
        let (inner, shared) = (self.plan.inner(), self.plan.shared());
        let mut z = self.z.apply(pass, a.view(), f32)?;
        let mut stream = self.stream.apply(pass, a.view(), f32)?;
        let mut dt = self.dt.apply(pass, a.view(), f32)?;
        if let Some(factors) = &self.factors {
            factors.apply(pass, [&mut z, &mut stream, &mut dt])?;
        }
        pass.see("z", &mut z)?;
        let mut conv = self.conv.forward(pass, state, 0, &stream)?;
        pass.see("conv", &mut conv)?;
        let active = silu(pass, &conv, &self.ones)?;
        let x = columns(pass, &active, 0, inner)?;
        let b = columns(pass, &active, inner, shared)?;
        let c = columns(pass, &active, inner + shared, shared)?;
        let mut scan = pass.empty(f32, x.shape())?;
        let (of_x, of_b, of_dt) = ([heads, head_dim], [groups, state_dim], [heads]);
        let tokens = [("x", &x, &of_x[..]), ("dt", &dt, &of_dt), ("b", &b, &of_b), ("c", &c, &of_b)];
        let kept = [Kept { part: 1, names: ["state", "next"], axes: &[heads, head_dim, state_dim] }];
        let op = ("ssd_scan", &self.attributes());
        recur::forward(pass, state, op, &tokens, &self.parameters(), &kept, ("y", &mut scan, &of_x))?;
        pass.see("scan", &mut scan)?;
        let dtype = pass.dtype;
        let (between, mut read) = match (&self.norm, self.plan.gate) {
            (Some(norm), Gate::AfterNorm) => {
                let normed = norm.forward(pass, &scan, f32)?;
                let gated = silu_gated(pass, &z, &normed, dtype)?;
                (Some(normed), gated)
            }
            (Some(norm), _) => {
                let gated = silu_gated(pass, &z, &scan, f32)?;
                let normed = norm.forward(pass, &gated, dtype)?;
                (Some(gated), normed)
            }
            (None, _) => (None, silu_gated(pass, &z, &scan, dtype)?),
        };
        pass.see("gated", &mut read)?;
        self.out.apply_to(pass, 0, read.view(), y.view_mut())?;
        Ok(pass.keeps.then_some(Saved { z, stream, conv, x, b, c, dt, scan, between, read }))
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let Saved { z, stream, conv, x, b, c, dt, scan, between, read } = saved;
        let (mask, f32, none) = (back.mask, DType::Fp32, Attributes::new());
        let Plan { heads, head_dim, groups, state_dim, .. } = self.plan;
        let (inner, shared) = (self.plan.inner(), self.plan.shared());
        let dread = self.out.backward(back, 0, read.view(), dy.view(), mask, f32)?;
        let [mut dz, mut dscan] = match (&self.norm, &between, self.plan.gate) {
            (Some(norm), Some(normed), Gate::AfterNorm) => {
                let [dz, dnormed] = silu_gated_backward(&mut back.pass, &z, normed, &dread)?;
                [dz, norm.backward(back, &scan, &dnormed)?]
            }
            (Some(norm), Some(gated), _) => {
                let dgated = norm.backward(back, gated, &dread)?;
                silu_gated_backward(&mut back.pass, &z, &scan, &dgated)?
            }
            _ => silu_gated_backward(&mut back.pass, &z, &scan, &dread)?,
        };
        back.see("dscan", &mut dscan)?;
        let (of_x, of_b, of_dt) = ([heads, head_dim], [groups, state_dim], [heads]);
        let tokens =
            [("x", &x, &of_x[..]), ("dt", &dt, &of_dt), ("b", &b, &of_b), ("c", &c, &of_b), ("dy", &dscan, &of_x)];
        let widths = [inner, heads, shared, shared, heads, heads];
        let made = recur::backward(back, &tokens, &widths, |back, block, given| self.of_block(back, block, given))?;
        let Ok([dx, mut ddt, db, dc, da_log, dd]) = <[Tensor; 6]>::try_from(made) else {
            unreachable!("six were asked for")
        };
        for (vector, by_position) in [(&self.a_log, &da_log), (&self.d, &dd), (&self.dt_bias, &ddt)] {
            let of = (Of::whole(&vector.name), None, heads);
            back.add_vector(["token_sum", "sum"], &none, of, &[("x", by_position.view())], mask)?;
        }
        let n = conv.shape()[0];
        let mut dactive = back.pass.empty(f32, conv.shape())?;
        for (part, first) in [(&dx, 0), (&db, inner), (&dc, inner + shared)] {
            let width = part.shape()[1];
            let to = Part { offset: first, ..Part::whole(self.plan.channels()) };
            back.pass.machine.copy_rows([n, width], (part, Part::whole(width)), (&mut dactive, to))?;
        }
        let mut dconv = silu_backward(&mut back.pass, &conv, &self.ones, &dactive)?;
        back.see("dconv", &mut dconv)?;
        let mut dstream = self.conv.backward(back, &stream, &dconv)?;
        if let Some(factors) = &self.factors {
            factors.apply(&mut back.pass, [&mut dz, &mut dstream, &mut ddt])?;
        }
        let from_z = self.z.backward(back, 0, a.view(), dz.view(), mask, f32)?;
        let from_stream = self.stream.backward(back, 0, a.view(), dstream.view(), mask, f32)?;
        let from_dt = self.dt.backward(back, 0, a.view(), ddt.view(), mask, f32)?;
        let sum = back.sum(from_z, from_stream)?;
        back.sum(sum, from_dt)
    }

    /// Of the sequences of a block: the gradients of x, dt, b and c, and those of a_log and d by position.
    fn of_block(
        &self,
        back: &mut Backward,
        block: &Block,
        inputs: Vec<(&str, TensorRef)>,
    ) -> Result<Vec<Tensor>, ModelError> {
        let Plan { heads, head_dim, groups, state_dim, .. } = self.plan;
        let (batch, rows, lengths) = (block.lengths.len(), block.rows, block.lengths_i32());
        let (of_x, of_dt) = ([batch, rows, heads, head_dim], [batch, rows, heads]);
        let (of_b, of_state) = ([batch, rows, groups, state_dim], [batch, heads, head_dim, state_dim]);
        let shapes: [&[usize]; 6] = [&of_x, &of_dt, &of_b, &of_b, &of_dt, &of_dt];
        let made = shapes.map(|shape| back.pass.empty(DType::Fp32, shape));
        let mut made = made.into_iter().collect::<Result<Vec<_>, _>>()?;
        let mut dstate = back.pass.empty(DType::Fp32, &of_state)?;
        let mut outputs: Vec<_> =
            ["dx", "ddt", "db", "dc", "da_log", "dd"].into_iter().zip(made.iter_mut().map(Tensor::view_mut)).collect();
        outputs.push(("dstate", dstate.view_mut()));
        let given = [&inputs[..], &self.parameters(), &[("len", TensorRef::new(&lengths, &[batch])?)]].concat();
        back.pass.run("ssd_scan_backward", &self.attributes(), &given, outputs)?;
        Ok(made)
    }
}

impl Factors {
    /// Multiplies what the projections made, or the gradients of what they made.
    fn apply(&self, pass: &mut Pass, [z, stream, dt]: [&mut Tensor; 3]) -> Result<(), ModelError> {
        for (factor, x) in [(&self.z, z), (&self.dt, dt)] {
            *x = pass.scaled(factor, x)?;
        }
        let factors = rows(pass, &self.stream, stream)?;
        *stream = mul(pass, stream, &factors, DType::Fp32)?;
        Ok(())
    }
}

/// Some columns of `x[n,..]`.
fn columns(pass: &Pass, x: &Tensor, first: usize, width: usize) -> Result<Tensor, ModelError> {
    let &[n, all] = x.shape() else { unreachable!("it has rows") };
    let mut part = pass.empty(x.dtype(), &[n, width])?;
    let from = Part { offset: first, ..Part::whole(all) };
    pass.machine.copy_rows([n, width], (x, from), (&mut part, Part::whole(width)))?;
    Ok(part)
}

/// The norm of rows, or of parts of them of one size, each of which has weights of its own.
struct ScanNorm {
    name: String,
    /// Of each part.
    weights: Vec<Tensor>,
    width: usize,
    attributes: Attributes,
    of_gradient: Attributes,
}

impl ScanNorm {
    fn load(loader: &mut Loader, part: &str, n: usize, plan: &Plan) -> Result<ScanNorm, ModelError> {
        let (Vector { name, w }, width) = (loader.vector(&format!("{part}.weight"), n)?, n / plan.norm_groups);
        let w = w.as_slice::<f32>().expect("it is f32, and on the host");
        // A list has no elements.
        let weights = (0..plan.norm_groups).map(|group| {
            let own = w.get(group * width..(group + 1) * width).unwrap_or_default();
            Ok(Tensor::new(own.to_vec(), &[own.len()])?)
        });
        let weights = weights.collect::<Result<_, ModelError>>()?;
        let (attributes, of_gradient) = (plan.norm.attributes(), plan.norm.of_gradient());
        Ok(ScanNorm { name, weights, width, attributes, of_gradient })
    }

    fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        self.weights.iter_mut().try_for_each(|w| {
            *w = Backend::upload(device, w.view())?;
            Ok(())
        })
    }

    /// Elements of a row.
    fn row(&self) -> usize {
        self.width * self.weights.len()
    }

    /// `x[n,..]` normed.
    fn forward(&self, pass: &mut Pass, x: &Tensor, dtype: DType) -> Result<Tensor, ModelError> {
        let (n, mut y) = (x.shape()[0], pass.empty(dtype, x.shape())?);
        for (group, w) in self.weights.iter().enumerate() {
            let own = columns(pass, x, group * self.width, self.width)?;
            let mut normed = pass.empty(dtype, own.shape())?;
            let inputs = [("x", own.view()), ("w", w.view())];
            pass.op("rms_norm", &self.attributes, &inputs, [("y", normed.view_mut())])?;
            self.put(pass, [n, group], &normed, &mut y)?;
        }
        Ok(y)
    }

    /// Puts a part of rows where it belongs.
    fn put(&self, pass: &Pass, [n, group]: [usize; 2], part: &Tensor, whole: &mut Tensor) -> Result<(), ModelError> {
        let to = Part { offset: group * self.width, ..Part::whole(self.row()) };
        Ok(pass.machine.copy_rows([n, self.width], (part, Part::whole(self.width)), (whole, to))?)
    }

    /// From `dy` of the norm of x: that of x.
    fn backward(&self, back: &mut Backward, x: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
        let (n, mut dx, mask) = (x.shape()[0], back.pass.empty(DType::Fp32, x.shape())?, back.mask);
        let (name, width) = (self.name.trim_end_matches(".weight"), self.width);
        for (group, w) in self.weights.iter().enumerate() {
            let own = columns(&back.pass, x, group * width, width)?;
            let own_dy = columns(&back.pass, dy, group * width, width)?;
            let source = Source { start: group * width, width, ..Source::whole(name.into(), self.row()) };
            let of = (Of::matrix(&source), Some(&source), width);
            let inputs = [("x", own.view()), ("dy", own_dy.view())];
            back.add_vector(["rms_norm_dw", "dw"], &self.of_gradient, of, &inputs, mask)?;
            let mut own_dx = back.pass.empty(DType::Fp32, own.shape())?;
            let inputs = [("x", own.view()), ("w", w.view()), ("dy", own_dy.view())];
            back.pass.op("rms_norm_backward", &self.attributes, &inputs, [("dx", own_dx.view_mut())])?;
            self.put(&back.pass, [n, group], &own_dx, &mut dx)?;
        }
        Ok(dx)
    }
}
