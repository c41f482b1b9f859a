//! What `cargo test` sees of gates that are red: exit codes, names and reasons. Each gate is this program again.

use half::bf16;
use libtest_mimic::{Arguments, Failed, Trial};
use samebits_judge::{Call, DType, Gate};
use std::process::Command;

fn main() {
    let gate = |function: fn(&mut Call)| Gate::new("planted", "add", function);
    match std::env::var("SAMEBITS_PLANTED").as_deref() {
        Err(_) => libtest_mimic::run(&Arguments::from_args(), tests()).exit(),
        Ok("right") => samebits_judge::run([gate(add), Gate::new("second", "add", add)]),
        Ok("wrong") => gate(wrong_in_batches).run(),
        Ok("narrow") => {
            let gate = Gate::new("planted", "rms_norm", narrow).dtypes([DType::Bf16]);
            gate.cases(["rms_norm/bf16/orders-power-bf16"]).run()
        }
        Ok("nothing") => gate(|call| call.unsupported("not today")).run(),
        Ok("half") => gate(|call| match call.dtype("y") {
            DType::Fp32 => add(call),
            other => call.unsupported(format!("no {other}")),
        })
        .outs([DType::Fp32, DType::Bf16])
        .run(),
        Ok("refused") => samebits_judge::run([gate(add), gate(add), Gate::new("third", "ad", add)]),
        Ok(other) => panic!("nothing is called {other}"),
    }
}

fn add(call: &mut Call) {
    let (a, b) = (call.input::<f32>("a"), call.input::<f32>("b"));
    for (y, (a, b)) in call.output::<f32>("y").iter_mut().zip(a.iter().zip(b)) {
        *y = if (a + b).is_nan() { f32::NAN } else { a + b };
    }
}

/// An rms_norm of bf16 alone.
fn narrow(call: &mut Call) {
    let wide = |all: &[bf16]| all.iter().map(|v| v.to_f64()).collect::<Vec<f64>>();
    let (x, w, eps) = (wide(call.input::<bf16>("x")), wide(call.input::<bf16>("w")), call.float("eps"));
    let y = call.output::<bf16>("y");
    for (x, y) in x.chunks_exact(w.len()).zip(y.chunks_exact_mut(w.len())) {
        let root = (x.iter().map(|x| x * x).sum::<f64>() / w.len() as f64 + eps).sqrt();
        y.iter_mut().zip(x.iter().zip(&w)).for_each(|(y, (x, w))| *y = bf16::from_f64(x / root * w));
    }
}

/// Where there is more than one row, the sums are not rounded as they should be.
fn wrong_in_batches(call: &mut Call) {
    let (a, b, rows) = (call.input::<f32>("a"), call.input::<f32>("b"), call.shape("y")[0]);
    for (y, (a, b)) in call.output::<f32>("y").iter_mut().zip(a.iter().zip(b)) {
        let sum = a + b;
        *y = match sum.is_nan() {
            true => f32::NAN,
            false if rows > 1 && sum.is_normal() => f32::from_bits(sum.to_bits() ^ 1),
            false => sum,
        };
    }
}

/// What the gate called `which` says to these arguments, and its exit code.
fn run(which: &str, arguments: &[&str]) -> Result<(i32, String), Failed> {
    let output = Command::new(std::env::current_exe()?).args(arguments).env("SAMEBITS_PLANTED", which).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    Ok((output.status.code().unwrap_or(-1), text))
}

/// The gate called `which` ends with `code` and says `parts`.
fn says(which: &str, arguments: &[&str], code: i32, parts: &[&str]) -> Result<(), Failed> {
    let (found, text) = run(which, arguments)?;
    match parts.iter().find(|part| !text.contains(**part)) {
        Some(part) => Err(format!("{which} {arguments:?}: no `{part}`:\n{text}").into()),
        None if found != code => Err(format!("{which} {arguments:?}: ended with {found}:\n{text}").into()),
        None => Ok(()),
    }
}

fn tests() -> Vec<Trial> {
    let all = |name: &str, checks: fn() -> Result<(), Failed>| Trial::test(name, checks);
    vec![
        all("right_gates_are_green", || {
            says("right", &[], 0, &["test result: ok", "planted: GREEN", "second: GREEN", "not asked: invariance"])
        }),
        all("what_narrow_outputs_hide_is_said", || {
            says("narrow", &[], 0, &["planted: GREEN", "\nplanted: narrow outputs alone of rms_norm (bf16): "])
        }),
        all("a_wrong_gate_is_red", || {
            let again = "\nagain: cargo test --test trials -- --exact 'planted::add/fp32/";
            let parts = ["invariance:batch", "FAILED", "batch = ", again, "planted: RED"];
            says("wrong", &[], 101, &parts)
        }),
        all("a_filter_picks_judgments", || {
            let (code, text) = run("wrong", &["batch"])?;
            let judged: Vec<&str> = text.lines().filter(|line| line.starts_with("test planted::")).collect();
            let batch = judged.iter().all(|line| line.contains("::invariance:batch"));
            match code == 101 && !judged.is_empty() && batch && !text.contains("::accuracy") {
                true => says("wrong", &["no_such_thing"], 0, &["0 passed"]),
                false => Err(text.into()),
            }
        }),
        all("one_test_is_run_by_its_name", || {
            let (_, listed) = run("right", &["--list"])?;
            let name = listed.lines().find_map(|line| line.strip_suffix(": test")).ok_or("nothing is listed")?;
            says("right", &["--exact", name], 0, &["1 passed"])?;
            let wrong = ["planted: no judgment is named planted::add/fp32/smal::accuracy"];
            says("right", &["--exact", "planted::add/fp32/smal::accuracy"], 101, &wrong)?;
            // It may be a test of another target.
            says("right", &["--exact", "smal"], 0, &["0 passed"])
        }),
        all("a_gate_that_compares_nothing_is_red", || {
            says("nothing", &[], 101, &["untested: nothing was compared of fp32 -> fp32: not today"])?;
            says("nothing", &["accuracy"], 101, &["planted: nothing was compared"])?;
            says("half", &[], 101, &["untested: nothing was compared of fp32 -> bf16: no bf16"])?;
            says("half", &["fp32::accuracy"], 0, &["passed"])
        }),
        all("all_that_is_wrong_with_gates_is_said", || {
            let parts = ["Gate `planted`: another gate has this name", "Gate `third`: op `ad`: use one of"];
            says("refused", &[], 101, &parts)
        }),
    ]
}
