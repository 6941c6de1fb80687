//! Lines for whoever debugs, behind the switch in the control map.

use aya_ebpf::bindings::__sk_buff;
use aya_log_ebpf::info;
use holdfast_ebpf::abi::{Verdict, control};

use super::{Decision, maps};

/// Logs what was decided, if the level asks for it. Off, it is the read of one word that is in the cache anyway.
#[inline(always)]
pub(super) fn packet(skb: *mut __sk_buff, decision: &Decision) {
    let level = maps::control(control::DEBUG);
    if level == 0 {
        return;
    }
    let trouble = !matches!(
        decision.verdict,
        Verdict::Pass | Verdict::Delivered | Verdict::Answered
    );
    if level >= 2 || trouble {
        line(skb, decision.verdict as u32, decision.target, decision.policy);
    }
}

/// A function of its own, which the verifier checks once and not at the end of every path.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn line(skb: *mut __sk_buff, verdict: u32, target: u32, policy: u32) -> u32 {
    // SAFETY: the kernel hands a valid context to the program.
    let ifindex = unsafe { (*skb).ifindex };
    info!(
        &skb,
        "ifindex {} verdict {} target {} policy {}", ifindex, verdict, target, policy
    );
    0
}
