//! One op made ready to be timed: inputs drawn, weights packed, outputs allocated, before any clock starts.

use samebits_contract::tensor::DType;
use samebits_ops::{
    Attention, Cpu, Element, Error, NormRope, PackedWeight, Pairing, RmsNorm, Rope, RopeTable, Rounding, add,
    add_rms_norm, argmax, attention, bf16, embedding, f16, gemm_packed, inv_freq, linear_logprob_packed, logprob,
    norm_rope, rms_norm, rope, silu_mul, softmax,
};
use std::collections::BTreeMap;

/// Extents and parameters by name, for example `M=16`.
pub struct Params {
    op: String,
    given: BTreeMap<String, String>,
    /// What stands before a name where they were given, for messages.
    field: &'static str,
}

impl Params {
    /// The parameters given for `op` on the command line.
    pub fn new(op: &str, given: BTreeMap<String, String>) -> Params {
        Params { op: op.to_string(), given, field: "--param " }
    }

    /// The parameters given for `op` in a table of workloads.
    pub fn of_workload(op: &str, given: BTreeMap<String, String>) -> Params {
        Params { op: op.to_string(), given, field: "params." }
    }

    /// Takes the parameter `name`, which must be there unless there is a default.
    pub(crate) fn take<T: std::str::FromStr>(&mut self, name: &str, default: Option<T>) -> Result<T, String> {
        match (self.given.remove(name), default) {
            (Some(text), _) => text.parse().map_err(|_| format!("{}{name}={text}: not a number", self.field)),
            (None, Some(default)) => Ok(default),
            (None, None) => Err(format!("{} needs {}{name}=N", self.op, self.field)),
        }
    }

    /// An extent, at least 1.
    pub(crate) fn extent(&mut self, name: &str) -> Result<usize, String> {
        match self.take(name, None)? {
            0 => Err(format!("{}{name}=0: an extent is at least 1", self.field)),
            extent => Ok(extent),
        }
    }

    /// Refuses what no op took.
    pub(crate) fn finish(&self) -> Result<(), String> {
        match self.given.keys().next() {
            Some(name) => Err(format!("{}{name}: {} has no such parameter", self.field, self.op)),
            None => Ok(()),
        }
    }
}

/// One run of an op.
type Run = Box<dyn FnMut() -> Result<(), Error>>;

/// An op ready to run, again and again.
pub struct Work {
    /// One run.
    pub run: Run,
    /// Bytes that one run must read and write at least once.
    pub bytes: u64,
    /// Multiplications and additions of one run, a fused pair counted as two; for ops that only move data, elements.
    pub operations: u64,
}

/// Makes `op` ready on `cpu`.
///
/// # Errors
/// An unknown op, a parameter that is missing, unknown or not a number.
pub fn work(cpu: &Cpu, dtype: DType, out: DType, mut params: Params) -> Result<Work, String> {
    let work = match (dtype, out) {
        (DType::Bf16, DType::Bf16) => typed::<bf16, bf16>(cpu, &mut params),
        (DType::Bf16, DType::Fp32) => typed::<bf16, f32>(cpu, &mut params),
        (DType::Fp16, DType::Fp16) => typed::<f16, f16>(cpu, &mut params),
        (DType::Fp32, DType::Fp32) => typed::<f32, f32>(cpu, &mut params),
        _ => Err(format!("{dtype} to {out} is not measured; use the same dtype, or bf16 to fp32")),
    }?;
    params.finish()?;
    Ok(work)
}

/// Values in [-1, 1) that do not repeat soon.
fn values<T: Element>(len: usize) -> Vec<T> {
    drawn(1, len)
}

/// The values of [`values`], begun elsewhere for another `seed`.
pub(crate) fn drawn<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        T::narrow((state >> 40) as f32 / 8_388_608.0 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

fn zeros<T: Element>(len: usize) -> Vec<T> {
    vec![T::default(); len]
}

fn typed<I: Element, O: Element>(cpu: &Cpu, p: &mut Params) -> Result<Work, String> {
    let (i, o) = (size_of::<I>(), size_of::<O>());
    let cpu = cpu.clone();
    let (run, bytes, operations): (Run, usize, usize) = match p.op.clone().as_str() {
        "gemm" => {
            let (m, n, k) = (p.extent("M")?, p.extent("N")?, p.extent("K")?);
            let w = PackedWeight::pack(&cpu, n, k, &values::<I>(n * k)).map_err(|e| e.to_string())?;
            let (x, mut y) = (values::<I>(m * k), zeros::<O>(m * n));
            let run = move || gemm_packed(&cpu, m, &x, &w, None, &mut y);
            (Box::new(run), i * (m * k + n * k) + o * m * n, 2 * m * n * k)
        }
        "rms_norm" => {
            let (rows, n) = (p.extent("R")?, p.extent("N")?);
            let shape = RmsNorm { rows, n, eps: 1e-6, rounding: Rounding::Once, weight_offset: false };
            let (x, w, mut y) = (values::<I>(rows * n), values::<I>(n), zeros::<O>(rows * n));
            (Box::new(move || rms_norm(&cpu, &shape, &x, &w, &mut y)), (i + o) * rows * n, 4 * rows * n)
        }
        "add_rms_norm" => {
            let (rows, n) = (p.extent("R")?, p.extent("N")?);
            let shape = RmsNorm { rows, n, eps: 1e-6, rounding: Rounding::Once, weight_offset: false };
            let (x, residual, w) = (values::<I>(rows * n), values::<I>(rows * n), values::<I>(n));
            let (mut sum, mut y) = (zeros::<O>(rows * n), zeros::<O>(rows * n));
            let run = move || add_rms_norm(&cpu, &shape, &x, &residual, &w, &mut sum, &mut y);
            (Box::new(run), 2 * (i + o) * rows * n, 5 * rows * n)
        }
        "attention" => {
            let (batch, queries, keys) = (p.extent("B")?, p.extent("T")?, p.extent("S")?);
            let (q_heads, kv_heads, head_dim) = (p.extent("Hq")?, p.extent("Hkv")?, p.extent("D")?);
            let value_dim = p.take("E", Some(head_dim))?;
            let causal = p.take("causal", Some(1u8))? == 1;
            let (window, softcap) = (p.take("window", Some(0))?, p.take("softcap", Some(0.0))?);
            let shape = Attention {
                value_dim,
                causal,
                window,
                softcap,
                ..Attention::causal([batch, queries, keys], [q_heads, kv_heads], head_dim)
            };
            // The queries are the last ones of the sequence.
            let first = keys.checked_sub(queries).ok_or("attention: T is larger than S")?;
            let seen = |t: usize| {
                let to = if causal { first + t + 1 } else { keys };
                if window > 0 { to.min(window) } else { to }
            };
            let pairs = batch * q_heads * (0..queries).map(seen).sum::<usize>();
            let q_pos: Vec<i32> = (0..batch).flat_map(|_| first as i32..keys as i32).collect();
            let kv_len = vec![keys as i32; batch];
            let q = values::<I>(batch * queries * q_heads * head_dim);
            let (k, v) =
                (values::<I>(batch * keys * kv_heads * head_dim), values::<I>(batch * keys * kv_heads * value_dim));
            let (mut y, mut lse) =
                (zeros::<O>(batch * queries * q_heads * value_dim), zeros(batch * queries * q_heads));
            let bytes = i * (q.len() + k.len() + v.len()) + o * y.len();
            let run = move || attention(&cpu, &shape, &q, &k, &v, &q_pos, &kv_len, &mut y, &mut lse);
            (Box::new(run), bytes, 2 * pairs * (head_dim + value_dim))
        }
        "logprob" => {
            let (rows, vocab) = (p.extent("R")?, p.extent("V")?);
            let temperature = p.take("temperature", Some(1.0))?;
            let target: Vec<i32> = (0..rows).map(|r| (r % vocab) as i32).collect();
            let (logits, mut logp, mut lse) = (values::<I>(rows * vocab), zeros(rows), zeros(rows));
            let run = move || logprob(&cpu, rows, vocab, temperature, &logits, &target, &mut logp, &mut lse);
            (Box::new(run), i * rows * vocab, 2 * rows * vocab)
        }
        "linear_logprob" => {
            let (rows, vocab, k) = (p.extent("M")?, p.extent("V")?, p.extent("K")?);
            let temperature = p.take("temperature", Some(1.0))?;
            let w = PackedWeight::pack(&cpu, vocab, k, &values::<I>(vocab * k)).map_err(|e| e.to_string())?;
            let target: Vec<i32> = (0..rows).map(|r| (r * 7919 % vocab) as i32).collect();
            let (x, mut logp, mut lse) = (values::<I>(rows * k), zeros(rows), zeros(rows));
            let run = move || linear_logprob_packed(&cpu, rows, temperature, &x, &w, &target, &mut logp, &mut lse);
            (Box::new(run), i * (rows * k + vocab * k), 2 * rows * vocab * k)
        }
        "softmax" => {
            let (rows, n) = (p.extent("R")?, p.extent("N")?);
            let (x, mut y) = (values::<I>(rows * n), zeros::<O>(rows * n));
            (Box::new(move || softmax(&cpu, rows, n, &x, &mut y)), (i + o) * rows * n, 2 * rows * n)
        }
        "silu_mul" => {
            let (rows, n) = (p.extent("R")?, p.extent("N")?);
            let (gate, up, mut y) = (values::<I>(rows * n), values::<I>(rows * n), zeros::<O>(rows * n));
            (Box::new(move || silu_mul(&cpu, &gate, &up, &mut y)), (2 * i + o) * rows * n, 2 * rows * n)
        }
        "add" => {
            let (rows, n) = (p.extent("R")?, p.extent("N")?);
            let (a, b, mut y) = (values::<I>(rows * n), values::<I>(rows * n), zeros::<O>(rows * n));
            (Box::new(move || add(&cpu, &a, &b, &mut y)), (2 * i + o) * rows * n, rows * n)
        }
        "rope" => {
            let (tokens, heads, dim) = (p.extent("T")?, p.extent("H")?, p.extent("D")?);
            let shape = Rope { tokens, heads, dim, pairing: Pairing::Half };
            let pos: Vec<i32> = (0..tokens as i32).collect();
            let table = RopeTable::new(&cpu, &inv_freq(p.take("theta", Some(10_000.0))?, dim), &pos);
            let (x, mut y) = (values::<I>(tokens * heads * dim), zeros::<O>(tokens * heads * dim));
            let elements = x.len();
            (Box::new(move || rope(&cpu, &shape, &table, &x, &mut y)), (i + o) * elements, 3 * elements)
        }
        "norm_rope" => {
            let (tokens, heads, dim) = (p.extent("T")?, p.extent("H")?, p.extent("D")?);
            let (rounding, pairing) = (Rounding::Once, Pairing::Half);
            let shape = NormRope { tokens, heads, dim, eps: 1e-6, rounding, weight_offset: false, pairing };
            let pos: Vec<i32> = (0..tokens as i32).collect();
            let table = RopeTable::new(&cpu, &inv_freq(p.take("theta", Some(10_000.0))?, dim), &pos);
            let (x, w, mut y) = (values::<I>(tokens * heads * dim), values::<I>(dim), zeros::<O>(tokens * heads * dim));
            let elements = x.len();
            (Box::new(move || norm_rope(&cpu, &shape, &table, &x, &w, &mut y)), (i + o) * elements, 7 * elements)
        }
        "embedding" => {
            let (vocab, dim, tokens) = (p.extent("V")?, p.extent("D")?, p.extent("T")?);
            let ids: Vec<i32> = (0..tokens).map(|t| (t * 7919 % vocab) as i32).collect();
            let (w, mut y) = (values::<I>(vocab * dim), zeros::<O>(tokens * dim));
            (Box::new(move || embedding(&cpu, dim, &w, &ids, &mut y)), (i + o) * tokens * dim, tokens * dim)
        }
        "argmax" => {
            let (rows, n) = (p.extent("R")?, p.extent("N")?);
            let (x, mut index) = (values::<I>(rows * n), vec![0i32; rows]);
            (Box::new(move || argmax(&cpu, rows, n, &x, &mut index)), i * rows * n, rows * n)
        }
        op => return Err(format!("--op {op}: not an op; `samebits list` shows the ops")),
    };
    Ok(Work { run, bytes: bytes as u64, operations: operations as u64 })
}
