//! `ours/cpu`: the ops of `samebits-ops`, asked by name.

use super::{Implementation, Soaked};
use crate::checkpoints::Checkpoints;
use crate::clock::Clock;
use crate::side::{Program, Side};
use samebits_contract::case::{Answer, Case, Config};
use samebits_contract::spec::check_form;
use samebits_contract::tensor::{DType, Tensor};
use samebits_ops::{
    Attention, Combine, Cpu, Element, Gemm, GroupWorth, Isa, Keys, NormRope, PackedWeight, Pairing, RmsNorm, Rope,
    RopeTable, Rounding, Route, Scoring, Sequences, Tf32,
};
use samebits_ops::{bf16, f16};
use samebits_schema::Call;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// How long a process of its own may take for an answer.
const PATIENCE: Duration = Duration::from_secs(600);

/// The built-in CPU ops under a default [`Cpu`]; a case's own [`Config`] overrides it.
pub struct CpuImplementation {
    cpu: Cpu,
    /// The models that `chain` may name; none for a program that only offers ops.
    checkpoints: Option<Arc<Checkpoints>>,
    /// The program whose `answer` verb gives the same ops in a process of its own.
    program: Option<PathBuf>,
}

impl CpuImplementation {
    /// Answers with `cpu` where a case does not say how to run.
    pub fn new(cpu: Cpu) -> CpuImplementation {
        CpuImplementation { cpu, checkpoints: None, program: None }
    }

    /// Also answers op `chain`, for the models of `checkpoints`.
    pub fn with_checkpoints(self, checkpoints: Arc<Checkpoints>) -> CpuImplementation {
        CpuImplementation { checkpoints: Some(checkpoints), ..self }
    }

    /// Also answers in a new process, of the `samebits` program at `program`.
    pub fn with_program(self, program: PathBuf) -> CpuImplementation {
        CpuImplementation { program: Some(program), ..self }
    }

    /// A process of its own, where a program was named.
    fn anew(&self) -> Option<Side> {
        let program = self.program.as_ref()?;
        let (isa, threads) = (self.cpu.isa().to_string(), self.cpu.threads().to_string());
        let command = [program.to_str()?, "answer", "--isa", &isa, "--threads", &threads].map(String::from).to_vec();
        let program = Program { command, env: BTreeMap::new(), folder: None, limit: "10 minutes" };
        Some(Side::of(self.name(), program))
    }

    /// Answers `case`, its op timed by `clock` where there is one.
    pub fn answer(&self, case: &Case, clock: Option<&Clock>) -> Answer {
        let shifted;
        let case = match case.config.layout.as_deref() {
            None => case,
            Some("offset") => {
                let mut moved = case.clone();
                moved.inputs.values_mut().for_each(|tensor| *tensor = tensor.shifted());
                shifted = moved;
                &shifted
            }
            Some(other) => {
                let why = "the ops take slices, which are contiguous; use offset";
                return Answer::unsupported(format!("`config.layout`: {other}: {why}"));
            }
        };
        // Every request has counters of its own.
        let cpu = match configured(&self.cpu, &case.config) {
            Ok(cpu) => cpu.recording(),
            Err(refusal) => return refusal.answer(),
        };
        let answer = if let (Some(checkpoints), "chain") = (&self.checkpoints, case.op.as_str()) {
            checkpoints.answer(&cpu, case)
        } else {
            op_answer(&cpu, case, clock).unwrap_or_else(Refusal::answer)
        };
        let plans = cpu.ledger().plans();
        let counts = cpu.ledger().counts();
        Answer {
            plan: plans.iter().map(|plan| plan.to_string()).collect::<Vec<_>>().join("; "),
            ledger: counts.into_iter().map(|(counter, count)| (counter.name().to_string(), count)).collect(),
            layout: case.config.layout.clone().unwrap_or_default(),
            ..answer
        }
    }
}

/// Answers an op.
fn op_answer(cpu: &Cpu, case: &Case, clock: Option<&Clock>) -> Result<Answer, Refusal> {
    let op = OPS.iter().find(|op| op.name == case.op).ok_or_else(|| {
        let known: Vec<_> = OPS.iter().map(|op| op.name).collect();
        Refusal::Unsupported(format!("op `{}` is not offered; use one of {}", case.op, known.join(", ")))
    })?;
    let request = Request::checked(case, cpu.clone(), clock)?;
    let outputs = (op.run)(&request)?;
    Ok(Answer::ok(request.kernel(), outputs))
}

impl Implementation for CpuImplementation {
    fn name(&self) -> &str {
        "ours/cpu"
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    fn run(&self, case: &Case) -> Answer {
        self.answer(case, None)
    }

    fn fresh(&self, case: &Case) -> Option<Answer> {
        Some(self.anew()?.answer(case, PATIENCE).unwrap_or_else(Answer::error))
    }

    fn soak(&self, case: &Case, each: &mut Soaked) -> bool {
        let Some(mut side) = self.anew() else { return false };
        while each(side.answer(case, PATIENCE).unwrap_or_else(Answer::error), &|| side.resident()) {}
        true
    }
}

/// `default` with what `config` asks for.
fn configured(default: &Cpu, config: &Config) -> Result<Cpu, Refusal> {
    if *config == Config::default() {
        return Ok(default.clone());
    }
    let isa = match &config.isa {
        None => default.isa(),
        Some(name) => Isa::from_str(name).map_err(|e| Refusal::Error(format!("`config.isa`: {e}")))?,
    };
    if !isa.available() {
        return Err(Refusal::Unsupported(format!("`config.isa`: this machine lacks `{isa}`")));
    }
    let threads = config.threads.unwrap_or(default.threads());
    let budget = config.budget.unwrap_or(default.budget());
    default.other(isa, threads, budget).map_err(|e| Refusal::Error(format!("`config.threads`: {e}")))
}

/// Why there are no outputs.
pub(super) enum Refusal {
    /// A combination that is not offered.
    Unsupported(String),
    /// A request that is wrong; the text names the field and the fix.
    Error(String),
    /// A budget below the smallest plan, which the number is.
    Budget(String, usize),
}

impl Refusal {
    pub(super) fn answer(self) -> Answer {
        match self {
            Refusal::Unsupported(reason) => Answer::unsupported(reason),
            Refusal::Error(reason) => Answer::error(reason),
            Refusal::Budget(reason, smallest) => {
                Answer { smallest_budget: Some(smallest), ..Answer::error(format!("`config.budget`: {reason}")) }
            }
        }
    }
}

impl From<samebits_ops::Error> for Refusal {
    fn from(e: samebits_ops::Error) -> Refusal {
        match e {
            samebits_ops::Error::Unavailable(_) => Refusal::Unsupported(e.to_string()),
            samebits_ops::Error::Budget { smallest, .. } => Refusal::Budget(e.to_string(), smallest),
            _ => Refusal::Error(e.to_string()),
        }
    }
}

pub(super) type Outputs = BTreeMap<String, Tensor>;

/// How an op answers a request.
pub(super) struct Op {
    pub(super) name: &'static str,
    run: fn(&Request) -> Result<Outputs, Refusal>,
}

/// Calls `$op::<I, O>($request)` for the request's input dtype I and output dtype O.
macro_rules! typed {
    ($request:expr, $op:ident) => {
        match $request.dtype {
            DType::Bf16 => typed!($request, $op, bf16),
            DType::Fp16 => typed!($request, $op, f16),
            _ => typed!($request, $op, f32),
        }
    };
    ($request:expr, $op:ident, $input:ty) => {
        match $request.case.out {
            DType::Bf16 => $op::<$input, bf16>($request),
            DType::Fp16 => $op::<$input, f16>($request),
            _ => $op::<$input, f32>($request),
        }
    };
}

pub(super) const OPS: &[Op] = &[
    Op { name: "gemm", run: |request| typed!(request, gemm) },
    Op { name: "rms_norm", run: |request| typed!(request, rms_norm) },
    Op { name: "add_rms_norm", run: |request| typed!(request, add_rms_norm) },
    Op { name: "attention", run: |request| typed!(request, attention) },
    Op { name: "paged_attention", run: |request| typed!(request, attention) },
    Op { name: "packed_attention", run: |request| typed!(request, attention) },
    Op { name: "logprob", run: |request| typed!(request, logprob) },
    Op { name: "linear_logprob", run: |request| typed!(request, linear_logprob) },
    Op { name: "softmax", run: |request| typed!(request, softmax) },
    Op { name: "silu_mul", run: |request| typed!(request, silu_mul) },
    Op { name: "gelu_mul", run: |request| typed!(request, gelu_mul) },
    Op { name: "softcap", run: |request| typed!(request, softcap) },
    Op { name: "scale", run: |request| typed!(request, scale) },
    Op { name: "rope", run: |request| typed!(request, rope) },
    Op { name: "norm_rope", run: |request| typed!(request, norm_rope) },
    Op { name: "add", run: |request| typed!(request, add) },
    Op { name: "embedding", run: |request| typed!(request, embedding) },
    Op { name: "argmax", run: |request| typed!(request, argmax) },
    Op { name: "route", run: |request| typed!(request, route) },
    Op { name: "combine", run: |request| typed!(request, combine) },
];

/// A case whose form has been checked.
pub(super) struct Request<'a> {
    pub(super) case: &'a Case,
    pub(super) cpu: Cpu,
    /// The dtype of every float input.
    pub(super) dtype: DType,
    /// Extents and parameters.
    pub(super) call: Call,
    pub(super) tf32: Tf32,
    /// Times the op where it is there.
    pub(super) clock: Option<&'a Clock>,
}

impl<'a> Request<'a> {
    pub(super) fn checked(case: &'a Case, cpu: Cpu, clock: Option<&'a Clock>) -> Result<Request<'a>, Refusal> {
        let call = check_form(case).map_err(|e| match e {
            samebits_schema::Error::Unsupported(reason) => Refusal::Unsupported(reason),
            e => Refusal::Error(e.reason().to_string()),
        })?;
        let dtype = call.group("T").unwrap_or(DType::Fp32);
        let tf32 = if call.tf32() { Tf32::Enabled } else { Tf32::Disabled };
        Ok(Request { case, cpu, dtype, call, tf32, clock })
    }

    /// `<op>/<isa>` of the kernels that ran, as the ledger has them: matrix products of bf16 may have used two. The other
    /// ops have no kernel of their own for AVX512-BF16.
    fn kernel(&self) -> String {
        match self.cpu.ledger().kernels() {
            kernels if kernels.is_empty() => format!("{}/{}", self.case.op, self.cpu.isa().min(Isa::Avx512)),
            kernels => format!("{}/{}", self.case.op, kernels.join("+")),
        }
    }

    /// Runs `op`, which writes into outputs that are there: the part of a request that a clock times.
    pub(super) fn timed(&self, mut op: impl FnMut() -> Result<(), samebits_ops::Error>) -> Result<(), Refusal> {
        match self.clock {
            None => op()?,
            Some(clock) => clock.time(op)?,
        }
        Ok(())
    }

    /// The extent of an axis of the op's inputs.
    pub(super) fn extent(&self, axis: &str) -> usize {
        self.call.dim(axis)
    }

    /// A float input that [`Request::checked`] found.
    pub(super) fn float<I: Stored>(&self, name: &str) -> &[I] {
        I::elements(&self.case.inputs[name]).expect("dtype was checked")
    }

    /// An i32 input that [`Request::checked`] found.
    pub(super) fn integer(&self, name: &str) -> &[i32] {
        self.case.inputs[name].as_i32().expect("dtype was checked")
    }
}

/// A storage type as it stands in a [`Tensor`].
pub(super) trait Stored: Element {
    fn elements(tensor: &Tensor) -> Option<&[Self]>;
    fn tensor(shape: &[usize], data: Vec<Self>) -> Tensor;
}

macro_rules! stored {
    ($type:ty, $variant:ident, $make:ident) => {
        impl Stored for $type {
            fn elements(tensor: &Tensor) -> Option<&[$type]> {
                match tensor {
                    Tensor::$variant(array) => array.as_slice(),
                    _ => None,
                }
            }

            fn tensor(shape: &[usize], data: Vec<$type>) -> Tensor {
                Tensor::$make(shape, data)
            }
        }
    };
}

stored!(bf16, Bf16, bf16);
stored!(f16, Fp16, fp16);
stored!(f32, Fp32, fp32);

/// The number of elements of `shape`; `None` where the extents other than 0 overflow, which no array can have.
fn elements(shape: &[usize]) -> Option<usize> {
    let nonzero = shape.iter().filter(|&&d| d > 0).try_fold(1usize, |n, &d| n.checked_mul(d))?;
    (nonzero <= isize::MAX as usize / 8).then_some(if shape.contains(&0) { 0 } else { nonzero })
}

/// Room for an output of `shape`; its elements are all overwritten.
pub(super) fn room<T: Copy + Default>(name: &str, shape: &[usize]) -> Result<Vec<T>, Refusal> {
    let refuse = || Refusal::Error(format!("output `{name}`: shape {shape:?} is too large for an answer"));
    let count = elements(shape).ok_or_else(refuse)?;
    if count as u64 > samebits_contract::wire::MAX_FRAME / size_of::<T>() as u64 {
        return Err(refuse());
    }
    let mut data = Vec::new();
    data.try_reserve_exact(count).map_err(|_| refuse())?;
    data.resize(count, T::default());
    Ok(data)
}

/// The outputs of an op with a single one.
fn one(name: &str, tensor: Tensor) -> Result<Outputs, Refusal> {
    Ok(BTreeMap::from([(name.to_string(), tensor)]))
}

/// The dimensions of a product, checked.
pub(super) fn gemm_shape(request: &Request) -> Gemm {
    let (m, n, k) = (request.extent("M"), request.extent("N"), request.extent("K"));
    let (k_offset, k_total) = (request.call.count("k_offset"), request.call.count("k_total"));
    Gemm { m, n, k, k_offset, k_total, tf32: request.tf32 }
}

fn gemm<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let shape = gemm_shape(request);
    // A rank's partial sum is added to others in f32, so it is never rounded and its bias belongs to the whole.
    if shape.is_partial() { gemm_as::<I, f32>(request, &shape) } else { gemm_as::<I, O>(request, &shape) }
}

fn gemm_as<I: Stored, O: Stored>(request: &Request, shape: &Gemm) -> Result<Outputs, Refusal> {
    let has_bias = request.case.inputs.contains_key("bias") && !shape.is_partial();
    let bias = has_bias.then(|| request.float::<I>("bias"));
    let mut y = room::<O>("y", &[shape.m, shape.n])?;
    let (x, w) = (request.float::<I>("x"), request.float("w"));
    match request.clock {
        // Whoever multiplies by the same weights again packs them once; the bits are the same.
        Some(clock) if !shape.is_partial() && shape.tf32 == Tf32::Disabled => {
            let w = PackedWeight::pack(&request.cpu, shape.n, shape.k, w)?;
            clock.prepared("weights packed");
            request.timed(|| samebits_ops::gemm_packed(&request.cpu, shape.m, x, &w, bias, &mut y))?;
        }
        _ => request.timed(|| samebits_ops::gemm(&request.cpu, shape, x, w, bias, &mut y))?,
    }
    one("y", O::tensor(&[shape.m, shape.n], y))
}

/// The parameters of `rms_norm` over rows of `n`.
pub(super) fn norm(request: &Request, rows: usize, n: usize) -> RmsNorm {
    let rounding = if request.call.word("rounding") == "hf" { Rounding::Hf } else { Rounding::Once };
    RmsNorm {
        rows,
        n,
        eps: request.call.float("eps") as f32,
        rounding,
        weight_offset: request.call.flag("weight_offset"),
    }
}

fn rms_norm<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let (rows, n) = (request.extent("R"), request.extent("N"));
    let shape = norm(request, rows, n);
    let mut y = room::<O>("y", &[rows, n])?;
    request
        .timed(|| samebits_ops::rms_norm(&request.cpu, &shape, request.float::<I>("x"), request.float("w"), &mut y))?;
    one("y", O::tensor(&[rows, n], y))
}

fn add_rms_norm<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let (rows, n) = (request.extent("R"), request.extent("N"));
    let shape = norm(request, rows, n);
    let (mut sum, mut y) = (room::<O>("sum", &[rows, n])?, room::<O>("y", &[rows, n])?);
    let (x, residual, w) = (request.float::<I>("x"), request.float("residual"), request.float("w"));
    request.timed(|| samebits_ops::add_rms_norm(&request.cpu, &shape, x, residual, w, &mut sum, &mut y))?;
    Ok(BTreeMap::from([("sum".into(), O::tensor(&[rows, n], sum)), ("y".into(), O::tensor(&[rows, n], y))]))
}

/// A request of one of the three forms of attention.
pub(super) struct AttentionCall<'a> {
    pub(super) shape: Attention,
    pub(super) sequences: Sequences<'a>,
    /// The extents of `lse`; `out` has the width of a value behind them.
    pub(super) rows: Vec<usize>,
    pub(super) kv_len: Cow<'a, [i32]>,
}

/// Reads `attention`, `paged_attention` or `packed_attention`.
pub(super) fn attention_call<'a>(request: &'a Request) -> AttentionCall<'a> {
    let (shape, sequences, kv_len) = match request.case.op.as_str() {
        "attention" => {
            let shape = attention_shape(request, request.extent("B"), request.extent("S"));
            (shape, Sequences::default(), request.integer("kv_len").into())
        }
        "paged_attention" => {
            let page_size = request.extent("Z");
            let shape = attention_shape(request, request.extent("B"), request.extent("P") * page_size);
            let keys = Keys::Paged { page_size, table: request.integer("page_table") };
            (shape, Sequences { q_start: None, keys }, request.integer("kv_len").into())
        }
        _ => {
            let (q_start, k_start) = (request.integer("q_start"), request.integer("k_start"));
            let shape = attention_shape(request, request.extent("B"), request.extent("S"));
            let kv_len: Vec<i32> = k_start.windows(2).map(|two| two[1].saturating_sub(two[0])).collect();
            (shape, Sequences { q_start: Some(q_start), keys: Keys::Packed(k_start) }, kv_len.into())
        }
    };
    let rows = match sequences.q_start {
        None => vec![shape.batch, shape.queries, shape.q_heads],
        Some(_) => vec![shape.queries, shape.q_heads],
    };
    AttentionCall { shape, sequences, rows, kv_len }
}

fn attention_shape(request: &Request, batch: usize, keys: usize) -> Attention {
    Attention {
        batch,
        queries: request.extent("T"),
        keys,
        q_heads: request.extent("Hq"),
        kv_heads: request.extent("Hkv"),
        head_dim: request.extent("D"),
        value_dim: request.extent("E"),
        scale: request.call.float("scale"),
        causal: request.call.flag("causal"),
        window: request.call.count("window"),
        softcap: request.call.float("softcap"),
        tf32: request.tf32,
    }
}

fn attention<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let AttentionCall { shape, sequences, rows, kv_len } = attention_call(request);
    let form = [&rows[..], &[shape.value_dim]].concat();
    let mut out = room::<O>("out", &form)?;
    let mut lse = room::<f32>("lse", &rows)?;
    let (q, k, v) = (request.float::<I>("q"), request.float("k"), request.float("v"));
    let (cpu, q_pos) = (&request.cpu, request.integer("q_pos"));
    request
        .timed(|| samebits_ops::attention_over(cpu, &shape, &sequences, q, k, v, q_pos, &kv_len, &mut out, &mut lse))?;
    Ok(BTreeMap::from([("out".into(), O::tensor(&form, out)), ("lse".into(), Tensor::fp32(&rows, lse))]))
}

/// Both outputs are f32 whatever `out` says.
fn logprob<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let (rows, vocab) = (request.extent("R"), request.extent("V"));
    let temperature = request.call.float("temperature");
    let mut logprob = room::<f32>("logprob", &[rows])?;
    let mut lse = room::<f32>("lse", &[rows])?;
    let (logits, target) = (request.float::<I>("logits"), request.integer("target"));
    request.timed(|| {
        samebits_ops::logprob(&request.cpu, rows, vocab, temperature, logits, target, &mut logprob, &mut lse)
    })?;
    Ok(BTreeMap::from([("logprob".into(), Tensor::fp32(&[rows], logprob)), ("lse".into(), Tensor::fp32(&[rows], lse))]))
}

/// Both outputs are f32 whatever `out` says.
fn linear_logprob<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let (rows, vocab, k) = (request.extent("M"), request.extent("V"), request.extent("K"));
    let temperature = request.call.float("temperature");
    let mut logprob = room::<f32>("logprob", &[rows])?;
    let mut lse = room::<f32>("lse", &[rows])?;
    let (x, w, target) = (request.float::<I>("x"), request.float("w"), request.integer("target"));
    let cpu = &request.cpu;
    match request.clock {
        // As for gemm.
        Some(clock) => {
            let w = PackedWeight::pack(cpu, vocab, k, w)?;
            clock.prepared("weights packed");
            request.timed(|| {
                samebits_ops::linear_logprob_packed(cpu, rows, temperature, x, &w, target, &mut logprob, &mut lse)
            })?;
        }
        None => {
            samebits_ops::linear_logprob(cpu, rows, vocab, k, temperature, x, w, target, &mut logprob, &mut lse)?;
        }
    }
    Ok(BTreeMap::from([("logprob".into(), Tensor::fp32(&[rows], logprob)), ("lse".into(), Tensor::fp32(&[rows], lse))]))
}

fn softmax<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let (rows, n) = (request.extent("R"), request.extent("N"));
    let mut y = room::<O>("y", &[rows, n])?;
    request.timed(|| samebits_ops::softmax(&request.cpu, rows, n, request.float::<I>("x"), &mut y))?;
    one("y", O::tensor(&[rows, n], y))
}

fn silu_mul<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let shape = request.case.inputs["gate"].shape();
    let mut y = room::<O>("y", shape)?;
    request.timed(|| samebits_ops::silu_mul(&request.cpu, request.float::<I>("gate"), request.float("up"), &mut y))?;
    one("y", O::tensor(shape, y))
}

fn gelu_mul<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let shape = request.case.inputs["gate"].shape();
    let mut y = room::<O>("y", shape)?;
    request.timed(|| samebits_ops::gelu_mul(&request.cpu, request.float::<I>("gate"), request.float("up"), &mut y))?;
    one("y", O::tensor(shape, y))
}

fn softcap<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let shape = request.case.inputs["x"].shape();
    let cap = request.call.float("cap");
    let mut y = room::<O>("y", shape)?;
    request.timed(|| samebits_ops::softcap(&request.cpu, cap, request.float::<I>("x"), &mut y))?;
    one("y", O::tensor(shape, y))
}

fn scale<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let shape = request.case.inputs["x"].shape();
    let factor = request.call.float("factor");
    let mut y = room::<O>("y", shape)?;
    request.timed(|| samebits_ops::scale(&request.cpu, factor, request.float::<I>("x"), &mut y))?;
    one("y", O::tensor(shape, y))
}

/// The parameters of `route`.
pub(super) fn route_shape(request: &Request) -> Route {
    let call = &request.call;
    Route {
        tokens: call.dim("T"),
        experts: call.dim("E"),
        chosen: call.count("chosen"),
        scoring: if call.word("scoring") == "sigmoid" { Scoring::Sigmoid } else { Scoring::Softmax },
        groups: call.count("groups"),
        top_groups: call.count("top_groups"),
        group_worth: if call.word("group_worth") == "top_two" { GroupWorth::TopTwo } else { GroupWorth::Max },
        normalise: call.flag("normalise"),
        scale: call.float("scale"),
    }
}

/// Rank and weight of every expert; -1 and +0 where it is not chosen. Both have their dtypes whatever `out` says.
pub(super) fn spread_route(shape: &Route, index: &[i32], chosen: &[f32]) -> Outputs {
    let Route { tokens, experts, .. } = *shape;
    let (mut rank, mut weight) = (vec![-1; tokens * experts], vec![0f32; tokens * experts]);
    for (i, (&expert, &w)) in index.iter().zip(chosen).enumerate() {
        let place = i / shape.chosen * experts + expert as usize;
        (rank[place], weight[place]) = ((i % shape.chosen) as i32, w);
    }
    let form = [tokens, experts];
    BTreeMap::from([("rank".into(), Tensor::i32(&form, rank)), ("weight".into(), Tensor::fp32(&form, weight))])
}

fn route<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let shape = route_shape(request);
    let bias = request.case.inputs.contains_key("bias").then(|| request.float::<I>("bias"));
    let mut index = room::<i32>("rank", &[shape.tokens, shape.chosen])?;
    let mut chosen = room::<f32>("weight", &[shape.tokens, shape.chosen])?;
    let logits = request.float::<I>("logits");
    request.timed(|| samebits_ops::route(&request.cpu, &shape, logits, bias, &mut index, &mut chosen))?;
    Ok(spread_route(&shape, &index, &chosen))
}

pub(super) fn combine_shape(request: &Request) -> Combine {
    let tokens = request.extent("T");
    Combine { tokens, chosen: request.extent("K"), rows: request.extent("R"), n: request.extent("N") }
}

fn combine<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let shape = combine_shape(request);
    let form = [shape.tokens, shape.n];
    let weight: Vec<f32> = request.float::<I>("weight").iter().map(|w| w.widen()).collect();
    let shared = request.case.inputs.contains_key("shared").then(|| request.float::<I>("shared"));
    let mut y = room::<O>("y", &form)?;
    let (x, row) = (request.float::<I>("x"), request.integer("row"));
    request.timed(|| samebits_ops::combine(&request.cpu, &shape, x, row, &weight, shared, &mut y))?;
    one("y", O::tensor(&form, y))
}

/// The parameters of `rope` over an input `x[T,H,D]`, and its table.
pub(super) fn rotation(request: &Request) -> (Rope, RopeTable) {
    let (tokens, heads, dim) = (request.extent("T"), request.extent("H"), request.extent("D"));
    let theta = request.call.float("theta");
    let pairing = if request.call.word("pairing") == "interleaved" { Pairing::Interleaved } else { Pairing::Half };
    let table = RopeTable::new(&request.cpu, &samebits_ops::inv_freq(theta, dim), request.integer("pos"));
    if let Some(clock) = request.clock {
        clock.prepared("sines and cosines tabled");
    }
    (Rope { tokens, heads, dim, pairing }, table)
}

fn rope<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let form = [request.extent("T"), request.extent("H"), request.extent("D")];
    let mut y = room::<O>("y", &form)?;
    let (shape, table) = rotation(request);
    request.timed(|| samebits_ops::rope(&request.cpu, &shape, &table, request.float::<I>("x"), &mut y))?;
    one("y", O::tensor(&form, y))
}

fn norm_rope<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let form = [request.extent("T"), request.extent("H"), request.extent("D")];
    let mut y = room::<O>("y", &form)?;
    let RmsNorm { eps, rounding, weight_offset, .. } = norm(request, form[0] * form[1], form[2]);
    let (Rope { tokens, heads, dim, pairing }, table) = rotation(request);
    let shape = NormRope { tokens, heads, dim, eps, rounding, weight_offset, pairing };
    let (x, w) = (request.float::<I>("x"), request.float("w"));
    request.timed(|| samebits_ops::norm_rope(&request.cpu, &shape, &table, x, w, &mut y))?;
    one("y", O::tensor(&form, y))
}

fn add<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let shape = request.case.inputs["a"].shape();
    let mut y = room::<O>("y", shape)?;
    request.timed(|| samebits_ops::add(&request.cpu, request.float::<I>("a"), request.float("b"), &mut y))?;
    one("y", O::tensor(shape, y))
}

fn embedding<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let (tokens, dim) = (request.extent("T"), request.extent("D"));
    let mut y = room::<O>("y", &[tokens, dim])?;
    request.timed(|| {
        samebits_ops::embedding(&request.cpu, dim, request.float::<I>("w"), request.integer("tokens"), &mut y)
    })?;
    one("y", O::tensor(&[tokens, dim], y))
}

/// The output is i32 whatever `out` says.
fn argmax<I: Stored, O: Stored>(request: &Request) -> Result<Outputs, Refusal> {
    let (rows, n) = (request.extent("R"), request.extent("N"));
    let mut index = room::<i32>("index", &[rows])?;
    request.timed(|| samebits_ops::argmax(&request.cpu, rows, n, request.float::<I>("x"), &mut index))?;
    one("index", Tensor::i32(&[rows], index))
}
