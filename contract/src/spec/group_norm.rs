//! `group_norm`: the inputs of its cases and its oracle.
use super::layer_norm::Norm;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::group_norm::OP,
    class: Class::Reduction,
    fills: layer_norm::SPEC.fills,
    table: include_str!("../../ops/group_norm.toml"),
    make,
    compute,
};

/// Groups of a case, and their elements.
pub(super) fn groups(maker: &Maker) -> [usize; 2] {
    let groups = maker.count("groups", 1);
    [maker.dim("B") * groups, maker.dim("C") / groups * maker.dim("P")]
}

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (shape, [groups, n]) = (["B", "C", "P"].map(|axis| maker.dim(axis)), groups(maker));
    let channels = shape[1];
    // As of layer_norm: half of them so large that what survives of a mask is seen in fp16.
    let factors = power::factors(&maker.draw("w"), channels).into_iter().enumerate();
    let factors: Vec<f64> = factors.map(|(i, w)| if i % 2 == 0 { w } else { w * 4096.0 }).collect();
    let of_element = |i: usize| if maker.has("w") { factors[i / shape[2]] } else { 1.0 };
    let x = match maker.fill {
        Fill::Power => power::centred_rows(maker, "x", groups, &(0..n).map(of_element).collect::<Vec<_>>()),
        // Groups that are exactly 1 and -1 after the norm without eps, so that the outputs are w and -w, and bias; and NaN.
        Fill::Classes => {
            let kinds = [[1.0, -1.0], [-2.0, 2.0], [-1.0, 1.0], [f64::NAN, 1.0]];
            (0..groups * n).map(|i| kinds[i / n % kinds.len()][i % n % 2]).collect()
        }
        _ => layer_norm::values(maker, groups, n),
    };
    let mut inputs = maker.floats([("x", shape.to_vec(), x)]);
    for name in ["w", "bias"].into_iter().filter(|name| maker.has(name)) {
        let values = match (maker.fill, name) {
            (Fill::Classes, "w") => [maker.borders_from(0, channels - 1), vec![65280.0]].concat(),
            // -0 changes nothing. Last, the largest fp16 number, which bf16 holds as two.
            (Fill::Classes, _) => [vec![-0.0; channels - 1], vec![-224.0]].concat(),
            (Fill::Power, "w") => factors.clone(),
            (Fill::Power, _) => vec![0.0; channels],
            _ => maker.values(name, Fill::Normal, channels, channels),
        };
        inputs.extend(maker.floats([(name, vec![channels], values)]));
    }
    inputs
}

fn compute(c: &Checked) -> References {
    let shape = ["B", "C", "P"].map(|axis| c.dim(axis));
    let (together, eps) = (shape[1] / c.count("groups"), f32_of(c.float("eps")));
    let given = |name| c.case.inputs.get(name).map(Tensor::to_f64);
    let (w, bias, x) = (given("w"), given("bias"), c.floats("x"));
    let groups = x.chunks(together * shape[2]).enumerate().flat_map(|(group, x)| {
        let norm = Norm::of(x, eps);
        let (w, bias) = (w.as_deref(), bias.as_deref());
        x.iter().enumerate().map(move |(i, &x)| {
            let channel = (group * together + i / shape[2]) % shape[1];
            let z = norm.element(x, w.map(|w| w[channel]), bias.map(|bias| bias[channel]));
            if c.flag("silu") { silu(z) } else { z }
        })
    });
    one("y", Reference::new(shape.to_vec(), groups.collect::<Vec<_>>()))
}

/// Value and condition of silu of a number that has these.
fn silu((z, condition): (f64, f64)) -> (f64, f64) {
    let (value, own) = silu_mul::element(z, 1.0);
    if condition == 0.0 || condition.is_infinite() {
        return (value, if condition == 0.0 { own } else { condition });
    }
    // The slope is at most 1.1, and where z is known well it is that at z.
    let known = condition < round::pow2(20);
    let slope = if known { 1.2 * silu_mul_backward::slope(z).size } else { 1.1 };
    (value, own + slope.min(1.1) * condition + FLOOR)
}
