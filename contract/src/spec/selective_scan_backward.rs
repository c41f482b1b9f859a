//! `selective_scan_backward`: the inputs of its cases and its oracle.
use super::selective_scan::{STATE, Scan};
use super::ssd_scan::{Num, state};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::selective_scan_backward::OP,
    class: Class::Reduction,
    // Products of a state with the gradient of one leave f32 where both are near one of its ends.
    fills: &[Fill::Normal, Fill::Wide, Fill::Cancel, Fill::Edges, Fill::Classes],
    table: include_str!("../../ops/selective_scan_backward.toml"),
    make,
    compute,
};

/// Inputs of the scan; of classes, those of sequences of one position whose gradients are dy: steps of 32 that do not decay, an x by
/// which they are 1, a state and a c of 1, a d of 1 beside a b that adds nothing to be seen.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let [b, t, c, n] = ["B", "T", "C", "N"].map(|axis| maker.dim(axis));
    let mut inputs = selective_scan::make(maker);
    let len = b * t * c;
    let dy = match maker.fill {
        Fill::Classes => maker.borders_from(0, len),
        Fill::Cancel | Fill::Wide => maker.values("dy", Fill::Normal, len, c),
        fill => maker.values("dy", fill, len, c),
    };
    inputs.extend(maker.floats([("dy", vec![b, t, c], dy)]));
    if maker.fill == Fill::Classes {
        let small = if maker.dtype == DType::Fp16 { -24 } else { -32 };
        inputs.extend(maker.floats([
            ("x", vec![b, t, c], vec![round::pow2(-5); len]),
            ("dt", vec![b, t, c], vec![32.0; len]),
            ("a_log", vec![c, n], vec![f64::NEG_INFINITY; c * n]),
            ("b", vec![b, t, n], vec![round::pow2(small); b * t * n]),
            ("d", vec![c], vec![1.0; c]),
        ]));
        inputs.insert("state".into(), Tensor::fp32(&[b, c, n], vec![1.0; b * c * n]));
    }
    if maker.has("dnext") {
        inputs.insert("dnext".into(), state(maker, "dnext", &STATE));
    }
    inputs
}

fn compute(c: &Checked) -> References {
    let scan = Scan::of(c);
    let [b, t, channels, n] = scan.dims;
    let (dy, dnext) = (c.floats("dy"), c.case.inputs.get("dnext").map(Tensor::to_f64));
    let nothing = |len: usize| vec![(0.0, 0.0); len];
    let [mut dx, mut ddt] = [(); 2].map(|()| nothing(b * t * channels));
    // Of all channels, ascending.
    let mut terms: [Vec<Vec<Num>>; 2] = [(); 2].map(|()| vec![Vec::new(); b * t * n]);
    let (mut da_log, mut dd, mut dstate) = (Vec::new(), Vec::new(), Vec::new());
    for (entry, channel) in (0..b * channels).map(|unit| (unit / channels, unit % channels)) {
        let (states, rates) = (scan.states(entry, channel), scan.rates(channel));
        let at = (entry * channels + channel) * n;
        let given = |i: usize| Num::exact(dnext.as_ref().map_or(0.0, |dnext| dnext[at + i]));
        let mut m: Vec<Num> = (0..n).map(given).collect();
        let (mut of_rates, mut of_d): (Vec<Vec<Num>>, Vec<Num>) = (vec![Vec::new(); n], Vec::new());
        for t in (0..scan.inputs.lengths[entry]).rev() {
            let [x, shared] = scan.at(entry, t, channel);
            let ([e, slope], number) = (scan.step(x, channel), |values: &[f64], i: usize| Num::exact(values[i]));
            let (value, given) = (number(&scan.inputs.x, x), number(&dy, x));
            let u = e.times(value);
            let (mut of_b, mut of_a) = (Vec::new(), Vec::new());
            for i in 0..n {
                let exponent = e.times(rates[i]);
                let g = given.times(number(&scan.inputs.c, shared + i)).plus(m[i]);
                m[i] = exponent.exp().times(g);
                let z = m[i].times(states[t][i]);
                of_b.push(g.times(number(&scan.inputs.b, shared + i)));
                of_a.push(rates[i].times(z));
                of_rates[i].push(exponent.times(z));
                terms[0][shared + i].push(g.times(u));
                terms[1][shared + i].push(states[t + 1][i].times(given));
            }
            let q = Num::sum(of_b.into_iter());
            let entered = e.times(q);
            dx[x] = scan.inputs.d(channel).map_or(entered, |d| d.times(given).plus(entered)).pair();
            ddt[x] = q.times(value).plus(Num::sum(of_a.into_iter())).times(slope).pair();
            of_d.push(given.times(value));
        }
        da_log.extend(of_rates.into_iter().map(|terms| Num::sum(terms.into_iter()).pair()));
        dd.push(Num::sum(of_d.into_iter()).pair());
        dstate.extend(m.iter().map(|m| m.pair()));
    }
    let [db, dc] = terms.map(|terms| {
        let sums = terms.into_iter().map(|terms| Num::sum(terms.into_iter()).pair());
        Reference::new(vec![b, t, n], sums)
    });
    BTreeMap::from([
        ("dx".to_string(), Reference::new(vec![b, t, channels], dx)),
        ("ddt".to_string(), Reference::new(vec![b, t, channels], ddt)),
        ("db".to_string(), db),
        ("dc".to_string(), dc),
        ("da_log".to_string(), Reference::new(vec![b, channels, n], da_log)),
        ("dd".to_string(), Reference::new(vec![b, channels], dd)),
        ("dstate".to_string(), Reference::new(vec![b, channels, n], dstate)),
    ])
}
