//! A tensor whose element type is known at run time.

use half::{bf16, f16};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

pub use samebits_schema::DType;

/// Elements one behind the other, each by `bytes`.
fn bytes_of<T: Copy, const N: usize>(elements: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    let mut all = vec![0; N * elements.len()];
    all.as_chunks_mut().0.iter_mut().zip(elements).for_each(|(to, &element)| *to = bytes(element));
    all
}

/// Elements of one type in row-major order, and their shape.
#[derive(Clone, Debug)]
pub struct Array<T> {
    /// The elements stand at its end, so that the first may be aligned. Cases that differ in something else have one room.
    room: Arc<Vec<T>>,
    start: usize,
    shape: Vec<usize>,
}

impl<T: Copy> Array<T> {
    /// The last elements of `room`, as many as `shape` takes. Panics when there are fewer, or the extents overflow.
    fn last_of(room: Vec<T>, shape: &[usize]) -> Array<T> {
        let count = shape.iter().try_fold(1usize, |count, &extent| count.checked_mul(extent));
        let start = count.and_then(|count| room.len().checked_sub(count)).expect("shape matches the data");
        Array { room: Arc::new(room), start, shape: shape.to_vec() }
    }

    /// All of `room`. Panics when `shape` takes more or fewer.
    fn of(room: Vec<T>, shape: &[usize]) -> Array<T> {
        let array = Array::last_of(room, shape);
        assert_eq!(array.start, 0, "shape matches the data");
        array
    }

    /// The extent of every axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn select(&self, axis: usize, picks: impl Iterator<Item = usize> + Clone) -> Array<T> {
        let (inner, extent) = (self.shape[axis + 1..].iter().product::<usize>(), self.shape[axis]);
        let mut shape = self.shape.clone();
        shape[axis] = picks.clone().count();
        let mut room = Vec::with_capacity(shape.iter().product());
        for entries in self.chunks_exact((extent * inner).max(1)) {
            picks.clone().for_each(|pick| room.extend_from_slice(&entries[pick * inner..][..inner]));
        }
        Array::of(room, &shape)
    }

    fn gather(&self, width: usize, rows: &[Option<usize>], nothing: T, shape: &[usize]) -> Array<T> {
        let mut room = Vec::with_capacity(rows.len() * width);
        for row in rows {
            match row {
                Some(row) => room.extend_from_slice(&self[row * width..][..width]),
                None => room.resize(room.len() + width, nothing),
            }
        }
        Array::of(room, shape)
    }

    fn repeated(&self, shape: &[usize]) -> Array<T> {
        let count = shape.iter().product();
        assert!(count == 0 || !self.is_empty(), "nothing makes no elements");
        let mut room = Vec::with_capacity(count);
        room.extend_from_slice(&self[..count.min(self.len())]);
        // What is there is a whole number of times the elements.
        while room.len() < count {
            room.extend_from_within(..room.len().min(count - room.len()));
        }
        Array::of(room, shape)
    }

    fn append(&self, axis: usize, next: &Array<T>) -> Array<T> {
        let mut shape = self.shape.clone();
        shape[axis] = next.shape[axis];
        assert_eq!(shape, next.shape, "extents match");
        shape[axis] += self.shape[axis];
        let mut room = Vec::with_capacity(self.len() + next.len());
        let outer: usize = shape[..axis].iter().product();
        for i in 0..outer {
            for array in [self, next] {
                let width = array.len() / outer;
                room.extend_from_slice(&array[i * width..][..width]);
            }
        }
        Array::of(room, &shape)
    }
}

impl<T> Deref for Array<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.room[self.start..]
    }
}

impl<T: Clone> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut Arc::make_mut(&mut self.room)[self.start..]
    }
}

/// A dense tensor in row-major order.
#[derive(Clone, Debug)]
pub enum Tensor {
    /// bfloat16 elements.
    Bf16(Array<bf16>),
    /// binary16 elements.
    Fp16(Array<f16>),
    /// binary32 elements.
    Fp32(Array<f32>),
    /// 32-bit integers.
    I32(Array<i32>),
}

/// The elements of a [`Tensor`] in row-major order: looked up once and read many times.
#[derive(Clone, Copy)]
pub enum Elements<'a> {
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// binary16.
    Fp16(&'a [f16]),
    /// binary32.
    Fp32(&'a [f32]),
    /// 32-bit integers.
    I32(&'a [i32]),
}

impl Elements<'_> {
    /// The raw bits of the element at `index`, zero-extended.
    #[inline]
    pub fn bits(self, index: usize) -> u32 {
        match self {
            Elements::Bf16(a) => u32::from(a[index].to_bits()),
            Elements::Fp16(a) => u32::from(a[index].to_bits()),
            Elements::Fp32(a) => a[index].to_bits(),
            Elements::I32(a) => a[index] as u32,
        }
    }

    /// The value of the element at `index`; exact for every dtype.
    #[inline]
    pub fn value(self, index: usize) -> f64 {
        match self {
            Elements::Bf16(a) => f64::from(f32::from_bits(u32::from(a[index].to_bits()) << 16)),
            Elements::Fp16(a) => f64::from(a[index].to_f32()),
            Elements::Fp32(a) => f64::from(a[index]),
            Elements::I32(a) => f64::from(a[index]),
        }
    }
}

/// Applies one expression to whichever array a [`Tensor`] holds.
macro_rules! each {
    ($tensor:expr, $array:ident => $body:expr) => {
        match $tensor {
            Tensor::Bf16($array) => $body,
            Tensor::Fp16($array) => $body,
            Tensor::Fp32($array) => $body,
            Tensor::I32($array) => $body,
        }
    };
}

/// Like [`each!`], but puts the result back into the same kind of tensor.
macro_rules! map {
    ($tensor:expr, $array:ident => $body:expr) => {
        match $tensor {
            Tensor::Bf16($array) => Tensor::Bf16($body),
            Tensor::Fp16($array) => Tensor::Fp16($body),
            Tensor::Fp32($array) => Tensor::Fp32($body),
            Tensor::I32($array) => Tensor::I32($body),
        }
    };
}

impl Tensor {
    /// A tensor from row-major bf16 elements. Panics when `shape` does not match the length.
    pub fn bf16(shape: &[usize], data: Vec<bf16>) -> Tensor {
        Tensor::Bf16(Array::of(data, shape))
    }

    /// A tensor from row-major fp16 elements. Panics when `shape` does not match the length.
    pub fn fp16(shape: &[usize], data: Vec<f16>) -> Tensor {
        Tensor::Fp16(Array::of(data, shape))
    }

    /// A tensor from row-major f32 elements. Panics when `shape` does not match the length.
    pub fn fp32(shape: &[usize], data: Vec<f32>) -> Tensor {
        Tensor::Fp32(Array::of(data, shape))
    }

    /// A tensor from row-major i32 elements. Panics when `shape` does not match the length.
    pub fn i32(shape: &[usize], data: Vec<i32>) -> Tensor {
        Tensor::I32(Array::of(data, shape))
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Tensor::Bf16(_) => DType::Bf16,
            Tensor::Fp16(_) => DType::Fp16,
            Tensor::Fp32(_) => DType::Fp32,
            Tensor::I32(_) => DType::I32,
        }
    }

    /// The extent of every axis.
    pub fn shape(&self) -> &[usize] {
        each!(self, a => a.shape())
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        each!(self, a => a.len())
    }

    /// Whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The raw bits of the element at row-major position `index`, zero-extended.
    pub fn bits(&self, index: usize) -> u32 {
        self.elements().bits(index)
    }

    /// The value of the element at row-major position `index`; exact for every dtype.
    pub fn value(&self, index: usize) -> f64 {
        self.elements().value(index)
    }

    /// All elements, for a loop over them.
    pub fn elements(&self) -> Elements<'_> {
        match self {
            Tensor::Bf16(a) => Elements::Bf16(a),
            Tensor::Fp16(a) => Elements::Fp16(a),
            Tensor::Fp32(a) => Elements::Fp32(a),
            Tensor::I32(a) => Elements::I32(a),
        }
    }

    /// Every element as f64, exactly, in row-major order.
    pub fn to_f64(&self) -> Vec<f64> {
        let elements = self.elements();
        (0..self.len()).map(|i| elements.value(i)).collect()
    }

    /// The elements as a slice when the tensor holds i32.
    pub fn as_i32(&self) -> Option<&[i32]> {
        match self {
            Tensor::I32(a) => Some(a),
            _ => None,
        }
    }

    /// The rows `rows` of axis 0, in that order. Panics when one is out of range.
    pub fn rows(&self, rows: &[usize]) -> Tensor {
        self.select(0, rows)
    }

    /// The entries `picks` of axis `axis`, in that order. Panics when one is out of range.
    pub fn select(&self, axis: usize, picks: &[usize]) -> Tensor {
        map!(self, a => a.select(axis, picks.iter().copied()))
    }

    /// The elements over and over, as many as `shape` takes. Panics when there are none and `shape` takes some.
    pub fn repeated(&self, shape: &[usize]) -> Tensor {
        map!(self, a => a.repeated(shape))
    }

    /// `self` followed by `next` along `axis`. Panics when their dtypes or their other extents differ.
    pub fn append(&self, axis: usize, next: &Tensor) -> Tensor {
        match (self, next) {
            (Tensor::Bf16(a), Tensor::Bf16(b)) => Tensor::Bf16(a.append(axis, b)),
            (Tensor::Fp16(a), Tensor::Fp16(b)) => Tensor::Fp16(a.append(axis, b)),
            (Tensor::Fp32(a), Tensor::Fp32(b)) => Tensor::Fp32(a.append(axis, b)),
            (Tensor::I32(a), Tensor::I32(b)) => Tensor::I32(a.append(axis, b)),
            _ => panic!("cannot append {} to {}", next.dtype(), self.dtype()),
        }
    }

    /// Whether both tensors have the same dtype, shape and bits.
    pub fn same_bits(&self, other: &Tensor) -> bool {
        self.shape() == other.shape()
            && match (self, other) {
                (Tensor::Bf16(a), Tensor::Bf16(b)) => a.iter().zip(&**b).all(|(a, b)| a.to_bits() == b.to_bits()),
                (Tensor::Fp16(a), Tensor::Fp16(b)) => a.iter().zip(&**b).all(|(a, b)| a.to_bits() == b.to_bits()),
                (Tensor::Fp32(a), Tensor::Fp32(b)) => a.iter().zip(&**b).all(|(a, b)| a.to_bits() == b.to_bits()),
                (Tensor::I32(a), Tensor::I32(b)) => **a == **b,
                _ => false,
            }
    }

    /// The same elements as a view one element into a larger allocation, so that they are aligned to no vector.
    pub fn shifted(&self) -> Tensor {
        map!(self, a => {
            let mut room = Vec::with_capacity(a.len() + 1);
            room.extend(a.iter().next().copied());
            room.extend_from_slice(a);
            Array::last_of(room, a.shape())
        })
    }

    /// The entries `from..to` of axis `axis`.
    pub fn range(&self, axis: usize, from: usize, to: usize) -> Tensor {
        map!(self, a => a.select(axis, from..to))
    }

    /// The same elements with a leading axis of extent 1.
    pub fn with_leading_axis(&self) -> Tensor {
        let shape = [&[1], self.shape()].concat();
        Tensor::from_bytes(self.dtype(), &shape, &self.to_bytes()).expect("the same number of elements")
    }

    /// Rows of `self`, seen as `[len / width, width]`, in the order of `rows`, as a tensor of `shape`; NaN (for i32, 0) where
    /// there is no row. Panics when `shape` takes more or fewer elements.
    pub fn gather(&self, width: usize, rows: &[Option<usize>], shape: &[usize]) -> Tensor {
        match self {
            Tensor::Bf16(a) => Tensor::Bf16(a.gather(width, rows, bf16::NAN, shape)),
            Tensor::Fp16(a) => Tensor::Fp16(a.gather(width, rows, f16::NAN, shape)),
            Tensor::Fp32(a) => Tensor::Fp32(a.gather(width, rows, f32::NAN, shape)),
            Tensor::I32(a) => Tensor::I32(a.gather(width, rows, 0, shape)),
        }
    }

    /// The little-endian bytes of the elements in row-major order.
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Tensor::Bf16(a) => bytes_of(a, bf16::to_le_bytes),
            Tensor::Fp16(a) => bytes_of(a, f16::to_le_bytes),
            Tensor::Fp32(a) => bytes_of(a, f32::to_le_bytes),
            Tensor::I32(a) => bytes_of(a, i32::to_le_bytes),
        }
    }

    /// A tensor from little-endian bytes, its first element aligned to a cache line; `None` when the length does not
    /// match `shape`, or the extents of `shape` overflow, be it beside a 0.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> Option<Tensor> {
        let nonzero = shape.iter().filter(|&&d| d > 0).try_fold(1usize, |n, &d| n.checked_mul(d))?;
        isize::try_from(nonzero.checked_mul(dtype.size())?).ok()?;
        let count = if shape.contains(&0) { 0 } else { nonzero };
        if count.checked_mul(dtype.size())? != bytes.len() {
            return None;
        }
        let two = |c: &[u8]| u16::from_le_bytes([c[0], c[1]]);
        let four = |c: &[u8]| u32::from_le_bytes([c[0], c[1], c[2], c[3]]);
        Some(match dtype {
            DType::Bf16 => Tensor::Bf16(line_aligned(shape, bytes.chunks_exact(2).map(|c| bf16::from_bits(two(c))))),
            DType::Fp16 => Tensor::Fp16(line_aligned(shape, bytes.chunks_exact(2).map(|c| f16::from_bits(two(c))))),
            DType::Fp32 => Tensor::Fp32(line_aligned(shape, bytes.chunks_exact(4).map(|c| f32::from_bits(four(c))))),
            DType::I32 => Tensor::I32(line_aligned(shape, bytes.chunks_exact(4).map(|c| four(c) as i32))),
        })
    }
}

/// An array whose first element is aligned to a cache line, as libraries for tensors align theirs. Otherwise the times of
/// kernels would depend on where an allocator happens to put things.
fn line_aligned<T: Copy + Default>(shape: &[usize], elements: impl ExactSizeIterator<Item = T>) -> Array<T> {
    let line = LINE / size_of::<T>();
    let mut room = Vec::<T>::with_capacity(elements.len() + line);
    let before = room.as_ptr().align_offset(LINE).min(line);
    room.resize(before, T::default());
    room.extend(elements);
    Array::last_of(room, shape)
}

/// Bytes of a cache line.
const LINE: usize = 64;

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn what_bytes_bring_is_aligned_to_a_cache_line_and_keeps_its_bits() {
        for dtype in [DType::Bf16, DType::Fp16, DType::Fp32, DType::I32] {
            for count in [0, 1, 33, 5000, 100_000] {
                let bytes: Vec<u8> = (0..count * dtype.size()).map(|i| (i * 7 % 251) as u8).collect();
                let tensor = Tensor::from_bytes(dtype, &[count, 1], &bytes).unwrap();
                assert_eq!(tensor.to_bytes(), bytes, "{dtype} x {count}");
                let first = each!(&tensor, a => a.as_ptr().addr());
                assert!(count == 0 || first.is_multiple_of(LINE), "{dtype} x {count} at {first:#x}");
                let first = each!(&tensor.shifted(), a => a.as_ptr().addr());
                assert!(count == 0 || !first.is_multiple_of(LINE), "{dtype} x {count} shifted to {first:#x}");
                assert!(tensor.same_bits(&tensor.shifted()));
            }
        }
    }
}
