//! Data sets: all in memory, handed out as batches of rows by index.

use crate::Result;
use crate::config::DataSource;
use tch::Tensor;

/// Some samples, in the order asked for.
#[derive(Debug)]
pub struct Batch {
    /// `[n, ...]`.
    pub input: Tensor,
    /// `[n]` labels or `[n, context]` tokens.
    pub target: Tensor,
    /// Rows of this part.
    pub samples: usize,
    /// Rows of the whole global batch that this part belongs to: what weighting uneven ranks needs.
    pub global_samples: usize,
}

/// A data set.
#[derive(Debug)]
pub struct Dataset {
    input: Tensor,
    target: Tensor,
}

impl Dataset {
    /// Number of samples.
    pub fn len(&self) -> usize {
        self.target.size()[0] as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// These rows.
    pub fn batch(&self, indices: &[usize]) -> Result<Batch> {
        let _ = (&self.input, indices);
        todo!()
    }
}

/// Training and test part. `images` asks for `[n, c, h, w]` (convolutions); else samples are flat.
pub fn open(source: &DataSource, images: bool, seed: u64) -> Result<(Dataset, Dataset)> {
    let _ = (source, images, seed);
    todo!()
}
