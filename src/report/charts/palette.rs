//! Colours, the same in every chart. All can be told apart by people who do not see red and green.
//!
//! Engines follow Okabe and Ito. Among phases, cool colours compute, warm ones move data, and grey
//! hatching waits. The page recolours text, grid and ground for dark screens by these very values.

use crate::metrics::phase::Phase;

/// An opaque colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ink(pub(super) u8, pub(super) u8, pub(super) u8);

impl Ink {
    pub(super) const PAPER: Self = Self(0xFF, 0xFF, 0xFF);
    pub(super) const TEXT: Self = Self(0x1F, 0x23, 0x28);
    pub(super) const MUTED: Self = Self(0x59, 0x63, 0x6E);
    pub(super) const GRID: Self = Self(0xE1, 0xE5, 0xEA);
    pub(super) const LANE: Self = Self(0xF5, 0xF7, 0xF9);
    pub(super) const WAIT_GROUND: Self = Self(0xEC, 0xEE, 0xF1);
    pub(super) const WAIT_LINES: Self = Self(0x9A, 0xA4, 0xAF);

    /// As SVG and CSS write it.
    pub(super) fn hex(self) -> String {
        format!("#{:02X}{:02X}{:02X}", self.0, self.1, self.2)
    }

    /// This colour over paper: solid, so that bitmaps need no blending.
    pub(super) fn tint(self, strength: f64) -> Self {
        self.over(Self::PAPER, strength)
    }

    fn over(self, ground: Self, strength: f64) -> Self {
        let mix = |c: u8, g: u8| (f64::from(g) + (f64::from(c) - f64::from(g)) * strength).round() as u8;
        Self(mix(self.0, ground.0), mix(self.1, ground.1), mix(self.2, ground.2))
    }
}

/// An engine's colour, by its name in the record.
pub(super) fn engine(name: &str) -> Ink {
    // A row that tries an option has its engine's colour.
    match name.split('[').next().unwrap_or_default() {
        "single" => Ink(0x6B, 0x75, 0x80),
        "single_per_card" => Ink(0x8C, 0x96, 0xA1),
        "dp" => Ink(0xD5, 0x5E, 0x00),
        "ddp" => Ink(0x00, 0x72, 0xB2),
        "torch_dp" => Ink(0xE6, 0x9F, 0x00),
        "torch_ddp" => Ink(0x56, 0xB4, 0xE9),
        "torch_single" => Ink(0xB0, 0xA8, 0x90),
        _ => Ink(0x00, 0x9E, 0x73),
    }
}

/// A phase's colour. Waiting is hatched and has none.
pub(super) fn phase(phase: Phase) -> Ink {
    match phase {
        Phase::Data => Ink(0xB7, 0xC7, 0xD6),
        Phase::Forward => Ink(0x7F, 0xC4, 0xEA),
        Phase::Loss => Ink(0x3C, 0xB3, 0xA0),
        Phase::Backward => Ink(0x2B, 0x6C, 0xB0),
        Phase::Update => Ink(0x1B, 0x4F, 0x4A),
        Phase::Scatter => Ink(0xF7, 0xD0, 0x6B),
        Phase::Replicate => Ink(0xF0, 0x8C, 0x2E),
        Phase::Gather => Ink(0xF2, 0xA3, 0xB3),
        Phase::Reduce => Ink(0xB8, 0x2E, 0x3C),
        Phase::AllReduce => Ink(0xE0, 0x5A, 0x4E),
        Phase::Wait => Ink::WAIT_LINES,
    }
}

/// How strong an engine's colour is under its curve.
pub(super) const AREA: f64 = 0.35;

/// Each area colour, and what stands for it on a dark ground.
pub(super) fn areas_on_dark() -> Vec<(Ink, Ink)> {
    const DARK: Ink = Ink(0x16, 0x1B, 0x21);
    let names = ["single", "single_per_card", "dp", "ddp", "torch_single", "torch_dp", "torch_ddp", ""];
    names.map(engine).map(|ink| (ink.tint(AREA), ink.over(DARK, 0.5))).to_vec()
}
