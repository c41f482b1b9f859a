//! How far log-probabilities that were recorded are from those that are computed again, and the table that judges it.
//!
//! With `d = new - old` of a token, old its recorded log-probability and new the one that was computed again:
//!
//! ```text
//! differ             tokens whose bits differ
//! impossible         tokens whose new probability is 0: their d is -inf
//! max_dlogp          the largest |d|
//! mean_dlogp         the mean of |d|
//! k1                 the mean of -d: an estimate of the KL divergence of new from old
//! k3                 the mean of exp(d) - 1 - d: another one, never below 0
//! probability_error  the mean of exp(|d|)
//! clip_fraction      the share of tokens with exp(d) outside of 0.8 to 1.2
//! max_dprob          the largest difference of exp(new) and exp(old)
//! mean_dprob         their mean
//! std_dprob          and their standard deviation, by one less than the tokens; 0 of one token
//! pearson            the correlation of exp(old) and exp(new); 1 where neither varies
//! flips              choices of a token's experts in a mixture that are other sets than those recorded
//! flip_share         their share of all choices that were recorded
//! ```
//!
//! Choices are those of all tokens that were fed, of prompts too. Where none were recorded, both are NaN, and no threshold judges
//! them.
//! All in f64, tokens added in the order of the record.

use serde::Deserialize;

/// What is measured, by its name in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the module says what each is")]
pub enum Metric {
    Differ,
    Impossible,
    MaxDlogp,
    MeanDlogp,
    K1,
    K3,
    ProbabilityError,
    ClipFraction,
    MaxDprob,
    MeanDprob,
    StdDprob,
    Pearson,
    Flips,
    FlipShare,
}

impl Metric {
    /// All of them, with their names, in the order in which they are told.
    pub const ALL: [(Metric, &str); 14] = [
        (Metric::Differ, "differ"),
        (Metric::Impossible, "impossible"),
        (Metric::MaxDlogp, "max_dlogp"),
        (Metric::MeanDlogp, "mean_dlogp"),
        (Metric::K1, "k1"),
        (Metric::K3, "k3"),
        (Metric::ProbabilityError, "probability_error"),
        (Metric::ClipFraction, "clip_fraction"),
        (Metric::MaxDprob, "max_dprob"),
        (Metric::MeanDprob, "mean_dprob"),
        (Metric::StdDprob, "std_dprob"),
        (Metric::Pearson, "pearson"),
        (Metric::Flips, "flips"),
        (Metric::FlipShare, "flip_share"),
    ];

    /// Whether it is of experts, not of log-probabilities.
    pub fn is_of_experts(self) -> bool {
        matches!(self, Metric::Flips | Metric::FlipShare)
    }

    /// Its name in the table.
    pub fn name(self) -> &'static str {
        Metric::ALL.iter().find(|(metric, _)| *metric == self).expect("all are there").1
    }
}

/// A line of the table: a metric is at most, or at least, so much.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threshold {
    /// The gate that it is of.
    pub gate: String,
    /// What is measured.
    pub metric: Metric,
    /// The dtype of the models that it is for; all without it.
    pub dtype: Option<String>,
    /// The largest value that passes.
    pub most: Option<f64>,
    /// The smallest.
    pub least: Option<f64>,
    /// Whose number this is.
    pub source: String,
}

impl Threshold {
    /// Whether a value passes; NaN does not.
    pub fn holds(&self, value: f64) -> bool {
        self.most.is_none_or(|most| value <= most) && self.least.is_none_or(|least| value >= least)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    threshold: Vec<Threshold>,
}

/// The thresholds of the contract.
pub fn thresholds() -> Vec<Threshold> {
    parse(include_str!("../mismatch.toml")).expect("the table of the contract is right")
}

/// Thresholds as a file like the contract's has them.
///
/// # Errors
/// A table of another form, and a threshold that bounds nothing.
pub fn parse(text: &str) -> Result<Vec<Threshold>, String> {
    let table: Table = toml::from_str(text).map_err(|e| e.to_string())?;
    for line in &table.threshold {
        let bounds: Vec<f64> = line.most.into_iter().chain(line.least).collect();
        if bounds.is_empty() || bounds.iter().any(|bound| !bound.is_finite()) {
            let why = format!("gate {}, {}: give `most` or `least`, a finite number", line.gate, line.metric.name());
            return Err(why);
        }
    }
    Ok(table.threshold)
}

/// Tokens as they come, and what is measured of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mismatch {
    /// Tokens.
    pub tokens: usize,
    /// Those whose bits differ.
    pub differ: usize,
    /// Choices of experts that were recorded.
    pub choices: usize,
    /// Those that are others.
    pub flips: usize,
    impossible: usize,
    max: f64,
    sum: f64,
    signed: f64,
    k3: f64,
    ratio: f64,
    clipped: usize,
    /// Of the differences of probabilities: the largest, their sum, and that of their squares.
    of_probabilities: [f64; 3],
    /// Of exp(old) and exp(new): sums, sums of squares, and of their product.
    moments: [f64; 5],
}

impl Mismatch {
    /// Takes a token in.
    pub fn add(&mut self, old: f32, new: f32) {
        self.tokens += 1;
        self.differ += usize::from(old.to_bits() != new.to_bits());
        self.impossible += usize::from(new == f32::NEG_INFINITY);
        let d = f64::from(new) - f64::from(old);
        self.max = self.max.max(d.abs());
        self.sum += d.abs();
        self.signed -= d;
        self.k3 += d.exp_m1() - d;
        self.ratio += d.abs().exp();
        self.clipped += usize::from(!(0.8..=1.2).contains(&d.exp()));
        let (p, q) = (f64::from(old).exp(), f64::from(new).exp());
        let [most, sum, squares] = self.of_probabilities;
        let dp = (q - p).abs();
        self.of_probabilities = [most.max(dp), sum + dp, squares + dp * dp];
        for (sum, term) in self.moments.iter_mut().zip([p, q, p * p, q * q, p * q]) {
            *sum += term;
        }
    }

    /// Takes in whether choices of experts are others than those recorded.
    pub fn add_choices(&mut self, flips: impl Iterator<Item = bool>) {
        for flip in flips {
            self.choices += 1;
            self.flips += usize::from(flip);
        }
    }

    /// A metric of the tokens so far; of none a mean is 0.
    pub fn metric(&self, metric: Metric) -> f64 {
        let n = self.tokens.max(1) as f64;
        match metric {
            Metric::Differ => self.differ as f64,
            Metric::Impossible => self.impossible as f64,
            Metric::MaxDlogp => self.max,
            Metric::MeanDlogp => self.sum / n,
            Metric::K1 => self.signed / n,
            Metric::K3 => self.k3 / n,
            Metric::ProbabilityError => self.ratio / n,
            Metric::ClipFraction => self.clipped as f64 / n,
            Metric::MaxDprob => self.of_probabilities[0],
            Metric::MeanDprob => self.of_probabilities[1] / n,
            Metric::StdDprob => {
                let [_, sum, squares] = self.of_probabilities;
                ((squares - sum * sum / n).max(0.0) / (n - 1.0).max(1.0)).sqrt()
            }
            Metric::Pearson => self.pearson(n),
            Metric::Flips | Metric::FlipShare if self.choices == 0 => f64::NAN,
            Metric::Flips => self.flips as f64,
            Metric::FlipShare => self.flips as f64 / self.choices as f64,
        }
    }

    fn pearson(&self, n: f64) -> f64 {
        let [p, q, pp, qq, pq] = self.moments.map(|sum| sum / n);
        let (of_p, of_q) = (pp - p * p, qq - q * q);
        if of_p <= 0.0 && of_q <= 0.0 {
            return 1.0;
        }
        ((pq - p * q) / (of_p * of_q).sqrt()).clamp(-1.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_those_of_the_page() {
        let mut found = Mismatch::default();
        // Ratios of 1, e^0.5 and e^-0.25.
        for (old, new) in [(-1.0, -1.0), (-2.0, -1.5), (-0.5, -0.75)] {
            found.add(old, new);
        }
        let is = |metric, expected: f64| {
            let value = found.metric(metric);
            assert!((value - expected).abs() < 1e-12, "{}: {value} and not {expected}", Metric::name(metric));
        };
        is(Metric::Differ, 2.0);
        is(Metric::Impossible, 0.0);
        is(Metric::MaxDlogp, 0.5);
        is(Metric::MeanDlogp, 0.25);
        is(Metric::K1, -0.25 / 3.0);
        is(Metric::K3, (0.5f64.exp() - 1.5 + (-0.25f64).exp() - 0.75) / 3.0);
        is(Metric::ProbabilityError, (1.0 + 0.5f64.exp() + 0.25f64.exp()) / 3.0);
        is(Metric::ClipFraction, 2.0 / 3.0);
        let dp = [0.0, (-1.5f64).exp() - (-2.0f64).exp(), (-0.5f64).exp() - (-0.75f64).exp()];
        let mean = dp.iter().sum::<f64>() / 3.0;
        is(Metric::MaxDprob, dp[2]);
        is(Metric::MeanDprob, mean);
        is(Metric::StdDprob, (dp.iter().map(|d| (d - mean) * (d - mean)).sum::<f64>() / 2.0).sqrt());
        // By numpy.corrcoef.
        is(Metric::Pearson, 0.9949561188105573);
        assert!(found.metric(Metric::Flips).is_nan() && found.metric(Metric::FlipShare).is_nan());
        found.add_choices([true, false, false, true].into_iter());
        assert_eq!((found.metric(Metric::Flips), found.metric(Metric::FlipShare)), (2.0, 0.5));
        found.add(-1.0, f32::NEG_INFINITY);
        assert_eq!((found.tokens, found.differ, found.impossible), (4, 3, 1));
        assert!(
            [Metric::MaxDlogp, Metric::K1, Metric::K3].into_iter().all(|metric| found.metric(metric) == f64::INFINITY)
        );
        assert_eq!(Mismatch::default().metric(Metric::Pearson), 1.0);
    }

    #[test]
    fn thresholds_bound_something() {
        let all = thresholds();
        assert!(all.iter().all(|line| !line.source.is_empty()));
        let bitwise: Vec<_> = all.iter().filter(|line| line.gate == "bitwise").collect();
        assert_eq!(bitwise.iter().map(|line| line.metric).collect::<Vec<_>>(), [Metric::Differ, Metric::Flips]);
        assert!(bitwise.iter().all(|line| line.holds(0.0) && !line.holds(1.0) && !line.holds(f64::NAN)));
        let refused = |text: &str| parse(text).unwrap_err();
        assert!(
            refused("[[threshold]]\ngate = \"a\"\nmetric = \"k3\"\nsource = \"\"").contains("give `most` or `least`")
        );
        assert!(refused("[[threshold]]\ngate = \"a\"\nmetric = \"k2\"\nmost = 1.0\nsource = \"\"").contains("k2"));
    }
}
