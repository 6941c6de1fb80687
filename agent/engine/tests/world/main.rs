//! The model world: the engine, alone, in a world that goes wrong in every way.
//!
//! A seed makes a tape of choices, the tape makes world actions, and an oracle that knows the rules and nothing of the
//! engine checks every step. A failing run is shrunk to its list of actions; such lists are kept in `tests/scripts`
//! and replayed. `HF_WHOLE=1` runs five million steps and five thousand seeds, and demands that every situation of
//! [`coverage`] has been seen. `HF_SEED=n` runs one seed (add `HF_VERBOSE=1` to see all of it), or makes it the first
//! of the whole; `HF_STEPS=n` runs a number of steps (from `HF_SEED` on); `HF_FAILURES=n` stops at the n-th failing
//! seed, `HF_SURVEY=1` only counts them.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "this is a test, and it tells its seed"
)]

mod coverage;
mod flight;
mod generate;
#[path = "../support/journal.rs"]
mod journal;
mod kernel;
mod oracle;
mod rules;
mod run;
mod script;
mod still;
mod tape;
mod told;
mod world;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use coverage::Coverage;
use run::{Run, random, record, replay};
use script::{Script, stored, write};
use tape::Tape;

/// Steps of one seed, before it is brought to rest: with those it makes a thousand.
const STEPS_A_SEED: u64 = 950;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.replace('_', "").parse().expect("a number"))
}

fn verbose() -> bool {
    std::env::var_os("HF_VERBOSE").is_some()
}

/// Failing seeds are only counted.
fn surveying() -> bool {
    std::env::var_os("HF_SURVEY").is_some()
}

/// Where scripts of failing runs go.
fn found(seed: u64, script: &Script) -> PathBuf {
    let folder = std::env::var_os("HF_FOUND")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let path = folder.join(format!("found-{seed}.json"));
    std::fs::write(&path, write(script)).expect("a place for scripts");
    path
}

/// What is left of a failing seed.
fn tell(seed: u64, run: &Run) -> String {
    let violation = run.violation.clone().expect("a failing run");
    if surveying() {
        return format!("survey {seed} {} actions: {}", run.actions.len(), violation.rule);
    }
    let script = run::script(run, &violation);
    let path = found(seed, &script);
    format!(
        "seed {seed} broke a rule\n  {}\n  {}\n  {} actions, shrunk to {}: {}\n",
        script.rule,
        script.story,
        run.actions.len(),
        script.actions.len(),
        path.display()
    )
}

#[derive(Default)]
struct Totals {
    steps: AtomicU64,
    seeds: AtomicU64,
    next: AtomicU64,
    stop: AtomicBool,
}

/// Runs seeds until there are enough steps and seeds, on every core that there is.
fn run_seeds(first: u64, steps: u64, seeds: u64) -> (Coverage, Vec<String>) {
    let clock = Clock::start();
    let totals = Totals::default();
    let coverage = Mutex::new(Coverage::default());
    let failures = Mutex::new(Vec::new());
    let most = number("HF_FAILURES").unwrap_or(1) as usize;
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut seen = Coverage::default();
                while !totals.stop.load(Ordering::Relaxed) {
                    let number = totals.next.fetch_add(1, Ordering::Relaxed);
                    let enough = totals.steps.load(Ordering::Relaxed) >= steps;
                    if enough && number >= seeds {
                        break;
                    }
                    let seed = first + number;
                    // Some seeds run twice: the same tape gives the same effects.
                    let twice = number % 32 == 0;
                    let run = random(Tape::from_seed(seed), STEPS_A_SEED, twice);
                    totals.steps.fetch_add(run.world.steps, Ordering::Relaxed);
                    totals.seeds.fetch_add(1, Ordering::Relaxed);
                    seen.add(run.world.coverage());
                    let mut failure = run.violation.is_some().then(|| tell(seed, &run));
                    if twice && run.violation.is_none() {
                        let (again, _) = replay(run.setup, &run.actions, false);
                        if again.digest != run.world.digest {
                            failure = Some(format!(
                                "seed {seed} broke a rule\n  ENGINE 28: deterministic: two runs gave other effects\n"
                            ));
                        }
                    }
                    if let Some(failure) = failure {
                        let mut failures = failures.lock().expect("no panic elsewhere");
                        failures.push(failure);
                        if failures.len() >= most {
                            totals.stop.store(true, Ordering::Relaxed);
                        }
                    }
                }
                coverage.lock().expect("no panic elsewhere").add(&seen);
            });
        }
    });
    let steps = totals.steps.load(Ordering::Relaxed);
    let seconds = clock.elapsed().as_secs_f64();
    // Past what captures the output of a test that passes: which worlds were tried is always said.
    writeln!(
        std::io::stdout(),
        "{} seeds from {first}, {steps} steps in {seconds:.1} s, {:.0} a second",
        totals.seeds.load(Ordering::Relaxed),
        steps as f64 / seconds
    )
    .expect("a place for what is said");
    (
        coverage.into_inner().expect("no panic elsewhere"),
        failures.into_inner().expect("no panic elsewhere"),
    )
}

#[test]
fn random_worlds_obey_the_rules() {
    let whole = std::env::var_os("HF_WHOLE").is_some();
    if let Some(seed) = number("HF_SEED")
        && number("HF_STEPS").is_none()
        && !whole
    {
        let run = random(Tape::from_seed(seed), STEPS_A_SEED, false);
        println!(
            "seed {seed}: {} steps, {} actions",
            run.world.steps,
            run.actions.len()
        );
        if let Some(violation) = &run.violation {
            let text = tell(seed, &run);
            if verbose() {
                let script = run::script(&run, violation);
                drop(replay(script.setup, &script.actions, true));
            }
            panic!("{text}");
        }
        return;
    }
    // The whole, or what nobody minds to wait for.
    let (steps, seeds) = if whole { (5_000_000, 5_000) } else { (30_000, 0) };
    let steps = number("HF_STEPS").unwrap_or(steps);
    let first = number("HF_SEED").unwrap_or(1);
    let (coverage, failures) = run_seeds(first, steps, seeds);
    let empty = coverage.empty();
    if failures.is_empty() || surveying() {
        println!("{}{}", coverage.table(), coverage.rarest(12));
        println!("empty cells: {empty:?}");
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    assert!(empty.is_empty() || !whole, "nobody looked at {empty:#?}");
}

#[test]
fn every_script_obeys_the_rules() {
    for (name, script) in &stored(&folder()) {
        obeys(name, script);
    }
}

/// Where scripts are stored.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts")
}

fn obeys(name: &str, script: &Script) {
    let (world, violation) = replay(script.setup, &script.actions, verbose());
    if let Some(violation) = violation {
        panic!(
            "{name} breaks a rule\n  {}\n  {}\n{}",
            violation.rule,
            violation.story,
            world.oracle.shown_fates()
        );
    }
}

/// Each script by itself, so that the list of mutants can name it.
mod scripts {
    macro_rules! scripts {
        ($($name:ident)+) => {
            $(
                #[test]
                fn $name() {
                    let name = stringify!($name).replace('_', "-");
                    let stored = crate::stored(&crate::folder());
                    crate::obeys(&name, stored.get(&name).expect("a stored script"));
                }
            )+
        };
    }

    scripts! {
        a_backend_serves_its_own_policy_alone
        a_backend_that_could_not_be_freed_is_freed_later
        a_backend_that_drained_is_not_written_again
        a_backend_that_is_being_written_is_freed_after_the_answer
        a_claim_stays_with_its_loser_while_the_winner_has_no_slot
        a_claim_whose_slot_failed_keeps_another_from_passing
        a_claim_whose_slot_failed_keeps_no_row_closed
        a_closed_claim_that_did_not_fit_is_tried_again
        a_consumer_kept_through_two_edits_is_held_on
        a_consumer_that_comes_while_a_switch_waits_reaches_nobody
        a_consumer_that_is_new_after_a_restart_reaches_no_old_set
        a_consumer_that_leaves_reaches_no_new_set
        a_consumer_that_left_and_came_back_at_once_is_new
        a_contested_consumer_keeps_what_its_policy_allows
        a_dead_device_that_cannot_be_cleared_keeps_no_switch_waiting
        a_deleted_identity_voids_no_read_of_the_next
        a_denial_of_a_device_says_nothing_of_the_next_of_its_number
        a_denial_of_an_earlier_device_says_nothing_of_the_next
        a_destination_passes_to_no_slot_that_still_lets_pass
        a_destination_that_passes_on_is_proven_first
        a_detach_that_failed_is_forgotten_when_somebody_is_back
        a_device_denied_under_a_new_address_keeps_its_claims
        a_device_that_a_proof_did_not_find_has_not_failed
        a_device_that_comes_back_with_its_program_leaks_nothing
        a_device_that_is_back_at_once_keeps_its_identity
        a_device_that_is_being_asked_for_has_not_failed
        a_device_that_is_gone_is_news_whoever_asked
        a_device_that_is_still_being_asked_for_has_not_failed
        a_device_that_shares_its_name_is_asked_for_before_it_is_cleared
        a_device_that_was_only_denied_keeps_its_claims
        a_disproved_token_is_read_again
        a_hold_that_goes_on_over_a_restart_begins_no_schedule
        a_late_answer_blames_nobody_who_lost_an_interface
        a_late_answer_blames_nobody_who_lost_the_claim
        a_later_generation_of_the_same_content_claims_at_once
        a_leftover_of_its_own_keeps_no_policy_from_passing
        a_loser_does_not_win_the_old_set_by_an_edit
        a_loser_without_room_for_its_set_may_say_conflict
        a_member_whose_program_was_taken_away_serves_nobody_on
        a_new_label_inherits_no_right_to_an_old_set
        a_policy_that_went_while_no_agent_ran_is_reported_no_more
        a_policy_without_consumers_wants_no_set
        a_producer_is_who_it_was_over_a_restart
        a_producer_that_cannot_be_read_keeps_no_consumer_from_its_program
        a_producer_that_is_being_read_is_not_unreadable
        a_producer_without_addresses_serves_nobody_on
        a_proof_is_asked_after_the_last_plan
        a_range_goes_although_a_service_of_it_leads_to_somebody_gone
        a_range_goes_when_its_heir_is_there_although_the_set_finds_no_room
        a_range_of_slots_that_two_have_is_given_to_nobody
        a_range_passes_on_after_the_services_it_catches
        a_range_stands_in_for_the_services_that_replace_it
        a_range_that_stands_in_stays_announced
        a_read_before_the_first_dump_says_nothing
        a_refused_claim_that_failed_is_tried_again
        a_refused_policy_keeps_what_a_later_generation_left
        a_revocation_under_a_closed_row_keeps_nobody_pending
        a_row_that_cannot_be_closed_keeps_no_switch_waiting
        a_row_that_failed_under_an_unsupported_policy_is_tried_again
        a_row_that_nobody_wants_open_any_more_has_not_failed
        a_saved_generation_claims_nothing_under_a_later_slot
        a_saved_generation_grants_what_it_names_and_no_more
        a_saved_generation_lets_nothing_pass_that_is_dropped
        a_saved_generation_switches_no_later_one_away
        a_saved_set_closes_nothing_of_whom_it_does_not_know
        a_saved_set_deletes_nothing_that_could_not_be_written
        a_saved_set_makes_room_for_nobody
        a_selector_is_written_again_once_its_backends_are_answered
        a_service_goes_once_its_range_leads_to_nobody_gone
        a_service_goes_when_its_range_is_there_although_the_set_finds_no_room
        a_set_that_an_earlier_life_left_torn_is_built_anew
        a_set_that_is_not_current_yet_entitles_nobody
        a_set_that_waits_entitles_nobody
        a_set_without_room_lets_its_slot_stop_passing
        a_slot_lets_pass_once_its_interfaces_are_planned
        a_slot_of_nobody_stays_while_its_member_is_unread
        a_slot_stops_passing_before_an_identity_is_deleted
        a_slot_that_could_not_be_freed_is_not_its_policys_any_more
        a_slot_that_failed_is_freed_all_the_same
        a_slot_that_stands_in_for_somebody_without_room_lets_nothing_pass
        a_slot_that_was_kept_is_audited_once_its_content_is_known
        a_slot_without_room_for_its_next_set_is_put_back
        a_stale_entry_does_not_stand_in_for_a_claim_without_a_slot
        a_stray_backend_leaves_nothing_due
        a_stray_slot_is_not_given_out_meanwhile
        a_switch_before_the_lists_are_complete_waits_for_what_is_taken_away
        a_switch_waits_for_the_answer_of_a_revocation
        a_switch_waits_until_what_is_taken_away_is_closed
        a_switch_waits_while_a_revocation_is_tried_again
        a_void_read_without_an_answer_says_nothing
        an_address_that_is_shared_brings_nobody_back
        an_address_that_is_shared_proves_no_death
        an_attach_that_failed_is_tried_again_when_its_policy_is_gone
        an_attach_that_failed_is_tried_again_without_consumers
        an_attach_that_nobody_wants_any_more_is_not_tried
        an_attachment_that_goes_takes_its_producer_along
        an_audit_is_believed_before_the_news_of_a_dead_device
        an_entry_kept_open_keeps_nobody_elses_row_closed
        an_epoch_that_was_raised_is_not_given_again
        an_identity_of_a_dead_device_breaks_no_path
        an_interface_that_is_left_is_cleaned_whatever_failed_before
        an_open_row_is_rewritten_while_entries_open
        an_orphan_that_is_done_is_forgotten
        an_outdated_content_is_not_unsupported
        an_outdated_policy_keeps_nobody_else_waiting
        an_outdated_policy_without_consumers_stays
        an_unreadable_producer_of_another_policy_keeps_no_row_closed
        another_identity_of_a_member_is_tried_at_once
        claims_without_room_are_announced
        entries_kept_for_unknown_content_go_when_it_is_known
        every_read_of_before_a_device_is_void
        lists_in_pieces_take_no_memory
        no_claim_comes_under_a_slot_that_still_passes
        no_row_closes_before_its_slot_stops_passing
        no_row_opens_over_a_set_of_the_dead
        no_row_opens_while_a_selector_is_about_to_move
        nobody_goes_live_over_an_old_set_with_a_dead_member
        nothing_goes_while_what_it_covers_is_being_closed
        nothing_is_attached_while_its_row_is_being_closed
        nothing_is_written_while_a_clear_is_out
        one_question_about_an_intent_at_a_time
        pass_is_written_once_nobody_elses_entries_lead_to_the_slot
        register_returns_although_a_revocation_waits_for_the_next_opening
        the_program_comes_after_the_last_plan
        the_row_of_an_unsupported_policy_is_closed_in_the_end
        two_claims_after_a_failed_write_do_not_wait_for_each_other
        what_an_audit_missed_leaves_no_link_behind
        what_an_audit_put_right_serves_on
        what_cannot_be_taken_away_closes_its_interface
        what_could_not_be_removed_of_a_dead_device_is_tried_again
        what_failed_once_keeps_nobody_pending
        what_is_given_back_while_a_switch_waits_reaches_nobody
        what_is_written_already_is_not_full
        what_leads_to_another_policy_is_not_there_yet
        what_only_the_complete_lists_name_serves_on
        what_our_own_write_disproved_is_asked_anew
        what_somebody_else_led_elsewhere_is_put_back_closed
        what_stands_in_goes_when_the_heir_has_no_slot
        what_the_former_incarnation_asked_is_one_question_too
        what_was_about_to_be_taken_away_when_the_agent_died_is_not_known_to_the_next
        what_was_disproved_of_an_incarnation_dies_with_it
        what_was_disproved_of_one_content_is_not_held_against_the_next
        what_was_disproved_of_one_set_is_not_held_against_the_next
        what_was_kept_and_then_claimed_is_not_kept_again
        what_was_open_behind_a_closed_row_is_proven_again
        who_had_no_room_left_his_destination_to_nobody
        who_loses_to_a_later_edit_of_the_batch_switches_after_its_entries_close
        who_lost_its_interface_keeps_no_policy_full
        who_lost_its_interface_reaches_no_old_set
        who_moves_to_another_interface_asks_once_at_a_time
        whose_wishes_nobody_knows_loses_its_slot_to_somebody
    }
}

/// Those that a lab runs against the real kernel (`tests/kernel/scripts`), in the world alone.
#[test]
fn scripts_for_real_nodes_obey_the_rules() {
    let first = number("HF_SEED").unwrap_or(1);
    let generated = (first..first + 50).map(|seed| (format!("seed {seed}"), generate::node_script(seed)));
    let stored = stored(&folder());
    let stored = stored
        .into_iter()
        .filter_map(|(name, script)| Some((name, script.on_a_node()?)));
    for (name, script) in generated.chain(stored) {
        let (_, violation) = replay(script.setup, &script.actions, verbose());
        assert_eq!(violation, None, "{name}: {}", write(&script));
    }
}

/// What went into the engines of a world leads others to the same decisions, from its beginning and from the middle.
#[test]
fn a_journal_leads_to_the_same_decisions() {
    let seeds = (1..=3).map(|seed| {
        let run = random(Tape::from_seed(seed), STEPS_A_SEED, false);
        (format!("seed {seed}"), run.setup, run.actions)
    });
    let stored = stored(&folder()).into_iter();
    let stored = stored.map(|(name, script)| (name, script.setup, script.actions));
    let mut states = 0;
    for (name, setup, actions) in seeds.chain(stored) {
        let (journal, violation) = record(setup, &actions);
        assert_eq!(violation, None, "{name}");
        states += journal.states.len();
        journal.check(&name, world::config(&setup).hashes);
    }
    assert!(states > 500, "{states} states are in the middle of something");
}

/// A wall clock for the figures that are printed; the world's own clock is virtual.
#[expect(clippy::disallowed_types, reason = "only for what is printed")]
struct Clock(std::time::Instant);

#[expect(clippy::disallowed_types, reason = "only for what is printed")]
impl Clock {
    fn start() -> Self {
        Self(std::time::Instant::now())
    }

    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

#[test]
fn a_tape_of_bytes_runs_too() {
    let bytes: Vec<u8> = (0..4000_u32).map(|number| ((number * 7919) >> 3) as u8).collect();
    let run = random(Tape::from_bytes(&bytes), 300, false);
    assert_eq!(run.violation, None);
    assert!(run.world.steps > 100);
}
