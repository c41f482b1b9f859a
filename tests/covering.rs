//! Which checkpoints the tests of a change run: those that have every part a checkpoint has.

use samebits_models::Config;
use std::collections::BTreeSet;
use std::path::Path;

/// What the computation of a model is made of: the fields of its plan, each with its kind, without sizes and names.
fn parts(config: &Config) -> BTreeSet<String> {
    let Config { blocks, norms, finish, embed_scale, positions, embed_norm, transposed, .. } = config;
    let text = format!("{blocks:?}, {norms:?}, {finish:?}, {:?}", (embed_scale, positions, embed_norm, transposed));
    let fields = text.split(|c| "{}()[],".contains(c)).map(str::trim);
    fields
        .filter(|field| !field.is_empty() && !field.contains(|c: char| c == '"' || c.is_ascii_digit()))
        .map(String::from)
        .collect()
}

/// Whether all checkpoints are asked for, as in ci/nightly.
pub fn all() -> bool {
    std::env::var("SAMEBITS_CHECKPOINTS").is_ok_and(|which| which == "all")
}

/// Names of the checkpoints in `folder` that have every part a checkpoint has; with SAMEBITS_CHECKPOINTS=all of all.
pub fn checkpoints(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("tests/checkpoints can be read");
    let names = entries.map(|entry| entry.expect("it can be read").file_name().into_string().expect("names are UTF-8"));
    let mut names: Vec<String> = names.collect();
    names.sort();
    if all() {
        return names;
    }
    let parts = |name: String| {
        let config = Config::load(&folder.join(&name)).expect("checkpoints have configs");
        (name, parts(&config))
    };
    let mut models: Vec<(String, BTreeSet<String>)> = names.into_iter().map(parts).collect();
    // Those with the most parts first, which need the fewest beside them; of two alike the first by name.
    models.sort_by_key(|(_, parts)| std::cmp::Reverse(parts.len()));
    let mut seen = BTreeSet::new();
    models.retain(|(_, parts)| {
        let before = seen.len();
        seen.extend(parts.iter().cloned());
        seen.len() > before
    });
    models.into_iter().map(|(name, _)| name).collect()
}
