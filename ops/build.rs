//! Says `real_avx512` to tests (the feature `emulated-isa`) where the machine that compiles them has AVX-512: emulated sets then run the
//! kernels that have no dot products on it, which would else be compiled once more for a quarter of the whole time. With
//! SAMEBITS_EMULATE=1 they are all emulated, as on machines without.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(real_avx512)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=SAMEBITS_EMULATE");
    let of = |name: &str| std::env::var_os(name);
    let is_here = of("HOST") == of("TARGET");
    if is_here && of("CARGO_FEATURE_EMULATED_ISA").is_some() && of("SAMEBITS_EMULATE").is_none() && has_avx512() {
        println!("cargo::rustc-cfg=real_avx512");
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}
