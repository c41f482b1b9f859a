//! Red records as workflow commands, which GitHub shows beside a commit.

use crate::RunFolder;
use crate::{describe, grid};

/// One line for each of the first `most` red records, and one for what is left out.
pub fn annotations(folder: &RunFolder, most: usize) -> Vec<String> {
    let red = grid::red(&folder.records);
    let line = |(record, count): &(&samebits_contract::record::Record, usize)| {
        let title = format!("samebits: {} {}", record.verdict.name(), record.case);
        let again = record.again.as_ref().map(|_| format!("\nagain: {}", describe::again(record))).unwrap_or_default();
        let text = format!("{}: {}{again}", describe::red(record, *count), describe::why(record));
        format!("::error title={}::{}", property(&title), data(&text))
    };
    let mut lines: Vec<String> = red.iter().take(most).map(line).collect();
    let rest: usize = red.iter().skip(most).map(|(_, count)| count).sum();
    if rest > 0 {
        lines.push(format!("::error title=samebits::{rest} more records are red"));
    }
    lines
}

fn data(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;
    use samebits_contract::verdict::Verdict;

    #[test]
    fn red_records_are_annotated() {
        let mut folder = synthetic::folder();
        let red = folder.records.iter().filter(|record| record.verdict.is_red()).count();
        let all = annotations(&folder, 100);
        // Errors of one reason stand together, and so does what is untested for one.
        assert!(red > all.len() && all.len() == grid::red(&folder.records).len());
        let more: Vec<&String> = all.iter().filter(|line| line.contains("more for the same reason")).collect();
        assert!(more.len() == 2 && more[0].contains("(and 5 more") && more[1].contains("(and 6 more"), "{more:?}");
        assert_eq!(
            annotations(&folder, 1).last().unwrap(),
            &format!("::error title=samebits::{} more records are red", red - 1)
        );
        folder.records[0].again = Some("samebits check".into());
        folder.records[0].verdict = Verdict::Error { reason: "a\nb 100%".into() };
        let lines = annotations(&folder, 100);
        assert!(
            lines[0].starts_with("::error title=samebits%3A error ")
                && lines[0].ends_with("a b 100%25%0Aagain: samebits check"),
            "{}",
            lines[0]
        );
        assert!(lines.iter().all(|line| !line.contains('\n')));
    }
}
