//! How a story is told.

/// Counts its steps.
#[derive(Debug, Default)]
pub(crate) struct Telling {
    step: u32,
}

impl Telling {
    /// Begins the next step.
    pub(crate) fn title(&mut self, text: &str) {
        self.step += 1;
        println!("\n{}. {text}", self.step);
    }
}

/// The story says something.
pub(crate) fn say(text: &str) {
    println!("{}", indent(text));
}

/// A text as it stands below a title.
pub(crate) fn indent(text: &str) -> String {
    text.trim_end()
        .lines()
        .map(|line| format!("  {line}\n"))
        .collect::<String>()
        .trim_end()
        .to_owned()
}
