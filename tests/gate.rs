//! The contract as a gate: waivers, comparison of runs, goldens of others, annotations, and the script of the action.

use samebits_contract::case::Answer;
use samebits_contract::record::Record;
use samebits_contract::table::today;
use samebits_contract::verdict::Verdict;
use samebits_contract::wire::{decode_request, encode_answer, read_frame, write_frame};
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_ops::Cpu;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The argument that makes this test a program which answers as ours do, and says nothing of threads and budget.
const SILENT: &str = "--answer-silently";

fn main() {
    if std::env::args().nth(1).is_some_and(|asked| asked == SILENT) {
        return answer_silently();
    }
    samebits_mutants::run_tests(&[
        ("what_is_not_said_to_vary_is_not_judged", what_is_not_said_to_vary_is_not_judged),
        ("the_page_on_the_gate", the_page_on_the_gate),
        ("nothing_is_asked_that_is_not_required", nothing_is_asked_that_is_not_required),
        ("a_red_record_says_how_to_ask_it_again", a_red_record_says_how_to_ask_it_again),
        ("what_matches_nothing_is_named", what_matches_nothing_is_named),
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
    list_with(folder, "")
}

/// The same, with `more` in each entry.
fn list_with(folder: &Path, more: &str) -> PathBuf {
    let ours = [env!("CARGO_BIN_EXE_samebits-tested"), "answer"].map(String::from);
    let mut list = String::new();
    for (name, command) in [("right", &ours[..]), ("wrong", &samebits_mutants::command("split_by_batch"))] {
        list += &format!("[[implementation]]\nname = \"{name}\"\nabout = \"ours\"\ncommand = {command:?}\n{more}\n");
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

/// As docs/GATE.md has it, from an empty folder: red, one record asked again, mended, green. Without python3, which the example
/// is written in, only the page is looked at.
fn the_page_on_the_gate() {
    let folder = tempfile::tempdir().unwrap();
    let example = repository().join("examples/gate");
    let read = |path: PathBuf| std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let page = read(repository().join("docs/GATE.md"));
    // The list on the page is the file, but for comments.
    let list = read(example.join("impls.toml"));
    let (_, shown) = page.split_once("```toml\n# samebits/impls.toml").expect("the page shows the list");
    let shown = shown.split_once('\n').and_then(|(_, rest)| rest.split_once("```")).expect("the list ends").0;
    let plain = |text: &str| {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or("").trim().to_string());
        lines.filter(|line| !line.is_empty()).collect::<Vec<_>>()
    };
    assert_eq!(plain(shown), plain(&list));
    let line = page
        .lines()
        .find(|line| line.starts_with("    samebits check --impls "))
        .expect("the page has the command")
        .trim();
    if !Command::new("python3").arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success()) {
        eprintln!("python3 is not installed");
        return;
    }
    std::fs::create_dir(folder.path().join("samebits")).unwrap();
    let program = folder.path().join("samebits/answer.py");
    let source = read(example.join("answer.py"));
    std::fs::write(&program, &source).unwrap();
    std::fs::write(folder.path().join("samebits/impls.toml"), &list).unwrap();
    let run = |line: &str| {
        let line = line.replacen("samebits", env!("CARGO_BIN_EXE_samebits-tested"), 1);
        Command::new("bash").args(["-c", &line]).current_dir(folder.path()).output().expect("bash runs")
    };
    let red = run(line);
    assert_eq!(red.status.code(), Some(1), "{}", said(&red));
    let table = said(&red);
    let again = table
        .lines()
        .find_map(|line| line.trim().strip_prefix("again: ").filter(|line| line.contains("batch=")))
        .unwrap();
    assert!(page.contains(&format!("again: {again}\n")), "the page has another line than {again}");
    assert_eq!(run(again).status.code(), Some(1), "{again}");
    std::fs::write(&program, source.replace("sum_of_squares = broken", "sum_of_squares = mended")).unwrap();
    assert_eq!(run(again).status.code(), Some(0), "{again}");
    let green = run(line);
    assert_eq!(green.status.code(), Some(0), "{}", said(&green));
    let asked = records(&folder.path().join("report"));
    let vectors =
        asked.iter().filter(|record| record.case.contains("/vector_") && record.verdict == Verdict::Pass).count();
    assert!(vectors > 0, "no vector was judged");
}

/// In an empty folder outside of the repository, as the page on the gate has it: no other op, no other dtype, no model.
fn nothing_is_asked_that_is_not_required() {
    let folder = tempfile::tempdir().unwrap();
    let check = |more: &str, arguments: &[&str]| {
        list_with(folder.path(), more);
        let output = Command::new(env!("CARGO_BIN_EXE_samebits-tested"))
            .args(["check", "--impls", "impls.toml", "--impl", "right", "--slice", "quick", "--out", "run"])
            .args(arguments)
            .current_dir(folder.path())
            .output()
            .expect("samebits runs");
        (output.status.code(), said(&output))
    };
    let required = "judgments = [\"accuracy\", \"invariance\"]\n[[implementation.required]]\nops = [\"add\", \"silu_mul\"]\n\
        dtypes = [\"bf16\"]\nouts = [\"bf16\", \"fp32\"]";
    let (code, text) = check(required, &[]);
    assert_eq!(code, Some(0), "{text}");
    let all = records(&folder.path().join("run"));
    let asked: BTreeSet<(&str, &str, &str)> =
        all.iter().map(|r| (r.op.as_str(), r.dtype.name(), r.out.name())).collect();
    let named = ["add", "silu_mul"].map(|op| [(op, "bf16", "bf16"), (op, "bf16", "fp32")]);
    assert_eq!(asked, named.concat().into_iter().collect());
    assert!(
        text.contains("note: right: asked what `required` names (add, silu_mul: bf16 -> bf16 or fp32); "),
        "{text}"
    );
    assert!(!text.contains("narrow outputs alone"), "silu_mul and add have no sum: {text}");
    // What rounding hides of sums is said, in all that people read.
    let narrow = "[[implementation.required]]\nops = [\"rms_norm\"]\ndtypes = [\"bf16\"]\nouts = [\"bf16\"]";
    let (code, text) =
        check(&format!("judgments = [\"accuracy\", \"invariance\"]\n{narrow}"), &["--judgment", "invariance"]);
    assert_eq!(code, Some(0), "{text}");
    let hidden = "right: narrow outputs alone of rms_norm (bf16): ";
    assert!(text.contains(&format!("\nnote: {hidden}")) && text.contains("it leaves none unseen"), "{text}");
    let read = |name: &str| std::fs::read_to_string(folder.path().join("run").join(name)).unwrap();
    assert!(read("summary.md").contains(&format!("\nNote: {}", hidden.replace('_', "\\_"))));
    assert!(read("report.html").contains(&format!("Note: {hidden}")));
    for (stems, part) in [("stems = [\"smal\"]", "stem `smal`"), ("stems = [\"!smal\"]", "stem `!smal`")] {
        let (code, text) = check(&format!("{required}\n{stems}"), &[]);
        assert!(code == Some(2) && text.contains(part) && text.lines().count() == 1, "{text}");
    }
}

fn answer_silently() {
    let ours = CpuImplementation::new(Cpu::best());
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    while let Some(frame) = read_frame(&mut input).unwrap() {
        let mut case = decode_request(&frame).unwrap();
        let id = case.config.id.take();
        let answer = Answer { id, threads: None, budget: None, ..ours.run(&case) };
        write_frame(&mut output, &encode_answer(&answer)).unwrap();
    }
}

/// A program that takes no notice of threads and budget has the same bits under all of them, and has shown nothing.
fn what_is_not_said_to_vary_is_not_judged() {
    let folder = tempfile::tempdir().unwrap();
    let list = list_with(folder.path(), "threads = [1, 2]");
    let text_of_list = std::fs::read_to_string(&list).unwrap();
    let silent = [std::env::current_exe().unwrap().to_str().unwrap(), SILENT].map(String::from);
    let entry =
        format!("[[implementation]]\nname = \"silent\"\nabout = \"ours\"\ncommand = {silent:?}\nthreads = [1, 2]\n");
    std::fs::write(&list, text_of_list + &entry).unwrap();
    let verdicts = |name: &str| {
        let out = folder.path().join("run");
        let args =
            ["check", "--impls", text(&list), "--impl", name, "--out", text(&out), "--slice", "quick", "--op", "gemm"];
        let more = ["--dtype", "fp32", "--axis", "threads", "--axis", "budget", "--judgment", "invariance"];
        let output = samebits(&[&args[..], &more].concat());
        let all = records(&out);
        assert!(all.iter().any(|r| r.axis.as_deref() == Some("threads")) && all.len() > 4, "{}", said(&output));
        all
    };
    assert!(verdicts("right").iter().all(|record| record.verdict == Verdict::Pass));
    for record in verdicts("silent") {
        let axis = record.axis.clone().unwrap();
        let Verdict::Unsupported { reason } = &record.verdict else { panic!("{axis}: {:?}", record.verdict) };
        assert!(reason.contains(&format!("(`{axis}`)")), "{reason}");
    }
}

/// The command that a record carries gives the same record, and its setting is taken by `case`.
fn a_red_record_says_how_to_ask_it_again() {
    let folder = tempfile::tempdir().unwrap();
    // A name that a shell would cut in two.
    std::fs::create_dir(folder.path().join("a list")).unwrap();
    list_with(&folder.path().join("a list"), "threads = [2]");
    let program = env!("CARGO_BIN_EXE_samebits-tested");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(folder.path()).stdin(Stdio::null()).output().expect("samebits runs")
    };
    let impls = ["check", "--impls", "a list/impls.toml", "--impl", "wrong", "--out", "run"];
    let selection = ["--slice", "quick", "--op", "gemm", "--dtype", "bf16", "--seed", "3"];
    let output = run(&[&impls[..], &selection].concat());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let all = records(&folder.path().join("run"));
    assert!(all.iter().all(|record| record.again.is_some() == record.verdict.is_red()));
    let red: Vec<&Record> = all.iter().filter(|record| record.verdict.is_red()).collect();
    let axes: BTreeSet<Option<&str>> = red.iter().map(|record| record.axis.as_deref()).collect();
    assert!(axes.contains(&Some("batch")) && axes.contains(&None), "{axes:?}");
    let table = said(&output);
    let junit = std::fs::read_to_string(folder.path().join("run/junit.xml")).unwrap();
    let page = std::fs::read_to_string(folder.path().join("run/report.html")).unwrap();
    let annotated = said(&run(&["report", "run", "--annotate"]));
    for (axis, record) in axes.iter().map(|axis| (axis, red.iter().find(|r| r.axis.as_deref() == *axis).unwrap())) {
        let again = record.again.as_ref().unwrap();
        assert!(
            again.starts_with(
                "samebits check --impls 'a list/impls.toml' --impl wrong --slice quick --seed 3 --case gemm/"
            ),
            "{again}"
        );
        let again_in_xml = again.replace('\'', "&apos;");
        assert!(junit.contains(again) || junit.contains(&again_in_xml), "{again}");
        assert!(page.contains(again), "{again}");
        // As a shell reads it.
        let shell = Command::new("bash")
            .args(["-c", &again.replacen("samebits", program, 1)])
            .current_dir(folder.path())
            .output();
        let output = shell.expect("bash runs");
        assert_eq!(output.status.code(), Some(1), "{again}: {}", said(&output));
        let found = records(&folder.path().join("samebits-again"));
        let [found] = &found[..] else { panic!("{again}: {} records", found.len()) };
        let setting = record.setting.as_ref();
        let evidence = |record: &Record| match &record.verdict {
            Verdict::Fail(evidence) => (evidence.found_bits.clone(), evidence.index, evidence.count),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            (evidence(found), found.setting.as_ref(), found.axis.as_ref()),
            (evidence(record), setting, record.axis.as_ref())
        );
        if let (Some(axis), Some(setting)) = (axis, setting) {
            assert!(again.contains(&format!("--axis {axis}={setting}")), "{again}");
            let output = run(&["case", &record.case, "--seed", "3", "--text", "--axis", &format!("{axis}={setting}")]);
            assert!(output.status.code() == Some(0) && said(&output).contains("tensor x bf16"), "{}", said(&output));
            let listed = run(&["case", &record.case, "--axis", axis]);
            assert!(said(&listed).lines().any(|line| line == format!("{axis}={setting}")), "{}", said(&listed));
        }
    }
    let first = red[0].again.as_ref().unwrap();
    assert!(table.contains(&format!("again: {first}")) && annotated.contains(&format!("again: {first}")), "{table}");
    for (axis, part) in [("batch=agin:3", "alone:0"), ("bacth=again:3", "use one of batch")] {
        let output = run(&[&impls[..], &selection, &["--axis", axis]].concat());
        assert!(output.status.code() == Some(2) && said(&output).contains(part), "{}", said(&output));
    }
    let unknown = run(&["case", &red[0].case, "--axis", "batch=agin:3"]);
    assert!(unknown.status.code() == Some(2) && said(&unknown).contains("alone:0"), "{}", said(&unknown));
}

/// A selection of which nothing is left names what left it out.
fn what_matches_nothing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let required = "judgments = [\"accuracy\"]\n[[implementation.required]]\nops = [\"gemm\"]\nouts = [\"bf16\"]";
    let list = list_with(folder.path(), required);
    for (arguments, part) in [
        (
            &["--judgment", "golden"][..],
            "`judgments` of its entry leaves out golden; it has accuracy; with --goldens DIR",
        ),
        (&["--op", "add"], "`required` of its entry leaves out all of the selection; it names gemm: any dtype -> bf16"),
        (&["--slice", "quick", "--case", "gemm/bf16/square-normal-bf16"], "add --slice exhaustive"),
        (&["--op", "add", "--case", "gemm/*"], "--op, --dtype and --case"),
        (&["--case", "gemm/bf16/small-normal-bf16", "--shard", "2/2"], "--shard 2/2"),
    ] {
        let out = folder.path().join("run");
        let args = ["check", "--impls", text(&list), "--impl", "right", "--out", text(&out)];
        let output = samebits(&[&args[..], arguments].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.lines().count() == 1 && stderr.contains(part), "{arguments:?}: {stderr}");
    }
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
    assert!(!text_said.contains("the waiver"), "{text_said}");
    // Its end is near: the run says so.
    let (code, _, text_said) = run("wrong", &waiver("gemm/*", "batch", &today()));
    let summary = std::fs::read_to_string(folder.path().join("run/summary.md")).unwrap();
    let page = std::fs::read_to_string(folder.path().join("run/report.html")).unwrap();
    let words = format!("the waiver of a.person ends on {}, today: known", today());
    assert_eq!(code, Some(0), "{text_said}");
    assert!([&text_said, &summary, &page].iter().all(|text| text.contains(&words)), "{text_said}");
    // One that covers something else leaves the failure red.
    let (code, ..) = run("wrong", &waiver("gemm/fp32/small-normal-bf16", "batch", "2999-12-31"));
    assert_eq!(code, Some(1));
    // After its last day it covers nothing, and the failure names it.
    let (code, all, _) = run("wrong", &waiver("gemm/*", "batch", "2020-01-31"));
    assert_eq!(code, Some(1));
    let named =
        |r: &Record| matches!(&r.verdict, Verdict::Fail(e) if e.message.contains("a.person expired on 2020-01-31"));
    assert!(all.iter().any(named), "the failure does not say whose waiver expired");
    // What nothing needs is red, but for a waiver that covers more than was asked, which that may need.
    let (code, all, text_said) = run("right", &waiver("gemm/*", "batch", "2999-12-31"));
    assert_eq!(code, Some(0), "{text_said}");
    assert!(all.iter().all(|r| !matches!(r.verdict, Verdict::StaleWaiver { .. })));
    let (code, all, _) = run("right", &waiver("gemm/fp32/*", "batch", "2999-12-31"));
    assert_eq!(code, Some(1));
    assert!(all.iter().any(|r| matches!(r.verdict, Verdict::StaleWaiver { .. })));
    // Parts joined: of a part of the slice nothing is stale, of all of it is what nothing needs.
    let path = waiver("gemm/fp32/*", "batch", "2999-12-31");
    let gemm = "judgments = [\"invariance\"]\n[[implementation.required]]\nops = [\"gemm\"]\ndtypes = [\"fp32\"]";
    let list = list_with(folder.path(), gemm);
    for (selection, code) in [(&["--case", "gemm/fp32/small*"][..], 0), (&[], 1)] {
        let parts = ["1/2", "2/2"].map(|shard| {
            let out = folder.path().join(shard.replace('/', "-of-"));
            let _ = std::fs::remove_dir_all(&out);
            let args =
                ["check", "--impls", text(&list), "--impl", "right", "--slice", "quick", "--waivers", text(&path)];
            let part = samebits(&[&args[..], selection, &["--shard", shard, "--out", text(&out)]].concat());
            assert_eq!(part.status.code(), Some(0), "{}", said(&part));
            out
        });
        let out = folder.path().join("joined");
        let _ = std::fs::remove_dir_all(&out);
        let args = ["merge", "--impls", text(&list), "--waivers", text(&path), "--out", text(&out)];
        let joined = samebits(&[&args[..], &[text(&parts[0]), text(&parts[1])]].concat());
        assert_eq!(joined.status.code(), Some(code), "{selection:?}: {}", said(&joined));
        let stale = records(&out).iter().any(|r| matches!(r.verdict, Verdict::StaleWaiver { .. }));
        assert_eq!(stale, code == 1, "{selection:?}");
    }
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
    assert!(said(&worse).contains("\nturned red, or no longer judged ("), "{}", said(&worse));
    let better = samebits(&["cmp", text(&wrong), text(&right)]);
    assert!(better.status.code() == Some(0) && said(&better).contains("fail -> pass"), "{}", said(&better));
    assert!(said(&better).contains("\nturned green (") && said(&better).contains("\nNOT WORSE: "), "{}", said(&better));
    // A share of correct roundings that moved within its bound stops nothing, but for --strict.
    let accuracy = ["--op", "gemm", "--dtype", "bf16", "--slice", "quick", "--judgment", "accuracy"];
    let list = list(folder.path());
    for (seed, out) in [("0", "one"), ("1", "two")] {
        let out = folder.path().join(out);
        let args = ["check", "--impls", text(&list), "--impl", "right", "--seed", seed, "--out", text(&out)];
        assert_eq!(samebits(&[&args[..], &accuracy].concat()).status.code(), Some(0));
    }
    let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
    let moved = samebits(&["diff", text(&one), text(&two)]);
    assert!(moved.status.code() == Some(0) && said(&moved).contains("\nmoved within its bound"), "{}", said(&moved));
    assert_eq!(samebits(&["diff", text(&one), text(&two), "--strict"]).status.code(), Some(1));
    let json = samebits(&["diff", text(&right), text(&wrong), "--json"]);
    let lines = String::from_utf8(json.stdout).unwrap();
    assert!(lines.contains("\"kind\":\"turned_red\"") && !lines.contains("turned_green"), "{lines}");
    for line in lines.lines() {
        let change: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(change["name"].is_string() && change["worse"].is_boolean());
    }
}

fn goldens_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let (list, store) = (list(folder.path()), folder.path().join("store"));
    let record = |name: &str, store: &Path, reason: &str, more: &[&str]| {
        let args = [
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
        ];
        samebits(&[&args[..], more].concat())
    };
    let output = record("wrong", &store, "before the upgrade", &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let listed = samebits(&["goldens", "ls", "--store", text(&store)]);
    assert!(said(&listed).contains("gemm/bf16/small-normal-bf16") && said(&listed).contains("before the upgrade"));
    let golden = |name: &str| {
        let out = folder.path().join("golden");
        let args = ["check", "--impls", text(&list), "--impl", name, "--goldens", text(&store), "--out", text(&out)];
        samebits(&[&args[..], &["--slice", "quick", "--op", "gemm", "--judgment", "golden"]].concat()).status.code()
    };
    assert_eq!((golden("wrong"), golden("right")), (Some(0), Some(1)), "each against the outputs of `wrong`");
    // Also of an entry that does not claim the canonical bits.
    list_with(folder.path(), "judgments = [\"accuracy\", \"invariance\"]");
    assert_eq!((golden("wrong"), golden("right")), (Some(0), Some(1)), "golden is not among its `judgments`");
    // What would be overwritten is listed, and written with --replace alone.
    let refused = record("right", &store, "after the upgrade", &[]);
    assert!(refused.status.code() == Some(2) && said(&refused).contains("--replace"), "{}", said(&refused));
    assert!(said(&refused).starts_with("other bits  gemm/"), "{}", said(&refused));
    assert_eq!((golden("wrong"), golden("right")), (Some(0), Some(1)), "nothing was written");
    let replaced = record("right", &store, "after the upgrade", &["--replace"]);
    assert!(
        replaced.status.code() == Some(0) && said(&replaced).starts_with("other bits  gemm/"),
        "{}",
        said(&replaced)
    );
    assert_eq!((golden("wrong"), golden("right")), (Some(1), Some(0)));
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
    let own = record("wrong", &repository().join("goldens"), "no", &[]);
    assert!(own.status.code() == Some(2) && said(&own).contains("samebits bless"), "{}", said(&own));
    assert_eq!(samebits(&["goldens", "verify"]).status.code(), Some(0));
}

fn the_script_of_the_action() {
    let folder = tempfile::tempdir().unwrap();
    let list = list(folder.path());
    let summary = folder.path().join("summary");
    let gate = |name: &str, arguments: &str, merge: &str| {
        Command::new("bash")
            .arg(repository().join("ci/gate"))
            .env("MERGE", merge)
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
    let run = |name: &str, arguments: &str| gate(name, arguments, "");
    let right = run("right", &SELECTION.join(" "));
    assert!(right.status.code() == Some(0) && !said(&right).contains("::error"), "{}", said(&right));
    let wrong = run("wrong", &SELECTION.join(" "));
    assert!(
        wrong.status.code() == Some(1) && said(&wrong).contains("::error title=samebits%3A fail gemm/"),
        "{}",
        said(&wrong)
    );
    assert!(std::fs::read_to_string(&summary).unwrap().contains("gemm"));
    // Parts, each kept under a name of its own, and the whole.
    let whole = said(&wrong);
    for part in ["1/2", "2/2"] {
        let output = run("wrong", &format!("{} --shard {part}", SELECTION.join(" ")));
        assert!(output.status.code().is_some_and(|code| code <= 1), "{}", said(&output));
        std::fs::rename(folder.path().join("report"), folder.path().join(format!("part-{}", &part[..1]))).unwrap();
    }
    let joined =
        gate("wrong", "", &["part-1", "part-2"].map(|part| text(&folder.path().join(part)).to_string()).join(" "));
    let annotations =
        |text: &str| text.lines().filter(|line| line.starts_with("::")).map(String::from).collect::<Vec<_>>();
    assert_eq!((joined.status.code(), annotations(&said(&joined))), (Some(1), annotations(&whole)));
    let broken = run("nobody", "");
    assert!(broken.status.code() == Some(2) && said(&broken).contains("::error"), "{}", said(&broken));
}
