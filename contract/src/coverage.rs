//! Which classes of number the cases ask for: a class that no judged answer has is a blind spot.

use crate::fill::Fill;
use crate::number_class::{NumberClass, told_apart};
use crate::record::Judgment;
use crate::table::{CaseSpec, Contract};
use crate::tensor::DType;
use std::collections::{BTreeMap, BTreeSet};

/// A class that an output does not have, or that no bound can tell apart there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uncovered {
    /// The op.
    pub op: String,
    /// Outputs by name; empty for all.
    pub outputs: Vec<String>,
    /// Input dtypes; empty for all.
    pub dtypes: Vec<DType>,
    /// Dtypes of the output; empty for all.
    pub outs: Vec<DType>,
    /// The classes.
    pub classes: Vec<NumberClass>,
    /// Why.
    pub reason: String,
    /// File and line, for messages.
    pub place: String,
}

impl Uncovered {
    pub(crate) fn speaks_of(&self, case: &CaseSpec, output: &str, dtype: DType) -> bool {
        self.op == case.op
            && (self.outputs.is_empty() || self.outputs.iter().any(|name| name == output))
            && (self.dtypes.is_empty() || self.dtypes.contains(&case.dtype))
            && (self.outs.is_empty() || self.outs.contains(&dtype))
    }
}

/// What the cases of one op, input dtype and output dtype produce.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Classes that answers have, over all float outputs.
    pub covered: usize,
    /// What is missing, one line each.
    pub missing: Vec<String>,
    /// Entries of `[[uncovered]]` that are not true, one line each.
    pub stale: Vec<String>,
}

impl Contract {
    /// Whether the judgment `coverage` is asked on `case`: the first case of fill `classes` of every op, input dtype
    /// and output dtype stands for all of them. An op without float outputs has none.
    pub fn covers(&self, case: &CaseSpec) -> bool {
        self.alike(case).next().is_some_and(|first| first.name == case.name)
    }

    /// The cases of fill `classes` with the op and the dtypes of `case`.
    fn alike(&self, case: &CaseSpec) -> impl Iterator<Item = &CaseSpec> {
        let alike = |other: &&CaseSpec| {
            other.fill == Fill::Classes && (&other.op, other.dtype, other.out) == (&case.op, case.dtype, case.out)
        };
        self.cases.iter().filter(alike)
    }

    /// Which classes the oracle's answers have to the cases of fill `classes` with the op and the dtypes of `case`, in
    /// all float outputs; a class counts where the default row set's bound on `implementation` tells it apart, see
    /// [`told_apart`].
    pub fn coverage(&self, implementation: &str, case: &CaseSpec) -> Coverage {
        let mut classes: BTreeMap<(&str, DType), BTreeSet<NumberClass>> = BTreeMap::new();
        for spec in self.alike(case) {
            let references = spec.spec().oracle(&spec.build()).expect("the loader has checked the case");
            let Some(row) = self.row(implementation, spec) else { continue };
            for output in spec.spec().outputs {
                let dtype = spec.spec().output_dtype(output, spec.out);
                if dtype == DType::I32 {
                    continue;
                }
                let Some(bound) = self.bound(self.default_rows(), row, spec, dtype, Judgment::Accuracy) else {
                    continue;
                };
                classes.entry((output.name, dtype)).or_default().extend(told_apart(
                    dtype,
                    &references[output.name],
                    &bound,
                ));
            }
        }
        let mut coverage = Coverage::default();
        for ((output, dtype), found) in classes {
            for class in NumberClass::ALL {
                let entry = self
                    .uncovered
                    .iter()
                    .find(|entry| entry.classes.contains(&class) && entry.speaks_of(case, output, dtype));
                let what = format!("{} in `{output}` of {} -> {dtype}", class.name(), case.dtype);
                match (found.contains(&class), entry) {
                    (true, None) => coverage.covered += 1,
                    (false, Some(_)) => {}
                    (false, None) => coverage.missing.push(format!(
                        "no answer to the cases of fill `classes` has {what}, told apart; add one, or [[uncovered]] with the \
                         reason"
                    )),
                    (true, Some(entry)) => {
                        coverage.stale.push(format!("{}: {what} is covered; narrow or remove the entry", entry.place));
                    }
                }
            }
        }
        coverage
    }
}
