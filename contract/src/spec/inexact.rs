//! Numbers beside what the f32 roundings that made them come to, for oracles that follow a formula step by step.
use super::gemm::sum_of;
use super::softmax::exponent_error;
use super::*;

/// A number of f32 arithmetic: what it is without rounding, and how far off it may be in units of 2^-24. 0: it is exact;
/// infinite: nothing is claimed of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Inexact {
    pub value: f64,
    pub error: f64,
}

/// Beyond this, as a share of the error, a number has the sign of its value and is not another.
const SURE: f64 = 2.0;

impl Inexact {
    /// An f32.
    pub fn exact(value: f64) -> Inexact {
        Inexact { value, error: 0.0 }
    }

    /// The f32 next to `value`, which is off by `inherited` already.
    pub fn rounded(value: f64, inherited: f64) -> Inexact {
        let error = match () {
            _ if inherited.is_infinite() => f64::INFINITY,
            _ if !value.is_finite() || inherited == 0.0 && f32_of(value) == value => 0.0,
            _ if value.abs() > HUGE => f64::INFINITY,
            _ => inherited + value.abs() + FLOOR,
        };
        Inexact { value, error }
    }

    /// A NaN in every arithmetic.
    fn is_nan(self) -> bool {
        self.value.is_nan() && self.error == 0.0
    }

    /// Whether it is on this side of `border` in every arithmetic.
    pub fn is_off(self, border: Inexact) -> bool {
        let error = self.error + border.error;
        error == 0.0 || (self.value - border.value).abs() > SURE * error * round::pow2(-24)
    }

    fn has_sign(self) -> bool {
        self.is_off(Inexact::exact(0.0))
    }

    /// 0 or infinite.
    fn is_end(self) -> bool {
        self.error == 0.0 && (self.value == 0.0 || self.value.is_infinite())
    }

    /// What `a * b` is off by before it is rounded itself.
    fn of_product(a: Inexact, b: Inexact) -> f64 {
        match () {
            _ if a.is_end() || b.is_end() => {
                if a.has_sign() && b.has_sign() {
                    0.0
                } else {
                    f64::INFINITY
                }
            }
            _ if a.error == 0.0 && b.error == 0.0 => 0.0,
            _ if a.error.is_infinite() || b.error.is_infinite() => f64::INFINITY,
            _ => a.value.abs() * b.error + b.value.abs() * a.error + a.error * b.error * round::pow2(-24),
        }
    }

    pub fn plus(self, b: Inexact) -> Inexact {
        match self.is_nan() || b.is_nan() {
            true => Inexact::exact(f64::NAN),
            false => Inexact::rounded(self.value + b.value, self.error + b.error),
        }
    }

    pub fn minus(self, b: Inexact) -> Inexact {
        self.plus(b.negative())
    }

    pub fn negative(self) -> Inexact {
        Inexact { value: -self.value, ..self }
    }

    pub fn times(self, b: Inexact) -> Inexact {
        match self.is_nan() || b.is_nan() {
            true => Inexact::exact(f64::NAN),
            false => Inexact::rounded(self.value * b.value, Inexact::of_product(self, b)),
        }
    }

    /// `self * b`, not rounded.
    pub fn product(self, b: Inexact) -> Inexact {
        match self.is_nan() || b.is_nan() {
            true => Inexact::exact(f64::NAN),
            false => Inexact { value: self.value * b.value, error: Inexact::of_product(self, b) },
        }
    }

    /// `self * b + c`, rounded once.
    pub fn times_plus(self, b: Inexact, c: Inexact) -> Inexact {
        match self.is_nan() || b.is_nan() || c.is_nan() {
            true => Inexact::exact(f64::NAN),
            false => Inexact::rounded(self.value * b.value + c.value, Inexact::of_product(self, b) + c.error),
        }
    }

    pub fn over(self, b: Inexact) -> Inexact {
        let inherited = match () {
            _ if self.is_nan() || b.is_nan() => return Inexact::exact(f64::NAN),
            _ if self.is_end() || b.is_end() || !b.has_sign() => {
                if self.has_sign() && b.has_sign() {
                    0.0
                } else {
                    f64::INFINITY
                }
            }
            _ => self.error / b.value.abs() + self.value.abs() * b.error / (b.value * b.value),
        };
        Inexact::rounded(self.value / b.value, inherited)
    }

    /// The root of what is not negative, but for an error.
    pub fn root(self) -> Inexact {
        let root = self.value.max(0.0).sqrt();
        match () {
            _ if self.is_nan() || self.value < 0.0 && self.has_sign() => Inexact::exact(f64::NAN),
            _ if self.value < 0.0 => Inexact { value: f64::NAN, error: f64::INFINITY },
            _ if self.error == 0.0 => Inexact::rounded(self.value.sqrt(), 0.0),
            _ if self.has_sign() => Inexact::rounded(root, self.error / (2.0 * root)),
            _ => Inexact::rounded(root, self.error.sqrt() * round::pow2(12)),
        }
    }

    /// e to its power.
    pub fn exponential(self) -> Inexact {
        let value = self.value.exp();
        match self.value {
            x if x.is_nan() || self.error.is_infinite() => Inexact { value: f64::NAN, ..self },
            x if x == 0.0 && self.error == 0.0 => Inexact::exact(1.0),
            x if x > 89.0 && self.has_sign() => Inexact::exact(f64::INFINITY),
            x if x > 88.0 => Inexact { value, error: f64::INFINITY },
            x if x < -105.0 && self.has_sign() => Inexact::exact(0.0),
            x => Inexact { value, error: value * (self.error + exponent_error(x)) + value + FLOOR },
        }
    }

    /// The sum of terms, in whatever order.
    pub fn sum(terms: &[Inexact]) -> Inexact {
        let (sum, size) = sum_of(terms.iter().map(|term| term.value));
        let inherited: f64 = terms.iter().map(|term| term.error).sum();
        let error = match () {
            _ if terms.iter().any(|term| term.is_nan()) => 0.0,
            _ if inherited == 0.0 || size.is_infinite() => size,
            _ if inherited.is_infinite() => inherited,
            _ if sum.is_infinite() => size,
            // The values alone may be exact.
            _ => size.max(terms.iter().map(|term| term.value.abs()).sum()) + inherited,
        };
        Inexact { value: sum, error }
    }

    /// Value and condition.
    pub fn element(self) -> (f64, f64) {
        (self.value, self.error)
    }
}
