//! The committed goldens are whole, cover what they should, and no damaged bit of them goes unnoticed.

use samebits_contract::spec;
use samebits_contract::table::{Contract, Slice};
use samebits_goldens::Store;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn store() -> Store {
    Store::open(&repository().join("goldens")).expect("the goldens open")
}

#[test]
fn every_file_is_whole() {
    let damaged = store().verify_files();
    assert!(damaged.is_empty(), "{}", damaged[0]);
    let kept: BTreeSet<PathBuf> = store().entries().filter_map(|entry| entry.file.clone()).map(PathBuf::from).collect();
    assert!(kept.len() > 100, "most outputs are kept whole, not {}", kept.len());
    let data = repository().join("goldens/data");
    for found in std::fs::read_dir(&data).unwrap() {
        let name = found.unwrap().file_name();
        assert!(kept.contains(&Path::new("data").join(&name)), "goldens/data/{}: no entry names it", name.display());
    }
}

/// Of quick cases with their outputs or the hash of these, of the other cases of slice default as hashes alone.
#[test]
fn the_cases_of_slice_default_are_blessed_and_no_others() {
    let contract = Contract::load(None).unwrap();
    let wanted = contract.cases(Slice::Exhaustive).filter(|case| case.blessed());
    let wanted: BTreeSet<(String, bool)> = wanted.map(|c| (c.name.clone(), c.kept_whole())).collect();
    let store = store();
    let found: BTreeSet<(String, bool)> = store.entries().map(|e| (e.case.clone(), e.sha256.is_some())).collect();
    let missing: Vec<_> = wanted.difference(&found).collect();
    let extra: Vec<_> = found.difference(&wanted).collect();
    let fix = "bless with `samebits bless --new`";
    assert!(missing.is_empty() && extra.is_empty(), "not blessed so: {missing:?}; blessed: {extra:?}; {fix}");
}

#[test]
fn the_store_stays_small() {
    fn bytes(folder: &Path) -> u64 {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        entries
            .map(|entry| if entry.path().is_dir() { bytes(&entry.path()) } else { entry.metadata().unwrap().len() })
            .sum()
    }
    let (hashes, ops) = (bytes(&repository().join("goldens/hashes")), spec::all().len() as u64);
    assert!(hashes < ops * (38 << 10), "goldens/hashes has {hashes} bytes of {ops} ops");
}

/// What `check --root` looks at, without the checkpoints: the marker and the goldens.
fn copy() -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for folder in ["contract", "goldens/data", "goldens/hashes", "tests"] {
        std::fs::create_dir_all(copy.path().join(folder)).unwrap();
    }
    for file in ["contract/ws1.toml", "goldens/MANIFEST.toml", "goldens/hashes/add.toml"] {
        std::fs::copy(repository().join(file), copy.path().join(file)).unwrap();
    }
    for found in std::fs::read_dir(repository().join("goldens/data")).unwrap() {
        let found = found.unwrap();
        std::fs::copy(found.path(), copy.path().join("goldens/data").join(found.file_name())).unwrap();
    }
    copy
}

fn check(root: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_samebits-tested"))
        .args(["check", "--op", "add", "--judgment", "golden"])
        .arg("--root")
        .arg(root)
        .arg("--out")
        .arg(root.join("report"))
        .output()
        .expect("samebits runs")
}

fn flip(path: &Path, byte: usize, bit: u8) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[byte] ^= 1 << bit;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_copy_is_green() {
    let root = copy();
    let output = check(root.path());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
}

/// In the length, the header and the elements of a data file.
#[test]
fn a_flipped_bit_of_a_data_file_is_red() {
    let root = copy();
    let entry = store().find("add/bf16/small-normal-bf16").cloned().expect("a quick case");
    let file = root.path().join("goldens").join(entry.file.expect("small outputs are kept"));
    let whole = std::fs::read(&file).unwrap();
    for (byte, bit) in [(0, 0), (10, 3), (whole.len() / 2, 7), (whole.len() - 1, 0)] {
        flip(&file, byte, bit);
        let output = check(root.path());
        assert_eq!(output.status.code(), Some(1), "bit {bit} of byte {byte}");
        let records = std::fs::read_to_string(root.path().join("report/records.jsonl")).unwrap();
        let red: Vec<&str> = records.lines().filter(|line| !line.contains(r#""verdict":"pass""#)).collect();
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(red.len() == 1 && red[0].contains(&entry.case) && red[0].contains(name), "{red:?}");
        std::fs::write(&file, &whole).unwrap();
    }
    std::fs::remove_file(&file).unwrap();
    assert_broken(&check(root.path()), file.file_name().unwrap().to_str().unwrap());
}

#[test]
fn a_flipped_bit_of_the_manifest_ends_the_run() {
    let root = copy();
    let manifest = root.path().join("goldens/MANIFEST.toml");
    let whole = std::fs::read(&manifest).unwrap();
    for byte in [0, 70, 200, whole.len() / 2, whole.len() - 3] {
        flip(&manifest, byte, 1);
        assert_broken(&check(root.path()), "goldens/MANIFEST.toml:");
        std::fs::write(&manifest, &whole).unwrap();
    }
}

#[test]
fn a_flipped_bit_of_a_file_of_hashes_ends_the_run() {
    let root = copy();
    let file = root.path().join("goldens/hashes/add.toml");
    let whole = std::fs::read(&file).unwrap();
    for byte in [0, 70, 200, whole.len() / 2, whole.len() - 3] {
        flip(&file, byte, 1);
        assert_broken(&check(root.path()), "goldens/hashes/add.toml:");
        std::fs::write(&file, &whole).unwrap();
    }
}

/// One line that names `part`, exit code 2, and no report.
#[track_caller]
fn assert_broken(output: &Output, part: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.lines().count() == 1 && stderr.contains(part), "`{part}` is not in: {stderr}");
    assert!(output.stdout.is_empty());
}
