//! Every op against the plainest loop that follows docs/NUMERICS.md, on random shapes, values and settings: the same
//! bits on every instruction set, thread count and budget. Nothing of the crate computes what is expected: it comes as the
//! bits that are stored, from loops that widen and round by themselves.

use crate::cpus;
use proptest::prelude::*;
use samebits_ops::*;

/// A storage type by its bits.
pub(crate) trait Stored: Element {
    /// Bits of the exponent and of the mantissa.
    const FORM: (u32, u32);
    fn stored(self) -> u32;
}

impl Stored for bf16 {
    const FORM: (u32, u32) = (8, 7);
    fn stored(self) -> u32 {
        self.to_bits().into()
    }
}

impl Stored for f16 {
    const FORM: (u32, u32) = (5, 10);
    fn stored(self) -> u32 {
        self.to_bits().into()
    }
}

impl Stored for f32 {
    const FORM: (u32, u32) = (8, 23);
    fn stored(self) -> u32 {
        self.to_bits()
    }
}

pub(crate) fn bits<T: Stored>(values: &[T]) -> Vec<u32> {
    values.iter().map(|v| v.stored()).collect()
}

/// The value, exactly.
fn wide<T: Stored>(value: T) -> f32 {
    wide_of::<T>(value.stored())
}

/// The value of what is stored as `bits`.
fn wide_of<T: Stored>(bits: u32) -> f32 {
    let ((exponent_bits, mantissa_bits), sign) = (T::FORM, bits >> (T::FORM.0 + T::FORM.1));
    let (mantissa, exponent) = (bits & ((1 << mantissa_bits) - 1), bits >> mantissa_bits & ((1 << exponent_bits) - 1));
    let bias = (1 << (exponent_bits - 1)) - 1;
    let power = |e: i32| f64::exp2(f64::from(e - mantissa_bits as i32));
    let size = match exponent {
        e if e == (1 << exponent_bits) - 1 && mantissa == 0 => f64::INFINITY,
        e if e == (1 << exponent_bits) - 1 => f64::NAN,
        0 => f64::from(mantissa) * power(1 - bias),
        e => f64::from(mantissa + (1 << mantissa_bits)) * power(e as i32 - bias),
    };
    (if sign == 1 { -size } else { size }) as f32
}

pub(crate) fn widened<T: Stored>(values: &[T]) -> Vec<f32> {
    values.iter().map(|&v| wide(v)).collect()
}

/// The last rounding: to nearest even, with gradual underflow, to infinity beyond the largest; the canonical NaN.
fn rounded<T: Stored>(value: f32) -> u32 {
    let (exponent_bits, mantissa_bits) = T::FORM;
    let infinity = ((1u32 << exponent_bits) - 1) << mantissa_bits;
    if value.is_nan() {
        return infinity | 1 << (mantissa_bits - 1);
    }
    let sign = u32::from(value.is_sign_negative()) << (exponent_bits + mantissa_bits);
    if value.is_infinite() {
        return sign | infinity;
    }
    let (size, bias) = (f64::from(value.abs()), (1 << (exponent_bits - 1)) - 1);
    // The exponent of a f64 that is not 0 and, as no f32 is, not subnormal.
    let exponent = ((size.to_bits() >> 52) as i32 - 1023).max(1 - bias);
    let quanta = (size / f64::exp2(f64::from(exponent - mantissa_bits as i32))).round_ties_even() as u32;
    sign | (((exponent + bias - 1) as u32) << mantissa_bits).saturating_add(quanta).min(infinity)
}

/// `cpu` under the smallest budget that `run` accepts, and some between it and plenty. One byte less is refused, with the
/// smallest plan named.
pub(crate) fn budgets(cpu: &Cpu, seed: u64, mut run: impl FnMut(&Cpu) -> Result<(), Error>) -> Vec<Cpu> {
    let with = |budget: usize| Cpu::new(cpu.isa(), cpu.threads(), budget).unwrap();
    let smallest = match run(&with(0)) {
        Ok(()) => return vec![with(0)],
        Err(Error::Budget { smallest, .. }) => smallest,
        Err(e) => panic!("{e}"),
    };
    assert!(run(&with(smallest - 1)).unwrap_err().to_string().contains(&smallest.to_string()));
    let random = (0..3).map(|i| smallest + (seed.rotate_left(17 * i) % (smallest as u64 * 16)) as usize);
    [smallest, smallest + 64, 2 * smallest].into_iter().chain(random).map(with).collect()
}

/// Deterministic values of very different size: `spread` is the range of exponents, and a few are 0, -0 or subnormal.
pub(crate) fn values<T: Element>(seed: u64, len: usize, spread: u32) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len)
        .map(|_| {
            let bits = next();
            match bits % 97 {
                0 => T::narrow(0.0),
                1 => T::narrow(-0.0),
                2 if spread > 40 => T::narrow(f32::from_bits(0x0001_0000 * (1 + (bits >> 32) as u32 % 0x7F))),
                _ => {
                    let exponent = (bits >> 8) as u32 % (2 * spread + 1);
                    let power = f32::from_bits((127 + exponent).saturating_sub(spread).clamp(1, 250) << 23);
                    let fraction = 1.0 + (bits >> 40) as f32 / 16_777_216.0;
                    T::narrow(if bits >> 39 & 1 == 1 { -power * fraction } else { power * fraction })
                }
            }
        })
        .collect()
}

pub(crate) fn join(s: [f32; 8]) -> f32 {
    ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
}

/// Segment `i` of a sum of `n`.
pub(crate) fn segment(n: usize, i: usize) -> std::ops::Range<usize> {
    let length = 16 * n.div_ceil(128);
    (i * length).min(n)..((i + 1) * length).min(n)
}

/// The sum of `term(i)` below n: eight segments, each a chain of fused products.
pub(crate) fn chains(n: usize, term: impl Fn(usize) -> (f32, f32)) -> f32 {
    join(std::array::from_fn(|i| segment(n, i).fold(0.0f32, |sum, i| term(i).0.mul_add(term(i).1, sum))))
}

/// Before the last rounding.
pub(crate) fn gemm_page<I: Stored>(m: usize, n: usize, k: usize, x: &[I], w: &[I], bias: Option<&[I]>) -> Vec<f32> {
    let (x, w) = (widened(x), widened(w));
    let element = |r: usize, c: usize| {
        let sums = std::array::from_fn(|i| {
            let chain = |acc: f32, j: usize| x[r * k + j].mul_add(w[c * k + j], acc);
            segment(k, i).fold(0.0, chain)
        });
        bias.map_or(join(sums), |bias| join(sums) + wide(bias[c]))
    };
    (0..m * n).map(|i| element(i / n, i % n)).collect()
}

pub(crate) fn all_rounded<O: Stored>(values: &[f32]) -> Vec<u32> {
    values.iter().map(|&v| rounded::<O>(v)).collect()
}

fn check_gemm<I: Stored, O: Stored>(m: usize, n: usize, k: usize, spread: u32, seed: u64, biased: bool) {
    let (x, w): (Vec<I>, Vec<I>) = (values(seed, m * k, spread), values(seed + 1, n * k, spread));
    let bias: Option<Vec<I>> = biased.then(|| values(seed + 2, n, spread));
    let expected = all_rounded::<O>(&gemm_page(m, n, k, &x, &w, bias.as_deref()));
    for cpu in cpus() {
        let mut y = vec![O::default(); m * n];
        gemm(&cpu, &Gemm::new(m, n, k), &x, &w, bias.as_deref(), &mut y).unwrap();
        assert_eq!(bits(&y), expected, "{cpu:?} {m}x{n}x{k} spread {spread}");
        let shape = Gemm::new(m, n, k);
        for tight in budgets(&cpu, seed, |cpu| gemm(cpu, &shape, &x, &w, bias.as_deref(), &mut y)) {
            y.fill(O::default());
            gemm(&tight, &shape, &x, &w, bias.as_deref(), &mut y).unwrap();
            assert_eq!(bits(&y), expected, "{tight:?} {m}x{n}x{k} {:?}", tight.ledger().plans());
            assert!(tight.ledger().plans().iter().all(|plan| plan.bytes <= tight.budget()));
        }
        let packed = PackedWeight::pack(&cpu, n, k, &w).unwrap();
        y.fill(O::default());
        gemm_packed(&cpu, &Gemm::new(m, n, k), &x, &packed, bias.as_deref(), &mut y).unwrap();
        assert_eq!(bits(&y), expected, "{cpu:?} packed");
        for tight in
            budgets(&cpu, seed, |cpu| gemm_packed(cpu, &Gemm::new(m, n, k), &x, &packed, bias.as_deref(), &mut y))
        {
            y.fill(O::default());
            gemm_packed(&tight, &Gemm::new(m, n, k), &x, &packed, bias.as_deref(), &mut y).unwrap();
            assert_eq!(bits(&y), expected, "{tight:?} packed {m}x{n}x{k} {:?}", tight.ledger().plans());
        }
    }
}

/// `(m, i)` as section 2 defines them.
pub(crate) fn exp_split(x: f32, c_hi: f32, c_lo: f32) -> (f32, f32) {
    let t = x * c_hi;
    let i = t.round_ties_even();
    let f = if t.abs() >= 4_194_304.0 { 0.0 } else { x.mul_add(c_lo, x.mul_add(c_hi, -i)) };
    let coefficients = [0x3920_b5b7u32, 0x3aaf_841a, 0x3c1d_96f0, 0x3d63_57be, 0x3e75_fdee, 0x3f31_7218];
    let m = coefficients.into_iter().map(f32::from_bits).fold(0.0f32, |m, c| m.mul_add(f, c));
    (m.mul_add(f, 1.0), i)
}

fn weight(m: f32, i: f32, n: f32) -> f32 {
    if i - n < -100.0 { 0.0 } else { m * f32::exp2(i - n) }
}

pub(crate) const LOG2E_HI: f32 = f32::from_bits(0x3FB8_AA3B);
pub(crate) const LOG2E_LO: f32 = f32::from_bits(0x32A5_7060);

const LN2: f64 = f64::from_bits(0x3FE6_2E42_FEFA_39EF);

/// The logarithm of l, as section 3 computes it.
fn ln_of(l: f32) -> f64 {
    let (l, mut e) = (f64::from(l), 0.0);
    let mut z = f64::from_bits((l.to_bits() & 0x000F_FFFF_FFFF_FFFF) | 0x3FF0_0000_0000_0000);
    e += (l.to_bits() >> 52) as f64 - 1023.0;
    if z >= f64::from_bits(0x3FF6_A09E_6000_0000) {
        (z, e) = (z / 2.0, e + 1.0);
    }
    e.mul_add(LN2, ln_series((z - 1.0) / (z + 1.0)))
}

fn ln_series(s: f64) -> f64 {
    let q = s * s;
    let r = [19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0].into_iter();
    let r = r.fold(1.0 / 21.0, |r: f64, d: f64| r.mul_add(q, 1.0 / d));
    (2.0 * s) * r
}

/// The logarithm of `1 + a / b`, as section 3 computes it.
pub(crate) fn ln1p_of(a: f32, b: f32) -> f64 {
    ln_series(f64::from(a) / (2.0 * f64::from(b) + f64::from(a)))
}

/// The logarithm of `l * 2^n`.
fn lse_of(n: f32, l: f32) -> f32 {
    f64::from(n).mul_add(LN2, ln_of(l)) as f32
}

/// The same sum of weights as `l`.
fn sum_of(weights: &[f32]) -> f32 {
    join(std::array::from_fn(|i| {
        lanes(weights[segment(weights.len(), i)].iter().copied().enumerate(), |acc, w| acc + w)
    }))
}

fn top_of(row: &[f32]) -> f32 {
    row.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// A row as seen from its largest element: section 5.
fn from_top(row: &[f32]) -> Vec<f32> {
    row.iter().map(|x| x - top_of(row)).collect()
}

/// Those of a row as softmax has them: of one whose exponents overflow, from the top.
fn shares_page(row: &[f32]) -> Option<(f32, f32, Vec<f32>)> {
    let found = weights_page(row)?;
    if found.0.is_infinite() && top_of(row).is_finite() { weights_page(&from_top(row)) } else { Some(found) }
}

/// Largest exponent, sum of the weights, and the weights of a row as it stands; no weights where the row is NaN.
fn weights_page(row: &[f32]) -> Option<(f32, f32, Vec<f32>)> {
    let split: Vec<(f32, f32)> = row.iter().map(|&x| exp_split(x, LOG2E_HI, LOG2E_LO)).collect();
    let n = split.iter().map(|(_, i)| *i).fold(f32::NEG_INFINITY, f32::max);
    if row.iter().any(|x| x.is_nan() || *x == f32::INFINITY) {
        return None;
    }
    let weigh = |(x, &(m, i)): (&f32, &(f32, f32))| if *x == f32::NEG_INFINITY { 0.0 } else { weight(m, i, n) };
    let weights: Vec<f32> = row.iter().zip(&split).map(weigh).collect();
    Some((n, sum_of(&weights), weights))
}

/// softmax_backward of a row, before the last rounding.
fn softmax_backward_page(x: &[f32], dy: &[f32]) -> Vec<f32> {
    let weights = shares_page(x).filter(|(n, ..)| n.is_finite());
    let p: Vec<f32> = match weights {
        Some((_, l, weights)) => weights.into_iter().map(|w| w / l).collect(),
        None => vec![f32::NAN; x.len()],
    };
    let sum = join(std::array::from_fn(|i| {
        let range = segment(x.len(), i);
        let mut lane = [0f32; 256];
        for (k, j) in range.enumerate() {
            lane[k % 256] = p[j].mul_add(dy[j], lane[k % 256]);
        }
        for h in [128, 64, 32, 16, 8, 4, 2, 1] {
            (0..h).for_each(|l| lane[l] += lane[l + h]);
        }
        lane[0]
    }));
    p.iter().zip(dy).map(|(p, dy)| p * (dy - sum)).collect()
}

/// `e^x`.
pub(crate) fn exp(x: f32) -> f32 {
    let (m, i) = exp_split(x, LOG2E_HI, LOG2E_LO);
    let i = if i.is_nan() { i } else { i.clamp(-252.0, 252.0) };
    let h = (i / 2.0).floor();
    (m * f32::exp2(h)) * f32::exp2(i - h)
}

/// `e^x`, or +0 where its exponent is below -100.
pub(crate) fn exp_or_nothing(x: f32) -> f32 {
    if exp_split(x, LOG2E_HI, LOG2E_LO).1 < -100.0 { 0.0 } else { exp(x) }
}

/// logprob_backward of a row, before the last rounding.
pub(crate) fn logprob_backward_page(
    z: &[f32],
    target: i32,
    lse: f32,
    [dlogprob, dlse]: [f32; 2],
    temperature: f64,
) -> Vec<f32> {
    let inverse = (1.0 / temperature) as f32;
    let dlogprob = if target < 0 { 0.0 } else { dlogprob };
    let element = |(j, z): (usize, &f32)| {
        let d = z * inverse - lse;
        let p = exp_or_nothing(d);
        let c = dlse - dlogprob;
        let g = if j as i64 == i64::from(target) { p.mul_add(c, dlogprob) } else { p * c };
        g * inverse
    };
    z.iter().enumerate().map(element).collect()
}

/// What rows seldom hold.
pub(crate) const SPECIAL: [f32; 7] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 3e38, -3e38, 1e-40];

/// Every number of `special` takes the place of an element of `values`, somewhere.
pub(crate) fn strew<I: Element>(values: &mut [I], seed: u64, special: &[f32]) {
    for (i, &v) in special.iter().enumerate() {
        values[(seed.rotate_left(13 * i as u32 + 7) % values.len() as u64) as usize] = I::narrow(v);
    }
}

/// Rows of `values`, widened.
fn rows_of<I: Stored>(values: &[I], n: usize) -> Vec<Vec<f32>> {
    widened(values).chunks(n).map(<[f32]>::to_vec).collect()
}

fn check_softmax_backward<I: Stored, O: Stored>(rows: usize, n: usize, spread: u32, seed: u64, special: &[f32]) {
    let (mut x, mut dy): (Vec<I>, Vec<I>) = (values(seed, rows * n, spread), values(seed + 1, rows * n, spread));
    strew(&mut x, seed, &special[..special.len() / 2]);
    strew(&mut dy, seed + 1, &special[special.len() / 2..]);
    let pairs = rows_of(&x, n).into_iter().zip(rows_of(&dy, n));
    let expected: Vec<f32> = pairs.flat_map(|(x, dy)| softmax_backward_page(&x, &dy)).collect();
    for cpu in cpus() {
        let mut dx = vec![O::narrow(f32::NAN); rows * n];
        softmax_backward(&cpu, rows, n, &x, &dy, &mut dx).unwrap();
        assert_eq!(bits(&dx), all_rounded::<O>(&expected), "{cpu:?} {rows}x{n}, {} to {}", I::NAME, O::NAME);
    }
}

fn check_logprob_backward<I: Stored, O: Stored>(rows: usize, n: usize, spread: u32, seed: u64, special: &[f32]) {
    let mut logits: Vec<I> = values(seed, rows * n, spread);
    strew(&mut logits, seed, special);
    let z = rows_of(&logits, n);
    let temperature = [1.0, 0.7, 1.3][seed as usize % 3];
    let shape = Logprob { rows, vocab: n, temperature };
    let target: Vec<i32> = (0..rows).map(|r| (seed.rotate_left(r as u32) % (n as u64 + 1)) as i32 - 1).collect();
    let [_, mut lse] = logprob_page(n, temperature, &z.concat(), &target);
    let (mut dlogprob, mut dlse): (Vec<f32>, Vec<f32>) = (values(seed + 2, rows, 5), values(seed + 3, rows, 5));
    // Any number may stand in the place of lse.
    for (&v, values) in special.iter().zip([&mut lse, &mut dlogprob, &mut dlse]) {
        strew(values, seed, &[v]);
    }
    for with in [true, false] {
        let page = |r: usize| {
            let gradients = [dlogprob[r], if with { dlse[r] } else { 0.0 }];
            logprob_backward_page(&z[r], target[r], lse[r], gradients, temperature)
        };
        let expected = all_rounded::<O>(&(0..rows).flat_map(page).collect::<Vec<_>>());
        let gradients = LogprobGradients { dlogprob: &dlogprob, dlse: with.then_some(&dlse[..]) };
        for cpu in cpus() {
            let mut dlogits = vec![O::narrow(f32::NAN); rows * n];
            logprob_backward(&cpu, &shape, &logits, &target, &lse, gradients, &mut dlogits).unwrap();
            assert_eq!(bits(&dlogits), expected, "{cpu:?} {rows}x{n}, {} to {}", I::NAME, O::NAME);
        }
    }
}

/// `[entropy, lse]` of every row of `vocab` logits.
fn entropy_page(vocab: usize, temperature: f64, logits: &[f32]) -> [Vec<f32>; 2] {
    let inverse = (1.0 / temperature) as f32;
    let [_, lse] = logprob_page(vocab, temperature, logits, &vec![-1; logits.len() / vocab]);
    let of_row = |(row, &lse): (&[f32], &f32)| {
        let x: Vec<f32> = row.iter().map(|z| z * inverse).collect();
        let Some((n, mut l, mut weights)) = weights_page(&x).filter(|_| lse.is_finite()) else { return f32::NAN };
        if n.abs() >= 65536.0 {
            (_, l, weights) = weights_page(&from_top(&x)).expect("it is finite");
        }
        let top = top_of(&x);
        let first = x.iter().position(|x| *x == top).expect("one is");
        let mut others = weights.clone();
        others[first] = 0.0;
        let (t, rest) = (weights[first], sum_of(&others));
        let s = join(std::array::from_fn(|i| {
            let terms = segment(x.len(), i).map(|j| (weights[j], x[j]));
            lanes(terms.enumerate(), |acc, (w, x)| if w == 0.0 { acc } else { w.mul_add(top - x, acc) })
        }));
        let spread = if rest < t { ln1p_of(rest, t) } else { ln_of(l) - ln_of(t) };
        (spread + f64::from(s) / f64::from(l)) as f32
    };
    [logits.chunks(vocab).zip(&lse).map(of_row).collect(), lse]
}

fn check_entropy<I: Stored>(rows: usize, n: usize, spread: u32, seed: u64, special: &[f32]) {
    let mut logits: Vec<I> = values(seed, rows * n, spread);
    strew(&mut logits, seed, special);
    let temperature = [1.0, 0.7, 1.3][seed as usize % 3];
    let shape = Entropy { rows, vocab: n, temperature };
    let expected = entropy_page(n, temperature, &widened(&logits)).map(|v| all_rounded::<f32>(&v));
    for cpu in cpus() {
        let (mut h, mut lse) = (vec![9f32; rows], vec![9f32; rows]);
        entropy(&cpu, &shape, &logits, &mut h, &mut lse).unwrap();
        assert_eq!([bits(&h), bits(&lse)], expected, "{cpu:?} {rows}x{n}, {}", I::NAME);
    }
}

/// entropy_backward of a row, before the last rounding.
fn entropy_backward_page(z: &[f32], [h, lse, dentropy, dlse]: [f32; 4], temperature: f64) -> Vec<f32> {
    let inverse = (1.0 / temperature) as f32;
    let element = |z: &f32| {
        let d = z * inverse - lse;
        let p = exp_or_nothing(d);
        let t = if p == 0.0 { 0.0 } else { d + h };
        p * (-dentropy).mul_add(t, dlse) * inverse
    };
    z.iter().map(element).collect()
}

fn check_entropy_backward<I: Stored, O: Stored>(rows: usize, n: usize, spread: u32, seed: u64, special: &[f32]) {
    let mut logits: Vec<I> = values(seed, rows * n, spread);
    strew(&mut logits, seed, special);
    let z = rows_of(&logits, n);
    let temperature = [1.0, 0.7, 1.3][seed as usize % 3];
    let shape = Entropy { rows, vocab: n, temperature };
    let [mut h, mut lse] = entropy_page(n, temperature, &z.concat());
    let (mut dentropy, mut dlse): (Vec<f32>, Vec<f32>) = (values(seed + 2, rows, 5), values(seed + 3, rows, 5));
    // Any number may stand in the place of what entropy returned.
    for (&v, values) in special.iter().zip([&mut lse, &mut dentropy, &mut dlse, &mut h]) {
        strew(values, seed, &[v]);
    }
    for with in [true, false] {
        let page = |r: usize| {
            let given = [h[r], lse[r], dentropy[r], if with { dlse[r] } else { 0.0 }];
            entropy_backward_page(&z[r], given, temperature)
        };
        let expected = all_rounded::<O>(&(0..rows).flat_map(page).collect::<Vec<_>>());
        let gradients =
            EntropyGradients { entropy: &h, lse: &lse, dentropy: &dentropy, dlse: with.then_some(&dlse[..]) };
        for cpu in cpus() {
            let mut dlogits = vec![O::narrow(f32::NAN); rows * n];
            entropy_backward(&cpu, &shape, &logits, gradients, &mut dlogits).unwrap();
            assert_eq!(bits(&dlogits), expected, "{cpu:?} {rows}x{n}, {} to {}", I::NAME, O::NAME);
        }
    }
}

/// `[logprob, lse]` of every row of `vocab` logits.
pub(crate) fn logprob_page(vocab: usize, temperature: f64, logits: &[f32], target: &[i32]) -> [Vec<f32>; 2] {
    let inverse = (1.0 / temperature) as f32;
    let (mut logprobs, mut lses) = (Vec::new(), Vec::new());
    for (row, &target) in logits.chunks(vocab).zip(target) {
        let x: Vec<f32> = row.iter().map(|z| z * inverse).collect();
        let (top, weighed) = (top_of(&x), weights_page(&x));
        let Some((n, l, weights)) = weighed.filter(|_| top > f32::NEG_INFINITY) else {
            lses.push(if x.iter().all(|x| *x == f32::NEG_INFINITY) { f32::NEG_INFINITY } else { f32::NAN });
            logprobs.push(if target < 0 { 0.0 } else { f32::NAN });
            continue;
        };
        let from_top = (n.abs() >= 65536.0).then(|| weights_page(&from_top(&x)).expect("it is finite"));
        lses.push(match &from_top {
            Some((_, l, _)) if n.is_infinite() => (f64::from(top) + ln_of(*l)) as f32,
            _ => lse_of(n, l),
        });
        let far = from_top.is_some();
        let (_, l, mut weights) = from_top.unwrap_or((n, l, weights));
        logprobs.push(usize::try_from(target).map_or(0.0, |target| {
            let t = std::mem::take(&mut weights[target]);
            let rest = sum_of(&weights);
            let exact = match far {
                _ if rest < t => 0.0 - ln1p_of(rest, t),
                true => (f64::from(x[target]) - f64::from(top)) - ln_of(l),
                false => f64::from(x[target]) - f64::from(n).mul_add(LN2, ln_of(l)),
            };
            exact as f32
        }));
    }
    [logprobs, lses]
}

/// Before the last rounding; `x` and `w` are widened.
fn rms_norm_page(x: &[f32], w: &[f32], eps: f32, rounding: Rounding, weight_offset: bool) -> Vec<f32> {
    let row = |row: &[f32]| -> Vec<f32> {
        let sum = lanes(row.iter().copied().enumerate(), |acc, v| v.mul_add(v, acc));
        let r = 1.0 / (sum / row.len() as f32 + eps).sqrt();
        let scaled = row.iter().zip(w).map(|(x, w)| {
            let w = if weight_offset { w + 1.0 } else { *w };
            match rounding {
                Rounding::Once => (x * r) * w,
                Rounding::Hf => w * wide_of::<bf16>(rounded::<bf16>(x * r)),
            }
        });
        scaled.collect()
    };
    x.chunks(w.len()).flat_map(row).collect()
}

/// The cosine or sine of an angle, rounded once; `None` where f64 does not tell how, about once in a million.
fn turned(value: f64) -> Option<f32> {
    let [low, high] = [value * (1.0 - 1e-15), value * (1.0 + 1e-15)].map(|v| v as f32);
    (low.to_bits() == high.to_bits()).then_some(low)
}

/// Before the last rounding, where f64 tells the angle's cosine and sine: `[tokens, heads, dim]`.
fn rope_page(shape: &Rope, inv_freq: &[f32], pos: &[i32], x: &[f32]) -> Vec<Option<f32>> {
    let (mut y, half) = (vec![None; x.len()], shape.dim / 2);
    for (head, start) in (0..x.len()).step_by(shape.dim).enumerate() {
        for (i, freq) in inv_freq.iter().enumerate() {
            let (a, b) = match shape.pairing {
                Pairing::Half => (start + i, start + i + half),
                Pairing::Interleaved => (start + 2 * i, start + 2 * i + 1),
            };
            let angle = f64::from(pos[head / shape.heads] as f32 * freq);
            if let (Some(c), Some(s)) = (turned(angle.cos()), turned(angle.sin())) {
                y[a] = Some(x[a].mul_add(c, -(x[b] * s)));
                y[b] = Some(x[b].mul_add(c, x[a] * s));
            }
        }
    }
    y
}

pub(crate) fn lanes<T>(terms: impl Iterator<Item = (usize, T)>, step: impl Fn(f32, T) -> f32) -> f32 {
    let mut lane = [0f32; 256];
    terms.for_each(|(i, v)| lane[i % 256] = step(lane[i % 256], v));
    for h in [128, 64, 32, 16, 8, 4, 2, 1] {
        (0..h).for_each(|l| lane[l] += lane[l + h]);
    }
    lane[0]
}

struct Heads {
    batch: usize,
    queries: usize,
    keys: usize,
    q_heads: usize,
    kv_heads: usize,
    d: usize,
    e: usize,
    causal: bool,
    window: Option<usize>,
    chunk: Option<usize>,
}

/// `[out, lse]`, before the last rounding.
fn attention_page(
    h: &Heads,
    scale: f64,
    [q, k, v]: [&[bf16]; 3],
    sinks: Option<&[f32]>,
    q_pos: &[i32],
    kv_len: &[i32],
) -> [Vec<f32>; 2] {
    let c = std::f64::consts::LOG2_E * scale;
    let (c_hi, c_lo) = (c as f32, (c - f64::from(c as f32)) as f32);
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for b in 0..h.batch {
        for t in 0..h.queries {
            for head in 0..h.q_heads {
                let kv_head = head / (h.q_heads / h.kv_heads);
                let p = i64::from(q_pos[b * h.queries + t]);
                let visible = |j: usize| {
                    (j as i64) < i64::from(kv_len[b])
                        && (!h.causal || j as i64 <= p)
                        && h.window.is_none_or(|window| j as i64 > p - window as i64)
                        && h.chunk.is_none_or(|chunk| j as i64 / chunk as i64 >= p.div_euclid(chunk as i64))
                };
                let row = |x: &[bf16], j: usize, dim: usize, i: usize| {
                    wide(x[((b * h.keys + j) * h.kv_heads + kv_head) * dim + i])
                };
                let query = |i: usize| wide(q[((b * h.queries + t) * h.q_heads + head) * h.d + i]);
                let split: Vec<Option<(f32, f32)>> = (0..h.keys)
                    .map(|j| {
                        let s = (0..h.d).fold(0.0f32, |s, i| query(i).mul_add(row(k, j, h.d, i), s));
                        visible(j).then(|| exp_split(s, c_hi, c_lo))
                    })
                    .collect();
                let split_of = |sinks: &[f32]| {
                    let c = std::f64::consts::LOG2_E;
                    exp_split(sinks[head], c as f32, (c - f64::from(c as f32)) as f32)
                };
                let sink = sinks.map(split_of);
                let n = split.iter().flatten().chain(&sink).map(|(_, i)| *i).fold(f32::NEG_INFINITY, f32::max);
                let (mut total, mut l_total) = (vec![0f32; h.e], 0f32);
                for block in split.chunks(256).enumerate() {
                    let (mut acc, mut l) = (vec![0f32; h.e], 0f32);
                    for (j, (m, i)) in block.1.iter().enumerate().filter_map(|(j, s)| s.map(|s| (j, s))) {
                        let w = weight(m, i, n);
                        l += w;
                        acc.iter_mut()
                            .enumerate()
                            .for_each(|(x, a)| *a = w.mul_add(row(v, block.0 * 256 + j, h.e, x), *a));
                    }
                    l_total += l;
                    total.iter_mut().zip(&acc).for_each(|(t, a)| *t += a);
                }
                let seen = split.iter().any(Option::is_some);
                l_total += sink.map_or(0.0, |(m, i)| weight(m, i, n));
                out.extend(total.iter().map(|t| if seen { t / l_total } else { 0.0 }));
                lse.push(if seen || sink.is_some() { lse_of(n, l_total) } else { f32::NEG_INFINITY });
            }
        }
    }
    [out, lse]
}

/// The sequences of a padded call with their queries packed (the first sequence gives up its last query), their keys
/// packed, and their keys in shuffled pages between pages of NaN.
struct Packed {
    /// Row of the padded queries by packed row.
    rows: Vec<usize>,
    q: Vec<bf16>,
    q_pos: Vec<i32>,
    q_start: Vec<i32>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    k_start: Vec<i32>,
    page_size: usize,
    table: Vec<i32>,
    paged_k: Vec<bf16>,
    paged_v: Vec<bf16>,
}

impl Packed {
    fn new(h: &Heads, q: &[bf16], k: &[bf16], v: &[bf16], q_pos: &[i32], seed: u64) -> Packed {
        let count = |b: usize| h.queries - usize::from(b == 0);
        let rows: Vec<usize> = (0..h.batch).flat_map(|b| (0..count(b)).map(move |t| b * h.queries + t)).collect();
        let width = h.q_heads * h.d;
        let starts = |count: &dyn Fn(usize) -> usize| {
            (0..=h.batch).map(|b| (0..b).map(count).sum::<usize>() as i32).collect::<Vec<i32>>()
        };
        let page_size = [1, 3, 8, 16, 256][seed as usize % 5];
        let columns = h.keys.div_ceil(page_size);
        let pages = 2 * h.batch * columns + 1;
        // A stride that visits every odd page once, from an odd start.
        let table: Vec<i32> = (0..h.batch * columns).map(|i| (2 * (h.batch * columns - 1 - i) + 1) as i32).collect();
        let paged = |x: &[bf16], dim: usize| {
            let width = h.kv_heads * dim;
            let mut out = vec![bf16::NAN; pages * page_size * width];
            for b in 0..h.batch {
                for j in 0..h.keys {
                    let row = table[b * columns + j / page_size] as usize * page_size + j % page_size;
                    out[row * width..][..width].copy_from_slice(&x[(b * h.keys + j) * width..][..width]);
                }
            }
            out
        };
        Packed {
            q: rows.iter().flat_map(|&row| q[row * width..][..width].to_vec()).collect(),
            q_pos: rows.iter().map(|&row| q_pos[row]).collect(),
            q_start: starts(&count),
            k: k.to_vec(),
            v: v.to_vec(),
            k_start: starts(&|_| h.keys),
            paged_k: paged(k, h.d),
            paged_v: paged(v, h.e),
            page_size,
            table,
            rows,
        }
    }
}

/// Cases per property: enough for every test run; `PROPTEST_CASES` asks for more.
pub(crate) fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|count| count.parse().ok()).unwrap_or(24)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gemm_is_the_page(m in 1usize..40, n in 1usize..70, k in 0usize..420, spread in prop::sample::select(vec![2u32, 30, 70]), seed: u64, biased: bool) {
        let seed = seed >> 2;
        check_gemm::<bf16, f32>(m, n, k, spread, seed, biased);
        check_gemm::<f32, bf16>(m, n, k, spread, seed, biased);
        check_gemm::<f16, f32>(m, n, k, spread.min(10), seed, biased);
    }

    #[test]
    fn ranks_join_to_the_whole(m in 1usize..9, n in 1usize..40, blocks in 1usize..5, seed: u64) {
        let (k, seed) = (128 * blocks, seed >> 2);
        let (x, w): (Vec<bf16>, Vec<bf16>) = (values(seed, m * k, 8), values(seed + 1, n * k, 8));
        let whole = all_rounded::<f32>(&gemm_page(m, n, k, &x, &w, None));
        for cpu in cpus() {
            for ranks in [1usize, 2, 4, 8] {
                let part = k / ranks;
                let mut sums: Vec<Vec<f32>> = (0..ranks).map(|rank| {
                    let columns = |t: &[bf16], rows: usize| -> Vec<bf16> {
                        (0..rows).flat_map(|r| t[r * k + rank * part..][..part].to_vec()).collect()
                    };
                    let shape = Gemm { k_offset: rank * part, k_total: k, ..Gemm::new(m, n, part) };
                    let mut y = vec![0f32; m * n];
                    gemm(&cpu, &shape, &columns(&x, m), &columns(&w, n), None, &mut y).unwrap();
                    y
                }).collect();
                while sums.len() > 1 {
                    sums = sums.chunks(2).map(|two| two[0].iter().zip(&two[1]).map(|(a, b)| a + b).collect()).collect();
                }
                prop_assert_eq!(bits(&sums[0]), whole.clone(), "{:?} {} ranks", cpu, ranks);
            }
        }
    }

    #[test]
    fn attention_is_the_page(
        batch in 1usize..3, queries in prop_oneof![Just(1), Just(2), 1usize..40], keys in 1usize..600,
        kv_heads in 1usize..3, group in prop_oneof![1usize..5, Just(7), Just(8)],
        d in prop_oneof![1usize..70, (1usize..9).prop_map(|eights| 8 * eights)],
        e in prop_oneof![1usize..70, (1usize..10).prop_map(|vectors| 16 * vectors)], causal: bool,
        window in prop::sample::select(vec![None, Some(1usize), Some(7), Some(300)]),
        chunk in prop::sample::select(vec![None, None, Some(1usize), Some(7), Some(300)]),
        spread in prop::sample::select(vec![1u32, 4, 70]), with_sinks: bool, seed: u64,
    ) {
        let seed = seed >> 3;
        let h = Heads { batch, queries, keys, q_heads: kv_heads * group, kv_heads, d, e, causal, window, chunk };
        // Scores stay finite: wide values only in v.
        let q: Vec<bf16> = values(seed, batch * queries * h.q_heads * d, spread.min(4));
        let k: Vec<bf16> = values(seed + 1, batch * keys * kv_heads * d, spread.min(4));
        let v: Vec<bf16> = values(seed + 2, batch * keys * kv_heads * e, spread);
        let q_pos: Vec<i32> = (0..batch * queries).map(|i| (seed.rotate_left(i as u32) % (keys as u64 + 3)) as i32 - 1).collect();
        let kv_len: Vec<i32> = (0..batch).map(|b| (seed.rotate_right(b as u32) % (keys as u64 + 1)) as i32).collect();
        let sinks: Vec<f32> = values::<bf16>(seed + 3, h.q_heads, 8).into_iter().map(|sink| sink.widen()).collect();
        let sinks = with_sinks.then_some(&sinks[..]);
        let [expected, expected_lse] = attention_page(&h, 0.25, [&q, &k, &v], sinks, &q_pos, &kv_len).map(|v| all_rounded::<f32>(&v));
        let shape = Attention {
            batch, queries, keys, q_heads: h.q_heads, kv_heads, head_dim: d, value_dim: e, scale: 0.25, causal, window,
            chunk, softcap: None, tf32: Tf32::Disabled,
        };
        let (sequences, qkv) = (Sequences::padded(&q_pos, &kv_len), Qkv { q: &q[..], k: &k, v: &v });
        for cpu in cpus() {
            let (mut out, mut lse) = (vec![0f32; expected.len()], vec![0f32; batch * queries * h.q_heads]);
            attention(&cpu, &shape, &sequences, qkv, sinks, &mut out, &mut lse).unwrap();
            prop_assert_eq!(bits(&out), expected.clone(), "{:?}", cpu);
            prop_assert_eq!(bits(&lse), expected_lse.clone(), "{:?}", cpu);
            let tight = budgets(&cpu, seed, |cpu| attention(cpu, &shape, &sequences, qkv, sinks, &mut out, &mut lse));
            for cpu in tight {
                out.fill(0.0);
                lse.fill(0.0);
                attention(&cpu, &shape, &sequences, qkv, sinks, &mut out, &mut lse).unwrap();
                prop_assert_eq!(bits(&out), expected.clone(), "{:?} {:?}", cpu, cpu.ledger().plans());
                prop_assert_eq!(bits(&lse), expected_lse.clone(), "{:?}", cpu);
            }
            // The same sequences with packed queries, and with keys in pages of any size and order.
            let packed = Packed::new(&h, &q, &k, &v, &q_pos, seed);
            let (rows, total) = (packed.q_pos.len(), packed.k.len() / (kv_heads * d));
            let places = [Keys::Packed(&packed.k_start), Keys::Paged { page_size: packed.page_size, table: &packed.table }];
            for (keys, total, k, v) in [
                (places[0], total, &packed.k, &packed.v),
                (places[1], packed.paged_k.len() / (kv_heads * d), &packed.paged_k, &packed.paged_v),
            ] {
                let shape = Attention { queries: rows, keys: total, ..shape };
                let (q_pos, q_start) = (&packed.q_pos[..], Some(&packed.q_start[..]));
                let sequences = Sequences { q_pos, kv_len: &kv_len, q_start, keys };
                let qkv = Qkv { q: &packed.q[..], k, v };
                let (mut out, mut lse) = (vec![0f32; rows * h.q_heads * e], vec![0f32; rows * h.q_heads]);
                attention(&cpu, &shape, &sequences, qkv, sinks, &mut out, &mut lse).unwrap();
                let width = h.q_heads * e;
                let expected: Vec<u32> =
                    packed.rows.iter().flat_map(|&row| expected[row * width..][..width].to_vec()).collect();
                prop_assert_eq!(bits(&out), expected, "{:?} {:?}", cpu, keys);
                let expected: Vec<u32> =
                    packed.rows.iter().flat_map(|&row| expected_lse[row * h.q_heads..][..h.q_heads].to_vec()).collect();
                prop_assert_eq!(bits(&lse), expected, "{:?} {:?}", cpu, keys);
            }
        }
    }

    #[test]
    fn logprob_and_softmax_are_the_page(
        rows in 1usize..4, vocab in 1usize..3000, spread in 1u32..6, seed: u64,
        // Of all logits: of tokens that are nearly certain, and of rows that are far from zero and farther.
        certain in prop::sample::select(vec![0.0f32, 8.0, 16.0, 30.0]),
        offset in prop::sample::select(vec![0.0f32, 0.0, 0.0, 900.0, 45_400.0, 45_450.0, -1e5, 3e6, -1e7, 2.35e38, 3e38, -3e38]),
    ) {
        let seed = seed >> 2;
        let mut x: Vec<f32> = values(seed, rows * vocab, spread);
        for (r, x) in x.chunks_mut(vocab).enumerate() {
            x[(seed.rotate_left(r as u32) % vocab as u64) as usize] += certain;
            x.iter_mut().for_each(|x| *x += offset);
        }
        for cpu in cpus() {
            let mut y = vec![0f32; x.len()];
            softmax(&cpu, rows, vocab, &x, &mut y).unwrap();
            let target: Vec<i32> = (0..rows).map(|r| (seed.rotate_left(r as u32) % vocab as u64) as i32).collect();
            let (mut logp, mut lse) = (vec![0f32; rows], vec![0f32; rows]);
            logprob(&cpu, &Logprob::new(rows, vocab), &x, &target, &mut logp, &mut lse).unwrap();
            let expected = logprob_page(vocab, 1.0, &x, &target);
            prop_assert_eq!([bits(&logp), bits(&lse)], expected.map(|v| all_rounded::<f32>(&v)), "{:?}", cpu);
            let share = |row: &[f32]| {
                let (_, l, weights) = shares_page(row).expect("the row is finite");
                weights.into_iter().map(|w| w / l).collect::<Vec<_>>()
            };
            let expected: Vec<f32> = x.chunks(vocab).flat_map(share).collect();
            prop_assert_eq!(bits(&y), all_rounded::<f32>(&expected), "{:?}", cpu);
        }
    }

    #[test]
    fn softmax_backward_is_the_page(
        rows in 1usize..4, n in prop_oneof![3 => 1usize..700, 1 => 1usize..3000, 1 => 8180usize..8700], spread in 1u32..7, seed: u64,
        special in prop::collection::vec(prop::sample::select(SPECIAL.to_vec()), 0..4),
    ) {
        let seed = seed >> 3;
        check_softmax_backward::<bf16, bf16>(rows, n, spread, seed, &special);
        check_softmax_backward::<bf16, f32>(rows, n, spread, seed, &special);
        check_softmax_backward::<f32, bf16>(rows, n, spread, seed, &special);
        check_softmax_backward::<f32, f32>(rows, n, spread, seed, &special);
        check_softmax_backward::<f16, f16>(rows, n, spread, seed, &special);
    }

    #[test]
    fn logprob_backward_is_the_page(
        rows in 1usize..4, n in 1usize..1500, spread in 1u32..7, seed: u64,
        special in prop::collection::vec(prop::sample::select(SPECIAL.to_vec()), 0..4),
    ) {
        let seed = seed >> 3;
        check_logprob_backward::<bf16, bf16>(rows, n, spread, seed, &special);
        check_logprob_backward::<bf16, f32>(rows, n, spread, seed, &special);
        check_logprob_backward::<f32, bf16>(rows, n, spread, seed, &special);
        check_logprob_backward::<f32, f32>(rows, n, spread, seed, &special);
        check_logprob_backward::<f16, f16>(rows, n, spread, seed, &special);
    }

    #[test]
    fn entropy_is_the_page(
        rows in 1usize..4, n in prop_oneof![3 => 1usize..700, 1 => 1usize..3000, 1 => 8180usize..8700], spread in 1u32..7, seed: u64,
        special in prop::collection::vec(prop::sample::select(SPECIAL.to_vec()), 0..4),
    ) {
        let seed = seed >> 3;
        check_entropy::<bf16>(rows, n, spread, seed, &special);
        check_entropy::<f32>(rows, n, spread, seed, &special);
        check_entropy::<f16>(rows, n, spread, seed, &special);
    }

    #[test]
    fn entropy_backward_is_the_page(
        rows in 1usize..4, n in 1usize..1500, spread in 1u32..7, seed: u64,
        special in prop::collection::vec(prop::sample::select(SPECIAL.to_vec()), 0..5),
    ) {
        let seed = seed >> 3;
        check_entropy_backward::<bf16, bf16>(rows, n, spread, seed, &special);
        check_entropy_backward::<bf16, f32>(rows, n, spread, seed, &special);
        check_entropy_backward::<f32, bf16>(rows, n, spread, seed, &special);
        check_entropy_backward::<f32, f32>(rows, n, spread, seed, &special);
        check_entropy_backward::<f16, f16>(rows, n, spread, seed, &special);
    }

    /// Gradients so small that their products underflow, zeros of both signs behind them: a lane may be -0, and with every
    /// lane the sum.
    #[test]
    fn products_that_underflow_to_minus_zero(n in prop_oneof![1usize..300, 2040usize..2060, 4090usize..4200], seed: u64) {
        let x = vec![0f32; n];
        // Without one of the first elements of a segment its lane is +0.
        let (first, whole) = (|i: usize| i % (16 * n.div_ceil(128)) < 256, seed % 2 == 0);
        let given = |i: usize| first(i) && (whole || seed.rotate_left(i as u32) % 37 > 0);
        let dy: Vec<f32> = (0..n).map(|i| if given(i) { -1e-45 } else { -0.0 }).collect();
        let expected = all_rounded::<f32>(&softmax_backward_page(&x, &dy));
        for cpu in cpus() {
            let mut dx = vec![f32::NAN; n];
            softmax_backward(&cpu, 1, n, &x, &dy, &mut dx).unwrap();
            prop_assert_eq!(bits(&dx), expected.clone(), "{:?}", cpu);
        }
    }

    /// Weights of like size take fewer bits where there is a kernel for it; some far smaller and far larger ones are
    /// among them. Packed by one `Cpu`, used by all.
    #[test]
    fn weights_in_fewer_bits_are_the_same_weights(
        m in prop::sample::select(vec![1usize, 1, 1, 2, 3, 5, 8, 12, 13, 16, 24, 25, 40, 191, 260]), n in 1usize..100,
        k in prop::sample::select(vec![1usize, 2, 3, 64, 65, 66, 67, 130, 256, 515, 900]), odd in 0usize..7, seed: u64,
    ) {
        let seed = seed >> 2;
        let (x, mut w): (Vec<bf16>, Vec<bf16>) = (values(seed, m * k, 3), values(seed + 1, n * k, 3));
        w.iter_mut().filter(|w| wide(**w) == 0.0).for_each(|w| *w = bf16::ONE);
        // The last two leave `VDPBF16PS`; the others do not.
        for i in 0..odd {
            let (at, power) = (seed.rotate_left(11 * i as u32) as usize % w.len(), [-30, 40, 9, -40, -126, -133][i]);
            w[at] = bf16::narrow(wide(w[at]) * f32::exp2(power as f32));
        }
        let packer = cpus().pop().expect("some way to run");
        let packed = PackedWeight::pack(&packer, n, k, &w).unwrap();
        if packer.isa().has_dot() && n.is_multiple_of(32) && k >= 256 {
            prop_assert!(packed.bytes() < n * k * 15 / 8, "{} bytes for {n} x {k}", packed.bytes());
        }
        let logits = gemm_page(m, n, k, &x, &w, None);
        let expected = all_rounded::<f32>(&logits);
        let target: Vec<i32> = (0..m as i32).map(|r| r % n as i32).collect();
        let plain = logprob_page(n, 0.7, &logits, &target).map(|v| all_rounded::<f32>(&v));
        let (mut y, mut logp, mut lse) = (vec![0f32; m * n], vec![0f32; m], vec![0f32; m]);
        let tokens: Vec<i32> = (0..n as i32).rev().collect();
        let mut rows = vec![bf16::ZERO; n * k];
        embedding_packed(&Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap(), &packed, &tokens, &mut rows).unwrap();
        let table: Vec<bf16> = w.chunks(k).rev().flatten().copied().collect();
        prop_assert_eq!(bits(&rows), bits(&table));
        for cpu in cpus() {
            let mut all = budgets(&cpu, seed, |cpu| gemm_packed(cpu, &Gemm::new(m, n, k), &x, &packed, None, &mut y));
            all.push(cpu.clone());
            for cpu in all {
                y.fill(0.0);
                gemm_packed(&cpu, &Gemm::new(m, n, k), &x, &packed, None, &mut y).unwrap();
                prop_assert_eq!(bits(&y), expected.clone(), "{:?} {:?}", cpu, cpu.ledger().plans());
            }
            let shape = LinearLogprob { rows: m, vocab: n, k, temperature: 0.7 };
            let mut all = budgets(&cpu, seed, |cpu| {
                linear_logprob_packed(cpu, &shape, &x, &packed, &target, &mut logp, &mut lse)
            });
            all.push(cpu);
            for cpu in all {
                linear_logprob_packed(&cpu, &shape, &x, &packed, &target, &mut logp, &mut lse).unwrap();
                prop_assert_eq!([bits(&logp), bits(&lse)], plain.clone(), "{:?} {:?}", cpu, cpu.ledger().plans());
            }
        }
    }

    /// The page of one op behind that of the other. `jump` puts logits far apart, so that n moves and weights are lost.
    #[test]
    fn linear_logprob_is_gemm_and_logprob(
        rows in 1usize..40, vocab in 1usize..1500, k in 1usize..90, jump in prop::sample::select(vec![0u32, 3, 40]),
        seed: u64, temperature in prop::sample::select(vec![1.0, 0.7]),
    ) {
        let seed = seed >> 2;
        let (x, mut w): (Vec<bf16>, Vec<bf16>) = (values(seed, rows * k, 3), values(seed + 1, vocab * k, 3));
        // Rows of w that grow with v: large logits come late, small ones early, and the other way round.
        for (v, w) in w.chunks_mut(k).enumerate().filter(|(v, _)| v % 7 == seed as usize % 7) {
            w.iter_mut().for_each(|w| *w = bf16::narrow(wide(*w) * (1.0 + jump as f32 * v as f32 / vocab as f32)));
        }
        let target: Vec<i32> = (0..rows).map(|r| (seed.rotate_left(r as u32) % (vocab as u64 + 1)) as i32 - 1).collect();
        let logits = gemm_page(rows, vocab, k, &x, &w, None);
        let [expected, expected_lse] = logprob_page(vocab, temperature, &logits, &target).map(|v| all_rounded::<f32>(&v));
        for cpu in cpus() {
            let (mut logp, mut lse) = (vec![0f32; rows], vec![0f32; rows]);
            let packed = PackedWeight::pack(&cpu, vocab, k, &w).unwrap();
            let shape = LinearLogprob { rows, vocab, k, temperature };
            let mut tight = budgets(&cpu, seed, |cpu| {
                linear_logprob(cpu, &shape, &x, &w, &target, &mut logp, &mut lse)
            });
            tight.push(cpu);
            for cpu in tight {
                linear_logprob(&cpu, &shape, &x, &w, &target, &mut logp, &mut lse).unwrap();
                prop_assert_eq!(bits(&lse), expected_lse.clone(), "{:?} {:?}", cpu, cpu.ledger().plans());
                prop_assert_eq!(bits(&logp), expected.clone(), "{:?}", cpu);
                linear_logprob_packed(&cpu, &shape, &x, &packed, &target, &mut logp, &mut lse).unwrap();
                prop_assert_eq!(bits(&lse), expected_lse.clone(), "{:?} packed {:?}", cpu, cpu.ledger().plans());
                prop_assert_eq!(bits(&logp), expected.clone(), "{:?} packed", cpu);
            }
        }
    }

    #[test]
    fn fused_ops_are_the_page(rows in 1usize..5, n in 1usize..1400, spread in 1u32..30, seed: u64, flags in 0u32..8) {
        let seed = seed >> 3;
        check_fused::<bf16, bf16, bf16>(rows, n, spread, seed, flags);
        check_fused::<f32, f32, bf16>(rows, n, spread, seed, flags);
        check_fused::<f16, f16, f16>(rows, n, spread.min(7), seed, flags);
        check_fused::<bf16, f32, f32>(rows, n, spread, seed, flags);
    }

    #[test]
    fn rms_norm_is_the_page(rows in 1usize..5, n in 1usize..1400, spread in 1u32..30, seed: u64, offset: bool, hf: bool) {
        let seed = seed >> 2;
        let (x, w): (Vec<bf16>, Vec<bf16>) = (values(seed, rows * n, spread), values(seed + 1, n, 2));
        let rounding = if hf { Rounding::Hf } else { Rounding::Once };
        let shape = RmsNorm { rows, n, eps: 1e-6, rounding, weight_offset: offset };
        let expected = all_rounded::<f32>(&rms_norm_page(&widened(&x), &widened(&w), 1e-6, rounding, offset));
        for cpu in cpus() {
            let mut y = vec![0f32; x.len()];
            rms_norm(&cpu, &shape, &x, &w, &mut y).unwrap();
            prop_assert_eq!(bits(&y), expected.clone(), "{:?}", cpu);
        }
    }
}

/// A row longer than what is kept of one, whose weights add up to less than 1.
#[test]
fn gradients_of_a_long_row_of_two_shares() {
    let n = 9000;
    let share = |i: usize| [(7, -0.2), (8000, -3.0)].into_iter().find_map(|(at, x)| (at == i).then_some(x));
    let x: Vec<f32> = (0..n).map(|i| share(i).unwrap_or(-300.0)).collect();
    let dy: Vec<f32> = values(3, n, 2);
    assert!(weights_page(&x).expect("the row is finite").1 < 1.0);
    let expected = all_rounded::<f32>(&softmax_backward_page(&x, &dy));
    for cpu in cpus() {
        let mut dx = vec![f32::NAN; n];
        softmax_backward(&cpu, 1, n, &x, &dy, &mut dx).unwrap();
        assert_eq!(bits(&dx), expected, "{cpu:?}");
    }
}

/// A row whose first logits are added, stay near after a second step, and lie more than 2^100 below its last: their weights
/// are lost, so the row is summed again; and rows with infinities of both signs and NaN.
#[test]
fn linear_logprob_at_its_ends() {
    let (vocab, k) = (2000, 2);
    let row = |v: usize| match v {
        0..100 => 0.01 * v as f32,
        100..1900 => 42.0,
        _ => 90.0,
    };
    let w: Vec<f32> = (0..vocab).flat_map(|v| [row(v), if v == 7 { 1.0 } else { 0.0 }]).collect();
    let inf = f32::INFINITY;
    let x = [
        1.0,
        0.0,
        0.5,
        0.0,
        -1.0,
        0.0,
        1.0,
        -1e38,
        1.0,
        inf,
        1.0,
        -inf,
        f32::NAN,
        0.0,
        1e37,
        0.0,
        600.0,
        0.0,
        -1200.0,
        0.0,
        3.7e36,
        0.0,
    ];
    let rows = x.len() / k;
    let target: Vec<i32> = (0..rows as i32).map(|r| 7 + 250 * (r % 2)).collect();
    let [expected, expected_lse] = logprob_page(vocab, 1.0, &gemm_page(rows, vocab, k, &x, &w, None), &target);
    for cpu in cpus() {
        let cpu = cpu.recording();
        let (mut logp, mut lse) = (vec![0f32; rows], vec![0f32; rows]);
        let before = cpu.ledger().count(Counter::SlowPaths);
        linear_logprob(&cpu, &LinearLogprob::new(rows, vocab, k), &x, &w, &target, &mut logp, &mut lse).unwrap();
        let expected = [&expected, &expected_lse].map(|v| all_rounded::<f32>(v));
        assert_eq!([bits(&logp), bits(&lse)], expected, "{cpu:?}");
        assert!(cpu.ledger().count(Counter::SlowPaths) > before, "a row loses weights it had added");
        assert!(expected_lse.iter().any(|v| v.is_nan()) && expected_lse.iter().any(|v| v.is_finite()));
    }
}

/// The fused ops and `rope` have the bits of the page of the ops they stand for.
fn check_fused<I: Stored, M: Stored, O: Stored>(rows: usize, n: usize, spread: u32, seed: u64, flags: u32) {
    let rounding = if flags & 1 == 1 { Rounding::Hf } else { Rounding::Once };
    let pairing = if flags & 2 == 2 { Pairing::Interleaved } else { Pairing::Half };
    let (eps, weight_offset, heads) = (1e-6, flags & 4 == 4, 1 + flags as usize % 3);
    let (mut a, b, w): (Vec<I>, Vec<I>, Vec<I>) =
        (values(seed, rows * n, spread), values(seed + 1, rows * n, spread), values(seed + 2, n, 2));
    a[seed as usize % (rows * n)] = I::narrow([1.0, f32::NAN, f32::INFINITY, -0.0][flags as usize % 4]);
    let shape = RmsNorm { rows, n, eps, rounding, weight_offset };
    let dim = n.next_multiple_of(2);
    let (x, gain): (Vec<I>, Vec<I>) = (values(seed + 3, rows * heads * dim, spread), values(seed + 4, dim, 2));
    let pos: Vec<i32> = (0..rows).map(|t| (seed.rotate_left(t as u32) % 100_000) as i32).collect();

    let sums: Vec<f32> = widened(&a).iter().zip(widened(&b)).map(|(a, b)| a + b).collect();
    let sum = all_rounded::<M>(&sums);
    let stored: Vec<f32> = sums.iter().map(|&v| wide_of::<M>(rounded::<M>(v))).collect();
    let y = all_rounded::<O>(&rms_norm_page(&stored, &widened(&w), eps, rounding, weight_offset));
    let frequencies: Vec<f32> = (0..dim / 2).map(|i| 10_000f64.powf(-2.0 * i as f64 / dim as f64) as f32).collect();
    let turn = Rope { tokens: rows, heads, dim, pairing };
    let normed = rms_norm_page(&widened(&x), &widened(&gain), eps, rounding, weight_offset);
    let both = rope_page(&turn, &frequencies, &pos, &normed);
    let alone = rope_page(&turn, &frequencies, &pos, &widened(&x));
    for cpu in cpus() {
        let (mut one_sum, mut one_y) = (vec![M::default(); rows * n], vec![O::default(); rows * n]);
        add_rms_norm(&cpu, &shape, &a, &b, &w, &mut one_sum, &mut one_y).unwrap();
        assert_eq!((bits(&one_sum), bits(&one_y)), (sum.clone(), y.clone()), "{cpu:?} {rows}x{n} {flags:b}");

        let table = RopeTable::new(&cpu, &frequencies, &pos);
        let mut y = vec![O::default(); x.len()];
        let same = |expected: &[Option<f32>], y: &[O]| {
            let told =
                expected.iter().zip(y).filter_map(|(expected, y)| Some((rounded::<O>((*expected)?), y.stored())));
            told.filter(|(expected, found)| expected != found).count() == 0
        };
        rope(&cpu, &turn, &table, &x, &mut y).unwrap();
        assert!(same(&alone, &y), "rope {cpu:?} {rows}x{heads}x{dim} {flags:b}");
        let shape = NormRope { tokens: rows, heads, dim, eps, rounding, weight_offset, pairing };
        norm_rope(&cpu, &shape, &table, &x, &gain, &mut y).unwrap();
        assert!(same(&both, &y), "norm_rope {cpu:?} {rows}x{heads}x{dim} {flags:b}");
    }
    assert!(alone.iter().any(Option::is_some));
}

/// Rows of more than one block, and segments that a block takes in several pieces, the last one odd.
#[test]
fn many_rows_and_long_segments_are_the_page() {
    for (m, k) in [(24, 2099), (107, 1161), (200, 300)] {
        check_gemm::<bf16, f32>(m, 33, k, 30, m as u64, true);
        check_gemm::<f32, f32>(m, 33, k, 30, m as u64, false);
    }
}

/// Operands that `VDPBF16PS` would flush take the plain kernel: the smallest products survive.
#[test]
fn tiny_operands_are_not_flushed() {
    let (m, n, k) = (13, 33, 50);
    let x: Vec<bf16> = (0..m * k).map(|i| bf16::from_bits(1 + (i % 0x7F) as u16)).collect();
    let w: Vec<bf16> = (0..n * k).map(|i| bf16::narrow(1.0 + (i % 5) as f32)).collect();
    let expected = all_rounded::<f32>(&gemm_page(m, n, k, &x, &w, None));
    assert!(expected.iter().all(|&v| v != 0 && v < 0x0080_0000 << 3), "the case is about tiny sums");
    for cpu in cpus() {
        let mut y = vec![0f32; m * n];
        gemm(&cpu, &Gemm::new(m, n, k), &x, &w, None, &mut y).unwrap();
        assert_eq!(bits(&y), expected, "{cpu:?}");
    }
}

/// The same for scores, which a large scale makes visible: a few queries (decode) and many.
#[test]
fn tiny_scores_are_not_flushed() {
    let (keys, q_heads, kv_heads, d) = (70, 4, 2, 32);
    for queries in [1, 2, 20] {
        let q: Vec<bf16> = (0..queries * q_heads * d).map(|i| bf16::narrow(1.0 + (i % 5) as f32)).collect();
        let k: Vec<bf16> = (0..keys * kv_heads * d).map(|i| bf16::from_bits(1 + (i * 37 % 0x7F) as u16)).collect();
        let v: Vec<bf16> = values(3, keys * kv_heads * d, 4);
        let (q_pos, kv_len) = (vec![0; queries], [keys as i32]);
        let h = Heads { batch: 1, queries, keys, q_heads, kv_heads, d, e: d, causal: false, window: None, chunk: None };
        let expected = attention_page(&h, f64::exp2(120.0), [&q, &k, &v], None, &q_pos, &kv_len);
        let expected = expected.map(|v| all_rounded::<f32>(&v));
        let shape = Attention {
            batch: 1,
            queries,
            keys,
            q_heads,
            kv_heads,
            head_dim: d,
            value_dim: d,
            scale: f64::exp2(120.0),
            causal: false,
            window: None,
            chunk: None,
            softcap: None,
            tf32: Tf32::Disabled,
        };
        let (sequences, qkv) = (Sequences::padded(&q_pos, &kv_len), Qkv { q: &q[..], k: &k, v: &v });
        let run = |cpu: &Cpu| {
            let (mut out, mut lse) = (vec![0f32; q.len()], vec![0f32; queries * q_heads]);
            attention(cpu, &shape, &sequences, qkv, None, &mut out, &mut lse).unwrap();
            [bits(&out), bits(&lse)]
        };
        for cpu in cpus() {
            assert_eq!(run(&cpu), expected, "{queries} queries, {cpu:?}");
        }
    }
}

/// Narrowing is the rounding of the page for every f32 that is a tie or beside one, and for every 16-bit value.
#[test]
fn narrowing_rounds_to_nearest_even() {
    for high in 0..=u16::MAX {
        for low in [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
            let x = f32::from_bits(u32::from(high) << 16 | low);
            let expected = if x.is_nan() {
                0x7FC0
            } else {
                let up = low > 0x8000 || (low == 0x8000 && high & 1 == 1);
                high + u16::from(up)
            };
            for cpu in cpus() {
                let mut y = [bf16::ZERO];
                add(&cpu, &[x], &[-0.0], &mut y).unwrap();
                assert_eq!(y[0].to_bits(), expected, "{x:e} on {cpu:?}");
            }
        }
    }
}

/// What `Attention::causal` fills in.
#[test]
fn causal_attention_has_its_scale() {
    let shape = samebits_ops::Attention::causal([2, 3, 5], [4, 2], 16);
    assert_eq!((shape.scale, shape.causal, shape.window, shape.chunk, shape.softcap), (0.25, true, None, None, None));
    assert_eq!((shape.head_dim, shape.value_dim), (16, 16));
}
