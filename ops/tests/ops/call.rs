//! Calls by name: every op of the schema, its inputs laid out in every way, on every instruction set.

use crate::cpus;
use samebits_ops::{Attributes, Backend, Cpu, DType, Element, Error, Isa, TensorMut, TensorRef, bf16, f16};
use samebits_schema::{Call, Given, Holds, Input, OPS, Op, REST, validate};

/// splitmix64, so that a failure can be had again.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// About normal: the sum of four uniform numbers.
    fn normal(&mut self) -> f32 {
        (0..4).map(|_| (self.next() >> 40) as f32 / 8_388_608.0 - 1.0).sum()
    }
}

/// An input: its elements in the order of memory, and how they are seen.
struct Tensor {
    name: &'static str,
    shape: Vec<usize>,
    floats: Vec<f32>,
    ints: Vec<i32>,
    dtype: DType,
}

/// Elements of one type, and the view that is given to the op.
struct Stored {
    name: &'static str,
    shape: Vec<usize>,
    strides: Vec<usize>,
    data: Data,
}

enum Data {
    Bf16(Vec<bf16>),
    Fp16(Vec<f16>),
    Fp32(Vec<f32>),
    I32(Vec<i32>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    RowMajor,
    /// A gap of NaN behind every row.
    Gaps,
    /// The two axes before the last exchanged in memory.
    HeadsFirst,
}

fn strides(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect()
}

impl Stored {
    fn of(tensor: &Tensor, layout: Layout) -> Stored {
        let shape = tensor.shape.clone();
        let plain = strides(&shape);
        let rank = shape.len();
        let mut strides = plain.clone();
        let n = shape.last().copied().unwrap_or(1);
        match layout {
            _ if tensor.dtype == DType::I32 || rank < 2 => {}
            Layout::Gaps => strides[..rank - 1].iter_mut().for_each(|stride| *stride = *stride / n * (n + 3)),
            Layout::HeadsFirst if rank > 2 => {
                (strides[rank - 3], strides[rank - 2]) = (n, shape[rank - 3] * n);
            }
            _ => {}
        }
        let reach = shape.iter().zip(&strides).map(|(extent, stride)| (extent - 1) * stride).sum::<usize>() + 1;
        let mut floats = vec![f32::NAN; reach];
        for (i, &value) in tensor.floats.iter().enumerate() {
            let at: usize = plain.iter().zip(&shape).zip(&strides).map(|((p, e), s)| i / p % e * s).sum();
            floats[at] = value;
        }
        let data = match tensor.dtype {
            DType::Bf16 => Data::Bf16(floats.into_iter().map(bf16::narrow).collect()),
            DType::Fp16 => Data::Fp16(floats.into_iter().map(f16::narrow).collect()),
            DType::Fp32 => Data::Fp32(floats),
            _ => Data::I32(tensor.ints.clone()),
        };
        Stored { name: tensor.name, shape, strides, data }
    }

    fn tensor(&self) -> TensorRef<'_> {
        let (shape, strides) = (&self.shape, &self.strides);
        match &self.data {
            Data::Bf16(data) => TensorRef::strided(data, shape, strides),
            Data::Fp16(data) => TensorRef::strided(data, shape, strides),
            Data::Fp32(data) => TensorRef::strided(data, shape, strides),
            Data::I32(data) => TensorRef::strided(data, shape, strides),
        }
        .expect("the view lies in its data")
    }
}

/// The extent of an axis, small enough for every op and large enough for its kernels' borders.
fn extent(axis: &str, large: bool) -> usize {
    match (axis, large) {
        ("Hq" | "Hv", _) => 4,
        ("Hkv" | "Hk", _) => 2,
        ("B", _) => 2,
        ("T", false) => 5,
        ("T", true) => 19,
        ("S", false) => 9,
        ("S", true) => 301,
        ("P", _) => 7,
        ("Z", _) => 8,
        ("C", _) => 4,
        ("E", _) => 16,
        // They share N.
        ("G", false) => 3,
        ("G", true) => 1,
        ("D" | "K", false) => 32,
        ("D", true) => 64,
        ("K", true) => 200,
        ("N" | "V", true) => 331,
        (_, false) => 6,
        (_, true) => 13,
    }
}

fn shape_of(op: &Op, input: &Input, large: bool) -> Vec<usize> {
    let extent = |axis: &str| match axis {
        // Few choices for each token, and a row for each.
        "K" if op.owned().is_some() || op.follows("K") => 3,
        _ if op.owned().is_some_and(|(_, owned)| owned == axis) => 3 * extent("T", large) + 2,
        // Those of a convolution.
        "K" if op.follows("J") => 4,
        "J" => 3,
        "C" if op.follows("J") => extent("N", large),
        // Windows on images.
        "I" => extent("C", large),
        "D" if op.follows("C") => 3,
        "KD" | "OD" => 2,
        "KH" | "KW" => 3,
        "OH" | "OW" => extent("H", large) - 2,
        // Two heads of a scan to a group.
        "H" if op.input("a_log").is_some() => 4,
        // A gate for each element.
        "G" if op.input("gate").is_some() => extent("N", large),
        // A decay for a head.
        "G" if op.input("beta").is_some() => 1,
        "G" => 2,
        _ => extent(axis, large),
    };
    input.shape(extent, &[3, 4, if large { 83 } else { 16 }])
}

/// Inputs of a call of `op`, and the call.
fn draw(op: &'static Op, dtype: DType, out: DType, large: bool, random: &mut Random) -> (Vec<Tensor>, Call) {
    let forms: Vec<(&'static Input, Vec<usize>)> =
        op.inputs.iter().map(|input| (input, shape_of(op, input, large))).collect();
    let of = |input: &Input| input.dtype_beside(dtype);
    let given: Vec<Given> =
        forms.iter().map(|(input, shape)| Given { name: input.name, dtype: of(input), shape }).collect();
    let mut attributes = Attributes::new();
    if op.attribute("chosen").is_some() {
        attributes = attributes.with("chosen", 3);
    }
    // Every input is given, and one that nothing reads is refused.
    if op.attribute("kl").is_some() {
        attributes = attributes.with("kl", "k3").with("beta", 0.5);
    }
    let call = validate(op, &given, attributes, out).unwrap_or_else(|e| panic!("{}: {e}", op.name));
    let tensors = forms.into_iter().map(|(input, shape)| {
        let count = shape.iter().product();
        let (least, most) = input.holds.range(&call);
        let most = most.min(least.max(0) + (1 << 20));
        let ints = (0..count).map(|i| match input.holds {
            Holds::Starts(_) => (most as usize * i / (count - 1)) as i32,
            Holds::Ranks(_) => {
                let i = (i % shape[shape.len() - 1]) as i64;
                if i <= most { i as i32 } else { -1 }
            }
            Holds::Choices(_) => (i % call.count("chosen")) as i32,
            Holds::Distinct(_) => most as i32 - i as i32,
            _ => (least.max(0) + (random.next() % (most - least.max(0) + 1).max(1) as u64) as i64) as i32,
        });
        let ints = if input.is_float() { Vec::new() } else { ints.collect() };
        let floats = if input.is_float() { (0..count).map(|_| random.normal()).collect() } else { Vec::new() };
        Tensor { name: input.name, shape, floats, ints, dtype: of(input) }
    });
    let mut tensors: Vec<Tensor> = tensors.collect();
    // What a page table reaches bounds the lengths.
    if let Some(table) = tensors.iter().position(|tensor| tensor.name.ends_with("table")) {
        let reach = (tensors[table].shape[1] * extent("Z", large)) as i32;
        let lengths = tensors.iter_mut().find(|tensor| tensor.name == "kv_len").expect("paged attention has lengths");
        lengths.ints.iter_mut().for_each(|len| *len = (*len).min(reach));
    }
    (tensors, call)
}

/// The bits of every output of a call.
fn bits(cpu: &Cpu, call: &Call, tensors: &[Tensor], layout: Layout) -> Result<Vec<Vec<u32>>, Error> {
    let stored: Vec<Stored> = tensors.iter().map(|tensor| Stored::of(tensor, layout)).collect();
    let inputs: Vec<(&str, TensorRef)> = stored.iter().map(|stored| (stored.name, stored.tensor())).collect();
    let forms = call.outputs();
    let mut data: Vec<Data> = forms
        .iter()
        .map(|form| {
            let count = form.shape.iter().product();
            match form.dtype {
                DType::Bf16 => Data::Bf16(vec![bf16::NAN; count]),
                DType::Fp16 => Data::Fp16(vec![f16::NAN; count]),
                DType::Fp32 => Data::Fp32(vec![f32::NAN; count]),
                _ => Data::I32(vec![i32::MIN; count]),
            }
        })
        .collect();
    let outputs = forms.iter().zip(&mut data).map(|(form, data)| {
        let tensor = match data {
            Data::Bf16(data) => TensorMut::new(data, &form.shape),
            Data::Fp16(data) => TensorMut::new(data, &form.shape),
            Data::Fp32(data) => TensorMut::new(data, &form.shape),
            Data::I32(data) => TensorMut::new(data, &form.shape),
        };
        (form.name, tensor.expect("room was made for the shape"))
    });
    cpu.run(call, &inputs, outputs.collect())?;
    let bits = data.into_iter().map(|data| match data {
        Data::Bf16(data) => data.into_iter().map(|v| u32::from(v.to_bits())).collect(),
        Data::Fp16(data) => data.into_iter().map(|v| u32::from(v.to_bits())).collect(),
        Data::Fp32(data) => data.into_iter().map(f32::to_bits).collect(),
        Data::I32(data) => data.into_iter().map(|v| v as u32).collect(),
    });
    Ok(bits.collect())
}

#[test]
fn a_view_gives_the_bits_of_a_copy_for_every_op_bf16() {
    views_give_the_bits_of_copies(DType::Bf16);
}

#[test]
fn a_view_gives_the_bits_of_a_copy_for_every_op_fp16() {
    views_give_the_bits_of_copies(DType::Fp16);
}

#[test]
fn a_view_gives_the_bits_of_a_copy_for_every_op_fp32() {
    views_give_the_bits_of_copies(DType::Fp32);
}

fn views_give_the_bits_of_copies(dtype: DType) {
    let mut random = Random(7);
    let mut seen = 0;
    for op in OPS.iter().filter(|op| !op.needs_more()) {
        for large in [false, true] {
            for out in op.outs().iter().copied() {
                let (tensors, call) = draw(op, dtype, out, large, &mut random);
                let scalar = Cpu::new(Isa::Scalar, 1, usize::MAX).unwrap();
                let expected =
                    bits(&scalar, &call, &tensors, Layout::RowMajor).unwrap_or_else(|e| panic!("{}: {e}", op.name));
                for isa in Isa::of_machine() {
                    for (layout, threads) in [(Layout::RowMajor, 2), (Layout::Gaps, 1), (Layout::HeadsFirst, 2)] {
                        let cpu = Cpu::new(isa, threads, usize::MAX).unwrap();
                        let found = bits(&cpu, &call, &tensors, layout).unwrap_or_else(|e| panic!("{}: {e}", op.name));
                        assert!(found == expected, "{} {dtype} to {out}, large {large}, {isa}, {layout:?}", op.name);
                        seen += 1;
                    }
                }
            }
        }
    }
    assert!(seen > 0);
}

/// Outputs of 32 MiB and more are written past the caches, in parts: they have the bits of the same rows in small outputs,
/// which the loops of `page.rs` give, wherever they begin within a line. An op whose frame another one here has is left to it.
#[test]
fn large_outputs_have_the_bits_of_small_ones() {
    let names = [
        "add",
        "silu_mul",
        "silu_mul_backward",
        "gelu_mul",
        "softcap",
        "scale",
        "softmax",
        "softmax_backward",
        "logprob_backward",
        "entropy_backward",
        "rms_norm",
        "add_rms_norm",
        "layer_norm",
        "rms_norm_backward",
        "layer_norm_backward",
    ];
    let mut random = Random(11);
    // More than a part of a row that is kept, and less.
    for n in [1000, 5004] {
        let rows = (32 << 20) / 2 / n + 3;
        let data: Vec<bf16> = (0..rows * n + 64).map(|_| bf16::narrow(random.normal())).collect();
        let wide: Vec<f32> = data[..rows + 64].iter().map(|v| v.widen()).collect();
        for name in names.into_iter().chain(["rope", "norm_rope", "norm_rope_backward"]) {
            let op = samebits_schema::find(name).expect("an op of the schema");
            let some = |cpu: &Cpu, rows: std::ops::Range<usize>| {
                // Targets are below n.
                let positions: Vec<i32> = rows.clone().map(|row| (row % n) as i32).collect();
                let shape = |axes: &[&str]| match axes {
                    [REST] | ["R", "N" | "V"] => vec![rows.len(), n],
                    ["T", "H", "D"] => vec![rows.len(), 2, n / 2],
                    ["T" | "R"] => vec![rows.len()],
                    ["D"] => vec![n / 2],
                    ["N"] => vec![n],
                    axes => panic!("{name} has axes {axes:?}"),
                };
                let shapes: Vec<Vec<usize>> = op.inputs.iter().map(|input| shape(input.axes)).collect();
                let inputs = op.inputs.iter().zip(&shapes).enumerate().map(|(i, (input, shape))| {
                    // Every input has values of its own.
                    let from = 7 * i
                        + match input.axes {
                            ["R"] => rows.start,
                            ["N" | "D"] => 0,
                            _ => rows.start * n,
                        };
                    let tensor = match input.dtype_beside(DType::Bf16) {
                        DType::Bf16 => TensorRef::new(&data[from..][..shape.iter().product()], shape),
                        DType::Fp32 => TensorRef::new(&wide[from..][..shape.iter().product()], shape),
                        _ => TensorRef::new(&positions, shape),
                    };
                    (input.name, tensor.expect("the shape fits"))
                });
                let inputs: Vec<_> = inputs.collect();
                let mut made = vec![vec![bf16::NAN; rows.len() * n + 1]; op.outputs.len()];
                let outputs = op.outputs.iter().zip(&mut made).map(|(output, made)| {
                    (
                        output.name,
                        TensorMut::new(&mut made[1..], &shape(output.axes)).expect("room was made for the shape"),
                    )
                });
                let attributes = match name {
                    "softcap" => Attributes::new().with("cap", 2.0),
                    "scale" => Attributes::new().with("factor", 0.7),
                    _ => Attributes::new(),
                };
                cpu.call(name, attributes, &inputs, outputs.collect()).unwrap_or_else(|e| panic!("{name}: {e}"));
                made
            };
            for isa in Isa::of_machine().filter(|isa| *isa != Isa::Scalar) {
                let cpu = Cpu::new(isa, 2, usize::MAX).unwrap();
                let large = some(&cpu, 0..rows);
                for from in (0..rows).step_by(rows / 3) {
                    let small = some(&cpu, from..rows.min(from + rows / 3));
                    for (large, small) in large.iter().zip(&small) {
                        let same =
                            large[1 + from * n..].iter().zip(&small[1..]).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{name} {isa}, rows of {n} from {from}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let cpu = Cpu::best();
    let (x, w) = ([1.0f32; 12], [1.0f32; 3]);
    let call = |x: TensorRef, w: TensorRef, y: &mut [f32], shape: &[usize]| {
        let y = TensorMut::new(y, shape).unwrap();
        cpu.call("rms_norm", Attributes::new(), &[("x", x), ("w", w)], vec![("y", y)]).map_err(|e| e.to_string())
    };
    let (x4, w3) = (TensorRef::new(&x, &[4, 3]).unwrap(), TensorRef::new(&w, &[3]).unwrap());
    let error = |found: Result<(), String>| found.expect_err("it does not fit");
    assert_eq!(call(x4, w3, &mut [0.0; 12], &[4, 3]), Ok(()));
    // Leading axes are one.
    assert_eq!(call(TensorRef::new(&x, &[2, 2, 3]).unwrap(), w3, &mut [0.0; 12], &[4, 3]), Ok(()));
    assert!(error(call(x4, w3, &mut [0.0; 12], &[3, 4])).contains("`y` has shape [3, 4]; it must be [4, 3]"));
    assert!(error(call(x4, TensorRef::new(&w[..2], &[2]).unwrap(), &mut [0.0; 12], &[4, 3])).contains("`w`"));
    let half = [bf16::ONE; 3];
    assert!(error(call(x4, TensorRef::new(&half, &[3]).unwrap(), &mut [0.0; 12], &[4, 3])).contains("bf16"));
    let strided = TensorRef::strided(&x, &[4, 3], &[1, 4]).err().expect("the last axis is not contiguous").to_string();
    assert!(strided.contains("the last axis has stride 4"), "{strided}");
    let outside = TensorRef::strided(&x, &[4, 3], &[4, 1]).err().expect("it leaves the slice").to_string();
    assert!(outside.contains("needs 15 elements of 12"), "{outside}");
    let unknown = cpu.call("no_op", Attributes::new(), &[], Vec::new()).unwrap_err().to_string();
    assert!(unknown.contains("no_op"), "{unknown}");
}

/// An input with gaps beside one without, of types that no kernel is compiled for.
#[test]
fn inputs_may_lie_differently() {
    let (dense, gaps) = ([1f32, 2.0, 3.0, 4.0, 5.0, 6.0], [10f32, 20.0, 30.0, 9.0, 40.0, 50.0, 60.0, 9.0]);
    let dense = TensorRef::new(&dense, &[2, 3]).unwrap();
    let gaps = TensorRef::strided(&gaps, &[2, 3], &[4, 1]).unwrap();
    for cpu in cpus() {
        for (a, b) in [(dense, gaps), (gaps, dense)] {
            let mut y = [f16::NAN; 6];
            let outputs = vec![("y", TensorMut::new(&mut y, &[2, 3]).unwrap())];
            cpu.call("add", Attributes::new(), &[("a", a), ("b", b)], outputs).unwrap();
            assert_eq!(y.map(f32::from), [11.0, 22.0, 33.0, 44.0, 55.0, 66.0]);
        }
    }
}

#[test]
fn no_elements_may_have_any_strides() {
    for cpu in cpus() {
        let x = TensorRef::strided(&[0f32; 0], &[3, 0], &[5, 1]).unwrap();
        let mut sum = [7.0f32; 3];
        let outputs = vec![("sum", TensorMut::new(&mut sum, &[3]).unwrap())];
        cpu.call("square_sum", Attributes::new(), &[("x", x)], outputs).unwrap();
        assert_eq!(sum, [0.0; 3]);
    }
}
