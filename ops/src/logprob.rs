use crate::{Cpu, Element, Error};
/// `logits[R,V], target[R], temperature -> logprob[R], lse[R]`. target < 0 gives 0; target >= V is an error.
#[allow(clippy::too_many_arguments)]
pub fn logprob<I: Element>(
    _cpu: &Cpu,
    _rows: usize,
    _vocab: usize,
    _temperature: f64,
    _logits: &[I],
    _target: &[i32],
    _logprob: &mut [f32],
    _lse: &mut [f32],
) -> Result<(), Error> {
    todo!()
}
