//! What nobody said is not taken in silence: masks under other names, padding without a mask, another config in the middle of a
//! run, log-probabilities that no f32 holds.

use super::{checkpoint, samebits, write_tokens};
use std::path::Path;

fn ran(words: &[&str]) -> (Option<i32>, String) {
    let ran = samebits(words);
    (ran.status.code(), String::from_utf8_lossy(&ran.stderr).to_string())
}

#[test]
fn masks_that_are_none_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (model, tokens, out) = (checkpoint("llama").to_str().unwrap().to_string(), path("tokens"), path("out"));
    let run = |verb: &str| ran(&[verb, "--model", &model, "--tokens", &tokens, "--out", &out]);
    let ids = [1, 5, 6, 7, 8, 9, 3, 4];
    write_tokens(Path::new(&tokens), &[("tokens", &ids), ("mask", &[0, 1, 1, 1, 0, 1, 1, 1])], [2, 4]);
    assert_eq!((run("grad"), run("forward")), ((Some(0), String::new()), (Some(0), String::new())));
    write_tokens(Path::new(&tokens), &[("tokens", &ids), ("loss_mask", &[0, 0, 0, 1, 0, 0, 1, 1])], [2, 4]);
    let (code, line) = run("grad");
    assert_eq!((code, line.lines().count()), (Some(0), 1), "{line}");
    assert!(line.contains("tokens: tensor `loss_mask` has a whole number for each token and is not read"), "{line}");
    // llama pads with 0.
    for (ids, said) in [
        (
            [1, 5, 6, 7, 8, 0, 0, 0],
            "sequence 1 ends with 3 tokens 0, config.json's pad_token_id, and there is no tensor",
        ),
        ([0, 0, 6, 7, 8, 9, 3, 4], "sequence 0 begins with 2 tokens 0"),
    ] {
        write_tokens(Path::new(&tokens), &[("tokens", &ids)], [2, 4]);
        for verb in ["forward", "grad"] {
            let (code, line) = run(verb);
            assert_eq!((code, line.lines().count()), (Some(0), 1), "{line}");
            assert!(line.starts_with("samebits: warning: ") && line.contains(said), "{line}");
        }
    }
    for ids in [[1, 5, 6, 7, 8, 9, 3, 0], [0, 5, 6, 7, 8, 0, 0, 9]] {
        write_tokens(Path::new(&tokens), &[("tokens", &ids)], [2, 4]);
        assert_eq!(run("forward"), (Some(0), String::new()));
    }
}

/// What is given in the place of log-probabilities.
#[test]
fn probabilities_are_no_log_probabilities() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let model = checkpoint("llama").to_str().unwrap().to_string();
    let args = ["grad", "--model", &model, "--tokens", &path("tokens"), "--out", &path("out"), "--loss", "policy"];
    for (old, said) in [(-6.5, false), (0.005, false), (0.3, true)] {
        super::nonfinite::write_policy(Path::new(&path("tokens")), old, 1.0);
        let (code, line) = ran(&[&args[..], &["--temperature", "1"]].concat());
        assert!(code == Some(0) && line.lines().count() == usize::from(said), "{line}");
        assert_eq!(
            line.contains("`old_logprob`: element [1, 2] is 0.3, and no log-probability is above 0"),
            said,
            "{line}"
        );
    }
}

/// The weights are the same, the model is another.
#[test]
fn a_run_goes_on_with_its_own_config_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(checkpoint("llama")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    write_tokens(Path::new(&path("data")), &[("tokens", &[1, 5, 6, 7, 8, 9, 3, 4])], [2, 4]);
    let train = |steps: &str| {
        let (model, data, out) = (path("model"), path("data"), path("out"));
        ran(&["train", "--model", &model, "--data", &data, "--out", &out, "--batch", "2", "--steps", steps])
    };
    assert_eq!(train("1"), (Some(0), String::new()));
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    let mut fields: serde_json::Value = serde_json::from_str(&config).unwrap();
    let fields = fields.as_object_mut().unwrap();
    // In another order it is the same.
    let eps = fields.shift_remove("rms_norm_eps").unwrap();
    fields.insert("rms_norm_eps".into(), eps);
    std::fs::write(model.join("config.json"), serde_json::to_string(&fields).unwrap()).unwrap();
    assert_eq!(train("2"), (Some(0), String::new()));
    fields["rms_norm_eps"] = 1e-5.into();
    std::fs::write(model.join("config.json"), serde_json::to_string(&fields).unwrap()).unwrap();
    let (code, line) = train("3");
    assert!(code == Some(2) && line.contains("the run began with config "), "{line}");
}

/// JSON has no NaN, and no f32 so large.
#[test]
fn log_probabilities_of_a_rollout_are_finite() {
    let dir = tempfile::tempdir().unwrap();
    let rollout = dir.path().join("rollout");
    let model = checkpoint("qwen3-adder").to_str().unwrap().to_string();
    let first = r#"{"samebits": "rollout", "dtype": "bf16", "temperature": 1.0, "sequences": 1}"#;
    for value in ["-1e39", "-1e300", "null", "NaN", "-Infinity"] {
        let text =
            format!(r#"{{"sequence": 0, "prompt_tokens": [3, 4], "tokens": [5, 6], "logprobs": [-0.5, {value}]}}"#);
        std::fs::write(&rollout, format!("{first}\n{text}\n")).unwrap();
        let (code, line) = ran(&["score", "--model", &model, "--rollout", rollout.to_str().unwrap()]);
        assert_eq!((code, line.lines().count()), (Some(2), 1), "{value}: {line}");
        assert!(line.contains("rollout:2: not a text: "), "{value}: {line}");
    }
}
