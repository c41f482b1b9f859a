//! What the `config.json` of a component says: lists, words, and what is not computed.

use crate::fields::Fields;
use serde_json::Value;

/// Complains unless the field has one of these values; absent it has the first.
pub(crate) fn choice(fields: &Fields, field: &str, words: &[&str]) -> String {
    fields.only(field, &words.iter().map(|word| (*word).into()).collect::<Vec<_>>());
    fields.get(field).and_then(Value::as_str).unwrap_or(words[0]).to_string()
}

/// Sizes, one for each of `count` blocks: a list of as many, or one for all; the default where the field is absent.
pub(crate) fn sizes(fields: &Fields, field: &str, count: usize, default: usize) -> Vec<usize> {
    let size = |value: &Value| value.as_u64().and_then(|n| i32::try_from(n).ok()).filter(|n| *n > 0);
    match fields.get(field) {
        None => vec![default; count],
        Some(Value::Array(list)) => {
            let all: Vec<usize> = list.iter().filter_map(size).map(|n| n as usize).collect();
            if all.len() == list.len() && all.len() == count {
                return all;
            }
            let value = Value::Array(list.clone());
            fields.refuse(
                field,
                format!("is {value}; it must be {count} whole numbers of at least 1, one for each block"),
            );
            vec![default; count]
        }
        Some(value) => {
            if let Some(n) = size(value) {
                return vec![n as usize; count];
            }
            fields.refuse(field, format!("is {value}; it must be a whole number of at least 1, or one for each block"));
            vec![default; count]
        }
    }
}

/// A list of sizes, which must be there.
pub(crate) fn list(fields: &Fields, field: &str) -> Vec<usize> {
    let count = fields.get(field).and_then(Value::as_array).map_or(0, Vec::len);
    if count == 0 {
        fields.refuse(field, "is missing; it must be a list of whole numbers, one for each block");
        return vec![1];
    }
    sizes(fields, field, count, 1)
}

/// The kinds of `count` blocks, of which these are known.
pub(crate) fn kinds(fields: &Fields, field: &str, count: usize, known: &[&str], default: &[&str]) -> Vec<String> {
    let all = match fields.get(field) {
        None => default.iter().map(|kind| kind.to_string()).collect(),
        Some(value) => {
            let list = value.as_array().into_iter().flatten().filter_map(Value::as_str);
            let list: Vec<String> = list.map(String::from).collect();
            if let Some(kind) = list.iter().find(|kind| !known.contains(&kind.as_str())) {
                fields.refuse(field, format!("names `{kind}`; supported is {}", known.join(" or ")));
                return vec![known[0].into(); count];
            }
            list
        }
    };
    if all.len() != count {
        fields.refuse(field, format!("has {} blocks; block_out_channels has {count}", all.len()));
        return vec![known[0].into(); count];
    }
    all
}

/// Complains unless groups of norms share the channels.
pub(crate) fn grouped(fields: &Fields, field: &str, groups: usize, channels: &[usize]) {
    if let Some(width) = channels.iter().find(|width| groups == 0 || !width.is_multiple_of(groups)) {
        fields.refuse(
            field,
            format!("is {groups}, which do not share the {width} channels of a block; it must divide them"),
        );
    }
}

/// Ends the reading: fields that nobody asked for are refused unless they ask for nothing.
pub(crate) fn nothing_else(fields: &Fields) {
    fields.unread(&["_class_name", "_diffusers_version", "_name_or_path", "_use_default_values"]);
    fields.refuse_the_rest();
}
