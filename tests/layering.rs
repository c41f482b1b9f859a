//! Who may import whom, and what no file of the repository may say.

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The members of the workspace that each member may depend on.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("samebits-schema", &[]),
    ("samebits-ops", &["samebits-schema"]),
    ("samebits-contract", &["samebits-schema"]),
    ("samebits-models", &["samebits-ops"]),
    ("samebits-goldens", &["samebits-contract"]),
    ("samebits-reports", &["samebits-contract"]),
    ("samebits-judge", &["samebits-contract", "samebits-goldens", "samebits-reports", "samebits-schema"]),
    (
        "samebits-harness",
        &[
            "samebits-contract",
            "samebits-goldens",
            "samebits-judge",
            "samebits-models",
            "samebits-ops",
            "samebits-reports",
            "samebits-schema",
            "samebits-units",
        ],
    ),
    (
        "samebits-python",
        &[
            "samebits-contract",
            "samebits-harness",
            "samebits-judge",
            "samebits-models",
            "samebits-ops",
            "samebits-schema",
        ],
    ),
    // Nobody may import it: what is wrong on purpose is for tests alone.
    ("samebits-mutants", &["samebits-contract", "samebits-harness", "samebits-models", "samebits-ops"]),
    ("samebits-tests", &["samebits-harness"]),
    ("samebits-units", &[]),
];

/// Where a crate may not be used. Whoever says what is right computes on one thread and on no accelerator.
const NEVER: &[(&str, &[&str])] = &[
    ("samebits-schema", &["half", "rayon", "cudarc", "toml", "safetensors"]),
    ("samebits-contract", &["rayon", "cudarc"]),
    ("samebits-goldens", &["rayon", "cudarc"]),
    ("samebits-reports", &["rayon", "cudarc", "half"]),
    ("samebits-judge", &["rayon", "cudarc", "clap"]),
    ("samebits-ops", &["serde", "toml", "safetensors"]),
    ("samebits-models", &["cudarc"]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// What a workspace of the repository says of its members.
fn metadata(workspace: &str) -> Metadata {
    let mut command = MetadataCommand::new();
    command.manifest_path(root().join(workspace).join("Cargo.toml")).no_deps();
    command.exec().expect("cargo metadata runs")
}

/// Names of the normal and build dependencies; tests may use what they like.
fn dependencies(package: &Package) -> BTreeSet<&str> {
    let shipped = package.dependencies.iter().filter(|d| d.kind != DependencyKind::Development);
    shipped.map(|d| d.name.as_str()).collect()
}

/// What of `packages` breaks the rules.
fn violations(packages: &[Package]) -> Vec<String> {
    let rules: BTreeMap<&str, &[&str]> = MAY_IMPORT.iter().copied().collect();
    let never: BTreeMap<&str, &[&str]> = NEVER.iter().copied().collect();
    let members: BTreeSet<&str> = packages.iter().map(|package| package.name.as_str()).collect();
    let mut found = Vec::new();
    for package in packages {
        let name = package.name.as_str();
        let Some(may) = rules.get(name) else {
            found.push(format!("{name} has no line in MAY_IMPORT"));
            continue;
        };
        for import in dependencies(package) {
            if members.contains(import) && !may.contains(&import) {
                found.push(format!("{name} imports {import}"));
            }
            if never.get(name).is_some_and(|never| never.contains(&import)) {
                found.push(format!("{name} uses {import}"));
            }
        }
    }
    found.extend(rules.keys().filter(|rule| !members.contains(*rule)).map(|rule| format!("{rule} is no member")));
    found
}

#[test]
fn who_may_import_whom() {
    let mut metadata = metadata(".");
    assert_eq!(violations(&metadata.packages), [""; 0]);
    // The rules are seen to hold something: what ops needs, given to the contract, breaks them.
    let ops = metadata.packages.iter().find(|package| package.name.as_str() == "samebits-models").unwrap();
    let stolen = ops.dependencies.clone();
    let contract = metadata.packages.iter_mut().find(|package| package.name.as_str() == "samebits-contract").unwrap();
    contract.dependencies.extend(stolen);
    assert_eq!(violations(&metadata.packages), ["samebits-contract imports samebits-ops"]);
}

/// The table of crates in ARCHITECTURE says of each what its manifest says.
#[test]
fn the_table_of_crates_is_true() {
    let text = std::fs::read_to_string(root().join("docs/ARCHITECTURE.md")).unwrap();
    let metadata = metadata(".");
    let members: BTreeSet<&str> = metadata.packages.iter().map(|package| package.name.as_str()).collect();
    for package in &metadata.packages {
        let row = text.lines().find(|line| line.contains(&format!("| `{}` |", package.name)));
        let row = row.unwrap_or_else(|| panic!("{} has no row", package.name)).trim_end_matches(" |");
        let said = row.rsplit(" | ").next().and_then(|said| said.split(';').next()).expect("split gives one");
        let said = said.split(", ").filter(|name| *name != "none").map(|name| format!("samebits-{name}"));
        let imports = dependencies(package).into_iter().filter(|name| members.contains(name)).map(String::from);
        assert_eq!(said.collect::<BTreeSet<_>>(), imports.collect::<BTreeSet<_>>(), "{}", package.name);
    }
}

/// A test target without libtest runs what its `main` lists: a `#[test]` there would be compiled and never run.
#[test]
fn no_test_is_left_out() {
    let metadata = metadata(".");
    let mut listed = 0;
    for package in &metadata.packages {
        let manifest = std::fs::read_to_string(&package.manifest_path).unwrap();
        for target in package.targets.iter().filter(|target| target.is_test()) {
            let entry =
                manifest.split("[[test]]").find(|entry| entry.contains(&format!("name = \"{}\"\n", target.name)));
            if entry.is_some_and(|entry| entry.contains("harness = false")) {
                let text = std::fs::read_to_string(&target.src_path).unwrap();
                assert!(!text.lines().any(|line| line.trim() == "#[test]"), "{} has a #[test]", target.src_path);
                listed += 1;
            }
        }
    }
    assert!(listed > 5, "only {listed} targets list their tests");
}

/// An example is what another project sees: it takes the ops alone, as they are shipped, and no member fetches what it
/// needs.
#[test]
fn an_example_is_another_project() {
    let ours = metadata(".");
    let members: BTreeSet<&str> = ours.packages.iter().map(|package| package.name.as_str()).collect();
    let fetched: BTreeSet<&str> =
        ours.packages.iter().flat_map(|package| &package.dependencies).map(|d| d.name.as_str()).collect();
    // What has no manifest is written in Python.
    let found = std::fs::read_dir(root().join("examples")).unwrap().map(|entry| entry.unwrap().path());
    let found: Vec<String> = found
        .filter(|path| path.join("Cargo.toml").exists())
        .map(|path| format!("examples/{}", path.file_name().unwrap().display()))
        .collect();
    assert!(found.iter().any(|example| example == "examples/candle"), "{found:?}");
    for example in &found {
        let theirs = metadata(example);
        assert!(theirs.packages.iter().all(|package| !members.contains(package.name.as_str())), "{example}");
        let dependencies: Vec<_> = theirs.packages.iter().flat_map(|package| &package.dependencies).collect();
        let taken = dependencies.iter().filter(|d| members.contains(d.name.as_str()));
        let taken: Vec<_> = taken.map(|d| (d.name.as_str(), &d.features[..])).collect();
        assert_eq!(taken, [("samebits-ops", &[][..])], "{example}");
        assert!(root().join(example).join("Cargo.lock").exists(), "{example} has no lock of its own");
    }
    assert!(!fetched.iter().any(|name| name.starts_with("candle")), "{fetched:?}");
}

/// What the documents show of a gate for a Rust function is what a test of samebits-judge runs.
#[test]
fn the_gate_that_is_shown_is_run() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).expect(path);
    let test = read("judge/tests/rms_norm.rs");
    let main =
        &test[test.find("fn main() {").expect("it has a main")..test.find("\nmod mine").expect("and a function")];
    for document in ["README.md", "judge/README.md", "docs/GATE.md"] {
        assert!(read(document).contains(main), "{document} lacks\n{main}");
    }
    assert!(main.lines().count() <= 10, "{main}");
}

#[test]
fn crates_without_unsafe_code_say_so() {
    for member in ["schema", "contract", "goldens", "reports", "judge"] {
        let lib = std::fs::read_to_string(root().join(member).join("src/lib.rs")).unwrap();
        assert!(
            lib.lines().any(|line| line == "#![forbid(unsafe_code)]"),
            "{member}/src/lib.rs must forbid unsafe code"
        );
    }
}

#[test]
fn the_contract_starts_no_threads() {
    let mut sources = Vec::new();
    walk(&root().join("contract/src"), &mut sources);
    assert!(sources.len() > 10);
    for source in sources {
        let text = std::fs::read_to_string(&source).unwrap();
        assert!(!text.contains("std::thread") && !text.contains("thread::spawn"), "{}", source.display());
    }
}

/// Modules that a Python file imports.
fn imports(text: &str) -> Vec<&str> {
    let names = text.lines().filter_map(|line| line.strip_prefix("import ").or_else(|| line.strip_prefix("from ")));
    names.flat_map(|rest| rest.split(" import ").next().expect("split gives one").split(", ")).map(str::trim).collect()
}

#[test]
fn the_pure_program_needs_python_alone() {
    let standard = ["json", "math", "struct", "sys"];
    let mut sources = Vec::new();
    walk(&root().join("impls/pure"), &mut sources);
    sources.retain(|path| path.extension().is_some_and(|e| e == "py"));
    let own: Vec<String> = sources.iter().map(|path| path.file_stem().unwrap().to_string_lossy().into()).collect();
    assert_eq!(own.len(), 3);
    let mut seen = 0;
    for source in &sources {
        let text = std::fs::read_to_string(source).unwrap();
        assert!(!text.contains("__import__") && !text.contains("importlib"), "{}", source.display());
        for module in imports(&text) {
            let known = standard.contains(&module) || own.iter().any(|name| name == module);
            assert!(known, "{} imports {module}", source.display());
            seen += 1;
        }
    }
    assert!(seen > 5, "only {seen} imports were found");
    assert_eq!(imports("import os, sys\nfrom numpy.linalg import norm\nx = 1"), ["os", "sys", "numpy.linalg"]);
}

/// Paths of the place where something was written are of no use to its readers.
#[test]
fn no_file_tells_of_the_working_place() {
    // Put together here, so that this file does not hold them.
    let words = [["/wo", "rk/"].concat(), ["../sh", "ared"].concat(), ["/tmp/", "house"].concat()];
    let files = tracked();
    assert!(files.len() > 100, "only {} files were found", files.len());
    for path in files {
        let Ok(bytes) = std::fs::read(root().join(&path)) else { continue };
        let text = String::from_utf8_lossy(&bytes);
        for word in &words {
            assert!(!text.contains(word.as_str()), "{} has `{word}`", path.display());
        }
    }
}

/// Files of the repository but the lock: as git tracks them, or all there are outside of build folders.
fn tracked() -> Vec<PathBuf> {
    let git = Command::new("git").arg("-C").arg(root()).args(["ls-files", "-z"]).output();
    let mut files: Vec<PathBuf> = match git {
        Ok(output) if output.status.success() && root().join(".git").exists() => {
            let names = String::from_utf8(output.stdout).expect("names are UTF-8");
            names.split_terminator('\0').map(PathBuf::from).collect()
        }
        _ => {
            let mut found = Vec::new();
            walk(&root(), &mut found);
            found.iter().map(|path| path.strip_prefix(root()).expect("under the root").to_path_buf()).collect()
        }
    };
    files.retain(|path| path != Path::new("Cargo.lock"));
    files
}

fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name();
        match entry.file_type().unwrap() {
            kind if kind.is_file() => files.push(entry.path()),
            kind if kind.is_dir()
                && !["target", ".git", "__pycache__", "samebits-report"].iter().any(|n| name == *n) =>
            {
                walk(&entry.path(), files)
            }
            _ => {}
        }
    }
}

/// Files of a crate by their modules: `pack::dictionary`, and nothing for the root.
type Sources = BTreeMap<String, String>;

/// The files under `src` as they are compiled without tests and read without comments.
fn sources(src: &Path) -> Sources {
    let mut files = Vec::new();
    walk(src, &mut files);
    let mut sources = Sources::new();
    for file in files {
        let name = file.strip_prefix(src).expect("under it").with_extension("");
        let mut module: Vec<_> = name.iter().map(|part| part.to_str().expect("UTF-8")).collect();
        if file.extension().is_none_or(|e| e != "rs") || module.last().is_some_and(|last| last.ends_with("tests")) {
            continue;
        }
        module.pop_if(|last| *last == "mod" || *last == "lib");
        let text = std::fs::read_to_string(&file).unwrap();
        let text: String = text.lines().map(|line| line.split("//").next().expect("one").to_string() + "\n").collect();
        sources.insert(module.join("::"), text[..before_tests(&text)].into());
    }
    sources
}

/// Where the tests of a text begin, or its end.
fn before_tests(text: &str) -> usize {
    let attributes = ["#[cfg(test)]\n", "#[cfg(feature = \"unit-tests\")]\n"];
    let tests = attributes.iter().flat_map(|attribute| text.match_indices(attribute)).filter(|(at, attribute)| {
        let item = text[at + attribute.len()..].lines().next().unwrap_or_default();
        (*at == 0 || text[..*at].ends_with('\n')) && item.contains("mod ") && item.ends_with('{')
    });
    tests.map(|(at, _)| at).min().unwrap_or(text.len())
}

/// The paths of a tree of imports, as in `a::{b, c::d as e}`, that begins a text; and how much of the text that is.
fn paths(text: &str) -> (Vec<Vec<String>>, usize) {
    let skip = |at: usize| at + text[at..].len() - text[at..].trim_start().len();
    let (mut path, mut at) = (Vec::new(), skip(0));
    loop {
        if text[at..].starts_with('{') {
            let mut found = Vec::new();
            at += 1;
            while !text[skip(at)..].starts_with('}') {
                let (inner, read) = paths(&text[skip(at)..]);
                found.extend(inner.into_iter().map(|inner| [&path[..], &inner].concat()));
                at = skip(at) + read;
                // Behind a path stand its other name and a comma.
                at += text[at..].find([',', '}']).expect("the brace is closed");
                at += usize::from(text[at..].starts_with(','));
            }
            return (found, skip(at) + 1);
        }
        let len = text[at..].find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text[at..].len());
        path.push(text[at..at + len].to_string());
        at += len;
        match text[at..].strip_prefix("::") {
            Some(rest) if rest.starts_with(|c: char| c.is_alphabetic() || c == '_' || c == '{') => at += 2,
            _ => return (vec![path], at),
        }
    }
}

/// What the files name of each other by `crate::` and `super::`, in imports and in between. What a file hands on from another
/// (`pub use`) stands where it comes from; the root and what is in no file are left out.
fn imports_of(sources: &Sources) -> BTreeMap<&str, BTreeSet<&str>> {
    let parent = |module: &str| module.rsplit_once("::").map_or(String::new(), |(parent, _)| parent.to_string());
    let absolute = |module: &str, path: &[String]| -> Vec<String> {
        let (first, rest) = path.split_first().expect("a path has a part");
        let from = match first.as_str() {
            "crate" => String::new(),
            "super" => parent(module),
            _ => return [module.split("::").map(String::from).collect(), path.to_vec()].concat(),
        };
        let from = from.split("::").filter(|part| !part.is_empty()).map(String::from);
        from.chain(rest.iter().cloned()).filter(|part| part != "self" && !part.is_empty()).collect()
    };
    // By module and name, what it hands on.
    let mut handed = BTreeMap::new();
    for (module, text) in sources {
        for line in text.split(['\n', ';']).filter(|line| line.starts_with("pub")) {
            let at = text.find(line).expect("it is a part");
            if let Some(tree) = text[at..].split_once("use ").filter(|(head, _)| head.len() < 12).map(|(_, tree)| tree)
            {
                for path in paths(tree).0 {
                    let path: Vec<_> = absolute(module, &path).into_iter().filter(|part| !part.is_empty()).collect();
                    handed.insert((module.as_str(), path.last().expect("a name").clone()), path);
                }
            }
        }
    }
    let file_of = |mut path: Vec<String>| loop {
        let (at, module) = (0..=path.len())
            .rev()
            .find_map(|at| sources.get_key_value(&path[..at].join("::")).map(|(module, _)| (at, module.as_str())))
            .expect("the root is there");
        match path.get(at).and_then(|name| handed.get(&(module, name.clone()))) {
            Some(from) if !path.starts_with(from) => path = [&from[..], &path[at + 1..]].concat(),
            _ => return module,
        }
    };
    let mut imports: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (module, text) in sources.iter().filter(|(module, _)| !module.is_empty()) {
        for start in ["crate::", "super::"] {
            for (at, _) in text.match_indices(start) {
                let found = paths(&text[at..]).0.into_iter().map(|path| file_of(absolute(module, &path)));
                imports.entry(module).or_default().extend(found.filter(|of| of != module && !of.is_empty()));
            }
        }
    }
    imports
}

/// The shortest way from every file back to itself, each circle once.
fn circles(sources: &Sources) -> Vec<String> {
    let imports = imports_of(sources);
    let mut found: BTreeMap<BTreeSet<&str>, String> = BTreeMap::new();
    for &start in imports.keys() {
        let (mut ways, mut seen) = (vec![vec![start]], BTreeSet::new());
        while let Some(way) = (!ways.is_empty()).then(|| ways.remove(0)) {
            let last = way.last().expect("a way has a start");
            for &next in imports.get(last).into_iter().flatten() {
                if next == start {
                    let circle = [&way[..], &[start]].concat().join(" -> ");
                    found.entry(way.iter().copied().collect()).or_insert(circle);
                    ways.clear();
                    break;
                }
                if seen.insert(next) {
                    ways.push([&way[..], &[next]].concat());
                }
            }
        }
    }
    found.into_values().collect()
}

/// A file of ops is read with what it imports, and none of that imports it again. Below are views, vectors and layouts, above
/// them ops, above those the registry.
#[test]
fn no_circle_of_files() {
    let sources = sources(&root().join("ops/src"));
    let imports = imports_of(&sources);
    assert!(imports["registry"].contains("gemm::gemm") || imports["registry"].contains("gemm"), "{imports:?}");
    assert!(imports["gemm::gemm"].contains("backend::cpu"), "what the root hands on is seen: {imports:?}");
    assert_eq!(circles(&sources), [""; 0]);
    // A circle by names that a folder and the root hand on is seen, also where a brace holds it; one in a comment is not.
    let planted = [
        ("", "pub use a::{View, x::Y};\npub use b::c::Op;\n"),
        ("a", "use crate::{Error, b::{self}};\n"),
        ("b", "pub use c::{Op as Other, Op};\n"),
        ("b::c", "use super::{d};\nfn f(x: crate::View) {}"),
        ("b::d", ""),
    ];
    let mut planted: Sources = planted.map(|(module, text)| (module.to_string(), text.to_string())).into();
    assert_eq!(circles(&planted), [""; 0]);
    planted.insert("a".into(), "use crate::{Error, Op};\n".into());
    assert_eq!(circles(&planted), ["a -> b::c -> a"]);
    planted.insert("a".into(), "use crate::b::{Error, Op};\n".into());
    assert_eq!(circles(&planted), ["a -> b::c -> a"]);
}

/// Whose functions and files are measured.
const MEASURED: [&str; 6] = ["contract", "harness", "judge", "models", "ops", "schema"];

/// The most lines of a function, from its `fn` to its closing brace.
const FUNCTION: usize = 80;

/// File, name and lines.
type LongFunctions<'a> = &'a [(&'a str, &'a str, usize)];

/// File and lines.
type LongFiles<'a> = &'a [(&'a str, usize)];

/// The most lines of a file, without its tests.
const FILE: usize = 800;

/// Functions above [`FUNCTION`]. None may grow or be added; what is short enough again leaves.
const LONG_FUNCTIONS: LongFunctions = &[
    ("contract/src/axis.rs", "all", 136),
    ("contract/src/load.rs", "cases", 86),
    ("harness/src/cmd/check.rs", "judge", 151),
    ("harness/src/cmd/goldens.rs", "run", 139),
    ("harness/src/cmd/measure.rs", "compare", 84),
    ("harness/src/cmd/probe.rs", "run", 85),
    ("harness/src/cmd/train.rs", "train", 104),
    ("judge/src/judge.rs", "invariance", 104),
    ("judge/src/probe/arithmetic.rs", "hand_on", 97),
    ("judge/src/probe/order.rs", "sums", 94),
    ("models/src/rotary.rs", "read", 203),
    ("ops/src/attention/decode.rs", "sums", 97),
    ("ops/src/attention/dot_rows.rs", "run", 90),
    ("ops/src/attention/prefill.rs", "all", 82),
    ("ops/src/attention/prefill.rs", "run", 93),
    ("ops/src/attention/prefill.rs", "score", 91),
    ("ops/src/attention/prefill.rs", "values", 83),
    ("ops/src/gemm/gemm.rs", "packed", 120),
    ("ops/src/gemm/tile/block.rs", "add", 94),
    ("ops/src/logprob/linear_logprob.rs", "run", 87),
    ("ops/src/logprob/linear_logprob.rs", "segment", 140),
    ("ops/src/logprob/linear_logprob/device.rs", "linear_logprob", 101),
    ("ops/src/logprob/linear_logprob_backward.rs", "run", 83),
    ("ops/src/logprob/linear_logprob_backward/device.rs", "linear_logprob_backward", 110),
    ("schema/src/call.rs", "validate", 117),
];

/// Files above [`FILE`], in the same way.
const LONG_FILES: LongFiles = &[
    ("contract/src/axis.rs", 1494),
    ("contract/src/load.rs", 1260),
    ("judge/src/judge.rs", 937),
    ("models/src/gradients.rs", 864),
    ("ops/src/attention/backward_tiles.rs", 819),
    ("ops/src/attention/decode.rs", 811),
    ("ops/src/attention/prefill.rs", 948),
    ("ops/src/tensor.rs", 1084),
];

/// The functions in some tokens with their lines, those within others too; tests are left out.
fn functions(tokens: TokenStream, found: &mut Vec<(String, usize)>) {
    let trees: Vec<TokenTree> = tokens.into_iter().collect();
    let is = |at: usize, punct: char| matches!(trees.get(at), Some(TokenTree::Punct(p)) if p.as_char() == punct);
    let brace = |at: usize| match trees.get(at) {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => Some(group),
        _ => None,
    };
    // Behind what begins at `from`: the end of an item.
    let end = |from: usize| (from..trees.len()).find(|&at| is(at, ';') || brace(at).is_some()).unwrap_or(trees.len());
    let mut at = 0;
    while at < trees.len() {
        match (&trees[at], trees.get(at + 1)) {
            (TokenTree::Punct(hash), Some(TokenTree::Group(attribute)))
                if hash.as_char() == '#'
                    && ["cfg(test)", "cfg(feature=\"unit-tests\")", "test"]
                        .contains(&attribute.stream().to_string().replace(' ', "").as_str()) =>
            {
                at = end(at + 2) + 1;
                continue;
            }
            (TokenTree::Ident(word), Some(TokenTree::Ident(name))) if word == "fn" => {
                if let Some(body) = brace(end(at)) {
                    let lines = body.span_close().end().line - word.span().start().line + 1;
                    found.push((name.to_string(), lines));
                }
            }
            (TokenTree::Group(group), _) => functions(group.stream(), found),
            _ => {}
        }
        at += 1;
    }
}

/// What is too long in a file, but for what the exceptions name. Each of them that is needed goes into `used`.
fn too_long(
    path: &str,
    text: &str,
    (long_functions, long_files): (LongFunctions, LongFiles),
    used: &mut BTreeSet<String>,
) -> Vec<String> {
    let mut found = Vec::new();
    functions(text.parse().unwrap_or_else(|e| panic!("{path}: {e}")), &mut found);
    let mut wrong = Vec::new();
    for (name, lines) in found.into_iter().filter(|(_, lines)| *lines > FUNCTION) {
        match long_functions.iter().find(|(file, function, _)| (*file, *function) == (path, name.as_str())) {
            Some((.., most)) if lines <= *most => _ = used.insert(format!("{path}: {name}")),
            Some((.., most)) => wrong.push(format!("{path}: {name} has {lines} lines; it had {most}")),
            None => wrong.push(format!("{path}: {name} has {lines} lines; {FUNCTION} are the most")),
        }
    }
    let lines = text[..before_tests(text)].lines().count();
    match long_files.iter().find(|(file, _)| *file == path) {
        _ if lines <= FILE => {}
        Some((_, most)) if lines <= *most => _ = used.insert(path.to_string()),
        Some((_, most)) => wrong.push(format!("{path} has {lines} lines; it had {most}")),
        None => wrong.push(format!("{path} has {lines} lines; {FILE} are the most")),
    }
    wrong
}

/// No function above 80 lines, no file above 800, but for those that were there.
#[test]
fn functions_and_files_can_be_read_at_once() {
    let exceptions = (LONG_FUNCTIONS, LONG_FILES);
    let (mut used, mut wrong, mut measured) = (BTreeSet::new(), Vec::new(), 0);
    for member in MEASURED {
        let mut files = Vec::new();
        walk(&root().join(member).join("src"), &mut files);
        for file in files {
            let path = file.strip_prefix(root()).expect("under the root").to_string_lossy().replace('\\', "/");
            let tests = file.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("tests"));
            if file.extension().is_some_and(|e| e == "rs") && !tests {
                wrong.extend(too_long(&path, &std::fs::read_to_string(&file).unwrap(), exceptions, &mut used));
                measured += 1;
            }
        }
    }
    assert!(measured > 200, "only {measured} files were found");
    wrong.sort();
    assert!(wrong.is_empty(), "{}\nmake them shorter", wrong.join("\n"));
    let listed = LONG_FUNCTIONS.iter().map(|(file, name, _)| format!("{file}: {name}"));
    let listed: BTreeSet<String> = listed.chain(LONG_FILES.iter().map(|(file, _)| file.to_string())).collect();
    let stale: Vec<_> = listed.difference(&used).collect();
    assert!(stale.is_empty(), "no exception is needed any more for {stale:?}");
    assert_eq!(listed.len(), LONG_FUNCTIONS.len() + LONG_FILES.len(), "an exception stands twice");

    // What is too long is seen: within another function or a macro, and a text with braces ends none. Tests are left out.
    let function = |name: &str, lines: usize| format!("fn {name}() {{\n{}}}\n", "let x = \"}\";\n".repeat(lines - 2));
    let measure = |text: &str, exceptions: LongFunctions| {
        let mut used = BTreeSet::new();
        (too_long("a.rs", text, (exceptions, &[("a.rs", 900)]), &mut used), used.len())
    };
    let long = function("long", 81);
    let seen = "a.rs: long has 81 lines; 80 are the most".to_string();
    assert_eq!(measure(&function("short", 80), &[]), (vec![], 0));
    for text in [
        long.clone(),
        format!("impl A for [u8; 3] where u8: B {{\n    pub const unsafe {long}}}\n"),
        format!("fn outer() -> u8 {{ {long} 1 }}").replace("fn outer() -> u8 { ", "macro_rules! m { () => { ") + "}",
    ] {
        assert_eq!(measure(&text, &[]).0, std::slice::from_ref(&seen), "{text}");
    }
    assert_eq!(measure(&format!("fn outer() {{\n{long}}}\n"), &[]).0.len(), 2, "both of them");
    assert_eq!(
        measure(&format!("#[cfg(test)]\nmod tests {{\n{long}}}\n#[test]\n{long}fn a(f: fn(u8)) -> u8;\n"), &[]).0,
        [""; 0]
    );
    assert_eq!(measure(&long, &[("a.rs", "long", 81)]), (vec![], 1));
    assert_eq!(measure(&long, &[("a.rs", "long", 80)]).0, ["a.rs: long has 81 lines; it had 80"]);
    assert_eq!(measure(&"\n".repeat(900), &[]), (vec![], 1));
    assert_eq!(measure(&"\n".repeat(901), &[]).0, ["a.rs has 901 lines; it had 900"]);
    assert_eq!(
        measure(&format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", "\n".repeat(800), "\n".repeat(200)), &[]).0,
        [""; 0]
    );
}
