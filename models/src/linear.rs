//! Matrices of a layer, loaded and packed.

use crate::ModelError;
use crate::config::{Activation, Config};
use crate::kv_cache::buffer;
use crate::weights::Weights;
use samebits_ops::{Cpu, Element, Gemm, PackedWeight, gelu_mul, gemm_packed, silu_mul};

/// `x W^T + b`, the weight packed.
pub(crate) struct Linear<A> {
    pub weight: PackedWeight,
    pub bias: Option<Vec<A>>,
}

/// Loads the tensors of one layer.
pub(crate) struct Loader<'a, 'w> {
    pub config: &'a Config,
    pub cpu: &'a Cpu,
    pub weights: &'a mut Weights<'w>,
    pub layer: usize,
}

impl Loader<'_, '_> {
    fn name(&self, part: &str) -> String {
        format!("model.layers.{}.{part}", self.layer)
    }

    /// A vector, in f32.
    pub fn vector(&mut self, part: &str, n: usize) -> Result<Vec<f32>, ModelError> {
        self.weights.take(&self.name(part), &[n])
    }

    /// `w[n,k]` as it is stored.
    fn matrix<A: Element>(&mut self, part: &str, n: usize, k: usize) -> Result<Vec<A>, ModelError> {
        self.weights.take(&self.name(&format!("{part}.weight")), &[n, k])
    }

    fn bias<A: Element>(&mut self, part: &str, n: usize, bias: bool) -> Result<Option<Vec<A>>, ModelError> {
        bias.then(|| self.weights.take(&self.name(&format!("{part}.bias")), &[n])).transpose()
    }

    /// One matrix `[n,k]`.
    pub fn linear<A: Element>(&mut self, part: &str, n: usize, k: usize, bias: bool) -> Result<Linear<A>, ModelError> {
        let weight = PackedWeight::pack(self.cpu, n, k, &self.matrix::<A>(part, n, k)?)?;
        Ok(Linear { weight, bias: self.bias(part, n, bias)? })
    }

    /// A matrix whose rows stand in `groups` equal groups, cut in parts of `widths` rows of each group: a matrix each. A
    /// row's product does not depend on which rows stand beside it.
    pub fn parts<A: Element, const N: usize>(
        &mut self,
        part: &str,
        groups: usize,
        widths: [usize; N],
        k: usize,
        bias: bool,
    ) -> Result<[Linear<A>; N], ModelError> {
        let n = groups * widths.iter().sum::<usize>();
        let whole: Vec<A> = self.matrix(part, n, k)?;
        let bias: Option<Vec<A>> = self.bias(part, n, bias)?;
        self.cut(&whole, bias.as_deref(), groups, widths, k)
    }

    /// Matrices of `rows` rows each that are stored one behind the other.
    pub fn matrices<A: Element, const N: usize>(
        &mut self,
        part: &str,
        rows: [usize; N],
        k: usize,
    ) -> Result<[Vec<A>; N], ModelError> {
        let whole: Vec<A> = self.matrix(part, rows.iter().sum(), k)?;
        let mut start = 0;
        Ok(rows.map(|rows| {
            start += rows * k;
            whole[start - rows * k..start].to_vec()
        }))
    }

    /// [`Loader::parts`] of a matrix that has been read.
    pub fn cut<A: Element, const N: usize>(
        &self,
        whole: &[A],
        bias: Option<&[A]>,
        groups: usize,
        widths: [usize; N],
        k: usize,
    ) -> Result<[Linear<A>; N], ModelError> {
        let size: usize = widths.iter().sum();
        let mut start = 0;
        let mut made = Vec::new();
        for width in widths {
            let rows = |values: &[A], k: usize| -> Vec<A> {
                let groups = values.chunks_exact((size * k).max(1));
                groups.flat_map(|group| &group[start * k..(start + width) * k]).copied().collect()
            };
            let weight = PackedWeight::pack(self.cpu, groups * width, k, &rows(whole, k))?;
            made.push(Linear { weight, bias: bias.map(|bias| rows(bias, 1)) });
            start += width;
        }
        Ok(made.try_into().ok().expect("one for each width"))
    }

    /// A gated MLP of width `width` under the names `gate`, `up` and `down`.
    pub fn gated<A: Element>(&mut self, prefix: &str, names: [&str; 3], width: usize) -> Result<Gated<A>, ModelError> {
        let (hidden, bias) = (self.config.hidden, self.config.mlp_bias);
        let [gate, up, down] = names.map(|name| format!("{prefix}.{name}"));
        let (gate, up) = if self.config.fused {
            let [gate, up] = self.parts(&format!("{prefix}.gate_up_proj"), 1, [width, width], hidden, bias)?;
            (gate, up)
        } else {
            (self.linear(&gate, width, hidden, bias)?, self.linear(&up, width, hidden, bias)?)
        };
        let down = self.linear(&down, hidden, width, bias)?;
        Ok(Gated { gate, up, down, activation: self.config.activation, width })
    }
}

impl<A: Element> Linear<A> {
    /// `x[M,K] -> y[M,N]`
    pub fn apply<O: Element>(&self, cpu: &Cpu, m: usize, x: &[A]) -> Result<Vec<O>, ModelError> {
        let mut y = buffer(&[m, self.weight.n()])?;
        self.apply_to(cpu, m, x, &mut y)?;
        Ok(y)
    }

    /// [`Linear::apply`] into what is there.
    pub fn apply_to<O: Element>(&self, cpu: &Cpu, m: usize, x: &[A], y: &mut [O]) -> Result<(), ModelError> {
        Ok(gemm_packed(cpu, &Gemm::new(m, self.weight.n(), self.weight.k()), x, &self.weight, self.bias.as_deref(), y)?)
    }
}

/// What a gated MLP computes on the way, kept for the next one: the system takes longer to hand out fresh pages than an op
/// takes to fill them.
#[derive(Default)]
pub(crate) struct Inner<A> {
    gate: Vec<f32>,
    up: Vec<f32>,
    product: Vec<A>,
}

/// The first `len` elements of a buffer that grows when it must. What it holds is to be written over.
fn room<T: Element>(kept: &mut Vec<T>, len: usize) -> Result<&mut [T], ModelError> {
    if kept.len() < len {
        *kept = buffer(&[len])?;
    }
    Ok(&mut kept[..len])
}

/// `down(activation(gate(x)) * up(x))`; only what a product reads is rounded.
pub(crate) struct Gated<A> {
    pub gate: Linear<A>,
    pub up: Linear<A>,
    pub down: Linear<A>,
    pub activation: Activation,
    pub width: usize,
}

impl<A: Element> Gated<A> {
    /// `x[M,hidden] -> y[M,hidden]`
    pub fn apply_to(
        &self,
        cpu: &Cpu,
        m: usize,
        x: &[A],
        y: &mut [f32],
        inner: &mut Inner<A>,
    ) -> Result<(), ModelError> {
        let size = m * self.width;
        let (gate, up) = (room(&mut inner.gate, size)?, room(&mut inner.up, size)?);
        self.gate.apply_to(cpu, m, x, gate)?;
        self.up.apply_to(cpu, m, x, up)?;
        let product = room(&mut inner.product, size)?;
        match self.activation {
            Activation::Silu => silu_mul(cpu, gate, up, product)?,
            Activation::Gelu => gelu_mul(cpu, gate, up, product)?,
        }
        self.down.apply_to(cpu, m, product, y)
    }
}
