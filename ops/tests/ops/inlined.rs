//! Every vector instruction of a kernel stands in the kernel itself. A closure may be compiled as a function without the
//! kernel's instruction set, since no `inline(always)` reaches it; each instruction in it is then a call, and each vector
//! goes through memory.

use std::collections::BTreeSet;

#[test]
fn no_vector_instruction_is_called() {
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let all =
        |text: &'static str| program.windows(text.len()).enumerate().filter(move |(_, at)| *at == text.as_bytes());
    assert!(all("samebits_ops4simd").next().is_some(), "the program has no names of functions; keep them in it");
    let name = |at: usize| {
        let name = program[at..].iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_');
        name.map(|&byte| char::from(byte)).collect::<String>()
    };
    let called: BTreeSet<String> = all("core_arch3x86")
        .map(|(at, _)| name(at))
        .filter(|name| ["avx", "fma", "f16c"].iter().any(|set| name.contains(set)))
        .collect();
    assert!(called.is_empty(), "instructions that are called: {called:#?}");
}
