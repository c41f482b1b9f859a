//! Where the errors are: how they are spread, a heat map of them by case and dtypes, and which kernels ran.

use crate::describe::number;
use crate::grid;
use crate::html::{escaped, op_header};
use samebits_contract::record::{Measure, Record, Spread};
use samebits_contract::tensor::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Steps of the heat map: shares of the bound from which on a cell has the next colour.
const STEPS: [f64; 5] = [0.1, 0.25, 0.5, 0.75, 1.0];

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
        html.push_str(&heat(implementation, &mine));
    }
    html
}

/// For every op and its dtypes, how many elements have which error: in ulp, and as a share of the bound.
pub fn pictures(records: &[Record]) -> String {
    let groups = grid::accuracy(records);
    let with_spread = groups.iter().filter(|(_, found)| !found.spread.is_empty());
    let implementations: BTreeSet<&str> =
        with_spread.clone().map(|((implementation, ..), _)| *implementation).collect();
    if implementations.is_empty() {
        return "<p>No record says how its errors are spread.</p>".into();
    }
    let mut html = String::new();
    for implementation in implementations {
        let _ = write!(
            html,
            "<div class=\"scroll\"><table class=\"spread\"><caption>{}</caption><thead><tr><th scope=\"col\">op</th>\
             <th scope=\"col\">in → out</th><th scope=\"col\">error in ulp{}</th><th scope=\"col\">share of the bound{}</th></tr></thead><tbody>",
            escaped(implementation),
            scale(&Spread::ULP),
            scale(&Spread::SHARE),
        );
        for ((_, op, dtype, out), found) in with_spread.clone().filter(|((name, ..), _)| *name == implementation) {
            let Spread { ulp, share } = &found.spread;
            let _ = write!(
                html,
                "<tr>{}<td>{dtype} → {out}</td><td>{}</td><td>{}</td></tr>",
                op_header(*op),
                bars(ulp, &Spread::ULP, "ulp", false),
                bars(share, &Spread::SHARE, "of the bound", true)
            );
        }
        html.push_str("</tbody></table></div>");
    }
    html
}

/// The upper ends of the classes, below the header of a column of [`bars`].
fn scale(ends: &[f64]) -> String {
    let mut html = String::from("<span class=\"scale\">");
    for end in ends {
        let _ = write!(html, "<small>{end}</small>");
    }
    html + "<small>more</small></span>"
}

/// A bar for each class of errors. What lies beyond the last end is red where that is a failure.
fn bars(counts: &[u64], ends: &[f64], unit: &str, is_bound: bool) -> String {
    let total: u64 = counts.iter().sum();
    let class = |bin: usize| match ends.get(bin) {
        Some(0.0) => format!("no error, 0 {unit}"),
        Some(end) => format!("up to {end} {unit}"),
        None => format!("more than {} {unit}", ends[bin - 1]),
    };
    // For those who do not see the picture, and in print: the counts.
    let words: Vec<String> = (0..counts.len())
        .filter(|&bin| counts[bin] > 0)
        .map(|bin| format!("{}: {}", class(bin), counts[bin]))
        .collect();
    let words = words.join("; ");
    let mut html = format!("<span class=\"bars\" role=\"img\" aria-label=\"{words}\" title=\"{words}\">");
    for (bin, &count) in counts.iter().enumerate() {
        let over = if is_bound && bin == ends.len() && count > 0 { " class=\"over\"" } else { "" };
        let _ = write!(html, "<b{over} style=\"height:{:.0}%\"></b>", height(count, total));
    }
    html + "</span>"
}

/// The height in percent of `count` of `total`: the square root of the share, at least 6, so that one element is seen.
fn height(count: u64, total: u64) -> f64 {
    if count == 0 { 0.0 } else { (100.0 * (count as f64 / total as f64).sqrt()).max(6.0) }
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
        assert!(html.contains("class=\"heat\""));
        let hot = records.iter_mut().find(|r| r.measure.is_some()).unwrap();
        hot.measure.as_mut().unwrap().of_bound = 7.0;
        hot.op = "<script>".into();
        let html = section(&records);
        assert!(html.contains("number heat5\"") && !html.contains("<script>"));
        records.iter_mut().for_each(|r| r.measure = None);
        assert!(section(&records).contains("No record"));
        assert!(kernels(&records).contains("&lt;script&gt;"));
    }

    #[test]
    fn pictures_count_every_element_and_mark_what_is_beyond_the_bound() {
        let mut records = synthetic::folder().records;
        let html = pictures(&records);
        assert!(html.contains("no error, 0 ulp: 2; up to 0.125 ulp: 256; up to 0.25 ulp: 256"), "{html}");
        assert!(
            html.contains("up to 0.1 of the bound: 1020; up to 1 of the bound: 4") && !html.contains("class=\"over\"")
        );
        let measure = records.iter_mut().find_map(|r| r.measure.as_mut()).unwrap();
        measure.spread.count(None, f64::NAN);
        assert!(pictures(&records).contains("class=\"over\""));
        records.iter_mut().for_each(|r| r.measure = None);
        assert!(pictures(&records).contains("No record"));
        assert_eq!([height(0, 9), height(9, 9), height(1, 4), height(1, u64::MAX)], [0.0, 100.0, 50.0, 6.0]);
    }

    /// A gradient follows the op whose gradient it is, and is marked.
    #[test]
    fn gradients_stand_below_their_op() {
        let mut records: Vec<Record> =
            synthetic::folder().records.into_iter().filter(|r| r.measure.is_some()).collect();
        let mut of_ops = Vec::new();
        for op in ["rope_backward", "softmax", "gemm_dx", "rope", "gemm", "linear_logprob"] {
            records[0].op = op.into();
            of_ops.push(records[0].clone());
        }
        let html = pictures(&of_ops);
        let order = ["gemm", "gemm_dx", "linear_logprob", "rope", "rope_backward", "softmax"]
            .map(|op| html.find(&format!(">{op}</th>")).unwrap());
        assert!(order.is_sorted(), "{order:?}");
        assert_eq!(html.matches("class=\"gradient\"").count(), 2);
    }
}
