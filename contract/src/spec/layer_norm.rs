//! `layer_norm`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::layer_norm::OP,
    class: Class::Reduction,
    fills: SIGNED_SUMS,
    table: include_str!("../../ops/layer_norm.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    // Half of them so large that what survives of a mask, over the masses, is seen in fp16.
    let factors = power::factors(&maker.draw("w"), n).into_iter().enumerate();
    let factors: Vec<f64> = factors.map(|(i, w)| if i % 2 == 0 { w } else { w * 4096.0 }).collect();
    let mut x = match maker.fill {
        Fill::Power => power::centred_rows(maker, "x", r, &if maker.has("w") { factors.clone() } else { vec![1.0; n] }),
        _ => values(maker, r, n),
    };
    // Rows that are exactly 1 and -1 after the norm without eps, so that the outputs are w and -w, and bias; and NaN.
    if maker.fill == Fill::Classes {
        let kinds = [[1.0, -1.0], [-2.0, 2.0], [-1.0, 1.0], [f64::NAN, 1.0]];
        x = (0..r * n).map(|i| kinds[i / n % kinds.len()][i % n % 2]).collect();
    }
    let mut inputs = maker.floats([("x", vec![r, n], x)]);
    for name in ["w", "bias"].into_iter().filter(|name| maker.has(name)) {
        let values = match (maker.fill, name) {
            (Fill::Classes, "w") => [maker.borders_from(0, n - 1), vec![65280.0]].concat(),
            // -0 changes nothing. Last, the largest fp16 number, which bf16 holds as two.
            (Fill::Classes, _) => [vec![-0.0; n - 1], vec![-224.0]].concat(),
            (Fill::Power, "w") => factors.clone(),
            (Fill::Power, _) => vec![0.0; n],
            _ => maker.values(name, Fill::Normal, n, n),
        };
        inputs.extend(maker.floats([(name, vec![n], values)]));
    }
    inputs
}

/// The elements of x, of all fills but [`Fill::Classes`].
pub(super) fn values(maker: &Maker, r: usize, n: usize) -> Vec<f64> {
    let mut x = maker.values("x", maker.fill, r * n, n);
    match maker.fill {
        // A mean far above the spread: the mean of the squares less the square of the mean has no bit of the variance.
        Fill::Cancel => x.iter_mut().for_each(|v| *v = 100.0 + *v / 4.0),
        _ => super::rms_norm::near_root(maker, &mut x),
    }
    x
}

fn compute(c: &Checked) -> References {
    let (r, n) = (c.dim("R"), c.dim("N"));
    let given = |name| c.case.inputs.get(name).map(Tensor::to_f64);
    let (w, bias, eps) = (given("w"), given("bias"), f32_of(c.float("eps")));
    let x = c.floats("x");
    let rows = x.chunks(n).flat_map(|x| {
        let norm = Norm::of(x, eps);
        let (w, bias) = (w.as_deref(), bias.as_deref());
        x.iter().enumerate().map(move |(i, &x)| norm.element(x, w.map(|w| w[i]), bias.map(|bias| bias[i])))
    });
    one("y", Reference::new(vec![r, n], rows.collect::<Vec<_>>()))
}

/// Mean and scale of a row, and their errors in units of 2^-24.
#[derive(Clone, Copy)]
pub(super) struct Norm {
    mean: f64,
    /// Of the mean, absolute; 0 where nothing rounds.
    mean_error: f64,
    pub r: f64,
    /// Of r, relative; infinite where nothing is claimed of the row.
    pub r_error: f64,
}

impl Norm {
    pub fn of(x: &[f64], eps: f64) -> Norm {
        let n = x.len() as f64;
        let (sum, size) = sum_of(x.iter().copied());
        let mean = sum / n;
        let mean_error = size / n + if f32_of(mean) == mean { 0.0 } else { mean.abs() };
        let squares: f64 = x.iter().map(|x| (x - mean) * (x - mean)).sum();
        let variance = squares / n + eps;
        // A mean that is wrong by e adds e^2 to the variance.
        let e = super::rms_norm::roundings(x.len()) * mean_error * round::pow2(-24);
        // Squares below the smallest normal number lose bits.
        let lost = absorbed(x.iter().map(|x| (x - mean) * (x - mean)), squares);
        let mut r_error = 1.0 + FLOOR / variance + e * e / variance * round::pow2(24) + lost;
        // Nothing is claimed where squares of finite numbers overflow f32, nor where the error of the mean is the variance.
        // Beside a number that is not finite the squares are NaN, and so is the variance.
        if squares > HUGE || e * e > variance / 64.0 {
            r_error = f64::INFINITY;
        }
        Norm { mean, mean_error, r: 1.0 / variance.sqrt(), r_error }
    }

    /// How far `x` is from the mean, the error of that, and whether its sign is known.
    pub fn difference(&self, x: f64) -> (f64, f64, bool) {
        let d = x - self.mean;
        let exact = self.mean_error == 0.0 && f32_of(d) == d;
        let error = if exact { 0.0 } else { self.mean_error + d.abs() };
        (d, error, exact || d.abs() > error * round::pow2(-14))
    }

    /// Value and condition of the element `x`.
    pub fn element(&self, x: f64, w: Option<f64>, bias: Option<f64>) -> (f64, f64) {
        // With the sign of the normed value is known what a weight of 0 or infinity makes of it.
        let (d, d_error, certain) = self.difference(x);
        let normed = d * self.r;
        let weighed = w.map_or(normed, |w| normed * w);
        let value = bias.map_or(weighed, |bias| weighed + bias);
        let weight = w.unwrap_or(1.0);
        let condition = match () {
            _ if normed.is_nan() => 0.0,
            _ if self.r_error == f64::INFINITY => f64::INFINITY,
            _ if !certain && (weight == 0.0 || !weight.is_finite() || normed == 0.0) => f64::INFINITY,
            _ if weight == 0.0 || normed == 0.0 => 0.0,
            _ if value.is_infinite() || value.is_nan() => 0.0,
            // The product may overflow where the sum does not.
            _ if bias.is_some() && weighed.abs() > HUGE => f64::INFINITY,
            _ => {
                let product = (d_error * self.r + normed.abs() * self.r_error) * weight.abs();
                product + bias.map_or(0.0, |_| weighed.abs() + value.abs()) + FLOOR * (1.0 + weight.abs())
            }
        };
        (value, condition)
    }
}
