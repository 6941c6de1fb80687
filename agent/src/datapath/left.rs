//! What is in the pins, for whoever asks while no agent runs. Reads everything, changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use holdfast_engine::model::{Adoption, Ifindex};

use super::adopt;
use super::attach::{Hook, Links};
use super::maps::Maps;
use super::pins::Pins;
use super::{DatapathError, pins};
use crate::netlink::tc;
use crate::registry::{Listed, Registry, RegistryError};

/// What an agent has left.
#[derive(Clone, Debug, Default)]
pub struct Left {
    /// What the maps hold.
    pub maps: Adoption,
    /// Our program at each device that had it: its id, or why it is not there.
    pub programs: BTreeMap<Ifindex, Result<u32, String>>,
    /// Whom packets meet before it.
    pub before: BTreeMap<Ifindex, Vec<String>>,
    /// The registry.
    pub registry: Vec<Listed>,
}

impl Left {
    /// Reads it; none if no agent has pinned anything of this layout.
    ///
    /// # Errors
    /// When a pin cannot be read.
    pub fn read(bpffs_dir: &Path, run_dir: &Path) -> Result<Option<Self>, DatapathError> {
        let pins = Pins::new(bpffs_dir);
        let Some(maps) = Maps::existing(&pins)? else {
            return Ok(None);
        };
        let registry = match Registry::open(bpffs_dir, run_dir).and_then(|registry| registry.list()) {
            Ok(rows) => rows,
            Err(RegistryError::Missing { .. }) => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        let mut left = Self {
            registry,
            ..Self::default()
        };
        // Of both hooks: who reads cannot know which one the agent has chosen.
        let links = Links::new(pins.clone(), Hook::Tcx);
        for ifindex in devices(&pins)? {
            match links.inspect(ifindex) {
                Ok(found) => {
                    let before = found.before.iter().map(ToString::to_string).collect();
                    left.before.insert(ifindex, before);
                    left.programs.insert(ifindex, found.program);
                }
                Err(error) => drop(left.programs.insert(ifindex, Err(error.to_string()))),
            }
        }
        let attached: BTreeSet<Ifindex> = left
            .programs
            .iter()
            .filter(|(_, program)| program.is_ok())
            .map(|(ifindex, _)| *ifindex)
            .collect();
        left.maps = adopt::read(&maps, attached)?.0;
        Ok(Some(left))
    }
}

/// Devices with a pinned link, and those with a filter of ours.
fn devices(pins: &Pins) -> Result<BTreeSet<Ifindex>, DatapathError> {
    let links = if pins.links().is_dir() {
        pins.link_names()?
    } else {
        Vec::new()
    };
    let mut devices: BTreeSet<Ifindex> = links.iter().filter_map(|name| name.parse().ok()).collect();
    for ifindex in tc::hooked()? {
        // One that goes meanwhile has none.
        if super::filter::look(ifindex).is_ok_and(|hooked| hooked.ours.is_some()) {
            devices.insert(ifindex);
        }
    }
    Ok(devices)
}

impl Maps {
    /// The maps that are pinned; none if some are not.
    fn existing(pins: &Pins) -> Result<Option<Self>, DatapathError> {
        let layouts = pins::layout(&pins::Sizes::default());
        let all = layouts.iter().chain([&pins::EPOCH_LAYOUT]);
        for layout in all {
            if layout.open(&pins.map(layout.name))?.is_none() {
                return Ok(None);
            }
        }
        Self::open(&layouts, |layout| {
            let found = layout.open(&pins.map(layout.name))?;
            found.ok_or(DatapathError::MapNotInObject { name: layout.name })
        })
        .map(Some)
    }
}
