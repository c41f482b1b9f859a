//! The reverse pass: from the gradient of the log-probabilities to those of the parameters.
//!
//! It goes through the forward of `decoder.rs` from its end to its beginning; every layer has its `backward` beside its
//! forward. What a layer computed is not computed again here: a forward that a reverse pass follows gives it, as a `Saved` of
//! the layer's own. With recomputation only what enters each block is kept, and a block is run a second time right before
//! its reverse: the same forward, so the same bits.
//!
//! # Rounding points
//!
//! Those of the forward: a gradient is rounded to bf16 where a product or attention reads it and nowhere else. Where
//! several parts read a value, their gradients are added in f32, in the order that `docs/NUMERICS.md` gives. Gradients
//! of parameters are f32 ([`Sums`]).
//!
//! # Tokens
//!
//! Every sum over tokens is given the mask of the rows, so rows that are padding leave nothing, whatever they hold.
//! Rows do not see each other anywhere else but in attention, which is called for the rows of sequences alone.

use crate::ModelError;
use crate::layers::linear::Source;
use crate::machine::{Machine, typed};
use crate::pass::Pass;
use crate::sums::{Of, Sums};
use samebits_ops::device::Part;
use samebits_ops::{Attributes, Cpu, DType, GemmDw, RopeTable, Tensor, TensorRef, gemm_dw};
use std::borrow::{Borrow, Cow};
use std::collections::BTreeMap;

/// A reverse pass over the rows of a micro-batch.
pub(crate) struct Backward<'a, 'p> {
    pub pass: Pass<'a, 'p>,
    pub cpu: &'a Cpu,
    /// The rotations back, of each of the config's.
    pub angles: &'a [RopeTable],
    /// 0 for each row that is padding.
    pub mask: &'a [i32],
    /// Where sequences stand in the rows.
    pub blocks: &'a [Block],
    pub sums: &'a mut Sums,
    /// That of what the first layer has left for all others, of those behind.
    pub carried: Option<Tensor>,
    /// Those of keys and values that blocks behind have read, by the number of the block they are of.
    pub lent: BTreeMap<usize, [Tensor; 2]>,
    /// The number of the use of shared weights that is gone back through; 0 elsewhere.
    pub nth_use: usize,
}

/// Sequences that stand in equal distances: a call of attention's gradient.
pub(crate) struct Block {
    /// The row of the first token of the first.
    pub first: usize,
    /// From a sequence to the next.
    pub stride: usize,
    /// Rows of a sequence that attention's gradient is given: its tokens, and padding behind them.
    pub rows: usize,
    /// Tokens of each sequence.
    pub lengths: Vec<usize>,
}

impl Block {
    /// The position of every row; any for padding.
    pub fn positions(&self) -> Vec<i32> {
        self.lengths.iter().flat_map(|_| 0..self.rows as i32).collect()
    }

    /// Tokens of each sequence, as ops take them.
    pub fn lengths_i32(&self) -> Vec<i32> {
        self.lengths.iter().map(|&length| length as i32).collect()
    }

    /// 0 for padding.
    pub fn mask(&self) -> Vec<i32> {
        let of = |&length: &usize| (0..self.rows).map(move |row| i32::from(row < length));
        self.lengths.iter().flat_map(of).collect()
    }

    /// The rows of its sequences: `values[n,..]` as `[sequences,rows,..]`, `..` being `axes`.
    pub fn view<'t>(&self, values: &'t Tensor, axes: &[usize]) -> Result<TensorRef<'t>, ModelError> {
        let width: usize = axes.iter().product();
        let mut shape = vec![self.lengths.len(), self.rows];
        let mut strides = vec![self.stride * width, width];
        let mut inner = width;
        for &axis in axes {
            inner /= axis;
            shape.push(axis);
            strides.push(inner);
        }
        typed!(values.dtype() => A, {
            let data = values.as_slice::<A>().expect("it is on the host, and of this dtype");
            Ok(TensorRef::strided(&data[self.first * width..], &shape, &strides)?)
        })
    }

    /// Puts what was made of its sequences, `made[sequences,rows,..]`, into their rows of `to[n,width]`.
    pub fn put(&self, machine: &dyn Machine, made: &Tensor, to: &mut Tensor) -> Result<(), ModelError> {
        let width = to.shape()[1];
        for number in 0..self.lengths.len() {
            let from = Part { offset: number * self.rows * width, ..Part::whole(width) };
            let at = Part { offset: (self.first + number * self.stride) * width, ..Part::whole(width) };
            machine.copy_rows([self.rows, width], (made, from), (to, at))?;
        }
        Ok(())
    }
}

impl<'a, 'p> Backward<'a, 'p> {
    /// One before its first op, over rows with these angles back, of this mask, in which sequences stand as these blocks say.
    pub fn new(
        pass: Pass<'a, 'p>,
        cpu: &'a Cpu,
        (angles, mask, blocks): (&'a [RopeTable], &'a [i32], &'a [Block]),
        sums: &'a mut Sums,
    ) -> Backward<'a, 'p> {
        sums.frozen = !pass.adapters.is_empty();
        Backward { pass, cpu, angles, mask, blocks, sums, carried: None, lent: BTreeMap::new(), nth_use: 0 }
    }
}

impl<'a> Backward<'a, '_> {
    /// Shows the gradient of a site of the block that is gone back through, as [`Pass::see`].
    pub fn see(&mut self, site: &'static str, values: &mut Tensor) -> Result<(), ModelError> {
        self.pass.see(site, values)
    }

    /// The same of another block, or of none, as [`Pass::see_at`].
    pub fn see_at(&mut self, layer: Option<usize>, site: &'static str, values: &mut Tensor) -> Result<(), ModelError> {
        self.pass.see_at(layer, site, values)
    }

    /// The mask of so many rows for each token.
    pub fn mask_of_rows(&self, of_token: usize) -> Cow<'a, [i32]> {
        match of_token {
            1 => Cow::Borrowed(self.mask),
            _ => self.mask.iter().flat_map(|&mask| std::iter::repeat_n(mask, of_token)).collect(),
        }
    }

    /// A gradient as products read it.
    pub fn rounded(&mut self, dy: TensorRef) -> Result<Tensor, ModelError> {
        let mut y = self.pass.empty(self.pass.dtype, dy.shape())?;
        self.pass.op("scale", &Attributes::new(), &[("x", dy)], [("y", y.view_mut())])?;
        Ok(y)
    }

    /// `a + b` of f32.
    pub fn sum(&mut self, a: impl Borrow<Tensor>, b: impl Borrow<Tensor>) -> Result<Tensor, ModelError> {
        let (a, b): (&Tensor, &Tensor) = (a.borrow(), b.borrow());
        let mut y = self.pass.empty(DType::Fp32, a.shape())?;
        self.pass.op("add", &Attributes::new(), &[("a", a.view()), ("b", b.view())], [("y", y.view_mut())])?;
        Ok(y)
    }

    /// Adds gradients of keys and values of another block to what blocks behind have left of them.
    pub fn add_lent(&mut self, lender: usize, own: [Tensor; 2]) -> Result<(), ModelError> {
        let sum = match self.lent.remove(&lender) {
            None => own,
            Some([k, v]) => [self.sum(&k, &own[0])?, self.sum(&v, &own[1])?],
        };
        self.lent.insert(lender, sum);
        Ok(())
    }

    /// Those of keys and values of the block that is gone back through, with what blocks behind have left of them.
    pub fn with_lent(&mut self, [k, v]: [Tensor; 2]) -> Result<[Tensor; 2], ModelError> {
        match self.pass.layer.and_then(|layer| self.lent.remove(&layer)) {
            None => Ok([k, v]),
            Some(lent) => Ok([self.sum(&lent[0], &k)?, self.sum(&lent[1], &v)?]),
        }
    }

    /// The heads of `x[n,H,D]` added, ascending: `[n,D]`.
    pub fn sum_of_heads(&mut self, x: &Tensor, [n, heads, dim]: [usize; 3]) -> Result<Tensor, ModelError> {
        let mut sum = self.pass.empty(DType::Fp32, &[n, dim])?;
        let from = Part { stride: heads * dim, ..Part::whole(dim) };
        self.pass.machine.copy_rows([n, dim], (x, from), (&mut sum, Part::whole(dim)))?;
        let x = x.as_slice::<f32>().expect("it is f32, and on the host");
        for head in 1..heads {
            let next = TensorRef::strided(x.get(head * dim..).unwrap_or_default(), &[n, dim], &[heads * dim, 1])?;
            let mut y = self.pass.empty(DType::Fp32, &[n, dim])?;
            let inputs = [("a", sum.view()), ("b", next)];
            self.pass.op("add", &Attributes::new(), &inputs, [("y", y.view_mut())])?;
            sum = y;
        }
        Ok(sum)
    }

    /// Puts the rows of `from` into `to`, from row `first` on.
    pub fn write_rows(&mut self, from: &Tensor, to: &mut Tensor, first: usize) -> Result<(), ModelError> {
        let (count, width) = (from.shape()[0], from.shape()[1]);
        let part = Part { offset: first * width, ..Part::whole(width) };
        Ok(self.pass.machine.copy_rows([count, width], (from, Part::whole(width)), (to, part))?)
    }

    /// Adds the tokens of `x[M,K]` and `dy[M,N]`, as products read them, to the gradient of a matrix of the model.
    pub fn add_matrix(&mut self, source: &Source, x: TensorRef, dy: TensorRef, mask: &[i32]) -> Result<(), ModelError> {
        if self.sums.frozen { Ok(()) } else { self.add_trained(source, x, dy, mask) }
    }

    /// The same of one of the matrices that there are gradients of.
    pub fn add_trained(
        &mut self,
        source: &Source,
        x: TensorRef,
        dy: TensorRef,
        mask: &[i32],
    ) -> Result<(), ModelError> {
        let [n, k] = [dy, x].map(|rows| rows.shape()[1]);
        let dw = self.sums.matrix(self.cpu, Of::matrix(source).of_use(self.nth_use), Some(source), [n, k])?;
        typed!(x.dtype() => A, {
            let [x, dy] = [x, dy].map(|rows| rows.contiguous::<A>().expect("rows stand one behind the other"));
            Ok(gemm_dw(self.cpu, &GemmDw::new(mask.len(), n, k), Some(mask), x, dy, dw)?)
        })
    }

    /// Adds the tokens of `dy[M,N]` to the gradient of a bias.
    pub fn add_bias(&mut self, source: &Source, dy: TensorRef, mask: &[i32]) -> Result<(), ModelError> {
        let of = Of::bias(source);
        self.add_vector(["token_sum", "sum"], &Attributes::new(), (of, Some(source), dy.shape()[1]), &[("x", dy)], mask)
    }

    /// Adds tokens to the gradient of a vector of n elements by an op with this output.
    pub fn add_vector(
        &mut self,
        [op, output]: [&str; 2],
        attributes: &Attributes,
        (of, rows, n): (Of, Option<&Source>, usize),
        inputs: &[(&str, TensorRef)],
        mask: &[i32],
    ) -> Result<(), ModelError> {
        let Backward { pass, sums, cpu, nth_use, .. } = self;
        sums.vector(cpu, of.of_use(*nth_use), rows, n, mask, |carry, before, next| {
            let attributes = attributes.clone().with("token_offset", before);
            let tokens = [("mask", TensorRef::new(mask, &[mask.len()])?), ("carry", carry)];
            pass.op(op, &attributes, &[inputs, &tokens].concat(), [(output, next.view_mut())])
        })
    }
}
