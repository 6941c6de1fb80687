//! `holdfast crds`.

use super::{Answer, output};
use crate::api::crd;

/// Flags of `holdfast crds`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Example:
  holdfast crds | kubectl apply -f -")]
pub struct Args {}

pub(super) fn run(_: &Args) -> Answer {
    let documents: Result<Vec<String>, _> = crd::all().iter().map(crd::Definition::yaml).collect();
    match documents {
        Ok(documents) => {
            output::print(&documents.join("---\n"));
            Answer::Yes
        }
        Err(error) => {
            output::complain(&error);
            Answer::Unknown
        }
    }
}
