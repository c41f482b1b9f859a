//! `penalize`: the inputs of its cases and its oracle.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::penalize::OP,
    class: Class::Elementwise,
    fills: PLAIN,
    table: include_str!("../../ops/penalize.toml"),
    make,
    compute,
};

/// Rows are prefixes of one text, parts of it, and nothing; half of the tokens are few, over and over. Every seventh token is
/// banned where there is a bias. Classes are those of the bias, and no penalty changes them.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let [r, v, s] = ["R", "V", "S"].map(|axis| maker.dim(axis));
    let wide = Maker { dtype: DType::Fp32, ..*maker };
    let classes = maker.fill == Fill::Classes;
    let logits = if classes { vec![-0.0; r * v] } else { maker.values("logits", maker.fill, r * v, v) };
    let mut inputs = maker.floats([("logits", vec![r, v], logits)]);
    if maker.has("bias") {
        let drawn = wide.values("bias", Fill::Normal, r * v, v).into_iter().enumerate();
        let banned = drawn.map(|(i, b)| if i % v % 7 == 5 { f64::NEG_INFINITY } else { b });
        let bias = if classes { wide.borders_from(0, r * v) } else { banned.collect() };
        inputs.extend(wide.floats([("bias", vec![r, v], bias)]));
    }
    let (any, few) = (maker.below("tokens", s, v), maker.below("few", s, v.min(4)));
    let tokens = (0..s).map(|i| if i % 2 == 0 { few[i] } else { any[i] }).collect();
    inputs.insert("tokens".into(), Tensor::i32(&[s], tokens));
    let places: Vec<[usize; 3]> = (0..r)
        .map(|row| match row % 5 {
            0 => [0, s / 2, s],
            1 => [0, s / 2, (s / 2 + row).min(s)],
            2 => [s / 3, s / 3, s],
            3 => [s / 2, s, s / 2],
            _ => [s / 4, s, s],
        })
        .collect();
    for (at, name) in ["begin", "prompt_end", "end"].into_iter().enumerate() {
        let each = places.iter().map(|places| places[at] as i32).collect();
        inputs.insert(name.into(), Tensor::i32(&[r], each));
    }
    let by = [
        ("repetition", [1.3, 1.0, 0.7, 1.1, 2.0], 1.0),
        ("frequency", [0.5, 0.0, -0.25, 1.7, 0.1], 0.0),
        ("presence", [0.3, -0.6, 0.0, 1.1, 0.0], 0.0),
    ];
    for (name, values, neutral) in by {
        let each = (0..r).map(|row| if classes { neutral } else { values[row * 2 % 5] }).collect();
        inputs.extend(wide.floats([(name, vec![r], each)]));
    }
    inputs
}

/// Every step is rounded to f32, which is part of the definition; sums, products and quotients of two f32 in f64 are then those
/// of f32.
fn compute(c: &Checked) -> References {
    let [r, v] = ["R", "V"].map(|axis| c.dim(axis));
    let bias = c.case.inputs.get("bias").map(Tensor::to_f64);
    let [repetition, frequency, presence] = ["repetition", "frequency", "presence"].map(|name| c.floats(name));
    let logits = c.floats("logits");
    let element = |i: usize| {
        let (row, token) = (i / v, (i % v) as i32);
        let [begin, prompt_end, end] = ["begin", "prompt_end", "end"].map(|name| c.ints(name)[row] as usize);
        let places = (begin..end).filter(|at| c.ints("tokens")[*at] == token);
        let (of_prompt, of_output): (Vec<_>, Vec<_>) = places.partition(|at| *at < prompt_end);
        let mut z = logits[i];
        if let Some(bias) = &bias {
            z = f32_of(z + bias[i]);
        }
        if !of_prompt.is_empty() || !of_output.is_empty() {
            z = f32_of(if z < 0.0 { z * repetition[row] } else { z / repetition[row] });
        }
        if !of_output.is_empty() {
            z = f32_of(z - f32_of(frequency[row] * of_output.len() as f64));
            z = f32_of(z - presence[row]);
        }
        z
    };
    one("y", Reference::exact(vec![r, v], (0..r * v).map(element).collect()))
}
