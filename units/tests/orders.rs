//! The search against dumps of the second program, whose orders are known, and what is said of broken ones.

use safetensors::tensor::{Dtype, TensorView, serialize};
use samebits_units::Isa;
use samebits_units::dump::{Content, Dump};
use samebits_units::search::{Machine, Rounding};
use samebits_units::verify::{Verdict, verify};
use std::path::Path;
use std::process::Command;

fn machine() -> Machine {
    Machine { isa: Isa::best(), threads: 2 }
}

fn verdicts(bytes: &[u8]) -> Vec<Verdict> {
    let dump = Dump::parse(bytes).unwrap_or_else(|e| panic!("{e:?}"));
    dump.entries.iter().map(|entry| verify(entry, machine(), &|_, _| ())).collect()
}

/// What the order of a name of the set must be in words: `S@U` is S parts in units of U.
fn expected(cut: &str, join: &str, k: usize) -> Vec<String> {
    let (parts, unit): (usize, usize) = match cut.split_once(['@', '~']) {
        None => return vec!["one chain".into()],
        Some((parts, unit)) => (parts.parse().unwrap(), unit.parse().unwrap()),
    };
    if cut.contains('~') {
        return vec![format!("{parts} parts of "), format!("units of {unit}")];
    }
    let length = unit * k.div_ceil(unit * parts);
    // Two parts have one sum, and so have three in two of the orders.
    let join = match (join, k.div_ceil(length)) {
        (_, 2) | ("tree", 3) => "ascending",
        ("tree", _) => "a tree",
        (join, _) => join,
    };
    vec![format!("{} parts of {length} ", k.div_ceil(length)), join.into()]
}

#[test]
fn the_orders_of_the_second_program_are_found() {
    let folder = std::env::temp_dir().join(format!("samebits-units-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (out, program) = (folder.join("set.safetensors"), "../impls/units/dumps.py");
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join(program);
    let done = Command::new("python3").arg("-B").arg(program).arg("--set").arg(&out).status().expect("python3 starts");
    assert!(done.success());
    let bytes = std::fs::read(&out).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let verdicts = verdicts(&bytes);
    assert!(verdicts.len() > 40);
    for verdict in verdicts {
        let line = verdict.line();
        println!("{line}");
        let [profile, _, shape, cut, join, how @ ..] = &verdict.name.split(' ').collect::<Vec<_>>()[..] else {
            panic!()
        };
        assert!(verdict.reproduced(), "{line}");
        // Extreme operands may hide an order; ordinary ones must not.
        if how.is_empty() {
            let k = shape.rsplit('x').next().unwrap().parse().unwrap();
            assert!(verdict.rule.profiles().contains(profile), "{line}");
            assert!(expected(cut, join, k).iter().all(|part| verdict.order.contains(part)), "{line}");
            assert_eq!(verdict.others, 0, "{line}");
        }
    }
}

/// A file of named tensors.
fn file(tensors: &[(&str, Dtype, &[usize], Vec<u8>)], dtype: Option<&str>) -> Vec<u8> {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.to_string(), TensorView::new(*dtype, shape.to_vec(), data).expect("a tensor"))
    });
    let metadata = dtype.map(|dtype| [("dtype".to_string(), dtype.to_string())].into());
    serialize(views, metadata).expect("a file")
}

fn product(change: impl Fn(usize, u32) -> u32) -> Vec<u8> {
    let bytes = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/h100/cublas.safetensors")).unwrap();
    let dump = Dump::parse(&bytes).unwrap();
    let entry = dump.entries.iter().find(|entry| entry.name == "300x256x512").unwrap();
    let Content::Product(product) = &entry.content else { panic!() };
    let half = |words: &[u32]| words.iter().flat_map(|&word| (word as u16).to_le_bytes()).collect::<Vec<u8>>();
    let target = product.targets.iter().find(|target| target.rounding == Rounding::Fp32).unwrap();
    let y = target.words.iter().enumerate().flat_map(|(place, &word)| change(place, word).to_le_bytes()).collect();
    let (m, n, k) = (product.m, product.n, product.k);
    let tensors: [(&str, Dtype, &[usize], Vec<u8>); 3] = [
        ("p.x", Dtype::U16, &[m, k], half(&product.x)),
        ("p.w", Dtype::U16, &[n, k], half(&product.w)),
        ("p.y_fp32", Dtype::F32, &[m, n], y),
    ];
    file(&tensors, None)
}

#[test]
fn one_wrong_word_is_named() {
    let right = verdicts(&product(|_, word| word)).remove(0);
    assert!(right.reproduced() && right.order == "one chain" && right.rule.format.name() == "bf16", "{}", right.line());
    let wrong = verdicts(&product(|place, word| word ^ u32::from(place == 13))).remove(0);
    assert_eq!((wrong.equal + 1, wrong.order.as_str()), (wrong.of, "one chain"), "{}", wrong.line());
    assert_eq!(wrong.first.unwrap().at, [1, 5]);
}

#[test]
fn zeros_tell_nothing_apart() {
    let zeros = |bytes: usize| vec![0; bytes];
    let tensors: [(&str, Dtype, &[usize], Vec<u8>); 3] = [
        ("p.x", Dtype::F16, &[2, 64], zeros(256)),
        ("p.w", Dtype::F16, &[3, 64], zeros(384)),
        ("p.y", Dtype::F16, &[2, 3], zeros(12)),
    ];
    let verdict = verdicts(&file(&tensors, None)).remove(0);
    assert!(verdict.reproduced() && verdict.others > 10, "{}", verdict.line());
    assert_eq!(verdict.other_profiles, ["sm70", "sm75", "sm80", "sm89"]);
}

#[test]
fn everything_wrong_is_said_at_once() {
    let zeros = |elements: usize| vec![0; elements * 2];
    let tensors: [(&str, Dtype, &[usize], Vec<u8>); 11] = [
        ("a.x", Dtype::BF16, &[2, 3], zeros(6)),
        ("a.w", Dtype::BF16, &[2, 3], zeros(6)),
        ("b.x", Dtype::BF16, &[2, 4], zeros(8)),
        ("b.y", Dtype::BF16, &[3, 3], zeros(9)),
        ("c.a", Dtype::U16, &[1, 1, 2, 4], zeros(8)),
        ("d.x", Dtype::BF16, &[2, 3], zeros(6)),
        ("d.w", Dtype::BF16, &[2, 4], zeros(8)),
        ("d.y", Dtype::BF16, &[3, 2], zeros(6)),
        ("e.x", Dtype::BF16, &[0, 3], zeros(0)),
        ("e.w", Dtype::F16, &[2, 3], zeros(6)),
        ("q", Dtype::U16, &[1], zeros(1)),
    ];
    let complaints = Dump::parse(&file(&tensors, Some("int8"))).err().unwrap().join("\n");
    for part in [
        "metadata: dtype: `int8`",
        "q: no NAME.FIELD",
        "a: y: missing",
        "b: w: missing",
        "c: b: missing",
        "c: c: missing",
        "c: d: missing",
        "d: w: shape [2, 4], but x is [2, 3]",
        "d: y: shape [3, 2], must be [2, 2]",
        "e: x: no element",
        "e: w: F16, but x is BF16",
        "e: y: missing",
    ] {
        assert!(complaints.contains(part), "{part}: {complaints}");
    }
    assert_eq!(Dump::parse(&[]).err().unwrap(), ["the file is empty"]);
    assert_eq!(Dump::parse(&file(&[], None)).err().unwrap(), ["no tensor in it"]);
    assert!(Dump::parse(&[7; 100]).err().unwrap()[0].starts_with("not a safetensors file"));
}

#[test]
fn last_roundings() {
    for (word, bf16, fp16) in [
        (0x3F80_8000, 0x3F80, 0x3C04),
        (0x3F81_8000, 0x3F82, 0x3C0C),
        (0x477F_EFFF, 0x4780, 0x7BFF),
        (0x477F_F000, 0x4780, 0x7C00),
        (0x7F7F_FFFF, 0x7F80, 0x7C00),
        (0xFF80_0000, 0xFF80, 0xFC00),
        (0x7FFF_FFFF, 0x7FFF, 0x7FFF),
        (0x3300_0000, 0x3300, 0x0000),
        (0x3300_0001, 0x3300, 0x0001),
        (0x387F_E000, 0x3880, 0x0400),
        (0x8000_0000, 0x8000, 0x8000),
    ] {
        assert_eq!((Rounding::Bf16.round(word), Rounding::Fp16.round(word)), (bf16, fp16), "{word:08x}");
    }
    assert!(Rounding::Bf16.same(0x7FC0, 0x7FFF_FFFF) && !Rounding::Bf16.same(0x7F80, 0x7FFF_FFFF));
    assert!(!Rounding::Fp32.same(0x7FC0_0000, 0x7FFF_FFFF));
}
