//! Keeping a journal. The driver encodes, a thread of its own writes: the driver never waits for a disk.

use std::borrow::Cow;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use holdfast_engine::Engine;
use holdfast_engine::journal::{At, Made, Record};
use holdfast_engine::model::{Event, Now};

use super::{EXTENSION, JournalError, checksum, header, read};

/// So many batches may wait for the disk.
const QUEUE: usize = 64;
/// A segment is closed when it has this share of the whole.
const SEGMENTS: u64 = 4;

/// Where a journal goes, and how large it may become.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Its directory.
    pub directory: PathBuf,
    /// Bytes of all segments together.
    pub limit: u64,
}

/// Encodes records, each with its distance in time from the one before.
#[derive(Debug)]
pub struct Encoder {
    bytes: Vec<u8>,
    records: u64,
    last: Now,
    limit: usize,
}

/// A batch was larger than it may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge;

/// A buffer that does not grow beyond its limit.
struct Bounded<'a>(&'a mut Vec<u8>, usize);

impl Write for Bounded<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > self.1 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Encoder {
    /// An encoder whose batches have at most so many bytes.
    #[must_use]
    pub const fn new(limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            records: 0,
            last: Now {
                boot: holdfast_engine::model::Boot(0),
                wall_ms: 0,
            },
            limit,
        }
    }

    fn put(&mut self, record: &Record<'_>) -> Result<(), TooLarge> {
        self.records += 1;
        postcard::to_io(record, Bounded(&mut self.bytes, self.limit))
            .map(drop)
            .map_err(|_| TooLarge)
    }

    fn at(&mut self, now: Now) -> At {
        At::from(std::mem::replace(&mut self.last, now), now)
    }

    /// An engine was made.
    ///
    /// # Errors
    /// [`TooLarge`], as of every record.
    pub fn made(&mut self, engine: &Engine, now: Now) -> Result<(), TooLarge> {
        self.last = now;
        self.put(&Record::Made(now, Made::of(engine.config())))
    }

    /// All that an engine knows.
    ///
    /// # Errors
    /// [`TooLarge`].
    pub fn state(&mut self, engine: &Engine, now: Now) -> Result<(), TooLarge> {
        self.last = now;
        let made = Made::of(engine.config());
        self.put(&Record::State(now, made, Box::new(Cow::Borrowed(engine))))
    }

    /// An event is handled.
    ///
    /// # Errors
    /// [`TooLarge`].
    pub fn handled(&mut self, event: &Event, now: Now) -> Result<(), TooLarge> {
        let at = self.at(now);
        self.put(&Record::Handled(at, Cow::Borrowed(event)))
    }

    /// The engine is polled.
    ///
    /// # Errors
    /// [`TooLarge`].
    pub fn polled(&mut self, now: Now) -> Result<(), TooLarge> {
        let at = self.at(now);
        self.put(&Record::Polled(at))
    }

    /// So many records were not kept.
    ///
    /// # Errors
    /// [`TooLarge`].
    pub fn lost(&mut self, records: u64) -> Result<(), TooLarge> {
        self.put(&Record::Lost(records))
    }

    /// What was encoded since the last call: its bytes and its number of records.
    pub fn take(&mut self) -> (Vec<u8>, u64) {
        (std::mem::take(&mut self.bytes), std::mem::take(&mut self.records))
    }
}

/// A batch on its way to the disk.
pub(super) struct Batch {
    bytes: Vec<u8>,
    /// Nothing of before is needed: a segment may begin with it.
    begins: bool,
}

#[cfg(test)]
impl Batch {
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// The driver's end of a journal.
#[derive(Debug)]
pub struct Journal {
    encoder: Encoder,
    sender: SyncSender<Batch>,
    /// Batches that are not written yet.
    queued: Arc<AtomicUsize>,
    /// The writer would like to begin a segment.
    wanted: Arc<AtomicBool>,
    /// The batch that is being encoded begins a life.
    begins: bool,
    /// Records that could not be kept since the last one that could.
    lost: u64,
    /// What the engine is given does not fit, or the disk takes no more.
    over: bool,
}

/// Opens a journal for a life that begins with this engine.
///
/// # Errors
/// [`JournalError`]: the directory cannot be made or read; a thread cannot be started.
pub fn start(options: Options, engine: &Engine, now: Now) -> Result<(Journal, JoinHandle<()>), JournalError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&options.directory)
        .map_err(JournalError::io("create", &options.directory))?;
    let segments = read::segments(&options.directory)?;
    let next = segments.last().map_or(1, |(number, _)| number + 1);
    let wanted = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = sync_channel(QUEUE);
    let largest = usize::try_from(options.limit / 2).unwrap_or(usize::MAX);
    let directory = options.directory.clone();
    let mut journal = Journal::to(sender, largest, Arc::clone(&wanted));
    let writer = Writer {
        options,
        next,
        segment: None,
        queued: Arc::clone(&journal.queued),
        wanted,
    };
    let thread = std::thread::Builder::new()
        .name("journal".to_owned())
        .spawn(move || writer.run(&receiver))
        .map_err(JournalError::io("start a thread for", &directory))?;
    journal.begin(engine, now);
    Ok((journal, thread))
}

impl Journal {
    /// A journal whose batches, of at most so many bytes, go there.
    pub(super) fn to(sender: SyncSender<Batch>, largest: usize, wanted: Arc<AtomicBool>) -> Self {
        Self {
            encoder: Encoder::new(largest),
            sender,
            queued: Arc::default(),
            wanted,
            begins: true,
            lost: 0,
            over: false,
        }
    }

    pub(super) fn begin(&mut self, engine: &Engine, now: Now) {
        self.with(|encoder| encoder.made(engine, now));
    }

    fn with(&mut self, encode: impl FnOnce(&mut Encoder) -> Result<(), TooLarge>) {
        if self.over {
            return;
        }
        if self.lost > 0 {
            // Without what was lost it means nothing.
            self.lost += 1;
            return;
        }
        if encode(&mut self.encoder) == Err(TooLarge) {
            self.give_up(
                "what goes into the engine at once does not fit: --journal-bytes is too small for this node",
            );
        }
    }

    /// Batches that are not written yet.
    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }

    fn give_up(&mut self, why: &str) {
        self.over = true;
        self.encoder = Encoder::new(0);
        tracing::warn!("the journal ends: {why}");
    }

    /// An event is about to be handled.
    pub fn handled(&mut self, event: &Event, now: Now) {
        self.with(|encoder| encoder.handled(event, now));
    }

    /// The engine is about to be polled.
    pub fn polled(&mut self, now: Now) {
        self.with(|encoder| encoder.polled(now));
    }

    /// Hands over what was recorded; called when the engine has been polled, at the moment of the poll.
    pub fn flush(&mut self, engine: &Engine, now: Now) {
        if self.over {
            return;
        }
        let (bytes, records) = self.encoder.take();
        let begins = std::mem::take(&mut self.begins);
        if !bytes.is_empty() && !self.send(Batch { bytes, begins }) {
            self.lost += records;
            self.begins = begins;
        }
        if self.lost > 0 {
            self.resume(engine, now);
        } else if self.wanted.swap(false, Ordering::Relaxed) {
            self.write_state(engine, now);
        }
    }

    /// Says what is missing, and goes on from the present state, once there is room again.
    fn resume(&mut self, engine: &Engine, now: Now) {
        let lost = self.lost;
        if self.encoder.lost(lost).is_err() {
            return;
        }
        let (bytes, _) = self.encoder.take();
        if self.send(Batch { bytes, begins: false }) {
            self.lost = 0;
            self.write_state(engine, now);
        }
    }

    fn write_state(&mut self, engine: &Engine, now: Now) {
        self.with(|encoder| encoder.state(engine, now));
        let (bytes, records) = self.encoder.take();
        if !bytes.is_empty() && !self.send(Batch { bytes, begins: true }) {
            self.lost += records;
        }
    }

    /// Says whether it is on its way.
    fn send(&mut self, batch: Batch) -> bool {
        self.queued.fetch_add(1, Ordering::Relaxed);
        match self.sender.try_send(batch) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                self.queued.fetch_sub(1, Ordering::Relaxed);
                false
            }
            Err(TrySendError::Disconnected(_)) => {
                // The writer has said why.
                self.over = true;
                self.encoder = Encoder::new(0);
                true
            }
        }
    }
}

/// The disk's end.
struct Writer {
    options: Options,
    next: u64,
    segment: Option<Segment>,
    queued: Arc<AtomicUsize>,
    wanted: Arc<AtomicBool>,
}

struct Segment {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// Size of what it began with.
    first: u64,
    /// The next one has been asked for.
    asked: bool,
}

impl Writer {
    fn run(mut self, batches: &Receiver<Batch>) {
        while let Ok(batch) = batches.recv() {
            if let Err(error) = self.write(&batch) {
                tracing::warn!(%error, "the journal ends");
                return;
            }
            self.queued.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn write(&mut self, batch: &Batch) -> Result<(), JournalError> {
        if batch.begins || self.segment.is_none() {
            self.segment = Some(self.begin()?);
        }
        let share = self.options.limit / SEGMENTS;
        let Some(segment) = &mut self.segment else {
            return Ok(());
        };
        segment.append(&batch.bytes)?;
        if batch.begins {
            segment.first = segment.bytes;
        }
        // A state that is large is paid back by as many records before the next one.
        if !segment.asked && segment.bytes > share.max(2 * segment.first) {
            segment.asked = true;
            self.wanted.store(true, Ordering::Relaxed);
        }
        self.trim()
    }

    fn begin(&mut self) -> Result<Segment, JournalError> {
        let path = self
            .options
            .directory
            .join(format!("{:08}.{EXTENSION}", self.next));
        self.next += 1;
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path)
            .map_err(JournalError::io("create", &path))?;
        let header = header();
        file.write_all(header.as_bytes())
            .map_err(JournalError::io("write", &path))?;
        Ok(Segment {
            path,
            file,
            bytes: header.len() as u64,
            first: 0,
            asked: false,
        })
    }

    /// Deletes the oldest segments until the rest is small enough. The one that is being written stays.
    fn trim(&self) -> Result<(), JournalError> {
        let present = self.segment.as_ref().map(|segment| segment.path.as_path());
        let mut segments = Vec::new();
        for (_, path) in read::segments(&self.options.directory)? {
            let size = fs::metadata(&path)
                .map_err(JournalError::io("stat", &path))?
                .len();
            segments.push((path, size));
        }
        let mut total: u64 = segments.iter().map(|(_, size)| size).sum();
        for (path, size) in segments {
            if total <= self.options.limit || Some(path.as_path()) == present {
                break;
            }
            fs::remove_file(&path).map_err(JournalError::io("remove", &path))?;
            total -= size;
        }
        Ok(())
    }
}

impl Segment {
    fn append(&mut self, payload: &[u8]) -> Result<(), JournalError> {
        let frame = frame(payload);
        self.file
            .write_all(&frame)
            .map_err(JournalError::io("write", &self.path))?;
        self.bytes += frame.len() as u64;
        Ok(())
    }
}

/// A batch as it is on the disk.
fn frame(payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let mut frame = Vec::with_capacity(payload.len() + 8);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(&checksum(payload).to_le_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// Writes batches as one segment: what tests keep.
///
/// # Errors
/// What the system says.
pub fn write_segment(path: &Path, batches: impl IntoIterator<Item = Vec<u8>>) -> io::Result<()> {
    let mut content = header().into_bytes();
    for batch in batches {
        content.extend_from_slice(&frame(&batch));
    }
    fs::write(path, content)
}
