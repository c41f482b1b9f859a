//! Safetensors: one `model.safetensors`, or shards named by `model.safetensors.index.json`; without either the one `.pth` of the
//! folder. Or a GGUF file, whose tensors have the names of folders here.
//!
//! Every offset and size is checked against the file before a byte of data is read. A tensor leaves the set when it is
//! taken, so that what is left at the end is what nobody asked for. Tensors are read one at a time and not mapped, so
//! that a model in memory is held once.

use crate::config::{IMAGES, LENT, SOUNDS};
use crate::error::escaped;
use crate::files::{open, parse, read_object};
use crate::layers::linear::Source;
use crate::machine::typed;
use crate::memory::buffer;
use crate::{Config, ModelError, PeftFolder, gguf, mxfp4, pth, quantised};
use safetensors::tensor::{Dtype, TensorInfo};
use samebits_ops::{DType, Element, Tensor, TensorRef, bf16, f16};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

mod blocks;
mod float8;
mod integers;
mod names;

pub(crate) use blocks::unpaired;

const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a model folder that have not been taken yet.
pub(crate) struct Weights<'a> {
    shards: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, Stored>,
    /// What a missing tensor is missing from.
    source: PathBuf,
    /// What stands in memory instead of a file.
    memory: BTreeMap<String, InMemory<'a>>,
    /// Whether these are no tensors but the list of those that are taken: each is there, without rows.
    pub lists: bool,
    /// Whether the matrices that are taken may have adapters.
    pub adapts: bool,
    /// Those that may, by their names without what stands behind: the rows that products read.
    pub adaptable: BTreeMap<String, Vec<Source>>,
    /// The adapter that is added to matrices as they are read.
    pub merged: Option<PeftFolder>,
    /// What every parameter is rounded to before it is read, if only to be widened again.
    rounded: Option<DType>,
    /// Name and shape of what was taken by [`Weights::tensor`].
    pub parameters: BTreeMap<String, Vec<usize>>,
    /// The same of what was taken by [`Weights::constant`].
    pub constants: BTreeMap<String, Vec<usize>>,
    /// Bytes of all tensors, and of those that have been taken.
    total: u64,
    taken: u64,
    /// Called with both whenever they change.
    progress: Box<dyn FnMut(u64, u64) + 'a>,
}

/// A tensor in memory; shared, where whoever holds it allows that.
type InMemory<'a> = (TensorRef<'a>, Option<&'a Arc<Tensor>>);

/// Where a tensor stands.
#[derive(Debug, PartialEq)]
pub(crate) struct Stored {
    shard: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Bytes in the shard, within its length.
    bytes: Range<u64>,
    /// Where it goes on behind these: shards, and the bytes there.
    more: Vec<(usize, Range<u64>)>,
    form: Form,
}

/// How the elements of a tensor are stored.
#[derive(Debug, PartialEq)]
enum Form {
    /// As they are.
    Plain,
    /// As blocks of MXFP4, whose scales stand in a tensor of their own: its shard, and the bytes there.
    Scaled(usize, Range<u64>),
    /// As those of a GGUF file, and in how many heads, where rows of heads stand pair by pair.
    Packed(gguf::Format, Option<usize>),
    /// As small integers, with what they are scaled by.
    Quantised(Box<integers::Parts>),
    /// As floats of 8 bits, with the scales of blocks.
    Float8(Box<float8::Float8>),
}

/// Bytes read at a time.
const BLOCK: usize = 1 << 20;

impl<'a> Weights<'a> {
    /// Opens the weights of the folder `dir` and checks every header.
    pub fn open(dir: &Path) -> Result<Weights<'a>, ModelError> {
        if gguf::is_gguf(dir) {
            return Ok(Weights::open_gguf(dir)?.of_models());
        }
        let (whole, index) = (dir.join(WHOLE), dir.join(INDEX));
        match (whole.exists(), index.exists()) {
            (true, true) => Err(ModelError::file(&index, format!("stands beside {WHOLE}; keep one of them"))),
            (false, false) => match &files_of_torch(dir)[..] {
                [] => Err(ModelError::file(dir, format!("has neither {WHOLE} nor {INDEX}"))),
                [path] => Ok(Weights::open_pth(path)?.of_models()),
                files => Err(ModelError::file(dir, format!("has {} .pth files; keep one of them", files.len()))),
            },
            (true, false) => {
                let mut weights = Weights::empty(&whole);
                weights.add_shard(&whole)?;
                weights.with_stored(&quantised::of(dir)?)
            }
            (false, true) => Weights::open_shards(dir, &index)?.with_stored(&quantised::of(dir)?),
        }
    }

    /// Opens those of a component of a pipeline, whose files have the name of the library that wrote them.
    pub fn open_component(dir: &Path) -> Result<Weights<'a>, ModelError> {
        const STEMS: [&str; 2] = ["diffusion_pytorch_model", "model"];
        let files =
            STEMS.map(|stem| [".safetensors", ".safetensors.index.json"].map(|end| dir.join(format!("{stem}{end}"))));
        let there: Vec<&PathBuf> = files.iter().flatten().filter(|path| path.exists()).collect();
        match &there[..] {
            [] => {
                let names = STEMS.map(|stem| format!("{stem}.safetensors")).join(" nor ");
                Err(ModelError::file(
                    dir,
                    format!("has neither {names}; variants such as .fp16 need that name, .bin that form"),
                ))
            }
            [path] if path.extension().is_some_and(|end| end == "json") => Weights::open_shards(dir, path),
            [path] => Weights::open_file(path),
            [first, second, ..] => {
                let name = first.file_name().unwrap_or_default().display();
                Err(ModelError::file(second, format!("stands beside {name}; keep one of them")))
            }
        }
    }

    /// Those of a folder that stores matrices so.
    fn with_stored(self, stored: &quantised::Stored) -> Result<Weights<'a>, ModelError> {
        Ok(self.with_quantised(&stored.schemes)?.with_float8(stored.float8)?.of_models())
    }

    /// Opens a file that torch.save wrote.
    fn open_pth(path: &Path) -> Result<Weights<'a>, ModelError> {
        let (mut file, length) = open(path)?;
        let mut weights = Weights::empty(path);
        for (name, (dtype, shape, bytes)) in pth::read(path, &mut file, length)? {
            weights.total += bytes.end - bytes.start;
            weights.tensors.insert(name, Stored { shard: 0, dtype, shape, bytes, more: Vec::new(), form: Form::Plain });
        }
        weights.shards.push((path.into(), file));
        Ok(weights)
    }

    fn empty(source: &Path) -> Weights<'a> {
        let (shards, tensors, parameters) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        let (source, constants, progress) = (source.into(), BTreeMap::new(), Box::new(|_, _| {}));
        Weights {
            shards,
            tensors,
            source,
            memory: BTreeMap::new(),
            lists: false,
            adapts: false,
            adaptable: BTreeMap::new(),
            merged: None,
            rounded: None,
            parameters,
            constants,
            total: 0,
            taken: 0,
            progress,
        }
    }

    /// No tensors, but the list of those that are taken.
    pub fn listing() -> Weights<'a> {
        Weights { lists: true, ..Weights::empty(Path::new("a list")) }
    }

    /// The tensors of a single file.
    pub fn open_file(path: &Path) -> Result<Weights<'a>, ModelError> {
        let mut weights = Weights::empty(path);
        weights.add_shard(path)?;
        Ok(weights)
    }

    /// Those of a model in memory, each of floats on the host.
    pub fn of(memory: &BTreeMap<String, TensorRef<'a>>) -> Weights<'a> {
        Weights::in_memory(memory.iter().map(|(name, tensor)| (name.clone(), (*tensor, None))).collect())
    }

    /// The same, of which [`Weights::matrix`] copies nothing.
    pub fn shared(memory: &'a BTreeMap<String, Arc<Tensor>>) -> Weights<'a> {
        Weights::in_memory(memory.iter().map(|(name, tensor)| (name.clone(), (tensor.view(), Some(tensor)))).collect())
    }

    fn in_memory(memory: BTreeMap<String, InMemory<'a>>) -> Weights<'a> {
        let mut weights = Weights::empty(Path::new("the model in memory"));
        let stored = |tensor: &TensorRef| {
            let dtype = typed!(tensor.dtype() => A, dtype_of::<A>());
            Stored { shard: 0, dtype, shape: tensor.shape().into(), bytes: 0..0, more: Vec::new(), form: Form::Plain }
        };
        weights.tensors = memory.iter().map(|(name, (tensor, _))| (name.clone(), stored(tensor))).collect();
        weights.memory = memory;
        weights
    }

    /// The tensors that are left in f32, finite all of them, each read when it is asked for.
    pub fn read_all(mut self) -> impl Iterator<Item = Result<(String, Tensor), ModelError>> {
        let names: Vec<(String, Vec<usize>)> =
            self.left().map(|(name, stored)| (name.clone(), stored.shape.clone())).collect();
        names.into_iter().map(move |(name, shape)| {
            let values = Tensor::new(self.take::<f32>(&name, &shape)?, &shape)?;
            Ok((name, values))
        })
    }

    /// Rounds every parameter to `dtype` first, also those that are read in f32: what a step of training leaves.
    pub fn rounded_to(mut self, dtype: DType) -> Weights<'a> {
        self.rounded = Some(dtype);
        self
    }

    /// Calls `progress(taken, total)`, in bytes, whenever a part of a tensor has been read.
    pub fn report_to(mut self, progress: impl FnMut(u64, u64) + 'a) -> Weights<'a> {
        self.progress = Box::new(progress);
        self
    }

    fn open_shards(dir: &Path, index: &Path) -> Result<Weights<'a>, ModelError> {
        let mut weights = Weights::empty(index);
        let mut complaints = Vec::new();
        let map = match read_object(index)?.remove("weight_map") {
            Some(Value::Object(map)) => map,
            _ => return Err(ModelError::field(index, "weight_map", "is missing; it must map tensors to file names")),
        };
        let mut names = BTreeSet::new();
        for (tensor, shard) in &map {
            match shard.as_str().filter(|name| is_file_name(name)) {
                Some(name) => drop(names.insert(name)),
                None => {
                    let why = format!("is {shard}; it must be a file name in the model folder");
                    complaints.push(ModelError::field(index, format!("weight_map.{tensor}"), why));
                }
            }
        }
        for name in names {
            let path = dir.join(name);
            if !path.exists() {
                complaints.push(ModelError::field(index, "weight_map", format!("names `{name}`, which is missing")));
            } else if let Err(e) = weights.add_shard(&path) {
                complaints.push(e);
            }
        }
        ModelError::all(few(complaints))?;
        for (tensor, name) in &map {
            if !weights.contains(tensor) {
                return Err(ModelError::tensor(index, tensor, format!("is listed in {name} but stands in no shard")));
            }
        }
        for (tensor, stored) in &weights.tensors {
            let (path, _) = &weights.shards[stored.shard];
            let name = path.file_name().and_then(|name| name.to_str());
            if map.get(tensor).and_then(Value::as_str) != name {
                return Err(ModelError::tensor(
                    path,
                    tensor,
                    format!("is not listed for this file in {}", index.display()),
                ));
            }
        }
        Ok(weights)
    }

    /// Opens one file and adds its tensors.
    fn add_shard(&mut self, path: &Path) -> Result<(), ModelError> {
        let (mut file, length) = open(path)?;
        let shard = self.shards.len();
        for (name, stored) in read_header(path, &mut file, length, shard)? {
            if let Some(other) = self.tensors.get(&name) {
                let other = self.shards[other.shard].0.display();
                return Err(ModelError::tensor(path, &name, format!("stands in {other} too; keep one of them")));
            }
            self.total += stored.bytes.end - stored.bytes.start;
            self.tensors.insert(name, stored);
        }
        self.shards.push((path.into(), file));
        Ok(())
    }

    /// The tensors that have not been taken, by name.
    pub fn left(&self) -> impl Iterator<Item = (&String, &Stored)> {
        self.tensors.iter()
    }

    /// Takes the elements of a tensor as they are, finite or not.
    pub fn peek(&mut self, name: &str) -> Result<Vec<f32>, ModelError> {
        let stored = self.tensors.remove(name).expect("it is listed");
        self.read(name, &stored)
    }

    /// Whether the tensor is there and has not been taken.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The file the tensor stands in, or should.
    pub fn path(&self, name: &str) -> PathBuf {
        self.tensors.get(name).map_or(&self.source, |stored| self.shard(stored)).clone()
    }

    /// The file that a tensor stands in.
    fn shard(&self, stored: &Stored) -> &PathBuf {
        self.shards.get(stored.shard).map_or(&self.source, |(path, _)| path)
    }

    /// Looks whether these are the tensors that `config` asks for, which are `wanted`, by what headers say: all that is wrong. What is no part
    /// of what is computed is dropped, and the buffers of it are named.
    pub fn fit(&mut self, config: &Config, wanted: BTreeMap<String, Vec<usize>>) -> (Vec<ModelError>, Vec<String>) {
        self.tensors.retain(|name, _| config.unused(name).is_none());
        let buffers: Vec<String> =
            self.left().filter(|(name, it)| is_buffer(name, it)).map(|(name, _)| name.clone()).collect();
        buffers.iter().for_each(|name| drop(self.tensors.remove(name)));
        let mut complaints = self.drop_again(config);
        complaints.extend(self.drop_biases_of_zeros(&wanted).err());
        let is_tied = |name: &str| config.tied && name.strip_suffix(".weight") == Some(config.head);
        complaints.extend(self.compare(wanted, is_tied));
        (complaints, buffers)
    }

    /// What is wrong with these as the tensors that are `wanted`, by what headers say; some may be there beside them.
    fn compare(&self, mut wanted: BTreeMap<String, Vec<usize>>, beside: impl Fn(&str) -> bool) -> Vec<ModelError> {
        let mut complaints = Vec::new();
        for (name, stored) in &self.tensors {
            let bad = |why: String| ModelError::tensor(self.shard(stored), name, why);
            match wanted.remove(name) {
                None if beside(name) => {}
                None => complaints.push(bad("is not part of the model that config.json describes".into())),
                Some(shape) if shape != stored.shape => {
                    complaints.push(bad(format!("has shape {:?}; config.json asks for {shape:?}", stored.shape)));
                }
                Some(_)
                    if !matches!(stored.form, Form::Scaled(..))
                        && !matches!(stored.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) =>
                {
                    complaints.push(bad(format!("is {}; weights must be BF16, F16 or F32", stored.dtype)));
                }
                Some(_) => {}
            }
        }
        complaints.extend(wanted.iter().map(|(name, shape)| {
            let why = format!("is missing; config.json asks for it with shape {shape:?}");
            ModelError::tensor(&self.source, name, why)
        }));
        complaints
    }

    /// Refuses these as the tensors of a component, unless they are those that are `wanted`. Numbers of positions are passed by.
    pub fn complete(&mut self, wanted: BTreeMap<String, Vec<usize>>) -> Result<(), ModelError> {
        self.tensors.retain(|name, stored| !is_buffer(name, stored));
        ModelError::all(few(self.compare(wanted, |_| false)))
    }

    /// Other names for tensors, where `rename` gives one.
    pub fn rename(&mut self, rename: impl Fn(&str) -> Option<String>) {
        let tensors = std::mem::take(&mut self.tensors);
        self.tensors = tensors.into_iter().map(|(name, stored)| (rename(&name).unwrap_or(name), stored)).collect();
    }

    /// Drops what is stored again under the names of later uses of a shared block; complaints of what is not the same.
    fn drop_again(&mut self, config: &Config) -> Vec<ModelError> {
        let first = |name: &String| config.shared_name(name).filter(|first| self.contains(first));
        let again: Vec<(String, String)> =
            self.tensors.keys().filter_map(|name| Some((name.clone(), first(name)?))).collect();
        let mut complaints = Vec::new();
        for (name, first) in again {
            match self.are_same(&name, &first) {
                Ok(true) => {}
                Ok(false) => {
                    let why = format!("differs from {first}, which is the same weight; remove one");
                    complaints.push(ModelError::tensor(&self.path(&name), &name, why));
                }
                Err(e) => complaints.push(e),
            }
            self.tensors.remove(&name);
        }
        complaints
    }

    /// Whether two tensors have the same shape and bits.
    fn are_same(&mut self, a: &str, b: &str) -> Result<bool, ModelError> {
        if self.tensors[a].shape != self.tensors[b].shape {
            return Ok(false);
        }
        let taken = self.taken;
        let mut values = |name: &str| -> Result<Vec<f32>, ModelError> {
            let stored = self.tensors.remove(name).expect("it is there");
            let values = self.read(name, &stored);
            self.tensors.insert(name.into(), stored);
            values
        };
        let (second, first) = (values(a)?, values(b)?);
        // The first is still to be read.
        let Stored { bytes, .. } = &self.tensors[a];
        self.taken = taken + (bytes.end - bytes.start);
        Ok(first.iter().map(|x| x.to_bits()).eq(second.iter().map(|x| x.to_bits())))
    }

    /// [`Weights::fit`] where what does not fit is refused; lines on what is passed by.
    pub fn check(&mut self, config: &Config, wanted: BTreeMap<String, Vec<usize>>) -> Result<Vec<String>, ModelError> {
        let [mut images, mut sounds, mut lent] = [const { Vec::new() }; 3];
        for (name, _) in self.left() {
            match config.unused(name) {
                Some(IMAGES) => images.push(name.clone()),
                Some(SOUNDS) => sounds.push(name.clone()),
                Some(LENT) => lent.push(name.clone()),
                _ => {}
            }
        }
        let (complaints, buffers) = self.fit(config, wanted);
        ModelError::all(few(complaints))?;
        let passed = [
            (buffers, "buffers that are computed anew"),
            (images, "tensors of a model of images"),
            (sounds, "tensors of a model of sounds"),
            (lent, "tensors of keys and values that are another layer's"),
        ];
        let line = |(names, what): (Vec<String>, &str)| {
            let (first, count, source) = (names.first()?, names.len(), self.source.display());
            Some(escaped(&format!("{source}: {count} {what}, such as `{first}`, are passed by")))
        };
        Ok(passed.into_iter().filter_map(line).collect())
    }

    /// Takes a tensor, which must have this shape and finite elements, as `T`: exact, or rounded once where T is
    /// narrower than what is stored.
    pub fn take<T: Element>(&mut self, name: &str, shape: &[usize]) -> Result<Vec<T>, ModelError> {
        let stored = self.tensors.remove(name).ok_or_else(|| {
            ModelError::tensor(&self.source, name, format!("is missing; config.json asks for it with shape {shape:?}"))
        })?;
        let path = self.shard(&stored).clone();
        if stored.shape != shape {
            let why = format!("has shape {:?}; config.json asks for {shape:?}", stored.shape);
            return Err(ModelError::tensor(&path, name, why));
        }
        let data: Vec<T> = self.read(name, &stored)?;
        check_finite(&path, name, &stored, &data)?;
        Ok(data)
    }

    /// Takes a parameter of the model, as [`Weights::take`] does.
    pub fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor, ModelError> {
        self.parameters.insert(name.into(), shape.into());
        if self.lists {
            return without_rows(dtype, shape);
        }
        let first = self.rounded.unwrap_or(dtype);
        if first == dtype {
            return typed!(dtype => A, Ok(Tensor::new(self.take::<A>(name, shape)?, shape)?));
        }
        let rounded = typed!(first => A, {
            self.take::<A>(name, shape)?.into_iter().map(Element::widen).collect::<Vec<f32>>()
        });
        typed!(dtype => A, Ok(Tensor::new(rounded.into_iter().map(A::narrow).collect::<Vec<A>>(), shape)?))
    }

    /// Takes a parameter that is a matrix: of a model in memory that holds it in this dtype nothing is copied.
    pub fn matrix(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Result<Arc<Tensor>, ModelError> {
        let shared = self.memory.get(name).and_then(|(_, shared)| *shared).filter(|_| self.contains(name));
        let as_it_is = |there: &&Arc<Tensor>| {
            there.dtype() == dtype && there.shape() == shape && self.rounded.is_none_or(|rounded| rounded == dtype)
        };
        let Some(there) = shared.filter(as_it_is) else {
            return self.tensor(name, dtype, shape).map(Arc::new);
        };
        let stored = self.tensors.remove(name).expect("it is there");
        typed!(dtype => A, {
            check_finite(&self.source, name, &stored, there.as_slice::<A>().expect("on the host, and of this dtype"))?;
        });
        self.parameters.insert(name.into(), shape.into());
        Ok(there.clone())
    }

    /// The elements of a tensor, which stays, finite all of them, in f32.
    pub fn numbers(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let stored = self.tensors.remove(name).expect("it is listed");
        let values = self.read::<f32>(name, &stored);
        let path = self.shard(&stored).clone();
        let checked = values.and_then(|values| {
            assert_eq!(values.len(), shape.iter().product::<usize>(), "all of its elements");
            check_finite(&path, name, &stored, &values).map(|()| values)
        });
        self.tensors.insert(name.into(), stored);
        checked
    }

    /// Takes something that is no parameter, in f32.
    pub fn constant(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        self.constants.insert(name.into(), shape.into());
        if self.lists {
            return without_rows(DType::Fp32, shape);
        }
        Ok(Tensor::new(self.take::<f32>(name, shape)?, shape)?)
    }

    /// Takes a number that is no parameter, and refuses any other but what a dtype of folders makes of `supported`.
    pub fn number(&mut self, name: &str, supported: f32) -> Result<(), ModelError> {
        let number = self.constant(name, &[])?;
        let narrowed = [supported, bf16::narrow(supported).widen(), f16::narrow(supported).widen()];
        // A list has no elements.
        match number.as_slice::<f32>().and_then(|number| number.first()) {
            Some(found) if !narrowed.contains(found) => {
                Err(ModelError::tensor(&self.source, name, format!("is {found}; supported is {supported}")))
            }
            _ => Ok(()),
        }
    }

    /// The elements of a tensor as `T`, finite or not.
    fn read<T: Element>(&mut self, name: &str, stored: &Stored) -> Result<Vec<T>, ModelError> {
        if let Some((tensor, _)) = self.memory.get(name) {
            let mut data: Vec<T> = buffer(tensor.shape())?;
            typed!(tensor.dtype() => A, {
                let Some(from) = tensor.contiguous::<A>() else {
                    let why = "is not in row-major order, or no tensor of floats; give a contiguous one";
                    return Err(ModelError::tensor(&self.source, name, why));
                };
                from.iter().zip(&mut data).for_each(|(from, to)| *to = T::narrow(from.widen()));
            });
            return Ok(data);
        }
        match &stored.form {
            Form::Plain => {}
            Form::Scaled(shard, scales) => return self.expand(name, stored, *shard, scales),
            Form::Packed(format, heads) => return self.unpack(name, stored, *format, *heads),
            Form::Quantised(parts) => return self.dequantise(name, stored, parts),
            Form::Float8(parts) => return self.widen_float8(name, stored, parts),
        }
        let width = match stored.dtype {
            Dtype::BF16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
            other => {
                let why = format!("is {other}; weights must be BF16, F16 or F32");
                return Err(ModelError::tensor(self.shard(stored), name, why));
            }
        };
        let parts = || std::iter::once((stored.shard, &stored.bytes)).chain(stored.more.iter().map(|(s, b)| (*s, b)));
        let elements = |bytes: &Range<u64>| (bytes.end - bytes.start) as usize / width;
        let length = parts().map(|(_, bytes)| elements(bytes)).sum();
        let mut data: Vec<T> = buffer(&[length])?;
        let mut block = vec![0u8; BLOCK.min(length * width)];
        let mut rest = &mut data[..];
        for (shard, bytes) in parts() {
            let (path, file) = &mut self.shards[shard];
            let unreadable = |e: std::io::Error| ModelError::tensor(path, name, format!("cannot be read: {e}"));
            file.seek(SeekFrom::Start(bytes.start)).map_err(unreadable)?;
            let part = rest.split_off_mut(..elements(bytes)).expect("its elements are counted");
            for piece in part.chunks_mut(BLOCK / width) {
                let bytes = &mut block[..piece.len() * width];
                file.read_exact(bytes).map_err(unreadable)?;
                match stored.dtype {
                    Dtype::BF16 => convert(bytes, piece, |b| bf16::from_le_bytes(b).widen()),
                    Dtype::F16 => convert(bytes, piece, |b| f16::from_le_bytes(b).widen()),
                    _ => convert(bytes, piece, f32::from_le_bytes),
                }
                self.taken += bytes.len() as u64;
                (self.progress)(self.taken, self.total);
            }
        }
        Ok(data)
    }

    /// The elements of a tensor that is stored as MXFP4, one matrix after the other.
    fn expand<T: Element>(
        &mut self,
        name: &str,
        stored: &Stored,
        shard: usize,
        scales: &Range<u64>,
    ) -> Result<Vec<T>, ModelError> {
        let mut data: Vec<T> = buffer(&stored.shape)?;
        let (count, matrix) = (stored.shape[0], stored.shape[1..].iter().product::<usize>());
        let part = |bytes: &Range<u64>, number: usize| {
            let length = (bytes.end - bytes.start) / count as u64;
            let start = bytes.start + number as u64 * length;
            start..start + length
        };
        // Where a matrix has no elements there is nothing to cut into parts.
        for (number, data) in data.chunks_mut(matrix.max(1)).enumerate() {
            let blocks = self.bytes(name, stored.shard, &part(&stored.bytes, number))?;
            let scales = self.bytes(name, shard, &part(scales, number))?;
            mxfp4::expand(&blocks, &scales, stored.shape[2], data);
        }
        Ok(data)
    }
}

/// A tensor of this shape, but for its rows.
fn without_rows(dtype: DType, shape: &[usize]) -> Result<Tensor, ModelError> {
    let shape = [&[0], shape.get(1..).unwrap_or_default()].concat();
    typed!(dtype => A, Ok(Tensor::new(Vec::<A>::new(), &shape)?))
}

/// The files of a folder that torch.save may have written.
pub(crate) fn files_of_torch(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    files.filter(|path| path.extension().is_some_and(|e| e == "pth")).collect()
}

/// Whether a tensor is one that models of these families were once stored with and compute anew: tables of the rotary
/// positions, and masks.
fn is_buffer(name: &str, stored: &Stored) -> bool {
    let ends = |all: &[&str]| all.iter().any(|end| name.ends_with(end));
    // A mask is one of bits, or a square that all sequences and heads share.
    let is_mask = matches!(stored.dtype, Dtype::BOOL | Dtype::U8) || stored.shape.starts_with(&[1, 1]);
    let mask = is_mask && ends(&[".attn.bias", ".self_attn.bias", ".attention.bias"]);
    mask || ends(&[
        "rotary_emb.inv_freq",
        "rotary_emb.original_inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
        ".position_ids",
        ".masked_bias",
    ])
}

/// Most complaints of a folder that an error tells.
const TOLD: usize = 24;

/// The first of some complaints, and how many there are besides.
pub(crate) fn few(mut complaints: Vec<ModelError>) -> Vec<ModelError> {
    if complaints.len() > TOLD {
        let more = complaints.len() - TOLD;
        complaints.truncate(TOLD);
        complaints.push(ModelError::input("and", format!("{more} more; `samebits audit` lists all of them")));
    }
    complaints
}

/// Refuses elements of a tensor that are not finite.
fn check_finite<T: Element>(path: &Path, name: &str, stored: &Stored, data: &[T]) -> Result<(), ModelError> {
    let finite = |x: &T| x.widen().is_finite();
    // Without a way out in the middle, so that it is as fast as memory.
    if data.chunks(4096).all(|some| some.iter().fold(true, |all, x| all & finite(x))) {
        return Ok(());
    }
    let index = data.iter().position(|x| !finite(x)).expect("one is not finite");
    let count = data.iter().filter(|x| !finite(x)).count();
    let (at, value, total) = (coordinates(index, &stored.shape), data[index].widen(), data.len());
    let why = format!("element {at:?} is {value} ({count} of {total} are not finite); weights must be finite");
    // A finite weight that does not fit the dtype asked for.
    let why = if stored.dtype == dtype_of::<T>() { why } else { format!("read as {}: {why}", T::NAME) };
    Err(ModelError::tensor(path, name, why))
}

/// Little-endian words of N bytes as `T`.
fn convert<T: Element, const N: usize>(bytes: &[u8], out: &mut [T], widen: impl Fn([u8; N]) -> f32) {
    for (word, out) in bytes.as_chunks::<N>().0.iter().zip(out) {
        *out = T::narrow(widen(*word));
    }
}

/// The format's name of a storage type.
fn dtype_of<T: Element>() -> Dtype {
    match T::NAME {
        "bf16" => Dtype::BF16,
        "fp16" => Dtype::F16,
        _ => Dtype::F32,
    }
}

/// One path component that stays in the folder.
fn is_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(part)), None) if part == name)
}

/// A header that is longer than this is no header.
const MOST_HEADER: u64 = 1 << 30;

/// Reads and checks the header of shard number `shard`, a file of `size` bytes: its tensors in the order of their data.
///
/// The format's own reader is not asked: it does not say which tensor is wrong, and it adds offsets without looking for
/// overflow.
fn read_header(
    path: &Path,
    file: &mut impl Read,
    size: u64,
    shard: usize,
) -> Result<Vec<(String, Stored)>, ModelError> {
    let damaged = |why: String| ModelError::file(path, format!("is not a whole safetensors file: {why}"));
    let unreadable = |e: std::io::Error| ModelError::file(path, format!("cannot be read: {e}"));
    let Some(body) = size.checked_sub(8) else { return Err(damaged(format!("it has {size} bytes"))) };
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(unreadable)?;
    if &length == b"version " {
        return Err(ModelError::file(path, "is a pointer of git-lfs and no weights; fetch them with `git lfs pull`"));
    }
    if length.trim_ascii_start().starts_with(b"<") && length.is_ascii() {
        return Err(ModelError::file(path, "is a web page and no weights; download the file itself"));
    }
    let length = u64::from_le_bytes(length);
    if length > body {
        return Err(damaged(format!("its header claims {length} bytes, {body} follow")));
    }
    if length > MOST_HEADER {
        return Err(damaged(format!("its header claims {length} bytes; at most {MOST_HEADER} are read")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(unreadable)?;
    let (start, data) = (8 + length, body - length);
    let header = match parse(&header) {
        Ok(Value::Object(header)) => header,
        Ok(_) => return Err(damaged("its header is not a JSON object".into())),
        Err(e) => return Err(damaged(format!("its header is not a JSON object: {e}"))),
    };

    let mut tensors = Vec::new();
    for (name, value) in header {
        if name == "__metadata__" {
            continue;
        }
        let info: TensorInfo = serde_json::from_value(value)
            .map_err(|e| ModelError::tensor(path, &name, format!("has a malformed header entry: {e}")))?;
        let (begin, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        if begin > end || end > data {
            let why = format!("has data_offsets [{begin}, {end}], but the file holds {data} bytes of data");
            return Err(ModelError::tensor(path, &name, why));
        }
        let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |n, &d| n.checked_mul(d));
        if bits.map(|bits| bits as u64) != (end - begin).checked_mul(8) {
            let why =
                format!("has {} bytes of data, not what shape {:?} of {} needs", end - begin, info.shape, info.dtype);
            return Err(ModelError::tensor(path, &name, why));
        }
        tensors.push((
            name,
            Stored {
                shard,
                dtype: info.dtype,
                shape: info.shape,
                bytes: begin..end,
                more: Vec::new(),
                form: Form::Plain,
            },
        ));
    }
    // By name where offsets are equal, so that the same file always gives the same error.
    tensors.sort_by(|a, b| (a.1.bytes.start, a.1.bytes.end, &a.0).cmp(&(b.1.bytes.start, b.1.bytes.end, &b.0)));
    let mut next = 0;
    for (name, Stored { bytes, .. }) in &mut tensors {
        if bytes.start != next {
            let what = if bytes.start < next { "overlaps the data before it" } else { "leaves a gap before it" };
            let why = format!("{what}: data_offsets begin at {}, expected {next}", bytes.start);
            return Err(ModelError::tensor(path, name, why));
        }
        next = bytes.end;
        *bytes = start + bytes.start..start + bytes.end;
    }
    if next != data {
        return Err(damaged(format!("its tensors cover {next} of {data} bytes of data")));
    }
    Ok(tensors)
}

/// The index by axis of row-major element `index`.
fn coordinates(mut index: usize, shape: &[usize]) -> Vec<usize> {
    let mut at = vec![0; shape.len()];
    for (at, &extent) in at.iter_mut().zip(shape).rev() {
        *at = index % extent;
        index /= extent;
    }
    at
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    /// A safetensors file of one header and `data` zero bytes.
    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn refused(bytes: &[u8]) -> String {
        let line = read_header(Path::new("w"), &mut &*bytes, bytes.len() as u64, 0).unwrap_err().to_string();
        assert!(line.starts_with("w: ") && !line.contains('\n'), "{line}");
        line
    }

    const TWO: &str = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}"#;

    pub(crate) fn tensors_come_in_the_order_of_their_data() {
        let bytes = file(TWO, 12);
        let read = read_header(Path::new("w"), &mut &*bytes, bytes.len() as u64, 3).unwrap();
        let start = 8 + TWO.len() as u64;
        let a = Stored {
            shard: 3,
            dtype: Dtype::F32,
            shape: vec![1, 2],
            bytes: start..start + 8,
            more: Vec::new(),
            form: Form::Plain,
        };
        let b = Stored {
            shard: 3,
            dtype: Dtype::BF16,
            shape: vec![2],
            bytes: start + 8..start + 12,
            more: Vec::new(),
            form: Form::Plain,
        };
        assert_eq!(read, [("a".into(), a), ("b".into(), b)]);
    }

    pub(crate) fn every_truncation_and_every_addition_is_refused() {
        let whole = file(TWO, 12);
        for length in 0..whole.len() {
            refused(&whole[..length]);
        }
        assert!(refused(&file(TWO, 13)).contains("its tensors cover 12 of 13 bytes"));
        assert!(refused(&file(TWO, 11)).contains("tensor `b` has data_offsets [8, 12], but the file holds 11 bytes"));
        assert!(refused(&u64::MAX.to_le_bytes()).contains("its header claims 18446744073709551615 bytes, 0 follow"));
    }

    pub(crate) fn wrong_entries_are_refused_by_name() {
        let cases = [
            (r#"[]"#, "not a JSON object"),
            (
                r#"{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[2,6]}}"#,
                "tensor `b` overlaps the data before it",
            ),
            (
                r#"{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}"#,
                "tensor `b` overlaps the data before it",
            ),
            (r#"{"a":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}}"#, "tensor `a` leaves a gap before it"),
            (
                r#"{"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,4]}}"#,
                "tensor `a` has 4 bytes of data, not what shape [3] of BF16 needs",
            ),
            (r#"{"a":{"dtype":"BF16","shape":[2],"data_offsets":[4,0]}}"#, "tensor `a` has data_offsets [4, 0]"),
            (
                r#"{"a":{"dtype":"BF16","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#,
                "tensor `a` has 0 bytes",
            ),
            (
                r#"{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,18446744073709551615]}}"#,
                "tensor `a` has data_offsets",
            ),
            (r#"{"a":{"dtype":"Q4","shape":[2],"data_offsets":[0,4]}}"#, "tensor `a` has a malformed header entry"),
            (
                r#"{"a\nb":{"dtype":"BF16","shape":[-1],"data_offsets":[0,4]}}"#,
                "tensor `a\\nb` has a malformed header entry",
            ),
            (r#"{"a":4}"#, "tensor `a` has a malformed header entry"),
        ];
        for (header, expected) in cases {
            let line = refused(&file(header, 8));
            assert!(line.contains(expected), "{header}: {line}");
        }
    }

    pub(crate) fn shard_names_stay_in_the_folder() {
        for name in ["model-00001-of-00002.safetensors", "a..b"] {
            assert!(is_file_name(name), "{name}");
        }
        for name in ["", ".", "..", "/etc/x", "a/b", "../a", "a/", "./a", "a/.."] {
            assert!(!is_file_name(name), "{name}");
        }
    }

    pub(crate) fn coordinates_count_from_the_last_axis() {
        assert_eq!(coordinates(7, &[2, 5]), [1, 2]);
        assert_eq!(coordinates(3, &[4]), [3]);
    }
}
