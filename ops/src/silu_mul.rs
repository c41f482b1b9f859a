use crate::{Cpu, Element, Error};
/// `y = (g * sigmoid(g)) * u`, last rounding. All slices have the same length.
pub fn silu_mul<I: Element, O: Element>(_cpu: &Cpu, _gate: &[I], _up: &[I], _y: &mut [O]) -> Result<(), Error> {
    todo!()
}
