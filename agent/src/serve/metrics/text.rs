//! The text format of Prometheus, version 0.0.4.
//!
//! Written here and not by a client library because of what a scrape of a large node consists of: the same two labels of
//! each policy, ten times over. They are escaped once, and a sample is then a few copies into one string.

use std::fmt::Write as _;

use super::catalogue::{Family, Type};

/// The `Content-Type` of the format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What a scrape answers, while it is written.
#[derive(Debug, Default)]
pub(super) struct Page(String);

impl Page {
    /// With room for so many bytes: a page that grows is copied.
    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self(String::with_capacity(bytes))
    }

    /// Begins a family; its samples must follow before the next one begins.
    pub(super) fn family(&mut self, family: &'static Family) -> Samples<'_> {
        let kind = match family.kind {
            Type::Gauge => "gauge",
            Type::Counter => "counter",
            Type::Histogram => "histogram",
        };
        let help = family.help.replace('\\', "\\\\").replace('\n', "\\n");
        // Writing to a string does not fail.
        _ = write!(
            self.0,
            "# HELP {name} {help}\n# TYPE {name} {kind}\n",
            name = family.name
        );
        Samples {
            text: &mut self.0,
            name: family.name,
        }
    }

    pub(super) fn finish(self) -> String {
        self.0
    }
}

/// The value of a sample.
pub(super) trait Value {
    fn write(self, text: &mut String);
}

impl Value for u64 {
    fn write(self, text: &mut String) {
        match u8::try_from(self) {
            // Nearly all are 0 or 1: the machinery of formats would take longer than the rest of the sample.
            Ok(digit @ 0..10) => text.push(char::from(b'0' + digit)),
            _ => _ = write!(text, "{self}"),
        }
    }
}

impl Value for f64 {
    fn write(self, text: &mut String) {
        _ = write!(text, "{self}");
    }
}

/// Labels, written as they stand in a sample.
#[derive(Clone, Debug, Default)]
pub(super) struct Labels(String);

impl Labels {
    pub(super) fn new(labels: &[(&str, &str)]) -> Self {
        let mut text = String::new();
        for (name, value) in labels {
            append(&mut text, name, value);
        }
        Self(text)
    }
}

fn append(text: &mut String, name: &str, value: &str) {
    if !text.is_empty() && !text.ends_with('{') {
        text.push(',');
    }
    text.push_str(name);
    text.push_str("=\"");
    if value.contains(['\\', '"', '\n']) {
        text.push_str(
            &value
                .replace('\\', "\\\\")
                .replace('"', "\\\"")
                .replace('\n', "\\n"),
        );
    } else {
        text.push_str(value);
    }
    text.push('"');
}

/// Writes the samples of one family.
#[derive(Debug)]
pub(super) struct Samples<'a> {
    text: &'a mut String,
    name: &'static str,
}

impl Samples<'_> {
    /// A sample with these labels.
    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: impl Value) {
        self.line("", &Labels::default(), labels, value);
    }

    /// A sample without labels.
    pub(super) fn plain(&mut self, value: impl Value) {
        self.sample(&[], value);
    }

    /// A sample with labels that are shared with others, and some of its own.
    pub(super) fn shared(&mut self, shared: &Labels, labels: &[(&str, &str)], value: impl Value) {
        self.line("", shared, labels, value);
    }

    /// A histogram: cumulative counts by upper bounds in seconds, and all observations.
    pub(super) fn histogram(
        &mut self,
        labels: &[(&str, &str)],
        buckets: impl IntoIterator<Item = (f64, u64)>,
        count: u64,
        sum: f64,
    ) {
        let shared = Labels::new(labels);
        for (bound, upto) in buckets {
            self.line("_bucket", &shared, &[("le", &in_words(bound))], upto);
        }
        self.line("_bucket", &shared, &[("le", "+Inf")], count);
        self.line("_sum", &shared, &[], sum);
        self.line("_count", &shared, &[], count);
    }

    fn line(&mut self, suffix: &str, shared: &Labels, labels: &[(&str, &str)], value: impl Value) {
        self.text.push_str(self.name);
        self.text.push_str(suffix);
        if !shared.0.is_empty() || !labels.is_empty() {
            self.text.push('{');
            self.text.push_str(&shared.0);
            for (name, value) in labels {
                append(self.text, name, value);
            }
            self.text.push('}');
        }
        self.text.push(' ');
        value.write(self.text);
        self.text.push('\n');
    }
}

/// A bound as Go's clients write it, so that a query finds it by its text.
fn in_words(bound: f64) -> String {
    if bound >= 1e-4 {
        return bound.to_string();
    }
    let text = format!("{bound:e}");
    match text.split_once("e-") {
        // Two digits at least.
        Some((mantissa, exponent)) => format!("{mantissa}e-{exponent:0>2}"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAMILY: Family = Family {
        name: "a_family",
        kind: Type::Histogram,
        help: "A \\ and\na second line.",
        labels: &[],
        absent: "",
    };

    #[test]
    fn what_would_end_a_value_or_a_line_is_escaped() {
        let mut page = Page::default();
        let mut samples = page.family(&FAMILY);
        samples.sample(&[("a", "quote \" back \\ line \n"), ("b", "")], 7_u64);
        samples.shared(&Labels::new(&[("a", "1"), ("b", "2")]), &[("c", "3")], 4_200_u64);
        samples.plain(1_700_000_000.25);
        assert_eq!(
            page.finish(),
            "# HELP a_family A \\\\ and\\na second line.\n\
             # TYPE a_family histogram\n\
             a_family{a=\"quote \\\" back \\\\ line \\n\",b=\"\"} 7\n\
             a_family{a=\"1\",b=\"2\",c=\"3\"} 4200\n\
             a_family 1700000000.25\n"
        );
    }

    #[test]
    fn a_histogram_has_its_buckets_its_sum_and_its_count() {
        let mut page = Page::default();
        let mut samples = page.family(&FAMILY);
        samples.histogram(&[("leg", "x")], [(0.000_01, 1), (0.0003, 2), (30.0, 2)], 3, 100.5);
        samples.histogram(&[], [], 0, 0.0);
        let text = page.finish();
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(
            lines,
            [
                "a_family_bucket{leg=\"x\",le=\"1e-05\"} 1",
                "a_family_bucket{leg=\"x\",le=\"0.0003\"} 2",
                "a_family_bucket{leg=\"x\",le=\"30\"} 2",
                "a_family_bucket{leg=\"x\",le=\"+Inf\"} 3",
                "a_family_sum{leg=\"x\"} 100.5",
                "a_family_count{leg=\"x\"} 3",
                "a_family_bucket{le=\"+Inf\"} 0",
                "a_family_sum 0",
                "a_family_count 0",
            ]
        );
    }
}
