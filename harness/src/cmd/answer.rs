use super::{Machine, Strict};
use crate::clock::Clock;
use crate::implementation::cpu::CpuImplementation;
use crate::implementation::cuda::CudaImplementation;
use crate::timing::{self, REPEATS, repeats};
use anyhow::{Context, Result};
use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::wire::{decode_request, encode_answer, read_frame, write_frame};
use std::io::{BufReader, BufWriter, stdin, stdout};
use std::process::ExitCode;

/// Answers requests on stdin with the built-in CPU ops until the end of input
///
/// Reads frames on stdin and writes one answer frame each on stdout: a safetensors file preceded by its length as
/// u64, little endian. docs/WIRE.md has the whole format. A request that cannot be answered gets an answer with
/// `status` `unsupported` or `error` and a reason; only a frame that ends early, or claims more than 8 GiB, ends the
/// run with exit code 2. A request with `repeat` is timed.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    machine: Machine,

    #[command(flatten)]
    strict: Strict,

    /// Workspace limit per op in bytes [default: none]
    #[arg(long, value_name = "BYTES")]
    budget: Option<usize>,

    /// Answer on the first CUDA device; where there is none, every answer is `unsupported` and says so
    #[arg(long)]
    cuda: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let cpu = args.strict.apply(args.machine.cpu(args.budget)?)?;
    if args.cuda {
        let device = CudaImplementation::first_gpu(cpu, args.budget.unwrap_or(usize::MAX));
        return serve(|case, clock| device.answer(case, clock));
    }
    let implementation = CpuImplementation::new(cpu);
    serve(|case, clock| implementation.answer(case, clock))
}

/// Answers a case, timed by a clock where there is one.
type Answers<'a> = &'a dyn Fn(&Case, Option<&Clock>) -> Answer;

fn serve(answers: impl Fn(&Case, Option<&Clock>) -> Answer) -> Result<ExitCode> {
    let mut input = BufReader::new(stdin().lock());
    let mut output = BufWriter::new(stdout().lock());
    while let Some(frame) = read_frame(&mut input).context("stdin")? {
        let request = decode_request(&frame);
        // A timed op is not to share the memory with its own request.
        drop(frame);
        let answer = match request {
            Ok(case) => answer(&answers, case),
            Err(e) => encode_answer(&Answer::error(e.to_string())),
        };
        write_frame(&mut output, &answer)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The message that answers `case`; with a reading of the clock where the request has `repeat`.
fn answer(answers: Answers, mut case: Case) -> Vec<u8> {
    // How the op runs does not depend on the number of the request.
    let id = case.config.id.take();
    let answers = |case: &Case, clock: Option<&Clock>| Answer { id, ..answers(case, clock) };
    let Some(repeat) = case.params.remove("repeat") else {
        return encode_answer(&answers(&case, None));
    };
    let Some(repeat) = repeat.parse().ok().filter(|repeat| REPEATS.contains(repeat)) else {
        return encode_answer(&Answer {
            id,
            ..Answer::error(format!("metadata `repeat`: `{repeat}` is not {}", repeats()))
        });
    };
    let clock = Clock::new(repeat);
    let answer = answers(&case, Some(&clock));
    match (answer.status, clock.reading()) {
        (Status::Ok, Some(reading)) => timing::encode(&answer, &reading),
        (Status::Ok, None) => {
            encode_answer(&Answer { id, ..Answer::unsupported(format!("metadata `repeat`: {} is not timed", case.op)) })
        }
        _ => encode_answer(&answer),
    }
}
