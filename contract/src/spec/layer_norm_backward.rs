//! `layer_norm_backward`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::layer_norm::Norm;
use super::rms_norm_backward::{Product, gradients};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::layer_norm_backward::OP,
    class: Class::Reduction,
    fills: layer_norm::SPEC.fills,
    table: include_str!("../../ops/layer_norm_backward.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    if maker.fill == Fill::Power {
        let [x, w, dy] = power::centred_gradient_rows(maker, r, n);
        let mut inputs = maker.floats([("x", vec![r, n], x), ("w", vec![n], w), ("dy", vec![r, n], dy)]);
        inputs.retain(|name, _| name != "w" || maker.has("w"));
        return inputs;
    }
    let mut inputs = maker.floats([("dy", vec![r, n], gradients(maker, "dy", r * n, n))]);
    inputs.extend(maker.floats([("x", vec![r, n], layer_norm::values(maker, r, n))]));
    if maker.has("w") {
        inputs.extend(maker.floats([("w", vec![n], maker.values("w", Fill::Normal, n, n))]));
    }
    if maker.fill == Fill::Classes {
        let rows = known_rows(maker);
        let [x, dy] = [0, 1].map(|i| rows.iter().cycle().take(r).flat_map(|row| row[i]).collect());
        let w = vec![1.0, 1.0, 1.0, 1.0, 89.0, 89.0, 1.0, 1.0];
        inputs.extend(maker.floats([("x", vec![r, n], x), ("dy", vec![r, n], dy), ("w", vec![n], w)]));
    }
    inputs
}

/// Rows x and dy of eight elements each. A row of 2 and -2, else 0, has an r of 1 without eps, one of halves an r of 4: with
/// dy of v and -v where x is 0, both means of g are 0 and dx is g times r.
pub(super) fn known_rows(maker: &Maker) -> Vec<[[f64; 8]; 2]> {
    let mut rows = Vec::new();
    for v in maker.borders().into_iter().filter(|v| v.is_finite() && v.is_sign_positive()) {
        let (spread, v) = if v < 1.0 { (2.0, v) } else { (0.5, v / 4.0) };
        rows.push([[spread, -spread, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, v, -v, 0.0, 0.0, 0.0, 0.0]]);
    }
    // The largest fp16 number as a product; an infinity whose product goes the way of its mean in every second element; NaN.
    let halves = [0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let ones = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0];
    rows.push([halves, [0.0, 0.0, 0.0, 0.0, 184.0, -184.0, 0.0, 0.0]]);
    for v in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        rows.push([ones, [v, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]);
    }
    rows
}

fn compute(c: &Checked) -> References {
    let (r, n) = (c.dim("R"), c.dim("N"));
    let (x, dy, eps) = (c.floats("x"), c.floats("dy"), f32_of(c.float("eps")));
    let w = c.case.inputs.get("w").map(Tensor::to_f64);
    let rows = x.chunks(n).zip(dy.chunks(n)).flat_map(|(x, dy)| {
        let weighed = |(i, &dy): (usize, &f64)| match &w {
            Some(w) => Product::of(dy, w[i], 0.0),
            None => Product { value: dy, error: 0.0 },
        };
        of_row(x, &dy.iter().enumerate().map(weighed).collect::<Vec<_>>(), eps)
    });
    one("dx", Reference::new(vec![r, n], rows.collect::<Vec<_>>()))
}

/// A mean of terms with errors, in units of 2^-24.
fn mean(terms: &[Product]) -> Product {
    let n = terms.len() as f64;
    let (sum, size) = sum_of(terms.iter().map(|term| term.value));
    let of_terms: f64 = terms.iter().map(|term| term.error).sum();
    let value = sum / n;
    let rounding = if f32_of(value) == value || !value.is_finite() { 0.0 } else { value.abs() + FLOOR };
    Product { value, error: (size + of_terms) / n + rounding }
}

/// An element less the mean, times r, with its error in units of 2^-24; and whether its sign is known.
pub(super) fn normed(norm: &Norm, x: f64) -> (Product, bool) {
    let (d, d_error, certain) = norm.difference(x);
    let value = d * norm.r;
    let exact = value == 0.0 && d_error == 0.0;
    let error = if exact { 0.0 } else { d_error * norm.r + value.abs() * (norm.r_error + 1.0) + FLOOR };
    (Product { value, error }, certain)
}

/// Value and condition of every element of the row `x` with the weighed gradients `g`.
fn of_row(x: &[f64], g: &[Product], eps: f64) -> Vec<(f64, f64)> {
    let norm = Norm::of(x, eps);
    let (h, certain): (Vec<Product>, Vec<bool>) = x.iter().map(|&x| normed(&norm, x)).unzip();
    // The signs of h decide what becomes of an infinity.
    let certain = certain.into_iter().all(|certain| certain);
    let product = |(h, g): (&Product, &Product)| {
        let value = h.value * g.value;
        let error = |a: f64, b_error: f64| if a == 0.0 || !a.is_finite() { 0.0 } else { a.abs() * b_error };
        let exact_zero = |factor: &Product| factor.value == 0.0 && factor.error == 0.0;
        let rounding = if exact_zero(h) || exact_zero(g) { 0.0 } else { FLOOR };
        Product { value, error: error(g.value, h.error) + error(h.value, g.error) + rounding }
    };
    let (a, b) = (mean(g), mean(&h.iter().zip(g).map(product).collect::<Vec<_>>()));
    let not_a_number = x.iter().any(|x| !x.is_finite()) || g.iter().any(|g| g.value.is_nan());
    let lost = [norm.r_error, a.error, b.error].into_iter().chain(g.iter().map(|g| g.error)).any(|e| !e.is_finite());
    let element = |(h, g): (&Product, &Product)| {
        let difference = g.value - a.value;
        let inner = -b.value * h.value + difference;
        let value = norm.r * inner;
        let sure = g.error == 0.0 && a.error == 0.0 && f32_of(difference) == difference;
        let exact = sure && b.value == 0.0 && b.error == 0.0;
        let condition = match () {
            _ if not_a_number => 0.0,
            _ if lost => f64::INFINITY,
            _ if !value.is_finite() => {
                if certain {
                    0.0
                } else {
                    f64::INFINITY
                }
            }
            _ if exact && value == 0.0 => 0.0,
            _ if !exact && difference.abs().max(inner.abs()) > HUGE => f64::INFINITY,
            _ => {
                let of_difference = if sure { 0.0 } else { g.error + a.error + difference.abs() };
                let of_product = b.error * h.value.abs() + b.value.abs() * h.error;
                let error = if exact { 0.0 } else { of_difference + of_product + inner.abs() + FLOOR };
                norm.r * error + value.abs() * (norm.r_error + 1.0) + FLOOR
            }
        };
        (value, condition)
    };
    h.iter().zip(g).map(element).collect()
}
