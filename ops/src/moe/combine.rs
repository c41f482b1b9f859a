//! Weighted sum of expert outputs: `x[R,N], row[T,K], weight[T,K], shared[T,N]? -> y[T,N]`.
//!
//! Formula: `y[t] = sum over r of weight[t][r] * x[row[t][r]] + shared[t]`.
//! Order: a chain over the rank r, ascending: `acc = fma(weight, x, acc)` from +0; then `+ shared`.
//! Rounding: every step once to f32; last rounding.

use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit, int};
use crate::call::{Arguments as CallArguments, Entry};
use crate::element::{Stored, typed};
use crate::simd::{Kernel, Simd, load_at, narrow_at};
use crate::tensor::Rows;
use crate::{Cpu, DType, Element, Error, TensorMut, TensorRef, check_len, value_error};
use samebits_schema::Call;

/// Dimensions of the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combine {
    /// Tokens T.
    pub tokens: usize,
    /// Experts of each token, K.
    pub chosen: usize,
    /// Rows of x, R.
    pub rows: usize,
    /// Elements of a row, N.
    pub n: usize,
}

/// `x[R,N], row[T,K], weight[T,K], shared[T,N]? -> y[T,N]`: row `row[t][r]` of x is what the expert of rank r made of
/// token t. Rows may stand in any order; all tensors are row-major.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when a row is outside `0..R`.
///
/// ```
/// use samebits_ops::{Combine, Cpu, combine};
///
/// // One token, whose two experts made the rows [1, 2] and [3, 4].
/// let shape = Combine { tokens: 1, chosen: 2, rows: 2, n: 2 };
/// let mut y = [0f32; 2];
/// combine(&Cpu::best(), &shape, &[1f32, 2.0, 3.0, 4.0], &[0, 1], &[1.0, 2.0], None, &mut y)?;
/// assert_eq!(y, [7.0, 10.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn combine<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &Combine,
    x: &[I],
    row: &[i32],
    weight: &[f32],
    shared: Option<&[I]>,
    y: &mut [O],
) -> Result<(), Error> {
    check(shape, [x.len(), weight.len(), y.len()], row, shared.map(<[I]>::len))?;
    let Combine { tokens, rows, n, .. } = *shape;
    let shared = shared.map(|shared| TensorRef::of(shared, &[tokens, n]));
    run(cpu, shape, TensorRef::of(x, &[rows, n]), (row, weight), shared, TensorMut::of(y, &[tokens, n]))
}

/// Rows of x and shared of any layout; `choice` is the row and weight of every expert. The call has been checked.
fn run(
    cpu: &Cpu,
    shape: &Combine,
    x: TensorRef,
    choice: (&[i32], &[f32]),
    shared: Option<TensorRef>,
    y: TensorMut,
) -> Result<(), Error> {
    let Combine { chosen, n, .. } = *shape;
    x.on_host("combine", "x")?;
    shared.map_or(Ok(()), |shared| shared.on_host("combine", "shared"))?;
    typed!(x.dtype() => I, typed!(y.dtype() => O, {
        let (x, shared) = (x.rows::<I>(), shared.map(|shared| shared.rows::<I>()));
        cpu.chunks(y.host::<O>("combine", "y")?, n, |t, y| {
            let (row, weight) = (&choice.0[t * chosen..][..chosen], &choice.1[t * chosen..][..chosen]);
            cpu.dispatch(Token { x, row, weight, shared: shared.map(|shared| shared.row(t)), y });
        });
    }));
    Ok(())
}

/// Its kernels.
const UNIT: Unit = Unit::of("combine", include_str!("combine.cu"), &["combine"]);

/// combine, by name.
pub(crate) const OP: Entry = Entry {
    name: "combine",
    cpu: |cpu, args| {
        let (shape, row, weight) = (Combine::of(args.call), args.integers("row")?, weights(args)?);
        check_rows("combine", row, shape.rows)?;
        run(cpu, &shape, args.input("x"), (row, &weight), args.optional("shared"), args.output("y"))
    },
    device: Some(|on, args| {
        let (shape, mut made) = (Combine::of(args.call), None);
        let (x, row, weight) = (args.input("x"), args.input("row"), weights_on_device(on, args, &mut made)?);
        let (shared, y) = (args.optional("shared"), args.output("y"));
        typed!(x.dtype() => I, typed!(y.dtype() => O, {
            let shared = shared.map(|shared| shared.device::<I>("combine", "shared")).transpose()?;
            let (x, y) = (x.device::<I>("combine", "x")?, y.device::<O>("combine", "y")?);
            match row.as_indices() {
                Some(row) => combine_at(on, &shape, x, row, weight, shared, y),
                None => on_device(on, &shape, x, args.integers("row")?, weight, shared, y),
            }
        }))
    }),
    unit: Some(&UNIT),
    prepare: None,
};

impl Combine {
    /// The extents of a call.
    pub(super) fn of(call: &Call) -> Combine {
        let [tokens, chosen, rows, n] = ["T", "K", "R", "N"].map(|axis| call.dim(axis));
        Combine { tokens, chosen, rows, n }
    }
}

/// The weights of a call in f32: K numbers a token, and mostly f32 already.
pub(super) fn weights(args: &CallArguments) -> Result<Vec<f32>, Error> {
    let weight = args.input("weight");
    weight.on_host(args.op(), "weight")?;
    Ok(typed!(weight.dtype() => I, {
        let rows = weight.rows::<I>();
        (0..rows.count()).flat_map(|t| rows.row(t)).map(|weight| weight.widen()).collect()
    }))
}

/// The same on a device, in `made` where they are narrower.
pub(super) fn weights_on_device<'m, 'a: 'm>(
    device: &Device,
    args: &CallArguments<'_, 'a>,
    made: &'m mut Option<Buffer<f32>>,
) -> Result<&'m Buffer<f32>, Error> {
    let (op, weight) = (args.op(), args.input("weight"));
    typed!(weight.dtype() => I, {
        if weight.dtype() == DType::Fp32 {
            return weight.device::<f32>(op, "weight");
        }
        let weight = weight.device::<I>(op, "weight")?;
        let mut narrow = vec![I::default(); weight.len()];
        weight.download(device, &mut narrow)?;
        let wide: Vec<f32> = narrow.into_iter().map(|weight| weight.widen()).collect();
        Ok(made.insert(device.upload(op, &wide)?))
    })
}

/// [`combine`] on a device; rows come from the host, which checks them.
///
/// # Errors
/// As [`combine`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &Combine,
    x: &Buffer<I>,
    row: &[i32],
    weight: &Buffer<f32>,
    shared: Option<&Buffer<I>>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    check(shape, [x.len(), weight.len(), y.len()], row, shared.map(Buffer::len))?;
    if y.is_empty() {
        return Ok(());
    }
    combine_at(device, shape, x, &Indices::new(device, "combine", row, shape.rows)?, weight, shared, y)
}

/// [`combine`] of rows that stand on the device.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; [`Error::Value`] when rows may be outside x; errors of the device.
pub fn combine_at<I: Stored, O: Stored>(
    device: &Device,
    shape: &Combine,
    x: &Buffer<I>,
    row: &Indices,
    weight: &Buffer<f32>,
    shared: Option<&Buffer<I>>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let Combine { tokens, chosen, rows, n } = *shape;
    let op = "combine";
    check_len(op, "row", "[T,K]", row.len(), &[tokens, chosen])?;
    check_lens(shape, [x.len(), weight.len(), y.len()], shared.map(Buffer::len))?;
    if row.limit() > rows {
        return Err(value_error(op, format!("rows up to {} of {rows}", row.limit())));
    }
    let arguments = Arguments::new().buffer(x).buffer(row.buffer(device)?).buffer(weight);
    let arguments = match shared {
        Some(shared) => arguments.buffer(shared).int(1),
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer(y).int(int(op, "K", chosen)?).long(n);
    let grid = [tokens, n.div_ceil(128 * 8), 1];
    // SAFETY: lengths were checked, and every row is below the limit.
    unsafe { device.launch(Build::of::<I, O>(op), op, grid, 128, 0, &arguments) }
}

/// Checks a call, whatever it runs on, by the lengths of its slices and its rows.
pub(crate) fn check(shape: &Combine, lens: [usize; 3], row: &[i32], shared: Option<usize>) -> Result<(), Error> {
    let Combine { tokens, chosen, rows, .. } = *shape;
    check_len("combine", "row", "[T,K]", row.len(), &[tokens, chosen])?;
    check_lens(shape, lens, shared)?;
    check_rows("combine", row, rows)
}

/// Every row is one of x.
pub(super) fn check_rows(op: &'static str, row: &[i32], rows: usize) -> Result<(), Error> {
    match row.iter().position(|&row| usize::try_from(row).map_or(true, |row| row >= rows)) {
        Some(i) => Err(value_error(op, format!("row element {i} is {}; x has {rows} rows", row[i]))),
        None => Ok(()),
    }
}

/// Checks the lengths of x, weight, y and shared.
pub(crate) fn check_lens(shape: &Combine, [x, weight, y]: [usize; 3], shared: Option<usize>) -> Result<(), Error> {
    let Combine { tokens, chosen, rows, n } = *shape;
    check_len("combine", "x", "[R,N]", x, &[rows, n])?;
    check_len("combine", "weight", "[T,K]", weight, &[tokens, chosen])?;
    if let Some(shared) = shared {
        check_len("combine", "shared", "[T,N]", shared, &[tokens, n])?;
    }
    check_len("combine", "y", "[T,N]", y, &[tokens, n])
}

struct Token<'a, I, O> {
    x: Rows<'a, I>,
    row: &'a [i32],
    weight: &'a [f32],
    shared: Option<&'a [I]>,
    y: &'a mut [O],
}

impl<I: Element, O: Element> Kernel for Token<'_, I, O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.y.len()).step_by(S::LANES) {
            let mut acc = s.splat(0.0);
            for (&row, &weight) in self.row.iter().zip(self.weight) {
                let x = load_at(s, self.x.row(row as usize), at, I::default());
                acc = s.fma(s.splat(weight), x, acc);
            }
            if let Some(shared) = self.shared {
                acc = s.add(acc, load_at(s, shared, at, I::default()));
            }
            narrow_at(s, acc, self.y, at);
        }
    }
}
