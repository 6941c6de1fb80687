//! The BPF object that is part of this binary.

/// The agent was built without its BPF object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this binary was built without the BPF object: run `cargo xtask build-ebpf` and build again \
     (`cargo xtask setup` installs what that needs)"
)]
pub struct NotBuilt;

/// The object, an ELF file at an address that is a multiple of 8, as its parsers want it.
///
/// # Errors
/// [`NotBuilt`]: so that `cargo check` and `cargo test` work without the BPF toolchain.
pub const fn object() -> Result<&'static [u8], NotBuilt> {
    embedded::OBJECT
}

#[cfg(bpf_object)]
mod embedded {
    use super::NotBuilt;

    #[repr(C, align(8))]
    struct Aligned<const LEN: usize>([u8; LEN]);

    static BYTES: Aligned<{ include_bytes!(concat!(env!("OUT_DIR"), "/classifier")).len() }> =
        Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/classifier")));

    pub(super) const OBJECT: Result<&'static [u8], NotBuilt> = Ok(&BYTES.0);
}

#[cfg(not(bpf_object))]
mod embedded {
    use super::NotBuilt;

    pub(super) const OBJECT: Result<&'static [u8], NotBuilt> = Err(NotBuilt);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_is_an_aligned_elf_file_or_says_how_to_build_it() {
        match object() {
            Ok(bytes) => {
                assert_eq!(bytes.get(..4), Some(b"\x7fELF".as_slice()));
                assert_eq!(bytes.as_ptr() as usize % 8, 0);
            }
            Err(error) => assert!(error.to_string().contains("cargo xtask build-ebpf")),
        }
    }
}
