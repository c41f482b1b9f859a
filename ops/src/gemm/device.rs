//! Launches of matrix products.

use crate::backend::device::{Arguments, Buffer, Build, Device, Indices, Unit, int};
use crate::element::Stored;
use crate::gemm::shape::segment_length;
use crate::{Error, Gemm, Tf32, check_len, value_error};

/// The kernels of gemm.
pub(super) const UNIT: Unit = Unit {
    has_product: true,
    ..Unit::of(
        "gemm",
        include_str!("gemm.cu"),
        &[
            "gemm_tile128",
            "gemm_tile64",
            "gemm_skinny1",
            "gemm_skinny4",
            "gemm_skinny8",
            "gemm_skinny16",
            "gemm_experts",
        ],
    )
};

/// A kernel for few rows of x: as in gemm.cu.
struct Skinny {
    name: &'static str,
    rows: usize,
    /// Rows of w to a lane.
    per: usize,
    /// Bytes of a row that are copied at a time, and how many copies there is room for.
    bytes: usize,
    stages: usize,
}

const SKINNY: [Skinny; 4] = [
    Skinny { name: "gemm_skinny1", rows: 1, per: 1, bytes: 128, stages: 4 },
    Skinny { name: "gemm_skinny4", rows: 4, per: 1, bytes: 128, stages: 3 },
    Skinny { name: "gemm_skinny8", rows: 8, per: 1, bytes: 128, stages: 3 },
    Skinny { name: "gemm_skinny16", rows: 16, per: 2, bytes: 64, stages: 3 },
];

impl Skinny {
    fn shared(&self) -> usize {
        8 * self.stages * (32 * self.per * (self.bytes + 16) + self.rows * self.bytes)
    }
}

/// [`gemm`](crate::gemm()) on a device.
///
/// # Errors
/// As [`gemm`](crate::gemm()); errors of the device.
pub fn gemm<I: Stored, O: Stored>(
    device: &Device,
    shape: &Gemm,
    x: &Buffer<I>,
    w: &Buffer<I>,
    bias: Option<&Buffer<I>>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let Gemm { m, n, k, .. } = *shape;
    check_len("gemm", "x", "[M,K]", x.len(), &[m, k])?;
    check_len("gemm", "w", "[N,K]", w.len(), &[n, k])?;
    check_len("gemm", "y", "[M,N]", y.len(), &[m, n])?;
    let bias = bias.filter(|_| !shape.is_partial());
    if let Some(bias) = bias {
        check_len("gemm", "bias", "[N]", bias.len(), &[n])?;
    }
    // SAFETY: lengths were checked.
    unsafe { launch_gemm(device, shape, (x, 0), (w, 0), bias.map(|bias| (bias, 0)), (y, 0)) }
}

/// [`gemm`] of parts of buffers, each from an element on where a row begins.
///
/// # Errors
/// [`Error::Value`] when they are not there; as [`gemm`].
pub(super) fn gemm_parts<I: Stored, O: Stored>(
    device: &Device,
    shape: &Gemm,
    (x, x_at): (&Buffer<I>, usize),
    (w, w_at): (&Buffer<I>, usize),
    bias: Option<(&Buffer<I>, usize)>,
    (y, y_at): (&mut Buffer<O>, usize),
) -> Result<(), Error> {
    let Gemm { m, n, k, .. } = *shape;
    let inside = |at: usize, rows: usize, width: usize, len: usize| {
        rows.checked_mul(width).and_then(|count| count.checked_add(at)).is_some_and(|end| end <= len)
    };
    let row = |at: usize| at.checked_div(k).filter(|row| row * k == at).or((at == 0).then_some(0));
    let bias_inside = bias.is_none_or(|(bias, at)| inside(at, 1, n, bias.len()));
    let there = inside(x_at, m, k, x.len()) && inside(w_at, n, k, w.len()) && inside(y_at, m, n, y.len());
    match (row(x_at), row(w_at)) {
        // SAFETY: lengths were checked.
        (Some(x_row), Some(w_row)) if there && bias_inside => unsafe {
            launch_gemm(device, shape, (x, x_row), (w, w_row), bias, (y, y_at))
        },
        _ => Err(value_error("gemm", format!("parts of x, w, bias or y of {m}x{n}x{k} are not there"))),
    }
}

/// The product of some rows of x, from row `x_row` on, with matrix `matrix` of those that stand in `w` one behind the
/// other, to as many rows of y, from row `y_row` on. Each matrix has a bias of its own.
///
/// # Errors
/// [`Error::Value`] when the rows are not there; as [`gemm`].
pub fn gemm_rows<I: Stored, O: Stored>(
    device: &Device,
    shape: &Gemm,
    (x, x_row): (&Buffer<I>, usize),
    (w, matrix): (&Buffer<I>, usize),
    bias: Option<&Buffer<I>>,
    (y, y_row): (&mut Buffer<O>, usize),
) -> Result<(), Error> {
    let Gemm { m, n, k, .. } = *shape;
    let inside = |row: usize, rows: usize, width: usize, len: usize| {
        row.checked_add(rows).and_then(|rows| rows.checked_mul(width)).is_some_and(|end| end <= len)
    };
    let size = n.checked_mul(k);
    let matrices = size.is_some_and(|size| inside(matrix, 1, size, w.len()))
        && bias.is_none_or(|bias| inside(matrix, 1, n, bias.len()));
    if !inside(x_row, m, k, x.len()) || !inside(y_row, m, n, y.len()) || !matrices {
        let why = format!("{m} rows from {x_row} of x, matrix {matrix} of w or rows from {y_row} of y are not there");
        return Err(value_error("gemm", why));
    }
    let bias = bias.map(|bias| (bias, matrix * n));
    // SAFETY: lengths were checked.
    unsafe { launch_gemm(device, shape, (x, x_row), (w, matrix * n), bias, (y, y_row * n)) }
}

/// The product of a row of x with the matrix that `expert` says, for each of its entries: `y[P,N] = x[P / every,K]
/// w[expert[P],N,K]^T`, the bits of [`gemm`]. For few rows: every entry reads its matrix.
///
/// # Errors
/// [`Error::Value`] when rows of x and w are no multiples of 16 bytes; [`Error::Length`]; errors of the device.
pub fn gemm_experts<I: Stored, O: Stored>(
    device: &Device,
    [n, k]: [usize; 2],
    (x, every): (&Buffer<I>, usize),
    expert: &Indices,
    w: &Buffer<I>,
    bias: Option<&Buffer<I>>,
    y: &mut Buffer<O>,
) -> Result<(), Error> {
    let choices = expert.len();
    if every == 0 || k == 0 || !(k * size_of::<I>()).is_multiple_of(16) {
        return Err(value_error("gemm", format!("rows of {k} elements are no multiples of 16 bytes")));
    }
    check_len("gemm", "x", "[P / every,K]", x.len(), &[choices.div_ceil(every), k])?;
    check_len("gemm", "w", "[E,N,K]", w.len(), &[expert.limit(), n, k])?;
    check_len("gemm", "y", "[P,N]", y.len(), &[choices, n])?;
    if let Some(bias) = bias {
        check_len("gemm", "bias", "[E,N]", bias.len(), &[expert.limit(), n])?;
    }
    if y.is_empty() {
        return Ok(());
    }
    let arguments = Arguments::new().buffer(x).buffer(expert.buffer(device)?).long(every).buffer(w);
    let arguments = match bias {
        Some(bias) => arguments.buffer(bias).int(1),
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer(y).long(n).long(k).long(segment_length(k)).int(8);
    let grid = [n.div_ceil(32), choices, 1];
    // SAFETY: lengths were checked, and every expert is below the limit.
    unsafe { device.launch(Build::of::<I, O>("gemm"), "gemm_experts", grid, 256, SKINNY[0].shared(), &arguments) }
}

/// Starts the product of `shape.m` rows of x with `shape.n` rows of w, each from a row on; y from an element on.
///
/// # Safety
/// The buffers are at least as long as the shape says.
pub(crate) unsafe fn launch_gemm<I: Stored, O: Stored>(
    device: &Device,
    shape: &Gemm,
    (x, x_row): (&Buffer<I>, usize),
    (w, w_row): (&Buffer<I>, usize),
    bias: Option<(&Buffer<I>, usize)>,
    (y, y_at): (&Buffer<O>, usize),
) -> Result<(), Error> {
    let Gemm { m, n, k, tf32, .. } = *shape;
    let segments = shape.bounds()?.len() - 1;
    if m == 0 || n == 0 {
        return Ok(());
    }
    let arguments = Arguments::new().buffer_from(x, x_row * k).buffer_from(w, w_row * k);
    let arguments = match bias {
        Some((bias, at)) => arguments.buffer_from(bias, at).int(1),
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer_from(y, y_at);
    let build = build::<I, O>("gemm", tf32);
    // The copies of the kernels for few rows are 16 bytes each.
    let skinny = SKINNY.iter().find(|skinny| m <= skinny.rows && k > 0 && (k * size_of::<I>()).is_multiple_of(16));
    if let Some(skinny) = skinny {
        let arguments = sizes(shape, segments, arguments)?;
        let grid = [n.div_ceil(32 * skinny.per), 1, 1];
        // SAFETY: the caller's promise.
        return unsafe { device.launch(build, skinny.name, grid, 256, skinny.shared(), &arguments) };
    }
    // SAFETY: the caller's promise.
    unsafe { launch_tiles(device, build, UNIT.kernels, shape, segments, arguments) }
}

/// A product's unit as it is compiled for these types and this policy.
pub(super) fn build<I: Stored, O: Stored>(unit: &'static str, tf32: Tf32) -> Build {
    Build { tf32: tf32 == Tf32::Enabled && I::NAME == "fp32", ..Build::of::<I, O>(unit) }
}

/// What a kernel is told after its operands.
fn sizes(shape: &Gemm, segments: usize, operands: Arguments) -> Result<Arguments, Error> {
    let Gemm { m, n, k, k_total, .. } = *shape;
    let segments = int("gemm", "segments", segments)?;
    Ok(operands.long(m).long(n).long(k).long(segment_length(k_total)).int(segments))
}

/// Starts the tiles of a product that has elements, by the first two of `kernels`, of 128 and of 64 rows and columns.
///
/// # Safety
/// The operands are as long as the shape says.
pub(super) unsafe fn launch_tiles(
    device: &Device,
    build: Build,
    kernels: &[&'static str],
    shape: &Gemm,
    segments: usize,
    operands: Arguments,
) -> Result<(), Error> {
    let arguments = sizes(shape, segments, operands)?;
    // SAFETY: the caller's promise.
    unsafe { launch_squares(device, build, kernels, [shape.m, shape.n], &arguments) }
}

/// Starts the first of two kernels, whose blocks have squares of 128 outputs, or the second, of 64, for so many rows and
/// columns.
///
/// # Safety
/// The arguments are those of the kernels, and buffers as long as they say.
pub(super) unsafe fn launch_squares(
    device: &Device,
    build: Build,
    kernels: &[&'static str],
    [rows, columns]: [usize; 2],
    arguments: &Arguments,
) -> Result<(), Error> {
    // Large tiles where there are enough of them to go round.
    let tiles = rows.div_ceil(128) * columns.div_ceil(128);
    let (kernel, side) = if rows > 64 && tiles >= 128 { (kernels[0], 128) } else { (kernels[1], 64) };
    // SAFETY: the caller's promise.
    unsafe { device.launch(build, kernel, [columns.div_ceil(side), rows.div_ceil(side), 1], 256, 0, arguments) }
}
