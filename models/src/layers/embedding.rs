//! The table of embeddings, which may be the output projection too.

use super::linear::{Linear, Source};
use super::loader::Loader;
use crate::ModelError;
use crate::audit::DIFFERS;
use crate::backward::Backward;
use crate::machine::typed;
use crate::pass::Pass;
use crate::sums::Of;
use crate::weights::HEAD;
use samebits_ops::device::Device;
use samebits_ops::{Attributes, Backend, DType, Element, Tensor, embedding_dw};
use std::mem::swap;
use std::sync::Arc;

pub(crate) struct Embedding {
    /// The name of the table in a folder, without `.weight`.
    name: &'static str,
    /// `[V,hidden]`; `None` where it is the output projection.
    table: Option<Arc<Tensor>>,
    hidden: usize,
    /// Of the scaling of embedded tokens, where there is one.
    scale: Option<Attributes>,
}

impl Embedding {
    /// The table and the output projection: two matrices `[vocab,hidden]`, or one where they are tied.
    pub fn load(
        loader: &mut Loader,
        called: &'static str,
        [vocab, hidden]: [usize; 2],
        is_tied: bool,
        scale: Option<f64>,
    ) -> Result<(Embedding, Linear), ModelError> {
        let table = loader.matrix(called, vocab, hidden)?;
        let own = "lm_head";
        let (table, head, name) = if !is_tied {
            (Some(table), loader.matrix(own, vocab, hidden)?, own)
        } else {
            if loader.weights.contains(HEAD) {
                // Some tied folders store the table a second time: then it must be the same table.
                let path = loader.weights.path(HEAD);
                let again = loader.matrix(own, vocab, hidden)?;
                loader.weights.parameters.remove(HEAD);
                if !same_bits(&again, &table) {
                    return Err(ModelError::tensor(&path, HEAD, DIFFERS));
                }
            }
            (None, table, called)
        };
        let head = Linear::new(loader.cpu, Source::whole(name.into(), vocab), head, None, loader.packs)?;
        let scale = scale.map(|factor| Attributes::new().with("factor", factor));
        Ok((Embedding { name: called, table, hidden, scale }, head))
    }

    /// Takes the table to a device.
    pub fn move_to(&mut self, device: &Device) -> Result<(), ModelError> {
        if let Some(table) = &mut self.table {
            *table = Arc::new(Backend::upload(device, table.view())?);
        }
        Ok(())
    }

    /// The residual stream of a step's tokens, in the first of two tensors of its shape; `head` is the output projection.
    pub fn forward(&self, pass: &mut Pass, head: &Linear, [x, room]: [&mut Tensor; 2]) -> Result<(), ModelError> {
        let (table, inputs) = (self.table.as_ref().map_or(head.matrix(0), |table| table.view()), pass.inputs);
        let tokens = inputs.tokens.view(&[pass.step.rows()])?;
        pass.op("embedding", &Attributes::new(), &[("w", table), ("tokens", tokens)], [("y", x.view_mut())])?;
        if let Some(factor) = &self.scale {
            pass.op("scale", factor, &[("x", x.view())], [("y", room.view_mut())])?;
            swap(x, room);
        }
        pass.see_at(None, "embed", x)
    }

    /// From that of the residual stream before the first block, of these tokens.
    pub fn backward(&self, back: &mut Backward, tokens: &[i32], mut dx: Tensor) -> Result<(), ModelError> {
        if let Some(factor) = &self.scale {
            let mut scaled = back.pass.empty(DType::Fp32, dx.shape())?;
            back.pass.op("scale", factor, &[("x", dx.view())], [("y", scaled.view_mut())])?;
            dx = scaled;
        }
        let (dw, rows) = back.sums.table(Of::table(&format!("{}.weight", self.name)), self.hidden, tokens)?;
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
