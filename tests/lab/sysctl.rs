//! Kernel parameters of the network namespace that the calling thread is in.

use anyhow::Context;

/// A node forwards; it must not drop what comes back another way.
///
/// # Errors
/// When a parameter cannot be written.
pub fn for_node() -> anyhow::Result<()> {
    write("ipv4/ip_forward", "1")?;
    write("ipv6/conf/all/forwarding", "1")?;
    for_workload()
}

/// No reverse path filter: a producer is asked from addresses that its routes know by the default route alone. Sockets
/// that send pings, for root's group. Link-local addresses serve at once: for the seconds of their duplicate address
/// check, nobody could ask for an IPv6 neighbour (`ndisc_solicit`).
///
/// # Errors
/// When a parameter cannot be written.
pub fn for_workload() -> anyhow::Result<()> {
    for which in ["all", "default"] {
        write(&format!("ipv4/conf/{which}/rp_filter"), "0")?;
    }
    write("ipv6/conf/default/accept_dad", "0")?;
    write("ipv4/ping_group_range", "0 0")
}

/// Sets one of the parameters below `net`.
///
/// # Errors
/// When it cannot be written.
pub fn write(name: &str, value: &str) -> anyhow::Result<()> {
    let path = format!("/proc/sys/net/{name}");
    std::fs::write(&path, value).with_context(|| format!("cannot write {path}"))
}
