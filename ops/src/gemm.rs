use crate::{Cpu, Element, Error, Tf32};
/// Dimensions of `x[M,K] * w[N,K]^T -> y[M,N]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    /// Rows of x.
    pub m: usize,
    /// Rows of w.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
    /// First column this tensor-parallel rank holds.
    pub k_offset: usize,
    /// Columns of the whole product; segments are cut by it.
    pub k_total: usize,
    /// TF32 policy.
    pub tf32: Tf32,
}
impl Gemm {
    /// The whole product: no tensor parallelism, TF32 off.
    pub fn new(m: usize, n: usize, k: usize) -> Gemm {
        Gemm { m, n, k, k_offset: 0, k_total: k, tf32: Tf32::Disabled }
    }
    /// Whether this is one rank's part of a longer sum: no bias is added, and the output should be f32.
    pub fn is_partial(&self) -> bool {
        self.k != self.k_total
    }
}
/// `x[M,K], w[N,K], bias[N]? -> y[M,N]`
pub fn gemm<I: Element, O: Element>(
    _cpu: &Cpu,
    _shape: &Gemm,
    _x: &[I],
    _w: &[I],
    _bias: Option<&[I]>,
    _y: &mut [O],
) -> Result<(), Error> {
    todo!()
}
/// A weight matrix `w[N,K]` packed once for [`gemm_packed`] on any `Cpu`.
pub struct PackedWeight;
impl PackedWeight {
    /// Packs `w[N,K]`, in parallel.
    pub fn pack<I: Element>(_cpu: &Cpu, _n: usize, _k: usize, _w: &[I]) -> Result<PackedWeight, Error> {
        todo!()
    }
    /// Rows N.
    pub fn n(&self) -> usize {
        todo!()
    }
    /// Columns K.
    pub fn k(&self) -> usize {
        todo!()
    }
}
/// [`gemm`] with a weight packed beforehand: the same bits. `x[M,K]`, `bias[N]`.
pub fn gemm_packed<I: Element, O: Element>(
    _cpu: &Cpu,
    _m: usize,
    _x: &[I],
    _w: &PackedWeight,
    _bias: Option<&[I]>,
    _y: &mut [O],
) -> Result<(), Error> {
    todo!()
}
