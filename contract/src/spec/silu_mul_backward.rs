//! `silu_mul_backward`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::silu_mul_backward::OP,
    class: Class::Elementwise,
    fills: silu_mul::SPEC.fills,
    table: include_str!("../../ops/silu_mul_backward.toml"),
    make: |maker| make(maker, sharp::silu),
    compute: |c| compute(c, slope, silu_mul::element),
};

/// `sharp` makes the gates of that fill.
pub(super) fn make(maker: &Maker, sharp: fn(usize) -> Vec<f64>) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let columns = if maker.fill == Fill::Classes {
        let triples = triples(maker);
        [0, 1, 2].map(|i| triples.iter().cycle().take(r * n).map(|triple| triple[i]).collect())
    } else {
        let gate = match maker.fill {
            Fill::Sharp => sharp(r * n),
            fill => maker.values("gate", fill, r * n, n),
        };
        let [up, dy] = ["up", "dy"].map(|name| match maker.fill {
            Fill::AllBf16 | Fill::Sharp => vec![1.0; r * n],
            Fill::Tiny | Fill::NearOverflow => maker.values(name, Fill::Normal, r * n, n),
            fill => maker.values(name, fill, r * n, n),
        });
        [gate, up, dy]
    };
    let [gate, up, dy] = columns;
    maker.floats([("gate", vec![r, n], gate), ("up", vec![r, n], up), ("dy", vec![r, n], dy)])
}

/// Products that are borders where the sigmoid is 1 and the slope too; borders on any side; a sigmoid that is nearly lost.
fn triples(maker: &Maker) -> Vec<[f64; 3]> {
    let borders = maker.borders();
    let products: Vec<[f64; 3]> =
        borders.iter().flat_map(|&v| [[64.0, 64.0, v / 64.0], [1024.0, 1024.0, v / 1024.0], [64.0, v, 1.0]]).collect();
    let others = [
        // The largest fp16 number out of bf16 numbers.
        [64.0, 736.0, 89.0],
        [64.0, -736.0, 89.0],
        [89.0, 1.0, 736.0],
        [89.0, 1.0, -736.0],
        // Subnormals and the smallest normal bf16 out of fp16 numbers, by silu and by gelu.
        [-80.0, 1.0, round::pow2(-20)],
        [-80.0, 138.0 * round::pow2(-24), 1.0],
        [-80.0, 1.0, 137.0 * round::pow2(-24)],
        [-9.75, 1.0, round::pow2(-16)],
        [-9.75, round::pow2(-16), 1.0],
        [-9.75, 279.0 * round::pow2(-24), 1.0],
        [-9.75, 1.0, 1525.0 * round::pow2(-22)],
        [-1.0, 0.0, 1.0],
        [-1.0, 1.0, 0.0],
        [f64::INFINITY, 0.0, 0.0],
    ];
    let mut triples = maker.held(&products, |triple| triple);
    triples.extend(maker.held(&others, |triple| triple));
    triples.extend(borders.iter().flat_map(|&v| [[v, 1.0, 1.0], [1.0, 1.0, v]]));
    triples
}

/// The derivative of an activation at a gate.
pub(super) struct Slope {
    pub value: f64,
    /// What its rounding errors are proportional to.
    pub size: f64,
    /// Whether the sigmoid may be lost whole: it nears the end of the f32 range.
    pub lost: bool,
}

/// What rounding errors of `1 - s` come to, in the units of a condition: those of s, as far as it is not 1.
pub(super) fn rest(s: f64, one_less_s: f64) -> f64 {
    s.min(one_less_s * round::pow2(25))
}

/// That of `g * sigmoid(g)`: `s (1 + g (1 - s))`.
pub(super) fn slope(g: f64) -> Slope {
    let (s, rest_of_s) = (1.0 / (1.0 + (-g).exp()), 1.0 / (1.0 + g.exp()));
    Slope {
        value: s * (1.0 + g * rest_of_s),
        size: s * (1.0 + g.abs() * (rest_of_s + rest(s, rest_of_s))),
        lost: g < -87.0,
    }
}

/// `act(g, dy)` is value and condition of `act(g) * dy`.
pub(super) fn compute(c: &Checked, slope: fn(f64) -> Slope, act: fn(f64, f64) -> (f64, f64)) -> References {
    let [gate, up, dy] = ["gate", "up", "dy"].map(|name| c.floats(name));
    let shape = c.case.inputs["gate"].shape().to_vec();
    let dgate = gate.iter().zip(&up).zip(&dy).map(|((&g, &u), &dy)| dgate(g, u * dy, slope(g)));
    let dup = gate.iter().zip(&dy).map(|(&g, &dy)| match act(g, dy) {
        // Infinity times what may be 0.
        _ if dy.is_infinite() && g.is_finite() && slope(g).lost => (f64::NAN, f64::INFINITY),
        known => known,
    });
    BTreeMap::from([
        ("dgate".to_string(), Reference::new(shape.clone(), dgate.collect::<Vec<_>>())),
        ("dup".to_string(), Reference::new(shape, dup.collect::<Vec<_>>())),
    ])
}

/// Value and condition of `product * slope` at the gate g.
pub(super) fn dgate(g: f64, product: f64, slope: Slope) -> (f64, f64) {
    let value = product * slope.value;
    let exact = f32_of(product) == product;
    // The slope is 1 in every arithmetic that has f32.
    if g >= 64.0 && g.is_finite() && exact {
        return (product, 0.0);
    }
    let known = slope.value.abs() > slope.size * round::pow2(-16) && !slope.lost;
    let condition = match () {
        _ if !g.is_finite() || product.is_nan() => 0.0,
        // The sign of 0, or infinity times what may be 0.
        _ if product == 0.0 || product.is_infinite() => {
            if known {
                0.0
            } else {
                f64::INFINITY
            }
        }
        _ if product.abs() > HUGE => f64::INFINITY,
        // The slope is 1/2.
        _ if g == 0.0 && exact && f32_of(value) == value => 0.0,
        _ => {
            let lost = if slope.lost { value.abs() * round::pow2(24) } else { 0.0 };
            product.abs() * slope.size + lost + FLOOR * (1.0 + product.abs()) * (1.0 + g.abs())
        }
    };
    (value, condition)
}
