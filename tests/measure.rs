//! `samebits measure --workloads`: beside programs that answer well, and beside every kind that does not. The other
//! programs are this test itself, started with the name of what it is to do wrong.

use libtest_mimic::{Arguments, Failed, Trial};
use samebits_contract::case::{Answer, Case, Config, Status};
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire::{File, decode_request, encode_answer, encode_request, read_frame, write_frame};
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_ops::{Cpu, Isa};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{Read, Write, stdin, stdout};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// What a program may do wrong, only for the op softmax, and what is then said of it.
const WRONG: [(&str, &[&str]); 12] = [
    ("exits", &["ended without an answer", "exit status: 3", "last words: no more"]),
    ("hangs", &["no answer within 1 s", "--timeout"]),
    ("garbage", &["does not write answers", "bytes; the limit is"]),
    ("half", &["does not write answers", "input ends after"]),
    ("text", &["not a safetensors file"]),
    ("error", &["answers `error`: too tired"]),
    ("plain", &["`seconds`: missing", "`repeat`"]),
    ("few", &["`seconds`: 1 numbers for 2 runs"]),
    ("instant", &["`seconds`: 0 is not greater than 0"]),
    ("slow", &["`seconds`: more in all than"]),
    ("other", &["not the same work"]),
    ("nameless", &["output `z` that the op does not have"]),
];

const TABLE: &str = r#"
agree = { bf16 = 0.02 }
[peer.absent]
command = "no-such-program-anywhere"
[[workload]]
name = "a/softmax"
op = "softmax"
params = { R = 2, N = 8 }
at_least = { it = 1e-9, absent = 1e9 }
[[workload]]
name = "b/gemm"
op = "gemm"
params = { M = 2, N = 16, K = 32 }
at_least = { it = 1e-9 }
memory_below = { it = 1e9 }
"#;

/// What holds `it` to an instruction set. The one who measures has set it to something else.
const HELD: &str = "SAMEBITS_TEST_HELD";

fn main() {
    if let [_, first, wrong] = &std::env::args().collect::<Vec<_>>()[..]
        && first == "--answer"
    {
        return program(wrong);
    }
    let mut trials = vec![
        Trial::test("pairs_and_their_records", pairs_and_their_records),
        Trial::test("a_missed_target_is_code_1", a_missed_target),
        Trial::test("shares_of_the_machine", shares),
        Trial::test("peers_are_held_to_the_instruction_set", peers_are_held),
        Trial::test("what_an_instruction_set_is_asked", asked_of_an_isa),
        Trial::test("what_is_not_offered", what_is_not_offered),
        Trial::test("a_peer_that_does_not_start", does_not_start),
        Trial::test("wrong_command_lines", wrong_command_lines),
        Trial::test("answers_with_a_clock", answers_with_a_clock),
    ];
    for (wrong, parts) in WRONG {
        trials.push(Trial::test(format!("wrong::{wrong}"), move || wrong_peer(wrong, parts)));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Answers requests and does `wrong` for softmax.
fn program(wrong: &str) {
    let ours = CpuImplementation::new(Cpu::new(Isa::best(), 1, usize::MAX).unwrap());
    let (mut input, mut output) = (stdin().lock(), stdout().lock());
    while let Some(frame) = read_frame(&mut input).unwrap() {
        let mut case = decode_request(&frame).unwrap();
        let repeat: usize = case.params.remove("repeat").unwrap().parse().unwrap();
        let wrong = if case.op == "softmax" { wrong } else { "" };
        let mut answer = ours.run(&case);
        let mut seconds = vec![1e-9; repeat];
        match wrong {
            "exits" => {
                eprintln!("no more");
                std::process::exit(3);
            }
            "hangs" => std::thread::sleep(Duration::from_secs(60)),
            "garbage" => output.write_all(b"Traceback (most recent call last):\n").unwrap(),
            "half" => {
                output.write_all(&[9, 0, 0, 0, 0, 0, 0, 0, 1]).unwrap();
                std::process::exit(0);
            }
            "error" => answer = Answer::error("too tired"),
            "held" if std::env::var(HELD).as_deref() != Ok("scalar") => std::process::exit(4),
            "unsupported" => answer = Answer::unsupported("not this one; ever"),
            "few" => seconds = vec![1.0],
            "instant" => seconds[1] = 0.0,
            "slow" => seconds[1] = 1e6,
            "other" => answer.outputs = BTreeMap::from([("y".into(), case.inputs["x"].clone())]),
            "nameless" => _ = answer.outputs.insert("z".into(), case.inputs["x"].clone()),
            _ => {}
        }
        let mut file = File::decode(&encode_answer(&answer)).unwrap();
        if answer.status == Status::Ok && wrong != "plain" {
            file.metadata.insert("seconds".into(), format!("{seconds:?}"));
            file.metadata.insert("peak_bytes".into(), "1000".into());
        }
        let text = b"this is no safetensors file".to_vec();
        write_frame(&mut output, &if wrong == "text" { text } else { file.encode() }).unwrap();
    }
}

/// The command line of [`program`].
fn peer(wrong: &str) -> String {
    format!("it='{}' --answer {wrong}", std::env::current_exe().unwrap().display())
}

fn measure(args: &[&str]) -> Output {
    // Not in the repository: the built-in peer cannot be found by accident.
    measure_in(&std::env::temp_dir(), args)
}

fn measure_in(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_samebits-tested"));
    command.arg("measure").args(args).current_dir(folder).stdin(Stdio::null()).env(HELD, "other");
    command.output().expect("samebits runs")
}

struct Run {
    code: i32,
    stdout: String,
    stderr: String,
    record: Value,
    page: String,
}

/// A run over `table` with `more`; what it printed and its record.
fn run(table: &str, more: &[&str]) -> Run {
    run_in(&std::env::temp_dir(), table, more)
}

fn run_in(folder: &Path, table: &str, more: &[&str]) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let (file, out) = (dir.path().join("w.toml"), dir.path().join("out"));
    std::fs::write(&file, table).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_string();
    let (file, out_text) = (text(&file), text(&out));
    let mut args = vec!["--workloads", &file, "--out", &out_text, "--repeat", "2"];
    for (option, value) in [("--pairs", "3"), ("--timeout", "30")] {
        if !more.contains(&option) {
            args.extend([option, value]);
        }
    }
    let output = measure_in(folder, &[&args[..], more].concat());
    let record = std::fs::read(out.join("measure.json")).ok();
    let page = std::fs::read_to_string(out.join("measure.md")).ok();
    assert_eq!(record.is_some(), page.is_some(), "both records or none");
    Run {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
        record: record.map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).unwrap()),
        page: page.unwrap_or_default(),
    }
}

/// Fails with what was printed unless `holds`.
fn that(holds: bool, run: &Run) -> Result<(), Failed> {
    if holds {
        Ok(())
    } else {
        Err(format!("code {}\n{}\n{}\n{:#}", run.code, run.stdout, run.stderr, run.record).into())
    }
}

fn pairs_and_their_records() -> Result<(), Failed> {
    let run = run(TABLE, &["--against", "it", "--impl", &peer("nothing"), "--threads", "1,2"]);
    that(run.code == 0 && run.stderr.is_empty(), &run)?;
    for part in ["1 thread\n", "2 threads\n", "it/samebits", "a/softmax", "0.00x it met", "6 of 6 targets met"] {
        that(run.stdout.contains(part), &run)?;
    }
    let record = &run.record;
    that(record["schema"] == 1 && record["complete"] == true && record["pairs"] == 3 && record["repeat"] == 2, &run)?;
    that(record["programs"][0]["version"] == format!("samebits {}", env!("CARGO_PKG_VERSION")), &run)?;
    that(record["programs"][1]["name"] == "it" && record["machine"]["cores"].is_string(), &run)?;
    let rows = record["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| (&row["workload"]["name"], &row["threads"])).collect();
    that(format!("{names:?}").matches("String").count() == 4 && rows[2]["threads"] == 2, &run)?;
    for row in rows {
        let (ours, it) = (&row["ours"], &row["peers"]["it"]);
        that(ours["seconds"].as_array().unwrap().len() == 3 && it["seconds"].as_array().unwrap().len() == 3, &run)?;
        // The medians and the ratio are those of the seconds beside them.
        let mut ratios: Vec<f64> = (0..3)
            .map(|pair| it["seconds"][pair].as_f64().unwrap() / ours["seconds"][pair].as_f64().unwrap())
            .collect();
        ratios.sort_by(f64::total_cmp);
        for (said, ratio) in [ratios[1], ratios[0], ratios[2]].into_iter().enumerate() {
            that((it["ratio"][said].as_f64().unwrap() / ratio - 1.0).abs() < 1e-9, &run)?;
        }
        that(it["difference"] == 0.0 && row["error"].is_null() && row["share"].is_null(), &run)?;
        that(row["targets"].as_array().unwrap().iter().all(|target| target["met"] == true), &run)?;
        if cfg!(target_os = "linux") {
            let memory = ours["peak_bytes"].as_f64().unwrap() / 1000.0;
            that(it["memory"].as_f64() == Some(memory) && memory > 0.0, &run)?;
        }
    }
    that(rows[1]["ours"]["prepared"] == "weights packed", &run)
}

fn a_missed_target() -> Result<(), Failed> {
    let table = TABLE.replace("it = 1e-9, absent", "it = 1e9, absent");
    let run = self::run(&table, &["--against", "it", "--impl", &peer("nothing"), "--threads", "1"]);
    that(run.code == 1 && run.stderr.is_empty(), &run)?;
    that(run.stdout.contains("1000000000.00x it MISSED") && run.stdout.contains("2 of 3 targets met"), &run)?;
    let met: Vec<_> = (0..2).map(|row| &run.record["rows"][row]["targets"][0]["met"]).collect();
    that(met == [false, true], &run)?;
    // The same table without the peer asks nothing.
    let run = self::run(&table, &["--threads", "1"]);
    that(run.code == 0 && run.stdout.contains("0 of 0 targets met") && !run.stdout.contains("it/samebits"), &run)
}

fn shares() -> Result<(), Failed> {
    let table = TABLE.replace("at_least = { it = 1e-9 }", "share_of = \"read\"\nshare = 1e-9");
    let run = self::run(&table, &["--filter", "gemm", "--threads", "1", "--pairs", "1"]);
    that(run.code == 0 && run.stdout.contains("% of read") && run.stdout.contains("limits on 1 thread: read "), &run)?;
    let (row, limit) = (&run.record["rows"][0], &run.record["limits"][0]);
    let rate = row["bytes"].as_f64().unwrap() / row["ours"]["median"].as_f64().unwrap();
    let share = rate / limit["per_second"][0].as_f64().unwrap();
    that(run.record["rows"].as_array().unwrap().len() == 1 && limit["limit"] == "read", &run)?;
    that((row["share"][0].as_f64().unwrap() / share - 1.0).abs() < 1e-9, &run)?;
    let table = table.replace("share = 1e-9", "share = 1e9");
    let run = self::run(&table, &["--filter", "gemm", "--threads", "1", "--pairs", "1"]);
    that(run.code == 1 && run.stdout.contains("% of read MISSED"), &run)?;
    // The peak is that of the instruction set; plain Rust has none.
    let table = table.replace("share_of = \"read\"", "share_of = \"peak\"");
    let run = self::run(&table, &["--filter", "gemm", "--threads", "1", "--pairs", "1", "--isa", "scalar"]);
    that(run.record["limits"].as_array().unwrap().is_empty() && run.record["rows"][0]["share"].is_null(), &run)?;
    that(run.code == 1 && run.stdout.contains("% of peak MISSED") && !run.stdout.contains("limits on"), &run)
}

/// A peer gets the environment that the table has for the instruction set of `--isa`, whoever gives its command. The
/// report says who is held to it and who is not.
fn peers_are_held() -> Result<(), Failed> {
    let held = peer("held");
    let command = held.strip_prefix("it=").unwrap();
    let table = format!("{TABLE}[peer.it]\ncommand = \"{command}\"\nisa.scalar = {{ {HELD} = \"scalar\" }}\n");
    let free = peer("nothing").replacen("it=", "free=", 1);
    let both = ["--against", "it", "--impl", &held, "--against", "free", "--impl", &free, "--threads", "1"];
    let run = self::run(&table, &[&both[..], &["--isa", "scalar"]].concat());
    that(run.code == 0 && run.stderr.is_empty(), &run)?;
    for line in [
        &format!("held to scalar: samebits (--isa scalar), it ({HELD}=scalar)"),
        "free is not held to scalar: the table has no isa.scalar in [peer.free]",
    ] {
        let said = |text: &str| text.lines().filter(|l| l.trim_end() == line).count();
        that(said(&run.stdout) == 1 && said(&run.page) == 1, &run)?;
    }
    let env = |run: &Run, program: usize| run.record["programs"][program]["env"].clone();
    that(run.record["held_to"] == "scalar" && env(&run, 1) == serde_json::json!({ HELD: "scalar" }), &run)?;
    that(env(&run, 0).is_null() && env(&run, 2).is_null(), &run)?;
    // The same where the table has the command, which runs in the repository.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the repository");
    let run = run_in(root, &table, &["--against", "it", "--threads", "1", "--isa", "scalar"]);
    that(run.code == 0 && env(&run, 1) == serde_json::json!({ HELD: "scalar" }), &run)?;
    // Another instruction set, or none, does not set it.
    let other = table.replace("isa.scalar", "isa.avx2");
    for (table, more) in [(&other, &["--isa", "scalar"][..]), (&table, &[])] {
        let run = self::run(table, &[&both[..], more].concat());
        that(run.code == 2 && run.stderr.contains("exit status: 4") && env(&run, 1).is_null(), &run)?;
        that(run.stdout.contains("it is not held to scalar") != more.is_empty(), &run)?;
        that(
            run.stdout.contains("held to") != more.is_empty() && run.page.contains("held to") != more.is_empty(),
            &run,
        )?;
        that(run.record["held_to"].is_null() == more.is_empty(), &run)?;
    }
    Ok(())
}

/// What a workload asks of an instruction set stands in place of what it asks of all.
fn asked_of_an_isa() -> Result<(), Failed> {
    let scalar = "scalar = { at_least = { it = 1e9 }, share_of = \"read\", share = 1e9 }\n";
    let table = TABLE.replacen("[[workload]]\nname = \"b", &format!("{scalar}[[workload]]\nname = \"b"), 1);
    let beside = ["--against", "it", "--impl", &peer("nothing"), "--threads", "1"];
    let run = self::run(&table, &[&beside[..], &["--isa", "scalar"]].concat());
    that(run.code == 1 && run.stdout.contains("1000000000.00x it MISSED, 100000000000% of read MISSED"), &run)?;
    that(run.stdout.contains("2 of 4 targets met") && !run.stdout.contains(" 0.00x it MISSED"), &run)?;
    let workload = &run.record["rows"][0]["workload"];
    that(workload["at_least"] == serde_json::json!({ "it": 1e9 }) && workload["scalar"].is_null(), &run)?;
    // Not forced, it is that of the best one.
    let run = self::run(&table, &beside);
    that(run.code == i32::from(Isa::best() == Isa::Scalar), &run)
}

fn what_is_not_offered() -> Result<(), Failed> {
    let run = run(TABLE, &["--against", "it", "--impl", &peer("unsupported"), "--threads", "1"]);
    that(run.code == 1 && run.stdout.contains("unsupported") && run.stdout.contains("0.00x it MISSED"), &run)?;
    let row = &run.record["rows"][0];
    that(row["unsupported"]["it"] == "not this one; ever" && row["error"].is_null(), &run)?;
    that(row["ours"].is_object() && row["targets"][0]["got"].is_null(), &run)?;
    // An op whose inputs are known, on an instruction set that cannot be had, is not ours to offer.
    let lacking = Isa::all().find(|isa| !isa.available());
    let Some(isa) = lacking else { return Ok(()) };
    let output = measure(&["--workloads", "--isa", isa.name(), "--filter", "gemm/1x"]);
    let stderr = String::from_utf8_lossy(&output.stderr).to_string();
    if output.status.code() != Some(2) || !stderr.contains("lacks") || stderr.lines().count() != 1 {
        return Err(stderr.into());
    }
    Ok(())
}

/// The row says what went wrong, and the next one is timed all the same.
fn wrong_peer(wrong: &str, parts: &[&str]) -> Result<(), Failed> {
    let run = run(TABLE, &["--against", "it", "--impl", &peer(wrong), "--threads", "1", "--timeout", "1"]);
    that(run.code == 2 && run.stderr.lines().count() == 1, &run)?;
    let (row, next) = (&run.record["rows"][0], &run.record["rows"][1]);
    let reason = row["error"]["reason"].as_str().unwrap_or_default();
    for part in parts {
        that(reason.contains(part) && run.stderr.contains(part) && run.stdout.contains(part), &run)?;
    }
    that(
        row["error"]["side"] == "it" && run.stderr.contains("1 of 2 rows") && run.stdout.contains("ERROR it: "),
        &run,
    )?;
    that(next["error"].is_null() && next["peers"]["it"]["ratio"].is_array(), &run)
}

fn does_not_start() -> Result<(), Failed> {
    let mut commands: Vec<(&[&str], &[&str])> = vec![
        (&["--impl", "it=no-such-program-anywhere"], &["samebits: it: it ended without an answer", "not found"]),
        (&["--impl", "it=true"], &["it: it ended without an answer (exit status: 0)"]),
        (&["--impl", "it=cat"], &["it: metadata `status`: `` is not ok"]),
        (&["--impl", "it=sleep 60", "--timeout", "0.3"], &["it: no answer within 0.3 s"]),
    ];
    // Named by the table, and nothing tells where the repository is.
    commands
        .push((&["--against", "absent"], &["--against absent: run this in the repository", "--impl absent=COMMAND"]));
    for (more, parts) in commands {
        let mut args = vec!["--threads", "1"];
        if more[0] == "--impl" {
            args.extend(["--against", "it"]);
        }
        let run = run(TABLE, &[&args[..], more].concat());
        that(run.code == 2 && run.stdout.is_empty() && run.stderr.lines().count() == 1, &run)?;
        for part in parts {
            that(run.stderr.contains(part), &run)?;
        }
        that(run.record.is_null(), &run)?;
    }
    Ok(())
}

fn wrong_command_lines() -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    let wrong = dir.path().join("wrong.toml");
    std::fs::write(&wrong, TABLE.replace("op = \"gemm\"", "op = \"gemm\"\ncolour = 1"))?;
    let sse9 = dir.path().join("sse9.toml");
    std::fs::write(&sse9, format!("{TABLE}[peer.it]\ncommand = \"true\"\nisa.sse9 = {{ A = \"b\" }}"))?;
    let asked = dir.path().join("asked.toml");
    std::fs::write(&asked, TABLE.replace("op = \"gemm\"", "op = \"gemm\"\navx2 = { share = 0.5 }"))?;
    let (sse9, asked) = (sse9.to_str().unwrap(), asked.to_str().unwrap());
    let (wrong, out) = (wrong.to_str().unwrap(), dir.path().join("out"));
    let lines: &[(&[&str], &[&str])] = &[
        (&[], &["--op"]),
        (&["--op", "gemm", "--workloads"], &["--op", "--workloads"]),
        (&["--op", "gemm", "--filter", "x"], &["--op", "--filter"]),
        (&["--op", "gemm", "--threads", "1,2"], &["--threads: give one number"]),
        (&["--op", "gemm", "--param", "M=1"], &["gemm needs --param K=N"]),
        (&["--op", "fft"], &["--op fft: not an op; `samebits schema` shows them"]),
        (&["--op", "chain"], &["no inputs are made for `chain`; use one of gemm"]),
        (&["--op", "softmax", "--param", "K=1"], &["--param K: softmax has no such parameter; it has R, N"]),
        (&["--op", "gemm", "--param", "M=0"], &["--param M=0: an extent is at least 1"]),
        (&["--op", "gemm", "--repeat", "0"], &["--repeat 0: use a whole number from 1 to 1000000"]),
        (&["--workloads", "/no/such.toml"], &["/no/such.toml: No such file"]),
        (&["--workloads", wrong], &["wrong.toml: line 13: unknown field `colour`"]),
        (
            &["--workloads", sse9],
            &["sse9.toml: peer.it.isa.sse9: unknown isa `sse9`; use scalar, avx2, avx512 or avx512bf16"],
        ),
        (&["--workloads", asked], &["asked.toml: workload `b/gemm`: avx2.share: say of what, share_of = "]),
        (&["--workloads", "--filter", "nothing-like-it"], &["--filter nothing-like-it", "gemm/2048x2048x2048"]),
        (&["--workloads", "--threads", "0"], &["--threads: threads is 0; use 1 to 1024"]),
        (&["--workloads", "--pairs", "0"], &["--pairs 0: use 1 to 1000"]),
        (&["--workloads", "--timeout", "0"], &["--timeout 0: use 0.001 to 86400"]),
        (&["--workloads", "--timeout", "nan"], &["--timeout NaN"]),
        (
            &["--workloads", "--against", "tensorflow"],
            &["--against tensorflow: the table has torch", "--impl tensorflow="],
        ),
        (&["--workloads", "--against", "torch"], &["--against torch: run this in the repository"]),
        (&["--workloads", "--against", "samebits"], &["this program's own name"]),
        (&["--workloads", "--impl", "it=true"], &["--impl it: nothing compares with it; add --against it"]),
        (&["--workloads", "--against", "it", "--impl", "it"], &["--impl it: write NAME=COMMAND"]),
        (&["--workloads", "--against", "a", "--impl", "a=b", "--impl", "a=c"], &["--impl a: given twice"]),
        (&["--workloads", "--against", "a", "--against", "a", "--impl", "a=b"], &["--against a: given twice"]),
    ];
    for (args, parts) in lines {
        let out = out.to_str().unwrap();
        let with_out = if args.contains(&"--workloads") { &["--out", out][..] } else { &[] };
        let output = measure(&[*args, with_out].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        let one_line = stderr.starts_with("samebits: ") && stderr.lines().count() == 1;
        if output.status.code() != Some(2) || !one_line || !output.stdout.is_empty() {
            return Err(format!("{args:?}: {:?} {stderr}", output.status.code()).into());
        }
        if let Some(part) = parts.iter().find(|part| !stderr.contains(**part)) {
            return Err(format!("{args:?}: `{part}` is not in: {stderr}").into());
        }
    }
    let kept = out.join("measure.json").exists();
    if kept { Err("a wrong command line left a record".into()) } else { Ok(()) }
}

/// `samebits answer` gives the same bits with and without `repeat`, and refuses a `repeat` that is none.
fn answers_with_a_clock() -> Result<(), Failed> {
    let values = |n: usize| (0..n).map(|i| (i as f32 - 3.0) / 7.0).collect();
    let case = |repeat: Option<&str>| Case {
        name: String::new(),
        op: "gemm".into(),
        out: DType::Fp32,
        params: repeat.map(|repeat| ("repeat".into(), repeat.into())).into_iter().collect(),
        inputs: BTreeMap::from([
            ("x".into(), Tensor::fp32(&[3, 50], values(150))),
            ("w".into(), Tensor::fp32(&[20, 50], values(1000))),
            ("bias".into(), Tensor::fp32(&[20], values(20))),
        ]),
        config: Config::default(),
    };
    let mut child = Command::new(env!("CARGO_BIN_EXE_samebits-tested"))
        .args(["answer", "--threads", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().expect("stdin is piped");
    for repeat in [None, Some("4"), Some("0"), Some("1000001"), Some("two")] {
        write_frame(&mut stdin, &encode_request(&case(repeat)))?;
    }
    drop(stdin);
    let mut bytes = Vec::new();
    child.stdout.take().expect("stdout is piped").read_to_end(&mut bytes)?;
    if !child.wait()?.success() {
        return Err("the program failed".into());
    }
    let mut pipe = bytes.as_slice();
    let mut next = || File::decode(&read_frame(&mut pipe).unwrap().expect("an answer")).unwrap();
    let (plain, timed) = (next(), next());
    let seconds: Vec<f64> = serde_json::from_str(&timed.metadata["seconds"])?;
    assert!(plain.tensors["y"].same_bits(&timed.tensors["y"]), "the clock moved a bit");
    assert!(!plain.metadata.contains_key("seconds") && seconds.len() == 4 && seconds.iter().all(|s| *s > 0.0));
    assert_eq!(
        (timed.metadata["prepared"].as_str(), &timed.metadata["kernel"]),
        ("weights packed", &plain.metadata["kernel"])
    );
    for repeat in ["0", "1000001", "two"] {
        let refused = next();
        assert_eq!(refused.metadata["status"], "error");
        assert!(
            refused.metadata["reason"].contains(&format!("metadata `repeat`: `{repeat}` is not a whole number from 1"))
        );
        assert!(refused.tensors.is_empty());
    }
    Ok(())
}
