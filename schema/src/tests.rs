use super::*;
use std::collections::{BTreeMap, BTreeSet};

/// What the registry promises to its readers.
#[test]
fn forms_are_whole() {
    let names: BTreeSet<_> = OPS.iter().map(|op| op.name).collect();
    assert_eq!(names.len(), OPS.len(), "a name stands twice");
    assert!(OPS.len() >= 21);
    for op in OPS.iter().flat_map(|op| op.forms()) {
        let name = op.name;
        op.whole().unwrap();
        assert!(op.gradient_of.is_none_or(|of| names.contains(of)), "{name}");
        // The first lines of its file say its form.
        let file = format!("{}/src/ops/{name}.rs", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(file).unwrap().replace("\n/// ", " ");
        assert!(text.contains(&format!("`{}`\npub static ", op.form())), "{name}: write {}", op.form());
    }
}

/// Forms that break a promise, each in one part.
#[test]
fn a_form_that_is_not_whole_is_refused() {
    const X: [Input; 1] = [Input::activation("x", &["R", "N"])];
    const Y: [Output; 1] = [Output::out("y", &["R", "N"])];
    const Z: Input = Input::activation("z", &["R", "N"]);
    const OP: Op = Op { name: "cube", about: "the third power", inputs: &X, outputs: &Y, ..Op::PLAIN };
    OP.whole().unwrap();
    const fn index(name: &'static str, axes: &'static [&'static str], holds: Holds) -> Input {
        Input::index(name, axes, holds)
    }
    fn kept<T, const N: usize>(items: [T; N]) -> &'static [T] {
        Box::leak(Box::new(items))
    }
    const PAGES: Holds = Holds::Pages { pages: "N", size: "N", lengths: "x" };
    const RANKS: Holds = Holds::Ranks("N");
    for (op, part) in [
        (Op { name: "", ..OP }, "a name is"),
        (Op { name: "Cube", ..OP }, "a name is"),
        (Op { about: "", ..OP }, "`about`"),
        (Op { inputs: kept([X[0], X[0]]), ..OP }, "an input stands twice"),
        (Op { outputs: kept([Y[0], Y[0]]), ..OP }, "an output stands twice"),
        (Op { attributes: kept([PROFILE]), ..OP }, "an attribute stands twice"),
        (Op { outputs: &[], ..OP }, "no output"),
        (Op { row_axes: 2, ..OP }, "no input has all row axes"),
        (Op { extents: &[("N", Extent::OfModel)], ..OP }, "an axis of an input"),
        (Op { extents: &[("V", Extent::OfModel)], ..OP }, "no program is named"),
        (Op { program: "decoder", ..OP }, "`program`"),
        (Op { inputs: kept([X[0], Input { dtypes: &[], ..Z }]), ..OP }, "`z`: it may have no dtype"),
        (Op { inputs: kept([X[0], Z.rows(2)]), ..OP }, "more row axes"),
        (Op { inputs: kept([X[0], Input { holds: Holds::Mask, ..Z }]), ..OP }, "not what it holds"),
        (Op { inputs: kept([X[0], Input { role: Role::Index, ..Z }]), ..OP }, "role `Index`"),
        (Op { inputs: kept([X[0], Input::weight("w", &[REST, "N"])]), ..OP }, "stands last"),
        (
            Op { inputs: kept([X[0], index("at", &["R"], Holds::Below("V"))]), ..OP },
            "`at`: it holds entries of an axis",
        ),
        (Op { inputs: kept([X[0], index("at", &["R"], PAGES)]), ..OP }, "the lengths of its pages"),
        (Op { inputs: kept([X[0], index("at", &["R", "N"], RANKS)]), ..OP }, "`chosen`"),
        (Op { inputs: kept([X[0], index("at", &["R", "N"], Holds::Choices("N"))]), ..OP }, "`chosen`"),
        (Op { outputs: kept([Output::out("y", &["R", "V"])]), ..OP }, "an axis is not bound"),
        (Op { outputs: kept([Output::out("y", &["N"])]), ..OP }, "its rows"),
        (Op { outputs: kept([Y[0].rows(3)]), ..OP }, "its rows"),
        (Op { inputs: kept([X[0], Input::carry(&["N"])]), ..OP }, "goes on from `carry`"),
        (Op { attributes: kept([Attribute::count("n", 1, "0", "a count")]), ..OP }, "`0` is not a whole number"),
    ] {
        let error = op.whole().expect_err(part).to_string();
        assert!(error.contains(part), "{error}: {part}");
        let name = op.name;
        assert!(register(Box::leak(Box::new(op))).is_err() && find(name).is_none(), "{part}");
    }
    assert!(register(Box::leak(Box::new(Op { name: "scale", ..OP }))).is_err(), "one of ours has the name");
}

/// An input's name, dtype and shape.
type Tensor = (&'static str, DType, &'static [usize]);

fn call(op: &str, attributes: &[(&str, &str)], inputs: &[Tensor], out: DType) -> Result<Call, Error> {
    let op = find(op).unwrap();
    let text: BTreeMap<String, String> = attributes.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let given: Vec<Given> = inputs.iter().map(|&(name, dtype, shape)| Given { name, dtype, shape }).collect();
    validate(op, &given, Attributes::parse(op, &text)?, out)
}

fn fp32(op: &str, attributes: &[(&str, &str)], inputs: &[(&'static str, &'static [usize])]) -> Result<Call, Error> {
    let index = |name: &str| find(op).unwrap().input(name).map_or(DType::Fp32, |i| i.dtype_beside(DType::Fp32));
    let inputs: Vec<Tensor> = inputs.iter().map(|&(name, shape)| (name, index(name), shape)).collect();
    call(op, attributes, &inputs, DType::Fp32)
}

#[test]
fn refusals_name_the_field_and_the_fix() {
    const X: (&str, &[usize]) = ("x", &[2, 3]);
    const W: (&str, &[usize]) = ("w", &[4, 3]);
    let bf16 = |name: &'static str, shape: &'static [usize]| (name, DType::Bf16, shape);
    let refused = |result: Result<Call, Error>| result.err().unwrap_or_else(|| panic!("accepted")).to_string();
    let gemm = |attributes: &[(&str, &str)], inputs: &[(&'static str, &'static [usize])]| {
        refused(fp32("gemm", attributes, inputs))
    };
    let policy = |kl: &str, more: &[(&'static str, &'static [usize])]| {
        let tokens = ["logprob", "old_logprob", "count"].map(|name| (name, &[2, 3][..]));
        let inputs = [&tokens[..], &[("advantage", &[2][..])], more].concat();
        refused(fp32("policy_loss", &[("kl", kl)], &inputs))
    };
    let chain_backward = |attributes: &[(&str, &str)], more: &[(&'static str, &'static [usize])]| {
        let inputs = [&[("tokens", &[2, 3][..]), ("count", &[2, 3][..])], more].concat();
        fp32("chain_backward", &[&[("model", "m"), ("dtype", "bf16")], attributes].concat(), &inputs)
    };
    // Query heads, key heads and rows of a page.
    let heads = |[hq, hkv, z]: [usize; 3]| {
        let (q, k) = ([1, 1, hq, 4], [2, z, hkv, 4]);
        let float = |name, shape| Given { name, dtype: DType::Fp32, shape };
        let index = |name, shape| Given { name, dtype: DType::I32, shape };
        let given = [float("q", &q), float("k", &k), float("v", &k)];
        let places = [index("page_table", &[1, 2]), index("q_pos", &[1, 1]), index("kv_len", &[1])];
        validate(&paged_attention::OP, &[given, places].concat(), Attributes::new(), DType::Fp32)
    };
    assert!(heads([4, 2, 1]).is_ok());
    for (found, part) in [
        (gemm(&[], &[X]), "input `w`: missing; gemm needs it as w[N,K] of bf16, fp16 or fp32"),
        (gemm(&[], &[X, ("w", &[4, 2])]), "input `w`: shape [4, 2] has K = 2, but K is 3 in the inputs before it"),
        (gemm(&[], &[X, W, ("z", &[1])]), "input `z`: gemm has no such input; it takes x, w, bias"),
        (gemm(&[], &[("x", &[6]), W]), "input `x`: shape [6] must have the form [M,K]"),
        (
            gemm(&[("alpha", "1")], &[X, W]),
            "param `alpha`: gemm has no such parameter; it takes k_offset, k_total, tf32, profile",
        ),
        (gemm(&[("tf32", "maybe")], &[X, W]), "param `tf32`: `maybe` is not disabled or enabled"),
        (gemm(&[("profile", "sm90")], &[X, W]), "unsupported: param `profile`: `sm90` is not offered; use ieee"),
        (gemm(&[("k_total", "2")], &[X, W]), "beyond k_total 2"),
        (gemm(&[("k_total", "6")], &[X, W]), "no subtree"),
        (gemm(&[("k_total", "-6")], &[X, W]), "param `k_total`: `-6` is not a whole number of at least 0"),
        (gemm(&[("k_offset", "18446744073709551615")], &[X, W]), "beyond k_total 3"),
        (
            refused(fp32("gemm_dx", &[("n_total", "6")], &[("dy", &[2, 4]), W])),
            "param `n_offset`: rows of w 0..4 of 6 are no subtree of its eight segments of 16",
        ),
        (
            refused(fp32("gemm_dx", &[("n_total", "3")], &[("dy", &[2, 4]), W])),
            "param `n_total`: n_offset 0 + N 4 is beyond n_total 3",
        ),
        (
            refused(fp32("batch_loss", &[("groups", "3")], &[("per_sequence", &[4])])),
            "param `groups`: 3 must be a power of two, at most 65536",
        ),
        (
            refused(chain_backward(&[("groups", "8"), ("ranks", "3")], &[])),
            "param `ranks`: 3 do not divide 8 groups; each must hold as many",
        ),
        (refused(chain_backward(&[("groups", "6")], &[])), "param `groups`: 6 must be a power of two, at most 65536"),
        (
            refused(chain_backward(&[("pad", "up:1")], &[])),
            "param `pad`: `up:1` is not none, left:N or right:N with N at most 65535",
        ),
        (
            refused(chain_backward(&[("loss", "policy")], &[("advantage", &[2])])),
            "input `old_logprob`: missing; loss = policy reads it",
        ),
        (refused(chain_backward(&[], &[("advantage", &[2])])), "input `advantage`: loss = nll reads none"),
        (policy("k3", &[]), "param `kl`: k3 is a distance from `reference`, which is missing; give it"),
        (policy("none", &[("reference", &[2, 3])]), "param `kl`: none reads no reference"),
        (
            refused(call("gemm", &[], &[("x", DType::I32, &[2, 3]), bf16("w", &[4, 3])], DType::Fp32)),
            "input `x`: dtype is i32; it must be bf16, fp16 or fp32",
        ),
        (
            refused(call("gemm", &[], &[("x", DType::Fp32, &[2, 3]), bf16("w", &[4, 3])], DType::Fp32)),
            "unsupported: input `w` is bf16 and `x` is fp32; mixed dtypes are not offered",
        ),
        (
            refused(call("gemm", &[], &[bf16("x", &[2, 3]), bf16("w", &[4, 3])], DType::I32)),
            "`out`: i32 is not an output dtype; use bf16, fp16 or fp32",
        ),
        (
            refused(call("embedding", &[], &[bf16("w", &[2, 3]), bf16("tokens", &[4])], DType::Fp32)),
            "input `tokens`: dtype is bf16; it must be i32",
        ),
        (
            refused(fp32("add", &[], &[("a", &[2, 3]), ("b", &[2, 2])])),
            "input `b`: shape [2, 2] must equal that of `a`, [2, 3]",
        ),
        (
            refused(fp32("rms_norm", &[("eps", "-1")], &[X, ("w", &[3])])),
            "param `eps`: `-1` is not a finite number from 0 to 3.4028235e38",
        ),
        (refused(fp32("rms_norm", &[("eps", "1e39")], &[X, ("w", &[3])])), "param `eps`: `1e39`"),
        (refused(fp32("rms_norm", &[("eps", "inf")], &[X, ("w", &[3])])), "param `eps`: `inf`"),
        (refused(fp32("rms_norm", &[("weight_offset", "2")], &[X, ("w", &[3])])), "`2` is not 0, 1, true or false"),
        (
            refused(fp32("softmax", &[("tf32", "enabled")], &[X])),
            "unsupported: param `tf32`: softmax has no matrix product",
        ),
        (refused(fp32("softmax", &[("tf32", "on")], &[X])), "param `tf32`: `on` is not disabled or enabled"),
        (refused(fp32("rope", &[], &[("x", &[2, 1, 3]), ("pos", &[2])])), "D = 3 must be even"),
        (refused(fp32("argmax", &[], &[("x", &[2, 0])])), "axis N is empty"),
        (refused(fp32("route", &[("chosen", "3")], &[("logits", &[1, 2])])), "3 of 2 experts; choose at most all"),
        (refused(fp32("route", &[("chosen", "0")], &[("logits", &[1, 2])])), "`0` is not a whole number of at least 1"),
        (refused(fp32("route", &[("groups", "3")], &[("logits", &[1, 4])])), "do not make 3 groups"),
        (
            refused(fp32("route", &[("groups", "4"), ("top_groups", "2"), ("chosen", "3")], &[("logits", &[1, 4])])),
            "do not hold 3 experts",
        ),
        (
            refused(fp32("route", &[("groups", "4"), ("group_worth", "top_two")], &[("logits", &[1, 4])])),
            "has no two experts",
        ),
        (refused(fp32("gemm", &[], &[("x", &[1 << 40, 0]), ("w", &[1 << 40, 0])])), "output `y`: shape"),
        (refused(fp32("add", &[], &[("a", &[0, 1 << 40, 1 << 40]), ("b", &[0])])), "input `a`: the extents of shape"),
        (refused(fp32("chain", &[("dtype", "bf16")], &[("tokens", &[1, 1])])), "param `model`: missing"),
        (
            refused(fp32(
                "chain",
                &[("model", "m"), ("dtype", "bf16"), ("schedule", "chunk:0")],
                &[("tokens", &[1, 1])],
            )),
            "chunk:N",
        ),
        (refused(heads([3, 2, 1])), "input `q`: Hq = 3 must be a multiple of Hkv = 2"),
        (refused(heads([2, 0, 1])), "input `q`: Hq = 2 must be a multiple of Hkv = 0"),
        (refused(heads([2, 2, 0])), "input `k`: axis Z is empty"),
        (
            refused(fp32(
                "packed_attention",
                &[],
                &[
                    ("q", &[3, 2, 4]),
                    ("k", &[5, 1, 4]),
                    ("v", &[5, 1, 4]),
                    ("q_pos", &[3]),
                    ("q_start", &[3]),
                    ("k_start", &[2]),
                ],
            )),
            "input `k_start`: shape [2] has B = 1, but B is 2",
        ),
    ] {
        assert!(found.contains(part), "`{part}` is not in: {found}");
        assert!(!found.contains('\n'), "{found}");
    }
}

#[test]
fn a_call_knows_extents_attributes_and_outputs() {
    let wide: &[(&str, &[usize])] = &[("x", &[2, 32]), ("w", &[4, 32]), ("bias", &[4])];
    let call = fp32("gemm", &[("k_total", "128"), ("k_offset", "96")], wide).unwrap();
    assert_eq!((call.dim("K"), call.count("k_total"), call.count("k_offset")), (32, 128, 96));
    assert!(call.has("bias") && gemm::is_partial(&call) && !call.tf32());
    let whole = call_of_gemm(DType::Bf16, "32");
    assert_eq!(whole.outputs(), [Form { name: "y", dtype: DType::Bf16, shape: vec![2, 4] }]);
    let part = call_of_gemm(DType::Bf16, "64");
    assert_eq!(part.outputs()[0].dtype, DType::Fp32, "a partial sum is f32 whatever `out` says");

    let packed: &[(&str, &[usize])] = &[
        ("q", &[3, 2, 4]),
        ("k", &[5, 1, 4]),
        ("v", &[5, 1, 6]),
        ("q_pos", &[3]),
        ("q_start", &[3]),
        ("k_start", &[3]),
    ];
    let call = fp32("packed_attention", &[("causal", "true")], packed).unwrap();
    assert_eq!((call.dim("B"), call.dims.get("B+1"), call.dim("E")), (2, Some(3), 6));
    assert_eq!((call.float("scale"), call.flag("causal"), call.count("window")), (0.5, true, 0));
    assert_eq!(call.outputs()[0].shape, [3, 2, 6]);

    // Any rank, empty extents, and a scalar.
    for shape in [&[][..], &[0], &[2, 0, 3]] {
        let call = fp32("add", &[], &[("a", shape), ("b", shape)]).unwrap();
        assert_eq!(call.outputs()[0].shape, shape);
    }
}

fn call_of_gemm(out: DType, k_total: &str) -> Call {
    let inputs: [Tensor; 2] = [("x", DType::Bf16, &[2, 32]), ("w", DType::Bf16, &[4, 32])];
    call("gemm", &[("k_total", k_total)], &inputs, out).unwrap()
}

/// Ranks that a product of 100 columns, in segments of 16, can be dealt to.
#[test]
fn parts_of_a_product_are_subtrees() {
    let ranks = |op: &'static Op, total: usize| -> Vec<(usize, usize)> {
        let total_text = total.to_string();
        let all = (0..=total).flat_map(|from| (from + 1..=total).map(move |to| (from, to)));
        let accepted = |&(from, to): &(usize, usize)| {
            let (sum, inputs) = match op.name {
                "gemm" => ("k", [("x", [1, to - from]), ("w", [1, to - from])]),
                _ => ("n", [("dy", [1, to - from]), ("w", [to - from, 1])]),
            };
            let given = inputs.each_ref().map(|(name, shape)| Given { name, dtype: DType::Fp32, shape });
            let text = [("offset", from.to_string()), ("total", total_text.clone())];
            let text = text.into_iter().map(|(name, value)| (format!("{sum}_{name}"), value)).collect();
            let attributes = Attributes::parse(op, &text).unwrap();
            let call = validate(op, &given, attributes, DType::Bf16);
            // A part is f32 whatever `out` says.
            let dtype = if to - from == total { DType::Bf16 } else { DType::Fp32 };
            assert!(call.as_ref().is_ok_and(|call| call.outputs()[0].dtype == dtype) || call.is_err());
            call.is_ok()
        };
        all.filter(accepted).collect()
    };
    let hundred = [
        (0, 16),
        (0, 32),
        (0, 64),
        (0, 100),
        (16, 32),
        (32, 48),
        (32, 64),
        (48, 64),
        (64, 80),
        (64, 96),
        (64, 100),
        (80, 96),
        (96, 100),
    ];
    for op in [&gemm::OP, &gemm_dx::OP] {
        assert_eq!(ranks(op, 100), hundred);
        assert_eq!(ranks(op, 128).len(), 15);
    }
}

#[test]
fn typed_attributes_are_checked_as_text_is() {
    let given = [("x", &[2, 3]), ("w", &[4, 3])].map(|(name, shape)| Given { name, dtype: DType::Fp32, shape });
    let gemm = |attributes: Attributes| validate(&gemm::OP, &given, attributes, DType::Fp32).map(|call| call.tf32());
    assert_eq!(gemm(Attributes::new().with("tf32", "enabled").with("k_total", 3usize)), Ok(true));
    assert!(
        gemm(Attributes::new().with("tf32", true)).unwrap_err().reason().contains("`1` is not disabled or enabled")
    );
    assert!(gemm(Attributes::new().with("k_total", 3.0)).is_err());
    assert!(gemm(Attributes::new().with("eps", 3.0)).unwrap_err().reason().contains("no such parameter"));
    let softmax = |word: &str| {
        let x = [Given { name: "x", dtype: DType::Fp32, shape: &[1, 2] }];
        validate(&softmax::OP, &x, Attributes::new().with("tf32", word), DType::Fp32)
    };
    assert!(softmax("disabled").is_ok());
    assert!(matches!(softmax("enabled"), Err(Error::Unsupported(_))));
    assert!(softmax("on").is_err());
}

#[test]
fn integers_are_held_to_their_axes() {
    let check = |op: &str,
                 inputs: &[(&'static str, &'static [usize], &[i32])],
                 floats: &[(&'static str, &'static [usize])]| {
        let all: Vec<_> = inputs.iter().map(|&(name, shape, _)| (name, shape)).chain(floats.iter().copied()).collect();
        let call = fp32(op, &[], &all).unwrap();
        let values = |name: &str| inputs.iter().find(|input| input.0 == name).map(|input| input.2);
        check_indexes(&call, values).map_err(|e| e.to_string())
    };
    let table: (&str, &[usize]) = ("w", &[2, 3]);
    assert_eq!(check("embedding", &[("tokens", &[2], &[0, 1])], &[table]), Ok(()));
    let error = check("embedding", &[("tokens", &[2], &[0, 2])], &[table]).unwrap_err();
    assert_eq!(error, "input `tokens`: element 1 is 2; use 0 to 1");
    assert!(check("embedding", &[("tokens", &[2], &[0, -1])], &[table]).is_err());
    let error = check("embedding", &[("tokens", &[1], &[0])], &[("w", &[0, 3])]).unwrap_err();
    assert!(error.contains("nothing fits"), "{error}");
    assert_eq!(check("logprob", &[("target", &[2], &[-7, 2])], &[("logits", &[2, 3])]), Ok(()));
    assert!(check("logprob", &[("target", &[2], &[-7, 3])], &[("logits", &[2, 3])]).is_err());

    let scatter = |row: &'static [i32], rows: &'static [usize]| {
        check("combine_backward", &[("row", &[2, 2], row)], &[("x", rows), ("weight", &[2, 2]), ("dy", &[2, 3])])
    };
    assert_eq!(scatter(&[3, 0, 4, 1], &[5, 3]), Ok(()));
    assert_eq!(scatter(&[3, 0, 4, 5], &[5, 3]).unwrap_err(), "input `row`: element 3 is 5; use 0 to 4");
    let twice = scatter(&[3, 0, 0, 3], &[5, 3]).unwrap_err();
    assert_eq!(twice, "input `row`: element 2 is 0, as one before it; each may stand once");

    let ranks = |rank: &'static [i32]| {
        let (logits, dweight) = (("logits", DType::Fp32, &[2, 3][..]), ("dweight", DType::Fp32, &[2, 3][..]));
        let inputs = [logits, dweight, ("rank", DType::I32, &[2, 3])];
        let call = call("route_backward", &[("chosen", "2")], &inputs, DType::Fp32).unwrap();
        check_indexes(&call, |name| Some(rank).filter(|_| name == "rank")).map_err(|e| e.to_string())
    };
    assert_eq!(ranks(&[1, -1, 0, 0, 1, -1]), Ok(()));
    assert_eq!(ranks(&[1, -1, 0, 0, 2, -1]).unwrap_err(), "input `rank`: element 4 is 2; use -1 to 1");
    for row in [[0, 0, -1], [0, -1, -1], [0, 1, 1]] {
        let all: &'static [i32] = Box::leak([&[1, -1, 0][..], &row].concat().into_boxed_slice());
        assert_eq!(
            ranks(all).unwrap_err(),
            "input `rank`: row 1 must have each rank from 0 to 1 once, and -1 elsewhere"
        );
    }

    let choices = |experts: &'static [i32]| {
        let inputs = [("logits", DType::Fp32, &[2, 3][..]), ("experts", DType::I32, &[2, 2])];
        let call = call("route", &[("chosen", "2")], &inputs, DType::Fp32).unwrap();
        check_indexes(&call, |name| Some(experts).filter(|_| name == "experts")).map_err(|e| e.to_string())
    };
    assert_eq!(choices(&[2, 0, -1, -1]), Ok(()));
    assert_eq!(choices(&[2, 0, 1, 3]).unwrap_err(), "input `experts`: element 3 is 3; use -1 to 2");
    for experts in [&[0, 1, 2, 2], &[0, 1, 1, -1], &[0, 1, -1, 0]] {
        let rule = "input `experts`: row 1 must name 2 entries, none twice, or hold -1 alone";
        assert_eq!(choices(experts).unwrap_err(), rule);
    }

    // Two sequences on three pages of two rows; the second table entry of the second one is not reached.
    let pages: &[(&str, &[usize])] = &[("q", &[2, 1, 1, 4]), ("k", &[3, 2, 1, 4]), ("v", &[3, 2, 1, 4])];
    let paged = |table: &[i32], lengths: &[i32]| {
        check(
            "paged_attention",
            &[("page_table", &[2, 2], table), ("q_pos", &[2, 1], &[0, 0]), ("kv_len", &[2], lengths)],
            pages,
        )
    };
    assert_eq!(paged(&[2, 0, 1, 99], &[3, 2]), Ok(()));
    assert!(paged(&[2, 0, 1, 99], &[3, 3]).unwrap_err().contains("`page_table`: element 3 is 99; use 0 to 2"));
    assert!(paged(&[2, 0, 1, -1], &[3, 4]).is_err());
    assert!(paged(&[2, 0, 1, 1], &[3, 5]).unwrap_err().contains("`kv_len`: element 1 is 5; use 0 to 4"));

    let flat: &[(&str, &[usize])] = &[("q", &[3, 1, 4]), ("k", &[5, 1, 4]), ("v", &[5, 1, 4])];
    let packed = |q: &[i32], k: &[i32]| {
        check("packed_attention", &[("q_pos", &[3], &[0, 0, 0]), ("q_start", &[3], q), ("k_start", &[3], k)], flat)
    };
    assert_eq!(packed(&[0, 0, 3], &[0, 5, 5]), Ok(()));
    for (q, k) in
        [(&[0, 2, 2], &[0, 5, 5]), (&[1, 2, 3], &[0, 5, 5]), (&[0, 1, 3], &[0, 6, 5]), (&[0, 1, 3], &[0, 5, 4])]
    {
        assert!(packed(q, k).is_err(), "{q:?} {k:?}");
    }
    let unsorted: &[(&str, &[usize])] = &[("q", &[3, 1, 4]), ("k", &[5, 1, 4]), ("v", &[5, 1, 4])];
    let inputs: &[(&str, &[usize], &[i32])] =
        &[("q_pos", &[3], &[0, 0, 0]), ("q_start", &[4], &[0, 2, 1, 3]), ("k_start", &[4], &[0, 1, 2, 5])];
    assert!(
        check("packed_attention", inputs, unsorted).unwrap_err().contains("it must ascend from 0 to T, which is 3")
    );
}

/// Every op gives calls, and most of them have integers that fit.
#[test]
fn samples_are_accepted() {
    for op in OPS.iter().filter(|op| !op.needs_more()) {
        let mut random = sample::Random::new(1);
        let (mut fit, mut empty, mut given, mut partial) = (0, 0, 0, 0);
        for _ in 0..400 {
            let drawn = sample::sample(op, &mut random);
            let integers: BTreeMap<&str, Vec<i32>> = drawn
                .inputs
                .iter()
                .filter(|(_, dtype, _)| !dtype.is_float())
                .map(|(name, _, shape)| {
                    let holds = op.input(name).unwrap().holds;
                    (*name, sample::integers(&drawn.call, holds, shape.iter().product(), &mut random))
                })
                .collect();
            let accepted = check_indexes(&drawn.call, |name| integers.get(name).map(Vec::as_slice)).is_ok();
            fit += usize::from(accepted);
            empty += usize::from(drawn.inputs.iter().any(|(_, _, shape)| shape.contains(&0)));
            given += usize::from(!drawn.attributes.is_empty());
            partial += usize::from(op.name == "gemm" && gemm::is_partial(&drawn.call));
            partial += usize::from(op.name == "gemm_dx" && gemm_dx::is_partial(&drawn.call));
        }
        assert!(
            fit > 250 && empty > 10 && given > 50,
            "{}: {fit} fit, {empty} empty, {given} with attributes",
            op.name
        );
        assert!(partial > 3 || !["gemm", "gemm_dx"].contains(&op.name), "{}: {partial} partial sums", op.name);
    }
}

/// An extent that nothing binds is an error: an output must not go missing in silence.
#[test]
fn an_extent_that_nothing_binds_is_an_error() {
    static LOOSE: Op = Op {
        name: "loose",
        about: "an output whose N only an optional input has, which the call leaves out",
        inputs: &[Input::activation("x", &["R", "K"]), Input::weight("bias", &["N"]).optional()],
        outputs: &[Output::out("y", &["R", "N"])],
        ..Op::PLAIN
    };
    let x = Given { name: "x", dtype: DType::Fp32, shape: &[2, 3] };
    let bias = Given { name: "bias", dtype: DType::Fp32, shape: &[5] };
    assert_eq!(validate(&LOOSE, &[x, bias], Attributes::new(), DType::Fp32).unwrap().outputs()[0].shape, [2, 5]);
    let error = validate(&LOOSE, &[x], Attributes::new(), DType::Fp32).unwrap_err();
    assert!(error.reason().contains("output `y`: nothing says the extent of its axis N"), "{error}");
}

/// Extents that are functions of inputs and attributes, as a convolution has them.
#[test]
fn extents_of_outputs_are_functions() {
    static FOLDED: Op = Op {
        name: "folded",
        about: "windows of a row, one every `stride` elements, and what is left over",
        inputs: &[Input::activation("x", &["R", "L"]), Input::weight("w", &["K"])],
        attributes: &[Attribute::count("stride", 1, "1", "how far windows are apart")],
        outputs: &[Output::out("y", &["R", "O", "K"]), Output::out("rest", &["R", "O+1"])],
        extents: &[(
            "O",
            Extent::Of("(L - K) / stride + 1", |call| (call.dim("L") - call.dim("K")) / call.count("stride") + 1),
        )],
        check: |call| match call.dim("K") <= call.dim("L") {
            true => Ok(()),
            false => Err(Error::Invalid("input `w`: longer than a row".into())),
        },
        ..Op::PLAIN
    };
    let shapes = |stride: usize, [l, k]: [usize; 2]| {
        let x = Given { name: "x", dtype: DType::Bf16, shape: &[2, l] };
        let w = Given { name: "w", dtype: DType::Bf16, shape: &[k] };
        let call = validate(&FOLDED, &[x, w], Attributes::new().with("stride", stride), DType::Fp32)?;
        Ok::<_, Error>((call.dim("O"), call.outputs().into_iter().map(|form| form.shape).collect::<Vec<_>>()))
    };
    assert_eq!(shapes(1, [10, 3]), Ok((8, vec![vec![2, 8, 3], vec![2, 9]])));
    assert_eq!(shapes(4, [10, 3]), Ok((2, vec![vec![2, 2, 3], vec![2, 3]])));
    assert!(shapes(1, [2, 3]).unwrap_err().reason().contains("longer than a row"));
    assert!(shapes(1, [usize::MAX / 2, 1]).unwrap_err().reason().contains("overflow"));
    assert!(shapes(1, [1 << 60, 1]).unwrap_err().reason().contains("output `y`: shape"));
}

/// An extent that follows is held where an input has it, and is there where the input is left out.
#[test]
fn an_input_may_have_an_extent_that_follows() {
    let call = |state: Option<&'static [usize]>, w: &'static [usize]| {
        let inputs = [("x", &[2, 5, 6][..]), ("w", w)].into_iter().chain(state.map(|state| ("state", state)));
        fp32("causal_conv1d", &[], &inputs.collect::<Vec<_>>())
    };
    for (state, taps) in
        [(None, &[6, 4][..]), (Some(&[2, 3, 6][..]), &[6, 4]), (None, &[6, 1]), (Some(&[2, 0, 6]), &[6, 1])]
    {
        let call = call(state, taps).unwrap();
        assert_eq!(call.outputs()[1].shape, [2, taps[1] - 1, 6]);
        assert_eq!(following(call.op, call.dims.iter(), Attributes::new()), Ok(vec![("J", taps[1] - 1)]));
    }
    for (state, w, part) in [
        (Some(&[2, 4, 6][..]), &[6, 4][..], "input `state`: J is 4; it must be 3, which is K - 1"),
        (Some(&[2, 0, 6]), &[6, 2], "input `state`: J is 0; it must be 1, which is K - 1"),
        (None, &[6, 0], "input `w`: axis K is empty; a convolution has at least one tap"),
    ] {
        let error = call(state, w).unwrap_err().to_string();
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
    let mut random = sample::Random::new(3);
    let with_state = |_: &usize| sample::sample(&causal_conv1d::OP, &mut random).call.has("state");
    assert!((0..100).filter(with_state).count() > 30, "states are drawn");
}

/// A program declares inputs and outputs of its own for `chain`: the call names it and has its form.
#[test]
fn a_program_declares_inputs_and_outputs() {
    static DENOISER: Op = Op {
        name: "chain",
        about: "noise of latents, and what the decoder of the model makes of them",
        program: "denoiser",
        inputs: &[
            Input::activation("latents", &["B", "C", "H", "W"]),
            Input::activation("timesteps", &["B"]).fp32(),
            Input::index("prompt", &["B", "S"], Holds::Below("V")).optional(),
        ],
        attributes: &[Attribute::program(&["denoiser"]), Attribute::count("steps", 1, "1", "how many times")],
        outputs: &[
            Output::out("noise", &["B", "C", "H", "W"]),
            Output::fixed("pixels", &["B", "3", "Y", "X"], DType::Fp32),
            Output::fixed("hidden", &["B", "D"], DType::Fp32),
        ],
        extents: &[
            ("V", Extent::OfModel),
            ("D", Extent::OfModel),
            ("Y", Extent::Of("8 H", |call| call.dim("H").saturating_mul(8))),
            ("X", Extent::Of("8 W", |call| call.dim("W").saturating_mul(8))),
        ],
        ..Op::PLAIN
    };
    static CHAIN: Op = Op { programs: &[&DENOISER], ..chain::OP };
    let call = |op: &'static Op, words: &[(&str, &str)], given: &[Given]| {
        let text = words.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        validate(op, given, Attributes::parse(op, &text)?, DType::Fp32)
    };
    let latents = Given { name: "latents", dtype: DType::Bf16, shape: &[2, 4, 5, 6] };
    let timesteps = Given { name: "timesteps", dtype: DType::Fp32, shape: &[2] };
    let tokens = Given { name: "tokens", dtype: DType::I32, shape: &[2, 7] };
    let prompt = Given { name: "prompt", dtype: DType::I32, shape: &[2, 3] };
    let denoiser = [("program", "denoiser"), ("steps", "3")];
    let found = call(&CHAIN, &denoiser, &[latents, timesteps, prompt]).unwrap();
    assert_eq!((found.op.program, found.count("steps"), found.dims.get("Y")), ("denoiser", 3, Some(40)));
    let shapes: Vec<_> = found.outputs().into_iter().map(|form| (form.name, form.shape)).collect();
    assert_eq!(shapes, [("noise", vec![2, 4, 5, 6]), ("pixels", vec![2, 3, 40, 48])]);
    let hidden = DENOISER.output("hidden").unwrap();
    assert_eq!(found.output_shape(hidden), None, "D is the model's");
    let integers = |prompt: &'static [i32]| check_indexes(&found, |name| (name == "prompt").then_some(prompt));
    assert!(integers(&[0, 1, i32::MAX, 3, 4, 5]).is_ok() && integers(&[0, 1, -1, 3, 4, 5]).is_err());

    // Each program has its own inputs and parameters, and the first is that of a call that names none.
    let decoder = [("model", "m"), ("dtype", "bf16")];
    assert_eq!(call(&CHAIN, &decoder, &[tokens]).unwrap().op.program, "decoder");
    let named = [("model", "m"), ("dtype", "bf16"), ("program", "decoder")];
    assert_eq!(call(&CHAIN, &named, &[tokens]).unwrap().op.program, "decoder");
    for (words, given, part) in [
        (&denoiser[..], &[tokens][..], "input `tokens`: chain has no such input; it takes latents, timesteps, prompt"),
        (&decoder, &[latents], "input `latents`: chain has no such input; it takes tokens"),
        (
            &[("program", "denoiser"), ("schedule", "decode")],
            &[latents, timesteps],
            "param `schedule`: chain has no such",
        ),
        (&[("program", "painter")], &[tokens], "param `program`: `painter` is not offered; use decoder or denoiser"),
    ] {
        let error = call(&CHAIN, words, given).unwrap_err().to_string();
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
    let error = call(&chain::OP, &denoiser, &[latents, timesteps]).unwrap_err();
    assert_eq!(error.to_string(), "unsupported: param `program`: `denoiser` is not offered; use decoder");
    // Logits are seen by their axes.
    assert_eq!(chain::OP.logits(&chain::OP.outputs[0]).map(|input| input.name), Some("tokens"));
    assert!(DENOISER.outputs.iter().all(|output| DENOISER.logits(output).is_none()));
}
