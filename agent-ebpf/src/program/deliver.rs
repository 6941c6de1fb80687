//! Hands a packet to another workload.

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::helpers::{bpf_redirect_peer, bpf_skb_change_type, bpf_skb_store_bytes};

use super::Decision;

/// `PACKET_HOST`: for the receiver itself.
const PACKET_HOST: u32 = 0;

/// To the other end of a veth, which lies in another namespace (else the kernel drops it).
#[inline(always)]
pub(super) fn to_peer(skb: *mut __sk_buff, decision: &Decision) -> i32 {
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
