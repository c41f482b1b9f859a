//! `adamw`: the inputs of its cases and its oracle.
use super::inexact::Inexact;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::adamw::OP,
    class: Class::Elementwise,
    fills: PLAIN,
    table: include_str!("../../ops/adamw.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let values = |name: &str, fill| maker.values(name, fill, r * n, n);
    let scaled = |values: Vec<f64>, by: f64| values.into_iter().map(|v| v * by).collect::<Vec<f64>>();
    let [w, m, v, g] = match maker.fill {
        // One of w, g and v is a border, beside what changes nothing. m is -0, and so can be what becomes of it.
        Fill::Classes => {
            let borders = maker.borders();
            let turn =
                |i: usize, own: usize, other: f64| if i % 3 == own { borders[i / 3 % borders.len()] } else { other };
            let of = |own, other| (0..r * n).map(|i| turn(i, own, other)).collect::<Vec<f64>>();
            [of(0, 1.0), vec![-0.0; r * n], of(2, 1.0), of(1, 0.0)]
        }
        // Squares of gradients near the largest f32.
        Fill::NearOverflow => {
            let g = scaled(values("g", Fill::NearOverflow), round::pow2(-65));
            [values("w", Fill::Normal), values("m", Fill::Normal), scaled(values("v", Fill::Normal), 1e30), g]
        }
        Fill::Tiny => {
            ["w", "m", "v", "g"].map(|name| values(name, if name == "g" { Fill::Tiny } else { Fill::Normal }))
        }
        fill => ["w", "m", "v", "g"].map(|name| values(name, fill)),
    };
    // A second moment is not negative.
    let v = if maker.fill == Fill::Classes { v } else { v.into_iter().map(f64::abs).collect() };
    let all = [("w", w), ("m", m), ("v", v), ("g", g)];
    let mut inputs = maker.floats(all.map(|(name, values)| (name, vec![r, n], values)));
    if maker.has("factor") {
        inputs.extend(maker.floats([("factor", vec![1], vec![0.3])]));
    }
    inputs
}

fn compute(c: &Checked) -> References {
    let (b1, b2, n) = (c.float("beta1"), c.float("beta2"), c.count("step") as f64);
    let (lr, constant) = (c.float("lr"), |value: f64| Inexact::rounded(value, 0.0));
    // What is left of 1 has the error of the power, some roundings of f64.
    let left = |b: f64| 1.0 - b.powf(n);
    let of_left = |value: f64, b: f64| Inexact::rounded(value, value * (2.0 * n * round::pow2(-29) / left(b)).floor());
    let rate = of_left(lr / left(b1), b1);
    let unbias = of_left(1.0 / left(b2).sqrt(), b2);
    let keep = constant(1.0 - lr * c.float("weight_decay"));
    let eps = constant(c.float("eps"));
    let [w, m, v, g] = ["w", "m", "v", "g"].map(|name| c.floats(name));
    let factor = c.call.has("factor").then(|| Inexact::exact(c.floats("factor")[0]));
    let step = |i: usize| {
        let [w, m, v, g] = [&w, &m, &v, &g].map(|x| Inexact::exact(x[i]));
        let g = factor.map_or(g, |factor| g.times(factor));
        let m = constant(b1).times_plus(m, constant(1.0 - b1).times(g));
        let v = constant(b2).times_plus(v, constant(1.0 - b2).times(g).times(g));
        let u = m.over(v.root().times_plus(unbias, eps));
        [rate.negative().times_plus(u, w.times(keep)), m, v]
    };
    let elements: Vec<[Inexact; 3]> = (0..w.len()).map(step).collect();
    let shape = c.case.inputs["w"].shape();
    let output = |at: usize| Reference::new(shape.to_vec(), elements.iter().map(|all| all[at].element()));
    let names = [("new_w", 0), ("new_m", 1), ("new_v", 2), ("rounded", 0)];
    names.map(|(name, at)| (name.to_string(), output(at))).into()
}
