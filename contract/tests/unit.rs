//! The unit tests of the crate, which are compiled with it (`src/unit_tests.rs`).

#[cfg(not(feature = "unit-tests"))]
compile_error!("the tests need a feature: cargo test -p samebits-contract --features unit-tests");

use libtest_mimic::{Arguments, Trial};
use samebits_contract::{UNIT_TESTS, UnitTest};

fn main() {
    let trial = |&(name, test): &UnitTest| {
        Trial::test(name.trim_start_matches("crate::"), move || {
            test();
            Ok(())
        })
    };
    libtest_mimic::run(&Arguments::from_args(), UNIT_TESTS.iter().map(trial).collect()).exit();
}
