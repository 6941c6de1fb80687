//! What surrounds a driver over several lives: devices, identities, objects. It knows what must be served then, and what
//! the kernel has to have at the end, by the rules and without the engine.

use holdfast_ebpf::abi::Verdict;
use holdfast_engine::model::{RouteKey, Row, UidHash};

use super::*;

/// Something that happens.
#[derive(Clone, Debug)]
pub(super) enum Action {
    /// A device appears (with this MAC and token), and its identity is registered. One that had its number is gone.
    Device(Ifindex, u8),
    /// A device goes. Nobody deletes its identity.
    Gone(Ifindex),
    /// A carrier comes or goes.
    Carrier(Ifindex, bool),
    /// Another token is registered for the device that is there.
    Token(Ifindex, u64),
    /// An attachment of an interface, with its label.
    Attachment(Ifindex, &'static str),
    /// An attachment is deleted.
    AttachmentGone(Ifindex),
    /// A policy is made or edited: its name, whose it is, who serves.
    Policy(&'static str, &'static str, &'static str),
    /// A policy is deleted.
    PolicyGone(&'static str),
}

/// What reaches the driver of it.
#[derive(Debug)]
pub(super) enum News {
    Link(LinkNews),
    Source(SourceNews),
    Wake(Ifindex),
}

/// Who reaches whom: a consumer and a port of the service, and the producers that may answer.
pub(super) type Paths = BTreeMap<(Ifindex, u16), BTreeSet<Ifindex>>;

/// A policy as the world knows it.
#[derive(Clone, Debug)]
struct Route {
    generation: u64,
    consumers: &'static str,
    producers: &'static str,
    /// Who served it at earlier generations: they go on while nobody of the present ones is ready (KeepOld).
    earlier: BTreeSet<&'static str>,
}

pub(super) struct Outside {
    fake: Arc<Fake>,
    links: BTreeMap<Ifindex, Link>,
    tokens: BTreeMap<Ifindex, u64>,
    attachments: BTreeMap<Ifindex, &'static str>,
    policies: BTreeMap<&'static str, Route>,
}

/// Each policy has a port of its own.
fn port_of(policy: &str) -> u16 {
    if policy == "first" { 53 } else { 54 }
}

fn interface(ifindex: Ifindex) -> String {
    format!("hf{ifindex}")
}

impl Outside {
    pub(super) fn new(fake: &Arc<Fake>) -> Self {
        Self {
            fake: Arc::clone(fake),
            links: BTreeMap::new(),
            tokens: BTreeMap::new(),
            attachments: BTreeMap::new(),
            policies: BTreeMap::new(),
        }
    }

    /// The same world around another kernel that has nothing yet.
    pub(super) fn elsewhere(&self, fake: &Arc<Fake>) -> Self {
        let other = Self {
            fake: Arc::clone(fake),
            links: self.links.clone(),
            tokens: self.tokens.clone(),
            attachments: self.attachments.clone(),
            policies: self.policies.clone(),
        };
        for (ifindex, link) in &other.links {
            other.fake.add_device(Device {
                ifindex: *ifindex,
                mac: link.mac,
            });
            other.fake.register(*ifindex, other.identity(*ifindex));
        }
        other
    }

    pub(super) fn kernel(&self) -> &Fake {
        &self.fake
    }

    fn identity(&self, ifindex: Ifindex) -> Identity {
        Identity {
            token: Token::new(self.tokens[&ifindex]).unwrap(),
            host_mac: self.links[&ifindex].mac,
            ..identity(1)
        }
    }

    /// It happens. What of it reaches the driver, in order.
    pub(super) fn apply(&mut self, action: &Action) -> Vec<News> {
        match *action {
            Action::Device(ifindex, number) => {
                let device = Device {
                    ifindex,
                    mac: mac(number),
                };
                self.fake.add_device(device);
                self.links
                    .insert(ifindex, link(ifindex, &interface(ifindex), number));
                self.register(ifindex, u64::from(number));
                vec![self.present(ifindex), News::Wake(ifindex)]
            }
            Action::Gone(ifindex) => {
                self.fake.remove_device(ifindex);
                self.links.remove(&ifindex);
                vec![News::Link(LinkNews::Gone(ifindex))]
            }
            Action::Carrier(ifindex, carrier) => match self.links.get_mut(&ifindex) {
                Some(link) => {
                    link.carrier = carrier;
                    vec![self.present(ifindex)]
                }
                None => Vec::new(),
            },
            Action::Token(ifindex, token) => {
                if !self.links.contains_key(&ifindex) {
                    return Vec::new();
                }
                self.register(ifindex, token);
                vec![News::Wake(ifindex)]
            }
            Action::Attachment(ifindex, app) => {
                self.attachments.insert(ifindex, app);
                let name = format!("a{ifindex}");
                Self::changed(attachment(&name, &interface(ifindex), app))
            }
            Action::AttachmentGone(ifindex) => {
                self.attachments.remove(&ifindex);
                Self::changed(ObjectChange::AttachmentGone(named(&format!("a{ifindex}"))))
            }
            Action::Policy(name, consumers, producers) => {
                let before = self.policies.get(name);
                let route = Route {
                    generation: before.map_or(1, |route| route.generation + 1),
                    consumers,
                    producers,
                    earlier: before.map_or_else(BTreeSet::new, |route| {
                        route.earlier.iter().copied().chain([route.producers]).collect()
                    }),
                };
                self.policies.insert(name, route);
                Self::changed(self.policy(name))
            }
            Action::PolicyGone(name) => {
                self.policies.remove(name);
                Self::changed(ObjectChange::PolicyGone(named(name)))
            }
        }
    }

    fn changed(change: ObjectChange) -> Vec<News> {
        vec![News::Source(SourceNews::Changes(vec![change]))]
    }

    fn present(&self, ifindex: Ifindex) -> News {
        News::Link(LinkNews::Present(self.links[&ifindex].clone()))
    }

    fn register(&mut self, ifindex: Ifindex, token: u64) {
        self.tokens.insert(ifindex, token);
        self.fake.register(ifindex, self.identity(ifindex));
    }

    fn policy(&self, name: &str) -> ObjectChange {
        let route = &self.policies[name];
        let ObjectChange::Policy(mut policy) = policy(name, route.consumers, port_of(name)) else {
            unreachable!("a policy is a policy");
        };
        policy.generation = route.generation;
        if let Ok(spec) = &mut policy.content {
            spec.producers = selector(route.producers);
        }
        ObjectChange::Policy(policy)
    }

    /// All that there is, as a new life learns of it.
    pub(super) fn everything(&self) -> Vec<News> {
        let attachments = self
            .attachments
            .iter()
            .map(|(ifindex, app)| attachment(&format!("a{ifindex}"), &interface(*ifindex), app));
        let policies = self.policies.keys().map(|name| self.policy(name));
        vec![
            News::Source(SourceNews::Changes(attachments.chain(policies).collect())),
            News::Link(LinkNews::Dump(self.links.values().cloned().collect())),
            News::Source(SourceNews::Complete),
        ]
    }

    fn is_ready(&self, ifindex: Ifindex) -> bool {
        self.links.get(&ifindex).is_some_and(|link| link.carrier)
    }

    /// Consumers and the ports that are claimed for them.
    fn claims(&self) -> impl Iterator<Item = (Ifindex, &'static str, &Route)> {
        self.attachments.iter().flat_map(|(ifindex, app)| {
            self.policies
                .iter()
                .filter(move |(_, route)| route.consumers == *app)
                .map(|(name, route)| (*ifindex, *name, route))
        })
    }

    /// What must be served.
    pub(super) fn wanted(&self) -> Paths {
        self.claims()
            .filter(|(ifindex, _, _)| self.is_ready(*ifindex))
            .map(|(ifindex, name, route)| ((ifindex, port_of(name)), self.ready(route.producers)))
            .filter(|(_, producers)| !producers.is_empty())
            .collect()
    }

    fn ready(&self, app: &str) -> BTreeSet<Ifindex> {
        let of_app = self.attachments.iter().filter(|(_, other)| **other == app);
        let ifindexes = of_app.map(|(ifindex, _)| *ifindex);
        ifindexes.filter(|ifindex| self.is_ready(*ifindex)).collect()
    }

    /// What may be served besides: by the producers of earlier generations, while there are no others.
    fn kept(&self) -> Paths {
        self.claims()
            .filter(|(ifindex, _, route)| self.is_ready(*ifindex) && self.ready(route.producers).is_empty())
            .map(|(ifindex, name, route)| {
                let earlier = route.earlier.iter().flat_map(|app| self.ready(app));
                ((ifindex, port_of(name)), earlier.collect())
            })
            .collect()
    }

    /// What is served.
    pub(super) fn served(&self) -> Paths {
        served(&self.fake, self.links.keys().copied())
    }

    /// Claimed destinations whose packets do not leak now.
    pub(super) fn tight(&self) -> BTreeSet<(Ifindex, u16)> {
        self.claims()
            .map(|(ifindex, name, _)| (ifindex, port_of(name)))
            .filter(|(ifindex, port)| verdict(&self.fake, *ifindex, *port) != Verdict::Pass)
            .collect()
    }

    /// What a policy must say.
    pub(super) fn states(&self) -> BTreeMap<&'static str, bool> {
        let wanted = self.wanted();
        let mut states = BTreeMap::new();
        for (ifindex, name, _) in self.claims() {
            *states.entry(name).or_insert(true) &= wanted.contains_key(&(ifindex, port_of(name)));
        }
        states
    }
}

fn verdict(fake: &Fake, ifindex: Ifindex, port: u16) -> Verdict {
    fake.request(ifindex, &question(port)).verdict
}

fn served(fake: &Fake, ifindexes: impl Iterator<Item = Ifindex>) -> Paths {
    let mut paths = Paths::new();
    for ifindex in ifindexes {
        for port in [53, 54] {
            let answer = fake.request(ifindex, &question(port));
            if answer.verdict == Verdict::Delivered {
                paths.insert((ifindex, port), BTreeSet::from([answer.target]));
            }
        }
    }
    paths
}

/// What no operation may break: what was served and is still wanted, and what did not leak and is still claimed.
pub(super) struct Guard {
    paths: Mutex<Paths>,
    tight: Mutex<BTreeSet<(Ifindex, u16)>>,
    broken: Mutex<Vec<String>>,
}

impl Guard {
    pub(super) fn of(outside: &Outside) -> Arc<Self> {
        let wanted = outside.wanted();
        let paths = outside.served().into_iter().filter_map(|(path, targets)| {
            // The old producer, or one that has taken its place.
            let wanted = wanted.get(&path)?;
            Some((path, targets.union(wanted).copied().collect()))
        });
        Arc::new(Self {
            paths: Mutex::new(paths.collect()),
            tight: Mutex::new(outside.tight()),
            broken: Mutex::default(),
        })
    }

    pub(super) fn look(&self, fake: &Fake) {
        for ((ifindex, port), targets) in &*self.paths.lock().unwrap() {
            let answer = fake.request(*ifindex, &question(*port));
            if answer.verdict != Verdict::Delivered || !targets.contains(&answer.target) {
                self.say(format!("{ifindex} to {port}: {answer:?}, not {targets:?}"));
            }
        }
        for (ifindex, port) in &*self.tight.lock().unwrap() {
            if verdict(fake, *ifindex, *port) == Verdict::Pass {
                self.say(format!("{ifindex} to {port} leaks"));
            }
        }
    }

    /// The world goes on: what was so need not be so any more.
    pub(super) fn released(&self) {
        self.paths.lock().unwrap().clear();
        self.tight.lock().unwrap().clear();
    }

    fn say(&self, what: String) {
        self.broken.lock().unwrap().push(what);
    }

    pub(super) fn assert_kept(&self, when: &str) {
        let broken = self.broken.lock().unwrap();
        assert!(broken.is_empty(), "{when}: {broken:#?}");
    }
}

/// What the kernel has, but for numbers that depend on the way to it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Content {
    attached: BTreeSet<Ifindex>,
    rows: BTreeMap<Ifindex, Row>,
    entries: BTreeMap<(Ifindex, RouteKey), (Option<UidHash>, bool)>,
    /// By policy: the generation that its set serves, and the members of that.
    sets: BTreeMap<UidHash, (u64, BTreeSet<(Ifindex, Token)>)>,
    backends: Vec<(Option<UidHash>, Ifindex, Token)>,
}

impl Content {
    pub(super) fn of(fake: &Fake) -> Self {
        let pins = fake.adopt().unwrap();
        let uid = |slot| pins.policies.get(&slot).map(|policy| policy.uid);
        let rows = pins
            .rows
            .iter()
            .map(|(ifindex, row)| (*ifindex, Row { epoch: 0, ..*row }));
        let entries = pins.entries.iter().flat_map(|(ifindex, entries)| {
            entries
                .iter()
                .map(|(key, entry)| ((*ifindex, *key), (uid(entry.policy), entry.open)))
        });
        let sets = pins.policies.values().map(|policy| {
            let slots = pins.slots.get(&policy.selected.base);
            let members = slots
                .into_iter()
                .flatten()
                .filter_map(|id| pins.backends.get(id))
                .map(|backend| (backend.ifindex, backend.token));
            (policy.uid, (policy.served_generation, members.collect()))
        });
        let mut backends: Vec<_> = pins
            .backends
            .values()
            .map(|backend| (uid(backend.policy), backend.ifindex, backend.token))
            .collect();
        backends.sort_unstable();
        Self {
            attached: pins.attached.clone(),
            rows: rows.collect(),
            entries: entries.collect(),
            sets: sets.collect(),
            backends,
        }
    }
}

impl Rig {
    pub(super) async fn give(&self, news: News) {
        match news {
            News::Link(news) => self.links.send(news).await.unwrap(),
            News::Source(news) => self.source.send(news).await.unwrap(),
            News::Wake(ifindex) => self.wakes.send(ifindex).await.unwrap(),
        }
        self.points.reach().await;
    }

    pub(super) async fn tell(&self, outside: &Outside) {
        for news in outside.everything() {
            self.give(news).await;
        }
    }

    /// What is served is what must be, and the policies say so.
    pub(super) async fn assert_right(&self, outside: &Outside, when: &str) {
        let (wanted, served) = (outside.wanted(), outside.served());
        let kept = outside.kept();
        let right = wanted.keys().all(|path| served.contains_key(path))
            && served.iter().all(|(path, targets)| {
                let allowed = wanted.get(path).or_else(|| kept.get(path));
                allowed.is_some_and(|allowed| targets.is_subset(allowed))
            });
        assert!(
            right,
            "{when}: served {served:?}, wanted {wanted:?}, kept {kept:?}"
        );
        for (name, programmed) in outside.states() {
            let state = self.state(name).await;
            assert_eq!(
                state == State::Programmed,
                programmed,
                "{when}: {name} is {state:?}"
            );
        }
    }
}
