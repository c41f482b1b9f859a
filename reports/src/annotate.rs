//! Red records as workflow commands, which GitHub shows beside a commit.

use crate::RunFolder;
use crate::describe;

/// One line for each of the first `most` red records, and one for what is left out.
pub fn annotations(folder: &RunFolder, most: usize) -> Vec<String> {
    let red: Vec<_> = folder.records.iter().filter(|record| record.verdict.is_red()).collect();
    let line = |record: &&samebits_contract::record::Record| {
        let title = format!("samebits: {} {}", record.verdict.name(), record.case);
        format!(
            "::error title={}::{}",
            property(&title),
            data(&format!("{}: {}", describe::subject(record), describe::why(record)))
        )
    };
    let mut lines: Vec<String> = red.iter().take(most).map(line).collect();
    if red.len() > most {
        lines.push(format!("::error title=samebits::{} more records are red", red.len() - most));
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
        assert!(red > 1);
        assert_eq!(annotations(&folder, 100).len(), red);
        assert_eq!(annotations(&folder, 1).len(), 2);
        folder.records[0].verdict = Verdict::Error { reason: "a\nb 100%".into() };
        let lines = annotations(&folder, 100);
        assert!(
            lines[0].starts_with("::error title=samebits%3A error ") && lines[0].ends_with("a b 100%25"),
            "{}",
            lines[0]
        );
        assert!(lines.iter().all(|line| !line.contains('\n')));
    }
}
