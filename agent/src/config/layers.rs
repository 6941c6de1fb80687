//! Where settings come from: the file, over it `HOLDFAST_...` variables, over both flags.
//!
//! The flags as clap knows them are the one table of what there is: a key of the file is the name of a flag, its value is
//! judged by the flag's own parser, and becomes what the flag has when neither it nor its variable is given.

use std::error::Error as _;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::builder::{OsStr, Resettable};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};

use super::file::{self, Entry, Kind};

/// Where the file is unless `--config` says otherwise.
pub const DEFAULT_FILE: &str = "/etc/holdfast/agent.toml";

/// The flag that names the file.
const FILE: &str = "config";

/// The subcommand whose flags the file is about.
const AGENT: &str = "agent";

/// Flags that say what to do rather than how: no settings.
const NO_SETTINGS: [&str; 4] = [FILE, "print-config", "help", "version"];

/// A value that does not go, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {reason}")]
pub struct Fault {
    /// File and line, or the name of a variable.
    pub place: String,
    /// What is wrong.
    pub reason: String,
}

impl Fault {
    pub(super) fn in_file(path: &Path, line: usize, reason: String) -> Self {
        Self {
            place: format!("{}:{line}", path.display()),
            reason,
        }
    }
}

/// Why a command line is not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// Its words are wrong, or ask for help only.
    #[error(transparent)]
    Words(#[from] clap::Error),
    /// A variable or the file is.
    #[error("{}", lines(.faults))]
    Settings {
        /// Everything that is wrong.
        faults: Vec<Fault>,
        /// The subcommand that was meant.
        subcommand: String,
    },
}

fn lines(faults: &[Fault]) -> String {
    let lines: Vec<String> = faults.iter().map(Fault::to_string).collect();
    lines.join("\n")
}

/// Where a setting has its value from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody said anything.
    Default,
    /// The file, in this line.
    File(PathBuf, usize),
    /// The environment variable of this name.
    Variable(String),
    /// The flag of this name.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            // A comment is a line, whatever the file is called.
            Self::File(path, line) => write!(f, "{}:{line}", path.display().to_string().escape_debug()),
            Self::Variable(name) => f.write_str(name),
            Self::Flag(name) => write!(f, "--{name}"),
        }
    }
}

/// A setting of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its key in the file, and the name of its flag.
    pub key: String,
    /// Its value as it stands in the file; none = it has none.
    pub value: Option<String>,
    /// Where that is from.
    pub origin: Origin,
}

impl fmt::Display for Setting {
    /// A line of a file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{} = {value}  # {}", self.key, self.origin),
            None => write!(f, "# {} is not set", self.key),
        }
    }
}

/// A command line with everything that stands behind it.
#[derive(Debug)]
pub struct Layered {
    /// What was found, in which flags have the values of the file where nothing else is given.
    pub matches: ArgMatches,
    /// The settings of the agent; none if another command was given.
    pub settings: Vec<Setting>,
}

/// Reads a command line, the variables and the file.
///
/// # Errors
/// [`Refusal`].
pub fn read(command: &Command, words: &[OsString]) -> Result<Layered, Refusal> {
    let first = command
        .clone()
        .try_get_matches_from(words)
        .map_err(|error| in_variable(error, command, words))?;
    let Some((name, below)) = first.subcommand() else {
        return Ok(Layered {
            matches: first,
            settings: Vec::new(),
        });
    };
    let runs_agent = name == AGENT && below.subcommand_name().is_none();
    let used = settings_of(command, name, runs_agent);
    // Whoever says everything depends on no file: least of all a CNI on one that is being edited.
    let open = used
        .iter()
        .any(|arg| below.value_source(arg.get_id().as_str()) == Some(ValueSource::DefaultValue));
    if !runs_agent && !open {
        return Ok(Layered {
            matches: first,
            settings: Vec::new(),
        });
    }
    let refused = |faults| Refusal::Settings {
        faults,
        subcommand: name.to_owned(),
    };
    let path = below.get_one::<PathBuf>(FILE);
    let wanted = path.is_some();
    let path = path.map_or_else(|| PathBuf::from(DEFAULT_FILE), Clone::clone);
    let mut entries = file::read(&path, wanted).map_err(|fault| refused(vec![fault]))?;
    if !runs_agent {
        // What a later release or the agent alone knows is not its business.
        entries.retain(|entry| used.iter().any(|arg| arg.get_long() == Some(&entry.key)));
    }
    let faults: Vec<Fault> = entries
        .iter()
        .filter_map(|entry| {
            let reason = judge(command, &used, entry).err()?;
            Some(Fault::in_file(&path, entry.line, reason))
        })
        .collect();
    if !faults.is_empty() {
        return Err(refused(faults));
    }
    let matches = over(command.clone(), name, &entries).try_get_matches_from(words)?;
    let settings = match matches.subcommand() {
        Some((_, below)) if runs_agent => used
            .iter()
            .map(|arg| setting(arg, below, &path, &entries))
            .collect(),
        _ => Vec::new(),
    };
    Ok(Layered { matches, settings })
}

/// The flags that can stand in a file: those for all commands, and those of this one.
fn settings_of<'a>(command: &'a Command, subcommand: &str, own: bool) -> Vec<&'a Arg> {
    let own_too = own || subcommand != AGENT;
    let below = command.find_subcommand(subcommand).filter(|_| own_too);
    let agent = command.find_subcommand(AGENT);
    command
        .get_arguments()
        .chain(below.into_iter().flat_map(Command::get_arguments))
        .filter(|arg| {
            // A flag of another command is a setting if the agent has it too.
            let known = |command: &Command| command.get_arguments().any(|own| own.get_id() == arg.get_id());
            arg.get_long().is_some_and(|name| !NO_SETTINGS.contains(&name))
                && (arg.is_global_set() || agent.is_some_and(known))
        })
        .collect()
}

/// What is wrong with an entry of the file.
fn judge(command: &Command, known: &[&Arg], entry: &Entry) -> Result<(), String> {
    let key = &entry.key;
    let Some(arg) = known.iter().find(|arg| arg.get_long() == Some(key)) else {
        return Err(unknown(command, key));
    };
    let wanted = kind(arg);
    match &entry.value {
        Some((kind, text)) if *kind == wanted => {
            accept(arg, text).map_err(|reason| format!("{key}: {text:?} does not go: {reason}"))
        }
        _ => Err(format!("{key}: this must be {}", wanted.described())),
    }
}

fn unknown(command: &Command, key: &str) -> String {
    let agent = command.find_subcommand(AGENT).cloned().unwrap_or_default();
    let words = [OsString::from(AGENT), format!("--{key}=").into()];
    let guess = agent.try_get_matches_from(words).err();
    let guess = guess
        .as_ref()
        .and_then(|error| match error.get(ContextKind::SuggestedArg) {
            Some(ContextValue::String(flag)) => Some(flag.trim_start_matches('-')),
            _ => None,
        });
    match guess {
        Some(guess) if !NO_SETTINGS.contains(&guess) => {
            format!("there is no key {key:?}; is {guess:?} meant?")
        }
        _ => format!("there is no key {key:?}: keys are the names of the flags in `holdfast agent --help`"),
    }
}

/// What the flag's own parser says of this value.
fn accept(arg: &Arg, text: &str) -> Result<(), String> {
    let name = arg.get_long().unwrap_or_default();
    let lone = Command::new("judge")
        .no_binary_name(true)
        .arg(arg.clone().env(Resettable::<OsStr>::Reset));
    match lone.try_get_matches_from([format!("--{name}={text}")]) {
        Ok(_) => Ok(()),
        Err(error) => Err(reason(&error)),
    }
}

/// Why clap refuses a value, without the words about flags.
fn reason(error: &clap::Error) -> String {
    if let Some(source) = error.source() {
        return source.to_string();
    }
    match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(values)) if !values.is_empty() => {
            format!("it is one of {}", values.join(", "))
        }
        _ => "it needs a value".to_owned(),
    }
}

fn kind(arg: &Arg) -> Kind {
    let id = arg.get_value_parser().type_id();
    if id == std::any::TypeId::of::<bool>() {
        Kind::Truth
    } else if id == std::any::TypeId::of::<u32>() || id == std::any::TypeId::of::<u64>() {
        Kind::Number
    } else {
        Kind::Text
    }
}

/// The command with the file's values where it would have its own defaults.
fn over(command: Command, subcommand: &str, entries: &[Entry]) -> Command {
    let set = |mut command: Command| {
        for entry in entries {
            let found = command
                .get_arguments()
                .find(|arg| arg.get_long() == Some(&entry.key));
            if let (Some(arg), Some((_, text))) = (found, &entry.value) {
                let id = arg.get_id().clone();
                let text = OsString::from(text);
                command = command.mut_arg(id, |arg| arg.default_value(text));
            }
        }
        command
    };
    set(command).mut_subcommand(subcommand, set)
}

fn setting(arg: &Arg, matches: &ArgMatches, path: &Path, entries: &[Entry]) -> Setting {
    let (key, id) = (arg.get_long().unwrap_or_default(), arg.get_id().as_str());
    let in_file = entries.iter().find(|entry| entry.key == key);
    let origin = match (matches.value_source(id), in_file) {
        (Some(ValueSource::CommandLine), _) => Origin::Flag(key.to_owned()),
        (Some(ValueSource::EnvVariable), _) => Origin::Variable(variable(arg)),
        (_, Some(entry)) => Origin::File(path.to_owned(), entry.line),
        _ => Origin::Default,
    };
    Setting {
        key: key.to_owned(),
        value: written(arg, matches),
        origin,
    }
}

/// The value as it stands in a file.
fn written(arg: &Arg, matches: &ArgMatches) -> Option<String> {
    let id = arg.get_id().as_str();
    let raw = matches.get_raw(id)?.next()?;
    Some(match kind(arg) {
        Kind::Truth => matches.get_flag(id).to_string(),
        Kind::Number => matches
            .try_get_one::<u64>(id)
            .ok()
            .flatten()
            .copied()
            .or_else(|| matches.get_one::<u32>(id).copied().map(u64::from))?
            .to_string(),
        Kind::Text => toml::Value::String(raw.to_string_lossy().into_owned()).to_string(),
    })
}

fn variable(arg: &Arg) -> String {
    arg.get_env().unwrap_or_default().to_string_lossy().into_owned()
}

/// Names the variable if it is one whose value is refused: clap speaks of flags only.
fn in_variable(error: clap::Error, command: &Command, words: &[OsString]) -> Refusal {
    if !matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation) {
        return error.into();
    }
    // Without variables the same words go: then it was one.
    let Ok(matches) = without_variables(command.clone()).try_get_matches_from(words) else {
        return error.into();
    };
    let subcommand = matches.subcommand_name().unwrap_or_default();
    let flag = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) => flag.trim_start_matches('-'),
        _ => return error.into(),
    };
    let flag = flag.split([' ', '=', '[']).next().unwrap_or_default();
    let below = command.find_subcommand(subcommand);
    let arg = command
        .get_arguments()
        .chain(below.into_iter().flat_map(Command::get_arguments))
        .find(|arg| arg.get_long() == Some(flag));
    let Some(arg) = arg else { return error.into() };
    let name = variable(arg);
    let value = std::env::var_os(&name).unwrap_or_default();
    Refusal::Settings {
        faults: vec![Fault {
            reason: format!("{value:?} does not go: {}", reason(&error)),
            place: name,
        }],
        subcommand: subcommand.to_owned(),
    }
}

fn without_variables(command: Command) -> Command {
    command
        .mut_args(|arg| arg.env(Resettable::<OsStr>::Reset))
        .mut_subcommands(without_variables)
}
