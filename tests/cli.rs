//! The command line: bad input of every kind gives one line on stderr and exit code 2, never a panic, never half a file.

#[cfg(unix)]
#[path = "cli/outputs.rs"]
mod outputs;

use samebits_contract::case::{Case, Config, Status};
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire::{File, decode_answer, encode_request, read_frame, write_frame};
use samebits_ops::{Isa, bf16};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn samebits<S: AsRef<OsStr>>(args: &[S], stdin: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_samebits-tested"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("samebits starts");
    let mut pipe = child.stdin.take().expect("stdin is piped");
    std::thread::scope(|scope| {
        // A program that ends early stops reading; that is for the caller to judge by its output.
        scope.spawn(move || pipe.write_all(stdin));
        child.wait_with_output().expect("samebits ends")
    })
}

/// The one line that a broken run prints; `parts` must stand in it.
#[track_caller]
fn assert_broken(output: &Output, parts: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "stderr: {stderr}");
    assert!(stderr.starts_with("samebits: "), "{stderr}");
    assert!(stderr.ends_with('\n') && stderr.lines().count() == 1, "not one line: {stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "`{part}` is not in: {stderr}");
    }
}

#[track_caller]
fn broken(args: &[&str], parts: &[&str]) {
    let output = samebits(args, b"");
    assert_broken(&output, parts);
    assert!(output.stdout.is_empty(), "a broken run printed {} bytes on stdout", output.stdout.len());
}

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}

#[test]
fn help_and_version_are_no_errors() {
    for args in [&["--help"][..], &["--version"], &["answer", "--help"], &["forward", "-h"], &["help", "generate"]] {
        let output = samebits(args, b"");
        assert!(output.status.success(), "{args:?}");
        assert!(output.stderr.is_empty() && !output.stdout.is_empty(), "{args:?}");
    }
    let help = samebits(&["--help"], b"").stdout;
    let help = String::from_utf8(help).unwrap();
    for part in ["answer", "forward", "generate", "devices", "Examples:", "Exit codes:"] {
        assert!(help.contains(part), "`{part}` is not in the help");
    }
    let version = samebits(&["--version"], b"").stdout;
    assert_eq!(String::from_utf8(version).unwrap(), format!("samebits {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn dumps_of_a_gpu() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../units/tests/h100/cublas.safetensors");
    let run = |path: &Path, more: &[&str]| samebits(&[&["verify", "--dump", text(path)], more].concat(), b"");
    let output = run(&path, &["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<serde_json::Value> =
        String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    for (line, order) in lines.iter().zip(["one chain", "one chain", "6 parts of 1408 (units of 64 or 128)"]) {
        assert!(line["profile"] == "sm90" && line["equal"] == line["of"] && line["others"] == 0, "{line}");
        assert!(line["order"].as_str().unwrap().starts_with(order), "{line}");
    }

    let folder = tempfile::tempdir().unwrap();
    let (wrong, broken) = (folder.path().join("wrong"), folder.path().join("broken"));
    let mut bytes = std::fs::read(&path).unwrap();
    std::fs::write(&broken, &bytes[..bytes.len() - 2]).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&wrong, bytes).unwrap();
    let output = run(&wrong, &["--isa", "scalar", "--threads", "1"]);
    let lines = String::from_utf8(output.stdout).unwrap();
    assert_eq!((output.status.code(), lines.matches("first difference").count()), (Some(1), 1), "{lines}");
    assert_broken(&run(&broken, &[]), &["broken: not a safetensors file"]);
    assert_broken(&run(folder.path(), &[]), &[]);
    assert_broken(&samebits(&["verify"], b""), &["--dump"]);
    let script = samebits(&["verify", "--script"], b"");
    assert!(script.status.success() && String::from_utf8(script.stdout).unwrap().starts_with("import torch\n"));
}

#[test]
fn wrong_command_lines() {
    broken(&[], &["no verb"]);
    broken(&["answr"], &["answr", "answer"]);
    broken(&["answer", "--izza", "avx2"], &["--izza"]);
    broken(&["answer", "--isa"], &["--isa"]);
    broken(&["answer", "--isa", "sse9"], &["sse9", "scalar, avx2, avx512 or avx512bf16"]);
    broken(&["answer", "--isa", "AVX2"], &["AVX2"]);
    broken(&["answer", "--threads", "0"], &["threads is 0"]);
    broken(&["answer", "--threads", "1025"], &["1 to 1024"]);
    broken(&["answer", "--threads", "-1"], &["-1"]);
    broken(&["answer", "--threads", "99999999999999999999"], &["--threads"]);
    broken(&["answer", "--budget", "1GB"], &["--budget", "1GB"]);
    broken(&["answer", "extra\nline"], &["extra", "line"]);
    broken(&["devices", "--json=yes"], &["--json"]);
    broken(&["forward"], &["--model", "--tokens", "--out"]);
    broken(&["generate", "--model", "x", "--prompt", "y"], &["--max-tokens"]);
    broken(&["generate", "--model", "x", "--prompt", "y", "--max-tokens", "many"], &["many"]);
}

#[test]
fn an_isa_this_machine_lacks() {
    let lacking = Isa::all().filter(|isa| !isa.available());
    for isa in lacking {
        broken(&["answer", "--isa", isa.name()], &["lacks", isa.name()]);
    }
    broken(&["answer", "--isa", "neon"], &["neon"]);
}

#[cfg(unix)]
#[test]
fn arguments_that_are_not_text() {
    use std::os::unix::ffi::OsStrExt;
    let odd = OsStr::from_bytes(b"\xff\xfe");
    assert_broken(&samebits(&[odd], b""), &[]);
    assert_broken(&samebits(&[OsStr::new("answer"), OsStr::new("--isa"), odd], b""), &[]);
    let args = ["generate", "--max-tokens", "1", "--prompt", "p", "--model"].map(OsStr::new);
    assert_broken(&samebits(&[&args[..], &[odd]].concat(), b""), &[]);
}

fn add(values: &[f32]) -> Case {
    let tensor = Tensor::bf16(&[values.len()], values.iter().map(|&v| bf16::from_f32(v)).collect());
    Case {
        name: String::new(),
        op: "add".into(),
        out: DType::Fp32,
        params: BTreeMap::new(),
        inputs: BTreeMap::from([("a".into(), tensor.clone()), ("b".into(), tensor)]),
        config: Config::default(),
    }
}

#[test]
fn answer_goes_on_after_a_malformed_frame() {
    let mut requests = Vec::new();
    let good = encode_request(&add(&[1.0, -0.0]));
    let mut fp8 = File { tensors: BTreeMap::new(), metadata: BTreeMap::from([("op".into(), "add".into())]) };
    fp8.metadata.insert("out".into(), "fp8_e4m3".into());
    for body in [&b""[..], b"no safetensors file", &good[..good.len() - 1], &fp8.encode(), &good] {
        write_frame(&mut requests, body).unwrap();
    }
    let output = samebits(&["answer", "--threads", "1"], &requests);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty());
    let mut pipe = output.stdout.as_slice();
    let mut next = || decode_answer(&read_frame(&mut pipe).unwrap().expect("an answer")).unwrap();
    for _ in 0..3 {
        let answer = next();
        assert_eq!(answer.status, Status::Error);
        assert!(answer.reason.contains("not a safetensors file"), "{}", answer.reason);
    }
    let answer = next();
    assert!(answer.status == Status::Error && answer.reason.contains("fp8 is out of scope"), "{}", answer.reason);
    let answer = next();
    // add has no kernel of its own for AVX512-BF16.
    let isa = Isa::best().without_dot();
    assert_eq!((answer.status, answer.kernel), (Status::Ok, format!("add/{isa}")));
    assert_eq!([answer.outputs["y"].bits(0), answer.outputs["y"].bits(1)], [0x4000_0000, 0x8000_0000]);
    assert!(pipe.is_empty(), "stdout carries frames only");
}

#[test]
fn answer_ends_at_a_truncated_frame() {
    let mut requests = Vec::new();
    write_frame(&mut requests, &encode_request(&add(&[1.0]))).unwrap();
    for length in [1, 7, 8, 9, requests.len() - 1] {
        let output = samebits(&["answer", "--threads", "1"], &requests[..length]);
        assert_broken(&output, &["stdin", "input ends after"]);
        assert!(output.stdout.is_empty());
    }
    assert_broken(&samebits(&["answer", "--threads", "1"], &[0xff; 8]), &["stdin", "limit"]);
    let output = samebits(&["answer", "--threads", "1"], b"");
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty());
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut requests = Vec::new();
    for _ in 0..64 {
        write_frame(&mut requests, &encode_request(&add(&[1.0; 4096]))).unwrap();
    }
    for (args, stdin) in [(&["answer"][..], &requests[..]), (&["devices"], b""), (&["--help"], b"")] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_samebits-tested"))
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let mut pipe = child.stdin.take().unwrap();
        let _ = pipe.write_all(stdin);
        drop(pipe);
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && stderr.is_empty(), "{args:?}: {:?} {stderr}", output.status.code());
    }
}

#[test]
fn devices_say_what_is_there() {
    let output = samebits(&["devices"], b"");
    let report = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for part in ["cpu: ", "isa: ", "cuda: ", "nvrtc: ", "scalar yes"] {
        assert!(report.contains(part), "`{part}` is not in: {report}");
    }
    let output = samebits(&["devices", "--json"], b"");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["cpu"]["best"], Isa::best().name());
    for isa in Isa::all() {
        assert_eq!(report["cpu"]["isas"][isa.name()], isa.available());
    }
    let driver = &report["cuda"]["driver"];
    assert!(driver["version"].is_string() != driver["unusable"].is_string(), "{driver}");
}

/// Without a GPU everything of ours/cuda is unsupported: counted, not red unless required. A run of nothing else says that
/// it has tested nothing.
#[test]
fn a_machine_without_a_device_says_so() {
    let output = samebits(&["devices", "--json"], b"");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    if !report["cuda"]["devices"].as_array().unwrap().is_empty() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let check = |more: &[&str]| {
        let mut args =
            vec!["check", "--impl", "ours/cuda", "--op", "add", "--judgment", "golden", "--root", text(&root)];
        args.extend(["--out", text(folder.path())]);
        args.extend(more);
        let output = samebits(&args, b"");
        let records = std::fs::read_to_string(folder.path().join("records.jsonl")).unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), records)
    };
    let (code, table, _) = check(&["--impl", "ours/cpu"]);
    assert_eq!(code, Some(0), "{table}");
    assert!(table.contains("unsupported") && table.contains("no CUDA device"), "{table}");
    let (code, table, records) = check(&[]);
    assert_eq!(code, Some(0), "{table}");
    assert!(table.contains("NOT TESTED: no CUDA device") && table.contains("unsupported"), "{table}");
    assert!(!table.contains("GREEN"), "{table}");
    assert!(records.lines().count() > 10 && records.lines().all(|line| line.contains("no CUDA device")), "{records}");
    for require in [&["--require", "ours/cuda"][..], &["--require"]] {
        let (code, table, records) = check(require);
        assert_eq!(code, Some(1), "{table}");
        assert!(table.contains("RED: ") && records.contains("untested"), "{table}");
    }
    // Whoever else is required, nothing of the device is.
    let (code, table, _) = check(&["--impl", "ours/cpu", "--require", "ours/cpu"]);
    assert_eq!(code, Some(0), "{table}");
    broken(&["check", "--require", "ours/cuda", "--op", "add"], &["--require ours/cuda: it is not judged"]);
    for verb in ["forward", "generate", "rollout", "score"] {
        let files: &[&str] = match verb {
            "forward" => &["--tokens", "none", "--out", "none"],
            "generate" => &["--prompt", "none", "--max-tokens", "1"],
            "rollout" => &["--prompts", "none.txt"],
            _ => &["--rollout", "none"],
        };
        let args = [&[verb, "--model", "none", "--device", "cuda"], files].concat();
        broken(&args, &["--device cuda: no CUDA device"]);
    }
    let (code, table, _) = check(&["--impl", "ours/cpu", "--require"]);
    assert_eq!(code, Some(1), "{table}");

    let case = Case {
        name: "add".into(),
        op: "add".into(),
        out: DType::Bf16,
        params: BTreeMap::new(),
        inputs: ["a", "b"].map(|name| (name.into(), Tensor::bf16(&[1], vec![bf16::ONE]))).into(),
        config: Config::default(),
    };
    let mut request = Vec::new();
    write_frame(&mut request, &encode_request(&case)).unwrap();
    let output = samebits(&["answer", "--cuda"], &request);
    let answer = decode_answer(&read_frame(&mut &output.stdout[..]).unwrap().unwrap()).unwrap();
    assert_eq!(answer.status, Status::Unsupported);
    assert!(answer.reason.contains("no CUDA device"), "{}", answer.reason);
    broken(&["times"], &["nothing can be timed", "no CUDA device"]);
}

/// A safetensors file whose header says `header`, over `data`.
fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn tokens_file(shape: &[usize], tokens: Vec<i32>) -> Vec<u8> {
    let tensors = BTreeMap::from([("tokens".into(), Tensor::i32(shape, tokens))]);
    File { tensors, metadata: BTreeMap::new() }.encode()
}

/// Runs `forward` with these tokens; it must break, and leave nothing behind.
#[track_caller]
fn forward_broken(model: &Path, tokens: &[u8], parts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("in.safetensors");
    std::fs::write(&file, tokens).unwrap();
    let out = folder.path().join("out.safetensors");
    broken(&["forward", "--model", text(model), "--tokens", text(&file), "--out", text(&out)], parts);
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["in.safetensors"], "a broken run left files");
}

#[test]
fn forward_refuses_bad_tokens() {
    let model = checkpoint("qwen3-adder");
    let good = tokens_file(&[1, 2], vec![1, 2]);
    forward_broken(&model, b"", &["in.safetensors", "not a safetensors file"]);
    forward_broken(&model, &good[..good.len() - 1], &["in.safetensors", "not a safetensors file"]);
    forward_broken(&model, &good[..12], &["in.safetensors"]);
    let entry = r#"{"dtype":"I32","shape":[1,1],"data_offsets":[0,4]}"#;
    let overlapping = raw_file(&format!(r#"{{"tokens":{entry},"other":{entry}}}"#), &[0; 4]);
    forward_broken(&model, &overlapping, &["in.safetensors", "not a safetensors file"]);
    forward_broken(&model, &raw_file(&format!(r#"{{"token":{entry}}}"#), &[0; 4]), &["`tokens`: missing"]);
    let long = raw_file(r#"{"tokens":{"dtype":"I64","shape":[1,1],"data_offsets":[0,8]}}"#, &[0; 8]);
    forward_broken(&model, &long, &["`tokens`", "I64", "I32"]);
    forward_broken(&model, &tokens_file(&[2], vec![1, 2]), &["`tokens`", "[B, T]"]);
    forward_broken(&model, &tokens_file(&[1, 0], vec![]), &["`tokens`", "no tokens"]);
    forward_broken(&model, &tokens_file(&[0, 4], vec![]), &["`tokens`", "no tokens"]);
    forward_broken(&model, &tokens_file(&[1, 2], vec![1, 1_000_000]), &["in.safetensors", "1000000"]);
    forward_broken(&model, &tokens_file(&[1, 2], vec![-1, 1]), &["in.safetensors", "-1"]);
}

#[test]
fn forward_refuses_bad_paths_and_options() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("in.safetensors");
    std::fs::write(&tokens, tokens_file(&[1, 2], vec![1, 2])).unwrap();
    let (model, tokens, out) = (checkpoint("qwen3-adder"), text(&tokens), folder.path().join("out.safetensors"));
    let (model, out) = (text(&model), text(&out));
    let run = |model: &str, tokens: &str, out: &str, more: &[&str], parts: &[&str]| {
        broken(&[&["forward", "--model", model, "--tokens", tokens, "--out", out], more].concat(), parts);
    };
    run(model, "no/such/file", out, &[], &["no/such/file"]);
    run(model, text(folder.path()), out, &[], &[text(folder.path())]);
    run(model, tokens, "no/such/folder/out", &[], &["--out", "no/such/folder"]);
    run(model, tokens, text(folder.path()), &[], &["--out", "is a folder"]);
    run("no/such/model", tokens, out, &[], &["no/such/model"]);
    run(tokens, tokens, out, &[], &["in.safetensors"]);
    for schedule in ["chunk", "chunk:", "chunk:0", "chunk:-1", "chunk:x", "Prefill"] {
        run(model, tokens, out, &["--schedule", schedule], &["--schedule", "chunk:N"]);
    }
    run(model, tokens, out, &["--dtype", "fp8"], &["--dtype", "bf16, fp16 or fp32"]);
    run(model, tokens, out, &["--batch", "2"], &["--batch", "together or alone"]);
    run(model, tokens, out, &["--threads", "0"], &["threads is 0"]);
    assert!(!Path::new(out).exists());
}

/// A copy of the adder checkpoint, to be damaged.
fn copied() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"] {
        std::fs::copy(checkpoint("qwen3-adder").join(file), folder.path().join(file)).unwrap();
    }
    folder
}

/// `generate` and `forward` both refuse the model.
#[track_caller]
fn model_broken(model: &Path, parts: &[&str]) {
    broken(&["generate", "--model", text(model), "--prompt", "1+1=", "--max-tokens", "1"], parts);
    forward_broken(model, &tokens_file(&[1, 1], vec![1]), parts);
}

#[test]
fn models_that_are_damaged() {
    let folder = copied();
    let weights = folder.path().join("model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &whole[..whole.len() - 2]).unwrap();
    model_broken(folder.path(), &["model.safetensors"]);
    std::fs::write(&weights, b"").unwrap();
    model_broken(folder.path(), &["model.safetensors"]);
    std::fs::remove_file(&weights).unwrap();
    model_broken(folder.path(), &["model.safetensors"]);

    let mut nan = whole.clone();
    let end = nan.len();
    nan[end - 2..].copy_from_slice(&0x7fc0u16.to_le_bytes());
    std::fs::write(&weights, &nan).unwrap();
    model_broken(folder.path(), &["model.safetensors"]);

    // A tensor that is not there: one name in the header is changed to another of the same length.
    let header = String::from_utf8(whole[8..8 + header_len(&whole)].to_vec()).unwrap();
    let renamed = raw_file(&header.replacen("model.norm.weight", "model.morn.weight", 1), &whole[8 + header.len()..]);
    assert_ne!(renamed, whole, "the header has the name that is replaced");
    std::fs::write(&weights, renamed).unwrap();
    model_broken(folder.path(), &["model.safetensors", "model.norm.weight"]);
    std::fs::write(&weights, &whole).unwrap();

    let config = folder.path().join("config.json");
    let good = std::fs::read_to_string(&config).unwrap();
    assert!(good.contains("\"qwen3\""));
    std::fs::write(&config, good.replace("\"qwen3\"", "\"qwen99\"")).unwrap();
    model_broken(folder.path(), &["config.json", "qwen99"]);
    std::fs::write(&config, &good[..good.len() / 2]).unwrap();
    model_broken(folder.path(), &["config.json"]);
    std::fs::remove_file(&config).unwrap();
    model_broken(folder.path(), &["config.json"]);
}

fn header_len(file: &[u8]) -> usize {
    u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize
}

#[test]
fn generate_prints_what_transformers_printed() {
    let model = checkpoint("qwen3-adder");
    let samples: serde_json::Value =
        serde_json::from_slice(&std::fs::read(model.join("samples.json")).unwrap()).unwrap();
    let samples = samples["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 20);
    for (sample, isa) in samples.iter().zip([Isa::best(), Isa::Scalar].into_iter().cycle()) {
        let prompt = sample["prompt"].as_str().unwrap();
        let args = ["generate", "--model", text(&model), "--prompt", prompt, "--max-tokens", "4", "--isa", isa.name()];
        let output = samebits(&args, b"");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let completion = format!("{}\n", sample["completion"].as_str().unwrap());
        assert_eq!(String::from_utf8_lossy(&output.stdout), completion, "{prompt} with {isa}");
    }
}

/// Characters that a tokenizer has no token for are an error, or a warning where it has an unknown token for them.
#[test]
fn characters_without_a_token_are_named() {
    let adder = checkpoint("qwen3-adder");
    let generate = |model: &Path, prompt: &str| {
        samebits(&["generate", "--model", text(model), "--prompt", prompt, "--max-tokens", "4"], b"")
    };
    let named = ["'h' (U+0068)", "'é' (U+00E9)", "tokenizer.json", "leave them out"];
    // The adder's unknown token is its padding.
    assert_broken(
        &generate(&adder, "héé"),
        &[&named[..], &["prompt: ", "`<pad>`, the model's padding token"]].concat(),
    );
    assert_broken(&generate(&adder, "1+\u{202e}1="), &["'\\u{202e}' (U+202E)"]);

    let folder = copied();
    let file = folder.path().join("tokenizer.json");
    let good: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let prompts = folder.path().join("prompts.txt");
    std::fs::write(&prompts, "12+34=\n12+34=\n12+34=\nhéé\n").unwrap();
    let rollout = || {
        let args = ["rollout", "--model", text(folder.path()), "--prompts", text(&prompts), "--max-tokens", "1"];
        samebits(&args, b"")
    };

    // Without any, they would be dropped.
    let mut bare = good.clone();
    bare["pre_tokenizer"] = serde_json::Value::Null;
    bare["model"] = serde_json::json!({"type": "BPE", "vocab": good["model"]["vocab"], "merges": []});
    std::fs::write(&file, bare.to_string()).unwrap();
    assert_eq!(generate(folder.path(), "12+34=").stdout, b"46\n");
    assert_broken(&generate(folder.path(), "héé12+34="), &[&named[..], &["no unknown token"]].concat());
    assert_broken(&rollout(), &[&named[..], &["prompts.txt:4: prompt: "]].concat());

    let mut own = good.clone();
    own["model"]["vocab"]["<unk>"] = 19.into();
    own["model"]["unk_token"] = "<unk>".into();
    std::fs::write(&file, own.to_string()).unwrap();
    for (prompt, warns) in [("12+34=", false), ("héé", true)] {
        let output = generate(folder.path(), prompt);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && output.stdout.ends_with(b"\n"), "{stderr}");
        assert_eq!(stderr.lines().count(), usize::from(warns), "{stderr}");
        let start = "samebits: warning: prompt: 'h' (U+0068), 'é' (U+00E9) have no token in ";
        let end = "tokenizer.json; the model reads its unknown token `<unk>` in their place\n";
        assert!(!warns || stderr.starts_with(start) && stderr.ends_with(end), "{stderr}");
    }
    let output = rollout();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && stderr.lines().count() == 1 && stderr.contains("prompts.txt:4: prompt: 'h'"),
        "{stderr}"
    );
}

/// What a prompt is is said by the name of its file; a line that is none is named by its number.
#[test]
fn prompts_are_what_their_file_says() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint("qwen3-adder");
    let run = |name: &str, lines: &[u8]| {
        let (prompts, out) = (folder.path().join(name), folder.path().join("out"));
        std::fs::write(&prompts, lines).unwrap();
        let args =
            ["rollout", "--model", text(&model), "--prompts", text(&prompts), "--max-tokens", "1", "--out", text(&out)];
        samebits(&args, b"")
    };
    let tokens = |name: &str, lines: &[u8]| -> Vec<serde_json::Value> {
        let output = run(name, lines);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let written = std::fs::read_to_string(folder.path().join("out")).unwrap();
        let lines = written.lines().skip(1).map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines.map(|line| line["prompt_tokens"].clone()).collect()
    };
    let json = |text: &str| -> Vec<serde_json::Value> { serde_json::from_str(text).unwrap() };
    assert_eq!(tokens("a.txt", b"1+2=\r\n(1+2)="), json("[[1, 4, 13, 5, 15], [1, 16, 4, 13, 5, 17, 15]]"));
    let lines = b"{\"prompt\": \"1+2=\", \"answer\": 3}\n{\"tokens\": [4, 15]}\n";
    assert_eq!(tokens("a.jsonl", lines), json("[[1, 4, 13, 5, 15], [4, 15]]"));
    // A text that looks like a list is a text: `[` has no token here.
    assert_broken(&run("a.txt", b"1+2=\n[4, 15]\n"), &["a.txt:2: ", "'[' (U+005B)"]);
    for (name, lines, parts) in [
        ("a.txt", &b"1+2=\n\n3+4=\n"[..], &["a.txt:2: is blank"][..]),
        ("a.txt", b"\n1+2=\n", &["a.txt:1: is blank"]),
        ("a.txt", b"1+2=\n  \n", &["a.txt:2: is blank"]),
        ("a.txt", "\u{feff}1+2=\n".as_bytes(), &["begins with a byte order mark"]),
        ("a.txt", b"1+\xff2=\n", &["a.txt"]),
        ("a.txt", b"", &["holds no prompt"]),
        ("prompts", b"1+2=\n", &["call it .txt", ".jsonl"]),
        ("a.json", b"1+2=\n", &["call it .txt", ".jsonl"]),
        ("a.jsonl", b"[4, 15]\n", &["a.jsonl:1: ", "{\"tokens\": [1, 2]}"]),
        ("a.jsonl", b"{\"prompt\": \"1\"}\n\n", &["a.jsonl:2: is blank"]),
        ("a.jsonl", b"{\"prompt\": \"1\", \"tokens\": [1]}\n", &["a.jsonl:1: give one of"]),
        ("a.jsonl", b"{\"tokens\": [1.5]}\n", &["a.jsonl:1: "]),
        ("a.jsonl", b"{\"text\": \"1\"}\n", &["a.jsonl:1: give one of"]),
        (
            "a.jsonl",
            b"{\"messages\": [{\"role\": \"user\", \"content\": \"1\"}]}\n",
            &["a.jsonl:1: ", "has no chat template"],
        ),
        ("a.jsonl", b"{\"tokens\": [99]}\n", &["prompt: element 0 is 99"]),
    ] {
        std::fs::remove_file(folder.path().join("out")).ok();
        assert_broken(&run(name, lines), parts);
        assert!(!folder.path().join("out").exists(), "{name}");
    }
}

/// Frequencies that depend on a length belong to a number of the run, which is written down and read back.
#[test]
fn a_rope_length_is_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    // Positions scaled beyond 16 and 32 of them.
    for (name, trained) in [("llama-dynamic", 16), ("phi3", 32)] {
        let model = text(&checkpoint(name)).to_string();
        std::fs::write(at("p.jsonl"), "{\"tokens\": [5, 6, 7, 8]}\n{\"tokens\": [9, 10, 11]}\n").unwrap();
        let rollout = |more: &[&str]| {
            let args = [
                "rollout",
                "--model",
                &model,
                "--prompts",
                &at("p.jsonl"),
                "--out",
                &at("r"),
                "--ignore-eos",
                "--temperature",
                "0",
            ];
            samebits(&[&args[..], more].concat(), b"")
        };
        let score =
            |more: &[&str]| samebits(&[&["score", "--model", &model, "--rollout", &at("r")], more].concat(), b"");
        let lines = || -> Vec<serde_json::Value> {
            let text = std::fs::read_to_string(at("r")).unwrap();
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        };
        let logprob = |of: &[i32], more: &[&str], out: &str| {
            std::fs::write(at("t"), tokens_file(&[1, of.len()], of.to_vec())).unwrap();
            samebits(&[&["grad", "--model", &model, "--tokens", &at("t"), "--out", &at(out)], more].concat(), b"")
        };
        // What is not said is the length of the training; how much is asked for moves no bit.
        let mut first: Option<serde_json::Value> = None;
        for max_tokens in ["4", "12"] {
            assert!(rollout(&["--max-tokens", max_tokens]).status.success(), "{name}");
            assert_eq!(lines()[0]["rope_length"], trained);
            let logprobs = serde_json::Value::from(lines()[1]["logprobs"].as_array().unwrap()[..4].to_vec());
            assert_eq!(*first.get_or_insert(logprobs.clone()), logprobs, "{name}");
            assert_eq!(score(&[]).status.code(), Some(0), "{name}");
        }
        assert_broken(
            &rollout(&["--max-tokens", "60"]),
            &["prompt: number 0", &format!("rope length of the run is {trained}"), "--rope-length"],
        );
        let long = logprob(&[5; 40], &[], "g");
        assert_broken(&long, &["tensor `tokens`: sequence 0 has 40", "--rope-length"]);
        // Another one is another run, which score reads back and whose training is asked for by the same number.
        assert!(rollout(&["--max-tokens", "12", "--rope-length", "48"]).status.success(), "{name}");
        assert_eq!(lines()[0]["rope_length"], 48);
        assert_ne!(lines()[1]["logprobs"].as_array().unwrap()[..4], first.unwrap().as_array().unwrap()[..], "{name}");
        assert_eq!(score(&[]).status.code(), Some(0), "{name}");
        assert_broken(
            &score(&["--rope-length", "40"]),
            &["--rope-length 40: ", "was made with 48", "two lengths are not compared"],
        );
        let ints = |value: &serde_json::Value| -> Vec<i32> { serde_json::from_value(value.clone()).unwrap() };
        let line = &lines()[1];
        let whole = [ints(&line["prompt_tokens"]), ints(&line["tokens"])].concat();
        assert!(logprob(&whole, &["--rope-length", "48"], "g").status.success(), "{name}");
        let found = File::decode(&std::fs::read(at("g")).unwrap()).unwrap();
        assert_eq!(found.metadata["rope_length"], "48");
        let found: Vec<f64> = found.tensors["logprob"].to_f64()[4..].to_vec();
        let made: Vec<f32> = serde_json::from_value(line["logprobs"].clone()).unwrap();
        assert_eq!(found, made.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(), "{name}");
        // Without the number it is another one, and no rollout of an older version is taken for either.
        assert!(logprob(&whole, &[], "other").status.success(), "{name}");
        assert_ne!(std::fs::read(at("g")).unwrap(), std::fs::read(at("other")).unwrap());
        let text = std::fs::read_to_string(at("r")).unwrap().replacen("\"rope_length\":48,", "", 1);
        std::fs::write(at("r"), text).unwrap();
        assert_broken(&score(&[]), &["has no `rope_length`"]);
        for length in ["0", "100000000"] {
            assert_broken(&rollout(&["--rope-length", length]), &["rope length: is ", length]);
        }
    }
}

/// Fields that nobody reads are named, or refused where that is asked for.
#[test]
fn what_is_passed_by_is_named_once() {
    let folder = copied();
    let (config, dir) = (folder.path().join("config.json"), text(folder.path()).to_string());
    let good = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, good.replacen('{', "{\"unsloth_version\": \"2024.9\", \"mlp_bias\": false,", 1)).unwrap();
    let verb = |more: &[&str]| {
        samebits(&[&["generate", "--model", &dir, "--prompt", "12+34=", "--max-tokens", "4"], more].concat(), b"")
    };
    let output = verb(&[]);
    let stderr = String::from_utf8_lossy(&output.stderr).to_string();
    assert_eq!((output.stdout.as_slice(), stderr.lines().count()), (&b"46\n"[..], 2), "{stderr}");
    let named =
        ["`unsloth_version` is \"2024.9\", which no model's code reads", "`mlp_bias` is false, which asks for nothing"];
    assert!(named.iter().all(|part| stderr.contains(part)), "{stderr}");
    assert_broken(&verb(&["--strict"]), &[&["--strict: "], &named[..]].concat());
    let audit = |more: &[&str]| samebits(&[&["audit", &dir], more].concat(), b"");
    let output = audit(&[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&output.stdout).contains("passed by: "));
    assert_eq!(audit(&["--strict"]).status.code(), Some(1));
}

/// Padding is counted where a token is named: whoever looks it up finds it there.
#[test]
fn a_token_is_named_by_its_place_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let ints = |shape: &[usize], values: Vec<i32>| Tensor::i32(shape, values);
    let mut file = File { tensors: BTreeMap::new(), metadata: BTreeMap::new() };
    file.tensors.insert("tokens".into(), ints(&[2, 5], vec![1, 4, 13, 5, 15, -7, -7, 1, 4, 99]));
    file.tensors.insert("attention_mask".into(), ints(&[2, 5], vec![1, 1, 1, 1, 1, 0, 0, 1, 1, 1]));
    let model = text(&checkpoint("qwen3-adder")).to_string();
    let run = |file: &File, verb: &[&str]| {
        std::fs::write(at("t"), file.encode()).unwrap();
        let tokens = if verb[0] == "train" { "--data" } else { "--tokens" };
        samebits(&[verb, &["--model", &model, tokens, &at("t"), "--out", &at("out")]].concat(), b"")
    };
    let verbs = [&["forward"][..], &["grad"], &["train", "--steps", "1", "--batch", "2"]];
    for verb in verbs {
        assert_broken(&run(&file, verb), &["tensor `tokens`: element [1, 4] is 99; the vocabulary is 0 to 31"]);
    }
    file.tensors.insert("tokens".into(), ints(&[2, 5], vec![1, 4, 13, 5, 15, -7, -7, 1, 4, 9]));
    file.tensors.insert("mask".into(), ints(&[2, 5], vec![0, 1, 1, 1, 1, 0, 0, 1, 1, 1]));
    for verb in &verbs[1..] {
        assert_broken(&run(&file, verb), &["tensor `mask`: element [1, 2] is 1; nothing stands before a first token"]);
    }
    file.tensors.insert("mask".into(), ints(&[2, 5], vec![0, 1, 1, 1, 1, 0, 0, 0, 2, 1]));
    assert_broken(&run(&file, &["grad"]), &["tensor `mask`: element [1, 3] is 2; it must be 0 or 1"]);
    assert!(!folder.path().join("out").exists());
}

/// What training leaves is a folder of its own: its config says the dtype and the rope length, its tokenizer is whole.
#[test]
fn training_leaves_a_folder_that_fits_its_weights() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let model = folder.path().join("model");
    std::fs::create_dir_all(model.join("additional_chat_templates")).unwrap();
    let from = checkpoint("llama-dynamic");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(file), model.join(file)).unwrap();
    }
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["dtype"] = "float16".into();
    std::fs::write(model.join("config.json"), config.to_string()).unwrap();
    let beside = [
        "added_tokens.json",
        "special_tokens_map.json",
        "tokenizer.model",
        "chat_template.jinja",
        "qwen.tiktoken",
        "merges.txt",
        "additional_chat_templates/tools.jinja",
    ];
    for file in beside {
        std::fs::write(model.join(file), file).unwrap();
    }
    std::fs::write(at("t"), tokens_file(&[1, 20], (0..20).map(|i| 3 + i).collect())).unwrap();
    let run = at("run");
    let train = |more: &[&str]| {
        let args = ["train", "--model", text(&model), "--data", &at("t"), "--batch", "1", "--out", &run];
        samebits(&[&args[..], more].concat(), b"")
    };
    // Of 16 positions that it was trained on.
    assert_broken(&train(&["--steps", "1"]), &["sequence 0 has 20; the rope length of the run is 16", "--rope-length"]);
    let done = train(&["--steps", "1", "--rope-length", "24"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let found = std::fs::read_to_string(Path::new(&run).join("config.json")).unwrap();
    let found: serde_json::Value = serde_json::from_str(&found).unwrap();
    config["dtype"] = "bfloat16".into();
    config["samebits_rope_length"] = 24.into();
    assert_eq!(found, config);
    for file in beside {
        assert_eq!(std::fs::read_to_string(Path::new(&run).join(file)).unwrap(), file);
    }
    // The run goes on at its own length, and at no other; what it left is read at that length.
    assert_broken(
        &train(&["--steps", "2", "--rope-length", "32"]),
        &["was made with 24", "two lengths are not compared"],
    );
    assert!(train(&["--steps", "2"]).status.success());
    std::fs::write(at("p.jsonl"), "{\"tokens\": [5, 6]}\n").unwrap();
    let made =
        samebits(&["rollout", "--model", &run, "--prompts", &at("p.jsonl"), "--max-tokens", "22", "--ignore-eos"], b"");
    assert!(
        String::from_utf8_lossy(&made.stdout).contains("\"rope_length\":24"),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
}

/// What training leaves of a folder of the `rwkv` package has a config, which says what its tensors did, and runs alone.
#[test]
fn folders_without_a_config_are_trained() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (model, run) = (checkpoint("rwkv7"), at("run"));
    std::fs::write(at("t"), tokens_file(&[2, 10], (0..20).map(|i| 3 + i).collect())).unwrap();
    for steps in ["1", "2"] {
        let args =
            ["train", "--model", text(&model), "--data", &at("t"), "--batch", "2", "--out", &run, "--steps", steps];
        let done = samebits(&args, b"");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    let found = std::fs::read_to_string(Path::new(&run).join("config.json")).unwrap();
    let found: serde_json::Value = serde_json::from_str(&found).unwrap();
    assert_eq!([&found["model_type"], &found["dtype"]], ["rwkv7", "bfloat16"]);
    assert_eq!([&found["hidden_size"], &found["head_dim"], &found["num_hidden_layers"]], [48, 16, 3]);
    std::fs::write(at("p.jsonl"), "{\"tokens\": [5, 6]}\n").unwrap();
    let made = ["rollout", "--model", &run, "--prompts", &at("p.jsonl"), "--max-tokens", "9", "--ignore-eos"];
    let made = samebits(&[&made[..], &["--out", &at("rollout")]].concat(), b"");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let score = |model: &str| samebits(&["score", "--model", model, "--rollout", &at("rollout")], b"");
    let own = score(&run);
    assert_eq!(own.status.code(), Some(0), "{}", String::from_utf8_lossy(&own.stderr));
    assert!(String::from_utf8_lossy(&own.stdout).contains("exactly zero"));
    assert!(!score(text(&model)).status.success(), "it is no other model");
}

/// Trained weights are stored as numbers of a dtype, whatever the first ones were.
#[test]
fn trained_folders_do_not_say_that_they_are_packed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    std::fs::create_dir(at("model")).unwrap();
    std::fs::copy(checkpoint("gpt-oss").join("model.safetensors"), at("model/model.safetensors")).unwrap();
    let config = std::fs::read_to_string(checkpoint("gpt-oss").join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["quantization_config"] = serde_json::json!({"quant_method": "mxfp4"});
    std::fs::write(at("model/config.json"), config.to_string()).unwrap();
    std::fs::write(at("t"), tokens_file(&[2, 10], (0..20).map(|i| 3 + i).collect())).unwrap();
    let args =
        ["train", "--model", &at("model"), "--data", &at("t"), "--batch", "2", "--out", &at("run"), "--steps", "1"];
    let done = samebits(&args, b"");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let found: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(at("run/config.json")).unwrap()).unwrap();
    assert_eq!((found.get("quantization_config"), &found["model_type"]), (None, &"gpt_oss".into()));
}

/// The whole file, not only the logits: nothing in it may say how it was made.
#[test]
fn forward_writes_the_same_file_under_every_setting() {
    let model = checkpoint("qwen3-adder");
    let reference = model.join("reference.safetensors");
    let folder = tempfile::tempdir().unwrap();
    let forward = |name: &str, settings: &[&str]| {
        let out = folder.path().join(name);
        let args = ["forward", "--model", text(&model), "--tokens", text(&reference), "--out", text(&out)];
        let output = samebits(&[&args, settings].concat(), b"");
        assert!(output.status.success(), "{settings:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{settings:?} printed something");
        std::fs::read(out).unwrap()
    };
    let first = forward("first", &[]);
    let logits = &File::decode(&first).unwrap().tensors["logits"];
    assert_eq!((logits.dtype(), logits.shape()), (DType::Fp32, &[2, 40, 32][..]));
    for settings in [
        &["--schedule", "decode", "--threads", "1"][..],
        &["--schedule", "chunk:7", "--batch", "alone"],
        &["--batch", "alone", "--isa", "scalar", "--dtype", "bf16"],
    ] {
        assert!(forward("again", settings) == first, "{settings:?} moved a bit");
    }
    assert!(forward("fp32", &["--dtype", "fp32"]) != first, "--dtype is not heard");
    // An existing file is replaced whole, and no temporary file stays.
    let mut left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["again", "first", "fp32"]);
}
