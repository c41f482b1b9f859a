//! How much memory a program may gain while it answers the same question over and over.

use crate::table::Provenance;

/// What the axis `soak` asks; a table of `ws1.toml`.
#[derive(Clone, Debug, PartialEq)]
pub struct Soak {
    /// How often one case is asked, of one process.
    pub requests: usize,
    /// Requests of these that come before memory counts: caches fill, allocators settle.
    pub warm_up: usize,
    /// Into how many equal parts the others are cut.
    pub windows: usize,
    /// Bytes of resident memory that a request may add.
    pub growth: f64,
    /// Seconds all requests may take; a program that is slower is not judged.
    pub patience: f64,
    /// Where the numbers come from.
    pub provenance: Provenance,
}

impl Soak {
    /// Whether resident memory is looked at after this many requests: at the borders of the windows.
    pub fn looks_after(&self, requests: usize) -> bool {
        requests >= self.warm_up && (requests - self.warm_up).is_multiple_of(self.window())
    }

    fn window(&self) -> usize {
        (self.requests - self.warm_up) / self.windows
    }

    /// Bytes that a request adds, by resident memory at the borders of the windows: the median of the windows, and no more
    /// than the mean of them all. What is taken once, at any time, moves the median by nothing; what is given back in
    /// between, as a collector does, counts in the mean.
    pub fn growth_of(&self, resident: &[u64]) -> f64 {
        let mut steps: Vec<f64> = resident.windows(2).map(|pair| pair[1] as f64 - pair[0] as f64).collect();
        let mean = steps.iter().sum::<f64>() / steps.len().max(1) as f64;
        steps.sort_by(f64::total_cmp);
        let median = steps.get(steps.len().saturating_sub(1) / 2).copied().unwrap_or(0.0);
        median.min(mean) / self.window() as f64
    }
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;

    fn soak() -> Soak {
        let provenance = Provenance { source: "a test".into(), samples: 0, date: "2026-11-21".into() };
        Soak { requests: 1024, warm_up: 256, windows: 8, growth: 64.0, patience: 60.0, provenance }
    }

    /// Resident memory, in pages of 4 KiB, of a program that holds `held(n)` bytes after n requests.
    fn growth(held: impl Fn(usize) -> usize) -> f64 {
        let soak = soak();
        let borders = (1..=soak.requests).filter(|&n| soak.looks_after(n));
        let resident: Vec<u64> = borders.map(|n| (1 << 20) + held(n).next_multiple_of(4096) as u64).collect();
        assert_eq!(resident.len(), 9);
        soak.growth_of(&resident)
    }

    pub(crate) fn what_is_added_by_every_request_is_seen() {
        for bytes in [100, 128, 1000, 100_000] {
            let found = growth(|n| bytes * n);
            assert!(found > soak().growth && (found / bytes as f64 - 1.0).abs() < 0.3, "{bytes}: {found}");
        }
        // Beside something that is taken once.
        assert!(growth(|n| 128 * n + if n > 700 { 8 << 20 } else { 0 }) > soak().growth);
    }

    pub(crate) fn what_is_kept_once_or_given_back_is_not() {
        assert_eq!(growth(|_| 12345), 0.0);
        assert_eq!(growth(|n| 10_000 * n.min(256)), 0.0);
        assert_eq!(growth(|n| if n > 600 { 8 << 20 } else { 0 }), 0.0);
        // A cache that fills while it is watched, but not to the end of it.
        assert_eq!(growth(|n| 4096 * n.min(500)), 0.0);
        // A collector that gives back every 300 requests.
        assert!(growth(|n| 1000 * (n % 300)) < soak().growth);
        assert!(growth(|n| 10 * n) < soak().growth);
    }
}
