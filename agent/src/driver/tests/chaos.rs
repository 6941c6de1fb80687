//! Random lives: lanes that dawdle, fail and forget, a world that changes meanwhile, and processes that end. When the
//! faults are over, everything gets to where a fresh start gets.

use std::sync::atomic::AtomicBool;

use super::world::{Action, Content, Outside};
use super::*;

/// Random numbers (splitmix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

const PRODUCERS: [(Ifindex, &str); 3] = [(21, "p"), (22, "p"), (23, "q")];
const CONSUMERS: [(Ifindex, &str); 3] = [(11, "c"), (12, "o"), (13, "c")];

fn everybody() -> impl Iterator<Item = (Ifindex, &'static str)> {
    CONSUMERS.into_iter().chain(PRODUCERS)
}

/// All are there and ready, and so are both policies.
fn whole(number: u8) -> Vec<Action> {
    let mut actions = Vec::new();
    for (at, (ifindex, app)) in everybody().enumerate() {
        actions.push(Action::Attachment(ifindex, app));
        actions.push(Action::Device(ifindex, number + at as u8));
    }
    actions.push(Action::Policy("first", "c", "p"));
    actions.push(Action::Policy("second", "o", "p"));
    actions
}

fn something(dice: &mut Dice, fresh: &mut u8) -> Action {
    let all: Vec<_> = everybody().collect();
    let (ifindex, app) = dice.of(&all);
    *fresh += 1;
    match dice.below(10) {
        0 | 1 => Action::Carrier(ifindex, false),
        2 | 3 => Action::Carrier(ifindex, true),
        4 => Action::Token(ifindex, 1_000 + u64::from(*fresh)),
        5 => Action::Device(ifindex, *fresh),
        6 => Action::Gone(ifindex),
        7 => Action::Attachment(ifindex, app),
        8 => Action::AttachmentGone(ifindex),
        _ => Action::Policy(
            dice.of(&["first", "second"]),
            dice.of(&["c", "o"]),
            dice.of(&["p", "q"]),
        ),
    }
}

/// What the lanes do while there are faults.
fn course(dice: &mut Dice, job: &Job) -> Course {
    let short = Duration::from_micros(20 + dice.below(2_000));
    match dice.below(100) {
        0..70 => Course::After(short),
        70..85 => Course::After(Duration::from_millis(dice.below(3_000))),
        85..87 => Course::Late(Duration::from_millis(9_000 + dice.below(6_000))),
        87 => Course::Unheard,
        _ => {
            let message = "EIO".to_owned();
            let error = match job {
                Job::Op(_, Op::ProveSet { .. } | Op::ProveIntent(_)) => OpError::Disproved { message },
                _ => OpError::Refused { message },
            };
            Course::Fails(short, error)
        }
    }
}

/// The faults, which can be switched off.
fn faults(seed: u64) -> (Arc<AtomicBool>, Rule) {
    let on = Arc::new(AtomicBool::new(true));
    let dice = Mutex::new(Dice(seed ^ 0xfa17));
    let rule: Rule = Arc::new({
        let on = Arc::clone(&on);
        move |job| {
            if on.load(Ordering::Relaxed) {
                course(&mut dice.lock().unwrap(), job)
            } else {
                Course::After(Duration::from_micros(50))
            }
        }
    });
    (on, rule)
}

/// The next life over what the last one left.
async fn again(rig: Rig, parts: &Parts, outside: &Outside, crash: bool) -> Rig {
    let remembered = rig.remembered.clone();
    if crash {
        rig.crash().await;
    } else {
        let mut rig = rig;
        rig.end_all().await;
    }
    let remembered = remembered.borrow().to_vec();
    let rig = Rig::begin(Parts {
        remembered,
        ..parts.clone()
    });
    rig.tell(outside).await;
    rig
}

/// What a life without any fault makes of the world as it is at the end.
async fn fresh(outside: &Outside) -> Content {
    let parts = Parts::new(quick);
    let outside = outside.elsewhere(&parts.fake);
    let rig = Rig::begin(parts);
    rig.tell(&outside).await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    rig.assert_right(&outside, "a fresh start").await;
    rig.crash().await;
    Content::of(outside.kernel())
}

async fn live(seed: u64) {
    let when = format!("seed {seed}");
    let mut dice = Dice(seed);
    let (on, rule) = faults(seed);
    let parts = Parts {
        rule,
        ..Parts::new(quick)
    };
    let mut outside = Outside::new(&parts.fake);
    let mut rig = Rig::begin(parts.clone());
    rig.tell(&outside).await;
    let mut number = 100;
    let mut actions = whole(1);
    actions.extend((0..60).map(|_| something(&mut dice, &mut number)));
    for action in actions {
        println!("{:?} {action:?}", parts.clock.now().boot);
        for news in outside.apply(&action) {
            rig.give(news).await;
        }
        tokio::time::sleep(Duration::from_millis(dice.below(1_500))).await;
        let end = dice.below(40);
        if end < 2 {
            println!(
                "the process ends{}",
                if end == 0 { ", as by a crash" } else { "" }
            );
            rig = again(rig, &parts, &outside, end == 0).await;
        }
    }
    // What was never answered is never tried again in this life: bpf(2) cannot be cancelled. The next one adopts.
    on.store(false, Ordering::Relaxed);
    let mut rig = again(rig, &parts, &outside, dice.below(2) == 0).await;
    tokio::time::sleep(Duration::from_secs(240)).await;
    rig.assert_right(&outside, &when).await;
    // All come back; nothing is left that a fresh start would not have made.
    for action in whole(180) {
        for news in outside.apply(&action) {
            rig.give(news).await;
        }
    }
    tokio::time::sleep(Duration::from_secs(240)).await;
    rig.assert_right(&outside, &when).await;
    assert_eq!(Content::of(&rig.fake), fresh(&outside).await, "{when}");
    rig.end_all().await;
}

#[test]
fn random_lives_come_to_rest_where_a_fresh_start_does() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let (first, count): (u64, u64) = (number("HF_SEED").unwrap_or(1), number("HF_SEEDS").unwrap_or(40));
    for seed in first..first + count {
        println!("seed {seed} (HF_SEED={seed} HF_SEEDS=1 repeats it)");
        // The actions follow: they are shown when it fails.
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap()
            .block_on(live(seed));
    }
}
