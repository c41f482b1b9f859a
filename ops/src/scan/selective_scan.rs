//! The scan of Mamba: `x[B,T,C], dt[B,T,C], a_log[C,N], b[B,T,N], c[B,T,N], d[C]?, dt_bias[C]?, state[B,C,N]? (f32), len[B]? ->
//! y[B,T,C], next[B,C,N]` (f32).
//!
//! Formula: `s = exp(e A) s + e x b`, `y = s c + d x`, with `e = softplus(dt + dt_bias)` and `A = -exp(a_log)`, of each channel;
//! `next` is s behind the last position.
//! Order: positions ascending. `s = fma(exp(e * A), s, (e * x) * b)`; y is a chain over n of `s * c`, then `fma(d, x, y)`.
//! Without a state it begins with +0, which is a term as all others.
//! Rounding: every step once to f32, softplus once from f64; last rounding. A state is f32.
//! Special: positions behind `len` are not read, and their y is +0.

use super::selective::{CHANNELS, Channels, Scan, SelectiveInputs, SelectiveScan, Steps, Tensors, advance, two};
use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit, int};
use crate::call::{Arguments as CallArguments, Entry};
use crate::conv::causal_conv1d::{Part, optional};
use crate::element::{Stored, typed};
use crate::lengths::optional_lengths;
use crate::parallel::SharedOut;
use crate::simd::{Kernel, Simd, narrow_two};
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, TensorMut, check_len};

const NAME: &str = "selective_scan";

/// Every channel's state over the positions of its sequence, and what is read of it: `y[B,T,C]` and `next[B,C,N]`. A sequence in
/// pieces, each with the `next` of the one before as its state, has the bits of the whole.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] for a length beyond T.
///
/// ```
/// use samebits_ops::{Cpu, SelectiveInputs, SelectiveScan, selective_scan};
///
/// // A step of ln(2), as softplus makes it of 0, halves the state: exp(-exp(a_log) * ln(2)) = 1/2.
/// let shape = SelectiveScan { batch: 1, length: 2, channels: 1, state_dim: 1 };
/// let inputs = SelectiveInputs {
///     x: &[8f32, 4.0], dt: &[0.0, 0.0], a_log: &[0.0], b: &[1.0, 1.0], c: &[1.0, 1.0], d: None, dt_bias: None,
///     state: Some(&[4.0]), len: None,
/// };
/// let (mut y, mut next) = ([0f32; 2], [0f32; 1]);
/// selective_scan(&Cpu::best(), &shape, &inputs, &mut y, &mut next)?;
/// let step = 2f32.ln();
/// assert!((y[0] - (2.0 + 8.0 * step)).abs() < 1e-5 && (y[1] - (y[0] / 2.0 + 4.0 * step)).abs() < 1e-5);
/// assert_eq!(next[0], y[1]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn selective_scan<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &SelectiveScan,
    inputs: &SelectiveInputs<I>,
    y: &mut [O],
    next: &mut [f32],
) -> Result<(), Error> {
    let tensors = Tensors::of(NAME, shape, inputs)?;
    check_outputs(shape, y.len(), next.len())?;
    let (of_x, .., of_state) = shape.extents();
    run(cpu, shape, tensors, TensorMut::of(y, &of_x), TensorMut::of(next, &of_state))
}

fn check_outputs(shape: &SelectiveScan, y: usize, next: usize) -> Result<(), Error> {
    let (of_x, .., of_state) = shape.extents();
    check_len(NAME, "y", "[B,T,C]", y, &of_x)?;
    check_len(NAME, "next", "[B,C,N]", next, &of_state)
}

/// The form of the call has been checked.
fn run(cpu: &Cpu, shape: &SelectiveScan, inputs: Tensors, y: TensorMut, next: TensorMut) -> Result<(), Error> {
    let scan = Scan::new(cpu, NAME, shape, inputs)?;
    typed!(y.dtype() => O, {
        let next = next.host::<f32>(NAME, "next")?;
        forward(&scan, &SharedOut::new(y.host::<O>(NAME, "y")?), &SharedOut::new(next));
    });
    Ok(())
}

/// Steps of elements of a state that are worth a task.
const TERMS: usize = 1 << 15;

fn forward<O: Element>(scan: &Scan, y: &SharedOut<O>, next: &SharedOut<f32>) {
    let SelectiveScan { batch, length, channels, state_dim } = *scan.shape;
    if scan.shape.is_empty() {
        return;
    }
    let items = scan.shape.blocks() * batch;
    let terms = [batch, length.max(1), channels, state_dim].into_iter().fold(1usize, usize::saturating_mul);
    let tasks = (terms / TERMS).clamp(1, items);
    scan.cpu.each(tasks, |task| {
        let mut room = [(); 2].map(|()| vec![0f32; scan.shape.of_state()]);
        let mut last: Option<Channels> = None;
        // The sequences of a block follow each other, because they have its rates in common.
        for item in task * items / tasks..(task + 1) * items / tasks {
            let (block, b) = (scan.shape.block(item / batch), item % batch);
            let of = match last.take() {
                Some(of) if of.channels == block => of,
                _ => scan.channels(block),
            };
            sequence(scan, &of, b, &mut room, y, next);
            last = Some(of);
        }
    });
}

/// A block of channels over all positions of a sequence.
fn sequence<O: Element>(
    scan: &Scan,
    of: &Channels,
    b: usize,
    [state, rows]: &mut [Vec<f32>; 2],
    y: &SharedOut<O>,
    next: &SharedOut<f32>,
) {
    let SelectiveScan { length, channels, state_dim, .. } = *scan.shape;
    let (first, count) = (of.channels.start, of.channels.len());
    scan.begin(scan.inputs.state, b, of, rows, state);
    let (mut steps, mut made) = (Steps::new(), [0f32; CHANNELS]);
    let [mut of_b, mut of_c] = [(); 2].map(|()| vec![0f32; state_dim]);
    for t in 0..length {
        // SAFETY: sequences, positions and blocks are disjoint.
        let y = unsafe { y.part((b * length + t) * channels + first, count) };
        if t >= scan.end(b) {
            y.fill(O::default());
            continue;
        }
        scan.steps(of, b, t, &mut steps);
        scan.shared(&scan.inputs.b, b, t, &mut of_b);
        scan.shared(&scan.inputs.c, b, t, &mut of_c);
        scan.cpu.dispatch(Position { of, steps: &steps, b: &of_b, c: &of_c, state, y: &mut made });
        convert(scan.cpu, &made[..count], y);
    }
    // SAFETY: as above.
    scan.end_with(state, rows, unsafe { next.part((b * channels + first) * state_dim, count * state_dim) });
}

/// A position of a block of channels.
struct Position<'a> {
    of: &'a Channels,
    steps: &'a Steps,
    b: &'a [f32],
    c: &'a [f32],
    /// `[N,CHANNELS]`
    state: &'a mut [f32],
    y: &'a mut [f32; CHANNELS],
}

impl Kernel for Position<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Position { of: Channels { a, d, .. }, steps: Steps { x, e, u, .. }, b, c, state, y } = self;
        for at in (0..CHANNELS).step_by(2 * S::LANES) {
            let (e, u) = (two(s, e, at), two(s, u, at));
            let mut sum = (s.splat(0.0), s.splat(0.0));
            for (n, (b, c)) in b.iter().zip(c).enumerate() {
                let (row, c) = (&mut state[n * CHANNELS + at..][..2 * S::LANES], s.splat(*c));
                let after = advance(s, [e, u, two(s, a, n * CHANNELS + at)], *b, two(s, row, 0));
                narrow_two(s, after, row, false);
                sum = (s.fma(after.0, c, sum.0), s.fma(after.1, c, sum.1));
            }
            if let Some(d) = d {
                let (d, x) = (two(s, d, at), two(s, x, at));
                sum = (s.fma(d.0, x.0, sum.0), s.fma(d.1, x.1, sum.1));
            }
            narrow_two(s, sum, &mut y[at..][..2 * S::LANES], false);
        }
    }
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("selective_scan.cu"), &[NAME]);

/// selective_scan, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, inputs) = (SelectiveScan::of(args.call), Tensors::of_call(args)?);
        run(cpu, &shape, inputs, args.output("y"), args.output("next"))
    },
    device: Some(|on, args| {
        let (shape, [y, next]) = (SelectiveScan::of(args.call), ["y", "next"].map(|name| args.output(name)));
        shape.lengths().on_device(on, args, NAME, |len| {
            typed!(args.input("x").dtype() => I, typed!(y.dtype() => O, {
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
    x: Part<'a, I>,
    dt: Part<'a, I>,
    a_log: Part<'a, I>,
    b: Part<'a, I>,
    c: Part<'a, I>,
    d: Option<Part<'a, I>>,
    dt_bias: Option<Part<'a, I>>,
    state: Option<Part<'a, f32>>,
    len: Option<&'a Indices>,
}

impl<'a, I: Stored> Parts<'a, I> {
    /// Those of a call by name.
    pub fn of_call(args: &CallArguments<'_, 'a>, op: &'static str, len: Option<&'a Indices>) -> Result<Self, Error> {
        let part = |name| args.input(name).device_part::<I>(op, name);
        let some = |name| args.optional(name).map(|x| x.device_part::<I>(op, name)).transpose();
        Ok(Parts {
            x: part("x")?,
            dt: part("dt")?,
            a_log: part("a_log")?,
            b: part("b")?,
            c: part("c")?,
            d: some("d")?,
            dt_bias: some("dt_bias")?,
            state: args.optional("state").map(|state| state.device_part(op, "state")).transpose()?,
            len,
        })
    }

    /// Buffers as they are.
    pub fn of(inputs: &DeviceInputs<'a, I>) -> Self {
        let DeviceInputs { x, dt, a_log, b, c, d, dt_bias, state, len } = *inputs;
        Parts {
            x: (x, 0),
            dt: (dt, 0),
            a_log: (a_log, 0),
            b: (b, 0),
            c: (c, 0),
            d: d.map(|d| (d, 0)),
            dt_bias: dt_bias.map(|bias| (bias, 0)),
            state: state.map(|state| (state, 0)),
            len,
        }
    }

    /// The first arguments of a kernel: the inputs and extents.
    pub fn arguments(&self, on: &Device, op: &'static str, shape: &SelectiveScan) -> Result<Arguments, Error> {
        let SelectiveScan { length, channels, state_dim, .. } = *shape;
        let arguments = [self.x, self.dt, self.a_log, self.b, self.c]
            .into_iter()
            .fold(Arguments::new(), |arguments, (buffer, at)| arguments.buffer_from(buffer, at));
        let arguments = optional(optional(optional(arguments, self.d), self.dt_bias), self.state);
        let arguments = optional_lengths(on, arguments, self.len)?.long(length);
        Ok(arguments.int(int(op, "C", channels)?).int(int(op, "N", state_dim)?))
    }
}

/// Threads of a block, each of which takes a channel.
const THREADS: usize = 128;

/// The call was checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &SelectiveScan,
    parts: &Parts<I>,
    (y, at): (&mut Buffer<O>, usize),
    (next, next_at): (&mut Buffer<f32>, usize),
) -> Result<(), Error> {
    if shape.is_empty() {
        return Ok(());
    }
    let grid = [shape.batch, shape.channels.div_ceil(THREADS), 1];
    let arguments = parts.arguments(on, NAME, shape)?.buffer_from(y, at).buffer_from(next, next_at);
    // SAFETY: lengths were checked, and these are the kernel's arguments.
    unsafe { on.launch(Build::of::<I, O>(NAME), NAME, grid, THREADS as u32, 0, &arguments) }
}

/// What a scan reads on a device; as [`SelectiveInputs`].
#[derive(Clone, Copy)]
pub struct DeviceInputs<'a, I> {
    /// `x[B,T,C]`.
    pub x: &'a Buffer<I>,
    /// `dt[B,T,C]`.
    pub dt: &'a Buffer<I>,
    /// `a_log[C,N]`.
    pub a_log: &'a Buffer<I>,
    /// `b[B,T,N]`.
    pub b: &'a Buffer<I>,
    /// `c[B,T,N]`.
    pub c: &'a Buffer<I>,
    /// `d[C]`.
    pub d: Option<&'a Buffer<I>>,
    /// `dt_bias[C]`.
    pub dt_bias: Option<&'a Buffer<I>>,
    /// `state[B,C,N]`.
    pub state: Option<&'a Buffer<f32>>,
    /// Positions of each sequence.
    pub len: Option<&'a Indices>,
}

impl<I: Stored> DeviceInputs<'_, I> {
    /// Checks them.
    pub(super) fn check(&self, op: &'static str, shape: &SelectiveScan) -> Result<(), Error> {
        let lens = [self.x, self.dt, self.a_log, self.b, self.c].map(Buffer::len);
        shape.check_inputs(
            op,
            lens,
            [self.d.map(Buffer::len), self.dt_bias.map(Buffer::len), self.state.map(Buffer::len)],
        )?;
        shape.lengths().check_indices(op, self.len)
    }
}

/// [`selective_scan`] on a device.
///
/// # Errors
/// As [`selective_scan`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &SelectiveScan,
    inputs: &DeviceInputs<I>,
    y: &mut Buffer<O>,
    next: &mut Buffer<f32>,
) -> Result<(), Error> {
    inputs.check(NAME, shape)?;
    check_outputs(shape, y.len(), next.len())?;
    launch(on, shape, &Parts::of(inputs), (y, 0), (next, 0))
}
