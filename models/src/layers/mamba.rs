//! A scan of Mamba: `out(scan(x, dt, b, c) * silu(z))`, where z and a stream are projections of what enters, and x is the stream
//! behind a causal convolution and a silu. Of x are projected b, c and a few numbers, of which dt is a projection; each of the three
//! may have a norm. What it keeps of a sequence is the last rows that the convolution reads, and the state of the scan.
//!
//! All between the first projections and the last is f32, and rounded once where a product reads it.

use super::arithmetic::{silu, silu_backward, silu_gated, silu_gated_backward};
use super::causal_conv::CausalConv;
use super::linear::Linear;
use super::loader::Loader;
use super::norm::{self, Norm, Vector};
use super::recur::{self, Kept};
use super::{SIZES, WIDTH, is_size};
use crate::ModelError;
use crate::backward::{Backward, Block};
use crate::pass::Pass;
use crate::rotary::Rotary;
use crate::state::{Kind, LayerState};
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, Cpu, DType, Tensor, TensorRef};

/// What a scan is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What stands before the names of its tensors.
    pub name: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Channels.
    pub inner: usize,
    /// Elements of the state of a channel.
    pub state_dim: usize,
    /// How many numbers the steps of all channels are projected from.
    pub rank: usize,
    /// Positions that an output of the convolution sees: its own and those before.
    pub taps: usize,
    /// Whether the first and the last projection have biases, and whether the convolution has one.
    pub bias: [bool; 2],
    /// The norms of what steps are projected from, of b and of c.
    pub norms: Option<Norms>,
}

/// Norms within a scan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norms {
    /// What each of them is.
    pub norm: norm::Plan,
    /// Whether they have weights.
    pub weights: bool,
}

impl Plan {
    /// What it no longer holds, where it was changed.
    pub(crate) fn check(&self, hidden: usize, _: &[Rotary]) -> Result<(), &'static str> {
        let Plan { inner, state_dim, rank, taps, norms, .. } = *self;
        let product = |a: usize, b: usize| a.checked_mul(b).is_some_and(is_size);
        let read = state_dim.saturating_mul(2).saturating_add(rank);
        match () {
            _ if self.hidden != hidden => Err(WIDTH),
            _ if !is_size(rank) || !is_size(read) || !product(inner, state_dim) || !product(inner, taps) => Err(SIZES),
            _ if !product(inner, 2) => Err(SIZES),
            _ if norms.is_some_and(|norms| norms.norm.kind != norm::Kind::Rms) => {
                Err("norms within a scan are RMS norms")
            }
            _ => Ok(()),
        }
    }
}

pub(crate) struct Mamba {
    plan: Plan,
    stream: Linear,
    z: Linear,
    conv: CausalConv,
    /// What steps are projected from, b and c.
    of_x: [Linear; 3],
    norms: Option<[Norm; 3]>,
    dt: Linear,
    dt_bias: Vector,
    a_log: Vector,
    d: Vector,
    out: Linear,
    /// A row of ones, by which a product with a gate is the gate's silu.
    ones: Tensor,
}

/// What a reverse pass reads, beside a.
pub(crate) struct Saved {
    z: Tensor,
    /// x before the convolution, behind it, behind the silu, and as products read it.
    stream: Tensor,
    conv: Tensor,
    x: Tensor,
    read: Tensor,
    /// What was projected of x before its norms, where there are any.
    before: Option<[Tensor; 3]>,
    /// What steps are projected from, as the product reads it.
    steps: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    scan: Tensor,
    /// What the last projection reads.
    gated: Tensor,
}

impl Mamba {
    pub fn load(loader: &mut Loader, plan: &Plan) -> Result<Mamba, ModelError> {
        let &Plan { hidden, inner, state_dim, rank, taps, bias: [bias, conv_bias], norms, .. } = plan;
        let name = |part: &str| format!("{}.{part}", plan.name);
        let [stream, z] = loader.parts(&name("in_proj"), 1, [inner, inner], hidden, bias)?;
        let conv = CausalConv::load(loader, &name("conv1d"), [inner, taps], conv_bias)?;
        let of_x = loader.parts(&name("x_proj"), 1, [rank, state_dim, state_dim], inner, false)?;
        let norms = match norms {
            None => None,
            Some(Norms { norm, weights }) => {
                let mut load = |part: &str, n: usize| match weights {
                    true => Norm::load(loader, &name(part), n, &norm),
                    false => Norm::without_weights(n, &norm),
                };
                let (dt, b) = (load("dt_layernorm", rank)?, load("b_layernorm", state_dim)?);
                Some([dt, b, load("c_layernorm", state_dim)?])
            }
        };
        let dt = loader.linear(&name("dt_proj"), inner, rank, false)?;
        let dt_bias = loader.vector(&name("dt_proj.bias"), inner)?;
        let (a_log, d) = (loader.tensor(&name("A_log"), &[inner, state_dim])?, loader.vector(&name("D"), inner)?);
        let out = loader.linear(&name("out_proj"), hidden, inner, bias)?;
        let ones = Tensor::new(vec![1f32; inner], &[1, inner])?;
        Ok(Mamba { plan: plan.clone(), stream, z, conv, of_x, norms, dt, dt_bias, a_log, d, out, ones })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        let Mamba { stream, z, conv, of_x, norms, dt, dt_bias, a_log, d, out, ones, .. } = self;
        [stream, z, dt, out].into_iter().chain(of_x).try_for_each(|linear| linear.move_to(cpu, device))?;
        norms.iter_mut().flatten().try_for_each(|norm| norm.move_to(device))?;
        [dt_bias, a_log, d].into_iter().try_for_each(|vector| vector.move_to(device))?;
        *ones = Backend::upload(device, ones.view())?;
        conv.move_to(device)
    }

    pub fn state(&self) -> Kind {
        Kind::Recurrent(vec![self.conv.width(), self.plan.inner * self.plan.state_dim])
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
        let (f32, &Plan { inner, state_dim, .. }) = (DType::Fp32, &self.plan);
        let stream = self.stream.apply(pass, a.view(), f32)?;
        let mut z = self.z.apply(pass, a.view(), f32)?;
        pass.see("z", &mut z)?;
        let mut conv = self.conv.forward(pass, state, 0, &stream)?;
        pass.see("conv", &mut conv)?;
        let x = silu(pass, &conv, &self.ones)?;
        let mut read = pass.empty(pass.dtype, x.shape())?;
        pass.round(&x, &mut read)?;
        let dtypes = [if self.norms.is_some() { f32 } else { pass.dtype }, f32, f32];
        let [mut steps, mut b, mut c] = self.of_x(pass, &read, dtypes)?;
        let before = match &self.norms {
            None => None,
            Some(norms) => {
                pass.see("projected", &mut steps)?;
                let before = [steps, b, c];
                [steps, b, c] = Self::normed(pass, norms, &before)?;
                Some(before)
            }
        };
        pass.see("steps", &mut steps)?;
        let mut dt = self.dt.apply(pass, steps.view(), f32)?;
        pass.see("dt", &mut dt)?;
        let mut scan = pass.empty(f32, x.shape())?;
        let (of_x, of_b) = ([inner], [state_dim]);
        let tokens = [("x", &x, &of_x[..]), ("dt", &dt, &of_x), ("b", &b, &of_b), ("c", &c, &of_b)];
        let kept = [Kept { part: 1, names: ["state", "next"], axes: &[inner, state_dim] }];
        let op = ("selective_scan", &Attributes::new());
        recur::forward(pass, state, op, &tokens, &self.parameters(), &kept, ("y", &mut scan, &of_x))?;
        pass.see("scan", &mut scan)?;
        let mut gated = silu_gated(pass, &z, &scan, pass.dtype)?;
        pass.see("gated", &mut gated)?;
        self.out.apply_to(pass, 0, gated.view(), y.view_mut())?;
        Ok(pass.keeps.then_some(Saved { z, stream, conv, x, read, before, steps, b, c, dt, scan, gated }))
    }

    /// What is projected of x, each of its dtype.
    fn of_x(&self, pass: &mut Pass, x: &Tensor, dtypes: [DType; 3]) -> Result<[Tensor; 3], ModelError> {
        let [steps, b, c] = &self.of_x;
        Ok([
            steps.apply(pass, x.view(), dtypes[0])?,
            b.apply(pass, x.view(), dtypes[1])?,
            c.apply(pass, x.view(), dtypes[2])?,
        ])
    }

    /// The norms of what was projected of x; that of what steps are projected from as the product reads it.
    fn normed(pass: &mut Pass, norms: &[Norm; 3], before: &[Tensor; 3]) -> Result<[Tensor; 3], ModelError> {
        let dtypes = [pass.dtype, DType::Fp32, DType::Fp32];
        let mut made = Vec::new();
        for ((norm, x), dtype) in norms.iter().zip(before).zip(dtypes) {
            let mut y = pass.empty(dtype, x.shape())?;
            norm.forward(pass, x, &mut y)?;
            made.push(y);
        }
        Ok(made.try_into().ok().expect("one for each"))
    }

    /// From `dy[n,hidden]` in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, a: &Tensor, saved: Saved, dy: &Tensor) -> Result<Tensor, ModelError> {
        let Saved { z, stream, conv, x, read, before, steps, b, c, dt, scan, gated } = saved;
        let (mask, f32, &Plan { inner, state_dim, .. }) = (back.mask, DType::Fp32, &self.plan);
        let dgated = self.out.backward(back, 0, gated.view(), dy.view(), mask, f32)?;
        let [dz, mut dscan] = silu_gated_backward(&mut back.pass, &z, &scan, &dgated)?;
        back.see("dscan", &mut dscan)?;
        let (of_x, of_b) = ([inner], [state_dim]);
        let tokens =
            [("x", &x, &of_x[..]), ("dt", &dt, &of_x), ("b", &b, &of_b), ("c", &c, &of_b), ("dy", &dscan, &of_x)];
        let widths = [inner, inner, state_dim, state_dim];
        let made = recur::backward(back, &tokens, &widths, |back, block, given| self.of_block(back, block, given))?;
        let Ok([mut dx, ddt, db, dc]) = <[Tensor; 4]>::try_from(made) else { unreachable!("four were asked for") };
        let of = (Of::whole(&self.dt_bias.name), None, inner);
        back.add_vector(["token_sum", "sum"], &Attributes::new(), of, &[("x", ddt.view())], mask)?;
        let dsteps = self.dt.backward(back, 0, steps.view(), ddt.view(), mask, f32)?;
        let mut projected = [dsteps, db, dc];
        if let (Some(norms), Some(before)) = (&self.norms, &before) {
            for ((norm, x), dy) in norms.iter().zip(before).zip(&mut projected) {
                *dy = norm.backward(back, x, dy)?;
            }
        }
        for (linear, dy) in self.of_x.iter().zip(&projected) {
            let from = linear.backward(back, 0, read.view(), dy.view(), mask, f32)?;
            dx = back.sum(dx, from)?;
        }
        let mut dconv = silu_backward(&mut back.pass, &conv, &self.ones, &dx)?;
        back.see("dconv", &mut dconv)?;
        let dstream = self.conv.backward(back, &stream, &dconv)?;
        let from_stream = self.stream.backward(back, 0, a.view(), dstream.view(), mask, f32)?;
        let from_z = self.z.backward(back, 0, a.view(), dz.view(), mask, f32)?;
        back.sum(from_stream, from_z)
    }

    /// Of the sequences of a block: the gradients of x, dt, b and c; those of a_log and d, which the op has summed over the
    /// positions of each sequence, are added up.
    fn of_block(
        &self,
        back: &mut Backward,
        block: &Block,
        inputs: Vec<(&str, TensorRef)>,
    ) -> Result<Vec<Tensor>, ModelError> {
        let (f32, &Plan { inner, state_dim, .. }) = (DType::Fp32, &self.plan);
        let (batch, rows, lengths) = (block.lengths.len(), block.rows, block.lengths_i32());
        let (of_x, of_b, of_state) = ([batch, rows, inner], [batch, rows, state_dim], [batch, inner, state_dim]);
        let made = [of_x, of_x, of_b, of_b].map(|shape| back.pass.empty(f32, &shape));
        let mut made = made.into_iter().collect::<Result<Vec<_>, _>>()?;
        let [mut da_log, mut dstate] = [back.pass.empty(f32, &of_state)?, back.pass.empty(f32, &of_state)?];
        let mut dd = back.pass.empty(f32, &[batch, inner])?;
        let mut outputs: Vec<_> =
            ["dx", "ddt", "db", "dc"].into_iter().zip(made.iter_mut().map(Tensor::view_mut)).collect();
        outputs.extend([("da_log", da_log.view_mut()), ("dd", dd.view_mut()), ("dstate", dstate.view_mut())]);
        let given = [&inputs[..], &self.parameters(), &[("len", TensorRef::new(&lengths, &[batch])?)]].concat();
        back.pass.run("selective_scan_backward", &Attributes::new(), &given, outputs)?;
        // Sequences are the rows of these sums.
        let mask: Vec<i32> = lengths.iter().map(|length| i32::from(*length > 0)).collect();
        for (vector, of_sequences) in [(&self.a_log, &da_log), (&self.d, &dd)] {
            let n = of_sequences.shape()[1..].iter().product();
            let (of, x) = ((Of::whole(&vector.name), None, n), ("x", of_sequences.view_as(&[batch, n])?));
            back.add_vector(["token_sum", "sum"], &Attributes::new(), of, &[x], &mask)?;
        }
        Ok(made)
    }
}
