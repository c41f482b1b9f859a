//! Logits of the checkpoints in `tests/checkpoints` against those that transformers recorded beside them.

use crate::{Model, ModelError, Precision, Probe, Run, Seen};
use safetensors::SafeTensors;
use samebits_ops::{Cpu, bf16, f16};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

/// The bounds of the contract's chain rows, which are their source: what they say there must stand here.
mod bounds {
    /// RMS error of the bf16 chain over that of transformers' bf16 run.
    pub const BF16_RMS: f64 = 1.0;
    /// Largest error of the bf16 chain over that of transformers' bf16 run.
    pub const BF16_MAX: f64 = 1.25;
    /// Largest error of the fp32 chain over the largest logit.
    pub const FP32_MAX: f64 = 1e-4;
}

/// Checkpoints, and the precision of the run that is recorded beside the one in fp32.
const CHECKPOINTS: [(&str, Precision); 17] = [
    ("qwen3-adder", Precision::Bf16),
    ("qwen2", Precision::Bf16),
    ("llama", Precision::Bf16),
    ("llama3", Precision::Bf16),
    ("llama-linear", Precision::Fp16),
    ("llama-dynamic", Precision::Bf16),
    ("qwen2-yarn", Precision::Bf16),
    ("qwen3", Precision::Bf16),
    ("mistral", Precision::Bf16),
    ("gemma2", Precision::Bf16),
    ("phi3", Precision::Bf16),
    ("phi3-short", Precision::Bf16),
    ("phi3-partial", Precision::Bf16),
    ("mixtral", Precision::Bf16),
    ("qwen3-moe", Precision::Bf16),
    ("deepseek-v2", Precision::Bf16),
    ("deepseek-v3", Precision::Bf16),
];

struct Reference {
    dir: PathBuf,
    batch: usize,
    tokens: Vec<i32>,
    fp32: Vec<f32>,
    narrow: Vec<f32>,
    /// Experts by layer and token in the fp32 run, ascending.
    routing: Option<Vec<i32>>,
}

fn reference(name: &str, precision: Precision) -> Reference {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name);
    let file = fs::read(dir.join("reference.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let words = |name: &str| -> Option<Vec<[u8; 4]>> {
        Some(tensors.tensor(name).ok()?.data().chunks_exact(4).map(|b| b.try_into().unwrap()).collect())
    };
    let ints = |name: &str| words(name).map(|words| words.into_iter().map(i32::from_le_bytes).collect::<Vec<_>>());
    let narrow = tensors.tensor(&format!("logits.{}", precision.name())).unwrap();
    let narrow = narrow.data().chunks_exact(2).map(|b| match precision {
        Precision::Fp16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
        _ => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
    });
    Reference {
        dir,
        batch: tensors.tensor("tokens").unwrap().shape()[0],
        tokens: ints("tokens").unwrap(),
        fp32: words("logits.fp32").unwrap().into_iter().map(f32::from_le_bytes).collect(),
        narrow: narrow.collect(),
        routing: ints("routing"),
    }
}

/// Keeps the experts of every layer.
#[derive(Default)]
struct Routing(BTreeMap<usize, Vec<i32>>);

impl Probe for Routing {
    fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
        if let ("experts", Some(layer)) = (seen.site, seen.layer) {
            for experts in seen.values.chunks(seen.values.len() / seen.tokens.len()) {
                let mut experts: Vec<i32> = experts.iter().map(|&e| e as i32).collect();
                experts.sort_unstable();
                self.0.entry(layer).or_default().extend(experts);
            }
        }
        Ok(())
    }
}

impl Reference {
    /// RMS and largest error of `logits`.
    fn errors(&self, logits: &[f32]) -> (f64, f64) {
        assert_eq!(logits.len(), self.fp32.len());
        let errors = logits.iter().zip(&self.fp32).map(|(a, b)| f64::from((a - b).abs()));
        let rms = (errors.clone().map(|e| e * e).sum::<f64>() / logits.len() as f64).sqrt();
        // `max` would swallow a NaN.
        (rms, errors.fold(0.0, |a, b| if b <= a { a } else { b }))
    }

    /// Logits, and the experts as they are recorded.
    fn run(&self, model: &Model) -> (Vec<f32>, Vec<i32>) {
        let mut routing = Routing::default();
        let sequences: Vec<&[i32]> = self.tokens.chunks_exact(self.tokens.len() / self.batch).collect();
        let run = Run { probe: Some(&mut routing), ..Run::default() };
        let logits = model.forward_run(&Cpu::best(), &sequences, run).unwrap();
        (logits, routing.0.into_values().flatten().collect())
    }
}

#[test]
fn a_narrow_forward_is_at_least_as_accurate_as_that_of_transformers() {
    for (name, precision) in CHECKPOINTS {
        let reference = reference(name, precision);
        let (logits, routing) = reference.run(&Model::load(&reference.dir, precision, &Cpu::best()).unwrap());
        // The recorded runs agree on every expert, so an error is one of rounding and not of another choice.
        assert_eq!(routing, reference.routing.clone().unwrap_or_default(), "{name}: other experts");
        let (rms, max) = reference.errors(&logits);
        let (their_rms, their_max) = reference.errors(&reference.narrow);
        println!("{name}: rms {rms:.3e} of {their_rms:.3e}, max {max:.3e} of {their_max:.3e}");
        assert!(rms <= bounds::BF16_RMS * their_rms, "{name}: rms {rms}, theirs {their_rms}");
        assert!(max <= bounds::BF16_MAX * their_max, "{name}: max {max}, theirs {their_max}");
    }
}

#[test]
fn fp32_is_that_of_transformers() {
    for (name, precision) in CHECKPOINTS {
        let reference = reference(name, precision);
        let (logits, routing) = reference.run(&Model::load(&reference.dir, Precision::Fp32, &Cpu::best()).unwrap());
        assert_eq!(routing, reference.routing.clone().unwrap_or_default(), "{name}: other experts");
        let (_, max) = reference.errors(&logits);
        let largest = reference.fp32.iter().fold(0.0, |a, b| b.abs().max(a));
        println!("{name}: max {max:.3e}, {:.3e} of the largest logit", max / f64::from(largest));
        assert!(max <= bounds::FP32_MAX * f64::from(largest), "{name}: max {max}, largest logit {largest}");
    }
}
