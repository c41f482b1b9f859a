//! Every function of slices with random and extreme arguments: an error, never a panic. Extents are small ones and those whose
//! products are beyond a word, lengths fit or do not, and a number outside its range is always refused.

use samebits_ops::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

const XIELU: Activation = Activation::Xielu(Xielu { alpha_p: 0.8, alpha_n: 1.3, beta: 0.5 });

/// Draws arguments.
struct Draw {
    state: u64,
    cpu: Cpu,
    /// Whether a parameter outside its range was drawn.
    outside: bool,
}

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) as usize % n
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn rarely(&mut self) -> bool {
        self.below(12) == 0
    }

    fn flag(&mut self) -> bool {
        self.below(2) == 1
    }

    fn extent(&mut self) -> usize {
        match self.rarely() {
            true => self.pick(&[1 << 20, 1 << 32, 1 << 40, (1 << 63) + 1, usize::MAX - 1, usize::MAX]),
            false => self.pick(&[0, 1, 2, 2, 4, 4, 6]),
        }
    }

    /// A length for these extents, most often theirs.
    fn len(&mut self, extents: &[usize]) -> usize {
        let len = extents.iter().try_fold(1usize, |n, &extent| n.checked_mul(extent)).filter(|&n| n <= 4096);
        match len {
            Some(len) if !self.rarely() => len,
            _ => self.below(9),
        }
    }

    fn floats(&mut self, extents: &[usize]) -> Vec<f32> {
        let len = self.len(extents);
        (0..len)
            .map(|_| match self.below(40) {
                0 => self.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1e-40, -0.0]),
                _ => self.below(1000) as f32 / 100.0 - 5.0,
            })
            .collect()
    }

    fn ints(&mut self, extents: &[usize], most: usize) -> Vec<i32> {
        let (len, most) = (self.len(extents), most.clamp(1, 8));
        (0..len)
            .map(|_| match self.below(40) {
                0 => self.pick(&[i32::MIN, i32::MAX, -1, 9]),
                _ => self.below(most) as i32,
            })
            .collect()
    }

    /// A parameter: one of those within its range, or of those outside.
    fn number(&mut self, within: &[f64], outside: &[f64]) -> f64 {
        if self.rarely() {
            self.outside = true;
            return self.pick(outside);
        }
        self.pick(within)
    }

    fn positive(&mut self) -> f64 {
        self.number(
            &[1.0, 0.7, 1e-3, 30.0],
            &[0.0, -0.0, -9.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300, 1e-320],
        )
    }

    fn eps(&mut self) -> f32 {
        self.number(&[0.0, 1e-6, 1.0, 3e38], &[-9.0, -1e-30, f64::NAN, f64::INFINITY, f64::NEG_INFINITY]) as f32
    }

    fn rounding(&mut self) -> Rounding {
        self.pick(&[Rounding::Once, Rounding::Hf])
    }

    fn pairing(&mut self) -> Pairing {
        self.pick(&[Pairing::Half, Pairing::Interleaved])
    }

    fn norm(&mut self) -> RmsNorm {
        let (rows, n) = (self.extent(), self.extent());
        RmsNorm { rows, n, eps: self.eps(), rounding: self.rounding(), weight_offset: self.flag() }
    }

    fn norm_rope(&mut self) -> NormRope {
        let [tokens, heads, dim] = [self.extent(), self.extent(), self.extent()];
        let (eps, rounding, pairing) = (self.eps(), self.rounding(), self.pairing());
        NormRope { tokens, heads, dim, eps, rounding, weight_offset: self.flag(), pairing }
    }

    fn table(&mut self, tokens: usize, dim: usize) -> RopeTable {
        let half = self.floats(&[dim / 2]);
        let pos = self.ints(&[tokens], 8);
        RopeTable::new(&self.cpu, &half, &pos)
    }

    fn tokens<'a>(&mut self, mask: &'a [i32]) -> Tokens<'a> {
        Tokens { mask: self.flag().then_some(mask), offset: self.pick(&[0, 1, 63, 64, 1 << 40, usize::MAX]) }
    }

    fn route(&mut self) -> Route {
        Route {
            tokens: self.extent(),
            experts: self.extent(),
            chosen: self.extent(),
            scoring: match self.flag() {
                true => self.pick(&[Scoring::Softmax, Scoring::Sigmoid]),
                false => {
                    Scoring::SparseMixer { jitter: self.number(&[0.01, 0.5], &[-1.0, f64::NAN, f64::INFINITY, 1e300]) }
                }
            },
            chosen_by: self.pick(&[ChosenBy::Scores, ChosenBy::Logits]),
            groups: self.pick(&[1, 1, 1, 2, 0, usize::MAX]),
            top_groups: self.pick(&[1, 1, 1, 2, 0, usize::MAX]),
            group_worth: self.pick(&[GroupWorth::Max, GroupWorth::TopTwo]),
            normalise: self.flag(),
            scale: self.number(&[1.0, 2.5], &[f64::NAN, f64::INFINITY, 1e300]),
        }
    }

    fn clamp(&mut self) -> Clamp {
        const OUTSIDE: [f64; 4] = [f64::NAN, f64::INFINITY, 0.0, -1.0];
        Clamp { alpha: self.number(&[1.0, 1.702], &OUTSIDE) as f32, limit: self.number(&[7.0, 0.5], &OUTSIDE) as f32 }
    }

    fn combine(&mut self) -> Combine {
        Combine { tokens: self.extent(), chosen: self.extent(), rows: self.extent(), n: self.extent() }
    }

    fn attention(&mut self) -> Attention {
        let [batch, queries, keys] = [self.extent(), self.extent(), self.extent()];
        let shape = Attention::causal(
            [batch, queries, keys],
            self.pick(&[[2, 1], [1, 1], [4, 2], [3, 2], [0, 0]]),
            self.extent(),
        );
        Attention {
            value_dim: self.extent(),
            causal: self.flag(),
            window: self.pick(&[None, None, Some(1), Some(usize::MAX)]),
            chunk: self.pick(&[None, None, Some(1), Some(i32::MAX as usize), Some(usize::MAX)]),
            softcap: self.pick(&[None, None, Some(30.0)]),
            scale: self.number(&[1.0, 0.125, 0.0], &[-1.0, f64::NAN, f64::INFINITY]),
            ..shape
        }
    }

    /// Rows of a weight and their length: any number of rows of nothing would be taken, and take its time.
    fn matrix(&mut self) -> [usize; 2] {
        let [n, k] = [self.extent(), self.extent()];
        if n == 0 || k == 0 { [n.min(8), k.min(8)] } else { [n, k] }
    }

    /// A convolution, and the extents of rows, of a state and of its taps.
    fn convolution(&mut self) -> (CausalConv1d, [[usize; 3]; 3]) {
        let [batch, length, channels, taps] = [self.extent(), self.extent(), self.extent(), self.extent()];
        let shape = CausalConv1d { batch, length, channels, taps };
        (shape, [[batch, length, channels], [batch, taps.saturating_sub(1), channels], [channels, taps, 1]])
    }

    /// A norm of groups, and the extents of images.
    fn group_norm(&mut self) -> (GroupNorm, [usize; 3]) {
        let [batch, channels, places] = [self.extent(), self.extent(), self.extent()];
        let groups = self.pick(&[1, 1, 2, 4, 0, usize::MAX]);
        let shape = GroupNorm { batch, channels, places, groups, eps: self.eps(), silu: self.flag() };
        (shape, [batch, channels, places])
    }

    /// A convolution of images, and the extents of x, of y and of w.
    fn images(&mut self) -> (Conv, [[usize; 5]; 3]) {
        let [batch, channels, outputs] = [self.extent(), self.extent(), self.extent()];
        let groups = self.pick(&[1, 1, 1, 2, 0, usize::MAX]);
        let image = [self.pick(&[1, 2, 5, 0]), self.extent(), self.extent()];
        // There are many, and one alone refuses a call.
        let mut numbers = |from: &[usize]| {
            [(); 3].map(|()| if self.below(40) == 0 { self.pick(&[0, 2, usize::MAX]) } else { self.pick(from) })
        };
        let window = Window {
            taps: numbers(&[1, 1, 2, 3]),
            stride: numbers(&[1, 1, 2, 3]),
            dilation: numbers(&[1, 1, 2]),
            before: numbers(&[0, 0, 0, 0, 1]),
            behind: numbers(&[0, 0, 0, 0, 1]),
        };
        let shape = Conv { batch, channels, outputs, groups, image, window };
        let places = |axis: usize| {
            let window = (window.taps[axis].max(1) - 1).saturating_mul(window.dilation[axis]).saturating_add(1);
            let padded =
                image[axis].saturating_add(shape.window.before[axis]).saturating_add(shape.window.behind[axis]);
            padded.saturating_sub(window) / shape.window.stride[axis].max(1) + 1
        };
        let of = |first, second, [d, h, w]: [usize; 3]| [first, second, d, h, w];
        let of_w = of(outputs, channels.checked_div(groups).unwrap_or(0), window.taps);
        (shape, [of(batch, channels, image), of(batch, outputs, [places(0), places(1), places(2)]), of_w])
    }

    /// A scan, and the extents of x, of dt, of b and of a state.
    fn scan(&mut self) -> (SsdScan, [Vec<usize>; 4]) {
        let [batch, length, head_dim, state_dim] = [self.extent(), self.extent(), self.extent(), self.extent()];
        let (heads, groups) = self.pick(&[(2, 1), (1, 1), (4, 2), (3, 2), (0, 0), (usize::MAX, 1)]);
        let [dt_min, dt_max] =
            [[0.0, 0.5], [0.0, 2.0]].map(|within| self.number(&within, &[-1.0, f64::NAN, f64::INFINITY, 1e300]));
        let shape = SsdScan { batch, length, heads, head_dim, groups, state_dim, dt_min, dt_max };
        let (of_dt, of_b) = (vec![batch, length, heads], vec![batch, length, groups, state_dim]);
        (shape, [vec![batch, length, heads, head_dim], of_dt, of_b, vec![batch, heads, head_dim, state_dim]])
    }

    /// A scan of Mamba, and the extents of x, of b, of a_log and of a state.
    fn selective_scan(&mut self) -> (SelectiveScan, [Vec<usize>; 4]) {
        let [batch, length, channels, state_dim] = [self.extent(), self.extent(), self.extent(), self.extent()];
        let shape = SelectiveScan { batch, length, channels, state_dim };
        let (of_x, of_b) = (vec![batch, length, channels], vec![batch, length, state_dim]);
        (shape, [of_x, of_b, vec![channels, state_dim], vec![batch, channels, state_dim]])
    }

    /// A recurrence of RWKV-7, and the extents of what has tokens and of a state.
    fn recurrence(&mut self) -> (Wkv7, [[usize; 4]; 2]) {
        let [batch, length, head_dim] = [self.extent(), self.extent(), self.extent()];
        let heads = self.pick(&[1, 2, 3, 0, usize::MAX]);
        let shape = Wkv7 { batch, length, heads, head_dim };
        (shape, [[batch, length, heads, head_dim], [batch, heads, head_dim, head_dim]])
    }

    /// A delta rule, and the extents of keys, values, decays and a state.
    fn delta_rule(&mut self) -> (GatedDeltaRule, [[usize; 4]; 4]) {
        let [batch, length, key_dim, value_dim] = [self.extent(), self.extent(), self.extent(), self.extent()];
        let [value_heads, key_heads] = self.pick(&[[2, 1], [1, 1], [4, 2], [3, 2], [0, 0], [0, 1]]);
        let decays = self.pick(&[1, key_dim, 3]);
        let scale = self.number(&[1.0, -0.5, 1e38], &[f64::NAN, f64::INFINITY, 1e39]);
        let shape = GatedDeltaRule { batch, length, key_heads, value_heads, key_dim, value_dim, decays, scale };
        let of = |heads, dim| [batch, length, heads, dim];
        let of_state = [batch, value_heads, key_dim, value_dim];
        (shape, [of(key_heads, key_dim), of(value_heads, value_dim), of(value_heads, decays), of_state])
    }

    fn linear(&mut self) -> LinearLogprob {
        let (rows, [vocab, k]) = (self.extent(), self.matrix());
        LinearLogprob { rows, vocab, k, temperature: self.positive() }
    }

    fn loss(&mut self) -> LossShape {
        let shape = LossShape::new(self.extent(), self.extent());
        LossShape {
            reduction: self.pick(&[Reduction::Sum, Reduction::Mean]),
            denominator: self.positive_in_f32(),
            ..shape
        }
    }

    /// As [`Draw::positive`], of what one over need not be finite.
    fn positive_in_f32(&mut self) -> f64 {
        self.number(&[1.0, 0.7, 1e30], &[0.0, -9.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300, 1e-320])
    }
}

type Op = fn(&mut Draw) -> Result<(), Error>;

const OPS: [(&str, Op); 72] = [
    ("add", |d| {
        let n = d.extent();
        let (a, b, mut y) = (d.floats(&[n]), d.floats(&[n]), d.floats(&[n]));
        add(&d.cpu, &a, &b, &mut y)
    }),
    ("mul", |d| {
        let n = d.extent();
        let (a, b, mut y) = (d.floats(&[n]), d.floats(&[n]), d.floats(&[n]));
        mul(&d.cpu, &a, &b, &mut y)
    }),
    ("causal_conv1d", |d| {
        let (shape, [rows, of_state, of_w]) = d.convolution();
        let (x, w, bias, state) = (d.floats(&rows), d.floats(&of_w), d.floats(&of_w[..1]), d.floats(&of_state));
        let (mut y, mut next, len) = (d.floats(&rows), d.floats(&of_state), d.ints(&rows[..1], shape.length));
        let (bias, state) = (d.flag().then_some(&bias[..]), d.flag().then_some(&state[..]));
        let inputs = ConvInputs { x: &x[..], w: &w, bias, state, len: d.flag().then_some(&len[..]) };
        causal_conv1d(&d.cpu, &shape, &inputs, &mut y, &mut next)
    }),
    ("causal_conv1d_backward", |d| {
        let (shape, [rows, of_state, of_w]) = d.convolution();
        let (dy, w, dnext) = (d.floats(&rows), d.floats(&of_w), d.floats(&of_state));
        let (mut dx, mut dstate, len) = (d.floats(&rows), d.floats(&of_state), d.ints(&rows[..1], shape.length));
        let dnext = d.flag().then_some(&dnext[..]);
        let given = ConvGradients { dy: &dy[..], w: &w, dnext, len: d.flag().then_some(&len[..]) };
        causal_conv1d_backward(&d.cpu, &shape, &given, &mut dx, &mut dstate)
    }),
    ("causal_conv1d_dw", |d| {
        let (shape, [rows, of_state, of_w]) = d.convolution();
        let (x, dy, state, mask) = (d.floats(&rows), d.floats(&rows), d.floats(&of_state), d.ints(&rows[..2], 2));
        let (mut dw, tokens) = (d.floats(&[64, of_w[0], of_w[1]]), d.tokens(&mask));
        let state = d.flag().then_some(&state[..]);
        causal_conv1d_dw(&d.cpu, &shape, tokens, &x, &dy, state, &mut dw)
    }),
    ("wkv7", |d| {
        let (shape, [of_tokens, of_state]) = d.recurrence();
        let [r, w, k, v, a, b] = [(); 6].map(|()| d.floats(&of_tokens));
        let (state, len) = (d.floats(&of_state), d.ints(&of_tokens[..1], shape.length));
        let (state, len) = (d.flag().then_some(&state[..]), d.flag().then_some(&len[..]));
        let inputs = Wkv7Inputs { r: &r[..], w: &w, k: &k, v: &v, a: &a, b: &b, state, len };
        let (mut y, mut next) = (d.floats(&of_tokens), d.floats(&of_state));
        wkv7(&d.cpu, &shape, &inputs, &mut y, &mut next)
    }),
    ("wkv7_backward", |d| {
        let (shape, [of_tokens, of_state]) = d.recurrence();
        let [r, w, k, v, a, b] = [(); 6].map(|()| d.floats(&of_tokens));
        let (state, len) = (d.floats(&of_state), d.ints(&of_tokens[..1], shape.length));
        let (state, len) = (d.flag().then_some(&state[..]), d.flag().then_some(&len[..]));
        let inputs = Wkv7Inputs { r: &r[..], w: &w, k: &k, v: &v, a: &a, b: &b, state, len };
        let (dy, dnext) = (d.floats(&of_tokens), d.floats(&of_state));
        let [mut dr, mut dw, mut dk, mut dv, mut da, mut db] = [(); 6].map(|()| d.floats(&of_tokens));
        let mut dstate = d.floats(&of_state);
        let made = Wkv7Gradients {
            dr: &mut dr[..],
            dw: &mut dw,
            dk: &mut dk,
            dv: &mut dv,
            da: &mut da,
            db: &mut db,
            dstate: &mut dstate[..],
        };
        let dnext = d.flag().then_some(&dnext[..]);
        wkv7_backward(&d.cpu, &shape, &inputs, &dy, dnext, made)
    }),
    ("ssd_scan", |d| {
        let (shape, [of_x, of_dt, of_b, of_state]) = d.scan();
        let (x, dt, b, c, state) =
            (d.floats(&of_x), d.floats(&of_dt), d.floats(&of_b), d.floats(&of_b), d.floats(&of_state));
        let [a_log, skip, bias] = [d.floats(&of_dt[2..]), d.floats(&of_dt[2..]), d.floats(&of_dt[2..])];
        let (mut y, mut next, len) = (d.floats(&of_x), d.floats(&of_state), d.ints(&of_x[..1], shape.length));
        let [skip, dt_bias] = [&skip, &bias].map(|x| d.flag().then_some(&x[..]));
        let (state, len) = (d.flag().then_some(&state[..]), d.flag().then_some(&len[..]));
        let inputs = ScanInputs { x: &x[..], dt: &dt, a_log: &a_log, b: &b, c: &c, d: skip, dt_bias, state, len };
        ssd_scan(&d.cpu, &shape, &inputs, &mut y, &mut next)
    }),
    ("ssd_scan_backward", |d| {
        let (shape, [of_x, of_dt, of_b, of_state]) = d.scan();
        let (x, dt, b, c, a_log) =
            (d.floats(&of_x), d.floats(&of_dt), d.floats(&of_b), d.floats(&of_b), d.floats(&of_dt[2..]));
        let (dy, dnext, len) = (d.floats(&of_x), d.floats(&of_state), d.ints(&of_x[..1], shape.length));
        let [mut dx, mut ddt, mut db, mut dc] = [d.floats(&of_x), d.floats(&of_dt), d.floats(&of_b), d.floats(&of_b)];
        let [mut da_log, mut dd, mut dstate] = [d.floats(&of_dt), d.floats(&of_dt), d.floats(&of_state)];
        let (dnext, len) = (d.flag().then_some(&dnext[..]), d.flag().then_some(&len[..]));
        let inputs =
            ScanInputs { x: &x[..], dt: &dt, a_log: &a_log, b: &b, c: &c, d: None, dt_bias: None, state: None, len };
        let made = ScanGradients {
            dx: &mut dx[..],
            ddt: &mut ddt,
            db: &mut db,
            dc: &mut dc,
            da_log: &mut da_log[..],
            dd: &mut dd,
            dstate: &mut dstate,
        };
        ssd_scan_backward(&d.cpu, &shape, &inputs, &ScanOutputGradients { dy: &dy, dnext }, made)
    }),
    ("selective_scan", |d| {
        let (shape, [of_x, of_b, of_a, of_state]) = d.selective_scan();
        let (x, dt, b, c, a_log) =
            (d.floats(&of_x), d.floats(&of_x), d.floats(&of_b), d.floats(&of_b), d.floats(&of_a));
        let [skip, bias, state] = [d.floats(&of_a[..1]), d.floats(&of_a[..1]), d.floats(&of_state)];
        let (mut y, mut next, len) = (d.floats(&of_x), d.floats(&of_state), d.ints(&of_x[..1], shape.length));
        let [skip, dt_bias] = [&skip, &bias].map(|x| d.flag().then_some(&x[..]));
        let (state, len) = (d.flag().then_some(&state[..]), d.flag().then_some(&len[..]));
        let inputs = SelectiveInputs { x: &x[..], dt: &dt, a_log: &a_log, b: &b, c: &c, d: skip, dt_bias, state, len };
        selective_scan(&d.cpu, &shape, &inputs, &mut y, &mut next)
    }),
    ("selective_scan_backward", |d| {
        let (shape, [of_x, of_b, of_a, of_state]) = d.selective_scan();
        let (x, dt, b, c, a_log) =
            (d.floats(&of_x), d.floats(&of_x), d.floats(&of_b), d.floats(&of_b), d.floats(&of_a));
        let (dy, dnext, len) = (d.floats(&of_x), d.floats(&of_state), d.ints(&of_x[..1], shape.length));
        let [mut dx, mut ddt, mut db, mut dc] = [d.floats(&of_x), d.floats(&of_x), d.floats(&of_b), d.floats(&of_b)];
        let [mut da_log, mut dd, mut dstate] = [d.floats(&of_state), d.floats(&of_state[..2]), d.floats(&of_state)];
        let (dnext, len) = (d.flag().then_some(&dnext[..]), d.flag().then_some(&len[..]));
        let (a_log, none) = (&a_log[..], None);
        let inputs =
            SelectiveInputs { x: &x[..], dt: &dt, a_log, b: &b, c: &c, d: none, dt_bias: none, state: None, len };
        let made = SelectiveGradients {
            dx: &mut dx[..],
            ddt: &mut ddt,
            db: &mut db,
            dc: &mut dc,
            da_log: &mut da_log[..],
            dd: &mut dd,
            dstate: &mut dstate,
        };
        let given = SelectiveOutputGradients { dy: &dy[..], dnext };
        selective_scan_backward(&d.cpu, &shape, &inputs, &given, made)
    }),
    ("gated_delta_rule", |d| {
        let (shape, [of_keys, of_values, of_decays, of_state]) = d.delta_rule();
        let (q, k, v, g) = (d.floats(&of_keys), d.floats(&of_keys), d.floats(&of_values), d.floats(&of_decays));
        let (beta, state, len) = (d.floats(&of_values[..3]), d.floats(&of_state), d.ints(&of_keys[..1], shape.length));
        let (state, len) = (d.flag().then_some(&state[..]), d.flag().then_some(&len[..]));
        let (a_log, dt_bias) = (d.floats(&of_decays[2..3]), d.floats(&of_decays[2..]));
        let (a_log, dt_bias) = (d.flag().then_some(&a_log[..]), d.flag().then_some(&dt_bias[..]));
        let inputs = DeltaInputs { q: &q[..], k: &k, v: &v, g: &g, beta: &beta, a_log, dt_bias, state, len };
        let (mut y, mut next) = (d.floats(&of_values), d.floats(&of_state));
        gated_delta_rule(&d.cpu, &shape, &inputs, &mut y, &mut next)
    }),
    ("gated_delta_rule_backward", |d| {
        let (shape, [of_keys, of_values, of_decays, of_state]) = d.delta_rule();
        let (q, k, v, g) = (d.floats(&of_keys), d.floats(&of_keys), d.floats(&of_values), d.floats(&of_decays));
        let (beta, state, len) = (d.floats(&of_values[..3]), d.floats(&of_state), d.ints(&of_keys[..1], shape.length));
        let (state, len) = (d.flag().then_some(&state[..]), d.flag().then_some(&len[..]));
        let (a_log, dt_bias) = (d.floats(&of_decays[2..3]), d.floats(&of_decays[2..]));
        let (a_log, dt_bias) = (d.flag().then_some(&a_log[..]), d.flag().then_some(&dt_bias[..]));
        let inputs = DeltaInputs { q: &q[..], k: &k, v: &v, g: &g, beta: &beta, a_log, dt_bias, state, len };
        let (dy, dnext) = (d.floats(&of_values), d.floats(&of_state));
        let [mut dq, mut dk] = [(); 2].map(|()| d.floats(&of_keys));
        let (mut dv, mut dg, mut dbeta) = (d.floats(&of_values), d.floats(&of_decays), d.floats(&of_values[..3]));
        let (mut da_log, mut dstate) = (d.floats(&of_values[..3]), d.floats(&of_state));
        let made = DeltaGradients {
            dq: &mut dq[..],
            dk: &mut dk,
            dv: &mut dv,
            dg: &mut dg[..],
            dbeta: &mut dbeta,
            da_log: &mut da_log,
            dstate: &mut dstate,
        };
        let dnext = d.flag().then_some(&dnext[..]);
        gated_delta_rule_backward(&d.cpu, &shape, &inputs, &dy, dnext, made)
    }),
    ("silu_mul", |d| {
        let n = d.extent();
        let (a, b, mut y) = (d.floats(&[n]), d.floats(&[n]), d.floats(&[n]));
        silu_mul(&d.cpu, &a, &b, &mut y)
    }),
    ("clamped_silu_mul", |d| {
        let (n, clamp) = (d.extent(), d.clamp());
        let (a, b, mut y) = (d.floats(&[n]), d.floats(&[n]), d.floats(&[n]));
        clamped_silu_mul(&d.cpu, clamp, &a, &b, &mut y)
    }),
    ("clamped_silu_mul_backward", |d| {
        let (n, clamp) = (d.extent(), d.clamp());
        let [a, b, c, mut e, mut f] = std::array::from_fn(|_| d.floats(&[n]));
        clamped_silu_mul_backward(&d.cpu, clamp, [&a, &b, &c], [&mut e, &mut f])
    }),
    ("sigmoid_mul", |d| {
        let shape = SigmoidMul { rows: d.extent(), gates: d.extent(), n: d.extent() };
        let (of_gates, whole) = ([shape.rows, shape.gates], [shape.rows, shape.n]);
        let (gate, x, mut y) = (d.floats(&of_gates), d.floats(&whole), d.floats(&whole));
        sigmoid_mul(&d.cpu, &shape, &gate, &x, &mut y)
    }),
    ("sigmoid_mul_backward", |d| {
        let shape = SigmoidMul { rows: d.extent(), gates: d.extent(), n: d.extent() };
        let (of_gates, whole) = ([shape.rows, shape.gates], [shape.rows, shape.n]);
        let (gate, mut dgate) = (d.floats(&of_gates), d.floats(&of_gates));
        let [x, dy, mut dx] = std::array::from_fn(|_| d.floats(&whole));
        sigmoid_mul_backward(&d.cpu, &shape, [&gate, &x, &dy], [&mut dgate, &mut dx])
    }),
    ("gelu_mul", |d| {
        let n = d.extent();
        let (a, b, mut y) = (d.floats(&[n]), d.floats(&[n]), d.floats(&[n]));
        gelu_mul(&d.cpu, &a, &b, &mut y)
    }),
    ("silu_mul_backward", |d| {
        let n = d.extent();
        let [a, b, c, mut e, mut f] = std::array::from_fn(|_| d.floats(&[n]));
        silu_mul_backward(&d.cpu, [&a, &b, &c], [&mut e, &mut f])
    }),
    ("gelu_mul_backward", |d| {
        let n = d.extent();
        let [a, b, c, mut e, mut f] = std::array::from_fn(|_| d.floats(&[n]));
        gelu_mul_backward(&d.cpu, [&a, &b, &c], [&mut e, &mut f])
    }),
    ("activate", |d| {
        let (n, kind) = (d.extent(), if d.flag() { Activation::Gelu } else { XIELU });
        let (x, mut y) = (d.floats(&[n]), d.floats(&[n]));
        activate(&d.cpu, kind, &x, &mut y)
    }),
    ("activate_backward", |d| {
        let (n, kind) = (d.extent(), if d.flag() { XIELU } else { Activation::GeluTanh });
        let (x, dy, mut dx) = (d.floats(&[n]), d.floats(&[n]), d.floats(&[n]));
        activate_backward(&d.cpu, kind, &x, &dy, &mut dx)
    }),
    ("softcap", |d| {
        let (n, cap) = (d.extent(), d.positive());
        let (x, mut y) = (d.floats(&[n]), d.floats(&[n]));
        softcap(&d.cpu, cap, &x, &mut y)
    }),
    ("softcap_backward", |d| {
        let (n, cap) = (d.extent(), d.positive());
        let (x, dy, mut dx) = (d.floats(&[n]), d.floats(&[n]), d.floats(&[n]));
        softcap_backward(&d.cpu, cap, &x, &dy, &mut dx)
    }),
    ("scale", |d| {
        let (n, factor) = (d.extent(), d.number(&[1.0, -2.0, 0.0], &[f64::NAN, f64::INFINITY, 1e300]));
        let (x, mut y) = (d.floats(&[n]), d.floats(&[n]));
        scale(&d.cpu, factor, &x, &mut y)
    }),
    ("rms_norm", |d| {
        let shape = d.norm();
        let (x, w, mut y) = (d.floats(&[shape.rows, shape.n]), d.floats(&[shape.n]), d.floats(&[shape.rows, shape.n]));
        rms_norm(&d.cpu, &shape, &x, &w, &mut y)
    }),
    ("rms_norm_backward", |d| {
        let shape = d.norm();
        let whole = [shape.rows, shape.n];
        let (x, w, dy, mut dx) = (d.floats(&whole), d.floats(&whole[1..]), d.floats(&whole), d.floats(&whole));
        rms_norm_backward(&d.cpu, &shape, &x, &w, &dy, &mut dx)
    }),
    ("rms_norm_dw", |d| {
        let shape = d.norm();
        let whole = [shape.rows, shape.n];
        let (mask, x, dy, mut dw) =
            (d.ints(&whole[..1], 2), d.floats(&whole), d.floats(&whole), d.floats(&[64, shape.n]));
        let tokens = d.tokens(&mask);
        rms_norm_dw(&d.cpu, &shape, tokens, &x, &dy, &mut dw)
    }),
    ("add_rms_norm", |d| {
        let shape = d.norm();
        let whole = [shape.rows, shape.n];
        let [a, b, mut sum, mut y] = std::array::from_fn(|_| d.floats(&whole));
        let w = d.floats(&whole[1..]);
        add_rms_norm(&d.cpu, &shape, &a, &b, &w, &mut sum, &mut y)
    }),
    ("add_rms_norm_backward", |d| {
        let shape = d.norm();
        let whole = [shape.rows, shape.n];
        let [sum, dy, dsum, mut dx] = std::array::from_fn(|_| d.floats(&whole));
        let (w, with) = (d.floats(&whole[1..]), d.flag());
        add_rms_norm_backward(&d.cpu, &shape, &sum, &w, &dy, with.then_some(&dsum[..]), &mut dx)
    }),
    ("layer_norm", |d| {
        let shape = LayerNorm { rows: d.extent(), n: d.extent(), eps: d.eps() };
        let whole = [shape.rows, shape.n];
        let (x, w, bias, mut y) = (d.floats(&whole), d.floats(&whole[1..]), d.floats(&whole[1..]), d.floats(&whole));
        let (with_w, with_bias) = (d.flag(), d.flag());
        layer_norm(&d.cpu, &shape, &x, with_w.then_some(&w[..]), with_bias.then_some(&bias[..]), &mut y)
    }),
    ("layer_norm_backward", |d| {
        let shape = LayerNorm { rows: d.extent(), n: d.extent(), eps: d.eps() };
        let whole = [shape.rows, shape.n];
        let (x, w, dy, mut dx) = (d.floats(&whole), d.floats(&whole[1..]), d.floats(&whole), d.floats(&whole));
        let with = d.flag();
        layer_norm_backward(&d.cpu, &shape, &x, with.then_some(&w[..]), &dy, &mut dx)
    }),
    ("layer_norm_dw", |d| {
        let shape = LayerNorm { rows: d.extent(), n: d.extent(), eps: d.eps() };
        let whole = [shape.rows, shape.n];
        let (mask, x, dy, mut dw) =
            (d.ints(&whole[..1], 2), d.floats(&whole), d.floats(&whole), d.floats(&[64, shape.n]));
        let tokens = d.tokens(&mask);
        layer_norm_dw(&d.cpu, &shape, tokens, &x, &dy, &mut dw)
    }),
    ("group_norm", |d| {
        let (shape, images) = d.group_norm();
        let (x, w, bias, mut y) =
            (d.floats(&images), d.floats(&images[1..2]), d.floats(&images[1..2]), d.floats(&images));
        let (with_w, with_bias) = (d.flag(), d.flag());
        group_norm(&d.cpu, &shape, &x, with_w.then_some(&w[..]), with_bias.then_some(&bias[..]), &mut y)
    }),
    ("group_norm_backward", |d| {
        let (shape, images) = d.group_norm();
        let [x, dy, mut dx] = [(); 3].map(|()| d.floats(&images));
        let [w, bias] = [(); 2].map(|()| d.floats(&images[1..2]));
        let [mut dw, mut dbias] = [(); 2].map(|()| d.floats(&images[..2]));
        let (w, bias) = (d.flag().then_some(&w[..]), d.flag().then_some(&bias[..]));
        let inputs = GroupNormInputs { x: &x[..], w, bias, dy: &dy };
        group_norm_backward(&d.cpu, &shape, &inputs, &mut dx, &mut dw, &mut dbias)
    }),
    ("conv", |d| {
        let (shape, [of_x, of_y, of_w]) = d.images();
        let (x, w, bias, mut y) = (d.floats(&of_x), d.floats(&of_w), d.floats(&of_y[1..2]), d.floats(&of_y));
        let bias = d.flag().then_some(&bias[..]);
        conv(&d.cpu, &shape, &x, &w, bias, &mut y)
    }),
    ("conv_dx", |d| {
        let (shape, [of_x, of_y, of_w]) = d.images();
        let (dy, w, bias, mut dx) = (d.floats(&of_y), d.floats(&of_w), d.floats(&of_x[1..2]), d.floats(&of_x));
        let bias = d.flag().then_some(&bias[..]);
        conv_dx(&d.cpu, &shape, &dy, &w, bias, &mut dx)
    }),
    ("conv_dw", |d| {
        let (shape, [of_x, of_y, of_w]) = d.images();
        let (x, dy, mask) = (d.floats(&of_x), d.floats(&of_y), d.ints(&of_x[..1], 2));
        let (mut dw, mut dbias, masked) = (d.floats(&of_w), d.floats(&of_y[..2]), d.flag());
        conv_dw(&d.cpu, &shape, masked.then_some(&mask[..]), &x, &dy, &mut dw, &mut dbias)
    }),
    ("rope", |d| {
        let shape = Rope { tokens: d.extent(), heads: d.extent(), dim: d.extent(), pairing: d.pairing() };
        let whole = [shape.tokens, shape.heads, shape.dim];
        let (table, x, mut y) = (d.table(shape.tokens, shape.dim), d.floats(&whole), d.floats(&whole));
        rope(&d.cpu, &shape, &table, &x, &mut y)
    }),
    ("rope_backward", |d| {
        let shape = Rope { tokens: d.extent(), heads: d.extent(), dim: d.extent(), pairing: d.pairing() };
        let whole = [shape.tokens, shape.heads, shape.dim];
        let (table, dy, mut dx) = (d.table(shape.tokens, shape.dim).reversed(), d.floats(&whole), d.floats(&whole));
        rope_backward(&d.cpu, &shape, &table, &dy, &mut dx)
    }),
    ("norm_rope", |d| {
        let shape = d.norm_rope();
        let whole = [shape.tokens, shape.heads, shape.dim];
        let (table, x, w) = (d.table(shape.tokens, shape.dim), d.floats(&whole), d.floats(&whole[2..]));
        let mut y = d.floats(&whole);
        norm_rope(&d.cpu, &shape, &table, &x, &w, &mut y)
    }),
    ("norm_rope_backward", |d| {
        let shape = d.norm_rope();
        let whole = [shape.tokens, shape.heads, shape.dim];
        let (back, x, w) = (d.table(shape.tokens, shape.dim).reversed(), d.floats(&whole), d.floats(&whole[2..]));
        let (dy, mut dx) = (d.floats(&whole), d.floats(&whole));
        norm_rope_backward(&d.cpu, &shape, &back, &x, &w, &dy, &mut dx)
    }),
    ("norm_rope_dw", |d| {
        let shape = d.norm_rope();
        let whole = [shape.tokens, shape.heads, shape.dim];
        let (back, mask, x) = (d.table(shape.tokens, shape.dim).reversed(), d.ints(&whole[..1], 2), d.floats(&whole));
        let (dy, mut dw, tokens) = (d.floats(&whole), d.floats(&[64, shape.dim]), d.tokens(&mask));
        norm_rope_dw(&d.cpu, &shape, &back, tokens, &x, &dy, &mut dw)
    }),
    ("softmax", |d| {
        let whole = [d.extent(), d.extent()];
        let (x, mut y) = (d.floats(&whole), d.floats(&whole));
        softmax(&d.cpu, whole[0], whole[1], &x, &mut y)
    }),
    ("softmax_backward", |d| {
        let whole = [d.extent(), d.extent()];
        let (x, dy, mut dx) = (d.floats(&whole), d.floats(&whole), d.floats(&whole));
        softmax_backward(&d.cpu, whole[0], whole[1], &x, &dy, &mut dx)
    }),
    ("logprob", |d| {
        let shape = Logprob { rows: d.extent(), vocab: d.extent(), temperature: d.positive() };
        let whole = [shape.rows, shape.vocab];
        let (logits, target) = (d.floats(&whole), d.ints(&whole[..1], shape.vocab));
        let (mut logp, mut lse) = (d.floats(&whole[..1]), d.floats(&whole[..1]));
        logprob(&d.cpu, &shape, &logits, &target, &mut logp, &mut lse)
    }),
    ("logprob_backward", |d| {
        let shape = Logprob { rows: d.extent(), vocab: d.extent(), temperature: d.positive() };
        let whole = [shape.rows, shape.vocab];
        let (logits, target) = (d.floats(&whole), d.ints(&whole[..1], shape.vocab));
        let [lse, dlogprob, dlse] = std::array::from_fn(|_| d.floats(&whole[..1]));
        let (with, mut dx) = (d.flag(), d.floats(&whole));
        let gradients = LogprobGradients { dlogprob: &dlogprob, dlse: with.then_some(&dlse[..]) };
        logprob_backward(&d.cpu, &shape, &logits, &target, &lse, gradients, &mut dx)
    }),
    ("entropy", |d| {
        let shape = Entropy { rows: d.extent(), vocab: d.extent(), temperature: d.positive() };
        let whole = [shape.rows, shape.vocab];
        let (logits, mut h, mut lse) = (d.floats(&whole), d.floats(&whole[..1]), d.floats(&whole[..1]));
        entropy(&d.cpu, &shape, &logits, &mut h, &mut lse)
    }),
    ("entropy_backward", |d| {
        let shape = Entropy { rows: d.extent(), vocab: d.extent(), temperature: d.positive() };
        let whole = [shape.rows, shape.vocab];
        let [h, lse, dentropy, dlse] = std::array::from_fn(|_| d.floats(&whole[..1]));
        let (logits, with, mut dx) = (d.floats(&whole), d.flag(), d.floats(&whole));
        let gradients =
            EntropyGradients { entropy: &h, lse: &lse, dentropy: &dentropy, dlse: with.then_some(&dlse[..]) };
        entropy_backward(&d.cpu, &shape, &logits, gradients, &mut dx)
    }),
    ("linear_logprob", |d| {
        let shape = d.linear();
        let LinearLogprob { rows, vocab, k, .. } = shape;
        let (x, w, target) = (d.floats(&[rows, k]), d.floats(&[vocab, k]), d.ints(&[rows], vocab));
        let (mut logp, mut lse) = (d.floats(&[rows]), d.floats(&[rows]));
        linear_logprob(&d.cpu, &shape, &x, &w, &target, &mut logp, &mut lse)?;
        let [n, k] = if d.rarely() { d.matrix() } else { [vocab, k] };
        let packed = PackedWeight::pack(&d.cpu, n, k, &w)?;
        linear_logprob_packed(&d.cpu, &shape, &x, &packed, &target, &mut logp, &mut lse)
    }),
    ("linear_logprob_backward", |d| {
        let shape = d.linear();
        let LinearLogprob { rows, vocab, k, .. } = shape;
        let (x, w, target) = (d.floats(&[rows, k]), d.floats(&[vocab, k]), d.ints(&[rows], vocab));
        let [lse, dlogprob, dlse] = std::array::from_fn(|_| d.floats(&[rows]));
        let (mask, with, masked) = (d.ints(&[rows], 2), d.flag(), d.flag());
        let gradients = LogprobGradients { dlogprob: &dlogprob, dlse: with.then_some(&dlse[..]) };
        let of_rows = LogprobRows { target: &target, lse: &lse, gradients, mask: masked.then_some(&mask[..]) };
        let (mut dx, mut dw) = (d.floats(&[rows, k]), d.floats(&[vocab, k]));
        linear_logprob_backward(&d.cpu, &shape, &x, &w, &of_rows, &mut dx, &mut dw)
    }),
    ("argmax", |d| {
        let whole = [d.extent(), d.extent()];
        let (x, mut index) = (d.floats(&whole), d.ints(&whole[..1], 1));
        argmax(&d.cpu, whole[0], whole[1], &x, &mut index)
    }),
    ("topk", |d| {
        let shape = TopK { rows: d.extent(), n: d.extent(), k: d.extent() };
        let (x, count) = (d.floats(&[shape.rows, shape.n]), d.ints(&[shape.rows], shape.n));
        let (mut index, counted) = (d.ints(&[shape.rows, shape.k], 1), d.flag());
        topk(&d.cpu, &shape, &x, counted.then_some(&count[..]), &mut index)
    }),
    ("penalize", |d| {
        let ([rows, vocab], texts) = ([d.extent(), d.extent()], d.extent());
        let (tokens, places) = (d.ints(&[texts], vocab), [0; 3].map(|_| d.ints(&[rows], texts)));
        let [repetition, frequency, presence] = [0; 3].map(|_| d.floats(&[rows]));
        let (logits, bias, mut y) = (d.floats(&[rows, vocab]), d.floats(&[rows, vocab]), d.floats(&[rows, vocab]));
        let by = Penalties {
            tokens: &tokens,
            begin: &places[0],
            prompt_end: &places[1],
            end: &places[2],
            repetition: &repetition[..],
            frequency: &frequency,
            presence: &presence,
        };
        let biased = d.flag();
        penalize(&d.cpu, vocab, &logits, by, biased.then_some(&bias[..]), &mut y)
    }),
    ("truncate", |d| {
        let [rows, vocab] = [d.extent(), d.extent()];
        let (x, top_k, mut y) = (d.floats(&[rows, vocab]), d.ints(&[rows], vocab), d.floats(&[rows, vocab]));
        let ([scale, top_p, min_p], mut kept) = ([0; 3].map(|_| d.floats(&[rows])), d.ints(&[rows], 1));
        let by = Truncation { scale: &scale[..], top_k: &top_k, top_p: &top_p, min_p: &min_p };
        truncate(&d.cpu, vocab, &x, by, &mut y, &mut kept)
    }),
    ("draw", |d| {
        let [rows, vocab] = [d.extent(), d.extent()];
        let (x, bits, mut token) = (d.floats(&[rows, vocab]), d.ints(&[rows, 2], 1 << 20), d.ints(&[rows], 1));
        draw(&d.cpu, vocab, &x, &bits, &mut token)
    }),
    ("index_score", |d| {
        let [tokens, heads, dim, keys] = [d.extent(), d.extent(), d.extent(), d.extent()];
        let scale = d.number(&[1.0, -0.7], &[f64::NAN, f64::INFINITY, 1e300]);
        let (q, k, weight) = (d.floats(&[tokens, heads, dim]), d.floats(&[keys, dim]), d.floats(&[tokens, heads]));
        let mut score = d.floats(&[tokens, keys]);
        index_score(&d.cpu, &IndexScore { tokens, heads, dim, keys, scale }, &q, &k, &weight, &mut score)
    }),
    ("embedding", |d| {
        let ([vocab, dim], tokens) = (d.matrix(), d.extent());
        let (w, tokens_of, mut y) = (d.floats(&[vocab, dim]), d.ints(&[tokens], vocab), d.floats(&[tokens, dim]));
        embedding(&d.cpu, dim, &w, &tokens_of, &mut y)?;
        let packed = PackedWeight::pack(&d.cpu, vocab, dim, &w)?;
        embedding_packed(&d.cpu, &packed, &tokens_of, &mut y)
    }),
    ("embedding_dw", |d| {
        let (dim, vocab, tokens) = (d.extent(), d.extent(), d.extent());
        let (dy, of, mask) = (d.floats(&[tokens, dim]), d.ints(&[tokens], vocab), d.ints(&[tokens], 2));
        let (masked, mut dw) = (d.flag(), d.floats(&[vocab, dim]));
        embedding_dw(&d.cpu, dim, &dy, &of, masked.then_some(&mask[..]), &mut dw)
    }),
    ("gemm", |d| {
        let [m, n, k] = [d.extent(), d.extent(), d.extent()];
        let whole = Gemm::new(m, n, k);
        let shape = if d.rarely() { Gemm { k_offset: d.extent(), k_total: d.extent(), ..whole } } else { whole };
        let (x, w, bias, mut y) = (d.floats(&[m, k]), d.floats(&[n, k]), d.floats(&[n]), d.floats(&[m, n]));
        let with = d.flag();
        gemm(&d.cpu, &shape, &x, &w, with.then_some(&bias[..]), &mut y)?;
        let [n, k] = if d.rarely() { d.matrix() } else { [n, k] };
        let packed = PackedWeight::pack(&d.cpu, n, k, &w)?;
        gemm_packed(&d.cpu, &shape, &x, &packed, None, &mut y)
    }),
    ("gemm_dx", |d| {
        let [m, n, k] = [d.extent(), d.extent(), d.extent()];
        let whole = GemmDx::new(m, n, k);
        let shape = if d.rarely() { GemmDx { n_offset: d.extent(), n_total: d.extent(), ..whole } } else { whole };
        let (dy, w, mut dx) = (d.floats(&[m, n]), d.floats(&[n, k]), d.floats(&[m, k]));
        gemm_dx(&d.cpu, &shape, &dy, &w, &mut dx)?;
        let [n, k] = if d.rarely() { d.matrix() } else { [n, k] };
        let packed = PackedWeight::pack_for_dx(&d.cpu, n, k, &w)?;
        gemm_dx_packed(&d.cpu, &shape, &dy, &packed, &mut dx)
    }),
    ("gemm_dw", |d| {
        let [t, n, k] = [d.extent(), d.extent(), d.extent()];
        let (mask, x, dy, mut dw) = (d.ints(&[t], 2), d.floats(&[t, k]), d.floats(&[t, n]), d.floats(&[n, k]));
        let masked = d.flag();
        gemm_dw(&d.cpu, &GemmDw::new(t, n, k), masked.then_some(&mask[..]), &x, &dy, &mut dw)
    }),
    ("route", |d| {
        let shape = d.route();
        let (logits, bias) = (d.floats(&[shape.tokens, shape.experts]), d.floats(&[shape.experts]));
        let chosen = [shape.tokens, shape.chosen];
        let (mut index, mut weight, with) = (d.ints(&chosen, 1), d.floats(&chosen), [d.flag(), d.flag()]);
        let named = d.ints(&chosen, shape.experts);
        let (bias, named) = (with[0].then_some(&bias[..]), with[1].then_some(&named[..]));
        route(&d.cpu, &shape, &logits, bias, named, &mut index, &mut weight)
    }),
    ("route_backward", |d| {
        let shape = d.route();
        let (whole, chosen) = ([shape.tokens, shape.experts], [shape.tokens, shape.chosen]);
        let (logits, index, dweight, mut dx) =
            (d.floats(&whole), d.ints(&chosen, shape.experts), d.floats(&chosen), d.floats(&whole));
        route_backward(&d.cpu, &shape, &logits, &index, &dweight, &mut dx)
    }),
    ("combine", |d| {
        let shape = d.combine();
        let Combine { tokens, chosen, rows, n } = shape;
        let (x, row, weight) = (d.floats(&[rows, n]), d.ints(&[tokens, chosen], rows), d.floats(&[tokens, chosen]));
        let (shared, with, mut y) = (d.floats(&[tokens, n]), d.flag(), d.floats(&[tokens, n]));
        combine(&d.cpu, &shape, &x, &row, &weight, with.then_some(&shared[..]), &mut y)
    }),
    ("combine_backward", |d| {
        let shape = d.combine();
        let Combine { tokens, chosen, rows, n } = shape;
        let (x, dy) = (d.floats(&[rows, n]), d.floats(&[tokens, n]));
        let (row, weight) = (d.ints(&[tokens, chosen], rows), d.floats(&[tokens, chosen]));
        let (mut dx, mut dweight) = (d.floats(&[rows, n]), d.floats(&[tokens, chosen]));
        combine_backward(&d.cpu, &shape, [&x, &dy], &row, &weight, &mut dx, &mut dweight)
    }),
    ("attention", |d| {
        let shape = d.attention();
        let Attention { batch, queries, keys, q_heads, kv_heads, head_dim, value_dim, .. } = shape;
        let (q, k) = (d.floats(&[batch, queries, q_heads, head_dim]), d.floats(&[batch, keys, kv_heads, head_dim]));
        let v = d.floats(&[batch, keys, kv_heads, value_dim]);
        let (q_pos, kv_len) = (d.ints(&[batch, queries], 4), d.ints(&[batch], keys.saturating_add(1)));
        let (mut out, mut lse) =
            (d.floats(&[batch, queries, q_heads, value_dim]), d.floats(&[batch, queries, q_heads]));
        let (page_size, table) = (d.pick(&[0, 1, 2, usize::MAX]), d.ints(&[batch, 2], 4));
        let sequences = match d.below(3) {
            0 => Sequences { keys: Keys::Paged { page_size, table: &table }, ..Sequences::padded(&q_pos, &kv_len) },
            _ => Sequences::padded(&q_pos, &kv_len),
        };
        let (sinks, with) = (d.floats(&[q_heads]), d.flag());
        let sinks = with.then_some(&sinks[..]);
        attention(&d.cpu, &shape, &sequences, Qkv { q: &q[..], k: &k, v: &v }, sinks, &mut out, &mut lse)
    }),
    ("attention_backward", |d| {
        let shape = d.attention();
        let Attention { batch, queries, keys, q_heads, kv_heads, head_dim, value_dim, .. } = shape;
        let (of_q, of_k, of_v) = (
            [batch, queries, q_heads, head_dim],
            [batch, keys, kv_heads, head_dim],
            [batch, keys, kv_heads, value_dim],
        );
        let of_out = [batch, queries, q_heads, value_dim];
        let (q, k, v) = (d.floats(&of_q), d.floats(&of_k), d.floats(&of_v));
        let (out, dout, lse) = (d.floats(&of_out), d.floats(&of_out), d.floats(&of_out[..3]));
        let (q_pos, kv_len, mask) =
            (d.ints(&of_q[..2], 4), d.ints(&[batch], keys.saturating_add(1)), d.ints(&of_q[..2], 2));
        let masked = d.flag();
        let rows = QueryRows { q_pos: &q_pos, kv_len: &kv_len, mask: masked.then_some(&mask[..]) };
        let (mut dq, mut dk, mut dv) = (d.floats(&of_q), d.floats(&of_k), d.floats(&of_v));
        let given = AttentionOutputs { out: &out[..], lse: &lse[..], dout: &dout[..] };
        let gradients = QkvGradients { dq: &mut dq[..], dk: &mut dk[..], dv: &mut dv[..] };
        attention_backward(&d.cpu, &shape, &rows, Qkv { q: &q[..], k: &k, v: &v }, given, gradients)
    }),
    ("the losses", |d| {
        let shape = d.loss();
        let (b, t) = (shape.sequences, shape.length);
        let [logprob, old, reference] = std::array::from_fn(|_| d.floats(&[b, t]));
        let (advantage, count) = (d.floats(&[b]), d.ints(&[b, t], 3));
        let (mut per_sequence, mut dlogprob) = (d.floats(&[b]), d.floats(&[b, t]));
        if d.flag() {
            return nll(&d.cpu, &shape, &logprob, &count, &mut per_sequence, &mut dlogprob);
        }
        let loss = PolicyLoss {
            low: d.number(&[0.0, 0.2, 1.0], &[-0.1, 1.1, f64::NAN, f64::INFINITY]),
            high: d.number(&[0.0, 0.2, 1e30], &[-0.1, 1e31, f64::NAN, f64::INFINITY]),
            kl: d.pick(&[Kl::None, Kl::K1, Kl::K3]),
            beta: d.number(&[0.0, 0.1], &[-0.1, 1e31, f64::NAN, f64::INFINITY]),
        };
        let with = if loss.kl == Kl::None { d.rarely() } else { !d.rarely() };
        let tokens = PolicyTokens {
            logprob: &logprob,
            old_logprob: &old,
            advantage: &advantage,
            reference: with.then_some(&reference[..]),
            count: &count,
        };
        policy_loss(&d.cpu, &shape, &loss, tokens, &mut per_sequence, &mut dlogprob)
    }),
    ("the step", |d| {
        let n = d.extent();
        let (x, mut sum) = (d.floats(&[n]), d.floats(&[n.div_ceil(NORM_BLOCK)]));
        let max_norm = d.positive_in_f32();
        let shape = AdamW {
            lr: d.number(&[0.0, 1e-3, 1e4], &[-1.0, 1e5, f64::NAN]),
            beta1: d.number(&[0.0, 0.9], &[-0.1, 1.0, f64::NAN]),
            beta2: d.number(&[0.0, 0.999], &[-0.1, 1.0, f64::NAN]),
            eps: d.number(&[0.0, 1e-8], &[-0.1, 1e31, f64::NAN]),
            weight_decay: d.number(&[0.0, 0.01], &[-0.1, 1e5, f64::NAN]),
            step: d.number(&[1.0, 1e18], &[0.0]) as usize,
        };
        let [mut w, mut m, mut v, mut rounded] = std::array::from_fn(|_| d.floats(&[n]));
        let factor = d.flag().then_some(0.5);
        let all = [
            square_sum(&d.cpu, &x, &mut sum),
            clip_factor(&d.cpu, max_norm, &sum).map(|_| ()),
            adamw(&d.cpu, &shape, &x, factor, [&mut w, &mut m, &mut v], &mut rounded),
        ];
        all.into_iter().collect()
    }),
    ("sums", |d| {
        let (n, tokens) = (d.extent(), d.extent());
        let (mask, x, mut sum) = (d.ints(&[tokens], 2), d.floats(&[tokens, n]), d.floats(&[64, n]));
        let of = d.tokens(&mask);
        let (groups, denominator) = (d.pick(&[1, 1, 2, 0, 3, usize::MAX]), d.positive_in_f32());
        let (samples, eps) = (d.extent(), d.number(&[0.0, 1e-6], &[-1.0, f64::NAN, f64::INFINITY, 1e300]));
        let (reward, mut advantage) = (d.floats(&[2, samples]), d.floats(&[2, samples]));
        let (to, whole) = (d.extent(), sequences_of_group(tokens, d.extent(), d.extent()));
        assert!(whole.start <= whole.end && whole.end <= tokens);
        let mut folded = d.floats(&[to]);
        let all = [
            token_sum(&d.cpu, n, of, &x, &mut sum),
            fold(&d.cpu, &sum, &mut folded),
            batch_loss(&d.cpu, groups, denominator, &reward).map(|_| ()),
            group_advantage(&d.cpu, samples, Divide::Deviation(eps), &reward, &mut advantage),
            inv_freq(d.number(&[1e4, 0.5, 1e300], &[0.0, -9.0, f64::NAN, f64::INFINITY]), d.extent() & !1).map(|_| ()),
        ];
        all.into_iter().collect()
    }),
];

#[test]
fn any_argument_is_an_error_and_never_a_panic() {
    let mut wrong = Vec::new();
    for (number, (name, op)) in OPS.into_iter().enumerate() {
        let [mut done, mut refused, mut outside] = [0; 3];
        for (isa, threads) in [(Isa::Scalar, 1), (Isa::best(), 3)] {
            let cpu = Cpu::new(isa, threads, usize::MAX).unwrap();
            let mut draw = Draw { state: number as u64, cpu, outside: false };
            for round in 0..500 {
                let before = draw.state;
                draw.outside = false;
                match catch_unwind(AssertUnwindSafe(|| op(&mut draw))) {
                    Ok(Ok(())) if draw.outside => {
                        wrong.push(format!("{name} {round}: a number outside its range passed"))
                    }
                    Ok(Ok(())) => done += 1,
                    Ok(Err(_)) => refused += 1,
                    Err(_) => wrong.push(format!("{name} {round}: a panic, from state {before}")),
                }
                outside += usize::from(draw.outside);
            }
        }
        // Both kinds are met: what is drawn is not nonsense alone.
        assert!(done > 20 && refused > 20, "{name}: {done} done, {refused} refused, {outside} outside");
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong[..wrong.len().min(20)].join("\n"));
}

/// What a machine is made of.
#[test]
fn any_machine_is_an_error_and_never_a_panic() {
    for threads in [0, 1, 2, 1 << 20, usize::MAX] {
        for budget in [0, 1, 1 << 40, usize::MAX] {
            for isa in Isa::of_machine() {
                let Ok(cpu) = Cpu::new(isa, threads, budget) else { continue };
                assert!(cpu.threads() >= 1);
                let (x, mut y) = ([1f32; 4], [0f32; 2]);
                let _ = gemm(&cpu, &Gemm::new(2, 1, 2), &x, &x[..2], None, &mut y);
            }
        }
    }
}
