//! Every op reads and writes inside its slices. Each slice lies flush against a page that may not be touched, once
//! behind it and once before it: a load or store one byte outside ends the test with SIGSEGV. What is left of the
//! slice's own pages on the other side holds a pattern that must survive.
//!
//! Every op of the schema is called with random extents and attributes ([`random_calls_of_every_op`]), and one that takes
//! floats over R and N alone with every length of [`EDGES`]. A new op that has edges of another kind gets an entry in [`rows`].

use samebits_ops::*;
use samebits_schema::sample::{Random, integers, sample};
use samebits_schema::{Call, OPS, Op, REST};
use std::ops::{Deref, DerefMut};

/// Where the page that may not be touched lies.
#[derive(Clone, Copy, Debug)]
enum Guard {
    Behind,
    Before,
}

/// A slice against a guard page.
struct Fenced<T> {
    map: *mut u8,
    /// Bytes of the map: a guard page, the pages of the slice, a guard page.
    size: usize,
    start: *mut T,
    len: usize,
}

const PATTERN: u8 = 0xA5;

fn page() -> usize {
    // SAFETY: asks for a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

impl<T: Copy> Fenced<T> {
    fn new(guard: Guard, values: &[T]) -> Fenced<T> {
        let (page, bytes) = (page(), size_of_val(values));
        let inner = bytes.next_multiple_of(page).max(page);
        let size = inner + 2 * page;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new map; the middle of it is made accessible before anything is written there, and `start` leaves
        // room for all values. A page is aligned for every T, and so is its end less a multiple of T's size.
        unsafe {
            let map = libc::mmap(std::ptr::null_mut(), size, libc::PROT_NONE, flags, -1, 0);
            assert!(map != libc::MAP_FAILED, "no room for {size} bytes");
            let map = map.cast::<u8>();
            assert_eq!(libc::mprotect(map.add(page).cast(), inner, libc::PROT_READ | libc::PROT_WRITE), 0);
            map.add(page).write_bytes(PATTERN, inner);
            let offset = if matches!(guard, Guard::Behind) { inner - bytes } else { 0 };
            let start = map.add(page + offset).cast::<T>();
            start.copy_from_nonoverlapping(values.as_ptr(), values.len());
            Fenced { map, size, start, len: values.len() }
        }
    }
}

impl<T> Deref for Fenced<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `new` has written `len` values there.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T> DerefMut for Fenced<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl<T> Drop for Fenced<T> {
    fn drop(&mut self) {
        let page = page();
        // SAFETY: the middle of the map is readable, and nothing uses it after this.
        let intact = unsafe {
            let inner = std::slice::from_raw_parts(self.map.add(page), self.size - 2 * page);
            let before = self.start.cast::<u8>().offset_from(inner.as_ptr()) as usize;
            let behind = before + self.len * size_of::<T>();
            let intact = inner[..before].iter().chain(&inner[behind..]).all(|&byte| byte == PATTERN);
            libc::munmap(self.map.cast(), self.size);
            intact
        };
        assert!(intact || std::thread::panicking(), "an op has written outside its slice");
    }
}

/// How one round of a test runs.
struct Round {
    cpu: Cpu,
    guard: Guard,
}

impl Round {
    /// Values of both signs, some large, in [-8, 8).
    fn floats<T: Element>(&self, len: usize) -> Fenced<T> {
        let value = |i: usize| ((i.wrapping_mul(2_654_435_761) >> 7) % 4096) as f32 / 256.0 - 8.0;
        Fenced::new(self.guard, &(0..len).map(|i| T::narrow(value(i))).collect::<Vec<_>>())
    }

    fn room<T: Copy + Default>(&self, len: usize) -> Fenced<T> {
        Fenced::new(self.guard, &vec![T::default(); len])
    }

    fn ints(&self, values: impl Iterator<Item = i32>) -> Fenced<i32> {
        Fenced::new(self.guard, &values.collect::<Vec<_>>())
    }
}

/// An op on three rows (tokens, heads) of `n` elements.
type Rows = fn(&Round, n: usize) -> Result<(), Error>;

/// The ops for inputs I and outputs O.
fn rows<I: Element, O: Element>() -> Vec<(&'static str, Rows)> {
    fn norm(rows: usize, n: usize, r: &Round) -> RmsNorm {
        let rounding = if r.cpu.threads() == 1 { Rounding::Once } else { Rounding::Hf };
        RmsNorm { rows, n, eps: 1e-6, rounding, weight_offset: n % 2 == 1 }
    }
    fn table(r: &Round, n: usize) -> RopeTable {
        RopeTable::new(&r.cpu, &inv_freq(10_000.0, n).unwrap(), &r.ints(0..3))
    }
    fn pairing(r: &Round) -> Pairing {
        if r.cpu.threads() == 1 { Pairing::Half } else { Pairing::Interleaved }
    }
    vec![
        ("add", |r, n| add(&r.cpu, &r.floats::<I>(3 * n), &r.floats(3 * n), &mut r.room::<O>(3 * n))),
        ("mul", |r, n| mul(&r.cpu, &r.floats::<I>(3 * n), &r.floats(3 * n), &mut r.room::<O>(3 * n))),
        ("silu_mul", |r, n| silu_mul(&r.cpu, &r.floats::<I>(3 * n), &r.floats(3 * n), &mut r.room::<O>(3 * n))),
        ("clamped_silu_mul", |r, n| {
            let clamp = Clamp { alpha: 1.7, limit: 2.0 };
            clamped_silu_mul(&r.cpu, clamp, &r.floats::<I>(3 * n), &r.floats(3 * n), &mut r.room::<O>(3 * n))
        }),
        ("clamped_silu_mul_backward", |r, n| {
            let inputs: [&[I]; 3] = [&r.floats(3 * n), &r.floats(3 * n), &r.floats(3 * n)];
            let (mut dgate, mut dup) = (r.room::<O>(3 * n), r.room(3 * n));
            clamped_silu_mul_backward(&r.cpu, Clamp { alpha: 1.7, limit: 2.0 }, inputs, [&mut dgate, &mut dup])
        }),
        ("sigmoid_mul", |r, n| {
            let shape = SigmoidMul { rows: 3, gates: if n.is_multiple_of(2) { n } else { 1 }, n };
            let gate = r.floats::<I>(3 * shape.gates);
            sigmoid_mul(&r.cpu, &shape, &gate, &r.floats(3 * n), &mut r.room::<O>(3 * n))
        }),
        ("sigmoid_mul_backward", |r, n| {
            let shape = SigmoidMul { rows: 3, gates: if n.is_multiple_of(2) { n } else { 1 }, n };
            let inputs: [&[I]; 3] = [&r.floats(3 * shape.gates), &r.floats(3 * n), &r.floats(3 * n)];
            let (mut dgate, mut dx) = (r.room::<O>(3 * shape.gates), r.room(3 * n));
            sigmoid_mul_backward(&r.cpu, &shape, inputs, [&mut dgate, &mut dx])
        }),
        ("gelu_mul", |r, n| gelu_mul(&r.cpu, &r.floats::<I>(3 * n), &r.floats(3 * n), &mut r.room::<O>(3 * n))),
        ("activate", |r, n| activate(&r.cpu, Activation::Gelu, &r.floats::<I>(3 * n), &mut r.room::<O>(3 * n))),
        ("softcap", |r, n| softcap(&r.cpu, 2.0, &r.floats::<I>(3 * n), &mut r.room::<O>(3 * n))),
        ("scale", |r, n| scale(&r.cpu, 0.7, &r.floats::<I>(3 * n), &mut r.room::<O>(3 * n))),
        // n is E.
        ("route", |r, experts| {
            let scoring = if experts % 3 == 0 { Scoring::SparseMixer { jitter: 0.2 } } else { Scoring::Softmax };
            let (chosen, chosen_by) = (experts.min(4), ChosenBy::Logits);
            let (groups, top_groups, group_worth) = (1, 1, GroupWorth::Max);
            let (normalise, scale) = (true, 1.5);
            let shape = Route {
                tokens: 3,
                experts,
                chosen,
                scoring,
                chosen_by,
                groups,
                top_groups,
                group_worth,
                normalise,
                scale,
            };
            let (logits, bias) = (r.floats::<I>(3 * experts), r.floats(experts));
            // The second token names none.
            let named =
                r.ints((0..3 * chosen as i32).map(|i| if i / chosen as i32 == 1 { -1 } else { i % chosen as i32 }));
            route(&r.cpu, &shape, &logits, Some(&bias), Some(&named), &mut r.room(3 * chosen), &mut r.room(3 * chosen))
        }),
        ("route_backward", |r, n| {
            let (experts, chosen) = (n, 2.min(n));
            let shape = Route {
                tokens: 3,
                experts,
                chosen,
                scoring: [Scoring::Softmax, Scoring::Sigmoid, Scoring::SparseMixer { jitter: 0.2 }][n % 3],
                chosen_by: ChosenBy::Scores,
                groups: 1,
                top_groups: 1,
                group_worth: GroupWorth::Max,
                normalise: true,
                scale: 1.0,
            };
            let index = r.ints((0..3 * chosen).map(|i| (experts - 1 - i % chosen) as i32));
            let (logits, dweight) = (r.floats::<I>(3 * experts), r.floats::<f32>(3 * chosen));
            route_backward(&r.cpu, &shape, &logits, &index, &dweight, &mut r.room(3 * experts))
        }),
        ("combine", |r, n| {
            let shape = Combine { tokens: 3, chosen: 2, rows: 5, n };
            let (x, row, weight) = (r.floats::<I>(5 * n), r.ints([4, 0, 3, 1, 2, 4].into_iter()), r.floats::<f32>(6));
            combine(&r.cpu, &shape, &x, &row, &weight, Some(&r.floats(3 * n)), &mut r.room::<O>(3 * n))
        }),
        ("combine_backward", |r, n| {
            let shape = Combine { tokens: 2, chosen: 2, rows: 5, n };
            let inputs: [&[I]; 2] = [&r.floats(5 * n), &r.floats(2 * n)];
            let (row, weight) = (r.ints([4, 0, 3, 1].into_iter()), r.floats::<f32>(4));
            combine_backward(&r.cpu, &shape, inputs, &row, &weight, &mut r.room::<O>(5 * n), &mut r.room(4))
        }),
        ("softmax", |r, n| softmax(&r.cpu, 3, n, &r.floats::<I>(3 * n), &mut r.room::<O>(3 * n))),
        ("rms_norm", |r, n| {
            rms_norm(&r.cpu, &norm(3, n, r), &r.floats::<I>(3 * n), &r.floats(n), &mut r.room::<O>(3 * n))
        }),
        ("add_rms_norm", |r, n| {
            let (x, residual, w) = (r.floats::<I>(3 * n), r.floats(3 * n), r.floats(n));
            let (mut sum, mut y) = (r.room::<O>(3 * n), r.room::<O>(3 * n));
            add_rms_norm(&r.cpu, &norm(3, n, r), &x, &residual, &w, &mut sum, &mut y)
        }),
        // n is P.
        ("group_norm", |r, n| {
            let shape = GroupNorm { batch: 1, channels: 6, places: n, groups: 2, eps: 1e-6, silu: n % 2 == 1 };
            let (x, w, bias) = (r.floats::<I>(6 * n), r.floats(6), r.floats(6));
            group_norm(&r.cpu, &shape, &x, Some(&w), Some(&bias), &mut r.room::<O>(6 * n))?;
            let (dy, mut dw, mut dbias) = (r.floats::<I>(6 * n), r.room(6), r.room(6));
            let inputs = GroupNormInputs { x: &x, w: Some(&*w), bias: Some(&*bias), dy: &dy };
            group_norm_backward(&r.cpu, &shape, &inputs, &mut r.room::<O>(6 * n), &mut dw, &mut dbias)
        }),
        // n is W.
        ("conv", |r, n| {
            for (stride, taps, pad) in [(1, 3, 1), (2, 3, 1), (1, 1, 0), (3, 2, 1)] {
                let pads = [0, pad.min(1), pad];
                let window =
                    Window { taps: [1, 2, taps], stride: [1, 1, stride], dilation: [1; 3], before: pads, behind: pads };
                let image = [1, 2, n + 2];
                let shape = Conv { batch: 2, channels: 2, outputs: 13, groups: 1, image, window };
                let (of_x, of_y) = (4 * image.iter().product::<usize>(), 26 * shape.output().iter().product::<usize>());
                let (x, dy, w) = (r.floats::<I>(of_x), r.floats::<I>(of_y), r.floats(13 * 4 * taps));
                conv(&r.cpu, &shape, &x, &w, Some(&r.floats(13)), &mut r.room::<O>(of_y))?;
                conv_dx(&r.cpu, &shape, &dy, &w, Some(&r.floats(2)), &mut r.room::<O>(of_x))?;
                conv_dw(&r.cpu, &shape, None, &x, &dy, &mut r.room(13 * 4 * taps), &mut r.room(26))?;
            }
            Ok(())
        }),
        ("rope", |r, n| {
            let (heads, dim) = (2, n.next_multiple_of(2));
            let shape = Rope { tokens: 3, heads, dim, pairing: pairing(r) };
            rope(&r.cpu, &shape, &table(r, dim), &r.floats::<I>(6 * dim), &mut r.room::<O>(6 * dim))
        }),
        ("norm_rope", |r, n| {
            let (heads, dim) = (2, n.next_multiple_of(2));
            let RmsNorm { eps, rounding, weight_offset, .. } = norm(6, dim, r);
            let shape = NormRope { tokens: 3, heads, dim, eps, rounding, weight_offset, pairing: pairing(r) };
            let (x, w) = (r.floats::<I>(6 * dim), r.floats(dim));
            norm_rope(&r.cpu, &shape, &table(r, dim), &x, &w, &mut r.room::<O>(6 * dim))
        }),
        ("logprob", |r, n| {
            let target = r.ints([0, n as i32 - 1, -1].into_iter());
            let (mut logp, mut lse) = (r.room(3), r.room(3));
            let shape = Logprob { temperature: 0.7, ..Logprob::new(3, n) };
            logprob(&r.cpu, &shape, &r.floats::<I>(3 * n), &target, &mut logp, &mut lse)
        }),
        ("logprob_backward", |r, n| {
            let (target, lse, dlogprob) = (r.ints([0, n as i32 - 1, -1].into_iter()), r.floats(3), r.floats(3));
            let dlse = r.floats(3);
            let gradients = LogprobGradients { dlogprob: &dlogprob, dlse: Some(&dlse) };
            let shape = Logprob { temperature: 0.7, ..Logprob::new(3, n) };
            logprob_backward(&r.cpu, &shape, &r.floats::<I>(3 * n), &target, &lse, gradients, &mut r.room::<O>(3 * n))
        }),
        ("entropy", |r, n| {
            let (mut h, mut lse) = (r.room(3), r.room(3));
            let shape = Entropy { temperature: 0.7, ..Entropy::new(3, n) };
            entropy(&r.cpu, &shape, &r.floats::<I>(3 * n), &mut h, &mut lse)
        }),
        ("entropy_backward", |r, n| {
            let [h, lse, dentropy, dlse] = [(); 4].map(|()| r.floats(3));
            let gradients = EntropyGradients { entropy: &h, lse: &lse, dentropy: &dentropy, dlse: Some(&dlse) };
            let shape = Entropy { temperature: 0.7, ..Entropy::new(3, n) };
            entropy_backward(&r.cpu, &shape, &r.floats::<I>(3 * n), gradients, &mut r.room::<O>(3 * n))
        }),
        // n is T, and for the step a number of elements.
        ("nll", |r, n| {
            let (logprob, count) = (r.floats(3 * n), r.ints((0..3 * n as i32).map(|i| i % 3)));
            nll(&r.cpu, &LossShape::new(3, n), &logprob, &count, &mut r.room(3), &mut r.room(3 * n))
        }),
        ("policy_loss", |r, n| {
            let (logprob, old, reference, advantage) = (r.floats(2 * n), r.floats(2 * n), r.floats(2 * n), r.floats(2));
            let count = r.ints((0..2 * n as i32).map(|i| i % 5));
            let tokens = PolicyTokens {
                logprob: &logprob,
                old_logprob: &old,
                advantage: &advantage,
                reference: Some(&reference),
                count: &count,
            };
            let loss = PolicyLoss { kl: Kl::K3, beta: 0.1, ..PolicyLoss::default() };
            policy_loss(&r.cpu, &LossShape::new(2, n), &loss, tokens, &mut r.room(2), &mut r.room(2 * n))
        }),
        ("group_advantage", |r, n| {
            group_advantage(&r.cpu, n, Divide::Deviation(1e-6), &r.floats(3 * n), &mut r.room(3 * n))
        }),
        ("square_sum", |r, n| square_sum(&r.cpu, &r.floats(3 * n), &mut r.room(3))),
        ("adamw", |r, n| {
            let (g, mut w, mut m, mut v) = (r.floats(n), r.floats(n), r.floats(n), r.floats(n));
            adamw(&r.cpu, &AdamW::default(), &g, Some(0.5), [&mut w, &mut m, &mut v], &mut r.room::<O>(n))
        }),
        ("embedding", |r, n| {
            embedding(&r.cpu, n, &r.floats::<I>(4 * n), &r.ints([3, 0, 3].into_iter()), &mut r.room::<O>(3 * n))
        }),
        ("argmax", |r, n| argmax(&r.cpu, 3, n, &r.floats::<I>(3 * n), &mut r.room(3))),
        ("topk", |r, n| {
            let count = r.ints([n as i32, n as i32 / 2, 0].into_iter());
            topk(&r.cpu, &TopK { rows: 3, n, k: 5 }, &r.floats::<I>(3 * n), Some(&count), &mut r.room(15))
        }),
        ("penalize", |r, n| {
            let (tokens, zeros) = (r.ints([n as i32 - 1, 0, n as i32 / 2].into_iter()), r.ints([0; 3].into_iter()));
            let (prompt_end, end) = (r.ints([1, 3, 0].into_iter()), r.ints([3, 3, 2].into_iter()));
            let by = Penalties {
                tokens: &tokens,
                begin: &zeros,
                prompt_end: &prompt_end,
                end: &end,
                repetition: &r.floats(3)[..],
                frequency: &r.floats(3),
                presence: &r.floats(3),
            };
            penalize(&r.cpu, n, &r.floats::<I>(3 * n), by, Some(&r.floats(3 * n)), &mut r.room(3 * n))
        }),
        ("truncate", |r, n| {
            let (scale, top_p, min_p) = (r.floats(3), r.floats(3), r.floats(3));
            let top_k = r.ints([0, n as i32 / 2, 1].into_iter());
            let by = Truncation { scale: &scale[..], top_k: &top_k, top_p: &top_p, min_p: &min_p };
            truncate(&r.cpu, n, &r.floats::<I>(3 * n), by, &mut r.room(3 * n), &mut r.room(3))
        }),
        ("draw", |r, n| {
            draw(&r.cpu, n, &r.floats::<I>(3 * n), &r.ints([7, -7, 0, 1, -1, 3].into_iter()), &mut r.room(3))
        }),
        // n is the number of keys.
        ("index_score", |r, keys| {
            let (tokens, heads, dim) = (2, 5, 1 + keys % 19);
            let shape = IndexScore { tokens, heads, dim, keys, scale: 0.5 };
            let (q, k, weight) = (r.floats::<I>(tokens * heads * dim), r.floats(keys * dim), r.floats(tokens * heads));
            index_score(&r.cpu, &shape, &q, &k, &weight, &mut r.room(tokens * keys))
        }),
        // n is K: odd ones, and N and M around tiles.
        ("gemm", |r, k| {
            for (m, n) in [(1, 1), (1, 17), (3, 33), (7, 9), (17, 65), (25, 31)] {
                let (x, w, bias) = (r.floats::<I>(m * k), r.floats(n * k), r.floats(n));
                gemm(&r.cpu, &Gemm::new(m, n, k), &x, &w, Some(&bias), &mut r.room::<O>(m * n))?;
                let packed = PackedWeight::pack(&r.cpu, n, k, &w)?;
                gemm_packed(&r.cpu, &Gemm::new(m, n, k), &x, &packed, None, &mut r.room::<O>(m * n))?;
            }
            Ok(())
        }),
        // n is N: odd ones, and K and M around tiles.
        ("gemm_dx", |r, n| {
            for (m, k) in [(1, 1), (1, 17), (3, 33), (7, 9), (17, 65), (25, 31)] {
                let (dy, w, shape) = (r.floats::<I>(m * n), r.floats(n * k), GemmDx::new(m, n, k));
                gemm_dx(&r.cpu, &shape, &dy, &w, &mut r.room::<O>(m * k))?;
                let packed = PackedWeight::pack_for_dx(&r.cpu, n, k, &w)?;
                gemm_dx_packed(&r.cpu, &shape, &dy, &packed, &mut r.room::<O>(m * k))?;
            }
            Ok(())
        }),
        // n is K: odd ones, and N and T around tiles.
        ("gemm_dw", |r, k| {
            for (tokens, n) in [(1, 1), (1, 17), (3, 33), (7, 12), (17, 65), (25, 31)] {
                let (x, dy) = (r.floats::<I>(tokens * k), r.floats(tokens * n));
                let mask = r.ints((0..tokens as i32).map(|t| t % 3));
                gemm_dw(&r.cpu, &GemmDw::new(tokens, n, k), Some(&mask), &x, &dy, &mut r.room(n * k))?;
            }
            Ok(())
        }),
        // n is the number of keys, and with it the head dimension changes.
        ("attention", |r, keys| {
            let (batch, q_heads, kv_heads) = (2, 4, 2);
            let head_dim = if keys % 2 == 0 { 16 * (1 + keys % 3) } else { 1 + keys % 37 };
            let value_dim = if keys % 4 == 0 { 16 * (1 + keys % 5) } else { 1 + keys % 41 };
            let (causal, softcap) = (keys % 2 == 1, (keys % 5 == 0).then_some(3.0));
            let window = Some(keys % 3).filter(|&window| window > 0);
            let chunk = Some(keys % 7).filter(|&chunk| chunk > 0);
            // Two, eight and ten query rows to a key head: each is read in a way of its own.
            for queries in [1, keys.min(4), keys.min(5)] {
                let shape = Attention {
                    value_dim,
                    causal,
                    window,
                    chunk,
                    softcap,
                    ..Attention::causal([batch, queries, keys], [q_heads, kv_heads], head_dim)
                };
                let q = r.floats::<I>(batch * queries * q_heads * head_dim);
                let (k, v) =
                    (r.floats(batch * keys * kv_heads * head_dim), r.floats(batch * keys * kv_heads * value_dim));
                let q_pos = r.ints((0..batch * queries).map(|i| (keys - queries + i % queries) as i32));
                let kv_len = r.ints([keys as i32, keys as i32 - 1].into_iter());
                let mut out = r.room::<O>(batch * queries * q_heads * value_dim);
                let mut lse = r.room(batch * queries * q_heads);
                let padded = Sequences::padded(&q_pos, &kv_len);
                attention(&r.cpu, &shape, &padded, Qkv { q: &*q, k: &k, v: &v }, None, &mut out, &mut lse)?;
                // The same keys in pages, the last of which ends where the slice does.
                let page_size = 1 + keys % 9;
                let (columns, kv_len) = (keys.div_ceil(page_size), r.ints([keys as i32, keys as i32 - 1].into_iter()));
                let shape = Attention { keys: batch * columns * page_size, ..shape };
                let rows = shape.keys * kv_heads;
                let (k, v) = (r.floats::<I>(rows * head_dim), r.floats(rows * value_dim));
                let table = r.ints((0..(batch * columns) as i32).rev());
                let keys = Keys::Paged { page_size, table: &table };
                let paged = Sequences { keys, ..Sequences::padded(&q_pos, &kv_len) };
                attention(&r.cpu, &shape, &paged, Qkv { q: &*q, k: &k, v: &v }, None, &mut out, &mut lse)?;
            }
            Ok(())
        }),
        // n is the number of keys, and with it the head dimension changes.
        ("attention_backward", |r, keys| {
            let (batch, q_heads, kv_heads) = (2, 4, 2);
            let (head_dim, value_dim) = (1 + keys % 37, 1 + keys % 41);
            let (causal, softcap) = (keys % 2 == 1, (keys % 5 == 0).then_some(3.0));
            for queries in [1, keys.min(30)] {
                let shape = Attention {
                    value_dim,
                    causal,
                    softcap,
                    ..Attention::causal([batch, queries, keys], [q_heads, kv_heads], head_dim)
                };
                let (queries_of, keys_of) = (batch * queries * q_heads, batch * keys * kv_heads);
                let (q, k) = (r.floats::<I>(queries_of * head_dim), r.floats(keys_of * head_dim));
                let (v, lse) = (r.floats(keys_of * value_dim), r.floats::<f32>(queries_of));
                let (out, dout) = (r.floats(queries_of * value_dim), r.floats(queries_of * value_dim));
                let q_pos = r.ints((0..batch * queries).map(|i| (keys - queries + i % queries) as i32));
                let kv_len = r.ints([keys as i32, keys as i32 - 1].into_iter());
                let mask = r.ints((0..batch * queries).map(|i| (i % 3) as i32));
                let rows = QueryRows { q_pos: &q_pos, kv_len: &kv_len, mask: Some(&*mask) };
                let (mut dq, mut dk) = (r.room::<O>(queries_of * head_dim), r.room(keys_of * head_dim));
                let mut dv = r.room(keys_of * value_dim);
                let given = AttentionOutputs { out: &*out, lse: &*lse, dout: &dout };
                let gradients = QkvGradients { dq: &mut *dq, dk: &mut dk, dv: &mut dv };
                attention_backward(&r.cpu, &shape, &rows, Qkv { q: &*q, k: &k, v: &v }, given, gradients)?;
            }
            Ok(())
        }),
        // n is V.
        ("linear_logprob", |r, vocab| {
            for (rows, k) in [(1, 33), (5, 16), (13, 7)] {
                let (x, w) = (r.floats::<I>(rows * k), r.floats(vocab * k));
                let target = r.ints((0..rows as i32).map(|row| vocab as i32 - 1 - row.min(vocab as i32)));
                let (mut logp, mut lse) = (r.room(rows), r.room(rows));
                let shape = LinearLogprob { rows, vocab, k, temperature: 0.7 };
                linear_logprob(&r.cpu, &shape, &x, &w, &target, &mut logp, &mut lse)?;
                let packed = PackedWeight::pack(&r.cpu, vocab, k, &w)?;
                linear_logprob_packed(&r.cpu, &shape, &x, &packed, &target, &mut logp, &mut lse)?;
            }
            Ok(())
        }),
        ("linear_logprob_backward", |r, vocab| {
            for (m, k) in [(1, 33), (5, 16), (13, 7)] {
                let (x, w, mask) =
                    (r.floats::<I>(m * k), r.floats(vocab * k), r.ints((0..m as i32).map(|row| row % 3)));
                let target = r.ints((0..m as i32).map(|row| vocab as i32 - 1 - row.min(vocab as i32)));
                let (lse, dlogprob, dlse) = (r.floats::<f32>(m), r.floats::<f32>(m), r.floats::<f32>(m));
                let gradients = LogprobGradients { dlogprob: &dlogprob, dlse: Some(&*dlse) };
                let rows = LogprobRows { target: &target, lse: &lse, gradients, mask: Some(&*mask) };
                let shape = LinearLogprob { rows: m, vocab, k, temperature: 0.7 };
                let (mut dx, mut dw) = (r.room::<O>(m * k), r.room(vocab * k));
                linear_logprob_backward(&r.cpu, &shape, &x, &w, &rows, &mut dx, &mut dw)?;
            }
            Ok(())
        }),
    ]
}

/// An op [of rows](Op::is_of_rows) by name, on three rows of `n` elements, its attributes left out.
fn by_form<I: Element, O: Element>(op: &Op, r: &Round, n: usize) -> Result<(), Error> {
    let shape = |axes: &[&str]| -> Vec<usize> {
        let extent = |axis: &&str| if *axis == "R" { 3 } else { n };
        if axes.contains(&REST) { vec![3, n] } else { axes.iter().map(extent).collect() }
    };
    let inputs = op.inputs.iter().map(|input| {
        let shape = shape(input.axes);
        (input.name, r.floats::<I>(shape.iter().product()), shape)
    });
    let inputs: Vec<_> = inputs.collect();
    let outputs = op.outputs.iter().map(|output| {
        let shape = shape(output.axes);
        (output.name, r.room::<O>(shape.iter().product()), shape)
    });
    let mut outputs: Vec<_> = outputs.collect();
    let given = inputs.iter().map(|(name, values, shape)| Ok((*name, TensorRef::new(values, shape)?)));
    let given = given.collect::<Result<Vec<_>, Error>>()?;
    let wanted = outputs.iter_mut().map(|(name, room, shape)| Ok((*name, TensorMut::new(room, shape)?)));
    r.cpu.call(op.name, Attributes::new(), &given, wanted.collect::<Result<_, Error>>()?)
}

/// A tensor of any dtype against a guard page.
enum AnyFenced {
    Bf16(Fenced<bf16>),
    Fp16(Fenced<f16>),
    Fp32(Fenced<f32>),
    I32(Fenced<i32>),
}

impl AnyFenced {
    fn floats(round: &Round, dtype: DType, len: usize) -> AnyFenced {
        match dtype {
            DType::Bf16 => AnyFenced::Bf16(round.floats(len)),
            DType::Fp16 => AnyFenced::Fp16(round.floats(len)),
            DType::Fp32 => AnyFenced::Fp32(round.floats(len)),
            _ => AnyFenced::I32(round.room(len)),
        }
    }

    fn view<'a>(&'a self, shape: &'a [usize]) -> Result<TensorRef<'a>, Error> {
        match self {
            AnyFenced::Bf16(data) => TensorRef::new(data, shape),
            AnyFenced::Fp16(data) => TensorRef::new(data, shape),
            AnyFenced::Fp32(data) => TensorRef::new(data, shape),
            AnyFenced::I32(data) => TensorRef::new(data, shape),
        }
    }

    fn view_mut<'a>(&'a mut self, shape: &'a [usize]) -> Result<TensorMut<'a>, Error> {
        match self {
            AnyFenced::Bf16(data) => TensorMut::new(data, shape),
            AnyFenced::Fp16(data) => TensorMut::new(data, shape),
            AnyFenced::Fp32(data) => TensorMut::new(data, shape),
            AnyFenced::I32(data) => TensorMut::new(data, shape),
        }
    }
}

/// A call of any op; the inputs' elements are drawn.
fn by_call(call: &Call, inputs: &[(&str, DType, Vec<usize>)], r: &Round, random: &mut Random) -> Result<(), Error> {
    let inputs = inputs.iter().map(|(name, dtype, shape)| {
        let input = call.op.inputs.iter().find(|input| input.name == *name).expect("a sample gives inputs of the op");
        let len = shape.iter().product();
        let data = match input.is_float() {
            true => AnyFenced::floats(r, *dtype, len),
            false => AnyFenced::I32(r.ints(integers(call, input.holds, len, random).into_iter())),
        };
        (*name, data, shape)
    });
    let inputs: Vec<_> = inputs.collect();
    let given = inputs.iter().map(|(name, data, shape)| Ok((*name, data.view(shape)?)));
    let given = given.collect::<Result<Vec<_>, Error>>()?;
    let forms = call.outputs();
    let mut outputs: Vec<_> =
        forms.iter().map(|form| AnyFenced::floats(r, form.dtype, form.shape.iter().product())).collect();
    let wanted = forms.iter().zip(&mut outputs).map(|(form, data)| Ok((form.name, data.view_mut(&form.shape)?)));
    r.cpu.run(call, &given, wanted.collect::<Result<_, Error>>()?)
}

/// Lengths around one vector, two, four, a segment, and the 256 lanes.
const EDGES: [usize; 24] =
    [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 513, 1037];

fn rounds() -> Vec<Round> {
    let mut rounds = Vec::new();
    for isa in Isa::of_machine() {
        for threads in [1, 3] {
            for guard in [Guard::Behind, Guard::Before] {
                rounds.push(Round { cpu: Cpu::new(isa, threads, usize::MAX).unwrap(), guard });
            }
        }
    }
    rounds
}

fn check<I: Element, O: Element>() {
    for round in rounds() {
        for (name, op) in rows::<I, O>() {
            for n in EDGES {
                op(&round, n).unwrap_or_else(|e| panic!("{name} {n} {:?} {:?}: {e}", round.cpu, round.guard));
            }
        }
        for op in OPS.iter().filter(|op| op.is_of_rows()) {
            for n in EDGES {
                let done = by_form::<I, O>(op, &round, n);
                done.unwrap_or_else(|e| panic!("{} {n} {:?} {:?}: {e}", op.name, round.cpu, round.guard));
            }
        }
    }
}

#[test]
fn bf16_to_bf16() {
    check::<bf16, bf16>();
}

#[test]
fn fp16_to_fp32() {
    check::<f16, f32>();
}

#[test]
fn fp32_to_fp32() {
    check::<f32, f32>();
}

#[test]
fn fp32_to_bf16() {
    check::<f32, bf16>();
}

/// Extents, dtypes and attributes of every op as its form allows them, pages and packed sequences among them. What the form
/// cannot say (a length beyond a table) may be refused.
#[test]
fn random_calls_of_every_op() {
    for round in rounds() {
        for op in OPS.iter().filter(|op| !op.needs_more()) {
            let mut random = Random::new(23);
            let done = (0..60).filter(|_| {
                let call = sample(op, &mut random);
                match by_call(&call.call, &call.inputs, &round, &mut random) {
                    Ok(()) => true,
                    Err(Error::Value { .. } | Error::Request(_)) => false,
                    Err(e) => panic!("{} {:?}: {e}", op.name, call.attributes),
                }
            });
            let done = done.count();
            assert!(done >= 30, "{}: {done} of 60 calls were carried out", op.name);
        }
    }
}

/// Outputs of 32 MiB and more go another way.
#[test]
fn large_outputs() {
    let n = (32 << 20) / 2 / 3 + 31;
    let large = ["add", "silu_mul", "softmax", "rms_norm", "add_rms_norm"];
    for round in rounds().into_iter().filter(|round| round.cpu.isa() == Isa::best() && round.cpu.threads() == 3) {
        for (name, op) in rows::<bf16, bf16>().into_iter().filter(|(name, _)| large.contains(name)) {
            op(&round, n).unwrap_or_else(|e| panic!("{name} {:?}: {e}", round.guard));
        }
    }
}

/// The fence itself: a byte before and a byte behind are caught by the pattern where the page does not catch them.
#[test]
#[should_panic(expected = "outside its slice")]
fn a_byte_too_far_is_seen() {
    let slice = Fenced::new(Guard::Before, &[1u8, 2, 3]);
    // SAFETY: the page is larger than the slice.
    unsafe { *slice.start.add(3) = 0 };
}
