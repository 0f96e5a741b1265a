//! Peak memory of every card, engine by engine.

use super::axis::Axis;
use super::layout::{MARGIN, Panel, SMALL, WIDTH, horizontal_axis};
use super::palette::{self, Ink};
use super::scene::{Align, Label, Scene};
use crate::report::text;
use crate::report::view::EnginePeaks;

const BAR: f64 = 18.0;
const PITCH: f64 = 23.0;
const GROUP_GAP: f64 = 16.0;
const LEFT: f64 = 130.0;

/// `None` when no peak is known.
pub(super) fn draw(view: &[EnginePeaks]) -> Option<Scene> {
    let largest = view.iter().flat_map(|e| &e.cards).filter_map(|(_, bytes)| *bytes).max()? as f64;
    let (unit, size) = text::memory_unit(largest);
    let bars: usize = view.iter().map(|engine| engine.cards.len()).sum();
    let height = bars as f64 * PITCH + (view.len() as f64 - 1.0) * GROUP_GAP;
    let mut scene = Scene::new(WIDTH, height + 70.0);
    // Room for the figure after the longest bar.
    let panel = Panel { left: LEFT, top: 16.0, right: WIDTH - MARGIN - 80.0, bottom: 20.0 + height };
    let x = Axis::from_zero(largest / size, panel.across());
    horizontal_axis(&mut scene, &panel, &x, &format!("peak memory, {unit}"));
    let mut y = panel.top + 4.0;
    for engine in view {
        let ink = palette::engine(&engine.engine);
        let name = super::layout::fitted(&text::engine(&engine.engine), 13.0, LEFT - MARGIN - 56.0);
        scene.text(Label::new(MARGIN, y + BAR / 2.0, name).size(13.0).bold().ink(ink));
        for (card, bytes) in &engine.cards {
            let middle = y + BAR / 2.0;
            scene.text(
                Label::new(LEFT - 8.0, middle, format!("card {card}"))
                    .size(SMALL)
                    .ink(Ink::MUTED)
                    .align(Align::Right),
            );
            let value = bytes.map(|bytes| bytes as f64 / size);
            if let Some(end) = value.and_then(|value| x.at(value)) {
                scene.rect(LEFT, y, (end - LEFT).max(1.0), BAR, ink);
            }
            let end = value.and_then(|value| x.at(value)).unwrap_or(LEFT);
            let figure = text::number_or_dash(value) + if value.is_some() { " " } else { "" };
            let figure = if value.is_some() { figure + unit } else { figure };
            scene.text(Label::new(end + 6.0, middle, figure));
            y += PITCH;
        }
        y += GROUP_GAP;
    }
    Some(scene)
}
