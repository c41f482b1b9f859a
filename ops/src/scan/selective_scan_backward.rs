//! Gradient of the scan of Mamba: the inputs of [`selective_scan`](crate::selective_scan), `dy[B,T,C], dnext[B,C,N]? (f32) ->
//! dx[B,T,C], ddt[B,T,C], db[B,T,N], dc[B,T,N], da_log[B,C,N], dd[B,C], dstate[B,C,N]` (the last three f32).
//!
//! Formula: g is the gradient of the state behind a position, `g_t = dy c + m`, and `m = exp(e A) g` what it leaves to the one
//! before. `dx = e q + d dy` with `q = sum of g b`, `db = sum of g e x`, `dc = sum of s dy`, and of the exponents `e A` it is
//! `z = m s_(t-1)`.
//! Order: positions descending, of which da_log and dd are chains. Sums over n are chains, ascending. db and dc: lanes over the 64
//! channels of a block, blocks added ascending from +0.
//! Rounding: every step once to f32; last rounding of dx, ddt, db and dc.
//! Special: positions behind `len` are not read, and their gradients are +0.
//!
//! Blocks of channels are the units of `reverse.rs`.

use super::reverse::{self, At, Room, Slot, Units, stretch, there_and_back};
use super::selective::{
    CHANNELS, Channels, Scan, SelectiveInputs, SelectiveScan, Steps, Tensors, Two, advance, left, turn, two,
};
use super::selective_scan::{DeviceInputs, Parts};
use crate::backend::device::{Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::conv::causal_conv1d::{Part as DevicePart, optional};
use crate::element::{Stored, typed};
use crate::math::sigmoid;
use crate::parallel::SharedOut;
use crate::simd::{Kernel, MAX_LANES, Simd, load_at, narrow_at, narrow_two};
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

const NAME: &str = "selective_scan_backward";

/// The gradients of what a scan returned.
#[derive(Clone, Copy, Debug)]
pub struct SelectiveOutputGradients<'a, I> {
    /// `dy[B,T,C]`.
    pub dy: &'a [I],
    /// `dnext[B,C,N]`; +0 where it is left out.
    pub dnext: Option<&'a [f32]>,
}

/// The gradients that [`selective_scan_backward`] makes, row-major: `SelectiveGradients<[O], [f32]>` are slices, buffers stand on a
/// device.
#[derive(Debug)]
pub struct SelectiveGradients<'a, Y: ?Sized, F: ?Sized> {
    /// `dx[B,T,C]`.
    pub dx: &'a mut Y,
    /// `ddt[B,T,C]`; by `token_sum` that of `dt_bias`.
    pub ddt: &'a mut Y,
    /// `db[B,T,N]`.
    pub db: &'a mut Y,
    /// `dc[B,T,N]`.
    pub dc: &'a mut Y,
    /// `da_log[B,C,N]`; by `token_sum` of sequences the gradient of `a_log`.
    pub da_log: &'a mut F,
    /// `dd[B,C]`; by `token_sum` of sequences the gradient of `d`.
    pub dd: &'a mut F,
    /// `dstate[B,C,N]`.
    pub dstate: &'a mut F,
}

/// The gradients of [`selective_scan`](crate::selective_scan)'s inputs from those of its outputs. The workspace grows with `T * N`
/// for each 64 channels that are worked on.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] as [`selective_scan`](crate::selective_scan);
/// [`Error::Budget`] below what one block of channels needs.
///
/// ```
/// use samebits_ops::{
///     Cpu, SelectiveGradients, SelectiveInputs, SelectiveOutputGradients, SelectiveScan, selective_scan_backward,
/// };
///
/// // Steps of 20 that leave nothing of a state.
/// let shape = SelectiveScan { batch: 1, length: 1, channels: 1, state_dim: 1 };
/// let inputs = SelectiveInputs {
///     x: &[8f32], dt: &[20.0], a_log: &[4.0], b: &[3.0], c: &[2.0], d: Some(&[5.0]), dt_bias: None, state: None, len: None,
/// };
/// let ([mut dx, mut ddt, mut db, mut dc], [mut a, mut d, mut dstate]) = ([[0f32]; 4], [[0f32]; 3]);
/// let gradients = SelectiveGradients {
///     dx: &mut dx[..], ddt: &mut ddt, db: &mut db, dc: &mut dc, da_log: &mut a[..], dd: &mut d, dstate: &mut dstate,
/// };
/// let given = SelectiveOutputGradients { dy: &[1f32], dnext: None };
/// selective_scan_backward(&Cpu::best(), &shape, &inputs, &given, gradients)?;
/// assert_eq!(([dx, db, dc], d), ([[125.0], [320.0], [480.0]], [8.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn selective_scan_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &SelectiveScan,
    inputs: &SelectiveInputs<I>,
    given: &SelectiveOutputGradients<I>,
    gradients: SelectiveGradients<[O], [f32]>,
) -> Result<(), Error> {
    let tensors = Tensors::of(NAME, shape, inputs)?;
    let SelectiveGradients { dx, ddt, db, dc, da_log, dd, dstate } = gradients;
    let lens = [dx.len(), ddt.len(), db.len(), dc.len(), da_log.len(), dd.len(), dstate.len()];
    check(shape, given.dy.len(), given.dnext.map(<[f32]>::len), lens)?;
    let (of_x, of_b, _, of_state) = shape.extents();
    let dnext = given.dnext.map(|dnext| TensorRef::of(dnext, &of_state));
    let made = [
        TensorMut::of(dx, &of_x),
        TensorMut::of(ddt, &of_x),
        TensorMut::of(db, &of_b),
        TensorMut::of(dc, &of_b),
        TensorMut::of(da_log, &of_state),
        TensorMut::of(dd, &of_state[..2]),
        TensorMut::of(dstate, &of_state),
    ];
    run(cpu, shape, tensors, TensorRef::of(given.dy, &of_x), dnext, made)
}

/// Checks how many elements there are of dy, of dnext where it is given, and of the outputs in their order.
fn check(shape: &SelectiveScan, dy: usize, dnext: Option<usize>, outputs: [usize; 7]) -> Result<(), Error> {
    let (of_x, of_b, _, of_state) = shape.extents();
    let [dx, ddt, db, dc, da_log, dd, dstate] = outputs;
    check_len(NAME, "dy", "[B,T,C]", dy, &of_x)?;
    dnext.map_or(Ok(()), |dnext| check_len(NAME, "dnext", "[B,C,N]", dnext, &of_state))?;
    check_len(NAME, "dx", "[B,T,C]", dx, &of_x)?;
    check_len(NAME, "ddt", "[B,T,C]", ddt, &of_x)?;
    check_len(NAME, "db", "[B,T,N]", db, &of_b)?;
    check_len(NAME, "dc", "[B,T,N]", dc, &of_b)?;
    check_len(NAME, "da_log", "[B,C,N]", da_log, &of_state)?;
    check_len(NAME, "dd", "[B,C]", dd, &of_state[..2])?;
    check_len(NAME, "dstate", "[B,C,N]", dstate, &of_state)
}

/// The outputs, in the order in which the form of the op has them.
const OUTPUTS: [&str; 7] = ["dx", "ddt", "db", "dc", "da_log", "dd", "dstate"];

/// Blocks of channels as units; besides states a block keeps a state as it is stored, da_log, products for db and dc, and b and c.
fn units(shape: &SelectiveScan) -> Units {
    let SelectiveScan { batch, length, state_dim, .. } = *shape;
    let (state, rows) = (shape.of_state(), 4 * shape.of_state() + 2 * state_dim);
    Units { batch, length, count: shape.blocks(), groups: 1, state_dim, state, rows }
}

/// The form of the call has been checked.
fn run(
    cpu: &Cpu,
    shape: &SelectiveScan,
    inputs: Tensors,
    dy: TensorRef,
    dnext: Option<TensorRef>,
    [dx, ddt, db, dc, da_log, dd, dstate]: [TensorMut; 7],
) -> Result<(), Error> {
    dy.on_host(NAME, "dy")?;
    dnext.map_or(Ok(()), |dnext| dnext.on_host(NAME, "dnext"))?;
    let scan = Scan::new(cpu, NAME, shape, inputs)?;
    typed!(dx.dtype() => O, {
        let made = Made::<O> {
            dx: SharedOut::new(dx.host(NAME, "dx")?),
            ddt: SharedOut::new(ddt.host(NAME, "ddt")?),
            da_log: SharedOut::new(da_log.host(NAME, "da_log")?),
            dd: SharedOut::new(dd.host(NAME, "dd")?),
            dstate: SharedOut::new(dstate.host(NAME, "dstate")?),
        };
        let [db, dc] = [db.host::<O>(NAME, "db")?, dc.host::<O>(NAME, "dc")?];
        if shape.channels == 0 {
            // Sums over no channels.
            [&mut *db, &mut *dc].into_iter().for_each(|sum| sum.fill(O::default()));
        }
        if shape.is_empty() {
            return Ok(());
        }
        let sums = [SharedOut::new(db), SharedOut::new(dc)];
        let reverse = Reverse { scan: &scan, dy, dnext };
        let unit = |unit: usize, slot: Slot, part: &mut [f32]| reverse.unit(unit, slot, part, &made);
        reverse::run(cpu, NAME, units(shape), &|b| scan.end(b), &unit, &sums)
    })
}

/// What every channel makes by itself.
struct Made<'a, O> {
    dx: SharedOut<'a, O>,
    ddt: SharedOut<'a, O>,
    da_log: SharedOut<'a, f32>,
    dd: SharedOut<'a, f32>,
    dstate: SharedOut<'a, f32>,
}

/// A call on the processor.
struct Reverse<'a> {
    scan: &'a Scan<'a>,
    dy: TensorRef<'a>,
    dnext: Option<TensorRef<'a>>,
}

impl Reverse<'_> {
    /// All positions of a block of channels: what these make by themselves, and the block's part of db and dc.
    fn unit<O: Element>(&self, unit: usize, slot: Slot, part: &mut [f32], made: &Made<O>) {
        let (scan, cpu) = (self.scan, self.scan.cpu);
        let SelectiveScan { length, channels, state_dim: n, .. } = *scan.shape;
        let (b, size) = (unit / scan.shape.blocks(), scan.shape.of_state());
        let of = scan.channels(scan.shape.block(unit % scan.shape.blocks()));
        let (end, first, count) = (scan.end(b), of.channels.start, of.channels.len());
        let Slot { rows, kept, run, g: m } = slot;
        let (stored, rest) = rows.split_at_mut(size);
        let (da_log, rest) = rest.split_at_mut(size);
        let (products, shared) = rest.split_at_mut(2 * size);
        let (of_b, of_c) = shared.split_at_mut(n);
        let (part_b, part_c) = part.split_at_mut(length * n);
        let mut steps = Steps::new();
        scan.begin(scan.inputs.state, b, &of, stored, &mut run[..size]);
        scan.begin(self.dnext, b, &of, stored, m);
        da_log.fill(0.0);
        let [mut dy, mut dd] = [[0f32; CHANNELS]; 2];
        there_and_back([length, end, size], kept, run, |at| match at {
            At::Over(t, state) => {
                scan.steps(&of, b, t, &mut steps);
                scan.shared(&scan.inputs.b, b, t, of_b);
                cpu.dispatch(Advance { a: &of.a, steps: &steps, b: of_b, state });
            }
            At::Back(t, states) => {
                scan.steps(&of, b, t, &mut steps);
                scan.row(&self.dy, b, t, &of.channels, &mut dy);
                scan.shared(&scan.inputs.b, b, t, of_b);
                scan.shared(&scan.inputs.c, b, t, of_c);
                let [mut dx, mut ddt] = [[0f32; CHANNELS]; 2];
                cpu.dispatch(Position {
                    of: &of,
                    steps: &steps,
                    dy: &dy,
                    b: of_b,
                    c: of_c,
                    states,
                    m,
                    da_log,
                    dd: &mut dd,
                    dx: &mut dx,
                    ddt: &mut ddt,
                    products,
                    turned: stored,
                    sums: [&mut part_b[t * n..][..n], &mut part_c[t * n..][..n]],
                });
                let at = (b * length + t) * channels + first;
                // SAFETY: units and positions are disjoint.
                unsafe {
                    convert(cpu, &dx[..count], made.dx.part(at, count));
                    convert(cpu, &ddt[..count], made.ddt.part(at, count));
                }
            }
        });
        // SAFETY: units are disjoint.
        unsafe {
            let at = b * channels + first;
            scan.end_with(da_log, stored, made.da_log.part(at * n, count * n));
            scan.end_with(m, stored, made.dstate.part(at * n, count * n));
            convert(cpu, &dd[..count], made.dd.part(at, count));
        }
        for t in end..length {
            let at = (b * length + t) * channels + first;
            // SAFETY: as above, and positions are disjoint.
            [&made.dx, &made.ddt].into_iter().for_each(|made| unsafe { made.part(at, count) }.fill(O::default()));
        }
    }
}

/// The states of a block over one step.
struct Advance<'a> {
    a: &'a [f32],
    steps: &'a Steps,
    b: &'a [f32],
    state: &'a mut [f32],
}

impl Kernel for Advance<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..CHANNELS).step_by(2 * S::LANES) {
            let (e, u) = (two(s, &self.steps.e, at), two(s, &self.steps.u, at));
            for (n, b) in self.b.iter().enumerate() {
                let row = &mut self.state[n * CHANNELS + at..][..2 * S::LANES];
                let after = advance(s, [e, u, two(s, self.a, n * CHANNELS + at)], *b, two(s, row, 0));
                narrow_two(s, after, row, false);
            }
        }
    }
}

/// A position of a block of channels: m from the one behind to its own, and what that makes.
struct Position<'a> {
    of: &'a Channels,
    steps: &'a Steps,
    dy: &'a [f32; CHANNELS],
    b: &'a [f32],
    c: &'a [f32],
    /// The states before and behind it.
    states: [&'a [f32]; 2],
    m: &'a mut [f32],
    da_log: &'a mut [f32],
    dd: &'a mut [f32; CHANNELS],
    dx: &'a mut [f32; CHANNELS],
    ddt: &'a mut [f32; CHANNELS],
    /// Room for the terms of db and dc, and for their lanes.
    products: &'a mut [f32],
    turned: &'a mut [f32],
    /// db and dc.
    sums: [&'a mut [f32]; 2],
}

impl Kernel for Position<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for at in (0..CHANNELS).step_by(2 * S::LANES) {
            self.channels(s, at);
        }
        let (size, count) = (self.m.len(), self.of.channels.len());
        let Position { products, turned, sums, .. } = self;
        for (products, sums) in products.chunks_exact_mut(size.max(1)).zip(sums) {
            fold(s, products, count, turned, sums);
        }
    }
}

impl Position<'_> {
    /// Two vectors of channels.
    #[inline(always)]
    fn channels<S: Simd>(&mut self, s: S, at: usize) {
        let Steps { x, v, e, u } = self.steps;
        let (x, e, u, dy) = (two(s, x, at), two(s, e, at), two(s, u, at), two(s, self.dy, at));
        let (none, two_lanes) = (s.splat(0.0), 2 * S::LANES);
        let (mut q, mut of_a) = ((none, none), (none, none));
        let (of_b, of_c) = self.products.split_at_mut(self.m.len());
        for (n, (b, c)) in self.b.iter().zip(self.c).enumerate() {
            let here = n * CHANNELS + at;
            let (a, b, c, m) = (two(s, &self.of.a, here), s.splat(*b), s.splat(*c), two(s, self.m, here));
            let g = (s.fma(dy.0, c, m.0), s.fma(dy.1, c, m.1));
            q = (s.fma(g.0, b, q.0), s.fma(g.1, b, q.1));
            let (k, before) = (left(s, e, a), two(s, self.states[0], here));
            let m = (s.mul(k.0, g.0), s.mul(k.1, g.1));
            let z = (s.mul(m.0, before.0), s.mul(m.1, before.1));
            of_a = (s.fma(a.0, z.0, of_a.0), s.fma(a.1, z.1, of_a.1));
            narrow_two(s, m, &mut self.m[here..][..two_lanes], false);
            let da_log = &mut self.da_log[here..][..two_lanes];
            let sum: Two<S> = two(s, da_log, 0);
            let sum = (s.fma(s.mul(e.0, a.0), z.0, sum.0), s.fma(s.mul(e.1, a.1), z.1, sum.1));
            narrow_two(s, sum, da_log, false);
            let terms = (s.fma(g.0, u.0, none), s.fma(g.1, u.1, none));
            narrow_two(s, terms, &mut of_b[here..][..two_lanes], false);
            let after = two(s, self.states[1], here);
            let terms = (s.fma(after.0, dy.0, none), s.fma(after.1, dy.1, none));
            narrow_two(s, terms, &mut of_c[here..][..two_lanes], false);
        }
        let w = (s.fma(q.0, x.0, of_a.0), s.fma(q.1, x.1, of_a.1));
        let v = two(s, v, at);
        let ddt = (s.mul(w.0, sigmoid(s, v.0)), s.mul(w.1, sigmoid(s, v.1)));
        narrow_two(s, ddt, &mut self.ddt[at..][..two_lanes], false);
        let mut dx = (s.mul(e.0, q.0), s.mul(e.1, q.1));
        if let Some(d) = &self.of.d {
            let d = two(s, d, at);
            dx = (s.fma(d.0, dy.0, dx.0), s.fma(d.1, dy.1, dx.1));
        }
        narrow_two(s, dx, &mut self.dx[at..][..two_lanes], false);
        let dd = &mut self.dd[at..][..two_lanes];
        let sum = two(s, dd, 0);
        narrow_two(s, (s.fma(dy.0, x.0, sum.0), s.fma(dy.1, x.1, sum.1)), dd, false);
    }
}

/// The lanes of each row of `products[N,CHANNELS]`, of which `count` have a channel, folded to an element of `sums`.
#[inline(always)]
fn fold<S: Simd>(s: S, products: &mut [f32], count: usize, turned: &mut [f32], sums: &mut [f32]) {
    let n = sums.len();
    for row in products.chunks_exact_mut(CHANNELS) {
        row[count..].fill(0.0);
        let mut h = CHANNELS / 2;
        while h >= S::LANES {
            for l in (0..h).step_by(S::LANES) {
                narrow_at(s, s.add(load_at(s, row, l, 0.0), load_at(s, row, l + h, 0.0)), row, l);
            }
            h /= 2;
        }
    }
    // Lanes that are fewer than a vector has meet as rows of their own.
    let lanes = &mut turned[..n * S::LANES.min(MAX_LANES)];
    turn(s, products, [n, S::LANES], CHANNELS, lanes);
    let mut h = S::LANES / 2;
    while h > 0 {
        for l in 0..h {
            let (own, other) = lanes.split_at_mut((l + h) * n);
            let (own, other) = (&mut own[l * n..][..n], &other[..n]);
            for at in (0..n).step_by(S::LANES) {
                narrow_at(s, s.add(load_at(s, own, at, 0.0), load_at(s, other, at, 0.0)), own, at);
            }
        }
        h /= 2;
    }
    sums.copy_from_slice(&lanes[..n]);
}

/// Its kernels.
const UNIT: Unit = Unit::of(
    NAME,
    include_str!("selective_scan_backward.cu"),
    &["selective_scan_backward_blocks", "selective_scan_backward_add"],
);

/// selective_scan_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, inputs) = (SelectiveScan::of(args.call), Tensors::of_call(args)?);
        let (dy, dnext) = (args.input("dy"), args.optional("dnext"));
        run(cpu, &shape, inputs, dy, dnext, OUTPUTS.map(|name| args.output(name)))
    },
    device: Some(|on, args| {
        let (shape, made) = (SelectiveScan::of(args.call), OUTPUTS.map(|name| args.output(name)));
        let (dy, dnext, args) = (args.input("dy"), args.optional("dnext"), &*args);
        let [dx, ddt, db, dc, da_log, dd, dstate] = made;
        shape.lengths().on_device(on, args, NAME, |len| {
            typed!(dy.dtype() => I, typed!(dx.dtype() => O, {
                let given = (dy.device_part(NAME, "dy")?, dnext.map(|dnext| dnext.device_part(NAME, "dnext")).transpose()?);
                let gradients = SelectiveGradients {
                    dx: dx.device(NAME, "dx")?,
                    ddt: ddt.device(NAME, "ddt")?,
                    db: db.device(NAME, "db")?,
                    dc: dc.device(NAME, "dc")?,
                    da_log: da_log.device(NAME, "da_log")?,
                    dd: dd.device(NAME, "dd")?,
                    dstate: dstate.device(NAME, "dstate")?,
                };
                launch::<I, O>(on, &shape, &Parts::<I>::of_call(args, NAME, len)?, given, gradients)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// Threads of a block.
const THREADS: usize = 256;

/// The call was checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &SelectiveScan,
    parts: &Parts<I>,
    (dy, dnext): (DevicePart<I>, Option<DevicePart<f32>>),
    gradients: SelectiveGradients<Buffer<O>, Buffer<f32>>,
) -> Result<(), Error> {
    if shape.channels == 0 {
        // Sums over no channels.
        for sum in [gradients.db, gradients.dc] {
            sum.fill(on, &vec![O::default(); sum.len()])?;
        }
        return Ok(());
    }
    if shape.is_empty() {
        return Ok(());
    }
    let room = Room::on(on, NAME, units(shape))?;
    let (total, [from_parts, from_slots]) = (room.cut.of_total(), room.places());
    let SelectiveGradients { dx, ddt, db, dc, da_log, dd, dstate } = gradients;
    for (first, count) in room.lots() {
        let blocks = optional(parts.arguments(on, NAME, shape)?.buffer_from(dy.0, dy.1), dnext);
        let blocks = blocks.buffer(dx).buffer(ddt).buffer(da_log).buffer(dd).buffer(dstate);
        let blocks = blocks.buffer_from(&room.buffer, from_parts).buffer_from(&room.buffer, from_slots);
        let blocks = blocks.long(first).long(room.slot()).long(stretch(shape.length));
        let add = parts.arguments(on, NAME, shape)?.buffer_from(&room.buffer, 0).buffer_from(&room.buffer, from_parts);
        let add = add.buffer(db).buffer(dc).long(first).long(count).long(total);
        let rows = total.div_ceil(THREADS);
        // SAFETY: lengths were checked, the workspace was laid out for these units, and these are the kernels' arguments.
        unsafe {
            let build = Build::of::<I, O>(NAME);
            on.launch(build, "selective_scan_backward_blocks", [count, 1, 1], THREADS as u32, 0, &blocks)?;
            if rows > 0 {
                on.launch(build, "selective_scan_backward_add", [rows, 1, 1], THREADS as u32, 0, &add)?;
            }
        }
    }
    Ok(())
}

/// The gradients of what a scan returned, on a device; as [`SelectiveOutputGradients`].
#[derive(Clone, Copy)]
pub struct DeviceOutputGradients<'a, I> {
    /// `dy[B,T,C]`.
    pub dy: &'a Buffer<I>,
    /// `dnext[B,C,N]`.
    pub dnext: Option<&'a Buffer<f32>>,
}

/// [`selective_scan_backward`] on a device.
///
/// # Errors
/// As [`selective_scan_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &SelectiveScan,
    inputs: &DeviceInputs<I>,
    given: &DeviceOutputGradients<I>,
    gradients: SelectiveGradients<Buffer<O>, Buffer<f32>>,
) -> Result<(), Error> {
    inputs.check(NAME, shape)?;
    let SelectiveGradients { dx, ddt, db, dc, da_log, dd, dstate } = &gradients;
    let lens = [dx.len(), ddt.len(), db.len(), dc.len(), da_log.len(), dd.len(), dstate.len()];
    check(shape, given.dy.len(), given.dnext.map(Buffer::len), lens)?;
    let given = ((given.dy, 0), given.dnext.map(|dnext| (dnext, 0)));
    launch(on, shape, &Parts::of(inputs), given, gradients)
}
