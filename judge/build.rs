//! Lists the files of `vectors/`, so that they are part of whatever is built.

use std::fmt::Write;
use std::path::Path;

fn main() {
    let folder = Path::new(&std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("vectors");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.expect("the folder is read").path()).collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "safetensors"));
    files.sort();
    let mut list = String::from("&[\n");
    for file in &files {
        let name = file.file_stem().expect("a file has a name").to_str().expect("names are ASCII");
        writeln!(list, "    ({name:?}, include_bytes!({file:?})),").expect("a string takes all");
    }
    list += "]\n";
    let out = Path::new(&std::env::var("OUT_DIR").expect("cargo sets it")).join("vectors.rs");
    std::fs::write(&out, list).unwrap_or_else(|e| panic!("{}: {e}", out.display()));
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={}", folder.display());
}
