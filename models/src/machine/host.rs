//! Forwards on the processor: what kernels read are slices.

use super::{AttentionMetadata, Index, IndexOf, Machine, typed};
use crate::ModelError;
use crate::memory::grow;
use samebits_ops::device::Part;
use samebits_ops::{
    Attention, Cpu, Error, Keys, Prepared, Qkv, RopeTable, Route, Scalar, Sequences, Tensor, attention, route,
};

impl Machine for Cpu {
    /// Ops on the processor check what they are given.
    fn index(&self, _what: IndexOf, values: Vec<i32>, _earlier: Option<Index>) -> Result<Index, Error> {
        Ok(Index::Host(values))
    }

    fn read_index(&self, index: &Index) -> Result<Vec<i32>, Error> {
        Ok(host(index).to_vec())
    }

    fn angles(&self, table: RopeTable, _earlier: Option<Prepared>) -> Result<Prepared, Error> {
        Ok(Prepared::new("pos", table))
    }

    fn place(&self, _metadata: &mut AttentionMetadata, _shape: &Attention, _columns: usize) -> Result<(), Error> {
        Ok(())
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
        let AttentionMetadata { q_start, kv_len, block_table, page_size, .. } = metadata;
        let keys = Keys::Paged { page_size: *page_size, table: block_table };
        let sequences = Sequences { q_pos, kv_len, q_start: Some(q_start), keys };
        typed!(q.dtype() => A, {
            let qkv = Qkv { q: slice::<A>(q), k: slice(k), v: slice(v) };
            Ok(attention(self, shape, &sequences, qkv, sinks.map(slice), slice_mut::<A>(out), slice_mut(lse))?)
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
        let mut index = vec![0; shape.tokens * shape.chosen];
        route(self, shape, slice::<f32>(logits), bias.map(slice), experts, &mut index, slice_mut(weight))?;
        Ok(Index::Host(index))
    }

    fn copy_rows(
        &self,
        [count, width]: [usize; 2],
        (from, from_part): (&Tensor, Part<Index>),
        (to, to_part): (&mut Tensor, Part<Index>),
    ) -> Result<(), Error> {
        let row = |part: &Part<Index>, i: usize| match part.rows {
            Some(rows) => host(rows)[i] as usize * part.stride + part.offset,
            None => i / part.every * part.stride + part.offset,
        };
        typed!(from.dtype() => A, {
            let (from, to) = (slice::<A>(from), slice_mut::<A>(to));
            for i in 0..count {
                to[row(&to_part, i)..][..width].copy_from_slice(&from[row(&from_part, i)..][..width]);
            }
        });
        Ok(())
    }

    fn grow(&self, tensor: &mut Tensor, rows: usize) -> Result<(), ModelError> {
        let width = tensor.shape()[1];
        typed!(tensor.dtype() => A, {
            let nothing = Tensor::new(Vec::<A>::new(), &[0, width])?;
            let data = std::mem::replace(tensor, nothing).into_vec::<A>();
            let mut data = data.expect("it is on the host, and of this dtype");
            let grown = grow(&mut data, &[rows, width]);
            let rows = data.len().checked_div(width).unwrap_or(0);
            *tensor = Tensor::new(data, &[rows, width])?;
            grown
        })
    }

    fn copy_within(&self, tensor: &mut Tensor, from: usize, to: usize, count: usize) -> Result<(), Error> {
        let width = tensor.shape()[1];
        typed!(tensor.dtype() => A, {
            slice_mut::<A>(tensor).copy_within(from * width..(from + count) * width, to * width);
        });
        Ok(())
    }
}

fn host(index: &Index) -> &[i32] {
    match index {
        Index::Host(values) => values,
        Index::Device(_) => panic!("an index on a device, in a forward on the processor"),
    }
}

fn slice<T: Scalar>(tensor: &Tensor) -> &[T] {
    tensor.as_slice().expect("tensors of the processor are on the host, and of this dtype")
}

fn slice_mut<T: Scalar>(tensor: &mut Tensor) -> &mut [T] {
    tensor.as_slice_mut().expect("tensors of the processor are on the host, and of this dtype")
}
