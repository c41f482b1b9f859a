//! The experts of the checkpoints in `tests/checkpoints` against those that transformers recorded beside them.
//!
//! How near logits are to those of transformers is judged by `samebits check`, op `chain`, by the bounds of the contract.

use crate::{Model, ModelError, Precision, Probe, Run, Seen};
use safetensors::SafeTensors;
use samebits_ops::Cpu;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

/// Keeps the experts of every layer, by token in ascending order.
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

/// Both recorded runs agree on every expert, so a difference of logits is one of rounding and not of another choice.
pub(crate) fn experts_are_those_that_transformers_chose() {
    for name in ["mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3"] {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name);
        let file = fs::read(dir.join("reference.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let ints = |name: &str| -> Vec<i32> {
            let data = tensors.tensor(name).unwrap().data();
            data.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
        };
        let (tokens, recorded) = (ints("tokens"), ints("routing"));
        let length = tensors.tensor("tokens").unwrap().shape()[1];
        let sequences: Vec<&[i32]> = tokens.chunks_exact(length).collect();
        for precision in [Precision::Bf16, Precision::Fp32] {
            let mut routing = Routing::default();
            let run = Run { probe: Some(&mut routing), ..Run::default() };
            Model::load(&dir, precision, &Cpu::best()).unwrap().forward_run(&Cpu::best(), &sequences, run).unwrap();
            let chosen: Vec<i32> = routing.0.into_values().flatten().collect();
            assert_eq!(chosen, recorded, "{name} {}: other experts", precision.name());
        }
    }
}
