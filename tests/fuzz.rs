//! Files from outside, changed at random: no panic, no memory beyond a limit, only errors that say something.
//!
//! Each target runs in a process of its own whose memory is limited, for SAMEBITS_FUZZ_SECONDS (2; ci/nightly: 300). A
//! failure prints its input's seed; SAMEBITS_FUZZ_SEED repeats it.

use samebits_contract::table::Contract;
use samebits_contract::wire::{File, decode_answer, decode_request, read_frame};
use samebits_goldens::Store;
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_models::{Model, Precision};
use samebits_ops::Cpu;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

/// Words that get far into a parser.
const WORDS: [&str; 24] = [
    "\"",
    "{",
    "}",
    "[",
    "]",
    "=",
    "\n",
    "0",
    "-1",
    "1e999",
    "18446744073709551615",
    "9223372036854775808",
    "nan",
    "\\u0000",
    "__metadata__",
    "data_offsets",
    "shape",
    "BF16",
    "F8_E4M3",
    "[[case]]",
    "[[row]]",
    "M = 4000000000",
    "\u{fffd}",
    "../",
];

/// One to eight changes: bits, bytes, cuts, copies, words, numbers.
fn mutate(seed: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..1 + random.below(8) {
        if bytes.is_empty() {
            bytes.push(0);
        }
        // Half of the changes meet the first bytes, where lengths and headers stand.
        let reach = if random.below(2) == 0 { bytes.len().min(256) } else { bytes.len() };
        let at = random.below(reach);
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.below(256) as u8,
            2 => bytes.truncate(at),
            3 => {
                let word = WORDS[random.below(WORDS.len())].bytes();
                bytes.splice(at..at, word);
            }
            4 => {
                let end = (at + random.below(64)).min(bytes.len());
                bytes.drain(at..end);
            }
            5 => {
                let end = (at + random.below(64)).min(bytes.len());
                let copy = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, copy);
            }
            6 => {
                let end = (at + 8).min(bytes.len());
                let value = [0, 1, 7, u64::MAX, 1 << 33, i64::MAX as u64][random.below(6)].to_le_bytes();
                bytes[at..end].copy_from_slice(&value[..end - at]);
            }
            _ => {
                // A number becomes another one.
                if let Some(digit) = bytes[at..].iter().position(u8::is_ascii_digit) {
                    bytes[at + digit] = b'0' + random.below(10) as u8;
                }
            }
        }
    }
    bytes
}

/// Runs `target` on changed `seeds` in a process that may use a gigabyte.
fn fuzz(name: &str, seeds: &[Vec<u8>], target: impl Fn(&[u8])) {
    assert!(!seeds.is_empty() && seeds.iter().all(|seed| !seed.is_empty()), "nothing to change");
    if std::env::var_os("SAMEBITS_FUZZ_CHILD").is_none() {
        let program = std::env::current_exe().expect("this test's own path");
        let limited = "ulimit -v 1500000; exec \"$0\" --exact --nocapture \"$1\"";
        let mut child = Command::new("sh");
        child.args(["-c", limited]).arg(program).arg(name).env("SAMEBITS_FUZZ_CHILD", "1");
        let output = child.env("RUST_BACKTRACE", "0").output().expect("sh runs");
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && out.contains("1 passed"), "{name}: {}\n{out}{err}", output.status);
        let ran = out.lines().find(|line| line.contains("inputs in")).expect("it says how many it ran");
        println!("{ran}");
        return;
    }
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seconds = number("SAMEBITS_FUZZ_SECONDS").unwrap_or(2);
    let first = number("SAMEBITS_FUZZ_SEED");
    let start = Instant::now();
    let mut count = 0;
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    while start.elapsed() < Duration::from_secs(seconds) {
        let seed = first.unwrap_or(clock.wrapping_add(count << 20));
        let mut random = Random(seed);
        let input = mutate(&seeds[random.below(seeds.len())], &mut random);
        let (begun, length) = (Instant::now(), input.len());
        let survived = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| target(&input)));
        assert!(survived.is_ok(), "{name}: SAMEBITS_FUZZ_SEED={seed} panics");
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{name}: SAMEBITS_FUZZ_SEED={seed}: {length} bytes take too long"
        );
        count += 1;
        if first.is_some() {
            break;
        }
    }
    assert!(count > 0);
    println!("{name}: {count} inputs in {seconds} s");
}

fn messages() -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(repository().join("tests/vectors"))
        .expect("the vectors are there")
        .map(|entry| entry.expect("a file").path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .filter(|path| path.metadata().is_ok_and(|m| m.len() < 20_000))
        .collect();
    files.sort();
    files.iter().step_by(5).map(|path| std::fs::read(path).expect("a file")).collect()
}

#[test]
fn safetensors() {
    fuzz("safetensors", &messages(), |bytes| {
        if let Ok(file) = File::decode(bytes) {
            // What was read can be written, and read again.
            let again = File::decode(&file.encode()).expect("a file that was read can be read again");
            assert!(again.metadata == file.metadata && again.tensors.len() == file.tensors.len());
        }
    });
}

#[test]
fn wire_frames() {
    let frames = messages().into_iter().map(|body| [(body.len() as u64).to_le_bytes().to_vec(), body].concat());
    let ours = CpuImplementation::new(Cpu::new(samebits_ops::Isa::Scalar, 1, 1 << 28).expect("a scalar CPU"));
    fuzz("wire_frames", &frames.collect::<Vec<_>>(), |bytes| {
        let mut pipe = bytes;
        while let Ok(Some(frame)) = read_frame(&mut pipe) {
            let _ = decode_answer(&frame);
            if let Ok(case) = decode_request(&frame) {
                // Extents may be changed to large ones that the bytes still fit, where another one is 0.
                let large = case.inputs.values().any(|t| t.shape().iter().any(|&extent| extent > 1 << 16));
                if !large {
                    ours.run(&case);
                }
            }
        }
    });
}

#[test]
fn contract_tables() {
    let tables = Contract::tables();
    let names: Vec<String> = tables.keys().cloned().collect();
    // The table's number, then its text.
    let numbered = |(number, text): (usize, &String)| [&[number as u8][..], text.as_bytes()].concat();
    let seeds: Vec<Vec<u8>> = tables.values().enumerate().map(numbered).collect();
    fuzz("contract_tables", &seeds, |bytes| {
        let Some((&number, text)) = bytes.split_first() else { return };
        let mut changed: BTreeMap<String, String> = tables.clone();
        let name = names[number as usize % names.len()].clone();
        changed.insert(name, String::from_utf8_lossy(text).into_owned());
        if let Err(e) = Contract::of_tables(&changed) {
            let line = e.to_string();
            assert!(!line.contains('\n') && e.line > 0 && !e.message.is_empty(), "{line:?}");
        }
    });
}

#[test]
fn goldens_manifest() {
    let manifest = std::fs::read(repository().join("goldens/MANIFEST.toml")).expect("the manifest is there");
    // A few entries are as good as all.
    let text = String::from_utf8(manifest.clone()).expect("it is text");
    let end = text.match_indices("[[golden]]").nth(4).map_or(text.len(), |(at, _)| at);
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("data")).expect("a folder");
    let path = folder.path().join("MANIFEST.toml");
    fuzz("goldens_manifest", &[manifest[..end].to_vec(), manifest], |bytes| {
        std::fs::write(&path, bytes).expect("a file");
        // A change of any bit is noticed: by the parser, or by the digest of the manifest itself.
        let error = Store::open(folder.path()).expect_err("a changed manifest is accepted").to_string();
        assert!(!error.contains('\n'), "{error:?}");
    });
}

/// PEFT folders: what is changed of a config or of tensors is refused in one line, or fits the model.
#[test]
fn adapters() {
    let read = |name: &str| std::fs::read(repository().join("tests/adapters/qwen3").join(name)).expect("it is there");
    let (config, tensors) = (read("adapter_config.json"), read("adapter_model.safetensors"));
    let (cpu, model) = (Cpu::best(), repository().join("tests/checkpoints/qwen3"));
    let folder = tempfile::tempdir().expect("a folder");
    fuzz("adapters", &[config.clone(), tensors.clone()], |bytes| {
        let is_config = bytes.trim_ascii_start().starts_with(b"{");
        let (config, tensors) = if is_config { (bytes, &tensors[..]) } else { (&config[..], bytes) };
        std::fs::write(folder.path().join("adapter_config.json"), config).expect("a file");
        std::fs::write(folder.path().join("adapter_model.safetensors"), tensors).expect("a file");
        let model = Model::load(&model, Precision::Bf16, &cpu).expect("it is as it was");
        if let Err(e) = model.with_adapters(&cpu, &[("a".into(), folder.path().into())]) {
            let line = e.to_string();
            assert!(!line.contains('\n') && line.contains("adapter_") && line.len() < 8192, "{line:?}");
        }
    });
}

/// Files of torch.save: what is no dictionary of tensors is refused in one line.
#[test]
fn pickled_tensors() {
    let seeds = ["small.pth", "module.pth"].map(|name| repository().join("models/tests").join(name));
    let seeds = seeds.map(|path| std::fs::read(path).expect("it is there"));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.pth");
    fuzz("pickled_tensors", &seeds, |bytes| {
        std::fs::write(&path, bytes).expect("a file");
        if let Err(e) = Model::read_tensors(folder.path()) {
            let line = e.to_string();
            assert!(!line.contains('\n') && line.contains("model.pth") && line.len() < 8192, "{line:?}");
        }
    });
}
