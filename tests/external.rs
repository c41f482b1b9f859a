//! Programs on the wire as `check` sees them: what breaks is one error each, and the run goes on.

use samebits_contract::record::Record;
use samebits_contract::verdict::Verdict;
use samebits_mutants::{VIOLATIONS, Violation};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn main() {
    samebits_mutants::run_tests(&[
        ("our_own_ops_over_the_wire_are_green", our_own_ops_over_the_wire_are_green),
        ("every_violation_is_one_error_and_the_run_goes_on", every_violation_is_one_error_and_the_run_goes_on),
        ("rows_that_say_same_as_are_judged", rows_that_say_same_as_are_judged),
        ("answers_before_the_request", answers_before_the_request),
        ("what_is_required_and_not_offered_is_untested", what_is_required_and_not_offered_is_untested),
        ("lists_that_are_wrong", lists_that_are_wrong),
    ]);
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn samebits(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_samebits-tested"));
    command.args(args).current_dir(repository()).stdin(Stdio::null()).output().expect("samebits runs")
}

fn records(dir: &Path) -> Vec<Record> {
    let text = std::fs::read_to_string(dir.join("records.jsonl")).expect("records are there");
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// The built-in program.
fn ours() -> Vec<String> {
    [env!("CARGO_BIN_EXE_samebits-tested"), "answer"].map(String::from).into()
}

/// A list of one implementation, started by `command`.
fn list(folder: &Path, command: &[String], more: &str) -> PathBuf {
    let text = format!(
        "[[implementation]]\nname = \"theirs\"\nabout = \"a program\"\ncommand = {command:?}\nversion = [{:?}, \"--version\"]\n{more}\n",
        env!("CARGO_BIN_EXE_samebits-tested")
    );
    let path = folder.join("impls.toml");
    std::fs::write(&path, text).unwrap();
    path
}

fn check(list: &Path, out: &Path, more: &[&str]) -> Output {
    let (list, out) = (list.to_str().unwrap(), out.to_str().unwrap());
    samebits(&[&["check", "--impls", list, "--impl", "theirs", "--slice", "quick", "--out", out], more].concat())
}

fn our_own_ops_over_the_wire_are_green() {
    let folder = tempfile::tempdir().unwrap();
    let isas = "layouts = [\"offset\"]\n[[implementation.isa]]\nname = \"scalar\"\n";
    let out = folder.path().join("report");
    let ops = ["--op", "gemm", "--op", "attention", "--op", "add_rms_norm"];
    let output = check(&list(folder.path(), &ours(), isas), &out, &ops);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
    let records = records(&out);
    assert!(records.len() > 300 && records.iter().all(|record| record.implementation == "theirs"));
    let passed = |axis: &str| records.iter().any(|r| r.axis.as_deref() == Some(axis) && r.verdict == Verdict::Pass);
    for axis in ["layout", "restart", "order", "ranks", "pages", "prefix", "packing", "schedule", "budget", "threads"] {
        assert!(passed(axis), "{axis} was not judged");
    }
    let run = std::fs::read_to_string(out.join("run.json")).unwrap();
    assert!(run.contains("\"theirs\": \"samebits "), "the receipt is not kept: {run}");
}

fn every_violation_is_one_error_and_the_run_goes_on() {
    assert_eq!(VIOLATIONS.len(), 17);
    let work = |violation: &'static Violation| {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("report");
        let patience = if violation.name == "hang" { "timeout = 0.5" } else { "timeout = 20" };
        let list = list(folder.path(), &samebits_mutants::command(violation.name), patience);
        let selection =
            ["--op", "add", "--dtype", "bf16", "--judgment", "accuracy", "--judgment", "golden", "--jobs", "1"];
        let output = check(&list, &out, &selection);
        let name = violation.name;
        assert_eq!(output.status.code(), Some(1), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let records = records(&out);
        let broken: Vec<&Record> = records.iter().filter(|r| matches!(r.verdict, Verdict::Error { .. })).collect();
        let edges: std::collections::BTreeSet<&str> =
            records.iter().filter(|r| r.case.contains("-edges-")).map(|r| r.case.as_str()).collect();
        // A second answer is noticed by the next request, and the lack of a number after there was one; all others break the case they answer.
        assert!(!edges.is_empty());
        let sometimes = ["two_answers", "no_number"].contains(&name);
        let expected = if sometimes { 1..=edges.len() } else { edges.len()..=edges.len() };
        assert!(expected.contains(&broken.len()), "{name}: {} of {} errors: {broken:?}", broken.len(), edges.len());
        for record in &broken {
            let Verdict::Error { reason } = &record.verdict else { unreachable!() };
            assert!(reason.contains(violation.says), "{name}: `{}` is not in: {reason}", violation.says);
            assert!(!reason.contains('\n') && reason.len() < 1000, "{name}: {reason}");
        }
        let passed = records.iter().filter(|record| record.verdict == Verdict::Pass).count();
        assert!(passed > 0, "{name}: nothing after the failure was judged");
        let run: samebits_contract::record::Run =
            serde_json::from_slice(&std::fs::read(out.join("run.json")).unwrap()).unwrap();
        assert!(run.complete && run.planned == records.len(), "{name}: records were lost");
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = VIOLATIONS.iter().map(|violation| scope.spawn(move || work(violation))).collect();
        all.into_iter().for_each(|one| one.join().expect("a violation is judged as it should be"));
    });
}

/// A row that says `same_as` is judged on every case, whatever the entry asks to be judged by.
fn rows_that_say_same_as_are_judged() {
    let folder = tempfile::tempdir().unwrap();
    let tables = folder.path().join("contract");
    std::fs::create_dir_all(tables.join("ops")).unwrap();
    for (path, text) in samebits_contract::table::Contract::tables() {
        let text = match path.as_str() {
            "impls.toml" => {
                let entry = |name: &str, command: &[String]| {
                    format!(
                        "\n[[implementation]]\nname = \"{name}\"\nabout = \"a program\"\n\
                         command = {command:?}\njudgments = [\"accuracy\"]\n"
                    )
                };
                text + &entry("same", &ours()) + &entry("other", &samebits_mutants::command("sequential_sum"))
            }
            "ops/gemm.toml" => {
                let row = "[[row]]\nimpls = [\"same\", \"other\"]\ninvariant = []\nsame_as = \"ours/cpu\"\n\n[[row]]\n";
                text.replacen("[[row]]\n", row, 1)
            }
            _ => text,
        };
        std::fs::write(tables.join(path), text).unwrap();
    }
    let verdicts = |name: &str| {
        let out = folder.path().join(name);
        let tables = tables.to_str().unwrap();
        let args = [
            "check",
            "--contract",
            tables,
            "--impl",
            name,
            "--op",
            "gemm",
            "--dtype",
            "fp32",
            "--case",
            "gemm/fp32/len*",
        ];
        let output = samebits(&[&args[..], &["--out", out.to_str().unwrap()]].concat());
        let records = records(&out);
        let golden: Vec<&Record> = records.iter().filter(|r| r.judgment.name() == "golden").collect();
        let cases: std::collections::BTreeSet<&str> = records.iter().map(|r| r.case.as_str()).collect();
        assert!(golden.len() == cases.len() && cases.len() > 10, "{} of {}", golden.len(), cases.len());
        let said = |r: &&&Record| r.setting.as_deref() == Some("same_as ours/cpu");
        assert_eq!(golden.iter().filter(said).count(), golden.len());
        let red = golden.iter().filter(|r| matches!(r.verdict, Verdict::Fail(_))).count();
        (output.status.code(), red > 0)
    };
    assert_eq!(verdicts("same"), (Some(0), false));
    assert_eq!(verdicts("other"), (Some(1), true));
}

/// A program that speaks before it is asked is noticed, whether its answers have numbers or not.
fn answers_before_the_request() {
    let folder = tempfile::tempdir().unwrap();
    let answer = samebits_contract::case::Answer::unsupported("not asked yet");
    let mut frame = Vec::new();
    samebits_contract::wire::write_frame(&mut frame, &samebits_contract::wire::encode_answer(&answer)).unwrap();
    std::fs::write(folder.path().join("frame"), frame).unwrap();
    let program = env!("CARGO_BIN_EXE_samebits-tested");
    let text = format!(
        "[[implementation]]\nname = \"theirs\"\nabout = \"hasty\"\n\
         command = [\"sh\", \"-c\", \"cat frame; exec {program} answer\"]\n"
    );
    let list = folder.path().join("impls.toml");
    std::fs::write(&list, text).unwrap();
    let out = folder.path().join("report");
    let output = check(&list, &out, &["--op", "add", "--dtype", "bf16", "--judgment", "accuracy", "--jobs", "1"]);
    assert_eq!(output.status.code(), Some(1));
    let noticed =
        |r: &Record| matches!(&r.verdict, Verdict::Error { reason } if reason.contains("more than one answer"));
    assert!(records(&out).iter().any(noticed), "{:?}", records(&out));
}

fn what_is_required_and_not_offered_is_untested() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("nothing.sh");
    // Says `unsupported` to everything: a frame of one header.
    let header = br#"{"__metadata__":{"status":"unsupported","reason":"not offered","kernel":""}}    "#;
    let mut frame = ((8 + header.len()) as u64).to_le_bytes().to_vec();
    frame.extend((header.len() as u64).to_le_bytes());
    frame.extend(header);
    std::fs::write(folder.path().join("frame"), frame).unwrap();
    // It reads nothing: one answer per process, and the harness starts it again.
    std::fs::write(&script, "cat frame; head -c 8 > /dev/null\n").unwrap();
    let run = |required: &str| {
        let text = format!(
            "[[implementation]]\nname = \"theirs\"\nabout = \"offers nothing\"\ncommand = [\"sh\", \"nothing.sh\"]\n{required}\n"
        );
        let list = folder.path().join("impls.toml");
        std::fs::write(&list, text).unwrap();
        let out = folder.path().join("report");
        let output = check(&list, &out, &["--case", "add/bf16/small-normal-bf16", "--judgment", "accuracy"]);
        (output.status.code(), records(&out).remove(0).verdict)
    };
    let required = "[[implementation.required]]\nops = [\"add\"]";
    assert!(matches!(run(required), (Some(1), Verdict::Untested { .. })), "{:?}", run(required));
    assert!(matches!(run(""), (Some(1), Verdict::Untested { .. })), "bf16 is mandatory unless the list says else");
    // Asked, but not required: unsupported, and still red, because nothing was judged.
    let other = "[[implementation.required]]\nops = [\"add\"]\nstems = [\"!small\"]";
    assert!(matches!(run(other), (Some(1), Verdict::Unsupported { .. })), "{:?}", run(other));
    // Of an op that is not required nothing is asked.
    assert_eq!(run("[[implementation.required]]\nops = [\"gemm\"]").0, Some(2));
}

fn lists_that_are_wrong() {
    let folder = tempfile::tempdir().unwrap();
    for (more, part) in [
        ("timeout = 0", "timeout"),
        ("threads = [0]", "threads"),
        ("layouts = [\"sideways\"]", "layouts"),
        ("judgments = []", "judgments"),
        ("[[implementation.required]]\nops = [\"gem\"]", "gem"),
        ("speed = 1", "speed"),
    ] {
        let output = check(&list(folder.path(), &ours(), more), &folder.path().join("report"), &[]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{more}: {stderr}");
        assert!(stderr.lines().count() == 1 && stderr.contains(part) && stderr.contains("impls.toml:"), "{stderr}");
    }
    let text = "[[implementation]]\nname = \"theirs\"\nabout = \"gone\"\ncommand = [\"no-such-program\"]\nversion = [\"no-such-program\"]\n";
    std::fs::write(folder.path().join("impls.toml"), text).unwrap();
    let output = check(&folder.path().join("impls.toml"), &folder.path().join("report"), &[]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && stderr.contains("no-such-program"), "{stderr}");
    let output = samebits(&["check", "--impl", "ours/gpu"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("ours/cpu"));
}
