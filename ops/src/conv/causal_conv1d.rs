//! Causal convolution of each channel by itself:
//! `x[B,T,C], w[C,K], bias[C]?, state[B,J,C]? (f32), len[B]? -> y[B,T,C], next[B,J,C]` (f32), J = K - 1.
//!
//! Formula: `y[t] = sum over j of w[j] * xs[t + j] + bias`, xs the rows of state, then those of x; `next` is the last J of
//! state and the first `len` rows of x.
//! Order: a chain over the taps j, ascending: `acc = fma(w, xs, acc)` from +0; then `+ bias`. Without a state its rows are
//! +0, and are terms as all others.
//! Rounding: every step once to f32; last rounding. `next` is exact.
//! Special: rows behind `len` are not read, and their y is +0.

use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Plain, Unit, int};
use crate::call::Entry;
use crate::conv::taps::{Behind, CausalConv1d, Chains, Row, deal, on_host, transposed};
use crate::element::{Stored, typed};
use crate::lengths::{Lengths, optional_lengths};
use crate::parallel::SharedOut;
use crate::tensor::Rows;
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};
use std::ops::Range;

const NAME: &str = "causal_conv1d";

/// What a causal convolution reads.
#[derive(Clone, Copy, Debug)]
pub struct ConvInputs<'a, I> {
    /// `x[B,T,C]`.
    pub x: &'a [I],
    /// `w[C,K]`; the last tap meets the row itself.
    pub w: &'a [I],
    /// `bias[C]`.
    pub bias: Option<&'a [I]>,
    /// `state[B,K-1,C]`: the rows before the first, oldest first; +0 where there is none.
    pub state: Option<&'a [f32]>,
    /// Rows of each sequence; those behind are padding. All have T where it is left out.
    pub len: Option<&'a [i32]>,
}

/// Every channel convolved with its taps over the rows up to its own, and the state that the sequences end with:
/// `y[B,T,C]` and `next[B,K-1,C]`. A sequence in pieces, each with the `next` of the one before as its state, has the bits
/// of the whole.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] for no taps, or a length beyond T.
///
/// ```
/// use samebits_ops::{CausalConv1d, ConvInputs, Cpu, causal_conv1d};
///
/// let shape = CausalConv1d { batch: 1, length: 3, channels: 1, taps: 2 };
/// let inputs = ConvInputs { x: &[1f32, 2.0, 3.0], w: &[10.0, 1.0], bias: None, state: Some(&[4.0]), len: None };
/// let (mut y, mut next) = ([0f32; 3], [0f32; 1]);
/// causal_conv1d(&Cpu::best(), &shape, &inputs, &mut y, &mut next)?;
/// assert_eq!((y, next), ([41.0, 12.0, 23.0], [3.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn causal_conv1d<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &CausalConv1d,
    inputs: &ConvInputs<I>,
    y: &mut [O],
    next: &mut [f32],
) -> Result<(), Error> {
    let ConvInputs { x, w, bias, state, len } = *inputs;
    let CausalConv1d { batch, length, channels, taps } = *shape;
    check(shape, [x.len(), w.len()], [bias.map(<[I]>::len), state.map(<[f32]>::len)], [y.len(), next.len()])?;
    let (of_rows, of_state) = ([batch, length, channels], [batch, shape.before(), channels]);
    let tensors = Tensors {
        x: TensorRef::of(x, &of_rows),
        w: TensorRef::of(w, &[channels, taps]),
        bias: bias.map(|bias| TensorRef::of(bias, &[channels])),
        state: state.map(|state| TensorRef::of(state, &of_state)),
        len,
    };
    run(cpu, shape, tensors, TensorMut::of(y, &of_rows), TensorMut::of(next, &of_state))
}

/// Checks how many elements there are of `[x, w]`, of `[bias, state]` where they are given, and of `[y, next]`.
fn check(
    shape: &CausalConv1d,
    [x, w]: [usize; 2],
    [bias, state]: [Option<usize>; 2],
    [y, next]: [usize; 2],
) -> Result<(), Error> {
    shape.check_taps(NAME)?;
    shape.check_rows(NAME, "x", x)?;
    shape.check_weight(NAME, w)?;
    bias.map_or(Ok(()), |bias| check_len(NAME, "bias", "[C]", bias, &[shape.channels]))?;
    state.map_or(Ok(()), |state| shape.check_state(NAME, "state", state))?;
    shape.check_rows(NAME, "y", y)?;
    shape.check_state(NAME, "next", next)
}

/// The inputs of any layout.
struct Tensors<'a> {
    x: TensorRef<'a>,
    w: TensorRef<'a>,
    bias: Option<TensorRef<'a>>,
    state: Option<TensorRef<'a>>,
    len: Option<&'a [i32]>,
}

/// The form of the call has been checked.
fn run(cpu: &Cpu, shape: &CausalConv1d, inputs: Tensors, y: TensorMut, next: TensorMut) -> Result<(), Error> {
    let Tensors { x, w, bias, state, len } = inputs;
    on_host(NAME, [("x", Some(x)), ("w", Some(w)), ("bias", bias), ("state", state)])?;
    shape.lengths().check(NAME, len)?;
    typed!(x.dtype() => I, typed!(y.dtype() => O, {
        let rows = Behind { state: state.map(|state| state.heads()), x: x.heads::<I>(), before: shape.before() };
        let next = next.host::<f32>(NAME, "next")?;
        Forward { cpu, shape, rows, w: w.rows(), bias: bias.map(|bias| bias.rows()), len }
            .run(y.host::<O>(NAME, "y")?, next);
    }));
    Ok(())
}

/// A call whose types are known.
struct Forward<'a, I> {
    cpu: &'a Cpu,
    shape: &'a CausalConv1d,
    rows: Behind<'a, I>,
    w: Rows<'a, I>,
    bias: Option<Rows<'a, I>>,
    len: Option<&'a [i32]>,
}

/// Rows of y that are made together: each row of x is then read once for all of them.
const TOGETHER: usize = 4;

impl<I: Element> Forward<'_, I> {
    fn run<O: Element>(&self, y: &mut [O], next: &mut [f32]) {
        let (y, next) = (SharedOut::new(y), SharedOut::new(next));
        let begin = |channels: &Range<usize>| {
            let widened =
                |bias: &Rows<I>| bias.row(0)[channels.clone()].iter().map(|bias| bias.widen()).collect::<Vec<f32>>();
            (transposed(&self.w, channels, false), self.bias.as_ref().map(widened))
        };
        deal(self.cpu, self.shape, self.shape.length, begin, |(w, bias), channels, b, piece| {
            if piece.start == 0 {
                self.end(b, channels, &next);
            }
            self.piece([w, bias.as_deref().unwrap_or(&[])], channels, b, piece, &y);
        });
    }

    /// Some channels of what sequence `b` ends with.
    fn end(&self, b: usize, channels: &Range<usize>, next: &SharedOut<f32>) {
        let (before, end) = (self.rows.before, self.shape.rows_of(self.len, b));
        for i in 0..before {
            let at = (b * before + i) * self.shape.channels + channels.start;
            // SAFETY: the first piece of a sequence alone writes its state, and each task has channels of its own.
            let next = unsafe { next.part(at, channels.len()) };
            match self.rows.row(b, end + i, channels) {
                Row::Zero => next.fill(0.0),
                Row::Wide(row) => convert(self.cpu, row, next),
                Row::Own(row) => convert(self.cpu, row, next),
            }
        }
    }

    /// Some channels of some rows of sequence `b`; no bias where it is empty.
    fn piece<O: Element>(
        &self,
        [w, bias]: [&[f32]; 2],
        channels: &Range<usize>,
        b: usize,
        piece: Range<usize>,
        y: &SharedOut<O>,
    ) {
        let (before, taps) = (self.rows.before, self.shape.taps);
        let end = self.shape.rows_of(self.len, b);
        let add = Some(bias).filter(|bias| !bias.is_empty());
        let part = |t: usize| {
            let at = (b * self.shape.length + t) * self.shape.channels + channels.start;
            // SAFETY: pieces and blocks of channels are disjoint, and so are the rows of a piece.
            unsafe { y.part(at, channels.len()) }
        };
        let (mut own, mut any) = (Vec::with_capacity(before + TOGETHER), Vec::with_capacity(taps));
        let mut t = piece.start;
        while t < piece.end {
            if t >= before && t + TOGETHER <= end.min(piece.end) {
                own.clear();
                own.extend((t - before..t + TOGETHER).map(|t| &self.rows.x.get(b, t)[channels.clone()]));
                let y = std::array::from_fn::<_, TOGETHER, _>(|r| part(t + r));
                self.cpu.dispatch(Chains { rows: &own, w, add, y });
                t += TOGETHER;
                continue;
            }
            if t < end {
                any.clear();
                any.extend((t..t + taps).map(|row| self.rows.row(b, row, channels)));
                self.cpu.dispatch(Chains { rows: &any, w, add, y: [part(t)] });
            } else {
                part(t).fill(O::default());
            }
            t += 1;
        }
    }
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("causal_conv1d.cu"), &[NAME]);

/// causal_conv1d, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let inputs = Tensors {
            x: args.input("x"),
            w: args.input("w"),
            bias: args.optional("bias"),
            state: args.optional("state"),
            len: Lengths::of_call(args)?,
        };
        run(cpu, &CausalConv1d::of(args.call), inputs, args.output("y"), args.output("next"))
    },
    device: Some(|on, args| {
        let (shape, [y, next]) = (CausalConv1d::of(args.call), ["y", "next"].map(|name| args.output(name)));
        let (x, w, bias) = (args.input("x"), args.input("w"), args.optional("bias"));
        shape.lengths().on_device(on, args, NAME, |len| {
            typed!(x.dtype() => I, typed!(y.dtype() => O, {
                let inputs = Parts::<I> {
                    x: x.device_part(NAME, "x")?,
                    w: w.device_part(NAME, "w")?,
                    bias: bias.map(|bias| bias.device_part(NAME, "bias")).transpose()?,
                    state: args.optional("state").map(|state| state.device_part(NAME, "state")).transpose()?,
                    len,
                };
                launch::<I, O>(on, &shape, inputs, y.device_part(NAME, "y")?, next.device_part(NAME, "next")?)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// A buffer, and the element that a tensor begins with.
pub(crate) type Part<'a, T> = (&'a Buffer<T>, usize);

/// The inputs on a device.
struct Parts<'a, I> {
    x: Part<'a, I>,
    w: Part<'a, I>,
    bias: Option<Part<'a, I>>,
    state: Option<Part<'a, f32>>,
    len: Option<&'a Indices>,
}

/// `arguments` with a buffer that may not be there, and whether it is.
pub(crate) fn optional<T: Plain>(arguments: Arguments, part: Option<Part<T>>) -> Arguments {
    match part {
        Some((buffer, at)) => arguments.buffer_from(buffer, at).int(1),
        None => arguments.null().int(0),
    }
}

/// Threads of a block, each of which takes a channel of a row.
pub(super) const THREADS: usize = 256;

/// A block for every row that is made and every 256 channels.
pub(super) fn grid(shape: &CausalConv1d) -> [usize; 3] {
    [shape.batch.saturating_mul(shape.length.saturating_add(shape.before())), shape.channels.div_ceil(THREADS), 1]
}

/// Lengths were checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &CausalConv1d,
    inputs: Parts<I>,
    (y, at): (&mut Buffer<O>, usize),
    (next, next_at): (&mut Buffer<f32>, usize),
) -> Result<(), Error> {
    let Parts { x, w, bias, state, len } = inputs;
    let arguments = Arguments::new().buffer_from(x.0, x.1).buffer_from(w.0, w.1);
    let arguments = optional(optional(arguments, bias), state);
    let arguments = optional_lengths(on, arguments, len)?.buffer_from(y, at).buffer_from(next, next_at);
    let arguments = arguments.long(shape.length).int(int(NAME, "C", shape.channels)?).int(int(NAME, "K", shape.taps)?);
    // SAFETY: lengths were checked, and these are the kernel's arguments.
    unsafe { on.launch(Build::of::<I, O>(NAME), NAME, grid(shape), THREADS as u32, 0, &arguments) }
}

/// What a causal convolution reads on a device; as [`ConvInputs`].
#[derive(Clone, Copy)]
pub struct DeviceInputs<'a, I> {
    /// `x[B,T,C]`.
    pub x: &'a Buffer<I>,
    /// `w[C,K]`.
    pub w: &'a Buffer<I>,
    /// `bias[C]`.
    pub bias: Option<&'a Buffer<I>>,
    /// `state[B,K-1,C]`.
    pub state: Option<&'a Buffer<f32>>,
    /// Rows of each sequence.
    pub len: Option<&'a Indices>,
}

/// [`causal_conv1d`] on a device.
///
/// # Errors
/// As [`causal_conv1d`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &CausalConv1d,
    inputs: &DeviceInputs<I>,
    y: &mut Buffer<O>,
    next: &mut Buffer<f32>,
) -> Result<(), Error> {
    let DeviceInputs { x, w, bias, state, len } = *inputs;
    check(shape, [x.len(), w.len()], [bias.map(Buffer::len), state.map(Buffer::len)], [y.len(), next.len()])?;
    shape.lengths().check_indices(NAME, len)?;
    let parts =
        Parts { x: (x, 0), w: (w, 0), bias: bias.map(|bias| (bias, 0)), state: state.map(|state| (state, 0)), len };
    launch(on, shape, parts, (y, 0), (next, 0))
}
