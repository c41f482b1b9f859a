//! The device's kernels without a device: their text runs in an emulator (`tests/cuda`), under the same host code as on a
//! GPU, and must give the bits of `ours/cpu`. Kernels with a planted fault must be caught.

#[path = "cuda/emulator.rs"]
mod emulator;

use emulator::{Change, Emulator};
use libtest_mimic::{Arguments, Failed, Trial};
use samebits_contract::axis::Machine;
use samebits_contract::case::{Answer, Case, Config, Status};
use samebits_contract::record::Judgment;
use samebits_contract::table::{Contract, Slice};
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire::{File, decode_request};
use samebits_harness::checkpoints::Checkpoints;
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_harness::implementation::cuda::CudaImplementation;
use samebits_harness::judge::{Judge, Selection, plan};
use samebits_ops::device::Device;
use samebits_ops::{Cpu, Isa, bf16, f16};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// How many files there are; a folder that lost some must not pass.
const VECTORS: usize = 135;

fn main() {
    let arguments = Arguments::from_args();
    let vectors = vectors();
    let found = vectors.len();
    let mut trials = vec![Trial::test("vectors::all_files_are_there", move || match found {
        VECTORS.. => Ok(()),
        _ => Err(format!("tests/vectors holds {found} files; {VECTORS} are expected").into()),
    })];
    for file in vectors {
        let stem = file.file_stem().expect("found by extension").to_string_lossy().into_owned();
        trials.push(Trial::test(format!("vectors::{stem}"), move || vector(&file)));
    }
    for (name, make) in SHAPES {
        for [dtype, out] in TYPES {
            let name = format!("shapes::{name}::{}-{}", dtype.name(), out.name());
            trials.push(Trial::test(name, move || same_bits(&make(dtype, out), false)));
        }
    }
    for (name, make) in SHAPES {
        trials
            .push(Trial::test(format!("backwards::{name}"), move || same_bits(&make(DType::Bf16, DType::Fp32), true)));
    }
    for fault in FAULTS {
        trials.push(Trial::test(format!("faults::{}", fault.name), move || caught(fault)));
    }
    trials.push(Trial::test("memory::a_full_device_is_retried_smaller_and_then_reported", full_device));
    trials.push(Trial::test("memory::a_budget_makes_smaller_plans", small_budget));
    trials.push(Trial::test("memory::nothing_is_held_twice", kept));
    trials.push(Trial::test("ledger::strict_runs_have_no_conversions", ledger));
    trials.push(Trial::test("judge::same_as_holds_every_case", judged));
    trials.push(Trial::test("math::rounding_a_product_twice_changes_no_narrow_logit", fused_rounding));
    libtest_mimic::run(&arguments, trials).exit();
}

fn vectors() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors");
    let entries = std::fs::read_dir(&folder).expect("tests/vectors can be read");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("tests/vectors can be read").path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    files
}

fn cpu() -> Cpu {
    Cpu::new(Isa::best(), 1, usize::MAX).expect("the best isa is there")
}

fn emulated(changes: &[Change], backwards: bool) -> Result<CudaImplementation, Failed> {
    let driver = Emulator::new(changes, backwards)?;
    Ok(CudaImplementation::new(Ok(Device::new(Box::new(driver), usize::MAX, usize::MAX)), cpu()))
}

/// A file of `tests/vectors`, with fp32 and with bf16 outputs.
fn vector(path: &Path) -> Result<(), Failed> {
    let device = emulated(&[], false)?;
    let file = File::decode(&std::fs::read(path)?)?;
    for out in [DType::Fp32, DType::Bf16] {
        let mut request = file.clone();
        request.tensors.retain(|name, _| !name.starts_with("expect."));
        request.metadata.insert("out".into(), out.name().into());
        let answer = device.run(&decode_request(&request.encode())?);
        if answer.status != Status::Ok {
            return Err(format!("out={}: {}", out.name(), answer.reason).into());
        }
        for (name, found) in &answer.outputs {
            let rounded = file.tensors.get(&format!("expect.{name}_bf16")).filter(|_| out == DType::Bf16);
            let wanted =
                rounded.or(file.tensors.get(&format!("expect.{name}"))).ok_or("an output is not in the file")?;
            differs(name, found, wanted, &answer.kernel)?;
        }
    }
    Ok(())
}

/// An error where bits differ.
fn differs(name: &str, found: &Tensor, wanted: &Tensor, kernel: &str) -> Result<(), Failed> {
    if (found.dtype(), found.shape()) != (wanted.dtype(), wanted.shape()) {
        return Err(format!(
            "`{name}` is {} {:?}; {} {:?} is expected",
            found.dtype(),
            found.shape(),
            wanted.dtype(),
            wanted.shape()
        )
        .into());
    }
    let wrong: Vec<usize> = (0..wanted.len()).filter(|&i| found.bits(i) != wanted.bits(i)).collect();
    match wrong.first() {
        None => Ok(()),
        Some(&i) => Err(format!(
            "`{name}`: {} of {} elements differ; element {i} is {:#x} ({}), expected {:#x} ({}); kernel {kernel}",
            wrong.len(),
            wanted.len(),
            found.bits(i),
            found.value(i),
            wanted.bits(i),
            wanted.value(i),
        )
        .into()),
    }
}

/// The device's answer to `case` is that of the CPU.
fn agree(device: &CudaImplementation, case: &Case) -> Result<Answer, Failed> {
    let plain = Case { config: Config::default(), ..case.clone() };
    let (found, wanted) = (device.run(case), CpuImplementation::new(cpu()).run(&plain));
    if wanted.status != Status::Ok {
        return Err(format!("{}: ours/cpu: {}", case.name, wanted.reason).into());
    }
    if found.status != Status::Ok {
        return Err(format!("{}: {}", case.name, found.reason).into());
    }
    if wanted.outputs.is_empty() || !wanted.outputs.keys().eq(found.outputs.keys()) {
        return Err(format!("{}: other outputs than ours/cpu has", case.name).into());
    }
    for (name, wanted) in &wanted.outputs {
        differs(name, &found.outputs[name], wanted, &found.kernel)
            .map_err(|e| format!("{}: {}", case.name, e.message().unwrap_or_default()))?;
    }
    Ok(found)
}

fn same_bits(cases: &[Case], backwards: bool) -> Result<(), Failed> {
    let device = emulated(&[], backwards)?;
    assert!(!cases.is_empty());
    cases.iter().try_for_each(|case| agree(&device, case).map(drop))
}

/// Types of inputs and outputs that all shapes run with.
const TYPES: [[DType; 2]; 5] = [
    [DType::Bf16, DType::Bf16],
    [DType::Bf16, DType::Fp32],
    [DType::Fp16, DType::Fp16],
    [DType::Fp32, DType::Fp32],
    [DType::Fp32, DType::Bf16],
];

type Make = fn(DType, DType) -> Vec<Case>;

/// Ragged shapes of every op: lengths around lanes, vectors, tiles, segments, blocks of keys.
const SHAPES: [(&str, Make); 14] = [
    ("add", |dtype, out| elementwise("add", "a", "b", dtype, out)),
    ("silu_mul", |dtype, out| elementwise("silu_mul", "gate", "up", dtype, out)),
    ("rms_norm", |dtype, out| {
        let widths = [1, 7, 8, 31, 255, 256, 257, 264, 1024, 1032, 4104, 8200, 8448];
        widths.iter().flat_map(|&n| norms("rms_norm", n, dtype, out)).collect()
    }),
    ("add_rms_norm", |dtype, out| {
        [1, 9, 256, 264, 777].iter().flat_map(|&n| norms("add_rms_norm", n, dtype, out)).collect()
    }),
    ("rope", |dtype, out| rotated("rope", dtype, out)),
    ("norm_rope", |dtype, out| rotated("norm_rope", dtype, out)),
    ("embedding", |dtype, out| {
        let of = |dim: usize| {
            let make = Maker::new("embedding", dtype, out);
            make.float("w", &[13, dim], 1.0).ints("tokens", &[5], &[12, 0, 3, 3, 7]).case()
        };
        [1, 8, 13, 64, 1100].map(of).to_vec()
    }),
    ("argmax", |dtype, out| {
        let of = |n: usize| Maker::new("argmax", dtype, out).float("x", &[3, n], 1.0).special("x", n).case();
        [1, 5, 256, 2049, 4096].map(of).to_vec()
    }),
    ("softmax", |dtype, out| {
        let of = |n: usize| Maker::new("softmax", dtype, out).float("x", &[6, n], 3.0).special("x", n).case();
        [1, 33, 128, 129, 2056, 5000].map(of).to_vec()
    }),
    ("logprob", |dtype, out| {
        let mut cases = Vec::new();
        for n in [1, 16, 129, 1000, 2048, 9000, 16384, 33001] {
            for (temperature, spread) in [("1", 3.0), ("0.7", 3.0), ("1", 60.0), ("1", 3.0e4)] {
                let make = Maker::new("logprob", dtype, out).float("logits", &[3, n], spread);
                cases.push(make.param("temperature", temperature).ints("target", &[3], &[0, -1, n as i32 - 1]).case());
            }
            let make = Maker::new("logprob", dtype, out).float("logits", &[7, n], 3.0).special("logits", n);
            cases.push(make.ints("target", &[7], &[0; 7]).case());
        }
        if dtype == DType::Fp32 {
            cases.extend(ties(out));
        }
        cases.extend(ramps(dtype, out));
        cases
    }),
    ("linear_logprob", |dtype, out| {
        let of = |(m, v, k): (usize, usize, usize)| {
            let target: Vec<i32> = (0..m as i32).map(|i| i * 7 % (v as i32 + 1) - 1).collect();
            let make = Maker::new("linear_logprob", dtype, out).float("x", &[m, k], 1.0).float("w", &[v, k], 1.0);
            make.ints("target", &[m], &target).case()
        };
        [(1, 40, 64), (5, 300, 33), (3, 1100, 128)].map(of).to_vec()
    }),
    ("gemm_tiles", |dtype, out| {
        let mut shapes = vec![(17, 5, 33), (65, 70, 129), (20, 130, 300), (33, 1, 1), (64, 64, 16), (18, 9, 0)];
        // More than 64 rows and 128 tiles of 128: the large tiles, at the smallest K that has two steps.
        shapes.push((129, 8200, 17));
        shapes.into_iter().flat_map(|shape| products(shape, dtype, out)).collect()
    }),
    ("gemm_skinny", |dtype, out| {
        let mut cases = Vec::new();
        for m in [1, 2, 4, 5, 8, 9, 16] {
            for (n, k) in [(1, 8), (33, 136), (70, 1048), (64, 2048), (31, 640)] {
                cases.extend(products((m, n, k), dtype, out));
            }
        }
        cases
    }),
    ("attention", attentions),
];

/// Logits that climb by 2^80 within every segment, so that a thread's reference point moves while its sums stay within reach
/// of the last: in whole vectors and, where rows are not aligned, one by one.
fn ramps(dtype: DType, out: DType) -> Vec<Case> {
    let of = |n: usize| {
        let segment = 16 * n.div_ceil(128);
        let make = Maker::new("logprob", dtype, out).float("logits", &[2, n], 1.0);
        let ramp = |i: usize| -55.0 + 55.0 * (i % n % segment) as f32 / segment as f32;
        let make = (0..2 * n).fold(make, |make, i| make.set("logits", i, ramp(i)));
        make.ints("target", &[2], &[0, n as i32 - 1]).case()
    };
    [32768, 24001].map(of).to_vec()
}

/// Rows of one logit again and again, whose product with log2(e), rounded to f32, lies exactly between two integers: a tie
/// that goes to the even one. There are as many as bring lse close to 0, where it shows the last bit of a weight.
fn ties(out: DType) -> Vec<Case> {
    const HI: f32 = f32::from_bits(0x3FB8_AA3B);
    let of = |k: i32| {
        let x = ((f64::from(k) + 0.5) / f64::from(HI)) as f32;
        let x = [x.next_down(), x, x.next_up()].into_iter().find(|x| x * HI == k as f32 + 0.5)?;
        let n = (-f64::from(k) - 0.5).exp2().round() as usize;
        let make = Maker::new("logprob", DType::Fp32, out).float("logits", &[1, n], 1.0);
        let make = (0..n).fold(make, |make, i| make.set("logits", i, x));
        Some(make.ints("target", &[1], &[0]).case())
    };
    let cases: Vec<Case> = (-14..-3).filter_map(of).collect();
    assert!(cases.len() > 5, "{}", cases.len());
    cases
}

fn elementwise(op: &'static str, a: &'static str, b: &'static str, dtype: DType, out: DType) -> Vec<Case> {
    let of = |n: usize| Maker::new(op, dtype, out).float(a, &[n], 40.0).float(b, &[n], 1.0).special(a, n).case();
    [0, 1, 7, 8, 9, 2047, 2048, 2057, 5000].map(of).to_vec()
}

fn norms(op: &'static str, n: usize, dtype: DType, out: DType) -> Vec<Case> {
    let of = |rounding: &str, offset: &str| {
        let mut make = Maker::new(op, dtype, out).float("x", &[5, n], 1.0);
        if op == "add_rms_norm" {
            make = make.float("residual", &[5, n], 1.0);
        }
        make.float("w", &[n], 1.0).param("rounding", rounding).param("weight_offset", offset).case()
    };
    vec![of("once", "0"), of("hf", "1")]
}

fn rotated(op: &'static str, dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for pairing in ["half", "interleaved"] {
        for (heads, dim) in [(3, 2), (2, 10), (1, 64), (2, 128), (3, 300)] {
            let mut make = Maker::new(op, dtype, out).float("x", &[4, heads, dim], 1.0);
            if op == "norm_rope" {
                make = make.float("w", &[dim], 1.0);
            }
            cases.push(make.ints("pos", &[4], &[0, 5, 1000, 70000]).param("pairing", pairing).case());
        }
    }
    cases
}

fn products((m, n, k): (usize, usize, usize), dtype: DType, out: DType) -> Vec<Case> {
    let plain = || Maker::new("gemm", dtype, out).float("x", &[m, k], 1.0).float("w", &[n, k], 1.0);
    let mut cases = vec![plain().case(), plain().float("bias", &[n], 1.0).case()];
    if dtype == DType::Fp32 {
        cases.push(plain().param("tf32", "enabled").case());
    }
    // One rank's part: the last two segments, and the first four.
    if k > 0 && k.is_multiple_of(256) {
        cases.push(plain().param("k_total", &(4 * k).to_string()).param("k_offset", &(3 * k).to_string()).case());
        cases.push(plain().param("k_total", &(2 * k).to_string()).case());
    }
    cases
}

fn attentions(dtype: DType, out: DType) -> Vec<Case> {
    struct Form {
        b: usize,
        t: usize,
        s: usize,
        heads: (usize, usize),
        dims: (usize, usize),
        params: &'static [(&'static str, &'static str)],
    }
    let forms = [
        Form { b: 1, t: 1, s: 5, heads: (1, 1), dims: (8, 8), params: &[] },
        Form { b: 2, t: 1, s: 600, heads: (4, 1), dims: (64, 64), params: &[("causal", "1")] },
        Form { b: 1, t: 1, s: 520, heads: (8, 1), dims: (128, 128), params: &[] },
        Form { b: 1, t: 3, s: 700, heads: (6, 2), dims: (40, 24), params: &[("causal", "1"), ("window", "300")] },
        Form { b: 2, t: 19, s: 270, heads: (2, 1), dims: (33, 130), params: &[("causal", "1"), ("softcap", "20")] },
        Form { b: 1, t: 40, s: 40, heads: (16, 8), dims: (16, 16), params: &[("causal", "1")] },
        Form { b: 1, t: 2, s: 300, heads: (1, 1), dims: (0, 3), params: &[] },
    ];
    let mut cases = Vec::new();
    for Form { b, t, s, heads: (hq, hkv), dims: (d, e), params } in forms {
        let kv_len: Vec<i32> = (0..b).map(|i| (s - 3 * i) as i32).collect();
        let q_pos: Vec<i32> = (0..b * t).map(|i| (s as i32 - t as i32) + (i % t) as i32 - 2 * (i / t) as i32).collect();
        let make = || {
            let make = Maker::new("attention", dtype, out).float("q", &[b, t, hq, d], 2.0);
            params.iter().fold(make, |make, (name, value)| make.param(name, value))
        };
        let padded = make().float("k", &[b, s, hkv, d], 2.0).float("v", &[b, s, hkv, e], 1.0);
        cases.push(padded.ints("q_pos", &[b, t], &q_pos).ints("kv_len", &[b], &kv_len).case());
        // Pages in descending order.
        let (size, columns) = (48, s.div_ceil(48));
        let table: Vec<i32> = (0..(b * columns) as i32).rev().collect();
        let paged = make().op("paged_attention").float("k", &[b * columns, size, hkv, d], 2.0);
        let paged = paged.float("v", &[b * columns, size, hkv, e], 1.0).ints("page_table", &[b, columns], &table);
        cases.push(paged.ints("q_pos", &[b, t], &q_pos).ints("kv_len", &[b], &kv_len).case());
    }
    let packed = Maker::new("packed_attention", dtype, out).float("q", &[9, 2, 32], 2.0);
    let packed = packed.float("k", &[310, 1, 32], 2.0).float("v", &[310, 1, 20], 1.0).param("causal", "1");
    let packed = packed.ints("q_pos", &[9], &[0, 1, 2, 3, 290, 291, 292, 293, 294]);
    cases.push(packed.ints("q_start", &[4], &[0, 4, 4, 9]).ints("k_start", &[4], &[0, 10, 12, 310]).case());
    // Keys and values that do not count: an infinite value of a hidden key, scores of -inf, +inf and NaN.
    for (at, value) in [(0, f32::NAN), (3, f32::INFINITY), (5, f32::NEG_INFINITY)] {
        let make = Maker::new("attention", dtype, out).float("q", &[1, 2, 1, 8], 1.0).float("k", &[1, 9, 1, 8], 1.0);
        let make = make.float("v", &[1, 9, 1, 8], 1.0).set("k", at * 8, value).set("v", 8 * 8, f32::INFINITY);
        cases.push(make.ints("q_pos", &[1, 2], &[4, 8]).ints("kv_len", &[1], &[8]).param("causal", "1").case());
    }
    cases
}

/// Makes a request; contents follow from names and indices.
struct Maker {
    case: Case,
    dtype: DType,
    values: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Maker {
    fn new(op: &str, dtype: DType, out: DType) -> Maker {
        let case = Case {
            name: op.into(),
            op: op.into(),
            out,
            params: BTreeMap::new(),
            inputs: BTreeMap::new(),
            config: Config::default(),
        };
        Maker { case, dtype, values: BTreeMap::new() }
    }

    fn op(mut self, op: &str) -> Maker {
        self.case.op = op.into();
        self.case.name = op.into();
        self
    }

    fn param(mut self, name: &str, value: &str) -> Maker {
        self.case.params.insert(name.into(), value.into());
        self
    }

    fn ints(mut self, name: &str, shape: &[usize], values: &[i32]) -> Maker {
        self.case.inputs.insert(name.into(), Tensor::i32(shape, values.to_vec()));
        self
    }

    /// Numbers around 0, most of them within `spread`.
    fn float(mut self, name: &str, shape: &[usize], spread: f32) -> Maker {
        let mut state =
            name.bytes().fold(shape.len() as u64 + 1, |h, b| h.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
        let values = (0..shape.iter().product()).map(|_| {
            let mut sum = 0.0;
            for _ in 0..3 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                sum += (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
            }
            sum * spread * 1.2
        });
        self.values.insert(name.into(), (shape.to_vec(), values.collect()));
        self
    }

    fn set(mut self, name: &str, at: usize, value: f32) -> Maker {
        self.values.get_mut(name).expect("the input is there").1[at] = value;
        self
    }

    /// Rows of `n` with special values, as far as there are rows: NaN, +inf, nothing but -inf, some -inf, equal ones, and an
    /// exponent that overflows.
    fn special(mut self, name: &str, n: usize) -> Maker {
        let (_, values) = self.values.get_mut(name).expect("the input is there");
        for (row, values) in values.chunks_mut(n.max(1)).enumerate() {
            match row {
                0 => values[n / 2] = f32::NAN,
                1 => values[n - 1] = f32::INFINITY,
                2 => values.fill(f32::NEG_INFINITY),
                3 => values[n / 3] = f32::NEG_INFINITY,
                4 => values.fill(1.5),
                5 => values[0] = 3.0e38,
                _ => {}
            }
        }
        self
    }

    fn case(mut self) -> Case {
        for (name, (shape, values)) in self.values {
            let tensor = match self.dtype {
                DType::Bf16 => Tensor::bf16(&shape, values.iter().map(|&v| bf16::from_f32(v)).collect()),
                DType::Fp16 => Tensor::fp16(&shape, values.iter().map(|&v| f16::from_f32(v)).collect()),
                _ => Tensor::fp32(&shape, values),
            };
            self.case.name += &format!(" {name}{shape:?}");
            self.case.inputs.insert(name, tensor);
        }
        self.case.name += &format!(" {:?}", self.case.params);
        self.case
    }
}

/// A way to be wrong, and a part of what the emulator or the comparison says about it.
#[derive(Clone, Copy)]
struct Fault {
    name: &'static str,
    change: Change,
    /// The shapes that show it.
    shapes: &'static str,
    says: &'static str,
}

const FAULTS: [Fault; 18] = [
    Fault {
        name: "missing_block_barrier",
        change: Change {
            file: "gemm.cu",
            from: "            left_of_segment = steps_of_segment;\n        }\n        __syncthreads();",
            to: "            left_of_segment = steps_of_segment;\n        }",
        },
        shapes: "gemm_tiles",
        says: "reads what nobody has written",
    },
    Fault {
        name: "missing_barrier_before_the_join",
        change: Change {
            file: "denominator.cuh",
            from: "room[threadIdx.x / 32] = segment;\n    __syncthreads();",
            to: "room[threadIdx.x / 32] = segment;",
        },
        shapes: "softmax",
        says: "races with a write",
    },
    Fault {
        name: "missing_warp_barrier",
        change: Change {
            file: "gemm.cu",
            from: "        __syncwarp();\n        bring(chunk + STAGES - 1);",
            to: "        bring(chunk + STAGES - 1);",
        },
        shapes: "gemm_skinny",
        says: "races with a",
    },
    Fault {
        name: "copy_not_waited_for",
        change: Change { file: "gemm.cu", from: "async_wait<STAGES - 2>();", to: "async_wait<STAGES - 1>();" },
        shapes: "gemm_skinny",
        says: "reads what nobody has written",
    },
    Fault {
        name: "barrier_in_a_branch",
        change: Change {
            file: "argmax.cu",
            from: "        indices[threadIdx.x / 32] = best_index;\n    }\n    __syncthreads();",
            to: "        indices[threadIdx.x / 32] = best_index;\n        __syncthreads();\n    }",
        },
        shapes: "argmax",
        says: "waits for ever",
    },
    Fault {
        name: "lanes_fold_the_other_way",
        change: Change {
            file: "lane_sum.cuh",
            from: "for (int h = 16; h >= 1; h /= 2) {",
            to: "for (int h = 1; h <= 16; h *= 2) {",
        },
        shapes: "rms_norm",
        says: "elements differ",
    },
    Fault {
        name: "lanes_of_four",
        change: Change {
            file: "rms_norm.cu",
            from: "for (long long at = lane * 8; at < n; at += 256) {\n        // The pad",
            to: "for (long long at = lane * 8; at < n; at += 248) {\n        // The pad",
        },
        shapes: "rms_norm",
        says: "elements differ",
    },
    Fault {
        name: "segments_joined_left_to_right",
        change: Change {
            file: "lane_sum.cuh",
            from: "__fadd_rn(__fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3])),",
            to: "__fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(s[0], s[1]), s[2]), s[3]),",
        },
        shapes: "logprob",
        says: "elements differ",
    },
    Fault {
        name: "subtrees_crossed",
        change: Change {
            file: "gemm.cu",
            from: "parts[s] = __fadd_rn(parts[s], parts[s + width]);",
            to: "parts[s] = __fadd_rn(parts[s], parts[(s + 8 - width) % 8]);",
        },
        shapes: "gemm_skinny",
        says: "elements differ",
    },
    Fault {
        name: "one_row_too_many",
        change: Change { file: "gemm.cu", from: "if (row >= m) continue;", to: "if (row > m) continue;" },
        shapes: "gemm_tiles",
        says: "writes outside",
    },
    Fault {
        name: "tail_read_too_far",
        change: Change {
            file: "element.cuh",
            from: "        float value = pad;\n        if (i < count)",
            to: "        float value = pad;\n        if (i <= count)",
        },
        shapes: "add",
        says: "reads outside",
    },
    Fault {
        name: "tail_padded_with_plus_zero",
        change: Change {
            file: "gemm.cu",
            from: "float pad = left ? -0.0f : 0.0f;",
            to: "float pad = left ? 1.0f : 1.0f;",
        },
        shapes: "gemm_tiles",
        says: "elements differ",
    },
    Fault {
        name: "contracted_product",
        change: Change {
            file: "rotate.cuh",
            from: "float y1 = __fmaf_rn(x1, c, -__fmul_rn(x2, s));",
            to: "float y1 = __fmaf_rn(-x2, s, __fmul_rn(x1, c));",
        },
        shapes: "rope",
        says: "elements differ",
    },
    Fault {
        name: "lanes_left_at_their_own_reference_points",
        change: Change {
            file: "logprob.cu",
            from: "__fsub_rn(__fsub_rn(ROUNDING, run.base), n)",
            to: "__fsub_rn(ROUNDING, run.base)",
        },
        shapes: "logprob",
        says: "elements differ",
    },
    Fault {
        name: "lanes_not_moved_with_their_reference_point",
        change: Change { file: "logprob.cu", from: "lanes.v[j] = __fmul_rn(lanes.v[j], factor);", to: ";" },
        shapes: "logprob",
        says: "elements differ",
    },
    Fault {
        name: "hidden_key_seen",
        change: Change {
            file: "attention.cu",
            from: "if (call.causal) end = min(end, max(p + 1, 0ll));",
            to: "if (call.causal) end = min(end, max(p + 2, 0ll));",
        },
        shapes: "attention",
        says: "elements differ",
    },
    Fault {
        name: "window_off_by_one",
        change: Change { file: "attention.cu", from: "max(p - call.window + 1, 0ll)", to: "max(p - call.window, 0ll)" },
        shapes: "attention",
        says: "elements differ",
    },
    Fault {
        name: "blocks_added_from_the_last",
        change: Change {
            file: "attention.cu",
            from: "total = __fadd_rn(total, partial[((first + block) * ROWS + row) * e + column]);",
            to: "total = __fadd_rn(total, partial[((first + call.blocks - 1 - block) * ROWS + row) * e + column]);",
        },
        shapes: "attention",
        says: "elements differ",
    },
];

/// A kernel with a fault gives an error or other bits, and the words are the expected ones.
fn caught(fault: Fault) -> Result<(), Failed> {
    let device = emulated(&[fault.change], false)?;
    let make = SHAPES.iter().find(|(name, _)| *name == fault.shapes).expect("the fault names shapes").1;
    let types = [[DType::Bf16, DType::Fp32], [DType::Fp32, DType::Fp32]];
    for [dtype, out] in types {
        for case in make(dtype, out) {
            if let Err(e) = agree(&device, &case) {
                let message = e.message().unwrap_or_default().to_string();
                return if message.contains(fault.says) {
                    Ok(())
                } else {
                    Err(format!("caught, but not as `{}`: {message}", fault.says).into())
                };
            }
        }
    }
    Err("the fault was not caught".into())
}

fn linear(m: usize, v: usize) -> Case {
    let make = Maker::new("linear_logprob", DType::Bf16, DType::Fp32).float("x", &[m, 32], 1.0);
    make.float("w", &[v, 32], 1.0).ints("target", &[m], &vec![3; m]).case()
}

/// A device without room for a plan is asked for a smaller one; without room for any, the answer says so.
fn full_device() -> Result<(), Failed> {
    let (m, v) = (64, 700);
    let tensors = 2 * 32 * (m + v) + 3 * 4 * m + 4 * 256;
    let device = |room: usize| -> Result<CudaImplementation, Failed> {
        let driver = Emulator::with_room(&[], false, room)?;
        Ok(CudaImplementation::new(Ok(Device::new(Box::new(driver), usize::MAX, usize::MAX)), cpu()))
    };
    let answer = agree(&device(tensors + 20 * 4 * v)?, &linear(m, v))?;
    if !answer.plan.contains("rows 16") || answer.ledger.get("plan_retries") != Some(&2) {
        return Err(format!("plan {}, ledger {:?}", answer.plan, answer.ledger).into());
    }
    let answer = device(tensors)?.run(&linear(m, v));
    if answer.status != Status::Error || !answer.reason.contains("no memory") {
        return Err(format!("{:?} {}", answer.status, answer.reason).into());
    }
    Ok(())
}

fn small_budget() -> Result<(), Failed> {
    let device = emulated(&[], false)?;
    let mut case = linear(9, 100);
    case.config.budget = Some(2 * 400);
    let answer = agree(&device, &case)?;
    if !answer.plan.contains("rows 2") {
        return Err(answer.plan.into());
    }
    case.config.budget = Some(399);
    let answer = device.run(&case);
    if answer.smallest_budget != Some(400) {
        return Err(format!("{:?} {}", answer.smallest_budget, answer.reason).into());
    }
    let attention = attentions(DType::Bf16, DType::Fp32);
    for case in &attention {
        // From everything at once down to the smallest slot, and the bits stay.
        let mut case = case.clone();
        case.config.budget = Some(1);
        let smallest = device.run(&case).smallest_budget.ok_or("a budget of one byte is enough")?;
        for budget in [smallest, 2 * smallest, 5 * smallest] {
            case.config.budget = Some(budget);
            agree(&device, &case)?;
        }
    }
    Ok(())
}

/// What one request gives back serves the next.
fn kept() -> Result<(), Failed> {
    let device = emulated(&[], false)?;
    let held = |device: &CudaImplementation| device.device().map(Device::held).unwrap_or(0);
    agree(&device, &linear(9, 100))?;
    let after_one = held(&device);
    for _ in 0..3 {
        agree(&device, &linear(9, 100))?;
    }
    if after_one == 0 || held(&device) != after_one {
        return Err(format!("{after_one} bytes after one request, {} after four", held(&device)).into());
    }
    Ok(())
}

/// With bf16 in and out no f32 tensor is made, nothing is converted, and what was launched has a name.
fn ledger() -> Result<(), Failed> {
    let device = emulated(&[], false)?;
    let case = Maker::new("gemm", DType::Bf16, DType::Bf16).float("x", &[3, 64], 1.0).float("w", &[40, 64], 1.0).case();
    let answer = agree(&device, &case)?;
    let staged = 2 * (3 * 64 + 40 * 64 + 3 * 40);
    let expected: BTreeMap<String, u64> =
        [("device_bf16_bytes", staged), ("staged_bytes", staged), ("launches", 1)].map(|(n, c)| (n.into(), c)).into();
    if answer.ledger.iter().map(|(n, c)| (n.clone(), *c)).collect::<BTreeMap<_, _>>() != expected {
        return Err(format!("{:?}", answer.ledger).into());
    }
    if answer.kernel != "gemm/cuda:gemm_skinny4" {
        return Err(answer.kernel.into());
    }
    Ok(())
}

/// `same_as` of the contract: every case is held to the answer of `ours/cpu`, and a fault in a kernel turns it red.
fn judged() -> Result<(), Failed> {
    let contract = Contract::load(None)?;
    let (checkpoints, reference) = (Checkpoints::new(None), CpuImplementation::new(cpu()));
    let (ops, judgments) = (vec!["rms_norm".to_string()], vec![Judgment::Golden]);
    let selection = Selection { ops, judgments, ..Selection::all(Slice::Quick) };
    let counts = |device: &CudaImplementation| {
        let judge = Judge {
            contract: &contract,
            rows: contract.default_rows(),
            implementation: device,
            goldens: None,
            references: vec![&reference],
            checkpoints: &checkpoints,
            machine: &Machine::default(),
        };
        let plan = plan(&contract, device.name(), &selection);
        let records: Vec<_> = plan.iter().flat_map(|group| judge.group(group)).collect();
        (records.len(), records.iter().filter(|record| record.verdict.is_red()).count())
    };
    let fault = FAULTS.into_iter().find(|fault| fault.name == "lanes_fold_the_other_way").expect("there is the fault");
    let (right, wrong) = (counts(&emulated(&[], false)?), counts(&emulated(&[fault.change], false)?));
    if right.0 < 10 || right.1 != 0 || wrong.1 == 0 {
        return Err(format!("records and red ones: {right:?}, with a fault {wrong:?}").into());
    }
    Ok(())
}

/// logprob.cu rounds `x * LOG2E_HI` to an integer at once where x is a bf16 or fp16: the same integer as after rounding the
/// product to f32, for every such x.
fn fused_rounding() -> Result<(), Failed> {
    const HI: f32 = f32::from_bits(0x3FB8_AA3B);
    const ROUNDING: f32 = 12582912.0;
    let mut tried = 0;
    for bits in 0..=u16::MAX {
        for x in [bf16::from_bits(bits).to_f32(), f16::from_bits(bits).to_f32()] {
            let t = x * HI;
            if t.abs() < 2097152.0 {
                tried += 1;
                for r in [0.0f32, 2.0, -38.0, 1046.0] {
                    let base = ROUNDING - r;
                    if (t - r).abs() < 1000.0 && x.mul_add(HI, base) - base != t.round_ties_even() {
                        return Err(format!("{x:e}").into());
                    }
                }
            }
        }
    }
    if tried > 100_000 { Ok(()) } else { Err(format!("only {tried} were tried").into()) }
}
