use crate::{Cpu, Element, Error};
/// Where `rms_norm` rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// `(x*r)*w`, one rounding at the end.
    Once,
    /// `w * bf16(x*r)`, as Hugging Face models do.
    Hf,
}
/// Dimensions and parameters of `rms_norm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// R
    pub rows: usize,
    /// N
    pub n: usize,
    /// Added under the root.
    pub eps: f32,
    /// Where to round.
    pub rounding: Rounding,
    /// Use `w + 1` for `w`.
    pub weight_offset: bool,
}
/// `x[R,N], w[N] -> y[R,N]`
pub fn rms_norm<I: Element, O: Element>(
    _cpu: &Cpu,
    _shape: &RmsNorm,
    _x: &[I],
    _w: &[I],
    _y: &mut [O],
) -> Result<(), Error> {
    todo!()
}
