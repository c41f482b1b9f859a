//! The frame of ops that take one element of each of two inputs and make one of the output.

use crate::backend::device::{Arguments, Buffer, Build, Device};
use crate::call;
use crate::element::{Stored, typed, typed_pair};
use crate::simd::prefetch::prefetch_at;
use crate::simd::stream::{BLOCK, LINE, Made, Stream, is_large, take};
use crate::simd::unroll::Unrolled;
use crate::simd::{Kernel, OnLine, Simd, load_at, load_two, narrow_at, narrow_two, paired, store_two};
use crate::tensor::Rows;
use crate::through_f32::{convert, widen};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// What is done to each pair of elements, before the last rounding.
pub trait Pointwise: Copy + Sync + Send {
    /// Whether there is a [`Pointwise::first`].
    const FIRST: bool = false;
    /// A long chain of steps that only `a` takes part in. They run in a loop of their own: a machine looks some hundred
    /// instructions ahead, and with both loops in one that is few elements.
    #[inline(always)]
    fn first<S: Simd>(self, _: S, a: S::F) -> S::F {
        a
    }
    /// The value made of `a`, what [`Pointwise::first`] made of it, and `b`.
    fn apply<S: Simd>(self, s: S, a: S::F, first: S::F, b: S::F) -> S::F;
}

/// `y[i] = op(a[i], b[i])`, last rounding; the caller has checked that the shapes are equal.
///
/// # Errors
/// [`Error::Value`] when a tensor is not on the host.
pub fn elementwise(
    cpu: &Cpu,
    name: &'static str,
    op: impl Pointwise,
    [a, b]: [TensorRef; 2],
    y: TensorMut,
) -> Result<(), Error> {
    a.on_host(name, "the first input")?;
    b.on_host(name, "the second input")?;
    typed_pair!(a.dtype() => I, y.dtype() => O, {
        let y = y.host::<O>(name, "y")?;
        match (a.contiguous::<I>(), b.contiguous::<I>()) {
            (Some(a), Some(b)) => flat(cpu, op, a, b, y),
            _ => rows(cpu, op, a.rows::<I>(), b.rows::<I>(), y),
        }
        Ok(())
    }, else {
        blocks(cpu, name, [a, b], y, &|a, b, y| cpu.dispatch(Part { op, a, b, y, large: false }))
    })
}

/// Makes elements of y of those of a and b.
type Work<'a> = dyn Fn(&[f32], &[f32], &mut [f32]) + Sync + 'a;

/// Tensors of one shape as rows, and how many elements a row has: where nothing has gaps everything is one row.
pub(crate) fn as_rows<'a, const N: usize>(inputs: [TensorRef<'a>; N], shape: &[usize]) -> ([TensorRef<'a>; N], usize) {
    let flat = inputs.map(|x| x.as_one_row());
    if flat.iter().all(Option::is_some) {
        return (flat.map(|x| x.expect("looked at")), shape.iter().product());
    }
    (inputs, *shape.last().expect("only rows have gaps"))
}

/// Types that no kernel is compiled for: blocks of rows, with `work(a, b, y)` in f32.
fn blocks(cpu: &Cpu, name: &'static str, [a, b]: [TensorRef; 2], y: TensorMut, work: &Work<'_>) -> Result<(), Error> {
    let ([a, b], n) = as_rows([a, b], y.shape());
    typed!(y.dtype() => O, {
        let y = y.host::<O>(name, "y")?;
        let size = cpu.elements_per_chunk(y.len());
        cpu.chunks(y, size, |chunk, mut y| {
            let mut at = chunk * size;
            let [mut wide_a, mut wide_b, mut made] = [[0f32; BLOCK]; 3];
            while !y.is_empty() {
                let (row, from) = (at / n, at % n);
                let (part, rest) = y.split_at_mut(BLOCK.min(n - from).min(y.len()));
                let (a_part, b_part) = (&mut wide_a[..part.len()], &mut wide_b[..part.len()]);
                widen(cpu, &a, row, from, a_part);
                widen(cpu, &b, row, from, b_part);
                work(a_part, b_part, &mut made[..part.len()]);
                convert(cpu, &made[..part.len()], part);
                at += part.len();
                y = rest;
            }
        });
    });
    Ok(())
}

/// Elements to a block of the kernels: 256 threads of 8 elements.
pub(super) const ELEMENTS_PER_BLOCK: usize = 256 * 8;

/// Starts the kernel of an op that has its name: of one input or two, the output, how many elements there are, and `numbers`.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    op: &'static str,
    a: &Buffer<I>,
    b: Option<(&'static str, &Buffer<I>)>,
    numbers: &[f32],
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    launch(device, [op, op], a, b, numbers, y)
}

/// The same of an op and one of its kernels.
///
/// # Errors
/// As [`on_device`].
pub fn launch<I: Stored, O: Stored>(
    device: &Device,
    [op, kernel]: [&'static str; 2],
    a: &Buffer<I>,
    b: Option<(&'static str, &Buffer<I>)>,
    numbers: &[f32],
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let mut arguments = Arguments::new().buffer(a);
    if let Some((name, b)) = b {
        check_len(op, name, "of the first input", b.len(), &[a.len()])?;
        arguments = arguments.buffer(b);
    }
    check_len(op, "y", if b.is_some() { "of the first input" } else { "of x" }, y.len(), &[a.len()])?;
    let arguments = arguments.buffer(y).long(a.len());
    let arguments = numbers.iter().fold(arguments, |arguments, &number| arguments.float(number));
    let grid = [a.len().div_ceil(ELEMENTS_PER_BLOCK), 1, 1];
    // SAFETY: all of them have as many elements as the kernel is told.
    unsafe { device.launch(Build::of::<I, O>(op), kernel, grid, 256, 0, &arguments) }
}

/// The same for a call, whose one or two inputs are called `inputs`.
///
/// # Errors
/// As [`on_device`].
pub fn call_on_device(
    device: &Device,
    args: &mut call::Arguments,
    inputs: &[&'static str],
    numbers: &[f32],
) -> Result<(), Error> {
    let op = args.op();
    call_kernel(device, op, args, inputs, numbers)
}

/// The same of one of the kernels of the op.
///
/// # Errors
/// As [`on_device`].
pub fn call_kernel(
    device: &Device,
    kernel: &'static str,
    args: &mut call::Arguments,
    inputs: &[&'static str],
    numbers: &[f32],
) -> Result<(), Error> {
    let (op, y) = (args.op(), args.output(args.call.op.outputs[0].name));
    let tensor = |at: usize| inputs.get(at).map(|&name| (name, args.input(name)));
    let ((name, a), b) = (tensor(0).expect("it has an input"), tensor(1));
    typed!(a.dtype() => I, typed!(y.dtype() => O, {
        let b = b.map(|(name, b)| b.device::<I>(op, name).map(|b| (name, b))).transpose()?;
        launch::<I, O>(device, [op, kernel], a.device(op, name)?, b, numbers, y.device(op, "y")?)
    }))
}

/// Elements that lie one behind the other.
fn flat<I: Element, O: Element>(cpu: &Cpu, op: impl Pointwise, a: &[I], b: &[I], y: &mut [O]) {
    let size = cpu.elements_per_chunk(y.len());
    let large = is_large(cpu, y);
    cpu.chunks(y, size, |chunk, y| {
        let range = chunk * size..chunk * size + y.len();
        cpu.dispatch(Part { op, a: &a[range.clone()], b: &b[range], y, large });
    });
}

/// Rows that lie where their strides say.
fn rows<I: Element, O: Element>(cpu: &Cpu, op: impl Pointwise, a: Rows<I>, b: Rows<I>, y: &mut [O]) {
    let n = a.n();
    let per_chunk = cpu.rows_per_chunk(a.count(), n);
    cpu.chunks(y, per_chunk * n, |chunk, y| {
        for (row, y) in (chunk * per_chunk..).zip(y.chunks_mut(n)) {
            cpu.dispatch(Part { op, a: a.row(row), b: b.row(row), y, large: false });
        }
    });
}

struct Part<'a, P, I, O> {
    op: P,
    a: &'a [I],
    b: &'a [I],
    y: &'a mut [O],
    large: bool,
}

impl<P: Pointwise, I: Element, O: Element> Kernel for Part<'_, P, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Part { op, mut a, mut b, y, large } = self;
        let (mut stream, OnLine(all)) = (Stream::<O>::new(y, large), &mut OnLine([0f32; BLOCK]));
        while !a.is_empty() {
            let len = stream.block(a.len());
            let (a, b, firsts) = (take(&mut a, len), take(&mut b, len), &mut all[..len]);
            if P::FIRST {
                make_firsts::<S, I, O, 2>(s, op, a, [a, b], firsts);
            }
            stream.fill(s, len, Applied { op, a, b, firsts });
        }
        stream.end(s);
    }
}

/// The prefetch distance in bytes: what one element costs leaves the processor's own look-ahead behind.
const AHEAD: usize = 6 << 10;

/// What [`Pointwise::first`] makes of the elements of a; with `PAIRS` in the order of [`load_two`] as far as they are whole
/// lines.
struct Firsts<'a, P, I, const PAIRS: bool, const N: usize> {
    op: P,
    a: &'a [I],
    inputs: [&'a [I]; N],
    firsts: &'a mut [f32],
}

impl<P: Pointwise, I: Element, const PAIRS: bool, const N: usize> Kernel for Firsts<'_, P, I, PAIRS, N> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Firsts { op, a, inputs, firsts } = self;
        let (two, eight, s4) = (2 * S::LANES, 8 * S::LANES, Unrolled(Unrolled(s)));
        let whole = a.len() - a.len() % LINE;
        // For one lane eight would only be more to compile.
        let many = if S::LANES > 1 { whole - whole % eight } else { 0 };
        for at in (0..many).step_by(eight) {
            for input in inputs {
                prefetch_at(&input[at..][..eight], AHEAD);
            }
            let (p0, rest) = a[at..][..eight].split_at(two);
            let (p1, rest) = rest.split_at(two);
            let (p2, p3) = rest.split_at(two);
            let low = (load_two(s, p0, PAIRS), load_two(s, p1, PAIRS));
            let high = (load_two(s, p2, PAIRS), load_two(s, p3, PAIRS));
            store_two(s4, op.first(Unrolled(s4), (low, high)), &mut firsts[at..][..eight]);
        }
        for at in (many..whole).step_by(two) {
            let made = op.first(Unrolled(s), load_two(s, &a[at..][..two], PAIRS));
            store_two(s, made, &mut firsts[at..][..two]);
        }
        for at in (whole..a.len()).step_by(S::LANES) {
            narrow_at(s, op.first(s, load_at(s, a, at, I::default())), firsts, at);
        }
    }
}

/// [`Pointwise::first`] of every element of a, in the order in which [`load_two`] takes them from `I` to `O`. What comes behind
/// `inputs`, as long as a, is prefetched meanwhile: these loops wait for no memory.
#[inline(always)]
pub(super) fn make_firsts<S: Simd, I: Element, O: Element, const N: usize>(
    s: S,
    op: impl Pointwise,
    a: &[I],
    inputs: [&[I]; N],
    firsts: &mut [f32],
) {
    if const { I::IS_BF16 && O::IS_BF16 } {
        s.enter(Firsts::<_, _, true, N> { op, a, inputs, firsts });
    } else {
        s.enter(Firsts::<_, _, false, N> { op, a, inputs, firsts });
    }
}

/// `op(a[i], b[i])`, last rounding; the lengths are equal. `firsts` are those of a if the op has a [`Pointwise::first`].
pub struct Applied<'a, P, I> {
    pub op: P,
    pub a: &'a [I],
    pub b: &'a [I],
    pub firsts: &'a [f32],
}

impl<S: Simd, P: Pointwise, I: Element, O: Element> Made<S, O> for Applied<'_, P, I> {
    #[inline(always)]
    fn line(&mut self, s: S, y: &mut [O; LINE]) {
        let (pairs, two) = (paired::<I, O>(), 2 * S::LANES);
        let (a, b) = (take(&mut self.a, LINE), take(&mut self.b, LINE));
        let firsts = if P::FIRST { take(&mut self.firsts, LINE) } else { &[] };
        if !P::FIRST {
            prefetch_at(a, AHEAD);
            prefetch_at(b, AHEAD);
        }
        for at in (0..LINE).step_by(two) {
            let ((a0, a1), (b0, b1)) = (load_two(s, &a[at..][..two], pairs), load_two(s, &b[at..][..two], pairs));
            let (f0, f1) = if P::FIRST { load_two(s, &firsts[at..][..two], false) } else { (a0, a1) };
            let made = (self.op.apply(s, a0, f0, b0), self.op.apply(s, a1, f1, b1));
            narrow_two(s, made, &mut y[at..][..two], pairs);
        }
    }

    #[inline(always)]
    fn some(&mut self, s: S, y: &mut [O]) {
        let (a, b) = (take(&mut self.a, y.len()), take(&mut self.b, y.len()));
        let firsts = if P::FIRST { take(&mut self.firsts, y.len()) } else { &[] };
        for at in (0..y.len()).step_by(S::LANES) {
            let (a, b) = (load_at(s, a, at, I::default()), load_at(s, b, at, I::default()));
            let first = if P::FIRST { load_at(s, firsts, at, 0.0) } else { a };
            narrow_at(s, self.op.apply(s, a, first, b), y, at);
        }
    }
}
