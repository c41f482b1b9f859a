//! How far recorded log-probabilities are off, as `samebits score` says it.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use samebits_contract::mismatch::{parse, thresholds};
use samebits_harness::mismatch::{Found, check_gates};

/// Of texts, each the log-probabilities that were recorded and those that were computed again: the lines for people and the JSON
/// for programs, and whether all gates hold. `table` stands in the place of the contract's thresholds; `flips` are how many choices of
/// experts are others than recorded, and of how many.
#[pyfunction]
#[pyo3(signature = (texts, gates, dtype, table = None, flips = None))]
pub fn mismatch(
    texts: Vec<(Vec<f32>, Vec<f32>)>,
    gates: Vec<String>,
    dtype: &str,
    table: Option<&str>,
    flips: Option<(usize, usize)>,
) -> PyResult<(String, String, bool)> {
    let lines = table
        .map_or_else(|| Ok(thresholds()), parse)
        .map_err(|why| PyValueError::new_err(format!("thresholds: {why}")))?;
    check_gates(&lines, &gates, dtype).map_err(|why| PyValueError::new_err(format!("gate {why}")))?;
    let mut found = Found::default();
    for (number, (old, new)) in texts.iter().enumerate() {
        found.add(number, 0, &[], old, new);
    }
    if let Some((flips, choices)) = flips {
        found.add_flips([flips, choices]);
    }
    let judged = found.judged(&lines, &gates, dtype);
    let holds = judged.iter().all(|(.., holds)| *holds);
    Ok((found.text(&judged), found.json(&judged).to_string(), holds))
}

/// Gate, metric and largest value of the contract's thresholds for models in a dtype that have one.
#[pyfunction(name = "thresholds")]
pub fn thresholds_of(dtype: &str) -> Vec<(String, &'static str, f64)> {
    let of_dtype = thresholds().into_iter().filter(|line| line.dtype.as_deref().is_none_or(|of| of == dtype));
    of_dtype.filter_map(|line| Some((line.gate, line.metric.name(), line.most?))).collect()
}
