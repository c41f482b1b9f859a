//! Gradient of the scan of Mamba-2: the inputs of [`ssd_scan`](crate::ssd_scan), `dy[B,T,H,P], dnext[B,H,P,N]? (f32) ->
//! dx[B,T,H,P], ddt[B,T,H], db[B,T,G,N], dc[B,T,G,N], da_log[B,T,H], dd[B,T,H], dstate[B,H,P,N]` (the last three f32).
//!
//! Formula: g is the gradient of the state behind a position, `g_t = dy c + k_(t+1) g_(t+1)`. `dx = e g b + d dy`,
//! `db = sum of g e x`, `dc = sum of s dy`, and of the exponent `e A` it is `z = k sum of g s_(t-1)`.
//! Order: positions descending. Sums over n, over p, and over both are lanes, each lane a chain. db and dc: for each head a
//! chain over p, heads added ascending from +0.
//! Rounding: every step once to f32; last rounding of dx, ddt, db and dc.
//! Special: positions behind `len` are not read, and their gradients are +0; so is ddt where a limit took the place of a step.
//!
//! Heads are the units of `reverse.rs`.

use super::reverse::{self, At, Room, Slot, Units, stretch, there_and_back};
use super::ssd::{Advance, Scan, ScanInputs, SsdScan, Step, Tensors, lanes_of};
use super::ssd_scan::{DeviceInputs, Parts};
use crate::backend::device::{Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::conv::causal_conv1d::{Part as DevicePart, optional};
use crate::element::{Stored, typed};
use crate::parallel::SharedOut;
use crate::reduce::Lanes;
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two};
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

const NAME: &str = "ssd_scan_backward";

/// The gradients of what a scan returned.
#[derive(Clone, Copy, Debug)]
pub struct ScanOutputGradients<'a, I> {
    /// `dy[B,T,H,P]`.
    pub dy: &'a [I],
    /// `dnext[B,H,P,N]`; +0 where it is left out.
    pub dnext: Option<&'a [f32]>,
}

/// The gradients that [`ssd_scan_backward`] makes, row-major: `ScanGradients<[O], [f32]>` are slices, buffers stand on a device.
#[derive(Debug)]
pub struct ScanGradients<'a, Y: ?Sized, F: ?Sized> {
    /// `dx[B,T,H,P]`.
    pub dx: &'a mut Y,
    /// `ddt[B,T,H]`; by `token_sum` that of `dt_bias`.
    pub ddt: &'a mut Y,
    /// `db[B,T,G,N]`.
    pub db: &'a mut Y,
    /// `dc[B,T,G,N]`.
    pub dc: &'a mut Y,
    /// `da_log[B,T,H]`; by `token_sum` the gradient of `a_log`.
    pub da_log: &'a mut F,
    /// `dd[B,T,H]`; by `token_sum` the gradient of `d`.
    pub dd: &'a mut F,
    /// `dstate[B,H,P,N]`.
    pub dstate: &'a mut F,
}

/// The gradients of [`ssd_scan`](crate::ssd_scan)'s inputs from those of its outputs. The workspace grows with `T * N` and the
/// root of T for each head that is worked on.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] as [`ssd_scan`](crate::ssd_scan); [`Error::Budget`] below
/// what one head needs.
///
/// ```
/// use samebits_ops::{Cpu, ScanGradients, ScanInputs, ScanOutputGradients, SsdScan, ssd_scan_backward};
///
/// let shape = SsdScan {
///     batch: 1, length: 1, heads: 1, head_dim: 1, groups: 1, state_dim: 1, dt_min: 1.0, dt_max: 1.0,
/// };
/// let inputs = ScanInputs {
///     x: &[8f32], dt: &[0.0], a_log: &[0.0], b: &[3.0], c: &[2.0], d: Some(&[5.0]), dt_bias: None, state: None, len: None,
/// };
/// let ([mut dx, mut ddt, mut db, mut dc], [mut a, mut d, mut dstate]) = ([[0f32]; 4], [[0f32]; 3]);
/// let gradients = ScanGradients {
///     dx: &mut dx[..], ddt: &mut ddt, db: &mut db, dc: &mut dc, da_log: &mut a[..], dd: &mut d, dstate: &mut dstate,
/// };
/// let given = ScanOutputGradients { dy: &[1f32], dnext: None };
/// ssd_scan_backward(&Cpu::best(), &shape, &inputs, &given, gradients)?;
/// assert_eq!(([dx, ddt, db, dc], d), ([[11.0], [0.0], [16.0], [24.0]], [8.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn ssd_scan_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &SsdScan,
    inputs: &ScanInputs<I>,
    given: &ScanOutputGradients<I>,
    gradients: ScanGradients<[O], [f32]>,
) -> Result<(), Error> {
    let tensors = Tensors::of(NAME, shape, inputs)?;
    let ScanGradients { dx, ddt, db, dc, da_log, dd, dstate } = gradients;
    let lens = [dx.len(), ddt.len(), db.len(), dc.len(), da_log.len(), dd.len(), dstate.len()];
    check(shape, given.dy.len(), given.dnext.map(<[f32]>::len), lens)?;
    let (of_x, of_dt, of_b, of_state) = shape.extents();
    let dnext = given.dnext.map(|dnext| TensorRef::of(dnext, &of_state));
    let made = [
        TensorMut::of(dx, &of_x),
        TensorMut::of(ddt, &of_dt),
        TensorMut::of(db, &of_b),
        TensorMut::of(dc, &of_b),
        TensorMut::of(da_log, &of_dt),
        TensorMut::of(dd, &of_dt),
        TensorMut::of(dstate, &of_state),
    ];
    run(cpu, shape, tensors, TensorRef::of(given.dy, &of_x), dnext, made)
}

/// Checks how many elements there are of dy, of dnext where it is given, and of the outputs in their order.
fn check(shape: &SsdScan, dy: usize, dnext: Option<usize>, outputs: [usize; 7]) -> Result<(), Error> {
    let (of_x, of_dt, of_b, of_state) = shape.extents();
    let [dx, ddt, db, dc, da_log, dd, dstate] = outputs;
    check_len(NAME, "dy", "[B,T,H,P]", dy, &of_x)?;
    dnext.map_or(Ok(()), |dnext| check_len(NAME, "dnext", "[B,H,P,N]", dnext, &of_state))?;
    check_len(NAME, "dx", "[B,T,H,P]", dx, &of_x)?;
    check_len(NAME, "ddt", "[B,T,H]", ddt, &of_dt)?;
    check_len(NAME, "db", "[B,T,G,N]", db, &of_b)?;
    check_len(NAME, "dc", "[B,T,G,N]", dc, &of_b)?;
    check_len(NAME, "da_log", "[B,T,H]", da_log, &of_dt)?;
    check_len(NAME, "dd", "[B,T,H]", dd, &of_dt)?;
    check_len(NAME, "dstate", "[B,H,P,N]", dstate, &of_state)
}

/// The outputs, in the order in which the form of the op has them.
const OUTPUTS: [&str; 7] = ["dx", "ddt", "db", "dc", "da_log", "dd", "dstate"];

/// The form of the call has been checked.
fn run(
    cpu: &Cpu,
    shape: &SsdScan,
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
        if shape.heads == 0 {
            // Sums over no heads.
            [&mut *db, &mut *dc].into_iter().for_each(|sum| sum.fill(O::default()));
        }
        let sums = [SharedOut::new(db), SharedOut::new(dc)];
        Reverse { scan: &scan, dy, dnext }.run(&made, &sums)
    })
}

/// What every head makes by itself.
struct Made<'a, O> {
    dx: SharedOut<'a, O>,
    ddt: SharedOut<'a, O>,
    da_log: SharedOut<'a, f32>,
    dd: SharedOut<'a, f32>,
    dstate: SharedOut<'a, f32>,
}

/// Heads as units; of each x, dy and q, and b and c, of a position.
fn units(shape: &SsdScan) -> Units {
    let SsdScan { batch, length, heads, head_dim, groups, state_dim, .. } = *shape;
    let (state, rows) = (shape.of_state(), 3 * head_dim + 2 * state_dim);
    Units { batch, length, count: heads, groups, state_dim, state, rows }
}

/// A call on the processor.
struct Reverse<'a> {
    scan: &'a Scan<'a>,
    dy: TensorRef<'a>,
    dnext: Option<TensorRef<'a>>,
}

impl Reverse<'_> {
    fn run<O: Element>(&self, made: &Made<O>, sums: &[SharedOut<O>; 2]) -> Result<(), Error> {
        let Scan { cpu, shape, .. } = *self.scan;
        if shape.is_empty() {
            return Ok(());
        }
        let unit = |unit: usize, slot: Slot, part: &mut [f32]| self.unit(unit, slot, part, made);
        reverse::run(cpu, NAME, units(shape), &|b| self.scan.end(b), &unit, sums)
    }

    /// All positions of a head: what it makes by itself, and its part of db and dc.
    fn unit<O: Element>(&self, unit: usize, slot: Slot, part: &mut [f32], made: &Made<O>) {
        let (scan, shape) = (self.scan, self.scan.shape);
        let SsdScan { length, heads, head_dim, state_dim, .. } = *shape;
        let ((b, h), size) = (scan.place(unit), shape.of_state());
        let (end, group, cpu) = (scan.end(b), scan.group(h), scan.cpu);
        let Slot { rows, kept, run, g } = slot;
        let (x, rest) = rows.split_at_mut(head_dim);
        let (dy, rest) = rest.split_at_mut(head_dim);
        let (q, rest) = rest.split_at_mut(head_dim);
        let (of_b, of_c) = rest.split_at_mut(state_dim);
        scan.begin(scan.inputs.state, b, h, 0..head_dim, &mut run[..size]);
        scan.begin(self.dnext, b, h, 0..head_dim, g);
        let (part_b, part_c) = part.split_at_mut(length * state_dim);
        let mut k_after = None;
        there_and_back([length, end, size], kept, run, |at| match at {
            At::Over(t, state) => {
                scan.row(&scan.inputs.x, b, t, h, 0..head_dim, x);
                scan.row(&scan.inputs.b, b, t, group, 0..state_dim, of_b);
                cpu.dispatch(Advance { step: scan.step(b, t, h), x, b: of_b, state });
            }
            At::Back(t, [before, after]) => {
                scan.row(&scan.inputs.x, b, t, h, 0..head_dim, x);
                scan.row(&self.dy, b, t, h, 0..head_dim, dy);
                scan.row(&scan.inputs.b, b, t, group, 0..state_dim, of_b);
                scan.row(&scan.inputs.c, b, t, group, 0..state_dim, of_c);
                let step = scan.step(b, t, h);
                let sums = cpu.dispatch(Position {
                    k_after,
                    step,
                    x,
                    dy,
                    b: of_b,
                    c: of_c,
                    before,
                    after,
                    g,
                    q,
                    db: &mut part_b[t * state_dim..][..state_dim],
                    dc: &mut part_c[t * state_dim..][..state_dim],
                    d: scan.d(h),
                });
                k_after = Some(step.k);
                self.put([b, t, h], step, sums, q, made);
            }
        });
        if let Some(k) = k_after {
            cpu.dispatch(Scaled { k, g });
        }
        // SAFETY: units are disjoint.
        convert(cpu, g, unsafe { made.dstate.part(unit * size, size) });
        for t in end..length {
            let row = (b * length + t) * heads + h;
            // SAFETY: as above, and positions are disjoint.
            unsafe {
                made.dx.part(row * head_dim, head_dim).fill(O::default());
                made.ddt.part(row, 1).fill(O::default());
                made.da_log.part(row, 1).fill(0.0);
                made.dd.part(row, 1).fill(0.0);
            }
        }
    }

    /// What a head makes by itself of a position; dx stands in q.
    fn put<O: Element>(&self, [b, t, h]: [usize; 3], step: Step, sums: Sums, dx: &[f32], made: &Made<O>) {
        let SsdScan { length, heads, head_dim, .. } = *self.scan.shape;
        let (row, a) = ((b * length + t) * heads + h, self.scan.a[h]);
        let z = step.k * sums.of_state;
        let w = a.mul_add(z, sums.of_x);
        // SAFETY: units and positions are disjoint.
        unsafe {
            convert(self.scan.cpu, dx, made.dx.part(row * head_dim, head_dim));
            made.ddt.part(row, 1)[0] = step.slope.map_or(O::default(), |slope| O::narrow(w * slope));
            made.da_log.part(row, 1)[0] = f32::narrow((step.e * a) * z);
            made.dd.part(row, 1)[0] = f32::narrow(sums.of_dy);
        }
    }
}

/// Sums of a position.
struct Sums {
    /// Of g times the state before.
    of_state: f32,
    /// Of q times x.
    of_x: f32,
    /// Of dy times x.
    of_dy: f32,
}

/// A position of a head: g from the one behind to its own, and what that makes.
struct Position<'a> {
    k_after: Option<f32>,
    step: Step,
    x: &'a [f32],
    dy: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
    before: &'a [f32],
    after: &'a [f32],
    g: &'a mut [f32],
    /// First q, then dx.
    q: &'a mut [f32],
    db: &'a mut [f32],
    dc: &'a mut [f32],
    d: Option<f32>,
}

impl Kernel for Position<'_> {
    type Output = Sums;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Sums {
        let Position { k_after, step: Step { e, .. }, x, dy, b, c, before, after, g, q, db, dc, d } = self;
        let (n, k) = (b.len(), k_after.unwrap_or(1.0));
        db.fill(0.0);
        dc.fill(0.0);
        for (p, q) in q.iter_mut().enumerate() {
            let row = &mut g[p * n..][..n];
            turn_back(s, [k, dy[p], e * x[p]], [c, &after[p * n..][..n]], row, [db, dc]);
            *q = lanes_of(s, row, b);
        }
        let mut lanes = Lanes::new();
        lanes.add_products(s, g, before);
        let sums = Sums { of_state: lanes.fold(s, g.len()), of_x: lanes_of(s, q, x), of_dy: lanes_of(s, dy, x) };
        for at in (0..q.len()).step_by(S::LANES) {
            let mut dx = s.mul(s.splat(e), load_at(s, q, at, 0.0));
            if let Some(d) = d {
                dx = s.fma(s.splat(d), load_at(s, dy, at, 0.0), dx);
            }
            narrow_at(s, dx, q, at);
        }
        sums
    }
}

/// A row of g, `g = fma(dy, c, k * g)`, and its terms of db and dc, `db = fma(g, u, db)` and `dc = fma(s, dy, dc)`.
#[inline(always)]
fn turn_back<S: Simd>(s: S, [k, dy, u]: [f32; 3], [c, after]: [&[f32]; 2], g: &mut [f32], [db, dc]: [&mut [f32]; 2]) {
    let (k, dy, u, two) = (s.splat(k), s.splat(dy), s.splat(u), 2 * S::LANES);
    let whole = g.len() - g.len() % two;
    for at in (0..whole).step_by(two) {
        let (c, after) = (load_two(s, &c[at..][..two], false), load_two(s, &after[at..][..two], false));
        let (g, db, dc) = (&mut g[at..][..two], &mut db[at..][..two], &mut dc[at..][..two]);
        let (behind, of_b, of_c) = (load_two(s, g, false), load_two(s, db, false), load_two(s, dc, false));
        let own = (s.fma(dy, c.0, s.mul(k, behind.0)), s.fma(dy, c.1, s.mul(k, behind.1)));
        narrow_two(s, own, g, false);
        narrow_two(s, (s.fma(own.0, u, of_b.0), s.fma(own.1, u, of_b.1)), db, false);
        narrow_two(s, (s.fma(after.0, dy, of_c.0), s.fma(after.1, dy, of_c.1)), dc, false);
    }
    for at in (whole..g.len()).step_by(S::LANES) {
        let own = s.fma(dy, load_at(s, c, at, 0.0), s.mul(k, load_at(s, g, at, 0.0)));
        narrow_at(s, own, g, at);
        narrow_at(s, s.fma(own, u, load_at(s, db, at, 0.0)), db, at);
        narrow_at(s, s.fma(load_at(s, after, at, 0.0), dy, load_at(s, dc, at, 0.0)), dc, at);
    }
}

/// `g = k * g`
struct Scaled<'a> {
    k: f32,
    g: &'a mut [f32],
}

impl Kernel for Scaled<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.g.len()).step_by(S::LANES) {
            narrow_at(s, s.mul(s.splat(self.k), load_at(s, self.g, at, 0.0)), self.g, at);
        }
    }
}

/// Its kernels.
const UNIT: Unit =
    Unit::of(NAME, include_str!("ssd_scan_backward.cu"), &["ssd_scan_backward_heads", "ssd_scan_backward_add"]);

/// ssd_scan_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, inputs) = (SsdScan::of(args.call), Tensors::of_call(args)?);
        let (dy, dnext) = (args.input("dy"), args.optional("dnext"));
        run(cpu, &shape, inputs, dy, dnext, OUTPUTS.map(|name| args.output(name)))
    },
    device: Some(|on, args| {
        let (shape, made) = (SsdScan::of(args.call), OUTPUTS.map(|name| args.output(name)));
        let (dy, dnext, args) = (args.input("dy"), args.optional("dnext"), &*args);
        let [dx, ddt, db, dc, da_log, dd, dstate] = made;
        shape.lengths().on_device(on, args, NAME, |len| {
            typed!(dy.dtype() => I, typed!(dx.dtype() => O, {
                let given = (dy.device_part(NAME, "dy")?, dnext.map(|dnext| dnext.device_part(NAME, "dnext")).transpose()?);
                let gradients = ScanGradients {
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

/// The call was checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &SsdScan,
    parts: &Parts<I>,
    (dy, dnext): (DevicePart<I>, Option<DevicePart<f32>>),
    gradients: ScanGradients<Buffer<O>, Buffer<f32>>,
) -> Result<(), Error> {
    if shape.heads == 0 {
        // Sums over no heads.
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
    let ScanGradients { dx, ddt, db, dc, da_log, dd, dstate } = gradients;
    for (first, count) in room.lots() {
        let heads = optional(parts.arguments(on, NAME, shape)?.buffer_from(dy.0, dy.1), dnext);
        let heads = heads.buffer(dx).buffer(ddt).buffer(da_log).buffer(dd).buffer(dstate);
        let heads = heads.buffer_from(&room.buffer, from_parts).buffer_from(&room.buffer, from_slots);
        let heads = heads.long(first).long(room.slot()).long(stretch(shape.length));
        let add = parts.arguments(on, NAME, shape)?.buffer_from(&room.buffer, 0).buffer_from(&room.buffer, from_parts);
        let add = add.buffer(db).buffer(dc).long(first).long(count).long(total);
        let blocks = total.div_ceil(THREADS);
        // SAFETY: lengths were checked, the workspace was laid out for these units, and these are the kernels' arguments.
        unsafe {
            on.launch(Build::of::<I, O>(NAME), "ssd_scan_backward_heads", [count, 1, 1], THREADS as u32, 0, &heads)?;
            if blocks > 0 {
                on.launch(Build::of::<I, O>(NAME), "ssd_scan_backward_add", [blocks, 1, 1], THREADS as u32, 0, &add)?;
            }
        }
    }
    Ok(())
}

/// Threads of a block.
const THREADS: usize = 256;

/// The gradients of what a scan returned, on a device; as [`ScanOutputGradients`].
#[derive(Clone, Copy)]
pub struct DeviceOutputGradients<'a, I> {
    /// `dy[B,T,H,P]`.
    pub dy: &'a Buffer<I>,
    /// `dnext[B,H,P,N]`.
    pub dnext: Option<&'a Buffer<f32>>,
}

/// [`ssd_scan_backward`] on a device.
///
/// # Errors
/// As [`ssd_scan_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &SsdScan,
    inputs: &DeviceInputs<I>,
    given: &DeviceOutputGradients<I>,
    gradients: ScanGradients<Buffer<O>, Buffer<f32>>,
) -> Result<(), Error> {
    inputs.check(NAME, shape)?;
    let ScanGradients { dx, ddt, db, dc, da_log, dd, dstate } = &gradients;
    let lens = [dx.len(), ddt.len(), db.len(), dc.len(), da_log.len(), dd.len(), dstate.len()];
    check(shape, given.dy.len(), given.dnext.map(Buffer::len), lens)?;
    let given = ((given.dy, 0), given.dnext.map(|dnext| (dnext, 0)));
    launch(on, shape, &Parts::of(inputs), given, gradients)
}
