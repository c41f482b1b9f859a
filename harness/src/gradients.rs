//! Gradients of the models that cases name: what is recorded of them, and the answers of our own.

use crate::checkpoints::{Checkpoints, Failure};
use samebits_contract::case::Case;
use samebits_contract::gradients::{Recorded, inputs};
use samebits_contract::table::CaseSpec;
use samebits_contract::tensor::Tensor;
use samebits_contract::wire::File;
use samebits_models::{Batch, GradientRun, Loss, ModelError, Precision, Probe};
use samebits_ops::Cpu;
use samebits_schema::Call;
use std::collections::BTreeMap;

impl Checkpoints {
    /// What is recorded for a model, in the folder `gradients` beside the checkpoints.
    fn gradients_file(&self, spec: &CaseSpec) -> Result<File, String> {
        let model = &spec.params["model"];
        let folder = self.folder(model)?;
        let beside = folder.parent().ok_or("the checkpoint has no folder above it")?;
        let path = beside.with_file_name("gradients").join(format!("{model}.safetensors"));
        let bytes = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        File::decode(&bytes).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// The inputs of every recorded batch; the first is that of the case.
    ///
    /// # Errors
    /// What is missing, in one line.
    pub fn batches(&self, spec: &CaseSpec) -> Result<Vec<BTreeMap<String, Tensor>>, String> {
        inputs(&self.gradients_file(spec)?, loss_of(&spec.params))
            .map_err(|why| format!("gradients/{}.safetensors: {why}", spec.params["model"]))
    }

    /// The recorded gradients that `spec` is held to.
    ///
    /// # Errors
    /// What is missing or does not fit the model, in one line.
    pub fn recorded_gradients(&self, spec: &CaseSpec) -> Result<Recorded, String> {
        let model = &spec.params["model"];
        let path = self.folder(model)?.join("model.safetensors");
        let wrong = |why: String| format!("{}: {why}", path.display());
        let bytes = std::fs::read(&path).map_err(|e| wrong(e.to_string()))?;
        let file = File::decode(&bytes).map_err(|e| wrong(e.to_string()))?;
        let elements = file.tensors.into_iter().map(|(name, tensor)| (name, tensor.len())).collect();
        Recorded::of(self.gradients_file(spec)?, loss_of(&spec.params), &elements)
            .map_err(|why| format!("gradients/{model}.safetensors: {why}"))
    }

    /// Answers a case of `chain_backward`, which `call` has the form of.
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
        let sequences = Batch { sequences: &tokens, count: &count, loss, groups: call.count("groups") };
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
    })
}

/// The first elements of every row of `len`, as many as its sequence is long.
fn rows<T: Copy>(values: &[T], len: usize, lengths: &[usize]) -> Vec<Vec<T>> {
    values.chunks(len.max(1)).zip(lengths).map(|(row, &length)| row[..length].to_vec()).collect()
}

/// The loss of a case, by the name under which it is recorded.
fn loss_of(params: &BTreeMap<String, String>) -> &str {
    match params.get("loss").map_or("nll", String::as_str) {
        "policy" if params.contains_key("entropy") => "policy_entropy",
        loss => loss,
    }
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
            let GradientRun { micro_batch, padding, pack, ranks, recompute } =
                run_of(&check_form(&case).unwrap()).unwrap();
            (micro_batch, padding, pack, ranks, recompute)
        };
        assert_eq!(run(&[]), (1, Padding::None, false, 1, false));
        assert_eq!(run(&[("micro_batch", "3"), ("pad", "left:2")]), (3, Padding::Left(2), false, 1, false));
        assert_eq!(run(&[("pack", "1"), ("pad", "right:4")]), (1, Padding::Right(4), true, 1, false));
        assert_eq!(run(&[("recompute", "1"), ("groups", "4"), ("ranks", "2")]), (1, Padding::None, false, 2, true));
    }
}
