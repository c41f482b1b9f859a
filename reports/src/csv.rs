//! Every record as a line of a table: `records.csv`, RFC 4180, with a header line.

use crate::RunFolder;
use samebits_contract::verdict::{Evidence, Verdict};
use std::fmt::Write;

/// The columns, in order; `docs/METHOD.md` says what they hold.
const COLUMNS: &str = "implementation,op,class,dtype,out,case,judgment,axis,setting,verdict,kernel,samples,max_ulp,p99_ulp,\
correctly_rounded,max_abs,of_bound,output,index,expected,found,expected_bits,found_bits,ulp,wrong,compared,reason,again,seconds\r\n";

/// The document.
pub fn document(folder: &RunFolder) -> String {
    let mut csv = COLUMNS.to_string();
    for r in &folder.records {
        let mut fields: Vec<String> = vec![
            r.implementation.clone(),
            r.op.clone(),
            r.class.clone(),
            r.dtype.to_string(),
            r.out.to_string(),
            r.case.clone(),
            r.judgment.name().into(),
            r.axis.clone().unwrap_or_default(),
            r.setting.clone().unwrap_or_default(),
            r.verdict.name().into(),
            r.kernel.clone(),
        ];
        match &r.measure {
            None => fields.extend(std::iter::repeat_n(String::new(), 6)),
            Some(m) => {
                fields.push(m.samples.to_string());
                fields
                    .extend([m.max_ulp, m.p99_ulp, m.correctly_rounded, m.max_abs, m.of_bound].map(|v| v.to_string()));
            }
        }
        let empty = Evidence::default();
        let (evidence, reason) = match &r.verdict {
            Verdict::Fail(evidence) => (evidence.as_ref(), evidence.message.as_str()),
            Verdict::Pass => (&empty, ""),
            Verdict::Waived { reason }
            | Verdict::StaleWaiver { reason }
            | Verdict::Unsupported { reason }
            | Verdict::Error { reason }
            | Verdict::Untested { reason } => (&empty, reason.as_str()),
        };
        let failed = matches!(r.verdict, Verdict::Fail(_));
        let number = |n: usize| if failed { n.to_string() } else { String::new() };
        fields.extend([
            evidence.output.clone(),
            number(evidence.index),
            evidence.expected.clone(),
            evidence.found.clone(),
            evidence.expected_bits.clone(),
            evidence.found_bits.clone(),
            evidence.ulp.map_or(String::new(), |ulp| ulp.to_string()),
            number(evidence.count),
            number(evidence.total),
            reason.to_string(),
            r.again.clone().unwrap_or_default(),
            r.seconds.to_string(),
        ]);
        let line: Vec<String> = fields.iter().map(|field| quoted(field)).collect();
        let _ = write!(csv, "{}\r\n", line.join(","));
    }
    csv
}

fn quoted(field: &str) -> String {
    // A spreadsheet takes these for formulas.
    let formula = field.starts_with(['=', '+', '@']) || (field.starts_with('-') && field.parse::<f64>().is_err());
    if !formula && !field.contains([',', '"', '\n', '\r']) {
        return field.to_string();
    }
    format!("\"{}{}\"", if formula { "'" } else { "" }, field.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn every_record_is_a_line_of_as_many_fields() {
        let mut folder = synthetic::folder();
        folder.records[0].kernel = "a \"b\", c\nd".into();
        folder.records[1].kernel = "=1+1".into();
        let csv = document(&folder);
        assert!(csv.contains("\"a \"\"b\"\", c\nd\"") && csv.contains("\"'=1+1\""), "{csv}");
        let (mut fields, mut lines, mut inside) = (1, Vec::new(), false);
        for c in csv.chars() {
            match c {
                '"' => inside = !inside,
                ',' if !inside => fields += 1,
                '\n' if !inside => {
                    lines.push(fields);
                    fields = 1;
                }
                _ => {}
            }
        }
        assert_eq!(lines.len(), folder.records.len() + 1);
        assert!(lines.iter().all(|&fields| fields == lines[0]), "{lines:?}");
    }
}
