//! The tensors of a GGUF file by the names of folders: their elements, or integers with scales as they are stored.

use super::{BLOCK, Form, Stored, Weights};
use crate::files::open;
use crate::memory::buffer;
use crate::{ModelError, gguf};
use safetensors::tensor::Dtype;
use samebits_ops::{Element, Offset, Quantized};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

impl<'a> Weights<'a> {
    /// Opens a GGUF file: its tensors by the names of folders.
    pub(super) fn open_gguf(path: &Path) -> Result<Weights<'a>, ModelError> {
        let (mut file, length) = open(path)?;
        let contents = gguf::read(path, &mut file, length)?;
        let mut weights = Weights::empty(path);
        for (name, found) in &contents.tensors {
            let places = gguf::places(&contents, name);
            let places = places.unwrap_or_else(|| vec![gguf::Place { name: name.clone(), part: None, heads: None }]);
            let (parts, size) = (places.len() as u64, found.bytes.end - found.bytes.start);
            for place in places {
                let (mut shape, mut bytes) = (found.shape.clone(), found.bytes.clone());
                if let Some(part) = place.part {
                    shape.remove(0);
                    let each = size / parts;
                    bytes.start += part as u64 * each;
                    bytes.end = bytes.start + each;
                }
                // A gate is stored as one row without its axis.
                if place.name.ends_with("shared_expert_gate.weight") && shape.len() == 1 {
                    shape.insert(0, 1);
                }
                let halves = place.heads.map(|heads| heads.saturating_mul(2));
                let are_whole = |halves| halves > 0 && shape.first().is_some_and(|rows| rows.is_multiple_of(halves));
                if let Some(halves) = halves.filter(|halves| !are_whole(*halves)) {
                    let why = format!("has shape {shape:?}, which are not {} heads of an even width", halves / 2);
                    return Err(ModelError::tensor(path, name, why));
                }
                weights.total += bytes.end - bytes.start;
                let form = Form::Packed(found.format, place.heads);
                let dtype = match found.format {
                    gguf::Format::F16 => Dtype::F16,
                    gguf::Format::Bf16 => Dtype::BF16,
                    _ => Dtype::F32,
                };
                let stored = Stored { shard: 0, dtype, shape, bytes, more: Vec::new(), form };
                if weights.tensors.insert(place.name, stored).is_some() {
                    return Err(ModelError::tensor(path, name, "stands in it twice"));
                }
            }
        }
        weights.shards.push((path.into(), file));
        Ok(weights)
    }

    /// The elements of a tensor of a GGUF file, some rows at a time; rows of heads go where folders have them.
    pub(super) fn unpack<T: Element>(
        &mut self,
        name: &str,
        stored: &Stored,
        format: gguf::Format,
        heads: Option<usize>,
    ) -> Result<Vec<T>, ModelError> {
        let mut data: Vec<T> = buffer(&stored.shape)?;
        let (numbers, size) = format.block();
        // Of a vector in heads each number is a row.
        let axes = if heads.is_some() { 1 } else { stored.shape.len().saturating_sub(1) };
        let width: usize = stored.shape.get(axes..).unwrap_or_default().iter().product();
        let (path, file) = &mut self.shards[stored.shard];
        let unreadable = |e: std::io::Error| ModelError::tensor(path, name, format!("cannot be read: {e}"));
        file.seek(SeekFrom::Start(stored.bytes.start)).map_err(unreadable)?;
        let rows = data.len().checked_div(width).unwrap_or(0);
        let together = (BLOCK / 4).div_ceil(width.max(1)).min(rows);
        let (mut values, mut bytes) = (vec![0f32; together * width], vec![0u8; together * width / numbers * size]);
        for first in (0..rows).step_by(together.max(1)) {
            let count = together.min(rows - first) * width;
            let bytes = &mut bytes[..count / numbers * size];
            file.read_exact(bytes).map_err(unreadable)?;
            format.expand(bytes, &mut values[..count]);
            for (at, row) in values[..count].chunks_exact(width).enumerate() {
                let to = heads.map_or(first + at, |heads| unpaired(first + at, rows / heads));
                row.iter().zip(&mut data[to * width..][..width]).for_each(|(from, to)| *to = T::narrow(*from));
            }
            self.taken += bytes.len() as u64;
            (self.progress)(self.taken, self.total);
        }
        Ok(data)
    }

    /// A matrix of a GGUF file, some rows at a time, where it holds integers with scales.
    pub(super) fn blocks(
        &mut self,
        name: &str,
        stored: &Stored,
        format: gguf::Format,
        heads: Option<usize>,
    ) -> Result<Option<Quantized>, ModelError> {
        let &[n, k] = &stored.shape[..] else { panic!("it is a matrix") };
        let (numbers, size) = format.block();
        let Some(mut all) = format.quantized(&[], k) else { return Ok(None) };
        all.n = n;
        let row = (k / numbers * size) as u64;
        let together = (BLOCK as u64).div_ceil(row.max(1));
        for first in (0..n as u64).step_by(together as usize) {
            let range = |row_number: u64| stored.bytes.start + row_number * row;
            let bytes = self.bytes(name, stored.shard, &(range(first)..range((first + together).min(n as u64))))?;
            let some = format.quantized(&bytes, k).expect("integers with scales");
            all.q.extend(some.q);
            all.d.extend(some.d);
            all.s.as_mut().zip(some.s).into_iter().for_each(|(all, some)| all.extend(some));
            if let (Offset::Least(all_e, all_t), Offset::Least(e, t)) = (&mut all.offset, some.offset) {
                all_e.extend(e);
                all_t.as_mut().zip(t).into_iter().for_each(|(all, some)| all.extend(some));
            }
        }
        Ok(Some(match heads {
            None => all,
            Some(heads) => {
                let mut rows = vec![0; n];
                (0..n).for_each(|row| rows[unpaired(row, n / heads)] = row);
                all.rows(&rows)
            }
        }))
    }
}

/// Where folders have a row that is stored as number 2j + s of its head of `width` rows: at j + s * width / 2.
pub(crate) fn unpaired(row: usize, width: usize) -> usize {
    let (head, within) = (row / width, row % width);
    head * width + within / 2 + within % 2 * (width / 2)
}
