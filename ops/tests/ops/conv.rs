//! Causal convolutions and products of elements against the plainest loops of docs/NUMERICS.md: the same bits on every
//! instruction set and number of threads, in one piece or in several.

use crate::cpus;
use crate::page::{Stored, all_rounded, bits, cases, values, widened};
use proptest::prelude::*;
use samebits_ops::*;

/// A case of random numbers.
struct Drawn<I> {
    shape: CausalConv1d,
    x: Vec<I>,
    w: Vec<I>,
    bias: Option<Vec<I>>,
    state: Option<Vec<f32>>,
    len: Option<Vec<i32>>,
    dy: Vec<I>,
    dnext: Option<Vec<f32>>,
}

impl<I: Stored> Drawn<I> {
    fn new(shape: CausalConv1d, spread: u32, seed: u64, flags: u32) -> Drawn<I> {
        let CausalConv1d { batch, length, channels, taps } = shape;
        let (rows, of_state) = (batch * length * channels, batch * (taps - 1) * channels);
        let given = |flag: u32| flags & flag != 0;
        let mut drawn: Drawn<I> = Drawn {
            shape,
            x: values(seed, rows, spread),
            w: values(seed + 1, channels * taps, spread),
            bias: given(1).then(|| values(seed + 2, channels, spread)),
            state: given(2).then(|| values(seed + 3, of_state, spread)),
            len: given(4).then(|| (0..batch).map(|b| ((seed >> b) as usize % (length + 1)) as i32).collect()),
            dy: values(seed + 4, rows, spread),
            dnext: given(8).then(|| values(seed + 5, of_state, spread)),
        };
        // One of each, so that most rows stay numbers; taps of infinity or NaN make NaN beside +0.
        let special = [1.0, f32::NAN, f32::INFINITY, -0.0][seed as usize % 4];
        for values in [&mut drawn.x, &mut drawn.dy].into_iter().filter(|values| !values.is_empty()) {
            let at = seed as usize % values.len();
            values[at] = I::narrow(special);
        }
        drawn.w[seed as usize % (channels * taps)] = I::narrow([1.0, f32::NEG_INFINITY, -0.0][seed as usize % 3]);
        drawn
    }

    fn rows_of(&self, b: usize) -> usize {
        self.len.as_ref().map_or(self.shape.length, |len| len[b] as usize)
    }

    /// A row of state and x.
    fn row(&self, b: usize, row: usize, channel: usize) -> f32 {
        let CausalConv1d { length, channels, taps, .. } = self.shape;
        match (row.checked_sub(taps - 1), &self.state) {
            (Some(t), _) => widened(&self.x[(b * length + t) * channels + channel..][..1])[0],
            (None, Some(state)) => state[(b * (taps - 1) + row) * channels + channel],
            (None, None) => 0.0,
        }
    }

    fn tap(&self, channel: usize, j: usize) -> f32 {
        widened(&self.w[channel * self.shape.taps + j..][..1])[0]
    }

    /// y and next before the last rounding.
    fn page(&self) -> [Vec<f32>; 2] {
        let CausalConv1d { batch, length, channels, taps } = self.shape;
        let (mut y, mut next) = (Vec::new(), Vec::new());
        for b in 0..batch {
            for t in 0..length {
                for c in 0..channels {
                    let mut acc = 0.0f32;
                    for j in 0..taps {
                        acc = self.tap(c, j).mul_add(self.row(b, t + j, c), acc);
                    }
                    let biased = self.bias.as_ref().map_or(acc, |bias| acc + widened(&bias[c..c + 1])[0]);
                    y.push(if t < self.rows_of(b) { biased } else { 0.0 });
                }
            }
            for i in 0..taps - 1 {
                (0..channels).for_each(|c| next.push(self.row(b, self.rows_of(b) + i, c)));
            }
        }
        [y, next]
    }

    /// dx and dstate before the last rounding.
    fn page_backward(&self) -> [Vec<f32>; 2] {
        let CausalConv1d { batch, length, channels, taps } = self.shape;
        let before = taps - 1;
        let (mut dx, mut dstate) = (Vec::new(), Vec::new());
        for b in 0..batch {
            let end = self.rows_of(b);
            for r in 0..before + length {
                for c in 0..channels {
                    let mut acc = 0.0f32;
                    for i in 0..taps {
                        let from = (r + i) as i64 - before as i64;
                        let there = from >= 0 && (from as usize) < end;
                        let at = || (b * length + from as usize) * channels + c;
                        let dy = if there { widened(&self.dy[at()..][..1])[0] } else { 0.0 };
                        acc = self.tap(c, taps - 1 - i).mul_add(dy, acc);
                    }
                    if let (Some(dnext), true) = (&self.dnext, r >= end && r < end + before) {
                        acc += dnext[(b * before + r - end) * channels + c];
                    }
                    match r < before {
                        true => dstate.push(acc),
                        false => dx.push(if r < before + end { acc } else { 0.0 }),
                    }
                }
            }
        }
        [dx, dstate]
    }

    /// dw from `start` on.
    fn page_dw(&self, start: &[f32], tokens: Tokens) -> Vec<u32> {
        let CausalConv1d { batch, length, channels, taps } = self.shape;
        let (mut dw, mut number) = (start.to_vec(), tokens.offset);
        let counted = |row: &usize| tokens.mask.is_none_or(|mask| mask[*row] != 0);
        for row in (0..batch * length).filter(counted) {
            for c in 0..channels {
                let dy = widened(&self.dy[row * channels + c..][..1])[0];
                for j in 0..taps {
                    let sum = &mut dw[(number % 64 * channels + c) * taps + j];
                    *sum = f32::narrow(dy.mul_add(self.row(row / length, row % length + j, c), *sum));
                }
            }
            number += 1;
        }
        bits(&dw)
    }

    fn inputs(&self) -> ConvInputs<'_, I> {
        let (state, len) = (self.state.as_deref(), self.len.as_deref());
        ConvInputs { x: &self.x, w: &self.w, bias: self.bias.as_deref(), state, len }
    }

    /// Some rows of every sequence.
    fn part(&self, from: usize, to: usize) -> (CausalConv1d, Vec<I>, Option<Vec<i32>>) {
        let CausalConv1d { batch, length, channels, .. } = self.shape;
        let rows = |b: usize| self.x[(b * length + from) * channels..(b * length + to) * channels].to_vec();
        let left = |len: &i32| (*len - from as i32).clamp(0, (to - from) as i32);
        let len = self.len.as_ref().map(|len| len.iter().map(left).collect());
        (CausalConv1d { length: to - from, ..self.shape }, (0..batch).flat_map(rows).collect(), len)
    }
}

fn check<I: Stored, O: Stored>(shape: CausalConv1d, spread: u32, seed: u64, flags: u32) {
    let drawn: Drawn<I> = Drawn::new(shape, spread, seed, flags);
    let CausalConv1d { batch, length, channels, taps } = shape;
    let (rows, of_state) = (batch * length * channels, batch * (taps - 1) * channels);
    let (y, next) = (drawn.page(), drawn.page_backward());
    let expected = [all_rounded::<O>(&y[0]), all_rounded::<f32>(&y[1])];
    let expected_back = [all_rounded::<O>(&next[0]), all_rounded::<f32>(&next[1])];
    let start: Vec<f32> = values(seed + 6, 64 * channels * taps, spread);
    let mask: Vec<i32> = values::<f32>(seed + 7, batch * length, 1).iter().map(|v| i32::from(*v > -0.3) * 7).collect();
    let tokens = Tokens { mask: (flags & 16 == 16).then_some(&mask), offset: (seed % 1000) as usize };
    let expected_dw = drawn.page_dw(&start, tokens);
    for cpu in cpus() {
        let what = format!("{} to {} {cpu:?} {shape:?} {flags:b}", I::NAME, O::NAME);
        let (mut y, mut next) = (vec![O::narrow(f32::NAN); rows], vec![f32::NAN; of_state]);
        causal_conv1d(&cpu, &shape, &drawn.inputs(), &mut y, &mut next).unwrap();
        assert_eq!([bits(&y), bits(&next)], expected, "causal_conv1d {what}");
        let (mut dx, mut dstate) = (vec![O::narrow(f32::NAN); rows], vec![f32::NAN; of_state]);
        let (dnext, len) = (drawn.dnext.as_deref(), drawn.len.as_deref());
        let given = ConvGradients { dy: &drawn.dy, w: &drawn.w, dnext, len };
        causal_conv1d_backward(&cpu, &shape, &given, &mut dx, &mut dstate).unwrap();
        assert_eq!([bits(&dx), bits(&dstate)], expected_back, "causal_conv1d_backward {what}");
        let mut dw = start.clone();
        let state = drawn.state.as_deref();
        causal_conv1d_dw(&cpu, &shape, tokens, &drawn.x, &drawn.dy, state, &mut dw).unwrap();
        assert_eq!(bits(&dw), expected_dw, "causal_conv1d_dw {what}");
        // In pieces, each from the state that the one before ended with.
        let (mut state, mut from) = (drawn.state.clone(), 0);
        for to in [length / 3, length / 3 + 1, length].into_iter().filter(|&to| to <= length) {
            let (part, x, len) = drawn.part(from, to);
            let (mut y, mut next) = (vec![O::narrow(f32::NAN); x.len()], vec![f32::NAN; of_state]);
            let inputs = ConvInputs { x: &x, state: state.as_deref(), len: len.as_deref(), ..drawn.inputs() };
            causal_conv1d(&cpu, &part, &inputs, &mut y, &mut next).unwrap();
            for (b, y) in y.chunks((to - from).max(1) * channels).enumerate().filter(|_| to > from) {
                let whole = &expected[0][(b * length + from) * channels..][..y.len()];
                assert_eq!(bits(y), whole, "rows {from}..{to} of {b}: {what}");
            }
            (state, from) = (Some(next), to);
        }
        assert_eq!(bits(&state.unwrap()), expected[1], "the last state: {what}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn causal_convolutions_are_the_page(
        batch in 1usize..4,
        length in prop_oneof![6 => 1usize..12, 1 => 60usize..70],
        channels in prop_oneof![4 => 1usize..50, 1 => 1usize..140],
        taps in prop_oneof![4 => 1usize..6, 1 => 6usize..20],
        spread in prop::sample::select(vec![1u32, 5, 30]),
        seed: u64,
        flags in 0u32..32,
    ) {
        let (shape, seed) = (CausalConv1d { batch, length, channels, taps }, seed >> 4);
        check::<bf16, bf16>(shape, spread, seed, flags);
        check::<f32, f32>(shape, spread, seed, flags);
        check::<f16, f32>(shape, spread.min(5), seed, flags);
        check::<f32, bf16>(shape, spread, seed, flags);
    }

    #[test]
    fn products_of_elements_are_the_page(
        n in 1usize..700,
        spread in prop::sample::select(vec![1u32, 30, 70]),
        seed: u64,
        special in prop::sample::select(vec![0.0f32, -0.0, f32::NAN, f32::INFINITY, 1e-45, 3e38]),
    ) {
        check_mul::<bf16, bf16>(n, spread, seed >> 3, special);
        check_mul::<f32, bf16>(n, spread, seed >> 3, special);
        check_mul::<f32, f32>(n, spread, seed >> 3, special);
        check_mul::<f16, f16>(n, spread.min(7), seed >> 3, special);
        check_mul::<bf16, f16>(n, spread, seed >> 3, special);
    }
}

fn check_mul<I: Stored, O: Stored>(n: usize, spread: u32, seed: u64, special: f32) {
    let (mut a, b): (Vec<I>, Vec<I>) = (values(seed, n, spread), values(seed + 1, n, spread));
    a[seed as usize % n] = I::narrow(special);
    let expected: Vec<f32> = widened(&a).iter().zip(widened(&b)).map(|(a, b)| a * b).collect();
    for cpu in cpus() {
        let mut y = vec![O::narrow(f32::NAN); n];
        mul(&cpu, &a, &b, &mut y).unwrap();
        assert_eq!(bits(&y), all_rounded::<O>(&expected), "{} to {} {cpu:?} {n}", I::NAME, O::NAME);
    }
}

/// More channels than a block has, more rows than a piece, and more sequences than tasks.
#[test]
fn blocks_and_pieces_are_the_page() {
    for (batch, length, channels, taps) in [(1, 131, 259, 4), (70, 1, 33, 4), (2, 66, 600, 2), (9, 64, 16, 8)] {
        check::<bf16, bf16>(CausalConv1d { batch, length, channels, taps }, 3, 77, 15);
        check::<f32, f32>(CausalConv1d { batch, length, channels, taps }, 3, 78, 31);
    }
}

/// Nothing is read or written where there is nothing, and a state is handed on where there are no rows.
#[test]
fn empty_extents() {
    for cpu in cpus() {
        let shape = CausalConv1d { batch: 2, length: 0, channels: 2, taps: 2 };
        let inputs =
            ConvInputs { x: &[] as &[f32], w: &[1.0; 4], bias: None, state: Some(&[1.0, 2.0, 3.0, 4.0]), len: None };
        let mut next = [0f32; 4];
        causal_conv1d(&cpu, &shape, &inputs, &mut [] as &mut [f32], &mut next).unwrap();
        assert_eq!(next, [1.0, 2.0, 3.0, 4.0]);
        let given = ConvGradients { dy: &[] as &[f32], w: &[1.0; 4], dnext: Some(&next), len: None };
        let mut dstate = [9f32; 4];
        causal_conv1d_backward(&cpu, &shape, &given, &mut [] as &mut [f32], &mut dstate).unwrap();
        assert_eq!(dstate, next);
        // No row and no state: nothing, however often.
        let nothing = CausalConv1d { batch: usize::MAX, length: 0, channels: 3, taps: 1 };
        let inputs = ConvInputs { x: &[] as &[f32], w: &[1.0; 3], bias: None, state: None, len: None };
        causal_conv1d(&cpu, &nothing, &inputs, &mut [] as &mut [f32], &mut []).unwrap();
    }
}

/// Each tensor that does not fit is named, before anything is written.
#[test]
fn refusals_name_the_tensor() {
    let cpu = Cpu::best();
    let shape = CausalConv1d { batch: 2, length: 3, channels: 2, taps: 2 };
    let (x, w, state) = ([1f32; 12], [1f32; 4], [1f32; 4]);
    let right = ConvInputs { x: &x[..], w: &w, bias: None, state: None, len: None };
    let forward = |shape: CausalConv1d, inputs: ConvInputs<f32>, rows: usize, states: usize| {
        let (mut y, mut next) = (vec![7f32; rows], vec![7f32; states]);
        let found = causal_conv1d(&cpu, &shape, &inputs, &mut y, &mut next).map_err(|e| e.to_string());
        assert!(found.is_ok() || y.iter().chain(&next).all(|v| *v == 7.0), "nothing is written");
        found
    };
    assert_eq!(forward(shape, right, 12, 4), Ok(()));
    let given = ConvGradients { dy: &x[..], w: &w, dnext: None, len: None };
    let backward = |given: ConvGradients<f32>, rows: usize, states: usize| {
        let (mut dx, mut dstate) = (vec![7f32; rows], vec![7f32; states]);
        let found = causal_conv1d_backward(&cpu, &shape, &given, &mut dx, &mut dstate).map_err(|e| e.to_string());
        assert!(found.is_ok() || dx.iter().chain(&dstate).all(|v| *v == 7.0), "nothing is written");
        found
    };
    assert_eq!(backward(given, 12, 4), Ok(()));
    let sums = |x: &[f32], dy: &[f32], state: Option<&[f32]>, len: usize| {
        causal_conv1d_dw(&cpu, &shape, Tokens::default(), x, dy, state, &mut vec![0.0; len]).map_err(|e| e.to_string())
    };
    assert_eq!(sums(&x, &x, Some(&state), 256), Ok(()));
    for (found, part) in [
        (forward(CausalConv1d { taps: 0, ..shape }, ConvInputs { w: &[], ..right }, 12, 0), "at least one tap"),
        (forward(shape, ConvInputs { x: &x[..11], ..right }, 12, 4), "`x` has 11 elements"),
        (forward(shape, ConvInputs { w: &w[..3], ..right }, 12, 4), "`w` has 3 elements; its shape [C,K] needs 4"),
        (forward(shape, ConvInputs { bias: Some(&w), ..right }, 12, 4), "`bias` has 4 elements"),
        (forward(shape, ConvInputs { state: Some(&w[..2]), ..right }, 12, 4), "`state` has 2 elements"),
        (forward(shape, ConvInputs { len: Some(&[3]), ..right }, 12, 4), "`len` has 1 elements"),
        (forward(shape, ConvInputs { len: Some(&[3, 4]), ..right }, 12, 4), "len[1] is 4; use 0 to 3"),
        (forward(shape, ConvInputs { len: Some(&[-1, 0]), ..right }, 12, 4), "len[0] is -1; use 0 to 3"),
        (forward(shape, right, 11, 4), "`y` has 11 elements"),
        (forward(shape, right, 12, 5), "`next` has 5 elements"),
        (backward(ConvGradients { dy: &x[..2], ..given }, 12, 4), "`dy` has 2 elements"),
        (backward(ConvGradients { dnext: Some(&w[..1]), ..given }, 12, 4), "`dnext` has 1 elements"),
        (backward(ConvGradients { len: Some(&[0, 9]), ..given }, 12, 4), "len[1] is 9; use 0 to 3"),
        (backward(given, 13, 4), "`dx` has 13 elements"),
        (backward(given, 12, 0), "`dstate` has 0 elements"),
        (sums(&x[..1], &x, None, 256), "`x` has 1 elements"),
        (sums(&x, &x[..1], None, 256), "`dy` has 1 elements"),
        (sums(&x, &x, Some(&state[..3]), 256), "`state` has 3 elements"),
        (sums(&x, &x, None, 255), "`dw` has 255 elements"),
    ] {
        let found = found.unwrap_err();
        assert!(found.contains(part), "`{part}` is not in: {found}");
    }
}
