//! What NCCL would fail at with a terse code, or hang on, found out before it is asked. Pure.

use crate::error::{Error, Kind, Result};

/// Where a rank computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// `GPU-...` or `MIG-...`.
    pub(super) uuid: String,
    /// The bus id of the whole card; empty where it is not known.
    pub(super) bus: String,
}

impl Place {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        format!("{}\n{}", self.uuid, self.bus).into_bytes()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let (uuid, bus) = text.split_once('\n').unwrap_or((&text, ""));
        Self { uuid: uuid.to_owned(), bus: bus.to_owned() }
    }
}

/// Every rank needs a card of its own; slices of one card do not count as several.
pub(super) fn one_card_each(places: &[Place]) -> Result<()> {
    let who = || {
        let each = places.iter().enumerate().map(|(rank, place)| format!("rank {rank}: {}", place.uuid));
        each.collect::<Vec<_>>().join(", ")
    };
    for (rank, place) in places.iter().enumerate() {
        for (other, before) in places[..rank].iter().enumerate() {
            if before.uuid == place.uuid {
                return Err(Error::new(
                    Kind::Usage,
                    format!("ranks {other} and {rank} are on one card, which NCCL cannot do ({})", who()),
                )
                .hint(
                    "give every rank a card of its own: check LOCAL_RANK and CUDA_VISIBLE_DEVICES of each",
                ));
            }
            let slices = place.uuid.starts_with("MIG-") && !place.bus.is_empty();
            if slices && before.bus == place.bus {
                return Err(Error::new(
                    Kind::Unavailable,
                    format!(
                        "ranks {other} and {rank} are on slices of one card ({}), between which NCCL cannot send ({})",
                        place.bus,
                        who()
                    ),
                )
                .hint("use whole cards for ddp, or a slice of another card for each rank"));
            }
        }
    }
    Ok(())
}

/// An error if `NCCL_SOCKET_IFNAME` leaves none of these interfaces. Read as NCCL reads it: beginnings of names
/// with commas between; `^` in front means all but these, `=` means whole names.
pub(super) fn interface(variable: Option<&str>, interfaces: &[String]) -> Result<()> {
    let Some(wanted) = variable.map(str::trim).filter(|wanted| !wanted.is_empty()) else { return Ok(()) };
    let (except, rest) = wanted.strip_prefix('^').map_or((false, wanted), |rest| (true, rest));
    let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
    let listed = |name: &String| {
        rest.split(',').any(|entry| if exact { name == entry } else { name.starts_with(entry) })
    };
    if interfaces.is_empty() || interfaces.iter().any(|name| listed(name) != except) {
        return Ok(());
    }
    Err(Error::new(
        Kind::Usage,
        format!(
            "NCCL_SOCKET_IFNAME={wanted} fits none of this machine's interfaces: {}",
            interfaces.join(", ")
        ),
    )
    .hint("unset it: ranks of one host find each other by themselves"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(uuid: &str, bus: &str) -> Place {
        Place { uuid: uuid.to_owned(), bus: bus.to_owned() }
    }

    // Field case 046.
    #[test]
    fn two_ranks_on_one_card_are_named_with_all_others() {
        let places = [place("GPU-a", "1"), place("GPU-b", "2"), place("GPU-a", "1")];
        let error = one_card_each(&places).unwrap_err().to_string();
        assert_eq!(
            error,
            "ranks 0 and 2 are on one card, which NCCL cannot do (rank 0: GPU-a, rank 1: GPU-b, rank 2: GPU-a)"
        );
        one_card_each(&places[..2]).unwrap();
        assert_eq!(Place::from_bytes(&places[0].to_bytes()), places[0]);
    }

    // Field case 065.
    #[test]
    fn slices_of_one_card_are_refused_as_what_they_are() {
        let error = one_card_each(&[place("MIG-a", "3b"), place("MIG-b", "3b")]).unwrap_err().to_string();
        assert!(error.starts_with("ranks 0 and 1 are on slices of one card (3b)"), "{error}");
        one_card_each(&[place("MIG-a", "3b"), place("MIG-b", "5e")]).unwrap();
    }

    // Field case 175.
    #[test]
    fn an_interface_that_is_not_there_is_refused_with_those_that_are() {
        let there = ["lo".to_owned(), "eth0".to_owned()];
        for fine in ["", "eth", "=eth0", "^lo", "nosuch0,lo", "^docker"] {
            interface(Some(fine), &there).unwrap_or_else(|error| panic!("{fine}: {error}"));
        }
        interface(None, &there).unwrap();
        for wrong in ["nosuch0", "=eth", "^lo,eth"] {
            let error = interface(Some(wrong), &there).unwrap_err().to_string();
            assert!(error.ends_with("fits none of this machine's interfaces: lo, eth0"), "{error}");
        }
    }
}
