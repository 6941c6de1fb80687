//! Internet checksums, as a receiver makes them.

use std::ops::Range;

use anyhow::ensure;

/// Of words in network order; an odd byte is padded.
fn sum(bytes: &[u8]) -> u32 {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)])));
    let mut sum: u32 = words.sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

/// A checksum of a frame: what it covers besides the pseudo-header, its place, and the sum of the pseudo-header.
struct Covered {
    range: Range<usize>,
    at: usize,
    pseudo: u32,
}

/// Every checksum of a frame, the transport's last. No extension headers, no fragments.
fn covered(frame: &[u8]) -> Vec<Covered> {
    let mut found = Vec::new();
    let (protocol, transport, addresses, length) = if frame[12..14] == [0x08, 0x00] {
        let header = usize::from(frame[14] & 0xf) * 4;
        found.push(Covered {
            range: 14..14 + header,
            at: 24,
            pseudo: 0,
        });
        let total = usize::from(u16::from_be_bytes([frame[16], frame[17]]));
        (frame[23], 14 + header, 26..34, total - header)
    } else {
        (
            frame[20],
            54,
            22..54,
            usize::from(u16::from_be_bytes([frame[18], frame[19]])),
        )
    };
    let at = match protocol {
        6 => 16,
        17 => 6,
        1 | 58 => 2,
        _ => return found,
    };
    let pseudo = if protocol == 1 {
        0
    } else {
        sum(&frame[addresses]) + length as u32 + u32::from(protocol)
    };
    found.push(Covered {
        range: transport..transport + length,
        at: transport + at,
        pseudo,
    });
    found
}

/// Makes every checksum of a frame.
pub(crate) fn fill(frame: &mut [u8]) {
    for Covered { range, at, pseudo } in covered(frame) {
        frame[at..at + 2].fill(0);
        let mut total = sum(&frame[range]) + pseudo;
        while total >> 16 != 0 {
            total = (total & 0xffff) + (total >> 16);
        }
        let value = match !(total as u16) {
            0 => 0xffff,
            value => value,
        };
        frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
    }
}

/// Checks every checksum of a frame.
pub(crate) fn check(frame: &[u8]) -> anyhow::Result<()> {
    for Covered { range, at, pseudo } in covered(frame) {
        let mut total = sum(&frame[range]) + pseudo;
        while total >> 16 != 0 {
            total = (total & 0xffff) + (total >> 16);
        }
        ensure!(total == 0xffff, "the checksum at {at} is wrong: {frame:02x?}");
    }
    Ok(())
}

/// The checksum that a device makes over a range that has a field in it.
pub(crate) fn of_range(frame: &[u8], range: Range<usize>) -> [u8; 2] {
    (!(sum(&frame[range]) as u16)).to_be_bytes()
}
