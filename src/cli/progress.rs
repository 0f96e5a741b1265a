//! One line that says how far a run is. Drawn on a terminal only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How far a run is, in steps.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Of this many steps; hidden where standard error is not a terminal.
    pub(crate) fn new(steps: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        // The template is a constant that the tests draw with; the plain bar stands in for a broken one.
        if let Ok(style) = ProgressStyle::with_template("{msg:24} [{bar:30}] {percent:>3} %  {eta} left") {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar }
    }

    /// What is being done now.
    pub(crate) fn doing(&self, what: String) {
        self.bar.set_message(what);
    }

    /// One step further.
    pub(crate) fn step(&self) {
        self.bar.inc(1);
    }

    /// As far as this, whatever was done of it: a cell that failed will not do its other steps.
    pub(crate) fn at(&self, step: u64) {
        self.bar.set_position(step);
    }

    /// Prints something above the line.
    pub(crate) fn aside(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_template_is_one() {
        indicatif::ProgressStyle::with_template("{msg:24} [{bar:30}] {percent:>3} %  {eta} left").unwrap();
    }
}
