//! `CUDA_VISIBLE_DEVICES`, read as the driver reads it. Pure.
//!
//! The driver is asked for what it shows; this tells people why it shows that: which entry named which card,
//! and where the driver stopped reading.

use serde::Serialize;

/// A card of the machine, in CUDA's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Physical {
    /// `GPU-...`.
    pub uuid: String,
    /// Its slices, if it is cut into some.
    pub slices: Vec<Slice>,
}

/// A slice of a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// `MIG-...`.
    pub uuid: String,
    /// GPU instance and compute instance, where known: the older name is made of them.
    pub instances: Option<(u32, u32)>,
}

/// What one entry named: a card by its place in CUDA's order, or a slice of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Named {
    /// A whole card.
    Card(usize),
    /// A slice: card, and place among its slices.
    Slice(usize, usize),
}

/// How the driver reads the variable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Visible {
    /// Logical `cuda:i` by position.
    pub devices: Vec<Named>,
    /// Why it is not all of what was written; `None` if it is.
    pub cut: Option<String>,
}

/// What a value of the variable makes visible. Unset shows all; an entry that names no card, or several, ends
/// the list; a card that is named twice hides all; of slices only the first counts, as CUDA shows one.
pub fn visible(variable: Option<&str>, cards: &[Physical]) -> Visible {
    let Some(list) = variable else {
        return Visible { devices: (0..cards.len()).map(Named::Card).collect(), cut: None };
    };
    if list.trim().is_empty() {
        return Visible { devices: Vec::new(), cut: Some("it is empty, which hides all cards".to_owned()) };
    }
    let mut devices: Vec<Named> = Vec::new();
    for (position, entry) in list.split(',').map(str::trim).enumerate() {
        let at = || format!("entry {} (`{entry}`)", position + 1);
        let named = match named(entry, cards) {
            Ok(named) => named,
            Err(why) => {
                let rest = if position == 0 { "so no card is visible" } else { "what follows is not read" };
                return Visible { devices, cut: Some(format!("{} {why}: {rest}", at())) };
            }
        };
        if devices.contains(&named) {
            let cut = Some(format!("{} names a card again, which hides all cards", at()));
            return Visible { devices: Vec::new(), cut };
        }
        let slice = |named: &Named| matches!(named, Named::Slice(..));
        if !devices.is_empty() && (slice(&named) || devices.iter().any(slice)) {
            return Visible {
                devices,
                cut: Some(format!("{} is beyond the one slice that CUDA shows", at())),
            };
        }
        devices.push(named);
    }
    Visible { devices, cut: None }
}

/// The one card or slice that an entry names.
fn named(entry: &str, cards: &[Physical]) -> Result<Named, String> {
    if entry.is_empty() {
        return Err("is empty".to_owned());
    }
    if let Ok(index) = entry.parse::<i64>() {
        return usize::try_from(index)
            .ok()
            .filter(|index| *index < cards.len())
            .map(Named::Card)
            .ok_or_else(|| "is no card's number".to_owned());
    }
    if let Some(rest) = entry.strip_prefix("MIG-") {
        // The older name: of the card, then of its instances.
        if let [uuid, gpu, compute] = rest.split('/').collect::<Vec<_>>()[..] {
            let instances = gpu.parse().ok().zip(compute.parse().ok());
            let Some(card) = cards.iter().position(|card| card.uuid == uuid).filter(|_| instances.is_some())
            else {
                return Err("is no slice".to_owned());
            };
            let slices = &cards[card].slices;
            if slices.iter().any(|slice| slice.instances.is_none()) {
                return Err("is a slice's older name, which cannot be looked up here".to_owned());
            }
            let place = slices.iter().position(|slice| slice.instances == instances);
            return place.map(|place| Named::Slice(card, place)).ok_or_else(|| "is no slice".to_owned());
        }
        let slices = cards.iter().enumerate().flat_map(|(card, physical)| {
            physical
                .slices
                .iter()
                .enumerate()
                .map(move |(place, slice)| (Named::Slice(card, place), &slice.uuid))
        });
        return only(
            slices.filter(|(_, uuid)| uuid.starts_with(entry)).map(|(named, _)| named).collect(),
            "slice",
        );
    }
    if entry.starts_with("GPU-") && entry.len() > 4 {
        let fits = cards.iter().enumerate().filter(|(_, card)| card.uuid.starts_with(entry));
        return only(fits.map(|(index, _)| Named::Card(index)).collect(), "card");
    }
    Err("is neither a number nor a UUID".to_owned())
}

fn only(found: Vec<Named>, what: &str) -> Result<Named, String> {
    match found[..] {
        [one] => Ok(one),
        [] => Err(format!("is no {what}")),
        _ => Err(format!("is the beginning of {} {what}s' UUIDs", found.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cards() -> Vec<Physical> {
        let card = |uuid: &str| Physical { uuid: uuid.to_owned(), slices: Vec::new() };
        let mut cards = vec![card("GPU-8932aa"), card("GPU-8932bb"), card("GPU-17ab00"), card("GPU-ff0011")];
        let slice = |uuid: &str, instances| Slice { uuid: uuid.to_owned(), instances: Some(instances) };
        cards[3].slices = vec![slice("MIG-aaaa", (1, 0)), slice("MIG-aabb", (2, 0))];
        cards
    }

    fn shown(variable: &str) -> Vec<usize> {
        let devices = visible(Some(variable), &cards()).devices.into_iter();
        devices.map(|named| if let Named::Card(card) = named { card } else { panic!("{named:?}") }).collect()
    }

    fn why(variable: &str) -> String {
        visible(Some(variable), &cards()).cut.unwrap_or_default()
    }

    // Field cases 082, 085.
    #[test]
    fn order_is_kept_and_the_first_bad_entry_ends_the_list() {
        assert_eq!(visible(None, &cards()).devices.len(), 4);
        assert_eq!(shown("1,0"), [1, 0]);
        assert_eq!(shown("3,1"), [3, 1]);
        assert_eq!(shown("3,2,9,1"), [3, 2]);
        assert_eq!(why("3,2,9,1"), "entry 3 (`9`) is no card's number: what follows is not read");
        assert_eq!(shown("0,2,-1,1"), [0, 2]);
        assert_eq!(shown(" 2 , 0"), [2, 0]);
        assert_eq!(shown("2,"), [2]);
        assert_eq!(why("2,"), "entry 2 (`') is empty: what follows is not read".replace("`'", "``"));
    }

    #[test]
    fn nothing_is_visible_where_nothing_is_meant() {
        for hidden in ["", " ", "-1", "none", "NoDevFiles", "x,0", "99"] {
            assert_eq!(shown(hidden), [0usize; 0], "{hidden}");
            assert!(!why(hidden).is_empty(), "{hidden}");
        }
        assert_eq!(shown("0,1,0"), [0usize; 0]);
        assert_eq!(why("0,1,0"), "entry 3 (`0`) names a card again, which hides all cards");
    }

    // Field case 086.
    #[test]
    fn a_beginning_names_a_card_if_it_is_one_cards_only() {
        assert_eq!(shown("GPU-17"), [2]);
        assert_eq!(shown("GPU-8932b,GPU-8932a"), [1, 0]);
        assert_eq!(shown("0,GPU-8932"), [0]);
        assert_eq!(
            why("GPU-8932"),
            "entry 1 (`GPU-8932`) is the beginning of 2 cards' UUIDs: so no card is visible"
        );
        assert_eq!(why("GPU-9"), "entry 1 (`GPU-9`) is no card: so no card is visible");
        assert!(why("GPU-").contains("neither a number nor a UUID"));
    }

    // Field case 080.
    #[test]
    fn slices_have_two_names_and_one_is_shown() {
        let of = |variable: &str| visible(Some(variable), &cards());
        assert_eq!(of("MIG-aaaa").devices, [Named::Slice(3, 0)]);
        assert_eq!(of("MIG-GPU-ff0011/2/0").devices, [Named::Slice(3, 1)]);
        assert_eq!(of("MIG-GPU-ff0011/9/0").devices, []);
        assert_eq!(of("MIG-aa").devices, []);
        let two = of("MIG-aaaa,MIG-aabb");
        assert_eq!(two.devices, [Named::Slice(3, 0)]);
        assert!(two.cut.unwrap().contains("the one slice that CUDA shows"));
    }
}
