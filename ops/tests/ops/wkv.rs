//! The recurrence of RWKV-7 and its gradient against the plainest loops of docs/NUMERICS.md: the same bits on every instruction set
//! and number of threads, in one piece or in several.

use crate::cpus;
use crate::page::{Stored, all_rounded, bits, cases, chains, exp, values, widened};
use proptest::prelude::*;
use samebits_ops::*;

/// A case of random numbers.
struct Drawn<I> {
    shape: Wkv7,
    /// r, w, k, v, a and b.
    tokens: [Vec<I>; 6],
    state: Option<Vec<f32>>,
    len: Option<Vec<i32>>,
    dy: Vec<I>,
    dnext: Option<Vec<f32>>,
}

/// A token of a head, what a reads, and the states before and behind.
struct Token {
    r: Vec<f32>,
    left: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
    sa: Vec<f32>,
    before: Vec<f32>,
    after: Vec<f32>,
}

impl<I: Stored> Drawn<I> {
    fn new(shape: Wkv7, spread: u32, seed: u64, flags: u32) -> Drawn<I> {
        let Wkv7 { batch, length, heads, head_dim } = shape;
        let (of_tokens, of_state) = (batch * length * heads * head_dim, batch * heads * head_dim * head_dim);
        let given = |flag: u32| flags & flag != 0;
        let mut number = seed;
        let tokens = [spread, 2, 1, spread, 1, 1].map(|spread| {
            number += 1;
            values::<I>(number, of_tokens, spread)
        });
        let mut drawn = Drawn {
            shape,
            tokens,
            state: given(1).then(|| values(seed + 7, of_state, spread)),
            len: given(2).then(|| (0..batch).map(|b| ((seed >> b) as usize % (length + 1)) as i32).collect()),
            dy: values(seed + 8, of_tokens, spread),
            dnext: given(4).then(|| values(seed + 9, of_state, spread)),
        };
        let special = [1.0, f32::NAN, f32::INFINITY, -0.0][seed as usize % 4];
        let at = seed as usize % of_tokens;
        [0, 3].into_iter().for_each(|i| drawn.tokens[i][at] = I::narrow(special));
        drawn.dy[at] = I::narrow(special);
        drawn.tokens[1][at] = I::narrow([0.0, -200.0, f32::NEG_INFINITY, 3.0][seed as usize % 4]);
        drawn
    }

    fn tokens_of(&self, b: usize) -> usize {
        self.len.as_ref().map_or(self.shape.length, |len| len[b] as usize)
    }

    /// The state of a head that is given, or +0.
    fn given(&self, state: Option<&Vec<f32>>, unit: usize) -> Vec<f32> {
        let size = self.shape.head_dim * self.shape.head_dim;
        state.map_or_else(|| vec![0.0; size], |state| state[unit * size..][..size].to_vec())
    }

    /// All tokens of a head.
    fn walk(&self, b: usize, h: usize) -> Vec<Token> {
        let Wkv7 { length, heads, head_dim: n, .. } = self.shape;
        let (mut state, mut tokens) = (self.given(self.state.as_ref(), b * heads + h), Vec::new());
        for at in (0..self.tokens_of(b)).map(|t| ((b * length + t) * heads + h) * n) {
            let [r, w, k, v, a, of_b] = self.tokens.each_ref().map(|x| widened(&x[at..][..n]));
            let left: Vec<f32> = w.into_iter().map(exp).collect();
            let sa: Vec<f32> = (0..n).map(|e| chains(n, |d| (state[d * n + e], a[d]))).collect();
            let moved = |i: usize| {
                let (d, e) = (i / n, i % n);
                k[d].mul_add(v[e], of_b[d].mul_add(sa[e], state[i] * left[d]))
            };
            let after: Vec<f32> = (0..n * n).map(moved).collect();
            tokens.push(Token { r, left, k, v, a, b: of_b, sa, before: state, after: after.clone() });
            state = after;
        }
        tokens
    }

    /// y and next before the last rounding.
    fn page(&self) -> [Vec<f32>; 2] {
        let Wkv7 { batch, length, heads, head_dim: n } = self.shape;
        let (mut y, mut next) = (vec![0.0; batch * length * heads * n], Vec::new());
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let tokens = self.walk(b, h);
            for (t, token) in tokens.iter().enumerate() {
                for e in 0..n {
                    y[((b * length + t) * heads + h) * n + e] = chains(n, |d| (token.after[d * n + e], token.r[d]));
                }
            }
            let begun = || self.given(self.state.as_ref(), b * heads + h);
            next.extend(tokens.last().map_or_else(begun, |token| token.after.clone()));
        }
        [y, next]
    }

    /// dr, dw, dk, dv, da, db and dstate before the last rounding.
    fn page_backward(&self) -> ([Vec<f32>; 6], Vec<f32>) {
        let Wkv7 { batch, length, heads, head_dim: n } = self.shape;
        let mut made = [(); 6].map(|()| vec![0f32; batch * length * heads * n]);
        let mut dstate = Vec::new();
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let mut m = self.given(self.dnext.as_ref(), b * heads + h);
            for (t, token) in self.walk(b, h).iter().enumerate().rev() {
                let Token { r, left, k, v, a, b: of_b, sa, before, after } = token;
                let at = ((b * length + t) * heads + h) * n;
                let dy = widened(&self.dy[at..][..n]);
                m = (0..n * n).map(|i| r[i / n].mul_add(dy[i % n], m[i])).collect();
                let dsa: Vec<f32> = (0..n).map(|e| chains(n, |d| (m[d * n + e], of_b[d]))).collect();
                for i in 0..n {
                    let sums = [
                        chains(n, |e| (after[i * n + e], dy[e])),
                        chains(n, |e| (m[i * n + e], before[i * n + e])) * left[i],
                        chains(n, |e| (m[i * n + e], v[e])),
                        chains(n, |d| (m[d * n + i], k[d])),
                        chains(n, |e| (before[i * n + e], dsa[e])),
                        chains(n, |e| (m[i * n + e], sa[e])),
                    ];
                    made.iter_mut().zip(sums).for_each(|(made, sum)| made[at + i] = sum);
                }
                m = (0..n * n).map(|i| a[i / n].mul_add(dsa[i % n], m[i] * left[i / n])).collect();
            }
            dstate.extend(m);
        }
        (made, dstate)
    }

    fn inputs(&self) -> Wkv7Inputs<'_, I> {
        let [r, w, k, v, a, b] = &self.tokens;
        Wkv7Inputs { r, w, k, v, a, b, state: self.state.as_deref(), len: self.len.as_deref() }
    }
}

fn check<I: Stored, O: Stored>(shape: Wkv7, spread: u32, seed: u64, flags: u32) {
    let drawn: Drawn<I> = Drawn::new(shape, spread, seed, flags);
    let Wkv7 { batch, length, heads, head_dim } = shape;
    let (of_tokens, of_state) = (batch * length * heads * head_dim, batch * heads * head_dim * head_dim);
    let [y, next] = drawn.page();
    let expected = [all_rounded::<O>(&y), all_rounded::<f32>(&next)];
    let (made, dstate) = drawn.page_backward();
    let (narrow, wide) = (made.map(|x| all_rounded::<O>(&x)), all_rounded::<f32>(&dstate));
    for cpu in cpus() {
        let what = format!("{} to {} {cpu:?} {shape:?} {flags:b}", I::NAME, O::NAME);
        let (mut y, mut next) = (vec![O::narrow(f32::NAN); of_tokens], vec![f32::NAN; of_state]);
        wkv7(&cpu, &shape, &drawn.inputs(), &mut y, &mut next).unwrap();
        assert_eq!([bits(&y), bits(&next)], expected, "wkv7 {what}");
        let [mut dr, mut dw, mut dk, mut dv, mut da, mut db] = [(); 6].map(|()| vec![O::narrow(f32::NAN); of_tokens]);
        let mut dstate = vec![f32::NAN; of_state];
        let made = Wkv7Gradients {
            dr: &mut dr[..],
            dw: &mut dw,
            dk: &mut dk,
            dv: &mut dv,
            da: &mut da,
            db: &mut db,
            dstate: &mut dstate[..],
        };
        wkv7_backward(&cpu, &shape, &drawn.inputs(), &drawn.dy, drawn.dnext.as_deref(), made).unwrap();
        for (name, (made, page)) in
            ["dr", "dw", "dk", "dv", "da", "db"].into_iter().zip([dr, dw, dk, dv, da, db].iter().zip(&narrow))
        {
            assert_eq!(&bits(made), page, "{name} {what}");
        }
        assert_eq!(bits(&dstate), wide, "dstate {what}");
        in_pieces::<I, O>(&cpu, &drawn, &expected, &what);
    }
}

/// Each piece from the state that the one before ended with.
fn in_pieces<I: Stored, O: Stored>(cpu: &Cpu, drawn: &Drawn<I>, expected: &[Vec<u32>; 2], what: &str) {
    let Wkv7 { batch, length, heads, head_dim } = drawn.shape;
    let (width, mut state, mut from) = (heads * head_dim, drawn.state.clone(), 0);
    for to in [length / 3, length / 3 + 1, length].into_iter().filter(|&to| to <= length) {
        let cut = |x: &Vec<I>| -> Vec<I> {
            (0..batch).flat_map(|b| x[(b * length + from) * width..(b * length + to) * width].to_vec()).collect()
        };
        let [r, w, k, v, a, b] = &drawn.tokens.each_ref().map(cut);
        let most = (to - from) as i32;
        let len = drawn.len.as_ref().map(|len| len.iter().map(|len| (*len - from as i32).clamp(0, most)).collect());
        let len: Option<Vec<i32>> = len;
        let inputs = Wkv7Inputs { r, w, k, v, a, b, state: state.as_deref(), len: len.as_deref() };
        let part = Wkv7 { length: to - from, ..drawn.shape };
        let mut y = vec![O::narrow(f32::NAN); r.len()];
        let mut next = vec![f32::NAN; batch * width * head_dim];
        wkv7(cpu, &part, &inputs, &mut y, &mut next).unwrap();
        for (b, y) in y.chunks((to - from).max(1) * width).enumerate() {
            let whole = &expected[0][(b * length + from) * width..][..y.len()];
            assert_eq!(bits(y), whole, "tokens {from}..{to} of {b}: {what}");
        }
        (state, from) = (Some(next), to);
    }
    assert_eq!(bits(&state.unwrap()), expected[1], "the last state: {what}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn recurrences_of_rwkv_are_the_page(
        batch in 1usize..3,
        length in prop_oneof![6 => 1usize..8, 1 => 60usize..70],
        heads in 1usize..3,
        head_dim in prop_oneof![6 => 1usize..40, 1 => 120usize..140],
        spread in prop::sample::select(vec![1u32, 5, 30]),
        seed: u64,
        flags in 0u32..8,
    ) {
        let length = if head_dim > 40 { length.min(8) } else { length };
        let (shape, seed) = (Wkv7 { batch, length, heads, head_dim }, seed >> 4);
        check::<bf16, bf16>(shape, spread, seed, flags);
        check::<f32, f32>(shape, spread, seed, flags);
        check::<f16, f32>(shape, spread.min(5), seed, flags);
        check::<f32, bf16>(shape, spread, seed, flags);
    }
}
