//! `gated_delta_rule`: the inputs of its cases and its oracle; and what its gradient has in common with it.
use super::causal_conv1d::{lengths, rows_of};
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
    let mut inputs = keys(maker);
    let (b, t, h, e) = (maker.dim("B"), maker.dim("T"), maker.dim("Hv"), maker.dim("E"));
    inputs.extend(maker.floats([("v", vec![b, t, h, e], values(maker, "v"))]));
    if maker.has("state") {
        inputs.insert("state".into(), state(maker, "state"));
    }
    inputs
}

/// Queries, keys of about length 1, decays between e^-2 and 1, betas between 0 and 1, and how many tokens there are.
pub(super) fn keys(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (b, t, d, g) = (maker.dim("B"), maker.dim("T"), maker.dim("D"), maker.dim("G"));
    let (of_keys, heads) = ([b, t, maker.dim("Hk"), d], maker.dim("Hv"));
    let len = of_keys.iter().product();
    let (mut q, mut k) = (maker.values("q", Fill::Normal, len, d), maker.values("k", Fill::Normal, len, d));
    k.iter_mut().for_each(|k| *k /= (d as f64).sqrt());
    let part = |name: &str, len: usize, of: f64| {
        let draw = maker.draw(name);
        (0..len).map(|i| draw.below(i, 1025) as f64 / of).collect::<Vec<_>>()
    };
    let (mut decays, mut betas) = (part("g", b * t * heads * g, -512.0), part("beta", b * t * heads, 1024.0));
    match maker.fill {
        // A query alone sees what stands in it.
        Fill::Edges => q = maker.sparse_edges("q", len, 20 * d + 1),
        // Nothing is forgotten, and what is read is what was written, times as many as a key has elements.
        Fill::Classes => {
            [&mut q, &mut k, &mut betas].into_iter().for_each(|x| x.fill(1.0));
            decays.fill(0.0);
        }
        _ => {}
    }
    // Steps in time, from which decays come.
    let of_steps = |name: &str, len: usize| maker.values(name, Fill::Normal, len, len);
    if maker.has("a_log") {
        decays = of_steps("g", decays.len());
    }
    let mut inputs = maker.floats([("q", of_keys.to_vec(), q), ("k", of_keys.to_vec(), k)]);
    for (name, shape) in [("a_log", vec![heads]), ("dt_bias", vec![heads, g])] {
        if maker.has(name) {
            let values = of_steps(name, shape.iter().product()).into_iter().map(|v| v / 2.0).collect::<Vec<_>>();
            inputs.insert(name.into(), round::tensor(DType::Fp32, &shape, &values));
        }
    }
    inputs.insert("g".into(), round::tensor(DType::Fp32, &[b, t, heads, g], &decays));
    inputs.insert("beta".into(), round::tensor(DType::Fp32, &[b, t, heads], &betas));
    if maker.has("len") {
        inputs.insert("len".into(), lengths(maker));
    }
    inputs
}

/// `name[B,T,Hv,E]`. In classes all tokens but the last are 0, which has a border in each column.
pub(super) fn values(maker: &Maker, name: &str) -> Vec<f64> {
    let (b, t, row) = (maker.dim("B"), maker.dim("T"), maker.dim("Hv") * maker.dim("E"));
    let len = b * t * row;
    match maker.fill {
        Fill::NearOverflow if maker.dtype != DType::Fp16 => {
            maker.values(name, Fill::NearOverflow, len, row).into_iter().map(|v| v * round::pow2(-8)).collect()
        }
        Fill::Edges => maker.sparse_edges(name, len, 7 * row + 1),
        Fill::Classes => {
            let borders = maker.borders();
            let last = |i: usize| (i / row + 1).is_multiple_of(t);
            let element = |i: usize| if last(i) { borders[(i / row / t * row + i % row) % borders.len()] } else { 0.0 };
            (0..len).map(element).collect()
        }
        fill => maker.values(name, fill, len, row),
    }
}

/// `name[B,Hv,D,E]` of f32; -0 in classes.
pub(super) fn state(maker: &Maker, name: &str) -> Tensor {
    let shape = [maker.dim("B"), maker.dim("Hv"), maker.dim("D"), maker.dim("E")];
    let (len, wide) = (shape.iter().product(), Maker { dtype: DType::Fp32, ..*maker });
    let state = match maker.fill {
        Fill::Classes => vec![-0.0; len],
        Fill::NearOverflow => {
            wide.values(name, Fill::NearOverflow, len, shape[3]).into_iter().map(|v| v * round::pow2(-8)).collect()
        }
        Fill::Edges => wide.sparse_edges(name, len, 5 * shape[2] * shape[3] / 4 + 1),
        fill => wide.values(name, fill, len, shape[3]),
    };
    round::tensor(DType::Fp32, &shape, &state)
}

/// A value, and what its rounding errors are proportional to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sized {
    pub value: f64,
    pub size: f64,
}

impl Sized {
    /// As a reference states it: a NaN and an infinity are claimed unless some order may have overflowed before.
    pub fn reference(self) -> (f64, f64) {
        let Sized { value, size } = self;
        match () {
            // Nor is anything said of an unknown number times 0.
            _ if size.is_nan() || size > HUGE => (value, f64::INFINITY),
            _ if !value.is_finite() || size == 0.0 => (value, 0.0),
            _ => (value, size),
        }
    }
}

/// The magnitude of a number; that of an infinity and of NaN says nothing of rounding.
pub(super) fn magnitude(x: f64) -> f64 {
    if x.is_finite() { x.abs() } else { 0.0 }
}

/// Rounding of a number of this magnitude: what underflows has an error of its own.
pub(super) fn rounded(size: f64) -> f64 {
    if size == 0.0 { 0.0 } else { size + FLOOR }
}

/// The sum of terms, from +0.
pub(super) fn added(terms: impl Iterator<Item = f64>) -> f64 {
    terms.fold(0.0, |sum, term| sum + term)
}

/// The length of a vector.
pub(super) fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| magnitude(x).powi(2)).sum::<f64>().sqrt()
}

/// A token of a head: its decays, key and scaled query, the state before and behind it by columns, and what the rule makes.
#[derive(Clone, Debug, Default)]
pub(super) struct Token {
    pub a: Vec<f64>,
    /// The logarithm of a, with the slope by which it comes of g, as many as there are decays.
    pub l: Vec<Sized>,
    pub slope: Vec<Sized>,
    pub k: Vec<f64>,
    pub w: Vec<f64>,
    pub beta: f64,
    pub r: Vec<Sized>,
    pub u: Vec<Sized>,
    /// `[e][d]`, and the length of a column's error.
    pub decayed: Vec<Vec<f64>>,
    pub of_decayed: Vec<f64>,
    pub state: Vec<Vec<f64>>,
    pub of_state: Vec<f64>,
}

impl Token {
    /// How much longer an error of a column may become when u corrects it.
    pub fn growth(&self) -> f64 {
        (1.0 - self.beta * norm(self.k.iter().copied()).powi(2)).abs().max(1.0)
    }
}

/// What a head reads.
pub(super) struct Head {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    g: Vec<f64>,
    beta: Vec<f64>,
    a_log: Option<Vec<f64>>,
    dt_bias: Option<Vec<f64>>,
    state: Option<Vec<f64>>,
    scale: f64,
    /// Tokens of each sequence.
    pub tokens: Vec<usize>,
}

impl Head {
    pub fn new(c: &Checked) -> Head {
        let [q, k, v, g, beta] = ["q", "k", "v", "g", "beta"].map(|name| c.floats(name));
        let [a_log, dt_bias, state] =
            ["a_log", "dt_bias", "state"].map(|name| c.case.inputs.get(name).map(Tensor::to_f64));
        Head { q, k, v, g, beta, a_log, dt_bias, state, scale: c.float("scale"), tokens: rows_of(c) }
    }

    /// The columns of a state, `[e][d]`.
    pub fn columns(c: &Checked, state: Option<&Vec<f64>>, [b, h]: [usize; 2]) -> Vec<Vec<f64>> {
        let (heads, d, e) = (c.dim("Hv"), c.dim("D"), c.dim("E"));
        let at = |column: usize, row: usize| ((b * heads + h) * d + row) * e + column;
        let column = |column| (0..d).map(|row| state.map_or(0.0, |state| state[at(column, row)])).collect();
        (0..e).map(column).collect()
    }

    /// Whether decays come of a rate.
    pub fn has_rate(&self) -> bool {
        self.a_log.is_some()
    }

    /// The logarithm of what is left of a state, and its slope by g; `own` is the number of a decay among those of head h.
    fn logarithm(&self, g: f64, h: usize, own: usize) -> [Sized; 2] {
        let Some(a_log) = &self.a_log else { return [Sized { value: g, size: 0.0 }, Sized { value: 1.0, size: 0.0 }] };
        let (rate, x) = (a_log[h].exp(), g + self.dt_bias.as_ref().map_or(0.0, |bias| bias[own]));
        let (softplus, sigmoid) = (x.max(0.0) + (-x.abs()).exp().ln_1p(), 1.0 / (1.0 + (-x).exp()));
        let (l, slope) = (-rate * softplus, -rate * sigmoid);
        let of_l = 4.0 * rounded(magnitude(l)) + magnitude(slope * x);
        let of_slope = 8.0 * rounded(magnitude(slope)) + magnitude(slope * x);
        [Sized { value: l, size: of_l }, Sized { value: slope, size: of_slope }]
    }

    /// The tokens of a head, one after the other, and the states it begins with.
    pub fn walk(&self, c: &Checked, [b, h]: [usize; 2]) -> (Vec<Vec<f64>>, Vec<Token>) {
        let (t, hk, hv, d, e, g) = (c.dim("T"), c.dim("Hk"), c.dim("Hv"), c.dim("D"), c.dim("E"), c.dim("G"));
        let begun = Head::columns(c, self.state.as_ref(), [b, h]);
        let (mut state, mut of_state) = (begun.clone(), vec![0.0; e]);
        let mut tokens = Vec::new();
        for row in (0..self.tokens[b]).map(|at| b * t + at) {
            let (key, head) = ((row * hk + h / (hv / hk)) * d, row * hv + h);
            let of_decays = (0..g).map(|i| self.logarithm(self.g[head * g + i], h, h * g + i));
            let (l, slope): (Vec<Sized>, Vec<Sized>) = of_decays.map(|[l, slope]| (l, slope)).unzip();
            let a: Vec<f64> = (0..d).map(|i| l[i.min(g - 1)].value.exp()).collect();
            let k = self.k[key..][..d].to_vec();
            let w: Vec<f64> = self.q[key..][..d].iter().map(|q| q * self.scale).collect();
            let (beta, length) = (self.beta[head], norm(k.iter().copied()));
            let left = a.iter().copied().fold(0.0, f64::max);
            let mut token = Token { a, l, slope, k, w, beta, ..Token::default() };
            let growth = token.growth();
            for column in 0..e {
                let v = self.v[head * e + column];
                let decayed: Vec<f64> = state[column].iter().zip(&token.a).map(|(s, a)| s * a).collect();
                let unsure = |i: usize| 2.0 + token.l[i.min(g - 1)].size;
                let of_products = norm(decayed.iter().enumerate().map(|(i, p)| p * unsure(i)));
                let of_decayed = left * of_state[column] + rounded(of_products);
                let products = || decayed.iter().zip(&token.k).map(|(p, k)| p * k);
                let own = rounded(products().map(magnitude).sum::<f64>()) + rounded(magnitude(v));
                let r = Sized { value: v - added(products()), size: length * of_decayed + own };
                let value = r.value * beta;
                let u = Sized { value, size: beta.abs() * r.size + rounded(magnitude(value)) };
                state[column] = decayed.iter().zip(&token.k).map(|(p, k)| k.mul_add(value, *p)).collect();
                let moved = norm(state[column].iter().copied());
                let of_u = length * (beta.abs() * (own + magnitude(r.value)) + 2.0 * rounded(magnitude(value)));
                of_state[column] = growth * of_decayed + of_u + rounded(moved);
                let huge = [own, magnitude(value), moved].into_iter().any(|size| size > HUGE);
                if huge {
                    of_state[column] = f64::INFINITY;
                }
                token.r.push(r);
                token.u.push(u);
                token.decayed.push(decayed);
                token.of_decayed.push(of_decayed);
            }
            (token.state, token.of_state) = (state.clone(), of_state.clone());
            tokens.push(token);
        }
        (begun, tokens)
    }
}

fn compute(c: &Checked) -> References {
    let (b, t, hv, d, e) = (c.dim("B"), c.dim("T"), c.dim("Hv"), c.dim("D"), c.dim("E"));
    let head = Head::new(c);
    let (mut y, mut next) = (vec![(0.0, 0.0); b * t * hv * e], vec![(0.0, 0.0); b * hv * d * e]);
    for (entry, h) in (0..b).flat_map(|entry| (0..hv).map(move |h| (entry, h))) {
        let (begun, tokens) = head.walk(c, [entry, h]);
        for (at, token) in tokens.iter().enumerate() {
            let length = norm(token.w.iter().copied());
            for column in 0..e {
                let products = || token.state[column].iter().zip(&token.w).map(|(s, w)| s * w);
                let own = 2.0 * rounded(products().map(magnitude).sum::<f64>());
                let made = Sized { value: added(products()), size: length * token.of_state[column] + own };
                y[((entry * t + at) * hv + h) * e + column] = made.reference();
            }
        }
        let (state, sizes) = match tokens.last() {
            Some(token) => (&token.state, token.of_state.clone()),
            None => (&begun, vec![0.0; e]),
        };
        for (column, row) in (0..e).flat_map(|column| (0..d).map(move |row| (column, row))) {
            let made = Sized { value: state[column][row], size: sizes[column] };
            next[((entry * hv + h) * d + row) * e + column] = made.reference();
        }
    }
    BTreeMap::from([
        ("y".to_string(), Reference::new(vec![b, t, hv, e], y)),
        ("next".to_string(), Reference::new(vec![b, hv, d, e], next)),
    ])
}
