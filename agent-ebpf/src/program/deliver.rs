//! Hands a packet to another workload.

use aya_ebpf::bindings::{__sk_buff, TC_ACT_SHOT, bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1};
use aya_ebpf::helpers::{
    bpf_redirect_neigh, bpf_redirect_peer, bpf_skb_change_type, bpf_skb_load_bytes, bpf_skb_pull_data,
    bpf_skb_store_bytes,
};
use holdfast_ebpf::abi::{Backend, Verdict};
use holdfast_ebpf::parse::{ETHERNET, ETHERTYPE_V4, Headers};

use super::{Decision, maps, once, rewrite, too_big};

/// `PACKET_HOST`: for the receiver itself.
const PACKET_HOST: u32 = 0;
/// Address families as the kernel numbers them.
const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;
/// No backend: the packet is an answer.
const TO_CONSUMER: u32 = u32::MAX;

/// Delivers, or says in the decision why not.
///
/// The hop limit is left as it is on both ways, as between two hosts on one link. Nothing can go round in a circle:
/// what is delivered leaves the node's own namespace, and comes back only if the workload sends it.
#[inline(always)]
pub(super) fn deliver(skb: *mut __sk_buff, headers: &mut Headers, decision: &mut Decision) -> i32 {
    if decision.device != 0 {
        let mtu = too_big::mtu_if_exceeded(skb, decision.device);
        if mtu != 0 {
            decision.verdict = Verdict::DropTooBig;
            return too_big::tell_sender(skb, headers, mtu);
        }
    }
    if decision.rewrite.is_one() && !rewrite::port(skb, decision.rewrite) {
        decision.verdict = Verdict::DropMalformed;
        return TC_ACT_SHOT as i32;
    }
    if decision.device == 0 {
        return to_peer(skb, decision);
    }
    let backend = if decision.verdict as u32 == Verdict::Answered as u32 {
        TO_CONSUMER
    } else {
        decision.backend
    };
    to_neighbour(skb, decision.device, backend)
}

/// To the other end of a veth, which lies in another namespace (else the kernel drops it).
#[inline(always)]
fn to_peer(skb: *mut __sk_buff, decision: &Decision) -> i32 {
    // SAFETY: the kernel hands a valid context to the program; the helpers take it and lengths that fit.
    unsafe {
        // Behind a bridge the frame was for the bridge's MAC, not the veth's: IP would drop it there.
        if (*skb).pkt_type != PACKET_HOST {
            bpf_skb_change_type(skb, PACKET_HOST);
        }
        // A mark of this namespace means something else, or nothing, in the workload's.
        if (*skb).mark != 0 {
            (*skb).mark = 0;
        }
        if decision.mac != 0 {
            let mac = decision.mac.to_ne_bytes();
            bpf_skb_store_bytes(skb, 0, mac.as_ptr().cast(), 6, 0);
        }
        bpf_redirect_peer(decision.target, 0) as i32
    }
}

/// Out of a device, to the neighbour with the backend's address of the packet's family, or with the packet's own
/// destination if it is an answer. The kernel resolves it and waits for it as for any other.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn to_neighbour(skb: *mut __sk_buff, device: u32, backend: u32) -> i32 {
    // SAFETY: the kernel hands a valid context to the program.
    let v4 = unsafe { (*skb).protocol } == u32::from(ETHERTYPE_V4.to_be());
    // Who asks for the neighbour's MAC looks into the IP header, and takes it to be in one piece.
    let headers = ETHERNET + if v4 { 20 } else { 40 };
    let mut nexthop = bpf_redir_neigh {
        nh_family: if v4 { AF_INET } else { AF_INET6 },
        __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 { ipv6_nh: [0; 4] },
    };
    // SAFETY: the kernel hands a valid context to the program; the helpers check the offsets.
    unsafe {
        let linear = (*skb).data_end - (*skb).data;
        if linear < headers && bpf_skb_pull_data(skb, headers) != 0 {
            return TC_ACT_SHOT as i32;
        }
        make_unicast(skb);
        if !find_nexthop(skb, v4, backend, &mut nexthop.__bindgen_anon_1.ipv6_nh) {
            return TC_ACT_SHOT as i32;
        }
        bpf_redirect_neigh(device, &raw mut nexthop, size_of::<bpf_redir_neigh>() as i32, 0) as i32
    }
}

/// The kernel drops what was for a group of MACs. Its own goes into the place anyway.
#[inline(always)]
fn make_unicast(skb: *mut __sk_buff) {
    let mut first = 0u8;
    // SAFETY: the kernel hands a valid context to the program; one byte that is there.
    unsafe {
        if bpf_skb_load_bytes(skb.cast(), 0, (&raw mut first).cast(), 1) == 0 && first & 1 != 0 {
            let none = 0u8;
            bpf_skb_store_bytes(skb, 0, (&raw const none).cast(), 1, 0);
        }
    }
}

/// Writes the nexthop; false if there is none.
#[inline(always)]
fn find_nexthop(skb: *mut __sk_buff, v4: bool, backend: u32, nexthop: &mut [u32; 4]) -> bool {
    if backend == TO_CONSUMER {
        let (at, length) = if v4 { (16, 4) } else { (24, 16) };
        // SAFETY: the kernel hands a valid context to the program; the address has room for both.
        return unsafe {
            bpf_skb_load_bytes(skb.cast(), ETHERNET + at, nexthop.as_mut_ptr().cast(), length) == 0
        };
    }
    let Some(value) = maps::BACKENDS.get_ptr(backend) else {
        return false;
    };
    let value: *const Backend = value;
    // SAFETY: a map value. Both addresses lie at multiples of four.
    unsafe {
        if v4 {
            nexthop[0] = once((&raw const (*value).address_v4).cast::<u32>());
        } else {
            *nexthop = once((&raw const (*value).address_v6).cast::<[u32; 4]>());
        }
    }
    true
}
