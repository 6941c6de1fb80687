//! What the kernel of one namespace has counted.

use std::collections::BTreeMap;

use anyhow::Context;

use crate::Space;

/// Counters of the protocols, by names such as `Tcp.InCsumErrors`, `TcpExt.TCPTimeouts`, `Udp6InCsumErrors`.
#[derive(Clone, Debug, Default)]
pub struct Counters(BTreeMap<String, u64>);

impl Counters {
    /// Reads them in a namespace.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn read(space: &Space) -> anyhow::Result<Self> {
        let [snmp, netstat, snmp6] = space.inside(|| {
            let read = |name: &str| {
                let path = format!("/proc/thread-self/net/{name}");
                std::fs::read_to_string(&path).context(path)
            };
            Ok([read("snmp")?, read("netstat")?, read("snmp6")?])
        })?;
        let mut counters = BTreeMap::new();
        for table in [snmp, netstat] {
            counters.extend(pairs_of_lines(&table));
        }
        counters.extend(snmp6.lines().filter_map(|line| {
            let (name, value) = line.split_once(char::is_whitespace)?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        }));
        Ok(Self(counters))
    }

    /// One of them; 0 if the kernel has none of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// How much has been counted since then.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let grown = |(name, value): (&String, &u64)| {
            let grown = value.saturating_sub(earlier.get(name));
            (grown > 0).then(|| (name.clone(), grown))
        };
        Self(self.0.iter().filter_map(grown).collect())
    }

    /// Those whose name contains this, with their values.
    pub fn named<'a>(&'a self, part: &'a str) -> impl Iterator<Item = (&'a str, u64)> {
        let all = self.0.iter().map(|(name, value)| (name.as_str(), *value));
        all.filter(move |(name, value)| name.contains(part) && *value > 0)
    }
}

/// `snmp` and `netstat` give each table as two lines, of names and of values, that begin with the table's name.
fn pairs_of_lines(text: &str) -> Vec<(String, u64)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for pair in lines.chunks_exact(2) {
        let (Some((table, names)), Some((_, values))) = (pair[0].split_once(':'), pair[1].split_once(':'))
        else {
            continue;
        };
        for (name, value) in names.split_whitespace().zip(values.split_whitespace()) {
            // `Tcp.MaxConn` is -1.
            found.extend(value.parse().ok().map(|value| (format!("{table}.{name}"), value)));
        }
    }
    found
}

/// Packets and bytes that a device has sent. A packet that is segmented later counts as one.
///
/// # Errors
/// When the device is not there.
pub fn sent_by(space: &Space, device: &str) -> anyhow::Result<(u64, u64)> {
    let table = space.inside(|| Ok(std::fs::read_to_string("/proc/thread-self/net/dev")?))?;
    let of_device = table.lines().find_map(|line| {
        let (name, values) = line.split_once(':')?;
        (name.trim() == device).then(|| values.split_whitespace().collect::<Vec<_>>())
    });
    let values = of_device.with_context(|| format!("{device} is not there"))?;
    // Eight columns of what came, then bytes and packets that went.
    let column = |index: usize| values.get(index).and_then(|value| value.parse().ok());
    Option::zip(column(9), column(8)).context("a short line")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_by_their_names() {
        let text = "Tcp: MaxConn InSegs\nTcp: -1 7\nTcpExt: TCPTimeouts\nTcpExt: 3\n";
        assert_eq!(
            pairs_of_lines(text),
            [("Tcp.InSegs".to_owned(), 7), ("TcpExt.TCPTimeouts".to_owned(), 3)]
        );
    }
}
