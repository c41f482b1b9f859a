//! Experts that a rollout records: the routers of every schedule and of training choose them again, and those of another are replayed.

use super::{SERVINGS, checkpoint, load, names, prompts, rollout, samebits};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use samebits_models::{
    Batch, Experts, Flips, GradientRun, Loss, Model, Padding, Recorded, Routing, Ruled, Run, Sample, Sampled, Sampling,
    SamplingRule, Schedule, Serving,
};
use samebits_ops::{Cpu, Isa};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Twelve texts of a model, with the experts of their tokens.
fn sampled(model: &Model, cpu: &Cpu, serving: &Serving) -> Vec<Sample> {
    let rule = SamplingRule { repetition_penalty: 1.2, ..SamplingRule::at(0.8) };
    let sampling =
        Sampling { samples: 2, max_tokens: 9, rule, seed: 3, ignore_eos: true, experts: true, ..Sampling::default() };
    rollout(model, cpu, &sampling, serving)
}

/// The experts of samples, others than those in every third token.
fn others(model: &Model, samples: &[Sample], replay: bool) -> Vec<Option<Recorded>> {
    let mixtures = model.config().mixtures();
    let of = |sample: &Sample| {
        let mut experts = sample.experts.clone().unwrap();
        let (layers, chosen) = (experts.layers, experts.chosen);
        for (at, row) in experts.each.chunks_mut(chosen).enumerate().filter(|(at, _)| at / layers % 3 == 1) {
            let count = mixtures[at % layers].count as i32;
            // A step further round the circle, named from the last on.
            row.iter_mut().filter(|expert| **expert >= 0).for_each(|expert| *expert = (*expert + 1) % count);
            row[..mixtures[at % layers].chosen].reverse();
        }
        Some(Recorded { experts, replay })
    };
    samples.iter().map(of).collect()
}

/// The same experts with rows for all blocks, of which those without a mixture hold what nobody reads.
fn by_block(model: &Model, experts: &Experts) -> Experts {
    let (blocks, mixtures) = (model.config().layers(), model.config().mixtures());
    let row = |of_token: &[i32], block: usize| match mixtures.iter().position(|mixture| mixture.block == block) {
        Some(number) => of_token[number * experts.chosen..][..experts.chosen].to_vec(),
        None => vec![0; experts.chosen],
    };
    let tokens = experts.each.chunks(experts.layers * experts.chosen);
    let each =
        tokens.flat_map(|of_token| (0..blocks).flat_map(|block| row(of_token, block)).collect::<Vec<_>>()).collect();
    Experts { layers: blocks, each, ..*experts }
}

/// Log-probabilities of samples by a schedule, and where routers choose others than those recorded.
fn scored(
    model: &Model,
    (cpu, schedule): (&Cpu, Schedule),
    samples: &[Sample],
    recorded: &[Option<Recorded>],
) -> (Vec<Vec<u32>>, Vec<Flips>) {
    let (prompts, rule) = (prompts(model), SamplingRule { repetition_penalty: 1.2, ..SamplingRule::at(0.8) });
    let texts: Vec<_> = samples.iter().map(|s| (&prompts[s.prompt][..], &s.tokens[..], &rule, None)).collect();
    let mut routing = Routing { recorded: recorded.to_vec(), own: Vec::new() };
    let run = Run { schedule, page_size: 3, experts: Some(&mut routing), ..Run::default() };
    let scores = model.score(cpu, &texts, run).unwrap();
    let flips = recorded.iter().zip(&routing.own);
    let flips = flips.map(|(recorded, own)| recorded.as_ref().unwrap().experts.flips(model.config(), own));
    (scores.iter().map(|scores| bits(scores)).collect(), flips.collect())
}

const SCHEDULES: [Schedule; 6] = [
    Schedule::Prefill,
    Schedule::Decode,
    Schedule::Chunk(5),
    Schedule::Mixed,
    Schedule::Speculative(3),
    Schedule::Prefix(2),
];

#[test]
fn routers_choose_again_what_a_rollout_recorded() {
    let mut with_experts = 0;
    for name in names() {
        let model = load(&checkpoint(&name));
        let mixtures = model.config().mixtures();
        if mixtures.is_empty() {
            continue;
        }
        with_experts += 1;
        let samples = sampled(&model, &Cpu::best(), &SERVINGS[0]);
        let prompts = prompts(&model);
        for sample in &samples {
            let experts = sample.experts.as_ref().unwrap();
            assert_eq!(experts.tokens(), prompts[sample.prompt].len() + sample.tokens.len() - 1, "{name}");
            assert_eq!(experts.layers, mixtures.len(), "{name}");
        }
        for (i, serving) in SERVINGS[1..].iter().enumerate() {
            let cpu = Cpu::new(Isa::Scalar, 1 + i % 2, usize::MAX).unwrap();
            assert_eq!(sampled(&model, &cpu, serving), samples, "{name}: {serving:?}");
        }
        for (i, schedule) in SCHEDULES.into_iter().enumerate() {
            let cpu = Cpu::new(if i % 2 == 0 { Isa::best() } else { Isa::Scalar }, 1 + i % 2, usize::MAX).unwrap();
            let own = |sample: &Sample| Some(Recorded { experts: sample.experts.clone().unwrap(), replay: i > 2 });
            let recorded: Vec<_> = samples.iter().map(own).collect();
            let (scores, flips) = scored(&model, (&cpu, schedule), &samples, &recorded);
            let [flipped, choices] = Flips::sum(flips.iter());
            let fed: usize = samples.iter().map(|sample| sample.experts.as_ref().unwrap().tokens()).sum();
            assert_eq!((flipped, choices), (0, fed * mixtures.len()), "{name}: {schedule}");
            let expected: Vec<_> = samples.iter().map(|sample| bits(&sample.logprobs)).collect();
            assert_eq!(scores, expected, "{name}: {schedule}");
        }
    }
    assert!(with_experts >= 15, "{with_experts} models have experts");
}

/// Whoever chose them: every schedule and every way to train has the same bits, others than without a replay, and counts as many
/// choices that are others.
#[test]
fn choices_of_others_are_replayed_alike_everywhere() {
    for name in ["qwen3-moe", "deepseek-v3", "gpt-oss", "llama4", "phimoe", "hunyuan-moe", "gemma4-moe"] {
        let (model, cpu) = (load(&checkpoint(name)), Cpu::best());
        let samples = sampled(&model, &cpu, &SERVINGS[0]);
        let recorded = others(&model, &samples, true);
        let (expected, flips) = scored(&model, (&cpu, Schedule::Prefill), &samples, &recorded);
        let own: Vec<_> = samples.iter().map(|sample| bits(&sample.logprobs)).collect();
        assert!(expected != own, "{name}");
        assert!(flips.iter().any(|flips| flips.count()[0] > 0), "{name}");
        for (i, schedule) in SCHEDULES.into_iter().enumerate() {
            let cpu = Cpu::new(if i % 2 == 0 { Isa::best() } else { Isa::Scalar }, 2, usize::MAX).unwrap();
            assert!(
                scored(&model, (&cpu, schedule), &samples, &recorded) == (expected.clone(), flips.clone()),
                "{name}: {schedule}"
            );
        }
        let mut whole = recorded.clone();
        whole.iter_mut().flatten().for_each(|recorded| recorded.experts = by_block(&model, &recorded.experts));
        assert!(
            scored(&model, (&cpu, Schedule::Prefill), &samples, &whole) == (expected.clone(), flips.clone()),
            "{name}"
        );
        // Counted alone they change nothing.
        let (counted, _) = scored(&model, (&cpu, Schedule::Chunk(4)), &samples, &others(&model, &samples, false));
        assert_eq!(counted, own, "{name}");
        // Those of the token before are other ones.
        let mut late = recorded.clone();
        late.iter_mut().flatten().for_each(|recorded| {
            let row = recorded.experts.layers * recorded.experts.chosen;
            recorded.experts.each.rotate_right(row);
        });
        assert!(scored(&model, (&cpu, Schedule::Prefill), &samples, &late).0 != expected, "{name}");
        training_replays_them(&model, name, &samples, recorded, (&expected, &flips));
    }
}

fn training_replays_them(
    model: &Model,
    name: &str,
    samples: &[Sample],
    recorded: Vec<Option<Recorded>>,
    (expected, flips): (&[Vec<u32>], &[Flips]),
) {
    let (prompts, cpu) = (prompts(model), Cpu::best());
    let rule = SamplingRule { repetition_penalty: 1.2, ..SamplingRule::at(0.8) };
    let ruled = |(sample, experts): (&Sample, Option<Recorded>)| Ruled {
        experts,
        ..Ruled::new(rule.clone(), prompts[sample.prompt].len())
    };
    let rules: Vec<Ruled> = samples.iter().zip(recorded).map(ruled).collect();
    let sequences: Vec<Vec<i32>> = samples.iter().map(|s| [&prompts[s.prompt][..], &s.tokens].concat()).collect();
    let counts = |(r, s): (&Ruled, &Vec<i32>)| (0..s.len()).map(|t| i32::from(t >= r.prompt)).collect();
    let count: Vec<Vec<i32>> = rules.iter().zip(&sequences).map(counts).collect();
    let made = |rules: &[Ruled], run: GradientRun| {
        let sampled = Sampled::By(rules);
        let batch = Batch { sequences: &sequences, count: &count, loss: Loss::Nll, sampled, groups: 1 };
        let found = model.gradients(&cpu, &batch, &run, None, |_| ()).unwrap();
        let parameters = found.parameters.values().flat_map(|t| t.as_slice::<f32>().unwrap());
        (parameters.map(|v| v.to_bits()).collect::<Vec<_>>(), found.logprob, found.flips)
    };
    let first = made(&rules, GradientRun { micro_batch: 5, ..GradientRun::default() });
    for (b, expected) in expected.iter().enumerate() {
        assert_eq!(*expected, bits(&first.1[b][rules[b].prompt..]), "{name}: sequence {b}");
    }
    assert!(first.2.iter().map(|flips| flips.as_ref().unwrap()).eq(flips), "{name}");
    for run in [
        GradientRun::default(),
        GradientRun { micro_batch: 16, padding: Padding::Left(3), recompute: true, ..GradientRun::default() },
        GradientRun { micro_batch: 7, padding: Padding::Right(2), pack: true, ..GradientRun::default() },
    ] {
        assert!(made(&rules, run) == first, "{name}: {run:?}");
    }
    let own: Vec<Ruled> = rules.iter().map(|ruled| Ruled { experts: None, ..ruled.clone() }).collect();
    assert!(made(&own, GradientRun::default()).0 != first.0, "{name}: the router's gradient");
}

#[test]
fn experts_that_a_model_does_not_have_are_refused() {
    let (cpu, rule) = (Cpu::best(), SamplingRule::default());
    let refused = |name: &str, layers: usize, chosen: usize, each: &[i32]| {
        let model = load(&checkpoint(name));
        let experts = Experts { layers, chosen, each: each.to_vec() };
        let mut routing = Routing { recorded: vec![Some(Recorded { experts, replay: true })], own: Vec::new() };
        let run = Run { experts: Some(&mut routing), ..Run::default() };
        model.score(&cpu, &[(&[1, 2][..], &[3][..], &rule, None)], run).unwrap_err().to_string()
    };
    let moe = load(&checkpoint("mixtral"));
    let (layers, mixture) = (moe.config().mixtures().len(), moe.config().mixtures()[0]);
    assert_eq!((layers, mixture.count, mixture.chosen), (2, 6, 2));
    let dense = refused("llama3", 1, 1, &[0, 0]);
    assert!(dense.contains("the model has no mixture of experts"), "{dense}");
    let [three, one] = [refused("mixtral", 3, 1, &[0; 6]), refused("mixtral", 2, 2, &[0, 1, 2, 3])];
    assert!(
        three.contains("has 3 layers; the model has 2 mixtures") && three.contains("has 1 for each token"),
        "{three}"
    );
    assert!(one.contains("has 1 tokens of 3; give all, or the first 2"), "{one}");
    let both = refused("mixtral", 2, 2, &[0, 9, 1, 1, -1, -1, 0, -1]);
    assert!(both.contains("token 0, block 0: 9 is no expert, and so in 1 others"), "{both}");
    assert!(both.contains("token 0, block 1: 1 stands twice"), "{both}");
    let sampling = Sampling { experts: true, ..Sampling::default() };
    let dense = load(&checkpoint("llama3"));
    let line = dense.rollout(&cpu, &[vec![1]], &sampling, &SERVINGS[0], |_| Ok(())).unwrap_err().to_string();
    assert!(line.contains("experts: the model has no mixture of experts"), "{line}");
}

/// By the command: a record is scored with 0 flips, and one that names others is counted, judged and replayed.
#[test]
fn records_of_experts_are_scored_by_the_command() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (model, out) = (checkpoint("qwen3-moe").to_str().unwrap().to_string(), path("rollout"));
    std::fs::write(path("prompts.jsonl"), "{\"tokens\": [1, 4, 5]}\n{\"tokens\": [7, 9, 2, 11]}\n").unwrap();
    let made = samebits(&[
        "rollout",
        "--model",
        &model,
        "--prompts",
        &path("prompts.jsonl"),
        "--samples",
        "2",
        "--max-tokens",
        "6",
        "--ignore-eos",
        "--experts",
        "--out",
        &out,
    ]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let score = |extra: &[&str]| {
        let found = samebits(&[&["score", "--model", &model, "--rollout", &out, "--json"][..], extra].concat());
        let text = String::from_utf8_lossy(&found.stdout).to_string();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        (found.status.code(), json, String::from_utf8_lossy(&found.stderr).to_string())
    };
    for extra in [&[][..], &["--replay-experts", "--schedule", "decode"]] {
        let (code, json, error) = score(extra);
        assert_eq!((code, json["flips"].as_u64(), json["differ"].as_u64()), (Some(0), Some(0), Some(0)), "{error}");
        assert!(
            json["choices"].as_u64() > Some(20) && json["by_block"].as_array().is_some_and(|blocks| !blocks.is_empty())
        );
    }
    // The experts of each text are those of the next one of its prompt: of other tokens.
    let text = std::fs::read_to_string(&out).unwrap();
    let mut lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [one, two] = [1, 2].map(|i| lines[i]["routed_experts"].clone());
    assert!(one != two);
    (lines[1]["routed_experts"], lines[2]["routed_experts"]) = (two, one);
    let write = |lines: &[serde_json::Value]| {
        std::fs::write(&out, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    };
    write(&lines);
    let (code, counted, error) = score(&[]);
    assert_eq!((code, counted["differ"].as_u64()), (Some(1), Some(0)), "{error}");
    let (code, replayed, error) = score(&["--replay-experts"]);
    assert_eq!(code, Some(1), "{error}");
    assert!(counted["flips"].as_u64() > Some(0) && replayed["differ"].as_u64() > Some(0), "{counted} {replayed}");
    for (wrong, why) in [("AA", "no base64"), ("AAA=", "routed_experts")] {
        lines[3]["routed_experts"] = wrong.into();
        write(&lines);
        let (code, _, error) = score(&[]);
        assert!(code == Some(2) && error.contains(why), "{error}");
    }
    lines.iter_mut().skip(1).for_each(|line| drop(line.as_object_mut().unwrap().remove("routed_experts")));
    write(&lines);
    assert_eq!(score(&[]).0, Some(0));
    assert!(score(&["--replay-experts"]).2.contains("records none"));
}

/// A file of two texts, the first behind padding, with experts of all blocks, and with `replay` in its metadata.
fn write_examples(path: &str, model: &Model, samples: &[Sample], replay: Option<&str>) {
    let prompts = prompts(model);
    let recorded = others(model, samples, true);
    let texts: Vec<Vec<i32>> = samples.iter().map(|s| [&prompts[s.prompt][..], &s.tokens].concat()).collect();
    let (longest, chosen) = (texts.iter().map(Vec::len).max().unwrap() + 2, model.config().mixtures()[0].chosen);
    let row = model.config().layers() * chosen;
    let (mut tokens, mut mask, mut experts) = (Vec::new(), Vec::new(), Vec::new());
    for (text, recorded) in texts.iter().zip(recorded) {
        let padding = longest - text.len();
        tokens.extend(vec![0; padding].iter().chain(text));
        mask.extend(vec![0; padding].into_iter().chain(vec![1; text.len()]));
        let of = by_block(model, &recorded.unwrap().experts).each;
        // What stands at padding and at last tokens is nobody's.
        experts.extend(vec![0i16; padding * row].into_iter().chain(of.into_iter().map(|expert| expert as i16)));
        experts.resize(experts.len() + row, 0);
    }
    let words = |values: &[i32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let shape = vec![texts.len(), longest];
    let experts_shape = vec![texts.len(), longest, model.config().layers(), chosen];
    let data = [words(&tokens), words(&mask), experts.iter().flat_map(|v| v.to_le_bytes()).collect()];
    let views = [
        ("tokens", TensorView::new(Dtype::I32, shape.clone(), &data[0]).unwrap()),
        ("attention_mask", TensorView::new(Dtype::I32, shape, &data[1]).unwrap()),
        ("routed_experts", TensorView::new(Dtype::I16, experts_shape, &data[2]).unwrap()),
    ];
    let metadata = replay.map(|replay| [("replay".to_string(), replay.to_string())].into());
    std::fs::write(path, safetensors::serialize(views, metadata).unwrap()).unwrap();
}

#[test]
fn files_of_experts_are_trained_on_by_the_command() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let folder = checkpoint("qwen3-moe").to_str().unwrap().to_string();
    let model = load(&checkpoint("qwen3-moe"));
    let samples = &sampled(&model, &Cpu::best(), &SERVINGS[0])[..2];
    let run = |verb: &str, more: &[&str]| {
        let found = samebits(&[&[verb, "--model", &folder][..], more].concat());
        let [out, error] = [found.stdout, found.stderr].map(|bytes| String::from_utf8_lossy(&bytes).to_string());
        assert_eq!(found.status.code(), Some(0), "{error}");
        (out, error)
    };
    let (mut logprobs, mut digests) = (Vec::new(), Vec::new());
    for (i, replay) in [None, Some("experts")].into_iter().enumerate() {
        let (data, made, trained) = (path("data"), path("made"), path(&format!("trained{i}")));
        write_examples(&data, &model, samples, replay);
        let (_, error) = run("grad", &["--tokens", &data, "--out", &made, "--micro-batch", "2", "--recompute"]);
        let bytes = std::fs::read(&made).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| -> Vec<u32> {
            let data = file.tensor(name).unwrap().data().to_vec();
            data.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect()
        };
        let flips: u32 = words("flips").iter().sum();
        assert!(flips > 0 && error.contains(&format!("{flips} of ")), "{error}");
        logprobs.push(words("logprob"));
        let (out, _) = run("train", &["--data", &data, "--out", &trained, "--steps", "1", "--batch", "2"]);
        assert!(out.contains(&format!(" flips {flips} of ")), "{out}");
        let steps = std::fs::read_to_string(format!("{trained}/steps.jsonl")).unwrap();
        let line: serde_json::Value = serde_json::from_str(steps.trim()).unwrap();
        assert_eq!(line["flips"].as_u64(), Some(flips.into()));
        digests.push(line["sha256"].clone());
    }
    assert!(logprobs[0] != logprobs[1] && digests[0] != digests[1]);
    // Those of the model crate, at a temperature of 1 from the first token on.
    let recorded = others(&model, samples, true);
    let prompts = prompts(&model);
    let sequences: Vec<Vec<i32>> = samples.iter().map(|s| [&prompts[s.prompt][..], &s.tokens].concat()).collect();
    let rules = recorded.into_iter().map(|experts| Ruled { experts, ..Ruled::new(SamplingRule::default(), 1) });
    let rules: Vec<Ruled> = rules.collect();
    let (expected, _) = model.logprobs(&Cpu::best(), &sequences, Sampled::By(&rules), &GradientRun::default()).unwrap();
    let longest = logprobs[1].len() / 2;
    for (row, expected) in logprobs[1].chunks(longest).zip(&expected) {
        assert_eq!(row[longest - expected.len()..], bits(expected));
    }
    let refused = |replay| {
        write_examples(&path("data"), &model, samples, replay);
        let (data, out) = (path("data"), path("out"));
        String::from_utf8_lossy(&samebits(&["grad", "--model", &folder, "--tokens", &data, "--out", &out]).stderr)
            .to_string()
    };
    let line = refused(Some("logits"));
    assert!(line.contains("metadata `replay`: is `logits`; use experts"), "{line}");
}
