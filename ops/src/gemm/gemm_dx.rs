//! The gradient of the activations of a matrix product: `dy[M,N], w[N,K] -> dx[M,K]`.
//!
//! Formula: `dx[m][k] = sum over n of dy[m][n] * w[n][k]`.
//! Order: that of `gemm` of dy and the transpose of w: segments of chains over n.
//! Rounding: each fma and each join once to f32; the last rounding to the output type.
//!
//! It is gemm from its panels on: where the factors of an output are a column of w, a panel of 32 outputs is pieces of rows,
//! one behind the other.

use super::device;
use super::gemm::{Product, Says, check_weight, packed};
use super::packed::{PackedWeight, Weight};
use crate::backend::device::{Arguments, Buffer, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::gemm::shape::{Gemm, bounds};
use crate::pack::matrix::Side;
use crate::{Cpu, Element, Error, TensorMut, TensorRef, Tf32, check_len};
use samebits_schema::Call;

/// Dimensions of `dy[M,N] * w[N,K] -> dx[M,K]`, and the part of a longer sum that one tensor-parallel rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmDx {
    /// Rows of dy.
    pub m: usize,
    /// Rows of w that are here.
    pub n: usize,
    /// Columns of w.
    pub k: usize,
    /// First row of w that is here.
    pub n_offset: usize,
    /// Rows of the whole w; segments are cut by it.
    pub n_total: usize,
    /// How f32 operands are read.
    pub tf32: Tf32,
}

impl GemmDx {
    /// The whole product: no tensor parallelism, TF32 off.
    pub fn new(m: usize, n: usize, k: usize) -> GemmDx {
        GemmDx { m, n, k, n_offset: 0, n_total: n, tf32: Tf32::Disabled }
    }

    /// The dimensions of a call.
    fn of(call: &Call) -> GemmDx {
        let [m, n, k] = ["M", "N", "K"].map(|axis| call.dim(axis));
        let tf32 = if call.tf32() { Tf32::Enabled } else { Tf32::Disabled };
        GemmDx { m, n, k, n_offset: call.count("n_offset"), n_total: call.count("n_total"), tf32 }
    }

    /// The product of dy and the transpose of w, whose rows are the columns of w.
    fn product(&self) -> Gemm {
        let GemmDx { m, n, k, n_offset, n_total, tf32 } = *self;
        Gemm { m, n: k, k: n, k_offset: n_offset, k_total: n_total, tf32 }
    }

    /// As [`Gemm::bounds`].
    fn bounds(&self) -> Result<Vec<usize>, Error> {
        bounds(SAYS.op, ["rows of w", "n_total"], [self.n_offset, self.n, self.n_total])
    }
}

/// `dy[M,N], w[N,K] -> dx[M,K]`, all row-major: the gradient of x from that of [`gemm`](crate::gemm())'s y. The weight is
/// laid out anew in every call: pack it once and call [`gemm_dx_packed`] where it is used again.
///
/// # Errors
/// [`Error::Length`] when a slice does not match; [`Error::Value`] when `n_offset`, `n` and `n_total` do not name a
/// subtree of the segments; [`Error::Budget`] below the smallest plan (2 KiB).
///
/// ```
/// use samebits_ops::{Cpu, GemmDx, gemm_dx};
///
/// let (dy, w) = ([1f32, 2.0], [3.0, 4.0, 5.0, 6.0]);
/// let mut dx = [0f32; 2];
/// gemm_dx(&Cpu::best(), &GemmDx::new(1, 2, 2), &dy, &w, &mut dx)?;
/// assert_eq!(dx, [13.0, 16.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn gemm_dx<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &GemmDx,
    dy: &[I],
    w: &[I],
    dx: &mut [O],
) -> Result<(), Error> {
    check_len(SAYS.op, "w", "[N,K]", w.len(), &[shape.n, shape.k])?;
    sliced(cpu, shape, dy, TensorRef::of(w, &[shape.n, shape.k]), dx)
}

/// [`gemm_dx`] with a weight packed for it beforehand: the same bits, of a part of a longer sum too.
///
/// # Errors
/// As [`gemm_dx`]; [`Error::Value`] when the weight is not `[N,K]` or packed for another op, and for TF32, for which no
/// weight is packed; [`Error::Budget`] below the smallest plan (64 bytes).
///
/// ```
/// use samebits_ops::{Cpu, GemmDx, PackedWeight, gemm_dx_packed};
///
/// let cpu = Cpu::best();
/// let w = PackedWeight::pack_for_dx(&cpu, 2, 2, &[3f32, 4.0, 5.0, 6.0])?;
/// let mut dx = [0f32; 2];
/// gemm_dx_packed(&cpu, &GemmDx::new(1, 2, 2), &[1f32, 2.0], &w, &mut dx)?;
/// assert_eq!(dx, [13.0, 16.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn gemm_dx_packed<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &GemmDx,
    dy: &[I],
    w: &PackedWeight,
    dx: &mut [O],
) -> Result<(), Error> {
    sliced(cpu, shape, dy, TensorRef::packed(w), dx)
}

fn sliced<I: Element, O: Element>(
    cpu: &Cpu,
    shape: &GemmDx,
    dy: &[I],
    w: TensorRef,
    dx: &mut [O],
) -> Result<(), Error> {
    let GemmDx { m, n, k, .. } = *shape;
    check_len(SAYS.op, "dy", "[M,N]", dy.len(), &[m, n])?;
    check_len(SAYS.op, "dx", "[M,K]", dx.len(), &[m, k])?;
    run(cpu, shape, [TensorRef::of(dy, &[m, n]), w], TensorMut::of(dx, &[m, k]))
}

/// What gemm_dx says of itself.
const SAYS: Says = Says {
    op: "gemm_dx",
    lays_out: "gemm_dx lays its weight out; pack it once and call gemm_dx_packed",
    flushes: "gemm_dx: operands so small that VDPBF16PS would flush them",
};

/// Rows of dy and w of any layout.
fn run(cpu: &Cpu, shape: &GemmDx, [dy, w]: [TensorRef; 2], dx: TensorMut) -> Result<(), Error> {
    let product = shape.product();
    check_weight(SAYS.op, [shape.n, shape.k], shape.tf32, w)?;
    dy.on_host(SAYS.op, "dy")?;
    typed!(dy.dtype() => I, {
        let (bounds, w) = (&shape.bounds()?, Weight::of_side(SAYS.op, w, Side::Columns)?);
        let product = Product { cpu, says: &SAYS, shape: product, x: dy.rows::<I>(), w, bias: None, bounds };
        typed!(dx.dtype() => O, product.run(dx.host::<O>(SAYS.op, "dx")?))
    })
}

/// gemm_dx, by name.
pub(crate) const OP: Entry = Entry {
    name: "gemm_dx",
    cpu: |cpu, args| run(cpu, &GemmDx::of(args.call), [args.input("dy"), args.input("w")], args.output("dx")),
    device: Some(|on, args| {
        let (dy, w, dx) = (args.input("dy"), args.input("w"), args.output("dx"));
        typed!(dy.dtype() => I, typed!(dx.dtype() => O, {
            let (dy, w) = (dy.device::<I>(SAYS.op, "dy")?, w.device::<I>(SAYS.op, "w")?);
            on_device(on, &GemmDx::of(args.call), dy, w, dx.device::<O>(SAYS.op, "dx")?)
        }))
    }),
    unit: Some(&UNIT),
    prepare: Some(|cpu, args| packed(cpu, args, Side::Columns)),
};

/// Its kernels.
const UNIT: Unit = Unit {
    has_product: true,
    ..Unit::of("gemm_dx", include_str!("gemm_dx.cu"), &["gemm_dx_tile128", "gemm_dx_tile64"])
};

/// [`gemm_dx`] on a device.
///
/// # Errors
/// As [`gemm_dx`]; errors of the device.
pub fn on_device<I: Stored, O: Stored>(
    device: &Device,
    shape: &GemmDx,
    dy: &Buffer<I>,
    w: &Buffer<I>,
    dx: &mut Buffer<O>,
) -> Result<(), Error> {
    let GemmDx { m, n, k, .. } = *shape;
    check_len(SAYS.op, "dy", "[M,N]", dy.len(), &[m, n])?;
    check_len(SAYS.op, "w", "[N,K]", w.len(), &[n, k])?;
    check_len(SAYS.op, "dx", "[M,K]", dx.len(), &[m, k])?;
    let (product, segments) = (shape.product(), shape.bounds()?.len() - 1);
    if m == 0 || k == 0 {
        return Ok(());
    }
    let operands = Arguments::new().buffer(dy).buffer(w).null().int(0).buffer(dx);
    let build = device::build::<I, O>(SAYS.op, shape.tf32);
    // SAFETY: lengths were checked.
    unsafe { device::launch_tiles(device, build, UNIT.kernels, &product, segments, operands) }
}
