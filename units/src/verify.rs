//! What reproduces each name of a dump, to the bit, or what comes nearest.

use crate::dump::{Content, Entry, Steps};
use crate::search::{Found, Machine, Product, Rounding, Target, search};
use crate::{Format, Rule, exact};

/// What came of a name.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Of the entry.
    pub name: String,
    /// The arithmetic that reproduces it, or comes nearest.
    pub rule: Rule,
    /// In words; for results that do not share one order, each with its own.
    pub order: String,
    /// Outputs that are equal to the bit.
    pub equal: usize,
    /// All outputs.
    pub of: usize,
    /// How many other orders give as much.
    pub others: usize,
    /// Profiles that some of the others are of, and the order is not.
    pub other_profiles: Vec<&'static str>,
    /// Where something differs.
    pub first: Option<Difference>,
}

/// The first place where the order gives something else.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The tensor's name behind the last dot.
    pub field: &'static str,
    /// The place in it.
    pub at: Vec<usize>,
    /// The word in it.
    pub recorded: u32,
    /// The word of the order.
    pub computed: u32,
    /// Digits of the words in hexadecimal.
    pub digits: usize,
}

impl Verdict {
    /// Whether all of it is.
    pub fn reproduced(&self) -> bool {
        self.equal == self.of
    }
}

/// Finds what reproduces an entry. `progress` hears how much of a search is done.
pub fn verify(entry: &Entry, machine: Machine, progress: &(dyn Fn(usize, usize) + Sync)) -> Verdict {
    let raw = entry.formats.len() > 1;
    let judged = entry.formats.iter().map(|&format| match &entry.content {
        Content::Steps(recorded) => steps(&entry.name, recorded, format),
        Content::Product(recorded) => product(&entry.name, &recorded.of(format, raw), format, machine, progress),
    });
    let mut best: Option<Verdict> = None;
    for verdict in judged {
        match &mut best {
            Some(best) if best.equal >= verdict.equal => {
                // Words that both formats explain: said, not hidden.
                if verdict.reproduced() {
                    best.others += 1 + verdict.others;
                }
            }
            _ => best = Some(verdict),
        }
        if best.as_ref().is_some_and(|best| best.reproduced() && best.others == 0) {
            break;
        }
    }
    best.expect("an entry has a format")
}

fn steps(name: &str, recorded: &Steps, format: Format) -> Verdict {
    let Steps { n, steps, m, columns, k, .. } = *recorded;
    let output = |rule: Rule, place: usize| {
        let (number, row, column) = (place / (m * columns), place / columns % m, place % columns);
        (0..steps).fold(recorded.c[place], |c, step| {
            let a = ((number * steps + step) * m + row) * k;
            let b = ((number * steps + step) * columns + column) * k;
            exact::chain(rule, c, &recorded.a[a..a + k], &recorded.b[b..b + k])
        })
    };
    let of = n * m * columns;
    let judge = |rule: Rule| {
        let wrong: Vec<usize> = (0..of).filter(|&place| output(rule, place) != recorded.d[place]).collect();
        (rule, wrong)
    };
    let mut all: Vec<(Rule, Vec<usize>)> = Rule::all(format).into_iter().map(judge).collect();
    all.sort_by_key(|(_, wrong)| wrong.len());
    let ((rule, wrong), rest) = all.split_first().expect("a rule");
    let others: Vec<Rule> =
        rest.iter().filter(|(_, other)| other.len() == wrong.len()).map(|&(rule, _)| rule).collect();
    let first = wrong.first().map(|&place| Difference {
        field: "d",
        at: vec![place / (m * columns), place / columns % m, place % columns],
        recorded: recorded.d[place],
        computed: output(*rule, place),
        digits: 8,
    });
    let order =
        if steps == 1 { format!("one step of k = {k}") } else { format!("a chain of {steps} steps of k = {k}") };
    let (other_profiles, others) = (profiles(*rule, others.iter().copied()), others.len());
    Verdict { name: name.into(), rule: *rule, order, equal: of - wrong.len(), of, others, other_profiles, first }
}

/// Profiles of `others` that `rule` is not of.
fn profiles(rule: Rule, others: impl Iterator<Item = Rule>) -> Vec<&'static str> {
    let mut profiles: Vec<&'static str> = others.filter(|&other| other != rule).flat_map(Rule::profiles).collect();
    profiles.sort_unstable();
    profiles.dedup();
    profiles
}

fn product(
    name: &str,
    recorded: &Product,
    format: Format,
    machine: Machine,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Verdict {
    let found = search(recorded, format, machine, progress);
    let together = of_found(name, recorded, &found, found.order.words());
    let [one, two] = &recorded.targets[..] else { return together };
    if together.reproduced() {
        return together;
    }
    // y and y_fp32 may be of two calls, for which the library chose differently.
    let alone = |target: &Target| {
        let product = Product { targets: vec![target.clone()], ..recorded.clone() };
        search(&product, format, machine, progress)
    };
    let (first, second) = (alone(one), alone(two));
    let all = recorded.m * recorded.n;
    if first.equal < all || second.equal < all {
        return together;
    }
    let part = |target: &Target, found: &Found| {
        let profile = found.order.rule.profiles()[0];
        format!("{}: {profile}, {}", target.field, found.order.words())
    };
    let order = format!("{}; {}", part(one, &first), part(two, &second));
    let others = first.others.len() + second.others.len();
    Verdict { others, ..of_found(name, recorded, &first, order) }
}

fn of_found(name: &str, recorded: &Product, found: &Found, order: String) -> Verdict {
    let rule = found.order.rule;
    let first = found.first.map(|(place, word)| {
        let target = recorded.targets.iter().find(|target| !target.rounding.same(target.words[place], word));
        let target = target.expect("the place differs");
        Difference {
            field: target.field,
            at: vec![place / recorded.n, place % recorded.n],
            recorded: target.words[place],
            computed: target.rounding.round(word),
            digits: if target.rounding == Rounding::Fp32 { 8 } else { 4 },
        }
    });
    Verdict {
        name: name.into(),
        rule,
        order,
        equal: found.equal,
        of: recorded.m * recorded.n,
        others: found.others.len(),
        other_profiles: profiles(rule, found.others.iter().map(|order| order.rule)),
        first,
    }
}

impl Verdict {
    /// One line of text.
    pub fn line(&self) -> String {
        let Rule { group, bits, format } = self.rule;
        let profiles = self.rule.profiles();
        let also = if profiles.len() > 1 { format!(", as {}", profiles[1..].join(", ")) } else { String::new() };
        let arithmetic = format!("{} (groups of {group} {}, {bits} bits{also})", profiles[0], format.name());
        let counts = format!("{} of {}", self.equal, self.of);
        let others = match (self.others, self.reproduced()) {
            (0, true) => "; no other order of the search".into(),
            (1, _) => format!("; 1 other too{}", self.of_profiles()),
            (0, false) => String::new(),
            (n, _) => format!("; {n} others too{}", self.of_profiles()),
        };
        match self.first.as_ref() {
            None => format!("{}: {arithmetic}, {}: {counts}{others}", self.name, self.order),
            Some(&Difference { field, ref at, recorded, computed, digits }) => format!(
                "{}: not reproduced; nearest {arithmetic}, {}: {counts}{others}; first difference {field}{at:?}: recorded \
                 {recorded:0digits$x}, computed {computed:0digits$x}",
                self.name, self.order
            ),
        }
    }

    fn of_profiles(&self) -> String {
        if self.other_profiles.is_empty() {
            return String::new();
        }
        format!(", of {} too", self.other_profiles.join(", "))
    }
}

/// Ten lines of torch that make a dump.
pub const SCRIPT: &str = r#"import torch
from safetensors.torch import save_file

dump = {}
for M, N, K in [(1, 256, 4096), (16, 256, 4096), (64, 128, 8192), (300, 256, 512), (128, 128, 1000)]:
    x, w = (torch.randn(rows, K, device="cuda").bfloat16() for rows in (M, N))
    name = f"{M}x{N}x{K}"
    dump |= {f"{name}.x": x, f"{name}.w": w, f"{name}.y": torch.nn.functional.linear(x, w)}
    dump[f"{name}.y_fp32"] = torch.mm(x, w.T, out_dtype=torch.float32)  # torch 2.8 and later
save_file(dump, "dump.safetensors", {"device": torch.cuda.get_device_name(), "torch": torch.__version__})
"#;
