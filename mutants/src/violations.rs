//! Programs that break the wire on purpose, for `samebits answer --fault`: what `check` makes of them is tested.

use samebits_contract::case::{Answer, Case};
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire::{encode_answer, write_frame};
use std::io::Write;
use std::time::Duration;

/// A way to break the wire, and what the error that it causes must say.
pub struct Violation {
    /// Its name.
    pub name: &'static str,
    /// What happens.
    pub about: &'static str,
    /// Words of the reason.
    pub says: &'static str,
}

/// All of them. Where the program says anything, the last line on stderr is `the last line`.
pub const VIOLATIONS: &[Violation] = &[
    Violation { name: "crash", about: "It aborts.", says: "the last line" },
    Violation { name: "early_exit", about: "It ends as if the input had.", says: "ended without an answer" },
    Violation { name: "hang", about: "It never answers.", says: "no answer within" },
    Violation { name: "garbage", about: "It prints text on stdout.", says: "does not write answers" },
    Violation { name: "torn_frame", about: "It ends inside a frame.", says: "of the 1000 bytes" },
    Violation { name: "empty_frame", about: "It answers with a frame of no bytes.", says: "safetensors" },
    Violation { name: "huge_frame", about: "It claims an answer of 5 GiB.", says: "the limit is" },
    Violation { name: "wrong_shape", about: "The output has one row less.", says: "has shape" },
    Violation { name: "wrong_dtype", about: "The output has another dtype than asked for.", says: "it must be" },
    Violation { name: "no_output", about: "It says ok and returns nothing.", says: "lacks" },
    Violation { name: "extra_output", about: "It returns a tensor that nobody asked for.", says: "does not return" },
    Violation { name: "unknown_status", about: "Its status is none.", says: "is not ok, unsupported or error" },
    Violation { name: "stderr_flood", about: "It floods stderr and then aborts.", says: "the last line" },
    Violation { name: "two_answers", about: "It answers one request twice.", says: "more than one answer" },
    Violation { name: "newline", about: "It ends its answer with a newline.", says: "belong to no answer" },
    Violation { name: "one_behind", about: "It gives the number of the request before.", says: "more than one answer" },
    Violation { name: "no_number", about: "It leaves out the number that it gave before.", says: "some do not" },
];

/// Writes what the breakage `name` makes of the honest `answer` to `case`.
///
/// # Errors
/// When stdout is gone.
pub fn violate(name: &str, case: &Case, mut answer: Answer, out: &mut impl Write) -> std::io::Result<()> {
    let last_line = || eprintln!("the first line\nthe last line");
    match name {
        "crash" => {
            last_line();
            std::process::abort()
        }
        "early_exit" => std::process::exit(0),
        "hang" => std::thread::sleep(Duration::from_secs(3600)),
        "garbage" => {
            out.write_all(b"Traceback (most recent call last): this is not a frame\n")?;
            return out.flush();
        }
        "torn_frame" => {
            out.write_all(&1000u64.to_le_bytes())?;
            out.write_all(&[0; 10])?;
            out.flush()?;
            std::process::exit(0)
        }
        "empty_frame" => return write_frame(out, &[]),
        "huge_frame" => {
            out.write_all(&(5u64 << 30).to_le_bytes())?;
            return out.flush();
        }
        "stderr_flood" => {
            let line = "flood ".repeat(100_000);
            (0..20).for_each(|_| eprint!("{line}"));
            eprintln!();
            last_line();
            std::process::abort()
        }
        "wrong_shape" => answer.outputs.values_mut().for_each(|tensor| {
            let rows: Vec<usize> = (1..tensor.shape()[0]).collect();
            *tensor = tensor.select(0, &rows);
        }),
        "wrong_dtype" => answer.outputs.values_mut().for_each(|tensor| {
            let other = if case.out == DType::Fp32 { DType::Bf16 } else { DType::Fp32 };
            *tensor = samebits_contract::round::tensor(other, tensor.shape(), &tensor.to_f64());
        }),
        "no_output" => answer.outputs.clear(),
        "extra_output" => drop(answer.outputs.insert("debug".into(), Tensor::i32(&[1], vec![1]))),
        "unknown_status" => {
            let mut frame = encode_answer(&answer);
            if let Some(at) = frame.windows(4).position(|word| word == b"\"ok\"") {
                frame[at + 1..at + 3].copy_from_slice(b"hm");
            }
            return write_frame(out, &frame);
        }
        "newline" => {
            let frame = encode_answer(&answer);
            let bytes = [&(frame.len() as u64).to_le_bytes()[..], &frame, b"\n"].concat();
            out.write_all(&bytes)?;
            return out.flush();
        }
        "one_behind" => answer.id = answer.id.map(|id| id - 1),
        "no_number" => answer.id = None,
        "two_answers" => write_frame(out, &encode_answer(&answer))?,
        _ => {}
    }
    write_frame(out, &encode_answer(&answer))
}
