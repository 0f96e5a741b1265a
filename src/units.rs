//! Units: how quantities are carried in code and written for people.
//!
//! Files hold base units with the unit in the key (`_ns`, `_bytes`, `_mw`). People get one unit a
//! table or chart, chosen here. GB is 10^9 bytes, GiB is 2^30; memory is shown in MiB/GiB, traffic in GB/s.

/// Nanoseconds of CLOCK_MONOTONIC, or a span of them.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct Nanos(pub u64);

impl Nanos {
    /// This moment on CLOCK_MONOTONIC: the one clock of every file a run writes, across processes.
    pub fn now() -> Self {
        Self::read(rustix::time::ClockId::Monotonic)
    }

    /// CPU time the calling thread has used.
    pub fn thread_cpu() -> Self {
        Self::read(rustix::time::ClockId::ThreadCPUTime)
    }

    fn read(clock: rustix::time::ClockId) -> Self {
        let time = rustix::time::clock_gettime(clock);
        Self(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
    }

    /// From `earlier` to this moment; zero if the order is reversed.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }

    /// In milliseconds.
    pub fn as_ms(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// In seconds.
    pub fn as_seconds(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

/// Bytes for people, in binary units: `1.5 GiB`, `12.0 MiB`, `640 B`.
pub fn bytes(n: u64) -> String {
    const UNITS: [(&str, f64); 4] = [
        ("TiB", (1u64 << 40) as f64),
        ("GiB", (1u64 << 30) as f64),
        ("MiB", (1u64 << 20) as f64),
        ("KiB", 1024.0),
    ];
    UNITS
        .iter()
        .find(|(_, size)| n as f64 >= *size)
        .map_or_else(|| format!("{n} B"), |(unit, size)| format!("{:.1} {unit}", n as f64 / size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_choose_a_binary_unit() {
        assert_eq!(bytes(640), "640 B");
        assert_eq!(bytes(12 << 20), "12.0 MiB");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
    }

    #[test]
    fn a_reversed_span_is_empty_not_wrapped() {
        assert_eq!(Nanos(1).since(Nanos(2)), Nanos(0));
    }
}
