//! `causal_conv1d`: the inputs of its cases and its oracle; and what its gradients have in common with it.
use super::gemm::sum_of;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::causal_conv1d::OP,
    class: Class::Reduction,
    fills: TAPS,
    table: include_str!("../../ops/causal_conv1d.toml"),
    make,
    compute,
};

/// What sums of a few terms are asked: no order of so few stands out of the rounding of narrow outputs, whatever they are.
pub(super) const TAPS: &[Fill] =
    &[Fill::Normal, Fill::Wide, Fill::Cancel, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::Classes];

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (b, t, c, k) = (maker.dim("B"), maker.dim("T"), maker.dim("C"), maker.dim("K"));
    let mut inputs = maker.floats([("x", vec![b, t, c], rows(maker, "x")), ("w", vec![c, k], taps(maker))]);
    if maker.has("bias") {
        // Beside borders nothing is added but what leaves them.
        let bias = if maker.fill == Fill::Classes { vec![-0.0; c] } else { maker.values("bias", Fill::Normal, c, c) };
        inputs.extend(maker.floats([("bias", vec![c], bias)]));
    }
    if maker.has("state") {
        inputs.insert("state".into(), state(maker, "state"));
    }
    if maker.has("len") {
        inputs.insert("len".into(), lengths(maker));
    }
    inputs
}

/// `name[B,T,C]`.
pub(super) fn rows(maker: &Maker, name: &str) -> Vec<f64> {
    let (b, t, c, k) = (maker.dim("B"), maker.dim("T"), maker.dim("C"), maker.dim("K"));
    let len = b * t * c;
    match maker.fill {
        // Two rows alike, whose taps are nearly opposite.
        Fill::Cancel => {
            let values = maker.values(name, Fill::Normal, len, c);
            (0..len).map(|i| values[i / c / 2 * 2 * c % len + i % c]).collect()
        }
        // Sums of a few terms come near the largest f32; those of fp16 only overflow in the last rounding.
        Fill::NearOverflow if maker.dtype != DType::Fp16 => {
            maker.values(name, Fill::NearOverflow, len, c).into_iter().map(|v| v * round::pow2(-4)).collect()
        }
        Fill::Classes => classes(maker, [b * t, c, k]),
        fill => maker.values(name, fill, len, c),
    }
}

/// A border at every K-th row, and zeros, which no infinite border stands beside: each is seen alone by the last tap. The last
/// two channels, whose taps are all 1, hold what adds up to the largest f32, or to the largest fp16 number as a product;
/// the channel before them terms that underflow.
fn classes(maker: &Maker, [rows, c, k]: [usize; 3]) -> Vec<f64> {
    let pow = round::pow2;
    let borders = maker.borders();
    let parts = match maker.dtype {
        DType::Fp16 => [1.0, -1.0, 0.0],
        _ => [pow(128) - pow(120), pow(120) - pow(112), pow(112) - pow(104)],
    };
    let element = |row: usize, channel: usize| {
        let alone = row % k == k - 1;
        match c - channel {
            1 => parts.get(row % (2 * k)).copied().unwrap_or(0.0),
            2 => -parts.get(row % (2 * k)).copied().unwrap_or(0.0),
            3 => -small(maker),
            4 if alone => 736.0,
            _ if alone => borders[(row / k * (c - 4) + channel) % borders.len()],
            _ => 0.0,
        }
    };
    (0..rows * c).map(|i| element(i / c, i % c)).collect()
}

/// The product of the two is zero in narrow dtypes and not in f32.
fn small(maker: &Maker) -> f64 {
    round::pow2(if maker.dtype == DType::Fp16 { -14 } else { -40 })
}

fn tiny(maker: &Maker) -> f64 {
    round::pow2(if maker.dtype == DType::Fp16 { -20 } else { -100 })
}

/// `w[C,K]`.
pub(super) fn taps(maker: &Maker) -> Vec<f64> {
    let (c, k) = (maker.dim("C"), maker.dim("K"));
    match maker.fill {
        Fill::Cancel => {
            let mut w = maker.values("w", Fill::Normal, c * k, k);
            w.chunks_mut(k)
                .flat_map(|w| w.chunks_exact_mut(2))
                .for_each(|two| two[1] = -two[0] * (1.0 + two[1] / 256.0));
            w
        }
        Fill::Wide => maker.values("w", Fill::Wide, c * k, k),
        Fill::Edges => maker.sparse_edges("w", c * k, 10 * k + 1),
        Fill::Classes => {
            let factors = [1.0, -1.0, 89.0, 1.0];
            let tap = |channel: usize, j: usize| match c - channel {
                1 | 2 => 1.0,
                3 => tiny(maker),
                4 => 89.0,
                _ if j + 1 == k => factors[channel % factors.len()],
                _ => 0.0,
            };
            (0..c * k).map(|i| tap(i / k, i % k)).collect()
        }
        _ => maker.values("w", Fill::Normal, c * k, k),
    }
}

/// `name[B,K-1,C]` of f32: in classes, every border of f32.
pub(super) fn state(maker: &Maker, name: &str) -> Tensor {
    let shape = [maker.dim("B"), maker.dim("K") - 1, maker.dim("C")];
    let (len, wide) = (shape.iter().product(), Maker { dtype: DType::Fp32, ..*maker });
    let state = match maker.fill {
        Fill::Classes => wide.borders_from(0, len),
        Fill::Cancel => wide.values(name, Fill::Normal, len, shape[2]),
        Fill::NearOverflow => {
            wide.values(name, Fill::NearOverflow, len, shape[2]).into_iter().map(|v| v * round::pow2(-4)).collect()
        }
        fill => wide.values(name, fill, len, shape[2]),
    };
    round::tensor(DType::Fp32, &shape, &state)
}

/// Without explicit `len`: the sequences are ragged, entry b has T - 3b rows, none at least.
pub(super) fn lengths(maker: &Maker) -> Tensor {
    let (b, t) = (maker.dim("B"), maker.dim("T"));
    Tensor::i32(&[b], maker.ints("len", (0..b).map(|i| t.saturating_sub(3 * i) as i32).collect()))
}

/// How many rows each sequence has.
pub(super) fn rows_of(c: &Checked) -> Vec<usize> {
    match c.case.inputs.get("len").and_then(Tensor::as_i32) {
        Some(len) => len.iter().map(|&len| len as usize).collect(),
        None => vec![c.dim("T"); c.dim("B")],
    }
}

/// Rows of x behind those of the state, which are +0 where there is none: an element of a sequence.
pub(super) fn behind(c: &Checked) -> impl Fn(usize, usize, usize) -> f64 + use<> {
    let (t, all, before) = (c.dim("T"), c.dim("C"), c.dim("J"));
    let (x, state) = (c.floats("x"), c.case.inputs.get("state").map(Tensor::to_f64));
    move |b, row, channel| match (row.checked_sub(before), &state) {
        (Some(row), _) => x[(b * t + row) * all + channel],
        (None, Some(state)) => state[(b * before + row) * all + channel],
        (None, None) => 0.0,
    }
}

fn compute(c: &Checked) -> References {
    let (b, t, all, k, before) = (c.dim("B"), c.dim("T"), c.dim("C"), c.dim("K"), c.dim("J"));
    let (w, row, lengths) = (c.floats("w"), behind(c), rows_of(c));
    let bias = c.case.inputs.get("bias").map(Tensor::to_f64);
    let element = |i: usize| {
        let (entry, at, channel) = (i / all / t, i / all % t, i % all);
        if at >= lengths[entry] {
            return (0.0, 0.0);
        }
        let terms = (0..k).map(|j| w[channel * k + j] * row(entry, at + j, channel));
        sum_of(terms.chain(bias.as_ref().map(|bias| bias[channel])))
    };
    let last = |i: usize| row(i / all / before, lengths[i / all / before] + i / all % before, i % all);
    BTreeMap::from([
        ("y".to_string(), Reference::new(vec![b, t, all], (0..b * t * all).map(element))),
        ("next".to_string(), Reference::exact(vec![b, before, all], (0..b * before * all).map(last).collect())),
    ])
}
