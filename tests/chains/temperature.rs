//! One temperature from sampling to training: the same log-probabilities, their gradients, and no two temperatures in a ratio.

use super::nonfinite::loud;
use super::{checkpoint, load, rollout, samebits};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use samebits_models::{
    Batch, GradientRun, Gradients, Loss, Model, Precision, RopeLength, Sampled, Sampling, SamplingRule, Serving,
};
use samebits_ops::{Cpu, Tensor};
use std::collections::HashMap;
use std::path::Path;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// What is trained with has the bits of what was sampled, so a first step's ratios are 1 and its loss minus the advantage.
#[test]
fn a_rollout_is_on_policy_at_its_own_temperature_alone() {
    let cpu = Cpu::best();
    for name in ["llama3", "gemma2", "mixtral"] {
        let model = load(&checkpoint(name));
        let longest = model.config().max_positions;
        let model = model.with_rope_length(RopeLength::Declared(longest)).unwrap();
        for temperature in [0.7, 1.9, 1.0, 0.0] {
            let sampling = Sampling {
                max_tokens: 6,
                rule: SamplingRule::at(temperature),
                seed: 3,
                ignore_eos: true,
                ..Sampling::default()
            };
            let samples = rollout(&model, &cpu, &sampling, &Serving::default());
            let prompts = super::prompts(&model);
            let of = |prompt: usize, tokens: &[i32]| [&prompts[prompt][..], tokens].concat();
            let sequences: Vec<Vec<i32>> = samples.iter().map(|s| of(s.prompt, &s.tokens)).collect();
            let run = GradientRun { micro_batch: 3, ..GradientRun::default() };
            let trained = model.logprobs(&cpu, &sequences, Sampled::At(temperature), &run).unwrap().0;
            let sampled = |b: usize| prompts[samples[b].prompt].len()..sequences[b].len();
            for (b, sample) in samples.iter().enumerate() {
                assert_eq!(bits(&trained[b][sampled(b)]), bits(&sample.logprobs), "{name} at {temperature}");
            }
            let other = model.logprobs(&cpu, &sequences, Sampled::At(1.25), &run).unwrap().0;
            assert!(other != trained, "{name}: the temperature is seen");
            // The likeliest tokens have the log-probabilities of 1.
            let same = if temperature == 0.0 { 1.0 } else { temperature };
            assert!(model.logprobs(&cpu, &sequences, Sampled::At(same), &run).unwrap().0 == trained);
            let count: Vec<Vec<i32>> = (0..sequences.len())
                .map(|b| (0..sequences[b].len()).map(|t| i32::from(sampled(b).contains(&t))).collect())
                .collect();
            let advantages = vec![1.0; sequences.len()];
            let loss =
                Loss::Policy { advantages: &advantages, old_logprob: &trained, low: 0.2, high: 0.2, entropy: 0.0 };
            let of_loss = |temperature: f64| {
                let batch =
                    Batch { sequences: &sequences, count: &count, loss, sampled: Sampled::At(temperature), groups: 1 };
                model.gradients(&cpu, &batch, &run, None, |_| ()).unwrap().loss
            };
            assert_eq!(of_loss(temperature), -1.0, "{name} at {temperature}");
            assert!(of_loss(1.25) != -1.0);
        }
        for wrong in [-1.0, f64::NAN, f64::INFINITY, 1e-46] {
            let error = model
                .logprobs(&cpu, &[vec![1, 2]], Sampled::At(wrong), &GradientRun::default())
                .unwrap_err()
                .to_string();
            assert!(error.starts_with("temperature: is "), "{error}");
        }
    }
}

/// Logits of a head over a power of two are those of a head with weights so much smaller, and all that is made of them is exact:
/// the gradient of the head is so much smaller, all others have the same bits. With an entropy, too.
#[test]
fn gradients_are_those_of_a_smaller_head() {
    let (dir, cpu) = (tempfile::tempdir().unwrap(), Cpu::best());
    let sequences = [vec![1, 2, 3, 9, 11], vec![4, 5, 6]];
    let count = [vec![0, 1, 1, 0, 1], vec![0, 1, 1]];
    let old = [vec![-5.0; 5], vec![-6.0; 3]];
    for (factor, temperature) in [(0.5f32, 2.0), (4.0, 0.25)] {
        let folder = dir.path().join(temperature.to_string());
        std::fs::create_dir(&folder).unwrap();
        let (plain, smaller) = (checkpoint("llama"), loud("llama", &folder, &[("lm_head.weight", factor)]));
        for entropy in [0.0, 0.25] {
            let loss = Loss::Policy { advantages: &[1.0, -0.5], old_logprob: &old, low: 0.9, high: 9.0, entropy };
            let made = |folder: &Path, temperature: f64| -> Gradients {
                let model = Model::load(folder, Precision::Bf16, &cpu).unwrap();
                let batch =
                    Batch { sequences: &sequences, count: &count, loss, sampled: Sampled::At(temperature), groups: 1 };
                model.gradients(&cpu, &batch, &GradientRun::default(), None, |_| ()).unwrap()
            };
            let (a, b) = (made(&plain, temperature), made(&smaller, 1.0));
            assert!(a.logprob == b.logprob && a.per_sequence == b.per_sequence && a.loss == b.loss);
            let values = |tensor: &Tensor| tensor.as_slice::<f32>().unwrap().to_vec();
            for (name, gradient) in &a.parameters {
                let (mut found, expected) = (values(gradient), values(&b.parameters[name]));
                if name == "lm_head.weight" {
                    assert!(found != expected);
                    found.iter_mut().for_each(|v| *v /= factor);
                }
                assert!(expected.iter().any(|v| *v != 0.0));
                assert!(bits(&found) == bits(&expected), "{name} at {temperature}, entropy {entropy}");
            }
        }
    }
}

/// The recorded sequences of a checkpoint's gradients, with metadata of our own.
fn with_metadata(name: &str, to: &Path, metadata: &[(&str, &str)]) -> String {
    let file = std::fs::read(checkpoint("").join(format!("../gradients/{name}.safetensors"))).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let views: Vec<(&str, TensorView)> = ["tokens", "mask", "advantages", "old_logprob"]
        .into_iter()
        .map(|name| {
            let tensor = tensors.tensor(name).unwrap();
            assert!([Dtype::I32, Dtype::F32].contains(&tensor.dtype()));
            // The first sequences are enough.
            let shape = [&[4], &tensor.shape()[1..]].concat();
            let data = &tensor.data()[..tensor.data().len() / tensor.shape()[0] * 4];
            (name, TensorView::new(tensor.dtype(), shape, data).unwrap())
        })
        .collect();
    let metadata: HashMap<String, String> = metadata.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    std::fs::write(to, safetensors::serialize(views, Some(metadata)).unwrap()).unwrap();
    to.to_str().unwrap().into()
}

#[test]
fn verbs_take_what_the_file_says_and_refuse_another() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (model, out) = (checkpoint("llama-linear").to_str().unwrap().to_string(), path("out"));
    let file = |name: &str, metadata: &[(&str, &str)]| with_metadata("llama-linear", &dir.path().join(name), metadata);
    let (silent, seven) = (file("silent", &[]), file("seven", &[("temperature", "0.7"), ("dtype", "bf16")]));
    let (zero, half) =
        (file("zero", &[("temperature", "0")]), file("half", &[("dtype", "fp16"), ("temperature", "1")]));
    let grad = |tokens: &str, extra: &[&str]| {
        let ran = samebits(&[&["grad", "--model", &model, "--tokens", tokens, "--out", &out][..], extra].concat());
        let line = String::from_utf8_lossy(&ran.stderr).to_string();
        (ran.status.code(), line, std::fs::read(&out).ok().inspect(|_| std::fs::remove_file(&out).unwrap()))
    };
    let policy = ["--loss", "policy"];
    // Not said: a line that says what is taken; said in either place: none.
    let (code, line, one) = grad(&silent, &policy);
    assert_eq!((code, line.lines().count()), (Some(0), 1), "{line}");
    assert!(
        line.starts_with("samebits: warning: ") && line.contains("silent: does not say at what `temperature`"),
        "{line}"
    );
    assert!(line.contains("1 is taken, and bf16 as `dtype`"), "{line}");
    let said = |tokens: &str, extra: &[&str]| {
        let (code, line, made) = grad(tokens, &[&policy[..], extra].concat());
        assert_eq!((code, &line[..]), (Some(0), ""));
        made.unwrap()
    };
    assert!(one.unwrap() == said(&silent, &["--temperature", "1"]));
    let at_seven = said(&seven, &[]);
    assert!(at_seven == said(&silent, &["--temperature", "0.7"]) && at_seven != said(&silent, &["--temperature", "1"]));
    assert!(at_seven == said(&seven, &["--temperature", "0.7"]));
    // At 0 they are those at 1.
    assert!(said(&zero, &["--temperature", "1"]) == said(&silent, &["--temperature", "0"]));
    let (_, header) = SafeTensors::read_metadata(&at_seven).unwrap();
    let fields = header.metadata().clone().unwrap();
    assert_eq!((&fields["temperature"][..], &fields["dtype"][..]), ("0.7", "bf16"));
    let refused = |tokens: &str, extra: &[&str], parts: &[&str]| {
        let (code, line, made) = grad(tokens, extra);
        assert_eq!((code, line.lines().count(), made.is_none()), (Some(2), 1, true), "{line}");
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
    };
    let two = [
        "seven: metadata `temperature`: its texts were sampled at 0.7, and --temperature is 1",
        "leave --temperature out",
    ];
    refused(&seven, &[&policy[..], &["--temperature", "1"]].concat(), &two);
    refused(&seven, &["--temperature", "1"], &two);
    refused(&half, &policy, &["half: metadata `dtype`: old_logprob was sampled in fp16, and this run is in bf16"]);
    refused(&seven, &[&policy[..], &["--dtype", "fp32"]].concat(), &["sampled in bf16", "give --dtype bf16"]);
    // No ratio is made of those.
    assert_eq!(grad(&half, &[]).0, Some(0));
    refused(&silent, &["--temperature=-1"], &["--temperature: is -1; it must be 0 or"]);
    refused(&silent, &["--temperature", "NaN"], &["--temperature: is NaN"]);
    refused(&file("odd", &[("temperature", "hot")]), &[], &["odd: metadata `temperature`: it must be a number"]);
    refused(
        &file("torch", &[("dtype", "torch.float16")]),
        &policy,
        &["torch: metadata `dtype`: ", "is not bf16, fp16"],
    );

    // A run of training goes on at its own temperature alone.
    let train = |tokens: &str, steps: &str, extra: &[&str]| {
        let args = ["train", "--model", &model, "--data", tokens, "--out", &out, "--batch", "2", "--steps", steps];
        let ran = samebits(&[&args[..], &policy, extra].concat());
        (ran.status.code(), String::from_utf8_lossy(&ran.stderr).to_string(), ran.stdout)
    };
    let (code, line, first) = train(&silent, "1", &["--temperature", "0.7"]);
    assert_eq!((code, &line[..]), (Some(0), ""));
    let (code, line, _) = train(&silent, "2", &["--temperature", "1"]);
    assert_eq!(code, Some(2), "{line}");
    assert!(line.contains("the run began with temperature 0.7, not 1.0"), "{line}");
    assert_eq!(train(&silent, "2", &["--temperature", "0.7"]).0, Some(0));
    std::fs::remove_dir_all(&out).unwrap();
    assert!(train(&silent, "1", &["--temperature", "1"]).2 != first);

    // And it is traced.
    let trace = |a: &str, b: &str| samebits(&["trace", a, b, "--model", &model, "--tokens", &silent]);
    let found = trace("loss=nll", "loss=nll,temperature=0.7");
    let text = String::from_utf8_lossy(&found.stdout).to_string();
    assert!(found.status.code() == Some(1) && text.contains("first difference: logprob"), "{text}");
    assert_eq!(trace("loss=nll,temperature=0.7", "loss=nll,temperature=0.7,micro-batch=3").status.code(), Some(0));
}
