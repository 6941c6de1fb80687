//! One event, one line: names and error texts come from files, API servers and kernels, and may hold anything.

use std::borrow::Cow;
use std::fmt;
use std::io;

use tracing::field::Field;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;

/// Writes each event as one line: what is in it and ends lines, moves cursors or turns text around is escaped.
#[derive(Clone, Debug)]
pub(super) struct Lines<M>(pub(super) M);

impl<'a, M: MakeWriter<'a>> MakeWriter<'a> for Lines<M> {
    type Writer = Line<M::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        Line(self.0.make_writer())
    }
}

/// Takes one whole event a call, as the formatter gives it.
#[derive(Debug)]
pub(super) struct Line<W>(W);

impl<W: io::Write> io::Write for Line<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        self.0.write_all(line(&text).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn line(event: &str) -> Cow<'_, str> {
    let body = event.strip_suffix('\n').unwrap_or(event);
    if !body.contains(is_unsafe) {
        return Cow::Borrowed(event);
    }
    let mut line = String::with_capacity(event.len() + 16);
    for char in body.chars() {
        match char {
            '\n' => line.push_str("\\n"),
            '\r' => line.push_str("\\r"),
            '\t' => line.push_str("\\t"),
            // All of them are below U+10000. JSON writes them the same way.
            char if is_unsafe(char) => line.push_str(&format!("\\u{:04x}", u32::from(char))),
            char => line.push(char),
        }
    }
    line.push('\n');
    Cow::Owned(line)
}

/// Control characters, line and paragraph separators, and what changes the direction of text.
fn is_unsafe(char: char) -> bool {
    char.is_control()
        || matches!(char, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}')
}

/// Writes a field as `name=value`, the value in quotes unless it is one word: no text looks like a field of its own.
pub(super) fn field(writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let name = field.name();
    // What `tracing-log` needs for itself.
    if name.starts_with("log.") {
        return Ok(());
    }
    if name == "message" {
        return write!(writer, "{value:?}");
    }
    let name = name.strip_prefix("r#").unwrap_or(name);
    let text = format!("{value:?}");
    if is_word(&text) || is_quoted(&text) {
        write!(writer, " {name}={text}")
    } else {
        write!(writer, " {name}={text:?}")
    }
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && !text.contains(|char: char| char.is_whitespace() || char == '"' || char == '=')
}

/// Whether this is one text in quotes, as `Debug` writes it.
fn is_quoted(text: &str) -> bool {
    let Some(inner) = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')) else {
        return false;
    };
    let mut escaped = false;
    for char in inner.chars() {
        match char {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return false,
            _ => {}
        }
    }
    !escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_harmless_event_is_not_copied() {
        assert!(matches!(line("all is well: \u{e9} \u{6f22}\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn whatever_ends_lines_or_moves_cursors_is_escaped() {
        assert_eq!(
            line("a\nb\r\tc\u{1b}[2J\u{9b}2J\u{2028}\u{202e}\u{7f}\u{85}\0\n"),
            "a\\nb\\r\\tc\\u001b[2J\\u009b2J\\u2028\\u202e\\u007f\\u0085\\u0000\n"
        );
    }

    #[test]
    fn one_text_in_quotes_is_told_from_two() {
        for (text, quoted) in [
            (r#""a b""#, true),
            (r#""a \" b""#, true),
            (r#""a" level="b""#, false),
            (r#""a\""#, false),
            (r#"""#, false),
            ("a", false),
        ] {
            assert_eq!(is_quoted(text), quoted, "{text}");
        }
    }
}
