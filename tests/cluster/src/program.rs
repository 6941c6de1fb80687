//! Programs that are run to their end.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, bail};

/// Runs a command; gives its output whatever its exit code.
pub(crate) fn output(command: &mut Command, input: Option<&str>) -> anyhow::Result<Output> {
    command
        .stdin(if input.is_some() {
            Stdio::piped()
        } else {
            Stdio::null()
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot run {}", show(command)))?;
    // Written beside, for a program may answer before it has read all.
    let writer = child.stdin.take().zip(input).map(|(mut stdin, input)| {
        let input = input.to_owned();
        std::thread::spawn(move || {
            // A program that does not want its input says why by itself.
            _ = stdin.write_all(input.as_bytes());
        })
    });
    let output = child.wait_with_output()?;
    if let Some(writer) = writer {
        _ = writer.join();
    }
    Ok(output)
}

/// Runs a command that must succeed; gives what it says.
pub(crate) fn run(command: &mut Command, input: Option<&str>) -> anyhow::Result<String> {
    let output = output(command, input)?;
    if !output.status.success() {
        let said =
            [&output.stderr, &output.stdout].map(|bytes| String::from_utf8_lossy(bytes).trim().to_owned());
        bail!("{}: {}", show(command), said.join("\n").trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A command as one would type it.
pub(crate) fn show(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
