//! The TC program at the ingress hook of every attachment's host-side interface.
#![expect(
    unsafe_code,
    reason = "BPF helpers and map values are raw pointers; the verifier checks each access"
)]

mod maps;

use aya_ebpf::bindings::{__sk_buff, TC_ACT_UNSPEC};
use aya_log_ebpf::debug;
use holdfast_ebpf::abi::control;

/// Entry point: passes everything.
#[unsafe(no_mangle)]
#[unsafe(link_section = "classifier/ingress")]
extern "C" fn classifier(skb: *mut __sk_buff) -> i32 {
    if maps::CONTROL.get(control::DEBUG).is_some_and(|level| *level >= 2) {
        // SAFETY: the kernel hands a valid context to the program.
        debug!(&skb, "ifindex {} passed", unsafe { (*skb).ifindex });
    }
    TC_ACT_UNSPEC
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
