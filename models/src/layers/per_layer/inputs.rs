//! The inputs that blocks have of their own, of all blocks side by side: `(norm(project(x) * h^-1/2) + look_up(token) * w^1/2) *
//! 2^-1/2`, x an embedded token of h elements, w the elements of one input, by which the norm goes.

use super::super::linear::Linear;
use super::super::loader::Loader;
use super::super::norm::{self, Norm};
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, Cpu, DType, Tensor, embedding_dw};
use std::sync::Arc;

/// What the inputs of blocks are made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Tokens that the table has, at least those of the vocabulary.
    pub vocab: usize,
    /// Elements of an input.
    pub width: usize,
    /// The names of the table, the projection and the norm, without `.weight`.
    pub names: [&'static str; 3],
}

pub(crate) struct Inputs {
    table: Arc<Tensor>,
    name: String,
    projection: Linear,
    norm: Norm,
    /// Elements of an input, and of all.
    width: usize,
    all: usize,
    /// The factors of a projection, of what was looked up, and of their sum.
    factors: [Attributes; 3],
}

impl Inputs {
    /// Those of `count` blocks of a model of this width.
    pub fn load(
        loader: &mut Loader,
        plan: &Plan,
        [hidden, count]: [usize; 2],
        norms: &norm::Plan,
    ) -> Result<Inputs, ModelError> {
        let &Plan { vocab, width, names: [table, projection, norm] } = plan;
        let all = width * count;
        let name = format!("{table}.weight");
        let table = loader.matrix(table, vocab, all)?;
        let projection = loader.linear(projection, all, hidden, false)?;
        let norm = Norm::load(loader, norm, width, norms)?;
        let factors = [1.0 / (hidden as f64).sqrt(), (width as f64).sqrt(), 0.5f64.sqrt()];
        let factors = factors.map(|factor| Attributes::new().with("factor", factor));
        Ok(Inputs { table, name, projection, norm, width, all, factors })
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.table = Arc::new(Backend::upload(device, self.table.view())?);
        self.norm.move_to(device)?;
        self.projection.move_to(cpu, device)
    }

    /// `x[n,h]` as products read it, and what the norm reads: a row for each block of each token.
    fn projected(&self, pass: &mut Pass, x: &Tensor) -> Result<[Tensor; 2], ModelError> {
        let mut a = pass.empty(pass.dtype, x.shape())?;
        pass.round(x, &mut a)?;
        let made = self.projection.apply(pass, a.view(), DType::Fp32)?;
        let mut scaled = pass.scaled(&self.factors[0], &made)?;
        scaled.reshape(&[x.shape()[0] * (self.all / self.width), self.width]);
        Ok([a, scaled])
    }

    /// From the embedded tokens `x[n,h]` of a step in f32: `[n,all]` in f32.
    pub fn forward(&self, pass: &mut Pass, x: &Tensor) -> Result<Tensor, ModelError> {
        let (n, f32) = (x.shape()[0], DType::Fp32);
        let [_, projected] = self.projected(pass, x)?;
        let mut normed = pass.empty(f32, projected.shape())?;
        self.norm.forward(pass, &projected, &mut normed)?;
        normed.reshape(&[n, self.all]);
        let (mut row, inputs) = (pass.empty(f32, &[n, self.all])?, pass.inputs);
        let of_tokens = [("w", self.table.view()), ("tokens", inputs.tokens.view(&[n])?)];
        pass.op("embedding", &Attributes::new(), &of_tokens, [("y", row.view_mut())])?;
        let row = pass.scaled(&self.factors[1], &row)?;
        let mut sum = pass.empty(f32, &[n, self.all])?;
        let inputs = [("a", normed.view()), ("b", row.view())];
        pass.op("add", &Attributes::new(), &inputs, [("y", sum.view_mut())])?;
        let mut made = pass.scaled(&self.factors[2], &sum)?;
        pass.see_at(None, "per_layer_inputs", &mut made)?;
        Ok(made)
    }

    /// From that of the inputs, `dy[n,all]` in f32, of these tokens, whose embeddings are x: that of x.
    pub fn backward(
        &self,
        back: &mut Backward,
        tokens: &[i32],
        x: &Tensor,
        mut dy: Tensor,
    ) -> Result<Tensor, ModelError> {
        back.see_at(None, "dper_layer_inputs", &mut dy)?;
        let mut dsum = back.pass.scaled(&self.factors[2], &dy)?;
        let drow = back.pass.scaled(&self.factors[1], &dsum)?;
        let (dw, rows) = back.sums.table(Of::table(&self.name), self.all, tokens)?;
        let drow = drow.as_slice::<f32>().expect("it is f32, and on the host");
        embedding_dw(back.cpu, self.all, drow, &rows, Some(back.mask), dw)?;
        let [a, projected] = self.projected(&mut back.pass, x)?;
        dsum.reshape(projected.shape());
        let mut dprojected = self.norm.backward_of_rows(back, &projected, &dsum, self.all / self.width)?;
        dprojected.reshape(&[x.shape()[0], self.all]);
        let dmade = back.pass.scaled(&self.factors[0], &dprojected)?;
        self.projection.backward(back, 0, a.view(), dmade.view(), back.mask, DType::Fp32)
    }
}
