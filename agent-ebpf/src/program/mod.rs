//! The TC program at the ingress hook of every attachment's host-side interface.
//!
//! The way of a packet: [`decide`] says what is to be done with it and changes nothing but flows; here it is
//! carried out, counted, and logged if somebody listens. A probe ends before that.
//!
//! What is called from many places, or would multiply the paths of who calls it, is a global function: the verifier
//! checks it once, alone, for anything that it may be given.
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
mod rewrite;
mod route;
mod too_big;

use core::mem::MaybeUninit;

use aya_ebpf::bindings::{__sk_buff, TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC};
use holdfast_ebpf::abi::Verdict;
use holdfast_ebpf::parse::Headers;

use rewrite::Rewrite;

/// What is to be done with a packet, and what a probe is told.
#[derive(Clone, Copy)]
struct Decision {
    verdict: Verdict,
    /// Host-side interface of the producer or consumer that gets it; 0 = nobody.
    target: u32,
    /// Where it leaves to a neighbour; 0 = to the peer of `target`.
    device: u32,
    /// MAC of that workload in the low six bytes, as it lies in memory; 0 = not known.
    mac: u64,
    policy: u32,
    /// Generation of the policy's selector.
    generation: u32,
    backend: u32,
    /// The port that is to be written into it.
    rewrite: Rewrite,
}

impl Decision {
    #[inline(always)]
    const fn new(verdict: Verdict) -> Self {
        Self {
            verdict,
            target: 0,
            device: 0,
            mac: 0,
            policy: 0,
            generation: 0,
            backend: 0,
            rewrite: Rewrite::NONE,
        }
    }
}

/// Entry point.
#[unsafe(no_mangle)]
#[unsafe(link_section = "classifier/ingress")]
extern "C" fn classifier(skb: *mut __sk_buff) -> i32 {
    let probe = probe::read(skb);
    let mut space = MaybeUninit::<Headers>::uninit();
    // SAFETY: zero is a valid value of every field.
    let headers = unsafe {
        zero(space.as_mut_ptr());
        space.assume_init_mut()
    };
    let mut decision = decide::decide(skb, headers, probe);
    if probe.is_one() {
        probe::answer(skb, &decision);
        return match decision.verdict {
            Verdict::Pass | Verdict::PassedHeld => TC_ACT_UNSPEC,
            Verdict::Delivered | Verdict::Answered => TC_ACT_REDIRECT as i32,
            _ => TC_ACT_SHOT as i32,
        };
    }
    let action = match decision.verdict {
        // The next program of the chain, then the stack: TCX_NEXT and TC_ACT_UNSPEC are one number.
        Verdict::Pass | Verdict::PassedHeld => TC_ACT_UNSPEC,
        Verdict::Delivered | Verdict::Answered => deliver::deliver(skb, headers, &mut decision),
        _ => TC_ACT_SHOT as i32,
    };
    count(decision.verdict);
    log::packet(skb, &decision);
    action
}

#[inline(always)]
fn count(verdict: Verdict) {
    if let Some(counter) = maps::COUNTERS.get_ptr_mut(verdict as u32) {
        // SAFETY: this CPU's own word, and a program is not interrupted by another run of itself at this hook.
        unsafe { *counter += 1 };
    }
}

/// Fills with zeroes, eight bytes at a time. What the compiler makes of a plain assignment is a call of a `memset` that
/// writes byte by byte.
///
/// # Safety
/// `value` points to space for a `T`, for which zeroes are valid.
#[inline(always)]
unsafe fn zero<T>(value: *mut T) {
    const { assert!(size_of::<T>() % 8 == 0 && align_of::<T>() == 8) };
    let words = value.cast::<u64>();
    let mut index = 0;
    while index < size_of::<T>() / 8 {
        // SAFETY: within the value, aligned.
        unsafe { words.add(index).write_volatile(0) };
        index += 1;
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
