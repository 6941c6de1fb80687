//! Raw bpf(2) calls, and the one mapping of map memory: everything of the agent that is unsafe.
//!
//! aya loads programs; what it does not offer without `CAP_SYS_ADMIN`, or not at all, is here: a link's
//! ifindex, the link ids of a chain, links by ifindex instead of by name (a name is not a device), batches,
//! exact errno values, and the memory of an array. Commands and structures are those of
//! `include/uapi/linux/bpf.h`; the kernel takes every structure at the size that is passed.
#![expect(
    unsafe_code,
    reason = "bpf(2) takes pointers, and mapped memory is shared with the kernel"
)]

use std::ffi::CString;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use holdfast_ebpf::abi::{self, MapLayout};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Commands of bpf(2), `enum bpf_cmd`.
mod cmd {
    pub(super) const MAP_CREATE: libc::c_int = 0;
    pub(super) const MAP_LOOKUP_ELEM: libc::c_int = 1;
    pub(super) const MAP_UPDATE_ELEM: libc::c_int = 2;
    pub(super) const MAP_DELETE_ELEM: libc::c_int = 3;
    pub(super) const MAP_GET_NEXT_KEY: libc::c_int = 4;
    pub(super) const PROG_LOAD: libc::c_int = 5;
    pub(super) const OBJ_PIN: libc::c_int = 6;
    pub(super) const OBJ_GET: libc::c_int = 7;
    pub(super) const PROG_TEST_RUN: libc::c_int = 10;
    pub(super) const OBJ_GET_INFO_BY_FD: libc::c_int = 15;
    pub(super) const PROG_QUERY: libc::c_int = 16;
    pub(super) const BTF_LOAD: libc::c_int = 18;
    pub(super) const MAP_LOOKUP_BATCH: libc::c_int = 24;
    pub(super) const LINK_CREATE: libc::c_int = 28;
    pub(super) const LINK_UPDATE: libc::c_int = 29;
}

/// `BPF_PROG_TYPE_SCHED_CLS`.
const PROG_TYPE_SCHED_CLS: u32 = 3;
/// `BPF_LINK_TYPE_TCX`.
pub const LINK_TYPE_TCX: u32 = 11;
/// `BPF_TCX_INGRESS`.
const TCX_INGRESS: u32 = 46;
/// `BPF_F_BEFORE`; without a relative program: before all.
const BEFORE: u32 = 1 << 3;

/// A value that goes through bpf(2) byte by byte.
///
/// # Safety
/// The type has no padding, no pointers, and every bit pattern of it is valid.
pub unsafe trait Plain: Copy + 'static {}

macro_rules! plain {
    ($($type:ty),+ $(,)?) => {
        $(
            // SAFETY: integers and byte arrays, laid out by `repr(C)` with explicit padding; the map layout
            // asserts sizes and offsets at compile time.
            unsafe impl Plain for $type {}
        )+
    };
}

plain!(
    u32,
    u64,
    abi::RegistryRow,
    abi::ConsumerRow,
    abi::ServiceKey,
    abi::RouteEntry,
    abi::SourceKey,
    abi::PrefixKey,
    abi::PrefixEntry,
    abi::LocalKey,
    abi::PolicySlot,
    abi::Backend,
    abi::FlowKey,
    abi::Flow,
);

/// bpf(2) with the whole of `attr`.
fn bpf<T>(command: libc::c_int, attr: &mut T) -> Result<libc::c_int, Errno> {
    // SAFETY: `attr` is a live, fully initialised structure of the size that is passed; pointers in it were
    // put there by the callers below from buffers that outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 {
        // SAFETY: errno is the calling thread's own.
        return Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() }));
    }
    // bpf(2) returns file descriptors and zero; both fit.
    Ok(result as libc::c_int)
}

/// bpf(2) again when it was interrupted.
fn bpf_retrying<T>(command: libc::c_int, attr: &mut T) -> Result<libc::c_int, Errno> {
    // EAGAIN: the verifier and the test runner give up when a signal is pending.
    const ATTEMPTS: u32 = 16;
    let mut result = bpf(command, attr);
    for _ in 1..ATTEMPTS {
        match result {
            Err(Errno::AGAIN | Errno::INTR) => result = bpf(command, attr),
            _ => break,
        }
    }
    result
}

/// The descriptor that a command returned.
fn owned(fd: libc::c_int) -> OwnedFd {
    // SAFETY: called only with a descriptor that the kernel has just made for us; nobody else owns it. The
    // kernel sets close-on-exec on descriptors of bpf(2).
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn fd(fd: BorrowedFd<'_>) -> u32 {
    // Descriptors are never negative.
    fd.as_raw_fd() as u32
}

fn pointer<T: ?Sized>(value: *const T) -> u64 {
    value.cast::<()>() as u64
}

fn c_path(path: &Path) -> Result<CString, Errno> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)
}

/// Name of a map or program: at most 15 bytes are kept.
fn object_name(name: &str) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (to, from) in bytes.iter_mut().zip(name.bytes().take(15)) {
        *to = from;
    }
    bytes
}

// --- pins --------------------------------------------------------------------------------------------------

#[repr(C)]
#[derive(Default)]
struct ObjAttr {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// Opens the object that is pinned at `path`.
///
/// # Errors
/// As bpf(2): `ENOENT` when nothing is there, `EINVAL` or `EACCES` when it is no pin.
pub fn obj_get(path: &Path) -> Result<OwnedFd, Errno> {
    let path = c_path(path)?;
    let mut attr = ObjAttr {
        pathname: pointer(path.as_ptr()),
        ..ObjAttr::default()
    };
    bpf(cmd::OBJ_GET, &mut attr).map(owned)
}

/// Pins an object. The pin gets mode 0600 (`bpf_obj_do_pin`).
///
/// # Errors
/// As bpf(2): `EEXIST`, `ENOENT` (no directory), `EPERM` (no bpffs).
pub fn obj_pin(object: BorrowedFd<'_>, path: &Path) -> Result<(), Errno> {
    let path = c_path(path)?;
    let mut attr = ObjAttr {
        pathname: pointer(path.as_ptr()),
        bpf_fd: fd(object),
        ..ObjAttr::default()
    };
    bpf(cmd::OBJ_PIN, &mut attr).map(drop)
}

/// What a descriptor of bpf(2) stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A map.
    Map,
    /// A program.
    Program,
    /// A link.
    Link,
    /// Something else.
    Other,
}

/// What `object` is. `OBJ_GET_INFO_BY_FD` does not say: it fills whichever structure fits the object.
///
/// # Errors
/// When /proc cannot be read.
pub fn kind(object: BorrowedFd<'_>) -> Result<Kind, Errno> {
    let target = rustix::fs::readlink(format!("/proc/self/fd/{}", object.as_raw_fd()), Vec::new())?;
    Ok(match target.as_bytes() {
        b"anon_inode:bpf-map" => Kind::Map,
        b"anon_inode:bpf-prog" => Kind::Program,
        b"anon_inode:bpf_link" | b"anon_inode:bpf-link" => Kind::Link,
        _ => Kind::Other,
    })
}

#[repr(C)]
struct InfoAttr {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// Fills `info`; the kernel leaves the tail that it does not know as it is.
fn object_info<T>(object: BorrowedFd<'_>, info: &mut T) -> Result<(), Errno> {
    let mut attr = InfoAttr {
        bpf_fd: fd(object),
        info_len: size_of::<T>() as u32,
        info: pointer(std::ptr::from_mut(info)),
    };
    bpf(cmd::OBJ_GET_INFO_BY_FD, &mut attr).map(drop)
}

// --- maps --------------------------------------------------------------------------------------------------

/// What a map is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapShape {
    /// `BPF_MAP_TYPE_*`.
    pub map_type: u32,
    /// Bytes of a key.
    pub key_size: u32,
    /// Bytes of a value.
    pub value_size: u32,
    /// Number of entries (bytes of a ring buffer).
    pub max_entries: u32,
    /// `BPF_F_*`.
    pub flags: u32,
}

/// A map as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapInfo {
    /// Its id.
    pub id: u32,
    /// Its shape.
    pub shape: MapShape,
}

#[repr(C)]
#[derive(Default)]
struct CreateAttr {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    map_name: [u8; 16],
}

/// Creates a map.
///
/// # Errors
/// As bpf(2).
pub fn map_create(name: &str, shape: MapShape) -> Result<OwnedFd, Errno> {
    let mut attr = CreateAttr {
        map_type: shape.map_type,
        key_size: shape.key_size,
        value_size: shape.value_size,
        max_entries: shape.max_entries,
        map_flags: shape.flags,
        map_name: object_name(name),
        ..CreateAttr::default()
    };
    bpf(cmd::MAP_CREATE, &mut attr).map(owned)
}

#[repr(C)]
#[derive(Default)]
struct MapInfoBuffer {
    map_type: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

/// Describes a map.
///
/// # Errors
/// As bpf(2); `EINVAL` when it is no map.
pub fn map_info(map: BorrowedFd<'_>) -> Result<MapInfo, Errno> {
    if kind(map)? != Kind::Map {
        return Err(Errno::INVAL);
    }
    let mut info = MapInfoBuffer::default();
    object_info(map, &mut info)?;
    Ok(MapInfo {
        id: info.id,
        shape: MapShape {
            map_type: info.map_type,
            key_size: info.key_size,
            value_size: info.value_size,
            max_entries: info.max_entries,
            flags: info.map_flags,
        },
    })
}

#[repr(C)]
#[derive(Default)]
struct ElemAttr {
    map_fd: u32,
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
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// A hash or array whose keys and values are `K` and `V`. Not for per-CPU maps: their values are wider.
#[derive(Debug)]
pub struct Map<K, V> {
    fd: OwnedFd,
    info: MapInfo,
    types: PhantomData<fn() -> (K, V)>,
}

impl<K, V> AsFd for Map<K, V> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl<K: Plain, V: Plain> Map<K, V> {
    /// Takes a map whose sizes are those of `K` and `V`.
    ///
    /// # Errors
    /// `EINVAL` when it is no hash or array of these sizes; else as bpf(2).
    pub fn new(fd: OwnedFd) -> Result<Self, Errno> {
        Self::of_types(fd, &[MapLayout::HASH, MapLayout::ARRAY, MapLayout::LRU_HASH])
    }

    fn of_types(fd: OwnedFd, types: &[u32]) -> Result<Self, Errno> {
        let info = map_info(fd.as_fd())?;
        let sizes_fit = info.shape.key_size as usize == size_of::<K>()
            && info.shape.value_size as usize == size_of::<V>();
        if !sizes_fit || !types.contains(&info.shape.map_type) {
            return Err(Errno::INVAL);
        }
        Ok(Self {
            fd,
            info,
            types: PhantomData,
        })
    }

    /// What the kernel said of it when it was opened (nothing of it ever changes).
    #[must_use]
    pub const fn info(&self) -> MapInfo {
        self.info
    }

    /// The value of a key; none when there is none.
    ///
    /// # Errors
    /// As bpf(2).
    pub fn lookup(&self, key: &K) -> Result<Option<V>, Errno> {
        let mut value = MaybeUninit::<V>::uninit();
        let mut attr = ElemAttr {
            map_fd: fd(self.as_fd()),
            key: pointer(std::ptr::from_ref(key)),
            value: pointer(value.as_mut_ptr()),
            ..ElemAttr::default()
        };
        match bpf(cmd::MAP_LOOKUP_ELEM, &mut attr) {
            // SAFETY: the kernel has filled `value_size` bytes, which is the size of `V`, and any bytes are a `V`.
            Ok(_) => Ok(Some(unsafe { value.assume_init() })),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Writes an element, new or not.
    ///
    /// # Errors
    /// As bpf(2): `E2BIG` when a hash is full or an index is outside of an array.
    pub fn update(&self, key: &K, value: &V) -> Result<(), Errno> {
        let mut attr = ElemAttr {
            map_fd: fd(self.as_fd()),
            key: pointer(std::ptr::from_ref(key)),
            value: pointer(std::ptr::from_ref(value)),
            ..ElemAttr::default()
        };
        bpf(cmd::MAP_UPDATE_ELEM, &mut attr).map(drop)
    }

    /// Deletes an element; says whether it was there.
    ///
    /// # Errors
    /// As bpf(2); `EINVAL` for arrays.
    pub fn delete(&self, key: &K) -> Result<bool, Errno> {
        let mut attr = ElemAttr {
            map_fd: fd(self.as_fd()),
            key: pointer(std::ptr::from_ref(key)),
            ..ElemAttr::default()
        };
        match bpf(cmd::MAP_DELETE_ELEM, &mut attr) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// All elements (all indexes of an array). What others write meanwhile may or may not be among them.
    ///
    /// # Errors
    /// As bpf(2).
    pub fn dump(&self) -> Result<Vec<(K, V)>, Errno> {
        let mut found = Vec::new();
        self.scan(|keys, values| {
            found.extend(keys.iter().copied().zip(values.iter().copied()));
            Ok(())
        })?;
        Ok(found)
    }

    /// Reads every element, some thousands at a time: keys, and the value of each.
    ///
    /// # Errors
    /// As bpf(2), or what `visit` returns.
    pub fn scan(&self, mut visit: impl FnMut(&[K], &[V]) -> Result<(), Errno>) -> Result<(), Errno> {
        /// A hash answers with whole buckets, and `ENOSPC` when one does not fit.
        const FIRST: usize = 4096;
        let mut room = FIRST.min((self.info.shape.max_entries as usize).max(1));
        // A hash keeps a bucket number in it, an array a key: 4 bytes each.
        let mut position = 0u32;
        let mut started = false;
        loop {
            let mut keys = Vec::<K>::with_capacity(room);
            let mut values = Vec::<V>::with_capacity(room);
            let mut next = 0u32;
            let mut attr = BatchAttr {
                in_batch: if started { pointer(&raw const position) } else { 0 },
                out_batch: pointer(&raw mut next),
                keys: pointer(keys.as_mut_ptr()),
                values: pointer(values.as_mut_ptr()),
                count: room as u32,
                map_fd: fd(self.as_fd()),
                ..BatchAttr::default()
            };
            let result = bpf(cmd::MAP_LOOKUP_BATCH, &mut attr);
            let more = match result {
                Ok(_) => true,
                // The end; `count` says how many came with it.
                Err(Errno::NOENT) => false,
                Err(Errno::NOSPC) => {
                    room *= 2;
                    continue;
                }
                Err(errno) => return Err(errno),
            };
            let count = (attr.count as usize).min(room);
            // SAFETY: the kernel has filled the first `count` elements of both buffers, which have room for
            // `room`, with bytes, and any bytes are a `K` and a `V`.
            unsafe {
                keys.set_len(count);
                values.set_len(count);
            }
            visit(&keys, &values)?;
            if !more {
                return Ok(());
            }
            position = next;
            started = true;
        }
    }
}

#[repr(C)]
#[derive(Default)]
struct NextKeyAttr {
    map_fd: u32,
    pad: u32,
    key: u64,
    next_key: u64,
}

/// A longest-prefix-match trie whose keys and values are `K` and `V`. A key begins with the number of its bits that count.
#[derive(Debug)]
pub struct Trie<K, V>(Map<K, V>);

impl<K: Plain, V: Plain> Trie<K, V> {
    /// Takes a trie whose sizes are those of `K` and `V`.
    ///
    /// # Errors
    /// `EINVAL` when it is no trie of these sizes; else as bpf(2).
    pub fn new(fd: OwnedFd) -> Result<Self, Errno> {
        Map::of_types(fd, &[MapLayout::LPM_TRIE]).map(Self)
    }

    /// What the kernel said of it when it was opened (nothing of it ever changes).
    #[must_use]
    pub const fn info(&self) -> MapInfo {
        self.0.info
    }

    /// The value of the longest key that all the bits of which this one shares, itself or a shorter one. Which of them it
    /// is, the kernel does not say: the value must.
    ///
    /// # Errors
    /// As bpf(2).
    pub fn lookup_longest(&self, key: &K) -> Result<Option<V>, Errno> {
        self.0.lookup(key)
    }

    /// Writes an element, new or not.
    ///
    /// # Errors
    /// As bpf(2): `ENOSPC` when it is full. Before Linux 6.13 that is said of an element that is there already, too.
    pub fn update(&self, key: &K, value: &V) -> Result<(), Errno> {
        self.0.update(key, value)
    }

    /// Deletes the element with exactly this key; says whether it was there.
    ///
    /// # Errors
    /// As bpf(2).
    pub fn delete(&self, key: &K) -> Result<bool, Errno> {
        self.0.delete(key)
    }

    /// All elements. Nobody may delete meanwhile: from a key that is gone the kernel begins anew.
    ///
    /// # Errors
    /// As bpf(2).
    pub fn dump(&self) -> Result<Vec<(K, V)>, Errno> {
        let most = self.info().shape.max_entries as usize;
        let mut keys = Vec::new();
        while let Some(key) = self.key_after(keys.last())? {
            keys.push(key);
            if keys.len() >= most {
                break;
            }
        }
        let element = |key: K| Ok(self.lookup_longest(&key)?.map(|value| (key, value)));
        keys.into_iter()
            .filter_map(|key| element(key).transpose())
            .collect()
    }

    /// The key that follows, the first after none.
    fn key_after(&self, key: Option<&K>) -> Result<Option<K>, Errno> {
        let mut next = MaybeUninit::<K>::uninit();
        let mut attr = NextKeyAttr {
            map_fd: fd(self.0.as_fd()),
            key: key.map_or(0, |key| pointer(std::ptr::from_ref(key))),
            next_key: pointer(next.as_mut_ptr()),
            ..NextKeyAttr::default()
        };
        match bpf(cmd::MAP_GET_NEXT_KEY, &mut attr) {
            // SAFETY: the kernel has filled `key_size` bytes, which is the size of `K`, and any bytes are a `K`.
            Ok(_) => Ok(Some(unsafe { next.assume_init() })),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

// --- mapped words ------------------------------------------------------------------------------------------

/// The words of an array of u64 that was made with `BPF_F_MMAPABLE`, in our memory: no system call to read or write.
#[derive(Debug)]
pub struct Words {
    base: NonNull<AtomicU64>,
    len: usize,
    bytes: usize,
}

// SAFETY: it is a pointer to shared memory that lives as long as the value, and is used through atomics only.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Maps `map`.
    ///
    /// # Errors
    /// `EINVAL` when it is no mappable array of u64; else as mmap(2).
    pub fn map(map: &Map<u32, u64>) -> Result<Self, Errno> {
        let shape = map.info().shape;
        if shape.map_type != MapLayout::ARRAY
            || shape.flags & MapLayout::MMAPABLE == 0
            || shape.max_entries == 0
        {
            return Err(Errno::INVAL);
        }
        let len = shape.max_entries as usize;
        // Elements of 8 bytes are packed (array_map_elem_size); the kernel rounds the mapping up to a page.
        let bytes = len * size_of::<u64>();
        // SAFETY: a new mapping at an address that the kernel chooses; nothing else is touched.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_fd().as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            // SAFETY: errno is the calling thread's own.
            return Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() }));
        }
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { base, len, bytes })
    }

    fn word(&self, index: u32) -> Option<&AtomicU64> {
        if index as usize >= self.len {
            return None;
        }
        // SAFETY: within the mapping, which lives as long as `self`, is aligned to a page and holds u64 words.
        Some(unsafe { self.base.add(index as usize).as_ref() })
    }

    /// Reads a word; 0 outside of the array.
    #[must_use]
    pub fn load(&self, index: u32) -> u64 {
        self.word(index).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Writes a word; nothing outside of the array.
    pub fn store(&self, index: u32, value: u64) {
        if let Some(word) = self.word(index) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, of this size, and no reference into it outlives `self`.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.bytes);
        }
    }
}

// --- programs ----------------------------------------------------------------------------------------------

/// A program as the kernel describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgInfo {
    /// Its id.
    pub id: u32,
    /// Hash over its instructions, map numbers left out.
    pub tag: u64,
    /// Ids of the maps that it uses.
    pub maps: Vec<u32>,
    /// Instructions that the verifier walked through.
    pub verified_instructions: u32,
}

#[repr(C)]
#[derive(Default)]
struct ProgInfoBuffer {
    prog_type: u32,
    id: u32,
    tag: [u8; 8],
    jited_prog_len: u32,
    xlated_prog_len: u32,
    jited_prog_insns: u64,
    xlated_prog_insns: u64,
    load_time: u64,
    created_by_uid: u32,
    nr_map_ids: u32,
    map_ids: u64,
    name: [u8; 16],
    ifindex: u32,
    bits: u32,
    netns: [u64; 2],
    counts: [u32; 2],
    ksyms: [u64; 2],
    btf_id: u32,
    func_info_rec_size: u32,
    func_info: u64,
    nr_func_info: u32,
    nr_line_info: u32,
    line_info: u64,
    jited_line_info: u64,
    nr_jited_line_info: u32,
    line_info_rec_size: u32,
    jited_line_info_rec_size: u32,
    nr_prog_tags: u32,
    prog_tags: u64,
    run_time_ns: u64,
    run_cnt: u64,
    recursion_misses: u64,
    verified_insns: u32,
    attach_btf_obj_id: u32,
    attach_btf_id: u32,
    pad: u32,
}

/// Describes a program.
///
/// # Errors
/// As bpf(2); `EINVAL` when it is no program.
pub fn prog_info(program: BorrowedFd<'_>) -> Result<ProgInfo, Errno> {
    if kind(program)? != Kind::Program {
        return Err(Errno::INVAL);
    }
    // The limit of maps that a program can use is 64 (MAX_USED_MAPS).
    let mut maps = vec![0u32; 64];
    let mut info = ProgInfoBuffer {
        nr_map_ids: maps.len() as u32,
        map_ids: pointer(maps.as_mut_ptr()),
        ..ProgInfoBuffer::default()
    };
    object_info(program, &mut info)?;
    maps.truncate(info.nr_map_ids as usize);
    Ok(ProgInfo {
        id: info.id,
        tag: u64::from_be_bytes(info.tag),
        maps,
        verified_instructions: info.verified_insns,
    })
}

/// One instruction, `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Insn {
    /// Operation.
    pub code: u8,
    /// Source register in the upper half, destination in the lower.
    pub registers: u8,
    /// Offset.
    pub offset: i16,
    /// Immediate value.
    pub immediate: i32,
}

#[repr(C)]
#[derive(Default)]
struct LoadAttr {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
}

/// Loads a classifier, to see whether the kernel takes it.
///
/// # Errors
/// As bpf(2).
pub fn load_classifier(name: &str, instructions: &[Insn]) -> Result<OwnedFd, Errno> {
    let mut attr = LoadAttr {
        prog_type: PROG_TYPE_SCHED_CLS,
        insn_cnt: instructions.len() as u32,
        insns: pointer(instructions.as_ptr()),
        license: pointer(c"Dual MIT/GPL".as_ptr()),
        prog_name: object_name(name),
        ..LoadAttr::default()
    };
    bpf_retrying(cmd::PROG_LOAD, &mut attr).map(owned)
}

#[repr(C)]
#[derive(Default)]
struct BtfAttr {
    btf: u64,
    btf_log_buf: u64,
    btf_size: u32,
    btf_log_size: u32,
    btf_log_level: u32,
}

/// Loads type information.
///
/// # Errors
/// As bpf(2).
pub fn load_btf(blob: &[u8]) -> Result<OwnedFd, Errno> {
    let mut attr = BtfAttr {
        btf: pointer(blob.as_ptr()),
        btf_size: blob.len() as u32,
        ..BtfAttr::default()
    };
    bpf(cmd::BTF_LOAD, &mut attr).map(owned)
}

/// `struct __sk_buff` of a test run, as far as a run takes it in; everything else must be zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SkbContext {
    len: u32,
    pkt_type: u32,
    /// `skb->mark`.
    pub mark: u32,
    queue_mapping: u32,
    protocol: u32,
    vlan: [u32; 3],
    priority: u32,
    ingress_ifindex: u32,
    /// The device on which the packet arrives, in the caller's network namespace.
    pub ifindex: u32,
    tc_index: u32,
    /// `skb->cb`.
    pub cb: [u32; 5],
    rest: [u32; 31],
}

impl SkbContext {
    /// A context with this mark, device and `cb`; the rest is zero.
    #[must_use]
    pub fn new(mark: u32, ifindex: u32, cb: [u32; 5]) -> Self {
        Self {
            mark,
            ifindex,
            cb,
            ..Self::default()
        }
    }
}

const _: () = {
    assert!(size_of::<SkbContext>() == 192);
    assert!(std::mem::offset_of!(SkbContext, mark) == 8);
    assert!(std::mem::offset_of!(SkbContext, ifindex) == 40);
    assert!(std::mem::offset_of!(SkbContext, cb) == 48);
    assert!(size_of::<Insn>() == 8);
};

#[repr(C)]
#[derive(Default)]
struct TestAttr {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
}

/// What a test run gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestRun {
    /// What the program returned (`TC_ACT_*`).
    pub returned: u32,
    /// The context as the program left it.
    pub context: SkbContext,
    /// Mean duration of a run, nanoseconds.
    pub nanos: u32,
}

/// Runs a classifier on a packet, `repeat` times.
///
/// # Errors
/// As bpf(2): `ENODEV` when there is no such device in this network namespace.
pub fn test_run(
    program: BorrowedFd<'_>,
    packet: &[u8],
    context: &SkbContext,
    repeat: u32,
) -> Result<TestRun, Errno> {
    let input = *context;
    let mut output = SkbContext::default();
    let mut attr = TestAttr {
        prog_fd: fd(program),
        data_size_in: packet.len() as u32,
        data_in: pointer(packet.as_ptr()),
        repeat,
        ctx_size_in: size_of::<SkbContext>() as u32,
        ctx_size_out: size_of::<SkbContext>() as u32,
        ctx_in: pointer(&raw const input),
        ctx_out: pointer(&raw mut output),
        ..TestAttr::default()
    };
    bpf_retrying(cmd::PROG_TEST_RUN, &mut attr)?;
    Ok(TestRun {
        returned: attr.retval,
        context: output,
        nanos: attr.duration,
    })
}

// --- links -------------------------------------------------------------------------------------------------

/// A link as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkInfo {
    /// `BPF_LINK_TYPE_*`.
    pub link_type: u32,
    /// Its id.
    pub id: u32,
    /// Its program.
    pub prog_id: u32,
    /// Number of its device in the namespace where the device is; 0 when the device is gone (tcx only).
    pub ifindex: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkInfoBuffer {
    link_type: u32,
    id: u32,
    prog_id: u32,
    pad: u32,
    ifindex: u32,
    attach_type: u32,
    rest: [u32; 10],
}

/// Describes a link. The kernel takes RTNL for it (`tcx_link_fill_info`).
///
/// # Errors
/// As bpf(2); `EINVAL` when it is no link.
pub fn link_info(link: BorrowedFd<'_>) -> Result<LinkInfo, Errno> {
    if kind(link)? != Kind::Link {
        return Err(Errno::INVAL);
    }
    let mut info = LinkInfoBuffer::default();
    object_info(link, &mut info)?;
    Ok(LinkInfo {
        link_type: info.link_type,
        id: info.id,
        prog_id: info.prog_id,
        ifindex: info.ifindex,
    })
}

#[repr(C)]
#[derive(Default)]
struct LinkCreateAttr {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
    relative: u32,
    pad: u32,
    expected_revision: u64,
}

/// Attaches a program at the ingress hook of a device (tcx), before all others. The link lives as long as its
/// descriptor or a pin.
///
/// # Errors
/// As bpf(2): `ENODEV`, `EEXIST` (this very program is on the hook already), `EINVAL` (no tcx in this kernel).
pub fn link_create(program: BorrowedFd<'_>, ifindex: u32) -> Result<OwnedFd, Errno> {
    let mut attr = LinkCreateAttr {
        prog_fd: fd(program),
        target_ifindex: ifindex,
        attach_type: TCX_INGRESS,
        flags: BEFORE,
        ..LinkCreateAttr::default()
    };
    bpf(cmd::LINK_CREATE, &mut attr).map(owned)
}

/// Finds out whether this kernel has tcx, by attaching `program` to a device that cannot be: a kernel with tcx looks for
/// the device, one without refuses the hook.
///
/// # Errors
/// As bpf(2): `EINVAL` without tcx.
pub fn try_tcx(program: BorrowedFd<'_>) -> Result<(), Errno> {
    // Too high for any device.
    const NO_DEVICE: u32 = 0x7fff_fff0;
    match link_create(program, NO_DEVICE) {
        Err(Errno::NODEV) => Ok(()),
        Err(errno) => Err(errno),
        // Cannot be; the link goes with its descriptor.
        Ok(_) => Err(Errno::NOTSUP),
    }
}

#[repr(C)]
#[derive(Default)]
struct LinkUpdateAttr {
    link_fd: u32,
    new_prog_fd: u32,
    flags: u32,
    old_prog_fd: u32,
}

/// Replaces the program of a link, in its place, between two packets.
///
/// # Errors
/// As bpf(2): `ENOLINK` when the device is gone.
pub fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut attr = LinkUpdateAttr {
        link_fd: fd(link),
        new_prog_fd: fd(program),
        ..LinkUpdateAttr::default()
    };
    bpf(cmd::LINK_UPDATE, &mut attr).map(drop)
}

/// One program in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainItem {
    /// Program id.
    pub prog_id: u32,
    /// Link id; 0 when it was attached without one.
    pub link_id: u32,
}

/// The programs at the ingress hook (tcx) of a device, in the order in which they run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// Programs.
    pub items: Vec<ChainItem>,
    /// Rises with every change of the chain.
    pub revision: u64,
}

#[repr(C)]
#[derive(Default)]
struct QueryAttr {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    count: u32,
    pad: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// Reads the chain of a device. The kernel takes RTNL for it (`tcx_prog_query`); an empty chain is no error.
///
/// # Errors
/// As bpf(2): `ENODEV`, `EINVAL` (no tcx in this kernel).
pub fn chain(ifindex: u32) -> Result<Chain, Errno> {
    // BPF_MPROG_MAX: no chain is longer.
    const LONGEST: usize = 64;
    let mut programs = [0u32; LONGEST];
    let mut links = [0u32; LONGEST];
    let mut attr = QueryAttr {
        target_ifindex: ifindex,
        attach_type: TCX_INGRESS,
        prog_ids: pointer(programs.as_mut_ptr()),
        count: LONGEST as u32,
        link_ids: pointer(links.as_mut_ptr()),
        ..QueryAttr::default()
    };
    match bpf(cmd::PROG_QUERY, &mut attr) {
        Ok(_) => {}
        // No program was ever attached to this hook.
        Err(Errno::NOENT) => return Ok(Chain::default()),
        Err(errno) => return Err(errno),
    }
    let items = programs
        .iter()
        .zip(links)
        .take(attr.count as usize)
        .map(|(&prog_id, link_id)| ChainItem { prog_id, link_id })
        .collect();
    Ok(Chain {
        items,
        revision: attr.revision,
    })
}

// --- waiting -----------------------------------------------------------------------------------------------

/// A descriptor that can be waited for until there is something to read. Must be called within a tokio runtime.
///
/// # Errors
/// As epoll_ctl(2).
pub fn readable(fd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open, and stays so and the same, until the `AsyncFd` that owns it drops it.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(Into::into)
}
