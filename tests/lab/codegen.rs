//! Files of the repository that are written from the code.

use std::path::{Path, PathBuf};

use anyhow::Context;
use holdfast::api::crd;
use holdfast::cli::fields;
use holdfast::serve::metrics;

use crate::alerts::{Alerts, Pace};

/// A file that is written from the code.
#[derive(Clone, Debug)]
pub struct Generated {
    /// Where it is, from the root of the repository.
    pub path: String,
    /// What it says.
    pub text: String,
}

/// All of them.
///
/// # Errors
/// When a source of one makes no sense.
pub fn files() -> anyhow::Result<Vec<Generated>> {
    let alerts = Alerts::read()?;
    let mut files = vec![
        Generated {
            path: "deploy/monitoring/METRICS.md".to_owned(),
            text: metrics::document(),
        },
        Generated {
            path: "agent/JSON.md".to_owned(),
            text: fields::document(),
        },
        Generated {
            path: "deploy/monitoring/rules/holdfast.yaml".to_owned(),
            text: alerts.rules(Pace::SHIPPED)?,
        },
        Generated {
            path: "deploy/monitoring/rules/prometheusrule.yaml".to_owned(),
            text: alerts.object(Pace::SHIPPED)?,
        },
    ];
    for definition in crd::all() {
        let text = definition.yaml()?;
        files.push(Generated {
            path: format!("deploy/crds/{}.yaml", definition.plural),
            text: format!("# Written by `cargo xtask codegen` from agent/src/api. Do not edit.\n{text}"),
        });
    }
    Ok(files)
}

/// A path of the repository.
#[must_use]
pub fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Writes those that are not current; says which.
///
/// # Errors
/// When one cannot be written.
pub fn write() -> anyhow::Result<Vec<String>> {
    let stale = files()?.into_iter().filter(|file| !is_current(file));
    stale
        .map(|file| {
            let path = in_repository(&file.path);
            path.parent()
                .map_or(Ok(()), std::fs::create_dir_all)
                .and_then(|()| std::fs::write(&path, &file.text))
                .with_context(|| format!("cannot write {}", path.display()))?;
            Ok(file.path)
        })
        .collect()
}

/// Those that are not current.
///
/// # Errors
/// When a source of one makes no sense.
pub fn stale() -> anyhow::Result<Vec<String>> {
    let stale = files()?.into_iter().filter(|file| !is_current(file));
    Ok(stale.map(|file| file.path).collect())
}

fn is_current(file: &Generated) -> bool {
    std::fs::read_to_string(in_repository(&file.path)).is_ok_and(|text| text == file.text)
}
