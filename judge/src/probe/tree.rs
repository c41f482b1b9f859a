//! The order of a sum as a tree: which forms the contract declares, how one is written, and where its terms meet.

use std::collections::BTreeMap;

/// A summation tree over leaves 0..n; a node of more than two children adds them at once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tree {
    /// A term.
    Leaf(usize),
    /// A sum, its children ordered by their first leaves.
    Node(Vec<Tree>),
}

impl Tree {
    pub(super) fn first(&self) -> usize {
        match self {
            Tree::Leaf(i) => *i,
            Tree::Node(children) => children.iter().map(Tree::first).min().unwrap_or(0),
        }
    }

    pub(super) fn leaves(&self) -> usize {
        match self {
            Tree::Leaf(_) => 1,
            Tree::Node(children) => children.iter().map(Tree::leaves).sum(),
        }
    }

    /// `a + b`, or both added at once to what `a` adds when `fused`.
    pub(super) fn join(parts: Vec<Tree>) -> Tree {
        let mut parts = parts;
        parts.sort_by_key(Tree::first);
        if parts.len() == 1 { parts.remove(0) } else { Tree::Node(parts) }
    }

    /// The chain over `from..to`: every term is added to the sum of those before it.
    pub fn chain(from: usize, to: usize) -> Option<Tree> {
        (from..to).map(Tree::Leaf).reduce(|sum, term| Tree::Node(vec![sum, term]))
    }

    /// The sum `lanes` over `from..to`: 256 lanes of chains, folded by halves.
    pub fn lanes(from: usize, to: usize) -> Option<Tree> {
        Tree::strided(from, to, 256)
    }

    /// The sum over 64 chains of tokens, folded by halves.
    pub fn tokens(n: usize) -> Option<Tree> {
        Tree::strided(0, n, 64)
    }

    fn strided(from: usize, to: usize, count: usize) -> Option<Tree> {
        let lane =
            |l: usize| (from + l..to).step_by(count).map(Tree::Leaf).reduce(|sum, term| Tree::Node(vec![sum, term]));
        let mut lanes: Vec<Option<Tree>> = (0..count).map(lane).collect();
        while lanes.len() > 1 {
            let upper = lanes.split_off(lanes.len() / 2);
            lanes = lanes.into_iter().zip(upper).map(|(a, b)| Tree::sum(a, b)).collect();
        }
        lanes.pop().flatten()
    }

    /// Eight segments of `n` terms, each summed as `part` says, joined as a tree.
    pub fn segments(n: usize, part: fn(usize, usize) -> Option<Tree>) -> Option<Tree> {
        let length = 16 * n.div_ceil(128);
        let mut parts: Vec<Option<Tree>> =
            (0..8).map(|s| part((s * length).min(n), ((s + 1) * length).min(n))).collect();
        while parts.len() > 1 {
            parts = parts.chunks(2).map(|two| Tree::sum(two[0].clone(), two[1].clone())).collect();
        }
        parts.pop().flatten()
    }

    /// A sum of nothing is +0, and adding it is not seen.
    fn sum(a: Option<Tree>, b: Option<Tree>) -> Option<Tree> {
        match (a, b) {
            (Some(a), Some(b)) => Some(Tree::join(vec![a, b])),
            (a, b) => a.or(b),
        }
    }

    /// What the contract declares for the weighted sum of `n` values in attention: chains over blocks of 256 keys,
    /// added in ascending order.
    pub fn blocks(n: usize) -> Option<Tree> {
        let blocks = (0..n).step_by(256).map(|from| Tree::chain(from, (from + 256).min(n)).expect("not empty"));
        blocks.reduce(|sum, block| Tree::Node(vec![sum, block]))
    }

    /// In one line: `a..b` is a chain over the terms a to b-1, `a..b by s` one over every s-th of them, `(x + y)` a
    /// sum, `{x, y, z}` a sum of several at once.
    pub fn text(&self) -> String {
        let range = |first: usize, last: usize, step: usize| match step {
            1 => format!("{first}..{}", last + 1),
            _ => format!("{first}..{} by {step}", last + 1),
        };
        match (self, self.as_chain()) {
            (Tree::Leaf(i), _) => i.to_string(),
            (_, Some((first, last, step))) if step == 1 || last - first > step => range(first, last, step),
            // A chain that begins with something else than a term is written from there.
            (Tree::Node(children), _) if children.len() == 2 => {
                let (mut head, mut tail) = (self, Vec::new());
                while let Tree::Node(pair) = head
                    && let [sum, Tree::Leaf(i)] = pair.as_slice()
                    && match tail.as_slice() {
                        [] => true,
                        [last] => last > i,
                        [.., before, last] => last + last == before + i,
                    }
                {
                    tail.push(*i);
                    head = sum;
                }
                match tail.as_slice() {
                    [last, before, .., first] => {
                        format!("({} then {})", head.text(), range(*first, *last, last - before))
                    }
                    [last, before] if last - before == 1 => format!("({} then {before}..{})", head.text(), last + 1),
                    _ => format!("({} + {})", children[0].text(), children[1].text()),
                }
            }
            (Tree::Node(children), _) => {
                format!("{{{}}}", children.iter().map(Tree::text).collect::<Vec<_>>().join(", "))
            }
        }
    }

    /// The first term, the last and the step, if it is a chain over such terms.
    fn as_chain(&self) -> Option<(usize, usize, usize)> {
        let (mut at, mut last, mut before, mut step) = (self, None, None, None);
        loop {
            let (term, rest) = match at {
                Tree::Leaf(i) => (*i, None),
                Tree::Node(children) => match children.as_slice() {
                    [sum, Tree::Leaf(i)] => (*i, Some(sum)),
                    _ => return None,
                },
            };
            if let Some(before) = before {
                let by = usize::checked_sub(before, term).filter(|by| *by > 0)?;
                if *step.get_or_insert(by) != by {
                    return None;
                }
            }
            before = Some(term);
            let last = *last.get_or_insert(term);
            match rest {
                None => return Some((term, last, step.unwrap_or(1))),
                Some(sum) => at = sum,
            }
        }
    }

    /// Of every [a, b, c] whether terms b and c meet before either meets a.
    pub(super) fn met(&self, triples: &[[usize; 3]]) -> Vec<bool> {
        let sums = Sums::of(self);
        triples.iter().map(|&[a, b, c]| sums.depth[sums.meet(b, c)] > sums.depth[sums.meet(a, b)]).collect()
    }

    /// Of every pair of terms how many terms stand under the sum in which they meet.
    pub(super) fn under(&self, pairs: &[(usize, usize)]) -> Vec<usize> {
        let sums = Sums::of(self);
        pairs.iter().map(|&(i, j)| sums.size[sums.meet(i, j)]).collect()
    }

    /// For every leaf how many leaves stand under the sum in which it meets leaf 0.
    pub(super) fn under_first(&self) -> Vec<usize> {
        let mut sizes = vec![1; self.leaves()];
        let mut at = self;
        while let Tree::Node(children) = at {
            let (size, mut todo) = (at.leaves(), children[1..].iter().collect::<Vec<_>>());
            while let Some(tree) = todo.pop() {
                match tree {
                    Tree::Leaf(i) => sizes[*i] = size,
                    Tree::Node(children) => todo.extend(children),
                }
            }
            at = &children[0];
        }
        sizes
    }
}

/// The sums of a tree, numbered from the root.
struct Sums {
    parent: Vec<Option<usize>>,
    depth: Vec<usize>,
    /// How many terms stand under each.
    size: Vec<usize>,
    /// The number of every term.
    term: BTreeMap<usize, usize>,
}

impl Sums {
    fn of(tree: &Tree) -> Sums {
        let mut sums = Sums { parent: Vec::new(), depth: Vec::new(), size: Vec::new(), term: BTreeMap::new() };
        let mut todo = vec![(tree, None, 0)];
        while let Some((tree, parent, depth)) = todo.pop() {
            let this = sums.parent.len();
            sums.parent.push(parent);
            sums.depth.push(depth);
            sums.size.push(0);
            match tree {
                Tree::Leaf(i) => {
                    sums.term.insert(*i, this);
                    let mut above = Some(this);
                    while let Some(at) = above {
                        sums.size[at] += 1;
                        above = sums.parent[at];
                    }
                }
                Tree::Node(children) => todo.extend(children.iter().map(|child| (child, Some(this), depth + 1))),
            }
        }
        sums
    }

    /// The sum in which two terms meet.
    fn meet(&self, a: usize, b: usize) -> usize {
        let (mut a, mut b) = (self.term[&a], self.term[&b]);
        while a != b {
            let up = if self.depth[a] >= self.depth[b] { &mut a } else { &mut b };
            *up = self.parent[*up].expect("all meet at the root");
        }
        a
    }
}
