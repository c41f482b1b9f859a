use super::Machine;
use anyhow::{Context, Result, ensure};
use samebits_contract::tensor::DType;
use samebits_harness::measure::{Params, work};
use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

/// Times one of the built-in ops
///
/// Draws inputs, packs weights and allocates outputs before the clock starts, warms up once, then runs the op again and
/// again and prints the median, least and most seconds, the bytes that must move and the operations. Nothing is judged
/// here: `check` does that.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// The op
    #[arg(long)]
    op: String,

    /// An extent or a parameter, for example M=16; may be given again
    #[arg(long, value_name = "K=V")]
    param: Vec<String>,

    /// Dtype of the inputs: bf16, fp16 or fp32
    #[arg(long, default_value = "bf16", value_name = "DTYPE")]
    dtype: String,

    /// Dtype of the outputs [default: that of the inputs]
    #[arg(long, value_name = "DTYPE")]
    out: Option<String>,

    #[command(flatten)]
    machine: Machine,

    /// Timed runs
    #[arg(long, default_value_t = 11, value_name = "N")]
    repeat: usize,

    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  samebits measure --op gemm --param M=16 --param N=4096 --param K=4096
  samebits measure --op attention --param B=1 --param T=1 --param S=4096 --param Hq=32 --param Hkv=8 --param D=128
  samebits measure --op rms_norm --param R=4096 --param N=4096 --dtype bf16 --threads 2 --json

Extents by op: gemm M N K; rms_norm, add_rms_norm, softmax, silu_mul, add, argmax R N; attention B T S Hq Hkv D (E, causal, window,
softcap); logprob R V (temperature); rope, norm_rope T H D (theta); embedding V D T.";

pub fn run(args: &Args) -> Result<ExitCode> {
    ensure!((1..=1_000_000).contains(&args.repeat), "--repeat {}: use 1 to 1000000", args.repeat);
    let dtype = |name: &str, option: &str| DType::parse(name).map_err(|e| anyhow::anyhow!("{option}: {e}"));
    let input = dtype(&args.dtype, "--dtype")?;
    let out = args.out.as_deref().map_or(Ok(input), |name| dtype(name, "--out"))?;
    let mut given = BTreeMap::new();
    for param in &args.param {
        let (name, value) = param.split_once('=').with_context(|| format!("--param {param}: write NAME=VALUE"))?;
        ensure!(given.insert(name.to_string(), value.to_string()).is_none(), "--param {name}: given twice");
    }
    let cpu = args.machine.cpu(None)?;
    let mut work = work(&cpu, input, out, Params::new(&args.op, given.clone())).map_err(anyhow::Error::msg)?;
    (work.run)()?;
    let mut seconds = Vec::with_capacity(args.repeat);
    for _ in 0..args.repeat {
        let start = Instant::now();
        (work.run)()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let (least, median, most) = (seconds[0], seconds[seconds.len() / 2], seconds[seconds.len() - 1]);
    let (bytes, operations) = (work.bytes as f64 / median / 1e9, work.operations as f64 / median / 1e9);
    let mut stdout = std::io::stdout().lock();
    if args.json {
        let line = serde_json::json!({
            "op": args.op, "params": given, "dtype": input, "out": out, "isa": cpu.isa().name(),
            "threads": cpu.threads(), "repeat": args.repeat,
            "seconds": { "median": median, "min": least, "max": most },
            "bytes": work.bytes, "operations": work.operations,
            "gigabytes_per_second": bytes, "gigaoperations_per_second": operations,
        });
        writeln!(stdout, "{line}")?;
    } else {
        let facts: Vec<String> = given.iter().map(|(name, value)| format!("{name}={value}")).collect();
        writeln!(stdout, "{} {} {input} -> {out}, {} x {}", args.op, facts.join(" "), cpu.threads(), cpu.isa())?;
        writeln!(stdout, "seconds: median {median:.6}, min {least:.6}, max {most:.6} of {} runs", args.repeat)?;
        writeln!(stdout, "{bytes:.2} GB/s, {operations:.2} GFLOP/s (at the median)")?;
    }
    Ok(ExitCode::SUCCESS)
}
