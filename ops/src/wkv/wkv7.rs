//! The recurrence of RWKV-7: `r, w, k, v, a, b[B,T,H,D], state[B,H,D,D]? (f32), len[B]? -> y[B,T,H,D], next[B,H,D,D]` (f32).
//!
//! Formula: of each head, token by token, with S of rows d and columns e, `S = e^w S + b (S^T a)^T + k v^T`, `y = S^T r`; the
//! first S is state, `next` is the last.
//! Order: positions ascend. Sums over the rows are eight segments of chains, joined as a tree; columns never meet.
//! `S = fma(k, v, fma(b, sa, S * e^w))`.
//! Rounding: every step once to f32; last rounding. A state is f32.
//! Special: rows behind `len` are not read, and their y is +0. Without a state it is +0, which is a term as all others.

use super::heads::{Inputs, TOKENS, Tensors, Tokens, Wkv7, Wkv7Inputs, advance, read};
use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit, int};
use crate::call::{Arguments as CallArguments, Entry};
use crate::columns::{GROUP, THREADS, by_size, gather, padded, put, scatter, two};
use crate::conv::causal_conv1d::{Part, optional};
use crate::element::{Stored, typed};
use crate::lengths::optional_lengths;
use crate::parallel::SharedOut;
use crate::simd::{Kernel, Simd};
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, TensorMut};
use std::ops::Range;

const NAME: &str = "wkv7";

/// The recurrence of RWKV-7 of every head: `y[B,T,H,D]`, and the state that each ends with, `next[B,H,D,D]`, of which a row
/// belongs to an element of k and a column to one of v. A sequence in pieces, each with the `next` of the one before as its
/// state, has the bits of the whole.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] for a length beyond T.
///
/// ```
/// use samebits_ops::{Cpu, Wkv7, Wkv7Inputs, wkv7};
///
/// // Nothing decays: 2 * 3; then 6 less what a takes of it, a half, and 1 * 4.
/// let shape = Wkv7 { batch: 1, length: 2, heads: 1, head_dim: 1 };
/// let inputs = Wkv7Inputs {
///     r: &[1f32, 10.0][..], w: &[0.0, 0.0], k: &[2.0, 1.0], v: &[3.0, 4.0], a: &[-1.0, -1.0], b: &[0.5, 0.5],
///     state: None, len: None,
/// };
/// let (mut y, mut next) = ([0f32; 2], [0f32; 1]);
/// wkv7(&Cpu::best(), &shape, &inputs, &mut y, &mut next)?;
/// assert_eq!((y, next), ([6.0, 70.0], [7.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn wkv7<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Wkv7,
    inputs: &Wkv7Inputs<I>,
    y: &mut [O],
    next: &mut [f32],
) -> Result<(), Error> {
    let tensors = Tensors::of(NAME, shape, inputs)?;
    shape.check(NAME, [("y", y.len())], [("next", Some(next.len()))])?;
    run(cpu, shape, tensors, TensorMut::of(y, &shape.of_tokens()), TensorMut::of(next, &shape.of_state()))
}

/// The form of the call has been checked.
fn run(cpu: &Cpu, shape: &Wkv7, inputs: Tensors, y: TensorMut, next: TensorMut) -> Result<(), Error> {
    inputs.check_host(NAME, shape)?;
    let next = next.host::<f32>(NAME, "next")?;
    typed!(inputs.tokens[0].dtype() => I, {
        let inputs = Inputs::<I>::new(cpu, shape, &inputs);
        typed!(y.dtype() => O, every_head(&inputs, y.host::<O>(NAME, "y")?, next));
    });
    Ok(())
}

/// Tokens that are widened at a time.
const AT_A_TIME: usize = 64;
/// Groups of columns of a task, of few of which there are more tasks.
const GROUPS: [usize; 2] = [4, 1];

/// Deals heads and columns; a task takes all tokens of some columns.
fn every_head<I: Element, O: Element>(inputs: &Inputs<I>, y: &mut [O], next: &mut [f32]) {
    let (cpu, shape) = (inputs.cpu, inputs.shape);
    let (y, next, units) = (SharedOut::new(y), SharedOut::new(next), shape.units());
    if units == 0 {
        return;
    }
    let (of_head, of_task) = (shape.head_dim.div_ceil(GROUP), GROUPS[usize::from(units < 2 * cpu.threads())]);
    let tasks = of_head.div_ceil(of_task);
    cpu.each(units * tasks, |task| {
        let (unit, first) = (task / tasks, task % tasks * of_task);
        some_columns(inputs, unit, first..of_head.min(first + of_task), &y, &next);
    });
}

/// Some groups of columns of a head, all tokens.
fn some_columns<I: Element, O: Element>(
    inputs: &Inputs<I>,
    unit: usize,
    groups: Range<usize>,
    y: &SharedOut<O>,
    next: &SharedOut<f32>,
) {
    let (cpu, &Wkv7 { length, heads, head_dim, .. }) = (inputs.cpu, inputs.shape);
    let (b, h, columns) = (unit / heads, unit % heads, groups.start * GROUP..head_dim.min(groups.end * GROUP));
    let (end, width) = (inputs.tokens_of(b), padded(head_dim));
    let mut state = vec![0f32; groups.len() * GROUP * head_dim];
    gather(inputs.state.as_ref(), unit, groups.clone(), [head_dim; 2], &mut state);
    let count = AT_A_TIME.min(end);
    let (mut tokens, mut made) = (Tokens::room(count, head_dim), vec![0f32; count * width]);
    // SAFETY: tasks have heads or columns of their own, and each token is taken once.
    let row = |t: usize| unsafe { y.part(((b * length + t) * heads + h) * head_dim + columns.start, columns.len()) };
    for from in (0..end).step_by(AT_A_TIME) {
        let count = AT_A_TIME.min(end - from);
        inputs.read([b, h], from..from + count, &mut tokens);
        let groups = groups.clone();
        cpu.dispatch(Forward { tokens: &tokens, count, head_dim, groups, state: &mut state, y: &mut made });
        for (i, made) in made.chunks_exact(width).take(count).enumerate() {
            convert(cpu, &made[columns.clone()], row(from + i));
        }
    }
    (end..length).for_each(|t| row(t).fill(O::default()));
    scatter(cpu, &state, unit, groups, [head_dim; 2], next);
}

/// `count` tokens of some groups of columns of a head.
struct Forward<'a> {
    tokens: &'a Tokens,
    count: usize,
    head_dim: usize,
    groups: Range<usize>,
    state: &'a mut [f32],
    y: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Forward { tokens, count, head_dim: n, groups, state, y } = self;
        let (width, v) = (padded(n), &tokens.v);
        assert!(GROUP.is_multiple_of(2 * S::LANES) && state.len() == groups.len() * GROUP * n);
        assert!(groups.end * GROUP <= width && [v.len(), y.len()].iter().all(|&len| len >= count * width));
        for (number, group) in groups.enumerate() {
            for at in (0..GROUP).step_by(2 * S::LANES) {
                let (of_state, column) = (number * GROUP * n + at, group * GROUP + at);
                for t in 0..count {
                    let rows = tokens.rows(t, n);
                    // SAFETY: the state has n rows of a group from `number * GROUP * n` on, of whose GROUP columns these are
                    // two vectors; v and y have rows of `width`, `count` of them.
                    unsafe {
                        let sa = read(s, state, of_state, rows.a);
                        let made = advance(s, state, of_state, rows, [sa, two(s, v, t * width + column)]);
                        put(s, made, y, t * width + column);
                    }
                }
            }
        }
    }
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("wkv7.cu"), &KERNELS);
/// For heads of up to 128 elements, of up to 256, and of any number.
const KERNELS: [&str; 3] = ["wkv7_16", "wkv7_32", "wkv7_any"];

/// wkv7, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| run(cpu, &Wkv7::of(args.call), Tensors::of_call(args)?, args.output("y"), args.output("next")),
    device: Some(|on, args| {
        let (shape, [y, next]) = (Wkv7::of(args.call), ["y", "next"].map(|name| args.output(name)));
        shape.lengths().on_device(on, args, NAME, |len| {
            typed!(args.input("r").dtype() => I, typed!(y.dtype() => O, {
                let parts = Parts::<I>::of_call(args, NAME, len)?;
                launch::<I, O>(on, &shape, &parts, y.device_part(NAME, "y")?, next.device_part(NAME, "next")?)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// The inputs on a device.
pub(super) struct Parts<'a, I> {
    /// As [`TOKENS`].
    tokens: [Part<'a, I>; 6],
    state: Option<Part<'a, f32>>,
    len: Option<&'a Indices>,
}

impl<'a, I: Stored> Parts<'a, I> {
    /// Those of a call by name.
    pub fn of_call(args: &CallArguments<'_, 'a>, op: &'static str, len: Option<&'a Indices>) -> Result<Self, Error> {
        let [r, w, k, v, a, b] = TOKENS.map(|name| args.input(name).device_part::<I>(op, name));
        let state = args.optional("state").map(|state| state.device_part(op, "state")).transpose()?;
        Ok(Parts { tokens: [r?, w?, k?, v?, a?, b?], state, len })
    }

    /// Buffers as they are.
    pub fn of(inputs: &DeviceInputs<'a, I>) -> Self {
        let DeviceInputs { r, w, k, v, a, b, state, len } = *inputs;
        Parts { tokens: [r, w, k, v, a, b].map(|x| (x, 0)), state: state.map(|state| (state, 0)), len }
    }

    /// The first arguments of a kernel: the inputs and extents.
    pub fn arguments(&self, on: &Device, op: &'static str, shape: &Wkv7) -> Result<Arguments, Error> {
        let tokens = self.tokens.into_iter().fold(Arguments::new(), |all, (buffer, at)| all.buffer_from(buffer, at));
        let arguments = optional_lengths(on, optional(tokens, self.state), self.len)?.long(shape.length);
        Ok(arguments.int(int(op, "H", shape.heads)?).int(int(op, "D", shape.head_dim)?))
    }
}

/// A block for each head and some of its columns.
pub(super) fn grid(shape: &Wkv7) -> [usize; 3] {
    [shape.units(), shape.head_dim.div_ceil(THREADS / 8), 1]
}

/// The call was checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &Wkv7,
    parts: &Parts<I>,
    (y, at): (&mut Buffer<O>, usize),
    (next, next_at): (&mut Buffer<f32>, usize),
) -> Result<(), Error> {
    if shape.units() == 0 {
        return Ok(());
    }
    let arguments = parts.arguments(on, NAME, shape)?.buffer_from(y, at).buffer_from(next, next_at);
    let kernel = KERNELS[by_size(shape.head_dim)];
    // SAFETY: lengths were checked, and these are the kernel's arguments.
    unsafe { on.launch(Build::of::<I, O>(NAME), kernel, grid(shape), THREADS as u32, 0, &arguments) }
}

/// What a recurrence of RWKV-7 reads on a device; as [`Wkv7Inputs`].
#[derive(Clone, Copy)]
pub struct DeviceInputs<'a, I> {
    /// `r[B,T,H,D]`.
    pub r: &'a Buffer<I>,
    /// `w[B,T,H,D]`.
    pub w: &'a Buffer<I>,
    /// `k[B,T,H,D]`.
    pub k: &'a Buffer<I>,
    /// `v[B,T,H,D]`.
    pub v: &'a Buffer<I>,
    /// `a[B,T,H,D]`.
    pub a: &'a Buffer<I>,
    /// `b[B,T,H,D]`.
    pub b: &'a Buffer<I>,
    /// `state[B,H,D,D]`.
    pub state: Option<&'a Buffer<f32>>,
    /// Tokens of each sequence.
    pub len: Option<&'a Indices>,
}

impl<I: Stored> DeviceInputs<'_, I> {
    /// Checks them.
    pub(super) fn check(&self, op: &'static str, shape: &Wkv7) -> Result<(), Error> {
        let DeviceInputs { r, w, k, v, a, b, state, len } = *self;
        let (tokens, mut names) = ([r, w, k, v, a, b], TOKENS.iter());
        let lens = tokens.map(|x| (*names.next().expect("as many names"), x.len()));
        shape.check(op, lens, [("state", state.map(Buffer::len))])?;
        shape.lengths().check_indices(op, len)
    }
}

/// [`wkv7`] on a device.
///
/// # Errors
/// As [`wkv7`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &Wkv7,
    inputs: &DeviceInputs<I>,
    y: &mut Buffer<O>,
    next: &mut Buffer<f32>,
) -> Result<(), Error> {
    inputs.check(NAME, shape)?;
    shape.check(NAME, [("y", y.len())], [("next", Some(next.len()))])?;
    launch(on, shape, &Parts::of(inputs), (y, 0), (next, 0))
}
