//! Runs made up for the tests: one all green, one with every verdict, every judgment and a hostile case name.

use crate::RunFolder;
use samebits_contract::compare::ChainMeasure;
use samebits_contract::record::{Judgment, Measure, Record, Run, SCHEMA, Spread};
use samebits_contract::tensor::DType;
use samebits_contract::verdict::{Evidence, Verdict};
use std::collections::BTreeMap;

const CONTRACT: &str = "5f2b6c1d9e8a7f60415263748596a7b8c9dae0f1a2b3c4d5e6f708192a3b4c5d";

/// One of each verdict.
pub fn verdicts() -> [Verdict; 7] {
    let reason = |text: &str| text.to_string();
    [
        Verdict::Pass,
        Verdict::Fail(Box::new(Evidence {
            message: "threads=2 differs from threads=1".into(),
            output: "y".into(),
            index: 17,
            coordinates: vec![2, 1],
            expected: "1".into(),
            found: "1.0078125".into(),
            expected_bits: "0x3f80".into(),
            found_bits: "0x3f81".into(),
            ulp: Some(1.0),
            count: 3,
            total: 512,
        })),
        Verdict::Waived { reason: reason("the split over k is being replaced; until 2026-12-31") },
        Verdict::StaleWaiver { reason: reason("covers gemm on avx512, where nothing fails any more; remove it") },
        Verdict::Unsupported { reason: reason("fp16 input with bf16 output is not offered") },
        Verdict::Error { reason: reason("the program ended with signal 11\n\u{1b}[31mafter 3 of 8 cases") },
        Verdict::Untested { reason: reason("required by the contract, and no case covers it") },
    ]
}

fn record(op: &str, dtype: DType, case: &str, judgment: Judgment) -> Record {
    Record {
        schema: SCHEMA,
        contract: CONTRACT.into(),
        rows: "tight".into(),
        implementation: "ours/cpu".into(),
        op: op.into(),
        class: if op == "chain" { "chain" } else { "reduction" }.into(),
        dtype,
        out: DType::Bf16,
        case: case.into(),
        judgment,
        axis: None,
        setting: None,
        kernel: format!("{op}/avx2"),
        plan: String::new(),
        ledger: Default::default(),
        verdict: Verdict::Pass,
        measure: (judgment == Judgment::Accuracy).then_some(Measure {
            samples: 512,
            max_ulp: 0.499_94,
            p99_ulp: 0.481,
            correctly_rounded: 0.999_999,
            max_abs: 0.0039,
            of_bound: 0.93,
            spread: spread(),
        }),
        chain: (op == "chain" && judgment == Judgment::Accuracy).then_some(ChainMeasure {
            samples: 2_560,
            rms: 0.031,
            max: 0.21,
            largest: 14.5,
            tokens: 78,
            max_dlogp: 0.04,
            mean_dlogp: 1e-4,
            approx_kl: 2e-5,
            clip_fraction: 0.0,
        }),
        gradient: None,
        again: None,
        seconds: 0.0125,
    }
}

/// Of 512 elements, half an ulp at most, two of them near the bound.
fn spread() -> Spread {
    let mut spread = Spread::default();
    (0..512).for_each(|i| spread.count(Some(f64::from(i) / 1024.0), if i < 510 { 0.05 } else { 0.93 }));
    spread
}

fn run(planned: usize) -> Run {
    Run {
        schema: SCHEMA,
        tool: "samebits 0.1.0".into(),
        contract_name: "ws1 1.0.0".into(),
        contract: CONTRACT.into(),
        rows: "tight".into(),
        arguments: vec!["check".into()],
        started: 1_790_000_000,
        complete: true,
        planned,
        seconds: 71.5,
        machine: BTreeMap::from([
            ("cores".into(), "2".into()),
            ("cpu".into(), "Example CPU @ 2.00GHz".into()),
            ("isas".into(), "scalar avx2 avx512".into()),
            ("os".into(), "linux x86_64".into()),
            ("rustc".into(), "1.95.0".into()),
        ]),
        plan: Default::default(),
        sealed: None,
        notes: Vec::new(),
    }
}

/// Twelve passes: 4 accuracy, 6 invariance, 2 golden.
pub fn green() -> RunFolder {
    let mut records = Vec::new();
    for op in ["rms_norm", "chain"] {
        let case = format!("{op}/bf16/normal");
        for _ in 0..2 {
            records.push(record(op, DType::Bf16, &case, Judgment::Accuracy));
        }
        for axis in ["batch", "threads", "isa"] {
            let mut record = record(op, DType::Bf16, &case, Judgment::Invariance);
            (record.axis, record.setting) = (Some(axis.into()), Some("2".into()));
            records.push(record);
        }
        records.push(record(op, DType::Bf16, &case, Judgment::Golden));
    }
    RunFolder { run: run(records.len()), records, torn: 0 }
}

/// A complete run with every verdict, in different numbers, and a case name full of markup.
pub fn folder() -> RunFolder {
    let mut folder = green();
    for (times, verdict) in verdicts().into_iter().enumerate() {
        for i in 0..=times {
            let name = if i == 0 { "gemm/fp16/</script>&\"<a|b".into() } else { format!("gemm/fp16/case-{i}") };
            let mut record = record("gemm", DType::Fp16, &name, Judgment::Invariance);
            (record.axis, record.setting) = (Some("threads".into()), Some("2".into()));
            record.verdict = verdict.clone();
            folder.records.push(record);
        }
    }
    let mut other = record("softmax", DType::Fp32, "softmax/fp32/one", Judgment::Golden);
    other.implementation = "impls/pure".into();
    folder.records.push(other);
    folder.run.planned = folder.records.len();
    folder
}

/// `folder` on disk.
pub fn written(folder: &RunFolder) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("run.json"), serde_json::to_vec(&folder.run).unwrap()).unwrap();
    let mut lines = String::new();
    for record in &folder.records {
        lines += &serde_json::to_string(record).unwrap();
        lines.push('\n');
    }
    std::fs::write(dir.path().join("records.jsonl"), lines).unwrap();
    dir
}
