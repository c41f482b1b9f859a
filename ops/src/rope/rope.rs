//! Rotary position embedding: `x[T,H,D], pos[T] -> y[T,H,D]`.
//!
//! Formula: each pair (x1, x2) is rotated by `angle = pos * theta^(-2i/D)`.
//! Order: `y1 = fma(x1, c, -(x2*s))`, `y2 = fma(x2, c, x1*s)`.
//! Rounding: `inv_freq = f32(theta^(-2i/D))`; `angle = f32(pos) * inv_freq`, one f32 product; `c` and `s` are cosine and
//! sine of that f32 angle, correctly rounded to f32; then as written, and the last rounding.

use crate::backend::device::{self, Buffer, Build, Device, Unit, int};
use crate::call::{Arguments, Entry};
use crate::element::{Stored, typed, typed_pair};
use crate::simd::prefetch::prefetch_at;
use crate::simd::stream::{BLOCK, Stream, is_large};
use crate::simd::unroll::Unrolled;
use crate::simd::{Kernel, OnLine, Simd, load_at, narrow_at, paired};
use crate::tensor::{Operand, Prepared, Rows};
use crate::through_f32::{self, widen};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};
use samebits_schema::{Call, DType};
use std::fmt;

/// Which elements of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// `(i, i + D/2)`.
    Half,
    /// `(2i, 2i + 1)`.
    Interleaved,
}

impl Pairing {
    /// As kernels are told of it.
    pub(crate) fn interleaved(self) -> i32 {
        i32::from(self == Pairing::Interleaved)
    }
}

/// Dimensions of `x[T,H,D]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    /// Tokens T.
    pub tokens: usize,
    /// Heads H.
    pub heads: usize,
    /// Head dimension D, even.
    pub dim: usize,
    /// Which elements rotate together.
    pub pairing: Pairing,
}

/// `inv_freq[i] = f32(theta^(-2i/D))` for `i < D/2`; `dim` is D.
///
/// # Errors
/// [`Error::Value`] when D is odd or more than there is room for, or theta is not positive and finite.
///
/// ```
/// use samebits_ops::inv_freq;
///
/// assert_eq!(inv_freq(10_000.0, 4)?, [1.0, 0.01]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn inv_freq(theta: f64, dim: usize) -> Result<Vec<f32>, Error> {
    const NAME: &str = "inv_freq";
    check_even(NAME, dim)?;
    if !(theta > 0.0 && theta.is_finite()) {
        return Err(value_error(NAME, format!("theta is {theta}; it must be positive and finite")));
    }
    let mut frequencies = Vec::new();
    if dim > i32::MAX as usize || frequencies.try_reserve_exact(dim / 2).is_err() {
        return Err(value_error(NAME, format!("the head dimension is {dim}; there is no room for its frequencies")));
    }
    frequencies.extend((0..dim / 2).map(|i| libm::pow(theta, -2.0 * i as f64 / dim as f64) as f32));
    Ok(frequencies)
}

/// Cosines and sines, one row of D/2 each per token; made once, used by every layer.
pub struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Row t holds cosine and sine of the angles `f32(pos[t]) * inv_freq[i]`, in radians.
    pub fn new(cpu: &Cpu, inv_freq: &[f32], pos: &[i32]) -> RopeTable {
        RopeTable::each(cpu, inv_freq.len(), |_| inv_freq, pos, |_| 1.0)
    }

    /// As [`RopeTable::new`], with frequencies for each token: `inv_freq(t)` has `half` of them. Every cosine and sine of it is
    /// multiplied by `factor(t)`, one f32 product each.
    pub fn each<'a>(
        cpu: &Cpu,
        half: usize,
        inv_freq: impl Fn(usize) -> &'a [f32] + Sync,
        pos: &[i32],
        factor: impl Fn(usize) -> f32 + Sync,
    ) -> RopeTable {
        let table = |f: fn(f32) -> f32| {
            let mut values = vec![0f32; half * pos.len()];
            cpu.chunks(&mut values, half, |t, row| {
                let factor = factor(t);
                for (value, freq) in row.iter_mut().zip(inv_freq(t)) {
                    *value = f(pos[t] as f32 * freq) * factor;
                }
            });
            values
        };
        RopeTable { half, cos: table(cos), sin: table(sin) }
    }

    /// The table of the rotations back, as [`rope_backward`](crate::rope_backward()) takes it: sines of the other sign.
    pub fn reversed(&self) -> RopeTable {
        RopeTable { half: self.half, cos: self.cos.clone(), sin: self.sin.iter().map(|sin| -sin).collect() }
    }

    /// How many tokens it has rows for.
    pub(crate) fn tokens(&self) -> usize {
        self.cos.len().checked_div(self.half).unwrap_or(0)
    }

    /// D/2, the cosines and the sines.
    pub(crate) fn parts(&self) -> (usize, &[f32], &[f32]) {
        (self.half, &self.cos, &self.sin)
    }

    /// What token t is rotated by.
    #[inline(always)]
    pub(crate) fn row(&self, t: usize) -> Angles<'_> {
        let row = t * self.half..(t + 1) * self.half;
        Angles { cos: &self.cos[row.clone()], sin: &self.sin[row] }
    }

    /// Checks that there is a row for every token of `shape`, wide enough for its heads.
    pub(crate) fn check(&self, op: &'static str, shape: &Rope) -> Result<(), Error> {
        check_len(op, "table", "[T,D/2]", self.cos.len(), &[shape.tokens, shape.dim / 2])?;
        check_len(op, "table row", "[D/2]", self.half, &[shape.dim / 2])
    }
}

impl fmt::Debug for RopeTable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "RopeTable({} tokens, {} angles each)", self.tokens(), self.half)
    }
}

impl Operand for RopeTable {
    fn op(&self) -> &'static str {
        "rope"
    }

    fn dtype(&self) -> DType {
        DType::I32
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.tokens()]
    }

    fn what(&self) -> &'static str {
        "a table of angles; give the positions"
    }

    fn done(&self) -> &'static str {
        "sines and cosines tabled"
    }
}

impl<'a> TensorRef<'a> {
    /// Cosines and sines of positions, in the place of the positions.
    pub fn angles(table: &'a RopeTable) -> TensorRef<'a> {
        TensorRef::prepared(table)
    }

    /// The same on a device.
    pub fn rotations(table: &'a Rotations) -> TensorRef<'a> {
        TensorRef::prepared(table)
    }
}

/// One token's cosines and sines, D/2 of each.
#[derive(Clone, Copy)]
pub(crate) struct Angles<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
}

/// `x[T,H,D] -> y[T,H,D]`, row-major; row t of the table belongs to token t.
///
/// # Errors
/// [`Error::Length`] when a slice or the table does not match; [`Error::Value`] when D is odd.
///
/// ```
/// use samebits_ops::{Cpu, Pairing, Rope, RopeTable, inv_freq, rope};
///
/// // Two tokens of one head; that at position 0 stays as it is.
/// let cpu = Cpu::best();
/// let table = RopeTable::new(&cpu, &inv_freq(10_000.0, 2)?, &[0, 1]);
/// let shape = Rope { tokens: 2, heads: 1, dim: 2, pairing: Pairing::Half };
/// let mut y = [0f32; 4];
/// rope(&cpu, &shape, &table, &[1f32, 2.0, 1.0, 0.0], &mut y)?;
/// assert_eq!(y[..2], [1.0, 2.0]);
/// assert!((y[2] - 1f32.cos()).abs() < 1e-6 && (y[3] - 1f32.sin()).abs() < 1e-6);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn rope<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Rope,
    table: &RopeTable,
    x: &[I],
    y: &mut [O],
) -> Result<(), Error> {
    on_slices(cpu, NAMES, shape, table, x, y)
}

/// The op, its input and its output, as errors call them.
pub(super) type Names = [&'static str; 3];

const NAMES: Names = ["rope", "x", "y"];

/// [`rope`] for an op that bears `names`.
pub(super) fn on_slices<I: Element, O: Element>(
    cpu: &Cpu,
    names @ [op, input, output]: Names,
    shape: &Rope,
    table: &RopeTable,
    x: &[I],
    y: &mut [O],
) -> Result<(), Error> {
    let Rope { tokens, heads, dim, .. } = *shape;
    check_even(op, dim)?;
    check_len(op, input, "[T,H,D]", x.len(), &[tokens, heads, dim])?;
    check_len(op, output, "[T,H,D]", y.len(), &[tokens, heads, dim])?;
    table.check(op, shape)?;
    let extents = [tokens, heads, dim];
    run(cpu, names, shape, table, TensorRef::of(x, &extents), TensorMut::of(y, &extents))
}

pub(crate) fn check_even(op: &'static str, dim: usize) -> Result<(), Error> {
    if dim.is_multiple_of(2) {
        return Ok(());
    }
    Err(value_error(op, format!("the head dimension is {dim}; it must be even")))
}

/// Heads of x of any layout; the table has been checked.
pub(super) fn run(
    cpu: &Cpu,
    [op, input, output]: Names,
    shape: &Rope,
    table: &RopeTable,
    x: TensorRef,
    y: TensorMut,
) -> Result<(), Error> {
    x.on_host(op, input)?;
    let Rope { tokens, heads, dim, .. } = *shape;
    if tokens * heads * dim == 0 {
        return Ok(());
    }
    typed_pair!(x.dtype() => I, y.dtype() => O, {
        Part::chunks(cpu, shape, table, x.rows::<I>(), y.host::<O>(op, output)?);
        Ok(())
    }, else {
        through_f32::rows(cpu, op, y, heads * dim, &|token, y| {
            let x = f32_heads(cpu, &x, token, heads);
            let x = TensorRef::of(&x, &[heads, dim]);
            cpu.dispatch(Part { shape, table, first: token, x: x.rows::<f32>(), head: 0, y, large: false });
        })
    })
}

/// The heads of a token, one behind the other.
pub(crate) fn f32_heads(cpu: &Cpu, x: &TensorRef, token: usize, heads: usize) -> Vec<f32> {
    let dim = *x.shape().last().expect("it has an axis");
    let mut wide = vec![0f32; heads * dim];
    for (h, wide) in wide.chunks_exact_mut(dim).enumerate() {
        widen(cpu, x, token * heads + h, 0, wide);
    }
    wide
}

/// Its kernels.
pub(super) const UNIT: Unit = Unit::of("rope", include_str!("rope.cu"), &["rope"]);

/// rope, by name.
pub(crate) const OP: Entry = Entry {
    name: "rope",
    cpu: |cpu, args| {
        let (shape, x, y) = (Rope::of(args.call), args.input("x"), args.output("y"));
        with_table(cpu, args, |table| run(cpu, NAMES, &shape, table, x, y))
    },
    device: Some(|on, args| {
        let (shape, x, y) = (Rope::of(args.call), args.input("x"), args.output("y"));
        with_rotations(on, args, |table| {
            typed!(x.dtype() => I, typed!(y.dtype() => O, {
                on_device::<I, O>(on, &shape, table, x.device("rope", "x")?, y.device("rope", "y")?)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: Some(prepare),
};

/// [`rope`] on a device.
///
/// # Errors
/// As [`rope`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &Rope,
    table: &Rotations,
    x: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    on_buffers(device, NAMES, shape, table, x, y)
}

/// The same for an op that bears `names`.
pub(super) fn on_buffers<I: Stored, O: Stored>(
    device: &Device,
    [op, input, output]: Names,
    shape: &Rope,
    table: &Rotations,
    x: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let Rope { tokens, heads, dim, pairing } = *shape;
    table.check(op, tokens, dim)?;
    check_len(op, input, "[T,H,D]", x.len(), &[tokens, heads, dim])?;
    check_len(op, output, "[T,H,D]", y.len(), &[tokens, heads, dim])?;
    if y.is_empty() {
        return Ok(());
    }
    int(op, "H * D", heads * dim)?;
    let arguments = device::Arguments::new()
        .buffer(x)
        .buffer(&table.cos)
        .buffer(&table.sin)
        .buffer(y)
        .int(heads as i32)
        .int(dim as i32)
        .int(pairing.interleaved());
    // SAFETY: lengths were checked, those of the table too.
    unsafe { device.launch(Build::of::<I, O>("rope"), "rope", [tokens, 1, 1], 128, 0, &arguments) }
}

/// A [`RopeTable`] on a device.
pub struct Rotations {
    tokens: usize,
    half: usize,
    pub(crate) cos: Buffer<f32>,
    pub(crate) sin: Buffer<f32>,
}

impl Rotations {
    /// Copies `table`, which the host has made, correctly rounded.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(device: &Device, table: &RopeTable) -> Result<Rotations, Error> {
        let (half, cos, sin) = table.parts();
        Ok(Rotations {
            tokens: cos.len().checked_div(half).unwrap_or(0),
            half,
            cos: device.upload("rope", cos)?,
            sin: device.upload("rope", sin)?,
        })
    }

    /// How many tokens it has rows for.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Copies another table of the same size over it.
    ///
    /// # Errors
    /// [`Error::Length`] when the sizes differ; those of the device.
    pub fn fill(&mut self, device: &Device, table: &RopeTable) -> Result<(), Error> {
        let (half, cos, sin) = table.parts();
        check_len("rope", "table row", "[D/2]", half, &[self.half])?;
        self.cos.fill(device, cos)?;
        self.sin.fill(device, sin)
    }

    /// Checks that D is even, and that there is a row for every token, wide enough for a head.
    pub(crate) fn check(&self, op: &'static str, tokens: usize, dim: usize) -> Result<(), Error> {
        check_even(op, dim)?;
        check_len(op, "table", "[T,D/2]", self.tokens * self.half, &[tokens, dim / 2])?;
        check_len(op, "table row", "[D/2]", self.half, &[dim / 2])
    }
}

impl fmt::Debug for Rotations {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Rotations({} tokens, {} angles each)", self.tokens(), self.half)
    }
}

impl Operand for Rotations {
    fn op(&self) -> &'static str {
        "rope"
    }

    fn dtype(&self) -> DType {
        DType::I32
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.tokens()]
    }

    fn what(&self) -> &'static str {
        "a table of angles; give the positions"
    }

    fn done(&self) -> &'static str {
        "sines and cosines tabled"
    }
}

impl Rope {
    /// The parameters of a call.
    pub(crate) fn of(call: &Call) -> Rope {
        let pairing = if call.word("pairing") == "interleaved" { Pairing::Interleaved } else { Pairing::Half };
        Rope { tokens: call.dim("T"), heads: call.dim("H"), dim: call.dim("D"), pairing }
    }
}

/// Does `work` with the table of a call: the one that its positions were prepared as, else one that is made for it.
/// There is a row for every token.
pub(crate) fn with_table(
    cpu: &Cpu,
    args: &Arguments,
    work: impl FnOnce(&RopeTable) -> Result<(), Error>,
) -> Result<(), Error> {
    let made;
    let table = match args.input("pos").as_prepared::<RopeTable>() {
        Some(table) => table,
        None => {
            made = table_of(cpu, args)?;
            &made
        }
    };
    table.check(args.op(), &Rope::of(args.call))?;
    work(table)
}

/// The same on a device, whose launches check the table.
pub(crate) fn with_rotations(
    on: &Device,
    args: &Arguments,
    work: impl FnOnce(&Rotations) -> Result<(), Error>,
) -> Result<(), Error> {
    match args.input("pos").as_prepared::<Rotations>() {
        Some(table) => work(table),
        None => work(&Rotations::new(on, &table_of(&Cpu::best(), args)?)?),
    }
}

/// The angles of the positions of a call; a gradient rotates back.
fn table_of(cpu: &Cpu, args: &Arguments) -> Result<RopeTable, Error> {
    let inv_freq = inv_freq(args.call.float("theta"), args.call.dim("D"))?;
    let table = RopeTable::new(cpu, &inv_freq, args.integers("pos")?);
    Ok(if args.call.op.gradient_of.is_some() { table.reversed() } else { table })
}

/// The same, for the next calls too.
pub(crate) fn prepare(cpu: &Cpu, args: &Arguments) -> Result<Option<Prepared>, Error> {
    Ok(Some(Prepared::new("pos", table_of(cpu, args)?)))
}

/// Some tokens, from `first` on.
struct Part<'a, I, O> {
    shape: &'a Rope,
    table: &'a RopeTable,
    first: usize,
    x: Rows<'a, I>,
    /// The row of x that is the first head.
    head: usize,
    y: &'a mut [O],
    large: bool,
}

impl<I: Element, O: Element> Part<'_, I, O> {
    fn chunks(cpu: &Cpu, shape: &Rope, table: &RopeTable, x: Rows<I>, y: &mut [O]) {
        let size = shape.heads * shape.dim;
        let per_chunk = cpu.rows_per_chunk(shape.tokens, size);
        let large = shape.dim <= BLOCK && is_large(cpu, y);
        cpu.chunks(y, per_chunk * size, |chunk, y| {
            let first = chunk * per_chunk;
            cpu.dispatch(Part { shape, table, first, x, head: first * shape.heads, y, large });
        });
    }
}

impl<I: Element, O: Element> Kernel for Part<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Rope { heads, dim, pairing, .. } = *self.shape;
        let tokens = self.first..self.first + self.y.len() / (heads * dim);
        let mut stream = Stream::<O>::new(self.y, self.large);
        let OnLine(room) = &mut OnLine([[0f32; PAIRED]; 2]);
        let by_pairs = pairing == Pairing::Half && pairs_pay::<S, I, O>(heads, dim);
        for t in tokens {
            let angles = self.table.row(t);
            let laid = if by_pairs { angles.by_pairs(s, room) } else { angles };
            // A large output is made of whole heads at a time.
            let at_once = (BLOCK / dim).max(1);
            for from in (0..heads).step_by(at_once) {
                let some = from..heads.min(from + at_once);
                let y = stream.room(some.len() * dim);
                let len = y.len();
                for (i, h) in some.enumerate() {
                    let x = self.x.row(self.head + (t - self.first) * heads + h);
                    let y = &mut y[i * dim..][..dim];
                    if by_pairs {
                        if self.large {
                            prefetch_at(x, AHEAD);
                        }
                        halves_by_pairs(s, laid, x, y);
                    } else {
                        rotate_head(s, pairing, angles, x, y);
                    }
                }
                stream.put(s, len);
            }
        }
        stream.end(s);
    }
}

/// `x[D] -> y[D]`
#[inline(always)]
pub(crate) fn rotate_head<S: Simd, I: Element, O: Element>(
    s: S,
    pairing: Pairing,
    angles: Angles,
    x: &[I],
    y: &mut [O],
) {
    match pairing {
        Pairing::Half => rotate_halves(s, angles, x, y),
        Pairing::Interleaved => rotate_neighbours(angles, x, y),
    }
}

/// Element i goes with element i + D/2.
#[inline(always)]
fn rotate_halves<S: Simd, I: Element, O: Element>(s: S, angles: Angles, x: &[I], y: &mut [O]) {
    // Two narrow vectors are rounded to bf16 together.
    if S::LANES == 8 { halves(Unrolled(s), angles, x, y) } else { halves(s, angles, x, y) }
}

#[inline(always)]
fn halves<S: Simd, I: Element, O: Element>(s: S, angles: Angles, x: &[I], y: &mut [O]) {
    let half = x.len() / 2;
    let (x1, x2) = (&x[..half], &x[half..][..half]);
    let (y1, y2) = y.split_at_mut(half);
    let (y2, cos, sin) = (&mut y2[..half], &angles.cos[..half], &angles.sin[..half]);
    let whole = half - half % S::LANES;
    for at in (0..whole).step_by(S::LANES) {
        // SAFETY: at + LANES <= whole <= half, the length of all six slices. A head is short: checks of each would be felt.
        unsafe {
            let x = (I::load_lanes(s, x1.as_ptr().add(at)), I::load_lanes(s, x2.as_ptr().add(at)));
            let angles = (s.load(cos.as_ptr().add(at)), s.load(sin.as_ptr().add(at)));
            let turned = turned(s, x, angles);
            O::narrow_lanes(s, turned.0, y1.as_mut_ptr().add(at));
            O::narrow_lanes(s, turned.1, y2.as_mut_ptr().add(at));
        }
    }
    if whole < half {
        let x = (load_at(s, x1, whole, I::default()), load_at(s, x2, whole, I::default()));
        let turned = turned(s, x, (load_at(s, cos, whole, 0.0), load_at(s, sin, whole, 0.0)));
        narrow_at(s, turned.0, y1, whole);
        narrow_at(s, turned.1, y2, whole);
    }
}

/// The prefetch distance of a large call, in bytes: on a Zen 3 0.9 of the time on one thread and 0.83 on two, with 4 KiB to
/// 16 alike.
const AHEAD: usize = 8 << 10;

/// Angles of at most so many are put into the order of pairs.
const PAIRED: usize = 128;

/// Whether the angles of a token are put into the order of [`load_two`] for all its heads: vectors of 8 then need not change the places
/// of elements to widen them and to round them to bf16.
#[inline(always)]
fn pairs_pay<S: Simd, I: Element, O: Element>(heads: usize, dim: usize) -> bool {
    let half = dim / 2;
    S::LANES == 8 && paired::<I, O>() && heads >= 4 && half <= PAIRED && half.is_multiple_of(2 * S::LANES)
}

impl Angles<'_> {
    /// The angles of whole pairs of vectors, each two in the order of [`load_two`] by pairs.
    #[inline(always)]
    fn by_pairs<S: Simd>(self, _: S, room: &mut [[f32; PAIRED]; 2]) -> Angles<'_> {
        for (room, angles) in room.iter_mut().zip([self.cos, self.sin]) {
            for (room, angles) in room.chunks_exact_mut(2 * S::LANES).zip(angles.chunks_exact(2 * S::LANES)) {
                for (i, angles) in angles.chunks_exact(2).enumerate() {
                    (room[i], room[S::LANES + i]) = (angles[1], angles[0]);
                }
            }
        }
        let [cos, sin] = room.each_ref().map(|room| &room[..self.cos.len()]);
        Angles { cos, sin }
    }
}

/// [`rotate_halves`] of bf16 by pairs; `angles` are in that order, and whole pairs of vectors.
#[inline(always)]
fn halves_by_pairs<S: Simd, I: Element, O: Element>(s: S, angles: Angles, x: &[I], y: &mut [O]) {
    let (half, two) = (angles.cos.len(), 2 * S::LANES);
    assert!(paired::<I, O>() && half.is_multiple_of(two) && angles.sin.len() == half);
    assert!(x.len() == 2 * half && y.len() == 2 * half);
    let (x, y) = (x.as_ptr(), y.as_mut_ptr());
    for at in (0..half).step_by(two) {
        // SAFETY: at + 2 * LANES <= half; x and y are twice, the angles once as long as asserted, and of bf16 two are a u32. A head
        // is short: checks of each would be felt.
        unsafe {
            let (x1, x2) = (s.load_pairs(x.add(at).cast()), s.load_pairs(x.add(half + at).cast()));
            let (cos, sin) = (angles.cos.as_ptr().add(at), angles.sin.as_ptr().add(at));
            let odd = turned(s, (x1.0, x2.0), (s.load(cos), s.load(sin)));
            let even = turned(s, (x1.1, x2.1), (s.load(cos.add(S::LANES)), s.load(sin.add(S::LANES))));
            s.narrow_pairs(odd.0, even.0, y.add(at).cast());
            s.narrow_pairs(odd.1, even.1, y.add(half + at).cast());
        }
    }
}

/// Both elements of pairs, before the last rounding.
#[inline(always)]
fn turned<S: Simd>(s: S, (x1, x2): (S::F, S::F), (cos, sin): (S::F, S::F)) -> (S::F, S::F) {
    (s.fma(x1, cos, s.neg(s.mul(x2, sin))), s.fma(x2, cos, s.mul(x1, sin)))
}

/// Element 2i goes with element 2i + 1.
#[inline(always)]
fn rotate_neighbours<I: Element, O: Element>(angles: Angles, x: &[I], y: &mut [O]) {
    for (((x, y), &cos), &sin) in x.chunks_exact(2).zip(y.chunks_exact_mut(2)).zip(angles.cos).zip(angles.sin) {
        let (x1, x2) = (x[0].widen(), x[1].widen());
        y[0] = O::narrow(x1.mul_add(cos, -(x2 * sin)));
        y[1] = O::narrow(x2.mul_add(cos, x1 * sin));
    }
}

/// The cosine of `x`, correctly rounded.
fn cos(x: f32) -> f32 {
    correctly_rounded(libm::cos(f64::from(x)), || precise_sin_cos(f64::from(x)).1)
}

/// The sine of `x`, correctly rounded.
fn sin(x: f32) -> f32 {
    correctly_rounded(libm::sin(f64::from(x)), || precise_sin_cos(f64::from(x)).0)
}

/// Rounds `value`, which is within two units in its last place, to f32; `precise` decides when it lies that close to the
/// middle between two f32.
fn correctly_rounded(value: f64, precise: impl Fn() -> f64) -> f32 {
    let bits = value.to_bits();
    let near = |units: i64| f64::from_bits(bits.wrapping_add_signed(units)) as f32;
    if value == 0.0 || near(-2) == near(2) { value as f32 } else { precise() as f32 }
}

/// Sine and cosine of `x` (|x| < 2^31) to about 2^-95, rounded to odd in f64, so that rounding to f32 is correct.
fn precise_sin_cos(x: f64) -> (f64, f64) {
    // pi/2 in three parts of f64; the products below are kept whole by pairs of f64.
    const PI_2: [f64; 3] = [
        f64::from_bits(0x3FF9_21FB_5444_2D18),
        f64::from_bits(0x3C91_A626_3314_5C07),
        f64::from_bits(0xB91F_1976_B7ED_8FBC),
    ];
    let k = (x / PI_2[0]).round_ties_even();
    let minus_product = |c: f64| (-k * c, f64::mul_add(-k, c, k * c));
    let (p0, e0) = minus_product(PI_2[0]);
    let mut r = Double::sum(x, p0).plus(Double::sum(e0, 0.0));
    let (p1, e1) = minus_product(PI_2[1]);
    r = r.plus(Double { hi: p1, lo: e1 }).plus(Double { hi: -k * PI_2[2], lo: 0.0 });
    // Taylor series: |r| <= pi/4, so 27 terms leave less than 2^-100.
    let series = |first: Double, from: u32| {
        let minus_square = Double { hi: -1.0, lo: 0.0 }.times(r.times(r));
        let (mut sum, mut term) = (first, first);
        for n in (from..from + 54).step_by(2) {
            term = term.times(minus_square).over(f64::from(n * (n + 1)));
            sum = sum.plus(term);
        }
        sum
    };
    let sine = series(r, 2);
    let cosine = series(Double { hi: 1.0, lo: 0.0 }, 1);
    match (k as i64).rem_euclid(4) {
        0 => (sine.to_odd(), cosine.to_odd()),
        1 => (cosine.to_odd(), sine.negated().to_odd()),
        2 => (sine.negated().to_odd(), cosine.negated().to_odd()),
        _ => (cosine.negated().to_odd(), sine.to_odd()),
    }
}

/// An unevaluated sum of two f64 with `|lo| <= ulp(hi) / 2`.
#[derive(Clone, Copy)]
struct Double {
    hi: f64,
    lo: f64,
}

impl Double {
    /// `a + b`, exactly.
    fn sum(a: f64, b: f64) -> Double {
        let hi = a + b;
        let v = hi - a;
        Double { hi, lo: (a - (hi - v)) + (b - v) }
    }

    fn plus(self, other: Double) -> Double {
        let s = Double::sum(self.hi, other.hi);
        let t = Double::sum(self.lo, other.lo);
        let s = Double::sum(s.hi, s.lo + t.hi);
        Double::sum(s.hi, s.lo + t.lo)
    }

    fn times(self, other: Double) -> Double {
        let hi = self.hi * other.hi;
        let lo = f64::mul_add(self.hi, other.hi, -hi) + (self.hi * other.lo + self.lo * other.hi);
        Double::sum(hi, lo)
    }

    fn over(self, divisor: f64) -> Double {
        let hi = self.hi / divisor;
        let rest = f64::mul_add(-hi, divisor, self.hi) + self.lo;
        Double::sum(hi, rest / divisor)
    }

    fn negated(self) -> Double {
        Double { hi: -self.hi, lo: -self.lo }
    }

    /// One f64 with a set last bit when the sum is not exact, so that a second rounding cannot land on a false tie.
    fn to_odd(self) -> f64 {
        if self.lo == 0.0 || self.hi.to_bits() & 1 == 1 {
            return self.hi;
        }
        // An even hi with a rest: the odd neighbour on the side of the rest.
        let up = (self.lo > 0.0) == (self.hi > 0.0);
        f64::from_bits(self.hi.to_bits().wrapping_add_signed(if up { 1 } else { -1 }))
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::gemm::tests::{bits, number};
    use crate::{Isa, bf16, rope_backward};

    /// One pair of elements after the other, as docs/NUMERICS.md has it, and back.
    pub(crate) fn heads_of_any_length_rotate() {
        let tokens = 2;
        // Of few heads angles stay as they are, of many they are put into the order of pairs up to 256.
        let sizes =
            [(3, 2), (3, 40), (3, 1024), (3, 1030), (3, 64), (5, 24), (5, 32), (4, 64), (5, 80), (4, 256), (5, 288)];
        for (cpu, (heads, dim)) in
            Isa::of_machine().flat_map(|isa| sizes.map(|size| (Cpu::new(isa, 1, usize::MAX).unwrap(), size)))
        {
            let table = RopeTable::new(&cpu, &inv_freq(10_000.0, dim).unwrap(), &[3, 1000]);
            let x: Vec<f32> = (0..tokens * heads * dim).map(|i| number(i).to_f32()).collect();
            for pairing in [Pairing::Half, Pairing::Interleaved] {
                let (mut expected, mut expected_back) = (vec![0f32; x.len()], vec![0f32; x.len()]);
                let outputs = expected.chunks_mut(dim).zip(expected_back.chunks_mut(dim));
                for (head, (x, (y, dx))) in x.chunks(dim).zip(outputs).enumerate() {
                    let angles = table.row(head / heads);
                    for i in 0..dim / 2 {
                        let (a, b) = if pairing == Pairing::Half { (i, i + dim / 2) } else { (2 * i, 2 * i + 1) };
                        let (c, s) = (angles.cos[i], angles.sin[i]);
                        (y[a], y[b]) = (x[a].mul_add(c, -(x[b] * s)), x[b].mul_add(c, x[a] * s));
                        (dx[a], dx[b]) = (x[a].mul_add(c, x[b] * s), x[b].mul_add(c, -(x[a] * s)));
                    }
                }
                let shape = Rope { tokens, heads, dim, pairing };
                let mut y = vec![f32::NAN; x.len()];
                rope(&cpu, &shape, &table, &x, &mut y).unwrap();
                assert_eq!(bits(&y), bits(&expected), "{} {heads} {dim} {pairing:?}", cpu.isa());
                let narrow = |x: &[f32]| x.iter().map(|x| bf16::narrow(*x)).collect::<Vec<_>>();
                let mut narrow_y = vec![bf16::NAN; x.len()];
                rope(&cpu, &shape, &table, &narrow(&x), &mut narrow_y).unwrap();
                assert!(narrow_y == narrow(&expected), "{} {heads} {dim} {pairing:?}, bf16", cpu.isa());
                y.fill(f32::NAN);
                rope_backward(&cpu, &shape, &table.reversed(), &x, &mut y).unwrap();
                assert_eq!(bits(&y), bits(&expected_back), "{} {dim} {pairing:?}, back", cpu.isa());
            }
        }
    }

    pub(crate) fn the_precise_path_agrees_with_f64_far_from_ties_and_decides_near_them() {
        let mut seen = 0;
        for step in 0..200_000u32 {
            let x = f32::from_bits(0x3000_0000 + step * 4_999) * if step % 2 == 0 { 1.0 } else { -1.0 };
            if x.abs() > 1e9 {
                continue;
            }
            let (s, c) = precise_sin_cos(f64::from(x));
            for (fast, precise) in [(libm::sin(f64::from(x)), s), (libm::cos(f64::from(x)), c)] {
                assert!((fast - precise).abs() <= 3e-16 * fast.abs().max(1e-300) + 1e-32, "{x}: {fast} {precise}");
                seen += 1;
            }
        }
        assert!(seen > 100_000);
    }

    /// Sines and cosines of 80 digits, rounded to odd.
    pub(crate) fn the_precise_path_rounds_to_odd() {
        for (x, sine, cosine) in [
            (0.5, 0x3FDE_AEE8_744B_05EF, 0x3FEC_1528_065B_7D4F),
            (1.5, 0x3FEF_EB7A_9B2C_6D8B, 0x3FB2_1BD5_4FC5_F9A7),
            (-3.0, 0xBFC2_1038_6DB6_D55B, 0xBFEF_AE04_BE85_E5D3),
            (100.25, 0xBFD1_BF00_980D_C35D, 0x3FEE_BEC7_2BA6_B0EB),
            (12345.0, 0xBFEF_CCFA_2CC8_A02B, 0x3FBC_870E_43D7_83D7),
            (1000000.5, 0x3FC2_2B92_52DC_614D, 0x3FEF_AD0A_779B_E88D),
            (-33554432.0, 0x3FEF_3FA1_3093_9BAF, 0xBFCB_9381_AA1F_0793),
            (1073741824.0, 0xBFE3_C123_5372_8CAF, 0x3FE9_2CB4_6A92_0143),
        ] {
            let (s, c) = precise_sin_cos(x);
            assert_eq!((s.to_bits(), c.to_bits()), (sine, cosine), "{x}");
        }
        let exact = Double { hi: 0.75, lo: 0.0 };
        assert_eq!(exact.to_odd(), 0.75);
    }

    pub(crate) fn a_value_beside_a_tie_is_decided_by_the_precise_one() {
        // The middle between 1 and the next f32, and its neighbours in f64.
        let tie = 1.0 + f64::from(f32::EPSILON) / 2.0;
        let above = f64::from_bits(tie.to_bits() + 1);
        assert_eq!(correctly_rounded(tie, || above), 1.0 + f32::EPSILON);
        assert_eq!(correctly_rounded(above, || f64::from_bits(tie.to_bits() - 1)), 1.0);
        assert_eq!(correctly_rounded(0.1, || panic!("0.1 is far from a tie")), 0.1);
    }

    pub(crate) fn inv_freq_is_the_power() {
        let freq = inv_freq(10_000.0, 64).unwrap();
        assert_eq!((freq.len(), freq[0]), (32, 1.0));
        assert_eq!(freq[16], 0.01);
    }
}
