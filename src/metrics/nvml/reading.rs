//! One reading of one card, and what is believed of it. Pure.
//!
//! Drivers answer with marks for "not available" (all bits set), with counters that were reset, and with
//! numbers that cannot be. Such a value is missing, and counted; it is never made to fit.

use super::ledger::Missing;
use crate::units::Nanos;
use std::collections::BTreeMap;

/// What NVML said of one card at one moment. Every field stands alone.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    /// Share of time in which some kernel ran, lately (the driver averages).
    pub utilisation_percent: Option<f64>,
    /// Share of time in which memory was read or written.
    pub memory_controller_percent: Option<f64>,
    /// Bytes in use.
    pub memory_used_bytes: Option<u64>,
    /// Bytes there are.
    pub memory_total_bytes: Option<u64>,
    /// Power draw.
    pub power_mw: Option<u64>,
    /// Energy since the driver was loaded.
    pub energy_mj: Option<u64>,
    /// Of the chip.
    pub temperature_c: Option<u64>,
    /// Of the multiprocessors.
    pub sm_clock_mhz: Option<u64>,
    /// Of the memory.
    pub memory_clock_mhz: Option<u64>,
    /// Why clocks are lower than they could be, with `|` between; `none` where they are not.
    pub throttle: Option<String>,
    /// From the host.
    pub pcie_rx_kb_s: Option<u64>,
    /// To the host.
    pub pcie_tx_kb_s: Option<u64>,
    /// From other cards.
    pub nvlink_rx_kb_s: Option<u64>,
    /// To other cards.
    pub nvlink_tx_kb_s: Option<u64>,
    /// Share of multiprocessors with work, over time (GPM).
    pub sm_activity_percent: Option<f64>,
    /// Share of resident warps, over time (GPM).
    pub sm_occupancy_percent: Option<f64>,
    /// Bytes of this run's processes.
    pub process_memory_bytes: Option<u64>,
    /// Utilisation by this run's processes.
    pub process_utilisation_percent: Option<f64>,
    /// Bytes of other processes.
    pub foreign_memory_bytes: Option<u64>,
}

/// A share of 100.
pub(super) fn percent(value: f64) -> Result<f64, Missing> {
    if (0.0..=100.0).contains(&value) {
        Ok(value)
    } else {
        Err(Missing::Rejected("outside of 0 to 100 %".to_owned()))
    }
}

/// A quantity that is below some bound on any machine, and not the mark for "not available".
pub(super) fn below(value: u64, bound: u64, unit: &str) -> Result<u64, Missing> {
    match value {
        _ if value >= u64::from(u32::MAX) && [u64::from(u32::MAX), u64::MAX].contains(&value) => {
            Err(Missing::Rejected("marked as not available".to_owned()))
        }
        _ if value >= bound => Err(Missing::Rejected(format!("more {unit} than can be"))),
        _ => Ok(value),
    }
}

/// Bytes used of a total; `None` as total where the card has no memory of its own.
pub(super) fn memory(used: u64, total: u64) -> Result<(u64, u64), Missing> {
    const MOST: u64 = 1 << 50;
    match (used, total) {
        (_, 0) => Err(Missing::Failed("the card has no memory of its own (its total is 0)".to_owned())),
        // The numbers are not repeated: they may be 2^64 less a little.
        (used, total) if used > total || total > MOST => {
            Err(Missing::Rejected("more bytes are in use than there can be".to_owned()))
        }
        both => Ok(both),
    }
}

/// A counter that only grows.
pub(super) fn growing(last: Option<u64>, now: u64, unit: &str) -> Result<u64, Missing> {
    match last {
        _ if now == u64::MAX => Err(Missing::Rejected("marked as not available".to_owned())),
        Some(last) if now < last => Err(Missing::Rejected(format!("the counter of {unit} went back"))),
        _ => Ok(now),
    }
}

/// How much a counter grew a second, since another reading of it.
pub(super) fn rate(last: Option<(Nanos, u64)>, now: (Nanos, u64)) -> Result<u64, Missing> {
    let (then, before) = last.ok_or(Missing::Early)?;
    let seconds = now.0.since(then).as_seconds();
    let grown = growing(Some(before), now.1, "KiB")?.saturating_sub(before);
    if seconds <= 0.0 {
        return Err(Missing::Early);
    }
    below((grown as f64 / seconds) as u64, 1 << 40, "KiB/s")
}

/// The reasons in a mask, by name; what has no name here keeps its bits.
pub(super) fn throttle(mask: u64) -> String {
    const NAMES: [(u64, &str); 10] = [
        (0x1, "idle"),
        (0x2, "application_clocks"),
        (0x4, "sw_power_cap"),
        (0x8, "hw_slowdown"),
        (0x10, "sync_boost"),
        (0x20, "sw_thermal"),
        (0x40, "hw_thermal"),
        (0x80, "hw_power_brake"),
        (0x100, "display_clock"),
        (0, "none"),
    ];
    let mut reasons: Vec<String> = Vec::new();
    let mut unknown = mask;
    for (bit, name) in NAMES.iter().filter(|(bit, _)| mask & bit != 0) {
        reasons.push((*name).to_owned());
        unknown &= !bit;
    }
    if unknown != 0 {
        reasons.push(format!("unknown({unknown:#x})"));
    }
    if reasons.is_empty() { "none".to_owned() } else { reasons.join("|") }
}

/// The sum over processes of the mean of each one's samples; one that cannot be spoils all.
pub(super) fn mean_by_process(samples: impl Iterator<Item = (u32, u32)>) -> Result<f64, Missing> {
    let mut by_process: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for (pid, share) in samples {
        by_process.entry(pid).or_default().push(percent(f64::from(share))?);
    }
    let means = by_process.values().map(|shares| shares.iter().sum::<f64>() / shares.len() as f64);
    // Not `sum`: that of nothing is minus zero.
    percent(means.fold(0.0, |sum, mean| sum + mean))
}

/// Bytes of this run's processes and of others, from pairs of process number and bytes. A process number of
/// 0, or more than the card has, is rubbish of another struct's layout.
pub(super) fn shares(
    processes: &[(u32, Option<u64>)],
    own: &[u32],
    total: Option<u64>,
) -> Result<(u64, u64), Missing> {
    if let Some((pid, _)) = processes
        .iter()
        .find(|(pid, bytes)| *pid == 0 || bytes.zip(total).is_some_and(|(bytes, total)| bytes > total))
    {
        return Err(Missing::Rejected(format!("process {pid} uses more than there is")));
    }
    if !processes.is_empty() && !processes.iter().any(|(pid, _)| own.contains(pid)) {
        // Its processes are not there yet, or have other numbers here than in the driver's namespace.
        return Err(Missing::Early);
    }
    if processes.iter().any(|(_, bytes)| bytes.is_none()) {
        return Err(Missing::Failed("memory by process is not available".to_owned()));
    }
    let sum = |mine: bool| {
        let wanted = processes.iter().filter(|(pid, _)| own.contains(pid) == mine);
        wanted.map(|(_, bytes)| bytes.unwrap_or(0)).sum()
    };
    Ok((sum(true), sum(false)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejected<T>(answer: Result<T, Missing>) -> bool {
        matches!(answer, Err(Missing::Rejected(_)))
    }

    // Field case 097.
    #[test]
    fn shares_outside_0_to_100_are_rejected_not_clamped() {
        assert_eq!((percent(0.0), percent(100.0)), (Ok(0.0), Ok(100.0)));
        assert!(rejected(percent(101.0)) && rejected(percent(1500.0)) && rejected(percent(4_294_967_295.0)));
        assert!(rejected(percent(f64::NAN)));
    }

    #[test]
    fn marks_for_not_available_are_no_quantities() {
        assert_eq!(below(300_000, 1 << 24, "mW"), Ok(300_000));
        assert!(
            rejected(below(u64::from(u32::MAX), 1 << 40, "mW")) && rejected(below(u64::MAX, u64::MAX, "mJ"))
        );
        assert!(rejected(below(1 << 24, 1 << 24, "mW")));
    }

    // Field cases 074 and 079.
    #[test]
    fn memory_without_a_total_or_beyond_it_is_no_figure() {
        assert_eq!(memory(70, 80), Ok((70, 80)));
        assert!(matches!(memory(0, 0), Err(Missing::Failed(_))));
        assert!(rejected(memory(81, 80)) && rejected(memory(1, u64::MAX)));
    }

    #[test]
    fn a_counter_that_went_back_gives_no_difference() {
        assert_eq!(rate(None, (Nanos(0), 5)), Err(Missing::Early));
        assert_eq!(rate(Some((Nanos(0), 100)), (Nanos(500_000_000), 150)), Ok(100));
        assert!(rejected(rate(Some((Nanos(0), 100)), (Nanos(500_000_000), 50))));
        assert!(rejected(growing(Some(7), 6, "mJ")) && rejected(growing(None, u64::MAX, "mJ")));
        assert_eq!(growing(Some(7), 7, "mJ"), Ok(7));
    }

    // Field case 091.
    #[test]
    fn reasons_without_a_name_keep_their_bits() {
        assert_eq!(throttle(0), "none");
        assert_eq!(throttle(0x24), "sw_power_cap|sw_thermal");
        assert_eq!(throttle(0x4 | 1 << 40), "sw_power_cap|unknown(0x10000000000)");
    }

    #[test]
    fn samples_of_one_process_are_averaged_and_processes_added() {
        let samples = [(7, 40), (7, 60), (8, 20)];
        assert_eq!(mean_by_process(samples.into_iter()), Ok(70.0));
        assert_eq!(mean_by_process([].into_iter()).unwrap().to_string(), "0");
        assert!(rejected(mean_by_process([(7, 40), (7, 1500)].into_iter())));
        assert!(rejected(mean_by_process([(7, 80), (8, 60)].into_iter())));
    }

    // Field case 100.
    #[test]
    fn a_list_of_another_layout_is_recognised() {
        let list = [(10, Some(5)), (11, Some(7))];
        assert_eq!(shares(&list, &[10], Some(80)), Ok((5, 7)));
        assert!(rejected(shares(&[(10, Some(5)), (0, Some(7))], &[10], Some(80))));
        assert!(rejected(shares(&[(10, Some(1 << 60))], &[10], Some(80))));
        assert!(matches!(shares(&[(10, None)], &[10], Some(80)), Err(Missing::Failed(_))));
        assert_eq!(shares(&[(11, Some(7))], &[10], Some(80)), Err(Missing::Early));
        assert_eq!(shares(&[], &[10], Some(80)), Ok((0, 0)));
    }
}
