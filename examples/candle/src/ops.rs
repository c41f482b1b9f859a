//! The ops: candle's storages and layouts in, one call by name, a new storage out.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Error, Layout, Result, Shape, bail};
use samebits_ops::{Attributes, Backend, Cpu, TensorMut, TensorRef, bf16, f16};

/// `x[.., N], w[N] -> y[.., N]`: each row of x over its root mean square, times w.
///
/// x and w are both bf16, f16 or f32, on the CPU; y is the same. x has two to six axes.
///
/// # Errors
/// When the last axis of an input is not contiguous, a shape or a dtype is another, or `eps` is negative or not finite.
pub struct RmsNorm {
    /// Where it runs; nothing of it moves a bit.
    pub cpu: Cpu,
    /// Added to the mean of the squares, rounded to f32.
    pub eps: f64,
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_at: &Layout, w: &CpuStorage, w_at: &Layout) -> Result<(CpuStorage, Shape)> {
        let inputs = [view("rms_norm", ["x", "N"], x, x_at)?, view("rms_norm", ["w", "N"], w, w_at)?];
        let mut y = zeros(x, x_at.dims());
        let attributes = Attributes::new().with("eps", self.eps);
        let outputs = vec![("y", whole(&mut y, x_at.dims())?)];
        self.cpu.call("rms_norm", attributes, &inputs, outputs).map_err(Error::wrap)?;
        Ok((y, x_at.shape().clone()))
    }
}

/// `x[.., K], w[N, K] -> y[.., N]`: x w^T, a linear layer without bias.
///
/// x and w are both bf16, f16 or f32, on the CPU; y is the same. x has two to six axes.
///
/// # Errors
/// When the last axis of an input is not contiguous, or a shape or a dtype is another.
pub struct MatMul {
    /// Where it runs; nothing of it moves a bit.
    pub cpu: Cpu,
}

impl CustomOp2 for MatMul {
    fn name(&self) -> &'static str {
        "gemm"
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_at: &Layout, w: &CpuStorage, w_at: &Layout) -> Result<(CpuStorage, Shape)> {
        let inputs = [view("gemm", ["x", "K"], x, x_at)?, view("gemm", ["w", "K"], w, w_at)?];
        let ([leading @ .., _], [n, _]) = (x_at.dims(), w_at.dims()) else {
            bail!("gemm: x{:?} and w{:?} are no x[.., K] and w[N, K]", x_at.dims(), w_at.dims());
        };
        let shape = [leading, &[*n]].concat();
        let mut y = zeros(x, &shape);
        self.cpu.call("gemm", Attributes::new(), &inputs, vec![("y", whole(&mut y, &shape)?)]).map_err(Error::wrap)?;
        Ok((y, shape.into()))
    }
}

/// `q[B, T, Hq, D], k[B, S, Hkv, D], v[B, S, Hkv, E] -> out[B, T, Hq, E]`: causal attention with scores times
/// 1 / sqrt(D) and grouped heads: Hq is a multiple of Hkv.
///
/// Heads that candle keeps as `[B, H, S, D]` go in as their `transpose(1, 2)`. The inputs are all bf16, f16 or f32,
/// on the CPU; the output is the same.
///
/// # Errors
/// When the last axis of an input is not contiguous, a shape or a dtype is another, or a position is beyond i32.
pub struct Attention {
    /// Where it runs; nothing of it moves a bit.
    pub cpu: Cpu,
    /// The position of the first query, in tokens: query t sees the keys 0 to `offset + t`.
    pub offset: usize,
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_at: &Layout,
        k: &CpuStorage,
        k_at: &Layout,
        v: &CpuStorage,
        v_at: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let [q_in, k_in] = [view("attention", ["q", "D"], q, q_at)?, view("attention", ["k", "D"], k, k_at)?];
        let v_in = view("attention", ["v", "E"], v, v_at)?;
        let (&[batch, queries, heads, _], &[_, keys, _, _], &[.., width]) = (q_at.dims(), k_at.dims(), v_at.dims())
        else {
            bail!("attention: q, k and v have the axes [B, T, H, D]; q has {:?}, k {:?}", q_at.dims(), k_at.dims());
        };
        let end = integer(self.offset.saturating_add(queries))?;
        let positions: Vec<i32> = (0..batch).flat_map(|_| end - queries as i32..end).collect();
        let lengths = vec![integer(keys)?; batch];
        let q_pos = TensorRef::new(&positions, &[batch, queries]).map_err(Error::wrap)?;
        let kv_len = TensorRef::new(&lengths, &[batch]).map_err(Error::wrap)?;

        let shape = [batch, queries, heads, width];
        let mut out = zeros(q, &shape);
        let mut lse = vec![0f32; batch * queries * heads];
        let outputs = vec![
            ("out", whole(&mut out, &shape)?),
            ("lse", TensorMut::new(&mut lse, &shape[..3]).map_err(Error::wrap)?),
        ];
        let inputs = [q_in, k_in, v_in, ("q_pos", q_pos), ("kv_len", kv_len)];
        self.cpu.call("attention", Attributes::new().with("causal", true), &inputs, outputs).map_err(Error::wrap)?;
        Ok((out, Shape::from(&shape)))
    }
}

/// An input as it lies. No element is copied: the view borrows candle's storage.
fn view<'a>(
    op: &str,
    [name, last_axis]: [&'static str; 2],
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<(&'static str, TensorRef<'a>)> {
    let (shape, strides, from) = (layout.dims(), layout.stride(), layout.start_offset());
    // The ops say so as well, but know neither the tensor's name nor the axis's.
    if let (Some(&extent), Some(&stride)) = (shape.last(), strides.last())
        && extent > 1
        && stride != 1
    {
        bail!("{op}: axis {last_axis} of `{name}` has stride {stride}; it must be contiguous (`contiguous()` copies)");
    }
    let view = match storage {
        CpuStorage::BF16(data) => TensorRef::strided(&data[from..], shape, strides),
        CpuStorage::F16(data) => TensorRef::strided(&data[from..], shape, strides),
        CpuStorage::F32(data) => TensorRef::strided(&data[from..], shape, strides),
        _ => bail!("{op}: `{name}` is {:?}; it must be bf16, f16 or f32", storage.dtype()),
    };
    Ok((name, view.map_err(|error| Error::Msg(format!("{op}: `{name}`: {error}")))?))
}

/// Room for an output of the dtype of `like`, which an input has been made of.
fn zeros(like: &CpuStorage, shape: &[usize]) -> CpuStorage {
    let count = shape.iter().product();
    match like {
        CpuStorage::BF16(_) => CpuStorage::BF16(vec![bf16::ZERO; count]),
        CpuStorage::F16(_) => CpuStorage::F16(vec![f16::ZERO; count]),
        _ => CpuStorage::F32(vec![0.0; count]),
    }
}

/// The whole of an output.
fn whole<'a>(storage: &'a mut CpuStorage, shape: &[usize]) -> Result<TensorMut<'a>> {
    match storage {
        CpuStorage::BF16(data) => TensorMut::new(data, shape),
        CpuStorage::F16(data) => TensorMut::new(data, shape),
        CpuStorage::F32(data) => TensorMut::new(data, shape),
        _ => bail!("an output is {:?}", storage.dtype()),
    }
    .map_err(Error::wrap)
}

/// A position or a length as the ops take it.
fn integer(count: usize) -> Result<i32> {
    i32::try_from(count).map_err(|_| Error::Msg(format!("attention: position or length {count} is beyond i32")))
}
