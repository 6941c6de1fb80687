//! What commands print: tables for people, JSON for scripts. Answers go to standard output, complaints to standard
//! error.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "this is the command line"
)]

use std::fmt::Display;

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use serde::Serialize;

use super::Answer;

/// Form of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people
    #[default]
    Table,
    /// For scripts: fields are added, never renamed or removed
    Json,
}

/// The flag that chooses it.
#[derive(clap::Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatArgs {
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: Format,
}

/// Prints an answer as JSON, indented.
pub fn json(value: &impl Serialize) -> Answer {
    match serde_json::to_string_pretty(value) {
        Ok(text) => {
            print(&(text + "\n"));
            Answer::Yes
        }
        Err(error) => {
            complain(error);
            Answer::Unknown
        }
    }
}

/// Prints text as it is.
pub fn print(text: &str) {
    use std::io::Write as _;
    // Colours only on a terminal, and where nobody has said no (NO_COLOR). A reader that has seen enough (`| head`) is no
    // error.
    let _ = anstream::stdout().write_all(text.as_bytes());
}

/// Says what is wrong.
pub fn complain(what: impl Display) {
    eprintln!("holdfast: {what}");
}

/// What is as it should be.
pub const GOOD: Style = AnsiColor::Green.on_default();
/// What is not.
pub const BAD: Style = AnsiColor::Red.on_default();
/// What may become either.
pub const OPEN: Style = AnsiColor::Yellow.on_default();
/// What is looked for first.
pub const STRONG: Style = Style::new().bold();

/// Text in a colour, until it is printed to something that has none.
#[must_use]
pub fn paint(style: Style, text: impl Display) -> String {
    format!("{style}{text}{style:#}")
}

/// The colour of `Programmed`, `Held`, `Failed` and `Pending`.
#[must_use]
pub fn state_style(state: &str) -> Style {
    match state {
        "Programmed" => GOOD,
        "Failed" => BAD,
        _ => OPEN,
    }
}

/// Text as it is seen, without colours.
#[must_use]
pub fn plain(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}

/// A table without lines.
#[must_use]
pub fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let header = header.iter().map(|title| (*title).to_owned()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
    columns(&lines)
}

/// Cells in columns, two blanks apart, none at the end of a line.
#[must_use]
pub fn columns(lines: &[Vec<String>]) -> String {
    let width = |cell: &String| plain(cell).chars().count();
    let count = lines.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count)
        .map(|at| {
            lines
                .iter()
                .filter_map(|line| line.get(at))
                .map(width)
                .max()
                .unwrap_or(0)
        })
        .collect();
    let line = |cells: &Vec<String>| {
        let last = cells.iter().rposition(|cell| !cell.is_empty());
        let shown = cells.iter().zip(&widths).take(last.map_or(0, |last| last + 1));
        let mut text = String::new();
        for (at, (cell, column)) in shown.enumerate() {
            text.push_str(cell);
            if Some(at) != last {
                text.push_str(&" ".repeat(column + 2 - width(cell)));
            }
        }
        text + "\n"
    };
    lines.iter().map(line).collect()
}

/// A dash where there is nothing.
#[must_use]
pub fn or_dash(value: Option<impl Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// How long ago a stamp was, in its two largest units; the stamp itself if it cannot be read.
#[must_use]
pub fn age(stamp: &str, now: &str) -> String {
    let parse = |text: &str| text.parse::<jiff::Timestamp>().ok();
    let (Some(then), Some(now)) = (parse(stamp), parse(now)) else {
        return stamp.to_owned();
    };
    let seconds = now.as_second().saturating_sub(then.as_second()).max(0);
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{}s", seconds % 60),
        (0, _, _) => format!("{hours}h{minutes}m"),
        _ => format!("{days}d{hours}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_no_lines_and_no_blanks_at_the_end() {
        let text = table(
            &["NAME", "N"],
            vec![
                vec!["a".to_owned(), "1".to_owned()],
                vec!["longer".to_owned(), String::new()],
            ],
        );
        assert_eq!(text, "NAME    N\na       1\nlonger\n");
    }

    #[test]
    fn colours_take_no_room() {
        let lines = [
            vec![paint(GOOD, "yes"), "a".to_owned()],
            vec!["no".to_owned(), "b".to_owned()],
        ];
        let text = columns(&lines);
        assert_ne!(text, plain(&text));
        assert_eq!(plain(&text), "yes  a\nno   b\n");
    }

    #[test]
    fn ages_have_two_units() {
        let now = "2026-01-02T03:04:05.600Z";
        for (stamp, expected) in [
            ("2026-01-02T03:04:05.000Z", "0s"),
            ("2026-01-02T03:03:20.999Z", "45s"),
            ("2026-01-02T03:00:00.000Z", "4m5s"),
            ("2026-01-02T00:00:00.000Z", "3h4m"),
            ("2025-12-30T00:00:00.000Z", "3d3h"),
            ("2026-01-02T03:05:00.000Z", "0s"),
            ("yesterday", "yesterday"),
        ] {
            assert_eq!(age(stamp, now), expected);
        }
    }
}
