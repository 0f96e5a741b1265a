//! Median, percentiles and spread of plain numbers.

use crate::error::Kind;
use crate::metrics::record::Spread;
use crate::{Error, Result};

/// The `p`-th percentile (0 to 100) of values in ascending order, by linear interpolation between the
/// two nearest ranks: position `(n - 1) * p / 100`, as numpy's default. `None` of nothing.
pub fn percentile(ascending: &[f64], p: f64) -> Option<f64> {
    let last = ascending.len().checked_sub(1)?;
    let position = last as f64 * p.clamp(0.0, 100.0) / 100.0;
    let below = position.floor() as usize;
    let above = (below + 1).min(last);
    let fraction = position - below as f64;
    Some(ascending[below] + (ascending[above] - ascending[below]) * fraction)
}

/// The middle value, or the mean of the two middle ones; `None` of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    percentile(&ascending(values), 50.0)
}

/// Median, 5th and 95th percentile and mean. `None` of nothing; an error that says `name` and the
/// position when a value is not finite.
pub fn spread(name: &str, values: &[f64]) -> Result<Option<Spread>> {
    refuse_non_finite(name, values)?;
    let sorted = ascending(values);
    let of = |p| percentile(&sorted, p);
    let (Some(median), Some(p5), Some(p95)) = (of(50.0), of(5.0), of(95.0)) else { return Ok(None) };
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    Ok(Some(Spread { median, p5, p95, mean }))
}

/// An error that says which value of `name` is NaN or infinite.
pub fn refuse_non_finite(name: &str, values: &[f64]) -> Result<()> {
    values.iter().enumerate().find(|(_, value)| !value.is_finite()).map_or(Ok(()), |(position, value)| {
        Err(Error::new(Kind::Corrupt, format!("{name}: value {position} of {} is {value}", values.len()))
            .hint("a measurement must be a finite number; measure this run again"))
    })
}

/// A sorted copy. `total_cmp` orders whatever comes, so that no input can make sorting panic.
pub(super) fn ascending(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate_as_numpy_does() {
        // numpy.percentile([10, 20, 30, 40], [0, 5, 25, 50, 95, 100])
        let values = [10.0, 20.0, 30.0, 40.0];
        for (p, expected) in
            [(0.0, 10.0), (5.0, 11.5), (25.0, 17.5), (50.0, 25.0), (95.0, 38.5), (100.0, 40.0)]
        {
            let got = percentile(&values, p).unwrap();
            assert!((got - expected).abs() < 1e-12, "p{p}: {got}");
        }
        assert_eq!(percentile(&[], 50.0), None);
        assert_eq!(percentile(&[7.0], 95.0), Some(7.0));
    }

    #[test]
    fn the_median_does_not_need_order() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn spread_of_five_steps() {
        let got = spread("step_ms", &[5.0, 1.0, 2.0, 3.0, 4.0]).unwrap().unwrap();
        assert_eq!(got, Spread { median: 3.0, p5: 1.2, p95: 4.8, mean: 3.0 });
        assert_eq!(spread("step_ms", &[]).unwrap(), None);
    }

    #[test]
    fn nan_and_infinity_are_refused_by_name() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let error = spread("step_ms of dp", &[1.0, bad]).unwrap_err().to_string();
            assert_eq!(error, format!("step_ms of dp: value 1 of 2 is {bad}"));
        }
    }

    #[test]
    fn sorting_is_total_and_does_not_depend_on_input_order() {
        let mut forward: Vec<f64> = (0..20).map(f64::from).collect();
        forward.extend([f64::NAN, f64::INFINITY]);
        let mut backward = forward.clone();
        backward.reverse();
        let (a, b) = (ascending(&forward), ascending(&backward));
        assert_eq!(a[..21], b[..21]);
        assert!(a[21].is_nan() && b[21].is_nan());
    }
}
