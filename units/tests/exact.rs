//! The model against the second program and against what an H100 gave, and the faults that both see.

use samebits_units::chain::{LANES, Panels, Rows, chain};
use samebits_units::dump::{Content, Dump, Entry, Steps};
use samebits_units::search::Machine;
use samebits_units::verify::verify;
use samebits_units::{Format, Isa, Rule, UNITS, exact};

/// A line of vectors.txt.
struct Vector {
    rule: Rule,
    c: u32,
    a: Vec<u32>,
    b: Vec<u32>,
    d: u32,
}

fn vectors() -> Vec<Vector> {
    let word = |text: &str| u32::from_str_radix(text, 16).expect("hexadecimal");
    let words = |text: &str| text.split_whitespace().map(word).collect::<Vec<_>>();
    let lines = include_str!("vectors.txt").lines().filter(|line| !line.starts_with('#'));
    let vector = |line: &str| {
        let [head, a, b, d] = line.split(" | ").collect::<Vec<_>>()[..] else { panic!("{line}") };
        let [profile, format, c] = head.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let format = Format::ALL.into_iter().find(|known| known.name() == format).expect("a format");
        let rule = Rule::of(profile, format).expect("the profile has the format");
        Vector { rule, c: word(c), a: words(a), b: words(b), d: word(d) }
    };
    lines.map(vector).collect()
}

fn dump(file: &str) -> Vec<Entry> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/h100").join(file);
    Dump::parse(&std::fs::read(path).unwrap()).unwrap_or_else(|e| panic!("{file}: {e:?}")).entries
}

/// Calls `each` with every recorded output of the H100: format, c, its operands step after step, d.
fn recorded(mut each: impl FnMut(Format, u32, &[(&[u32], &[u32])], u32)) {
    for entry in ["bf16", "fp16", "tf32"].into_iter().flat_map(|file| dump(&format!("{file}.safetensors"))) {
        let Content::Steps(Steps { n, steps, m, columns, k, a, b, c, d }) = &entry.content else { panic!("steps") };
        for place in 0..n * m * columns {
            let (number, row, column) = (place / (m * columns), place / columns % m, place % columns);
            let operands: Vec<(&[u32], &[u32])> = (0..*steps)
                .map(|step| {
                    let row = ((number * steps + step) * m + row) * k;
                    let column = ((number * steps + step) * columns + column) * k;
                    (&a[row..row + k], &b[column..column + k])
                })
                .collect();
            each(entry.formats[0], c[place], &operands, d[place]);
        }
    }
}

#[test]
fn the_second_program_gives_the_same() {
    let vectors = vectors();
    assert!(vectors.len() > 400);
    for (number, Vector { rule, c, a, b, d }) in vectors.iter().enumerate() {
        let ours = exact::chain(*rule, *c, a, b);
        assert_eq!(ours, *d, "vector {number}: {rule:?}: {ours:08x}, not {d:08x}");
    }
}

#[test]
fn an_h100_gives_the_same() {
    let (mut all, mut wrong) = (0, 0);
    recorded(|format, c, steps, d| {
        let rule = Rule::of("sm90", format).expect("Hopper has all");
        let ours = steps.iter().fold(c, |c, (a, b)| exact::chain(rule, c, a, b));
        all += 1;
        wrong += usize::from(ours != d);
    });
    assert_eq!((all, wrong), (3 * 10 * 16 * 8, 0));
}

/// One more or one less of what a rule says is seen in what the H100 gave.
#[test]
fn another_rule_is_seen() {
    type Fault = (&'static str, fn(Rule) -> Rule);
    let faults: [Fault; 3] = [
        ("24 bits", |rule| Rule { bits: 24, ..rule }),
        ("26 bits", |rule| Rule { bits: 26, ..rule }),
        ("half a group", |rule| Rule { group: rule.group / 2, ..rule }),
    ];
    for (fault, change) in faults {
        let mut wrong = [0; 3];
        recorded(|format, c, steps, d| {
            let rule = change(Rule::of("sm90", format).expect("Hopper has all"));
            let theirs = steps.iter().fold(c, |c, (a, b)| exact::chain(rule, c, a, b));
            wrong[Format::ALL.into_iter().position(|known| known == format).unwrap()] += usize::from(theirs != d);
        });
        assert!(wrong.iter().all(|&wrong| wrong > 0), "{fault}: {wrong:?}");
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// What was cut off leaves a bit that is set.
    Sticky,
    /// The sum is rounded to nearest, ties to even.
    Nearest,
    /// Terms are cut off below 2^-126 - 25 bits at the latest.
    Floor,
    /// Products that are zero have an exponent.
    Zeros,
}

/// A group written once more, over 128 bits, finite operands alone, with a fault.
fn faulty(rule: Rule, fault: Fault, c: u32, a: &[u32], b: &[u32]) -> Option<u32> {
    let parts = |word: u32, exponent_bits: u32, fraction: u32| {
        let exponent = word >> fraction & ((1 << exponent_bits) - 1);
        let mantissa = i128::from(word & ((1 << fraction) - 1)) | i128::from(exponent > 0) << fraction;
        let sign = if word >> (exponent_bits + fraction) & 1 == 1 { -1 } else { 1 };
        let finite = exponent < (1 << exponent_bits) - 1;
        finite.then_some((sign * mantissa, exponent.max(1) as i32 - (1 << (exponent_bits - 1)) + 1, fraction as i32))
    };
    let operand = |word: u32| match rule.format {
        Format::Bf16 => parts(word, 8, 7),
        Format::Fp16 => parts(word, 5, 10),
        Format::Tf32 => parts(word >> 13, 8, 10),
    };
    let mut terms = vec![parts(c, 8, 23)?];
    for (&a, &b) in a.iter().zip(b) {
        let ((ma, ea, fa), (mb, eb, fb)) = (operand(a)?, operand(b)?);
        terms.push((ma * mb, ea + eb, fa + fb));
    }
    let counts = |&&(mantissa, ..): &&(i128, i32, i32)| mantissa != 0 || fault == Fault::Zeros;
    let Some(mut top) = terms.iter().filter(counts).map(|&(_, exponent, _)| exponent).max() else { return Some(0) };
    if fault == Fault::Floor {
        top = top.max(-126);
    }
    let unit = top - rule.bits;
    let mut sum = 0i128;
    for (mantissa, exponent, fraction) in terms {
        let shift = exponent - fraction - unit;
        let size = mantissa.abs();
        let mut cut = if shift >= 0 { size << shift } else { size >> (-shift).min(127) };
        if fault == Fault::Sticky && shift < 0 && cut << (-shift).min(100) != size {
            cut |= 1;
        }
        sum += if mantissa < 0 { -cut } else { cut };
    }
    // Two bits more, so that a rounding has something to see.
    let (size, sign) = (sum.unsigned_abs(), u32::from(sum < 0) << 31);
    if size == 0 {
        return Some(0);
    }
    let last = (127 - size.leading_zeros() as i32 + unit).max(-126) - 23;
    let shift = last - unit;
    let mut mantissa = if shift <= 0 { size << -shift } else { size >> shift.min(127) };
    if fault == Fault::Nearest && shift > 0 && shift < 127 {
        let (rest, half) = (size & ((1 << shift) - 1), 1 << (shift - 1));
        mantissa += u128::from(rest > half || rest == half && mantissa & 1 == 1);
    }
    let word = ((last + 149) as u128) * (1 << 23) + mantissa;
    Some(if mantissa == 0 { 0 } else { sign | word.min(0x7F80_0000) as u32 })
}

/// Each fault is seen in what the H100 gave and by the vectors; without one nothing is.
#[test]
fn another_arithmetic_is_seen() {
    use Fault::{Floor, Nearest, None, Sticky, Zeros};
    for fault in [None, Sticky, Nearest, Floor, Zeros] {
        let mut wrong = (0, 0);
        recorded(|format, c, steps, d| {
            let rule = Rule::of("sm90", format).expect("Hopper has all");
            let theirs = steps.iter().try_fold(c, |c, (a, b)| faulty(rule, fault, c, a, b));
            wrong.0 += usize::from(theirs.is_some_and(|theirs| theirs != d));
        });
        for Vector { rule, c, a, b, d } in vectors() {
            let mut groups = a.chunks(rule.group).zip(b.chunks(rule.group));
            let theirs = groups.try_fold(c, |c, (a, b)| faulty(rule, fault, c, a, b));
            wrong.1 += usize::from(theirs.is_some_and(|theirs| theirs != d));
        }
        assert_eq!((wrong.0 > 0, wrong.1 > 0), (fault != None, fault != None), "{fault:?}: {wrong:?}");
    }
}

#[test]
fn names_of_profiles() {
    let of = |format| Rule::all(format).into_iter().map(Rule::profiles).collect::<Vec<_>>();
    assert_eq!(of(Format::Bf16), [vec!["sm90", "sm100"], vec!["sm80", "sm89"]]);
    assert_eq!(of(Format::Fp16), [vec!["sm90", "sm100"], vec!["sm80", "sm89", "sm75"], vec!["sm70"]]);
    assert_eq!(UNITS.iter().filter(|unit| matches!(unit.source, samebits_units::Source::Measured(_))).count(), 1);
}

/// Numbers without a library: xorshift.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A word of a format; `how` says how wild.
    fn word(&mut self, format: Format, how: u64) -> u32 {
        let (bits, fraction, bias, all) = match format {
            Format::Bf16 => (16, 7, 127, 255),
            Format::Fp16 => (16, 10, 15, 31),
            Format::Tf32 => (32, 23, 127, 255),
        };
        let any = self.next() as u32;
        let exponent = match how {
            0 => bias - 2 + any % 4,
            1 => (bias - 12 + any % 25).min(all - 1),
            2 => any % all,
            3 => [0, 1, bias, all - 1][any as usize % 4],
            4 => [0, bias, bias, bias + 1][any as usize % 4],
            _ => {
                if any.is_multiple_of(64) {
                    all
                } else {
                    any % (all + 1)
                }
            }
        };
        let fraction_bits = if how == 4 && any & 64 > 0 { 0 } else { (self.next() as u32) & ((1 << fraction) - 1) };
        let word = (self.next() as u32 & 1) << (bits - 1) | exponent << fraction | fraction_bits;
        if format == Format::Tf32 && how != 2 { word >> 13 << 13 } else { word }
    }
}

/// Every instruction set gives the bits of the plain model, for every rule and wildness, from any column on, with a carry.
#[test]
fn every_instruction_set_gives_the_same() {
    let mut draw = Draw(0x9E37_79B9_7F4A_7C15);
    let isas: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.available()).collect();
    let mut outputs = 0;
    for format in Format::ALL {
        for rule in Rule::all(format) {
            for round in 0..240u64 {
                let how = round % 6;
                let k = 1 + draw.next() as usize % 70;
                let (m, n) = (1 + draw.next() as usize % 3, 1 + draw.next() as usize % 35);
                let mut words = |rows: usize| (0..rows * k).map(|_| draw.word(format, how)).collect::<Vec<_>>();
                let (x, mut w) = (words(m), words(n));
                // Rows that cancel against themselves.
                if round % 7 == 0 && k > 1 {
                    for row in w.chunks_mut(k) {
                        row[k / 2] = row[0] ^ if format == Format::Tf32 { 1 << 31 } else { 1 << 15 };
                    }
                }
                let rows = Rows::new(format, k, x.clone());
                let panels = Panels::new(Rows::new(format, k, w.clone()));
                let from = draw.next() as usize % k;
                let to = from + draw.next() as usize % (k - from + 1);
                for (row, panel) in (0..m).flat_map(|row| (0..panels.panels()).map(move |panel| (row, panel))) {
                    let carry: [u32; LANES] = std::array::from_fn(|lane| match (round / 6 + lane as u64) % 5 {
                        0 => 0,
                        1 => draw.next() as u32,
                        2 => draw.next() as u32 & 0x807F_FFFF,
                        3 => 0x7F7F_FFFF ^ (draw.next() as u32 & 0x8000_000F),
                        _ => (draw.next() as u32 & 0x87FF_FFFF) + 0x3C00_0000,
                    });
                    for &isa in &isas {
                        let mut c = carry;
                        chain(isa, rule, (&rows, row), (&panels, panel), (from, to), &mut c);
                        for lane in (0..LANES).filter(|lane| panel * LANES + lane < n) {
                            let other = &w[(panel * LANES + lane) * k..][..k];
                            let right = exact::chain(rule, carry[lane], &x[row * k..][from..to], &other[from..to]);
                            assert_eq!(c[lane], right, "{} {rule:?} round {round} lane {lane}", isa.name());
                            outputs += 1;
                        }
                    }
                }
            }
        }
    }
    println!(
        "instruction sets: {}; {outputs} outputs",
        isas.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(" ")
    );
}

#[test]
fn every_selected_record_is_reproduced() {
    let machine = Machine { isa: Isa::best(), threads: 2 };
    for file in ["bf16", "fp16", "tf32", "cublas"] {
        for entry in dump(&format!("{file}.safetensors")) {
            let verdict = verify(&entry, machine, &|_, _| ());
            println!("{file}: {verdict:?}");
            assert!(verdict.reproduced() && verdict.rule.profiles().contains(&"sm90"), "{file}: {verdict:?}");
        }
    }
}
