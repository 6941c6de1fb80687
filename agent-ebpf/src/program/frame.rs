//! The packet as the parser reads it.

use core::arch::asm;
use core::mem::MaybeUninit;

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::helpers::bpf_skb_load_bytes;
use holdfast_ebpf::parse::Bytes;

/// The largest window that is asked for.
const WINDOW: usize = 40;

/// A packet, of which perhaps only the beginning lies in one piece: a tap guest decides how much.
pub(super) struct Frame {
    skb: *mut __sk_buff,
    /// For what does not lie in one piece.
    copy: MaybeUninit<[u8; WINDOW]>,
}

impl Frame {
    #[inline(always)]
    pub(super) const fn new(skb: *mut __sk_buff) -> Self {
        Self {
            skb,
            copy: MaybeUninit::uninit(),
        }
    }
}

impl Bytes for Frame {
    #[inline(always)]
    fn size(&self) -> u32 {
        // SAFETY: the kernel hands a valid context to the program.
        unsafe { (*self.skb).len }
    }

    #[inline(always)]
    fn window<const N: usize>(&mut self, at: u32) -> Option<&[u8; N]> {
        const { assert!(N <= WINDOW) };
        // SAFETY: the kernel hands a valid context to the program.
        let (data, end) = unsafe { ((*self.skb).data as usize, (*self.skb).data_end as usize) };
        let start = opaque(data + at as usize);
        if start + N <= end {
            // SAFETY: within the linear part, as just tested; the verifier sees the same.
            return Some(unsafe { &*(start as *const [u8; N]) });
        }
        let copy = self.copy.as_mut_ptr().cast::<[u8; N]>();
        // SAFETY: the copy has at least N bytes. The helper reads what is not linear and fails beyond the end.
        // Unlike bpf_skb_pull_data it changes nothing: that would copy the header of every cloned packet.
        unsafe {
            if bpf_skb_load_bytes(self.skb.cast(), at, copy.cast(), N as u32) != 0 {
                return None;
            }
            Some(&*copy)
        }
    }
}

/// The same value, of which the compiler knows nothing: it must not test one sum and read through another, for the
/// verifier only knows the one that was tested.
#[inline(always)]
fn opaque(mut value: usize) -> usize {
    // SAFETY: adds nothing. (Without any instruction the kernel would refuse the line information: two lines at one
    // place.)
    unsafe { asm!("{0} += 0", inout(reg) value, options(pure, nomem, nostack, preserves_flags)) };
    value
}
