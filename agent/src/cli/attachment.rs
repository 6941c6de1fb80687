//! `holdfast attachment register`, `unregister`, `list`: what a CNI says of a workload.
//!
//! They write the registry themselves, so they work without an agent; with one they return when it has taken the
//! change in.

use std::time::Duration;

use holdfast_engine::model::{Ifindex, Mac, Token};
use holdfast_engine::view::Settled;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Answer;
use super::client::{Client, ClientError, block_on};
use super::output::{self, Format, FormatArgs, or_dash};
use super::wait::duration;
use crate::api::validate;
use crate::config::Directories;
use crate::files::hex;
use crate::registry::{Kind, Listed, Registered, Registration, Registry, RegistryError};
use crate::serve::wire::{Poke, Poked};

pub(super) const EXAMPLES: &str = "\
Examples:
  holdfast attachment register --interface hfweb0 --identity 3f0c6a1e
  holdfast attachment list";

/// Subcommands of `holdfast attachment`.
#[derive(clap::Subcommand, Clone, Debug)]
pub enum Command {
    /// Register the workload that is behind an interface now, as a new incarnation
    Register(RegisterArgs),
    /// Remove what was registered for an incarnation
    Unregister(UnregisterArgs),
    /// List what is registered, beside the devices that are really there
    List(ListArgs),
}

/// Flags of `holdfast attachment register`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Each call makes a new random token: a workload that was recreated is another one, even if interface and identity \
are the same. Returns when the agent has attached its program and written its rows, so that the first packet of the \
workload meets its policies.

Exit codes: 0 registered, and the agent has taken it in; 1 not registered; 2 registered, but the agent is not \
running or did not answer in time (it finds the registration by itself).

Examples:
  holdfast attachment register --interface hfweb0 --identity 3f0c6a1e
  holdfast attachment register --interface hftap1 --kind tap --mac 02:00:00:00:00:07 --no-wait")]
pub struct RegisterArgs {
    /// Host-side interface
    #[arg(long, value_name = "NAME", value_parser = interface)]
    pub interface: String,
    /// The incarnation: a pod UID, an instance id
    #[arg(long, value_name = "ID", value_parser = identity)]
    pub identity: Option<String>,
    /// MAC address of the workload's side
    #[arg(long, value_name = "MAC", value_parser = mac)]
    pub mac: Option<Mac>,
    /// What the interface is
    #[arg(long, value_enum)]
    pub kind: Option<KindArg>,
    /// All host-side interfaces have one MAC address here, so that it does not tell devices apart
    #[arg(long)]
    pub host_mac_shared: bool,
    /// How to treat the agent.
    #[command(flatten)]
    pub waiting: WaitArgs,
    /// Form of the output.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// Flags of `holdfast attachment unregister`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Removes nothing unless the token is still the registered one: a late call of the previous incarnation never \
touches the new one.

Exit codes: 0 it is not registered (any more), 1 another incarnation is registered, 2 could not tell.

Example:
  holdfast attachment unregister --ifindex 12 --token 8f14e45fceea167a")]
pub struct UnregisterArgs {
    /// Number of the interface, as `register` said it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ifindex: Ifindex,
    /// Token of the incarnation, as `register` said it
    #[arg(long, value_name = "HEX", value_parser = token)]
    pub token: Token,
    /// How to treat the agent.
    #[command(flatten)]
    pub waiting: WaitArgs,
    /// Form of the output.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// Flags of `holdfast attachment list`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
DEVICE is `present` if the device that was registered is there now, `gone` if it is not (its number may have gone to \
another one).

Exit codes: 0 here they are, 2 could not tell.

Examples:
  holdfast attachment list
  holdfast attachment list -o json | jq '.[] | select(.interface == null)'")]
pub struct ListArgs {
    /// Form of the output.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// How to treat the agent.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct WaitArgs {
    /// Tell the agent, but do not wait until it has taken it in
    #[arg(long)]
    pub no_wait: bool,
    /// How long to wait for the agent
    #[arg(long, default_value = "30s", value_name = "DURATION", value_parser = duration)]
    pub timeout: Duration,
}

/// What an interface is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KindArg {
    /// One end of a veth pair
    Veth,
    /// The host side of a virtual machine's or process's interface
    Tap,
}

fn interface(text: &str) -> Result<String, String> {
    validate::interface_name(text).map(|()| text.to_owned())
}

fn identity(text: &str) -> Result<String, String> {
    validate::identity(text).map(|()| text.to_owned())
}

fn mac(text: &str) -> Result<Mac, String> {
    let wrong = || "six pairs of hex digits, as in 02:00:00:00:00:07".to_owned();
    let mut bytes = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut bytes {
        let part = parts.next().ok_or_else(wrong)?;
        if part.len() != 2 || !part.bytes().all(|c| c.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        *byte = u8::from_str_radix(part, 16).map_err(|_| wrong())?;
    }
    let mac = Mac(bytes);
    if parts.next().is_some() {
        return Err(wrong());
    }
    if mac.is_unknown() || bytes[0] & 1 == 1 {
        return Err("no address of a single station".to_owned());
    }
    Ok(mac)
}

fn token(text: &str) -> Result<Token, String> {
    (text.len() == 16 && text.bytes().all(|c| c.is_ascii_hexdigit()))
        .then(|| u64::from_str_radix(text, 16).ok())
        .flatten()
        .and_then(Token::new)
        .ok_or_else(|| "16 hex digits that are not all 0".to_owned())
}

fn token_text(token: Token) -> String {
    format!("{:016x}", token.get())
}

/// What the agent did about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Agent {
    /// It has taken the change in.
    Done,
    /// No attachment of this node names the interface.
    NotOurs,
    /// It was told, and not waited for.
    Told,
    /// It is not running.
    Down,
    /// It did not answer, or not in time.
    Unknown,
}

/// JSON of `register`.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct RegisteredJson<'a> {
    /// Host-side interface.
    interface: &'a str,
    /// Its number.
    ifindex: Ifindex,
    /// Its own hardware address.
    host_mac: String,
    /// Names the incarnation: 16 hex digits.
    token: String,
    /// Token that was there before.
    replaced: Option<String>,
    /// What the agent did about it.
    agent: Agent,
}

/// JSON of `unregister`.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct UnregisteredJson {
    /// Number of the interface.
    ifindex: Ifindex,
    /// False if it was gone already.
    removed: bool,
    /// What the agent did about it.
    agent: Agent,
}

/// JSON of one row of `list`.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListedJson {
    /// Number of the interface.
    ifindex: Ifindex,
    /// Name of the device, if the one that was registered is there now.
    interface: Option<String>,
    /// What it is.
    kind: Kind,
    /// Hardware address of the workload's side, if it was said.
    mac: Option<String>,
    /// Its own hardware address when it was registered.
    host_mac: String,
    /// All host-side interfaces have that one.
    host_mac_shared: bool,
    /// Names the incarnation: 16 hex digits.
    token: String,
    /// First 16 bytes of SHA-256 of the identity, in hex.
    incarnation: Option<String>,
}

pub(super) fn run(directories: &Directories, command: Command) -> Answer {
    match command {
        Command::Register(args) => register(directories, args),
        Command::Unregister(args) => unregister(directories, &args),
        Command::List(args) => list(directories, args),
    }
}

fn register(directories: &Directories, args: RegisterArgs) -> Answer {
    let registration = Registration {
        interface: args.interface.clone(),
        identity: args.identity,
        mac: args.mac,
        kind: match args.kind {
            None => Kind::Unknown,
            Some(KindArg::Veth) => Kind::Veth,
            Some(KindArg::Tap) => Kind::Tap,
        },
        host_mac_shared: args.host_mac_shared,
    };
    let registered = Registry::open_or_create(&directories.bpffs_dir, &directories.run_dir)
        .and_then(|registry| registry.register(&registration));
    let registered = match registered {
        Ok(registered) => registered,
        Err(error) => {
            output::complain(&error);
            return Answer::No;
        }
    };
    let agent = tell_agent(
        directories,
        registered.device.ifindex,
        Some(registered.token),
        args.waiting,
    );
    match args.format.output {
        Format::Json => {
            output::json(&RegisteredJson {
                interface: &args.interface,
                ifindex: registered.device.ifindex,
                host_mac: registered.device.mac.to_string(),
                token: token_text(registered.token),
                replaced: registered.replaced.map(token_text),
                agent,
            });
        }
        Format::Table => output::print(&registered_text(&args.interface, &registered, agent)),
    }
    answer(agent, args.waiting)
}

fn registered_text(interface: &str, registered: &Registered, agent: Agent) -> String {
    format!(
        "{interface}: registered, ifindex {}, token {}{}\n",
        registered.device.ifindex,
        token_text(registered.token),
        match agent {
            Agent::Done => "; the agent has taken it in",
            Agent::NotOurs => "; no attachment of this node names it yet",
            _ => "",
        }
    )
}

/// 0 when the agent has taken it in (or was not to be waited for), 2 when nobody can tell.
fn answer(agent: Agent, waiting: WaitArgs) -> Answer {
    match agent {
        Agent::Done | Agent::NotOurs | Agent::Told => Answer::Yes,
        Agent::Down | Agent::Unknown if waiting.no_wait => Answer::Yes,
        Agent::Down | Agent::Unknown => Answer::Unknown,
    }
}

/// Tells the agent; what it cannot be told it finds out by itself, so that is no failure.
fn tell_agent(directories: &Directories, ifindex: Ifindex, token: Option<Token>, waiting: WaitArgs) -> Agent {
    /// Being told takes the agent no time.
    const PATIENCE: Duration = Duration::from_secs(2);
    let poke = Poke {
        ifindex,
        token: token.map(token_text),
        wait: !waiting.no_wait,
    };
    let client = Client::new(&directories.run_dir);
    let patience = if waiting.no_wait {
        PATIENCE
    } else {
        waiting.timeout
    };
    match block_on(client.post("/v1/poke", &poke, patience)) {
        Ok(Poked {
            settled: Settled::Done,
        }) => Agent::Done,
        Ok(Poked {
            settled: Settled::NotOurs,
        }) => Agent::NotOurs,
        Ok(Poked {
            settled: Settled::Working,
        }) => Agent::Told,
        Err(error) => {
            output::complain(&error);
            match error {
                ClientError::NotRunning { .. } => Agent::Down,
                _ => Agent::Unknown,
            }
        }
    }
}

fn unregister(directories: &Directories, args: &UnregisterArgs) -> Answer {
    let removed = Registry::open(&directories.bpffs_dir, &directories.run_dir)
        .and_then(|registry| registry.unregister(args.ifindex, args.token));
    let removed = match removed {
        Ok(removed) => removed,
        // Nothing is registered at all.
        Err(RegistryError::Missing { .. }) => false,
        Err(error) => {
            output::complain(&error);
            return match error {
                RegistryError::OtherIncarnation { .. } => Answer::No,
                _ => Answer::Unknown,
            };
        }
    };
    let agent = tell_agent(directories, args.ifindex, None, args.waiting);
    match args.format.output {
        Format::Json => {
            output::json(&UnregisteredJson {
                ifindex: args.ifindex,
                removed,
                agent,
            });
        }
        Format::Table if removed => output::print(&format!("ifindex {}: unregistered\n", args.ifindex)),
        Format::Table => output::print(&format!("ifindex {}: was not registered\n", args.ifindex)),
    }
    // Whether it is registered can be told without an agent.
    Answer::Yes
}

fn list(directories: &Directories, args: ListArgs) -> Answer {
    let rows =
        Registry::open(&directories.bpffs_dir, &directories.run_dir).and_then(|registry| registry.list());
    let rows = match rows {
        Ok(rows) => rows,
        Err(error @ RegistryError::Missing { .. }) => {
            output::complain(error);
            Vec::new()
        }
        Err(error) => {
            output::complain(error);
            return Answer::Unknown;
        }
    };
    match args.format.output {
        Format::Json => {
            let rows: Vec<ListedJson> = rows.iter().map(ListedJson::from).collect();
            output::json(&rows)
        }
        Format::Table => {
            output::print(&listed_table(&rows));
            Answer::Yes
        }
    }
}

impl From<&Listed> for ListedJson {
    fn from(row: &Listed) -> Self {
        let identity = &row.identity;
        Self {
            ifindex: row.ifindex,
            interface: row.interface.clone(),
            kind: row.kind,
            mac: (!identity.mac.is_unknown()).then(|| identity.mac.to_string()),
            host_mac: identity.host_mac.to_string(),
            host_mac_shared: identity.host_mac_shared,
            token: token_text(identity.token),
            incarnation: identity.incarnation.map(|incarnation| hex(&incarnation.0)),
        }
    }
}

fn listed_table(rows: &[Listed]) -> String {
    let rows = rows
        .iter()
        .map(|row| {
            let row = ListedJson::from(row);
            let device = if row.interface.is_some() {
                "present"
            } else {
                "gone"
            };
            vec![
                row.ifindex.to_string(),
                or_dash(row.interface),
                device.to_owned(),
                row.token,
                or_dash(row.mac),
                row.host_mac,
                or_dash(row.incarnation),
            ]
        })
        .collect();
    output::table(
        &[
            "IFINDEX",
            "INTERFACE",
            "DEVICE",
            "TOKEN",
            "MAC",
            "HOST-MAC",
            "INCARNATION",
        ],
        rows,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_tokens_have_one_spelling() {
        assert_eq!(mac("02:00:00:00:0a:07").unwrap().0, [2, 0, 0, 0, 10, 7]);
        for wrong in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:07:08",
            "2:0:0:0:0:7",
            "+2:00:00:00:00:07",
            "00:00:00:00:00:00",
            "01:00:00:00:00:07",
        ] {
            assert!(mac(wrong).is_err(), "{wrong}");
        }
        assert_eq!(token("00000000000000ff").unwrap().get(), 255);
        assert_eq!(token_text(token("8f14e45fceea167a").unwrap()), "8f14e45fceea167a");
        for wrong in [
            "",
            "ff",
            "0000000000000000",
            "+000000000000000",
            "8f14e45fceea167az",
        ] {
            assert!(token(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn without_an_agent_only_waiting_is_unanswered() {
        let waiting = |no_wait| WaitArgs {
            no_wait,
            timeout: Duration::ZERO,
        };
        assert_eq!(answer(Agent::Done, waiting(false)), Answer::Yes);
        assert_eq!(answer(Agent::Down, waiting(false)), Answer::Unknown);
        assert_eq!(answer(Agent::Unknown, waiting(false)), Answer::Unknown);
        assert_eq!(answer(Agent::Down, waiting(true)), Answer::Yes);
    }
}
