//! Launches of matrix products.

use super::rows::{build, check_logprob, int, launch_logprob};
use super::workspace::choose;
use super::{Arguments, Buffer, Build, Device, Stored};
use crate::gemm::segment_length;
use crate::plan::{Need, Plan};
use crate::{Error, Gemm, Tf32, check_len};
use std::iter::successors;

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
    unsafe { launch_gemm(device, shape, (x, 0), w, bias, y) }
}

/// Starts the product of `shape.m` rows of x, from row `first` on.
///
/// # Safety
/// The buffers are at least as long as the shape says.
unsafe fn launch_gemm<I: Stored, O: Stored>(
    device: &Device,
    shape: &Gemm,
    (x, first): (&Buffer<I>, usize),
    w: &Buffer<I>,
    bias: Option<&Buffer<I>>,
    y: &Buffer<O>,
) -> Result<(), Error> {
    let Gemm { m, n, k, k_total, tf32, .. } = *shape;
    let segments = int("gemm", "segments", shape.bounds()?.len() - 1)?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    let arguments = Arguments::new().buffer_from(x, first * k).buffer(w);
    let arguments = match bias {
        Some(bias) => arguments.buffer(bias).int(1),
        None => arguments.null().int(0),
    };
    let arguments = arguments.buffer(y).long(m).long(n).long(k).long(segment_length(k_total)).int(segments);
    let build = Build { tf32: tf32 == Tf32::Enabled && I::NAME == "fp32", ..build::<I, O>("gemm") };
    // The copies of the kernels for few rows are 16 bytes each.
    let skinny = SKINNY.iter().find(|skinny| m <= skinny.rows && k > 0 && (k * size_of::<I>()).is_multiple_of(16));
    if let Some(skinny) = skinny {
        let grid = [n.div_ceil(32 * skinny.per), 1, 1];
        // SAFETY: the caller's promise.
        return unsafe { device.launch(build, skinny.name, grid, 256, skinny.shared(), &arguments) };
    }
    // Large tiles where there are enough of them to go round.
    let tiles = m.div_ceil(128) * n.div_ceil(128);
    let (kernel, side) = if m > 64 && tiles >= 128 { ("gemm_tile128", 128) } else { ("gemm_tile64", 64) };
    // SAFETY: the caller's promise.
    unsafe { device.launch(build, kernel, [n.div_ceil(side), m.div_ceil(side), 1], 256, 0, &arguments) }
}

/// How many rows have their logits in the workspace at a time.
#[derive(Clone, Copy)]
struct Rows {
    rows: usize,
    vocab: usize,
}

impl Plan for Rows {
    fn need(&self) -> Need {
        Need { shared: self.rows.saturating_mul(self.vocab), slot: 0, workers: 1, pairs: 0 }
    }

    fn tiles(&self) -> [(&'static str, usize); 3] {
        [("rows", self.rows), ("", 0), ("", 0)]
    }
}

/// Rows whose logits stand in the workspace, at most: enough for the weight to be worth its way.
const MOST_ROWS: usize = 512;

/// [`linear_logprob`](crate::linear_logprob()) on a device. The f32 logits of some rows at a time stand in the workspace: the
/// budget decides how many, down to one.
///
/// # Errors
/// As [`linear_logprob`](crate::linear_logprob()); errors of the device.
#[allow(clippy::too_many_arguments)]
pub fn linear_logprob<I: Stored>(
    device: &Device,
    rows: usize,
    vocab: usize,
    k: usize,
    temperature: f64,
    x: &Buffer<I>,
    w: &Buffer<I>,
    target: &[i32],
    logprob: &mut Buffer<f32>,
    lse: &mut Buffer<f32>,
) -> Result<(), Error> {
    let op = "linear_logprob";
    check_len(op, "x", "[M,K]", x.len(), &[rows, k])?;
    check_len(op, "w", "[V,K]", w.len(), &[vocab, k])?;
    check_len(op, "target", "[M]", target.len(), &[rows])?;
    check_len(op, "logprob", "[M]", logprob.len(), &[rows])?;
    check_len(op, "lse", "[M]", lse.len(), &[rows])?;
    let scale = check_logprob(op, vocab, temperature, target)?;
    if rows == 0 {
        return Ok(());
    }
    let preferred = Rows { rows: rows.min(MOST_ROWS), vocab };
    let smaller = |plan: &Rows| (plan.rows > 1).then(|| Rows { rows: plan.rows.div_ceil(2), ..*plan });
    let (plan, logits) = choose(device, op, successors(Some(preferred), smaller))?;
    let target = device.upload(op, target)?;
    for first in (0..rows).step_by(plan.rows) {
        let count = plan.rows.min(rows - first);
        // SAFETY: the workspace has room for `count` rows of V, the other lengths were checked, and so was every target.
        unsafe {
            launch_gemm(device, &Gemm::new(count, vocab, k), (x, first), w, None, &logits)?;
            launch_logprob(device, count, vocab, scale, &logits, (&target, logprob, lse), first)?;
        }
    }
    Ok(())
}
