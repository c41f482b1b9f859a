//! What a gate says of functions that are wrong on purpose, and of right ones.

use samebits_judge::contract::record::{Judgment, Record};
use samebits_judge::contract::verdict::Verdict;
use samebits_judge::{Call, DType, Gate, Report, Slice, bf16};
use std::sync::atomic::{AtomicUsize, Ordering};

/// How the squares of a row are added.
type Sum = fn(&[f32], rows: usize) -> f64;

fn in_order(x: &[f32], _: usize) -> f64 {
    x.iter().map(|&x| f64::from(x) * f64::from(x)).sum()
}

/// In f32 as kernels do: in one go, or in two halves where there are more than two rows.
fn in_halves_above_two_rows(x: &[f32], rows: usize) -> f64 {
    let sum = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>();
    let (left, right) = x.split_at(x.len() / 2);
    f64::from(if rows > 2 { sum(left) + sum(right) } else { sum(x) })
}

fn row(x: &[f32], w: &[f32], eps: f64, squares: f64, mut write: impl FnMut(usize, f64)) {
    let r = 1.0 / (squares / w.len() as f64 + f64::from(eps as f32)).sqrt();
    for (i, (x, w)) in x.iter().zip(w).enumerate() {
        let product = f64::from(*x) * r * f64::from(*w);
        write(i, if product.is_nan() { f64::NAN } else { product });
    }
}

fn rms_norm(call: &mut Call, sum: Sum, eps: f64) {
    let (x, w, n) = (call.input::<f32>("x"), call.input::<f32>("w"), call.dim("N"));
    let y = call.output::<f32>("y");
    for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
        row(x, w, eps, sum(x, call.dim("R")), |i, value| y[i] = if value.is_nan() { f32::NAN } else { value as f32 });
    }
}

fn right(call: &mut Call) {
    let eps = call.float("eps");
    rms_norm(call, in_order, eps);
}

fn gate(function: impl Fn(&mut Call) + Send + Sync + 'static) -> Gate {
    Gate::new("planted", "rms_norm", function)
}

/// The records of one judgment with a verdict.
fn of<'a>(report: &'a Report, judgment: Judgment, verdict: &'a str) -> impl Iterator<Item = &'a Record> {
    report.records().iter().filter(move |record| record.judgment == judgment && record.verdict.name() == verdict)
}

fn reason(record: &Record) -> &str {
    match &record.verdict {
        Verdict::Fail(evidence) => &evidence.message,
        Verdict::Error { reason }
        | Verdict::Unsupported { reason }
        | Verdict::Untested { reason }
        | Verdict::Waived { reason }
        | Verdict::StaleWaiver { reason } => reason,
        Verdict::Pass => "",
    }
}

#[test]
fn a_right_function_is_green_and_says_what_was_not_asked() {
    let report = gate(right).report();
    report.assert_ok();
    let text = report.to_string();
    assert!(text.contains("GREEN") && text.contains("not asked: invariance along "), "{text}");
    assert!(of(&report, Judgment::Accuracy, "pass").count() >= 3, "{text}");
    assert!(of(&report, Judgment::Invariance, "pass").count() >= 15, "{text}");
}

/// The vectors are in this crate: no repository is at hand.
#[test]
fn vectors_are_asked() {
    let report = gate(right).slice(Slice::Default).cases(["rms_norm/fp32/vector*"]).report();
    report.assert_ok();
    assert!(of(&report, Judgment::Accuracy, "pass").count() >= 1, "{report}");
}

#[test]
fn an_order_that_depends_on_the_rows_is_red() {
    let wrong = |call: &mut Call| {
        let eps = call.float("eps");
        rms_norm(call, in_halves_above_two_rows, eps);
    };
    let report = gate(wrong).report();
    assert!(!report.is_ok());
    let red: Vec<&Record> = of(&report, Judgment::Invariance, "fail").collect();
    assert!(red.iter().any(|record| record.axis.as_deref() == Some("batch")), "{report}");
    assert_eq!(of(&report, Judgment::Accuracy, "fail").count(), 0, "only the bits tell: {report}");
}

#[test]
fn an_attribute_that_is_never_asked_for_is_not_offered() {
    let report = gate(|call| rms_norm(call, in_order, 1e-6)).report();
    report.assert_ok();
    let unsupported: Vec<&str> = of(&report, Judgment::Accuracy, "unsupported").map(reason).collect();
    assert!(unsupported.contains(&"param `eps` = 0: it never asks for it"), "{unsupported:?}");
    // Asked for and not heeded it is an error of the function.
    let report = gate(|call| {
        call.float("eps");
        rms_norm(call, in_order, 1e-6);
    })
    .report();
    assert!(of(&report, Judgment::Accuracy, "fail").count() > 0, "{report}");
}

#[test]
fn an_optional_input_that_is_never_asked_for_is_not_offered() {
    fn gemm(call: &mut Call, bias: Option<&[f32]>) {
        let (x, w) = (call.input::<f32>("x"), call.input::<f32>("w"));
        let (n, k) = (call.dim("N"), call.dim("K"));
        for (place, y) in call.output::<f32>("y").iter_mut().enumerate() {
            let (row, column) = (&x[place / n * k..][..k], &w[place % n * k..][..k]);
            let sum: f64 = row.iter().zip(column).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            let value = sum + bias.map_or(0.0, |bias| f64::from(bias[place % n]));
            *y = if value.is_nan() { f32::NAN } else { value as f32 };
        }
    }
    let gate = |function: fn(&mut Call)| Gate::new("planted", "gemm", function).slice(Slice::Default);
    let with = gate(|call| gemm(call, call.optional("bias"))).cases(["gemm/fp32/bias*"]).report();
    assert!(of(&with, Judgment::Accuracy, "pass").count() > 0, "{with}");
    let without = gate(|call| gemm(call, None)).cases(["gemm/fp32/*"]).report();
    let unsupported: Vec<&str> = of(&without, Judgment::Accuracy, "unsupported").map(reason).collect();
    assert!(unsupported.contains(&"input `bias`: it never asks for it"), "{unsupported:?}");
}

#[test]
fn a_panic_is_an_error_with_its_place() {
    let report = gate(|call| {
        assert!(call.dim("N") != 64, "no rows of 64");
        right(call);
    })
    .report();
    let errors: Vec<&str> = of(&report, Judgment::Accuracy, "error").map(reason).collect();
    assert!(errors.len() == 1 && errors[0].contains("it panicked: no rows of 64 ("), "{errors:?}");
    assert!(errors[0].contains("faults.rs:"), "{errors:?}");
    assert!(of(&report, Judgment::Accuracy, "pass").count() > 0, "the others are judged: {report}");
}

#[test]
fn a_name_or_type_that_the_op_does_not_have_is_an_error() {
    type Wrong = fn(&mut Call);
    let wrong: [(Wrong, &str); 6] = [
        (|call| _ = call.input::<f32>("weight"), "rms_norm has no input `weight`; it takes x, w"),
        (|call| _ = call.input::<bf16>("x"), "input `x` is fp32; it was asked for as bf16"),
        (|call| _ = call.float("epsilon"), "rms_norm has no attribute `epsilon`; it has eps, rounding, weight_offset"),
        (|call| _ = call.flag("eps"), "attribute `eps` is "),
        (|call| _ = call.output::<f32>("out"), "rms_norm has no output `out`; it has y"),
        (|call| _ = (call.output::<f32>("y"), call.output::<f32>("y")), "output `y` was taken before"),
    ];
    for (wrong, said) in wrong {
        let report = gate(wrong).report();
        let errors: Vec<&str> = of(&report, Judgment::Accuracy, "error").map(reason).collect();
        assert!(!errors.is_empty() && errors.iter().all(|error| error.contains(said)), "{said}: {errors:?}");
    }
}

#[test]
fn what_is_not_written_is_an_error() {
    let last = |call: &mut Call| {
        let (x, w, n, eps) = (call.input::<f32>("x"), call.input::<f32>("w"), call.dim("N"), call.float("eps"));
        let y = call.output::<f32>("y");
        for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
            row(x, w, eps, in_order(x, 0), |i, v| {
                if i + 1 < n {
                    y[i] = if v.is_nan() { f32::NAN } else { v as f32 }
                }
            });
        }
    };
    let report = gate(last).report();
    let errors: Vec<&str> = of(&report, Judgment::Accuracy, "error").map(reason).collect();
    let said = "output `y`: element [0, 32] was not written, or was added to; 5 of 165";
    assert!(errors.contains(&said), "{errors:?}");
    assert_eq!(of(&report, Judgment::Accuracy, "pass").count(), 0, "{report}");
    // Sums on top of what is there, and no output at all.
    let added = |call: &mut Call| {
        let x = call.input::<f32>("x");
        call.input::<f32>("w");
        call.output::<f32>("y").iter_mut().zip(x).for_each(|(y, x)| *y += x);
    };
    let nothing = |call: &mut Call| _ = call.float("eps");
    for wrong in [added as fn(&mut Call), nothing] {
        let report = gate(wrong).report();
        assert!(of(&report, Judgment::Accuracy, "error").any(|e| reason(e).contains("was not written")), "{report}");
        assert_eq!(of(&report, Judgment::Accuracy, "pass").count(), 0, "{report}");
    }
}

/// What stands in an output before the call may be a right answer as well.
#[test]
fn an_answer_that_looks_unwritten_is_not_mistaken() {
    for bits in [0x7FE5_A5A5, 0x7FD3_9393] {
        let written = move |call: &mut Call| {
            call.float("eps");
            call.output::<f32>("y").fill(f32::from_bits(bits));
        };
        let report = gate(written).report();
        assert_eq!(of(&report, Judgment::Accuracy, "error").count(), 0, "{report}");
        assert!(of(&report, Judgment::Accuracy, "fail").count() > 0, "{report}");
    }
}

#[test]
fn a_run_that_compares_nothing_is_red() {
    let report = gate(|call| call.unsupported("not today")).report();
    assert!(!report.is_ok(), "{report}");
    let untested: Vec<&str> = report.red().map(reason).collect();
    assert_eq!(untested, ["nothing was compared of fp32 -> fp32: not today"]);
    // One pair of dtypes of two.
    let report = gate(|call| match call.dtype("y") {
        DType::Fp32 => right(call),
        other => call.unsupported(format!("no {other}")),
    })
    .outs([DType::Fp32, DType::Bf16])
    .report();
    let untested: Vec<&str> = report.red().map(reason).collect();
    assert_eq!(untested, ["nothing was compared of fp32 -> bf16: no bf16"]);
}

#[test]
fn threads_are_set_and_compared() {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    fn by_threads(x: &[f32], _: usize) -> f64 {
        let part = x.len().div_ceil(THREADS.load(Ordering::SeqCst)).max(1);
        f64::from(x.chunks(part).map(|part| part.iter().map(|x| x * x).sum::<f32>()).sum::<f32>())
    }
    let set = |count| THREADS.store(count, Ordering::SeqCst);
    let judged = |sum: Sum| {
        let function = move |call: &mut Call| {
            let eps = call.float("eps");
            rms_norm(call, sum, eps);
        };
        gate(function).threads([1, 2, 3], set).report()
    };
    let wrong = judged(by_threads);
    let red: Vec<&Record> = of(&wrong, Judgment::Invariance, "fail").collect();
    assert!(!red.is_empty() && red.iter().all(|record| record.axis.as_deref() == Some("threads")), "{wrong}");
    let right = judged(in_order);
    right.assert_ok();
    let threads = |record: &&Record| record.axis.as_deref() == Some("threads");
    assert!(of(&right, Judgment::Invariance, "pass").filter(threads).count() > 0, "{right}");
    assert!(
        !right.to_string().lines().any(|line| line.starts_with("not asked") && line.contains("threads")),
        "{right}"
    );
}

#[test]
fn waivers_cover_and_go_stale() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("waivers.toml");
    let waiver = "[[waiver]]\nimpls = [\"planted\"]\ncases = [\"rms_norm/*\"]\njudgment = \"invariance\"\n\
                  reason = \"halves\"\nowner = \"a@example.org\"\nexpires = \"2999-01-01\"\n";
    std::fs::write(&file, waiver).unwrap();
    let wrong = |call: &mut Call| {
        let eps = call.float("eps");
        rms_norm(call, in_halves_above_two_rows, eps);
    };
    let report = gate(wrong).waivers(&file).out(dir.path().join("report")).report();
    report.assert_ok();
    assert!(of(&report, Judgment::Invariance, "waived").count() > 0, "{report}");
    let html = std::fs::read_to_string(dir.path().join("report/report.html")).unwrap();
    assert!(html.contains("planted"));
    let stale = gate(right).waivers(&file).report();
    assert!(!stale.is_ok() && stale.red().all(|record| record.verdict.name() == "stale_waiver"), "{stale}");
}

#[test]
fn a_gate_that_asks_for_what_there_is_not_says_all_of_it() {
    let said = std::panic::catch_unwind(|| {
        Gate::new("ours/cpu", "rmsnorm", right).dtypes([]).threads([1], drop).waivers("nowhere.toml").report()
    });
    let said = *said.expect_err("it is refused").downcast::<String>().unwrap();
    for part in [
        "Gate `ours/cpu`: name `ours/cpu`: the contract has an implementation of that name",
        "op `rmsnorm`: use one of gemm, ",
        "dtypes: use at least one of",
        "threads: name two counts or more",
        "nowhere.toml",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    for (gate, part) in [
        (gate(right).cases(["gemm/*"]), "cases: `gemm/*` is none of what is asked"),
        (Gate::new("planted", "adamw", right).dtypes([DType::Bf16]).outs([DType::Fp16]), "adamw"),
    ] {
        let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| gate.report()));
        let said = *said.expect_err("it is refused").downcast::<String>().unwrap();
        assert!(said.contains(part), "{part}: {said}");
    }
}

/// bf16 by its bits and by its type.
#[test]
fn narrow_types_are_judged() {
    let narrow = |call: &mut Call| {
        let (x, w, n, eps) = (call.input::<bf16>("x"), call.input::<bf16>("w"), call.dim("N"), call.float("eps"));
        let wide = |all: &[bf16]| all.iter().map(|v| v.to_f32()).collect::<Vec<f32>>();
        let (x, w) = (wide(x), wide(w));
        let y = call.output::<u16>("y");
        for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
            row(x, &w, eps, in_order(x, 0), |i, v| {
                y[i] = if v.is_nan() { 0x7FC0 } else { bf16::from_f64(v).to_bits() }
            });
        }
    };
    let report = gate(narrow).dtypes([DType::Bf16]).report();
    report.assert_ok();
    assert!(of(&report, Judgment::Accuracy, "pass").count() >= 3, "{report}");
    // No f32 output was compared: what that may hide is said.
    let hidden = "note: planted: narrow outputs alone of rms_norm (bf16): ";
    assert!(report.to_string().lines().any(|line| line.starts_with(hidden)), "{report}");
    assert!(!gate(right).report().to_string().contains("narrow outputs alone"));
}
