//! Gradient of the weighted sum of expert outputs: `x[R,N], row[T,K], weight[T,K], dy[T,N] -> dx[R,N], dweight[T,K]`
//! (f32).
//!
//! Formula: `dx[row[t][r]] = weight[t][r] * dy[t]`, `dweight[t][r] = sum of dy[t] * x[row[t][r]]`.
//! Order: every element of dx alone, +0 in a row that is not named; dweight is a `lanes` sum, each lane a chain:
//! `lane = fma(dy, x, lane)`.
//! Rounding: every step once to f32; last rounding of dx.

use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit, int};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::moe::combine::{Combine, check_rows, weights, weights_on_device};
use crate::reduce::Lanes;
use crate::simd::stream::{Stream, is_large};
use crate::simd::{Kernel, Simd, load_at, load_two, narrow_at, narrow_two};
use crate::through_f32;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, check_len, value_error};

const NAME: &str = "combine_backward";

/// The gradients `dx[R,N]` and `dweight[T,K]` of [`combine`](crate::combine()) from that of y, `dy[T,N]`, row-major. No
/// row may be named twice; dx of one that is not named is +0. The gradient of shared is dy.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when a row is outside `0..R` or named twice.
///
/// ```
/// use samebits_ops::{Combine, Cpu, combine_backward};
///
/// // One token, whose two experts made the rows [1, 2] and [3, 4].
/// let shape = Combine { tokens: 1, chosen: 2, rows: 2, n: 2 };
/// let (mut dx, mut dweight) = ([0f32; 4], [0f32; 2]);
/// let x_and_dy = [&[1f32, 2.0, 3.0, 4.0][..], &[10.0, 1.0]];
/// combine_backward(&Cpu::best(), &shape, x_and_dy, &[0, 1], &[1.0, 2.0], &mut dx, &mut dweight)?;
/// assert_eq!((dx, dweight), ([10.0, 1.0, 20.0, 2.0], [12.0, 34.0]));
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn combine_backward<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Combine,
    [x, dy]: [&[I]; 2],
    row: &[i32],
    weight: &[f32],
    dx: &mut [O],
    dweight: &mut [f32],
) -> Result<(), Error> {
    let Combine { tokens, rows, n, .. } = *shape;
    check(shape, [x.len(), dy.len(), dx.len()], [row.len(), weight.len(), dweight.len()])?;
    let inputs = [TensorRef::of(x, &[rows, n]), TensorRef::of(dy, &[tokens, n])];
    run(cpu, shape, inputs, (row, weight), TensorMut::of(dx, &[rows, n]), dweight)
}

/// The lengths of x, dy and dx, and of row, weight and dweight.
fn check(shape: &Combine, [x, dy, dx]: [usize; 3], choices: [usize; 3]) -> Result<(), Error> {
    let Combine { tokens, chosen, rows, n } = *shape;
    check_len(NAME, "x", "[R,N]", x, &[rows, n])?;
    check_len(NAME, "dy", "[T,N]", dy, &[tokens, n])?;
    check_len(NAME, "dx", "[R,N]", dx, &[rows, n])?;
    for (name, found) in ["row", "weight", "dweight"].into_iter().zip(choices) {
        check_len(NAME, name, "[T,K]", found, &[tokens, chosen])?;
    }
    Ok(())
}

/// Every row is one of x, and none is named twice.
fn check_named_once(row: &[i32], rows: usize) -> Result<(), Error> {
    check_rows(NAME, row, rows)?;
    let mut named = vec![false; row.iter().max().map_or(0, |&last| last as usize + 1)];
    match row.iter().position(|&row| std::mem::replace(&mut named[row as usize], true)) {
        Some(i) => Err(value_error(NAME, format!("row element {i} is {}, which is named twice", row[i]))),
        None => Ok(()),
    }
}

/// Rows of x and dy of any layout; `choice` is the row and weight of every expert. The lengths have been checked.
fn run(
    cpu: &Cpu,
    shape: &Combine,
    [x, dy]: [TensorRef; 2],
    (row, weight): (&[i32], &[f32]),
    dx: TensorMut,
    dweight: &mut [f32],
) -> Result<(), Error> {
    let Combine { tokens, chosen, rows, n } = *shape;
    check_named_once(row, rows)?;
    x.on_host(NAME, "x")?;
    dy.on_host(NAME, "dy")?;
    if n == 0 {
        dweight.fill(0.0);
        return Ok(());
    }
    typed!(x.dtype() => I, typed!(dx.dtype() => O, {
        let (x, dy, dx) = (x.rows::<I>(), dy.rows::<I>(), dx.host::<O>(NAME, "dx")?);
        let large = is_large(cpu, dx);
        // Every choice takes its row of dx.
        let mut rows: Vec<Option<&mut [O]>> = dx.chunks_exact_mut(n).map(Some).collect();
        let mut choices: Vec<Choice<O>> = Vec::with_capacity(row.len());
        for ((&row, &weight), dweight) in row.iter().zip(weight).zip(dweight) {
            let dx = rows[row as usize].take().expect("it is named once");
            choices.push(Choice { row: row as usize, weight, dx, dweight });
        }
        let per_chunk = cpu.rows_per_chunk(tokens, n.saturating_mul(chosen));
        cpu.chunks(&mut choices, per_chunk * chosen, |chunk, choices| {
            let mut wide = vec![0f32; n];
            for (i, choices) in choices.chunks_mut(chosen).enumerate() {
                // A token's gradient is read again for each of its experts.
                through_f32::convert(cpu, dy.row(chunk * per_chunk + i), &mut wide);
                for Choice { row, weight, dx, dweight } in choices {
                    **dweight = cpu.dispatch(Dot { dy: &wide, x: x.row(*row) });
                    cpu.dispatch(Weigh { weight: *weight, dy: &wide, dx, large });
                }
            }
            cpu.dispatch(End { large });
        });
        let mut others: Vec<&mut [O]> = rows.into_iter().flatten().collect();
        cpu.chunks(&mut others, 64, |_, rows| rows.iter_mut().for_each(|row| row.fill(O::narrow(0.0))));
        Ok(())
    }))
}

/// An expert of a token: its row, and what is made of it.
struct Choice<'a, O> {
    row: usize,
    weight: f32,
    dx: &'a mut [O],
    dweight: &'a mut f32,
}

/// `lanes(dy * x)`.
struct Dot<'a, I> {
    dy: &'a [f32],
    x: &'a [I],
}

impl<I: Element> Kernel for Dot<'_, I> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut lanes = Lanes::new();
        lanes.add_products(s, self.dy, self.x);
        f32::narrow(lanes.fold(s, self.x.len()))
    }
}

/// `dx = weight * dy`, for [`End`] to end.
struct Weigh<'a, O> {
    weight: f32,
    dy: &'a [f32],
    dx: &'a mut [O],
    large: bool,
}

impl<O: Element> Kernel for Weigh<'_, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (weight, two) = (s.splat(self.weight), 2 * S::LANES);
        let mut stream = Stream::<O>::new(self.dx, self.large);
        let mut from = 0;
        while from < self.dy.len() {
            let dx = stream.room(self.dy.len() - from);
            let dy = &self.dy[from..][..dx.len()];
            let whole = dy.len() - dy.len() % two;
            for at in (0..whole).step_by(two) {
                let (a, b) = load_two(s, &dy[at..][..two], false);
                narrow_two(s, (s.mul(weight, a), s.mul(weight, b)), &mut dx[at..][..two], false);
            }
            for at in (whole..dy.len()).step_by(S::LANES) {
                narrow_at(s, s.mul(weight, load_at(s, dy, at, 0.0)), dx, at);
            }
            stream.put(s, dy.len());
            from += dy.len();
        }
    }
}

/// What [`Stream::end`] does, once for many rows: it takes as long as a row.
struct End {
    large: bool,
}

impl Kernel for End {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.large {
            s.fence();
        }
    }
}

/// Its kernels.
const UNIT: Unit = Unit::of(NAME, include_str!("combine_backward.cu"), &["combine_backward", "combine_backward_clear"]);

/// combine_backward, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let (shape, row, weight) = (Combine::of(args.call), args.integers("row")?, weights(args)?);
        let inputs = ["x", "dy"].map(|name| args.input(name));
        let (dx, dweight) = (args.output("dx"), args.output("dweight").host::<f32>(NAME, "dweight")?);
        run(cpu, &shape, inputs, (row, &weight), dx, dweight)
    },
    device: Some(|on, args| {
        let (shape, mut made) = (Combine::of(args.call), None);
        let (x, dy, row) = (args.input("x"), args.input("dy"), args.input("row"));
        let weight = weights_on_device(on, args, &mut made)?;
        let (dx, dweight) = (args.output("dx"), args.output("dweight").device::<f32>(NAME, "dweight")?);
        typed!(x.dtype() => I, typed!(dx.dtype() => O, {
            let inputs = [x.device::<I>(NAME, "x")?, dy.device::<I>(NAME, "dy")?];
            let dx = dx.device::<O>(NAME, "dx")?;
            match row.as_indices() {
                Some(row) => combine_backward_at(on, &shape, inputs, row, weight, dx, dweight),
                None => on_device(on, &shape, inputs, args.integers("row")?, weight, dx, dweight),
            }
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`combine_backward`] on a device; rows come from the host, which checks them.
///
/// # Errors
/// As [`combine_backward`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &Combine,
    inputs: [&Buffer<I>; 2],
    row: &[i32],
    weight: &Buffer<f32>,
    dx: &mut Buffer<O>,
    dweight: &mut Buffer<f32>,
) -> Result<(), Error> {
    let lens = [inputs[0].len(), inputs[1].len(), dx.len()];
    check(shape, lens, [row.len(), weight.len(), dweight.len()])?;
    check_named_once(row, shape.rows)?;
    combine_backward_at(device, shape, inputs, &Indices::distinct(device, NAME, row, shape.rows)?, weight, dx, dweight)
}

/// [`combine_backward`] of rows that stand on the device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; [`Error::Value`] when rows may be outside x, or are not
/// [`Indices::distinct`]; errors of the device.
pub fn combine_backward_at<I: Stored, O: Stored>(
    device: &Device,
    shape: &Combine,
    [x, dy]: [&Buffer<I>; 2],
    row: &Indices,
    weight: &Buffer<f32>,
    dx: &mut Buffer<O>,
    dweight: &mut Buffer<f32>,
) -> Result<(), Error> {
    let Combine { chosen, rows, n, .. } = *shape;
    check(shape, [x.len(), dy.len(), dx.len()], [row.len(), weight.len(), dweight.len()])?;
    if row.limit() > rows {
        return Err(value_error(NAME, format!("rows up to {} of {rows}", row.limit())));
    }
    if row.len() > 1 && !row.is_distinct() {
        return Err(value_error(NAME, "rows may be named twice; they must be distinct indices"));
    }
    let build = Build::of::<I, O>(NAME);
    if row.len() < rows && !dx.is_empty() {
        let arguments = Arguments::new().buffer(dx).long(dx.len());
        // SAFETY: a thread leaves alone what is behind the last element.
        unsafe {
            device.launch(build, "combine_backward_clear", [dx.len().div_ceil(128 * 8), 1, 1], 128, 0, &arguments)?
        };
    }
    if row.is_empty() {
        return Ok(());
    }
    let arguments =
        Arguments::new().buffer(x).buffer(row.buffer(device)?).buffer(weight).buffer(dy).buffer(dx).buffer(dweight);
    let arguments = arguments.long(row.len()).int(int(NAME, "K", chosen)?).long(n);
    // SAFETY: lengths were checked, every row is below the limit and none comes twice; a warp takes a choice, and the
    // kernel leaves those behind the last alone.
    unsafe { device.launch(build, NAME, [row.len().div_ceil(4), 1, 1], 128, 0, &arguments) }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    /// Sums of nothing are +0.
    pub(crate) fn rows_without_elements_have_weights_gradients_of_zero() {
        let shape = Combine { tokens: 1, chosen: 2, rows: 3, n: 0 };
        let (mut dx, mut dweight) = ([0f32; 0], [f32::NAN; 2]);
        combine_backward(&Cpu::best(), &shape, [&[0f32; 0]; 2], &[2, 0], &[1.0; 2], &mut dx, &mut dweight).unwrap();
        assert_eq!(dweight.map(f32::to_bits), [0, 0]);
    }
}
