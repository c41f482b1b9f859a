//! The gated delta rule and its gradient against the plainest loops of docs/NUMERICS.md: the same bits on every instruction
//! set and number of threads, in one piece or in several.

use crate::cpus;
use crate::page::{Stored, all_rounded, bits, cases, chains, exp, join, ln1p_of, segment, values, widened};
use proptest::prelude::*;
use samebits_ops::*;

/// A case of random numbers.
struct Drawn<I> {
    shape: GatedDeltaRule,
    q: Vec<I>,
    k: Vec<I>,
    v: Vec<I>,
    g: Vec<f32>,
    beta: Vec<f32>,
    a_log: Option<Vec<f32>>,
    dt_bias: Option<Vec<f32>>,
    state: Option<Vec<f32>>,
    len: Option<Vec<i32>>,
    dy: Vec<I>,
    dnext: Option<Vec<f32>>,
}

fn softplus(x: f32) -> f32 {
    let l = ln1p_of(exp(-x.abs()), 1.0);
    if x > 0.0 { (f64::from(x) + l) as f32 } else { l as f32 }
}

/// What a token of a head leaves.
struct Token {
    x: Vec<f32>,
    l: Vec<f32>,
    rate: Option<f32>,
    a: Vec<f32>,
    k: Vec<f32>,
    w: Vec<f32>,
    decayed: Vec<f32>,
    r: Vec<f32>,
    u: Vec<f32>,
    state: Vec<f32>,
}

impl<I: Stored> Drawn<I> {
    fn new(shape: GatedDeltaRule, spread: u32, seed: u64, flags: u32) -> Drawn<I> {
        let GatedDeltaRule { batch, length, key_heads, value_heads, key_dim, value_dim, decays, .. } = shape;
        let (rows, of_state) = (batch * length, batch * value_heads * key_dim * value_dim);
        let given = |flag: u32| flags & flag != 0;
        let mut drawn: Drawn<I> = Drawn {
            shape,
            q: values(seed, rows * key_heads * key_dim, spread),
            k: values(seed + 1, rows * key_heads * key_dim, 1),
            v: values(seed + 2, rows * value_heads * value_dim, spread),
            g: values::<f32>(seed + 3, rows * value_heads * decays, 2).iter().map(|g| -g.abs()).collect(),
            beta: values(seed + 4, rows * value_heads, 1),
            a_log: given(16).then(|| values(seed + 8, value_heads, 1)),
            dt_bias: given(48).then(|| values(seed + 9, value_heads * decays, 1)).filter(|_| flags & 48 == 48),
            state: given(1).then(|| values(seed + 5, of_state, spread)),
            len: given(2).then(|| (0..batch).map(|b| ((seed >> b) as usize % (length + 1)) as i32).collect()),
            dy: values(seed + 6, rows * value_heads * value_dim, spread),
            dnext: given(4).then(|| values(seed + 7, of_state, spread)),
        };
        let special = [1.0, f32::NAN, f32::INFINITY, -0.0][seed as usize % 4];
        for values in [&mut drawn.v, &mut drawn.dy, &mut drawn.q] {
            let at = seed as usize % values.len();
            values[at] = I::narrow(special);
        }
        let at = seed as usize % drawn.g.len();
        drawn.g[at] = [0.0, -200.0, f32::NEG_INFINITY, -1e-8][seed as usize % 4];
        drawn
    }

    fn rows_of(&self, b: usize) -> usize {
        self.len.as_ref().map_or(self.shape.length, |len| len[b] as usize)
    }

    /// All tokens of a head.
    fn tokens(&self, b: usize, h: usize) -> Vec<Token> {
        let GatedDeltaRule { length, key_heads, value_heads, key_dim: n, value_dim: m, decays, scale, .. } = self.shape;
        let mut state = match &self.state {
            Some(state) => state[(b * value_heads + h) * n * m..][..n * m].to_vec(),
            None => vec![0.0; n * m],
        };
        let mut tokens = Vec::new();
        for row in (0..self.rows_of(b)).map(|t| b * length + t) {
            let (key, head) = ((row * key_heads + h / (value_heads / key_heads)) * n, row * value_heads + h);
            let mut x = self.g[head * decays..][..decays].to_vec();
            if let Some(bias) = &self.dt_bias {
                (0..decays).for_each(|i| x[i] += bias[h * decays + i]);
            }
            let rate = self.a_log.as_ref().map(|a_log| -exp(a_log[h]));
            let l: Vec<f32> = x.iter().map(|x| rate.map_or(*x, |rate| rate * softplus(*x))).collect();
            let a: Vec<f32> = (0..n).map(|d| exp(l[if decays == n { d } else { 0 }])).collect();
            let (k, q) = (widened(&self.k[key..][..n]), widened(&self.q[key..][..n]));
            let w: Vec<f32> = q.iter().map(|q| q * scale as f32).collect();
            let decayed: Vec<f32> = (0..n * m).map(|i| state[i] * a[i / m]).collect();
            let v = widened(&self.v[head * m..][..m]);
            let r: Vec<f32> = (0..m).map(|e| v[e] - chains(n, |d| (decayed[d * m + e], k[d]))).collect();
            let u: Vec<f32> = r.iter().map(|r| r * self.beta[head]).collect();
            state = (0..n * m).map(|i| k[i / m].mul_add(u[i % m], decayed[i])).collect();
            tokens.push(Token { x, l, rate, a, k, w, decayed, r, u, state: state.clone() });
        }
        tokens
    }

    /// y and next before the last rounding.
    fn page(&self) -> [Vec<f32>; 2] {
        let GatedDeltaRule { batch, length, value_heads, key_dim: n, value_dim: m, .. } = self.shape;
        let (mut y, mut next) = (vec![0.0; batch * length * value_heads * m], Vec::new());
        for (b, h) in (0..batch).flat_map(|b| (0..value_heads).map(move |h| (b, h))) {
            let tokens = self.tokens(b, h);
            for (t, token) in tokens.iter().enumerate() {
                for e in 0..m {
                    y[((b * length + t) * value_heads + h) * m + e] =
                        chains(n, |d| (token.state[d * m + e], token.w[d]));
                }
            }
            match (tokens.last(), &self.state) {
                (Some(token), _) => next.extend(&token.state),
                (None, Some(state)) => next.extend(&state[(b * value_heads + h) * n * m..][..n * m]),
                (None, None) => next.extend(vec![0.0; n * m]),
            }
        }
        [y, next]
    }

    /// dq, dk, dv, dg, dbeta, da_log and dstate before the last rounding.
    fn page_backward(&self) -> [Vec<f32>; 7] {
        let GatedDeltaRule { batch, length, key_heads, value_heads, key_dim: n, value_dim: m, decays, scale } =
            self.shape;
        let rows = batch * length;
        let [mut dq, mut dk] = [(); 2].map(|()| vec![0f32; rows * key_heads * n]);
        let mut dv = vec![0f32; rows * value_heads * m];
        let (mut dg, mut dbeta) = (vec![0f32; rows * value_heads * decays], vec![0f32; rows * value_heads]);
        let (mut da_log, mut dstate) = (vec![0f32; rows * value_heads], Vec::new());
        for (b, h) in (0..batch).flat_map(|b| (0..value_heads).map(move |h| (b, h))) {
            let mut of_state = match &self.dnext {
                Some(dnext) => dnext[(b * value_heads + h) * n * m..][..n * m].to_vec(),
                None => vec![0.0; n * m],
            };
            for (t, token) in self.tokens(b, h).iter().enumerate().rev() {
                let Token { x, l, rate, a, k, w, decayed, r, u, state } = token;
                let (row, beta) = (b * length + t, self.beta[(b * length + t) * value_heads + h]);
                let (key, head) = ((row * key_heads + h / (value_heads / key_heads)) * n, row * value_heads + h);
                let dy = widened(&self.dy[head * m..][..m]);
                for i in 0..n * m {
                    of_state[i] = w[i / m].mul_add(dy[i % m], of_state[i]);
                }
                let du: Vec<f32> = (0..m).map(|e| chains(n, |d| (of_state[d * m + e], k[d]))).collect();
                let dr: Vec<f32> = du.iter().map(|du| du * beta).collect();
                dv[head * m..][..m].copy_from_slice(&dr);
                dbeta[head] = chains(m, |e| (du[e], r[e]));
                let left: Vec<f32> = (0..n * m).map(|i| (-k[i / m]).mul_add(dr[i % m], of_state[i])).collect();
                let of_decays: Vec<f32> =
                    (0..n).map(|d| chains(m, |e| (left[d * m + e], decayed[d * m + e]))).collect();
                match decays == n {
                    true => dg[head * n..][..n].copy_from_slice(&of_decays),
                    false => {
                        dg[head] = join(std::array::from_fn(|i| segment(n, i).fold(0.0, |sum, d| sum + of_decays[d])))
                    }
                }
                if let Some(rate) = rate {
                    let dl = &mut dg[head * decays..][..decays];
                    da_log[head] = chains(decays, |i| (dl[i], l[i]));
                    dl.iter_mut().zip(x).for_each(|(dl, x)| *dl = (*dl * rate) * (1.0 / (1.0 + exp(-x))));
                }
                for d in 0..n {
                    dq[key + d] += chains(m, |e| (state[d * m + e], dy[e]));
                    let written = chains(m, |e| (of_state[d * m + e], u[e]));
                    dk[key + d] += written - chains(m, |e| (decayed[d * m + e], dr[e]));
                }
                of_state = (0..n * m).map(|i| left[i] * a[i / m]).collect();
            }
            dstate.extend(of_state);
        }
        for (row, totals) in dq.chunks_mut(key_heads * n).enumerate() {
            if row % length < self.rows_of(row / length) {
                totals.iter_mut().for_each(|total| *total *= scale as f32);
            }
        }
        [dq, dk, dv, dg, dbeta, da_log, dstate]
    }

    fn inputs(&self) -> DeltaInputs<'_, I> {
        let Drawn { q, k, v, g, beta, state, len, .. } = self;
        let (a_log, dt_bias) = (self.a_log.as_deref(), self.dt_bias.as_deref());
        DeltaInputs { q, k, v, g, beta, a_log, dt_bias, state: state.as_deref(), len: len.as_deref() }
    }

    /// Some tokens of every sequence, of a tensor with `width` elements each.
    fn part<T: Copy>(&self, x: &[T], width: usize, [from, to]: [usize; 2]) -> Vec<T> {
        let length = self.shape.length;
        (0..self.shape.batch).flat_map(|b| x[(b * length + from) * width..(b * length + to) * width].to_vec()).collect()
    }
}

fn check<I: Stored, O: Stored>(shape: GatedDeltaRule, spread: u32, seed: u64, flags: u32) {
    let drawn: Drawn<I> = Drawn::new(shape, spread, seed, flags);
    let GatedDeltaRule { batch, length, key_heads, value_heads, key_dim, value_dim, decays, .. } = shape;
    let (of_keys, of_values) = (batch * length * key_heads * key_dim, batch * length * value_heads * value_dim);
    let of_state = batch * value_heads * key_dim * value_dim;
    let [y, next] = drawn.page();
    let expected = [all_rounded::<O>(&y), all_rounded::<f32>(&next)];
    let [dq, dk, dv, dg, dbeta, da_log, dstate] = drawn.page_backward();
    let narrow = [dq, dk, dv].map(|x| all_rounded::<O>(&x));
    let wide = [dg, dbeta, da_log, dstate].map(|x| all_rounded::<f32>(&x));
    for cpu in cpus() {
        let what = format!("{} to {} {cpu:?} {shape:?} {flags:b}", I::NAME, O::NAME);
        let (mut y, mut next) = (vec![O::narrow(f32::NAN); of_values], vec![f32::NAN; of_state]);
        gated_delta_rule(&cpu, &shape, &drawn.inputs(), &mut y, &mut next).unwrap();
        assert_eq!([bits(&y), bits(&next)], expected, "gated_delta_rule {what}");
        let room = |count: usize| vec![O::narrow(f32::NAN); count];
        let [mut dq, mut dk, mut dv] = [of_keys, of_keys, of_values].map(room);
        let of_head = batch * length * value_heads;
        let [mut dg, mut dbeta, mut da_log, mut dstate] =
            [of_head * decays, of_head, of_head, of_state].map(|count| vec![f32::NAN; count]);
        let made = DeltaGradients {
            dq: &mut dq[..],
            dk: &mut dk,
            dv: &mut dv,
            dg: &mut dg[..],
            dbeta: &mut dbeta,
            da_log: &mut da_log,
            dstate: &mut dstate,
        };
        gated_delta_rule_backward(&cpu, &shape, &drawn.inputs(), &drawn.dy, drawn.dnext.as_deref(), made).unwrap();
        assert_eq!([bits(&dq), bits(&dk), bits(&dv)], narrow, "dq, dk, dv {what}");
        assert_eq!([bits(&dg), bits(&dbeta), bits(&da_log), bits(&dstate)], wide, "dg, dbeta, da_log, dstate {what}");
        // In pieces, each from the state that the one before ended with.
        let (mut state, mut from) = (drawn.state.clone(), 0);
        for to in [length / 3, length / 3 + 1, length].into_iter().filter(|&to| to <= length) {
            let cut = [from, to];
            let len: Option<Vec<i32>> = drawn
                .len
                .as_ref()
                .map(|len| len.iter().map(|len| (*len - from as i32).clamp(0, (to - from) as i32)).collect());
            let part = GatedDeltaRule { length: to - from, ..shape };
            let (q, k) =
                (drawn.part(&drawn.q, key_heads * key_dim, cut), drawn.part(&drawn.k, key_heads * key_dim, cut));
            let v = drawn.part(&drawn.v, value_heads * value_dim, cut);
            let g = drawn.part(&drawn.g, value_heads * decays, cut);
            let beta = drawn.part(&drawn.beta, value_heads, cut);
            let (state_of, len) = (state.as_deref(), len.as_deref());
            let inputs =
                DeltaInputs { q: &q, k: &k, v: &v, g: &g, beta: &beta, state: state_of, len, ..drawn.inputs() };
            let (mut y, mut next) = (vec![O::narrow(f32::NAN); v.len()], vec![f32::NAN; of_state]);
            gated_delta_rule(&cpu, &part, &inputs, &mut y, &mut next).unwrap();
            let width = value_heads * value_dim;
            for (b, y) in y.chunks((to - from).max(1) * width).enumerate().filter(|_| to > from) {
                let whole = &expected[0][(b * length + from) * width..][..y.len()];
                assert_eq!(bits(y), whole, "tokens {from}..{to} of {b}: {what}");
            }
            (state, from) = (Some(next), to);
        }
        assert_eq!(bits(&state.unwrap()), expected[1], "the last state: {what}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gated_delta_rules_are_the_page(
        batch in 1usize..3,
        length in prop_oneof![6 => 1usize..8, 1 => 60usize..70],
        [key_heads, shared] in [1usize..3, 1usize..3],
        [key_dim, value_dim] in prop_oneof![4 => [1usize..24, 1usize..40], 1 => [100usize..140, 1usize..5], 1 => [1usize..5, 100usize..140]],
        spread in prop::sample::select(vec![1u32, 5, 30]),
        seed: u64,
        flags in 0u32..64,
    ) {
        let decays = if flags & 8 == 8 { key_dim } else { 1 };
        let scale = [0.25, -1.5, 1.0 / (key_dim as f64).sqrt()][seed as usize % 3];
        let value_heads = key_heads * shared;
        let shape = GatedDeltaRule { batch, length, key_heads, value_heads, key_dim, value_dim, decays, scale };
        let seed = seed >> 4;
        check::<bf16, bf16>(shape, spread, seed, flags);
        check::<f32, f32>(shape, spread, seed, flags);
        check::<f16, f32>(shape, spread.min(5), seed, flags);
        check::<f32, bf16>(shape, spread, seed, flags);
    }
}
