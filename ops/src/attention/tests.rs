//! Attention against a plain computation, on every plan: nothing that decides how a call is cut moves a bit.

use super::{decode::Streams, prefill::Tiles};
use crate::attention::job::{Attention, BLOCK, Job, Keys, Sequences};
use crate::gemm::tests::{bits, number, on_every_plan, plain};
use crate::math::{exp_split, lse, tanh, weight};
use crate::simd::scalar::Scalar;
use crate::workspace::Plan;
use crate::{Counter, Cpu, Element, Error, Isa, TensorRef, Tf32};
use half::bf16;
use std::f64::consts::LOG2_E;
use std::iter::successors;

/// Where the keys of a sequence stand.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Padded,
    Packed,
    Paged(usize),
}

/// Positions of the queries of a sequence, and how many keys it has.
type Sequence<'a> = (&'a [i32], usize);

#[derive(Clone)]
struct Case<I> {
    shape: Attention,
    form: Form,
    /// Elements between heads and between rows of q, k and v.
    gaps: [usize; 2],
    q: Vec<I>,
    k: Vec<I>,
    v: Vec<I>,
    q_pos: Vec<i32>,
    /// The rows of q of sequence b: `q_start[b]..q_start[b + 1]`.
    q_start: Vec<i32>,
    /// Whether sequences have different numbers of queries.
    packed: bool,
    kv_len: Vec<i32>,
    k_start: Vec<i32>,
    table: Vec<i32>,
    /// The rows of k and v of every sequence.
    rows: Vec<Vec<usize>>,
}

/// Heads of queries and of keys, dimensions of keys and of values; [`Case::new`] fills in the rest.
fn shape([q_heads, kv_heads]: [usize; 2], [head_dim, value_dim]: [usize; 2], scale: f64) -> Attention {
    Attention { value_dim, scale, causal: false, ..Attention::causal([0, 0, 0], [q_heads, kv_heads], head_dim) }
}

/// Where parts of these lengths start, and where the last one ends.
fn starts(lens: impl Iterator<Item = usize>) -> Vec<i32> {
    let ends = lens.scan(0, |end, len| {
        *end += len as i32;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

impl<I: Element> Case<I> {
    /// Numbers; rows of k and v that no query sees are NaN.
    fn new(shape: Attention, form: Form, gaps: [usize; 2], sequences: &[Sequence]) -> Case<I> {
        let (batch, len) = (sequences.len(), |b: usize| sequences[b].1);
        let q_start = starts(sequences.iter().map(|(q_pos, _)| q_pos.len()));
        let packed = form == Form::Packed || sequences.iter().any(|(q_pos, _)| q_pos.len() != sequences[0].0.len());
        // A row behind the last key belongs to nobody.
        let k_start = starts(sequences.iter().map(|&(_, len)| len + 1));
        let longest = (0..batch).map(len).max().unwrap_or(0);
        let (room, page) = (longest + 1, if let Form::Paged(size) = form { size } else { 1 });
        let columns = longest.div_ceil(page);
        // Neither the pages of a sequence nor those of two stand in order.
        let table: Vec<i32> = (0..batch * columns).map(|i| (batch * columns - i) as i32 ^ 1).collect();
        let pages = table.iter().max().map_or(1, |&page| page as usize + 1);
        let row = |b: usize, j: usize| match form {
            Form::Padded => b * room + j,
            Form::Packed => k_start[b] as usize + j,
            Form::Paged(size) => table[b * columns + j / size] as usize * size + j % size,
        };
        let rows: Vec<Vec<usize>> = (0..batch).map(|b| (0..len(b)).map(|j| row(b, j)).collect()).collect();
        let q_pos: Vec<i32> = sequences.iter().flat_map(|(q_pos, _)| q_pos.iter().copied()).collect();
        let (keys, key_rows) = match form {
            Form::Padded => (room, batch * room),
            Form::Packed => (k_start[batch] as usize, k_start[batch] as usize),
            Form::Paged(size) => (pages * size, pages * size),
        };
        let queries = if packed { q_pos.len() } else { q_pos.len() / batch };
        let shape = Attention { batch, queries, keys, ..shape };
        let kv_len = (0..batch).map(|b| len(b) as i32).collect();
        let case = Case {
            shape,
            form,
            gaps,
            q: vec![],
            k: vec![],
            v: vec![],
            q_pos,
            q_start,
            packed,
            kv_len,
            k_start,
            table,
            rows,
        };
        let mut seen = vec![false; key_rows];
        for b in 0..batch {
            for t in case.queries(b) {
                (0..len(b)).filter(|&j| case.sees(t, j)).for_each(|j| seen[case.rows[b][j]] = true);
            }
        }
        let fill = |seed: usize, rows: usize, heads: usize, n: usize, seen: &dyn Fn(usize) -> bool| -> Vec<I> {
            let mut data = vec![I::narrow(f32::NAN); rows * case.row_words(heads, n)];
            for (i, (row, head)) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))).enumerate() {
                let values = &mut data[case.at(heads, n, row, head)..][..n];
                for (d, value) in values.iter_mut().enumerate().filter(|_| seen(row)) {
                    *value = I::narrow(number(seed + i * n + d).to_f32());
                }
            }
            data
        };
        let Attention { q_heads, kv_heads, head_dim, value_dim, .. } = shape;
        let q = fill(0, case.q_pos.len(), q_heads, head_dim, &|_| true);
        let k = fill(100_000, key_rows, kv_heads, head_dim, &|row| seen[row]);
        let v = fill(200_000, key_rows, kv_heads, value_dim, &|row| seen[row]);
        Case { q, k, v, ..case }
    }

    fn row_words(&self, heads: usize, n: usize) -> usize {
        heads * (n + self.gaps[0]) + self.gaps[1]
    }

    fn at(&self, heads: usize, n: usize, row: usize, head: usize) -> usize {
        row * self.row_words(heads, n) + head * (n + self.gaps[0])
    }

    fn query(&mut self, row: usize, head: usize) -> &mut [I] {
        let at = self.at(self.shape.q_heads, self.shape.head_dim, row, head);
        &mut self.q[at..][..self.shape.head_dim]
    }

    fn key(&mut self, b: usize, j: usize, head: usize) -> &mut [I] {
        let at = self.at(self.shape.kv_heads, self.shape.head_dim, self.rows[b][j], head);
        &mut self.k[at..][..self.shape.head_dim]
    }

    fn value(&mut self, b: usize, j: usize, head: usize) -> &mut [I] {
        let at = self.at(self.shape.kv_heads, self.shape.value_dim, self.rows[b][j], head);
        &mut self.v[at..][..self.shape.value_dim]
    }

    fn queries(&self, b: usize) -> std::ops::Range<usize> {
        self.q_start[b] as usize..self.q_start[b + 1] as usize
    }

    /// Whether row t of q sees key j, if there is one.
    fn sees(&self, t: usize, j: usize) -> bool {
        let (p, j) = (i64::from(self.q_pos[t]), j as i64);
        (!self.shape.causal || j <= p)
            && self.shape.window.is_none_or(|window| j > p - window as i64)
            && self.shape.chunk.is_none_or(|chunk| j >= p.div_euclid(chunk as i64) * chunk as i64)
    }

    /// out and lse of a row of q, before the last rounding.
    fn row(&self, b: usize, t: usize, head: usize) -> (Vec<f32>, f32) {
        let Attention { q_heads, kv_heads, head_dim: d, value_dim: e, scale, .. } = self.shape;
        let key_head = head / (q_heads / kv_heads);
        let operand = |x: I| match x.widen() {
            x if self.shape.tf32 == Tf32::Disabled || !x.is_finite() => x,
            x => f32::from_bits((x.to_bits() + 0x1000) & !0x1FFF),
        };
        let q = &self.q[self.at(q_heads, d, t, head)..];
        let score = |j: usize| {
            let k = &self.k[self.at(kv_heads, d, self.rows[b][j], key_head)..];
            let score = plain(&[0, d], |i| operand(q[i]), |i| operand(k[i]));
            match self.shape.softcap {
                Some(cap) => cap as f32 * tanh(Scalar, score * (scale / cap) as f32),
                None => score,
            }
        };
        let c = if self.shape.softcap.is_some() { LOG2_E } else { scale * LOG2_E };
        let (c_hi, c_lo) = (c as f32, (c - f64::from(c as f32)) as f32);
        let visible = (0..self.kv_len[b] as usize).filter(|&j| self.sees(t, j)).map(|j| (j, score(j)));
        let visible: Vec<(usize, f32)> = visible.filter(|&(_, score)| score != f32::NEG_INFINITY).collect();
        let split = |score: f32| exp_split(Scalar, score, c_hi, c_lo);
        let n = visible.iter().map(|&(_, score)| split(score).1).fold(f32::NEG_INFINITY, f32::max);
        if visible.is_empty() {
            return (vec![0.0; e], f32::NEG_INFINITY);
        }
        if !n.is_finite() || visible.iter().any(|(_, score)| score.is_nan() || *score == f32::INFINITY) {
            return (vec![f32::NAN; e], f32::NAN);
        }
        let (mut total, mut total_l) = (vec![0f32; e], 0f32);
        for block in 0..=visible[visible.len() - 1].0 / BLOCK {
            let (mut acc, mut l) = (vec![0f32; e], 0f32);
            for &(j, score) in visible.iter().filter(|(j, _)| j / BLOCK == block) {
                let (m, i) = split(score);
                let w = weight(Scalar, m, i, n);
                l += w;
                let v = &self.v[self.at(kv_heads, e, self.rows[b][j], key_head)..];
                acc.iter_mut().zip(v).for_each(|(acc, &v)| *acc = w.mul_add(operand(v), *acc));
            }
            total_l += l;
            total.iter_mut().zip(acc).for_each(|(total, acc)| *total += acc);
        }
        (total.iter().map(|total| total / total_l).collect(), lse(n, total_l))
    }

    /// Bits of out and lse.
    fn expected<O: Element>(&self) -> [Vec<u32>; 2] {
        let (mut out, mut lse) = (vec![], vec![]);
        for b in 0..self.shape.batch {
            for (t, head) in self.queries(b).flat_map(|t| (0..self.shape.q_heads).map(move |head| (t, head))) {
                let (row, of_row) = self.row(b, t, head);
                out.extend(row.into_iter().map(O::narrow));
                lse.push(f32::narrow(of_row));
            }
        }
        [bits(&out), bits(&lse)]
    }

    fn run<O: Element>(&self, cpu: &Cpu, operands: [&[I]; 3], out: &mut [O], lse: &mut [f32]) -> Result<(), Error> {
        self.with_job(cpu, operands, |job| job.run(out, lse))
    }

    fn with_job<T>(&self, cpu: &Cpu, [q, k, v]: [&[I]; 3], work: impl FnOnce(&Job<I>) -> T) -> T {
        let shape @ Attention { q_heads, kv_heads, head_dim, value_dim, scale, softcap, .. } = self.shape;
        let keys = match self.form {
            Form::Padded => Keys::Padded,
            Form::Packed => Keys::Packed(&self.k_start),
            Form::Paged(page_size) => Keys::Paged { page_size, table: &self.table },
        };
        let q_start = self.packed.then_some(&self.q_start[..]);
        let sequences = Sequences { q_pos: &self.q_pos, kv_len: &self.kv_len, q_start, keys };
        let tensor = |data, heads: usize, n: usize| {
            let row = self.row_words(heads, n);
            let (shape, strides) = ([<[I]>::len(data) / row.max(1), heads, n], [row, n + self.gaps[0], 1]);
            TensorRef::strided(data, &shape, &strides).unwrap().heads::<I>()
        };
        let c = if softcap.is_some() { LOG2_E } else { scale * LOG2_E };
        let job = Job {
            cpu,
            shape: &shape,
            sequences: &sequences,
            q: tensor(q, q_heads, head_dim),
            k: tensor(k, kv_heads, head_dim),
            v: tensor(v, kv_heads, value_dim),
            q_pos: &self.q_pos,
            kv_len: &self.kv_len,
            cap: softcap.map(|cap| (cap as f32, (scale / cap) as f32)),
            c: (c as f32, (c - f64::from(c as f32)) as f32),
            sinks: None,
            dry: false,
        };
        work(&job)
    }

    /// On all instruction sets, plans and some numbers of threads.
    fn check<O: Element>(&self) {
        let expected = self.expected::<O>();
        // A call before leaves NaN in the workspace, also where an odd dimension ends.
        let mut before = self.clone();
        before.shape.head_dim = self.shape.head_dim.next_multiple_of(2);
        for x in [&mut before.q, &mut before.k, &mut before.v] {
            *x = vec![I::narrow(f32::NAN); 2 * x.len()];
        }
        let (mut out, mut lse) = (vec![O::default(); expected[0].len()], vec![0f32; expected[1].len()]);
        for isa in both_ways() {
            for threads in [1, 3] {
                on_every_plan(isa, threads, |cpu| {
                    // More dimensions may have no plan as small as this one.
                    before.run(cpu, [&before.q, &before.k, &before.v], &mut out, &mut lse).ok();
                    out.fill(O::narrow(7e7));
                    lse.fill(7e7);
                    self.run(cpu, [&self.q, &self.k, &self.v], &mut out, &mut lse)?;
                    let Case { shape, form, .. } = self;
                    let plan = &cpu.ledger().plans()[0];
                    assert_eq!([bits(&out), bits(&lse)], expected, "{isa} {shape:?} {form:?} {} {plan}", I::NAME);
                    Ok(())
                });
            }
        }
    }
}

/// Those of this machine and the emulated `VDPBF16PS`: where that is the slower one, many rows are left to multiply-adds,
/// and the emulated one takes the way that this machine does not.
fn both_ways() -> impl Iterator<Item = Isa> {
    let emulated = |isa: &Isa| isa.available() && isa.emulates().is_some() && isa.has_dot();
    Isa::of_machine().filter(move |isa| !emulated(isa)).chain(Isa::all().filter(emulated))
}

fn check(shape: Attention, form: Form, gaps: [usize; 2], sequences: &[Sequence]) {
    Case::<bf16>::new(shape, form, gaps, sequences).check::<f32>();
    Case::<f32>::new(shape, form, gaps, sequences).check::<bf16>();
}

const DENSE: [usize; 2] = [0, 0];

/// Scales are such that weights are of many magnitudes.
pub(crate) fn few_rows_are_plain() {
    check(shape([1, 1], [1, 1], 5.0), Form::Padded, DENSE, &[(&[4], 5)]);
    // Two heads at a time, where they stand.
    let causal = Attention { causal: true, ..shape([4, 2], [32, 16], 2.0) };
    check(causal, Form::Padded, DENSE, &[(&[299], 300), (&[20], 40)]);
    check(shape([6, 3], [16, 32], 9.0), Form::Paged(16), DENSE, &[(&[0], 70), (&[0], 33)]);
    check(shape([10, 2], [16, 16], 2.0), Form::Padded, DENSE, &[(&[0], 40)]);
    check(shape([6, 3], [16, 20], 9.0), Form::Packed, [3, 5], &[(&[0], 70), (&[0], 33)]);
    let window = Attention { window: Some(270), ..causal };
    check(window, Form::Paged(7), DENSE, &[(&[560, 590], 600), (&[40, 42], 50), (&[-1, 0], 5), (&[3, 4], 0)]);
    let chunks = Attention { chunk: Some(290), ..causal };
    check(chunks, Form::Paged(7), DENSE, &[(&[579, 580], 600), (&[40, 42], 50), (&[-1, 0], 5), (&[290, 299], 295)]);
    let groups = Attention { q_heads: 7, kv_heads: 1, ..window };
    check(groups, Form::Padded, DENSE, &[(&[559], 600), (&[50], 550)]);
    let many = Attention { q_heads: 12, head_dim: 33, ..groups };
    check(many, Form::Packed, DENSE, &[(&[69], 70), (&[3], 3)]);
    let odd = Attention { q_heads: 8, head_dim: 67, value_dim: 35, ..groups };
    check(odd, Form::Padded, DENSE, &[(&[33, 34, 40], 45)]);
    let uneven: &[Sequence] = &[(&[33, 34, 40], 45), (&[], 0), (&[9], 260), (&[20, 0], 21), (&[7], 7)];
    check(Attention { softcap: Some(3.0), head_dim: 9, ..odd }, Form::Paged(8), DENSE, uneven);
    check(shape([3, 1], [0, 5], 1.0), Form::Padded, DENSE, &[(&[4], 5)]);
    check(shape([3, 1], [5, 0], 1.0), Form::Padded, DENSE, &[(&[4], 5)]);
}

/// Twenty-seven positions from `first` on.
fn positions(first: i32) -> Vec<i32> {
    (first..first + 27).collect()
}

pub(crate) fn many_rows_are_plain() {
    check(shape([5, 1], [17, 16], 5.0), Form::Padded, DENSE, &[(&positions(5)[..6], 40)]);
    // Two tiles; columns of the values are halved unevenly.
    let causal = Attention { causal: true, ..shape([4, 2], [16, 40], 2.0) };
    check(causal, Form::Packed, DENSE, &[(&positions(5), 32), (&positions(5)[..3], 9), (&[], 3)]);
    let window = Attention {
        window: Some(270),
        softcap: Some(5.0),
        head_dim: 9,
        value_dim: 5,
        q_heads: 2,
        kv_heads: 1,
        ..causal
    };
    check(window, Form::Paged(7), DENSE, &[(&positions(520)[..13], 530), (&positions(2)[..13], 300)]);
    let in_place = Attention { head_dim: 32, value_dim: 32, softcap: None, window: Some(9), ..window };
    check(in_place, Form::Paged(8), DENSE, &[(&positions(5)[..14], 20), (&positions(245)[..10], 300)]);
    check(window, Form::Padded, [3, 5], &[(&positions(0), 40)]);
    // Rows of one tile that see no key in common.
    let chunks = Attention { window: None, chunk: Some(9), ..in_place };
    check(chunks, Form::Paged(8), DENSE, &[(&positions(5), 32), (&positions(245)[..20], 300)]);
    check(Attention { window: Some(6), ..chunks }, Form::Packed, [3, 5], &[(&positions(250), 270)]);
    check(shape([25, 1], [0, 5], 1.0), Form::Padded, DENSE, &[(&[4], 5)]);
    check(shape([25, 1], [5, 0], 1.0), Form::Padded, DENSE, &[(&[4], 5)]);
    // No key, and no page where one could stand.
    check(shape([25, 1], [16, 16], 1.0), Form::Paged(8), DENSE, &[(&[4], 0)]);
}

/// Few query rows to a key head, and many, that see the end of one block and the start of the next, after `change`.
fn check_changed<I: Element>(shape: Attention, change: impl Fn(&mut Case<I>)) {
    for queries in [2, 13] {
        let last: Vec<i32> = (270 - queries..270).collect();
        let shape = Attention { causal: true, window: Some(30), ..shape };
        let mut case = Case::new(shape, Form::Padded, DENSE, &[(&last, 270)]);
        change(&mut case);
        case.check::<f32>();
    }
}

pub(crate) fn scores_that_are_not_finite() {
    let (inf, nan) = (bf16::INFINITY, bf16::NAN);
    let shape = shape([4, 2], [16, 16], 3.0);
    // Scores of the first sequence are -inf for one key head: they do not count, and neither do the values.
    let minus = |case: &mut Case<bf16>, some: &dyn Fn(usize) -> bool| {
        (0..case.shape.queries).for_each(|t| (0..2).for_each(|head| case.query(t, head)[0] = bf16::ONE));
        for j in (0..case.kv_len[0] as usize).filter(|&j| some(j)) {
            case.key(0, j, 0)[0] = -inf;
            case.value(0, j, 0).fill(nan);
        }
    };
    check_changed(shape, |case| minus(case, &|j| j % 9 == 3 || j > 265));
    check_changed(shape, |case| minus(case, &|_| true));
    // Of one key, that only the last query sees.
    check_changed(shape, |case| minus(case, &|j| j == 269));
    // One query makes them +inf.
    check_changed(shape, |case| {
        minus(case, &|j| j == 250);
        case.query(1, 1)[0] = -bf16::ONE;
    });
    // Only the last query sees the last key; a query or a key is NaN.
    for value in [inf, nan] {
        check_changed(shape, |case| {
            let last = case.kv_len[0] as usize - 1;
            case.key(0, last, 1)[15] = value;
            case.query(0, 3)[0] = value;
        });
    }
    // Every query sees it, in a block before the last.
    check_changed(shape, |case| case.key(0, 245, 1)[15] = nan);
    check_changed(Attention { softcap: Some(2.0), ..shape }, |case| {
        minus(case, &|j| j % 9 == 3);
        (0..case.kv_len[0] as usize).for_each(|j| case.value(0, j, 0).fill(bf16::ONE));
        case.query(0, 3)[0] = inf;
    });
    // The factor is 0, and -inf times 0 is NaN.
    check_changed(Attention { softcap: Some(2.0), scale: 0.0, ..shape }, |case| minus(case, &|j| j == 245));
}

/// The first key is seen by the first query only, the last key by the last one.
pub(crate) fn values_that_are_not_finite_are_added_where_they_are_seen() {
    check_changed(shape([4, 2], [16, 16], 3.0), |case: &mut Case<bf16>| {
        let first = case.q_pos[0] as usize - 29;
        [first, 269].into_iter().for_each(|j| case.value(0, j, 1).fill(bf16::INFINITY));
    });
}

pub(crate) fn scores_of_any_size() {
    check_changed::<bf16>(shape([4, 2], [16, 16], 0.0), |_| ());
    // Their exponents have no fraction, or are infinite.
    for (scale, power) in [(1.0, 22), (30.0, 21), (2.0, 126), (200.0, 0)] {
        check_changed::<f32>(shape([4, 2], [3, 5], scale), |case| {
            case.k.iter_mut().for_each(|k| *k *= 2f32.powi(power - power / 2));
            case.q.iter_mut().for_each(|q| *q *= 2f32.powi(power / 2));
        });
    }
    check_changed::<f32>(Attention { tf32: Tf32::Enabled, ..shape([4, 2], [3, 5], 2.0) }, |case| {
        for x in [&mut case.q, &mut case.k, &mut case.v] {
            x.iter_mut().for_each(|x| *x += 1e-4);
        }
    });
}

/// Rows with reference points of their own, all of whose weights count to the last, which has a value that shows it; and such
/// rows beside one whose last weights are nothing.
pub(crate) fn weights_far_below_the_largest() {
    for beyond in [false, true] {
        let mut case = Case::<f32>::new(shape([3, 1], [1, 5], 1.0), Form::Padded, DENSE, &[(&positions(0), 300)]);
        for j in 0..300 {
            case.key(0, j, 0)[0] = std::f32::consts::LN_2 * (30.0 - 99.0 * j as f32 / 299.0);
        }
        for (i, q) in case.q.iter_mut().enumerate() {
            *q = 1.0 - i as f32 / 200.0;
        }
        if beyond {
            case.query(5, 1)[0] = 1.04;
        }
        case.value(0, 299, 0).fill(2f32.powi(100));
        case.check::<f32>();
    }
}

/// Products with all values but one vanish below zero: -0 is the sum of every block, and +0 that of the blocks.
pub(crate) fn sums_of_blocks_begin_at_zero() {
    check_changed::<f32>(shape([4, 2], [1, 5], 1.0), |case| {
        case.q.fill(1.0);
        case.k.fill(-60.0);
        case.v.fill(-(2f32.powi(-100)));
        // Every query sees this one.
        for head in 0..2 {
            case.key(0, 245, head).fill(0.0);
            case.value(0, 245, head).fill(0.0);
        }
    });
}

/// `VDPBF16PS` would flush products of these, or read them as zeros.
pub(crate) fn small_operands_are_not_flushed() {
    for (head_dim, power) in [(32, -115), (69, -128)] {
        check_changed::<bf16>(shape([4, 2], [head_dim, 5], 2f64.powi(-5 - power)), |case| {
            let factors = [power / 2, power - power / 2].map(|power| 2f32.powi(power));
            case.k.iter_mut().for_each(|k| *k = bf16::from_f32(k.to_f32() * factors[0] * factors[1]));
            // What it makes of all keys is -inf; it stands 64 before the end of 69.
            case.query(0, 0)[5] = bf16::INFINITY;
            (0..270).for_each(|j| case.key(0, j, 0)[5] = bf16::from_f32(-factors[0] * factors[1]));
        });
    }
}

pub(crate) fn workspace_of_pairs_is_counted() {
    for isa in both_ways() {
        for (queries, dots, others) in [
            // The queries of six (sequence, key head), a panel of keys for either worker.
            (1, 6 * 48 + 2 * 512, 2 * 512),
            // Two blocks of keys of all six, a tile of queries for either worker.
            (20, 6 * 2 * (256 * 16 + 16) + 2 * 32 * 16, 0),
        ] {
            let q_pos = vec![0; queries];
            let case =
                Case::<bf16>::new(shape([6, 3], [32, 5], 1.0), Form::Padded, DENSE, &[(&q_pos, 500), (&q_pos, 400)]);
            let rows = 2 * queries * 6;
            let (mut out, mut lse) = (vec![0f32; 5 * rows], vec![0f32; rows]);
            let cpu = Cpu::new(isa, 2, usize::MAX).unwrap();
            case.run(&cpu, [&case.q, &case.k, &case.v], &mut out, &mut lse).unwrap();
            let pairs = if if queries > 1 { isa.dots_pay() } else { isa.has_dot() } { dots } else { others };
            assert_eq!(cpu.ledger().count(Counter::WorkspaceBf16), 4 * pairs, "{isa} {queries}");
        }
    }
}

pub(crate) fn slow_paths_are_counted_and_refused() {
    let power = |exponent: i32| bf16::from_f32(2f32.powi(exponent));
    let small = power(-120);
    // Few rows meet three panels of 32 keys; many are two tiles, which meet two blocks.
    type Change<'a> = &'a dyn Fn(&mut Case<bf16>);
    let changes: [(Change, [usize; 2]); 7] = [
        (&|_| (), [0, 0]),
        (&|case| case.key(0, 40, 1)[3] = small, [1, 2]),
        (&|case| case.key(0, 42, 1)[3] = small, [1, 2]),
        // The smallest that are not flushed.
        (&|case| (case.query(0, 2)[0], case.key(0, 40, 1)[3]) = (power(-15), power(-97)), [0, 0]),
        (&|case| case.query(0, 2)[5] = small, [3, 2]),
        (&|case| case.query(0, 0)[5] = bf16::from_bits(1), [3, 2]),
        // Scores that are kept are not made again to find out whether one is NaN.
        (&|case| (case.query(0, 2)[5], case.key(0, 40, 1)[3]) = (small, bf16::NAN), [3, 2]),
    ];
    for (queries, keys, many) in [(1, 70, false), (6, 70, false), (20, 300, true)] {
        for (change, amount) in changes {
            for head_dim in [32, 33] {
                let sequence = vec![keys as i32; queries];
                let mut case =
                    Case::<bf16>::new(shape([4, 2], [head_dim, 5], 1.0), Form::Padded, DENSE, &[(&sequence, keys)]);
                change(&mut case);
                for isa in both_ways() {
                    let dots = if many { isa.dots_pay() } else { isa.has_dot() };
                    let amount = if dots { amount[usize::from(many)] } else { 0 };
                    check_slow_paths(&case, isa, amount, [dots, !dots || amount > 0]);
                }
            }
        }
    }
    // The only tile is slow; without dimensions nothing is small.
    for (head_dim, amount) in [(16, 1), (0, 0)] {
        let mut case = Case::<bf16>::new(shape([25, 1], [head_dim, 16], 1.0), Form::Padded, DENSE, &[(&[4], 5)]);
        case.q.fill(small);
        for isa in both_ways() {
            let amount = if isa.dots_pay() { amount } else { 0 };
            let dots = isa.dots_pay() && amount == 0;
            check_slow_paths(&case, isa, amount, [dots, !dots]);
        }
    }
}

/// Two queries of a tile see keys far apart: those between are NaN here, and no score is made again for their sake.
pub(crate) fn scores_that_nobody_sees_cost_nothing() {
    let shape = Attention { causal: true, window: Some(9), ..shape([8, 1], [16, 16], 1.0) };
    let mut nan = Case::<bf16>::new(shape, Form::Padded, DENSE, &[(&[20, 20, 20, 90], 91)]);
    nan.q.fill(bf16::from_bits(1));
    let mut finite = nan.clone();
    finite.k.iter_mut().filter(|k| k.is_nan()).for_each(|k| *k = bf16::ONE);
    let (mut out, mut lse) = (vec![0f32; 4 * 8 * 16], vec![0f32; 4 * 8]);
    for isa in both_ways() {
        let mut slow_paths = |case: &Case<bf16>| {
            let mut counts = vec![];
            on_every_plan(isa, 1, |cpu| {
                case.run(cpu, [&case.q, &case.k, &case.v], &mut out, &mut lse)?;
                counts.push(cpu.ledger().count(Counter::SlowPaths));
                Ok(())
            });
            counts
        };
        let counts = slow_paths(&finite);
        assert_eq!(counts.iter().any(|&count| count > 0), isa.dots_pay(), "{isa}");
        assert_eq!(slow_paths(&nan), counts, "{isa}");
    }
}

/// `ran`: `VDPBF16PS`, and multiply-adds.
fn check_slow_paths(case: &Case<bf16>, isa: Isa, amount: usize, ran: [bool; 2]) {
    let expected = case.expected::<f32>();
    let operands = [&case.q[..], &case.k, &case.v];
    let (mut out, mut lse) = (vec![0f32; expected[0].len()], vec![0f32; expected[1].len()]);
    let cpu = Cpu::new(isa, 2, usize::MAX).unwrap();
    case.run(&cpu, operands, &mut out, &mut lse).unwrap();
    assert_eq!([bits(&out), bits(&lse)], expected, "{isa}");
    assert_eq!(cpu.ledger().count(Counter::SlowPaths), amount as u64, "{isa} {:?}", case.shape);
    let names = [isa.name(), isa.without_dot().name()];
    let ran: Vec<&str> = names.into_iter().zip(ran).filter_map(|(name, ran)| ran.then_some(name)).collect();
    assert_eq!(cpu.ledger().kernels(), ran, "{isa} {:?}", case.shape);
    let strict = Cpu::new(isa, 2, usize::MAX).unwrap();
    strict.ledger().forbid(Counter::SlowPaths);
    out.fill(7e7);
    lse.fill(7e7);
    match case.run(&strict, operands, &mut out, &mut lse) {
        Ok(()) => assert!(amount == 0 && [bits(&out), bits(&lse)] == expected, "{isa}"),
        Err(Error::Forbidden { amount: found, .. }) => {
            assert!(found == amount && out.iter().chain(&lse).all(|value| *value == 7e7), "{isa} {found}");
        }
        Err(error) => panic!("{error}"),
    }
}

impl Case<bf16> {
    /// `plans` of a call whose values are so wide.
    fn plans<T>(mut self, threads: usize, value_dim: usize, plans: impl FnOnce(&Job<bf16>) -> T) -> T {
        // A plan asks nothing of values but how many there are.
        self.v.clear();
        self.shape.value_dim = value_dim;
        let cpu = Cpu::new(Isa::Scalar, threads, usize::MAX).unwrap();
        self.with_job(&cpu, [&self.q, &self.k, &self.v], plans)
    }
}

pub(crate) fn few_rows_have_as_many_workers_as_they_have_work_for() {
    let plan = |shape: Attention, threads: usize, value_dim: usize, sequences: &[Sequence]| {
        let case = Case::new(shape, Form::Padded, DENSE, sequences);
        let plan = case.plans(threads, value_dim, Streams::preferred);
        plan.map(|plan| [plan.tiles()[0].1, plan.need().workers])
    };
    let heads = |q_heads: usize| shape([q_heads, 1], [1, 1], 1.0);
    assert_eq!(
        [1, 24, 25].map(|heads_of_q| plan(heads(heads_of_q), 4, 1, &[(&[0], 1)])),
        [Some([1, 1]), Some([1, 1]), None]
    );
    assert_eq!(plan(heads(1), 4, 1, &[(&[], 1)]), None);
    // A block of 7 * 73 numbers is a few bytes less than work for two.
    let seven = Attention { window: Some(256), ..shape([7, 7], [40, 1], 1.0) };
    assert_eq!(plan(seven, 4, 33, &[(&[511], 512)]), Some([1, 2]));
    assert_eq!(plan(Attention { window: Some(257), ..seven }, 4, 33, &[(&[511], 512)]), Some([1, 4]));
    // Two workers keep so many sequences between the passes, at least one.
    let sequences: [Sequence; 4] = [(&[0], 256); 4];
    let kept = [300, 8000, 30_000].map(|value_dim| plan(heads(24), 2, value_dim, &sequences));
    assert_eq!(kept, [4, 2, 1].map(|sequences| Some([sequences, 2])));
}

pub(crate) fn plans_go_from_the_preferred_one_to_the_smallest() {
    let sequences: [Sequence; 5] = [(&[0], 1); 5];
    let case = Case::new(shape([1, 1], [1, 1], 1.0), Form::Padded, DENSE, &sequences);
    let plans = |job: &Job<bf16>| -> Vec<usize> {
        successors(Streams::preferred(job), Streams::smaller).map(|plan| plan.tiles()[0].1).collect()
    };
    assert_eq!(case.plans(1, 1, plans), [5, 3, 2, 1]);
    let plans = |job: &Job<bf16>| -> Vec<[usize; 4]> {
        let tiles = |plan: Tiles| [plan.tiles()[0].1, plan.tiles()[1].1, plan.tiles()[2].1, plan.need().workers];
        successors(Some(Tiles::preferred(job)), Tiles::smaller).map(tiles).collect()
    };
    let many = |queries: usize, keys: usize| {
        let q_pos = vec![0; queries];
        let case = Case::new(shape([2, 1], [1, 1], 1.0), Form::Padded, DENSE, &[(&q_pos, keys)]);
        case.plans(7, 40, plans)
    };
    // Keys are shared, or not.
    let mut expected = vec![[32, 300, 48, 7], [32, 300, 48, 7], [16, 300, 48, 7]];
    expected.extend([256, 128, 64, 32, 16].map(|keys| [16, keys, 48, 7]));
    expected.extend([8, 4, 2, 1].map(|rows| [rows, 16, 48, 7]));
    expected.extend([[1, 16, 32, 7], [1, 16, 16, 7], [1, 16, 16, 3], [1, 16, 16, 1]]);
    assert_eq!(many(17, 300), expected);
    assert_eq!(many(16, 20)[..4], [[32, 20, 48, 7], [16, 20, 48, 7], [16, 32, 48, 7], [16, 16, 48, 7]]);
    assert_eq!(many(8, 3)[..3], [[16, 3, 48, 7], [16, 16, 48, 7], [8, 16, 48, 7]]);
    assert_eq!(many(9, 3)[0][0], 32);
}

/// Scores, queries of a dimension, 64 keys or values or as many as there are scores of, and two sums of each column.
pub(crate) fn tiles_have_the_room_that_they_use() {
    let case = Case::new(shape([2, 1], [1, 1], 1.0), Form::Padded, DENSE, &[(&[0; 17], 300)]);
    let room = |job: &Job<bf16>| -> Vec<usize> {
        successors(Some(Tiles::preferred(job)), Tiles::smaller).map(|plan| plan.need().slot).collect()
    };
    let of = |width: usize, keys: usize, part: usize, rows: usize| width * keys + width + part * 48 + 2 * rows * 48;
    let expected = [
        of(32, 300, 64, 32),
        of(32, 300, 64, 32),
        of(16, 300, 64, 16),
        of(16, 256, 64, 16),
        of(16, 128, 64, 16),
        of(16, 64, 64, 16),
        of(16, 32, 32, 16),
        of(16, 16, 16, 16),
        of(16, 16, 16, 8),
    ];
    assert_eq!(case.plans(1, 40, room)[..expected.len()], expected);
}
