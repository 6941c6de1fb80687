//! What a suite found: as a table for people, as JSON for whoever compares, and as an exit code.

use std::fmt::{self, Write as _};

use serde::Serialize;

/// What was measured, where, and what came out.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) suite: &'static str,
    /// Of the sources, as `git describe` says; with `-dirty` if they were changed since.
    pub(crate) revision: String,
    #[serde(flatten)]
    pub(crate) machine: Machine,
    /// How this program was built. (What it measures is in the kernel.)
    pub(crate) profile: &'static str,
    pub(crate) rounds: usize,
    pub(crate) unit: &'static str,
    /// What everything is measured against, and what it costs.
    pub(crate) floor: Floor,
    /// The same thing measured as if it were two: how far apart may mean nothing.
    pub(crate) a_a: Vec<AA>,
    pub(crate) figures: Vec<Figure>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) cpus: usize,
    /// Load averages when the suite began, and when it ended: over one minute.
    pub(crate) load: [f64; 2],
}

#[derive(Debug, Serialize)]
pub(crate) struct Floor {
    pub(crate) what: String,
    pub(crate) median: f64,
    pub(crate) min: f64,
}

#[derive(Debug, Serialize)]
pub(crate) struct AA {
    pub(crate) what: String,
    pub(crate) ratio: f64,
}

/// One line.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) what: String,
    /// 4 or 6; none where both are mixed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) family: Option<u8>,
    /// Routes of that family.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) routes: Option<u32>,
    /// Order of the destinations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) keys: Option<&'static str>,
    pub(crate) min: f64,
    pub(crate) median: f64,
    /// Beside something measured in the same rounds: the median over the rounds.
    pub(crate) beside: Vec<Beside>,
}

/// A figure against another.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Beside {
    /// `over empty`, `x hash`.
    pub(crate) what: &'static str,
    /// Median over the rounds.
    pub(crate) value: f64,
    /// The same of the rounds that were disturbed least: of both minima.
    pub(crate) best: f64,
    /// For a ratio: it differs from 1 by no more than three times what A/A does, and so says nothing.
    pub(crate) within_noise: bool,
    /// What it should be at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) goal: Option<f64>,
}

/// Machines are shared: only what is off by more than this factor fails.
const FAR: f64 = 2.0;

impl Machine {
    /// This one.
    pub(crate) fn here() -> Self {
        let name = rustix::system::uname();
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpu.lines().find_map(|line| line.strip_prefix("model name"));
        Self {
            kernel: name.release().to_string_lossy().into_owned(),
            cpu: model.and_then(|rest| rest.split_once(':')).map_or_else(
                || std::env::consts::ARCH.to_owned(),
                |(_, name)| name.trim().to_owned(),
            ),
            // All of them, not the one that we keep to.
            cpus: cpu.lines().filter(|line| line.starts_with("processor")).count(),
            load: [load(), 0.0],
        }
    }
}

/// The load average over one minute; 0 where nobody says.
pub(crate) fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split_whitespace().next().and_then(|word| word.parse().ok());
    first.unwrap_or_default()
}

impl Report {
    /// What is off its goal by a factor of two, even in the best round. After a smoke run only ratios count: its few
    /// rounds say nothing about nanoseconds.
    pub(crate) fn far_off(&self, ratios_only: bool) -> Vec<String> {
        let mut lines = Vec::new();
        for figure in &self.figures {
            for beside in &figure.beside {
                if let Some(goal) = beside.goal
                    && beside.best > FAR * goal
                    && (beside.is_ratio() || !ratios_only)
                {
                    lines.push(format!(
                        "{}: {:.2} {} at best, goal <= {goal}",
                        figure.name(),
                        beside.best,
                        beside.what
                    ));
                }
            }
        }
        lines
    }
}

impl Beside {
    fn is_ratio(&self) -> bool {
        self.what.starts_with('x')
    }
}

impl Figure {
    fn name(&self) -> String {
        let mut name = self.what.clone();
        if let Some(family) = self.family {
            let _ = write!(name, ", IPv{family}");
        }
        if let Some(routes) = self.routes {
            let _ = write!(name, ", {routes} routes");
        }
        if let Some(keys) = self.keys {
            let _ = write!(name, ", {keys}");
        }
        name
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = &self.machine;
        writeln!(
            f,
            "suite {}, revision {}, Linux {}, {} ({} CPUs), load {:.1} to {:.1}",
            self.suite,
            self.revision,
            machine.kernel,
            machine.cpu,
            machine.cpus,
            machine.load[0],
            machine.load[1]
        )?;
        writeln!(
            f,
            "{} rounds, interleaved; {}; floor: {}, {:.1} median, {:.1} min",
            self.rounds, self.unit, self.floor.what, self.floor.median, self.floor.min
        )?;
        for pair in &self.a_a {
            writeln!(f, "A/A: {}: {:.3}", pair.what, pair.ratio)?;
        }
        writeln!(f)?;
        table(f, &self.rows())
    }
}

impl Report {
    fn rows(&self) -> Vec<Vec<String>> {
        let mut columns: Vec<&'static str> = Vec::new();
        for beside in self.figures.iter().flat_map(|figure| &figure.beside) {
            if !columns.contains(&beside.what) {
                columns.push(beside.what);
            }
        }
        let mut head: Vec<String> = ["", "IP", "routes", "keys", "min", "median"]
            .map(str::to_owned)
            .into();
        for column in &columns {
            head.push((*column).to_owned());
        }
        head.extend(["goal".to_owned(), "met".to_owned()]);
        let mut rows = vec![head];
        rows.extend(self.figures.iter().map(|figure| figure.row(&columns)));
        rows
    }
}

impl Figure {
    fn row(&self, columns: &[&str]) -> Vec<String> {
        let digits = if self.median < 100.0 { 1 } else { 0 };
        let mut row = vec![
            self.what.clone(),
            self.family.map(|family| family.to_string()).unwrap_or_default(),
            self.routes.map(|routes| routes.to_string()).unwrap_or_default(),
            self.keys.unwrap_or_default().to_owned(),
            format!("{:.digits$}", self.min),
            format!("{:.digits$}", self.median),
        ];
        for column in columns {
            let found = self.beside.iter().find(|beside| beside.what == *column);
            row.push(match found {
                Some(beside) if beside.within_noise => format!("{:.2}?", beside.value),
                Some(beside) if beside.is_ratio() => format!("{:.2}", beside.value),
                Some(beside) => format!("{:.0}", beside.value),
                None => String::new(),
            });
        }
        let goals = || {
            self.beside
                .iter()
                .filter_map(|beside| Some((beside.value, beside.goal?)))
        };
        let asked: Vec<String> = goals().map(|(_, goal)| format!("<= {goal}")).collect();
        let met: Vec<&str> = goals()
            .map(|(value, goal)| if value <= goal { "yes" } else { "no" })
            .collect();
        row.push(asked.join(", "));
        row.push(met.join(", "));
        row
    }
}

/// Columns as wide as what is in them; words to the left, numbers to the right.
fn table(f: &mut fmt::Formatter<'_>, rows: &[Vec<String>]) -> fmt::Result {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
    };
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for (number, row) in rows.iter().enumerate() {
        let mut line = String::from("|");
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            if column == 0 {
                write!(line, " {cell:<width$} |")?;
            } else {
                write!(line, " {cell:>width$} |")?;
            }
        }
        writeln!(f, "{line}")?;
        if number == 0 {
            let mut rule = String::from("|");
            for (column, width) in widths.iter().enumerate() {
                let end = if column == 0 { "-" } else { ":" };
                write!(rule, "{}{end}|", "-".repeat(width + 1))?;
            }
            writeln!(f, "{rule}")?;
        }
    }
    Ok(())
}

/// One value a round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(pub(crate) Vec<f64>);

impl Samples {
    pub(crate) fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match (sorted.get(middle), sorted.get(middle.wrapping_sub(1))) {
            (Some(high), Some(low)) if sorted.len().is_multiple_of(2) => f64::midpoint(*low, *high),
            (Some(high), _) => *high,
            (None, _) => f64::NAN,
        }
    }

    /// Round by round.
    pub(crate) fn with(&self, other: &Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self(
            self.0
                .iter()
                .zip(&other.0)
                .map(|(a, b)| combine(*a, *b))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(Samples(vec![3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(Samples(vec![4.0, 1.0, 2.0, 3.0]).median(), 2.5);
    }
}
