//! `ours/cuda`: the ops of `samebits-ops` on a device, asked by name. What is asked and how it is checked is as for
//! `ours/cpu`; tensors go to the device and come back.

use super::Implementation;
use super::cpu::{
    AttentionCall, OPS, Outputs, Refusal, Request, Stored, attention_call, combine_shape, gemm_shape, norm, room,
    rotation, route_shape, spread_route,
};
use crate::checkpoints::Checkpoints;
use crate::clock::Clock;
use samebits_contract::case::{Answer, Case};
use samebits_contract::tensor::{DType, Tensor};
use samebits_ops::device::{self, Buffer, Device, Rotations};
use samebits_ops::{Cpu, Error, NormRope, RmsNorm, Rope, bf16, f16};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The ops on one device; or, where there is none, the reason for that.
pub struct CudaImplementation {
    device: Result<Device, String>,
    /// Makes the tables of rope.
    cpu: Cpu,
    /// The models that `chain` may name; none for a program that only offers ops.
    checkpoints: Option<Arc<Checkpoints>>,
    version: String,
}

/// The first GPU, with `budget` bytes of workspace per op; compiled kernels are kept in the folder that `SAMEBITS_KERNELS`
/// names, and units are taken from the folder that `SAMEBITS_SOURCES` names, if these are set.
///
/// # Errors
/// [`Error::Unavailable`] where there is none; [`Error::Device`].
pub fn open_gpu(budget: usize) -> Result<Device, Error> {
    let cache = std::env::var_os("SAMEBITS_KERNELS").map(std::path::PathBuf::from);
    let cuda = device::cuda::Cuda::open(0, cache.as_deref())?;
    let cuda = match std::env::var_os("SAMEBITS_SOURCES") {
        Some(folder) => cuda.with_sources(folder.into()),
        None => cuda,
    };
    Ok(Device::new(Box::new(cuda), usize::MAX, budget))
}

impl CudaImplementation {
    /// Answers on `device`, or says of every case that it is unsupported because there is none.
    pub fn new(device: Result<Device, Error>, cpu: Cpu) -> CudaImplementation {
        let device = device.map_err(|e| e.to_string());
        let on = device.as_ref().map_or_else(Clone::clone, |device| device.name().to_string());
        CudaImplementation { device, cpu, checkpoints: None, version: format!("{}, {on}", env!("CARGO_PKG_VERSION")) }
    }

    /// Answers on the first GPU: [`open_gpu`]. What is forbidden on `cpu` is forbidden on the device.
    pub fn first_gpu(cpu: Cpu, budget: usize) -> CudaImplementation {
        let device = open_gpu(budget).map(|device| device.strict_as(cpu.ledger()));
        CudaImplementation::new(device, cpu)
    }

    /// Also answers op `chain`, for the models of `checkpoints`.
    pub fn with_checkpoints(self, checkpoints: Arc<Checkpoints>) -> CudaImplementation {
        CudaImplementation { checkpoints: Some(checkpoints), ..self }
    }

    /// What the device is, or why there is none.
    pub fn device(&self) -> Result<&Device, &str> {
        self.device.as_ref().map_err(String::as_str)
    }

    /// Answers `case`, its op timed by `clock` where there is one.
    pub fn answer(&self, case: &Case, clock: Option<&Clock>) -> Answer {
        let device = match &self.device {
            // Every request has counters of its own.
            Ok(device) => device.recording(),
            Err(reason) => return Answer::unsupported(reason.clone()),
        };
        // Instruction sets and threads are the processor's.
        let device = device.with_budget(case.config.budget.unwrap_or(device.budget()));
        let answer = if let (Some(checkpoints), "chain") = (&self.checkpoints, case.op.as_str()) {
            checkpoints.answer_on(&self.cpu, Some(&device), case)
        } else {
            self.op_answer(&device, case, clock).unwrap_or_else(Refusal::answer)
        };
        let plans = device.ledger().plans();
        let counts = device.ledger().counts();
        Answer {
            plan: plans.iter().map(|plan| plan.to_string()).collect::<Vec<_>>().join("; "),
            ledger: counts.into_iter().map(|(counter, count)| (counter.name().to_string(), count)).collect(),
            // A compiler's log has many lines, and a reason one.
            reason: answer.reason.trim_end().replace('\n', "; "),
            ..answer
        }
    }

    fn op_answer(&self, device: &Device, case: &Case, clock: Option<&Clock>) -> Result<Answer, Refusal> {
        let find = |name: &str| OPS.iter().find(|op| op.name == name);
        find(&case.op).ok_or_else(|| {
            let known: Vec<_> = OPS.iter().map(|op| op.name).collect();
            Refusal::Unsupported(format!("op `{}` is not offered; use one of {}", case.op, known.join(", ")))
        })?;
        let request = Request::checked(case, self.cpu.clone(), clock)?;
        let outputs = typed(&On { device, request: &request })?;
        Ok(Answer::ok(format!("{}/cuda:{}", case.op, device.ledger().kernels().join("+")), outputs))
    }
}

impl Implementation for CudaImplementation {
    fn name(&self) -> &str {
        "ours/cuda"
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn absent(&self) -> Option<&str> {
        self.device().err()
    }

    fn run(&self, case: &Case) -> Answer {
        self.answer(case, None)
    }
}

/// A checked request and the device that answers it.
struct On<'a> {
    device: &'a Device,
    request: &'a Request<'a>,
}

/// A float type of requests and of devices.
trait Float: Stored + device::Stored {}
impl<T: Stored + device::Stored> Float for T {}

fn typed(on: &On) -> Result<Outputs, Refusal> {
    match on.request.dtype {
        DType::Bf16 => typed_out::<bf16>(on),
        DType::Fp16 => typed_out::<f16>(on),
        _ => typed_out::<f32>(on),
    }
}

fn typed_out<I: Float>(on: &On) -> Result<Outputs, Refusal> {
    match on.request.case.out {
        DType::Bf16 => answer::<I, bf16>(on),
        DType::Fp16 => answer::<I, f16>(on),
        _ => answer::<I, f32>(on),
    }
}

fn answer<I: Float, O: Float>(on: &On) -> Result<Outputs, Refusal> {
    match on.request.case.op.as_str() {
        "gemm" => gemm::<I, O>(on),
        "rms_norm" => rms_norm::<I, O>(on),
        "add_rms_norm" => add_rms_norm::<I, O>(on),
        "attention" | "paged_attention" | "packed_attention" => attention::<I, O>(on),
        "logprob" => logprob::<I>(on),
        "linear_logprob" => linear_logprob::<I>(on),
        "softmax" => softmax::<I, O>(on),
        "silu_mul" => elementwise::<I, O>(on, "gate", "up", device::silu_mul),
        "gelu_mul" => elementwise::<I, O>(on, "gate", "up", device::gelu_mul),
        "add" => elementwise::<I, O>(on, "a", "b", device::add),
        "softcap" => pointwise::<I, O>(on, on.request.call.float("cap"), device::softcap),
        "scale" => pointwise::<I, O>(on, on.request.call.float("factor"), device::scale),
        "rope" => rope::<I, O>(on),
        "norm_rope" => norm_rope::<I, O>(on),
        "embedding" => embedding::<I, O>(on),
        "argmax" => argmax::<I>(on),
        "route" => route::<I>(on),
        "combine" => combine::<I, O>(on),
        op => Err(Refusal::Unsupported(format!("op `{op}` has no kernel for a device"))),
    }
}

/// A result that comes back from the device.
struct Back<T> {
    name: &'static str,
    shape: Vec<usize>,
    host: Vec<T>,
    there: Buffer<T>,
}

impl<T: device::Plain> Back<T> {
    fn fetch(
        mut self,
        device: &Device,
        tensor: impl Fn(&[usize], Vec<T>) -> Tensor,
    ) -> Result<(String, Tensor), Refusal> {
        self.there.download(device, &mut self.host)?;
        Ok((self.name.to_string(), tensor(&self.shape, self.host)))
    }
}

impl On<'_> {
    /// An input on the device.
    fn input<I: Float>(&self, name: &'static str) -> Result<Buffer<I>, Refusal> {
        Ok(self.device.upload("request", self.request.float::<I>(name))?)
    }

    /// Room for an output, here and there.
    fn output<T: device::Plain>(&self, name: &'static str, shape: &[usize]) -> Result<Back<T>, Refusal> {
        let host = room::<T>(name, shape)?;
        let there = self.device.empty("request", host.len())?;
        Ok(Back { name, shape: shape.to_vec(), host, there })
    }

    /// Runs `op`; what a clock times ends when the device has ended.
    fn timed(&self, mut op: impl FnMut() -> Result<(), Error>) -> Result<(), Refusal> {
        self.request.timed(|| {
            op()?;
            if self.request.clock.is_some() { self.device.finish() } else { Ok(()) }
        })
    }
}

fn gemm<I: Float, O: Float>(on: &On) -> Result<Outputs, Refusal> {
    let shape = gemm_shape(on.request);
    if shape.is_partial() { gemm_as::<I, f32>(on, &shape) } else { gemm_as::<I, O>(on, &shape) }
}

fn gemm_as<I: Float, O: Float>(on: &On, shape: &samebits_ops::Gemm) -> Result<Outputs, Refusal> {
    let has_bias = on.request.case.inputs.contains_key("bias") && !shape.is_partial();
    let (x, w) = (on.input::<I>("x")?, on.input::<I>("w")?);
    let bias = has_bias.then(|| on.input::<I>("bias")).transpose()?;
    let mut y = on.output::<O>("y", &[shape.m, shape.n])?;
    on.timed(|| device::gemm(on.device, shape, &x, &w, bias.as_ref(), &mut y.there))?;
    Ok(BTreeMap::from([y.fetch(on.device, O::tensor)?]))
}

fn rms_norm<I: Float, O: Float>(on: &On) -> Result<Outputs, Refusal> {
    let (rows, n) = (on.request.extent("R"), on.request.extent("N"));
    let shape = norm(on.request, rows, n);
    let (x, w) = (on.input::<I>("x")?, on.input::<I>("w")?);
    let mut y = on.output::<O>("y", &[rows, n])?;
    on.timed(|| device::rms_norm(on.device, &shape, &x, &w, &mut y.there))?;
    Ok(BTreeMap::from([y.fetch(on.device, O::tensor)?]))
}

fn add_rms_norm<I: Float, O: Float>(on: &On) -> Result<Outputs, Refusal> {
    let (rows, n) = (on.request.extent("R"), on.request.extent("N"));
    let shape = norm(on.request, rows, n);
    let (x, residual, w) = (on.input::<I>("x")?, on.input::<I>("residual")?, on.input::<I>("w")?);
    let (mut sum, mut y) = (on.output::<O>("sum", &[rows, n])?, on.output::<O>("y", &[rows, n])?);
    on.timed(|| device::add_rms_norm(on.device, &shape, &x, &residual, &w, &mut sum.there, &mut y.there))?;
    Ok(BTreeMap::from([sum.fetch(on.device, O::tensor)?, y.fetch(on.device, O::tensor)?]))
}

fn attention<I: Float, O: Float>(on: &On) -> Result<Outputs, Refusal> {
    let AttentionCall { shape, sequences, rows, kv_len } = attention_call(on.request);
    let (q, k, v) = (on.input::<I>("q")?, on.input::<I>("k")?, on.input::<I>("v")?);
    let mut out = on.output::<O>("out", &[&rows[..], &[shape.value_dim]].concat())?;
    let mut lse = on.output::<f32>("lse", &rows)?;
    let q_pos = on.request.integer("q_pos");
    on.timed(|| {
        let outputs = (&mut out.there, &mut lse.there);
        device::attention_over(on.device, &shape, &sequences, &q, &k, &v, q_pos, &kv_len, outputs.0, outputs.1)
    })?;
    Ok(BTreeMap::from([out.fetch(on.device, O::tensor)?, lse.fetch(on.device, Tensor::fp32)?]))
}

fn logprob<I: Float>(on: &On) -> Result<Outputs, Refusal> {
    let (rows, vocab) = (on.request.extent("R"), on.request.extent("V"));
    let temperature = on.request.call.float("temperature");
    let logits = on.input::<I>("logits")?;
    let (mut logprob, mut lse) = (on.output::<f32>("logprob", &[rows])?, on.output::<f32>("lse", &[rows])?);
    let target = on.request.integer("target");
    on.timed(|| {
        let outputs = (&mut logprob.there, &mut lse.there);
        device::logprob(on.device, rows, vocab, temperature, &logits, target, outputs.0, outputs.1)
    })?;
    Ok(BTreeMap::from([logprob.fetch(on.device, Tensor::fp32)?, lse.fetch(on.device, Tensor::fp32)?]))
}

fn linear_logprob<I: Float>(on: &On) -> Result<Outputs, Refusal> {
    let (rows, vocab, k) = (on.request.extent("M"), on.request.extent("V"), on.request.extent("K"));
    let temperature = on.request.call.float("temperature");
    let (x, w) = (on.input::<I>("x")?, on.input::<I>("w")?);
    let (mut logprob, mut lse) = (on.output::<f32>("logprob", &[rows])?, on.output::<f32>("lse", &[rows])?);
    let target = on.request.integer("target");
    on.timed(|| {
        let outputs = (&mut logprob.there, &mut lse.there);
        device::linear_logprob(on.device, rows, vocab, k, temperature, &x, &w, target, outputs.0, outputs.1)
    })?;
    Ok(BTreeMap::from([logprob.fetch(on.device, Tensor::fp32)?, lse.fetch(on.device, Tensor::fp32)?]))
}

fn softmax<I: Float, O: Float>(on: &On) -> Result<Outputs, Refusal> {
    let (rows, n) = (on.request.extent("R"), on.request.extent("N"));
    let x = on.input::<I>("x")?;
    let mut y = on.output::<O>("y", &[rows, n])?;
    on.timed(|| device::softmax(on.device, rows, n, &x, &mut y.there))?;
    Ok(BTreeMap::from([y.fetch(on.device, O::tensor)?]))
}

/// `add` or `silu_mul`.
type Elementwise<I, O> = fn(&Device, &Buffer<I>, &Buffer<I>, &mut Buffer<O>) -> Result<(), Error>;

fn elementwise<I: Float, O: Float>(
    on: &On,
    a: &'static str,
    b: &'static str,
    op: Elementwise<I, O>,
) -> Result<Outputs, Refusal> {
    let shape = on.request.case.inputs[a].shape();
    let (a, b) = (on.input::<I>(a)?, on.input::<I>(b)?);
    let mut y = on.output::<O>("y", shape)?;
    on.timed(|| op(on.device, &a, &b, &mut y.there))?;
    Ok(BTreeMap::from([y.fetch(on.device, O::tensor)?]))
}

/// `softcap` or `scale`.
type Pointwise<I, O> = fn(&Device, f64, &Buffer<I>, &mut Buffer<O>) -> Result<(), Error>;

fn pointwise<I: Float, O: Float>(on: &On, number: f64, op: Pointwise<I, O>) -> Result<Outputs, Refusal> {
    let shape = on.request.case.inputs["x"].shape();
    let x = on.input::<I>("x")?;
    let mut y = on.output::<O>("y", shape)?;
    on.timed(|| op(on.device, number, &x, &mut y.there))?;
    Ok(BTreeMap::from([y.fetch(on.device, O::tensor)?]))
}

fn rope<I: Float, O: Float>(on: &On) -> Result<Outputs, Refusal> {
    let form = [on.request.extent("T"), on.request.extent("H"), on.request.extent("D")];
    let (shape, table) = rotation(on.request);
    let table = Rotations::new(on.device, &table)?;
    let x = on.input::<I>("x")?;
    let mut y = on.output::<O>("y", &form)?;
    on.timed(|| device::rope(on.device, &shape, &table, &x, &mut y.there))?;
    Ok(BTreeMap::from([y.fetch(on.device, O::tensor)?]))
}

fn norm_rope<I: Float, O: Float>(on: &On) -> Result<Outputs, Refusal> {
    let form = [on.request.extent("T"), on.request.extent("H"), on.request.extent("D")];
    let RmsNorm { eps, rounding, weight_offset, .. } = norm(on.request, form[0] * form[1], form[2]);
    let (Rope { tokens, heads, dim, pairing }, table) = rotation(on.request);
    let shape = NormRope { tokens, heads, dim, eps, rounding, weight_offset, pairing };
    let table = Rotations::new(on.device, &table)?;
    let (x, w) = (on.input::<I>("x")?, on.input::<I>("w")?);
    let mut y = on.output::<O>("y", &form)?;
    on.timed(|| device::norm_rope(on.device, &shape, &table, &x, &w, &mut y.there))?;
    Ok(BTreeMap::from([y.fetch(on.device, O::tensor)?]))
}

fn embedding<I: Float, O: Float>(on: &On) -> Result<Outputs, Refusal> {
    let (tokens, dim) = (on.request.extent("T"), on.request.extent("D"));
    let w = on.input::<I>("w")?;
    let mut y = on.output::<O>("y", &[tokens, dim])?;
    on.timed(|| device::embedding(on.device, dim, &w, on.request.integer("tokens"), &mut y.there))?;
    Ok(BTreeMap::from([y.fetch(on.device, O::tensor)?]))
}

fn argmax<I: Float>(on: &On) -> Result<Outputs, Refusal> {
    let (rows, n) = (on.request.extent("R"), on.request.extent("N"));
    let x = on.input::<I>("x")?;
    let mut index = on.output::<i32>("index", &[rows])?;
    on.timed(|| device::argmax(on.device, rows, n, &x, &mut index.there))?;
    Ok(BTreeMap::from([index.fetch(on.device, Tensor::i32)?]))
}

fn route<I: Float>(on: &On) -> Result<Outputs, Refusal> {
    let shape = route_shape(on.request);
    let logits = on.input::<I>("logits")?;
    let bias = on.request.case.inputs.contains_key("bias").then(|| on.input::<I>("bias")).transpose()?;
    let form = [shape.tokens, shape.chosen];
    let (mut index, mut chosen) = (on.output::<i32>("rank", &form)?, on.output::<f32>("weight", &form)?);
    on.timed(|| device::route(on.device, &shape, &logits, bias.as_ref(), &mut index.there, &mut chosen.there))?;
    index.there.download(on.device, &mut index.host)?;
    chosen.there.download(on.device, &mut chosen.host)?;
    Ok(spread_route(&shape, &index.host, &chosen.host))
}

fn combine<I: Float, O: Float>(on: &On) -> Result<Outputs, Refusal> {
    let shape = combine_shape(on.request);
    let x = on.input::<I>("x")?;
    let weight: Vec<f32> = on.request.float::<I>("weight").iter().map(|w| w.widen()).collect();
    let weight = on.device.upload("request", &weight)?;
    let shared = on.request.case.inputs.contains_key("shared").then(|| on.input::<I>("shared")).transpose()?;
    let mut y = on.output::<O>("y", &[shape.tokens, shape.n])?;
    let row = on.request.integer("row");
    on.timed(|| device::combine(on.device, &shape, &x, row, &weight, shared.as_ref(), &mut y.there))?;
    Ok(BTreeMap::from([y.fetch(on.device, O::tensor)?]))
}
