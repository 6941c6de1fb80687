//! Maps of the comparison programs and of the wrapper, with keys and values as bytes.
#![expect(unsafe_code, reason = "bpf(2) takes pointers")]

use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use anyhow::{Context, bail, ensure};
use holdfast::datapath::raw::{MapShape, map_create};

/// Commands of bpf(2), `enum bpf_cmd`.
const MAP_UPDATE_ELEM: libc::c_int = 2;
const MAP_UPDATE_BATCH: libc::c_int = 26;

/// Kinds of maps, `enum bpf_map_type`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Hash = 1,
    Array = 2,
    Programs = 3,
    Trie = 11,
}

/// A map.
pub(crate) struct Table {
    fd: OwnedFd,
    key: usize,
    value: usize,
}

#[repr(C)]
#[derive(Default)]
struct ElementAttr {
    map: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

impl Table {
    /// A map for so many elements of these sizes.
    pub(crate) fn new(kind: Kind, key: usize, value: usize, entries: usize) -> anyhow::Result<Self> {
        /// `BPF_F_NO_PREALLOC`: the kernel makes no trie without it.
        const NO_PREALLOC: u32 = 1;
        let shape = MapShape {
            map_type: kind as u32,
            key_size: key as u32,
            value_size: value as u32,
            max_entries: entries as u32,
            flags: if matches!(kind, Kind::Trie) {
                NO_PREALLOC
            } else {
                0
            },
        };
        let fd = map_create("hf_bench", shape).with_context(|| format!("cannot make a map: {shape:?}"))?;
        Ok(Self { fd, key, value })
    }

    /// An array of one program.
    pub(crate) fn of_program(program: BorrowedFd<'_>) -> anyhow::Result<Self> {
        let table = Self::new(Kind::Programs, 4, 4, 1)?;
        table.put(&0_u32.to_ne_bytes(), &program.as_raw_fd().to_ne_bytes())?;
        Ok(table)
    }

    /// Writes one element.
    pub(crate) fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
        ensure!(
            key.len() == self.key && value.len() == self.value,
            "an element of another size"
        );
        let mut attr = ElementAttr {
            map: self.fd.as_raw_fd() as u32,
            key: key.as_ptr() as u64,
            value: value.as_ptr() as u64,
            ..ElementAttr::default()
        };
        bpf(MAP_UPDATE_ELEM, &mut attr).context("cannot write an element")
    }

    /// Writes many elements, whose keys and values lie one behind the other.
    pub(crate) fn put_all(&self, keys: &[u8], values: &[u8]) -> anyhow::Result<()> {
        /// A trie takes its memory from a small store that is refilled behind it: one that is empty is no error.
        const ATTEMPTS: u32 = 100_000;
        let count = keys.len() / self.key;
        ensure!(
            keys.len() == count * self.key && values.len() == count * self.value,
            "elements of another size"
        );
        let mut done = 0;
        for _ in 0..ATTEMPTS {
            let mut attr = BatchAttr {
                keys: keys[done * self.key..].as_ptr() as u64,
                values: values[done * self.value..].as_ptr() as u64,
                count: (count - done) as u32,
                map: self.fd.as_raw_fd() as u32,
                ..BatchAttr::default()
            };
            match bpf(MAP_UPDATE_BATCH, &mut attr) {
                Err(error) if error.kind() == ErrorKind::OutOfMemory => done += attr.count as usize,
                other => return other.context("cannot write elements"),
            }
        }
        bail!("the kernel takes {done} of {count} elements");
    }
}

impl AsFd for Table {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn bpf<T>(command: libc::c_int, attr: &mut T) -> std::io::Result<()> {
    // SAFETY: `attr` is a live, initialised structure of the size that is passed, and the buffers that it points to
    // have the sizes that it says: the callers have checked them.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}
