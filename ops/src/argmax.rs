use crate::{Cpu, Element, Error};
/// `x[R,N] -> index[R]`: the lowest index among equals of each row's largest element. A NaN is larger than every number; -0 equals +0. N is at least 1.
pub fn argmax<I: Element>(_cpu: &Cpu, _rows: usize, _n: usize, _x: &[I], _index: &mut [i32]) -> Result<(), Error> {
    todo!()
}
