//! Runs of the program from the command line to the report folder: what they leave, what they repeat, how they end.

use samebits_contract::record::{Judgment, Record, Run};
use samebits_contract::table::{Contract, Slice};
use samebits_contract::verdict::Verdict;
use samebits_contract::wire::{decode_answer, read_frame};
use samebits_goldens::{Provenance, Store};
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_ops::Cpu;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_samebits-tested"));
    command.args(args).current_dir(repository()).stdin(Stdio::null());
    command
}

fn samebits(args: &[&str]) -> Output {
    command(args).output().expect("samebits runs")
}

/// `check` of two small ops, reporting into `out`.
fn check(out: &Path, more: &[&str]) -> Output {
    let args = ["check", "--slice", "quick", "--op", "add", "--op", "rms_norm", "--out", text(out)];
    samebits(&[&args[..], more].concat())
}

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}

#[track_caller]
fn green(output: &Output) -> String {
    let stdout = String::from_utf8(output.stdout.clone()).expect("output is UTF-8");
    assert_eq!(output.status.code(), Some(0), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    stdout
}

/// One line on stderr that holds `parts`, nothing on stdout, exit code 2.
#[track_caller]
fn broken(output: &Output, parts: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.starts_with("samebits: ") && stderr.lines().count() == 1, "not one line: {stderr}");
    assert!(output.stdout.is_empty());
    for part in parts {
        assert!(stderr.contains(part), "`{part}` is not in: {stderr}");
    }
}

fn records(dir: &Path) -> Vec<Record> {
    let text = std::fs::read_to_string(dir.join("records.jsonl")).expect("records are there");
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// The records as they stand in the file, but for the time each took.
fn timeless(dir: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(dir.join("records.jsonl")).expect("records are there");
    let strip = |line: &str| {
        let mut value: serde_json::Value = serde_json::from_str(line).expect("a record");
        assert!(value.as_object_mut().and_then(|record| record.remove("seconds")).is_some(), "{line}");
        value.to_string()
    };
    text.lines().map(strip).collect()
}

#[test]
fn check_leaves_a_report_and_says_where() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("a/new/folder");
    let stdout = green(&check(&out, &[]));
    for part in ["add", "rms_norm", "bf16", "GREEN", text(&out.join("report.html"))] {
        assert!(stdout.contains(part), "`{part}` is not in: {stdout}");
    }
    let mut left: Vec<_> = std::fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["junit.xml", "records.csv", "records.jsonl", "report.html", "run.json", "summary.md"]);
    for file in ["junit.xml", "report.html", "summary.md"] {
        // Markdown escapes the underscore.
        let text = std::fs::read_to_string(out.join(file)).unwrap().replace('\\', "");
        assert!(text.contains("rms_norm"), "{file} does not speak of rms_norm");
    }
    let run: Run = serde_json::from_slice(&std::fs::read(out.join("run.json")).unwrap()).unwrap();
    let records = records(&out);
    assert!(run.complete && run.planned == records.len() && run.rows == "tight");
    let contract = Contract::load(None).unwrap();
    assert_eq!(run.contract, contract.digest());
    let cases: BTreeSet<&str> = records.iter().map(|record| record.case.as_str()).collect();
    let wanted = contract.cases(Slice::Quick).filter(|case| ["add", "rms_norm"].contains(&case.op.as_str()));
    assert_eq!(cases, wanted.map(|case| case.name.as_str()).collect());
    for record in &records {
        assert!(record.contract == run.contract && record.verdict == Verdict::Pass, "{record:?}");
        assert_eq!(record.axis.is_some(), record.judgment == Judgment::Invariance);
    }
}

#[test]
fn runs_differ_in_their_times_only() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &[&str]| {
        let out = folder.path().join(name);
        green(&check(&out, more));
        timeless(&out)
    };
    let first = run("first", &[]);
    assert!(first.len() > 100);
    assert_eq!(first, run("second", &[]));
    assert_eq!(first, run("one", &["--jobs", "1"]));
    assert_eq!(first, run("two", &["--jobs", "2"]));
    // A folder that is used again holds the new run alone.
    assert_eq!(first, run("first", &[]));
}

/// Exit code 1, and the table, the records and `report` agree on what is red.
#[track_caller]
fn red(out: &Path, output: &Output, judgment: Judgment, part: &str) {
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains("RED"), "{stdout}");
    let records = records(out);
    let red: Vec<&Record> = records.iter().filter(|record| record.verdict.is_red()).collect();
    assert!(!red.is_empty() && red.iter().all(|record| record.judgment == judgment), "{red:?}");
    for record in red {
        let Verdict::Fail(evidence) = &record.verdict else { panic!("{record:?}") };
        assert!(!evidence.message.is_empty() && evidence.count > 0 && record.case.contains(part), "{record:?}");
    }
    let again = samebits(&["report", text(out)]);
    assert_eq!((again.status.code(), again.stdout), (Some(1), output.stdout.clone()));
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// The contract's tables in a folder of their own, with `old` in `file` replaced once.
fn contract(folder: &Path, file: &str, old: &str, new: &str) -> PathBuf {
    let tables = folder.join("tables");
    copy(&repository().join("contract/ops"), &tables.join("ops"));
    for table in ["ws1.toml", "impls.toml"] {
        std::fs::copy(repository().join("contract").join(table), tables.join(table)).unwrap();
    }
    let path = tables.join(file);
    let before = std::fs::read_to_string(&path).unwrap();
    assert!(before.contains(old), "{file} does not have `{old}`");
    std::fs::write(&path, before.replacen(old, new, 1)).unwrap();
    tables
}

#[test]
fn a_tighter_bound_is_red() {
    let folder = tempfile::tempdir().unwrap();
    let old = "outs = [\"fp32\"]\nfills = [\"normal\"]\naccuracy.ulp = 0.5\naccuracy.condition_factor = 8";
    let new = old.replace("condition_factor = 8", "condition_factor = 0.25");
    let tables = contract(folder.path(), "ops/rms_norm.toml", old, &new);
    let out = folder.path().join("report");
    let output = check(&out, &["--contract", text(&tables)]);
    red(&out, &output, Judgment::Accuracy, "-normal-fp32");
    // The report names the contract that was asked, not the one that is built in.
    assert_ne!(records(&out)[0].contract, Contract::load(None).unwrap().digest());
}

/// A class of number that no case has, and an exception that is none: red in `coverage`, with the class, in the records
/// and in the table.
#[test]
fn a_class_that_nothing_asks_for_is_red() {
    let folder = tempfile::tempdir().unwrap();
    let range = "fills = [\"classes\"]\nshape = { R = 4, N = 64 }";
    // One column holds too few borders, and still some.
    for (old, new, kind, words) in [
        (
            range,
            "fills = [\"classes\"]\nshape = { R = 4, N = 4 }",
            "untested",
            "smallest_normal in `y` of bf16 -> bf16",
        ),
        (
            "classes = [\"largest_finite\"]",
            "classes = [\"largest_finite\", \"-0\"]",
            "stale waiver",
            "-0 in `y` of bf16 -> fp32",
        ),
    ] {
        let tables = contract(folder.path(), "ops/add.toml", old, new);
        let out = folder.path().join("report");
        let output = samebits(&[
            "check",
            "--slice",
            "quick",
            "--op",
            "add",
            "--dtype",
            "bf16",
            "--judgment",
            "coverage",
            "--contract",
            text(&tables),
            "--out",
            text(&out),
        ]);
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
        assert!(stdout.contains(words) && stdout.contains(kind), "{stdout}");
        let records = records(&out);
        assert!(records.len() == 3 && records.iter().all(|record| record.judgment == Judgment::Coverage));
        assert!(records.iter().any(|record| record.verdict.is_red()), "{records:?}");
        std::fs::remove_dir_all(&tables).unwrap();
    }
}

#[test]
fn another_golden_is_red() {
    let folder = tempfile::tempdir().unwrap();
    copy(&repository().join("goldens"), &folder.path().join("goldens"));
    copy(&repository().join("contract/ops"), &folder.path().join("contract/ops"));
    std::fs::copy(repository().join("contract/ws1.toml"), folder.path().join("contract/ws1.toml")).unwrap();
    let contract = Contract::load(None).unwrap();
    let (case, other) = ("add/bf16/small-normal-bf16", "add/bf16/small-cancel-bf16");
    let answer = CpuImplementation::new(Cpu::best()).run(&contract.case(other).expect("a quick case").build());
    let provenance = Provenance {
        contract: contract.digest().into(),
        toolchain: "none".into(),
        date: "2026-01-01".into(),
        reason: "the outputs of another case".into(),
    };
    let mut store = Store::open(&folder.path().join("goldens")).unwrap();
    store.bless(&BTreeMap::from([(case.to_string(), answer.outputs)]), &BTreeSet::new(), &provenance).unwrap();
    let out = folder.path().join("report");
    let output = check(&out, &["--root", text(folder.path())]);
    red(&out, &output, Judgment::Golden, case);
}

#[test]
fn a_killed_run_leaves_readable_records() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("report");
    let mut child = command(&["check", "--op", "gemm", "--op", "attention", "--jobs", "1", "--out", text(&out)])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = || std::fs::read_to_string(out.join("records.jsonl")).unwrap_or_default().lines().count();
    let start = Instant::now();
    while lines() < 20 {
        assert!(start.elapsed() < Duration::from_secs(60), "no records after a minute");
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), None, "the run ended before it was killed");
    assert!(output.stdout.is_empty());

    let run: Run = serde_json::from_slice(&std::fs::read(out.join("run.json")).unwrap()).unwrap();
    let records = std::fs::read_to_string(out.join("records.jsonl")).unwrap();
    let whole: Vec<&str> = records.split_inclusive('\n').filter(|line| line.ends_with('\n')).collect();
    assert!(!run.complete && whole.len() >= 19 && whole.len() < run.planned);
    for line in whole {
        let record: Record = serde_json::from_str(line).unwrap();
        assert_eq!(record.contract, run.contract);
    }
    let report = samebits(&["report", text(&out)]);
    let stdout = String::from_utf8(report.stdout).unwrap();
    assert_eq!(report.status.code(), Some(1), "{stdout}");
    assert!(stdout.contains("interrupted") && !stdout.contains("GREEN"), "{stdout}");
    let html = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert!(html.contains("interrupted"), "the page does not say so");
}

#[test]
fn a_contract_with_a_typo() {
    for (file, old, new, line, part) in [
        ("ws1.toml", "accumulation = ", "acumulation = ", "ws1.toml:7", "acumulation"),
        ("ws1.toml", "role = \"mandatory\"", "role = \"mandatry\"", "ws1.toml:24", "mandatry"),
        ("ops/add.toml", "\"threads\"", "\"thread\"", "add.toml:", "thread"),
        ("ops/add.toml", "stem = \"small\"", "steam = \"small\"", "add.toml:", "steam"),
        ("ops/add.toml", "op = \"add\"", "op = \"add", "add.toml:2", ""),
        ("impls.toml", "name = ", "nam = ", "impls.toml:", "nam"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let tables = contract(folder.path(), file, old, new);
        let out = folder.path().join("report");
        broken(&check(&out, &["--contract", text(&tables)]), &[line, part]);
        assert!(!out.exists(), "a run that is broken leaves no report");
        broken(&samebits(&["list", "--contract", text(&tables)]), &[line, part]);
        broken(&samebits(&["contract", "--contract", text(&tables)]), &[line, part]);
    }
    broken(&samebits(&["list", "--contract", "no/such/folder"]), &["no/such/folder"]);
}

#[test]
fn names_that_do_not_exist() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("report");
    for (option, value, fix) in [
        ("--op", "gem", "gemm"),
        ("--axis", "thread", "threads"),
        ("--case", "add/bf16/smal-normal-bf16", "samebits list"),
        ("--case", "nothing*", "samebits list"),
        ("--dtype", "fp8_e4m3", "out of scope"),
        ("--dtype", "i32", "bf16"),
        ("--judgment", "speed", "accuracy"),
        ("--slice", "all", "quick"),
        ("--rows", "loose", "tight"),
        ("--isa", "sse9", "avx2"),
    ] {
        broken(&samebits(&["check", option, value, "--out", text(&out)]), &[option, value, fix]);
    }
    // Filters that exclude each other are no success either.
    broken(
        &samebits(&["check", "--op", "add", "--axis", "schedule", "--judgment", "invariance", "--out", text(&out)]),
        &["--axis schedule: not asked of these cases", "samebits contract"],
    );
    broken(&samebits(&["case", "add/bf16/none"]), &["add/bf16/none", "samebits list"]);
    broken(&samebits(&["report", text(&out)]), &["run.json"]);
    assert!(!out.exists());
    std::fs::write(folder.path().join("file"), "").unwrap();
    broken(&check(&folder.path().join("file"), &[]), &["--out"]);
}

#[test]
fn a_case_piped_into_answer() {
    let contract = Contract::load(None).unwrap();
    let implementation = CpuImplementation::new(Cpu::best());
    for name in ["gemm/fp32/small-edges-bf16", "attention/bf16/ends-edges-fp32", "logprob/fp16/small-peaky-fp32"] {
        let frame = samebits(&["case", name]);
        assert!(frame.status.success() && frame.stderr.is_empty());
        let mut child = command(&["answer"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(&frame.stdout).unwrap();
        let answered = child.wait_with_output().unwrap();
        assert!(answered.status.success());
        let found = decode_answer(&read_frame(&mut answered.stdout.as_slice()).unwrap().expect("an answer")).unwrap();
        let wanted = implementation.run(&contract.case(name).expect("a quick case").build());
        assert_eq!(found.kernel, wanted.kernel);
        assert_eq!(found.outputs.keys().collect::<Vec<_>>(), wanted.outputs.keys().collect::<Vec<_>>());
        for (output, tensor) in &wanted.outputs {
            assert!(tensor.same_bits(&found.outputs[output]), "{name}: {output}");
        }
        let readable = green(&samebits(&["case", name, "--text"]));
        assert!(readable.starts_with(&format!("case {name}\nop ")) && readable.contains("tensor "), "{readable}");
    }
}

#[test]
fn list_and_contract_print_the_tables() {
    let contract = Contract::load(None).unwrap();
    let list = green(&samebits(&["list", "--slice", "exhaustive"]));
    let names: Vec<&str> = list.lines().map(|line| line.split_whitespace().next().unwrap_or_default()).collect();
    assert_eq!(names, contract.cases(Slice::Exhaustive).map(|case| case.name.as_str()).collect::<Vec<_>>());
    let json = green(&samebits(&["list", "--json", "--op", "rope", "--dtype", "bf16"]));
    for line in json.lines() {
        let case: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((case["op"].as_str(), case["dtype"].as_str()), (Some("rope"), Some("bf16")));
    }
    assert!(json.lines().count() > 10);

    let digest = green(&samebits(&["contract", "--digest"]));
    assert_eq!(digest.trim_end(), contract.digest());
    let table = green(&samebits(&["contract"]));
    for part in [contract.digest(), "bf16", "mandatory", "out of scope", "tight", "published", "attention", "padding"] {
        assert!(table.contains(part), "`{part}` is not in the contract's table");
    }
}
