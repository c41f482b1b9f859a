//! What is in a model folder, tensor by tensor, beside what its config asks for.

use crate::ModelError;
use crate::config::Config;
use crate::decoder::expected;
use crate::error::escaped;
use crate::train::sha256;
use crate::weights::{Weights, few};
use samebits_ops::{Element, bf16};
use std::collections::BTreeMap;
use std::path::Path;

/// What an audit found.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Audit {
    /// The family.
    pub family: &'static str,
    /// Parameters, each counted once.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// How many tensors have each dtype.
    pub dtypes: BTreeMap<String, usize>,
    /// Whether the output projection is the embedding table.
    pub tied: bool,
    /// What is wrong or odd, the worst first.
    pub findings: Vec<Finding>,
    /// A line for each field that was passed by: no code reads it, or its value asks for nothing.
    pub passed: Vec<String>,
    /// Every tensor, by name.
    pub tensors: Vec<TensorReport>,
}

/// Something that is wrong or odd about a tensor.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Finding {
    /// Whether the model cannot be trusted with it; else it is only odd.
    pub wrong: bool,
    /// The tensor.
    pub tensor: String,
    /// What it is.
    pub what: String,
}

/// A tensor as it is stored.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TensorReport {
    /// Its name.
    pub name: String,
    /// Its dtype.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its smallest and largest finite element, if it has any.
    pub range: Option<(f32, f32)>,
    /// Root mean square of its finite elements.
    pub rms: f64,
    /// Elements that are NaN or infinite.
    pub not_finite: usize,
    /// SHA-256 of its elements as f32, little endian: equal for equal values whatever the dtype.
    pub sha256: String,
}

impl Audit {
    /// Reads the folder `dir`; `progress(read, total)` counts bytes.
    ///
    /// # Errors
    /// A config that is not supported, or weights whose headers are damaged: what no report can be made of.
    pub fn of(dir: &Path, progress: impl FnMut(u64, u64)) -> Result<Audit, ModelError> {
        let config = Config::load(dir)?;
        let mut weights = Weights::open(dir)?.report_to(progress);
        let stored: Vec<(String, Vec<usize>, String)> =
            weights.left().map(|(name, s)| (name.clone(), s.shape.clone(), s.dtype.to_string())).collect();
        let mut findings = Vec::new();
        let mut note = |wrong, tensor: &str, what: String| {
            findings.push(Finding { wrong, tensor: escaped(tensor), what: escaped(&what) });
        };
        // The door that loading goes through too.
        let (complaints, buffers) = weights.fit(&config, expected(&config));
        for complaint in complaints {
            match complaint {
                ModelError::Tensor { tensor, why, .. } => note(true, &tensor, why),
                other => note(true, "all", other.to_string()),
            }
        }
        buffers.iter().for_each(|name| note(false, name, "is not used: it is a buffer that is computed anew".into()));
        let mut audit = Audit {
            family: config.family.name(),
            parameters: 0,
            bytes: 0,
            dtypes: BTreeMap::new(),
            tied: config.tied,
            findings: Vec::new(),
            passed: config.passed.clone(),
            tensors: Vec::new(),
        };
        let [table, head] = [config.table, config.head].map(|name| format!("{name}.weight"));
        let mut tables: Vec<Vec<f32>> = Vec::new();
        let mut by_digest: BTreeMap<String, String> = BTreeMap::new();
        for (name, shape, dtype) in stored {
            if let Some(what) = config.unused(&name) {
                note(false, &name, format!("is not used: {what}"));
            }
            // Buffers, and what is of a dtype that is no weight's, are told above.
            if !weights.contains(&name) || !["BF16", "F16", "F32"].contains(&&dtype[..]) {
                continue;
            }
            *audit.dtypes.entry(dtype.clone()).or_default() += 1;
            let values = weights.peek(&name)?;
            if config.tied && [&table, &head].contains(&&name) {
                tables.push(values.clone());
            }
            let report = TensorReport::of(name, dtype, shape, &values);
            audit.parameters += values.len() as u64;
            audit.bytes += values.len() as u64 * if report.dtype == "F32" { 4 } else { 2 };
            report.odd(&values, &mut note);
            if values.len() > 1
                && report.range.is_some_and(|(low, high)| low < high)
                && let Some(other) = by_digest.insert(report.sha256.clone(), report.name.clone())
            {
                let tied = config.tied && report.name != other;
                let is_head = [&report.name, &other].contains(&&head);
                if !(tied && is_head) {
                    note(false, &report.name, format!("has the same elements as {other}"));
                }
            }
            audit.tensors.push(report);
        }
        if let [one, other] = &tables[..]
            && !one.iter().map(|x| x.to_bits()).eq(other.iter().map(|x| x.to_bits()))
        {
            note(true, &head, differs(config.table));
        }
        if audit.dtypes.len() > 1 {
            let mix: Vec<String> = audit.dtypes.iter().map(|(dtype, count)| format!("{count} {dtype}")).collect();
            note(false, "all", format!("dtypes are mixed: {}", mix.join(", ")));
        }
        findings.sort_by_key(|finding| !finding.wrong);
        audit.findings = findings;
        Ok(audit)
    }

    /// `error`, which some tensor of the folder `dir` was refused with, and what is wrong with all others of them.
    pub(crate) fn all_of(dir: &Path, error: ModelError) -> ModelError {
        let ModelError::Tensor { tensor: ref first, .. } = error else { return error };
        let (Ok(audit), Ok(weights)) = (Audit::of(dir, |_, _| {}), Weights::open(dir)) else { return error };
        let others = audit.findings.into_iter().filter(|found| found.wrong && found.tensor != escaped(first));
        let others = others.map(|found| ModelError::tensor(&weights.path(&found.tensor), &found.tensor, found.what));
        let others: Vec<ModelError> = others.collect();
        ModelError::all(few(std::iter::once(error).chain(others).collect())).expect_err("there is one")
    }

    /// Whether nothing is wrong.
    pub fn holds(&self) -> bool {
        self.findings.iter().all(|finding| !finding.wrong)
    }
}

impl TensorReport {
    fn of(name: String, dtype: String, shape: Vec<usize>, values: &[f32]) -> TensorReport {
        let (mut low, mut high, mut squares, mut not_finite) = (f32::INFINITY, f32::NEG_INFINITY, 0.0, 0);
        for &v in values {
            if v.is_finite() {
                (low, high) = (low.min(v), high.max(v));
                squares += f64::from(v) * f64::from(v);
            } else {
                not_finite += 1;
            }
        }
        let finite = values.len() - not_finite;
        let rms = (squares / finite.max(1) as f64).sqrt();
        let range = (finite > 0).then_some((low, high));
        TensorReport { name, dtype, shape, range, rms, not_finite, sha256: sha256([values]) }
    }

    /// Notes what is wrong or odd about the elements.
    fn odd(&self, values: &[f32], note: &mut impl FnMut(bool, &str, String)) {
        let name = &self.name;
        if self.not_finite > 0 {
            note(true, name, format!("{} of {} elements are not finite", self.not_finite, values.len()));
        }
        // What is read in bf16, which is where nothing else is said.
        let beyond = values.iter().filter(|v| v.is_finite() && !bf16::narrow(**v).widen().is_finite()).count();
        if beyond > 0 && self.shape.len() == 2 {
            note(true, name, format!("{beyond} of {} elements are beyond what bf16 holds", values.len()));
        }
        let Some((low, high)) = self.range else { return };
        let matrix = self.shape.len() == 2;
        if low == high && values.len() > 1 {
            // Norms begin as ones and biases as zeros; a matrix that is constant was never filled.
            note(matrix, name, format!("is constant: every element is {low}"));
            return;
        }
        let largest = low.abs().max(high.abs());
        if f64::from(largest) > 1000.0 * self.rms {
            note(false, name, format!("has an outlier: {largest} where the root mean square is {:.3e}", self.rms));
        }
        if largest > 1e4 {
            note(false, name, format!("reaches {largest}, which fp16 products may not hold"));
        }
        if let [rows, columns] = self.shape[..] {
            let zero = values.chunks(columns.max(1)).filter(|row| row.iter().all(|v| *v == 0.0)).count();
            if zero > 0 && !name.contains("embed_tokens") {
                note(false, name, format!("{zero} of {rows} rows are zero"));
            }
        }
    }
}

/// What is wrong with a second table.
pub(crate) fn differs(table: &str) -> String {
    format!("differs from {table}.weight, but tie_word_embeddings is true; remove one")
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use std::path::PathBuf;

    pub(crate) fn every_checkpoint_has_what_is_expected_and_nothing_else() {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints");
        let mut seen = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            let dir = entry.unwrap().path();
            let audit = Audit::of(&dir, |_, _| {}).unwrap();
            assert!(audit.holds(), "{}: {:?}", dir.display(), audit.findings);
            assert!(audit.parameters > 1000 && audit.tensors.iter().all(|t| t.sha256.len() == 64));
            seen += 1;
        }
        assert!(seen >= crate::Family::all().len(), "checkpoints");
    }
}
