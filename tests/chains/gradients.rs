//! The verb `grad`. How near its gradients are to torch's, and that they are the same bits however they are made, is judged by
//! `samebits check --op chain_backward`.

use super::{checkpoint, load, samebits};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use samebits_harness::dump::{Reader, Writer, compare};
use samebits_models::{Batch, GradientRun, Gradients, Loss, Model, ModelError, Padding, Probe, Sampled, Seen};
use samebits_ops::Cpu;
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
    let bonus = made(&["--loss", "policy", "--entropy", "0.25"]);
    assert!(bonus != expected, "the entropy is a part of the loss");
    assert!(made(&[all, &["--entropy", "0.25", "--threads", "3"]].concat()) == bonus);
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
    broken(&tokens, &["--groups", "3"], "samebits: --groups: there are 3; give a power of two");
    broken(&tokens, &["--groups", "4", "--ranks", "3"], "samebits: --ranks: 3 ranks do not divide 4 groups");
    broken(&tokens, &["--ranks", "0"], "0 ranks");
    broken(&tokens, &["--micro-batch", "0"], "samebits: --micro-batch: it has no sequence");
    broken(&tokens, &["--pad", "up:1"], "`up:1` is not left:N, right:N or none");
    broken(&tokens, &["--dtype", "fp16"], "gradients are made in bf16 or fp32");
    broken(
        &tokens,
        &["--loss", "policy", "--clip-low", "2"],
        "--clip-low <X>': it must be a finite number from 0 to 1",
    );
    broken(&tokens, &["--loss", "policy", "--clip-high=-0.1"], "--clip-high <X>'");
    broken(&tokens, &["--loss", "policy", "--entropy", "inf"], "--entropy <C>': it must be a finite number");
    broken(&tokens, &["--entropy", "0.1"], "--entropy: only --loss policy has one");
    broken(&tokens, &["--budget", "10"], "a budget of 10 bytes is below the smallest plan");
    let nan = |all: &mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>| {
        all.get_mut("advantages").unwrap().2[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    };
    broken(
        &changed("qwen3-moe", dir.path(), nan),
        &["--loss", "policy", "--temperature", "1"],
        "advantages: element [1] is NaN",
    );
    let zeros = changed("qwen3-moe", dir.path(), |all| all.get_mut("mask").unwrap().2.fill(0));
    broken(&zeros, &[], "mask: no token counts");
    let first = changed("qwen3-moe", dir.path(), |all| all.get_mut("mask").unwrap().2[0] = 1);
    broken(&first, &[], "tensor `mask`: element [0, 0] is 1");
    let two = changed("qwen3-moe", dir.path(), |all| all.get_mut("mask").unwrap().2[4] = 2);
    broken(&two, &[], "tensor `mask`: element [0, 1] is 2; it must be 0 or 1");
    let shape = changed("qwen3-moe", dir.path(), |all| all.get_mut("mask").unwrap().1.reverse());
    broken(&shape, &[], "tensor `mask`: shape [12, 64] must be [64, 12]");
    let none = changed("qwen3-moe", dir.path(), |all| drop(all.remove("old_logprob")));
    broken(&none, &["--loss", "policy", "--temperature", "1"], "tensor `old_logprob`: missing");
    let far = changed("qwen3-moe", dir.path(), |all| {
        all.get_mut("old_logprob")
            .unwrap()
            .2
            .chunks_exact_mut(4)
            .for_each(|o| o.copy_from_slice(&f32::NAN.to_le_bytes()));
    });
    broken(&far, &["--loss", "policy", "--temperature", "1"], "is NaN; it must be finite");
    let halves = changed("qwen3-moe", dir.path(), |all| all.get_mut("advantages").unwrap().0 = Dtype::I32);
    broken(&halves, &["--loss", "policy", "--temperature", "1"], "tensor `advantages`: dtype is I32; it must be F32");
    let floats = changed("qwen3-moe", dir.path(), |all| all.get_mut("tokens").unwrap().0 = Dtype::F32);
    broken(&floats, &[], "tokens");
    let below = changed("qwen3-moe", dir.path(), |all| all.get_mut("tokens").unwrap().2[..4].fill(255));
    broken(&below, &[], "the vocabulary is 0 to 159");
    let outside = changed("qwen3-moe", dir.path(), |all| all.get_mut("tokens").unwrap().2[..4].fill(9));
    broken(&outside, &[], "the vocabulary is 0 to 159");
}

/// Notes which sites it is shown and of how many tokens.
#[derive(Default)]
struct Shown(Vec<(String, usize)>);

impl Probe for Shown {
    fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
        self.0.push((seen.name(), seen.tokens.len()));
        Ok(())
    }
}

const SEQUENCES: [&[i32]; 4] = [&[3, 9, 4, 7, 5], &[8, 3], &[6], &[5, 5, 6, 1]];

/// The gradients of some sequences, all of whose tokens count, shown to `probe`.
fn shown(model: &Model, run: &GradientRun, clip: Option<f64>, probe: &mut dyn Probe) -> Result<Gradients, ModelError> {
    let sequences = SEQUENCES.map(<[i32]>::to_vec);
    let count = SEQUENCES.map(|tokens| (0..tokens.len()).map(|t| i32::from(t > 0)).collect::<Vec<i32>>());
    let old = SEQUENCES.map(|tokens| vec![-1.0; tokens.len()]);
    let policy =
        clip.map(|low| Loss::Policy { advantages: &[1.0; 4], old_logprob: &old, low, high: 0.2, entropy: 0.0 });
    let loss = policy.unwrap_or(Loss::Nll);
    let batch = Batch { sequences: &sequences, count: &count, loss, sampled: Sampled::At(1.0), groups: 1 };
    model.gradients(&Cpu::best(), &batch, run, Some(probe), |_| {})
}

/// No bit says whether a micro-batch has three sequences and whether layers run again; what is seen on the way does. (Where
/// padding and packed sequences stand is tested in `models/src/gradients.rs`, that options arrive in `harness`.)
#[test]
fn micro_batches_and_recomputation_are_what_runs() {
    let model = load(&checkpoint("gemma2"));
    let sites = |run: &GradientRun| {
        let mut seen = Shown::default();
        shown(&model, run, None, &mut seen).unwrap();
        let of = |site: &str| seen.0.iter().filter(|(name, _)| name == site).map(|(_, n)| *n).collect::<Vec<_>>();
        (of("embed"), of("layers.1.attention"), of("layers.1.dq"))
    };
    let run = GradientRun::default();
    let each = vec![5, 2, 1, 4];
    assert_eq!(sites(&run), (each.clone(), each.clone(), each.clone()));
    let three = GradientRun { micro_batch: 3, padding: Padding::Left(2), ..run };
    assert_eq!(sites(&three), (vec![8, 4], vec![8, 4], vec![8, 4]));
    let again = GradientRun { recompute: true, ..run };
    assert_eq!(sites(&again), (each.clone(), vec![5, 5, 2, 2, 1, 1, 4, 4], each));
    // A wrong limit costs no forward.
    let mut seen = Shown::default();
    let refused = shown(&model, &run, Some(2.0), &mut seen).err().unwrap().to_string();
    assert!(refused.contains("`low`") && seen.0.is_empty(), "{refused}: {:?}", seen.0);
}

/// A dump that has one element of a site one bit off.
struct Faulty<'a> {
    writer: Writer,
    site: &'a str,
}

impl Probe for Faulty<'_> {
    fn see(&mut self, seen: &mut Seen) -> Result<(), ModelError> {
        if seen.name() == self.site && seen.tokens.contains(&(3, 2)) {
            let row = seen.tokens.iter().position(|token| *token == (3, 2)).unwrap();
            let width = seen.values.len() / seen.tokens.len();
            let value = &mut seen.values[row * width + 1.min(width - 1)];
            *value = f32::from_bits(value.to_bits() ^ 1 << 16);
        }
        self.writer.see(seen)
    }
}

/// A fault in one place of the reverse pass is named there, however the run around it was cut, and what is no fault is none.
#[test]
fn a_fault_of_the_reverse_pass_is_named_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    for (name, faults) in [
        ("gemma2", &["dlogprob", "layers.1.dmlp", "layers.1.dattention_sum", "layers.0.dk", "dembed"][..]),
        ("deepseek-v3", &["layers.1.drouter", "layers.1.dattention", "layers.0.dinput_norm"]),
    ] {
        let model = load(&checkpoint(name));
        let dump = |file: &str, site: &str, run: &GradientRun| {
            let path = dir.path().join(file);
            let mut probe = Faulty { writer: Writer::create(&path, 1 << 30).unwrap(), site };
            shown(&model, run, None, &mut probe).unwrap();
            probe.writer.finish().unwrap();
            Reader::open(&path).unwrap()
        };
        let run = GradientRun::default();
        let (micro_batch, padding) = (3, Padding::Left(2));
        let other = GradientRun { micro_batch, padding, pack: true, recompute: true, ..GradientRun::default() };
        let mut right = dump("right", "", &run);
        let same = compare(&mut right, &mut dump("other", "", &other), 0.0).unwrap();
        assert_eq!(same.divergence, None, "{name}");
        assert!(same.skipped.is_empty() && same.sites > 40, "{name}: {} sites", same.sites);
        for site in faults {
            let found = compare(&mut right, &mut dump("wrong", site, &other), 0.0).unwrap().divergence.unwrap();
            // `dlogprob` has one element for a token.
            let element = usize::from(*site != "dlogprob");
            assert_eq!((&found.site[..], found.token, found.element), (*site, (3, 2), element), "{name}");
        }
    }
}

#[test]
fn gradients_are_traced() {
    let dir = tempfile::tempdir().unwrap();
    let [model, tokens] = [checkpoint("llama-linear"), recorded("llama-linear")];
    let [model, tokens] = [&model, &tokens].map(|path| path.to_str().unwrap());
    let trace = |a: &str, b: &str| {
        let found = samebits(&["trace", a, b, "--model", model, "--tokens", tokens]);
        let text = [found.stdout, found.stderr].map(|text| String::from_utf8_lossy(&text).to_string()).concat();
        (found.status.code(), text)
    };
    let (code, text) =
        trace("loss=policy", "loss=policy,micro-batch=7,pad=right:2,pack=true,recompute=true,isa=scalar,threads=3");
    assert_eq!(code, Some(0), "{text}");
    let dump = dir.path().join("dump");
    let [dump, out] = [&dump, &dir.path().join("out")].map(|path| path.to_str().unwrap().to_string());
    let args = ["grad", "--model", model, "--tokens", tokens, "--out", &out, "--dump", &dump, "--micro-batch", "64"];
    assert!(samebits(&args).status.success());
    let (code, text) = trace(&dump, "loss=nll");
    assert_eq!(code, Some(0), "{text}");
    for (other, first) in [
        ("loss=nll,dtype=fp32", "first difference: embed\n  sequence 0"),
        ("loss=policy", "first difference: dlogprob\n  sequence 0"),
        ("loss=nll,groups=4", "first difference: parameters.model.embed_tokens.weight\n  row"),
    ] {
        let (code, text) = trace(&dump, other);
        assert!(code == Some(1) && text.contains(first), "{other}: {text}");
    }
    for (other, part) in [
        ("micro-batch=3", "no such setting"),
        ("loss=nll,schedule=decode", "no such setting of gradients"),
        ("loss=mean", "use nll or policy"),
        ("loss=nll,dtype=fp16", "bf16 or fp32"),
        ("loss=nll,groups=3", "power of two"),
    ] {
        let (code, text) = trace(&dump, other);
        assert!(code == Some(2) && text.contains(part) && text.lines().count() == 1, "{other}: {text}");
    }
}
