//! What an op refuses, it refuses before anything is written; and no extent, however large, is more than an error.

use samebits_ops::*;

/// What outputs hold before a call.
const BEFORE: f32 = 77.0;

fn cpus() -> Vec<Cpu> {
    let isas = Isa::of_machine();
    isas.flat_map(|isa| [1, 3].map(|threads| Cpu::new(isa, threads, usize::MAX).unwrap())).collect()
}

/// Normal numbers of both signs.
fn numbers(len: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32((i * 37 % 61) as f32 / 8.0 - 3.5)).collect()
}

/// A magnitude that `VDPBF16PS` would flush.
fn subnormal() -> bf16 {
    bf16::from_bits(3)
}

/// Runs `op` on outputs of `len` elements: freely, then where slow paths are forbidden, then under an allowance. Whoever
/// takes one, and only he, is refused in strict mode: by how much, and with nothing written. Returns how many it takes.
fn held(cpu: &Cpu, len: [usize; 2], op: impl Fn(&Cpu, &mut [f32], &mut [f32]) -> Result<(), Error>) -> u64 {
    let run = |cpu: &Cpu| {
        let mut outputs = len.map(|len| vec![BEFORE; len]);
        let [a, b] = &mut outputs;
        let done = op(cpu, a, b);
        (done, outputs)
    };
    let free = cpu.recording();
    let (done, expected) = run(&free);
    done.unwrap();
    assert!(expected[0].iter().all(|&x| x != BEFORE), "outputs are written");
    let slow = free.ledger().count(Counter::SlowPaths);

    let strict = cpu.recording();
    strict.ledger().forbid(Counter::SlowPaths);
    let (done, found) = run(&strict);
    if slow == 0 {
        done.unwrap();
        assert_eq!(found, expected, "{cpu:?}");
    } else {
        match done {
            Err(Error::Forbidden { counter: "slow_paths", amount, .. }) => assert_eq!(amount as u64, slow, "{cpu:?}"),
            other => panic!("{cpu:?}: {other:?}"),
        }
        let untouched = found.iter().flatten().all(|&x| x == BEFORE);
        assert!(untouched, "{cpu:?}: something was written before it was refused");
    }
    assert_eq!(strict.ledger().count(Counter::SlowPaths), 0);
    let _allowed = strict.ledger().allow(Counter::SlowPaths);
    let (done, found) = run(&strict);
    done.unwrap();
    assert_eq!((found, strict.ledger().count(Counter::SlowPaths)), (expected, slow), "{cpu:?}");
    slow
}

/// Whether `VDPBF16PS` is left for tiny operands here: other instruction sets have no slow paths, and many rows may do without
/// it. Emulated ones have it on every machine.
fn flushes(cpu: &Cpu, many_rows: bool) -> bool {
    cpu.isa().has_dot() && (!many_rows || cpu.isa().dots_pay())
}

/// From one row of `n` to the next in [`spread`].
fn stride(n: usize) -> usize {
    n + 3
}

/// The rows of `x` apart, with numbers between them that no kernel may look at.
fn spread(x: &[bf16], n: usize) -> Vec<bf16> {
    x.chunks(n).flat_map(|row| row.iter().copied().chain([subnormal(); 3])).collect()
}

/// `op` by name.
fn call<'a>(
    cpu: &Cpu,
    op: &str,
    attributes: Attributes,
    inputs: &[(&str, TensorRef)],
    outputs: impl IntoIterator<Item = (&'a str, &'a mut [f32], Vec<usize>)>,
) -> Result<(), Error> {
    let outputs = outputs.into_iter().map(|(name, y, shape)| (name, TensorMut::new(y, &shape).unwrap())).collect();
    cpu.call(op, attributes, inputs, outputs)
}

#[test]
fn gemm_is_refused_before_it_writes() {
    let k = 64;
    for (m, n) in [(1, 40), (5, 7), (40, 70), (100, 33)] {
        let (x, w) = (numbers(m * k), numbers(n * k));
        let (mut small_x, mut small_w) = (x.clone(), w.clone());
        small_x[m * k - 1] = subnormal();
        small_w[n * k - 1] = subnormal();
        for cpu in cpus() {
            for (x, w, slow) in [(&x, &w, false), (&small_x, &w, true), (&x, &small_w, true)] {
                let shape = Gemm::new(m, n, k);
                let plain = held(&cpu, [m * n, 0], |cpu, y, _| gemm(cpu, &shape, x, w, None, y));
                let packed = PackedWeight::pack(&cpu, n, k, w).unwrap();
                let of_packed = held(&cpu, [m * n, 0], |cpu, y, _| gemm_packed(cpu, &shape, x, &packed, None, y));
                let (x, w) = (spread(x, k), spread(w, k));
                let of_views = held(&cpu, [m * n, 0], |cpu, y, _| {
                    let view = |x, rows| TensorRef::strided(x, &[rows, k], &[stride(k), 1]).unwrap();
                    let inputs = [("x", view(&x, m)), ("w", view(&w, n))];
                    call(cpu, "gemm", Attributes::new(), &inputs, [("y", y, vec![m, n])])
                });
                let expected = slow && flushes(&cpu, m == 100);
                assert_eq!([plain, of_packed, of_views].map(|taken| taken > 0), [expected; 3], "{cpu:?} {m}x{n}");
                assert_eq!(of_views, plain, "{cpu:?} {m}x{n}");
            }
        }
    }
}

#[test]
fn gemm_dx_is_refused_before_it_writes() {
    let n = 64;
    for (m, k) in [(1, 40), (5, 7), (40, 70), (100, 33)] {
        let (dy, w, shape) = (numbers(m * n), numbers(n * k), GemmDx::new(m, n, k));
        let (mut small_dy, mut small_w) = (dy.clone(), w.clone());
        small_dy[m * n - 1] = subnormal();
        small_w[n * k - 1] = subnormal();
        for cpu in cpus() {
            for (dy, w, slow) in [(&dy, &w, false), (&small_dy, &w, true), (&dy, &small_w, true)] {
                let plain = held(&cpu, [m * k, 0], |cpu, dx, _| gemm_dx(cpu, &shape, dy, w, dx));
                let packed = PackedWeight::pack_for_dx(&cpu, n, k, w).unwrap();
                let of_packed = held(&cpu, [m * k, 0], |cpu, dx, _| gemm_dx_packed(cpu, &shape, dy, &packed, dx));
                let (dy, w) = (spread(dy, n), spread(w, k));
                let of_views = held(&cpu, [m * k, 0], |cpu, dx, _| {
                    let view = |x, rows, n| TensorRef::strided(x, &[rows, n], &[stride(n), 1]).unwrap();
                    let inputs = [("dy", view(&dy, m, n)), ("w", view(&w, n, k))];
                    call(cpu, "gemm_dx", Attributes::new(), &inputs, [("dx", dx, vec![m, k])])
                });
                let expected = slow && flushes(&cpu, m == 100);
                assert_eq!([plain, of_packed, of_views].map(|taken| taken > 0), [expected; 3], "{cpu:?} {m}x{n}x{k}");
                assert_eq!(of_views, plain, "{cpu:?} {m}x{n}x{k}");
            }
        }
    }
}

#[test]
fn attention_is_refused_before_it_writes() {
    // Decode, and prefill with keys that tiles share.
    for (queries, keys) in [(1, 600), (3, 40), (40, 300)] {
        let shape = Attention::causal([2, queries, keys], [4, 2], 32);
        let (q, k) = (numbers(2 * queries * 4 * 32), numbers(2 * keys * 2 * 32));
        let mut small = k.clone();
        *small.last_mut().unwrap() = subnormal();
        let kv_len = [keys as i32; 2];
        let q_pos: Vec<i32> = (0..2 * queries).map(|i| (keys - queries + i % queries) as i32).collect();
        for cpu in cpus() {
            for (keys_of, slow) in [(&k, false), (&small, true)] {
                let rows = 2 * queries * 4;
                let taken = held(&cpu, [rows * 32, rows], |cpu, out, lse| {
                    let qkv = Qkv { q: &q[..], k: keys_of, v: &k };
                    attention(cpu, &shape, &Sequences::padded(&q_pos, &kv_len), qkv, None, out, lse)
                });
                assert_eq!(taken > 0, slow && flushes(&cpu, queries == 40), "{cpu:?} {queries} {keys}");
                let (q, apart, v) = (spread(&q, 4 * 32), spread(keys_of, 2 * 32), spread(&k, 2 * 32));
                let of_views = held(&cpu, [rows * 32, rows], |cpu, out, lse| {
                    let view = |x, len: usize, heads: usize| {
                        let row = stride(heads * 32);
                        TensorRef::strided(x, &[2, len, heads, 32], &[len * row, row, 32, 1]).unwrap()
                    };
                    let inputs = [
                        ("q", view(&q, queries, 4)),
                        ("k", view(&apart, keys, 2)),
                        ("v", view(&v, keys, 2)),
                        ("q_pos", TensorRef::new(&q_pos, &[2, queries]).unwrap()),
                        ("kv_len", TensorRef::new(&kv_len, &[2]).unwrap()),
                    ];
                    let attributes = Attributes::new().with("scale", shape.scale).with("causal", true);
                    let outputs = [("out", out, vec![2, queries, 4, 32]), ("lse", lse, vec![2, queries, 4])];
                    call(cpu, "attention", attributes, &inputs, outputs)
                });
                assert_eq!(of_views, taken, "{cpu:?} {queries} {keys}");
            }
        }
    }
}

#[test]
fn linear_logprob_is_refused_before_it_writes() {
    // Weights that are lost when the reference point has moved far, on every instruction set: only the last of 600 rows.
    let (vocab, rows) = (2000, 600);
    let w: Vec<f32> = (0..vocab).map(|v| [0.01 * (v % 100) as f32, 42.0, 90.0][(v + 100) / 1000]).collect();
    let target = vec![7; rows];
    let shape = LinearLogprob::new(rows, vocab, 1);
    let mut x = vec![0.5f32; rows];
    for lost in [false, true] {
        x[rows - 1] = if lost { 1.0 } else { 0.5 };
        for cpu in cpus() {
            let packed = PackedWeight::pack(&cpu, vocab, 1, &w).unwrap();
            let plain = held(&cpu, [rows; 2], |cpu, logp, lse| linear_logprob(cpu, &shape, &x, &w, &target, logp, lse));
            let of_packed = held(&cpu, [rows; 2], |cpu, logp, lse| {
                linear_logprob_packed(cpu, &shape, &x, &packed, &target, logp, lse)
            });
            assert_eq!((plain > 0, of_packed > 0), (lost, lost), "{cpu:?}");
        }
    }
    // Operands so small that they would be flushed, and so few rows that `VDPBF16PS` takes them wherever it is there.
    let (vocab, rows, k) = (70, 12, 64);
    // Logits near each other, so that no row is summed twice.
    let x: Vec<_> = numbers(rows * k).into_iter().map(|x| bf16::from_f32(x.to_f32() / 64.0)).collect();
    let mut w = numbers(vocab * k);
    w[vocab * k - 1] = subnormal();
    for cpu in cpus() {
        let slow = held(&cpu, [rows; 2], |cpu, logp, lse| {
            linear_logprob(cpu, &LinearLogprob::new(rows, vocab, k), &x, &w, &target[..rows], logp, lse)
        });
        let (x, w) = (spread(&x, k), spread(&w, k));
        let of_views = held(&cpu, [rows; 2], |cpu, logp, lse| {
            let view = |x, rows| TensorRef::strided(x, &[rows, k], &[stride(k), 1]).unwrap();
            let target = TensorRef::new(&target[..rows], &[rows]).unwrap();
            let inputs = [("x", view(&x, rows)), ("w", view(&w, vocab)), ("target", target)];
            let outputs = [("logprob", logp, vec![rows]), ("lse", lse, vec![rows])];
            call(cpu, "linear_logprob", Attributes::new().with("temperature", 1.0), &inputs, outputs)
        });
        assert_eq!((slow > 0, of_views), (flushes(&cpu, false), slow), "{cpu:?}");
    }
}

/// Extents whose products are beyond a word, and those of 0 beside them.
const EXTENTS: [usize; 7] = [0, 1, 2, 1 << 32, (1 << 63) + 1, usize::MAX - 1, usize::MAX];

fn pairs() -> impl Iterator<Item = (usize, usize)> {
    EXTENTS.into_iter().flat_map(|a| EXTENTS.map(|b| (a, b)))
}

/// Eight elements never fill two extents of [`EXTENTS`], and none fill them only where one is 0.
#[test]
fn extents_that_overflow_are_errors() {
    let x = [bf16::ONE; 8];
    let none: [bf16; 0] = [];
    for cpu in cpus() {
        let cpu = &cpu;
        let mut y = [BEFORE; 8];
        let mut other = [BEFORE; 8];
        for (a, b) in pairs() {
            let norm = RmsNorm { rows: a, n: b, eps: 1e-6, rounding: Rounding::Once, weight_offset: false };
            assert!(rms_norm(cpu, &norm, &x, &x[..b.min(8)], &mut y).is_err());
            assert!(add_rms_norm(cpu, &norm, &x, &x, &x[..b.min(8)], &mut other, &mut y).is_err());
            assert!(softmax(cpu, a, b, &x, &mut y).is_err());
            assert!(argmax(cpu, a, b, &x, &mut vec![0; a.min(8)]).is_err());
            let (shape, few) = (Logprob::new(a, b), a.min(8));
            assert!(logprob(cpu, &shape, &x, &vec![-1; few], &mut y[..few], &mut other[..few]).is_err());
            assert!(PackedWeight::pack(cpu, a, b, &x).is_err());
            let empty = a == 0 || b == 0;
            assert_eq!(rms_norm(cpu, &norm, &none, &x[..b.min(8)], &mut y[..0]).is_ok(), empty && b <= 8);
            assert_eq!(softmax(cpu, a, b, &none, &mut y[..0]).is_ok(), empty);
            // Rows of nothing take some memory each: 8 GiB would be found here and there.
            if a != 1 << 32 {
                assert_eq!(PackedWeight::pack(cpu, a, b, &none).is_ok(), empty && a <= 2, "{a} {b}");
            }
            for c in EXTENTS {
                let shape = Gemm::new(a, b, c);
                assert!(gemm(cpu, &shape, &x, &x, None, &mut y).is_err());
                let linear = LinearLogprob::new(a, b, c);
                assert!(linear_logprob(cpu, &linear, &x, &x, &[-1; 8], &mut y, &mut other).is_err());
                let fits = |p: usize, q: usize| p == 0 || q == 0 || p.checked_mul(q) == Some(0);
                let expected = fits(a, c) && fits(b, c) && fits(a, b);
                assert_eq!(gemm(cpu, &shape, &none, &none, None, &mut y[..0]).is_ok(), expected, "{a} {b} {c}");
                let part = Gemm { k_offset: b, k_total: c, ..Gemm::new(1, 1, a) };
                assert!(gemm(cpu, &part, &x, &x, None, &mut y).is_err());
                let shape = GemmDx::new(a, c, b);
                assert!(gemm_dx(cpu, &shape, &x, &x, &mut y).is_err());
                assert_eq!(gemm_dx(cpu, &shape, &none, &none, &mut y[..0]).is_ok(), expected, "{a} {b} {c}");
                assert!(gemm_dw(cpu, &GemmDw::new(c, a, b), None, &x, &x, &mut y).is_err());
                let of_none = gemm_dw(cpu, &GemmDw::new(c, a, b), None, &none, &none, &mut y[..0]);
                assert_eq!(of_none.is_ok(), expected, "{a} {b} {c}");
                let part = GemmDx { n_offset: b, n_total: c, ..GemmDx::new(1, a, 1) };
                assert!(gemm_dx(cpu, &part, &x, &x, &mut y).is_err());
                let shape = Rope { tokens: a, heads: b, dim: c, pairing: Pairing::Half };
                let table = RopeTable::new(cpu, &[], &[]);
                assert!(rope(cpu, &shape, &table, &x, &mut y).is_err());
                let shape = Combine { tokens: a, chosen: b, rows: c, n: 8 };
                assert!(combine(cpu, &shape, &x, &[0], &[1.0], None, &mut y).is_err() || [a, b, c] == [1; 3]);
                let (mut weight, row) = ([0.0], [0]);
                let inputs: [&[bf16]; 2] = [&x, &x];
                let refused = combine_backward(cpu, &shape, inputs, &row, &[1.0], &mut y, &mut weight).is_err();
                assert!(refused || [a, b, c] == [1; 3]);
                if [a, b, c] == [1; 3] {
                    y.fill(BEFORE);
                }
            }
            assert!(embedding(cpu, a, &x, &[i32::MAX, -1], &mut y).is_err());
        }
        assert_eq!((y, other), ([BEFORE; 8], [BEFORE; 8]), "{cpu:?}: something was written");
    }
}

/// Shapes and strides of every size: a view that is made stays in its slice, and no call panics or writes outside.
#[test]
fn views_that_overflow_are_errors() {
    let x = [1.0f32; 8];
    let overflows = |error: &Error| error.to_string().contains("overflow");
    let cpu = Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap();
    for (a, b) in pairs() {
        for c in EXTENTS {
            let (shape, mut y) = ([a, b, c], [0f32; 0]);
            if let (Ok(x), Ok(y)) = (TensorRef::new(&x[..0], &shape), TensorMut::new(&mut y, &shape)) {
                assert!(shape.contains(&0), "{shape:?}");
                let done = cpu.call("softmax", Attributes::new(), &[("x", x)], vec![("y", y)]);
                assert!(done.as_ref().map_or_else(overflows, |()| true), "{shape:?}: {done:?}");
            }
            for [d, e] in [[b, 1], [0, 0], [a, c]] {
                let Ok(view) = TensorRef::strided(&x, &[a, b, 1], &[d, e, c]) else { continue };
                let last = (a.max(1) - 1) as u128 * d as u128 + (b.max(1) - 1) as u128 * e as u128;
                assert!(a == 0 || b == 0 || last < 8, "{a} {b} {d} {e}");
                let mut y = vec![0f32; a.saturating_mul(b).min(8)];
                if let Ok(y) = TensorMut::new(&mut y, &[a, b, 1]) {
                    let done = cpu.call("softmax", Attributes::new(), &[("x", view)], vec![("y", y)]);
                    assert!(done.is_ok() || a == 0 || b == 0, "{a} {b} {d} {e}: {done:?}");
                }
            }
        }
    }
}

/// What a call by name writes as 0 is `None` here, and a 0 is refused; a packed weight is that of the dimensions.
#[test]
fn numbers_that_mean_nothing_are_refused() {
    let cpu = Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap();
    let (x, mut out, mut lse) = ([1.0f32; 4], [BEFORE; 4], [BEFORE]);
    let shape = Attention::causal([1, 1, 1], [1, 1], 4);
    let (sequences, qkv) = (Sequences::padded(&[0], &[1]), Qkv { q: &x[..], k: &x, v: &x });
    for (wrong, name) in [
        (Attention { window: Some(0), ..shape }, "window"),
        (Attention { chunk: Some(0), ..shape }, "chunk"),
        (Attention { softcap: Some(0.0), ..shape }, "softcap"),
        (Attention { softcap: Some(-1.0), ..shape }, "softcap"),
        (Attention { softcap: Some(f64::NAN), ..shape }, "softcap"),
    ] {
        let error = attention(&cpu, &wrong, &sequences, qkv, None, &mut out, &mut lse).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let packed = PackedWeight::pack(&cpu, 2, 2, &x).unwrap();
    for (vocab, k) in [(1, 2), (2, 1)] {
        let shape = LinearLogprob::new(1, vocab, k);
        let done = linear_logprob_packed(&cpu, &shape, &x[..k], &packed, &[0], &mut out[..1], &mut lse);
        assert!(done.unwrap_err().to_string().contains("w is [2, 2]"), "{vocab} {k}");
    }
    assert_eq!((out, lse), ([BEFORE; 4], [BEFORE]));
}

/// Starts, lengths and pages from outside the rows, over extents of every size.
#[test]
fn attention_takes_no_place_outside() {
    let x = [bf16::ONE; 8];
    for cpu in cpus() {
        let (mut out, mut lse) = ([BEFORE; 8], [BEFORE; 4]);
        for (a, b) in pairs() {
            for shape in [
                Attention::causal([1, a, b], [1, 1], 8),
                Attention::causal([a, 1, b], [1, 1], 8),
                Attention::causal([a, b, 1], [1, 1], 8),
                Attention::causal([1, 1, 1], [a, b], 8),
                Attention::causal([1, 1, a], [1, 1], b),
                Attention { value_dim: a, ..Attention::causal([1, 1, b], [1, 1], 8) },
            ] {
                for keys in [
                    Keys::Padded,
                    Keys::Packed(&[0, i32::MAX]),
                    Keys::Packed(&[0, 1, 1]),
                    Keys::Paged { page_size: a, table: &[i32::MAX] },
                    Keys::Paged { page_size: b, table: &[-1] },
                ] {
                    for q_start in [None, Some(&[0, i32::MAX][..]), Some(&[-1, 1]), Some(&[])] {
                        // Where all extents fit, the length or the page does not.
                        for kv_len in [2, i32::MAX, i32::MIN] {
                            let sequences = Sequences { q_pos: &[i32::MIN], kv_len: &[kv_len], q_start, keys };
                            let qkv = Qkv { q: &x[..], k: &x, v: &x };
                            let done = attention(&cpu, &shape, &sequences, qkv, None, &mut out, &mut lse[..1]);
                            assert!(done.is_err(), "{shape:?} {sequences:?} {kv_len}");
                        }
                    }
                }
            }
        }
        assert_eq!((out, lse), ([BEFORE; 8], [BEFORE; 4]), "{cpu:?}: something was written");
    }
}
