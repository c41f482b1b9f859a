//! What leaves the range of its dtype: no verb writes it unless asked, and the line says where it began.

use super::{checkpoint, samebits, write_tokens};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use samebits_models::{Accumulator, Batch, GradientRun};
use samebits_models::{Engine, Loss, Model, ModelError, Precision, Sampled, Sampling, SamplingRule, Serving};
use samebits_ops::{Cpu, bf16};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A copy of a checkpoint, some weights of which are multiplied.
pub fn loud(name: &str, dir: &Path, factors: &[(&str, f32)]) -> PathBuf {
    let to = dir.join(name);
    std::fs::create_dir_all(&to).unwrap();
    for entry in std::fs::read_dir(checkpoint(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let file = std::fs::read(checkpoint(name).join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut all: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    let mut found = 0;
    for (name, tensor) in tensors.iter() {
        let mut data = tensor.data().to_vec();
        for (_, factor) in factors.iter().filter(|(suffix, _)| name.ends_with(suffix)) {
            assert_eq!(tensor.dtype(), Dtype::BF16, "{name}");
            found += 1;
            for word in data.chunks_exact_mut(2) {
                let value = bf16::from_le_bytes([word[0], word[1]]).to_f32() * factor;
                word.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
            }
        }
        all.insert(name.into(), (tensor.dtype(), tensor.shape().to_vec(), data));
    }
    assert!(found >= factors.len(), "{found} tensors were changed");
    let views = all.iter().map(|(n, (dtype, shape, data))| (n, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(to.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    to
}

/// In fp16 the gated activation of layer 0 is beyond 65504; in bf16 all is well.
const GATES: [(&str, f32); 2] = [("layers.0.mlp.gate_proj.weight", 300.0), ("layers.0.mlp.up_proj.weight", 3000.0)];

#[track_caller]
fn line(found: &std::process::Output) -> String {
    let line = String::from_utf8_lossy(&found.stderr).to_string();
    assert_eq!((found.status.code(), line.lines().count()), (Some(2), 1), "{line}");
    assert!(found.stdout.is_empty(), "{line}");
    line
}

#[test]
fn verbs_say_where_a_value_left_its_range() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let model = loud("qwen3-adder", dir.path(), &GATES).to_str().unwrap().to_string();
    // The second sequence is padded before its tokens.
    let (tokens, mask) = ([3, 9, 4, 7, 5, 0, 0, 0, 8, 3], [1, 1, 1, 1, 1, 0, 0, 0, 1, 1]);
    write_tokens(Path::new(&path("tokens")), &[("tokens", &tokens), ("attention_mask", &mask)], [2, 5]);
    write_tokens(Path::new(&path("padded")), &[("tokens", &tokens[5..]), ("attention_mask", &mask[5..])], [1, 5]);
    let (out, logits) = (path("out"), |path: &str| {
        let file = std::fs::read(path).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let data = tensors.tensor("logits").unwrap().data().to_vec();
        data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<f32>>()
    });
    let forward = |tokens: &str, extra: &[&str]| {
        samebits(&[&["forward", "--model", &model, "--tokens", &path(tokens), "--out", &out][..], extra].concat())
    };
    let fine = forward("tokens", &[]);
    assert!(fine.status.success(), "{}", String::from_utf8_lossy(&fine.stderr));
    assert!(logits(&out).iter().all(|v| v.is_finite()));
    std::fs::remove_file(&out).unwrap();
    let where_it_was = "not finite: layer 0, op silu_mul in fp16 (site layers.0.mlp) of sequence 0, token 0: element ";
    for extra in [&[][..], &["--schedule", "decode", "--batch", "alone", "--isa", "scalar", "--threads", "1"]] {
        let found = line(&forward("tokens", &[&["--dtype", "fp16"], extra].concat()));
        assert!(found.contains(where_it_was) && !Path::new(&out).exists(), "{found}");
        assert!(found.contains("run it in bf16") && found.contains("or give --allow-nonfinite"), "{found}");
    }
    // By its place in the file.
    let found = line(&forward("padded", &["--dtype", "fp16"]));
    assert!(found.contains("of sequence 0, token 3: "), "{found}");
    let asked = forward("tokens", &["--dtype", "fp16", "--allow-nonfinite"]);
    assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
    assert!(logits(&out).iter().any(|v| !v.is_finite()));
    std::fs::remove_file(&out).unwrap();

    std::fs::write(path("prompts.jsonl"), "{\"prompt\": \"12+34=\"}\n").unwrap();
    let (prompts, rollout) = (path("prompts.jsonl"), path("rollout"));
    let sampled = |extra: &[&str]| {
        let args = ["rollout", "--model", &model, "--prompts", &prompts, "--max-tokens", "3", "--out", &rollout];
        samebits(&[&args[..], extra].concat())
    };
    let found = line(&sampled(&["--dtype", "fp16"]));
    assert!(found.contains(where_it_was) && found.contains("bf16") && !Path::new(&rollout).exists(), "{found}");
    // Finite logits that their temperature takes beyond f32.
    let found = line(&sampled(&["--temperature", "3e-39"]));
    assert!(found.contains("temperature: is ") && found.contains("raise it"), "{found}");
    assert!(sampled(&[]).status.success());
    let found = line(&samebits(&["score", "--model", &model, "--rollout", &rollout, "--dtype", "fp16"]));
    assert!(found.contains("op silu_mul in fp16"), "{found}");
    // Texts are made in bf16, which here ends too.
    let other = tempfile::tempdir().unwrap();
    let model = loud("qwen3-adder", other.path(), &[("model.norm.weight", 2e38)]);
    let model = model.to_str().unwrap();
    let found = line(&samebits(&["generate", "--model", model, "--prompt", "12+34=", "--max-tokens", "4"]));
    assert!(found.contains("op rms_norm in bf16 (site final_norm) of sequence 0, token "), "{found}");
    assert!(found.contains("its weights, or what it was given, are too large"), "{found}");
}

/// Ops of layers that recur are looked at as all others.
#[test]
fn an_op_with_a_state_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = loud("lfm2", dir.path(), &[("conv.in_proj.weight", 1e4), ("conv.conv.weight", 1e38)]);
    let (tokens, out) = (dir.path().join("tokens"), dir.path().join("out"));
    write_tokens(&tokens, &[("tokens", &[3, 9, 4]), ("attention_mask", &[1, 1, 1])], [1, 3]);
    let [model, tokens, out] = [&model, &tokens, &out].map(|path| path.to_str().unwrap());
    let found = line(&samebits(&["forward", "--model", model, "--tokens", tokens, "--out", out]));
    assert!(found.contains("not finite: layer 0, op causal_conv1d in fp32 (site layers.0.conv"), "{found}");
}

/// A file of two sequences of 4 tokens, of which one of the first and the last two of the second count; with the old log-probabilities and
/// advantages of a policy.
pub fn write_policy(path: &Path, old: f32, advantage: f32) {
    let ints = |values: &[i32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let mut all_old = [-4.0; 8];
    all_old[6] = old;
    // Ratios far from 1 are clipped.
    all_old[7] = old.clamp(-6.5, -4.0);
    let all = [
        ("tokens", Dtype::I32, vec![2, 4], ints(&[1, 2, 3, 4, 5, 6, 7, 8])),
        ("mask", Dtype::I32, vec![2, 4], ints(&[0, 1, 0, 0, 0, 0, 1, 1])),
        ("old_logprob", Dtype::F32, vec![2, 4], floats(&all_old)),
        ("advantages", Dtype::F32, vec![2], floats(&[1.0, advantage])),
    ];
    let views = all.iter().map(|(n, dtype, shape, data)| (*n, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn gradients_and_steps_say_it_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (tokens, out) = (path("tokens"), path("out"));
    let grad = |model: &Path, extra: &[&str]| {
        let args = ["grad", "--model", model.to_str().unwrap(), "--tokens", &tokens, "--out", &out];
        samebits(&[&args[..], extra].concat())
    };
    let model = checkpoint("llama");
    let policy = ["--loss", "policy", "--temperature", "1", "--micro-batch", "2", "--pad", "left:3"];
    write_policy(Path::new(&tokens), -4.0, 1.0);
    assert!(grad(&model, &policy).status.success());
    std::fs::remove_file(&out).unwrap();
    // A ratio beyond f32, where the advantage does not clip it.
    write_policy(Path::new(&tokens), -1e4, -1.0);
    let found = line(&grad(&model, &policy));
    assert!(found.contains("not finite: op policy_loss of sequence 1, token 2: the ratio exp("), "{found}");
    assert!(found.contains("look whether old_logprob is of this model") && !Path::new(&out).exists(), "{found}");
    let data = ["--data", &tokens, "--out", &path("steps"), "--steps", "2", "--batch", "1", "--lr", "0.001"];
    let train = ["train", "--model", model.to_str().unwrap(), "--loss", "policy", "--temperature", "1"];
    let stepped = samebits(&[&train[..], &data].concat());
    let found = String::from_utf8_lossy(&stepped.stderr).to_string();
    assert_eq!((stepped.status.code(), found.lines().count()), (Some(2), 1), "{found}");
    assert!(found.contains("op policy_loss of sequence 1, token 2: "), "{found}");
    // All of the forward and the loss are finite, the reverse pass is not.
    let model = loud("llama", dir.path(), &[("embed_tokens.weight", 2f32.powi(-10))]);
    write_policy(Path::new(&tokens), -6.5, 1e37);
    let found = line(&grad(&model, &policy));
    assert!(found.contains("op add_rms_norm_backward in fp32 (site dembed) of sequence 1, token 0: "), "{found}");
    assert!(!Path::new(&out).exists());
    assert!(grad(&model, &[&policy[..], &["--allow-nonfinite"]].concat()).status.success());
    std::fs::remove_file(&out).unwrap();
    // The forward is not.
    let model = loud("llama", dir.path(), &[("model.norm.weight", 2e38)]);
    let found = line(&grad(&model, &["--micro-batch", "2", "--pad", "left:3"]));
    assert!(found.contains("op rms_norm in bf16 (site final_norm) of sequence 0, token 0: "), "{found}");
    let asked = grad(&model, &["--allow-nonfinite"]);
    assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
}

/// The library says it as the command does.
#[test]
fn the_library_refuses_what_is_not_finite() {
    let (dir, cpu) = (tempfile::tempdir().unwrap(), Cpu::best());
    let model = || {
        let folder = loud("llama", &dir.path().join("a"), &[("model.norm.weight", 2e38)]);
        Model::load(&folder, Precision::Bf16, &cpu).unwrap()
    };
    std::fs::create_dir(dir.path().join("a")).unwrap();
    let sequences = [vec![1, 2, 3], vec![4, 5]];
    let refused = |found: Result<(), ModelError>| match found.unwrap_err() {
        ModelError::NotFinite { place, sequence, token, .. } => {
            assert_eq!(place, "op rms_norm in bf16 (site final_norm)");
            (sequence, token)
        }
        e => panic!("{e}"),
    };
    let (run, allowed) = (GradientRun::default(), GradientRun { allow_nonfinite: true, ..GradientRun::default() });
    assert_eq!(refused(model().logprobs(&cpu, &sequences, Sampled::At(1.0), &run).map(drop)), (0, 0));
    let made = model().logprobs(&cpu, &sequences, Sampled::At(1.0), &allowed).unwrap();
    assert!(made.0.iter().flatten().any(|v| !v.is_finite()));
    assert_eq!(
        refused(model().score(&cpu, &[(&[1], &[2], &SamplingRule::default(), None)], Default::default()).map(drop)),
        (0, 0)
    );
    let mut sums = Accumulator::new(None, 1, 0, 1).unwrap();
    assert_eq!(refused(sums.forward(&model(), &cpu, &sequences, Sampled::At(1.0), &run).map(drop)), (0, 0));
    let forward = sums.forward(&model(), &cpu, &sequences, Sampled::At(1.0), &allowed).unwrap();
    sums.reverse(&cpu, forward, &[vec![1.0; 3], vec![1.0; 2]]).unwrap();
    assert!(sums.partial(&cpu).is_ok(), "asked for");
    let count = [vec![0, 1, 1], vec![0, 1]];
    let batch = Batch { sequences: &sequences, count: &count, loss: Loss::Nll, sampled: Sampled::At(1.0), groups: 1 };
    assert_eq!(refused(model().gradients(&cpu, &batch, &run, None, |_| ()).map(drop)), (0, 0));
    // An engine ends what is on its way.
    let mut engine = Engine::new(model(), &Serving::default(), &cpu).unwrap();
    let sampling = Sampling { max_tokens: 4, ignore_eos: true, ..Sampling::default() };
    engine.add(&sequences, &sampling, 7).unwrap();
    assert_eq!(refused(engine.step(&cpu).map(drop)).0, 7);
    assert_eq!(engine.requests().count(), 0);

    // Gradients beyond f32 of a loss that is made elsewhere; what was not finite before is let by.
    let model = Model::load(&checkpoint("llama"), Precision::Bf16, &cpu).unwrap();
    let of = |slope: f32| {
        let mut sums = Accumulator::new(None, 1, 0, 1).unwrap();
        let forward = sums.forward(&model, &cpu, &sequences, Sampled::At(1.0), &run).unwrap();
        sums.reverse(&cpu, forward, &[vec![slope; 3], vec![slope; 2]]).unwrap();
        sums.partial(&cpu).map(drop)
    };
    assert!(of(1.0).is_ok() && of(f32::NAN).is_ok());
    let found = of(3.3e38).unwrap_err().to_string();
    assert!(found.starts_with("gradient: of `") && found.contains("is not finite"), "{found}");
}
