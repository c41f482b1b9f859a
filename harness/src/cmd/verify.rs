use super::{Machine, counting};
use anyhow::{Context, Result, bail};
use samebits_units::dump::Dump;
use samebits_units::verify::{SCRIPT, Verdict, verify};
use samebits_units::{Isa, search};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Says which order of a matrix unit reproduces what a GPU has computed
///
/// Reads a safetensors file of somebody's GPU. Products: NAME.x [M,K] and NAME.w [N,K] with NAME.y and/or NAME.y_fp32
/// [M,N]. Steps of the instruction: NAME.a [n,steps,M,k] and NAME.b [n,steps,N,k] with NAME.c and NAME.d [n,M,N] in F32.
/// Operands are BF16, F16, tf32 in F32, or raw words: U16, of the format that `dtype` in the file's metadata names (bf16 or
/// fp16; without it both are tried), and U32, tf32.
///
/// Prints one line a name: the profile, its groups and the bits it keeps, and the order: one chain, or parts with their
/// units and how they are added, found by search; how many outputs are equal to the bit; and how many other orders of the
/// search reproduce as much, since small or rounded results may not tell them apart. Or the nearest order and the first
/// difference. Exit code 0: all are reproduced. 1: one is not. 2: the file is broken, and everything that is wrong with it
/// is said at once.
#[derive(clap::Args)]
pub struct Args {
    /// The file; `--script` prints how to make one
    #[arg(long, value_name = "FILE", required_unless_present = "script")]
    dump: Option<PathBuf>,

    /// Print ten lines of torch that make such a file, and stop
    #[arg(long, conflicts_with_all = ["dump", "json"])]
    script: bool,

    /// One JSON object a line, one line a name
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    machine: Machine,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    let Some(path) = &args.dump else {
        write!(out, "{SCRIPT}")?;
        return Ok(ExitCode::SUCCESS);
    };
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let dump = match Dump::parse(&bytes) {
        Ok(dump) => dump,
        Err(complaints) => bail!("{}: {}", path.display(), complaints.join("; ")),
    };
    drop(bytes);
    let cpu = args.machine.cpu(None)?;
    // What is left out of an instruction set's name is not used here.
    let isa = match cpu.isa().without_dot().name().trim_start_matches("emulated-").parse::<Isa>() {
        Ok(isa) if isa.available() => isa,
        _ => Isa::Scalar,
    };
    let machine = search::Machine { isa, threads: cpu.threads() };
    let mut all = true;
    for entry in &dump.entries {
        let bar = counting(1).with_message(entry.name.clone());
        let verdict = verify(entry, machine, &|done, total| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        });
        bar.finish_and_clear();
        all &= verdict.reproduced();
        let line = if args.json { object(&verdict).to_string() } else { verdict.line().escape_debug().to_string() };
        writeln!(out, "{line}")?;
        out.flush()?;
    }
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// What came of a name; keys are in this order.
fn object(verdict: &Verdict) -> Value {
    let profiles = verdict.rule.profiles();
    let first = verdict.first.as_ref().map(|first| {
        let word = |word: u32| format!("{word:0digits$x}", digits = first.digits);
        json!({
            "field": first.field,
            "at": first.at,
            "recorded": word(first.recorded),
            "computed": word(first.computed),
        })
    });
    json!({
        "name": verdict.name,
        "profile": profiles[0],
        "order": verdict.order,
        "equal": verdict.equal,
        "of": verdict.of,
        "reproduced": verdict.reproduced(),
        "dtype": verdict.rule.format.name(),
        "group": verdict.rule.group,
        "bits": verdict.rule.bits,
        "same_arithmetic": profiles[1..],
        "others": verdict.others,
        "other_profiles": verdict.other_profiles,
        "first_difference": first,
    })
}
