//! What the documents promise of themselves: their width and length, parts that a command makes, papers of the packages.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Columns of a line of Markdown; `ci/pages wrap` fills longer ones again. Headings, tables and code stay as they are.
const WIDTH: usize = 120;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).expect(path)
}

/// The Markdown files of the repository; none in folders that are built.
fn pages() -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![root()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
            let (kind, path, name) = (entry.file_type().unwrap(), entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if kind.is_dir() && !name.starts_with('.') && !name.starts_with("samebits-") && name != "target" {
                // A virtual environment is no folder of ours.
                if !path.join("pyvenv.cfg").exists() {
                    folders.push(path);
                }
            } else if kind.is_file() && name.ends_with(".md") {
                found.push(path);
            }
        }
    }
    found
}

/// Numbers of the lines of prose that are too long.
fn long_lines(text: &str) -> Vec<usize> {
    let mut code = false;
    let mut long = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let start = line.trim_start();
        code ^= start.starts_with("```");
        let prose =
            !code && !line.starts_with("    ") && !["|", "#", "<!--"].iter().any(|other| start.starts_with(other));
        // An address cannot be cut.
        if prose && line.chars().count() > WIDTH && start.split(' ').all(|word| word.len() < WIDTH) {
            long.push(i + 1);
        }
    }
    long
}

#[test]
fn lines_of_markdown_end_at_the_width() {
    let pages = pages();
    assert!(pages.len() > 15, "{pages:?}");
    let mut long = Vec::new();
    // Branches that meet join their lines of CHANGELOG, and lines that were filled again would stand there twice.
    for path in pages.into_iter().filter(|path| !path.ends_with("CHANGELOG.md")) {
        let lines = long_lines(&std::fs::read_to_string(&path).unwrap());
        long.extend(lines.iter().map(|line| format!("{}:{line}", path.display())));
    }
    assert!(long.is_empty(), "longer than {WIDTH} columns (ci/pages wrap FILE):\n{}", long.join("\n"));
    let words = "word ".repeat(30);
    assert_eq!(long_lines(&format!("{words}\n| {words}\n```\n{words}\n```\n- {words}\n")), [1, 6]);
}

/// The address of a heading within its page, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    heading.to_lowercase().chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Links within the repository that lead nowhere, of a page at `path`.
fn broken_links(path: &Path, text: &str) -> Vec<String> {
    let links = text.match_indices("](").filter_map(|(at, _)| text[at + 2..].split(')').next());
    let ours = links.filter(|link| !link.contains("://") && !link.contains(char::is_whitespace));
    let broken = ours.filter(|link| {
        let (file, place) = link.split_once('#').map_or((*link, None), |(file, place)| (file, Some(place)));
        let target = if file.is_empty() { path.to_path_buf() } else { path.parent().unwrap().join(file) };
        let is_there = |place: &str| {
            let page = std::fs::read_to_string(&target).unwrap_or_default();
            page.lines()
                .filter(|line| line.starts_with('#'))
                .any(|line| anchor(line.trim_start_matches('#').trim()) == place)
        };
        !target.exists() || place.is_some_and(|place| !is_there(place))
    });
    broken.map(|link| format!("{}: {link}", path.display())).collect()
}

#[test]
fn links_lead_somewhere() {
    let broken = |path: PathBuf| broken_links(&path, &std::fs::read_to_string(&path).unwrap());
    assert_eq!(pages().into_iter().flat_map(broken).collect::<Vec<_>>(), [""; 0]);
    let text = "[a](docs/WIRE.md) [b](docs/none.md) [c](docs/PERFORMANCE.md#an-nvidia-h100) [d](docs/WIRE.md#no-such)";
    let seen: Vec<String> = broken_links(&root().join("README.md"), text);
    assert!(seen.len() == 2 && seen[0].ends_with(": docs/none.md") && seen[1].ends_with("#no-such"), "{seen:?}");
}

/// What a page says between the two lines of `name`, and the page without it.
fn part(text: &str, name: &str) -> (String, String) {
    let begin = format!("<!-- generated {name}: ");
    let end = format!("<!-- end {name} -->");
    let (before, rest) = text.split_once(&begin).unwrap_or_else(|| panic!("no line `{begin}`"));
    let (command, rest) = rest.split_once(" -->\n").expect("the command ends its line");
    assert!(command.contains("ci/pages ") && command.contains(name), "{name}: `{command}` does not make it");
    let (inside, after) = rest.split_once(&end).unwrap_or_else(|| panic!("no line `{end}`"));
    assert!(!after.contains(&begin) && !inside.contains("<!-- "), "{name} stands twice, or another part within it");
    (inside.to_string(), before.to_string() + after)
}

/// The tables of PERFORMANCE are made by `measure`; what is written by hand can be read.
#[test]
fn what_is_written_by_hand_is_short() {
    let mut hand = read("docs/PERFORMANCE.md");
    let names: Vec<String> = hand
        .lines()
        .filter_map(|line| line.strip_prefix("<!-- generated ")?.split(':').next().map(String::from))
        .collect();
    assert!(names.len() >= 5, "{names:?}");
    for name in names {
        let (table, rest) = part(&hand, &name);
        assert!(table.lines().filter(|line| line.starts_with("| ")).count() > 20, "{name}\n{table}");
        hand = rest;
    }
    assert!(hand.len() <= 15 << 10, "{} bytes of docs/PERFORMANCE.md are written by hand", hand.len());
    let readme = read("README.md");
    assert!(readme.len() <= 8 << 10, "README.md has {} bytes", readme.len());
    let example = readme.lines().position(|line| line.starts_with("    $ ")).expect("README has an example");
    assert!(example < 25, "the first example of README stands in line {}", example + 1);
}

/// README and the table say the same of the same run.
#[test]
fn the_line_of_the_verdicts_is_that_of_the_table() {
    let (line, _) = part(&read("README.md"), "verdicts");
    let (table, _) = part(&read("docs/VERDICTS.md"), "verdicts");
    let said = line.split(" (").next().unwrap();
    let table = table.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains("judgments pass, ") && table.contains(said), "README says {said}; the table\n{table}");
}

fn pages_command(root: &Path, arguments: &[&str]) -> Output {
    let script = self::root().join("ci/pages");
    let command = Command::new("python3").arg(script).arg("--root").arg(root).args(arguments).output();
    command.expect("python3 runs ci/pages")
}

/// `ci/pages` on runs of a few lines: what it writes, that it touches nothing else, and what it refuses.
#[test]
fn pages_are_made_from_records() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let write = |name: &str, text: &str| std::fs::write(at(name), text).unwrap();
    let read = |name: &str| std::fs::read_to_string(at(name)).unwrap();
    std::fs::create_dir(at("docs")).unwrap();
    let parts = |name: &str| format!("before\n<!-- generated {name}: x -->\nold\n<!-- end {name} -->\nafter\n");
    write("README.md", &parts("verdicts"));
    write("docs/VERDICTS.md", &parts("verdicts").replace("old\n", "| gemm | 1 |\n"));
    write("docs/PERFORMANCE.md", &parts("here"));

    let record = |op: &str, dtype: &str, judgment: &str, verdict: &str| {
        let judged = [("op", op), ("dtype", dtype), ("judgment", judgment), ("verdict", verdict)];
        let judged = judged.into_iter().chain([("implementation", "ours/cpu")]);
        serde_json::to_string(&judged.collect::<BTreeMap<_, _>>()).unwrap() + "\n"
    };
    let records = record("add", "fp32", "accuracy", "pass")
        + &record("gemm", "bf16", "invariance", "pass")
        + &record("gemm", "bf16", "invariance", "pass")
        + &record("gemm", "bf16", "golden", "unsupported");
    let run = serde_json::json!({
        "tool": "samebits 9.9.9", "contract_name": "ws1 1.0.0", "rows": "tight", "arguments": ["check", "--out", "DIR"],
        "started": 86400, "complete": true, "machine": { "cpu": "a processor", "cores": "2", "isas": "scalar avx2" },
    });
    write("run.json", &run.to_string());
    write("records.jsonl", &(records.clone() + &record("add", "fp32", "golden", "fail")));
    let made = pages_command(folder.path(), &["verdicts", folder.path().to_str().unwrap()]);
    assert!(made.status.success(), "{made:?}");
    let (table, readme) = (read("docs/VERDICTS.md"), read("README.md"));
    assert!(table.starts_with("before\n<!-- generated verdicts: x -->\n`samebits check` (samebits 9.9.9"), "{table}");
    let rows = "| gemm | 0 / 2 / 0 / 0 / 0 |  |  |\n| add |  |  | 1 / 0 / 0 / 0 / 0 |\n<!-- end verdicts -->\nafter\n";
    assert!(table.ends_with(rows), "{table}");
    assert!(readme.contains("\n3 judgments pass, 1 fail (1970-01-02, a processor): "), "{readme}");

    let row = |threads: usize, met: bool| {
        serde_json::json!({
            "workload": { "name": "gemm/a", "share_of": "peak" }, "threads": threads, "ours": { "median": 0.0473 },
            "peers": { "torch": { "ratio": [1.05, 1.01, 1.07] } }, "share": [0.81, 0.8, 0.82],
            "targets": [{ "wanted": "1.00x torch", "met": met }],
        })
    };
    let limit =
        serde_json::json!({ "limit": "read", "dtype": "bf16", "threads": 1, "per_second": [29.1e9, 24.8e9, 31.6e9] });
    let measured = |complete: bool| {
        serde_json::json!({
            "tool": "samebits 9.9.9", "started": 86400, "complete": complete, "machine": {}, "load": 0.7, "pairs": 3,
            "repeat": 5, "held_to": "avx2", "programs": [{ "version": "s" }, { "name": "torch", "version": "torch 2" }],
            "limits": [limit], "rows": [row(1, true), row(2, false)],
        })
    };
    write("measure.json", &measured(true).to_string());
    let made = pages_command(folder.path(), &["measured", "here", folder.path().to_str().unwrap()]);
    assert!(made.status.success(), "{made:?}");
    let page = read("docs/PERFORMANCE.md");
    let cell = "47.3 ms, 1.05 (1.01 to 1.07), 81% of peak";
    assert!(page.contains(&format!("\n| gemm/a | {cell} | {cell}; 1.00x torch MISSED |\n<!-- end here -->\nafter\n")));
    let prose = page.split_whitespace().collect::<Vec<_>>().join(" ");
    for said in
        ["held to avx2, beside torch 2, 1970-01-02", "read 29.1 (24.8 to 31.6) GB/s", "1 of 2 targets met", "load 0.7"]
    {
        assert!(prose.contains(said), "{said}\n{page}");
    }

    // Nothing is written of half a run, nor where a page has no such part.
    write("measure.json", &measured(false).to_string());
    for (name, why) in [("here", "was interrupted"), ("there", "<!-- generated there: COMMAND -->")] {
        if name == "there" {
            write("measure.json", &measured(true).to_string());
        }
        let refused = pages_command(folder.path(), &["measured", name, folder.path().to_str().unwrap()]);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains(why), "{refused:?}");
    }
    assert_eq!(read("docs/PERFORMANCE.md"), page);
}

/// A package on a registry stands alone: whoever finds it sees what it is, under which licence, and where it comes from.
#[test]
fn what_is_published_has_its_papers() {
    let mut command = cargo_metadata::MetadataCommand::new();
    let metadata = command.manifest_path(root().join("Cargo.toml")).no_deps().exec().expect("cargo metadata runs");
    // `publish = false` is an empty list.
    let published: Vec<_> = metadata.packages.iter().filter(|package| package.publish.is_none()).collect();
    assert!(published.len() >= 7, "{}", published.len());
    for package in published {
        let folder = package.manifest_path.parent().unwrap();
        let readme = package.readme.as_ref().unwrap_or_else(|| panic!("{} has no readme", package.name));
        let text = std::fs::read_to_string(folder.join(readme)).unwrap();
        assert!(text.starts_with(&format!("# {}\n", package.name)), "{}: {readme} is not its own", package.name);
        for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
            assert_eq!(std::fs::read(folder.join(licence)).ok(), std::fs::read(root().join(licence)).ok(), "{folder}");
        }
        let says = [&package.repository, &package.license, &package.description];
        assert!(says.iter().all(|says| says.is_some()), "{}: {says:?}", package.name);
        assert!(!package.keywords.is_empty() && !package.categories.is_empty(), "{} has no keywords", package.name);
    }
}
