//! `conv_dx`: the inputs of its cases and its oracle.
use super::conv::{Form, operands, size};
use super::gemm::sum_of;
use super::gemm_dx::transposed;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::conv_dx::OP,
    class: Class::Reduction,
    fills: conv::SPEC.fills,
    table: include_str!("../../ops/conv_dx.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let form = Form::of_maker(maker);
    let (dy, w) = match maker.fill {
        // One place and one tap: a product over outputs.
        Fill::Classes | Fill::Power => {
            assert!(form.groups == 1 && size(form.taps) == 1 && size(form.out) == 1, "{}: one place", maker.key);
            let (dy, w) = gemm::operands(maker, "dy", [form.batch, form.channels, form.outputs]);
            (dy, transposed(&w, form.outputs))
        }
        _ => operands(maker, "dy", [form.batch * form.outputs, size(form.out)], &form),
    };
    let mut inputs = maker.floats([("dy", form.y(), dy), ("w", form.w(), w)]);
    if maker.has("offset") {
        inputs.extend(maker.floats([(
            "offset",
            vec![form.channels],
            maker.values("offset", Fill::Normal, form.channels, form.channels),
        )]));
    }
    inputs
}

/// Every product of an element of dy goes to the place of x that its tap meets.
fn compute(c: &Checked) -> References {
    let form = Form::of_call(c);
    let (dy, w, offset) = (c.floats("dy"), c.floats("w"), c.case.inputs.get("offset").map(Tensor::to_f64));
    let (places, image, taps) = (size(form.out), size(form.image), size(form.taps));
    let (of_x, of_y) = (form.channels / form.groups, form.outputs / form.groups);
    // Which outputs meet a place, and by which tap.
    let mut meeting = vec![vec![None; taps]; image];
    for (q, t) in (0..places).flat_map(|q| (0..taps).map(move |t| (q, t))) {
        if let Some(at) = form.met(q, t) {
            meeting[at][t] = Some(q);
        }
    }
    let element = |i: usize| {
        let (b, channel, at) = (i / image / form.channels, i / image % form.channels, i % image);
        let first = channel / of_x * of_y;
        let terms = (0..of_y * taps).map(|k| {
            let (o, t) = (first + k / taps, k % taps);
            let dy = meeting[at][t].map_or(0.0, |q| dy[(b * form.outputs + o) * places + q]);
            w[(o * of_x + channel % of_x) * taps + t] * dy
        });
        sum_of(terms.chain(offset.as_ref().map(|offset| offset[channel])))
    };
    one("dx", Reference::new(form.x(), (0..form.batch * form.channels * image).map(element)))
}
