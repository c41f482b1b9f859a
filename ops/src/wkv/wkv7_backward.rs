//! Gradient of the recurrence of RWKV-7: `r, w, k, v, a, b[B,T,H,D], state[B,H,D,D]? (f32), len[B]?, dy[B,T,H,D],
//! dnext[B,H,D,D]? (f32) -> dr, dw, dk, dv, da, db[B,T,H,D], dstate[B,H,D,D]` (f32).
//!
//! Formula: with S_t the state behind a token and M its gradient, back from dnext: `M += r dy^T`; `dr = S_t dy`, `dk = M v`,
//! `dv = M^T k`, `db = M sa`, `dsa = M^T b`, `da = S_(t-1) dsa`, `dw = e^w (sum of M * S_(t-1))`; `e^w M + a dsa^T` is the M
//! before. sa and S as in the forward, which is run again.
//! Order: positions descend. Sums over rows and over columns are eight segments of chains, joined as a tree.
//! Rounding: every step once to f32; last rounding.
//! Special: rows behind `len` are not read, and all of theirs is +0.
//!
//! Two runs over a head: one with lanes of columns, where sums over rows are made, for sa and dsa; one with lanes of rows, where
//! sums over columns are. In the second the states are made again from one kept every [`KEPT`] tokens.

// Segments index several sums at once here.
#![allow(clippy::needless_range_loop)]

use super::heads::{Inputs, Tensors, Tokens, Wkv7, Wkv7Inputs, advance, read, widen};
use super::wkv7::{DeviceInputs, Parts, grid};
use crate::backend::device::workspace::choose as choose_on_device;
use crate::backend::device::{Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::columns::{
    GROUP, KEPT, THREADS, Two, Words, all, by_size, fma, gather, join, kept, mul, padded, product, put, scatter, turn,
    two,
};
use crate::conv::causal_conv1d::{Part, optional};
use crate::conv::taps::on_host;
use crate::element::{Stored, typed};
use crate::parallel::SharedOut;
use crate::profile::IEEE;
use crate::simd::{Kernel, Simd};
use crate::tensor::Heads;
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, TensorMut, TensorRef};

const NAME: &str = "wkv7_backward";
/// The gradients of what has tokens, as [`super::heads::TOKENS`].
const MADE: [&str; 6] = ["dr", "dw", "dk", "dv", "da", "db"];

/// The gradients that [`wkv7_backward`] makes, row-major.
#[derive(Debug)]
pub struct Wkv7Gradients<O, S> {
    /// `dr[B,T,H,D]`.
    pub dr: O,
    /// `dw[B,T,H,D]`.
    pub dw: O,
    /// `dk[B,T,H,D]`.
    pub dk: O,
    /// `dv[B,T,H,D]`.
    pub dv: O,
    /// `da[B,T,H,D]`.
    pub da: O,
    /// `db[B,T,H,D]`.
    pub db: O,
    /// `dstate[B,H,D,D]`, f32.
    pub dstate: S,
}

/// The gradients of [`wkv7`](crate::wkv7)'s inputs from `dy[B,T,H,D]` and, where it is given, `dnext[B,H,D,D]`. What a thread
/// keeps grows with T, as a few rows for each token of a head.
///
/// # Errors
/// As [`wkv7`](crate::wkv7).
///
/// ```
/// use samebits_ops::{Cpu, Wkv7, Wkv7Gradients, Wkv7Inputs, wkv7_backward};
///
/// // y = 3 * (2 * 4 + 0.5 * 5 + 6 * (7 * 5)), of a state of 5, of which e^w = 0.5 is left.
/// let shape = Wkv7 { batch: 1, length: 1, heads: 1, head_dim: 1 };
/// let inputs = Wkv7Inputs {
///     r: &[3f32][..], w: &[-2f32.ln()], k: &[2.0], v: &[4.0], a: &[7.0], b: &[6.0], state: Some(&[5.0]), len: None,
/// };
/// let ([mut dr, mut dw, mut dk, mut dv, mut da, mut db], mut dstate) = ([[0f32; 1]; 6], [0f32; 1]);
/// let made = Wkv7Gradients {
///     dr: &mut dr[..], dw: &mut dw, dk: &mut dk, dv: &mut dv, da: &mut da, db: &mut db, dstate: &mut dstate[..],
/// };
/// wkv7_backward(&Cpu::best(), &shape, &inputs, &[1.0], None, made)?;
/// assert_eq!((dr, dk, dv, da, db), ([220.5], [12.0], [6.0], [90.0], [105.0]));
/// assert!((dw[0] - 7.5).abs() < 1e-5 && (dstate[0] - 127.5).abs() < 1e-4);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn wkv7_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Wkv7,
    inputs: &Wkv7Inputs<I>,
    dy: &[I],
    dnext: Option<&[f32]>,
    made: Wkv7Gradients<&mut [O], &mut [f32]>,
) -> Result<(), Error> {
    let inputs = Tensors::of(NAME, shape, inputs)?;
    let Wkv7Gradients { dr, dw, dk, dv, da, db, dstate } = made;
    let mut made = [dr, dw, dk, dv, da, db];
    check_made(shape, made.each_mut().map(|made| made.len()), [dy.len(), dstate.len()], dnext.map(<[f32]>::len))?;
    let (of_tokens, of_state) = (shape.of_tokens(), shape.of_state());
    let made = made.map(|made| TensorMut::of(made, &of_tokens));
    let (dy, dnext) = (TensorRef::of(dy, &of_tokens), dnext.map(|dnext| TensorRef::of(dnext, &of_state)));
    run(cpu, shape, inputs, [Some(dy), dnext], made, TensorMut::of(dstate, &of_state))
}

/// Checks the lengths of the outputs and of the gradients that come in.
fn check_made(shape: &Wkv7, made: [usize; 6], [dy, dstate]: [usize; 2], dnext: Option<usize>) -> Result<(), Error> {
    let mut names = MADE.iter();
    shape.check(NAME, made.map(|len| (*names.next().expect("as many names"), len)), [])?;
    shape.check(NAME, [("dy", dy)], [("dnext", dnext), ("dstate", Some(dstate))])
}

/// The form of the call has been checked; there is a dy.
fn run(
    cpu: &Cpu,
    shape: &Wkv7,
    inputs: Tensors,
    [dy, dnext]: [Option<TensorRef>; 2],
    made: [TensorMut; 6],
    dstate: TensorMut,
) -> Result<(), Error> {
    inputs.check_host(NAME, shape)?;
    on_host(NAME, [("dy", dy), ("dnext", dnext)])?;
    let (dy, dnext) = (dy.expect("there is a dy"), dnext.map(|dnext| dnext.heads()));
    let dstate = SharedOut::new(dstate.host::<f32>(NAME, "dstate")?);
    typed!(inputs.tokens[0].dtype() => I, {
        let (inputs, dy) = (Inputs::<I>::new(cpu, shape, &inputs), dy.heads::<I>());
        typed!(made[0].dtype() => O, {
            let [dr, dw, dk, dv, da, db] = made;
            let made = [
                SharedOut::new(dr.host::<O>(NAME, "dr")?),
                SharedOut::new(dw.host::<O>(NAME, "dw")?),
                SharedOut::new(dk.host::<O>(NAME, "dk")?),
                SharedOut::new(dv.host::<O>(NAME, "dv")?),
                SharedOut::new(da.host::<O>(NAME, "da")?),
                SharedOut::new(db.host::<O>(NAME, "db")?),
            ];
            let all = Backward { inputs, dy, dnext, made, dstate };
            cpu.each(shape.units(), |unit| all.head(unit));
        })
    });
    Ok(())
}

/// A call whose types are known.
struct Backward<'a, I, O> {
    inputs: Inputs<'a, I>,
    dy: Heads<'a, I>,
    dnext: Option<Heads<'a, f32>>,
    /// As [`MADE`].
    made: [SharedOut<'a, O>; 6],
    dstate: SharedOut<'a, f32>,
}

impl<I: Element, O: Element> Backward<'_, I, O> {
    /// A head of a sequence.
    fn head(&self, unit: usize) {
        let (cpu, &Wkv7 { length, heads, head_dim, .. }) = (self.inputs.cpu, self.inputs.shape);
        let (b, h) = (unit / heads, unit % heads);
        let (end, width, groups) = (self.inputs.tokens_of(b), padded(head_dim), head_dim.div_ceil(GROUP));
        let size = [head_dim; 2];
        let mut tokens = Tokens::room(end, head_dim);
        self.inputs.read([b, h], 0..end, &mut tokens);
        let [mut dy, mut sa, mut dsa, mut dr, mut dw, mut dk, mut dv, mut da, mut db] =
            [(); 9].map(|()| vec![0f32; end * width]);
        widen(cpu, &self.dy, [b * length, h], end, &mut dy);

        let [mut state, mut dstate] = [(); 2].map(|()| vec![0f32; head_dim * width]);
        gather(self.inputs.state.as_ref(), unit, 0..groups, size, &mut state);
        gather(self.dnext.as_ref(), unit, 0..groups, size, &mut dstate);
        let made = [&mut sa, &mut dsa, &mut dv].map(|made| &mut made[..]);
        let (tokens, dy) = (&tokens, &dy);
        cpu.dispatch(OverRows { ends: [end, head_dim], tokens, dy, state: &mut state, dstate: &mut dstate, made });
        scatter(cpu, &dstate, unit, 0..groups, size, &self.dstate);

        turn(self.inputs.state.as_ref(), unit, size, &mut state);
        turn(self.dnext.as_ref(), unit, size, &mut dstate);
        let made = [&mut dr, &mut dw, &mut dk, &mut da, &mut db].map(|made| &mut made[..]);
        let (state, dstate, read) = (&mut state[..], &mut dstate[..], [&sa[..], &dsa]);
        cpu.dispatch(OverColumns { ends: [end, head_dim], tokens, dy, read, state, dstate, made });

        for (to, made) in self.made.iter().zip([dr, dw, dk, dv, da, db]) {
            for t in 0..length {
                let at = ((b * length + t) * heads + h) * head_dim;
                // SAFETY: a task has a head to itself, and each token is taken once.
                let to = unsafe { to.part(at, head_dim) };
                match t < end {
                    true => convert(cpu, &made[t * width..][..head_dim], to),
                    false => to.fill(O::default()),
                }
            }
        }
    }
}

/// All tokens of a head, forward for sa and back for dsa, dv and the gradient of its state. Lanes are columns.
struct OverRows<'a> {
    /// Tokens, elements of a head.
    ends: [usize; 2],
    tokens: &'a Tokens,
    dy: &'a [f32],
    state: &'a mut [f32],
    dstate: &'a mut [f32],
    /// sa, dsa and dv.
    made: [&'a mut [f32]; 3],
}

impl Kernel for OverRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let OverRows { ends: [end, n], tokens, dy, state, dstate, made: [sa, dsa, dv] } = self;
        let (width, piece) = (padded(n), IEEE.segment_length(n));
        assert!(GROUP.is_multiple_of(2 * S::LANES) && state.len() == n * width && dstate.len() == n * width);
        assert!([tokens.v.len(), dy.len(), sa.len(), dsa.len(), dv.len()].iter().all(|&len| len >= end * width));
        for group in 0..width / GROUP {
            for at in (0..GROUP).step_by(2 * S::LANES) {
                let (of_state, column) = (group * GROUP * n + at, group * GROUP + at);
                for t in 0..end {
                    let (rows, place) = (tokens.rows(t, n), t * width + column);
                    // SAFETY: states have n rows of a group from `group * GROUP * n` on, of whose GROUP columns these are two
                    // vectors; the others have rows of `width`, `end` of them.
                    unsafe {
                        let of_a = read(s, state, of_state, rows.a);
                        put(s, of_a, sa, place);
                        advance(s, state, of_state, rows, [of_a, two(s, &tokens.v, place)]);
                    }
                }
                for t in (0..end).rev() {
                    let (rows, place) = (tokens.rows(t, n), t * width + column);
                    let mut sums = [[all(s, 0.0); IEEE.segments]; 2];
                    // SAFETY: as above; d is below n.
                    unsafe {
                        let dy = two(s, dy, place);
                        for step in 0..piece.min(n) {
                            for segment in 0..IEEE.segments {
                                let d = segment * piece + step;
                                if d < n {
                                    let at = of_state + d * GROUP;
                                    let m = fma(s, all(s, rows.r[d]), dy, two(s, dstate, at));
                                    put(s, m, dstate, at);
                                    sums[0][segment] = fma(s, all(s, rows.b[d]), m, sums[0][segment]);
                                    sums[1][segment] = fma(s, all(s, rows.k[d]), m, sums[1][segment]);
                                }
                            }
                        }
                        let [of_read, of_v] = [join(s, sums[0]), join(s, sums[1])];
                        put(s, of_read, dsa, place);
                        put(s, of_v, dv, place);
                        for d in 0..n {
                            let at = of_state + d * GROUP;
                            let left = mul(s, two(s, dstate, at), all(s, rows.left[d]));
                            put(s, fma(s, all(s, rows.a[d]), of_read, left), dstate, at);
                        }
                    }
                }
            }
        }
    }
}

/// All tokens of a head, forward for its states and back for the sums over columns. Lanes are rows, and states are turned.
struct OverColumns<'a> {
    /// Tokens, elements of a head.
    ends: [usize; 2],
    tokens: &'a Tokens,
    dy: &'a [f32],
    /// sa and dsa.
    read: [&'a [f32]; 2],
    state: &'a mut [f32],
    dstate: &'a mut [f32],
    /// dr, dw, dk, da and db.
    made: [&'a mut [f32]; 5],
}

impl Kernel for OverColumns<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let OverColumns { ends: [end, n], tokens, dy, read: [sa, dsa], state, dstate, mut made } = self;
        let (width, size) = (padded(n), n * GROUP);
        assert!(GROUP.is_multiple_of(2 * S::LANES) && state.len() == n * width && dstate.len() == n * width);
        assert!([dy.len(), sa.len(), dsa.len()].iter().all(|&len| len >= end * width));
        assert!(made.iter().all(|made| made.len() >= end * width));
        let (mut kept, mut before) = (vec![0f32; end.div_ceil(KEPT) * size], vec![0f32; KEPT.min(end) * size]);
        for group in 0..width / GROUP {
            let [state, dstate] = [&mut state[group * size..][..size], &mut dstate[group * size..][..size]];
            for at in (0..GROUP).step_by(2 * S::LANES) {
                let column = group * GROUP + at;
                let of_values = |t: usize| [&sa[t * width..][..n], &tokens.v[t * width..][..n]];
                // SAFETY: GROUP columns in each of n rows, of which these are two vectors; what has tokens has rows of `width`,
                // `end` of them, and group and lanes are in one.
                unsafe {
                    for t in 0..end {
                        if t % KEPT == 0 {
                            copy(s, state, &mut kept[t / KEPT * size..][..size], at);
                        }
                        step(s, state, at, Lanes::of(s, tokens, t * width + column), of_values(t));
                    }
                    for from in (0..end.div_ceil(KEPT)).rev() {
                        let own = from * KEPT..end.min((from + 1) * KEPT);
                        let state = &mut kept[from * size..][..size];
                        for t in own.clone() {
                            copy(s, state, &mut before[(t - own.start) * size..][..size], at);
                            step(s, state, at, Lanes::of(s, tokens, t * width + column), of_values(t));
                        }
                        for t in own.clone().rev() {
                            let (lanes, [sa, v]) = (Lanes::of(s, tokens, t * width + column), of_values(t));
                            let values = [sa, v, &dsa[t * width..][..n], &dy[t * width..][..n]];
                            let before = &before[(t - own.start) * size..][..size];
                            let sums = go_back(s, before, dstate, at, lanes, values);
                            for (sum, made) in made.iter_mut().enumerate() {
                                put(s, sums[sum], made, t * width + column);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// What a token has of two vectors of rows.
#[derive(Clone, Copy)]
struct Lanes<S: Simd> {
    r: Two<S>,
    left: Two<S>,
    k: Two<S>,
    a: Two<S>,
    b: Two<S>,
}

impl<S: Simd> Lanes<S> {
    /// # Safety
    /// Two vectors from `at` on are in rows of tokens.
    #[inline(always)]
    unsafe fn of(s: S, tokens: &Tokens, at: usize) -> Lanes<S> {
        let Tokens { r, left, k, a, b, .. } = tokens;
        // SAFETY: the caller's promise.
        unsafe {
            Lanes { r: two(s, r, at), left: two(s, left, at), k: two(s, k, at), a: two(s, a, at), b: two(s, b, at) }
        }
    }

    /// `S = k * v + (b * sa + S * e^w)`
    #[inline(always)]
    fn moved(&self, s: S, state: Two<S>, sa: f32, v: f32) -> Two<S> {
        fma(s, self.k, all(s, v), fma(s, self.b, all(s, sa), mul(s, state, self.left)))
    }
}

/// Copies two vectors of each row.
///
/// # Safety
/// Two vectors from `at` on are in each row of a group.
#[inline(always)]
unsafe fn copy<S: Simd>(s: S, from: &[f32], to: &mut [f32], at: usize) {
    for row in (at..from.len()).step_by(GROUP) {
        // SAFETY: the caller's promise; both have as many rows.
        unsafe { put(s, two(s, from, row), to, row) };
    }
}

/// Takes a state over a token.
///
/// # Safety
/// Two vectors from `at` on are in each row of a group, as many rows as there are values.
#[inline(always)]
unsafe fn step<S: Simd>(s: S, state: &mut [f32], at: usize, lanes: Lanes<S>, [sa, v]: [&[f32]; 2]) {
    for (e, (sa, v)) in sa.iter().zip(v).enumerate() {
        // SAFETY: the caller's promise.
        unsafe { put(s, lanes.moved(s, two(s, state, e * GROUP + at), *sa, *v), state, e * GROUP + at) };
    }
}

/// The sums over columns of a token, dr, dw, dk, da and db, and the M before it in the place of the one behind.
///
/// # Safety
/// As [`step`].
#[inline(always)]
unsafe fn go_back<S: Simd>(
    s: S,
    before: &[f32],
    dstate: &mut [f32],
    at: usize,
    lanes: Lanes<S>,
    [sa, v, dsa, dy]: [&[f32]; 4],
) -> [Two<S>; 5] {
    let (n, piece) = (v.len(), IEEE.segment_length(v.len()));
    let mut sums = [[all(s, 0.0); IEEE.segments]; 5];
    for segment in 0..IEEE.segments {
        let [mut of_r, mut of_w, mut of_k, mut of_a, mut of_b] = [all(s, 0.0); 5];
        for e in (segment * piece).min(n)..((segment + 1) * piece).min(n) {
            // SAFETY: the caller's promise; e is below n.
            unsafe {
                let state = two(s, before, e * GROUP + at);
                let m = fma(s, lanes.r, all(s, dy[e]), two(s, dstate, e * GROUP + at));
                of_r = fma(s, lanes.moved(s, state, sa[e], v[e]), all(s, dy[e]), of_r);
                of_w = fma(s, m, state, of_w);
                of_k = fma(s, m, all(s, v[e]), of_k);
                of_a = fma(s, state, all(s, dsa[e]), of_a);
                of_b = fma(s, m, all(s, sa[e]), of_b);
                put(s, fma(s, lanes.a, all(s, dsa[e]), mul(s, m, lanes.left)), dstate, e * GROUP + at);
            }
        }
        (sums[0][segment], sums[1][segment], sums[2][segment]) = (of_r, of_w, of_k);
        (sums[3][segment], sums[4][segment]) = (of_a, of_b);
    }
    let of_w = mul(s, join(s, sums[1]), lanes.left);
    [join(s, sums[0]), of_w, join(s, sums[2]), join(s, sums[3]), join(s, sums[4])]
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("wkv7_backward.cu"), &KERNELS);
/// Columns of heads of up to 128 elements, of up to 256, and of any number; rows.
const KERNELS: [&str; 4] = ["wkv7_backward_16", "wkv7_backward_32", "wkv7_backward_any", "wkv7_backward_rows"];

/// wkv7_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, inputs) = (Wkv7::of(args.call), Tensors::of_call(args)?);
        let given = [Some(args.input("dy")), args.optional("dnext")];
        run(cpu, &shape, inputs, given, MADE.map(|name| args.output(name)), args.output("dstate"))
    },
    device: Some(|on, args| {
        let (shape, made) = (Wkv7::of(args.call), MADE.map(|name| args.output(name)));
        let (dy, dnext, dstate) = (args.input("dy"), args.optional("dnext"), args.output("dstate"));
        let args = &*args;
        shape.lengths().on_device(on, args, NAME, |len| {
            typed!(dy.dtype() => I, typed!(made[0].dtype() => O, {
                let parts = Parts::<I>::of_call(args, NAME, len)?;
                let dnext = dnext.map(|dnext| dnext.device_part(NAME, "dnext")).transpose()?;
                let [dr, dw, dk, dv, da, db] = made;
                let made = Wkv7Gradients {
                    dr: dr.device(NAME, "dr")?,
                    dw: dw.device(NAME, "dw")?,
                    dk: dk.device(NAME, "dk")?,
                    dv: dv.device(NAME, "dv")?,
                    da: da.device(NAME, "da")?,
                    db: db.device(NAME, "db")?,
                    dstate: dstate.device(NAME, "dstate")?,
                };
                launch::<I, O>(on, &shape, &parts, (dy.device_part(NAME, "dy")?, dnext), made)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// The workspace on a device, in words: sa and dsa; the state and its gradient, the states that are kept, and those of the
/// tokens behind one of them.
fn words(shape: &Wkv7) -> Words<6> {
    let (of_tokens, of_state) = (product(&shape.of_tokens()), product(&shape.of_state()));
    let [kept, again] = kept(shape.length, of_state);
    Words([of_tokens, of_tokens, of_state, of_state, kept, again])
}

/// The call was checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &Wkv7,
    parts: &Parts<I>,
    (dy, dnext): (Part<I>, Option<Part<f32>>),
    made: Wkv7Gradients<&mut Buffer<O>, &mut Buffer<f32>>,
) -> Result<(), Error> {
    if shape.units() == 0 {
        return Ok(());
    }
    let (words, room) = choose_on_device(on, NAME, [words(shape)])?;
    let Wkv7Gradients { dr, dw, dk, dv, da, db, dstate } = made;
    let mut arguments = optional(parts.arguments(on, NAME, shape)?.buffer_from(dy.0, dy.1), dnext);
    for made in [dr, dw, dk, dv, da, db] {
        arguments = arguments.buffer(made);
    }
    arguments = words.arguments(arguments.buffer(dstate), &room);
    for kernel in [KERNELS[by_size(shape.head_dim)], KERNELS[3]] {
        // SAFETY: lengths were checked, and these are the kernels' arguments, of which the workspace has room for what it names.
        unsafe { on.launch(Build::of::<I, O>(NAME), kernel, grid(shape), THREADS as u32, 0, &arguments)? };
    }
    Ok(())
}

/// [`wkv7_backward`] on a device.
///
/// # Errors
/// As [`wkv7_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &Wkv7,
    inputs: &DeviceInputs<I>,
    dy: &Buffer<I>,
    dnext: Option<&Buffer<f32>>,
    made: Wkv7Gradients<&mut Buffer<O>, &mut Buffer<f32>>,
) -> Result<(), Error> {
    inputs.check(NAME, shape)?;
    let lens = [&*made.dr, &*made.dw, &*made.dk, &*made.dv, &*made.da, &*made.db].map(Buffer::len);
    check_made(shape, lens, [dy.len(), made.dstate.len()], dnext.map(Buffer::len))?;
    launch(on, shape, &Parts::of(inputs), ((dy, 0), dnext.map(|dnext| (dnext, 0))), made)
}
