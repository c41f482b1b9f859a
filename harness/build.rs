//! Tells the program which compiler built it, for run.json and the goldens' manifest.

use std::process::Command;

fn main() {
    let rustc = std::env::var_os("RUSTC").expect("cargo sets RUSTC");
    let output = Command::new(rustc).arg("--version").output().expect("the compiler says its version");
    let version = String::from_utf8(output.stdout).expect("the version is text");
    println!("cargo:rustc-env=SAMEBITS_RUSTC={}", version.trim());
    println!("cargo:rerun-if-changed=build.rs");
}
