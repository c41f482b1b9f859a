//! Training: killed at any time and started again, or run in another way, it ends with the same bits.

use super::{checkpoint, samebits};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// The bytes of all files of a run.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

fn arguments(steps: &str, out: &Path) -> Vec<String> {
    let data = checkpoint("").join("../gradients/llama-linear.safetensors");
    let (model, data) = (checkpoint("llama-linear"), data.to_str().unwrap().to_string());
    let args = ["train", "--model", model.to_str().unwrap(), "--data", &data, "--steps", steps, "--batch", "6"];
    let out = ["--out", out.to_str().unwrap(), "--lr", "0.003", "--groups", "2"];
    args.iter().chain(&out).map(|arg| arg.to_string()).collect()
}

fn train(steps: &str, out: &Path, extra: &[&str]) -> std::process::Output {
    let args = arguments(steps, out);
    samebits(&args.iter().map(String::as_str).chain(extra.iter().copied()).collect::<Vec<_>>())
}

#[test]
fn a_killed_run_ends_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole");
    let found = train("16", &whole, &[]);
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    let lines: Vec<String> = String::from_utf8(found.stdout).unwrap().lines().map(String::from).collect();
    assert_eq!(lines.len(), 16);
    let loss = |line: &String| line.split(' ').nth(3).unwrap().parse::<f64>().unwrap();
    assert!(loss(&lines[15]) < loss(&lines[0]) - 0.1, "it learns nothing: {lines:?}");
    let whole = files(&whole);
    assert!(
        ["config.json", "model.safetensors", "state.safetensors", "steps.jsonl"].iter().all(|f| whole.contains_key(*f))
    );

    // Another way to run, killed behind several of its steps.
    let killed = dir.path().join("killed");
    let extra = ["--micro-batch", "2", "--pad", "left:1", "--recompute", "--isa", "scalar", "--save-every", "2"];
    let mut early = 0;
    for lines_seen in [2, 4] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_samebits-tested"))
            .args(arguments("16", &killed))
            .args(extra)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut shown = BufReader::new(child.stdout.take().unwrap()).lines();
        for _ in 0..lines_seen {
            let line = shown.next().unwrap().unwrap();
            assert!(lines.contains(&line), "{line}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        early += usize::from(!killed.join("model.safetensors").exists());
    }
    assert!(early > 0, "it ended before it was killed");
    let found = train("16", &killed, &[]);
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    let left = String::from_utf8(found.stdout).unwrap().lines().count();
    assert!(left < 16, "it began anew");
    let killed_files = files(&killed);
    assert!(whole.keys().eq(killed_files.keys()), "{:?}", killed_files.keys());
    for (name, bytes) in &whole {
        assert!(killed_files[name] == *bytes, "{name} differs");
    }

    // What is not the same run is refused, and nothing is touched.
    for (extra, part) in
        [(&["--lr", "0.1"][..], "the run began with optimizer"), (&["--groups", "1"], "groups 2, not 1")]
    {
        let mut args = arguments("17", &killed);
        let at = args.iter().position(|arg| arg == extra[0]).unwrap();
        args[at + 1] = extra[1].into();
        let found = samebits(&args.iter().map(String::as_str).collect::<Vec<_>>());
        let line = String::from_utf8_lossy(&found.stderr).to_string();
        assert_eq!((found.status.code(), line.lines().count()), (Some(2), 1), "{line}");
        assert!(line.contains(part), "{line}");
        assert!(files(&killed) == killed_files);
    }
    let over = train("1", &checkpoint("llama-linear"), &[]);
    assert!(String::from_utf8_lossy(&over.stderr).contains("holds a model and no run"));

    // The folder is a model.
    let audit = samebits(&["audit", killed.to_str().unwrap()]);
    assert!(audit.status.success(), "{}", String::from_utf8_lossy(&audit.stdout));
}
