//! The TC program at the ingress hook of every attachment's host-side interface.
//!
//! The way of a packet: [`decide`] says what is to be done with it and changes nothing but flows; here it is
//! counted, logged if somebody listens, and carried out. A probe ends before that.
#![expect(
    unsafe_code,
    reason = "BPF helpers and map values are raw pointers; the verifier checks each access"
)]

mod decide;
mod deliver;
mod flow;
mod frame;
mod log;
mod lookup;
mod maps;
mod probe;
mod route;

use aya_ebpf::bindings::{__sk_buff, TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC};
use holdfast_ebpf::abi::Verdict;

/// What is to be done with a packet, and what a probe is told.
#[derive(Clone, Copy)]
struct Decision {
    verdict: Verdict,
    /// Host-side interface of the producer or consumer that gets it; 0 = nobody.
    target: u32,
    /// MAC of that workload in the low six bytes, as it lies in memory; 0 = not known.
    mac: u64,
    policy: u32,
    /// Generation of the policy's selector.
    generation: u32,
    backend: u32,
}

impl Decision {
    #[inline(always)]
    const fn new(verdict: Verdict) -> Self {
        Self {
            verdict,
            target: 0,
            mac: 0,
            policy: 0,
            generation: 0,
            backend: 0,
        }
    }
}

/// Entry point.
#[unsafe(no_mangle)]
#[unsafe(link_section = "classifier/ingress")]
extern "C" fn classifier(skb: *mut __sk_buff) -> i32 {
    let probe = probe::read(skb);
    let decision = decide::decide(skb, probe);
    if probe.is_one() {
        probe::answer(skb, &decision);
        return match decision.verdict {
            Verdict::Pass | Verdict::PassedHeld => TC_ACT_UNSPEC,
            Verdict::Delivered | Verdict::Answered => TC_ACT_REDIRECT as i32,
            _ => TC_ACT_SHOT as i32,
        };
    }
    count(decision.verdict);
    log::packet(skb, &decision);
    match decision.verdict {
        // The next program of the chain, then the stack: TCX_NEXT and TC_ACT_UNSPEC are one number.
        Verdict::Pass | Verdict::PassedHeld => TC_ACT_UNSPEC,
        Verdict::Delivered | Verdict::Answered => deliver::to_peer(skb, &decision),
        _ => TC_ACT_SHOT as i32,
    }
}

#[inline(always)]
fn count(verdict: Verdict) {
    if let Some(counter) = maps::COUNTERS.get_ptr_mut(verdict as u32) {
        // SAFETY: this CPU's own word, and a program is not interrupted by another run of itself at this hook.
        unsafe { *counter += 1 };
    }
}

/// One read of a value that others write: what is tested is what is used.
///
/// # Safety
/// `value` points into a map value or the context.
#[inline(always)]
unsafe fn once<T: Copy>(value: *const T) -> T {
    // SAFETY: valid, as the caller says; aligned, as all map values are.
    unsafe { core::ptr::read_volatile(value) }
}

/// The verifier would refuse a program that can reach this.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The licence that the kernel reads: some helpers (`bpf_check_mtu`) are for GPL programs only.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
