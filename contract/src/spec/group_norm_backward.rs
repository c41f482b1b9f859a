//! `group_norm_backward`: the inputs of its cases and its oracle.
use super::inexact::Inexact;
use super::layer_norm::Norm;
use super::layer_norm_backward::{known_rows, normed};
use super::rms_norm_backward::gradients;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::group_norm_backward::OP,
    class: Class::Reduction,
    fills: &[Fill::Normal, Fill::Wide, Fill::Cancel, Fill::Tiny, Fill::NearOverflow, Fill::Edges, Fill::Classes],
    table: include_str!("../../ops/group_norm_backward.toml"),
    make,
    compute,
};

fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let (shape, [groups, n]) = (["B", "C", "P"].map(|axis| maker.dim(axis)), group_norm::groups(maker));
    let channels = shape[1];
    let (x, dy) = match maker.fill {
        // Each group is a row of eight.
        Fill::Classes => {
            let rows = known_rows(maker);
            let column = |i: usize| rows.iter().cycle().take(groups).flat_map(|row| row[i]).collect();
            (column(0), column(1))
        }
        // Beside a norm that is tiny, so that their products are there.
        Fill::Tiny => (layer_norm::values(maker, groups, n), maker.values("dy", Fill::Normal, groups * n, n)),
        _ => (layer_norm::values(maker, groups, n), gradients(maker, "dy", groups * n, n)),
    };
    let mut inputs = maker.floats([("x", shape.to_vec(), x), ("dy", shape.to_vec(), dy)]);
    for name in ["w", "bias"].into_iter().filter(|name| maker.has(name)) {
        let values = match maker.fill {
            Fill::Classes => [1.0, 1.0, 1.0, 1.0, 89.0, 89.0, 1.0, 1.0].into_iter().cycle().take(channels).collect(),
            _ => maker.values(name, Fill::Normal, channels, channels),
        };
        inputs.extend(maker.floats([(name, vec![channels], values)]));
    }
    inputs
}

/// What each step makes of a group.
struct Group {
    dx: Vec<Inexact>,
    /// By channel.
    dw: Vec<Inexact>,
    dbias: Vec<Inexact>,
}

fn compute(c: &Checked) -> References {
    let shape = ["B", "C", "P"].map(|axis| c.dim(axis));
    let (together, eps, places) = (shape[1] / c.count("groups"), f32_of(c.float("eps")), shape[2]);
    let given = |name| c.case.inputs.get(name).map(Tensor::to_f64);
    let (w, bias, x, dy) = (given("w"), given("bias"), c.floats("x"), c.floats("dy"));
    let n = together * places;
    let groups = x.chunks(n).zip(dy.chunks(n)).enumerate().map(|(number, (x, dy))| {
        let of_group = |all: &Option<Vec<f64>>| {
            let first = number * together % shape[1];
            all.as_ref().map(|all| all[first..first + together].iter().map(|v| Inexact::exact(*v)).collect())
        };
        group(x, dy, places, [of_group(&w), of_group(&bias)], eps, c.flag("silu"))
    });
    let groups: Vec<Group> = groups.collect();
    let all =
        |of: fn(&Group) -> &Vec<Inexact>| groups.iter().flat_map(of).map(|number| number.element()).collect::<Vec<_>>();
    BTreeMap::from([
        ("dx".to_string(), Reference::new(shape.to_vec(), all(|group| &group.dx))),
        ("dw".to_string(), Reference::new(shape[..2].to_vec(), all(|group| &group.dw))),
        ("dbias".to_string(), Reference::new(shape[..2].to_vec(), all(|group| &group.dbias))),
    ])
}

fn group(x: &[f64], dy: &[f64], places: usize, [w, bias]: [Option<Vec<Inexact>>; 2], eps: f64, silu: bool) -> Group {
    let norm = Norm::of(x, eps);
    let h: Vec<Inexact> = x.iter().map(|&x| of_element(&norm, x)).collect();
    let weighed = |i: usize, v: Inexact| w.as_ref().map_or(v, |w| v.times(w[i / places]));
    let dz = |(i, (&h, &dy)): (usize, (&Inexact, &f64))| {
        let dy = Inexact::exact(dy);
        if !silu {
            return dy;
        }
        let z = weighed(i, h);
        let z = bias.as_ref().map_or(z, |bias| z.plus(bias[i / places]));
        dy.times(slope(z))
    };
    let dz: Vec<Inexact> = h.iter().zip(dy).enumerate().map(dz).collect();
    let (mut dw, mut dbias) = (Vec::new(), Vec::new());
    for (dz, h) in dz.chunks(places).zip(h.chunks(places)) {
        dbias.push(Inexact::sum(dz));
        dw.push(Inexact::sum(&dz.iter().zip(h).map(|(dz, h)| dz.product(*h)).collect::<Vec<_>>()));
    }
    let mean = |of_channels: &[Inexact]| {
        let terms = of_channels.iter().enumerate().map(|(i, v)| w.as_ref().map_or(*v, |w| v.product(w[i])));
        Inexact::sum(&terms.collect::<Vec<_>>()).over(Inexact::exact(x.len() as f64))
    };
    let (a, b) = (mean(&dbias), mean(&dw));
    let r = Inexact { value: norm.r, error: if norm.r.is_nan() { 0.0 } else { norm.r * norm.r_error } };
    let dx = h.iter().zip(&dz).enumerate().map(|(i, (&h, &dz))| {
        let inner = b.negative().times_plus(h, weighed(i, dz).minus(a));
        r.times(inner)
    });
    Group { dx: dx.collect(), dw, dbias }
}

/// An element less the mean, times r.
fn of_element(norm: &Norm, x: f64) -> Inexact {
    let (h, _) = normed(norm, x);
    match () {
        _ if h.value.is_nan() && norm.r_error.is_infinite() => Inexact { value: f64::NAN, error: f64::INFINITY },
        _ if h.value.is_nan() => Inexact::exact(f64::NAN),
        _ => Inexact { value: h.value, error: h.error },
    }
}

/// That of silu.
fn slope(z: Inexact) -> Inexact {
    let one = Inexact::exact(1.0);
    let s = one.over(one.plus(z.negative().exponential()));
    s.times(z.times_plus(one.minus(s), one))
}
