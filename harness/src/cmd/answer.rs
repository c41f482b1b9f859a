use super::Machine;
use anyhow::{Context, Result};
use samebits_contract::case::Answer;
use samebits_contract::wire::{decode_request, encode_answer, read_frame, write_frame};
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use std::io::{BufReader, BufWriter, stdin, stdout};
use std::process::ExitCode;

/// Answers requests on stdin with the built-in CPU ops until the end of input
///
/// Reads frames on stdin and writes one answer frame each on stdout: a safetensors file preceded by its length as
/// u64, little endian. docs/WIRE.md has the whole format. A request that cannot be answered gets an answer with
/// `status` `unsupported` or `error` and a reason; only a frame that ends early, or claims more than 8 GiB, ends the
/// run with exit code 2.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    machine: Machine,

    /// Workspace limit per op in bytes [default: none]
    #[arg(long, value_name = "BYTES")]
    budget: Option<usize>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let implementation = CpuImplementation::new(args.machine.cpu(args.budget)?);
    let mut input = BufReader::new(stdin().lock());
    let mut output = BufWriter::new(stdout().lock());
    while let Some(frame) = read_frame(&mut input).context("stdin")? {
        let answer = match decode_request(&frame) {
            Ok(case) => implementation.run(&case),
            Err(e) => Answer::error(e.to_string()),
        };
        write_frame(&mut output, &encode_answer(&answer)).context("stdout")?;
    }
    Ok(ExitCode::SUCCESS)
}
