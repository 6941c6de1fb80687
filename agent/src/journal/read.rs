//! Reading a journal, and asking an engine again.

use std::fs;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use holdfast_engine::Engine;
use holdfast_engine::journal::{Played, Record, Replay};
use holdfast_engine::model::Hashes;

use super::{EXTENSION, JournalError, LARGEST_FRAME, MAGIC, checksum, text};

/// What is next in a journal.
#[derive(Debug)]
pub enum Piece {
    /// A record.
    Record(Record<'static>),
    /// A segment begins.
    Segment(PathBuf),
    /// The segment ends in the middle of a frame, or with one whose checksum is wrong: so many bytes are left out.
    Torn(u64),
}

/// What a replay found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Lives that begin in it.
    pub lives: u64,
    /// Events.
    pub events: u64,
    /// Polls.
    pub polls: u64,
    /// Effects.
    pub decisions: u64,
    /// States that were written down, other than the one that the records before lead to.
    pub differing: u64,
    /// Records that are missing or mean nothing.
    pub missing: u64,
    /// Segments that end in a torn frame.
    pub torn: u64,
}

/// Segments of a directory, oldest first, with their numbers.
pub(super) fn segments(directory: &Path) -> Result<Vec<(u64, PathBuf)>, JournalError> {
    let mut segments = Vec::new();
    let entries = fs::read_dir(directory).map_err(JournalError::io("list", directory))?;
    for entry in entries {
        let path = entry.map_err(JournalError::io("list", directory))?.path();
        let number = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .and_then(|stem| stem.parse().ok());
        if let Some(number) = number
            && path.extension().is_some_and(|extension| extension == EXTENSION)
        {
            segments.push((number, path));
        }
    }
    segments.sort();
    Ok(segments)
}

/// Reads segments one after the other.
pub struct Reader {
    left: std::vec::IntoIter<PathBuf>,
    segment: Option<Segment>,
    /// The rest of the present frame, and where that began.
    frame: Vec<u8>,
    at: usize,
}

struct Segment {
    path: PathBuf,
    file: BufReader<fs::File>,
    /// Bytes that were read.
    position: u64,
    size: u64,
}

impl Reader {
    /// A journal: one segment, or a directory of them.
    ///
    /// # Errors
    /// [`JournalError`]: there is none.
    pub fn open(path: &Path) -> Result<Self, JournalError> {
        let paths = if path.is_dir() {
            segments(path)?.into_iter().map(|(_, path)| path).collect()
        } else {
            vec![path.to_owned()]
        };
        if paths.is_empty() {
            return Err(JournalError::Nothing {
                path: path.to_owned(),
            });
        }
        Ok(Self {
            left: paths.into_iter(),
            segment: None,
            frame: Vec::new(),
            at: 0,
        })
    }

    /// The next piece; none at the end.
    ///
    /// # Errors
    /// [`JournalError`]: a file cannot be read, or is no journal of this release.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, JournalError> {
        loop {
            if self.at < self.frame.len() {
                return self.record().map(Some);
            }
            let Some(segment) = &mut self.segment else {
                let Some(path) = self.left.next() else {
                    return Ok(None);
                };
                self.segment = Some(Segment::open(&path)?);
                return Ok(Some(Piece::Segment(path)));
            };
            self.at = 0;
            match segment.frame()? {
                Frame::Whole(frame) => self.frame = frame,
                Frame::End => {
                    self.frame = Vec::new();
                    self.segment = None;
                }
                Frame::Torn(bytes) => {
                    self.frame = Vec::new();
                    self.segment = None;
                    return Ok(Some(Piece::Torn(bytes)));
                }
            }
        }
    }

    fn record(&mut self) -> Result<Piece, JournalError> {
        let rest = self.frame.get(self.at..).unwrap_or_default();
        match postcard::take_from_bytes::<Record<'static>>(rest) {
            Ok((record, left)) => {
                self.at = self.frame.len() - left.len();
                Ok(Piece::Record(record))
            }
            Err(error) => {
                let segment = self.segment.as_ref();
                Err(JournalError::Senseless {
                    path: segment.map(|segment| segment.path.clone()).unwrap_or_default(),
                    at: segment.map_or(0, |segment| segment.position - self.frame.len() as u64 - 8),
                    what: error.to_string(),
                })
            }
        }
    }
}

enum Frame {
    Whole(Vec<u8>),
    End,
    Torn(u64),
}

impl Segment {
    fn open(path: &Path) -> Result<Self, JournalError> {
        let file = fs::File::open(path).map_err(JournalError::io("open", path))?;
        let size = file.metadata().map_err(JournalError::io("stat", path))?.len();
        let mut segment = Self {
            path: path.to_owned(),
            file: BufReader::new(file),
            position: 0,
            size,
        };
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') && line.len() < 128 {
            let mut byte = [0];
            if segment.read(&mut byte)? == 0 {
                break;
            }
            line.push(byte[0]);
        }
        let release = std::str::from_utf8(&line)
            .ok()
            .and_then(|line| line.strip_suffix('\n'))
            .and_then(|line| line.strip_prefix(MAGIC));
        match release {
            Some(env!("CARGO_PKG_VERSION")) => Ok(segment),
            Some(release) => Err(JournalError::Release {
                path: path.to_owned(),
                release: release.to_owned(),
            }),
            None => Err(JournalError::Foreign {
                path: path.to_owned(),
            }),
        }
    }

    /// Reads as much as there is.
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize, JournalError> {
        let mut read = 0;
        while let Some(rest) = bytes.get_mut(read..).filter(|rest| !rest.is_empty()) {
            match self.file.read(rest) {
                Ok(0) => break,
                Ok(some) => read += some,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(JournalError::io("read", &self.path)(error)),
            }
        }
        self.position += read as u64;
        Ok(read)
    }

    fn frame(&mut self) -> Result<Frame, JournalError> {
        let begin = self.position;
        let mut head = [0; 8];
        match self.read(&mut head)? {
            0 => return Ok(Frame::End),
            8 => {}
            torn => return Ok(Frame::Torn(torn as u64)),
        }
        let [a, b, c, d, rest @ ..] = head;
        let length = u32::from_le_bytes([a, b, c, d]);
        let left = self.size.saturating_sub(self.position);
        if length > LARGEST_FRAME || u64::from(length) > left {
            return Ok(Frame::Torn(self.size.saturating_sub(begin)));
        }
        let mut frame = vec![0; length as usize];
        let whole = self.read(&mut frame)? == frame.len();
        if !whole || checksum(&frame) != u32::from_le_bytes(rest) {
            return Ok(Frame::Torn(self.size.saturating_sub(begin)));
        }
        Ok(Frame::Whole(frame))
    }
}

/// Puts a journal into engines, and hands out one line for each thing that they decided, and for what else is to be said.
///
/// # Errors
/// [`JournalError`] of the journal; what `line` says.
pub fn replay(
    path: &Path,
    hashes: Hashes,
    mut line: impl FnMut(&str) -> io::Result<()>,
) -> Result<Found, JournalError> {
    let mut reader = Reader::open(path)?;
    let mut replay = Replay::new(hashes);
    let mut found = Found::default();
    let mut say = |text: &str| line(text).map_err(JournalError::io("write", Path::new("the output")));
    while let Some(piece) = reader.next_piece()? {
        let record = match piece {
            Piece::Record(record) => record,
            Piece::Segment(path) => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                say(&format!("# segment {name}"))?;
                continue;
            }
            Piece::Torn(bytes) => {
                found.torn += 1;
                replay.interrupt();
                say(&format!("# torn: {bytes} bytes of the end are left out"))?;
                continue;
            }
        };
        let differs = matches!(&record, Record::State(_, _, state)
            if replay.engine().is_some_and(|engine| encoded(engine) != encoded(state)));
        let made = matches!(record, Record::Made(..));
        match replay.play(record) {
            Played::Began => {
                found.lives += u64::from(made);
                say(&format!("# {} a life begins", text::moment(replay.now())))?;
            }
            Played::Resumed => {
                found.differing += u64::from(differs);
                let differs = if differs {
                    ": another one than the records before lead to"
                } else {
                    ""
                };
                say(&format!(
                    "# {} the state is read{differs}",
                    text::moment(replay.now())
                ))?;
            }
            Played::Handled => found.events += 1,
            Played::Decided(effects) => {
                found.polls += 1;
                for effect in &effects {
                    found.decisions += 1;
                    say(&format!(
                        "{} {}",
                        text::moment(replay.now()),
                        text::effect(effect)
                    ))?;
                }
            }
            Played::Meaningless => found.missing += 1,
            Played::Lost(records) => {
                found.missing += records;
                say(&format!("# {records} records are missing"))?;
            }
        }
    }
    Ok(found)
}

/// What an engine knows, but for what it was made with.
fn encoded(engine: &Engine) -> Option<Vec<u8>> {
    postcard::to_stdvec(engine).ok()
}
