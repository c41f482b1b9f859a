//! `selective_scan`: the inputs of its cases and its oracle.
use super::ssd_scan::{Inputs, Num, SCANS, further, of_heads, rows, steps};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::selective_scan::OP,
    class: Class::Reduction,
    fills: SCANS,
    table: include_str!("../../ops/selective_scan.toml"),
    make,
    compute,
};

pub(super) const STATE: [&str; 3] = ["B", "C", "N"];

pub(super) fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let [b, t, c, n] = ["B", "T", "C", "N"].map(|axis| maker.dim(axis));
    let (x, dt) = (rows(maker, "x", &[b, t, c]), steps(maker, &[b, t, c]));
    let [of_b, of_c] = ["b", "c"].map(|name| rows(maker, name, &[b, t, n]));
    let a_log = if maker.fill == Fill::Classes { vec![0.0; c * n] } else { of_heads(maker, "a_log", c * n) };
    let mut inputs = maker.floats([
        ("x", vec![b, t, c], x),
        ("dt", vec![b, t, c], dt),
        ("a_log", vec![c, n], a_log),
        ("b", vec![b, t, n], of_b),
        ("c", vec![b, t, n], of_c),
    ]);
    further(maker, &mut inputs, c, &STATE);
    inputs
}

/// A scan of Mamba.
pub(super) struct Scan {
    pub dims: [usize; 4],
    pub inputs: Inputs,
}

impl Scan {
    pub fn of(c: &Checked) -> Scan {
        Scan { dims: ["B", "T", "C", "N"].map(|axis| c.dim(axis)), inputs: Inputs::of(c) }
    }

    /// Where x of a channel stands, and b and c of its position.
    pub fn at(&self, b: usize, t: usize, channel: usize) -> [usize; 2] {
        let [_, length, channels, n] = self.dims;
        [(b * length + t) * channels + channel, (b * length + t) * n]
    }

    /// The rates of a channel.
    pub fn rates(&self, channel: usize) -> Vec<Num> {
        let n = self.dims[3];
        self.inputs.a_log[channel * n..][..n].iter().map(|a_log| Num::exact(*a_log).exp().negative()).collect()
    }

    /// How long a step is, and its derivative by dt.
    pub fn step(&self, x: usize, channel: usize) -> [Num; 2] {
        self.inputs.biased(x, channel).softplus()
    }

    /// The states of a channel before the first position and behind each.
    pub fn states(&self, b: usize, channel: usize) -> Vec<Vec<Num>> {
        let [_, _, channels, n] = self.dims;
        let (at, rates) = ((b * channels + channel) * n, self.rates(channel));
        let mut states = vec![self.inputs.first(at, n)];
        for t in 0..self.inputs.lengths[b] {
            let [x, of_b] = self.at(b, t, channel);
            let [e, _] = self.step(x, channel);
            let u = e.times(Num::exact(self.inputs.x[x]));
            let before = states.last().expect("there is one");
            let after = (0..n).map(|i| {
                let left = e.times(rates[i]).exp();
                left.times(before[i]).plus(u.times(Num::exact(self.inputs.b[of_b + i])))
            });
            let after = after.collect();
            states.push(after);
        }
        states
    }
}

fn compute(c: &Checked) -> References {
    let scan = Scan::of(c);
    let [b, t, channels, n] = scan.dims;
    let (mut y, mut next) = (vec![(0.0, 0.0); b * t * channels], Vec::new());
    for (entry, channel) in (0..b * channels).map(|unit| (unit / channels, unit % channels)) {
        let states = scan.states(entry, channel);
        for (at, state) in states[1..].iter().enumerate() {
            let [x, of_c] = scan.at(entry, at, channel);
            let sum = Num::sum(state.iter().zip(&scan.inputs.c[of_c..]).map(|(s, c)| s.times(Num::exact(*c))));
            let through = scan.inputs.d(channel).map(|d| d.times(Num::exact(scan.inputs.x[x])));
            y[x] = through.map_or(sum, |through| through.plus(sum)).pair();
        }
        next.extend(states.last().expect("there is one").iter().map(|s| s.pair()));
    }
    BTreeMap::from([
        ("y".to_string(), Reference::new(vec![b, t, channels], y)),
        ("next".to_string(), Reference::new(vec![b, channels, n], next)),
    ])
}
