//! Waivers that nothing needs any more.

use crate::judge::{Outcome, Selection, Trial, plan, record_of};
use samebits_contract::axis;
use samebits_contract::record::{Judgment, Record};
use samebits_contract::table::{CaseSpec, Contract, Row};
use samebits_contract::verdict::Verdict;
use std::collections::BTreeSet;

/// A record for every waiver of `implementation` that no failure under it needed: judged only when the whole selection is
/// over, and of a selection that leaves out some of `whole` only where a waiver covers nothing of that.
pub fn stale(
    contract: &Contract,
    rows: &str,
    implementation: &str,
    records: &[Record],
    whole: Option<&Selection>,
) -> Vec<Record> {
    if contract.exceptions.is_empty() && contract.rows().iter().all(|row| row.waive.is_none()) {
        return Vec::new();
    }
    let asked: BTreeSet<(&str, Judgment, Option<&str>)> =
        records.iter().map(|record| (&record.case[..], record.judgment, record.axis.as_deref())).collect();
    let planned = whole.map(|whole| plan(contract, implementation, whole)).unwrap_or_default();
    let left_out: Vec<&Trial> = planned
        .iter()
        .flatten()
        .filter(|trial| !asked.contains(&(&trial.case.name[..], trial.judgment, trial.axis.map(|axis| axis.name))))
        .collect();
    // Records of a case stand side by side: one look-up for all of them.
    let mine: Vec<(&Record, &CaseSpec, &Row)> = records
        .chunk_by(|a, b| a.case == b.case)
        .filter_map(|of_case| {
            let case = contract.case(&of_case[0].case)?;
            Some((of_case, case, contract.row(implementation, case)?))
        })
        .flat_map(|(of_case, case, row)| of_case.iter().map(move |record| (record, case, row)))
        .filter(|(record, ..)| record.implementation == implementation)
        .collect();
    let mut unneeded = Vec::new();
    for waiver in &contract.exceptions {
        let under =
            |record: &Record| waiver.covers(implementation, &record.case, record.judgment, record.axis.as_deref());
        let mut under = mine.iter().filter(|(record, ..)| under(record)).peekable();
        let Some((first, case, row)) = under.peek().copied() else { continue };
        let covers_more = left_out.iter().any(|trial| {
            waiver.covers(implementation, &trial.case.name, trial.judgment, trial.axis.map(|axis| axis.name))
        });
        if covers_more {
            continue;
        }
        // One that has expired and is still needed is red at the failure itself.
        if under.all(|(record, ..)| !matches!(record.verdict, Verdict::Waived { .. } | Verdict::Fail(_))) {
            let axis = first.axis.as_deref().and_then(axis::find);
            let trial = Trial { case, row, judgment: first.judgment, axis };
            let reason = format!("{}: nothing needs the waiver `{}`; remove it", waiver.place, waiver.text());
            unneeded.push(record_of(
                contract,
                rows,
                implementation,
                &trial,
                Outcome::of(Verdict::StaleWaiver { reason }),
            ));
        }
    }
    for row in contract.rows() {
        let Some(waiver) = &row.waive else { continue };
        let under = |record: &Record| waiver.covers(record.judgment, record.axis.as_deref());
        let mut under = mine.iter().filter(|(record, _, of)| of.place == row.place && under(record)).peekable();
        let Some((first, case, _)) = under.peek().copied() else { continue };
        let covers_more = |trial: &&Trial| {
            trial.row.place == row.place && waiver.covers(trial.judgment, trial.axis.map(|axis| axis.name))
        };
        if left_out.iter().any(covers_more) {
            continue;
        }
        if under.all(|(record, ..)| !matches!(record.verdict, Verdict::Waived { .. })) {
            let axis = first.axis.as_deref().and_then(axis::find);
            let trial = Trial { case, row, judgment: first.judgment, axis };
            let reason = format!("{}: nothing needs the waiver `{}`; remove it", row.place, waiver.reason);
            unneeded.push(record_of(
                contract,
                rows,
                implementation,
                &trial,
                Outcome::of(Verdict::StaleWaiver { reason }),
            ));
        }
    }
    unneeded
}
