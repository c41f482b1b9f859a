//! `rms_norm_backward`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::rms_norm_backward::OP,
    class: Class::Reduction,
    fills: rms_norm::SPEC.fills,
    table: include_str!("../../ops/rms_norm_backward.toml"),
    make: |maker| make(maker, "x"),
    compute,
};

/// `name` is what the op calls the input of the norm.
pub(super) fn make(maker: &Maker, name: &str) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let [x, w, dy] = rows(maker, r, n);
    maker.floats([(name, vec![r, n], x), ("w", vec![n], w), ("dy", vec![r, n], dy)])
}

/// x, w and dy.
pub(super) fn rows(maker: &Maker, r: usize, n: usize) -> [Vec<f64>; 3] {
    if maker.fill == Fill::Classes {
        let (x, dy) = known_rows(maker, r, n);
        let mut w = vec![1.0; n];
        w[n - 1] = 89.0;
        return [x, w, dy];
    }
    if maker.fill == Fill::Power {
        return power::gradient_rows(maker, r, n);
    }
    let mut x = maker.values("x", maker.fill, r * n, n);
    rms_norm::near_root(maker, &mut x);
    [x, maker.values("w", Fill::Normal, n, n), gradients(maker, "dy", r * n, n)]
}

/// Gradients of ordinary size beside an x near the end of the range.
pub(super) fn gradients(maker: &Maker, name: &str, len: usize, row: usize) -> Vec<f64> {
    let fill = if [Fill::NearOverflow, Fill::Cancel].contains(&maker.fill) { Fill::Normal } else { maker.fill };
    maker.values(name, fill, len, row)
}

/// Rows x and dy: 2, 0, 0, 0, -2, 0, 0, 0 and so on, whose r is 1 without eps. Where dy is 0 beside what is not, dx is g:
/// borders, and last the largest fp16 number as a product. An infinite dy, and NaN, take all of a row.
fn known_rows(maker: &Maker, r: usize, n: usize) -> (Vec<f64>, Vec<f64>) {
    let mut borders = maker.borders().into_iter().filter(|v| v.is_finite()).collect::<Vec<_>>().into_iter().cycle();
    let x = |column: usize| [2.0, 0.0, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0][column % 8];
    let mut dy = |row: usize, column: usize| match (row % 4, column) {
        (2, 0) => f64::INFINITY,
        (3, 0) => f64::NAN,
        (2 | 3, _) => 1.0,
        (_, column) if x(column) != 0.0 => -0.0,
        (_, column) if column + 1 == n => 736.0,
        _ => borders.next().expect("it has no end"),
    };
    let places = (0..r * n).map(|i| (i / n, i % n));
    places.map(|(row, column)| (x(column), dy(row, column))).unzip()
}

fn compute(c: &Checked) -> References {
    let shape = vec![c.dim("R"), c.dim("N")];
    one("dx", Reference::new(shape, elements(c, &c.floats("x"), &exact(c.floats("dy")))))
}

/// Gradients without an error.
pub(super) fn exact(dy: Vec<f64>) -> Vec<Product> {
    dy.into_iter().map(|value| Product { value, error: 0.0 }).collect()
}

/// A product that is rounded to f32, and its error in units of 2^-24; infinite where it may overflow.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub value: f64,
    pub error: f64,
}

impl Product {
    /// `a * b`, of which b has this relative error.
    pub fn of(a: f64, b: f64, b_error: f64) -> Product {
        let value = a * b;
        let error = match () {
            _ if value == 0.0 && (a == 0.0 || b == 0.0) || !value.is_finite() => 0.0,
            _ if b_error == 0.0 && f32_of(value) == value => 0.0,
            _ if value.abs() > HUGE => f64::INFINITY,
            _ => value.abs() * (1.0 + b_error) + FLOOR,
        };
        Product { value, error }
    }

    /// The product by a b of this relative error.
    fn times(self, b: f64, b_error: f64) -> Product {
        let product = Product::of(self.value, b, b_error);
        let inherited = match self.error {
            0.0 => 0.0,
            error if error.is_infinite() => error,
            error => error * b.abs() + FLOOR,
        };
        Product { error: product.error + inherited, ..product }
    }
}

/// Value and condition of every element of the rows `x` with the gradients `dy`, under the parameters and w of `c`.
pub(super) fn elements(c: &Checked, x: &[f64], dy: &[Product]) -> Vec<(f64, f64)> {
    let (eps, offset) = (f32_of(c.float("eps")), c.flag("weight_offset"));
    let weight = |w: f64| {
        let weight = if offset { w + 1.0 } else { w };
        (weight, if f32_of(weight) == weight || weight.is_nan() { 0.0 } else { 1.0 })
    };
    let w: Vec<(f64, f64)> = c.floats("w").into_iter().map(weight).collect();
    let rows = x.chunks(w.len()).zip(dy.chunks(w.len()));
    let of_row = |(x, dy): (&[f64], &[Product])| {
        let g: Vec<Product> = dy.iter().zip(&w).map(|(dy, &(w, error))| dy.times(w, error)).collect();
        let row = Row::of(x, &g, eps);
        x.iter().zip(&g).map(|(&x, &g)| row.element(x, g)).collect::<Vec<_>>()
    };
    rows.flat_map(of_row).collect()
}

/// What is one for all elements of a row, with errors in units of 2^-24.
struct Row {
    r: f64,
    /// Relative; infinite where nothing is claimed of the row.
    r_error: f64,
    /// `c * r * r`
    k: f64,
    k_error: f64,
}

impl Row {
    fn of(x: &[f64], g: &[Product], eps: f64) -> Row {
        let n = x.len() as f64;
        let squares: f64 = x.iter().map(|v| v * v).sum();
        let mean = squares / n + eps;
        let r = 1.0 / mean.sqrt();
        // Squares below the smallest normal number lose bits; without eps that is felt.
        let mut r_error = 1.0 + FLOOR / mean + absorbed(x.iter().map(|v| v * v), squares);
        let (sum, size) = sum_of(x.iter().zip(g).map(|(x, g)| x * g.value));
        let of_products: f64 = x.iter().zip(g).filter(|(_, g)| g.error > 0.0).map(|(x, g)| x.abs() * g.error).sum();
        let c = sum / n;
        let c_error = (size + of_products) / n + if f32_of(c) == c { 0.0 } else { c.abs() + FLOOR };
        let k = (c * r) * r;
        let k_error = match c == 0.0 && c_error == 0.0 {
            true => 0.0,
            false => r * r * (c_error + 2.0 * c.abs() * (r_error + 1.0)) + FLOOR * (1.0 + r),
        };
        let overflows = squares > HUGE && x.iter().all(|v| v.is_finite())
            || g.iter().any(|g| g.error.is_infinite())
            || c_error.is_infinite()
            || c.is_finite() && k.abs() > HUGE;
        if overflows || r_error > round::pow2(16) {
            r_error = f64::INFINITY;
        }
        Row { r, r_error, k, k_error }
    }

    /// Value and condition of an element.
    fn element(&self, x: f64, g: Product) -> (f64, f64) {
        let inner = -self.k * x + g.value;
        let value = self.r * inner;
        // Where no product of g and x is there, the inner value is g.
        let exact = self.k == 0.0 && self.k_error == 0.0 && g.error == 0.0;
        let condition = match () {
            _ if value.is_nan() => 0.0,
            _ if self.r_error.is_infinite() => f64::INFINITY,
            _ if value.is_infinite() || exact && value == 0.0 => 0.0,
            _ if !exact && inner.abs() > HUGE => f64::INFINITY,
            _ => {
                let error = if exact { 0.0 } else { g.error + self.k_error * x.abs() + inner.abs() + FLOOR };
                self.r * error + value.abs() * (self.r_error + 1.0) + FLOOR
            }
        };
        (value, condition)
    }
}
