//! The command `samebits`; all of it is in the library, whose tests run it too.

fn main() -> std::process::ExitCode {
    samebits_harness::command::main()
}
