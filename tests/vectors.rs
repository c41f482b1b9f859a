//! Every file of `tests/vectors` through `samebits answer`: the raw bits it expects, for every instruction set of this
//! machine, with 1 and 2 threads, with fp32 and bf16 outputs.

use libtest_mimic::{Arguments, Failed, Trial};
use samebits_contract::case::{Answer, Status};
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire::{File, decode_answer, read_frame, write_frame};
use samebits_ops::Isa;
use std::collections::BTreeMap;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};

/// How many files there are; a folder that lost some must not pass.
const FILES: usize = 135;

fn main() {
    let arguments = Arguments::from_args();
    let files = files();
    let found = files.len();
    let mut trials = vec![Trial::test("all_files_are_there", move || match found {
        FILES.. => Ok(()),
        _ => Err(format!("tests/vectors holds {found} files; {FILES} are expected").into()),
    })];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        for threads in [1, 2] {
            let program = Arc::new(Program::new(isa, threads));
            for file in &files {
                let stem = file.file_stem().expect("found by extension").to_string_lossy();
                let (program, file) = (program.clone(), file.clone());
                trials.push(Trial::test(format!("{stem}::{isa}::{threads}"), move || holds(&program, &file)));
            }
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors");
    let entries = std::fs::read_dir(&folder).expect("tests/vectors can be read");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("tests/vectors can be read").path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    files
}

/// `samebits answer` under one setting, started by the first trial that asks and kept until this process ends.
struct Program {
    isa: Isa,
    threads: usize,
    running: Mutex<Option<Running>>,
}

struct Running {
    _child: Child,
    requests: BufWriter<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Program {
    fn new(isa: Isa, threads: usize) -> Program {
        Program { isa, threads, running: Mutex::new(None) }
    }

    fn answer(&self, request: &[u8]) -> Result<Answer, Failed> {
        let mut running = self.running.lock().map_err(|_| "an earlier trial broke the pipe")?;
        if running.is_none() {
            *running = Some(self.start()?);
        }
        let Running { requests, answers, .. } = running.as_mut().expect("just started");
        write_frame(requests, request)?;
        let frame = read_frame(answers)?.ok_or("the program ended without an answer")?;
        Ok(decode_answer(&frame)?)
    }

    fn start(&self) -> Result<Running, Failed> {
        let mut child = Command::new(env!("CARGO_BIN_EXE_samebits"))
            .args(["answer", "--isa", self.isa.name(), "--threads", &self.threads.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let requests = BufWriter::new(child.stdin.take().expect("stdin is piped"));
        let answers = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Ok(Running { _child: child, requests, answers })
    }
}

fn holds(program: &Program, path: &Path) -> Result<(), Failed> {
    let bytes = std::fs::read(path)?;
    // As it stands the file asks for fp32, and holds `expect.*` tensors that an implementation must ignore.
    let file = File::decode(&bytes)?;
    let mut expected = file.tensors.clone();
    expected.retain(|name, _| name.starts_with("expect."));
    compare(&program.answer(&bytes)?, &expected, DType::Fp32)?;
    let mut rounded = file;
    rounded.tensors.retain(|name, _| !name.starts_with("expect."));
    rounded.metadata.insert("out".into(), "bf16".into());
    compare(&program.answer(&rounded.encode())?, &expected, DType::Bf16)
}

/// Every output has its expected bits, and there are as many outputs as the file expects.
fn compare(answer: &Answer, expected: &BTreeMap<String, Tensor>, out: DType) -> Result<(), Failed> {
    if answer.status != Status::Ok {
        return Err(format!("out={out}: {:?}: {}", answer.status, answer.reason).into());
    }
    let wanted = expected.keys().filter(|name| !name.ends_with("_bf16")).count();
    if wanted == 0 || answer.outputs.len() != wanted {
        return Err(format!("out={out}: {} outputs where the file expects {wanted}", answer.outputs.len()).into());
    }
    for (name, found) in &answer.outputs {
        // lse and logprob are fp32 whatever `out` says: the file has no bf16 form of them.
        let rounded = expected.get(&format!("expect.{name}_bf16")).filter(|_| out == DType::Bf16);
        let Some(wanted) = rounded.or(expected.get(&format!("expect.{name}"))) else {
            return Err(format!("out={out}: output `{name}` is not in the file").into());
        };
        if (found.dtype(), found.shape()) != (wanted.dtype(), wanted.shape()) {
            return Err(format!(
                "out={out}: `{name}` is {} {:?}; {} {:?} is expected",
                found.dtype(),
                found.shape(),
                wanted.dtype(),
                wanted.shape()
            )
            .into());
        }
        let wrong: Vec<usize> = (0..wanted.len()).filter(|&i| found.bits(i) != wanted.bits(i)).collect();
        if let Some(&i) = wrong.first() {
            return Err(format!(
                "out={out}: `{name}`: {} of {} elements differ; element {i} is {:#x} ({}), expected {:#x} ({}); kernel {}",
                wrong.len(),
                wanted.len(),
                found.bits(i),
                found.value(i),
                wanted.bits(i),
                wanted.value(i),
                answer.kernel
            )
            .into());
        }
    }
    Ok(())
}
