//! Tokens that others were drawn from, as records of other engines have them: log-probabilities and gradients are those of the rule
//! that left them, bit for bit.

use super::{checkpoint, load, prompts, rollout, samebits};
use safetensors::tensor::{Dtype, TensorView};
use samebits_models::{
    Batch, GradientRun, Loss, Padding, Ruled, Run, Sample, Sampled, Sampling, SamplingRule, Schedule, Serving, ToScore,
};
use samebits_ops::{Cpu, Isa};
use serde_json::{Value, json};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// What top-k leaves for each token of a sample: computed here, of the model's logits and the penalty.
fn kept(logits: &[f32], vocab: usize, rule: &SamplingRule, prompt: &[i32], tokens: &[i32]) -> Vec<Vec<i32>> {
    let rows = logits.chunks(vocab).skip(prompt.len() - 1).take(tokens.len());
    let list = |(place, row): (usize, &[f32])| {
        let mut row = row.to_vec();
        let mut seen: Vec<i32> = [prompt, &tokens[..place]].concat();
        seen.sort_unstable();
        seen.dedup();
        let r = rule.repetition_penalty as f32;
        seen.iter()
            .map(|token| *token as usize)
            .for_each(|t| row[t] = if row[t] < 0.0 { row[t] * r } else { row[t] / r });
        let mut order: Vec<i32> = (0..vocab as i32).collect();
        order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)));
        order.truncate(rule.top_k);
        order
    };
    rows.enumerate().map(list).collect()
}

#[test]
fn what_was_left_stands_in_the_place_of_the_rule() {
    let cpu = Cpu::best();
    let model = load(&checkpoint("qwen3-adder"));
    let narrow = SamplingRule { top_k: 3, repetition_penalty: 1.3, ..SamplingRule::at(0.8) };
    let sampling = Sampling { max_tokens: 7, rule: narrow.clone(), seed: 5, ignore_eos: true, ..Sampling::default() };
    let (samples, prompts) = (rollout(&model, &cpu, &sampling, &Serving::default()), prompts(&model));
    let of = |s: &Sample| [&prompts[s.prompt][..], &s.tokens].concat();
    let sequences: Vec<Vec<i32>> = samples.iter().map(of).collect();
    let lists: Vec<Vec<Vec<i32>>> = samples
        .iter()
        .zip(&sequences)
        .map(|(s, whole)| {
            let logits = model.forward_run(&cpu, &[whole], Run::default()).unwrap();
            kept(&logits, model.config().vocab, &narrow, &prompts[s.prompt], &s.tokens)
        })
        .collect();
    // With the lists, what the settings say of top-k does not matter; the penalty and the temperature do.
    let wide = SamplingRule { top_k: 1, top_p: 0.01, ..narrow.clone() };
    let texts: Vec<ToScore> = samples
        .iter()
        .zip(&lists)
        .map(|(s, lists)| (&prompts[s.prompt][..], &s.tokens[..], &wide, Some(&lists[..])))
        .collect();
    for (schedule, isa) in
        [(Schedule::Prefill, Isa::best()), (Schedule::Decode, Isa::Scalar), (Schedule::Chunk(3), Isa::best())]
    {
        let here = Cpu::new(isa, 2, 1 << 20).unwrap();
        let scores = model.score(&here, &texts, Run { schedule, page_size: 3, ..Run::default() }).unwrap();
        for (sample, scores) in samples.iter().zip(&scores) {
            assert_eq!(bits(&sample.logprobs), bits(scores), "{schedule}, sequence {}", sample.sequence);
        }
    }
    // The lists of the neighbour are others.
    let mut turned = lists.clone();
    for (lists, sample) in turned.iter_mut().zip(&samples) {
        lists.rotate_left(1);
        lists
            .iter_mut()
            .zip(&sample.tokens)
            .filter(|(list, token)| !list.contains(token))
            .for_each(|(l, t)| l.push(*t));
    }
    let other: Vec<ToScore> =
        texts.iter().zip(&turned).map(|(&(a, b, c, _), lists)| (a, b, c, Some(&lists[..]))).collect();
    let scores = model.score(&cpu, &other, Run::default()).unwrap();
    assert!(scores.iter().zip(&samples).all(|(scores, sample)| *scores != sample.logprobs));

    let (by_rule, by_list) = (ruled(&samples, &prompts, &narrow, None), ruled(&samples, &prompts, &wide, Some(&lists)));
    let count: Vec<Vec<i32>> = by_rule.iter().zip(&sequences).map(|(r, s)| counts(r.prompt, s.len())).collect();
    let gradients = |rules: &[Ruled], run: GradientRun| {
        let batch =
            Batch { sequences: &sequences, count: &count, loss: Loss::Nll, sampled: Sampled::By(rules), groups: 1 };
        let found = model.gradients(&cpu, &batch, &run, None, |_| ()).unwrap();
        let parameters = found.parameters.values().flat_map(|t| bits(t.as_slice::<f32>().unwrap())).collect::<Vec<_>>();
        (parameters, found.logprob.iter().map(|row| bits(row)).collect::<Vec<_>>())
    };
    let expected = gradients(&by_rule, GradientRun::default());
    for run in [
        GradientRun::default(),
        GradientRun { micro_batch: 3, padding: Padding::Left(2), recompute: true, ..GradientRun::default() },
        GradientRun { micro_batch: 8, padding: Padding::Right(1), pack: true, ..GradientRun::default() },
    ] {
        assert!(gradients(&by_list, run) == expected, "{run:?}");
    }
    assert!(gradients(&ruled(&samples, &prompts, &wide, Some(&turned)), GradientRun::default()) != expected);
}

fn counts(prompt: usize, len: usize) -> Vec<i32> {
    (0..len).map(|t| i32::from(t >= prompt)).collect()
}

fn ruled(samples: &[Sample], prompts: &[Vec<i32>], rule: &SamplingRule, lists: Option<&[Vec<Vec<i32>>]>) -> Vec<Ruled> {
    let of = |(number, s): (usize, &Sample)| {
        let kept = lists.map(|lists| lists[number].clone());
        Ruled { kept, ..Ruled::new(rule.clone(), prompts[s.prompt].len()) }
    };
    samples.iter().enumerate().map(of).collect()
}

/// Records on the command line: `sampling_mask` of a rollout, and the two tensors of a batch; each of what cannot be is refused.
#[test]
fn records_say_what_tokens_were_drawn_from() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let folder = checkpoint("qwen3-adder");
    let folder = folder.to_str().unwrap();
    std::fs::write(at("prompts.jsonl"), "{\"tokens\": [3, 4, 5]}\n").unwrap();
    let args = ["--max-tokens", "4", "--temperature", "0.7", "--ignore-eos"];
    let sampled = samebits(
        &[
            &["rollout", "--model", folder, "--prompts", &at("prompts.jsonl"), "--out", &at("r"), "--top-k", "1"][..],
            &args,
        ]
        .concat(),
    );
    assert!(sampled.status.success(), "{sampled:?}");
    let text = std::fs::read_to_string(at("r")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let tokens: Vec<i64> = lines[1]["tokens"].as_array().unwrap().iter().map(|t| t.as_i64().unwrap()).collect();
    assert_eq!(tokens.len(), 4);
    // Of all tokens at the temperature, and each drawn from itself alone.
    let alone: Vec<Value> = tokens.iter().map(|token| json!([token])).collect();
    let record = |mask: Value| {
        let mut line = lines[1].clone();
        line["sampling"] = json!({"temperature": 0.7});
        line["sampling_mask"] = mask;
        std::fs::write(at("m"), format!("{}\n{line}\n", lines[0])).unwrap();
        samebits(&["score", "--model", folder, "--rollout", &at("m")])
    };
    let same = record(alone.clone().into());
    assert!(same.status.success() && String::from_utf8_lossy(&same.stdout).starts_with("0 of 4 "), "{same:?}");
    assert_eq!(record(Value::Null).status.code(), Some(1));
    let wrong = |list: Value, at: usize| {
        let mut lists = alone.clone();
        lists[at] = list;
        Value::from(lists)
    };
    for (mask, part) in [
        (wrong(json!([]), 2), "sampling_mask: sequence 0 has an empty list 2".to_string()),
        (wrong(json!([tokens[1], 157]), 1), "has token 157 in list 1, outside the vocabulary of".into()),
        (wrong(json!([tokens[3] - 1]), 3), format!("leaves token {} out of list 3", tokens[3])),
        (json!([[1], [2]]), "has 2 lists of tokens for 4 behind its prompt".into()),
    ] {
        let refused = record(mask);
        let line = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            refused.status.code() == Some(2) && line.contains(&part) && line.lines().count() == 1,
            "{part}: {line}"
        );
    }

    let bytes = |values: &[i64]| values.iter().flat_map(|v| (*v as i32).to_le_bytes()).collect::<Vec<u8>>();
    let whole = bytes(&[&[3, 4, 5][..], &tokens].concat());
    let grad = |out: &str, counts: &[i64], ids: &[i64]| {
        let (counts, kept, mask) = (bytes(counts), bytes(ids), bytes(&[0, 0, 0, 1, 1, 1, 1]));
        let view = |shape: &[usize], data| TensorView::new(Dtype::I32, shape.to_vec(), data).unwrap();
        let tensors = [
            ("tokens", view(&[1, 7], &whole)),
            ("mask", view(&[1, 7], &mask)),
            ("sampling_mask_counts", view(&[1, 7], &counts)),
            ("sampling_mask_token_ids", view(&[ids.len()], &kept)),
        ];
        std::fs::write(at("b"), safetensors::serialize(tensors, None).unwrap()).unwrap();
        samebits(&["grad", "--model", folder, "--tokens", &at("b"), "--out", &at(out), "--temperature", "0.7"])
    };
    let logprob = |out: &str| {
        let bytes = std::fs::read(at(out)).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let data = file.tensor("logprob").unwrap().data().to_vec();
        data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>()
    };
    let found = grad("g", &[0, 0, 0, 1, 1, 1, 1], &tokens);
    assert!(found.status.success(), "{found:?}");
    assert!(logprob("g")[3..] == [0.0; 4] && logprob("g")[1] < 0.0, "{:?}", logprob("g"));
    let more = [&tokens[..1], &[9, 11], &tokens[1..]].concat();
    assert!(grad("h", &[0, 0, 0, 3, 1, 1, 1], &more).status.success());
    assert!(logprob("h")[3] < 0.0 && logprob("h")[4..] == [0.0; 3], "{:?}", logprob("h"));
    for (counts, part) in [
        ([0, 0, 0, 1, 1, 1, 2], "`sampling_mask_counts`: element [0, 6] is 2"),
        ([0, 0, 0, 1, 1, 1, -1], "element [0, 6] is -1"),
        ([0, 0, 0, 1, 1, 1, 0], "`sampling_mask_token_ids`: has 1 tokens more"),
        ([0, 0, 0, 2, 1, 1, 0], "has an empty list 3"),
        ([0, 0, 0, 2, 0, 1, 1], "has an empty list 1"),
    ] {
        let refused = grad("none", &counts, &tokens);
        let line = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(2) && line.contains(part) && line.lines().count() == 1, "{part}: {line}");
        assert!(!dir.path().join("none").exists());
    }
}
