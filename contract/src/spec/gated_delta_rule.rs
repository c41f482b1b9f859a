//! `gated_delta_rule`: the inputs of its cases and its oracle; and what its gradient has in common with it.
use super::causal_conv1d::{lengths, rows_of};
use super::ssd_scan::Num;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::gated_delta_rule::OP,
    class: Class::Reduction,
    fills: FILLS,
    table: include_str!("../../ops/gated_delta_rule.toml"),
    make,
    compute,
};

/// What the rule is asked. Its sums are of what the tokens before have left, so their terms cannot be chosen one by one.
pub(super) const FILLS: &[Fill] =
    &[Fill::Normal, Fill::Wide, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::Classes];

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let mut inputs = tokens(maker);
    let (of_values, of_state) = (of_values(maker), of_state(maker));
    let (mut v, mut state) = (written(maker, "v", &of_values), None);
    if maker.has("state") {
        state = Some(written(&Maker { dtype: DType::Fp32, ..*maker }, "state", &of_state));
    }
    if maker.fill == Fill::Classes {
        // The first sequence writes borders over a state of -0, the second keeps those of its state: its keys are 0.
        let (values, states) = (v.len() / of_values[0], of_state[1..].iter().product::<usize>());
        v = maker.borders_from(0, values);
        v.resize(values * of_values[0], -0.0);
        let mut first = vec![-0.0; states];
        first.extend(Maker { dtype: DType::Fp32, ..*maker }.borders_from(0, (of_values[0] - 1) * states));
        state = Some(first);
        let of_keys = inputs["k"].shape().to_vec();
        let len = of_keys.iter().product::<usize>();
        let k = (0..len).map(|i| if i < len / of_keys[0] { 1.0 } else { 0.0 }).collect();
        inputs.extend(maker.floats([("k", of_keys, k)]));
    }
    inputs.extend(maker.floats([("v", of_values, v)]));
    inputs.extend(state.map(|state| ("state".to_string(), round::tensor(DType::Fp32, &of_state, &state))));
    inputs
}

/// The shape of v and y.
pub(super) fn of_values(maker: &Maker) -> Vec<usize> {
    ["B", "T", "Hv", "E"].map(|axis| maker.dim(axis)).to_vec()
}

/// The shape of a state.
pub(super) fn of_state(maker: &Maker) -> Vec<usize> {
    ["B", "Hv", "D", "E"].map(|axis| maker.dim(axis)).to_vec()
}

/// Queries, keys of about length 1, decays between e^-2 and 1 or what they come of, betas between 0 and 1, and how many tokens
/// there are. Of classes: ones, and nothing is forgotten.
pub(super) fn tokens(maker: &Maker) -> BTreeMap<String, Tensor> {
    let [b, t, hk, heads, d, g] = ["B", "T", "Hk", "Hv", "D", "G"].map(|axis| maker.dim(axis));
    let (len, classes) = (b * t * hk * d, maker.fill == Fill::Classes);
    let normal = |name: &str, len: usize, row: usize| maker.values(name, Fill::Normal, len, row);
    let part = |name: &str, len: usize, of: f64| {
        let draw = maker.draw(name);
        (0..len).map(|i| draw.below(i, 1025) as f64 / of).collect::<Vec<_>>()
    };
    let q = match maker.fill {
        // A query alone sees what stands in it.
        Fill::Edges => maker.sparse_edges("q", len, 20 * d + 1),
        Fill::Classes => vec![1.0; len],
        _ => normal("q", len, d),
    };
    let k = if classes { vec![1.0; len] } else { normal("k", len, d).iter().map(|k| k / (d as f64).sqrt()).collect() };
    let (of_decays, of_betas) = (b * t * heads * g, b * t * heads);
    let decays = match maker.has("a_log") {
        true => normal("g", of_decays, g),
        _ if classes => vec![0.0; of_decays],
        _ => part("g", of_decays, -512.0),
    };
    let betas = if classes { vec![1.0; of_betas] } else { part("beta", of_betas, 1024.0) };
    let mut inputs = maker.floats([("q", vec![b, t, hk, d], q), ("k", vec![b, t, hk, d], k)]);
    let mut fp32 = |name: &str, shape: &[usize], values: &[f64]| {
        inputs.insert(name.into(), round::tensor(DType::Fp32, shape, values));
    };
    fp32("g", &[b, t, heads, g], &decays);
    fp32("beta", &[b, t, heads], &betas);
    for (name, shape) in [("a_log", &[heads][..]), ("dt_bias", &[heads, g])].into_iter().filter(|of| maker.has(of.0)) {
        let len = shape.iter().product();
        fp32(name, shape, &normal(name, len, len).iter().map(|v| v / 2.0).collect::<Vec<_>>());
    }
    if maker.has("len") {
        inputs.insert("len".into(), lengths(maker));
    }
    inputs
}

/// What is written to a state, or to the gradient of one, as wide or as small as the fill says; sums of products of it stay
/// within f32.
pub(super) fn written(maker: &Maker, name: &str, shape: &[usize]) -> Vec<f64> {
    let (len, row) = (shape.iter().product(), shape[2] * shape[3]);
    match maker.fill {
        Fill::NearOverflow if maker.dtype != DType::Fp16 => {
            maker.values(name, Fill::NearOverflow, len, row).into_iter().map(|v| v * round::pow2(-8)).collect()
        }
        Fill::Edges => maker.sparse_edges(name, len, 7 * row + 1),
        Fill::Classes => vec![0.0; len],
        fill => maker.values(name, fill, len, row),
    }
}

/// What a rule reads.
pub(super) struct Delta {
    /// B, T, Hk, Hv, D, E and G.
    pub dims: [usize; 7],
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    g: Vec<f64>,
    beta: Vec<f64>,
    a_log: Option<Vec<f64>>,
    dt_bias: Option<Vec<f64>>,
    state: Option<Vec<f64>>,
    pub scale: Num,
    /// Tokens of each sequence.
    pub lengths: Vec<usize>,
}

/// A token of a head, and what the rule makes of it; states by rows.
pub(super) struct Token {
    pub k: Vec<Num>,
    /// Scaled queries.
    pub w: Vec<Num>,
    pub beta: Num,
    /// What is left of each row.
    pub a: Vec<Num>,
    /// The logarithm of that, as many as a head has decays, and the derivative of the softplus that it comes of.
    pub l: Vec<Num>,
    pub slope: Vec<Num>,
    pub decayed: Vec<Num>,
    pub r: Vec<Num>,
    pub u: Vec<Num>,
    pub state: Vec<Num>,
}

impl Delta {
    pub fn of(c: &Checked) -> Delta {
        let [q, k, v, g, beta] = ["q", "k", "v", "g", "beta"].map(|name| c.floats(name));
        let [a_log, dt_bias, state] =
            ["a_log", "dt_bias", "state"].map(|name| c.case.inputs.get(name).map(Tensor::to_f64));
        let (dims, scale) = (["B", "T", "Hk", "Hv", "D", "E", "G"].map(|axis| c.dim(axis)), f32_of(c.float("scale")));
        Delta { dims, q, k, v, g, beta, a_log, dt_bias, state, scale: Num::exact(scale), lengths: rows_of(c) }
    }

    /// Where a token of a value head has its key, and which of the heads of all tokens it is.
    pub fn at(&self, b: usize, t: usize, h: usize) -> [usize; 2] {
        let [_, length, key_heads, heads, d, ..] = self.dims;
        let row = b * length + t;
        [(row * key_heads + h / (heads / key_heads)) * d, row * heads + h]
    }

    /// What the logarithm of a head's decays is a multiple of, where there is an a_log.
    pub fn rate(&self, h: usize) -> Option<Num> {
        self.a_log.as_ref().map(|a_log| Num::exact(a_log[h]).exp().negative())
    }

    /// A state of a head, or the gradient of one, by rows.
    pub fn state_of(&self, from: Option<&Vec<f64>>, b: usize, h: usize) -> Vec<Num> {
        let [_, _, _, heads, d, e, _] = self.dims;
        let at = (b * heads + h) * d * e;
        (0..d * e).map(|i| Num::exact(from.map_or(0.0, |from| from[at + i]))).collect()
    }

    /// The state that a head begins with, and its tokens.
    pub fn walk(&self, b: usize, h: usize) -> (Vec<Num>, Vec<Token>) {
        let [_, _, _, _, d, e, g] = self.dims;
        let begun = self.state_of(self.state.as_ref(), b, h);
        let (mut state, mut tokens) = (begun.clone(), Vec::new());
        for t in 0..self.lengths[b] {
            let [key, head] = self.at(b, t, h);
            let exact = |x: &[f64]| x.iter().map(|x| Num::exact(*x)).collect::<Vec<_>>();
            let (k, beta, mut l) =
                (exact(&self.k[key..][..d]), Num::exact(self.beta[head]), exact(&self.g[head * g..][..g]));
            let w: Vec<Num> = self.q[key..][..d].iter().map(|q| Num::exact(*q).times(self.scale)).collect();
            let mut slope = Vec::new();
            if let Some(rate) = self.rate(h) {
                if let Some(bias) = &self.dt_bias {
                    l.iter_mut().zip(&bias[h * g..]).for_each(|(x, bias)| *x = x.plus(Num::exact(*bias)));
                }
                let made = l.iter().map(|x| x.softplus()).collect::<Vec<_>>();
                slope = made.iter().map(|[_, slope]| *slope).collect();
                l = made.iter().map(|[softplus, _]| rate.times(*softplus)).collect();
            }
            let a: Vec<Num> = (0..d).map(|row| l[row.min(g - 1)].exp()).collect();
            let decayed: Vec<Num> = (0..d * e).map(|i| state[i].times(a[i / e])).collect();
            let read = |column: usize| Num::sum((0..d).map(|row| decayed[row * e + column].times(k[row])));
            let r: Vec<Num> = (0..e).map(|i| Num::exact(self.v[head * e + i]).plus(read(i).negative())).collect();
            let u: Vec<Num> = r.iter().map(|r| r.times(beta)).collect();
            state = (0..d * e).map(|i| k[i / e].times(u[i % e]).plus(decayed[i])).collect();
            tokens.push(Token { k, w, beta, a, l, slope, decayed, r, u, state: state.clone() });
        }
        (begun, tokens)
    }
}

fn compute(c: &Checked) -> References {
    let delta = Delta::of(c);
    let [b, t, _, heads, d, e, _] = delta.dims;
    let (mut y, mut next) = (vec![(0.0, 0.0); b * t * heads * e], Vec::new());
    for (entry, h) in (0..b * heads).map(|unit| (unit / heads, unit % heads)) {
        let (begun, tokens) = delta.walk(entry, h);
        for (at, token) in tokens.iter().enumerate() {
            let [_, head] = delta.at(entry, at, h);
            for column in 0..e {
                let sum = Num::sum((0..d).map(|row| token.state[row * e + column].times(token.w[row])));
                y[head * e + column] = sum.pair();
            }
        }
        next.extend(tokens.last().map_or(&begun, |token| &token.state).iter().map(|s| s.pair()));
    }
    BTreeMap::from([
        ("y".to_string(), Reference::new(vec![b, t, heads, e], y)),
        ("next".to_string(), Reference::new(vec![b, heads, d, e], next)),
    ])
}
