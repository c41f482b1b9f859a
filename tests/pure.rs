//! What is written in Python without a library: `impls/pure`, a program in another language, gives the bits of the vectors and of the
//! built-in ops; `ci/isas` knows which tests an instruction set has not seen.

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use samebits_contract::case::{Answer, Case, Config, Status};
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire::{File, decode_answer, encode_request, read_frame, write_frame};
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_ops::{Cpu, bf16, f16};
use std::collections::BTreeMap;
use std::io::BufReader;
use std::path::Path;
use std::process::{Command, Stdio};

/// Small enough for Python, and of every op it has and every kind of input.
const FILES: [&str; 16] = [
    "gemm-bf16-cancel-1x64x16",
    "gemm-bf16-cancel-4x127x9",
    "gemm-bf16-edges-24x40x18",
    "gemm-bf16-normal-1x1x1",
    "gemm-bf16-tiny-17x187x21",
    "gemm-bf16-wide-4x127x9",
    "gemm-fp32-edges-24x2x18",
    "rms_norm-bf16-edges-6x300",
    "rms_norm-fp32-edges-6x300",
    "rms_norm-hf-normal-1x8",
    "rms_norm-hf-wide-5x257",
    "rms_norm-once-normal-2x12288",
    "rms_norm-once-wide-3x255",
    "silu_mul-bf16-edges-16x16",
    "silu_mul-fp32-edges-16x16",
    "silu_mul-wide-2x1000",
];

fn main() {
    let python = Command::new("python3").arg("--version").stdout(Stdio::null()).status();
    let python = python.is_ok_and(|status| status.success());
    let mut trials = Vec::new();
    let mut trial = |name: String, holds: Box<dyn FnOnce() -> Result<(), Failed> + Send>| {
        trials.push(Trial::ignorable_test(name, move || match python {
            true => holds().map(|()| Completion::Completed),
            false => Ok(Completion::ignored_with("python3 is not installed")),
        }));
    };
    for file in FILES {
        trial(file.into(), Box::new(move || vector(file)));
    }
    for op in ["add", "gemm", "rms_norm", "silu_mul", "softmax"] {
        trial(format!("same_as_ours::{op}"), Box::new(move || same_as_ours(op)));
    }
    trial("refusals".into(), Box::new(refusals));
    trial("tests_that_an_instruction_set_has_not_seen".into(), Box::new(unseen_tests));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// The answers of `impls/pure` to `requests`, in order.
fn answers(requests: &[Vec<u8>]) -> Result<Vec<Answer>, Failed> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../impls/pure/answer.py");
    let mut child = Command::new("python3")
        .args(["-B".as_ref(), script.as_os_str()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().expect("stdin is piped");
    let mut stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let mut answers = Vec::new();
    for request in requests {
        write_frame(&mut stdin, request)?;
        let frame = read_frame(&mut stdout)?.ok_or("the program ended without an answer")?;
        answers.push(decode_answer(&frame)?);
    }
    drop(stdin);
    if read_frame(&mut stdout)?.is_some() || !child.wait()?.success() {
        return Err("the program does not end well with its input".into());
    }
    Ok(answers)
}

fn vector(stem: &str) -> Result<(), Failed> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/vectors/{stem}.safetensors"));
    let bytes = std::fs::read(path)?;
    let mut file = File::decode(&bytes)?;
    file.metadata.insert("out".into(), "bf16".into());
    let answers = answers(&[bytes, file.encode()])?;
    equal(&answers[0], &BTreeMap::from([("y".into(), file.tensors["expect.y"].clone())]))?;
    equal(&answers[1], &BTreeMap::from([("y".into(), file.tensors["expect.y_bf16"].clone())]))
}

fn equal(found: &Answer, expected: &BTreeMap<String, Tensor>) -> Result<(), Failed> {
    if found.status != Status::Ok {
        return Err(found.reason.clone().into());
    }
    if !found.outputs.keys().eq(expected.keys()) {
        return Err(format!("outputs {:?}", found.outputs.keys()).into());
    }
    for (name, wanted) in expected {
        let found = &found.outputs[name];
        if (found.dtype(), found.shape()) != (wanted.dtype(), wanted.shape()) {
            return Err(format!("`{name}` is {} {:?}", found.dtype(), found.shape()).into());
        }
        if let Some(i) = (0..wanted.len()).find(|&i| found.bits(i) != wanted.bits(i)) {
            let (found, wanted) = (found.bits(i), wanted.bits(i));
            return Err(format!("`{name}`: element {i} is {found:#x}, expected {wanted:#x}").into());
        }
    }
    Ok(())
}

/// What the vectors lack: softmax, add, fp16, and one rank's part of a gemm.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in DType::FLOATS {
        for out in DType::FLOATS {
            for op in ["add", "silu_mul"] {
                let names = if op == "add" { ["a", "b"] } else { ["gate", "up"] };
                cases.push(case(op, out, &[(names[0], &[3, 70]), (names[1], &[3, 70])], dtype, &[]));
            }
            cases.push(case("softmax", out, &[("x", &[4, 333])], dtype, &[]));
            cases.push(case("softmax", out, &[("x", &[2, 2100])], dtype, &[]));
            let norm: [(&str, &[usize]); 2] = [("x", &[2, 300]), ("w", &[300])];
            cases.push(case("rms_norm", out, &norm, dtype, &[("rounding", "hf"), ("weight_offset", "1")]));
            let whole: [(&str, &[usize]); 3] = [("x", &[2, 70]), ("w", &[3, 70]), ("bias", &[3])];
            cases.push(case("gemm", out, &whole, dtype, &[]));
            let part: [(&str, &[usize]); 3] = [("x", &[2, 64]), ("w", &[3, 64]), ("bias", &[3])];
            cases.push(case("gemm", out, &part, dtype, &[("k_offset", "64"), ("k_total", "256")]));
        }
    }
    cases.push(case("softmax", DType::Fp32, &[("x", &[2, 0])], DType::Bf16, &[]));
    cases.push(case("gemm", DType::Fp32, &[("x", &[2, 0]), ("w", &[3, 0])], DType::Bf16, &[]));
    let mut special = case("softmax", DType::Fp32, &[], DType::Fp32, &[]);
    let inf = f32::INFINITY;
    let rows = [
        [0.0, -0.0, 1.0, -1.0],
        [inf, 0.0, 0.0, 0.0],
        [-inf, 0.0, 3.0, -inf],
        [-inf; 4],
        [f32::NAN, 0.0, 0.0, 0.0],
        [-90.0, -20.0, 0.0, 1e-40],
        [3e38, 3e38, -3e38, 0.0],
        [1e7, 1e7, 1e7 - 1.0, 0.0],
    ];
    special.inputs.insert("x".into(), Tensor::fp32(&[rows.len(), 4], rows.concat()));
    special.name = "softmax special values".into();
    cases.push(special);
    cases
}

fn case(op: &str, out: DType, inputs: &[(&str, &[usize])], dtype: DType, params: &[(&str, &str)]) -> Case {
    let mut inputs_by_name = BTreeMap::new();
    let mut state = 12345u32;
    for &(name, shape) in inputs {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * 6.0
            })
            .collect();
        let tensor = match dtype {
            DType::Bf16 => Tensor::bf16(shape, values.into_iter().map(bf16::from_f32).collect()),
            DType::Fp16 => Tensor::fp16(shape, values.into_iter().map(f16::from_f32).collect()),
            _ => Tensor::fp32(shape, values),
        };
        inputs_by_name.insert(name.to_string(), tensor);
    }
    let shapes: Vec<String> = inputs.iter().map(|(_, shape)| format!("{shape:?}")).collect();
    let params: BTreeMap<String, String> = params.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    Case {
        name: format!("{op} {dtype} -> {out} {} {params:?}", shapes.join(" ")),
        op: op.into(),
        out,
        params,
        inputs: inputs_by_name,
        config: Config::default(),
    }
}

/// One program answers all cases of `op`: starting Python takes longer than most of them.
fn same_as_ours(op: &str) -> Result<(), Failed> {
    let mut cases = cases();
    cases.retain(|case| case.op == op);
    assert!(!cases.is_empty(), "no case of {op}");
    let ours = CpuImplementation::new(Cpu::best());
    for (case, theirs) in cases.iter().zip(answers(&cases.iter().map(encode_request).collect::<Vec<_>>())?) {
        let ours = ours.run(case);
        if ours.status != Status::Ok {
            return Err(format!("{}: ours/cpu: {}", case.name, ours.reason).into());
        }
        equal(&theirs, &ours.outputs).map_err(|e| format!("{}: {}", case.name, e.message().unwrap_or("")))?;
    }
    Ok(())
}

fn refusals() -> Result<(), Failed> {
    let good = case("add", DType::Fp32, &[("a", &[2]), ("b", &[2])], DType::Fp32, &[]);
    let mut unknown_param = good.clone();
    unknown_param.params.insert("alpha".into(), "1".into());
    let mut missing = good.clone();
    missing.inputs.remove("b");
    let mut mixed = good.clone();
    mixed.inputs.insert("b".into(), Tensor::bf16(&[2], vec![bf16::ONE; 2]));
    let tf32 = case("gemm", DType::Fp32, &[("x", &[1, 1]), ("w", &[1, 1])], DType::Fp32, &[("tf32", "enabled")]);
    let requests = [
        (b"noise".to_vec(), Status::Error),
        (encode_request(&unknown_param), Status::Error),
        (encode_request(&missing), Status::Error),
        (encode_request(&mixed), Status::Unsupported),
        (encode_request(&tf32), Status::Unsupported),
        (encode_request(&Case { op: "rope".into(), ..good.clone() }), Status::Unsupported),
        (encode_request(&good), Status::Ok),
    ];
    let (bytes, expected): (Vec<_>, Vec<_>) = requests.into_iter().unzip();
    for (i, (answer, status)) in answers(&bytes)?.iter().zip(expected).enumerate() {
        if answer.status != status || (status != Status::Ok) == answer.reason.is_empty() {
            return Err(format!("request {i}: {:?}, `{}`", answer.status, answer.reason).into());
        }
    }
    Ok(())
}

/// `ci/isas` in a repository of its own: all tests before a green run is recorded, none after it, and then those of what changed.
fn unseen_tests() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let at = |path: &str| folder.path().join(path);
    let output = |program: &str, arguments: &[&str]| -> Result<String, Failed> {
        let output = Command::new(program).args(arguments).current_dir(folder.path()).output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        match output.status.success() {
            true => Ok(said),
            false => Err(format!("{program} {arguments:?}: {said}{}", String::from_utf8_lossy(&output.stderr)).into()),
        }
    };
    let commit = || {
        output("git", &["add", "-A"])?;
        let name = ["-c", "user.name=test", "-c", "user.email=test@example.org"];
        output("git", &[&name[..], &["commit", "-q", "-m", "a change"]].concat())
    };
    let isas = |arguments: &[&str]| output("ci/isas", arguments);
    for path in ["ci", "ops/src", "ops/tests/ops", "tests/vectors"] {
        std::fs::create_dir_all(at(path))?;
    }
    std::fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci/isas"), at("ci/isas"))?;
    for path in ["ops/src/kernel.rs", "ops/tests/ops/page.rs", "tests/vectors/a.safetensors", "README.md"] {
        std::fs::write(at(path), "before")?;
    }
    output("git", &["init", "-q"])?;
    commit()?;
    let all = "--test ops, --test unit, --test vectors";
    let here = isas(&[])?;
    let real =
        here.lines().next().and_then(|line| line.strip_prefix("instruction sets here: ")).ok_or("a first line")?;
    let green = format!("instruction sets: {real} (real)");
    // What changed since a green run, by the line of the set that every machine has.
    let changed = || -> Result<String, Failed> {
        let said = isas(&[])?;
        let line = said.lines().find(|line| line.starts_with("  scalar: ")).ok_or("a line for scalar code")?;
        Ok(line.split_once("changed since: ").ok_or("it says what changed")?.1.to_string())
    };
    if changed()? != all || !here.contains("scalar: no green run is recorded; ") {
        return Err(here.into());
    }
    // What is not committed has not been seen by a commit.
    std::fs::write(at("ops/src/kernel.rs"), "after")?;
    if !isas(&["--seen", &green])?.contains("nothing recorded") || changed()? != all {
        return Err("a change that is not committed was recorded".into());
    }
    commit()?;
    isas(&["--seen", &green])?;
    commit()?;
    if changed()? != "no test" {
        return Err(isas(&[])?.into());
    }
    let changes = [("README.md", "no test"), ("ops/tests/ops/page.rs", "--test ops"), ("ops/src/kernel.rs", all)];
    for (path, tests) in changes {
        std::fs::write(at(path), "later")?;
        if changed()? != tests {
            return Err(format!("{path}: {}", changed()?).into());
        }
    }
    // A set that the tests did not run on, although the system says that it is here.
    match isas(&["--seen", "instruction sets: scalar (real)"]) {
        Err(error) if error.message().is_some_and(|said| said.contains("mend FLAGS")) => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}
