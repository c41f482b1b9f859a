//! Forwards on a device: keys, values and activations stay there. What a step is told is written before its first
//! kernel, so that nothing but kernels lies between, and they can be captured.

use super::{AttentionMetadata, Index, IndexOf, Machine, typed};
use crate::ModelError;
use crate::config::Config;
use crate::layers::moe;
use samebits_ops::device::{self, Buffer, Device, Indices, Part, Rotations};
use samebits_ops::{Attention, Backend, DType, Error, Prepared, Qkv, RopeTable, Route, Scalar, Tensor};

impl Machine for Device {
    fn index(&self, what: IndexOf, values: Vec<i32>, earlier: Option<Index>) -> Result<Index, Error> {
        let IndexOf { op, limit, distinct } = what;
        Ok(Index::Device(match earlier {
            Some(Index::Device(mut indices)) => {
                indices.set(self, op, &values)?;
                indices
            }
            _ if distinct => Indices::distinct(self, op, &values, limit)?,
            _ => Indices::new(self, op, &values, limit)?,
        }))
    }

    fn read_index(&self, index: &Index) -> Result<Vec<i32>, Error> {
        let indices = there(index);
        let mut values = vec![0; indices.len()];
        indices.download(self, &mut values)?;
        Ok(values)
    }

    fn angles(&self, table: RopeTable, earlier: Option<Prepared>) -> Result<Prepared, Error> {
        let rotations = match earlier.and_then(Prepared::into::<Rotations>) {
            Some(mut rotations) => {
                rotations.fill(self, &table)?;
                rotations
            }
            None => Rotations::new(self, &table)?,
        };
        Ok(Prepared::new("pos", rotations))
    }

    /// How far attention is planned goes with the columns, so no length within them needs another plan. No bit depends
    /// on it.
    fn place(&self, metadata: &mut AttentionMetadata, shape: &Attention, columns: usize) -> Result<(), Error> {
        let AttentionMetadata { q_start, q_pos, kv_len, block_table, page_size, on_device } = metadata;
        let exact = block_table.len() / shape.batch;
        let table: Vec<i32> = block_table
            .chunks_exact(exact)
            .flat_map(|pages| pages.iter().copied().chain(std::iter::repeat_n(-1, columns - exact)))
            .collect();
        let placed = match on_device {
            Some(placed) => placed,
            None => {
                let most = q_start.windows(2).map(|two| (two[1] - two[0]) as usize).max().unwrap_or(0);
                on_device.insert(device::AttentionMetadata::paged(self, shape, *page_size, columns, most)?)
            }
        };
        placed.set(self, shape, q_start, q_pos, kv_len, &table)
    }

    fn attention(
        &self,
        shape: &Attention,
        metadata: &AttentionMetadata,
        q_pos: &[i32],
        [q, k, v]: [&Tensor; 3],
        sinks: Option<&Tensor>,
        [out, lse]: [&mut Tensor; 2],
    ) -> Result<(), ModelError> {
        if q_pos != metadata.q_pos {
            let why = "a probe changed those of a layer, which a device holds for all layers; use the processor";
            return Err(ModelError::input("positions", why));
        }
        let placed = metadata.on_device.as_ref().expect("it was placed");
        typed!(q.dtype() => A, {
            let qkv = Qkv { q: buffer::<A>(q), k: buffer(k), v: buffer(v) };
            Ok(device::attention_at(self, shape, placed, qkv, sinks.map(buffer), buffer_mut::<A>(out), buffer_mut(lse))?)
        })
    }

    fn route(
        &self,
        shape: &Route,
        logits: &Tensor,
        bias: Option<&Tensor>,
        experts: Option<&[i32]>,
        weight: &mut Tensor,
    ) -> Result<Index, ModelError> {
        let choice =
            device::route_to(self, shape, buffer::<f32>(logits), bias.map(buffer), experts, buffer_mut(weight))?;
        Ok(Index::Device(choice))
    }

    /// Matrices whose rows are no multiples of 16 bytes are left to the products that are cut by expert.
    fn choices(&self, config: &Config, dtype: DType, tokens: usize) -> Result<Option<Index>, Error> {
        let mut all = config.experts();
        let Some(experts) = all.next() else { return Ok(None) };
        let of = |plan: &moe::Plan| (plan.chosen, plan.expert.hidden, plan.expert.width);
        if all.any(|other| of(other) != of(experts)) {
            return Ok(None);
        }
        if [experts.expert.hidden, experts.expert.width].iter().any(|k| !(k * dtype.size()).is_multiple_of(16)) {
            return Ok(None);
        }
        let limit = tokens * experts.chosen;
        let what = IndexOf { op: "experts", limit, distinct: false };
        self.index(what, (0..limit as i32).collect(), None).map(Some)
    }

    fn chosen_product(
        &self,
        (x, every): (&Tensor, usize),
        choice: &Index,
        (w, bias): (&Tensor, Option<&Tensor>),
        y: &mut Tensor,
    ) -> Result<(), Error> {
        let (n, k) = (y.shape()[1], w.shape()[1]);
        typed!(w.dtype() => A, typed!(y.dtype() => O, {
            let (x, bias) = ((buffer::<A>(x), every), bias.map(buffer));
            device::gemm_experts(self, [n, k], x, there(choice), buffer(w), bias, buffer_mut::<O>(y))
        }))
    }

    fn copy_rows(
        &self,
        size: [usize; 2],
        (from, from_part): (&Tensor, Part<Index>),
        (to, to_part): (&mut Tensor, Part<Index>),
    ) -> Result<(), Error> {
        fn on_device<'a>(part: Part<'a, Index>) -> Part<'a> {
            let Part { rows, every, stride, offset } = part;
            Part { rows: rows.map(there), every, stride, offset }
        }
        let (from_part, to_part) = (on_device(from_part), on_device(to_part));
        typed!(from.dtype() => A, {
            device::copy_rows(self, size, (buffer::<A>(from), from_part), (buffer_mut(to), to_part))
        })
    }

    fn grow(&self, tensor: &mut Tensor, rows: usize) -> Result<(), ModelError> {
        let (held, width) = (tensor.shape()[0], tensor.shape()[1]);
        let mut larger = Backend::empty(self, tensor.dtype(), &[rows, width])?;
        typed!(tensor.dtype() => A, buffer_mut::<A>(&mut larger).copy_from(0, buffer(tensor), 0, held * width)?);
        *tensor = larger;
        Ok(())
    }

    fn copy_within(&self, tensor: &mut Tensor, from: usize, to: usize, count: usize) -> Result<(), Error> {
        let width = tensor.shape()[1];
        typed!(tensor.dtype() => A, buffer_mut::<A>(tensor).copy_within(from * width, to * width, count * width))
    }
}

fn there(index: &Index) -> &Indices {
    match index {
        Index::Device(indices) => indices,
        Index::Host(_) => panic!("an index on the host, in a forward on a device"),
    }
}

fn buffer<T: Scalar>(tensor: &Tensor) -> &Buffer<T> {
    tensor.as_buffer().expect("tensors of a device are there, and of this dtype")
}

fn buffer_mut<T: Scalar>(tensor: &mut Tensor) -> &mut Buffer<T> {
    tensor.as_buffer_mut().expect("tensors of a device are there, and of this dtype")
}
