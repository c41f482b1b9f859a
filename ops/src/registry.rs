//! Every op that can be called by name, and the backends that call them.

use crate::backend::device::{Buffer, Build, COPIES, Device, Graph, Unit};
use crate::call::{Arguments, Backend, Entry, fits};
use crate::rope::rope::{RopeTable, Rotations};
use crate::tensor::{Prepared, Scalar, Tensor, TensorMut, TensorRef};
use crate::workspace::memory::ask_for_huge_pages;
use crate::{Cpu, Error, bf16, f16};
use samebits_schema::{Call, DType, Op};
use std::mem::MaybeUninit;
use std::sync::{PoisonError, RwLock};

/// The ops of each folder. No static: of a static, unit tests would compile every kernel. They do of a call by name as well,
/// which `tests/ops` makes instead.
const FOLDERS: [&[&Entry]; 15] = [
    crate::attention::OPS,
    crate::conv::OPS,
    crate::delta::OPS,
    crate::elementwise::OPS,
    crate::gemm::OPS,
    crate::index::OPS,
    crate::logprob::OPS,
    crate::moe::OPS,
    crate::norm::OPS,
    crate::rope::OPS,
    crate::sampling::OPS,
    crate::scan::OPS,
    crate::token::OPS,
    crate::train::OPS,
    crate::wkv::OPS,
];

/// The ops that other crates have registered. Every change is a single step, so a panic elsewhere leaves it whole.
static OTHERS: RwLock<Vec<&Entry>> = RwLock::new(Vec::new());

/// Every op of this crate.
pub(crate) fn entries() -> impl Iterator<Item = &'static Entry> {
    FOLDERS.iter().copied().flatten().copied()
}

/// Every op of other crates.
fn others() -> Vec<&'static Entry> {
    OTHERS.read().unwrap_or_else(PoisonError::into_inner).clone()
}

fn find(op: &str) -> Result<&'static Entry, Error> {
    let other = || OTHERS.read().unwrap_or_else(PoisonError::into_inner).iter().copied().find(|entry| entry.name == op);
    entries().find(|entry| entry.name == op).or_else(other).ok_or_else(|| {
        let known: Vec<_> = entries().chain(others()).map(|entry| entry.name).collect();
        Error::Unavailable(format!("op `{op}` is not offered; use one of {}", known.join(", ")))
    })
}

/// Makes an op of another crate known, for the life of the program: its form to [`samebits_schema::find`] and what runs it to
/// every [`Backend`], so that [`Backend::call`] and [`Calls`](crate::Calls) take its name as that of any other op. A call
/// is checked by its form before the op sees it.
///
/// # Errors
/// [`Error::Request`] where another op has the name, the form is not whole, or form, entry and kernels are not named alike.
///
/// ```
/// use samebits_ops::schema::{Input, Op, Output};
/// use samebits_ops::{Attributes, Backend, Cpu, DType, Entry, TensorMut, TensorRef, register};
///
/// static CUBE: Op = Op {
///     name: "cube",
///     about: "the third power of every element",
///     inputs: &[Input::activation("x", &["R", "N"]).fp32()],
///     outputs: &[Output::fixed("y", &["R", "N"], DType::Fp32)],
///     ..Op::PLAIN
/// };
/// static RUN: Entry = Entry::new("cube", |cpu, args| {
///     let x = args.input("x").dense::<f32>("cube", "x")?;
///     let y = args.output("y").host::<f32>("cube", "y")?;
///     let size = cpu.elements_per_chunk(y.len());
///     cpu.chunks(y, size, |chunk, y| {
///         y.iter_mut().zip(&x[chunk * size..]).for_each(|(y, x)| *y = x * x * x);
///     });
///     Ok(())
/// });
///
/// register(&CUBE, &RUN)?;
/// let (x, mut y) = ([1.0f32, 2.0, -3.0], [0.0f32; 3]);
/// let (inputs, y_of) = ([("x", TensorRef::new(&x, &[1, 3])?)], TensorMut::new(&mut y, &[1, 3])?);
/// Cpu::best().call("cube", Attributes::new(), &inputs, vec![("y", y_of)])?;
/// assert_eq!(y, [1.0, 8.0, -27.0]);
/// assert!(register(&CUBE, &RUN).is_err(), "the name is taken");
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn register(op: &'static Op, entry: &'static Entry) -> Result<(), Error> {
    let refused = |what: &str| Err(Error::Request(format!("op `{}`: {what}", op.name)));
    if op.name != entry.name {
        return refused(&format!("its entry is called `{}`; name both alike", entry.name));
    }
    let known = |unit: &'static Unit| units().any(|other| std::ptr::eq(unit, other));
    if entry.unit.is_some_and(|unit| unit.name != op.name && !known(unit)) {
        return refused("its unit bears another name; call it as the op, or take that of an op that is there");
    }
    // The form last of what can fail and first of what is seen: it refuses a name that is taken, for both.
    let mut others = OTHERS.write().unwrap_or_else(PoisonError::into_inner);
    samebits_schema::register(op)?;
    others.push(entry);
    Ok(())
}

/// Every unit: those of the ops, and copies of rows. Ops that share one have it once.
pub fn units() -> impl Iterator<Item = &'static Unit> {
    let own = |entry: &'static Entry| entry.unit.filter(|unit| unit.name == entry.name);
    entries().filter_map(own).chain([&COPIES]).chain(others().into_iter().filter_map(own))
}

impl Build {
    /// The unit's text.
    ///
    /// # Panics
    /// When there is no such unit.
    pub fn source(&self) -> &'static Unit {
        units().find(|unit| unit.name == self.unit).expect("builds name units")
    }
}

/// Runs an expression for the type of a dtype, integers included.
macro_rules! typed_scalar {
    ($dtype:expr => $type:ident, $run:expr) => {
        match $dtype {
            DType::Bf16 => {
                type $type = bf16;
                $run
            }
            DType::Fp16 => {
                type $type = f16;
                $run
            }
            DType::Fp32 => {
                type $type = f32;
                $run
            }
            DType::I32 => {
                type $type = i32;
                $run
            }
        }
    };
}

/// The name of copies in errors.
const TENSOR: &str = "tensor";

/// Room on the host for a tensor, and how many elements that is.
fn room<T: Scalar>(shape: &[usize]) -> Result<(Vec<T>, usize), Error> {
    let count = shape.iter().try_fold(1usize, |count, &extent| count.checked_mul(extent));
    let mut data: Vec<T> = Vec::new();
    match count.map(|count| data.try_reserve_exact(count).map(|()| count)) {
        Some(Ok(count)) => {
            ask_for_huge_pages(data.spare_capacity_mut());
            Ok((data, count))
        }
        _ => {
            let bytes = count.unwrap_or(usize::MAX).saturating_mul(size_of::<T>());
            Err(Error::Memory { op: TENSOR, bytes })
        }
    }
}

/// Fewer elements are not worth a second thread.
const FEWEST_PER_THREAD: usize = 1 << 18;

/// A tensor on the host: a copy of `from`, which has as many elements, or zeros; in parallel, because half of the time or more is
/// the system's, which hands out pages as they are touched.
fn filled<T: Scalar>(cpu: &Cpu, shape: &[usize], from: Option<&[T]>) -> Result<Tensor, Error> {
    let (mut data, count) = room::<T>(shape)?;
    assert!(from.is_none_or(|from| from.len() == count), "as many elements");
    let size = cpu.elements_per_chunk(count).max(FEWEST_PER_THREAD);
    cpu.chunks(&mut data.spare_capacity_mut()[..count], size, |chunk, part| match from {
        Some(from) => drop(part.write_copy_of_slice(&from[chunk * size..][..part.len()])),
        None => part.fill(MaybeUninit::new(T::default())),
    });
    // SAFETY: there is room for `count` elements, and every chunk of them has been written.
    unsafe { data.set_len(count) };
    Tensor::new(data, shape)
}

impl Cpu {
    /// A tensor of zeros on the host.
    ///
    /// # Errors
    /// [`Error::Memory`] when the system has no room for it; [`Error::Value`] for too many axes.
    pub fn zeros(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, Error> {
        typed_scalar!(dtype => T, filled::<T>(self, shape, None))
    }
}

impl Backend for Cpu {
    fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, Error> {
        self.zeros(dtype, shape)
    }

    fn upload(&self, host: TensorRef) -> Result<Tensor, Error> {
        typed_scalar!(host.dtype() => T, {
            filled(self, host.shape(), Some(host.dense::<T>(TENSOR, "host")?))
        })
    }

    fn download(&self, tensor: TensorRef) -> Result<Tensor, Error> {
        self.upload(tensor)
    }

    fn capture(&self, _work: &mut dyn FnMut() -> Result<(), Error>) -> Result<Option<Graph>, Error> {
        Ok(None)
    }

    fn replay(&self, _graph: &Graph) -> Result<(), Error> {
        Err(Error::Unavailable("the graph was captured on a device; replay it there".into()))
    }

    fn run(&self, call: &Call, inputs: &[(&str, TensorRef)], outputs: Vec<(&str, TensorMut)>) -> Result<(), Error> {
        fits(call, inputs, &outputs)?;
        (find(call.op.name)?.cpu)(self, &mut Arguments { call, inputs, outputs })
    }

    fn prepare(&self, call: &Call, inputs: &[(&str, TensorRef)]) -> Result<Option<Prepared>, Error> {
        match find(call.op.name)?.prepare {
            Some(prepare) => prepare(self, &Arguments { call, inputs, outputs: Vec::new() }),
            None => Ok(None),
        }
    }
}

impl Backend for Device {
    fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, Error> {
        let count = shape.iter().try_fold(1usize, |count, &extent| count.checked_mul(extent)).unwrap_or(usize::MAX);
        typed_scalar!(dtype => T, Tensor::on_device(Device::empty::<T>(self, TENSOR, count)?, shape))
    }

    fn upload(&self, host: TensorRef) -> Result<Tensor, Error> {
        typed_scalar!(host.dtype() => T, {
            let buffer = Device::upload::<T>(self, TENSOR, host.dense(TENSOR, "host")?)?;
            Tensor::on_device(buffer, host.shape())
        })
    }

    fn download(&self, tensor: TensorRef) -> Result<Tensor, Error> {
        typed_scalar!(tensor.dtype() => T, {
            let buffer: &Buffer<T> = tensor.device(TENSOR, "tensor")?;
            let (mut data, count) = room::<T>(tensor.shape())?;
            data.resize(count, T::default());
            let mut host = Tensor::new(data, tensor.shape())?;
            buffer.download(self, host.as_slice_mut().expect("it is on the host"))?;
            Ok(host)
        })
    }

    fn capture(&self, work: &mut dyn FnMut() -> Result<(), Error>) -> Result<Option<Graph>, Error> {
        Device::capture(self, work).map(Some)
    }

    fn replay(&self, graph: &Graph) -> Result<(), Error> {
        Device::replay(self, graph)
    }

    fn run(&self, call: &Call, inputs: &[(&str, TensorRef)], outputs: Vec<(&str, TensorMut)>) -> Result<(), Error> {
        fits(call, inputs, &outputs)?;
        let Some(run) = find(call.op.name)?.device else {
            return Err(Error::Unavailable(format!("op `{}` has no kernels for a device", call.op.name)));
        };
        run(self, &mut Arguments { call, inputs, outputs })
    }

    /// Matrices stay as they are: kernels read them row by row.
    fn prepare(&self, call: &Call, inputs: &[(&str, TensorRef)]) -> Result<Option<Prepared>, Error> {
        if call.op.input("pos").is_none() || !call.op.attributes().any(|attribute| attribute.name == "theta") {
            return Ok(None);
        }
        Ok(match Cpu::best().prepare(call, inputs)? {
            Some(angles) => match angles.get::<RopeTable>() {
                Some(table) => Some(Prepared::new(angles.input(), Rotations::new(self, table)?)),
                None => None,
            },
            None => None,
        })
    }
}
