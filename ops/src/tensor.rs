//! Borrowed tensors of any dtype: what an op reads ([`TensorRef`]) and writes ([`TensorMut`]), with the strides of a
//! view.
//!
//! The last axis is contiguous; the other axes lie where their strides say, so a view of heads, a slice of fused
//! projections or a row of a larger matrix goes into an op without a copy. An op that cannot take a stride says which
//! axis it is.

use crate::backend::device::{Buffer, Indices, Plain};
use crate::{Error, bf16, f16, value_error};
use samebits_schema::DType;
use std::any::Any;
use std::fmt;
use std::io::{self, Write};
use std::ops::Range;

/// The most axes a tensor has.
pub const MAX_RANK: usize = 6;

/// Shape and strides, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [usize; MAX_RANK],
}

impl Layout {
    /// Row-major, without gaps.
    ///
    /// # Errors
    /// [`Error::Value`] for more than [`MAX_RANK`] axes.
    pub fn contiguous(shape: &[usize]) -> Result<Layout, Error> {
        let mut strides = [0; MAX_RANK];
        let mut stride = 1usize;
        for (to, &extent) in strides.iter_mut().take(shape.len()).zip(shape).rev() {
            *to = stride;
            stride = stride.saturating_mul(extent);
        }
        Layout::strided(shape, &strides[..shape.len().min(MAX_RANK)])
    }

    /// Any strides but that of the last axis, which is 1 where the axis has more than one element.
    ///
    /// # Errors
    /// [`Error::Value`] for more than [`MAX_RANK`] axes, another number of strides, and another last stride.
    pub fn strided(shape: &[usize], strides: &[usize]) -> Result<Layout, Error> {
        let bad = |what: String| Err(value_error("tensor", what));
        if shape.len() > MAX_RANK {
            return bad(format!("a shape of {} axes; at most {MAX_RANK}", shape.len()));
        }
        if strides.len() != shape.len() {
            return bad(format!("{} strides for {} axes", strides.len(), shape.len()));
        }
        let mut layout = Layout { rank: shape.len(), shape: [1; MAX_RANK], strides: [0; MAX_RANK] };
        layout.shape[..shape.len()].copy_from_slice(shape);
        // Where there are no elements strides lead nowhere, and what they say may be anything.
        if shape.contains(&0) {
            return Ok(layout);
        }
        if let (Some(&extent), Some(&stride)) = (shape.last(), strides.last())
            && extent > 1
            && stride != 1
        {
            return bad(format!("the last axis has stride {stride}; it must be contiguous"));
        }
        layout.strides[..shape.len()].copy_from_slice(strides);
        Ok(layout)
    }

    /// Extent of every axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// From one entry of an axis to the next, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    /// The number of elements; `None` where it overflows.
    fn count(&self) -> Option<usize> {
        if self.shape().contains(&0) {
            return Some(0);
        }
        self.shape().iter().try_fold(1usize, |count, &extent| count.checked_mul(extent))
    }

    /// Elements from the first to the last, both included: what a slice must hold.
    fn reach(&self) -> Option<usize> {
        self.count().filter(|&count| count > 0).map_or(self.count(), |_| {
            let mut axes = self.shape().iter().zip(self.strides());
            axes.try_fold(0usize, |last, (&extent, &stride)| last.checked_add((extent - 1).checked_mul(stride)?))?
                .checked_add(1)
        })
    }

    /// Whether the elements lie in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.gap().is_none()
    }

    /// The last axis whose stride is not that of row-major order.
    fn gap(&self) -> Option<usize> {
        if self.shape().contains(&0) {
            return None;
        }
        let mut stride = 1;
        for axis in (0..self.rank).rev() {
            if self.shape[axis] > 1 && self.strides[axis] != stride {
                return Some(axis);
            }
            stride = stride.saturating_mul(self.shape[axis]);
        }
        None
    }

    /// The axes before the last `keep` ones in as few as can be: extent and stride of each. Axes that follow one
    /// another without a gap are one.
    pub(crate) fn leading(&self, keep: usize) -> Leading {
        let mut leading = Leading { count: 1, axes: [(1, 0); MAX_RANK], len: 0 };
        for axis in 0..self.rank.saturating_sub(keep) {
            let (extent, stride) = (self.shape[axis], self.strides[axis]);
            leading.count = leading.count.saturating_mul(extent);
            if extent == 1 {
                continue;
            }
            match leading.axes[..leading.len].last_mut() {
                Some((outer, outer_stride)) if extent.checked_mul(stride) == Some(*outer_stride) => {
                    *outer = outer.saturating_mul(extent);
                    *outer_stride = stride;
                }
                _ => {
                    leading.axes[leading.len] = (extent, stride);
                    leading.len += 1;
                }
            }
        }
        leading
    }
}

/// Several axes as one: where each entry begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leading {
    count: usize,
    axes: [(usize, usize); MAX_RANK],
    len: usize,
}

impl Leading {
    /// How many entries there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The stride between entries where it is one number.
    pub fn stride(&self) -> Option<usize> {
        match self.len {
            0 => Some(0),
            1 => Some(self.axes[0].1),
            _ => None,
        }
    }

    /// The stride of the last of the axes.
    pub fn inner_stride(&self) -> usize {
        self.axes[..self.len].last().map_or(0, |&(_, stride)| stride)
    }

    /// The first element of an entry.
    #[inline(always)]
    pub fn offset(&self, entry: usize) -> usize {
        match self.len {
            0 => 0,
            1 => entry * self.axes[0].1,
            _ => self.far_offset(entry),
        }
    }

    #[inline(never)]
    fn far_offset(&self, mut entry: usize) -> usize {
        let mut offset = 0;
        for &(extent, stride) in self.axes[..self.len].iter().rev() {
            offset += entry % extent * stride;
            entry /= extent;
        }
        offset
    }
}

/// The rows of a tensor: its last axis, once for every entry of the others.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, T> {
    data: &'a [T],
    n: usize,
    leading: Leading,
}

impl<'a, T> Rows<'a, T> {
    /// Row `r`.
    #[inline(always)]
    pub fn row(&self, r: usize) -> &'a [T] {
        &self.data[self.leading.offset(r)..][..self.n]
    }

    /// Elements of a row.
    pub fn n(&self) -> usize {
        self.n
    }

    /// How many rows there are.
    pub fn count(&self) -> usize {
        self.leading.count()
    }

    /// Where row `r` begins; any address where there is no such row.
    #[inline(always)]
    pub(crate) fn address(&self, r: usize) -> *const T {
        self.data.as_ptr().wrapping_add(self.leading.offset(r))
    }

    /// Rows `from..from + count` as one slice where nothing lies between them.
    #[inline(always)]
    pub(crate) fn together(&self, from: usize, count: usize) -> Option<&'a [T]> {
        let dense = self.leading.stride().is_some_and(|stride| stride == self.n) || count <= 1;
        dense.then(|| if count == 0 { &[][..] } else { &self.data[self.leading.offset(from)..][..count * self.n] })
    }
}

/// Heads of rows: the last axis, for every head of every entry of the axes before.
#[derive(Clone, Copy)]
pub(crate) struct Heads<'a, T> {
    data: &'a [T],
    n: usize,
    /// From one head to the next.
    head: usize,
    rows: Leading,
}

impl<'a, T> Heads<'a, T> {
    /// All elements, from the first on.
    pub fn data(&self) -> &'a [T] {
        self.data
    }

    /// Where a head of a row begins.
    #[inline(always)]
    pub fn at(&self, row: usize, head: usize) -> usize {
        self.rows.offset(row) + head * self.head
    }

    /// A head of a row.
    #[inline(always)]
    pub fn get(&self, row: usize, head: usize) -> &'a [T] {
        &self.data[self.at(row, head)..][..self.n]
    }

    /// From one row to the next within the last axis of rows that has more than one.
    pub fn row_stride(&self) -> usize {
        self.rows.inner_stride()
    }

    /// Whether the heads of a row lie one behind the other.
    pub fn heads_adjacent(&self) -> bool {
        self.head == self.n
    }

    /// Whether rows of `heads` heads lie one behind the other.
    pub fn is_dense(&self, heads: usize) -> bool {
        self.heads_adjacent() && self.rows.stride() == Some(heads * self.n)
    }
}

/// The elements of a tensor on the host.
#[derive(Clone, Copy, Debug)]
pub enum Slice<'a> {
    /// bf16.
    Bf16(&'a [bf16]),
    /// fp16.
    Fp16(&'a [f16]),
    /// fp32.
    Fp32(&'a [f32]),
    /// 32-bit integers.
    I32(&'a [i32]),
}

/// The elements of a tensor on the host, to be written.
#[derive(Debug)]
pub enum SliceMut<'a> {
    /// bf16.
    Bf16(&'a mut [bf16]),
    /// fp16.
    Fp16(&'a mut [f16]),
    /// fp32.
    Fp32(&'a mut [f32]),
    /// 32-bit integers.
    I32(&'a mut [i32]),
}

/// A tensor on a device: a buffer of any type.
#[derive(Clone, Copy)]
pub enum DeviceSlice<'a> {
    /// bf16.
    Bf16(&'a Buffer<bf16>),
    /// fp16.
    Fp16(&'a Buffer<f16>),
    /// fp32.
    Fp32(&'a Buffer<f32>),
    /// 32-bit integers.
    I32(&'a Buffer<i32>),
}

/// A tensor on a device, to be written.
pub enum DeviceSliceMut<'a> {
    /// bf16.
    Bf16(&'a mut Buffer<bf16>),
    /// fp16.
    Fp16(&'a mut Buffer<f16>),
    /// fp32.
    Fp32(&'a mut Buffer<f32>),
    /// 32-bit integers.
    I32(&'a mut Buffer<i32>),
}

/// What may stand in a tensor: bf16, fp16, fp32 and i32. Sealed.
pub trait Scalar: Plain + Send + Sync {
    /// Its dtype.
    const DTYPE: DType;
    #[doc(hidden)]
    fn slice(x: &[Self]) -> Slice<'_>;
    #[doc(hidden)]
    fn slice_mut(x: &mut [Self]) -> SliceMut<'_>;
    #[doc(hidden)]
    fn of(slice: Slice<'_>) -> Option<&[Self]>;
    #[doc(hidden)]
    fn of_mut(slice: SliceMut<'_>) -> Option<&mut [Self]>;
    #[doc(hidden)]
    fn buffer(x: &Buffer<Self>) -> DeviceSlice<'_>;
    #[doc(hidden)]
    fn buffer_mut(x: &mut Buffer<Self>) -> DeviceSliceMut<'_>;
    #[doc(hidden)]
    fn of_buffer(slice: DeviceSlice<'_>) -> Option<&Buffer<Self>>;
    #[doc(hidden)]
    fn of_buffer_mut(slice: DeviceSliceMut<'_>) -> Option<&mut Buffer<Self>>;
    #[doc(hidden)]
    fn owned(x: Vec<Self>) -> Owned;
    #[doc(hidden)]
    fn owned_buffer(x: Buffer<Self>) -> Owned;
    #[doc(hidden)]
    fn of_owned(owned: Owned) -> Option<Vec<Self>>;
}

/// The elements of a [`Tensor`].
#[doc(hidden)]
pub enum Owned {
    Bf16(Vec<bf16>),
    Fp16(Vec<f16>),
    Fp32(Vec<f32>),
    I32(Vec<i32>),
    DeviceBf16(Buffer<bf16>),
    DeviceFp16(Buffer<f16>),
    DeviceFp32(Buffer<f32>),
    DeviceI32(Buffer<i32>),
}

macro_rules! scalar {
    ($($type:ty: $variant:ident $on_device:ident),*) => {
        $(
            impl Scalar for $type {
                const DTYPE: DType = DType::$variant;
                #[inline(always)]
                fn slice(x: &[Self]) -> Slice<'_> {
                    Slice::$variant(x)
                }
                #[inline(always)]
                fn slice_mut(x: &mut [Self]) -> SliceMut<'_> {
                    SliceMut::$variant(x)
                }
                #[inline(always)]
                fn of(slice: Slice<'_>) -> Option<&[Self]> {
                    if let Slice::$variant(x) = slice { Some(x) } else { None }
                }
                #[inline(always)]
                fn of_mut(slice: SliceMut<'_>) -> Option<&mut [Self]> {
                    if let SliceMut::$variant(x) = slice { Some(x) } else { None }
                }
                fn buffer(x: &Buffer<Self>) -> DeviceSlice<'_> {
                    DeviceSlice::$variant(x)
                }
                fn buffer_mut(x: &mut Buffer<Self>) -> DeviceSliceMut<'_> {
                    DeviceSliceMut::$variant(x)
                }
                fn of_buffer(slice: DeviceSlice<'_>) -> Option<&Buffer<Self>> {
                    if let DeviceSlice::$variant(x) = slice { Some(x) } else { None }
                }
                fn of_buffer_mut(slice: DeviceSliceMut<'_>) -> Option<&mut Buffer<Self>> {
                    if let DeviceSliceMut::$variant(x) = slice { Some(x) } else { None }
                }
                fn owned(x: Vec<Self>) -> Owned {
                    Owned::$variant(x)
                }
                fn owned_buffer(x: Buffer<Self>) -> Owned {
                    Owned::$on_device(x)
                }
                fn of_owned(owned: Owned) -> Option<Vec<Self>> {
                    if let Owned::$variant(x) = owned { Some(x) } else { None }
                }
            }
        )*
        impl Owned {
            /// `count` elements from element `at` on, which are there.
            fn data(&self, at: usize, count: usize) -> Data<'_> {
                match self {
                    $(
                        Owned::$variant(x) => Data::Host(Slice::$variant(&x[at..at + count])),
                        Owned::$on_device(x) => Data::Device(DeviceSlice::$variant(x), at),
                    )*
                }
            }

            fn data_mut(&mut self, at: usize, count: usize) -> DataMut<'_> {
                match self {
                    $(
                        Owned::$variant(x) => DataMut::Host(SliceMut::$variant(&mut x[at..at + count])),
                        Owned::$on_device(x) => DataMut::Device(DeviceSliceMut::$variant(x), at),
                    )*
                }
            }

            /// Elements that there is room for.
            fn len(&self) -> usize {
                match self {
                    $(
                        Owned::$variant(x) => x.len(),
                        Owned::$on_device(x) => x.len(),
                    )*
                }
            }
        }
        impl Slice<'_> {
            /// Element type.
            pub fn dtype(&self) -> DType {
                match self {
                    $(Slice::$variant(_) => DType::$variant),*
                }
            }

            /// Elements.
            pub fn len(&self) -> usize {
                match self {
                    $(Slice::$variant(x) => x.len()),*
                }
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }
        }
        impl SliceMut<'_> {
            /// The same, to be read.
            pub fn as_ref(&self) -> Slice<'_> {
                match self {
                    $(SliceMut::$variant(x) => Slice::$variant(x)),*
                }
            }
        }
        impl DeviceSlice<'_> {
            fn dtype(&self) -> DType {
                match self {
                    $(DeviceSlice::$variant(_) => DType::$variant),*
                }
            }
        }
        impl DeviceSliceMut<'_> {
            fn as_ref(&self) -> DeviceSlice<'_> {
                match self {
                    $(DeviceSliceMut::$variant(x) => DeviceSlice::$variant(x)),*
                }
            }
        }
    };
}
scalar!(bf16: Bf16 DeviceBf16, f16: Fp16 DeviceFp16, f32: Fp32 DeviceFp32, i32: I32 DeviceI32);

/// What an op makes of an input for itself and its kin, to be given in the place of that input: a packed weight, a table of
/// angles. [`TensorRef::prepared`] gives it; only the ops that know the type read it.
pub trait Operand: Any + fmt::Debug + Send + Sync {
    /// The op that reads it.
    fn op(&self) -> &'static str;
    /// Element type of what it stands for.
    fn dtype(&self) -> DType;
    /// Extents of what it stands for.
    fn shape(&self) -> Vec<usize>;
    /// What it is, and what an op that cannot read it is to be given: "a packed weight; give the matrix".
    fn what(&self) -> &'static str;
    /// What was done to make it: "weights packed".
    fn done(&self) -> &'static str;
}

/// An input in the form that its op reads fastest, for a caller who gives it again and again.
#[derive(Debug)]
pub struct Prepared {
    input: &'static str,
    operand: Box<dyn Operand>,
}

impl Prepared {
    /// `operand` for the place of the input of this name.
    pub fn new(input: &'static str, operand: impl Operand) -> Prepared {
        Prepared { input, operand: Box::new(operand) }
    }

    /// The input whose place it takes.
    pub fn input(&self) -> &'static str {
        self.input
    }

    /// What takes its place.
    pub fn tensor(&self) -> TensorRef<'_> {
        TensorRef::prepared(&*self.operand)
    }

    /// What was done, in words.
    pub fn what(&self) -> &'static str {
        self.operand.done()
    }

    /// What was made, where it is of this type.
    pub fn get<T: Operand>(&self) -> Option<&T> {
        (&*self.operand as &dyn Any).downcast_ref()
    }

    /// The same, for itself.
    pub fn into<T: Operand>(self) -> Option<T> {
        (self.operand as Box<dyn Any>).downcast().ok().map(|operand| *operand)
    }
}

/// Where the elements of a tensor are, and in which form.
#[derive(Clone, Copy)]
enum Data<'a> {
    Host(Slice<'a>),
    /// Elements of a buffer, from one on.
    Device(DeviceSlice<'a>, usize),
    /// What an op has made of it beforehand.
    Prepared(&'a dyn Operand),
    /// Whole numbers on a device, which the host has checked.
    Indices(&'a Indices),
}

/// A tensor that an op reads.
#[derive(Clone, Copy)]
pub struct TensorRef<'a> {
    data: Data<'a>,
    layout: Layout,
}

impl<'a> TensorRef<'a> {
    /// `data` in row-major order.
    ///
    /// # Errors
    /// [`Error::Length`] when `data` is not as long as `shape` says; [`Error::Value`] for more than [`MAX_RANK`] axes.
    ///
    /// ```
    /// use samebits_ops::TensorRef;
    ///
    /// let x = TensorRef::new(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// assert_eq!((x.shape(), x.strides()), (&[2, 2][..], &[2, 1][..]));
    /// # Ok::<(), samebits_ops::Error>(())
    /// ```
    pub fn new<T: Scalar>(data: &'a [T], shape: &[usize]) -> Result<TensorRef<'a>, Error> {
        let layout = Layout::contiguous(shape)?;
        crate::check_len("tensor", "data", "of its shape", data.len(), shape)?;
        Ok(TensorRef { data: Data::Host(T::slice(data)), layout })
    }

    /// A view: the element at `index` is `data[index . strides]`. The last axis is contiguous.
    ///
    /// # Errors
    /// [`Error::Value`] when the last axis is not contiguous, or the view leaves `data`.
    ///
    /// ```
    /// use samebits_ops::TensorRef;
    ///
    /// // Head 1 of two, of a fused `[tokens, heads, 2]`, as `[tokens, 2]`.
    /// let fused = [0.0f32, 1.0, 10.0, 11.0, 2.0, 3.0, 12.0, 13.0];
    /// let head = TensorRef::strided(&fused[2..], &[2, 2], &[4, 1])?;
    /// assert_eq!(head.shape(), [2, 2]);
    /// # Ok::<(), samebits_ops::Error>(())
    /// ```
    pub fn strided<T: Scalar>(data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<TensorRef<'a>, Error> {
        let layout = Layout::strided(shape, strides)?;
        let reach = layout.reach().unwrap_or(usize::MAX);
        if reach > data.len() {
            let what = format!("shape {shape:?} with strides {strides:?} needs {reach} elements of {}", data.len());
            return Err(value_error("tensor", what));
        }
        Ok(TensorRef { data: Data::Host(T::slice(data)), layout })
    }

    /// A buffer of a device in row-major order.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    pub fn on_device<T: Scalar>(data: &'a Buffer<T>, shape: &[usize]) -> Result<TensorRef<'a>, Error> {
        let layout = Layout::contiguous(shape)?;
        crate::check_len("tensor", "buffer", "of its shape", data.len(), shape)?;
        Ok(TensorRef { data: Data::Device(T::buffer(data), 0), layout })
    }

    /// What an op has made of an input, in its place.
    ///
    /// # Panics
    /// When it stands for more than [`MAX_RANK`] axes.
    pub fn prepared(operand: &'a dyn Operand) -> TensorRef<'a> {
        let layout = Layout::contiguous(&operand.shape()).expect("few axes");
        TensorRef { data: Data::Prepared(operand), layout }
    }

    /// Whole numbers on a device in the place of those of the host, in row-major order.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    pub fn indices(indices: &'a Indices, shape: &[usize]) -> Result<TensorRef<'a>, Error> {
        let layout = Layout::contiguous(shape)?;
        crate::check_len("tensor", "indices", "of its shape", indices.len(), shape)?;
        Ok(TensorRef { data: Data::Indices(indices), layout })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self.data {
            Data::Host(slice) => slice.dtype(),
            Data::Device(slice, _) => slice.dtype(),
            Data::Prepared(operand) => operand.dtype(),
            Data::Indices(_) => DType::I32,
        }
    }

    /// Extent of every axis.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// From one entry of an axis to the next, in elements.
    pub fn strides(&self) -> &[usize] {
        self.layout.strides()
    }

    /// Shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// `data`, whose length the caller has checked, in row-major order.
    pub(crate) fn of<T: Scalar>(data: &'a [T], shape: &[usize]) -> TensorRef<'a> {
        let layout = Layout::contiguous(shape).expect("few axes");
        debug_assert_eq!(Some(data.len()), layout.count());
        TensorRef { data: Data::Host(T::slice(data)), layout }
    }

    /// What an op has made, where it is that and of this type.
    pub fn as_prepared<T: Operand>(&self) -> Option<&'a T> {
        if let Data::Prepared(operand) = self.data { (operand as &dyn Any).downcast_ref() } else { None }
    }

    /// The indices on a device that it is.
    pub(crate) fn as_indices(&self) -> Option<&'a Indices> {
        if let Data::Indices(indices) = self.data { Some(indices) } else { None }
    }

    /// All elements, where they are on the host in row-major order.
    pub fn contiguous<T: Scalar>(&self) -> Option<&'a [T]> {
        let Data::Host(slice) = self.data else { return None };
        let count = self.layout.count()?;
        let elements = T::of(slice)?;
        self.layout.is_contiguous().then(|| &elements[..count])
    }

    /// Writes all elements row by row, little endian, as files of tensors have them.
    ///
    /// # Errors
    /// Those of writing; [`io::ErrorKind::InvalidInput`] where they are not on the host in row-major order.
    ///
    /// ```
    /// let mut bytes = Vec::new();
    /// samebits_ops::TensorRef::new(&[1.0f32, -2.0], &[2])?.write(&mut bytes)?;
    /// assert_eq!(bytes, [0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        match self.dtype() {
            DType::Bf16 => self.write_as(out, bf16::to_le_bytes),
            DType::Fp16 => self.write_as(out, f16::to_le_bytes),
            DType::Fp32 => self.write_as(out, f32::to_le_bytes),
            DType::I32 => self.write_as(out, i32::to_le_bytes),
        }
    }

    fn write_as<T: Scalar, const N: usize>(&self, out: &mut dyn Write, bytes: impl Fn(T) -> [u8; N]) -> io::Result<()> {
        /// Elements that become bytes at a time; they stay in the caches.
        const PIECE: usize = 1 << 14;
        let why = "a tensor is not in row-major order on the host; give a contiguous one";
        let elements = self.contiguous::<T>().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        let mut piece = vec![[0; N]; elements.len().min(PIECE)];
        elements.chunks(PIECE).try_for_each(|elements| {
            let piece = &mut piece[..elements.len()];
            piece.iter_mut().zip(elements).for_each(|(to, &element)| *to = bytes(element));
            out.write_all(piece.as_flattened())
        })
    }

    /// The same elements as one row, where they are on the host in row-major order.
    pub(crate) fn as_one_row(&self) -> Option<TensorRef<'a>> {
        let count = self.layout.count().filter(|_| self.layout.is_contiguous())?;
        let Data::Host(_) = self.data else { return None };
        Some(TensorRef { data: self.data, layout: Layout::contiguous(&[count]).ok()? })
    }

    /// The elements on the host from the first on, and behind the last what the slice holds besides.
    ///
    /// # Panics
    /// When they are not there or of another type: callers have looked at the dtype.
    pub(crate) fn elements<T: Scalar>(&self) -> &'a [T] {
        let Data::Host(slice) = self.data else { panic!("the tensor is not on the host") };
        T::of(slice).expect("the dtype was looked at")
    }

    /// Its last axis, for every entry of the others.
    ///
    /// # Panics
    /// As [`TensorRef::elements`].
    pub(crate) fn rows<T: Scalar>(&self) -> Rows<'a, T> {
        let n = *self.shape().last().expect("it has an axis");
        Rows { data: self.elements(), n, leading: self.layout.leading(1) }
    }

    /// Its last axis, for every entry of the axis before it and of the others.
    ///
    /// # Panics
    /// As [`TensorRef::elements`].
    pub(crate) fn heads<T: Scalar>(&self) -> Heads<'a, T> {
        let (&[.., heads, n], &[.., head, _]) = (self.shape(), self.strides()) else { panic!("it has two axes") };
        // One head needs no stride, and what it says may be anything.
        let head = if heads > 1 { head } else { n };
        Heads { data: self.elements(), n, head, rows: self.layout.leading(2) }
    }

    /// What is wrong with it for a kernel that reads `op`'s `name` on the host.
    pub(crate) fn on_host(&self, op: &'static str, name: &str) -> Result<(), Error> {
        match self.data {
            Data::Host(_) => Ok(()),
            Data::Device(..) | Data::Indices(_) => {
                Err(value_error(op, format!("`{name}` is on a device; the op runs on the host")))
            }
            Data::Prepared(operand) => Err(value_error(op, format!("`{name}` is {}", operand.what()))),
        }
    }

    /// All elements of `op`'s `name`, which a kernel reads in row-major order.
    ///
    /// # Errors
    /// [`Error::Value`] that names the axis with a stride of its own; for elements that are elsewhere or of another type.
    pub fn dense<T: Scalar>(&self, op: &'static str, name: &str) -> Result<&'a [T], Error> {
        self.on_host(op, name)?;
        self.layout.refuse_gap(op, name)?;
        self.contiguous().ok_or_else(|| type_error::<T>(op, name, self.dtype()))
    }

    /// The rows of `op`'s `name`, wherever its strides put them.
    ///
    /// # Errors
    /// [`Error::Value`] when the elements are not on the host or of another type, or there is no axis.
    pub fn host_rows<T: Scalar>(&self, op: &'static str, name: &str) -> Result<Rows<'a, T>, Error> {
        self.on_host(op, name)?;
        if self.dtype() != T::DTYPE {
            return Err(type_error::<T>(op, name, self.dtype()));
        }
        if self.shape().is_empty() {
            return Err(value_error(op, format!("`{name}` has no axis, so no rows")));
        }
        Ok(self.rows())
    }

    /// The buffer of `op`'s `name`.
    ///
    /// # Errors
    /// [`Error::Value`] when it is not on a device, has gaps, is a part of a buffer or is of another type.
    pub fn device<T: Scalar>(&self, op: &'static str, name: &str) -> Result<&'a Buffer<T>, Error> {
        let (buffer, at) = self.device_part(op, name)?;
        if at > 0 || self.layout.count() != Some(buffer.len()) { Err(part_error(op, name)) } else { Ok(buffer) }
    }

    /// The buffer of `op`'s `name`, and the element that it begins at there.
    ///
    /// # Errors
    /// [`Error::Value`] when it is not on a device or has gaps.
    pub(crate) fn device_part<T: Scalar>(&self, op: &'static str, name: &str) -> Result<(&'a Buffer<T>, usize), Error> {
        self.layout.refuse_gap(op, name)?;
        match self.data {
            Data::Device(slice, at) => {
                let buffer = T::of_buffer(slice).ok_or_else(|| type_error::<T>(op, name, self.dtype()))?;
                Ok((buffer, at))
            }
            _ => Err(value_error(op, format!("`{name}` is on the host; the op runs on a device"))),
        }
    }
}

/// An op that reads or writes elements of type `T` was given others.
fn type_error<T: Scalar>(op: &'static str, name: &str, dtype: DType) -> Error {
    value_error(op, format!("`{name}` is {dtype}; this kernel takes {}", T::DTYPE))
}

/// An op that reads or writes whole buffers was given a part of one.
fn part_error(op: &'static str, name: &str) -> Error {
    value_error(op, format!("`{name}` is a part of a buffer; this kernel needs a whole one"))
}

impl Layout {
    /// Some entries of the first axis: the element that they begin at, and their layout.
    fn part(&self, rows: &Range<usize>) -> (usize, Layout) {
        assert!(self.rank > 0 && rows.start <= rows.end && rows.end <= self.shape[0], "the rows are there");
        let mut layout = *self;
        layout.shape[0] = rows.len();
        (rows.start * self.strides[0], layout)
    }

    /// Refuses strides for a kernel that reads or writes in row-major order.
    fn refuse_gap(&self, op: &'static str, name: &str) -> Result<(), Error> {
        let Some(axis) = self.gap() else { return Ok(()) };
        let (shape, strides) = (self.shape(), self.strides());
        Err(value_error(
            op,
            format!(
                "`{name}`: axis {axis} of shape {shape:?} has stride {}; this kernel needs it contiguous",
                strides[axis]
            ),
        ))
    }
}

/// Where the elements of an output are.
enum DataMut<'a> {
    Host(SliceMut<'a>),
    /// Elements of a buffer, from one on.
    Device(DeviceSliceMut<'a>, usize),
}

/// A tensor that an op writes, in row-major order.
pub struct TensorMut<'a> {
    data: DataMut<'a>,
    layout: Layout,
}

impl<'a> TensorMut<'a> {
    /// `data` in row-major order.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    pub fn new<T: Scalar>(data: &'a mut [T], shape: &[usize]) -> Result<TensorMut<'a>, Error> {
        let layout = Layout::contiguous(shape)?;
        crate::check_len("tensor", "data", "of its shape", data.len(), shape)?;
        Ok(TensorMut { data: DataMut::Host(T::slice_mut(data)), layout })
    }

    /// A buffer of a device in row-major order.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    pub fn on_device<T: Scalar>(data: &'a mut Buffer<T>, shape: &[usize]) -> Result<TensorMut<'a>, Error> {
        let layout = Layout::contiguous(shape)?;
        crate::check_len("tensor", "buffer", "of its shape", data.len(), shape)?;
        Ok(TensorMut { data: DataMut::Device(T::buffer_mut(data), 0), layout })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match &self.data {
            DataMut::Host(slice) => slice.as_ref().dtype(),
            DataMut::Device(slice, _) => slice.as_ref().dtype(),
        }
    }

    /// Extent of every axis.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// `data`, whose length the caller has checked.
    pub(crate) fn of<T: Scalar>(data: &'a mut [T], shape: &[usize]) -> TensorMut<'a> {
        let layout = Layout::contiguous(shape).expect("few axes");
        debug_assert_eq!(Some(data.len()), layout.count());
        TensorMut { data: DataMut::Host(T::slice_mut(data)), layout }
    }

    /// The elements of `op`'s `name` on the host.
    ///
    /// # Errors
    /// [`Error::Value`] when they are on a device or of another type.
    pub fn host<T: Scalar>(self, op: &'static str, name: &str) -> Result<&'a mut [T], Error> {
        let dtype = self.dtype();
        match self.data {
            DataMut::Host(slice) => T::of_mut(slice).ok_or_else(|| type_error::<T>(op, name, dtype)),
            DataMut::Device(..) => Err(value_error(op, format!("`{name}` is on a device; the op runs on the host"))),
        }
    }

    /// The buffer of `op`'s `name`.
    ///
    /// # Errors
    /// [`Error::Value`] when it is on the host, a part of a buffer or of another type.
    pub fn device<T: Scalar>(self, op: &'static str, name: &str) -> Result<&'a mut Buffer<T>, Error> {
        let count = self.layout.count();
        let (buffer, at) = self.device_part(op, name)?;
        if at > 0 || count != Some(buffer.len()) { Err(part_error(op, name)) } else { Ok(buffer) }
    }

    /// The buffer of `op`'s `name`, and the element that it begins at there.
    ///
    /// # Errors
    /// [`Error::Value`] when it is on the host.
    pub(crate) fn device_part<T: Scalar>(
        self,
        op: &'static str,
        name: &str,
    ) -> Result<(&'a mut Buffer<T>, usize), Error> {
        let dtype = self.dtype();
        match self.data {
            DataMut::Device(slice, at) => {
                let buffer = T::of_buffer_mut(slice).ok_or_else(|| type_error::<T>(op, name, dtype))?;
                Ok((buffer, at))
            }
            DataMut::Host(_) => Err(value_error(op, format!("`{name}` is on the host; the op runs on a device"))),
        }
    }
}

/// A tensor that owns its elements, in row-major order, in the memory of a [`Backend`](crate::Backend).
pub struct Tensor {
    data: Owned,
    layout: Layout,
}

impl Tensor {
    /// `data` on the host.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    ///
    /// ```
    /// use samebits_ops::{Backend, Cpu, DType, Tensor};
    ///
    /// let x = Tensor::new(vec![1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// let mut y = Cpu::best().empty(DType::Fp32, &[1, 2])?;
    /// let attributes = samebits_ops::Attributes::new().with("factor", 2.0);
    /// Cpu::best().call("scale", attributes, &[("x", x.rows(1..2))], vec![("y", y.view_mut())])?;
    /// assert_eq!(y.as_slice::<f32>(), Some(&[6.0, 8.0][..]));
    /// # Ok::<(), samebits_ops::Error>(())
    /// ```
    pub fn new<T: Scalar>(data: Vec<T>, shape: &[usize]) -> Result<Tensor, Error> {
        let layout = Layout::contiguous(shape)?;
        crate::check_len("tensor", "data", "of its shape", data.len(), shape)?;
        Ok(Tensor { data: T::owned(data), layout })
    }

    /// A buffer of a device.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    pub fn on_device<T: Scalar>(data: Buffer<T>, shape: &[usize]) -> Result<Tensor, Error> {
        let layout = Layout::contiguous(shape)?;
        crate::check_len("tensor", "buffer", "of its shape", data.len(), shape)?;
        Ok(Tensor { data: T::owned_buffer(data), layout })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.view().dtype()
    }

    /// Extent of every axis.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Elements.
    fn count(&self) -> usize {
        self.layout.count().expect("the elements are there")
    }

    /// All of it, to be read.
    pub fn view(&self) -> TensorRef<'_> {
        TensorRef { data: self.data.data(0, self.count()), layout: self.layout }
    }

    /// All of it, to be written.
    pub fn view_mut(&mut self) -> TensorMut<'_> {
        let count = self.count();
        TensorMut { data: self.data.data_mut(0, count), layout: self.layout }
    }

    /// All of it, with other axes.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    pub fn view_as(&self, shape: &[usize]) -> Result<TensorRef<'_>, Error> {
        crate::check_len("tensor", "data", "of its shape", self.count(), shape)?;
        Ok(TensorRef { layout: Layout::contiguous(shape)?, ..self.view() })
    }

    /// The same, to be written.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    pub fn view_mut_as(&mut self, shape: &[usize]) -> Result<TensorMut<'_>, Error> {
        crate::check_len("tensor", "data", "of its shape", self.count(), shape)?;
        Ok(TensorMut { layout: Layout::contiguous(shape)?, ..self.view_mut() })
    }

    /// Some entries of the first axis, to be read.
    ///
    /// # Panics
    /// When they are not there.
    pub fn rows(&self, rows: Range<usize>) -> TensorRef<'_> {
        let (at, layout) = self.layout.part(&rows);
        TensorRef { data: self.data.data(at, layout.count().expect("it is a part")), layout }
    }

    /// The same, to be written.
    ///
    /// # Panics
    /// When they are not there.
    pub fn rows_mut(&mut self, rows: Range<usize>) -> TensorMut<'_> {
        let (at, layout) = self.layout.part(&rows);
        TensorMut { data: self.data.data_mut(at, layout.count().expect("it is a part")), layout }
    }

    /// Takes another shape, whose elements are any of those that were there, and says whether there is room for them.
    /// On the host a smaller tensor finds room in a larger one, on a device only one of as many elements.
    pub fn reshape(&mut self, shape: &[usize]) -> bool {
        let Ok(layout) = Layout::contiguous(shape) else { return false };
        let room = self.data.len();
        let fits = layout.count().is_some_and(|count| if self.is_on_host() { count <= room } else { count == room });
        if fits {
            self.layout = layout;
        }
        fits
    }

    /// Whether its elements are on the host.
    pub fn is_on_host(&self) -> bool {
        matches!(self.view().data, Data::Host(_))
    }

    /// Its elements, where they are on the host and of this type.
    pub fn as_slice<T: Scalar>(&self) -> Option<&[T]> {
        if let Data::Host(slice) = self.view().data { T::of(slice) } else { None }
    }

    /// The same, to be written.
    pub fn as_slice_mut<T: Scalar>(&mut self) -> Option<&mut [T]> {
        if let DataMut::Host(slice) = self.view_mut().data { T::of_mut(slice) } else { None }
    }

    /// Its buffer, where it is on a device and of this type.
    pub fn as_buffer<T: Scalar>(&self) -> Option<&Buffer<T>> {
        if let Data::Device(slice, _) = self.view().data { T::of_buffer(slice) } else { None }
    }

    /// The same, to be written.
    pub fn as_buffer_mut<T: Scalar>(&mut self) -> Option<&mut Buffer<T>> {
        if let DataMut::Device(slice, _) = self.view_mut().data { T::of_buffer_mut(slice) } else { None }
    }

    /// Its elements, where they are on the host and of this type.
    pub fn into_vec<T: Scalar>(self) -> Option<Vec<T>> {
        let count = self.count();
        let mut data = T::of_owned(self.data)?;
        data.truncate(count);
        Some(data)
    }
}
