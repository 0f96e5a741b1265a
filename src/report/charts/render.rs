//! Scenes to files: SVG and PNG by plotters, with the bundled font and no other.
//!
//! No system font is looked for, so a bare container and a broken font folder draw the same picture.

use super::palette::Ink;
use super::scene::{Align, Label, Scene, Shape, Weight};
use crate::error::Kind;
use crate::{Error, Result};
use plotters::backend::{BitMapBackend, DrawingBackend, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontFamily, FontStyle, IntoFont, RGBColor, ShapeStyle, TextStyle};
use std::sync::OnceLock;

/// Device pixels of a CSS pixel: backends place things on whole pixels, and screens are dense.
const DENSITY: f64 = 2.0;

/// plotters' font size is the height of a line; CSS's is the em. This is its own SVG factor.
const LINE_PER_EM: f64 = 1.24;

/// How far down, in ems, each backend's text must go for capitals and figures to be centred: the
/// baseline belongs 0.36 em below the middle; one backend puts it half an ex down, the other 0.12 em.
const SVG_NUDGE: f64 = 0.09;
const BITMAP_NUDGE: f64 = 0.24;

/// The generic family: pages choose their own face for SVG text, bitmaps use the bundled one.
const FAMILY: &str = "sans-serif";

/// The scene as an SVG document; `alt` is what a screen reader says.
pub(super) fn svg(scene: &Scene, alt: &str) -> Result<String> {
    register_fonts()?;
    let mut text = String::new();
    let size = device_size(scene);
    paint(SVGBackend::with_string(&mut text, size), scene, SVG_NUDGE)?;
    // Shown at its CSS size, drawn in finer units.
    let dense = format!("width=\"{}\" height=\"{}\"", size.0, size.1);
    let shown = format!(
        "role=\"img\" aria-label=\"{}\" width=\"{}\" height=\"{}\"",
        escape(alt),
        scene.width,
        scene.height
    );
    Ok(text.replacen(&dense, &shown, 1))
}

/// The scene as a PNG file on white.
pub(super) fn png(scene: &Scene) -> Result<Vec<u8>> {
    register_fonts()?;
    let (width, height) = device_size(scene);
    let mut pixels = vec![0; width as usize * height as usize * 3];
    paint(BitMapBackend::with_buffer(&mut pixels, (width, height)), scene, BITMAP_NUDGE)?;
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let failed = |e: png::EncodingError| Error::new(Kind::Io, format!("cannot encode a PNG: {e}"));
    let mut writer = encoder.write_header().map_err(failed)?;
    writer.write_image_data(&pixels).map_err(failed)?;
    writer.finish().map_err(failed)?;
    Ok(file)
}

/// Width of a text in CSS pixels, as the bundled font sets it.
pub(super) fn text_width(text: &str, size: f64) -> f64 {
    // A font that cannot measure cannot draw either, and drawing reports it.
    let measured = register_fonts().ok().and_then(|()| {
        let font = (FontFamily::Name(FAMILY), size * LINE_PER_EM * DENSITY).into_font();
        font.box_size(text).ok()
    });
    measured.map_or(0.0, |(width, _)| f64::from(width) / DENSITY)
}

fn device_size(scene: &Scene) -> (u32, u32) {
    let device = |length: f64| (length * DENSITY).ceil().clamp(1.0, 20_000.0) as u32;
    (device(scene.width), device(scene.height))
}

fn register_fonts() -> Result<()> {
    static DONE: OnceLock<bool> = OnceLock::new();
    let done = *DONE.get_or_init(|| {
        let faces: [(FontStyle, &'static [u8]); 2] = [
            (FontStyle::Normal, include_bytes!("../../../assets/Inter-Regular.otf")),
            (FontStyle::Bold, include_bytes!("../../../assets/Inter-SemiBold.otf")),
        ];
        faces.into_iter().all(|(style, bytes)| plotters::style::register_font(FAMILY, style, bytes).is_ok())
    });
    if done {
        Ok(())
    } else {
        Err(Error::new(Kind::Corrupt, "the bundled font cannot be read").hint("build the program again"))
    }
}

fn paint<B: DrawingBackend>(mut backend: B, scene: &Scene, nudge: f64) -> Result<()> {
    let (width, height) = backend.get_size();
    backend
        .draw_rect((0, 0), (width as i32, height as i32), &filled(Ink::PAPER), true)
        .map_err(|e| cannot_draw(&e))?;
    for shape in &scene.shapes {
        draw(&mut backend, shape, nudge)?;
    }
    backend.present().map_err(|e| cannot_draw(&e))
}

fn draw<B: DrawingBackend>(backend: &mut B, shape: &Shape, nudge: f64) -> Result<()> {
    let drawn = match shape {
        Shape::Rect { x, y, width, height, fill } => {
            let (from, to) = (point((*x, *y))?, point((x + width, y + height))?);
            backend.draw_rect(from, to, &filled(*fill), true)
        }
        Shape::Path { points, stroke, width } => {
            let points = points.iter().map(|p| point(*p)).collect::<Result<Vec<_>>>()?;
            let width = (width * DENSITY).round().max(1.0) as u32;
            backend.draw_path(points, &filled(*stroke).stroke_width(width))
        }
        Shape::Polygon { points, fill } => {
            let points = points.iter().map(|p| point(*p)).collect::<Result<Vec<_>>>()?;
            backend.fill_polygon(points, &filled(*fill))
        }
        Shape::Disc { x, y, radius, fill } => {
            let radius = (radius * DENSITY).round().clamp(1.0, 1000.0) as u32;
            backend.draw_circle(point((*x, *y))?, radius, &filled(*fill), true)
        }
        Shape::Text(label) => {
            let at = point((label.x, label.y + nudge * label.size))?;
            backend.draw_text(&printable(&label.text), &text_style(label), at)
        }
    };
    drawn.map_err(|e| cannot_draw(&e))
}

fn text_style(label: &Label) -> TextStyle<'static> {
    let style = match label.weight {
        Weight::Regular => FontStyle::Normal,
        Weight::Bold => FontStyle::Bold,
    };
    let horizontal = match label.align {
        Align::Left => HPos::Left,
        Align::Middle => HPos::Center,
        Align::Right => HPos::Right,
    };
    let font = (FontFamily::Name(FAMILY), label.size * LINE_PER_EM * DENSITY, style).into_font();
    TextStyle { font, color: color(label.ink).to_backend_color(), pos: Pos::new(horizontal, VPos::Center) }
}

/// A device pixel. A position that is not a number is a mistake of the chart, and said.
fn point((x, y): (f64, f64)) -> Result<(i32, i32)> {
    if !(x.is_finite() && y.is_finite()) {
        return Err(Error::new(Kind::Corrupt, format!("cannot draw at ({x}, {y})")));
    }
    let device = |v: f64| (v * DENSITY).round().clamp(-50_000.0, 50_000.0) as i32;
    Ok((device(x), device(y)))
}

fn color(ink: Ink) -> RGBColor {
    RGBColor(ink.0, ink.1, ink.2)
}

fn filled(ink: Ink) -> ShapeStyle {
    ShapeStyle::from(color(ink)).filled()
}

fn cannot_draw(error: &dyn std::fmt::Display) -> Error {
    Error::new(Kind::Unavailable, format!("cannot draw: {error}"))
}

/// XML has no place for control characters, escaped or not.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in printable(text).chars() {
        match c {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}
