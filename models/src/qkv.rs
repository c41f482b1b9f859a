//! Queries, keys and values of a layer, from the normed residual stream.
//!
//! Two kinds: projections for every head (most families), and keys and values of all heads made from one short vector
//! per token (DeepSeek). A head may be rotated in part: its rotary part, and the nope part, which carries no position.
//! Matrices are cut by rows when they are loaded, so that the rotary part comes out in f32 and is rounded after its
//! rotation, and everything else is rounded once by its product; joining the parts of a head only copies.

use crate::ModelError;
use crate::backward::Backward;
use crate::config::{Config, Latent};
use crate::linear::{Linear, Loader, Vector};
use crate::machine::{concat, split};
use crate::pass::Pass;
use samebits_ops::device::Device;
use samebits_ops::{Backend, Cpu, DType, Tensor, TensorRef};

/// What attention reads of a step's tokens: `q[n,Hq,D]`, `k[n,Hkv,D]`, `v[n,Hkv,E]`.
pub(crate) struct Qkv {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
}

pub(crate) enum Projections {
    Heads(Box<HeadProjections>),
    Latent(Box<LatentProjections>),
}

/// Queries, keys and values, each with weights of its own.
pub(crate) struct HeadProjections {
    q: Heads,
    k: Heads,
    v: Linear,
}

/// Heads whose first elements are rotated.
struct Heads {
    rotary: Linear,
    /// Norm of each head, before the rotation.
    norm: Option<Vector>,
    /// The elements behind the rotated ones, and how many each head has.
    nope: Option<(Linear, usize)>,
}

pub(crate) struct LatentProjections {
    sizes: Latent,
    /// Down to the short vector of the queries, and its norm.
    q_down: Option<(Linear, Vector)>,
    q_nope: Linear,
    q_rotary: Linear,
    kv_down: Linear,
    kv_norm: Vector,
    /// One for all heads.
    k_rotary: Linear,
    k_nope: Linear,
    v: Linear,
}

impl Projections {
    pub fn load(loader: &mut Loader) -> Result<Projections, ModelError> {
        let c = loader.config;
        if let Some(sizes) = c.latent {
            return Ok(Projections::Latent(Box::new(LatentProjections::load(loader, sizes)?)));
        }
        let Config { q_heads, kv_heads, key_dim: d, hidden, qkv_bias, .. } = *c;
        let rotary = c.rotary.dim;
        let nope = d - rotary;
        let (q, k, v) = if c.fused {
            // Query, key and value heads one behind the other, as if they were heads of one matrix.
            let rows = [q_heads * d, kv_heads * d, kv_heads * d];
            if nope == 0 {
                let [q, k, v] = loader.parts("self_attn.qkv_proj", 1, rows, hidden, qkv_bias)?;
                (Heads::whole(q), Heads::whole(k), v)
            } else {
                let name = "self_attn.qkv_proj";
                let whole = loader.matrix(name, rows.iter().sum(), hidden)?;
                let cut = |first, heads| -> Result<Heads, ModelError> {
                    let [rotary, passed] = loader.cut(name, &whole, None, first, heads, [rotary, nope])?;
                    Ok(Heads { rotary, norm: None, nope: Some((passed, nope)) })
                };
                let (q, k) = (cut(0, q_heads)?, cut(rows[0], kv_heads)?);
                let [v] = loader.cut(name, &whole, None, rows[0] + rows[1], kv_heads, [d])?;
                (q, k, v)
            }
        } else {
            let q = loader.linear("self_attn.q_proj", q_heads * d, hidden, qkv_bias)?;
            let k = loader.linear("self_attn.k_proj", kv_heads * d, hidden, qkv_bias)?;
            let v = loader.linear("self_attn.v_proj", kv_heads * d, hidden, qkv_bias)?;
            (Heads::whole(q), Heads::whole(k), v)
        };
        let (mut q, mut k) = (q, k);
        if c.head_norms {
            q.norm = Some(loader.vector("self_attn.q_norm.weight", d)?);
            k.norm = Some(loader.vector("self_attn.k_norm.weight", d)?);
        }
        Ok(Projections::Heads(Box::new(HeadProjections { q, k, v })))
    }

    /// Takes the weights to a device.
    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        let (linears, vectors): (Vec<&mut Linear>, Vec<&mut Vector>) = match self {
            Projections::Heads(all) => {
                let HeadProjections { q, k, v } = &mut **all;
                let nope = [&mut q.nope, &mut k.nope].into_iter().flatten().map(|(nope, _)| nope);
                let linears = [&mut q.rotary, &mut k.rotary, v].into_iter().chain(nope);
                (linears.collect(), [&mut q.norm, &mut k.norm].into_iter().flatten().collect())
            }
            Projections::Latent(all) => {
                let LatentProjections { q_down, q_nope, q_rotary, kv_down, kv_norm, k_rotary, k_nope, v, .. } =
                    &mut **all;
                let (mut linears, mut vectors) = (vec![q_nope, q_rotary, kv_down, k_rotary, k_nope, v], vec![kv_norm]);
                if let Some((down, norm)) = q_down {
                    linears.push(down);
                    vectors.push(norm);
                }
                (linears, vectors)
            }
        };
        linears.into_iter().try_for_each(|linear| linear.move_to(cpu, device))?;
        for vector in vectors {
            vector.w = Backend::upload(device, vector.w.view())?;
        }
        Ok(())
    }

    /// `a[n,hidden]` to queries, keys and values. The positions of the tokens come as their cosines and sines.
    pub fn apply(&self, pass: &mut Pass, angles: TensorRef, a: &Tensor) -> Result<Qkv, ModelError> {
        match self {
            Projections::Heads(heads) => Ok(Qkv {
                q: heads.q.apply(pass, pass.config.q_heads, angles, a)?,
                k: heads.k.apply(pass, pass.config.kv_heads, angles, a)?,
                v: heads.v.apply(pass, a.view(), pass.dtype)?,
            }),
            Projections::Latent(latent) => latent.apply(pass, angles, a),
        }
    }

    /// From those of queries, keys and values, in f32: that of a, in f32.
    pub fn backward(&self, back: &mut Backward, dqkv: Qkv, a: &Tensor) -> Result<Tensor, ModelError> {
        match self {
            Projections::Heads(heads) => {
                let (Qkv { q: dq, k: dk, v: dv }, &Config { q_heads, kv_heads, .. }) = (dqkv, back.pass.config);
                let mask = back.mask;
                // What was kept is taken from the end.
                let from_v = heads.v.backward(back, 0, a.view(), dv.view(), mask, DType::Fp32)?;
                let from_k = heads.k.backward(back, kv_heads, dk, a)?;
                let from_q = heads.q.backward(back, q_heads, dq, a)?;
                let sum = back.sum(from_q, from_k)?;
                back.sum(sum, from_v)
            }
            Projections::Latent(latent) => latent.backward(back, dqkv, a),
        }
    }
}

impl Heads {
    fn whole(rotary: Linear) -> Heads {
        Heads { rotary, norm: None, nope: None }
    }

    fn apply(&self, pass: &mut Pass, heads: usize, angles: TensorRef, a: &Tensor) -> Result<Tensor, ModelError> {
        let (n, dim) = (a.shape()[0], pass.config.rotary.dim);
        let raw = self.rotary.apply(pass, a.view(), DType::Fp32)?;
        let rotary = rotate(pass, &raw, self.norm.as_ref(), [n, heads, dim], angles)?;
        match &self.nope {
            None => Ok(rotary),
            Some((linear, width)) => {
                let nope = linear.apply(pass, a.view(), pass.dtype)?;
                concat(pass.machine, n * heads, (&rotary, dim, 1), (&nope, *width, 1))
            }
        }
    }

    /// From `dy[n,heads * D]` in f32: that of a, in f32.
    fn backward(&self, back: &mut Backward, heads: usize, dy: Tensor, a: &Tensor) -> Result<Tensor, ModelError> {
        let (n, dim, mask) = (a.shape()[0], back.pass.config.rotary.dim, back.mask);
        let (drotary, dnope) = match &self.nope {
            None => (dy, None),
            Some((linear, width)) => {
                let [drotary, dnope] = split(back.pass.machine, [n, heads], &dy, [dim, *width])?;
                (drotary, Some((linear, dnope)))
            }
        };
        let draw = rotate_backward(back, &drotary, self.norm.as_ref(), [n, heads, dim])?;
        let from_rotary = self.rotary.backward(back, 0, a.view(), draw.view(), mask, DType::Fp32)?;
        let Some((linear, dnope)) = dnope else { return Ok(from_rotary) };
        let from_nope = linear.backward(back, 0, a.view(), dnope.view(), mask, DType::Fp32)?;
        back.sum(from_rotary, from_nope)
    }
}

/// Rotates heads `[n,H,D]` by their positions, behind a norm where there is one.
fn rotate(
    pass: &mut Pass,
    raw: &Tensor,
    norm: Option<&Vector>,
    shape: [usize; 3],
    angles: TensorRef,
) -> Result<Tensor, ModelError> {
    let (mut y, attributes) = (pass.empty(pass.dtype, raw.shape())?, pass.attributes);
    let (x, outputs) = (("x", raw.view_as(&shape)?), [("y", y.view_mut_as(&shape)?)]);
    match norm {
        None => pass.op("rope", &attributes.rope, &[x, ("pos", angles)], outputs)?,
        Some(Vector { w, .. }) => {
            pass.keep("heads", raw)?;
            pass.op("norm_rope", &attributes.norm_rope, &[x, ("w", w.view()), ("pos", angles)], outputs)?;
        }
    }
    Ok(y)
}

/// From `dy[n,H,D]` in f32, of the rotated heads: that of the heads before, in f32.
fn rotate_backward(
    back: &mut Backward,
    dy: &Tensor,
    norm: Option<&Vector>,
    shape: [usize; 3],
) -> Result<Tensor, ModelError> {
    match norm {
        None => {
            let mut dx = back.pass.empty(DType::Fp32, dy.shape())?;
            let inputs = [("dy", dy.view_as(&shape)?), ("pos", TensorRef::angles(back.angles))];
            let rope = &back.pass.attributes.rope;
            back.pass.op("rope_backward", rope, &inputs, [("dx", dx.view_mut_as(&shape)?)])?;
            Ok(dx)
        }
        Some(vector) => {
            let raw = back.take("heads");
            back.head_norm(vector, raw.view_as(&shape)?, dy.view_as(&shape)?)
        }
    }
}

impl LatentProjections {
    fn load(loader: &mut Loader, sizes: Latent) -> Result<LatentProjections, ModelError> {
        let Config { q_heads, hidden, value_dim, .. } = *loader.config;
        let Latent { q_rank, kv_rank, nope, rotary, bias } = sizes;
        let q_down = match q_rank {
            None => None,
            Some(rank) => {
                let down = loader.linear("self_attn.q_a_proj", rank, hidden, bias)?;
                Some((down, loader.vector("self_attn.q_a_layernorm.weight", rank)?))
            }
        };
        let up = if q_down.is_some() { "self_attn.q_b_proj" } else { "self_attn.q_proj" };
        let [q_nope, q_rotary] = loader.parts(up, q_heads, [nope, rotary], q_rank.unwrap_or(hidden), false)?;
        let [kv_down, k_rotary] = loader.parts("self_attn.kv_a_proj_with_mqa", 1, [kv_rank, rotary], hidden, bias)?;
        let kv_norm = loader.vector("self_attn.kv_a_layernorm.weight", kv_rank)?;
        let [k_nope, v] = loader.parts("self_attn.kv_b_proj", q_heads, [nope, value_dim], kv_rank, false)?;
        Ok(LatentProjections { sizes, q_down, q_nope, q_rotary, kv_down, kv_norm, k_rotary, k_nope, v })
    }

    fn apply(&self, pass: &mut Pass, angles: TensorRef, a: &Tensor) -> Result<Qkv, ModelError> {
        let (n, heads, dtype) = (a.shape()[0], pass.config.q_heads, pass.dtype);
        let Latent { nope, rotary, .. } = self.sizes;
        let short;
        let from = match &self.q_down {
            None => a,
            Some((down, w)) => {
                let raw = down.apply(pass, a.view(), DType::Fp32)?;
                short = latent_norm(pass, &raw, w)?;
                pass.keep("q_raw", &raw)?;
                pass.keep("q_short", &short)?;
                &short
            }
        };
        let q_nope = self.q_nope.apply(pass, from.view(), dtype)?;
        let q_raw = self.q_rotary.apply(pass, from.view(), DType::Fp32)?;
        let q_rotary = rotate(pass, &q_raw, None, [n, heads, rotary], angles)?;
        let kv_raw = self.kv_down.apply(pass, a.view(), DType::Fp32)?;
        let kv = latent_norm(pass, &kv_raw, &self.kv_norm)?;
        pass.keep("kv_raw", &kv_raw)?;
        pass.keep("kv", &kv)?;
        let k_raw = self.k_rotary.apply(pass, a.view(), DType::Fp32)?;
        let k_rotary = rotate(pass, &k_raw, None, [n, 1, rotary], angles)?;
        let k_nope = self.k_nope.apply(pass, kv.view(), dtype)?;
        Ok(Qkv {
            q: concat(pass.machine, n * heads, (&q_nope, nope, 1), (&q_rotary, rotary, 1))?,
            k: concat(pass.machine, n * heads, (&k_nope, nope, 1), (&k_rotary, rotary, heads))?,
            v: self.v.apply(pass, kv.view(), dtype)?,
        })
    }

    /// From those of queries, keys and values, in f32: that of a, in f32.
    fn backward(&self, back: &mut Backward, dqkv: Qkv, a: &Tensor) -> Result<Tensor, ModelError> {
        let Config { q_heads: heads, .. } = *back.pass.config;
        let (Latent { nope, rotary, .. }, n, mask, f32) = (self.sizes, a.shape()[0], back.mask, DType::Fp32);
        let (kv, kv_raw) = (back.take("kv"), back.take("kv_raw"));
        let [dq_nope, dq_rotary] = split(back.pass.machine, [n, heads], &dqkv.q, [nope, rotary])?;
        let [dk_nope, dk_rotary] = split(back.pass.machine, [n, heads], &dqkv.k, [nope, rotary])?;

        let short = self.q_down.as_ref().map(|_| back.take("q_short"));
        let from = short.as_ref().unwrap_or(a);
        let dq_raw = rotate_backward(back, &dq_rotary, None, [n, heads, rotary])?;
        let from_nope = self.q_nope.backward(back, 0, from.view(), dq_nope.view(), mask, f32)?;
        let from_rotary = self.q_rotary.backward(back, 0, from.view(), dq_raw.view(), mask, f32)?;
        let mut from_q = back.sum(from_nope, from_rotary)?;
        if let Some((down, w)) = &self.q_down {
            let raw = back.take("q_raw");
            let draw = back.latent_norm(w, &raw, &from_q)?;
            from_q = down.backward(back, 0, a.view(), draw.view(), mask, f32)?;
        }

        let from_k_nope = self.k_nope.backward(back, 0, kv.view(), dk_nope.view(), mask, f32)?;
        let from_v = self.v.backward(back, 0, kv.view(), dqkv.v.view(), mask, f32)?;
        let dkv = back.sum(from_k_nope, from_v)?;
        let dkv_raw = back.latent_norm(&self.kv_norm, &kv_raw, &dkv)?;
        let from_kv = self.kv_down.backward(back, 0, a.view(), dkv_raw.view(), mask, f32)?;

        let dk_rotary = back.sum_of_heads(&dk_rotary, [n, heads, rotary])?;
        let dk_raw = rotate_backward(back, &dk_rotary, None, [n, 1, rotary])?;
        let from_k_rotary = self.k_rotary.backward(back, 0, a.view(), dk_raw.view(), mask, f32)?;
        let sum = back.sum(from_q, from_kv)?;
        back.sum(sum, from_k_rotary)
    }
}

/// The norm of short vectors.
fn latent_norm(pass: &mut Pass, x: &Tensor, w: &Vector) -> Result<Tensor, ModelError> {
    let mut y = pass.empty(pass.dtype, x.shape())?;
    let attributes = pass.attributes;
    pass.op("rms_norm", &attributes.latent_norm, &[("x", x.view()), ("w", w.w.view())], [("y", y.view_mut())])?;
    Ok(y)
}
