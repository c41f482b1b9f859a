//! Whatever stands in a frame, decoding it and answering it is never a panic, and every answer is well formed.

use proptest::prelude::*;
use samebits_contract::case::{Answer, Case, Config, Status};
use samebits_contract::spec::check_form as check_case;
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire::{decode_answer, decode_request, encode_answer, encode_request, read_frame, write_frame};
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_ops::{Cpu, Isa, bf16, f16};
use samebits_schema::sample::{Random, integers, sample};
use samebits_schema::{Call, Holds, OPS, Op, check_indexes};
use std::collections::BTreeMap;

/// Values of parameters, of which most are wrong for most.
const VALUES: [&str; 24] = [
    "0",
    "1",
    "2",
    "-1",
    "16",
    "128",
    "1e-6",
    "0.5",
    "10000.0",
    "1e300",
    "-1e300",
    "1e-320",
    "inf",
    "nan",
    "",
    "true",
    "once",
    "hf",
    "half",
    "interleaved",
    "disabled",
    "enabled",
    "18446744073709551615",
    "ieee",
];

/// Bits that are every kind of number: random ones are mostly ordinary, a few are special.
fn bits(random: &mut Random) -> u32 {
    const SPECIAL: [u32; 9] =
        [0, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0xffff_ffff, 1, 0x3f80_0000, 0x7f7f_ffff];
    if random.below(7) == 0 { random.pick(&SPECIAL) } else { random.bits() as u32 }
}

fn floats(dtype: DType, shape: &[usize], mut bits: impl FnMut() -> u32) -> Tensor {
    let count = 0..shape.iter().product();
    match dtype {
        DType::Bf16 => Tensor::bf16(shape, count.map(|_| bf16::from_bits((bits() >> 16) as u16)).collect()),
        DType::Fp16 => Tensor::fp16(shape, count.map(|_| f16::from_bits((bits() >> 16) as u16)).collect()),
        DType::Fp32 => Tensor::fp32(shape, count.map(|_| f32::from_bits(bits())).collect()),
        DType::I32 => Tensor::i32(shape, count.map(|_| bits() as i32 % 8).collect()),
    }
}

/// The ops that the built-in program answers without a checkpoint.
fn ops() -> Vec<&'static Op> {
    OPS.iter().copied().filter(|op| !op.needs_more()).collect()
}

/// A case that the schema accepts, made from `seed` alone; the ops take turns.
fn well_formed(seed: u64) -> Case {
    let ops = ops();
    let op = ops[(seed % ops.len() as u64) as usize];
    let mut random = Random::new(seed);
    let drawn = sample(op, &mut random);
    let mut inputs = BTreeMap::new();
    for (name, dtype, shape) in &drawn.inputs {
        let tensor = if dtype.is_float() {
            floats(*dtype, shape, || bits(&mut random))
        } else {
            let holds = op.input(name).expect("it was drawn from the op").holds;
            Tensor::i32(shape, integers(&drawn.call, holds, shape.iter().product(), &mut random))
        };
        inputs.insert(name.to_string(), tensor);
    }
    Case {
        name: format!("{}/{seed}", op.name),
        op: op.name.into(),
        out: drawn.call.out,
        params: drawn.attributes,
        inputs,
        config: Config::default(),
    }
}

/// Whether the integers of a case whose form is accepted fit their axes. Any position may be asked for.
fn integers_fit(case: &Case, call: &Call) -> bool {
    let position = |name: &str| call.op.input(name).is_some_and(|input| input.holds == Holds::Position);
    check_indexes(call, |name| case.inputs.get(name).filter(|_| !position(name)).and_then(Tensor::as_i32)).is_ok()
}

/// One thing done wrong, or differently, to a case.
#[derive(Clone, Debug)]
enum Change {
    Op(String),
    Param(usize, usize),
    UnknownParam(String, String),
    Drop(usize),
    Rename(usize, String),
    Reshape(usize, Vec<usize>, DType),
    Integer(usize, usize, i32),
    Config(Config),
}

fn change() -> impl Strategy<Value = Change> {
    let isa = prop::option::of(prop::sample::select(vec!["scalar", "avx2", "avx512", "avx512bf16", "neon", ""]));
    let budget = prop::option::of(prop_oneof![Just(0usize), Just(1 << 12), any::<usize>()]);
    let config = (isa, prop::option::of(0usize..4), budget).prop_map(|(isa, threads, budget)| {
        Change::Config(Config { isa: isa.map(String::from), threads, budget, ..Config::default() })
    });
    let integer = prop::sample::select(vec![i32::MIN, -1, 0, 1, 2, 3, 7, 1 << 24, i32::MAX]);
    let dtypes = prop::sample::select(vec![DType::Bf16, DType::Fp16, DType::Fp32, DType::I32]);
    prop_oneof![
        1 => "[a-z_]{0,9}".prop_map(Change::Op),
        6 => (any::<usize>(), 0..VALUES.len()).prop_map(|(param, value)| Change::Param(param, value)),
        1 => ("[a-z_.]{0,9}", ".{0,9}").prop_map(|(name, value)| Change::UnknownParam(name, value)),
        1 => any::<usize>().prop_map(Change::Drop),
        1 => (any::<usize>(), "[a-z_]{0,5}").prop_map(|(input, name)| Change::Rename(input, name)),
        3 => (any::<usize>(), prop::collection::vec(0usize..6, 0..5), dtypes)
            .prop_map(|(input, shape, dtype)| Change::Reshape(input, shape, dtype)),
        4 => (any::<usize>(), any::<usize>(), integer).prop_map(|(input, at, to)| Change::Integer(input, at, to)),
        2 => config,
    ]
}

fn changed(mut case: Case, change: Change) -> Case {
    let nth = |case: &Case, i: usize| case.inputs.keys().nth(i % case.inputs.len().max(1)).cloned();
    match change {
        Change::Op(op) => case.op = op,
        Change::Param(param, value) => {
            let op = samebits_schema::find(&case.op);
            let names: Vec<_> = op.iter().flat_map(|op| op.attributes()).map(|attribute| attribute.name).collect();
            if !names.is_empty() {
                case.params.insert(names[param % names.len()].into(), VALUES[value].into());
            }
        }
        Change::UnknownParam(name, value) => drop(case.params.insert(name, value)),
        Change::Drop(i) => drop(nth(&case, i).and_then(|name| case.inputs.remove(&name))),
        Change::Rename(i, to) => {
            if let Some(tensor) = nth(&case, i).and_then(|name| case.inputs.remove(&name)) {
                case.inputs.insert(to, tensor);
            }
        }
        Change::Reshape(i, shape, dtype) => {
            if let Some(name) = nth(&case, i) {
                let mut bits = [0x3f80_0000, 0x4000_0000, 2].into_iter().cycle();
                case.inputs.insert(name, floats(dtype, &shape, || bits.next().expect("it goes on for ever")));
            }
        }
        Change::Integer(i, at, to) => {
            let mut indexes: Vec<_> = case.inputs.values_mut().filter(|tensor| tensor.as_i32().is_some()).collect();
            if let Some(count) = indexes.len().checked_sub(1)
                && let Tensor::I32(array) = &mut *indexes[i % (count + 1)]
                && let Some(at) = at.checked_rem(array.len())
            {
                array[at] = to;
            }
        }
        Change::Config(config) => case.config = config,
    }
    case
}

fn implementation(isa: Isa, threads: usize) -> CpuImplementation {
    CpuImplementation::new(Cpu::new(isa, threads, usize::MAX).expect("the isa is available"))
}

/// What must hold for every answer, good or bad.
fn well_formed_answer(case: &Case, answer: &Answer) {
    let read = decode_answer(&encode_answer(answer)).expect("an answer can be read back");
    assert_eq!((read.status, &read.reason, &read.kernel), (answer.status, &answer.reason, &answer.kernel));
    if answer.status != Status::Ok {
        assert!(answer.outputs.is_empty() && answer.kernel.is_empty());
        assert!(!answer.reason.is_empty() && !answer.reason.contains('\n'), "{:?}", answer.reason);
        return;
    }
    assert!(answer.reason.is_empty() && answer.kernel.starts_with(&case.op));
    let call = check_case(case).unwrap_or_else(|e| panic!("{} is answered and refused by the schema: {e}", case.op));
    let nothing = answer.outputs.values().all(Tensor::is_empty);
    assert!(nothing || integers_fit(case, &call), "{} answers to integers out of range", case.op);
    let forms = call.outputs();
    assert_eq!(answer.outputs.len(), forms.len(), "{}", case.op);
    for form in forms {
        let output = &answer.outputs[form.name];
        assert_eq!((output.dtype(), output.shape()), (form.dtype, &form.shape[..]), "{} `{}`", case.op, form.name);
    }
}

fn raw(answer: &Answer) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    answer.outputs.iter().map(|(name, t)| (name.clone(), t.shape().to_vec(), t.to_bytes())).collect()
}

/// Cases per property: enough for every test run; `PROPTEST_CASES` asks for more.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|count| count.parse().ok()).unwrap_or(5000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    /// Every op, dtype, parameter and extent, zero among them, is answered, with the same bits however it runs. What fails
    /// is repeated by its seed.
    #[test]
    fn well_formed_requests_are_answered(seed in any::<u64>().no_shrink()) {
        let case = well_formed(seed);
        let first = implementation(Isa::Scalar, 1).run(&case);
        well_formed_answer(&case, &first);
        let fit = integers_fit(&case, &check_case(&case).expect("the schema made it"));
        prop_assert!(first.status == Status::Ok || !fit, "{}: {}", case.op, first.reason);
        for isa in Isa::of_machine() {
            let again = implementation(isa, 2).run(&case);
            prop_assert_eq!(first.status, again.status);
            prop_assert_eq!(raw(&first), raw(&again), "{} on {}", &case.op, isa);
        }
    }

    /// Requests that are wrong in up to three ways, through the bytes of the wire.
    #[test]
    fn changed_requests_never_panic(
        seed in any::<u64>().no_shrink(),
        changes in prop::collection::vec(change(), 1..4),
    ) {
        let case = changes.into_iter().fold(well_formed(seed), changed);
        if let Ok(read) = decode_request(&encode_request(&case)) {
            well_formed_answer(&read, &implementation(Isa::best(), 1).run(&read));
        }
        well_formed_answer(&case, &implementation(Isa::best(), 1).run(&case));
    }

    /// Damaged bytes: overwritten, cut, or with some more in the middle.
    #[test]
    fn damaged_frames_never_panic(
        seed in any::<u64>().no_shrink(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(b"0123456789[]{},:\"-eIFB\x00\xff".to_vec())), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
        more in prop::option::of((any::<prop::sample::Index>(), prop::collection::vec(any::<u8>(), 1..9))),
    ) {
        let mut bytes = encode_request(&well_formed(seed));
        for (index, byte) in damage {
            let i = index.index(bytes.len());
            bytes[i] = byte;
        }
        if let Some(index) = cut {
            bytes.truncate(index.index(bytes.len()));
        }
        if let Some((index, more)) = more {
            let i = index.index(bytes.len() + 1);
            bytes.splice(i..i, more);
        }
        if let Ok(read) = decode_request(&bytes) {
            well_formed_answer(&read, &implementation(Isa::best(), 1).run(&read));
        }
    }

    /// Any bytes at all.
    #[test]
    fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode_request(&bytes);
        let _ = decode_answer(&bytes);
        let mut pipe = bytes.as_slice();
        while let Ok(Some(_)) = read_frame(&mut pipe) {}
        let mut framed = Vec::new();
        write_frame(&mut framed, &bytes).unwrap();
        prop_assert_eq!(read_frame(&mut framed.as_slice()).unwrap(), Some(bytes));
    }
}

/// A safetensors file whose header says `header`, over `data`.
fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn reason(header: &str, data: &[u8]) -> (Status, String) {
    let answer = match decode_request(&raw_file(header, data)) {
        Ok(case) => implementation(Isa::Scalar, 1).run(&case),
        Err(e) => Answer::error(e.to_string()),
    };
    (answer.status, answer.reason)
}

/// Shapes whose extents overflow when they are multiplied, beside a zero that hides it.
#[test]
fn overflowing_shapes_are_errors() {
    let big = 1u64 << 40;
    for shape in [format!("[0,{big},{big}]"), format!("[{big},{big},0]"), format!("[{big},0,{big}]")] {
        let entry = format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}"#);
        let header = format!(r#"{{"__metadata__":{{"op":"add"}},"a":{entry},"b":{entry}}}"#);
        let (status, reason) = reason(&header, b"");
        assert_eq!(status, Status::Error, "{shape}: {reason}");
    }
    // Inputs that exist and an output that cannot: M = N = 2^40 with K = 0.
    let entry = format!(r#"{{"dtype":"F32","shape":[{big},0],"data_offsets":[0,0]}}"#);
    let header = format!(r#"{{"__metadata__":{{"op":"gemm"}},"x":{entry},"w":{entry}}}"#);
    let (status, reason) = reason(&header, b"");
    assert!(status == Status::Error && reason.contains("output `y`"), "{reason}");
}

/// The tables of docs/WIRE.md are those of the schema.
#[test]
fn the_documented_forms_are_true() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/WIRE.md")).unwrap();
    let (_, rest) = page.split_once("<!-- samebits schema --markdown -->\n").expect("the block begins");
    let (block, _) = rest.split_once("<!-- end -->").expect("the block ends");
    let printed =
        std::process::Command::new(env!("CARGO_BIN_EXE_samebits-tested")).args(["schema", "--markdown"]).output();
    let printed = String::from_utf8(printed.expect("samebits runs").stdout).unwrap();
    assert!(printed.lines().count() > 40, "{printed}");
    assert!(block == printed, "put this between the marks of docs/WIRE.md:\n{printed}");
}

/// A program reads as much from `samebits schema --json` as it needs for a request of every op.
#[test]
fn the_printed_schema_is_whole() {
    let schema = |args: &[&str]| {
        std::process::Command::new(env!("CARGO_BIN_EXE_samebits-tested"))
            .arg("schema")
            .args(args)
            .output()
            .expect("samebits runs")
    };
    let printed: serde_json::Value = serde_json::from_slice(&schema(&["--json"]).stdout).unwrap();
    let ops = printed["ops"].as_array().unwrap();
    let names = |list: &serde_json::Value| -> Vec<String> {
        list.as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap().to_string()).collect()
    };
    assert_eq!(names(&printed["ops"]), OPS.iter().map(|op| op.name).collect::<Vec<_>>());
    for (op, printed) in OPS.iter().zip(ops) {
        assert_eq!(names(&printed["inputs"]), op.inputs.iter().map(|input| input.name).collect::<Vec<_>>());
        assert_eq!(names(&printed["attributes"]), op.attributes().map(|a| a.name).collect::<Vec<_>>());
        assert_eq!(names(&printed["outputs"]), op.outputs.iter().map(|output| output.name).collect::<Vec<_>>());
        let first = &printed["inputs"][0];
        let keys: Vec<_> = first.as_object().unwrap().keys().take(6).collect();
        assert_eq!(keys, ["name", "axes", "role", "dtypes", "dtype_group", "optional"]);
        assert!(printed.get("gradient_of").is_some() && first["axes"].is_array(), "{printed}");
    }
    let one: serde_json::Value = serde_json::from_slice(&schema(&["rms_norm", "--json"]).stdout).unwrap();
    let eps = &one["ops"][0]["attributes"][0];
    assert_eq!(eps["name"], "eps");
    assert_eq!((&eps["kind"], &eps["default"], &eps["at_least"]), (&"float".into(), &"1e-6".into(), &0.0.into()));
    let text = String::from_utf8(schema(&["attention"]).stdout).unwrap();
    assert!(text.contains("  parameter  scale [1/sqrt(D)]: a finite number of at least 0"), "{text}");
    let unknown = schema(&["fft"]);
    let reason = String::from_utf8(unknown.stderr).unwrap();
    assert!(unknown.status.code() == Some(2) && reason.contains("`fft` is not an op; there are gemm"), "{reason}");
}

#[test]
fn reasons_name_the_field_and_the_fix() {
    let one = r#"{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}"#;
    let two = r#"{"dtype":"F32","shape":[1,2],"data_offsets":[4,12]}"#;
    let half = r#"{"dtype":"F16","shape":[1,1],"data_offsets":[4,6]}"#;
    let fp8 = r#"{"dtype":"F8_E4M3","shape":[1,1],"data_offsets":[4,5]}"#;
    let long = r#"{"dtype":"I64","shape":[1,1],"data_offsets":[4,12]}"#;
    let request = |metadata: &str, tensors: &str| format!(r#"{{"__metadata__":{{{metadata}}},{tensors}}}"#);
    let add = |metadata: &str, b: &str| request(&format!(r#""op":"add"{metadata}"#), &format!(r#""a":{one},"b":{b}"#));
    let norm = |metadata: &str| {
        let w = r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#;
        request(&format!(r#""op":"rms_norm"{metadata}"#), &format!(r#""x":{one},"w":{w}"#))
    };
    let alone = |metadata: &str| request(metadata, &format!(r#""a":{one}"#));
    use Status::{Error, Unsupported};
    for (header, data, status, parts) in [
        (alone(r#""out":"fp32""#), 4, Error, &["`op`", "missing"][..]),
        (alone(r#""op":"fft""#), 4, Unsupported, &["`fft`", "gemm, gemm_dx, gemm_dw, rms_norm"]),
        (alone(r#""op":"add""#), 4, Error, &["input `b`", "missing"]),
        (alone(r#""op":"softmax""#), 4, Error, &["input `a`", "takes x"]),
        (add("", two), 12, Error, &["input `b`", "[1, 2]", "[1, 1]"]),
        (add("", half), 6, Unsupported, &["input `b`", "fp16", "fp32", "mixed"]),
        (add("", fp8), 5, Error, &["`b`", "fp8", "BF16, F16 or F32"]),
        (add("", long), 12, Error, &["`b`", "I64"]),
        (add(r#","out":"fp8_e4m3""#, half), 6, Error, &["`out`", "fp8 is out of scope"]),
        (add(r#","out":"i32""#, half), 6, Error, &["`out`", "bf16, fp16 or fp32"]),
        (add(r#","config.threads":"two""#, half), 6, Error, &["`config.threads`", "two"]),
        (norm(r#","config.threads":"0""#), 8, Error, &["`config.threads`", "1 to 1024"]),
        (norm(r#","config.isa":"mmx""#), 8, Error, &["`config.isa`", "mmx", "avx512bf16"]),
        (norm(r#","epsilon":"1""#), 8, Error, &["param `epsilon`", "eps, rounding, weight_offset"]),
        (norm(r#","eps":"small""#), 8, Error, &["param `eps`", "small"]),
        (norm(r#","eps":"-1""#), 8, Error, &["param `eps`", "-1"]),
        (norm(r#","eps":"1e39""#), 8, Error, &["param `eps`", "1e39"]),
        (norm(r#","rounding":"twice""#), 8, Error, &["param `rounding`", "once or hf"]),
        (norm(r#","weight_offset":"2""#), 8, Error, &["param `weight_offset`", "0, 1, true or false"]),
        (norm(r#","profile":"sm90""#), 8, Unsupported, &["param `profile`", "ieee"]),
        (norm(r#","tf32":"enabled""#), 8, Unsupported, &["param `tf32`", "rms_norm"]),
        (norm(r#","tf32":"on""#), 8, Error, &["param `tf32`", "disabled or enabled"]),
    ] {
        let (found, reason) = reason(&header, &vec![0; data]);
        assert_eq!(found, status, "{header}: {reason}");
        for part in parts {
            assert!(reason.contains(part), "`{part}` is not in: {reason}");
        }
    }
}

/// One rank's part of a gemm is fp32 and has no bias; eight parts joined in the tree are the whole.
#[test]
fn parts_of_a_gemm_join_to_the_whole() {
    let (m, n, k) = (3, 5, 256);
    let values = |count: usize, seed: u32| -> Vec<f32> {
        (0..count as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 1e6 - 8.0).collect()
    };
    let (x, w) = (values(m * k, 1), values(n * k, 2));
    let run = |from: usize, to: usize, bias: bool| {
        let columns = |rows: usize, data: &[f32]| {
            let cut: Vec<f32> = (0..rows).flat_map(|r| data[r * k + from..r * k + to].to_vec()).collect();
            Tensor::fp32(&[rows, to - from], cut)
        };
        let mut inputs = BTreeMap::from([("x".into(), columns(m, &x)), ("w".into(), columns(n, &w))]);
        if bias {
            inputs.insert("bias".to_string(), Tensor::fp32(&[n], vec![1e6; n]));
        }
        let params = BTreeMap::from([("k_offset".into(), from.to_string()), ("k_total".into(), k.to_string())]);
        let (name, op, out) = (String::new(), "gemm".to_string(), DType::Fp32);
        let case = Case { name, op, out, params, inputs, config: Config::default() };
        let rounded = implementation(Isa::best(), 1).run(&Case { out: DType::Bf16, ..case.clone() });
        let answer = implementation(Isa::best(), 1).run(&case);
        assert_eq!(answer.status, Status::Ok, "{}", answer.reason);
        let part = to - from < k;
        assert_eq!(rounded.outputs["y"].dtype(), if part { DType::Fp32 } else { DType::Bf16 });
        (0..m * n).map(|i| f32::from_bits(answer.outputs["y"].bits(i))).collect::<Vec<f32>>()
    };
    let whole = run(0, k, false);
    assert_ne!(whole, run(0, k, true), "the whole sum has its bias");
    assert_eq!(run(0, k / 2, true), run(0, k / 2, false), "a part has no bias");
    for ranks in [2, 4, 8] {
        let mut parts: Vec<Vec<f32>> = (0..ranks).map(|r| run(k / ranks * r, k / ranks * (r + 1), false)).collect();
        while parts.len() > 1 {
            parts = parts.chunks(2).map(|p| p[0].iter().zip(&p[1]).map(|(a, b)| a + b).collect()).collect();
        }
        assert_eq!(parts[0], whole, "{ranks} ranks");
    }
}

/// The example of docs/WIRE.md is what the built-in program reads and writes, byte for byte.
#[test]
fn the_documented_example_is_true() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/WIRE.md")).unwrap();
    let dump = |name: &str| -> Vec<u8> {
        let (_, rest) = page.split_once(&format!("```text {name}\n")).expect("the block is there");
        let (block, _) = rest.split_once("```").expect("the block ends");
        let hex = block.lines().flat_map(|line| line[6..53].split_whitespace());
        hex.map(|byte| u8::from_str_radix(byte, 16).expect("hex")).collect()
    };
    let frame = read_frame(&mut dump("request").as_slice()).unwrap().unwrap();
    let answer = implementation(Isa::Scalar, 1).run(&decode_request(&frame).unwrap());
    let mut framed = Vec::new();
    write_frame(&mut framed, &encode_answer(&answer)).unwrap();
    assert_eq!(framed, dump("answer"));
}
