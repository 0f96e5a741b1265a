//! Reduce: card 0 adds the gradients of the other cards to its own, in card order.
//!
//! Card 0 reads each gradient where the replica's autograd left it. Packing them into a flat buffer first
//! would pay off over a link with a cost per message; between virtual cards it would only add a copy of
//! all gradients, and as much memory on every card.

use super::scatter::fetch;
use crate::error::Result;
use crate::torch::{grad, no_grad};
use tch::Tensor;

/// Adds one replica's gradients to those of `parameters` (card 0's, in the same order). A parameter that
/// took no part on either card keeps no gradient. Taken by value: giving their memory back is part of it.
pub(super) fn add(parameters: &[Tensor], replica: Vec<Option<Tensor>>) -> Result<()> {
    no_grad(|| {
        for (parameter, theirs) in parameters.iter().zip(replica) {
            match (grad::grad(parameter), theirs) {
                (_, None) => {}
                (Some(mut ours), Some(theirs)) => drop(ours.f_add_(&theirs)?),
                (None, Some(theirs)) => {
                    grad::set_grad(parameter, Some(&fetch(&theirs, parameter.device())?))?
                }
            }
        }
        Ok(())
    })
}

/// Moves the gradients out of a replica's parameters.
pub(super) fn take(parameters: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
    let gradients = parameters.iter().map(grad::grad).collect();
    clear(parameters)?;
    Ok(gradients)
}

/// Leaves the parameters without gradients.
pub(super) fn clear(parameters: &[Tensor]) -> Result<()> {
    parameters.iter().try_for_each(|parameter| grad::set_grad(parameter, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter(gradient: Option<f64>) -> Tensor {
        let parameter = Tensor::from_slice(&[0.0]).set_requires_grad(true);
        let gradient = gradient.map(|value| Tensor::from_slice(&[value]));
        grad::set_grad(&parameter, gradient.as_ref()).unwrap();
        parameter
    }

    fn gradients(parameters: &[Tensor]) -> Vec<Option<f64>> {
        parameters
            .iter()
            .map(|parameter| grad::grad(parameter).map(|gradient| gradient.double_value(&[0])))
            .collect()
    }

    // Field case 022: a weight that one card did not use still gets the other's gradient.
    #[test]
    fn missing_gradients_are_zero_for_the_sum_and_stay_missing_where_nobody_has_one() {
        let ours = [parameter(Some(1.0)), parameter(None), parameter(Some(2.0)), parameter(None)];
        let theirs = [parameter(Some(10.0)), parameter(Some(20.0)), parameter(None), parameter(None)];
        add(&ours, take(&theirs).unwrap()).unwrap();
        assert_eq!(gradients(&ours), [Some(11.0), Some(20.0), Some(2.0), None]);
        assert_eq!(gradients(&theirs), [None; 4]);
    }
}
