//! Experts of tokens: what was recorded of them where a text was sampled, and how often a router chooses others.

use crate::layers::LayerPlan;
use crate::layers::branch;
use crate::{Config, ModelError};
use std::ops::Range;

/// What errors call experts that were recorded.
const RECORDED: &str = "routed_experts";

/// Experts of the tokens of a text from its first one on, `[tokens, layers, chosen]` in row-major order: of each mixture of experts,
/// in the order of the blocks that have one, or of each block, and then those of a block without one are not read. A token has
/// as many as the mixture chooses, each once, and -1 behind them where another one chooses more; where nobody recorded them it has
/// -1 alone. The experts of a last token, which nothing follows, are not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Mixtures, or blocks.
    pub layers: usize,
    /// The most that a mixture chooses.
    pub chosen: usize,
    /// All of them.
    pub each: Vec<i32>,
}

/// Experts that were recorded of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// They.
    pub experts: Experts,
    /// Whether they are chosen in the place of those that routers choose.
    pub replay: bool,
}

/// Experts of the sequences of a run.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    /// What was recorded of each.
    pub recorded: Vec<Option<Recorded>>,
    /// Behind the run, what the routers choose of each.
    pub own: Vec<Experts>,
}

impl Routing {
    /// Refuses what was recorded of other sequences, or does not fit these, behind whose tokens another one may stand.
    pub(crate) fn check(&self, c: &Config, sequences: &[&[i32]]) -> Result<(), ModelError> {
        if self.recorded.len() != sequences.len() {
            let why = format!("are of {} sequences; give those of {}, or none", self.recorded.len(), sequences.len());
            return Err(ModelError::input(RECORDED, why));
        }
        let texts = self.recorded.iter().zip(sequences).enumerate();
        check(c, texts.map(|(b, (recorded, tokens))| (b, recorded, tokens.len() + 1)))
    }

    /// Makes room for what routers choose of sequences.
    pub(crate) fn begin(&mut self, c: &Config, sequences: &[&[i32]]) {
        let room = |tokens: &&[i32]| StepExperts::new(c, [(0..tokens.len(), None)].into_iter()).own(0..tokens.len());
        self.own = sequences.iter().map(room).collect();
    }

    /// Those of a step: of each sequence its number, and where in it how many tokens stand.
    pub(crate) fn of_step(
        &self,
        c: &Config,
        texts: impl Iterator<Item = (usize, usize, usize)> + Clone,
    ) -> StepExperts {
        StepExperts::new(c, texts.map(|(text, first, count)| (first..first + count, self.recorded[text].as_ref())))
    }

    /// Keeps what routers chose of a sequence from a token on.
    pub(crate) fn keep(&mut self, (text, first): (usize, usize), made: &Experts) {
        let at = first * made.layers * made.chosen;
        self.own[text].each[at..at + made.each.len()].copy_from_slice(&made.each);
    }
}

/// A mixture of experts: its block, how many there are, and how many a token has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixture {
    /// The number of its block.
    pub block: usize,
    /// Experts.
    pub count: usize,
    /// Experts of a token.
    pub chosen: usize,
}

/// Where experts are others than those that were recorded: of each token and mixture whether it is so, `[tokens, layers]`; `None`
/// where none were recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flips {
    /// Mixtures.
    pub layers: usize,
    /// All choices.
    pub each: Vec<Option<bool>>,
}

impl Flips {
    /// How many there are, and how many choices were recorded.
    pub fn count(&self) -> [usize; 2] {
        [self.each.iter().filter(|flip| **flip == Some(true)).count(), self.each.iter().flatten().count()]
    }

    /// The same of several texts.
    pub fn sum<'a>(all: impl Iterator<Item = &'a Flips>) -> [usize; 2] {
        all.map(Flips::count).fold([0; 2], |sum, count| [sum[0] + count[0], sum[1] + count[1]])
    }

    /// Those of each token, mixture by mixture.
    pub fn tokens(&self) -> impl Iterator<Item = &[Option<bool>]> {
        self.each.chunks_exact(self.layers.max(1))
    }
}

impl Config {
    /// The mixtures of experts, in the order of their blocks.
    pub fn mixtures(&self) -> Vec<Mixture> {
        let mut found = Vec::new();
        for (block, branches) in self.blocks.iter().enumerate() {
            found.extend(branches.iter().flat_map(branch::Plan::layers).filter_map(|plan| match plan {
                LayerPlan::Moe(plan) => Some(Mixture { block, count: plan.count, chosen: plan.chosen }),
                _ => None,
            }));
        }
        found
    }
}

/// The most that a mixture chooses.
fn width(mixtures: &[Mixture]) -> usize {
    mixtures.iter().map(|mixture| mixture.chosen).max().unwrap_or(0)
}

impl Experts {
    /// Tokens that it is of.
    pub fn tokens(&self) -> usize {
        self.each.len() / (self.layers * self.chosen).max(1)
    }

    /// Those of the first tokens.
    pub(crate) fn first(&self, tokens: usize) -> Experts {
        Experts { each: self.each[..tokens * self.layers * self.chosen].to_vec(), ..*self }
    }

    /// Those of a token and a mixture, which is number `number` of all; -1 alone behind the last token.
    fn of(&self, token: usize, number: usize, mixture: &Mixture, all: usize) -> Option<&[i32]> {
        let layer = if self.layers == all { number } else { mixture.block };
        self.each.get((token * self.layers + layer) * self.chosen..)?.get(..mixture.chosen)
    }

    /// What is wrong with experts of a text of `len` tokens.
    fn complaints(&self, c: &Config, who: &str, len: usize) -> Vec<ModelError> {
        let (mixtures, blocks, mut found) = (c.mixtures(), c.layers(), Vec::new());
        let mut complain = |why: String| found.push(ModelError::input(RECORDED, format!("of {who}: {why}")));
        if mixtures.is_empty() {
            return vec![ModelError::input(RECORDED, "the model has no mixture of experts; leave them out")];
        }
        let (layers, all) = (self.layers, mixtures.len());
        if layers != all && layers != blocks {
            complain(format!("has {layers} layers; the model has {all} mixtures of experts in {blocks} blocks"));
        }
        if self.chosen != width(&mixtures) {
            complain(format!("has {} for each token and layer; the model chooses {}", self.chosen, width(&mixtures)));
        }
        if !found.is_empty() {
            return found;
        }
        let mut complain = |why: String| found.push(ModelError::input(RECORDED, format!("of {who}: {why}")));
        if ![len, len.saturating_sub(1)].contains(&self.tokens()) {
            let without = len.saturating_sub(1);
            complain(format!("has {} tokens of {len}; give all, or the first {without}", self.tokens()));
        }
        let (mut outside, mut doubled) = (Vec::new(), Vec::new());
        for token in 0..self.tokens().min(len.saturating_sub(1)) {
            for (number, mixture) in mixtures.iter().enumerate() {
                let row = self.of(token, number, mixture, all).expect("it has them");
                if row.iter().all(|expert| *expert == -1) {
                    continue;
                }
                let is_one = |expert: i32| usize::try_from(expert).is_ok_and(|expert| expert < mixture.count);
                let place = |expert: i32| format!("token {token}, block {}: {expert}", mixture.block);
                outside.extend(row.iter().find(|expert| !is_one(**expert)).map(|expert| place(*expert)));
                let twice = (1..row.len()).find(|&i| is_one(row[i]) && row[..i].contains(&row[i]));
                doubled.extend(twice.map(|i| place(row[i])));
            }
        }
        for (found, what) in [(outside, "is no expert"), (doubled, "stands twice")] {
            if let Some(first) = found.first() {
                let more =
                    if found.len() > 1 { format!(", and so in {} others", found.len() - 1) } else { String::new() };
                complain(format!("{first} {what}{more}"));
            }
        }
        found
    }

    /// Refuses experts that a text of `len` tokens, called `who`, does not have by a model of `c`: all that is wrong with them.
    ///
    /// # Errors
    /// Experts that there are not, or twice; another number of tokens, layers or experts than the model has; a model without a
    /// mixture.
    pub fn check(&self, c: &Config, who: &str, len: usize) -> Result<(), ModelError> {
        ModelError::all(self.complaints(c, who, len))
    }

    /// Where what routers chose, of all mixtures, is another set.
    pub fn flips(&self, c: &Config, own: &Experts) -> Flips {
        let mixtures = c.mixtures();
        let all = mixtures.len();
        let flip = |token: usize, number: usize, mixture: &Mixture| {
            let recorded = self.of(token, number, mixture, all).filter(|row| row[0] >= 0)?;
            let own = own.of(token, number, mixture, all)?;
            Some(own.iter().any(|expert| !recorded.contains(expert)))
        };
        let each = (0..own.tokens()).flat_map(|token| {
            mixtures.iter().enumerate().map(move |(number, mixture)| flip(token, number, mixture)).collect::<Vec<_>>()
        });
        Flips { layers: all, each: each.collect() }
    }
}

/// Refuses experts of texts, each with its number and its tokens: all that is wrong with them, each thing once.
///
/// # Errors
/// Experts that there are not, or twice; another number of tokens, layers or experts than the model has; a model without a mixture.
pub(crate) fn check<'a>(
    c: &Config,
    texts: impl Iterator<Item = (usize, &'a Option<Recorded>, usize)>,
) -> Result<(), ModelError> {
    let mut complaints: Vec<ModelError> = Vec::new();
    for (number, recorded, len) in texts {
        let Some(Recorded { experts, .. }) = recorded else { continue };
        for complaint in experts.complaints(c, &format!("sequence {number}"), len) {
            if !complaints.iter().any(|other| other.to_string() == complaint.to_string()) {
                complaints.push(complaint);
            }
        }
    }
    ModelError::all(complaints)
}

/// The experts of the rows of a step, `[rows, mixtures, chosen]`: those that routers choose, and those that are chosen instead.
pub(crate) struct StepExperts {
    mixtures: Vec<Mixture>,
    pub own: Vec<i32>,
    instead: Option<Vec<i32>>,
}

impl StepExperts {
    /// Those of rows of texts one behind the other: of each the positions, and what was recorded.
    pub fn new<'a>(
        c: &Config,
        texts: impl Iterator<Item = (Range<usize>, Option<&'a Recorded>)> + Clone,
    ) -> StepExperts {
        let mixtures = c.mixtures();
        let (all, width) = (mixtures.len(), width(&mixtures));
        let rows: usize = texts.clone().map(|(positions, _)| positions.len()).sum();
        let own = vec![-1; rows * all * width];
        let mut instead = None;
        if texts.clone().any(|(_, recorded)| recorded.is_some_and(|recorded| recorded.replay)) {
            let instead = instead.insert(own.clone());
            let mut to = instead.chunks_exact_mut(width);
            for (positions, recorded) in texts {
                let recorded = recorded.filter(|recorded| recorded.replay).map(|recorded| &recorded.experts);
                for position in positions {
                    for (number, mixture) in mixtures.iter().enumerate() {
                        let to = to.next().expect("there is one for each");
                        let row = recorded.and_then(|experts| experts.of(position, number, mixture, all));
                        row.into_iter().for_each(|row| to[..row.len()].copy_from_slice(row));
                    }
                }
            }
        }
        StepExperts { mixtures, own, instead }
    }

    /// Elements of a row.
    pub fn row(&self) -> usize {
        self.mixtures.len() * width(&self.mixtures)
    }

    /// What routers choose of some rows.
    pub fn own(&self, rows: Range<usize>) -> Experts {
        let each = self.own[rows.start * self.row()..rows.end * self.row()].to_vec();
        Experts { layers: self.mixtures.len(), chosen: width(&self.mixtures), each }
    }

    /// Takes what the router of a block has chosen, `[rows, chosen]`, and gives what is chosen instead; of a row of -1 it stays.
    pub fn choose(&mut self, block: Option<usize>, own: &[i32]) -> Option<Vec<i32>> {
        let number = self.mixtures.iter().position(|mixture| Some(mixture.block) == block);
        let number = number.expect("a mixture is one of a block");
        let (chosen, width, row) = (self.mixtures[number].chosen, width(&self.mixtures), self.row());
        let place = |at: usize| at * row + number * width;
        for (at, own) in own.chunks_exact(chosen).enumerate() {
            self.own[place(at)..][..chosen].copy_from_slice(own);
        }
        let of_row = |instead: &Vec<i32>, at: usize| instead[place(at)..][..chosen].to_vec();
        let instead = self.instead.as_ref()?;
        Some((0..own.len() / chosen).flat_map(|at| of_row(instead, at)).collect())
    }
}
