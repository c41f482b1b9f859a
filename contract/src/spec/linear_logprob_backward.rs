//! `linear_logprob_backward`: the inputs of its cases and its oracle.
use super::gemm::sum_of;
use super::rms_norm_backward::Product;
use super::token_sum::{chain, chains, mask_and_carry, term, tokens};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::linear_logprob_backward::OP,
    class: Class::Reduction,
    fills: linear_logprob::SPEC.fills,
    table: include_str!("../../ops/linear_logprob_backward.toml"),
    make,
    compute,
};

/// x, w and targets are those of linear_logprob.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (m, v, k) = (maker.dim("M"), maker.dim("V"), maker.dim("K"));
    // What has a number for each row is f32.
    let wide = Maker { dtype: DType::Fp32, ..*maker };
    let own = matches!(maker.fill, Fill::Classes | Fill::Power);
    let mut inputs = if own { BTreeMap::new() } else { linear_logprob::make(maker) };
    inputs.extend(mask_and_carry(maker, m, [v, k]));
    if maker.fill == Fill::Power {
        power(maker, [m, v, k], &mut inputs);
        return inputs;
    }
    if maker.fill == Fill::Classes {
        classes(maker, [m, v, k], &mut inputs);
        return inputs;
    }
    let (x, w) = (inputs["x"].to_f64(), inputs["w"].to_f64());
    let sharp = maker.fill == Fill::Sharp;
    let level = |x: &[f64]| {
        let logits: Vec<f64> = (0..v).map(|j| x.iter().zip(&w[j * k..][..k]).map(|(x, w)| x * w).sum()).collect();
        // A sharp row shows the exponential of each logit but that of the target.
        if sharp && logits.iter().all(|z| *z < 64.0) { 0.0 } else { logprob_backward::level(&logits) }
    };
    let lse = x.chunks(k).map(level).collect();
    let gradient = |name: &str| match maker.fill {
        Fill::Sharp => vec![-1.0; m],
        Fill::Peaky => wide.values(name, Fill::Normal, m, 1),
        fill => wide.values(name, fill, m, 1),
    };
    inputs.extend(wide.floats([("lse", vec![m], lse), ("dlogprob", vec![m], gradient("dlogprob"))]));
    if maker.has("dlse") {
        inputs.extend(wide.floats([("dlse", vec![m], gradient("dlse"))]));
    }
    inputs
}

/// Logits of 0 and an lse of 0, so that every p is 1, and no targets: all gradients of the logits of a row are its dlse, 1, 2, 4
/// or 8. The first half of the columns of w are masks over the vocabulary, which are dx, and the second half of those of x over
/// tokens, which are dw.
fn power(maker: &Maker, [m, v, k]: [usize; 3], inputs: &mut BTreeMap<String, Tensor>) {
    let wide = Maker { dtype: DType::Fp32, ..*maker };
    let columns = |name: &str, colours: Vec<usize>, is_mask: &dyn Fn(usize) -> bool| {
        let (draw, rows) = (maker.draw(name), colours.len());
        let column =
            |column: usize| if is_mask(column) { power::mask(&draw, column, &colours) } else { vec![0.0; rows] };
        gemm_dx::transposed(&(0..k).flat_map(column).collect::<Vec<_>>(), rows)
    };
    let (x, w) = (
        columns("x", (0..m).map(|row| row % 4).collect(), &|column| column >= k / 2),
        columns("w", vec![0; v], &|column| column < k / 2),
    );
    inputs.extend(maker.floats([("x", vec![m, k], x), ("w", vec![v, k], w)]));
    let dlse = (0..m).map(|row| f64::from(1 << (row % 4))).collect();
    let rows = [("lse", vec![m], vec![0.0; m]), ("dlogprob", vec![m], vec![0.0; m]), ("dlse", vec![m], dlse)];
    inputs.extend(wide.floats(rows));
    inputs.insert("target".into(), Tensor::i32(&[m], maker.ints("target", vec![-1; m])));
}

/// Logits of 0 and an lse of 0, so that every p is 1, and no targets: all gradients of the logits of a row are its dlse. That
/// of the first row is 1, and the columns of w add up to a border each, or to the largest number of a dtype; those of the
/// others, which are no tokens, make infinities and NaN. dw is carry.
fn classes(maker: &Maker, [m, v, k]: [usize; 3], inputs: &mut BTreeMap<String, Tensor>) {
    let pow = round::pow2;
    let finite: Vec<f64> = maker.borders().into_iter().filter(|border| border.is_finite()).collect();
    let largest: &[f64] = match maker.dtype {
        DType::Fp16 => &[0.0],
        _ => &[pow(128) - pow(120), pow(120) - pow(112), pow(112) - pow(104)],
    };
    let mut w = vec![0.0; v * k];
    for (row, w) in w.chunks_mut(k).enumerate() {
        if row == 0 {
            w.iter_mut().zip(finite.iter().cycle()).for_each(|(w, border)| *w = *border);
        }
        w[k - 3] = 1.0;
        w[k - 2] = [65280.0, 224.0].get(row).copied().unwrap_or(0.0);
        w[k - 1] = largest.get(row).copied().unwrap_or(0.0);
    }
    // Products with it are -0, which changes no sum.
    inputs.extend(maker.floats([("x", vec![m, k], vec![-0.0; m * k]), ("w", vec![v, k], w)]));
    let kinds = [1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    let dlse = (0..m).map(|row| kinds[row % kinds.len()]).collect();
    let wide = Maker { dtype: DType::Fp32, ..*maker };
    let rows = [("lse", vec![m], vec![0.0; m]), ("dlogprob", vec![m], vec![0.0; m]), ("dlse", vec![m], dlse)];
    inputs.extend(wide.floats(rows));
    inputs.insert("target".into(), Tensor::i32(&[m], maker.ints("target", vec![-1; m])));
    let mask = (0..m).map(|row| i32::from(row % kinds.len() == 0)).collect();
    inputs.insert("mask".into(), Tensor::i32(&[m], maker.ints("mask", mask)));
}

fn compute(c: &Checked) -> References {
    let (m, v, k) = (c.dim("M"), c.dim("V"), c.dim("K"));
    let inverse = f32_of(1.0 / c.float("temperature"));
    let (x, w, lse, dlogprob) = (c.floats("x"), c.floats("w"), c.floats("lse"), c.floats("dlogprob"));
    let dlse = if c.call.has("dlse") { c.floats("dlse") } else { vec![0.0; m] };
    let dtype = c.case.inputs["x"].dtype();
    let mut dz = Vec::with_capacity(m * v);
    for (i, &target) in c.ints("target").iter().enumerate() {
        let target = usize::try_from(target).ok();
        let of_target = if target.is_some() { dlogprob[i] } else { 0.0 };
        let c = dlse[i] - of_target;
        dz.extend((0..v).map(|j| {
            let logit = sum_of(x[i * k..][..k].iter().zip(&w[j * k..][..k]).map(|(x, w)| x * w));
            // -0 changes no sum.
            let own = if target == Some(j) { of_target } else { -0.0 };
            stored(dtype, of_logit(logit, lse[i], c, own, inverse))
        }));
    }
    let dx = (0..m * k).map(|at| {
        let (i, column) = (at / k, at % k);
        chain(0.0, &(0..v).map(|j| term(w[j * k + column], dz[i * v + j])).collect::<Vec<_>>())
    });
    let dx = Reference::new(vec![m, k], dx.collect::<Vec<_>>());
    let counted = tokens(c, m);
    let terms: Vec<Vec<Product>> = (0..v)
        .map(|j| {
            counted
                .iter()
                .flat_map(|&t| x[t * k..][..k].iter().map(|&x| term(x, dz[t * v + j])).collect::<Vec<_>>())
                .collect()
        })
        .collect();
    let dw = chains(c, vec![v, k], |row| terms[row].chunks(k).collect());
    BTreeMap::from([("dx".to_string(), dx), ("dw".to_string(), dw)])
}

/// Value and condition of the gradient of a logit that is a sum with an error.
fn of_logit((logit, size): (f64, f64), level: f64, c: f64, own: f64, inverse: f64) -> (f64, f64) {
    let x = logprob::scaled(logit * inverse);
    let (value, condition) = logprob_backward::element(x, level, c, own, inverse);
    match () {
        _ if size == 0.0 => (value, condition),
        // What f32 may make of the logit is far from that of f64.
        _ if size.is_infinite() || size * inverse * round::pow2(-20) > 1.0 => (value, f64::INFINITY),
        _ if !value.is_finite() || condition.is_infinite() => (value, condition),
        _ => {
            let p = (x - level).exp();
            let moved = p * (size * inverse + x.abs()) * c.abs();
            // A probability that is cut off stays so.
            if condition == 0.0 && p < round::pow2(-102) { (value, 0.0) } else { (value, condition + moved * inverse) }
        }
    }
}

/// How many roundings of the condition may decide how a gradient is rounded: as many as a logit's bound has, that of gemm.
const REACH: f64 = 8.0;

/// A gradient as the products read it: rounded once. Where its error decides how, it may be either.
fn stored(dtype: DType, (value, condition): (f64, f64)) -> Product {
    if !value.is_finite() || condition.is_infinite() {
        return Product { value, error: if condition == 0.0 { 0.0 } else { f64::INFINITY } };
    }
    // One of f32 is not rounded, and its error is what the bound multiplies.
    let reach = if dtype == DType::Fp32 { 1.0 } else { REACH };
    let error = reach * condition * round::pow2(-24);
    let [low, high] = [value - error, value + error].map(|end| round::round(end, dtype));
    let value = round::round(value, dtype);
    let error = if low == high { 0.0 } else { (high - value).max(value - low) * round::pow2(24) };
    Product { value, error }
}
