//! Random calls of any op, for [proptest](https://docs.rs/proptest): shapes, optional inputs, attributes and integers that
//! the op's form admits.
//!
//! ```
//! use proptest::prelude::*;
//! use samebits_judge::{DType, Gate, strategies};
//!
//! proptest!(|(case in strategies::calls("add", DType::Fp32, DType::Fp32))| {
//!     let gate = Gate::new("mine", "add", |call| {
//!         let (a, b): (&[f32], &[f32]) = (call.input("a"), call.input("b"));
//!         call.output("y").iter_mut().zip(a.iter().zip(b)).for_each(|(y, (a, b))| *y = a + b);
//!     });
//!     prop_assert!(!gate.judge(&case).is_red(), "{:?}", gate.judge(&case));
//! });
//! ```

use half::{bf16, f16};
use proptest::prelude::{Strategy, any};
use samebits_contract::case::{Case, Config};
use samebits_contract::spec::{self, Class};
use samebits_contract::tensor::{DType, Tensor};
use samebits_schema::sample::{Random, Sample, integers, sample};

/// Calls of `op` with inputs of `dtype` and outputs of `out`. Extents are 1 to 6, now and then up to 128; floats are about
/// normally distributed. Attributes other than the defaults are among them: what a gate does not offer of those is
/// `unsupported`, which is not red.
///
/// # Panics
/// For an op that there is not, that is a whole model, or that does not have these dtypes.
pub fn calls(op: &str, dtype: DType, out: DType) -> impl Strategy<Value = Case> + use<> {
    let known = spec::all().iter().filter(|spec| spec.class != Class::Chain);
    let Some(spec) = known.clone().find(|spec| spec.name == op) else {
        panic!("op `{op}`: use one of {}", known.map(|spec| spec.name).collect::<Vec<_>>().join(", "))
    };
    let has = spec.dtypes().contains(&dtype) && spec.outs().contains(&out);
    assert!(has, "{op} has no calls of {dtype} -> {out}");
    // A shorter call is another one: nothing of a seed can be made smaller.
    any::<u64>().no_shrink().prop_map(move |seed| {
        let mut random = Random::new(seed);
        for _ in 0..100_000 {
            let Sample { inputs, attributes, call } = sample(spec.op, &mut random);
            let fits = |input: &(&str, DType, Vec<usize>)| {
                let form = spec.input(input.0).expect("an input of the op");
                !form.is_float() || input.1 == form.dtype_beside(dtype)
            };
            if call.out != out || !inputs.iter().all(fits) {
                continue;
            }
            let tensors = inputs.into_iter().map(|(name, dtype, shape)| {
                let holds = spec.input(name).expect("an input of the op").holds;
                (
                    name.to_string(),
                    tensor(dtype, &shape, |len, random| integers(&call, holds, len, random), &mut random),
                )
            });
            let inputs = tensors.collect();
            let case = Case {
                name: format!("{}/{seed}", spec.name),
                op: spec.name.to_string(),
                out,
                params: attributes,
                inputs,
                config: Config::default(),
            };
            // The contract judges no call without rows or elements.
            if spec.validate(&case).is_ok() {
                return case;
            }
        }
        panic!("{}: no draw is a call of {dtype} -> {out}", spec.name)
    })
}

fn tensor(
    dtype: DType,
    shape: &[usize],
    integers: impl Fn(usize, &mut Random) -> Vec<i32>,
    random: &mut Random,
) -> Tensor {
    let len = shape.iter().product();
    // Twelve uniform numbers have a sum of variance 1.
    let normal = |random: &mut Random| -> f32 {
        (0..12).map(|_| random.below(1 << 20) as f32 / (1 << 20) as f32).sum::<f32>() - 6.0
    };
    let mut floats = || (0..len).map(|_| normal(random)).collect::<Vec<f32>>();
    match dtype {
        DType::Bf16 => Tensor::bf16(shape, floats().into_iter().map(bf16::from_f32).collect()),
        DType::Fp16 => Tensor::fp16(shape, floats().into_iter().map(f16::from_f32).collect()),
        DType::Fp32 => Tensor::fp32(shape, floats()),
        DType::I32 => Tensor::i32(shape, integers(len, random)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    /// Every op has calls of every pair of dtypes, and its oracle answers them.
    #[test]
    fn every_op_has_calls() {
        let mut runner = TestRunner::deterministic();
        for spec in spec::all().iter().filter(|spec| spec.class != Class::Chain) {
            for (&dtype, &out) in spec.dtypes().iter().flat_map(|dtype| spec.outs().iter().map(move |out| (dtype, out)))
            {
                let strategy = calls(spec.name, dtype, out);
                for _ in 0..8 {
                    let case = strategy.new_tree(&mut runner).unwrap().current();
                    assert_eq!((spec.dtype(&case), case.out), (Some(dtype), out), "{}", spec.name);
                    assert!(spec.oracle(&case).is_ok(), "{}", spec.name);
                }
            }
        }
    }
}
