//! What somebody changes behind the agent's back.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use holdfast::datapath::raw::{self, Insn};
use holdfast_ebpf::abi::{self, ServiceKey};

use crate::Lab;

/// The key of an interface's entry for a service, by UDP.
#[must_use]
pub fn service(ifindex: u32, address: IpAddr, port: u16) -> ServiceKey {
    let mut bytes = [0; 16];
    let family = match address {
        IpAddr::V4(v4) => {
            bytes[..4].copy_from_slice(&v4.octets());
            abi::FAMILY_V4
        }
        IpAddr::V6(v6) => {
            bytes = v6.octets();
            abi::FAMILY_V6
        }
    };
    ServiceKey {
        ifindex,
        port: port.to_be(),
        protocol: 17,
        family,
        address: bytes,
    }
}

/// The key of c0's entry for its service, by UDP and IPv4.
///
/// # Errors
/// When c0 is not there.
pub fn key_of_c0(lab: &mut Lab) -> anyhow::Result<ServiceKey> {
    let ifindex = lab.node.rtnl.ifindex("hfc0")?;
    let to = lab.services[0].v4();
    Ok(service(ifindex, to.ip(), to.port()))
}

/// Somebody else's program: lets every packet go on, past whoever is behind it.
///
/// # Errors
/// The kernel's refusal.
pub fn foreign() -> anyhow::Result<OwnedFd> {
    let instruction = |code, immediate| Insn {
        code,
        registers: 0,
        offset: 0,
        immediate,
    };
    // r0 = TC_ACT_OK; exit: whoever is behind it is never asked.
    Ok(raw::load_classifier(
        "hfforeign",
        &[instruction(0xb7, 0), instruction(0x95, 0)],
    )?)
}
