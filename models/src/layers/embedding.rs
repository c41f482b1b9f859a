//! The table of embeddings, which may be the output projection too, and that of learned positions.

use super::linear::{Linear, Matrix, Source};
use super::loader::Loader;
use super::norm::Norm;
use super::per_layer::inputs::Inputs;
use crate::ModelError;
use crate::audit::differs;
use crate::backward::Backward;
use crate::config::Config;
use crate::machine::typed;
use crate::pass::Pass;
use crate::sums::Of;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, Cpu, DType, Element, Tensor, embedding_dw};
use std::mem::swap;
use std::sync::Arc;

pub(crate) struct Embedding {
    /// `[V,hidden]`; `None` where it is the output projection.
    table: Option<Linear>,
    hidden: usize,
    /// The name of the parameter.
    name: String,
    /// Of the scaling of embedded tokens, where there is one.
    scale: Option<Attributes>,
    /// What is added to a token by its position, `[positions,hidden]`, and the name of that.
    positions: Option<(Arc<Tensor>, String)>,
    /// Behind both, where there is one.
    norm: Option<Norm>,
    /// What is made of it for the blocks alone, where there is any.
    inputs: Option<Inputs>,
}

impl Embedding {
    /// The tables and the output projection: two matrices `[vocab,hidden]`, or one where they are tied.
    pub fn load(loader: &mut Loader, c: &Config) -> Result<(Embedding, Linear), ModelError> {
        let &Config { vocab, hidden, table: of_tokens, head: own, .. } = c;
        let own_weight = format!("{own}.weight");
        let (table, head, name) = if !c.tied {
            let (table, source) = (loader.stored(of_tokens, vocab, hidden)?, Source::whole(of_tokens.into(), vocab));
            // Its rows are looked up, not multiplied.
            let table = Linear::new(loader.cpu, source, table, None, false)?;
            (Some(table), loader.stored(own, vocab, hidden)?, own)
        } else if loader.weights.contains(&own_weight) {
            // Some tied folders store the table a second time: then it must be the same table.
            let path = loader.weights.path(&own_weight);
            let (table, again) = (loader.matrix(of_tokens, vocab, hidden)?, loader.matrix(own, vocab, hidden)?);
            loader.weights.parameters.remove(&own_weight);
            if !same_bits(&again, &table) {
                return Err(ModelError::tensor(&path, &own_weight, differs(of_tokens)));
            }
            (None, Matrix::Elements(table), of_tokens)
        } else {
            (None, loader.stored(of_tokens, vocab, hidden)?, of_tokens)
        };
        let bias = loader.bias(own, vocab, c.head_bias)?;
        let head = Linear::new(loader.cpu, Source::whole(name.into(), vocab), head, bias, loader.packs)?;
        let positions = match c.positions {
            Some(name) => Some((loader.matrix(name, c.max_positions, hidden)?, format!("{name}.weight"))),
            None => None,
        };
        let norm = c.embed_norm.map(|name| Norm::load(loader, name, hidden, &c.norms)).transpose()?;
        let inputs = c.inputs.as_ref().map(|plan| Inputs::load(loader, plan, [hidden, c.layers()], &c.norms));
        let inputs = inputs.transpose()?;
        let (scale, name) =
            (c.embed_scale.map(|factor| Attributes::new().with("factor", factor)), format!("{of_tokens}.weight"));
        Ok((Embedding { table, hidden, name, scale, positions, norm, inputs }, head))
    }

    /// Takes the tables to a device.
    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.inputs.as_mut().map_or(Ok(()), |inputs| inputs.move_to(cpu, device))?;
        self.table.as_mut().map_or(Ok(()), |table| table.move_to(cpu, device))?;
        if let Some((table, _)) = &mut self.positions {
            *table = Arc::new(Backend::upload(device, table.view())?);
        }
        self.norm.as_mut().map_or(Ok(()), |norm| norm.move_to(device))
    }

    /// The residual stream of a step's tokens, in the first of two tensors of its shape; `head` is the output projection.
    pub fn forward(&self, pass: &mut Pass, head: &Linear, [x, room]: [&mut Tensor; 2]) -> Result<(), ModelError> {
        self.look_up(pass, head, [&mut *x, &mut *room])?;
        if let Some(norm) = &self.norm {
            norm.forward(pass, x, room)?;
            swap(x, room);
        }
        pass.see_at(None, "embed", x)?;
        if let Some(inputs) = &self.inputs {
            pass.carried = Some(inputs.forward(pass, x)?);
        }
        Ok(())
    }

    /// The same before the norm.
    fn look_up(&self, pass: &mut Pass, head: &Linear, [x, room]: [&mut Tensor; 2]) -> Result<(), ModelError> {
        let (table, inputs) = (self.table.as_ref().unwrap_or(head).matrix(0), pass.inputs);
        let tokens = inputs.tokens.view(&[pass.step.rows()])?;
        pass.op("embedding", &Attributes::new(), &[("w", table), ("tokens", tokens)], [("y", x.view_mut())])?;
        if let Some(factor) = &self.scale {
            pass.op("scale", factor, &[("x", x.view())], [("y", room.view_mut())])?;
            swap(x, room);
        }
        if let (Some((table, _)), Some(positions)) = (&self.positions, &inputs.positions) {
            let mut sum = pass.empty(DType::Fp32, x.shape())?;
            let of_rows = [("w", table.view()), ("tokens", positions.view(&[pass.step.rows()])?)];
            pass.op("embedding", &Attributes::new(), &of_rows, [("y", room.view_mut())])?;
            pass.op("add", &Attributes::new(), &[("a", x.view()), ("b", room.view())], [("y", sum.view_mut())])?;
            *x = sum;
        }
        Ok(())
    }

    /// From that of the residual stream before the first block, of these tokens; `head` is the output projection.
    pub fn backward(
        &self,
        back: &mut Backward,
        head: &Linear,
        tokens: &[i32],
        mut dx: Tensor,
    ) -> Result<(), ModelError> {
        let embedded = |back: &mut Backward, dx: &Tensor| -> Result<Tensor, ModelError> {
            let [mut x, mut room] =
                [back.pass.empty(DType::Fp32, dx.shape())?, back.pass.empty(DType::Fp32, dx.shape())?];
            self.look_up(&mut back.pass, head, [&mut x, &mut room])?;
            Ok(x)
        };
        if let (Some(inputs), Some(of_inputs)) = (&self.inputs, back.carried.take()) {
            let x = embedded(back, &dx)?;
            let from_inputs = inputs.backward(back, tokens, &x, of_inputs)?;
            dx = back.sum(dx, from_inputs)?;
        }
        if let Some(norm) = &self.norm {
            let x = embedded(back, &dx)?;
            dx = norm.backward(back, &x, &dx)?;
        }
        if let Some((_, name)) = &self.positions {
            let (dw, rows) = back.sums.table(Of::table(name), self.hidden, &back.pass.step.positions())?;
            let dx = dx.as_slice::<f32>().expect("it is f32, and on the host");
            embedding_dw(back.cpu, self.hidden, dx, &rows, Some(back.mask), dw)?;
        }
        if let Some(factor) = &self.scale {
            dx = back.pass.scaled(factor, &dx)?;
        }
        let (dw, rows) = back.sums.table(Of::table(&self.name), self.hidden, tokens)?;
        let dx = dx.as_slice::<f32>().expect("it is f32, and on the host");
        Ok(embedding_dw(back.cpu, self.hidden, dx, &rows, Some(back.mask), dw)?)
    }
}

fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    typed!(a.dtype() => A, {
        let (a, b) = (a.as_slice::<A>().unwrap_or_default(), b.as_slice::<A>().unwrap_or_default());
        a.iter().zip(b).all(|(a, b)| a.widen().to_bits() == b.widen().to_bits())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One bit tells them apart; 0 and -0 are equal numbers.
    #[test]
    fn tables_are_compared_by_their_bits() {
        let table = |last: f32| Tensor::new(vec![1.0, 2.0, last], &[3]).unwrap();
        assert!(same_bits(&table(0.0), &table(0.0)));
        assert!(!same_bits(&table(0.0), &table(-0.0)));
    }
}
