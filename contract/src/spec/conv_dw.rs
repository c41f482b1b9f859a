//! `conv_dw`: the inputs of its cases and its oracle.
use super::conv::{Form, operands, size};
use super::gemm::sum_of;
use super::gemm_dx::transposed;
use super::rms_norm_backward::{Product, exact, gradients};
use super::token_sum::{carry, chains, tokens};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::conv_dw::OP,
    class: Class::Reduction,
    fills: conv::SPEC.fills,
    table: include_str!("../../ops/conv_dw.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let form = Form::of_maker(maker);
    let k = form.channels / form.groups * size(form.taps);
    let (x, dy) = match maker.fill {
        // One window on all of an image: a product over images.
        Fill::Classes | Fill::Power => {
            assert!(form.groups == 1 && form.image == form.taps && size(form.out) == 1, "{}: one window", maker.key);
            let (dy, x) = gemm::operands(maker, "dy", [form.outputs, k, form.batch]);
            (transposed(&x, form.batch), transposed(&dy, form.batch))
        }
        _ => {
            let x = operands(maker, "x", [form.batch * form.channels, size(form.image)], &form).0;
            (x, gradients(maker, "dy", form.batch * form.outputs * size(form.out), size(form.out)))
        }
    };
    let mut inputs = maker.floats([("x", form.x(), x), ("dy", form.y(), dy)]);
    if maker.has("mask") {
        let mask = maker.ints("mask", maker.below("mask", form.batch, 3));
        inputs.insert("mask".into(), Tensor::i32(&[form.batch], mask));
    }
    let mut start = match maker.fill {
        // Nothing stands before masses that cancel.
        Fill::Power => vec![0.0; form.outputs * k],
        _ => carry(maker, [form.outputs, k])["carry"].to_f64(),
    };
    if maker.fill == Fill::Classes {
        // The row whose products are -0 all.
        start[(form.outputs - 1) * k..].fill(-0.0);
    }
    inputs.insert("carry".into(), round::tensor(DType::Fp32, &form.w(), &start));
    inputs
}

fn compute(c: &Checked) -> References {
    let form = Form::of_call(c);
    let (x, dy) = (c.floats("x"), c.floats("dy"));
    let (places, image, taps) = (size(form.out), size(form.image), size(form.taps));
    let (of_x, of_y) = (form.channels / form.groups, form.outputs / form.groups);
    let k = of_x * taps;
    let counted = tokens(c, form.batch * places);
    // The product of two f32 is exact in f64.
    let products = |o: usize| -> Vec<f64> {
        let mut products = Vec::with_capacity(counted.len() * k);
        for &token in &counted {
            let (b, q) = (token / places, token % places);
            let dy = dy[(b * form.outputs + o) * places + q];
            let met: Vec<Option<usize>> = (0..taps).map(|t| form.met(q, t)).collect();
            let first = b * form.channels + o / of_y * of_x;
            products.extend((0..k).map(|i| dy * met[i % taps].map_or(0.0, |at| x[(first + i / taps) * image + at])));
        }
        products
    };
    let terms: Vec<Vec<Product>> = (0..form.outputs).map(|o| exact(products(o))).collect();
    let dw = chains(c, vec![form.outputs, k], |o| terms[o].chunks(k.max(1)).collect());
    let dbias = dy.chunks(places).map(|dy| sum_of(dy.iter().copied()));
    BTreeMap::from([
        ("dw".to_string(), Reference { shape: form.w(), ..dw }),
        ("dbias".to_string(), Reference::new(vec![form.batch, form.outputs], dbias)),
    ])
}
