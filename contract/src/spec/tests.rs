use super::*;
use crate::case::Config;
use crate::wire;
use std::path::Path;

fn case(op: &str, params: &[(&str, &str)], inputs: &[(&str, Tensor)]) -> Case {
    Case {
        name: String::new(),
        op: op.into(),
        out: DType::Fp32,
        params: params.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
        inputs: inputs.iter().map(|(k, v)| (k.to_string(), v.clone())).collect(),
        config: Config::default(),
    }
}

fn f32s(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::fp32(shape, values.to_vec())
}

/// The canonical outputs lie within a few f32 roundings of the oracle, on every file that comes with the repository.
#[test]
fn vectors_agree_with_the_oracle() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors");
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 135, "{} files", files.len());
    let mut failures = Vec::new();
    for path in files {
        let bytes = std::fs::read(&path).unwrap();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let file = wire::File::decode(&bytes).unwrap();
        let mut case = wire::decode_request(&bytes).unwrap();
        let spec = find(&case.op).unwrap();
        case.out = DType::Fp32;
        let references = spec.oracle(&case).unwrap_or_else(|e| panic!("{name}: {e}"));
        for (output, reference) in &references {
            for (suffix, dtype) in [("", DType::Fp32), ("_bf16", DType::Bf16)] {
                let Some(expected) = file.tensors.get(&format!("expect.{output}{suffix}")) else {
                    assert_eq!(dtype, DType::Bf16, "{name} lacks {output}");
                    continue;
                };
                let factor = std::env::var("FACTOR").map_or(16.0, |v| v.parse().unwrap());
                let bound = crate::compare::Bound::Ulp {
                    ulp: 0.5,
                    condition_factor: factor,
                    p99_ulp: None,
                    correctly_rounded: None,
                };
                let (m, evidence) = crate::compare::accuracy(output, dtype, expected, reference, &bound);
                println!(
                    "{name} {output} {dtype} n={} max={:.4} p99={:.4} cr={:.4} of={:.4}",
                    m.samples, m.max_ulp, m.p99_ulp, m.correctly_rounded, m.of_bound
                );
                if let Some(evidence) = evidence {
                    failures.push(format!("{name} {dtype}: {}", evidence.message));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
