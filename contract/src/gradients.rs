//! Gradients of whole models against those that torch computed for the same sequences.
//!
//! Recorded are batches of sequences, and for each of them the fp32 gradient of every parameter and how far torch's own
//! bf16 is from it (`goldens/generate/gradients.py`). A large gradient is recorded as a sketch: inner
//! products with vectors of +1 and -1. A sketch is linear, and the mean of its squares estimates a squared length.
//! One error of one vector is a single draw, which may be long or short by chance: errors are root mean squares over all
//! batches.

use crate::compare::whole;
use crate::tensor::Tensor;
use crate::verdict::Evidence;
use crate::wire::File;
use samebits_schema::Op;
use std::collections::BTreeMap;

/// How many vectors a gradient is sketched with, and up to how many elements it is recorded whole.
const SKETCH: usize = 16;
const WHOLE: usize = 160;

/// The output that is the gradient of every parameter; what the others are held to stands beside the parameters.
const GRADIENTS: &str = "gradients";

/// Inputs that are recorded under another name.
const RECORDED_AS: [(&str, &str); 2] = [("count", "mask"), ("advantage", "advantages")];

/// Limits on the gradients of a whole model; an absent limit is not asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GradientBound {
    /// Error of the gradient of a parameter as a share of its length.
    pub error_of_length: Option<f64>,
    /// The same as a multiple of the error of torch's own bf16 run.
    pub error_of_recorded: Option<f64>,
    /// That where the gradient is recorded as a sketch, which estimates the error.
    pub sketch_of_recorded: Option<f64>,
    /// Largest difference of the log-probability of a token.
    pub max_dlogp: Option<f64>,
    /// Largest difference of the loss, or of what a sequence adds to it, as a share of that or of 1.
    pub max_dloss: Option<f64>,
}

/// Errors of the gradients of a whole model, the largest of any parameter.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GradientMeasure {
    /// Parameters compared.
    pub parameters: usize,
    /// Batches that were asked.
    pub batches: usize,
    /// Error as a share of the gradient's length.
    pub error_of_length: f64,
    /// Error as a multiple of that of torch's bf16 run, where gradients are recorded whole.
    pub error_of_recorded: f64,
    /// The same where they are sketched.
    pub sketch_of_recorded: f64,
    /// Largest difference of the log-probability of a token.
    pub max_dlogp: f64,
    /// Largest difference of the loss or of what a sequence adds to it, as a share of that or of 1.
    pub max_dloss: f64,
}

/// The recorded gradients of one model by one loss.
pub struct Recorded {
    batches: usize,
    parameters: Vec<Parameter>,
    /// What the program gives beside them, of all batches: loss, sums by sequence and log-probabilities.
    values: Vec<(&'static str, Tensor)>,
}

/// A recorded gradient: a row for each batch, and behind it its length and the length of torch's bf16 error.
struct Parameter {
    name: String,
    elements: usize,
    kept: Tensor,
}

/// How many batches a file has.
///
/// # Errors
/// No recorded gradients in it.
fn batches(file: &File) -> Result<usize, String> {
    let losses = file.tensors.get("nll.loss").ok_or("tensor `nll.loss` is missing")?;
    Ok(losses.len().max(1))
}

/// The inputs of every batch of a file, as the program `op` declares them: those that it needs, and of the others the floats
/// where the loss is a policy's, which reads them.
///
/// # Errors
/// What the file lacks.
pub fn inputs(op: &Op, file: &File, loss: &str) -> Result<Vec<BTreeMap<String, Tensor>>, String> {
    let batches = batches(file)?;
    let mut all = vec![BTreeMap::new(); batches];
    for input in op.inputs.iter().filter(|input| !input.optional || input.is_float() && loss.starts_with("policy")) {
        let stored = RECORDED_AS.iter().find(|(name, _)| *name == input.name).map_or(input.name, |(_, stored)| stored);
        let tensor = file.tensors.get(stored).ok_or_else(|| format!("tensor `{stored}` is missing"))?;
        let rows = tensor.shape().first().map_or(0, |rows| rows / batches);
        for (number, inputs) in all.iter_mut().enumerate() {
            inputs.insert(input.name.to_string(), tensor.range(0, number * rows, (number + 1) * rows));
        }
    }
    Ok(all)
}

impl Recorded {
    /// What `file` holds of `loss` for the program `op`, where `elements` has how many elements the tensors of the model have.
    ///
    /// # Errors
    /// What does not fit, in one line.
    pub fn of(op: &Op, mut file: File, loss: &str, elements: &BTreeMap<String, usize>) -> Result<Recorded, String> {
        let batches = batches(&file)?;
        let prefix = format!("{loss}.");
        let names: Vec<String> =
            file.tensors.keys().filter_map(|key| key.strip_prefix(&prefix)).map(String::from).collect();
        let mut take = |name: &str| file.tensors.remove(&format!("{prefix}{name}"));
        let mut values: Vec<(&str, Tensor)> = Vec::new();
        for name in op.outputs.iter().map(|output| output.name).filter(|name| *name != GRADIENTS) {
            values.push((name, take(name).ok_or_else(|| format!("tensor `{prefix}{name}` is missing"))?));
        }
        let mut parameters = Vec::new();
        for name in names.into_iter().filter(|name| !values.iter().any(|(value, _)| value == name)) {
            let kept = take(&name).expect("it was listed");
            let elements = *elements.get(&name).ok_or_else(|| format!("`{name}`: the model has no such tensor"))?;
            let width = if elements > WHOLE { SKETCH } else { elements };
            if kept.shape() != [batches, width + 2] {
                return Err(format!(
                    "tensor `{prefix}{name}`: shape {:?} must be {:?}",
                    kept.shape(),
                    [batches, width + 2]
                ));
            }
            parameters.push(Parameter { name, elements, kept });
        }
        Ok(Recorded { batches, parameters, values })
    }

    /// The measure of the outputs of every batch, from the first on, and what of it is beyond `bound`.
    pub fn measure(
        &self,
        answers: &[&BTreeMap<String, Tensor>],
        bound: &GradientBound,
    ) -> Result<GradientMeasure, (Box<Evidence>, GradientMeasure)> {
        let mut measure = GradientMeasure { batches: answers.len(), ..GradientMeasure::default() };
        let mut evidence = None;
        let mut note = |message: String, expected: String, found: f64, output: &str| {
            let found = format!("{found:.3e}");
            evidence.get_or_insert_with(|| Box::new(Evidence { expected, found, ..*whole(output, message) }));
        };
        let elements: usize = self.parameters.iter().map(|parameter| parameter.elements).sum();
        for (number, outputs) in answers.iter().enumerate() {
            let found = &outputs[GRADIENTS];
            if found.shape() != [elements] {
                let message = format!("gradients: shape {:?}; the parameters have {elements} elements", found.shape());
                return Err((whole("gradients", message), measure));
            }
            for (name, recorded) in &self.values {
                let (found, rows) = (&outputs[*name], recorded.shape()[0] / self.batches);
                let recorded = recorded.range(0, number * rows, (number + 1) * rows);
                if found.shape() != recorded.shape() {
                    let message =
                        format!("{name}: shape {:?} where {:?} was expected", found.shape(), recorded.shape());
                    return Err((whole(name, message), measure));
                }
                let of = |(a, b): (f64, f64)| (a - b).abs() / if *name == "logprob" { 1.0 } else { b.abs().max(1.0) };
                let differences = found.to_f64().into_iter().zip(recorded.to_f64()).map(of);
                let (largest, limit, what) = match *name {
                    "logprob" => (&mut measure.max_dlogp, bound.max_dlogp, "|dlogp|"),
                    _ => (&mut measure.max_dloss, bound.max_dloss, "error / max(1, |value|)"),
                };
                *largest = differences.fold(*largest, largest_of);
                if let Some(limit) = limit.filter(|limit| beyond(*largest, *limit)) {
                    let message = format!("{name}: largest {what} is {largest:.3e}; the bound is {limit:e}");
                    note(message, format!("{what} <= {limit:e}"), *largest, name);
                }
            }
        }
        let mut first = 0;
        for parameter in &self.parameters {
            let [error, length, of_torch] = parameter.lengths(first, answers);
            first += parameter.elements;
            measure.parameters += 1;
            let (ratio, limit, largest) = match parameter.elements > WHOLE {
                true => (of_torch, bound.sketch_of_recorded, &mut measure.sketch_of_recorded),
                false => (of_torch, bound.error_of_recorded, &mut measure.error_of_recorded),
            };
            for (what, of, limit, largest) in [
                ("error / length of the gradient", length, bound.error_of_length, &mut measure.error_of_length),
                ("error / that of torch's bf16", ratio, limit, largest),
            ] {
                // Nothing is a share of nothing: a gradient of zeros has no error.
                let share = if error == 0.0 { 0.0 } else { error / of };
                *largest = largest_of(*largest, share);
                if let Some(limit) = limit.filter(|limit| beyond(share, *limit)) {
                    let message = format!("{}: {what} is {share:.3e}; the bound is {limit:e}", parameter.name);
                    note(message, format!("{what} <= {limit:e}"), share, "gradients");
                }
            }
        }
        match evidence {
            None => Ok(measure),
            Some(evidence) => Err((evidence, measure)),
        }
    }
}

/// A NaN is beyond every limit.
fn beyond(value: f64, limit: f64) -> bool {
    value.is_nan() || value > limit
}

/// The larger one; NaN where one is.
fn largest_of(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

impl Parameter {
    /// Error, length and torch's error: roots of the sums of squares over the batches. Its elements stand from `first` on.
    fn lengths(&self, first: usize, answers: &[&BTreeMap<String, Tensor>]) -> [f64; 3] {
        let mut squares = [0f64; 3];
        let width = self.kept.shape()[1];
        for (number, outputs) in answers.iter().enumerate() {
            let found = outputs[GRADIENTS].range(0, first, first + self.elements).to_f64();
            let kept = self.kept.range(0, number, number + 1).to_f64();
            let of_batch = [distance(&found, &kept[..width - 2]), kept[width - 2].powi(2), kept[width - 1].powi(2)];
            squares.iter_mut().zip(of_batch).for_each(|(sum, square)| *sum += square);
        }
        squares.map(f64::sqrt)
    }
}

/// The squared length of the difference to a recorded gradient, or as its sketch estimates it.
fn distance(found: &[f64], kept: &[f64]) -> f64 {
    if found.len() <= WHOLE {
        return found.iter().zip(kept).map(|(a, b)| (a - b).powi(2)).sum();
    }
    sketch(found).iter().zip(kept).map(|(sum, &kept)| (sum - kept).powi(2)).sum::<f64>() / SKETCH as f64
}

/// Inner products with the vectors of +1 and -1.
fn sketch(values: &[f64]) -> [f64; SKETCH] {
    let mut sums = [0f64; SKETCH];
    for (index, &value) in values.iter().enumerate() {
        let signs = signs(index);
        for (row, sum) in sums.iter_mut().enumerate() {
            *sum += f64::from_bits(value.to_bits() ^ (signs >> row & 1) << 63);
        }
    }
    sums
}

/// Its bits are the signs of element `index` of the vectors: splitmix64.
fn signs(index: usize) -> u64 {
    let z = (index as u64).wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    /// Two batches of two parameters, one recorded whole and one as a sketch; `by` is torch's error in each batch.
    fn recorded(by: f32) -> (Recorded, [BTreeMap<String, Tensor>; 2]) {
        let gradients: [Vec<f32>; 2] = [1.0, -2.0].map(|scale| (0..203).map(|i| scale * (i as f32 - 100.0)).collect());
        let rows = |range: std::ops::Range<usize>| -> Vec<f32> {
            let row = |gradient: &Vec<f32>| {
                let values: Vec<f64> = gradient[range.clone()].iter().map(|&v| f64::from(v)).collect();
                let length = values.iter().map(|v| v * v).sum::<f64>().sqrt();
                let kept: Vec<f64> = match values.len() > WHOLE {
                    true => (0..SKETCH).map(|row| sketch(&values)[row]).collect(),
                    false => values,
                };
                kept.into_iter().map(|v| v as f32).chain([length as f32, by]).collect::<Vec<f32>>()
            };
            gradients.iter().flat_map(row).collect()
        };
        let tensors = BTreeMap::from([
            ("nll.a".to_string(), Tensor::fp32(&[2, 5], rows(0..3))),
            ("nll.b".to_string(), Tensor::fp32(&[2, SKETCH + 2], rows(3..203))),
            ("nll.loss".to_string(), Tensor::fp32(&[2], vec![1.0, 2.0])),
            ("nll.per_sequence".to_string(), Tensor::fp32(&[2], vec![3.0, 4.0])),
            ("nll.logprob".to_string(), Tensor::fp32(&[2, 2], vec![0.0, -1.0, 0.0, -2.0])),
        ]);
        let elements = BTreeMap::from([("a".to_string(), 3), ("b".to_string(), 200), ("of_none".to_string(), 9)]);
        let answers = [0, 1].map(|number| {
            BTreeMap::from([
                ("gradients".to_string(), Tensor::fp32(&[203], gradients[number].clone())),
                ("loss".to_string(), Tensor::fp32(&[1], vec![1.0 + number as f32])),
                ("per_sequence".to_string(), Tensor::fp32(&[1], vec![3.0 + number as f32])),
                ("logprob".to_string(), Tensor::fp32(&[1, 2], vec![0.0, -1.0 - number as f32])),
            ])
        });
        let file = File { tensors, metadata: BTreeMap::new() };
        (Recorded::of(&samebits_schema::chain_backward::OP, file, "nll", &elements).unwrap(), answers)
    }

    const BOUND: GradientBound = GradientBound {
        error_of_length: Some(1e-2),
        error_of_recorded: Some(1.0),
        sketch_of_recorded: Some(1.25),
        max_dlogp: Some(1e-3),
        max_dloss: Some(1e-3),
    };

    pub(crate) fn gradients_are_held_parameter_by_parameter() {
        let (recorded, answers) = recorded(0.5);
        let measure = recorded.measure(&answers.each_ref(), &BOUND).unwrap();
        assert_eq!((measure.parameters, measure.batches, measure.max_dlogp), (2, 2, 0.0));
        assert!(measure.error_of_length < 1e-6, "{measure:?}");
        let with = |name: &str, index: usize, value: f32| {
            let mut answers = answers.clone();
            let tensor = answers[1].get_mut(name).unwrap();
            let mut values: Vec<f32> = tensor.to_f64().into_iter().map(|v| v as f32).collect();
            values[index] += value;
            *tensor = Tensor::fp32(tensor.shape(), values);
            recorded.measure(&answers.each_ref(), &BOUND).map(|_| ()).map_err(|(evidence, _)| evidence.message)
        };
        // The root of two batches' squares is 0.71.
        assert_eq!(with("gradients", 2, 0.7), Ok(()));
        for (name, index, value, message) in [
            ("gradients", 2, 0.75, "a: error / that of torch's bf16"),
            ("gradients", 2, f32::NAN, "a: error / length of the gradient is NaN"),
            ("gradients", 3, 1.0, "b: error / that of torch's bf16"),
            ("gradients", 202, 1e4, "b: error / length of the gradient"),
            ("logprob", 1, 0.01, "logprob: largest |dlogp|"),
            ("loss", 0, 0.01, "loss: largest error"),
            ("per_sequence", 0, f32::NAN, "per_sequence: largest error"),
        ] {
            let found = with(name, index, value).expect_err(message);
            assert!(found.starts_with(message), "{found}");
        }
        let mut short = answers.clone();
        short[0].insert("gradients".into(), Tensor::fp32(&[202], vec![0.0; 202]));
        let (evidence, _) = recorded.measure(&short.each_ref(), &BOUND).unwrap_err();
        assert!(evidence.message.contains("the parameters have 203 elements"), "{}", evidence.message);
    }
}
