//! `contract/ws2.toml`: ways to store weights that its contract admits beside those of ws1.

use serde::Deserialize;

/// A contract that admits further ways to store weights.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Storages {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The contract whose ops, dtypes and bounds it has.
    pub ops: String,
    /// What it admits.
    pub storage: Vec<Storage>,
}

/// A way to store weights.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Storage {
    /// Its name.
    pub format: String,
    /// What an element is.
    pub elements: String,
    /// What elements are scaled by.
    pub scales: String,
    /// By which option it is read, or that ws1 admits it too.
    pub admitted: String,
    /// Why it is admitted.
    pub reason: String,
}

/// The contract ws2.
///
/// # Panics
/// When the table that this crate was built with is none, which a test excludes.
pub fn ws2() -> Storages {
    toml::from_str(include_str!("../ws2.toml")).expect("the table is read by a test")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_read() {
        let ws2 = ws2();
        assert_eq!((&*ws2.name, &*ws2.ops), ("ws2", "ws1"));
        assert_eq!(ws2.storage.iter().map(|one| &*one.format).collect::<Vec<_>>(), ["e4m3", "mxfp4"]);
    }
}
