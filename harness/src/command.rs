//! The `samebits` command. Every verb is a file in `cmd/`; this file reads the command line and reports errors.

use crate::cmd;
use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

/// Holds implementations of neural network ops to one contract: the same bits, whatever the batch, the tile, the
/// thread count or the instruction set.
#[derive(Parser)]
#[command(name = "samebits", version, max_term_width = 100, after_long_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

const AFTER_HELP: &str = "\
Examples:
  samebits check
      the main job: holds the built-in CPU ops to the contract, prints a table, writes samebits-report/
  samebits check --op gemm --axis threads
      one part of it; `samebits list` shows the cases, `samebits contract` the bounds
  samebits devices
      what this machine can run
  samebits answer --isa avx2 --threads 2 < requests > answers
      the built-in ops as a program that speaks the wire (docs/WIRE.md)
  samebits forward --model DIR --tokens tokens.safetensors --out logits.safetensors
      the logits of a model, the same bits under every --schedule, --batch, --isa and --threads
  samebits generate --model DIR --prompt \"12+34=\" --max-tokens 4
      greedy decoding; the completion alone on stdout
  samebits image --model DIR --prompt \"a lighthouse\" --steps 30 --out lighthouse.png
      a picture of a text; the same bits alone and beside others
  samebits rollout --model DIR --prompts prompts.txt --samples 4 --out rollout.jsonl
  samebits rollout --model DIR --prompts chats.jsonl --rope-length 8192 --out rollout.jsonl
  samebits score --model DIR --rollout rollout.jsonl --schedule prefill --isa scalar
      samples texts, and computes their log-probabilities again on another schedule: 0 differ; with --device cuda on a GPU
  samebits grad --model DIR --tokens tokens.safetensors --out gradient.safetensors --micro-batch 4
      the gradient of every parameter, the same bits under every --micro-batch, --pad, --isa and --threads
  samebits train --model DIR --data tokens.safetensors --steps 100 --batch 8 --out RUN
      trains it; killed and started again, it ends with the same bits
  samebits trace default schedule=decode,isa=avx2 --model DIR --tokens tokens.safetensors
      the first place where two runs of a model part, if they do
  samebits verify --dump dump.safetensors
      which order of a GPU's matrix units made the products in it; --script prints how to make such a file

Files are written whole or not at all; links are followed, devices and pipes (/dev/stdout) written straight.

Exit codes:
  0  it worked; for a verb that judges: the contract holds
  1  a judgment went against the contract
  2  the run itself is broken: one line on stderr says what and how to mend it";

#[derive(Subcommand)]
enum Verb {
    Check(cmd::check::Args),
    Sweep(cmd::sweep::Args),
    Merge(cmd::merge::Args),
    Probe(cmd::probe::Args),
    List(cmd::list::Args),
    Case(cmd::case::Args),
    Contract(cmd::contract::Args),
    Schema(cmd::schema::Args),
    Report(cmd::report::Args),
    #[command(visible_alias = "cmp")]
    Diff(cmd::diff::Args),
    Bless(cmd::bless::Args),
    Goldens(cmd::goldens::Args),
    Answer(cmd::answer::Args),
    Forward(cmd::forward::Args),
    Generate(cmd::generate::Args),
    Image(cmd::image::Args),
    Rollout(cmd::rollout::Args),
    Score(cmd::score::Args),
    Grad(cmd::grad::Args),
    Train(cmd::train::Args),
    Trace(cmd::trace::Args),
    Audit(cmd::audit::Args),
    Quantize(cmd::quantize::Args),
    Measure(cmd::measure::Args),
    Devices(cmd::devices::Args),
    Times(cmd::times::Args),
    Verify(cmd::verify::Args),
}

/// How the command was called, where it is not a program of its own but a part of one.
pub struct Called {
    /// What starts the command again, with arguments behind it.
    pub program: PathBuf,
    /// What stands behind the program's name.
    pub arguments: Vec<OsString>,
    /// The folder that is read for a repository where none is at hand: contract/, goldens/ and
    /// tests/checkpoints/.
    pub repository: Option<PathBuf>,
}

static CALLED: OnceLock<Called> = OnceLock::new();

/// What starts this command again.
pub(crate) fn program() -> std::io::Result<PathBuf> {
    CALLED.get().map_or_else(std::env::current_exe, |called| Ok(called.program.clone()))
}

/// The arguments of this command.
pub(crate) fn arguments() -> Vec<String> {
    match CALLED.get() {
        None => std::env::args().skip(1).collect(),
        Some(called) => called.arguments.iter().map(|argument| argument.to_string_lossy().into()).collect(),
    }
}

/// What is read for a repository where none is at hand.
pub(crate) fn repository() -> Option<&'static Path> {
    CALLED.get()?.repository.as_deref()
}

/// [`main`] as a part of another program, once in its life: 0, 1 or 2.
pub fn called(called: Called) -> u8 {
    let words = std::iter::once("samebits".into()).chain(called.arguments.clone()).collect();
    assert!(CALLED.set(called).is_ok(), "the command is called once");
    let code = run(words);
    (0..=2).find(|&number| code == ExitCode::from(number)).unwrap_or(2)
}

/// Runs the verb that the command line names: 0, 1 or 2, as `--help` says.
pub fn main() -> ExitCode {
    run(std::env::args_os().collect())
}

fn run(words: Vec<OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        // --help and --version.
        Err(e) if !e.use_stderr() => return end(e.print().map(|()| ExitCode::SUCCESS).map_err(Into::into)),
        Err(e) => return broken(&usage(&e)),
    };
    end(match cli.verb {
        Verb::Check(args) => cmd::check::run(&args),
        Verb::Sweep(args) => cmd::sweep::run(&args),
        Verb::Merge(args) => cmd::merge::run(&args),
        Verb::Probe(args) => cmd::probe::run(&args),
        Verb::List(args) => cmd::list::run(&args),
        Verb::Case(args) => cmd::case::run(&args),
        Verb::Contract(args) => cmd::contract::run(&args),
        Verb::Schema(args) => cmd::schema::run(&args),
        Verb::Diff(args) => cmd::diff::run(&args),
        Verb::Report(args) => cmd::report::run(&args),
        Verb::Goldens(args) => cmd::goldens::run(&args),
        Verb::Bless(args) => cmd::bless::run(&args),
        Verb::Answer(args) => cmd::answer::run(&args),
        Verb::Measure(args) => cmd::measure::run(&args),
        Verb::Devices(args) => cmd::devices::run(&args),
        Verb::Times(args) => cmd::times::run(&args),
        Verb::Verify(args) => cmd::verify::run(&args),
        Verb::Forward(args) => cmd::forward::run(&args),
        Verb::Generate(args) => cmd::generate::run(&args),
        Verb::Image(args) => cmd::image::run(&args),
        Verb::Rollout(args) => cmd::rollout::run(&args),
        Verb::Score(args) => cmd::score::run(&args),
        Verb::Grad(args) => cmd::grad::run(&args),
        Verb::Train(args) => cmd::train::run(&args),
        Verb::Trace(args) => cmd::trace::run(&args),
        Verb::Audit(args) => cmd::audit::run(&args),
        Verb::Quantize(args) => cmd::quantize::run(&args),
    })
}

/// Turns what a verb came to into an exit code.
fn end(done: anyhow::Result<ExitCode>) -> ExitCode {
    // What stands in the buffer of stdout goes out now, while an error can still be told.
    let done = done.and_then(|code| std::io::stdout().flush().map(|()| code).map_err(Into::into));
    match done {
        Ok(code) => code,
        // Whoever reads our output has stopped reading.
        Err(e) if of_stdout(&e).is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe) => ExitCode::SUCCESS,
        Err(e) if of_stdout(&e).is_some() => broken(&format!("stdout: {e:#}")),
        Err(e) => broken(&format!("{e:#}")),
    }
}

/// The error of writing to stdout: alone of all errors of the system it has no file as its context.
fn of_stdout(e: &anyhow::Error) -> Option<&std::io::Error> {
    e.chain().next().and_then(|first| first.downcast_ref())
}

/// Reports that the run is broken: exactly one line, whatever characters the message holds.
fn broken(message: &str) -> ExitCode {
    let line: String = message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // Nothing is left to do when stderr is gone as well.
    let _ = writeln!(std::io::stderr(), "samebits: {line}");
    ExitCode::from(2)
}

/// What clap found wrong, in one line, without the usage text that follows it.
fn usage(e: &clap::Error) -> String {
    if e.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "no verb given; `samebits --help` lists them".into();
    }
    let text = e.to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:")).filter(|l| !l.is_empty());
    let lines: Vec<&str> = lines.filter(|line| !line.starts_with("For more information")).collect();
    let what = lines.join("; ");
    format!("{}; try `--help`", what.strip_prefix("error: ").unwrap_or(&what).replace(":; ", ": "))
}
