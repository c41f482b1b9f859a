//! The device's kernels through NVIDIA's compiler, which needs no device: every kernel becomes assembly and machine code for
//! each architecture, holds no arithmetic that a compiler may change, and takes the registers and memory that were recorded.
//!
//! NVRTC is found by `ci/nvrtc`, which sets SAMEBITS_NVRTC=1: then a missing compiler is an error, else the trials say that
//! they were not run. The record names what each unit was compiled from: its text and headers, the options, the compiler
//! and this file. A unit that is the recorded one is not compiled again; SAMEBITS_NVRTC=all, of ci/nightly, compiles all of
//! them, and every pair of types. The planted faults are compiled every time.

use libtest_mimic::{Arguments, Failed, Trial};
use samebits_ops::device::cuda::{Compiled, compile, compiler_version, options};
use samebits_ops::device::{Build, HEADERS, Unit, units};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const ARCHS: [&str; 3] = ["sm_80", "sm_90", "sm_100"];
/// Types of inputs and outputs whose resources are recorded; the others are compiled for one architecture.
const RECORDED: [[&str; 2]; 2] = [["bf16", "bf16"], ["fp32", "fp32"]];
/// Those of the others that every change compiles: the type that is left. The other six take the same text with other
/// conversions, which these hold too; SAMEBITS_NVRTC=all compiles them.
const OTHERS: [[&str; 2]; 1] = [["fp16", "fp16"]];

/// Lines of the record: `unit NAME` with the digest of what it was compiled from, and `ARCH IN OUT KERNEL` with its resources.
type Resources = BTreeMap<String, String>;

/// What the environment asks for.
fn mode() -> Option<String> {
    std::env::var("SAMEBITS_NVRTC").ok()
}

fn main() {
    let arguments = Arguments::from_args();
    let required = mode().is_some();
    let version = compiler_version();
    let kept = std::fs::read_to_string(record_path()).map(|text| parse(&text)).unwrap_or_default();
    let found: Arc<Mutex<Resources>> = Arc::default();
    let mut again = Vec::new();
    let mut trials = Vec::new();
    let mut add = |name: String, trial: Box<dyn FnOnce() -> Result<(), Failed> + Send>| {
        trials.push(Trial::test(name, trial).with_ignored_flag(version.is_err() && !required));
    };
    for unit in units() {
        let recorded = version.as_deref().ok().and_then(|version| as_recorded(unit, version, &kept));
        if mode().as_deref() != Some("all")
            && let Some(lines) = recorded
        {
            found.lock().expect("no panic while holding the lock").extend(lines);
            continue;
        }
        again.push(unit.name);
        for arch in ARCHS {
            let found = found.clone();
            add(format!("{}::{arch}", unit.name), Box::new(move || kernels(unit, arch, &found)));
        }
        add(format!("{}::other_types", unit.name), Box::new(move || other_types(unit)));
    }
    for fault in FAULTS {
        add(format!("faults::{}", fault.name), Box::new(move || caught(&fault)));
    }
    add("faults::a_changed_record".into(), Box::new(changed_record));
    add("faults::a_changed_header".into(), Box::new(changed_header));
    add("faults::another_record".into(), Box::new(another_record));
    let units = units().count();
    println!("{} of {units} units are those of {RECORD}; compiled: {}", units - again.len(), again.join(" "));
    let mut conclusion = libtest_mimic::run(&arguments, trials);
    // The record can be compared once everything has been compiled.
    let whole = arguments.filter.is_none() && version.is_ok() && !conclusion.has_failed();
    if whole
        && let Err(e) = record(&mut found.lock().expect("no panic while holding the lock"), &version.expect("is ok"))
    {
        eprintln!("resources: {e}");
        conclusion.num_failed += 1;
    }
    conclusion.exit();
}

/// Name and text of the headers that `text` includes, themselves and what they include.
fn headers(text: &str, into: &mut BTreeSet<(&'static str, &'static str)>) {
    for (name, header) in HEADERS {
        if text.contains(&format!("#include \"{name}\"")) && into.insert((name, header)) {
            headers(header, into);
        }
    }
}

/// Of everything that a unit's assembly, its resources and the verdict over them depend on, and of the resources.
fn digest(unit: &'static Unit, version: &str, resources: &Resources) -> String {
    let mut parts =
        vec![version.to_string(), include_str!("nvrtc.rs").into(), unit.kernels.join(" "), unit.source.into()];
    parts.extend(resources.iter().flat_map(|(key, value)| [key.clone(), value.clone()]));
    let types = RECORDED.into_iter().chain(OTHERS);
    parts.extend(types.flat_map(|[input, output]| options(&build(unit, input, output, unit.has_product), "")));
    let mut included = BTreeSet::new();
    headers(unit.source, &mut included);
    parts.extend(included.into_iter().flat_map(|(name, text)| [name.to_string(), text.to_string()]));
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Keys of the resources of a unit.
fn keys(unit: &Unit) -> Vec<String> {
    let types = RECORDED.map(|types| types.join(" "));
    let builds = ARCHS.iter().flat_map(|arch| types.iter().map(move |types| format!("{arch} {types}")));
    builds.flat_map(|build| unit.kernels.iter().map(move |kernel| format!("{build} {kernel}"))).collect()
}

/// The resources of a unit, if they are all there.
fn of_unit(unit: &Unit, lines: &Resources) -> Option<Resources> {
    keys(unit).into_iter().map(|key| lines.get(&key).map(|value| (key, value.clone()))).collect()
}

/// The lines of a unit in the record, if they were made from what it is now.
fn as_recorded(unit: &'static Unit, version: &str, kept: &Resources) -> Option<Resources> {
    let lines = of_unit(unit, kept)?;
    (kept.get(&format!("unit {}", unit.name)) == Some(&digest(unit, version, &lines))).then_some(lines)
}

fn build(unit: &'static Unit, input: &'static str, output: &'static str, tf32: bool) -> Build {
    Build { unit: unit.name, input, output: if unit.has_out { output } else { "fp32" }, tf32 }
}

/// Compiles the recorded types for `arch`, checks the assembly, and takes note of the resources.
fn kernels(unit: &'static Unit, arch: &str, found: &Mutex<Resources>) -> Result<(), Failed> {
    for [input, output] in RECORDED {
        let build = build(unit, input, output, false);
        let compiled = checked(&build, unit.source, arch)?;
        for (kernel, resources) in resources(unit, &compiled)? {
            let key = format!("{arch} {input} {output} {kernel}");
            found.lock().expect("no panic while holding the lock").insert(key, resources);
        }
    }
    Ok(())
}

/// Compiles other combinations of types, and TF32, for sm_90.
fn other_types(unit: &'static Unit) -> Result<(), Failed> {
    let types = ["bf16", "fp16", "fp32"];
    let all = mode().as_deref() == Some("all");
    for input in types {
        for output in types {
            let build = build(unit, input, output, false);
            // Without a type of outputs there is one build to a type of inputs, and two are recorded.
            let pair = [input, output];
            let taken = if unit.has_out { all || OTHERS.contains(&pair) } else { pair == ["fp16", "fp32"] };
            if !RECORDED.contains(&[input, output]) && taken {
                checked(&build, unit.source, "sm_90")?;
            }
        }
    }
    if unit.has_product {
        checked(&build(unit, "fp32", "fp32", true), unit.source, "sm_90")?;
    }
    Ok(())
}

/// Compiles `source`; an error where its assembly depends on what a compiler may change, or holds what no kernel may.
fn checked(build: &Build, source: &str, arch: &str) -> Result<Compiled, Failed> {
    let compiled = compile(build, source, arch, &["--ptxas-options=-v"])?;
    if !compiled.cubin.starts_with(b"\x7fELF") {
        return Err("the machine code is no ELF file".into());
    }
    let kernels = build.source().kernels;
    if let Some(missing) = kernels.iter().find(|kernel| !compiled.ptx.contains(&format!(".entry {kernel}("))) {
        return Err(format!("no kernel {missing} in the assembly").into());
    }
    if compiled.ptx.matches(".entry ").count() != kernels.len() {
        return Err("a kernel is missing in the list of the unit".into());
    }
    instructions(&compiled.ptx)?;
    // What the compiler would contract if it might: nothing, since every operation names its rounding. The text is the same for
    // every architecture, so one is asked.
    if arch != "sm_90" {
        return Ok(compiled);
    }
    // Of the assembly alone: a virtual architecture has no machine code.
    let contracted = compile(build, source, &arch.replace("sm_", "compute_"), &["--fmad=true"])?;
    let (strict, free) = (arithmetic(&compiled.ptx), arithmetic(&contracted.ptx));
    match strict.iter().chain(&free).find(|(name, _)| strict.get(*name) != free.get(*name)) {
        Some((name, _)) => Err(format!(
            "contraction would change how often there is `{name}`, from {:?} to {:?}",
            strict.get(name),
            free.get(name)
        )
        .into()),
        None => Ok(compiled),
    }
}

/// How often each operation on floats stands in the assembly, whether or not it names its rounding.
fn arithmetic(ptx: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for line in body(ptx) {
        let Some(instruction) = line.split_whitespace().find(|word| !word.starts_with('@')) else { continue };
        let parts: Vec<&str> = instruction.split('.').filter(|part| *part != "rn").collect();
        let float = parts.last().is_some_and(|kind| ["f32", "f64"].contains(kind));
        if float && ["fma", "mul", "add", "sub", "mad"].contains(&parts[0]) {
            *counts.entry(parts.join(".")).or_default() += 1;
        }
    }
    counts
}

/// Lines of the assembly but comments and lines that name the compilation.
fn body(ptx: &str) -> Vec<&str> {
    ptx.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")).collect()
}

/// Arithmetic of floats that the kernels may hold. Everything else on a float type is refused.
const ALLOWED: [&str; 35] = [
    "fma.rn.f32",
    "mul.rn.f32",
    "add.rn.f32",
    "sub.rn.f32",
    "div.rn.f32",
    "rcp.rn.f32",
    "sqrt.rn.f32",
    "fma.rn.f64",
    "mul.rn.f64",
    "add.rn.f64",
    "sub.rn.f64",
    "div.rn.f64",
    "sqrt.rn.f64",
    "neg.f32",
    "abs.f32",
    "min.f32",
    "max.f32",
    "copysign.f32",
    // Exact, or the rounding of section 1.
    "cvt.rni.f32.f32",
    "cvt.rn.f32.f64",
    "cvt.f64.f32",
    "cvt.f32.f16",
    "cvt.rn.f16.f32",
    "cvt.rzi.s32.f32",
    "cvt.rzi.u64.f32",
    "cvt.rzi.u64.f64",
    "cvt.rn.f32.s32",
    "cvt.rn.f32.s64",
    "cvt.rn.f64.s32",
    "cvt.rn.f32.u32",
    "cvt.rn.f64.u32",
    // Of pairs of bf16, for the reference point of logprob.
    "max.NaN.bf16x2",
    "min.NaN.bf16x2",
    // Copies and comparisons.
    "mov.f32",
    "mov.f64",
];

/// Instructions on floats that compute nothing.
const MOVES: [&str; 6] = ["ld.", "st.", "setp.", "selp.", "mov.", "shfl."];

/// Refuses approximate, flushing, contracted or unnamed arithmetic.
fn instructions(ptx: &str) -> Result<(), Failed> {
    let mut seen = 0;
    for line in body(ptx) {
        let line = line.split_once("} ").map_or(line, |(_, rest)| rest);
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        let instruction = if first.starts_with('@') { words.next().unwrap_or_default() } else { first };
        let instruction = instruction.trim_end_matches(';');
        let is_float = [".f16", ".f32", ".f64", ".bf16"].iter().any(|kind| instruction.contains(kind));
        let bad = [".approx", ".ftz", ".sat", "mad."].iter().any(|part| instruction.contains(part));
        if !is_float || instruction.starts_with('.') {
            continue;
        }
        seen += 1;
        let moves = MOVES.iter().any(|prefix| instruction.starts_with(prefix));
        if bad || !(moves || ALLOWED.contains(&instruction)) {
            return Err(format!("`{instruction}` is not allowed: {line}").into());
        }
    }
    if seen == 0 && ptx.contains(".f32") { Err("no float instruction was found".into()) } else { Ok(()) }
}

/// Registers, spills, stack and shared memory of each kernel, from the assembler's log.
fn resources(unit: &Unit, compiled: &Compiled) -> Result<Vec<(String, String)>, Failed> {
    let mut found = Vec::new();
    let mut current: Option<&str> = None;
    let mut stack = String::new();
    for line in compiled.log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            current = rest.split('\'').next();
        } else if line.contains("bytes stack frame") {
            let numbers: Vec<&str> = line.split_whitespace().filter(|word| word.parse::<u32>().is_ok()).collect();
            stack = format!("stack {} spills {}", numbers[0], numbers[1..].join("+"));
        } else if let (Some(kernel), Some((_, rest))) = (current, line.split_once("Used ")) {
            let registers = rest.split_whitespace().next().unwrap_or_default();
            let shared = rest.split(", ").find_map(|part| part.strip_suffix(" bytes smem")).unwrap_or("0");
            found.push((kernel.to_string(), format!("registers {registers} {stack} shared {shared}")));
            current = None;
        }
    }
    if found.len() == unit.kernels.len() {
        Ok(found)
    } else {
        Err(format!("the log tells of {} kernels, not {}:\n{}", found.len(), unit.kernels.len(), compiled.log).into())
    }
}

const RECORD: &str = "tests/cuda/resources.txt";

fn record_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(RECORD)
}

/// Compares with the record, or writes it where SAMEBITS_NVRTC is `record`.
fn record(found: &mut Resources, version: &str) -> Result<(), String> {
    for unit in units() {
        let lines = of_unit(unit, found).ok_or_else(|| format!("{} was not compiled for all", unit.name))?;
        found.insert(format!("unit {}", unit.name), digest(unit, version, &lines));
    }
    let mut text = format!("nvrtc {version}\n");
    found.iter().for_each(|(kernel, resources)| text += &format!("{kernel}: {resources}\n"));
    let path = record_path();
    if mode().as_deref() == Some("record") {
        return std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()));
    }
    let kept = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    compare(&kept, &text)
}

/// The lines of a record but the first, which names the compiler.
fn parse(text: &str) -> Resources {
    let lines = text.lines().skip(1).filter_map(|line| line.split_once(": "));
    lines.map(|(key, value)| (key.to_string(), value.to_string())).collect()
}

/// An error that names the first difference. Another compiler may take other registers, so it has nothing to compare. A unit
/// whose text alone differs from the record's is as good.
fn compare(kept: &str, found: &str) -> Result<(), String> {
    if kept.lines().next() != found.lines().next() {
        eprintln!("resources: NOT COMPARED, {} is recorded and {} is here", first(kept), first(found));
        return Ok(());
    }
    let lines = |text: &str| -> Vec<String> {
        let units = |line: &&str| !line.starts_with("unit ");
        text.lines().filter(units).map(String::from).collect()
    };
    let (kept, found) = (lines(kept), lines(found));
    let fix = "if that is meant, SAMEBITS_NVRTC=record ci/nvrtc writes the record anew";
    match kept.iter().zip(&found).find(|(kept, found)| kept != found) {
        Some((kept, found)) => Err(format!("recorded `{kept}`, found `{found}`; {fix}")),
        None if kept.len() != found.len() => Err(format!("other kernels than recorded; {fix}")),
        None => Ok(()),
    }
}

fn first(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn changed_record() -> Result<(), Failed> {
    let kept = "nvrtc 1.2\na: registers 32\nb: registers 40\n";
    compare(kept, kept)?;
    if compare("nvrtc 1.1\n", kept).is_err() {
        return Err("another compiler's registers are compared".into());
    }
    for found in [kept.replace("40", "41"), kept.replace("b: registers 40\n", "")] {
        if compare(kept, &found).is_ok() {
            return Err("a changed record is not seen".into());
        }
    }
    Ok(())
}

/// A record of other text, another compiler or other resources is not taken for that of a unit.
fn another_record() -> Result<(), Failed> {
    let [add, scale] = ["add", "scale"].map(|name| units().find(|unit| unit.name == name).expect("there is one"));
    let mut lines: Resources = keys(add).into_iter().map(|key| (key, "registers 32".to_string())).collect();
    lines.insert("unit add".into(), digest(add, "1", &lines));
    let (mut other, mut fewer) = (lines.clone(), lines.clone());
    *other.values_mut().next().expect("there are some") = "registers 33".into();
    fewer.pop_first();
    let of_scale = lines.iter().map(|(key, value)| (key.replace("add", "scale"), value.clone())).collect();
    match [
        as_recorded(add, "1", &lines).is_some(),
        as_recorded(add, "2", &lines).is_none(),
        as_recorded(add, "1", &other).is_none(),
        as_recorded(add, "1", &fewer).is_none(),
        as_recorded(scale, "1", &of_scale).is_none(),
    ] {
        [true, true, true, true, true] => Ok(()),
        held => Err(format!("taken, and not taken in four cases: {held:?}").into()),
    }
}

fn changed_header() -> Result<(), Failed> {
    let unit = units().find(|unit| unit.name == "silu_mul").expect("there is one");
    let mut included = BTreeSet::new();
    headers(unit.source, &mut included);
    let names: Vec<&str> = included.iter().map(|(name, _)| *name).collect();
    // elementwise.cuh by itself, element.cuh and machine.cuh through it.
    if !["element.cuh", "elementwise.cuh", "machine.cuh", "math.cuh"].iter().all(|name| names.contains(name)) {
        return Err(format!("of the headers of silu_mul only {names:?} are found").into());
    }
    // What a text includes and nobody finds would not be in the digest.
    for (name, text) in HEADERS.into_iter().chain(units().map(|unit| (unit.name, unit.source))) {
        let asked = text.matches("#include \"").count();
        let known = HEADERS.iter().filter(|(name, _)| text.contains(&format!("#include \"{name}\""))).count();
        if asked != known {
            return Err(format!("{name} includes {asked} headers, of which {known} are known").into());
        }
    }
    Ok(())
}

/// A change of a kernel that must be refused, and a part of the message.
#[derive(Clone, Copy)]
struct Fault {
    name: &'static str,
    unit: &'static str,
    from: &'static str,
    to: &'static str,
    says: &'static str,
}

const FAULTS: [Fault; 5] = [
    Fault {
        name: "contractible_sum",
        unit: "gemm",
        from: "sums[row * PER + p] = __fmaf_rn(all[j], own[p][j], sums[row * PER + p]);",
        to: "sums[row * PER + p] = all[j] * own[p][j] + sums[row * PER + p];",
        says: "contraction would change",
    },
    Fault {
        name: "approximate_division",
        unit: "attention",
        from: "__fdiv_rn(total, l)",
        to: "__fdividef(total, l)",
        says: "div.approx",
    },
    Fault {
        name: "approximate_exponential",
        unit: "attention",
        from: "w[r] = weight(split.m, split.i, n[r]);",
        to: "w[r] = exp2f(s) * weight(split.m, split.i, n[r]);",
        says: "is not allowed",
    },
    Fault { name: "flush_to_zero", unit: "add", from: "__fadd_rn(a, b)", to: "flushed(a, b)", says: "add.ftz" },
    Fault {
        name: "no_kernel",
        unit: "add",
        from: "KERNEL(256, 4) add(",
        to: "KERNEL(256, 4) plus(",
        says: "no kernel add",
    },
];

fn caught(fault: &Fault) -> Result<(), Failed> {
    let unit = units().find(|unit| unit.name == fault.unit).expect("the fault names a unit");
    assert_eq!(unit.source.matches(fault.from).count(), 1, "`{}` in {}.cu", fault.from, fault.unit);
    let flushed = "#include \"element.cuh\"\nDEVICE float flushed(float a, float b) { float c; \
                   asm(\"add.ftz.f32 %0, %1, %2;\" : \"=f\"(c) : \"f\"(a), \"f\"(b)); return c; }\n";
    let source = flushed.to_string() + &unit.source.replace(fault.from, fault.to);
    let build = build(unit, "bf16", "bf16", false);
    let result = checked(&build, &source, "sm_90").and_then(|compiled| resources(unit, &compiled).map(drop));
    match result {
        Err(e) if e.message().unwrap_or_default().contains(fault.says) => Ok(()),
        Err(e) => Err(format!("caught, but not as `{}`: {}", fault.says, e.message().unwrap_or_default()).into()),
        Ok(()) => Err("the fault was not caught".into()),
    }
}
