//! The configuration file: TOML without tables, each key the name of a flag.

use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::layers::Fault;
use crate::files::{self, FileError};

/// Far above all settings with a comment to each.
const LARGEST: u64 = 1 << 20;

/// A value as it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Number,
    Truth,
}

impl Kind {
    pub(super) const fn described(self) -> &'static str {
        match self {
            Self::Text => "a text in quotes",
            Self::Number => "a whole number",
            Self::Truth => "true or false",
        }
    }
}

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) line: usize,
    /// None: an array, a table, a date: nothing that a flag could be.
    pub(super) value: Option<(Kind, String)>,
}

/// Reads the entries. A file that is not there has none, unless it was asked for.
pub(super) fn read(path: &Path, wanted: bool) -> Result<Vec<Entry>, Fault> {
    let content = match files::read(path, LARGEST) {
        Ok(content) => content,
        Err(error) if error.is_not_found() && !wanted => return Ok(Vec::new()),
        Err(error) => return Err(unreadable(path, &error)),
    };
    parse(&content).map_err(|(line, reason)| Fault::in_file(path, line, reason))
}

fn unreadable(path: &Path, error: &FileError) -> Fault {
    Fault {
        place: path.display().to_string(),
        reason: error.to_string(),
    }
}

fn parse(content: &[u8]) -> Result<Vec<Entry>, (usize, String)> {
    let text = std::str::from_utf8(content)
        .map_err(|error| (line(content, error.valid_up_to()), "this is not UTF-8".to_owned()))?;
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        (line(content, at), error.message().to_owned())
    })?;
    let mut entries: Vec<Entry> = table
        .into_inner()
        .into_iter()
        .map(|(key, value)| Entry {
            line: line(content, key.span().start),
            value: scalar(value.get_ref()),
            key: key.into_inner().into_owned(),
        })
        .collect();
    entries.sort_by_key(|entry| entry.line);
    Ok(entries)
}

fn scalar(value: &DeValue<'_>) -> Option<(Kind, String)> {
    match value {
        DeValue::String(text) => Some((Kind::Text, text.clone().into_owned())),
        DeValue::Boolean(truth) => Some((Kind::Truth, truth.to_string())),
        DeValue::Integer(number) => {
            // What is below zero or too large is refused by the flag itself, as it was written.
            let read = u64::from_str_radix(number.as_str(), number.radix());
            Some((
                Kind::Number,
                read.map_or_else(|_| number.to_string(), |number| number.to_string()),
            ))
        }
        _ => None,
    }
}

/// Line of a byte, from 1.
fn line(content: &[u8], at: usize) -> usize {
    1 + content.iter().take(at).filter(|byte| **byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_their_lines() {
        let entries =
            parse(b"# first\nnode = \"edge-1\"\n\nmap-flows = 0x1_000\nallow = true\nlist = [1]\n").unwrap();
        let shown: Vec<_> = entries
            .iter()
            .map(|entry| (entry.line, entry.key.as_str(), entry.value.clone()))
            .collect();
        let text = |kind, text: &str| Some((kind, text.to_owned()));
        assert_eq!(
            shown,
            [
                (2, "node", text(Kind::Text, "edge-1")),
                (4, "map-flows", text(Kind::Number, "4096")),
                (5, "allow", text(Kind::Truth, "true")),
                (6, "list", None),
            ]
        );
    }

    #[test]
    fn what_is_no_toml_is_told_with_its_line() {
        for (content, at) in [
            (&b"node = \"a\"\nlisten = \n"[..], 2),
            (b"node = \"a\"\nnode = \"b\"\n", 2),
            (b"\n\n\xff = 1\n", 3),
            (b"node\n", 1),
        ] {
            assert_eq!(parse(content).unwrap_err().0, at, "{content:?}");
        }
    }

    #[test]
    fn a_file_that_nobody_asked_for_may_be_missing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.toml");
        assert_eq!(read(&path, false).unwrap(), []);
        assert!(read(&path, true).is_err());
        // There, but no file: asked for or not.
        assert!(read(dir.path(), false).is_err());
    }
}
