//! `ssd_scan`: the inputs of its cases and its oracle; and the numbers with errors that its gradient is computed in too.
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::ssd_scan::OP,
    class: Class::Reduction,
    fills: SCANS,
    table: include_str!("../../ops/ssd_scan.toml"),
    make,
    compute,
};

/// What scans are asked.
pub(super) const SCANS: &[Fill] =
    &[Fill::Normal, Fill::Wide, Fill::Cancel, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::Classes];

pub(super) fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let [b, t, h, p, g, n] = ["B", "T", "H", "P", "G", "N"].map(|axis| maker.dim(axis));
    let (x, dt) = (rows(maker, "x", &[b, t, h, p]), steps(maker, &[b, t, h]));
    let [of_b, of_c] = ["b", "c"].map(|name| rows(maker, name, &[b, t, g, n]));
    let a_log = if maker.fill == Fill::Classes { vec![0.0; h] } else { of_heads(maker, "a_log", h) };
    let mut inputs = maker.floats([
        ("x", vec![b, t, h, p], x),
        ("dt", vec![b, t, h], dt),
        ("a_log", vec![h], a_log),
        ("b", vec![b, t, g, n], of_b),
        ("c", vec![b, t, g, n], of_c),
    ]);
    further(maker, &mut inputs, h, &["B", "H", "P", "N"]);
    inputs
}

/// What has a row for each position: x, b and c. The axes are sequences, positions, and those of a row.
pub(super) fn rows(maker: &Maker, name: &str, axes: &[usize]) -> Vec<f64> {
    let (len, elements) = (axes.iter().product(), axes[axes.len() - 1]);
    match maker.fill {
        // Positions in pairs that are nearly opposite, of steps that hardly decay.
        Fill::Cancel if name == "x" => {
            let values = maker.values(name, Fill::Normal, len, elements);
            let row: usize = axes[2..].iter().product();
            (0..len).map(|i| if i / row % 2 == 1 { -values[i - row] } else { values[i] }).collect()
        }
        // One state is all that there is, and nothing is added to it that a -0 would not outlast.
        Fill::Classes => {
            vec![[("c", 1.0), ("b", -0.0)].into_iter().find(|of| of.0 == name).map_or(0.0, |of| of.1); len]
        }
        // Products of three stay within f32.
        Fill::NearOverflow if name != "x" => maker.values(name, Fill::Normal, len, elements),
        Fill::NearOverflow if maker.dtype != DType::Fp16 => {
            maker.values(name, maker.fill, len, elements).into_iter().map(|v| v * round::pow2(-8)).collect()
        }
        // Where all were wide, most would be beyond f32.
        Fill::Wide if name == "b" => maker.values(name, Fill::Normal, len, elements),
        fill => maker.values(name, fill, len, elements),
    }
}

/// Steps before their softplus.
pub(super) fn steps(maker: &Maker, axes: &[usize]) -> Vec<f64> {
    let (len, last) = (axes.iter().product(), axes[axes.len() - 1]);
    let drawn = |change: fn(f64) -> f64| maker.values("dt", Fill::Normal, len, last).into_iter().map(change).collect();
    match maker.fill {
        // Steps of +0: nothing decays and nothing enters.
        Fill::Classes => vec![f64::NEG_INFINITY; len],
        Fill::Edges => maker.sparse_edges("dt", len, 11),
        // From steps that vanish to some that leave nothing.
        Fill::Wide => drawn(|v| v * 32.0),
        Fill::Cancel => drawn(|v| v * 0.25 - 4.0),
        _ => drawn(|v| v - 1.0),
    }
}

/// What heads, or channels, have of their own.
pub(super) fn of_heads(maker: &Maker, name: &str, len: usize) -> Vec<f64> {
    match maker.fill {
        Fill::Edges => maker.sparse_edges(name, len, 5),
        _ => maker.values(name, Fill::Normal, len, len),
    }
}

/// The inputs that may be left out: for each of `h` heads or channels d and dt_bias, a state of `axes`, lengths.
pub(super) fn further(maker: &Maker, inputs: &mut BTreeMap<String, Tensor>, h: usize, axes: &[&str]) {
    for name in ["d", "dt_bias"].into_iter().filter(|name| maker.has(name)) {
        inputs.extend(maker.floats([(name, vec![h], of_heads(maker, name, h))]));
    }
    if maker.has("state") {
        inputs.insert("state".into(), state(maker, "state", axes));
    }
    if maker.has("len") {
        inputs.insert("len".into(), causal_conv1d::lengths(maker));
    }
}

/// A state of f32: in classes, every border of f32.
pub(super) fn state(maker: &Maker, name: &str, axes: &[&str]) -> Tensor {
    let shape: Vec<usize> = axes.iter().map(|axis| maker.dim(axis)).collect();
    let (len, last, wide) = (shape.iter().product(), shape[shape.len() - 1], Maker { dtype: DType::Fp32, ..*maker });
    let state = match maker.fill {
        Fill::Classes => wide.borders_from(0, len),
        Fill::Cancel => wide.values(name, Fill::Normal, len, last),
        Fill::NearOverflow => {
            wide.values(name, Fill::NearOverflow, len, last).into_iter().map(|v| v * round::pow2(-8)).collect()
        }
        fill => wide.values(name, fill, len, last),
    };
    round::tensor(DType::Fp32, &shape, &state)
}

/// A number of f32 on the way: its value in f64, and its error in units of 2^-24; 0 where its bits are known, NaN and infinities
/// too, infinite where nothing is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Num {
    pub value: f64,
    pub error: f64,
}

impl Num {
    pub const ZERO: Num = Num { value: 0.0, error: 0.0 };

    /// One without an error.
    pub fn exact(value: f64) -> Num {
        Num { value, error: 0.0 }
    }

    fn unknown(value: f64) -> Num {
        Num { value, error: f64::INFINITY }
    }

    fn is_known_nan(self) -> bool {
        self.value.is_nan() && self.error == 0.0
    }

    /// Whether it is surely a number other than 0, or surely infinite.
    fn is_not_zero(self) -> bool {
        self.error == 0.0 && self.value != 0.0 || self.value.abs() > self.error * round::pow2(-18) + 2.0 * FLOOR
    }

    /// A value that is made of others with this error and, unless it is an f32, rounded.
    fn rounded(value: f64, error: f64) -> Num {
        match () {
            _ if error == 0.0 && f32_of(value) == value => Num::exact(value),
            _ if value.abs() > HUGE || !value.is_finite() || error.is_nan() => Num::unknown(value),
            _ => Num { value, error: error + value.abs() + FLOOR },
        }
    }

    pub fn times(self, other: Num) -> Num {
        let value = self.value * other.value;
        if self.is_known_nan() || other.is_known_nan() {
            return Num::exact(f64::NAN);
        }
        if self.error.is_infinite() || other.error.is_infinite() {
            return Num::unknown(value);
        }
        for (infinite, factor) in [(self, other), (other, self)] {
            if infinite.value.is_infinite() {
                let known = factor.is_not_zero() || factor == Num::ZERO || factor.value == 0.0 && factor.error == 0.0;
                return if known { Num::exact(value) } else { Num::unknown(value) };
            }
        }
        Num::rounded(value, self.value.abs() * other.error + other.value.abs() * self.error)
    }

    pub fn plus(self, other: Num) -> Num {
        let value = self.value + other.value;
        if self.is_known_nan() || other.is_known_nan() {
            return Num::exact(f64::NAN);
        }
        match self.error.is_infinite() || other.error.is_infinite() {
            true => Num::unknown(value),
            _ if self.value.is_infinite() || other.value.is_infinite() => Num::exact(value),
            // What is rounded once more is the sum alone, and of terms of any size.
            _ => Num::rounded(value, self.error + other.error),
        }
    }

    /// A sum in any order, which is +0 where all terms are 0.
    pub fn sum(terms: impl Iterator<Item = Num>) -> Num {
        let (mut sum, mut size, mut error, mut terms_left) = (0.0, 0.0, 0.0, 0);
        let (mut above, mut below) = (false, false);
        for term in terms {
            if term.is_known_nan() {
                return Num::exact(f64::NAN);
            }
            if term.value.is_infinite() && term.error == 0.0 {
                (above, below) = (above || term.value > 0.0, below || term.value < 0.0);
            } else {
                size += term.value.abs();
                terms_left += usize::from(term.value != 0.0 || term.error != 0.0);
            }
            sum += term.value;
            error += term.error;
        }
        match () {
            _ if above && below => Num::exact(f64::NAN),
            _ if error == 0.0 && terms_left <= 1 && !(above || below) => Num::exact(sum),
            _ if error.is_infinite() || size > HUGE => Num::unknown(sum),
            _ if above || below => Num::exact(sum),
            _ => Num { value: sum, error: error + size + FLOOR * terms_left as f64 },
        }
    }

    pub fn exp(self) -> Num {
        let value = self.value.exp();
        match () {
            _ if self.value.is_nan() && self.error == 0.0 => self,
            _ if self.error.is_infinite() || value > HUGE && self.value.is_finite() => Num::unknown(value),
            _ if self.error == 0.0 && (self.value == 0.0 || self.value.is_infinite()) => Num::exact(value),
            _ => Num { value, error: value * (self.error + 1.0) + FLOOR },
        }
    }

    pub fn negative(self) -> Num {
        Num { value: -self.value, ..self }
    }

    /// `ln(1 + e^self)` and its derivative.
    pub fn softplus(self) -> [Num; 2] {
        let sigmoid = 1.0 / (1.0 + (-self.value).exp());
        // e^-|v| is off by about a unit, and so are what follows from it.
        let (softplus, of_v) = (self.value.max(0.0) + (-self.value.abs()).exp().ln_1p(), self.error * sigmoid);
        // Where e^-v is beyond f32, nothing is left of the derivative.
        let lost = if (-self.value).exp() > HUGE { sigmoid * round::pow2(24) } else { 2.0 * sigmoid };
        match () {
            _ if self.value.is_nan() || self.error.is_infinite() => [self, self],
            _ if self.value.is_infinite() => [Num::exact(softplus), Num::exact(sigmoid)],
            _ => [
                Num { value: softplus, error: of_v + softplus + FLOOR },
                Num { value: sigmoid, error: sigmoid * (1.0 - sigmoid) * self.error + lost + FLOOR },
            ],
        }
    }

    /// As a reference has it.
    pub fn pair(self) -> (f64, f64) {
        (self.value, self.error)
    }
}

/// A step in time: how long it is, what is left of the state, its derivative by dt unless a limit took its place, and A.
pub(super) struct Step {
    pub e: Num,
    pub k: Num,
    pub slope: Option<Num>,
    pub a: Num,
}

/// What scans of both kinds read.
pub(super) struct Inputs {
    pub x: Vec<f64>,
    dt: Vec<f64>,
    pub a_log: Vec<f64>,
    pub b: Vec<f64>,
    pub c: Vec<f64>,
    d: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
    state: Option<Vec<f64>>,
    pub lengths: Vec<usize>,
}

impl Inputs {
    pub fn of(c: &Checked) -> Inputs {
        let optional = |name: &str| c.case.inputs.get(name).map(Tensor::to_f64);
        Inputs {
            x: c.floats("x"),
            dt: c.floats("dt"),
            a_log: c.floats("a_log"),
            b: c.floats("b"),
            c: c.floats("c"),
            d: optional("d"),
            bias: optional("dt_bias"),
            state: optional("state"),
            lengths: causal_conv1d::rows_of(c),
        }
    }

    /// d of a head or channel.
    pub fn d(&self, of: usize) -> Option<Num> {
        self.d.as_ref().map(|d| Num::exact(d[of]))
    }

    /// dt at a place with the bias of its head or channel.
    pub fn biased(&self, at: usize, of: usize) -> Num {
        let dt = Num::exact(self.dt[at]);
        self.bias.as_ref().map_or(dt, |bias| dt.plus(Num::exact(bias[of])))
    }

    /// `count` elements of the state before the first position.
    pub fn first(&self, at: usize, count: usize) -> Vec<Num> {
        (at..at + count).map(|i| Num::exact(self.state.as_ref().map_or(0.0, |state| state[i]))).collect()
    }
}

/// A scan of Mamba-2.
pub(super) struct Scan {
    pub dims: [usize; 6],
    pub inputs: Inputs,
    limits: [f64; 2],
}

impl Scan {
    pub fn of(c: &Checked) -> Scan {
        Scan {
            dims: ["B", "T", "H", "P", "G", "N"].map(|axis| c.dim(axis)),
            inputs: Inputs::of(c),
            limits: ["dt_min", "dt_max"].map(|name| f32_of(c.float(name))),
        }
    }

    /// Where the elements of a head of x at a position begin.
    pub fn at_x(&self, b: usize, t: usize, h: usize) -> usize {
        let [_, length, heads, p, ..] = self.dims;
        ((b * length + t) * heads + h) * p
    }

    /// The same of the group that the head reads, in b and c.
    pub fn at_b(&self, b: usize, t: usize, h: usize) -> usize {
        let [_, length, heads, _, groups, n] = self.dims;
        ((b * length + t) * groups + h / (heads / groups)) * n
    }

    pub fn step(&self, b: usize, t: usize, h: usize) -> Step {
        let [_, length, heads, ..] = self.dims;
        let [mut e, slope] = self.inputs.biased((b * length + t) * heads + h, h).softplus();
        let mut slope = Some(slope);
        // Near a limit a rounding decides; the length of the step is the same, its derivative is not.
        for (limit, beyond) in [(self.limits[0], e.value < self.limits[0]), (self.limits[1], e.value > self.limits[1])]
        {
            if limit == self.limits[1] && limit == 0.0 || e.value.is_nan() || e == Num::exact(limit) {
                continue;
            }
            let surely = (e.value - limit).abs() > 16.0 * e.error * round::pow2(-24) || e.error == 0.0;
            match (beyond, surely) {
                (true, true) => (e, slope) = (Num::exact(limit), None),
                (_, false) => slope = slope.map(|slope| Num::unknown(slope.value)),
                _ => {}
            }
        }
        let a = Num::exact(self.inputs.a_log[h]).exp().negative();
        let k = e.times(a).exp();
        Step { e, k, slope, a }
    }

    /// The states of a head before the first position and behind each.
    pub fn states(&self, b: usize, h: usize) -> Vec<Vec<Num>> {
        let [_, _, heads, p, _, n] = self.dims;
        let at = (b * heads + h) * p * n;
        let mut states = vec![self.inputs.first(at, p * n)];
        for t in 0..self.inputs.lengths[b] {
            let (Step { e, k, .. }, x, of_b) = (self.step(b, t, h), self.at_x(b, t, h), self.at_b(b, t, h));
            let before = states.last().expect("there is one");
            let after = before.iter().enumerate().map(|(i, s)| {
                let u = e.times(Num::exact(self.inputs.x[x + i / n]));
                k.times(*s).plus(u.times(Num::exact(self.inputs.b[of_b + i % n])))
            });
            let after = after.collect();
            states.push(after);
        }
        states
    }
}

fn compute(c: &Checked) -> References {
    let scan = Scan::of(c);
    let [b, t, h, p, _, n] = scan.dims;
    let (mut y, mut next) = (vec![(0.0, 0.0); b * t * h * p], Vec::new());
    for (entry, head) in (0..b * h).map(|unit| (unit / h, unit % h)) {
        let states = scan.states(entry, head);
        for (at, state) in states[1..].iter().enumerate() {
            let (x, of_c) = (scan.at_x(entry, at, head), scan.at_b(entry, at, head));
            for row in 0..p {
                let terms = (0..n).map(|i| state[row * n + i].times(Num::exact(scan.inputs.c[of_c + i])));
                let sum = Num::sum(terms);
                let through = scan.inputs.d(head).map(|d| d.times(Num::exact(scan.inputs.x[x + row])));
                y[x + row] = through.map_or(sum, |through| through.plus(sum)).pair();
            }
        }
        next.extend(states.last().expect("there is one").iter().map(|s| s.pair()));
    }
    BTreeMap::from([
        ("y".to_string(), Reference::new(vec![b, t, h, p], y)),
        ("next".to_string(), Reference::new(vec![b, h, p, n], next)),
    ])
}
