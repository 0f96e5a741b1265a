//! What a chart consists of before anything is drawn: plain shapes in CSS pixels.
//!
//! Charts build scenes and stay pure; [`super::render`] turns a scene into SVG and PNG.

use super::palette::Ink;

/// A finished picture.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scene {
    pub(super) width: f64,
    pub(super) height: f64,
    pub(super) shapes: Vec<Shape>,
}

/// One thing to draw. Lengths and positions in CSS pixels, the origin at the top left.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Shape {
    Rect {
        x: f64,
        y: f64,
        width: f64,
        height: f64,
        fill: Ink,
    },
    /// A line through the points.
    Path {
        points: Vec<(f64, f64)>,
        stroke: Ink,
        width: f64,
    },
    /// The inside of the points.
    Polygon {
        points: Vec<(f64, f64)>,
        fill: Ink,
    },
    Disc {
        x: f64,
        y: f64,
        radius: f64,
        fill: Ink,
    },
    Text(Label),
}

/// Text at a point.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Label {
    pub(super) x: f64,
    /// Middle of the line's height.
    pub(super) y: f64,
    pub(super) text: String,
    pub(super) size: f64,
    pub(super) ink: Ink,
    pub(super) weight: Weight,
    pub(super) align: Align,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Weight {
    Regular,
    Bold,
}

/// Which end of the text is at its point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Align {
    Left,
    Middle,
    Right,
}

impl Label {
    pub(super) fn new(x: f64, y: f64, text: impl Into<String>) -> Self {
        Self {
            x,
            y,
            text: text.into(),
            size: 12.0,
            ink: Ink::TEXT,
            weight: Weight::Regular,
            align: Align::Left,
        }
    }

    pub(super) fn size(self, size: f64) -> Self {
        Self { size, ..self }
    }

    pub(super) fn ink(self, ink: Ink) -> Self {
        Self { ink, ..self }
    }

    pub(super) fn bold(self) -> Self {
        Self { weight: Weight::Bold, ..self }
    }

    pub(super) fn align(self, align: Align) -> Self {
        Self { align, ..self }
    }
}

impl Scene {
    pub(super) fn new(width: f64, height: f64) -> Self {
        Self { width, height, shapes: Vec::new() }
    }

    pub(super) fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, fill: Ink) {
        if width > 0.0 && height > 0.0 {
            self.shapes.push(Shape::Rect { x, y, width, height, fill });
        }
    }

    pub(super) fn path(&mut self, points: Vec<(f64, f64)>, stroke: Ink, width: f64) {
        if points.len() > 1 {
            self.shapes.push(Shape::Path { points, stroke, width });
        }
    }

    pub(super) fn line(&mut self, from: (f64, f64), to: (f64, f64), stroke: Ink, width: f64) {
        self.path(vec![from, to], stroke, width);
    }

    /// A line of dashes with gaps of the same length.
    pub(super) fn dashed(&mut self, from: (f64, f64), to: (f64, f64), stroke: Ink, width: f64, dash: f64) {
        let length = (to.0 - from.0).hypot(to.1 - from.1);
        let at = |d: f64| {
            let part = (d / length).min(1.0);
            (from.0 + (to.0 - from.0) * part, from.1 + (to.1 - from.1) * part)
        };
        let pieces = (length / (2.0 * dash)).ceil().clamp(0.0, 1000.0) as usize;
        for piece in 0..pieces {
            let start = piece as f64 * 2.0 * dash;
            self.line(at(start), at(start + dash), stroke, width);
        }
    }

    pub(super) fn polygon(&mut self, points: Vec<(f64, f64)>, fill: Ink) {
        if points.len() > 2 {
            self.shapes.push(Shape::Polygon { points, fill });
        }
    }

    pub(super) fn disc(&mut self, x: f64, y: f64, radius: f64, fill: Ink) {
        self.shapes.push(Shape::Disc { x, y, radius, fill });
    }

    pub(super) fn text(&mut self, label: Label) {
        self.shapes.push(Shape::Text(label));
    }

    /// A rectangle of slanted lines on a pale ground: nothing is being done here. It reads without colour.
    pub(super) fn hatched(&mut self, x: f64, y: f64, width: f64, height: f64) {
        self.rect(x, y, width, height, Ink::WAIT_GROUND);
        const PITCH: f64 = 5.0;
        let mut start = -height;
        while start < width && width > 1.5 {
            // From (start, bottom) upwards to the right, cut at the sides.
            let (left, right) = (start.max(0.0), (start + height).min(width));
            if right > left {
                let from = (x + left, y + height - (left - start));
                let to = (x + right, y + height - (right - start));
                self.line(from, to, Ink::WAIT_LINES, 1.0);
            }
            start += PITCH;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hatching_stays_inside_its_rectangle() {
        let mut scene = Scene::new(100.0, 100.0);
        scene.hatched(10.0, 20.0, 33.0, 12.0);
        for shape in &scene.shapes {
            if let Shape::Path { points, .. } = shape {
                for (x, y) in points {
                    assert!((10.0..=43.0).contains(x) && (20.0..=32.0).contains(y), "({x}, {y})");
                }
            }
        }
        assert!(scene.shapes.len() > 5);
    }

    #[test]
    fn dashes_end_where_the_line_ends() {
        let mut scene = Scene::new(100.0, 100.0);
        scene.dashed((0.0, 0.0), (10.0, 0.0), Ink::GRID, 1.0, 4.0);
        assert_eq!(scene.shapes.len(), 2);
        let Shape::Path { points, .. } = &scene.shapes[1] else { panic!("a path") };
        assert_eq!(points, &[(8.0, 0.0), (10.0, 0.0)]);
    }
}
