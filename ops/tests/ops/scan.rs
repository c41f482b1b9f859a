//! Scans against the plainest loops of docs/NUMERICS.md: the same bits on every instruction set, number of threads and budget, in
//! one piece or in several.

use crate::cpus;
use crate::page::{Stored, all_rounded, bits, budgets, cases, exp, lanes, ln1p_of, values, widened};
use proptest::prelude::*;
use samebits_ops::*;

/// A case of random numbers.
struct Drawn<I> {
    shape: SsdScan,
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

/// A step: how long it is, what is left of a state, the derivative, and A.
struct Step {
    e: f32,
    k: f32,
    slope: Option<f32>,
    a: f32,
}

fn products<'a>(a: impl Iterator<Item = f32> + 'a, b: impl Iterator<Item = f32> + 'a) -> f32 {
    lanes(a.zip(b).enumerate(), |acc, (a, b)| a.mul_add(b, acc))
}

/// A NaN that is stored on the way is the canonical one.
fn kept(value: f32) -> f32 {
    if value.is_nan() { f32::NAN } else { value }
}

impl<I: Stored> Drawn<I> {
    fn new(shape: SsdScan, spread: u32, seed: u64, flags: u32) -> Drawn<I> {
        let SsdScan { batch, length, heads, head_dim, groups, state_dim, .. } = shape;
        let (of_x, of_b) = (batch * length * heads * head_dim, batch * length * groups * state_dim);
        let of_state = batch * heads * head_dim * state_dim;
        let given = |flag: u32| flags & flag != 0;
        let mut drawn: Drawn<I> = Drawn {
            shape,
            x: values(seed, of_x, spread),
            dt: values(seed + 1, batch * length * heads, 2),
            a_log: values(seed + 2, heads, 2),
            b: values(seed + 3, of_b, spread),
            c: values(seed + 4, of_b, spread),
            d: given(1).then(|| values(seed + 5, heads, spread)),
            dt_bias: given(2).then(|| values(seed + 6, heads, 2)),
            state: given(4).then(|| values(seed + 7, of_state, spread)),
            len: given(8).then(|| (0..batch).map(|b| ((seed >> b) as usize % (length + 1)) as i32).collect()),
            dy: values(seed + 8, of_x, spread),
            dnext: given(16).then(|| values(seed + 9, of_state, spread)),
        };
        // One of each, so that most stay numbers.
        let special = [1.0, f32::NAN, f32::INFINITY, -0.0][seed as usize % 4];
        let at = |values: &[I]| seed as usize % values.len();
        for values in [&mut drawn.x, &mut drawn.dy] {
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

    fn x(&self, x: &[I], [b, t, h, p]: [usize; 4]) -> f32 {
        let SsdScan { length, heads, head_dim, .. } = self.shape;
        widened(&x[((b * length + t) * heads + h) * head_dim + p..][..1])[0]
    }

    /// An element of b or c.
    fn of_group(&self, x: &[I], [b, t, h, n]: [usize; 4]) -> f32 {
        let SsdScan { length, heads, groups, state_dim, .. } = self.shape;
        widened(&x[((b * length + t) * groups + h / (heads / groups)) * state_dim + n..][..1])[0]
    }

    fn of_head(x: &Option<Vec<I>>, h: usize) -> Option<f32> {
        x.as_ref().map(|x| widened(&x[h..h + 1])[0])
    }

    fn step(&self, b: usize, t: usize, h: usize) -> Step {
        let SsdScan { length, heads, dt_min, dt_max, .. } = self.shape;
        let dt = widened(&self.dt[(b * length + t) * heads + h..][..1])[0];
        let v = Self::of_head(&self.dt_bias, h).map_or(dt, |bias| dt + bias);
        let l = ln1p_of(exp(-v.abs()), 1.0);
        let (mut e, mut slope) = ((if v > 0.0 { f64::from(v) + l } else { l }) as f32, Some(1.0 / (1.0 + exp(-v))));
        if e < dt_min as f32 {
            (e, slope) = (dt_min as f32, None);
        }
        if dt_max != 0.0 && e > dt_max as f32 {
            (e, slope) = (dt_max as f32, None);
        }
        let a = -exp(widened(&self.a_log[h..h + 1])[0]);
        Step { e, k: exp(e * a), slope, a }
    }

    /// The states of a head before the first position and behind each, `[P,N]`.
    fn states(&self, b: usize, h: usize) -> Vec<Vec<f32>> {
        let SsdScan { heads, head_dim, state_dim, .. } = self.shape;
        let size = head_dim * state_dim;
        let first = match &self.state {
            Some(state) => state[(b * heads + h) * size..][..size].to_vec(),
            None => vec![0.0; size],
        };
        let mut states = vec![first];
        for t in 0..self.rows_of(b) {
            let Step { e, k, .. } = self.step(b, t, h);
            let before = states.last().unwrap();
            let after = (0..size).map(|i| {
                let (p, n) = (i / state_dim, i % state_dim);
                let entered = (e * self.x(&self.x, [b, t, h, p])) * self.of_group(&self.b, [b, t, h, n]);
                kept(k.mul_add(before[i], entered))
            });
            states.push(after.collect());
        }
        states
    }

    /// y and next before the last rounding.
    fn page(&self) -> [Vec<f32>; 2] {
        let SsdScan { batch, length, heads, head_dim, state_dim, .. } = self.shape;
        let (mut y, mut next) = (vec![0.0; self.x.len()], Vec::new());
        for (b, h) in (0..batch * heads).map(|unit| (unit / heads, unit % heads)) {
            let states = self.states(b, h);
            for t in 0..self.rows_of(b) {
                for p in 0..head_dim {
                    let s = states[t + 1][p * state_dim..][..state_dim].iter().copied();
                    let sum = products(s, (0..state_dim).map(|n| self.of_group(&self.c, [b, t, h, n])));
                    let x = self.x(&self.x, [b, t, h, p]);
                    y[((b * length + t) * heads + h) * head_dim + p] =
                        Self::of_head(&self.d, h).map_or(sum, |d| d.mul_add(x, sum));
                }
            }
            next.extend_from_slice(states.last().unwrap());
        }
        [y, next]
    }

    /// dx, ddt, db, dc, da_log, dd and dstate before the last rounding.
    fn page_backward(&self) -> [Vec<f32>; 7] {
        let SsdScan { batch, length, heads, head_dim, groups, state_dim, .. } = self.shape;
        let (size, tokens) = (head_dim * state_dim, batch * length * heads);
        let [mut db, mut dc] = [(); 2].map(|()| vec![0f32; self.b.len()]);
        let (mut dx, [mut ddt, mut da_log, mut dd]) = (vec![0.0; self.x.len()], [(); 3].map(|()| vec![0.0; tokens]));
        let mut dstate = Vec::new();
        for (b, h) in (0..batch * heads).map(|unit| (unit / heads, unit % heads)) {
            let states = self.states(b, h);
            let mut g = match &self.dnext {
                Some(dnext) => dnext[(b * heads + h) * size..][..size].to_vec(),
                None => vec![0.0; size],
            };
            let mut k_after = None;
            for t in (0..self.rows_of(b)).rev() {
                let (Step { e, k, slope, a }, row) = (self.step(b, t, h), (b * length + t) * heads + h);
                for (i, g) in g.iter_mut().enumerate() {
                    let dy = self.x(&self.dy, [b, t, h, i / state_dim]);
                    let c = self.of_group(&self.c, [b, t, h, i % state_dim]);
                    *g = kept(dy.mul_add(c, k_after.map_or(*g, |k: f32| k * *g)));
                }
                let of_b = || (0..state_dim).map(|n| self.of_group(&self.b, [b, t, h, n]));
                let q: Vec<f32> = (0..head_dim)
                    .map(|p| kept(products(g[p * state_dim..][..state_dim].iter().copied(), of_b())))
                    .collect();
                let x = || (0..head_dim).map(|p| self.x(&self.x, [b, t, h, p]));
                let dy = || (0..head_dim).map(|p| self.x(&self.dy, [b, t, h, p]));
                for (p, dy) in dy().enumerate() {
                    let entered = e * q[p];
                    dx[row * head_dim + p] = Self::of_head(&self.d, h).map_or(entered, |d| d.mul_add(dy, entered));
                }
                let z = k * products(g.iter().copied(), states[t].iter().copied());
                let w = a.mul_add(z, products(q.iter().copied(), x()));
                ddt[row] = slope.map_or(0.0, |slope| w * slope);
                da_log[row] = (e * a) * z;
                dd[row] = products(dy(), x());
                for n in 0..state_dim {
                    let (mut own_b, mut own_c) = (0f32, 0f32);
                    for (p, (x, dy)) in x().zip(dy()).enumerate() {
                        own_b = kept(g[p * state_dim + n].mul_add(e * x, own_b));
                        own_c = kept(states[t + 1][p * state_dim + n].mul_add(dy, own_c));
                    }
                    let at = ((b * length + t) * groups + h / (heads / groups)) * state_dim + n;
                    (db[at], dc[at]) = (db[at] + own_b, dc[at] + own_c);
                }
                k_after = Some(k);
            }
            dstate.extend(g.iter().map(|g| k_after.map_or(*g, |k| k * g)));
        }
        [dx, ddt, db, dc, da_log, dd, dstate]
    }

    fn inputs(&self) -> ScanInputs<'_, I> {
        ScanInputs {
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

/// The outputs of the gradient of a scan: dx, ddt, db and dc; da_log, dd and dstate.
pub struct Gradients<O> {
    pub out: [Vec<O>; 4],
    pub wide: [Vec<f32>; 3],
}

impl<O: Stored> Gradients<O> {
    /// Of these lengths, of NaN.
    pub fn sized(out: [usize; 4], wide: [usize; 3]) -> Gradients<O> {
        Gradients { out: out.map(|len| vec![O::narrow(f32::NAN); len]), wide: wide.map(|len| vec![f32::NAN; len]) }
    }

    fn of(shape: &SsdScan) -> Gradients<O> {
        let SsdScan { batch, length, heads, head_dim, groups, state_dim, .. } = *shape;
        let (tokens, of_b) = (batch * length * heads, batch * length * groups * state_dim);
        Gradients::sized(
            [tokens * head_dim, tokens, of_b, of_b],
            [tokens, tokens, batch * heads * head_dim * state_dim],
        )
    }

    fn parts(&mut self) -> ScanGradients<'_, [O], [f32]> {
        let ([dx, ddt, db, dc], [da_log, dd, dstate]) = (&mut self.out, &mut self.wide);
        ScanGradients { dx, ddt, db, dc, da_log, dd, dstate }
    }

    pub fn bits(&self) -> Vec<Vec<u32>> {
        self.out.iter().map(|made| bits(made)).chain(self.wide.iter().map(|made| bits(made))).collect()
    }
}

/// Positions `from` to `to` of each of so many sequences of `length`, of what has `width` elements at each.
pub fn positions<I: Copy>(x: &[I], [batch, length, width]: [usize; 3], from: usize, to: usize) -> Vec<I> {
    (0..batch).flat_map(|b| x[(b * length + from) * width..(b * length + to) * width].to_vec()).collect()
}

fn check<I: Stored, O: Stored>(shape: SsdScan, spread: u32, seed: u64, flags: u32) {
    let drawn: Drawn<I> = Drawn::new(shape, spread, seed, flags);
    let SsdScan { batch, length, heads, head_dim, groups, state_dim, .. } = shape;
    let of_state = batch * heads * head_dim * state_dim;
    let page = drawn.page();
    let expected = [all_rounded::<O>(&page[0]), all_rounded::<f32>(&page[1])];
    let back = drawn.page_backward();
    let (narrow, wide) = back.split_at(4);
    let expected_back: Vec<Vec<u32>> =
        narrow.iter().map(|x| all_rounded::<O>(x)).chain(wide.iter().map(|x| all_rounded::<f32>(x))).collect();
    let given = ScanOutputGradients { dy: &drawn.dy[..], dnext: drawn.dnext.as_deref() };
    for cpu in cpus() {
        let what = format!("{} to {} {cpu:?} {shape:?} {flags:b}", I::NAME, O::NAME);
        let (mut y, mut next) = (vec![O::narrow(f32::NAN); drawn.x.len()], vec![f32::NAN; of_state]);
        ssd_scan(&cpu, &shape, &drawn.inputs(), &mut y, &mut next).unwrap();
        assert_eq!([bits(&y), bits(&next)], expected, "ssd_scan {what}");
        let mut made = Gradients::<O>::of(&shape);
        ssd_scan_backward(&cpu, &shape, &drawn.inputs(), &given, made.parts()).unwrap();
        assert_eq!(made.bits(), expected_back, "ssd_scan_backward {what}");
        for tight in budgets(&cpu, seed, |cpu| ssd_scan_backward(cpu, &shape, &drawn.inputs(), &given, made.parts())) {
            let mut made = Gradients::<O>::of(&shape);
            ssd_scan_backward(&tight, &shape, &drawn.inputs(), &given, made.parts()).unwrap();
            assert_eq!(made.bits(), expected_back, "ssd_scan_backward {tight:?} {what}");
        }
        // In pieces, each from the state that the one before ended with.
        let (mut state, mut from) = (drawn.state.clone(), 0);
        for to in [length / 3, length / 3 + 1, length].into_iter().filter(|&to| to <= length) {
            let part = SsdScan { length: to - from, ..shape };
            let left = |len: &i32| (*len - from as i32).clamp(0, (to - from) as i32);
            let len: Option<Vec<i32>> = drawn.len.as_ref().map(|len| len.iter().map(left).collect());
            let some = |x: &[I], width: usize| positions(x, [batch, length, width], from, to);
            let (x, dt) = (some(&drawn.x, heads * head_dim), some(&drawn.dt, heads));
            let [b, c] = [&drawn.b, &drawn.c].map(|x| some(x, groups * state_dim));
            let inputs = ScanInputs {
                x: &x,
                dt: &dt,
                b: &b,
                c: &c,
                state: state.as_deref(),
                len: len.as_deref(),
                ..drawn.inputs()
            };
            let (mut y, mut next) = (vec![O::narrow(f32::NAN); x.len()], vec![f32::NAN; of_state]);
            ssd_scan(&cpu, &part, &inputs, &mut y, &mut next).unwrap();
            for (b, y) in y.chunks((to - from).max(1) * heads * head_dim).enumerate().filter(|_| to > from) {
                let whole = &expected[0][(b * length + from) * heads * head_dim..][..y.len()];
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
    fn scans_are_the_page(
        batch in 1usize..3,
        length in prop_oneof![6 => 1usize..8, 1 => 15usize..20],
        (heads, groups) in prop::sample::select(vec![(1usize, 1usize), (3, 1), (4, 2), (2, 2)]),
        head_dim in 1usize..9,
        state_dim in prop_oneof![4 => 1usize..40, 1 => 250usize..270],
        spread in prop::sample::select(vec![1u32, 5, 20]),
        limits in prop::sample::select(vec![(0.0f64, 0.0f64), (0.3, 0.0), (0.0, 1.5), (0.5, 0.75)]),
        seed: u64,
        flags in 0u32..32,
    ) {
        let (dt_min, dt_max) = limits;
        let shape = SsdScan { batch, length, heads, head_dim, groups, state_dim, dt_min, dt_max };
        check::<bf16, bf16>(shape, spread, seed >> 5, flags);
        check::<f32, f32>(shape, spread, seed >> 5, flags);
        check::<f16, f32>(shape, spread.min(5), seed >> 5, flags);
        check::<f32, bf16>(shape, spread, seed >> 5, flags);
    }
}

/// More heads than are worked on at a time, and more rows of a state than a thread takes.
#[test]
fn many_heads_and_positions_are_the_page() {
    for (batch, length, heads, groups, head_dim, state_dim) in
        [(3, 2, 9, 3, 2, 5), (1, 50, 2, 1, 3, 33), (2, 1, 1, 1, 70, 129)]
    {
        let shape = SsdScan { batch, length, heads, head_dim, groups, state_dim, dt_min: 0.0, dt_max: 0.0 };
        check::<bf16, bf16>(shape, 3, 77, 31);
        check::<f32, f32>(shape, 3, 78, 7);
    }
}

/// A state is handed on where there are no positions.
#[test]
fn empty_extents() {
    for cpu in cpus() {
        let shape =
            SsdScan { batch: 2, length: 0, heads: 1, head_dim: 1, groups: 1, state_dim: 2, dt_min: 0.0, dt_max: 0.0 };
        let none: &[f32] = &[];
        let state = [1.0, 2.0, 3.0, 4.0];
        let inputs = ScanInputs {
            x: none,
            dt: none,
            a_log: &[0.5],
            b: none,
            c: none,
            d: None,
            dt_bias: None,
            state: Some(&state),
            len: None,
        };
        let mut next = [0f32; 4];
        ssd_scan(&cpu, &shape, &inputs, &mut [] as &mut [f32], &mut next).unwrap();
        assert_eq!(next, state);
        let mut made = Gradients::<f32>::of(&shape);
        let given = ScanOutputGradients { dy: none, dnext: Some(&next) };
        ssd_scan_backward(&cpu, &shape, &inputs, &given, made.parts()).unwrap();
        assert_eq!(made.wide[2], state);
        // No position and no state: nothing, however often.
        let nothing = SsdScan { batch: usize::MAX, state_dim: 0, ..shape };
        let inputs = ScanInputs { state: None, ..inputs };
        ssd_scan(&cpu, &nothing, &inputs, &mut [] as &mut [f32], &mut []).unwrap();
    }
}

/// Each tensor that does not fit is named, before anything is written.
#[test]
fn refusals_name_the_tensor() {
    let cpu = Cpu::best();
    let shape =
        SsdScan { batch: 1, length: 2, heads: 2, head_dim: 2, groups: 1, state_dim: 3, dt_min: 0.0, dt_max: 0.0 };
    let (x, dt, a_log, b, state) = ([1f32; 8], [1f32; 4], [1f32; 2], [1f32; 6], [1f32; 12]);
    let right =
        ScanInputs { x: &x[..], dt: &dt, a_log: &a_log, b: &b, c: &b, d: None, dt_bias: None, state: None, len: None };
    let forward = |shape: SsdScan, inputs: ScanInputs<f32>, rows: usize, states: usize| {
        let (mut y, mut next) = (vec![7f32; rows], vec![7f32; states]);
        let found = ssd_scan(&cpu, &shape, &inputs, &mut y, &mut next).map_err(|e| e.to_string());
        assert!(found.is_ok() || y.iter().chain(&next).all(|v| *v == 7.0), "nothing is written");
        found
    };
    assert_eq!(forward(shape, right, 8, 12), Ok(()));
    let backward = |dy: &[f32], dnext: Option<&[f32]>, change: fn(&mut Gradients<f32>)| {
        let mut made = Gradients::<f32>::of(&shape);
        change(&mut made);
        let given = ScanOutputGradients { dy, dnext };
        ssd_scan_backward(&cpu, &shape, &right, &given, made.parts()).map_err(|e| e.to_string())
    };
    assert_eq!(backward(&x, Some(&state), |_| {}), Ok(()));
    for (found, part) in [
        (forward(SsdScan { groups: 0, ..shape }, right, 8, 12), "H = 2 must be a multiple of G = 0"),
        (forward(SsdScan { dt_min: 2.0, dt_max: 1.0, ..shape }, right, 8, 12), "steps from 2 to 1"),
        (forward(SsdScan { dt_min: f64::NAN, ..shape }, right, 8, 12), "steps from NaN"),
        (forward(shape, ScanInputs { x: &x[..7], ..right }, 8, 12), "`x` has 7 elements"),
        (forward(shape, ScanInputs { dt: &x, ..right }, 8, 12), "`dt` has 8 elements"),
        (forward(shape, ScanInputs { a_log: &x, ..right }, 8, 12), "`a_log` has 8 elements"),
        (forward(shape, ScanInputs { b: &x, ..right }, 8, 12), "`b` has 8 elements; its shape [B,T,G,N] needs 6"),
        (forward(shape, ScanInputs { c: &x, ..right }, 8, 12), "`c` has 8 elements"),
        (forward(shape, ScanInputs { d: Some(&x), ..right }, 8, 12), "`d` has 8 elements"),
        (forward(shape, ScanInputs { dt_bias: Some(&x), ..right }, 8, 12), "`dt_bias` has 8 elements"),
        (forward(shape, ScanInputs { state: Some(&x), ..right }, 8, 12), "`state` has 8 elements"),
        (forward(shape, ScanInputs { len: Some(&[3]), ..right }, 8, 12), "len[0] is 3; use 0 to 2"),
        (forward(shape, right, 7, 12), "`y` has 7 elements"),
        (forward(shape, right, 8, 11), "`next` has 11 elements"),
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
