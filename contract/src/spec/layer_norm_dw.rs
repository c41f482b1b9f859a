//! `layer_norm_dw`: the inputs of its cases and its oracle.
use super::layer_norm::Norm;
use super::layer_norm_backward::normed;
use super::token_sum::{mask_and_carry, sums, term};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::layer_norm_dw::OP,
    class: Class::Reduction,
    fills: layer_norm::SPEC.fills,
    table: include_str!("../../ops/layer_norm_dw.toml"),
    make,
    compute,
};

/// For [`Fill::Classes`] rows of 1 and -1 in turns, whose mean is 0 and whose r is 1 without eps, and borders as gradients.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let (x, dy) = match maker.fill {
        Fill::Classes => {
            let x = (0..r * n).map(|i| if (i % n).is_multiple_of(2) { 1.0 } else { -1.0 });
            (x.collect(), maker.borders_from(0, r * n))
        }
        Fill::Power => {
            let [x, dy] = rms_norm_dw::rows(maker, r, n);
            (x, dy)
        }
        _ => (layer_norm::values(maker, r, n), rms_norm_backward::gradients(maker, "dy", r * n, n)),
    };
    let mut inputs = maker.floats([("x", vec![r, n], x), ("dy", vec![r, n], dy)]);
    inputs.extend(mask_and_carry(maker, r, [64, n]));
    inputs
}

fn compute(c: &Checked) -> References {
    let (n, eps) = (c.dim("N"), f32_of(c.float("eps")));
    let (x, dy) = (c.floats("x"), c.floats("dy"));
    let rows = x.chunks(n).zip(dy.chunks(n)).flat_map(|(x, dy)| {
        let norm = Norm::of(x, eps);
        x.iter().zip(dy).map(move |(&x, &dy)| {
            let (h, certain) = normed(&norm, x);
            let lost = !h.value.is_nan() && (norm.r_error.is_infinite() || dy.is_infinite() && !certain);
            term(dy, if lost { rms_norm_backward::Product { error: f64::INFINITY, ..h } } else { h })
        })
    });
    one("dw", sums(c, n, &rows.collect::<Vec<_>>()))
}
