//! Pieces that charts share: panels with axes, legends, and room for text.

use super::axis::Axis;
use super::palette::Ink;
use super::render::text_width;
use super::scene::{Align, Label, Scene};

/// Width of every chart, in CSS pixels.
pub(super) const WIDTH: f64 = 960.0;

/// Empty border round a chart.
pub(super) const MARGIN: f64 = 16.0;

/// Text of ticks and small notes.
pub(super) const SMALL: f64 = 11.0;

/// Rectangle of a panel, without its labels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Panel {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) right: f64,
    pub(super) bottom: f64,
}

impl Panel {
    pub(super) fn width(&self) -> f64 {
        self.right - self.left
    }

    pub(super) fn height(&self) -> f64 {
        self.bottom - self.top
    }

    /// Pixels of a horizontal axis.
    pub(super) fn across(&self) -> (f64, f64) {
        (self.left, self.right)
    }

    /// Pixels of a vertical axis: values grow upwards.
    pub(super) fn upwards(&self) -> (f64, f64) {
        (self.bottom, self.top)
    }
}

/// Labels and upright grid lines of a horizontal axis, and its name with unit.
pub(super) fn horizontal_axis(scene: &mut Scene, panel: &Panel, axis: &Axis, name: &str) {
    for (tick, label) in axis.ticks.iter().zip(axis.labels()) {
        if let Some(x) = axis.at(*tick) {
            scene.line((x, panel.top), (x, panel.bottom), Ink::GRID, 1.0);
            scene.text(
                Label::new(x, panel.bottom + 12.0, label).size(SMALL).ink(Ink::MUTED).align(Align::Middle),
            );
        }
    }
    let middle = (panel.left + panel.right) / 2.0;
    scene
        .text(Label::new(middle, panel.bottom + 29.0, name).size(SMALL).ink(Ink::MUTED).align(Align::Middle));
}

/// Labels and level grid lines of a vertical axis.
pub(super) fn vertical_axis(scene: &mut Scene, panel: &Panel, axis: &Axis, unit: &str) {
    for (tick, label) in axis.ticks.iter().zip(axis.labels()) {
        if let Some(y) = axis.at(*tick) {
            scene.line((panel.left, y), (panel.right, y), Ink::GRID, 1.0);
            let label = Label::new(panel.left - 6.0, y, format!("{label}{unit}"));
            scene.text(label.size(SMALL).ink(Ink::MUTED).align(Align::Right));
        }
    }
}

/// What a key in a legend looks like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Key {
    Filled(Ink),
    Hatched,
    Line(Ink, f64),
}

/// Keys with names, row after row from (`left`, `top`) to the chart's margin; the height it took.
pub(super) fn legend(scene: &mut Scene, left: f64, top: f64, entries: &[(Key, String)]) -> f64 {
    const ROW: f64 = 20.0;
    const KEY: f64 = 16.0;
    let (mut x, mut y) = (left, top + ROW / 2.0);
    for (key, name) in entries {
        // Viewers set the text in a face of their own, which may run wider.
        let width = KEY + 6.0 + text_width(name, 12.0) * 1.08 + 18.0;
        if x + width > WIDTH - MARGIN && x > left {
            (x, y) = (left, y + ROW);
        }
        match key {
            Key::Filled(ink) => scene.rect(x, y - 5.5, KEY, 11.0, *ink),
            Key::Hatched => scene.hatched(x, y - 5.5, KEY, 11.0),
            Key::Line(ink, width) => scene.line((x, y), (x + KEY, y), *ink, *width),
        }
        scene.text(Label::new(x + KEY + 6.0, y, name.clone()));
        x += width;
    }
    y + ROW / 2.0 - top
}

/// `text`, cut so that it fits.
pub(super) fn fitted(text: &str, size: f64, width: f64) -> String {
    if text_width(text, size) <= width {
        return text.to_owned();
    }
    let mut cut: Vec<char> = text.chars().collect();
    while cut.pop().is_some() {
        let shorter: String = cut.iter().collect::<String>() + "…";
        if text_width(&shorter, size) <= width {
            return shorter;
        }
    }
    String::new()
}
