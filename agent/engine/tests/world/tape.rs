//! Where choices come from: a seed, or bytes that somebody else chose (a file, a fuzzer).

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A source of choices that gives the same ones every time.
pub(crate) enum Tape<'a> {
    Seed(Box<ChaCha8Rng>),
    /// When they are used up, every choice is the first.
    Bytes(std::slice::Iter<'a, u8>),
}

impl<'a> Tape<'a> {
    pub(crate) fn from_seed(seed: u64) -> Self {
        Self::Seed(Box::new(ChaCha8Rng::seed_from_u64(seed)))
    }

    pub(crate) fn from_bytes(bytes: &'a [u8]) -> Self {
        Self::Bytes(bytes.iter())
    }

    /// A number below `count` (0 if that is 0).
    pub(crate) fn below(&mut self, count: u32) -> u32 {
        if count < 2 {
            return 0;
        }
        let choice = match self {
            Self::Seed(random) => random.next_u32(),
            Self::Bytes(bytes) => {
                let mut choice = 0_u32;
                let mut range = 1_u64;
                while range < u64::from(count) {
                    choice = choice << 8 | u32::from(bytes.next().copied().unwrap_or(0));
                    range <<= 8;
                }
                choice
            }
        };
        (u64::from(choice) % u64::from(count)) as u32
    }

    /// True once in `count` times.
    pub(crate) fn one_in(&mut self, count: u32) -> bool {
        self.below(count) == count.saturating_sub(1)
    }

    pub(crate) fn pick<'b, T>(&mut self, choices: &'b [T]) -> &'b T {
        &choices[self.below(choices.len() as u32) as usize]
    }

    /// An index, as often as its weight says.
    pub(crate) fn weighted(&mut self, weights: &[u32]) -> usize {
        let mut choice = self.below(weights.iter().sum());
        for (index, weight) in weights.iter().enumerate() {
            if choice < *weight {
                return index;
            }
            choice -= weight;
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_choose() {
        let mut tape = Tape::from_bytes(&[7, 1, 2]);
        assert_eq!(tape.below(5), 2);
        assert_eq!(tape.below(1000), (1 << 8) | 2);
        assert_eq!(tape.below(9), 0);
        assert_eq!(Tape::from_bytes(&[3]).weighted(&[2, 0, 2]), 2);
    }

    #[test]
    fn a_seed_chooses_the_same_every_time() {
        let choices = |seed| {
            let mut tape = Tape::from_seed(seed);
            (0..32).map(|_| tape.below(1000)).collect::<Vec<u32>>()
        };
        assert_eq!(choices(5), choices(5));
        assert_ne!(choices(5), choices(6));
    }
}
