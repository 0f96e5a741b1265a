//! How sure a median is: the percentile bootstrap.

use super::describe::{ascending, percentile, refuse_non_finite};
use crate::Result;
use rand_mt::Mt64;

/// Below this many rounds there is no interval: resampling four values cannot show how a fifth falls.
pub const MIN_ROUNDS: usize = 5;

/// Resamples drawn for an interval.
pub const RESAMPLES: usize = 10_000;

/// 95 % interval of the median of `values` (one a round): [`RESAMPLES`] times as many values are drawn
/// with replacement, and the 2.5th and 97.5th percentile of their medians are the ends. The same seed
/// gives the same interval on every machine. `None` below [`MIN_ROUNDS`].
pub fn median_interval(name: &str, values: &[f64], seed: u64) -> Result<Option<[f64; 2]>> {
    refuse_non_finite(name, values)?;
    if values.len() < MIN_ROUNDS {
        return Ok(None);
    }
    // A generator whose stream is specified, so that an upgrade cannot move published intervals.
    let mut random = Mt64::new(seed);
    let mut draw = vec![0.0; values.len()];
    let medians: Vec<f64> = (0..RESAMPLES)
        .filter_map(|_| {
            // Modulo bias is below n / 2^64.
            draw.fill_with(|| values[(random.next_u64() % values.len() as u64) as usize]);
            draw.sort_by(f64::total_cmp);
            percentile(&draw, 50.0)
        })
        .collect();
    let medians = ascending(&medians);
    Ok(percentile(&medians, 2.5).zip(percentile(&medians, 97.5)).map(|(low, high)| [low, high]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_rounds_have_no_interval_rather_than_a_narrow_one() {
        for n in 0..MIN_ROUNDS {
            assert_eq!(median_interval("ratio", &vec![1.4; n], 0).unwrap(), None, "n = {n}");
        }
    }

    #[test]
    fn the_interval_of_five_is_their_range_or_inside_it() {
        // P(median of 5 draws = smallest) = P(at least 3 of 5 draws are it) = 5.8 %, above 2.5 %: so the
        // ends are the extremes.
        let values = [1.39, 1.40, 1.42, 1.44, 1.46];
        assert_eq!(median_interval("ratio", &values, 7).unwrap(), Some([1.39, 1.46]));
    }

    #[test]
    fn more_rounds_narrow_the_interval_to_inside_the_range() {
        let values: Vec<f64> = (0..21).map(|i| 1.0 + f64::from(i) * 0.01).collect();
        let [low, high] = median_interval("ratio", &values, 1).unwrap().unwrap();
        // Binomial(21, 1/2) puts the exact 95 % order-statistic interval at ranks 6 and 16: 1.05 and 1.15.
        assert!((1.04..=1.07).contains(&low) && (1.13..=1.16).contains(&high), "[{low}, {high}]");
    }

    #[test]
    fn the_same_seed_gives_the_same_interval() {
        let values = [2.0, 1.0, 3.0, 2.5, 1.5, 2.2, 1.9];
        let once = median_interval("ratio", &values, 42).unwrap();
        assert_eq!(once, median_interval("ratio", &values, 42).unwrap());
    }

    #[test]
    fn a_bad_value_is_refused_by_name() {
        let error = median_interval("ddp over dp", &[1.0, f64::NAN], 0).unwrap_err();
        assert_eq!(error.to_string(), "ddp over dp: value 1 of 2 is NaN");
    }
}
