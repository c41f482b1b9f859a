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
use crate::reduce::LANES;
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
    // A scan of few positions is not worth turning the state.
    let mut turned = (scan.end(b) >= TURNED).then(|| Turned::new(state, state_dim));
    let padded = rows.len().next_multiple_of(WIDE);
    let ([mut x, mut made], [mut of_b, mut of_c]) =
        ([(); 2].map(|()| vec![0f32; padded]), [(); 2].map(|()| vec![0f32; state_dim]));
    for t in 0..length {
        let at = ((b * length + t) * heads + h) * head_dim + rows.start;
        // SAFETY: as above, and positions are disjoint.
        let y = unsafe { y.part(at, rows.len()) };
        if t >= scan.end(b) {
            y.fill(O::default());
            continue;
        }
        scan.row(&inputs.x, b, t, h, rows.clone(), &mut x[..rows.len()]);
        scan.row(&inputs.b, b, t, scan.group(h), 0..state_dim, &mut of_b);
        scan.row(&inputs.c, b, t, scan.group(h), 0..state_dim, &mut of_c);
        let (step, d) = (scan.step(b, t, h), scan.d(h));
        match &mut turned {
            Some(turned) => scan.cpu.dispatch(Across { step, x: &x, b: &of_b, c: &of_c, turned, y: &mut made }),
            None => {
                let (x, y) = (&x[..rows.len()], &mut made[..rows.len()]);
                scan.cpu.dispatch(Position { step, x, b: &of_b, c: &of_c, state, y });
            }
        }
        if let Some(d) = d {
            scan.cpu.dispatch(Pass { d, x: &x, y: &mut made });
        }
        convert(scan.cpu, &made[..rows.len()], y);
    }
    if let Some(turned) = turned {
        turned.back(state);
    }
}

/// Positions from which on it pays to turn a state.
const TURNED: usize = 3;

/// Rows of a state that stand side by side when it is turned: as many as the widest vector has lanes.
const WIDE: usize = 16;

/// Rows of a state, turned: of 16 of them the first elements, then the second ones, and so on; then the next 16. A vector has an
/// element of each of some rows, and nothing is added across its lanes.
struct Turned {
    n: usize,
    state: Vec<f32>,
    /// The lanes of the sums of 16 rows.
    lanes: Vec<f32>,
}

impl Turned {
    /// Rows of n elements.
    fn new(rows: &[f32], n: usize) -> Turned {
        let count = rows.len() / n.max(1);
        let mut state = vec![0f32; count.next_multiple_of(WIDE) * n];
        for (p, row) in rows.chunks_exact(n.max(1)).enumerate() {
            let place = p / WIDE * WIDE * n + p % WIDE;
            state[place..].iter_mut().step_by(WIDE).zip(row).for_each(|(to, value)| *to = *value);
        }
        Turned { n, state, lanes: vec![0f32; LANES * WIDE] }
    }

    /// The rows as they were.
    fn back(&self, rows: &mut [f32]) {
        for (p, row) in rows.chunks_exact_mut(self.n.max(1)).enumerate() {
            let place = p / WIDE * WIDE * self.n + p % WIDE;
            row.iter_mut().zip(self.state[place..].iter().step_by(WIDE)).for_each(|(to, value)| *to = *value);
        }
    }
}

/// A position of rows that are turned.
struct Across<'a> {
    step: Step,
    /// An element for each row, and some for the rest of the last 16.
    x: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
    turned: &'a mut Turned,
    /// As x.
    y: &'a mut [f32],
}

impl Kernel for Across<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Across { step: Step { e, k, .. }, x, b, c, turned, y } = self;
        let Turned { n, state, lanes } = turned;
        let (n, k, zero) = (*n, s.splat(k), s.splat(0.0));
        for at in (0..x.len()).step_by(S::LANES) {
            let u = s.mul(s.splat(e), load_at(s, x, at, 0.0));
            let state = &mut state[at / WIDE * WIDE * n..][..WIDE * n];
            let within = at % WIDE;
            let mut width = n.min(LANES);
            if (4..=LANES).contains(&n) && n.is_power_of_two() {
                // The first two levels of the sum of lanes, on the way.
                width = n / 4;
                for j in 0..width {
                    let mut four = [zero; 4];
                    for (i, product) in four.iter_mut().enumerate() {
                        let j = j + i * width;
                        *product = across(s, (k, u), (b[j], c[j]), &mut state[j * WIDE + within..], zero);
                    }
                    let [first, second, third, fourth] = four;
                    put(s, s.add(s.add(first, third), s.add(second, fourth)), &mut lanes[j * WIDE..]);
                }
            } else {
                for j in 0..n {
                    let lane = &mut lanes[j % LANES * WIDE..];
                    let before = if j < LANES { zero } else { load_at(s, lane, 0, 0.0) };
                    put(s, across(s, (k, u), (b[j], c[j]), &mut state[j * WIDE + within..], before), lane);
                }
            }
            while width > 1 {
                let half = width.next_power_of_two() / 2;
                for l in 0..width - half {
                    let sum = s.add(load_at(s, lanes, l * WIDE, 0.0), load_at(s, lanes, (l + half) * WIDE, 0.0));
                    put(s, sum, &mut lanes[l * WIDE..]);
                }
                width = half;
            }
            let sum = if n == 0 { zero } else { load_at(s, lanes, 0, 0.0) };
            // What has no element is +0 and is a term.
            let sum = if n < LANES { s.add(sum, zero) } else { sum };
            put(s, sum, &mut y[at..]);
        }
    }
}

/// Takes an element of some rows over a step, and adds its product with c to a lane.
#[inline(always)]
fn across<S: Simd>(s: S, (k, u): (S::F, S::F), (b, c): (f32, f32), state: &mut [f32], lane: S::F) -> S::F {
    let after = s.fma(k, load_at(s, state, 0, 0.0), s.mul(u, s.splat(b)));
    narrow_at(s, after, state, 0);
    s.fma(after, s.splat(c), lane)
}

/// Stores a vector as it is.
#[inline(always)]
fn put<S: Simd>(s: S, v: S::F, to: &mut [f32]) {
    let to = &mut to[..S::LANES];
    // SAFETY: `to` has LANES elements.
    unsafe { s.store(v, to.as_mut_ptr()) };
}

/// What passes a state by: `y = fma(d, x, y)`.
struct Pass<'a> {
    d: f32,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for Pass<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Pass { d, x, y } = self;
        for at in (0..y.len()).step_by(S::LANES) {
            narrow_at(s, s.fma(s.splat(d), load_at(s, x, at, 0.0), load_at(s, y, at, 0.0)), y, at);
        }
    }
}

/// A position of some rows of a head's state.
struct Position<'a> {
    step: Step,
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
        let Position { step: Step { e, k, .. }, x, b, c, state, y } = self;
        let n = b.len();
        for (p, (x, y)) in x.iter().zip(&mut *y).enumerate() {
            let row = &mut state[p * n..][..n];
            advance(s, k, e * x, b, row);
            *y = lanes_of(s, row, c);
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
