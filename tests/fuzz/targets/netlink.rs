//! Datagrams of a netlink socket: whatever bytes come, they are split into messages within themselves, and an end is
//! found.
#![no_main]

use libfuzzer_sys::fuzz_target;

/// Bytes of the shortest message: a header alone.
const HEADER: usize = 16;

fuzz_target!(|datagram: &[u8]| {
    netlink::check(datagram);
});

#[path = "../../../agent/src/netlink"]
#[allow(dead_code, unreachable_pub, reason = "the agent's files, as they are")]
mod netlink {
    use std::net::IpAddr;

    mod addresses;
    mod parse;

    pub(super) fn check(datagram: &[u8]) {
        let mut messages = 0;
        let mut malformed = false;
        for message in parse::messages(datagram) {
            assert!(!malformed, "something follows what is malformed");
            messages += 1;
            match message {
                Ok(message) => check_content(&message.content),
                Err(parse::Malformed) => malformed = true,
            }
        }
        assert!(
            messages <= datagram.len().div_ceil(super::HEADER),
            "{messages} messages in {} bytes",
            datagram.len()
        );
    }

    fn check_content(content: &parse::Content) {
        match content {
            parse::Content::Present(link) | parse::Content::Orphaned(link) => {
                assert_ne!(link.ifindex, 0);
                assert!(!link.name.is_empty() && !link.name.contains('\0'));
            }
            parse::Content::Unreadable(ifindex) | parse::Content::Gone(ifindex) => assert_ne!(*ifindex, 0),
            parse::Content::Address(own) | parse::Content::AddressGone(own) => {
                let both_v4 = |(_, other): (u8, IpAddr)| own.address.is_ipv4() && other.is_ipv4();
                assert!(own.network.is_none_or(both_v4));
            }
            parse::Content::Done(_)
            | parse::Content::Answer(_)
            | parse::Content::Overrun
            | parse::Content::Other => {}
        }
    }
}
