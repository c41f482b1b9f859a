//! Criterion and `samebits measure` time the same code on the same shapes: they must come to the same times.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Workloads that are benchmarks of `ops/benches/ops.rs` as well: a product from the caches, one from memory,
/// attention, an op that moves data and one that computes.
const NAMES: [&str; 6] = [
    "gemm/1024x1024x1024",
    "gemm/16x4096x4096",
    "decode/b1h32g8s4096d128",
    "rows/rms_norm-4096x4096",
    "rows/softmax-1024x4096",
    "logprob/256x151936",
];

/// How far the two may lie apart, as a factor, in the best of [`ROUNDS`] rounds. On an idle machine it is less than 1.1.
const FACTOR: f64 = 1.25;
const ROUNDS: usize = 3;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Seconds by criterion: the median of its samples.
fn criterion(name: &str) -> f64 {
    let target = root().join("target/benches");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["bench", "--locked", "--quiet", "-p", "samebits-ops", "--bench", "ops", "--", "--exact", name]);
    cargo.args(["--warm-up-time", "0.5", "--measurement-time", "2", "--sample-size", "20"]);
    let output = cargo.current_dir(root()).env("CRITERION_HOME", &target).output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let file = target.join(name).join("new/estimates.json");
    let text =
        std::fs::read(&file).unwrap_or_else(|e| panic!("no benchmark is called {name}: {}: {e}", file.display()));
    let estimates: Value = serde_json::from_slice(&text).expect("criterion writes JSON");
    estimates["median"]["point_estimate"].as_f64().expect("a number") / 1e9
}

/// Seconds by `samebits measure`, over the wire.
fn measure(name: &str) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().to_str().expect("text");
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).to_string();
    let mut samebits = Command::new(env!("CARGO_BIN_EXE_samebits-tested"));
    samebits.args(["measure", "--workloads", "--filter", name, "--threads", &threads, "--out", out]);
    let output = samebits.args(["--pairs", "3", "--repeat", "21"]).output().expect("samebits runs");
    let record = std::fs::read(dir.path().join("measure.json"));
    let record = record.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    let record: Value = serde_json::from_slice(&record).expect("JSON");
    assert_eq!(record["rows"].as_array().map(Vec::len), Some(1), "--filter {name} finds one workload");
    record["rows"][0]["ours"]["median"].as_f64().expect("it was timed")
}

#[test]
#[ignore = "times for minutes and wants an idle machine: ci/bench runs it"]
fn criterion_and_measure_agree() {
    // The dev profile checks overflow and measures something else.
    if cfg!(debug_assertions) {
        panic!("run ci/bench, or this with --release");
    }
    let mut apart = Vec::new();
    for name in NAMES {
        let rounds = (0..ROUNDS).map(|_| {
            let (criterion, measure) = (criterion(name), measure(name));
            println!("{name}: criterion {:.3} ms, measure {:.3} ms", 1e3 * criterion, 1e3 * measure);
            (criterion / measure).max(measure / criterion)
        });
        let nearest = rounds.fold(f64::INFINITY, f64::min);
        if nearest > FACTOR {
            apart.push(format!("{name}: {nearest:.2}"));
        }
    }
    assert!(apart.is_empty(), "criterion and measure lie apart by more than {FACTOR}: {}", apart.join(", "));
}
