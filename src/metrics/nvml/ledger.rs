//! What came of asking for each field of one card: counts and the first error, once, however often it was
//! asked. Pure.

use crate::metrics::record::FieldAccount;
use std::collections::BTreeMap;

/// What is asked for. Names are the columns of `samples.csv`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Field {
    /// Share of time in which some kernel ran.
    Utilisation,
    /// Share of time in which memory was read or written: how busy the bus was, not how full memory is.
    MemoryController,
    /// Bytes in use, by all processes.
    MemoryUsed,
    /// Power draw.
    Power,
    /// Energy since the driver was loaded.
    Energy,
    /// Of the chip.
    Temperature,
    /// Of the multiprocessors.
    SmClock,
    /// Of the memory.
    MemoryClock,
    /// Why clocks are lower than they could be.
    Throttle,
    /// From the host.
    PcieRx,
    /// To the host.
    PcieTx,
    /// From other cards.
    NvlinkRx,
    /// To other cards.
    NvlinkTx,
    /// Share of multiprocessors with work, over time.
    SmActivity,
    /// Share of resident warps, over time.
    SmOccupancy,
    /// Bytes by process.
    ProcessMemory,
    /// Utilisation by process.
    ProcessUtilisation,
}

impl Field {
    /// Its column.
    pub fn name(self) -> &'static str {
        match self {
            Self::Utilisation => "utilisation_percent",
            Self::MemoryController => "memory_controller_percent",
            Self::MemoryUsed => "memory_used_bytes",
            Self::Power => "power_mw",
            Self::Energy => "energy_mj",
            Self::Temperature => "temperature_c",
            Self::SmClock => "sm_clock_mhz",
            Self::MemoryClock => "memory_clock_mhz",
            Self::Throttle => "throttle",
            Self::PcieRx => "pcie_rx_kb_s",
            Self::PcieTx => "pcie_tx_kb_s",
            Self::NvlinkRx => "nvlink_rx_kb_s",
            Self::NvlinkTx => "nvlink_tx_kb_s",
            Self::SmActivity => "sm_activity_percent",
            Self::SmOccupancy => "sm_occupancy_percent",
            Self::ProcessMemory => "process_memory_bytes",
            Self::ProcessUtilisation => "process_utilisation_percent",
        }
    }
}

/// Why there is no value this time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Missing {
    /// It was refused.
    Failed(String),
    /// It was told, and cannot be true.
    Rejected(String),
    /// Nothing to tell yet: a difference needs two readings.
    Early,
}

/// The accounts of one card's fields.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ledger {
    fields: BTreeMap<Field, FieldAccount>,
}

impl Ledger {
    /// Counts an answer, and gives its value if it has one.
    pub(super) fn take<T: Zero>(&mut self, field: Field, answer: Result<T, Missing>) -> Option<T> {
        let account = self.fields.entry(field).or_default();
        match answer {
            Ok(value) => {
                account.samples += 1;
                account.zeros += u64::from(value.is_zero());
                Some(value)
            }
            Err(Missing::Early) => None,
            Err(Missing::Failed(reason)) => {
                account.errors += 1;
                account.first_error.get_or_insert(reason);
                None
            }
            Err(Missing::Rejected(reason)) => {
                account.rejected += 1;
                account.first_error.get_or_insert(reason);
                None
            }
        }
    }

    /// By column.
    pub fn accounts(&self) -> BTreeMap<String, FieldAccount> {
        self.fields.iter().map(|(field, account)| (field.name().to_owned(), account.clone())).collect()
    }
}

/// What may be nothing at all.
pub(super) trait Zero {
    fn is_zero(&self) -> bool;
}

impl Zero for f64 {
    fn is_zero(&self) -> bool {
        *self == 0.0
    }
}

impl Zero for u64 {
    fn is_zero(&self) -> bool {
        *self == 0
    }
}

impl Zero for String {
    fn is_zero(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Field case 101: all zeros and no samples at all are told apart.
    #[test]
    fn zeros_errors_and_rejections_are_counted_apart_and_the_first_reason_stays() {
        let mut ledger = Ledger::default();
        let zero: Result<f64, Missing> = Ok(0.0);
        assert_eq!(ledger.take(Field::Utilisation, zero), Some(0.0));
        for reason in ["not supported", "unknown error"] {
            let failed: Result<u64, _> = Err(Missing::Failed(reason.to_owned()));
            assert_eq!(ledger.take(Field::Power, failed), None);
        }
        let rejected: Result<u64, _> = Err(Missing::Rejected("1500 %".to_owned()));
        assert_eq!(ledger.take(Field::Power, rejected), None);
        assert_eq!(ledger.take::<u64>(Field::NvlinkRx, Err(Missing::Early)), None);
        let accounts = ledger.accounts();
        let utilisation = &accounts["utilisation_percent"];
        assert_eq!((utilisation.samples, utilisation.zeros, utilisation.errors), (1, 1, 0));
        let power = &accounts["power_mw"];
        assert_eq!((power.samples, power.errors, power.rejected), (0, 2, 1));
        assert_eq!(power.first_error.as_deref(), Some("not supported"));
        assert_eq!(accounts["nvlink_rx_kb_s"], FieldAccount::default());
    }
}
