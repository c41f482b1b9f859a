use super::*;
use crate::table::narrower;
use crate::tensor::Tensor;

/// The embedded tables with one table edited.
fn edited(file: &str, from: &str, to: &str) -> Result<Contract, ContractError> {
    let mut files = embedded();
    let text = files.get_mut(file).unwrap();
    assert!(text.contains(from), "{file} lacks {from}");
    *text = text.replacen(from, to, 1);
    parse(&files, "2026-11-21")
}

/// The edit is refused at the line where `near` stands, in words that contain `words`.
#[track_caller]
fn refused(file: &str, from: &str, to: &str, near: &str, words: &str) {
    let error = edited(file, from, to).expect_err("accepted");
    let text = embedded()[file].replacen(from, to, 1);
    let line = 1 + text.lines().position(|line| line.contains(near)).unwrap_or_else(|| panic!("no line has {near}"));
    assert_eq!(error.file, file);
    assert!(error.message.contains(words), "{error}");
    // An entry is named by the line of its header, a few above its fields.
    assert!((0..=5).contains(&(line as i64 - error.line as i64)), "{error}: expected near line {line}");
    assert!(!error.message.contains('\n'), "{error}");
}

pub(crate) fn a_folder_gives_the_embedded_contract() {
    let embedded = Contract::load(None).unwrap();
    let folder = Contract::load(Some(Path::new(env!("CARGO_MANIFEST_DIR")))).unwrap();
    assert_eq!(embedded.digest(), folder.digest());
    assert_eq!(embedded.digest().len(), 64);
    let changed = edited("ws1.toml", "version = \"1.0.0\"", "version = \"1.0.1\"").unwrap();
    assert_ne!(embedded.digest(), changed.digest());
    let missing = tempfile::tempdir().unwrap();
    assert!(Contract::load(Some(missing.path())).unwrap_err().message.contains("ops/<op>.toml"));
}

pub(crate) fn a_folder_with_a_stray_or_missing_table_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("ops")).unwrap();
    for (path, text) in embedded() {
        std::fs::write(folder.path().join(path), text).unwrap();
    }
    Contract::load(Some(folder.path())).unwrap();
    std::fs::write(folder.path().join("ops/gem.toml"), "").unwrap();
    assert!(Contract::load(Some(folder.path())).unwrap_err().message.contains("no table of an op"));
    std::fs::rename(folder.path().join("ops/gem.toml"), folder.path().join("gem.toml")).unwrap();
    std::fs::remove_file(folder.path().join("ops/gemm.toml")).unwrap();
    let error = Contract::load(Some(folder.path())).unwrap_err();
    assert_eq!((error.file.as_str(), error.line), ("ops/gemm.toml", 1));
}

pub(crate) fn unknown_words_are_refused() {
    refused("ws1.toml", "tf32 = \"disabled\"", "tf_32 = \"disabled\"", "tf_32", "unknown field");
    refused("ws1.toml", "tf32 = \"disabled\"", "tf32 = \"fast\"", "[policy]", "disabled");
    refused("ws1.toml", "profile = \"ieee\"", "profile = \"sm90\"", "profile", "ieee");
    refused("ws1.toml", "name = \"fp16\"", "name = \"fp17\"", "\"fp17\"", "fp17");
    refused("ws1.toml", "\"elementwise\", ", "\"elementary\", ", "\"elementary\"", "elementary");
    refused("ops/gemm.toml", "\"cancel\", ", "\"chancel\", ", "\"small\"", "chancel");
    let row = "accuracy.ulp = 0.5";
    refused("ops/gemm.toml", "\"position\"", "\"positron\"", row, "positron");
    refused("ops/gemm.toml", "\"position\"", "\"schedule\"", row, "schedule");
    refused("ops/gemm.toml", "impls = [\"*\"]", "impls = [\"ours/gpu\"]", "ours/gpu", "impls.toml");
    refused("ops/gemm.toml", "\"bf16\", \"fp16\"", "\"bf16\", \"fp8\"", "stem = \"small\"", "fp8 is out of scope");
    refused("ops/gemm.toml", "M = 5, ", "M = 5, Q = 2, ", "stem = \"small\"", "axis `Q`");
    refused("ops/gemm.toml", "M = 5, ", "", "stem = \"small\"", "lacks M");
    refused("ops/gemm.toml", "k_total = \"1024\"", "k_totl = \"1024\"", "stem = \"eighth\"", "no such parameter");
    refused("ops/gemm.toml", "tf32 = \"enabled\"", "tf32 = \"on\"", "stem = \"tf32\"", "disabled or enabled");
    refused("ops/gemm.toml", "op = \"gemm\"", "op = \"gem\"", "op = ", "must be \"gemm\"");
    refused("ops/attention.toml", "[0, 1, 4]", "[0, 1]", "stem = \"hidden\"", "needs 3");
    let vectors = "stem = \"vector\"";
    refused("ops/rope.toml", "\"3x2x32-1\"", "\"../3x2x32-1\"", vectors, "use letters, digits");
    refused("ops/rope.toml", "\"recorded\"", "\"normal\"", vectors, "`vectors` goes with fills");
    refused("ops/rope.toml", "vectors = [", "shape = { T = 1 }\nvectors = [", vectors, "`vectors` goes with fills");
    refused("impls.toml", "about", "abuot", "abuot", "unknown field");
}

pub(crate) fn gaps_and_duplicates_are_refused() {
    refused(
        "ws1.toml",
        "\"fp16\"]\njudgments = [\"accuracy\"]\natol = 5e-3",
        "\"fp16\"]\njudgments = [\"golden\"]\natol = 5e-3",
        "atol = 5e-3",
        "does not fit",
    );
    refused(
        "ws1.toml",
        "dtypes = [\"fp16\"]\njudgments = [\"accuracy\"]\natol = 5e-3",
        "dtypes = [\"bf16\"]\njudgments = [\"accuracy\"]\natol = 5e-3",
        "atol = 5e-3",
        "duplicate cell",
    );
    let error = edited(
        "ws1.toml",
        "classes = [\"attention\"]\ndtypes = [\"bf16\", \"fp16\", ",
        "classes = [\"attention\"]\ndtypes = [\"bf16\", ",
    )
    .unwrap_err();
    assert!(error.message.contains("tight` lacks the cell attention x forward x fp16 x accuracy"), "{error}");
    let error = edited("ops/add.toml", "impls = [\"*\"]", "impls = [\"*\"]\nouts = [\"bf16\"]").unwrap_err();
    assert!(error.message.contains("no [[row]] for `ours/cpu` on `add/bf16/small-normal-fp16`"), "{error}");
    let row = "impls = [\"*\"]\n";
    let twice = format!("{row}invariant = []\n\n[[row]]\n{row}");
    let error = edited("ops/add.toml", row, &twice).unwrap_err();
    assert!(error.message.contains("duplicate row"), "{error}");
    let shadowed = format!("{row}invariant = []\n\n[[row]]\nouts = [\"bf16\"]\n{row}");
    let error = edited("ops/add.toml", row, &shadowed).unwrap_err();
    assert!(error.message.contains("never the first"), "{error}");
    refused("ops/softmax.toml", "stem = \"mid\"", "stem = \"small\"", "\"near_overflow\", \"peaky\"", "already made");
    let error = edited(
        "ops/argmax.toml",
        "slice = \"quick\"\nfills = [\"normal\", \"edges\"]\nshape = { R = 12, N = 33 }\ndtypes = [\"bf16\", \"fp16\", \"fp32\"]",
        "slice = \"exhaustive\"\nfills = [\"normal\"]\nshape = { R = 12, N = 33 }\ndtypes = [\"bf16\"]",
    );
    assert!(error.is_ok(), "other cases cover argmax");
    let all = &embedded()["ops/argmax.toml"];
    let bare = all.replace("\"fp16\", ", "");
    let error = edited("ops/argmax.toml", all, &bare).unwrap_err();
    assert!(error.message.contains("no case with fp16 input and fp32 output"), "{error}");
}

pub(crate) fn an_op_may_promise_more_than_its_class_and_never_less() {
    let own = |text: &str| {
        let provenance = "source = \"a test\", samples = 0, date = \"2026-11-21\"";
        edited("ops/add.toml", "invariant =", &format!("accuracy = {{ {text}, {provenance} }}\ninvariant ="))
    };
    own("ulp = 0.5, condition_factor = 3.5, p99_ulp = 0.5").unwrap();
    let error = own("ulp = 0.6, condition_factor = 4").unwrap_err();
    assert!(error.message.contains("accuracy.ulp is looser than class elementwise x bf16 (ws1.toml:"), "{error}");
    assert!(own("ulp = 0.5, condition_factor = 4.5").unwrap_err().message.contains("condition_factor"));
    assert!(own("ulp = 0.5, condition_factor = nan").unwrap_err().message.contains("finite"));
    assert!(own("ulp = 0.5, condition_factor = 1, atol = 1").unwrap_err().message.contains("unknown field"));
}

pub(crate) fn a_waiver_has_a_reason_and_an_end() {
    let waive = |text: &str| {
        edited("ops/add.toml", "invariant =", &format!("waive = {{ judgment = \"invariance\", {text} }}\ninvariant ="))
    };
    let contract = waive("axis = \"isa\", reason = \"known\", expires = \"2026-11-21\"").unwrap();
    let case = contract.case("add/bf16/small-normal-fp32").unwrap();
    let waiver = contract.row("ours/cpu", case).unwrap().waive.clone().unwrap();
    assert!(waiver.covers(Judgment::Invariance, Some("isa")));
    assert!(!waiver.covers(Judgment::Invariance, Some("batch")) && !waiver.covers(Judgment::Accuracy, None));
    assert!(waive("reason = \"known\", expires = \"2026-11-20\"").unwrap_err().message.contains("expired"));
    assert!(waive("reason = \" \", expires = \"2027-01-01\"").unwrap_err().message.contains("waive.reason"));
    for no_day in ["soon", "2027-02-29", "2027-04-31", "2027-13-01", "2100-02-29"] {
        let message = waive(&format!("reason = \"known\", expires = \"{no_day}\"")).unwrap_err().message;
        assert!(message.contains("YYYY-MM-DD"), "{message}");
    }
    assert!(waive("reason = \"known\", expires = \"2096-02-29\"").is_ok());
    assert!(waive("axis = \"width\", reason = \"known\", expires = \"2027-01-01\"").is_err());
}

pub(crate) fn the_first_row_that_matches_holds() {
    let special = "impls = [\"ours/*\"]\nfills = [\"edges\"]\nstems = [\"sm*\"]\ninvariant = [\"repeat\"]\n\n[[row]]\nimpls = [\"*\"]";
    let contract = edited("ops/softmax.toml", "impls = [\"*\"]", special).unwrap();
    let axes = |name: &str| contract.row("ours/cpu", contract.case(name).unwrap()).unwrap().invariant.len();
    assert_eq!(axes("softmax/bf16/small-edges-bf16"), 1);
    assert_eq!((axes("softmax/bf16/small-normal-bf16"), axes("softmax/bf16/mid-edges-bf16")), (12, 12));
}

pub(crate) fn bounds_come_from_row_class_and_set() {
    let contract = Contract::load(None).unwrap();
    assert_eq!(contract.default_rows(), "tight");
    let bound = |rows: &str, name: &str, output| {
        let case = contract.case(name).unwrap();
        contract.bound(rows, contract.row("ours/cpu", case).unwrap(), case, output, Judgment::Accuracy)
    };
    let published = Some(Bound::AtolRtol { atol: 5e-2, rtol: 2e-2 });
    assert_eq!(bound("published", "gemm/bf16/small-normal-fp32", DType::Fp32), published);
    assert_eq!(bound("published", "gemm/fp32/small-normal-bf16", DType::Bf16), published);
    // Cancelling sums were never what the published rows are about.
    let tight = bound("tight", "gemm/bf16/small-cancel-fp32", DType::Fp32).unwrap();
    assert!(matches!(tight, Bound::Ulp { .. }));
    assert_eq!(bound("published", "gemm/bf16/small-cancel-fp32", DType::Fp32), Some(tight));
    assert_eq!(bound("loose", "gemm/bf16/small-cancel-fp32", DType::Fp32), None);
    assert_eq!(narrower(DType::Fp32, DType::Fp16), DType::Fp16);
    assert_eq!(narrower(DType::Bf16, DType::I32), DType::Bf16);
}

pub(crate) fn the_table_prints_every_part() {
    let text = Contract::load(None).unwrap().to_string();
    for part in [
        "ws1 1.0.0, profile ieee, sha256 ",
        "fp8   out of scope",
        "accumulation fp32; tf32 disabled (alternative: enabled)",
        "published  attention    gradient  bf16  accuracy    atol 5e-2 + rtol 2e-2  [RL-Kernel",
        "tight      chain        forward   bf16  accuracy    rms <= 1 of recorded, max <= 1.25 of recorded",
        "published  reduction    forward   bf16  accuracy    atol 5e-2 + rtol 2e-2",
        "published  reduction    gradient  bf16  accuracy    atol 1e-1 + rtol 2e-2",
        "rms_norm (reduction)",
        "invariant  batch position",
    ] {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
}

pub(crate) fn dates() {
    let today = today();
    assert!(today.as_str() >= "2025-01-01" && today.len() == 10, "{today}");
}

/// Each case that runs by default is a valid question with an answer, and the names say what it is.
pub(crate) fn default_cases_are_valid() {
    let contract = Contract::load(None).unwrap();
    let (mut elements, mut group, mut of_group) = (0, String::new(), 0);
    for case_spec in contract.cases(Slice::Default).filter(|case| case.fill != Fill::Recorded) {
        // The inputs of a group are the same.
        if group == case_spec.group {
            elements += of_group;
            continue;
        }
        let case = case_spec.build();
        let checked = case_spec.spec().validate(&case).unwrap_or_else(|why| panic!("{}: {why}", case.name));
        drop(checked);
        assert_eq!(case.name, format!("{}-{}", case_spec.group, case_spec.out));
        assert!(case.name.starts_with(&format!(
            "{}/{}/{}-{}",
            case.op,
            case_spec.dtype,
            case_spec.stem,
            case_spec.fill.name()
        )));
        (group, of_group) = (case_spec.group.clone(), case.inputs.values().map(|tensor| tensor.len()).sum());
        elements += of_group;
    }
    assert!(elements < 160_000_000, "{elements} input elements by default");
}

/// The oracle's own rounding passes every bound, judges something everywhere, and the default slice is affordable.
pub(crate) fn the_oracle_passes_its_own_bounds() {
    let contract = Contract::load(None).unwrap();
    let (mut group, mut references, mut judged) = (String::new(), BTreeMap::new(), 0);
    let made = |case: &&CaseSpec| case.spec().class != Class::Chain && case.fill != Fill::Recorded;
    for case_spec in contract.cases(Slice::Default).filter(made) {
        let spec = case_spec.spec();
        if group != case_spec.group {
            references = spec.oracle(&case_spec.build()).unwrap();
            group = case_spec.group.clone();
        }
        for output in spec.outputs {
            let dtype = spec.output_dtype(output, case_spec.out);
            let reference = &references[output.name];
            let row = contract.row("ours/cpu", case_spec).unwrap();
            let bound = contract.bound("tight", row, case_spec, dtype, Judgment::Accuracy).unwrap();
            let (measure, evidence) =
                crate::compare::accuracy(output.name, dtype, &reference.rounded(dtype), reference, &bound);
            assert!(evidence.is_none(), "{}: {}", case_spec.name, evidence.unwrap().message);
            // Sharp rows of logits have few weights; among experts that have none the oracle does not choose.
            let few = case_spec.op == "route" && case_spec.fill == Fill::Sharp;
            let least = if few { reference.value.len() / 3 } else { reference.value.len().div_ceil(2) };
            assert!(measure.correctly_rounded == 1.0 && measure.samples >= least, "{}: {measure:?}", case_spec.name);
            judged += measure.samples;
        }
    }
    assert!(judged > 100_000, "{judged}");
}

/// Every class that an output can hold is asked for, and every exception is true.
pub(crate) fn the_classes_are_covered() {
    let contract = Contract::load(None).unwrap();
    let mut problems = Vec::new();
    let mut judged = 0;
    for case in contract.cases(Slice::Quick).filter(|case| contract.covers(case)) {
        let coverage = contract.coverage("ours/cpu", case);
        problems.extend(coverage.missing.iter().chain(&coverage.stale).map(|line| format!("{}: {line}", case.name)));
        judged += usize::from(coverage.covered > 0);
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    let of_floats = |spec: &&Spec| {
        spec.class != Class::Chain && spec.outputs.iter().any(|output| output.fixed_dtype() != Some(DType::I32))
    };
    let asked: usize = spec::all().iter().filter(of_floats).map(|spec| spec.dtypes().len() * spec.outs().len()).sum();
    assert_eq!(judged, asked, "every op with float outputs x input dtype x output dtype");
}

/// What faulty arithmetic makes of a class is outside of the bounds on the cases of fill `classes`, for every op, dtype
/// and class that is covered.
pub(crate) fn what_a_fault_makes_of_a_class_is_refused() {
    use crate::number_class::NumberClass as Class;
    type Spoil = fn(u32, u32) -> u32;
    // Given the bits and the sign bit.
    let faults: [(&str, Class, Spoil); 7] = [
        ("-0 for every zero", Class::PositiveZero, |bits, sign| bits | sign),
        ("+0 for every zero", Class::NegativeZero, |_, _| 0),
        ("subnormals flushed", Class::Subnormal, |bits, sign| bits & sign),
        ("overflow at the largest number", Class::LargestFinite, |bits, _| bits + 1),
        ("saturated", Class::PositiveInfinity, |bits, _| bits - 1),
        ("saturated below", Class::NegativeInfinity, |bits, _| bits - 1),
        ("another NaN", Class::Nan, |bits, _| bits | 1),
    ];
    let contract = Contract::load(None).unwrap();
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for case in contract.cases(Slice::Quick).filter(|case| contract.covers(case)) {
        let alike: Vec<_> = contract
            .cases(Slice::Quick)
            .filter(|other| {
                other.fill == Fill::Classes && (&other.op, other.dtype, other.out) == (&case.op, case.dtype, case.out)
            })
            .map(|other| (other, other.spec().oracle(&other.build()).unwrap()))
            .collect();
        for output in case.spec().outputs {
            let dtype = case.spec().output_dtype(output, case.out);
            if dtype == DType::I32 {
                continue;
            }
            let sign = 1 << (8 * dtype.size() - 1);
            for (fault, class, spoil) in faults {
                let excepted = contract
                    .uncovered()
                    .iter()
                    .any(|entry| entry.classes.contains(&class) && entry.speaks_of(case, output.name, dtype));
                let refused = alike.iter().any(|(other, references)| {
                    let reference = &references[output.name];
                    let right = reference.rounded(dtype);
                    let bytes: Vec<u8> = (0..right.len())
                        .map(|i| right.bits(i))
                        .map(|bits| if Class::of(bits, dtype) == Some(class) { spoil(bits, sign) } else { bits })
                        .flat_map(|bits| bits.to_le_bytes()[..dtype.size()].to_vec())
                        .collect();
                    let spoilt = Tensor::from_bytes(dtype, right.shape(), &bytes).unwrap();
                    let row = contract.row("ours/cpu", other).unwrap();
                    let bound = contract.bound("tight", row, other, dtype, Judgment::Accuracy).unwrap();
                    crate::compare::accuracy(output.name, dtype, &spoilt, reference, &bound).1.is_some()
                });
                assert_eq!(refused, !excepted, "{fault}: `{}` of {}", output.name, case.name);
                *seen.entry(fault).or_default() += usize::from(refused);
            }
        }
    }
    assert!(seen.len() == faults.len() && seen.values().all(|ops| *ops > 50), "{seen:?}");
}

/// The scope of an implementation is what its entry requires; stems narrow what must be there, and one that no case has is
/// refused.
pub(crate) fn what_is_required_is_the_scope() {
    let list = |required: &str| {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let text =
            format!("[[implementation]]\nname = \"mine\"\nabout = \"a program\"\ncommand = [\"true\"]\n{required}\n");
        std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
        let mut contract = Contract::load(None).unwrap();
        contract.add_implementations(file.path()).map(|()| contract)
    };
    let table = "[[implementation.required]]\nops = [\"rms_norm\"]\ndtypes = [\"bf16\"]\nouts = [\"bf16\"]";
    let of = |contract: &Contract, case: &str| {
        let case = contract.case(case).unwrap();
        (contract.asks("mine", case), contract.requires("mine", case))
    };
    let contract = list(&format!("{table}\nstems = [\"!hf*\", \"small\", \"len*\"]")).unwrap();
    for (case, expected) in [
        ("rms_norm/bf16/small-normal-bf16", (true, true)),
        ("rms_norm/bf16/len_n15-normal-bf16", (true, true)),
        ("rms_norm/bf16/hf-normal-bf16", (true, false)),
        ("rms_norm/bf16/mid-wide-bf16", (true, false)),
        ("rms_norm/bf16/small-normal-fp32", (false, false)),
        ("rms_norm/fp32/small-normal-bf16", (false, false)),
        ("gemm/bf16/small-normal-bf16", (false, false)),
    ] {
        assert_eq!(of(&contract, case), expected, "{case}");
    }
    // Without stems, or with those that are left out alone, all others must be there.
    for (stems, mid, hf) in [("", true, true), ("\nstems = [\"!hf*\"]", true, false)] {
        let contract = list(&format!("{table}{stems}")).unwrap();
        assert_eq!(of(&contract, "rms_norm/bf16/mid-wide-bf16").1, mid, "{stems}");
        assert_eq!(of(&contract, "rms_norm/bf16/hf-normal-bf16").1, hf, "{stems}");
    }
    for stem in ["smal", "!smal", "square"] {
        let message = list(&format!("{table}\nstems = [{stem:?}]")).unwrap_err().to_string();
        assert!(message.contains(&format!("`required`: stem `{stem}`")) && !message.contains('\n'), "{message}");
    }
    // Who requires nothing, or says nothing of it, is asked everything.
    for table in ["", "required = []"] {
        let contract = list(table).unwrap();
        assert!(contract.cases(Slice::Exhaustive).all(|case| contract.asks("mine", case)));
    }
}
