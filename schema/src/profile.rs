//! Profiles: which arithmetic and order of sums a call asks for. Bits of two profiles are never compared, so a profile is a
//! part of every key that bits are kept under.

use crate::Error;
use crate::attribute::{Attribute, DefaultValue, Kind};
use std::sync::{PoisonError, RwLock};

/// The profile of calls that name none: binary32, to nearest even, with gradual underflow, in the order of `docs/NUMERICS.md`.
pub const IEEE: &str = "ieee";

/// The profiles of this project, the default first. Every other list of names is made of this one.
pub const PROFILES: &[&str] = &[IEEE];

/// Which arithmetic: an attribute of every call.
pub const PROFILE: Attribute = Attribute {
    name: "profile",
    about: "which arithmetic and order of sums; another profile is `unsupported` where a program does not have it",
    kind: Kind::Choice(PROFILES),
    default: DefaultValue::Is(PROFILES[0]),
};

/// The profiles that were registered. Every change is a single step, so a panic elsewhere leaves it whole.
static OTHERS: RwLock<Vec<&str>> = RwLock::new(Vec::new());

/// The names of all profiles: [`PROFILES`], and those that were [registered](register_profile).
pub fn profiles() -> Vec<&'static str> {
    let others = OTHERS.read().unwrap_or_else(PoisonError::into_inner);
    PROFILES.iter().copied().chain(others.iter().copied()).collect()
}

/// Makes the name of another profile known, for the life of the program: calls, contracts and goldens may then name it. Who
/// does not implement it refuses it by name.
///
/// # Errors
/// [`Error::Invalid`] where the name is taken, or is not lower case letters, digits and `_`.
pub fn register_profile(name: &'static str) -> Result<(), Error> {
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if name.is_empty() || !name.chars().all(word) {
        return Err(Error::Invalid(format!("profile `{name}`: use lower case letters, digits and _")));
    }
    let mut others = OTHERS.write().unwrap_or_else(PoisonError::into_inner);
    if PROFILES.iter().chain(others.iter()).any(|other| *other == name) {
        return Err(Error::Invalid(format!("profile `{name}`: another one has this name; choose one of your own")));
    }
    others.push(name);
    Ok(())
}

/// What is behind the name of something whose bits are those of a profile: nothing for the default, else `@` and its name.
pub fn profile_suffix(profile: &str) -> String {
    if profile == IEEE { String::new() } else { format!("@{profile}") }
}
