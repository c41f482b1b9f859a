use crate::{Cpu, Element, Error};
/// `w[V,D], tokens[T] -> y[T,D]`: exact gather. A token outside `0..V` is an error. `dim` is D.
pub fn embedding<I: Element, O: Element>(
    _cpu: &Cpu,
    _dim: usize,
    _w: &[I],
    _tokens: &[i32],
    _y: &mut [O],
) -> Result<(), Error> {
    todo!()
}
