//! `wkv7`: the inputs of its cases and its oracle; and what its gradient has in common with it.
use super::causal_conv1d::{lengths, rows_of};
use super::ssd_scan::Num;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::wkv7::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::Classes],
    table: include_str!("../../ops/wkv7.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let mut inputs = tokens(maker);
    if maker.fill == Fill::Classes {
        // The first sequence adds borders to a state of -0, the second keeps those of its state.
        let [b, t, h, d] = extents(maker);
        let len = t * h * d;
        let constant = |value: f64| vec![value; b * len];
        let mut v = maker.borders_from(0, len);
        v.resize(b * len, -0.0);
        let mut first = vec![-0.0; h * d * d];
        first.extend(Maker { dtype: DType::Fp32, ..*maker }.borders_from(0, (b - 1) * h * d * d));
        let shape = || vec![b, t, h, d];
        inputs.extend(maker.floats([("r", shape(), constant(1.0)), ("w", shape(), constant(0.0))]));
        inputs.extend(maker.floats([("k", shape(), constant(1.0)), ("v", shape(), v)]));
        inputs.extend(maker.floats([("a", shape(), constant(0.0)), ("b", shape(), constant(-0.0))]));
        inputs.insert("state".into(), round::tensor(DType::Fp32, &[b, h, d, d], &first));
    }
    inputs
}

pub(super) fn extents(maker: &Maker) -> [usize; 4] {
    ["B", "T", "H", "D"].map(|axis| maker.dim(axis))
}

/// All inputs: k of about length 1, a and b of half that, logarithms of decays below 0. What r reads and what is written, v and
/// the state, are as wide or as small as the fill says.
pub(super) fn tokens(maker: &Maker) -> BTreeMap<String, Tensor> {
    let [b, t, h, d] = extents(maker);
    let (len, length) = (b * t * h * d, (d as f64).sqrt());
    let of_tokens = |name: &str| {
        let normal = || maker.values(name, Fill::Normal, len, d).into_iter();
        match (name, maker.fill) {
            ("k", _) => normal().map(|v| v / length).collect(),
            ("a" | "b", _) => normal().map(|v| v / (2.0 * length)).collect(),
            // From nothing that is forgotten to nothing that is left.
            ("w", Fill::Wide) => normal().map(|v| -16.0 * v.abs()).collect(),
            ("w", _) => normal().map(|v| -0.5 * v.abs()).collect(),
            (_, Fill::Edges) => maker.sparse_edges(name, len, 13 * h * d + 1),
            ("v", fill) => written(maker, name, fill, len, d),
            _ => normal().collect(),
        }
    };
    let part = |name: &'static str| (name, vec![b, t, h, d], of_tokens(name));
    let mut inputs = maker.floats(["r", "w", "k", "v", "a", "b"].map(part));
    if maker.has("state") {
        inputs.insert("state".into(), state(maker, "state"));
    }
    if maker.has("len") {
        inputs.insert("len".into(), lengths(maker));
    }
    inputs
}

/// Sums of products of them stay within f32.
fn written(maker: &Maker, name: &str, fill: Fill, len: usize, d: usize) -> Vec<f64> {
    match fill {
        Fill::NearOverflow if maker.dtype != DType::Fp16 => {
            maker.values(name, fill, len, d).into_iter().map(|v| v * round::pow2(-8)).collect()
        }
        Fill::Classes => maker.values(name, Fill::Normal, len, d),
        fill => maker.values(name, fill, len, d),
    }
}

/// `name[B,H,D,D]` of f32.
pub(super) fn state(maker: &Maker, name: &str) -> Tensor {
    let [b, _, h, d] = extents(maker);
    let (len, wide) = (b * h * d * d, Maker { dtype: DType::Fp32, ..*maker });
    let state = match maker.fill {
        Fill::Edges => wide.sparse_edges(name, len, 3 * d * d / 2 + 1),
        fill => written(&wide, name, fill, len, d),
    };
    round::tensor(DType::Fp32, &[b, h, d, d], &state)
}

/// What a recurrence reads.
pub(super) struct Wkv {
    pub dims: [usize; 4],
    /// r, w, k, v, a and b.
    tokens: [Vec<f64>; 6],
    state: Option<Vec<f64>>,
    pub lengths: Vec<usize>,
}

/// A token of a head, and what a reads of the state before it.
pub(super) struct Token {
    pub r: Vec<Num>,
    pub left: Vec<Num>,
    pub k: Vec<Num>,
    pub v: Vec<Num>,
    pub a: Vec<Num>,
    pub b: Vec<Num>,
    pub sa: Vec<Num>,
}

impl Wkv {
    pub fn of(c: &Checked) -> Wkv {
        Wkv {
            dims: ["B", "T", "H", "D"].map(|axis| c.dim(axis)),
            tokens: ["r", "w", "k", "v", "a", "b"].map(|name| c.floats(name)),
            state: c.case.inputs.get("state").map(Tensor::to_f64),
            lengths: rows_of(c),
        }
    }

    /// Where a head of a token begins.
    pub fn at(&self, b: usize, t: usize, h: usize) -> usize {
        let [_, length, heads, d] = self.dims;
        ((b * length + t) * heads + h) * d
    }

    /// The tokens of a head, and its states by rows: before the first and behind each.
    pub fn walk(&self, b: usize, h: usize) -> (Vec<Token>, Vec<Vec<Num>>) {
        let [_, _, heads, d] = self.dims;
        let from = (b * heads + h) * d * d;
        let begun = (0..d * d).map(|i| Num::exact(self.state.as_ref().map_or(0.0, |state| state[from + i])));
        let (mut tokens, mut states): (Vec<Token>, _) = (Vec::new(), vec![begun.collect::<Vec<Num>>()]);
        for t in 0..self.lengths[b] {
            let at = self.at(b, t, h);
            let [r, w, k, v, a, of_b] =
                self.tokens.each_ref().map(|x| x[at..][..d].iter().map(|x| Num::exact(*x)).collect::<Vec<_>>());
            let (left, before) =
                (w.into_iter().map(Num::exp).collect::<Vec<_>>(), states.last().expect("there is one"));
            let sa: Vec<Num> = (0..d).map(|e| Num::sum((0..d).map(|row| before[row * d + e].times(a[row])))).collect();
            let after = (0..d * d).map(|i| {
                let (row, e) = (i / d, i % d);
                k[row].times(v[e]).plus(of_b[row].times(sa[e]).plus(before[i].times(left[row])))
            });
            let after = after.collect();
            states.push(after);
            tokens.push(Token { r, left, k, v, a, b: of_b, sa });
        }
        (tokens, states)
    }
}

fn compute(c: &Checked) -> References {
    let wkv = Wkv::of(c);
    let [b, t, h, d] = wkv.dims;
    let (mut y, mut next) = (vec![(0.0, 0.0); b * t * h * d], Vec::new());
    for (entry, head) in (0..b * h).map(|unit| (unit / h, unit % h)) {
        let (tokens, states) = wkv.walk(entry, head);
        for (at, (token, state)) in tokens.iter().zip(&states[1..]).enumerate() {
            for e in 0..d {
                let sum = Num::sum((0..d).map(|row| state[row * d + e].times(token.r[row])));
                y[wkv.at(entry, at, head) + e] = sum.pair();
            }
        }
        next.extend(states.last().expect("there is one").iter().map(|s| s.pair()));
    }
    BTreeMap::from([
        ("y".to_string(), Reference::new(vec![b, t, h, d], y)),
        ("next".to_string(), Reference::new(vec![b, h, d, d], next)),
    ])
}
