//! What is written goes where the user said: through links, into devices and pipes, and no place but a regular file is replaced.
//!
//! Devices are nodes of a temporary folder, never those of the machine.

use super::{assert_broken, checkpoint, samebits, text};
use samebits_contract::wire::File;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A device node `name` in `folder`, as /dev/full or /dev/null; `None`, said on stderr, where the system allows none.
fn device(folder: &Path, name: &str) -> Option<PathBuf> {
    let (path, minor) = (folder.join(name), if name.starts_with("full") { "7" } else { "3" });
    let made = Command::new("mknod").arg(&path).args(["c", "1", minor]).stderr(Stdio::null()).status();
    let opens = || fs::OpenOptions::new().write(true).open(&path).is_ok();
    if made.is_ok_and(|status| status.success()) && opens() {
        return Some(path);
    }
    let _ = fs::remove_file(&path);
    // Not println: a test that passes must be seen to have done less.
    // Not `eprintln!`, which a test that passes does not show.
    #[allow(clippy::explicit_write)]
    writeln!(std::io::stderr(), "SKIPPED: writing to a device node: none can be made here (mknod needs root)").unwrap();
    None
}

fn is_device(path: &Path) -> bool {
    fs::symlink_metadata(path).unwrap().file_type().is_char_device()
}

fn is_link(path: &Path) -> bool {
    fs::symlink_metadata(path).unwrap().is_symlink()
}

fn succeeds(output: &Output) -> &Output {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Runs the program. What a run says on stderr of its progress is left out.
fn run(args: &[String]) -> Output {
    without_progress(samebits(args, b""))
}

fn without_progress(mut output: Output) -> Output {
    let lines = output.stderr.split_inclusive(|&byte| byte == b'\n');
    output.stderr = lines.filter(|line| !line.starts_with(b"checking ")).collect::<Vec<_>>().concat();
    output
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| word.to_string()).collect()
}

/// The verbs that write one file where an option says: name, option, and the command line but for the option.
fn file_verbs(folder: &Path) -> Vec<(&'static str, Vec<String>)> {
    let model = checkpoint("qwen3-adder");
    let tokens = model.join("reference.safetensors");
    let prompts = folder.join("prompts.txt");
    fs::write(&prompts, "12+34=\n5+6=\n").unwrap();
    let forward = ["forward", "--model", text(&model), "--tokens", text(&tokens)];
    let logits = folder.join("logits");
    let dump = [&forward[..], &["--out", text(&logits)]].concat();
    let rollout = ["rollout", "--model", text(&model), "--prompts", text(&prompts), "--max-tokens", "4"];
    vec![("--out", words(&forward)), ("--dump", words(&dump)), ("--out", words(&rollout))]
}

/// The verb with its output at `out`.
fn at(verb: &(&str, Vec<String>), out: &Path) -> Vec<String> {
    [&verb.1[..], &[verb.0.to_string(), text(out).to_string()]].concat()
}

#[test]
fn files_are_written_through_links() {
    let folder = tempfile::tempdir().unwrap();
    for verb in &file_verbs(folder.path()) {
        let dir = tempfile::tempdir().unwrap();
        let (here, there) = (dir.path().join("here"), dir.path().join("there"));
        fs::create_dir(&here).unwrap();
        fs::create_dir(&there).unwrap();
        let plain = here.join("plain");
        succeeds(&run(&at(verb, &plain)));
        let bytes = fs::read(&plain).unwrap();
        assert!(bytes.len() > 100);

        // A file that is replaced keeps its permissions.
        fs::write(&plain, "old").unwrap();
        fs::set_permissions(&plain, fs::Permissions::from_mode(0o640)).unwrap();
        succeeds(&run(&at(verb, &plain)));
        assert!(fs::read(&plain).unwrap() == bytes, "{verb:?}");
        assert_eq!(fs::metadata(&plain).unwrap().permissions().mode() & 0o777, 0o640, "{verb:?}");

        let target = there.join("target");
        symlink("../there/target", here.join("relative")).unwrap();
        symlink(&target, here.join("absolute")).unwrap();
        symlink("relative", here.join("chain")).unwrap();
        symlink("../there", here.join("folder")).unwrap();
        for (link, dangles) in [
            ("relative", true),
            ("relative", false),
            ("absolute", true),
            ("chain", true),
            ("chain", false),
            ("folder/target", false),
        ] {
            match dangles {
                true => drop(fs::remove_file(&target)),
                false => fs::write(&target, "old").unwrap(),
            }
            succeeds(&run(&at(verb, &here.join(link))));
            assert!(fs::read(&target).unwrap() == bytes, "{link} of {verb:?}");
            assert!(fs::symlink_metadata(&target).unwrap().is_file());
        }
        assert!(["relative", "absolute", "chain", "folder"].iter().all(|link| is_link(&here.join(link))), "{verb:?}");
        let left = |folder: &Path| {
            let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(left(&here), ["absolute", "chain", "folder", "plain", "relative"]);
        assert_eq!(left(&there), ["target"]);

        symlink("gone/file", here.join("far")).unwrap();
        symlink("circle", here.join("circle")).unwrap();
        for (out, why) in [
            (here.clone(), "is a folder; name a file"),
            (here.join("folder"), "is a folder; name a file"),
            (here.join("far"), "gone is not a folder; create it first"),
            (here.join("circle"), "symbolic links"),
            (plain.join("file"), "Not a directory"),
        ] {
            assert_broken(&run(&at(verb, &out)), &[verb.0, text(&out), why]);
        }
    }
}

#[test]
fn files_go_straight_into_pipes_and_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    for verb in &file_verbs(folder.path()) {
        let dir = tempfile::tempdir().unwrap();
        let plain = dir.path().join("plain");
        succeeds(&run(&at(verb, &plain)));
        let bytes = fs::read(&plain).unwrap();

        let pipe = dir.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        symlink("pipe", dir.path().join("link")).unwrap();
        for name in ["pipe", "link"] {
            // A pipe that was replaced would be waited for forever.
            let mut reader = Command::new("timeout");
            let reader = reader.args(["60", "cat"]).arg(&pipe).stdout(Stdio::piped()).spawn().unwrap();
            let reader = std::thread::spawn(|| reader.wait_with_output().unwrap());
            let output = run(&at(verb, &dir.path().join(name)));
            let read = reader.join().unwrap();
            succeeds(&output);
            assert!(read.status.success() && read.stdout == bytes, "{name}: {verb:?}: {} bytes", read.stdout.len());
            assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo() && is_link(&dir.path().join("link")));
        }

        // A chain of links like the machine's own, which is not to be tried with.
        symlink("/proc/self/fd/1", dir.path().join("stdout")).unwrap();
        symlink("/proc/self/fd", dir.path().join("fd")).unwrap();
        for name in ["stdout", "fd/1"] {
            let out = dir.path().join(name);
            let output = run(&at(verb, &out));
            assert!(succeeds(&output).stdout == bytes, "{name}: {verb:?}: {} bytes", output.stdout.len());

            // Into a file it goes where the descriptor stands.
            let file = dir.path().join("file");
            fs::write(&file, "before\n").unwrap();
            let stdout = fs::OpenOptions::new().append(true).open(&file).unwrap();
            let status = program(&at(verb, &out)).stdout(stdout).status().unwrap();
            assert!(status.success());
            assert!(fs::read(&file).unwrap() == [b"before\n", &bytes[..]].concat(), "{name}: {verb:?}");

            let mut child = program(&at(verb, &out)).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            drop(child.stdout.take());
            assert_broken(&child.wait_with_output().unwrap(), &[text(&out), "Broken pipe"]);
        }
        assert!(is_link(&dir.path().join("stdout")));

        // Another descriptor of a file that has something.
        let file = dir.path().join("file");
        fs::write(&file, "before\n").unwrap();
        let script = "exec 3>>\"$0\" && exec \"$@\"";
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).arg(&file).arg(env!("CARGO_BIN_EXE_samebits-tested"));
        succeeds(&shell.args(at(verb, &dir.path().join("fd/3"))).stdin(Stdio::null()).output().unwrap());
        assert!(fs::read(&file).unwrap() == [b"before\n", &bytes[..]].concat(), "{verb:?}");
    }
}

fn program(args: &[String]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_samebits-tested"));
    command.args(args).stdin(Stdio::null());
    command
}

#[test]
fn devices_are_written_and_stay() {
    let folder = tempfile::tempdir().unwrap();
    let (Some(full), Some(null)) = (device(folder.path(), "full"), device(folder.path(), "null")) else { return };
    let link = folder.path().join("link");
    symlink("full", &link).unwrap();
    for verb in &file_verbs(folder.path()) {
        for out in [&full, &link] {
            assert_broken(&run(&at(verb, out)), &[text(out), "No space left on device"]);
        }
        succeeds(&run(&at(verb, &null)));
        assert!(is_device(&full) && is_device(&null) && is_link(&link), "{verb:?}");
    }
}

/// Arguments of a verb that writes to a path.
type Arguments = Box<dyn Fn(&Path) -> Vec<String>>;

/// A verb that writes a folder.
struct FolderVerb {
    name: &'static str,
    /// The command line for the folder.
    args: Arguments,
    /// Files that are only written.
    written: Vec<&'static str>,
    /// Files that it reads again.
    kept: Vec<&'static str>,
    /// What has to be in the folder before; the folder is then no place to be made.
    needs: Option<PathBuf>,
}

fn folder_verbs(dir: &Path) -> Vec<FolderVerb> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let root = text(&root).to_string();
    let one = "add/fp32/small-normal-fp32";
    let select =
        words(&["--slice", "quick", "--op", "add", "--dtype", "fp32", "--judgment", "golden", "--root", &root]);
    let check = |verb: &str, more: &[&str], out: &Path| {
        [words(&[verb, "--out", text(out)]), select.clone(), words(more)].concat()
    };
    let (parts, whole) = ([dir.join("part1"), dir.join("part2")], dir.join("whole"));
    succeeds(&run(&check("check", &[], &whole)));
    for (part, shard) in parts.iter().zip(["1/2", "2/2"]) {
        succeeds(&run(&check("check", &["--shard", shard], part)));
    }
    let merge = words(&["merge", text(&parts[0]), text(&parts[1])]);
    let table = dir.join("workloads.toml");
    fs::write(
        &table,
        "agree = { fp32 = 1e-6 }\n[[workload]]\nname = \"a/add\"\nop = \"add\"\ndtype = \"fp32\"\nparams = { R = 2, N = 8 }\n",
    )
    .unwrap();
    let measure = words(&["measure", "--workloads", text(&table), "--threads", "1", "--pairs", "1", "--repeat", "2"]);
    let record =
        words(&["goldens", "record", "--impl", "ours/cpu", "--case", one, "--reason", "a test", "--root", &root]);

    let made = dir.join("made");
    fs::create_dir(&made).unwrap();
    let store = dir.join("store");
    succeeds(&run(&[&record[..], &words(&["--store", text(&store)])].concat()));
    let data = fs::read_dir(store.join("data")).unwrap().next().unwrap().unwrap().path();
    let mut file = File::decode(&fs::read(data).unwrap()).unwrap();
    for (key, value) in [("case", one), ("maker", "a test"), ("command", "none"), ("date", "2026-11-22")] {
        file.metadata.insert(key.into(), value.into());
    }
    let bytes = file.encode();
    fs::write(made.join("one.safetensors"), &bytes).unwrap();
    let sum = samebits_harness::run::sha256(&bytes);
    fs::write(made.join("SHA256SUMS"), format!("{sum}  one.safetensors\n")).unwrap();
    let import = words(&["goldens", "import", text(&made), "--reason", "a test", "--root", &root]);

    let reports = vec!["report.html", "junit.xml", "summary.md"];
    let records = vec!["run.json", "records.jsonl", "journal.jsonl"];
    let after = |args: Vec<String>, option: &'static str| -> Arguments {
        Box::new(move |out| [args.clone(), words(&[option, text(out)])].concat())
    };
    let verb = |name, args, written, kept| FolderVerb { name, args, written, kept, needs: None };
    vec![
        verb("check", after([words(&["check"]), select.clone()].concat(), "--out"), reports.clone(), records.clone()),
        verb(
            "sweep",
            after([words(&["sweep"]), select.clone()].concat(), "--out"),
            [&reports[..], &["records.csv"]].concat(),
            records.clone(),
        ),
        verb("merge", after(merge, "--out"), reports.clone(), records.clone()),
        FolderVerb {
            name: "report",
            args: Box::new(|out| words(&["report", text(out)])),
            written: reports,
            kept: Vec::new(),
            needs: Some(whole),
        },
        verb("measure", after(measure, "--out"), vec!["measure.json", "measure.md"], Vec::new()),
        verb(
            "probe",
            after(words(&["probe", "--terms", "4", "--rows", "1"]), "--svg"),
            vec!["ours-cpu-gemm-fp32-4-1.svg"],
            Vec::new(),
        ),
        verb("goldens record", after(record, "--store"), Vec::new(), vec!["MANIFEST.toml"]),
        verb("goldens import", after(import, "--store"), Vec::new(), vec!["MANIFEST.toml"]),
        FolderVerb {
            name: "bless",
            // The store is goldens/ of the root.
            args: Box::new(move |out| {
                let root = out.parent().unwrap();
                if !root.join("goldens").exists() && !root.join("goldens").is_symlink() {
                    symlink(out.file_name().unwrap(), root.join("goldens")).unwrap();
                }
                words(&["bless", "--case", one, "--reason", "a test", "--root", text(root)])
            }),
            written: Vec::new(),
            kept: vec!["MANIFEST.toml"],
            needs: None,
        },
    ]
}

impl FolderVerb {
    /// A folder called `out`, alone in a temporary folder, with what the verb needs.
    fn prepared(&self) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        fs::create_dir(&out).unwrap();
        for file in self.needs.iter().flat_map(|whole| ["run.json", "records.jsonl"].map(|name| whole.join(name))) {
            fs::copy(&file, out.join(file.file_name().unwrap())).unwrap();
        }
        (dir, out)
    }
}

#[test]
fn folders_and_their_files_are_written_through_links() {
    let work = tempfile::tempdir().unwrap();
    for verb in folder_verbs(work.path()) {
        let (dir, out) = verb.prepared();
        let elsewhere = dir.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let files: Vec<&str> = verb.written.iter().chain(&verb.kept).copied().collect();
        for file in &files {
            symlink(format!("../elsewhere/{file}"), out.join(file)).unwrap();
        }
        // At first the links dangle; then they lead to files.
        for _ in 0..2 {
            succeeds(&run(&(verb.args)(&out)));
            for file in &files {
                assert!(is_link(&out.join(file)), "{}: {file} was replaced", verb.name);
                let target = elsewhere.join(file);
                // The journal is removed in the end.
                assert_eq!(target.exists(), *file != "journal.jsonl", "{}: {file}", verb.name);
                assert!(!target.exists() || fs::metadata(target).unwrap().len() > 0, "{}: {file}", verb.name);
            }
        }
        if verb.needs.is_some() {
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        symlink("real/folder", &out).unwrap();
        succeeds(&run(&(verb.args)(&out)));
        assert!(is_link(&out) && dir.path().join("real/folder").join(files[0]).exists(), "{}", verb.name);
        fs::remove_file(&out).unwrap();
        fs::write(&out, "a file").unwrap();
        let named = if verb.name == "bless" { "goldens" } else { text(&out) };
        assert_broken(&run(&(verb.args)(&out)), &[named]);
        assert_eq!(fs::read(&out).unwrap(), b"a file", "{}", verb.name);
    }
}

#[test]
fn devices_in_a_folder_are_written_or_refused_and_stay() {
    let work = tempfile::tempdir().unwrap();
    let Some(full) = device(work.path(), "full") else { return };
    for verb in folder_verbs(work.path()) {
        for (files, why) in [(&verb.written, "No space left on device"), (&verb.kept, "must be a regular file")] {
            for file in files {
                let (_dir, out) = verb.prepared();
                let path = device(&out, "full").unwrap();
                fs::rename(path, out.join(file)).unwrap();
                assert_broken(&run(&(verb.args)(&out)), &[file, why]);
                assert!(is_device(&out.join(file)), "{}: {file} was replaced", verb.name);
            }
        }
        if verb.needs.is_none() && verb.name != "bless" {
            assert_broken(&run(&(verb.args)(&full)), &[text(&full), "is not a folder; name a folder"]);
            assert!(is_device(&full), "{}", verb.name);
        }
    }
}

/// What cannot be printed is an error of every verb, also where it stood in a buffer to the end.
#[test]
fn a_full_stdout_is_an_error() {
    let work = tempfile::tempdir().unwrap();
    let Some(full) = device(work.path(), "full") else { return };
    let model = checkpoint("qwen3-adder");
    let (model, root) = (text(&model), Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    let tokens = Path::new(model).join("reference.safetensors");
    let (prompts, rollout) = (work.path().join("prompts.txt"), work.path().join("rollout.jsonl"));
    fs::write(&prompts, "1+2=\n").unwrap();
    let sample = ["rollout", "--model", model, "--prompts", text(&prompts), "--max-tokens", "2"];
    succeeds(&run(&[words(&sample), words(&["--out", text(&rollout)])].concat()));
    let run_folder = work.path().join("run");
    let check = [
        "check",
        "--slice",
        "quick",
        "--op",
        "add",
        "--dtype",
        "fp32",
        "--judgment",
        "golden",
        "--root",
        text(&root),
        "--out",
        text(&run_folder),
    ];
    succeeds(&run(&words(&check)));
    let case = ["case", "add/fp32/small-normal-fp32"];
    let request = succeeds(&run(&words(&case))).stdout.clone();
    let trace = ["trace", "default", "schedule=decode", "--model", model, "--tokens", text(&tokens)];
    for args in [
        &["--help"][..],
        &["--version"],
        &["list", "--op", "add"],
        &case,
        &[case[0], case[1], "--text"],
        &["contract"],
        &["contract", "--digest"],
        &["devices"],
        &["devices", "--json"],
        &["times", "--list"],
        &["generate", "--model", model, "--prompt", "1+2=", "--max-tokens", "2"],
        &sample,
        &["score", "--model", model, "--rollout", text(&rollout)],
        &trace,
        &["audit", model],
        &["measure", "--op", "add", "--param", "R=2", "--param", "N=8"],
        &["probe", "--terms", "4", "--rows", "1"],
        &["goldens", "ls", "--root", text(&root)],
        &["diff", text(&run_folder), text(&run_folder)],
        &["report", text(&run_folder)],
        &check,
        &["answer", "--threads", "1"],
    ] {
        let stdout = fs::OpenOptions::new().write(true).open(&full).unwrap();
        let mut command = program(&words(args));
        let mut child = command.stdin(Stdio::piped()).stdout(stdout).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // A program that ends early stops reading.
        let _ = stdin.write_all(&request);
        drop(stdin);
        let output = without_progress(child.wait_with_output().unwrap());
        assert_broken(&output, &["stdout: No space left on device"]);
    }
}
