//! `softmax_backward`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::softmax_backward::OP,
    class: Class::Reduction,
    fills: softmax::SPEC.fills,
    table: include_str!("../../ops/softmax_backward.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    if maker.fill == Fill::Classes {
        return classes(maker, r, n);
    }
    if maker.fill == Fill::Power {
        let (x, dy) = power(maker, r, n);
        return maker.floats([("x", vec![r, n], x), ("dy", vec![r, n], dy)]);
    }
    let mut inputs = match in_turns(maker.fill) {
        true => maker.floats([("x", vec![r, n], turned(maker, "x", [maker.fill, Fill::Normal], r, n))]),
        false => softmax::make(maker),
    };
    let dy = match maker.fill {
        Fill::Peaky => maker.values("dy", Fill::Normal, r * n, n),
        // A pair of shares has their product, see `sharp.rs`.
        Fill::Sharp => (0..r * n).map(|i| if i % n == 0 { 1.0 } else { 0.0 }).collect(),
        fill if in_turns(fill) => turned(maker, "dy", [Fill::Normal, fill], r, n),
        fill => maker.values("dy", fill, r * n, n),
    };
    inputs.extend(maker.floats([("dy", vec![r, n], dy)]));
    inputs
}

/// In even rows shares that are lost beside the largest, whose gradients are so large that they are seen in fp16; in odd rows
/// one share of about a half, whose gradient is 0, and some 128 that differ little, whose gradients are masks; the others are
/// nothing, so that in no order the roundings of the shares add up.
fn power(maker: &Maker, r: usize, n: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut x, draw) = (power::logits(maker, "x", r, n), maker.draw("dy"));
    let sign = |i: usize| if draw.below(i, 2) == 0 { power::MASS } else { -power::MASS };
    let mut dy: Vec<f64> = x.iter().enumerate().map(|(i, &x)| if x == power::TOP { 0.0 } else { sign(i) }).collect();
    for row in (1..r).step_by(2) {
        let (x, dy) = (&mut x[row * n..][..n], &mut dy[row * n..][..n]);
        let half = draw.below(r * n + row, n);
        // The last colour is of those that have no share.
        let kept = |i: usize| i != half && draw.below((r + row) * n + i, n) < 128;
        let colours: Vec<usize> = (0..n).map(|i| if kept(i) { i % 64 } else { 64 }).collect();
        dy.copy_from_slice(&power::mask(&draw, row, &colours));
        for i in 0..n {
            (x[i], dy[i]) = match colours[i] {
                64 => (f64::NEG_INFINITY, 0.0),
                colour => (colour as f64 / 128.0, dy[i]),
            };
        }
        x[half] = 5.5;
    }
    (x, dy)
}

/// Whether a fill of one input alone leaves something to see: then ten rows of the one have it, and ten of the other.
pub(super) fn in_turns(fill: Fill) -> bool {
    matches!(fill, Fill::Edges | Fill::Tiny | Fill::NearOverflow)
}

/// Ten rows of the first fill, ten of the second, and so on. Numbers near overflow are those of softmax: their exponents
/// are f32 too.
pub(super) fn turned(maker: &Maker, name: &str, fills: [Fill; 2], rows: usize, n: usize) -> Vec<f64> {
    let both = fills.map(|fill| maker.values(name, fill, rows * n, n));
    let halved = fills[0] == Fill::NearOverflow && maker.dtype != DType::Fp16;
    let value = |i: usize| match i / n / 10 % 2 {
        0 if halved => both[0][i] / 2.0,
        turn => both[turn][i],
    };
    (0..rows * n).map(value).collect()
}

/// Two equal shares, of which the first has a quarter of the difference of two gradients and the second minus that; a
/// third element has no share, and a gradient of either sign.
fn classes(maker: &Maker, r: usize, n: usize) -> BTreeMap<String, Tensor> {
    let borders = Maker { dtype: DType::Fp32, ..*maker }.borders();
    let mut pairs: Vec<[f64; 2]> = borders.iter().flat_map(|&v| [[4.0 * v, 0.0], [2.0 * v, -2.0 * v]]).collect();
    // The largest fp16 number, and a zero of each sign.
    pairs.extend([[262144.0, 128.0], [f64::INFINITY, 0.0], [f64::NEG_INFINITY, 0.0], [1.0, 1.0]]);
    let pairs = maker.held(&pairs, |pair| pair);
    let none = f64::NEG_INFINITY;
    let (mut x, mut dy) = (vec![none; r * n], vec![0.0; r * n]);
    let rows = x.chunks_mut(n).zip(dy.chunks_mut(n));
    for (i, ((x, dy), pair)) in rows.zip(pairs.iter().cycle()).enumerate() {
        x[..2].fill(0.0);
        dy[..2].copy_from_slice(pair);
        dy[2] = if i % 2 == 0 { 1.0 } else { -1.0 };
    }
    // The last rows: shares whose product is small out of any dtype.
    let small = [[0.0, -32.0, -40.0], [0.0, SMALLEST[0], SMALLEST[1]]].into_iter().zip([round::pow2(-24), SMALLEST[2]]);
    for (i, (logits, tiny)) in small.enumerate() {
        let at = (r - 1 - i) * n;
        x[at..][..3].copy_from_slice(&logits);
        dy[at..][..3].copy_from_slice(&[0.0, tiny, 0.0]);
    }
    maker.floats([("x", vec![r, n], x), ("dy", vec![r, n], dy)])
}

/// Two logits beside 0 and a gradient, of which f32 makes the smallest normal number; all are fp16.
const SMALLEST: [f64; 3] = [-15.2734375, -65.8125, 0.001_929_283_142_089_843_8];

fn compute(c: &Checked) -> References {
    let (r, n) = (c.dim("R"), c.dim("N"));
    let (x, dy) = (c.floats("x"), c.floats("dy"));
    let elements: Vec<_> = x.chunks(n).zip(dy.chunks(n)).flat_map(|(x, dy)| row(x, dy)).collect();
    one("dx", Reference::new(vec![r, n], elements))
}

/// Whether a share is 0.
#[derive(Clone, Copy, PartialEq)]
enum Zero {
    Surely,
    Perhaps,
    No,
}

fn row(x: &[f64], dy: &[f64]) -> Vec<(f64, f64)> {
    let shares = softmax::shares(x);
    if shares.iter().any(|(p, error)| p.is_nan() || error.is_infinite()) {
        return shares;
    }
    let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let zero = |x: f64| match (x - top) * std::f64::consts::LOG2_E {
        // Beside logits of some size, exponents are less certain.
        _ if top.abs() > 1e6 && x != top && x.is_finite() => Zero::Perhaps,
        // What drops no weight has one down to here.
        below if below < -152.0 => Zero::Surely,
        below if below < -98.0 => Zero::Perhaps,
        _ => Zero::No,
    };
    let zeros: Vec<Zero> = x.iter().map(|&x| zero(x)).collect();
    // Infinity times what may be 0.
    let unknown = zeros.iter().zip(dy).any(|(zero, dy)| *zero == Zero::Perhaps && dy.is_infinite());
    if unknown && !dy.iter().any(|dy| dy.is_nan()) {
        return vec![(f64::NAN, f64::INFINITY); x.len()];
    }
    let share = |j: usize| if zeros[j] == Zero::Surely { 0.0 } else { shares[j].0 };
    let (sum, rounding) = sum_of((0..x.len()).map(|j| share(j) * dy[j]));
    // Equal shares of a power of two have no error.
    let equal = x.iter().filter(|x| **x != f64::NEG_INFINITY).all(|x| *x == top);
    let exact = equal && x.iter().filter(|x| **x == top).count().is_power_of_two();
    let moved: f64 = dy.iter().zip(&shares).filter(|(dy, _)| dy.is_finite()).map(|(dy, (_, p))| p * dy.abs()).sum();
    let error = if exact || !sum.is_finite() { rounding } else { moved + FLOOR * x.len() as f64 };
    let element = |j: usize| {
        let (p, dy) = (share(j), dy[j]);
        let (difference, value) = (dy - sum, p * (dy - sum));
        let size = if sum.is_finite() { dy.abs() + sum.abs() } else { 0.0 };
        let condition = match zeros[j] {
            // What is NaN is so in any order, if no sum on the way may be infinite.
            _ if value.is_nan() => 0.0,
            _ if error.is_infinite() || size.is_finite() && size > HUGE => f64::INFINITY,
            Zero::Perhaps if difference.is_infinite() => f64::INFINITY,
            _ if difference.is_infinite() => 0.0,
            // Its sign is that of the difference.
            Zero::Surely if difference.abs() > (error + size) * round::pow2(-16) => 0.0,
            Zero::Surely if error == 0.0 && f32_of(difference) == difference => 0.0,
            _ if exact && error == 0.0 && f32_of(difference) == difference && f32_of(value) == value => 0.0,
            _ => {
                let own = if exact { p } else { shares[j].1 };
                own * difference.abs() + p * (difference.abs() + error) + FLOOR
            }
        };
        (value, condition)
    };
    (0..x.len()).map(element).collect()
}
