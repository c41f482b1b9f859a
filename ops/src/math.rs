//! Elementary functions: `docs/NUMERICS.md`, section 2. Vector forms are the same steps in every lane.

use crate::profile::IEEE;
use crate::simd::Simd;
use crate::simd::scalar::Scalar;

/// High part of log2(e).
pub const LOG2E_HI: f32 = IEEE.log2e[0];
/// Low part of log2(e): `LOG2E_HI + LOG2E_LO` carries about 48 bits.
pub const LOG2E_LO: f32 = IEEE.log2e[1];
/// Both.
pub const LOG2E: (f32, f32) = (LOG2E_HI, LOG2E_LO);
/// The natural logarithm of 2 in f64.
const LN_2: f64 = IEEE.ln_2;
/// `1 / d` for odd d, from the largest of [`IEEE`] down to 1.
const LN_TERMS: [f64; (IEEE.ln_terms as usize).div_ceil(2)] = {
    let mut terms = [0.0; (IEEE.ln_terms as usize).div_ceil(2)];
    let mut at = 0;
    while at < terms.len() {
        terms[at] = 1.0 / (IEEE.ln_terms - 2 * at as u32) as f64;
        at += 1;
    }
    terms
};
/// Coefficients of `2^f` on [-0.5, 0.5], from the highest power; the constant term is 1.
const EXP2: [u32; 6] = IEEE.exp2;
/// Far enough from 2^22, from where on a product has no fraction.
const SMALL: f32 = 2_097_152.0;
/// `e^x` of numbers up to this magnitude is normal, and 2 to the power of its exponent as well.
const NORMAL: f32 = 86.0;
/// Weights more than this many powers of two below the largest are +0.
pub const NEGLIGIBLE: f32 = IEEE.negligible;

/// `(m, i)` with `m * 2^i` close to `2^(x * (c_hi + c_lo))`; `i` is integral, `m` in about [0.70, 1.42].
#[inline(always)]
pub fn exp_split<S: Simd>(s: S, x: S::F, c_hi: S::F, c_lo: S::F) -> (S::F, S::F) {
    let (f, i) = split(s, x, c_hi, c_lo);
    (exp2_fraction(s, f, 1.0), i)
}

/// `(f, i)` with `f + i` close to `x * (c_hi + c_lo)`; `i` is integral, `f` in about [-0.5, 0.5].
#[inline(always)]
fn split<S: Simd>(s: S, x: S::F, c_hi: S::F, c_lo: S::F) -> (S::F, S::F) {
    let t = s.mul(x, c_hi);
    let i = s.round(t);
    let f = fraction(s, x, i, c_hi, c_lo);
    // From 2^22 on, t has no fraction worth the name, and x * c_hi may have overflowed.
    (s.select_ge(s.abs(t), s.splat(IEEE.whole), s.splat(0.0), f), i)
}

/// [`exp_split`] where every `|x * c_hi|` is below 2^22; any other lane gives its `i` and an arbitrary `m`.
#[inline(always)]
fn exp_split_small<S: Simd>(s: S, x: S::F, c_hi: S::F, c_lo: S::F) -> (S::F, S::F) {
    let i = s.round(s.mul(x, c_hi));
    (exp2_fraction(s, fraction(s, x, i, c_hi, c_lo), 1.0), i)
}

/// `x * (c_hi + c_lo) - i`.
#[inline(always)]
fn fraction<S: Simd>(s: S, x: S::F, i: S::F, c_hi: S::F, c_lo: S::F) -> S::F {
    s.fma(x, c_lo, s.fma(x, c_hi, s.neg(i)))
}

/// `2^f * unit` for f in [-0.5, 0.5] and a power of two that overflows none of the coefficients and underflows none.
#[inline(always)]
fn exp2_fraction<S: Simd>(s: S, f: S::F, unit: f32) -> S::F {
    s.fma(exp2_rest(s, f, unit), f, s.splat(unit))
}

/// What the last step of [`exp2_fraction`] multiplies f with.
#[inline(always)]
fn exp2_rest<S: Simd>(s: S, f: S::F, unit: f32) -> S::F {
    let mut m = s.splat(f32::from_bits(EXP2[0]) * unit);
    for c in &EXP2[1..] {
        m = s.fma(m, f, s.splat(f32::from_bits(*c) * unit));
    }
    m
}

/// `2^-n` where [`near_weight`] gives the weights under the reference point n of all x whose exponent is `least` or more:
/// none is negligible, and no step of it leaves the normal numbers.
pub fn near_unit(n: f32, least: f32) -> Option<f32> {
    (n <= -NEGLIGIBLE && least >= f32::max(n + NEGLIGIBLE, -126.0)).then(|| Scalar.pow2(-n))
}

/// The [`weight`] of `e^x` by the [`near_unit`] of its row: the power of two of the reference point is in the coefficients.
/// `bf16`: all x are of that type. Their products by log2(e) lie so far from halves between integers that one rounding gives
/// the integer of two.
#[inline(always)]
pub fn near_weight<S: Simd>(s: S, x: S::F, unit: f32, bf16: bool) -> S::F {
    let (c_hi, c_lo) = (s.splat(LOG2E_HI), s.splat(LOG2E_LO));
    let (i, rounded) = if bf16 { s.round_product(x, c_hi) } else { s.round_small(s.mul(x, c_hi)) };
    s.mul_rounded(exp2_fraction(s, fraction(s, x, i, c_hi, c_lo), unit), rounded)
}

/// Coefficients for [`near_weights`], by the [`near_unit`] of each lane.
#[inline(always)]
pub fn near_coefficients<S: Simd>(s: S, unit: S::F) -> [S::F; 7] {
    let mut coefficients = [unit; 7];
    for (coefficient, c) in coefficients.iter_mut().zip(EXP2) {
        *coefficient = s.mul(s.splat(f32::from_bits(c)), unit);
    }
    coefficients
}

/// The [`weight`] of `2^(x * (c_hi + c_lo))` of `N` vectors, of `BF16` by log2(e) as in [`near_weight`], by the [`near_coefficients`] of their rows, step by step side by side. Each coefficient is
/// read where it is needed: the compiler would keep them in registers, of which the vectors need all, and take the vectors one
/// after another instead.
#[inline(always)]
pub fn near_weights<S: Simd, const N: usize, const BF16: bool>(
    s: S,
    x: [S::F; N],
    c: (f32, f32),
    coefficients: &[S::F; 7],
) -> [S::F; N] {
    let (c_hi, c_lo) = (s.splat(c.0), s.splat(c.1));
    // SAFETY: what a reference points to can be read.
    let (mut f, mut rounded, mut m) = (x, x, [unsafe { std::ptr::read_volatile(&coefficients[0]) }; N]);
    for i in 0..N {
        (f[i], rounded[i]) = if BF16 { s.round_product(x[i], c_hi) } else { s.round_small(s.mul(x[i], c_hi)) };
    }
    for i in 0..N {
        f[i] = fraction(s, x[i], f[i], c_hi, c_lo);
    }
    for c in &coefficients[1..] {
        // SAFETY: as above.
        let c = unsafe { std::ptr::read_volatile(c) };
        for i in 0..N {
            m[i] = s.fma(m[i], f[i], c);
        }
    }
    for i in 0..N {
        m[i] = s.mul_rounded(m[i], rounded[i]);
    }
    m
}

/// `m * 2^(i - n)`, exactly, or +0 when it is negligible. `n` is finite and at least `i`.
#[inline(always)]
pub fn weight<S: Simd>(s: S, m: S::F, i: S::F, n: S::F) -> S::F {
    let d = s.sub(i, n);
    s.select_ge(d, s.splat(NEGLIGIBLE), s.mul_pow2(m, d), s.splat(0.0))
}

/// The [`weight`] of `2^(x * (c_hi + c_lo))` under the reference point `n`. `SMALL`: [`is_small`] says so of every `n`.
#[inline(always)]
pub fn weigh<S: Simd, const SMALL: bool>(s: S, x: S::F, c_hi: S::F, c_lo: S::F, n: S::F) -> S::F {
    let (m, i) = if SMALL { exp_split_small(s, x, c_hi, c_lo) } else { exp_split(s, x, c_hi, c_lo) };
    weight(s, m, i, n)
}

/// Whether no weight under the reference points `n` needs more than [`exp_split_small`]: where that is wrong, the exponent
/// is below -2^22, far more than [`NEGLIGIBLE`] below `n`, and the weight +0 whatever `m` is.
#[inline(always)]
pub fn is_small<S: Simd>(s: S, n: S::F) -> bool {
    s.all_within(s.splat(-SMALL), n, s.splat(SMALL))
}

/// `e^x`.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    let (m, i) = exp_split(s, x, s.splat(LOG2E_HI), s.splat(LOG2E_LO));
    s.scale(m, i)
}

/// `e^x - 1` of x that is not above 0; any other number but NaN gives an arbitrary one.
#[inline(always)]
pub fn expm1<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    let (f, i) = split(s, x, s.splat(LOG2E_HI), s.splat(LOG2E_LO));
    let rest = exp2_rest(s, f, 1.0);
    let far = s.sub(s.scale(s.fma(rest, f, one), i), one);
    s.select_ge(i, s.splat(0.0), s.mul(rest, f), far)
}

/// `e^x`, or +0 where its exponent is negligible beside that of 1.
#[inline(always)]
pub fn exp_or_nothing<S: Simd>(s: S, x: S::F) -> S::F {
    let (c_hi, c_lo) = (s.splat(LOG2E_HI), s.splat(LOG2E_LO));
    // What lies below is nothing as well; a NaN stays.
    let x = s.max(s.splat(-SMALL), x);
    if s.all_within(s.splat(-SMALL), x, s.splat(NORMAL)) {
        let (m, i) = exp_split_small(s, x, c_hi, c_lo);
        return weight(s, m, i, s.splat(0.0));
    }
    let (m, i) = exp_split(s, x, c_hi, c_lo);
    // i is integral; that of a NaN is NaN, and so is its m.
    s.select_ge(s.splat(NEGLIGIBLE - 1.0), i, s.splat(0.0), s.scale(m, i))
}

/// `1 + e^-x`, whose reciprocal is the sigmoid of x.
#[inline(always)]
pub fn one_plus_exp_neg<S: Simd>(s: S, x: S::F) -> S::F {
    // The sign of x may as well stand before the constants.
    let (c_hi, c_lo) = (s.splat(-LOG2E_HI), s.splat(-LOG2E_LO));
    // Most often all are so small that e^-x is a normal number: then it is a product by one power of two.
    let e = if s.all_within(s.splat(-NORMAL), x, s.splat(NORMAL)) {
        let (m, i) = exp_split_small(s, x, c_hi, c_lo);
        s.mul_pow2(m, i)
    } else {
        let (m, i) = exp_split(s, x, c_hi, c_lo);
        s.scale(m, i)
    };
    s.add(s.splat(1.0), e)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(s.splat(1.0), one_plus_exp_neg(s, x))
}

/// The hyperbolic tangent.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let e = exp(s, s.mul(s.splat(-2.0), s.abs(x)));
    let t = s.div(s.sub(s.splat(1.0), e), s.add(s.splat(1.0), e));
    s.copysign(t, x)
}

/// The share of a normal distribution below x, and `e^(-x^2/2)`.
#[inline(always)]
pub fn normal<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
    let one = s.splat(1.0);
    let t = s.div(one, s.fma(s.splat(IEEE.normal_step), s.abs(x), one));
    let mut m = s.splat(f32::from_bits(IEEE.normal_tail[0]));
    for c in &IEEE.normal_tail[1..] {
        m = s.fma(m, t, s.splat(f32::from_bits(*c)));
    }
    let e = exp(s, s.mul(s.mul(x, x), s.splat(-0.5)));
    let beyond = s.mul(e, s.mul(m, t));
    (s.select_ge(x, s.splat(0.0), s.sub(one, beyond), beyond), e)
}

/// The natural logarithm of a positive normal f32, in f64.
#[inline(always)]
pub fn ln(l: f32) -> f64 {
    let bits = f64::from(l).to_bits();
    let mut e = ((bits >> 52) as i32 - 1023) as f64;
    let mut z = f64::from_bits((bits & 0x000F_FFFF_FFFF_FFFF) | 0x3FF0_0000_0000_0000);
    if z >= IEEE.ln_half {
        z /= 2.0;
        e += 1.0;
    }
    f64::mul_add(e, LN_2, ln_of_quotient((z - 1.0) / (z + 1.0)))
}

/// `ln(1 + e^x)`, rounded to f32 once.
pub fn softplus(x: f32) -> f32 {
    softplus_by(x, exp(Scalar, -x.abs()))
}

/// The same where `e^-|x|` is known.
#[inline(always)]
pub fn softplus_by(x: f32, w: f32) -> f32 {
    let l = ln1p(w, 1.0);
    (if x > 0.0 { f64::from(x) + l } else { l }) as f32
}

/// `ln(1 + a / b)` of `0 <= a < b`, in f64.
#[inline(always)]
pub fn ln1p(a: f32, b: f32) -> f64 {
    let (a, b) = (f64::from(a), f64::from(b));
    ln_of_quotient(a / (2.0 * b + a))
}

/// `ln((1 + s) / (1 - s))` of |s| up to 1/3.
#[inline(always)]
fn ln_of_quotient(s: f64) -> f64 {
    let q = s * s;
    let mut r = LN_TERMS[0];
    for term in &LN_TERMS[1..] {
        r = f64::mul_add(r, q, *term);
    }
    (2.0 * s) * r
}

/// The logarithm of `l * 2^n`, in f64.
#[inline(always)]
pub fn ln_of_sum(n: f32, l: f32) -> f64 {
    f64::mul_add(f64::from(n), LN_2, ln(l))
}

/// The logarithm of `l * 2^n`, rounded to f32 once.
#[inline(always)]
pub fn lse(n: f32, l: f32) -> f32 {
    ln_of_sum(n, l) as f32
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use crate::simd::{Kernel, load_at, narrow_at};
    use crate::{Cpu, Element, Isa};

    pub(crate) fn constants_are_those_of_the_page() {
        assert_eq!(f64::from(LOG2E_HI), f64::from_bits(0x3FF7_1547_6000_0000));
        let c_lo = (std::f64::consts::LOG2_E - f64::from(LOG2E_HI)) as f32;
        assert_eq!(LOG2E_LO.to_bits(), c_lo.to_bits());
        assert_eq!(LN_2, std::f64::consts::LN_2);
    }

    pub(crate) fn exp_stays_below_one_ulp() {
        let mut worst = 0.0f64;
        for bits in (0x3000_0000u32..0x42B0_0000).step_by(997) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let exact = f64::from(x).exp();
                if exact < f64::from(f32::MIN_POSITIVE) || exact > f64::from(f32::MAX) {
                    continue;
                }
                let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
                worst = worst.max((f64::from(exp(Scalar, x)) - exact).abs() / ulp);
            }
        }
        assert!(worst > 0.5 && worst < 1.0, "{worst} ulp");
    }

    pub(crate) fn exp_at_its_ends() {
        assert_eq!(exp(Scalar, f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(Scalar, f32::INFINITY), f32::INFINITY);
        assert!(exp(Scalar, f32::NAN).is_nan());
        assert_eq!(exp(Scalar, -0.0), 1.0);
        assert!(exp(Scalar, -100.0) > 0.0, "gradual underflow");
    }

    struct OrNothing<'a>(&'a [f32], &'a mut [f32]);

    impl Kernel for OrNothing<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for at in (0..self.0.len()).step_by(S::LANES) {
                narrow_at(s, exp_or_nothing(s, load_at(s, self.0, at, 0.0)), self.1, at);
            }
        }
    }

    /// Exponents about the last one that counts, alone and beside numbers that leave the quick way.
    pub(crate) fn what_is_negligible_is_nothing_whatever_stands_beside_it() {
        let ln2 = std::f32::consts::LN_2;
        let mut x: Vec<f32> = (0..32).map(|i| -(97.0 + 0.25 * i as f32) * ln2).collect();
        x.extend((0..32).map(|i| if i % 5 == 0 { 87.0 } else { -(97.0 + 0.25 * i as f32) * ln2 }));
        x.extend([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1e30, -80.0, 0.0, 88.0, -70.0]);
        let expected = x.iter().map(|&x| {
            let (_, i) = exp_split(Scalar, x, LOG2E_HI, LOG2E_LO);
            if i < NEGLIGIBLE { 0.0 } else { exp(Scalar, x) }
        });
        let expected: Vec<u32> = expected.map(|y| f32::narrow(y).to_bits()).collect();
        assert!(expected.contains(&0) && expected[..12].iter().all(|y| *y != 0));
        for isa in Isa::of_machine() {
            let mut y = vec![0f32; x.len()];
            Cpu::new(isa, 1, usize::MAX).unwrap().dispatch(OrNothing(&x, &mut y));
            assert_eq!(y.iter().map(|y| y.to_bits()).collect::<Vec<_>>(), expected, "{isa}");
        }
    }

    struct Near<'a>(&'a [f32], f32, &'a mut [f32], bool);

    impl Kernel for Near<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for at in (0..self.0.len()).step_by(S::LANES) {
                narrow_at(s, near_weight(s, load_at(s, self.0, at, 0.0), self.1, self.3), self.2, at);
            }
        }
    }

    /// Four vectors side by side, in place.
    struct NearFour<'a>(&'a mut [f32], f32, bool);

    impl Kernel for NearFour<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let coefficients = near_coefficients(s, s.splat(self.1));
            for x in self.0.chunks_exact_mut(4 * S::LANES) {
                let mut four = [s.splat(0.0); 4];
                for (i, x_i) in four.iter_mut().enumerate() {
                    *x_i = load_at(s, x, i * S::LANES, 0.0);
                }
                let w = if self.2 {
                    near_weights::<_, 4, true>(s, four, LOG2E, &coefficients)
                } else {
                    near_weights::<_, 4, false>(s, four, LOG2E, &coefficients)
                };
                for (i, w) in w.into_iter().enumerate() {
                    narrow_at(s, w, x, i * S::LANES);
                }
            }
        }
    }

    /// From the least exponent that is near to the reference point, halfway between integers too, and every bf16.
    pub(crate) fn near_weights_are_the_weights() {
        for n in [-26.0f32, -3.0, 0.0, 7.0, 100.0] {
            let least = f32::max(n - 100.0, -126.0);
            let exponents = (0..=1000).map(|i| least + (n - least) * i as f32 / 1000.0);
            let halves = (0..).map(|i| least + 0.5 + i as f32).take_while(|e| *e < n);
            check_near(n, least, exponents.chain(halves).map(|e| e / LOG2E_HI).collect(), false);
            let all = (0..=u16::MAX).map(|bits| half::bf16::from_bits(bits).to_f32());
            let near = |x: &f32| (least..=n).contains(&(x * LOG2E_HI).round_ties_even());
            check_near(n, least, all.filter(near).collect(), true);
        }
        for (n, least) in
            [(101.0, 50.0), (0.0, -101.0), (-27.0, -127.0), (100.0, -1.0), (f32::NAN, 0.0), (0.0, f32::NAN)]
        {
            assert_eq!(near_unit(n, least), None, "{n}, {least}");
        }
    }

    fn check_near(n: f32, least: f32, mut x: Vec<f32>, bf16: bool) {
        // Whole times four vectors of any length.
        x.resize(x.len().next_multiple_of(4 * crate::simd::MAX_LANES), x[0]);
        let unit = near_unit(n, least).unwrap();
        let expected = x.iter().map(|&x| {
            let (m, i) = exp_split(Scalar, x, LOG2E_HI, LOG2E_LO);
            assert!(i >= least && i <= n);
            weight(Scalar, m, i, n).to_bits()
        });
        let expected: Vec<u32> = expected.collect();
        assert!(!expected.is_empty() && expected.iter().all(|w| *w != 0));
        for isa in Isa::of_machine() {
            let mut w = vec![0f32; x.len()];
            Cpu::new(isa, 1, usize::MAX).unwrap().dispatch(Near(&x, unit, &mut w, bf16));
            assert_eq!(w.iter().map(|w| w.to_bits()).collect::<Vec<_>>(), expected, "{isa}, n = {n}, bf16 {bf16}");
            w.copy_from_slice(&x);
            Cpu::new(isa, 1, usize::MAX).unwrap().dispatch(NearFour(&mut w, unit, bf16));
            assert_eq!(
                w.iter().map(|w| w.to_bits()).collect::<Vec<_>>(),
                expected,
                "{isa}, n = {n}, four, bf16 {bf16}"
            );
        }
    }

    pub(crate) fn ln_is_that_of_f64() {
        for l in [0.7f32, 0.99999994, 1.0, 1.0000001, 1.414, 1.4143, 2.0, 3.5, 151_936.0, 1e30] {
            assert!((ln(l) - f64::from(l).ln()).abs() <= 4e-16 * f64::from(l).ln().abs().max(0.1), "{l}");
        }
    }
}
