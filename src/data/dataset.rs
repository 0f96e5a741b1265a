//! Data sets: all in memory, handed out as batches of rows by index.
//!
//! Rows lie in plain vectors, not in tensors: a data set belongs to the host, and must not be counted as
//! a card's memory. The real ones are built into the binary, so that it works from any folder. Parsers
//! take bytes and the file's name, so that what is wrong can be named.

use super::generated;
use crate::config::DataSource;
use crate::error::{Error, Kind, Result};
use flate2::read::GzDecoder;
use std::io::Read;
use tch::{Device, Tensor};

/// Some samples, in the order asked for.
#[derive(Debug)]
pub struct Batch {
    /// `[n, ...]`, f32, or i64 tokens.
    pub input: Tensor,
    /// `[n]` labels or `[n, context]` tokens, i64.
    pub target: Tensor,
    /// Rows of this part.
    pub samples: usize,
    /// Rows of the whole global batch that this part belongs to: what weighting uneven ranks needs.
    pub global_samples: usize,
    /// Of `samples`, rows that were seen before in this epoch and only fill up the last global batch.
    pub repeated: usize,
}

impl Batch {
    /// A whole global batch; rows are counted along axis 0 of the target.
    pub fn whole(input: Tensor, target: Tensor) -> Self {
        let samples = target.size().first().map_or(0, |rows| *rows as usize);
        Self { input, target, samples, global_samples: samples, repeated: 0 }
    }

    /// The same rows in the memory of this device.
    pub fn to_device(self, device: Device) -> Result<Self> {
        if device == self.input.device() {
            return Ok(self);
        }
        Ok(Self { input: self.input.f_to_device(device)?, target: self.target.f_to_device(device)?, ..self })
    }
}

/// A data set, row after row.
#[derive(Debug)]
pub struct Dataset {
    input: Values,
    input_shape: Vec<i64>,
    target: Vec<i64>,
    target_shape: Vec<i64>,
    rows: usize,
}

#[derive(Debug)]
enum Values {
    Float(Vec<f32>),
    Token(Vec<i64>),
}

/// Beyond this libtorch's randperm takes another path than [`super::randperm`].
const MOST_ROWS: usize = (u32::MAX / 20) as usize;

impl Dataset {
    /// Images or other float samples: `input` holds `target.len()` samples of `shape`, one after another.
    pub fn from_floats(input: Vec<f32>, shape: &[i64], target: Vec<i64>) -> Result<Self> {
        let rows = target.len();
        Self::new(Values::Float(input), shape, target, &[], rows)
    }

    /// Token sequences: input and target both hold `context` tokens a sample.
    pub fn from_tokens(input: Vec<i64>, target: Vec<i64>, context: i64) -> Result<Self> {
        let rows = target.len() / context.max(1) as usize;
        Self::new(Values::Token(input), &[context], target, &[context], rows)
    }

    fn new(
        input: Values,
        input_shape: &[i64],
        target: Vec<i64>,
        target_shape: &[i64],
        rows: usize,
    ) -> Result<Self> {
        let values = match &input {
            Values::Float(values) => values.len(),
            Values::Token(values) => values.len(),
        };
        if values != rows * numel(input_shape) || target.len() != rows * numel(target_shape) {
            return Err(Error::new(
                Kind::Corrupt,
                format!(
                    "{values} input values and {} targets do not make {rows} samples of {input_shape:?}",
                    target.len()
                ),
            ));
        }
        if rows >= MOST_ROWS {
            return Err(Error::usage(format!(
                "data set of {rows} samples: at most {MOST_ROWS} are supported"
            )));
        }
        Ok(Self {
            input,
            input_shape: input_shape.to_vec(),
            target,
            target_shape: target_shape.to_vec(),
            rows,
        })
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// These rows, as a batch of their own. No rows give tensors of zero rows.
    pub fn batch(&self, indices: &[usize]) -> Result<Batch> {
        if let Some(index) = indices.iter().find(|index| **index >= self.rows) {
            return Err(Error::usage(format!("sample {index} of a data set of {}", self.rows)));
        }
        let input = match &self.input {
            Values::Float(values) => {
                Tensor::f_from_slice(&gather(values, indices, numel(&self.input_shape)))?
            }
            Values::Token(values) => {
                Tensor::f_from_slice(&gather(values, indices, numel(&self.input_shape)))?
            }
        };
        let target = Tensor::f_from_slice(&gather(&self.target, indices, numel(&self.target_shape)))?;
        let shaped =
            |tensor: Tensor, shape: &[i64]| tensor.f_reshape([&[indices.len() as i64], shape].concat());
        Ok(Batch::whole(shaped(input, &self.input_shape)?, shaped(target, &self.target_shape)?))
    }
}

/// Values of one sample of this shape.
pub(super) fn numel(shape: &[i64]) -> usize {
    shape.iter().product::<i64>() as usize
}

fn gather<T: Copy>(values: &[T], indices: &[usize], stride: usize) -> Vec<T> {
    let mut rows = Vec::with_capacity(indices.len() * stride);
    for index in indices {
        rows.extend_from_slice(&values[index * stride..][..stride]);
    }
    rows
}

/// A compressed file and its name.
#[derive(Clone, Copy)]
struct File<'a> {
    name: &'a str,
    bytes: &'a [u8],
}

const DIGITS: File = File { name: "data/digits.csv.gz", bytes: include_bytes!("../../data/digits.csv.gz") };
const TRAIN_IMAGES: File = File {
    name: "data/mnist10k-train-images-idx3-ubyte.gz",
    bytes: include_bytes!("../../data/mnist10k-train-images-idx3-ubyte.gz"),
};
const TRAIN_LABELS: File = File {
    name: "data/mnist10k-train-labels-idx1-ubyte.gz",
    bytes: include_bytes!("../../data/mnist10k-train-labels-idx1-ubyte.gz"),
};
const TEST_IMAGES: File = File {
    name: "data/mnist10k-test-images-idx3-ubyte.gz",
    bytes: include_bytes!("../../data/mnist10k-test-images-idx3-ubyte.gz"),
};
const TEST_LABELS: File = File {
    name: "data/mnist10k-test-labels-idx1-ubyte.gz",
    bytes: include_bytes!("../../data/mnist10k-test-labels-idx1-ubyte.gz"),
};

impl File<'_> {
    fn corrupt(&self, what: impl std::fmt::Display) -> Error {
        Error::new(Kind::Corrupt, format!("`{}`: {what}", self.name))
            .hint("restore the file from the repository and build again")
    }

    fn unpack(&self) -> Result<Vec<u8>> {
        let mut unpacked = Vec::new();
        GzDecoder::new(self.bytes)
            .read_to_end(&mut unpacked)
            .map_err(|error| self.corrupt(format!("gzip fails after {} bytes: {error}", unpacked.len())))?;
        Ok(unpacked)
    }
}

/// Training and test part. `images` asks for `[n, c, h, w]` (convolutions); else samples are flat.
/// `seed` draws the generated sets; the real ones do not depend on it.
pub fn open(source: &DataSource, images: bool, seed: u64) -> Result<(Dataset, Dataset)> {
    match source {
        DataSource::Digits => digits(DIGITS, images),
        DataSource::Mnist10k => {
            Ok((mnist(TRAIN_IMAGES, TRAIN_LABELS, images)?, mnist(TEST_IMAGES, TEST_LABELS, images)?))
        }
        DataSource::Synthetic { shape, classes, samples } => {
            generated::synthetic(shape, *classes, *samples, images, seed)
        }
        DataSource::Tokens { context, vocabulary, samples } => {
            generated::tokens(*context, *vocabulary, *samples, seed)
        }
    }
}

/// 8x8 images, brightness 0 to 16 scaled to 0..1; every tenth image is for testing.
fn digits(file: File, images: bool) -> Result<(Dataset, Dataset)> {
    const PIXELS: usize = 64;
    let text = file.unpack()?;
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text.as_slice());
    let (mut train, mut test) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
    for (row, record) in reader.deserialize::<Vec<u8>>().enumerate() {
        let line = row + 1;
        let record = record.map_err(|error| file.corrupt(format!("line {line}: {error}")))?;
        let Some((&label, pixels)) = record.split_last().filter(|(_, pixels)| pixels.len() == PIXELS) else {
            return Err(file.corrupt(format!(
                "line {line}: {} columns, expected {}",
                record.len(),
                PIXELS + 1
            )));
        };
        if let Some(pixel) = pixels.iter().find(|pixel| **pixel > 16) {
            return Err(file.corrupt(format!("line {line}: pixel {pixel}, expected 0 to 16")));
        }
        if label > 9 {
            return Err(file.corrupt(format!("line {line}: label {label}, expected 0 to 9")));
        }
        let (inputs, labels) = if row % 10 == 9 { &mut test } else { &mut train };
        inputs.extend(pixels.iter().map(|pixel| f32::from(*pixel) / 16.0));
        labels.push(i64::from(label));
    }
    if test.1.is_empty() {
        return Err(file.corrupt(format!("{} images, too few to keep any for testing", train.1.len())));
    }
    let shape = image_shape(images, 8, 8);
    Ok((Dataset::from_floats(train.0, &shape, train.1)?, Dataset::from_floats(test.0, &shape, test.1)?))
}

/// 28x28 images in MNIST's IDX format, normalised with MNIST's mean and deviation.
fn mnist(images: File, labels: File, as_images: bool) -> Result<Dataset> {
    const MEAN: f32 = 0.1307;
    const DEVIATION: f32 = 0.3081;
    let (sizes, pixels) = idx::<3>(&images, &images.unpack()?)?;
    let ([count], digits) = idx::<1>(&labels, &labels.unpack()?)?;
    let [rows, height, width] = sizes;
    if count != rows {
        return Err(labels.corrupt(format!("{count} labels for the {rows} images of `{}`", images.name)));
    }
    if let Some(at) = digits.iter().position(|digit| *digit > 9) {
        return Err(labels.corrupt(format!("label {} at sample {at}, expected 0 to 9", digits[at])));
    }
    let input = pixels.iter().map(|pixel| (f32::from(*pixel) / 255.0 - MEAN) / DEVIATION).collect();
    let shape = image_shape(as_images, height as i64, width as i64);
    Dataset::from_floats(input, &shape, digits.into_iter().map(i64::from).collect())
}

/// An IDX file of bytes with `N` dimensions: its sizes and its values.
fn idx<const N: usize>(file: &File, bytes: &[u8]) -> Result<([usize; N], Vec<u8>)> {
    let word = |at: usize| -> Result<usize> {
        let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
        let word =
            word.ok_or_else(|| file.corrupt(format!("ends at byte {} inside the header", bytes.len())))?;
        Ok(u32::from_be_bytes(word) as usize)
    };
    const UNSIGNED_BYTE: usize = 0x08;
    let magic = word(0)?;
    if magic != UNSIGNED_BYTE << 8 | N {
        return Err(file.corrupt(format!(
            "byte 0: magic number {magic:#010x}, expected {:#010x}",
            UNSIGNED_BYTE << 8 | N
        )));
    }
    let mut sizes = [0; N];
    for (axis, size) in sizes.iter_mut().enumerate() {
        *size = word(4 + 4 * axis)?;
    }
    let header = 4 + 4 * N;
    let expected = sizes.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
    let values = &bytes[header..];
    if expected != Some(values.len()) {
        return Err(
            file.corrupt(format!("{} bytes after the header, which promises {sizes:?}", values.len()))
        );
    }
    Ok((sizes, values.to_vec()))
}

/// The shape of one single-channel image, or its pixels in one row.
fn image_shape(images: bool, height: i64, width: i64) -> Vec<i64> {
    if images { vec![1, height, width] } else { vec![height * width] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;

    fn packed(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn values(tensor: &Tensor) -> Vec<f64> {
        Vec::try_from(tensor.reshape([-1]).to_kind(tch::Kind::Double)).unwrap()
    }

    fn message<T>(result: Result<T>) -> String {
        result.err().expect("an error").to_string()
    }

    #[test]
    fn digits_keeps_every_tenth_image_for_testing() {
        let (train, test) = open(&DataSource::Digits, false, 0).unwrap();
        assert_eq!((train.len(), test.len()), (1797 - 179, 179));
        let first = train.batch(&[0]).unwrap();
        assert_eq!(first.input.size(), [1, 64]);
        // The file's first line starts 0,0,5,13 and ends with label 0.
        assert_eq!(values(&first.input)[..4], [0.0, 0.0, 5.0 / 16.0, 13.0 / 16.0]);
        assert_eq!(values(&first.target), [0.0]);
        let (images, _) = open(&DataSource::Digits, true, 0).unwrap();
        assert_eq!(images.batch(&[3, 1]).unwrap().input.size(), [2, 1, 8, 8]);
    }

    #[test]
    fn mnist10k_is_normalised() {
        let (train, test) = open(&DataSource::Mnist10k, true, 0).unwrap();
        assert_eq!((train.len(), test.len()), (9000, 1000));
        let batch = train.batch(&(0..9000).collect::<Vec<_>>()).unwrap();
        assert_eq!(batch.input.size(), [9000, 1, 28, 28]);
        assert!(batch.input.mean(tch::Kind::Double).double_value(&[]).abs() < 0.05);
        assert!((batch.input.std(false).double_value(&[]) - 1.0).abs() < 0.05);
        // 9, 3, 7, 0 are the first labels of the file.
        assert_eq!(values(&batch.target)[..4], [9.0, 3.0, 7.0, 0.0]);
    }

    #[test]
    fn rows_come_in_the_order_asked_for() {
        let data = Dataset::from_floats(vec![0., 1., 10., 11., 20., 21.], &[2], vec![5, 6, 7]).unwrap();
        let batch = data.batch(&[2, 0, 2]).unwrap();
        assert_eq!(values(&batch.input), [20., 21., 0., 1., 20., 21.]);
        assert_eq!(values(&batch.target), [7., 5., 7.]);
        assert_eq!((batch.samples, batch.global_samples), (3, 3));
    }

    #[test]
    fn no_rows_are_a_batch_of_no_rows() {
        let data = Dataset::from_floats(vec![0.; 6], &[2], vec![0; 3]).unwrap();
        let batch = data.batch(&[]).unwrap();
        assert_eq!((batch.input.size(), batch.target.size()), (vec![0, 2], vec![0]));
    }

    #[test]
    fn a_row_that_is_not_there_is_named() {
        let data = Dataset::from_floats(vec![0.; 6], &[2], vec![0; 3]).unwrap();
        assert_eq!(message(data.batch(&[1, 3])), "sample 3 of a data set of 3");
    }

    #[test]
    fn bad_digits_are_named_by_file_and_line() {
        let good = format!("{}1\n", "0,".repeat(64));
        let bad =
            |text: String| message(digits(File { name: "x.csv.gz", bytes: &packed(text.as_bytes()) }, false));
        assert_eq!(bad(format!("{good}1,2,3\n")), "`x.csv.gz`: line 2: 3 columns, expected 65");
        assert_eq!(bad(format!("{}12\n", "0,".repeat(64))), "`x.csv.gz`: line 1: label 12, expected 0 to 9");
        assert_eq!(
            bad(format!("17,{}1\n", "0,".repeat(63))),
            "`x.csv.gz`: line 1: pixel 17, expected 0 to 16"
        );
        assert!(bad(format!("x,{}1\n", "0,".repeat(63))).starts_with("`x.csv.gz`: line 1: "));
        assert_eq!(bad(good), "`x.csv.gz`: 1 images, too few to keep any for testing");
        assert_eq!(bad(String::new()), "`x.csv.gz`: 0 images, too few to keep any for testing");
    }

    #[test]
    fn a_cut_off_archive_is_named() {
        let whole = packed(&[7; 1000]);
        let error = File { name: "cut.gz", bytes: &whole[..whole.len() / 2] }.unpack().unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(error.to_string().starts_with("`cut.gz`: gzip fails after "), "{error}");
    }

    #[test]
    fn bad_idx_files_are_named_by_position() {
        let file = File { name: "f", bytes: &[] };
        let labels = |bytes: &[u8]| message(idx::<1>(&file, bytes));
        assert_eq!(labels(&[]), "`f`: ends at byte 0 inside the header");
        assert_eq!(labels(&[0, 0, 8, 1, 0, 0]), "`f`: ends at byte 6 inside the header");
        assert_eq!(
            labels(&[0, 0, 8, 3, 0, 0, 0, 1]),
            "`f`: byte 0: magic number 0x00000803, expected 0x00000801"
        );
        assert_eq!(labels(&[0, 0, 8, 1, 0, 0, 0, 2, 9]), "`f`: 1 bytes after the header, which promises [2]");
        assert_eq!(idx::<1>(&file, &[0, 0, 8, 1, 0, 0, 0, 2, 9, 3]).unwrap(), ([2], vec![9, 3]));
    }

    #[test]
    fn images_and_labels_must_match() {
        let images = packed(&[&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1][..], &[5, 6]].concat());
        let labels = |body: &[u8]| packed(&[&[0, 0, 8, 1, 0, 0, 0, body.len() as u8][..], body].concat());
        let read = |body: &[u8]| {
            mnist(File { name: "i", bytes: &images }, File { name: "l", bytes: &labels(body) }, true)
        };
        assert_eq!(message(read(&[1])), "`l`: 1 labels for the 2 images of `i`");
        assert_eq!(message(read(&[1, 11])), "`l`: label 11 at sample 1, expected 0 to 9");
        assert_eq!(read(&[1, 2]).unwrap().len(), 2);
    }
}
