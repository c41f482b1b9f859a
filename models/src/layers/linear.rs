//! A matrix: packed for the processor, as it was loaded, or on a device; its products, and the gradients of those.

use super::low_rank;
use crate::ModelError;
use crate::backward::Backward;
use crate::machine::{Index, Machine, empty, typed};
use crate::memory::buffer;
use crate::pass::Pass;
use samebits_ops::device::{Device, Part};
use samebits_ops::{Attributes, Backend, Cpu, DType, Element, PackedWeight, Quantized, Tensor, TensorMut, TensorRef};
use std::sync::{Arc, OnceLock};

/// `x W^T + b`: one matrix `[n,k]`, or one for each expert.
pub(crate) struct Linear {
    n: usize,
    k: usize,
    dtype: DType,
    weight: Matrices,
    /// What each of them is in the folder.
    sources: Vec<Source>,
    /// Each of them packed for `gemm_dx`, from when that first reads it.
    for_dx: Vec<OnceLock<PackedWeight>>,
}

/// Rows of a stored matrix and elements of its bias: of each of `groups` groups of `size` rows, `width` from row
/// `start`.
#[derive(Clone)]
pub(crate) struct Source {
    /// The matrix, without what stands behind it.
    pub name: String,
    /// What stands behind it of the matrix and of the bias.
    pub ends: [&'static str; 2],
    pub groups: usize,
    pub size: usize,
    pub start: usize,
    pub width: usize,
    /// Whether it is stored transposed, so that these rows of the product's matrix are columns of the stored one.
    pub transposed: bool,
}

/// The ends of a name as modules have them.
pub(crate) const ENDS: [&str; 2] = [".weight", ".bias"];

impl Source {
    /// All `n` rows.
    pub fn whole(name: String, n: usize) -> Source {
        Source { name, ends: ENDS, groups: 1, size: n, start: 0, width: n, transposed: false }
    }

    /// The rows, in the order in which a product has them.
    pub fn rows(&self) -> impl Iterator<Item = usize> {
        let &Source { groups, size, start, width, .. } = self;
        (0..groups).flat_map(move |group| (0..width).map(move |row| group * size + start + row))
    }
}

/// Matrices of one size and their biases, where products read them.
enum Matrices {
    /// On the processor, packed.
    Packed(Vec<(PackedWeight, Option<Tensor>)>),
    /// On the processor, row by row; a product lays them out.
    Rows(Vec<(Arc<Tensor>, Option<Tensor>)>),
    /// On a device, row by row and one behind the other.
    Device(Box<(Tensor, Option<Tensor>)>),
}

/// A matrix as it was read: its elements, or integers with scales, which are to be packed as they are.
pub(crate) enum Matrix {
    Elements(Arc<Tensor>),
    /// With the dtype that products read.
    Quantized(Quantized, DType),
}

impl From<Arc<Tensor>> for Matrix {
    fn from(elements: Arc<Tensor>) -> Matrix {
        Matrix::Elements(elements)
    }
}

impl Linear {
    /// `w[n,k]` and `b[n]`, packed or as they are; what is quantized is packed.
    pub fn new(
        cpu: &Cpu,
        source: Source,
        w: impl Into<Matrix>,
        bias: Option<Tensor>,
        packs: bool,
    ) -> Result<Linear, ModelError> {
        let ([n, k], dtype, weight) = match w.into() {
            Matrix::Elements(w) => {
                let (&[n, k], dtype) = (w.shape(), w.dtype()) else { panic!("it is a matrix") };
                let weight = match packs {
                    true => typed!(dtype => A, {
                        let w = w.as_slice::<A>().expect("it is on the host, and of this dtype");
                        Matrices::Packed(vec![(PackedWeight::pack(cpu, n, k, w)?, bias)])
                    }),
                    false => Matrices::Rows(vec![(w, bias)]),
                };
                ([n, k], dtype, weight)
            }
            Matrix::Quantized(w, dtype) => {
                let packed = match PackedWeight::quantized(cpu, dtype, &w)? {
                    Some(packed) => packed,
                    // Of rows or groups that panels of integers do not hold.
                    None => typed!(dtype => A, PackedWeight::pack(cpu, w.n, w.k, &elements::<A>(&w)?)?),
                };
                ([w.n, w.k], dtype, Matrices::Packed(vec![(packed, bias)]))
            }
        };
        Ok(Linear { n, k, dtype, weight, sources: vec![source], for_dx: vec![OnceLock::new()] })
    }

    /// Those of several experts, packed, as one.
    pub fn stack(all: Vec<Linear>) -> Linear {
        let (n, k, dtype) = (all[0].n, all[0].k, all[0].dtype);
        let (mut packed, mut rows, mut sources, mut for_dx) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for linear in all {
            match linear.weight {
                Matrices::Packed(weight) => packed.extend(weight),
                Matrices::Rows(weight) => rows.extend(weight),
                Matrices::Device(_) => panic!("experts are stacked before they go to a device"),
            }
            sources.extend(linear.sources);
            for_dx.extend(linear.for_dx);
        }
        let weight = if rows.is_empty() { Matrices::Packed(packed) } else { Matrices::Rows(rows) };
        Linear { n, k, dtype, weight, sources, for_dx }
    }

    /// Takes packed matrices to a device, row by row: their elements are what they were before they were packed.
    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        if let Matrices::Rows(rows) = &self.weight
            && let [(w, None)] = &rows[..]
        {
            self.weight = Matrices::Device(Box::new((Backend::upload(device, w.view())?, None)));
        }
        let Matrices::Packed(packed) = &self.weight else { return Ok(()) };
        let (count, n) = (packed.len(), self.n);
        let mut rows = empty(cpu, self.dtype, &[count * n, self.k])?;
        let mut biases = empty(cpu, self.dtype, &[count * n])?;
        for (i, (weight, bias)) in packed.iter().enumerate() {
            unpack(cpu, weight, rows.rows_mut(i * n..(i + 1) * n))?;
            if let Some(bias) = bias {
                let to = Part { offset: i * n, ..Part::whole(n) };
                Machine::copy_rows(cpu, [1, n], (bias, Part::whole(n)), (&mut biases, to))?;
            }
        }
        let bias = packed[0].1.as_ref().map(|_| Backend::upload(device, biases.view())).transpose()?;
        self.weight = Matrices::Device(Box::new((Backend::upload(device, rows.view())?, bias)));
        Ok(())
    }

    /// The rows of each of the matrices: elements that a product makes.
    pub fn rows(&self) -> usize {
        self.n
    }

    /// One of the matrices, `[n,k]`.
    pub fn matrix(&self, number: usize) -> TensorRef<'_> {
        match &self.weight {
            Matrices::Packed(packed) => TensorRef::packed(&packed[number].0),
            Matrices::Rows(rows) => rows[number].0.view(),
            Matrices::Device(all) => all.0.rows(number * self.n..(number + 1) * self.n),
        }
    }

    /// The same where it is packed.
    pub fn packed(&self, number: usize) -> Option<&PackedWeight> {
        let Matrices::Packed(packed) = &self.weight else { return None };
        Some(&packed[number].0)
    }

    pub fn bias(&self, number: usize) -> Option<TensorRef<'_>> {
        match &self.weight {
            Matrices::Packed(packed) => packed[number].1.as_ref().map(Tensor::view),
            Matrices::Rows(rows) => rows[number].1.as_ref().map(Tensor::view),
            Matrices::Device(all) => all.1.as_ref().map(|bias| bias.rows(number * self.n..(number + 1) * self.n)),
        }
    }

    /// `x[M,K] -> y[M,N]` of `dtype`.
    pub fn apply(&self, pass: &mut Pass, x: TensorRef, dtype: DType) -> Result<Tensor, ModelError> {
        let mut y = pass.empty(dtype, &[x.shape()[0], self.n])?;
        self.apply_to(pass, 0, x, y.view_mut())?;
        Ok(y)
    }

    /// [`Linear::apply`] of one of the matrices, into what is there; of rows that have an adapter of it, with that.
    pub fn apply_to(&self, pass: &mut Pass, number: usize, x: TensorRef, y: TensorMut) -> Result<(), ModelError> {
        let source = &self.sources[number];
        let adapted = pass.adapted(&source.name);
        if adapted.is_empty() {
            return self.product(pass, number, x, y);
        }
        let mut base = pass.empty(DType::Fp32, y.shape())?;
        self.product(pass, number, x, base.view_mut())?;
        low_rank::add_to(pass, &adapted, source.start, (x, &base), y)
    }

    /// The product with one of the matrices alone.
    pub fn product(&self, pass: &mut Pass, number: usize, x: TensorRef, y: TensorMut) -> Result<(), ModelError> {
        let (w, none) = (self.matrix(number), Attributes::new());
        match self.bias(number) {
            Some(bias) => pass.op("gemm", &none, &[("x", x), ("w", w), ("bias", bias)], [("y", y)]),
            None => pass.op("gemm", &none, &[("x", x), ("w", w)], [("y", y)]),
        }
    }

    /// From `dy[M,N]` in f32, of x that one of the matrices was applied to: that of x, `[M,K]` of `dtype`. Those of the
    /// matrix and its bias, or of the adapter, are added to what earlier tokens have left of them.
    pub fn backward(
        &self,
        back: &mut Backward,
        number: usize,
        x: TensorRef,
        dy: TensorRef,
        mask: &[i32],
        dtype: DType,
    ) -> Result<Tensor, ModelError> {
        let source = &self.sources[number];
        if self.bias(number).is_some() {
            back.add_bias(source, dy, mask)?;
        }
        let rounded = back.rounded(dy)?;
        back.add_matrix(source, x, rounded.view(), mask)?;
        let adapted = back.pass.adapted(&source.name);
        if adapted.is_empty() {
            return self.input_gradient(back, number, rounded.view(), dtype);
        }
        let dx = self.input_gradient(back, number, rounded.view(), DType::Fp32)?;
        low_rank::add_backward(back, &adapted, source.start, (x, dy), (mask, dx, dtype))
    }

    /// From `dy[M,N]` of what products read, `[M,K]`: that of x alone.
    pub fn input_gradient(
        &self,
        back: &mut Backward,
        number: usize,
        dy: TensorRef,
        dtype: DType,
    ) -> Result<Tensor, ModelError> {
        let mut dx = back.pass.empty(dtype, &[dy.shape()[0], self.k])?;
        let w = match &self.weight {
            Matrices::Packed(packed) => TensorRef::packed(self.for_dx(back.cpu, number, &packed[number].0)?),
            _ => self.matrix(number),
        };
        let inputs = [("dy", dy), ("w", w)];
        back.pass.op("gemm_dx", &Attributes::new(), &inputs, [("dx", dx.view_mut())])?;
        Ok(dx)
    }

    /// One of the packed matrices, packed for `gemm_dx`.
    fn for_dx(&self, cpu: &Cpu, number: usize, weight: &PackedWeight) -> Result<&PackedWeight, ModelError> {
        if let Some(packed) = self.for_dx[number].get() {
            return Ok(packed);
        }
        let mut rows = empty(cpu, self.dtype, &[self.n, self.k])?;
        unpack(cpu, weight, rows.view_mut())?;
        let packed = typed!(self.dtype => A, {
            PackedWeight::pack_for_dx(cpu, self.n, self.k, rows.as_slice::<A>().expect("it is on the host"))?
        });
        Ok(self.for_dx[number].get_or_init(|| packed))
    }

    /// What one of the matrices is in the folder.
    pub fn source(&self, number: usize) -> &Source {
        &self.sources[number]
    }

    /// A row of x for every choice, each `every` times, by the matrix that was chosen.
    pub fn apply_chosen(
        &self,
        pass: &Pass,
        x: (&Tensor, usize),
        choice: &Index,
        y: &mut Tensor,
    ) -> Result<(), ModelError> {
        let Matrices::Device(all) = &self.weight else { panic!("the processor cuts products by expert") };
        Ok(pass.machine.chosen_product(x, choice, (&all.0, all.1.as_ref()), y)?)
    }
}

/// The elements of a quantized matrix.
fn elements<T: Element>(w: &Quantized) -> Result<Vec<T>, ModelError> {
    let mut all = buffer(&[w.n, w.k])?;
    all.chunks_mut(w.k.max(1)).enumerate().for_each(|(row, y)| w.row(row, y));
    Ok(all)
}

/// The rows of a packed matrix, bit for bit as they were.
fn unpack(cpu: &Cpu, weight: &PackedWeight, rows: TensorMut) -> Result<(), ModelError> {
    let n = rows.shape()[0];
    let all = Tensor::new((0..n as i32).collect(), &[n])?;
    let inputs = [("w", TensorRef::packed(weight)), ("tokens", all.view())];
    Ok(cpu.call("embedding", Attributes::new(), &inputs, vec![("y", rows)])?)
}
