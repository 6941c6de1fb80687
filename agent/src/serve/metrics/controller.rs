//! The metrics of `holdfast controller`.

use holdfast_engine::model::{Boot, Now};

use super::text::Page;
use super::{VERSION, catalogue, seconds};
use crate::controller::keeper::Watched;
use crate::controller::run::Figures;
use crate::report::Stamps;

/// As text, as [`super::render`] does it for the agent.
#[must_use]
pub fn render_controller(figures: &Figures, now: Now, stamps: &Stamps) -> String {
    // As in the agent's, all stamps are the boot clock's, at one distance.
    let stamp = |boot: Boot| seconds(stamps.wall_ms(Now { boot, ..now }));
    let mut page = Page::default();
    page.family(&catalogue::CONTROLLER_LEADER)
        .plain(u64::from(figures.leads));
    let [live, unknown] = catalogue::LIVES;
    let mut family = page.family(&catalogue::CONTROLLER_NODES);
    family.sample(&[("state", live)], figures.lives.live);
    family.sample(&[("state", unknown)], figures.lives.unknown);
    page.family(&catalogue::CONTROLLER_LAGGARDS)
        .plain(figures.laggards);
    let [ok, conflict, error] = catalogue::STATUS_WRITE_RESULTS;
    let mut family = page.family(&catalogue::CONTROLLER_STATUS_WRITES);
    family.sample(&[("result", ok)], figures.writes.ok);
    family.sample(&[("result", conflict)], figures.writes.conflict);
    family.sample(&[("result", error)], figures.writes.error);
    let mut family = page.family(&catalogue::CONTROLLER_POLICY_BEHIND_SINCE);
    for (name, since) in &figures.behind {
        let labels = [
            ("namespace", name.namespace.as_str()),
            ("policy", name.name.as_str()),
        ];
        family.sample(&labels, stamp(*since));
    }
    let mut family = page.family(&catalogue::CONTROLLER_WATCH_LAST_ACTIVITY);
    for watched in Watched::ALL {
        if let Some(at) = figures.heard.get(&watched) {
            family.sample(&[("watch", watched.as_str())], stamp(*at));
        }
    }
    page.family(&catalogue::TIME).plain(stamp(now.boot));
    page.family(&catalogue::BUILD_INFO)
        .sample(&[("version", VERSION)], 1_u64);
    page.finish()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use holdfast_engine::model::ObjectName;

    use super::super::{CONTROLLER_FAMILIES, Values};
    use super::*;
    use crate::controller::index::Lives;
    use crate::controller::run::Writes;

    fn now() -> Now {
        Now {
            boot: Boot(100 * Boot::SECOND),
            wall_ms: 1_700_000_100_000,
        }
    }

    fn scrape(figures: &Figures) -> String {
        let stamps = Stamps::default();
        stamps.observe(now());
        render_controller(figures, now(), &stamps)
    }

    #[test]
    fn families_are_as_documented() {
        let dns = ObjectName {
            namespace: "shop".to_owned(),
            name: "dns".to_owned(),
        };
        let text = scrape(&Figures {
            leads: true,
            lives: Lives { live: 3, unknown: 1 },
            laggards: 2,
            behind: vec![(dns, Boot(60 * Boot::SECOND))],
            writes: Writes {
                ok: 7,
                conflict: 1,
                error: 0,
            },
            heard: BTreeMap::from([(Watched::Leases, Boot(99 * Boot::SECOND))]),
            ..Figures::default()
        });
        let exported: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "))
            .collect();
        let listed: Vec<String> = CONTROLLER_FAMILIES
            .iter()
            .map(|family| format!("{} {}", family.name, format!("{:?}", family.kind).to_lowercase()))
            .collect();
        assert_eq!(exported, listed);
        for family in CONTROLLER_FAMILIES {
            for label in family.labels {
                assert!(text.contains(&format!("{}=\"", label.name)), "{}", label.name);
                if let Values::Closed(values) = label.values
                    && family.absent.is_empty()
                {
                    for value in values() {
                        assert!(text.contains(&format!("{}=\"{value}\"", label.name)), "{value}");
                    }
                }
            }
        }
        for line in [
            "holdfast_controller_leader 1",
            "holdfast_controller_nodes{state=\"unknown\"} 1",
            "holdfast_controller_laggards 2",
            "holdfast_controller_status_writes_total{result=\"conflict\"} 1",
            "holdfast_controller_policy_behind_since_timestamp_seconds{namespace=\"shop\",policy=\"dns\"} 1700000060",
            "holdfast_controller_watch_last_activity_timestamp_seconds{watch=\"leases\"} 1700000099",
            "holdfast_time_seconds 1700000100",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }

    #[test]
    fn what_is_not_there_has_no_series() {
        let text = scrape(&Figures::default());
        assert!(text.contains("holdfast_controller_leader 0"), "{text}");
        assert!(!text.contains("policy=") && !text.contains("watch="), "{text}");
    }
}
