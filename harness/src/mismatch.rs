//! What `samebits score` tells of records: metrics, where in texts they begin to differ, and what gates say of them.

use samebits_contract::mismatch::{Metric, Mismatch, Threshold};
use samebits_models::Flips;
use samebits_reports::escaped;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::ops::RangeInclusive;

/// A token whose log-probability is another one.
#[derive(Clone, Copy)]
struct Differs {
    sequence: usize,
    position: usize,
    token: Option<i32>,
    old: f32,
    new: f32,
}

/// What a comparison of records found.
#[derive(Default)]
pub struct Found {
    all: Mismatch,
    /// By the place of a token among those that were sampled, from 0, and by how many were sampled in its text: as powers of two.
    by_place: BTreeMap<u32, Mismatch>,
    by_length: BTreeMap<u32, Mismatch>,
    /// Choices of experts, by the block of their mixture.
    by_block: BTreeMap<usize, Mismatch>,
    /// Where texts begin to differ, by the same places.
    begins: BTreeMap<u32, usize>,
    texts: usize,
    first: Option<Differs>,
}

/// The power of two that a number is below: 0 for 0, 1 for 1, 2 for 2 and 3, and so on.
fn power(number: usize) -> u32 {
    usize::BITS - number.leading_zeros()
}

/// The numbers that have a power.
fn numbers(power: u32) -> RangeInclusive<usize> {
    let first = if power == 0 { 0 } else { 1 << (power - 1) };
    first..=(1usize << power) - 1
}

fn range(power: u32) -> String {
    let numbers = numbers(power);
    if numbers.start() == numbers.end() {
        numbers.start().to_string()
    } else {
        format!("{}-{}", numbers.start(), numbers.end())
    }
}

/// A threshold, the value that was measured, and whether it holds.
type Judged<'t> = (&'t Threshold, f64, bool);

impl Found {
    /// Takes in the text number `sequence` behind a prompt of `prompt` tokens: what was recorded of each that was sampled and what
    /// was computed again; `tokens` are these, or none where nobody knows them.
    pub fn add(&mut self, sequence: usize, prompt: usize, tokens: &[i32], old: &[f32], new: &[f32]) {
        self.texts += 1;
        let length = old.len();
        let mut begins = None;
        for (i, (&old, &new)) in old.iter().zip(new).enumerate() {
            let groups = [self.by_place.entry(power(i)), self.by_length.entry(power(length))];
            groups.into_iter().for_each(|group| group.or_default().add(old, new));
            self.all.add(old, new);
            if old.to_bits() != new.to_bits() {
                begins.get_or_insert(i);
                let (position, token) = (prompt + i, tokens.get(i).copied());
                self.first.get_or_insert(Differs { sequence, position, token, old, new });
            }
        }
        if let Some(begins) = begins {
            *self.begins.entry(power(begins)).or_default() += 1;
        }
    }

    /// Takes in where choices of experts are others than those that were recorded of a text, of so many tokens in its prompt and
    /// behind it. A choice stands at the place of the token that comes of it; `blocks` are those of the mixtures.
    pub fn add_experts(&mut self, (prompt, sampled): (usize, usize), flips: &Flips, blocks: &[usize]) {
        for (token, choices) in flips.tokens().enumerate() {
            self.all.add_choices(choices.iter().flatten().copied());
            for (block, flip) in blocks.iter().zip(choices) {
                self.by_block.entry(*block).or_default().add_choices(flip.iter().copied());
            }
            if let Some(place) = (token + 1).checked_sub(prompt) {
                let groups = [self.by_place.entry(power(place)), self.by_length.entry(power(sampled))];
                groups.into_iter().for_each(|group| group.or_default().add_choices(choices.iter().flatten().copied()));
            }
        }
    }

    /// Takes in how many choices of experts are others than recorded, and of how many: those of which nothing else is known.
    pub fn add_flips(&mut self, [flips, choices]: [usize; 2]) {
        self.all.flips += flips;
        self.all.choices += choices;
    }

    /// What the thresholds of some gates say of models in a dtype; of experts where any were recorded.
    pub fn judged<'t>(&self, thresholds: &'t [Threshold], gates: &[String], dtype: &str) -> Vec<Judged<'t>> {
        let judges = |line: &&Threshold| self.all.choices > 0 || !line.metric.is_of_experts();
        let asked = thresholds.iter().filter(|line| gates.contains(&line.gate)).filter(judges);
        let of_dtype = asked.filter(|line| line.dtype.as_deref().is_none_or(|of| of == dtype));
        let judge = |line: &'t Threshold| {
            let value = self.all.metric(line.metric);
            (line, value, line.holds(value))
        };
        of_dtype.map(judge).collect()
    }

    /// For people.
    pub fn text(&self, judged: &[Judged]) -> String {
        let Mismatch { tokens, differ, flips, choices, .. } = self.all;
        let mut text = format!("{differ} of {tokens} log-probabilities of {} texts differ\n", self.texts);
        if let Some(Differs { sequence, position, token, old, new }) = self.first {
            let of = |metric| self.all.metric(metric);
            let _ = writeln!(
                text,
                "  max |dlogp| {:.3e}, mean |dlogp| {:.3e}, approx KL {:.3e} (k3; k1 {:.3e}), clip fraction {}",
                of(Metric::MaxDlogp),
                of(Metric::MeanDlogp),
                of(Metric::K3),
                of(Metric::K1),
                of(Metric::ClipFraction),
            );
            let (error, pearson) = (of(Metric::ProbabilityError), of(Metric::Pearson));
            let _ = writeln!(text, "  probability error {error:.6}, Pearson of probabilities {pearson:.6}");
            let which = token.map_or(String::new(), |token| format!(", token {token}"));
            let _ = writeln!(
                text,
                "  first: sequence {sequence}, position {position}{which}: {old} in the rollout, {new} now"
            );
            let impossible = of(Metric::Impossible);
            if impossible > 0.0 {
                let _ = writeln!(text, "  {impossible} tokens have no probability now: their settings leave them out");
            }
            for (what, groups) in [("place among the sampled", &self.by_place), ("tokens sampled", &self.by_length)] {
                let _ = writeln!(text, "  by {what:<24} {:>9} {:>9}  mean |dlogp|  max |dlogp|", "tokens", "differ");
                for (power, group) in groups {
                    let (mean, max) = (group.metric(Metric::MeanDlogp), group.metric(Metric::MaxDlogp));
                    let (range, tokens, differ) = (range(*power), group.tokens, group.differ);
                    let _ = writeln!(text, "    {range:<25} {tokens:>9} {differ:>9}     {mean:.3e}    {max:.3e}");
                }
            }
        } else {
            text += "  the difference is exactly zero, and so is the KL divergence\n";
        }
        if choices > 0 {
            let _ = writeln!(text, "  {flips} of {choices} choices of experts are others");
        }
        if flips > 0 {
            let by_block = self.by_block.iter().map(|(block, of)| (format!("block {block}"), of));
            let by_place = self.by_place.iter().map(|(power, of)| (format!("place {}", range(*power)), of));
            let by_length = self.by_length.iter().map(|(power, of)| (format!("{} sampled", range(*power)), of));
            for (what, Mismatch { flips, choices, .. }) in by_block.chain(by_place).chain(by_length) {
                let _ = writeln!(text, "    {what:<25} {flips:>9} of {choices}");
            }
        }
        for (line, value, holds) in judged {
            let verdict = if *holds { "holds" } else { "DOES NOT HOLD" };
            let (gate, metric, value) = (&line.gate, line.metric.name(), short(*value));
            let _ = writeln!(text, "  gate {gate}: {metric} {value} {}: {verdict}", bound(line));
        }
        text.trim_end().to_string()
    }

    /// For programs; what is infinite is null.
    pub fn json(&self, judged: &[Judged]) -> Value {
        let metrics = |of: &Mismatch| -> serde_json::Map<String, Value> {
            let metric = |(metric, name): (Metric, &str)| {
                let value = of.metric(metric);
                (
                    name.to_string(),
                    if matches!(metric, Metric::Differ | Metric::Impossible | Metric::Flips) && !value.is_nan() {
                        json!(value as u64)
                    } else {
                        json!(value)
                    },
                )
            };
            std::iter::once(("tokens".to_string(), json!(of.tokens))).chain(Metric::ALL.map(metric)).collect()
        };
        let groups = |groups: &BTreeMap<u32, Mismatch>| -> Vec<Value> {
            let group = |(power, of): (&u32, &Mismatch)| {
                let mut line = metrics(of);
                let numbers = numbers(*power);
                line.insert("from".into(), json!(numbers.start()));
                line.insert("to".into(), json!(numbers.end()));
                Value::from(line)
            };
            groups.iter().map(group).collect()
        };
        let gates = judged.iter().map(|(line, value, holds)| {
            json!({"gate": line.gate, "metric": line.metric.name(), "value": value, "most": line.most, "least": line.least,
                "holds": holds, "source": line.source})
        });
        let begins = self.begins.iter().map(
            |(power, texts)| json!({"from": numbers(*power).start(), "to": numbers(*power).end(), "texts": texts}),
        );
        let first = self.first.map(|Differs { sequence, position, token, old, new }| {
            json!({"sequence": sequence, "position": position, "token": token, "rollout": old, "score": new})
        });
        let mut found = metrics(&self.all);
        // Its name before there was a second estimate.
        found.insert("approx_kl".into(), json!(self.all.metric(Metric::K3)));
        let by_block =
            self.by_block.iter().map(|(block, of)| json!({"block": block, "flips": of.flips, "choices": of.choices}));
        let more = json!({
            "choices": self.all.choices, "by_block": by_block.collect::<Vec<_>>(), "texts": self.texts, "first": first, "by_place": groups(&self.by_place), "by_length": groups(&self.by_length),
            "begins": begins.collect::<Vec<_>>(), "gates": gates.collect::<Vec<_>>(),
        });
        found.extend(more.as_object().expect("it is one").clone());
        Value::from(found)
    }

    /// A page that needs nothing else: metrics, gates, and where in texts the difference begins.
    pub fn page(&self, judged: &[Judged], what: &str) -> String {
        let red = judged.iter().any(|(.., holds)| !holds);
        let row = |cells: &[String]| format!("<tr><td>{}</td></tr>\n", cells.join("</td><td>"));
        let gates: String = judged
            .iter()
            .map(|(line, value, holds)| {
                let verdict = if *holds { "holds" } else { "<b class=\"red\">does not hold</b>" };
                let (gate, source) = (escaped(&line.gate), escaped(&line.source));
                row(&[gate, line.metric.name().into(), short(*value), escaped(&bound(line)), verdict.into(), source])
            })
            .collect();
        let metrics: String =
            Metric::ALL.iter().map(|(metric, name)| row(&[(*name).into(), short(self.all.metric(*metric))])).collect();
        let of_block =
            |(block, of): (&usize, &Mismatch)| row(&[block.to_string(), of.flips.to_string(), of.choices.to_string()]);
        let of_blocks: String = self.by_block.iter().map(of_block).collect();
        let of_experts = match of_blocks.is_empty() {
            true => String::new(),
            false => format!(
                "<h2>Choices of experts</h2>\n<table><tr><th>block</th><th>others</th><th>choices</th></tr>\n{of_blocks}</table>\n"
            ),
        };
        let begins: String =
            self.begins.iter().map(|(power, texts)| row(&[range(*power), texts.to_string()])).collect();
        let title = if red { "Red" } else { "Green" };
        let tokens = self.all.tokens;
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}: {what}</title><style>{STYLE}</style></head><body>\n\
             <h1 class=\"{class}\">{title}</h1>\n<p>{what}: {differ} of {tokens} log-probabilities of {texts} texts differ from those that \
             were recorded.</p>\n<h2>Gates</h2>\n<table><tr><th>gate</th><th>metric</th><th>measured</th><th>threshold</th><th></th>\
             <th>source</th></tr>\n{gates}</table>\n<h2>By place among the sampled tokens</h2>\n{by_place}\n<h2>By sampled tokens of the \
             text</h2>\n{by_length}\n<h2>Where texts begin to differ</h2>\n<table><tr><th>place</th><th>texts</th></tr>\n{begins}</table>\n\
             {of_experts}<h2>Metrics</h2>\n<table>{metrics}</table>\n</body></html>\n",
            what = escaped(what),
            class = title.to_lowercase(),
            differ = self.all.differ,
            texts = self.texts,
            by_place = plot(&self.by_place),
            by_length = plot(&self.by_length),
        )
    }
}

/// A value as people read it.
fn short(value: f64) -> String {
    match value {
        none if none.is_nan() => "none recorded".into(),
        whole if whole.fract() == 0.0 => format!("{whole}"),
        small if small.abs() < 1e-2 => format!("{small:.3e}"),
        other => format!("{other:.6}"),
    }
}

/// Refuses a gate that judges nothing of models in a dtype.
///
/// # Errors
/// The first that has no threshold, and those that there are.
pub fn check_gates(thresholds: &[Threshold], gates: &[String], dtype: &str) -> Result<(), String> {
    let bounds =
        |gate: &String, line: &Threshold| line.dtype.as_deref().is_none_or(|of| of == dtype) && line.gate == *gate;
    match gates.iter().find(|gate| !thresholds.iter().any(|line| bounds(gate, line))) {
        None => Ok(()),
        Some(gate) => {
            let names: BTreeSet<&str> = thresholds.iter().map(|line| &line.gate[..]).collect();
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            Err(format!("{gate}: has no threshold for models in {dtype}; there are {names}"))
        }
    }
}

/// What a threshold asks.
fn bound(line: &Threshold) -> String {
    let most = line.most.map(|most| format!("<= {most}"));
    most.into_iter().chain(line.least.map(|least| format!(">= {least}"))).collect::<Vec<_>>().join(" and ")
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}\
    h1.red,.red{color:#b00020}h1.green{color:#1b7f3b}table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left;\
    border-bottom:1px solid #ddd;vertical-align:top}svg{width:100%;height:auto}text{font-size:12px;fill:#444}";

/// Mean and largest |dlogp| of groups, on a logarithmic axis; what is zero stands on the ground.
fn plot(groups: &BTreeMap<u32, Mismatch>) -> String {
    const SIZE: [f64; 2] = [720.0, 240.0];
    // From 1e-9 to 10.
    let height = |value: f64| {
        let share = if value > 0.0 { (value.log10().clamp(-9.0, 1.0) + 9.0) / 10.0 } else { 0.0 };
        SIZE[1] - 40.0 - share * (SIZE[1] - 60.0)
    };
    let mut svg = format!("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"|dlogp| by group\">", SIZE[0], SIZE[1]);
    for power in [-8, -6, -4, -2, 0] {
        let y = height(10f64.powi(power));
        let _ = write!(
            svg,
            "<line x1=\"60\" x2=\"700\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#eee\"/><text x=\"8\" y=\"{:.1}\">1e{power}</text>",
            y + 4.0
        );
    }
    let step = 640.0 / groups.len().max(1) as f64;
    for (i, (power, group)) in groups.iter().enumerate() {
        let x = 60.0 + step * i as f64;
        for (metric, colour, at) in [(Metric::MaxDlogp, "#c9d6ea", 0.1), (Metric::MeanDlogp, "#31598f", 0.3)] {
            let (y, width) = (height(group.metric(metric)), step * (1.0 - 2.0 * at));
            let (ground, left) = (SIZE[1] - 40.0, x + step * at);
            let title = format!(
                "{}: {} {:.3e}; {} of {} tokens differ",
                range(*power),
                metric.name(),
                group.metric(metric),
                group.differ,
                group.tokens
            );
            let _ = write!(
                svg,
                "<rect x=\"{left:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{colour}\"><title>{title}</title></rect>",
                (ground - y).max(0.5)
            );
        }
        // Many groups are narrow: where each begins, and the rest where one points.
        let is_narrow = groups.len() > 8;
        let label = if is_narrow { numbers(*power).start().to_string() } else { range(*power) };
        let counts = if is_narrow { String::new() } else { format!("{}/{}", group.differ, group.tokens) };
        for (line, y) in [(label, SIZE[1] - 24.0), (counts, SIZE[1] - 8.0)] {
            let middle = x + step / 2.0;
            let _ = write!(svg, "<text x=\"{middle:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{line}</text>");
        }
    }
    svg + "</svg><p>Dark: mean |dlogp|; light: the largest. Below: which tokens, and how many of them differ.</p>"
}

#[cfg(test)]
mod tests {
    use super::*;
    use samebits_contract::mismatch::thresholds;

    fn found(differ_from: usize) -> Found {
        let mut found = Found::default();
        for (sequence, length) in [3usize, 9, 40].into_iter().enumerate() {
            let old: Vec<f32> = (0..length).map(|i| -0.1 * (i + 1) as f32).collect();
            let new: Vec<f32> =
                old.iter().enumerate().map(|(i, v)| if i >= differ_from { v - 0.25 } else { *v }).collect();
            found.add(sequence, 2, &vec![7; length], &old, &new);
        }
        found
    }

    #[test]
    fn places_are_powers_of_two() {
        assert_eq!([0, 1, 2, 3, 4, 7, 8].map(power), [0, 1, 2, 2, 3, 3, 4]);
        assert_eq!([0, 1, 2, 3].map(range), ["0", "1", "2-3", "4-7"]);
    }

    #[test]
    fn what_differs_is_told_by_place_and_length() {
        let (found, all) = (found(5), thresholds());
        let gates = ["nemo-rl".to_string(), "bitwise".to_string()];
        let judged = found.judged(&all, &gates, "bf16");
        let json = found.json(&judged);
        assert_eq!((json["tokens"].as_u64(), json["differ"].as_u64()), (Some(52), Some(39)));
        assert_eq!(json["begins"], json!([{"from": 4, "to": 7, "texts": 2}]));
        assert_eq!(json["by_length"][0]["differ"], 0);
        assert_eq!(json["first"]["position"], 7);
        let text = found.text(&judged);
        assert!(text.starts_with("39 of 52 log-probabilities of 3 texts differ\n"), "{text}");
        assert!(text.contains("gate bitwise: differ 39 <= 0: DOES NOT HOLD"), "{text}");
        assert!(text.contains("gate nemo-rl: probability_error ") && text.contains("<= 1.05: DOES NOT HOLD"), "{text}");
        let page = found.page(&judged, "a < b");
        assert!(
            page.contains("<h1 class=\"red\">") && page.contains("a &lt; b") && page.matches("<rect").count() == 20,
            "{page}"
        );
    }

    /// A choice counts at the token that comes of it, and a prompt's among all alone; without any, no threshold judges them.
    #[test]
    fn choices_of_experts_are_judged_where_they_were_recorded() {
        let (mut found, all) = (found(100), thresholds());
        let gates = ["bitwise".to_string()];
        assert_eq!(found.judged(&all, &gates, "bf16").len(), 1);
        assert!(found.json(&[])["flips"].is_null());
        // Three tokens behind a prompt of two, in two mixtures; nothing was recorded of the first token of the second one.
        let each = [true, false, false, true, false, false, false, true].map(Some);
        let mut flips = Flips { layers: 2, each: each.to_vec() };
        flips.each[1] = None;
        found.add_experts((2, 3), &flips, &[1, 3]);
        let judged = found.judged(&all, &gates, "bf16");
        let json = found.json(&judged);
        assert_eq!((json["flips"].as_u64(), json["choices"].as_u64()), (Some(3), Some(7)));
        assert_eq!(
            json["by_block"],
            json!([{"block": 1, "flips": 1, "choices": 4}, {"block": 3, "flips": 2, "choices": 3}])
        );
        let at = |place: usize| json["by_place"][place]["flips"].as_u64();
        assert_eq!([at(0), at(1), at(2)], [Some(1), Some(0), Some(1)]);
        let text = found.text(&judged);
        assert!(text.contains("3 of 7 choices of experts are others"), "{text}");
        assert!(text.contains("gate bitwise: flips 3 <= 0: DOES NOT HOLD"), "{text}");
        assert!(found.page(&judged, "x").contains("<td>3</td><td>2</td><td>3</td>"));
    }

    #[test]
    fn what_is_equal_is_green() {
        let (found, all) = (found(100), thresholds());
        let gates: Vec<String> = ["bitwise", "nemo-rl", "ws1"].map(String::from).into();
        let judged = found.judged(&all, &gates, "fp32");
        assert!(judged.len() == 6 && judged.iter().all(|(.., holds)| *holds));
        assert!(
            found.text(&judged).contains("exactly zero") && found.page(&judged, "x").contains("h1 class=\"green\"")
        );
    }
}
