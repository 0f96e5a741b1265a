//! Scatter: a batch is cut along axis 0, and every card fetches its own part.

use crate::config::shares;
use crate::error::{Error, Result};
use crate::torch::no_grad;
use tch::{Device, Tensor};

/// Views of the rows of each of `cards`, in card order; `None` for a card that gets none. Without weights
/// as `tensor.chunk` cuts, so that 9 rows on 4 cards are 3, 3, 3 and `None`.
pub(super) fn chunks(input: &Tensor, cards: usize, weights: Option<&[f64]>) -> Result<Vec<Option<Tensor>>> {
    let rows = input.size().first().copied().unwrap_or(0);
    if rows == 0 {
        return Err(Error::usage(format!(
            "cannot scatter an input of shape {:?}: it has no rows",
            input.size()
        ))
        .hint("give a batch whose axis 0 counts samples"));
    }
    let sizes: Vec<i64> = shares(rows as usize, cards, weights).into_iter().map(|size| size as i64).collect();
    let parts = split(input, &sizes)?;
    Ok(parts.into_iter().zip(sizes).map(|(part, size)| (size > 0).then_some(part)).collect())
}

/// Views of consecutive rows.
pub(super) fn split(tensor: &Tensor, sizes: &[i64]) -> Result<Vec<Tensor>> {
    let mut first = 0;
    let mut parts = Vec::with_capacity(sizes.len());
    for &size in sizes {
        parts.push(tensor.f_narrow(0, first, size)?);
        first += size;
    }
    Ok(parts)
}

/// A copy, without history, in the memory of the card that the calling thread works for.
pub(super) fn fetch(tensor: &Tensor, device: Device) -> Result<Tensor> {
    let mut own = Tensor::f_empty(tensor.size(), (tensor.kind(), device))?;
    no_grad(|| own.f_copy_(tensor))?;
    Ok(own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    fn rows(parts: &[Tensor]) -> Vec<i64> {
        parts.iter().map(|part| part.size()[0]).collect()
    }

    fn given(parts: Vec<Option<Tensor>>) -> Vec<Tensor> {
        parts.into_iter().flatten().collect()
    }

    // Field case 001: and what libtorch itself does with the same numbers.
    #[test]
    fn chunks_are_tensor_chunks() {
        for (samples, cards, expected) in
            [(9, 4, vec![3, 3, 3]), (10, 4, vec![3, 3, 3, 1]), (4, 4, vec![1; 4]), (2, 3, vec![1, 1])]
        {
            let input = Tensor::arange(samples * 2, (Kind::Float, Device::Cpu)).reshape([samples, 2]);
            let parts = chunks(&input, cards, None).unwrap();
            assert_eq!(parts.len(), cards);
            let parts = given(parts);
            assert_eq!(rows(&parts), expected);
            assert_eq!(rows(&input.chunk(cards as i64, 0)), expected);
            assert_eq!(Tensor::cat(&parts, 0), input);
        }
    }

    #[test]
    fn weights_decide_who_gets_what_and_who_gets_nothing() {
        let input = Tensor::arange(20, (Kind::Float, Device::Cpu)).reshape([10, 2]);
        let parts = chunks(&input, 3, Some(&[1.0, 0.01, 3.0])).unwrap();
        assert!(parts[0].is_some() && parts[1].is_none());
        let parts = given(parts);
        // Quotas 2.494, 0.025 and 7.481: the row left over goes to the first.
        assert_eq!(rows(&parts), [3, 7]);
        assert_eq!(Tensor::cat(&parts, 0), input);
    }

    #[test]
    fn an_input_without_rows_is_refused() {
        for shape in [vec![], vec![0, 3]] {
            let error = chunks(&Tensor::zeros(&shape, (Kind::Float, Device::Cpu)), 2, None).unwrap_err();
            assert!(error.to_string().contains("has no rows"), "{error}");
        }
    }

    #[test]
    fn a_fetched_part_is_a_copy() {
        let batch = Tensor::ones([4, 2], (Kind::Float, Device::Cpu));
        let mut own = fetch(&batch.narrow(0, 1, 2), Device::Cpu).unwrap();
        let _ = own.fill_(5.0);
        assert_eq!(own.size(), [2, 2]);
        assert_eq!(batch.sum(Kind::Double).double_value(&[]), 8.0);
    }
}
