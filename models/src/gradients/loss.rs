//! What is made of log-probabilities and entropies: what each sequence adds to the loss, and its gradients.

use super::{Batch, Loss};
use crate::memory::buffer;
use crate::trace::all_finite;
use crate::{ModelError, Sampled};
use samebits_ops::{Attributes, Backend, Cpu, Tensor, TensorMut, TensorRef};
use std::ops::Range;

/// What each of some sequences adds to the loss, and its gradient by the log-probability of each token.
pub(super) fn loss(
    cpu: &Cpu,
    batch: &Batch,
    part: Range<usize>,
    logprob: &[Vec<f32>],
    denominator: f64,
) -> Result<(Vec<f32>, Vec<Vec<f32>>), ModelError> {
    let longest = logprob.iter().map(Vec::len).max().unwrap_or(0);
    let shape = [logprob.len(), longest];
    let (count, logprobs) = (rectangle(&batch.count[part.clone()], longest), rectangle(logprob, longest));
    let mut inputs = vec![("logprob", TensorRef::new(&logprobs, &shape)?), ("count", TensorRef::new(&count, &shape)?)];
    let mut attributes = Attributes::new().with("denominator", denominator);
    let old;
    let op = match batch.loss {
        Loss::Nll => "nll",
        Loss::Policy { advantages, old_logprob, low, high, .. } => {
            old = rectangle(&old_logprob[part.clone()], longest);
            inputs.push(("old_logprob", TensorRef::new(&old, &shape)?));
            inputs.push(("advantage", TensorRef::new(&advantages[part], &shape[..1])?));
            attributes = attributes.with("low", low).with("high", high);
            "policy_loss"
        }
    };
    let (mut per_sequence, mut dlogprob) = (Tensor::new(vec![0f32; shape[0]], &shape[..1])?, buffer::<f32>(&shape)?);
    let outputs = [("per_sequence", per_sequence.view_mut()), ("dlogprob", TensorMut::new(&mut dlogprob, &shape)?)];
    cpu.call(op, attributes, &inputs, outputs.into())?;
    let rows = dlogprob.chunks(longest.max(1)).zip(logprob).map(|(row, logprob)| row[..logprob.len()].to_vec());
    Ok((per_sequence.into_vec().expect("it is f32, and on the host"), rows.collect()))
}

/// What entropies of tokens add to what each of some sequences adds to the loss, and the gradient by each entropy: `nll` of
/// them in the place of log-probabilities, times the coefficient.
pub(super) fn entropy_term(
    cpu: &Cpu,
    batch: &Batch,
    part: Range<usize>,
    entropy: &[Vec<f32>],
    denominator: f64,
) -> Result<(Vec<f32>, Vec<Vec<f32>>), ModelError> {
    let factor = Attributes::new().with("factor", batch.loss.entropy());
    let mean = Batch { loss: Loss::Nll, ..*batch };
    let (per_sequence, gradients) = loss(cpu, &mean, part, entropy, denominator)?;
    let scaled = |x: Vec<f32>| -> Result<Vec<f32>, ModelError> {
        let (n, mut y) = ([x.len()], buffer::<f32>(&[x.len()])?);
        let (inputs, outputs) = ([("x", TensorRef::new(&x, &n)?)], vec![("y", TensorMut::new(&mut y, &n)?)]);
        cpu.call("scale", factor.clone(), &inputs, outputs)?;
        Ok(y)
    };
    Ok((scaled(per_sequence)?, gradients.into_iter().map(scaled).collect::<Result<_, _>>()?))
}

/// Rows of `width` elements; 0 behind those that are shorter.
fn rectangle<T: Copy + Default>(rows: &[Vec<T>], width: usize) -> Vec<T> {
    let filled = |row: &Vec<T>| -> Vec<T> { (0..width).map(|i| row.get(i).copied().unwrap_or_default()).collect() };
    rows.iter().flat_map(filled).collect()
}

/// Refuses a loss of finite log-probabilities that is not finite.
pub(super) fn check_loss(
    batch: &Batch,
    first: usize,
    logprob: &[Vec<f32>],
    per_sequence: &[f32],
    dlogprob: &[Vec<f32>],
) -> Result<(), ModelError> {
    for (b, logprob) in logprob.iter().enumerate().filter(|(_, logprob)| all_finite(logprob)) {
        if per_sequence[b].is_finite() && all_finite(&dlogprob[b]) {
            continue;
        }
        // Where no token's gradient is, the sum of all tokens is not.
        let token = dlogprob[b].iter().position(|slope| !slope.is_finite()).unwrap_or(0);
        let (place, sequence, new) = ("op policy_loss".to_string(), first + b, logprob[token]);
        let why = match batch.loss {
            Loss::Policy { old_logprob, .. } if token > 0 => {
                let old = old_logprob[sequence][token];
                format!(
                    "the ratio exp({new} - {old}) leaves f32: look whether old_logprob is of this model and these tokens"
                )
            }
            _ => "the sum of its tokens leaves f32".into(),
        };
        return Err(ModelError::NotFinite { place, sequence, token, why });
    }
    Ok(())
}

/// Lets the op judge the limits of ratios, of which it is told only behind a forward.
pub(super) fn check_clip(cpu: &Cpu, low: f64, high: f64) -> Result<(), ModelError> {
    let (zeros, shape) = ([0f32], [1, 1]);
    let value = || TensorRef::new(&zeros, &shape);
    let advantage = TensorRef::new(&zeros, &shape[..1])?;
    let inputs = [
        ("logprob", value()?),
        ("old_logprob", value()?),
        ("advantage", advantage),
        ("count", TensorRef::new(&[0i32], &shape)?),
    ];
    let (mut per_sequence, mut dlogprob) = ([0f32], [0f32]);
    let outputs = vec![
        ("per_sequence", TensorMut::new(&mut per_sequence, &shape[..1])?),
        ("dlogprob", TensorMut::new(&mut dlogprob, &shape)?),
    ];
    Ok(cpu.call("policy_loss", Attributes::new().with("low", low).with("high", high), &inputs, outputs)?)
}

/// Refuses tokens that should have a probability and that their rules leave out: these did not sample them, or other weights did.
pub(super) fn check_drawn(
    sampled: Sampled,
    first: usize,
    logprob: &[Vec<f32>],
    counts: impl Fn(usize, usize) -> bool,
) -> Result<(), ModelError> {
    let Sampled::By(rules) = sampled else { return Ok(()) };
    for (b, (ruled, logprob)) in rules.iter().zip(logprob).enumerate() {
        let left_out = |t: &usize| logprob[*t] == f32::NEG_INFINITY && counts(b, *t);
        if let Some(t) = (ruled.prompt..logprob.len()).find(left_out) {
            let (b, settings) = (first + b, serde_json::Value::from(ruled.rule.json()));
            let why = format!(
                "{settings} leave out token {t} of sequence {b}, so it has no log-probability: other settings sampled it, or other \
                 weights; give those, or do not count it"
            );
            return Err(ModelError::input("sampling", why));
        }
    }
    Ok(())
}
