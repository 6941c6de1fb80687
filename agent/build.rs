//! Makes the BPF object known to `src/datapath/object.rs`, if it has been built.
//!
//! It is `$HOLDFAST_BPF_OBJECT`, else `bpf/classifier` in cargo's target directory, where `cargo xtask build-ebpf`
//! puts it. Without it the agent builds all the same, and says at run time what is missing.
#![allow(clippy::print_stdout, reason = "this is how a build script speaks to cargo")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rustc-check-cfg=cfg(bpf_object)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=HOLDFAST_BPF_OBJECT");

    let out_dir = PathBuf::from(env::var("OUT_DIR")?);
    let object = match env::var_os("HOLDFAST_BPF_OBJECT") {
        Some(path) => PathBuf::from(path),
        None => target_dir(&out_dir)?.join("bpf").join("classifier"),
    };
    watch(&object)?;
    if object.is_file() {
        // A copy, so that what is embedded is what cargo saw when it decided to build.
        fs::copy(&object, out_dir.join("classifier"))?;
        println!("cargo::rustc-cfg=bpf_object");
    }
    Ok(())
}

/// Cargo's target directory: OUT_DIR is `<target>/[<triple>/]<profile>/build/<package>/out`.
fn target_dir(out_dir: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let above_profile = out_dir
        .ancestors()
        .nth(4)
        .ok_or("OUT_DIR is not below a target directory")?;
    let triple = env::var("TARGET")?;
    let dir = if above_profile.ends_with(&triple) {
        above_profile
            .parent()
            .ok_or("the target directory has no parent")?
    } else {
        above_profile
    };
    Ok(dir.to_path_buf())
}

/// Runs this script again when the object comes, changes or goes.
fn watch(object: &Path) -> Result<(), Box<dyn Error>> {
    if object.is_file() {
        println!("cargo::rerun-if-changed={}", object.display());
        return Ok(());
    }
    // Cargo takes a path that is missing for one that has changed, and would build the agent anew each time. The
    // directory changes when the object is put there; it holds nothing else.
    let dir = object.parent().ok_or("the object has no directory")?;
    fs::create_dir_all(dir)?;
    println!("cargo::rerun-if-changed={}", dir.display());
    Ok(())
}
