//! Where a forward runs: the processor or a device. Ops are called by name on either ([`Backend`]); here is what they
//! do differently beside ops: how the numbers that a step is told get to its kernels, how the cache grows, what a
//! mixture of experts does with few tokens.

mod device;
mod host;

use crate::ModelError;
use crate::config::Config;
use samebits_ops::device::{Indices, Part};
use samebits_ops::{Attention, Backend, DType, Error, Prepared, RopeTable, Route, Tensor, TensorRef};

/// Runs an expression for the type of a dtype of floats.
macro_rules! typed {
    ($dtype:expr => $type:ident, $run:expr) => {
        match $dtype {
            samebits_ops::DType::Bf16 => {
                type $type = samebits_ops::bf16;
                $run
            }
            samebits_ops::DType::Fp16 => {
                type $type = samebits_ops::f16;
                $run
            }
            _ => {
                type $type = f32;
                $run
            }
        }
    };
}
pub(crate) use typed;

/// Tokens or rows where kernels read them.
pub(crate) enum Index {
    Host(Vec<i32>),
    Device(Indices),
}

impl Index {
    pub fn view(&self, shape: &[usize]) -> Result<TensorRef<'_>, Error> {
        match self {
            Index::Host(values) => TensorRef::new(values, shape),
            Index::Device(indices) => TensorRef::indices(indices, shape),
        }
    }
}

/// Where the queries and keys of a step stand.
pub(crate) struct AttentionMetadata {
    /// The rows at which the queries of each sequence start, and the end: cu_seqlens.
    pub q_start: Vec<i32>,
    /// The position of each query.
    pub q_pos: Vec<i32>,
    /// Keys of each sequence.
    pub kv_len: Vec<i32>,
    /// Pages of each sequence, as many columns for all.
    pub block_table: Vec<i32>,
    pub page_size: usize,
    /// The same on a device.
    pub on_device: Option<samebits_ops::device::AttentionMetadata>,
}

/// A place where forwards run.
pub(crate) trait Machine: Backend {
    /// `values` for kernels to read, each below `limit`, and none twice where they are `distinct`. They go over
    /// `earlier` ones, of which there are as many.
    ///
    /// # Errors
    /// A value that is not below `limit` or comes twice; those of a device.
    fn index(&self, what: IndexOf, values: Vec<i32>, earlier: Option<Index>) -> Result<Index, Error>;

    /// The values of an index.
    ///
    /// # Errors
    /// Those of a device.
    fn read_index(&self, index: &Index) -> Result<Vec<i32>, Error>;

    /// Cosines and sines for kernels to read, over `earlier` ones of the same size.
    ///
    /// # Errors
    /// Those of a device.
    fn angles(&self, table: RopeTable, earlier: Option<Prepared>) -> Result<Prepared, Error>;

    /// Takes the metadata to where attention reads it, over what stands there already. `columns` is how wide the block
    /// table of all steps of this form is at most.
    ///
    /// # Errors
    /// Places outside of the cache; those of a device.
    fn place(&self, metadata: &mut AttentionMetadata, shape: &Attention, columns: usize) -> Result<(), Error>;

    /// `q[n,Hq,D]`, the keys and values of the cache and `sinks[Hq]?` to `out[n,Hq,E]` and `lse[n,Hq]`. `q_pos` is that of the
    /// metadata, or what a probe made of it.
    ///
    /// # Errors
    /// As [`samebits_ops::attention`]; positions that a device does not hold.
    fn attention(
        &self,
        shape: &Attention,
        metadata: &AttentionMetadata,
        q_pos: &[i32],
        qkv: [&Tensor; 3],
        sinks: Option<&Tensor>,
        out: [&mut Tensor; 2],
    ) -> Result<(), ModelError>;

    /// `logits[n,E], bias[E]?, experts[n,K]? -> index[n,K], weight[n,K]`
    ///
    /// # Errors
    /// As [`samebits_ops::route`].
    fn route(
        &self,
        shape: &Route,
        logits: &Tensor,
        bias: Option<&Tensor>,
        experts: Option<&[i32]>,
        weight: &mut Tensor,
    ) -> Result<Index, ModelError>;

    /// The choices of experts of `tokens` tokens one after the other, where each choice is a product of its own
    /// ([`Machine::chosen_product`]) and the host need not know it; `None` where products are cut by expert.
    ///
    /// # Errors
    /// Those of a device.
    fn choices(&self, _config: &Config, _dtype: DType, _tokens: usize) -> Result<Option<Index>, Error> {
        Ok(None)
    }

    /// A row of x for every choice, each `every` times, by the matrix that was chosen: `x[P / every,K], w[E * N,K] ->
    /// y[P,N]`.
    ///
    /// # Errors
    /// Where products are cut by expert; those of a device.
    fn chosen_product(
        &self,
        _x: (&Tensor, usize),
        _choice: &Index,
        _w: (&Tensor, Option<&Tensor>),
        _y: &mut Tensor,
    ) -> Result<(), Error> {
        Err(Error::Unavailable("products of single choices are for devices".into()))
    }

    /// Copies `count` rows of `width` elements, bit for bit: gathers rows of `from`, scatters them to rows of `to`.
    ///
    /// # Errors
    /// Rows that are not there; those of a device.
    fn copy_rows(
        &self,
        size: [usize; 2],
        from: (&Tensor, Part<Index>),
        to: (&mut Tensor, Part<Index>),
    ) -> Result<(), Error>;

    /// Makes `tensor[rows,width]` longer and keeps what it holds.
    ///
    /// # Errors
    /// Too little memory.
    fn grow(&self, tensor: &mut Tensor, rows: usize) -> Result<(), ModelError>;

    /// Copies `count` rows of a tensor to other rows of it.
    ///
    /// # Errors
    /// Those of a device.
    fn copy_within(&self, tensor: &mut Tensor, from: usize, to: usize, count: usize) -> Result<(), Error>;
}

/// What an index is of.
#[derive(Clone, Copy)]
pub(crate) struct IndexOf {
    /// The word for errors.
    pub op: &'static str,
    /// What all values are below.
    pub limit: usize,
    /// Whether none comes twice: rows that are written.
    pub distinct: bool,
}

/// A tensor of any elements, to be written over.
///
/// # Errors
/// Too little memory.
pub(crate) fn empty(machine: &dyn Machine, dtype: DType, shape: &[usize]) -> Result<Tensor, ModelError> {
    machine.empty(dtype, shape).map_err(|error| no_room(error, dtype, shape))
}

/// What is said where such a tensor could not be made.
pub(crate) fn no_room(error: Error, dtype: DType, shape: &[usize]) -> ModelError {
    match error {
        Error::Memory { .. } => {
            let why = format!("a {dtype} tensor of shape {shape:?} does not fit; pass fewer tokens");
            ModelError::input("memory", why)
        }
        error => error.into(),
    }
}

/// Two parts of `rows` heads, one behind the other in each head; each part comes with its width and how many heads
/// share one of its rows.
pub(crate) fn concat(
    machine: &dyn Machine,
    rows: usize,
    a: (&Tensor, usize, usize),
    b: (&Tensor, usize, usize),
) -> Result<Tensor, ModelError> {
    let stride = a.1 + b.1;
    let mut joined = empty(machine, a.0.dtype(), &[rows, stride])?;
    for ((part, width, every), offset) in [(a, 0), (b, a.1)] {
        let to = Part { stride, offset, ..Part::whole(width) };
        machine.copy_rows([rows, width], (part, Part { every, ..Part::whole(width) }), (&mut joined, to))?;
    }
    Ok(joined)
}

/// The other way round: the two parts of every head of `x[rows,heads * (a + b)]`, as `[rows,heads * a]` and
/// `[rows,heads * b]`.
pub(crate) fn split(
    machine: &dyn Machine,
    [rows, heads]: [usize; 2],
    x: &Tensor,
    widths: [usize; 2],
) -> Result<[Tensor; 2], ModelError> {
    let part = |width: usize, offset: usize| -> Result<Tensor, ModelError> {
        let mut part = empty(machine, x.dtype(), &[rows, heads * width])?;
        let from = Part { stride: widths[0] + widths[1], offset, ..Part::whole(width) };
        machine.copy_rows([rows * heads, width], (x, from), (&mut part, Part::whole(width)))?;
        Ok(part)
    };
    Ok([part(widths[0], 0)?, part(widths[1], widths[0])?])
}
