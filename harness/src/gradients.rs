//! Gradients of the models that cases name.

use crate::checkpoints::{Checkpoints, Failure};
use samebits_contract::case::Case;
use samebits_contract::tensor::Tensor;
use samebits_models::{Batch, GradientRun, Loss, ModelError, Precision, Probe, Sampled};
use samebits_ops::Cpu;
use samebits_schema::Call;
use std::collections::BTreeMap;

impl Checkpoints {
    /// Answers a case of `chain_backward` of a decoder, which `call` has the form of.
    pub(crate) fn gradients(&self, cpu: &Cpu, case: &Case, call: &Call) -> Result<BTreeMap<String, Tensor>, Failure> {
        let precision: Precision = call.word("dtype").parse()?;
        let model = self.model(call.word("model"), precision, cpu, None)?;
        let (batch, len) = (call.dim("B"), call.dim("T"));
        let ints = |name: &str| case.inputs.get(name).and_then(Tensor::as_i32);
        let floats = |name: &str| -> Vec<f32> {
            case.inputs.get(name).map_or(Vec::new(), |tensor| tensor.to_f64().into_iter().map(|v| v as f32).collect())
        };
        let lengths: Vec<usize> = match ints("length") {
            Some(lengths) => lengths.iter().map(|&length| length as usize).collect(),
            None => vec![len; batch],
        };
        let (all, count) = (ints("tokens").unwrap_or_default(), ints("count").unwrap_or_default());
        let behind = |place: &usize| count[*place] != 0 && place % len >= lengths[place / len];
        if let Some(place) = (0..count.len()).find(behind) {
            let at = [place / len, place % len];
            return Err(format!("input `count`: element {at:?} counts a token behind the sequence's length").into());
        }
        let count: Vec<i32> = count.iter().map(|&c| i32::from(c != 0)).collect();
        let (tokens, count) = (rows(all, len, &lengths), rows(&count, len, &lengths));
        let (advantages, old_logprob) = (floats("advantage"), rows(&floats("old_logprob"), len, &lengths));
        let loss = match call.word("loss") {
            "policy" => Loss::Policy {
                advantages: &advantages,
                old_logprob: &old_logprob,
                low: call.float("low"),
                high: call.float("high"),
                entropy: call.float("entropy"),
            },
            _ => Loss::Nll,
        };
        let (sampled, groups) = (Sampled::At(1.0), call.count("groups"));
        let sequences = Batch { sequences: &tokens, count: &count, loss, sampled, groups };
        let mut probe = self.probe_of_gradients(model.config());
        let probe = probe.as_mut().map(|probe| &mut **probe as &mut dyn Probe);
        let found = model.gradients(cpu, &sequences, &run_of(call)?, probe, |_| {})?;
        let mut gradients = Vec::new();
        for (name, gradient) in &found.parameters {
            let values = gradient.as_slice::<f32>().expect("gradients are f32, and on the host");
            if let Some(i) = values.iter().position(|value| !value.is_finite()) {
                return Err(format!("the gradient of {name}: element {i} is {}", values[i]).into());
            }
            gradients.extend_from_slice(values);
        }
        let mut logprob = found.logprob;
        logprob.iter_mut().for_each(|row| row.resize(len, 0.0));
        Ok(BTreeMap::from([
            ("gradients".to_string(), Tensor::fp32(&[gradients.len()], gradients)),
            ("loss".to_string(), Tensor::fp32(&[1], vec![found.loss])),
            ("per_sequence".to_string(), Tensor::fp32(&[batch], found.per_sequence)),
            ("logprob".to_string(), Tensor::fp32(&[batch, len], logprob.concat())),
        ]))
    }
}

/// How a call of `chain_backward` is to be run.
fn run_of(call: &Call) -> Result<GradientRun, ModelError> {
    Ok(GradientRun {
        micro_batch: call.count("micro_batch"),
        padding: call.word("pad").parse()?,
        pack: call.flag("pack"),
        ranks: call.count("ranks"),
        recompute: call.flag("recompute"),
        // What comes out is looked at here, in the words of the case.
        allow_nonfinite: true,
    })
}

/// The first elements of every row of `len`, as many as its sequence is long.
fn rows<T: Copy>(values: &[T], len: usize, lengths: &[usize]) -> Vec<Vec<T>> {
    values.chunks(len.max(1)).zip(lengths).map(|(row, &length)| row[..length].to_vec()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use samebits_contract::spec::check_form;
    use samebits_models::Padding;

    /// What no bit of an answer shows: that a case is run as it says.
    #[test]
    fn a_case_is_run_as_it_says() {
        let run = |params: &[(&str, &str)]| {
            let mut case = samebits_contract::table::Contract::load(None)
                .unwrap()
                .case("chain_backward/bf16/ragged-normal-fp32")
                .unwrap()
                .build();
            case.params.extend(params.iter().map(|(name, value)| (name.to_string(), value.to_string())));
            let GradientRun { micro_batch, padding, pack, ranks, recompute, .. } =
                run_of(&check_form(&case).unwrap()).unwrap();
            (micro_batch, padding, pack, ranks, recompute)
        };
        assert_eq!(run(&[]), (1, Padding::None, false, 1, false));
        assert_eq!(run(&[("micro_batch", "3"), ("pad", "left:2")]), (3, Padding::Left(2), false, 1, false));
        assert_eq!(run(&[("pack", "1"), ("pad", "right:4")]), (1, Padding::Right(4), true, 1, false));
        assert_eq!(run(&[("recompute", "1"), ("groups", "4"), ("ranks", "2")]), (1, Padding::None, false, 2, true));
    }
}
