//! Gradient of the weight of layer normalisation: `x[R,N], dy[R,N], mask[R]?, carry[64,N]? (f32) -> dw[64,N]` (f32).
//!
//! Formula: `dw[t mod 64] += dy[t] * h`, `h = (x[t] - mean) * r` with mean and r of `layer_norm`, over the rows that are
//! tokens, t counted without padding from `token_offset` on. The gradient of bias is `token_sum` of dy.
//! Order: 64 chains of fma over tokens, ascending, from carry or +0.
//! Rounding: difference and h once to f32; every fma once.

use crate::backend::device::{Arguments, Buffer, Build, Device, Unit};
use crate::call::Entry;
use crate::element::{Stored, typed};
use crate::norm::layer_norm::{KEPT, moments};
use crate::simd::{Kernel, Simd};
use crate::tensor::Rows;
use crate::token::chains::{Normed, Tokens, Turns, add_products, begin};
use crate::token::device;
use crate::{Cpu, Element, Error, LayerNorm, TensorRef, check_eps, check_len};

const NAME: &str = "layer_norm_dw";

/// Adds the gradients of [`layer_norm`](crate::layer_norm)'s w that the rows of `x[R,N]` and `dy[R,N]` make, as far as they
/// are tokens, to the 64 sums `dw[64,N]`, which go on from what they hold.
///
/// # Errors
/// [`Error::Length`] when a slice does not match.
///
/// ```
/// use samebits_ops::{Cpu, LayerNorm, Tokens, layer_norm_dw};
///
/// let shape = LayerNorm { rows: 1, n: 2, eps: 0.0 };
/// let mut dw = [0f32; 128];
/// layer_norm_dw(&Cpu::best(), &shape, Tokens::default(), &[6f32, 2.0], &[1.0, 3.0], &mut dw)?;
/// assert_eq!(dw[..2], [1.0, -3.0]);
/// # Ok::<(), samebits_ops::Error>(())
/// ```
pub fn layer_norm_dw<I: Element>(
    cpu: &Cpu,
    shape: &LayerNorm,
    tokens: Tokens,
    x: &[I],
    dy: &[I],
    dw: &mut [f32],
) -> Result<(), Error> {
    let extents = [shape.rows, shape.n];
    check_eps(NAME, shape.eps)?;
    check_len(NAME, "x", "[R,N]", x.len(), &extents)?;
    check_len(NAME, "dy", "[R,N]", dy.len(), &extents)?;
    run(cpu, shape, tokens, [x, dy].map(|rows| TensorRef::of(rows, &extents)), dw)
}

/// Rows of any layout.
fn run(cpu: &Cpu, shape: &LayerNorm, tokens: Tokens, [x, dy]: [TensorRef; 2], dw: &mut [f32]) -> Result<(), Error> {
    typed!(x.dtype() => I, {
        let rows = [x.rows::<I>(), dy.rows::<I>()];
        tokens.sum(cpu, [NAME, "dw"], [shape.rows, 1, shape.n], dw, |turns, dw| cpu.dispatch(Part { shape, rows, turns, dw }))
    })
}

/// Its kernel.
const UNIT: Unit = Unit::of(NAME, include_str!("layer_norm_dw.cu"), &["layer_norm_dw"]);

/// layer_norm_dw, by name.
pub(crate) const OP: Entry = Entry {
    name: NAME,
    cpu: |cpu, args| {
        let tokens = Tokens::of(args)?;
        let (rows, dw) = begin(cpu, args, ["x", "dy"], "dw")?;
        run(cpu, &LayerNorm::of(args.call), tokens, rows, dw)
    },
    device: Some(|on, args| {
        let shape = LayerNorm::of(args.call);
        let ([x, dy], dw) = (["x", "dy"].map(|name| args.input(name)), args.output("dw"));
        device::with_tokens(on, args, |tokens, carry| {
            typed!(x.dtype() => I, {
                let (x, dy) = (x.device(NAME, "x")?, dy.device(NAME, "dy")?);
                on_device::<I>(on, &shape, tokens, [x, dy], carry, dw.device(NAME, "dw")?)
            })
        })
    }),
    unit: Some(&UNIT),
    prepare: None,
};

/// [`layer_norm_dw`] on a device, from `carry[64,N]` or +0; the first two are x and dy.
///
/// # Errors
/// [`Error::Length`] when a buffer does not match; errors of the device.
pub fn on_device<I: Stored>(
    on: &Device,
    shape: &LayerNorm,
    tokens: device::Tokens,
    [x, dy]: [&Buffer<I>; 2],
    carry: Option<&Buffer<f32>>,
    dw: &mut Buffer<f32>,
) -> Result<(), Error> {
    let LayerNorm { rows, n, eps } = *shape;
    check_eps(NAME, shape.eps)?;
    check_len(NAME, "x", "[R,N]", x.len(), &[rows, n])?;
    check_len(NAME, "dy", "[R,N]", dy.len(), &[rows, n])?;
    tokens.check([NAME, "dw"], [rows, n], carry, dw)?;
    if n == 0 {
        return Ok(());
    }
    let arguments = tokens.arguments(Arguments::new().buffer(x).buffer(dy), carry, dw);
    let arguments = arguments.long(rows).long(n).int(tokens.start(1)).float(eps);
    // SAFETY: lengths were checked, and these are the kernel's arguments.
    unsafe { device::launch(on, Build::of::<I, f32>(NAME), NAME, n, &arguments) }
}

/// Some chains.
struct Part<'a, I> {
    shape: &'a LayerNorm,
    /// x and dy.
    rows: [Rows<'a, I>; 2],
    turns: Turns<'a>,
    dw: &'a mut [f32],
}

impl<I: Element> Kernel for Part<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (n, mut differences) = (self.shape.n, [0f32; KEPT]);
        while let Some((row, chain)) = self.turns.next() {
            let [x, dy] = self.rows.each_ref().map(|rows| rows.row(row));
            let (mean, r) = moments(s, x, self.shape.eps, &mut differences);
            add_products(s, dy, x, Centred { mean, r }, &mut self.dw[chain * n..][..n]);
        }
    }
}

/// `(x - mean) * r`
#[derive(Clone, Copy)]
struct Centred<S: Simd> {
    mean: S::F,
    r: S::F,
}

impl<S: Simd> Normed<S> for Centred<S> {
    #[inline(always)]
    fn of(self, s: S, x: S::F) -> S::F {
        s.mul(s.sub(x, self.mean), self.r)
    }
}
