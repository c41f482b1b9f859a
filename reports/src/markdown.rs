//! `summary.md`: the same facts for the summary page of a CI job.

use crate::describe::{again, arguments, number, one_line, percent, red, why};
use crate::grid::{self, Unsupported};
use crate::narrow;
use crate::text::{SHOWN, cell};
use crate::{RunFolder, Summary};
use samebits_contract::record::Judgment;
use std::fmt::Write;

/// The Markdown document.
pub fn document(folder: &RunFolder) -> String {
    let RunFolder { run, records, .. } = folder;
    let summary = Summary::of(folder);
    let mut text = String::new();
    let _ = writeln!(text, "# {}\n", escaped(&run.contract_name));
    let _ = writeln!(text, "**{}**\n", escaped(&summary.headline()));
    row(&mut text, &["fact", "value"].map(String::from));
    let _ = writeln!(text, "| --- | --- |");
    row(&mut text, &["contract".into(), run.contract.clone()]);
    row(&mut text, &["rows".into(), run.rows.clone()]);
    row(&mut text, &["tool".into(), run.tool.clone()]);
    row(&mut text, &["arguments".into(), arguments(run)]);
    for (name, version) in run.plan.implementations.iter().filter(|(_, version)| !version.is_empty()) {
        row(&mut text, &[name.clone(), version.clone()]);
    }
    for (name, value) in &run.machine {
        row(&mut text, &[name.clone(), value.clone()]);
    }
    for note in narrow::notes(folder) {
        let _ = writeln!(text, "\nNote: {}", escaped(&note));
    }

    for implementation in grid::implementations(records) {
        let _ = writeln!(text, "\n## {}\n", escaped(implementation));
        let header = ["op", "in"].into_iter().chain(Judgment::ALL.map(Judgment::name)).map(String::from);
        let header: Vec<String> = header.collect();
        row(&mut text, &header);
        let _ = writeln!(text, "|{}", " --- |".repeat(header.len()));
        let mut totals = grid::ByJudgment::default();
        for ((op, dtype), counts) in grid::by_judgment(records, implementation) {
            let cells = counts.map(|c| cell(&c));
            row(&mut text, &[&[op.name.to_string(), dtype.name().into()], &cells[..]].concat());
            for (total, counts) in totals.iter_mut().zip(counts) {
                *total += counts;
            }
        }
        let cells = totals.map(|c| cell(&c));
        row(&mut text, &[&["total".to_string(), String::new()], &cells[..]].concat());
    }

    let all = grid::red(records);
    if !all.is_empty() {
        let _ = writeln!(text, "\n## Red ({} of {} shown)\n", all.len().min(SHOWN), all.len());
    }
    for (record, count) in all.iter().take(SHOWN) {
        let _ = writeln!(text, "- {}", escaped(&format!("{}: {}", red(record, *count), why(record))));
        if !again(record).is_empty() {
            let _ = writeln!(text, "  again: <code>{}</code>", escaped(&again(record)));
        }
    }

    let unsupported = grid::unsupported(records);
    if !unsupported.is_empty() {
        let (shown, all) = (unsupported.len().min(SHOWN), unsupported.len());
        let _ = writeln!(text, "\n## Unsupported ({shown} of {all} combinations shown)\n");
        row(&mut text, &["records", "implementation", "op", "dtypes", "reason"].map(String::from));
        let _ = writeln!(text, "| --- | --- | --- | --- | --- |");
    }
    for (Unsupported { implementation, op, dtype, out, reason }, count) in unsupported.iter().take(SHOWN) {
        let dtypes = format!("{dtype} -> {out}");
        row(&mut text, &[count.to_string(), (*implementation).into(), op.name.into(), dtypes, (*reason).into()]);
    }

    let accuracy = grid::accuracy(records);
    if !accuracy.is_empty() {
        let _ = writeln!(text, "\n## Accuracy against the f64 oracle\n");
        let names = [
            "implementation",
            "op",
            "dtypes",
            "samples",
            "max ulp",
            "largest p99 ulp",
            "correctly rounded",
            "of bound",
        ];
        row(&mut text, &names.map(String::from));
        let _ = writeln!(text, "| --- | --- | --- | --: | --: | --: | --: | --: |");
    }
    for ((implementation, op, dtype, out), found) in accuracy {
        row(
            &mut text,
            &[
                implementation.into(),
                op.name.into(),
                format!("{dtype} -> {out}"),
                found.samples.to_string(),
                number(found.max_ulp),
                number(found.worst_p99_ulp),
                percent(found.correctly_rounded),
                percent(found.of_bound),
            ],
        );
    }
    text
}

fn row(text: &mut String, cells: &[String]) {
    let cells: Vec<String> = cells.iter().map(|cell| escaped(cell)).collect();
    let _ = writeln!(text, "| {} |", cells.join(" | "));
}

/// `text` as it stands: one line, and nothing in it is Markdown or HTML.
fn escaped(text: &str) -> String {
    let mut safe = String::new();
    for c in one_line(text).chars() {
        match c {
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '&' => safe.push_str("&amp;"),
            '\\' | '`' | '*' | '_' | '[' | ']' | '|' | '~' | '#' | '!' => safe.extend(['\\', c]),
            // An at sign or a link would notify people or be fetched on some hosts.
            '@' => safe.push_str("&#64;"),
            _ => safe.push(c),
        }
    }
    safe.replace("://", "&#58;//")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn hostile_names_stay_text() {
        let text = document(&synthetic::folder());
        assert!(text.contains("&lt;/script&gt;&amp;\"&lt;") && !text.contains("</script>"), "{text}");
        assert!(text.contains("a\\|b"));
        let cells = |line: &str| line.replace("\\|", "").matches('|').count();
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate().filter(|(_, line)| line.starts_with("| ---")) {
            let table = lines[i + 1..].iter().take_while(|l| l.starts_with('|'));
            assert!(table.clone().count() > 0);
            assert!(table.clone().all(|l| cells(l) == cells(line)), "table at line {i}: {text}");
        }
    }

    #[test]
    fn says_versions_notes_and_how_to_ask_again() {
        let mut folder = synthetic::folder();
        folder.run.plan.implementations.insert("ours/cpu".into(), "0.1.0".into());
        folder.run.notes.push("a | note".into());
        folder.records.iter_mut().filter(|r| r.verdict.is_red()).for_each(|r| r.again = Some("samebits check".into()));
        let text = document(&folder);
        assert!(text.contains("| ours/cpu | 0.1.0 |") && text.contains("\nNote: a \\| note\n"), "{text}");
        let red = grid::red(&folder.records);
        assert_eq!(text.matches("\n  again: <code>samebits check</code>\n").count(), red.len());
        assert!(text.contains("(and 5 more for the same reason)"), "{text}");
    }

    #[test]
    fn says_the_verdict_and_the_counts_of_the_summary() {
        for folder in [synthetic::folder(), synthetic::green()] {
            let text = document(&folder);
            assert_eq!(text.lines().nth(2).unwrap(), format!("**{}**", escaped(&Summary::of(&folder).headline())));
        }
    }
}
