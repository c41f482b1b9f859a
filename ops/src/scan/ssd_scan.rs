//! The scan of Mamba-2: `x[B,T,H,P], dt[B,T,H], a_log[H], b[B,T,G,N], c[B,T,G,N], d[H]?, dt_bias[H]?, state[B,H,P,N]? (f32),
//! len[B]? -> y[B,T,H,P], next[B,H,P,N]` (f32).
//!
//! Formula: `s = exp(e A) s + e x b`, `y = s c + d x`, with `e = softplus(dt + dt_bias)` within limits and `A = -exp(a_log)`;
//! `next` is s behind the last position.
//! Order: positions ascending. `s = fma(exp(e * A), s, (e * x) * b)`; y is lanes over n of `s * c`, each lane a chain, then
//! `fma(d, x, y)`. Without a state it begins with +0, which is a term as all others.
//! Rounding: every step once to f32, softplus once from f64; last rounding. A state is f32.
//! Special: positions behind `len` are not read, and their y is +0.

use super::ssd::{Scan, ScanInputs, SsdScan, Step, Tensors, advance, lanes_of};
use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit, int};
use crate::call::{Arguments as CallArguments, Entry};
use crate::conv::causal_conv1d::{Part, optional};
use crate::element::{Stored, typed};
use crate::lengths::optional_lengths;
use crate::parallel::SharedOut;
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, TensorMut, check_len};
use std::ops::Range;

const NAME: &str = "ssd_scan";

/// Every head's state over the positions of its sequence, and what is read of it: `y[B,T,H,P]` and `next[B,H,P,N]`. A sequence
/// in pieces, each with the `next` of the one before as its state, has the bits of the whole.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] for heads that are no multiple of the groups, limits of
/// steps that do not ascend, or a length beyond T.
///
/// ```
/// use samebits_ops::{Cpu, ScanInputs, SsdScan, ssd_scan};
///
/// // A step of 1 halves the state: exp(-exp(a_log)) = 1/2.
/// let shape = SsdScan {
///     batch: 1, length: 2, heads: 1, head_dim: 1, groups: 1, state_dim: 1, dt_min: 1.0, dt_max: 1.0,
/// };
/// let inputs = ScanInputs {
///     x: &[8f32, 4.0], dt: &[0.0, 0.0], a_log: &[2f32.ln().ln()], b: &[1.0, 1.0], c: &[1.0, 1.0], d: None,
///     dt_bias: None, state: Some(&[4.0]), len: None,
/// };
/// let (mut y, mut next) = ([0f32; 2], [0f32; 1]);
/// ssd_scan(&Cpu::best(), &shape, &inputs, &mut y, &mut next)?;
/// assert!((y[0] - 10.0).abs() < 1e-5 && (y[1] - 9.0).abs() < 1e-5 && next[0] == y[1]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn ssd_scan<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &SsdScan,
    inputs: &ScanInputs<I>,
    y: &mut [O],
    next: &mut [f32],
) -> Result<(), Error> {
    let tensors = Tensors::of(NAME, shape, inputs)?;
    check_outputs(shape, y.len(), next.len())?;
    let (of_x, .., of_state) = shape.extents();
    run(cpu, shape, tensors, TensorMut::of(y, &of_x), TensorMut::of(next, &of_state))
}

fn check_outputs(shape: &SsdScan, y: usize, next: usize) -> Result<(), Error> {
    let (of_x, .., of_state) = shape.extents();
    check_len(NAME, "y", "[B,T,H,P]", y, &of_x)?;
    check_len(NAME, "next", "[B,H,P,N]", next, &of_state)
}

/// The form of the call has been checked.
fn run(cpu: &Cpu, shape: &SsdScan, inputs: Tensors, y: TensorMut, next: TensorMut) -> Result<(), Error> {
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
    let SsdScan { length, head_dim, .. } = *scan.shape;
    let units = scan.shape.units();
    if scan.shape.is_empty() || head_dim == 0 {
        return;
    }
    // Few heads are cut, so that every thread has some rows of a state.
    let pieces = (4 * scan.cpu.threads()).div_ceil(units).clamp(1, head_dim);
    let (items, terms) = (units * pieces, units.saturating_mul(length).saturating_mul(scan.shape.of_state()));
    let tasks = (terms / TERMS).clamp(1, items);
    scan.cpu.each(tasks, |task| {
        for item in task * items / tasks..(task + 1) * items / tasks {
            let (unit, piece) = (item / pieces, item % pieces);
            part(scan, unit, piece * head_dim / pieces..(piece + 1) * head_dim / pieces, y, next);
        }
    });
}

/// Some rows of the state of a unit, over all positions.
fn part<O: Element>(scan: &Scan, unit: usize, rows: Range<usize>, y: &SharedOut<O>, next: &SharedOut<f32>) {
    let SsdScan { length, heads, head_dim, state_dim, .. } = *scan.shape;
    let ((b, h), inputs) = (scan.place(unit), &scan.inputs);
    // SAFETY: units and pieces of them are disjoint.
    let state = unsafe { next.part((unit * head_dim + rows.start) * state_dim, rows.len() * state_dim) };
    scan.begin(inputs.state, b, h, rows.clone(), state);
    let ([mut x, mut made], [mut of_b, mut of_c]) =
        ([(); 2].map(|()| vec![0f32; rows.len()]), [(); 2].map(|()| vec![0f32; state_dim]));
    for t in 0..length {
        let at = ((b * length + t) * heads + h) * head_dim + rows.start;
        // SAFETY: as above, and positions are disjoint.
        let y = unsafe { y.part(at, rows.len()) };
        if t >= scan.end(b) {
            y.fill(O::default());
            continue;
        }
        scan.row(&inputs.x, b, t, h, rows.clone(), &mut x);
        scan.row(&inputs.b, b, t, scan.group(h), 0..state_dim, &mut of_b);
        scan.row(&inputs.c, b, t, scan.group(h), 0..state_dim, &mut of_c);
        let (step, d) = (scan.step(b, t, h), scan.d(h));
        scan.cpu.dispatch(Position { step, d, x: &x, b: &of_b, c: &of_c, state, y: &mut made });
        convert(scan.cpu, &made, y);
    }
}

/// A position of some rows of a head's state.
struct Position<'a> {
    step: Step,
    d: Option<f32>,
    /// An element for each row.
    x: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
    /// The rows, one behind the other.
    state: &'a mut [f32],
    /// As x.
    y: &'a mut [f32],
}

impl Kernel for Position<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Position { step: Step { e, k, .. }, d, x, b, c, state, y } = self;
        let n = b.len();
        for (p, (x, y)) in x.iter().zip(&mut *y).enumerate() {
            let row = &mut state[p * n..][..n];
            advance(s, k, e * x, b, row);
            *y = lanes_of(s, row, c);
        }
        let Some(d) = d else { return };
        for at in (0..y.len()).step_by(S::LANES) {
            narrow_at(s, s.fma(s.splat(d), load_at(s, x, at, 0.0), load_at(s, y, at, 0.0)), y, at);
        }
    }
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("ssd_scan.cu"), &[NAME]);

/// ssd_scan, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, inputs) = (SsdScan::of(args.call), Tensors::of_call(args)?);
        run(cpu, &shape, inputs, args.output("y"), args.output("next"))
    },
    device: Some(|on, args| {
        let (shape, [y, next]) = (SsdScan::of(args.call), ["y", "next"].map(|name| args.output(name)));
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
    pub x: Part<'a, I>,
    pub dt: Part<'a, I>,
    pub a_log: Part<'a, I>,
    pub b: Part<'a, I>,
    pub c: Part<'a, I>,
    pub d: Option<Part<'a, I>>,
    pub dt_bias: Option<Part<'a, I>>,
    pub state: Option<Part<'a, f32>>,
    pub len: Option<&'a Indices>,
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

    /// The first arguments of a kernel: the inputs, extents and limits.
    pub fn arguments(&self, on: &Device, op: &'static str, shape: &SsdScan) -> Result<Arguments, Error> {
        let SsdScan { length, heads, head_dim, groups, state_dim, dt_min, dt_max, .. } = *shape;
        let arguments = [self.x, self.dt, self.a_log, self.b, self.c]
            .into_iter()
            .fold(Arguments::new(), |arguments, (buffer, at)| arguments.buffer_from(buffer, at));
        let arguments = optional(optional(optional(arguments, self.d), self.dt_bias), self.state);
        let arguments = optional_lengths(on, arguments, self.len)?.long(length).int(int(op, "H", heads)?);
        let arguments = arguments.int(int(op, "P", head_dim)?).int(int(op, "G", groups)?).int(int(op, "N", state_dim)?);
        Ok(arguments.float(dt_min as f32).float(dt_max as f32))
    }
}

/// Warps of a block, each of which takes a row of a state.
const ROWS: usize = 8;

/// The call was checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &SsdScan,
    parts: &Parts<I>,
    (y, at): (&mut Buffer<O>, usize),
    (next, next_at): (&mut Buffer<f32>, usize),
) -> Result<(), Error> {
    let grid = [shape.units(), shape.head_dim.div_ceil(ROWS), 1];
    if shape.is_empty() || shape.head_dim == 0 {
        return Ok(());
    }
    let arguments = parts.arguments(on, NAME, shape)?.buffer_from(y, at).buffer_from(next, next_at);
    // SAFETY: lengths were checked, and these are the kernel's arguments.
    unsafe { on.launch(Build::of::<I, O>(NAME), NAME, grid, 32 * ROWS as u32, 0, &arguments) }
}

/// What a scan reads on a device; as [`ScanInputs`].
#[derive(Clone, Copy)]
pub struct DeviceInputs<'a, I> {
    /// `x[B,T,H,P]`.
    pub x: &'a Buffer<I>,
    /// `dt[B,T,H]`.
    pub dt: &'a Buffer<I>,
    /// `a_log[H]`.
    pub a_log: &'a Buffer<I>,
    /// `b[B,T,G,N]`.
    pub b: &'a Buffer<I>,
    /// `c[B,T,G,N]`.
    pub c: &'a Buffer<I>,
    /// `d[H]`.
    pub d: Option<&'a Buffer<I>>,
    /// `dt_bias[H]`.
    pub dt_bias: Option<&'a Buffer<I>>,
    /// `state[B,H,P,N]`.
    pub state: Option<&'a Buffer<f32>>,
    /// Positions of each sequence.
    pub len: Option<&'a Indices>,
}

impl<I: Stored> DeviceInputs<'_, I> {
    /// Checks them.
    pub(super) fn check(&self, op: &'static str, shape: &SsdScan) -> Result<(), Error> {
        let lens = [self.x, self.dt, self.a_log, self.b, self.c].map(Buffer::len);
        shape.check_inputs(
            op,
            lens,
            [self.d.map(Buffer::len), self.dt_bias.map(Buffer::len), self.state.map(Buffer::len)],
        )?;
        shape.lengths().check_indices(op, self.len)
    }
}

/// [`ssd_scan`] on a device.
///
/// # Errors
/// As [`ssd_scan`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &SsdScan,
    inputs: &DeviceInputs<I>,
    y: &mut Buffer<O>,
    next: &mut Buffer<f32>,
) -> Result<(), Error> {
    inputs.check(NAME, shape)?;
    check_outputs(shape, y.len(), next.len())?;
    launch(on, shape, &Parts::of(inputs), (y, 0), (next, 0))
}
