//! The gated delta rule: `q[B,T,Hk,D], k[B,T,Hk,D], v[B,T,Hv,E], g[B,T,Hv,G] (f32), beta[B,T,Hv] (f32),
//! a_log[Hv]? (f32), dt_bias[Hv,G]? (f32), state[B,Hv,D,E]? (f32), len[B]? -> y[B,T,Hv,E], next[B,Hv,D,E]` (f32), G = 1 or D.
//!
//! Formula: of each head, token by token, `P = e^l * S`, `u = beta * (v - P^T k)`, `S = P + k u^T`, `y = scale * S^T q`; the
//! first S is state, `next` is the last. Value head h reads key head `h / (Hv / Hk)`. l is g, or
//! `-e^a_log * softplus(g + dt_bias)`.
//! Order: positions ascend. Sums over D are eight segments of chains, joined as a tree; columns never meet.
//! Rounding: every step once to f32, P before it is read and added to; queries times `f32(scale)`; last rounding.
//! Special: rows behind `len` are not read, and their y is +0. Without a state it is +0.

use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit, int};
use crate::call::{Arguments as CallArguments, Entry};
use crate::columns::{GROUP, THREADS, all, by_size, gather, mul, padded, put, scatter, two};
use crate::conv::causal_conv1d::{Part, optional};
use crate::conv::taps::on_host;
use crate::delta::heads::{GatedDeltaRule, Inputs, Tensors, Tokens, read_back, write_back};
use crate::element::{Stored, typed};
use crate::lengths::{Lengths, optional_lengths};
use crate::parallel::SharedOut;
use crate::simd::{Kernel, Simd};
use crate::through_f32::convert;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, value_error};
use std::ops::Range;

const NAME: &str = "gated_delta_rule";

/// What a gated delta rule reads, slices.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInputs<'a, I> {
    /// `q[B,T,Hk,D]`.
    pub q: &'a [I],
    /// `k[B,T,Hk,D]`.
    pub k: &'a [I],
    /// `v[B,T,Hv,E]`.
    pub v: &'a [I],
    /// `g[B,T,Hv,G]`, the logarithm of what is left of the state.
    pub g: &'a [f32],
    /// `beta[B,T,Hv]`, how far the state is moved.
    pub beta: &'a [f32],
    /// `a_log[Hv]`, by which that logarithm is `-e^a_log * softplus(g + dt_bias)`.
    pub a_log: Option<&'a [f32]>,
    /// `dt_bias[Hv,G]`, beside an a_log.
    pub dt_bias: Option<&'a [f32]>,
    /// `state[B,Hv,D,E]`, before the first token; +0 where there is none.
    pub state: Option<&'a [f32]>,
    /// Tokens of each sequence; rows behind are padding. All have T where it is left out.
    pub len: Option<&'a [i32]>,
}

impl<'a, I: Element> DeltaInputs<'a, I> {
    pub(super) fn tensors(&self, shape: &GatedDeltaRule) -> Tensors<'a> {
        let DeltaInputs { q, k, v, g, beta, a_log, dt_bias, state, len } = *self;
        Tensors {
            q: TensorRef::of(q, &shape.of_keys()),
            k: TensorRef::of(k, &shape.of_keys()),
            v: TensorRef::of(v, &shape.of_values()),
            g: TensorRef::of(g, &shape.of_decays()),
            beta: TensorRef::of(beta, &shape.of_betas()),
            a_log: a_log.map(|a_log| TensorRef::of(a_log, &[shape.value_heads])),
            dt_bias: dt_bias.map(|dt_bias| TensorRef::of(dt_bias, &[shape.value_heads, shape.decays])),
            state: state.map(|state| TensorRef::of(state, &shape.of_state())),
            len,
        }
    }

    pub(super) fn check(&self, shape: &GatedDeltaRule, op: &'static str) -> Result<(), Error> {
        let DeltaInputs { q, k, v, g, beta, a_log, dt_bias, state, .. } = *self;
        shape.check(op)?;
        check_bias(op, dt_bias.is_some(), a_log.is_some())?;
        let given = [("q", q.len()), ("k", k.len()), ("v", v.len()), ("g", g.len()), ("beta", beta.len())];
        shape.check_slices(op, given.map(|(name, len)| (name, Some(len))))?;
        let optional = [("a_log", a_log), ("dt_bias", dt_bias), ("state", state)];
        shape.check_slices(op, optional.map(|(name, given)| (name, given.map(<[f32]>::len))))
    }
}

/// Refuses a dt_bias without an a_log.
fn check_bias(op: &'static str, bias: bool, a_log: bool) -> Result<(), Error> {
    match bias && !a_log {
        true => Err(value_error(op, "`dt_bias` is added where there is an `a_log`")),
        false => Ok(()),
    }
}

/// The gated delta rule of every head: `y[B,T,Hv,E]`, and the state that each ends with, `next[B,Hv,D,E]`. A sequence in
/// pieces, each with the `next` of the one before as its state, has the bits of the whole.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] for heads that do not divide, decays that are neither one
/// nor D, a scale that is not finite in f32, or a length beyond T.
///
/// ```
/// use samebits_ops::{Cpu, DeltaInputs, GatedDeltaRule, gated_delta_rule};
///
/// let shape = GatedDeltaRule {
///     batch: 1, length: 2, key_heads: 1, value_heads: 1, key_dim: 1, value_dim: 1, decays: 1, scale: 1.0,
/// };
/// // The state moves from 0 half way to 4, and then, when nothing is forgotten, half way to 6.
/// let (q, k, v) = ([1f32, 1.0], [1f32, 1.0], [4f32, 6.0]);
/// let inputs = DeltaInputs { q: &q[..], k: &k, v: &v, g: &[0.0, 0.0], beta: &[0.5, 0.5],
///     a_log: None, dt_bias: None, state: None, len: None };
/// let (mut y, mut next) = ([0f32; 2], [0f32; 1]);
/// gated_delta_rule(&Cpu::best(), &shape, &inputs, &mut y, &mut next)?;
/// assert_eq!((y, next), ([2.0, 4.0], [4.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn gated_delta_rule<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &GatedDeltaRule,
    inputs: &DeltaInputs<I>,
    y: &mut [O],
    next: &mut [f32],
) -> Result<(), Error> {
    inputs.check(shape, NAME)?;
    shape.check_slices(NAME, [("y", Some(y.len())), ("next", Some(next.len()))])?;
    let (of_values, of_state) = (shape.of_values(), shape.of_state());
    run(cpu, shape, inputs.tensors(shape), TensorMut::of(y, &of_values), TensorMut::of(next, &of_state))
}

/// What the inputs of a call have to be on the host.
pub(super) fn check_host(op: &'static str, shape: &GatedDeltaRule, inputs: &Tensors) -> Result<(), Error> {
    let &Tensors { q, k, v, g, beta, a_log, dt_bias, state, len } = inputs;
    let given = [("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)].map(|(name, tensor)| (name, Some(tensor)));
    on_host(op, given)?;
    on_host(op, [("a_log", a_log), ("dt_bias", dt_bias), ("state", state)])?;
    shape.lengths().check(op, len)
}

/// The form of the call has been checked.
fn run(cpu: &Cpu, shape: &GatedDeltaRule, inputs: Tensors, y: TensorMut, next: TensorMut) -> Result<(), Error> {
    check_host(NAME, shape, &inputs)?;
    let next = next.host::<f32>(NAME, "next")?;
    typed!(inputs.q.dtype() => I, {
        let inputs = Inputs::<I>::new(cpu, shape, &inputs);
        typed!(y.dtype() => O, every_head(&inputs, y.host::<O>(NAME, "y")?, next));
    });
    Ok(())
}

/// Tokens that are widened at a time.
const TOKENS: usize = 64;
/// Groups of columns of a task, of few of which there are more tasks.
const GROUPS: [usize; 2] = [4, 1];

/// Deals heads and columns; a task takes all tokens of some columns.
fn every_head<I: Element, O: Element>(inputs: &Inputs<I>, y: &mut [O], next: &mut [f32]) {
    let (cpu, shape) = (inputs.cpu, inputs.shape);
    let GatedDeltaRule { batch, value_heads, value_dim, .. } = *shape;
    let (y, next) = (SharedOut::new(y), SharedOut::new(next));
    let heads = batch.saturating_mul(value_heads);
    if heads == 0 || value_dim == 0 || shape.length == 0 && shape.key_dim == 0 {
        return;
    }
    let (of_head, of_task) = (value_dim.div_ceil(GROUP), GROUPS[usize::from(heads < 2 * cpu.threads())]);
    let tasks = of_head.div_ceil(of_task);
    cpu.each(heads * tasks, |task| {
        let (head, first) = (task / tasks, task % tasks * of_task);
        some_columns(inputs, head, first..of_head.min(first + of_task), &y, &next);
    });
}

/// Some groups of columns of a head, all tokens.
fn some_columns<I: Element, O: Element>(
    inputs: &Inputs<I>,
    head: usize,
    groups: Range<usize>,
    y: &SharedOut<O>,
    next: &SharedOut<f32>,
) {
    let (cpu, &GatedDeltaRule { length, value_heads, key_dim, value_dim, .. }) = (inputs.cpu, inputs.shape);
    let (b, h, columns) =
        (head / value_heads, head % value_heads, groups.start * GROUP..value_dim.min(groups.end * GROUP));
    let (end, width, size) = (inputs.tokens_of(b), padded(columns.len()), [key_dim, value_dim]);
    let mut state = vec![0f32; key_dim * width];
    gather(inputs.state.as_ref(), head, groups.clone(), size, &mut state);
    let mut tokens = Tokens::room(TOKENS.min(end), key_dim, columns.len());
    let mut made = vec![0f32; TOKENS.min(end) * width];
    // SAFETY: tasks have heads or columns of their own, and each token is taken once.
    let row =
        |t: usize| unsafe { y.part(((b * length + t) * value_heads + h) * value_dim + columns.start, columns.len()) };
    for from in (0..end).step_by(TOKENS) {
        let count = TOKENS.min(end - from);
        inputs.read([b, h], from..from + count, &columns, &mut tokens);
        let of_head = Forward { tokens: &tokens, count, key_dim, width, state: &mut state, y: &mut made };
        cpu.dispatch(of_head);
        for (i, made) in made.chunks_exact(width).take(count).enumerate() {
            convert(cpu, &made[..columns.len()], row(from + i));
        }
    }
    (end..length).for_each(|t| row(t).fill(O::default()));
    scatter(cpu, &state, head, groups, size, next);
}

/// `count` tokens of some columns of a head.
struct Forward<'a> {
    tokens: &'a Tokens,
    count: usize,
    key_dim: usize,
    /// Columns, whole groups.
    width: usize,
    state: &'a mut [f32],
    y: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Forward { tokens, count, key_dim: n, width, state, y } = self;
        let Tokens { w, k, a, v, beta, .. } = tokens;
        assert!(width.is_multiple_of(GROUP) && state.len() == n * width && GROUP.is_multiple_of(2 * S::LANES));
        assert!([v.len(), y.len()].iter().all(|&len| len >= count * width));
        for group in 0..width / GROUP {
            for at in (0..GROUP).step_by(2 * S::LANES) {
                let (of_state, of_row) = (group * GROUP * n + at, group * GROUP + at);
                for t in 0..count {
                    let [k, a, w] = [k, a, w].map(|x| &x[t * n..][..n]);
                    let beta = all(s, beta[t]);
                    // SAFETY: the state has n rows of a group from `group * GROUP * n` on, of whose GROUP columns these are two
                    // vectors; v and y have rows of `width`, `count` of them.
                    unsafe {
                        let r = read_back(s, state, of_state, [k, a], two(s, v, t * width + of_row));
                        let made = write_back(s, state, of_state, [k, a, w], mul(s, r, beta));
                        put(s, made, y, t * width + of_row);
                    }
                }
            }
        }
    }
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("gated_delta_rule.cu"), &KERNELS);
/// For keys of up to 128 elements, of up to 256, and of any number.
const KERNELS: [&str; 3] = ["gated_delta_rule_16", "gated_delta_rule_32", "gated_delta_rule_any"];

/// What a call by name reads.
pub(super) fn tensors<'a>(args: &CallArguments<'_, 'a>) -> Result<Tensors<'a>, Error> {
    let [q, k, v, g, beta] = ["q", "k", "v", "g", "beta"].map(|name| args.input(name));
    let [a_log, dt_bias, state] = ["a_log", "dt_bias", "state"].map(|name| args.optional(name));
    Ok(Tensors { q, k, v, g, beta, a_log, dt_bias, state, len: Lengths::of_call(args)? })
}

/// gated_delta_rule, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| run(cpu, &GatedDeltaRule::of(args.call), tensors(args)?, args.output("y"), args.output("next")),
    device: Some(|on, args| {
        let (shape, [y, next]) = (GatedDeltaRule::of(args.call), ["y", "next"].map(|name| args.output(name)));
        shape.lengths().on_device(on, args, NAME, |len| {
            typed!(args.input("q").dtype() => I, typed!(y.dtype() => O, {
                let parts = Parts::<I>::of_call(args, NAME, len)?;
                launch::<I, O>(on, &shape, parts, y.device_part(NAME, "y")?, next.device_part(NAME, "next")?)
            }))
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// The inputs on a device.
pub(super) struct Parts<'a, I> {
    pub q: Part<'a, I>,
    pub k: Part<'a, I>,
    pub v: Part<'a, I>,
    pub g: Part<'a, f32>,
    pub beta: Part<'a, f32>,
    pub a_log: Option<Part<'a, f32>>,
    pub dt_bias: Option<Part<'a, f32>>,
    pub state: Option<Part<'a, f32>>,
    pub len: Option<&'a Indices>,
}

impl<'a, I: Stored> Parts<'a, I> {
    /// Those of a call by name.
    pub fn of_call(args: &CallArguments<'_, 'a>, op: &'static str, len: Option<&'a Indices>) -> Result<Self, Error> {
        let [q, k, v] = ["q", "k", "v"].map(|name| args.input(name).device_part::<I>(op, name));
        let [g, beta] = ["g", "beta"].map(|name| args.input(name).device_part::<f32>(op, name));
        let optional = |name| args.optional(name).map(|given| given.device_part::<f32>(op, name)).transpose();
        let (a_log, dt_bias, state) = (optional("a_log")?, optional("dt_bias")?, optional("state")?);
        Ok(Parts { q: q?, k: k?, v: v?, g: g?, beta: beta?, a_log, dt_bias, state, len })
    }

    /// Buffers as they are.
    pub fn of(inputs: &DeviceInputs<'a, I>) -> Self {
        let DeviceInputs { q, k, v, g, beta, a_log, dt_bias, state, len } = *inputs;
        let [a_log, dt_bias, state] = [a_log, dt_bias, state].map(|given| given.map(|given| (given, 0)));
        Parts { q: (q, 0), k: (k, 0), v: (v, 0), g: (g, 0), beta: (beta, 0), a_log, dt_bias, state, len }
    }

    /// The arguments that all kernels begin with.
    pub fn arguments(&self, on: &Device) -> Result<Arguments, Error> {
        let Parts { q, k, v, g, beta, a_log, dt_bias, state, len } = *self;
        let arguments = Arguments::new().buffer_from(q.0, q.1).buffer_from(k.0, k.1).buffer_from(v.0, v.1);
        let arguments = arguments.buffer_from(g.0, g.1).buffer_from(beta.0, beta.1);
        let arguments = optional(optional(arguments, a_log), dt_bias);
        optional_lengths(on, optional(arguments, state), len)
    }
}

/// The dimensions that all kernels end with.
pub(super) fn dimensions(op: &'static str, arguments: Arguments, shape: &GatedDeltaRule) -> Result<Arguments, Error> {
    let GatedDeltaRule { length, value_heads, key_dim, value_dim, decays, scale, .. } = *shape;
    let arguments = arguments.long(length).int(int(op, "Hv", value_heads)?).int(int(op, "Hv / Hk", shape.group())?);
    let arguments = arguments.int(int(op, "D", key_dim)?).int(int(op, "E", value_dim)?);
    Ok(arguments.int(int(op, "G", decays)?).float(scale as f32))
}

/// Lengths were checked.
fn launch<I: Stored, O: Stored>(
    on: &Device,
    shape: &GatedDeltaRule,
    inputs: Parts<I>,
    (y, at): (&mut Buffer<O>, usize),
    (next, next_at): (&mut Buffer<f32>, usize),
) -> Result<(), Error> {
    let arguments = inputs.arguments(on)?.buffer_from(y, at).buffer_from(next, next_at);
    let arguments = dimensions(NAME, arguments, shape)?;
    let kernel = KERNELS[by_size(shape.key_dim)];
    let grid = [shape.batch.saturating_mul(shape.value_heads), shape.value_dim.div_ceil(THREADS / 8), 1];
    // SAFETY: lengths were checked, and these are the kernel's arguments.
    unsafe { on.launch(Build::of::<I, O>(NAME), kernel, grid, THREADS as u32, 0, &arguments) }
}

/// What a gated delta rule reads on a device; as [`DeltaInputs`].
#[derive(Clone, Copy)]
pub struct DeviceInputs<'a, I> {
    /// `q[B,T,Hk,D]`.
    pub q: &'a Buffer<I>,
    /// `k[B,T,Hk,D]`.
    pub k: &'a Buffer<I>,
    /// `v[B,T,Hv,E]`.
    pub v: &'a Buffer<I>,
    /// `g[B,T,Hv,G]`.
    pub g: &'a Buffer<f32>,
    /// `beta[B,T,Hv]`.
    pub beta: &'a Buffer<f32>,
    /// `a_log[Hv]`.
    pub a_log: Option<&'a Buffer<f32>>,
    /// `dt_bias[Hv,G]`.
    pub dt_bias: Option<&'a Buffer<f32>>,
    /// `state[B,Hv,D,E]`.
    pub state: Option<&'a Buffer<f32>>,
    /// Tokens of each sequence.
    pub len: Option<&'a Indices>,
}

impl<I: Stored> DeviceInputs<'_, I> {
    /// Checks them.
    pub(super) fn check(&self, op: &'static str, shape: &GatedDeltaRule) -> Result<(), Error> {
        let DeviceInputs { q, k, v, g, beta, a_log, dt_bias, state, len } = *self;
        shape.check(op)?;
        check_bias(op, dt_bias.is_some(), a_log.is_some())?;
        let given = [("q", q.len()), ("k", k.len()), ("v", v.len()), ("g", g.len()), ("beta", beta.len())];
        shape.check_slices(op, given.map(|(name, len)| (name, Some(len))))?;
        let optional = [("a_log", a_log), ("dt_bias", dt_bias), ("state", state)];
        shape.check_slices(op, optional.map(|(name, given)| (name, given.map(Buffer::len))))?;
        shape.lengths().check_indices(op, len)
    }
}

/// [`gated_delta_rule`] on a device.
///
/// # Errors
/// As [`gated_delta_rule`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    on: &Device,
    shape: &GatedDeltaRule,
    inputs: &DeviceInputs<I>,
    y: &mut Buffer<O>,
    next: &mut Buffer<f32>,
) -> Result<(), Error> {
    inputs.check(NAME, shape)?;
    shape.check_slices(NAME, [("y", Some(y.len())), ("next", Some(next.len()))])?;
    launch(on, shape, Parts::of(inputs), (y, 0), (next, 0))
}
