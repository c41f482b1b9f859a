//! `wkv7_backward`: the inputs of its cases and its oracle.
use super::ssd_scan::Num;
use super::wkv7::{Wkv, extents, state, tokens};
use super::*;

pub(super) const SPEC: Spec = Spec {
    op: &samebits_schema::wkv7_backward::OP,
    class: Class::Reduction,
    // Products of a state with the gradient of one leave f32 where both are near one of its ends.
    fills: &[Fill::Normal, Fill::Wide, Fill::Edges, Fill::Classes],
    table: include_str!("../../ops/wkv7_backward.toml"),
    make,
    compute,
};

/// Inputs of the recurrence. Of classes, those of one token behind a state of 1: the gradients of the first sequence are dy, of the
/// second what the gradient of its last state is.
fn make(maker: &Maker) -> BTreeMap<String, Tensor> {
    let [b, t, h, d] = extents(maker);
    let (len, mut inputs) = (b * t * h * d, tokens(maker));
    let dy = maker.values("dy", if maker.fill == Fill::Edges { Fill::Edges } else { Fill::Normal }, len, d);
    inputs.extend(maker.floats([("dy", vec![b, t, h, d], dy)]));
    if maker.has("dnext") {
        inputs.insert("dnext".into(), state(&Maker { fill: Fill::Normal, ..*maker }, "dnext"));
    }
    if maker.fill == Fill::Classes {
        let (first, states) = (t * h * d, h * d * d);
        let of = |value: f64, other: f64| [vec![value; first], vec![other; len - first]].concat();
        let mut dy = maker.borders_from(0, first);
        dy.resize(len, -0.0);
        let mut dnext = vec![-0.0; states];
        dnext.extend(Maker { dtype: DType::Fp32, ..*maker }.borders_from(0, (b - 1) * states));
        for (name, values) in [
            ("r", of(1.0, 1.0)),
            ("w", of(0.0, 0.0)),
            ("k", of(1.0, 1.0)),
            ("v", of(-1.0, -1.0)),
            ("a", of(1.0, -0.0)),
            ("b", of(1.0, 1.0)),
            ("dy", dy),
        ] {
            inputs.extend(maker.floats([(name, vec![b, t, h, d], values)]));
        }
        inputs.insert("state".into(), Tensor::fp32(&[b, h, d, d], vec![1.0; b * states]));
        inputs.insert("dnext".into(), round::tensor(DType::Fp32, &[b, h, d, d], &dnext));
    }
    inputs
}

fn compute(c: &Checked) -> References {
    let wkv = Wkv::of(c);
    let [b, t, h, d] = wkv.dims;
    let (dy, dnext) = (c.floats("dy"), c.case.inputs.get("dnext").map(Tensor::to_f64));
    let [mut dr, mut dw, mut dk, mut dv, mut da, mut db] = [(); 6].map(|()| vec![(0.0, 0.0); b * t * h * d]);
    let mut dstate = Vec::new();
    for (entry, head) in (0..b * h).map(|unit| (unit / h, unit % h)) {
        let ((tokens, states), from) = (wkv.walk(entry, head), (entry * h + head) * d * d);
        let given = |i: usize| Num::exact(dnext.as_ref().map_or(0.0, |dnext| dnext[from + i]));
        let mut m: Vec<Num> = (0..d * d).map(given).collect();
        for (t, token) in tokens.iter().enumerate().rev() {
            let (at, before, after) = (wkv.at(entry, t, head), &states[t], &states[t + 1]);
            let of_y: Vec<Num> = dy[at..][..d].iter().map(|dy| Num::exact(*dy)).collect();
            m = m.iter().enumerate().map(|(i, m)| token.r[i / d].times(of_y[i % d]).plus(*m)).collect();
            let over_rows = |x: &[Num], e: usize| Num::sum((0..d).map(|row| m[row * d + e].times(x[row])));
            let over_columns = |s: &[Num], x: &[Num], row: usize| Num::sum((0..d).map(|e| s[row * d + e].times(x[e])));
            let dsa: Vec<Num> = (0..d).map(|e| over_rows(&token.b, e)).collect();
            for i in 0..d {
                dr[at + i] = over_columns(after, &of_y, i).pair();
                let decayed = Num::sum((0..d).map(|e| m[i * d + e].times(before[i * d + e])));
                dw[at + i] = decayed.times(token.left[i]).pair();
                dk[at + i] = over_columns(&m, &token.v, i).pair();
                dv[at + i] = over_rows(&token.k, i).pair();
                da[at + i] = over_columns(before, &dsa, i).pair();
                db[at + i] = over_columns(&m, &token.sa, i).pair();
            }
            let earlier = |(i, m): (usize, &Num)| token.a[i / d].times(dsa[i % d]).plus(m.times(token.left[i / d]));
            m = m.iter().enumerate().map(earlier).collect();
        }
        dstate.extend(m.iter().map(|m| m.pair()));
    }
    let tokens = [("dr", dr), ("dw", dw), ("dk", dk), ("dv", dv), ("da", da), ("db", db)];
    let of_tokens = tokens.map(|(name, made)| (name.to_string(), Reference::new(vec![b, t, h, d], made)));
    let of_state = ("dstate".to_string(), Reference::new(vec![b, h, d, d], dstate));
    of_tokens.into_iter().chain([of_state]).collect()
}
