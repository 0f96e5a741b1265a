//! The result as Markdown, for an issue or a chat.

use super::view::{Table, View};

/// Headline, sentences, tables, plan and warnings.
pub(super) fn markdown(view: &View) -> String {
    let mut text = format!("# {}\n\n**{}**\n\n", escape(&view.title), escape(&view.verdict.headline));
    for sentence in &view.verdict.sentences {
        text += &format!("- {}\n", escape(sentence));
    }
    text += "\n## Engines\n\n";
    text += &table(&view.speed);
    text += "\n";
    text += &table(&view.balance);
    if !view.ab.rows.is_empty() {
        text += "\n## What options cost\n\n";
        text += &table(&view.ab);
    }
    text += "\n## Cards\n\n";
    text += &table(&view.cards);
    text += "\n## What was run\n\n";
    for fact in &view.facts {
        text += &format!("- {}: {}\n", fact.name, escape(&fact.value));
    }
    if !view.warnings.is_empty() || !view.notes.is_empty() {
        text += "\n## Warnings\n\n";
    }
    for warning in &view.warnings {
        let hint = warning.hint.as_ref().map(|hint| format!(" Hint: {}.", escape(hint))).unwrap_or_default();
        text += &format!("- {}.{hint}\n", escape(&warning.message));
    }
    for note in &view.notes {
        text += &format!("- {}.\n", escape(note));
    }
    text
}

fn table(table: &Table) -> String {
    let row = |cells: &[String]| {
        format!("| {} |\n", cells.iter().map(|c| escape(c)).collect::<Vec<_>>().join(" | "))
    };
    let rule: String = (0..table.header.len()).map(|i| if i == 0 { " :-- |" } else { " --: |" }).collect();
    let rows: String = table.rows.iter().map(|cells| row(cells)).collect();
    format!("{}|{rule}\n{rows}", row(&table.header))
}

/// Text that stays text: no markup, no line of its own.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' | '`' | '*' | '_' | '|' | '#' | '[' | ']' => escaped.extend(['\\', c]),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}
