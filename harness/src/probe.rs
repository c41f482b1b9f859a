//! What arithmetic does a kernel do? Questions whose answers give it away: the order of its sums, what its accumulator
//! keeps and how it rounds, what it does with its operands, with subnormals, beyond the range and with special values.
//!
//! An implementation is asked as in any other judgment, over [`Implementation::run`]; nothing is assumed of how it works.

use crate::implementation::Implementation;
use samebits_contract::case::{Answer, Case, Config, Status};
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

/// A summation tree over leaves 0..n; a node of more than two children adds them at once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tree {
    /// A term.
    Leaf(usize),
    /// A sum, its children ordered by their first leaves.
    Node(Vec<Tree>),
}

impl Tree {
    fn first(&self) -> usize {
        match self {
            Tree::Leaf(i) => *i,
            Tree::Node(children) => children.iter().map(Tree::first).min().unwrap_or(0),
        }
    }

    fn leaves(&self) -> usize {
        match self {
            Tree::Leaf(_) => 1,
            Tree::Node(children) => children.iter().map(Tree::leaves).sum(),
        }
    }

    /// `a + b`, or both added at once to what `a` adds when `fused`.
    fn join(parts: Vec<Tree>) -> Tree {
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
        let lane =
            |l: usize| (from + l..to).step_by(256).map(Tree::Leaf).reduce(|sum, term| Tree::Node(vec![sum, term]));
        let mut lanes: Vec<Option<Tree>> = (0..256).map(lane).collect();
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

    /// What the contract declares for the weighted sum of `n` values in attention: chains over blocks of 256 keys, added in
    /// ascending order.
    pub fn blocks(n: usize) -> Option<Tree> {
        let blocks = (0..n).step_by(256).map(|from| Tree::chain(from, (from + 256).min(n)).expect("not empty"));
        blocks.reduce(|sum, block| Tree::Node(vec![sum, block]))
    }

    /// In one line: `a..b` is a chain over the terms a to b-1, `a..b by s` one over every s-th of them, `(x + y)` a sum,
    /// `{x, y, z}` a sum of several at once.
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
    fn met(&self, triples: &[[usize; 3]]) -> Vec<bool> {
        // Every node's parent and depth; the leaves' numbers among the nodes.
        let (mut parents, mut leaves, mut todo) = (Vec::new(), BTreeMap::new(), vec![(self, None, 0)]);
        while let Some((tree, parent, depth)) = todo.pop() {
            let this = parents.len();
            parents.push((parent, depth));
            match tree {
                Tree::Leaf(i) => drop(leaves.insert(*i, this)),
                Tree::Node(children) => todo.extend(children.iter().map(|child| (child, Some(this), depth + 1))),
            }
        }
        let meet = |a: usize, b: usize| {
            let (mut a, mut b) = (leaves[&a], leaves[&b]);
            while a != b {
                let up = if parents[a].1 >= parents[b].1 { &mut a } else { &mut b };
                *up = parents[*up].0.expect("all meet at the root");
            }
            parents[a].1
        };
        triples.iter().map(|&[a, b, c]| meet(b, c) > meet(a, b)).collect()
    }

    /// For every leaf how many leaves stand under the sum in which it meets leaf 0.
    fn under_first(&self) -> Vec<usize> {
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

    fn depth(&self) -> usize {
        // Without recursion along a chain, which may be long.
        let (mut at, mut depth, mut most) = (self, 0, 0);
        while let Tree::Node(children) = at {
            depth += 1;
            let side = children.iter().skip(1).map(Tree::depth).max().unwrap_or(0);
            most = most.max(depth + side);
            at = &children[0];
        }
        most.max(depth)
    }

    /// A drawing: terms in a row, every sum above what it adds.
    pub fn svg(&self, title: &str) -> String {
        let (step, level, margin) = (14.0, 14.0, 24.0);
        let (n, depth) = (self.leaves(), self.depth());
        let (width, height) = (2.0 * margin + step * n as f64, 3.0 * margin + level * depth as f64);
        let title = title.replace('&', "&amp;").replace('<', "&lt;");
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
             role=\"img\"><title>{title}</title>\n<style>text{{font:9px sans-serif;text-anchor:middle;fill:currentColor}}\
             path{{stroke:currentColor;fill:none}}circle{{fill:currentColor}}</style>\n\
             <text x=\"{margin}\" y=\"14\" style=\"text-anchor:start;font-size:12px\">{title}</text>\n"
        );
        let base = height - margin;
        let mut place = 0;
        draw(self, &mut svg, &mut place, &|slot| margin + step * (slot as f64 + 0.5), base, level);
        svg + "</svg>\n"
    }
}

/// Draws a tree and returns where its top is: x and height in levels.
fn draw(
    tree: &Tree,
    svg: &mut String,
    place: &mut usize,
    x: &dyn Fn(usize) -> f64,
    base: f64,
    level: f64,
) -> (f64, usize) {
    match tree {
        Tree::Leaf(i) => {
            let at = x(*place);
            *place += 1;
            let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{:.1}\">{i}</text>", base + 12.0);
            (at, 0)
        }
        Tree::Node(children) => {
            let tops: Vec<_> = children.iter().map(|child| draw(child, svg, place, x, base, level)).collect();
            let height = 1 + tops.iter().map(|(_, height)| *height).max().unwrap_or(0);
            let middle = tops.iter().map(|(x, _)| x).sum::<f64>() / tops.len() as f64;
            let y = |height: usize| base - level * height as f64;
            for (x, below) in tops {
                let _ = writeln!(svg, "<path d=\"M{x:.1} {:.1}V{1:.1}H{middle:.1}\"/>", y(below), y(height));
            }
            let radius = if children.len() > 2 { 4.0 } else { 2.0 };
            let _ = writeln!(svg, "<circle cx=\"{middle:.1}\" cy=\"{:.1}\" r=\"{radius}\"/>", y(height));
            (middle, height)
        }
    }
}

/// The op whose sum is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// The sum over k of a matrix product, whose other operand is all ones.
    Gemm,
    /// The sum over keys of the values, whose weights are all equal.
    Attention,
    /// The sum of the squares.
    RmsNorm,
    /// The sum of the weights.
    Softmax,
    /// The sum of the weights.
    Logprob,
}

impl Op {
    /// All of them.
    pub const ALL: [Op; 5] = [Op::Gemm, Op::Attention, Op::RmsNorm, Op::Softmax, Op::Logprob];

    /// The op's stem.
    pub fn name(self) -> &'static str {
        match self {
            Op::Gemm => "gemm",
            Op::Attention => "attention",
            Op::RmsNorm => "rms_norm",
            Op::Softmax => "softmax",
            Op::Logprob => "logprob",
        }
    }

    /// The tree that the contract declares for `n` terms.
    pub fn declared(self, n: usize) -> Option<Tree> {
        match self {
            Op::Gemm => Tree::segments(n, Tree::chain),
            Op::Attention => Tree::blocks(n),
            Op::RmsNorm => Tree::lanes(0, n),
            Op::Softmax | Op::Logprob => Tree::segments(n, Tree::lanes),
        }
    }
}

/// Rows of one call whose sums have different orders.
pub struct RowsApart {
    /// The order in row 0.
    pub first: Tree,
    /// Another row.
    pub row: usize,
    /// The order there.
    pub other: Tree,
}

/// An implementation that is asked.
pub struct Probe<'a> {
    /// Who.
    pub implementation: &'a dyn Implementation,
    /// Dtype of the inputs.
    pub dtype: DType,
    /// Dtype of the outputs that show the order of a sum.
    pub out: DType,
    /// Columns of a matrix product.
    pub columns: usize,
    /// How it is asked to run.
    pub config: Config,
}

impl Probe<'_> {
    fn ask(
        &self,
        op: &str,
        out: DType,
        params: &[(&str, String)],
        inputs: Vec<(&str, Tensor)>,
    ) -> Result<Answer, String> {
        let case = Case {
            name: format!("probe/{op}"),
            op: op.into(),
            out,
            params: params.iter().map(|(name, value)| (name.to_string(), value.clone())).collect(),
            inputs: inputs.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect(),
            config: self.config.clone(),
        };
        let answer = self.implementation.run(&case);
        match answer.status {
            Status::Ok => Ok(answer),
            _ => Err(answer.reason),
        }
    }

    /// The sums of `rows` in f32, all rows in one call: the products of each with ones, or the values under equal weights.
    fn sums(&self, op: Op, rows: &[Vec<f64>]) -> Result<Vec<f64>, String> {
        let (m, n) = (rows.len(), rows[0].len());
        let flat: Vec<f64> = rows.iter().flatten().copied().collect();
        let make = |shape: &[usize], values: &[f64]| round::tensor(self.dtype, shape, values);
        match op {
            Op::Gemm => {
                let columns = self.columns;
                let x = make(&[m, n], &flat);
                let answer = self.ask(
                    "gemm",
                    self.out,
                    &[],
                    vec![("x", x), ("w", make(&[columns, n], &vec![1.0; columns * n]))],
                )?;
                let y = answer.outputs.get("y").filter(|y| y.len() == m * columns).ok_or("the answer lacks `y`")?;
                Ok((0..m).map(|row| y.value(row * columns)).collect())
            }
            Op::Attention => {
                // Every row is a sequence of its own with one query of zeros, so that all scores are 0.
                let zeros = |count: usize| vec![0.0; count];
                let int =
                    |shape: &[usize], value: usize| Tensor::i32(shape, vec![value as i32; shape.iter().product()]);
                let inputs = vec![
                    ("q", make(&[m, 1, 1, 16], &zeros(m * 16))),
                    ("k", make(&[m, n, 1, 16], &zeros(m * n * 16))),
                    ("v", make(&[m, n, 1, 1], &flat)),
                    ("q_pos", int(&[m, 1], n - 1)),
                    ("kv_len", int(&[m], n)),
                ];
                let answer = self.ask("attention", self.out, &[], inputs)?;
                let out = answer.outputs.get("out").filter(|out| out.len() == m).ok_or("the answer lacks `out`")?;
                // Divided by the number of keys, a power of two.
                Ok((0..m).map(|row| out.value(row) * n as f64).collect())
            }
            Op::RmsNorm | Op::Softmax | Op::Logprob => Err("its terms are never negative".into()),
        }
    }

    /// The order of a sum of `n` terms, when `batch` rows are computed together.
    ///
    /// # Errors
    /// When the implementation does not answer, or answers what no tree gives.
    pub fn tree(&self, op: Op, n: usize, batch: usize) -> Result<Tree, String> {
        match op {
            Op::Gemm | Op::Attention => self.tree_of_signed(op, n, batch, 0..batch),
            Op::RmsNorm | Op::Softmax | Op::Logprob => self.tree_of_positive(op, n, batch),
        }
    }

    /// The order in row 0 of `batch` rows and that of the first row that has another one, if there is one. Sums of terms that
    /// are never negative are not looked at.
    ///
    /// # Errors
    /// As [`Probe::tree`].
    pub fn rows_apart(&self, op: Op, n: usize, batch: usize) -> Result<Option<RowsApart>, String> {
        if !matches!(op, Op::Gemm | Op::Attention) {
            return Ok(None);
        }
        let at = |row: usize| self.tree_of_signed(op, n, batch, row..row + 1);
        let first = at(0)?;
        match self.row_of_another_order(op, &first, batch)? {
            None => Ok(None),
            Some(row) => Ok(Some(RowsApart { first, row, other: at(row)? })),
        }
    }

    /// The first of `batch` rows that does not add its terms as `tree` does, by where some of them meet term 0.
    fn row_of_another_order(&self, op: Op, tree: &Tree, batch: usize) -> Result<Option<usize>, String> {
        let sizes = tree.under_first();
        for draw in 0..sizes.len().min(24) {
            let j = 1 + 7919 * draw % (sizes.len() - 1).max(1);
            let found = self.sizes_under(op, sizes.len(), &vec![Some((0, j)); batch])?;
            if let Some(row) = found.iter().position(|found| *found != sizes[j]) {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }

    /// A term that is counted and one beside which all of them together are lost.
    fn unit_and_mass(&self) -> (f64, f64) {
        match self.dtype {
            // As far apart as fp16 goes: a sum of n units must be lost beside the mass, in 24 bits for n up to 2^14.
            DType::Fp16 => (round::pow2(-24), round::pow2(15)),
            _ => (1.0, round::pow2(60)),
        }
    }

    /// For each row the leaves under the smallest subtree that holds its pair of terms; of a row without a pair, all.
    fn sizes_under(&self, op: Op, n: usize, pairs: &[Option<(usize, usize)>]) -> Result<Vec<usize>, String> {
        let (unit, mass) = self.unit_and_mass();
        let mut rows = vec![vec![unit; n]; pairs.len()];
        for (row, pair) in rows.iter_mut().zip(pairs) {
            if let Some((i, j)) = *pair {
                (row[i], row[j]) = (mass, -mass);
            }
        }
        let left = self.sums(op, &rows)?.into_iter().zip(pairs).map(|(left, pair)| {
            let left = left / unit;
            match pair {
                None => Ok(n),
                Some(_) if left.fract() == 0.0 && (0.0..=n as f64 - 2.0).contains(&left) => Ok(n - left as usize),
                Some(_) => Err(format!("{left} of {n} units are left over, which no order of a sum explains")),
            }
        });
        left.collect()
    }

    /// Of terms that may cancel (FPRev): all terms are a unit but two, +M and
    /// -M, so large that units added before these two meet are lost. What is left counts the units that were added later, that is
    /// the leaves outside of the smallest subtree that holds both.
    ///
    /// Each of the rows `asked` holds a question of its own; where these are several, every row is then held to the answer.
    fn tree_of_signed(&self, op: Op, n: usize, batch: usize, asked: Range<usize>) -> Result<Tree, String> {
        if op == Op::Attention && !n.is_power_of_two() {
            return Err(format!("{n} keys: use a power of two, by which a division is exact"));
        }
        let (unit, _) = self.unit_and_mass();
        let plain = self.sums(op, &vec![vec![unit; n]; batch])?;
        if let Some(sum) = plain.iter().find(|sum| **sum != unit * n as f64) {
            let holder = if self.out == DType::Fp32 { "the accumulator does" } else { "accumulator or output do" };
            return Err(format!("a sum of {n} units is {} units: {holder} not hold it", sum / unit));
        }
        let mut under = |pairs: &[(usize, usize)]| -> Result<Vec<usize>, String> {
            let mut found = Vec::new();
            for part in pairs.chunks(asked.len()) {
                let mut rows = vec![None; batch];
                rows[asked.clone()].iter_mut().zip(part).for_each(|(row, pair)| *row = Some(*pair));
                found.extend(self.sizes_under(op, n, &rows)?.into_iter().skip(asked.start).take(part.len()));
            }
            Ok(found)
        };
        let tree = build(&(0..n).collect::<Vec<_>>(), &mut under)?.0;
        if asked.len() > 1
            && let Some(row) = self.row_of_another_order(op, &tree, batch)?
        {
            return Err(format!("row {row} adds its terms in another order than the rows before it"));
        }
        Ok(tree)
    }

    /// Of terms that are never negative. All are 0 but three: one so large that each of the other two is lost beside it,
    /// being less than half of its last bit, while both together are more than half. The last bit changes when the two meet
    /// before either meets the large one. So every three terms tell which two are added first, and that is the tree.
    fn tree_of_positive(&self, op: Op, n: usize, batch: usize) -> Result<Tree, String> {
        if self.out != DType::Fp32 {
            return Err("the last bit of such a sum is seen in fp32 outputs alone".into());
        }
        let terms = self.terms(op, n, batch)?;
        let mut ask = |triples: &[[usize; 3]]| -> Result<Vec<bool>, String> {
            let mut met = Vec::with_capacity(triples.len());
            for part in triples.chunks(batch) {
                let rows = part.iter().map(|&[large, a, b]| (large, vec![(a, terms.small[0]), (b, terms.small[1])]));
                for value in self.seen(op, n, batch, &terms, rows.collect())? {
                    match value {
                        _ if value == terms.lost => met.push(false),
                        _ if value == terms.kept => met.push(true),
                        _ => {
                            return Err(format!(
                                "{value:e}, where a last bit makes {:e} or {:e}",
                                terms.lost, terms.kept
                            ));
                        }
                    }
                }
            }
            Ok(met)
        };
        let tree = grow((0..n).collect(), &mut ask)?;
        // What was not asked for must fit as well: three terms of each of n draws.
        let draw = |i: usize, k: usize| (i * (7919 + 104_729 * k) + k) % n;
        let others: Vec<[usize; 3]> = (0..n).map(|i| [draw(i, 0), draw(i, 1), draw(i, 2)]).collect();
        let others: Vec<[usize; 3]> = others.into_iter().filter(|[a, b, c]| a != b && b != c && a != c).collect();
        if tree.met(&others) == ask(&others)? { Ok(tree) } else { Err("no order of a sum explains all answers".into()) }
    }

    /// Inputs for [`Probe::tree_of_positive`] whose last bit is seen in the output.
    fn terms(&self, op: Op, n: usize, batch: usize) -> Result<Terms, String> {
        // In units of half of the last bit of the large term: 0.71 and 0.52, and 1.23 for what is kept by itself; of a softmax
        // 0.79, 0.54 and 1.30.
        let candidates: Vec<(f64, [f64; 2], f64)> = match op {
            Op::RmsNorm => {
                (0..53).map(|q| (256.0 + 2.0 * f64::from(q), [27.0 / 512.0, 23.0 / 512.0], 71.0 / 1024.0)).collect()
            }
            _ => vec![(0.0, [-16.875, -17.25], -16.375)],
        };
        for (large, small, alone) in candidates {
            let none = if op == Op::RmsNorm { 0.0 } else { -9984.0 };
            let mut terms = Terms { large, small, none, lost: f64::NAN, kept: f64::NAN };
            let rows = vec![(0, vec![(1, small[0])]), (0, vec![(1, alone)]), (0, vec![(1, small[1])])];
            let mut values = Vec::new();
            for row in rows {
                values.extend(self.seen(op, n, batch, &terms, vec![row])?);
            }
            if values[0] != values[1] && values[0] == values[2] {
                (terms.lost, terms.kept) = (values[0], values[1]);
                return Ok(terms);
            }
        }
        Err("the last bit of the sum is not seen in the output: it is kept in another width than fp32".into())
    }

    /// For each of `rows`, (the large term, the others that are not 0), the output that shows its sum.
    fn seen(
        &self,
        op: Op,
        n: usize,
        batch: usize,
        terms: &Terms,
        rows: Vec<(usize, Vec<(usize, f64)>)>,
    ) -> Result<Vec<f64>, String> {
        let mut values = vec![terms.none; batch * n];
        let mut shown: Vec<usize> = rows.iter().map(|(large, _)| *large).collect();
        shown.resize(batch, 0);
        for row in 0..batch {
            values[row * n + shown[row]] = terms.large;
        }
        for (row, (_, others)) in rows.iter().enumerate() {
            others.iter().for_each(|&(term, value)| values[row * n + term] = value);
        }
        let x = round::tensor(self.dtype, &[batch, n], &values);
        let ones = || round::tensor(self.dtype, &[n], &vec![1.0; n]);
        let (inputs, output) = match op {
            Op::RmsNorm => (vec![("x", x), ("w", ones())], "y"),
            Op::Softmax => (vec![("x", x)], "y"),
            _ => {
                let target = shown.iter().map(|&large| large as i32).collect();
                (vec![("logits", x), ("target", Tensor::i32(&[batch], target))], "logprob")
            }
        };
        let params = if op == Op::RmsNorm { vec![("eps", "0".to_string())] } else { Vec::new() };
        let answer = self.ask(op.name(), DType::Fp32, &params, inputs)?;
        let width = if op == Op::Logprob { 1 } else { n };
        let found = answer.outputs.get(output).filter(|y| y.len() == batch * width);
        let found = found.ok_or_else(|| format!("the answer lacks `{output}`"))?;
        let place = |row: usize| row * width + if width == n { shown[row] } else { 0 };
        Ok((0..rows.len()).map(|row| found.value(place(row))).collect())
    }

    /// The sum of the products of two rows, in `out`.
    fn dot(&self, x: &[f64], w: &[f64], out: DType) -> Result<Tensor, String> {
        let make = |values: &[f64]| round::tensor(self.dtype, &[1, values.len()], values);
        let answer = self.ask("gemm", out, &[], vec![("x", make(x)), ("w", make(w))])?;
        answer
            .outputs
            .get("y")
            .filter(|y| y.len() == 1 && y.dtype() == out)
            .cloned()
            .ok_or("the answer lacks `y`".into())
    }

    /// The sum of `terms`; those too small for fp16 are products.
    fn sum(&self, terms: &[f64]) -> Result<f64, String> {
        let small = |term: f64| term != 0.0 && term.abs() < round::pow2(-13) && self.dtype == DType::Fp16;
        let factors: Vec<f64> = terms.iter().map(|&term| if small(term) { round::pow2(-12) } else { 1.0 }).collect();
        let terms: Vec<f64> = terms.iter().zip(&factors).map(|(term, factor)| term / factor).collect();
        Ok(self.dot(&terms, &factors, DType::Fp32)?.value(0))
    }

    /// What the arithmetic of a matrix product is: question, what was found, what the contract declares.
    ///
    /// # Errors
    /// When the implementation does not answer.
    pub fn arithmetic(&self) -> Result<Vec<Finding>, String> {
        let wide = self.dtype == DType::Fp32;
        let mut findings = Vec::new();
        let mut found = |question: &'static str, found: String, declared: &str| {
            findings.push(Finding { question, found, declared: declared.into() });
        };
        let pow = round::pow2;

        // The smallest term beside 1 that is there after the 1 has gone again. fp16 has no numbers below 2^-24, and a product
        // of two goes to 2^-36 here.
        let lowest = if self.dtype == DType::Fp16 { 36 } else { 60 };
        let mut kept = 0;
        for p in 1..=lowest {
            // Whatever is added first, the 1 meets the small term before it goes.
            if self.sum(&[1.0, pow(-p), -1.0])? != pow(-p) {
                break;
            }
            kept = p;
        }
        let width = match kept + 1 {
            8 => "8 bits, as bf16".to_string(),
            11 => "11 bits, as fp16 or TF32".into(),
            24 => "24 bits, as fp32".into(),
            53 => "53 bits, as fp64".into(),
            bits if kept == lowest => format!("at least {bits} bits"),
            bits => format!("{bits} bits"),
        };
        found("accumulator", width, "24 bits, as fp32");

        let ulp = pow(-23);
        let sums = [
            self.sum(&[1.0, ulp * 0.5])?,
            self.sum(&[1.0, ulp * 0.75])?,
            self.sum(&[-1.0, ulp * -0.75])?,
            self.sum(&[1.0, ulp, ulp * 0.5])?,
        ];
        found("rounding of a sum", direction(sums, ulp), "to nearest, ties to even");

        // Products: 2^-24 is what the rounding of a product alone would lose.
        if wide {
            let a = 1.0 + pow(-12);
            let c = -(1.0 + pow(-11));
            let fused = self.dot(&[c, a], &[1.0, a], DType::Fp32)?.value(0) == pow(-24);
            let after = self.dot(&[a, c], &[a, 1.0], DType::Fp32)?.value(0) == pow(-24);
            let how = match (fused, after) {
                (true, false) | (false, true) => "fused into the sum (fma)",
                (true, true) => "exact in a wider accumulator",
                (false, false) => "rounded before they are added",
            };
            found("products", how.into(), "fused into the sum (fma)");
            let x = 1.0 + pow(-23);
            let operand =
                |bits: i32| -> Result<f64, String> { Ok(self.dot(&[1.0 + pow(-bits)], &[1.0], DType::Fp32)?.value(0)) };
            let how = if self.dot(&[x], &[1.0], DType::Fp32)?.value(0) == x {
                "whole".to_string()
            } else {
                let kept = (1..=23).take_while(|&bits| operand(bits).is_ok_and(|v| v == 1.0 + pow(-bits))).count();
                let name = match kept {
                    10 => ", as TF32",
                    7 => ", as bf16",
                    _ => "",
                };
                format!("cut to {kept} bits of mantissa{name}")
            };
            found("fp32 operands", how, "whole");
        } else {
            let x = 1.0 + pow(-7);
            let exact = self.dot(&[x], &[x], DType::Fp32)?.value(0) == x * x;
            found("products", if exact { "exact" } else { "rounded" }.into(), "exact");
        }

        // Subnormals of f32 in, and of f32 and of the narrow output out.
        let tiny = if self.dtype == DType::Fp16 { pow(-20) } else { pow(-130) };
        let back = if self.dtype == DType::Fp16 { pow(10) } else { pow(100) };
        let input = self.dot(&[tiny], &[back], DType::Fp32)?.value(0);
        found(
            "subnormal operands",
            if input == tiny * back { "read as they are" } else { "read as zero" }.into(),
            "read as they are",
        );
        if self.dtype != DType::Fp16 {
            let output = self.dot(&[pow(-100)], &[pow(-35)], DType::Fp32)?.value(0);
            let kept = if output == pow(-135) { "kept" } else { "flushed to zero" };
            found("subnormal sums", kept.into(), "kept");
        }

        for out in [DType::Bf16, DType::Fp16] {
            let ulp = if out == DType::Bf16 { pow(-7) } else { pow(-10) };
            let narrow = |terms: &[f64]| self.dot(terms, &vec![1.0; terms.len()], out).map(|y| y.value(0));
            let sums = (|| {
                let all = [
                    narrow(&[1.0, ulp * 0.5])?,
                    narrow(&[1.0, ulp * 0.75])?,
                    narrow(&[-1.0, ulp * -0.75])?,
                    narrow(&[1.0, ulp, ulp * 0.5])?,
                ];
                Ok::<_, String>(all)
            })();
            let (question, how) =
                if out == DType::Bf16 { ("last rounding to bf16", sums) } else { ("last rounding to fp16", sums) };
            let how = how.map_or_else(|reason| format!("not offered: {reason}"), |sums| direction(sums, ulp));
            found(question, how, "to nearest, ties to even");
        }

        // Beyond the range of fp16, and a long sum.
        let large = self.sum(&[60_000.0, 60_000.0])?;
        let exact = round::round(60_000.0, self.dtype) * 2.0;
        let how = if large == exact {
            "above 65504"
        } else if large.is_infinite() {
            "to infinity above 65504"
        } else {
            "to something else"
        };
        found("a sum beyond fp16 goes", how.into(), "above 65504");
        let long = self.sum(&vec![10.0; 163_840])?;
        let how = if long == 1_638_400.0 { "1638400".to_string() } else { long.to_string() };
        found("163840 times 10", how, "1638400");

        let special = |terms: &[f64], factors: &[f64]| -> Result<String, String> {
            let y = self.dot(terms, factors, DType::Fp32)?;
            Ok(match y.value(0) {
                v if v.is_nan() && y.bits(0) == 0x7FC0_0000 => "the canonical NaN".into(),
                v if v.is_nan() => format!("a NaN, {:#010x}", y.bits(0)),
                0.0 => {
                    if y.bits(0) == 0 {
                        "+0".into()
                    } else {
                        "-0".into()
                    }
                }
                v => v.to_string(),
            })
        };
        found("-0 * 1", special(&[-0.0], &[1.0])?, "+0");
        found("inf - inf", special(&[f64::INFINITY, f64::NEG_INFINITY], &[1.0, 1.0])?, "the canonical NaN");
        found("inf * 0", special(&[f64::INFINITY], &[0.0])?, "the canonical NaN");
        found("NaN + 1", special(&[f64::NAN, 1.0], &[1.0, 1.0])?, "the canonical NaN");
        found("inf + 1", special(&[f64::INFINITY, 1.0], &[1.0, 1.0])?, "inf");
        Ok(findings)
    }
}

/// One thing that was asked of a kernel's arithmetic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was asked.
    pub question: &'static str,
    /// What was found.
    pub found: String,
    /// What the contract declares.
    pub declared: String,
}

/// How `1 + ulp/2`, `1 + 3ulp/4`, `-1 - 3ulp/4` and `1 + ulp + ulp/2` were rounded to multiples of `ulp`.
fn direction([tie, above, below, odd]: [f64; 4], ulp: f64) -> String {
    let one = |v: f64| v == 1.0;
    match () {
        _ if one(tie) && above == 1.0 + ulp && below == -1.0 - ulp && odd == 1.0 + 2.0 * ulp => {
            "to nearest, ties to even"
        }
        _ if tie == 1.0 + ulp && above == 1.0 + ulp && below == -1.0 - ulp => "to nearest, ties away from zero",
        _ if one(tie) && above == 1.0 + ulp && below == -1.0 - ulp => "to nearest, ties toward zero",
        _ if one(tie) && one(above) && below == -1.0 => "toward zero",
        _ if tie == 1.0 + ulp && above == 1.0 + ulp && below == -1.0 => "up",
        _ if one(tie) && one(above) && below == -1.0 - ulp => "down",
        _ if tie == 1.0 + ulp * 0.5 => "not at this place: more bits are kept",
        _ => "in no direction that is known",
    }
    .into()
}

/// Inputs of a sum of terms that are never negative, and the outputs that tell whether its last bit changed.
struct Terms {
    large: f64,
    small: [f64; 2],
    /// What makes a term of 0.
    none: f64,
    lost: f64,
    kept: f64,
}

/// Of each [a, b, c] whether b and c meet before either meets a.
type Met<'a> = dyn FnMut(&[[usize; 3]]) -> Result<Vec<bool>, String> + 'a;

/// The tree over `leaves`.
fn grow(leaves: Vec<usize>, met: &mut Met) -> Result<Tree, String> {
    let first = leaves[0];
    let mut root = Tree::Leaf(first);
    for group in by_distance(first, leaves[1..].to_vec(), met)? {
        root = Tree::join(vec![root, grow(group, met)?]);
    }
    Ok(root)
}

/// `others` by where they meet `first`, those that meet it first in front; those of one group meet each other before.
fn by_distance(first: usize, mut others: Vec<usize>, met: &mut Met) -> Result<Vec<Vec<usize>>, String> {
    if others.len() < 2 {
        return Ok(if others.is_empty() { Vec::new() } else { vec![others] });
    }
    let pivot = others.swap_remove(others.len() / 2);
    let questions: Vec<[usize; 3]> = others
        .iter()
        .flat_map(|&other| [[pivot, first, other], [other, first, pivot], [first, other, pivot]])
        .collect();
    let answers = met(&questions)?;
    let (mut nearer, mut beside, mut further) = (Vec::new(), vec![pivot], Vec::new());
    for (&other, said) in others.iter().zip(answers.chunks(3)) {
        match said {
            [true, false, false] => nearer.push(other),
            [false, true, false] => further.push(other),
            [false, false, true] => beside.push(other),
            _ => return Err("several terms are added at once, or in more bits than fp32 has".into()),
        }
    }
    beside.sort_unstable();
    let mut groups = by_distance(first, nearer, met)?;
    groups.push(beside);
    groups.extend(by_distance(first, further, met)?);
    Ok(groups)
}

/// Leaves under the smallest subtree that holds both of each pair.
type Under<'a> = dyn FnMut(&[(usize, usize)]) -> Result<Vec<usize>, String> + 'a;

/// The tree over `leaves`, and how many leaves the smallest subtree of the whole has that holds them all.
fn build(leaves: &[usize], under: &mut Under) -> Result<(Tree, usize), String> {
    let first = leaves[0];
    let pairs: Vec<(usize, usize)> = leaves[1..].iter().map(|&other| (first, other)).collect();
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    if !pairs.is_empty() {
        for (pair, size) in pairs.iter().zip(under(&pairs)?) {
            groups.entry(size).or_default().push(pair.1);
        }
    }
    let (mut root, mut size) = (Tree::Leaf(first), 1);
    for (level, group) in groups {
        let (other, reach) = build(&group, under)?;
        // Where the others meet each other only where they meet the first, all are added at once.
        let fused = reach == level && group.len() > 1 && reach > group.len();
        let mut parts = vec![root];
        match other {
            Tree::Node(children) if fused => parts.extend(children),
            other => parts.push(other),
        }
        root = Tree::join(parts);
        size = level;
        if root.leaves() > level {
            return Err(format!("{} leaves stand under a sum of {level}: the order is no tree", root.leaves()));
        }
    }
    Ok((root, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lca(tree: &Tree, i: usize, j: usize) -> usize {
        fn holds(tree: &Tree, leaf: usize) -> bool {
            match tree {
                Tree::Leaf(i) => *i == leaf,
                Tree::Node(children) => children.iter().any(|child| holds(child, leaf)),
            }
        }
        let mut at = tree;
        while let Tree::Node(children) = at {
            match children.iter().find(|child| holds(child, i) && holds(child, j)) {
                Some(child) => at = child,
                None => return at.leaves(),
            }
        }
        1
    }

    fn revealed(tree: &Tree) -> Tree {
        let mut under = |pairs: &[(usize, usize)]| Ok(pairs.iter().map(|&(i, j)| lca(tree, i, j)).collect());
        build(&(0..tree.leaves()).collect::<Vec<_>>(), &mut under).unwrap().0
    }

    fn node(children: Vec<Tree>) -> Tree {
        Tree::join(children)
    }

    #[test]
    fn three_terms_at_a_time_reveal_a_tree() {
        let trees = [
            Tree::chain(0, 9),
            Tree::lanes(0, 2),
            Tree::lanes(0, 300),
            Tree::lanes(0, 700),
            Tree::segments(300, Tree::chain),
            Tree::segments(2304, Tree::lanes),
        ];
        for tree in trees.map(Option::unwrap) {
            let n = tree.leaves();
            let mut asked = 0;
            let mut met = |triples: &[[usize; 3]]| {
                asked += triples.len();
                Ok(tree.met(triples))
            };
            assert!(grow((0..n).collect(), &mut met).unwrap() == tree, "{}", tree.text());
            assert!(asked < 60 * n, "{asked} questions for {n} terms");
        }
        // Added at once, or in more bits: all pairs are kept.
        assert!(grow(vec![0, 1, 2], &mut |triples| Ok(vec![true; triples.len()])).is_err());
    }

    #[test]
    fn every_kind_of_tree_is_revealed() {
        let leaf = Tree::Leaf;
        let trees = [
            Tree::chain(0, 9).unwrap(),
            (0..9).rev().map(leaf).reduce(|sum, term| node(vec![sum, term])).unwrap(),
            Tree::segments(5, Tree::chain).unwrap(),
            Tree::segments(128, Tree::chain).unwrap(),
            Tree::segments(300, Tree::chain).unwrap(),
            Tree::blocks(600).unwrap(),
            node((0..7).map(leaf).collect()),
            // Sixteen at once, then the next sixteen with the sum so far: a tensor core.
            (16..48).step_by(16).fold(node((0..16).map(leaf).collect()), |sum, from| {
                node([sum].into_iter().chain((from..from + 16).map(leaf)).collect())
            }),
            // Interleaved lanes, folded.
            node(vec![
                node(vec![node(vec![leaf(0), leaf(4)]), node(vec![leaf(2), leaf(6)])]),
                node(vec![node(vec![leaf(1), leaf(5)]), node(vec![leaf(3), leaf(7)])]),
            ]),
            node(vec![node(vec![leaf(0), leaf(3), leaf(5)]), node(vec![leaf(1), leaf(2)]), leaf(4)]),
        ];
        for tree in trees {
            assert_eq!(revealed(&tree), tree, "{}", tree.text());
            let sizes: Vec<usize> = (0..tree.leaves()).map(|j| lca(&tree, 0, j)).collect();
            assert_eq!(tree.under_first(), sizes, "{}", tree.text());
        }
    }

    #[test]
    fn trees_are_written_and_drawn() {
        assert_eq!(Tree::chain(0, 16).unwrap().text(), "0..16");
        let text = "(((0..16 + 16..32) + (32..48 + 48..64)) + ((64..80 + 80..96) + (96..112 + 112..128)))";
        assert_eq!(Tree::segments(128, Tree::chain).unwrap().text(), text);
        assert_eq!(node((0..3).map(Tree::Leaf).collect()).text(), "{0, 1, 2}");
        let every = |step: usize, from: usize| (from..48).step_by(step).map(Tree::Leaf);
        let chain = |terms: &mut dyn Iterator<Item = Tree>| terms.reduce(|sum, term| node(vec![sum, term])).unwrap();
        assert_eq!(chain(&mut every(16, 0)).text(), "0..33 by 16");
        assert_eq!(chain(&mut every(32, 1)).text(), "(1 + 33)");
        let head = node(vec![Tree::Leaf(0), node(vec![Tree::Leaf(1), Tree::Leaf(2)])]);
        assert_eq!(chain(&mut [head].into_iter().chain(every(8, 12))).text(), "((0 + 1..3) then 12..45 by 8)");
        let svg = Tree::segments(128, Tree::chain).unwrap().svg("a < b");
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.contains("a &lt; b"));
        assert_eq!(svg.matches("<circle").count(), 127);
        assert_eq!(svg.matches("<text").count(), 129);
    }
}
