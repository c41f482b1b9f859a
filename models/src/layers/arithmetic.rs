//! Ops of elements that layers are put together of, in f32 but where a product reads what they make.

use crate::ModelError;
use crate::pass::Pass;
use samebits_ops::device::Part;
use samebits_ops::{Attributes, DType, Tensor};

/// The extents by which rows of `x[n,width]` are heads of so many elements.
pub(crate) fn by_head(x: &Tensor, head_dim: usize) -> [usize; 2] {
    [x.shape()[0] * (x.shape()[1] / head_dim), head_dim]
}

/// `a * b`, of `dtype`.
pub(crate) fn mul(pass: &mut Pass, a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor, ModelError> {
    pair(pass, "mul", [a, b], dtype)
}

/// `a + b`, of `dtype`.
pub(crate) fn add(pass: &mut Pass, a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor, ModelError> {
    pair(pass, "add", [a, b], dtype)
}

/// `a - b` in f32.
pub(crate) fn sub(pass: &mut Pass, a: &Tensor, b: &Tensor) -> Result<Tensor, ModelError> {
    let minus = scaled(pass, b, -1.0)?;
    add(pass, a, &minus, DType::Fp32)
}

/// `x * factor` in f32.
pub(crate) fn scaled(pass: &mut Pass, x: &Tensor, factor: f64) -> Result<Tensor, ModelError> {
    pass.scaled(&Attributes::new().with("factor", factor), x)
}

/// `x * sigmoid(gate)`, of `dtype`.
pub(crate) fn gated(pass: &mut Pass, gate: &Tensor, x: &Tensor, dtype: DType) -> Result<Tensor, ModelError> {
    let mut y = pass.empty(dtype, x.shape())?;
    let inputs = [("gate", gate.view()), ("x", x.view())];
    pass.op("sigmoid_mul", &Attributes::new(), &inputs, [("y", y.view_mut())])?;
    Ok(y)
}

/// From that of `x * sigmoid(gate)`: those of gate and x, in f32.
pub(crate) fn gated_backward(
    pass: &mut Pass,
    gate: &Tensor,
    x: &Tensor,
    dy: &Tensor,
) -> Result<[Tensor; 2], ModelError> {
    let (mut dgate, mut dx) = (pass.empty(DType::Fp32, gate.shape())?, pass.empty(DType::Fp32, x.shape())?);
    let inputs = [("gate", gate.view()), ("x", x.view()), ("dy", dy.view())];
    let outputs = [("dgate", dgate.view_mut()), ("dx", dx.view_mut())];
    pass.op("sigmoid_mul_backward", &Attributes::new(), &inputs, outputs)?;
    Ok([dgate, dx])
}

/// `up * silu(gate)`, of `dtype`.
pub(crate) fn silu_gated(pass: &mut Pass, gate: &Tensor, up: &Tensor, dtype: DType) -> Result<Tensor, ModelError> {
    let mut y = pass.empty(dtype, up.shape())?;
    let inputs = [("gate", gate.view()), ("up", up.view())];
    pass.op("silu_mul", &Attributes::new(), &inputs, [("y", y.view_mut())])?;
    Ok(y)
}

/// From that of `up * silu(gate)`: those of gate and up, in f32.
pub(crate) fn silu_gated_backward(
    pass: &mut Pass,
    gate: &Tensor,
    up: &Tensor,
    dy: &Tensor,
) -> Result<[Tensor; 2], ModelError> {
    let (mut dgate, mut dup) = (pass.empty(DType::Fp32, gate.shape())?, pass.empty(DType::Fp32, up.shape())?);
    let inputs = [("gate", gate.view()), ("up", up.view()), ("dy", dy.view())];
    let outputs = [("dgate", dgate.view_mut()), ("dup", dup.view_mut())];
    pass.op("silu_mul_backward", &Attributes::new(), &inputs, outputs)?;
    Ok([dgate, dup])
}

/// `silu(x)` in f32: a row of ones behind the gate x.
pub(crate) fn silu(pass: &mut Pass, x: &Tensor, ones: &Tensor) -> Result<Tensor, ModelError> {
    let up = rows(pass, ones, x)?;
    silu_gated(pass, x, &up, DType::Fp32)
}

/// From that of [`silu`]: that of x.
pub(crate) fn silu_backward(pass: &mut Pass, x: &Tensor, ones: &Tensor, dy: &Tensor) -> Result<Tensor, ModelError> {
    let up = rows(pass, ones, x)?;
    let [dx, _] = silu_gated_backward(pass, x, &up, dy)?;
    Ok(dx)
}

/// A row of f32, as often as `like` has rows.
pub(crate) fn rows(pass: &Pass, row: &Tensor, like: &Tensor) -> Result<Tensor, ModelError> {
    let (n, width) = (like.shape()[0], row.shape()[1]);
    let mut rows = pass.empty(DType::Fp32, &[n, width])?;
    let from = Part { every: n.max(1), ..Part::whole(width) };
    pass.machine.copy_rows([n, width], (row, from), (&mut rows, Part::whole(width)))?;
    Ok(rows)
}

fn pair(pass: &mut Pass, op: &str, [a, b]: [&Tensor; 2], dtype: DType) -> Result<Tensor, ModelError> {
    let mut y = pass.empty(dtype, a.shape())?;
    pass.op(op, &Attributes::new(), &[("a", a.view()), ("b", b.view())], [("y", y.view_mut())])?;
    Ok(y)
}
