//! What [`Fill::Power`](crate::fill::Fill::Power) is made of: inputs by which another order of a sum is seen through bf16.
//!
//! **Sums with signs** are masks: terms of +M and -M, as many of the one as of the other, among units so small that one
//! beside an M is lost. What survives are the units that are added where the masses before them have cancelled, which is
//! a matter of the order; the result is a small integer of units, exact in bf16, so another order moves it by whole units.
//!
//! **Sums of one sign** hold a few large terms and many that are lost beside a large one but not beside each other, so two
//! orders are apart by tens or hundreds of ulps of f32 instead of one. What is stored is chosen to stand beside ties of bf16 and
//! fp16 all over that range: wherever a kernel's own roundings put it, a step of one ulp moves some stored elements.
//!
//! All is made of draws, exact f64 operations, divisions and roots, so it is the same on every machine.

use crate::fill::{Draw, Maker};
use crate::round;
use crate::tensor::DType;

/// A term that counts: the smallest normal number of fp16.
pub const UNIT: f64 = 1.0 / 16384.0;
/// A term beside which units are lost: 2^29 of them, so that half of its last bit is 32.
pub const MASS: f64 = 32768.0;

/// Units of either sign.
fn units(draw: &Draw, n: usize) -> Vec<f64> {
    (0..n).map(|i| if draw.below(i, 2) == 0 { UNIT } else { -UNIT }).collect()
}

/// A row of a few masses among units. `colours` says which terms go with which: masses cancel within a colour, so a factor of
/// its own for each colour leaves their sum 0.
pub fn mask(draw: &Draw, row: usize, colours: &[usize]) -> Vec<f64> {
    let (n, draw) = (colours.len(), draw.of(row));
    let mut terms = units(&draw, n);
    let mut of_colour = vec![Vec::new(); colours.iter().copied().max().unwrap_or(0) + 1];
    colours.iter().enumerate().for_each(|(i, &colour)| of_colour[colour].push(i));
    // Where units are many, so is what they may come to: a bound that grows with the masses has to hold it.
    let pairs = [3, 4, 6, 9][row % 4] * (n / 2048).max(1);
    for pair in 0..pairs.max(of_colour.len() / 2) {
        let colour = draw.below(n + 3 * pair, of_colour.len());
        let places = &mut of_colour[colour];
        if places.len() < 2 {
            continue;
        }
        let first = places.swap_remove(draw.below(n + 3 * pair + 1, places.len()));
        // Kernels cut sums at powers of two: every second pair is so far apart, where its colour has such places.
        let apart = |place: &usize| pair % 2 == 0 && place.abs_diff(first).is_power_of_two();
        let some: Vec<usize> = (0..places.len()).filter(|&i| apart(&places[i])).collect();
        let at = draw.below(n + 3 * pair + 2, if some.is_empty() { places.len() } else { some.len() });
        let second = places.swap_remove(some.get(at).copied().unwrap_or(at));
        (terms[first], terms[second]) = (MASS, -MASS);
    }
    terms
}

/// The same without colours.
pub fn masks(draw: &Draw, rows: usize, n: usize) -> Vec<f64> {
    let colours = vec![0; n];
    (0..rows).flat_map(|row| mask(draw, row, &colours)).collect()
}

/// A mask of three pairs of masses, each a power of two apart, where kernels cut their sums. Of many colours few places have such a
/// partner, and a pair in each lane of a sum would leave no unit of any, whatever the order.
fn mask_apart(draw: &Draw, row: usize, colours: &[usize]) -> Vec<f64> {
    let (n, draw) = (colours.len(), draw.of(row));
    let mut terms = units(&draw, n);
    let mut distances: Vec<usize> = (3..).map(|k| 1 << k).take_while(|distance| *distance < n).collect();
    for pair in 0..3 {
        let at = n + 3 * pair;
        let first = draw.below(at, n);
        let turn = draw.below(at + 1, distances.len().max(1));
        distances.rotate_left(turn);
        let is_free = |i: usize| terms[i].abs() == UNIT;
        let partner = |i: usize| {
            let places = distances.iter().map(|distance| i + distance);
            places.filter(|j| *j < n && colours[*j] == colours[i]).find(|j| is_free(*j))
        };
        let mut places = (first..n).chain(0..first).filter(|i| is_free(*i));
        let Some((i, j)) = places.find_map(|i| Some((i, partner(i)?))) else { break };
        let mass = if draw.below(at + 2, 2) == 0 { MASS } else { -MASS };
        (terms[i], terms[j]) = (mass, -mass);
    }
    terms
}

/// The operands of a product of sums: `x[m,k]` of masks, and `w[n,k]` of 1 and -1 that is one for all terms of a colour.
pub fn product(maker: &Maker, name: &str, [m, n, k]: [usize; 3]) -> (Vec<f64>, Vec<f64>) {
    let (x, w) = (maker.draw(name), maker.draw("w"));
    let colours = two_colours(&w, k);
    let sign = |column: usize, colour: usize| if w.below(k + column * 2 + colour, 2) == 0 { 1.0 } else { -1.0 };
    let rows = (0..m).flat_map(|row| mask(&x, row, &colours)).collect();
    (rows, (0..n * k).map(|i| sign(i / k, colours[i % k])).collect())
}

/// The colours of the terms of a [`product`].
fn two_colours(w: &Draw, k: usize) -> Vec<usize> {
    (0..k).map(|i| w.below(i, 2)).collect()
}

/// The bias of a [`product`]: a mass for each column, which one term of each row of x takes back.
pub fn bias(maker: &Maker, x: &mut [f64], w: &[f64], [n, k]: [usize; 2]) -> Vec<f64> {
    let (draw, colours) = (maker.draw("bias"), two_colours(&maker.draw("w"), k));
    let own: Vec<usize> = (0..k).filter(|&i| colours[i] == 0).collect();
    for (row, x) in x.chunks_mut(k).enumerate() {
        let first = draw.below(row, own.len());
        let place = own[first..].iter().chain(&own).find(|&&i| x[i].abs() == UNIT).expect("masses are few");
        x[*place] = -MASS;
    }
    w.chunks(k).take(n).map(|column| MASS * column[own[0]]).collect()
}

/// Whatever significands, of either sign.
pub fn factors(draw: &Draw, n: usize) -> Vec<f64> {
    (0..n).map(|i| significand(draw, i) * if draw.below(n + i, 2) == 0 { 1.0 } else { -1.0 }).collect()
}

fn significand(draw: &Draw, i: usize) -> f64 {
    1.0 + draw.below(i, 128) as f64 / 128.0
}

/// How many steps `y` is above 0 in its binade, which has this many: from `steps` to twice as many.
fn in_steps(y: f64, steps: f64) -> f64 {
    f64::from_bits(y.to_bits() & ((1 << 52) - 1) | 1023 << 52) * steps
}

/// How far `y` is from the next tie of a dtype with this many steps to a binade, as a share of a step: 0 to 1/2.
fn from_tie(y: f64, steps: f64) -> f64 {
    let f = in_steps(y, steps);
    (f - f.floor() - 0.5).abs()
}

/// Steps to a binade of bf16, and for every fourth column of fp16: whose ties are more, so that others stand beside one by chance.
fn steps(column: usize) -> f64 {
    if column % 4 == 2 { 1024.0 } else { 128.0 }
}

/// The one of the `candidates` for which `y` of it is nearest to a tie.
pub fn beside_tie<T: Copy>(column: usize, candidates: impl Iterator<Item = T>, y: impl Fn(T) -> f64) -> T {
    let steps = steps(column);
    let far = |candidate: T| from_tie(y(candidate).abs(), steps);
    let nearest = candidates.map(|candidate| (far(candidate), candidate)).min_by(|a, b| a.0.total_cmp(&b.0));
    nearest.expect("there are candidates").1
}

/// Significands to choose from, of which the case's dtype has all.
pub fn significands(maker: &Maker, draw: &Draw, i: usize) -> impl Iterator<Item = f64> + use<> {
    let steps = if maker.dtype == DType::Bf16 { 128 } else { 1024 };
    let first = draw.below(i, steps / 128);
    (0..128).map(move |k| 1.0 + (k * (steps / 128) + first) as f64 / steps as f64)
}

/// Rows whose squares are a few of one size and many that are lost beside them.
pub struct Squares {
    /// Elements; a large one is `large`, the others are 2^-13 of that to 2^-12.
    pub x: Vec<f64>,
    /// Which are large.
    pub is_large: Vec<bool>,
    pub large: f64,
    pub scales: Scales,
}

/// Row number `row` of `n` elements without signs, with the eps of the case.
pub fn squares(maker: &Maker, draw: &Draw, row: usize, n: usize) -> Squares {
    let large = large_beside(n);
    let count = [1, 2, 1, 4, 8][row % 5].min(n / 32).max(1);
    let mut is_large = vec![false; n];
    for i in 0..count {
        is_large[draw.below(row * 32 + i, n)] = true;
    }
    let small = large * round::pow2(-13);
    let element = |i: usize| if is_large[i] { large } else { small * significand(draw, (row + 1) * n * 2 + i) };
    let x: Vec<f64> = (0..n).map(element).collect();
    let scales = Scales::of_squares(maker, 1e-6, &x, large);
    Squares { x, is_large, large, scales }
}

/// How large 1 / root(mean of squares) is: if all is counted, and if only the large elements are.
#[derive(Clone, Copy)]
pub struct Scales {
    all: f64,
    least: f64,
}

impl Scales {
    /// From the two sums of squares of `n` elements; `eps` is that of the op where the case has none.
    fn new(maker: &Maker, eps: f64, n: usize, [all, of_large]: [f64; 2]) -> Scales {
        let eps = maker.params.get("eps").map_or(eps, |eps| eps.parse().expect("the loader checks"));
        let root = |sum: f64| 1.0 / (sum / n as f64 + eps).sqrt();
        Scales { all: root(all), least: root(of_large) }
    }

    /// The same of a row, whose large elements are `large`.
    fn of_squares(maker: &Maker, eps: f64, x: &[f64], large: f64) -> Scales {
        let count = x.iter().filter(|x| x.abs() == large).count() as f64;
        Scales::new(maker, eps, x.len(), [x.iter().map(|x| x * x).sum(), count * large * large])
    }

    /// A scale between the two, a little beyond on either side.
    pub fn scale(&self, draw: &Draw, i: usize) -> f64 {
        let (range, ulp) = (self.least - self.all, self.all * round::pow2(-23));
        self.all - 8.0 * ulp + (range + 16.0 * ulp) * draw.below(i, 1 << 20) as f64 * round::pow2(-20)
    }

    /// A scale within 8 ulp of that of all.
    fn beside_all(&self, draw: &Draw, i: usize) -> f64 {
        self.all * (1.0 + (draw.below(i, 1 << 20) as f64 * round::pow2(-20) - 0.5) * round::pow2(-19))
    }
}

/// Up to this many columns of a row are searched; in long rows enough of the others stand beside ties by chance.
const SEARCHED: usize = 448;

/// Whether column `i` of `n` is one of those.
pub fn is_searched(draw: &Draw, i: usize, n: usize) -> bool {
    draw.below(i, n) < SEARCHED
}

/// Rows x[r,n] and weights w[n] of a norm. A row is of one of three kinds, by how many large elements it has; all rows of a kind
/// have one sum of squares, so one r, and each column is a kind's own: in all of that kind's rows `x * r * w` stands beside a
/// tie there. A step of one ulp of r moves stored elements in every row that is not very short.
pub fn norm_rows(maker: &Maker, name: &str, r: usize, n: usize) -> [Vec<f64>; 2] {
    const LARGE: [usize; 3] = [1, 2, 4];
    const KIND: [usize; 4] = [0, 1, 0, 2];
    let (of_x, of_w) = (maker.draw(name), maker.draw("w"));
    let large = large_beside(n);
    let small = large * round::pow2(-13);
    let counts = LARGE.map(|count| count.min(n / 32).max(1));
    let of_small = 2.0 * n as f64 * small * small;
    let kinds = counts.map(|count| {
        let of_large = count as f64 * large * large;
        Scales::new(maker, 1e-6, n, [of_large + of_small, of_large])
    });
    // The significands of x and w in the columns of each kind, beside ties of bf16 and of fp16.
    let ties: [[Ties; 2]; 3] = [0, 1, 2].map(|kind| {
        let of_kind = of_w.of(kind);
        [DType::Bf16, DType::Fp16].map(|out| Ties::new(maker, &of_kind, &kinds[kind], out))
    });
    let column = |i: usize| {
        let (at, kind) = (n + 4 * i, KIND[of_w.below(n + 4 * i, 4)]);
        let scale = match of_w.below(at + 1, 2) {
            0 => kinds[kind].beside_all(&of_w, at + 2),
            _ => kinds[kind].scale(&of_w, at + 2),
        };
        let [x, w] = ties[kind][usize::from(i % 4 == 2)].nearest(scale);
        (kind, x, if of_w.below(at + 3, 2) == 0 { w } else { -w })
    };
    let columns: Vec<(usize, f64, f64)> = (0..n).map(column).collect();
    let row_of = |row: usize| {
        let (of_row, kind) = (of_x.of(row), KIND[row % 4]);
        let is_large = some_of(&of_row, n, counts[kind]);
        // Squares of small elements come to this many of one that is just small, a little more or less from row to row.
        let mut left = 2.0 * n as f64 + 8.0 * counts[kind] as f64 * (of_row.below(n, 7) as f64 - 3.0);
        let mut x = vec![large; n];
        let (tuned, free): (Vec<usize>, Vec<usize>) =
            (0..n).filter(|i| !is_large[*i]).partition(|i| columns[*i].0 == kind);
        // A half is beside a tie as well: so the tuned columns leave two to each of the others.
        let enough = left - 2.0 * tuned.len() as f64;
        for (seen, &i) in tuned.iter().enumerate() {
            let (_, whole, _) = columns[i];
            let least = enough + 2.0 * (tuned.len() - seen - 1) as f64;
            let value =
                if of_row.below(2 * n + i, 4) == 0 || left - whole * whole < least { whole / 2.0 } else { whole };
            left -= value * value;
            x[i] = small * value;
        }
        // What is missing is shared out among the others, more and more exactly.
        for (seen, &i) in free.iter().enumerate() {
            let others = free.len() - seen - 1;
            let by = if others < 8 { 1.0 } else { 0.5 + of_row.below(3 * n + i, 1024) as f64 / 1024.0 };
            let value = round::round((left / (others + 1) as f64 * by).sqrt(), DType::Bf16);
            left -= value * value;
            x[i] = small * value;
        }
        x.iter_mut().enumerate().filter(|(i, _)| of_row.below(4 * n + i, 2) == 0).for_each(|(_, x)| *x = -*x);
        x
    };
    [(0..r).flat_map(row_of).collect(), columns.into_iter().map(|(_, _, w)| w).collect()]
}

/// Pairs of significands whose product, by some scale of a kind, is a tie of a dtype; sorted by that scale.
struct Ties(Vec<(f64, [f64; 2])>);

impl Ties {
    fn new(maker: &Maker, draw: &Draw, scales: &Scales, out: DType) -> Ties {
        let of_pair = |x: f64, w: f64| {
            let y = x * w * scales.all;
            let step = round::ulp(y, out);
            (((y / step).floor() + 0.5) * step / (x * w), [x, w])
        };
        let narrow = Maker { dtype: DType::Bf16, ..*maker };
        let xs: Vec<f64> = significands(&narrow, draw, 0).collect();
        let pairs = significands(maker, draw, 1).flat_map(|w| xs.iter().map(move |&x| of_pair(x, w)));
        let pairs: Vec<(f64, [f64; 2])> = pairs.collect();
        let mut near = scales.all * round::pow2(-20);
        loop {
            let within = |scale: f64| scales.all - near <= scale && scale <= scales.least + near;
            let mut some: Vec<_> = pairs.iter().copied().filter(|(scale, _)| within(*scale)).collect();
            if !some.is_empty() {
                some.sort_by(|a, b| a.0.total_cmp(&b.0));
                return Ties(some);
            }
            near *= 2.0;
        }
    }

    /// The pair whose scale is nearest to this one.
    fn nearest(&self, scale: f64) -> [f64; 2] {
        let at = self.0.partition_point(|(other, _)| *other < scale);
        let beside = [at.saturating_sub(1), at.min(self.0.len() - 1)].map(|i| self.0[i]);
        let [below, above] = beside.map(|(other, pair)| ((other - scale).abs(), pair));
        if below.0 < above.0 { below.1 } else { above.1 }
    }
}

/// The size of a large element beside which the squares of n small ones, 2^-13 of it, count for little: a power of two.
fn large_beside(n: usize) -> f64 {
    let mut large = 1.0;
    while large * large < n as f64 {
        large *= 2.0;
    }
    large
}

/// `count` of n places.
fn some_of(draw: &Draw, n: usize, count: usize) -> Vec<bool> {
    let mut is_one = vec![false; n];
    for i in 0..count {
        let mut at = draw.below(i, n);
        while is_one[at] {
            at = (at + 1) % n;
        }
        is_one[at] = true;
    }
    is_one
}

/// `e^x` by its series, on every machine alike; x is between -64 and 64.
pub fn exp(x: f64) -> f64 {
    let y = x / 64.0;
    let mut e = (1..=14).rev().fold(1.0, |sum, k| 1.0 + sum * y / f64::from(k));
    for _ in 0..6 {
        e *= e;
    }
    e
}

/// Logits near 0 to choose from, which the case's dtype has, and the weight of each beside that of 0.
fn near_zero(maker: &Maker, draw: &Draw, from: usize, count: usize) -> Vec<(f64, f64)> {
    let value = |k: usize| round::round((draw.below(from + k, 1 << 12) as f64 - 2048.0) / 4800.0, maker.dtype);
    (0..count).map(value).map(|value| (value, exp(value))).collect()
}

/// Rows of logits: a few at the top, and many whose weights are lost beside theirs. In some rows the many are around 0,
/// where a dtype has logits enough to choose from, and in others a few are seen in any dtype. What stands beside a tie
/// is the weight of a logit over a sum of the weights that an order may give.
pub fn logits(maker: &Maker, name: &str, r: usize, n: usize) -> Vec<f64> {
    let draw = maker.draw(name);
    let row_of = |row: usize| {
        if row % 4 == 3 || maker.dtype != DType::Bf16 && row % 2 == 1 {
            few_seen(maker, &draw, row, n)
        } else {
            many_seen(maker, &draw, row, n)
        }
    };
    (0..r).flat_map(row_of).collect()
}

/// Rows of logits whose largest is 0, so that the logarithm of the sum of their weights shows what is lost beside it.
pub fn logits_below_zero(maker: &Maker, name: &str, r: usize, n: usize) -> Vec<f64> {
    let draw = maker.draw(name);
    let row_of = |row: usize| {
        let of_row = draw.of(row);
        let mut values: Vec<f64> = (0..n).map(|i| -16.75 - of_row.below(i, 8) as f64 / 8.0).collect();
        places(&of_row, n, at_top(row), n).into_iter().for_each(|i| values[i] = 0.0);
        values
    };
    (0..r).flat_map(row_of).collect()
}

/// The logit of the top of rows of which the others are around 0; e^-16.75 is 2^-24.2.
pub const TOP: f64 = 16.75;

/// How many logits are at the top.
fn at_top(row: usize) -> usize {
    [1, 1, 2, 1, 4, 1, 3, 8][row / 2 % 8]
}

/// Up to `count` places of n.
fn places(draw: &Draw, from: usize, count: usize, n: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..count).map(|k| draw.below(from + k, n)).collect();
    places.sort_unstable();
    places.dedup();
    places
}

/// A row of logits around 0 below a few of [`TOP`].
pub fn many_seen(maker: &Maker, draw: &Draw, row: usize, n: usize) -> Vec<f64> {
    let draw = draw.of(row);
    // Of any size from 2^-9 to 1/2, and a few above 0: as many different ones as the dtype has.
    let choice = |k: usize| {
        let size = exp(-(draw.below(2 * k, 1 << 20) as f64) * round::pow2(-20) * 5.5) * 0.625;
        let value = round::round(if draw.below(2 * k + 1, 4) == 0 { size / 8.0 } else { -size }, maker.dtype);
        (value, exp(value))
    };
    let mut choice: Vec<(f64, f64)> = (0..4096).map(choice).collect();
    choice.sort_by(|a, b| a.0.total_cmp(&b.0));
    choice.dedup_by_key(|(value, _)| *value);
    let mean = choice.iter().map(|(_, weight)| weight).sum::<f64>() / choice.len() as f64;
    let tops = places(&draw, 8192, at_top(row).min(n / 16), n);
    let large = tops.len() as f64;
    let lost = n as f64 * mean * exp(-TOP) / large;
    // The sum at which the share of a logit is a tie of bf16, if it passes one while the sum goes from that of the top to
    // that of all.
    let tie = |weight: f64| {
        let f = in_steps(weight * exp(-TOP) / large, 128.0);
        let by = f / ((f - 0.5).floor() + 0.5);
        (by - 1.0 <= 1.1 * lost).then_some(large * exp(TOP) * by)
    };
    let passing: Vec<(f64, f64)> = choice.iter().filter_map(|&(value, weight)| Some((value, tie(weight)?))).collect();
    let mut sum = large * exp(TOP);
    let (mut values, mut free) = (vec![TOP; n], Vec::new());
    for i in (0..n).filter(|i| !tops.contains(i)) {
        let at = 8192 + n + 2 * i;
        let pick = choice[draw.below(at, choice.len())];
        values[i] = match passing.get(draw.below(at, passing.len().max(1))) {
            Some((passing, _)) if draw.below(at + 1, 4) > 0 => *passing,
            _ => {
                free.push((i, pick.1));
                pick.0
            }
        };
        sum += exp(values[i]);
    }
    // Of the others as many are made small as bring the sum beside the next tie below, which a step of an ulp then passes; they
    // still count among those that vanish.
    let off = (draw.below(8193 + 4 * n, 1024) as f64 / 512.0 - 1.0) * 1.5 * round::ulp(sum, DType::Fp32);
    let below = passing.iter().map(|(_, tie)| tie + off).filter(|tie| *tie <= sum);
    if let Some(aim) = below.max_by(f64::total_cmp) {
        for (i, weight) in free {
            let less = weight - exp(-3.0);
            if sum - less >= aim {
                values[i] = -3.0;
                sum -= less;
            }
        }
    }
    values
}

fn few_seen(maker: &Maker, draw: &Draw, row: usize, n: usize) -> Vec<f64> {
    const TOP: f64 = 3.0;
    let from = (row + 1) * (4 * n + 1024);
    let mut choice = near_zero(maker, draw, from, 512);
    choice.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut values: Vec<f64> = (0..n).map(|i| -13.8125 - draw.below(from + 1024 + 4 * i, 8) as f64 / 16.0).collect();
    let tops = places(draw, from + 512, at_top(row).min(n / 16), n);
    let seen = places(draw, from + 600, 23.min(n / 8), n);
    let seen: Vec<usize> = seen.into_iter().filter(|i| !tops.contains(i)).collect();
    let weight = |v: f64| exp(v - TOP);
    let lost: f64 = values.iter().map(|&v| weight(v)).sum();
    let of_seen = exp(-TOP);
    // The sum that is aimed at; what the choices below add or leave out is made up for as they go, last by three logits that
    // are nearer and nearer to 0, where the dtype has ever finer ones.
    let aim = tops.len() as f64 + seen.len() as f64 * of_seen;
    let mut debt = 0.0;
    let (last, first) = (seen.len().saturating_sub(3), seen.len().saturating_sub(3));
    for &i in &seen[..first] {
        let at = from + 1024 + 4 * i;
        let sum = aim + lost * (draw.below(at + 1, 1 << 20) as f64 * round::pow2(-20) * 1.2 - 0.1);
        let zero = choice.partition_point(|(value, _)| *value < 0.0);
        let side = if debt < 0.0 { zero..choice.len() } else { 0..zero };
        // Of fp16 alone: bf16 has even rows.
        let (value, e) = choice[beside_tie(2, side, |pick| choice[pick].1 * of_seen / sum)];
        debt += (e - 1.0) * of_seen;
        values[i] = value;
    }
    for &i in &seen[last..] {
        // The logit whose weight takes the debt away: e^v = 1 - debt / of_seen, by its series about 0.
        let target = (1.0 - debt / of_seen).clamp(0.5, 2.0);
        let mut v = 0.0f64;
        for _ in 0..40 {
            v += target / exp(v) - 1.0;
        }
        values[i] = round::round(v, maker.dtype);
        debt += (exp(values[i]) - 1.0) * of_seen;
    }
    tops.into_iter().for_each(|i| values[i] = TOP);
    values
}

/// Places of a row in pairs, as they are drawn; one is left over where n is odd.
fn pairs(draw: &Draw, from: usize, n: usize) -> Vec<[usize; 2]> {
    let mut places: Vec<(usize, usize)> = (0..n).map(|i| (draw.below(from + i, 1 << 40), i)).collect();
    places.sort_unstable();
    places.chunks_exact(2).map(|two| [two[0].1, two[1].1]).collect()
}

/// Rows x for a norm about the mean, with the weights `w`. Of even rows every element is there with both signs, so that the
/// mean is 0 and the squares are those of [`norm_rows`]; odd rows are masks, whose mean is what survives.
pub fn centred_rows(maker: &Maker, name: &str, r: usize, w: &[f64]) -> Vec<f64> {
    let (draw, n) = (maker.draw(name), w.len());
    // Sums of these are exact, whatever their order.
    let narrow = Maker { dtype: DType::Bf16, ..*maker };
    let row_of = |row: usize| {
        if row % 2 == 1 {
            return mask(&draw, row, &vec![0; n]);
        }
        paired(&narrow, &draw, row, n, |i| w[i]).0
    };
    (0..r).flat_map(row_of).collect()
}

/// A row of pairs of opposite elements, few large ones and many small ones; for the first of a small pair the element times a
/// scale times `factor` of it stands beside a tie. Also the pairs of small ones and the squares.
fn paired(
    maker: &Maker,
    draw: &Draw,
    row: usize,
    n: usize,
    factor: impl Fn(usize) -> f64,
) -> (Vec<f64>, Squares, Vec<[usize; 2]>) {
    let from = (row + 1) * n * 8;
    let mut pairs = pairs(draw, from * 8, n);
    let count = [1, 2, 4, 8][row / 2 % 4].min(n / 64).max(1);
    let small_pairs = pairs.split_off(count.min(pairs.len()));
    let mut squares = squares(maker, draw, row, n);
    let small = squares.large * round::pow2(-13);
    squares.x.fill(0.0);
    squares.is_large.fill(false);
    for &[i, j] in &pairs {
        (squares.x[i], squares.x[j]) = (squares.large, -squares.large);
        (squares.is_large[i], squares.is_large[j]) = (true, true);
    }
    for &[i, j] in &small_pairs {
        let x = small * significand(draw, from + i);
        (squares.x[i], squares.x[j]) = (x, -x);
    }
    squares.scales = Scales::of_squares(maker, 1e-5, &squares.x, squares.large);
    for &[i, j] in &small_pairs {
        let at = from + n * 2 + 4 * i;
        if is_searched(draw, at, n) {
            let scale = squares.scales.scale(draw, at + 1);
            let x = small * beside_tie(i, significands(maker, draw, at + 2), |m| small * m * scale * factor(i));
            (squares.x[i], squares.x[j]) = (x, -x);
        }
    }
    (squares.x.clone(), squares, small_pairs)
}

/// Gradients through a norm: x, w and dy. Weights are one for all places of a colour. In even rows x is 1 and -1 and the products
/// with x are masks; a quarter of the places have a gradient of 0, where the sum of the products is all there is. In odd rows
/// the squares are those of [`norm_rows`], and the gradients stand beside ties.
pub fn gradient_rows(maker: &Maker, r: usize, n: usize) -> [Vec<f64>; 3] {
    let (of_x, of_w, of_dy) = (maker.draw("x"), maker.draw("w"), maker.draw("dy"));
    let colours = colours(&of_w, n);
    let w: Vec<f64> = colours.iter().map(|&colour| significand(&of_w, 4 * n + colour)).collect();
    let sign = |draw: &Draw, i: usize| if draw.below(i, 2) == 0 { 1.0 } else { -1.0 };
    let (mut x, mut dy) = (Vec::with_capacity(r * n), Vec::with_capacity(r * n));
    for row in 0..r {
        let at = |i: usize| 4 * ((row + 1) * n + i) + 16 * r * n;
        if row % 2 == 0 {
            let signs: Vec<f64> = (0..n).map(|i| sign(&of_x, at(i))).collect();
            dy.extend(thinned(&of_dy, row, &colours).iter().zip(&signs).map(|(term, sign)| term * sign));
            x.extend(signs);
            continue;
        }
        let squares = squares(maker, &of_x, row, n);
        dy.extend((0..n).map(|i| match squares.is_large[i] {
            true => 0.0,
            false => {
                let scale = squares.scales.scale(&of_dy, at(i));
                let candidates = significands(maker, &of_dy, at(i) + 1);
                beside_tie(i, candidates, |m| m * scale * w[i]) * sign(&of_dy, at(i) + 2)
            }
        }));
        x.extend(squares.x.iter().enumerate().map(|(i, x)| x * sign(&of_x, at(i))));
    }
    [x, w, dy]
}

/// Gradients through a norm about the mean: x, w and dy. The rows are those of [`gradient_rows`], but masses of even rows cancel
/// among places of one weight and one sign of x, so that the sum of the gradients is a mask as well.
pub fn centred_gradient_rows(maker: &Maker, r: usize, n: usize) -> [Vec<f64>; 3] {
    let (of_x, of_w, of_dy) = (maker.draw("x"), maker.draw("w"), maker.draw("dy"));
    let narrow = Maker { dtype: DType::Bf16, ..*maker };
    let colours = colours(&of_w, n);
    let w: Vec<f64> = colours.iter().map(|&colour| significand(&of_w, 4 * n + colour)).collect();
    let (mut x, mut dy) = (Vec::with_capacity(r * n), Vec::with_capacity(r * n));
    for row in 0..r {
        if row % 2 == 0 {
            // As many of either sign, so that the mean is 0 and the squares are whole numbers.
            let mut signs = vec![0.0; n];
            for [i, j] in pairs(&of_x, 8 * (row + 1) * n, n) {
                (signs[i], signs[j]) = (1.0, -1.0);
            }
            let both: Vec<usize> =
                colours.iter().zip(&signs).map(|(colour, sign)| 2 * colour + usize::from(*sign > 0.0)).collect();
            x.extend(signs);
            dy.extend(thin(&of_dy, row, mask_apart(&of_dy, row, &both)));
            continue;
        }
        let (values, squares, pairs) = paired(&narrow, &of_x, row, n, |_| 1.0);
        let mut gradients = vec![0.0; n];
        // Opposite gradients for two places of one weight: their mean is 0.
        let mut waiting = vec![None; colours.iter().max().map_or(0, |most| most + 1)];
        for place in pairs.into_iter().flatten() {
            let Some(other) = waiting[colours[place]].take() else {
                waiting[colours[place]] = Some(place);
                continue;
            };
            let at = 4 * ((row + 1) * n + place) + 16 * r * n;
            let scale = squares.scales.scale(&of_dy, at);
            let dy = beside_tie(place, significands(maker, &of_dy, at + 1), |m| m * scale * w[place]);
            (gradients[place], gradients[other]) = (dy, -dy);
        }
        x.extend(values);
        dy.extend(gradients);
    }
    [x, w, dy]
}

/// Colours of about sixteen places each.
fn colours(draw: &Draw, n: usize) -> Vec<usize> {
    (0..n).map(|i| draw.below(i, (n / 16).clamp(1, 64))).collect()
}

/// A mask of which about a quarter of the units are 0.
pub fn thinned(draw: &Draw, row: usize, colours: &[usize]) -> Vec<f64> {
    thin(draw, row, mask(draw, row, colours))
}

/// A mask in which about a quarter of the units are made 0.
fn thin(draw: &Draw, row: usize, mut terms: Vec<f64>) -> Vec<f64> {
    let n = terms.len();
    for (i, term) in terms.iter_mut().enumerate() {
        if term.abs() < MASS && draw.below((row + 7) * n * 32 + i, 4) == 0 {
            *term = 0.0;
        }
    }
    terms
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::fill::Fill;
    use std::collections::BTreeMap;

    pub(crate) fn exponentials() {
        for x in [-17.25, -3.0, -0.1, 0.0, 0.5, 2.0] {
            assert!((exp(x) / x.exp() - 1.0).abs() < 1e-13, "{x}");
        }
    }

    /// Most steps of an ulp of r move stored bf16 elements in some of the rows: of bf16 there are few pairs whose product is
    /// beside a tie.
    pub(crate) fn rows_of_norms_feel_r() {
        let (ints, params) = (BTreeMap::new(), BTreeMap::new());
        let shape = BTreeMap::from([("R".to_string(), 40), ("N".to_string(), 1024)]);
        let maker = Maker {
            key: "rms_norm/bf16/feel",
            dtype: DType::Bf16,
            fill: Fill::Power,
            shape: &shape,
            ints: &ints,
            params: &params,
        };
        let [x, w] = norm_rows(&maker, "x", 40, 1024);
        let mut moved = [0; 8];
        for row in x.chunks(1024) {
            let r = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / 1024.0 + 1e-6).sqrt();
            let stored = |step: usize| {
                let r = r * (1.0 + (step as f64 - 4.0) * round::pow2(-23));
                row.iter().zip(&w).map(|(x, w)| round::round(x * r * w, DType::Bf16)).collect::<Vec<f64>>()
            };
            for (step, rows) in moved.iter_mut().enumerate() {
                *rows += usize::from(stored(step) != stored(step + 1));
            }
        }
        let felt = moved.iter().filter(|rows| **rows > 0).count();
        assert!(felt >= 6, "of 40 rows so many feel each step: {moved:?}");
    }

    pub(crate) fn distances_from_ties() {
        assert_eq!(from_tie(1.0 + 1.0 / 256.0, 128.0), 0.0);
        assert_eq!(from_tie(0.25, 128.0), 0.5);
        assert_eq!(from_tie(8.0 * (1.0 + 1.0 / 2048.0), 1024.0), 0.0);
    }
}
