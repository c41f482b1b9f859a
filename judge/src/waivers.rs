//! Waivers that nothing needs any more.

use crate::judge::{Outcome, Trial, record_of};
use samebits_contract::axis;
use samebits_contract::record::Record;
use samebits_contract::table::Contract;
use samebits_contract::verdict::Verdict;
use std::collections::BTreeSet;

/// A record for every waiver of `implementation` that no failure under it needed: judged only when the whole selection is
/// over, and of a selection that leaves out some of `whole` only where a waiver covers nothing of that.
pub fn stale<'a>(
    contract: &Contract,
    rows: &str,
    implementation: &str,
    records: &[Record],
    whole: impl FnOnce() -> Vec<Vec<Trial<'a>>>,
) -> Vec<Record> {
    if contract.exceptions.is_empty() && contract.rows().iter().all(|row| row.waive.is_none()) {
        return Vec::new();
    }
    // Records of a case stand side by side: one look-up for all of them.
    let mine: Vec<(&Record, Trial)> = records
        .chunk_by(|a, b| a.case == b.case)
        .filter_map(|of_case| {
            let case = contract.case(&of_case[0].case)?;
            Some((of_case, case, contract.row(implementation, case)?))
        })
        .flat_map(|(of_case, case, row)| of_case.iter().map(move |record| (record, case, row)))
        .filter(|(record, ..)| record.implementation == implementation)
        .map(|(record, case, row)| {
            let axis = record.axis.as_deref().and_then(axis::find);
            (record, Trial { case, row, judgment: record.judgment, axis })
        })
        .collect();
    let place = |trial: &Trial| (trial.case.name.clone(), trial.judgment, name(trial));
    let asked: BTreeSet<_> = mine.iter().map(|(_, trial)| place(trial)).collect();
    let planned = whole();
    let left_out: Vec<&Trial> = planned.iter().flatten().filter(|trial| !asked.contains(&place(trial))).collect();

    let mut unneeded = Vec::new();
    let mut judge = |covers: &dyn Fn(&Trial) -> bool, needs: &dyn Fn(&Verdict) -> bool, place: &str, text: &str| {
        let mut under = mine.iter().filter(|(_, trial)| covers(trial)).peekable();
        let Some((_, first)) = under.peek().copied() else { return };
        let covers_more = left_out.iter().any(|trial| covers(trial));
        if !covers_more && under.all(|(record, _)| !needs(&record.verdict)) {
            let reason = format!("{place}: nothing needs the waiver `{text}`; remove it");
            let outcome = Outcome::of(Verdict::StaleWaiver { reason });
            unneeded.push(record_of(contract, rows, implementation, first, outcome));
        }
    };
    for waiver in &contract.exceptions {
        let covers = |trial: &Trial| waiver.covers(implementation, &trial.case.name, trial.judgment, name(trial));
        // One that has expired and is still needed is red at the failure itself.
        let needs = |verdict: &Verdict| matches!(verdict, Verdict::Waived { .. } | Verdict::Fail(_));
        judge(&covers, &needs, &waiver.place, &waiver.text());
    }
    for row in contract.rows() {
        let Some(waiver) = &row.waive else { continue };
        let covers = |trial: &Trial| trial.row.place == row.place && waiver.covers(trial.judgment, name(trial));
        judge(&covers, &|verdict| matches!(verdict, Verdict::Waived { .. }), &row.place, &waiver.reason);
    }
    unneeded
}

/// The name of the axis of a trial.
fn name(trial: &Trial) -> Option<&'static str> {
    trial.axis.map(|axis| axis.name)
}
