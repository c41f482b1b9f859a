//! The matrices of folders that store them as small integers ([`crate::quantised`]): the tensors of each become one.

use super::{Form, Stored, Weights, check_finite, few};
use crate::ModelError;
use crate::memory::buffer;
use crate::quantised::{Beside, Integers, Order, Scheme, Zeros};
use safetensors::Dtype;
use samebits_ops::{DType, Element, Quantized};
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

/// What a quantised matrix is made of, beside its integers.
#[derive(Debug, PartialEq)]
pub(super) struct Parts {
    scheme: Scheme,
    scales: (String, Stored),
    zeros: Option<(String, Stored)>,
    columns: Option<(String, Stored)>,
}

/// The ends of the names of the integers of a matrix, of its scales and zeros, and of the groups of its columns.
fn ends(order: Order) -> [&'static str; 4] {
    match order {
        Order::Awq | Order::Gptq => [".qweight", ".scales", ".qzeros", ".g_idx"],
        Order::Rows => [".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx"],
        Order::Bytes => [".weight", ".weight_scale", ".weight_zero_point", ".weight_g_idx"],
    }
}

/// What the integers of a matrix are called, those that may stand beside them, and the shape that the folder says it has.
struct Group {
    names: [String; 4],
    parts: [Option<Stored>; 4],
    said: Option<[usize; 2]>,
}

impl<'a> Weights<'a> {
    /// One tensor for each quantised matrix.
    pub(super) fn with_quantised(mut self, schemes: &[Scheme]) -> Result<Weights<'a>, ModelError> {
        let mut complaints = Vec::new();
        for order in [Order::Awq, Order::Gptq, Order::Rows, Order::Bytes] {
            let schemes: Vec<&Scheme> = schemes.iter().filter(|scheme| scheme.order == order).collect();
            let [end, ..] = ends(order);
            let is_integers = |stored: &Stored| order != Order::Bytes || stored.dtype == Dtype::I8;
            let listed = self.tensors.iter().filter(|(_, stored)| !schemes.is_empty() && is_integers(stored));
            let matrices: Vec<String> =
                listed.filter_map(|(name, _)| Some(name.strip_suffix(end)?.to_string())).collect();
            for matrix in matrices {
                if let Err(e) = self.join(&matrix, &schemes) {
                    complaints.extend(e);
                }
            }
        }
        ModelError::all(few(complaints))?;
        Ok(self)
    }

    /// Puts one matrix in the place of its parts, by the first of the schemes that they fit; else what is wrong by the first.
    fn join(&mut self, matrix: &str, schemes: &[&Scheme]) -> Result<(), Vec<ModelError>> {
        let order = schemes[0].order;
        let names = ends(order).map(|end| format!("{matrix}{end}"));
        // No groups of columns are stored with AWQ.
        let taken = |at: usize| at < 3 || order != Order::Awq;
        let mut parts = [const { None }; 4];
        for (at, part) in parts.iter_mut().enumerate().filter(|(at, _)| taken(*at)) {
            *part = self.tensors.remove(&names[at]);
        }
        let said = match order {
            Order::Rows => Some(self.said_shape(matrix).map_err(|e| vec![e])?),
            _ => None,
        };
        let group = Group { names, parts, said };
        let mut first = None;
        for scheme in schemes {
            match self.extents(scheme, &group) {
                Ok(shape) => {
                    let Group { names: [_, of_scales, of_zeros, of_columns], parts, .. } = group;
                    let [Some(integers), Some(scales), zeros, columns] = parts else { panic!("both are there") };
                    let whole = format!("{matrix}.weight");
                    if let Some(other) = self.tensors.get(&whole) {
                        let why = "stands beside the same matrix as integers; keep one of them";
                        return Err(vec![ModelError::tensor(self.shard(other), &whole, why)]);
                    }
                    let parts = Parts {
                        scheme: (*scheme).clone(),
                        scales: (of_scales, scales),
                        zeros: zeros.map(|zeros| (of_zeros, zeros)),
                        columns: columns.map(|columns| (of_columns, columns)),
                    };
                    // What they expand to.
                    let (dtype, form) = (Dtype::F32, Form::Quantised(Box::new(parts)));
                    self.tensors.insert(whole, Stored { dtype, shape: shape.into(), form, ..integers });
                    return Ok(());
                }
                Err(complaints) => _ = first.get_or_insert(complaints),
            }
        }
        Err(first.expect("there is a scheme"))
    }

    /// N and K of a matrix, where all of its parts are what the scheme asks for.
    fn extents(&self, scheme: &Scheme, group: &Group) -> Result<[usize; 2], Vec<ModelError>> {
        let [integers, scales, zeros, columns] = group.parts.each_ref().map(Option::as_ref);
        let [of_integers, of_scales, of_zeros, of_columns] = &group.names;
        let (integers, said) = (integers.expect("they are listed"), scheme.said());
        let path = self.shard(integers);
        let dtype = if scheme.order == Order::Bytes { Dtype::I8 } else { Dtype::I32 };
        if integers.dtype != dtype {
            let why = format!("is {}; {said} asks for {dtype}", integers.dtype);
            return Err(vec![ModelError::tensor(path, of_integers, why)]);
        }
        let extents = scheme.extents(&integers.shape, group.said);
        let Some((extents, groups)) = extents.and_then(|[n, k]| Some(([n, k], scheme.groups(k)?))) else {
            let matrix = group.said.map_or("a matrix".into(), |shape| format!("a matrix {shape:?}"));
            let why = format!("has shape {:?}; {said} asks for {matrix} in rows that groups fill", integers.shape);
            return Err(vec![ModelError::tensor(path, of_integers, why)]);
        };
        let [n, k] = extents;
        let [as_scales, as_zeros] = scheme.shapes(n, groups);
        let in_bytes = zeros.is_some_and(|zeros| zeros.dtype == Dtype::I8) && scheme.order == Order::Rows;
        let as_zeros = if in_bytes { as_scales.clone() } else { as_zeros };
        let of_zero: &[Dtype] = if in_bytes || scheme.order == Order::Bytes { &[Dtype::I8] } else { &[Dtype::I32] };
        let [zeros_too, columns_too] = scheme.asks_for;
        let floats = &[Dtype::F16, Dtype::BF16, Dtype::F32];
        let mut complaints = Vec::new();
        for (name, part, shape, dtypes, is_needed) in [
            (of_scales, scales, as_scales, &floats[..], true),
            (of_zeros, zeros, as_zeros, of_zero, zeros_too),
            (of_columns, columns, vec![k], &[Dtype::I32][..], columns_too),
        ] {
            let why = match part {
                None if is_needed => {
                    format!("is missing; {said} asks for it beside {of_integers} with shape {shape:?}")
                }
                Some(part) if part.shape != shape => format!("has shape {:?}; {said} asks for {shape:?}", part.shape),
                Some(part) if !dtypes.contains(&part.dtype) => {
                    let names: Vec<String> = dtypes.iter().map(Dtype::to_string).collect();
                    format!("is {}; supported is {}", part.dtype, names.join(" or "))
                }
                _ => continue,
            };
            complaints.push(ModelError::tensor(part.map_or(path, |part| self.shard(part)), name, why));
        }
        if complaints.is_empty() { Ok(extents) } else { Err(complaints) }
    }

    /// The shape of a matrix that stands in a tensor of its own.
    fn said_shape(&mut self, matrix: &str) -> Result<[usize; 2], ModelError> {
        let name = format!("{matrix}.weight_shape");
        let bad = |path: &Path, why: &str| ModelError::tensor(path, &name, why);
        let Some(stored) = self.tensors.remove(&name) else {
            return Err(bad(&self.source, "is missing; it must say the shape of the matrix"));
        };
        let path = self.shard(&stored).clone();
        if stored.shape != [2] || ![Dtype::I32, Dtype::I64].contains(&stored.dtype) {
            return Err(bad(&path, "must be two integers, I64 or I32"));
        }
        let bytes = self.bytes(&name, stored.shard, &stored.bytes)?;
        let extents = bytes.chunks_exact(bytes.len() / 2).map(|half| {
            // Little-endian numbers, of which those below 0 are too large.
            let mut wide = [0; 8];
            wide[..half.len()].copy_from_slice(half);
            i32::try_from(u64::from_le_bytes(wide)).ok().filter(|extent| *extent > 0)
        });
        match extents.collect::<Option<Vec<i32>>>().as_deref() {
            Some(&[n, k]) => Ok([n as usize, k as usize]),
            _ => Err(bad(&path, "holds what are no extents of a matrix")),
        }
    }

    /// The elements of a quantised matrix.
    pub(super) fn dequantise<T: Element>(
        &mut self,
        name: &str,
        stored: &Stored,
        parts: &Parts,
    ) -> Result<Vec<T>, ModelError> {
        let mut data: Vec<T> = buffer(&stored.shape)?;
        self.with_integers(name, stored, parts, |integers| integers.expand(&mut data))?;
        Ok(data)
    }

    /// Reads a quantised matrix, and what stands beside it, for `run`.
    pub(super) fn with_integers<R>(
        &mut self,
        name: &str,
        stored: &Stored,
        parts: &Parts,
        run: impl FnOnce(&Integers) -> R,
    ) -> Result<R, ModelError> {
        let &[n, k] = &stored.shape[..] else { panic!("it is a matrix") };
        let (of_scales, at) = &parts.scales;
        let scales: Vec<f32> = self.read(of_scales, at)?;
        check_finite(self.shard(at), of_scales, at, &scales)?;
        let groups = scales.len() / n.max(1);
        let columns: Vec<usize> = match &parts.columns {
            None => (0..k).map(|column| column / parts.scheme.group.unwrap_or(k)).collect(),
            Some((name, at)) => {
                let bytes = self.bytes(name, at.shard, &at.bytes)?;
                let found = bytes.as_chunks::<4>().0.iter().map(|group| i32::from_le_bytes(*group));
                let group = |(column, group): (usize, i32)| {
                    usize::try_from(group).ok().filter(|group| *group < groups).ok_or_else(|| {
                        let why = format!("element [{column}] is {group}; there are {groups} groups");
                        ModelError::tensor(self.shard(at), name, why)
                    })
                };
                found.enumerate().map(group).collect::<Result<_, _>>()?
            }
        };
        let zeros = match &parts.zeros {
            None => None,
            Some((name, at)) => Some((self.bytes(name, at.shard, &at.bytes)?, at.dtype)),
        };
        let zeros = zeros.as_ref().map(|(bytes, dtype)| match dtype {
            Dtype::I8 => Zeros::Bytes(bytes),
            _ => Zeros::Words(bytes),
        });
        let bytes = &self.bytes(name, stored.shard, &stored.bytes)?;
        let beside = Beside { scales: &scales, zeros, columns: &columns };
        Ok(run(&Integers { scheme: &parts.scheme, n, bytes, beside }))
    }

    /// Takes a parameter of which products read `dtype`, that is stored as integers with scales, and stays so in memory, finite all
    /// of it; `None`, and nothing is taken, where it is stored otherwise, or is no run of groups.
    pub fn quantized(&mut self, name: &str, dtype: DType, shape: [usize; 2]) -> Result<Option<Quantized>, ModelError> {
        let twice = self.rounded.is_some_and(|first| first != dtype);
        let plain = self.lists || twice || dtype == DType::Fp16 || self.memory.contains_key(name);
        let Some(stored) = self.tensors.get(name).filter(|stored| !plain && stored.shape == shape) else {
            return Ok(None);
        };
        if !matches!(stored.form, Form::Packed(..) | Form::Quantised(_)) {
            return Ok(None);
        }
        let (stored, taken) = (self.tensors.remove(name).expect("it is there"), self.taken);
        let found = match &stored.form {
            Form::Packed(format, heads) => self.blocks(name, &stored, *format, *heads)?,
            Form::Quantised(parts) => self.with_integers(name, &stored, parts, |integers| integers.quantized())?,
            _ => None,
        };
        let is_finite = |w: &Quantized| {
            let mut row = vec![0f32; w.k];
            (0..w.n).all(|n| {
                w.row(n, &mut row);
                row.iter().all(|w| w.is_finite())
            })
        };
        let found = found.filter(is_finite);
        match &found {
            Some(_) => drop(self.parameters.insert(name.into(), shape.into())),
            // It is read once more, as elements, and what is not finite is named.
            None => {
                self.taken = taken;
                self.tensors.insert(name.into(), stored);
            }
        }
        Ok(found)
    }

    /// Some bytes of a shard, no more than it has.
    pub(super) fn bytes(&mut self, name: &str, shard: usize, bytes: &Range<u64>) -> Result<Vec<u8>, ModelError> {
        let (path, file) = &mut self.shards[shard];
        let mut read = vec![0; (bytes.end - bytes.start) as usize];
        file.seek(SeekFrom::Start(bytes.start))
            .and_then(|_| file.read_exact(&mut read))
            .map_err(|e| ModelError::tensor(path, name, format!("cannot be read: {e}")))?;
        self.taken += read.len() as u64;
        (self.progress)(self.taken, self.total);
        Ok(read)
    }

    /// Drops biases that the model has no place for and that change nothing: some tools store one with every matrix.
    pub fn drop_biases_of_zeros(&mut self, wanted: &BTreeMap<String, Vec<usize>>) -> Result<(), ModelError> {
        let is_quantised = |matrix: &str| {
            let weight = self.tensors.get(&format!("{matrix}.weight"));
            weight.is_some_and(|weight| matches!(weight.form, Form::Quantised(_)))
        };
        let further = self.tensors.keys().filter(|name| !wanted.contains_key(*name));
        let names = further.filter(|name| name.strip_suffix(".bias").is_some_and(is_quantised));
        for name in names.cloned().collect::<Vec<_>>() {
            let stored = self.tensors.remove(&name).expect("it is listed");
            let values: Vec<f32> = self.read(&name, &stored)?;
            if values.iter().any(|value| *value != 0.0) {
                self.tensors.insert(name, stored);
            }
        }
        Ok(())
    }
}
