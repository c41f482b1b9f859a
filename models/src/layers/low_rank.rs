//! The low-rank adapter of a matrix: `(x A) B` times a factor is added to what the matrix makes, all of it f32, and rounded once
//! behind the sum.

use super::linear::Linear;
use crate::ModelError;
use crate::backward::Backward;
use crate::pass::Pass;
use samebits_ops::device::{Device, Part};
use samebits_ops::{Attributes, Cpu, DType, Tensor, TensorMut, TensorRef};
use std::collections::BTreeMap;
use std::ops::Range;

/// Some rows of a step, and the adapter that they have of a matrix.
pub(crate) type Rows<'a> = (Range<usize>, Option<&'a LowRank>);

/// A and B of one matrix of the folder.
pub(crate) struct LowRank {
    /// `[r,K]`
    a: Linear,
    /// `[N,r]`, cut as products cut the matrix: by the first of their rows.
    b: BTreeMap<usize, Linear>,
    scaling: Attributes,
}

impl LowRank {
    pub fn new(a: Linear, b: BTreeMap<usize, Linear>, scaling: f64) -> LowRank {
        LowRank { a, b, scaling: Attributes::new().with("factor", scaling) }
    }

    pub fn move_to(&mut self, cpu: &Cpu, device: &Device) -> Result<(), ModelError> {
        self.b.values_mut().chain([&mut self.a]).try_for_each(|linear| linear.move_to(cpu, device))
    }

    /// The matrix B of the product with rows from `start` on.
    fn b(&self, start: usize) -> &Linear {
        &self.b[&start]
    }

    /// `x[M,K] A`, both f32.
    fn narrow(&self, pass: &mut Pass, x: TensorRef) -> Result<Tensor, ModelError> {
        let mut h = pass.empty(DType::Fp32, &[x.shape()[0], self.a.rows()])?;
        self.a.product(pass, 0, x, h.view_mut())?;
        Ok(h)
    }

    /// What is added to the product of `x[M,K]`, f32.
    fn made(&self, pass: &mut Pass, start: usize, x: TensorRef) -> Result<Tensor, ModelError> {
        let h = self.narrow(pass, x)?;
        let mut y = pass.empty(DType::Fp32, &[h.shape()[0], self.b(start).rows()])?;
        self.b(start).product(pass, 0, h.view(), y.view_mut())?;
        pass.scaled(&self.scaling, &y)
    }

    /// From `dy[M,N]` of that: that of `x[M,K]`, all f32. Those of A and B are added to what earlier tokens have left.
    fn backward(
        &self,
        back: &mut Backward,
        start: usize,
        x: &Tensor,
        dy: TensorRef,
        mask: &[i32],
    ) -> Result<Tensor, ModelError> {
        let h = self.narrow(&mut back.pass, x.view())?;
        let mut dmade = back.pass.empty(DType::Fp32, dy.shape())?;
        back.pass.op("scale", &self.scaling, &[("x", dy)], [("y", dmade.view_mut())])?;
        back.add_trained(self.b(start).source(0), h.view(), dmade.view(), mask)?;
        let dh = self.b(start).input_gradient(back, 0, dmade.view(), DType::Fp32)?;
        // What several products read of A is added when the group ends, in the order of their rows.
        back.nth_use = start;
        back.add_trained(self.a.source(0), x.view(), dh.view(), mask)?;
        back.nth_use = 0;
        self.a.input_gradient(back, 0, dh.view(), DType::Fp32)
    }
}

/// x in f32.
fn widened(pass: &mut Pass, x: TensorRef) -> Result<Tensor, ModelError> {
    let mut wide = pass.empty(DType::Fp32, x.shape())?;
    pass.op("scale", &Attributes::new(), &[("x", x)], [("y", wide.view_mut())])?;
    Ok(wide)
}

/// Adds to what the rows of a matrix from `start` on make of `x[M,K]`, `base[M,N]` in f32, what the adapters of x's rows do, and
/// rounds the sum to y.
pub(crate) fn add_to(
    pass: &mut Pass,
    rows: &[Rows],
    start: usize,
    (x, base): (TensorRef, &Tensor),
    y: TensorMut,
) -> Result<(), ModelError> {
    let (wide, none) = (widened(pass, x)?, Attributes::new());
    check(rows, &wide);
    if let [(_, Some(adapter))] = rows {
        let made = adapter.made(pass, start, wide.view())?;
        return pass.op("add", &none, &[("a", base.view()), ("b", made.view())], [("y", y)]);
    }
    let mut sum = pass.empty(y.dtype(), y.shape())?;
    pass.op("scale", &none, &[("x", base.view())], [("y", sum.view_mut())])?;
    for (rows, adapter) in with_one(rows) {
        let x = part(pass, &wide, rows)?;
        let made = adapter.made(pass, start, x.view())?;
        add_part(pass, rows, (base, &made), &mut sum)?;
    }
    pass.op("scale", &none, &[("x", sum.view())], [("y", y)])
}

/// Rows that have an adapter, and it.
fn with_one<'r>(rows: &'r [Rows]) -> impl Iterator<Item = (&'r Range<usize>, &'r LowRank)> {
    rows.iter().filter_map(|(rows, adapter)| Some((rows, (*adapter)?)))
}

/// Puts the sum of some rows of a matrix and what an adapter has made of them, rounded once, into those rows of `sum`.
fn add_part(
    pass: &mut Pass,
    rows: &Range<usize>,
    (base, made): (&Tensor, &Tensor),
    sum: &mut Tensor,
) -> Result<(), ModelError> {
    let own = part(pass, base, rows)?;
    let mut added = pass.empty(sum.dtype(), own.shape())?;
    let inputs = [("a", own.view()), ("b", made.view())];
    pass.op("add", &Attributes::new(), &inputs, [("y", added.view_mut())])?;
    let [count, n] = [own.shape()[0], own.shape()[1]];
    let to = Part { offset: rows.start * n, ..Part::whole(n) };
    Ok(pass.machine.copy_rows([count, n], (&added, Part::whole(n)), (sum, to))?)
}

/// A copy of some rows.
fn part(pass: &Pass, x: &Tensor, rows: &Range<usize>) -> Result<Tensor, ModelError> {
    let size = [rows.len(), x.shape()[1]];
    let mut own = pass.empty(x.dtype(), &size)?;
    let from = Part { offset: rows.start * size[1], ..Part::whole(size[1]) };
    pass.machine.copy_rows(size, (x, from), (&mut own, Part::whole(size[1])))?;
    Ok(own)
}

/// From `dy[M,N]` of that in f32, and what the matrix has made of it, `dx[M,K]` in f32: that of x, of `dtype`.
pub(crate) fn add_backward(
    back: &mut Backward,
    rows: &[Rows],
    start: usize,
    (x, dy): (TensorRef, TensorRef),
    (mask, dx, dtype): (&[i32], Tensor, DType),
) -> Result<Tensor, ModelError> {
    let (wide, none) = (widened(&mut back.pass, x)?, Attributes::new());
    check(rows, &wide);
    let mut sum = back.pass.empty(dtype, dx.shape())?;
    if let [(_, Some(adapter))] = rows {
        let from = adapter.backward(back, start, &wide, dy, mask)?;
        back.pass.op("add", &none, &[("a", dx.view()), ("b", from.view())], [("y", sum.view_mut())])?;
        return Ok(sum);
    }
    back.pass.op("scale", &none, &[("x", dx.view())], [("y", sum.view_mut())])?;
    // Rows of an adapter that stand apart go on with its sums, in the order of the rows.
    let (n, all) = (dy.shape()[1], dy.contiguous::<f32>().expect("it is f32, and rows stand one behind the other"));
    for (rows, adapter) in with_one(rows) {
        let x = part(&back.pass, &wide, rows)?;
        let own = TensorRef::new(&all[rows.start * n..rows.end * n], &[rows.len(), n])?;
        let from = adapter.backward(back, start, &x, own, &mask[rows.clone()])?;
        add_part(&mut back.pass, rows, (&dx, &from), &mut sum)?;
    }
    Ok(sum)
}

/// Which rows have which adapter is known of a step alone.
fn check(rows: &[Rows], x: &Tensor) {
    let end = rows.last().map_or(0, |(rows, _)| rows.end);
    assert_eq!(x.shape()[0], end, "a product with an adapter is of all rows of a step");
}
