//! Implementations that are wrong in one thing on purpose, each with the check that is named for it.
//!
//! They keep the harness honest: one that misses a mutant fails its own tests. Most ask `ours/cpu` a question that is
//! slightly off, or spoil its answer; the others compute the op by the plain loops of `plain.rs`, but for one step.

use crate::memory::held_here;
use crate::models::{ModelMutant, ModelMutation};
use crate::{
    attention, chain, convolutions, delta, elements, gemm, gradients, images, plain, rows, sampling, scans, tokens,
    train,
};
use samebits_contract::axis::{PACKED, PAGED};
use samebits_contract::case::{Answer, Case};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use samebits_harness::checkpoints::Checkpoints;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_harness::implementation::{Implementation, Soaked};
use samebits_models::{Config, Probe, Tripwire};
use samebits_ops::{Cpu, Isa};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

/// A way to be wrong in one thing.
pub struct Mutation {
    /// Its name, unique among [`mutations`].
    pub name: &'static str,
    /// What is wrong, in one sentence.
    pub about: &'static str,
    /// The op that has it, in every form of it; every other op is answered as `ours/cpu` answers it.
    pub op: &'static str,
    /// The check that is named for it and must turn red: `accuracy`, `golden`, `arithmetic` or `invariance:<axis>`.
    pub caught_by: &'static str,
    /// The other checks of the op that turn red in its small cases.
    pub also_red: Others,
    pub(crate) answer: fn(&Mutant, &Case) -> Answer,
}

/// Which checks turn red in the small cases beside the one that is named for a mutation.
pub enum Others {
    /// These, and no further one.
    Are(&'static [&'static str]),
    /// Those that happen to stand behind certain calls: what is kept between calls shows wherever it is met.
    FollowTheCalls,
}

/// All mutations.
pub fn mutations() -> impl Iterator<Item = &'static Mutation> {
    let of_ops = [gemm::MUTATIONS, attention::MUTATIONS, rows::MUTATIONS, elements::MUTATIONS, tokens::MUTATIONS];
    of_ops
        .into_iter()
        .chain([
            convolutions::MUTATIONS,
            delta::MUTATIONS,
            sampling::MUTATIONS,
            scans::MUTATIONS,
            train::MUTATIONS,
            chain::MUTATIONS,
            gradients::MUTATIONS,
            images::MUTATIONS,
        ])
        .flatten()
}

/// The plain loops that mutants begin from, without a mutation: no check may turn red.
pub const PLAIN: &[Mutation] = &[
    Mutation {
        name: "plain_gemm",
        about: "A matrix product in plain loops.",
        op: "gemm",
        caught_by: "",
        also_red: Others::Are(&[]),
        answer: |_, case| plain::gemm(case, |_, products| products.sum()),
    },
    Mutation {
        name: "plain_rms_norm",
        about: "The norm in plain loops.",
        op: "rms_norm",
        caught_by: "",
        also_red: Others::Are(&[]),
        answer: |_, case| plain::rms_norm(case, |sum, n, eps| (sum / n + eps).sqrt()),
    },
    Mutation {
        name: "plain_softmax",
        about: "The softmax in plain loops.",
        op: "softmax",
        caught_by: "",
        also_red: Others::Are(&[]),
        answer: |_, case| plain::softmax(case, |of_row, _| of_row),
    },
    Mutation {
        name: "plain_forms_of_attention",
        about: "Pages and packed sequences as what they mean.",
        op: "attention",
        caught_by: "",
        also_red: Others::Are(&[]),
        answer: |mutant, case| attention::in_every_form(case, |case| mutant.honest.run(case)),
    },
    Mutation {
        name: "gradients_in_another_way",
        about: "Gradients of models in micro-batches of two, packed between padding, every layer run again.",
        op: "chain_backward",
        caught_by: "",
        also_red: Others::Are(&[]),
        answer: |mutant, case| {
            mutant.asked(case, |case| {
                let way = [("micro_batch", "2"), ("pad", "right:3"), ("pack", "1"), ("recompute", "1")];
                case.params.extend(way.map(|(name, value)| (name.to_string(), value.to_string())));
            })
        },
    },
];

/// `ours/cpu` with one [`Mutation`].
pub struct Mutant {
    name: String,
    mutation: &'static Mutation,
    pub(crate) honest: CpuImplementation,
    memory: Mutex<Memory>,
    /// Stands for what differs between two processes.
    pub(crate) process: usize,
    checkpoints: Arc<Checkpoints>,
    /// The models with a mutation of their own, once one was asked.
    models: OnceLock<CpuImplementation>,
}

/// What a mutant wrongly keeps between calls.
#[derive(Default)]
pub(crate) struct Memory {
    pub calls: usize,
    /// Calls by shape.
    pub by_shape: BTreeMap<String, usize>,
    pub question: Option<Case>,
    pub answer: Option<Answer>,
    pub kept: Vec<u8>,
}

impl Mutant {
    /// The implementation that has `mutation`, on the best instruction set and one thread.
    pub fn new(mutation: &'static Mutation, checkpoints: Arc<Checkpoints>) -> Mutant {
        let cpu = Cpu::new(Isa::best(), 1, usize::MAX).expect("the best instruction set is there");
        let honest = CpuImplementation::new(cpu).with_checkpoints(checkpoints.clone());
        let name = format!("mutant/{}", mutation.name);
        let (memory, models) = (Mutex::default(), OnceLock::new());
        Mutant { name, mutation, honest, memory, process: 0, checkpoints, models }
    }

    /// The same as another process would be: number `process`.
    pub fn in_process(self, process: usize) -> Mutant {
        Mutant { process, ..self }
    }

    /// What is kept between calls, for `take`.
    pub(crate) fn keep<T>(&self, take: impl FnOnce(&mut Memory) -> T) -> T {
        take(&mut self.memory.lock().expect("nothing panics under this lock"))
    }

    /// The number of calls before this one.
    pub(crate) fn count(&self) -> usize {
        self.keep(|memory| {
            memory.calls += 1;
            memory.calls - 1
        })
    }

    /// The answer of a model whose forward is wrong.
    pub(crate) fn model(&self, case: &Case, mutation: ModelMutation) -> Answer {
        let made = self.models.get_or_init(|| {
            let cpu = Cpu::new(Isa::best(), 1, usize::MAX).expect("the best instruction set is there");
            let make =
                move |config: &Config| -> Box<dyn Probe> { Box::new(ModelMutant::new(mutation, config, Tripwire)) };
            CpuImplementation::new(cpu).with_checkpoints(Arc::new(self.checkpoints.with_probe(Box::new(make))))
        });
        made.run(case)
    }

    /// The honest answer to a question that `change` has spoilt.
    pub(crate) fn asked(&self, case: &Case, change: impl FnOnce(&mut Case)) -> Answer {
        let mut case = case.clone();
        change(&mut case);
        self.honest.run(&case)
    }

    /// The honest answer where the second axis of these inputs goes from its last entry to its first.
    pub(crate) fn asked_backwards(&self, case: &Case, names: &[&str]) -> Answer {
        self.asked(case, |case| {
            for name in names {
                let backwards: Vec<usize> = (0..case.inputs[*name].shape()[1]).rev().collect();
                let turned = case.inputs[*name].select(1, &backwards);
                case.inputs.insert(name.to_string(), turned);
            }
        })
    }

    /// The honest answer with every float element replaced by bits that `change` makes of its bits.
    pub(crate) fn spoilt(&self, case: &Case, change: fn(u32, DType) -> u32) -> Answer {
        let mut answer = self.honest.run(case);
        for tensor in answer.outputs.values_mut().filter(|tensor| tensor.dtype() != DType::I32) {
            let dtype = tensor.dtype();
            let elements = tensor.elements();
            let element = |i: usize| change(elements.bits(i), dtype).to_le_bytes().into_iter().take(dtype.size());
            let bytes: Vec<u8> = (0..tensor.len()).flat_map(element).collect();
            *tensor = Tensor::from_bytes(dtype, tensor.shape(), &bytes).expect("the same number of elements");
        }
        answer
    }

    /// The honest answer before its last rounding, changed element by element and then rounded.
    pub(crate) fn before_last_rounding(&self, case: &Case, change: fn(f32) -> f32) -> Answer {
        let out = self.honest.run(case).outputs.values().next().map_or(case.out, Tensor::dtype);
        let mut answer = self.asked(case, |case| case.out = DType::Fp32);
        for tensor in answer.outputs.values_mut() {
            let values: Vec<f64> = tensor.to_f64().into_iter().map(|value| f64::from(change(value as f32))).collect();
            *tensor = round::tensor(out, tensor.shape(), &values);
        }
        answer
    }
}

impl Implementation for Mutant {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    fn run(&self, case: &Case) -> Answer {
        let form = [PAGED, PACKED].contains(&case.op.as_str()) && self.mutation.op == "attention";
        let mutated = case.op == self.mutation.op || form;
        let answer = if mutated { (self.mutation.answer)(self, case) } else { self.honest.run(case) };
        answer.under(&case.config)
    }

    fn fresh(&self, case: &Case) -> Option<Answer> {
        Some(Mutant::new(self.mutation, self.checkpoints.clone()).in_process(self.process + 1).run(case))
    }

    fn soak(&self, case: &Case, each: &mut Soaked) -> bool {
        let anew = Mutant::new(self.mutation, self.checkpoints.clone());
        while each(anew.run(case), &held_here) {}
        true
    }
}
