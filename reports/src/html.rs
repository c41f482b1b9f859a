//! `report.html`: one file that needs nothing else, to look through a run record by record.
//!
//! What the page claims (banner, matrix, accuracy, unsupported combinations) is written here, so that it shows without
//! scripts and is tested in Rust. Records are embedded as JSON; `page/page.js` lists and filters them.

use crate::describe::{arguments, number, percent};
use crate::grid::{self, Column, Unsupported};
use crate::{Counts, RunFolder, Summary};
use samebits_contract::record::{Judgment, Record};
use samebits_contract::verdict::Verdict;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

/// The page.
pub fn document(folder: &RunFolder) -> String {
    let summary = Summary::of(folder);
    let parts = BTreeMap::from([
        ("css", include_str!("page/page.css").to_string()),
        ("js", include_str!("page/page.js").to_string()),
        ("title", escaped(&format!("{} {}", word(&summary).1, folder.run.contract_name))),
        ("name", escaped(&folder.run.contract_name)),
        ("subtitle", escaped(&subtitle(folder))),
        ("banner", banner(&summary)),
        ("notes", notes(folder)),
        ("facts", facts(folder)),
        ("matrix", matrix(&folder.records)),
        ("accuracy", accuracy(&folder.records)),
        ("pictures", crate::errors::pictures(&folder.records)),
        ("errors", crate::errors::section(&folder.records)),
        ("kernels", crate::errors::kernels(&folder.records)),
        ("unsupported", unsupported(&folder.records)),
        ("data", data(&folder.records)),
    ]);
    filled(include_str!("page/page.html"), &parts)
}

/// `template` with each `{{name}}` replaced once; what is put in is not looked at again.
fn filled(template: &str, parts: &BTreeMap<&str, String>) -> String {
    let mut page = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, after) = after.split_once("}}").expect("the template closes its braces");
        page.push_str(before);
        page.push_str(&parts[name]);
        rest = after;
    }
    page + rest
}

/// A sign, the verdict and its colour.
fn word(summary: &Summary) -> (&'static str, &'static str, &'static str) {
    match (summary.is_green(), &summary.absent) {
        (false, _) => ("✗", "Red", "red"),
        (true, None) => ("✓", "Green", "green"),
        (true, Some(_)) => ("–", "Not tested", "grey"),
    }
}

fn banner(summary: &Summary) -> String {
    let Summary { counts, problems, absent } = summary;
    let (sign, word, colour) = word(summary);
    let mut html = format!("<section class=\"banner {colour}\"><h2>{sign} {word}</h2>");
    let _ = write!(html, "<p>{}</p>", summary.red_line());
    for problem in problems.iter().chain(absent) {
        let _ = write!(html, "<p><strong>{}</strong></p>", escaped(problem));
    }
    html.push_str("<ul class=\"counts\">");
    for (name, count) in counts.by_name().iter().filter(|(_, count)| *count > 0) {
        let _ = write!(html, "<li><b>{count}</b> {name}</li>");
    }
    html + "</ul></section>"
}

fn subtitle(folder: &RunFolder) -> String {
    let run = &folder.run;
    let digest = run.contract.get(..12).unwrap_or(&run.contract);
    // Who was judged, with the version that its own command told.
    let versioned = |name: &str| match run.plan.implementations.get(name).filter(|version| !version.is_empty()) {
        Some(version) => format!("{name} ({version})"),
        None => name.to_string(),
    };
    let implementations: Vec<String> = grid::implementations(&folder.records).into_iter().map(versioned).collect();
    format!("{} · rows {} · contract SHA-256 {digest}… · {}", implementations.join(", "), run.rows, utc(run.started))
}

fn notes(folder: &RunFolder) -> String {
    crate::narrow::notes(folder).iter().map(|note| format!("<p class=\"note\">Note: {}</p>", escaped(note))).collect()
}

fn facts(folder: &RunFolder) -> String {
    let run = &folder.run;
    let mut facts = vec![
        ("contract", run.contract_name.clone()),
        ("contract SHA-256", run.contract.clone()),
        ("rows", run.rows.clone()),
        ("implementations", grid::implementations(&folder.records).into_iter().collect::<Vec<_>>().join(", ")),
        ("tool", run.tool.clone()),
        ("arguments", arguments(run)),
        ("started", utc(run.started)),
        ("wall time", if run.complete { format!("{:.1} s", run.seconds) } else { "not complete".into() }),
    ];
    let versions = run.plan.implementations.iter().filter(|(_, version)| !version.is_empty());
    facts.extend(versions.map(|(name, version)| (name.as_str(), version.clone())));
    facts.push(("seed", run.plan.seed.to_string()));
    facts.extend(run.machine.iter().map(|(name, value)| (name.as_str(), value.clone())));
    let mut html = String::new();
    for (name, value) in facts {
        let _ = write!(html, "<div><dt>{}</dt><dd>{}</dd></div>", escaped(name), escaped(&value));
    }
    html
}

fn matrix(records: &[Record]) -> String {
    let columns = grid::columns(records);
    let mut html = String::new();
    for implementation in grid::implementations(records) {
        let _ = write!(
            html,
            "<div class=\"scroll\"><table class=\"matrix\"><caption>{}</caption><thead><tr><th scope=\"col\">op</th>",
            escaped(implementation)
        );
        for (judgment, axis) in &columns {
            let axis = axis.map(|axis| format!("<br><span>{}</span>", escaped(axis))).unwrap_or_default();
            let _ = write!(html, "<th scope=\"col\">{}{axis}</th>", judgment.name());
        }
        html.push_str("</tr></thead><tbody>");
        // What it offers before what it does not.
        let offers = |row: &BTreeMap<Column, Counts>| row.values().any(|counts| counts.judged() + counts.error > 0);
        let (offered, others): (Vec<_>, Vec<_>) =
            grid::by_axis(records, implementation).into_iter().partition(|(_, row)| offers(row));
        for (op, row) in offered.into_iter().chain(others) {
            let _ = write!(html, "<tr>{}", op_header(op));
            for column in &columns {
                html.push_str(&cell(implementation, op.name, column, row.get(column)));
            }
            html.push_str("</tr>");
        }
        html.push_str("</tbody></table></div>");
    }
    html
}

/// The header of an op's row; a gradient stands behind its forward and says what it is.
pub(crate) fn op_header(op: grid::Op) -> String {
    let class = if op.is_gradient { " class=\"gradient\" title=\"a gradient\"" } else { "" };
    format!("<th scope=\"row\"{class}>{}</th>", escaped(op.name))
}

fn cell(implementation: &str, op: &str, column: &Column, counts: Option<&Counts>) -> String {
    let Some(counts) = counts else {
        return "<td class=\"none\"><span aria-label=\"no records\">·</span></td>".into();
    };
    let (colour, text) = match counts {
        _ if counts.red() > 0 => ("red", format!("✗ {}/{}", counts.red(), counts.total())),
        _ if counts.judged() == 0 => ("grey", format!("– {}", counts.total())),
        _ if counts.waived > 0 => ("amber", format!("≈ {}/{}", counts.waived, counts.total())),
        _ if counts.unsupported > 0 => ("green", format!("✓ {}/{}", counts.pass, counts.total())),
        _ => ("green", format!("✓ {}", counts.total())),
    };
    let (judgment, axis) = column;
    let name = format!("{op}, {}{}: {counts}", judgment.name(), axis.map(|a| format!(" {a}")).unwrap_or_default());
    format!(
        "<td class=\"{colour}\"><button type=\"button\" data-implementation=\"{}\" data-op=\"{}\" data-judgment=\"{}\"{} \
         aria-label=\"{name}\" title=\"{name}\">{text}</button></td>",
        escaped(implementation),
        escaped(op),
        judgment.name(),
        axis.map(|axis| format!(" data-axis=\"{}\"", escaped(axis))).unwrap_or_default(),
        name = escaped(&name),
    )
}

fn accuracy(records: &[Record]) -> String {
    let groups = grid::accuracy(records);
    if groups.is_empty() {
        return "<p>No record carries a measurement.</p>".into();
    }
    let one = grid::implementations(records).len() == 1;
    let mut html = String::from("<div class=\"scroll\"><table class=\"accuracy\"><thead><tr>");
    if !one {
        html.push_str("<th scope=\"col\">implementation</th>");
    }
    html.push_str(
        "<th scope=\"col\">op</th><th scope=\"col\">in → out</th><th scope=\"col\">samples</th>\
         <th scope=\"col\">max ulp</th><th scope=\"col\">largest p99 ulp</th>\
         <th scope=\"col\">correctly rounded</th><th scope=\"col\">largest error / bound</th></tr></thead><tbody>",
    );
    for ((implementation, op, dtype, out), found) in groups {
        html.push_str("<tr>");
        if !one {
            let _ = write!(html, "<td>{}</td>", escaped(implementation));
        }
        let _ = write!(
            html,
            "{}<td>{dtype} → {out}</td><td class=\"number\">{}</td><td class=\"number\">{}</td>\
             <td class=\"number\">{}</td>{}{}</tr>",
            op_header(op),
            found.samples,
            number(found.max_ulp),
            number(found.worst_p99_ulp),
            bar(found.correctly_rounded, false),
            bar(found.of_bound, found.of_bound.is_nan() || found.of_bound > 1.0),
        );
    }
    html + "</tbody></table></div>"
}

/// A share as number and bar; the bar ends at 1, the number does not.
fn bar(share: f64, over: bool) -> String {
    let width = if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) * 100.0 };
    let class = if over { "bar over" } else { "bar" };
    format!(
        "<td class=\"number\"><div class=\"{class}\"><span>{}</span><i aria-hidden=\"true\"><b style=\"width:{width:.2}%\"></b></i></div></td>",
        escaped(&percent(share))
    )
}

fn unsupported(records: &[Record]) -> String {
    let groups = grid::unsupported(records);
    if groups.is_empty() {
        return "<p>No record is unsupported.</p>".into();
    }
    let mut html = String::from(
        "<div class=\"scroll\"><table class=\"unsupported\"><thead><tr><th scope=\"col\">records</th>\
         <th scope=\"col\">implementation</th><th scope=\"col\">op</th><th scope=\"col\">in → out</th>\
         <th scope=\"col\">reason</th></tr></thead><tbody>",
    );
    for (Unsupported { implementation, op, dtype, out, reason }, count) in groups {
        let _ = write!(
            html,
            "<tr><td class=\"number\">{count}</td><td>{}</td><th scope=\"row\">{}</th><td>{dtype} → {out}</td><td>{}</td></tr>",
            escaped(implementation),
            escaped(op.name),
            escaped(reason)
        );
    }
    html + "</tbody></table></div>"
}

/// Records as JSON: strings once in a table, a record as an array of numbers into it, in the order of `columns`.
fn data(records: &[Record]) -> String {
    let mut strings = Strings::default();
    let rows: Vec<Value> = records
        .iter()
        .map(|r| {
            let detail = match &r.verdict {
                Verdict::Pass => Value::Null,
                Verdict::Fail(evidence) => json!(evidence),
                Verdict::Waived { reason }
                | Verdict::StaleWaiver { reason }
                | Verdict::Unsupported { reason }
                | Verdict::Error { reason }
                | Verdict::Untested { reason } => json!(strings.index(reason)),
            };
            let measure = r
                .measure
                .as_ref()
                .map(|m| json!([m.samples, m.max_ulp, m.p99_ulp, m.correctly_rounded, m.max_abs, m.of_bound]));
            let chain = r.chain.as_ref().map(|c| {
                json!([c.samples, c.rms, c.max, c.largest, c.tokens, c.max_dlogp, c.approx_kl, c.clip_fraction])
            });
            let gradient = r.gradient.as_ref().map(|g| {
                let of_recorded = g.error_of_recorded.max(g.sketch_of_recorded);
                json!([g.parameters, g.batches, g.error_of_length, of_recorded, g.max_dlogp, g.max_dloss])
            });
            let mut index = |text: &str| strings.index(text);
            json!([
                index(&r.implementation),
                index(&r.op),
                index(&r.class),
                index(r.dtype.name()),
                index(r.out.name()),
                index(&r.case),
                index(r.judgment.name()),
                r.axis.as_deref().map(&mut index),
                r.setting.as_deref().map(&mut index),
                index(&r.kernel),
                index(r.verdict.name()),
                r.again.as_deref(),
                detail,
                measure,
                chain,
                gradient,
                r.seconds,
            ])
        })
        .collect();
    let columns = [
        "implementation",
        "op",
        "class",
        "dtype",
        "out",
        "case",
        "judgment",
        "axis",
        "setting",
        "kernel",
        "verdict",
        "again",
        "detail",
        "measure",
        "chain",
        "gradient",
        "seconds",
    ];
    // The judgments and verdicts in their usual order, for the filters.
    let judgments = Judgment::ALL.map(Judgment::name);
    let json = json!({"columns": columns, "judgments": judgments, "strings": strings.list, "records": rows});
    script_safe(&json.to_string())
}

#[derive(Default)]
struct Strings {
    list: Vec<String>,
    indices: BTreeMap<String, usize>,
}

impl Strings {
    fn index(&mut self, text: &str) -> usize {
        if let Some(&index) = self.indices.get(text) {
            return index;
        }
        self.indices.insert(text.into(), self.list.len());
        self.list.push(text.into());
        self.list.len() - 1
    }
}

/// JSON that an HTML parser reads as nothing but text: these characters only ever stand inside JSON strings.
fn script_safe(json: &str) -> String {
    json.replace('&', "\\u0026").replace('<', "\\u003c").replace('>', "\\u003e")
}

/// A text as HTML shows it, within an attribute too.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;").replace('\'', "&#39;")
}

/// Seconds since 1970 as `2026-11-21 09:00:00 UTC`.
fn utc(seconds: u64) -> String {
    // Days are counted from 0000-03-01, so that the leap day is the last of its year.
    let days = seconds / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{:04}-{month:02}-{date:02} {hour:02}:{minute:02}:{second:02} UTC", era * 400 + year + next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    /// The embedded data as the page's script reads it.
    fn embedded(page: &str) -> Value {
        let (_, data) = page.split_once("<script type=\"application/json\" id=\"data\">").expect("the data");
        let (data, _) = data.split_once("</script>").expect("its end");
        serde_json::from_str(data).unwrap()
    }

    #[test]
    fn hostile_names_stay_text() {
        let folder = synthetic::folder();
        let page = document(&folder);
        let name = "gemm/fp16/</script>&\"<a|b";
        assert!(folder.records.iter().any(|r| r.case == name));
        assert!(!page.contains(name));
        assert_eq!(page.matches("</script>").count(), 2, "one for the data, one for the code");
        let data = embedded(&page);
        assert!(data["strings"].as_array().unwrap().contains(&json!(name)));

        let mut folder = folder;
        for record in &mut folder.records {
            record.op = "<b>&'\"op".into();
            record.axis = Some("{{data}}\"><i>".into());
            record.implementation = "<img src=x>".into();
        }
        folder.run.machine.insert("<u>".into(), "</dd><u>".into());
        let page = document(&folder);
        for tag in ["<b>&", "<img", "<u>", "\"><i>"] {
            assert!(!page.contains(tag), "{tag}");
        }
        assert_eq!(page.matches("{{data}}").count(), page.matches("{{data}}&quot;&gt;&lt;i&gt;").count() + 1);
    }

    #[test]
    fn embedded_records_are_the_records() {
        let folder = synthetic::folder();
        let data = embedded(&document(&folder));
        let rows = data["records"].as_array().unwrap();
        assert_eq!(rows.len(), folder.records.len());
        let column = |name: &str| data["columns"].as_array().unwrap().iter().position(|c| c == name).unwrap();
        for (row, record) in rows.iter().zip(&folder.records) {
            assert_eq!(row.as_array().unwrap().len(), data["columns"].as_array().unwrap().len());
            let text = |name: &str| data["strings"][row[column(name)].as_u64().unwrap() as usize].as_str().unwrap();
            assert_eq!(text("case"), record.case);
            assert_eq!(text("verdict"), record.verdict.name());
            assert_eq!(text("judgment"), record.judgment.name());
            assert_eq!(text("kernel"), record.kernel);
            if let Verdict::Fail(evidence) = &record.verdict {
                assert_eq!(row[column("detail")], json!(evidence));
            }
        }
    }

    #[test]
    fn the_page_asks_for_nothing_outside_itself() {
        let page = document(&synthetic::folder());
        for outside in ["http://", "https://", "//cdn", "@import", "url(", "src=", "fetch(", "innerHTML"] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert!(page.contains("default-src 'none'"));
    }

    #[test]
    fn banner_and_matrix_count_what_the_summary_counts() {
        let folder = synthetic::folder();
        let summary = Summary::of(&folder);
        let page = document(&folder);
        assert!(page.contains("class=\"banner red\""));
        assert!(page.contains(&format!("{} of {} records are red", summary.counts.red(), summary.counts.total())));
        for (name, count) in summary.counts.by_name() {
            assert!(page.contains(&format!("<li><b>{count}</b> {name}</li>")), "{name}");
        }
        assert!(page.contains("gemm, invariance threads: 1 pass, 2 fail"));
        let mut green = synthetic::green();
        assert!(document(&green).contains("class=\"banner green\""));
        assert!(document(&green).contains(">✓ 2</button>"));
        green.records[0].verdict = Verdict::Unsupported { reason: "no".into() };
        assert!(document(&green).contains(">✓ 1/2</button>"), "an unsupported record is not counted as a pass");
        let mut empty = synthetic::green();
        empty.records.clear();
        empty.run.planned = 0;
        let page = document(&empty);
        assert!(page.contains("class=\"banner red\"") && page.contains("nothing was tested"));
    }

    /// A red record carries its command, what is compared with a base says so, and what is offered stands first.
    #[test]
    fn a_record_says_how_to_ask_it_again() {
        let mut folder = synthetic::folder();
        folder.run.plan.implementations.insert("ours/cpu".into(), "0.1.0 of <today>".into());
        folder.run.notes.push("mine: asked <little>".into());
        let at = folder.records.iter().position(|record| record.verdict.is_red()).unwrap();
        folder.records[at].again = Some("samebits check --case '<a>'".into());
        let unsupported = Verdict::Unsupported { reason: "no".into() };
        let other = Record { op: "add".into(), verdict: unsupported, ..folder.records[0].clone() };
        folder.records.push(other);
        let page = document(&folder);
        let data = embedded(&page);
        let column = data["columns"].as_array().unwrap().iter().position(|c| c == "again").unwrap();
        assert_eq!(data["records"][at][column], "samebits check --case '<a>'");
        assert_eq!(data["records"][0][column], Value::Null);
        assert!(
            page.contains("ours/cpu (0.1.0 of &lt;today&gt;)") && page.contains("Note: mine: asked &lt;little&gt;")
        );
        let place = |op: &str| page.find(&format!(">{op}</th>")).unwrap();
        assert!(place("add") > place("rms_norm"), "add is not offered and comes last");
    }

    #[test]
    fn dates() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_790_000_000), "2026-09-21 14:13:20 UTC");
        assert_eq!(utc(4_107_542_399), "2100-02-28 23:59:59 UTC");
        assert_eq!(utc(4_107_542_400), "2100-03-01 00:00:00 UTC");
    }
}
