//! The wire's extension for timing: `repeat` in a request, a clock's reading in its answer (docs/WIRE.md, Timing).

use crate::clock::Reading;
use samebits_contract::case::{Answer, Case};
use samebits_contract::tensor::Tensor;
use samebits_contract::wire::{File, encode_answer, encode_request};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// How often an op may be run for one answer.
pub const REPEATS: RangeInclusive<usize> = 1..=1_000_000;

/// [`REPEATS`] in words.
pub fn repeats() -> String {
    format!("a whole number from {} to {}", REPEATS.start(), REPEATS.end())
}

/// The request that asks for `case` and its time, of `repeat` runs.
pub fn encode_timed(case: &mut Case, repeat: usize) -> Vec<u8> {
    case.params.insert("repeat".into(), repeat.to_string());
    let bytes = encode_request(case);
    case.params.remove("repeat");
    bytes
}

/// The message that carries the ok answer and its time.
pub fn encode(answer: &Answer, reading: &Reading) -> Vec<u8> {
    // Others make their outputs while the clock runs: ours count as well.
    let ready: usize = answer.outputs.values().map(|tensor| tensor.len() * tensor.dtype().size()).sum();
    let mut file = File::decode(&encode_answer(answer)).expect("what was just written can be read");
    let mut add = |key: &str, value: String| file.metadata.insert(key.into(), value);
    add("seconds", serde_json::json!(reading.seconds).to_string());
    add("prepared", reading.prepared.into());
    add("version", format!("samebits {}", env!("CARGO_PKG_VERSION")));
    if let Some(bytes) = reading.peak_bytes {
        add("peak_bytes", (bytes + ready as u64).to_string());
    }
    file.encode()
}

/// An answer to a request that asked for its time.
pub enum Timed {
    /// The outputs and the time.
    Ok(Time),
    /// The program does not offer this; the text says what.
    Unsupported(String),
}

/// What a program says of itself and its time.
pub struct Time {
    /// Outputs by name.
    pub outputs: BTreeMap<String, Tensor>,
    /// Seconds of every timed run.
    pub seconds: Vec<f64>,
    /// By how many bytes its memory grew while it ran, outputs among them.
    pub peak_bytes: Option<u64>,
    /// What stood ready before the clock started.
    pub prepared: String,
    /// What ran.
    pub kernel: String,
    /// The program and its version; empty when it does not say.
    pub version: String,
}

/// Reads the answer to a request for `repeat` runs.
///
/// # Errors
/// What is wrong with it, naming the field: it is no answer, it says `error`, or it lacks the time asked for.
pub fn decode(bytes: &[u8], repeat: usize) -> Result<Timed, String> {
    let File { tensors, mut metadata } = File::decode(bytes).map_err(|e| e.to_string())?;
    let mut text = |key: &str| metadata.remove(key);
    let reason = text("reason").unwrap_or_default();
    match text("status").as_deref() {
        Some("ok") => {}
        Some("unsupported") => return Ok(Timed::Unsupported(reason)),
        Some("error") => return Err(format!("it answers `error`: {reason}")),
        other => {
            return Err(format!("metadata `status`: `{}` is not ok, unsupported or error", other.unwrap_or("")));
        }
    }
    let seconds = text("seconds").ok_or("metadata `seconds`: missing; the program does not honour `repeat`")?;
    let list: Vec<f64> = serde_json::from_str(&seconds)
        .map_err(|_| format!("metadata `seconds`: `{seconds:.40}` is not a JSON list of numbers"))?;
    if list.len() != repeat {
        return Err(format!("metadata `seconds`: {} numbers for {repeat} runs", list.len()));
    }
    if let Some(bad) = list.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
        return Err(format!("metadata `seconds`: {bad} is not greater than 0"));
    }
    let peak =
        |text: String| text.parse().map_err(|_| format!("metadata `peak_bytes`: `{text}` is not a whole number"));
    Ok(Timed::Ok(Time {
        outputs: tensors,
        seconds: list,
        peak_bytes: text("peak_bytes").map(peak).transpose()?,
        prepared: text("prepared").unwrap_or_default(),
        kernel: text("kernel").unwrap_or_default(),
        version: text("version").unwrap_or_default(),
    }))
}
