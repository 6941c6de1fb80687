//! Command line options: a few lines here instead of a crate that takes longer to build than the rest of xtask.

use anyhow::{Context, bail};

/// The words after the command. Options are taken one by one; what is left at the end is an error.
pub(crate) struct Args {
    words: Vec<String>,
}

impl Args {
    /// These words.
    pub(crate) fn new(words: impl Iterator<Item = String>) -> Self {
        Self {
            words: words.collect(),
        }
    }

    /// Whether help is asked for (not behind `--`, where words belong to somebody else).
    pub(crate) fn wants_help(&self) -> bool {
        self.words
            .iter()
            .take_while(|word| *word != "--")
            .any(|word| word == "-h" || word == "--help")
    }

    /// Takes a switch such as `--quick`.
    pub(crate) fn switch(&mut self, name: &str) -> bool {
        let before = self.words.len();
        self.words.retain(|word| word != name);
        self.words.len() != before
    }

    /// Takes an option with a value: `--name VALUE` or `--name=VALUE`.
    pub(crate) fn value(&mut self, name: &str) -> anyhow::Result<Option<String>> {
        let with_equals = format!("{name}=");
        if let Some(at) = self
            .words
            .iter()
            .position(|word| word == name || word.starts_with(&with_equals))
        {
            let word = self.words.remove(at);
            if let Some(value) = word.strip_prefix(&with_equals) {
                return Ok(Some(value.to_owned()));
            }
            if at >= self.words.len() {
                bail!("{name} needs a value");
            }
            return Ok(Some(self.words.remove(at)));
        }
        Ok(None)
    }

    /// Takes the first word, unless it is an option.
    pub(crate) fn subcommand(&mut self) -> Option<String> {
        let is_word = self.words.first().is_some_and(|word| !word.starts_with('-'));
        is_word.then(|| self.words.remove(0))
    }

    /// All that is left, for another program. A leading `--` has kept it from being taken for ours.
    pub(crate) fn all(mut self) -> Vec<String> {
        if self.words.first().is_some_and(|word| word == "--") {
            self.words.remove(0);
        }
        self.words
    }

    /// What is left, when none of it is an option.
    pub(crate) fn rest(self) -> anyhow::Result<Vec<String>> {
        match self.words.iter().find(|word| word.starts_with('-')) {
            None => Ok(self.words),
            Some(word) => bail!("unknown option `{word}` (see --help)"),
        }
    }

    /// Nothing may be left.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        match self.words.first() {
            None => Ok(()),
            Some(word) => bail!("unknown argument `{word}` (see --help)"),
        }
    }
}

/// The value of an option as one of a closed set.
pub(crate) fn one_of<T: Copy>(option: &str, value: &str, choices: &[(&str, T)]) -> anyhow::Result<T> {
    choices
        .iter()
        .find(|(name, _)| *name == value)
        .map(|(_, choice)| *choice)
        .with_context(|| {
            let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
            format!("{option} is one of {}, not `{value}`", names.join(", "))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Args {
        Args::new(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn options_are_taken_and_the_rest_is_an_error() {
        let mut words = args("--quick --seed 7 --case=F01 stray");
        assert!(words.switch("--quick"));
        assert!(!words.switch("--quick"));
        assert_eq!(words.value("--seed").unwrap().as_deref(), Some("7"));
        assert_eq!(words.value("--case").unwrap().as_deref(), Some("F01"));
        assert_eq!(words.value("--none").unwrap(), None);
        assert_eq!(
            words.finish().unwrap_err().to_string(),
            "unknown argument `stray` (see --help)"
        );
    }

    #[test]
    fn a_value_must_follow() {
        assert_eq!(
            args("--seed").value("--seed").unwrap_err().to_string(),
            "--seed needs a value"
        );
    }

    #[test]
    fn help_behind_a_double_dash_is_not_for_us() {
        assert!(args("--help").wants_help());
        assert!(!args("-- --help").wants_help());
    }

    #[test]
    fn another_programs_words_stay_as_they_are() {
        let mut words = args("kubectl -- get --help -- x");
        assert!(!words.wants_help());
        assert_eq!(words.subcommand().as_deref(), Some("kubectl"));
        assert_eq!(words.all(), ["get", "--help", "--", "x"]);
        assert_eq!(args("--nodes 3").subcommand(), None);
    }

    #[test]
    fn choices_are_named_in_the_error() {
        let choices = [("auto", 1), ("debian", 2)];
        assert_eq!(one_of("--toolchain", "debian", &choices).unwrap(), 2);
        assert_eq!(
            one_of("--toolchain", "x", &choices).unwrap_err().to_string(),
            "--toolchain is one of auto, debian, not `x`"
        );
    }
}
