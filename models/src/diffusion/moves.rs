//! What only moves numbers: each goes on bit for bit.

use super::run::Run;
use crate::ModelError;
use crate::machine::typed;
use crate::memory::buffer;
use samebits_ops::{Element, Tensor};

/// Places on a side of a square that is turned at a time.
const SQUARE: usize = 32;

/// `x[B,..]`, of `rows` times `columns` elements in each of B, with both exchanged, in the given shape.
fn turned(x: &Tensor, rows: usize, columns: usize, shape: &[usize]) -> Result<Tensor, ModelError> {
    typed!(x.dtype() => A, {
        let from = x.as_slice::<A>().expect("it is on the host, and of this dtype");
        let mut to: Vec<A> = buffer(shape)?;
        let size = (rows * columns).max(1);
        for (from, to) in from.chunks(size).zip(to.chunks_mut(size)) {
            for (r, c) in (0..rows).step_by(SQUARE).flat_map(|r| (0..columns).step_by(SQUARE).map(move |c| (r, c))) {
                for row in r..rows.min(r + SQUARE) {
                    for column in c..columns.min(c + SQUARE) {
                        to[column * rows + row] = from[row * columns + column];
                    }
                }
            }
        }
        Ok(Tensor::new(to, shape)?)
    })
}

/// `[B,C,H,W] -> [B,H * W,C]`: places as rows.
pub(crate) fn places_as_rows(x: &Tensor) -> Result<Tensor, ModelError> {
    let &[batch, channels, height, width] = x.shape() else { panic!("it is an image") };
    turned(x, channels, height * width, &[batch, height * width, channels])
}

/// `[B,H * W,C] -> [B,C,H,W]`
pub(crate) fn rows_as_places(x: &Tensor, [height, width]: [usize; 2]) -> Result<Tensor, ModelError> {
    let &[batch, rows, channels] = x.shape() else { panic!("it has rows") };
    turned(x, rows, channels, &[batch, channels, height, width])
}

/// `[B,C,H,W] -> [B,C,height,width]`: place q of an axis is place `floor(q * old / new)`.
pub(crate) fn nearest(x: &Tensor, [height, width]: [usize; 2]) -> Result<Tensor, ModelError> {
    let &[batch, channels, old_height, old_width] = x.shape() else { panic!("it is an image") };
    let shape = [batch, channels, height, width];
    typed!(x.dtype() => A, {
        let from = x.as_slice::<A>().expect("it is on the host, and of this dtype");
        let mut to: Vec<A> = buffer(&shape)?;
        for (row, to) in to.chunks_mut(width.max(1)).enumerate() {
            let (image, q) = (row / height, row % height);
            let from = &from[(image * old_height + q * old_height / height) * old_width..][..old_width];
            to.iter_mut().enumerate().for_each(|(q, to)| *to = from[q * old_width / width]);
        }
        Ok(Tensor::new(to, &shape)?)
    })
}

/// `a[B,M,..], b[B,N,..] -> [B,M + N,..]`
pub(crate) fn joined(a: &Tensor, b: &Tensor) -> Result<Tensor, ModelError> {
    let batch = a.shape()[0];
    let mut shape = a.shape().to_vec();
    shape[1] += b.shape()[1];
    let sizes = [a, b].map(|x| x.shape()[1..].iter().product::<usize>());
    typed!(a.dtype() => A, {
        let [a, b] = [a, b].map(|x| x.as_slice::<A>().expect("both are on the host, and of this dtype"));
        let mut to: Vec<A> = buffer(&shape)?;
        for (image, to) in to.chunks_mut((sizes[0] + sizes[1]).max(1)).enumerate().take(batch) {
            let (first, second) = to.split_at_mut(sizes[0]);
            first.copy_from_slice(&a[image * sizes[0]..][..sizes[0]]);
            second.copy_from_slice(&b[image * sizes[1]..][..sizes[1]]);
        }
        Ok(Tensor::new(to, &shape)?)
    })
}

/// `[..,M + N] -> [..,M], [..,N]`
pub(crate) fn halves(x: &Tensor) -> Result<[Tensor; 2], ModelError> {
    let width = *x.shape().last().expect("it has an axis");
    let mut shape = x.shape().to_vec();
    *shape.last_mut().expect("it has an axis") = width / 2;
    typed!(x.dtype() => A, {
        let from = x.as_slice::<A>().expect("it is on the host, and of this dtype");
        let half = |at: usize| -> Result<Tensor, ModelError> {
            let mut to: Vec<A> = buffer(&shape)?;
            let rows = from.chunks(width.max(1)).zip(to.chunks_mut((width / 2).max(1)));
            rows.for_each(|(from, to)| to.copy_from_slice(&from[at..at + width / 2]));
            Ok(Tensor::new(to, &shape)?)
        };
        Ok([half(0)?, half(width / 2)?])
    })
}

/// `x[B,C] -> [B,C,H,W]`, each number at all places.
pub(crate) fn everywhere(x: &Tensor, shape: &[usize]) -> Result<Tensor, ModelError> {
    let places: usize = shape[2..].iter().product();
    typed!(x.dtype() => A, {
        let from = x.as_slice::<A>().expect("it is on the host, and of this dtype");
        let mut to: Vec<A> = buffer(shape)?;
        to.chunks_mut(places.max(1)).zip(from).for_each(|(to, from)| to.fill(*from));
        Ok(Tensor::new(to, shape)?)
    })
}

/// The same again.
pub(crate) fn copied(x: &Tensor) -> Result<Tensor, ModelError> {
    typed!(x.dtype() => A, Ok(Tensor::new(x.as_slice::<A>().expect("it is on the host, and of this dtype").to_vec(), x.shape())?))
}

/// Sines and cosines of numbers, `[N,width]`: of number t and i below `half = width / 2` those of the f32 product of t and
/// `exp(-ln(10000) * i / (half - shift))`, the exponent in steps of f32, everything else in f64 and rounded to f32 once; last the
/// dtype of the run. `cosines_first` says which half comes first; an odd width ends in +0.
pub(crate) fn sinusoids(
    run: &mut Run,
    numbers: &[f32],
    width: usize,
    cosines_first: bool,
    shift: f32,
) -> Result<Tensor, ModelError> {
    let half = width / 2;
    let mut table: Vec<f32> = buffer(&[numbers.len(), width])?;
    let least = -(libm::log(10000.0) as f32);
    for (number, row) in numbers.iter().zip(table.chunks_mut(width.max(1))) {
        for i in 0..half {
            let exponent = least * i as f32 / (half as f32 - shift);
            let angle = f64::from(number * libm::exp(f64::from(exponent)) as f32);
            let pair = [libm::sin(angle) as f32, libm::cos(angle) as f32];
            row[i] = pair[usize::from(cosines_first)];
            row[half + i] = pair[usize::from(!cosines_first)];
        }
        row[2 * half..].fill(0.0);
    }
    run.rounded(&Tensor::new(table, &[numbers.len(), width])?)
}

/// The elements of a tensor of floats, widened.
pub(crate) fn widened(x: &Tensor) -> Vec<f32> {
    typed!(x.dtype() => A, {
        x.as_slice::<A>().expect("it is on the host, and of this dtype").iter().map(|x| x.widen()).collect()
    })
}
