//! The device's kernels without a device: their text runs in an emulator (`tests/cuda`), under the same host code as on a
//! GPU, and must give the bits of `ours/cpu`. Mutants, kernels with one change, must be caught.

mod covering;
#[path = "cuda/emulator.rs"]
mod emulator;
#[path = "vector_files.rs"]
mod files;

use emulator::{Change, Emulator};
use libtest_mimic::{Arguments, Failed, Trial};
use samebits_contract::axis::Machine;
use samebits_contract::case::{Answer, Case, Config, Status};
use samebits_contract::record::Judgment;
use samebits_contract::table::{Contract, Slice};
use samebits_contract::tensor::{DType, Tensor};
use samebits_contract::wire::decode_request;
use samebits_harness::checkpoints::Checkpoints;
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_harness::implementation::cuda::CudaImplementation;
use samebits_harness::judge::{Judge, Selection, plan};
use samebits_models::plan::{Branch, Layer};
use samebits_models::{
    AdapterChoice, Experts, Grouping, Model, ModelError, PageOrder, Precision, Probe, Recorded, Routing, Run, Sample,
    Sampling, SamplingRule, Schedule, Seen, Serving,
};
use samebits_ops::device::{self, AttentionMetadata, Buffer, Build, Device, Indices, Part, Stored};
use samebits_ops::{
    Attention, Attributes, Backend, Counter, Cpu, Entry, Error, Gemm, Isa, Qkv, RmsNorm, Rounding, TensorRef,
};
use samebits_ops::{bf16, f16, register};
use samebits_schema::{Input, Kind, OPS, Op, Output, REST};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn main() {
    let arguments = Arguments::from_args();
    let vectors = files::files();
    let found = vectors.len();
    let mut trials = vec![
        Trial::test("vectors::all_files_are_there", move || Ok(files::all_there(found)?)),
        Trial::test("vectors::loose_answers_are_refused", || Ok(files::loose_answers_are_refused()?)),
    ];
    for file in vectors {
        let stem = file.file_stem().expect("found by extension").to_string_lossy().into_owned();
        trials.push(Trial::test(format!("vectors::{stem}"), move || vector(&file)));
    }
    trials.push(Trial::test("shapes::every_op_has_some", every_op_has_shapes));
    for name in named_shapes() {
        for [dtype, out] in types() {
            let trial = format!("shapes::{name}::{}-{}", dtype.name(), out.name());
            trials.push(Trial::test(trial, move || same_bits(&shapes(name, dtype, out), false)));
        }
        let cases = move || same_bits(&shapes(name, DType::Bf16, DType::Fp32), true);
        trials.push(Trial::test(format!("backwards::{name}"), cases));
    }
    for mutant in MUTANTS {
        trials.push(Trial::test(format!("mutants::{}", mutant.name), move || caught(mutant)));
    }
    for name in covering::checkpoints(&checkpoint("")) {
        trials.push(Trial::test(format!("models::{name}"), move || model(&name)));
    }
    trials.push(Trial::test("models::other_precisions", other_precisions));
    trials.push(Trial::test("models::rollouts_are_those_of_the_processor", rollouts));
    trials.push(Trial::test("models::adapters_are_those_of_the_processor", adapters));
    trials.push(Trial::test("models::experts_are_those_of_the_processor", experts));
    trials.push(Trial::test("models::chain_cases_are_answered_and_counted", chain_case));
    trials.push(Trial::test("models::every_site_is_that_of_the_processor", sites));
    trials.push(Trial::test("models::backwards", || same_logits("qwen3", Precision::Bf16, &[], true).map(drop)));
    trials.push(Trial::test("models::mutants_are_caught", wrong_model));
    trials.push(Trial::test("device::products_of_chosen_matrices", || chosen_products(&[])));
    trials.push(Trial::test("device::rows_are_copied_as_they_are", copied_rows));
    trials.push(Trial::test("device::what_is_captured_reads_what_stands_there", captured));
    trials.push(Trial::test("device::indices_and_attention_metadata_are_checked", checked_metadata));
    trials.push(Trial::test("mutants::bias_of_another_expert", other_expert));
    trials.push(Trial::test("outside::kernels_of_another_crate", outside));
    trials.push(Trial::test("structs::both_sides_lay_them_out_alike", same_structs));
    trials.push(Trial::test("structs::a_struct_that_differs_is_seen", other_structs));
    trials.push(Trial::test("add_rms_norm::every_type_of_sum", || sums(&[])));
    trials.push(Trial::test("mutants::norm_of_the_unrounded_sum", unrounded_sum));
    trials.push(Trial::test("memory::the_logits_of_linear_logprob_do_not_grow", bounded_logits));
    trials.push(Trial::test("memory::a_full_device_is_retried_smaller_and_then_reported", full_device));
    trials.push(Trial::test("memory::a_budget_makes_smaller_plans", small_budget));
    trials.push(Trial::test("memory::nothing_is_held_twice", kept));
    trials.push(Trial::test("ledger::strict_runs_have_no_conversions", ledger));
    trials.push(Trial::test("judge::same_as_holds_every_case", judged));
    trials.push(Trial::test("math::rounding_a_product_twice_changes_no_narrow_logit", fused_rounding));
    // The longest first, so that no core waits for the last.
    trials.sort_by_key(|trial| !trial.name().starts_with("models::"));
    libtest_mimic::run(&arguments, trials).exit();
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
    let answer = |request: &[u8]| Ok(device.run(&decode_request(request).map_err(|e| e.to_string())?));
    Ok(files::holds(path, answer)?)
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
        files::same_bits(name, &found.outputs[name], wanted, &found.kernel)
            .map_err(|e| format!("{}: {e}", case.name))?;
    }
    Ok(found)
}

fn same_bits(cases: &[Case], backwards: bool) -> Result<(), Failed> {
    let device = emulated(&[], backwards)?;
    assert!(!cases.is_empty());
    cases.iter().try_for_each(|case| agree(&device, case).map(drop))
}

/// Where a struct on the host and the one of its unit, with `changes`, are not laid out alike.
fn struct_difference(layout: &device::StructLayout, changes: &[Change]) -> Option<String> {
    let names: Vec<&str> = layout.fields.iter().map(|(name, ..)| *name).collect();
    let places = layout.fields.iter().flat_map(|(_, offset, size)| [*offset, *size]);
    let wanted: Vec<usize> = [layout.size, layout.align].into_iter().chain(places).collect();
    match emulator::struct_layout(changes, layout.unit, layout.name, &names) {
        Err(log) => Some(log),
        Ok(found) if found != wanted => Some(format!("{found:?} where the host has {wanted:?}")),
        Ok(_) => None,
    }
}

/// Every struct that a kernel takes is the one that the host fills, and none is packed by hand.
fn same_structs() -> Result<(), Failed> {
    let layouts: Vec<_> = device::units().flat_map(|unit| unit.structs).collect();
    for layout in &layouts {
        if let Some(difference) = struct_difference(layout, &[]) {
            return Err(format!("{} of {}.cu: {difference}", layout.name, layout.unit).into());
        }
    }
    let (mut declared, mut folders) = (0, vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../ops/src")]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("device/layout.rs") {
                let text = std::fs::read_to_string(&path)?;
                declared += text.matches("launch_struct! {").count();
                let by_hand = text.contains("to_ne_bytes") && !path.ends_with("device/driver.rs");
                assert!(!by_hand, "{}: declare a `launch_struct!`", path.display());
            }
        }
    }
    assert_eq!((layouts.len(), declared), (4, 4), "a unit has the structs of its file");
    Ok(())
}

/// Fields in another order, of another size, one more in the padding, one less.
fn other_structs() -> Result<(), Failed> {
    let units: Vec<_> = device::units().flat_map(|unit| unit.structs).collect();
    let call = |unit: &str| *units.iter().find(|layout| layout.unit == unit).expect("it has one");
    for (unit, from, to) in [
        ("attention.cu", "capped, paged, page_size", "paged, capped, page_size"),
        ("attention.cu", "long long slots_before;", "int slots_before;"),
        ("attention_backward.cu", "float cap, cap_factor, hi, lo;", "float cap, cap_factor, hi, lo, more;"),
        ("route.cu", "float scale;", ""),
    ] {
        let file: &'static str = unit;
        let layout = call(unit.trim_end_matches(".cu"));
        assert!(struct_difference(layout, &[Change { file, from, to }]).is_some(), "{unit}: `{to}` for `{from}`");
    }
    Ok(())
}

/// The kernel of an op that another crate has registered: written over the headers that ours are written over.
static SQUARE: device::Unit = device::Unit::of(
    "outside_square",
    "#include \"elementwise.cuh\"\n\
     struct Square { DEVICE float operator()(float x) const { return __fmul_rn(x, x); } };\n\
     KERNEL(256, 4) outside_square(GLOBAL(const In) x, GLOBAL(Out) y, long long n) { elementwise(Square(), x, y, n); }\n",
    &["outside_square"],
);

/// It is compiled, started and counted as any other.
fn outside() -> Result<(), Failed> {
    static OP: Op = Op {
        name: "outside_square",
        about: "every element times itself",
        inputs: &[Input::activation("x", &["R", "N"])],
        outputs: &[Output::out("y", &["R", "N"])],
        ..Op::PLAIN
    };
    static ENTRY: Entry = Entry::new("outside_square", |_, _| Err(Error::Unavailable("on a device alone".into())))
        .on_device(
            |device, args| {
                let (x, y) = (args.input("x"), args.output("y"));
                let (x, y) = (x.device::<bf16>("outside_square", "x")?, y.device::<f32>("outside_square", "y")?);
                let arguments = device::Arguments::new().buffer(x).buffer(y).long(x.len());
                let (build, grid) = (Build::of::<bf16, f32>("outside_square"), [x.len().div_ceil(2048), 1, 1]);
                // SAFETY: the form says that both have as many elements as the kernel is told.
                unsafe { device.launch(build, "outside_square", grid, 256, 0, &arguments) }
            },
            &SQUARE,
        );
    register(&OP, &ENTRY).map_err(|e| e.to_string())?;
    let device = Device::new(Box::new(Emulator::new(&[], false)?), usize::MAX, usize::MAX);
    let host: Vec<bf16> = (0..3 * 1001).map(|i| bf16::from_f32(i as f32 / 8.0 - 100.0)).collect();
    let x = Backend::upload(&device, TensorRef::new(&host, &[3, 1001])?)?;
    let mut y = Backend::empty(&device, samebits_ops::DType::Fp32, &[3, 1001])?;
    device.call("outside_square", Attributes::new(), &[("x", x.view())], vec![("y", y.view_mut())])?;
    let found = Backend::download(&device, y.view())?;
    let expected: Vec<f32> = host.iter().map(|x| x.to_f32() * x.to_f32()).collect();
    assert_eq!(found.as_slice::<f32>(), Some(&expected[..]));
    assert_eq!(device.ledger().count(Counter::Launches), 1);
    assert!(device.ledger().kernels().contains(&"outside_square"));
    Ok(())
}

/// Types of inputs and outputs that all shapes run with: every type on either side, and with SAMEBITS_CUDA=all, as in
/// ci/nightly, those that repeat both sides of another pair as well.
fn types() -> Vec<[DType; 2]> {
    let all = std::env::var("SAMEBITS_CUDA").is_ok_and(|which| which == "all");
    let repeated = [[DType::Bf16, DType::Bf16], [DType::Fp32, DType::Fp32]].into_iter().filter(|_| all);
    [[DType::Bf16, DType::Fp32], [DType::Fp16, DType::Fp16], [DType::Fp32, DType::Bf16]]
        .into_iter()
        .chain(repeated)
        .collect()
}

type Make = fn(DType, DType) -> Vec<Case>;

/// Where ragged shapes come from: [`SHAPES`], and the ops of rows that it does not name.
fn named_shapes() -> Vec<&'static str> {
    let by_form = OPS.iter().filter(|op| op.is_of_rows() && !SHAPES.iter().any(|(name, _)| *name == op.name));
    SHAPES.iter().map(|(name, _)| *name).chain(by_form.map(|op| op.name)).collect()
}

fn shapes(name: &str, dtype: DType, out: DType) -> Vec<Case> {
    match SHAPES.iter().find(|(known, _)| *known == name) {
        Some((_, make)) => make(dtype, out),
        None => by_form(samebits_schema::find(name).expect("shapes are named after ops"), dtype, out),
    }
}

/// Whoever adds an op that runs on a device adds shapes for it.
fn every_op_has_shapes() -> Result<(), Failed> {
    let cases = named_shapes().into_iter().flat_map(|name| shapes(name, DType::Bf16, DType::Bf16));
    let known: BTreeSet<String> = cases.map(|case| case.op).collect();
    let of_device = OPS.iter().filter(|op| !op.needs_more()).map(|op| op.name);
    let missing = of_device.filter(|name| !known.contains(*name));
    match missing.collect::<Vec<_>>().as_slice() {
        [] => Ok(()),
        missing => Err(format!("SHAPES has nothing of {missing:?}").into()),
    }
}

/// Ragged shapes: lengths around lanes, vectors, tiles, segments, blocks of keys.
const SHAPES: &[(&str, Make)] = &[
    ("add", |dtype, out| elementwise("add", "a", "b", dtype, out)),
    ("mul", |dtype, out| elementwise("mul", "a", "b", dtype, out)),
    ("silu_mul", |dtype, out| elementwise("silu_mul", "gate", "up", dtype, out)),
    ("clamped_silu_mul", |dtype, out| clamped(&[], dtype, out)),
    ("clamped_silu_mul_backward", |dtype, out| clamped(&["dy"], dtype, out)),
    ("gelu_mul", |dtype, out| elementwise("gelu_mul", "gate", "up", dtype, out)),
    ("sigmoid_mul", |dtype, out| gated_rows(&["x"], dtype, out)),
    ("sigmoid_mul_backward", |dtype, out| gated_rows(&["x", "dy"], dtype, out)),
    ("activate", |dtype, out| activations("activate", &["x"], dtype, out)),
    ("activate_backward", |dtype, out| activations("activate_backward", &["x", "dy"], dtype, out)),
    ("softcap", |dtype, out| pointwise("softcap", "cap", ["30", "0.37"], dtype, out)),
    ("scale", |dtype, out| pointwise("scale", "factor", ["-1.7", "55.42562584220407"], dtype, out)),
    ("rope", |dtype, out| rotated("rope", dtype, out)),
    ("rope_backward", |dtype, out| rotated("rope_backward", dtype, out)),
    ("norm_rope", |dtype, out| rotated("norm_rope", dtype, out)),
    ("norm_rope_backward", |dtype, out| rotated("norm_rope_backward", dtype, out)),
    ("token_sum", |dtype, _| token_sums("token_sum", &["x"], dtype)),
    ("rms_norm_dw", |dtype, _| token_sums("rms_norm_dw", &["x", "dy"], dtype)),
    ("layer_norm_dw", |dtype, _| token_sums("layer_norm_dw", &["x", "dy"], dtype)),
    ("norm_rope_dw", norm_rope_dws),
    ("embedding_dw", |dtype, _| {
        let of = |(dim, mask): (usize, bool)| {
            let make = Maker::new("embedding_dw", dtype, DType::Fp32).float("dy", &[40, dim], 1.0).special("dy", dim);
            let tokens: Vec<i32> = (0..40).map(|t| t * t % 7).collect();
            let carry: Vec<f32> = (0..9 * dim).map(|i| i as f32 * 0.37 - 5.0).collect();
            let make = make.ints("tokens", &[40], &tokens).fp32_of("carry", &[9, dim], &carry);
            if mask { make.ints("mask", &[40], &counted(40)).case() } else { make.case() }
        };
        [(1, false), (8, true), (13, false), (300, true), (1100, false)].map(of).to_vec()
    }),
    ("fold", |dtype, out| {
        let of = |(rows, n): (usize, usize)| {
            Maker::new("fold", dtype, out).float("x", &[rows, n], 1.0).special("x", n).case()
        };
        [(1, 5), (2, 130), (8, 1), (64, 129), (256, 40)].map(of).to_vec()
    }),
    ("embedding", |dtype, out| {
        let of = |dim: usize| {
            let make = Maker::new("embedding", dtype, out);
            make.float("w", &[13, dim], 1.0).ints("tokens", &[5], &[12, 0, 3, 3, 7]).case()
        };
        [1, 8, 13, 64, 1100].map(of).to_vec()
    }),
    ("group_norm", |dtype, out| groups_of_channels("group_norm", &["x"], dtype, out)),
    ("group_norm_backward", |dtype, out| groups_of_channels("group_norm_backward", &["x", "dy"], dtype, out)),
    ("conv", |dtype, out| windows_on_images("conv", dtype, out)),
    ("conv_dx", |dtype, out| windows_on_images("conv_dx", dtype, out)),
    ("conv_dw", |dtype, _| windows_on_images("conv_dw", dtype, DType::Fp32)),
    ("causal_conv1d", convolutions),
    ("causal_conv1d_backward", convolutions_back),
    ("causal_conv1d_dw", |dtype, _| convolution_sums(dtype)),
    ("ssd_scan", |dtype, out| scans("ssd_scan", dtype, out)),
    ("ssd_scan_backward", |dtype, out| scans("ssd_scan_backward", dtype, out)),
    ("selective_scan", |dtype, out| selective_scans("selective_scan", dtype, out)),
    ("selective_scan_backward", |dtype, out| selective_scans("selective_scan_backward", dtype, out)),
    ("wkv7", |dtype, out| recurrences("wkv7", dtype, out)),
    ("wkv7_backward", |dtype, out| recurrences("wkv7_backward", dtype, out)),
    ("gated_delta_rule", |dtype, out| delta_rules("gated_delta_rule", dtype, out)),
    ("gated_delta_rule_backward", |dtype, out| delta_rules("gated_delta_rule_backward", dtype, out)),
    ("argmax", |dtype, out| {
        let of = |n: usize| Maker::new("argmax", dtype, out).float("x", &[3, n], 1.0).special("x", n).case();
        [1, 5, 256, 2049, 4096].map(of).to_vec()
    }),
    ("topk", |dtype, out| {
        let mut cases = Vec::new();
        for (n, k) in [(1, 1), (5, 3), (256, 256), (300, 17), (2049, 500), (7, 300)] {
            let make = || Maker::new("topk", dtype, out).float("x", &[6, n], 2.0).special("x", n);
            cases.push(make().param("k", &k.to_string()).case());
            let counts = [n, n / 2, n - n / 3, n.min(k), 1, 0].map(|count| count as i32);
            cases.push(make().param("k", &k.to_string()).ints("count", &[6], &counts).case());
        }
        cases
    }),
    ("penalize", |dtype, out| {
        let of = |[n, s]: [usize; 2]| {
            let make = Maker::new("penalize", dtype, out).float("logits", &[6, n], 2.0).special("logits", n);
            let tokens: Vec<i32> = (0..s).map(|i| (i * i % 7 * 31 % n) as i32).collect();
            let [half, whole] = [s as i32 / 2, s as i32];
            let make = make.ints("tokens", &[s], &tokens).ints("begin", &[6], &[0, 0, 1.min(whole), half, whole, 0]);
            let make = make.ints("prompt_end", &[6], &[half, half, 0, whole, 0, whole - whole / 3]);
            let make = make.ints("end", &[6], &[whole, half + whole / 3, whole, whole, half, whole]);
            let make = make.fp32("repetition", &[1.3, 1.0, 0.7, 1.1, 2.0, 1.5]).fp32("frequency", &spread(6, 7));
            make.fp32("presence", &spread(6, 8))
        };
        let biased = |[n, s]: [usize; 2]| of([n, s]).fp32_of("bias", &[6, n], &spread(6 * n, 9)).case();
        let shapes = [[1, 1], [5, 9], [300, 600], [4096, 257], [4099, 30]];
        shapes.into_iter().flat_map(|shape| [of(shape).case(), biased(shape)]).collect()
    }),
    ("truncate", |dtype, out| {
        let of = |n: usize| {
            let make = Maker::new("truncate", dtype, out).float("x", &[12, n], 6.0).special("x", n);
            let make = make.fp32("scale", &[1.0, 0.7, 1.0, 1.3, 1.0, 1e-3, 1.0, 2.0, 0.5, 1.0, 1.0, 0.25]);
            let make = make.ints("top_k", &[12], &[0, 0, 3, 0, 7, 0, 4, 0, 0, 20, 0, 6]);
            let make = make.fp32("top_p", &[1.0, 0.9, 1.0, 0.6, 0.5, 0.8, 1.0, 0.0, 0.95, 0.7, 1.0, f32::NAN]);
            make.fp32("min_p", &[0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.02, 0.0, 0.3, 9.0]).case()
        };
        [1, 5, 256, 300, 2049].map(of).to_vec()
    }),
    ("draw", |dtype, out| {
        let of = |n: usize| {
            let bits: Vec<i32> =
                (0..24).map(|i: i32| if i < 20 { i.wrapping_mul(-1_640_531_527) } else { -(i / 22) }).collect();
            let make = Maker::new("draw", dtype, out).float("x", &[12, n], 6.0).special("x", n);
            make.ints("bits", &[12, 2], &bits).case()
        };
        [1, 5, 256, 300, 2049].map(of).to_vec()
    }),
    ("index_score", |dtype, out| {
        let of = |[t, h, d, s]: [usize; 4]| {
            let make = Maker::new("index_score", dtype, out).float("q", &[t, h, d], 2.0).special("q", h * d);
            let make = make.float("k", &[s, d], 2.0).fp32_of("weight", &[t, h], &spread(t * h, 5));
            make.param("scale", "0.3").case()
        };
        [[1, 1, 1, 1], [6, 3, 17, 5], [2, 1, 8, 128], [3, 8, 5, 129], [1, 5, 33, 300]].map(of).to_vec()
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
    ("softmax_backward", |dtype, out| {
        let of = |n: usize, rows: usize| {
            let make =
                Maker::new("softmax_backward", dtype, out).float("x", &[rows, n], 3.0).float("dy", &[rows, n], 2.0);
            // One row that is NaN through x alone, one through dy alone, one where nothing is.
            make.special("x", n).set("dy", (rows - 1) * n, f32::INFINITY)
        };
        let mut cases: Vec<Case> = [1, 33, 128, 129, 2056, 5000].map(|n| of(n, 7).case()).to_vec();
        // Products that underflow to -0 in every lane but the one that is left out.
        for n in [2048, 2047] {
            let make = Maker::new("softmax_backward", dtype, out).float("x", &[2, n], 0.0).float("dy", &[2, n], 0.0);
            let least = [-1e-45, -1e-40, -6e-8]
                [[DType::Fp32, DType::Bf16, DType::Fp16].iter().position(|d| *d == dtype).unwrap_or(0)];
            cases.push((0..2 * n - 8).fold(make, |make, i| make.set("dy", i, least)).case());
        }
        cases
    }),
    ("logprob_backward", |dtype, out| {
        let mut cases = Vec::new();
        for n in [1, 7, 8, 129, 2047, 2048, 2057, 5000] {
            for (temperature, spread) in [("1", 3.0), ("0.7", 3.0), ("1.3", 200.0)] {
                let make = || Maker::new("logprob_backward", dtype, out).float("logits", &[7, n], spread);
                let make = || make().fp32("lse", &[0.0, 2.5, 9.0, -3.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
                let make = || make().fp32("dlogprob", &[1.0, -0.3, 0.0, f32::INFINITY, 2.0, 1e-39, -4.0]);
                let make = || make().ints("target", &[7], &[0, n as i32 - 1, -1, -100, 0, 0, n as i32 / 2]);
                let make = || make().param("temperature", temperature);
                cases.push(make().case());
                let dlse = [0.5, -0.0, f32::NAN, 3.0, 0.0, -1e38, f32::NEG_INFINITY];
                cases.push(make().special("logits", n).fp32("dlse", &dlse).case());
            }
        }
        cases
    }),
    ("entropy", |dtype, out| {
        let mut cases = Vec::new();
        for n in [1, 16, 129, 1000, 2048, 9000, 16384, 33001] {
            for (temperature, spread) in [("1", 3.0), ("0.7", 3.0), ("1", 60.0), ("1", 3.0e4)] {
                let make = Maker::new("entropy", dtype, out).float("logits", &[3, n], spread);
                cases.push(make.param("temperature", temperature).case());
            }
            cases.push(Maker::new("entropy", dtype, out).float("logits", &[7, n], 3.0).special("logits", n).case());
        }
        cases
    }),
    ("entropy_backward", |dtype, out| {
        let mut cases = Vec::new();
        for n in [1, 7, 8, 129, 2047, 2048, 2057, 5000] {
            for (temperature, spread) in [("1", 3.0), ("0.7", 3.0), ("1.3", 200.0)] {
                let make = || Maker::new("entropy_backward", dtype, out).float("logits", &[7, n], spread);
                let make = || make().fp32("lse", &[0.0, 2.5, 9.0, -3.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
                let make = || make().fp32("entropy", &[0.0, 2.0, 5.5, f32::NAN, 1.0, 1e-39, f32::INFINITY]);
                let make = || make().fp32("dentropy", &[1.0, -0.3, 0.0, f32::INFINITY, 2.0, 1e-39, -4.0]);
                let make = || make().param("temperature", temperature);
                cases.push(make().case());
                let dlse = [0.5, -0.0, f32::NAN, 3.0, 0.0, -1e38, f32::NEG_INFINITY];
                cases.push(make().special("logits", n).fp32("dlse", &dlse).case());
            }
        }
        cases
    }),
    ("linear_logprob", |dtype, out| {
        let of = |(m, v, k): (usize, usize, usize)| {
            let target: Vec<i32> = (0..m as i32).map(|i| i * 7 % (v as i32 + 1) - 1).collect();
            let make = Maker::new("linear_logprob", dtype, out).float("x", &[m, k], 1.0).float("w", &[v, k], 1.0);
            make.ints("target", &[m], &target).case()
        };
        let mut cases = [(1, 40, 64), (5, 300, 33), (3, 1100, 128), (2, 17000, 8)].map(of).to_vec();
        // Tiles of 16 columns, which go through every segment; and logits so far apart that rows are summed again.
        for (case, budget) in
            [of((3, 1100, 24)), of((2, 130, 8)), wide_logits(dtype, out)].into_iter().zip([17000, 8424, 17000])
        {
            cases.push(Case { config: Config { budget: Some(budget), ..Config::default() }, ..case });
        }
        cases.push(wide_logits(dtype, out));
        cases
    }),
    ("linear_logprob_backward", logprob_gradients),
    ("route", routes),
    ("route_backward", route_gradients),
    ("combine", combines),
    ("combine_backward", combine_gradients),
    ("nll", |_, _| losses("nll")),
    ("policy_loss", |_, _| losses("policy_loss")),
    ("batch_loss", |_, _| {
        let of = |(count, groups): (usize, &str)| {
            let make = Maker::new("batch_loss", DType::Fp32, DType::Fp32).fp32("per_sequence", &spread(count, 1));
            make.param("groups", groups).param("denominator", "7").case()
        };
        [(1, "1"), (5, "4"), (300, "1"), (300, "16"), (3000, "1024"), (100, "512")].map(of).to_vec()
    }),
    ("group_advantage", |_, _| {
        let of = |(prompts, samples): (usize, usize)| {
            let mut reward = spread(prompts * samples, 2);
            reward[0] = f32::NAN;
            let make = Maker::new("group_advantage", DType::Fp32, DType::Fp32);
            let make = make.fp32_of("reward", &[prompts, samples], &reward);
            make.param("divide_by", if samples % 2 == 0 { "one" } else { "deviation" }).case()
        };
        [(1, 1), (3, 8), (130, 5), (2, 300)].map(of).to_vec()
    }),
    ("square_sum", |_, _| {
        let of = |(rows, n): (usize, usize)| {
            let mut x = spread(rows * n, 3);
            x[n / 2] = f32::INFINITY;
            Maker::new("square_sum", DType::Fp32, DType::Fp32).fp32_of("x", &[rows, n], &x).case()
        };
        [(1, 1), (5, 33), (3, 256), (2, 4099)].map(of).to_vec()
    }),
    ("clip_factor", |_, _| {
        let of = |(count, most): (usize, &str)| {
            let sums: Vec<f32> = spread(count, 4).into_iter().map(f32::abs).collect();
            Maker::new("clip_factor", DType::Fp32, DType::Fp32).fp32("sum", &sums).param("max_norm", most).case()
        };
        [(1, "100"), (33, "1"), (2100, "0.3")].map(of).to_vec()
    }),
    ("adamw", |_, out| {
        let of = |(n, factor): (usize, bool)| {
            let mut make =
                Maker::new("adamw", DType::Fp32, out).param("step", "5").param("lr", "0.1").param("beta2", "0.3");
            for (salt, name) in ["w", "m", "v", "g"].into_iter().enumerate() {
                let mut values = spread(n, salt);
                if name == "v" {
                    values.iter_mut().for_each(|v| *v = v.abs());
                } else {
                    values[n / 2] = [f32::NAN, f32::INFINITY, 0.0, -0.0][salt];
                }
                make = make.fp32(name, &values);
            }
            if factor { make.fp32("factor", &[0.37]).case() } else { make.case() }
        };
        [(1, false), (8, true), (13, false), (2049, true)].map(of).to_vec()
    }),
    ("gemm_tiles", |dtype, out| {
        let mut shapes = vec![(17, 5, 33), (65, 70, 129), (20, 130, 300), (33, 1, 1), (64, 64, 16), (18, 9, 0)];
        // More than 64 rows and 128 tiles of 128: the large tiles, at the smallest K that has two steps.
        shapes.push((129, 8200, 17));
        let mut cases: Vec<Case> = shapes.into_iter().flat_map(|shape| products(shape, dtype, out)).collect();
        // Products that underflow to -0 in each of the eight segments, the last of which is one short of its 16: -0.
        if dtype != DType::Fp16 {
            let make = Maker::new("gemm", dtype, out).float("x", &[17, 127], 0.0).float("w", &[5, 127], 0.0);
            cases.push((0..127).fold(make, |make, k| make.set("x", k, -1e-30).set("w", k, 1e-30)).case());
        }
        cases
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
    ("gemm_dx", |dtype, out| {
        // Rows, outputs and terms: w in vectors and one by one, parts, and the large tiles.
        let mut shapes = vec![(17, 5, 33), (65, 72, 129), (20, 130, 300), (33, 1, 1), (64, 64, 16), (18, 9, 0)];
        shapes.extend([(3, 70, 256), (129, 8200, 17)]);
        let of = |shape| products_of("gemm_dx", shape, dtype, out);
        let mut cases: Vec<Case> = shapes.into_iter().flat_map(of).collect();
        // As for gemm, of a sum that ends in the first half of a step.
        if dtype != DType::Fp16 {
            let make = Maker::new("gemm_dx", dtype, out).float("dy", &[17, 117], 0.0).float("w", &[117, 5], 0.0);
            let make = (0..117).fold(make, |make, n| make.set("dy", n, -1e-30).set("w", 5 * n, 1e-30));
            cases.push(make.case());
        }
        cases
    }),
    ("gemm_dw", |dtype, _| gemm_dws(dtype)),
    ("attention", attentions),
    ("attention_backward", attention_gradients),
];

/// Tokens, rows and columns: in vectors and one by one, around steps of 16 tokens, and the large tiles; masks, and carries of
/// -0 that no token changes.
fn gemm_dws(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (number, (tokens, n, k)) in
        [(1, 1, 1), (33, 5, 17), (17, 65, 72), (40, 64, 8), (18, 129, 8200), (20, 13, 9)].into_iter().enumerate()
    {
        let make = Maker::new("gemm_dw", dtype, DType::Fp32).float("x", &[tokens, k], 1.0);
        let make = make.float("dy", &[tokens, n], 1.0).special("dy", n);
        if number % 2 == 0 {
            cases.push(make.case());
            continue;
        }
        let carry: Vec<f32> = (0..n * k).map(|i| i as f32 * 0.37 - 5.0).collect();
        cases.push(make.ints("mask", &[tokens], &counted(tokens)).fp32_of("carry", &[n, k], &carry).case());
        let make =
            Maker::new("gemm_dw", dtype, DType::Fp32).float("x", &[tokens, k], 1.0).float("dy", &[tokens, n], 1.0);
        let make = make.ints("mask", &[tokens], &vec![0; tokens]).fp32_of("carry", &[n, k], &vec![-0.0; n * k]);
        cases.push(make.case());
    }
    if dtype == DType::Fp32 {
        let make = Maker::new("gemm_dw", dtype, DType::Fp32).float("x", &[19, 9], 1.0).float("dy", &[19, 6], 1.0);
        cases.push(make.param("tf32", "enabled").case());
    }
    cases
}

/// A mask that counts two of three rows, and some twice over.
fn counted(rows: usize) -> Vec<i32> {
    (0..rows as i32).map(|row| (row * 5 + 1) % 3 * -2).collect()
}

/// Fewer rows than chains and more, of widths around vectors and blocks, with a mask, a carry and an offset, and without.
fn token_sums(op: &'static str, inputs: &[&'static str], dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, n) in [(1, 1), (5, 33), (70, 257), (150, 8), (3, 2049), (66, 4104)] {
        let make = || {
            let make = Maker::new(op, dtype, DType::Fp32);
            inputs.iter().fold(make, |make, input| make.float(input, &[rows, n], 1.0)).special("x", n)
        };
        cases.push(make().case());
        let carry: Vec<f32> = (0..64 * n).map(|i| i as f32 * 0.37 - 5.0).collect();
        let make = make().ints("mask", &[rows], &counted(rows)).fp32_of("carry", &[64, n], &carry);
        cases.push(make.param("token_offset", "1000003").case());
    }
    cases.into_iter().map(|case| hf(case, op)).collect()
}

/// The case with the other rounding, where it has a carry and its op has the choice.
fn hf(mut case: Case, op: &str) -> Case {
    let choice = samebits_schema::find(op).and_then(|op| op.attribute("rounding"));
    if choice.is_some() && case.inputs.contains_key("carry") {
        case.params.insert("rounding".into(), "hf".into());
    }
    case
}

fn norm_rope_dws(dtype: DType, _: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (tokens, heads, dim) in [(3, 2, 2), (40, 3, 10), (5, 65, 64), (9, 2, 300)] {
        let make = || {
            let make = Maker::new("norm_rope_dw", dtype, DType::Fp32).float("x", &[tokens, heads, dim], 1.0);
            let positions: Vec<i32> = (0..tokens as i32).map(|t| t * t * 977 % 70_001).collect();
            make.float("dy", &[tokens, heads, dim], 1.0).special("dy", dim).ints("pos", &[tokens], &positions)
        };
        cases.push(make().case());
        let carry: Vec<f32> = (0..64 * dim).map(|i| i as f32 * 0.37 - 5.0).collect();
        let make = make().ints("mask", &[tokens], &counted(tokens)).fp32_of("carry", &[64, dim], &carry);
        let case = make.param("token_offset", "77").param("pairing", "interleaved").case();
        cases.push(hf(case, "norm_rope_dw"));
    }
    cases
}

/// Sequences, rows, channels and taps: fewer rows than a state has, channels around a block, one tap.
const CONVOLUTIONS: [[usize; 4]; 6] =
    [[1, 1, 1, 1], [2, 2, 5, 4], [3, 9, 33, 3], [2, 4, 300, 2], [17, 1, 64, 4], [2, 20, 8, 8]];

fn convolutions(dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for [b, t, c, k] in CONVOLUTIONS {
        let make = || Maker::new("causal_conv1d", dtype, out).float("x", &[b, t, c], 1.0).float("w", &[c, k], 1.0);
        cases.push(make().case());
        let lengths: Vec<i32> = (0..b).map(|i| (t - (3 * i) % (t + 1)) as i32).collect();
        let make = make().special("x", c).float("bias", &[c], 1.0).ints("len", &[b], &lengths);
        cases.push(if k > 1 {
            make.fp32_of("state", &[b, k - 1, c], &spread(b * (k - 1) * c, 7)).case()
        } else {
            make.case()
        });
    }
    cases
}

fn convolutions_back(dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for [b, t, c, k] in CONVOLUTIONS {
        let make =
            || Maker::new("causal_conv1d_backward", dtype, out).float("dy", &[b, t, c], 1.0).float("w", &[c, k], 1.0);
        cases.push(make().case());
        let lengths: Vec<i32> = (0..b).map(|i| (t - (3 * i) % (t + 1)) as i32).collect();
        let make = make().special("dy", c).ints("len", &[b], &lengths);
        cases.push(if k > 1 {
            make.fp32_of("dnext", &[b, k - 1, c], &spread(b * (k - 1) * c, 8)).case()
        } else {
            make.case()
        });
    }
    cases
}

/// Images, channels and places; groups around the threads of a block.
fn groups_of_channels(op: &str, images: &[&str], dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (shape, groups) in
        [([1, 1, 1], "1"), ([2, 6, 7], "3"), ([1, 4, 64], "1"), ([2, 4, 130], "2"), ([1, 300, 3], "2")]
    {
        let make = || images.iter().fold(Maker::new(op, dtype, out), |make, name| make.float(name, &shape, 1.0));
        cases.push(make().param("groups", groups).case());
        let make = make().float("w", &shape[1..2], 1.0).float("bias", &shape[1..2], 1.0).special("x", shape[2]);
        cases.push(make.param("groups", groups).param("silu", "1").param("eps", "0.25").case());
    }
    cases
}

/// Windows of one, two and three axes: padded on either side, strides, taps apart, groups, one tap, many channels.
fn windows_on_images(op: &str, dtype: DType, out: DType) -> Vec<Case> {
    type Form = ([usize; 4], [usize; 3], [usize; 3], [usize; 3], &'static [(&'static str, &'static str)]);
    let pads = [("pad_top", "1"), ("pad_bottom", "1"), ("pad_left", "1"), ("pad_right", "1")];
    // Images, groups, channels of a group of x and of y; places of x, taps, places of y.
    let forms: [Form; 6] = [
        ([1, 1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1], &[]),
        ([2, 1, 3, 5], [1, 5, 6], [1, 3, 3], [1, 5, 6], &[]),
        ([2, 2, 2, 3], [1, 7, 6], [1, 3, 2], [1, 3, 3], &[("stride_h", "2"), ("stride_w", "2"), ("groups", "2")]),
        ([1, 1, 2, 2], [4, 3, 3], [3, 1, 2], [4, 3, 2], &[("pad_front", "2")]),
        ([3, 1, 40, 2], [1, 1, 9], [1, 1, 3], [1, 1, 6], &[("dilation_w", "3"), ("pad_right", "3")]),
        ([65, 1, 5, 3], [1, 1, 2], [1, 1, 1], [1, 1, 2], &[]),
    ];
    let mut cases = Vec::new();
    for ([batch, groups, of_x, of_y], places, taps, outputs, params) in forms {
        let of = |first, second, [d, h, w]: [usize; 3]| [first, second, d, h, w];
        let (x, y) = (of(batch, groups * of_x, places), of(batch, groups * of_y, outputs));
        let (w, size) = (of(groups * of_y, of_x, taps), groups * of_y * of_x * taps.iter().product::<usize>());
        let make = || {
            let make = Maker::new(op, dtype, out);
            let make = match op {
                "conv" => make.float("x", &x, 1.0).float("w", &w, 1.0),
                "conv_dx" => make.float("dy", &y, 1.0).float("w", &w, 1.0),
                _ => make.float("x", &x, 1.0).float("dy", &y, 1.0).fp32_of("carry", &w, &spread(size, 3)),
            };
            let pads = if places == outputs && taps[1] == 3 { &pads[..] } else { &[] };
            params.iter().chain(pads).fold(make, |make, (name, value)| make.param(name, value))
        };
        cases.push(make().case());
        cases.push(match op {
            "conv" => make().special("x", places[2]).float("bias", &w[..1], 1.0).case(),
            "conv_dx" => make().special("dy", outputs[2]).float("offset", &x[1..2], 1.0).case(),
            _ => make().special("dy", outputs[2]).ints("mask", &[batch], &counted(batch)).case(),
        });
    }
    cases
}

/// Sequences, positions, heads, elements of a head, groups and elements of a state: around warps and their lanes, the positions
/// whose steps are made together, and the stretches of a reverse pass.
const SCANS: [[usize; 6]; 7] = [
    [1, 1, 1, 1, 1, 1],
    [2, 5, 4, 3, 2, 17],
    [1, 35, 2, 9, 1, 8],
    [3, 2, 3, 8, 3, 256],
    [1, 3, 2, 2, 1, 301],
    [5, 1, 2, 17, 1, 64],
    [2, 10, 6, 1, 2, 33],
];

fn scans(op: &str, dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for [b, t, h, p, g, n] in SCANS {
        let of_state = [b, h, p, n];
        let size = of_state.iter().product();
        let make = || {
            let make = Maker::new(op, dtype, out).float("x", &[b, t, h, p], 1.0).float("dt", &[b, t, h], 2.0);
            let make = make.float("a_log", &[h], 1.0).float("b", &[b, t, g, n], 1.0).float("c", &[b, t, g, n], 1.0);
            if op == "ssd_scan" { make } else { make.float("dy", &[b, t, h, p], 1.0) }
        };
        cases.push(make().case());
        let lengths: Vec<i32> = (0..b).map(|i| (t - (3 * i) % (t + 1)) as i32).collect();
        let make = make().float("d", &[h], 1.0).float("dt_bias", &[h], 1.0).ints("len", &[b], &lengths);
        let make = make.fp32_of("state", &of_state, &spread(size, 7)).special("dt", h).special("x", p);
        let make = make.param("dt_min", "0.25").param("dt_max", "1.5");
        cases.push(match op {
            "ssd_scan" => make.case(),
            _ => make.fp32_of("dnext", &of_state, &spread(size, 8)).case(),
        });
    }
    cases
}

/// Sequences, positions, channels and elements of a state: around the blocks of channels and the threads of a block, what stays in
/// registers, and the stretches of a reverse pass.
const SELECTIVE_SCANS: [[usize; 4]; 7] =
    [[1, 1, 1, 1], [2, 5, 3, 17], [1, 10, 64, 2], [1, 3, 65, 16], [3, 2, 130, 1], [1, 17, 2, 5], [1, 2, 1, 33]];

fn selective_scans(op: &str, dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for [b, t, c, n] in SELECTIVE_SCANS {
        let of_state = [b, c, n];
        let size = of_state.iter().product();
        let make = || {
            let make = Maker::new(op, dtype, out).float("x", &[b, t, c], 1.0).float("dt", &[b, t, c], 2.0);
            let make = make.float("a_log", &[c, n], 1.0).float("b", &[b, t, n], 1.0).float("c", &[b, t, n], 1.0);
            if op == "selective_scan" { make } else { make.float("dy", &[b, t, c], 1.0) }
        };
        cases.push(make().case());
        let lengths: Vec<i32> = (0..b).map(|i| (t - (3 * i) % (t + 1)) as i32).collect();
        let make = make().float("d", &[c], 1.0).float("dt_bias", &[c], 1.0).ints("len", &[b], &lengths);
        let make = make.fp32_of("state", &of_state, &spread(size, 7)).special("dt", c).special("x", c);
        cases.push(match op {
            "selective_scan" => make.case(),
            _ => make.fp32_of("dnext", &of_state, &spread(size, 8)).case(),
        });
    }
    cases
}

/// Sequences, tokens, heads, elements of a head: around segments, columns of a block, what stays in registers, and tokens behind
/// which a state is kept.
const RECURRENCES: [[usize; 4]; 7] =
    [[1, 35, 1, 3], [1, 1, 1, 1], [2, 4, 2, 17], [1, 3, 1, 33], [1, 2, 1, 129], [1, 1, 1, 257], [3, 2, 1, 5]];

fn recurrences(op: &str, dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for [b, t, h, d] in RECURRENCES {
        let (of_tokens, of_state, size) = ([b, t, h, d], [b, h, d, d], b * h * d * d);
        let make = || {
            let make = Maker::new(op, dtype, out).float("r", &of_tokens, 1.0).float("w", &of_tokens, 1.0);
            let make = make.float("k", &of_tokens, 0.3).float("v", &of_tokens, 1.0);
            let make = make.float("a", &of_tokens, 0.2).float("b", &of_tokens, 0.2);
            if op == "wkv7" { make } else { make.float("dy", &of_tokens, 1.0) }
        };
        cases.push(make().case());
        let lengths: Vec<i32> = (0..b).map(|i| (t - (2 * i) % (t + 1)) as i32).collect();
        let make = make().special("v", h * d).ints("len", &[b], &lengths);
        let make = make.fp32_of("state", &of_state, &spread(size, 5));
        cases.push(match op {
            "wkv7" => make.case(),
            _ => make.fp32_of("dnext", &of_state, &spread(size, 8)).case(),
        });
    }
    cases
}

/// Sequences, tokens, key heads, value heads, elements of a key and of a value, decays: keys around segments and what stays in
/// registers, columns around those of a block.
const DELTA_RULES: [[usize; 7]; 8] = [
    [1, 35, 1, 1, 3, 2, 1],
    [1, 1, 1, 1, 1, 1, 1],
    [2, 3, 1, 2, 5, 7, 1],
    [2, 4, 2, 4, 17, 33, 17],
    [1, 3, 1, 1, 128, 4, 1],
    [1, 3, 1, 1, 129, 5, 129],
    [1, 2, 1, 1, 256, 3, 1],
    [1, 2, 1, 2, 257, 3, 1],
];

fn delta_rules(op: &'static str, dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for [b, t, hk, hv, d, e, g] in DELTA_RULES {
        let make = || {
            let make = Maker::new(op, dtype, out).float("q", &[b, t, hk, d], 1.0);
            let make = make.float("k", &[b, t, hk, d], 0.3).float("v", &[b, t, hv, e], 1.0);
            let decays: Vec<f32> = spread(b * t * hv * g, 3).iter().map(|g| -g.abs()).collect();
            let make = make.fp32_of("g", &[b, t, hv, g], &decays);
            let make = make.fp32_of("beta", &[b, t, hv], &spread(b * t * hv, 4));
            if op == "gated_delta_rule" { make } else { make.float("dy", &[b, t, hv, e], 1.0) }
        };
        cases.push(make().case());
        let lengths: Vec<i32> = (0..b).map(|i| (t - (2 * i) % (t + 1)) as i32).collect();
        let state = spread(b * hv * d * e, 5);
        let make = make().special("v", hv * e).ints("len", &[b], &lengths);
        let make = make.fp32_of("a_log", &[hv], &spread(hv, 6)).fp32_of("dt_bias", &[hv, g], &spread(hv * g, 7));
        let make = make.fp32_of("state", &[b, hv, d, e], &state).param("scale", "-0.7");
        let dnext = spread(b * hv * d * e, 8);
        cases.push(match op {
            "gated_delta_rule" => make.case(),
            _ => make.fp32_of("dnext", &[b, hv, d, e], &dnext).case(),
        });
    }
    cases
}

fn convolution_sums(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for [b, t, c, k] in CONVOLUTIONS.into_iter().chain([[3, 70, 9, 4], [2, 5, 700, 4]]) {
        let (of_rows, of_sums) = ([b, t, c], [64, c, k]);
        let make = || {
            let make = Maker::new("causal_conv1d_dw", dtype, DType::Fp32).float("x", &of_rows, 1.0);
            make.float("dy", &of_rows, 1.0).fp32_of("carry", &of_sums, &vec![0.0; 64 * c * k])
        };
        cases.push(make().case());
        let make = make().special("dy", c).fp32_of("carry", &of_sums, &spread(64 * c * k, 9));
        let make = make.ints("mask", &[b, t], &counted(b * t)).param("token_offset", "1000003");
        cases.push(if k > 1 {
            make.fp32_of("state", &[b, k - 1, c], &spread(b * (k - 1) * c, 7)).case()
        } else {
            make.case()
        });
    }
    cases
}

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
    assert_eq!(cases.len(), 8);
    cases
}

fn elementwise(op: &'static str, a: &'static str, b: &'static str, dtype: DType, out: DType) -> Vec<Case> {
    let of = |n: usize| Maker::new(op, dtype, out).float(a, &[n], 40.0).float(b, &[n], 1.0).special(a, n).case();
    [0, 1, 7, 8, 9, 2047, 2048, 2057, 5000].map(of).to_vec()
}

/// Gates and ups on both sides of the limits, special values of either.
fn clamped(more: &[&'static str], dtype: DType, out: DType) -> Vec<Case> {
    let op = if more.is_empty() { "clamped_silu_mul" } else { "clamped_silu_mul_backward" };
    let mut cases = Vec::new();
    for (n, limit) in [(0, "7"), (1, "7"), (7, "0.5"), (8, "7"), (9, "1e30"), (2048, "1.5"), (2057, "7"), (5000, "3")] {
        let make =
            Maker::new(op, dtype, out).param("limit", limit).param("alpha", if n % 2 == 0 { "1.702" } else { "1" });
        let make = make.float("gate", &[n], 20.0).special("gate", n).float("up", &[n], 20.0).special("up", n / 2);
        cases.push(more.iter().fold(make, |make, name| make.float(name, &[n], 1.0)).case());
    }
    cases
}

fn pointwise(op: &'static str, param: &str, numbers: [&str; 2], dtype: DType, out: DType) -> Vec<Case> {
    let of = |n: usize, number: &str| {
        Maker::new(op, dtype, out).float("x", &[n], 40.0).special("x", n).param(param, number).case()
    };
    let mut cases: Vec<Case> = [0, 1, 7, 8, 9, 2047, 2048, 2057].map(|n| of(n, numbers[0])).to_vec();
    cases.push(of(99, numbers[1]));
    // Every kind of special value.
    let six = Maker::new(op, dtype, out).float("x", &[6, 33], 40.0).special("x", 33);
    cases.push(six.param(param, numbers[1]).case());
    cases
}

/// Every kind of activation, near 0 and beyond where it is flat.
fn activations(op: &'static str, inputs: &[&'static str], dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in ["gelu", "gelu_tanh", "relu2", "xielu"] {
        for (n, spread) in [(0, 1.0), (1, 1.0), (7, 3.0), (8, 40.0), (9, 3.0), (2047, 3.0), (2057, 9.0)] {
            let make = inputs.iter().fold(Maker::new(op, dtype, out), |make, name| make.float(name, &[n], spread));
            cases.push(make.special("x", n).param("kind", kind).case());
        }
        // Every kind of special value.
        let six = inputs.iter().fold(Maker::new(op, dtype, out), |make, name| make.float(name, &[6, 33], 3.0));
        cases.push(six.special("x", 33).param("kind", kind).case());
    }
    cases
}

/// Logits that are far apart: weights that a segment adds fall below the cut of the row.
fn wide_logits(dtype: DType, out: DType) -> Case {
    let make = Maker::new("linear_logprob", dtype, out).float("x", &[4, 16], 4.0).float("w", &[300, 16], 4.0);
    make.ints("target", &[4], &[0, 299, -1, 150]).param("temperature", "0.9").case()
}

/// Rows and vocabularies around blocks and segments, with a carry and padding or without, in the room that there is and in
/// less.
fn logprob_gradients(dtype: DType, out: DType) -> Vec<Case> {
    let sizes = [(1, 1, 3), (5, 40, 33), (33, 300, 17), (40, 1100, 24), (3, 2049, 8), (70, 130, 65)];
    let mut cases = Vec::new();
    for (number, (m, v, k)) in sizes.into_iter().enumerate() {
        let op = "linear_logprob_backward";
        let make = Maker::new(op, dtype, out).float("x", &[m, k], 1.0).float("w", &[v, k], 1.0);
        let target: Vec<i32> = (0..m as i32).map(|i| i * 7 % (v as i32 + 1) - 1).collect();
        let make = make.ints("target", &[m], &target).fp32("lse", &spread(m, 3)).fp32("dlogprob", &spread(m, 4));
        if number % 2 == 0 {
            cases.push(make.case());
            continue;
        }
        let make = make.fp32("dlse", &spread(m, 5)).ints("mask", &[m], &counted(m)).param("temperature", "0.7");
        let case = make.special("x", k).fp32_of("carry", &[v, k], &spread(v * k, 6)).case();
        for budget in [8 * k * 4 + 4000, 4 * (16 * (m + 16) + 64 * m * k)] {
            let config = Config { budget: Some(budget), ..Config::default() };
            cases.push(Case { config, ..case.clone() });
        }
        cases.push(case);
    }
    cases
}

/// Choices with groups and without, scores that tie, a bias, and rows of special values.
fn routes(dtype: DType, out: DType) -> Vec<Case> {
    type Params = &'static [(&'static str, &'static str)];
    let forms: [(usize, Params); 11] = [
        (4, &[("chosen", "2")]),
        (16, &[("chosen", "2"), ("scoring", "sparsemixer"), ("jitter", "0.3")]),
        (70, &[("chosen", "3"), ("scoring", "sparsemixer"), ("normalise", "1"), ("scale", "1.5")]),
        (70, &[("chosen", "5"), ("scoring", "sigmoid"), ("chosen_by", "logits")]),
        (8, &[("chosen", "8"), ("normalise", "1")]),
        (33, &[("chosen", "5"), ("normalise", "1"), ("scale", "2.5")]),
        (64, &[("chosen", "6"), ("groups", "8"), ("top_groups", "3"), ("scale", "16")]),
        (
            64,
            &[
                ("chosen", "8"),
                ("scoring", "sigmoid"),
                ("groups", "8"),
                ("top_groups", "4"),
                ("group_worth", "top_two"),
                ("normalise", "1"),
                ("scale", "2.5"),
            ],
        ),
        (
            40,
            &[
                ("chosen", "3"),
                ("scoring", "sigmoid"),
                ("groups", "20"),
                ("top_groups", "7"),
                ("group_worth", "top_two"),
            ],
        ),
        (160, &[("chosen", "6"), ("scoring", "sigmoid")]),
        (1, &[("chosen", "1"), ("normalise", "1")]),
    ];
    let mut cases = Vec::new();
    for (experts, params) in forms {
        for bias in [false, true] {
            let mut make =
                Maker::new("route", dtype, out).float("logits", &[9, experts], 4.0).special("logits", experts);
            // Two experts alike, which tie in every row, and two of either zero.
            for row in 6..9 {
                make = make.set("logits", row * experts + experts - 1, 0.0).set("logits", row * experts, -0.0);
                make = make.set("logits", row * experts + experts / 2, 0.0);
            }
            if bias {
                make = make.float("bias", &[experts], 0.5);
                // Experts that are named, and in the third token none.
                let chosen: usize =
                    params.iter().find(|(name, _)| *name == "chosen").map_or(1, |(_, k)| k.parse().unwrap());
                let name =
                    |i: usize| if i / chosen == 2 { -1 } else { ((i / chosen * 5 + i % chosen) % experts) as i32 };
                make = make.ints("experts", &[9, chosen], &(0..9 * chosen).map(name).collect::<Vec<_>>());
            }
            cases.push(params.iter().fold(make, |make, (name, value)| make.param(name, value)).case());
        }
    }
    cases
}

/// `count` numbers in [-2, 2) of 24 bits, others for each `salt`.
fn spread(count: usize, salt: usize) -> Vec<f32> {
    let number = |i: usize| {
        let bits = (i as u32).wrapping_mul(2_654_435_761) ^ (salt as u32).wrapping_mul(0x9E37_79B9);
        ((bits ^ bits >> 15).wrapping_mul(0x2C1B_3C6D) >> 8) as f32 / 4_194_304.0 - 2.0
    };
    (0..count).map(number).collect()
}

/// Sequences around a block, of which some tokens count, or all, or none.
fn losses(op: &'static str) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, (sequences, length)) in [(1, 1), (3, 40), (2, 256), (3, 257), (2, 1100)].into_iter().enumerate() {
        let (shape, len) = ([sequences, length], sequences * length);
        let drawn = (0..len as i32).map(|t| if i == 2 { 1 } else { t * t % 7 % 3 });
        let count: Vec<i32> = drawn.enumerate().map(|(t, c)| if sequences > 2 && t < length { 0 } else { c }).collect();
        let tokens = |salt: usize| -> Vec<f32> {
            let values = spread(len, salt).into_iter().zip(&count);
            values.map(|(v, count)| if *count == 0 { f32::NAN } else { v / 4.0 }).collect()
        };
        let mut make = Maker::new(op, DType::Fp32, DType::Fp32).ints("count", &shape, &count);
        make = make.fp32_of("logprob", &shape, &tokens(1)).param("denominator", "13");
        make = make.param("reduction", if i % 2 == 0 { "sum" } else { "mean" });
        if op == "nll" {
            cases.push(make.case());
            continue;
        }
        let make = make.fp32_of("old_logprob", &shape, &tokens(2)).fp32("advantage", &spread(sequences, 5));
        let mut plain = make.case();
        plain.name += &format!(" {shape:?}");
        for kl in ["k1", "k3"] {
            let mut case = plain.clone();
            case.inputs.insert("reference".into(), Tensor::fp32(&shape, tokens(3)));
            case.params.extend([("kl".to_string(), kl.to_string()), ("beta".into(), "0.3".into())]);
            cases.push(case);
        }
        cases.push(plain);
    }
    cases
}

fn route_gradients(dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (experts, chosen) in [(1, 1), (8, 8), (33, 5), (64, 6), (160, 8)] {
        let sparse = [("sparsemixer", "0"), ("sparsemixer", "1")].into_iter().filter(|_| chosen < 6);
        let dense = [("softmax", "0"), ("softmax", "1"), ("sigmoid", "0"), ("sigmoid", "1")];
        for (scoring, normalise) in dense.into_iter().chain(sparse) {
            let make = Maker::new("route_backward", dtype, out).float("logits", &[9, experts], 4.0);
            let rank =
                |i: usize| if i % experts * 7 % experts < chosen { (i % experts * 7 % experts) as i32 } else { -1 };
            let rank: Vec<i32> = (0..9 * experts).map(rank).collect();
            let make = make.special("logits", experts).ints("rank", &[9, experts], &rank).param("scale", "2.5");
            let make =
                make.param("chosen", &chosen.to_string()).param("scoring", scoring).param("normalise", normalise);
            let mut case = if scoring == "sparsemixer" { make.param("jitter", "0.3") } else { make }.case();
            let dweight = (0..9 * experts).map(|i| (i * 37 % 101) as f32 / 16.0 - 3.0).collect();
            case.inputs.insert("dweight".into(), Tensor::fp32(&[9, experts], dweight));
            cases.push(case);
        }
    }
    cases
}

fn combines(dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (tokens, chosen, n) in [(1, 1, 1), (3, 2, 40), (5, 6, 1031), (2, 8, 2048), (4, 0, 9)] {
        let rows = tokens * chosen + 1;
        let row: Vec<i32> = (0..tokens * chosen).map(|i| (i * 7 % rows) as i32).collect();
        let make = || {
            let make = Maker::new("combine", dtype, out).float("x", &[rows, n], 2.0);
            make.ints("row", &[tokens, chosen], &row).float("weight", &[tokens, chosen], 1.0)
        };
        cases.push(make().case());
        cases.push(make().float("shared", &[tokens, n], 1.0).case());
    }
    cases
}

fn combine_gradients(dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (tokens, chosen, more, n) in
        [(1, 1, 0, 1), (3, 2, 1, 40), (2, 3, 4, 257), (5, 6, 1, 1031), (2, 8, 0, 2048), (4, 0, 3, 9)]
    {
        let (count, rows) = (tokens * chosen, tokens * chosen + more);
        let row: Vec<i32> = (0..count).map(|i| (i * 11 % rows) as i32).collect();
        let make =
            Maker::new("combine_backward", dtype, out).float("x", &[rows, n], 2.0).float("dy", &[tokens, n], 1.0);
        cases.push(make.ints("row", &[tokens, chosen], &row).float("weight", &[tokens, chosen], 1.0).case());
    }
    // Products that underflow to -0 in each lane.
    if dtype != DType::Fp16 {
        let make = Maker::new("combine_backward", dtype, out).float("x", &[1, 300], 0.0).float("dy", &[1, 300], 0.0);
        let make = make.ints("row", &[1, 1], &[0]).float("weight", &[1, 1], 1.0);
        cases.push((0..300).fold(make, |make, i| make.set("x", i, -1e-30).set("dy", i, 1e-30)).case());
    }
    cases
}

/// Rows, gates and what a gate is for: around a thread's eight elements and a warp's 256; the op by its inputs beside gates.
fn gated_rows(inputs: &[&'static str], dtype: DType, out: DType) -> Vec<Case> {
    let op = if inputs.len() == 1 { "sigmoid_mul" } else { "sigmoid_mul_backward" };
    let of = |[rows, gates, each]: [usize; 3]| {
        let make = Maker::new(op, dtype, out).float("gate", &[rows, gates], 40.0).special("gate", gates.max(1));
        inputs.iter().fold(make, |make, name| make.float(name, &[rows, gates * each], 1.0))
    };
    let shapes = [
        [0, 1, 1],
        [1, 1, 1],
        [2, 1, 0],
        [3, 9, 1],
        [2, 1024, 1],
        [7, 293, 1],
        [3, 1, 33],
        [2, 5, 3],
        [2, 3, 8],
        [3, 7, 12],
        [2, 2, 256],
        [2, 1, 2057],
        [5, 3, 264],
    ];
    let mut cases: Vec<Case> = shapes.map(|shape| of(shape).case()).to_vec();
    // Products that underflow to -0 in each lane, and in one alone.
    if dtype != DType::Fp16 && inputs.len() == 2 {
        let least = |make: Maker, n: usize| (0..n).fold(make, |make, i| make.set("x", i, -1e-30).set("dy", i, 1e-30));
        cases.push(least(of([1, 1, 300]), 300).case());
        cases.push(least(of([1, 9, 1]), 9).case());
    }
    cases
}

/// An op of rows by its form: five rows of widths around lanes, vectors and what a warp keeps of a row, with every choice of
/// optional inputs, and with attributes left out and not.
fn by_form(op: &Op, dtype: DType, out: DType) -> Vec<Case> {
    let optional: Vec<&str> = op.inputs.iter().filter(|input| input.optional).map(|input| input.name).collect();
    let mut cases = Vec::new();
    for n in [1, 7, 8, 31, 255, 256, 257, 264, 777, 1024, 1032, 4104, 8200, 8448] {
        for choice in 0..1 << optional.len() {
            let left_out =
                |name| optional.iter().position(|optional| *optional == name).is_some_and(|i| choice >> i & 1 == 1);
            let given = op.inputs.iter().filter(|input| !left_out(input.name));
            let case = || {
                given.clone().fold(Maker::new(op.name, dtype, out), |make, input| {
                    let rows = input.axes.iter().any(|axis| ["R", REST].contains(axis));
                    let shape: &[usize] = if rows { &[5, n] } else { &[n] };
                    make.float(input.name, shape, 1.0)
                })
            };
            cases.push(case().case());
            let other = op.attributes.iter().filter_map(|attribute| match attribute.kind {
                Kind::Flag => Some((attribute.name, "1")),
                Kind::Choice(words) => words.last().map(|word| (attribute.name, *word)),
                _ => None,
            });
            let other: Vec<_> = other.collect();
            if !other.is_empty() {
                cases.push(other.iter().fold(case(), |make, (name, value)| make.param(name, value)).case());
            }
        }
    }
    cases
}

fn rotated(op: &'static str, dtype: DType, out: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for pairing in ["half", "interleaved"] {
        for (heads, dim) in [(3, 2), (2, 10), (1, 64), (2, 128), (3, 300)] {
            let input = if op == "rope_backward" { "dy" } else { "x" };
            let mut make = Maker::new(op, dtype, out).float(input, &[4, heads, dim], 1.0);
            if op.starts_with("norm_rope") {
                make = make.float("w", &[dim], 1.0);
            }
            if op == "norm_rope_backward" {
                make = make.float("dy", &[4, heads, dim], 1.0);
            }
            cases.push(make.ints("pos", &[4], &[0, 5, 1000, 70000]).param("pairing", pairing).case());
        }
    }
    cases
}

fn products((m, n, k): (usize, usize, usize), dtype: DType, out: DType) -> Vec<Case> {
    let biased = Maker::new("gemm", dtype, out).float("x", &[m, k], 1.0).float("w", &[n, k], 1.0);
    let mut cases = products_of("gemm", (m, n, k), dtype, out);
    cases.push(biased.float("bias", &[n], 1.0).case());
    cases
}

/// Products of m rows, n outputs and k terms.
fn products_of(op: &str, (m, n, k): (usize, usize, usize), dtype: DType, out: DType) -> Vec<Case> {
    let (x, w, sum) = if op == "gemm" { ("x", [n, k], "k") } else { ("dy", [k, n], "n") };
    let plain = || Maker::new(op, dtype, out).float(x, &[m, k], 1.0).float("w", &w, 1.0);
    let mut cases = vec![plain().case()];
    if dtype == DType::Fp32 {
        cases.push(plain().param("tf32", "enabled").case());
    }
    // One rank's part: the last two segments, and the first four.
    if k > 0 && k.is_multiple_of(256) {
        let [total, offset] = ["total", "offset"].map(|name| format!("{sum}_{name}"));
        cases.push(plain().param(&total, &(4 * k).to_string()).param(&offset, &(3 * k).to_string()).case());
        cases.push(plain().param(&total, &(2 * k).to_string()).case());
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
        Form { b: 2, t: 20, s: 40, heads: (2, 1), dims: (16, 16), params: &[("causal", "1"), ("chunk", "9")] },
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
        let padded = || {
            let make = make().float("k", &[b, s, hkv, d], 2.0).float("v", &[b, s, hkv, e], 1.0);
            make.ints("q_pos", &[b, t], &q_pos).ints("kv_len", &[b], &kv_len)
        };
        cases.push(padded().case());
        // Sinks, and sequences without keys.
        let of_heads: Vec<f32> = (0..hq).map(|head| [2.0, -9.5, 14.25, 0.0][head % 4]).collect();
        let sinks = || padded().fp32("sinks", &of_heads);
        cases.push(sinks().case());
        cases.push(sinks().ints("kv_len", &[b], &vec![0; b]).case());
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
    // Sinks that are no number, no term, beyond f32 as powers of two, and far above or below all scores.
    let sinks = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -3e38, 200.0, -200.0, 0.0];
    let make = Maker::new("attention", dtype, out).float("q", &[2, 2, 8, 8], 1.0).float("k", &[2, 9, 2, 8], 1.0);
    let make = make.fp32("sinks", &sinks).float("v", &[2, 9, 2, 8], 1.0).ints("q_pos", &[2, 2], &[4, 8, 0, 0]);
    cases.push(make.ints("kv_len", &[2], &[8, 0]).param("causal", "1").case());
    cases
}

fn attention_gradients(dtype: DType, out: DType) -> Vec<Case> {
    type Form = ([usize; 3], (usize, usize), (usize, usize), &'static [(&'static str, &'static str)]);
    let forms: [Form; 6] = [
        ([1, 1, 5], (1, 1), (8, 8), &[]),
        ([2, 20, 40], (2, 1), (9, 7), &[("causal", "1"), ("chunk", "9")]),
        ([2, 3, 270], (4, 2), (33, 20), &[("causal", "1"), ("window", "260")]),
        ([1, 259, 3], (2, 1), (5, 7), &[("causal", "1"), ("tf32", "enabled")]),
        ([1, 2, 9], (1, 1), (258, 3), &[("softcap", "20"), ("scale", "0.3")]),
        ([1, 2, 3], (1, 1), (0, 3), &[]),
    ];
    let mut cases = Vec::new();
    for ([b, t, s], (hq, hkv), (d, e), params) in forms {
        let kv_len: Vec<i32> = (0..b).map(|i| (s - i) as i32).collect();
        let q_pos: Vec<i32> = (0..b * t).map(|i| (s + i % t).saturating_sub(t) as i32).collect();
        let make = Maker::new("attention_backward", dtype, out).float("q", &[b, t, hq, d], 2.0);
        let make = make.float("k", &[b, s, hkv, d], 2.0).float("v", &[b, s, hkv, e], 1.0);
        let make = make.float("out", &[b, t, hq, e], 1.0).float("dout", &[b, t, hq, e], 1.0);
        let lse: Vec<f32> = (0..b * t * hq).map(|i| (i * 37 % 64) as f32 / 16.0).collect();
        let make = make.fp32_of("lse", &[b, t, hq], &lse).ints("q_pos", &[b, t], &q_pos).ints("kv_len", &[b], &kv_len);
        let make = params.iter().fold(make, |make, (name, value)| make.param(name, value));
        let mask: Vec<i32> = (0..b * t).map(|i| i32::from(i % 5 != 1)).collect();
        cases.push(if t > 2 { make.ints("mask", &[b, t], &mask) } else { make }.case());
    }
    // Keys that do not count and rows that are no tokens: infinite and NaN; scores of -inf, +inf and NaN.
    for (at, value) in [(0, f32::NAN), (3, f32::INFINITY), (5, f32::NEG_INFINITY)] {
        let make = Maker::new("attention_backward", dtype, out).float("q", &[1, 3, 1, 8], 1.0);
        let make = make.float("k", &[1, 9, 1, 8], 1.0).float("v", &[1, 9, 1, 8], 1.0).set("k", at * 8, value);
        let make = make.float("out", &[1, 3, 1, 8], 1.0).float("dout", &[1, 3, 1, 8], 1.0).set("q", 8, f32::NAN);
        let make = make.set("k", 8 * 8, f32::NAN).set("v", 8 * 8, f32::INFINITY).set("dout", 8, f32::NAN);
        let make = make.fp32_of("lse", &[1, 3, 1], &[0.5, f32::NAN, 1.5]).param("causal", "1");
        cases.push(
            make.ints("q_pos", &[1, 3], &[4, 5, 8]).ints("kv_len", &[1], &[8]).ints("mask", &[1, 3], &[1, 0, 7]).case(),
        );
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

    /// One f32 for each row, whatever the other floats are.
    fn fp32(self, name: &str, values: &[f32]) -> Maker {
        self.fp32_of(name, &[values.len()], values)
    }

    fn fp32_of(mut self, name: &str, shape: &[usize], values: &[f32]) -> Maker {
        self.case.inputs.insert(name.into(), Tensor::fp32(shape, values.to_vec()));
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

/// One change of a kernel, and a part of what the emulator or the comparison says about it.
#[derive(Clone, Copy)]
struct Mutant {
    name: &'static str,
    change: Change,
    /// The shapes that show it.
    shapes: &'static str,
    says: &'static str,
}

const MUTANTS: [Mutant; 80] = [
    Mutant {
        name: "weights_of_the_first_group",
        change: Change {
            file: "group_norm.cu",
            from: "static_cast<long long>(blockIdx.x % groups) * channels",
            to: "0ll * groups",
        },
        shapes: "group_norm",
        says: "elements differ",
    },
    Mutant {
        name: "sums_of_channels_without_their_weight",
        change: Change {
            file: "group_norm_backward.cu",
            from: "b = __fmaf_rn(weight, of_w, b);",
            to: "b = __fadd_rn(of_w, b);",
        },
        shapes: "group_norm_backward",
        says: "elements differ",
    },
    Mutant {
        name: "channels_of_the_first_group",
        change: Change {
            file: "conv.cu",
            from: "group = row / outputs,",
            to: "group = row / outputs / groups * groups,",
        },
        shapes: "conv",
        says: "elements differ",
    },
    Mutant {
        name: "places_between_outputs",
        change: Change { file: "patches.cuh", from: "at < 0 || at % divide != 0 ||", to: "at < 0 ||" },
        shapes: "conv_dx",
        says: "elements differ",
    },
    Mutant {
        name: "images_of_padding",
        change: Change { file: "conv_dw.cu", from: "has_mask && mask[b] == 0", to: "has_mask && mask[b] < -7" },
        shapes: "conv_dw",
        says: "elements differ",
    },
    Mutant {
        name: "sink_of_the_first_head",
        change: Change {
            file: "attention.cu",
            from: "sinks[slot.kv_head * slot.group + (slot.first + row) % slot.group]",
            to: "sinks[slot.kv_head * slot.group]",
        },
        shapes: "attention",
        says: "elements differ",
    },
    Mutant {
        name: "limit_of_the_other_side",
        change: Change { file: "clamped.cuh", from: "up < -limit ? -limit", to: "up < -limit ? limit" },
        shapes: "clamped_silu_mul",
        says: "elements differ",
    },
    Mutant {
        name: "gate_of_the_elements_before",
        change: Change { file: "sigmoid_mul.cu", from: "gate[++number]", to: "gate[number++]" },
        shapes: "sigmoid_mul",
        says: "elements differ",
    },
    Mutant {
        name: "sum_of_one_product_without_the_other_lanes",
        change: Change {
            file: "sigmoid_mul_backward.cu",
            from: "__fadd_rn(__fmaf_rn(g.v[i], v.v[i], 0.0f), 0.0f)",
            to: "__fmaf_rn(g.v[i], v.v[i], 0.0f)",
        },
        shapes: "sigmoid_mul_backward",
        says: "elements differ",
    },
    Mutant {
        name: "gradient_of_a_gate_in_reverse",
        change: Change {
            file: "sigmoid_mul_backward.cu",
            from: "for (long long at = first; at < each; at += 256) {",
            to: "for (long long at = first + (each - 1) / 256 * 256; at >= 0; at -= 256) {\n        if (at >= each) continue;",
        },
        shapes: "sigmoid_mul_backward",
        says: "elements differ",
    },
    Mutant {
        name: "step_of_the_thread_beside",
        change: Change {
            file: "ssd_scan.cu",
            from: "__shfl_sync(WHOLE_WARP, mine.k, static_cast<int>(t % 32))",
            to: "__shfl_sync(WHOLE_WARP, mine.k, static_cast<int>((t + 1) % 32))",
        },
        shapes: "ssd_scan",
        says: "elements differ",
    },
    Mutant {
        name: "state_of_many_elements_not_kept",
        change: Change {
            file: "ssd_scan.cu",
            from: "if (at >= 256) s = next[row + at + j];",
            to: "if (at >= 256) s = has_state ? state[row + at + j] : 0.0f;",
        },
        shapes: "ssd_scan",
        says: "elements differ",
    },
    Mutant {
        name: "gradient_of_state_before_decay",
        change: Change {
            file: "ssd_scan_backward.cu",
            from: "if (end > 0) value = __fmul_rn(k_after, value);",
            to: "if (end > 1) value = __fmul_rn(k_after, value);",
        },
        shapes: "ssd_scan_backward",
        says: "elements differ",
    },
    Mutant {
        name: "elements_beyond_registers_decay_as_the_first",
        change: Change {
            file: "selective_scan.cu",
            from: "step(n, scan.rate(channel, n), next[row + n])",
            to: "step(n, rates[0], next[row + n])",
        },
        shapes: "selective_scan",
        says: "elements differ",
    },
    Mutant {
        name: "chosen_of_elements_that_are_not_there",
        change: Change { file: "topk.cu", from: "if (has_counts) count", to: "if (has_counts > 1) count" },
        shapes: "topk",
        says: "elements differ",
    },
    Mutant {
        name: "output_begins_anew_in_each_part_of_a_text",
        change: Change { file: "penalize.cu", from: "at + i >= prompt_end", to: "i >= prompt_end" },
        shapes: "penalize",
        says: "elements differ",
    },
    Mutant {
        name: "one_equal_too_many_may_be_sampled",
        change: Change { file: "truncate.cu", from: "before < last.equals", to: "before <= last.equals" },
        shapes: "truncate",
        says: "elements differ",
    },
    Mutant {
        name: "half_of_the_random_number",
        change: Change { file: "draw.cu", from: "low) >> 11", to: "low) >> 12" },
        shapes: "draw",
        says: "elements differ",
    },
    Mutant {
        name: "score_below_zero_counts",
        change: Change { file: "index_score.cu", from: "x <= 0.0f ? 0.0f : x", to: "x" },
        shapes: "index_score",
        says: "elements differ",
    },
    Mutant {
        name: "channels_in_the_lanes_of_others",
        change: Change {
            file: "selective_scan_backward.cu",
            from: "int at = lane * 8 + j;",
            to: "int at = j * 32 + lane;",
        },
        shapes: "selective_scan_backward",
        says: "elements differ",
    },
    Mutant {
        name: "gradient_of_rates_of_one_stretch",
        change: Change {
            file: "selective_scan_backward.cu",
            from: "of_a[i] = __fmaf_rn(exponent, __fmul_rn(left, before[i]), of_a[i]);",
            to: "of_a[i] = __fmaf_rn(exponent, __fmul_rn(left, before[i]), t == last - 1 ? 0.0f : of_a[i]);",
        },
        shapes: "selective_scan_backward",
        says: "elements differ",
    },
    Mutant {
        name: "key_and_value_before_the_correction",
        change: Change {
            file: "wkv.cuh",
            from: "__fmaf_rn(k, v, __fmaf_rn(b, sa, __fmul_rn(s, left)))",
            to: "__fmaf_rn(b, sa, __fmaf_rn(k, v, __fmul_rn(s, left)))",
        },
        shapes: "wkv7",
        says: "elements differ",
    },
    Mutant {
        name: "decay_by_the_state_behind",
        change: Change {
            file: "wkv7_backward.cu",
            from: "sum_w = __fmaf_rn(m, s, sum_w);",
            to: "sum_w = __fmaf_rn(m, moved(s, left, of_b, read, of_k, of_v), sum_w);",
        },
        shapes: "wkv7_backward",
        says: "elements differ",
    },
    Mutant {
        name: "gradient_of_keys_of_the_state_behind",
        change: Change {
            file: "gated_delta_rule_backward.cu",
            from: "of_r = __fmaf_rn(p, dr, of_r);",
            to: "of_r = __fmaf_rn(__fmaf_rn(at_key, u, p), dr, of_r);",
        },
        shapes: "gated_delta_rule_backward",
        says: "elements differ",
    },
    Mutant {
        name: "state_decayed_behind_its_key",
        change: Change {
            file: "delta.cuh",
            from: "element(key, i), decayed, sum",
            to: "element(key, i), __fdiv_rn(decayed, left), sum",
        },
        shapes: "gated_delta_rule",
        says: "elements differ",
    },
    Mutant {
        name: "taps_from_the_last",
        change: Change { file: "causal_conv1d.cu", from: "taps + j]", to: "taps + taps - 1 - j]" },
        shapes: "causal_conv1d",
        says: "elements differ",
    },
    Mutant {
        name: "gradient_of_next_one_row_late",
        change: Change {
            file: "causal_conv1d_backward.cu",
            from: "if (has_dnext && row >= end)",
            to: "if (has_dnext && row > end)",
        },
        shapes: "causal_conv1d_backward",
        says: "elements differ",
    },
    Mutant {
        name: "state_counted_as_rows",
        change: Change {
            file: "causal_conv1d_dw.cu",
            from: "rows.at(b, t + j, channel)",
            to: "rows.at(b, t + taps - 1 - j, channel)",
        },
        shapes: "causal_conv1d_dw",
        says: "elements differ",
    },
    Mutant {
        name: "gradient_of_keys_without_barrier",
        change: Change {
            file: "attention_backward.cu",
            from: "            changes[thread] = g;\n            __syncthreads();",
            to: "            changes[thread] = g;",
        },
        shapes: "attention_backward",
        says: "races with a write",
    },
    Mutant {
        name: "gradient_window_one_too_wide",
        change: Change {
            file: "attention_backward.cu",
            from: "key > position - call.window",
            to: "key >= position - call.window",
        },
        shapes: "attention_backward",
        says: "elements differ",
    },
    Mutant {
        name: "gradient_chunk_of_the_key_alone",
        change: Change {
            file: "attention_backward.cu",
            from: "key < position - position % call.chunk",
            to: "key < position - key % call.chunk",
        },
        shapes: "attention_backward",
        says: "elements differ",
    },
    Mutant {
        name: "tokens_numbered_anew",
        change: Change { file: "sequences.cuh", from: "first = (first + all) % 256;", to: ";" },
        shapes: "nll",
        says: "elements differ",
    },
    Mutant {
        name: "gradient_lost_within_the_borders",
        change: Change { file: "policy_loss.cu", from: "v < u ?", to: "v <= u ?" },
        shapes: "policy_loss",
        says: "elements differ",
    },
    Mutant {
        name: "groups_end_later",
        change: Change {
            file: "batch_loss.cu",
            from: "at < (group + 1) * count / groups;",
            to: "at < min(count, (group + 1) * count / groups + 1);",
        },
        shapes: "batch_loss",
        says: "elements differ",
    },
    Mutant {
        name: "square_before_its_share",
        change: Change {
            file: "adamw.cu",
            from: "__fmul_rn(__fmul_rn(rest2, gradient), gradient)",
            to: "__fmul_rn(rest2, __fmul_rn(gradient, gradient))",
        },
        shapes: "adamw",
        says: "elements differ",
    },
    Mutant {
        name: "missing_block_barrier",
        change: Change {
            file: "tile.cuh",
            from: "            left_of_segment = steps_of_segment;\n        }\n        __syncthreads();",
            to: "            left_of_segment = steps_of_segment;\n        }",
        },
        shapes: "gemm_tiles",
        says: "reads what nobody has written",
    },
    Mutant {
        name: "missing_barrier_before_the_join",
        change: Change {
            file: "denominator.cuh",
            from: "room[threadIdx.x / 32] = segment;\n    __syncthreads();",
            to: "room[threadIdx.x / 32] = segment;",
        },
        shapes: "softmax",
        says: "races with a write",
    },
    Mutant {
        name: "missing_warp_barrier",
        change: Change {
            file: "gemm.cu",
            from: "        __syncwarp();\n        bring(chunk + STAGES - 1);",
            to: "        bring(chunk + STAGES - 1);",
        },
        shapes: "gemm_skinny",
        says: "races with a",
    },
    Mutant {
        name: "vote_in_the_place_of_a_barrier",
        change: Change {
            file: "attention.cu",
            from: "hidden = __any_sync(WHOLE_WARP, hidden);\n        __syncwarp();",
            to: "hidden = __any_sync(WHOLE_WARP, hidden);",
        },
        shapes: "attention",
        says: "races with a write",
    },
    Mutant {
        name: "copy_not_waited_for",
        change: Change { file: "gemm.cu", from: "async_wait<STAGES - 2>();", to: "async_wait<STAGES - 1>();" },
        shapes: "gemm_skinny",
        says: "reads what nobody has written",
    },
    Mutant {
        name: "barrier_in_a_branch",
        change: Change {
            file: "argmax.cu",
            from: "        indices[threadIdx.x / 32] = best_index;\n    }\n    __syncthreads();",
            to: "        indices[threadIdx.x / 32] = best_index;\n        __syncthreads();\n    }",
        },
        shapes: "argmax",
        says: "waits for ever",
    },
    Mutant {
        name: "lanes_fold_the_other_way",
        change: Change {
            file: "reduce.cuh",
            from: "for (int h = 16; h >= 1; h /= 2) {",
            to: "for (int h = 1; h <= 16; h *= 2) {",
        },
        shapes: "rms_norm",
        says: "elements differ",
    },
    // 128 lanes in all.
    Mutant {
        name: "four_lanes_to_a_thread",
        change: Change {
            file: "rms_norm.cu",
            from: "for (long long at = lane * 8; at < n; at += 256) {\n        // The pad +0 adds +0 to a lane that is never -0.\n        add_squares(lanes, load_some<In>(x + at, n - at, 0.0f));",
            to: "for (long long at = lane * 4; at < n; at += 128) {\n        add_squares(lanes, load_some<In>(x + at, n - at < 4 ? n - at : 4, 0.0f));",
        },
        shapes: "rms_norm",
        says: "elements differ",
    },
    Mutant {
        name: "segments_joined_left_to_right",
        change: Change {
            file: "reduce.cuh",
            from: "return __fadd_rn(__fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3])),\n                     __fadd_rn(__fadd_rn(s[4], s[5]), __fadd_rn(s[6], s[7])));",
            to: "float sum = s[0];\n    for (int i = 1; i < 8; i++) sum = __fadd_rn(sum, s[i]);\n    return sum;",
        },
        shapes: "logprob",
        says: "elements differ",
    },
    Mutant {
        name: "subtrees_crossed",
        change: Change {
            file: "gemm.cu",
            from: "parts[s] = __fadd_rn(parts[s], parts[s + width]);",
            to: "parts[s] = __fadd_rn(parts[s], parts[(s + 8 - width) % 8]);",
        },
        shapes: "gemm_skinny",
        says: "elements differ",
    },
    Mutant {
        name: "one_row_too_many",
        change: Change { file: "tile.cuh", from: "if (row >= m) continue;", to: "if (row > m) continue;" },
        shapes: "gemm_tiles",
        says: "writes outside",
    },
    Mutant {
        name: "tail_read_too_far",
        change: Change {
            file: "element.cuh",
            from: "        float value = pad;\n        if (i < count)",
            to: "        float value = pad;\n        if (i <= count)",
        },
        shapes: "add",
        says: "reads outside",
    },
    Mutant {
        name: "tail_padded_with_plus_zero",
        change: Change { file: "tile.cuh", from: "float pad = left ? -0.0f : 0.0f;", to: "float pad = 0.0f;" },
        shapes: "gemm_tiles",
        says: "elements differ",
    },
    Mutant {
        name: "row_of_w_too_many",
        change: Change {
            file: "tile.cuh",
            from: "at + step < k ? n - n0 - output : 0",
            to: "at + step <= k ? n - n0 - output : 0",
        },
        shapes: "gemm_dx",
        says: "reads outside",
    },
    Mutant {
        name: "outputs_exchanged",
        change: Change { file: "tile.cuh", from: "output + 4 * i,", to: "output + 4 * (1 - i)," },
        shapes: "gemm_dx",
        says: "elements differ",
    },
    Mutant {
        name: "padding_multiplied_by_plus_zero",
        change: Change { file: "gemm_dw.cu", from: "dy_aligned, -0.0f", to: "dy_aligned, 0.0f" },
        shapes: "gemm_dw",
        says: "elements differ",
    },
    Mutant {
        name: "padding_read_as_a_token",
        change: Change { file: "gemm_dw.cu", from: "mask[t] != 0;", to: "mask[t] != 7;" },
        shapes: "gemm_dw",
        says: "elements differ",
    },
    Mutant {
        name: "other_product_contracted",
        change: Change {
            file: "rotate.cuh",
            from: "float y1 = __fmaf_rn(x1, c, -__fmul_rn(x2, s));",
            to: "float y1 = __fmaf_rn(-x2, s, __fmul_rn(x1, c));",
        },
        shapes: "rope",
        says: "elements differ",
    },
    Mutant {
        name: "lanes_left_at_their_own_reference_points",
        change: Change {
            file: "logprob.cu",
            from: "__fsub_rn(__fsub_rn(ROUNDING, run.base), n)",
            to: "__fsub_rn(ROUNDING, run.base)",
        },
        shapes: "logprob",
        says: "elements differ",
    },
    Mutant {
        name: "lanes_not_moved_with_their_reference_point",
        change: Change { file: "logprob.cu", from: "lanes.v[j] = __fmul_rn(lanes.v[j], factor);", to: ";" },
        shapes: "logprob",
        says: "elements differ",
    },
    Mutant {
        name: "hidden_key_seen",
        change: Change {
            file: "attention.cu",
            from: "if (call.causal) end = min(end, max(p + 1, 0ll));",
            to: "if (call.causal) end = min(end, max(p + 2, 0ll));",
        },
        shapes: "attention",
        says: "elements differ",
    },
    Mutant {
        name: "window_off_by_one",
        change: Change { file: "attention.cu", from: "max(p - call.window + 1, 0ll)", to: "max(p - call.window, 0ll)" },
        shapes: "attention",
        says: "elements differ",
    },
    Mutant {
        name: "chunk_for_a_window",
        change: Change { file: "attention.cu", from: "p - static_cast<int>(p) % call.chunk", to: "p - call.chunk + 1" },
        shapes: "attention",
        says: "elements differ",
    },
    Mutant {
        name: "blocks_added_from_the_last",
        change: Change {
            file: "attention.cu",
            from: "total = __fadd_rn(total, partial[((first + block) * ROWS + row) * e + column]);",
            to: "total = __fadd_rn(total, partial[((first + call.blocks - 1 - block) * ROWS + row) * e + column]);",
        },
        shapes: "attention",
        says: "elements differ",
    },
    Mutant {
        name: "up_multiplied_before_the_gate",
        change: Change {
            file: "gelu_mul.cu",
            from: "__fmul_rn(__fmul_rn(gate, sigmoid_of_number(a)), up)",
            to: "__fmul_rn(gate, __fmul_rn(sigmoid_of_number(a), up))",
        },
        shapes: "gelu_mul",
        says: "elements differ",
    },
    Mutant {
        name: "an_infinity_times_no_density",
        change: Change { file: "activate_backward.cu", from: "made.e > 0.0f ?", to: "true ?" },
        shapes: "activate_backward",
        says: "elements differ",
    },
    Mutant {
        name: "divided_by_the_cap",
        change: Change { file: "softcap.cu", from: "__fmul_rn(x, inverse)", to: "__fdiv_rn(x, cap)" },
        shapes: "softcap",
        says: "elements differ",
    },
    Mutant {
        name: "factor_rounded_to_bf16",
        change: Change {
            file: "scale.cu",
            from: "return __fmul_rn(x, factor);",
            to: "return __fmul_rn(x, widen(narrow<bf16>(factor)));",
        },
        shapes: "scale",
        says: "elements differ",
    },
    Mutant {
        name: "highest_expert_among_equals",
        change: Change { file: "rank.cuh", from: "other_index < index", to: "other_index > index" },
        shapes: "route",
        says: "elements differ",
    },
    Mutant {
        name: "group_worth_without_the_second_choice",
        change: Change { file: "route.cu", from: "if (choice.top_two) worth =", to: "if (false) worth =" },
        shapes: "route",
        says: "elements differ",
    },
    Mutant {
        name: "first_expert_counts_for_the_second",
        change: Change { file: "route.cu", from: "index[choice - before] == expert", to: "false" },
        shapes: "route",
        says: "elements differ",
    },
    Mutant {
        name: "named_experts_left_alone",
        change: Change { file: "route.cu", from: "if (out) ranks[e] = 0u;", to: "" },
        shapes: "route",
        says: "elements differ",
    },
    Mutant {
        name: "gradient_of_the_last_rank",
        change: Change { file: "route_backward.cu", from: "rank == 0 ? d :", to: "true ? d :" },
        shapes: "route_backward",
        says: "elements differ",
    },
    Mutant {
        name: "experts_chosen_by_their_scores",
        change: Change { file: "route.cu", from: "choice.by_logits ?", to: "false ?" },
        shapes: "route",
        says: "elements differ",
    },
    Mutant {
        name: "chosen_expert_left_in",
        change: Change { file: "route.cu", from: "if (threadIdx.x == 0) ranks[place] = 0u;", to: "" },
        shapes: "route",
        says: "elements differ",
    },
    Mutant {
        name: "missing_barrier_behind_a_choice",
        change: Change {
            file: "route.cu",
            from: "if (threadIdx.x == 0) ranks[place] = 0u;\n    __syncwarp();",
            to: "if (threadIdx.x == 0) ranks[place] = 0u;",
        },
        shapes: "route",
        says: "races with a",
    },
    Mutant {
        name: "experts_added_after_the_shared_one",
        change: Change {
            file: "combine.cu",
            from: "for (int i = 0; i < 8; i++) acc.v[i] = __fadd_rn(acc.v[i], v.v[i]);",
            to: "for (int i = 0; i < 8 && at + i < n; i++) {\n            acc.v[i] = v.v[i];\n            for (int rank = 0; rank < chosen; rank++) {\n                long long from = static_cast<long long>(row[token * chosen + rank]) * n + at + i;\n                acc.v[i] = __fmaf_rn(weight[token * chosen + rank], widen(static_cast<In>(x[from])), acc.v[i]);\n            }\n        }",
        },
        shapes: "combine",
        says: "elements differ",
    },
    Mutant {
        name: "shared_expert_weighted",
        change: Change {
            file: "combine.cu",
            from: "acc.v[i] = __fadd_rn(acc.v[i], v.v[i]);",
            to: "acc.v[i] = __fmaf_rn(weight[token * chosen], v.v[i], acc.v[i]);",
        },
        shapes: "combine",
        says: "elements differ",
    },
    Mutant {
        name: "rows_that_nobody_names_left_as_they_were",
        change: Change {
            file: "combine_backward.cu",
            from: "if (at < len) store_up_to8",
            to: "if (at < 0) store_up_to8",
        },
        shapes: "combine_backward",
        says: "reads what no kernel has written",
    },
    Mutant {
        name: "gradient_of_a_weight_in_reverse",
        change: Change {
            file: "combine_backward.cu",
            from: "for (long long at = first; at < n; at += 256) {",
            to: "for (long long at = first + (n - 1) / 256 * 256; at >= 0; at -= 256) {\n        if (at >= n) continue;",
        },
        shapes: "combine_backward",
        says: "elements differ",
    },
    Mutant {
        name: "tile_left_at_its_own_reference_point",
        change: Change {
            file: "linear_logprob.cu",
            from: "sums.v[j] = kept ? __fmul_rn(sums.v[j], factor) : 0.0f;",
            to: "sums.v[j] = kept ? sums.v[j] : 0.0f;",
        },
        shapes: "linear_logprob",
        says: "elements differ",
    },
    Mutant {
        name: "gradient_of_a_target_of_another_tile",
        change: Change { file: "linear_logprob_backward.cu", from: "from + column == index", to: "column == index" },
        shapes: "linear_logprob_backward",
        says: "elements differ",
    },
    Mutant {
        name: "gradients_summed_before_their_rounding",
        change: Change {
            file: "linear_logprob_backward.cu",
            from: "square[(y + i) * (SIDE + 1) + x] = widen(value);",
            to: "square[(y + i) * (SIDE + 1) + x] = __fmul_rn(widen(value), 1.00390625f);",
        },
        shapes: "linear_logprob_backward",
        says: "elements differ",
    },
    Mutant {
        name: "square_that_is_read_before_it_is_written",
        change: Change {
            file: "linear_logprob_backward.cu",
            from: "    __syncthreads();\n    long long row",
            to: "    long long row",
        },
        shapes: "linear_logprob_backward",
        says: "reads what nobody has written",
    },
    Mutant {
        name: "segments_joined_by_a_difference",
        change: Change {
            file: "linear_logprob_backward.cu",
            from: "sums[at] = __fadd_rn(earlier[at], sums[at]);",
            to: "sums[at] = __fsub_rn(earlier[at], sums[at]);",
        },
        shapes: "linear_logprob_backward",
        says: "elements differ",
    },
];

/// `result` is an error that says `says`.
fn fails<T>(result: Result<T, Failed>, says: &str) -> Result<(), Failed> {
    match result {
        Ok(_) => Err("the mutant was not caught".into()),
        Err(e) if e.message().is_some_and(|message| message.contains(says)) => Ok(()),
        Err(e) => Err(format!("caught, but not as `{says}`: {}", e.message().unwrap_or_default()).into()),
    }
}

/// A changed kernel gives an error or other bits, and the words are the expected ones.
fn caught(mutant: Mutant) -> Result<(), Failed> {
    let device = emulated(&[mutant.change], false)?;
    let types = [[DType::Bf16, DType::Fp32], [DType::Fp32, DType::Fp32]];
    let cases = types.into_iter().flat_map(|[dtype, out]| shapes(mutant.shapes, dtype, out));
    let judged: Result<(), Failed> = cases.map(|case| agree(&device, &case)).try_for_each(|found| found.map(drop));
    fails(judged, mutant.says)
}

fn linear(m: usize, v: usize) -> Case {
    let make = Maker::new("linear_logprob", DType::Bf16, DType::Fp32).float("x", &[m, 32], 1.0);
    make.float("w", &[v, 32], 1.0).ints("target", &[m], &vec![3; m]).case()
}

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/checkpoints").join(name)
}

/// Three sequences of the model's vocabulary, of different lengths.
fn sequences(model: &Model) -> Vec<Vec<i32>> {
    let vocab = model.config().vocab as i32;
    [7, 3, 6].map(|len| (0..len).map(|i| 3 + (i * 31 + len) % (vocab - 3)).collect()).to_vec()
}

fn run_of<'a>(schedule: Schedule, grouping: Grouping, page_size: usize) -> Run<'a> {
    Run { schedule, grouping, page_size, page_order: PageOrder::Scattered, ..Run::default() }
}

/// The logits of a model on the emulator, by several schedules, against those of the processor. Returns the counters of
/// the schedule of single tokens.
fn same_logits(
    name: &str,
    precision: Precision,
    changes: &[Change],
    backwards: bool,
) -> Result<BTreeMap<&'static str, u64>, Failed> {
    same_logits_on(Emulator::new(changes, backwards)?, name, precision)
}

fn same_logits_on(emulator: Emulator, name: &str, precision: Precision) -> Result<BTreeMap<&'static str, u64>, Failed> {
    let device = Device::new(Box::new(emulator), usize::MAX, usize::MAX);
    let here = Model::load(&checkpoint(name), precision, &cpu())?;
    let sequences = sequences(&here);
    let sequences: Vec<&[i32]> = sequences.iter().map(Vec::as_slice).collect();
    let wanted = here.forward_run(&cpu(), &sequences, Run::default())?;
    let there = Model::load(&checkpoint(name), precision, &cpu())?.to_device(&cpu(), &device)?;
    let mut counts = BTreeMap::new();
    for (schedule, grouping, page_size) in [
        (Schedule::Prefill, Grouping::Together, 64),
        (Schedule::Decode, Grouping::Together, 64),
        (Schedule::Chunk(2), Grouping::Together, 3),
        (Schedule::Mixed, Grouping::Together, 1),
        (Schedule::Speculative(3), Grouping::Together, 2),
        (Schedule::Prefix(3), Grouping::Alone, 2),
    ] {
        let counted = device.recording();
        let model = there.under(&counted).expect("it is on a device");
        let found = model.forward_run(&cpu(), &sequences, run_of(schedule, grouping, page_size));
        let found = found.map_err(|e| format!("{name} {schedule}: {e}"))?;
        if found.len() != wanted.len() || wanted.is_empty() {
            return Err(format!("{schedule}: {} logits where {} are wanted", found.len(), wanted.len()).into());
        }
        if let Some(i) = (0..found.len()).find(|&i| found[i].to_bits() != wanted[i].to_bits()) {
            return Err(format!("{name} {schedule}: logit {i} is {}, {} is wanted", found[i], wanted[i]).into());
        }
        if schedule == Schedule::Decode {
            counts = counted.ledger().counts().into_iter().map(|(counter, count)| (counter.name(), count)).collect();
        }
    }
    Ok(counts)
}

/// Every schedule of a model gives the bits of the processor, steps of single tokens are replayed, and beside logits little is
/// copied.
fn model(name: &str) -> Result<(), Failed> {
    let counts = same_logits(name, Precision::Bf16, &[], false)?;
    let count = |counter: &str| counts.get(counter).copied().unwrap_or(0);
    let here = Model::load(&checkpoint(name), Precision::Bf16, &cpu())?;
    let c = here.config();
    // Three sequences for three steps, two for three more, one for the last; each form is captured at its second step.
    // Where a layer chooses keys, the host reads the choice, and nothing is recorded.
    let chooses = |branch: &Branch| matches!(&branch.layer, Layer::LatentAttention(plan) if plan.indexer.is_some());
    let expected = if c.blocks.iter().flatten().any(chooses) { 0 } else { 2 + 2 };
    if count("replays") != expected {
        return Err(format!("{} replays where {expected} are expected: {counts:?}", count("replays")).into());
    }
    // Angles of each rotation; of layers that recur the row of zeros that sequences begin with, and which rows a step reads.
    let angles: usize = c.rotary.iter().map(|rotary| 16 * 4 * rotary.dim).sum();
    let rows = |branch: &Branch| match &branch.layer {
        Layer::ShortConv(conv) => 4 * (conv.taps - 1) * conv.hidden + 128,
        Layer::TimeMix(mix) => 4 * mix.hidden * (1 + mix.head_dim) + 128,
        Layer::ChannelMix(mix) => 4 * mix.hidden + 128,
        Layer::Mamba(scan) => 4 * scan.inner * (scan.taps - 1 + scan.state_dim) + 128,
        Layer::Mamba2(scan) => {
            let inner = scan.heads * scan.head_dim;
            let channels = inner + 2 * scan.groups * scan.state_dim;
            4 * ((scan.taps - 1) * channels + inner * scan.state_dim) + 128
        }
        Layer::DeltaRule(rule) => {
            let (keys, values) = (rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim);
            4 * ((rule.taps - 1) * (2 * keys + values) + values * rule.key_dim) + 128
        }
        _ => 0,
    };
    let rows: usize = c.blocks.iter().flatten().map(rows).sum();
    let positions = if c.positions.is_some() { 16 * 4 } else { 0 };
    let (logits, told) = (16 * 4 * c.vocab as u64, (angles + rows + positions) as u64 + 1024);
    if count("staged_bytes") > logits + told || count("device_fp32_bytes") == 0 || count("launches") == 0 {
        return Err(format!("beside {logits} bytes of logits: {counts:?}").into());
    }
    Ok(())
}

fn other_precisions() -> Result<(), Failed> {
    same_logits("qwen3", Precision::Fp32, &[], false)?;
    same_logits("llama-linear", Precision::Fp16, &[], false)?;
    same_logits("mixtral", Precision::Fp32, &[], false).map(drop)
}

/// A site, the sequence and position of each token, and the bits of its values.
type Site = (String, Vec<(usize, usize)>, Vec<u32>);

/// Keeps what it is shown.
#[derive(Default, PartialEq)]
struct Kept(Vec<Site>);

impl Probe for Kept {
    fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
        let bits = seen.values.iter().map(|value| value.to_bits()).collect();
        self.0.push((seen.name(), seen.tokens.to_vec(), bits));
        Ok(())
    }
}

/// What `samebits trace` compares: every value on the way.
fn sites() -> Result<(), Failed> {
    let device = Device::new(Box::new(Emulator::new(&[], false)?), usize::MAX, usize::MAX);
    for name in ["deepseek-v3", "gemma2", "mixtral", "phi3-partial", "qwen3"] {
        let here = Model::load(&checkpoint(name), Precision::Bf16, &cpu())?;
        let there = Model::load(&checkpoint(name), Precision::Bf16, &cpu())?.to_device(&cpu(), &device)?;
        let sequences = sequences(&here);
        let sequences: Vec<&[i32]> = sequences.iter().map(Vec::as_slice).collect();
        let seen = |model: &Model| -> Result<Kept, Failed> {
            let mut kept = Kept::default();
            let run = Run { probe: Some(&mut kept), ..run_of(Schedule::Chunk(3), Grouping::Together, 2) };
            model.forward_run(&cpu(), &sequences, run)?;
            Ok(kept)
        };
        let (wanted, found) = (seen(&here)?, seen(&there)?);
        if wanted.0.len() < 30 || wanted.0.len() != found.0.len() {
            return Err(format!("{name}: {} sites where there are {}", found.0.len(), wanted.0.len()).into());
        }
        if let Some((wanted, found)) = wanted.0.iter().zip(&found.0).find(|(wanted, found)| wanted != found) {
            return Err(format!("{name}: {} where {} is wanted, or other values", found.0, wanted.0).into());
        }
    }
    Ok(())
}

/// Texts that are sampled and scored with the model on a device.
fn rollouts() -> Result<(), Failed> {
    let device = Device::new(Box::new(Emulator::new(&[], false)?), usize::MAX, usize::MAX);
    for name in ["qwen3", "gemma2"] {
        let here = Model::load(&checkpoint(name), Precision::Bf16, &cpu())?;
        let there = Model::load(&checkpoint(name), Precision::Bf16, &cpu())?.to_device(&cpu(), &device)?;
        let sampling = Sampling {
            samples: 2,
            max_tokens: 6,
            rule: SamplingRule { temperature: 0.8, top_p: 0.9, repetition_penalty: 1.2, ..SamplingRule::default() },
            seed: 11,
            ignore_eos: true,
            ..Sampling::default()
        };
        let prompts = sequences(&here);
        let sampled = |model: &Model, serving: &Serving| -> Result<Vec<Sample>, Failed> {
            let mut samples = Vec::new();
            let keep = |sample| {
                samples.push(sample);
                Ok(())
            };
            model.rollout(&cpu(), &prompts, &sampling, serving, keep)?;
            samples.sort_by_key(|sample| sample.sequence);
            Ok(samples)
        };
        let wanted = sampled(&here, &Serving::default())?;
        for serving in [
            Serving::default(),
            Serving { batch: 2, chunk: 2, page_size: 3, page_order: PageOrder::Scattered, share_prompts: true },
        ] {
            if sampled(&there, &serving)? != wanted {
                return Err(format!("{name}: {serving:?}").into());
            }
        }
        let texts: Vec<_> =
            wanted.iter().map(|s| (&prompts[s.prompt][..], &s.tokens[..], &sampling.rule, None)).collect();
        let run = run_of(Schedule::Chunk(4), Grouping::Together, 5);
        let scores = there.score(&cpu(), &texts, run)?;
        if wanted.is_empty() || wanted.iter().zip(&scores).any(|(sample, scores)| sample.logprobs != *scores) {
            return Err(format!("{name}: other log-probabilities").into());
        }
    }
    Ok(())
}

/// Two adapters and none in the same steps, sampled and scored on a device: what is replayed is of the same adapters.
fn adapters() -> Result<(), Failed> {
    let device = Device::new(Box::new(Emulator::new(&[], false)?), usize::MAX, usize::MAX);
    let folder = |name: &str| (name.to_string(), checkpoint("").join("../adapters").join(name));
    let load = || -> Result<Model, Failed> {
        let model = Model::load(&checkpoint("qwen3"), Precision::Bf16, &cpu())?;
        Ok(model.with_adapters(&cpu(), &[folder("qwen3"), folder("qwen3-other")])?)
    };
    let (here, there) = (load()?, load()?.to_device(&cpu(), &device)?);
    let named = |name: &str| AdapterChoice::Named(name.into());
    let prompts = vec![vec![3, 4, 5], vec![6, 7], vec![8, 9, 10, 11]];
    for adapters in [
        vec![named("qwen3"), AdapterChoice::Plain, named("qwen3-other")],
        vec![named("qwen3-other"), named("qwen3"), AdapterChoice::Plain],
        vec![named("qwen3")],
    ] {
        let sampling = Sampling { max_tokens: 6, ignore_eos: true, adapters, ..Sampling::default() };
        let sampled = |model: &Model, batch: usize| -> Result<Vec<Sample>, Failed> {
            let mut samples = Vec::new();
            let keep = |sample| {
                samples.push(sample);
                Ok(())
            };
            let serving = Serving { batch, ..Serving::default() };
            model.rollout(&cpu(), &prompts, &sampling, &serving, keep)?;
            samples.sort_by_key(|sample| sample.sequence);
            Ok(samples)
        };
        let wanted = sampled(&here, 3)?;
        // One by one the texts have steps of the same form.
        if wanted.len() != 3 || sampled(&there, 3)? != wanted || sampled(&there, 1)? != wanted {
            return Err(format!("{:?}", sampling.adapters).into());
        }
    }
    Ok(())
}

/// Experts that are recorded of some texts and not of others, on a device; and others that are replayed there.
fn experts() -> Result<(), Failed> {
    let device = Device::new(Box::new(Emulator::new(&[], false)?), usize::MAX, usize::MAX);
    for name in ["qwen3-moe", "phimoe"] {
        let here = Model::load(&checkpoint(name), Precision::Bf16, &cpu())?;
        let there = Model::load(&checkpoint(name), Precision::Bf16, &cpu())?.to_device(&cpu(), &device)?;
        let sampling = |experts| Sampling { max_tokens: 6, ignore_eos: true, seed: 3, experts, ..Sampling::default() };
        let prompts = [vec![3, 4, 5], vec![6, 7], vec![8, 9, 10, 11], vec![12, 13]];
        let each: Vec<_> = prompts.into_iter().enumerate().map(|(i, prompt)| (prompt, sampling(i % 2 == 1))).collect();
        let sampled = |model: &Model, batch: usize| -> Result<Vec<Sample>, Failed> {
            let mut samples = Vec::new();
            let keep = |sample| {
                samples.push(sample);
                Ok(())
            };
            model.rollout_each(&cpu(), &each, &Serving { batch, ..Serving::default() }, keep)?;
            samples.sort_by_key(|sample| sample.sequence);
            Ok(samples)
        };
        let wanted = sampled(&here, 2)?;
        // One by one the texts have steps of the same form, of which those without a record are replayed.
        if wanted[0].experts.is_some()
            || wanted[1].experts.is_none()
            || sampled(&there, 1)? != wanted
            || sampled(&there, 3)? != wanted
        {
            return Err(format!("{name}: other experts").into());
        }
        let count = here.config().mixtures()[0].count as i32;
        let recorded = |sample: &Sample| {
            let mut experts = sample.experts.clone()?;
            experts.each.iter_mut().for_each(|expert| *expert = (*expert + 1) % count);
            Some(Recorded { experts, replay: true })
        };
        let recorded: Vec<_> = wanted.iter().map(recorded).collect();
        let rule = SamplingRule::default();
        let texts: Vec<_> = wanted.iter().map(|s| (&each[s.prompt].0[..], &s.tokens[..], &rule, None)).collect();
        let scored = |model: &Model, schedule| -> Result<(Vec<Vec<f32>>, Vec<Experts>), Failed> {
            let mut routing = Routing { recorded: recorded.clone(), own: Vec::new() };
            let run = Run { experts: Some(&mut routing), ..run_of(schedule, Grouping::Together, 3) };
            let scores = model.score(&cpu(), &texts, run)?;
            Ok((scores, routing.own))
        };
        let replayed = scored(&here, Schedule::Prefill)?;
        for schedule in [Schedule::Decode, Schedule::Chunk(2), Schedule::Speculative(3)] {
            if scored(&there, schedule)? != replayed || replayed.0[1] == wanted[1].logprobs {
                return Err(format!("{name} {schedule}: other log-probabilities or experts").into());
            }
        }
    }
    Ok(())
}

/// `ours/cuda` answers `chain`, with the counters of that request alone.
fn chain_case() -> Result<(), Failed> {
    let checkpoints = Arc::new(Checkpoints::new(Some(checkpoint(""))));
    let device = emulated(&[], false)?.with_checkpoints(checkpoints.clone());
    let processor = CpuImplementation::new(cpu()).with_checkpoints(checkpoints);
    let mut case = Maker::new("chain", DType::Bf16, DType::Fp32).case();
    case.inputs.insert("tokens".into(), Tensor::i32(&[2, 3], vec![3, 4, 5, 6, 7, 8]));
    case.params = [("model", "llama3"), ("dtype", "bf16"), ("schedule", "decode")]
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .into();
    let (wanted, first) = (processor.run(&case), device.run(&case));
    let second = device.run(&case);
    for answer in [&first, &second] {
        if answer.status != Status::Ok {
            return Err(answer.reason.clone().into());
        }
        files::same_bits("logits", &answer.outputs["logits"], &wanted.outputs["logits"], &answer.kernel)?;
    }
    let right = second.kernel.contains("attention_scores4") && second.ledger.get("replays") == Some(&2);
    if !right || first.ledger != second.ledger {
        return Err(format!("{} {:?} {:?}", second.kernel, first.ledger, second.ledger).into());
    }
    Ok(())
}

/// Mutants that only a model shows: rows of the cache that go to another place, heads joined wrongly, the experts of another
/// token, and a step that is replayed with what an earlier one was told.
fn wrong_model() -> Result<(), Failed> {
    for (name, file, from, to, word) in [
        // The emulator sees what is read from another place than it was written to before a logit could be wrong.
        (
            "qwen3",
            "copy_rows.cu",
            "return row * stride + offset;",
            "return (row ^ 1) * stride + offset;",
            "reads what nobody has written",
        ),
        (
            "deepseek-v2",
            "copy_rows.cu",
            "row = row / every;",
            "row = row / every * every;",
            "reads outside: global memory",
        ),
        (
            "phi3-partial",
            "copy_rows.cu",
            "return row * stride + offset;",
            "return row * stride;",
            "reads what nobody has written",
        ),
        ("mixtral", "gemm.cu", "number = expert[choice];", "number = expert[0];", "is wanted"),
    ] {
        let judged = same_logits(name, Precision::Bf16, &[Change { file, from, to }], false);
        fails(judged, word).map_err(|e| format!("{name}, `{to}`: {}", e.message().unwrap_or_default()))?;
    }
    let stale = Emulator::new(&[], false)?.with_stale_graphs();
    fails(same_logits_on(stale, "qwen3", Precision::Bf16), "decode: device: attention_scores")
}

fn plain_device(changes: &[Change]) -> Result<Device, Failed> {
    Ok(Device::new(Box::new(Emulator::new(changes, false)?), usize::MAX, usize::MAX))
}

/// Numbers that follow from their places.
fn numbers<T: Stored>(from: usize, len: usize) -> Vec<T> {
    (from..from + len).map(|i| T::narrow(((i * 2654435761 % 1000) as f32 - 500.0) / 300.0)).collect()
}

fn bits<T: Stored>(values: &[T]) -> Vec<u32> {
    values.iter().map(|value| value.widen().to_bits()).collect()
}

fn fetched<T: Stored>(device: &Device, there: &Buffer<T>) -> Result<Vec<T>, Failed> {
    let mut host = vec![T::default(); there.len()];
    there.download(device, &mut host)?;
    Ok(host)
}

/// One matrix of several, for some rows or for a row of each choice: the bits of a product by itself.
fn chosen_products(changes: &[Change]) -> Result<(), Failed> {
    fn of<I: Stored, O: Stored>(device: &Device) -> Result<(), Failed> {
        let (experts, rows) = (5, 3);
        for (n, k) in [(1, 8), (33, 24), (70, 256), (40, 2048)] {
            let (x, w, b) =
                (numbers::<I>(7, rows * k), numbers::<I>(90, experts * n * k), numbers::<I>(5, experts * n));
            let up = |host: &[I]| device.upload("test", host);
            let (x_there, w_there, b_there) = (up(&x)?, up(&w)?, up(&b)?);
            for bias in [false, true] {
                let product = |row: usize, expert: usize| -> Result<Vec<O>, Failed> {
                    let (x, w, b) = (&x[row * k..][..k], &w[expert * n * k..][..n * k], &b[expert * n..][..n]);
                    let mut y = vec![O::default(); n];
                    samebits_ops::gemm(&cpu(), &Gemm::new(1, n, k), x, w, bias.then_some(b), &mut y)?;
                    Ok(y)
                };
                let b_there = bias.then_some(&b_there);
                let choice = [4, 0, 3, 3, 1, 2];
                let expert = Indices::new(device, "test", &choice, experts)?;
                let mut y = device.empty::<O>("test", choice.len() * n)?;
                device::gemm_experts(device, [n, k], (&x_there, 2), &expert, &w_there, b_there, &mut y)?;
                let found = fetched(device, &y)?;
                for (i, &expert) in choice.iter().enumerate() {
                    if bits(&found[i * n..][..n]) != bits(&product(i / 2, expert as usize)?) {
                        return Err(format!("{} {} {n}x{k}: choice {i}", I::NAME, O::NAME).into());
                    }
                }
                let mut y = device.upload("test", &numbers::<O>(1, 4 * n))?;
                let shape = Gemm::new(2, n, k);
                device::gemm_rows(device, &shape, (&x_there, 1), (&w_there, 3), b_there, (&mut y, 2))?;
                let found = fetched(device, &y)?;
                let wanted = [numbers::<O>(1, 2 * n), product(1, 3)?, product(2, 3)?].concat();
                if bits(&found) != bits(&wanted) {
                    return Err(format!("{} {} {n}x{k}: rows", I::NAME, O::NAME).into());
                }
                for (x_row, matrix, y_row) in [(2, 0, 0), (0, 5, 0), (0, 0, 3), (usize::MAX, 0, 0)] {
                    let x = (&x_there, x_row);
                    if device::gemm_rows(device, &shape, x, (&w_there, matrix), b_there, (&mut y, y_row)).is_ok() {
                        return Err("rows that are not there are multiplied".into());
                    }
                }
            }
        }
        Ok(())
    }
    let device = plain_device(changes)?;
    of::<bf16, bf16>(&device)?;
    of::<bf16, f32>(&device)?;
    of::<f16, f32>(&device)?;
    of::<f32, f32>(&device)
}

fn other_expert() -> Result<(), Failed> {
    let change = Change {
        file: "gemm.cu",
        from: "bias = bias + number * n;",
        to: "bias = bias + (number > 0 ? number - 1 : 1) * n;",
    };
    fails(chosen_products(&[change]), ": choice")
}

/// Rows of any width from any place to any other, NaN payloads and all; what is outside is refused.
fn copied_rows() -> Result<(), Failed> {
    fn of<T: Stored>(device: &Device, strange: T) -> Result<(), Failed> {
        for width in [1, 7, 8, 64, 2051] {
            let (stride, rows) = (width + 5, 6);
            let mut host = numbers::<T>(3, rows * stride);
            host[2 * stride + 1] = strange;
            let from = device.upload("test", &host)?;
            let mut to = device.upload("test", &vec![T::default(); 9 * stride])?;
            let (take, put) = ([2, 0, 5, 2], [8, 1, 0, 4]);
            let (take_there, put_there) =
                (Indices::new(device, "test", &take, rows)?, Indices::distinct(device, "test", &put, 9)?);
            let part = |indices| Part { rows: Some(indices), every: 1, stride, offset: 1 };
            device::copy_rows(device, [4, width], (&from, part(&take_there)), (&mut to, part(&put_there)))?;
            let mut wanted = vec![T::default(); 9 * stride];
            for (&take, &put) in take.iter().zip(&put) {
                let row = host[take as usize * stride + 1..][..width].to_vec();
                wanted[put as usize * stride + 1..][..width].copy_from_slice(&row);
            }
            // As bits: widening would make another NaN of a NaN.
            if raw(&fetched(device, &to)?) != raw(&wanted) {
                return Err(format!("{} {width}", T::NAME).into());
            }
            let outside = [
                Part { offset: 6, ..part(&take_there) },
                Part { stride: stride + 1, ..part(&take_there) },
                Part { every: 0, rows: None, ..part(&take_there) },
                Part { rows: None, stride: 3 * stride, ..part(&take_there) },
            ];
            for part in outside {
                let whole = Part::whole(width);
                if device::copy_rows(device, [4, width], (&from, part), (&mut to, whole)).is_ok() {
                    return Err(format!("{} {width}: rows outside are copied", T::NAME).into());
                }
            }
            to.copy_from(0, &from, stride, stride)?;
            to.copy_within(0, stride, stride)?;
            let found = fetched(device, &to)?;
            if raw(&found[..stride]) != raw(&host[stride..2 * stride])
                || raw(&found[stride..2 * stride]) != raw(&found[..stride])
            {
                return Err(format!("{} {width}: a part", T::NAME).into());
            }
            if to.copy_within(0, 1, stride).is_ok() || to.copy_from(0, &from, 1, rows * stride).is_ok() {
                return Err("parts that overlap or are outside are copied".into());
            }
        }
        Ok(())
    }
    fn raw<T: Stored>(values: &[T]) -> Vec<u8> {
        // SAFETY: plain numbers without padding.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }.to_vec()
    }
    let device = plain_device(&[])?;
    of::<bf16>(&device, bf16::from_bits(0xFFA1))?;
    of::<f16>(&device, f16::from_bits(0xFE01))?;
    of::<f32>(&device, f32::from_bits(0xFFAA_0001))
}

/// A graph reads its buffers when it is replayed, keeps what its work has dropped, and holds no copies.
fn captured() -> Result<(), Failed> {
    let (device, other) = (plain_device(&[])?, plain_device(&[])?);
    let n = 300;
    let (a, c) = (numbers::<f32>(1, n), numbers::<f32>(2, n));
    let mut a_there = device.upload("test", &a)?;
    let c_there = device.upload("test", &c)?;
    let mut sum = device.empty::<f32>("test", n)?;
    let held = device.held();
    let counted = device.recording();
    let graph = counted.capture(&mut || {
        // Two temporaries: the second gets the place of the first, which is done with.
        for _ in 0..2 {
            let mut inner = counted.empty::<f32>("test", n)?;
            device::add(&counted, &a_there, &c_there, &mut inner)?;
            device::add(&counted, &inner, &c_there, &mut sum)?;
        }
        Ok(())
    })?;
    let one = device.held() - held;
    if counted.ledger().count(Counter::Launches) != 0 || graph.launches() != 4 || one != 4 * n.next_multiple_of(64) {
        return Err(format!("{:?}, {one} bytes", counted.ledger().counts()).into());
    }
    for from in [1, 50, 77] {
        let a = numbers::<f32>(from, n);
        a_there.fill(&device, &a)?;
        // Whoever takes memory meanwhile gets none of the graph's.
        let noise = device.upload("test", &numbers::<f32>(9, n))?;
        counted.replay(&graph)?;
        let wanted: Vec<f32> = a.iter().zip(&c).map(|(a, c)| (a + c) + c).collect();
        if bits(&fetched(&device, &sum)?) != bits(&wanted)
            || bits(&fetched(&device, &noise)?) != bits(&numbers::<f32>(9, n))
        {
            return Err(format!("from {from}").into());
        }
    }
    if counted.ledger().count(Counter::Launches) != 12 || counted.ledger().count(Counter::Replays) != 3 {
        return Err(format!("{:?}", counted.ledger().counts()).into());
    }
    let copies = device.capture(&mut || device.upload("test", &[1f32]).map(drop));
    let waits = device.capture(&mut || device.finish());
    let strange = other.replay(&graph);
    if copies.is_ok() || waits.is_ok() || strange.is_ok() {
        return Err("a copy or a wait is captured, or a graph of another device started".into());
    }
    // After an error the device goes on, and what a graph held serves others.
    drop(graph);
    let again = device.held();
    let _two = (device.empty::<f32>("test", n)?, device.upload("test", &a)?);
    if device.held() != again { Err("the graph's memory is lost".into()) } else { Ok(()) }
}

/// What stands on the device is checked before it goes there.
fn checked_metadata() -> Result<(), Failed> {
    let device = plain_device(&[])?;
    let mut indices = Indices::new(&device, "test", &[0, 4], 5)?;
    for wrong in [&[0, 5][..], &[-1, 0], &[0], &[0, 1, 2]] {
        if indices.set(&device, "test", wrong).is_ok() {
            return Err(format!("{wrong:?} are taken").into());
        }
    }
    let table = device.upload("test", &numbers::<bf16>(0, 4 * 3))?;
    if device::embedding_at(&device, 3, &table, &indices, &mut device.empty::<bf16>("test", 6)?).is_ok() {
        return Err("five tokens fit a table of four".into());
    }
    let shape = Attention::causal([2, 3, 8], [1, 1], 4);
    // Pages of two keys; at most two queries of a sequence.
    let mut metadata = AttentionMetadata::paged(&device, &shape, 2, 2, 2)?;
    let set = |metadata: &mut AttentionMetadata, starts: &[i32], lens: &[i32], pages: &[i32]| {
        metadata.set(&device, &shape, starts, &[0, 1, 0], lens, pages)
    };
    set(&mut metadata, &[0, 2, 3], &[4, 1], &[3, 0, 1, -1])?;
    for (starts, lens, pages) in [
        ([0, 0, 3], [4, 1], [3, 0, 1, -1]),
        ([0, 2, 2], [4, 1], [3, 0, 1, -1]),
        ([0, 2, 3], [5, 1], [3, 0, 1, -1]),
        ([0, 2, 3], [4, 3], [3, 0, 1, -1]),
        ([0, 2, 3], [4, 1], [3, 4, 1, -1]),
    ] {
        if set(&mut metadata, &starts, &lens, &pages).is_ok() {
            return Err(format!("{starts:?} {lens:?} {pages:?} are taken").into());
        }
    }
    let (q, k) = (device.upload("test", &numbers::<bf16>(0, 12))?, device.upload("test", &numbers::<bf16>(0, 32))?);
    let at = |shape: &Attention| -> Result<(), Failed> {
        let (mut out, mut lse) = (device.empty::<f32>("test", 12)?, device.empty::<f32>("test", 3)?);
        let qkv = Qkv { q: &q, k: &k, v: &k };
        Ok(device::attention_at(&device, shape, &metadata, qkv, None, &mut out, &mut lse)?)
    };
    at(&shape)?;
    for wrong in [Attention { keys: 6, ..shape }, Attention { batch: 1, ..shape }, Attention { head_dim: 8, ..shape }] {
        if at(&wrong).is_ok() {
            return Err(format!("{wrong:?} is taken").into());
        }
    }
    Ok(())
}

/// A sum of any type beside an output of any type.
fn sums(changes: &[Change]) -> Result<(), Failed> {
    fn of<I: Stored, M: Stored, O: Stored>(device: &Device) -> Result<(), Failed> {
        for n in [7, 264, 777] {
            let rows = 3;
            let shape = RmsNorm { rows, n, eps: 1e-6, rounding: Rounding::Once, weight_offset: true };
            let value = |i: usize| I::narrow(((i * 2654435761 % 1000) as f32 - 500.0) / 300.0);
            let host = |from: usize, len: usize| (from..from + len).map(value).collect::<Vec<I>>();
            let (x, residual, w) = (host(0, rows * n), host(5000, rows * n), host(9000, n));
            let (mut sum, mut y) = (vec![M::default(); rows * n], vec![O::default(); rows * n]);
            samebits_ops::add_rms_norm(&cpu(), &shape, &x, &residual, &w, &mut sum, &mut y)?;
            let up = |host: &[I]| device.upload("test", host);
            let (mut sum_there, mut y_there) =
                (device.empty::<M>("test", rows * n)?, device.empty::<O>("test", rows * n)?);
            device::add_rms_norm(device, &shape, &up(&x)?, &up(&residual)?, &up(&w)?, &mut sum_there, &mut y_there)?;
            let (mut found_sum, mut found) = (vec![M::default(); rows * n], vec![O::default(); rows * n]);
            sum_there.download(device, &mut found_sum)?;
            y_there.download(device, &mut found)?;
            let wide = |values: &[M]| values.iter().map(|v| v.widen().to_bits()).collect::<Vec<_>>();
            let wide_y = |values: &[O]| values.iter().map(|v| v.widen().to_bits()).collect::<Vec<_>>();
            if wide(&sum) != wide(&found_sum) || wide_y(&y) != wide_y(&found) {
                return Err(format!("{} {} {} {n}: other bits", I::NAME, M::NAME, O::NAME).into());
            }
        }
        Ok(())
    }
    fn inputs<I: Stored>(device: &Device) -> Result<(), Failed> {
        of::<I, bf16, bf16>(device)?;
        of::<I, bf16, f32>(device)?;
        of::<I, f32, bf16>(device)?;
        of::<I, f32, f16>(device)?;
        of::<I, f16, f32>(device)?;
        of::<I, f16, bf16>(device)
    }
    let device = Device::new(Box::new(Emulator::new(changes, false)?), usize::MAX, usize::MAX);
    inputs::<bf16>(&device)?;
    inputs::<f16>(&device)?;
    inputs::<f32>(&device)
}

fn unrounded_sum() -> Result<(), Failed> {
    let from = "a.v[j] = widen(narrow<Sum>(__fadd_rn(a.v[j], b.v[j])));";
    fails(sums(&[Change { file: "add_rms_norm.cu", from, to: "a.v[j] = __fadd_rn(a.v[j], b.v[j]);" }]), ": other bits")
}

/// The workspace of linear_logprob grows neither with the vocabulary nor with the rows, and says when a row was summed
/// again.
fn bounded_logits() -> Result<(), Failed> {
    let device = emulated(&[], false)?;
    let bytes = |answer: &Answer| answer.ledger.get("workspace_f32_bytes").copied();
    let most = Some(4 * 2 * (2048 + 16384 + 40 + 2));
    for case in [linear(2, 16384), linear(2, 16400), linear(2, 20000)] {
        let answer = agree(&device, &case)?;
        if bytes(&answer) != most {
            return Err(format!("{:?}, {}", answer.ledger, answer.plan).into());
        }
    }
    let mut case = linear(9, 500);
    case.config.budget = Some(8424);
    if bytes(&agree(&device, &case)?) != Some(8424) {
        return Err("more than the budget".into());
    }
    let slow = |case: &Case| -> Result<bool, Failed> { Ok(agree(&device, case)?.ledger.contains_key("slow_paths")) };
    match (slow(&wide_logits(DType::Fp32, DType::Fp32))?, slow(&linear(3, 300))?) {
        (true, false) => Ok(()),
        found => Err(format!("rows that were summed again: {found:?}").into()),
    }
}

/// A device without room for a plan is asked for a smaller one; without room for any, the answer says so.
fn full_device() -> Result<(), Failed> {
    let (m, v) = (64, 700);
    let tensors = 2 * 32 * (m + v) + 3 * 4 * m + 4 * 256;
    let device = |room: usize| -> Result<CudaImplementation, Failed> {
        let driver = Emulator::with_room(&[], false, room)?;
        Ok(CudaImplementation::new(Ok(Device::new(Box::new(driver), usize::MAX, usize::MAX)), cpu()))
    };
    let answer = agree(&device(tensors + 20 * 4 * (704 + 2090))?, &linear(m, v))?;
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
    case.config.budget = Some(4 * 2 * (112 + 2090));
    let answer = agree(&device, &case)?;
    if !answer.plan.contains("rows 2") {
        return Err(answer.plan.into());
    }
    case.config.budget = Some(8423);
    let answer = device.run(&case);
    if answer.smallest_budget != Some(8424) {
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

/// `same_as` of the contract: every case is held to the answer of `ours/cpu`, and a mutant turns it red.
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
            recordings: checkpoints.recordings(),
            machine: &Machine::default(),
        };
        let plan = plan(&contract, device.name(), &selection);
        let records: Vec<_> = plan.iter().flat_map(|group| judge.group(group)).collect();
        (records.len(), records.iter().filter(|record| record.verdict.is_red()).count())
    };
    let mutant = MUTANTS.into_iter().find(|mutant| mutant.name == "lanes_fold_the_other_way").expect("it is there");
    let (right, wrong) = (counts(&emulated(&[], false)?), counts(&emulated(&[mutant.change], false)?));
    if right.0 < 10 || right.1 != 0 || wrong.1 == 0 {
        return Err(format!("records and red ones: {right:?}, of the mutant {wrong:?}").into());
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
