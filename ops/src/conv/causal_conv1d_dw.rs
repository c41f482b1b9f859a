//! Gradient of the weight of a causal convolution:
//! `x[B,T,C], dy[B,T,C], state[B,J,C]? (f32), mask[B,T]?, carry[64,C,K] (f32) -> dw[64,C,K]` (f32), J = K - 1.
//!
//! Formula: `dw[n mod 64][c][j] = fma(dy[b][t][c], xs[b][t + j][c], dw)` over tokens, xs the rows of state, then those of x;
//! n is the number of token (b, t), counted without padding from `token_offset` on.
//! Order: 64 chains, tokens ascending by sequence, then by row, from carry. Without a state its rows are +0, and are terms as
//! all others.
//! Rounding: every step once to f32.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit, int};
use crate::call::Entry;
use crate::conv::causal_conv1d::{Part, optional};
use crate::conv::taps::{Behind, CausalConv1d, Channels, Row, on_host};
use crate::element::{Stored, typed};
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two};
use crate::tensor::Heads;
use crate::token::chains::{Tokens, Turns, begin};
use crate::token::device;
use crate::{Cpu, Element, Error, TensorRef};

const NAME: &str = "causal_conv1d_dw";

/// Adds the gradients of [`causal_conv1d`](crate::causal_conv1d)'s w that the rows `x[B,T,C]` and `dy[B,T,C]` make, as far as
/// they are no padding, to the 64 sums `dw[64,C,K]`, which go on from what they hold. `state[B,K-1,C]` is that of the forward.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] for no taps.
///
/// ```
/// use samebits_ops::{CausalConv1d, Cpu, Tokens, causal_conv1d_dw};
///
/// let shape = CausalConv1d { batch: 1, length: 2, channels: 1, taps: 2 };
/// let mut dw = [0f32; 128];
/// causal_conv1d_dw(&Cpu::best(), &shape, Tokens::default(), &[3f32, 4.0], &[1.0, 10.0], Some(&[2.0]), &mut dw)?;
/// assert_eq!(dw[..4], [2.0, 3.0, 30.0, 40.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn causal_conv1d_dw<I: Element>(
    cpu: &Cpu,
    shape: &CausalConv1d,
    tokens: Tokens,
    x: &[I],
    dy: &[I],
    state: Option<&[f32]>,
    dw: &mut [f32],
) -> Result<(), Error> {
    shape.check_taps(NAME)?;
    shape.check_rows(NAME, "x", x.len())?;
    shape.check_rows(NAME, "dy", dy.len())?;
    state.map_or(Ok(()), |state| shape.check_state(NAME, "state", state.len()))?;
    let CausalConv1d { batch, length, channels, .. } = *shape;
    let [x, dy] = [x, dy].map(|rows| TensorRef::of(rows, &[batch, length, channels]));
    let state = state.map(|state| TensorRef::of(state, &[batch, shape.before(), channels]));
    run(cpu, shape, tokens, [x, dy], state, dw)
}

/// Rows of any layout.
fn run(
    cpu: &Cpu,
    shape: &CausalConv1d,
    tokens: Tokens,
    [x, dy]: [TensorRef; 2],
    state: Option<TensorRef>,
    dw: &mut [f32],
) -> Result<(), Error> {
    let CausalConv1d { batch, length, channels, taps } = *shape;
    typed!(x.dtype() => I, {
        let rows = Behind { state: state.map(|state| state.heads()), x: x.heads::<I>(), before: shape.before() };
        let dy = dy.heads::<I>();
        tokens.sum(cpu, [NAME, "dw"], [batch.saturating_mul(length), 1, channels.saturating_mul(taps)], dw, |turns, dw| {
            // A row for each tap, so that vectors run over channels.
            let mut sums = vec![0f32; dw.len()];
            turn(dw, &mut sums, [channels, taps]);
            cpu.dispatch(Sums { shape, rows, dy, turns, sums: &mut sums });
            turn(&sums, dw, [taps, channels]);
        })
    })
}

/// Matrices of `rows` times `columns` in `from`, one behind the other, as their transposes in `to`.
fn turn(from: &[f32], to: &mut [f32], [rows, columns]: [usize; 2]) {
    for (from, to) in from.chunks_exact(rows * columns).zip(to.chunks_exact_mut(rows * columns)) {
        for (row, from) in from.chunks_exact(columns).enumerate() {
            for (column, value) in from.iter().enumerate() {
                to[column * rows + row] = *value;
            }
        }
    }
}

/// Some chains.
struct Sums<'a, I> {
    shape: &'a CausalConv1d,
    rows: Behind<'a, I>,
    dy: Heads<'a, I>,
    turns: Turns<'a>,
    /// For each of the chains a row for each tap.
    sums: &'a mut [f32],
}

impl<I: Element> Kernel for Sums<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let CausalConv1d { length, channels, taps, .. } = *self.shape;
        while let Some((token, chain)) = self.turns.next() {
            let (b, t) = (token / length, token % length);
            let dy = self.dy.get(b, t);
            for j in 0..taps {
                let sum = &mut self.sums[(chain * taps + j) * channels..][..channels];
                match self.rows.row(b, t + j, &(0..channels)) {
                    Row::Own(x) => add_products(s, dy, x, sum),
                    Row::Wide(x) => add_products(s, dy, x, sum),
                    Row::Zero => add_products(s, dy, Zeros, sum),
                }
            }
        }
    }
}

/// A row of +0.
#[derive(Clone, Copy)]
struct Zeros;

impl Channels for Zeros {
    #[inline(always)]
    fn two<S: Simd>(&self, s: S, _: usize) -> (S::F, S::F) {
        (s.splat(0.0), s.splat(0.0))
    }
    #[inline(always)]
    fn some<S: Simd>(&self, s: S, _: usize) -> S::F {
        s.splat(0.0)
    }
}

/// `sum[i] = fma(dy[i], x[i], sum[i])`
#[inline(always)]
fn add_products<S: Simd, D: Element>(s: S, dy: &[D], x: impl Channels, sum: &mut [f32]) {
    let (dy, two) = (&dy[..sum.len()], 2 * S::LANES);
    let whole = sum.len() - sum.len() % two;
    for at in (0..whole).step_by(two) {
        let (dy, x) = (dy.two(s, at), x.two(s, at));
        let sum = &mut sum[at..][..two];
        let before = load_two(s, sum, false);
        narrow_two(s, (s.fma(dy.0, x.0, before.0), s.fma(dy.1, x.1, before.1)), sum, false);
    }
    for at in (whole..sum.len()).step_by(S::LANES) {
        let after = s.fma(dy.some(s, at), x.some(s, at), load_at(s, sum, at, 0.0));
        narrow_at(s, after, sum, at);
    }
}

/// Its kernel.
const UNIT: Unit = Unit { has_out: false, ..Unit::of(NAME, include_str!("causal_conv1d_dw.cu"), &[NAME]) };

/// causal_conv1d_dw, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, tokens, state) = (CausalConv1d::of(args.call), Tokens::of(args)?, args.optional("state"));
        on_host(NAME, [("state", state)])?;
        let (rows, dw) = begin(cpu, args, ["x", "dy"], "dw")?;
        run(cpu, &shape, tokens, rows, state, dw)
    },
    device: Some(|on, args| {
        let (shape, dw) = (CausalConv1d::of(args.call), args.output("dw"));
        let ([x, dy], state) = (["x", "dy"].map(|name| args.input(name)), args.optional("state"));
        device::with_tokens(on, args, |tokens, carry| {
            typed!(x.dtype() => I, {
                let rows = [x.device_part::<I>(NAME, "x")?, dy.device_part(NAME, "dy")?];
                let state = state.map(|state| state.device_part(NAME, "state")).transpose()?;
                launch(on, &shape, tokens, rows, state, (carry, dw.device(NAME, "dw")?))
            })
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// The lengths of x, dy and state were checked.
fn launch<I: Stored>(
    on: &Device,
    shape: &CausalConv1d,
    tokens: device::Tokens,
    [x, dy]: [Part<I>; 2],
    state: Option<Part<f32>>,
    (carry, dw): (Option<&Buffer<f32>>, &mut Buffer<f32>),
) -> Result<(), Error> {
    let CausalConv1d { batch, length, channels, taps } = *shape;
    let (count, n) = (batch.saturating_mul(length), channels.saturating_mul(taps));
    tokens.check([NAME, "dw"], [count, n], carry, dw)?;
    let inputs = optional(Arguments::new().buffer_from(x.0, x.1).buffer_from(dy.0, dy.1), state);
    let arguments = tokens.arguments(inputs, carry, dw).long(count).long(length);
    let arguments = arguments.int(int(NAME, "C", channels)?).int(int(NAME, "K", taps)?).int(tokens.start(1));
    // SAFETY: lengths were checked, and these are the kernel's arguments.
    unsafe { device::launch(on, Build::of::<I, f32>(NAME), NAME, n, &arguments) }
}

/// [`causal_conv1d_dw`] on a device, from `carry[64,C,K]` or +0; the first two are x and dy.
///
/// # Errors
/// As [`causal_conv1d_dw`]; errors of the device.
pub fn on_device<I: Stored>(
    on: &Device,
    shape: &CausalConv1d,
    tokens: device::Tokens,
    [x, dy]: [&Buffer<I>; 2],
    state: Option<&Buffer<f32>>,
    carry: Option<&Buffer<f32>>,
    dw: &mut Buffer<f32>,
) -> Result<(), Error> {
    shape.check_taps(NAME)?;
    shape.check_rows(NAME, "x", x.len())?;
    shape.check_rows(NAME, "dy", dy.len())?;
    state.map_or(Ok(()), |state| shape.check_state(NAME, "state", state.len()))?;
    launch(on, shape, tokens, [(x, 0), (dy, 0)], state.map(|state| (state, 0)), (carry, dw))
}
