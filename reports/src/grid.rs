//! Records grouped the ways the reports print them, always in the same order.

use crate::Counts;
use samebits_contract::record::{Judgment, Measure, Record, Spread};
use samebits_contract::tensor::DType;
use samebits_contract::verdict::Verdict;
use std::collections::{BTreeMap, BTreeSet};

/// The implementations of a run, by name.
pub fn implementations(records: &[Record]) -> BTreeSet<&str> {
    records.iter().map(|r| r.implementation.as_str()).collect()
}

/// An op in the order of tables: by name, gradients behind their forward, whole models (`chain`) and their gradients last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Op<'a> {
    is_chain: bool,
    /// The op itself, or the one whose gradient it is.
    forward: &'a str,
    pub is_gradient: bool,
    pub name: &'a str,
}

/// The op of a record.
pub fn op(record: &Record) -> Op<'_> {
    let name = record.op.as_str();
    let forward = samebits_contract::spec::find(name).and_then(|spec| spec.op.gradient_of);
    Op {
        is_chain: forward.unwrap_or(name) == "chain",
        forward: forward.unwrap_or(name),
        is_gradient: forward.is_some(),
        name,
    }
}

/// Counts by judgment, in the order of [`Judgment::ALL`].
pub type ByJudgment = [Counts; Judgment::ALL.len()];

/// Counts of one implementation by (op, input dtype) and judgment.
pub fn by_judgment<'a>(records: &'a [Record], implementation: &str) -> BTreeMap<(Op<'a>, DType), ByJudgment> {
    let mut grid: BTreeMap<_, ByJudgment> = BTreeMap::new();
    for r in records.iter().filter(|r| r.implementation == implementation) {
        let column = Judgment::ALL.iter().position(|&j| j == r.judgment).expect("ALL names every judgment");
        grid.entry((op(r), r.dtype)).or_default()[column].add(&r.verdict);
    }
    grid
}

/// A column of the matrix: a judgment, and its axis where it has one.
pub type Column<'a> = (Judgment, Option<&'a str>);

/// The columns that have records.
pub fn columns(records: &[Record]) -> BTreeSet<Column<'_>> {
    records.iter().map(|r| (r.judgment, r.axis.as_deref())).collect()
}

/// Counts of one implementation by op and column.
pub fn by_axis<'a>(records: &'a [Record], implementation: &str) -> BTreeMap<Op<'a>, BTreeMap<Column<'a>, Counts>> {
    let mut grid: BTreeMap<_, BTreeMap<_, Counts>> = BTreeMap::new();
    for r in records.iter().filter(|r| r.implementation == implementation) {
        grid.entry(op(r)).or_default().entry((r.judgment, r.axis.as_deref())).or_default().add(&r.verdict);
    }
    grid
}

/// One kind of combination that an implementation does not offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unsupported<'a> {
    pub implementation: &'a str,
    pub op: Op<'a>,
    pub dtype: DType,
    pub out: DType,
    pub reason: &'a str,
}

/// How many records each unsupported combination has.
pub fn unsupported(records: &[Record]) -> BTreeMap<Unsupported<'_>, usize> {
    let mut groups = BTreeMap::new();
    for r in records {
        if let Verdict::Unsupported { reason } = &r.verdict {
            let Record { implementation, dtype, out, .. } = r;
            let group = Unsupported { implementation, op: op(r), dtype: *dtype, out: *out, reason };
            *groups.entry(group).or_default() += 1;
        }
    }
    groups
}

/// The red records; those without an answer for one and the same reason stand together as the first of them and how many there
/// are, in the order of the firsts.
pub fn red(records: &[Record]) -> Vec<(&Record, usize)> {
    let mut places: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let mut found: Vec<(&Record, usize)> = Vec::new();
    for record in records.iter().filter(|record| record.verdict.is_red()) {
        if let Verdict::Untested { reason } | Verdict::Error { reason } = &record.verdict {
            let place = *places.entry((&record.implementation, reason)).or_insert(found.len());
            if let Some((_, count)) = found.get_mut(place) {
                *count += 1;
                continue;
            }
        }
        found.push((record, 1));
    }
    found
}

/// Measured error of one op in one pair of dtypes, over all its cases.
#[derive(Clone, Debug, PartialEq)]
pub struct Accuracy {
    pub records: usize,
    pub samples: usize,
    pub max_ulp: f64,
    /// The largest p99 of any one case: quantiles of parts do not give the quantile of the whole.
    pub worst_p99_ulp: f64,
    /// Over all samples; NaN when there are none.
    pub correctly_rounded: f64,
    pub of_bound: f64,
    pub spread: Spread,
}

/// Accuracy by implementation, op, input dtype and output dtype, from every record that carries a measure.
pub fn accuracy(records: &[Record]) -> BTreeMap<(&str, Op<'_>, DType, DType), Accuracy> {
    let mut groups: BTreeMap<_, Vec<&Measure>> = BTreeMap::new();
    for r in records {
        if let Some(measure) = &r.measure {
            groups.entry((r.implementation.as_str(), op(r), r.dtype, r.out)).or_default().push(measure);
        }
    }
    groups.into_iter().map(|(key, measures)| (key, summed(&measures))).collect()
}

fn summed(measures: &[&Measure]) -> Accuracy {
    // A value that is not a number is worse than any: it must not vanish in a maximum.
    let largest = |of: fn(&Measure) -> f64| {
        measures.iter().map(|m| of(m)).fold(0.0, |a: f64, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) })
    };
    let samples = measures.iter().map(|m| m.samples).sum();
    let rounded: f64 = measures.iter().map(|m| m.correctly_rounded * m.samples as f64).sum();
    let mut spread = Spread::default();
    measures.iter().for_each(|measure| spread.add(&measure.spread));
    Accuracy {
        records: measures.len(),
        samples,
        max_ulp: largest(|m| m.max_ulp),
        worst_p99_ulp: largest(|m| m.p99_ulp),
        correctly_rounded: rounded / samples as f64,
        of_bound: largest(|m| m.of_bound),
        spread,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn every_grouping_holds_every_record_once() {
        let records = synthetic::folder().records;
        let all = Counts::of(&records);
        let sum = |counts: Vec<Counts>| counts.iter().map(Counts::total).sum::<usize>();
        let names = implementations(&records);
        let judged = names.iter().flat_map(|i| by_judgment(&records, i).into_values().flatten()).collect();
        assert_eq!(sum(judged), all.total());
        let axes = names.iter().flat_map(|i| by_axis(&records, i).into_values().flat_map(|row| row.into_values()));
        assert_eq!(sum(axes.collect()), all.total());
        assert_eq!(unsupported(&records).values().sum::<usize>(), all.unsupported);
    }

    #[test]
    fn accuracy_weighs_by_samples_and_keeps_what_is_not_a_number() {
        let measure = |samples, correctly_rounded, max_ulp| Measure {
            samples,
            correctly_rounded,
            max_ulp,
            p99_ulp: 0.25,
            max_abs: 0.0,
            of_bound: 0.5,
            spread: Default::default(),
        };
        let (a, b) = (measure(300, 1.0, 0.5), measure(100, 0.5, 0.75));
        let sum = summed(&[&a, &b]);
        assert_eq!((sum.samples, sum.max_ulp, sum.correctly_rounded), (400, 0.75, 0.875));
        let bad = measure(1, 0.0, f64::NAN);
        assert!(summed(&[&a, &bad, &b]).max_ulp.is_nan());
        assert!(summed(&[&measure(0, 0.0, 0.0)]).correctly_rounded.is_nan());
    }
}
