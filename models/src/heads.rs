//! Queries, keys and values of a layer, from the normed residual stream.
//!
//! Two kinds: projections for every head (most families), and keys and values of all heads made from one short vector
//! per token (DeepSeek). A head may be rotated in part. Matrices are cut by rows when they are loaded, so that the rotated
//! part comes out in f32 and is rounded after its rotation, and everything else is rounded once by its product; putting
//! the parts of a head beside each other only copies.

use crate::ModelError;
use crate::config::{Config, Latent};
use crate::decoder::Step;
use crate::kv_cache::buffer;
use crate::linear::{Linear, Loader};
use samebits_ops::{Cpu, Element, RmsNorm, Rope, RopeTable, Rounding, norm_rope, rms_norm, rope};

/// What attention reads of a step's tokens: `q[n,Hq,D]`, `k[n,Hkv,D]`, `v[n,Hkv,E]`.
pub(crate) struct Projected<A> {
    pub q: Vec<A>,
    pub k: Vec<A>,
    pub v: Vec<A>,
}

pub(crate) enum Projections<A> {
    Heads(Box<HeadProjections<A>>),
    Latent(Box<LatentProjections<A>>),
}

/// Queries, keys and values, each with weights of its own.
pub(crate) struct HeadProjections<A> {
    pub q: Turned<A>,
    pub k: Turned<A>,
    pub v: Linear<A>,
}

/// Heads whose first elements are rotated.
pub(crate) struct Turned<A> {
    pub rotated: Linear<A>,
    /// Norm of each head, before the rotation.
    pub norm: Option<Vec<f32>>,
    /// The elements behind the rotated ones, and how many each head has.
    pub passed: Option<(Linear<A>, usize)>,
}

pub(crate) struct LatentProjections<A> {
    pub sizes: Latent,
    /// Down to the short vector of the queries, and its norm.
    pub q_down: Option<(Linear<A>, Vec<f32>)>,
    pub q_plain: Linear<A>,
    pub q_rotated: Linear<A>,
    pub kv_down: Linear<A>,
    pub kv_norm: Vec<f32>,
    /// One for all heads.
    pub k_rotated: Linear<A>,
    pub k_plain: Linear<A>,
    pub v: Linear<A>,
}

/// The norms of the short vectors have an epsilon of their own.
const LATENT_EPS: f32 = 1e-6;

/// The norm of `rows` latent vectors of `n`.
pub(crate) fn latent_norm(rows: usize, n: usize) -> RmsNorm {
    RmsNorm { rows, n, eps: LATENT_EPS, rounding: Rounding::Once, weight_offset: false }
}

impl<A: Element> Projections<A> {
    pub fn load(loader: &mut Loader) -> Result<Projections<A>, ModelError> {
        let c = loader.config;
        if let Some(sizes) = c.latent {
            return Ok(Projections::Latent(Box::new(LatentProjections::load(loader, sizes)?)));
        }
        let Config { q_heads, kv_heads, key_dim: d, hidden, qkv_bias, .. } = *c;
        let turned = c.rotary.dim;
        let passing = d - turned;
        let (q, k, v) = if c.fused {
            // Query, key and value heads one behind the other, as if they were heads of one matrix.
            let rows = [q_heads * d, kv_heads * d, kv_heads * d];
            if passing == 0 {
                let [q, k, v] = loader.parts("self_attn.qkv_proj", 1, rows, hidden, qkv_bias)?;
                (Turned::whole(q), Turned::whole(k), v)
            } else {
                let [q, k, v] = loader.matrices("self_attn.qkv_proj", rows, hidden)?;
                let turn = |w: &[A], heads| -> Result<Turned<A>, ModelError> {
                    let [rotated, passed] = loader.cut(w, None, heads, [turned, passing], hidden)?;
                    Ok(Turned { rotated, norm: None, passed: Some((passed, passing)) })
                };
                let (q, k) = (turn(&q, q_heads)?, turn(&k, kv_heads)?);
                let [v] = loader.cut(&v, None, kv_heads, [d], hidden)?;
                (q, k, v)
            }
        } else {
            let q = loader.linear("self_attn.q_proj", q_heads * d, hidden, qkv_bias)?;
            let k = loader.linear("self_attn.k_proj", kv_heads * d, hidden, qkv_bias)?;
            let v = loader.linear("self_attn.v_proj", kv_heads * d, hidden, qkv_bias)?;
            (Turned::whole(q), Turned::whole(k), v)
        };
        let (mut q, mut k) = (q, k);
        if c.head_norms {
            q.norm = Some(loader.vector("self_attn.q_norm.weight", d)?);
            k.norm = Some(loader.vector("self_attn.k_norm.weight", d)?);
        }
        Ok(Projections::Heads(Box::new(HeadProjections { q, k, v })))
    }

    /// `a[n,hidden]` to queries, keys and values.
    pub fn apply(
        &self,
        cpu: &Cpu,
        c: &Config,
        step: &Step,
        angles: &RopeTable,
        a: &[A],
    ) -> Result<Projected<A>, ModelError> {
        match self {
            Projections::Heads(heads) => Ok(Projected {
                q: heads.q.apply(cpu, c, step, c.q_heads, angles, a)?,
                k: heads.k.apply(cpu, c, step, c.kv_heads, angles, a)?,
                v: heads.v.apply(cpu, step.rows(), a)?,
            }),
            Projections::Latent(latent) => latent.apply(cpu, c, step, angles, a),
        }
    }
}

impl<A: Element> Turned<A> {
    fn whole(rotated: Linear<A>) -> Turned<A> {
        Turned { rotated, norm: None, passed: None }
    }

    fn apply(
        &self,
        cpu: &Cpu,
        c: &Config,
        step: &Step,
        heads: usize,
        angles: &RopeTable,
        a: &[A],
    ) -> Result<Vec<A>, ModelError> {
        let n = step.rows();
        let dim = c.rotary.dim;
        let raw: Vec<f32> = self.rotated.apply(cpu, n, a)?;
        let mut turned: Vec<A> = buffer(&[n, heads, dim])?;
        match &self.norm {
            None => rope(cpu, &Rope { tokens: n, heads, dim, pairing: c.pairing }, angles, &raw, &mut turned)?,
            Some(norm) => {
                let shape = c.norm_rope(n, heads);
                norm_rope(cpu, &shape, angles, &raw, norm, &mut turned)?;
            }
        }
        match &self.passed {
            None => Ok(turned),
            Some((passed, width)) => {
                let passed: Vec<A> = passed.apply(cpu, n, a)?;
                beside(heads, (&turned, dim, heads), (&passed, *width, heads))
            }
        }
    }
}

impl<A: Element> LatentProjections<A> {
    fn load(loader: &mut Loader, sizes: Latent) -> Result<LatentProjections<A>, ModelError> {
        let Config { q_heads, hidden, value_dim, .. } = *loader.config;
        let Latent { q_rank, kv_rank, plain, rotated, bias } = sizes;
        let q_down = match q_rank {
            None => None,
            Some(rank) => {
                let down = loader.linear("self_attn.q_a_proj", rank, hidden, bias)?;
                Some((down, loader.vector("self_attn.q_a_layernorm.weight", rank)?))
            }
        };
        let up = if q_down.is_some() { "self_attn.q_b_proj" } else { "self_attn.q_proj" };
        let [q_plain, q_rotated] = loader.parts(up, q_heads, [plain, rotated], q_rank.unwrap_or(hidden), false)?;
        let [kv_down, k_rotated] = loader.parts("self_attn.kv_a_proj_with_mqa", 1, [kv_rank, rotated], hidden, bias)?;
        let kv_norm = loader.vector("self_attn.kv_a_layernorm.weight", kv_rank)?;
        let [k_plain, v] = loader.parts("self_attn.kv_b_proj", q_heads, [plain, value_dim], kv_rank, false)?;
        Ok(LatentProjections { sizes, q_down, q_plain, q_rotated, kv_down, kv_norm, k_rotated, k_plain, v })
    }

    fn apply(
        &self,
        cpu: &Cpu,
        c: &Config,
        step: &Step,
        angles: &RopeTable,
        a: &[A],
    ) -> Result<Projected<A>, ModelError> {
        let n = step.rows();
        let Latent { plain, rotated, .. } = self.sizes;
        let norm = |x: &[f32], w: &[f32]| -> Result<Vec<A>, ModelError> {
            let mut y = buffer(&[x.len()])?;
            let shape = latent_norm(n, w.len());
            rms_norm(cpu, &shape, x, w, &mut y)?;
            Ok(y)
        };
        let turn = |x: &[f32], heads: usize| -> Result<Vec<A>, ModelError> {
            let mut y = buffer(&[x.len()])?;
            rope(cpu, &Rope { tokens: n, heads, dim: rotated, pairing: c.pairing }, angles, x, &mut y)?;
            Ok(y)
        };
        let short;
        let from = match &self.q_down {
            None => a,
            Some((down, w)) => {
                short = norm(&down.apply::<f32>(cpu, n, a)?, w)?;
                &short
            }
        };
        let q_plain: Vec<A> = self.q_plain.apply(cpu, n, from)?;
        let q_rotated = turn(&self.q_rotated.apply::<f32>(cpu, n, from)?, c.q_heads)?;
        let latent = norm(&self.kv_down.apply::<f32>(cpu, n, a)?, &self.kv_norm)?;
        let k_rotated = turn(&self.k_rotated.apply::<f32>(cpu, n, a)?, 1)?;
        let k_plain: Vec<A> = self.k_plain.apply(cpu, n, &latent)?;
        Ok(Projected {
            q: beside(c.q_heads, (&q_plain, plain, c.q_heads), (&q_rotated, rotated, c.q_heads))?,
            k: beside(c.q_heads, (&k_plain, plain, c.q_heads), (&k_rotated, rotated, 1))?,
            v: self.v.apply(cpu, n, &latent)?,
        })
    }
}

/// Two parts of `heads` heads beside each other; each part comes with its width and how many heads it has: as many, or one
/// for all.
fn beside<A: Element>(heads: usize, a: (&[A], usize, usize), b: (&[A], usize, usize)) -> Result<Vec<A>, ModelError> {
    let width = a.1 + b.1;
    let rows = a.0.len() / (a.1 * a.2);
    let mut joined: Vec<A> = buffer(&[rows, heads, width])?;
    for (i, head) in joined.chunks_exact_mut(width).enumerate() {
        let (row, h) = (i / heads, i % heads);
        let part = |(_, width, count): (&[A], usize, usize)| {
            let place = row * count + if count == 1 { 0 } else { h };
            place * width..(place + 1) * width
        };
        head[..a.1].copy_from_slice(&a.0[part(a)]);
        head[a.1..].copy_from_slice(&b.0[part(b)]);
    }
    Ok(joined)
}
