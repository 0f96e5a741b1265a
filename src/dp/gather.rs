//! Gather: the outputs of all cards become one tensor on card 0, and its gradient goes back in slices.

use super::scatter;
use crate::error::{Error, Result};
use tch::Tensor;

/// What a forward on all cards gave.
#[derive(Debug)]
pub struct Gathered {
    /// Outputs in input order, concatenated along axis 0. Outputs without dimensions (a loss computed inside
    /// the model) are stacked instead: one element for each card that worked.
    pub output: Tensor,
    /// Input rows of each card that worked, in card order.
    pub rows: Vec<usize>,
}

impl Gathered {
    /// Cards that had samples.
    pub fn cards_worked(&self) -> usize {
        self.rows.len()
    }

    /// The mean of stacked per-card means, weighted by rows: what one card would have computed on the whole
    /// batch. The plain mean of the three means of 10 samples on 3 cards is not.
    pub fn weighted_mean(&self) -> Result<Tensor> {
        if self.output.dim() == 0 {
            return Ok(self.output.shallow_clone());
        }
        if self.output.size() != [self.rows.len() as i64] {
            return Err(Error::usage(format!(
                "cannot average an output of shape {:?} over {} cards: it does not hold one number a card",
                self.output.size(),
                self.rows.len()
            ))
            .hint(
                "this is for models that return their loss; compute the loss of other outputs from `output`",
            ));
        }
        let total: usize = self.rows.iter().sum();
        let weights: Vec<f64> = self.rows.iter().map(|rows| *rows as f64 / total as f64).collect();
        let weights = Tensor::f_from_slice(&weights)?
            .f_to_kind(self.output.kind())?
            .f_to_device(self.output.device())?;
        Ok(self.output.f_dot(&weights)?)
    }
}

/// How outputs were put together, and so how their gradient is taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Layout {
    /// Along axis 0, this many rows each.
    Rows(Vec<i64>),
    /// One scalar a card.
    Scalars,
}

/// One tensor from the outputs of `cards`, which must agree in all but their rows.
pub(super) fn gather(outputs: &[Tensor], cards: &[usize]) -> Result<(Tensor, Layout)> {
    let Some(first) = outputs.first() else {
        return Err(Error::usage("there are no outputs to gather"));
    };
    let trailing =
        |output: &Tensor| (output.kind(), output.size().split_first().map(|(_, rest)| rest.to_vec()));
    for (output, card) in outputs.iter().zip(cards) {
        if trailing(output) != trailing(first) {
            return Err(Error::usage(format!(
                "cannot gather: card {card} returned {:?} {:?}, card {} returned {:?} {:?}",
                output.kind(),
                output.size(),
                cards[0],
                first.kind(),
                first.size()
            ))
            .hint("outputs may differ in axis 0 only"));
        }
    }
    Ok(if first.dim() == 0 {
        (Tensor::f_stack(outputs, 0)?, Layout::Scalars)
    } else {
        let rows = outputs.iter().map(|output| output.size()[0]).collect();
        (Tensor::f_cat(outputs, 0)?, Layout::Rows(rows))
    })
}

/// The part of a gathered output's gradient that belongs to each card: views, in card order.
pub(super) fn slices(gradient: &Tensor, layout: &Layout) -> Result<Vec<Tensor>> {
    match layout {
        Layout::Rows(rows) => scatter::split(gradient, rows),
        Layout::Scalars => (0..gradient.size()[0]).map(|card| Ok(gradient.f_select(0, card)?)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f64]) -> Tensor {
        Tensor::from_slice(values)
    }

    #[test]
    fn rows_come_back_in_card_order_and_gradients_go_back_the_same_way() {
        let outputs = [of(&[1., 2.]).reshape([1, 2]), of(&[3., 4., 5., 6.]).reshape([2, 2])];
        let (output, layout) = gather(&outputs, &[0, 1]).unwrap();
        assert_eq!(output, of(&[1., 2., 3., 4., 5., 6.]).reshape([3, 2]));
        let back = slices(&output, &layout).unwrap();
        assert_eq!((&back[0], &back[1]), (&outputs[0], &outputs[1]));
    }

    // Field case 004.
    #[test]
    fn scalars_are_stacked_and_averaged_by_rows() {
        let outputs = [of(&[1.0]).squeeze(), of(&[2.0]).squeeze(), of(&[6.0]).squeeze()];
        let (output, layout) = gather(&outputs, &[0, 1, 2]).unwrap();
        assert_eq!((output.size(), &layout), (vec![3], &Layout::Scalars));
        assert_eq!(slices(&output, &layout).unwrap()[2].double_value(&[]), 6.0);
        let gathered = Gathered { output, rows: vec![4, 4, 2] };
        // (4 * 1 + 4 * 2 + 2 * 6) / 10; the plain mean would be 3.
        assert!((gathered.weighted_mean().unwrap().double_value(&[]) - 2.4).abs() < 1e-12);
    }

    #[test]
    fn only_one_number_a_card_can_be_averaged() {
        let gathered = Gathered { output: of(&[1., 2., 3.]), rows: vec![2, 1] };
        assert!(gathered.weighted_mean().unwrap_err().to_string().contains("[3] over 2 cards"));
    }

    // What is left of field cases 007 and 008 where an output is one tensor: no positional mix-up.
    #[test]
    fn outputs_that_do_not_fit_together_are_named_by_card() {
        let error = gather(&[of(&[1., 2.]).reshape([1, 2]), of(&[3.]).reshape([1, 1])], &[0, 5]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot gather: card 5 returned Double [1, 1], card 0 returned Double [1, 2]"
        );
        assert!(gather(&[of(&[1.]), of(&[1.]).squeeze()], &[0, 1]).is_err());
        assert!(gather(&[of(&[1.]), of(&[1.]).to_kind(tch::Kind::Float)], &[0, 1]).is_err());
        assert!(gather(&[], &[]).is_err());
    }
}
