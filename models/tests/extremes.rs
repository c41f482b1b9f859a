//! Random and extreme arguments: every public function gives an error or an answer, never a panic, never an abort.
//!
//! Compiled with overflow checks; sizes that no memory holds must be refused before they are asked for.

use samebits_models::plan::{Activation, Branch, Heads, Layer};
use samebits_models::{
    Accumulator, Audit, Batch, Config, Engine, Event, GradientRun, Grouping, Loss, Model, ModelError, Optimizer,
    Padding, PageOrder, Partial, Precision, RopeLength, Run, Sampled, Sampling, SamplingRule, Schedule, Serving,
    Trainer,
};
use samebits_ops::{Cpu, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn checkpoint(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name)
}

fn load(name: &str) -> Model {
    Model::load(&checkpoint(name), Precision::Bf16, &Cpu::best()).unwrap()
}

/// Numbers that sums and products of sizes overflow with, and some that they do not.
const SIZES: [usize; 12] =
    [0, 1, 2, 3, 64, 1 << 16, i32::MAX as usize, 1 << 32, 1 << 40, usize::MAX / 2, usize::MAX - 1, usize::MAX];
const FLOATS: [f64; 12] =
    [0.0, -0.0, 1.0, -9.0, 1e-60, 1e60, f64::MIN_POSITIVE, f64::MAX, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 0.7];
const TOKENS: [i32; 7] = [0, 1, 5, -1, 31, i32::MIN, i32::MAX];

/// A generator of choices.
struct Choices(u64);

impl Choices {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// Mostly tokens of the vocabulary, of any number.
    fn tokens(&mut self) -> Vec<i32> {
        let (length, any) = (self.below(9), self.below(4) == 0);
        (0..length).map(|_| if any { self.of(&TOKENS) } else { self.below(19) as i32 }).collect()
    }

    fn floats(&mut self, length: usize) -> Vec<f32> {
        (0..length).map(|_| if self.below(4) == 0 { self.of(&FLOATS) as f32 } else { -0.5 }).collect()
    }
}

#[test]
fn what_overflowed_is_refused_by_name() {
    let (model, cpu) = (load("qwen3-adder"), Cpu::best());
    let line = |found: Result<(), ModelError>| found.unwrap_err().to_string();
    let score = |prompt: &[i32], tokens: &[i32], t: f64, run: Run| {
        line(model.score(&cpu, &[(prompt, tokens, &SamplingRule::at(t), None)], run).map(drop))
    };
    assert!(score(&[], &[1, 2], 1.0, Run::default()).starts_with("tokens: text 0 has 0 and 2 behind them"));
    assert!(score(&[1], &[], 1.0, Run::default()).starts_with("tokens: text 0 has 1 and 0 behind them"));
    assert!(score(&[1], &[2, -1], 1.0, Run::default()).starts_with("tokens: element 1 is -1"));
    assert!(score(&[1], &[2], -1.0, Run::default()).starts_with("temperature: is -1"));
    let pages = Run { page_size: 0, ..Run::default() };
    assert!(score(&[1], &[2], 1.0, pages).starts_with("page size: is 0"));
    assert!(line(model.decode(&[-1]).map(drop)).starts_with("tokens: element 0 is -1"));
    for padding in [Padding::Left(usize::MAX), Padding::Right(1 << 40), Padding::Left(1 << 16)] {
        let run = GradientRun { padding, ..GradientRun::default() };
        assert!(
            line(model.logprobs(&cpu, &[vec![1, 2]], Sampled::At(1.0), &run).map(drop)).starts_with("padding: is ")
        );
    }
    // As many as are asked for are made one after the other, not kept room for.
    let sampling = Sampling { samples: usize::MAX, max_tokens: 1, ignore_eos: true, ..Sampling::default() };
    let mut engine = Engine::new(model, &Serving::default(), &cpu).unwrap();
    assert!(line(engine.add(&[vec![1], vec![1]], &sampling, 0).map(drop)).starts_with("samples: "));
    let request = engine.add(&[vec![1]], &sampling, 0).unwrap();
    let events = engine.step(&cpu).unwrap();
    assert!(!events.is_empty() && events.iter().all(|event: &Event| event.request == request));
    engine.end(request);
    assert_eq!(engine.requests().count(), 0);
}

#[test]
fn runs_of_any_kind_end() {
    let (model, cpu, mut pick) = (load("qwen3-adder"), Cpu::best(), Choices(1));
    let mut answers = [0; 2];
    for _ in 0..400 {
        let n = SIZES[pick.below(SIZES.len())];
        let schedules = [
            Schedule::Prefill,
            Schedule::Decode,
            Schedule::Mixed,
            Schedule::Chunk(n),
            Schedule::Speculative(n),
            Schedule::Prefix(n),
        ];
        let run = |pick: &mut Choices| Run {
            schedule: pick.of(&schedules),
            grouping: pick.of(&[Grouping::Together, Grouping::Alone]),
            page_size: pick.of(&SIZES),
            page_order: pick.of(&[PageOrder::Ascending, PageOrder::Scattered]),
            allow_nonfinite: pick.below(2) == 0,
            adapters: &[],
            experts: None,
            probe: None,
        };
        let texts: Vec<Vec<i32>> = (0..pick.below(4)).map(|_| pick.tokens()).collect();
        let borrowed: Vec<&[i32]> = texts.iter().map(Vec::as_slice).collect();
        let t = pick.of(&FLOATS);
        let rule = SamplingRule { temperature: t, top_k: pick.of(&[0, 0, 1, 5]), ..SamplingRule::default() };
        let halves = borrowed.iter().map(|text| text.split_at(text.len() / 2));
        let pairs: Vec<_> = halves.map(|(prompt, tokens)| (prompt, tokens, &rule, None)).collect();
        let of_run = run(&mut pick);
        let found = [
            model.forward_run(&cpu, &borrowed, of_run).is_ok(),
            model.score(&cpu, &pairs, run(&mut pick)).is_ok(),
            model
                .forward(&cpu, &texts.concat(), pick.of(&SIZES), pick.of(&SIZES), Schedule::Prefill, Grouping::Together)
                .is_ok(),
            model.decode(&texts.concat()).is_ok(),
            model
                .logprobs(&cpu, &texts, Sampled::At(pick.of(&[1.0, 1.0, 0.7, 0.0, t])), &gradient_run(&mut pick))
                .is_ok(),
        ];
        found.into_iter().for_each(|ok| answers[usize::from(ok)] += 1);
    }
    assert!(answers.iter().all(|count| *count > 100), "{answers:?}");
}

fn gradient_run(pick: &mut Choices) -> GradientRun {
    let n = pick.of(&SIZES);
    GradientRun {
        micro_batch: pick.of(&SIZES),
        padding: pick.of(&[Padding::None, Padding::None, Padding::Left(3), Padding::Left(n), Padding::Right(n)]),
        pack: pick.below(2) == 0,
        ranks: pick.of(&[1, 1, 1, 1, 2, 0, usize::MAX]),
        recompute: pick.below(2) == 0,
        allow_nonfinite: pick.below(2) == 0,
    }
}

#[test]
fn rollouts_of_any_kind_end() {
    let (cpu, mut pick) = (Cpu::best(), Choices(2));
    let mut model = load("llama-dynamic");
    let mut answers = [0; 2];
    for _ in 0..150 {
        let length = if pick.below(4) == 0 { RopeLength::OfText } else { RopeLength::Declared(pick.of(&SIZES)) };
        model = match model.with_rope_length(length) {
            Ok(model) => model,
            Err(_) => load("llama-dynamic").with_rope_length(RopeLength::Declared(24)).unwrap(),
        };
        let serving = Serving {
            batch: pick.of(&SIZES),
            chunk: pick.of(&SIZES),
            page_size: pick.of(&SIZES),
            page_order: PageOrder::Scattered,
            share_prompts: pick.below(2) == 0,
        };
        let sampling = Sampling {
            samples: pick.of(&[0, 1, 2, 3]),
            max_tokens: pick.of(&[0, 1, 5, 5, usize::MAX]),
            rule: SamplingRule {
                temperature: pick.of(&FLOATS),
                top_k: pick.of(&[0, 0, 3, usize::MAX]),
                top_p: pick.of(&[1.0, 1.0, 0.5, 1e-300, 1.5]),
                min_p: pick.of(&[0.0, 0.0, 0.3, 1.0, -1.0]),
                presence_penalty: pick.of(&[0.0, 0.0, 1.5, 1e300]),
                logit_bias: [(1, pick.of(&[0.0, -7.0, 1e38]))].into(),
                banned_tokens: vec![pick.of(&[2, 2, 2, 5000])],
                ..SamplingRule::default()
            },
            seed: pick.of(&SIZES) as u64,
            ignore_eos: true,
            ..Sampling::default()
        };
        let prompts: Vec<Vec<i32>> = (0..pick.below(3)).map(|_| pick.tokens()).collect();
        let found = model.rollout(&cpu, &prompts, &sampling, &serving, |_| Ok(()));
        answers[usize::from(found.is_ok())] += 1;
    }
    assert!(answers.iter().all(|count| *count > 10), "{answers:?}");
    let adder = load("qwen3-adder");
    for prompt in ["", "1+2=", "\0", "🦀", &"1".repeat(5000)] {
        for max_tokens in [0, 3, usize::MAX] {
            drop(adder.generate(&cpu, prompt, max_tokens));
        }
        drop(adder.encode(prompt));
        drop(adder.encode_chat(&serde_json::json!([{"role": prompt, "content": prompt}])));
    }
}

#[test]
fn gradients_of_any_kind_end() {
    let (model, cpu, mut pick) = (load("qwen3-adder"), Cpu::best(), Choices(3));
    let mut answers = [0; 2];
    for _ in 0..120 {
        // Some of what is right in all but one thing.
        let plain = pick.below(2) == 0;
        let mut sequences: Vec<Vec<i32>> = (0..pick.below(3)).map(|_| pick.tokens()).collect();
        if plain {
            sequences = vec![vec![1, 2, 3], vec![4, 5]];
        }
        let odd = pick.below(4) == 0;
        let mut count: Vec<Vec<i32>> =
            sequences.iter().map(|s| (0..s.len()).map(|t| i32::from(t > 0)).collect()).collect();
        if odd {
            count = sequences.iter().map(|_| pick.tokens()).collect();
        }
        let advantages = pick.floats(sequences.len());
        let old: Vec<Vec<f32>> = sequences.iter().map(|s| pick.floats(s.len())).collect();
        let loss = match pick.below(2) {
            0 => Loss::Nll,
            _ => {
                let (low, high, entropy) =
                    (pick.of(&[0.2, 0.2, 1e60, -9.0]), pick.of(&[0.2, f64::NAN]), pick.of(&FLOATS));
                Loss::Policy { advantages: &advantages, old_logprob: &old, low, high, entropy }
            }
        };
        let batch = Batch {
            sequences: &sequences,
            count: &count,
            loss,
            sampled: Sampled::At(if plain { 1.0 } else { pick.of(&FLOATS) }),
            groups: if plain { 1 } else { pick.of(&[1, 1, 2, 0, 3, usize::MAX]) },
        };
        let run = if plain {
            GradientRun { ranks: 1, micro_batch: 2, ..gradient_run(&mut pick) }
        } else {
            gradient_run(&mut pick)
        };
        let found = model.gradients(&cpu, &batch, &run, None, |_| {});
        answers[usize::from(found.is_ok())] += 1;
        let (sequences, groups) = (Some(pick.of(&SIZES)).filter(|_| odd), pick.of(&[1, 2, 0, 3, usize::MAX]));
        let Ok(mut sums) = Accumulator::new(sequences, groups, pick.of(&SIZES), pick.of(&SIZES)) else { continue };
        let texts = [pick.tokens(), pick.tokens()];
        let t = pick.of(&[1.0, 0.7, f64::NAN, 1e-39]);
        if let Ok(forward) = sums.forward(&model, &cpu, &texts, Sampled::At(t), &gradient_run(&mut pick)) {
            let gradients: Vec<Vec<f32>> = texts.iter().map(|s| pick.floats(s.len() + usize::from(odd))).collect();
            drop(sums.reverse(&cpu, forward, &gradients));
        }
        drop(sums.partial(&cpu).and_then(|partial| partial.finish(&cpu, &model)));
    }
    assert!(answers.iter().all(|count| *count > 5), "{answers:?}");
    for name in
        ["", "[]", "[\"a\", 1, true, null]", "[\"a\",0,false,[\"b\",1,2,18446744073709551615,18446744073709551615]]"]
    {
        let tensor = Tensor::new(vec![0f32; 2], &[2]).unwrap();
        if let Ok(partial) = Partial::of_tensors(BTreeMap::from([(name.to_string(), tensor)])) {
            drop(Partial::join(&cpu, vec![partial]).and_then(|joined| joined.finish(&cpu, &model)));
        }
    }
    assert!(Partial::join(&cpu, vec![]).is_err());
}

#[test]
fn steps_of_any_kind_end() {
    let (cpu, mut pick) = (Cpu::best(), Choices(4));
    let dir = checkpoint("llama3");
    for length in SIZES {
        drop(Trainer::load(&dir, Precision::Bf16, Some(length), &cpu, |_, _| ()));
    }
    let mut trainer = Trainer::load(&dir, Precision::Fp32, None, &cpu, |_, _| ()).unwrap();
    for _ in 0..30 {
        let [lr, beta1, beta2, eps, weight_decay, max_norm] = [(); 6].map(|()| pick.of(&FLOATS));
        let optimizer = Optimizer { lr, beta1, beta2, eps, weight_decay, max_norm };
        let (sequences, count) = ([vec![1, 2, 3]], [vec![0, 1, 1]]);
        let batch =
            Batch { sequences: &sequences, count: &count, loss: Loss::Nll, sampled: Sampled::At(1.0), groups: 1 };
        drop(trainer.check(&cpu, &batch, &gradient_run(&mut pick), &optimizer));
        drop(trainer.advance(&cpu, &batch, &gradient_run(&mut pick), &optimizer, |_| ()));
    }
    for step in SIZES {
        drop(trainer.resume(&cpu, step, BTreeMap::new()));
    }
}

/// A model runs what a changed config says, not what its folder said.
#[test]
fn a_changed_config_is_what_runs() {
    let cpu = Cpu::best();
    let good = Config::load(&checkpoint("llama3")).unwrap();
    let tensors = Model::read_tensors(&checkpoint("llama3")).unwrap();
    let views: BTreeMap<_, _> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.view())).collect();
    let logits = |c: &Config| {
        let model = Model::of_tensors(c, &views, Precision::Fp32, None, &cpu).unwrap();
        model.forward_run(&cpu, &[&[1, 2, 3]], Run::default()).unwrap()
    };
    fn heads(c: &mut Config) -> impl Iterator<Item = &mut Heads> {
        c.blocks.iter_mut().flatten().filter_map(|branch| match &mut branch.layer {
            Layer::Attention(plan) => Some(&mut plan.heads),
            _ => None,
        })
    }
    let changes: [fn(&mut Config); 5] = [
        |c| heads(c).for_each(|heads| heads.window = Some(1)),
        |c| heads(c).for_each(|heads| heads.chunk = Some(2)),
        |c| heads(c).for_each(|heads| heads.scale *= 2.0),
        |c| heads(c).for_each(|heads| heads.softcap = Some(0.25)),
        |c| c.norms.eps = 1.0,
    ];
    for (i, change) in changes.iter().enumerate() {
        let mut changed = good.clone();
        change(&mut changed);
        assert!(logits(&changed) != logits(&good), "change {i}");
    }
}

/// Two alphas would stand for those of all experts.
#[test]
fn experts_have_no_learned_activation() {
    let mut changed = Config::load(&checkpoint("nemotron-3")).unwrap();
    let mut experts = 0;
    for branch in changed.blocks.iter_mut().flatten() {
        if let Layer::Moe(plan) = &mut branch.layer {
            plan.expert.activation = Activation::Learned("mlp.act_fn");
            experts += 1;
        }
    }
    assert!(experts > 0);
    let tensors = BTreeMap::new();
    let told = Model::of_tensors(&changed, &tensors, Precision::Fp32, None, &Cpu::best()).err().unwrap().to_string();
    assert!(told.contains("the alphas of xIELU are those of one MLP"), "{told}");
}

/// Changes one number of a block.
fn change(block: &mut [Branch], n: usize, pick: &mut Choices) {
    let of_heads = |heads: &mut Heads, at: usize| match at {
        0 => heads.queries = n,
        1 => heads.keys = n,
        2 => heads.key_dim = n,
        3 => heads.value_dim = n,
        4 => heads.window = Some(n),
        _ => heads.chunk = Some(n),
    };
    let at = pick.below(block.len());
    if let Some(ahead) = &mut block[at].ahead
        && pick.below(3) == 0
    {
        *(if pick.below(2) == 0 { &mut ahead.of } else { &mut ahead.number }) = n;
        return;
    }
    match &mut block[at].layer {
        Layer::Attention(plan) => match pick.below(11) {
            6 => plan.hidden = n,
            7 => plan.rope.table = n,
            8 => plan.rope.dim = n,
            9 => plan.lender = Some(n),
            10 => plan.values.of_keys = !plan.values.of_keys,
            at => of_heads(&mut plan.heads, at),
        },
        Layer::LatentAttention(plan) => match pick.below(13) {
            10 => plan.indexer.iter_mut().for_each(|indexer| indexer.heads = n),
            11 => plan.indexer.iter_mut().for_each(|indexer| indexer.dim = n),
            12 => plan.indexer.iter_mut().for_each(|indexer| indexer.chosen = n),
            6 => plan.nope = n,
            7 => plan.kv_rank = n,
            8 => plan.q_rank = Some(n),
            9 => plan.rope.dim = n,
            at => of_heads(&mut plan.heads, at),
        },
        Layer::Mamba(plan) => {
            let sizes = [&mut plan.hidden, &mut plan.inner, &mut plan.state_dim, &mut plan.rank, &mut plan.taps];
            let at = pick.below(sizes.len());
            *sizes.into_iter().nth(at).expect("it is one of them") = n;
        }
        Layer::Mamba2(plan) => {
            let sizes = [
                &mut plan.hidden,
                &mut plan.heads,
                &mut plan.head_dim,
                &mut plan.groups,
                &mut plan.state_dim,
                &mut plan.taps,
                &mut plan.norm_groups,
            ];
            let at = pick.below(sizes.len());
            *sizes.into_iter().nth(at).expect("it is one of them") = n;
        }
        Layer::TimeMix(plan) if pick.below(7) == 0 => plan.first = !plan.first,
        Layer::TimeMix(plan) => {
            let [w, i, v, g] = &mut plan.ranks;
            let sizes = [&mut plan.hidden, &mut plan.head_dim, w, i, v, g];
            let at = pick.below(sizes.len());
            *sizes.into_iter().nth(at).expect("it is one of them") = n;
        }
        Layer::ChannelMix(plan) => *(if pick.below(2) == 0 { &mut plan.width } else { &mut plan.hidden }) = n,
        Layer::DeltaRule(plan) => {
            let sizes = [
                &mut plan.hidden,
                &mut plan.key_heads,
                &mut plan.value_heads,
                &mut plan.key_dim,
                &mut plan.value_dim,
                &mut plan.taps,
            ];
            let at = pick.below(sizes.len());
            *sizes.into_iter().nth(at).expect("it is one of them") = n;
        }
        Layer::ShortConv(plan) => *(if pick.below(2) == 0 { &mut plan.taps } else { &mut plan.hidden }) = n,
        Layer::Mlp(plan) => *(if pick.below(2) == 0 { &mut plan.width } else { &mut plan.hidden }) = n,
        Layer::PerLayerInput(plan) => {
            let sizes = [&mut plan.hidden, &mut plan.width, &mut plan.first, &mut plan.all];
            let at = pick.below(sizes.len());
            *sizes.into_iter().nth(at).expect("it is one of them") = n;
        }
        Layer::Moe(plan) => match pick.below(5) {
            0 => plan.count = n,
            1 => plan.groups = n,
            2 => plan.chosen = n,
            3 => plan.top_groups = n,
            _ => plan.expert.width = n,
        },
    }
}

/// Whoever changes a config can make it say anything.
#[test]
fn changed_configs_are_refused() {
    let cpu = Cpu::best();
    let mut refused = 0;
    for name in [
        "llama3",
        "mixtral",
        "deepseek-v2",
        "deepseek-v3-2",
        "gemma2",
        "gemma4",
        "gemma4-moe",
        "lfm2",
        "mamba2",
        "falcon-mamba",
        "rwkv7",
        "qwen3-next",
        "gpt2",
        "gpt-neox",
        "zamba2",
    ] {
        let good = Config::load(&checkpoint(name)).unwrap();
        let tensors = Model::read_tensors(&checkpoint(name)).unwrap();
        let views: BTreeMap<_, _> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.view())).collect();
        assert!(Model::of_tensors(&good, &views, Precision::Fp32, None, &cpu).is_ok(), "{name}");
        let mut pick = Choices(5);
        for _ in 0..60 {
            let (mut c, n) = (good.clone(), pick.of(&SIZES));
            let which = pick.below(c.blocks.len());
            match pick.below(8) {
                0 => c.vocab = n,
                1 => c.hidden = n,
                2 => c.blocks.truncate(n),
                3 => c.rotary.iter_mut().take(1).for_each(|rotary| rotary.dim = n),
                4 => c.max_positions = n,
                5 => c.extra_layers = n,
                6 => c.rope_length = RopeLength::Declared(n),
                7 if !c.shared.is_empty() && pick.below(2) == 0 => {
                    let plan = &mut c.shared[0];
                    let sizes =
                        [&mut plan.first, &mut plan.hidden, &mut plan.rank, &mut plan.width, &mut plan.rope.dim];
                    let heads = [&mut plan.heads.queries, &mut plan.heads.keys, &mut plan.heads.key_dim];
                    let at = pick.below(8);
                    *sizes.into_iter().chain(heads).nth(at).expect("it is one of them") = n;
                }
                _ => change(&mut c.blocks[which], n, &mut pick),
            }
            let same = c == good;
            drop(c.clone().declare(n));
            match Model::of_tensors(&c, &views, Precision::Fp32, None, &cpu) {
                Ok(model) => drop(model.forward_run(&cpu, &[&[1, 2, 3]], Run::default())),
                Err(_) => refused += usize::from(!same),
            }
        }
    }
    assert!(refused > 200, "{refused}");
    for text in
        ["", "{}", "[]", "{\"model_type\": \"llama\"}", "\u{0}", "{\"model_type\": \"phi3\", \"hidden_size\": 1e400}"]
    {
        assert!(Config::parse(text).is_err());
    }
    assert!(Audit::of(Path::new(""), |_, _| {}).is_err() && Model::read_tensors(Path::new("")).is_err());
}
