//! How layers take their tensors out of a folder.

use super::linear::{Linear, Matrix, Source};
use super::norm::Vector;
use crate::ModelError;
use crate::machine::{Index, Machine, empty, typed};
use crate::memory::buffer;
use crate::weights::Weights;
use samebits_ops::device::Part;
use samebits_ops::{Cpu, DType, Tensor};
use std::sync::Arc;

/// Loads the tensors that stand under one prefix, such as those of a block.
pub(crate) struct Loader<'a, 'w> {
    /// What products read.
    pub dtype: DType,
    pub cpu: &'a Cpu,
    pub weights: &'a mut Weights<'w>,
    /// What stands before the name of each.
    pub prefix: String,
    /// Whether matrices are packed.
    pub packs: bool,
    /// Whether matrices are stored transposed.
    pub transposed: bool,
}

impl Loader<'_, '_> {
    fn name(&self, part: &str) -> String {
        format!("{}{part}", self.prefix)
    }

    /// A vector, in f32.
    pub fn vector(&mut self, part: &str, n: usize) -> Result<Vector, ModelError> {
        self.tensor(part, &[n])
    }

    /// A parameter that no product reads, in f32.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vector, ModelError> {
        let name = self.name(name);
        Ok(Vector { w: self.weights.tensor(&name, DType::Fp32, shape)?, name })
    }

    /// The same of something that is no parameter.
    pub fn constant(&mut self, part: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        self.weights.constant(&self.name(part), shape)
    }

    /// A number that is no parameter, and must be this one.
    pub fn number(&mut self, part: &str, supported: f32) -> Result<(), ModelError> {
        self.weights.number(&self.name(part), supported)
    }

    /// `w[n,k]`, where it stands if it is stored as that.
    pub fn matrix(&mut self, part: &str, n: usize, k: usize) -> Result<Arc<Tensor>, ModelError> {
        let name = self.name(part);
        let stored = if self.transposed { [k, n] } else { [n, k] };
        let adds = self.weights.merged.as_ref().is_some_and(|adapter| adapter.has(&name));
        let w = self.weights.matrix(&format!("{name}.weight"), if adds { DType::Fp32 } else { self.dtype }, &stored)?;
        let w = match self.weights.merged.as_ref().filter(|_| adds) {
            Some(adapter) => Arc::new(adapter.added(self.cpu, &name, &w, self.dtype)?),
            None => w,
        };
        if self.transposed { self.turned(&w, [1, n, k]) } else { Ok(w) }
    }

    /// `w[n,k]` for a product: integers with scales where it is stored as those, and packed.
    pub fn stored(&mut self, part: &str, n: usize, k: usize) -> Result<Matrix, ModelError> {
        let name = self.name(part);
        let adds = self.weights.merged.as_ref().is_some_and(|adapter| adapter.has(&name));
        if self.packs
            && !self.transposed
            && !adds
            && let Some(w) = self.weights.quantized(&format!("{name}.weight"), self.dtype, [n, k])?
        {
            return Ok(Matrix::Quantized(w, self.dtype));
        }
        self.matrix(part, n, k).map(Matrix::Elements)
    }

    /// Notes rows of a matrix that may have an adapter.
    fn note(&mut self, rows: &Source) {
        if self.weights.adapts {
            self.weights.adaptable.entry(rows.name.clone()).or_default().push(rows.clone());
        }
    }

    /// The rows of matrices `[n,k]`, one behind the other, that are stored transposed.
    fn turned(&self, stored: &Tensor, [count, n, k]: [usize; 3]) -> Result<Arc<Tensor>, ModelError> {
        // A list has no rows.
        let rows = if self.weights.lists { 0 } else { count * n };
        typed!(self.dtype => A, {
            let stored = stored.as_slice::<A>().expect("it is on the host, and of this dtype");
            let mut w = buffer::<A>(&[rows, k])?;
            for (row, w) in w.chunks_mut(k).enumerate() {
                let column = stored[row / n * n * k + row % n..].iter().step_by(n);
                w.iter_mut().zip(column).for_each(|(w, stored)| *w = *stored);
            }
            Ok(Arc::new(Tensor::new(w, &[rows, k])?))
        })
    }

    /// `b[n]`, where there is one.
    pub fn bias(&mut self, part: &str, n: usize, bias: bool) -> Result<Option<Tensor>, ModelError> {
        bias.then(|| self.weights.tensor(&self.name(&format!("{part}.bias")), self.dtype, &[n])).transpose()
    }

    /// One matrix `[n,k]`.
    pub fn linear(&mut self, part: &str, n: usize, k: usize, bias: bool) -> Result<Linear, ModelError> {
        let w = self.stored(part, n, k)?;
        let source = Source { transposed: self.transposed, ..Source::whole(self.name(part), n) };
        self.note(&source);
        Linear::new(self.cpu, source, w, self.bias(part, n, bias)?, self.packs)
    }

    /// A matrix whose rows stand in `groups` equal groups, cut in parts of `widths` rows of each group: a matrix each.
    /// A row's product does not depend on which rows stand beside it.
    pub fn parts<const N: usize>(
        &mut self,
        part: &str,
        groups: usize,
        widths: [usize; N],
        k: usize,
        bias: bool,
    ) -> Result<[Linear; N], ModelError> {
        let n = groups * widths.iter().sum::<usize>();
        let whole = self.stored(part, n, k)?;
        let bias = self.bias(part, n, bias)?;
        self.cut(part, &whole, bias.as_ref(), 0, groups, widths)
    }

    /// A tensor `[count,n,k]`, or `[count,k,n]` where it is stored transposed, of matrices one behind the other, and their biases
    /// `[count,n]`: each cut as [`Loader::parts`] cuts one. `of` says what it is called and how it is stored.
    pub fn stacked<const N: usize>(
        &mut self,
        of: &Source,
        count: usize,
        widths: [usize; N],
        k: usize,
        bias: bool,
    ) -> Result<Vec<[Linear; N]>, ModelError> {
        let of = Source { name: self.name(&of.name), ..of.clone() };
        let n = of.groups * widths.iter().sum::<usize>();
        let [name, of_bias] = of.ends.map(|end| format!("{}{end}", of.name));
        let stored = if of.transposed { [count, k, n] } else { [count, n, k] };
        let mut whole = self.weights.matrix(&name, self.dtype, &stored)?;
        if of.transposed {
            whole = self.turned(&whole, [count, n, k])?;
        }
        let (whole, bias) = (
            Matrix::Elements(whole),
            bias.then(|| self.weights.tensor(&of_bias, self.dtype, &[count, n])).transpose()?,
        );
        (0..count).map(|i| self.cut_as(&of, &whole, bias.as_ref(), i * n, widths)).collect()
    }

    /// [`Loader::parts`] of matrices that have been read, from row `first` on.
    pub fn cut<const N: usize>(
        &mut self,
        part: &str,
        whole: &Matrix,
        bias: Option<&Tensor>,
        first: usize,
        groups: usize,
        widths: [usize; N],
    ) -> Result<[Linear; N], ModelError> {
        let of = Source { groups, transposed: self.transposed, ..Source::whole(self.name(part), 0) };
        self.cut_as(&of, whole, bias, first, widths)
    }

    /// The same of what `of` says.
    fn cut_as<const N: usize>(
        &mut self,
        of: &Source,
        whole: &Matrix,
        bias: Option<&Tensor>,
        first: usize,
        widths: [usize; N],
    ) -> Result<[Linear; N], ModelError> {
        let (size, groups): (usize, usize) = (widths.iter().sum(), of.groups);
        let mut start = first;
        let mut made = Vec::new();
        for width in widths {
            let source = Source { size, start, width, ..of.clone() };
            self.note(&source);
            // A list has no rows.
            let there = if self.weights.lists { 0 } else { groups * width };
            let rows = Index::Host(source.rows().take(there).map(|row| row as i32).collect());
            let gather = |from: &Tensor, k: usize, shape: &[usize]| -> Result<Tensor, ModelError> {
                let (mut to, n) = (empty(self.cpu, self.dtype, shape)?, there);
                let part = Part { rows: Some(&rows), ..Part::whole(k) };
                Machine::copy_rows(self.cpu, [n, k], (from, part), (&mut to, Part::whole(k)))?;
                Ok(to)
            };
            let bias = bias.map(|bias| gather(bias, 1, &[there])).transpose()?;
            let w = match whole {
                Matrix::Elements(whole) => {
                    let k = *whole.shape().last().expect("it has rows");
                    Arc::new(gather(whole, k, &[there, k])?).into()
                }
                Matrix::Quantized(whole, dtype) => {
                    Matrix::Quantized(whole.rows(&source.rows().collect::<Vec<_>>()), *dtype)
                }
            };
            made.push(Linear::new(self.cpu, source, w, bias, self.packs)?);
            start += width;
        }
        Ok(made.try_into().ok().expect("one for each width"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Two groups of three rows are cut in the first row and the rest of each, biases along with them.
    #[test]
    fn biases_are_cut_with_their_rows() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints/llama");
        let cpu = Cpu::best();
        let mut weights = Weights::open(&dir).unwrap();
        let prefix = String::new();
        let mut loader =
            Loader { dtype: DType::Fp32, cpu: &cpu, weights: &mut weights, prefix, packs: true, transposed: false };
        let whole = Tensor::new((0..12u8).map(f32::from).collect(), &[6, 2]).unwrap();
        let bias = Tensor::new((0..6u8).map(f32::from).collect(), &[6]).unwrap();
        let parts = loader.cut("q", &Arc::new(whole).into(), Some(&bias), 0, 2, [1, 2]).unwrap();
        let biases = parts.map(|part| part.bias(0).unwrap().contiguous::<f32>().unwrap().to_vec());
        assert_eq!(biases, [vec![0.0, 3.0], vec![1.0, 2.0, 4.0, 5.0]]);
    }

    /// A matrix that is stored transposed comes as the product has it, whole and in parts.
    #[test]
    fn matrices_that_are_stored_transposed_are_turned() {
        let cpu = Cpu::best();
        let stored = Tensor::new((0..6u8).map(f32::from).collect(), &[2, 3]).unwrap();
        let of = std::collections::BTreeMap::from([("w.weight".to_string(), stored.view())]);
        for packs in [false, true] {
            let mut weights = Weights::of(&of);
            let prefix = String::new();
            let mut loader =
                Loader { dtype: DType::Fp32, cpu: &cpu, weights: &mut weights, prefix, packs, transposed: true };
            let [first, rest] = loader.parts("w", 1, [1, 2], 2, false).unwrap();
            assert!(first.source(0).transposed && rest.source(0).transposed);
            assert_eq!(weights.parameters["w.weight"], [2, 3]);
        }
        let mut weights = Weights::of(&of);
        let prefix = String::new();
        let mut loader =
            Loader { dtype: DType::Fp32, cpu: &cpu, weights: &mut weights, prefix, packs: false, transposed: true };
        let w = loader.matrix("w", 3, 2).unwrap();
        assert_eq!(w.as_slice::<f32>().unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    }
}
