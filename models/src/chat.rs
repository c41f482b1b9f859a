//! Messages as a text, by the chat template of a folder: what `apply_chat_template` of transformers gives for a prompt.

use crate::ModelError;
use crate::files::{read, read_object};
use crate::tokenizer_files::named;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value as Jinja, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, UndefinedBehavior};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use serde_json::{Map, Value};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Steps after which a template that does not end is ended.
const FUEL: u64 = 20_000_000;

/// The text of a prompt: `messages`, and what the assistant's answer begins with.
pub(crate) fn render(dir: &Path, settings: &Map<String, Value>, messages: &Value) -> Result<String, ModelError> {
    let has_role = |message: &Value| message.get("role").is_some_and(Value::is_string);
    if !messages.as_array().is_some_and(|all| !all.is_empty() && all.iter().all(has_role)) {
        return Err(ModelError::input("messages", "must be a list of objects, each with a `role`; give at least one"));
    }
    let (path, template) = template(dir, settings)?;
    let refused = |e: Error| {
        let mut line = e.to_string();
        let mut source = std::error::Error::source(&e);
        while let Some(cause) = source {
            line += &format!(": {cause}");
            source = cause.source();
        }
        ModelError::file(&path, format!("the chat template cannot be used: {line}"))
    };
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(refused)?;
    environment.set_syntax(syntax);
    environment.set_fuel(Some(FUEL));
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(as_python);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| now(&format));
    environment.add_template("chat_template", &template).map_err(refused)?;
    let mut variables = Map::new();
    for key in settings.keys().filter(|key| key.ends_with("_token")) {
        if let Some(token) = named(settings, key) {
            variables.insert(key.clone(), token.into());
        }
    }
    variables.insert("messages".into(), messages.clone());
    variables.insert("add_generation_prompt".into(), true.into());
    variables.insert("tools".into(), Value::Null);
    variables.insert("documents".into(), Value::Null);
    let found = environment.get_template("chat_template").and_then(|template| template.render(Serde(&variables)));
    found.map_err(refused)
}

/// The template, and the file that it stands in: a file of its own before those of `tokenizer_config.json`.
fn template(dir: &Path, settings: &Map<String, Value>) -> Result<(PathBuf, String), ModelError> {
    let path = dir.join("chat_template.jinja");
    if path.exists() {
        let text = String::from_utf8(read(&path)?).map_err(|_| ModelError::file(&path, "is not UTF-8"))?;
        return Ok((path, without_generation(&text)));
    }
    let mut path = dir.join("tokenizer_config.json");
    let mut found = settings.get("chat_template").cloned();
    if found.is_none() && dir.join("chat_template.json").exists() {
        path = dir.join("chat_template.json");
        found = read_object(&path)?.remove("chat_template");
    }
    // Several have names.
    let of_list = |list: &[Value]| {
        let default = list.iter().find(|one| one.get("name").is_some_and(|name| name == "default"))?;
        default.get("template").and_then(Value::as_str).map(String::from)
    };
    let text = match &found {
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Array(list)) => of_list(list),
        Some(Value::Object(map)) => map.get("default").and_then(Value::as_str).map(String::from),
        _ => None,
    };
    let text = text.ok_or_else(|| {
        let why = "has no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json); give texts";
        ModelError::file(dir, why)
    })?;
    Ok((path, without_generation(&text)))
}

/// The template without the marks around what the assistant writes, which change no text.
fn without_generation(text: &str) -> String {
    let mut text = text.to_string();
    for (tag, other) in [("endgeneration", "endif"), ("generation", "if true")] {
        for open in ["{%", "{%-", "{%+"] {
            for close in ["%}", "-%}", "+%}"] {
                text = text.replace(&format!("{open} {tag} {close}"), &format!("{open} {other} {close}"));
            }
        }
    }
    text
}

/// Writes what Python writes.
fn as_python(out: &mut Output, state: &mut State, value: &Jinja) -> Result<(), Error> {
    let word = match (value.kind(), value.is_true()) {
        (ValueKind::Bool, true) => "True",
        (ValueKind::Bool, false) => "False",
        (ValueKind::None, _) => "None",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(word).map_err(Error::from)
}

/// Python's `json.dumps` with `ensure_ascii=False`.
fn to_json(value: Jinja, options: Kwargs) -> Result<Jinja, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent.min(64));
            value
                .serialize(&mut Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(spaces.as_bytes())))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, Spaced)),
    };
    written.map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(Jinja::from_safe_string(String::from_utf8(bytes).expect("JSON is UTF-8")))
}

/// A space behind commas and colons.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// The time of this moment, UTC, as `strftime` of Python writes it: what templates ask for.
fn now(format: &str) -> Result<String, Error> {
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    time(format, seconds)
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The same of `seconds` since 1970.
fn time(format: &str, seconds: u64) -> Result<String, Error> {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let is_leap = |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(is_leap(year)) {
        left -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let (mut month, mut day) = (0, left);
    while day >= lengths[month] {
        day -= lengths[month];
        month += 1;
    }
    let (mut text, mut chars) = (String::new(), format.chars());
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let week = DAYS[(days % 7) as usize];
        text += &match chars.next() {
            Some('d') => format!("{:02}", day + 1),
            Some('m') => format!("{:02}", month + 1),
            Some('y') => format!("{:02}", year % 100),
            Some('Y') => year.to_string(),
            Some('b') => MONTHS[month][..3].into(),
            Some('B') => MONTHS[month].into(),
            Some('a') => week[..3].into(),
            Some('A') => week.into(),
            Some('j') => format!("{:03}", left + 1),
            Some('H') => format!("{:02}", of_day / 3600),
            Some('M') => format!("{:02}", of_day / 60 % 60),
            Some('S') => format!("{:02}", of_day % 60),
            Some('%') => "%".into(),
            other => {
                let why = format!("strftime_now knows no %{}", other.map_or(String::new(), String::from));
                return Err(Error::new(ErrorKind::InvalidOperation, why));
            }
        };
    }
    Ok(text)
}

#[cfg(feature = "unit-tests")]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    fn rendered(template: &str, messages: Value) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        let settings = json!({"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
        let Value::Object(settings) = settings else { unreachable!() };
        render(dir.path(), &settings, &messages).map_err(|e| e.to_string())
    }

    /// By hand; a test of Python's compares published templates with transformers.
    pub(crate) fn messages_become_a_text() {
        let messages = json!([{"role": "user", "content": " a\n<b> "}]);
        let template = "{{ bos_token }}{% for m in messages %}\n  [{{ m['role'] }}] {{ m['content'].strip() }}{{ eos_token }}\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}";
        assert_eq!(rendered(template, messages.clone()).unwrap(), "<s>  [user] a\n<b></s>\nA:");
        let odd = "{{ messages[0] | tojson }} {{ true }} {{ none }}{{ tools }} {{ messages[0].missing }}{%- generation -%} x {%- endgeneration -%}";
        assert_eq!(
            rendered(odd, messages.clone()).unwrap(),
            "{\"role\": \"user\", \"content\": \" a\\n<b> \"} True NoneNone x"
        );
        let refused = |template: &str, messages: Value| rendered(template, messages).unwrap_err();
        assert!(refused("{{ raise_exception('no system') }}", messages.clone()).contains("no system"));
        assert!(
            refused("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", messages)
                .contains("cannot be used")
        );
        assert!(refused("", json!([])).starts_with("messages: must be a list"));
        assert!(refused("", json!([{"content": "a"}])).starts_with("messages: must be a list"));
    }

    pub(crate) fn times_are_written_as_python_writes_them() {
        let at = |seconds| time("%A %a %d %b %B %Y %y %m %j %H:%M:%S %%", seconds).unwrap();
        assert_eq!(at(0), "Thursday Thu 01 Jan January 1970 70 01 001 00:00:00 %");
        assert_eq!(at(1_709_214_245), "Thursday Thu 29 Feb February 2024 24 02 060 13:44:05 %");
        assert!(time("%Q", 0).is_err() && time("%", 0).is_err());
    }
}
