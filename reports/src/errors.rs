//! Where the errors are: a heat map of them by case and dtypes, how they are distributed, and which kernels ran.

use crate::describe::number;
use crate::html::escaped;
use samebits_contract::record::{Measure, Record};
use samebits_contract::tensor::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Steps of the heat map: shares of the bound from which on a cell has the next colour.
const STEPS: [f64; 5] = [0.1, 0.25, 0.5, 0.75, 1.0];

/// Bars of a distribution: shares of the bound, the last one beyond it.
const BINS: usize = 11;

fn step(share: f64) -> usize {
    // What cannot be compared is worst.
    if share.is_nan() {
        STEPS.len()
    } else {
        STEPS.iter().filter(|step| share > **step || (**step < 1.0 && share == **step)).count()
    }
}

/// The section's content; says so when nothing was measured.
pub fn section(records: &[Record]) -> String {
    let measured: Vec<(&Record, &Measure)> = records.iter().filter_map(|r| Some((r, r.measure.as_ref()?))).collect();
    if measured.is_empty() {
        return "<p>No record carries a measurement.</p>".into();
    }
    let mut html = String::from("<p class=\"legend\">");
    for (level, text) in ["below 0.1", "0.1", "0.25", "0.5", "0.75", "above 1"].iter().enumerate() {
        let _ = write!(html, "<span><b class=\"heat{level}\">{text}</b></span>");
    }
    html.push_str("<span>of the bound; a cell shows the largest error in ulp</span></p>");
    let implementations: BTreeSet<&str> = measured.iter().map(|(r, _)| r.implementation.as_str()).collect();
    for implementation in implementations {
        let mine: Vec<_> = measured.iter().filter(|(r, _)| r.implementation == implementation).copied().collect();
        html.push_str(&distributions(implementation, &mine));
        html.push_str(&heat(implementation, &mine));
    }
    html
}

/// One row of bars per op: how many measurements lie at which share of their bound.
fn distributions(implementation: &str, measured: &[(&Record, &Measure)]) -> String {
    let mut ops: BTreeMap<&str, [usize; BINS]> = BTreeMap::new();
    for (record, measure) in measured {
        let share = measure.of_bound;
        let bin = if share.is_nan() || share > 1.0 { BINS - 1 } else { ((share * 10.0) as usize).min(BINS - 2) };
        ops.entry(&record.op).or_default()[bin] += 1;
    }
    let mut html = format!(
        "<div class=\"scroll\"><table class=\"distribution\"><caption>{}: how far errors reach into their bounds</caption><thead><tr>\
         <th scope=\"col\">op</th>",
        escaped(implementation)
    );
    for bin in 0..BINS {
        let name = if bin == BINS - 1 { "beyond".to_string() } else { format!("{}%", 10 * (bin + 1)) };
        let _ = write!(html, "<th scope=\"col\">{name}</th>");
    }
    html.push_str("</tr></thead><tbody>");
    for (op, bins) in ops {
        let most = bins.iter().copied().max().unwrap_or(1).max(1);
        let _ = write!(html, "<tr><th scope=\"row\">{}</th>", escaped(op));
        for (bin, count) in bins.iter().enumerate() {
            let height = (100 * count).div_ceil(most);
            let over = if bin == BINS - 1 && *count > 0 { " over" } else { "" };
            let text = if *count > 0 { count.to_string() } else { String::new() };
            let _ = write!(
                html,
                "<td><i class=\"column{over}\" aria-hidden=\"true\"><b style=\"height:{height}%\"></b></i><span>{text}</span></td>"
            );
        }
        html.push_str("</tr>");
    }
    html + "</tbody></table></div>"
}

/// By input and output dtype: the largest error in ulp, and the largest share of a bound.
type Cells = BTreeMap<(DType, DType), (f64, f64)>;

/// Cases by op and shape against dtypes: the largest error in ulp, coloured by its share of the bound.
fn heat(implementation: &str, measured: &[(&Record, &Measure)]) -> String {
    let mut columns: BTreeSet<(_, _)> = BTreeSet::new();
    let mut rows: BTreeMap<(&str, &str), Cells> = BTreeMap::new();
    for (record, measure) in measured {
        // `<op>/<dtype>/<stem>-<fill>-<out>`
        let stem = record.case.rsplit('/').next().unwrap_or(&record.case);
        let stem = stem.rsplit_once('-').map_or(stem, |(stem, _)| stem);
        let column = (record.dtype, record.out);
        columns.insert(column);
        let cell = rows.entry((&record.op, stem)).or_default().entry(column).or_insert((0.0, 0.0));
        let worse = |a: f64, b: f64| if b.is_nan() || b > a { b } else { a };
        *cell = (worse(cell.0, measure.max_ulp), worse(cell.1, measure.of_bound));
    }
    let mut html = format!(
        "<details><summary>{}: largest error of {} cases by shape and dtypes</summary><div class=\"scroll\"><table class=\"heat\">\
         <thead><tr><th scope=\"col\">op</th><th scope=\"col\">case</th>",
        escaped(implementation),
        rows.len()
    );
    for (dtype, out) in &columns {
        let _ = write!(html, "<th scope=\"col\">{dtype} → {out}</th>");
    }
    html.push_str("</tr></thead><tbody>");
    for ((op, stem), cells) in rows {
        let _ = write!(html, "<tr><th scope=\"row\">{}</th><td>{}</td>", escaped(op), escaped(stem));
        for column in &columns {
            match cells.get(column) {
                None => html.push_str("<td class=\"none\">·</td>"),
                Some((ulp, share)) => {
                    let title = format!("{} of the bound", number(*share));
                    let _ = write!(
                        html,
                        "<td class=\"number heat{}\" title=\"{title}\">{}</td>",
                        step(*share),
                        number(*ulp)
                    );
                }
            }
        }
        html.push_str("</tr>");
    }
    html + "</tbody></table></div></details>"
}

/// Which kernels ran, by op and what was asked for: the axis `isa` where it was varied, else the base.
pub fn kernels(records: &[Record]) -> String {
    let mut ran: BTreeMap<(&str, &str, String), BTreeMap<&str, usize>> = BTreeMap::new();
    for record in records.iter().filter(|record| !record.kernel.is_empty()) {
        let dtypes = format!("{} → {}", record.dtype, record.out);
        *ran.entry((&record.implementation, &record.op, dtypes)).or_default().entry(&record.kernel).or_insert(0) += 1;
    }
    if ran.is_empty() {
        return "<p>No answer names its kernel.</p>".into();
    }
    let mut html = String::from(
        "<div class=\"scroll\"><table class=\"kernels\"><thead><tr><th scope=\"col\">implementation</th><th scope=\"col\">asked for</th>\
         <th scope=\"col\">in → out</th><th scope=\"col\">ran, by its own account (records)</th></tr></thead><tbody>",
    );
    for ((implementation, op, dtypes), kernels) in ran {
        let list: Vec<String> =
            kernels.iter().map(|(kernel, count)| format!("{} ({count})", escaped(kernel))).collect();
        let _ = write!(
            html,
            "<tr><td>{}</td><th scope=\"row\">{}</th><td>{dtypes}</td><td class=\"mono\">{}</td></tr>",
            escaped(implementation),
            escaped(op),
            list.join(", ")
        );
    }
    html + "</tbody></table></div>"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn steps_and_cells() {
        assert_eq!([0.0, 0.1, 0.3, 0.5, 0.8, 1.0, 1.1, f64::NAN].map(step), [0, 1, 2, 3, 4, 4, 5, 5]);
        let mut records = synthetic::folder().records;
        let measured = records.iter().filter(|r| r.measure.is_some()).count();
        assert!(measured > 0);
        let html = section(&records);
        assert!(html.contains("class=\"heat\"") && html.contains("class=\"distribution\""));
        let hot = records.iter_mut().find(|r| r.measure.is_some()).unwrap();
        hot.measure.as_mut().unwrap().of_bound = 7.0;
        hot.op = "<script>".into();
        let html = section(&records);
        assert!(html.contains("number heat5\"") && html.contains("column over") && !html.contains("<script>"));
        records.iter_mut().for_each(|r| r.measure = None);
        assert!(section(&records).contains("No record"));
        assert!(kernels(&records).contains("&lt;script&gt;"));
    }
}
