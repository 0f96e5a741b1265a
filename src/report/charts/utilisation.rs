//! How busy each card was over time, engines side by side on the same axes: the picture this project
//! exists for.

use super::axis::Axis;
use super::layout::{MARGIN, Panel, SMALL, WIDTH, horizontal_axis, vertical_axis};
use super::palette::{self, Ink};
use super::scene::{Align, Label, Scene};
use crate::report::text;
use crate::report::view::{EngineTracks, OverTime, Point, Track, downsample};

const GAP: f64 = 28.0;
const TOP: f64 = 58.0;
const BOTTOM: f64 = 44.0;
const LEFT: f64 = 54.0;

/// `None` when no reading fell into the measured steps.
pub(super) fn draw(view: &OverTime) -> Option<Scene> {
    view.values().next()?;
    let rows = view.engines.iter().map(|engine| engine.tracks.len()).max().unwrap_or(0);
    // Eight cards still fit a screen; more get low lanes rather than a page of their own.
    let lane = (600.0 / rows as f64).clamp(60.0, 140.0);
    let mut scene = Scene::new(WIDTH, TOP + lane * rows as f64 - 30.0 + BOTTOM);
    let columns = view.engines.len() as f64;
    let width = (WIDTH - LEFT - MARGIN - GAP * (columns - 1.0)) / columns;
    for (column, engine) in view.engines.iter().enumerate() {
        let left = LEFT + column as f64 * (width + GAP);
        let name = text::engine(engine.engine.name());
        let title = Label::new(left, 20.0, name).size(16.0).bold().ink(palette::engine(engine.engine.name()));
        scene.text(title);
        for (row, track) in engine.tracks.iter().enumerate() {
            let top = TOP + row as f64 * lane;
            let panel = Panel { left, top, right: left + width, bottom: top + lane - 30.0 };
            let place = Place { first_column: column == 0, last_row: row + 1 == engine.tracks.len() };
            draw_lane(&mut scene, &panel, view.seconds(), engine, track, &place);
        }
    }
    Some(scene)
}

/// Where a lane is among the others: axes are labelled once.
struct Place {
    first_column: bool,
    last_row: bool,
}

fn draw_lane(
    scene: &mut Scene,
    panel: &Panel,
    seconds: f64,
    engine: &EngineTracks,
    track: &Track,
    place: &Place,
) {
    let ink = palette::engine(engine.engine.name());
    scene.rect(panel.left, panel.top, panel.width(), panel.height(), Ink::LANE);
    let y = Axis::exactly_from_zero(100.0, panel.upwards());
    let x = Axis::exactly_from_zero(seconds, panel.across());
    if place.first_column {
        let halves = [0.0, 50.0, 100.0].map(|percent| (percent, format!("{percent} %")));
        for (percent, label) in &halves[if panel.height() < 50.0 { 1 } else { 0 }..] {
            if let Some(at) = y.at(*percent) {
                let label = Label::new(panel.left - 6.0, at, label.clone());
                scene.text(label.size(SMALL).ink(Ink::MUTED).align(Align::Right));
            }
        }
    }
    if let Some(half) = y.at(50.0) {
        scene.line((panel.left, half), (panel.right, half), Ink::GRID, 1.0);
    }
    let points = downsample(&track.points, seconds, panel.width() as usize * 2);
    for run in points.split(|point| point.1.is_none()) {
        let outline: Vec<(f64, f64)> = run.iter().filter_map(|point| place_point(point, &x, &y)).collect();
        if let (Some(first), Some(last)) = (outline.first(), outline.last()) {
            let mut area = vec![(first.0, panel.bottom)];
            area.extend(&outline);
            area.push((last.0, panel.bottom));
            scene.polygon(area, ink.tint(palette::AREA));
            scene.path(outline, ink, 1.5);
        }
    }
    for border in engine.borders.iter().skip(1).take(engine.borders.len().saturating_sub(2)) {
        if let Some(at) = x.at(*border) {
            scene.line((at, panel.top), (at, panel.bottom), Ink::PAPER, 2.0);
        }
    }
    let mean = track.mean.map(|mean| format!(": busy {mean:.0} % on average")).unwrap_or_default();
    let label = Label::new(panel.left, panel.top - 10.0, format!("Card {}{mean}", track.card));
    scene.text(label.bold());
    let done = engine.borders.last().and_then(|end| x.at(*end)).unwrap_or(panel.right);
    if let Some(mean) = track.mean.and_then(|mean| y.at(mean)) {
        scene.dashed((panel.left, mean), (done, mean), Ink::TEXT, 1.0, 4.0);
    }
    if let Some(lost) = track.lost.and_then(|lost| x.at(lost)) {
        scene.dashed((lost, panel.top), (lost, panel.bottom), Ink::TEXT, 1.0, 2.0);
        let label = Label::new(lost + 4.0, panel.top + panel.height() / 4.0, "card lost: no readings");
        scene.text(label.size(SMALL).ink(Ink::MUTED));
    }
    if panel.right - done > 60.0 {
        let label = Label::new((done + panel.right) / 2.0, panel.top + panel.height() / 4.0, "done");
        scene.text(label.size(SMALL).ink(Ink::MUTED).align(Align::Middle));
    }
    if place.last_row {
        for (tick, label) in x.ticks.iter().zip(x.labels()) {
            if let Some(at) = x.at(*tick) {
                let label = Label::new(at, panel.bottom + 12.0, label);
                scene.text(label.size(SMALL).ink(Ink::MUTED).align(Align::Middle));
            }
        }
        let middle = (panel.left + panel.right) / 2.0;
        let name =
            Label::new(middle, panel.bottom + 29.0, "seconds of measured steps, rounds one after another");
        scene.text(name.size(SMALL).ink(Ink::MUTED).align(Align::Middle));
    }
}

fn place_point(point: &Point, x: &Axis, y: &Axis) -> Option<(f64, f64)> {
    Some((x.at(point.0)?, y.at(point.1?)?))
}

/// Live memory over time, one line a card, engines side by side on the same axes.
pub(super) fn draw_memory(view: &OverTime) -> Option<Scene> {
    let largest = view.values().reduce(f64::max)?;
    let (unit, size) = text::memory_unit(largest);
    let mut scene = Scene::new(WIDTH, 300.0);
    let columns = view.engines.len() as f64;
    let (left_edge, label_room) = (64.0, 58.0);
    let width = (WIDTH - left_edge - MARGIN - (GAP + label_room) * (columns - 1.0) - label_room) / columns;
    for (column, engine) in view.engines.iter().enumerate() {
        let left = left_edge + column as f64 * (width + GAP + label_room);
        let panel = Panel { left, top: 42.0, right: left + width, bottom: 254.0 };
        let ink = palette::engine(engine.engine.name());
        let name = text::engine(engine.engine.name());
        scene.text(Label::new(left, 20.0, name).size(15.0).bold().ink(ink));
        let y = Axis::from_zero(largest / size, panel.upwards());
        let x = Axis::exactly_from_zero(view.seconds(), panel.across());
        horizontal_axis(&mut scene, &panel, &x, "seconds of measured steps, rounds one after another");
        if column == 0 {
            vertical_axis(&mut scene, &panel, &y, &format!(" {unit}"));
        } else {
            for at in y.ticks.iter().filter_map(|tick| y.at(*tick)) {
                scene.line((panel.left, at), (panel.right, at), Ink::GRID, 1.0);
            }
        }
        let mut ends = Vec::new();
        for (row, track) in engine.tracks.iter().enumerate() {
            // The first card in full colour, the others paler and paler: line ends carry the names.
            let strength = 1.0 - 0.55 * row as f64 / engine.tracks.len().max(2) as f64;
            let points = downsample(&track.points, view.seconds(), panel.width() as usize * 2);
            for run in points.split(|point| point.1.is_none()) {
                let scaled = run.iter().filter_map(|(t, value)| Some((x.at(*t)?, y.at((*value)? / size)?)));
                scene.path(scaled.collect(), ink.tint(strength), if row == 0 { 2.0 } else { 1.5 });
            }
            let last = track.points.iter().rev().find_map(|(t, value)| value.map(|value| (*t, value / size)));
            if let Some((end, value)) = last.and_then(|(t, value)| Some((x.at(t)?, y.at(value)?))) {
                ends.push((value, end, track.card));
            }
        }
        for (value, end, name) in line_ends(ends) {
            scene.text(Label::new(end + 6.0, value, name).size(SMALL));
        }
    }
    Some(scene)
}

/// Names at line ends, moved apart where they would cover each other; cards at one height share a label.
fn line_ends(mut ends: Vec<(f64, f64, usize)>) -> Vec<(f64, f64, String)> {
    const LINE: f64 = 12.0;
    ends.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.2.cmp(&b.2)));
    let mut groups: Vec<(f64, f64, Vec<usize>)> = Vec::new();
    for (y, x, card) in ends {
        match groups.last_mut() {
            Some((at, end, cards)) if y - *at < LINE => {
                cards.push(card);
                *end = end.max(x);
            }
            _ => groups.push((y, x, vec![card])),
        }
    }
    let name = |cards: &mut Vec<usize>| {
        cards.sort_unstable();
        match cards.as_slice() {
            [one] => format!("card {one}"),
            [first, .., last] if last - first + 1 == cards.len() => format!("cards {first}–{last}"),
            several => {
                format!("cards {}", several.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
            }
        }
    };
    groups.into_iter().map(|(y, x, mut cards)| (y, x, name(&mut cards))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_ends_at_one_height_share_a_label() {
        let ends = vec![(100.0, 50.0, 2), (10.0, 50.0, 0), (101.0, 50.0, 1), (102.0, 50.0, 3)];
        let names: Vec<String> = line_ends(ends).into_iter().map(|(_, _, name)| name).collect();
        assert_eq!(names, ["card 0", "cards 1–3"]);
    }
}
