//! Axes: from values to pixels, with round ticks.
//!
//! Whatever range comes in (reversed, empty, infinite, a hair wide), what comes out can be drawn.

/// Maps values to pixels.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    /// Values that deserve a label, ascending.
    pub(super) ticks: Vec<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    Linear,
    Logarithmic,
}

impl Axis {
    /// From zero to a round value at or above `high`.
    pub(super) fn from_zero(high: f64, pixels: (f64, f64)) -> Self {
        let (_, high) = repair(0.0, high.max(0.0));
        let step = round_step(high / 6.0);
        Self::with_ticks(0.0, (high / step - 1e-9).ceil() * step, step, pixels)
    }

    /// From zero to `high` itself, so that nothing beyond it is promised.
    pub(super) fn exactly_from_zero(high: f64, pixels: (f64, f64)) -> Self {
        let (_, high) = repair(0.0, high.max(0.0));
        Self::with_ticks(0.0, high, round_step(high / 6.0), pixels)
    }

    /// Over these values, with round ends. Values that are not finite do not count.
    pub(super) fn over(values: impl IntoIterator<Item = f64>, pixels: (f64, f64)) -> Self {
        let (low, high) = range(values);
        let step = round_step((high - low) / 5.0);
        Self::with_ticks((low / step + 1e-9).floor() * step, (high / step - 1e-9).ceil() * step, step, pixels)
    }

    /// Logarithmic over the positive ones of these values; `None` when there is none.
    pub(super) fn logarithmic(values: impl IntoIterator<Item = f64>, pixels: (f64, f64)) -> Option<Self> {
        let mut logs = values.into_iter().filter(|v| v.is_finite() && *v > 0.0).map(f64::log10).peekable();
        logs.peek()?;
        let (low, high) = range(logs);
        let (low, high) = (low.floor(), high.ceil().max(low.floor() + 1.0));
        let every = ((high - low) / 6.0).ceil().max(1.0);
        let count = ((high - low) / every).floor() as i32;
        let ticks = (0..=count).map(|i| 10f64.powf(low + f64::from(i) * every)).collect();
        Some(Self { scale: Scale::Logarithmic, low, high, from: pixels.0, to: pixels.1, ticks })
    }

    fn with_ticks(low: f64, high: f64, step: f64, (from, to): (f64, f64)) -> Self {
        let first = (low / step - 1e-9).ceil();
        let count = ((high - low) / step + 1e-9).floor().clamp(0.0, 20.0) as i32;
        // Multiples of the step, so that sums of roundings do not print 0.30000000000000004.
        let ticks = (0..=count).map(|i| (first + f64::from(i)) * step).filter(|t| *t <= high + step * 1e-6);
        Self { scale: Scale::Linear, low, high, from, to, ticks: ticks.collect() }
    }

    /// Where a value is, kept on the axis; `None` for what has no place: NaN, infinity, and on a
    /// logarithmic axis zero and below.
    pub(super) fn at(&self, value: f64) -> Option<f64> {
        let value = match self.scale {
            Scale::Linear => value,
            Scale::Logarithmic if value > 0.0 => value.log10(),
            Scale::Logarithmic => return None,
        };
        value.is_finite().then(|| {
            let part = ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
            self.from + (self.to - self.from) * part
        })
    }

    /// The ticks as text, all with as many decimals as the finest needs.
    pub(super) fn labels(&self) -> Vec<String> {
        let step = self.ticks.windows(2).map(|pair| pair[1] - pair[0]).fold(f64::INFINITY, f64::min);
        let largest = self.ticks.iter().fold(0.0, |m: f64, t| m.max(t.abs()));
        self.ticks
            .iter()
            .map(|tick| match self.scale {
                Scale::Logarithmic if !(1e-3..1e6).contains(tick) => format!("{tick:.0e}"),
                Scale::Logarithmic => format!("{tick}"),
                Scale::Linear if largest >= 1e7 || (largest > 0.0 && step < 1e-6) => format!("{tick:e}"),
                Scale::Linear => format!("{tick:.*}", decimals(step)),
            })
            .collect()
    }
}

/// Decimals that tell neighbours `step` apart.
fn decimals(step: f64) -> usize {
    if step.is_finite() && step > 0.0 { (-step.log10() - 1e-9).ceil().clamp(0.0, 8.0) as usize } else { 0 }
}

/// The smallest of 1, 2, 5 times a power of ten that is not below `rough`.
fn round_step(rough: f64) -> f64 {
    let power = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    steps.into_iter().find(|step| *step >= rough * (1.0 - 1e-9)).unwrap_or(10.0 * power)
}

/// Smallest and largest of the finite values, repaired.
fn range(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values
        .into_iter()
        .filter(|v| v.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    repair(low, high)
}

/// A range that can be drawn: finite, in order, wide enough to divide.
pub(super) fn repair(low: f64, high: f64) -> (f64, f64) {
    const FAR: f64 = 1e100;
    if !(low.is_finite() && high.is_finite()) {
        return (0.0, 1.0);
    }
    let (low, high) = (low.min(high).clamp(-FAR, FAR), low.max(high).clamp(-FAR, FAR));
    let size = low.abs().max(high.abs());
    if high - low > size * 1e-9 && high - low > 1.0 / FAR {
        (low, high)
    } else if size > 1e-9 {
        (low - size * 0.1, high + size * 0.1)
    } else {
        (low, low + 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_ranges_are_repaired() {
        for (low, high) in [
            (15.0, 0.0),
            (0.0, 0.0),
            (1e-300, 2e-300),
            (f64::NEG_INFINITY, f64::INFINITY),
            (f64::NAN, 1.0),
            (f64::MIN, f64::MAX),
            (7.0, 7.0),
            (-3.0, -3.0),
        ] {
            let (a, b) = repair(low, high);
            assert!(a < b && a.is_finite() && b.is_finite(), "{low}..{high} became {a}..{b}");
            let axis = Axis::over([low, high], (0.0, 100.0));
            assert!((2..=12).contains(&axis.ticks.len()), "{low}..{high}: {:?}", axis.ticks);
            assert!(axis.ticks.iter().all(|t| t.is_finite()));
            let axis = Axis::from_zero(high, (0.0, 100.0));
            assert!((2..=12).contains(&axis.ticks.len()), "0..{high}: {:?}", axis.ticks);
        }
        assert_eq!(repair(15.0, 0.0), (0.0, 15.0));
    }

    #[test]
    fn ticks_are_round() {
        let axis = Axis::from_zero(87.0, (0.0, 100.0));
        assert_eq!(axis.labels(), ["0", "20", "40", "60", "80", "100"]);
        let axis = Axis::from_zero(0.7, (0.0, 100.0));
        assert_eq!(axis.labels(), ["0.0", "0.2", "0.4", "0.6", "0.8"]);
        let axis = Axis::over([2.1, 2.34], (0.0, 100.0));
        assert_eq!(axis.labels(), ["2.10", "2.15", "2.20", "2.25", "2.30", "2.35"]);
        assert_eq!(Axis::exactly_from_zero(3.3, (0.0, 100.0)).labels(), ["0", "1", "2", "3"]);
    }

    #[test]
    fn values_map_to_pixels_and_stay_on_the_axis() {
        let axis = Axis::from_zero(100.0, (200.0, 0.0));
        assert_eq!(axis.at(0.0), Some(200.0));
        assert_eq!(axis.at(25.0), Some(150.0));
        assert_eq!(axis.at(1e9), Some(0.0));
        assert_eq!(axis.at(f64::NAN), None);
    }

    #[test]
    fn a_logarithmic_axis_has_no_place_for_zero_and_below() {
        let axis = Axis::logarithmic([0.0, -1.0, 1e-12, 1e9], (0.0, 210.0)).unwrap();
        assert_eq!(axis.at(0.0), None);
        assert_eq!(axis.at(-1.0), None);
        assert_eq!(axis.at(1e-12), Some(0.0));
        assert!((axis.at(1e-2).unwrap() - 100.0).abs() < 1e-9);
        assert!((3..=8).contains(&axis.ticks.len()));
        assert_eq!(Axis::logarithmic([0.0, 0.0], (0.0, 1.0)), None);
    }
}
