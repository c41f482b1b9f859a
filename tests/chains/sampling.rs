//! Texts that are sampled each in its own way, side by side: what was sampled is scored the same to the bit, whoever was beside
//! it and on whatever schedule.

use super::{SERVINGS, checkpoint, load, prompts, samebits};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use samebits_models::{
    Batch, Engine, GradientRun, Loss, Model, Padding, PageOrder, Ruled, Run, Sample, Sampled, Sampling, SamplingRule,
    Schedule, Serving, Stop,
};
use samebits_ops::{Cpu, Isa};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

fn rules() -> Vec<SamplingRule> {
    let plain = SamplingRule::at(0.8);
    vec![
        plain.clone(),
        SamplingRule { top_k: 3, ..plain.clone() },
        SamplingRule { top_p: 0.5, temperature: 1.3, ..plain.clone() },
        SamplingRule { min_p: 0.2, repetition_penalty: 1.3, ..plain.clone() },
        SamplingRule { frequency_penalty: 0.7, presence_penalty: -0.2, temperature: 0.0, ..plain.clone() },
        SamplingRule { logit_bias: [(3, 2.5), (4, -9.0)].into(), banned_tokens: vec![5, 6], ..plain.clone() },
        SamplingRule { allowed_tokens: Some(vec![3, 7, 8, 9]), top_p: 0.9, ..plain.clone() },
        SamplingRule { top_k: 7, top_p: 0.8, min_p: 0.05, repetition_penalty: 0.9, presence_penalty: 0.5, ..plain },
    ]
}

/// Each prompt in a way of its own.
fn each(model: &samebits_models::Model) -> Vec<(Vec<i32>, Sampling)> {
    let of = |rule| Sampling { samples: 2, max_tokens: 12, rule, seed: 5, ignore_eos: true, ..Sampling::default() };
    prompts(model).into_iter().zip(rules().into_iter().map(of)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn texts_that_are_sampled_in_different_ways_are_scored_the_same() {
    for name in ["qwen3", "gemma2", "mamba2"] {
        let model = load(&checkpoint(name));
        let each = each(&model);
        let sampled = |cpu: &Cpu, serving: &Serving, some: &[(Vec<i32>, Sampling)]| -> Vec<Sample> {
            let mut samples = Vec::new();
            let keep = |sample| {
                samples.push(sample);
                Ok(())
            };
            model.rollout_each(cpu, some, serving, keep).unwrap();
            samples.sort_by_key(|sample| sample.sequence);
            samples
        };
        let expected = sampled(&Cpu::best(), &SERVINGS[0], &each);
        assert_eq!(expected.len(), 16, "{name}");
        for serving in &SERVINGS[1..] {
            let cpu = Cpu::new(Isa::Scalar, 2, usize::MAX).unwrap();
            assert_eq!(sampled(&cpu, serving, &each), expected, "{name}: {serving:?}");
        }
        // The first text does not see who is sampled beside it, nor how.
        assert_eq!(sampled(&Cpu::best(), &Serving::default(), &each[..1]), expected[..2]);
        let texts: Vec<_> =
            expected.iter().map(|s| (&each[s.prompt].0[..], &s.tokens[..], &each[s.prompt].1.rule, None)).collect();
        for (schedule, page_size) in [(Schedule::Prefill, 64), (Schedule::Chunk(5), 3), (Schedule::Speculative(3), 4)] {
            let run = Run { schedule, page_size, page_order: PageOrder::Scattered, ..Run::default() };
            let scores = model.score(&Cpu::best(), &texts, run).unwrap();
            for (sample, scores) in expected.iter().zip(&scores) {
                assert_eq!(bits(&sample.logprobs), bits(scores), "{name}: {schedule}, sequence {}", sample.sequence);
            }
        }
        for sample in &expected {
            let rule = &each[sample.prompt].1.rule;
            let allowed = |token: &i32| rule.allowed_tokens.as_ref().is_none_or(|allowed| allowed.contains(token));
            assert!(sample.tokens.iter().all(|token| allowed(token) && !rule.banned_tokens.contains(token)));
            assert!(sample.logprobs.iter().all(|p| p.is_finite() && *p <= 0.0));
        }
        training_finds_them_again(&model, &each, &expected);
        // By another rule they are others, and what could not be sampled has no probability.
        let plain = SamplingRule::at(0.8);
        let other: Vec<_> = texts.iter().map(|(prompt, tokens, ..)| (*prompt, *tokens, &plain, None)).collect();
        let scores = model.score(&Cpu::best(), &other, Run::default()).unwrap();
        assert!(scores.iter().zip(&expected).skip(2).all(|(scores, sample)| *scores != sample.logprobs), "{name}");
        let narrow = SamplingRule { allowed_tokens: Some(vec![0]), ..plain };
        let none = model.score(&Cpu::best(), &[(&[3], &[0, 4], &narrow, None)], Run::default()).unwrap();
        assert_eq!(none[0], [0.0, f32::NEG_INFINITY]);
    }
}

/// Forwards of training find the bits of what was sampled, whatever their rows; gradients are those of the same rows in any
/// micro-batch, and a rule that leaves all tokens has those of none.
fn training_finds_them_again(model: &Model, each: &[(Vec<i32>, Sampling)], samples: &[Sample]) {
    let cpu = Cpu::best();
    let sequences: Vec<Vec<i32>> = samples.iter().map(|s| [&each[s.prompt].0[..], &s.tokens].concat()).collect();
    let ruled = |s: &Sample| Ruled::new(each[s.prompt].1.rule.clone(), each[s.prompt].0.len());
    let rules: Vec<Ruled> = samples.iter().map(ruled).collect();
    let sampled = Sampled::By(&rules);
    let old: Vec<Vec<f32>> =
        samples.iter().zip(&rules).map(|(s, r)| [&vec![0.0; r.prompt][..], &s.logprobs].concat()).collect();
    let counts = |(r, s): (&Ruled, &Vec<i32>)| (0..s.len()).map(|t| i32::from(t >= r.prompt)).collect();
    let count: Vec<Vec<i32>> = rules.iter().zip(&sequences).map(counts).collect();
    let advantages: Vec<f32> = (0..samples.len()).map(|b| b as f32 / 4.0 - 1.5).collect();
    for entropy in [0.0, 0.5] {
        let loss = Loss::Policy { advantages: &advantages, old_logprob: &old, low: 0.2, high: 0.2, entropy };
        let made = |sampled, run: GradientRun| {
            let batch = Batch { sequences: &sequences, count: &count, loss, sampled, groups: 1 };
            let found = model.gradients(&cpu, &batch, &run, None, |_| ()).unwrap();
            let parameters = found.parameters.values().flat_map(|t| t.as_slice::<f32>().unwrap());
            (parameters.map(|v| v.to_bits()).collect::<Vec<_>>(), found.logprob)
        };
        let run = GradientRun { micro_batch: 5, ..GradientRun::default() };
        let (expected, logprob) = made(sampled, run);
        for (b, (sample, logprob)) in samples.iter().zip(&logprob).enumerate() {
            assert_eq!(bits(&sample.logprobs), bits(&logprob[rules[b].prompt..]), "sequence {b}");
        }
        for run in [
            GradientRun::default(),
            GradientRun { micro_batch: 16, padding: Padding::Left(3), recompute: true, ..run },
            GradientRun { micro_batch: 7, padding: Padding::Right(2), pack: true, ..run },
        ] {
            assert!(made(sampled, run) == (expected.clone(), logprob.clone()), "{run:?}");
        }
        // All are left by a top_k as large as the vocabulary: two ways to the same bits.
        let all = |top_k| {
            let rule = SamplingRule { top_k, ..SamplingRule::at(0.8) };
            rules.iter().map(|ruled| Ruled { rule: rule.clone(), ..ruled.clone() }).collect::<Vec<_>>()
        };
        let (whole, plain) = (all(model.config().vocab), all(0));
        let at = made(Sampled::At(0.8), run);
        for (what, rules) in [("whole", &whole), ("plain", &plain)] {
            let found = made(Sampled::By(rules), run);
            assert!(found.1 == at.1, "{what}");
            assert!(found.0 == at.0, "{what}");
        }
        assert!(at.0 != expected);
    }
    // What they are not of is refused by its place.
    let narrow: Vec<Ruled> =
        rules.iter().map(|r| Ruled { rule: SamplingRule { top_k: 1, ..r.rule.clone() }, ..r.clone() }).collect();
    let loss = Loss::Policy { advantages: &advantages, old_logprob: &old, low: 0.2, high: 0.2, entropy: 0.0 };
    let batch = Batch { sequences: &sequences, count: &count, loss, sampled: Sampled::By(&narrow), groups: 1 };
    let line = model.gradients(&cpu, &batch, &GradientRun::default(), None, |_| ()).err().unwrap().to_string();
    assert!(line.contains("\"top_k\":1") && line.contains("leave out token "), "{line}");
    // A token that does not count may be one of them: text of a tool among what was sampled.
    let rule = SamplingRule { allowed_tokens: Some(vec![4, 7]), ..SamplingRule::at(0.7) };
    let sampled = Sampled::By(&[Ruled::new(rule, 1)]);
    let (sequences, count) = ([vec![3, 4, 5, 7]], [vec![0, 1, 0, 1]]);
    let batch = Batch { sequences: &sequences, count: &count, loss: Loss::Nll, sampled, groups: 1 };
    let found = model.gradients(&cpu, &batch, &GradientRun::default(), None, |_| ()).unwrap();
    assert!(found.logprob[0][2] == f32::NEG_INFINITY && found.loss.is_finite());
    let mut values = found.parameters.values().flat_map(|t| t.as_slice::<f32>().unwrap());
    assert!(values.clone().all(|v| v.is_finite()) && values.any(|v| *v != 0.0));
}

#[test]
fn a_text_ends_behind_what_it_is_told() {
    let model = load(&checkpoint("qwen3-adder"));
    let prompt = model.encode("12+34=").unwrap().tokens;
    let ends = |sampling: &Sampling| -> Sample {
        let mut samples = Vec::new();
        let keep = |sample| {
            samples.push(sample);
            Ok(())
        };
        model.rollout(&Cpu::best(), std::slice::from_ref(&prompt), sampling, &Serving::default(), keep).unwrap();
        samples.pop().unwrap()
    };
    let greedy = Sampling { max_tokens: 8, rule: SamplingRule::at(0.0), ..Sampling::default() };
    let whole = ends(&greedy);
    assert_eq!((model.decode(&whole.tokens).unwrap().as_str(), whole.stop), ("46", Stop::Eos));
    let at_six = ends(&Sampling { stop: vec!["9".into(), "6".into()], ..greedy.clone() });
    assert_eq!((&at_six.tokens[..], at_six.stop), (&whole.tokens[..2], Stop::StopText));
    let at_four = ends(&Sampling { stop_token_ids: vec![whole.tokens[0]], ..greedy.clone() });
    assert_eq!((&at_four.tokens[..], at_four.stop), (&whole.tokens[..1], Stop::StopToken));
    let cut =
        model.generate_by(&Cpu::best(), "12+34=", &Sampling { stop: vec!["6".into()], ..greedy.clone() }).unwrap();
    assert_eq!((cut.text.as_str(), cut.stop), ("4", Stop::StopText));
    assert_eq!(model.generate_by(&Cpu::best(), "12+34=", &greedy).unwrap().text, "46");
    let banned = SamplingRule { banned_tokens: vec![whole.tokens[0]], ..greedy.rule.clone() };
    assert_ne!(ends(&Sampling { rule: banned, ..greedy }).tokens[0], whole.tokens[0]);
}

/// All that is wrong with a request is said in one line, by the names of its settings.
#[test]
fn settings_out_of_their_range_are_refused_by_name() {
    let model = load(&checkpoint("qwen3-adder"));
    let vocab = model.config().vocab as i32;
    let mut engine = Engine::new(model, &Serving::default(), &Cpu::best()).unwrap();
    let rule = SamplingRule {
        temperature: -1.0,
        top_p: 1.5,
        min_p: -0.1,
        repetition_penalty: 0.0,
        frequency_penalty: f64::NAN,
        presence_penalty: 1e300,
        logit_bias: [(vocab, 0.0)].into(),
        banned_tokens: vec![-1],
        allowed_tokens: Some(vec![vocab + 1]),
        ..SamplingRule::default()
    };
    let wrong = Sampling { rule, stop: vec![String::new()], stop_token_ids: vec![-7], ..Sampling::default() };
    let line = engine.add(&[vec![1]], &wrong, 0).unwrap_err().to_string();
    for name in SamplingRule::FIELDS.into_iter().filter(|name| *name != "top_k").chain(["stop", "stop_token_ids"]) {
        assert!(line.contains(&format!("{name}: ")), "{name}: {line}");
    }
    for (rule, says) in [
        (SamplingRule { top_p: 0.0, ..SamplingRule::default() }, "top_p: is 0"),
        (
            SamplingRule { banned_tokens: (0..vocab).collect(), ..SamplingRule::default() },
            "banned_tokens: leave no token",
        ),
        (SamplingRule { allowed_tokens: Some(vec![]), ..SamplingRule::default() }, "allowed_tokens: leave no token"),
    ] {
        let line = engine.add(&[vec![1]], &Sampling { rule, ..Sampling::default() }, 0).unwrap_err().to_string();
        assert!(line.starts_with(says), "{line}");
    }
}

/// Prompts with settings of their own, from a file to the rollout, to its scores and to gradients.
#[test]
fn a_file_of_prompts_says_how_each_is_sampled() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let folder = checkpoint("qwen3-adder");
    let folder = folder.to_str().unwrap();
    let lines = [
        json!({"prompt": "1+2="}),
        json!({"prompt": "1+2=", "top_k": 3, "temperature": 0.5, "of the user": 1}),
        json!({"tokens": [3, 4], "top_p": 0.6, "repetition_penalty": 1.2, "logit_bias": {"5": 1.5}, "stop": "7"}),
    ];
    let text = |lines: &[Value]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    std::fs::write(at("prompts.jsonl"), text(&lines)).unwrap();
    let (prompts, rollout) = (at("prompts.jsonl"), at("rollout.jsonl"));
    let sampled = samebits(&[
        "rollout",
        "--model",
        folder,
        "--prompts",
        &prompts,
        "--out",
        &rollout,
        "--min-p",
        "0.02",
        "--max-tokens",
        "9",
    ]);
    assert!(sampled.status.success(), "{sampled:?}");
    let found = std::fs::read_to_string(&rollout).unwrap();
    let settings: Vec<Value> =
        found.lines().skip(1).map(|line| serde_json::from_str::<Value>(line).unwrap()["sampling"].clone()).collect();
    let min_p = json!(0.02);
    let expected = [
        json!({"temperature": 1.0, "min_p": min_p}),
        json!({"temperature": 0.5, "min_p": min_p, "top_k": 3}),
        json!({"temperature": 1.0, "min_p": min_p, "top_p": 0.6, "repetition_penalty": 1.2, "logit_bias": {"5": 1.5}}),
    ];
    assert_eq!(settings, expected);
    let score = |file: &str| samebits(&["score", "--model", folder, "--rollout", file, "--schedule", "chunk:3"]);
    let same = score(&rollout);
    assert!(same.status.success() && String::from_utf8_lossy(&same.stdout).starts_with("0 of "), "{same:?}");
    // Other settings than those of the sampling are seen, and unknown ones refused.
    std::fs::write(at("other.jsonl"), found.replace("0.5", "2.5").replace("0.02", "0.0")).unwrap();
    assert_eq!(score(&at("other.jsonl")).status.code(), Some(1));
    std::fs::write(at("other.jsonl"), found.replace("\"top_k\":3", "\"typical_p\":0.3")).unwrap();
    let refused = score(&at("other.jsonl"));
    assert!(
        refused.status.code() == Some(2) && String::from_utf8_lossy(&refused.stderr).contains("`typical_p`"),
        "{refused:?}"
    );
    // What is wrong with several lines is said at once.
    let wrong = [json!({"prompt": "1", "top_p": 2}), json!({"prompt": "1", "min_p": "low"})];
    std::fs::write(&prompts, text(&wrong)).unwrap();
    let refused = samebits(&["rollout", "--model", folder, "--prompts", &prompts]);
    let line = String::from_utf8_lossy(&refused.stderr).into_owned();
    let all = ["prompts.jsonl:1: top_p: is 2", "prompts.jsonl:2: min_p: is \"low\""];
    assert!(refused.status.code() == Some(2) && all.iter().all(|says| line.contains(says)), "{line}");
    gradients_of_a_file(folder, dir.path(), &found);
}

/// Texts of a rollout with their settings, in a file to train on.
fn gradients_of_a_file(folder: &str, dir: &Path, rollout: &str) {
    let at = |name: &str| dir.join(name).to_str().unwrap().to_string();
    let texts: Vec<Value> = rollout.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
    let list = |text: &Value, name: &str| text[name].as_array().unwrap().clone();
    let lengths = texts.iter().map(|text| list(text, "prompt_tokens").len() + list(text, "tokens").len());
    let len = lengths.clone().max().unwrap();
    let (mut tokens, mut padding, mut mask, mut old) = (vec![], vec![], vec![], vec![]);
    for (text, length) in texts.iter().zip(lengths) {
        let (prompt, sampled, logprobs) = (list(text, "prompt_tokens"), list(text, "tokens"), list(text, "logprobs"));
        let padded = |values: Vec<i32>| (0..len).map(move |i| values.get(i).copied().unwrap_or(0));
        let of = |value: &Value| value.as_i64().unwrap() as i32;
        tokens.extend(padded(prompt.iter().chain(&sampled).map(of).collect()));
        padding.extend(padded(vec![1; length]));
        mask.extend(padded((0..length).map(|t| i32::from(t >= prompt.len())).collect()));
        let logprobs: Vec<f32> = logprobs.iter().map(|p| p.as_f64().unwrap() as f32).collect();
        let zeros = vec![0f32; prompt.len()];
        let all = [&zeros[..], &logprobs].concat();
        old.extend((0..len).map(|i| all.get(i).copied().unwrap_or(0.0)));
    }
    let words = |values: &[i32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let shape = vec![texts.len(), len];
    let data = [words(&tokens), words(&padding), words(&mask), floats(&old), floats(&vec![1.0; texts.len()])];
    let names =
        [("tokens", Dtype::I32), ("attention_mask", Dtype::I32), ("mask", Dtype::I32), ("old_logprob", Dtype::F32)];
    let write = |sampling: &Value, prompt_len: Option<i32>| {
        let mut tensors: Vec<_> = names
            .iter()
            .zip(&data)
            .map(|((name, dtype), data)| (*name, TensorView::new(*dtype, shape.clone(), data).unwrap()))
            .collect();
        tensors.push(("advantages", TensorView::new(Dtype::F32, vec![texts.len()], &data[4]).unwrap()));
        let lengths = words(&vec![prompt_len.unwrap_or(0); texts.len()]);
        if prompt_len.is_some() {
            tensors.push(("prompt_len", TensorView::new(Dtype::I32, vec![texts.len()], &lengths).unwrap()));
        }
        let metadata = HashMap::from([("sampling".to_string(), sampling.to_string())]);
        std::fs::write(at("tokens"), safetensors::serialize(tensors, Some(metadata)).unwrap()).unwrap();
    };
    let grad = || {
        let how = ["grad", "--model", folder, "--tokens", &at("tokens"), "--out", &at("gradient"), "--loss", "policy"];
        samebits(&how)
    };
    let settings: Value = texts.iter().map(|text| text["sampling"].clone()).collect();
    write(&settings, None);
    let made = grad();
    assert!(made.status.success() && made.stderr.is_empty(), "{made:?}");
    // On policy: every ratio is 1, and what was sampled is found again to the bit.
    let bytes = std::fs::read(at("gradient")).unwrap();
    let found = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(found.tensor("loss").unwrap().data(), (-1f32).to_le_bytes());
    for ((found, old), mask) in found.tensor("logprob").unwrap().data().chunks(4).zip(data[3].chunks(4)).zip(&mask) {
        assert!(*mask == 0 || found == old);
    }
    let refused = |sampling: &Value, prompt_len: Option<i32>, says: &str| {
        write(sampling, prompt_len);
        let refused = grad();
        let line = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(2) && line.contains(says), "{says}: {line}");
    };
    refused(&json!({"allowed_tokens": [0]}), None, "\"allowed_tokens\":[0]}");
    refused(&json!({"typical_p": 0.5}), None, "`typical_p` is no setting");
    refused(&json!([{}]), None, "has 1 settings for 3 sequences");
    refused(&json!("hot"), None, "an object of settings, or a list");
    refused(&json!({"top_p": 7}), None, "top_p: is 7");
    refused(&settings, Some(0), "tensor `prompt_len`: element [0] is 0");
    refused(&settings, Some(3), "`mask` counts a token before it");
}
