//! The ops on views give the bits of samebits' functions over slices, and refuse what they cannot take by its name.

use candle_core::{DType, Device, Error, Result, Tensor, WithDType};
use samebits_candle::{Attention, MatMul, RmsNorm};
use samebits_ops::{Cpu, Element, Gemm, Isa, Keys, Qkv, Rounding, Sequences, bf16, f16};

const EPS: f64 = 1e-6;

/// Numbers of several magnitudes, always the same.
fn numbers<T: WithDType>(shape: &[usize]) -> Tensor {
    let mut state = shape.len() as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let unit = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
        unit * [0.01, 1.0, 4.0][(state >> 33) as usize % 3]
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(T::DTYPE).unwrap()
}

fn elements<T: WithDType>(x: &Tensor) -> Vec<T> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// All values of f32, bf16 and f16 are different f32s.
fn bits<T: WithDType>(values: &[T]) -> Vec<u32> {
    values.iter().map(|value| (value.to_f64() as f32).to_bits()).collect()
}

/// Asserts that it is a view with strides of its own, so that a test sees one.
fn view(x: Result<Tensor>) -> Tensor {
    let x = x.unwrap();
    assert!(!x.is_contiguous(), "{:?} is contiguous", x.layout());
    x
}

fn cpus() -> Vec<Cpu> {
    let isas = Isa::all().filter(|isa| isa.available());
    isas.flat_map(|isa| [1, 2].map(|threads| Cpu::new(isa, threads, 1 << 30).unwrap())).collect()
}

/// Runs `check` for each dtype.
macro_rules! for_each_dtype {
    ($check:ident) => {
        $check::<f32>();
        $check::<f16>();
        $check::<bf16>();
    };
}

fn norms<T: Element + WithDType>() {
    let w = numbers::<T>(&[24]);
    let fused = numbers::<T>(&[3, 5, 8, 24]);
    let wide = numbers::<T>(&[4, 9, 40]);
    let column = numbers::<T>(&[3, 1, 24]);
    for x in [
        view(fused.narrow(2, 4, 2)),
        view(fused.transpose(1, 2)),
        view(fused.transpose(0, 2).and_then(|x| x.narrow(1, 1, 3))),
        view(wide.narrow(2, 7, 24)),
        view(wide.narrow(2, 16, 24).and_then(|x| x.narrow(0, 1, 2))),
        view(column.expand(&[3, 6, 24])),
        view(wide.narrow(2, 16, 24).and_then(|x| x.narrow(0, 3, 1)?.squeeze(0))),
    ] {
        let values = elements::<T>(&x);
        let shape = samebits_ops::RmsNorm {
            rows: values.len() / 24,
            n: 24,
            eps: EPS as f32,
            rounding: Rounding::Once,
            weight_offset: false,
        };
        let mut expected = vec![T::from_f64(0.0); values.len()];
        samebits_ops::rms_norm(&Cpu::best(), &shape, &values, &elements::<T>(&w), &mut expected).unwrap();
        for cpu in cpus() {
            let y = x.apply_op2(&w, RmsNorm { cpu, eps: EPS }).unwrap();
            assert_eq!((y.dims(), y.dtype()), (x.dims(), x.dtype()));
            assert!(bits(&elements::<T>(&y)) == bits(&expected), "{:?}", x.layout());
        }
    }
}

#[test]
fn norms_of_views() {
    for_each_dtype!(norms);
}

fn products<T: Element + WithDType>() {
    let (wide, matrix) = (numbers::<T>(&[3, 7, 300]), numbers::<T>(&[40, 320]));
    for (x, w) in [
        (view(wide.narrow(2, 9, 260)), matrix.narrow(1, 0, 260).unwrap()),
        (view(wide.transpose(0, 1)), view(matrix.narrow(1, 20, 300))),
        (wide.narrow(0, 1, 1).unwrap(), view(matrix.narrow(1, 3, 300).and_then(|w| w.narrow(0, 11, 19)))),
        (view(wide.narrow(1, 6, 1)), view(matrix.narrow(1, 1, 300))),
        (wide.get(2).unwrap(), matrix.narrow(1, 20, 300).unwrap()),
    ] {
        let (n, k) = w.dims2().unwrap();
        let m = x.elem_count() / k;
        let mut expected = vec![T::from_f64(0.0); m * n];
        let shape = Gemm::new(m, n, k);
        samebits_ops::gemm(&Cpu::best(), &shape, &elements::<T>(&x), &elements::<T>(&w), None, &mut expected).unwrap();
        for cpu in cpus() {
            let y = x.apply_op2(&w, MatMul { cpu }).unwrap();
            assert_eq!(y.dims(), [&x.dims()[..x.rank() - 1], &[n]].concat());
            assert!(bits(&elements::<T>(&y)) == bits(&expected), "{:?} {:?}", x.layout(), w.layout());
        }
    }
}

#[test]
fn products_of_views() {
    for_each_dtype!(products);
}

fn heads<T: Element + WithDType>() {
    const D: usize = 24;
    // Of fused projections: four heads of queries, two of keys, two of values.
    let fused = numbers::<T>(&[3, 9, 8, D]);
    let slices = [(0, 4), (4, 2), (6, 2)].map(|(from, heads)| view(fused.narrow(2, from, heads)));
    // As caches have them, heads first; the last 4 of 13 queries, in the first two sequences.
    let cache = [4, 2, 2].map(|heads| view(numbers::<T>(&[3, heads, 13, D]).transpose(1, 2)));
    let cache = cache.map(|x| x.narrow(0, 1, 2).unwrap());
    let late = [view(cache[0].narrow(1, 9, 4)), cache[1].clone(), cache[2].clone()];
    // Values that are narrower than keys.
    let narrow = [slices[0].clone(), slices[1].clone(), view(slices[2].narrow(3, 5, 16))];
    for ([q, k, v], offset) in [(slices, 0), (cache, 0), (late, 9), (narrow, 0)] {
        let ([b, t, hq], [s, hkv], e) = (&q.dims()[..3], &k.dims()[1..3], v.dims()[3]) else { unreachable!() };
        let shape =
            samebits_ops::Attention { value_dim: e, ..samebits_ops::Attention::causal([*b, *t, *s], [*hq, *hkv], D) };
        let positions: Vec<i32> = (0..b * t).map(|i| (offset + i % t) as i32).collect();
        let lengths = vec![*s as i32; *b];
        let sequences = Sequences { keys: Keys::Padded, ..Sequences::padded(&positions, &lengths) };
        let slices = [&q, &k, &v].map(elements::<T>);
        let qkv = Qkv { q: &slices[0][..], k: &slices[1], v: &slices[2] };
        let mut expected = vec![T::from_f64(0.0); b * t * hq * e];
        let mut lse = vec![0f32; b * t * hq];
        samebits_ops::attention(&Cpu::best(), &shape, &sequences, qkv, None, &mut expected, &mut lse).unwrap();
        for cpu in cpus() {
            let out = q.apply_op3(&k, &v, Attention { cpu, offset }).unwrap();
            assert_eq!(out.dims(), [*b, *t, *hq, e]);
            assert!(bits(&elements::<T>(&out)) == bits(&expected), "{:?} {:?}", q.layout(), k.layout());
        }
    }
}

#[test]
fn attention_to_views() {
    for_each_dtype!(heads);
}

/// The outermost line of an error.
fn message(result: Result<Tensor>) -> String {
    match result.expect_err("it is refused") {
        Error::WithBacktrace { inner, .. } => inner.to_string(),
        error => error.to_string(),
    }
}

#[test]
fn refusals_name_the_axis() {
    let cpu = Cpu::best();
    let x = numbers::<f32>(&[2, 6, 8]);
    let turned = x.transpose(1, 2).unwrap();
    let (square, long) = (numbers::<f32>(&[8, 8]), numbers::<f32>(&[5, 2]));
    let norm = |x: &Tensor, w: &Tensor| message(x.apply_op2(w, RmsNorm { cpu: cpu.clone(), eps: EPS }));
    let product = |x: &Tensor, w: &Tensor| message(x.apply_op2(w, MatMul { cpu: cpu.clone() }));
    let attend =
        |q: &Tensor, k: &Tensor, v: &Tensor, offset| message(q.apply_op3(k, v, Attention { cpu: cpu.clone(), offset }));

    let says = "it must be contiguous";
    let column = long.narrow(1, 0, 1).unwrap().squeeze(1).unwrap();
    for (found, axis) in [
        (norm(&turned, &numbers::<f32>(&[6])), "rms_norm: axis N of `x` has stride 8"),
        (norm(&numbers::<f32>(&[3, 5]), &column), "rms_norm: axis N of `w` has stride 2"),
        (product(&turned, &numbers::<f32>(&[3, 6])), "gemm: axis K of `x` has stride 8"),
        (product(&x, &square.t().unwrap()), "gemm: axis K of `w` has stride 8"),
    ] {
        assert!(found.starts_with(axis) && found.contains(says), "{found}");
    }
    let q = numbers::<f32>(&[2, 3, 4, 8]);
    let turned = numbers::<f32>(&[2, 3, 8, 4]).transpose(2, 3).unwrap();
    for (found, axis) in [
        (attend(&turned, &q, &q, 0), "attention: axis D of `q` has stride 4"),
        (attend(&q, &turned, &q, 0), "attention: axis D of `k` has stride 4"),
        (attend(&q, &q, &turned, 0), "attention: axis E of `v` has stride 4"),
    ] {
        assert!(found.starts_with(axis) && found.contains(says), "{found}");
    }

    for (found, word) in [
        (norm(&x, &numbers::<f32>(&[7])), "`w`: shape [7] has N = 7"),
        (product(&x, &numbers::<f32>(&[3, 7])), "`w`: shape [3, 7] has K = 7"),
        (product(&x, &numbers::<f32>(&[8])), "w[N, K]"),
        (norm(&x.get(0).unwrap().get(0).unwrap(), &numbers::<f32>(&[8])), "`x`: shape [8] must have the form [R,N]"),
        (norm(&x.to_dtype(DType::F64).unwrap(), &numbers::<f32>(&[8])), "`x` is F64"),
        (attend(&q, &numbers::<f32>(&[2, 5, 3, 8]), &numbers::<f32>(&[2, 5, 3, 8]), 0), "Hq = 4"),
        (attend(&q, &q, &q, 1 << 31), "position"),
        (attend(&q, &x, &x, 0), "[B, T, H, D]"),
        (norm(&x, &numbers::<bf16>(&[8])), "`w` is bf16 and `x` is fp32"),
    ] {
        assert!(found.contains(word), "{found}");
    }
}
