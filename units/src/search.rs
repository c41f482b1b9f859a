//! Which order reproduces a product `y[M,N] = x[M,K] w[N,K]^T` that somebody has recorded.
//!
//! Every cut of K ([`cuts::all`]) is computed by every rule that the format has, and its parts are added in every order. A
//! first race runs over a sample of the outputs, a second one over all outputs among those that were best in the first. A
//! candidate is dropped as soon as it misses more outputs than the best one does altogether, so one that is left has been
//! computed to the end, and one that reproduces everything cannot be dropped.

use crate::chain::{LANES, Panels, Rows, chain};
use crate::cuts::{self, Cuts, Join};
use crate::exact::NAN;
use crate::{Format, Isa, Rule};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How to run; it moves no bit.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// With which instructions.
    pub isa: Isa,
    /// On how many threads.
    pub threads: usize,
}

/// What a result was rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// It was not.
    Fp32,
    /// To bf16.
    Bf16,
    /// To fp16.
    Fp16,
}

impl Rounding {
    /// The word of an f32, rounded to nearest, ties to even.
    pub fn round(self, word: u32) -> u32 {
        let (sign, size) = (word >> 31, word & 0x7FFF_FFFF);
        match self {
            Rounding::Fp32 => word,
            _ if size > 0x7F80_0000 => 0x7FFF,
            Rounding::Bf16 => (word + 0x7FFF + (word >> 16 & 1)) >> 16,
            Rounding::Fp16 => {
                let size = match size {
                    // From 2^16 on; between 65520 and it the carry gives infinity.
                    0x4780_0000.. => 0x7C00,
                    0x3880_0000.. => (size - 0x3800_0000 + 0xFFF + (size >> 13 & 1)) >> 13,
                    // Multiples of 2^-24.
                    _ => (f32::from_bits(size) * 16_777_216.0).round_ties_even() as u32,
                };
                sign << 15 | size
            }
        }
    }

    /// Whether a recorded word is that of a result. What a conversion makes of a NaN says nothing about an order, so a rounded
    /// NaN is any NaN.
    pub fn same(self, recorded: u32, word: u32) -> bool {
        let nan = match self {
            Rounding::Fp32 => false,
            Rounding::Bf16 => recorded & 0x7FFF > 0x7F80,
            Rounding::Fp16 => recorded & 0x7FFF > 0x7C00,
        };
        if nan { word & 0x7FFF_FFFF > 0x7F80_0000 } else { recorded == self.round(word) }
    }
}

/// A recorded result of a product.
#[derive(Clone, Debug)]
pub struct Target {
    /// The name of its tensor behind the last dot.
    pub field: &'static str,
    /// What its words are.
    pub rounding: Rounding,
    /// `[M,N]`.
    pub words: Vec<u32>,
}

/// A recorded product.
#[derive(Clone, Debug)]
pub struct Product {
    /// Rows of x.
    pub m: usize,
    /// Rows of w.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
    /// `[M,K]`.
    pub x: Vec<u32>,
    /// `[N,K]`.
    pub w: Vec<u32>,
    /// What was recorded of it, one at least.
    pub targets: Vec<Target>,
}

/// An order, and what it gives.
#[derive(Clone, Debug)]
pub struct Order {
    /// The arithmetic of a step.
    pub rule: Rule,
    /// Where K is cut.
    pub cuts: Cuts,
    /// How the parts are added.
    pub join: Join,
}

impl Order {
    /// Cuts and join in words.
    pub fn words(&self) -> String {
        self.cuts.words(self.join)
    }
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The order that reproduces most outputs; the simplest of several.
    pub order: Order,
    /// How many outputs it reproduces, to the bit.
    pub equal: usize,
    /// Other orders that reproduce as many.
    pub others: Vec<Order>,
    /// The first output that differs, and its f32 by `order`.
    pub first: Option<(usize, u32)>,
}

/// Work of the first race, in multiply-adds.
const SAMPLE_WORK: usize = 20_000_000_000;

struct Prepared<'a> {
    product: &'a Product,
    rows: Rows,
    panels: Panels,
    /// Whether rows of w are the rows, and those of x stand in panels.
    turned: bool,
    isa: Isa,
}

/// A rule and a cut with the joins that are still in the race.
struct Entrant {
    rule: Rule,
    cuts: usize,
    joins: Vec<Join>,
}

/// An entrant at the end of a race: number of the entrant, join, misses.
type Left = (usize, Join, usize);

impl Prepared<'_> {
    fn blocks(&self) -> usize {
        self.rows.rows() * self.panels.panels()
    }

    /// The place in `[M,N]` of a lane of a block.
    fn place(&self, block: usize, lane: usize) -> Option<usize> {
        let (row, other) = (block / self.panels.panels(), block % self.panels.panels() * LANES + lane);
        let place = if self.turned { other * self.product.n + row } else { row * self.product.n + other };
        (other < self.panels.rows()).then_some(place)
    }

    fn parts(&self, rule: Rule, cuts: &Cuts, block: usize) -> Vec<[u32; LANES]> {
        let (row, panel) = (block / self.panels.panels(), block % self.panels.panels());
        let part = |stretches: &Vec<(usize, usize)>| {
            let mut c = [0; LANES];
            for &columns in stretches {
                chain(self.isa, rule, (&self.rows, row), (&self.panels, panel), columns, &mut c);
            }
            c
        };
        cuts.parts.iter().map(part).collect()
    }

    fn hit(&self, place: usize, word: u32) -> bool {
        self.product.targets.iter().all(|target| target.rounding.same(target.words[place], word))
    }

    fn misses(&self, block: usize, words: &[u32; LANES]) -> usize {
        (0..LANES).filter(|&lane| self.place(block, lane).is_some_and(|place| !self.hit(place, words[lane]))).count()
    }
}

/// The sum of the parts.
fn joined(parts: &[[u32; LANES]], join: Join) -> [u32; LANES] {
    let (additions, last) = join.additions(parts.len());
    let mut parts = parts.to_vec();
    for (to, from) in additions {
        let other = parts[from];
        for (word, other) in parts[to].iter_mut().zip(other) {
            let sum = f32::from_bits(*word) + f32::from_bits(other);
            *word = if sum.is_nan() { NAN } else { sum.to_bits() };
        }
    }
    parts[last]
}

/// Lets the entrants compute `blocks`, and gives those that miss the fewest outputs.
fn race(
    prepared: &Prepared,
    cuts: &[Cuts],
    entrants: &[Entrant],
    blocks: &[usize],
    threads: usize,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Vec<Left> {
    let (best, next, done) = (AtomicUsize::new(usize::MAX), AtomicUsize::new(0), AtomicUsize::new(0));
    let left: Mutex<Vec<Left>> = Mutex::new(Vec::new());
    let work = || {
        // What has told orders apart before comes first.
        let mut blocks = blocks.to_vec();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(entrant) = entrants.get(number) else { break };
            let mut alive: Vec<(Join, usize)> = entrant.joins.iter().map(|&join| (join, 0)).collect();
            for at in 0..blocks.len() {
                let parts = prepared.parts(entrant.rule, &cuts[entrant.cuts], blocks[at]);
                for (join, misses) in &mut alive {
                    *misses += prepared.misses(blocks[at], &joined(&parts, *join));
                }
                let limit = best.load(Ordering::Relaxed);
                alive.retain(|&(_, misses)| misses <= limit);
                if alive.is_empty() {
                    blocks[..=at].rotate_right(1);
                    break;
                }
                // The work of one entrant alone may be long.
                if entrants.len() == 1 {
                    progress(at + 1, blocks.len());
                }
            }
            for &(_, misses) in &alive {
                best.fetch_min(misses, Ordering::Relaxed);
            }
            left.lock()
                .expect("no thread panics")
                .extend(alive.into_iter().map(|(join, misses)| (number, join, misses)));
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, entrants.len());
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, entrants.len().max(1)) {
            scope.spawn(work);
        }
    });
    let (mut left, best) = (left.into_inner().expect("no thread panics"), best.into_inner());
    left.retain(|&(_, _, misses)| misses == best);
    left.sort_by_key(|&(number, join, _)| {
        let joins = &entrants[number].joins;
        (number, joins.iter().position(|&other| other == join))
    });
    left
}

/// The order that reproduces `product`, or the nearest one. `progress` hears how much of a race is done.
pub fn search(product: &Product, format: Format, machine: Machine, progress: &(dyn Fn(usize, usize) + Sync)) -> Found {
    let turned = product.n < product.m;
    let rows = |words: &Vec<u32>| Rows::new(format, product.k, words.clone());
    let (rows, others) =
        if turned { (rows(&product.w), rows(&product.x)) } else { (rows(&product.x), rows(&product.w)) };
    let prepared = Prepared { product, rows, panels: Panels::new(others), turned, isa: machine.isa };
    let rules = Rule::all(format);
    let group = rules.iter().map(|rule| rule.group).min().expect("a rule");
    let cuts = cuts::all(product.k, group);
    let joins: Vec<Vec<Join>> = cuts.iter().map(|cuts| Join::all(cuts.parts.len())).collect();
    let entrant = |(cuts, rule): (usize, Rule)| Entrant { rule, cuts, joins: joins[cuts].clone() };
    let both = (0..cuts.len()).flat_map(|cuts| rules.iter().map(move |&rule| (cuts, rule)));
    let entrants: Vec<Entrant> = both.map(entrant).collect();

    let all: Vec<usize> = (0..prepared.blocks()).collect();
    let most = (SAMPLE_WORK / (entrants.len() * product.k * LANES)).clamp(4, 256);
    let sample: Vec<usize> = match all.len() > most {
        false => all.clone(),
        true => (0..most).map(|i| i * all.len() / most).collect(),
    };
    let left = race(&prepared, &cuts, &entrants, &sample, machine.threads, progress);
    let order = |entrants: &[Entrant], &(number, join, _): &Left| {
        let Entrant { rule, cuts: which, .. } = entrants[number];
        Order { rule, cuts: cuts[which].clone(), join }
    };
    let (entrants, left) = if sample.len() == all.len() {
        (entrants, left)
    } else {
        let again = |&(number, join, _): &Left| Entrant { joins: vec![join], ..entrants[number] };
        let entrants: Vec<Entrant> = left.iter().map(again).collect();
        let left = race(&prepared, &cuts, &entrants, &all, machine.threads, progress);
        (entrants, left)
    };
    let orders: Vec<Order> = left.iter().map(|left| order(&entrants, left)).collect();
    let (best, others) = orders.split_first().expect("the best of some");
    let misses = left[0].2;
    let first = (misses > 0).then(|| first_miss(&prepared, best)).flatten();
    let equal = product.m * product.n - misses;
    Found { order: best.clone(), equal, others: others.to_vec(), first }
}

/// The first place of `[M,N]` that an order misses, and what it gives there.
fn first_miss(prepared: &Prepared, order: &Order) -> Option<(usize, u32)> {
    let mut first: Option<(usize, u32)> = None;
    for block in 0..prepared.blocks() {
        let sum = joined(&prepared.parts(order.rule, &order.cuts, block), order.join);
        for (lane, &word) in sum.iter().enumerate() {
            let Some(place) = prepared.place(block, lane) else { continue };
            if !prepared.hit(place, word) && first.is_none_or(|(before, _)| place < before) {
                first = Some((place, word));
            }
        }
    }
    first
}
