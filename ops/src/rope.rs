use crate::{Cpu, Element, Error};
/// Which elements rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// (i, i + D/2)
    Half,
    /// (2i, 2i + 1)
    Interleaved,
}
/// Dimensions of `x[T,H,D]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    /// T
    pub tokens: usize,
    /// H
    pub heads: usize,
    /// D, even
    pub dim: usize,
    /// Which elements rotate together.
    pub pairing: Pairing,
}
/// `inv_freq[i] = f32(theta^(-2i/D))` for i < D/2.
pub fn inv_freq(_theta: f64, _dim: usize) -> Vec<f32> {
    todo!()
}
/// cos and sin, correctly rounded, one row of D/2 each per token; made once, used by every layer.
pub struct RopeTable;
impl RopeTable {
    /// Row t holds the angles `f32(pos[t]) * inv_freq[i]`.
    pub fn new(_cpu: &Cpu, _inv_freq: &[f32], _pos: &[i32]) -> RopeTable {
        todo!()
    }
}
/// `x[T,H,D] -> y[T,H,D]`; row t of the table belongs to token t.
pub fn rope<I: Element, O: Element>(
    _cpu: &Cpu,
    _shape: &Rope,
    _table: &RopeTable,
    _x: &[I],
    _y: &mut [O],
) -> Result<(), Error> {
    todo!()
}
