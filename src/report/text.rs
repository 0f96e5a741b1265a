//! Numbers and names as text. Always a decimal point, never NaN or infinity: what is not there is a dash.

use crate::config::EngineKind;
use crate::metrics::record::{Ratio, Results};

/// Stands for a value that could not be had.
pub(super) const MISSING: &str = "–";

/// With about three significant digits: `1234`, `123`, `12.3`, `1.23`, `0.0123`.
pub(super) fn number(value: f64) -> String {
    if !value.is_finite() {
        return MISSING.to_owned();
    }
    let size = value.abs();
    if size == 0.0 {
        return "0".to_owned();
    }
    if !(1e-4..1e15).contains(&size) {
        return format!("{value:.2e}");
    }
    // Rounding may carry into the next digit (9.999 is 10.0), so ask the rounded value.
    let digits = format!("{size:.2e}");
    let exponent: i32 = digits.rsplit('e').next().and_then(|e| e.parse().ok()).unwrap_or(0);
    format!("{value:.*}", (2 - exponent).clamp(0, 8) as usize)
}

/// [`number`], or a dash.
pub(super) fn number_or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| MISSING.to_owned(), number)
}

/// With this many decimals, or a dash.
pub(super) fn fixed_or_dash(value: Option<f64>, decimals: usize) -> String {
    value.filter(|v| v.is_finite()).map_or_else(|| MISSING.to_owned(), |v| format!("{v:.decimals$}"))
}

/// `83 %`, or a dash.
pub(super) fn percent_or_dash(value: Option<f64>) -> String {
    value.filter(|v| v.is_finite()).map_or_else(|| MISSING.to_owned(), |v| format!("{v:.0} %"))
}

/// `1.42x [1.39, 1.46]`, the interval only where there is one.
pub(super) fn ratio(ratio: &Ratio) -> String {
    match ratio.ci95 {
        Some([low, high]) => format!("{:.2}x [{low:.2}, {high:.2}]", ratio.ratio),
        None => format!("{:.2}x", ratio.ratio),
    }
}

/// The binary unit that suits the largest of these byte counts: its name and its size.
pub(super) fn memory_unit(largest: f64) -> (&'static str, f64) {
    match largest {
        l if l >= (1u64 << 30) as f64 => ("GiB", (1u64 << 30) as f64),
        l if l >= (1u64 << 20) as f64 => ("MiB", (1u64 << 20) as f64),
        _ => ("KiB", 1024.0),
    }
}

/// An engine's name for people, from its name in the record.
pub(super) fn engine(name: &str) -> String {
    match name {
        "single" => "Single".to_owned(),
        "single_per_card" => "Single per card".to_owned(),
        "dp" => "DP".to_owned(),
        "ddp" => "DDP".to_owned(),
        other => match (other.strip_prefix("torch_"), other.split_once('[')) {
            (Some(rest), _) => format!("PyTorch {}", engine(rest)),
            (None, Some((base, options))) => format!("{} [{options}", engine(base)),
            (None, None) => other.to_owned(),
        },
    }
}

/// The run's engines in the order in which people compare them: ours first, then peers.
pub(super) fn engines_in_order(results: &Results) -> Vec<&str> {
    let order = [
        EngineKind::SinglePerCard,
        EngineKind::Single,
        EngineKind::Dp,
        EngineKind::Ddp,
        EngineKind::TorchSingle,
        EngineKind::TorchDp,
        EngineKind::TorchDdp,
    ]
    .map(EngineKind::name);
    // A row that tries an option stands after its engine.
    let base = |name: &str| name.split('[').next().unwrap_or_default().to_owned();
    let place = |name: &str| order.iter().position(|known| *known == base(name)).unwrap_or(order.len());
    let mut names: Vec<&str> = results.engines.keys().map(String::as_str).collect();
    names.sort_by_key(|name| place(name));
    names
}

/// `1 card`, `2 cards`.
pub(super) fn count(n: usize, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

/// The numbers as one: `41`, or `38 to 41`.
pub(super) fn span(values: &[f64], show: impl Fn(f64) -> String) -> String {
    let low = show(values.iter().copied().fold(f64::INFINITY, f64::min));
    let high = show(values.iter().copied().fold(f64::NEG_INFINITY, f64::max));
    if low == high { low } else { format!("{low} to {high}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits_and_a_point() {
        for (value, expected) in [
            (1234.5, "1234"),
            (123.4, "123"),
            (12.34, "12.3"),
            (9.999, "10.0"),
            (1.234, "1.23"),
            (0.01234, "0.0123"),
            (3.2e-7, "3.20e-7"),
            (0.0, "0"),
            (-12.34, "-12.3"),
            (f64::NAN, MISSING),
            (f64::INFINITY, MISSING),
        ] {
            assert_eq!(number(value), expected);
        }
        assert_eq!(number_or_dash(None), MISSING);
        assert_eq!(percent_or_dash(Some(f64::NAN)), MISSING);
    }

    #[test]
    fn a_ratio_shows_its_interval_only_where_there_is_one() {
        assert_eq!(ratio(&Ratio { ratio: 1.4249, ci95: Some([1.391, 1.46]) }), "1.42x [1.39, 1.46]");
        assert_eq!(ratio(&Ratio { ratio: 1.4249, ci95: None }), "1.42x");
    }

    #[test]
    fn a_span_of_equal_texts_is_one_number() {
        assert_eq!(span(&[40.9, 38.2], |v| format!("{v:.0}")), "38 to 41");
        assert_eq!(span(&[40.9, 41.2], |v| format!("{v:.0}")), "41");
    }
}
