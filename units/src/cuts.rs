//! How a library may cut a product of K columns into parts, and in which order it may add them.

use std::collections::HashSet;

/// Where the parts of a product lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// Columns of each part, ascending: stretches that one chain takes one behind the other.
    pub parts: Vec<Vec<(usize, usize)>>,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Whole,
    /// Parts of one length, the last one shorter.
    Even {
        length: usize,
    },
    /// Whole units, as evenly as they go.
    Shared {
        unit: usize,
    },
    /// Units dealt in turn.
    Dealt {
        unit: usize,
    },
    /// Two parts, cut anywhere.
    Free {
        at: usize,
    },
}

/// In which order the parts are added, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Join {
    /// One part: there is nothing to add.
    None,
    /// From the first to the last.
    Ascending,
    /// From the last to the first.
    Descending,
    /// Neighbours, then pairs of neighbours, and so on; one that is left over waits.
    Neighbours,
    /// Halves of halves, the first one not the larger.
    Halves,
    /// Halves of halves, the first one not the smaller.
    UpperHalves,
    /// The second half on top of the first, again and again.
    Fold,
}

impl Join {
    const SPLIT: [Join; 6] =
        [Join::Ascending, Join::Neighbours, Join::Fold, Join::Descending, Join::Halves, Join::UpperHalves];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Join::None => "",
            Join::Ascending => "added ascending",
            Join::Descending => "added descending",
            Join::Neighbours => "added by a tree of neighbours",
            Join::Halves => "added by a tree of halves, the smaller first",
            Join::UpperHalves => "added by a tree of halves, the larger first",
            Join::Fold => "added by a tree that folds the second half onto the first",
        }
    }

    /// Pairs of places to add, the first of which takes the sum, in their order; place `last` of the answer holds the whole.
    pub fn additions(self, parts: usize) -> (Vec<(usize, usize)>, usize) {
        let mut list = Vec::new();
        let last = match self {
            Join::None => 0,
            Join::Ascending => {
                list.extend((1..parts).map(|part| (0, part)));
                0
            }
            Join::Descending => {
                list.extend((0..parts - 1).rev().map(|part| (parts - 1, part)));
                parts - 1
            }
            Join::Neighbours => tree(0, parts, &|n| n.next_power_of_two() / 2, &mut list),
            Join::Halves => tree(0, parts, &|n| n / 2, &mut list),
            Join::UpperHalves => tree(0, parts, &|n| n.div_ceil(2), &mut list),
            Join::Fold => {
                let mut left = parts;
                while left > 1 {
                    let half = left.div_ceil(2);
                    list.extend((0..left - half).map(|part| (part, part + half)));
                    left = half;
                }
                0
            }
        };
        (list, last)
    }

    /// The orders of so many parts that differ: an addition is the same with its sides exchanged.
    pub fn all(parts: usize) -> Vec<Join> {
        if parts == 1 {
            return vec![Join::None];
        }
        let mut seen = HashSet::new();
        Join::SPLIT.into_iter().filter(|join| seen.insert(join.shape(parts))).collect()
    }

    /// Every sum on the way as the smallest parts of its two sides and how many they have: two orders with the same are one.
    fn shape(self, parts: usize) -> Vec<(Vec<usize>, Vec<usize>)> {
        let mut sums: Vec<Vec<usize>> = (0..parts).map(|part| vec![part]).collect();
        let mut shape = Vec::new();
        for (to, from) in self.additions(parts).0 {
            let other = std::mem::take(&mut sums[from]);
            let (one, two) = (sums[to].clone().min(other.clone()), sums[to].clone().max(other.clone()));
            sums[to].extend(other);
            sums[to].sort_unstable();
            shape.push((one, two));
        }
        shape.sort();
        shape
    }
}

fn tree(first: usize, parts: usize, half: &dyn Fn(usize) -> usize, list: &mut Vec<(usize, usize)>) -> usize {
    if parts > 1 {
        let left = half(parts);
        tree(first, left, half, list);
        tree(first + left, parts - left, half, list);
        list.push((first, first + left));
    }
    first
}

/// The cuts that the search tries, each once, the simplest first: the whole; parts of one length (a multiple of 16, of 8 where
/// groups are smaller, of more where K is very large); whole units shared as evenly as they go; two parts cut anywhere
/// between units; units dealt in turn.
pub fn all(k: usize, group: usize) -> Vec<Cuts> {
    // Not more than 1024 lengths.
    let least = if group <= 8 && k <= 2048 { 8 } else { 16 };
    let quantum = least.max(k.div_ceil(1024).next_power_of_two());
    let even = |length: usize| {
        let parts = (0..k).step_by(length).map(|from| vec![(from, k.min(from + length))]).collect();
        Cuts { parts, kind: Kind::Even { length } }
    };
    let mut all = vec![Cuts { parts: vec![vec![(0, k)]], kind: Kind::Whole }];
    all.extend((1..).map(|n| n * quantum).take_while(|&length| length < k).map(even));
    for unit in [16, 32, 64, 128, 256] {
        let units = k.div_ceil(unit);
        for parts in 2..=units.min(64) {
            let (each, more) = (units / parts, units % parts);
            all.push(shared(k, unit, parts, |part| part * each + part.min(more)));
            all.push(shared(k, unit, parts, |part| part * each + (part + more).saturating_sub(parts)));
            all.push(shared(k, unit, parts, |part| part * units / parts));
        }
    }
    let free = |at: usize| Cuts { parts: vec![vec![(0, at)], vec![(at, k)]], kind: Kind::Free { at } };
    all.extend((1..).map(|n| n * quantum).take_while(|&at| at < k).map(free));
    for unit in [16, 32, 64, 128] {
        for parts in [2, 4, 8].into_iter().filter(|&parts| parts < k.div_ceil(unit)) {
            let part = |part: usize| {
                let from = (part * unit..k).step_by(parts * unit);
                from.map(|from| (from, k.min(from + unit))).collect()
            };
            all.push(Cuts { parts: (0..parts).map(part).collect(), kind: Kind::Dealt { unit } });
        }
    }
    let mut seen = HashSet::new();
    all.retain(|cuts| seen.insert(cuts.parts.clone()));
    all.sort_by_key(|cuts| (cuts.parts.len(), cuts.rank()));
    all
}

fn shared(k: usize, unit: usize, parts: usize, begins: impl Fn(usize) -> usize) -> Cuts {
    let at = |part: usize| k.min(begins(part) * unit);
    Cuts { parts: (0..parts).map(|part| vec![(at(part), at(part + 1))]).collect(), kind: Kind::Shared { unit } }
}

impl Cuts {
    fn rank(&self) -> usize {
        match self.kind {
            Kind::Whole => 0,
            Kind::Even { .. } => 1,
            Kind::Shared { .. } => 2,
            Kind::Dealt { .. } => 3,
            Kind::Free { .. } => 4,
        }
    }

    /// The units of powers of two that cut K into so many parts of this length, as a library does: a part has the smallest
    /// number of whole units with which the parts suffice.
    pub fn units(&self) -> Vec<usize> {
        let Kind::Even { length } = self.kind else {
            return match self.kind {
                Kind::Shared { unit } | Kind::Dealt { unit } => vec![unit],
                _ => vec![],
            };
        };
        let k = self.parts.last().expect("a part")[0].1;
        let fits = |unit: &usize| unit * k.div_ceil(unit * self.parts.len()) == length;
        let powers: Vec<usize> = (4..=14).map(|power| 1 << power).filter(fits).collect();
        if powers.is_empty() { vec![length] } else { powers }
    }

    /// In words, joined by `join`.
    pub fn words(&self, join: Join) -> String {
        let (parts, join) = (self.parts.len(), join.name());
        match &self.kind {
            Kind::Whole => "one chain".into(),
            Kind::Even { length } => {
                let units: Vec<String> = self.units().iter().map(usize::to_string).collect();
                format!("{parts} parts of {length} (units of {}), {join}", units.join(" or "))
            }
            Kind::Shared { unit } => {
                let lengths: Vec<String> = self.parts.iter().map(|part| (part[0].1 - part[0].0).to_string()).collect();
                format!("{parts} parts of {} (whole units of {unit}, shared evenly), {join}", lengths.join(" + "))
            }
            Kind::Dealt { unit } => format!("{parts} parts of units of {unit} dealt in turn, {join}"),
            Kind::Free { at } => format!("2 parts, cut at {at}, {join}"),
        }
    }
}
