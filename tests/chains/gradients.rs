//! The verb `grad`. How near its gradients are to torch's, and that they are the same bits however they are made, is judged by
//! `samebits check --op chain_backward`.

use super::{checkpoint, samebits};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn recorded(name: &str) -> PathBuf {
    checkpoint("").join("../gradients").join(format!("{name}.safetensors"))
}

/// A copy of a file of tensors, some of them changed or gone.
fn changed(name: &str, dir: &Path, change: impl FnOnce(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>)) -> String {
    let file = std::fs::read(recorded(name)).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let inputs = tensors.iter().filter(|(name, _)| ["tokens", "mask", "advantages", "old_logprob"].contains(name));
    let mut all = inputs.map(|(n, t)| (n.to_string(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect();
    change(&mut all);
    let views = all.iter().map(|(n, (dtype, shape, data))| (n, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    let path = dir.join("changed");
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    path.to_str().unwrap().into()
}

/// Keeps the first rows of every tensor.
fn first_rows(tensors: &mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>, rows: usize) {
    for (_, shape, data) in tensors.values_mut() {
        data.truncate(data.len() / shape[0] * rows);
        shape[0] = rows;
    }
}

#[test]
fn the_verb_writes_the_same_file_or_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let model = checkpoint("qwen3-moe");
    let grad = |tokens: &str, extra: &[&str]| {
        let args = ["grad", "--model", model.to_str().unwrap(), "--tokens", tokens, "--out", out.to_str().unwrap()];
        samebits(&[&args[..], extra].concat())
    };
    let tokens = changed("qwen3-moe", dir.path(), |all| first_rows(all, 5));
    let made = |extra: &[&str]| {
        let found = grad(&tokens, extra);
        assert!(found.status.success() && found.stdout.is_empty(), "{}", String::from_utf8_lossy(&found.stderr));
        let file = std::fs::read(&out).unwrap();
        std::fs::remove_file(&out).unwrap();
        file
    };
    let expected = made(&["--loss", "policy"]);
    let all: &[&str] =
        &["--loss", "policy", "--micro-batch", "3", "--pad", "left:2", "--pack", "--recompute", "--isa", "scalar"];
    assert!(made(&[all, &["--threads", "3", "--budget", "300000"]].concat()) == expected);
    let grouped = made(&["--loss", "policy", "--groups", "4"]);
    assert!(made(&["--loss", "policy", "--groups", "4", "--ranks", "2"]) == grouped);
    assert!(grouped != expected, "other groups are another sum");
    let tensors = SafeTensors::deserialize(&expected).unwrap();
    let shape = |name: &str| tensors.tensor(name).unwrap().shape().to_vec();
    assert_eq!((shape("loss"), shape("per_sequence"), shape("logprob")), (vec![1], vec![5], vec![5, 12]));
    assert_eq!(shape("model.layers.1.mlp.experts.7.up_proj.weight"), [24, 48]);
    // Tokens that are left out are not there.
    let ends = changed("qwen3-moe", dir.path(), |all| {
        first_rows(all, 5);
        all.insert(
            "attention_mask".into(),
            (
                Dtype::I32,
                vec![5, 12],
                [1i32, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0].repeat(5).iter().flat_map(|v| v.to_le_bytes()).collect(),
            ),
        );
        for (name, filler) in [("tokens", 77i32), ("mask", 0)] {
            for row in all.get_mut(name).unwrap().2.chunks_exact_mut(4 * 12) {
                row[4 * 9..].copy_from_slice(
                    &[filler, filler, filler].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>(),
                );
            }
        }
    });
    assert!(grad(&ends, &[]).status.success());
    let padded = std::fs::read(&out).unwrap();
    std::fs::remove_file(&out).unwrap();
    let short = changed("qwen3-moe", dir.path(), |all| {
        first_rows(all, 5);
        for (name, (_, shape, data)) in all {
            if name != "advantages" {
                *data = data.chunks_exact(4 * 12).flat_map(|row| &row[..4 * 9]).copied().collect();
                shape[1] = 9;
            }
        }
    });
    assert!(grad(&short, &["--micro-batch", "5"]).status.success());
    let (padded, short) = (SafeTensors::deserialize(&padded).unwrap(), std::fs::read(&out).unwrap());
    std::fs::remove_file(&out).unwrap();
    for (name, tensor) in SafeTensors::deserialize(&short).unwrap().iter().filter(|(name, _)| *name != "logprob") {
        assert!(padded.tensor(name).unwrap().data() == tensor.data(), "{name}");
    }

    let broken = |tokens: &str, extra: &[&str], part: &str| {
        let found = grad(tokens, extra);
        let line = String::from_utf8_lossy(&found.stderr).to_string();
        assert_eq!((found.status.code(), line.lines().count()), (Some(2), 1), "{extra:?}: {line}");
        assert!(line.contains(part) && !out.exists(), "{extra:?}: {line}");
    };
    let tokens = changed("qwen3-moe", dir.path(), |all| first_rows(all, 5));
    broken(&tokens, &["--groups", "3"], "groups: there are 3; give a power of two");
    broken(&tokens, &["--groups", "4", "--ranks", "3"], "3 ranks do not divide 4 groups");
    broken(&tokens, &["--ranks", "0"], "0 ranks");
    broken(&tokens, &["--micro-batch", "0"], "micro batch");
    broken(&tokens, &["--pad", "up:1"], "`up:1` is not left:N, right:N or none");
    broken(&tokens, &["--dtype", "fp16"], "gradients are made in bf16 or fp32");
    broken(&tokens, &["--loss", "policy", "--clip-low", "2"], "low");
    broken(&tokens, &["--budget", "10"], "a budget of 10 bytes is below the smallest plan");
    let nan = |all: &mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>| {
        all.get_mut("advantages").unwrap().2[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    };
    broken(&changed("qwen3-moe", dir.path(), nan), &["--loss", "policy"], "advantages: element [1] is NaN");
    let zeros = changed("qwen3-moe", dir.path(), |all| all.get_mut("mask").unwrap().2.fill(0));
    broken(&zeros, &[], "mask: no token counts");
    let first = changed("qwen3-moe", dir.path(), |all| all.get_mut("mask").unwrap().2[0] = 1);
    broken(&first, &[], "mask: element [0, 0] is 1");
    let two = changed("qwen3-moe", dir.path(), |all| all.get_mut("mask").unwrap().2[4] = 2);
    broken(&two, &[], "mask: element [0, 1] is 2; it must be 0 or 1");
    let shape = changed("qwen3-moe", dir.path(), |all| all.get_mut("mask").unwrap().1.reverse());
    broken(&shape, &[], "tensor `mask`: shape [12, 64] must be [64, 12]");
    let none = changed("qwen3-moe", dir.path(), |all| drop(all.remove("old_logprob")));
    broken(&none, &["--loss", "policy"], "tensor `old_logprob`: missing");
    let outside = changed("qwen3-moe", dir.path(), |all| all.get_mut("tokens").unwrap().2[..4].fill(9));
    broken(&outside, &[], "the vocabulary is 0 to 159");
}
