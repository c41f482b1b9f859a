//! Gradient of a causal convolution:
//! `dy[B,T,C], w[C,K], dnext[B,J,C]? (f32), len[B]? -> dx[B,T,C], dstate[B,J,C]` (f32), J = K - 1.
//!
//! Formula: row r of state and x, one behind the other, has `sum over i of w[K - 1 - i] * dy[r - J + i]`, and the gradient of
//! the row of `next` that is a copy of it.
//! Order: a chain over i, ascending, so that the rows of dy ascend: `acc = fma(w, dy, acc)` from +0; then `+ dnext`. Rows of
//! dy before the first and from `len` on are +0, and are terms as all others.
//! Rounding: every step once to f32; last rounding.
//! Special: rows behind `len` are not read, and their dx is +0.

use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit, int};
use crate::call::Entry;
use crate::conv::causal_conv1d::{Part, THREADS, grid, optional};
use crate::conv::taps::{CausalConv1d, Chains, Row, deal, on_host, transposed};
use crate::element::{Stored, typed};
use crate::lengths::{Lengths, optional_lengths};
use crate::parallel::SharedOut;
use crate::tensor::{Heads, Rows};
use crate::{Cpu, Element, Error, TensorMut, TensorRef};
use std::ops::Range;

const NAME: &str = "causal_conv1d_backward";

/// What the gradient of a causal convolution is made of.
#[derive(Clone, Copy, Debug)]
pub struct ConvGradients<'a, I> {
    /// `dy[B,T,C]`.
    pub dy: &'a [I],
    /// `w[C,K]`.
    pub w: &'a [I],
    /// `dnext[B,K-1,C]`: the gradient of the state that the sequences end with; +0 where it is left out.
    pub dnext: Option<&'a [f32]>,
    /// Rows of each sequence; those behind are padding. All have T where it is left out.
    pub len: Option<&'a [i32]>,
}

/// The gradients `dx[B,T,C]` and `dstate[B,K-1,C]` of [`causal_conv1d`](crate::causal_conv1d)'s x and state.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] for no taps, or a length beyond T.
///
/// ```
/// use samebits_ops::{CausalConv1d, ConvGradients, Cpu, causal_conv1d_backward};
///
/// let shape = CausalConv1d { batch: 1, length: 2, channels: 1, taps: 2 };
/// let given = ConvGradients { dy: &[1f32, 2.0], w: &[10.0, 1.0], dnext: Some(&[0.5]), len: None };
/// let (mut dx, mut dstate) = ([0f32; 2], [0f32; 1]);
/// causal_conv1d_backward(&Cpu::best(), &shape, &given, &mut dx, &mut dstate)?;
/// assert_eq!((dx, dstate), ([21.0, 2.5], [10.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn causal_conv1d_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &CausalConv1d,
    given: &ConvGradients<I>,
    dx: &mut [O],
    dstate: &mut [f32],
) -> Result<(), Error> {
    let ConvGradients { dy, w, dnext, len } = *given;
    check(shape, [dy.len(), w.len()], dnext.map(<[f32]>::len), [dx.len(), dstate.len()])?;
    let CausalConv1d { batch, length, channels, taps } = *shape;
    let (of_rows, of_state) = ([batch, length, channels], [batch, shape.before(), channels]);
    let tensors = Tensors {
        dy: TensorRef::of(dy, &of_rows),
        w: TensorRef::of(w, &[channels, taps]),
        dnext: dnext.map(|dnext| TensorRef::of(dnext, &of_state)),
        len,
    };
    run(cpu, shape, tensors, TensorMut::of(dx, &of_rows), TensorMut::of(dstate, &of_state))
}

/// Checks how many elements there are of `[dy, w]`, of dnext where it is given, and of `[dx, dstate]`.
fn check(
    shape: &CausalConv1d,
    [dy, w]: [usize; 2],
    dnext: Option<usize>,
    [dx, dstate]: [usize; 2],
) -> Result<(), Error> {
    shape.check_taps(NAME)?;
    shape.check_rows(NAME, "dy", dy)?;
    shape.check_weight(NAME, w)?;
    dnext.map_or(Ok(()), |dnext| shape.check_state(NAME, "dnext", dnext))?;
    shape.check_rows(NAME, "dx", dx)?;
    shape.check_state(NAME, "dstate", dstate)
}

/// The inputs of any layout.
struct Tensors<'a> {
    dy: TensorRef<'a>,
    w: TensorRef<'a>,
    dnext: Option<TensorRef<'a>>,
    len: Option<&'a [i32]>,
}

/// The form of the call has been checked.
fn run(cpu: &Cpu, shape: &CausalConv1d, given: Tensors, dx: TensorMut, dstate: TensorMut) -> Result<(), Error> {
    let Tensors { dy, w, dnext, len } = given;
    on_host(NAME, [("dy", Some(dy)), ("w", Some(w)), ("dnext", dnext)])?;
    shape.lengths().check(NAME, len)?;
    typed!(dy.dtype() => I, typed!(dx.dtype() => O, {
        let (dy, dnext) = (dy.heads::<I>(), dnext.map(|dnext| dnext.heads()));
        let dstate = dstate.host::<f32>(NAME, "dstate")?;
        Backward { cpu, shape, dy, w: w.rows(), dnext, len }.run(dx.host::<O>(NAME, "dx")?, dstate);
    }));
    Ok(())
}

/// A call whose types are known.
struct Backward<'a, I> {
    cpu: &'a Cpu,
    shape: &'a CausalConv1d,
    dy: Heads<'a, I>,
    w: Rows<'a, I>,
    dnext: Option<Heads<'a, f32>>,
    len: Option<&'a [i32]>,
}

/// Rows of dx that are made together: each row of dy is then read once for all of them.
const TOGETHER: usize = 4;

impl<I: Element> Backward<'_, I> {
    fn run<O: Element>(&self, dx: &mut [O], dstate: &mut [f32]) {
        let (dx, dstate) = (SharedOut::new(dx), SharedOut::new(dstate));
        let begin = |channels: &Range<usize>| transposed(&self.w, channels, true);
        deal(
            self.cpu,
            self.shape,
            self.shape.before().saturating_add(self.shape.length),
            begin,
            |w, channels, b, piece| {
                self.piece(w, channels, b, piece, (&dx, &dstate));
            },
        );
    }

    /// Some channels of some rows of sequence `b`, which count from the first of the state on.
    fn piece<O: Element>(
        &self,
        w: &[f32],
        channels: &Range<usize>,
        b: usize,
        piece: Range<usize>,
        (dx, dstate): (&SharedOut<O>, &SharedOut<f32>),
    ) {
        let CausalConv1d { length, channels: all, taps, .. } = *self.shape;
        let (before, end) = (self.shape.before(), self.shape.rows_of(self.len, b));
        let part = |t: usize| {
            // SAFETY: pieces and blocks of channels are disjoint, and so are the rows of a piece.
            unsafe { dx.part((b * length + t) * all + channels.start, channels.len()) }
        };
        let (mut own, mut any) = (Vec::with_capacity(before + TOGETHER), Vec::with_capacity(taps));
        let mut row = piece.start;
        while row < piece.end {
            // Rows of dy that the taps of these rows meet: all there, and none of them copied to next.
            if row >= before && row + TOGETHER <= end.min(piece.end) {
                let t = row - before;
                own.clear();
                own.extend((t..row + TOGETHER).map(|t| &self.dy.get(b, t)[channels.clone()]));
                let y = std::array::from_fn::<_, TOGETHER, _>(|r| part(t + r));
                self.cpu.dispatch(Chains { rows: &own, w, add: None, y });
                row += TOGETHER;
                continue;
            }
            if row >= before + end {
                part(row - before).fill(O::default());
                row += 1;
                continue;
            }
            any.clear();
            any.extend((row..row + taps).map(|at| match at.checked_sub(before).filter(|t| *t < end) {
                Some(t) => Row::Own(&self.dy.get(b, t)[channels.clone()]),
                None => Row::Zero,
            }));
            let copied = row.checked_sub(end).and_then(|i| self.dnext.as_ref().map(|dnext| dnext.get(b, i)));
            let add = copied.map(|copied| &copied[channels.clone()]);
            match row.checked_sub(before) {
                Some(t) => self.cpu.dispatch(Chains { rows: &any, w, add, y: [part(t)] }),
                None => {
                    // SAFETY: as above.
                    let y = unsafe { dstate.part((b * before + row) * all + channels.start, channels.len()) };
                    self.cpu.dispatch(Chains { rows: &any, w, add, y: [y] });
                }
            }
            row += 1;
        }
    }
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("causal_conv1d_backward.cu"), &[NAME]);

/// causal_conv1d_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (dy, w, dnext, len) = (args.input("dy"), args.input("w"), args.optional("dnext"), Lengths::of_call(args)?);
        let given = Tensors { dy, w, dnext, len };
        run(cpu, &CausalConv1d::of(args.call), given, args.output("dx"), args.output("dstate"))
    },
    device: Some(|on, args| {
        let (shape, [dx, dstate]) = (CausalConv1d::of(args.call), ["dx", "dstate"].map(|name| args.output(name)));
        let (dy, w, dnext) = (args.input("dy"), args.input("w"), args.optional("dnext"));
        shape.lengths().on_device(on, args, NAME, |len| {
            typed!(dy.dtype() => I, typed!(dx.dtype() => O, {
                let given = Parts::<I> {
                    dy: dy.device_part(NAME, "dy")?,
                    w: w.device_part(NAME, "w")?,
                    dnext: dnext.map(|dnext| dnext.device_part(NAME, "dnext")).transpose()?,
                    len,
                };
                launch::<I, O>(on, &shape, given, dx.device_part(NAME, "dx")?, dstate.device_part(NAME, "dstate")?)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// The inputs on a device.
struct Parts<'a, I> {
    dy: Part<'a, I>,
    w: Part<'a, I>,
    dnext: Option<Part<'a, f32>>,
    len: Option<&'a Indices>,
}

/// Lengths were checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &CausalConv1d,
    given: Parts<I>,
    (dx, at): (&mut Buffer<O>, usize),
    (dstate, state_at): (&mut Buffer<f32>, usize),
) -> Result<(), Error> {
    let Parts { dy, w, dnext, len } = given;
    let arguments = optional(Arguments::new().buffer_from(dy.0, dy.1).buffer_from(w.0, w.1), dnext);
    let arguments = optional_lengths(on, arguments, len)?.buffer_from(dx, at).buffer_from(dstate, state_at);
    let arguments = arguments.long(shape.length).int(int(NAME, "C", shape.channels)?).int(int(NAME, "K", shape.taps)?);
    // SAFETY: lengths were checked, and these are the kernel's arguments.
    unsafe { on.launch(Build::of::<I, O>(NAME), NAME, grid(shape), THREADS as u32, 0, &arguments) }
}

/// What the gradient of a causal convolution is made of on a device; as [`ConvGradients`].
#[derive(Clone, Copy)]
pub struct DeviceGradients<'a, I> {
    /// `dy[B,T,C]`.
    pub dy: &'a Buffer<I>,
    /// `w[C,K]`.
    pub w: &'a Buffer<I>,
    /// `dnext[B,K-1,C]`.
    pub dnext: Option<&'a Buffer<f32>>,
    /// Rows of each sequence.
    pub len: Option<&'a Indices>,
}

/// [`causal_conv1d_backward`] on a device.
///
/// # Errors
/// As [`causal_conv1d_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &CausalConv1d,
    given: &DeviceGradients<I>,
    dx: &mut Buffer<O>,
    dstate: &mut Buffer<f32>,
) -> Result<(), Error> {
    let DeviceGradients { dy, w, dnext, len } = *given;
    check(shape, [dy.len(), w.len()], dnext.map(Buffer::len), [dx.len(), dstate.len()])?;
    shape.lengths().check_indices(NAME, len)?;
    let parts = Parts { dy: (dy, 0), w: (w, 0), dnext: dnext.map(|dnext| (dnext, 0)), len };
    launch(on, shape, parts, (dx, 0), (dstate, 0))
}
