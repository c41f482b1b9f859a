//! What the probe says: of our ops exactly what NUMERICS.md declares, of mutants what is wrong with them.

use samebits_contract::case::Answer;
use samebits_contract::tensor::DType;
use samebits_contract::wire::{decode_request, encode_answer, read_frame, write_frame};
use samebits_harness::implementation::Implementation;
use samebits_harness::implementation::cpu::CpuImplementation;
use samebits_mutants::{run_trials, trial};
use samebits_ops::{Cpu, Isa};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The argument that makes this test a program which answers as ours do, with outputs of bf16 alone.
const NARROW: &str = "--answer-in-bf16";

fn main() {
    if std::env::args().nth(1).is_some_and(|asked| asked == NARROW) {
        return answer_in_bf16();
    }
    let isas = Isa::of_machine().map(Isa::name);
    let by_isa = isas
        .map(|isa| trial(format!("our_ops_do_what_the_page_says::{isa}"), move || our_ops_do_what_the_page_says(isa)));
    let tests: [(&str, fn()); 5] = [
        ("every_op_that_hands_a_number_on_can_be_asked", every_op_that_hands_a_number_on_can_be_asked),
        ("sums_without_signs_are_as_the_page_says", sums_without_signs_are_as_the_page_says),
        ("mutants_are_explained", mutants_are_explained),
        ("one_order_that_nobody_claimed", one_order_that_nobody_claimed),
        ("drawings_and_wrong_arguments", drawings_and_wrong_arguments),
    ];
    run_trials(by_isa.chain(tests.map(|(name, test)| trial(name, test))).collect())
}

fn answer_in_bf16() {
    let ours = CpuImplementation::new(Cpu::best());
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    while let Some(frame) = read_frame(&mut input).unwrap() {
        let mut case = decode_request(&frame).unwrap();
        let id = case.config.id.take();
        let answer = match case.out {
            DType::Bf16 => ours.run(&case),
            _ => Answer::unsupported("its outputs are bf16"),
        };
        write_frame(&mut output, &encode_answer(&Answer { id, ..answer })).unwrap();
    }
}

fn samebits(args: &[&str]) -> Output {
    let root: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut command = Command::new(env!("CARGO_BIN_EXE_samebits-tested"));
    command.args(args).current_dir(root).stdin(Stdio::null()).output().expect("samebits runs")
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("output is UTF-8")
}

/// NUMERICS.md, sections 1 and 2, as the probe finds it in `gemm`.
const ARITHMETIC: &str = "
arithmetic
  accumulator              24 bits, as fp32
  rounding of a sum        to nearest, ties to even
  products                 fused into the sum (fma)
  operands                 whole
  subnormal operands       read as they are
  subnormal results        kept
  overflow                 to infinity
  a sum beyond fp16 goes   above 65504
  163840 times 10          1638400
  -0                       +0
  inf                      inf
  NaN                      the canonical NaN
  inf - inf                the canonical NaN
  NaN + 1                  the canonical NaN
  inf + 1                  inf
  inf * 0                  the canonical NaN

as declared
";

const ORDERS: &str = "
order of a sum of 33 terms
  rows 1 2 3 7 8 9 10 16 33 64 129 257: as declared
    ((0..16 + 16..32) + 32)

order of a sum of 128 terms
  rows 1 2 3 7 8 9 10 16 33 64 129 257: as declared
    (((0..16 + 16..32) + (32..48 + 48..64)) + ((64..80 + 80..96) + (96..112 + 112..128)))

order of a sum of 300 terms
  rows 1 2 3 7 8 9 10 16 33 64 129 257: as declared
    (((0..48 + 48..96) + (96..144 + 144..192)) + ((192..240 + 240..288) + 288..300))
";

fn our_ops_do_what_the_page_says(isa: &str) {
    for threads in ["1", "3"] {
        let output = samebits(&["probe", "--isa", isa, "--threads", threads]);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(0), "{isa}: {said}");
        assert!(said.ends_with(&format!("{ORDERS}{ARITHMETIC}")), "{isa}: {said}");
    }
    for dtype in ["bf16", "fp16"] {
        let output = samebits(&["probe", "--isa", isa, "--dtype", dtype]);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(0), "{isa} {dtype}: {said}");
        assert!(said.contains(ORDERS) && said.contains("products                 exact"), "{isa} {dtype}: {said}");
    }
    for dtype in ["bf16", "fp16", "fp32"] {
        let output = samebits(&["probe", "--op", "attention", "--isa", isa, "--dtype", dtype]);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(0), "{isa} {dtype}: {said}");
        assert!(said.contains("    0..16\n") && said.contains("    (0..256 + 256..512)\n"), "{isa} {dtype}: {said}");
    }
}

/// Ops that add nothing hand a number on, and narrow outputs show the last rounding.
fn every_op_that_hands_a_number_on_can_be_asked() {
    for (op, dtype, out, said) in [
        ("add", "fp32", "bf16", "just above a tie         up"),
        ("scale", "fp32", "fp16", "last rounding            to nearest, ties to even"),
        ("embedding", "fp32", "bf16", "-0                       -0"),
        ("rms_norm", "bf16", "fp32", "subnormal results        kept"),
        ("layer_norm", "fp32", "bf16", "just above a tie         up"),
        ("add_rms_norm", "fp16", "fp16", "NaN                      the canonical NaN"),
        ("rope", "fp32", "fp16", "overflow                 to infinity"),
        ("norm_rope", "fp32", "fp32", "operands                 whole"),
        ("silu_mul", "bf16", "bf16", "subnormal operands       read as they are"),
        ("gelu_mul", "fp16", "fp16", "overflow                 to infinity"),
        ("combine", "fp32", "fp32", "rows 1 2 3 7 8 9 10 16 33 64 129 257: as declared\n    0..9\n"),
        ("attention", "bf16", "fp32", "accumulator              24 bits, as fp32"),
    ] {
        let output = samebits(&["probe", "--op", op, "--dtype", dtype, "--out", out]);
        let text = text(&output);
        assert_eq!(output.status.code(), Some(0), "{op}: {text}");
        assert!(text.contains(said) && text.ends_with("\nas declared\n"), "{op} {dtype} {out}: {text}");
    }
}

/// Sums of terms that are never negative, and so cannot cancel.
fn sums_without_signs_are_as_the_page_says() {
    for (op, dtype, part) in [
        ("rms_norm", "fp32", "((((((0 + 32) + 16) + (8 + 24)) + "),
        ("rms_norm", "bf16", "(((((((((0 + 256) + 128) + (64 + 192)) + "),
        ("rms_norm", "fp16", "as declared"),
        ("softmax", "fp32", "((((((0 + 8) + (4 + 12)) + ((2 + 10) + (6 + 14))) + "),
        ("softmax", "bf16", "(((((((((0 + 32) + 16) + ((8 + 40) + 24)) + "),
        ("logprob", "fp16", "as declared"),
        ("logprob", "fp32", "as declared"),
    ] {
        for isa in ["scalar", Isa::best().name()] {
            let output = samebits(&["probe", "--op", op, "--dtype", dtype, "--isa", isa]);
            let said = text(&output);
            assert_eq!(output.status.code(), Some(0), "{op} {dtype}: {said}");
            assert_eq!(said.matches("rows 1 2 3 7 8 9 10 16 33 64 129 257: as declared").count(), 2, "{op}: {said}");
            assert!(said.contains(part) && said.ends_with("\nas declared\n"), "{op} {dtype}: {said}");
        }
    }
}

fn mutants_are_explained() {
    for (name, dtype, said) in [
        ("sequential_sum", "fp32", "    0..33\n"),
        ("products_rounded", "fp32", "products                 rounded before they are added   NOT as declared"),
        ("split_by_batch", "fp32", "THE ORDER FOLLOWS THE BATCH"),
        // Of 7 rows those from row 4 on are behind the last whole tile.
        ("other_order_in_last_tile", "fp32", "    THE ORDER FOLLOWS THE ROW: of 7 rows row 0\n"),
        ("other_order_in_last_tile", "fp32", "    and row 4\n"),
        ("split_from_256_rows", "fp32", "THE ORDER FOLLOWS THE BATCH: 2 orders for one sum"),
        ("bf16_accumulation", "bf16", "accumulator              8 bits, as bf16   NOT as declared"),
        ("fp16_accumulation", "bf16", "accumulator              11 bits, as fp16 or TF32   NOT as declared"),
        ("fp16_accumulation", "bf16", "to infinity above 65504   NOT as declared"),
        ("tf32_inputs", "fp32", "operands                 cut to 10 bits of mantissa, as TF32   NOT as declared"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let list = folder.path().join("impls.toml");
        let command = samebits_mutants::command(name);
        let entry = format!("[[implementation]]\nname = \"theirs\"\nabout = \"wrong\"\ncommand = {command:?}\n");
        std::fs::write(&list, entry).unwrap();
        let list = list.to_str().unwrap();
        let output = samebits(&["probe", "--impls", list, "--impl", "theirs", "--dtype", dtype, "--terms", "33"]);
        assert_eq!(output.status.code(), Some(1), "{name}: {}", text(&output));
        assert!(text(&output).contains(said), "{name}: `{said}` is not in: {}", text(&output));
        assert!(
            text(&output).lines().last().is_some_and(|line| line.starts_with("NOT as declared: ")),
            "{}",
            text(&output)
        );
    }
}

/// Whoever claims no canonical bits may add in another order, as long as it is one.
fn one_order_that_nobody_claimed() {
    for (name, op, out, code, said) in [
        (
            "sequential_sum",
            "gemm",
            "fp32",
            0,
            "\none order for all numbers of rows; it is not the declared one, which its list does not claim\n",
        ),
        ("sequential_sum", "gemm", "bf16", 0, "\n    0..33\n"),
        // What no answer can show is no fault.
        ("sequential_sum", "rms_norm", "bf16", 0, "\nthe order is not seen in outputs of bf16; "),
        ("split_from_256_rows", "gemm", "bf16", 1, "\nNOT as declared: order of a sum of 33 terms\n"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let list = folder.path().join("impls.toml");
        let command = samebits_mutants::command(name);
        let entry = format!(
            "[[implementation]]\nname = \"theirs\"\nabout = \"another\"\ncommand = {command:?}\njudgments = [\"invariance\"]\n"
        );
        std::fs::write(&list, entry).unwrap();
        let list = list.to_str().unwrap();
        let asked = ["--impl", "theirs", "--op", op, "--dtype", "bf16", "--out", out, "--terms", "33"];
        let output = samebits(&[&["probe", "--impls", list], &asked[..]].concat());
        assert_eq!(output.status.code(), Some(code), "{name}: {}", text(&output));
        assert!(text(&output).contains(said), "{name}: `{said}` is not in: {}", text(&output));
    }
}

fn drawings_and_wrong_arguments() {
    let folder = tempfile::tempdir().unwrap();
    let output = samebits(&["probe", "--svg", folder.path().to_str().unwrap(), "--terms", "40", "--rows", "1"]);
    assert_eq!(output.status.code(), Some(0));
    let svg = std::fs::read_to_string(folder.path().join("ours-cpu-gemm-fp32-40-1.svg")).unwrap();
    assert_eq!(svg.matches("<circle").count(), 39, "a sum of 40 terms has 39 additions");
    // A program of bf16 alone is asked with f32 outputs by default: what to ask instead is said.
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("impls.toml");
    let command = [std::env::current_exe().unwrap().to_str().unwrap(), NARROW].map(String::from);
    std::fs::write(
        &list,
        format!("[[implementation]]\nname = \"theirs\"\nabout = \"another\"\ncommand = {command:?}\n"),
    )
    .unwrap();
    let asked = ["probe", "--impls", list.to_str().unwrap(), "--impl", "theirs", "--dtype", "bf16", "--terms", "33"];
    let output = samebits(&asked);
    assert!(
        text(&output)
            .contains(": not revealed: its outputs are bf16\n    if its outputs are bf16, ask with --out bf16\n"),
        "{}",
        text(&output)
    );
    assert!(
        text(&samebits(&[&asked[..], &["--out", "bf16"]].concat()))
            .contains("rows 1 2 3 7 8 9 10 16 33 64 129 257: as declared")
    );
    // The last bit of a sum of squares is not seen in bf16.
    let folder = tempfile::tempdir().unwrap();
    let args =
        ["--svg", folder.path().to_str().unwrap(), "--terms", "33", "--rows", "1", "--op", "rms_norm", "--out", "bf16"];
    let output = samebits(&[&["probe"], &args[..]].concat());
    assert!(text(&output).contains(": nothing was drawn, because no order was revealed"), "{}", text(&output));
    for (option, value, fix) in
        [("--op", "argmax", "gemm"), ("--dtype", "i32", "bf16"), ("--rows", "0", "4096"), ("--impl", "x", "ours/cpu")]
    {
        let output = samebits(&["probe", option, value]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && stderr.lines().count() == 1 && stderr.contains(fix), "{stderr}");
    }
}
