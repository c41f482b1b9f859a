//! `gated_delta_rule_backward`: the inputs of its cases and its oracle.
use super::gated_delta_rule::{Delta, FILLS, of_state, of_values, tokens, written};
use super::ssd_scan::Num;
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::gated_delta_rule_backward::OP,
    class: Class::Reduction,
    fills: FILLS,
    table: include_str!("../../ops/gated_delta_rule_backward.toml"),
    make,
    compute,
};

/// Of classes, beta, the state before and v of a sequence: dq, dk, dv and dbeta are what enters; so again; dg and dstate are; they
/// and dk are twice that, so that they are infinite as well.
const CLASSES: [[f64; 3]; 4] = [[1.0, 0.0, 1.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [-1.0, 1.0, 0.0]];

/// Values and states are ordinary: tiny, wide and huge numbers are in dy and dnext. Of classes, a border is what dy of the first
/// sequence and dnext of the others has.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let mut inputs = tokens(maker);
    let (of_values, of_state) = (of_values(maker), of_state(maker));
    let (plain, wide) = (Maker { fill: Fill::Normal, ..*maker }, Maker { dtype: DType::Fp32, ..*maker });
    let (mut v, mut dy) = (written(&plain, "v", &of_values), written(maker, "dy", &of_values));
    let mut state = written(&Maker { fill: Fill::Normal, ..wide }, "state", &of_state);
    let mut dnext = written(&wide, "dnext", &of_state);
    if maker.fill == Fill::Classes {
        let (sequence, states) = (v.len() / of_values[0], state.len() / of_values[0]);
        let of = |i: usize, size: usize| CLASSES[i / size % CLASSES.len()];
        v = (0..v.len()).map(|i| of(i, sequence)[2]).collect();
        state = (0..state.len()).map(|i| of(i, states)[1]).collect();
        dy = maker.borders_from(0, sequence);
        dy.resize(v.len(), -0.0);
        dnext = vec![-0.0; states];
        dnext.extend((1..of_values[0]).flat_map(|_| wide.borders_from(0, states)));
        let heads = of_values[1] * of_values[2];
        let betas: Vec<f64> = (0..of_values[0] * heads).map(|i| of(i, heads)[0]).collect();
        inputs.insert("beta".into(), round::tensor(DType::Fp32, &of_values[..3], &betas));
    }
    inputs.extend(maker.floats([("v", of_values.clone(), v), ("dy", of_values, dy)]));
    for (name, values) in [("state", state), ("dnext", dnext)] {
        if maker.has(name) {
            inputs.insert(name.into(), round::tensor(DType::Fp32, &of_state, &values));
        }
    }
    inputs
}

fn compute(c: &Checked) -> References {
    let delta = Delta::of(c);
    let [b, t, hk, hv, d, e, g] = delta.dims;
    let (dy, dnext) = (c.floats("dy"), c.case.inputs.get("dnext").map(Tensor::to_f64));
    let [mut dq, mut dk] = [(); 2].map(|()| vec![Num::ZERO; b * t * hk * d]);
    let (mut dv, mut dg) = (vec![Num::ZERO; b * t * hv * e], vec![Num::ZERO; b * t * hv * g]);
    let ([mut dbeta, mut da_log], mut dstate) = ([(); 2].map(|()| vec![Num::ZERO; b * t * hv]), Vec::new());
    for (entry, h) in (0..b * hv).map(|unit| (unit / hv, unit % hv)) {
        let (_, tokens) = delta.walk(entry, h);
        let mut m = delta.state_of(dnext.as_ref(), entry, h);
        for (at, token) in tokens.iter().enumerate().rev() {
            let [key, head] = delta.at(entry, at, h);
            let of_y: Vec<Num> = dy[head * e..][..e].iter().map(|dy| Num::exact(*dy)).collect();
            m = (0..d * e).map(|i| token.w[i / e].times(of_y[i % e]).plus(m[i])).collect();
            let du: Vec<Num> = (0..e).map(|i| Num::sum((0..d).map(|row| m[row * e + i].times(token.k[row])))).collect();
            let dr: Vec<Num> = du.iter().map(|du| du.times(token.beta)).collect();
            let n: Vec<Num> = (0..d * e).map(|i| token.k[i / e].negative().times(dr[i % e]).plus(m[i])).collect();
            let over = |x: &[Num], y: &[Num], row: usize| Num::sum((0..e).map(|i| x[row * e + i].times(y[i])));
            for row in 0..d {
                dq[key + row] = dq[key + row].plus(over(&token.state, &of_y, row));
                let of_k = over(&m, &token.u, row).plus(over(&token.decayed, &dr, row).negative());
                dk[key + row] = dk[key + row].plus(of_k);
            }
            let of_decays = |row: usize| over(&n, &token.decayed[row * e..][..e], row);
            let mut dl: Vec<Num> = (0..d).map(of_decays).collect();
            if g != d {
                dl = vec![Num::sum(dl.into_iter())];
            }
            if let Some(rate) = delta.rate(h) {
                da_log[head] = Num::sum(dl.iter().zip(&token.l).map(|(dl, l)| dl.times(*l)));
                dl = dl.iter().zip(&token.slope).map(|(dl, slope)| dl.times(rate).times(*slope)).collect();
            }
            dg[head * g..][..g].copy_from_slice(&dl);
            dbeta[head] = Num::sum(du.iter().zip(&token.r).map(|(du, r)| du.times(*r)));
            dv[head * e..][..e].copy_from_slice(&dr);
            m = (0..d * e).map(|i| n[i].times(token.a[i / e])).collect();
        }
        dstate.extend(m);
    }
    for (i, dq) in dq.iter_mut().enumerate() {
        // Behind the last token nothing was added up, and nothing is scaled.
        let row = i / (hk * d);
        if row % t < delta.lengths[row / t] {
            *dq = dq.times(delta.scale);
        }
    }
    let of = |shape: &[usize], made: Vec<Num>| Reference::new(shape.to_vec(), made.into_iter().map(Num::pair));
    let (of_keys, of_heads) = ([b, t, hk, d], [b, t, hv]);
    BTreeMap::from([
        ("dq".to_string(), of(&of_keys, dq)),
        ("dk".to_string(), of(&of_keys, dk)),
        ("dv".to_string(), of(&[b, t, hv, e], dv)),
        ("dg".to_string(), of(&[b, t, hv, g], dg)),
        ("dbeta".to_string(), of(&of_heads, dbeta)),
        ("da_log".to_string(), of(&of_heads, da_log)),
        ("dstate".to_string(), of(&[b, hv, d, e], dstate)),
    ])
}
