//! How fast chains are: `cargo test --release -p samebits-units --test speed -- --ignored --nocapture`

use samebits_units::chain::{LANES, Panels, Rows, chain};
use samebits_units::{Format, Isa, Rule};
use std::time::Instant;

#[test]
#[ignore = "a measurement"]
fn gflops_of_one_core() {
    for format in Format::ALL {
        let k = 4096;
        let word = |i: usize| match format {
            Format::Tf32 => 0x3F80_0000 + ((i * 7919 % 1024) << 13) as u32,
            Format::Bf16 => 0x3F00 + (i * 7919 % 256) as u32,
            Format::Fp16 => 0x3800 + (i * 7919 % 2048) as u32,
        };
        let rows = Rows::new(format, k, (0..32 * k).map(word).collect());
        let panels = Panels::new(Rows::new(format, k, (0..LANES * k).map(word).collect()));
        for rule in Rule::all(format) {
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let best = (0..5).map(|_| {
                    let start = Instant::now();
                    for row in 0..32 {
                        let mut c = [0; LANES];
                        chain(isa, rule, (&rows, row), (&panels, 0), (0, k), &mut c);
                        std::hint::black_box(c);
                    }
                    start.elapsed().as_secs_f64()
                });
                let best = best.fold(f64::INFINITY, f64::min);
                println!("{rule:?} {}: {:.1} GFLOP/s", isa.name(), (2 * 32 * k * LANES) as f64 / best / 1e9);
            }
        }
    }
}
