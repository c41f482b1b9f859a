//! `ssd_scan_backward`: the inputs of its cases and its oracle.
use super::ssd_scan::{Num, Scan, state};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::ssd_scan_backward::OP,
    class: Class::Reduction,
    // Products of a state with the gradient of one leave f32 where both are near one of its ends.
    fills: &[Fill::Normal, Fill::Wide, Fill::Cancel, Fill::Edges, Fill::Classes],
    table: include_str!("../../ops/ssd_scan_backward.toml"),
    make,
    compute,
};

/// Inputs of the scan; of classes, those of one position whose gradients all are dy: steps of 1 that do not decay, x, b and c of
/// 1.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let [b, t, h, p, g, n] = ["B", "T", "H", "P", "G", "N"].map(|axis| maker.dim(axis));
    let mut inputs = ssd_scan::make(maker);
    let len = b * t * h * p;
    let dy = match maker.fill {
        Fill::Classes => maker.borders_from(0, len),
        Fill::Cancel | Fill::Wide => maker.values("dy", Fill::Normal, len, p),
        fill => maker.values("dy", fill, len, p),
    };
    inputs.extend(maker.floats([("dy", vec![b, t, h, p], dy)]));
    if maker.fill == Fill::Classes {
        inputs.extend(maker.floats([
            ("x", vec![b, t, h, p], vec![1.0; len]),
            ("dt", vec![b, t, h], vec![0.0; b * t * h]),
            ("a_log", vec![h], vec![f64::NEG_INFINITY; h]),
            ("b", vec![b, t, g, n], vec![1.0; b * t * g * n]),
        ]));
        if maker.has("state") {
            inputs.insert("state".into(), Tensor::fp32(&[b, h, p, n], vec![0.0; b * h * p * n]));
        }
    }
    if maker.has("dnext") {
        inputs.insert("dnext".into(), state(maker, "dnext", &["B", "H", "P", "N"]));
    }
    inputs
}

fn compute(c: &Checked) -> References {
    let scan = Scan::of(c);
    let [b, t, h, p, groups, n] = scan.dims;
    let (dy, dnext) = (c.floats("dy"), c.case.inputs.get("dnext").map(Tensor::to_f64));
    let nothing = |len: usize| vec![(0.0, 0.0); len];
    let (mut dx, [mut ddt, mut da_log, mut dd]) = (nothing(b * t * h * p), [(); 3].map(|()| nothing(b * t * h)));
    // The heads of a group, ascending.
    let mut terms: [Vec<Vec<Num>>; 2] = [(); 2].map(|()| vec![Vec::new(); b * t * groups * n]);
    let mut dstate = Vec::new();
    for (entry, head) in (0..b * h).map(|unit| (unit / h, unit % h)) {
        let (states, at) = (scan.states(entry, head), (entry * h + head) * p * n);
        let given = |i: usize| Num::exact(dnext.as_ref().map_or(0.0, |dnext| dnext[at + i]));
        let mut g: Vec<Num> = (0..p * n).map(given).collect();
        let mut behind: Option<Num> = None;
        for at in (0..scan.inputs.lengths[entry]).rev() {
            let (step, x, of_b) = (scan.step(entry, at, head), scan.at_x(entry, at, head), scan.at_b(entry, at, head));
            let number = |values: &[f64], i: usize| Num::exact(values[i]);
            for (i, g) in g.iter_mut().enumerate() {
                let kept = behind.map_or(*g, |k| k.times(*g));
                *g = number(&dy, x + i / n).times(number(&scan.inputs.c, of_b + i % n)).plus(kept);
            }
            let q = |row: usize| Num::sum((0..n).map(|i| g[row * n + i].times(number(&scan.inputs.b, of_b + i))));
            let q: Vec<Num> = (0..p).map(q).collect();
            for row in 0..p {
                let entered = step.e.times(q[row]);
                let through = scan.inputs.d(head).map(|d| d.times(number(&dy, x + row)));
                dx[x + row] = through.map_or(entered, |through| through.plus(entered)).pair();
            }
            let before = &states[at];
            let z = step.k.times(Num::sum((0..p * n).map(|i| g[i].times(before[i]))));
            let of_x = Num::sum((0..p).map(|row| q[row].times(number(&scan.inputs.x, x + row))));
            let (w, token) = (step.a.times(z).plus(of_x), x / p);
            // Where a limit took the place of the step there is none, whatever w is.
            ddt[token] = step.slope.map_or((0.0, 0.0), |slope| w.times(slope).pair());
            da_log[token] = step.e.times(step.a).times(z).pair();
            dd[token] = Num::sum((0..p).map(|row| number(&dy, x + row).times(number(&scan.inputs.x, x + row)))).pair();
            for i in 0..n {
                let u = |row: usize| step.e.times(number(&scan.inputs.x, x + row));
                let of_b_terms = (0..p).map(|row| g[row * n + i].times(u(row)));
                let of_c_terms = (0..p).map(|row| states[at + 1][row * n + i].times(number(&dy, x + row)));
                terms[0][of_b + i].extend(of_b_terms);
                terms[1][of_b + i].extend(of_c_terms);
            }
            behind = Some(step.k);
        }
        dstate.extend(g.iter().map(|g| behind.map_or(*g, |k| k.times(*g)).pair()));
    }
    let [db, dc] = terms.map(|terms| {
        let sums = terms.into_iter().map(|terms| Num::sum(terms.into_iter()).pair());
        Reference::new(vec![b, t, groups, n], sums)
    });
    BTreeMap::from([
        ("dx".to_string(), Reference::new(vec![b, t, h, p], dx)),
        ("ddt".to_string(), Reference::new(vec![b, t, h], ddt)),
        ("db".to_string(), db),
        ("dc".to_string(), dc),
        ("da_log".to_string(), Reference::new(vec![b, t, h], da_log)),
        ("dd".to_string(), Reference::new(vec![b, t, h], dd)),
        ("dstate".to_string(), Reference::new(vec![b, h, p, n], dstate)),
    ])
}
