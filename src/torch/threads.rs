//! How many threads libtorch's operators use.

/// Sets OpenMP's width for operators called from this thread: under OpenMP the setting is per thread,
/// so every replica thread calls it for itself. MKL's own width is the process's, and set by the last call.
pub fn set_intra_op(threads: usize) {
    // A thread's first operator adopts the width that any thread set last; asking makes that happen
    // now, so that it cannot undo what is set here.
    let _ = intra_op();
    tch::set_num_threads(i32::try_from(threads.max(1)).unwrap_or(i32::MAX));
}

/// Operators called from this thread use this many threads.
pub fn intra_op() -> usize {
    tch::get_num_threads().unsigned_abs() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_width_is_each_threads_own() {
        let wide = std::thread::spawn(|| {
            set_intra_op(3);
            std::thread::spawn(|| set_intra_op(1)).join().unwrap();
            intra_op()
        });
        assert_eq!(wide.join().unwrap(), 3);
    }
}
