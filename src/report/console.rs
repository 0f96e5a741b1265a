//! The result for a terminal: 80 columns, readable without colour.

use super::text::count;
use super::verdict::verdict;
use super::view::{Table, tables};
use crate::metrics::record::Results;
use comfy_table::{CellAlignment, ContentArrangement, LineStyle};

/// Columns of a terminal that nobody has widened.
const COLUMNS: usize = 80;

/// The result as text for a terminal of 80 columns; needs no colour. Ends with a newline.
pub fn console(results: &Results) -> String {
    let verdict = verdict(results);
    let mut text = wrap(&verdict.headline, "", "") + "\n";
    for sentence in &verdict.sentences {
        text += &wrap(sentence, "- ", "  ");
    }
    // What options cost stands in a table of its own: rows with long names would not fit the others.
    let plain = |table: Table| table.without(|name| name.contains('['));
    for (table, columns) in [
        (
            plain(tables::speed(results)),
            &["Batch, global", "Batch, per card", "Samples/s", "95 % interval", "Step, ms", "Energy"][..],
        ),
        (
            plain(tables::balance(results)),
            &["Weak scaling", "Strong scaling", "Imbalance, busy", "Imbalance, memory", "Overlap"],
        ),
        (tables::ab(results), &["Throughput", "Memory peak", "Loss differs by"]),
        (
            plain(tables::cards(results)),
            &["Card", "Busy", "Compute, ms", "Comm., ms", "Wait, ms", "Peak memory"],
        ),
    ] {
        if !table.rows.is_empty() {
            text += "\n";
            text += &draw(&table, columns);
        }
    }
    if !results.warnings.is_empty() {
        text += &format!("\n{}:\n", count(results.warnings.len(), "warning"));
    }
    for warning in &results.warnings {
        text += &wrap(&warning.message, "- ", "  ");
        if let Some(hint) = &warning.hint {
            text += &wrap(&format!("hint: {hint}"), "  ", "  ");
        }
    }
    text
}

/// The engines' names and these columns: as many as 80 characters hold.
fn draw(table: &Table, columns: &[&str]) -> String {
    let picked = table.columns(columns);
    let mut drawn = comfy_table::Table::new();
    drawn
        .force_no_tty()
        .load_style(comfy_table::presets::NOTHING.header_separator(LineStyle::none().fill('-').junction('-')))
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(picked.header.iter().map(|name| two_lines(name)))
        .add_rows(picked.rows.into_iter().map(|mut row| {
            if let Some(name) = row.first_mut() {
                *name = on_lines(name);
            }
            row
        }));
    for column in drawn.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    // The table pads its last column: nothing on a line's end helps a reader or a diff.
    drawn.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// `DDP [a=1 b=2]` with each option on a line of its own.
fn on_lines(name: &str) -> String {
    match name.split_once(" [") {
        None => name.to_owned(),
        Some((engine, options)) => {
            format!("{engine}\n  {}", options.trim_end_matches(']').replace(' ', "\n  "))
        }
    }
}

/// A column's name over its unit or its kind, so that columns are as narrow as their figures.
fn two_lines(name: &str) -> String {
    match name.rsplit_once(", ").map(|(first, second)| (format!("{first},"), second)) {
        Some((first, second)) => format!("{first}\n{second}"),
        None => name
            .rsplit_once(' ')
            .map_or_else(|| name.to_owned(), |(first, second)| format!("{first}\n{second}")),
    }
}

/// Lines of at most [`COLUMNS`] characters; a word longer than a line stands alone.
pub(crate) fn wrap(text: &str, first: &str, rest: &str) -> String {
    let mut lines = String::new();
    let mut line = first.to_owned();
    let mut empty = true;
    // A figure and its unit stay on one line.
    let text = text.replace(" %", "\u{a0}%");
    for word in text.split([' ', '\n']).filter(|word| !word.is_empty()) {
        if !empty && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            lines += line.trim_end();
            lines += "\n";
            line = rest.to_owned();
            empty = true;
        }
        if !empty {
            line += " ";
        }
        line += &word.replace('\u{a0}', " ");
        empty = false;
    }
    lines + &line + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapping_keeps_to_the_width_and_indents() {
        let text = "word ".repeat(40);
        let wrapped = wrap(&text, "- ", "  ");
        assert!(wrapped.lines().all(|line| line.chars().count() <= COLUMNS));
        assert!(wrapped.lines().skip(1).all(|line| line.starts_with("  word")));
        assert_eq!(wrapped.matches("word").count(), 40);
    }
}
