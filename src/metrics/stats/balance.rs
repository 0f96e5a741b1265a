//! Whether the cards of a run are of one size: what even shares and scaling efficiency take for granted.

use crate::metrics::record::CardInfo;

/// Below this share of the largest card's memory or cores a card counts as smaller; PyTorch's DataParallel
/// warns at the same.
const BALANCED: f64 = 0.75;

/// The worst difference between two cards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Unbalanced {
    /// What they differ in.
    pub resource: Resource,
    /// Index of the card that has least of it.
    pub smallest: usize,
    /// Index of the card that has most of it.
    pub largest: usize,
    /// How much of the largest's the smallest has, below 0.75.
    pub share: f64,
}

/// What cards are compared by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Memory of their own.
    Memory,
    /// Cores.
    Cores,
}

/// The difference that is worth a warning, if there is one; memory first, as it decides what fits at all.
/// What is not known of every card is not compared.
pub fn unbalanced(cards: &[CardInfo]) -> Option<Unbalanced> {
    let memory = |card: &CardInfo| card.memory_bytes.map(|bytes| bytes as f64);
    let cores = |card: &CardInfo| card.cores.as_ref().map(|cores| cores.len() as f64);
    by(cards, Resource::Memory, memory).or_else(|| by(cards, Resource::Cores, cores))
}

fn by(cards: &[CardInfo], resource: Resource, size: impl Fn(&CardInfo) -> Option<f64>) -> Option<Unbalanced> {
    let sizes: Vec<(usize, f64)> =
        cards.iter().map(|card| Some((card.index, size(card)?))).collect::<Option<_>>()?;
    let smallest = sizes.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
    let largest = sizes.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let share = smallest.1 / largest.1;
    (share < BALANCED).then_some(Unbalanced { resource, smallest: smallest.0, largest: largest.0, share })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::record::CardKind;

    fn cards(sizes: &[(Option<u64>, Option<usize>)]) -> Vec<CardInfo> {
        let card = |(index, &(memory_bytes, cores)): (usize, &(Option<u64>, Option<usize>))| CardInfo {
            index,
            kind: if cores.is_some() { CardKind::Virtual } else { CardKind::Cuda },
            name: format!("card {index}"),
            uuid: format!("uuid-{index}"),
            memory_bytes,
            cores: cores.map(|count| (0..count).collect()),
        };
        sizes.iter().enumerate().map(card).collect()
    }

    // Field case 016: a card with 60 % of the other's memory and cores.
    #[test]
    fn a_card_of_less_than_three_quarters_is_named_beside_the_largest() {
        let found = unbalanced(&cards(&[(Some(48), Some(6)), (Some(80), Some(10)), (Some(79), Some(9))]));
        let expected = Unbalanced { resource: Resource::Memory, smallest: 0, largest: 1, share: 0.6 };
        assert_eq!(found, Some(expected));
        let virtual_cards = unbalanced(&cards(&[(None, Some(4)), (None, Some(2))]));
        let expected = Unbalanced { resource: Resource::Cores, smallest: 1, largest: 0, share: 0.5 };
        assert_eq!(virtual_cards, Some(expected));
    }

    #[test]
    fn three_quarters_is_balanced_and_what_is_not_known_is_not_compared() {
        assert_eq!(unbalanced(&cards(&[(Some(60), None), (Some(80), None)])), None);
        assert_eq!(unbalanced(&cards(&[(Some(8), None), (None, None)])), None);
        assert_eq!(unbalanced(&cards(&[(None, Some(1)), (None, Some(1))])), None);
        assert_eq!(unbalanced(&cards(&[(Some(8), None)])), None);
        assert_eq!(unbalanced(&[]), None);
    }
}
