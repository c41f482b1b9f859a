use super::*;
use crate::case::Config;
use crate::record::Judgment;
use crate::table::Contract;
use crate::wire;
use samebits_schema::Holds;
use std::fmt::Write;
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

/// The canonical outputs lie within the bounds of their class, on every file that comes with the repository.
pub(crate) fn vectors_agree_with_the_oracle() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors");
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 135, "{} files", files.len());
    let contract = Contract::load(None).unwrap();
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
                let class =
                    contract.threshold("tight", spec.class, spec.direction(), dtype, Judgment::Accuracy).unwrap();
                let (m, evidence) = crate::compare::accuracy(output, dtype, expected, reference, &class.bound);
                assert!(m.samples > 0, "{name} {output}");
                if let Some(evidence) = evidence {
                    failures.push(format!("{name} {dtype}: {}", evidence.message));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn refusal(case: &Case) -> String {
    find(&case.op).unwrap().validate(case).err().unwrap_or_else(|| panic!("accepted")).to_string()
}

pub(crate) fn refusals_name_the_tensor_and_the_fix() {
    let x = f32s(&[2, 3], &[0.0; 6]);
    let w = f32s(&[4, 3], &[0.0; 12]);
    let gemm = |params: &[(&str, &str)], inputs: &[(&str, Tensor)]| refusal(&case("gemm", params, inputs));
    assert_eq!(gemm(&[], &[("x", x.clone())]), "input `w`: missing; gemm needs it as w[N,K] of bf16, fp16 or fp32");
    let short = f32s(&[4, 2], &[0.0; 8]);
    assert!(gemm(&[], &[("x", x.clone()), ("w", short)]).contains("has K = 2, but K is 3"));
    let half = round::tensor(DType::Bf16, &[4, 3], &[0.0; 12]);
    assert!(
        gemm(&[], &[("x", x.clone()), ("w", half)])
            .starts_with("unsupported: input `w` is bf16 and `x` is fp32; mixed dtypes")
    );
    let good = [("x", x.clone()), ("w", w.clone())];
    assert!(gemm(&[("alpha", "1")], &good).contains("param `alpha`: gemm has no such parameter"));
    assert!(gemm(&[("tf32", "maybe")], &good).contains("`maybe` is not disabled or enabled"));
    assert!(gemm(&[("k_total", "2")], &good).contains("beyond k_total 2"));
    assert!(gemm(&[("k_total", "6")], &good).contains("no subtree"));
    assert!(
        gemm(&[], &[("x", x.clone()), ("w", w.clone()), ("z", x.clone())])
            .contains("input `z`: gemm has no such input")
    );
    assert!(gemm(&[], &[("x", f32s(&[6], &[0.0; 6])), ("w", w)]).contains("must have the form [M,K]"));
    assert!(gemm(&[], &[("x", Tensor::i32(&[2, 3], vec![0; 6]))]).contains("it must be bf16, fp16 or fp32"));
    assert!(
        refusal(&case("add", &[], &[("a", x.clone()), ("b", f32s(&[2, 2], &[0.0; 4]))]))
            .contains("must equal that of `a`")
    );
    assert!(
        refusal(&case("rms_norm", &[("eps", "-1")], &[("x", x.clone()), ("w", f32s(&[3], &[0.0; 3]))]))
            .contains("a finite number from 0")
    );
    let tokens = |v: i32| case("embedding", &[], &[("w", x.clone()), ("tokens", Tensor::i32(&[1], vec![v]))]);
    assert!(refusal(&tokens(2)).contains("input `tokens`: element 0 is 2; use 0 to 1"));
    assert!(find("embedding").unwrap().validate(&tokens(1)).is_ok());
    let mut logprob = case("logprob", &[], &[("logits", x), ("target", Tensor::i32(&[2], vec![0, -7]))]);
    assert!(find("logprob").unwrap().validate(&logprob).is_ok());
    logprob.out = DType::Bf16;
    assert!(refusal(&logprob).contains("out is bf16; it returns fp32"));
    assert!(
        refusal(&case(
            "chain",
            &[("model", "m"), ("dtype", "bf16"), ("schedule", "chunk:0")],
            &[("tokens", Tensor::i32(&[1, 1], vec![0]))]
        ))
        .contains("chunk:N")
    );
}

/// Values worked out by hand, so that the oracle is held by something other than itself.
pub(crate) fn oracles_by_hand() {
    let value = |case: &Case, output: &str| find(&case.op).unwrap().oracle(case).unwrap()[output].value.clone();
    let near = |a: &[f64], b: &[f64]| near(a.iter().copied(), b);

    let y = value(
        &case(
            "gemm",
            &[],
            &[
                ("x", f32s(&[1, 2], &[1.0, 2.0])),
                ("w", f32s(&[2, 2], &[3.0, 4.0, -1.0, 0.5])),
                ("bias", f32s(&[2], &[0.25, 0.0])),
            ],
        ),
        "y",
    );
    assert_eq!(y, [11.25, 0.0]);
    let tie = f32::from_bits(0x3f80_1000);
    let product = |tf32| {
        value(&case("gemm", &[("tf32", tf32)], &[("x", f32s(&[1, 1], &[tie])), ("w", f32s(&[1, 1], &[1.0]))]), "y")[0]
    };
    assert_eq!((product("disabled"), product("enabled")), (f64::from(tie), 1.0 + round::pow2(-10)));

    let x = f32s(&[1, 2], &[3.0, 4.0]);
    let norm = |params: &[(&str, &str)]| {
        value(&case("rms_norm", params, &[("x", x.clone()), ("w", f32s(&[2], &[1.0, 2.0]))]), "y")
    };
    let r = 1.0 / 12.5f64.sqrt();
    assert!(near(&norm(&[("eps", "0")]), &[3.0 * r, 8.0 * r]));
    assert!(near(&norm(&[("eps", "0"), ("weight_offset", "1")]), &[6.0 * r, 12.0 * r]));
    assert_eq!(norm(&[("eps", "0"), ("rounding", "hf")])[0], round::round(3.0 * r, DType::Bf16));

    let third = (1.0f32 / 3.0).ln();
    let shares = value(&case("softmax", &[], &[("x", f32s(&[1, 3], &[0.0, third, f32::NEG_INFINITY]))]), "y");
    assert!(near(&shares, &[0.75, 0.25, 0.0]));
    let logits = f32s(&[3, 2], &[0.0, third, 0.0, third, f32::NEG_INFINITY, f32::NEG_INFINITY]);
    let logprob = case("logprob", &[], &[("logits", logits), ("target", Tensor::i32(&[3], vec![1, -1, 0]))]);
    assert!(near(&value(&logprob, "logprob")[..2], &[0.25f64.ln(), 0.0]) && value(&logprob, "logprob")[2].is_nan());
    assert!(near(&value(&logprob, "lse")[..1], &[(4.0f64 / 3.0).ln()]));
    assert_eq!(value(&logprob, "lse")[2], f64::NEG_INFINITY);

    let swiglu = value(&case("silu_mul", &[], &[("gate", f32s(&[1], &[2.0])), ("up", f32s(&[1], &[3.0]))]), "y");
    assert!(near(&swiglu, &[6.0 / (1.0 + (-2.0f64).exp())]));

    let rope = |pairing| {
        value(
            &case(
                "rope",
                &[("pairing", pairing)],
                &[("x", f32s(&[1, 1, 4], &[1.0, 2.0, 3.0, 4.0])), ("pos", Tensor::i32(&[1], vec![1]))],
            ),
            "y",
        )
    };
    let (s0, c0, s1, c1) = (1f64.sin(), 1f64.cos(), f64::from(0.01f32).sin(), f64::from(0.01f32).cos());
    assert!(near(&rope("half"), &[c0 - 3.0 * s0, 2.0 * c1 - 4.0 * s1, 3.0 * c0 + s0, 4.0 * c1 + 2.0 * s1]));
    assert!(near(&rope("interleaved"), &[c0 - 2.0 * s0, 2.0 * c0 + s0, 3.0 * c1 - 4.0 * s1, 4.0 * c1 + 3.0 * s1]));

    let argmax = case(
        "argmax",
        &[],
        &[("x", f32s(&[4, 3], &[1.0, 2.0, 2.0, -0.0, 0.0, -1.0, 5.0, f32::NAN, f32::NAN, -3.0, f32::INFINITY, 9.0]))],
    );
    assert_eq!(value(&argmax, "index"), [1.0, 0.0, 1.0, 1.0]);
    let nan = f32::NAN;
    let x =
        f32s(&[4, 4], &[1.0, 2.0, 2.0, 2.0, -0.0, -1.0, 0.0, 0.0, 5.0, nan, f32::INFINITY, nan, 9.0, 1.0, 3.0, 4.0]);
    let topk = case("topk", &[("k", "2")], &[("x", x), ("count", Tensor::i32(&[4], vec![4, 4, 4, 1]))]);
    assert_eq!(value(&topk, "index"), [1.0, 2.0, 0.0, 2.0, 1.0, 3.0, 0.0, -1.0]);
    sampling_by_hand(&value);
    let scores = case(
        "index_score",
        &[("scale", "0.5")],
        &[
            ("q", f32s(&[1, 2, 2], &[1.0, 2.0, -3.0, 1.0])),
            ("k", f32s(&[3, 2], &[2.0, 1.0, -2.0, 0.5, nan, 0.0])),
            ("weight", f32s(&[1, 2], &[10.0, -1.0])),
        ],
    );
    assert_eq!(value(&scores, "score")[..2], [20.0, -3.25]);
    assert!(value(&scores, "score")[2].is_nan());
    // 2^24 + 1 is no f32: the sum is rounded to f32 first, and only then to the output.
    let add = case("add", &[], &[("a", f32s(&[1], &[16777216.0])), ("b", f32s(&[1], &[1.0]))]);
    assert_eq!(value(&add, "y"), [16777216.0]);
}

/// Penalties, what may be sampled, and what is.
fn sampling_by_hand(value: &impl Fn(&Case, &str) -> Vec<f64>) {
    let row = |v: f32| f32s(&[1], &[v]);
    let place = |v: i32| Tensor::i32(&[1], vec![v]);
    let inputs = [
        ("logits", f32s(&[1, 4], &[-1.0, 8.0, 3.0, 2.0])),
        ("bias", f32s(&[1, 4], &[0.0, 0.0, 0.0, f32::NEG_INFINITY])),
        ("tokens", Tensor::i32(&[4], vec![2, 0, 1, 1])),
        ("begin", place(1)),
        ("prompt_end", place(2)),
        ("end", place(4)),
        ("repetition", row(2.0)),
        ("frequency", row(0.25)),
        ("presence", row(1.0)),
    ];
    assert_eq!(value(&case("penalize", &[], &inputs), "y"), [-2.0, 2.5, 3.0, f64::NEG_INFINITY]);
    // Probabilities of 0.1, 0.4, 0.2 and 0.3.
    let x = [0.1f32, 0.4, 0.2, 0.3].map(f32::ln);
    let kept = |scale: f32, k: i32, p: f32, m: f32| {
        let by = [("scale", row(scale)), ("top_k", place(k)), ("top_p", row(p)), ("min_p", row(m))];
        let inputs: Vec<_> = by.into_iter().chain([("x", f32s(&[1, 4], &x))]).collect();
        let case = case("truncate", &[], &inputs);
        let stay: Vec<usize> = (0..4).filter(|i| value(&case, "y")[*i] > f64::NEG_INFINITY).collect();
        assert_eq!(value(&case, "kept"), [stay.len() as f64]);
        stay
    };
    assert_eq!(kept(1.0, 0, 1.0, 0.0), [0, 1, 2, 3]);
    assert_eq!([kept(1.0, 2, 1.0, 0.0), kept(1.0, 0, 0.6, 0.0), kept(1.0, 0, 1.0, 0.7)], [[1, 3], [1, 3], [1, 3]]);
    // Squared, they are 1 : 16 : 4 : 9.
    assert_eq!([kept(2.0, 0, 0.5, 0.0), kept(1.0, 0, 0.3, 0.0), kept(1.0, 2, 0.5, 0.0)], [[1], [1], [1]]);
    assert_eq!(kept(1.0, 3, 0.8, 0.0), [1, 2, 3]);
    let draw = |high: i32| {
        let bits = Tensor::i32(&[1, 2], vec![0, high]);
        value(&case("draw", &[], &[("x", f32s(&[1, 4], &x)), ("bits", bits)]), "token")[0]
    };
    let share = |u: f64| (u * 65536.0 * 65536.0) as u32 as i32;
    assert_eq!(
        [0.0, 0.09, 0.11, 0.49, 0.51, 0.69, 0.71, 0.99].map(|u| draw(share(u))),
        [0., 0., 1., 1., 2., 2., 3., 3.]
    );
}

pub(crate) fn attention_masks_by_hand() {
    // One query head, scores 0 for every key, values 1, 2, 4, 8: the output is the mean of what is seen.
    let mean = |params: &[(&str, &str)], q_pos: i32, kv_len: i32| {
        let case = case(
            "attention",
            params,
            &[
                ("q", f32s(&[1, 1, 1, 1], &[0.0])),
                ("k", f32s(&[1, 4, 1, 1], &[1.0; 4])),
                ("v", f32s(&[1, 4, 1, 1], &[1.0, 2.0, 4.0, 8.0])),
                ("q_pos", Tensor::i32(&[1, 1], vec![q_pos])),
                ("kv_len", Tensor::i32(&[1], vec![kv_len])),
            ],
        );
        let references = find("attention").unwrap().oracle(&case).unwrap();
        (references["out"].value[0], references["lse"].value[0])
    };
    assert_eq!(mean(&[], 0, 4), (3.75, 4f64.ln()));
    assert_eq!(mean(&[("causal", "1")], 1, 4), (1.5, 2f64.ln()));
    assert_eq!(mean(&[("causal", "1"), ("window", "1")], 2, 4), (4.0, 0.0));
    assert_eq!(mean(&[("window", "2")], 2, 4), (14.0 / 3.0, 3f64.ln()));
    assert_eq!(mean(&[], 0, 3), (7.0 / 3.0, 3f64.ln()));
    assert_eq!(mean(&[("causal", "1"), ("window", "1")], 3, 3), (0.0, f64::NEG_INFINITY));
    // Chunks of two positions, with what stands behind a query and without.
    assert_eq!(mean(&[("causal", "1"), ("chunk", "2")], 2, 4), (4.0, 0.0));
    assert_eq!(mean(&[("causal", "1"), ("chunk", "2")], 3, 4), (6.0, 2f64.ln()));
    assert_eq!(mean(&[("chunk", "2")], 1, 4), (3.75, 4f64.ln()));
    assert_eq!(mean(&[("causal", "1"), ("chunk", "3"), ("window", "2")], 2, 4), (3.0, 2f64.ln()));
}

/// Group heads share keys, and softcap bends scores.
pub(crate) fn attention_heads_and_softcap_by_hand() {
    let case = case(
        "attention",
        &[("scale", "2"), ("softcap", "3")],
        &[
            ("q", f32s(&[1, 1, 4, 1], &[1.0, 1.0, 1.0, 1.0])),
            ("k", f32s(&[1, 2, 2, 1], &[0.0, 0.0, 1.5, -1.5])),
            ("v", f32s(&[1, 2, 2, 1], &[0.0, 0.0, 1.0, 1.0])),
            ("q_pos", Tensor::i32(&[1, 1], vec![0])),
            ("kv_len", Tensor::i32(&[1], vec![2])),
        ],
    );
    let out = &find("attention").unwrap().oracle(&case).unwrap()["out"].value;
    let share = |s: f64| s.exp() / (1.0 + s.exp());
    let score = 3.0 * 1f64.tanh();
    for (have, want) in out.iter().zip([share(score), share(score), share(-score), share(-score)]) {
        assert!((have - want).abs() < 1e-7, "{out:?}");
    }
}

/// When a sum is exact in every order, when it overflows in every order, and when nothing is claimed.
pub(crate) fn sums_by_hand() {
    let pow = round::pow2;
    let sum_of = |terms: &[f64]| gemm::sum_of(terms.iter().copied());
    let claims_nothing = f64::INFINITY;
    // 24 bits hold every sum of some of the terms, up to the largest f32.
    assert_eq!(sum_of(&[2.0 - pow(-23), pow(-23)]), (2.0, 0.0));
    assert_eq!(sum_of(&[f64::from(f32::MAX)]), (f64::from(f32::MAX), 0.0));
    assert_eq!(sum_of(&[2.0, pow(-23)]).1, 2.0 + pow(-23) + 2.0 * FLOOR);
    assert_eq!(sum_of(&[0.5, 0.5 - pow(-40), pow(-40)]), (1.0, 1.0 + 3.0 * FLOOR));
    // No f32 is half of the smallest one.
    assert!(sum_of(&[pow(-149)]).1 == 0.0 && sum_of(&[pow(-150), pow(-150)]).1 > 0.0);
    // Terms of one sign that are beyond f32 together; less than that may or may not be.
    assert_eq!(sum_of(&[pow(127); 3]), (f64::INFINITY, 0.0));
    assert_eq!(sum_of(&[0.5, pow(127), pow(128)]), (f64::INFINITY, 0.0));
    assert_eq!(sum_of(&[pow(127), pow(127), pow(126)]).1, claims_nothing);
    assert_eq!(sum_of(&[0.5, -pow(127), -pow(128)]).1, claims_nothing);
    assert_eq!(sum_of(&[-0.5, pow(127), pow(128)]).1, claims_nothing);
}

/// Value and condition of `out` and of `lse`, of one query over keys of one element and their values.
fn attend(q: &[f32], k: &[f32], v: &[f32]) -> [(f64, f64); 2] {
    let keys = v.len();
    let inputs = [
        ("q", f32s(&[1, 1, 1, q.len()], q)),
        ("k", f32s(&[1, keys, 1, q.len()], k)),
        ("v", f32s(&[1, keys, 1, 1], v)),
        ("q_pos", Tensor::i32(&[1, 1], vec![0])),
        ("kv_len", Tensor::i32(&[1], vec![keys as i32])),
    ];
    let references = find("attention").unwrap().oracle(&case("attention", &[("scale", "1")], &inputs)).unwrap();
    ["out", "lse"].map(|name| (references[name].value[0], references[name].condition[0]))
}

/// A weight below 2^-100 of the largest is 0, and 0 * inf is NaN; three binades on either side nothing is claimed.
pub(crate) fn attention_of_infinite_values_beside_the_cut() {
    let out = |binades: f32| attend(&[1.0], &[10.0, 10.0 + binades * std::f32::consts::LN_2], &[1.0, f32::INFINITY])[0];
    for (binades, nan, claimed) in [
        (-86.5, false, true),
        (-96.5, false, true),
        (-97.5, false, false),
        (-99.5, false, false),
        (-100.5, true, false),
        (-102.5, true, false),
        (-103.5, true, true),
        (-115.5, true, true),
    ] {
        let (value, condition) = out(binades);
        assert_eq!((value.is_nan(), condition == 0.0), (nan, claimed), "{binades}");
        assert!(claimed || condition == f64::INFINITY);
    }
}

/// Where the oracle is sure, where it allows for rounding, and where it claims nothing.
pub(crate) fn attention_conditions_by_hand() {
    // A score of products that cancel is not exact.
    assert_eq!(attend(&[0.0, 0.0], &[1.0, -1.0], &[1.0])[1], (0.0, 0.0));
    assert_eq!(attend(&[1.0, 1.0], &[1.0, -1.0], &[1.0])[1], (0.0, 3.0));
    assert_eq!(attend(&[1.0], &[1.0, 0.0], &[0.0, 0.0])[0], (0.0, 0.0));
    let large = |v: f32| attend(&[1.0], &[1.0, 0.0], &[v, v])[0].1;
    assert!(large(1.2e38).is_finite() && large(1.3e38) == f64::INFINITY);
}

/// Value and condition of each element of an output.
fn judged(case: &Case, output: &str) -> Vec<(f64, f64)> {
    let reference = &find(&case.op).unwrap().oracle(case).unwrap()[output];
    std::iter::zip(reference.value.iter().copied(), reference.condition.iter().copied()).collect()
}

/// Two sequences of two channels and three taps, the second of one row.
pub(crate) fn convolutions_by_hand() {
    let (w, bias) = (f32s(&[2, 3], &[100.0, 10.0, 1.0, 1.0, 0.0, -1.0]), f32s(&[2], &[0.0, 0.5]));
    let x = f32s(&[2, 3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 9.0, 9.0, 9.0]);
    let state = f32s(&[2, 2, 2], &[-1.0, -2.0, -3.0, -4.0, 0.5, 0.25, 2.0, 3.0]);
    let len = Tensor::i32(&[2], vec![3, 1]);
    let values = |case: &Case, output: &str| judged(case, output).into_iter().map(|(v, _)| v).collect::<Vec<_>>();
    let call = case(
        "causal_conv1d",
        &[],
        &[("x", x.clone()), ("w", w.clone()), ("bias", bias), ("state", state.clone()), ("len", len.clone())],
    );
    let first = [-129.0, -3.5, -287.0, -7.5, 135.0, -3.5];
    assert_eq!(values(&call, "y"), [first, [77.0, -7.25, 0.0, 0.0, 0.0, 0.0]].concat());
    assert_eq!(values(&call, "next"), [3.0, 4.0, 5.0, 6.0, 2.0, 3.0, 7.0, 8.0]);
    // Without a state: +0, which an infinite tap makes NaN.
    let call = case(
        "causal_conv1d",
        &[],
        &[("x", f32s(&[1, 2, 1], &[1.0, 2.0])), ("w", f32s(&[1, 2], &[f32::INFINITY, 1.0]))],
    );
    assert!(values(&call, "y")[0].is_nan() && values(&call, "y")[1] == f64::INFINITY);
    assert_eq!(values(&call, "next"), [2.0]);
    let dnext = f32s(&[2, 2, 2], &[0.5; 8]);
    let call = case("causal_conv1d_backward", &[], &[("dy", x.clone()), ("w", w), ("dnext", dnext), ("len", len)]);
    let [state_of_one, rows] = [[100.0, 2.0, 310.0, 4.0], [531.0, 4.0, 53.5, -3.5]];
    assert_eq!(values(&call, "dstate"), [state_of_one, [700.0, 8.0, 70.5, 0.5]].concat());
    assert_eq!(values(&call, "dx"), [&rows[..], &[5.5, -5.5], &[7.5, -7.5, 0.0, 0.0, 0.0, 0.0]].concat());
    // The second row of the second sequence is no token; its x is one that the third looks back at.
    let mask = Tensor::i32(&[2, 3], vec![1, 1, 1, 1, 0, 1]);
    let inputs =
        [("x", x.clone()), ("dy", x), ("state", state), ("mask", mask), ("carry", f32s(&[64, 2, 3], &[0.25; 384]))];
    let dw = values(&case("causal_conv1d_dw", &[("token_offset", "62")], &inputs), "dw");
    assert_eq!(dw[62 * 6..][..6], [-0.75, -2.75, 1.25, -3.75, -7.75, 4.25]);
    assert_eq!(dw[..6], [5.25, 15.25, 25.25, 12.25, 24.25, 36.25]);
    assert_eq!(dw[2 * 6..][..6], [63.25, 81.25, 81.25, 72.25, 81.25, 81.25]);
    assert!(dw[3 * 6..62 * 6].iter().all(|v| *v == 0.25));
}

/// Two heads' worth of a state of two rows and two columns, two tokens; the second sequence is of one.
pub(crate) fn recurrences_of_rwkv_by_hand() {
    let of_tokens = |values: [f32; 8]| f32s(&[2, 2, 1, 2], &values);
    let inputs = [
        ("r", of_tokens([1.0, 1.0, 2.0, 0.0, 1.0, -1.0, 9.0, 9.0])),
        ("w", of_tokens([0.0, f32::NEG_INFINITY, 0.0, 0.0, 0.0, 0.0, 9.0, 9.0])),
        ("k", of_tokens([1.0, 2.0, 0.0, 1.0, 1.0, 3.0, 9.0, 9.0])),
        ("v", of_tokens([3.0, -1.0, 1.0, 1.0, 2.0, 5.0, 9.0, 9.0])),
        ("a", of_tokens([1.0, -1.0, 0.0, 1.0, 1.0, 1.0, 9.0, 9.0])),
        ("b", of_tokens([0.0, 1.0, 2.0, 0.0, 1.0, 0.0, 9.0, 9.0])),
        ("state", f32s(&[2, 1, 2, 2], &[1.0, 2.0, 0.0, 1.0, 1.0, 0.0, 2.0, 1.0])),
        ("len", Tensor::i32(&[2], vec![2, 1])),
    ];
    let values = |case: &Case, output: &str| judged(case, output).into_iter().map(|(v, _)| v).collect::<Vec<_>>();
    let call = case("wkv7", &[], &inputs);
    // a reads (1, 1) before the second row is forgotten, and that row takes it; k and v add (3, -1) and twice that: (4, 1) and
    // (7, -1). Then a reads the second row, and the first takes twice that. (2, 5) and three times that, and the sum of both rows
    // to the first.
    assert_eq!(values(&call, "next"), [18.0, -1.0, 8.0, 0.0, 6.0, 6.0, 8.0, 16.0]);
    assert_eq!(values(&call, "y"), [11.0, 0.0, 36.0, -2.0, -2.0, -10.0, 0.0, 0.0]);
}

/// Two channels of a state of two elements, two positions; the second sequence is of one. Steps are 32 where they are any.
pub(crate) fn selective_scans_by_hand() {
    let (none, nothing) = (f32::NEG_INFINITY, [9.0, 9.0]);
    let inputs = [
        ("x", f32s(&[2, 2, 2], &[1.0, 2.0, -1.0, 3.0, 4.0, 1.0, nothing[0], nothing[1]])),
        ("dt", f32s(&[2, 2, 2], &[32.0, none, 32.0, 32.0, none, 32.0, nothing[0], nothing[1]])),
        // The first channel forgets neither element, the second its second one.
        ("a_log", f32s(&[2, 2], &[none, none, none, 9.0])),
        ("b", f32s(&[2, 2, 2], &[1.0, 2.0, 0.5, 1.0, 3.0, 0.25, nothing[0], nothing[1]])),
        ("c", f32s(&[2, 2, 2], &[1.0, 1.0, 2.0, -1.0, 1.0, 2.0, nothing[0], nothing[1]])),
        ("d", f32s(&[2], &[0.0, 10.0])),
        ("state", f32s(&[2, 2, 2], &[1.0, 0.0, 5.0, 6.0, 7.0, 8.0, 1.0, 2.0])),
        ("len", Tensor::i32(&[2], vec![2, 1])),
    ];
    let values =
        |case: &Case, output: &str| judged(case, output).into_iter().map(|(v, _)| v.round()).collect::<Vec<_>>();
    let call = case("selective_scan", &[], &inputs);
    // 32 and 64 enter (1, 0), then -16 and -32; (5, 6) rests, and then 48 enters what is left of it, and 96.
    assert_eq!(values(&call, "next"), [17.0, 32.0, 53.0, 96.0, 7.0, 8.0, 97.0, 8.0]);
    assert_eq!(values(&call, "y"), [97.0, 31.0, 2.0, 40.0, 23.0, 123.0, 0.0, 0.0]);
}

/// A key of two elements, two value heads of one element, two tokens; the second sequence is of one.
pub(crate) fn delta_rules_by_hand() {
    let rows = f32s(&[2, 2, 1, 2], &[1.0, 0.0, 0.0, 2.0, 3.0, 1.0, 9.0, 9.0]);
    let inputs = [
        ("q", f32s(&[2, 2, 1, 2], &[1.0, 1.0, 2.0, 3.0, 1.0, -1.0, 9.0, 9.0])),
        ("k", rows),
        ("v", f32s(&[2, 2, 2, 1], &[3.0, 5.0, 4.0, 8.0, 20.0, 0.0, 9.0, 9.0])),
        ("g", f32s(&[2, 2, 2, 1], &[0.0, 0.0, 0.0, f32::NEG_INFINITY, 0.0, 0.0, 9.0, 9.0])),
        ("beta", f32s(&[2, 2, 2], &[0.5, 1.0, 0.25, 0.5, 0.5, 1.0, 9.0, 9.0])),
        ("state", f32s(&[2, 2, 2, 1], &[1.0, 2.0, 0.0, 0.0, 1.0, 7.0, -1.0, 3.0])),
        ("len", Tensor::i32(&[2], vec![2, 1])),
    ];
    let values = |case: &Case, output: &str| judged(case, output).into_iter().map(|(v, _)| v).collect::<Vec<_>>();
    let call = case("gated_delta_rule", &[("scale", "2")], &inputs);
    // (1, 2) reads 1 and takes 2 half way to 3; (2, 2) reads 4, which it was to be. The second head forgets (5, 0) and takes
    // 4 half of 8 by a key of 2. (1, 7) reads 10, and takes 5 by (3, 1); (-1, 3) reads 0, which it was to be.
    assert_eq!(values(&call, "next"), [2.0, 2.0, 0.0, 8.0, 16.0, 12.0, -1.0, 3.0]);
    assert_eq!(values(&call, "y"), [8.0, 10.0, 20.0, 48.0, 8.0, -8.0, 0.0, 0.0]);
}

/// What a product with an uncertain number is uncertain by.
pub(crate) fn terms_by_hand() {
    let error =
        |dy: f64, value: f64, error: f64| token_sum::term(dy, rms_norm_backward::Product { value, error }).error;
    assert_eq!((error(2.0, 3.0, 1.0), error(2.0, 3.0, f64::INFINITY)), (2.0, f64::INFINITY));
    // 0 and NaN take all there is; infinity does, where the sign is certain.
    assert_eq!((error(0.0, 3.0, 1.0), error(f64::NAN, 3.0, 1.0), error(f64::INFINITY, 0.0, 0.0)), (0.0, 0.0, 0.0));
    assert_eq!(error(f64::INFINITY, round::pow2(-14), 1.0), f64::INFINITY);
    assert_eq!(error(f64::INFINITY, round::pow2(-13), 1.0), 0.0);

    assert_eq!(route_backward::sum_of_products(&[(FLOOR, 0.0)], &[(1.0, 0.0)]), (FLOOR, 2.0 * FLOOR));
    assert_eq!(route_backward::quotient((0.0, 0.0), (1.0, 0.0)), (0.0, FLOOR));
    let half = HUGE * 0.75;
    assert_eq!(route_backward::difference((half, 0.0), (half, 0.0)), (0.0, f64::INFINITY));
    assert_eq!(route_backward::difference((1.0, 2.0), (3.0, 4.0)), (-2.0, 8.0));
}

/// Within 1e-7.
fn near(found: impl IntoIterator<Item = f64>, expected: &[f64]) -> bool {
    let found: Vec<f64> = found.into_iter().collect();
    found.len() == expected.len() && std::iter::zip(&found, expected).all(|(a, b)| (a - b).abs() < 1e-7)
}

/// What an error of a layer norm is proportional to, and where nothing is claimed.
pub(crate) fn layer_norm_by_hand() {
    let pow = |n| round::pow2(n) as f32;
    let norm = |eps: &str, x: &[f32], w: &[f32]| {
        let inputs = [("x", f32s(&[1, x.len()], x)), ("w", f32s(&[w.len()], w))];
        judged(&case("layer_norm", &[("eps", eps)], &inputs), "y")
    };
    // f64 does not hold the mean: of the mean square less the square of the mean, 2 / 9, it has no bit.
    let y = norm("0", &[16_777_215.0, 16_777_216.0, 16_777_216.0], &[1.0; 3]);
    assert!(near(y.into_iter().map(|(value, _)| value), &[-(2f64.sqrt()), 0.5f64.sqrt(), 0.5f64.sqrt()]));
    // A variance of a quarter of the smallest normal number: it may be lost four times over.
    assert_eq!(norm("0", &[pow(-64), -pow(-64)], &[1.0; 2])[0], (1.0, 5.0));
    // The norm is half of the smallest normal number, which it and its product with the weight lose.
    assert_eq!(norm("8.507059173023462e37", &[pow(-64), -pow(-64)], &[1.0; 2])[0], (round::pow2(-127), 2.5 * FLOOR));
    // The sum is not exact, and the mean no f32: they err by 2 units, 16 times. The square of that is 3.64e-12.
    let claimed = |eps| norm(eps, &[1.0, 1.0 + 3.0 * f32::EPSILON], &[1.0; 2])[0].1.is_finite();
    assert!(claimed("2.35e-10") && !claimed("2.3e-10"));
    assert_eq!(norm("0", &[pow(64), -pow(64)], &[1.0; 2])[0].1, f64::INFINITY);
    // The third element is 2 s / 3 from the mean, which errs by 2 / 3 units. With a weight of 0 only its sign counts.
    let certain = |s: f32| norm("0", &[1.0, -1.0, s], &[1.0, 1.0, 0.0])[2].1 == 0.0;
    assert!(certain(1.01 * pow(-14)) && !certain(0.99 * pow(-14)));
}

/// The same for the norm by the root of the mean square.
pub(crate) fn rms_norm_by_hand() {
    let pow = |n| round::pow2(n) as f32;
    let norm = |eps: &str, rounding: &str, x: f32| {
        let inputs = [("x", f32s(&[1, 2], &[x, -x])), ("w", f32s(&[2], &[1.0; 2]))];
        judged(&case("rms_norm", &[("eps", eps), ("rounding", rounding)], &inputs), "y")[0]
    };
    assert_eq!((rms_norm::roundings(0), rms_norm::roundings(512)), (16.0, 18.0));
    assert_eq!(norm("0", "once", pow(-64)), (1.0, 5.0));
    assert_eq!(norm("8.507059173023462e37", "once", pow(-64)), (round::pow2(-127), 2.5 * FLOOR));
    // Halfway between two subnormal bf16 numbers, 2^-133 apart.
    let (_, condition) = norm("8.507059173023462e37", "hf", pow(-64) + pow(-71));
    assert!(condition > round::pow2(24 - 133), "{condition}");
}

/// The order of choices, and which of them may change places by rounding.
pub(crate) fn choices_by_hand() {
    let order = |values: &[f64], count: usize| {
        let mut doubtful = false;
        (route::order(values, &mut doubtful, count), doubtful)
    };
    assert_eq!(order(&[1.0, 3.0, f64::NAN, 3.0], 3), (vec![2, 1, 3], false));
    // 1e-5 of the larger one apart, and less.
    assert_eq!(order(&[1e5, 99_999.0], 2), (vec![0, 1], false));
    assert_eq!(order(&[1e5, 99_999.5], 2), (vec![0, 1], true));
    assert_eq!(order(&[-2.0, -1.0], 2), (vec![1, 0], false));
    assert_eq!(order(&[-99_999.5, -1e5], 2), (vec![0, 1], true));
    // What is behind the first that is left out does not count.
    assert_eq!(order(&[3.0, 2.0, 1.0, 0.999_999], 2), (vec![0, 1], false));
    assert_eq!(order(&[1e-28, 5e-29], 2), (vec![0, 1], false));
    assert_eq!(order(&[5e-29, 2e-29], 1), (vec![0], true));
    assert_eq!(order(&[5e-29, 5e-29], 1), (vec![0], false));
}

/// The error of a softcap is that of its cap, and below the smallest normal number absolute.
pub(crate) fn softcap_by_hand() {
    let tiny = case("softcap", &[("cap", "7.52316384526264e-37")], &[("x", f32s(&[1], &[f32::from_bits(1)]))]);
    let (value, condition) = judged(&tiny, "y")[0];
    // 2^-149 of 2^-120 is as good as itself.
    assert!((value / round::pow2(-149) - 1.0).abs() < 1e-6, "{value}");
    assert!((condition / FLOOR - 65.0).abs() < 1e-6, "{condition}");
}

/// Where a slope may be rounded to 0, or to either side of it, an infinity and the sign of a zero are unknown.
pub(crate) fn lost_slopes_by_hand() {
    let condition = |op, params: &[(&str, &str)], inputs: &[(&str, f32)], output| {
        let inputs: Vec<_> = inputs.iter().map(|&(name, v)| (name, f32s(&[1, 1], &[v]))).collect();
        judged(&case(op, params, &inputs), output)[0].1
    };
    let silu = |gate, up| condition("silu_mul_backward", &[], &[("gate", gate), ("up", up), ("dy", 1.0)], "dgate");
    // The slope is 0 at -1.27846; beside that, 0.9 and 1.4 times 2^-16 of what it was added from.
    for (gate, unknown) in
        [(-1.278_464_5, true), (-1.278_434_5, true), (-1.278_414_5, false), (-1.0, false), (-88.0, true)]
    {
        for up in [0.0, f32::INFINITY] {
            assert_eq!(silu(gate, up).is_infinite(), unknown, "{gate} {up}");
        }
    }
    // The tangent of 6 is 1 less 1.2e-5, which is left of the square of a rounded tangent or is not.
    let softcap = |x| condition("softcap_backward", &[("cap", "32")], &[("x", x), ("dy", f32::INFINITY)], "dx");
    assert_eq!(softcap(191.99), 0.0);
    assert!([192.0, 208.0].into_iter().all(|x| softcap(x).is_infinite()));
}

/// What rounding leaves of a product: nothing to round, a half of the last place beside what an operand had, or no claim.
pub(crate) fn products_by_hand() {
    use super::rms_norm_backward::Product;
    let of = |a: f64, b: f64, b_error: f64| {
        let Product { value, error } = Product::of(a, b, b_error);
        (value, error)
    };
    let odd = 1.0 + round::pow2(-20);
    for (found, expected) in [
        (of(0.0, 3.0, 1.0), (0.0, 0.0)),
        (of(3.0, 0.0, 1.0), (0.0, 0.0)),
        (of(1e-200, 1e-200, 1.0), (0.0, FLOOR)),
        (of(1e-200, 1e-200, 0.0), (0.0, 0.0)),
        (of(f64::INFINITY, 2.0, 1.0), (f64::INFINITY, 0.0)),
        (of(3.0, 2.0, 0.0), (6.0, 0.0)),
        (of(3.0, 2.0, 1.0), (6.0, 12.0 + FLOOR)),
        (of(odd, odd, 0.0), (odd * odd, odd * odd + FLOOR)),
        (of(2e38, 2.0, 0.0), (4e38, f64::INFINITY)),
        (of(HUGE, 1.0, 1.0), (HUGE, 2.0 * HUGE + FLOOR)),
    ] {
        assert_eq!(found, expected);
    }
}

/// Where nothing may be claimed of a gradient, and where a NaN is certain.
pub(crate) fn lost_gradients_by_hand() {
    let conditions = |op, params: &[(&str, &str)], inputs: &[(&str, &[f32])]| {
        let inputs: Vec<_> = inputs
            .iter()
            .map(|&(name, v)| (name, if name == "w" { f32s(&[v.len()], v) } else { f32s(&[1, v.len()], v) }))
            .collect();
        judged(&case(op, params, &inputs), "dx").into_iter().map(|(_, condition)| condition).collect::<Vec<f64>>()
    };
    let rms = |x: &[f32], dy: &[f32]| {
        conditions("rms_norm_backward", &[("eps", "0")], &[("x", x), ("w", &vec![1.0; x.len()]), ("dy", dy)])
    };
    // The mean of the products times r twice is beyond f32; squares lose more bits than 16.
    assert_eq!(rms(&[1e-15], &[1e38]), [f64::INFINITY]);
    let tiny = 1.7 * (-72f32).exp2();
    assert_eq!(rms(&[tiny; 4], &[1.0, 2.0, 3.0, 4.0]), [f64::INFINITY; 4]);
    // Squares that lose some bits are less certain than those that lose none.
    let dy = [1.0, 2.0, 3.0, 5.0];
    let [ordinary, small] =
        [1.0, (-60f32).exp2()].map(|size| rms(&[size, -size, size, size], &dy)[0] * f64::from(size));
    assert!(small > 1.001 * ordinary, "{small} {ordinary}");

    // Where the sign of a normed value is not known, an infinity may become NaN; beside a NaN all are NaN.
    let layer = |dy: [f32; 4]| conditions("layer_norm_backward", &[], &[("x", &[0.1, 0.3, 0.2, 0.2]), ("dy", &dy)]);
    assert!(layer([f32::INFINITY, 1.0, 1.0, 1.0]).contains(&f64::INFINITY));
    assert_eq!(layer([f32::NAN, 1.0, 1.0, 1.0]), [0.0; 4]);

    // Infinity times a share that may be cut off; beside a NaN all are NaN.
    let softmax = |dy: [f32; 2]| conditions("softmax_backward", &[], &[("x", &[0.0, -69.0]), ("dy", &dy)]);
    assert_eq!(softmax([1.0, f32::INFINITY]), [f64::INFINITY; 2]);
    assert_eq!(softmax([f32::NAN, f32::INFINITY]), [0.0; 2]);
}

/// Sums over tokens: which rows they are made of, and what is known of them.
pub(crate) fn token_sums_by_hand() {
    let ints = |values: &[i32]| Tensor::i32(&[values.len()], values.to_vec());
    // Rows 0 and 2 of three go to chains 62 and 63, the next one to chain 0.
    let carry = |at: usize, v: f32| {
        let mut carry = vec![-0f32; 64];
        carry[at] = v;
        f32s(&[64, 1], &carry)
    };
    let sum = |carried: Tensor, x: &[f32], mask: &[i32]| {
        let inputs = [("x", f32s(&[x.len(), 1], x)), ("mask", ints(mask)), ("carry", carried)];
        judged(&case("token_sum", &[("token_offset", "62")], &inputs), "sum")
    };
    let found = sum(carry(63, 0.5), &[1.0, f32::NAN, 2.0, -0.0], &[1, 0, -3, 1]);
    assert_eq!((found[62], found[63]), ((1.0, 0.0), (2.5, 0.0)));
    assert!(found[0].0 == 0.0 && found[0].0.is_sign_negative(), "a sum of -0 alone");
    assert!(found[1].0.is_sign_negative(), "a chain without a token");
    let third = 1.0 / 3.0;
    let (value, condition) = sum(carry(62, third), &[1.0], &[1])[62];
    assert!((value, condition) == (1.0 + f64::from(third), 1.0 + f64::from(third) + 2.0 * FLOOR));
    assert_eq!(sum(carry(62, f32::MAX), &[f32::MAX, 1.0], &[1, 1])[62], (f64::INFINITY, 0.0));
    assert!(sum(carry(62, 0.5), &[f32::NAN], &[1])[62].0.is_nan());

    // The heads of two tokens of three, from chain 6 on.
    let heads: Vec<f32> = (0..12).map(|i| if i % 2 == 0 { (i + 1) as f32 } else { 0.0 }).collect();
    let inputs = [
        ("x", f32s(&[3, 2, 2], &[1.0; 12])),
        ("dy", f32s(&[3, 2, 2], &heads)),
        ("pos", ints(&[0; 3])),
        ("mask", ints(&[1, 0, 1])),
    ];
    let dw = judged(&case("norm_rope_dw", &[("eps", "0"), ("token_offset", "3")], &inputs), "dw");
    let first: Vec<f64> = dw.iter().step_by(2).map(|(value, _)| *value).collect();
    assert_eq!(first[5..11], [0.0, 1.0, 3.0, 9.0, 11.0, 0.0]);

    // An infinite gradient beside a normed value that may be 0 decides nothing; 0 beside what is uncertain is 0.
    let inputs =
        [("x", f32s(&[1, 4], &[0.1, 0.3, 0.2, 0.2])), ("dy", f32s(&[1, 4], &[0.0, 1.0, f32::INFINITY, f32::NAN]))];
    let dw = judged(&case("layer_norm_dw", &[], &inputs), "dw");
    assert!(dw[0] == (0.0, 0.0) && dw[1].1 > 0.0 && dw[2].1.is_infinite() && dw[3].0.is_nan());

    // A mean square of half the smallest normal number may have lost as much as it has; a single element has a row.
    let dw = |x: &[f32]| {
        let inputs = [("x", f32s(&[1, x.len()], x)), ("dy", f32s(&[1, x.len()], &vec![1.0; x.len()]))];
        judged(&case("rms_norm_dw", &[("eps", "0")], &inputs), "dw")[0]
    };
    assert!(dw(&[round::pow2(-63) as f32, 0.0]).1 > 4.0 * 2f64.sqrt());
    assert_eq!(dw(&[2.0]), (1.0, 0.0));
    // Squares that overflow leave no r, whatever the gradient is.
    let inputs = [("x", f32s(&[1, 2], &[f32::MAX, -f32::MAX])), ("dy", f32s(&[1, 2], &[1.0, 1.0]))];
    assert_eq!(judged(&case("layer_norm_dw", &[], &inputs), "dw")[0].1, f64::INFINITY);

    let fold = |x: &[f32]| judged(&case("fold", &[], &[("x", f32s(&[x.len(), 1], x))]), "y")[0];
    assert_eq!((fold(&[1.0, 2.0, 4.0, 8.0]), fold(&[0.1])), ((15.0, 0.0), (f64::from(0.1f32), 0.0)));
    assert!(fold(&[-0.0, -0.0]).0.is_sign_negative() && fold(&[-0.0, 0.0]).0.is_sign_positive());
    assert_eq!(fold(&[f32::MAX, -f32::MAX]).1, f64::INFINITY);

    let inputs = [
        ("dy", f32s(&[3, 1], &[1.0, 2.0, 4.0])),
        ("tokens", ints(&[1, 0, 1])),
        ("mask", ints(&[1, 1, 1])),
        ("carry", f32s(&[2, 1], &[8.0, 16.0])),
    ];
    assert_eq!(judged(&case("embedding_dw", &[], &inputs), "dw"), [(10.0, 0.0), (21.0, 0.0)]);

    // Two tokens of three; TF32 rounds the operands and not the carry.
    let fine = 1.0 + f32::EPSILON;
    let inputs = [
        ("x", f32s(&[3, 2], &[1.0, 2.0, f32::NAN, f32::NAN, 3.0, fine])),
        ("dy", f32s(&[3, 1], &[10.0, f32::NAN, -1.0])),
        ("mask", ints(&[1, 0, 5])),
        ("carry", f32s(&[1, 2], &[0.5, fine])),
    ];
    let tf32 = judged(&case("gemm_dw", &[("tf32", "enabled")], &inputs), "dw");
    assert_eq!([tf32[0], tf32[1]].map(|(value, _)| value), [7.5, f64::from(fine) + 19.0]);
    let whole = judged(&case("gemm_dw", &[], &inputs), "dw");
    assert_eq!((whole[0], whole[1].0), ((7.5, 0.0), 20.0));
}

/// A temperature divides the logits; a logit of which nothing is claimed decides nothing only where it has no weight.
pub(crate) fn linear_logprob_by_hand() {
    let of = |temperature: &str, w: &[[f32; 3]]| {
        let inputs = [
            ("x", f32s(&[1, 3], &[1.0; 3])),
            ("w", f32s(&[w.len(), 3], &w.concat())),
            ("target", Tensor::i32(&[1], vec![0])),
        ];
        let case = case("linear_logprob", &[("temperature", temperature)], &inputs);
        ["lse", "logprob"].map(|output| judged(&case, output)[0])
    };
    let [(lse, _), (logprob, _)] = of("2", &[[1.0, 1.0, 0.0], [0.0; 3]]);
    let expected = (1.0 + 1f64.exp()).ln();
    assert!(near([lse, logprob], &[expected, 1.0 - expected]));
    // -inf and what other orders make infinite first: -inf or NaN.
    let (none, far) = (f32::NEG_INFINITY, f32::MAX);
    assert_eq!(of("1", &[[none, 0.0, 0.0], [none, 0.0, 0.0]])[0], (f64::NEG_INFINITY, 0.0));
    assert_eq!(of("1", &[[none, 0.0, 0.0], [none, far, far]])[0], (f64::NEG_INFINITY, f64::INFINITY));
}

/// Sums up what an oracle says of one output of some cases: extents, values, and conditions, which decide how wide bounds
/// are. A number counts with the logarithm of its magnitude, so that large ones do not hide small ones, and with a weight
/// of its place.
#[derive(Default)]
struct Digest {
    elements: usize,
    exact: usize,
    value: f64,
    condition: f64,
    not_numbers: usize,
    unclaimed: usize,
}

impl Digest {
    fn add(&mut self, reference: &Reference) {
        let size = |x: f64| match x {
            _ if x.is_nan() => 0.0,
            _ if x.is_infinite() => x.signum() * 2200.0,
            _ if x == 0.0 => x.signum() / 4.0,
            _ => x.signum() * (x.abs().log2() + 1100.0),
        };
        assert_eq!(reference.shape.iter().product::<usize>(), reference.value.len());
        for (&value, &condition) in reference.value.iter().zip(&reference.condition) {
            let weight = 0.5 + (self.elements as f64 * 0.618_033_988_749_894_9).fract();
            self.value += weight * size(value);
            self.condition += weight * size(condition);
            self.not_numbers += usize::from(value.is_nan());
            self.unclaimed += usize::from(condition.is_infinite());
            self.exact += usize::from(condition == 0.0);
            self.elements += 1;
        }
        self.exact += 7919 * usize::from(reference.exact);
    }
}

/// Values and conditions of the oracles are what `oracles.txt` says on the small cases of the tables, so that no bound
/// becomes wider unseen. `SAMEBITS_RECORD=1` writes the file again.
pub(crate) fn oracles_are_as_recorded() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("oracles.txt");
    let contract = Contract::load(None).unwrap();
    let mut digests: BTreeMap<String, Digest> = BTreeMap::new();
    let mut groups = std::collections::BTreeSet::new();
    for case in contract.cases(crate::table::Slice::Default) {
        let small = case.shape.values().product::<usize>() <= 1 << 18 && case.vector.is_none();
        let of_its_own = if case.spec().reads_stored() { &case.name } else { &case.group };
        if !small || case.spec().class == Class::Chain || !groups.insert(of_its_own) {
            continue;
        }
        let stem = case.stem.trim_end_matches(|c: char| c.is_ascii_digit());
        for (output, reference) in case.spec().oracle(&case.build()).unwrap() {
            let line = format!("{} {stem} {} {output}", case.op, case.fill.name());
            digests.entry(line).or_default().add(&reference);
        }
    }
    let mut text = String::from("op stem fill output: elements, exact ones, NaN, unclaimed, values, conditions\n");
    for (name, d) in &digests {
        let Digest { elements, exact, value, condition, not_numbers, unclaimed } = d;
        writeln!(text, "{name} {elements} {exact} {not_numbers} {unclaimed} {value:.4} {condition:.4}").unwrap();
    }
    if std::env::var_os("SAMEBITS_RECORD").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let recorded = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), recorded.lines().count());
    for (have, want) in text.lines().zip(recorded.lines()).skip(1) {
        // Names and counts are equal; the last digits of a sum of logarithms are the mathematics library's.
        let (have_words, want_words): (Vec<_>, Vec<_>) = (have.split(' ').collect(), want.split(' ').collect());
        let sums = |words: &[&str]| [words[8].parse::<f64>().unwrap(), words[9].parse::<f64>().unwrap()];
        let near = std::iter::zip(sums(&have_words), sums(&want_words)).all(|(a, b)| (a - b).abs() <= 1e-3);
        assert!(have_words[..8] == want_words[..8] && near, "the oracle says\n{have}\nand recorded is\n{want}");
    }
}

/// Every oracle of a gradient is what moving each input makes of the oracle of the forward, weighed by the gradients of its
/// outputs: a gradient `dX` belongs to the input or output X. Inputs are multiples of 2^-8, so that f32 holds them moved.
pub(crate) fn gradients_are_finite_differences() {
    let mut random = samebits_schema::sample::Random::new(5);
    let of_ops = |spec: &&Spec| spec.direction() == Direction::Gradient && spec.class != Class::Chain;
    for spec in all().iter().filter(of_ops) {
        let forward = find(spec.gradient_of.unwrap()).unwrap();
        let mut inputs: BTreeMap<&str, Tensor> = BTreeMap::new();
        let is_choice = |input: &&samebits_schema::Input| matches!(input.holds, Holds::Choices(_));
        for input in forward.inputs.iter().chain(spec.inputs).filter(|input| !is_choice(input)) {
            // Rows of x for three experts of each of three tokens.
            let extent = |axis: &str| match axis {
                // Two channels to a group on either side, and windows of two taps.
                "D" | "H" | "W" if forward.name == "conv" => 3,
                "C" | "O" if forward.name == "conv" => 6,
                "I" | "KD" | "KH" | "KW" | "OD" | "OH" | "OW" => 2,
                "D" => 6,
                "R" if spec.owned().is_some() => 9,
                // Two to a key head, or to a group.
                "Hq" | "H" | "Hv" => 6,
                // A decay for each element of a key.
                "G" if spec.name.starts_with("gated_delta_rule") => 6,
                // Rows before those of a convolution with three taps.
                "J" => 2,
                _ => 3,
            };
            let shape = input.shape(extent, &[3, 3]);
            let count = shape.iter().product();
            let mut number = || (random.below(768) as f32 - 384.0) / 256.0;
            let tensor = match (input.name, input.is_float()) {
                ("carry", _) => f32s(&shape, &vec![0.0; count]),
                // What a forward with lengths leaves out is no token.
                ("mask", _) => {
                    let len = inputs.get("len").and_then(Tensor::as_i32);
                    let counts = |i: usize| len.is_none_or(|len| (i % shape[1]) < len[i / shape[1]] as usize);
                    Tensor::i32(&shape, (0..count).map(|i| i32::from(counts(i))).collect())
                }
                (_, true) => f32s(&shape, &(0..count).map(|_| number()).collect::<Vec<_>>()),
                (_, false) => {
                    let most = if matches!(input.holds, Holds::Distinct(_)) { 9 } else { 3 };
                    Tensor::i32(&shape, (0..count as i32).map(|i| i * 4 % most).collect())
                }
            };
            inputs.insert(input.name, tensor);
        }
        // With an offset it is the transposed convolution.
        inputs.remove("offset");
        for params in params_of(spec) {
            differences(spec, forward, params, inputs.clone());
            if let Some(input) = forward.inputs.iter().find(is_choice) {
                // Also of others than the likeliest.
                let chosen: usize = params.iter().find(|(name, _)| *name == "chosen").unwrap().1.parse().unwrap();
                let named = (0..3 * chosen).map(|i| ((i / chosen + i % chosen) % 3) as i32).collect();
                let named = [(input.name, Tensor::i32(&[3, chosen], named))];
                differences(spec, forward, params, inputs.clone().into_iter().chain(named).collect());
            }
        }
    }
}

/// Parameters that make another gradient.
fn params_of(spec: &Spec) -> &'static [&'static [(&'static str, &'static str)]] {
    match spec.name {
        "route_backward" => &[
            &[("chosen", "2")],
            &[("chosen", "2"), ("normalise", "1"), ("scale", "2.5")],
            &[("chosen", "2"), ("scoring", "sigmoid"), ("scale", "-1.5")],
            &[("chosen", "3"), ("scoring", "sigmoid"), ("normalise", "1")],
            &[("chosen", "2"), ("scoring", "sparsemixer"), ("jitter", "0.4"), ("scale", "2.5")],
            &[("chosen", "3"), ("scoring", "sparsemixer"), ("jitter", "3"), ("normalise", "1")],
        ],
        "attention_backward" => &[
            &[],
            &[("causal", "1"), ("window", "2"), ("scale", "0.75")],
            &[("causal", "1"), ("chunk", "2")],
            &[("causal", "1"), ("softcap", "1.5")],
        ],
        "group_norm_backward" => &[
            &[],
            &[("groups", "3"), ("eps", "0.5")],
            &[("silu", "1"), ("eps", "0.5")],
            &[("groups", "3"), ("silu", "1"), ("eps", "0.5")],
        ],
        // As many outputs whatever the window: two by an axis.
        "conv_dx" | "conv_dw" => &[
            &[("groups", "3")],
            &[("groups", "3"), ("stride_h", "2"), ("pad_top", "1"), ("dilation_w", "2"), ("pad_right", "1")],
            &[("groups", "3"), ("dilation_d", "2"), ("pad_front", "1")],
        ],
        _ => &[&[]],
    }
}

/// Holds the gradient `spec` of `forward` to differences at `inputs`.
fn differences(spec: &Spec, forward: &Spec, params: &[(&str, &str)], mut inputs: BTreeMap<&str, Tensor>) {
    let answer = |spec: &Spec, inputs: &BTreeMap<&str, Tensor>| {
        let given = spec.inputs.iter().filter(|input| inputs.contains_key(input.name));
        let own: Vec<(&str, Tensor)> = given.map(|i| (i.name, inputs[i.name].clone())).collect();
        spec.oracle(&case(spec.name, params, &own)).unwrap()
    };
    // What a gradient reads of the outputs is what the forward made.
    for (name, output) in answer(forward, &inputs) {
        if let Some(read) = inputs.get_mut(name.as_str()) {
            *read = output.rounded(read.dtype());
        }
    }
    let loss = |inputs: &BTreeMap<&str, Tensor>| {
        let weighed = |(name, output): (String, Reference)| {
            // A choice has no gradient, nobody has one of attention's lse, and taps are not in the state that they leave.
            let none = [("route_backward", "rank"), ("attention_backward", "lse"), ("causal_conv1d_dw", "next")];
            if none.contains(&(spec.name, &name)) {
                return 0.0;
            }
            let dy = inputs[format!("d{name}").as_str()].to_f64();
            output.value.iter().zip(dy).map(|(y, dy)| y * dy).sum::<f64>()
        };
        answer(forward, inputs).into_iter().map(weighed).sum::<f64>()
    };
    let gradients = answer(spec, &inputs);
    assert!(!gradients.is_empty());
    for (name, gradient) in &gradients {
        let x = inputs[&name[1..]].to_f64();
        // 64 chains are one sum, and so is what a scan gives of its heads' or channels' parameters, by position or by sequence,
        // or a norm or a convolution of its channels', by image.
        let many = if gradient.shape[0] == 64 { 64 } else { 1 };
        let of_rows = ["da_log", "dd", "dbias"].contains(&name.as_str()) || spec.name == "group_norm_backward";
        let many = if of_rows { gradient.value.len() / x.len() } else { many };
        assert_eq!(gradient.value.len(), x.len() * many);
        for i in 0..x.len() {
            let found: f64 = gradient.value.iter().skip(i).step_by(x.len()).sum();
            let moved = |steps: f64| {
                let mut values: Vec<f32> = x.iter().map(|v| *v as f32).collect();
                values[i] += (steps / 128.0) as f32;
                let mut inputs = inputs.clone();
                let tensor = inputs.get_mut(&name[1..]).unwrap();
                *tensor = f32s(tensor.shape(), &values);
                loss(&inputs)
            };
            // Five points: the error is that of the fifth derivative.
            let slope = (8.0 * (moved(1.0) - moved(-1.0)) - (moved(2.0) - moved(-2.0))) / 12.0 * 128.0;
            assert!((found - slope).abs() < 1e-6, "{} {name}[{i}]: {found}, by differences {slope}", spec.name);
        }
    }
}

/// Values of losses, and how far off they may be: tokens that do not count are not read.
pub(crate) fn losses_by_hand() {
    let nan = f32::NAN;
    let tokens = |name: &'static str, values: &[f32]| (name, f32s(&[2, 3], values));
    let logprob = tokens("logprob", &[-1.0, nan, -2.0, nan, nan, nan]);
    let inputs = [logprob.clone(), ("count", Tensor::i32(&[2, 3], vec![1, 0, -1, 0, 0, 0]))];
    let nll = |params: &[(&str, &str)], output| judged(&case("nll", params, &inputs), output);
    assert_eq!(nll(&[], "per_sequence"), [(3.0, 0.0), (0.0, 0.0)]);
    assert_eq!(nll(&[("denominator", "4")], "dlogprob")[..3], [(-0.25, 0.0), (0.0, 0.0), (-0.25, 0.0)]);
    let mean = [("reduction", "mean"), ("denominator", "3")];
    assert_eq!(nll(&mean, "per_sequence"), [(1.5, 0.0), (0.0, 0.0)]);
    // Half is exact, a sixth is not.
    assert_eq!(nll(&mean, "dlogprob")[0], (-1.0 / 6.0, 1.0 / 6.0 + FLOOR));

    let policy = |a: f32, advantage: f32, params: &[(&str, &str)], reference: Option<f32>| {
        let one = |name: &'static str, value: f32| (name, f32s(&[1, 1], &[value]));
        let mut inputs = vec![one("logprob", a), one("old_logprob", 0.0), ("advantage", f32s(&[1], &[advantage]))];
        inputs.push(("count", Tensor::i32(&[1, 1], vec![1])));
        inputs.extend(reference.map(|r| one("reference", r)));
        let case = case("policy_loss", params, &inputs);
        ["per_sequence", "dlogprob"].map(|output| judged(&case, output)[0])
    };
    let most = f64::from(1.2f32);
    assert_eq!(policy(0.0, 2.0, &[], None), [(-2.0, 0.0), (-2.0, 0.0)]);
    assert_eq!(policy(1.0, 1.0, &[], None), [(-most, 0.0), (0.0, 0.0)]);
    assert_eq!(policy(-1.0, -1.0, &[], None), [(f64::from(0.8f32), 0.0), (0.0, 0.0)]);
    let [(value, error), (slope, _)] = policy(1.0, -1.0, &[], None);
    assert!(near([value, slope], &[1f64.exp(); 2]) && (2.0..20.0).contains(&error));
    // Near a border a rounding decides on the slope.
    let [(value, error), (_, slope_error)] = policy(1.2f32.ln(), 1.0, &[], None);
    assert!((value + most).abs() < 1e-6 && error < 10.0 && slope_error.is_infinite());
    assert!(policy(nan, 1.0, &[], None).iter().all(|(value, error)| value.is_nan() && *error == 0.0));
    let near_k = |kl: &str, expected: [f64; 2]| {
        let [(value, _), (slope, _)] = policy(-0.5, 0.0, &[("kl", kl), ("beta", "0.5")], Some(-1.0));
        assert!(near([value, slope], &expected), "{kl}: {value} {slope}");
    };
    near_k("k1", [0.25, 0.5]);
    near_k("k3", [0.5 * ((-0.5f64).exp() + 0.5 - 1.0), 0.5 * (1.0 - (-0.5f64).exp())]);

    let batch = |groups: &str, values: &[f32]| {
        let inputs = [("per_sequence", f32s(&[values.len()], values))];
        judged(&case("batch_loss", &[("groups", groups), ("denominator", "2")], &inputs), "loss")[0]
    };
    assert_eq!((batch("1", &[1.0, 2.0, 4.0]), batch("4", &[1.0, 2.0, 4.0])), ((3.5, 0.0), (3.5, 0.0)));
    assert!(batch("1", &[-0.0]).0.is_sign_positive());
}

/// The step: norms, factors, AdamW's first steps.
pub(crate) fn the_step_by_hand() {
    let rewards = [("reward", f32s(&[2, 2], &[3.0, 1.0, 1.0, 1.0]))];
    let advantage = judged(&case("group_advantage", &[("eps", "0.5")], &rewards), "advantage");
    assert!(near([advantage[0].0, advantage[1].0], &[1.0 / 1.5, -1.0 / 1.5]) && advantage[2] == (0.0, 0.0));
    let bare = judged(&case("group_advantage", &[("divide_by", "one")], &rewards), "advantage");
    assert_eq!(bare[..2], [(1.0, 0.0), (-1.0, 0.0)]);

    let squares = case("square_sum", &[], &[("x", f32s(&[2, 2], &[3.0, 4.0, 0.1, 0.0]))]);
    let squares = judged(&squares, "sum");
    assert!(squares[0] == (25.0, 0.0) && squares[1].1 > 0.0);
    let clip = |max: &str, sums: &[f32]| {
        let case = case("clip_factor", &[("max_norm", max)], &[("sum", f32s(&[sums.len()], sums))]);
        ["norm", "factor"].map(|output| judged(&case, output)[0])
    };
    assert_eq!(clip("6", &[9.0, 16.0]), [(5.0, 0.0), (1.0, 0.0)]);
    let [norm, (factor, error)] = clip("1", &[9.0, 16.0]);
    assert!(norm == (5.0, 0.0) && near([factor], &[1.0 / (5.0 + 1e-6)]) && error > 0.0);
    // Near 1 it may be on either side.
    let [_, (factor, error)] = clip("5.0000014", &[9.0, 16.0]);
    assert!(factor == 1.0 && (1.0..9.0).contains(&error), "{error}");
    // What is added to a norm shows beside a small one.
    let [_, (factor, _)] = clip("1e-6", &[1e-12]);
    assert!(near([factor], &[0.5]));
    assert!(clip("1", &[f32::INFINITY])[1] == (0.0, 0.0) && clip("1", &[f32::NAN])[1].0.is_nan());

    let adamw = |params: &[(&str, &str)], [w, m, v, g]: [f32; 4], factor: Option<f32>| {
        let mut inputs: Vec<(&str, Tensor)> =
            [("w", w), ("m", m), ("v", v), ("g", g)].map(|(name, value)| (name, f32s(&[1, 1], &[value]))).into();
        inputs.extend(factor.map(|factor| ("factor", f32s(&[1], &[factor]))));
        let case = case("adamw", params, &inputs);
        ["new_w", "new_m", "new_v"].map(|output| judged(&case, output)[0].0)
    };
    // Whatever the gradient, the first step is as long as the rate.
    let [w, m, v] = adamw(&[("lr", "0.5"), ("eps", "0"), ("weight_decay", "0.5")], [2.0, 0.0, 0.0, 3.0], None);
    assert!(near([w, m, v], &[2.0 * 0.75 - 0.5, 0.3, 0.009]));
    let second = [("lr", "0.5"), ("eps", "0.25"), ("weight_decay", "0"), ("step", "2"), ("beta2", "0.99")];
    let [w, m, v] = adamw(&second, [2.0, 1.0, 4.0, 6.0], Some(0.5));
    let (m1, v1) = (0.9 + 0.1 * 3.0, 0.99 * 4.0 + 0.01 * 9.0f64);
    let u = m1 / 0.19 / ((v1 / (1.0 - 0.99f64.powi(2))).sqrt() + 0.25);
    assert!(near([w, m, v], &[2.0 - 0.5 * u, m1, v1]), "{w} {m} {v}");
}

/// The gradient of a loss is what moving each log-probability makes of the loss of the batch.
pub(crate) fn gradients_of_losses_are_finite_differences() {
    let mut random = samebits_schema::sample::Random::new(9);
    let mut numbers = |count: usize| (0..count).map(|_| (random.below(768) as f32 - 384.0) / 256.0).collect::<Vec<_>>();
    let (b, t) = (3, 4);
    let [logprob, old, reference, advantage] = [b * t, b * t, b * t, b].map(&mut numbers);
    let count = Tensor::i32(&[b, t], (0..(b * t) as i32).map(|i| i % 3).collect());
    let policy: [&[(&str, &str)]; 4] = [
        &[("denominator", "7")],
        &[("low", "0.5"), ("high", "3"), ("reduction", "mean")],
        &[("kl", "k1"), ("beta", "0.75"), ("reduction", "mean"), ("denominator", "3")],
        &[("kl", "k3"), ("beta", "0.75"), ("denominator", "7")],
    ];
    let nll: [&[(&str, &str)]; 2] = [&[("denominator", "7")], &[("reduction", "mean"), ("denominator", "3")]];
    let all = nll.map(|params| ("nll", params)).into_iter().chain(policy.map(|params| ("policy_loss", params)));
    for (op, params) in all {
        let of = |logprob: &[f32]| {
            let mut inputs = vec![("logprob", f32s(&[b, t], logprob)), ("count", count.clone())];
            if op == "policy_loss" {
                inputs.extend([("old_logprob", f32s(&[b, t], &old)), ("advantage", f32s(&[b], &advantage))]);
            }
            if params.iter().any(|(name, _)| *name == "kl") {
                inputs.push(("reference", f32s(&[b, t], &reference)));
            }
            case(op, params, &inputs)
        };
        let denominator: f64 =
            params.iter().find(|(name, _)| *name == "denominator").map_or(1.0, |(_, d)| d.parse().unwrap());
        let loss = |logprob: &[f32]| {
            judged(&of(logprob), "per_sequence").iter().map(|(value, _)| value).sum::<f64>() / denominator
        };
        for (i, (found, _)) in judged(&of(&logprob), "dlogprob").into_iter().enumerate() {
            let moved = |steps: f32| {
                let mut logprob = logprob.clone();
                logprob[i] += steps / 256.0;
                loss(&logprob)
            };
            let slope = (8.0 * (moved(1.0) - moved(-1.0)) - (moved(2.0) - moved(-2.0))) / 12.0 * 256.0;
            assert!((found - slope).abs() < 1e-6, "{op} {params:?} [{i}]: {found}, by differences {slope}");
        }
    }
}
