//! `softcap_backward`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::softcap_backward::OP,
    class: Class::Elementwise,
    fills: softcap::SPEC.fills,
    table: include_str!("../../ops/softcap_backward.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (r, n) = (maker.dim("R"), maker.dim("N"));
    let (x, dy) = match maker.fill {
        // At 0 the slope is 1, far off it is 0.
        Fill::Classes => {
            let borders = maker.borders();
            let mut pairs: Vec<[f64; 2]> = borders.iter().flat_map(|&v| [[0.0, v], [v, 1.0], [-64.0, v]]).collect();
            // The largest fp16 number, under a cap of 0.25.
            let near = f32_of(round::round(0.0055, maker.dtype));
            pairs.extend(maker.held(&[[near, 65536.0], [near, -65536.0]], |pair| pair));
            let column = |i: usize| pairs.iter().cycle().take(r * n).map(|pair| pair[i]).collect();
            (column(0), column(1))
        }
        Fill::Sharp => (sharp::softcap(r * n), vec![1.0; r * n]),
        Fill::AllBf16 => (maker.values("x", Fill::AllBf16, r * n, n), vec![1.0; r * n]),
        Fill::Tiny | Fill::NearOverflow => {
            (maker.values("x", maker.fill, r * n, n), maker.values("dy", Fill::Normal, r * n, n))
        }
        fill => (maker.values("x", fill, r * n, n), maker.values("dy", fill, r * n, n)),
    };
    maker.floats([("x", vec![r, n], x), ("dy", vec![r, n], dy)])
}

/// The square of the tangent has the error of 1, and so has what is left of 1.
fn compute(c: &Checked) -> References {
    let inverse = f32_of(1.0 / c.float("cap"));
    let elements = c.floats("x").into_iter().zip(c.floats("dy")).map(|(x, dy)| {
        // cosh^-2 does not cancel.
        let slope = (x * inverse).cosh().powi(-2);
        let value = dy * slope;
        // From 16 on the tangent is 1 in f32, from 6 to 16 it may be.
        let condition = match (x * inverse).abs() {
            _ if x.is_nan() || dy.is_nan() => 0.0,
            t if t >= 16.0 => return (dy * 0.0, 0.0),
            0.0 => 0.0,
            _ if dy == 0.0 => 0.0,
            t if dy.is_infinite() => {
                if t < 6.0 {
                    0.0
                } else {
                    f64::INFINITY
                }
            }
            _ => dy.abs() + FLOOR,
        };
        (value, condition)
    });
    one("dx", Reference::new(c.case.inputs["x"].shape().to_vec(), elements))
}
