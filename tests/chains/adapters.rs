//! Low-rank adapters of PEFT folders: beside what PEFT computes, side by side in one batch, in training and on the command line.

use super::{SERVINGS, checkpoint, rollout, samebits};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use samebits_models::{
    AdapterChoice, Batch, Engine, GradientRun, Loss, Model, ModelError, ModelFolder, Padding, PageOrder, Precision,
    Probe, Run, Sampled, Sampling, SamplingRule, Schedule, Seen, Serving,
};
use samebits_ops::{Attributes, Backend, Cpu, DType, Isa, Tensor, TensorRef};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;

/// The adapters that PEFT recorded, and the checkpoint of each.
const ALL: [(&str, &str); 5] = [
    ("deepseek-v3", "deepseek-v3"),
    ("gpt2", "gpt2"),
    ("phi3-partial", "phi3-partial"),
    ("qwen3", "qwen3"),
    ("qwen3-other", "qwen3"),
];

fn folder(name: &str) -> PathBuf {
    checkpoint("").join("../adapters").join(name)
}

fn named(names: &[&str]) -> Vec<(String, PathBuf)> {
    names.iter().map(|name| (name.to_string(), folder(name))).collect()
}

fn load(model: &str, precision: Precision, names: &[&str]) -> Model {
    let cpu = Cpu::best();
    Model::load(&checkpoint(model), precision, &cpu).unwrap().with_adapters(&cpu, &named(names)).unwrap()
}

fn floats(tensor: &TensorView) -> Vec<f32> {
    assert_eq!(tensor.dtype(), Dtype::F32);
    tensor.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// By how much of the largest PEFT's numbers and ours may differ.
fn bound() -> f32 {
    let table = std::fs::read_to_string(checkpoint("").join("../../contract/beside_torch.toml")).unwrap();
    let (_, row) = table.split_once("of = \"adapters\"").unwrap();
    let line = row.lines().find_map(|line| line.strip_prefix("relative = ")).unwrap();
    line.parse().unwrap()
}

fn apart(ours: &[f32], theirs: &[f32]) -> f32 {
    assert!(ours.len() == theirs.len() && !ours.is_empty());
    let largest = theirs.iter().fold(0f32, |most, value| most.max(value.abs()));
    ours.iter().zip(theirs).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

fn rms(ours: &[f32], theirs: &[f32]) -> f64 {
    let sum: f64 = ours.iter().zip(theirs).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    (sum / ours.len() as f64).sqrt()
}

/// Every token but first ones counts.
fn counts(sequences: &[Vec<i32>]) -> Vec<Vec<i32>> {
    sequences.iter().map(|tokens| (0..tokens.len()).map(|at| i32::from(at > 0)).collect()).collect()
}

/// Logits and gradients are those of PEFT in fp32, and in bf16 the error is no larger than that of PEFT.
#[test]
fn adapters_are_those_of_peft() {
    let (cpu, bound) = (Cpu::best(), bound());
    for (name, checkpoint) in ALL {
        let file = std::fs::read(folder(name).join("reference.safetensors")).unwrap();
        let recorded = SafeTensors::deserialize(&file).unwrap();
        let values = |name: &str| floats(&recorded.tensor(name).unwrap());
        let tokens = recorded.tensor("tokens").unwrap();
        let all: Vec<i32> = tokens.data().as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
        let sequences: Vec<Vec<i32>> = all.chunks(tokens.shape()[1]).map(<[i32]>::to_vec).collect();
        let given: Vec<&[i32]> = sequences.iter().map(Vec::as_slice).collect();
        let model = load(checkpoint, Precision::Fp32, &[name]);
        let logits = model.forward_run(&cpu, &given, Run::default()).unwrap();
        let plain = Run { adapters: &[AdapterChoice::Plain], ..Run::default() };
        let plain = model.forward_run(&cpu, &given, plain).unwrap();
        let (found, without) = (apart(&logits, &values("logits.fp32")), apart(&plain, &values("logits.fp32")));
        assert!(found < bound && without > 0.05, "{name}: {found:e} is more than {bound:e}; without it {without:e}");
        let count = counts(&sequences);
        let batch =
            Batch { sequences: &sequences, count: &count, loss: Loss::Nll, sampled: Sampled::At(1.0), groups: 1 };
        let gradients = model.gradients(&cpu, &batch, &GradientRun::default(), None, |_| ()).unwrap();
        assert!(apart(&[gradients.loss], &values("loss")) < bound, "{name}: {}", gradients.loss);
        let theirs = recorded.names().into_iter().filter(|name| name.contains(".lora_")).count();
        assert!(gradients.parameters.len() == theirs && theirs >= 6, "{name}");
        let mut worst = 0f32;
        for (tensor, gradient) in &gradients.parameters {
            assert_eq!(gradient.shape(), recorded.tensor(tensor).unwrap().shape(), "{name}: {tensor}");
            let found = apart(gradient.as_slice().unwrap(), &values(tensor));
            assert!(found < bound, "{name}: {tensor}: {found:e}");
            worst = worst.max(found);
        }
        let (dir, adapter) = (super::checkpoint(checkpoint), folder(name));
        let whole = ModelFolder { merged: Some(&adapter), ..ModelFolder::of(&dir) };
        let merged = Model::open(&whole, Precision::Fp32, &cpu, |_, _| ()).unwrap();
        assert_eq!(merged.merged(), model.adapters().next().map(|(_, sha256)| sha256));
        let merged = apart(&merged.forward_run(&cpu, &given, Run::default()).unwrap(), &values("logits.fp32"));
        assert!(merged < bound, "{name}: merged {merged:e}");
        let narrow = load(checkpoint, Precision::Bf16, &[name]).forward_run(&cpu, &given, Run::default()).unwrap();
        let truth = values("logits.fp32");
        let (ours, theirs) = (rms(&narrow, &truth), rms(&values("logits.bf16"), &truth));
        println!("{name}: logits {found:.1e}, gradients {worst:.1e}, in bf16 {:.3} of PEFT's error", ours / theirs);
        assert!(ours <= theirs, "{name}: in bf16 {ours:e}, PEFT {theirs:e}");
    }
}

/// The choices of eight prompts.
fn choices(a: &str, b: &str) -> Vec<AdapterChoice> {
    let [a, b] = [a, b].map(|name| AdapterChoice::Named(name.into()));
    let plain = AdapterChoice::Plain;
    vec![a.clone(), plain.clone(), b.clone(), b.clone(), a, plain.clone(), b, plain]
}

/// Two adapters and none in the same steps: what was sampled is scored the same, on every schedule, and is what a model with that
/// adapter alone, or with none, samples.
#[test]
fn texts_with_different_adapters_share_steps() {
    let [a, b] = ["qwen3", "qwen3-other"];
    let model = load("qwen3", Precision::Bf16, &[a, b]);
    let adapters = choices(a, b);
    let sampling = Sampling {
        samples: 2,
        max_tokens: 12,
        rule: SamplingRule::at(0.8),
        seed: 11,
        ignore_eos: true,
        adapters: adapters.clone(),
        ..Sampling::default()
    };
    let expected = rollout(&model, &Cpu::best(), &sampling, &SERVINGS[0]);
    assert_eq!(expected.len(), 16);
    let isas: Vec<Isa> = Isa::of_machine().collect();
    for (i, serving) in SERVINGS[1..].iter().enumerate() {
        let cpu = Cpu::new(isas[isas.len() - 1 - i % isas.len()], 1 + i % 2, usize::MAX).unwrap();
        assert_eq!(rollout(&model, &cpu, &sampling, serving), expected, "{serving:?} {cpu:?}");
    }
    let prompts = super::prompts(&model);
    let texts: Vec<_> =
        expected.iter().map(|s| (&prompts[s.prompt][..], &s.tokens[..], &sampling.rule, None)).collect();
    let of_texts: Vec<AdapterChoice> = expected.iter().map(|s| adapters[s.prompt].clone()).collect();
    for (schedule, page_size, isa) in [
        (Schedule::Prefill, 64, Isa::best()),
        (Schedule::Chunk(5), 3, Isa::Scalar),
        (Schedule::Mixed, 1, Isa::best()),
        (Schedule::Decode, 2, Isa::best()),
        (Schedule::Speculative(3), 4, Isa::best()),
        (Schedule::Prefix(2), 4, Isa::best()),
    ] {
        let cpu = Cpu::new(isa, 2, 1 << 20).unwrap();
        let run = Run { schedule, page_size, page_order: PageOrder::Scattered, adapters: &of_texts, ..Run::default() };
        let scores = model.score(&cpu, &texts, run).unwrap();
        for (sample, scores) in expected.iter().zip(&scores) {
            assert_eq!(bits(&sample.logprobs), bits(scores), "{schedule}, sequence {}", sample.sequence);
        }
    }
    let mut differ = 0;
    for (names, choice) in [(&[a][..], &adapters[0]), (&[b], &adapters[2]), (&[], &adapters[1])] {
        let alone = load("qwen3", Precision::Bf16, names);
        let only = Sampling { adapters: vec![], ..sampling.clone() };
        let found = rollout(&alone, &Cpu::best(), &only, &Serving::default());
        for (found, expected) in found.iter().zip(&expected) {
            match adapters[expected.prompt] == *choice {
                true => assert_eq!(found, expected, "{names:?}"),
                false => differ += usize::from(found != expected),
            }
        }
    }
    assert!(differ > 20, "only {differ} texts of other adapters are others");
    // What is shared of a prompt is of its adapter: the same prompt with each.
    let each =
        |choice: &AdapterChoice| (prompts[3].clone(), Sampling { adapters: vec![choice.clone()], ..sampling.clone() });
    let (one, mut all) = (adapters[..3].iter().map(each).collect::<Vec<_>>(), Vec::new());
    for share_prompts in [true, false] {
        let mut samples = Vec::new();
        let serving = Serving { share_prompts, ..Serving::default() };
        let keep = |sample| {
            samples.push(sample);
            Ok(())
        };
        model.rollout_each(&Cpu::best(), &one, &serving, keep).unwrap();
        samples.sort_by_key(|sample| sample.sequence);
        all.push(samples);
    }
    assert!(all[0] == all[1] && all[0][0].logprobs != all[0][2].logprobs && all[0][2].logprobs != all[0][4].logprobs);
}

/// A choice that cannot be made is refused, and so is a change while texts are on their way.
#[test]
fn adapters_are_chosen_by_name() {
    let [a, b] = ["qwen3", "qwen3-other"];
    let model = load("qwen3", Precision::Bf16, &[a, b]);
    let named = |name: &str| AdapterChoice::Named(name.into());
    let refused = |found: Result<(), ModelError>, part: &str| {
        let line = found.unwrap_err().to_string();
        assert!(line.contains(part) && !line.contains('\n'), "{line}");
    };
    let run = |adapters: &[AdapterChoice]| {
        model.forward_run(&Cpu::best(), &[&[3, 4], &[5]], Run { adapters, ..Run::default() }).map(drop)
    };
    refused(run(&[]), "adapter: the model has `qwen3`, `qwen3-other`; say which");
    refused(run(&[named("c")]), "`c` is none of the model; it has `qwen3`, `qwen3-other`");
    refused(run(&[named(a), named(b), named(a)]), "there are 3 for 2 texts");
    run(&[named(a), AdapterChoice::Plain]).unwrap();
    let plain = load("qwen3", Precision::Bf16, &[]);
    let sampling = Sampling { adapters: vec![named(a)], ..Sampling::default() };
    let mut engine = Engine::new(plain, &Serving::default(), &Cpu::best()).unwrap();
    refused(engine.add(&[vec![3]], &sampling, 0).map(drop), "`qwen3` is none of the model, which has none");
    let twice = Model::load(&checkpoint("qwen3"), Precision::Bf16, &Cpu::best()).unwrap();
    let twice = twice.with_adapters(&Cpu::best(), &[(a.into(), folder(a)), (a.into(), folder(b))]);
    refused(twice.map(drop), "`qwen3` is there twice");
    let count = counts(&[vec![3, 4]]);
    let batch =
        Batch { sequences: &[vec![3, 4]], count: &count, loss: Loss::Nll, sampled: Sampled::At(1.0), groups: 1 };
    let gradients = model.gradients(&Cpu::best(), &batch, &GradientRun::default(), None, |_| ());
    refused(gradients.map(drop), "say which");

    // Other tensors: those of the model are another's then.
    let one = load("qwen3", Precision::Bf16, &[a]);
    let before = one.adapters().map(|(_, sha256)| sha256.to_string()).collect::<Vec<_>>();
    let own = one.adapter_folder(&AdapterChoice::Only).unwrap().unwrap();
    assert_eq!(own.sha256(), before[0]);
    let doubled: BTreeMap<String, Tensor> = own
        .tensors()
        .iter()
        .map(|(name, tensor)| {
            let values = tensor.as_slice::<f32>().unwrap().iter().map(|value| value * 2.0).collect();
            (name.clone(), Tensor::new(values, tensor.shape()).unwrap())
        })
        .collect();
    let mut views: BTreeMap<String, TensorRef> = doubled.iter().map(|(name, it)| (name.clone(), it.view())).collect();
    let mut engine = Engine::new(one, &Serving::default(), &Cpu::best()).unwrap();
    let request = engine.add(&[vec![3, 4]], &Sampling::default(), 0).unwrap();
    refused(engine.update_adapter(a, &views, &Cpu::best()), "is in use by request 0");
    engine.end(request);
    engine.update_adapter(a, &views, &Cpu::best()).unwrap();
    assert!(engine.version() == 1 && engine.model().adapters().all(|(_, sha256)| sha256 != before[0]));
    let first = views.keys().next().unwrap().clone();
    views.remove(&first);
    refused(engine.update_adapter(a, &views, &Cpu::best()), &format!("`{first}` must be there, f32"));
}

/// How sequences are arranged and run moves no bit of an adapter's gradients; groups are another sum.
#[test]
fn gradients_of_adapters_have_the_same_bits() {
    let lengths = [9, 14, 1, 6, 11, 5, 7, 3];
    let sequences = lengths.map(|n| (0..n).map(|t| (n * 31 + t * 7) % 157 + 3).collect::<Vec<i32>>());
    let count = counts(&sequences);
    for (name, checkpoint) in [("phi3-partial", "phi3-partial"), ("deepseek-v3", "deepseek-v3"), ("gpt2", "gpt2")] {
        let model = load(checkpoint, Precision::Bf16, &[name]);
        let made = |cpu: &Cpu, groups: usize, run: GradientRun| {
            let batch =
                Batch { sequences: &sequences, count: &count, loss: Loss::Nll, sampled: Sampled::At(0.7), groups };
            let found = model.gradients(cpu, &batch, &run, None, |_| ()).unwrap();
            assert!(found.parameters.keys().all(|name| name.contains(".lora_")));
            let all = found.parameters.values().flat_map(|tensor| tensor.as_slice::<f32>().unwrap());
            all.chain(found.logprob.iter().flatten()).chain([&found.loss]).map(|v| v.to_bits()).collect::<Vec<u32>>()
        };
        let (best, plain) = (Cpu::best(), GradientRun::default());
        let expected = made(&best, 1, plain);
        let scalar = Cpu::new(Isa::Scalar, 3, 1 << 21).unwrap();
        for (cpu, run) in [
            (&best, GradientRun { micro_batch: 3, padding: Padding::Left(2), ..plain }),
            (&scalar, GradientRun { micro_batch: 5, padding: Padding::Right(3), pack: true, ..plain }),
            (&best, GradientRun { micro_batch: 8, recompute: true, ..plain }),
        ] {
            assert!(made(cpu, 1, run) == expected, "{name}: {run:?}");
        }
        let grouped = made(&best, 4, plain);
        assert!(grouped != expected, "{name}: other groups are another sum");
        assert!(made(&scalar, 4, GradientRun { ranks: 2, micro_batch: 2, ..plain }) == grouped, "{name}");
    }
}

/// Tensors of a file: dtype, shape and bytes.
type Stored = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A copy of an adapter, its config and its tensors changed.
fn changed(name: &str, dir: &Path, config: impl FnOnce(&mut Value), tensors: impl FnOnce(&mut Stored)) -> PathBuf {
    let mut fields = serde_json::from_slice(&std::fs::read(folder(name).join("adapter_config.json")).unwrap()).unwrap();
    config(&mut fields);
    let file = std::fs::read(folder(name).join("adapter_model.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&file).unwrap();
    let mut all: BTreeMap<_, _> =
        stored.iter().map(|(n, t)| (n.to_string(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect();
    tensors(&mut all);
    let views = all.iter().map(|(n, (dtype, shape, data))| (n, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("adapter_model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    std::fs::write(dir.join("adapter_config.json"), fields.to_string()).unwrap();
    dir.into()
}

/// What an adapter cannot be loaded with is refused by the names of its fields and tensors, all of it at once.
#[test]
fn adapters_that_do_not_fit_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let cpu = Cpu::best();
    let line = |model: &str, adapter: PathBuf| {
        let model = Model::load(&checkpoint(model), Precision::Bf16, &cpu).unwrap();
        let line = model.with_adapters(&cpu, &[("a".into(), adapter)]).map(drop).unwrap_err().to_string();
        assert!(!line.contains('\n'), "{line}");
        line
    };
    for (field, value, says) in [
        ("peft_type", json!("LOHA"), "`peft_type` is \"LOHA\"; supported is \"LORA\""),
        ("bias", json!("all"), "`bias` is \"all\"; supported is \"none\""),
        ("use_dora", json!(true), "`use_dora` is true, which is not supported"),
        ("lora_bias", json!(true), "`lora_bias` is true"),
        ("modules_to_save", json!(["lm_head"]), "`modules_to_save` is [\"lm_head\"]"),
        ("trainable_token_indices", json!([1]), "`trainable_token_indices` is [1]"),
        ("target_parameters", json!(["mlp.experts.down_proj"]), "`target_parameters` is"),
        ("layer_replication", json!([[0, 1]]), "`layer_replication` is"),
        ("alora_invocation_tokens", json!([5]), "`alora_invocation_tokens` is [5]"),
        (
            "init_lora_weights",
            json!("pissa_niter_4"),
            "`init_lora_weights` is \"pissa_niter_4\", which changes the weights",
        ),
        ("r", json!(0), "`r` is 0; it must be a whole number"),
        ("lora_alpha", json!("much"), "`lora_alpha` is \"much\"; it must be a finite number"),
        ("use_rslora", json!(1), "`use_rslora` is 1; it must be true or false"),
        ("rank_pattern", json!({"q_proj": 0}), "`rank_pattern` has \"q_proj\": 0"),
        ("alpha_pattern", json!({"(": 1}), "`alpha_pattern` has \"(\": 1"),
        ("target_modules", json!("("), "`target_modules` is \"(\", no pattern that can be read"),
        ("target_modules", json!(null), "`target_modules` is missing"),
        ("layers_to_transform", json!("0"), "`layers_to_transform` must be a number of a block"),
        ("of_tomorrow", json!(1), "`of_tomorrow` is no field that is known"),
    ] {
        let found = line("qwen3", changed("qwen3", &dir.path().join("a"), |config| config[field] = value, |_| ()));
        assert!(found.contains(says) && found.contains("adapter_config.json"), "{field}: {found}");
    }
    // All at once.
    let two = |config: &mut Value| {
        config["use_dora"] = json!(true);
        config["bias"] = json!("lora_only");
    };
    let found = line("qwen3", changed("qwen3", &dir.path().join("a"), two, |_| ()));
    assert!(found.contains("`use_dora`") && found.contains("`bias`"), "{found}");

    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    let of = |change: &dyn Fn(&mut Stored)| {
        line("qwen3", changed("qwen3", &dir.path().join("a"), |_| (), |all| change(all)))
    };
    let found = of(&|all| drop(all.remove(name)));
    assert!(found.contains(&format!("tensor `{name}` is missing; adapter_config.json targets its module")), "{found}");
    let found = of(&|all| {
        let (_, shape, data) = all.get_mut(name).unwrap();
        shape[0] -= 1;
        data.truncate(4 * shape[0] * shape[1]);
    });
    assert!(found.contains("has shape [5, 48]; the model and adapter_config.json ask for [6, 48]"), "{found}");
    let renamed = |from: &str, to: &str| {
        of(&|all| {
            let moved = all.iter().map(|(name, tensor)| (name.replace(from, to), tensor.clone())).collect();
            *all = moved;
        })
    };
    let found = renamed("layers.0.self_attn.q_proj", "layers.7.self_attn.q_proj");
    let says = "tensor `base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight` is of a module that the model does not have";
    assert!(found.contains(says) && found.contains("layers.0.self_attn.q_proj.lora_B.weight` is missing"), "{found}");
    let found = renamed("layers.0.self_attn.q_proj.lora_A", "layers.0.self_attn.q_proj.lora_magnitude_vector");
    assert!(found.contains("is no matrix of an adapter"), "{found}");
    let found = renamed("model.layers.0.self_attn.q_proj", "model.embed_tokens");
    assert!(
        found.contains("`base_model.model.model.embed_tokens.lora_A.weight` is of a module whose adapter is not"),
        "{found}"
    );
    let found = of(&|all| all.get_mut(name).unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes()));
    assert!(found.contains(name) && found.contains("is NaN"), "{found}");
    let found =
        line("qwen3", changed("qwen3", &dir.path().join("a"), |c| c["target_modules"] = json!(["q_proj"]), |_| ()));
    assert!(
        found.contains("is of a module that adapter_config.json does not target") && found.contains("more of "),
        "{found}"
    );
    // An adapter of another model.
    let found = line("llama", folder("qwen3"));
    assert!(
        found.contains("q_proj.lora_A.weight` has shape [6, 48]; the model and adapter_config.json ask for [6, 128]"),
        "{found}"
    );
    let found = line("gpt2", folder("qwen3"));
    assert!(found.contains("the adapter is for another model"), "{found}");
    std::fs::write(dir.path().join("a/adapter_model.bin"), "").unwrap();
    std::fs::remove_file(dir.path().join("a/adapter_model.safetensors")).unwrap();
    let found = line("qwen3", dir.path().join("a"));
    assert!(found.contains("save the adapter as safetensors"), "{found}");
    // All that is linear, and a pattern as Python reads it, are the same as the names.
    let sha256 = |adapter: PathBuf| {
        let model = Model::load(&checkpoint("qwen3"), Precision::Bf16, &cpu).unwrap();
        let model = model.with_adapters(&cpu, &[("a".into(), adapter)]).unwrap();
        model.adapters().map(|(_, sha256)| sha256.to_string()).collect::<Vec<_>>()
    };
    for targets in ["all-linear", r"model\.layers\.\d+\.(?!embed).*_proj"] {
        let same = changed("qwen3", &dir.path().join("c"), |config| config["target_modules"] = json!(targets), |_| ());
        assert_eq!(sha256(same), sha256(folder("qwen3")), "{targets}");
    }
    let other = changed("qwen3", &dir.path().join("c"), |config| config["lora_alpha"] = json!(7), |_| ());
    assert_ne!(sha256(other), sha256(folder("qwen3")));
    // A dropout is for training alone.
    let drops = changed("qwen3", &dir.path().join("b"), |config| config["lora_dropout"] = json!(0.05), |_| ());
    let model = Model::load(&checkpoint("qwen3"), Precision::Bf16, &cpu).unwrap();
    let model = model.with_adapters(&cpu, &[("a".into(), drops)]).unwrap();
    model.forward_run(&cpu, &[&[3, 4]], Run::default()).unwrap();
    let (sequences, count) = ([vec![3, 4]], [vec![0, 1]]);
    let batch = Batch { sequences: &sequences, count: &count, loss: Loss::Nll, sampled: Sampled::At(1.0), groups: 1 };
    let found = model.gradients(&cpu, &batch, &GradientRun::default(), None, |_| ()).map(drop).unwrap_err().to_string();
    assert!(found.contains("`lora_dropout` is 0.05; gradients are made without a dropout"), "{found}");
}

/// Runs a verb, and the one line that it ends with where it fails.
fn line_of(found: &Output) -> String {
    String::from_utf8_lossy(&found.stderr).trim_end().to_string()
}

/// From a file of prompts to a rollout, to its scores; another adapter is refused.
#[test]
fn a_rollout_says_which_adapters_it_had() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let model = checkpoint("qwen3").to_str().unwrap().to_string();
    let [a, b] = ["qwen3", "qwen3-other"].map(|name| folder(name).to_str().unwrap().to_string());
    let (first, second) = (format!("math={a}"), b.clone());
    let lines = [
        json!({"tokens": [3, 4, 5], "adapter": "math"}),
        json!({"tokens": [3, 4, 5], "adapter": null}),
        json!({"tokens": [3, 4, 5], "adapter": "qwen3-other", "temperature": 0.5}),
    ];
    let text = |lines: &[Value]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    std::fs::write(at("prompts.jsonl"), text(&lines)).unwrap();
    let (prompts, out) = (at("prompts.jsonl"), at("rollout.jsonl"));
    let run = |prompts: &str, adapters: &[&str], out: &str| {
        let given = adapters.iter().flat_map(|adapter| ["--adapter", adapter]).collect::<Vec<_>>();
        let args =
            ["rollout", "--model", &model, "--prompts", prompts, "--out", out, "--max-tokens", "8", "--samples", "2"];
        samebits(&[&args[..], &given].concat())
    };
    let made = run(&prompts, &[&first, &second], &out);
    assert!(made.status.success(), "{}", line_of(&made));
    let written = std::fs::read_to_string(&out).unwrap();
    let found: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<Value> = found[1..].iter().map(|line| line["adapter"].clone()).collect();
    let [math, other] = ["math", "qwen3-other"].map(Value::from);
    assert_eq!(names, [math.clone(), math, Value::Null, Value::Null, other.clone(), other]);
    assert!(found[0]["adapters"]["math"].as_str().is_some_and(|sha256| sha256.len() == 64), "{}", found[0]);
    assert_ne!(found[0]["adapters"]["math"], found[0]["adapters"]["qwen3-other"]);
    let score = |file: &str, adapters: &[&str], more: &[&str]| {
        let given = adapters.iter().flat_map(|adapter| ["--adapter", adapter]).collect::<Vec<_>>();
        samebits(&[&["score", "--model", &model, "--rollout", file], &given[..], more].concat())
    };
    for more in
        [&["--schedule", "mixed", "--batch", "6", "--isa", "scalar"][..], &["--schedule", "decode"], &["--batch", "1"]]
    {
        let same = score(&out, &[&first, &second], more);
        assert!(
            same.status.success() && String::from_utf8_lossy(&same.stdout).starts_with("0 of "),
            "{}",
            line_of(&same)
        );
    }
    for (adapters, says) in [
        (&[][..], "texts were made with the adapter `math`; give it with --adapter math=DIR".to_string()),
        (&[&*first], "texts were made with the adapter `qwen3-other`".into()),
        (&[&*format!("math={b}"), &second], "--adapter math: its SHA-256 is ".into()),
        (&[&*first, &second, &format!("more={b}")], "--adapter more: ".into()),
    ] {
        let refused = score(&out, adapters, &[]);
        assert!(refused.status.code() == Some(2) && line_of(&refused).contains(&says), "{}", line_of(&refused));
    }
    // Texts of the model alone are not scored with an adapter.
    let plain = run(&prompts.replace("prompts", "plain"), &[], &at("none"));
    assert_eq!(plain.status.code(), Some(2));
    std::fs::write(at("plain.jsonl"), text(&[json!({"tokens": [3, 4, 5]})])).unwrap();
    assert!(run(&at("plain.jsonl"), &[], &at("none")).status.success());
    assert!(score(&at("none"), &[], &[]).status.success());
    let refused = score(&at("none"), &[&first], &[]);
    assert!(line_of(&refused).contains("was made without an adapter of this name"), "{}", line_of(&refused));
    // The only adapter is that of all texts.
    assert!(run(&at("plain.jsonl"), &[&first], &at("one")).status.success());
    let one = std::fs::read_to_string(at("one")).unwrap();
    assert!(one.lines().skip(1).all(|line| line.contains("\"adapter\":\"math\"")), "{one}");
    // What is wrong is said by the line.
    for (line, says) in [
        (
            json!({"tokens": [3], "adapter": "poems"}),
            "wrong.jsonl:1: adapter: `poems` is none of the model; it has `math`",
        ),
        (json!({"tokens": [3], "adapter": 7}), "wrong.jsonl:1: adapter: must be a name, or null"),
        (json!({"tokens": [3]}), "wrong.jsonl:1: adapter: the model has `math`, `qwen3-other`; say which"),
    ] {
        std::fs::write(at("wrong.jsonl"), text(&[line])).unwrap();
        let refused = run(&at("wrong.jsonl"), &[&first, &second], &at("none"));
        assert!(refused.status.code() == Some(2) && line_of(&refused).contains(says), "{}", line_of(&refused));
    }
    // One that is added to the weights, as it is read in f32, is recorded too.
    let merge = ["--merge-adapter", &a];
    let args =
        ["rollout", "--model", &model, "--prompts", &at("plain.jsonl"), "--out", &at("merged"), "--max-tokens", "8"];
    assert!(samebits(&[&args[..], &merge].concat()).status.success());
    let same = score(&at("merged"), &[], &[&merge[..], &["--schedule", "decode"]].concat());
    assert!(same.status.success() && String::from_utf8_lossy(&same.stdout).starts_with("0 of "), "{}", line_of(&same));
    for (file, more, says) in [
        ("merged", &[][..], "--merge-adapter: is none; "),
        ("merged", &["--merge-adapter", &b], "--merge-adapter: is the one of SHA-256 "),
        ("none", &merge, "was made with none"),
    ] {
        let refused = score(&at(file), &[], more);
        assert!(refused.status.code() == Some(2) && line_of(&refused).contains(says), "{}", line_of(&refused));
    }
    let refused = run(&at("plain.jsonl"), &[&at("nowhere")], &at("none"));
    assert!(line_of(&refused).contains("is no folder that can be read; give NAME=DIR"), "{}", line_of(&refused));
}

/// Trains an adapter: a PEFT folder comes out, with the same bits in every way to run, stopped or not, and is one to go on from.
#[test]
fn an_adapter_is_trained_into_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let model = checkpoint("phi3-partial").to_str().unwrap().to_string();
    let data = checkpoint("").join("../gradients/phi3-partial.safetensors").to_str().unwrap().to_string();
    let train = |adapter: &str, steps: &str, out: &str, more: &[&str]| {
        let args = ["train", "--model", &model, "--adapter", adapter, "--data", &data, "--out", out, "--steps", steps];
        samebits(&[&args[..], &["--batch", "6", "--lr", "0.01", "--weight-decay", "0.1"], more].concat())
    };
    let adapter = folder("phi3-partial");
    let adapter = adapter.to_str().unwrap();
    let made = train(adapter, "4", &at("whole"), &[]);
    assert!(made.status.success(), "{}", line_of(&made));
    let steps = String::from_utf8(made.stdout).unwrap();
    let losses: Vec<f64> = steps.lines().map(|line| line.split(' ').nth(3).unwrap().parse().unwrap()).collect();
    assert!(losses.len() == 4 && losses.iter().all(|loss| loss.is_finite()), "{steps}");
    let files: Vec<String> = ["adapter_config.json", "adapter_model.safetensors"].map(String::from).into();
    let read = |run: &str, file: &str| std::fs::read(dir.path().join(run).join(file)).unwrap();
    assert!(!dir.path().join("whole/model.safetensors").exists() && !dir.path().join("whole/config.json").exists());
    let fields = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
    let first = std::fs::read(folder("phi3-partial").join("adapter_config.json")).unwrap();
    assert_eq!(fields(&read("whole", "adapter_config.json")), fields(&first));
    // Stopped behind two steps and gone on with, in another way.
    let how = &["--micro-batch", "4", "--pad", "left:2", "--pack", "--recompute", "--isa", "scalar", "--threads", "1"];
    assert!(train(adapter, "2", &at("parts"), &[]).status.success());
    let rest = train(adapter, "4", &at("parts"), how);
    assert!(rest.status.success(), "{}", line_of(&rest));
    assert_eq!(
        String::from_utf8(rest.stdout).unwrap(),
        steps.lines().skip(2).map(|l| format!("{l}\n")).collect::<String>()
    );
    assert!(files.iter().all(|file| read("parts", file) == read("whole", file)));
    // The weights of the first step are the adapter's; the last ones are loaded.
    let model_of = |adapter: &Path| {
        let model = Model::load(&checkpoint("phi3-partial"), Precision::Bf16, &Cpu::best()).unwrap();
        model.with_adapters(&Cpu::best(), &[("a".into(), adapter.into())]).unwrap()
    };
    let (before, after) = (model_of(&folder("phi3-partial")), model_of(&dir.path().join("whole")));
    let logits = |model: &Model| model.forward_run(&Cpu::best(), &[&[3, 4, 5]], Run::default()).unwrap();
    assert_ne!(bits(&logits(&before)), bits(&logits(&after)));
    let state = read("whole", "state.safetensors");
    let names: Vec<String> = SafeTensors::deserialize(&state).unwrap().names().into_iter().map(String::from).collect();
    assert!(names.len() == 3 * before.trained().len() && names.iter().all(|name| name.contains(".lora_")), "{names:?}");
    // Another adapter, or none, is another run.
    let refused = train(&at("whole"), "5", &at("parts"), &[]);
    assert!(
        refused.status.code() == Some(2) && line_of(&refused).contains("the run began with"),
        "{}",
        line_of(&refused)
    );
    let twice = train(adapter, "1", &at("new"), &["--adapter", adapter]);
    assert!(
        line_of(&twice).contains("`phi3-partial` is there twice; give each a name of its own"),
        "{}",
        line_of(&twice)
    );
    assert!(!dir.path().join("new").exists());
}

/// Keeps the values of some sites of the first block.
#[derive(Default)]
struct Sites(BTreeMap<String, Vec<f32>>);

impl Probe for Sites {
    fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
        if seen.layer == Some(0) {
            self.0.insert(seen.site.into(), seen.values.to_vec());
        }
        Ok(())
    }
}

/// What an op makes of f32 or bf16.
fn made(op: &str, factor: Option<f64>, inputs: &[(&str, &Tensor)], dtype: DType, shape: &[usize]) -> Tensor {
    let cpu = Cpu::best();
    let mut y = cpu.empty(dtype, shape).unwrap();
    let inputs: Vec<_> = inputs.iter().map(|(name, tensor)| (*name, tensor.view())).collect();
    let attributes = factor.map_or(Attributes::new(), |factor| Attributes::new().with("factor", factor));
    cpu.call(op, attributes, &inputs, vec![("y", y.view_mut())]).unwrap();
    y
}

/// A product with an adapter is that of the matrix in f32, plus what the adapter makes in f32, rounded once: of the rows that have
/// it, and in rows of another one of that.
#[test]
fn products_are_those_of_the_rule() {
    let (cpu, names) = (Cpu::best(), ["qwen3", "qwen3-other"]);
    let model = load("qwen3", Precision::Bf16, &names);
    let choices = [AdapterChoice::Named(names[0].into()), AdapterChoice::Plain, AdapterChoice::Named(names[1].into())];
    let (sequences, mut sites) = ([&[3, 4, 5, 6, 7][..], &[8, 9], &[10, 11, 12]], Sites::default());
    model.forward_run(&cpu, &sequences, Run { adapters: &choices, probe: Some(&mut sites), ..Run::default() }).unwrap();
    let weights = Model::read_tensors(&checkpoint("qwen3")).unwrap();
    let narrow = |values: &[f32], shape: &[usize]| {
        let wide = Tensor::new(values.to_vec(), shape).unwrap();
        made("scale", None, &[("x", &wide)], DType::Bf16, shape)
    };
    let mut adapted = 0;
    for (module, read, site, dtype, scaling) in [
        ("v_proj", "input_norm", "v", DType::Bf16, [6.0 / 2.0, 5.0 / 2.0]),
        ("o_proj", "attention", "o", DType::Fp32, [6.0 / 2.0, 0.0]),
    ] {
        let matrix_of = format!("model.layers.0.self_attn.{module}");
        let w = &weights[&format!("{matrix_of}.weight")];
        let &[n, k] = w.shape() else { panic!("it is a matrix") };
        let w = narrow(w.as_slice::<f32>().unwrap(), &[n, k]);
        // Those without an adapter stand first.
        for (rows, which) in [(0..2, 2), (2..7, 0), (7..10, 1)] {
            let count = rows.len();
            let x = narrow(&sites.0[read][rows.start * k..rows.end * k], &[count, k]);
            let base = made("gemm", None, &[("x", &x), ("w", &w)], DType::Fp32, &[count, n]);
            let wide = made("scale", None, &[("x", &x)], DType::Fp32, &[count, k]);
            let mut sum = made("scale", None, &[("x", &base)], dtype, &[count, n]);
            let own = names.get(which).and_then(|name| {
                let file = std::fs::read(folder(name).join("adapter_model.safetensors")).unwrap();
                let stored = SafeTensors::deserialize(&file).unwrap();
                let matrix = |end: &str| {
                    let tensor = stored.tensor(&format!("base_model.model.{matrix_of}.lora_{end}.weight")).ok()?;
                    Some(Tensor::new(floats(&tensor), tensor.shape()).unwrap())
                };
                Some([matrix("A")?, matrix("B")?])
            });
            if let Some([a, b]) = own {
                let h = made("gemm", None, &[("x", &wide), ("w", &a)], DType::Fp32, &[count, a.shape()[0]]);
                let y = made("gemm", None, &[("x", &h), ("w", &b)], DType::Fp32, &[count, n]);
                let y = made("scale", Some(scaling[which]), &[("x", &y)], DType::Fp32, &[count, n]);
                sum = made("add", None, &[("a", &base), ("b", &y)], dtype, &[count, n]);
                adapted += 1;
            }
            let sum = made("scale", None, &[("x", &sum)], DType::Fp32, &[count, n]);
            let found = &sites.0[site][rows.start * n..rows.end * n];
            assert_eq!(bits(found), bits(sum.as_slice().unwrap()), "{module}, rows {rows:?}");
        }
    }
    assert_eq!(adapted, 3, "the second adapter has none of the last");
}

/// The bits of logits and gradients, which no order of rows, thread or instruction set moves, nor another version.
#[test]
fn adapters_have_the_recorded_bits() {
    let (cpu, place) = (Cpu::best(), folder("sha256.txt"));
    let mut text = String::new();
    for (name, checkpoint) in ALL {
        let model = load(checkpoint, Precision::Bf16, &[name]);
        let sequences = [9, 5, 12].map(|n| (0..n).map(|t| (n * 31 + t * 7) % 150 + 3).collect::<Vec<i32>>());
        let count = counts(&sequences);
        let given: Vec<&[i32]> = sequences.iter().map(Vec::as_slice).collect();
        let logits = model.forward_run(&cpu, &given, Run::default()).unwrap();
        let batch =
            Batch { sequences: &sequences, count: &count, loss: Loss::Nll, sampled: Sampled::At(0.8), groups: 2 };
        let found = model.gradients(&cpu, &batch, &GradientRun::default(), None, |_| ()).unwrap();
        let digest = |values: &mut dyn Iterator<Item = &f32>| {
            let mut digest = Sha256::new();
            values.for_each(|value| digest.update(value.to_le_bytes()));
            digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        let mut gradients = found.parameters.values().flat_map(|tensor| tensor.as_slice::<f32>().unwrap());
        text += &format!("{name} {} {}\n", digest(&mut logits.iter()), digest(&mut gradients));
    }
    if std::env::var("SAMEBITS_RECORD").is_ok() {
        std::fs::write(&place, &text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&place).unwrap());
}
