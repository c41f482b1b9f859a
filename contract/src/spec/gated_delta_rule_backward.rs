//! `gated_delta_rule_backward`: the inputs of its cases and its oracle.
use super::gated_delta_rule::{FILLS, Head, Sized, Token, added, keys, magnitude, norm, rounded, state, values};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::gated_delta_rule_backward::OP,
    class: Class::Reduction,
    fills: FILLS,
    table: include_str!("../../ops/gated_delta_rule_backward.toml"),
    make,
    compute,
};

/// Values and states are ordinary: tiny, wide and huge numbers are in dy, borders in dnext too.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let mut inputs = keys(maker);
    let of_values = [maker.dim("B"), maker.dim("T"), maker.dim("Hv"), maker.dim("E")].to_vec();
    let plain = Maker { fill: Fill::Normal, ..*maker };
    inputs.extend(maker.floats([("v", of_values.clone(), values(&plain, "v"))]));
    inputs.extend(maker.floats([("dy", of_values, values(maker, "dy"))]));
    if maker.has("state") {
        inputs.insert("state".into(), state(&plain, "state"));
    }
    if maker.has("dnext") {
        inputs.insert("dnext".into(), state(maker, "dnext"));
    }
    inputs
}

/// What is added up for an element: values, and what their errors are proportional to.
#[derive(Clone, Copy, Default)]
struct Sum {
    value: f64,
    size: f64,
    magnitude: f64,
}

impl Sum {
    /// Adds `a * b`.
    fn add(&mut self, a: Sized, b: Sized) {
        let product = a.value * b.value;
        self.value += product;
        self.magnitude += magnitude(product);
        self.size += magnitude(a.value) * b.size + magnitude(b.value) * a.size;
    }

    fn made(self) -> Sized {
        Sized { value: self.value, size: self.size + 2.0 * rounded(self.magnitude) }
    }
}

/// What is added up over the columns of a token, for each element of its key.
struct Sums {
    of_q: Vec<Sum>,
    of_u: Vec<Sum>,
    of_r: Vec<Sum>,
    of_g: Vec<Sum>,
    of_beta: Sum,
}

impl Sums {
    fn new(d: usize) -> Sums {
        let [of_q, of_u, of_r, of_g] = [(); 4].map(|()| vec![Sum::default(); d]);
        Sums { of_q, of_u, of_r, of_g, of_beta: Sum::default() }
    }

    /// Takes m, the gradient of a column of the state behind a token, and the length of its error to that before it; what v
    /// gets.
    fn column(&mut self, token: &Token, column: usize, dy: f64, m: &mut Vec<f64>, of_m: &mut f64) -> Sized {
        let (of_k, of_w) = (norm(token.k.iter().copied()), norm(token.w.iter().copied()));
        m.iter_mut().zip(&token.w).for_each(|(m, w)| *m = w.mul_add(dy, *m));
        let size = norm(m.iter().copied());
        *of_m += 2.0 * of_w * magnitude(dy) + rounded(size);
        let products = || m.iter().zip(&token.k).map(|(m, k)| m * k);
        let own = rounded(products().map(magnitude).sum::<f64>());
        let du = Sized { value: added(products()), size: of_k * *of_m + own };
        let value = du.value * token.beta;
        let mut dr = Sized { value, size: token.beta.abs() * du.size + rounded(magnitude(value)) };
        let n: Vec<f64> = m.iter().zip(&token.k).map(|(m, k)| (-k).mul_add(value, *m)).collect();
        let of_dr = of_k * (token.beta.abs() * own + 2.0 * rounded(magnitude(value)));
        let of_n = token.growth() * *of_m + of_dr + rounded(norm(n.iter().copied()));
        for i in 0..m.len() {
            let of = |value, size| Sized { value, size };
            let p = of(token.decayed[column][i], token.of_decayed[column]);
            self.of_q[i].add(of(token.state[column][i], token.of_state[column]), of(dy, 0.0));
            self.of_u[i].add(of(m[i], *of_m), token.u[column]);
            self.of_r[i].add(p, dr);
            self.of_g[i].add(of(n[i], of_n), p);
        }
        self.of_beta.add(du, token.r[column]);
        let huge = [size, own, magnitude(value)].into_iter().any(|size| size > HUGE);
        *m = n.iter().zip(&token.a).map(|(n, a)| n * a).collect();
        let (left, decays) = (token.a.iter().copied().fold(0.0, f64::max), token.l.len());
        let unsure = |i: usize| 2.0 + token.l[i.min(decays - 1)].size;
        *of_m = left * of_n + rounded(norm(m.iter().enumerate().map(|(i, m)| m * unsure(i))));
        if huge {
            (*of_m, dr.size, self.of_beta.size) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
            let all = [&mut self.of_q, &mut self.of_u, &mut self.of_r, &mut self.of_g];
            all.into_iter().flatten().for_each(|sum| sum.size = f64::INFINITY);
        }
        dr
    }
}

fn compute(c: &Checked) -> References {
    let (b, t, hk, hv) = (c.dim("B"), c.dim("T"), c.dim("Hk"), c.dim("Hv"));
    let (d, e, g) = (c.dim("D"), c.dim("E"), c.dim("G"));
    let (head, dy, scale) = (Head::new(c), c.floats("dy"), c.float("scale"));
    let dnext = c.case.inputs.get("dnext").map(Tensor::to_f64);
    let none = Sized::default();
    let [mut dq, mut dk] = [(); 2].map(|()| vec![none; b * t * hk * d]);
    let (mut dv, mut dg, mut dbeta) = (vec![none; b * t * hv * e], vec![none; b * t * hv * g], vec![none; b * t * hv]);
    let (mut da_log, mut dstate) = (vec![none; b * t * hv], vec![none; b * hv * d * e]);
    for (entry, h) in (0..b).flat_map(|entry| (0..hv).map(move |h| (entry, h))) {
        let (_, tokens) = head.walk(c, [entry, h]);
        // By columns, and the length of the error of each.
        let (mut m, mut of_m) = (Head::columns(c, dnext.as_ref(), [entry, h]), vec![0.0; e]);
        for (at, token) in tokens.iter().enumerate().rev() {
            let row = (entry * t + at) * hv + h;
            let key = ((entry * t + at) * hk + h / (hv / hk)) * d;
            let mut sums = Sums::new(d);
            for column in 0..e {
                let of_y = dy[row * e + column];
                dv[row * e + column] = sums.column(token, column, of_y, &mut m[column], &mut of_m[column]);
            }
            let Sums { of_q, of_u, of_r, of_g, of_beta } = sums;
            for i in 0..d {
                let (q, u, r, decay) = (of_q[i].made(), of_u[i].made(), of_r[i].made(), of_g[i].made());
                add(
                    &mut dq[key + i],
                    Sized { value: q.value * scale, size: (q.size + magnitude(q.value)) * scale.abs() },
                );
                let value = u.value - r.value;
                add(&mut dk[key + i], Sized { value, size: u.size + r.size + rounded(magnitude(value)) });
                add(&mut dg[row * g + i.min(g - 1)], decay);
            }
            dbeta[row] = of_beta.made();
            if head.has_rate() {
                let mut of_rate = Sum::default();
                for (dg, (l, slope)) in dg[row * g..][..g].iter_mut().zip(token.l.iter().zip(&token.slope)) {
                    of_rate.add(*dg, *l);
                    let mut own = Sum::default();
                    own.add(*dg, *slope);
                    // One product: of a zero it has a sign, which a sum from +0 has not.
                    *dg = Sized { value: dg.value * slope.value, ..own.made() };
                }
                da_log[row] = of_rate.made();
            }
        }
        for (column, i) in (0..e).flat_map(|column| (0..d).map(move |i| (column, i))) {
            dstate[((entry * hv + h) * d + i) * e + column] = Sized { value: m[column][i], size: of_m[column] };
        }
    }
    let of = |shape: &[usize], made: Vec<Sized>| Reference::new(shape.to_vec(), made.into_iter().map(Sized::reference));
    let (of_keys, of_values) = ([b, t, hk, d], [b, t, hv, e]);
    BTreeMap::from([
        ("dq".to_string(), of(&of_keys, dq)),
        ("dk".to_string(), of(&of_keys, dk)),
        ("dv".to_string(), of(&of_values, dv)),
        ("dg".to_string(), of(&[b, t, hv, g], dg)),
        ("dbeta".to_string(), of(&[b, t, hv], dbeta)),
        ("da_log".to_string(), of(&[b, t, hv], da_log)),
        ("dstate".to_string(), of(&[b, hv, d, e], dstate)),
    ])
}

/// Adds what another head or another element gives.
fn add(total: &mut Sized, part: Sized) {
    total.value += part.value;
    total.size += part.size + rounded(magnitude(part.value));
}
