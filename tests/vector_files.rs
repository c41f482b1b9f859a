//! The files of this folder, and the strict comparison of an answer with one: for whatever answers them.

use samebits_contract::case::{Answer, Status};
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire::File;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// How many files there are; a folder that lost some must not pass.
const FILES: usize = 135;

/// Every file, by name.
pub fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors");
    let entries = std::fs::read_dir(&folder).expect("tests/vectors can be read");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("tests/vectors can be read").path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    files
}

/// An error where some of the files are missing.
pub fn all_there(found: usize) -> Result<(), String> {
    match found {
        FILES.. => Ok(()),
        _ => Err(format!("tests/vectors holds {found} files; {FILES} are expected")),
    }
}

/// Asks `answer` for what the file holds, with fp32 and with bf16 outputs, and compares.
pub fn holds(path: &Path, answer: impl Fn(&[u8]) -> Result<Answer, String>) -> Result<(), String> {
    let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    // As it stands the file asks for fp32, and holds `expect.*` tensors that an implementation must ignore.
    let file = File::decode(&bytes).map_err(|e| e.to_string())?;
    let mut expected = file.tensors.clone();
    expected.retain(|name, _| name.starts_with("expect."));
    compare(&answer(&bytes)?, &expected, DType::Fp32)?;
    let mut rounded = file;
    rounded.tensors.retain(|name, _| !name.starts_with("expect."));
    rounded.metadata.insert("out".into(), "bf16".into());
    compare(&answer(&rounded.encode())?, &expected, DType::Bf16)
}

/// Every output has its expected bits, and there are as many outputs as the file expects.
pub fn compare(answer: &Answer, expected: &BTreeMap<String, Tensor>, out: DType) -> Result<(), String> {
    if answer.status != Status::Ok {
        return Err(format!("out={out}: {:?}: {}", answer.status, answer.reason));
    }
    let wanted = expected.keys().filter(|name| !name.ends_with("_bf16")).count();
    if wanted == 0 || answer.outputs.len() != wanted {
        return Err(format!("out={out}: {} outputs where the file expects {wanted}", answer.outputs.len()));
    }
    for (name, found) in &answer.outputs {
        // lse and logprob are fp32 whatever `out` says: the file has no bf16 form of them.
        let rounded = expected.get(&format!("expect.{name}_bf16")).filter(|_| out == DType::Bf16);
        let Some(wanted) = rounded.or(expected.get(&format!("expect.{name}"))) else {
            return Err(format!("out={out}: output `{name}` is not in the file"));
        };
        same_bits(name, found, wanted, &answer.kernel).map_err(|e| format!("out={out}: {e}"))?;
    }
    Ok(())
}

/// An error where dtype, shape or a bit differs.
pub fn same_bits(name: &str, found: &Tensor, wanted: &Tensor, kernel: &str) -> Result<(), String> {
    if (found.dtype(), found.shape()) != (wanted.dtype(), wanted.shape()) {
        return Err(format!(
            "`{name}` is {} {:?}; {} {:?} is expected",
            found.dtype(),
            found.shape(),
            wanted.dtype(),
            wanted.shape()
        ));
    }
    let wrong: Vec<usize> = (0..wanted.len()).filter(|&i| found.bits(i) != wanted.bits(i)).collect();
    match wrong.first() {
        None => Ok(()),
        Some(&i) => Err(format!(
            "`{name}`: {} of {} elements differ; element {i} is {:#x} ({}), expected {:#x} ({}); kernel {kernel}",
            wrong.len(),
            wanted.len(),
            found.bits(i),
            found.value(i),
            wanted.bits(i),
            wanted.value(i),
        )),
    }
}

/// An answer that lacks an output, has one too many, or one bit more is refused.
pub fn loose_answers_are_refused() -> Result<(), String> {
    let tensor = || Tensor::fp32(&[2], vec![1.0, 2.0]);
    let expected = BTreeMap::from([("expect.a".to_string(), tensor()), ("expect.b".to_string(), tensor())]);
    let answer = |names: &[&str]| {
        Answer::ok("none", names.iter().map(|name| (name.to_string(), tensor())).collect::<BTreeMap<_, _>>())
    };
    compare(&answer(&["a", "b"]), &expected, DType::Fp32)?;
    let mut other = answer(&["a", "b"]);
    other.outputs.insert("b".into(), Tensor::fp32(&[2], vec![1.0, 2.0f32.next_up()]));
    let wrong = [answer(&[]), answer(&["a"]), answer(&["a", "b", "c"]), answer(&["a", "c"]), other];
    match wrong.iter().position(|answer| compare(answer, &expected, DType::Fp32).is_ok()) {
        None => Ok(()),
        Some(i) => Err(format!("answer {i} passes")),
    }
}
