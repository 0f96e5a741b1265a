//! Watches cards through NVML, tick by tick. No answer of one field depends on another's, and no error is told
//! more than once.

use super::ledger::{Field, Ledger, Missing};
use super::library::{self, Fault, reason};
use super::reading::{self, Reading};
use crate::metrics::record::{CardMonitoring, Monitoring, PowerKind, UtilisationKind};
use crate::units::Nanos;
use nvml_wrapper::enum_wrappers::device::{Clock, PcieUtilCounter, Sampling, TemperatureSensor};
use nvml_wrapper::enums::device::{DeviceArchitecture, SampleValue, UsedGpuMemory};
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::{Bits, NvmlError};
use nvml_wrapper::gpm::{GpmSample, gpm_metrics_get};
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// KiB over all NVLinks of a card, from it and to it.
const NVLINK_TX: FieldId = FieldId(138);
const NVLINK_RX: FieldId = FieldId(139);

/// Readings between two of the same slow field, and between the two slow fields.
const SLOW_TURNS: usize = 20;
const FAR_TURN: usize = SLOW_TURNS / 2;

/// The cards of one round.
#[derive(Debug)]
pub struct Watch {
    nvml: Option<&'static Nvml>,
    unavailable: Option<String>,
    cards: Vec<Card>,
}

/// What is remembered of a card between two readings.
#[derive(Debug)]
struct Card {
    index: usize,
    uuid: String,
    ledger: Ledger,
    /// What NVML does with this card now.
    state: State,
    unified_memory: bool,
    power: Option<PowerKind>,
    utilisation: Option<UtilisationKind>,
    /// Of the driver's buffer: what was taken already.
    buffered_until: u64,
    processes_until: u64,
    /// Readings so far.
    turn: usize,
    energy: Option<u64>,
    foreign: Option<u64>,
    throttle: BTreeMap<String, u64>,
    nvlink: [Option<(Nanos, u64)>; 2],
    performance: Option<GpmSample<'static>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing was asked yet.
    New,
    Answers,
    /// Since then it does not, and NVML will be initialised once more.
    Silent(Nanos),
    /// It did not help.
    Lost(Nanos),
}

impl Watch {
    /// These cards, by their position in the run's card list and what identifies them.
    pub fn open(cards: impl IntoIterator<Item = (usize, String)>) -> Self {
        let (nvml, unavailable) = match library::open() {
            Ok(nvml) => (Some(nvml), None),
            Err(Fault::Missing) => {
                (None, Some("NVML (libnvidia-ml.so.1) is not here: nothing watches the cards".to_owned()))
            }
            Err(Fault::Broken { reason, .. }) => (None, Some(format!("NVML cannot be used: {reason}"))),
        };
        let card = |(index, uuid)| Card {
            index,
            uuid,
            ledger: Ledger::default(),
            state: State::New,
            unified_memory: false,
            power: None,
            utilisation: None,
            buffered_until: 0,
            processes_until: 0,
            // Cards take turns with what is slow.
            turn: index,
            energy: None,
            foreign: None,
            throttle: BTreeMap::new(),
            nvlink: [None; 2],
            performance: None,
        };
        Self { nvml, unavailable, cards: cards.into_iter().map(card).collect() }
    }

    /// Reads one card, for a run with these processes; `None` for a card that is not watched, or lost.
    pub fn read(&mut self, index: usize, own: &[u32]) -> Option<Reading> {
        let nvml = self.nvml?;
        let card = self.cards.iter_mut().find(|card| card.index == index)?;
        if let State::Lost(_) = card.state {
            return None;
        }
        if let State::Silent(since) = card.state {
            // Once: a container's card comes back this way, a broken one does not.
            card.performance = None;
            let again = library::open().ok();
            let back = again.is_some_and(|nvml| card.answers(nvml));
            card.state = if back { State::Answers } else { State::Lost(since) };
            self.nvml = again.or(self.nvml);
            if !back {
                return None;
            }
        }
        let nvml = self.nvml.unwrap_or(nvml);
        let card = self.cards.iter_mut().find(|card| card.index == index)?;
        // A panic of the wrapper's is one more way not to answer.
        catch_unwind(AssertUnwindSafe(|| card.read(nvml, own))).unwrap_or_else(|_| {
            card.state = State::Lost(Nanos::now());
            None
        })
    }

    /// What came of it.
    pub fn account(&self) -> Monitoring {
        let account = |card: &Card| CardMonitoring {
            index: card.index,
            uuid: card.uuid.clone(),
            power: card.power,
            utilisation: card.utilisation,
            unified_memory: card.unified_memory,
            lost_since_ns: match card.state {
                State::Silent(since) | State::Lost(since) => Some(since.0),
                State::New | State::Answers => None,
            },
            foreign_memory_peak_bytes: card.foreign,
            throttle: card.throttle.clone(),
            fields: card.ledger.accounts(),
        };
        Monitoring {
            unavailable: self.unavailable.clone(),
            cards: if self.nvml.is_some() { self.cards.iter().map(account).collect() } else { Vec::new() },
        }
    }
}

impl Card {
    fn device<'a>(&self, nvml: &'a Nvml) -> Result<Device<'a>, NvmlError> {
        nvml.device_by_uuid(&*self.uuid)
    }

    fn answers(&self, nvml: &Nvml) -> bool {
        let memory = self.device(nvml).and_then(|device| device.memory_info());
        matches!(memory, Ok(_) | Err(NvmlError::NotSupported | NvmlError::NoPermission))
    }

    fn read(&mut self, nvml: &'static Nvml, own: &[u32]) -> Option<Reading> {
        let now = Nanos::now();
        let device = match self.device(nvml) {
            Ok(device) => device,
            Err(error) => {
                self.ledger.take::<u64>(Field::Utilisation, Err(Missing::Failed(reason(&error))));
                self.state = State::Silent(now);
                return None;
            }
        };
        if self.power.is_none() {
            self.power = power_kind(&device);
        }
        self.turn += 1;
        let mut voices = Voices::default();
        let mut reading = Reading::default();
        self.utilisation(&device, &mut voices, &mut reading);
        self.memory(&device, &mut voices, &mut reading, own);
        self.rest(&device, &mut voices, &mut reading);
        self.traffic(&device, &mut voices, &mut reading, now);
        self.performance(nvml, &device, &mut voices, &mut reading);
        if voices.silent() && self.state != State::New {
            self.state = State::Silent(now);
            return None;
        }
        self.state = State::Answers;
        Some(reading)
    }

    fn utilisation(&mut self, device: &Device<'_>, voices: &mut Voices, reading: &mut Reading) {
        let rates = voices.hear(device.utilization_rates());
        // What the driver has buffered since the last reading says more than a single look.
        let buffered = self.buffered(device);
        let point = rates.as_ref().map(|rates| f64::from(rates.gpu)).map_err(Clone::clone);
        let (kind, utilisation) = match buffered {
            Some(mean) => (UtilisationKind::Buffered, Ok(mean)),
            None => (UtilisationKind::Point, point),
        };
        if utilisation.is_ok() {
            self.utilisation = Some(kind);
        }
        let utilisation = utilisation.and_then(reading::percent);
        reading.utilisation_percent = self.ledger.take(Field::Utilisation, utilisation);
        let controller = rates.and_then(|rates| reading::percent(f64::from(rates.memory)));
        reading.memory_controller_percent = self.ledger.take(Field::MemoryController, controller);
    }

    /// Mean of what the driver sampled by itself since the last reading; values that cannot be are left out.
    fn buffered(&mut self, device: &Device<'_>) -> Option<f64> {
        let samples = device.samples(Sampling::GpuUtilization, self.buffered_until).ok()?;
        let latest = samples.iter().map(|sample| sample.timestamp).max()?;
        let first = self.buffered_until == 0;
        self.buffered_until = latest.max(self.buffered_until);
        if first {
            // What the buffer holds at first is what was before this run.
            return None;
        }
        let values: Vec<f64> = samples
            .iter()
            .filter_map(|sample| number(&sample.value))
            .filter(|value| reading::percent(*value).is_ok())
            .collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }

    fn memory(&mut self, device: &Device<'_>, voices: &mut Voices, reading: &mut Reading, own: &[u32]) {
        let mut told = device.memory_info();
        if matches!(told, Err(NvmlError::NoPermission)) {
            // A container that owns a slice may not look at the whole card.
            told = slice(device).map_or(told, |slice| slice.memory_info());
        }
        self.unified_memory |= match &told {
            Ok(memory) => memory.total == 0,
            Err(error) => matches!(error, NvmlError::NotSupported),
        };
        let memory = voices.hear(told).and_then(|memory| reading::memory(memory.used, memory.total));
        reading.memory_total_bytes = memory.as_ref().ok().map(|(_, total)| *total);
        reading.memory_used_bytes = self.ledger.take(Field::MemoryUsed, memory.map(|(used, _)| used));

        let processes = voices.hear(device.running_compute_processes()).and_then(|processes| {
            let bytes = |used| match used {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            };
            let list: Vec<_> = processes.iter().map(|p| (p.pid, bytes(p.used_gpu_memory.clone()))).collect();
            reading::shares(&list, own, reading.memory_total_bytes)
        });
        if let Ok((_, foreign)) = processes {
            reading.foreign_memory_bytes = Some(foreign);
            self.foreign = self.foreign.into_iter().chain([foreign]).max();
        }
        reading.process_memory_bytes =
            self.ledger.take(Field::ProcessMemory, processes.map(|(mine, _)| mine));

        let told = match device.process_utilization_stats(self.processes_until) {
            // Nobody computed since the last reading.
            Err(NvmlError::NotFound) => Ok(Vec::new()),
            told => told,
        };
        let shares = voices.hear(told).and_then(|samples| {
            let latest = samples.iter().map(|sample| sample.timestamp).max();
            self.processes_until = latest.unwrap_or(0).max(self.processes_until);
            let mine = samples.iter().filter(|sample| own.contains(&sample.pid));
            reading::mean_by_process(mine.map(|sample| (sample.pid, sample.sm_util)))
        });
        reading.process_utilisation_percent = self.ledger.take(Field::ProcessUtilisation, shares);
    }

    fn rest(&mut self, device: &Device<'_>, voices: &mut Voices, reading: &mut Reading) {
        let ledger = &mut self.ledger;
        let mut quantity = |field, told: Result<u32, NvmlError>, bound, unit| {
            let value = voices.hear(told).and_then(|value| reading::below(u64::from(value), bound, unit));
            ledger.take(field, value)
        };
        reading.power_mw = quantity(Field::Power, device.power_usage(), 1 << 24, "mW");
        reading.temperature_c =
            quantity(Field::Temperature, device.temperature(TemperatureSensor::Gpu), 200, "degrees");
        reading.sm_clock_mhz = quantity(Field::SmClock, device.clock_info(Clock::SM), 1 << 16, "MHz");
        reading.memory_clock_mhz =
            quantity(Field::MemoryClock, device.clock_info(Clock::Memory), 1 << 16, "MHz");
        // The driver watches a counter for 20 ms to answer these: one of them now and then.
        match self.turn % SLOW_TURNS {
            0 => {
                reading.pcie_rx_kb_s = quantity(
                    Field::PcieRx,
                    device.pcie_throughput(PcieUtilCounter::Receive),
                    1 << 30,
                    "KB/s",
                );
            }
            FAR_TURN => {
                reading.pcie_tx_kb_s =
                    quantity(Field::PcieTx, device.pcie_throughput(PcieUtilCounter::Send), 1 << 30, "KB/s");
            }
            _ => {}
        }

        let energy = voices
            .hear(device.total_energy_consumption())
            .and_then(|energy| reading::growing(self.energy, energy, "mJ"));
        self.energy = energy.as_ref().ok().copied().or(self.energy);
        reading.energy_mj = self.ledger.take(Field::Energy, energy);

        let mask = match device.current_throttle_reasons_strict() {
            Ok(reasons) => Ok(reasons.bits()),
            // Bits that the wrapper does not know are bits all the same.
            Err(NvmlError::IncorrectBits(Bits::U64(bits))) => Ok(bits),
            Err(NvmlError::IncorrectBits(Bits::U32(bits))) => Ok(u64::from(bits)),
            Err(error) => Err(error),
        };
        let throttle = voices.hear(mask).and_then(|mask| match mask {
            u64::MAX => Err(Missing::Rejected("marked as not available".to_owned())),
            mask => Ok(reading::throttle(mask)),
        });
        reading.throttle = self.ledger.take(Field::Throttle, throttle);
        for reason in reading.throttle.iter().flat_map(|reasons| reasons.split('|')) {
            *self.throttle.entry(reason.to_owned()).or_default() += 1;
        }
    }

    fn traffic(&mut self, device: &Device<'_>, voices: &mut Voices, reading: &mut Reading, now: Nanos) {
        let told = device.field_values_for(&[NVLINK_TX, NVLINK_RX]);
        let mut counters = match told {
            Ok(values) => values
                .into_iter()
                .map(|value| value.and_then(|sample| sample.value))
                .map(|value| {
                    voices.hear(value).and_then(|value| {
                        number(&value)
                            .map(|value| value as u64)
                            .ok_or(Missing::Rejected("no number".to_owned()))
                    })
                })
                .collect(),
            Err(error) => vec![Err(Missing::Failed(reason(&error))); 2],
        }
        .into_iter();
        for (place, field) in [Field::NvlinkTx, Field::NvlinkRx].into_iter().enumerate() {
            let counter = counters.next().unwrap_or(Err(Missing::Failed("not told".to_owned())));
            let last = self.nvlink[place];
            self.nvlink[place] = counter.as_ref().ok().map(|value| (now, *value)).or(last);
            let rate = counter.and_then(|value| reading::rate(last, (now, value)));
            let value = self.ledger.take(field, rate);
            match field {
                Field::NvlinkTx => reading.nvlink_tx_kb_s = value,
                _ => reading.nvlink_rx_kb_s = value,
            }
        }
    }

    /// GPM, which cards have from Hopper on: what happened between two samples.
    fn performance(
        &mut self,
        nvml: &'static Nvml,
        device: &Device<'_>,
        voices: &mut Voices,
        reading: &mut Reading,
    ) {
        let supported =
            device.gpm_support().and_then(|yes| if yes { Ok(()) } else { Err(NvmlError::NotSupported) });
        // The handle of another lifetime, as a sample outlives this reading.
        let sample = voices.hear(supported.and_then(|()| self.device(nvml)?.gpm_sample()));
        let metrics = sample.and_then(|sample| {
            let last = self.performance.replace(sample).ok_or(Missing::Early)?;
            let now = self.performance.as_ref().ok_or(Missing::Early)?;
            let wanted = [GpmMetricId::SmUtil, GpmMetricId::SmOccupancy];
            gpm_metrics_get(nvml, &last, now, &wanted).map_err(|error| Missing::Failed(reason(&error)))
        });
        let each = |place: usize| match &metrics {
            Ok(values) => match values.get(place) {
                Some(Ok(metric)) => reading::percent(metric.value),
                Some(Err(error)) => Err(Missing::Failed(reason(error))),
                None => Err(Missing::Failed("not told".to_owned())),
            },
            Err(missing) => Err(missing.clone()),
        };
        let (activity, occupancy) = (each(0), each(1));
        reading.sm_activity_percent = self.ledger.take(Field::SmActivity, activity);
        reading.sm_occupancy_percent = self.ledger.take(Field::SmOccupancy, occupancy);
    }
}

/// Whether anything of a card answered.
#[derive(Debug, Default)]
struct Voices {
    answered: u32,
    gone: u32,
}

impl Voices {
    fn hear<T>(&mut self, told: Result<T, NvmlError>) -> Result<T, Missing> {
        told.inspect(|_| self.answered += 1).map_err(|error| {
            let refused = matches!(
                error,
                NvmlError::NotSupported
                    | NvmlError::NoPermission
                    | NvmlError::FailedToLoadSymbol(_)
                    | NvmlError::NotFound
                    | NvmlError::UnexpectedVariant(_)
            );
            self.gone += u32::from(!refused);
            Missing::Failed(reason(&error))
        })
    }

    /// Nothing did, and not because it never would.
    fn silent(&self) -> bool {
        self.answered == 0 && self.gone > 0
    }
}

/// The first slice of a card that can be looked at.
fn slice<'a>(device: &Device<'a>) -> Option<Device<'a>> {
    let count = device.mig_device_count().ok()?;
    (0..count).find_map(|index| device.mig_device_by_index(index).ok())
}

fn number(value: &SampleValue) -> Option<f64> {
    Some(match value {
        SampleValue::F64(value) => *value,
        SampleValue::U32(value) => f64::from(*value),
        SampleValue::U64(value) => *value as f64,
        SampleValue::I64(value) => *value as f64,
    })
}

/// The same call averages over a second from Ampere on, but for its first chip (compute capability 8.0),
/// and is a moment's draw before.
fn power_kind(device: &Device<'_>) -> Option<PowerKind> {
    use DeviceArchitecture::{Kepler, Maxwell, Pascal, Turing, Volta};
    match device.architecture() {
        Ok(Kepler | Maxwell | Pascal | Volta | Turing) => Some(PowerKind::Instant),
        Ok(DeviceArchitecture::Ampere) => {
            let capability = device.cuda_compute_capability().ok()?;
            Some(if capability.minor == 0 { PowerKind::Instant } else { PowerKind::Average })
        }
        Ok(_) => Some(PowerKind::Average),
        Err(_) => None,
    }
}
