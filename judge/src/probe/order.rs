//! The order in which a kernel adds, from questions whose answers depend on which terms meet first.

use super::{Finding, Probe, Tree};
use samebits_contract::axis;
use samebits_contract::case::Config;
use samebits_contract::round;
use samebits_contract::tensor::{DType, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;

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
    /// The sum over experts, whose weights are all ones.
    Combine,
    /// The sum over tokens of a vector, folded.
    TokenSum,
    /// The sum over tokens of a row of a table.
    EmbeddingDw,
    /// The sum over tokens of a matrix product, whose other operand is all ones.
    GemmDw,
}

impl Op {
    /// All of them.
    pub const ALL: [Op; 9] = [
        Op::Gemm,
        Op::Attention,
        Op::RmsNorm,
        Op::Softmax,
        Op::Logprob,
        Op::Combine,
        Op::TokenSum,
        Op::EmbeddingDw,
        Op::GemmDw,
    ];

    /// The op called `name`.
    pub fn find(name: &str) -> Option<Op> {
        Op::ALL.into_iter().find(|op| op.name() == name)
    }

    /// Whether the order of a sum is seen: sums that cannot cancel show it in their last bit, which narrow outputs
    /// lack, and fp16 has no units small enough for a mean of them.
    pub fn shows(self, dtype: DType, out: DType) -> bool {
        match self {
            Op::Attention => (dtype, out) != (DType::Fp16, DType::Fp16),
            _ => out == DType::Fp32 || self.cancels(),
        }
    }

    /// Whether the terms have signs.
    fn cancels(self) -> bool {
        matches!(self, Op::Gemm | Op::Attention | Op::Combine | Op::TokenSum | Op::EmbeddingDw | Op::GemmDw)
    }

    /// The op's stem.
    pub fn name(self) -> &'static str {
        match self {
            Op::Gemm => "gemm",
            Op::Attention => "attention",
            Op::RmsNorm => "rms_norm",
            Op::Softmax => "softmax",
            Op::Logprob => "logprob",
            Op::Combine => "combine",
            Op::TokenSum => "token_sum",
            Op::EmbeddingDw => "embedding_dw",
            Op::GemmDw => "gemm_dw",
        }
    }

    /// The tree that a profile declares for `n` terms; `None` for no terms, and where it [declares](super::declares) none.
    pub fn declared(self, profile: &str, n: usize) -> Option<Tree> {
        match self {
            _ if !super::declares(profile) => None,
            Op::Gemm => Tree::segments(n, Tree::chain),
            Op::Combine | Op::EmbeddingDw | Op::GemmDw => Tree::chain(0, n),
            Op::TokenSum => Tree::tokens(n),
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

/// Why a sum is not known to have one order.
pub enum Apart {
    /// It cannot be asked, or its answers say nothing.
    Unasked(String),
    /// An answer was due and did not come.
    NoAnswer(String),
    /// It has another order on one setting.
    Differs {
        /// The setting.
        setting: String,
        /// Terms of the sum.
        terms: usize,
        /// What was left of the first sum that differs, as usual and on the setting.
        expected: f64,
        /// The same on the setting.
        found: f64,
        /// How many sums differ.
        count: usize,
        /// Of how many.
        total: usize,
    },
}

/// How a sum is asked to which all others are held.
pub const USUAL: &str = "8 rows";

impl Probe<'_> {
    /// Asks the same questions with other numbers of rows, so that each stands at other places, with other numbers of columns
    /// (queries, in attention), with keys in pages where these are offered, and on other numbers of threads. Answers are compared as they come, so no order needs to be
    /// known. The number of settings that were asked.
    ///
    /// # Errors
    /// The first setting with another order, or why there is none to compare.
    pub fn one_order(&self, op: Op, threads: &[usize]) -> Result<usize, Apart> {
        // More than the declared order needs: where a kernel changes its ways, sums are long.
        let n = match op {
            Op::Gemm | Op::GemmDw | Op::EmbeddingDw if self.out == DType::Fp32 => 1030,
            // bf16 counts to 256.
            Op::Gemm => 250,
            Op::RmsNorm | Op::Softmax | Op::Logprob => 1030,
            _ => self.terms_asked(op),
        };
        if !op.shows(self.dtype, self.out) {
            let reason = "the last bit of such a sum is seen in fp32 outputs alone; cases of fill `power` ask for the order of it";
            return Err(Apart::Unasked(reason.into()));
        }
        let of = |columns: usize, threads: Option<usize>| Probe {
            columns,
            config: Config { threads: threads.or(self.config.threads), ..self.config.clone() },
            ..*self
        };
        let usual = of(1, None).signature(op, n, 8).map_err(Apart::Unasked)?;
        if usual.iter().all(|left| *left == usual[0]) {
            return Err(Apart::Unasked(format!("all questions about a sum of {n} terms have one answer")));
        }
        let rows = [1, 2, 3, 7, 9, 16, 33, 65, 129, 257].map(|rows| (format!("{rows} rows"), of(1, None), rows));
        let mut settings: Vec<(String, Probe, usize)> = rows.into();
        if matches!(op, Op::Gemm | Op::Attention) {
            let name = if op == Op::Gemm { "columns" } else { "queries" };
            settings.extend([2, 17, 65].map(|columns| (format!("8 rows, {columns} {name}"), of(columns, None), 8)));
        }
        // Pages are another op, which need not be offered.
        let paged = |size: usize| Probe { pages: Some(size), ..of(1, None) };
        if op == Op::Attention && paged(16).sums(op, &[vec![0.0; 2]]).is_ok() {
            settings.extend([16, 7, 1].map(|size| (format!("8 rows, pages of {size} keys"), paged(size), 8)));
        }
        settings.extend(threads.iter().map(|&threads| (format!("8 rows, {threads} threads"), of(1, Some(threads)), 8)));
        let count = settings.len();
        for (setting, probe, rows) in settings {
            let found =
                probe.signature(op, n, rows).map_err(|reason| Apart::NoAnswer(format!("{setting}: {reason}")))?;
            let differ: Vec<usize> = (0..usual.len()).filter(|&i| usual[i].to_bits() != found[i].to_bits()).collect();
            if let Some(&first) = differ.first() {
                let (expected, found, terms) = (usual[first], found[first], n);
                return Err(Apart::Differs {
                    setting,
                    terms,
                    expected,
                    found,
                    count: differ.len(),
                    total: usual.len(),
                });
            }
        }
        Ok(count)
    }

    /// What is left of some sums of `n` terms that give their order away, `rows` in a call.
    fn signature(&self, op: Op, n: usize, rows: usize) -> Result<Vec<f64>, String> {
        let mut left = Vec::new();
        if op.cancels() {
            let mut pairs: Vec<(usize, usize)> = (1..n).step_by(n.div_ceil(24)).map(|j| (0, j)).collect();
            pairs.extend(drawn(n, 2).map(|pair| (pair[0], pair[1])).take(40));
            let (unit, mass) = self.unit_and_mass();
            for part in pairs.chunks(rows) {
                let mut sums = vec![vec![unit; n]; rows];
                for (sum, &(i, j)) in sums.iter_mut().zip(part) {
                    (sum[i], sum[j]) = (mass, -mass);
                }
                left.extend(self.sums(op, &sums)?.into_iter().take(part.len()));
            }
            return Ok(left);
        }
        let terms = self.terms(op, n, 8)?;
        let neighbours = (0..n - 2).step_by(n.div_ceil(24)).map(|i| [i + 2, i, i + 1]);
        let triples: Vec<[usize; 3]> = neighbours.chain(drawn(n, 3).map(|of| [of[0], of[1], of[2]]).take(72)).collect();
        for part in triples.chunks(rows) {
            let asked = part.iter().map(|&[large, a, b]| (large, vec![(a, terms.small[0]), (b, terms.small[1])]));
            left.extend(self.seen(op, n, rows, &terms, asked.collect())?.into_iter().take(part.len()));
        }
        Ok(left)
    }

    /// As many terms as tell the parts of the declared order apart, and as the output counts.
    fn terms_asked(&self, op: Op) -> usize {
        match op {
            // Segments of 32, the last one short and three empty.
            Op::Gemm => 130,
            // Two blocks of keys, where the output holds the sum of so many units.
            Op::Attention if self.out == DType::Fp32 => 512,
            Op::Attention => 128,
            Op::Combine | Op::EmbeddingDw | Op::GemmDw => 9,
            // Two chains of three terms, the others of two.
            Op::TokenSum => 130,
            // Sixteen lanes of two terms, the others of one.
            Op::RmsNorm => 272,
            // Segments of 16 lanes, the last one of 8.
            Op::Softmax | Op::Logprob => 40,
        }
    }

    /// The sums of `rows` in f32, all rows in one call: the products of each with ones, or the values under equal
    /// weights.
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
                // Every row is a sequence of its own with queries of zeros, so that all scores are 0.
                let queries = self.columns;
                let zeros = |count: usize| vec![0.0; count];
                let int =
                    |shape: &[usize], value: usize| Tensor::i32(shape, vec![value as i32; shape.iter().product()]);
                let mut inputs = vec![
                    ("q", make(&[m, queries, 1, 16], &zeros(m * queries * 16))),
                    ("q_pos", int(&[m, queries], n - 1)),
                    ("kv_len", int(&[m], n)),
                ];
                let op = match self.pages {
                    None => {
                        inputs.push(("k", make(&[m, n, 1, 16], &zeros(m * n * 16))));
                        inputs.push(("v", make(&[m, n, 1, 1], &flat)));
                        "attention"
                    }
                    Some(size) => {
                        // From the last page to the first.
                        let each = n.div_ceil(size);
                        let pages = m * each;
                        let mut values = zeros(pages * size);
                        for (i, value) in flat.iter().enumerate() {
                            let (row, key) = (i / n, i % n);
                            values[(pages - 1 - (row * each + key / size)) * size + key % size] = *value;
                        }
                        inputs.push(("k", make(&[pages, size, 1, 16], &zeros(pages * size * 16))));
                        inputs.push(("v", make(&[pages, size, 1, 1], &values)));
                        inputs.push(("page_table", Tensor::i32(&[m, each], (0..pages as i32).rev().collect())));
                        axis::PAGED
                    }
                };
                let answer = self.ask(op, self.out, &[], inputs)?;
                let out = answer.outputs.get("out").filter(|out| out.len() == m * queries);
                let out = out.ok_or("the answer lacks `out`")?;
                // Divided by the number of keys, a power of two.
                Ok((0..m).map(|row| out.value(row * queries + queries - 1) * n as f64).collect())
            }
            Op::Combine => {
                // Every token has rows of its own, of one element each.
                let rows = (0..m * n).map(|i| i as i32).collect();
                let inputs = vec![
                    ("x", make(&[m * n, 1], &flat)),
                    ("row", Tensor::i32(&[m, n], rows)),
                    ("weight", make(&[m, n], &vec![1.0; m * n])),
                ];
                let answer = self.ask("combine", self.out, &[], inputs)?;
                let y = answer.outputs.get("y").filter(|y| y.len() == m).ok_or("the answer lacks `y`")?;
                Ok((0..m).map(|row| y.value(row)).collect())
            }
            Op::TokenSum | Op::EmbeddingDw | Op::GemmDw => {
                // Every sum is a column.
                let columns: Vec<f64> =
                    (0..n).flat_map(|term| (0..m).map(move |row| row * n + term)).map(|i| flat[i]).collect();
                let terms = make(&[n, m], &columns);
                let sums = match op {
                    Op::TokenSum => {
                        let answer = self.ask("token_sum", DType::Fp32, &[], vec![("x", terms)])?;
                        let chains = answer.outputs.get("sum").ok_or("the answer lacks `sum`")?;
                        self.ask("fold", DType::Fp32, &[], vec![("x", chains.clone())])?.outputs.remove("y")
                    }
                    Op::GemmDw => {
                        let inputs = vec![("x", terms), ("dy", make(&[n, 1], &vec![1.0; n]))];
                        self.ask("gemm_dw", DType::Fp32, &[], inputs)?.outputs.remove("dw")
                    }
                    _ => {
                        let (tokens, carry) = (Tensor::i32(&[n], vec![0; n]), Tensor::fp32(&[1, m], vec![0.0; m]));
                        let inputs = vec![("dy", terms), ("tokens", tokens), ("carry", carry)];
                        self.ask("embedding_dw", DType::Fp32, &[], inputs)?.outputs.remove("dw")
                    }
                };
                let sums = sums.filter(|sums| sums.len() == m).ok_or("the answer lacks its sums")?;
                Ok((0..m).map(|column| sums.value(column)).collect())
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
            _ if op.cancels() => self.tree_of_signed(op, n, batch, 0..batch),
            _ => self.tree_of_positive(op, n, batch),
        }
    }

    /// Whether a sum is added as declared, of as many terms as tell the parts of its order apart. Far fewer questions
    /// than [`Probe::tree`] asks: which terms meet where, for neighbours, for the first term with every other, and for
    /// some that are drawn. Where one says no, the whole order is asked for.
    pub fn order(&self, op: Op) -> Finding {
        let n = self.terms_asked(op);
        let declared = op.declared(self.profile, n).expect("a sum has a term, and the profile is asked for first");
        let fits = if op.cancels() { self.fits_signed(op, n, &declared) } else { self.fits_positive(op, n, &declared) };
        let found = match fits {
            Ok(true) => declared.text(),
            Ok(false) => match self.tree(op, n, 32) {
                Ok(tree) if tree != declared => tree.text(),
                Ok(_) => "another order with other numbers of rows".to_string(),
                Err(reason) => format!("not revealed: {reason}"),
            },
            Err(reason) => format!("not revealed: {reason}"),
        };
        Finding { question: format!("order of a sum of {n} terms"), found, declared: declared.text() }
    }

    /// Whether every pair of terms that is asked for meets under as many leaves as in `declared`.
    fn fits_signed(&self, op: Op, n: usize, declared: &Tree) -> Result<bool, String> {
        let mut pairs: Vec<(usize, usize)> = (1..n).flat_map(|j| [(0, j), (j - 1, j)]).collect();
        pairs.extend(drawn(n, 2).map(|pair| (pair[0].min(pair[1]), pair[0].max(pair[1]))));
        let sizes = declared.under(&pairs);
        for (pairs, sizes) in pairs.chunks(64).zip(sizes.chunks(64)) {
            let pairs: Vec<_> = pairs.iter().map(|&pair| Some(pair)).collect();
            if self.sizes_under(op, n, &pairs)? != sizes {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether of every three terms that are asked for the same two meet first as in `declared`.
    fn fits_positive(&self, op: Op, n: usize, declared: &Tree) -> Result<bool, String> {
        let neighbours = (0..n - 2).flat_map(|i| [[i, i + 1, i + 2], [i + 1, i + 2, i], [i + 2, i, i + 1]]);
        let triples: Vec<[usize; 3]> =
            neighbours.chain(drawn(n, 3).map(|triple| [triple[0], triple[1], triple[2]])).collect();
        let terms = self.terms(op, n, 1)?;
        Ok(self.met(op, n, 128, &terms, &triples)? == declared.met(&triples))
    }

    /// The order in row 0 of `batch` rows and that of the first row that has another one, if there is one. Sums of
    /// terms that are never negative are not looked at.
    ///
    /// # Errors
    /// As [`Probe::tree`].
    pub fn rows_apart(&self, op: Op, n: usize, batch: usize) -> Result<Option<RowsApart>, String> {
        if !op.cancels() {
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

    /// Of terms that may cancel (FPRev): all terms are a unit but two, +M and -M, so large that units added before
    /// these two meet are lost. What is left counts the units that were added later, that is the leaves outside of the
    /// smallest subtree that holds both.
    ///
    /// Each of the rows `asked` holds a question of its own; where these are several, every row is then held to the
    /// answer.
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

    /// Of terms that are never negative. All are 0 but three: one so large that each of the other two is lost beside
    /// it, being less than half of its last bit, while both together are more than half. The last bit changes when the
    /// two meet before either meets the large one. So every three terms tell which two are added first, and that is the
    /// tree.
    fn tree_of_positive(&self, op: Op, n: usize, batch: usize) -> Result<Tree, String> {
        if self.out != DType::Fp32 {
            return Err("the last bit of such a sum is seen in fp32 outputs alone".into());
        }
        let terms = self.terms(op, n, batch)?;
        let mut ask = |triples: &[[usize; 3]]| self.met(op, n, batch, &terms, triples);
        let tree = grow((0..n).collect(), &mut ask)?;
        // What was not asked for must fit as well.
        let others: Vec<[usize; 3]> = drawn(n, 3).map(|triple| [triple[0], triple[1], triple[2]]).collect();
        if tree.met(&others) == ask(&others)? { Ok(tree) } else { Err("no order of a sum explains all answers".into()) }
    }

    /// Of every [large, a, b] whether the terms a and b meet before either meets the large one.
    fn met(&self, op: Op, n: usize, batch: usize, terms: &Terms, triples: &[[usize; 3]]) -> Result<Vec<bool>, String> {
        let mut met = Vec::with_capacity(triples.len());
        for part in triples.chunks(batch) {
            let rows = part.iter().map(|&[large, a, b]| (large, vec![(a, terms.small[0]), (b, terms.small[1])]));
            for value in self.seen(op, n, batch, terms, rows.collect())? {
                match value {
                    _ if value == terms.lost => met.push(false),
                    _ if value == terms.kept => met.push(true),
                    _ => {
                        return Err(format!("{value:e}, where a last bit makes {:e} or {:e}", terms.lost, terms.kept));
                    }
                }
            }
        }
        Ok(met)
    }

    /// Inputs for [`Probe::tree_of_positive`] whose last bit is seen in the output.
    fn terms(&self, op: Op, n: usize, batch: usize) -> Result<Terms, String> {
        // In units of half of the last bit of the large term: 0.71 and 0.52, and 1.23 for what is kept by itself; of a
        // softmax 0.79, 0.54 and 1.30.
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
                // The log-probability of the large term is made of the others alone.
                (vec![("logits", x), ("target", Tensor::i32(&[batch], target))], "lse")
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

/// `n` draws of `count` different terms each, the same ones always.
fn drawn(n: usize, count: usize) -> impl Iterator<Item = Vec<usize>> {
    let draw = move |i: usize, k: usize| (i * (7919 + 104_729 * k) + k) % n;
    let different = |terms: &Vec<usize>| (1..terms.len()).all(|i| !terms[..i].contains(&terms[i]));
    (0..n).map(move |i| (0..count).map(|k| draw(i, k)).collect()).filter(different)
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
