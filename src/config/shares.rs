//! How a batch is split among cards: one formula for whoever cuts, and for whoever tells who got what.

/// Rows of each of `cards`, in card order; they add up to `rows`, and a card may get none.
///
/// Without weights as `tensor.chunk` cuts: `ceil(rows / cards)` each while they last, so 9 on 4 is
/// 3, 3, 3, 0. With weights (positive, one a card) in proportion to them by largest remainder: everyone
/// gets the whole part of its quota `rows * weight / sum`, and what is left goes, one row each, to the
/// largest fractions; of equal ones, to the first.
pub fn shares(rows: usize, cards: usize, weights: Option<&[f64]>) -> Vec<usize> {
    match weights {
        None => {
            let share = rows.div_ceil(cards.max(1));
            (0..cards).map(|card| rows.saturating_sub(card * share).min(share)).collect()
        }
        Some(weights) => weighted(rows, weights),
    }
}

fn weighted(rows: usize, weights: &[f64]) -> Vec<usize> {
    // Of the largest one, so that no sum overflows.
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let parts: Vec<f64> = weights.iter().map(|weight| weight / largest).collect();
    let total: f64 = parts.iter().sum();
    let quotas: Vec<f64> = parts.iter().map(|part| rows as f64 * part / total).collect();
    let mut shares: Vec<usize> = quotas.iter().map(|quota| quota.floor() as usize).collect();
    let left = rows.saturating_sub(shares.iter().sum());
    let mut by_fraction: Vec<usize> = (0..quotas.len()).collect();
    // Stable, so that the first of equals comes first.
    by_fraction.sort_by(|&a, &b| quotas[b].fract().total_cmp(&quotas[a].fract()));
    by_fraction.into_iter().take(left).for_each(|card| shares[card] += 1);
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    // Field cases 001 and 002.
    #[test]
    fn without_weights_shares_are_tensor_chunks() {
        assert_eq!(shares(9, 4, None), [3, 3, 3, 0]);
        assert_eq!(shares(10, 4, None), [3, 3, 3, 1]);
        assert_eq!(shares(4, 4, None), [1, 1, 1, 1]);
        assert_eq!(shares(20, 8, None), [3, 3, 3, 3, 3, 3, 2, 0]);
        assert_eq!(shares(2, 4, None), [1, 1, 0, 0]);
        assert_eq!(shares(0, 3, None), [0, 0, 0]);
    }

    #[test]
    fn weights_share_by_largest_remainder() {
        // Quotas 3 1/3 and 6 2/3: the second has the larger fraction.
        assert_eq!(shares(10, 2, Some(&[1.0, 2.0])), [3, 7]);
        // Quotas 2.5, 2.5, 5: of equal fractions the first.
        assert_eq!(shares(10, 3, Some(&[1.0, 1.0, 2.0])), [3, 2, 5]);
        assert_eq!(shares(128, 2, Some(&[1.0, 1.0])), [64, 64]);
        // 0.1 + 0.2 + 0.3 is not 0.6 in binary; the shares are right all the same.
        assert_eq!(shares(60, 3, Some(&[0.1, 0.2, 0.3])), [10, 20, 30]);
    }

    #[test]
    fn a_card_of_little_weight_gets_none() {
        assert_eq!(shares(4, 3, Some(&[0.01, 1.0, 1.0])), [0, 2, 2]);
        assert_eq!(shares(1, 3, Some(&[1.0, 3.0, 1.0])), [0, 1, 0]);
        assert_eq!(shares(0, 2, Some(&[1.0, 3.0])), [0, 0]);
    }

    #[test]
    fn weighted_shares_add_up_whatever_the_weights() {
        let weights = [f64::MAX, 1e300, f64::MIN_POSITIVE, 3.3, 1e308, 0.7];
        for rows in 0..200 {
            for cards in 1..=weights.len() {
                assert_eq!(shares(rows, cards, Some(&weights[..cards])).iter().sum::<usize>(), rows);
            }
        }
    }
}
