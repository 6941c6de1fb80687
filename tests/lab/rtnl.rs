//! Makes and changes network devices, addresses, routes and neighbours by rtnetlink.
//!
//! Requests are put together by hand (`linux/rtnetlink.h`, `linux/if_link.h`): the tests must not speak to the kernel
//! through the code that they test, and 5,000 devices are made in a second.

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use anyhow::{Context, bail};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::Space;

pub(crate) const REQUEST: u16 = libc::NLM_F_REQUEST as u16 | libc::NLM_F_ACK as u16;
pub(crate) const CREATE: u16 = REQUEST | libc::NLM_F_CREATE as u16 | libc::NLM_F_EXCL as u16;
const REPLACE: u16 = REQUEST | libc::NLM_F_CREATE as u16 | libc::NLM_F_REPLACE as u16;

/// From `linux/veth.h`, `linux/neighbour.h`, `linux/rtnetlink.h` and `linux/if.h`: libc does not have them.
const VETH_INFO_PEER: u16 = 1;
const NUD_PERMANENT: u16 = 0x80;
const RTNH_F_ONLINK: u32 = 4;
const IF_OPER_UP: u8 = 6;

/// A hardware address.
pub type Mac = [u8; 6];

/// A socket to the kernel's devices in one namespace.
#[derive(Debug)]
pub struct Rtnl {
    socket: OwnedFd,
    sequence: u32,
}

/// One end of a veth.
#[derive(Clone, Copy, Debug, Default)]
pub struct End<'a> {
    /// Name.
    pub name: &'a str,
    /// Number; the kernel's choice if 0.
    pub ifindex: u32,
    /// Address; the kernel's choice if none.
    pub mac: Option<Mac>,
    /// Group of devices.
    pub group: u32,
}

impl<'a> End<'a> {
    /// An end of this name, the rest as the kernel likes it.
    #[must_use]
    pub fn named(name: &'a str) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }
}

/// What the kernel says of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Number.
    pub ifindex: u32,
    /// Hardware address.
    pub mac: Mac,
    /// It can send: the kernel has said so, after administrator and carrier (`IF_OPER_UP`).
    pub operational: bool,
}

impl Rtnl {
    /// Opens a socket in this namespace.
    ///
    /// # Errors
    /// When the namespace cannot be entered or the socket not be opened.
    pub fn open(space: &Space) -> anyhow::Result<Self> {
        let socket = space.inside(|| {
            let socket = rustix::net::socket_with(
                AddressFamily::NETLINK,
                SocketType::RAW,
                SocketFlags::CLOEXEC,
                None,
            )?;
            rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
            Ok(socket)
        })?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Makes a veth, with its other end in another namespace if one is given. Both ends are down.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn veth(
        &mut self,
        end: End<'_>,
        peer: End<'_>,
        peer_net: Option<BorrowedFd<'_>>,
    ) -> anyhow::Result<()> {
        let mut request = Request::new(libc::RTM_NEWLINK, CREATE);
        request.end(end);
        request.nested(libc::IFLA_LINKINFO, |info| {
            info.attribute(libc::IFLA_INFO_KIND, b"veth");
            info.nested(libc::IFLA_INFO_DATA, |data| {
                data.nested(VETH_INFO_PEER, |other| {
                    other.end(peer);
                    if let Some(net) = peer_net {
                        other.attribute(libc::IFLA_NET_NS_FD, &net.as_raw_fd().to_ne_bytes());
                    }
                });
            });
        });
        self.ask(request)
            .with_context(|| format!("cannot make veth {}", end.name))
    }

    /// Makes a device of a kind that needs no more than its name, such as a bridge.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn simple(&mut self, name: &str, kind: &str) -> anyhow::Result<()> {
        let mut request = Request::new(libc::RTM_NEWLINK, CREATE);
        request.end(End::named(name));
        request.nested(libc::IFLA_LINKINFO, |info| {
            info.attribute(libc::IFLA_INFO_KIND, kind.as_bytes());
        });
        self.ask(request)
            .with_context(|| format!("cannot make {kind} {name}"))
    }

    /// Deletes all devices of a group at once: one by one, each would wait for the kernel's readers.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn delete_group(&mut self, group: u32) -> anyhow::Result<()> {
        let mut request = Request::new(libc::RTM_DELLINK, REQUEST);
        request.ifinfo(0, 0, 0);
        request.attribute(libc::IFLA_GROUP, &group.to_ne_bytes());
        self.ask(request)
            .with_context(|| format!("cannot delete group {group}"))
    }

    /// Deletes a device.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn delete(&mut self, name: &str) -> anyhow::Result<()> {
        let mut request = Request::new(libc::RTM_DELLINK, REQUEST);
        request.end(End::named(name));
        self.ask(request).with_context(|| format!("cannot delete {name}"))
    }

    /// Sets a device administratively up.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn up(&mut self, name: &str) -> anyhow::Result<()> {
        let up = libc::IFF_UP as u32;
        self.change(name, up, |_| {})
            .with_context(|| format!("cannot set {name} up"))
    }

    /// Sets a device administratively down.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn down(&mut self, name: &str) -> anyhow::Result<()> {
        self.change(name, 0, |_| {})
            .with_context(|| format!("cannot set {name} down"))
    }

    /// Gives a device another name.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn rename(&mut self, name: &str, to: &str) -> anyhow::Result<()> {
        let ifindex = self.device(name)?.context("no such device")?.ifindex;
        let mut request = Request::new(libc::RTM_NEWLINK, REQUEST);
        request.end(End {
            ifindex,
            ..End::named(to)
        });
        self.ask(request)
            .with_context(|| format!("cannot rename {name} to {to}"))
    }

    /// Gives a device another hardware address.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set_mac(&mut self, name: &str, mac: Mac) -> anyhow::Result<()> {
        self.attribute_of(name, libc::IFLA_ADDRESS, &mac)
            .with_context(|| format!("cannot change the address of {name}"))
    }

    /// Gives a device another alias: a notification that says nothing about what the device does.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set_alias(&mut self, name: &str, alias: &str) -> anyhow::Result<()> {
        self.attribute_of(name, libc::IFLA_IFALIAS, alias.as_bytes())
            .with_context(|| format!("cannot change the alias of {name}"))
    }

    /// Gives a device another maximum transmission unit, in bytes.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set_mtu(&mut self, name: &str, mtu: u32) -> anyhow::Result<()> {
        self.attribute_of(name, libc::IFLA_MTU, &mtu.to_ne_bytes())
            .with_context(|| format!("cannot change the MTU of {name}"))
    }

    /// Makes a device a port of this one, or of none for 0.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set_master(&mut self, name: &str, master: u32) -> anyhow::Result<()> {
        self.attribute_of(name, libc::IFLA_MASTER, &master.to_ne_bytes())
            .with_context(|| format!("cannot change the master of {name}"))
    }

    /// Moves a device to another namespace.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn move_to(&mut self, name: &str, net: BorrowedFd<'_>) -> anyhow::Result<()> {
        self.attribute_of(name, libc::IFLA_NET_NS_FD, &net.as_raw_fd().to_ne_bytes())
            .with_context(|| format!("cannot move {name}"))
    }

    /// Moves a device to another namespace, where it gets this number.
    ///
    /// # Errors
    /// The kernel's refusal: the number may be taken there.
    pub fn move_as(&mut self, name: &str, net: BorrowedFd<'_>, ifindex: u32) -> anyhow::Result<()> {
        let mut request = Request::new(libc::RTM_NEWLINK, REQUEST);
        request.end(End::named(name));
        request.attribute(libc::IFLA_NET_NS_FD, &net.as_raw_fd().to_ne_bytes());
        request.attribute(libc::IFLA_NEW_IFINDEX, &ifindex.to_ne_bytes());
        self.ask(request)
            .with_context(|| format!("cannot move {name} as number {ifindex}"))
    }

    fn attribute_of(&mut self, name: &str, kind: u16, value: &[u8]) -> anyhow::Result<()> {
        let mut request = Request::new(libc::RTM_NEWLINK, REQUEST);
        request.end(End::named(name));
        request.attribute(kind, value);
        self.ask(request)
    }

    fn change(&mut self, name: &str, flags: u32, more: impl FnOnce(&mut Request)) -> anyhow::Result<()> {
        let mut request = Request::new(libc::RTM_NEWLINK, REQUEST);
        request.ifinfo(0, flags, libc::IFF_UP as u32);
        request.name(name);
        more(&mut request);
        self.ask(request)
    }

    /// The device of this name, if there is one.
    ///
    /// # Errors
    /// When the kernel refuses for another reason.
    pub fn device(&mut self, name: &str) -> anyhow::Result<Option<Device>> {
        let mut request = Request::new(libc::RTM_GETLINK, libc::NLM_F_REQUEST as u16);
        request.end(End::named(name));
        self.send(request)?;
        let reply = self.receive()?;
        if reply.kind == libc::NLMSG_ERROR as u16 {
            return match reply.errno() {
                libc::ENODEV => Ok(None),
                errno => Err(std::io::Error::from_raw_os_error(errno))
                    .with_context(|| format!("cannot ask for {name}")),
            };
        }
        let ifindex = reply.payload.get(4..8).and_then(|b| b.try_into().ok());
        let find = |wanted| {
            let mut all = attributes(reply.payload.get(16..).unwrap_or_default());
            all.find_map(|(kind, value)| (kind == wanted).then_some(value))
        };
        let is_tap = find(libc::IFLA_LINKINFO)
            .is_some_and(|info| attributes(info).any(|found| found == (libc::IFLA_INFO_KIND, b"tun\0")));
        let flags = reply.payload.get(8..12).and_then(|b| b.try_into().ok());
        let runs = flags.map_or(0, u32::from_ne_bytes) & libc::IFF_RUNNING as u32 != 0;
        Ok(Some(Device {
            ifindex: u32::from_ne_bytes(ifindex.context("a short answer")?),
            mac: find(libc::IFLA_ADDRESS)
                .and_then(|value| value.try_into().ok())
                .unwrap_or_default(),
            // Nobody says of a tap that it is operational: it is when it runs.
            operational: find(libc::IFLA_OPERSTATE) == Some(&[IF_OPER_UP]) || is_tap && runs,
        }))
    }

    /// The number of a device that must be there.
    ///
    /// # Errors
    /// When it is not.
    pub fn ifindex(&mut self, name: &str) -> anyhow::Result<u32> {
        let device = self.device(name)?;
        Ok(device.with_context(|| format!("{name} is not there"))?.ifindex)
    }

    /// Adds an address; an IPv6 one is usable at once, without a duplicate address check.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn address(&mut self, device: &str, address: IpAddr, prefix: u8) -> anyhow::Result<()> {
        let flags = if address.is_ipv6() {
            libc::IFA_F_NODAD as u8
        } else {
            0
        };
        let request = Request::new(libc::RTM_NEWADDR, CREATE);
        self.own(request, device, address, prefix, flags)
            .with_context(|| format!("cannot add {address}/{prefix} to {device}"))
    }

    /// Adds an IPv6 address that must pass its duplicate address check before it can be used.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn tentative_address(&mut self, device: &str, address: Ipv6Addr, prefix: u8) -> anyhow::Result<()> {
        let request = Request::new(libc::RTM_NEWADDR, CREATE);
        self.own(request, device, address.into(), prefix, 0)
            .with_context(|| format!("cannot add {address}/{prefix} to {device}"))
    }

    /// Takes an address away.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn delete_address(&mut self, device: &str, address: IpAddr, prefix: u8) -> anyhow::Result<()> {
        let request = Request::new(libc::RTM_DELADDR, REQUEST);
        self.own(request, device, address, prefix, 0)
            .with_context(|| format!("cannot take {address}/{prefix} from {device}"))
    }

    fn own(
        &mut self,
        mut request: Request,
        device: &str,
        address: IpAddr,
        prefix: u8,
        flags: u8,
    ) -> anyhow::Result<()> {
        let ifindex = self.ifindex(device)?;
        request.bytes(&[family(address), prefix, flags, libc::RT_SCOPE_UNIVERSE]);
        request.bytes(&ifindex.to_ne_bytes());
        let bytes = octets(address);
        request.attribute(libc::IFA_LOCAL, &bytes);
        request.attribute(libc::IFA_ADDRESS, &bytes);
        self.ask(request)
    }

    /// Adds a route: `prefix` 0 is the default. A gateway is taken as reachable on the device.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn route(&mut self, to: IpAddr, prefix: u8, via: Option<IpAddr>, device: &str) -> anyhow::Result<()> {
        let ifindex = self.ifindex(device)?;
        let mut request = Request::new(libc::RTM_NEWROUTE, REPLACE);
        let scope = if via.is_none() && to.is_ipv4() {
            libc::RT_SCOPE_LINK
        } else {
            libc::RT_SCOPE_UNIVERSE
        };
        request.bytes(&[
            family(to),
            prefix,
            0,
            0,
            libc::RT_TABLE_MAIN,
            libc::RTPROT_STATIC,
            scope,
            libc::RTN_UNICAST,
        ]);
        let flags = if via.is_some() { RTNH_F_ONLINK } else { 0 };
        request.bytes(&flags.to_ne_bytes());
        if prefix > 0 {
            request.attribute(libc::RTA_DST, &octets(to));
        }
        if let Some(via) = via {
            request.attribute(libc::RTA_GATEWAY, &octets(via));
        }
        request.attribute(libc::RTA_OIF, &ifindex.to_ne_bytes());
        self.ask(request)
            .with_context(|| format!("cannot add a route to {to}/{prefix} by {device}"))
    }

    /// Makes every address of a prefix this host's own, without naming each (a route of type `local`).
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn local_prefix(&mut self, prefix: IpAddr, bits: u8) -> anyhow::Result<()> {
        let ifindex = self.ifindex("lo")?;
        let mut request = Request::new(libc::RTM_NEWROUTE, REPLACE);
        request.bytes(&[
            family(prefix),
            bits,
            0,
            0,
            libc::RT_TABLE_LOCAL,
            libc::RTPROT_STATIC,
            libc::RT_SCOPE_HOST,
            libc::RTN_LOCAL,
        ]);
        request.bytes(&0_u32.to_ne_bytes());
        request.attribute(libc::RTA_DST, &octets(prefix));
        request.attribute(libc::RTA_OIF, &ifindex.to_ne_bytes());
        self.ask(request)
            .with_context(|| format!("cannot take {prefix}/{bits}"))
    }

    /// Says for good which hardware address an address has.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn neighbour(&mut self, address: IpAddr, mac: Mac, device: &str) -> anyhow::Result<()> {
        let ifindex = self.ifindex(device)?;
        let mut request = Request::new(libc::RTM_NEWNEIGH, REPLACE);
        request.bytes(&[family(address), 0, 0, 0]);
        request.bytes(&ifindex.to_ne_bytes());
        request.bytes(&NUD_PERMANENT.to_ne_bytes());
        request.bytes(&[0, 0]);
        request.attribute(libc::NDA_DST, &octets(address));
        request.attribute(libc::NDA_LLADDR, &mac);
        self.ask(request)
            .with_context(|| format!("cannot add neighbour {address} on {device}"))
    }

    /// Forgets which hardware address an address has: it must be asked for anew.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn forget_neighbour(&mut self, address: IpAddr, device: &str) -> anyhow::Result<()> {
        let ifindex = self.ifindex(device)?;
        let mut request = Request::new(libc::RTM_DELNEIGH, REQUEST);
        request.bytes(&[family(address), 0, 0, 0]);
        request.bytes(&ifindex.to_ne_bytes());
        request.bytes(&[0; 4]);
        request.attribute(libc::NDA_DST, &octets(address));
        self.ask(request)
            .with_context(|| format!("cannot forget neighbour {address} on {device}"))
    }

    /// Says to another socket, as if it were the kernel, that a device is gone.
    ///
    /// # Errors
    /// When the kernel does not deliver it.
    pub fn forge_end_of(&mut self, ifindex: u32, port: u32) -> anyhow::Result<()> {
        let mut lie = Request::new(libc::RTM_DELLINK, 0);
        lie.ifinfo(ifindex, 0, 0);
        let bytes = lie.finish(0);
        let to = SocketAddrNetlink::new(port, 0);
        rustix::net::sendto(&self.socket, &bytes, SendFlags::empty(), &to).context("cannot send a lie")?;
        Ok(())
    }

    pub(crate) fn ask(&mut self, request: Request) -> anyhow::Result<()> {
        self.send(request)?;
        let reply = self.receive()?;
        if reply.kind != libc::NLMSG_ERROR as u16 {
            bail!("message {} instead of an answer", reply.kind);
        }
        match reply.errno() {
            0 => Ok(()),
            errno => Err(std::io::Error::from_raw_os_error(errno).into()),
        }
    }

    pub(crate) fn send(&mut self, request: Request) -> anyhow::Result<()> {
        self.sequence += 1;
        let bytes = request.finish(self.sequence);
        rustix::net::send(&self.socket, &bytes, SendFlags::empty()).context("cannot send")?;
        Ok(())
    }

    /// What comes of a request for a list: type and payload of each message.
    pub(crate) fn list(&mut self, request: Request) -> anyhow::Result<Vec<(u16, Vec<u8>)>> {
        self.send(request)?;
        let mut messages = Vec::new();
        loop {
            let datagram = self.datagram()?;
            let mut rest = datagram.as_slice();
            while let Some((head, _)) = rest.split_at_checked(16) {
                let word = |at: usize| head.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes);
                let length = word(0).unwrap_or(0) as usize;
                let kind = word(4).unwrap_or(0) as u16;
                let payload = rest.get(16..length).context("a short message")?;
                match i32::from(kind) {
                    libc::NLMSG_DONE => return Ok(messages),
                    libc::NLMSG_ERROR => bail!("the list is refused: {payload:?}"),
                    _ => messages.push((kind, payload.to_vec())),
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }

    fn datagram(&self) -> anyhow::Result<Vec<u8>> {
        let mut buffer = vec![0; 32 << 10];
        let (_, length) =
            rustix::net::recv(&self.socket, &mut buffer, RecvFlags::empty()).context("cannot receive")?;
        buffer.truncate(length);
        Ok(buffer)
    }

    fn receive(&self) -> anyhow::Result<Reply> {
        let mut buffer = self.datagram()?;
        let length = buffer.len();
        let kind = buffer.get(4..6).and_then(|b| b.try_into().ok());
        Ok(Reply {
            kind: u16::from_ne_bytes(kind.context("a short message")?),
            payload: buffer.split_off(16.min(length)),
        })
    }
}

struct Reply {
    kind: u16,
    payload: Vec<u8>,
}

impl Reply {
    /// Of an `NLMSG_ERROR`; 0 is an acknowledgment.
    fn errno(&self) -> i32 {
        let code = self.payload.first_chunk().copied().map(i32::from_ne_bytes);
        code.map_or(libc::EBADMSG, i32::saturating_neg)
    }
}

const fn family(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Types and values in a list of attributes.
pub(crate) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(rest.get(0..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(rest.get(2..4)?.try_into().ok()?) & 0x3fff;
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// A request under construction.
pub(crate) struct Request {
    bytes: Vec<u8>,
}

impl Request {
    pub(crate) fn new(kind: u16, flags: u16) -> Self {
        let mut bytes = vec![0; 16];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        Self { bytes }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// `struct ifinfomsg`.
    fn ifinfo(&mut self, ifindex: u32, flags: u32, change: u32) {
        self.bytes(&[0; 4]);
        self.bytes(&ifindex.to_ne_bytes());
        self.bytes(&flags.to_ne_bytes());
        self.bytes(&change.to_ne_bytes());
    }

    /// `struct ifinfomsg` and what an end says of itself.
    fn end(&mut self, end: End<'_>) {
        self.ifinfo(end.ifindex, 0, 0);
        self.name(end.name);
        if let Some(mac) = end.mac {
            self.attribute(libc::IFLA_ADDRESS, &mac);
        }
        if end.group != 0 {
            self.attribute(libc::IFLA_GROUP, &end.group.to_ne_bytes());
        }
    }

    fn name(&mut self, name: &str) {
        let mut bytes = name.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(libc::IFLA_IFNAME, &bytes);
    }

    pub(crate) fn attribute(&mut self, kind: u16, value: &[u8]) {
        let length = value.len() as u16 + 4;
        self.bytes(&length.to_ne_bytes());
        self.bytes(&kind.to_ne_bytes());
        self.bytes(value);
        self.pad();
    }

    pub(crate) fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.attribute(kind, &[]);
        fill(self);
        let length = (self.bytes.len() - start) as u16;
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        self.bytes[0..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}
