//! Several low-rank adapters in one batch of training: each has the gradients that it has alone.

use super::{checkpoint, samebits};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use samebits_models::{
    Accumulator, AdapterChoice, GradientRun, Model, Padding, Precision, Ruled, Sampled, SamplingRule,
};
use samebits_ops::{Cpu, Isa};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Output;

const NAMES: [&str; 2] = ["qwen3", "qwen3-other"];

fn folder(name: &str) -> PathBuf {
    checkpoint("").join("../adapters").join(name)
}

fn load(names: &[&str]) -> Model {
    let folders: Vec<(String, PathBuf)> = names.iter().map(|name| (name.to_string(), folder(name))).collect();
    let model = Model::load(&checkpoint("qwen3"), Precision::Bf16, &Cpu::best()).unwrap();
    model.with_adapters(&Cpu::best(), &folders).unwrap()
}

/// The adapter of each sequence, by its number in [`NAMES`]: neighbours have the same one, others, and none.
const OF: [Option<usize>; 8] = [Some(0), Some(1), None, Some(0), Some(0), None, Some(1), Some(0)];

fn sequences() -> Vec<Vec<i32>> {
    [9, 14, 4, 6, 11, 5, 7, 3].map(|n| (0..n).map(|t| (n * 31 + t * 7) % 150 + 3).collect()).into()
}

/// The bits of log-probabilities, and of gradients by the names of parameters, from gradients that any loss may have made.
fn made(
    model: &Model,
    (cpu, run): (&Cpu, GradientRun),
    some: &[usize],
    choice: impl Fn(usize) -> AdapterChoice,
) -> (Vec<Vec<u32>>, BTreeMap<String, Vec<u32>>) {
    let sequences: Vec<Vec<i32>> = some.iter().map(|&b| sequences()[b].clone()).collect();
    let ruled = |&b: &usize| Ruled { adapter: choice(b), ..Ruled::new(SamplingRule::at(0.8), 1) };
    let rules: Vec<Ruled> = some.iter().map(ruled).collect();
    let mut sums = Accumulator::new(None, 1, 0, 1).unwrap();
    let forward = sums.forward(model, cpu, &sequences, Sampled::By(&rules), &run).unwrap();
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
    let logprob = forward.logprob.iter().map(|row| bits(row)).collect();
    let of = |(&b, tokens): (&usize, &Vec<i32>)| {
        (0..tokens.len()).map(|t| if t == 0 { 0.0 } else { ((b * 5 + t) % 7) as f32 / 3.0 - 1.0 }).collect::<Vec<f32>>()
    };
    let dlogprob: Vec<Vec<f32>> = some.iter().zip(&sequences).map(of).collect();
    sums.reverse(cpu, forward, &dlogprob).unwrap();
    let found = sums.partial(cpu).unwrap().finish(cpu, model).unwrap();
    (logprob, found.into_iter().map(|(name, tensor)| (name, bits(tensor.as_slice().unwrap()))).collect())
}

/// Gradients of an adapter are those of its own sequences alone, whoever stands between them, however they are arranged and run.
#[test]
fn gradients_of_several_adapters_are_those_of_each_alone() {
    let (both, best) = (load(&NAMES), Cpu::best());
    let scalar = Cpu::new(Isa::Scalar, 3, 1 << 21).unwrap();
    let named = |b: usize| OF[b].map_or(AdapterChoice::Plain, |number| AdapterChoice::Named(NAMES[number].into()));
    let all: Vec<usize> = (0..OF.len()).collect();
    let plain = GradientRun::default();
    let alone = NAMES.iter().enumerate().map(|(number, name)| {
        let own: Vec<usize> = all.iter().copied().filter(|&b| OF[b] == Some(number)).collect();
        (own.clone(), made(&load(&[name]), (&best, plain), &own, |_| AdapterChoice::Only))
    });
    let alone: Vec<_> = alone.collect();
    for (cpu, run) in [
        (&best, plain),
        (&best, GradientRun { micro_batch: 3, padding: Padding::Left(2), ..plain }),
        (&scalar, GradientRun { micro_batch: 5, padding: Padding::Right(3), pack: true, ..plain }),
        (&best, GradientRun { micro_batch: 8, recompute: true, ..plain }),
    ] {
        let (logprob, gradients) = made(&both, (cpu, run), &all, named);
        let mut parameters = 0;
        for (name, (own, (expected, of_each))) in NAMES.iter().zip(&alone) {
            let found: Vec<_> = own.iter().map(|&b| logprob[b].clone()).collect();
            assert!(found == *expected, "{name}, {run:?}");
            for (parameter, expected) in of_each {
                assert!(expected.iter().any(|bits| bits << 1 != 0), "{parameter} has no gradient");
                assert!(gradients[&format!("{name}/{parameter}")] == *expected, "{name}: {parameter}, {run:?}");
                parameters += 1;
            }
        }
        assert_eq!(parameters, gradients.len());
    }
    assert_ne!(alone[0].1.1, made(&load(&NAMES[..1]), (&best, plain), &all[..4], |_| AdapterChoice::Only).1);
}

fn line_of(found: &Output) -> String {
    String::from_utf8_lossy(&found.stderr).trim_end().to_string()
}

/// Tokens of all sequences, padded behind them, with metadata that say which adapter each has.
fn write(path: &Path, adapter: &str) {
    let (sequences, len) = (sequences(), 14);
    let rows = |of: fn(Option<&i32>) -> i32| {
        let row = |tokens: &Vec<i32>| (0..len).flat_map(|t| of(tokens.get(t)).to_le_bytes()).collect::<Vec<u8>>();
        sequences.iter().flat_map(row).collect::<Vec<u8>>()
    };
    let (tokens, mask) = (rows(|token| *token.unwrap_or(&0)), rows(|token| i32::from(token.is_some())));
    let view = |data| TensorView::new(Dtype::I32, vec![sequences.len(), len], data).unwrap();
    let metadata = HashMap::from([("adapter".to_string(), adapter.to_string())]);
    let tensors = [("tokens", view(&tokens)), ("attention_mask", view(&mask))];
    std::fs::write(path, safetensors::serialize(tensors, Some(metadata)).unwrap()).unwrap();
}

/// On the command line: logits, gradients and training of a file that says which adapter each sequence has.
#[test]
fn a_file_says_which_adapter_each_sequence_has() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let model = checkpoint("qwen3").to_str().unwrap().to_string();
    let each: Vec<Value> = OF.iter().map(|of| of.map_or(Value::Null, |number| NAMES[number].into())).collect();
    write(&dir.path().join("each"), &Value::from(each).to_string());
    for (file, adapter) in [("one", NAMES[0]), ("few", "[\"qwen3\", null]"), ("unknown", "math"), ("wrong", "[3]")] {
        write(&dir.path().join(file), adapter);
    }
    let adapters = NAMES.map(|name| folder(name).to_str().unwrap().to_string());
    let run = |verb: &str, file: &str, out: &str, count: usize, more: &[&str]| {
        let data = if verb == "train" { "--data" } else { "--tokens" };
        let given = adapters[..count].iter().flat_map(|adapter| ["--adapter", adapter]);
        let given: Vec<&str> = given.chain(["--model", &model, "--out", out, data, file]).collect();
        samebits(&[&[verb][..], &given, more].concat())
    };
    let tensors = |file: &str| {
        let bytes = std::fs::read(file).unwrap();
        let all = SafeTensors::deserialize(&bytes).unwrap();
        all.iter().map(|(name, tensor)| (name.to_string(), tensor.data().to_vec())).collect::<BTreeMap<_, _>>()
    };
    for (file, count) in [("each", 2), ("one", 2), ("one", 1)] {
        for verb in ["forward", "grad"] {
            let made = run(verb, &at(file), &at(&format!("{verb}-{file}-{count}")), count, &[]);
            assert!(made.status.success(), "{}", line_of(&made));
        }
    }
    let forward = |name: &str| tensors(&at(&format!("forward-{name}")))["logits"].clone();
    assert!(forward("one-1") == forward("one-2") && forward("one-1") != forward("each-2"));
    let (of_each, of_two, of_one) =
        (tensors(&at("grad-each-2")), tensors(&at("grad-one-2")), tensors(&at("grad-one-1")));
    let behind = |all: &BTreeMap<String, Vec<u8>>, prefix: &str| {
        all.iter().filter_map(|(name, data)| Some((name.strip_prefix(prefix)?.to_string(), data.clone()))).collect()
    };
    let (own, other): (BTreeMap<_, _>, BTreeMap<_, _>) = (behind(&of_two, "qwen3/"), behind(&of_two, "qwen3-other/"));
    assert!(own.len() > 5 && own.iter().all(|(name, data)| of_one[name] == *data));
    assert!(other.len() > 5 && other.values().flatten().all(|byte| *byte == 0));
    let other: BTreeMap<_, _> = behind(&of_each, "qwen3-other/");
    assert!(other.values().all(|data| data.iter().any(|byte| *byte != 0)));

    let how = ["--steps", "2", "--batch", "8", "--lr", "0.01"];
    let made = run("train", &at("each"), &at("trained"), 2, &how);
    assert!(made.status.success(), "{}", line_of(&made));
    for (name, adapter) in NAMES.iter().zip(&adapters) {
        let (own, first) = (dir.path().join("trained").join(name), Path::new(adapter));
        let text = |folder: &Path| -> Value {
            serde_json::from_slice(&std::fs::read(folder.join("adapter_config.json")).unwrap()).unwrap()
        };
        assert_eq!(text(&own), text(first));
        let [new, old] =
            [&own, first].map(|folder| tensors(folder.join("adapter_model.safetensors").to_str().unwrap()));
        assert!(new.keys().eq(old.keys()) && new.iter().all(|(name, data)| old[name] != *data), "{name}");
    }
    let again =
        run("train", &at("each"), &at("again"), 2, &[&how[..], &["--micro-batch", "3", "--isa", "scalar"]].concat());
    assert!(again.status.success() && again.stdout == made.stdout, "{}", line_of(&again));
    for (file, part) in [
        ("few", "metadata `adapter`: has 2 names for 8 sequences"),
        ("unknown", "adapter: `math` is none of the model; it has `qwen3`, `qwen3-other`"),
        ("wrong", "metadata `adapter`: it must be the name of one, or a list of a name or null for each sequence"),
    ] {
        for (verb, more) in [("forward", &[][..]), ("grad", &[]), ("train", &how)] {
            let refused = run(verb, &at(file), &at("none"), 2, more);
            let line = line_of(&refused);
            assert!(
                refused.status.code() == Some(2) && line.contains(part) && line.lines().count() == 1,
                "{verb}: {line}"
            );
            assert!(!dir.path().join("none").exists(), "{verb} {file}");
        }
    }
}
