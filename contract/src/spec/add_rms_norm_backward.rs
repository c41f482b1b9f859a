//! `add_rms_norm_backward`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::add_rms_norm_backward::OP,
    class: Class::Reduction,
    fills: rms_norm::SPEC.fills,
    table: include_str!("../../ops/add_rms_norm_backward.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let mut inputs = rms_norm_backward::make(maker, "sum");
    if maker.has("dsum") {
        let dsum = match maker.fill {
            // Added to the rows of known gradients: what changes nothing in the first four, then borders.
            Fill::Classes => [vec![-0.0; 4 * n], maker.borders_from(0, (r - 4) * n)].concat(),
            _ => rms_norm_backward::gradients(maker, "dsum", r * n, n),
        };
        inputs.extend(maker.floats([("dsum", vec![r, n], dsum)]));
    }
    inputs
}

fn compute(c: &Checked) -> References {
    let shape = vec![c.dim("R"), c.dim("N")];
    let mut elements = rms_norm_backward::elements(c, &c.floats("sum"), &rms_norm_backward::exact(c.floats("dy")));
    if c.case.inputs.contains_key("dsum") {
        for (element, dsum) in elements.iter_mut().zip(c.floats("dsum")) {
            *element = sum(*element, dsum);
        }
    }
    one("dx", Reference::new(shape, elements))
}

/// Value and condition of a gradient plus `dsum`.
fn sum((dx, condition): (f64, f64), dsum: f64) -> (f64, f64) {
    let value = dx + dsum;
    let condition = match () {
        // A gradient that may be infinite is added to an infinity.
        _ if dx.is_finite() && (dx.abs() > HUGE || condition.is_infinite()) && !dsum.is_nan() => f64::INFINITY,
        _ if value.is_nan() || value.is_infinite() => condition,
        _ if condition == 0.0 && f32_of(value) == value => 0.0,
        _ => condition + value.abs(),
    };
    (value, condition)
}
