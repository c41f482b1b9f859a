//! The scan of Mamba and its gradient against the plainest loops of docs/NUMERICS.md: the same bits on every instruction set,
//! number of threads and budget, in one piece or in several.

use crate::cpus;
use crate::page::{Stored, all_rounded, bits, budgets, cases, exp, lanes, ln1p_of, values, widened};
use crate::scan::{Gradients, positions};
use proptest::prelude::*;
use samebits_ops::*;

/// A case of random numbers.
struct Drawn<I> {
    shape: SelectiveScan,
    x: Vec<I>,
    dt: Vec<I>,
    a_log: Vec<I>,
    b: Vec<I>,
    c: Vec<I>,
    d: Option<Vec<I>>,
    dt_bias: Option<Vec<I>>,
    state: Option<Vec<f32>>,
    len: Option<Vec<i32>>,
    dy: Vec<I>,
    dnext: Option<Vec<f32>>,
}

/// A NaN that is stored on the way is the canonical one.
fn kept(value: f32) -> f32 {
    if value.is_nan() { f32::NAN } else { value }
}

impl<I: Stored> Drawn<I> {
    fn new(shape: SelectiveScan, spread: u32, seed: u64, flags: u32) -> Drawn<I> {
        let SelectiveScan { batch, length, channels, state_dim } = shape;
        let (of_x, of_b, of_state) =
            (batch * length * channels, batch * length * state_dim, batch * channels * state_dim);
        let given = |flag: u32| flags & flag != 0;
        let mut drawn: Drawn<I> = Drawn {
            shape,
            x: values(seed, of_x, spread),
            dt: values(seed + 1, of_x, 2),
            a_log: values(seed + 2, channels * state_dim, 2),
            b: values(seed + 3, of_b, spread),
            c: values(seed + 4, of_b, spread),
            d: given(1).then(|| values(seed + 5, channels, spread)),
            dt_bias: given(2).then(|| values(seed + 6, channels, 2)),
            state: given(4).then(|| values(seed + 7, of_state, spread)),
            len: given(8).then(|| (0..batch).map(|b| ((seed >> b) as usize % (length + 1)) as i32).collect()),
            dy: values(seed + 8, of_x, spread),
            dnext: given(16).then(|| values(seed + 9, of_state, spread)),
        };
        // One of each, so that most stay numbers.
        let special = [1.0, f32::NAN, f32::INFINITY, -0.0][seed as usize % 4];
        let at = |values: &[I]| seed as usize % values.len();
        for values in [&mut drawn.x, &mut drawn.dy, &mut drawn.b] {
            let at = at(values);
            values[at] = I::narrow(special);
        }
        let at = at(&drawn.dt);
        drawn.dt[at] = I::narrow([1.0, -200.0, 90.0, f32::NEG_INFINITY, f32::INFINITY, -0.0][seed as usize % 6]);
        drawn
    }

    fn rows_of(&self, b: usize) -> usize {
        self.len.as_ref().map_or(self.shape.length, |len| len[b] as usize)
    }

    /// x, dt or dy of a channel.
    fn x(&self, x: &[I], [b, t, i]: [usize; 3]) -> f32 {
        widened(&x[(b * self.shape.length + t) * self.shape.channels + i..][..1])[0]
    }

    /// b or c.
    fn shared(&self, x: &[I], [b, t, n]: [usize; 3]) -> f32 {
        widened(&x[(b * self.shape.length + t) * self.shape.state_dim + n..][..1])[0]
    }

    fn of_channel(x: &Option<Vec<I>>, i: usize) -> Option<f32> {
        x.as_ref().map(|x| widened(&x[i..=i])[0])
    }

    fn rate(&self, i: usize, n: usize) -> f32 {
        -exp(widened(&self.a_log[i * self.shape.state_dim + n..][..1])[0])
    }

    /// v and e.
    fn step(&self, at: [usize; 3]) -> [f32; 2] {
        let dt = self.x(&self.dt, at);
        let v = Self::of_channel(&self.dt_bias, at[2]).map_or(dt, |bias| dt + bias);
        let l = ln1p_of(exp(-v.abs()), 1.0);
        [v, (if v > 0.0 { f64::from(v) + l } else { l }) as f32]
    }

    /// The states of a channel before the first position and behind each.
    fn states(&self, b: usize, i: usize) -> Vec<Vec<f32>> {
        let SelectiveScan { channels, state_dim, .. } = self.shape;
        let first = match &self.state {
            Some(state) => state[(b * channels + i) * state_dim..][..state_dim].to_vec(),
            None => vec![0.0; state_dim],
        };
        let mut states = vec![first];
        for t in 0..self.rows_of(b) {
            let [_, e] = self.step([b, t, i]);
            let (u, before) = (e * self.x(&self.x, [b, t, i]), states.last().unwrap());
            let after = (0..state_dim)
                .map(|n| kept(exp(e * self.rate(i, n)).mul_add(before[n], u * self.shared(&self.b, [b, t, n]))));
            let after = after.collect();
            states.push(after);
        }
        states
    }

    /// y and next before the last rounding.
    fn page(&self) -> [Vec<f32>; 2] {
        let SelectiveScan { batch, length, channels, .. } = self.shape;
        let (mut y, mut next) = (vec![0.0; self.x.len()], Vec::new());
        for (b, i) in (0..batch * channels).map(|unit| (unit / channels, unit % channels)) {
            let states = self.states(b, i);
            for t in 0..self.rows_of(b) {
                let terms = states[t + 1].iter().enumerate();
                let sum = terms.fold(0f32, |sum, (n, s)| s.mul_add(self.shared(&self.c, [b, t, n]), sum));
                let x = self.x(&self.x, [b, t, i]);
                y[(b * length + t) * channels + i] = Self::of_channel(&self.d, i).map_or(sum, |d| d.mul_add(x, sum));
            }
            next.extend_from_slice(states.last().unwrap());
        }
        [y, next]
    }

    /// dx, ddt, db, dc, da_log, dd and dstate before the last rounding.
    fn page_backward(&self) -> [Vec<f32>; 7] {
        let SelectiveScan { batch, length, channels, state_dim } = self.shape;
        let [mut dx, mut ddt] = [(); 2].map(|()| vec![0f32; self.x.len()]);
        let (mut da_log, mut dd, mut dstate) = (Vec::new(), Vec::new(), Vec::new());
        // The terms of db and dc, by position and element, of every channel.
        let mut terms = [(); 2].map(|()| vec![vec![0f32; channels]; self.b.len()]);
        for (b, i) in (0..batch * channels).map(|unit| (unit / channels, unit % channels)) {
            let states = self.states(b, i);
            let mut m = match &self.dnext {
                Some(dnext) => dnext[(b * channels + i) * state_dim..][..state_dim].to_vec(),
                None => vec![0.0; state_dim],
            };
            let (mut of_rates, mut of_d) = (vec![0f32; state_dim], 0f32);
            for t in (0..self.rows_of(b)).rev() {
                let (at, row) = ([b, t, i], (b * length + t) * channels + i);
                let ([v, e], x, dy) = (self.step(at), self.x(&self.x, at), self.x(&self.dy, at));
                let (mut q, mut exponents) = (0f32, 0f32);
                for n in 0..state_dim {
                    let place = (b * length + t) * state_dim + n;
                    let exponent = e * self.rate(i, n);
                    let g = dy.mul_add(self.shared(&self.c, [b, t, n]), m[n]);
                    m[n] = exp(exponent) * g;
                    let z = m[n] * states[t][n];
                    q = g.mul_add(self.shared(&self.b, [b, t, n]), q);
                    exponents = self.rate(i, n).mul_add(z, exponents);
                    of_rates[n] = exponent.mul_add(z, of_rates[n]);
                    terms[0][place][i] = g.mul_add(e * x, 0.0);
                    terms[1][place][i] = states[t + 1][n].mul_add(dy, 0.0);
                }
                let entered = e * q;
                dx[row] = Self::of_channel(&self.d, i).map_or(entered, |d| d.mul_add(dy, entered));
                ddt[row] = q.mul_add(x, exponents) * (1.0 / (1.0 + exp(-v)));
                of_d = dy.mul_add(x, of_d);
            }
            da_log.extend(of_rates);
            dd.push(of_d);
            dstate.extend(m);
        }
        let [db, dc] = terms.map(|terms| {
            let block = |terms: &[f32]| lanes(terms.iter().copied().enumerate(), |_, term| term);
            terms.iter().map(|terms| terms.chunks(64).fold(0f32, |sum, terms| sum + block(terms))).collect()
        });
        [dx, ddt, db, dc, da_log, dd, dstate]
    }

    fn inputs(&self) -> SelectiveInputs<'_, I> {
        SelectiveInputs {
            x: &self.x,
            dt: &self.dt,
            a_log: &self.a_log,
            b: &self.b,
            c: &self.c,
            d: self.d.as_deref(),
            dt_bias: self.dt_bias.as_deref(),
            state: self.state.as_deref(),
            len: self.len.as_deref(),
        }
    }
}

/// Room for the outputs of the gradient.
fn room<O: Stored>(shape: &SelectiveScan) -> Gradients<O> {
    let SelectiveScan { batch, length, channels, state_dim } = *shape;
    let (of_x, of_b, of_state) = (batch * length * channels, batch * length * state_dim, batch * channels * state_dim);
    Gradients::sized([of_x, of_x, of_b, of_b], [of_state, batch * channels, of_state])
}

fn parts<O>(made: &mut Gradients<O>) -> SelectiveGradients<'_, [O], [f32]> {
    let ([dx, ddt, db, dc], [da_log, dd, dstate]) = (&mut made.out, &mut made.wide);
    SelectiveGradients { dx, ddt, db, dc, da_log, dd, dstate }
}

fn check<I: Stored, O: Stored>(shape: SelectiveScan, spread: u32, seed: u64, flags: u32) {
    let drawn: Drawn<I> = Drawn::new(shape, spread, seed, flags);
    let SelectiveScan { batch, length, channels, state_dim } = shape;
    let of_state = batch * channels * state_dim;
    let page = drawn.page();
    let expected = [all_rounded::<O>(&page[0]), all_rounded::<f32>(&page[1])];
    let back = drawn.page_backward();
    let (narrow, wide) = back.split_at(4);
    let expected_back: Vec<Vec<u32>> =
        narrow.iter().map(|x| all_rounded::<O>(x)).chain(wide.iter().map(|x| all_rounded::<f32>(x))).collect();
    let given = SelectiveOutputGradients { dy: &drawn.dy[..], dnext: drawn.dnext.as_deref() };
    for cpu in cpus() {
        let what = format!("{} to {} {cpu:?} {shape:?} {flags:b}", I::NAME, O::NAME);
        let (mut y, mut next) = (vec![O::narrow(f32::NAN); drawn.x.len()], vec![f32::NAN; of_state]);
        selective_scan(&cpu, &shape, &drawn.inputs(), &mut y, &mut next).unwrap();
        assert_eq!([bits(&y), bits(&next)], expected, "selective_scan {what}");
        let mut made = room::<O>(&shape);
        selective_scan_backward(&cpu, &shape, &drawn.inputs(), &given, parts(&mut made)).unwrap();
        assert_eq!(made.bits(), expected_back, "selective_scan_backward {what}");
        for tight in
            budgets(&cpu, seed, |cpu| selective_scan_backward(cpu, &shape, &drawn.inputs(), &given, parts(&mut made)))
        {
            let mut made = room::<O>(&shape);
            selective_scan_backward(&tight, &shape, &drawn.inputs(), &given, parts(&mut made)).unwrap();
            assert_eq!(made.bits(), expected_back, "selective_scan_backward {tight:?} {what}");
        }
        // In pieces, each from the state that the one before ended with.
        let (mut state, mut from) = (drawn.state.clone(), 0);
        for to in [length / 3, length / 3 + 1, length].into_iter().filter(|&to| to <= length) {
            let part = SelectiveScan { length: to - from, ..shape };
            let left = |len: &i32| (*len - from as i32).clamp(0, (to - from) as i32);
            let len: Option<Vec<i32>> = drawn.len.as_ref().map(|len| len.iter().map(left).collect());
            let some = |x: &[I], width: usize| positions(x, [batch, length, width], from, to);
            let [x, dt] = [&drawn.x, &drawn.dt].map(|x| some(x, channels));
            let [b, c] = [&drawn.b, &drawn.c].map(|x| some(x, state_dim));
            let inputs = SelectiveInputs {
                x: &x,
                dt: &dt,
                b: &b,
                c: &c,
                state: state.as_deref(),
                len: len.as_deref(),
                ..drawn.inputs()
            };
            let (mut y, mut next) = (vec![O::narrow(f32::NAN); x.len()], vec![f32::NAN; of_state]);
            selective_scan(&cpu, &part, &inputs, &mut y, &mut next).unwrap();
            for (b, y) in y.chunks((to - from).max(1) * channels).enumerate().filter(|_| to > from) {
                let whole = &expected[0][(b * length + from) * channels..][..y.len()];
                assert_eq!(bits(y), whole, "positions {from}..{to} of {b}: {what}");
            }
            (state, from) = (Some(next), to);
        }
        assert_eq!(bits(&state.unwrap()), expected[1], "the last state: {what}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases() / 2, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn selective_scans_are_the_page(
        batch in 1usize..4,
        length in prop_oneof![6 => 1usize..8, 1 => 15usize..20],
        channels in prop_oneof![6 => 1usize..36, 1 => 62usize..67],
        state_dim in prop_oneof![4 => 1usize..6, 2 => 7usize..18, 1 => 31usize..34],
        spread in prop::sample::select(vec![1u32, 5, 20]),
        seed: u64,
        flags in 0u32..32,
    ) {
        let shape = SelectiveScan { batch, length, channels, state_dim };
        check::<bf16, bf16>(shape, spread, seed >> 5, flags);
        check::<f32, f32>(shape, spread, seed >> 5, flags);
        check::<f16, f32>(shape, spread.min(5), seed >> 5, flags);
        check::<f32, bf16>(shape, spread, seed >> 5, flags);
    }
}

/// More blocks of channels than are worked on at a time, and many positions.
#[test]
fn many_channels_and_positions_are_the_page() {
    for (batch, length, channels, state_dim) in [(3, 2, 150, 3), (1, 50, 20, 16), (2, 1, 1030, 2)] {
        let shape = SelectiveScan { batch, length, channels, state_dim };
        check::<bf16, bf16>(shape, 3, 77, 31);
        check::<f32, f32>(shape, 3, 78, 7);
    }
}

/// A state is handed on where there are no positions, sums over no channels are +0.
#[test]
fn empty_extents() {
    for cpu in cpus() {
        let shape = SelectiveScan { batch: 2, length: 0, channels: 1, state_dim: 2 };
        let none: &[f32] = &[];
        let state = [1.0, 2.0, 3.0, 4.0];
        let inputs = SelectiveInputs {
            x: none,
            dt: none,
            a_log: &[0.5, 0.25],
            b: none,
            c: none,
            d: None,
            dt_bias: None,
            state: Some(&state),
            len: None,
        };
        let mut next = [0f32; 4];
        selective_scan(&cpu, &shape, &inputs, &mut [] as &mut [f32], &mut next).unwrap();
        assert_eq!(next, state);
        let mut made = room::<f32>(&shape);
        let given = SelectiveOutputGradients { dy: none, dnext: Some(&next) };
        selective_scan_backward(&cpu, &shape, &inputs, &given, parts(&mut made)).unwrap();
        assert_eq!(made.wide, [vec![0.0; 4], vec![0.0; 2], state.to_vec()]);
        // No elements of a state: x that passes it by.
        let no_state = SelectiveScan { batch: 1, length: 1, channels: 1, state_dim: 0 };
        let passing = SelectiveInputs { x: &[3f32], dt: &[1.0], a_log: none, d: Some(&[2.0]), state: None, ..inputs };
        let mut y = [0f32];
        selective_scan(&cpu, &no_state, &passing, &mut y, &mut []).unwrap();
        assert_eq!(y, [6.0]);
        // No channels.
        let no_channels = SelectiveScan { batch: 1, length: 1, channels: 0, state_dim: 2 };
        let nobody = SelectiveInputs { a_log: none, b: &[1.0, 2.0], c: &[3.0, 4.0], state: None, ..inputs };
        let mut made = room::<f32>(&no_channels);
        let given = SelectiveOutputGradients { dy: none, dnext: None };
        selective_scan_backward(&cpu, &no_channels, &nobody, &given, parts(&mut made)).unwrap();
        assert_eq!(made.out[2..], [[0.0; 2], [0.0; 2]]);
        // No position and no state: nothing, however often.
        let nothing = SelectiveScan { batch: usize::MAX, length: 0, channels: 1, state_dim: 0 };
        let inputs = SelectiveInputs { a_log: none, state: None, ..inputs };
        selective_scan(&cpu, &nothing, &inputs, &mut [] as &mut [f32], &mut []).unwrap();
    }
}

/// Each tensor that does not fit is named, before anything is written.
#[test]
fn refusals_name_the_tensor() {
    let cpu = Cpu::best();
    let shape = SelectiveScan { batch: 1, length: 2, channels: 4, state_dim: 3 };
    let (x, a_log, b, d) = ([1f32; 8], [1f32; 12], [1f32; 6], [1f32; 4]);
    let right = SelectiveInputs {
        x: &x[..],
        dt: &x,
        a_log: &a_log,
        b: &b,
        c: &b,
        d: Some(&d),
        dt_bias: None,
        state: None,
        len: None,
    };
    let forward = |inputs: SelectiveInputs<f32>, rows: usize, states: usize| {
        let (mut y, mut next) = (vec![7f32; rows], vec![7f32; states]);
        let found = selective_scan(&cpu, &shape, &inputs, &mut y, &mut next).map_err(|e| e.to_string());
        assert!(found.is_ok() || y.iter().chain(&next).all(|v| *v == 7.0), "nothing is written");
        found
    };
    assert_eq!(forward(right, 8, 12), Ok(()));
    let backward = |dy: &[f32], dnext: Option<&[f32]>, change: fn(&mut Gradients<f32>)| {
        let mut made = room::<f32>(&shape);
        change(&mut made);
        let given = SelectiveOutputGradients { dy, dnext };
        selective_scan_backward(&cpu, &shape, &right, &given, parts(&mut made)).map_err(|e| e.to_string())
    };
    assert_eq!(backward(&x, Some(&a_log), |_| {}), Ok(()));
    for (found, part) in [
        (forward(SelectiveInputs { x: &x[..7], ..right }, 8, 12), "`x` has 7 elements"),
        (forward(SelectiveInputs { dt: &b, ..right }, 8, 12), "`dt` has 6 elements"),
        (forward(SelectiveInputs { a_log: &x, ..right }, 8, 12), "`a_log` has 8 elements; its shape [C,N] needs 12"),
        (forward(SelectiveInputs { b: &x, ..right }, 8, 12), "`b` has 8 elements"),
        (forward(SelectiveInputs { c: &x, ..right }, 8, 12), "`c` has 8 elements"),
        (forward(SelectiveInputs { d: Some(&x), ..right }, 8, 12), "`d` has 8 elements"),
        (forward(SelectiveInputs { dt_bias: Some(&x), ..right }, 8, 12), "`dt_bias` has 8 elements"),
        (forward(SelectiveInputs { state: Some(&x), ..right }, 8, 12), "`state` has 8 elements"),
        (forward(SelectiveInputs { len: Some(&[3]), ..right }, 8, 12), "len[0] is 3; use 0 to 2"),
        (forward(right, 7, 12), "`y` has 7 elements"),
        (forward(right, 8, 11), "`next` has 11 elements"),
        (backward(&x[..3], None, |_| {}), "`dy` has 3 elements"),
        (backward(&x, Some(&x), |_| {}), "`dnext` has 8 elements"),
        (backward(&x, None, |made| made.out[0].truncate(1)), "`dx` has 1 elements"),
        (backward(&x, None, |made| made.out[1].truncate(1)), "`ddt` has 1 elements"),
        (backward(&x, None, |made| made.out[2].truncate(1)), "`db` has 1 elements"),
        (backward(&x, None, |made| made.out[3].truncate(1)), "`dc` has 1 elements"),
        (backward(&x, None, |made| made.wide[0].truncate(1)), "`da_log` has 1 elements"),
        (backward(&x, None, |made| made.wide[1].truncate(1)), "`dd` has 1 elements"),
        (backward(&x, None, |made| made.wide[2].truncate(1)), "`dstate` has 1 elements"),
    ] {
        let found = found.unwrap_err();
        assert!(found.contains(part), "`{part}` is not in: {found}");
    }
}
