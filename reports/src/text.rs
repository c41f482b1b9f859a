//! The plain table that ends a run on a terminal. Readable without colour.

use crate::describe::{again, one_line, red, why};
use crate::grid::{self, Unsupported};
use crate::narrow;
use crate::{Counts, RunFolder, Summary};
use samebits_contract::record::Judgment;
use std::fmt::Write;

/// How many red records are written out in full, and how many unsupported combinations; the rest is counted.
pub(crate) const SHOWN: usize = 10;

/// The table of op x input dtype x judgment, one per implementation, then the first red records with their evidence,
/// what is unsupported and why, and the verdict as the last line.
pub fn table(folder: &RunFolder) -> String {
    let RunFolder { run, records, .. } = folder;
    let mut text = String::new();
    let digest = run.contract.get(..12).unwrap_or(&run.contract);
    let _ = writeln!(text, "contract {} ({digest}), rows {}", one_line(&run.contract_name), one_line(&run.rows));

    for implementation in grid::implementations(records) {
        let mut rows = vec![vec!["op".to_string(), "in".to_string()]];
        rows[0].extend(Judgment::ALL.map(|j| j.name().to_string()));
        let mut totals = grid::ByJudgment::default();
        for ((op, dtype), counts) in grid::by_judgment(records, implementation) {
            let mut row = vec![one_line(op.name), dtype.name().to_string()];
            row.extend(counts.iter().map(cell));
            rows.push(row);
            for (total, counts) in totals.iter_mut().zip(counts) {
                *total += counts;
            }
        }
        let mut row = vec!["total".to_string(), String::new()];
        row.extend(totals.iter().map(total));
        rows.push(row);
        let _ = writeln!(text, "\n{}", one_line(implementation));
        aligned(&mut text, &rows);
    }

    let all = grid::red(records);
    if !all.is_empty() {
        let _ = writeln!(text, "\nred{}", of(all.len()));
    }
    for (record, count) in all.iter().take(SHOWN) {
        let _ = writeln!(text, "  {}\n      {}", red(record, *count), why(record));
        if !again(record).is_empty() {
            let _ = writeln!(text, "      again: {}", again(record));
        }
    }

    let unsupported = grid::unsupported(records);
    if !unsupported.is_empty() {
        let _ = writeln!(text, "\nunsupported{}", of(unsupported.len()));
    }
    for (Unsupported { implementation, op, dtype, out, reason }, count) in unsupported.iter().take(SHOWN) {
        let line = one_line(&format!("{count} x {} {dtype} -> {out}, {implementation}: {reason}", op.name));
        let _ = writeln!(text, "  {line}");
    }

    let notes = narrow::notes(folder);
    if !notes.is_empty() {
        let _ = writeln!(text);
    }
    for note in notes {
        let _ = writeln!(text, "note: {}", one_line(&note));
    }

    let _ = writeln!(text, "\n{}", Summary::of(folder).headline());
    text
}

/// Says how many there are, and that only the first are shown where that is so.
fn of(count: usize) -> String {
    if count > SHOWN { format!(" (first {SHOWN} of {count})") } else { format!(" ({count})") }
}

/// `ok 96`, `RED 93 pass, 3 fail`, `n/a 12 unsupported`, or `-` where there is no record.
pub(crate) fn cell(counts: &Counts) -> String {
    match counts {
        _ if counts.total() == 0 => "-".into(),
        _ if counts.total() == counts.pass => format!("ok {}", counts.pass),
        _ if counts.red() > 0 => format!("RED {counts}"),
        _ if counts.judged() > 0 => format!("ok {counts}"),
        _ => format!("n/a {counts}"),
    }
}

/// The same for a column of cells: how many, since the last line says which verdicts.
fn total(counts: &Counts) -> String {
    let all = counts.total();
    match counts {
        _ if all == 0 => "-".into(),
        _ if counts.red() > 0 => format!("RED {} of {all}", counts.red()),
        _ if counts.pass == all => format!("ok {all}"),
        _ if counts.judged() > 0 => format!("ok {} of {all}", counts.pass),
        _ => format!("n/a {all}"),
    }
}

fn aligned(text: &mut String, rows: &[Vec<String>]) {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    for row in rows {
        let line: String = row.iter().zip(&widths).map(|(cell, &width)| format!("  {cell:width$}")).collect();
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;
    use samebits_contract::verdict::Verdict;

    #[test]
    fn shows_every_verdict_and_the_full_evidence() {
        let folder = synthetic::folder();
        let text = table(&folder);
        let counts = Counts::of(&folder.records);
        assert!(text.ends_with(&format!("{}\n", Summary::of(&folder).headline())));
        for (name, count) in counts.by_name() {
            assert!(count > 0 && text.contains(&format!("{count} {name}")), "{name}: {text}");
        }
        assert!(text.contains("y[2, 1] (index 17): base 1 (0x3f80), found 1.0078125 (0x3f81); 1 ulp; 3 of 512"));
        assert!(text.contains("x gemm fp16 -> bf16, ours/cpu: "), "{text}");
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn totals_are_the_sums_of_their_columns() {
        let folder = synthetic::folder();
        let text = table(&folder);
        let totals = text.lines().filter(|line| line.trim_start().starts_with("total")).count();
        assert_eq!(totals, grid::implementations(&folder.records).len());
        let green = synthetic::green();
        let line = table(&green).lines().find(|line| line.trim_start().starts_with("total")).unwrap().to_string();
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>(),
            ["total", "ok", "4", "ok", "6", "ok", "2", "-", "-", "-"]
        );
    }

    #[test]
    fn a_long_list_says_that_it_is_cut() {
        let mut folder = synthetic::green();
        let record = folder.records[0].clone();
        for i in 0..SHOWN + 1 {
            let mut record = record.clone();
            record.case = format!("case-{i}");
            record.verdict = Verdict::Error { reason: format!("reason-{i}") };
            folder.records.push(record);
        }
        let text = table(&folder);
        assert!(text.contains("red (first 10 of 11)"));
        assert!(text.contains("reason-9") && !text.contains("reason-10"));
    }

    #[test]
    fn an_empty_run_is_red() {
        let mut folder = synthetic::green();
        folder.records.clear();
        assert!(table(&folder).contains("RED: 0 records where 12 were planned"));
        assert!(table(&folder).contains("nothing was tested"));
    }
}
