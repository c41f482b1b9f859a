//! The command `samebits`, as the tests of this crate start it.

fn main() -> std::process::ExitCode {
    samebits_harness::command::main()
}
