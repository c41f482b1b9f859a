use super::*;
use samebits_contract::tensor::DType;
use std::collections::BTreeSet;

const CONTRACT: &str = "5f2b6c1d9e8a7f60415263748596a7b8c9dae0f1a2b3c4d5e6f708192a3b4c5d";

fn provenance(reason: &str) -> Provenance {
    Provenance {
        contract: CONTRACT.into(),
        toolchain: "rustc 1.95.0".into(),
        date: "2026-01-02".into(),
        reason: reason.into(),
    }
}

/// Two outputs of one case; `bits` are the bf16 elements of `y`.
fn outputs(bits: &[u16]) -> Outputs {
    let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
    let y = Tensor::from_bytes(DType::Bf16, &[bits.len() / 2, 2], &bytes).unwrap();
    BTreeMap::from([("y".into(), y), ("index".into(), Tensor::i32(&[2], vec![3, -1]))])
}

fn big(last: f32) -> Outputs {
    let mut data = vec![0.5; KEPT / 4];
    *data.last_mut().unwrap() = last;
    BTreeMap::from([("y".into(), Tensor::fp32(&[data.len()], data))])
}

fn answers() -> BTreeMap<String, Outputs> {
    BTreeMap::from([
        ("gemm/bf16/one".into(), outputs(&[0x3f80, 0x0000, 0x7fc0, 0x4000])),
        ("gemm/bf16/two".into(), outputs(&[0x3f80, 0x8000])),
        ("../../etc/pass wd".into(), outputs(&[1, 2])),
        ("gemm/fp32/big".into(), big(1.0)),
    ])
}

fn bless(store: &mut Store, answers: &BTreeMap<String, Outputs>) -> Writes {
    store.bless(answers, &BTreeSet::new(), &provenance("first run")).unwrap()
}

fn blessed() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::create(dir.path()).unwrap();
    bless(&mut store, &answers());
    let store = Store::open(dir.path()).unwrap();
    (dir, store)
}

/// The message of opening `dir`, which must be one line.
fn refused(dir: &Path) -> String {
    let message = Store::open(dir).unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

/// Every file of a store with its bytes.
fn state(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = |dir: &Path| {
        let entries = fs::read_dir(dir).into_iter().flatten().map(|f| f.unwrap().path());
        entries.filter(|p| p.is_file()).map(|p| (p.clone(), fs::read(p).unwrap())).collect::<Vec<_>>()
    };
    files(dir).into_iter().chain(files(&dir.join("data"))).chain(files(&dir.join(HASHES))).collect()
}

#[test]
fn round_trip() {
    let (dir, store) = blessed();
    assert_eq!(store.entries().count(), 4);
    for (case, outputs) in answers() {
        assert_eq!(store.verify(&case, &outputs), Verified::Match, "{case}");
        let entry = store.find(&case).unwrap();
        assert_eq!((entry.contract.as_str(), entry.reason.as_str()), (CONTRACT, "first run"));
        assert_eq!(entry.file.is_none(), case == "gemm/fp32/big");
    }
    assert_eq!(store.verify("gemm/bf16/three", &outputs(&[0, 0])), Verified::Absent);
    assert_eq!(store.verify_files(), []);
    assert_eq!(state(dir.path()).len(), 4, "a manifest and three data files, and nothing outside data/");
}

#[test]
fn a_mismatch_names_the_first_element() {
    let (_dir, store) = blessed();
    let evidence = |case: &str, outputs: &Outputs| match store.verify(case, outputs) {
        Verified::Mismatch(evidence) => evidence,
        other => panic!("{other:?}"),
    };
    // +0 for -0.
    let e = evidence("gemm/bf16/two", &outputs(&[0x3f80, 0x0000]));
    assert_eq!((e.output.as_str(), e.coordinates.as_slice(), e.count, e.total), ("y", &[0, 1][..], 1, 2));
    assert_eq!((e.expected_bits.as_str(), e.found_bits.as_str()), ("0x8000", "0x0000"));
    // Another NaN.
    let e = evidence("gemm/bf16/one", &outputs(&[0x3f80, 0x0000, 0x7fc1, 0x4000]));
    assert_eq!((e.coordinates.as_slice(), e.found_bits.as_str()), (&[1, 0][..], "0x7fc1"));
    // Hash only.
    let e = evidence("gemm/fp32/big", &big(1.000_000_1));
    assert!(e.message.starts_with("y: SHA-256 ") && e.expected.len() == 64 && e.expected != e.found, "{e:?}");
    let shape = BTreeMap::from([("y".to_string(), Tensor::fp32(&[1], vec![0.5]))]);
    assert!(evidence("gemm/fp32/big", &shape).message.contains("fp32 [1] where fp32 [16384] was blessed"));
    // The same elements in another shape, an output too few and one too many.
    let mut other = outputs(&[0x3f80, 0x8000]);
    other.insert("y".into(), Tensor::from_bytes(DType::Bf16, &[2, 1], &[0x80, 0x3f, 0, 0x80]).unwrap());
    assert!(evidence("gemm/bf16/two", &other).message.contains("shape [2, 1]"));
    other.remove("y");
    assert!(evidence("gemm/bf16/two", &other).message.contains("does not have it"));
    let mut other = outputs(&[0x3f80, 0x8000]);
    other.insert("z".into(), Tensor::i32(&[1], vec![0]));
    assert!(evidence("gemm/bf16/two", &other).message.contains("not blessed"));
}

#[test]
fn every_flipped_bit_of_a_data_file_is_noticed_and_named() {
    let (dir, store) = blessed();
    for entry in store.entries().filter(|entry| entry.file.is_some()) {
        let path = dir.path().join(entry.file.as_ref().unwrap());
        let good = fs::read(&path).unwrap();
        // Every bit of one file, and a stride through the others that meets every byte.
        let stride = if entry.case == "gemm/bf16/one" { 1 } else { 7 };
        for bit in (0..good.len() * 8).step_by(stride) {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bad).unwrap();
            let damage = store.verify_files();
            assert_eq!(damage.iter().map(|d| &d.path).collect::<Vec<_>>(), [&path], "bit {bit}");
            let Verified::Damaged(damage) = store.verify(&entry.case, &answers()[&entry.case]) else {
                panic!("bit {bit} was not noticed")
            };
            assert_eq!(damage.path, path);
        }
        fs::write(&path, &good).unwrap();
        assert_eq!(store.verify_files(), []);
    }
}

#[test]
fn every_flipped_bit_of_the_manifest_is_refused() {
    // One case, so that the test stays quick; the bytes are what `open` reads.
    let dir = tempfile::tempdir().unwrap();
    let one = BTreeMap::from([("add/one".to_string(), outputs(&[1, 2]))]);
    bless(&mut Store::create(dir.path()).unwrap(), &one);
    let good = fs::read(dir.path().join(MANIFEST)).unwrap();
    assert!(manifest::parse(&good, dir.path()).is_ok());
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        let (line, why) = manifest::parse(&bad, dir.path()).expect_err("a flipped bit was not noticed");
        assert!(line <= 1 + good.iter().filter(|&&b| b == b'\n').count() && !why.contains('\n'), "bit {bit}: {why}");
    }
    for length in 0..good.len() {
        assert!(manifest::parse(&good[..length], dir.path()).is_err(), "{length} bytes were accepted");
    }
    // And through the file itself.
    fs::write(dir.path().join(MANIFEST), &good[..good.len() - 1]).unwrap();
    assert!(refused(dir.path()).contains("MANIFEST.toml:2: the digest does not match"));
}

#[test]
fn the_manifest_is_strict() {
    let (dir, _) = blessed();
    let path = dir.path().join(MANIFEST);
    let good = fs::read_to_string(&path).unwrap();
    let line = |words: &str| good.lines().position(|l| l.contains(words)).unwrap() + 1;
    let file = good.lines().find(|l| l.starts_with("file = ") && l.contains("two")).unwrap();
    let hash = good.lines().find(|l| l.starts_with("sha256 = ")).unwrap();
    let two = &good[good.find("[[golden]]\ncase = \"gemm/bf16/two\"").unwrap()..];
    let two = &two[..two[1..].find("[[golden]]").unwrap() + 1];
    let plants = [
        (good.replacen("case = \"gemm", "typo = 1\ncase = \"gemm", 1), line("case = \"gemm"), "typo"),
        (good.replacen(file, "file = \"data/../../x.safetensors\"", 1), line(file), "not `data/<name>"),
        (good.replacen(file, "file = \"/etc/passwd\"", 1), line(file), "not `data/<name>"),
        (good.replacen(file, "file = \"data\\\\x.safetensors\"", 1), line(file), "not `data/<name>"),
        (good.replacen(file, "file = \"data/gone.safetensors\"", 1), line(file), "`data/gone.safetensors` is missing"),
        (good.replacen(hash, "sha256 = \"ABC\"", 1), line(hash), "not a SHA-256"),
        (good.replacen("reason = \"first run\"", "reason = \" \"", 1), line("reason = "), "`reason` is empty"),
        (good.replacen("reason = \"first run\"", "reason = \"better\"", 1), 2, "digest"),
        (format!("{good}{two}"), good.lines().count() + 2, "`gemm/bf16/two` stands here twice"),
    ];
    for (text, line, words) in plants {
        assert_ne!(text, good, "{words}");
        fs::write(&path, text).unwrap();
        let message = refused(dir.path());
        assert!(message.starts_with(&format!("{}:{line}: ", path.display())), "{words}: {message}");
        assert!(message.contains(words), "{words}: {message}");
    }
    fs::write(&path, &good).unwrap();
    assert!(Store::open(dir.path()).is_ok());
}

#[cfg(unix)]
#[test]
fn a_link_in_place_of_a_data_file_is_refused() {
    let (dir, store) = blessed();
    let path = dir.path().join(store.find("gemm/bf16/one").unwrap().file.as_ref().unwrap());
    let outside = tempfile::NamedTempFile::new().unwrap();
    fs::copy(&path, outside.path()).unwrap();
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(outside.path(), &path).unwrap();
    assert!(refused(dir.path()).contains("not a plain file"));
}

#[test]
fn blessing_the_same_again_changes_nothing() {
    let (dir, mut store) = blessed();
    let before = state(dir.path());
    let writes = store.bless(&answers(), &BTreeSet::new(), &provenance("again")).unwrap();
    assert_eq!(writes, Writes::default());
    assert_eq!(state(dir.path()), before);
}

#[test]
fn blessing_replaces_drops_and_cleans_up() {
    let (dir, mut store) = blessed();
    let old = store.find("gemm/bf16/one").unwrap().file.clone().unwrap();
    let two = store.find("gemm/bf16/two").unwrap().file.clone().unwrap();
    let new = outputs(&[0x3f81, 0, 0, 0]);
    let answers = BTreeMap::from([("gemm/bf16/one".to_string(), new.clone())]);
    let dropped = BTreeSet::from(["gemm/bf16/two".to_string()]);
    let writes = store.bless(&answers, &dropped, &provenance("a new rounding")).unwrap();
    let name = store.find("gemm/bf16/one").unwrap().file.clone().unwrap();
    assert_eq!(writes.written, [name]);
    assert_eq!(writes.removed, [old, two]);
    assert_eq!((writes.blessed.len(), writes.dropped.len()), (1, 1));
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(store.verify("gemm/bf16/one", &new), Verified::Match);
    assert_eq!(store.verify("gemm/bf16/two", &new), Verified::Absent);
    assert_eq!(store.find("gemm/bf16/one").unwrap().reason, "a new rounding");
    assert_eq!(store.find("gemm/fp32/big").unwrap().reason, "first run");
}

#[test]
fn an_interruption_before_the_manifest_leaves_the_old_state() {
    let (dir, mut store) = blessed();
    let manifest = fs::read(dir.path().join(MANIFEST)).unwrap();
    let stray = bless::file_name("gemm/bf16/one", &"0".repeat(64));
    store.write_data(&BTreeMap::from([(stray.clone(), b"new".to_vec())])).unwrap();
    fs::write(dir.path().join("data/.half.tmp"), "ha").unwrap();
    assert_eq!(fs::read(dir.path().join(MANIFEST)).unwrap(), manifest);
    let reopened = Store::open(dir.path()).unwrap();
    assert_eq!(reopened.verify_files(), []);
    for (case, outputs) in answers() {
        assert_eq!(reopened.verify(&case, &outputs), Verified::Match, "{case}");
    }
    // The next blessing clears what the interrupted one left.
    assert_eq!(bless(&mut store, &answers()).removed, ["data/.half.tmp".to_string(), stray]);
}

#[test]
fn a_write_that_fails_leaves_the_old_state() {
    let (dir, mut store) = blessed();
    let before = state(dir.path());
    // A folder stands where the data file must go.
    let new = BTreeMap::from([("gemm/bf16/one".to_string(), outputs(&[9, 9]))]);
    let mut elsewhere = Store::create(tempfile::tempdir().unwrap().path()).unwrap();
    fs::create_dir_all(&elsewhere.dir).unwrap();
    bless(&mut elsewhere, &new);
    let file = elsewhere.find("gemm/bf16/one").unwrap().file.clone().unwrap();
    fs::remove_dir_all(&elsewhere.dir).unwrap();
    fs::create_dir(dir.path().join(&file)).unwrap();
    let error = store.bless(&new, &BTreeSet::new(), &provenance("other bits")).unwrap_err();
    assert!(error.to_string().contains(&file), "{error}");
    assert_eq!(state(dir.path()), before);
    assert_eq!(store.verify("gemm/bf16/one", &answers()["gemm/bf16/one"]), Verified::Match);
    Store::open(dir.path()).unwrap();
}

#[test]
fn blessing_again_repairs_a_damaged_file() {
    let (dir, mut store) = blessed();
    let file = store.find("gemm/bf16/one").unwrap().file.clone().unwrap();
    fs::write(dir.path().join(&file), "").unwrap();
    assert_eq!(bless(&mut store, &answers()).written, [file]);
    assert_eq!(store.verify_files(), []);
}

#[test]
fn a_blessing_without_reason_or_content_writes_nothing() {
    let (dir, mut store) = blessed();
    let before = state(dir.path());
    let new = BTreeMap::from([("gemm/bf16/one".to_string(), outputs(&[9, 9]))]);
    let none = BTreeSet::new();
    let mut refused = |answers: &BTreeMap<String, Outputs>, dropped: &BTreeSet<String>, provenance: Provenance| {
        assert!(matches!(store.bless(answers, dropped, &provenance), Err(GoldenError::Refused(_))));
    };
    refused(&new, &none, provenance(" \n"));
    refused(&new, &none, Provenance { contract: "x".into(), ..provenance("r") });
    refused(&new, &none, Provenance { date: String::new(), ..provenance("r") });
    refused(&BTreeMap::from([("a".into(), Outputs::new())]), &none, provenance("r"));
    refused(&BTreeMap::from([(String::new(), outputs(&[1, 2]))]), &none, provenance("r"));
    refused(&new, &BTreeSet::from(["gemm/bf16/one".to_string()]), provenance("r"));
    refused(&new, &BTreeSet::from(["no/such".to_string()]), provenance("r"));
    assert_eq!(state(dir.path()), before);
    assert!(matches!(Store::create(dir.path()), Err(GoldenError::Refused(_))));
    assert!(Store::open(&dir.path().join("elsewhere")).unwrap_err().to_string().contains(MANIFEST));
}

/// A folder of goldens made elsewhere: a small case and a large one of 1000 rows.
fn made_elsewhere() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let told = [("maker", "torch 2.15.0"), ("command", "ops.py out"), ("date", "2026-11-21")];
    let large = Tensor::fp32(&[1000, 40], (0..40_000).map(|i| i as f32).collect());
    let index = Tensor::i32(&[1000], (0..1000).collect());
    let cases = [
        ("small", outputs(&[0x3f80, 0x8000])),
        ("large", BTreeMap::from([("y".to_string(), large), ("index".to_string(), index)])),
    ];
    let mut list = String::new();
    for (case, tensors) in cases {
        let mut metadata: BTreeMap<String, String> = told.map(|(k, v)| (k.into(), v.into())).into();
        metadata.insert("case".into(), case.into());
        let bytes = wire::File { tensors, metadata }.encode();
        fs::write(folder.path().join(format!("{case}.safetensors")), &bytes).unwrap();
        list += &format!("{}  {case}.safetensors\n", sha256(&bytes));
    }
    fs::write(folder.path().join("SHA256SUMS"), list).unwrap();
    folder
}

fn import(from: &Path, keep: usize) -> Result<(tempfile::TempDir, Store), String> {
    let dir = tempfile::tempdir().unwrap();
    let sources = sources(from).map_err(|e| e.to_string())?;
    let mut store = Store::create(dir.path()).unwrap();
    store.import(&sources, keep, CONTRACT, "kept", &|_, _| Ok(())).map_err(|e| e.to_string())?;
    assert_eq!(store.entries, Store::open(dir.path()).unwrap().entries);
    Ok((dir, store))
}

#[test]
fn goldens_made_elsewhere_are_taken_over() {
    let folder = made_elsewhere();
    let large = |change: Option<usize>| {
        let mut values: Vec<f32> = (0..40_000).map(|i| i as f32).collect();
        change.into_iter().for_each(|at| values[at] = -1.0);
        let index = Tensor::i32(&[1000], (0..1000).collect());
        BTreeMap::from([("y".to_string(), Tensor::fp32(&[1000, 40], values)), ("index".to_string(), index)])
    };
    for (keep, rows) in [(KEPT, Some(374)), (1 << 20, None), (0, None), (5000, Some(5))] {
        let (dir, store) = import(folder.path(), keep).unwrap();
        let entry = store.find("large").unwrap();
        assert_eq!((entry.rows, entry.file.is_some()), (rows, keep > 0), "{keep}");
        assert_eq!((entry.toolchain.as_str(), entry.command.as_deref()), ("torch 2.15.0", Some("ops.py out")));
        if let Some(file) = &entry.file {
            assert!(fs::metadata(dir.path().join(file)).unwrap().len() <= keep as u64, "{keep}");
        }
        assert_eq!(store.verify_files(), []);
        assert_eq!(store.verify("large", &large(None)), Verified::Match);
        // Inside of what is kept the element is named, behind it the hash.
        for at in [0, 199, 39_999] {
            let Verified::Mismatch(evidence) = store.verify("large", &large(Some(at))) else { panic!("{keep}: {at}") };
            let held = keep >= 1 << 20 || at < rows.unwrap_or(0) * 40;
            assert_eq!(evidence.message.contains("SHA-256"), !held, "{keep} {at}: {}", evidence.message);
            assert!(!held || evidence.index == at, "{keep} {at}: {}", evidence.message);
        }
    }
}

#[test]
fn goldens_made_elsewhere_are_whole_or_refused() {
    let folder = made_elsewhere();
    for name in ["small.safetensors", "large.safetensors", "SHA256SUMS"] {
        let path = folder.path().join(name);
        let good = fs::read(&path).unwrap();
        let step = good.len() / 40 + 1;
        for byte in (0..good.len()).step_by(step) {
            let mut bad = good.clone();
            bad[byte] ^= 1 << (byte % 8);
            fs::write(&path, bad).unwrap();
            let message = import(folder.path(), KEPT).unwrap_err();
            assert!(message.contains(name) || name == "SHA256SUMS", "byte {byte} of {name}: {message}");
            assert!(!message.contains('\n'), "{message}");
        }
        fs::write(&path, good).unwrap();
    }
    fs::copy(folder.path().join("small.safetensors"), folder.path().join("more.safetensors")).unwrap();
    assert!(import(folder.path(), KEPT).unwrap_err().contains("more.safetensors"));
    // Without a word of where it comes from.
    let bare = tempfile::tempdir().unwrap();
    let bytes = wire::File { tensors: outputs(&[1, 2]), metadata: BTreeMap::new() }.encode();
    fs::write(bare.path().join("x.safetensors"), &bytes).unwrap();
    fs::write(bare.path().join("SHA256SUMS"), format!("{}  x.safetensors\n", sha256(&bytes))).unwrap();
    assert!(import(bare.path(), KEPT).unwrap_err().contains("metadata `case` is missing"));
}

/// A norm with 5 rows, one with 200, a vector of 3 and a single row.
fn hashed() -> BTreeMap<String, Outputs> {
    let rows = |rows: usize, n: usize| Tensor::fp32(&[rows, n], (0..rows * n).map(|i| i as f32 / 8.0).collect());
    let y = |tensor: Tensor| BTreeMap::from([("y".to_string(), tensor)]);
    BTreeMap::from([
        ("norm/bf16/five".into(), y(rows(5, 7))),
        ("norm/bf16/many".into(), y(rows(200, 3))),
        (
            "route/bf16/two".into(),
            BTreeMap::from([
                ("lse".to_string(), Tensor::fp32(&[3], vec![1.0, 2.0, 3.0])),
                ("rank".to_string(), Tensor::i32(&[1, 4], vec![0, -1, 1, 2])),
            ]),
        ),
    ])
}

fn blessed_hashes() -> (tempfile::TempDir, Store) {
    let (dir, mut store) = blessed();
    let writes = store.bless_hashes(&hashed(), &BTreeSet::new(), &provenance("second run")).unwrap();
    assert_eq!((writes.blessed.len(), writes.written.len()), (3, 0));
    assert_eq!(store.entries, Store::open(dir.path()).unwrap().entries);
    (dir, store)
}

#[test]
fn hashes_alone_take_a_line_a_case() {
    let (dir, store) = blessed_hashes();
    let manifest = fs::read_to_string(dir.path().join(MANIFEST)).unwrap();
    assert!(!manifest.contains("norm/bf16"), "the manifest has the others");
    let text = fs::read_to_string(dir.path().join("hashes/norm.toml")).unwrap();
    assert_eq!(text.lines().filter(|line| line.contains("norm/bf16")).count(), 2, "{text}");
    for (case, outputs) in hashed().into_iter().chain(answers()) {
        assert_eq!(store.verify(&case, &outputs), Verified::Match, "{case}");
    }
    assert_eq!(store.verify_files(), []);
    // Again: nothing is written.
    let before = state(dir.path());
    let mut store = Store::open(dir.path()).unwrap();
    let writes = store.bless_hashes(&hashed(), &BTreeSet::new(), &provenance("again")).unwrap();
    assert_eq!((writes, state(dir.path())), (Writes::default(), before));
}

#[test]
fn a_hash_names_the_first_row_that_differs() {
    let (_dir, store) = blessed_hashes();
    let message = |case: &str, change: &dyn Fn(&mut Outputs)| {
        let mut outputs = hashed().remove(case).unwrap();
        change(&mut outputs);
        match store.verify(case, &outputs) {
            Verified::Mismatch(evidence) => evidence.message,
            other => panic!("{other:?}"),
        }
    };
    let plus = |at: &[usize]| {
        let at = at.to_vec();
        move |outputs: &mut Outputs| {
            let y = &outputs["y"];
            let mut values: Vec<f32> = (0..y.len()).map(|i| y.value(i) as f32).collect();
            at.iter().for_each(|&i| values[i] = values[i].next_up());
            outputs.insert("y".into(), Tensor::fp32(y.shape(), values));
        }
    };
    let found = message("norm/bf16/five", &plus(&[20, 34]));
    assert!(found.starts_with("y: 2 of 5 rows differ, first [2]; SHA-256 "), "{found}");
    let found = message("norm/bf16/many", &plus(&[3 * 42]));
    assert!(found.starts_with("y: 1 of 50 runs of 4 rows differ, first [40] to [43]; "), "{found}");
    let found = message("route/bf16/two", &|outputs| {
        outputs.insert("lse".into(), Tensor::fp32(&[3], vec![1.0, -2.0, 3.0]));
    });
    assert!(found.starts_with("lse: 1 of 3 rows differ, first [1]; "), "{found}");
    // One row: its hash is that of all.
    let found = message("route/bf16/two", &|outputs| {
        outputs.insert("rank".into(), Tensor::i32(&[1, 4], vec![0, 1, -1, 2]));
    });
    assert!(found.starts_with("rank: SHA-256 "), "{found}");
    let found = message("route/bf16/two", &|outputs| {
        outputs.insert("lse".into(), Tensor::fp32(&[3, 1], vec![1.0, 2.0, 3.0]));
    });
    assert!(found.contains("fp32 [3, 1] where fp32 [3] was blessed"), "{found}");
    let found = message("route/bf16/two", &|outputs| drop(outputs.remove("lse")));
    assert!(found.contains("does not have it"), "{found}");
}

#[test]
fn every_flipped_bit_of_a_file_of_hashes_is_refused() {
    let (dir, _) = blessed_hashes();
    let path = dir.path().join("hashes/norm.toml");
    let good = fs::read(&path).unwrap();
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        let (_, why) = hashes::parse(&bad, "norm").expect_err("a flipped bit was not noticed");
        assert!(!why.contains('\n'), "bit {bit}: {why}");
    }
    fs::write(&path, &good[..good.len() - 1]).unwrap();
    assert!(refused(dir.path()).contains("hashes/norm.toml:2: the digest does not match"));
    // With a digest that matches, what it says is still looked at.
    let text = String::from_utf8(good.clone()).unwrap();
    let body = text.splitn(3, '\n').nth(2).unwrap();
    let plants = [
        (body.replacen("bf16/five", "bf16/many", 1), "duplicate key"),
        (body.replacen("\"norm/bf16/five", "\"gemm/bf16/one", 1), "is no case of norm"),
        (body.replacen(" 5x7 ", " 6x7 ", 1), "not `<output> <dtype> <shape>"),
        (body.replacen(" 5x7 ", " five ", 1), "not `<output> <dtype> <shape>"),
        (body.replacen("reason = \"second run\"", "reason = \"\"", 1), "`reason` is empty"),
        (body.replacen("contract = \"5f2b", "contract = \"XXXX", 1), "`contract` is not a SHA-256"),
    ];
    for (changed, words) in plants {
        assert_ne!(changed, body, "{words}");
        fs::write(&path, manifest::seal(&changed)).unwrap();
        let message = refused(dir.path());
        assert!(message.contains("hashes/norm.toml:") && message.contains(words), "{words}: {message}");
    }
    fs::write(&path, good).unwrap();
    fs::write(dir.path().join("hashes/notes.txt"), "").unwrap();
    assert!(refused(dir.path()).contains("`notes.txt` is no file of hashes"));
}

/// From the manifest to the hashes and back, with every state in between readable.
#[test]
fn a_case_can_change_how_it_is_kept() {
    let (dir, mut store) = blessed_hashes();
    let one = |case: &str, from: &BTreeMap<String, Outputs>| BTreeMap::from([(case.to_string(), from[case].clone())]);
    let (moved, back) = (one("gemm/bf16/one", &answers()), one("norm/bf16/five", &hashed()));
    store.bless_hashes(&moved, &BTreeSet::new(), &provenance("smaller")).unwrap();
    store.bless(&back, &BTreeSet::new(), &provenance("whole")).unwrap();
    let mut store = Store::open(dir.path()).unwrap();
    let kept = |store: &Store, case: &str| store.find(case).unwrap().file.is_some();
    assert!(!kept(&store, "gemm/bf16/one") && kept(&store, "norm/bf16/five"));
    for (case, outputs) in hashed().into_iter().chain(answers()) {
        assert_eq!(store.verify(&case, &outputs), Verified::Match, "{case}");
    }
    // The last case of an op takes its file along.
    let dropped = BTreeSet::from(["route/bf16/two".to_string()]);
    fs::write(dir.path().join("hashes/.half.tmp"), "ha").unwrap();
    let writes = store.bless(&BTreeMap::new(), &dropped, &provenance("gone")).unwrap();
    assert_eq!(writes.removed, ["hashes/.half.tmp"]);
    assert!(!dir.path().join("hashes/route.toml").exists());
    Store::open(dir.path()).unwrap();
}

#[test]
fn hashes_of_a_case_without_an_op_are_refused() {
    let (dir, mut store) = blessed_hashes();
    let before = state(dir.path());
    for case in ["../etc/passwd", "big", "/x", "A/x"] {
        let answers = BTreeMap::from([(case.to_string(), outputs(&[1, 2]))]);
        let error = store.bless_hashes(&answers, &BTreeSet::new(), &provenance("r")).unwrap_err();
        assert!(matches!(error, GoldenError::Refused(_)), "{case}: {error}");
    }
    assert_eq!(state(dir.path()), before);
}
