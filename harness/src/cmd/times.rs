use crate::implementation::cuda::CudaImplementation;
use anyhow::{Context, Result, bail};
use samebits_ops::device::{self, Device};
use samebits_ops::{Attention, Cpu, Gemm, Logprob, Qkv, RmsNorm, Rounding, Sequences, bf16};
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

/// Times the ops on the first CUDA device, by its own clock: one JSON line per workload
///
/// Inputs are bf16 and lie on the device. Each number is the median of several batches, each long enough for the device's
/// clock; a batch starts one run after the other without waiting. Workloads are the targets of docs/PERFORMANCE.md.
#[derive(clap::Args)]
pub struct Args {
    /// Names that are timed, whole or with a final `*` [default: all]
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,

    /// Print the names and end
    #[arg(long)]
    list: bool,

    /// Seconds for all of them; what does not fit is not timed, and a line says so
    #[arg(long, value_name = "S", default_value = "120")]
    seconds: f64,
}

/// What is timed: the name, and the bytes that have to move and the operations that have to be done at least.
struct Workload {
    name: String,
    bytes: usize,
    flops: usize,
    kind: Kind,
}

enum Kind {
    Logprob { rows: usize, vocab: usize },
    RmsNorm { rows: usize, n: usize },
    AddRmsNorm { rows: usize, n: usize },
    SiluMul { n: usize },
    Add { n: usize },
    Softmax { rows: usize, n: usize },
    Gemm { m: usize, n: usize, k: usize },
    Attention { batch: usize, queries: usize, keys: usize },
}

/// Query heads, key heads and their dimension.
const HEADS: (usize, usize, usize) = (32, 8, 128);

fn workloads() -> Vec<Workload> {
    let mut all = Vec::new();
    let mut add = |name: String, bytes, flops, kind| all.push(Workload { name, bytes, flops, kind });
    let (rows, vocab) = (4096, 151_936);
    add(format!("logprob {rows}x{vocab}"), 2 * rows * vocab, 0, Kind::Logprob { rows, vocab });
    let (rows, n) = (8192, 8192);
    add(format!("rms_norm {rows}x{n}"), 4 * rows * n, 0, Kind::RmsNorm { rows, n });
    add(format!("silu_mul {rows}x{n}"), 6 * rows * n, 0, Kind::SiluMul { n: rows * n });
    for (n, k) in [(4096, 4096), (12288, 4096)] {
        for m in [1, 4, 16] {
            let bytes = 2 * (m * k + n * k + m * n);
            add(format!("gemm {m}x{n}x{k}"), bytes, 2 * m * n * k, Kind::Gemm { m, n, k });
        }
    }
    let (hq, hkv, d) = HEADS;
    for batch in [1, 16] {
        let keys = 32768;
        let bytes = 2 * batch * (2 * keys * hkv * d + 2 * hq * d);
        let flops = 4 * batch * keys * hq * d;
        add(format!("attention decode {batch}x{keys}"), bytes, flops, Kind::Attention { batch, queries: 1, keys });
    }
    let side = 4096;
    let kind = Kind::Gemm { m: side, n: side, k: side };
    add(format!("gemm {side}x{side}x{side}"), 6 * side * side, 2 * side * side * side, kind);
    add(format!("add {rows}x{n}"), 6 * rows * n, 0, Kind::Add { n: rows * n });
    add(format!("add_rms_norm {rows}x{n}"), 8 * rows * n, 0, Kind::AddRmsNorm { rows, n });
    add(format!("softmax {rows}x{n}"), 4 * rows * n, 0, Kind::Softmax { rows, n });
    let keys = 2048;
    let (bytes, flops) = (4 * keys * (hq + hkv) * d, 2 * keys * keys * hq * d);
    add(format!("attention prefill 1x{keys}"), bytes, flops, Kind::Attention { batch: 1, queries: keys, keys });
    all
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let started = Instant::now();
    let fits = |name: &str| {
        let one = |only: &String| only.strip_suffix('*').map_or(only == name, |prefix| name.starts_with(prefix));
        args.only.is_empty() || args.only.iter().any(one)
    };
    let chosen: Vec<Workload> = workloads().into_iter().filter(|workload| fits(&workload.name)).collect();
    if chosen.is_empty() {
        bail!("--only: no workload is called so; --list prints the names");
    }
    let mut stdout = std::io::stdout().lock();
    if args.list {
        chosen.iter().try_for_each(|workload| writeln!(stdout, "{}", workload.name))?;
        return Ok(ExitCode::SUCCESS);
    }
    let implementation = CudaImplementation::first_gpu(Cpu::best(), usize::MAX);
    let device = implementation.device().map_err(|why| anyhow::anyhow!("nothing can be timed: {why}"))?;
    for workload in &chosen {
        let name = &workload.name;
        if started.elapsed().as_secs_f64() > args.seconds {
            writeln!(stdout, "{}", serde_json::json!({ "name": name, "not_timed": "--seconds is over" }))?;
            continue;
        }
        let own = device.recording();
        let seconds = workload.time(&own).with_context(|| name.clone())?;
        let line = serde_json::json!({
            "name": name,
            "device": own.name(),
            "kernels": own.ledger().kernels().join("+"),
            "seconds": seconds,
            "gb_per_s": workload.bytes as f64 / seconds / 1e9,
            "tflop_per_s": workload.flops as f64 / seconds / 1e12,
        });
        writeln!(stdout, "{line}")?;
        stdout.flush()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Numbers in about [-spread, spread], the same on every machine.
fn numbers(count: usize, spread: f32) -> Vec<bf16> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| bf16::from_f32(next() * spread)).collect()
}

impl Workload {
    fn time(&self, device: &Device) -> Result<f64> {
        let upload = |count: usize, spread: f32| device.upload("times", &numbers(count, spread));
        let norm =
            |rows: usize, n: usize| RmsNorm { rows, n, eps: 1e-6, rounding: Rounding::Once, weight_offset: false };
        match self.kind {
            Kind::Logprob { rows, vocab } => {
                let x = upload(rows * vocab, 20.0)?;
                let target = vec![7; rows];
                let (mut logprob, mut lse) = (device.empty("times", rows)?, device.empty("times", rows)?);
                let shape = Logprob::new(rows, vocab);
                timed(device, || device::logprob(device, &shape, &x, &target, &mut logprob, &mut lse))
            }
            Kind::RmsNorm { rows, n } => {
                let (x, w, mut y) = (upload(rows * n, 1.0)?, upload(n, 1.0)?, device.empty::<bf16>("times", rows * n)?);
                timed(device, || device::rms_norm(device, &norm(rows, n), &x, &w, &mut y))
            }
            Kind::AddRmsNorm { rows, n } => {
                let (x, residual, w) = (upload(rows * n, 1.0)?, upload(rows * n, 1.0)?, upload(n, 1.0)?);
                let (mut sum, mut y) =
                    (device.empty::<bf16>("times", rows * n)?, device.empty::<bf16>("times", rows * n)?);
                timed(device, || device::add_rms_norm(device, &norm(rows, n), &x, &residual, &w, &mut sum, &mut y))
            }
            Kind::SiluMul { n } => {
                let (gate, up, mut y) = (upload(n, 4.0)?, upload(n, 1.0)?, device.empty::<bf16>("times", n)?);
                timed(device, || device::silu_mul(device, &gate, &up, &mut y))
            }
            Kind::Add { n } => {
                let (a, b, mut y) = (upload(n, 4.0)?, upload(n, 1.0)?, device.empty::<bf16>("times", n)?);
                timed(device, || device::add(device, &a, &b, &mut y))
            }
            Kind::Softmax { rows, n } => {
                let (x, mut y) = (upload(rows * n, 8.0)?, device.empty::<bf16>("times", rows * n)?);
                timed(device, || device::softmax(device, rows, n, &x, &mut y))
            }
            Kind::Gemm { m, n, k } => {
                let (x, mut y) = (upload(m * k, 1.0)?, device.empty::<bf16>("times", m * n)?);
                // Weights in turn, so that they come from memory as in a model and not from the cache.
                let copies = (256usize << 20).div_ceil(2 * n * k).clamp(1, 16);
                let weights = (0..copies).map(|_| upload(n * k, 1.0)).collect::<Result<Vec<_>, _>>()?;
                let mut turn = 0;
                timed(device, || {
                    turn += 1;
                    device::gemm(device, &Gemm::new(m, n, k), &x, &weights[turn % copies], None, &mut y)
                })
            }
            Kind::Attention { batch, queries, keys } => {
                let (q_heads, kv_heads, dim) = HEADS;
                let shape = Attention::causal([batch, queries, keys], [q_heads, kv_heads], dim);
                let q = upload(batch * queries * q_heads * dim, 1.0)?;
                let (k, v) = (upload(batch * keys * kv_heads * dim, 1.0)?, upload(batch * keys * kv_heads * dim, 1.0)?);
                let q_pos: Vec<i32> = (0..batch * queries).map(|i| (keys - queries + i % queries) as i32).collect();
                let kv_len = vec![keys as i32; batch];
                let mut out = device.empty::<bf16>("times", batch * queries * q_heads * dim)?;
                let mut lse = device.empty::<f32>("times", batch * queries * q_heads)?;
                let (sequences, qkv) = (Sequences::padded(&q_pos, &kv_len), Qkv { q: &q, k: &k, v: &v });
                timed(device, || device::attention(device, &shape, &sequences, qkv, None, &mut out, &mut lse))
            }
        }
    }
}

/// Batches whose median counts.
const BATCHES: usize = 7;
/// Seconds that a batch takes at least.
const BATCH: f64 = 0.02;

/// The median seconds of one run of `op`.
fn timed(device: &Device, mut op: impl FnMut() -> Result<(), samebits_ops::Error>) -> Result<f64> {
    op()?;
    let first = device.seconds(&mut op)?;
    let runs = (BATCH / first.max(1e-6)).ceil().clamp(1.0, 10_000.0) as usize;
    let mut batches = Vec::new();
    for _ in 0..BATCHES {
        let seconds = device.seconds(&mut || (0..runs).try_for_each(|_| op()))?;
        batches.push(seconds / runs as f64);
    }
    batches.sort_by(f64::total_cmp);
    Ok(batches[BATCHES / 2])
}
