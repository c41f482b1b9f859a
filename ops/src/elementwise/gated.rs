//! The frame of the gradients of products with gates, `y = act(gate) * up`: `gate, up, dy -> dgate, dup`.

use crate::backend::device::{Arguments, Buffer, Build, Device};
use crate::call;
use crate::element::{Stored, typed, typed_pair};
use crate::elementwise::frame::{ELEMENTS_PER_BLOCK, Pointwise, as_rows, make_firsts};
use crate::simd::prefetch::prefetch_at;
use crate::simd::stream::{BLOCK, LINE, Stream, is_large};
use crate::simd::{Kernel, OnLine, Simd, load_at, load_two, narrow_at, narrow_two, paired};
use crate::through_f32::{convert, widen};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len};

/// An activation of a gate, made of a sigmoid of which [`Pointwise::first`] is the denominator.
pub trait Gated: Pointwise {
    /// The names of the inputs and outputs.
    const TENSORS: [&'static str; 5] = ["gate", "up", "dy", "dgate", "dup"];
    /// dgate and dup before the last rounding, of gate, up and dy and of the sigmoid.
    fn gradients<S: Simd>(self, s: S, inputs: [S::F; 3], sigmoid: S::F) -> (S::F, S::F);
}

/// The gradients of `y = (gate * sigmoid) * up`, whose activation has this slope.
#[inline(always)]
pub fn of_product<S: Simd>(s: S, [gate, up, dy]: [S::F; 3], sigmoid: S::F, slope: S::F) -> (S::F, S::F) {
    (s.mul(s.mul(dy, up), slope), s.mul(dy, s.mul(gate, sigmoid)))
}

/// `dgate = (dy * up) * slope`, `dup = dy * (gate * sigmoid)`, last rounding, of slices of one length.
///
/// # Errors
/// [`Error::Length`] when the lengths differ.
pub fn gated_backward<I: Element, O: Element>(
    cpu: &Cpu,
    name: &'static str,
    op: impl Gated,
    [gate, up, dy]: [&[I]; 3],
    [dgate, dup]: [&mut [O]; 2],
) -> Result<(), Error> {
    check(name, gate.len(), [up.len(), dy.len(), dgate.len(), dup.len()])?;
    let n = [gate.len()];
    let inputs = [gate, up, dy].map(|x| TensorRef::of(x, &n));
    run(cpu, name, op, inputs, [dgate, dup].map(|y| TensorMut::of(y, &n)))
}

/// Every tensor is as long as the gate.
fn check(name: &'static str, gate: usize, [up, dy, dgate, dup]: [usize; 4]) -> Result<(), Error> {
    for (tensor, len) in [("up", up), ("dy", dy), ("dgate", dgate), ("dup", dup)] {
        check_len(name, tensor, "of gate", len, &[gate])?;
    }
    Ok(())
}

/// The same for a call on the processor.
///
/// # Errors
/// [`Error::Value`] when a tensor is not on the host.
pub fn call(cpu: &Cpu, op: impl Gated, args: &mut call::Arguments) -> Result<(), Error> {
    let inputs = ["gate", "up", "dy"].map(|name| args.input(name));
    run(cpu, args.op(), op, inputs, ["dgate", "dup"].map(|name| args.output(name)))
}

/// Tensors of any layout and one shape.
///
/// # Errors
/// [`Error::Value`] when a tensor is not on the host.
pub fn run<P: Gated>(
    cpu: &Cpu,
    name: &'static str,
    op: P,
    inputs: [TensorRef; 3],
    [dgate, dup]: [TensorMut; 2],
) -> Result<(), Error> {
    for (input, what) in inputs.iter().zip(P::TENSORS) {
        input.on_host(name, what)?;
    }
    let (inputs, n) = as_rows(inputs, dgate.shape());
    typed_pair!(inputs[0].dtype() => I, dgate.dtype() => O, {
        let (dgate, dup) = (dgate.host::<O>(name, P::TENSORS[3])?, dup.host::<O>(name, P::TENSORS[4])?);
        let rows = inputs.map(|x| x.rows::<I>());
        let large = is_large(cpu, dgate);
        each_part(cpu, n, usize::MAX, [dgate, dup], &|row, from, outputs| {
            let inputs = rows.each_ref().map(|rows| &rows.row(row)[from..][..outputs[0].len()]);
            cpu.dispatch(Part { op, inputs, outputs, large });
        });
        Ok(())
    }, else typed!(dgate.dtype() => O, {
        // Types that no kernel is compiled for.
        let (dgate, dup) = (dgate.host::<O>(name, P::TENSORS[3])?, dup.host::<O>(name, P::TENSORS[4])?);
        each_part(cpu, n, BLOCK, [dgate, dup], &|row, from, outputs| {
            let len = outputs[0].len();
            let (mut wide, mut made) = ([[0f32; BLOCK]; 3], [[0f32; BLOCK]; 2]);
            for (x, wide) in inputs.iter().zip(&mut wide) {
                widen(cpu, x, row, from, &mut wide[..len]);
            }
            let inputs = wide.each_ref().map(|x| &x[..len]);
            cpu.dispatch(Part { op, inputs, outputs: made.each_mut().map(|y| &mut y[..len]), large: false });
            for (made, y) in made.iter().zip(outputs) {
                convert(cpu, &made[..len], y);
            }
        });
        Ok(())
    }))
}

/// What is made of a row's elements from one on: `work(row, from, [dgate, dup])`.
type Work<'a, O> = dyn Fn(usize, usize, [&mut [O]; 2]) + Sync + 'a;

/// Cuts both outputs alike, into parts of at most `most` elements within a row of `n`.
fn each_part<O: Element>(cpu: &Cpu, n: usize, most: usize, [dgate, dup]: [&mut [O]; 2], work: &Work<'_, O>) {
    let size = cpu.elements_per_chunk(dgate.len()).max(1);
    let mut chunks: Vec<_> = dgate.chunks_mut(size).zip(dup.chunks_mut(size)).collect();
    cpu.chunks(&mut chunks, 1, |chunk, both| {
        for (dgate, dup) in both {
            let mut done = 0;
            while done < dgate.len() {
                let at = chunk * size + done;
                let len = most.min(n - at % n).min(dgate.len() - done);
                work(at / n, at % n, [&mut dgate[done..][..len], &mut dup[done..][..len]]);
                done += len;
            }
        }
    });
}

struct Part<'a, P, I, O> {
    op: P,
    /// gate, up and dy.
    inputs: [&'a [I]; 3],
    /// dgate and dup.
    outputs: [&'a mut [O]; 2],
    large: bool,
}

/// The prefetch distance in bytes.
const AHEAD: usize = 4 << 10;

impl<P: Gated, I: Element, O: Element> Kernel for Part<'_, P, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Part { op, inputs: [gate, up, dy], outputs: [dgate, dup], large } = self;
        let (all, two, pairs) = (gate.len(), 2 * S::LANES, paired::<I, O>());
        let (mut dgates, mut dups) = (Stream::<O>::new(dgate, large), Stream::<O>::new(dup, large));
        let OnLine(firsts) = &mut OnLine([0f32; BLOCK]);
        for from in (0..all).step_by(BLOCK) {
            let len = BLOCK.min(all - from);
            let (gate, up, dy) = (&gate[from..][..len], &up[from..][..len], &dy[from..][..len]);
            let (dgate, dup) = (dgates.room(len), dups.room(len));
            let firsts = &mut firsts[..len];
            make_firsts::<S, I, O, 0>(s, op, gate, [], firsts);
            let whole = len - len % LINE;
            for from in (0..whole).step_by(LINE) {
                prefetch_at(&gate[from..][..LINE], AHEAD);
                prefetch_at(&up[from..][..LINE], AHEAD);
                prefetch_at(&dy[from..][..LINE], AHEAD);
                for at in (from..from + LINE).step_by(two) {
                    let (g0, g1) = load_two(s, &gate[at..][..two], pairs);
                    let (u0, u1) = load_two(s, &up[at..][..two], pairs);
                    let (d0, d1) = load_two(s, &dy[at..][..two], pairs);
                    let (f0, f1) = load_two(s, &firsts[at..][..two], false);
                    let (m0, m1) = (both(s, op, [g0, u0, d0], f0), both(s, op, [g1, u1, d1], f1));
                    narrow_two(s, (m0.0, m1.0), &mut dgate[at..][..two], pairs);
                    narrow_two(s, (m0.1, m1.1), &mut dup[at..][..two], pairs);
                }
            }
            for at in (whole..len).step_by(S::LANES) {
                let (g, u) = (load_at(s, gate, at, I::default()), load_at(s, up, at, I::default()));
                let (d, first) = (load_at(s, dy, at, I::default()), load_at(s, firsts, at, 1.0));
                let made = both(s, op, [g, u, d], first);
                narrow_at(s, made.0, dgate, at);
                narrow_at(s, made.1, dup, at);
            }
            dgates.put(s, len);
            dups.put(s, len);
        }
        dgates.end(s);
        dups.end(s);
    }
}

/// dgate and dup before the last rounding.
#[inline(always)]
fn both<S: Simd, P: Gated>(s: S, op: P, inputs: [S::F; 3], first: S::F) -> (S::F, S::F) {
    op.gradients(s, inputs, s.div(s.splat(1.0), first))
}

/// Starts the kernel called `name`, which is told `numbers` beside the tensors.
///
/// # Errors
/// [`Error::Length`] when the lengths differ; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    name: &'static str,
    numbers: &[f32],
    [gate, up, dy]: [&Buffer<I>; 3],
    [dgate, dup]: [&mut Buffer<O>; 2],
) -> Result<(), Error> {
    check(name, gate.len(), [up.len(), dy.len(), dgate.len(), dup.len()])?;
    let arguments = Arguments::new().buffer(gate).buffer(up).buffer(dy).buffer(dgate).buffer(dup).long(gate.len());
    let arguments = numbers.iter().fold(arguments, |arguments, &number| arguments.float(number));
    let grid = [gate.len().div_ceil(ELEMENTS_PER_BLOCK), 1, 1];
    // SAFETY: all of them have as many elements as the kernel is told.
    unsafe { device.launch(Build::of::<I, O>(name), name, grid, 256, 0, &arguments) }
}

/// The same for a call.
///
/// # Errors
/// As [`on_device`].
pub fn call_on_device(device: &Device, args: &mut call::Arguments, numbers: &[f32]) -> Result<(), Error> {
    let name = args.op();
    let [gate, up, dy] = ["gate", "up", "dy"].map(|name| args.input(name));
    let (dgate, dup) = (args.output("dgate"), args.output("dup"));
    typed!(gate.dtype() => I, typed!(dgate.dtype() => O, {
        let inputs = [gate.device::<I>(name, "gate")?, up.device(name, "up")?, dy.device(name, "dy")?];
        on_device::<I, O>(device, name, numbers, inputs, [dgate.device(name, "dgate")?, dup.device(name, "dup")?])
    }))
}
