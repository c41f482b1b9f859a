//! Logits of the checkpoints in `tests/checkpoints` against those that transformers recorded beside them.

use crate::config::Config;
use crate::decoder::{Decoder, Rows};
use crate::weights::Weights;
use half::bf16;
use safetensors::SafeTensors;
use samebits_ops::{Cpu, Element};
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

const CHECKPOINTS: [&str; 3] = ["qwen3-adder", "qwen2", "llama"];

struct Reference {
    dir: PathBuf,
    batch: usize,
    tokens: Vec<i32>,
    fp32: Vec<f32>,
    bf16: Vec<f32>,
}

fn reference(name: &str) -> Reference {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name);
    let file = fs::read(dir.join("reference.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let tensor = |name: &str| tensors.tensor(name).unwrap();
    let words = |name: &str| tensor(name).data().chunks_exact(4).map(|b| b.try_into().unwrap()).collect::<Vec<_>>();
    let halves = tensor("logits.bf16").data().chunks_exact(2).map(|b| b.try_into().unwrap()).collect::<Vec<_>>();
    Reference {
        dir,
        batch: tensor("tokens").shape()[0],
        tokens: words("tokens").into_iter().map(i32::from_le_bytes).collect(),
        fp32: words("logits.fp32").into_iter().map(f32::from_le_bytes).collect(),
        bf16: halves.into_iter().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
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

    fn decoder<A: Element>(&self, cpu: &Cpu) -> Decoder<A> {
        Decoder::load(&Config::load(&self.dir).unwrap(), Weights::open(&self.dir).unwrap(), cpu).unwrap()
    }

    fn logits<A: Element>(&self, cpu: &Cpu, decoder: &Decoder<A>) -> Vec<f32> {
        let mut cache = decoder.cache(self.batch, self.tokens.len() / self.batch).unwrap();
        decoder.forward(cpu, &self.tokens, &mut cache, Rows::All).unwrap()
    }
}

#[test]
fn bf16_is_at_least_as_accurate_as_transformers() {
    let cpu = Cpu::best();
    for name in CHECKPOINTS {
        let reference = reference(name);
        let (rms, max) = reference.errors(&reference.logits(&cpu, &reference.decoder::<bf16>(&cpu)));
        let (their_rms, their_max) = reference.errors(&reference.bf16);
        println!("{name}: rms {rms:.3e} of {their_rms:.3e}, max {max:.3e} of {their_max:.3e}");
        assert!(rms <= bounds::BF16_RMS * their_rms, "{name}: rms {rms}, theirs {their_rms}");
        assert!(max <= bounds::BF16_MAX * their_max, "{name}: max {max}, theirs {their_max}");
    }
}

/// qwen2 and llama were recorded by models that had been cast to bf16 as a whole, which rounds the rotary frequencies
/// too, and back. A model loaded from the folder has them in f32, so their fp32 logits are off by 2e-3 of the largest
/// logit. With frequencies rounded the same way, everything else must agree.
#[test]
fn fp32_is_that_of_transformers() {
    let cpu = Cpu::best();
    for name in CHECKPOINTS {
        let reference = reference(name);
        let mut decoder = reference.decoder::<f32>(&cpu);
        if name != "qwen3-adder" {
            for frequency in &mut decoder.inv_freq {
                *frequency = bf16::from_f32(*frequency).to_f32();
            }
        }
        let (_, max) = reference.errors(&reference.logits(&cpu, &decoder));
        let largest = reference.fp32.iter().fold(0.0, |a, b| b.abs().max(a));
        println!("{name}: max {max:.3e}, {:.3e} of the largest logit", max / f64::from(largest));
        assert!(max <= bounds::FP32_MAX * f64::from(largest), "{name}: max {max}, largest logit {largest}");
    }
}
