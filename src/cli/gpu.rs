//! Which CUDA cards a run is on. Looks at the driver and opens no card.

use crate::card::cuda::{CudaCard, Driver, Fault, driver};
use crate::config::DeviceChoice;
use crate::error::{Error, Kind, Result};
use crate::metrics::nvml;
use crate::metrics::record::{CardInfo, CardKind, Warning};

/// What kind of cards a run is on, and what the reader should know about that.
#[derive(Debug)]
pub(crate) struct Found {
    /// The CUDA cards there are; `None` for virtual cards.
    pub(crate) cuda: Option<Vec<CudaCard>>,
    pub(crate) warnings: Vec<Warning>,
}

/// Looks for CUDA cards where the choice allows them. `libtorch` says whether this build's libtorch has its
/// CUDA half.
pub(crate) fn find(choice: DeviceChoice, libtorch: bool) -> Result<Found> {
    if choice == DeviceChoice::Cpu {
        return Ok(Found { cuda: None, warnings: Vec::new() });
    }
    decide(choice, driver(), libtorch)
}

/// Pure.
fn decide(choice: DeviceChoice, driver: Result<&Driver, Fault>, libtorch: bool) -> Result<Found> {
    let refuse = |what: String, hint: &str| {
        Err(Error::new(Kind::Unavailable, what)
            .hint(format!("{hint}; or use `--device cpu` for virtual cards")))
    };
    let virtual_cards = |warning| Ok(Found { cuda: None, warnings: Vec::from_iter(warning) });
    let wanted = choice == DeviceChoice::Cuda;
    let driver = match driver {
        Ok(driver) => driver,
        Err(fault) if wanted => {
            let error = Error::from(fault);
            let hint = error.advice().unwrap_or_default();
            return refuse(
                format!("run.device is \"cuda\", but no CUDA card can be used here: {error}"),
                hint,
            );
        }
        Err(fault) if fault.is_missing() => return virtual_cards(None),
        // CUDA's "no device": it was told to show none, or there is none.
        Err(fault) => {
            return virtual_cards(Some(Warning {
                code: "no_cuda_card".to_owned(),
                message: format!(
                    "there is a CUDA driver, but no card can be used: {fault}; this run is on virtual cards"
                ),
                hint: Error::from(fault).advice().map(str::to_owned),
            }));
        }
    };
    if driver.scripted {
        let message =
            "the CUDA driver is a scripted one: cards are played by the host, nothing was computed on a GPU";
        let warning = Warning { code: "scripted_driver".to_owned(), message: message.to_owned(), hint: None };
        return Ok(Found { cuda: Some(driver.cards().to_vec()), warnings: vec![warning] });
    }
    if !libtorch {
        let what = "this libtorch is for CPUs only";
        let hint = "run `./setup --full`, which fetches its CUDA half, then build again";
        if wanted {
            return refuse(format!("run.device is \"cuda\", but {what}"), hint);
        }
        return virtual_cards(Some(Warning {
            code: "libtorch_without_cuda".to_owned(),
            message: format!(
                "there are {} CUDA cards, but {what}: this run is on virtual cards",
                driver.cards().len()
            ),
            hint: Some(hint.to_owned()),
        }));
    }
    Ok(Found { cuda: Some(driver.cards().to_vec()), warnings: Vec::new() })
}

/// An error unless NVML can be asked: for runs that are worth nothing unwatched.
pub(crate) fn require_nvml() -> Result<()> {
    let why = match nvml::driver() {
        nvml::Driver::Present { .. } => return Ok(()),
        nvml::Driver::Missing => "it is not here (libnvidia-ml.so.1)".to_owned(),
        nvml::Driver::Broken { error, .. } => error,
    };
    Err(Error::new(Kind::Unavailable, format!("sample.require_nvml is true, but NVML cannot be used: {why}"))
        .hint("`dp-vs-ddp doctor` says what is missing; leave the key out to run without"))
}

/// The cards asked for, in order: by number or the beginning of a UUID; the first `count` where none are named.
pub(crate) fn choose(found: &[CudaCard], named: Option<&[String]>, count: usize) -> Result<Vec<CardInfo>> {
    let chosen: Vec<&CudaCard> = match named {
        Some(names) => names.iter().map(|name| one(found, name)).collect::<Result<_>>()?,
        None if count <= found.len() => found[..count].iter().collect(),
        None => {
            return Err(Error::usage(format!("`run.cards` is {count}, but there {} {}", if found.len() == 1 { "is" } else { "are" }, cards(found.len())))
                .hint("lower --cards, or use `--device cpu` for virtual cards; one card can be used twice by naming its UUID twice in --devices"));
        }
    };
    Ok(chosen.into_iter().enumerate().map(|(index, card)| card_info(index, card)).collect())
}

fn one<'a>(found: &'a [CudaCard], name: &str) -> Result<&'a CudaCard> {
    let fits: Vec<&CudaCard> = match name.parse::<usize>() {
        Ok(ordinal) => found.iter().filter(|card| card.ordinal == ordinal).collect(),
        Err(_) => found.iter().filter(|card| starts_with(&card.uuid, name)).collect(),
    };
    let known: Vec<String> = found.iter().map(|card| format!("{} ({})", card.ordinal, card.uuid)).collect();
    let wrong = |what: String| {
        Err(Error::usage(format!("`run.devices`: \"{name}\" {what}"))
            .hint(format!("cards: {}", known.join(", "))))
    };
    match fits[..] {
        [card] => Ok(card),
        [] => wrong("is no card".to_owned()),
        _ => wrong(format!("is the beginning of {} UUIDs", fits.len())),
    }
}

/// UUIDs are written in either case.
fn starts_with(uuid: &str, beginning: &str) -> bool {
    uuid.get(..beginning.len()).is_some_and(|start| start.eq_ignore_ascii_case(beginning))
}

fn cards(count: usize) -> String {
    format!("{count} CUDA card{}", if count == 1 { "" } else { "s" })
}

fn card_info(index: usize, card: &CudaCard) -> CardInfo {
    CardInfo {
        index,
        kind: CardKind::Cuda,
        name: card.name.clone().unwrap_or_else(|| "CUDA card".to_owned()),
        uuid: card.uuid.clone(),
        memory_bytes: card.memory_bytes,
        cores: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(uuids: &[&str]) -> Vec<CudaCard> {
        let card = |(ordinal, uuid): (usize, &&str)| CudaCard {
            ordinal,
            uuid: (*uuid).to_owned(),
            pci_bus_id: None,
            name: None,
            memory_bytes: None,
            compute_capability: None,
            integrated: None,
        };
        uuids.iter().enumerate().map(card).collect()
    }

    fn chosen(named: &[&str]) -> Result<Vec<String>> {
        let named: Vec<String> = named.iter().map(|name| (*name).to_owned()).collect();
        let cards = choose(&found(&["GPU-8932aa", "GPU-8932bb", "GPU-17ab00"]), Some(&named), named.len())?;
        Ok(cards.into_iter().map(|card| card.uuid).collect())
    }

    // Field cases 083, 085, 086.
    #[test]
    fn cards_are_chosen_by_number_or_unique_beginning_in_the_order_given() {
        assert_eq!(chosen(&["2", "0"]).unwrap(), ["GPU-17ab00", "GPU-8932aa"]);
        assert_eq!(chosen(&["gpu-17", "GPU-8932b"]).unwrap(), ["GPU-17ab00", "GPU-8932bb"]);
        // By name, so it is meant.
        assert_eq!(chosen(&["GPU-17", "GPU-17"]).unwrap(), ["GPU-17ab00", "GPU-17ab00"]);
        let ambiguous = chosen(&["GPU-8932"]).unwrap_err();
        assert_eq!(ambiguous.to_string(), "`run.devices`: \"GPU-8932\" is the beginning of 2 UUIDs");
        assert!(ambiguous.advice().unwrap().contains("1 (GPU-8932bb)"));
        assert_eq!(chosen(&["99"]).unwrap_err().to_string(), "`run.devices`: \"99\" is no card");
        assert_eq!(chosen(&["GPU-9"]).unwrap_err().to_string(), "`run.devices`: \"GPU-9\" is no card");
    }

    #[test]
    fn the_first_cards_are_taken_and_never_more_than_there_are() {
        let found = found(&["GPU-a", "GPU-b"]);
        assert_eq!(choose(&found, None, 1).unwrap().len(), 1);
        let error = choose(&found, None, 3).unwrap_err();
        assert_eq!(error.to_string(), "`run.cards` is 3, but there are 2 CUDA cards");
    }

    #[test]
    fn without_a_driver_auto_is_virtual_and_cuda_is_refused() {
        let none = || Err(Fault { call: "dlopen", code: None, reason: "there is no CUDA driver".into() });
        let auto = decide(DeviceChoice::Auto, none(), true).unwrap();
        assert!(auto.cuda.is_none() && auto.warnings.is_empty());
        let error = decide(DeviceChoice::Cuda, none(), true).unwrap_err();
        assert!(error.to_string().ends_with("no CUDA card can be used here: there is no CUDA driver"));
        assert!(error.advice().unwrap().ends_with("or use `--device cpu` for virtual cards"));
    }

    // Field case 142: figures of the CPU never pass for those of a GPU.
    #[test]
    fn a_libtorch_for_cpus_is_refused_on_cards_and_said_aloud_beside_them() {
        let driver = Driver::of(found(&["GPU-a", "GPU-b"]));
        let error = decide(DeviceChoice::Cuda, Ok(&driver), false).unwrap_err();
        assert_eq!(error.to_string(), "run.device is \"cuda\", but this libtorch is for CPUs only");
        assert!(error.advice().unwrap().contains("./setup --full"));
        let auto = decide(DeviceChoice::Auto, Ok(&driver), false).unwrap();
        assert!(auto.cuda.is_none());
        assert_eq!(auto.warnings[0].code, "libtorch_without_cuda");
        assert!(auto.warnings[0].message.contains("this run is on virtual cards"));
        assert_eq!(decide(DeviceChoice::Auto, Ok(&driver), true).unwrap().cuda.unwrap().len(), 2);
    }

    #[test]
    fn a_driver_that_fails_is_said_aloud() {
        let broken = Err(Fault { call: "cuInit", code: Some(803), reason: "mismatch".into() });
        let auto = decide(DeviceChoice::Auto, broken, true).unwrap();
        assert_eq!(auto.warnings[0].code, "no_cuda_card");
        assert!(auto.warnings[0].message.contains("cuInit failed: mismatch"), "{:?}", auto.warnings);
    }
}
