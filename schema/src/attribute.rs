use crate::call::Dims;
use crate::op::Op;
use crate::profile::{PROFILE, profiles};
use crate::{Error, list};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::ops::Bound;

/// What an attribute may be.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// A whole number of at least this.
    Count(usize),
    /// A finite number within these limits.
    Float(Bound<f64>, Bound<f64>),
    /// `0`, `1`, `false` or `true`.
    Flag,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Any text that is not empty.
    Text,
}

impl Kind {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Count(_) => "count",
            Kind::Float(..) => "float",
            Kind::Flag => "flag",
            Kind::Choice(_) => "choice",
            Kind::Text => "text",
        }
    }
}

/// What holds when a call does not give an attribute.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum DefaultValue {
    /// It must be given.
    Required,
    /// This, as it would stand on the wire.
    Is(&'static str),
    /// What follows from the extents, in words and as a function.
    Of(&'static str, fn(&Dims) -> Value),
}

/// An attribute of an op.
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    /// Its name on the wire.
    pub name: &'static str,
    /// What it means, in one line.
    pub about: &'static str,
    /// What it may be.
    pub kind: Kind,
    /// What holds when it is absent.
    pub default: DefaultValue,
}

/// The value of an attribute. Numbers are equal when their bits are: 0 and -0 are not.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Value {
    /// A whole number.
    Count(usize),
    /// A finite number.
    Float(f64),
    /// Yes or no.
    Flag(bool),
    /// A word of a choice, or any text.
    Word(String),
}

/// How f32 operands of a matrix product are read: an attribute of the ops that have one.
pub const TF32: Attribute = Attribute {
    name: "tf32",
    about: "`enabled`: f32 operands are first rounded to 10 mantissa bits; it changes nothing for bf16 and fp16",
    kind: Kind::Choice(&["disabled", "enabled"]),
    default: DefaultValue::Is("disabled"),
};

impl Attribute {
    /// A whole number of at least `least`.
    pub const fn count(name: &'static str, least: usize, default: &'static str, about: &'static str) -> Attribute {
        Attribute { name, about, kind: Kind::Count(least), default: DefaultValue::Is(default) }
    }

    /// A finite number between two limits.
    pub const fn float(
        name: &'static str,
        lower: Bound<f64>,
        upper: Bound<f64>,
        default: &'static str,
        about: &'static str,
    ) -> Attribute {
        Attribute { name, about, kind: Kind::Float(lower, upper), default: DefaultValue::Is(default) }
    }

    /// Yes or no; no is the default.
    pub const fn flag(name: &'static str, about: &'static str) -> Attribute {
        Attribute { name, about, kind: Kind::Flag, default: DefaultValue::Is("0") }
    }

    /// A choice whose default is the first word.
    pub const fn choice(name: &'static str, words: &'static [&'static str], about: &'static str) -> Attribute {
        Attribute { name, about, kind: Kind::Choice(words), default: DefaultValue::Is(words[0]) }
    }

    /// What the model is whose form a call has: `words` is the one of [`Op::program`].
    pub const fn program(words: &'static [&'static str]) -> Attribute {
        Attribute::choice("program", words, "what kind of model it is, which decides inputs and outputs")
    }

    /// The same with another default.
    pub const fn default(self, default: DefaultValue) -> Attribute {
        Attribute { default, ..self }
    }

    /// Reads a value as it stands on the wire, and checks its range.
    ///
    /// # Errors
    /// What the attribute may be.
    pub fn parse(&self, text: &str) -> Result<Value, Error> {
        let value = match self.kind {
            Kind::Count(_) => text.parse().ok().map(Value::Count),
            Kind::Float(..) => text.parse().ok().map(Value::Float),
            Kind::Flag => match text {
                "0" | "false" => Some(Value::Flag(false)),
                "1" | "true" => Some(Value::Flag(true)),
                _ => None,
            },
            Kind::Choice(_) | Kind::Text => Some(Value::Word(text.to_string())),
        };
        match value {
            Some(value) if self.admits(&value) => Ok(value),
            _ => Err(self.refuse(text)),
        }
    }

    /// Whether `value` is of its kind and within its range.
    pub fn admits(&self, value: &Value) -> bool {
        match (self.kind, value) {
            (Kind::Count(least), Value::Count(count)) => *count >= least,
            (Kind::Float(lower, upper), Value::Float(number)) => {
                let above = match lower {
                    Bound::Included(lower) => *number >= lower,
                    Bound::Excluded(lower) => *number > lower,
                    Bound::Unbounded => true,
                };
                let below = match upper {
                    Bound::Included(upper) => *number <= upper,
                    Bound::Excluded(upper) => *number < upper,
                    Bound::Unbounded => true,
                };
                number.is_finite() && above && below
            }
            (Kind::Flag, Value::Flag(_)) => true,
            (Kind::Choice(words), Value::Word(word)) => {
                // Other crates may have profiles of their own.
                words.contains(&word.as_str()) || (self.name == PROFILE.name && profiles().contains(&word.as_str()))
            }
            (Kind::Text, Value::Word(text)) => !text.is_empty(),
            _ => false,
        }
    }

    /// What it may be, in words.
    pub fn range(&self) -> String {
        match self.kind {
            Kind::Count(least) => format!("a whole number of at least {least}"),
            Kind::Float(Bound::Included(lower), Bound::Included(upper)) => {
                format!("a finite number from {} to {}", number(lower), number(upper))
            }
            Kind::Float(lower, upper) => {
                let lower = match lower {
                    Bound::Included(lower) => Some(format!("of at least {}", number(lower))),
                    Bound::Excluded(lower) => Some(format!("greater than {}", number(lower))),
                    Bound::Unbounded => None,
                };
                let upper = match upper {
                    Bound::Included(upper) => Some(format!("of at most {}", number(upper))),
                    Bound::Excluded(upper) => Some(format!("less than {}", number(upper))),
                    Bound::Unbounded => None,
                };
                let limits: Vec<String> = lower.into_iter().chain(upper).collect();
                let space = if limits.is_empty() { "" } else { " " };
                format!("a finite number{space}{}", limits.join(" and "))
            }
            Kind::Flag => "0, 1, true or false".into(),
            Kind::Choice(words) => list(words, "or"),
            Kind::Text => "a word".into(),
        }
    }

    fn refuse(&self, text: &str) -> Error {
        if self.name == PROFILE.name {
            let known = list(&profiles(), "or");
            return Error::Unsupported(format!("param `profile`: `{text}` is not offered; use {known}"));
        }
        Error::Invalid(format!("param `{}`: `{text}` is not {}", self.name, self.range()))
    }

    /// The value that holds when a call does not give it; `None` where it is required.
    pub(crate) fn default_value(&self, dims: &Dims) -> Option<Value> {
        match self.default {
            DefaultValue::Required => None,
            DefaultValue::Is(text) => Some(self.parse(text).expect("the defaults of the registry are tested")),
            DefaultValue::Of(_, value) => Some(value(dims)),
        }
    }
}

/// A limit, short: `0`, `0.5`, `1e-30`.
fn number(limit: f64) -> String {
    match limit {
        _ if limit == 0.0 || (1e-3..1e6).contains(&limit.abs()) => limit.to_string(),
        _ if f64::from(limit as f32) == limit => format!("{:e}", limit as f32),
        _ => format!("{limit:e}"),
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::Count(a), Value::Count(b)) => a == b,
            (Value::Float(a), Value::Float(b)) => a.to_bits() == b.to_bits(),
            (Value::Flag(a), Value::Flag(b)) => a == b,
            (Value::Word(a), Value::Word(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Value {}

impl Hash for Value {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Value::Count(count) => count.hash(state),
            Value::Float(number) => number.to_bits().hash(state),
            Value::Flag(flag) => flag.hash(state),
            Value::Word(word) => word.hash(state),
        }
    }
}

impl std::fmt::Display for Value {
    /// As it would stand on the wire.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::Count(count) => write!(f, "{count}"),
            Value::Float(number) => write!(f, "{number}"),
            Value::Flag(flag) => write!(f, "{}", u8::from(*flag)),
            Value::Word(word) => f.write_str(word),
        }
    }
}

impl From<usize> for Value {
    fn from(count: usize) -> Value {
        Value::Count(count)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Value {
        Value::Float(number)
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Value {
        Value::Flag(flag)
    }
}

impl From<&str> for Value {
    fn from(word: &str) -> Value {
        Value::Word(word.to_string())
    }
}

/// The attributes that a call gives, by name.
///
/// ```
/// use samebits_schema::Attributes;
///
/// let attributes = Attributes::new().with("eps", 1e-5).with("rounding", "hf");
/// assert_eq!(attributes.get("eps").unwrap().to_string(), "0.00001");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Attributes(BTreeMap<String, Value>);

impl Attributes {
    /// None given: every attribute has its default.
    pub fn new() -> Attributes {
        Attributes::default()
    }

    /// The same with one more, or with another value for `name`.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Attributes {
        self.0.insert(name.to_string(), value.into());
        self
    }

    /// The attributes of `op` as they stand on the wire.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an attribute that the op does not have, a value that it may not be and one that is missing;
    /// [`Error::Unsupported`] for another profile, and for TF32 of an op without a matrix product.
    pub fn parse(op: &'static Op, text: &BTreeMap<String, String>) -> Result<Attributes, Error> {
        let op = op.form_of(text.get("program").map(String::as_str))?;
        let mut attributes = Attributes::new();
        for (name, text) in text {
            if let Some(attribute) = known(op, name)? {
                attributes.0.insert(name.clone(), attribute.parse(text)?);
            } else if TF32.parse(text)? == Value::Word("enabled".into()) {
                return Err(no_product(op));
            }
        }
        let required = |attribute: &&Attribute| matches!(attribute.default, DefaultValue::Required);
        match op.attributes().filter(required).find(|attribute| attributes.get(attribute.name).is_none()) {
            Some(attribute) => Err(missing(op, attribute)),
            None => Ok(attributes),
        }
    }

    /// The program that a call names.
    pub(crate) fn program(&self) -> Option<&str> {
        match self.get("program") {
            Some(Value::Word(program)) => Some(program),
            _ => None,
        }
    }

    /// The value given for `name`.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// All that are given, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Checks names, kinds and ranges, and adds the defaults.
    pub(crate) fn complete(mut self, op: &Op, dims: &Dims) -> Result<Attributes, Error> {
        for (name, value) in &self.0 {
            match known(op, name)? {
                Some(attribute) if !attribute.admits(value) => return Err(attribute.refuse(&value.to_string())),
                None if *value != Value::Word("disabled".into()) => return Err(no_product(op)),
                _ => {}
            }
        }
        for attribute in op.attributes() {
            if !self.0.contains_key(attribute.name) {
                let value = attribute.default_value(dims).ok_or_else(|| {
                    Error::Invalid(format!(
                        "param `{}`: missing; {} needs {}",
                        attribute.name, op.name, attribute.about
                    ))
                })?;
                self.0.insert(attribute.name.to_string(), value);
            }
        }
        Ok(self)
    }
}

/// The attribute of `op` called `name`; `None` for TF32, which every op accepts as disabled.
fn known(op: &Op, name: &str) -> Result<Option<&'static Attribute>, Error> {
    match op.attribute(name) {
        Some(attribute) => Ok(Some(attribute)),
        None if name == TF32.name => Ok(None),
        None => {
            let known: Vec<_> = op.attributes().map(|attribute| attribute.name).collect();
            Err(Error::Invalid(format!(
                "param `{name}`: {} has no such parameter; it takes {}",
                op.name,
                known.join(", ")
            )))
        }
    }
}

fn missing(op: &Op, attribute: &Attribute) -> Error {
    Error::Invalid(format!("param `{}`: missing; {} needs {}", attribute.name, op.name, attribute.about))
}

fn no_product(op: &Op) -> Error {
    Error::Unsupported(format!("param `tf32`: {} has no matrix product; use disabled or leave it out", op.name))
}
