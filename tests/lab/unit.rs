//! The unit by which systemd runs the agent, as a test reads it.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, ensure};

use crate::process::program;

/// The whole file.
pub const TEXT: &str = include_str!("../../deploy/systemd/holdfast.service");

/// What a key says, line by line, in its order.
#[must_use]
pub fn values(key: &str) -> Vec<&'static str> {
    TEXT.lines()
        .filter_map(|line| line.split_once('='))
        .filter(|(found, _)| *found == key)
        .map(|(_, value)| value)
        .collect()
}

/// What a key says that stands there once.
///
/// # Errors
/// When it does not.
pub fn value(key: &str) -> anyhow::Result<&'static str> {
    let values = values(key);
    ensure!(values.len() == 1, "{key} stands there {} times", values.len());
    values.into_iter().next().context("one")
}

/// The words of the command that it starts, the program first.
///
/// # Errors
/// When there is not one command.
pub fn command() -> anyhow::Result<Vec<&'static str>> {
    Ok(value("ExecStart")?.split_whitespace().collect())
}

/// The system calls that it allows, by the lists of the systemd that is installed here.
///
/// # Errors
/// When that does not tell them.
pub fn system_calls() -> anyhow::Result<BTreeSet<String>> {
    let output = Command::new(program("systemd-analyze")?)
        .arg("syscall-filter")
        .output()?;
    let lists = String::from_utf8(output.stdout)?;
    let mut allowed = BTreeSet::new();
    // The first is always allowed.
    let mut words = vec!["@default".to_owned()];
    words.extend(value("SystemCallFilter")?.split(' ').map(str::to_owned));
    while let Some(word) = words.pop() {
        if word.starts_with('@') {
            let members = members(&lists, &word);
            ensure!(!members.is_empty(), "{word} is no list of systemd's");
            words.extend(members);
        } else {
            ensure!(
                !word.starts_with('~'),
                "the unit forbids instead of allowing: {word}"
            );
            allowed.insert(word);
        }
    }
    Ok(allowed)
}

/// A list is its name in a line and its members, indented, in those that follow.
fn members(lists: &str, list: &str) -> Vec<String> {
    let behind = lists.lines().skip_while(|line| *line != list).skip(1);
    behind
        .take_while(|line| line.starts_with(' '))
        .map(str::trim)
        .filter(|member| !member.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_its_own_members() {
        let lists = "@a\n    # words\n    read\n    @b\n\n@b\n    write\n";
        assert_eq!(members(lists, "@a"), ["read", "@b"]);
        assert_eq!(members(lists, "@b"), ["write"]);
        assert!(members(lists, "@c").is_empty());
    }
}
