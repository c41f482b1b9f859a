//! The contract as a gate: waivers, comparison of runs, goldens of others, annotations, and the script of the action.

use samebits_contract::record::Record;
use samebits_contract::verdict::Verdict;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn main() {
    samebits_mutants::run_tests(&[
        ("waivers_cover_expire_and_go_stale", waivers_cover_expire_and_go_stale),
        ("two_runs_are_compared", two_runs_are_compared),
        ("goldens_of_others", goldens_of_others),
        ("the_script_of_the_action", the_script_of_the_action),
    ]);
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn samebits(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_samebits-tested"));
    command.args(args).current_dir(repository()).stdin(Stdio::null()).output().expect("samebits runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}

fn records(dir: &Path) -> Vec<Record> {
    let text = std::fs::read_to_string(dir.join("records.jsonl")).expect("records are there");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A list with our own program and with a mutant.
fn list(folder: &Path) -> PathBuf {
    let ours = [env!("CARGO_BIN_EXE_samebits-tested"), "answer"].map(String::from);
    let mut list = String::new();
    for (name, command) in [("right", &ours[..]), ("wrong", &samebits_mutants::command("split_by_batch"))] {
        list += &format!("[[implementation]]\nname = \"{name}\"\nabout = \"ours\"\ncommand = {command:?}\n");
    }
    let path = folder.join("impls.toml");
    std::fs::write(&path, list).unwrap();
    path
}

const SELECTION: [&str; 10] =
    ["--slice", "quick", "--op", "gemm", "--dtype", "fp32", "--judgment", "invariance", "--axis", "batch"];

fn check(folder: &Path, name: &str, out: &str, more: &[&str]) -> Output {
    let (list, out) = (list(folder), folder.join(out));
    samebits(&[&["check", "--impls", text(&list), "--impl", name, "--out", text(&out)], &SELECTION[..], more].concat())
}

fn waivers_cover_expire_and_go_stale() {
    let folder = tempfile::tempdir().unwrap();
    let waiver = |cases: &str, axis: &str, expires: &str| {
        let path = folder.path().join("waivers.toml");
        let text = format!(
            "[[waiver]]\nimpls = [\"wrong\", \"right\"]\ncases = [\"{cases}\"]\njudgment = \"invariance\"\naxis = \"{axis}\"\n\
             reason = \"known\"\nowner = \"a.person\"\nexpires = \"{expires}\"\n"
        );
        std::fs::write(&path, text).unwrap();
        path
    };
    let run = |name: &str, waivers: &Path| {
        let output = check(folder.path(), name, "run", &["--waivers", text(waivers)]);
        (output.status.code(), records(&folder.path().join("run")), said(&output))
    };
    // Without a waiver it is red.
    assert_eq!(check(folder.path(), "wrong", "run", &[]).status.code(), Some(1));
    let (code, all, text_said) = run("wrong", &waiver("gemm/*", "batch", "2999-12-31"));
    assert_eq!(code, Some(0), "{text_said}");
    let waived =
        all.iter().filter(|r| matches!(&r.verdict, Verdict::Waived { reason } if reason.contains("a.person"))).count();
    assert!(waived > 0);
    // One that covers something else leaves the failure red.
    let (code, ..) = run("wrong", &waiver("gemm/fp32/small-normal-bf16", "batch", "2999-12-31"));
    assert_eq!(code, Some(1));
    // After its last day it covers nothing, and the failure names it.
    let (code, all, _) = run("wrong", &waiver("gemm/*", "batch", "2020-01-31"));
    assert_eq!(code, Some(1));
    let named =
        |r: &Record| matches!(&r.verdict, Verdict::Fail(e) if e.message.contains("a.person expired on 2020-01-31"));
    assert!(all.iter().any(named), "the failure does not say whose waiver expired");
    // What nothing needs is red.
    let (code, all, _) = run("right", &waiver("gemm/*", "batch", "2999-12-31"));
    assert_eq!(code, Some(1));
    assert!(all.iter().any(|r| matches!(r.verdict, Verdict::StaleWaiver { .. })));
    for (cases, axis, expires, part) in [
        ("gem/*", "batch", "2999-12-31", "gem/*"),
        ("gemm/*", "batches", "2999-12-31", "axis"),
        ("gemm/*", "batch", "soon", "expires"),
        ("gemm/*", "batch", "2027-02-29", "expires"),
    ] {
        let path = waiver(cases, axis, expires);
        let output = check(folder.path(), "wrong", "run", &["--waivers", text(&path)]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(2) && stderr.contains(part) && stderr.contains("waivers.toml:1"),
            "{stderr}"
        );
    }
}

fn two_runs_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(check(folder.path(), "right", "right", &[]).status.code(), Some(0));
    assert_eq!(check(folder.path(), "wrong", "wrong", &[]).status.code(), Some(1));
    let [right, wrong] = ["right", "wrong"].map(|name| folder.path().join(name));
    let same = samebits(&["diff", text(&right), text(&right)]);
    assert_eq!(same.status.code(), Some(0), "{}", said(&same));
    let worse = samebits(&["diff", text(&right), text(&wrong)]);
    assert!(worse.status.code() == Some(1) && said(&worse).contains("pass -> fail"), "{}", said(&worse));
    let better = samebits(&["cmp", text(&wrong), text(&right)]);
    assert!(better.status.code() == Some(0) && said(&better).contains("fail -> pass"), "{}", said(&better));
    let json = samebits(&["diff", text(&right), text(&wrong), "--json"]);
    for line in String::from_utf8(json.stdout).unwrap().lines() {
        let change: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(change["name"].is_string() && change["worse"].is_boolean());
    }
}

fn goldens_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let (list, store) = (list(folder.path()), folder.path().join("store"));
    let record = |name: &str, store: &Path, reason: &str| {
        samebits(&[
            "goldens",
            "record",
            "--impls",
            text(&list),
            "--impl",
            name,
            "--store",
            text(store),
            "--reason",
            reason,
            "--op",
            "gemm",
        ])
    };
    let output = record("wrong", &store, "before the upgrade");
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let listed = samebits(&["goldens", "ls", "--store", text(&store)]);
    assert!(said(&listed).contains("gemm/bf16/small-normal-bf16") && said(&listed).contains("before the upgrade"));
    let golden = |name: &str| {
        let out = folder.path().join("golden");
        let args = ["check", "--impls", text(&list), "--impl", name, "--goldens", text(&store), "--out", text(&out)];
        samebits(&[&args[..], &["--slice", "quick", "--op", "gemm", "--judgment", "golden"]].concat()).status.code()
    };
    assert_eq!((golden("wrong"), golden("right")), (Some(0), Some(1)), "each against the outputs of `wrong`");
    let verify = || samebits(&["goldens", "verify", "--store", text(&store)]);
    assert_eq!(verify().status.code(), Some(0));
    // Any bit of any file.
    let file = std::fs::read_dir(store.join("data")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x10;
    std::fs::write(&file, bytes).unwrap();
    let damaged = verify();
    let name = file.file_name().unwrap().to_str().unwrap().to_string();
    assert!(damaged.status.code() == Some(1) && said(&damaged).contains(&name), "{}", said(&damaged));
    // The repository's own goldens are nobody else's.
    let own = record("wrong", &repository().join("goldens"), "no");
    assert!(own.status.code() == Some(2) && said(&own).contains("samebits bless"), "{}", said(&own));
    assert_eq!(samebits(&["goldens", "verify"]).status.code(), Some(0));
}

fn the_script_of_the_action() {
    let folder = tempfile::tempdir().unwrap();
    let list = list(folder.path());
    let summary = folder.path().join("summary");
    let run = |name: &str, arguments: &str| {
        Command::new("bash")
            .arg(repository().join("ci/gate"))
            .env("IMPL", name)
            .env("IMPLS", &list)
            .env("WAIVERS", "")
            .env("ARGUMENTS", arguments)
            .env("OUT", folder.path().join("report"))
            .env("ROOT", repository())
            .env("PROGRAM", env!("CARGO_BIN_EXE_samebits-tested"))
            .env("GITHUB_STEP_SUMMARY", &summary)
            .output()
            .expect("bash runs")
    };
    let right = run("right", &SELECTION.join(" "));
    assert!(right.status.code() == Some(0) && !said(&right).contains("::error"), "{}", said(&right));
    let wrong = run("wrong", &SELECTION.join(" "));
    assert!(
        wrong.status.code() == Some(1) && said(&wrong).contains("::error title=samebits%3A fail gemm/"),
        "{}",
        said(&wrong)
    );
    assert!(std::fs::read_to_string(&summary).unwrap().contains("gemm"));
    let broken = run("nobody", "");
    assert!(broken.status.code() == Some(2) && said(&broken).contains("::error"), "{}", said(&broken));
}
