//! The matrices of folders that store them as floats of 8 bits with a scale for each block (docs/NUMERICS.md, section 9).

use super::{Form, Stored, Weights, check_finite, few};
use crate::ModelError;
use crate::memory::buffer;
use crate::quantised::e4m3;
use safetensors::Dtype;
use samebits_ops::Element;

/// What stands beside the numbers of a matrix.
#[derive(Debug, PartialEq)]
pub(super) struct Float8 {
    /// Rows and columns of a block.
    block: [usize; 2],
    scales: (String, Stored),
}

impl<'a> Weights<'a> {
    /// One tensor for each matrix of floats of 8 bits and its scales.
    pub(super) fn with_float8(mut self, block: Option<[usize; 2]>) -> Result<Weights<'a>, ModelError> {
        let Some(block) = block else { return Ok(self) };
        let is_float8 = |(name, stored): (&String, &Stored)| (stored.dtype == Dtype::F8_E4M3).then(|| name.clone());
        let names: Vec<String> = self.tensors.iter().filter_map(is_float8).collect();
        let mut complaints = Vec::new();
        for name in names {
            let of_scales = format!("{name}_scale_inv");
            let scales = self.tensors.remove(&of_scales);
            let stored = self.tensors.remove(&name).expect("it is listed");
            let path = self.shard(&stored).clone();
            let wanted = match stored.shape[..] {
                [n, k] => Some(vec![n.div_ceil(block[0]), k.div_ceil(block[1])]),
                _ => None,
            };
            let why = match (&scales, wanted) {
                (_, None) => format!("has shape {:?}; blocks are of matrices", stored.shape),
                (None, Some(wanted)) => {
                    format!("has no {of_scales} beside it; quantization_config asks for one of shape {wanted:?}")
                }
                (Some(scales), Some(wanted)) if scales.shape != wanted => {
                    format!(
                        "has {of_scales} of shape {:?} beside it; blocks of {block:?} ask for {wanted:?}",
                        scales.shape
                    )
                }
                (Some(scales), _) if ![Dtype::F32, Dtype::BF16].contains(&scales.dtype) => {
                    format!("has {of_scales} in {} beside it; supported is F32 or BF16", scales.dtype)
                }
                _ => {
                    let scales = (of_scales, scales.expect("it is there"));
                    let (dtype, form) = (Dtype::F32, Form::Float8(Box::new(Float8 { block, scales })));
                    self.tensors.insert(name, Stored { dtype, form, ..stored });
                    continue;
                }
            };
            complaints.push(ModelError::tensor(&path, &name, why));
        }
        ModelError::all(few(complaints))?;
        Ok(self)
    }

    /// The elements of such a matrix.
    pub(super) fn widen_float8<T: Element>(
        &mut self,
        name: &str,
        stored: &Stored,
        Float8 { block: [rows, columns], scales: (of_scales, at) }: &Float8,
    ) -> Result<Vec<T>, ModelError> {
        let &[_, k] = &stored.shape[..] else { panic!("it is a matrix") };
        let scales: Vec<f32> = self.read(of_scales, at)?;
        check_finite(self.shard(at), of_scales, at, &scales)?;
        let numbers: Vec<f32> = (0..=255).map(e4m3).collect();
        let across = k.div_ceil(*columns);
        let bytes = self.bytes(name, stored.shard, &stored.bytes)?;
        let mut data: Vec<T> = buffer(&stored.shape)?;
        for (row, (bytes, data)) in bytes.chunks(k.max(1)).zip(data.chunks_mut(k.max(1))).enumerate() {
            for (column, (byte, element)) in bytes.iter().zip(data).enumerate() {
                let scale = scales[row / rows * across + column / columns];
                *element = T::narrow(numbers[usize::from(*byte)] * scale);
            }
        }
        Ok(data)
    }
}
