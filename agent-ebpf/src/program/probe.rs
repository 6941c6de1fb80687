//! Probes: test runs of the agent that ask what would happen to a packet.

use aya_ebpf::bindings::__sk_buff;
use holdfast_ebpf::abi::{control, probe};

use super::{Decision, maps, once};

/// What a probe asks. All zero for a packet that is not one: no `Option`, for the compiler would carry the undefined
/// rest of a `None` around, which the verifier does not let pass.
#[derive(Clone, Copy)]
pub(super) struct Probe {
    /// 1 if this is a probe at all.
    one: u32,
    /// Slots to use instead of the selector's: first and number; 0 = the selector's.
    pub(super) base: u32,
    pub(super) length: u32,
    flags: u32,
}

impl Probe {
    const NONE: Self = Self {
        one: 0,
        base: 0,
        length: 0,
        flags: 0,
    };

    /// Whether this is a probe at all.
    #[inline(always)]
    pub(super) const fn is_one(&self) -> bool {
        self.one != 0
    }

    /// Whether it asks as if the consumer's row and the entry were open.
    #[inline(always)]
    pub(super) const fn as_if_open(&self) -> bool {
        self.flags & probe::AS_IF_OPEN != 0
    }

    /// Whether it asks of a policy's set alone, without row and route.
    #[inline(always)]
    pub(super) const fn is_of_set(&self) -> bool {
        self.flags & probe::SET_ONLY != 0
    }

    /// The policy of whose set it asks.
    #[inline(always)]
    pub(super) const fn policy(&self) -> u32 {
        self.flags >> 8
    }
}

/// What a probe asks.
///
/// Only the agent knows the nonce. The mark alone could be anybody's, and cb[] of real packets is dirty.
#[inline(always)]
pub(super) fn read(skb: *mut __sk_buff) -> Probe {
    // SAFETY: the kernel hands a valid context to the program.
    unsafe {
        if (*skb).mark != probe::MARK {
            return Probe::NONE;
        }
        let nonce = maps::control(control::NONCE);
        let asked = once(&raw const (*skb).cb);
        if nonce == 0 || nonce as u32 != asked[3] || (nonce >> 32) as u32 != asked[4] {
            return Probe::NONE;
        }
        Probe {
            one: 1,
            base: asked[0],
            length: asked[1],
            flags: asked[2],
        }
    }
}

/// Tells the agent what would have been done.
#[inline(always)]
pub(super) fn answer(skb: *mut __sk_buff, decision: &Decision) {
    let words = [
        decision.verdict as u32,
        decision.target,
        decision.policy,
        decision.generation,
        decision.backend,
    ];
    // SAFETY: the kernel hands a valid context to the program; cb[] is the program's to write, a word at a time: of zeroes
    // the compiler would make the call of a `memset`, which may not have a part of the context.
    unsafe {
        let cb = (&raw mut (*skb).cb).cast::<u32>();
        cb.write_volatile(words[0]);
        cb.add(1).write_volatile(words[1]);
        cb.add(2).write_volatile(words[2]);
        cb.add(3).write_volatile(words[3]);
        cb.add(4).write_volatile(words[4]);
    }
}
