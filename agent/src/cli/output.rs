//! What commands print: tables for people, JSON for scripts. Answers go to standard output, complaints to standard
//! error.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "this is the command line"
)]

use std::fmt::Display;

use clap::ValueEnum;
use comfy_table::{ContentArrangement, Table};
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
    // A reader that has seen enough (`| head`) is no error.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Says what is wrong.
pub fn complain(what: impl Display) {
    eprintln!("holdfast: {what}");
}

/// A table without lines.
#[must_use]
pub fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_style(comfy_table::presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header);
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let lines: Vec<String> = table
        .lines()
        .map(|line| line.trim_end().to_owned() + "\n")
        .collect();
    lines.concat()
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
