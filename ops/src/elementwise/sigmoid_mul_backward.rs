//! Gradient of rows times sigmoids of gates: `gate[R,G], x[R,N], dy[R,N] -> dgate[R,G], dx[R,N]`, G a divisor of N.
//!
//! Formula: of a gate and the N / G elements that it is for, `s = sigmoid(gate)`: `dgate = sum of dy * x, times s * (1 - s)`,
//! `dx = s * dy`.
//! Order: the sum is a `lanes` sum, each lane a chain: `lane = fma(dy, x, lane)`; `sum * (s * (1 - s))`.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::elementwise::frame::ELEMENTS_PER_BLOCK;
use crate::elementwise::gated::{self, Gated};
use crate::elementwise::sigmoid_mul::{OwnGates, SigmoidMul, TOGETHER, multiply, sigmoids};
use crate::reduce::Lanes;
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::through_f32::{convert, f32_row};
use crate::{Cpu, Element, Error, TensorMut, TensorRef};

const NAME: &str = "sigmoid_mul_backward";

/// The gradients `dgate[R,G]` and `dx[R,N]` of [`sigmoid_mul`](crate::sigmoid_mul) from that of its output, `dy[R,N]`,
/// row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`](crate::Error::Value) when G does not divide N.
///
/// ```
/// use samebits_ops::{Cpu, SigmoidMul, sigmoid_mul_backward};
///
/// // At 0 the sigmoid is 1/2 and its slope 1/4.
/// let shape = SigmoidMul { rows: 1, gates: 1, n: 2 };
/// let (mut dgate, mut dx) = ([9f32; 1], [9f32; 2]);
/// sigmoid_mul_backward(&Cpu::best(), &shape, [&[0f32], &[3.0, 2.0], &[1.0, 4.0]], [&mut dgate, &mut dx])?;
/// assert_eq!((dgate, dx), ([2.75], [0.5, 2.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn sigmoid_mul_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &SigmoidMul,
    [gate, x, dy]: [&[I]; 3],
    [dgate, dx]: [&mut [O]; 2],
) -> Result<(), Error> {
    check(shape, [gate.len(), dgate.len()], [x.len(), dy.len(), dx.len()])?;
    let [gates, elements] = shape.shapes();
    let inputs = [TensorRef::of(gate, &gates), TensorRef::of(x, &elements), TensorRef::of(dy, &elements)];
    run(cpu, shape, inputs, [TensorMut::of(dgate, &gates), TensorMut::of(dx, &elements)])
}

/// The lengths of gate and dgate, and of x, dy and dx.
fn check(shape: &SigmoidMul, [gate, dgate]: [usize; 2], [x, dy, dx]: [usize; 3]) -> Result<(), Error> {
    shape.check(NAME, &[("gate", gate), ("dgate", dgate)], &[("x", x), ("dy", dy), ("dx", dx)])
}

/// Tensors of any layout; the form of the call has been checked.
fn run(cpu: &Cpu, shape: &SigmoidMul, [gate, x, dy]: [TensorRef; 3], [dgate, dx]: [TensorMut; 2]) -> Result<(), Error> {
    let SigmoidMul { rows, gates, n } = *shape;
    if gates == n {
        return gated::run(cpu, NAME, OwnGates, [gate, x, dy], [dgate, dx]);
    }
    for (input, name) in [(&gate, "gate"), (&x, "x"), (&dy, "dy")] {
        input.on_host(NAME, name)?;
    }
    let per_chunk = cpu.rows_per_chunk(rows, n);
    typed_pair!(x.dtype() => I, dx.dtype() => O, {
        let (gate, x, dy) = (gate.rows::<I>(), x.rows::<I>(), dy.rows::<I>());
        let mut outputs = outputs(shape, dgate.host::<O>(NAME, "dgate")?, dx.host::<O>(NAME, "dx")?);
        cpu.chunks(&mut outputs, per_chunk, |chunk, outputs| {
            let mut wide = vec![0f32; n];
            for (row, (dgate, dx)) in (chunk * per_chunk..).zip(outputs) {
                convert(cpu, dy.row(row), &mut wide);
                cpu.dispatch(Row { gate: gate.row(row), x: x.row(row), dy: &wide, dgate, dx });
            }
        });
        Ok(())
    }, else typed!(dx.dtype() => O, {
        // Types that no kernel is compiled for.
        let mut outputs = outputs(shape, dgate.host::<O>(NAME, "dgate")?, dx.host::<O>(NAME, "dx")?);
        cpu.chunks(&mut outputs, per_chunk, |chunk, outputs| {
            let (mut of_gates, mut of_elements) = (vec![0f32; gates], vec![0f32; n]);
            for (row, (dgate, dx)) in (chunk * per_chunk..).zip(outputs) {
                let [gate, x, dy] = [&gate, &x, &dy].map(|input| f32_row(cpu, input, row));
                cpu.dispatch(Row { gate: &gate, x: &x, dy: &dy, dgate: &mut of_gates, dx: &mut of_elements });
                convert(cpu, &of_gates, dgate);
                convert(cpu, &of_elements, dx);
            }
        });
        Ok(())
    }))
}

/// The rows of dgate, each with that of dx, of which there are none where N is 0.
fn outputs<'a, O>(shape: &SigmoidMul, dgate: &'a mut [O], dx: &'a mut [O]) -> Vec<(&'a mut [O], &'a mut [O])> {
    let mut dx = dx.chunks_mut(shape.n.max(1));
    dgate.chunks_mut(shape.gates).map(|dgate| (dgate, dx.next().unwrap_or_default())).collect()
}

/// A row of at least one gate.
struct Row<'a, I, O> {
    gate: &'a [I],
    x: &'a [I],
    dy: &'a [f32],
    dgate: &'a mut [O],
    dx: &'a mut [O],
}

impl<I: Element, O: Element> Kernel for Row<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Row { gate, x, dy, dgate, dx } = self;
        let (each, one, mut at) = (x.len() / gate.len(), s.splat(1.0), 0);
        for (gate, dgate) in gate.chunks(TOGETHER).zip(dgate.chunks_mut(TOGETHER)) {
            let (factors, mut sums) = (sigmoids(s, gate), [0f32; TOGETHER]);
            for (&factor, sum) in factors[..gate.len()].iter().zip(&mut sums) {
                let (x, dy) = (&x[at..][..each], &dy[at..][..each]);
                let mut lanes = Lanes::new();
                lanes.add_products(s, dy, x);
                *sum = lanes.fold(s, each);
                multiply(s, factor, dy, &mut dx[at..][..each]);
                at += each;
            }
            for at in (0..gate.len()).step_by(S::LANES) {
                let (factor, sum) = (load_at(s, &factors, at, 0.0), load_at(s, &sums, at, 0.0));
                narrow_at(s, s.mul(sum, s.mul(factor, s.sub(one, factor))), dgate, at);
            }
        }
    }
}

impl Gated for OwnGates {
    const TENSORS: [&'static str; 5] = ["gate", "x", "dy", "dgate", "dx"];
    #[inline(always)]
    fn gradients<S: Simd>(self, s: S, [_, x, dy]: [S::F; 3], sigmoid: S::F) -> (S::F, S::F) {
        // A sum of one term: the other lanes, which are +0, are added to it.
        let (zero, slope) = (s.splat(0.0), s.mul(sigmoid, s.sub(s.splat(1.0), sigmoid)));
        (s.mul(s.add(s.fma(dy, x, zero), zero), slope), s.mul(sigmoid, dy))
    }
}

/// Its kernels: of gates of one element each, and of others.
const UNIT: Unit = Unit::of(NAME, include_str!("sigmoid_mul_backward.cu"), &[NAME, "sigmoid_mul_backward_sums"]);

/// sigmoid_mul_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let inputs = ["gate", "x", "dy"].map(|name| args.input(name));
        run(cpu, &SigmoidMul::of(args.call), inputs, ["dgate", "dx"].map(|name| args.output(name)))
    },
    device: Some(|on, args| {
        let (shape, [gate, x, dy]) = (SigmoidMul::of(args.call), ["gate", "x", "dy"].map(|name| args.input(name)));
        let (dgate, dx) = (args.output("dgate"), args.output("dx"));
        typed!(x.dtype() => I, typed!(dx.dtype() => O, {
            let inputs = [gate.device::<I>(NAME, "gate")?, x.device(NAME, "x")?, dy.device(NAME, "dy")?];
            on_device::<I, O>(on, &shape, inputs, [dgate.device(NAME, "dgate")?, dx.device(NAME, "dx")?])
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`sigmoid_mul_backward`] on a device.
///
/// # Errors
/// As [`sigmoid_mul_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &SigmoidMul,
    [gate, x, dy]: [&Buffer<I>; 3],
    [dgate, dx]: [&mut Buffer<O>; 2],
) -> Result<(), Error> {
    check(shape, [gate.len(), dgate.len()], [x.len(), dy.len(), dx.len()])?;
    let (build, count) = (Build::of::<I, O>(NAME), gate.len());
    let arguments = Arguments::new().buffer(gate).buffer(x).buffer(dy).buffer(dgate).buffer(dx).long(count);
    if shape.gates == shape.n {
        let grid = [count.div_ceil(ELEMENTS_PER_BLOCK), 1, 1];
        // SAFETY: all of them have as many elements as the kernel is told.
        return unsafe { device.launch(build, NAME, grid, 256, 0, &arguments) };
    }
    let (arguments, grid) = (arguments.long(shape.each()), [count.div_ceil(4), 1, 1]);
    // SAFETY: lengths were checked; a warp takes a gate, and the kernel leaves those behind the last alone.
    unsafe { device.launch(build, "sigmoid_mul_backward_sums", grid, 128, 0, &arguments) }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    /// Sums of nothing are +0, times what is a NaN where the gate is.
    pub(crate) fn gates_of_no_elements_have_gradients_of_zero() {
        let shape = SigmoidMul { rows: 1, gates: 2, n: 0 };
        let mut dgate = [1f32; 2];
        sigmoid_mul_backward(&Cpu::best(), &shape, [&[3f32, f32::NAN], &[], &[]], [&mut dgate, &mut []]).unwrap();
        assert_eq!(dgate.map(f32::to_bits), [0, 0x7FC0_0000]);
    }
}
