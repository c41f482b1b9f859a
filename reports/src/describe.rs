//! The sentences that text, Markdown and JUnit share.

use samebits_contract::record::{Judgment, Record, Run};
use samebits_contract::verdict::{Evidence, Verdict};

/// `text` on one line, without the control characters that could move a cursor or end a line.
pub fn one_line(text: &str) -> String {
    text.split(|c: char| c.is_control()).filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

/// The arguments of a run, the end of a long list left out.
pub fn arguments(run: &Run) -> String {
    const SHOWN: usize = 60;
    match run.arguments.len().saturating_sub(SHOWN) {
        0 => run.arguments.join(" "),
        more => format!("{} .. and {more} more words", run.arguments[..SHOWN].join(" ")),
    }
}

/// The verdict's name in words.
pub fn verdict(verdict: &Verdict) -> String {
    verdict.name().replace('_', " ")
}

/// How a record was judged, for example `invariance threads=2`.
pub fn judgment(record: &Record) -> String {
    let mut text = record.judgment.name().to_string();
    if let Some(axis) = &record.axis {
        text += &format!(" {axis}");
    }
    if let Some(setting) = &record.setting {
        text += &format!("={setting}");
    }
    one_line(&text)
}

/// What was judged: case, dtypes, judgment, implementation and kernel.
pub fn subject(record: &Record) -> String {
    let Record { case, dtype, out, implementation, kernel, .. } = record;
    let kernel = if kernel.is_empty() { String::new() } else { format!(" [{kernel}]") };
    one_line(&format!("{case} ({dtype} -> {out}), {}, {implementation}{kernel}", judgment(record)))
}

/// Why a record is not a pass; empty for a pass.
pub fn why(record: &Record) -> String {
    match &record.verdict {
        Verdict::Pass => String::new(),
        Verdict::Fail(evidence) => {
            self::evidence(evidence, if record.judgment == Judgment::Invariance { "base" } else { "expected" })
        }
        Verdict::Waived { reason }
        | Verdict::StaleWaiver { reason }
        | Verdict::Unsupported { reason }
        | Verdict::Error { reason }
        | Verdict::Untested { reason } => one_line(reason),
    }
}

/// Verdict, subject and reason of a red record in one line; `count` is of how many it is the first.
pub fn red(record: &Record, count: usize) -> String {
    let more = match count {
        1 => String::new(),
        _ => format!(" (and {} more for the same reason)", count - 1),
    };
    format!("{}: {}{more}", verdict(&record.verdict), subject(record))
}

/// The command that asks a red record again; empty where none is known.
pub fn again(record: &Record) -> String {
    record.again.as_deref().map(one_line).unwrap_or_default()
}

/// The message, and whatever of the rest it does not say already.
fn evidence(evidence: &Evidence, reference: &str) -> String {
    let Evidence { message, output, index, coordinates, expected, found, expected_bits, found_bits, ulp, count, total } =
        evidence;
    let mut text = message.clone();
    // Evidence on a whole tensor has no element, and so no bits.
    let element = !found_bits.is_empty();
    if [expected, expected_bits, found, found_bits].iter().any(|part| !message.contains(part.as_str())) {
        let place = if element { format!("{output}{coordinates:?} (index {index}): ") } else { String::new() };
        let bits = |bits: &String| if bits.is_empty() { String::new() } else { format!(" ({bits})") };
        let (expected_bits, found_bits) = (bits(expected_bits), bits(found_bits));
        text += &format!("; {place}{reference} {expected}{expected_bits}, found {found}{found_bits}");
    }
    if let Some(ulp) = ulp.filter(|_| !message.contains("ulp")) {
        text += &format!("; {} ulp", number(ulp));
    }
    let share = format!("{count} of {total}");
    if element && !message.contains(&share) {
        text += &format!("; {share} elements wrong");
    }
    one_line(&text)
}

/// A number in at most four significant digits; what is not finite is said so.
pub fn number(value: f64) -> String {
    if !value.is_finite() {
        return "not finite".into();
    }
    if value == 0.0 || value.fract() == 0.0 && value.abs() < 1e6 {
        return format!("{value}");
    }
    if value.abs() >= 1e6 || value.abs() < 1e-3 {
        return format!("{value:.3e}");
    }
    let digits = (3 - value.abs().log10().floor() as i32).max(0) as usize;
    format!("{value:.digits$}")
}

/// A share in per cent that never rounds to exactly 100 or 0.
pub fn percent(share: f64) -> String {
    let hundredths = share * 1e4;
    match share {
        _ if !share.is_finite() => "not finite".into(),
        _ if share < 1.0 && hundredths > 9999.0 => "> 99.99%".into(),
        _ if share > 1.0 && hundredths < 10001.0 => "> 100.00%".into(),
        _ if share > 0.0 && hundredths < 1.0 => "< 0.01%".into(),
        _ => format!("{:.2}%", share * 100.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_do_not_flatter() {
        assert_eq!(percent(1.0), "100.00%");
        assert_eq!(percent(0.999_999), "> 99.99%");
        assert_eq!(percent(0.0), "0.00%");
        assert_eq!(percent(1e-9), "< 0.01%");
        assert_eq!(percent(0.5), "50.00%");
        assert_eq!(percent(1.000_001), "> 100.00%");
        assert_eq!(number(0.499_94), "0.4999");
        assert_eq!(number(1.0), "1");
        assert_eq!(number(123.456), "123.5");
        assert_eq!(number(f64::NAN), "not finite");
        assert_eq!(number(2.5e-7), "2.500e-7");
    }

    #[test]
    fn evidence_says_everything_once() {
        let mut e = Evidence {
            message: "batch=2 differs".into(),
            output: "y".into(),
            index: 17,
            coordinates: vec![2, 1],
            expected: "1".into(),
            found: "1.0078125".into(),
            expected_bits: "0x3f80".into(),
            found_bits: "0x3f81".into(),
            ulp: Some(1.0),
            count: 3,
            total: 512,
        };
        let rest =
            "; y[2, 1] (index 17): expected 1 (0x3f80), found 1.0078125 (0x3f81); 1 ulp; 3 of 512 elements wrong";
        assert_eq!(evidence(&e, "expected"), format!("batch=2 differs{rest}"));
        assert_eq!(evidence(&e, "base"), format!("batch=2 differs{}", rest.replace("expected", "base")));
        e.message = "y[2, 1]: 1.0078125 (0x3f81) where 1 (0x3f80) was expected; 3 of 512 differ".into();
        assert_eq!(evidence(&e, "expected"), format!("{}; 1 ulp", e.message));
        let whole = Evidence {
            message: "y: dtype fp32 where bf16 was expected".into(),
            count: 1,
            total: 1,
            ..Evidence::default()
        };
        assert_eq!(evidence(&whole, "expected"), whole.message);
    }

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        assert_eq!(one_line("a\u{1b}[31m\nb\r\n"), "a [31m b");
    }
}
