//! Objects, as an operator writes them.

use std::fmt::{self, Write as _};
use std::net::IpAddr;

/// The namespace of all objects here.
pub const NAMESPACE: &str = "lab";

/// The node of all attachments here.
pub const NODE: &str = "edge-1";

/// An `Attachment`.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// Name.
    pub name: String,
    /// Host-side interface.
    pub interface: String,
    /// Labels.
    pub labels: Vec<(String, String)>,
    /// Expected incarnation.
    pub identity: Option<String>,
    /// Addresses.
    pub addresses: Vec<IpAddr>,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        head(f, "Attachment", &self.name)?;
        f.write_str("  labels:\n")?;
        for (key, value) in &self.labels {
            writeln!(f, "    {key}: {value:?}")?;
        }
        writeln!(f, "spec:\n  node: {NODE}\n  interface: {:?}", self.interface)?;
        if let Some(identity) = &self.identity {
            writeln!(f, "  identity: {identity:?}")?;
        }
        f.write_str("  addresses:\n")?;
        for address in &self.addresses {
            writeln!(f, "  - {:?}", address.to_string())?;
        }
        Ok(())
    }
}

/// A `RoutePolicy` with direct delivery.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// Name.
    pub name: String,
    /// Label (key, value) of the consumers.
    pub consumers: (String, String),
    /// Label (key, value) of the producers.
    pub producers: (String, String),
    /// Address and port of each service, by TCP and by UDP.
    pub services: Vec<(IpAddr, u16)>,
    /// Prefixes, of all protocols.
    pub prefixes: Vec<String>,
    /// `whileHeld: Pass` instead of `Drop`.
    pub pass_while_held: bool,
    /// How long flows of a leaving producer stay, if not as long as usual: `switchover.drain`.
    pub drain: Option<String>,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        head(f, "RoutePolicy", &self.name)?;
        let mut spec = String::new();
        for (role, (key, value)) in [("consumers", &self.consumers), ("producers", &self.producers)] {
            writeln!(spec, "  {role}: {{matchLabels: {{{key}: {value:?}}}}}")?;
        }
        spec.push_str("  destinations:\n");
        for (address, port) in &self.services {
            for protocol in ["UDP", "TCP"] {
                writeln!(
                    spec,
                    "  - {{address: {:?}, protocol: {protocol}, port: {port}}}",
                    address.to_string()
                )?;
            }
        }
        for prefix in &self.prefixes {
            writeln!(spec, "  - {{address: {prefix:?}}}")?;
        }
        if self.pass_while_held {
            spec.push_str("  whileHeld: Pass\n");
        }
        if let Some(drain) = &self.drain {
            writeln!(spec, "  switchover: {{drain: {drain}}}")?;
        }
        write!(f, "spec:\n{spec}")
    }
}

fn head(f: &mut fmt::Formatter<'_>, kind: &str, name: &str) -> fmt::Result {
    writeln!(f, "apiVersion: holdfast.dev/v1alpha1\nkind: {kind}")?;
    writeln!(f, "metadata:\n  namespace: {NAMESPACE}\n  name: {name}")
}
