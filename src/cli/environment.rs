//! The machine and its software, as a record of them. Files the kernel offers, read once at the start.

use super::worker;
use crate::card::available_cores;
use crate::error::Result;
use crate::metrics::nvml::{self, Driver};
use crate::metrics::record::{CardInfo, CardKind, Environment, Software};
use sha2::{Digest, Sha256};

/// What a run is about to run on.
pub(crate) fn describe(cards: &[CardInfo]) -> Result<Environment> {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| cpu_model(&text));
    let cores = available_cores()?.0.len();
    let uuids: Vec<&str> = cards.iter().map(|card| card.uuid.as_str()).collect();
    let links = cards.iter().any(|card| card.kind == CardKind::Cuda).then(|| nvml::links(&uuids)).flatten();
    Ok(Environment {
        fingerprint: fingerprint(cards, links.as_deref(), cpu.as_deref(), cores),
        cards: cards.to_vec(),
        links,
        software: Software {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            libtorch: worker::libtorch_version(),
            ..gpu_software(cards)
        },
        cpu,
        cores,
        os: std::fs::read_to_string("/etc/os-release").ok().and_then(|text| os_name(&text)),
        visible_devices: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
    })
}

/// Versions of what CUDA cards bring along.
fn gpu_software(cards: &[CardInfo]) -> Software {
    if cards.iter().all(|card| card.kind == CardKind::Virtual) {
        return Software::default();
    }
    let libtorch = worker::libtorch_version();
    Software {
        nccl: worker::nccl().ok(),
        driver: match nvml::driver() {
            Driver::Present { version, .. } => version,
            Driver::Missing | Driver::Broken { .. } => None,
        },
        cuda: libtorch.as_deref().and_then(cuda_of),
        ..Software::default()
    }
}

/// The CUDA that a libtorch was built for: `2.11.0+cu130` for 13.0.
fn cuda_of(libtorch: &str) -> Option<String> {
    let digits = libtorch.split_once("+cu")?.1;
    let (major, minor) = digits.split_at_checked(digits.len().checked_sub(1)?)?;
    (!major.is_empty()).then(|| format!("{major}.{minor}"))
}

/// Hash of what a measurement depends on and no update changes: kinds and sizes of the cards, the CPU
/// model and the number of cores, and how the cards are linked. Which cores a card got is chance, and is left out.
fn fingerprint(
    cards: &[CardInfo],
    links: Option<&[Vec<Option<String>>]>,
    cpu: Option<&str>,
    cores: usize,
) -> String {
    let mut hash = Sha256::new();
    for card in cards {
        hash.update(format!("card {:?} {} {:?}\n", card.kind, card.name, card.memory_bytes));
    }
    for row in links.unwrap_or_default() {
        hash.update(format!("links {row:?}\n"));
    }
    hash.update(format!("cpu {}\ncores {cores}\n", cpu.unwrap_or_default()));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `model name` of /proc/cpuinfo; ARM kernels do not tell it.
fn cpu_model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// `PRETTY_NAME` of /etc/os-release.
fn os_name(release: &str) -> Option<String> {
    let value = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(value.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(cores: &str) -> CardInfo {
        CardInfo {
            index: 0,
            kind: CardKind::Virtual,
            name: "virtual card (1 core)".into(),
            uuid: format!("cores:{cores}"),
            memory_bytes: None,
            cores: None,
        }
    }

    #[test]
    fn the_fingerprint_knows_hardware_and_nothing_else() {
        let one = fingerprint(&[card("0")], None, Some("EPYC"), 2);
        assert_eq!(one.len(), 64);
        assert_eq!(one, fingerprint(&[card("1")], None, Some("EPYC"), 2));
        assert_ne!(one, fingerprint(&[card("0"), card("1")], None, Some("EPYC"), 2));
        assert_ne!(one, fingerprint(&[card("0")], None, Some("Xeon"), 2));
        assert_ne!(one, fingerprint(&[card("0")], None, Some("EPYC"), 4));
        let link = |name: &str| vec![vec![Some(name.to_owned())]];
        let linked = |name| fingerprint(&[card("0")], Some(&link(name)), Some("EPYC"), 2);
        assert_ne!(linked("NV4"), linked("SYS"));
    }

    #[test]
    fn a_libtorch_says_its_cuda() {
        assert_eq!(cuda_of("2.11.0+cu130").as_deref(), Some("13.0"));
        assert_eq!(cuda_of("2.9.1+cu128").as_deref(), Some("12.8"));
        assert_eq!((cuda_of("2.11.0+cpu"), cuda_of("2.11.0"), cuda_of("2.11.0+cu")), (None, None, None));
    }

    #[test]
    fn names_are_read_from_the_kernels_files() {
        assert_eq!(cpu_model("processor\t: 0\nmodel name\t: AMD EPYC\n"), Some("AMD EPYC".into()));
        assert_eq!(cpu_model("processor\t: 0\n"), None);
        assert_eq!(
            os_name("NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n"),
            Some("Debian GNU/Linux 12".into())
        );
    }
}
