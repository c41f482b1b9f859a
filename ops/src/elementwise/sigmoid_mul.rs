//! Rows times sigmoids of gates: `gate[R,G], x[R,N] -> y[R,N]`, G a divisor of N.
//!
//! Formula: `y = sigmoid(gate) * x`, `sigmoid(x) = 1 / (1 + e^-x)`; each gate is for N / G elements side by side.
//! Order: every element alone.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed, typed_pair};
use crate::elementwise::frame::{ELEMENTS_PER_BLOCK, Pointwise, elementwise};
use crate::math::{one_plus_exp_neg, sigmoid};
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two, paired};
use crate::through_f32::{self, f32_row};
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};
use samebits_schema::Call;

const NAME: &str = "sigmoid_mul";

/// Dimensions of rows and their gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SigmoidMul {
    /// Rows R.
    pub rows: usize,
    /// Gates of a row, G.
    pub gates: usize,
    /// Elements of a row, N, a multiple of G.
    pub n: usize,
}

impl SigmoidMul {
    /// The extents of a call.
    pub(super) fn of(call: &Call) -> SigmoidMul {
        let [rows, gates, n] = ["R", "G", "N"].map(|axis| call.dim(axis));
        SigmoidMul { rows, gates, n }
    }

    /// The shapes of gates and of elements.
    pub(super) fn shapes(&self) -> [[usize; 2]; 2] {
        [[self.rows, self.gates], [self.rows, self.n]]
    }

    /// How many elements a gate is for.
    pub(super) fn each(&self) -> usize {
        self.n.checked_div(self.gates).unwrap_or(0)
    }

    /// Gates share the elements, and tensors of gates and of elements, by their names, have as many as there are.
    pub(super) fn check(
        &self,
        op: &'static str,
        gates: &[(&'static str, usize)],
        elements: &[(&'static str, usize)],
    ) -> Result<(), Error> {
        if !self.n.is_multiple_of(self.gates) {
            let why = format!("{} gates do not share {} elements; G must divide N", self.gates, self.n);
            return Err(value_error(op, why));
        }
        for (tensors, form, extents) in
            [(gates, "[R,G]", [self.rows, self.gates]), (elements, "[R,N]", [self.rows, self.n])]
        {
            for &(name, len) in tensors {
                check_len(op, name, form, len, &extents)?;
            }
        }
        Ok(())
    }
}

/// `gate[R,G], x[R,N] -> y[R,N]`: `y[r][i] = sigmoid(gate[r][i / (N / G)]) * x[r][i]`, row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when G does not divide N.
///
/// ```
/// use samebits_ops::{Cpu, SigmoidMul, sigmoid_mul};
///
/// // The sigmoid of 0 is 1/2, that of a large number 1.
/// let shape = SigmoidMul { rows: 1, gates: 2, n: 4 };
/// let mut y = [9f32; 4];
/// sigmoid_mul(&Cpu::best(), &shape, &[0f32, 100.0], &[3.0, 2.0, 5.0, 7.0], &mut y)?;
/// assert_eq!(y, [1.5, 1.0, 5.0, 7.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn sigmoid_mul<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &SigmoidMul,
    gate: &[I],
    x: &[I],
    y: &mut [O],
) -> Result<(), Error> {
    shape.check(NAME, &[("gate", gate.len())], &[("x", x.len()), ("y", y.len())])?;
    let [gates, elements] = shape.shapes();
    let inputs = [TensorRef::of(gate, &gates), TensorRef::of(x, &elements)];
    run(cpu, shape, inputs, TensorMut::of(y, &elements))
}

/// Tensors of any layout; the form of the call has been checked.
fn run(cpu: &Cpu, shape: &SigmoidMul, [gate, x]: [TensorRef; 2], y: TensorMut) -> Result<(), Error> {
    let SigmoidMul { rows, gates, n } = *shape;
    if gates == n {
        return elementwise(cpu, NAME, OwnGates, [gate, x], y);
    }
    gate.on_host(NAME, "gate")?;
    x.on_host(NAME, "x")?;
    typed_pair!(x.dtype() => I, y.dtype() => O, {
        let (gate, x) = (gate.rows::<I>(), x.rows::<I>());
        let per_chunk = cpu.rows_per_chunk(rows, n);
        cpu.chunks(y.host::<O>(NAME, "y")?, per_chunk * n, |chunk, y| {
            for (row, y) in (chunk * per_chunk..).zip(y.chunks_mut(n)) {
                cpu.dispatch(Row { gate: gate.row(row), x: x.row(row), y });
            }
        });
        Ok(())
    }, else through_f32::rows(cpu, NAME, y, n, &|row, y| {
        cpu.dispatch(Row { gate: &f32_row(cpu, &gate, row), x: &f32_row(cpu, &x, row), y });
    }))
}

/// Every element has a gate of its own.
#[derive(Clone, Copy)]
pub(super) struct OwnGates;

impl Pointwise for OwnGates {
    const FIRST: bool = true;
    #[inline(always)]
    fn first<S: Simd>(self, s: S, gate: S::F) -> S::F {
        one_plus_exp_neg(s, gate)
    }
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, _: S::F, first: S::F, x: S::F) -> S::F {
        s.mul(s.div(s.splat(1.0), first), x)
    }
}

/// Gates whose sigmoids are made together.
pub(super) const TOGETHER: usize = 64;

/// A row of at least one element.
struct Row<'a, I, O> {
    gate: &'a [I],
    x: &'a [I],
    y: &'a mut [O],
}

impl<I: Element, O: Element> Kernel for Row<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Row { gate, x, y } = self;
        let (each, mut at) = (x.len() / gate.len(), 0);
        for gate in gate.chunks(TOGETHER) {
            for &factor in &sigmoids(s, gate)[..gate.len()] {
                multiply(s, factor, &x[at..][..each], &mut y[at..][..each]);
                at += each;
            }
        }
    }
}

/// The sigmoids of at most [`TOGETHER`] gates.
#[inline(always)]
pub(super) fn sigmoids<S: Simd, I: Element>(s: S, gate: &[I]) -> [f32; TOGETHER] {
    let mut made = [0f32; TOGETHER];
    for at in (0..gate.len()).step_by(S::LANES) {
        narrow_at(s, sigmoid(s, load_at(s, gate, at, I::default())), &mut made[..gate.len()], at);
    }
    made
}

/// `y[i] = factor * x[i]`, last rounding.
#[inline(always)]
pub(super) fn multiply<S: Simd, I: Element, O: Element>(s: S, factor: f32, x: &[I], y: &mut [O]) {
    let (factor, two, pairs) = (s.splat(factor), 2 * S::LANES, paired::<I, O>());
    let whole = x.len() - x.len() % two;
    for at in (0..whole).step_by(two) {
        let (a, b) = load_two(s, &x[at..][..two], pairs);
        narrow_two(s, (s.mul(factor, a), s.mul(factor, b)), &mut y[at..][..two], pairs);
    }
    for at in (whole..x.len()).step_by(S::LANES) {
        narrow_at(s, s.mul(factor, load_at(s, x, at, I::default())), y, at);
    }
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("sigmoid_mul.cu"), &[NAME]);

/// sigmoid_mul, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| run(cpu, &SigmoidMul::of(args.call), [args.input("gate"), args.input("x")], args.output("y")),
    device: Some(|on, args| {
        let (shape, gate, x, y) = (SigmoidMul::of(args.call), args.input("gate"), args.input("x"), args.output("y"));
        typed!(x.dtype() => I, typed!(y.dtype() => O, {
            on_device::<I, O>(on, &shape, gate.device(NAME, "gate")?, x.device(NAME, "x")?, y.device(NAME, "y")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`sigmoid_mul`] on a device.
///
/// # Errors
/// As [`sigmoid_mul`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &SigmoidMul,
    gate: &Buffer<I>,
    x: &Buffer<I>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    shape.check(NAME, &[("gate", gate.len())], &[("x", x.len()), ("y", y.len())])?;
    let arguments = Arguments::new().buffer(gate).buffer(x).buffer(y).long(x.len()).long(shape.each());
    let grid = [x.len().div_ceil(ELEMENTS_PER_BLOCK), 1, 1];
    // SAFETY: lengths were checked, and the kernel leaves alone what is behind the last element.
    unsafe { device.launch(Build::of::<I, O>(NAME), NAME, grid, 256, 0, &arguments) }
}
