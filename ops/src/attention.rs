use crate::{Cpu, Element, Error};
/// Dimensions and parameters of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// B
    pub batch: usize,
    /// T
    pub queries: usize,
    /// S
    pub keys: usize,
    /// Hq, a multiple of `kv_heads`
    pub q_heads: usize,
    /// Hkv
    pub kv_heads: usize,
    /// D
    pub head_dim: usize,
    /// E
    pub value_dim: usize,
    /// Scores are multiplied by this.
    pub scale: f64,
    /// Key j is visible to position p only when j <= p.
    pub causal: bool,
    /// Key j is visible to position p only when j > p - window; 0 means no window.
    pub window: usize,
    /// `cap * tanh(score / cap)`; 0 means none.
    pub softcap: f64,
}
/// `q[B,T,Hq,D], k[B,S,Hkv,D], v[B,S,Hkv,E], q_pos[B,T], kv_len[B] -> out[B,T,Hq,E], lse[B,T,Hq]`
#[allow(clippy::too_many_arguments)]
pub fn attention<I: Element, O: Element>(
    _cpu: &Cpu,
    _shape: &Attention,
    _q: &[I],
    _k: &[I],
    _v: &[I],
    _q_pos: &[i32],
    _kv_len: &[i32],
    _out: &mut [O],
    _lse: &mut [f32],
) -> Result<(), Error> {
    todo!()
}
