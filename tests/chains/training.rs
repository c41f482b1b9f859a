//! Training: killed at any time and started again, or run in another way, it ends with the same bits.

use super::{checkpoint, covering, samebits};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use samebits_ops::Isa;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// Steps of the runs from fresh weights, and sequences of each.
const STEPS: usize = 20;
const BATCH: &str = "8";

/// Writes the model of a checkpoint with fresh weights, in f32: what `fresh` of `goldens/generate/training.py` draws.
fn fresh(name: &str, seed: u64, dir: &Path) {
    let file = std::fs::read(checkpoint(name).join("model.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&file).unwrap();
    let shapes: BTreeMap<String, Vec<usize>> = stored.iter().map(|(n, t)| (n.into(), t.shape().to_vec())).collect();
    let drawn = shapes.into_iter().enumerate().map(|(number, (name, shape))| {
        let first = (seed << 48) + ((number as u64) << 32);
        let values = (0..shape.iter().product::<usize>() as u64).map(|index| {
            let z = (first + index).wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            let value = (((z ^ z >> 31) >> 40) as f32 - 8_388_608.0) / 268_435_456.0;
            if name.contains("norm") { 1.0 } else { value }
        });
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        (name.clone(), shape, bytes)
    });
    let drawn: Vec<_> = drawn.collect();
    let views = drawn.iter().map(|(n, shape, data)| (n, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    std::fs::create_dir(dir).unwrap();
    std::fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    std::fs::copy(checkpoint(name).join("config.json"), dir.join("config.json")).unwrap();
}

/// What a run from fresh weights prints: a line for each step. `words` are further arguments.
fn steps_of(name: &str, model: &Path, steps: usize, words: &str) -> Vec<String> {
    let data = checkpoint("").join(format!("../gradients/{name}.safetensors"));
    let (out, steps) = (tempfile::tempdir().unwrap(), steps.to_string());
    let paths = [model, &data, out.path()].map(|path| path.to_str().unwrap());
    let args = ["train", "--model", paths[0], "--data", paths[1], "--out", paths[2], "--steps", &steps];
    let optimizer = ["--batch", BATCH, "--save-every", &steps, "--lr", "3e-4", "--weight-decay", "0.01"];
    let found = samebits(&[&args[..], &optimizer, &words.split(' ').collect::<Vec<_>>()].concat());
    assert!(found.status.success(), "{words}: {}", String::from_utf8_lossy(&found.stderr));
    String::from_utf8(found.stdout).unwrap().lines().map(String::from).collect()
}

fn losses(lines: &[String]) -> Vec<f64> {
    lines.iter().map(|line| line.split(' ').nth(3).unwrap().parse().unwrap()).collect()
}

/// The mean of the squares of differences.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / a.len() as f64
}

/// From fresh weights: in fp32 every loss is within 1e-3 of torch's, in bf16 the curves are, over all seeds together, no
/// further from torch's fp32 than those of its mixed precision. One curve alone may be near or far by chance.
#[test]
fn loss_curves_are_as_near_as_those_of_torch() {
    let recorded = std::fs::read(checkpoint("").join("../training.json")).unwrap();
    let recorded: Value = serde_json::from_slice(&recorded).unwrap();
    let runs = recorded["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 8);
    let dir = tempfile::tempdir().unwrap();
    let [mut ours, mut of_torch] = [0.0; 2];
    for (seed, run) in runs.iter().enumerate() {
        let of = |way: &str| -> Vec<f64> { run[way].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect() };
        let (fp32, mixed, model) = (of("fp32"), of("mixed"), dir.path().join(seed.to_string()));
        fresh("qwen3-adder", seed as u64, &model);
        if seed == 0 || covering::all() {
            let found = losses(&steps_of("qwen3-adder", &model, STEPS, "--micro-batch 8 --dtype fp32"));
            assert!(fp32[STEPS - 1] < fp32[0] - 1.0, "it learns nothing");
            let most = found.iter().zip(&fp32).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(most <= 1e-3 && found.len() == STEPS, "seed {seed}: {most:e} from {fp32:?}: {found:?}");
        }
        ours += apart(&losses(&steps_of("qwen3-adder", &model, STEPS, "--micro-batch 8")), &fp32);
        of_torch += apart(&mixed, &fp32);
    }
    assert!(ours <= of_torch, "{:e} from fp32, {:e} of torch", (ours / 8.0).sqrt(), (of_torch / 8.0).sqrt());
}

/// Ways to run, all with the same bits.
const WAYS: [&str; 6] = [
    "--micro-batch 3 --pad right:2 --recompute --threads 3",
    "--micro-batch 8 --pack --budget 300000",
    "--micro-batch 2 --pad left:3 --threads 1",
    "--micro-batch 8 --pad left:1 --pack --recompute --threads 2",
    "--micro-batch 1 --pad right:5 --pack --budget 262144",
    "--micro-batch 5 --recompute --threads 1",
];

/// From fresh weights, 20 steps of the adder and two of a mixture and of latent attention: the same SHA-256 of all weights behind
/// every step, in every way to run, on the instruction sets of the machine in turn, and those that were recorded, by
/// `SAMEBITS_RECORD=1 cargo test -p samebits-tests --test chains fresh_weights`.
#[test]
fn fresh_weights_have_one_hash_in_every_way_to_run() {
    let real = |isa: &Isa| isa.emulates().is_none() && *isa != Isa::best();
    // The best comes last, the slowest late.
    let isas: Vec<Isa> = Isa::of_machine().filter(real).collect();
    let isas: Vec<Isa> = isas.into_iter().rev().chain([Isa::best()]).collect();
    let dir = tempfile::tempdir().unwrap();
    let mut hashes = String::new();
    for (name, steps) in [("qwen3-adder", STEPS), ("qwen3-moe", 2), ("deepseek-v3", 2)] {
        let model = dir.path().join(name);
        fresh(name, 0, &model);
        let expected = steps_of(name, &model, steps, "--threads 2");
        assert_eq!(expected.len(), steps, "{name}");
        let ways = if covering::all() || steps == 2 { WAYS.len() } else { 2 };
        for (way, isa) in WAYS[..ways].iter().zip(isas.iter().cycle()) {
            let words = format!("{way} --isa {isa}");
            assert_eq!(steps_of(name, &model, steps, &words), expected, "{name}: {words}");
        }
        hashes += &format!("{name} {steps} {}\n", expected[steps - 1].rsplit(' ').next().unwrap());
    }
    let path = checkpoint("").join("../training.txt");
    if std::env::var_os("SAMEBITS_RECORD").is_some() {
        std::fs::write(&path, &hashes).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), hashes);
}

/// The bytes of all files of a run.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

fn arguments(steps: &str, out: &Path) -> Vec<String> {
    let data = checkpoint("").join("../gradients/llama-linear.safetensors");
    let (model, data) = (checkpoint("llama-linear"), data.to_str().unwrap().to_string());
    let args = ["train", "--model", model.to_str().unwrap(), "--data", &data, "--steps", steps, "--batch", "6"];
    let out = ["--out", out.to_str().unwrap(), "--lr", "0.003", "--groups", "2"];
    args.iter().chain(&out).map(|arg| arg.to_string()).collect()
}

fn train(steps: &str, out: &Path, extra: &[&str]) -> std::process::Output {
    let args = arguments(steps, out);
    samebits(&args.iter().map(String::as_str).chain(extra.iter().copied()).collect::<Vec<_>>())
}

#[test]
fn a_killed_run_ends_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole");
    let found = train("16", &whole, &[]);
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    let lines: Vec<String> = String::from_utf8(found.stdout).unwrap().lines().map(String::from).collect();
    assert_eq!(lines.len(), 16);
    let loss = |line: &String| line.split(' ').nth(3).unwrap().parse::<f64>().unwrap();
    assert!(loss(&lines[15]) < loss(&lines[0]) - 0.1, "it learns nothing: {lines:?}");
    let whole = files(&whole);
    assert!(
        ["config.json", "model.safetensors", "state.safetensors", "steps.jsonl"].iter().all(|f| whole.contains_key(*f))
    );

    // Another way to run, killed behind several of its steps.
    let killed = dir.path().join("killed");
    let extra = ["--micro-batch", "2", "--pad", "left:1", "--recompute", "--isa", "scalar", "--save-every", "2"];
    let mut early = 0;
    for lines_seen in [2, 4] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_samebits-tested"))
            .args(arguments("16", &killed))
            .args(extra)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut shown = BufReader::new(child.stdout.take().unwrap()).lines();
        for _ in 0..lines_seen {
            let line = shown.next().unwrap().unwrap();
            assert!(lines.contains(&line), "{line}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        early += usize::from(!killed.join("model.safetensors").exists());
    }
    assert!(early > 0, "it ended before it was killed");
    let found = train("16", &killed, &[]);
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    let left = String::from_utf8(found.stdout).unwrap().lines().count();
    assert!(left < 16, "it began anew");
    let killed_files = files(&killed);
    assert!(whole.keys().eq(killed_files.keys()), "{:?}", killed_files.keys());
    for (name, bytes) in &whole {
        assert!(killed_files[name] == *bytes, "{name} differs");
    }

    // What is not the same run is refused, and nothing is touched.
    for (extra, part) in
        [(&["--lr", "0.1"][..], "the run began with optimizer"), (&["--groups", "1"], "groups 2, not 1")]
    {
        let mut args = arguments("17", &killed);
        let at = args.iter().position(|arg| arg == extra[0]).unwrap();
        args[at + 1] = extra[1].into();
        let found = samebits(&args.iter().map(String::as_str).collect::<Vec<_>>());
        let line = String::from_utf8_lossy(&found.stderr).to_string();
        assert_eq!((found.status.code(), line.lines().count()), (Some(2), 1), "{line}");
        assert!(line.contains(part), "{line}");
        assert!(files(&killed) == killed_files);
    }
    let over = train("1", &checkpoint("llama-linear"), &[]);
    assert!(String::from_utf8_lossy(&over.stderr).contains("holds a model and no run"));

    // The folder is a model.
    let audit = samebits(&["audit", killed.to_str().unwrap()]);
    assert!(audit.status.success(), "{}", String::from_utf8_lossy(&audit.stdout));
}

/// What cannot be run is refused in one line, and leaves no folder.
#[test]
fn what_is_refused_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let new = dir.path().join("new");
    let out = new.join("out");
    let refused = |extra: &[&str], part: &str| {
        let found = train("2", &out, extra);
        let line = String::from_utf8_lossy(&found.stderr).to_string();
        assert_eq!((found.status.code(), line.lines().count()), (Some(2), 1), "{extra:?}: {line}");
        assert!(line.contains(part) && !new.exists(), "{extra:?}: {line}");
    };
    refused(&["--entropy", "0.1"], "--entropy: only --loss policy has one");
    refused(&["--loss", "policy", "--clip-low", "1.5"], "--clip-low <X>'");
    refused(&["--loss", "policy", "--entropy", "NaN"], "--entropy <C>': it must be a finite number");
    refused(&["--ranks", "3"], "samebits: --ranks: 3 ranks do not divide");
    refused(&["--beta1", "1.5"], "--beta1 <X>'");
    refused(&["--max-norm", "0"], "--max-norm <X>'");
    refused(&["--pad", "left:65536"], "N at most 65535");
    // Sequences that a later step has, or none.
    let recorded = checkpoint("").join("../gradients/llama-linear.safetensors");
    let bad = |name: &str, change: &dyn Fn(&mut [u8]), part: &str| {
        let mut bytes = std::fs::read(&recorded).unwrap();
        let at = SafeTensors::deserialize(&bytes).unwrap().tensor(name).unwrap().data().as_ptr() as usize;
        let (at, len) = (at - bytes.as_ptr() as usize, bytes.len());
        change(&mut bytes[at..len]);
        let data = dir.path().join("data.safetensors");
        std::fs::write(&data, bytes).unwrap();
        let mut args = arguments("2", &out);
        let place = args.iter().position(|arg| arg == "--data").unwrap();
        args[place + 1] = data.to_str().unwrap().into();
        args.extend(["--loss", "policy", "--temperature", "1"].map(String::from));
        let found = samebits(&args.iter().map(String::as_str).collect::<Vec<_>>());
        let line = String::from_utf8_lossy(&found.stderr).to_string();
        assert_eq!((found.status.code(), line.lines().count()), (Some(2), 1), "{name}: {line}");
        assert!(found.stdout.is_empty() && !new.exists(), "{name}: {line}");
        assert!(line.contains(&format!("data.safetensors: {part}")), "{name}: {line}");
    };
    let row = 4 * 20;
    bad("tokens", &|data| data[60 * row..][..4].fill(255), "tensor `tokens`: element [60, 0] is -1");
    bad(
        "mask",
        &|data| data[60 * row + 4..][..4].copy_from_slice(&2i32.to_le_bytes()),
        "tensor `mask`: element [60, 1] is 2",
    );
    bad("mask", &|data| data[..64 * row].fill(0), "mask: no token counts, so there is no loss");
    bad("mask", &|data| data[6 * row..12 * row].fill(0), "mask: no token counts in step 2, 6 sequences from 6 on");
    for number in [f32::NAN, f32::INFINITY] {
        let last = |data: &mut [u8]| data[4 * 63..4 * 64].copy_from_slice(&number.to_le_bytes());
        bad("advantages", &last, "advantages: element [63] is");
    }
}

/// A disk that takes no more of a state: one line, the state before as it was, and the next run goes on from it. The limit on
/// the size of files stands for the disk; the signal that comes with it is ignored, so that the write fails as on a full one.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_the_state_before() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, short) = (dir.path().join("whole"), dir.path().join("short"));
    assert!(train("4", &whole, &[]).status.success());
    let full = |steps: &str| {
        let limited = "trap '' XFSZ; ulimit -f 100; exec \"$0\" \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", limited, env!("CARGO_BIN_EXE_samebits-tested")]).args(arguments(steps, &short));
        let found = command.output().unwrap();
        let line = String::from_utf8_lossy(&found.stderr).to_string();
        assert_eq!((found.status.code(), line.lines().count()), (Some(2), 1), "{line}");
        assert!(line.contains(short.to_str().unwrap()) && line.contains("too large"), "{line}");
    };
    full("4");
    assert!(files(&short).keys().eq(["steps.jsonl"]), "{:?}", files(&short).keys());
    assert!(train("2", &short, &[]).status.success());
    let before = files(&short);
    full("4");
    let after = files(&short);
    assert!(after.keys().eq(before.keys()), "{:?}", after.keys());
    assert!(after.iter().all(|(name, bytes)| name == "steps.jsonl" || before[name] == *bytes));
    assert!(train("4", &short, &[]).status.success());
    let same = |(name, bytes): (&String, &Vec<u8>)| files(&short)[name] == *bytes;
    assert!(files(&whole).iter().all(same));
}
