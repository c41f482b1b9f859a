//! Matrices of a layer: loaded, packed for the processor, or taken to a device; their products, and the gradients of
//! those.

use crate::ModelError;
use crate::backward::Backward;
use crate::config::{Activation, Config};
use crate::machine::{Index, Machine, empty, typed};
use crate::pass::Pass;
use crate::weights::Weights;
use samebits_ops::device::{Device, Part};
use samebits_ops::{Attributes, Backend, Cpu, DType, PackedWeight, Tensor, TensorMut, TensorRef};
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
    /// The matrix, without `.weight`.
    pub name: String,
    pub groups: usize,
    pub size: usize,
    pub start: usize,
    pub width: usize,
}

impl Source {
    /// All `n` rows.
    pub fn whole(name: String, n: usize) -> Source {
        Source { name, groups: 1, size: n, start: 0, width: n }
    }

    /// The rows, in the order in which a product has them.
    pub fn rows(&self) -> impl Iterator<Item = usize> {
        let &Source { groups, size, start, width, .. } = self;
        (0..groups).flat_map(move |group| (0..width).map(move |row| group * size + start + row))
    }
}

/// A vector of f32, and its name in the folder.
pub(crate) struct Vector {
    pub name: String,
    pub w: Tensor,
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

impl Linear {
    /// `w[n,k]` and `b[n]`, packed or as they are.
    pub fn new(
        cpu: &Cpu,
        source: Source,
        w: Arc<Tensor>,
        bias: Option<Tensor>,
        packs: bool,
    ) -> Result<Linear, ModelError> {
        let &[n, k] = w.shape() else { panic!("it is a matrix") };
        let dtype = w.dtype();
        let weight = match packs {
            true => typed!(dtype => A, {
                let w = w.as_slice::<A>().expect("it is on the host, and of this dtype");
                Matrices::Packed(vec![(PackedWeight::pack(cpu, n, k, w)?, bias)])
            }),
            false => Matrices::Rows(vec![(w, bias)]),
        };
        Ok(Linear { n, k, dtype, weight, sources: vec![source], for_dx: vec![OnceLock::new()] })
    }

    /// Those of several experts, packed, as one.
    fn stack(all: Vec<Linear>) -> Linear {
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

    fn bias(&self, number: usize) -> Option<TensorRef<'_>> {
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

    /// [`Linear::apply`] of one of the matrices, into what is there.
    pub fn apply_to(&self, pass: &mut Pass, number: usize, x: TensorRef, y: TensorMut) -> Result<(), ModelError> {
        let (w, none) = (self.matrix(number), &pass.attributes.none);
        match self.bias(number) {
            Some(bias) => pass.op("gemm", none, &[("x", x), ("w", w), ("bias", bias)], [("y", y)]),
            None => pass.op("gemm", none, &[("x", x), ("w", w)], [("y", y)]),
        }
    }

    /// From `dy[M,N]` in f32, of x that one of the matrices was applied to: that of x, `[M,K]` of `dtype`. Those of the
    /// matrix and its bias are added to what earlier tokens have left of them.
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
        let dy = back.rounded(dy)?;
        back.add_matrix(source, x, dy.view(), mask)?;
        self.input_gradient(back, number, dy.view(), dtype)
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
        let none = &back.pass.attributes.none;
        back.pass.op("gemm_dx", none, &inputs, [("dx", dx.view_mut())])?;
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
    fn apply_chosen(&self, pass: &Pass, x: (&Tensor, usize), choice: &Index, y: &mut Tensor) -> Result<(), ModelError> {
        let Matrices::Device(all) = &self.weight else { panic!("the processor cuts products by expert") };
        Ok(pass.machine.chosen_product(x, choice, (&all.0, all.1.as_ref()), y)?)
    }
}

/// The rows of a packed matrix, bit for bit as they were.
fn unpack(cpu: &Cpu, weight: &PackedWeight, rows: TensorMut) -> Result<(), ModelError> {
    let n = rows.shape()[0];
    let all = Tensor::new((0..n as i32).collect(), &[n])?;
    let inputs = [("w", TensorRef::packed(weight)), ("tokens", all.view())];
    Ok(cpu.call("embedding", Attributes::new(), &inputs, vec![("y", rows)])?)
}

/// `down(activation(gate(x)) * up(x))`, or as many as there are experts; only what a product reads is rounded.
pub(crate) struct Gated {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Activation,
    width: usize,
}

impl Gated {
    /// Those of several experts as one.
    pub fn stack(all: Vec<Gated>) -> Gated {
        let (activation, width) = (all[0].activation, all[0].width);
        let (mut gate, mut up, mut down) = (Vec::new(), Vec::new(), Vec::new());
        for gated in all {
            gate.push(gated.gate);
            up.push(gated.up);
            down.push(gated.down);
        }
        Gated { gate: Linear::stack(gate), up: Linear::stack(up), down: Linear::stack(down), activation, width }
    }

    /// Takes the matrices to a device.
    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        [&mut self.gate, &mut self.up, &mut self.down].into_iter().try_for_each(|linear| linear.move_to(cpu, device))
    }

    /// `x[M,hidden] -> y[M,hidden]` by one of the MLPs.
    pub fn apply_to(&self, pass: &mut Pass, number: usize, x: TensorRef, y: TensorMut) -> Result<(), ModelError> {
        self.apply_with(
            pass,
            x.shape()[0],
            |linear, pass, to| linear.apply_to(pass, number, x, to.view_mut()),
            |pass, product| self.down.apply_to(pass, number, product.view(), y),
        )
    }

    /// A row of x for every choice, each `every` times, by the MLP that was chosen: `y[P,hidden]`.
    pub fn apply_chosen(
        &self,
        pass: &mut Pass,
        x: (&Tensor, usize),
        choice: &Index,
        y: &mut Tensor,
    ) -> Result<(), ModelError> {
        self.apply_with(
            pass,
            y.shape()[0],
            |linear, pass, to| linear.apply_chosen(pass, x, choice, to),
            |pass, product| self.down.apply_chosen(pass, (product, 1), choice, y),
        )
    }

    /// The gated MLP of `rows` rows: `widen` is the product with `gate` or with `up`, `narrow` that with `down`.
    fn apply_with(
        &self,
        pass: &mut Pass,
        rows: usize,
        widen: impl Fn(&Linear, &mut Pass, &mut Tensor) -> Result<(), ModelError>,
        narrow: impl FnOnce(&mut Pass, &Tensor) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let (shape, mut kept) = ([rows, self.width], std::mem::take(&mut pass.gated));
        let gate = pass.room(&mut kept.gate, DType::Fp32, &shape)?;
        widen(&self.gate, pass, gate)?;
        let up = pass.room(&mut kept.up, DType::Fp32, &shape)?;
        widen(&self.up, pass, up)?;
        let product = pass.room(&mut kept.product, pass.dtype, &shape)?;
        self.activate(pass, gate, up, product)?;
        narrow(pass, product)?;
        if pass.kept.is_some() {
            for (name, values) in [("gate", kept.gate.take()), ("up", kept.up.take()), ("product", kept.product.take())]
            {
                pass.keep_own(name, values.expect("it was just made"));
            }
        }
        pass.gated = kept;
        Ok(())
    }

    /// From `dy[M,hidden]` in f32, of what one of the MLPs made of `x[M,hidden]`: that of x, in f32.
    pub fn backward(
        &self,
        back: &mut Backward,
        number: usize,
        x: TensorRef,
        dy: TensorRef,
        mask: &[i32],
    ) -> Result<Tensor, ModelError> {
        let (product, up, gate) = (back.take("product"), back.take("up"), back.take("gate"));
        let dproduct = self.down.backward(back, number, product.view(), dy, mask, DType::Fp32)?;
        let mut dgate = back.pass.empty(DType::Fp32, gate.shape())?;
        let mut dup = back.pass.empty(DType::Fp32, gate.shape())?;
        let op = match self.activation {
            Activation::Silu => "silu_mul_backward",
            Activation::Gelu => "gelu_mul_backward",
        };
        let inputs = [("gate", gate.view()), ("up", up.view()), ("dy", dproduct.view())];
        let outputs = [("dgate", dgate.view_mut()), ("dup", dup.view_mut())];
        back.pass.op(op, &back.pass.attributes.none, &inputs, outputs)?;
        let from_gate = self.gate.backward(back, number, x, dgate.view(), mask, DType::Fp32)?;
        let from_up = self.up.backward(back, number, x, dup.view(), mask, DType::Fp32)?;
        back.sum(from_gate, from_up)
    }

    fn activate(&self, pass: &mut Pass, gate: &Tensor, up: &Tensor, y: &mut Tensor) -> Result<(), ModelError> {
        let op = match self.activation {
            Activation::Silu => "silu_mul",
            Activation::Gelu => "gelu_mul",
        };
        pass.op(op, &pass.attributes.none, &[("gate", gate.view()), ("up", up.view())], [("y", y.view_mut())])
    }
}

/// Loads the tensors of one layer.
pub(crate) struct Loader<'a, 'w> {
    pub config: &'a Config,
    /// What products read.
    pub dtype: DType,
    pub cpu: &'a Cpu,
    pub weights: &'a mut Weights<'w>,
    pub layer: usize,
    /// Whether matrices are packed.
    pub packs: bool,
}

impl Loader<'_, '_> {
    fn name(&self, part: &str) -> String {
        format!("model.layers.{}.{part}", self.layer)
    }

    /// A vector, in f32.
    pub fn vector(&mut self, part: &str, n: usize) -> Result<Vector, ModelError> {
        let name = self.name(part);
        Ok(Vector { w: self.weights.tensor(&name, DType::Fp32, &[n])?, name })
    }

    /// The same of something that is no parameter.
    pub fn constant(&mut self, part: &str, n: usize) -> Result<Tensor, ModelError> {
        self.weights.constant(&self.name(part), &[n])
    }

    /// `w[n,k]` as it is stored.
    pub fn matrix(&mut self, part: &str, n: usize, k: usize) -> Result<Arc<Tensor>, ModelError> {
        self.weights.matrix(&self.name(&format!("{part}.weight")), self.dtype, &[n, k])
    }

    fn bias(&mut self, part: &str, n: usize, bias: bool) -> Result<Option<Tensor>, ModelError> {
        bias.then(|| self.weights.tensor(&self.name(&format!("{part}.bias")), self.dtype, &[n])).transpose()
    }

    /// One matrix `[n,k]`.
    pub fn linear(&mut self, part: &str, n: usize, k: usize, bias: bool) -> Result<Linear, ModelError> {
        let w = self.matrix(part, n, k)?;
        Linear::new(self.cpu, Source::whole(self.name(part), n), w, self.bias(part, n, bias)?, self.packs)
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
        let whole = self.matrix(part, n, k)?;
        let bias = self.bias(part, n, bias)?;
        self.cut(part, &whole, bias.as_ref(), 0, groups, widths)
    }

    /// [`Loader::parts`] of a matrix that has been read, from row `first` on.
    pub fn cut<const N: usize>(
        &self,
        part: &str,
        whole: &Tensor,
        bias: Option<&Tensor>,
        first: usize,
        groups: usize,
        widths: [usize; N],
    ) -> Result<[Linear; N], ModelError> {
        let size: usize = widths.iter().sum();
        let mut start = first;
        let mut made = Vec::new();
        for width in widths {
            let source = Source { name: self.name(part), groups, size, start, width };
            let rows = Index::Host(source.rows().map(|row| row as i32).collect());
            let gather = |from: &Tensor, k: usize, shape: &[usize]| -> Result<Tensor, ModelError> {
                let (mut to, n) = (empty(self.cpu, self.dtype, shape)?, groups * width);
                let part = Part { rows: Some(&rows), ..Part::whole(k) };
                Machine::copy_rows(self.cpu, [n, k], (from, part), (&mut to, Part::whole(k)))?;
                Ok(to)
            };
            let (n, k) = (groups * width, whole.shape()[1]);
            let bias = bias.map(|bias| gather(bias, 1, &[n])).transpose()?;
            let w = Arc::new(gather(whole, k, &[n, k])?);
            made.push(Linear::new(self.cpu, source, w, bias, self.packs)?);
            start += width;
        }
        Ok(made.try_into().ok().expect("one for each width"))
    }

    /// A gated MLP of width `width` under the names `gate`, `up` and `down`.
    pub fn gated(&mut self, prefix: &str, names: [&str; 3], width: usize) -> Result<Gated, ModelError> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Model, Precision};
    use std::path::Path;

    /// Two groups of three rows are cut in the first row and the rest of each, biases along with them.
    #[test]
    fn biases_are_cut_with_their_rows() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints/llama");
        let cpu = Cpu::best();
        let model = Model::load(&dir, Precision::Fp32, &cpu).unwrap();
        let mut weights = Weights::open(&dir).unwrap();
        let (config, dtype) = (model.config(), DType::Fp32);
        let loader = Loader { config, dtype, cpu: &cpu, weights: &mut weights, layer: 0, packs: true };
        let whole = Tensor::new((0..12u8).map(f32::from).collect(), &[6, 2]).unwrap();
        let bias = Tensor::new((0..6u8).map(f32::from).collect(), &[6]).unwrap();
        let parts = loader.cut("q", &whole, Some(&bias), 0, 2, [1, 2]).unwrap();
        let biases = parts.map(|part| match part.weight {
            Matrices::Packed(packed) => packed[0].1.as_ref().unwrap().as_slice::<f32>().unwrap().to_vec(),
            _ => unreachable!(),
        });
        assert_eq!(biases, [vec![0.0, 3.0], vec![1.0, 2.0, 4.0, 5.0]]);
    }
}
