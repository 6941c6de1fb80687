//! The object that is loaded into the kernel: one TC program, `classifier`, and its maps.
//!
//! For the BPF target only; on the host this is a stub, so that the workspace builds as a whole.
#![cfg_attr(target_arch = "bpf", no_std, no_main, feature(asm_experimental_arch))]

#[cfg(target_arch = "bpf")]
mod program;

/// The BPF object is built by `cargo xtask build-ebpf`; on the host there is nothing to run.
#[cfg(not(target_arch = "bpf"))]
fn main() {}
