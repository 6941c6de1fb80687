//! The task that listens.
//!
//! Trouble of any kind has one cure: subscribe anew and dump anew, at once. Only if the same burst of trouble goes on
//! are the repetitions spaced, up to half a second: a storm of link changes must not keep a core busy with dumps.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::dump::{Question, request};
use super::socket::{Received, Socket};
use super::state::{Dumped, Finished, State, Trouble};
use super::{Asks, Counters, LinkNews, NetlinkError, Options, is_deaf};

/// Trouble that comes later than this after the last is a new burst.
const QUIET: Duration = Duration::from_secs(1);

/// Longest wait before the next try within a burst.
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// Dumps in a row that are asked for again because the list of devices changed meanwhile. Then the last one is good
/// enough: it proves presence, and what it lacks is asked for one by one.
const INTERRUPTIONS: u32 = 3;

/// Datagrams that are taken before others get their turn.
const AT_ONCE: usize = 64;

/// Notifications that are read before one answer is taken in.
const BEFORE_ANSWER: usize = 8192;

/// Opens the sockets, puts the first question and starts the task.
pub(super) fn spawn(
    options: Options,
    news: mpsc::Sender<LinkNews>,
    asks: Arc<Asks>,
    counters: Arc<Counters>,
) -> Result<(), NetlinkError> {
    let now = Instant::now();
    let mut task = Task {
        // Subscribed first, dumped then: what changes between the two is in the queue.
        subscription: Some(Socket::subscribe(options.receive_buffer)?),
        questions: Some(Socket::questions()?),
        options,
        news,
        asks,
        counters,
        state: State::default(),
        sequence: 0,
        links_wanted: true,
        addresses_wanted: true,
        check: false,
        dumped: false,
        interruptions: 0,
        not_before: now,
        last_trouble: None,
        tries: 0,
        heard: now,
        asked: now,
        notification: Vec::new(),
        answer: Vec::new(),
    };
    task.question(Question::All)?;
    tokio::spawn(task.run());
    Ok(())
}

/// What woke the task.
enum Wake {
    Notification(Received),
    Answer(Received),
    Room,
    Asked,
    Time,
    NobodyListens,
}

/// Trouble, with the socket that it came from.
enum Fault {
    Notifications(Reason),
    Answers(Reason),
}

/// What went wrong, for people.
#[derive(Debug, thiserror::Error)]
enum Reason {
    #[error("the kernel had to drop notifications")]
    Overrun,
    #[error("a message could not be understood")]
    Undecodable,
    #[error("a dump was cut")]
    Cut,
    #[error("a socket is of no more use: {0}")]
    Closed(std::io::Error),
    #[error("{0}")]
    Socket(NetlinkError),
}

impl From<Trouble> for Reason {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Overrun => Self::Overrun,
            Trouble::Undecodable => Self::Undecodable,
            Trouble::Cut => Self::Cut,
        }
    }
}

struct Task {
    options: Options,
    news: mpsc::Sender<LinkNews>,
    asks: Arc<Asks>,
    counters: Arc<Counters>,
    state: State,
    subscription: Option<Socket>,
    questions: Option<Socket>,
    /// Number of the last question.
    sequence: u32,
    /// A dump of devices is to be asked for.
    links_wanted: bool,
    /// A dump of addresses is to be asked for.
    addresses_wanted: bool,
    /// All devices are to be compared with what is known of them.
    check: bool,
    /// There was a complete dump of devices.
    dumped: bool,
    /// Dumps of devices in a row that were interrupted.
    interruptions: u32,
    /// Sockets are not opened and no dump is begun before this.
    not_before: Instant,
    last_trouble: Option<Instant>,
    /// Cures tried in this burst.
    tries: u32,
    /// When the dump was last heard of.
    heard: Instant,
    /// When single devices were last asked for.
    asked: Instant,
    /// Datagrams.
    notification: Vec<u8>,
    answer: Vec<u8>,
}

impl Task {
    async fn run(mut self) {
        loop {
            self.asks.answer_pings();
            self.tell();
            self.mend(Instant::now());
            let deadline = self.deadline();
            let wake = tokio::select! {
                biased;
                received = next(self.subscription.as_ref(), &mut self.notification) => Wake::Notification(received),
                received = next(self.questions.as_ref(), &mut self.answer) => Wake::Answer(received),
                room = self.news.reserve(), if self.state.has_news() =>
                    if room.is_ok() { Wake::Room } else { Wake::NobodyListens },
                () = self.asks.arrived.notified() => Wake::Asked,
                () = tokio::time::sleep_until(deadline) => Wake::Time,
                () = self.news.closed() => Wake::NobodyListens,
            };
            let outcome = match wake {
                Wake::Notification(received) => self.notifications(received),
                Wake::Answer(received) => self.answers(received),
                Wake::Room => Ok(()),
                Wake::Asked => {
                    self.state.ask(self.asks.take());
                    // A dump that is wanted or under way for a better reason says all that a check would.
                    self.check |= self.asks.take_check() && !self.links_wanted && !self.state.dumping();
                    Ok(())
                }
                Wake::Time => self.timed_out(Instant::now()),
                Wake::NobodyListens => return,
            };
            if let Err(fault) = outcome {
                self.trouble(&fault, Instant::now());
            }
        }
    }

    /// Tells as much as the reader's queue takes.
    fn tell(&mut self) {
        while self.state.has_news() {
            let Ok(room) = self.news.try_reserve() else { return };
            if let Some(news) = self.state.next_news() {
                room.send(news);
            }
        }
    }

    /// Opens what is closed and asks what is to be asked, if it is time.
    fn mend(&mut self, now: Instant) {
        let outcome = self.reopen(now).and_then(|()| self.put_questions(now));
        if let Err(fault) = outcome {
            self.trouble(&fault, now);
        }
    }

    fn reopen(&mut self, now: Instant) -> Result<(), Fault> {
        if now < self.not_before {
            return Ok(());
        }
        if self.subscription.is_none() {
            let socket = Socket::subscribe(self.options.receive_buffer);
            self.subscription = Some(socket.map_err(|e| Fault::Notifications(Reason::Socket(e)))?);
        }
        if self.questions.is_none() {
            let socket = Socket::questions();
            self.questions = Some(socket.map_err(|e| Fault::Answers(Reason::Socket(e)))?);
        }
        Ok(())
    }

    fn put_questions(&mut self, now: Instant) -> Result<(), Fault> {
        let failed = |e| Fault::Answers(Reason::Socket(e));
        if self.questions.is_none() {
            return Ok(());
        }
        // One dump at a time: of a second one on the same socket the kernel says EBUSY.
        let due = now >= self.not_before && self.subscription.is_some() && !self.state.dumping();
        if due && let Some(dump) = self.wanted() {
            self.question(dump).map_err(failed)?;
        }
        while let Some(ifindex) = self.state.next_ask() {
            self.question(Question::One(ifindex)).map_err(failed)?;
        }
        Ok(())
    }

    /// The dump that is to be asked for next: devices first.
    fn wanted(&self) -> Option<Question> {
        if self.links_wanted || self.check {
            Some(Question::All)
        } else {
            self.addresses_wanted.then_some(Question::Addresses)
        }
    }

    fn question(&mut self, what: Question) -> Result<(), NetlinkError> {
        // 0 is what notifications carry.
        self.sequence = self.sequence.checked_add(1).unwrap_or(1);
        let now = Instant::now();
        // Noted before it is sent: a refused question comes back when the socket is replaced.
        match what {
            Question::All => {
                let check = self.check && !self.links_wanted;
                let what = if check { Dumped::Check } else { Dumped::Links };
                self.state.dump_begun(what, self.sequence);
                self.links_wanted = false;
                self.check = false;
                self.heard = now;
            }
            Question::Addresses => {
                self.state.dump_begun(Dumped::Addresses, self.sequence);
                self.addresses_wanted = false;
                self.heard = now;
            }
            Question::One(ifindex) => {
                self.state.asked(self.sequence, ifindex);
                self.asked = now;
            }
        }
        match &self.questions {
            Some(socket) => socket.send(&request(self.sequence, what)),
            None => Ok(()),
        }
    }

    /// Takes in this datagram of the subscription and those behind it.
    fn notifications(&mut self, first: Received) -> Result<(), Fault> {
        let mut received = first;
        for _ in 0..AT_ONCE {
            if !self.notification(received)? {
                break;
            }
            let Some(socket) = &self.subscription else { break };
            received = socket.next_now(&mut self.notification);
        }
        Ok(())
    }

    /// Takes in one datagram of the subscription; false: there are no more.
    fn notification(&mut self, received: Received) -> Result<bool, Fault> {
        let taken = match received {
            Received::Datagram if is_deaf() => Ok(()),
            Received::Datagram => self.state.notified(&self.notification).map_err(Reason::from),
            Received::Truncated => Err(Reason::Undecodable),
            Received::Foreign => Ok(()),
            Received::Empty => return Ok(false),
            Received::Overrun => Err(Reason::Overrun),
            Received::Closed(error) => Err(Reason::Closed(error)),
        };
        taken.map(|()| true).map_err(Fault::Notifications)
    }

    /// Takes in this datagram of answers.
    fn answers(&mut self, received: Received) -> Result<(), Fault> {
        let taken = match received {
            Received::Datagram => {
                // Whatever had been notified before this answer was made is in the queue by now. Taken in first, it
                // cannot bring back afterwards what the answer has already outdated.
                self.catch_up();
                self.heard = Instant::now();
                self.state.answered(&self.answer).map_err(Reason::from)
            }
            Received::Truncated => Err(Reason::Undecodable),
            Received::Foreign | Received::Empty => Ok(None),
            Received::Overrun => Err(Reason::Cut),
            Received::Closed(error) => Err(Reason::Closed(error)),
        };
        if let Some(finished) = taken.map_err(Fault::Answers)? {
            self.finished(finished, Instant::now());
        }
        Ok(())
    }

    fn catch_up(&mut self) {
        for _ in 0..BEFORE_ANSWER {
            let Some(socket) = &self.subscription else { break };
            let received = socket.next_now(&mut self.notification);
            match self.notification(received) {
                Ok(true) => {}
                Ok(false) => break,
                Err(fault) => self.trouble(&fault, Instant::now()),
            }
        }
    }

    fn finished(&mut self, finished: Finished, now: Instant) {
        self.counters.rounds.run();
        if finished.what == Dumped::Addresses {
            if finished.interrupted {
                // Single addresses cannot be asked for: again, until one is whole.
                self.addresses_wanted = true;
                self.not_before = self.not_before.max(now + spacing(1));
            }
            return;
        }
        if finished.what == Dumped::Check {
            // What it did not see as it is known is asked for by itself.
            return;
        }
        if self.dumped {
            Counters::count(&self.counters.resyncs);
        }
        self.dumped = true;
        self.interruptions = if finished.interrupted {
            self.interruptions + 1
        } else {
            0
        };
        if (1..=INTERRUPTIONS).contains(&self.interruptions) {
            self.links_wanted = true;
            self.not_before = self.not_before.max(now + spacing(self.interruptions));
        }
    }

    fn timed_out(&mut self, now: Instant) -> Result<(), Fault> {
        if self.state.dumping() && now >= self.heard + self.options.dump_timeout {
            return Err(Fault::Answers(Reason::Cut));
        }
        if self.state.asking() && now >= self.asked + self.options.ask_timeout {
            self.state.give_up_asks();
        }
        Ok(())
    }

    fn deadline(&self) -> Instant {
        let idle = self.subscription.is_none() || self.questions.is_none();
        let mend = idle || (self.wanted().is_some() && !self.state.dumping());
        let deadlines = [
            self.state
                .dumping()
                .then(|| self.heard + self.options.dump_timeout),
            self.state.asking().then(|| self.asked + self.options.ask_timeout),
            mend.then_some(self.not_before),
        ];
        // Far enough to be no wake-up.
        let never = Instant::now() + Duration::from_secs(86_400);
        deadlines.into_iter().flatten().min().unwrap_or(never)
    }

    /// Closes what is of no more use and sees to it that it is opened and dumped anew.
    fn trouble(&mut self, fault: &Fault, now: Instant) {
        let reason = match fault {
            Fault::Notifications(reason) => {
                // A dump under way goes on: in a storm that overruns every dump, one would else never end.
                self.subscription = None;
                reason
            }
            Fault::Answers(reason) => {
                self.questions = None;
                self.state.give_up_questions();
                reason
            }
        };
        self.links_wanted = true;
        self.addresses_wanted = true;
        self.check = false;
        self.state.distrust();
        if matches!(reason, Reason::Overrun) {
            Counters::count(&self.counters.overruns);
        }
        self.counters.rounds.run();
        self.counters.rounds.error();
        let new_burst = self.last_trouble.is_none_or(|last| now >= last + QUIET);
        self.last_trouble = Some(now);
        if new_burst {
            self.tries = 0;
            Counters::count(&self.counters.bursts);
            tracing::warn!(%reason, "notifications of links and addresses are incomplete: subscribing and dumping anew");
        }
        self.not_before = now + spacing(self.tries);
        self.tries = self.tries.saturating_add(1);
    }
}

/// How long to wait before the try after this many.
fn spacing(tries: u32) -> Duration {
    if tries == 0 {
        return Duration::ZERO;
    }
    (Duration::from_millis(50) * (1 << (tries - 1).min(4))).min(LONGEST_WAIT)
}

async fn next(socket: Option<&Socket>, buffer: &mut Vec<u8>) -> Received {
    match socket {
        Some(socket) => socket.next(buffer).await,
        None => std::future::pending().await,
    }
}
