//! Everything that is hashed with SHA-256.

use holdfast_engine::model::{Covers, Hashes, Incarnation, NameHash, ObjectName, Uid, UidHash};
use sha2::{Digest, Sha256};

/// SHA-256 of `bytes`.
#[must_use]
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// The hashes that the engine needs.
#[must_use]
pub fn hashes() -> Hashes {
    Hashes {
        name: name_hash,
        uid: uid_hash,
    }
}

/// First 8 bytes, big endian, of SHA-256 of `namespace/name`; never 0, which marks a free slot.
#[must_use]
pub fn name_hash(name: &ObjectName) -> NameHash {
    NameHash(first_eight(&sha256(name.to_string().as_bytes())).max(1))
}

/// First 16 bytes of SHA-256 of a uid.
#[must_use]
pub fn uid_hash(uid: &Uid) -> UidHash {
    UidHash(first_sixteen(&sha256(uid.0.as_bytes())))
}

/// What stands for an identity string in the registry: the first 16 bytes of its SHA-256.
#[must_use]
pub fn incarnation(identity: &str) -> Incarnation {
    Incarnation(first_sixteen(&sha256(identity.as_bytes())))
}

/// What an attachment adds to the `covers` of the policies that select it: a sum over these says which
/// attachments, at which generations, went into an acknowledgment.
#[must_use]
pub fn covers(uid: &Uid, generation: u64) -> Covers {
    let summand = |role: char| first_eight(&sha256(format!("{role}/{uid}/{generation}").as_bytes()));
    Covers {
        consumer: summand('c'),
        producer: summand('p'),
    }
}

fn first_eight(digest: &[u8; 32]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *digest;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

fn first_sixteen(digest: &[u8; 32]) -> [u8; 16] {
    let mut first = [0; 16];
    first.copy_from_slice(&digest[..16]);
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expected values by `printf '%s' TEXT | sha256sum`.

    #[test]
    fn covers_are_the_first_eight_bytes_of_role_uid_generation() {
        let covers = covers(&Uid("u1".to_owned()), 7);
        assert_eq!(format!("{:016x}", covers.consumer), "814f797c4a2da2a9");
        assert_eq!(format!("{:016x}", covers.producer), "6d5e74d744cee992");
    }

    #[test]
    fn an_identity_is_the_first_sixteen_bytes() {
        assert_eq!(
            incarnation("pod-1").0.map(|byte| format!("{byte:02x}")).concat(),
            "0f066824e0c3c4bd6d80f4c182769fa0"
        );
    }

    #[test]
    fn a_name_is_hashed_as_people_write_it() {
        let name = ObjectName {
            namespace: "shop".to_owned(),
            name: "dns".to_owned(),
        };
        assert_eq!(format!("{:016x}", name_hash(&name).0), "5658767d0301ca3d");
    }
}
