//! Just enough of ELF to see that the object holds what the agent needs.

use anyhow::{Context, bail};

/// Names and sizes of the sections of a 64-bit little-endian ELF file.
pub(crate) fn sections(file: &[u8]) -> anyhow::Result<Vec<(String, u64)>> {
    // e_ident: magic, class 2 = 64 bit, data 1 = little endian.
    if file.get(..6) != Some(&[0x7f, b'E', b'L', b'F', 2, 1]) {
        bail!("not a 64-bit little-endian ELF file");
    }
    let table = usize::try_from(u64_at(file, 0x28)?)?;
    let entry_size = usize::from(u16_at(file, 0x3a)?);
    let count = usize::from(u16_at(file, 0x3c)?);
    let names_index = usize::from(u16_at(file, 0x3e)?);
    let header = |index: usize| table + index * entry_size;
    let names_at = usize::try_from(u64_at(file, header(names_index) + 0x18)?)?;
    (0..count)
        .map(|index| {
            let name_at = names_at + usize::try_from(u32_at(file, header(index))?)?;
            let name: Vec<u8> = file
                .get(name_at..)
                .context("a section name lies outside the file")?
                .iter()
                .copied()
                .take_while(|byte| *byte != 0)
                .collect();
            let size = u64_at(file, header(index) + 0x20)?;
            Ok((String::from_utf8_lossy(&name).into_owned(), size))
        })
        .collect()
}

fn bytes<const N: usize>(file: &[u8], at: usize) -> anyhow::Result<[u8; N]> {
    file.get(at..at + N)
        .and_then(|slice| slice.try_into().ok())
        .context("the ELF file is cut off")
}

fn u16_at(file: &[u8], at: usize) -> anyhow::Result<u16> {
    Ok(u16::from_le_bytes(bytes(file, at)?))
}

fn u32_at(file: &[u8], at: usize) -> anyhow::Result<u32> {
    Ok(u32::from_le_bytes(bytes(file, at)?))
}

fn u64_at(file: &[u8], at: usize) -> anyhow::Result<u64> {
    Ok(u64::from_le_bytes(bytes(file, at)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_of_this_test_program() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let sections = sections(&file).unwrap();
        let text = sections.iter().find(|(name, _)| name == ".text").unwrap();
        assert!(text.1 > 0);
    }

    #[test]
    fn other_files_are_refused() {
        assert!(sections(b"#!/bin/sh").is_err());
        assert!(sections(&[0x7f, b'E', b'L', b'F', 2, 1, 1, 0]).is_err());
    }
}
