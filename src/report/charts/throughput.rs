//! Speed of every engine: median, interval and each round.

use super::axis::Axis;
use super::layout::{MARGIN, Panel, SMALL, WIDTH, fitted, horizontal_axis};
use super::palette::{self, Ink};
use super::scene::{Label, Scene};
use crate::report::text::{self, number};
use crate::report::view::Throughput;

const PITCH: f64 = 52.0;
const BAR: f64 = 26.0;
/// Room for names; for those of options that are tried more.
const NAMES: [f64; 2] = [210.0, 330.0];

/// `None` without a measured engine.
pub(super) fn draw(view: &[Throughput]) -> Option<Scene> {
    let highest = view
        .iter()
        .flat_map(|e| e.rounds.iter().copied().chain([e.median]).chain(e.ci95.into_iter().flatten()))
        .filter(|v| v.is_finite())
        .reduce(f64::max)?;
    let left = NAMES[usize::from(view.iter().any(|row| row.engine.contains('[')))];
    let height = view.len() as f64 * PITCH;
    let mut scene = Scene::new(WIDTH, height + 66.0);
    let panel = Panel { left, top: 12.0, right: WIDTH - MARGIN - 70.0, bottom: 16.0 + height };
    let x = Axis::from_zero(highest, panel.across());
    horizontal_axis(&mut scene, &panel, &x, "samples per second");
    for (row, engine) in view.iter().enumerate() {
        let middle = panel.top + 2.0 + (row as f64 + 0.5) * PITCH;
        let ink = palette::engine(&engine.engine);
        let name = fitted(&text::engine(&engine.engine), 13.0, left - MARGIN - 12.0);
        scene.text(Label::new(MARGIN, middle - 8.0, name).size(13.0).bold().ink(ink));
        let batch = if engine.cards == 1 {
            format!("1 card, batch {}", engine.global_batch)
        } else {
            format!(
                "{} cards, batch {} ({} per card)",
                engine.cards, engine.global_batch, engine.batch_per_card
            )
        };
        let batch = fitted(&batch, SMALL, left - MARGIN - 8.0);
        scene.text(Label::new(MARGIN, middle + 9.0, batch).size(SMALL).ink(Ink::MUTED));
        let Some(end) = x.at(engine.median) else { continue };
        scene.rect(left, middle - BAR / 2.0, end - left, BAR, ink.tint(palette::AREA));
        scene.line((end, middle - BAR / 2.0), (end, middle + BAR / 2.0), ink, 2.5);
        for (round, value) in engine.rounds.iter().enumerate() {
            if let Some(at) = x.at(*value) {
                // Spread over the lower half of the bar in the order of rounds, so that equal ones are seen.
                let part = (round as f64 + 0.5) / engine.rounds.len() as f64;
                scene.disc(at, middle + 2.0 + part * (BAR / 2.0 - 4.0), 2.5, ink);
            }
        }
        if let Some((low, high)) = engine.ci95.and_then(|[low, high]| Some((x.at(low)?, x.at(high)?))) {
            let y = middle - BAR / 4.0;
            scene.line((low, y), (high, y), Ink::TEXT, 1.5);
            for cap in [low, high] {
                scene.line((cap, y - 4.0), (cap, y + 4.0), Ink::TEXT, 1.5);
            }
        }
        let reach =
            engine.rounds.iter().copied().chain(engine.ci95.into_iter().flatten()).filter_map(|v| x.at(v));
        let label = Label::new(reach.fold(end, f64::max) + 8.0, middle, number(engine.median));
        scene.text(label.size(13.0).bold());
    }
    Some(scene)
}
