//! Runs that are killed and resumed, parts that are joined, and files that were changed.

use samebits_contract::record::{Record, Run};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_samebits-tested"));
    let root: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    command.args(args).current_dir(root).stdin(Stdio::null());
    command
}

fn samebits(args: &[&str]) -> Output {
    command(args).output().expect("samebits runs")
}

const SELECTION: [&str; 8] = ["--slice", "quick", "--op", "rms_norm", "--op", "gemm", "--op", "softmax"];

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}

/// The records but for the time each took.
fn timeless(dir: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(dir.join("records.jsonl")).expect("records are there");
    let strip = |line: &str| {
        let mut record: Record = serde_json::from_str(line).expect("a record");
        record.seconds = 0.0;
        serde_json::to_string(&record).expect("a record")
    };
    text.lines().map(strip).collect()
}

#[track_caller]
fn green(output: &Output) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}{err}");
}

#[track_caller]
fn broken(output: &Output, parts: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && stderr.lines().count() == 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "`{part}` is not in: {stderr}");
    }
}

/// Killed at some moments (SAMEBITS_KILLS, 4 where it is not set, 40 in ci/nightly), each time resumed, the run ends with the
/// records that it has without any interruption.
#[test]
fn killed_at_random_moments() {
    let kills_to_make =
        std::env::var("SAMEBITS_KILLS").map_or(4, |kills| kills.parse().expect("SAMEBITS_KILLS is a number"));
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    let start = Instant::now();
    green(&samebits(&[&["check", "--out", text(&whole)], &SELECTION[..]].concat()));
    let duration = start.elapsed();
    let expected = timeless(&whole);
    let out = folder.path().join("killed");
    let (mut kills, mut interrupted, mut state) = (0, 0, 0x2545_F491_4F6C_DD1Du64 ^ u64::from(std::process::id()));
    while kills < kills_to_make {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let moment = duration.mul_f64((state >> 40) as f64 / (1u64 << 24) as f64);
        let resume: &[&str] = if interrupted > 0 && kills % 4 != 0 { &["--resume"] } else { &[] };
        let args = [&["check", "--out", text(&out)], resume, &SELECTION[..]].concat();
        let mut child = command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(moment.min(Duration::from_secs(20)));
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
        let Ok(bytes) = std::fs::read(out.join("run.json")) else { continue };
        let run: Run = serde_json::from_slice(&bytes).expect("run.json is whole at every moment");
        if run.complete {
            // It came to its end before the kill.
            assert_eq!(timeless(&out), expected, "kill {kills}");
            interrupted = 0;
            continue;
        }
        interrupted += 1;
        // What was killed is resumed to its end in a copy, so that the next kill meets it as it is.
        let copy = folder.path().join("copy");
        let _ = std::fs::remove_dir_all(&copy);
        std::fs::create_dir(&copy).unwrap();
        for entry in std::fs::read_dir(&out).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
        }
        green(&samebits(&[&["check", "--resume", "--out", text(&copy)], &SELECTION[..]].concat()));
        assert_eq!(timeless(&copy), expected, "kill {kills} at {moment:?}");
        let run: Run = serde_json::from_slice(&std::fs::read(copy.join("run.json")).unwrap()).unwrap();
        assert!(run.complete && run.sealed.is_some() && !run.plan.attempts.is_empty());
        assert!(!copy.join("journal.jsonl").exists());
    }
}

/// A disk that is full ends the run with one line; with room again it is resumed to the same records.
#[test]
#[cfg(unix)]
fn a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, out) = (folder.path().join("whole"), folder.path().join("full"));
    green(&samebits(&[&["check", "--out", text(&whole)], &SELECTION[..]].concat()));
    for room in ["40", "250", "400"] {
        // No file may grow beyond so many blocks: as on a full disk, a part of a write goes through and the next one fails.
        let limited = format!("trap '' XFSZ; ulimit -f {room}; exec \"$0\" \"$@\"");
        let mut full = Command::new("sh");
        full.args(["-c", &limited, env!("CARGO_BIN_EXE_samebits-tested"), "check", "--out", text(&out)])
            .args(SELECTION);
        let output =
            full.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).stdin(Stdio::null()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        let last = stderr.lines().last().unwrap_or_default();
        assert!(output.status.code() == Some(2) && last.starts_with("samebits: "), "{room}: {stderr}");
        assert!(last.contains("journal.jsonl") || last.contains("records.jsonl"), "{room}: {stderr}");
        green(&samebits(&[&["check", "--resume", "--out", text(&out)], &SELECTION[..]].concat()));
        assert_eq!(timeless(&out), timeless(&whole), "{room}");
        let run: Run = serde_json::from_slice(&std::fs::read(out.join("run.json")).unwrap()).unwrap();
        let kept = run.plan.attempts[0].bytes;
        assert!(room == "40" || kept > 50_000, "{room}: only {kept} bytes were kept");
    }
}

/// A run killed once some groups are done. On a busy machine a run may end before the blow falls: then another one.
fn interrupted(out: &Path) {
    let args = [&["check", "--jobs", "1", "--out", text(out)], &SELECTION[..]].concat();
    for _ in 0..20 {
        let mut child = command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        while std::fs::metadata(out.join("journal.jsonl")).map_or(0, |m| m.len()) < 50_000 {
            assert!(start.elapsed() < Duration::from_secs(60), "no journal after a minute");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let run: Run = serde_json::from_slice(&std::fs::read(out.join("run.json")).unwrap()).unwrap();
        if !run.complete {
            return;
        }
        std::fs::remove_dir_all(out).unwrap();
    }
    panic!("every run ended before it was killed");
}

#[test]
fn what_does_not_belong_together_is_not_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    broken(&samebits(&[&["check", "--resume", "--out", text(&out)], &SELECTION[..]].concat()), &["run.json"]);
    interrupted(&out);
    let resume = |more: &[&str]| samebits(&[&["check", "--resume", "--out", text(&out)], more].concat());
    broken(&resume(&["--slice", "quick", "--op", "rms_norm"]), &["plan"]);
    broken(&resume(&[&SELECTION[..], &["--seed", "1"]].concat()), &["plan"]);
    broken(&resume(&[&SELECTION[..], &["--rows", "published"]].concat()), &["row set"]);
    // Any bit that is changed in what was done is noticed.
    let path = out.join("journal.jsonl");
    let before = std::fs::read(&path).unwrap();
    let mut changed = before.clone();
    let at = before.iter().position(|&byte| byte == b'p').unwrap_or(200).max(300);
    changed[at] ^= 1;
    std::fs::write(&path, &changed).unwrap();
    broken(&resume(&SELECTION), &["journal.jsonl"]);
    std::fs::write(&path, &before).unwrap();
    green(&resume(&SELECTION));
    broken(&resume(&SELECTION), &["complete"]);
    // The finished run is sealed.
    let path = out.join("records.jsonl");
    let records = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, records.replacen("\"kernel\":\"rms_norm/", "\"kernel\":\"rms_Norm/", 1)).unwrap();
    broken(&samebits(&["report", text(&out)]), &["records.jsonl", "SHA-256"]);
}

#[test]
fn parts_make_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let check = |name: &str, more: &[&str]| {
        green(&samebits(&[&["check", "--out", text(&place(name))], &SELECTION[..], more].concat()));
    };
    check("whole", &[]);
    for part in ["1/3", "2/3", "3/3"] {
        check(&part.replace('/', "of"), &["--shard", part]);
    }
    let parts = ["1of3", "2of3", "3of3"].map(place);
    let [a, b, c] = parts.each_ref().map(|part| text(part));
    let joined = place("joined");
    // The order in which the parts are named is not seen.
    green(&samebits(&["merge", c, a, b, "--out", text(&joined)]));
    assert_eq!(timeless(&joined), timeless(&place("whole")));
    let merge = |parts: &[&str]| samebits(&[&["merge", "--out", text(&joined)], parts].concat());
    broken(&merge(&[a, b]), &["part 3 of 3 is missing"]);
    broken(&merge(&[a, b, c, b]), &["part 2 is there twice"]);
    broken(&merge(&[a, text(&place("whole"))]), &["no part of one"]);
    check("other", &["--shard", "3/3", "--seed", "7"]);
    broken(&merge(&[a, b, text(&place("other"))]), &["plan"]);
    let shard =
        |shard: &str| samebits(&[&["check", "--out", text(&joined), "--shard", shard], &SELECTION[..]].concat());
    for wrong in ["0/3", "4/3", "1", "a/b", "1/0"] {
        broken(&shard(wrong), &["--shard", wrong]);
    }
}

/// Another seed draws other inputs and leaves goldens alone; the contract holds there too.
#[test]
fn other_seeds_are_other_inputs() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    green(&samebits(&[&["check", "--seed", "12345", "--out", text(&out)], &SELECTION[..]].concat()));
    let records: Vec<Record> = std::fs::read_to_string(out.join("records.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(records.iter().all(|r| r.judgment != samebits_contract::record::Judgment::Golden));
    let base = folder.path().join("base");
    green(&samebits(&[&["check", "--out", text(&base)], &SELECTION[..]].concat()));
    let measures = |dir: &Path| -> Vec<String> {
        let text = std::fs::read_to_string(dir.join("records.jsonl")).unwrap();
        let parse = |line: &str| serde_json::from_str::<Record>(line).unwrap();
        text.lines().map(parse).filter_map(|r| r.measure.map(|m| format!("{} {}", r.case, m.max_abs))).collect()
    };
    assert_ne!(measures(&out), measures(&base), "the seed changes nothing");
}

#[test]
fn a_sweep_goes_on_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    interrupted(&out);
    let output = samebits(&[&["sweep", "--out", text(&out)], &SELECTION[..]].concat());
    green(&output);
    let run: Run = serde_json::from_slice(&std::fs::read(out.join("run.json")).unwrap()).unwrap();
    assert!(run.complete && run.plan.attempts.len() == 1, "it was not resumed");
    // It says how much of the first attempt stands.
    let stderr = String::from_utf8_lossy(&output.stderr);
    let said = stderr.lines().find_map(|line| line.strip_prefix("resumed: ")?.strip_suffix(" records are kept"));
    let (kept, all) = said.and_then(|said| said.split_once(" of ")).unwrap_or_else(|| panic!("{stderr}"));
    let [kept, all] = [kept, all].map(|count| count.parse::<usize>().unwrap());
    assert!(kept > 0 && kept < all && all == run.planned, "{stderr}");
    let csv = std::fs::read_to_string(out.join("records.csv")).unwrap();
    let records = std::fs::read_to_string(out.join("records.jsonl")).unwrap();
    assert_eq!(csv.lines().count(), records.lines().count() + 1);
}
